"""Parse policy specs: ``NAME`` or ``NAME:option=value,...``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from .._util.text import suggest
from ..errors import KvmnnError
from .policy import Budget, Policy
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
    option_names = _list_options(name)
    has_own_size = "budget" in texts or "keep_ratio" in texts or "budget" not in option_names
    for budget in [None] if has_own_size or not budgets else list(budgets):
        options: dict[str, Any] = dict((defaults or {}).get(name, {}))
        options |= {} if budget is None else {"budget": budget}
        options |= _parse_options(name, texts, budget)
        if "skip_layers" in option_names and (skip_layers is not None or get_policy_class(name).skip_layers):
            options.setdefault("skip_layers", skip_layers or ())
        yield name, options


def accepts_option(spec: str, option: str) -> bool:
    """Return whether the policy of a spec has an option, even if the spec sets it itself."""
    return option in _list_options(split_spec(spec)[0])


def build_policy(name: str, options: Mapping[str, Any], seed: Sequence[int] = (0,)) -> Policy:
    """Create a policy; one that draws at random gets a generator of this seed."""
    is_random = options.get("strategy") == "random" and any(
        entry.name == "generator" for entry in fields(get_policy_class(name))
    )
    return create_policy(name, **options, **({"generator": np.random.default_rng(list(seed))} if is_random else {}))


def parse_ints(text: str) -> tuple[int, ...]:
    """Parse ``0+1`` or ``0,1`` as integers; an empty text and ``none`` have none."""
    if text in ("", "none"):
        return ()
    parts = re.split(r"[+,]", text)
    if not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        raise KvmnnError(f"{text!r}: expected whole numbers such as 0+1, or none")
    return tuple(int(part) for part in parts)


def _list_options(policy: str) -> list[str]:
    return [entry.name for entry in fields(get_policy_class(policy)) if entry.repr]


def _parse_options(policy: str, texts: Mapping[str, str], budget: int | None) -> dict[str, Any]:
    """Parse options by their types; a random generator is not an option, but made from the seed."""
    type_hints = get_type_hints(get_policy_class(policy))
    option_names = _list_options(policy)
    for key in texts:
        if key not in option_names:
            suggestion = suggest(key, option_names)
            raise KvmnnError(
                f"{policy} has no option {key!r}: expected {', '.join(sorted(option_names)) or 'none'}{suggestion}"
            )
    budget_text = texts.get("budget", "")
    parsed_budget = _try_parse_budget(budget_text)
    share = None if parsed_budget is None else parsed_budget.share
    if share is not None and budget is None and "keep_ratio" in option_names:
        raise KvmnnError(f"{policy}: budget is {budget_text}: expected a number of tokens, or keep_ratio={share:g}")
    base_budget = int(budget_text) if re.fullmatch(r"\d{1,9}", budget_text) else budget
    return {key: _parse_option(f"{policy}: {key}", text, type_hints[key], base_budget) for key, text in texts.items()}


def _parse_option(label: str, text: str, type_hint: Any, budget: int | None) -> Any:
    """Parse one value; ``25%`` of an integer option is that share of the budget, rounded down."""
    accepted_types = get_args(type_hint) or (type_hint,)
    if type_hint == tuple[int, ...]:
        return parse_ints(text)
    if get_origin(type_hint) is Literal:
        return text
    if bool in accepted_types:
        if text not in ("yes", "no"):
            raise KvmnnError(f"{label} is {text!r}: expected yes or no")
        return text == "yes"
    if int in accepted_types and (parsed_budget := _try_parse_budget(text)) is not None:
        if parsed_budget.share is not None and budget is None:
            raise KvmnnError(f"{label} is {text}: a share of what? Say a budget")
        return parsed_budget.resolve(budget or 0)
    if float in accepted_types:
        try:
            return float(text)
        except ValueError:
            raise KvmnnError(f"{label} is {text!r}: expected a number") from None
    if int in accepted_types:
        raise KvmnnError(f"{label} is {text!r}: expected a whole number")
    return text


def _try_parse_budget(text: str) -> Budget | None:
    try:
        return Budget.parse(text)
    except KvmnnError:
        return None
