"""What is compared: policies with their options and budgets, and what they are called in tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from ...errors import KvmnnError, OptionError
from ...files.records import Record
from ...policies.base import Policy
from ...policies.budget import Budget
from ...policies.full import Full
from ...policies.labels import LabelledPolicy, jsonable, label_of
from ...policies.registry import policy_called
from ...policies.specs import make, options_of, parse_spec, takes

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
    begun
        Whether it goes on from the start of the evaluation, K and V that were computed elsewhere.
    """

    label: str
    policy: str = FULL
    options: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    definition: ProjectDefinition | None = field(default=None, metadata={"key": "seed_method"})
    positions: Literal["true", "stored"] = "true"
    begun: bool = False

    def make(self, seed: Sequence[int] = (0,)) -> Policy:
        """The policy, with a generator of this seed where it draws."""
        return make(self.policy, self.options, seed)

    def policy_options(self) -> dict[str, Any]:
        """All options of the policy as JSON has them, defaults included."""
        return jsonable(self.make().options())

    @property
    def identity(self) -> dict[str, Any]:
        """What its numbers depend on, as JSON has it: all options, defaults included, and no label."""
        found = {"policy": self.policy, "options": self.policy_options(), "positions": self.positions}
        return found | ({"begun": True} if self.begun else {})

    @classmethod
    def from_dict(cls, document: object, where: str = "configuration") -> Self:
        """A configuration from `to_dict`."""
        found = super().from_dict(document, where)
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in found.options.items()}
        return replace(found, options=options)


Compared = str | Policy | Configuration
"""A policy by its spec or itself, or a configuration."""


# -- from the command line --------------------------------------------------------------------------------------------


def configurations(
    specs: Iterable[str],
    budgets: Sequence[int],
    skip_layers: tuple[int, ...] | None = None,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Configuration]:
    """Every policy with every budget.

    A budget that a policy of the run does not take is passed over for that policy; the notes of the results say which.

    Parameters
    ----------
    specs
        ``NAME`` or ``NAME:option=value,...``, read by `kvmnn.policies.specs`.
    budgets
        Tokens. A spec that says its own budget or keep_ratio is taken once, and one without any budget to take uses
        its policy's default.
    skip_layers
        Layers never cut, for specs that do not say.
    defaults
        Options that specs of a policy do not say, by its name.

    Raises
    ------
    OptionError
        For budgets that none of the policies takes.
    KvmnnError
        For policies and options that do not exist and values that the policy refuses.
    """
    specs = list(specs)
    found = [named(*options) for spec in specs for options in options_of(spec, budgets, skip_layers, defaults)]
    check_budgets(specs, budgets)
    return found


def check_budgets(specs: Sequence[str], budgets: Sequence[int]) -> None:
    """Refuse, with `OptionError`, budgets that change nothing because no policy takes one."""
    if not budgets or not specs or any(takes(spec, "budget") for spec in specs):
        return
    means = [f"{spec}: {policy_called(parse_spec(spec)[0]).budget_means}" for spec in specs]
    said = " and ".join(f"{budget:,}" for budget in budgets)
    raise OptionError(f"a budget of {said} tokens has no effect here; {'; '.join(means)}".replace("`", ""))


def compared(
    policies: Compared | Sequence[Compared], budgets: int | str | Sequence[int | str], tokens: int
) -> list[Configuration]:
    """What `kvmnn.evaluation.evaluate` was asked to compare; shares of budgets are of `tokens`."""
    entries = [policies] if isinstance(policies, Compared) else policies
    sizes = [budgets] if isinstance(budgets, int | str) else budgets
    wanted = [Budget.parse(str(size)).of(tokens) for size in sizes]
    if wanted and not any(isinstance(entry, str) for entry in entries):
        raise OptionError("budgets are for policies that are named: expected a name such as 'streaming' among them")
    check_budgets([entry for entry in entries if isinstance(entry, str)], wanted)
    found: list[Configuration] = []
    for entry in entries:
        if isinstance(entry, str):
            found += [named(*options) for options in options_of(entry, wanted)]
        elif isinstance(entry, Policy):
            known = LabelledPolicy.of(entry)
            found.append(Configuration(known.label, entry.name, dict(known.options)))
        else:
            found.append(entry)
    return found


def named(policy: str, options: Mapping[str, Any], **rest: Any) -> Configuration:
    """A configuration with the label that its options give, checked."""
    made = Configuration(label_of(policy_called(policy), options), policy, dict(options), **rest)
    made.make()
    return made


def shares(text: str) -> tuple[float, ...]:
    """``0.2+0.5`` as numbers."""
    try:
        found = tuple(float(part) for part in re.split(r"[+,]", text))
    except ValueError:
        raise KvmnnError(f"{text!r}: expected numbers such as 0.2+0.5") from None
    if not all(math.isfinite(share) for share in found):
        raise KvmnnError(f"{text!r}: expected finite numbers")
    return found
