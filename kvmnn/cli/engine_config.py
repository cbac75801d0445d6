"""The engine's ``config.json`` on the command line: which options of it a verb takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .printing import UsageError

HELP = "the engine's JSON file: its kv_h2o_ keys are the options of --policy h2o_engine"


def add_config(parser: Any) -> None:
    """``--config FILE``."""
    parser.add_argument("--config", metavar="FILE", help=HELP)


def read_config(path: str) -> dict[str, Any]:
    """The object in an engine's configuration file.

    Raises
    ------
    SourceError
        For a file that is not there, cannot be read, or holds no JSON object.
    """
    from ..errors import SourceError
    from ..files.json_document import read_object

    try:
        return read_object(Path(path))
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{path}: does not exist") from None


def policy_defaults(arguments: argparse.Namespace, specs: list[str]) -> dict[str, dict[str, Any]]:
    """Options that the file of ``--config`` gives to policies that do not say them, by the policy's name.

    Raises
    ------
    UsageError
        Where no policy takes any, so that the file would be passed over in silence, and for a file that asks for what
        cannot be.
    SourceError
        As `read_config`.
    """
    from ..errors import KvmnnError
    from ..policies.h2o_engine import H2OEngine

    if arguments.config is None:
        return {}
    document = read_config(arguments.config)
    if not any(spec.partition(":")[0] == H2OEngine.name for spec in specs):
        raise UsageError(f"--config {arguments.config}: nothing takes options from it; expected --policy h2o_engine")
    try:
        return {H2OEngine.name: H2OEngine.options_from_engine(document)}
    except KvmnnError as exc:
        raise UsageError(f"{arguments.config}: {exc}") from None
