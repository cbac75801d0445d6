"""What is compared: policies with their options and budgets, and what they are called in tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

import numpy as np

from ...errors import KvmnnError
from ...files.records import Record
from ...policies.base import Policy
from ...policies.budget import Budget
from ...policies.full import Full
from ...policies.labels import jsonable, label_of
from ...policies.registry import POLICIES, create

FULL = Full.name
"""The policy that evicts nothing."""


@dataclass(frozen=True)
class ProjectDefinition(Record):
    """How the project that a preset is from measured a configuration (`presets` says what that means).

    Parameters
    ----------
    evaluation
        ``"E1"``: token by token; ``"E2"``: in chunks.
    label
        The project's name for the configuration.
    chunk
        Tokens fed at once.
    speed
        Whether the project also timed generation (E3).
    """

    evaluation: Literal["E1", "E2"]
    label: str
    chunk: int = 1
    speed: bool = False


@dataclass(frozen=True)
class Configuration(Record):
    """One line of the table.

    Parameters
    ----------
    label
        Its name there.
    policy
        ``"full"`` or a name in `kvmnn.policies.POLICIES`.
    options
        Arguments of the policy, all that differ from its defaults. A random generator is none of them: each document
        gets one of its own from the settings' seed.
    preset
        The preset it belongs to.
    definition
        How that preset's project measured it.
    positions
        ``"stored"`` is the classic mistake, for contrast: positions from the stored length.
    """

    label: str
    policy: str = FULL
    options: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    definition: ProjectDefinition | None = field(default=None, metadata={"key": "seed_method"})
    positions: Literal["true", "stored"] = "true"

    def make(self, seed: Sequence[int] = (0,)) -> Policy:
        """The policy, with a generator of this seed where it draws."""
        return create(self.policy, **self.options, **_generator(self.policy, self.options, seed))

    def policy_options(self) -> dict[str, Any]:
        """All options of the policy as JSON has them, defaults included."""
        return jsonable(self.make().options())

    @property
    def identity(self) -> dict[str, Any]:
        """What its numbers depend on, as JSON has it: all options, defaults included, and no label."""
        return {"policy": self.policy, "options": self.policy_options(), "positions": self.positions}

    @classmethod
    def from_dict(cls, document: object, where: str = "configuration") -> Self:
        """A configuration from `to_dict`."""
        found = super().from_dict(document, where)
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in found.options.items()}
        return replace(found, options=options)


def _generator(policy: str, options: Mapping[str, Any], seed: Sequence[int]) -> dict[str, Any]:
    if policy not in POLICIES or options.get("strategy") != "random":
        return {}
    draws = any(entry.name == "generator" for entry in fields(POLICIES[policy]))
    return {"generator": np.random.default_rng(list(seed))} if draws else {}


# -- from the command line --------------------------------------------------------------------------------------------


def configurations(
    specs: Iterable[str], budgets: Sequence[int], skip_layers: tuple[int, ...] | None = None
) -> list[Configuration]:
    """Every policy with every budget.

    Parameters
    ----------
    specs
        ``NAME`` or ``NAME:option=value,...``, read by `parse_spec`.
    budgets
        Tokens. A spec that says its own budget or keep_ratio is taken once, and one without any budget to take uses
        its policy's default.
    skip_layers
        Layers never cut, for specs that do not say.

    Raises
    ------
    KvmnnError
        For policies and options that do not exist and values that the policy refuses.
    """
    found: list[Configuration] = []
    for spec in specs:
        name, texts = parse_spec(spec)
        if name == FULL:
            found.append(Configuration(FULL, FULL, texts))
            found[-1].make()
            continue
        known = {entry.name for entry in fields(_policy(name))}
        fixed = "budget" in texts or "keep_ratio" in texts or "budget" not in known
        for budget in [None] if fixed or not budgets else list(budgets):
            options: dict[str, Any] = {} if budget is None else {"budget": budget}
            options |= _values(name, texts, budget)
            if skip_layers is not None:
                options.setdefault("skip_layers", skip_layers)
            found.append(named(name, options))
    return found


def named(policy: str, options: Mapping[str, Any], **rest: Any) -> Configuration:
    """A configuration with the label that its options give, checked."""
    made = Configuration(label_of(_policy(policy), options), policy, dict(options), **rest)
    made.make()
    return made


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """The name of a policy or preset, and its options as texts."""
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise KvmnnError(f"{spec!r}: {part!r} is not option=value")
        if key in options:
            raise KvmnnError(f"{spec!r}: says {key} twice")
        options[key] = value
    return name, options


def numbers(text: str) -> tuple[int, ...]:
    """``0+1`` or ``0,1`` as integers; empty and ``none`` are none."""
    if text in ("", "none"):
        return ()
    parts = re.split(r"[+,]", text)
    if not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        raise KvmnnError(f"{text!r}: expected whole numbers such as 0+1, or none")
    return tuple(int(part) for part in parts)


def shares(text: str) -> tuple[float, ...]:
    """``0.2+0.5`` as numbers."""
    try:
        found = tuple(float(part) for part in re.split(r"[+,]", text))
    except ValueError:
        raise KvmnnError(f"{text!r}: expected numbers such as 0.2+0.5") from None
    if not all(math.isfinite(share) for share in found):
        raise KvmnnError(f"{text!r}: expected finite numbers")
    return found


def _policy(name: str) -> type[Policy]:
    if name not in POLICIES:
        raise KvmnnError(f"unknown policy {name!r}: expected {FULL} or one of {', '.join(POLICIES)}")
    return POLICIES[name]


def _values(policy: str, texts: Mapping[str, str], budget: int | None) -> dict[str, Any]:
    """Options as their policy declares them; a generator comes from the seed and is none."""
    declared = get_type_hints(_policy(policy))
    settable = [entry.name for entry in fields(_policy(policy)) if entry.repr]
    for key in texts:
        if key not in settable:
            raise KvmnnError(f"{policy} has no option {key!r}: expected {', '.join(sorted(settable))}")
    own = texts.get("budget", "")
    base = int(own) if re.fullmatch(r"\d{1,9}", own) else budget
    return {key: _value(f"{policy}: {key}", text, declared[key], base) for key, text in texts.items()}


def _value(what: str, text: str, declared: Any, budget: int | None) -> Any:
    """One value; ``25%`` of an integer option is that share of the budget, rounded down."""
    kinds = get_args(declared) or (declared,)
    if declared == tuple[int, ...]:
        return numbers(text)
    if get_origin(declared) is Literal:
        return text
    if int in kinds and (size := _tokens(text)) is not None:
        if size.share is not None and budget is None:
            raise KvmnnError(f"{what} is {text}: a share of what? Say a budget")
        return size.of(budget or 0)
    if float in kinds:
        try:
            return float(text)
        except ValueError:
            pass
    expected = "a number" if float in kinds else "a whole number" if int in kinds else "text"
    if int not in kinds and float not in kinds:
        return text
    raise KvmnnError(f"{what} is {text!r}: expected {expected}")


def _tokens(text: str) -> Budget | None:
    try:
        return Budget.parse(text)
    except KvmnnError:
        return None
