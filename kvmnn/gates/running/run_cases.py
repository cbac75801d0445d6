"""The cases of a suite: what runs in each, and what it must reach."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...errors import KvmnnError, OptionError
from ...h2o.config import H2OConfig
from ...policies.base import Policy
from ...policies.full import Full
from ...policies.h2o_engine import H2OEngine
from ...runtime import RuntimeConfig
from ..checking.cases import DEMO_CASES, RUNTIME_CASES
from ..checking.limits import Limits
from .settings import ENGINE, STORE, RunConfig, RunSettings, Suite

Kind = Literal["runtime", "llm_demo", "multi_turn", "retrieval"]

FURTHER: tuple[Kind, ...] = ("multi_turn", "retrieval")
"""Cases beyond the six."""

KNOWN = (*RUNTIME_CASES, *DEMO_CASES, *FURTHER)

SWEEPS = {
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
"""What a sweep may name, in the order in which its product is taken."""

_MOST = 1000


@dataclass(frozen=True, kw_only=True)
class RunCase:
    """One case.

    Attributes
    ----------
    name, kind, mode
        What it is called, which work it has, and the mode of the runtime; ``""`` where nothing is compressed.
    engine
        Keys of the engine's JSON; empty where nothing is compressed.
    limits, settings
        What it must reach, and how it runs.
    """

    name: str
    kind: Kind
    mode: str
    engine: dict[str, Any]
    limits: Limits
    settings: RunSettings

    @property
    def evicts(self) -> bool:
        """Whether the planner is on."""
        return self.engine.get("kv_h2o_enable") is True

    @property
    def policy(self) -> Policy:
        """What evicts: the engine's planner, or nothing."""
        return H2OEngine.from_engine(self.engine) if self.evicts else Full()

    @property
    def lossless(self) -> RuntimeConfig | None:
        """The runtime around the cache; None where nothing is compressed."""
        return RuntimeConfig.from_engine(self.engine) if self.engine else None

    @property
    def changed(self) -> dict[str, Any]:
        """Keys of the engine and limits that are not the suite's own, by name."""
        base = _case(self.name.split("+")[0], RunConfig())
        engine = {key: value for key, value in self.engine.items() if base.engine.get(key) != value}
        mine, theirs = self.limits.to_dict(), base.limits.to_dict()
        return engine | {name: value for name, value in mine.items() if theirs[name] != value}

    @property
    def needs_texts(self) -> bool:
        """Whether it runs only with texts of the user."""
        return self.kind != "runtime"

    @property
    def policy_keys(self) -> dict[str, Any]:
        """Keys that say what is evicted: cases that share them share their perplexity."""
        return {key: value for key, value in self.engine.items() if key.startswith("kv_h2o_")}


def cases_of(suite: Suite, config: RunConfig, further: Sequence[str] = (), sweep: Sequence[str] = ()) -> list[RunCase]:
    """The cases of a suite in their order, each with every point of a sweep.

    Raises
    ------
    OptionError
        For keys of the engine that do not exist, values that they cannot have, and sweeps that make no sense.
    """
    names = [name for name in RUNTIME_CASES if suite in ("all", "runtime")]
    names += [name for name in DEMO_CASES if suite in ("all", "llm_demo")]
    found = [_case(name, config) for name in (*names, *further)]
    points = sweep_points(sweep)
    if len(found) * len(points) > _MOST:
        raise OptionError(f"--sweep: {len(found) * len(points):,} cases are too many: expected at most {_MOST:,}")
    made = [_at(case, point) for point in points for case in found]
    for case in made:
        _check(case)
    return list({case.name: case for case in made}.values())


def sweep_points(words: Sequence[str]) -> list[dict[str, float | int]]:
    """The product of ``NAME=VALUE,VALUE`` words, in the order of `SWEEPS`; one empty point without any."""
    given: dict[str, list[float | int]] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if name not in SWEEPS or not sign:
            raise OptionError(f"--sweep {word[:60]}: expected NAME=VALUE,... with NAME one of {', '.join(SWEEPS)}")
        values = [part.strip() for part in text.split(",") if part.strip()]
        if not values:
            raise OptionError(f"--sweep {word[:60]}: Empty sweep dimension: expected at least one value")
        if name in given:
            raise OptionError(f"--sweep {name}: is given twice")
        given[name] = [_value(name, part) for part in values]
    names = [name for name in SWEEPS if name in given]
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*(given[name] for name in names))]


