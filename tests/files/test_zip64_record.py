"""Where the zip64 record of an archive may lie."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

import kvmnn
from kvmnn.errors import SourceError

RECORD_BYTES = 56


def zip64_archive(shift: int) -> bytes:
    """An archive of one array, whose locator points `shift` bytes after its zip64 record."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, archive.open("k.npy", "w") as member:
        np.save(member, np.arange(24, dtype=np.float32))
    data = file.getvalue()
    end = data.rindex(b"PK\5\6")
    _, _, _, _, count, size, begin, _ = struct.unpack("<4s4H2LH", data[end:])
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, begin)
    assert len(record) == RECORD_BYTES
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, end + shift, 1)
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF, 0)
    return data[:end] + record + locator + last


def test_zip64_record_right_before_its_locator_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(zip64_archive(0))
    assert kvmnn.open(tmp_path / "a.npz").arrays[0].to_numpy().tolist() == list(range(24))


@pytest.mark.parametrize("shift", [1, 8, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 42, 1 << 20, 1 << 62])
def test_zip64_record_overlapping_its_locator_is_refused(tmp_path: Path, shift: int) -> None:
    (tmp_path / "a.npz").write_bytes(zip64_archive(shift))
    with pytest.raises(SourceError, match=r"a\.npz.*: the zip64 record of the archive lies outside the file"):
        kvmnn.open(tmp_path / "a.npz")
