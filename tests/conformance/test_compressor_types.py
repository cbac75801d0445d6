"""What torch makes of float8, complex, quantised, negated and very old weights, as recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conformance import run_index


@pytest.mark.slow
def test_compressor_types_convert_or_are_refused_like_torch(unpacked: Callable[[str], Path]) -> None:
    folder = unpacked("compressor_types")
    results = list(run_index(folder / "index.json", folder))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 414
