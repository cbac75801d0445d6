"""Mapped files: which pages are given back."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmnn.errors import SourceError
from kvmnn.files.mapped_file import MappedFile


def test_release_pages_only_large_ranges_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(4096))
    file, dropped = MappedFile(tmp_path / "x"), []

    class Drops:
        def release_pages(self, offset: int, nbytes: int) -> None:
            dropped.append((offset, nbytes))

    monkeypatch.setattr(file, "_mapping", Drops())
    file.release_pages(5, (1 << 20) - 1)
    assert dropped == []
    file.release_pages(5, 1 << 20)
    assert dropped == [(0, (1 << 20) + 5)]


def test_mapped_file_empty_file_is_reported_as_empty(tmp_path: Path) -> None:
    """Its archive reader asked for 0 bytes at offset 0, "but the file has 0 bytes"."""
    (tmp_path / "x.npz").touch()
    file = MappedFile(tmp_path / "x.npz")
    assert (file.size, file.read_head(4), list(file.iter_chunks(0, 0, 1))) == (0, b"", [])
    for nbytes in (0, 1):
        with pytest.raises(SourceError, match=r"x\.npz: is empty"):
            file.view(0, nbytes)
    (tmp_path / "y").write_bytes(b"abc")
    file = MappedFile(tmp_path / "y")
    assert file.view(1, 2).tobytes() == b"bc" and file.view(3, 0).size == 0
    for offset, nbytes in ((0, 4), (2, 2), (-1, 1), (0, -1)):
        with pytest.raises(SourceError, match=f"needs {nbytes} bytes at offset {offset}, but the file has 3 bytes"):
            file.view(offset, nbytes)
