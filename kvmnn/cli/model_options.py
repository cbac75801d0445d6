"""Options for a model that is run: its arguments, the engine's ``config.json``, and the inputs of the H2O planner."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import console, shared_options
from .console import UsageError
from .options import SpecField, add_spec_option

if TYPE_CHECKING:
    from ..errors import KvmnnError
    from ..lm.runner import RunOptions
    from ..policies.h2o import H2OConfig
    from ..policies.registry import LabelledPolicy
    from ..runtime import RuntimeConfig


def add_config_options(parser: Any) -> None:
    """Add ``--engine-config FILE`` and ``--lossless MODE``."""
    parser.add_argument(
        "--engine-config",
        dest="config",
        metavar="FILE",
        help="the engine's JSON file, for --policy h2o_engine and --lossless",
    )
    parser.add_argument(
        "--lossless",
        metavar="MODE[:KEY=VALUE,...]",
        help="put the cache into the lossless runtime: probe, full or store, with keys such as front_n=6",
    )


def read_config(path: str) -> dict[str, Any]:
    """Return the object in an engine's configuration file.

    Raises
    ------
    SourceError
        For a file that is not there, cannot be read, or holds no JSON object.
    """
    from ..errors import MissingFileError
    from ..files.schema import read_object

    try:
        return read_object(Path(path))
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{path}: does not exist") from None


def read_policy_defaults(arguments: argparse.Namespace, specs: list[str]) -> dict[str, dict[str, Any]]:
    """Return, by policy name, the option defaults that the file of ``--engine-config`` sets.

    Raises
    ------
    UsageError
        Where no policy takes any, so that the file would be passed over in silence, and for a file that asks for what
        cannot be.
    SourceError
        The errors of `read_config`.
    """
    from ..errors import KvmnnError
    from ..policies.h2o_blocks import H2OEngine

    if arguments.config is None:
        return {}
    document = read_config(arguments.config)
    if not any(spec.partition(":")[0] == H2OEngine.name for spec in specs):
        if arguments.lossless is not None:
            return {}
        raise UsageError(
            f"--engine-config {arguments.config}: nothing takes options from it; expected --policy h2o_engine or "
            "--lossless"
        )
    try:
        return {H2OEngine.name: H2OEngine.parse_engine_options(document)}
    except KvmnnError as exc:
        raise UsageError(f"{arguments.config}: {exc}") from None


def build_lossless_document(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the runtime options of ``--lossless`` and ``--engine-config`` as the engine's JSON, or None.

    Raises
    ------
    UsageError
        For modes, keys and values that do not exist.
    SourceError
        The errors of `read_config`.
    """
    from ..errors import KvmnnError
    from ..policies.specs import split_spec
    from ..runtime import RuntimeConfig
    from ..runtime.config import ENGINE_CODEC, MODES, PROFILE_CODECS

    if arguments.lossless is None:
        return None
    if arguments.packed is not None:
        raise UsageError("--layout and --lossless: a cache is held in one of them")
    document = {} if arguments.config is None else read_config(arguments.config)
    document = {key: value for key, value in document.items() if key.startswith("kv_") or key in _MODEL_KEYS}
    if arguments.config is not None:
        _parse_runtime_config(arguments.config, document, UsageError)
    try:
        mode, options = split_spec(arguments.lossless)
        if mode not in MODES:
            raise UsageError(f"--lossless {mode}: expected one of {', '.join(MODES)}")
        codec = options.pop("codec", ENGINE_CODEC)
        if codec not in (ENGINE_CODEC, *PROFILE_CODECS):
            raise UsageError(f"--lossless {arguments.lossless}: codec: expected {' or '.join(PROFILE_CODECS)}")
        switches = {"enable": True, "runtime_enable": True, "codec": codec, "runtime_mode": mode}
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
    """Return the runtime options in an engine's configuration file.

    Raises
    ------
    SourceError
        The errors of `read_config`, and for unknown keys and values.
    """
    from ..errors import SourceError

    return _parse_runtime_config(path, read_config(path), SourceError)


def _parse_runtime_config(path: str, document: dict[str, Any], error_type: type[KvmnnError]) -> RuntimeConfig:
    """Parse the runtime options in a configuration; error messages begin with the file's name."""
    from ..errors import KvmnnError
    from ..runtime import RuntimeConfig

    try:
        return RuntimeConfig.from_engine(document)
    except KvmnnError as exc:
        raise error_type(f"{path}: {exc}") from None


_MODEL_KEYS = ("layer_nums", "attention_mode")


