"""Settings of a suite: workload, repeats, and the engine's options in each case."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from ..._util.dataclass import dataclass
from ..._util.text import suggest
from ...errors import KvmnnError, MissingFileError, OptionError
from ...evaluation.task_result import TaskOptions
from ...files.schema import Record, loads_strict, read_object
from ..summary import validate_case_name

SuiteName = Literal["all", "runtime", "llm_demo", "own"]

BUILT_IN_CONFIGS = {"handbook-v5": "handbook_v5.json", "smollm2-transform": "smollm2_transform.json"}
"""Configurations that ship: names for ``--suite-config``, and files of this package."""

CASE_SETTINGS = (
    "prompts",
    "generate",
    "buckets",
    "prompts_per_bucket",
    "demo_generate",
    "repeats",
    "rounds",
    "pass_runs",
)
"""Settings that a single case may have of its own."""

DEFAULT_ENGINE_OPTIONS: dict[str, Any] = {
    "kv_h2o_enable": True,
    "kv_h2o_layer_start": 2,
    "kv_h2o_layer_end": -1,
    "kv_h2o_block_tokens": 32,
    "kv_h2o_sink_tokens": 16,
    "kv_h2o_recent_tokens": 96,
    "kv_h2o_target_mode": "adaptive",
    "kv_h2o_target_lossy_ratio": 3.5,
    "kv_h2o_ema_alpha": 0.9,
    "kv_h2o_update_interval": 16,
    "kv_h2o_trigger_min_tokens": 384,
    "kv_lossless_enable": True,
    "kv_lossless_runtime_enable": True,
    "kv_lossless_codec": "gear_delta",
    "kv_lossless_scope": "front_n_and_h2o_kept",
    "kv_lossless_front_n": 2,
    "kv_lossless_block_tokens": 128,
    "kv_lossless_hot_recent_tokens": 256,
    "kv_lossless_hot_sink_tokens": 16,
    "kv_lossless_kept_sample_layers": 1,
    "kv_lossless_kept_sample_token_interval": 2,
    "kv_lossless_async_threads": 2,
    "kv_lossless_decode_cache_blocks": 64,
    "kv_lossless_strict_roundtrip_check": True,
}
"""Engine options of all six cases of the MNN fork."""

STORE_ENGINE_OPTIONS: dict[str, Any] = {
    "kv_lossless_front_sample_token_interval": 2,
    "kv_lossless_store_disable_front": True,
    "kv_lossless_store_bootstrap_tokens": 16,
    "kv_lossless_store_grouped_step_tokens": 384,
}
"""Additional engine options of mode store."""


@dataclass(frozen=True, kw_only=True)
class RunSettings(Record):
    """The settings of a suite's runs."""

    #: Runtime cases: tokens of each prompt, and tokens to generate.
    prompts: tuple[int, ...] = (512, 1024)
    generate: int = 128
    #: Whether their prompts repeat this token, as in the fork's benchmark, whose K and V compress far better than those
    #: of texts. False: beginnings of texts, by default of the built-in one.
    synthetic: bool = False
    token: int = 16
    #: Cases with real prompts: lengths, number of prompts of each length, and tokens to generate.
    buckets: tuple[int, ...] = (128, 512, 2048)
    prompts_per_bucket: int = 2
    demo_generate: int = 512
    #: Also for these cases: a file that lists the texts to use (`kvmnn.gates.suite.workloads`), empty for all; round
    #: robin over the buckets, or the order of the texts; maximum number of prompts, 0 for all.
    prompt_manifest: str = ""
    prompt_order: Literal["stratified", "sequential"] = "stratified"
    max_prompts: int = 0
    #: Timed runs of each side, after a warm-up run.
    repeats: int = 2
    #: How often a case is run in all, and how many of these rounds must pass; 0: all.
    rounds: int = 1
    pass_runs: int = 0
    #: Perplexity: number of texts, tokens scored of each, and how many of these are the prompt.
    quality_texts: int = 10
    quality_tokens: int = 1024
    quality_prompt: int = 640
    #: Maximum relative increase of perplexity: the upper end of its interval must be below.
    perplexity_target: float = 0.05
    #: Maximum mean KL divergence from the full cache over the same tokens, in nats; negative: no gate.
    kl_target: float = -1.0
    #: Tasks, as ``kvmnn eval --tasks`` takes them, and the maximum drop of their accuracy; empty: no gate.
    tasks: str = ""
    accuracy_target: float = 0.05
    #: Threads of onnxruntime; seed of random draws.
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "buckets"):
            lengths = getattr(self, name)
            if not lengths or min(lengths) < 1 or max(lengths) > 1 << 20 or len(lengths) > 64:
                raise OptionError(f"{name}: found {lengths!r:.60}, expected 1 to 64 numbers from 1 to {1 << 20:,}")
        for name in (
            "generate",
            "demo_generate",
            "repeats",
            "rounds",
            "prompts_per_bucket",
            "quality_texts",
            "quality_tokens",
            "threads",
        ):
            if not 1 <= getattr(self, name) <= 1 << 20:
                raise OptionError(f"{name}: found {getattr(self, name)}, expected 1 to {1 << 20:,}")
        if self.generate < 2 or self.demo_generate < 2:
            raise OptionError("generate and demo_generate: expected at least 2, as the first token is the prompt's")
        if not 0 <= self.pass_runs <= self.rounds:
            raise OptionError(f"pass_runs: found {self.pass_runs}, expected 0 (all) to rounds, {self.rounds}")
        if not 0 <= self.max_prompts <= 1 << 20:
            raise OptionError(f"max_prompts: found {self.max_prompts}, expected 0 (all) to {1 << 20:,}")
        for name in ("token", "seed"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name}: found {getattr(self, name)}, expected at least 0")
        if not 0 <= self.quality_prompt < self.quality_tokens:
            raise OptionError(
                f"quality_prompt: found {self.quality_prompt}, expected 0 to less than quality_tokens, "
                f"{self.quality_tokens}"
            )
        if not -1e6 < self.kl_target < 1e6 or not 0 <= self.accuracy_target <= 1:
            raise OptionError("kl_target, accuracy_target: expected nats, and a share from 0 to 1")
        if self.tasks:
            TaskOptions.parse(self.tasks)
        if not 0 <= self.perplexity_target < 1e6:
            raise OptionError(f"perplexity_target: found {self.perplexity_target}, expected a share from 0 on")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The content of a configuration file: settings, engine keys and limits, also for single cases."""

    settings: RunSettings = field(default_factory=RunSettings)
    engine: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    cases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def own_cases(self) -> list[str]:
        """Names of the cases that are not the suite's: those with a ``base``."""
        return [name for name, entry in self.cases.items() if "base" in entry]

    def get_base(self, case: str) -> str:
        """Return the case of the suite that a case begins from: itself, unless it has a ``base``."""
        return str(self.cases.get(case, {}).get("base", case))

    def select_settings(self, case: str) -> dict[str, Any]:
        """Return the settings that only this case has."""
        return {name: value for name, value in self.cases.get(case, {}).items() if name in CASE_SETTINGS}

    def select_engine_options(self, case: str) -> dict[str, Any]:
        """Return the engine keys for a case; the case's own take precedence."""
        case_options = {key: value for key, value in self.cases.get(case, {}).items() if key.startswith("kv_")}
        return {**self.engine, **case_options}

    def select_limits(self, case: str, *, with_shared: bool = True) -> dict[str, Any]:
        """Return the limits for a case; only its own if not `with_shared`."""
        case_limits = {
            key: value
            for key, value in self.cases.get(case, {}).items()
            if not key.startswith("kv_") and key != "base" and key not in CASE_SETTINGS
        }
        return {**self.limits, **case_limits} if with_shared else case_limits


