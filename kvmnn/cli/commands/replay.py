"""``kvmnn replay``: a cache run through the lossless runtime once more."""

from __future__ import annotations

import argparse
from typing import Any

from .. import console, input_sources, model_options, packed_options, shared_options

_DESCRIPTION = """\
Run K and V that were computed once through the lossless runtime, the first tokens as a prompt and the others
one by one: what would be compressed, when, and what it would take. What attention would read is compared with the
cache, by default at the ends; LOSSLESS needs --compare all. A difference is exit code 1; so is a configuration with
which nothing is compressed and nothing evicted.

  kvmnn replay dump/ --config config.json --prompt 512

CACHE is anything that kvmnn reads as K and V of layers. --config is the engine's own JSON file (its kv_lossless_ and
kv_h2o_ keys; docs/runtime.md). Evictions need --scores: attention probabilities, [layer, head, query, key] or an array
[head, query, key] for each layer."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(
        subparsers, "replay", run, "a cache run through the lossless runtime", _DESCRIPTION
    )
    parser.add_argument("inputs", nargs="+", metavar="CACHE", help="K and V of layers")
    parser.add_argument("--config", required=True, metavar="FILE", help="the engine's JSON configuration")
    parser.add_argument(
        "--prompt", type=shared_options.parse_positive, metavar="N", help="tokens of the prompt (default: half)"
    )
    parser.add_argument(
        "--behaviour",
        choices=("sound", "engine"),
        default="sound",
        help="engine: with the MNN fork's defects (default: sound)",
    )
    parser.add_argument("--scores", metavar="FILE", help="attention probabilities, for evictions")
    parser.add_argument(
        "--compare",
        choices=("ends", "all"),
        default="ends",
        help="which calls to compare: ends, those of the first two steps and the last, or all (default: ends)",
    )
    parser.add_argument("--plot", metavar="DIR", help="draw memory, ratio, queue, latency into DIR (matplotlib)")
    shared_options.add_force(parser)
    shared_options.add_source(parser, "what the words are, where the input does not say")
    parser.add_argument("--token-major", action="store_true", help="arrays are [token, kv_head, head_dim]")
    packed_options.add_packed_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ..._util.text import pluralize
    from ...formats import registry
    from ...runtime import read_attention, read_trace, replay_plots, replay_trace

    if arguments.plot:
        replay_plots.check_can_write(arguments.plot, arguments.force)
    config = model_options.read_runtime_config(arguments.config)
    source = input_sources.load(arguments.inputs, arguments, with_frames=True)
    input_sources.report_skipped(source, arguments)
    source.token_major |= arguments.token_major
    trace = read_trace(source)
    attention = None
    if arguments.scores:
        if not config.h2o.enable:
            console.print_note(
                arguments, f"{arguments.scores} plans no eviction: {arguments.config} has no kv_h2o_enable"
            )
        attention = read_attention(registry.open(arguments.scores), len(trace.layers), trace.tokens)
    with console.progress_bar(arguments, trace.tokens, "replaying", unit="token") as progress:
        result = replay_trace(
            trace,
            config,
            prompt=arguments.prompt,
            behaviour=arguments.behaviour,
            attention=attention,
            compare=arguments.compare,
            progress=progress,
        )
    written_paths = result.plot(arguments.plot, overwrite=arguments.force) if arguments.plot else []
    console.show_result(arguments, "replay", result)
    if written_paths:
        console.print_line(arguments, f"{pluralize(len(written_paths), 'plot file')} in {arguments.plot}")
    return 0 if result.has_passed else 1
