"""Options of ``kvmnn plan`` about H2O: what scores and attention are planned with."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import engine_config, printing, shared_options
from .printing import UsageError

if TYPE_CHECKING:
    from ..h2o import H2OConfig

H2O_OPTION_NAMES = (
    *("kind", "config", "block", "sink", "recent", "target_ratio", "keep_ratio", "alpha", "engine_threads", "tile"),
    "bytes_per_token",
)
"""The options, as the namespace calls them."""


def add_h2o_options(parser: Any) -> None:
    """All of them."""
    group = parser.add_argument_group("H2O", "How scores or attention are planned, without --policy.")
    group.add_argument("--kind", choices=("scores", "attention"), help="what IN holds, where its axes do not say")
    group.add_argument(
        "--config", metavar="FILE", help="the engine's JSON file, whose kv_h2o_ keys say what no option says"
    )
    group.add_argument(
        "--block", type=shared_options.parse_positive, metavar="N", help="tokens in a block (default: 64)"
    )
    group.add_argument(
        "--sink", type=shared_options.parse_whole, metavar="N", help="tokens kept at the start (default: 32)"
    )
    group.add_argument(
        "--recent", type=shared_options.parse_whole, metavar="N", help="tokens kept at the end (default: 256)"
    )
    group.add_argument(
        "--target-ratio",
        type=_parse_number,
        metavar="X",
        help="tokens before over tokens after (default: 3, the engine's)",
    )
    group.add_argument("--keep-ratio", type=_parse_number, metavar="X", help="share of tokens to keep, instead")
    group.add_argument("--alpha", type=_parse_number, metavar="X", help="weight of older scores (default: 0.9)")
    group.add_argument(
        "--engine-threads",
        type=shared_options.parse_positive,
        default=1,
        metavar="N",
        help="order of additions (default: 1)",
    )
    group.add_argument(
        "--tile", type=shared_options.parse_positive, metavar="N", help="keys in a tile of the attention (default: all)"
    )
    group.add_argument(
        "--bytes-per-token",
        type=shared_options.parse_positive,
        metavar="N",
        help="K and V bytes of a token, for the ratio of bytes",
    )


def build_h2o_config(arguments: argparse.Namespace) -> H2OConfig:
    """The engine's defaults, what ``--config`` says, and what the other options say."""
    if arguments.target_ratio is not None and arguments.keep_ratio is not None:
        raise UsageError("--target-ratio and --keep-ratio: say one or the other")
    if arguments.target_ratio is not None and arguments.target_ratio < 1:
        raise UsageError(f"--target-ratio is {arguments.target_ratio:g}: expected at least 1")
    if arguments.keep_ratio is not None and not 0 <= arguments.keep_ratio <= 1:
        raise UsageError(f"--keep-ratio is {arguments.keep_ratio:g}: expected 0 to 1")
    if arguments.alpha is not None and not 0 <= arguments.alpha <= 1:
        raise UsageError(f"--alpha is {arguments.alpha:g}: expected 0 to 1")
    option_values = {
        "block_tokens": arguments.block,
        "sink_tokens": arguments.sink,
        "recent_tokens": arguments.recent,
        "target_lossy_ratio": arguments.target_ratio,
        "target_keep_ratio": arguments.keep_ratio,
        "ema_alpha": arguments.alpha,
        "bytes_per_token": arguments.bytes_per_token,
    }
    if arguments.target_ratio is not None or arguments.keep_ratio is not None:
        option_values["target_mode"] = "adaptive" if arguments.keep_ratio is None else "static"
    return replace(
        _read_engine_config(arguments), **{name: value for name, value in option_values.items() if value is not None}
    )


def _read_engine_config(arguments: argparse.Namespace) -> H2OConfig:
    """What ``--config`` says, or the engine's defaults."""
    from ..errors import KvmnnError
    from ..h2o import H2OConfig

    if arguments.config is None:
        return H2OConfig()
    document = engine_config.read_config(arguments.config)
    try:
        config = H2OConfig.from_engine(document)
    except KvmnnError as exc:
        raise UsageError(f"{arguments.config}: {exc}") from None
    for line in _iter_config_notes(config, document):
        printing.print_note(arguments, f"{arguments.config}: {line}")
    return config


def _iter_config_notes(config: H2OConfig, document: dict[str, Any]) -> Iterator[str]:
    """What the engine would make of its file that a plan does not show."""
    from ..h2o.config import ENGINE_KEY_BY_FIELD, QUANTISED_MODES

    reason = "" if config.enable else "kv_h2o_enable is not true"
    if document.get("attention_mode") in QUANTISED_MODES:
        reason = f"attention_mode {document['attention_mode']} holds K or V in int8"
    if reason:
        yield f"{reason}, so the engine evicts nothing; the plan is what it would evict otherwise"
    for name, (requested, effective) in config.clamped_options.items():
        if ENGINE_KEY_BY_FIELD[name] in document:
            yield f"{ENGINE_KEY_BY_FIELD[name]} {requested} counts as {effective}"


def _parse_number(text: str) -> float:
    if not re.fullmatch(r"-?\d{1,12}(\.\d{0,12})?|-?\.\d{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(text)
