"""``kvmnn diff``: the first difference between two caches, and how many there are."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import idle_options, loading, packed_options, printing, shared_options

if TYPE_CHECKING:
    from ...arrays.source import Source

_TEXT = """Compare two of anything that kvmnn reads: packed files, dumps, bundles and frames, files of arrays, weight
files of a compressor. Words are compared bit by bit. Exit code 0: equal, 1: different.

What is said about packed files holds for both inputs, but for --second-tokens; what kvmnn wrote says for itself what it
holds. Where arrays are K and V of layers by their names, the order of their axes does not matter; where one has more
tokens, the first ones are compared.

With --atol X the inputs may be of different engines and types: what each computed from the same text is compared in
numbers, layer by layer."""


def _loaded(path: str, arguments: argparse.Namespace) -> Source:
    from ...compressor import as_source, is_weights

    if is_weights(path):
        return as_source(path)
    return loading.load([path], arguments, frames=True, used=packed_options.LAYING, one_of_several=True)


def _of_second(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments as they hold for the second input."""
    return argparse.Namespace(**vars(arguments) | {"tokens": arguments.second_tokens or arguments.tokens})


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
    packed_options.add_packed(parser, second_tokens=True)


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
    from ...compressor import header_differences

    paths = (arguments.first, arguments.second)
    packed_options.refuse_idle(arguments, paths)
    if not packed_options.may_be_packed(arguments.second):
        idle_options.refuse(arguments, ["second_tokens"], f"is about packed files, and {arguments.second} holds none")
    first, second = _loaded(arguments.first, arguments), _loaded(arguments.second, _of_second(arguments))
    for path, source in zip(paths, (first, second), strict=True):
        loading.report_skipped(source, arguments)
        packed_options.check_origin(arguments, source.cache, path)
    if arguments.atol is not None:
        close = compare_close(first, second, arguments.atol)
        printing.show(arguments, "diff", close)
        return 0 if close.equal else 1
    differences = compare(first, second)
    headers = header_differences(first.metadata, second.metadata)
    differences = replace(differences, unlike=(*headers, *differences.unlike))
    printing.show(arguments, "diff", differences)
    return 0 if differences.equal else 1
