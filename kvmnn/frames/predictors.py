"""Which predictors an encoder may try, and the engine's strings for them (format.md, "Predictor specs")."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import KvmnnError

PREDICTORS = ("raw", "delta_seq", "xor_seq")
"""The predictors by mode number, in the order in which the encoder tries them."""

DEFAULT_PREDICTORS = frozenset(PREDICTORS)
"""What the engine's default strings for K and V amount to."""

_IGNORED_PREDICTORS = (
    "pair_delta",
    "pair_delta_delta_seq",
)  # the engine's own strings name them; its codec has no such modes

ACCEPTED_PREDICTORS = (*PREDICTORS, *_IGNORED_PREDICTORS)
"""Names that the engine's own strings have."""


def parse_spec(spec: str, default_raw: bool = True) -> frozenset[str]:
    """The predictors that the engine enables for a spec string such as ``"raw,delta_seq"``.

    Names are split at commas, trimmed of spaces and tabs and compared exactly; others are ignored without a word. If
    none is left, raw is. Only the empty string leaves the decision to `default_raw`, and with False enables nothing
    (the encoder then falls back to raw).
    """
    if spec == "":
        return frozenset({"raw"} if default_raw else ())
    tokens = {token.strip(" \t") for token in spec.split(",")}
    return frozenset(tokens.intersection(PREDICTORS)) or frozenset({"raw"})


def resolve_predictors(predictors: str | Iterable[str] | None) -> frozenset[str]:
    """The predictor set an API caller means: None for the runtime's three, a spec string, or names.

    Raises
    ------
    KvmnnError
        For an empty collection and for names that no part of the engine knows; a spec string is read as the engine
        reads it and never refused.
    """
    if predictors is None:
        return DEFAULT_PREDICTORS
    if isinstance(predictors, str):
        return parse_spec(predictors)
    names = tuple(predictors)
    for name in names:
        if name not in ACCEPTED_PREDICTORS:
            raise KvmnnError(f"unknown predictor {name!r}: expected {', '.join(PREDICTORS)}")
    valid_names = frozenset(name for name in names if name in PREDICTORS)
    if not valid_names:
        raise KvmnnError(f"no predictor among {names!r}: expected at least one of {', '.join(PREDICTORS)}")
    return valid_names


def to_mode_bits(names: frozenset[str]) -> int:
    """The set as bits 1 raw, 2 delta_seq, 4 xor_seq; raw for the empty set, as the encoder's last resort."""
    return sum(1 << mode for mode, name in enumerate(PREDICTORS) if name in names) or 1
