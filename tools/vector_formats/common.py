"""What the checks of every format share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CaseResult:
    """One case: its name, what is wrong, nothing if it passed, and what could not be compared on this machine."""

    name: str
    problems: list[str] = field(default_factory=list)
    exemption: str = ""


class Checker:
    """Collects the differences of one case between what was expected and what kvmnn computed."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.problems: list[str] = []
        self.exemption = ""

    def exempt(self, reason: str) -> None:
        """Note that a part of the case is not compared, and why; the runner counts these."""
        self.exemption = reason

    def equal(self, what: str, computed: Any, expected: Any) -> bool:
        if computed == expected and isinstance(computed, bool) == isinstance(expected, bool):
            return True
        self.problems.append(f"{what}: expected {_short(expected)}, kvmnn gives {_short(computed)}")
        return False

    def field(self, name: str, computed: Any) -> bool:
        """Compare with the field `name` of the case, which has to be there."""
        if name not in self.case:
            self.problems.append(f"the case has no field {name!r}")
            return False
        return self.equal(name, computed, self.case[name])

    def known_fields(self, names: set[str]) -> None:
        """Fail for a field that nothing here compares; texts may be remarks and are let through."""
        for name in sorted(set(self.case) - names):
            if not isinstance(self.case[name], str | None):
                self.problems.append(f"field {name!r} is not known to this runner")


def run_list(entries: Any, label: str, check: Callable[[dict[str, Any], Checker], None]) -> Iterator[CaseResult]:
    """Check every entry of a case list; whatever goes wrong fails that case and no other."""
    for number, case in enumerate(entries):
        if not isinstance(case, dict):
            yield CaseResult(f"{label}[{number}]", ["expected a JSON object"])
            continue
        checker = Checker(case)
        try:
            check(case, checker)
        except Exception as error:
            checker.problems.append(f"{type(error).__name__}: {error}")
        name = f"{label}[{number}] {case.get('name', '')}".rstrip()
        yield CaseResult(name, checker.problems, checker.exemption)


def sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def unknown_lists(index: dict[str, Any], known: Sequence[str]) -> Iterator[CaseResult]:
    """A failure for every entry of a list of cases that the format does not have."""
    for name, value in index.items():
        if name not in known and isinstance(value, list) and value and all(isinstance(e, dict) for e in value):
            for number in range(len(value)):
                yield CaseResult(f"{name}[{number}]", ["unknown kind of case"])


def _short(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, list | dict) else repr(value)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
