"""Parse policy specs: ``NAME`` or ``NAME:option=value,...``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from ..errors import KvmnnError
from .option_parser import list_options, parse_options
from .policy import Policy
from .registry import create_policy, get_policy_class


def split_spec(spec: str, flags: Collection[str] = ()) -> tuple[str, dict[str, str]]:
    """Split ``NAME:option=value,...`` into name and option texts; options in `flags` have the value ``"true"``."""
    name, _, option_text = spec.partition(":")
    options: dict[str, str] = {}
    for part in option_text.split(",") if option_text else []:
        key, equals, value = part.partition("=")
        if key in flags and not equals:
            equals, value = "=", "true"
        if not key or not equals:
            raise KvmnnError(f"{spec!r}: {part!r} is not option=value")
        if key in options:
            raise KvmnnError(f"{spec!r}: says {key} twice")
        options[key] = value
    return name, options


def expand_spec(
    spec: str,
    budgets: Sequence[int] = (),
    skip_layers: tuple[int, ...] | None = None,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the name and the options of a policy for each budget, as `build_policy` takes them."""
    name, texts = split_spec(spec)
    option_names = list_options(get_policy_class(name))
    has_own_size = "budget" in texts or "keep_ratio" in texts or "budget" not in option_names
    for budget in [None] if has_own_size or not budgets else list(budgets):
        options: dict[str, Any] = dict((defaults or {}).get(name, {}))
        options |= {} if budget is None else {"budget": budget}
        options |= parse_options(get_policy_class(name), texts, budget)
        if "skip_layers" in option_names and (skip_layers is not None or get_policy_class(name).skip_layers):
            options.setdefault("skip_layers", skip_layers or ())
        yield name, options


def accepts_option(spec: str, option: str) -> bool:
    """Return whether the policy of a spec has an option, even if the spec sets it itself."""
    return option in list_options(get_policy_class(split_spec(spec)[0]))


def build_policy(name: str, options: Mapping[str, Any], seed: Sequence[int] = (0,)) -> Policy:
    """Create a policy; one that draws at random gets a generator of this seed."""
    is_random = options.get("strategy") == "random" and any(
        entry.name == "generator" for entry in fields(get_policy_class(name))
    )
    return create_policy(name, **options, **({"generator": np.random.default_rng(list(seed))} if is_random else {}))
