"""``kvmnn diff``: the first difference between two caches, and how many there are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import axes_options, engine_options, idle_options, loading, packed_options, printing, shared_options
from ..printing import UsageError

if TYPE_CHECKING:
    from ...arrays.source import Source

_TEXT = """Compare two of anything that kvmnn reads: packed files, dumps, bundles and frames, files of arrays, weight
files of a compressor. Words are compared bit by bit. Exit code 0: equal, 1: different.

What is said about packed files holds for both inputs, but for --second-tokens; what kvmnn wrote says for itself what it
holds. Where arrays are K and V of layers by their names, the order of their axes does not matter; where one has more
tokens, the first ones are compared. Where both say which tokens of their text they hold, that is compared, too.

With --atol X the inputs may be of different engines and types: what each computed from the same text is compared in
numbers, layer by layer. --undo is about the inputs that are llama.cpp's: of each what may have been done to it is
undone, and a note says what."""


def _both(*inputs: tuple[str, argparse.Namespace]) -> list[Source]:
    """Both inputs; rows of two llama.cpp caches are compared as they are where nothing says the heads of either."""
    from ...errors import MissingOptionError
    from ...files.mapped import is_stream

    inputs = tuple((path, _with_own_model(path, arguments)) for path, arguments in inputs)
    try:
        return [_loaded(path, arguments) for path, arguments in inputs]
    except MissingOptionError:
        undoing = inputs[0][1].undo not in (None, ("none",))
        if undoing or not all(engine_options.is_llama(path) and not is_stream(path) for path, _ in inputs):
            raise
        found = [_loaded(path, arguments, any_heads=True) for path, arguments in inputs]
        if any(source.engine_cache is None or source.engine_cache.kv_heads is not None for source in found):
            raise
        return found


def _with_own_model(path: str, arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments with ``--model`` where it is about this input: a .gguf file is not about MNN's, and the reverse."""
    are_llama = [engine_options.is_llama(each) for each in (arguments.first, arguments.second)]
    if arguments.model is None or are_llama[0] == are_llama[1]:
        return arguments
    is_own = engine_options.is_gguf(arguments.model) == engine_options.is_llama(path)
    return arguments if is_own else _with(arguments, model=None)


def _loaded(path: str, arguments: argparse.Namespace, *, any_heads: bool = False) -> Source:
    from ...compressor import as_source, is_weights

    if is_weights(path):
        return as_source(path)
    asked = arguments.undo is not None and engine_options.is_llama(path)
    said = _with(engine_options.of_input(arguments, path), undo=None)
    if asked:  # `_undone` does it, of what all arrays say
        said = _with(said, undo=("none",), tensor=[])
    used = packed_options.LAYING
    return loading.load([path], said, frames=True, used=used, any_heads=any_heads, one_of_several=True)


def _with(arguments: argparse.Namespace, **other: Any) -> argparse.Namespace:
    """The arguments as they hold for one of the inputs."""
    return argparse.Namespace(**vars(arguments) | other)


def _undone(sources: list[Source], arguments: argparse.Namespace) -> list[Source]:
    """The sources without what llama.cpp did to each of what is to be undone, and a note what that is."""
    from ...arrays.own_order import undo_where_done
    from ...formats.llama import ENGINE
    from ...formats.options import ReadOptions
    from ...formats.reading import chosen

    if arguments.undo is None:
        return sources
    inputs = (arguments.first, arguments.second)
    if not any(source.engine_cache and source.engine_cache.engine == ENGINE for source in sources):
        raise UsageError(f"--undo is about caches of llama.cpp, and {' '.join(inputs)} holds none")
    if arguments.blocks:
        raise UsageError("--undo is about numbers, and --blocks keeps bytes: leave one of them out")
    undone = undo_where_done(sources, arguments.undo)
    for path, source in zip(inputs, undone, strict=True):
        if arguments.undo != ("none",):
            what = ", ".join(source.undone or ()) or "nothing, as nothing of that was done to it"
            printing.note(arguments, f"{path}: undone: {what}")
    options = ReadOptions(tensors=tuple(arguments.tensor))
    return [chosen(source, path, options) for path, source in zip(inputs, undone, strict=True)]


def _check_laid(sources: Sequence[Source], arguments: argparse.Namespace) -> None:
    """`UsageError` for ``--axes`` and ``--shape`` that are about neither input."""
    from ...arrays.axes import is_laid

    laid = axes_options.laid(arguments)
    if (laid.axes or laid.shape) and not any(is_laid(source, laid) for source in sources):
        why = "their arrays have another number of axes, or say themselves how they lie"
        said = f"fits neither {arguments.first} nor {arguments.second}: {why}"
        idle_options.refuse(arguments, ["kv_axes", "kv_shape"], said)


def _one_of_batch(sources: Sequence[Source], arguments: argparse.Namespace) -> list[Source]:
    """The sources with one text each of their batches, where they have any: one at least."""
    from ...arrays.axes import Laid, laid_out

    if arguments.kv_batch is None:
        return list(sources)
    laid = Laid(batch=arguments.kv_batch, where_needed=True)
    cut = [laid_out(source, laid, " ".join(source.inputs)) for source in sources]
    if all(one is other for one, other in zip(sources, cut, strict=True)):
        where = f"{arguments.first} and {arguments.second}"
        raise UsageError(f"{where}: their arrays have no axis for a batch: leave --batch out")
    return cut


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "diff", run, "the first difference between two caches", _TEXT)
    parser.add_argument("first", metavar="A", help="anything that kvmnn reads")
    parser.add_argument("second", metavar="B", help="what it is compared with")
    shared_options.add_source(parser, "what the words are, where neither type nor pack numbers say")
    parser.add_argument(
        "--atol",
        type=_tolerance,
        metavar="X",
        help="compare K and V of layers in numbers: none may be further apart than X (default: bit by bit)",
    )
    packed_options.add_packed(parser, second_tokens=True, undo=True)


def _tolerance(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance: expected a number of at least 0")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...arrays import compare, compare_close
    from ...arrays.own_order import unlike_orders
    from ...compressor import header_differences
    from ...formats.noted_positions import held_by

    paths = (arguments.first, arguments.second)
    packed_options.refuse_idle(arguments, paths)
    if not packed_options.may_be_packed(arguments.second):
        idle_options.refuse(arguments, ["second_tokens"], f"is about packed files, and {arguments.second} holds none")
    whole = _with(arguments, kv_batch=None)  # a batch is cut below, where both are known
    of_second = _with(whole, tokens=arguments.second_tokens or arguments.tokens)
    both = _both((arguments.first, whole), (arguments.second, of_second))
    _check_laid(both, arguments)
    if not any(array.array_dtype == "|u1" for source in both for array in source.arrays):
        idle_options.refuse(arguments, ["blocks"], f"is about quantised K and V, and {' '.join(paths)} holds none")
    first, second = _undone(_one_of_batch(both, arguments), arguments)
    for path, source in zip(paths, (first, second), strict=True):
        loading.report_skipped(source, arguments)
        packed_options.check_origin(arguments, source.cache, path)
    loading.report_notes(unlike_orders(first, second), arguments)
    held = held_by(first), held_by(second)
    if arguments.atol is not None:
        close = compare_close(first, second, arguments.atol, held)
        printing.show(arguments, "diff", close)
        return 0 if close.equal else 1
    differences = compare(first, second, held)
    headers = header_differences(first.metadata, second.metadata)
    differences = replace(differences, unlike=(*headers, *differences.unlike))
    printing.show(arguments, "diff", differences)
    return 0 if differences.equal else 1
