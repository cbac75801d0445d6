"""``kvmnn replay``: a cache run through the lossless runtime once more."""

from __future__ import annotations

import argparse
from typing import Any

from .. import engine_config, loading, packed_options, printing, shared_options

_TEXT = """Run K and V that were computed once through the lossless runtime, the first tokens as a prompt and the others
one by one: what would be compressed, when, and what it would take. What attention would read is compared with the
cache, by default at the ends; LOSSLESS needs --compare all. A difference is exit code 1; so is a configuration with
which nothing is compressed and nothing evicted.

  kvmnn replay dump/ --config config.json --prompt 512

CACHE is anything that kvmnn reads as K and V of layers. --config is the engine's own JSON file (its kv_lossless_ and
kv_h2o_ keys; docs/runtime.md). Evictions need --scores: attention probabilities, [layer, head, query, key] or an array
[head, query, key] for each layer."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "replay", run, "a cache run through the lossless runtime", _TEXT)
    parser.add_argument("inputs", nargs="+", metavar="CACHE", help="K and V of layers")
    parser.add_argument("--config", required=True, metavar="FILE", help="the engine's JSON configuration")
    parser.add_argument(
        "--prompt", type=shared_options.positive, metavar="N", help="tokens of the prompt (default: half)"
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
    packed_options.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...formats import opening
    from ...runtime import attention_of, history_of, replay, replay_plots
    from ...text import count

    if arguments.plot:
        replay_plots.require(arguments.plot, arguments.force)
    config = engine_config.runtime_config(arguments.config)
    source = loading.load(arguments.inputs, arguments, frames=True)
    loading.report_skipped(source, arguments)
    source.token_major |= arguments.token_major
    history = history_of(source)
    attention = None
    if arguments.scores:
        if not config.h2o.enable:
            printing.note(arguments, f"{arguments.scores} plans no eviction: {arguments.config} has no kv_h2o_enable")
        attention = attention_of(opening.open(arguments.scores), len(history.layers), history.tokens)
    with printing.progress(arguments, history.tokens, "replaying", unit="token") as progress:
        result = replay(
            history,
            config,
            prompt=arguments.prompt,
            behaviour=arguments.behaviour,
            attention=attention,
            compare=arguments.compare,
            progress=progress,
        )
    written = result.plot(arguments.plot, force=arguments.force) if arguments.plot else []
    printing.show(arguments, "replay", result)
    if written:
        printing.say(arguments, f"{count(len(written), 'plot file')} in {arguments.plot}")
    return 0 if result.passed else 1
