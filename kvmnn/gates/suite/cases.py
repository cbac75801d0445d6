"""The cases of a suite: the run of each, and its limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, Literal

from ..._util.dataclass import dataclass
from ...errors import KvmnnError, OptionError
from ...policies.h2o.config import H2OConfig
from ...policies.h2o_blocks import H2OEngine
from ...policies.policy import FullCache, Policy
from ...runtime import RuntimeConfig
from ..limits import DEMO_CASES, RUNTIME_CASES, GateLimits
from .settings import DEFAULT_ENGINE_OPTIONS, STORE_ENGINE_OPTIONS, RunConfig, RunSettings, SuiteName

CaseKind = Literal["runtime", "llm_demo", "multi_turn", "retrieval"]

EXTRA_CASES: tuple[CaseKind, ...] = ("multi_turn", "retrieval")
"""Cases beyond the six."""

CASE_NAMES = (*RUNTIME_CASES, *DEMO_CASES, *EXTRA_CASES)

KEY_BY_SWEEP = {
    "prompts": "prompts",
    "gens": "generate",
    "keep": "kv_h2o_target_keep_ratio",
    "block": "kv_h2o_block_tokens",
    "sink": "kv_h2o_sink_tokens",
    "recent": "kv_h2o_recent_tokens",
    "alpha": "kv_h2o_ema_alpha",
    "interval": "kv_h2o_update_interval",
    "trigger": "kv_h2o_trigger_min_tokens",
    "lossy": "kv_h2o_target_lossy_ratio",
}
"""Names that a sweep accepts, in the order of its product."""

_MAX_CASES = 1000


@dataclass(frozen=True, kw_only=True)
class RunCase:
    """One case."""

    #: Name, kind of workload, and mode of the runtime (``""`` if nothing is compressed).
    name: str
    kind: CaseKind
    mode: str
    #: Keys of the engine's JSON; empty if nothing is compressed.
    engine: dict[str, Any]
    #: Limits of the gates, and settings of the runs.
    limits: GateLimits
    settings: RunSettings
    #: Which of `CASE_NAMES` it is or begins from, and the settings of its own.
    base: str
    own_settings: dict[str, Any] = field(default_factory=dict)

    @property
    def evicts(self) -> bool:
        """Return whether the planner is enabled."""
        return self.engine.get("kv_h2o_enable") is True

    @property
    def policy(self) -> Policy:
        """The policy: the engine's planner, or the full cache."""
        return H2OEngine.from_engine(self.engine) if self.evicts else FullCache()

    @property
    def lossless(self) -> RuntimeConfig | None:
        """Configuration of the lossless runtime; None if nothing is compressed."""
        return RuntimeConfig.from_engine(self.engine) if self.engine else None

    @property
    def is_lossy_codec(self) -> bool:
        """Return whether the runtime rounds what it stores (codec ``"transform"``): nothing is lossless then."""
        lossless = self.lossless
        return lossless is not None and lossless.is_lossy

    @property
    def changed_settings(self) -> dict[str, Any]:
        """Engine keys and limits that differ from the suite's, by name."""
        default_case = _build_case(self.base, RunConfig())
        engine = {key: value for key, value in self.engine.items() if default_case.engine.get(key) != value}
        own_limits, default_limits = self.limits.to_dict(), default_case.limits.to_dict()
        changed_limits = {name: value for name, value in own_limits.items() if default_limits[name] != value}
        base = {} if self.base == self.name.split("+")[0] else {"base": self.base}
        return base | engine | changed_limits | self.own_settings

    @property
    def needs_texts(self) -> bool:
        """Return whether it can only run with texts of the user."""
        return self.kind != "runtime"

    @property
    def policy_keys(self) -> dict[str, Any]:
        """Engine keys that determine what attention reads: cases that share their values share their perplexity."""
        engine = self.identity
        return {key: value for key, value in engine.items() if key.startswith("kv_h2o_") or self.is_lossy_codec}

    @property
    def identity(self) -> dict[str, Any]:
        """What the results depend on: `engine`, with the content of a profile for its path."""
        return RuntimeConfig.identify(self.engine)


def build_cases(
    suite: SuiteName, config: RunConfig, extra_cases: Sequence[str] = (), sweep: Sequence[str] = ()
) -> list[RunCase]:
    """Build the cases of a suite in order, each at every point of a sweep."""
    names = [name for name in RUNTIME_CASES if suite in ("all", "runtime")]
    names += [name for name in DEMO_CASES if suite in ("all", "llm_demo")]
    names += config.own_cases if suite == "own" else []
    if not names:
        raise OptionError("--suite own: expected --suite-config with cases of other names than the fork's")
    base_cases = [_build_case(name, config) for name in (*names, *extra_cases)]
    sweep_points = parse_sweep(sweep)
    if len(base_cases) * len(sweep_points) > _MAX_CASES:
        raise OptionError(
            f"--sweep: {len(base_cases) * len(sweep_points):,} cases are too many: expected at most {_MAX_CASES:,}"
        )
    cases = [_apply_sweep_point(case, point) for point in sweep_points for case in base_cases]
    for case in cases:
        _check_case(case)
    return list({case.name: case for case in cases}.values())


