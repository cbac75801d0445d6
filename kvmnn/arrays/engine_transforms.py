"""Transforms that other engines apply to K and V of a source: llama.cpp's are inverted or reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..dtypes import PART_LETTERS, Part, parse_dtype
from ..errors import OptionError
from .array import Chunk, LazyArray, rechunk
from .cast import CastStats
from .llama_transforms import (
    ROTATIONS,
    TRANSFORMS,
    Transform,
    has_lossy_inverse,
    invert_transforms,
    validate_transforms,
)
from .naming import parse_part
from .source import LOSSY_KEY, Source, join_losses

# K of architecture `llama` and some others is stored in pairs by llama.cpp (rope type NORM, weights permuted by its
# converter), in MNN and transformers in halves. `pack`, `store put` and `to_cache` write for those and convert it to
# their order automatically, with a note. Reading (`open`, `unpack`, `diff`) leaves words unchanged, with a note.
# Transforms that a file does not determine (rotations, other architectures) are inverted only by `--invert`.

_READ_CHUNK_BYTES = 1 << 20


def invert_source_transforms(source: Source, names: Sequence[str]) -> Source:
    """Return the source with transforms of K and V inverted as they are read.

    Parameters
    ----------
    source
        Arrays ``[..., head_dim]`` whose names state K or V: fp16, bf16 or fp32 words in C order.
    names
        Names of `TRANSFORMS`: ``"k-order"`` is exact; a rotation is inverted in float32 and rounded once. ``"none"``
        alone inverts nothing.

    Returns
    -------
    Source
        Its `Source.inverted_transforms` has the names, in the order in which they were inverted.

    Raises
    ------
    OptionError
        For other names, for transforms that do not apply to this head_dim or this engine's cache, and for arrays of
        bytes.
    """
    if list(names) == ["none"]:
        return replace(source, inverted_transforms=())
    where, cache = " ".join(source.inputs), source.engine_cache
    if "k-order" in (source.inverted_transforms or ()):
        raise OptionError(f"{where}: what is undone before k-order has to be said together with it")
    arrays = []
    transforms: tuple[Transform, ...] = ()
    for array in source.arrays:
        transforms = validate_transforms(names, array.shape[-1] if array.shape else 0)
        if array.order != "C" or array.itemsize != array.coded_itemsize or len(array.shape) < 2:
            raise OptionError(f"{where}: array {array.name!r} is none of K and V in heads, which --invert is about")
        arrays.append(_invert_array(array, parse_part(where, array.name)[0], transforms))
    if cache is not None:
        applicable = _list_applied_transforms(source)
        for name in transforms:
            if name not in applicable:
                expectation = f"expected {' or '.join(applicable)}" if applicable else "leave --invert out"
                raise OptionError(
                    f"{where}: undo {name}: {cache.engine} does no such thing to this cache: {expectation}"
                )
        remaining_altered, remaining_perhaps = (
            tuple(name for name in group if name not in transforms) for group in (cache.altered, cache.perhaps_altered)
        )
        cache = replace(cache, altered=remaining_altered, perhaps_altered=remaining_perhaps)
    metadata = source.metadata
    if has_lossy_inverse(transforms):
        rotations = [name for name in transforms if name in ROTATIONS]
        metadata = metadata | {
            LOSSY_KEY: join_losses(metadata.get(LOSSY_KEY, ""), f"rounded by undoing {' and '.join(rotations)}")
        }
    return replace(source, arrays=arrays, metadata=metadata, inverted_transforms=transforms, engine_cache=cache)


def invert_applied_transforms(sources: Sequence[Source], names: Sequence[str]) -> list[Source]:
    """Return the sources, each without those of the named transforms that its engine applied or may have applied."""
    if list(names) == ["none"]:
        return [invert_source_transforms(source, names) for source in sources]
    applicable = [_list_applied_transforms(source) for source in sources]
    for name in names:
        if name not in TRANSFORMS:
            validate_transforms([name], 0)
        if not any(name in transforms for transforms in applicable):
            choices = [name for name in TRANSFORMS if any(name in transforms for transforms in applicable)]
            expectation = f"expected {' or '.join(choices)}" if choices else "leave --invert out"
            inputs_text = " and ".join(" ".join(source.inputs) for source in sources)
            raise OptionError(f"undo {name}: was done to neither of {inputs_text}: {expectation}")
    names_by_source = [[name for name in names if name in transforms] for transforms in applicable]
    return [
        invert_source_transforms(source, source_names) if source_names else source
        for source, source_names in zip(sources, names_by_source, strict=True)
    ]


def _list_applied_transforms(source: Source) -> tuple[Transform, ...]:
    """Return the transforms that the engine applied to a source, or may have applied."""
    return source.engine_cache.altered + source.engine_cache.perhaps_altered if source.engine_cache else ()


def _invert_array(array: LazyArray, part: Part, names: tuple[Transform, ...]) -> LazyArray:
    if not any(name.startswith(PART_LETTERS[part]) for name in names):
        return array

    def iter_chunks(chunk_bytes: int) -> Iterator[Chunk]:
        return rechunk(_iter_inverted_rows(array, part, names), chunk_bytes, array.nbytes)

    return replace(array, array_dtype=array.array_dtype.replace(">", "<"), reader=iter_chunks)


def _iter_inverted_rows(array: LazyArray, part: Part, names: tuple[Transform, ...]) -> Iterator[Chunk]:
    head_dim, is_lossy = array.shape[-1], has_lossy_inverse(names)
    element_type = parse_dtype(array.dtype).numpy_dtype
    for chunk in array.iter_chunks(max(_READ_CHUNK_BYTES, head_dim * array.itemsize)):
        elements = (
            CastStats(array.dtype, "fp32").cast(chunk).view("<f4") if is_lossy else chunk.view(element_type)
        ).reshape(-1, head_dim)
        inverted_rows = invert_transforms(elements, part, names).reshape(-1).view("u1")
        yield CastStats("fp32", array.dtype).cast(inverted_rows) if is_lossy else inverted_rows


def to_common_order(source: Source) -> tuple[Source, list[str]]:
    """Invert the transforms that an engine certainly applied, unless the caller specified some; also return notes."""
    cache = source.engine_cache
    certain_transforms = cache.altered if cache is not None and source.inverted_transforms is None else ()
    if not certain_transforms:
        return source, describe_order(source)
    inverted_source = invert_source_transforms(source, certain_transforms)
    return inverted_source, [
        f"{_describe_pairing(source)}: brought into the order of other engines (--invert none keeps it)"
    ]


def describe_order(source: Source) -> list[str]:
    """Describe what is known of the element order of K; empty if the caller specified transforms to invert."""
    cache = source.engine_cache
    if cache is None or source.inverted_transforms == ():
        return []
    if "k-order" in cache.altered:
        return [
            f"{_describe_pairing(source)}, in other engines i and i + half a head: --invert k-order brings it "
            "into their "
            f"order"
        ]
    if "k-order" in cache.perhaps_altered:
        return [
            f"nothing says in which order {cache.engine} has K: of Llama models and the like neighbours are turned "
            "together by RoPE, in other engines dimensions half a head apart (--invert k-order, or --invert none)"
        ]
    return []


def describe_order_conflicts(first: Source, second: Source) -> list[str]:
    """Return notes about two compared caches whose K may be in different element orders."""
    caches = [source.engine_cache for source in (first, second)]
    is_k_reordered = ["k-order" in (source.inverted_transforms or ()) for source in (first, second)]
    if caches[0] and caches[1] and caches[0].engine == caches[1].engine and is_k_reordered[0] == is_k_reordered[1]:
        return []
    return [*describe_order(first), *describe_order(second)]


def _describe_pairing(source: Source) -> str:
    cache = source.engine_cache
    model = cache.details.get("architecture") if cache else None
    return f"K of architecture {model!r}: RoPE turns dimensions 2i and 2i + 1 together"
