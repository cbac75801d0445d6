"""Between what kvmnn reads and writes and what the store takes and gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.casting import widened
from ..arrays.completeness import IncompleteCacheError, require_complete
from ..arrays.engine_cache import EngineCache
from ..arrays.layer_cache import LayerCache
from ..arrays.layers import LayerArray, array_name, check_pairs, place_said, sorted_with_latents
from ..arrays.named_array import in_memory
from ..arrays.opaque_state import include_states
from ..arrays.own_order import for_other_engines
from ..arrays.source import Source
from ..arrays.window_layers import describe_windows, find_window_layers
from ..bundle.beside import TOKEN_IDS
from ..dtypes import PARTS, Indices, Positions, Words, by_name
from ..errors import KvmnnError, OptionError, SourceError
from ..formats.beside import text_beside
from ..formats.llama import NO_TOKEN
from ..formats.mnn import Packed, Unpacked, pack, unpack
from ..formats.mnn.prefix_writing import Making
from ..formats.mnn.token_ids import parsed_token_ids
from ..formats.noted_positions import held_by, noted_positions
from ..packed.cache_info import TokenIds
from ..packed.fitting import Geometry
from ..text import count
from .results import Prefix
from .state_arrays import note_states, state_arrays
from .token_ids import Ids, as_ids


def layers_of(
    source: Source, *, token_major: bool = False, with_windows: bool = False, with_states: bool = False
) -> list[LayerCache]:
    """K and V of every layer of anything that `kvmnn.open` opens.

    Layers may differ in heads and head_dim, and V from K in head_dim. Caches of engines may have K alone (llama.cpp's
    latent attention): V has no words then.

    Arrays of several types (llama.cpp's K may be quantised, and V not) become fp32, which has every number of them.

    K of a llama.cpp cache that surely lies in another order than that of other engines is brought into theirs, unless
    `Source.undone` says otherwise.

    Parameters
    ----------
    source
        Arrays whose names say which layer's K or V they are.
    token_major
        Whether they are ``[token, kv_head, head_dim]``, where nothing says so.
    with_windows
        Also return layers with a sliding window that contain the last tokens of the text alone, with their positions.
    with_states
        Whether the caller keeps `Source.states` as well, so that nothing is missing without them.

    Raises
    ------
    IncompleteCacheError
        For a part of the model's state, and for such layers without `with_windows`.
    OptionError
        For K and V that were made from int8.
    SourceError
        For a cache that was cut, or holds no beginning of a text.
    KvmnnError
        For arrays that are not K and V of layers, and where these differ in heads or tokens.
    """
    where = " ".join(source.inputs)
    completeness = source.completeness
    if with_states and completeness is not None:
        completeness = include_states(completeness, source.states)
    require_complete(completeness, where, "a stored prefix")
    if source.lossy:
        raise OptionError(f"{where}: K and V were made from int8: no engine takes such a prefix up again")
    windows = find_window_layers(source.completeness, held_by(source)) if source.completeness is not None else {}
    if windows and not with_windows:
        sentence = describe_windows(source.completeness, windows)
        raise IncompleteCacheError(f"{where}: cannot make a stored prefix: {sentence}")
    if source.cache is not None:
        for info in source.cache.layers:
            if info.layer not in windows and info.text_runs != ((0, info.tokens),):
                raise SourceError(f"{where}: layer {info.layer} was cut: a cache without some tokens is no prefix")
    if source.engine_cache is not None and source.engine_cache.has_padding:
        raise SourceError(f"{where}: is a batch with padding: --batch N takes one text of it, from 0")
    if source.engine_cache is not None and not windows and not source.engine_cache.is_whole:
        raise SourceError(f"{where}: holds no beginning of a text, whole and in order: {source.engine_cache}")
    arrays = sorted_with_latents(for_other_engines(source)[0], token_major=token_major)
    has_values = any(entry.part == "value" for entry in arrays)
    if has_values:
        check_pairs(arrays, place_said(source), one_size=False)
    all_keys = arrays[:: 1 + has_values]
    numbers = [entry.layer for entry in all_keys]
    noted = noted_positions(source, [entry.geometry[1] for entry in all_keys], numbers)
    for entry, positions in zip(all_keys, noted.in_text, strict=True) if noted else ():
        if entry.layer not in windows and positions.max(initial=-1) >= positions.shape[-1]:  # they ascend
            raise SourceError(f"{where}: layer {entry.layer} was cut: a cache without some tokens is no prefix")
    if len({entry.array.dtype for entry in arrays}) > 1:
        arrays = [replace(entry, array=widened(entry.array)) for entry in arrays]
    words = [_words(entry) for entry in arrays]
    values = words[1::2] if has_values else [keys[:, :, :0] for keys in words]
    pairs = zip(all_keys, words[:: 1 + has_values], values, strict=True)
    seen = 1 + max((int(positions.max()) for positions in windows.values()), default=-1)
    return [_layer_cache(entry.layer, keys, v, windows.get(entry.layer), seen) for entry, keys, v in pairs]


def saved_ids(source: Source) -> Indices | None:
    """Return the token ids that a source has itself, or that lie alongside its arrays, int64; None where it has none.

    They may be more than its tokens: engines also save the id of a token that is not evaluated yet.
    """
    found = source.engine_cache.token_ids if source.engine_cache is not None else None
    beside = text_beside(source, TOKEN_IDS) if found is None else None
    return found if beside is None else parsed_token_ids(*beside)


def token_ids_of(source: Source, token_ids: Sequence[int] | Ids | Indices | None = None) -> Indices | None:
    """Return the ids of the tokens that have K and V in a source, by their positions; None where it has no ids.

    Parameters
    ----------
    source
        What `kvmnn.open` opens.
    token_ids
        Those of its text, from the first token on, instead of its own.

    Raises
    ------
    SourceError
        Where there are fewer ids than tokens, and where an id stands for no token.
    """
    saved = saved_ids(source) if token_ids is None else np.asarray(token_ids, np.int64)
    if saved is None:
        return None
    where, cache = " ".join(source.inputs), source.engine_cache
    if cache is None or (not cache.is_whole and not find_window_layers(source.completeness, held_by(source))):
        return saved  # `layers_of` refuses a cache that was cut
    runs = cache.layer_runs
    end = cache.tokens if runs is None else max((sum(run) for each in runs for run in each), default=0)
    if saved.size < end:
        raise SourceError(
            f"{where}: has {count(saved.size, 'token id')} for {count(end, 'token')}: specify all ids (--token-ids)"
        )
    ids = saved[:end]
    if (missing := np.flatnonzero(ids == NO_TOKEN)).size:
        raise SourceError(
            f"{where}: token {missing[0]} has the id {NO_TOKEN}, which stands for any picture or embedding: specify "
            "ids that tell them apart (--token-ids)"
        )
    return ids


def _layer_cache(layer: int, keys: Words, values: Words, positions: Positions | None, seen: int) -> LayerCache:
    if positions is None:
        return LayerCache(layer=layer, keys=keys, values=values)
    return LayerCache(layer=layer, keys=keys, values=values, positions=positions, tokens_seen=seen)


@dataclass(frozen=True, kw_only=True)
class Got:
    """A stored beginning of a text that was written to files.

    Parameters
    ----------
    tokens, asked
        Tokens that the files hold, of how many that the text has.
    missing
        As that of `Prefix`: a model cannot continue from the files alone.
    dtype, others
        Of what was stored, as those of `Prefix`.
    written
        The files.
    """

    tokens: int
    asked: int
    dtype: str | None
    others: Mapping[str, int]
    written: Packed | Unpacked
    missing: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        stored = {"dtype": self.dtype, "others": dict(self.others), "missing": list(self.missing)}
        return {"tokens": self.tokens, "asked": self.asked, **stored, **self.written.to_dict()}

    def __str__(self) -> str:
        rest = self.asked - self.tokens
        left = f"{rest:,} {'is' if rest == 1 else 'are'} left to compute" if rest else "all of the text"
        if self.missing:
            left = "layers with full attention alone"
        parts = "".join(f"\n  INCOMPLETE: {sentence}" for sentence in self.missing)
        return f"{self.tokens:,} of {count(self.asked, 'token')}, {self.dtype}: {left}{parts}\n{self.written}"


def write_prefix(
    prefix: Prefix,
    token_ids: Sequence[int] | Ids,
    output: str,
    *,
    where: str,
    geometry: Geometry | None = None,
    name: str | None = None,
    capacity: int | None = None,
    model: str | None = None,
    cast: bool = False,
    rerotate: bool = False,
    force: bool = False,
    threads: int | None = None,
) -> Got:
    """Write K and V of a prefix as files of arrays, or as the prefix cache that an MNN engine loads.

    Parameters
    ----------
    prefix, token_ids
        What `PrefixStore.get` found, and the text.
    output
        As for `kvmnn.formats.mnn.unpack`; of a prefix cache its directory.
    where
        What messages call the store.
    geometry, name, capacity
        Of a prefix cache, as for `kvmnn.formats.mnn.pack`; where none is given arrays are written.
    model
        Directory of the MNN model, or a ``.gguf`` file, to be noted down beside a prefix cache.
    cast
        Convert words to the dtype of the layout of a prefix cache, to nearest even.
    rerotate
        Of a prefix cache, as for `kvmnn.formats.mnn.pack`. A stored prefix has the first positions: K stays as it is.
    force
        Replace files that exist.
    threads
        Files of a prefix cache that are written at once; None for as many as there are processors. They are not brought
        to the disk by force: after a power cut, get them again.

    Raises
    ------
    KvmnnError
        Where nothing was found, for the ids of another text, and as `pack` and `unpack`.
    """
    if not prefix.tokens:
        raise KvmnnError(f"{where}: nothing of this text of {count(prefix.asked, 'token')} is stored under this model")
    if prefix.token_ids is not None and not np.array_equal(as_ids(token_ids)[: prefix.tokens], prefix.token_ids):
        raise KvmnnError(f"{where}: the token ids are not those of the prefix of {count(prefix.tokens, 'token')}")
    arrays = [
        in_memory(array_name(cache.layer, part), words)
        for cache in prefix.layers
        for part, words in zip(PARTS, (cache.keys, cache.values), strict=True)
        if words.shape[2]
    ]
    source = Source(arrays, inputs=(where,))
    last = [cache.layer for cache in prefix.layers if cache.tokens < prefix.tokens]
    if prefix.completeness is not None:
        _describe(source, prefix, token_ids)
    made: Packed | Unpacked
    if name is None and capacity is None and geometry in (None, Geometry()):
        source.arrays = [*arrays, *state_arrays(prefix.states)]
        source.metadata |= note_states(prefix.states)
        made = unpack(source, output, force=force)
    elif last:
        raise OptionError(
            f"{where}: this text has windows, which the prefix cache of an MNN engine has no place for; other outputs "
            "have arrays"
        )
    elif any(not cache.value_dim for cache in prefix.layers):
        raise OptionError(f"{where}: this text has K alone, no V: MNN takes no such prefix; other outputs have arrays")
    else:
        ids = TokenIds.of(list(token_ids[: prefix.tokens]))
        made = pack(
            replace(source, completeness=prefix.completeness, engine_cache=None, states=prefix.states),
            output,
            geometry,
            name=name,
            capacity=capacity,
            token_ids=ids,
            model=model,
            force=force,
            positions=[cache.positions for cache in prefix.layers],
            cast=cast,
            rerotate=rerotate,
            making=Making(durable=False, again=True, threads=threads),
        )
    return Got(
        tokens=prefix.tokens,
        asked=prefix.asked,
        dtype=prefix.dtype,
        others=prefix.others,
        written=made,
        missing=prefix.missing,
    )


def _describe(source: Source, prefix: Prefix, token_ids: Sequence[int] | Ids) -> None:
    """Note down which tokens each layer of a prefix has, and what the arrays lack, where these are not all alike."""
    layers, found = prefix.layers, prefix.completeness
    last = any(cache.tokens < prefix.tokens for cache in layers)
    if found is not None:
        states = (
            replace(each, included=False, location="in arrays of bytes") if each.kind == "recurrent" else each
            for each in found.layers
        )
        source.completeness = found if found.missing else replace(found, layers=tuple(states))
    heads = tuple(cache.kv_heads for cache in layers)
    dims = tuple(cache.head_dim for cache in layers)
    source.engine_cache = EngineCache(
        engine="kvmnn",
        kind="stored prefix",
        layers=len(layers),
        kv_heads=heads[0] if len({*heads}) == 1 else None,
        head_dim=dims[0] if len({*dims}) == 1 else None,
        layer_kv_heads=heads if len({*heads}) > 1 else (),
        layer_head_dims=dims if len({*dims}) > 1 else (),
        tokens=max((cache.tokens for cache in layers), default=0),
        types=(str(prefix.dtype),) * (2 * len(layers)),
        layer_positions=tuple(cache.positions for cache in layers) if last else None,
        token_ids=np.asarray(token_ids[: prefix.tokens], np.int64),
    )


def _words(entry: LayerArray) -> Words:
    words = entry.array.to_numpy().view(by_name(entry.array.dtype).numpy)
    return words.transpose(1, 0, 2) if entry.token_major else words
