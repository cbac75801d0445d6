"""What tables and documents call a policy with its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

from .base import BudgetedPolicy, Policy
from .full import FullCache


@dataclass(frozen=True, kw_only=True)
class LabelledPolicy:
    """A policy as results name it.

    Parameters
    ----------
    policy
        The policy itself.
    label
        Its name in tables.
    options
        The options that were asked for.
    """

    policy: Policy = field(default_factory=FullCache)
    label: str = FullCache.name
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_policy(cls, policy: Policy) -> Self:
        """A policy with those of its options that are not the defaults."""
        changed_options = {}
        for entry in fields(policy):
            if entry.repr and entry.init and getattr(policy, entry.name) != entry.default:
                changed_options[entry.name] = getattr(policy, entry.name)
        return cls(policy=policy, label=format_label(type(policy), changed_options), options=changed_options)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the form of an evaluation's configurations."""
        return {
            "label": self.label,
            "policy": self.policy.name,
            "options": convert_options_to_json(self.options),
            "preset": None,
            "seed_method": None,
            "positions": "true",
        }


def format_label(policy: type[Policy], options: Mapping[str, Any]) -> str:
    """The policy, its budget, and every other option that is not the default: ``"streaming 256 sink=8"``.

    The budget is named, and so are layers that are never cut, whatever the defaults are: both say what is held.
    """
    label_parts = [policy.name]
    budget, keep_ratio = options.get("budget"), options.get("keep_ratio")
    if budget is None and keep_ratio is None and issubclass(policy, BudgetedPolicy):
        budget, keep_ratio = policy.default_budget, policy.default_keep_ratio
    if budget is not None:
        label_parts.append(str(budget))
    if keep_ratio is not None:
        label_parts.append(f"{keep_ratio:.4g}")
    for entry in fields(policy):
        if entry.name == "skip_layers":
            skip_layers = options.get(entry.name, entry.default)
            label_parts += [f"{entry.name}={'+'.join(map(str, skip_layers))}"] if skip_layers else []
            continue
        if entry.name in ("budget", "keep_ratio", "generator") or entry.name not in options:
            continue
        if entry.default is MISSING or options[entry.name] != entry.default:
            label_parts.append(f"{entry.name}={options[entry.name]}")
    return " ".join(label_parts)


def convert_options_to_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with lists for tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
