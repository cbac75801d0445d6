"""Write plain arrays, or a packed cache of another backend, as a prefix cache that the engine loads.

K of an evicted prefix is rotated to the first positions, where MNN, which counts from 0 after loading, continues.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.parallel import Progress
from ..._util.text import format_range
from ...arrays import engine_transforms
from ...arrays.array import bytes_array
from ...arrays.cast import upcast
from ...arrays.completeness import Completeness, IncompleteCacheError, require_complete
from ...arrays.engine_cache import positions_to_runs
from ...arrays.layers import LayerArray, collect_layers, format_input_prefix, require_common_geometry
from ...arrays.opaque_state import OpaqueState
from ...arrays.positions import describe_windows, find_window_layers
from ...arrays.source import LOSSY_KEY, Source
from ...bundle.passthrough import POSITIONS_NAME
from ...dense import RopeConfig
from ...dense.rope import RopeFrequencies
from ...dtypes import Bytes, Part, Positions
from ...errors import KvmnnError, OptionError, SourceError
from ...packed.cache_info import CACHE_SIDECAR_SUFFIX, CacheInfo, LayerInfo, TokenIdsFingerprint
from ...packed.inference import FlashBlock, PackedGeometry, make_geometry
from ...packed.layout import HeadRowAccessor, PackLayout, get_head_bytes, get_row_bytes
from ...packed.params import FLASH_BLOCK
from ..key_rotation import RerotationResult, RotationErrorStats, expand_position_runs, rotate_array, rotate_rows
from ..sidecars import PositionsSidecar, read_positions_by_layer, read_positions_sidecar
from .layer_kinds import build_state_file_layers, index_states
from .model import check_model_agrees, read_model_geometry, try_compute_fingerprint
from .packed_files import describe_size_mismatch, has_gaps
from .packed_reader import check_ids_count, check_recorded_provenance
from .prefix_writer import PackResult, PrefixWriteOptions, build_prefix_info, write_prefix
from .rope import ModelRope, resolve_rope

_ROTATE_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class RerotationPlan:
    """Rotation of K of each layer of a cache to other positions."""

    #: Description of the new cache: first positions, and the true ones as a note.
    info: CacheInfo
    #: int64 ``[token]`` of each layer: new positions less old ones.
    distances: tuple[Positions, ...]
    #: RoPE of the model.
    rope: ModelRope
    #: Result for reports; complete after K was written.
    result: RerotationResult

    def rotate_arrays(self, arrays: Sequence[LayerArray]) -> list[LayerArray]:
        """Return K and V of every layer, K rotated as it is read."""
        return [self._rotate_array(entry) if entry.part == "key" else entry for entry in arrays]

    def _rotate_array(self, entry: LayerArray) -> LayerArray:
        rope, distances = self.rope.layers[entry.layer], self.distances[entry.layer]
        if rope is None or not distances.any():
            return entry
        if entry.array.order != "C" or entry.array.itemsize != entry.array.coded_itemsize:
            raise KvmnnError(f"array {entry.array.name!r}: K of another order than C cannot be rotated")
        array = rotate_array(entry.array, entry.token_major, distances, rope, self.result.error_stats)
        return replace(entry, array=array)

    def rotate_file(self, layer: int, keys: Bytes, layout: PackLayout, capacity: int) -> None:
        """Rotate K of a layer in place, in the bytes of its packed file."""
        rope, distances = self.rope.layers[layer], self.distances[layer]
        if rope is not None and distances.any():
            _rotate_packed(keys, layout, capacity, distances, rope, self.result.error_stats)


def plan_rerotation(
    info: CacheInfo,
    key_arrays: Sequence[LayerArray],
    rope: RopeConfig | str | None,
    model: str | None,
    *,
    label: str,
    evidence_info: CacheInfo | None = None,
    is_k_reordered: bool = False,
    ignore_contradictions: bool = False,
) -> RerotationPlan:
    """Determine how K must be rotated so that its tokens are at the first positions; the rest as of `resolve_rope`."""
    if info.layout.int8_keys:
        raise SourceError(f"{label}: int8 K cannot be rotated: the engine alone has the maxima of its channels")
    token_counts = sorted({layer.tokens for layer in info.layers})
    if len(token_counts) > 1:
        raise SourceError(
            f"{label}: layers hold {format_range(token_counts)} tokens, and MNN reads the same number of rows of every "
            "layer: K cannot be rotated to positions that suit all"
        )
    distances = tuple(np.arange(layer.tokens) - expand_position_runs(layer.positions) for layer in info.layers)
    if not any(distance.any() for distance in distances):
        layers = tuple(replace(layer, positions=((0, layer.tokens),)) for layer in info.layers)
        result = RerotationResult(
            rotation="",
            origin="",
            tokens=0,
            layers=0,
            dtype=info.layout.dtype,
            written_dtype=info.layout.dtype,
            error_stats=RotationErrorStats(),
        )
        no_rope = ModelRope((None,) * len(layers), "")
        return RerotationPlan(replace(info, layers=layers), distances, no_rope, result)
    evidence_positions = [expand_position_runs(layer.positions) for layer in (evidence_info or info).layers]
    try:
        model_rope = resolve_rope(
            key_arrays,
            evidence_positions,
            info.next_token_position,
            rope,
            model,
            is_k_reordered=is_k_reordered,
            ignore_contradictions=ignore_contradictions,
        )
    except SourceError as error:
        raise error if str(error).startswith((str(rope), str(model))) else SourceError(f"{label}: {error}") from None
    num_moved_by_layer = [
        int(np.count_nonzero(distance)) if layer_rope is not None else 0
        for distance, layer_rope in zip(distances, model_rope.layers, strict=True)
    ]
    result = RerotationResult(
        rotation=model_rope.label,
        origin=model_rope.origin,
        tokens=sum(num_moved_by_layer),
        layers=sum(num_moved > 0 for num_moved in num_moved_by_layer),
        dtype=key_arrays[0].array.dtype,
        written_dtype=info.layout.dtype,
        error_stats=RotationErrorStats(),
    )
    layers = tuple(map(_move_to_first_positions, info.layers))
    return RerotationPlan(replace(info, layers=layers, next_position=None), distances, model_rope, result)


def _move_to_first_positions(layer: LayerInfo) -> LayerInfo:
    first_runs, text_runs = ((0, layer.tokens),), layer.text_position_runs
    return replace(layer, positions=first_runs, text_positions=None if text_runs == first_runs else text_runs)


def _rotate_packed(
    keys: Bytes,
    layout: PackLayout,
    capacity: int,
    distances: Positions,
    rope: RopeFrequencies,
    error_stats: RotationErrorStats,
) -> None:
    accessor, row_bytes = HeadRowAccessor(layout, "key", capacity), get_row_bytes(layout, "key")
    head_bytes = get_head_bytes(layout, "key", capacity)
    rows_per_chunk = max(1, _ROTATE_CHUNK_BYTES // row_bytes)
    for head in range(layout.kv_heads):
        data = keys[head * head_bytes : (head + 1) * head_bytes]
        for start in range(0, len(distances), rows_per_chunk):
            chunk_distances = distances[start : start + rows_per_chunk]
            if chunk_distances.any():
                rows = np.empty(len(chunk_distances) * row_bytes, np.uint8)
                accessor.read_rows(data, start, rows)
                accessor.write_rows(data, start, rotate_rows(rows, layout.dtype, chunk_distances, rope, error_stats))


def pack(
    source: Source,
    output: str,
    geometry: PackedGeometry | None = None,
    *,
    name: str | None = None,
    capacity: int | None = None,
    expected_tokens: Sequence[int] = (),
    token_ids: TokenIdsFingerprint | None = None,
    model: str | None = None,
    token_major: bool = False,
    cast: bool = False,
    positions: Sequence[Positions] | None = None,
    rerotate: bool = False,
    rope: RopeConfig | str | None = None,
    ignore_contradictions: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    write_options: PrefixWriteOptions | None = None,
) -> PackResult:
    """Pack K and V of every layer into the files of a prefix cache; each file is read back and compared.

    K of a llama.cpp cache that certainly has another element order than MNN's is converted, with a note, unless
    `Source.inverted_transforms` is set.

    Parameters
    ----------
    source
        Arrays ``[kv_head, token, head_dim]`` whose names state layer and part (`kvmnn.open`).
    output
        The directory; it is created if necessary.
    geometry
        The layout: a backend, or pack numbers. Missing values come from the description of a packed cache in `source`,
        and from the shapes of the arrays.
    name
        Name of the prefix; by default the name of the source cache.
    capacity
        Capacity in tokens; by default that of the source cache, else the number of tokens.
    expected_tokens
        Expected number of tokens, one number or one for each layer.
    token_ids, model
        The token ids of the text and the directory of the MNN model, to be recorded.
    token_major
        Whether the arrays are ``[token, kv_head, head_dim]``.
    cast
        Convert words to the dtype of the layout, to nearest even.
    positions
        True text positions of each layer's tokens, int64 ``[token]``; None for those of `source`.
    rerotate
        Rotate K to the positions 0, 1, 2 ..., where MNN continues after loading.
    rope
        RoPE parameters of K: `kvmnn.Rotary`, or a model that has them. None uses `model`, or a search.
    ignore_contradictions
        Take a `rope` that K contradicts, and `token_ids` and a `model` other than those that `source` records.
    force
        Replace files that exist; the inputs are never replaced.
    progress
        Called with bytes of arrays.
    write_options
        As for `write_prefix`.

    Raises
    ------
    OptionError
        When the options name no layout or several, no name, another dtype than the arrays have, other tokens, a model
        of another geometry, or another model or text than `source` records; when MNN would not load the files, as
        layers differ in size.
    IncompleteCacheError
        When the source contains a part of the model's state.
    KvmnnError
        When the arrays are not K and V of layers from 0 on, and as `write_prefix`.
    """
    require_complete(_ignore_eviction(source), " ".join(source.inputs), "a prefix cache")
    _refuse_windows(source)
    notes, doubt = list(source.notes), source.doubt
    source, order_notes = engine_transforms.to_common_order(source)
    notes += order_notes
    arrays = _unify_dtypes(collect_layers(source, token_major=token_major), cast)
    packed_info, dtype = source.cache, arrays[0].array.dtype
    require_common_geometry(arrays, format_input_prefix(source))  # whose errors name the input
    source_layout = packed_info.layout if packed_info else None
    layout = choose_target_layout(geometry or PackedGeometry(), arrays, source_layout, dtype)
    state_by_file = index_states(source.states) if packed_info is None else {}
    states = build_state_file_layers(state_by_file)
    if model:
        num_layers = len(arrays) // 2 + len(states)
        check_model_agrees(model, read_model_geometry(model), layout.kv_heads, layout.head_dim, num_layers)
    if layout.dtype != dtype and not cast:
        raise OptionError(f"the arrays are {dtype}, the layout holds {layout.dtype}: --cast (cast=True) converts them")
    name = resolve_prefix_name(name, packed_info)
    info = build_prefix_info(arrays, layout, name, capacity=capacity, reference_info=packed_info, states=states)
    _check_loadable(source, info)
    notes += _list_flash_block_notes(layout, "--backend")
    token_counts = {layer.tokens for layer in info.layers}
    if expected_tokens and token_counts != set(expected_tokens):
        raise OptionError(f"the arrays have {max(token_counts)} tokens, --valid-tokens says {max(expected_tokens)}")
    if token_ids and packed_info is None and token_counts != {token_ids.count}:
        raise OptionError(f"the arrays have {max(token_counts)} tokens, {token_ids.where} has {token_ids.count} ids")
    model_fingerprint = try_compute_fingerprint(model, notes)
    if packed_info is not None and not ignore_contradictions:
        where = " ".join(source.inputs)
        check_recorded_provenance(packed_info, where, token_ids, model_fingerprint)
        if token_ids is not None:
            check_ids_count(where, packed_info, token_ids.count)
    info = replace(
        info,
        token_ids=token_ids or info.token_ids,
        model=model_fingerprint or info.model,
        loss=source.metadata.get(LOSSY_KEY, info.loss),
    )
    if positions is not None:
        info = _add_sidecar_positions(source, info, PositionsSidecar(tuple(positions), None), notes, rerotate=rerotate)
    elif packed_info is None:
        info = _add_source_positions(source, info, notes, rerotate=rerotate)
    rerotation = None
    if rerotate:
        is_k_reordered = "k-order" in (source.inverted_transforms or ())
        arrays, rerotation = _rerotate_arrays(
            source,
            arrays,
            info,
            rope,
            model,
            is_k_reordered=is_k_reordered,
            ignore_contradictions=ignore_contradictions,
        )
        info, notes = rerotation.info, [*notes, *rerotation.rope.notes]
    if state_by_file:
        write_options = _add_states(write_options or PrefixWriteOptions(), state_by_file)
    pack_result = write_prefix(
        arrays,
        info,
        output,
        force=force,
        exclude=source.files,
        notes=notes,
        progress=progress,
        write_options=write_options,
        losses=[doubt, *(rerotation.result.losses if rerotation else ())],
    )
    return replace(
        pack_result,
        left_out=doubt,
        dequantised=source.dequantized_types,
        undone=source.inverted_transforms or (),
        rerotated=rerotation.result if rerotation else None,
    )


def _add_states(write_options: PrefixWriteOptions, files: Mapping[tuple[int, Part], OpaqueState]) -> PrefixWriteOptions:
    """Return the options with files of state, which are written unchanged."""
    unused_arrays, file_hashes = dict(write_options.unused_arrays), dict(write_options.file_hashes)
    for file_key, state in files.items():
        data = state.read()
        unused_arrays[file_key] = bytes_array(f"layer_{state.layer}.{state.name}", data)
        file_hashes[file_key] = hashlib.sha256(data).hexdigest()
    return replace(write_options, unused_arrays=unused_arrays, file_hashes=file_hashes)


def _rerotate_arrays(
    source: Source,
    arrays: Sequence[LayerArray],
    info: CacheInfo,
    rope: RopeConfig | str | None,
    model: str | None,
    *,
    is_k_reordered: bool = False,
    ignore_contradictions: bool = False,
) -> tuple[list[LayerArray], RerotationPlan]:
    """Return the arrays with K rotated to the first positions, and the plan."""
    label = " ".join(source.inputs)
    if source.has_assumed_positions:
        raise _make_positions_error(source, f"{info.name}{CACHE_SIDECAR_SUFFIX} next to the files")
    _check_rotatable(source, label)
    if info.layout.dtype == "fp32":  # rotated K is then rounded to fp32, not to the type of the arrays
        arrays = [replace(entry, array=upcast(entry.array)) for entry in arrays]
    keys = [entry for entry in arrays if entry.part == "key"]
    rerotation = plan_rerotation(
        info, keys, rope, model, label=label, is_k_reordered=is_k_reordered, ignore_contradictions=ignore_contradictions
    )
    return rerotation.rotate_arrays(arrays), rerotation


def _check_rotatable(source: Source, label: str) -> None:
    """Raise an error if K is not, or may not be, as the model computed it."""
    cache = source.engine_cache
    unclear_transforms = [name for name in cache.perhaps_altered if name.startswith("k-")] if cache else []
    if unclear_transforms and cache is not None and source.inverted_transforms is None:
        raise OptionError(
            f"{label}: nothing tells whether {cache.engine} changed K before it stored it, and such K would be rotated "
            f"wrongly: --invert {','.join(unclear_transforms)}, or --invert none"
        )


def _ignore_eviction(source: Source) -> Completeness | None:
    """Return the completeness without evicted tokens: with the positions of the others a prefix can be written."""
    return source.completeness and replace(source.completeness, evicted="")


def _add_source_positions(source: Source, info: CacheInfo, notes: list[str], *, rerotate: bool) -> CacheInfo:
    """Return the description of a prefix cache of arrays, with the positions that any record contains."""
    positioned_info = _add_engine_positions(source, info)
    if positioned_info is None:
        token_counts, layer_numbers = zip(*((layer.tokens, layer.layer) for layer in info.layers), strict=True)
        sidecar = read_positions_sidecar(source, token_counts, layer_numbers)
        positioned_info = (
            None if sidecar is None else _add_sidecar_positions(source, info, sidecar, notes, rerotate=rerotate)
        )
    if positioned_info is not None:
        origin_text = source.engine_cache.engine if source.engine_cache else f"{POSITIONS_NAME} next to the arrays"
        notes.append(f"true positions are as {origin_text} has them")
        return positioned_info
    require_complete(source.completeness, " ".join(source.inputs), "a prefix cache")  # which has no positions either
    if rerotate:
        raise _make_positions_error(source, f"{POSITIONS_NAME} next to the arrays")
    tokens_text = format_range(sorted({layer.tokens for layer in info.layers}))
    notes.append(f"nothing says which tokens of the text the arrays hold: noted as the first {tokens_text}")
    return info


def _make_positions_error(source: Source, origin_text: str) -> OptionError:
    return OptionError(
        f"{format_input_prefix(source)}nothing gives the positions of the tokens in the text, from which K is to "
        f"be rotated ({origin_text} does)"
    )


def _refuse_windows(source: Source) -> None:
    """Raise `IncompleteCacheError` for layers with a window that contain fewer tokens than others."""
    completeness = source.completeness
    if completeness is None:
        return
    position_map = read_positions_by_layer(source)
    slid_windows = find_window_layers(completeness, position_map)
    text = describe_windows(completeness, slid_windows) if slid_windows else ""
    sizes = {layer: positions.shape[-1] for layer, positions in position_map.items()}
    window_sizes = [
        sizes[state.layer] for state in completeness.layers if state.kind == "window" and state.layer in sizes
    ]
    if not text and window_sizes and min(window_sizes) < max(sizes.values()):  # MLX also keeps first tokens in windows
        text = f"layers with a window contain {min(window_sizes)} of {max(sizes.values())} tokens"
    if text:
        raise IncompleteCacheError(
            f"{format_input_prefix(source)}cannot make a prefix cache, in which MNN has every token of every layer: "
            f"{text}"
        )


def _check_loadable(source: Source, info: CacheInfo) -> None:
    """Raise `OptionError` for layers of different numbers of tokens, whose files MNN would delete as damaged."""
    if mismatch := describe_size_mismatch(info):
        token_counts = sorted({layer.tokens for layer in info.layers})
        raise OptionError(
            f"{format_input_prefix(source)}MNN would not load this prefix: {mismatch}: its layers have "
            f"{format_range(token_counts)} tokens, expected the same number in all; --capacity {token_counts[-1]} "
            "writes files of one size for kvmnn alone, as MNN reads the same number of rows of every layer"
        )


def _unify_dtypes(arrays: Sequence[LayerArray], cast: bool) -> Sequence[LayerArray]:
    """Return arrays of different types (llama.cpp may quantise only K) as fp32, to be cast afterwards."""
    dtype_names = sorted({entry.array.dtype for entry in arrays})
    if len(dtype_names) == 1:
        return arrays
    if not cast:
        raise OptionError(
            f"the arrays are {' and '.join(dtype_names)}, a layout holds one type: --cast (cast=True) converts them"
        )
    return [replace(entry, array=upcast(entry.array)) for entry in arrays]


def _add_engine_positions(source: Source, info: CacheInfo) -> CacheInfo | None:
    """Return the description with positions of another engine's cache; None if it has none."""
    cache = source.engine_cache
    if cache is None or cache.layer_position_runs is None:
        return None
    if not cache.is_ascending:
        raise OptionError(f"{' '.join(source.inputs)}: its tokens are not one text in order ({cache})")
    layer_runs = cache.layer_position_runs
    if cache.layer_positions is None:
        layer_runs = (layer_runs[0],) * len(info.layers)
    if len(layer_runs) != len(info.layers):
        return None
    layers = tuple(replace(layer, positions=runs) for layer, runs in zip(info.layers, layer_runs, strict=True))
    return replace(info, layers=layers)


