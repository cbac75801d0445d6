"""K and V of a source as a model of another engine computes them: what llama.cpp did to the words, undone or named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from ..dtypes import PART_LETTERS, Part, by_name
from ..errors import OptionError
from .casting import Cast
from .named_array import NamedArray, Piece, rechunked
from .names import part_of
from .source import Source
from .undoing import UNDOABLE, Undo, check_undo, rounded, undone

_STEP = 1 << 20


def undo(source: Source, names: Sequence[str]) -> Source:
    """The source with K and V as they were before; read, and turned, when they are asked for.

    Parameters
    ----------
    source
        Arrays ``[..., head_dim]`` whose names say K or V: fp16, bf16 or fp32 words in C order.
    names
        Of `UNDOABLE`: ``"k-order"`` is exact; a rotation is undone in float32 and rounded once. ``"none"`` alone says
        that nothing is to be undone.

    Returns
    -------
    Source
        Its `Source.undone` has the names, in the order in which they were undone.

    Raises
    ------
    OptionError
        For other names, for what no head of that size had done to it, for what the engine does not do to such a cache,
        and for arrays of bytes.
    """
    if list(names) == ["none"]:
        return replace(source, undone=())
    where, cache = " ".join(source.inputs), source.engine_cache
    if "k-order" in (source.undone or ()):
        raise OptionError(f"{where}: what is undone before k-order has to be said together with it")
    arrays = []
    wanted: tuple[Undo, ...] = ()
    for array in source.arrays:
        wanted = check_undo(names, array.shape[-1] if array.shape else 0)
        if array.order != "C" or array.itemsize != array.word_bytes or len(array.shape) < 2:
            raise OptionError(f"{where}: array {array.name!r} is none of K and V in heads, which --undo is about")
        arrays.append(_undone(array, part_of(where, array.name)[0], wanted))
    if cache is not None:
        able = _able(source)
        for name in wanted:
            if name not in able:
                expected = f"expected {' or '.join(able)}" if able else "leave --undo out"
                raise OptionError(f"{where}: undo {name}: {cache.engine} does no such thing to this cache: {expected}")
        altered, perhaps = (
            tuple(name for name in each if name not in wanted) for each in (cache.altered, cache.perhaps_altered)
        )
        cache = replace(cache, altered=altered, perhaps_altered=perhaps)
    return replace(source, arrays=arrays, undone=wanted, engine_cache=cache)


def undo_where_done(sources: Sequence[Source], names: Sequence[str]) -> list[Source]:
    """The sources, each without what its engine did to it, or may have done, of what is to be undone.

    Raises
    ------
    OptionError
        As `undo`, and for what was done to none of them.
    """
    if list(names) == ["none"]:
        return [undo(source, names) for source in sources]
    able = [_able(source) for source in sources]
    for name in names:
        if name not in UNDOABLE:
            check_undo([name], 0)
        if not any(name in each for each in able):
            said = [name for name in UNDOABLE if any(name in each for each in able)]
            expected = f"expected {' or '.join(said)}" if said else "leave --undo out"
            raise OptionError(f"undo {name}: was done to neither of {' and '.join(_names(sources))}: {expected}")
    wanted = [[name for name in names if name in each] for each in able]
    return [undo(source, mine) if mine else source for source, mine in zip(sources, wanted, strict=True)]


def _able(source: Source) -> tuple[Undo, ...]:
    """What the engine did to a source, and what it may have done."""
    return source.engine_cache.altered + source.engine_cache.perhaps_altered if source.engine_cache else ()


def _names(sources: Sequence[Source]) -> list[str]:
    return [" ".join(source.inputs) for source in sources]


def _undone(array: NamedArray, part: Part, names: tuple[Undo, ...]) -> NamedArray:
    if not any(name.startswith(PART_LETTERS[part]) for name in names):
        return array
    reader = partial(_runs, array, part, names)
    return replace(array, array_dtype=array.array_dtype.replace(">", "<"), reader=reader)


def _runs(array: NamedArray, part: Part, names: tuple[Undo, ...], step: int) -> Iterator[Piece]:
    yield from rechunked(_rows(array, part, names), step, array.nbytes)


def _rows(array: NamedArray, part: Part, names: tuple[Undo, ...]) -> Iterator[Piece]:
    dims, rotates = array.shape[-1], rounded(names)
    word = by_name(array.dtype).numpy
    for piece in array.pieces(max(_STEP, dims * array.itemsize)):
        words = (Cast(array.dtype, "fp32").run(piece).view("<f4") if rotates else piece.view(word)).reshape(-1, dims)
        found = undone(words, part, names).reshape(-1).view("u1")
        yield Cast("fp32", array.dtype).run(found) if rotates else found


def for_other_engines(source: Source) -> tuple[Source, list[str]]:
    """The source as other engines take it, as far as that is known for certain; and what to say of it.

    What an engine surely did to the words (`EngineCache.altered`) is undone, unless the caller said what is to be.
    """
    cache = source.engine_cache
    sure = cache.altered if cache is not None and source.undone is None else ()
    if not sure:
        return source, order_notes(source)
    found = undo(source, sure)
    return found, [f"{_lies(source)}: brought into the order of other engines (--undo none keeps it)"]


def order_notes(source: Source) -> list[str]:
    """What is known, or not known, of the order of K; nothing where the caller said what is to be undone of it."""
    cache = source.engine_cache
    if cache is None or source.undone == ():
        return []
    if "k-order" in cache.altered:
        return [f"{_lies(source)}, in other engines i and i + half a head: --undo k-order brings it into their order"]
    if "k-order" in cache.perhaps_altered:
        return [
            f"nothing says in which order {cache.engine} has K: of Llama models and the like neighbours are turned "
            "together by RoPE, in other engines dimensions half a head apart (--undo k-order, or --undo none)"
        ]
    return []


def unlike_orders(first: Source, second: Source) -> list[str]:
    """What to say where two caches are compared of which one may hold K in another order than the other."""
    caches = [source.engine_cache for source in (first, second)]
    turned = ["k-order" in (source.undone or ()) for source in (first, second)]
    if caches[0] and caches[1] and caches[0].engine == caches[1].engine and turned[0] == turned[1]:
        return []
    return [*order_notes(first), *order_notes(second)]


def _lies(source: Source) -> str:
    cache = source.engine_cache
    model = cache.details.get("architecture") if cache else None
    return f"K of architecture {model!r}: RoPE turns dimensions 2i and 2i + 1 together"