def parse_sweep(words: Sequence[str]) -> list[dict[str, float | int]]:
    """Parse ``NAME=VALUE,VALUE`` words to all combinations in the order of `KEY_BY_SWEEP`; one empty point if none."""
    values_by_name: dict[str, list[float | int]] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if name not in KEY_BY_SWEEP or not sign:
            raise OptionError(
                f"--sweep {word[:60]}: expected NAME=VALUE,... with NAME one of {', '.join(KEY_BY_SWEEP)}"
            )
        values = [part.strip() for part in text.split(",") if part.strip()]
        if not values:
            raise OptionError(f"--sweep {word[:60]}: Empty sweep dimension: expected at least one value")
        if name in values_by_name:
            raise OptionError(f"--sweep {name}: is given twice")
        values_by_name[name] = [_parse_sweep_value(name, part) for part in values]
    names = [name for name in KEY_BY_SWEEP if name in values_by_name]
    return [
        dict(zip(names, point, strict=True)) for point in itertools.product(*(values_by_name[name] for name in names))
    ]


def _parse_sweep_value(name: str, text: str) -> float | int:
    try:
        number = float(text) if name in ("keep", "alpha", "lossy") else int(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= 1 << 31:
        raise OptionError(f"--sweep {name}: {text[:40]!r} is no number")
    return number


def _build_case(name: str, config: RunConfig) -> RunCase:
    base, own_settings = config.get_base(name), config.select_settings(name)
    settings = replace(config.settings, **own_settings)
    if base == "runtime_baseline":
        limits = RUNTIME_CASES[base].with_values(config.select_limits(name, with_shared=False), name)
        return RunCase(
            name=name,
            kind="runtime",
            mode="",
            engine={},
            limits=limits,
            settings=settings,
            base=base,
            own_settings=own_settings,
        )
    mode = RUNTIME_CASES[base].runtime_mode if base in RUNTIME_CASES else DEMO_CASES.get(base, "store")
    limits = (
        RUNTIME_CASES[base].with_values(config.select_limits(name), name)
        if base in RUNTIME_CASES
        else _build_demo_limits(name, mode, config)
    )
    engine = {
        **DEFAULT_ENGINE_OPTIONS,
        **_choose_max_queue(base, limits),
        **(STORE_ENGINE_OPTIONS if mode == "store" else {}),
        "kv_lossless_runtime_mode": mode,
        **config.select_engine_options(name),
    }
    if (engine_mode := engine["kv_lossless_runtime_mode"]) != mode:
        raise OptionError(
            f"{name}: kv_lossless_runtime_mode: found {engine_mode!r:.60}, but the case measures {mode!r}"
        )
    kind: CaseKind = "llm_demo" if base in DEMO_CASES else "multi_turn" if base == "multi_turn" else "retrieval"
    kind = "runtime" if base in RUNTIME_CASES else kind
    return RunCase(
        name=name,
        kind=kind,
        mode=mode,
        engine=engine,
        limits=limits,
        settings=settings,
        base=base,
        own_settings=own_settings,
    )


def _build_demo_limits(name: str, mode: str, config: RunConfig) -> GateLimits:
    base_limits = GateLimits(
        runtime_mode="store", decode_drop_target=0.08, require_runtime_decomp=True, max_lossless_fallback=0.0
    )
    return base_limits.with_values({"runtime_mode": mode, **config.select_limits(name)}, name)


def _choose_max_queue(base: str, limits: GateLimits) -> dict[str, int]:
    """Choose the maximum number of open encodings, unless the configuration sets it.

    In the runtime cases as many as their gate allows: the MNN fork leaves the engine's 256, but the engine hands in one
    block of a layer at a step, while the sound runtime hands in all blocks of a prompt, as far as the queue goes.
    """
    if base == "llm_demo_store":
        return {"kv_lossless_max_queue": 64}
    max_queue_peak = limits.max_lossless_queue_peak
    return {"kv_lossless_max_queue": max(1, int(max_queue_peak))} if max_queue_peak >= 0 else {}


def _apply_sweep_point(case: RunCase, point: dict[str, float | int]) -> RunCase:
    """Return a case at a point of a sweep, which its name states; without compression only its workload differs."""
    workload_values = {name: value for name, value in point.items() if name in ("prompts", "gens")}
    engine_values = {name: value for name, value in point.items() if name not in workload_values} if case.engine else {}
    settings = case.settings
    if "prompts" in workload_values:
        settings = replace(settings, prompts=(int(workload_values["prompts"]),))
    if "gens" in workload_values:
        settings = replace(settings, generate=int(workload_values["gens"]), demo_generate=int(workload_values["gens"]))
    engine = dict(case.engine) | {KEY_BY_SWEEP[name]: value for name, value in engine_values.items()}
    if "keep" in engine_values:
        engine["kv_h2o_target_mode"] = "static"
    name = "+".join([case.name, *(f"{name}={value}" for name, value in {**workload_values, **engine_values}.items())])
    return replace(case, name=name, engine=engine, settings=settings)


def _check_case(case: RunCase) -> None:
    """Raise an error for settings that the engine would silently replace by other values."""
    try:
        _ = case.policy, case.lossless
    except KvmnnError as error:
        raise OptionError(f"{case.name}: {error}") from None
    clamped_values = H2OConfig.from_engine(case.engine).clamped_options if case.evicts else {}
    for word, key in KEY_BY_SWEEP.items():
        requested, effective = clamped_values.get(key.removeprefix("kv_h2o_"), (0, 0))
        if requested != effective:
            raise OptionError(
                f"{case.name}: {key} ({word}): found {requested:g}, for which the engine takes {effective:g}"
            )
