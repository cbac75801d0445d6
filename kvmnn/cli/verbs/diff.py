"""``kvmnn diff``: the first difference between two caches, and how many there are."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from ...text import count
from .. import loading, packed_options, printing, shared_options

_TEXT = """Compare two of anything that kvmnn reads: packed files, dumps, bundles and frames, files of arrays. Words are
compared bit by bit. Exit code 0: equal, 1: different.

What is said about packed files holds for both inputs; what kvmnn wrote says for itself what it holds. Where arrays are
K and V of layers by their names, the order of their axes does not matter."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "diff", run, "the first difference between two caches", _TEXT)
    parser.add_argument("first", metavar="A")
    parser.add_argument("second", metavar="B")
    shared_options.add_source(parser, "what the words are, where neither type nor pack numbers say")
    packed_options.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...arrays.differences import compare

    first, second = (loading.load([path], arguments, frames=True) for path in (arguments.first, arguments.second))
    for source in (first, second):
        loading.report_skipped(source, arguments)
    found = compare(first, second)
    if arguments.json:
        printing.print_json(
            {
                "verb": "diff",
                "first_input": arguments.first,
                "second_input": arguments.second,
                "equal": found.equal,
                "words": found.words,
                "differing": found.differing,
                "first": None if found.first is None else asdict(found.first),
                "unlike": list(found.unlike),
            }
        )
    lines = [f"{line} (first input, second input)" for line in found.unlike]
    if found.first is not None:
        lines.append(f"first difference: {found.first}")
        lines.append(f"{found.differing:,} of {found.words:,} words differ")
    printing.say(arguments, "\n".join(lines) if lines else f"equal: {count(found.words, 'word')}, bit by bit")
    return 0 if found.equal else 1
