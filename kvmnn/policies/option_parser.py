"""Parse the options of a policy by their types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .._util.text import suggest
from ..errors import KvmnnError
from .policy import Budget, Policy


def parse_ints(text: str) -> tuple[int, ...]:
    """Parse ``0+1`` or ``0,1`` as integers; an empty text and ``none`` have none."""
    if text in ("", "none"):
        return ()
    parts = re.split(r"[+,]", text)
    if not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        raise KvmnnError(f"{text!r}: expected whole numbers such as 0+1, or none")
    return tuple(int(part) for part in parts)


def list_options(policy: type[Policy]) -> list[str]:
    """List the options of a policy; a random generator is not an option, but made from the seed."""
    return [entry.name for entry in fields(policy) if entry.repr]


def parse_options(policy: type[Policy], texts: Mapping[str, str], budget: int | None) -> dict[str, Any]:
    """Parse options by their types; shares of integer options are those of `budget`."""
    type_hints, option_names, label = get_type_hints(policy), list_options(policy), policy.name
    for key in texts:
        if key not in option_names:
            suggestion = suggest(key, option_names)
            raise KvmnnError(
                f"{label} has no option {key!r}: expected {', '.join(sorted(option_names)) or 'none'}{suggestion}"
            )
    budget_text = texts.get("budget", "")
    parsed_budget = _try_parse_budget(budget_text)
    share = None if parsed_budget is None else parsed_budget.share
    if share is not None and budget is None and "keep_ratio" in option_names:
        raise KvmnnError(f"{label}: budget is {budget_text}: expected a number of tokens, or keep_ratio={share:g}")
    base_budget = int(budget_text) if re.fullmatch(r"\d{1,9}", budget_text) else budget
    return {key: _parse_option(f"{label}: {key}", text, type_hints[key], base_budget) for key, text in texts.items()}


def _parse_option(label: str, text: str, type_hint: Any, budget: int | None) -> Any:
    """Parse one value; ``25%`` of an integer option is that share of the budget, rounded down."""
    accepted_types = get_args(type_hint) or (type_hint,)
    if type_hint == tuple[int, ...]:
        return parse_ints(text)
    if type_hint == tuple[float, ...]:
        return tuple(_parse_float(label, part) for part in text.split("+"))
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
        return _parse_float(label, text)
    if int in accepted_types:
        raise KvmnnError(f"{label} is {text!r}: expected a whole number")
    return text


def _parse_float(label: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise KvmnnError(f"{label} is {text!r}: expected a number") from None


def _try_parse_budget(text: str) -> Budget | None:
    try:
        return Budget.parse(text)
    except KvmnnError:
        return None