def _add_sidecar_positions(
    source: Source, info: CacheInfo, sidecar: PositionsSidecar, notes: list[str], *, rerotate: bool
) -> CacheInfo:
    """Return the description with recorded positions; if heads differ, those of one that lacks tokens."""
    layers, differing_layers = [], []
    for layer, positions, text_positions in zip(info.layers, sidecar.positions, sidecar.positions_in_text, strict=True):
        head_positions = positions.reshape(-1, layer.tokens)
        # Of heads that differ it is none of the first tokens alone.
        furthest_positions = head_positions[head_positions[:, -1].argmax()]
        differing_layers += [layer.layer] if (head_positions != furthest_positions).any() else []
        runs = positions_to_runs(furthest_positions)
        is_same = text_positions is positions
        text_runs = runs if is_same else positions_to_runs(text_positions.reshape(-1, layer.tokens)[0])
        layers.append(replace(layer, positions=runs, text_positions=None if text_runs == runs else text_runs))
    if differing_layers:
        more_text = f" and {len(differing_layers) - 1} more" if len(differing_layers) > 1 else ""
        difference_text = f"heads of layer {differing_layers[0]}{more_text} hold different tokens of the text"
        if rerotate:
            raise OptionError(
                f"{format_input_prefix(source)}{difference_text}: K cannot be rotated to positions that suit all heads"
            )
        notes.append(
            f"{difference_text}, and a prefix cache says those of a layer: noted are those of the head that goes "
            f"furthest"
        )
    positioned_info = replace(info, layers=tuple(layers))
    tokens_seen = sidecar.tokens_seen or 0
    continues_later = (
        tokens_seen > positioned_info.next_token_position
        and has_gaps(positioned_info)
        and not any(layer.text_positions for layer in layers)
    )
    return replace(positioned_info, next_position=tokens_seen) if continues_later else positioned_info