def read_run_config(
    path: str | os.PathLike[str], case_names: tuple[str, ...], defaults: RunSettings | None = None
) -> RunConfig:
    """Read a configuration: a JSON object in a file, or one that ships (`BUILT_IN_CONFIGS`).

    It contains settings by name (`RunSettings`), the engine's ``kv_`` keys, ``limits`` (an object), and ``cases``
    (objects of ``kv_`` keys, limits and `CASE_SETTINGS`, by case name; a name of one's own needs a ``base``, one of
    `case_names`).
    """
    where = os.fspath(path)
    document = _read_document(where)
    limits, cases = document.pop("limits", {}), document.pop("cases", {})
    if not isinstance(limits, dict) or not isinstance(cases, dict):
        raise OptionError(f"{where}: limits, cases: expected objects")
    names = [entry.name for entry in fields(RunSettings)]
    engine = {key: document.pop(key) for key in list(document) if key.startswith("kv_")}
    for key in document:
        if key not in names:
            raise OptionError(f"{where}: {key[:60]!r} is no setting{suggest(key, names)}")
    settings = _parse_settings(document, defaults or RunSettings(), where)
    parsed_cases = {
        name: _parse_case(name, entry, case_names, settings, f"{where}: cases.{name[:60]}")
        for name, entry in cases.items()
    }
    return RunConfig(settings=settings, engine=engine, limits=limits, cases=parsed_cases)


def _read_document(where: str) -> dict[str, Any]:
    try:
        return read_object(Path(where))
    except (FileNotFoundError, NotADirectoryError):
        if where in BUILT_IN_CONFIGS:
            document: dict[str, Any] = loads_strict((files(__package__) / BUILT_IN_CONFIGS[where]).read_text("utf-8"))
            return document
        names = ", ".join(BUILT_IN_CONFIGS)
        problem = f"does not exist, and is none of the configurations that ship: {names}"
        raise MissingFileError(f"{where}: {problem}") from None


def _parse_settings(document: Mapping[str, Any], base: RunSettings, where: str) -> RunSettings:
    """Return `base` with the settings of a document, validated."""
    try:
        return RunSettings.from_dict({**base.to_dict(), **document}, where)
    except KvmnnError as error:
        raise OptionError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


def _parse_case(
    name: str, entry: object, case_names: tuple[str, ...], settings: RunSettings, where: str
) -> dict[str, Any]:
    """Validate the entry of a case; its settings get their types."""
    if not isinstance(entry, dict):
        raise OptionError(f"{where}: expected an object")
    base = entry.get("base", name)
    if not isinstance(base, str) or base not in case_names:
        suggestion = suggest(str(base), list(case_names))
        needed = f'a name of your own needs "base", one of {", ".join(case_names)}'
        raise OptionError(f"{where}: {base!r:.60} is no case{suggestion}; {needed}")
    if name in case_names and base != name:
        raise OptionError(f"{where}: base: found {base!r}, but {name} is a case of the suite")
    if base != name:
        validate_case_name(name)
    own_settings = {key: value for key, value in entry.items() if key in CASE_SETTINGS}
    parsed_settings = _parse_settings(own_settings, settings, where)
    return {**entry, **{key: getattr(parsed_settings, key) for key in own_settings}}