def _parse_value(text: str) -> object:
    """Parse a value of the engine's JSON as written in a spec, where ``+`` joins lists."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d{1,12}", text):
        return int(text)
    if re.fullmatch(r"\d{1,12}\.\d{1,12}", text):
        return float(text)
    return text.replace("+", ",")


POLICY_EPILOG = """\
A policy is NAME or NAME:option=value,...: 'streaming', 'h2o_decayed_heads:recent=50%',
'l2_fixed:strategy=random,recent_ratio=0.5' (docs/policies.md lists them); 'full' is the full cache. Tokens always keep
their true positions."""


def add_model_options(parser: Any) -> None:
    """Declare MODEL and the options of running it."""
    parser.add_argument("model", metavar="MODEL", help="an ONNX decoder with its KV cache outside: file or folder")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: the one alongside the model)")
    parser.add_argument("--policy", metavar="SPEC", default="full", help="which tokens stay (default: full)")
    parser.add_argument(
        "--budget", type=shared_options.parse_whole, metavar="N", help="tokens that the policy keeps in each layer"
    )
    parser.add_argument(
        "--skip-layers", metavar="L+L", help="layers that are never cut, or none (default: the policy's)"
    )
    add_config_options(parser)
    parser.add_argument(
        "--layout", dest="packed", metavar="BACKEND", help="store the cache in the packed layout of this MNN backend"
    )
    parser.add_argument(
        "--chunk",
        type=shared_options.parse_positive,
        metavar="N",
        help="prefill chunk size in tokens (default: all at once)",
    )
    parser.add_argument(
        "--seed", type=shared_options.parse_whole, default=0, metavar="N", help="random seed (default: 0)"
    )
    parser.accept("--threads", default=1)
    shared_options.add_provider_option(parser)


def build_run_options(arguments: argparse.Namespace) -> RunOptions:
    """Build the options for running the model from the arguments of `add_model_options`."""
    from ..lm.onnx.onnx_session import CPU_PROVIDERS
    from ..lm.runner import RunOptions

    return RunOptions(
        tokenizer=arguments.tokenizer,
        chunk=arguments.chunk,
        packed=arguments.packed,
        lossless=_build_runtime_config(arguments),
        threads=arguments.threads,
        providers=tuple(arguments.provider) or CPU_PROVIDERS,
    )


def _build_runtime_config(arguments: argparse.Namespace) -> RuntimeConfig | None:
    document = build_lossless_document(arguments)
    if document is None:
        return None
    from ..runtime import RuntimeConfig

    return RuntimeConfig.from_engine(document)


def build_policy(arguments: argparse.Namespace) -> LabelledPolicy:
    """Build the one policy that was specified; raise `UsageError` for an invalid one."""
    from ..errors import KvmnnError
    from ..policies.option_parser import parse_ints
    from ..policies.registry import LabelledPolicy, format_label
    from ..policies.specs import accepts_option, build_policy, expand_spec

    defaults = read_policy_defaults(arguments, [arguments.policy])
    budgets = [] if arguments.budget is None else [arguments.budget]
    try:
        skip_layers = None if arguments.skip_layers is None else parse_ints(arguments.skip_layers)
        ((name, options),) = expand_spec(arguments.policy, budgets, skip_layers, defaults)
        policy = build_policy(name, options, (arguments.seed,))
    except KvmnnError as exc:
        raise UsageError(str(exc)) from None
    if not policy.can_evict and (budgets or skip_layers):
        raise UsageError("--budget and --skip-layers need a --policy")
    if skip_layers is not None and policy.can_evict and not accepts_option(arguments.policy, "skip_layers"):
        raise UsageError(f"--skip-layers has no effect here: {name} has no skip_layers")
    if budgets and options.get("budget") != arguments.budget:
        reason = (
            "the policy says its size itself"
            if accepts_option(arguments.policy, "budget")
            else f"{name}: {policy.budget_help}"
        )
        raise UsageError(f"--policy {arguments.policy} and --budget {arguments.budget}: {reason}".replace("`", ""))
    return LabelledPolicy(policy=policy, label=format_label(type(policy), options), options=options)


H2O_OPTION_NAMES = (
    *("kind", "config", "block", "sink", "recent", "target_ratio", "keep_ratio", "alpha", "engine_threads", "tile"),
    *("bytes_per_token", "floor"),
)
"""Names of the H2O options in the namespace."""


def add_h2o_options(parser: Any) -> None:
    """Add all options of the H2O planner."""
    group = parser.add_argument_group("H2O", "How scores or attention are planned, without --policy.")
    group.add_argument(
        "--input-kind", dest="kind", choices=("scores", "attention"), help="what IN has, where its axes leave it open"
    )
    group.add_argument(
        "--engine-config",
        dest="config",
        metavar="FILE",
        help="the engine's JSON file, whose kv_h2o_ keys are the defaults of --h2o",
    )
    add_spec_option(group, "--h2o", "options of the planner", _H2O_FIELDS, metavar="KEY=VALUE,...")


def _parse_number(text: str) -> float:
    if not re.fullmatch(r"-?\d{1,12}(\.\d{0,12})?|-?\.\d{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(text)


def _parse_floor(text: str) -> str:
    if text not in ("engine", "keep"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected engine or keep")
    return text


_H2O_FIELDS = (
    SpecField("block_tokens", "block", "tokens in a block (default: 64)", parse=shared_options.parse_positive),
    SpecField("sink_tokens", "sink", "tokens kept at the start (default: 32)", parse=shared_options.parse_whole),
    SpecField("recent_tokens", "recent", "tokens kept at the end (default: 256)", parse=shared_options.parse_whole),
    SpecField(
        "target_ratio",
        "target_ratio",
        "tokens before over tokens after (default: 3, the engine's)",
        parse=_parse_number,
        metavar="X",
    ),
    SpecField("keep_ratio", "keep_ratio", "share of tokens to keep, instead", parse=_parse_number, metavar="X"),
    SpecField("alpha", "alpha", "weight of older scores (default: 0.9)", parse=_parse_number, metavar="X"),
    SpecField(
        "bytes_per_token",
        "bytes_per_token",
        "K and V bytes of a token, for the ratio of bytes",
        parse=shared_options.parse_positive,
    ),
    SpecField(
        "engine_threads",
        "engine_threads",
        "order of additions (default: 1)",
        parse=shared_options.parse_positive,
        default=1,
    ),
    SpecField(
        "floor",
        "floor",
        "where sinks and recent tokens reach the target: engine drops nothing, keep all others (default: engine)",
        parse=_parse_floor,
        metavar="engine|keep",
    ),
    SpecField("tile", "tile", "keys in a tile of the attention (default: all)", parse=shared_options.parse_positive),
)


def build_h2o_config(arguments: argparse.Namespace) -> H2OConfig:
    """Build the planner's configuration: the engine's defaults, then ``--engine-config``, then other options."""
    if arguments.target_ratio is not None and arguments.keep_ratio is not None:
        raise UsageError("--h2o target_ratio and keep_ratio: specify one of them")
    if arguments.target_ratio is not None and arguments.target_ratio < 1:
        raise UsageError(f"--h2o target_ratio is {arguments.target_ratio:g}: expected at least 1")
    if arguments.keep_ratio is not None and not 0 <= arguments.keep_ratio <= 1:
        raise UsageError(f"--h2o keep_ratio is {arguments.keep_ratio:g}: expected 0 to 1")
    if arguments.alpha is not None and not 0 <= arguments.alpha <= 1:
        raise UsageError(f"--h2o alpha is {arguments.alpha:g}: expected 0 to 1")
    option_values = {
        "block_tokens": arguments.block,
        "sink_tokens": arguments.sink,
        "recent_tokens": arguments.recent,
        "target_lossy_ratio": arguments.target_ratio,
        "target_keep_ratio": arguments.keep_ratio,
        "ema_alpha": arguments.alpha,
        "bytes_per_token": arguments.bytes_per_token,
        "floor": arguments.floor,
    }
    if arguments.target_ratio is not None or arguments.keep_ratio is not None:
        option_values["target_mode"] = "adaptive" if arguments.keep_ratio is None else "static"
    return replace(
        _read_engine_config(arguments), **{name: value for name, value in option_values.items() if value is not None}
    )


def _read_engine_config(arguments: argparse.Namespace) -> H2OConfig:
    """Return the configuration of ``--engine-config``, or the engine's defaults."""
    from ..errors import KvmnnError
    from ..policies.h2o import H2OConfig

    if arguments.config is None:
        return H2OConfig()
    document = read_config(arguments.config)
    try:
        config = H2OConfig.from_engine(document)
    except KvmnnError as exc:
        raise UsageError(f"{arguments.config}: {exc}") from None
    for line in _iter_config_notes(config, document):
        console.print_note(arguments, f"{arguments.config}: {line}")
    return config


def _iter_config_notes(config: H2OConfig, document: dict[str, Any]) -> Iterator[str]:
    """Yield notes about entries of the engine's file whose effect a plan does not show."""
    from ..policies.h2o.config import ENGINE_KEY_BY_FIELD, QUANTIZED_MODES

    reason = "" if config.enable else "kv_h2o_enable is not true"
    if document.get("attention_mode") in QUANTIZED_MODES:
        reason = f"attention_mode {document['attention_mode']} holds K or V in int8"
    if reason:
        yield f"{reason}, so the engine evicts nothing; the plan is what it would evict otherwise"
    for name, (requested, effective) in config.clamped_options.items():
        if ENGINE_KEY_BY_FIELD[name] in document:
            yield f"{ENGINE_KEY_BY_FIELD[name]} {requested} counts as {effective}"
