"""``kvmnn plan``: which tokens H2O would keep."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import engine_config, printing, shared_options, streams
from ..printing import UsageError

if TYPE_CHECKING:
    from ...h2o import H2OConfig

_TEXT = """Plan an H2O eviction as the engine plans it, from scores of blocks or from attention: what stays, as pairs
begin:size, and a picture of it. Every layer is planned as if it triggered now.

  kvmnn plan attention.npy --block 64 --sink 32 --recent 256 --target-ratio 3.5
  kvmnn plan attention.npy --config config.json
  kvmnn plan scores.npz -o plan.json
  kvmnn compact CACHE/ -o small/ --plan plan.json

IN is an array with one axis (scores of blocks) or with two to four (attention: [heads, keys], [heads, queries, keys],
[layers, heads, queries, keys]), a file of one such array for each layer, or a .json list of scores."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "plan", run, "which tokens H2O would keep", _TEXT)
    parser.add_argument("input", metavar="IN", help="scores of blocks, or attention")
    shared_options.add_output(parser, "JSON file for `kvmnn compact --plan`; - for standard output")
    shared_options.add_source(parser, "what raw words are", axes=False)
    parser.add_argument("--kind", choices=("scores", "attention"), help="what IN holds, where its axes do not say")
    parser.add_argument("--tokens", type=shared_options.positive, metavar="N", help="tokens that the scores are about")
    parser.add_argument(
        "--config", metavar="FILE", help="the engine's JSON file, whose kv_h2o_ keys say what no option says"
    )
    parser.add_argument("--block", type=shared_options.positive, metavar="N", help="tokens in a block (default: 64)")
    parser.add_argument("--sink", type=shared_options.whole, metavar="N", help="tokens kept at the start (default: 32)")
    parser.add_argument(
        "--recent", type=shared_options.whole, metavar="N", help="tokens kept at the end (default: 256)"
    )
    parser.add_argument(
        "--target-ratio",
        type=_number,
        metavar="X",
        help="tokens before over tokens after (default: 3, the engine's)",
    )
    parser.add_argument("--keep-ratio", type=_number, metavar="X", help="share of tokens to keep, instead")
    parser.add_argument("--alpha", type=_number, metavar="X", help="weight of older scores (default: 0.9)")
    parser.add_argument(
        "--engine-threads", type=shared_options.positive, default=1, metavar="N", help="order of additions (default: 1)"
    )
    parser.add_argument(
        "--tile", type=shared_options.positive, metavar="N", help="keys in a tile of the attention (default: all)"
    )
    parser.add_argument(
        "--bytes-per-token",
        type=shared_options.positive,
        metavar="N",
        help="K and V bytes of a token, for the ratio of bytes",
    )
    parser.add_argument("--no-map", action="store_true", help="leave the picture out")


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...formats.h2o_files import plan_file
    from ...formats.options import ReadOptions

    to_stdout = arguments.output == printing.STDIO
    if arguments.json and to_stdout:
        raise UsageError("--json and -o - both want standard output")
    plans = plan_file(
        arguments.input,
        _config(arguments),
        None if to_stdout else arguments.output,
        options=ReadOptions(
            dtype=arguments.dtype, tensors=tuple(arguments.tensor), skip_unsupported=arguments.skip_unsupported
        ),
        kind=arguments.kind,
        tokens=arguments.tokens,
        threads=arguments.engine_threads,
        tile=arguments.tile,
        force=arguments.force,
    )
    if to_stdout:
        printing.print_json(plans.entries())
    if arguments.json:
        printing.show(arguments, "plan", plans)
    width = shutil.get_terminal_size().columns if streams.on_terminal() else 100
    for line in plans.lines(width=width, picture=not arguments.no_map):
        printing.say(arguments, line, data_on_stdout=to_stdout)
    return 0


def _config(arguments: argparse.Namespace) -> H2OConfig:
    if arguments.target_ratio is not None and arguments.keep_ratio is not None:
        raise UsageError("--target-ratio and --keep-ratio: say one or the other")
    if arguments.target_ratio is not None and arguments.target_ratio < 1:
        raise UsageError(f"--target-ratio is {arguments.target_ratio:g}: expected at least 1")
    if arguments.keep_ratio is not None and not 0 <= arguments.keep_ratio <= 1:
        raise UsageError(f"--keep-ratio is {arguments.keep_ratio:g}: expected 0 to 1")
    if arguments.alpha is not None and not 0 <= arguments.alpha <= 1:
        raise UsageError(f"--alpha is {arguments.alpha:g}: expected 0 to 1")
    said = {
        "block_tokens": arguments.block,
        "sink_tokens": arguments.sink,
        "recent_tokens": arguments.recent,
        "target_lossy_ratio": arguments.target_ratio,
        "target_keep_ratio": arguments.keep_ratio,
        "ema_alpha": arguments.alpha,
        "bytes_per_token": arguments.bytes_per_token,
    }
    if arguments.target_ratio is not None or arguments.keep_ratio is not None:
        said["target_mode"] = "adaptive" if arguments.keep_ratio is None else "static"
    return replace(_engine_config(arguments), **{name: value for name, value in said.items() if value is not None})


def _engine_config(arguments: argparse.Namespace) -> H2OConfig:
    """What ``--config`` says, or the engine's defaults."""
    from ...errors import KvmnnError
    from ...h2o import H2OConfig

    if arguments.config is None:
        return H2OConfig()
    document = engine_config.read_config(arguments.config)
    try:
        config = H2OConfig.from_engine(document)
    except KvmnnError as exc:
        raise UsageError(f"{arguments.config}: {exc}") from None
    for line in _notes(config, document):
        printing.note(arguments, f"{arguments.config}: {line}")
    return config


def _notes(config: H2OConfig, document: dict[str, Any]) -> Iterator[str]:
    """What the engine would make of its file that a plan does not show."""
    from ...h2o.config import ADAPTIVE, KEY_OF, QUANTISED_MODES, STATIC

    why = "" if config.enable else "kv_h2o_enable is not true"
    if document.get("attention_mode") in QUANTISED_MODES:
        why = f"attention_mode {document['attention_mode']} holds K or V in int8"
    if why:
        yield f"{why}, so the engine evicts nothing; the plan is what it would evict otherwise"
    mode = document.get("kv_h2o_target_mode", ADAPTIVE)
    if mode not in (ADAPTIVE, STATIC):
        yield f"kv_h2o_target_mode {mode!r:.80} counts as {ADAPTIVE!r}"
    for name, (given, used) in config.clamped.items():
        if KEY_OF[name] in document:
            yield f"{KEY_OF[name]} {given} counts as {used}"


def _number(text: str) -> float:
    if not re.fullmatch(r"-?\d{1,12}(\.\d{0,12})?|-?\.\d{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(text)
