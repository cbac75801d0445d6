"""What torch makes of float8, complex, quantised, negated and very old weights, as recorded."""

from __future__ import annotations

import tarfile
from pathlib import Path

from conformance import run_index
from repository import FIXTURES


def test_every_recorded_type_converts_or_is_refused_as_by_torch(tmp_path: Path) -> None:
    with tarfile.open(FIXTURES / "compressor_types" / "vectors.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    results = list(run_index(tmp_path / "index.json", tmp_path))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 414
