"""What tables and documents call a policy with its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

from .base import Budgeted, Policy
from .full import Full


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

    policy: Policy = field(default_factory=Full)
    label: str = Full.name
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """A policy with those of its options that are not the defaults."""
        changed = {}
        for entry in fields(policy):
            if entry.repr and entry.init and getattr(policy, entry.name) != entry.default:
                changed[entry.name] = getattr(policy, entry.name)
        return cls(policy=policy, label=label_of(type(policy), changed), options=changed)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the form of an evaluation's configurations."""
        return {
            "label": self.label,
            "policy": self.policy.name,
            "options": jsonable(self.options),
            "preset": None,
            "seed_method": None,
            "positions": "true",
        }


def label_of(policy: type[Policy], options: Mapping[str, Any]) -> str:
    """The policy, its budget, and every other option that is not the default: ``"streaming 256 sink=8"``.

    The budget is named, and so are layers that are never cut, whatever the defaults are: both say what is held.
    """
    words = [policy.name]
    budget, keep_ratio = options.get("budget"), options.get("keep_ratio")
    if budget is None and keep_ratio is None and issubclass(policy, Budgeted):
        budget, keep_ratio = policy.default_budget, policy.default_keep_ratio
    if budget is not None:
        words.append(str(budget))
    if keep_ratio is not None:
        words.append(f"{keep_ratio:.4g}")
    for entry in fields(policy):
        if entry.name == "skip_layers":
            skipped = options.get(entry.name, entry.default)
            words += [f"{entry.name}={'+'.join(map(str, skipped))}"] if skipped else []
            continue
        if entry.name in ("budget", "keep_ratio", "generator") or entry.name not in options:
            continue
        if entry.default is MISSING or options[entry.name] != entry.default:
            words.append(f"{entry.name}={options[entry.name]}")
    return " ".join(words)


def jsonable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with lists for tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
