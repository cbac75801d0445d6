"""``kvmnn compact``: drop tokens from packed files as the engine does."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from .. import console, dense_options, input_sources, packed_options, shared_options
from ..console import UsageError

if TYPE_CHECKING:
    from ...formats.mnn import CompactionPlan
    from ...packed.cache_info import CacheInfo

_DESCRIPTION = """\
Compact the packed files of a prefix cache or of a live one: of the last --remove tokens only the --reserve
pairs stay, begin:size, begin counted from the start of that window. The files keep their size, and what lies behind the
live tokens stays as it was, as in the engine.

  kvmnn compact sys/ -o small/ --remove 160 --reserve 0:64,128:32 \\
      --tokens 160 --model MODEL/

LOSSY: the tokens that go are gone. The true position of every kept token stands in <name>.kvmnn.json.

K keeps its rotary positions, and MNN counts from 0 after loading: it needs to be told the length of the text (the
result shows the line of C++), or K rotated to the first positions: --rerotate."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(
        subparsers, "compact", run, "drop tokens from packed files as the engine does", _DESCRIPTION
    )
    parser.add_argument("input", metavar="IN", help="the directory of a prefix cache or of live files")
    shared_options.add_output(parser, "directory to write the files to (default: IN.compact/)")
    shared_options.add_dtype(parser, "what the words are, where the pack numbers do not say")
    parser.add_argument(
        "--remove", type=_parse_signed, metavar="N", help="tokens in the window at the end (default: all)"
    )
    parser.add_argument(
        "--reserve", type=_parse_pairs, default=(), metavar="BEGIN:SIZE,...", help="what stays of the window"
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help='one plan for each layer instead: a JSON list of {"layer": 0, "remove": N, "pairs": [[begin, size], ...]} '
        "(kvmnn plan); positions.json of dump-kv --policy, or its folder; or the --json of eval --plot",
    )
    parser.add_argument("--plan-label", metavar="LABEL", help="of an evaluation of several policies, which")
    dense_options.add_rerotate_options(parser)
    parser.add_argument("--dialect", choices=("fork", "upstream"), default="fork", help="whose rules (default: fork)")
    packed_options.add_packed_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...formats.mnn import compact, open_packed

    dense_options.check_rerotate_options(arguments)
    output = console.choose_output(arguments, arguments.input, ".compact/")
    cache_reader = open_packed(arguments.input, packed_options.build_packed_options(arguments))
    input_sources.report_notes(cache_reader.notes, arguments)
    plans = read_plans_or_options(arguments, cache_reader.info)
    with console.progress_bar(arguments, cache_reader.info.file_bytes, "compact") as step:
        compact_result = compact(
            cache_reader,
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
    input_sources.report_notes(compact_result.notes[len(cache_reader.notes) :], arguments)
    console.show_result(arguments, "compact", compact_result)
    return 0


def read_plans_or_options(arguments: argparse.Namespace, info: CacheInfo) -> list[CompactionPlan]:
    from ...formats.mnn import CompactionPlan, read_compaction_plans

    if arguments.plan is None:
        shared_options.refuse_given(arguments, ["plan_label"], "needs --plan")
        return [CompactionPlan(arguments.remove, arguments.reserve)]
    if arguments.remove is not None or arguments.reserve:
        raise UsageError("--plan stands for --remove and --reserve: say one or the other")
    return read_compaction_plans(arguments.plan, info, label=arguments.plan_label)


def _parse_signed(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,19}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    pairs = []
    for pair in text.split(","):
        numbers = re.fullmatch(r"(-?\d{1,19}):(-?\d{1,19})", pair)
        if not numbers:
            raise argparse.ArgumentTypeError(f"{pair!r} is not a pair begin:size of whole numbers")
        pairs.append((int(numbers[1]), int(numbers[2])))
    return tuple(pairs)