def repack(
    source: Source,
    output: str,
    backend: str,
    *,
    flash_block: FlashBlock | None = None,
    name: str | None = None,
    capacity: int | None = None,
    model: str | None = None,
    rerotate: bool = False,
    rope: RopeConfig | str | None = None,
    ignore_contradictions: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> PackResult:
    """Write a packed cache in the layout of another backend.

    Parameters
    ----------
    source
        A packed cache, or a source decoded from one (its `Source.cache` is set).
    backend
        A name of `kvmnn.packed.backends.BACKENDS`. If its dtype differs, elements are rounded to nearest even.
    flash_block
        Tokens in a block of V, or ``"none"`` without flash attention; by default as in the source.
    output, name, capacity, rerotate, rope, ignore_contradictions, force, progress
        As for `pack`.
    model
        For `rerotate`: a model with the RoPE parameters of K.

    Raises
    ------
    OptionError
        When `source` is not a packed cache, and for layers that differ in size.
    KvmnnError
        As `pack`.
    """
    require_complete(_ignore_eviction(source), " ".join(source.inputs), "a prefix cache")
    if source.cache is None:
        raise OptionError(f"{' '.join(source.inputs)}: is not a packed cache: use pack for plain arrays")
    if not source.cache.is_uniform:
        raise OptionError(
            f"{' '.join(source.inputs)}: heads differ by layer, which is not packed for another processor"
        )
    arrays, geometry = collect_layers(source), make_geometry(source.cache.layout)
    target_geometry = PackedGeometry(
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        backend=backend,
        flash_block=flash_block or geometry.flash_block,
    )
    ((_, layout),) = target_geometry.list_candidates()
    name = resolve_prefix_name(name, source.cache)
    info = build_prefix_info(arrays, layout, name, capacity=capacity, reference_info=source.cache)
    info = replace(info, loss=source.metadata.get(LOSSY_KEY, info.loss))
    _check_loadable(source, info)
    notes, rotation_result = [*source.notes, *_list_zero_row_notes(arrays)], None
    notes += _list_flash_block_notes(layout, "--target-backend")
    if rerotate:
        arrays, rerotation = _rerotate_arrays(
            source, arrays, info, rope, model, ignore_contradictions=ignore_contradictions
        )
        info, rotation_result = rerotation.info, rerotation.result
        notes += rerotation.rope.notes
    pack_result = write_prefix(
        arrays,
        info,
        output,
        force=force,
        exclude=source.files,
        notes=notes,
        progress=progress,
        losses=[source.doubt, *(rotation_result.losses if rotation_result else ())],
    )
    return replace(pack_result, rerotated=rotation_result, left_out=source.doubt)


def _list_zero_row_notes(arrays: Sequence[LayerArray]) -> list[str]:
    """Return a note if the last tokens are zero in all layers: a wrong number of tokens was specified before."""
    num_zero, num_tokens = max(entry.geometry[1] for entry in arrays), 0
    for entry in arrays:
        words = entry.array.to_numpy()
        rows = np.flatnonzero(words.any(axis=(1, 2) if entry.token_major else (0, 2)))
        num_tokens = entry.geometry[1]
        num_zero = min(num_zero, num_tokens - (int(rows[-1]) + 1 if rows.size else 0))
        if not num_zero:
            return []
    return [
        f"the last {num_zero} of {num_tokens} tokens are zero in K and V of all layers: the model computed fewer tokens"
    ]


def _list_flash_block_notes(layout: PackLayout, option_name: str) -> list[str]:
    """Return a note for a layout that MNN reads wrongly with its default `attention_mode`, 8 (flash attention)."""
    if layout.flash_block == FLASH_BLOCK:
        return []
    if layout.flash_block is None:
        text = (
            "V is written without flash attention: load it with attention_mode 0 (8, MNN's default, gives wrong tokens)"
        )
    else:
        text = f"V has blocks of {layout.flash_block} tokens, which MNN has in no attention_mode"
    return [f"{text}; {option_name} NAME,flash_block={FLASH_BLOCK} writes files for attention_mode 8"]


def resolve_prefix_name(name: str | None, info: CacheInfo | None) -> str:
    """Return the specified name, or that of the source cache; `OptionError` if there is neither."""
    resolved_name = name or (info.name if info else "")
    if not resolved_name:
        raise OptionError("the prefix needs a name: --name NAME")
    return resolved_name


def choose_target_layout(
    geometry: PackedGeometry, arrays: Sequence[LayerArray], source_layout: PackLayout | None, dtype: str
) -> PackLayout:
    """Return the only layout that `geometry` specifies, completed by `source_layout` and by the arrays."""
    kv_heads, head_dim, _ = require_common_geometry(arrays)
    if source_layout and geometry == PackedGeometry():
        return source_layout
    flash_block = FLASH_BLOCK if source_layout is None else make_geometry(source_layout).flash_block
    geometry = geometry.merge_defaults(PackedGeometry(kv_heads=kv_heads, head_dim=head_dim, flash_block=flash_block))
    if geometry.backend is None:
        geometry = geometry.merge_defaults(PackedGeometry(dtype=dtype))
    candidates = geometry.list_candidates()
    if len(candidates) == 1:
        return candidates[0][1]
    names = "; ".join(f"{backends}: lP {layout.lP}, hP {layout.hP}, {layout.dtype}" for backends, layout in candidates)
    raise OptionError(
        f"{len(candidates)} layouts are known for what was said: name one (--backend NAME, or --backend lp=N,hp=N)"
        + (f": {names}" if names else "")
    )
