"""Plain arrays, or a packed cache of another backend, into a prefix cache that the engine loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...arrays import own_order
from ...arrays.casting import widened
from ...arrays.completeness import IncompleteCacheError, require_complete
from ...arrays.engine_cache import runs_of
from ...arrays.held_tokens import gaps
from ...arrays.layers import LayerArray, common_geometry, place_said, sorted_layers
from ...arrays.source import Source
from ...arrays.window_layers import describe_windows, find_window_layers
from ...bundle.beside import POSITIONS
from ...errors import OptionError
from ...packed.addressing import FLASH_BLOCK
from ...packed.cache_info import CacheInfo, Ranges, TokenIds
from ...packed.fitting import Geometry, of_layout
from ...packed.layout import PackLayout
from ...text import span
from ...threads.pipeline import Progress
from ..noted_positions import held_by, noted_positions
from .model import check_agrees, fingerprint, read_geometry
from .prefix_writing import Making, Packed, prefix_info, write_prefix


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
    require_complete(source.completeness, " ".join(source.inputs), "a prefix cache")
    _refuse_windows(source)
    notes = list(source.notes)
    source, said_of_order = own_order.for_other_engines(source)
    notes += said_of_order
    arrays = _of_one_type(sorted_layers(source, token_major=token_major), cast)
    known, dtype = source.cache, arrays[0].array.dtype
    common_geometry(arrays, place_said(source))  # whose errors name the input
    layout = chosen_layout(geometry or Geometry(), arrays, known.layout if known else None, dtype)
    if model:
        check_agrees(model, read_geometry(model), layout.kv_heads, layout.head_dim, len(arrays) // 2)
    if layout.dtype != dtype and not cast:
        raise OptionError(f"the arrays are {dtype}, the layout holds {layout.dtype}: --cast converts them")
    info = prefix_info(arrays, layout, prefix_name(name, known), capacity=capacity, like=known)
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
    if known is None:
        said = _of_engine(source, info) or _noted(source, info, notes)
        if said is None:
            tokens_text = span(sorted(found))
            notes.append(f"nothing says which tokens of the text the arrays hold: noted as the first {tokens_text}")
        else:
            layers = [replace(layer, positions=runs) for layer, runs in zip(info.layers, said, strict=True)]
            info = replace(info, layers=tuple(layers))
            whose = source.engine_cache.engine if source.engine_cache else f"{POSITIONS} beside the arrays"
            notes.append(f"true positions are as {whose} has them")
            if cut := gaps({layer.layer: [layer.positions] for layer in layers}):
                notes.append(f"{place_said(source)}holds no beginning of a text, and the engine counts from 0: {cut}")
    packed = write_prefix(
        arrays, info, output, force=force, protect=source.files, notes=notes, progress=progress, making=making
    )
    dequantised = source.engine_cache.dequantised if source.engine_cache else ()
    return replace(packed, dequantised=dequantised, undone=source.undone or ())


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


def _of_engine(source: Source, info: CacheInfo) -> tuple[Ranges, ...] | None:
    """The positions that the cache of another engine says, for each layer; None where it says none."""
    cache = source.engine_cache
    if cache is None or cache.layer_runs is None:
        return None
    if not cache.ascends:
        raise OptionError(f"{' '.join(source.inputs)}: its tokens are not one text in order ({cache})")
    if cache.layer_positions is None:
        return (cache.layer_runs[0],) * len(info.layers)
    return cache.layer_runs if len(cache.layer_runs) == len(info.layers) else None


def _noted(source: Source, info: CacheInfo, notes: list[str]) -> tuple[Ranges, ...] | None:
    """Those that lie beside the arrays; where heads hold different tokens, those of one that lacks some."""
    numbers = [layer.layer for layer in info.layers]
    noted = noted_positions(source, [layer.tokens for layer in info.layers], numbers)
    if noted is None:
        return None
    found, unlike = [], []
    for layer, places in zip(info.layers, noted.positions, strict=True):
        heads = places.reshape(-1, layer.tokens)
        last = heads[heads[:, -1].argmax()]  # of heads that differ it is none of the first tokens alone
        unlike += [layer.layer] if (heads != last).any() else []
        found.append(runs_of(last))
    if unlike:
        more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        notes.append(
            f"heads of layer {unlike[0]}{more} hold different tokens of the text, and a prefix cache says those of a "
            "layer: noted are those of the head that goes furthest"
        )
    return tuple(found)


def repack(
    source: Source,
    output: str,
    backend: str,
    *,
    name: str | None = None,
    capacity: int | None = None,
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
    output, name, capacity, force, progress
        As for `pack`.

    Raises
    ------
    OptionError
        When `source` is not a packed cache.
    KvmnnError
        As `pack`.
    """
    if source.cache is None:
        raise OptionError(f"{' '.join(source.inputs)}: is not a packed cache: use pack for plain arrays")
    require_complete(source.completeness, " ".join(source.inputs), "a prefix cache")
    arrays = sorted_layers(source)
    before = of_layout(source.cache.layout)
    target = Geometry(
        kv_heads=before.kv_heads, head_dim=before.head_dim, backend=backend, flash_block=before.flash_block
    )
    ((_, layout),) = target.candidates()
    info = prefix_info(arrays, layout, prefix_name(name, source.cache), capacity=capacity, like=source.cache)
    return write_prefix(arrays, info, output, force=force, protect=source.files, notes=source.notes, progress=progress)


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
