"""Policies as people write them: ``NAME`` or ``NAME:option=value,...``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from ..errors import KvmnnError
from ..text import did_you_mean
from .base import Policy
from .budget import Budget
from .registry import create, policy_called


def parse_spec(spec: str, flags: Collection[str] = ()) -> tuple[str, dict[str, str]]:
    """The name of a policy or preset, and its options as texts: ``NAME`` or ``NAME:option=value,...``.

    Options named in `flags` stand alone and are ``"true"``.
    """
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if key in flags and not equals:
            equals, value = "=", "true"
        if not key or not equals:
            raise KvmnnError(f"{spec!r}: {part!r} is not option=value")
        if key in options:
            raise KvmnnError(f"{spec!r}: says {key} twice")
        options[key] = value
    return name, options


def options_of(
    spec: str,
    budgets: Sequence[int] = (),
    skip_layers: tuple[int, ...] | None = None,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the options of a policy for each budget, as `make` takes them.

    Parameters
    ----------
    spec
        Read by `parse_spec`; ``"full"`` is `Full`.
    budgets
        Tokens. A spec that says its own budget or keep_ratio is taken once, and one without any budget to take uses
        its policy's default.
    skip_layers
        Layers never cut, for specs that do not say. None: the budget holds in every layer, also of policies whose
        classes leave layers whole by default as their originals do.
    defaults
        Options that specs of a policy do not say, by its name.

    Raises
    ------
    KvmnnError
        For policies and options that do not exist and values of the wrong type.
    """
    name, texts = parse_spec(spec)
    known = _settable(name)
    fixed = "budget" in texts or "keep_ratio" in texts or "budget" not in known
    for budget in [None] if fixed or not budgets else list(budgets):
        options: dict[str, Any] = dict((defaults or {}).get(name, {}))
        options |= {} if budget is None else {"budget": budget}
        options |= _values(name, texts, budget)
        if "skip_layers" in known and (skip_layers is not None or _skipped_by_default(name)):
            options.setdefault("skip_layers", skip_layers or ())
        yield name, options


def takes(spec: str, option: str) -> bool:
    """Whether the policy of a spec has an option; also where the spec says it itself."""
    return option in _settable(parse_spec(spec)[0])


def make(name: str, options: Mapping[str, Any], seed: Sequence[int] = (0,)) -> Policy:
    """`create`, with a random generator of this seed where the policy draws."""
    draws = options.get("strategy") == "random" and any(
        entry.name == "generator" for entry in fields(policy_called(name))
    )
    return create(name, **options, **({"generator": np.random.default_rng(list(seed))} if draws else {}))


def numbers(text: str) -> tuple[int, ...]:
    """``0+1`` or ``0,1`` as integers; empty and ``none`` are none."""
    if text in ("", "none"):
        return ()
    parts = re.split(r"[+,]", text)
    if not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        raise KvmnnError(f"{text!r}: expected whole numbers such as 0+1, or none")
    return tuple(int(part) for part in parts)


def _settable(policy: str) -> list[str]:
    return [entry.name for entry in fields(policy_called(policy)) if entry.repr]


def _skipped_by_default(policy: str) -> bool:
    return any(entry.name == "skip_layers" and entry.default for entry in fields(policy_called(policy)))


def _values(policy: str, texts: Mapping[str, str], budget: int | None) -> dict[str, Any]:
    """Options as their policy declares them; a generator comes from the seed and is none."""
    declared = get_type_hints(policy_called(policy))
    settable = _settable(policy)
    for key in texts:
        if key not in settable:
            meant = did_you_mean(key, settable)
            raise KvmnnError(f"{policy} has no option {key!r}: expected {', '.join(sorted(settable)) or 'none'}{meant}")
    own = texts.get("budget", "")
    if (said := _tokens(own)) is not None and said.share is not None and budget is None and "keep_ratio" in settable:
        raise KvmnnError(f"{policy}: budget is {own}: expected a number of tokens, or keep_ratio={said.share:g}")
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
