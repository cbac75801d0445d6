"""``kvmnn bench``: speed and ratio of kvmnn and of the rivals that are installed."""

from __future__ import annotations

import argparse
from typing import Any

from .. import break_even_options, console, input_sources, layer_stream_options, shared_options
from ..console import UsageError

_DESCRIPTION = """\
Measure encode and decode speed and ratio on real data: kvmnn's efforts, its dense streams of K and V where their axes
are known, and the other codecs that are installed (pip install bitshuffle blosc2 lz4 pcodec zipnn zstandard).

With --codec all layers of a cache are one row for each codec.

All codecs take turns in one process; figures are medians over --repeats. 24 MB take 20 to 40 CPU seconds (adapt 10 of
them). Each round trip is checked. Break-even is the
link or disk speed below which compress + send + decompress (wall time, in sequence) is faster than sending raw bytes; a
last table has it for reading alone, and for times at the 95th percentile. A codec is dominated where another one is
nowhere worse in ratio and in CPU time of both directions. --speed says how fast the engine computes, in tokens a second
or as a file of its times (docs/prefix-store.md), and how fast the link is: from what length on loading K and V beats
computing them."""


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "bench",
        run,
        "speed and ratio next to the rivals",
        _DESCRIPTION,
        examples=(
            "kvmnn bench dump/",
            "kvmnn bench kv.npz --repeats 9 --threads 4",
            "kvmnn bench kv/ --codec profile:lm.kvmp --codec transform:lm.kvmp",
        ),
        shown="--dtype --tensor --codec --repeats --sample-bytes --speed --max",
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="IN",
        help="arrays, a dump, a prefix cache, frames; other engines' caches after kvmnn mnn unpack",
    )
    shared_options.add_source_options(parser, "element type (default: the array's own; raw input needs it)")
    parser.add_argument(
        "--repeats",
        type=shared_options.parse_positive,
        metavar="N",
        help="timed turns of each codec (default: 5, fewer of one that takes more than 5 s)",
    )
    parser.add_argument(
        "--sample-bytes",
        type=shared_options.parse_byte_count,
        default=64 << 20,
        metavar="SIZE",
        help="measure the beginning of larger arrays (default: 64M; 0: all)",
    )
    layer_stream_options.add_codec_option(
        parser,
        "measure this codec of a model's profile on all layers together, next to the others (repeatable); adapt: "
        "dense streams with tables that are learned in the cache (encode --adapt), which takes long",
        type=_parse_codec,
        metavar="profile:FILE|transform:FILE|adapt",
        action="append",
        default=[],
    )
    break_even_options.add_speed_option(parser, "for the time to the first token of stored prefixes")
    parser.add_argument("--max", action="store_true", help="measure effort max on all the data, not on its first MiB")
    parser.accept("--threads", default=1)
    shared_options.accept_table(parser)


_ADAPT = "adapt"


def _parse_codec(text: str) -> str:
    return text if text == _ADAPT else layer_stream_options.parse_layer_codec(text)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ...bench import compare, count_runs

    if arguments.codec:
        return _run_on_cache(arguments)
    source = input_sources.load(arguments.inputs, arguments)
    input_sources.report_skipped(source, arguments)
    total = count_runs(source, arguments.repeats, arguments.threads, arguments.sample_bytes, with_max=arguments.max)
    with console.progress_bar(arguments, total, "bench", unit="turn") as step:
        report = compare(
            source,
            max_bytes=arguments.sample_bytes,
            repeats=arguments.repeats,
            threads=arguments.threads,
            with_max=arguments.max,
            progress=step,
            engine=break_even_options.read_engine_times(arguments),
            link=arguments.load_speed,
        )
    console.show_result(arguments, "bench", report)
    return 0


def _run_on_cache(arguments: argparse.Namespace) -> int:
    from ...bench import compare_on_cache, count_cache_runs

    if arguments.max:
        raise UsageError("--max is about effort max, which is not measured with --codec")
    source = input_sources.load(arguments.inputs, arguments, with_frames=True)
    input_sources.report_skipped(source, arguments)
    options = [layer_stream_options.parse_options(text) for text in arguments.codec if text != _ADAPT]
    make_adapted = None
    if _ADAPT in arguments.codec:
        from ...calibration import make_adapted_codec

        make_adapted = make_adapted_codec
    dtype = source.arrays[0].dtype if source.arrays else "fp16"
    num_codecs = len(options) + (make_adapted is not None)
    total = count_cache_runs(dtype, num_codecs, arguments.repeats, arguments.threads)
    with console.progress_bar(arguments, total, "bench", unit="turn") as step:
        report = compare_on_cache(
            source,
            options,
            max_bytes=arguments.sample_bytes,
            repeats=arguments.repeats,
            threads=arguments.threads,
            progress=step,
            engine=break_even_options.read_engine_times(arguments),
            link=arguments.load_speed,
            make_adapted=make_adapted,
        )
    console.show_result(arguments, "bench", report)
    return 0
