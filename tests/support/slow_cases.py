"""Long lists of cases, of which `make test` runs a sample and `make test-all` every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mark_most_slow(cases: Iterable[Any], step: int) -> list[Any]:
    """Return the cases as parameters, all but every `step`-th one marked slow.

    Cases of several parameters are tuples. The first case is never slow.
    """
    parameters = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=[pytest.mark.slow] if number % step else []))
    return parameters
