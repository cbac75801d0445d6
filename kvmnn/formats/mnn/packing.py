"""Plain arrays, or a packed cache of another backend, into a prefix cache that the engine loads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...arrays import own_order
from ...arrays.casting import widened
from ...arrays.completeness import Completeness, IncompleteCacheError, require_complete
from ...arrays.engine_cache import runs_of
from ...arrays.layers import LayerArray, common_geometry, place_said, sorted_layers
from ...arrays.named_array import bytes_array
from ...arrays.opaque_state import OpaqueState
from ...arrays.source import Source
from ...arrays.window_layers import describe_windows, find_window_layers
from ...bundle.beside import POSITIONS
from ...dense import Rotary
from ...dtypes import Part, Positions
from ...errors import OptionError
from ...packed.addressing import FLASH_BLOCK
from ...packed.cache_info import CacheInfo, TokenIds
from ...packed.fitting import Geometry, of_layout
from ...packed.layout import PackLayout
from ...text import span
from ...threads.pipeline import Progress
from ..noted_positions import Noted, held_by, noted_positions
from .layer_kinds import describe_state_files, sort_states
from .model import check_agrees, fingerprint, read_geometry
from .positions import holds_gaps
from .prefix_writing import Making, Packed, prefix_info, write_prefix
from .rerotation import Rerotation, plan_rerotation, widen_for


def pack(
    source: Source,
    output: str,
    geometry: Geometry | None = None,
    *,
    name: str | None = None,
    capacity: int | None = None,
    tokens: Sequence[int] = (),
    token_ids: TokenIds | None = None,
    model: str | None = None,
    token_major: bool = False,
    cast: bool = False,
    positions: Sequence[Positions] | None = None,
    rerotate: bool = False,
    rope: Rotary | str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    making: Making | None = None,
) -> Packed:
    """Pack K and V of every layer into the files of a prefix cache; each file is read back and compared.

    K of a llama.cpp cache that surely lies in another order than MNN's is brought into that, with a note, unless
    `Source.undone` says otherwise.

    Parameters
    ----------
    source
        Arrays ``[kv_head, token, head_dim]`` whose names say which layer's K or V they are (`kvmnn.open`).
    output
        The directory; it is made if it is not there.
    geometry
        The layout: a backend, or pack numbers. What it leaves open is taken from what `source` says of a packed cache,
        and from the shapes of the arrays.
    name
        Of the prefix; by default the one that the cache had.
    capacity
        Tokens to leave room for; by default as before, else no more than there are.
    tokens
        How many tokens the layers are said to have, one number or one for each layer.
    token_ids, model
        The token ids of the text and the directory of the MNN model, to be noted down.
    token_major
        Whether the arrays are ``[token, kv_head, head_dim]``.
    cast
        Convert words to the dtype of the layout, to nearest even.
    positions
        True positions in the text of each layer's tokens, int64 ``[token]``; None for what `source` has.
    rerotate
        Rotate K to the positions 0, 1, 2 ..., from which MNN counts on after loading.
    rope
        How K is rotated: `kvmnn.Rotary`, or a model that has it. Where it is None `model` has it, or it is found by
        trial.
    force
        Replace files that exist; the inputs are never replaced.
    progress
        Called with bytes of arrays.
    making
        As for `write_prefix`.

    Raises
    ------
    OptionError
        When the options name no layout or several, no name, another dtype than the arrays have, other tokens, or a
        model of another geometry.
    IncompleteCacheError
        When the source contains a part of the model's state.
    KvmnnError
        When the arrays are not K and V of layers from 0 on, and as `write_prefix`.
    """
    require_complete(_without_eviction(source), " ".join(source.inputs), "a prefix cache")
    _refuse_windows(source)
    if rerotate and source.lossy:
        raise OptionError(
            f"{place_said(source)}int8 K cannot be rotated: it lacks the maximum of each channel, which MNN alone has"
        )
    notes = list(source.notes)
    source, said_of_order = own_order.for_other_engines(source)
    notes += said_of_order
    arrays = _of_one_type(sorted_layers(source, token_major=token_major), cast)
    known, dtype = source.cache, arrays[0].array.dtype
    common_geometry(arrays, place_said(source))  # whose errors name the input
    layout = chosen_layout(geometry or Geometry(), arrays, known.layout if known else None, dtype)
    files = sort_states(source.states) if known is None else {}
    states = describe_state_files(files)
    if model:
        layers = len(arrays) // 2 + len(states)
        check_agrees(model, read_geometry(model), layout.kv_heads, layout.head_dim, layers)
    if layout.dtype != dtype and not cast:
        raise OptionError(f"the arrays are {dtype}, the layout holds {layout.dtype}: --cast converts them")
    info = prefix_info(arrays, layout, prefix_name(name, known), capacity=capacity, like=known, states=states)
    found = {layer.tokens for layer in info.layers}
    if tokens and found != set(tokens):
        raise OptionError(f"the arrays have {max(found)} tokens, --tokens says {max(tokens)}")
    if token_ids and known is None and found != {token_ids.count}:
        raise OptionError(f"the arrays have {max(found)} tokens, {token_ids.where} has {token_ids.count} ids")
    info = replace(
        info,
        token_ids=token_ids or info.token_ids,
        model=fingerprint(model) if model else info.model,
    )
    if positions is not None:
        info = _with_noted(source, info, Noted(tuple(positions), None), notes, rerotate=rerotate)
    elif known is None:
        info = _with_positions(source, info, notes, rerotate=rerotate)
    rerotation = None
    if rerotate:
        is_reordered = "k-order" in (source.undone or ())
        arrays, rerotation = _rerotated(source, arrays, info, rope, model, is_reordered=is_reordered)
        info, notes = rerotation.info, [*notes, *rerotation.rope.notes]
    if files:
        making = _with_states(making or Making(), files)
    packed = write_prefix(
        arrays, info, output, force=force, protect=source.files, notes=notes, progress=progress, making=making
    )
    dequantised = source.code_types
    result = rerotation.result if rerotation else None
    return replace(packed, dequantised=dequantised, undone=source.undone or (), rerotated=result)


def _with_states(making: Making, files: Mapping[tuple[int, Part], OpaqueState]) -> Making:
    """The same with files of state, which are written as they are."""
    rooms, hashes = dict(making.rooms), dict(making.file_hashes)
    for place, state in files.items():
        data = state.read()
        rooms[place] = bytes_array(f"layer_{state.layer}.{state.name}", data)
        hashes[place] = hashlib.sha256(data).hexdigest()
    return replace(making, rooms=rooms, file_hashes=hashes)


def _rerotated(
    source: Source,
    arrays: Sequence[LayerArray],
    info: CacheInfo,
    rope: Rotary | str | None,
    model: str | None,
    *,
    is_reordered: bool = False,
) -> tuple[list[LayerArray], Rerotation]:
    """The arrays with K rotated to the first positions, and how."""
    where = " ".join(source.inputs)
    _check_rotatable(source, where)
    arrays = widen_for(arrays, info.layout.dtype)
    keys = [entry for entry in arrays if entry.part == "key"]
    rerotation = plan_rerotation(info, keys, rope, model, where=where, is_reordered=is_reordered)
    return rerotation.rotate(arrays), rerotation


def _check_rotatable(source: Source, where: str) -> None:
    """Raise where K is not what the model computed, or may not be."""
    cache = source.engine_cache
    unclear = [name for name in cache.perhaps_altered if name.startswith("k-")] if cache else []
    if unclear and cache is not None and source.undone is None:
        raise OptionError(
            f"{where}: nothing tells whether {cache.engine} changed K before it stored it, and such K would be rotated "
            f"wrongly: --undo {','.join(unclear)}, or --undo none"
        )


def _without_eviction(source: Source) -> Completeness | None:
    """What of the state is there, evicted tokens apart: with the positions of the others a prefix can be made."""
    return source.completeness and replace(source.completeness, evicted="")


def _with_positions(source: Source, info: CacheInfo, notes: list[str], *, rerotate: bool) -> CacheInfo:
    """What a prefix cache of arrays will be, with the positions that anything gives them."""
    said = _of_engine(source, info)
    if said is None:
        tokens, numbers = zip(*((layer.tokens, layer.layer) for layer in info.layers), strict=True)
        noted = noted_positions(source, tokens, numbers)
        said = None if noted is None else _with_noted(source, info, noted, notes, rerotate=rerotate)
    if said is not None:
        whose = source.engine_cache.engine if source.engine_cache else f"{POSITIONS} beside the arrays"
        notes.append(f"true positions are as {whose} has them")
        return said
    require_complete(source.completeness, " ".join(source.inputs), "a prefix cache")  # nor does it give positions
    if rerotate:
        raise OptionError(
            f"{place_said(source)}nothing gives the positions of the tokens in the text, from which K is to be rotated "
            f"({POSITIONS} beside the arrays does)"
        )
    tokens_text = span(sorted({layer.tokens for layer in info.layers}))
    notes.append(f"nothing says which tokens of the text the arrays hold: noted as the first {tokens_text}")
    return info


def _refuse_windows(source: Source) -> None:
    """Raise `IncompleteCacheError` for layers with a window that no longer contain the first tokens."""
    windows = find_window_layers(source.completeness, held_by(source)) if source.completeness is not None else {}
    if windows:
        raise IncompleteCacheError(
            f"{place_said(source)}cannot make a prefix cache, in which MNN has every token of every layer: "
            f"{describe_windows(source.completeness, windows)}"
        )


def _of_one_type(arrays: Sequence[LayerArray], cast: bool) -> Sequence[LayerArray]:
    """Arrays of several types (llama.cpp's K may be quantised, and V not) as fp32, which is cast then."""
    types = sorted({entry.array.dtype for entry in arrays})
    if len(types) == 1:
        return arrays
    if not cast:
        raise OptionError(f"the arrays are {' and '.join(types)}, a layout holds one type: --cast converts them")
    return [replace(entry, array=widened(entry.array)) for entry in arrays]


def _of_engine(source: Source, info: CacheInfo) -> CacheInfo | None:
    """With the positions that the cache of another engine has; None where it has none."""
    cache = source.engine_cache
    if cache is None or cache.layer_runs is None:
        return None
    if not cache.ascends:
        raise OptionError(f"{' '.join(source.inputs)}: its tokens are not one text in order ({cache})")
    each = (cache.layer_runs[0],) * len(info.layers) if cache.layer_positions is None else cache.layer_runs
    if len(each) != len(info.layers):
        return None
    return replace(
        info, layers=tuple(replace(layer, positions=runs) for layer, runs in zip(info.layers, each, strict=True))
    )


def _with_noted(source: Source, info: CacheInfo, noted: Noted, notes: list[str], *, rerotate: bool) -> CacheInfo:
    """With positions that are noted; where heads hold different tokens, those of one that lacks some."""
    layers, unlike = [], []
    for layer, places, in_text in zip(info.layers, noted.positions, noted.in_text, strict=True):
        heads = places.reshape(-1, layer.tokens)
        last = heads[heads[:, -1].argmax()]  # of heads that differ it is none of the first tokens alone
        unlike += [layer.layer] if (heads != last).any() else []
        runs = runs_of(last)
        text_runs = runs if in_text is places else runs_of(in_text.reshape(-1, layer.tokens)[0])
        layers.append(replace(layer, positions=runs, text_positions=None if text_runs == runs else text_runs))
    if unlike:
        more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        differ = f"heads of layer {unlike[0]}{more} hold different tokens of the text"
        if rerotate:
            raise OptionError(f"{place_said(source)}{differ}: K cannot be rotated to positions that suit all heads")
        notes.append(
            f"{differ}, and a prefix cache says those of a layer: noted are those of the head that goes furthest"
        )
    found = replace(info, layers=tuple(layers))
    seen = noted.tokens_seen or 0
    is_later = seen > found.continues_at and holds_gaps(found) and not any(layer.text_positions for layer in layers)
    return replace(found, next_position=seen) if is_later else found


def repack(
    source: Source,
    output: str,
    backend: str,
    *,
    name: str | None = None,
    capacity: int | None = None,
    model: str | None = None,
    rerotate: bool = False,
    rope: Rotary | str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Packed:
    """Write a packed cache in the layout of another backend; the flash block stays.

    Parameters
    ----------
    source
        A packed cache, or what was made from one and still describes it (`Source.cache`).
    backend
        A name of `kvmnn.backends.BACKENDS`. Where its dtype differs, words are converted to nearest even.
    output, name, capacity, rerotate, rope, force, progress
        As for `pack`.
    model
        For `rerotate`: a model that may have how K is rotated.

    Raises
    ------
    OptionError
        When `source` is not a packed cache.
    KvmnnError
        As `pack`.
    """
    if source.cache is None:
        raise OptionError(f"{' '.join(source.inputs)}: is not a packed cache: use pack for plain arrays")
    require_complete(_without_eviction(source), " ".join(source.inputs), "a prefix cache")
    if not source.cache.is_uniform:
        raise OptionError(
            f"{' '.join(source.inputs)}: heads differ by layer, which is not packed for another processor"
        )
    arrays = sorted_layers(source)
    before = of_layout(source.cache.layout)
    target = Geometry(
        kv_heads=before.kv_heads, head_dim=before.head_dim, backend=backend, flash_block=before.flash_block
    )
    ((_, layout),) = target.candidates()
    info = prefix_info(arrays, layout, prefix_name(name, source.cache), capacity=capacity, like=source.cache)
    notes, result = list(source.notes), None
    if rerotate:
        arrays, rerotation = _rerotated(source, arrays, info, rope, model)
        info, result = rerotation.info, rerotation.result
        notes += rerotation.rope.notes
    packed = write_prefix(arrays, info, output, force=force, protect=source.files, notes=notes, progress=progress)
    return replace(packed, rerotated=result)


def prefix_name(name: str | None, info: CacheInfo | None) -> str:
    """The name that was given, or the one that the cache had; `OptionError` where there is neither."""
    found = name or (info.name if info else "")
    if not found:
        raise OptionError("the prefix needs a name: --name NAME")
    return found


def chosen_layout(geometry: Geometry, arrays: Sequence[LayerArray], known: PackLayout | None, dtype: str) -> PackLayout:
    """The only layout that `geometry` names, completed by the `known` one and by the arrays.

    Parameters
    ----------
    dtype
        Of the words, where `geometry` names no backend.

    Raises
    ------
    OptionError
        When it leaves several, or none.
    """
    heads, dims, _ = common_geometry(arrays)
    if known and geometry == Geometry():
        return known
    block = FLASH_BLOCK if known is None else of_layout(known).flash_block
    full = geometry.or_else(Geometry(kv_heads=heads, head_dim=dims, flash_block=block))
    if full.backend is None:
        full = full.or_else(Geometry(dtype=dtype))
    found = full.candidates()
    if len(found) != 1:
        names = "; ".join(f"{backends}: lP {layout.lP}, hP {layout.hP}, {layout.dtype}" for backends, layout in found)
        raise OptionError(
            f"{len(found)} layouts are known for what was said: name one (--backend NAME, or --lp N --hp N)"
            + (f": {names}" if names else "")
        )
    return found[0][1]
