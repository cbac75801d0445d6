"""Adapters between kvmnn's sources and what the store takes and returns, opaque state included."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from .._util.text import pluralize
from ..arrays.array import LazyArray, bytes_array, from_numpy
from ..arrays.cast import upcast
from ..arrays.completeness import IncompleteCacheError, require_complete
from ..arrays.engine_cache import EngineCacheInfo
from ..arrays.engine_transforms import to_common_order
from ..arrays.layer_cache import LayerCache
from ..arrays.layers import (
    LayerArray,
    check_kv_shapes,
    collect_layers_or_latents,
    format_array_name,
    format_input_prefix,
)
from ..arrays.opaque_state import MAX_STATE_AXES, MAX_STATE_NAME_CHARS, OpaqueState, include_states
from ..arrays.positions import describe_windows, find_window_layers
from ..arrays.source import Source
from ..bundle.passthrough import TOKEN_IDS_NAME
from ..dtypes import PARTS, Elements, Indices, Positions, parse_dtype
from ..errors import KvmnnError, ManifestError, OptionError, SourceError
from ..files.schema import parse_document
from ..formats.llama import NO_TOKEN
from ..formats.mnn import PackResult, UnpackResult, pack, unpack
from ..formats.mnn.prefix_writer import PrefixWriteOptions
from ..formats.mnn.token_ids import parse_token_ids
from ..formats.sidecars import read_positions_by_layer, read_positions_sidecar, read_sidecar
from ..packed.cache_info import TokenIdsFingerprint
from ..packed.inference import PackedGeometry
from .namespace import Ids, to_token_ids
from .results import StoredPrefix

STATES_KEY: Final = "kvmnn.states"
"""Metadata key for layer, name, dtype and shape of each state that a file has as an array of bytes."""

_STATES_VERSION = 1
_MAX_DOCUMENT_BYTES = 16 << 20


def make_state_array_name(state: OpaqueState) -> str:
    """Return the name of the array, which no K and V has."""
    return f"layer_{state.layer}.state.{state.name}"


def build_state_arrays(states: Sequence[OpaqueState]) -> list[LazyArray]:
    """Return the arrays of all states that have bytes."""
    return [bytes_array(make_state_array_name(state), state.read()) for state in states if state.nbytes]


def encode_states_metadata(states: Sequence[OpaqueState]) -> dict[str, str]:
    """Return metadata that tells what the arrays of `build_state_arrays` are."""
    entries = [
        {"layer": state.layer, "name": state.name, "dtype": state.dtype, "shape": list(state.shape)}
        for state in states
        if state.nbytes
    ]
    return (
        {STATES_KEY: json.dumps({"version": _STATES_VERSION, "states": entries}, separators=(",", ":"))}
        if entries
        else {}
    )


def extract_states(source: Source) -> Source:
    """Return a source with the arrays that are state as `Source.states`, where its metadata tells them.

    Raises
    ------
    ManifestError
        For malformed metadata, and for state whose array is missing or contains numbers.
    """
    if STATES_KEY not in source.metadata:
        return source
    label = f"{' '.join(source.inputs)}: metadata {STATES_KEY!r}"
    root = parse_document(source.metadata[STATES_KEY], label, _MAX_DOCUMENT_BYTES)
    root.get("version").check_version(_STATES_VERSION)
    arrays = {array.name: array for array in source.arrays}
    states: list[OpaqueState] = []
    for node in root.get("states").read_list():
        name, dtype = node.get("name"), node.get("dtype")
        for text_node in (name, dtype):
            if not 0 < len(text_node.read_str()) <= MAX_STATE_NAME_CHARS:
                raise text_node.error(f"1 to {MAX_STATE_NAME_CHARS} characters")
        state = OpaqueState(
            layer=node.get("layer").read_int(0),
            name=name.read_str(),
            dtype=dtype.read_str(),
            shape=tuple(axis.read_int(0) for axis in node.get("shape").read_list(max_len=MAX_STATE_AXES)),
            nbytes=0,
            reader=bytes,
        )
        array = arrays.pop(make_state_array_name(state), None)
        if array is None or array.itemsize != 1:
            raise ManifestError(f"{label}: there is no array of bytes called {make_state_array_name(state)!r}")
        states.append(replace(state, nbytes=array.nbytes, reader=partial(_read_state_bytes, array)))
    return replace(source, arrays=list(arrays.values()), states=tuple(states))


def _read_state_bytes(array: LazyArray) -> bytes:
    return array.to_numpy().tobytes()


def read_layer_caches(
    source: Source, *, token_major: bool = False, with_windows: bool = False, with_states: bool = False
) -> list[LayerCache]:
    """K and V of every layer of anything that `kvmnn.open` opens.

    Layers may differ in heads and head_dim, and V from K in head_dim. Caches of engines may have K alone (llama.cpp's
    latent attention): V has no words then.

    Arrays of several types (llama.cpp's K may be quantised, and V not) become fp32, which has every number of them.

    K of a llama.cpp cache that surely lies in another order than that of other engines is brought into theirs, unless
    `Source.inverted_transforms` says otherwise.

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
    windows = (
        find_window_layers(source.completeness, read_positions_by_layer(source))
        if source.completeness is not None
        else {}
    )
    if windows and not with_windows:
        sentence = describe_windows(source.completeness, windows)
        raise IncompleteCacheError(f"{where}: cannot make a stored prefix: {sentence}")
    if source.cache is not None:
        for info in source.cache.layers:
            if info.layer not in windows and info.text_position_runs != ((0, info.tokens),):
                raise SourceError(f"{where}: layer {info.layer} was cut: a cache without some tokens is no prefix")
    if source.engine_cache is not None and source.engine_cache.has_padding:
        raise SourceError(f"{where}: is a batch with padding: --batch N takes one text of it, from 0")
    if source.engine_cache is not None and not windows and not source.engine_cache.is_contiguous_prefix:
        raise SourceError(f"{where}: holds no beginning of a text, whole and in order: {source.engine_cache}")
    arrays = collect_layers_or_latents(to_common_order(source)[0], token_major=token_major)
    has_values = any(entry.part == "value" for entry in arrays)
    if has_values:
        check_kv_shapes(arrays, format_input_prefix(source), require_same_head_dim=False)
    key_entries = arrays[:: 1 + has_values]
    layer_numbers = [entry.layer for entry in key_entries]
    recorded_positions = read_positions_sidecar(source, [entry.geometry[1] for entry in key_entries], layer_numbers)
    for entry, positions in (
        zip(key_entries, recorded_positions.positions_in_text, strict=True) if recorded_positions else ()
    ):
        if entry.layer not in windows and positions.max(initial=-1) >= positions.shape[-1]:  # they ascend
            raise SourceError(f"{where}: layer {entry.layer} was cut: a cache without some tokens is no prefix")
    if len({entry.array.dtype for entry in arrays}) > 1:
        arrays = [replace(entry, array=upcast(entry.array)) for entry in arrays]
    elements = [_read_elements(entry) for entry in arrays]
    value_elements = elements[1::2] if has_values else [keys[:, :, :0] for keys in elements]
    pairs = zip(key_entries, elements[:: 1 + has_values], value_elements, strict=True)
    num_seen_tokens = 1 + max((int(positions.max()) for positions in windows.values()), default=-1)
    return [
        _make_layer_cache(entry.layer, keys, values, windows.get(entry.layer), num_seen_tokens)
        for entry, keys, values in pairs
    ]


def read_saved_ids(source: Source) -> Indices | None:
    """Return the token ids that a source has itself, or that lie alongside its arrays, int64; None where it has none.

    They may be more than its tokens: engines also save the id of a token that is not evaluated yet.
    """
    cache_ids = source.engine_cache.token_ids if source.engine_cache is not None else None
    sidecar = read_sidecar(source, TOKEN_IDS_NAME) if cache_ids is None else None
    return cache_ids if sidecar is None else parse_token_ids(*sidecar)


def resolve_token_ids(source: Source, token_ids: Sequence[int] | Ids | Indices | None = None) -> Indices | None:
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
    saved_ids = read_saved_ids(source) if token_ids is None else np.asarray(token_ids, np.int64)
    if saved_ids is None:
        return None
    where, cache = " ".join(source.inputs), source.engine_cache
    if cache is None or (
        not cache.is_contiguous_prefix and not find_window_layers(source.completeness, read_positions_by_layer(source))
    ):
        return saved_ids  # `layers_of` refuses a cache that was cut
    runs = cache.layer_position_runs
    num_cached_tokens = (
        cache.tokens if runs is None else max((sum(run) for head_runs in runs for run in head_runs), default=0)
    )
    if saved_ids.size < num_cached_tokens:
        raise SourceError(
            f"{where}: has {pluralize(saved_ids.size, 'token id')} for {pluralize(num_cached_tokens, 'token')}: "
            f"specify all ids (--token-ids)"
        )
    ids = saved_ids[:num_cached_tokens]
    if (missing_positions := np.flatnonzero(ids == NO_TOKEN)).size:
        raise SourceError(
            f"{where}: token {missing_positions[0]} has the id {NO_TOKEN}, which stands for any picture or embedding: "
            f"specify "
            "ids that tell them apart (--token-ids)"
        )
    return ids


def _make_layer_cache(
    layer: int, keys: Elements, values: Elements, positions: Positions | None, num_seen_tokens: int
) -> LayerCache:
    if positions is None:
        return LayerCache(layer=layer, keys=keys, values=values)
    return LayerCache(layer=layer, keys=keys, values=values, positions=positions, tokens_seen=num_seen_tokens)


@dataclass(frozen=True, kw_only=True)
class GetResult:
    """A stored beginning of a text that was written to files.

    Parameters
    ----------
    tokens, asked
        Tokens that the files hold, of how many that the text has.
    missing
        As that of `StoredPrefix`: a model cannot continue from the files alone.
    dtype, others
        Of what was stored, as those of `StoredPrefix`.
    written
        The files.
    """

    tokens: int
    asked: int
    dtype: str | None
    others: Mapping[str, int]
    written: PackResult | UnpackResult
    missing: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        stored = {"dtype": self.dtype, "others": dict(self.others), "missing": list(self.missing)}
        return {"tokens": self.tokens, "asked": self.asked, **stored, **self.written.to_dict()}

    def __str__(self) -> str:
        num_remaining = self.asked - self.tokens
        remaining_text = (
            f"{num_remaining:,} {'is' if num_remaining == 1 else 'are'} left to compute"
            if num_remaining
            else "all of the text"
        )
        if self.missing:
            remaining_text = "layers with full attention alone"
        incomplete_text = "".join(f"\n  INCOMPLETE: {sentence}" for sentence in self.missing)
        return (
            f"{self.tokens:,} of {pluralize(self.asked, 'token')}, {self.dtype}: "
            f"{remaining_text}{incomplete_text}\n{self.written}"
        )


def write_prefix(
    prefix: StoredPrefix,
    token_ids: Sequence[int] | Ids,
    output: str,
    *,
    where: str,
    geometry: PackedGeometry | None = None,
    name: str | None = None,
    capacity: int | None = None,
    model: str | None = None,
    cast: bool = False,
    rerotate: bool = False,
    force: bool = False,
    threads: int | None = None,
) -> GetResult:
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
        raise KvmnnError(
            f"{where}: nothing of this text of {pluralize(prefix.requested_tokens, 'token')} is stored under this model"
        )
    if prefix.token_ids is not None and not np.array_equal(to_token_ids(token_ids)[: prefix.tokens], prefix.token_ids):
        raise KvmnnError(f"{where}: the token ids are not those of the prefix of {pluralize(prefix.tokens, 'token')}")
    arrays = [
        from_numpy(format_array_name(cache.layer, part), elements)
        for cache in prefix.layers
        for part, elements in zip(PARTS, (cache.keys, cache.values), strict=True)
        if elements.shape[2]
    ]
    source = Source(arrays, inputs=(where,))
    window_layers = [cache.layer for cache in prefix.layers if cache.tokens < prefix.tokens]
    if prefix.completeness is not None:
        _add_descriptions(source, prefix, token_ids)
    written: PackResult | UnpackResult
    if name is None and capacity is None and geometry in (None, PackedGeometry()):
        source.arrays = [*arrays, *build_state_arrays(prefix.states)]
        source.metadata |= encode_states_metadata(prefix.states)
        written = unpack(source, output, force=force)
    elif window_layers:
        raise OptionError(
            f"{where}: this text has windows, which the prefix cache of an MNN engine has no place for; other outputs "
            "have arrays"
        )
    elif any(not cache.value_dim for cache in prefix.layers):
        raise OptionError(f"{where}: this text has K alone, no V: MNN takes no such prefix; other outputs have arrays")
    else:
        ids = TokenIdsFingerprint.from_ids(list(token_ids[: prefix.tokens]))
        written = pack(
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
            write_options=PrefixWriteOptions(is_durable=False, compare_in_memory=True, threads=threads),
        )
    return GetResult(
        tokens=prefix.tokens,
        asked=prefix.requested_tokens,
        dtype=prefix.dtype,
        others=prefix.others,
        written=written,
        missing=prefix.missing,
    )


def _add_descriptions(source: Source, prefix: StoredPrefix, token_ids: Sequence[int] | Ids) -> None:
    """Note down which tokens each layer of a prefix has, and what the arrays lack, where these are not all alike."""
    layers, completeness = prefix.layers, prefix.completeness
    has_windows = any(cache.tokens < prefix.tokens for cache in layers)
    if completeness is not None:
        states = (
            replace(layer_state, included=False, location="in arrays of bytes")
            if layer_state.kind == "recurrent"
            else layer_state
            for layer_state in completeness.layers
        )
        source.completeness = completeness if completeness.missing else replace(completeness, layers=tuple(states))
    heads = tuple(cache.kv_heads for cache in layers)
    dims = tuple(cache.head_dim for cache in layers)
    source.engine_cache = EngineCacheInfo(
        engine="kvmnn",
        kind="stored prefix",
        layers=len(layers),
        kv_heads=heads[0] if len({*heads}) == 1 else None,
        head_dim=dims[0] if len({*dims}) == 1 else None,
        layer_kv_heads=heads if len({*heads}) > 1 else (),
        layer_head_dims=dims if len({*dims}) > 1 else (),
        tokens=max((cache.tokens for cache in layers), default=0),
        types=(str(prefix.dtype),) * (2 * len(layers)),
        layer_positions=tuple(cache.positions for cache in layers) if has_windows else None,
        token_ids=np.asarray(token_ids[: prefix.tokens], np.int64),
    )


def _read_elements(entry: LayerArray) -> Elements:
    elements = entry.array.to_numpy().view(parse_dtype(entry.array.dtype).numpy_dtype)
    return elements.transpose(1, 0, 2) if entry.token_major else elements
