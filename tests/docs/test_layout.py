"""The table of docs/layout.md lists all backends, and examples of docstrings run."""

from __future__ import annotations

import doctest

import numpy as np
from repository import DOCS

import kvmnn.packed.cache
import kvmnn.packed.layout
from kvmnn.packed.backends import BACKENDS

PAGE = DOCS / "layout.md"


def test_docstring_examples_run() -> None:
    for module in (kvmnn.packed.layout, kvmnn.packed.cache):
        found = doctest.testmod(module, extraglobs={"np": np})
        assert found.attempted > 3
        assert found.failed == 0


def test_backend_table_equals_backends() -> None:
    rows = [line.strip("|").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    written = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if row[0].strip() in BACKENDS}
    for name, row in BACKENDS.items():
        numbers = (row.dtype, row.lP, row.hP, row.lP8, row.hP8)
        assert written[name] == [*("-" if n is None else str(n) for n in numbers), row.source]
    assert len(written) == len(BACKENDS)
