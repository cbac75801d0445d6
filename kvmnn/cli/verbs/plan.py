"""``kvmnn plan``: which tokens H2O would keep."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from ...text import LOSSLESS, count
from .. import printing, shared_options
from ..printing import UsageError

if TYPE_CHECKING:
    from ...h2o.config import H2OConfig
    from ...h2o.plan import Plan
    from ..score_files import LayerScores

_TEXT = """Plan an H2O eviction as the engine plans it, from scores of blocks or from attention: what stays, as pairs
begin:size, and a picture of it. Every layer is planned as if it triggered now.

  kvmnn plan attention.npy --block 64 --sink 32 --recent 256 --target-ratio 3.5
  kvmnn plan scores.npz -o plan.json && kvmnn compact CACHE/ -o small/ --plan plan.json

IN is an array with one axis (scores of blocks) or with two to four (attention: [heads, keys], [heads, queries, keys],
[layers, heads, queries, keys]), a file of one such array for each layer, or a .json list of scores."""


_MAX_PAIRS = 100


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "plan", run, "which tokens H2O would keep", _TEXT)
    parser.add_argument("input", metavar="IN")
    shared_options.add_output(parser, "JSON file for `kvmnn compact --plan`; - for standard output")
    shared_options.add_source(parser, "what raw words are")
    parser.add_argument("--kind", choices=("scores", "attention"), help="what IN holds, where its axes do not say")
    parser.add_argument("--tokens", type=shared_options.positive, metavar="N", help="tokens that the scores are about")
    parser.add_argument("--block", type=shared_options.positive, default=64, metavar="N", help="tokens in a block (64)")
    parser.add_argument(
        "--sink", type=shared_options.whole, default=32, metavar="N", help="tokens kept at the start (32)"
    )
    parser.add_argument(
        "--recent", type=shared_options.whole, default=256, metavar="N", help="tokens kept at the end (256)"
    )
    parser.add_argument(
        "--target-ratio",
        type=_number,
        metavar="X",
        help="tokens before over tokens after (3.0, the engine's own default)",
    )
    parser.add_argument("--keep-ratio", type=_number, metavar="X", help="share of tokens to keep, instead")
    parser.add_argument("--alpha", type=_number, default=0.9, metavar="X", help="weight of older scores (0.9)")
    parser.add_argument(
        "--engine-threads", type=shared_options.positive, default=1, metavar="N", help="order of additions (1)"
    )
    parser.add_argument(
        "--tile", type=shared_options.positive, metavar="N", help="keys in a tile of the attention (all)"
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
    from ...formats.options import ReadOptions
    from ...h2o import plan
    from ..score_files import read_scores

    if arguments.json and arguments.output == printing.STDIO:
        raise UsageError("--json and -o - both want standard output")
    config = _config(arguments)
    options = ReadOptions(
        dtype=arguments.dtype, tensors=tuple(arguments.tensor), skip_unsupported=arguments.skip_unsupported
    )
    started = time.perf_counter()
    layers = read_scores(
        arguments.input,
        config,
        options=options,
        kind=arguments.kind,
        tokens=arguments.tokens,
        threads=arguments.engine_threads,
        tile=arguments.tile,
    )
    plans = [plan(layer.scores, layer.kv_len, config) for layer in layers]
    seconds = time.perf_counter() - started
    document = [_entry(number, made) for number, made in enumerate(plans)]
    _write(arguments, document)
    label = "LOSSY" if any(made.evicted for made in plans) else LOSSLESS
    if arguments.json:
        printing.print_json(
            {
                "verb": "plan",
                "input": arguments.input,
                "output": arguments.output,
                "label": label,
                "seconds": seconds,
                "config": _used(config),
                "layers": [
                    entry | _figures(made, layer) for entry, made, layer in zip(document, plans, layers, strict=True)
                ],
            }
        )
    for number, (layer, made) in enumerate(zip(layers, plans, strict=True)):
        lines = _lines(number, layer, made, arguments)
        printing.say(arguments, "\n".join(lines), data_on_stdout=arguments.output == printing.STDIO)
    return 0


def _config(arguments: argparse.Namespace) -> H2OConfig:
    from ...h2o.config import H2OConfig

    if arguments.target_ratio is not None and arguments.keep_ratio is not None:
        raise UsageError("--target-ratio and --keep-ratio: say one or the other")
    if arguments.target_ratio is not None and arguments.target_ratio < 1:
        raise UsageError(f"--target-ratio is {arguments.target_ratio:g}: expected at least 1")
    if arguments.keep_ratio is not None and not 0 <= arguments.keep_ratio <= 1:
        raise UsageError(f"--keep-ratio is {arguments.keep_ratio:g}: expected 0 to 1")
    if not 0 <= arguments.alpha <= 1:
        raise UsageError(f"--alpha is {arguments.alpha:g}: expected 0 to 1")
    return H2OConfig(
        block_tokens=arguments.block,
        sink_tokens=arguments.sink,
        recent_tokens=arguments.recent,
        target_mode="adaptive" if arguments.keep_ratio is None else "static",
        target_lossy_ratio=arguments.target_ratio or 3.0,
        target_keep_ratio=0.5 if arguments.keep_ratio is None else arguments.keep_ratio,
        ema_alpha=arguments.alpha,
        bytes_per_token=arguments.bytes_per_token,
    )


def _used(config: H2OConfig) -> dict[str, Any]:
    return {
        "block_tokens": config.block,
        "sink_tokens": config.sink_tokens,
        "recent_tokens": config.recent_tokens,
        "target_mode": config.target_mode,
        "keep_ratio": float(config.ratio),
        "ema_alpha": float(config.alpha),
        "bytes_per_token": config.bytes_per_token,
    }


def _entry(number: int, made: Plan) -> dict[str, Any]:
    """What `kvmnn compact --plan` reads."""
    return {"layer": number, "remove": made.remove, "pairs": [list(pair) for pair in made.reserve]}


def _figures(made: Plan, layer: LayerScores) -> dict[str, Any]:
    return {
        "name": layer.name,
        "tokens": made.kv_len,
        "blocks": made.keep.size,
        "tokens_after": made.final_keep,
        "evicted": made.evicted,
        "target": made.target_before_floor,
        "floor_tokens": made.floor_tokens,
        "floor_dominates": made.floor_dominates,
        "quantized_keep": made.quantized_keep,
        "keep_ratio": float(made.keep_ratio),
        "lossy_ratio": float(made.lossy_ratio),
        "lossy_ratio_of": "tokens" if made.bytes_per_token is None else "bytes",
        "keep": "".join("1" if kept else "0" for kept in made.keep | (made.evicted == 0)),
    }


def _write(arguments: argparse.Namespace, document: list[dict[str, Any]]) -> None:
    import json

    from ...files.output import FileOutput

    if arguments.output is None:
        return
    if arguments.output == printing.STDIO:
        printing.print_json(document)
        return
    with FileOutput(arguments.output, force=arguments.force, protect=[arguments.input]) as output:
        output.file.write((json.dumps(document) + "\n").encode())
        output.commit()


def _lines(number: int, layer: LayerScores, made: Plan, arguments: argparse.Namespace) -> list[str]:
    from ..keep_map import LEGEND, keep_map, tokens_per_letter

    head = f"layer {number} ({layer.name}): "
    if made.evicted:
        head += (
            f"LOSSY, {made.final_keep:,} of {made.kv_len:,} tokens stay, {float(made.lossy_ratio):.3f} x "
            f"{'tokens' if made.bytes_per_token is None else 'bytes'}, target {made.target_before_floor:,}"
        )
    else:
        why = "sink and recent reach the target" if made.floor_dominates else "the target is all of them"
        head += f"LOSSLESS, all {made.kv_len:,} tokens stay: {why}"
    lines = [head, *([f"  --remove {made.remove} --reserve {_pairs(made)}"] if made.evicted else [])]
    if not arguments.no_map:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
        lines += [f"  {line}" for line in keep_map(made, width - 2)]
        if number == 0:
            lines.append(f"  {tokens_per_letter(made, width - 2):,} tokens a letter: {LEGEND}")
    return lines


def _pairs(made: Plan) -> str:
    """As `kvmnn compact --reserve` reads them, or the first of very many."""
    shown = ",".join(f"{begin}:{size}" for begin, size in made.reserve[:_MAX_PAIRS])
    left = len(made.reserve) - _MAX_PAIRS
    return shown if left <= 0 else f"{shown} ... {count(left, 'pair')} more (-o writes them all)"


def _number(text: str) -> float:
    if not re.fullmatch(r"-?\d{1,12}(\.\d{0,12})?|-?\.\d{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(text)
