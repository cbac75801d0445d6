"""``--rerotate`` and how K is rotated, for verbs that write prefix caches."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import dense_options, idle_options

if TYPE_CHECKING:
    from ..dense import RopeConfig


def add_rerotate_options(parser: Any) -> None:
    """``--rerotate`` and ``--rope``."""
    parser.add_argument(
        "--rerotate",
        action="store_true",
        help="rotate K of an evicted cache to the positions 0, 1, 2 ..., where MNN continues after loading (LOSSY)",
    )
    parser.add_argument(
        "--rope",
        type=_parse_rope_or_model,
        metavar="theta=10000,dims=64[,pairing=interleaved]|MODEL",
        help="with --rerotate: how K is rotated, or a model that has it (a folder, config.json, FILE.gguf); without it "
        "--model has it, or it is found by trial",
    )


def check_rerotate_options(arguments: argparse.Namespace) -> None:
    """`UsageError` for ``--rope`` without ``--rerotate``."""
    if not arguments.rerotate:
        idle_options.refuse_given(arguments, ["rope"], "needs --rerotate")


def _parse_rope_or_model(text: str) -> RopeConfig | str:
    return dense_options.parse_rope(text) if text.startswith(("theta=", "dims=", "pairing=")) else text
