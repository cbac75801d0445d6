"""The engine's ``config.json`` on the command line: which options of it a verb takes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .printing import UsageError

if TYPE_CHECKING:
    from ..errors import KvmnnError
    from ..runtime import RuntimeConfig


def add_config_options(parser: Any) -> None:
    """``--config FILE`` and ``--lossless MODE``."""
    parser.add_argument(
        "--config", metavar="FILE", help="the engine's JSON file, for --policy h2o_engine and --lossless"
    )
    parser.add_argument(
        "--lossless",
        metavar="MODE[:KEY=VALUE,...]",
        help="put the cache into the lossless runtime: probe, full or store, with keys such as front_n=6",
    )


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


def read_policy_defaults(arguments: argparse.Namespace, specs: list[str]) -> dict[str, dict[str, Any]]:
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
        if arguments.lossless is not None:
            return {}
        raise UsageError(
            f"--config {arguments.config}: nothing takes options from it; expected --policy h2o_engine or --lossless"
        )
    try:
        return {H2OEngine.name: H2OEngine.parse_engine_options(document)}
    except KvmnnError as exc:
        raise UsageError(f"{arguments.config}: {exc}") from None


def build_lossless_document(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """What ``--lossless`` and ``--config`` ask of the runtime around the cache, as the engine's JSON; None for none.

    Raises
    ------
    UsageError
        For modes, keys and values that do not exist.
    SourceError
        As `read_config`.
    """
    from ..errors import KvmnnError
    from ..policies.specs import split_spec
    from ..runtime import RuntimeConfig
    from ..runtime.config import ENGINE_CODEC, MODES

    if arguments.lossless is None:
        return None
    if arguments.packed is not None:
        raise UsageError("--packed and --lossless: a cache is held in one of them")
    document = {} if arguments.config is None else read_config(arguments.config)
    document = {key: value for key, value in document.items() if key.startswith("kv_") or key in _MODEL_KEYS}
    if arguments.config is not None:
        _parse_runtime_config(arguments.config, document, UsageError)
    try:
        mode, options = split_spec(arguments.lossless)
        if mode not in MODES:
            raise UsageError(f"--lossless {mode}: expected one of {', '.join(MODES)}")
        switches = {"enable": True, "runtime_enable": True, "codec": ENGINE_CODEC, "runtime_mode": mode}
        for key, text in options.items():
            if key in switches:
                raise UsageError(f"--lossless {arguments.lossless}: {key} is what the mode says; expected no such key")
            name = f"kv_{key}" if key.startswith("h2o_") else f"kv_lossless_{key}"
            document[name] = _parse_value(text)
        document |= {f"kv_lossless_{key}": value for key, value in switches.items()}
        RuntimeConfig.from_engine(document)
    except UsageError:
        raise
    except KvmnnError as exc:
        raise UsageError(f"--lossless {arguments.lossless}: {exc}") from None
    return document


def read_runtime_config(path: str) -> RuntimeConfig:
    """The runtime's options in an engine's configuration file.

    Raises
    ------
    SourceError
        As `read_config`, and for keys and values that do not exist.
    """
    from ..errors import SourceError

    return _parse_runtime_config(path, read_config(path), SourceError)


def _parse_runtime_config(path: str, document: dict[str, Any], error_type: type[KvmnnError]) -> RuntimeConfig:
    """The options in what was read from a file, whose name errors begin with."""
    from ..errors import KvmnnError
    from ..runtime import RuntimeConfig

    try:
        return RuntimeConfig.from_engine(document)
    except KvmnnError as exc:
        raise error_type(f"{path}: {exc}") from None


_MODEL_KEYS = ("layer_nums", "attention_mode")


def _parse_value(text: str) -> object:
    """A value of the engine's JSON as a spec writes it; lists are joined by ``+``."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d{1,12}", text) else text.replace("+", ",")
