"""``kvmnn diff``: the first difference between two caches, and how many there are."""

from __future__ import annotations

import argparse
from typing import Any

from .. import loading, packed_options, printing, shared_options

_TEXT = """Compare two of anything that kvmnn reads: packed files, dumps, bundles and frames, files of arrays. Words are
compared bit by bit. Exit code 0: equal, 1: different.

What is said about packed files holds for both inputs; what kvmnn wrote says for itself what it holds. Where arrays are
K and V of layers by their names, the order of their axes does not matter."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "diff", run, "the first difference between two caches", _TEXT)
    parser.add_argument("first", metavar="A", help="anything that kvmnn reads")
    parser.add_argument("second", metavar="B", help="what it is compared with")
    shared_options.add_source(parser, "what the words are, where neither type nor pack numbers say")
    packed_options.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...arrays import compare

    paths = (arguments.first, arguments.second)
    packed_options.refuse_idle(arguments, paths)
    first, second = (loading.load([path], arguments, frames=True, used=packed_options.LAYING) for path in paths)
    for path, source in zip(paths, (first, second), strict=True):
        loading.report_skipped(source, arguments)
        packed_options.check_origin(arguments, source.cache, path)
    differences = compare(first, second)
    printing.show(arguments, "diff", differences)
    return 0 if differences.equal else 1
