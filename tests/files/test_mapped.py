"""Mapped files: which pages are given back."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmnn.files.mapped import MappedFile


def test_only_large_ranges_are_given_back_from_the_page_they_begin_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(bytes(4096))
    file, dropped = MappedFile(tmp_path / "x"), []

    class Drops:
        def drop(self, offset: int, nbytes: int) -> None:
            dropped.append((offset, nbytes))

    monkeypatch.setattr(file, "_map", Drops())
    file.drop(5, (1 << 20) - 1)
    assert dropped == []
    file.drop(5, 1 << 20)
    assert dropped == [(0, (1 << 20) + 5)]
