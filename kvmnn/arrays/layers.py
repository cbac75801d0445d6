"""Group arrays into layers: find the layer and part (K or V) of each array, whatever names its source uses.

Encoder-decoder models have two halves: the tokens of the decoder, and the output of the encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal, get_args

from .._util.dataclass import dataclass
from .._util.patterns import declare_pattern
from .._util.text import format_range, group_consecutive, pluralize
from ..dtypes import PARTS, Part
from ..errors import KvmnnError, MissingOptionError, OptionError, SourceError
from .array import Chunk, LazyArray, rechunk, to_c_contiguous
from .completeness import Completeness, LayerStateInfo
from .naming import is_indexed_name, parse_conventional_name, parse_layer, parse_part
from .source import FILE_KEY, Source, strip_internal_metadata

ModelHalf = Literal["decoder", "encoder"]
MODEL_HALVES: Final[tuple[ModelHalf, ...]] = get_args(ModelHalf)

_HALF_REGEX = declare_pattern(r"(?<![A-Za-z])(decoder|encoder)(?![A-Za-z])")
_HALF_COMPONENT_REGEX = declare_pattern(r"[._/](decoder|encoder)(?=[._/])")


def parse_half(name: str) -> ModelHalf | None:
    """Return the half that an array belongs to, by the last word of its name for either; None if there is none."""
    half_words = _HALF_REGEX.findall(name)
    return next((half for half in MODEL_HALVES if half_words and half == half_words[-1]), None)


def has_halves(names: Iterable[str]) -> bool:
    """Return whether the names include arrays of both halves."""
    return {parse_half(name) for name in names} >= set(MODEL_HALVES)


def check_one_half(names: Iterable[str], where: str) -> None:
    """Raise `MissingOptionError` for arrays of both halves; the message begins with `where`."""
    if has_halves(names):
        raise MissingOptionError(
            f"{where}holds K and V of a decoder and of an encoder: --part decoder or --part encoder takes one of them "
            "(in Python half=)"
        )


def select_half(source: Source, half: ModelHalf, where: str) -> Source:
    """Return the source with the arrays of one half, under names without it."""
    if not has_halves(source):
        raise OptionError(f"{where}: its arrays are not of a decoder and an encoder: leave --part out")
    arrays = [replace(array, name=_strip_half(array.name)) for array in source.arrays if parse_half(array.name) == half]
    opposite_half = next(candidate for candidate in MODEL_HALVES if candidate != half)
    missing_text = f"K and V of the {opposite_half}, which the model needs too, are left out"
    cache, completeness = source.engine_cache, source.completeness or Completeness()
    if half == "decoder":
        completeness = replace(completeness, other_missing=(*completeness.other_missing, missing_text))
    else:  # an engine's description is of the decoder's cache
        layers = tuple(LayerStateInfo(layer=state.layer, kind="cross") for state in completeness.layers)
        completeness = Completeness(layers=layers, other_missing=(missing_text,))
        cache = cache and replace(
            cache,
            tokens=int(arrays[0].shape[-2]),
            positions=None,
            layer_positions=None,
            positions_unknown=False,
            token_ids=None,
            texts=(),
        )
    metadata = strip_internal_metadata(source.metadata)
    return replace(source, arrays=arrays, metadata=metadata, engine_cache=cache, completeness=completeness)


def _strip_half(name: str) -> str:
    """Remove the half of an encoder-decoder model from a name: ``layer_0.key`` for ``layer_0.decoder.key``."""
    matches = list(_HALF_COMPONENT_REGEX.finditer(name))
    return name[: matches[-1].start()] + name[matches[-1].end() :] if matches else name


MAX_KV_HEADS = 256  # twice those of the largest published decoder (128)
TYPICAL_KV_HEADS = 16  # not unusual, however few tokens there are
_MAX_SHOWN_KINDS = 4  # of layers, and runs of them, in an error


class AmbiguousAxesError(MissingOptionError):
    """Nothing defines which axis is the tokens; the message suggests options."""


@dataclass(frozen=True)
class LayerArray:
    """K or V of one layer."""

    #: Layer and part.
    layer: int
    part: Part
    #: ``[kv_head, token, head_dim]``, or ``[token, kv_head, head_dim]`` where `token_major`.
    array: LazyArray
    #: The order of its axes.
    token_major: bool = False

    @property
    def geometry(self) -> tuple[int, int, int]:
        """Return ``(kv_heads, tokens, head_dim)``."""
        a, b, dims = self.array.shape
        return (b, a, dims) if self.token_major else (a, b, dims)


def collect_layer_arrays(
    arrays: Sequence[LazyArray], *, token_major: bool = False, allow_keys_only: bool = False
) -> list[LayerArray]:
    """Return K and V of every layer, in order, each with its words in C order."""
    # Names may be those of `NAME_TEMPLATES`; the segments of a KV dump (``run/layer_3/k_t0_16``), which state their own
    # order of axes, are joined along the tokens. Others state K or V by a word and the layer by a number. Arrays called
    # ``k`` and ``v`` or the like, without a number, are one layer, or with four axes ``[layer, ...]`` all of them. The
    # axes of ``3.0`` and ``3.1`` are unknown: more than `MAX_KV_HEADS` are tokens; fewer on both axes are ambiguous.
    check_one_half([array.name for array in arrays], "")
    entries: dict[tuple[int, Part], list[tuple[int, LayerArray]]] = {}
    for array in arrays:
        for start, entry in _locate_layers(array, token_major):
            entries.setdefault((entry.layer, entry.part), []).append((start, entry))
    if not entries:
        raise SourceError("there is no K and no V among the arrays")
    for entry in (entry for group in entries.values() for _, entry in group):
        heads, tokens, _ = entry.geometry
        if heads > MAX_KV_HEADS >= tokens and not entry.token_major:
            raise AmbiguousAxesError(
                f"array {entry.array.name!r} {list(entry.array.shape)}: read as [kv_head, token, head_dim] it has "
                f"{heads:,} heads, more than {MAX_KV_HEADS}: where tokens come first, say so "
                "(--token-major, in Python axes=)"
            )
    layers = sorted({layer for layer, _ in entries})
    parts = PARTS[:1] if allow_keys_only and not any(part == "value" for _, part in entries) else PARTS
    for layer in layers:
        for part in parts:
            if (layer, part) not in entries:
                raise SourceError(f"layer {layer} has no array of its {part}s")
    return [_join_dump_segments(entries[layer, part]) for layer in layers for part in parts]


def _locate_layers(array: LazyArray, token_major: bool) -> Iterator[tuple[int, LayerArray]]:
    """Iterate over the tokens of layers in an array: ``(first token, array)``."""
    part, layer, start, token_major = locate_array(array, token_major)
    if array.itemsize != array.coded_itemsize:
        raise SourceError(
            f"array {array.name!r}: holds bytes, not the numbers of K or V: blocks that stay blocks "
            "(--raw-blocks) are for "
            "encode, unpack and diff; without it they are read as numbers"
        )
    if len(array.shape) == 4 and (layer is None or array.shape[0] == 1):
        for index in range(array.shape[0]):
            yield 0, LayerArray(index if layer is None else layer, part, _select_row(array, index), token_major)
    elif len(array.shape) == 3:
        yield start, LayerArray(layer or 0, part, to_c_contiguous(array) if array.order == "F" else array, token_major)
    else:
        error = AmbiguousAxesError if len(array.shape) > 3 else SourceError
        raise error(
            f"array {array.name!r}: has shape {list(array.shape)}: expected [kv_head, token, head_dim]"
            + (" or [layer, kv_head, token, head_dim]" if layer is None else "")
            + _suggest_axes_option(array)
        )


def _suggest_axes_option(array: LazyArray) -> str:
    """Suggest an option for arrays with more axes."""
    parsed_name = parse_conventional_name(array.name)
    if (
        len(array.shape) == 4
        and parsed_name is not None
        and array.name == format_array_name(parsed_name.layer, parsed_name.part)
    ):
        return (
            f", and it is a batch of {array.shape[0]}: --part batch=N takes one text of it, from 0 (in Python batch=)"
        )
    if len(array.shape) == 4 and parsed_name is not None and not parsed_name.is_dump:
        return (
            f": if it is a batch of {array.shape[0]}, --axes bhtd --part batch=N takes one text of it, from 0 (in "
            "Python axes='bhtd', batch=N)"
        )
    return " (--axes, in Python axes=, says how arrays lie)"


def locate_array(array: LazyArray, token_major: bool) -> tuple[Part, int | None, int, bool]:
    """Return part, layer (None if its name does not state it), first token, and whether tokens come before heads."""
    parsed_name = parse_conventional_name(array.name)
    if parsed_name is not None:
        return (
            parsed_name.part,
            parsed_name.layer,
            parsed_name.start,
            parsed_name.order == "thd" if parsed_name.is_dump else token_major,
        )
    try:
        part, name_without_part = parse_part("", array.name)
    except SourceError:
        raise MissingOptionError(
            f"array {array.name!r}: its name does not say whether it is K or V of which layer: expected e.g. "
            f"'{format_array_name(0, 'key')}', 'k' with --axes (in Python axes=) that have l for an axis of layers, or "
            "2 in them for one of K and V (an array of a .npy file is called as the file)"
            + ("; --axes td takes it as the one tensor of latent attention" if len(array.shape) == 2 else "")
        ) from None
    layer = parse_layer(name_without_part)
    return part, layer, 0, token_major or (is_indexed_name(array.name) and _has_tokens_first(array))


def _has_tokens_first(array: LazyArray) -> bool:
    """Return whether tokens come before heads, judged by the lengths of the axes alone."""
    if len(array.shape) not in (3, 4):
        return False
    first_length, second_length = array.shape[-3:-1]
    if first_length <= MAX_KV_HEADS and second_length <= MAX_KV_HEADS:
        letters = "bhtd"[-len(array.shape) :]
        raise AmbiguousAxesError(
            f"array {array.name!r} {list(array.shape)}: nothing says whether {first_length} or {second_length} is the "
            f"number of tokens: say --axes {letters} ({second_length} tokens) or --axes {letters.replace('ht', 'th')} "
            f"({first_length} tokens), in Python axes="
        )
    return second_length <= MAX_KV_HEADS


def suggest_token_major(source: Source, axes: str | None = None) -> str | None:
    """Suggest an option if arrays are read as having many heads and few tokens; None if that is not unusual."""
    if source.cache or source.engine_cache or source.token_major or FILE_KEY in source.metadata:
        return None
    if source.axes and axes is None:
        return None
    array = next(iter(source.arrays), None)
    if array is None or not 3 <= len(array.shape) <= 5:
        return None
    try:
        _, layer, _, token_major = locate_array(array, token_major=False)
    except SourceError:
        return None
    heads, tokens = array.shape[-3:-1]
    if token_major or heads <= max(tokens, TYPICAL_KV_HEADS) or (axes is None and heads > MAX_KV_HEADS >= tokens):
        return None  # in the last case an error will suggest it
    read_axes = axes or ("lbhtd"[-len(array.shape) :] if len(array.shape) != 4 else "lhtd" if layer is None else "bhtd")
    swapped_axes = read_axes.translate(str.maketrans("ht", "th"))
    return (
        f"array {array.name!r} {list(array.shape)} is read as {pluralize(heads, 'kv head')} of "
        f"{pluralize(tokens, 'token')}: where tokens come first, --axes {swapped_axes} says so"
    )


def _select_row(array: LazyArray, index: int) -> LazyArray:
    """Return one row of the first axis as an array of its own."""
    if array.order == "F":
        return to_c_contiguous(array, (index,))
    nbytes = array.nbytes // array.shape[0]
    return replace(array, shape=array.shape[1:], reader=partial(_iter_byte_range, array, index * nbytes, nbytes))


def _iter_byte_range(array: LazyArray, begin: int, nbytes: int, chunk_bytes: int) -> Iterator[Chunk]:
    """Iterate over bytes of an array from `begin` on; skipping the earlier ones costs nothing in a mapped file."""
    position = 0
    for chunk in array.reader(chunk_bytes):
        low, high = max(begin - position, 0), min(begin + nbytes - position, chunk.size)
        position += chunk.size
        if low < high:
            yield chunk[low:high]
        if begin + nbytes <= position < array.nbytes:
            return  # an array whose last bytes are requested is read to its end, so that checksums are compared


def _join_dump_segments(segments: list[tuple[int, LayerArray]]) -> LayerArray:
    segments.sort(key=lambda entry: entry[0])
    first = segments[0][1]
    if len(segments) == 1:
        return first
    names = " and ".join(repr(entry.array.name) for _, entry in segments[:2])
    tokens, (heads, _, dims) = 0, first.geometry
    for start, entry in segments:
        if not entry.token_major or start != tokens:
            raise SourceError(f"layer {first.layer}: {names} are both its {first.part}s, and do not follow each other")
        if (heads, dims, first.array.dtype) != (entry.geometry[0], entry.geometry[2], entry.array.dtype):
            raise SourceError(f"layer {first.layer}: {names} differ in geometry or type")
        tokens += entry.geometry[1]
    joined_array = replace(
        first.array,
        name=f"{first.array.name.rpartition('_t')[0]}_t0_{tokens}",
        shape=(tokens, heads, dims),
        array_dtype=first.array.array_dtype.replace(">", "<"),
        reader=partial(_iter_chained_chunks, [entry.array for _, entry in segments]),
    )
    return replace(first, array=joined_array)


def _iter_chained_chunks(arrays: list[LazyArray], chunk_bytes: int) -> Iterator[Chunk]:
    chunks = (chunk for array in arrays for chunk in array.iter_chunks(chunk_bytes))
    yield from rechunk(chunks, chunk_bytes, sum(array.nbytes for array in arrays))


def merge_dump_segments(arrays: Sequence[LazyArray]) -> list[LazyArray]:
    """Return the arrays with segments of KV dumps joined along the tokens, if all arrays are from dumps."""
    parsed_names = [parse_conventional_name(array.name) for array in arrays]
    dump_keys = [
        (parsed_name.layer, parsed_name.part) for parsed_name in parsed_names if parsed_name and parsed_name.is_dump
    ]
    if len(dump_keys) < len(arrays) or len(set(dump_keys)) == len(dump_keys):
        return list(arrays)
    return [entry.array for entry in collect_layer_arrays(arrays)]


def collect_layers(source: Source, *, token_major: bool = False, allow_keys_only: bool = False) -> list[LayerArray]:
    """Collect the layers of a source (`collect_layer_arrays`); errors name the source."""
    try:
        return collect_layer_arrays(
            source.arrays, token_major=source.token_major or token_major, allow_keys_only=allow_keys_only
        )
    except SourceError as error:
        raise type(error)(f"{format_input_prefix(source)}{error}") from None


def collect_layers_or_latents(source: Source, *, token_major: bool = False) -> list[LayerArray]:
    """Collect layers that may lack V: if the engine says so, or if each layer has one head (latent attention)."""
    arrays = collect_layers(source, token_major=token_major, allow_keys_only=True)
    heads = arrays[0].geometry[0]
    has_values = any(entry.part == "value" for entry in arrays)
    if not has_values and source.engine_cache is None and heads != 1:
        raise SourceError(
            f"{format_input_prefix(source)}layer {arrays[0].layer} has no array of its values: K alone is all that "
            f"latent attention keeps, of one kv head, and these have {heads}"
        )
    return arrays


def format_input_prefix(source: Source) -> str:
    """Return the prefix of error messages about the arrays of a source."""
    return f"{' '.join(source.inputs)}: " if source.inputs else ""


def check_kv_shapes(layers: Sequence[LayerArray], where: str = "", *, require_same_head_dim: bool = True) -> None:
    """Raise `KvmnnError` if K and V of a layer differ in heads, tokens or, by default, head_dim."""
    for key, value in zip(layers[::2], layers[1::2], strict=True):
        is_consistent = key.geometry[:2] == value.geometry[:2] and (
            not require_same_head_dim or key.geometry[2] == value.geometry[2]
        )
        if not is_consistent:
            raise KvmnnError(
                f"{where}layer {key.layer}: keys are {list(key.array.shape)} and values {list(value.array.shape)}: "
                f"expected {'the same' if require_same_head_dim else 'the same heads and tokens'}"
            )


def require_common_geometry(layers: Sequence[LayerArray], where: str = "") -> tuple[int, int, str]:
    """Return ``(kv_heads, head_dim, dtype)``, which all layers must share."""
    check_kv_shapes(layers, where)
    layers_by_geometry: dict[tuple[int, int, str], list[int]] = {}
    for entry in layers:
        numbers = layers_by_geometry.setdefault((entry.geometry[0], entry.geometry[2], entry.array.dtype), [])
        if entry.layer not in numbers:
            numbers.append(entry.layer)
    types = sorted({dtype for _, _, dtype in layers_by_geometry})
    if len({kind[:2] for kind in layers_by_geometry}) == 1 < len(types):
        raise KvmnnError(f"{where}the arrays are {' and '.join(types)}: expected one type")
    if len(layers_by_geometry) > 1:
        kind_texts = [
            f"{_format_layers_have(numbers)} {pluralize(heads, 'kv head')} x {dims} dims of {dtype}"
            for (heads, dims, dtype), numbers in list(layers_by_geometry.items())[:_MAX_SHOWN_KINDS]
        ]
        num_hidden = len(layers_by_geometry) - _MAX_SHOWN_KINDS
        more_text = f" and {num_hidden} more" if num_hidden > 0 else ""
        raise KvmnnError(
            f"{where}{', '.join(kind_texts)}{more_text}: expected one geometry (encode, measure, unpack, diff and "
            "store put take layers that differ)"
        )
    return next(iter(layers_by_geometry))


def _format_layers_have(numbers: Sequence[int]) -> str:
    """Format ``layer 3 has``, ``layers 0 to 2, 5 have``."""
    runs = group_consecutive(numbers)
    run_text = ", ".join(map(format_range, runs[:_MAX_SHOWN_KINDS])) + (" ..." if len(runs) > _MAX_SHOWN_KINDS else "")
    return f"layer {run_text} has" if len(numbers) == 1 else f"layers {run_text} have"


def format_array_name(layer: int, part: Part) -> str:
    """Return kvmnn's name for the array of a layer's K or V."""
    return f"layer_{layer}.{part}"