def _value(name: str, text: str) -> float | int:
    try:
        found = float(text) if name in ("keep", "alpha", "lossy") else int(text)
    except ValueError:
        found = math.nan
    if not abs(found) <= 1 << 31:
        raise OptionError(f"--sweep {name}: {text[:40]!r} is no number")
    return found


def _case(name: str, config: RunConfig) -> RunCase:
    settings = config.settings
    if name == "runtime_baseline":
        limits = RUNTIME_CASES[name].changed(config.limits_of(name, shared=False), name)
        return RunCase(name=name, kind="runtime", mode="", engine={}, limits=limits, settings=settings)
    mode = RUNTIME_CASES[name].runtime_mode if name in RUNTIME_CASES else DEMO_CASES.get(name, "store")
    base = RUNTIME_CASES.get(name)
    limits = base.changed(config.limits_of(name), name) if base is not None else _demo_limits(name, mode, config)
    engine = {
        **ENGINE,
        **_queue(name, limits),
        **(STORE if mode == "store" else {}),
        "kv_lossless_runtime_mode": mode,
        **config.engine_of(name),
    }
    if (other := engine["kv_lossless_runtime_mode"]) != mode:
        raise OptionError(f"{name}: kv_lossless_runtime_mode: found {other!r:.60}, but the case measures {mode!r}")
    kind: Kind = "llm_demo" if name in DEMO_CASES else "multi_turn" if name == "multi_turn" else "retrieval"
    kind = "runtime" if base is not None else kind
    return RunCase(name=name, kind=kind, mode=mode, engine=engine, limits=limits, settings=settings)


def _demo_limits(name: str, mode: str, config: RunConfig) -> Limits:
    drop = Limits(runtime_mode="store", decode_drop_target=0.08, require_runtime_decomp=True, max_lossless_fallback=0.0)
    return drop.changed({"runtime_mode": mode, **config.limits_of(name)}, name)


def _queue(name: str, limits: Limits) -> dict[str, int]:
    """Encodings that may be open, unless the configuration says.

    In the runtime cases as many as their gate allows: the fork leaves the engine's 256, but the engine hands in one
    block of a layer at a step, while the sound runtime hands in all blocks of a prompt, as far as the queue goes.
    """
    if name == "llm_demo_store":
        return {"kv_lossless_max_queue": 64}
    queue = limits.max_lossless_queue_peak
    return {"kv_lossless_max_queue": max(1, int(queue))} if queue >= 0 else {}


def _at(case: RunCase, point: dict[str, float | int]) -> RunCase:
    """A case at a point of a sweep; its name says where. What is not compressed differs by its work only."""
    work = {name: value for name, value in point.items() if name in ("prompts", "gens")}
    knobs = {name: value for name, value in point.items() if name not in work} if case.engine else {}
    settings = case.settings
    if "prompts" in work:
        settings = replace(settings, prompts=(int(work["prompts"]),))
    if "gens" in work:
        settings = replace(settings, generate=int(work["gens"]), demo_generate=int(work["gens"]))
    engine = dict(case.engine) | {SWEEPS[name]: value for name, value in knobs.items()}
    if "keep" in knobs:
        engine["kv_h2o_target_mode"] = "static"
    name = "+".join([case.name, *(f"{name}={value}" for name, value in {**work, **knobs}.items())])
    return replace(case, name=name, engine=engine, settings=settings)


def _check(case: RunCase) -> None:
    """Refuse what the engine would not use as it was said: it takes other values without a word."""
    try:
        _ = case.policy, case.lossless
    except KvmnnError as error:
        raise OptionError(f"{case.name}: {error}") from None
    clamped = H2OConfig.from_engine(case.engine).clamped if case.evicts else {}
    for word, key in SWEEPS.items():
        given, used = clamped.get(key.removeprefix("kv_h2o_"), (0, 0))
        if given != used:
            raise OptionError(f"{case.name}: {key} ({word}): found {given:g}, for which the engine takes {used:g}")
