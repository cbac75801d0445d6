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
from ...policies.full import FullCache
from ...policies.labels import LabelledPolicy, convert_options_to_json, format_label
from ...policies.registry import get_policy_class
from ...policies.specs import accepts_option, build_policy, expand_spec, split_spec

FULL_POLICY = FullCache.name
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
    policy: str = FULL_POLICY
    options: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    definition: ProjectDefinition | None = field(default=None, metadata={"key": "seed_method"})
    positions: Literal["true", "stored"] = "true"
    begun: bool = False

    def create_policy(self, seed: Sequence[int] = (0,)) -> Policy:
        """The policy, with a generator of this seed where it draws."""
        return build_policy(self.policy, self.options, seed)

    def list_options(self) -> dict[str, Any]:
        """All options of the policy as JSON has them, defaults included."""
        return convert_options_to_json(self.create_policy().to_options())

    @property
    def to_identity(self) -> dict[str, Any]:
        """What its numbers depend on, as JSON has it: all options, defaults included, and no label."""
        identity = {"policy": self.policy, "options": self.list_options(), "positions": self.positions}
        return identity | ({"begun": True} if self.begun else {})

    @classmethod
    def from_dict(cls, document: object, where: str = "configuration") -> Self:
        """A configuration from `to_dict`."""
        configuration = super().from_dict(document, where)
        options = {
            key: tuple(value) if isinstance(value, list) else value for key, value in configuration.options.items()
        }
        return replace(configuration, options=options)


PolicyLike = str | Policy | Configuration
"""A policy by its spec or itself, or a configuration."""


# -- from the command line --------------------------------------------------------------------------------------------


def expand_configurations(
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
    expanded = [
        build_configuration(*options) for spec in specs for options in expand_spec(spec, budgets, skip_layers, defaults)
    ]
    check_budgets(specs, budgets)
    return expanded


def check_budgets(specs: Sequence[str], budgets: Sequence[int]) -> None:
    """Refuse, with `OptionError`, budgets that change nothing because no policy takes one."""
    if not budgets or not specs or any(accepts_option(spec, "budget") for spec in specs):
        return
    budget_texts = [f"{spec}: {get_policy_class(split_spec(spec)[0]).budget_help}" for spec in specs]
    sizes_text = " and ".join(f"{budget:,}" for budget in budgets)
    raise OptionError(f"a budget of {sizes_text} tokens has no effect here; {'; '.join(budget_texts)}".replace("`", ""))


def resolve_configurations(
    policies: PolicyLike | Sequence[PolicyLike], budgets: int | str | Sequence[int | str], tokens: int
) -> list[Configuration]:
    """What `kvmnn.evaluation.evaluate` was asked to compare; shares of budgets are of `tokens`."""
    entries = [policies] if isinstance(policies, PolicyLike) else policies
    sizes = [budgets] if isinstance(budgets, int | str) else budgets
    budget_tokens = [Budget.parse(str(size)).resolve(tokens) for size in sizes]
    if budget_tokens and not any(isinstance(entry, str) for entry in entries):
        raise OptionError("budgets are for policies that are named: expected a name such as 'streaming' among them")
    check_budgets([entry for entry in entries if isinstance(entry, str)], budget_tokens)
    resolved: list[Configuration] = []
    for entry in entries:
        if isinstance(entry, str):
            resolved += [build_configuration(*options) for options in expand_spec(entry, budget_tokens)]
        elif isinstance(entry, Policy):
            labelled_policy = LabelledPolicy.from_policy(entry)
            resolved.append(Configuration(labelled_policy.label, entry.name, dict(labelled_policy.options)))
        else:
            resolved.append(entry)
    return resolved


def build_configuration(policy: str, options: Mapping[str, Any], **fields_by_name: Any) -> Configuration:
    """A configuration with the label that its options give, checked."""
    configuration = Configuration(
        format_label(get_policy_class(policy), options), policy, dict(options), **fields_by_name
    )
    configuration.create_policy()
    return configuration


def parse_ratios(text: str) -> tuple[float, ...]:
    """``0.2+0.5`` as numbers."""
    try:
        ratios = tuple(float(part) for part in re.split(r"[+,]", text))
    except ValueError:
        raise KvmnnError(f"{text!r}: expected numbers such as 0.2+0.5") from None
    if not all(math.isfinite(ratio) for ratio in ratios):
        raise KvmnnError(f"{text!r}: expected finite numbers")
    return ratios
