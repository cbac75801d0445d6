"""Conversion between the sources and files of kvmnn and the layers, states and token ids of the store.

Files of arrays contain opaque state as arrays of bytes, which their metadata describes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from .._util.dataclass import dataclass
from .._util.text import LOSSY, pluralize
from ..arrays.array import LazyArray, bytes_array, from_numpy
from ..arrays.cast import upcast
from ..arrays.completeness import (
    IncompleteCacheError,
    accept_absent_layers,
    infer_completeness,
    require_complete,
)
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
from ..arrays.source import LOSSY_KEY, ROUNDED_TEXT, SIDECAR_KEY, Source, join_losses
from ..bundle.passthrough import TOKEN_IDS_NAME, dump_sidecars
from ..dtypes import PARTS, Elements, Indices, Positions, parse_dtype
from ..errors import KvmnnError, ManifestError, OptionError, SourceError
from ..files.file_names import is_folder_output
from ..files.schema import Record, parse_document
from ..formats.sidecars import read_positions_by_layer, read_positions_sidecar, read_sidecar
from ..packed.cache_info import TokenIdsFingerprint
from ..packed.inference import PackedGeometry
from .namespace import Ids, to_token_ids
from .results import StoredPrefix, format_predicted_kl

if TYPE_CHECKING:
    from ..formats.mnn import PackResult, UnpackResult

STATES_KEY: Final = "kvmnn.states"
"""Metadata key of the layer, name, dtype and shape of each state that a file contains as an array of bytes."""

_STATES_VERSION = 1
_MAX_DOCUMENT_BYTES = 16 << 20


def make_state_array_name(state: OpaqueState) -> str:
    """Return the name of the array of a state; K and V have other names."""
    return f"layer_{state.layer}.state.{state.name}"


def build_state_arrays(states: Sequence[OpaqueState]) -> list[LazyArray]:
    """Return an array of bytes for each state that is not empty."""
    return [bytes_array(make_state_array_name(state), state.read()) for state in states if state.nbytes]


def encode_states_metadata(states: Sequence[OpaqueState]) -> dict[str, str]:
    """Return metadata that describes the arrays of `build_state_arrays`."""
    entries = [
        {"layer": state.layer, "name": state.name, "dtype": state.dtype, "shape": list(state.shape)}
        for state in states
        if state.nbytes
    ]
    if not entries:
        return {}
    return {STATES_KEY: json.dumps({"version": _STATES_VERSION, "states": entries}, separators=(",", ":"))}


def extract_states(source: Source) -> Source:
    """Move the arrays of bytes that the metadata of a source describes to `Source.states`."""
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
    source: Source,
    *,
    token_major: bool = False,
    with_windows: bool = False,
    with_states: bool = False,
    allow_absent_layers: bool = False,
) -> list[LayerCache]:
    """Read K and V of every layer of a source that `kvmnn.open` returns.

    Layers may differ in heads and head_dim, and V from K in head_dim. A cache may have K only (latent attention of
    llama.cpp): V has no elements then. Arrays of several dtypes (llama.cpp may quantise K and not V) are converted to
    fp32, which is exact. K of a llama.cpp cache with permuted heads is brought into the common order, unless
    `Source.inverted_transforms` forbids it.

    Parameters
    ----------
    source
        Arrays that are named by layer, as K or V.
    token_major
        Whether arrays are ``[token, kv_head, head_dim]``, if neither names nor metadata specify it.
    with_windows
        Also return layers with a sliding window that contain only the last tokens, with their positions.
    with_states
        Whether the caller stores `Source.states` as well; without them the source is incomplete.
    allow_absent_layers
        Accept arrays without layers between others, for models that have no K and V there.

    Raises
    ------
    IncompleteCacheError
        If a part of the state of the model is missing, or there are windows and `with_windows` is not set.
    SourceError
        If tokens are missing, or the cache does not start at the first token of a text.
    KvmnnError
        If the arrays are not K and V of layers, or differ in heads or tokens.
    """
    where = " ".join(source.inputs)
    completeness = source.completeness
    if with_states and completeness is not None:
        completeness = include_states(completeness, source.states)
    accepted = accept_absent_layers(completeness, source)
    if allow_absent_layers:
        completeness = accepted
    elif accepted is not None and accepted.is_complete and completeness is not None and not completeness.is_complete:
        raise IncompleteCacheError(
            f"{where}: cannot make a stored prefix of a part of the state: {'; '.join(completeness.missing)} (if the "
            "model has no K and V there: --ignore contradictions, in Python allow_absent_layers=True)"
        )
    require_complete(completeness, where, "a stored prefix")
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
        raise SourceError(f"{where}: is a batch with padding: --part batch=N takes one text of it, from 0")
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
    """Return the token ids in a source, or in the file next to it, int64; None if it has none.

    They may be more than its tokens: engines also save the id of a token that is not evaluated yet.
    """
    from ..bundle.passthrough import TOKEN_IDS_NAME
    from ..formats.mnn.token_ids import parse_token_ids

    cache_ids = source.engine_cache.token_ids if source.engine_cache is not None else None
    sidecar = read_sidecar(source, TOKEN_IDS_NAME) if cache_ids is None else None
    return cache_ids if sidecar is None else parse_token_ids(*sidecar)


def resolve_token_ids(source: Source, token_ids: Sequence[int] | Ids | Indices | None = None) -> Indices | None:
    """Return the ids of the tokens that have K and V in a source, by position; None if it has no ids.

    Parameters
    ----------
    source
        A source that `kvmnn.open` returns.
    token_ids
        Ids of its text from the first token on, which replace its own.

    Raises
    ------
    SourceError
        If there are fewer ids than tokens, or one is `NO_TOKEN` (a placeholder for a picture or embedding).
    """
    from ..formats.llama import NO_TOKEN

    saved_ids = read_saved_ids(source) if token_ids is None else np.asarray(token_ids, np.int64)
    if saved_ids is None:
        return None
    where, cache = " ".join(source.inputs), source.engine_cache
    if cache is None or (
        not cache.is_contiguous_prefix and not find_window_layers(source.completeness, read_positions_by_layer(source))
    ):
        return saved_ids  # `read_layer_caches` refuses a cache without some tokens
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
class GetResult(Record):
    """A stored prefix that was written to files.

    Parameters
    ----------
    tokens, asked
        Tokens in the files, and tokens of the requested sequence.
    dtype, other_precisions, missing
        As in `StoredPrefix`.
    written
        The files.
    """

    json_keys = "tokens asked dtype others=other_precisions missing **written label predicted_kl"

    tokens: int
    asked: int
    dtype: str | None
    other_precisions: Mapping[str, int]
    written: PackResult | UnpackResult
    missing: tuple[str, ...] = ()
    #: Whether K and V are not exactly those that were put.
    is_lossy: bool = False
    #: As in `StoredPrefix`.
    predicted_kl: float | None = field(default=None, metadata={"omit": True})

    @property
    def label(self) -> str | None:
        """Return ``LOSSY`` where K and V are not exactly those that were put; else what is known of the files."""
        return LOSSY if self.is_lossy else self.written.label

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
        if self.is_lossy:
            cost = format_predicted_kl(self.predicted_kl)
            incomplete_text += f"\n  {LOSSY}: K and V are not exactly those that were put{cost}"
        return (
            f"{self.tokens:,} of {pluralize(self.asked, 'token')}, {self.dtype}: "
            f"{remaining_text}{incomplete_text}\n{self.written}"
        )


_LOSS = f"{ROUNDED_TEXT}: from a prefix store of transform streams"


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
    """Write K and V of a prefix as files of arrays, or as a prefix cache for MNN.

    Parameters
    ----------
    prefix, token_ids
        Result of `PrefixStore.get`, and the sequence.
    output
        As for `kvmnn.formats.mnn.unpack`; for a prefix cache, its directory.
    where
        Name of the store in messages.
    geometry, name, capacity
        For a prefix cache, as for `kvmnn.formats.mnn.pack`; without them, arrays are written.
    model
        Directory of the MNN model, or a ``.gguf`` file, to be recorded with a prefix cache.
    cast
        Convert elements to the dtype of the layout of a prefix cache, rounding to nearest even.
    rerotate
        For a prefix cache, as for `kvmnn.formats.mnn.pack`. A stored prefix has the first positions: K is unchanged.
    force
        Replace existing files.
    threads
        Number of files of a prefix cache that are written concurrently; None for the number of processors. Files in a
        directory are not synchronised to the disk: after a power failure, get them again.

    Raises
    ------
    KvmnnError
        If the prefix is a miss, the ids are those of another sequence, and as `pack` and `unpack`.
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
    if prefix.label:
        cost = format_predicted_kl(prefix.predicted_kl).removeprefix(", ")
        kl_text = f"KL divergence of the predictions: {cost.removeprefix('nats ')}"
        source.metadata[LOSSY_KEY] = join_losses(prefix.loss, *([_LOSS, kl_text] if prefix.is_lossy else []))
    window_layers = [cache.layer for cache in prefix.layers if cache.tokens < prefix.tokens]
    if prefix.completeness is not None:
        _add_descriptions(source, prefix, token_ids)
    written: PackResult | UnpackResult
    if name is None and capacity is None and geometry in (None, PackedGeometry()):
        source.arrays = [*arrays, *build_state_arrays(prefix.states)]
        source.metadata |= encode_states_metadata(prefix.states)
        if prefix.completeness is None and is_folder_output(str(output), len(source.arrays)):  # dumps have them, too
            ids_text = json.dumps(list(map(int, token_ids[: prefix.tokens]))) + "\n"
            source.metadata[SIDECAR_KEY] = dump_sidecars({TOKEN_IDS_NAME: ids_text.encode()})
        if prefix.completeness is None:
            source.completeness = infer_completeness(source)
        from ..formats.mnn import unpack  # packing needs more modules, which take longer than to decode a short prefix

        written = unpack(source, output, force=force, is_in_memory=True)
    elif window_layers:
        raise OptionError(
            f"{where}: this text has windows, which the prefix cache of an MNN engine has no place for; other outputs "
            "have arrays"
        )
    elif any(not cache.value_dim for cache in prefix.layers):
        raise OptionError(f"{where}: this text has K alone, no V: MNN takes no such prefix; other outputs have arrays")
    else:
        ids = TokenIdsFingerprint.from_ids(list(token_ids[: prefix.tokens]))
        from ..formats.mnn import pack
        from ..formats.mnn.prefix_writer import PrefixWriteOptions

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
    if prefix.is_lossy:  # the files have every element of the store, and the store not every one that was put
        written = replace(written, dequantised=(*written.dequantised, "transform streams"))
    return GetResult(
        tokens=prefix.tokens,
        asked=prefix.requested_tokens,
        dtype=prefix.dtype,
        other_precisions=prefix.other_precisions,
        written=written,
        missing=prefix.missing,
        is_lossy=prefix.is_lossy,
        predicted_kl=prefix.predicted_kl,
    )


def _add_descriptions(source: Source, prefix: StoredPrefix, token_ids: Sequence[int] | Ids) -> None:
    """Describe the tokens of each layer, and what the arrays lack, if the layers differ."""
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
