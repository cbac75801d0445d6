"""``kvmnn compact``: drop tokens from packed files as the engine does."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from .. import idle_options, loading, packed_options, printing, rerotate_options, shared_options
from ..printing import UsageError

if TYPE_CHECKING:
    from ...formats.mnn import CompactionPlan
    from ...packed.cache_info import CacheInfo

_TEXT = """Compact the packed files of a prefix cache or of a live one: of the last --remove tokens only the --reserve
pairs stay, begin:size, begin counted from the start of that window. The files keep their size, and what lies behind the
live tokens stays as it was, as in the engine.

  kvmnn compact sys/ -o small/ --remove 160 --reserve 0:64,128:32 \\
      --tokens 160 --model MODEL/

LOSSY: the tokens that go are gone. The true position of every kept token stands in <name>.kvmnn.json.

K keeps its rotary positions, and MNN counts from 0 after loading: it needs to be told the length of the text (the
result shows the line of C++), or K rotated to the first positions: --rerotate."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "compact", run, "drop tokens from packed files as the engine does", _TEXT)
    parser.add_argument("input", metavar="IN", help="the directory of a prefix cache or of live files")
    shared_options.add_output(parser, "directory to write the files to (default: IN.compact/)")
    shared_options.add_dtype(parser, "what the words are, where the pack numbers do not say")
    parser.add_argument("--remove", type=_whole, metavar="N", help="tokens in the window at the end (default: all)")
    parser.add_argument("--reserve", type=_pairs, default=(), metavar="BEGIN:SIZE,...", help="what stays of the window")
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help='one plan for each layer instead: a JSON list of {"layer": 0, "remove": N, "pairs": [[begin, size], ...]} '
        "(kvmnn plan); positions.json of dump-kv --policy, or its folder; or the --json of eval --plot",
    )
    parser.add_argument("--plan-label", metavar="LABEL", help="of an evaluation of several policies, which")
    rerotate_options.add_rerotate(parser)
    parser.add_argument("--dialect", choices=("fork", "upstream"), default="fork", help="whose rules (default: fork)")
    packed_options.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...formats.mnn import compact, describe_packed

    rerotate_options.check(arguments)
    output = printing.output_or_beside(arguments, arguments.input, ".compact/")
    described = describe_packed(arguments.input, packed_options.options(arguments))
    loading.report_notes(described.notes, arguments)
    plans = _plans(arguments, described.info)
    with printing.progress(arguments, described.info.file_bytes, "compact") as step:
        compacted = compact(
            described,
            plans,
            output,
            name=arguments.name,
            dialect=arguments.dialect,
            rerotate=arguments.rerotate,
            rope=arguments.rope,
            model=arguments.model,
            force=arguments.force,
            progress=step,
        )
    loading.report_notes(compacted.notes[len(described.notes) :], arguments)
    printing.show(arguments, "compact", compacted)
    return 0


def _plans(arguments: argparse.Namespace, info: CacheInfo) -> list[CompactionPlan]:
    from ...formats.mnn import CompactionPlan, read_plans

    if arguments.plan is None:
        idle_options.refuse(arguments, ["plan_label"], "needs --plan")
        return [CompactionPlan(arguments.remove, arguments.reserve)]
    if arguments.remove is not None or arguments.reserve:
        raise UsageError("--plan stands for --remove and --reserve: say one or the other")
    return read_plans(arguments.plan, info, label=arguments.plan_label)


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
