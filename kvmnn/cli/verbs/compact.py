"""``kvmnn compact``: drop tokens from packed files as the engine does."""

from __future__ import annotations

import argparse
import re
import time
from typing import TYPE_CHECKING, Any

from ...text import LOSSLESS
from .. import packed_options, prefix_output, printing, shared_options
from ..printing import UsageError

if TYPE_CHECKING:
    from ...formats.mnn.compaction import Plan
    from ...formats.mnn.describing import Described

_TEXT = """Compact the packed files of a prefix cache or of a live one: of the last --remove tokens only the --reserve
pairs stay, begin:size, begin counted from the start of that window. The files keep their size, and what lies behind the
live tokens stays as it was, as in the engine.

  kvmnn compact sys/ -o small/ --remove 160 --reserve 0:64,128:32 --tokens 160 --model MODEL/

LOSSY: the tokens that go are gone. The true position of every kept token stands in <name>.kvmnn.json. Rotary positions
inside K are not computed again, in the engine neither."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "compact", run, "drop tokens from packed files as the engine does", _TEXT)
    parser.add_argument("input", metavar="IN")
    shared_options.add_output(parser, "directory to write the files to")
    shared_options.add_dtype(parser, "what the words are, where the pack numbers do not say")
    parser.add_argument("--remove", type=_whole, metavar="N", help="tokens in the window at the end (default: all)")
    parser.add_argument("--reserve", type=_pairs, default=(), metavar="BEGIN:SIZE,...", help="what stays of the window")
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help='one plan for each layer instead: a JSON list of {"layer": 0, "remove": N, "pairs": [[begin, size], ...]}',
    )
    parser.add_argument("--dialect", choices=("fork", "upstream"), default="fork", help="whose rules (default: fork)")
    packed_options.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...files.output import DirectoryOutput
    from ...formats.mnn.compaction import compact
    from ...packed.cache_info import SIDE_SUFFIX

    output = prefix_output.required_output(arguments)
    described = _described(arguments)
    name = prefix_output.prefix_name(arguments, described.info)
    plans = _plans(arguments, len(described.info.layers))
    started = time.perf_counter()
    directory = DirectoryOutput(output, force=arguments.force, protect=described.files.paths, index=name + SIDE_SUFFIX)
    with printing.progress(arguments, described.info.file_bytes, "compact") as step, directory:
        after = compact(described, plans, directory, name=name, dialect=arguments.dialect, progress=step)
        directory.commit()
    seconds = time.perf_counter() - started
    before = sum(layer.tokens for layer in described.info.layers)
    kept = sum(layer.tokens for layer in after.layers)
    if arguments.json:
        printing.print_json(
            {
                "verb": "compact",
                "input": arguments.input,
                "output": output,
                "label": "LOSSY" if kept < before else LOSSLESS,
                "tokens_before": before,
                "tokens_after": kept,
                "seconds": seconds,
                "notes": list(described.notes),
                "cache": printing.cache_document(after),
            }
        )
    lines = [
        f"{output}: prefix {name!r}, {printing.summary(after)}",
        f"  {printing.share(after.live_bytes, after.file_bytes)}",
        f"  {'LOSSY' if kept < before else LOSSLESS}: {kept:,} of {before:,} tokens of all layers stay; the "
        f"files keep their size (repack or pack --capacity makes them smaller)",
    ]
    printing.say(arguments, "\n".join(lines))
    return 0


def _described(arguments: argparse.Namespace) -> Described:
    import sys

    from ...formats.mnn.describing import describe_files
    from ...formats.opening import find_packed
    from ...formats.options import PackedOptions

    options = packed_options.options(arguments) or PackedOptions()
    files = find_packed(arguments.input, options)
    if files is None:
        raise UsageError(f"{arguments.input}: holds no packed files (a prefix cache or live cache files)")
    described = describe_files(files, options)
    if not arguments.quiet:
        for note in described.notes:
            print(f"kvmnn: note: {note}", file=sys.stderr)
    return described


def _plans(arguments: argparse.Namespace, layers: int) -> list[Plan]:
    from ...formats.mnn.compaction import Plan

    if arguments.plan is None:
        return [Plan(arguments.remove, arguments.reserve)]
    if arguments.remove is not None or arguments.reserve:
        raise UsageError("--plan stands for --remove and --reserve: say one or the other")
    return _plan_file(arguments.plan, layers)


def _plan_file(path: str, layers: int) -> list[Plan]:
    import json

    from ...errors import KvmnnError, SourceError
    from ...files.json_document import Node, unique_keys
    from ...formats.mnn.compaction import Plan

    try:
        with open(path, "rb") as file:
            document = json.load(file, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as exc:
        if isinstance(exc, KvmnnError):
            raise
        raise SourceError(f"{path}: is not valid JSON: {str(exc)[:200]}") from None
    entries = Node(document, path, "").items()
    plans: dict[int, Plan] = {}
    for entry in entries:
        pairs = [tuple(number.whole() for number in pair.items(2, 2)) for pair in entry.at("pairs").items()]
        plans[entry.at("layer").integer(0)] = Plan(entry.at("remove").integer(0), tuple((b, s) for b, s in pairs))
    if sorted(plans) != list(range(layers)) or len(entries) != layers:
        raise SourceError(f"{path}: has plans for {len(entries)} layers: expected one for each of {layers}")
    return [plans[layer] for layer in range(layers)]


def _whole(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,19}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    found = []
    for pair in text.split(","):
        numbers = re.fullmatch(r"(-?\d{1,19}):(-?\d{1,19})", pair)
        if not numbers:
            raise argparse.ArgumentTypeError(f"{pair!r} is not a pair begin:size of whole numbers")
        found.append((int(numbers[1]), int(numbers[2])))
    return tuple(found)
