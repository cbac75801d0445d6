"""The bytes of a unit are those that docs/format-store.md documents, read and written without kvmnn."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from prefixes import MODEL, checksum_model, layers_of

import kvmnn
from kvmnn.frames.buffers import integrity_checksum
from kvmnn.store import PrefixStore


@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, 1000])
def test_integrity_checksum_equals_the_model(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert integrity_checksum(data) == checksum_model(data)
    assert integrity_checksum(data, 0x1234567890ABCDEF) == checksum_model(data, 0x1234567890ABCDEF)


def test_unit_bytes_equal_the_documented_format(tmp_path: Path) -> None:
    """Taken apart by hand, for the second of two units of a text."""
    import hashlib

    ids = [*range(70_000, 70_010)]
    layers = layers_of(ids)
    with PrefixStore(tmp_path / "s", block_tokens=4, codec="frames") as store:
        store.put(ids[:4], layers_of(ids[:4]), model=MODEL)
        store.put(ids, layers, model=MODEL)
    data = (tmp_path / "s" / "units" / "000" / "00000002.unit").read_bytes()
    document = '{"dtype":"fp16","layers":[[0,2,4],[1,2,4]],"model":"a model"}'
    space = hashlib.blake2b(b"kvmnn prefix store 1\n" + document.encode(), digest_size=16).digest()
    parent = hashlib.blake2b(space + np.array(ids[:4], "<u4").tobytes(), digest_size=16).digest()
    assert data[:52] == b"KVMNNPU1" + struct.pack("<III", 6, 4, 4) + space + parent
    assert np.frombuffer(data, "<u4", 6, 52).tolist() == ids[4:]
    table = np.frombuffer(data, "<u8", 12, 76).reshape(4, 3)
    assert struct.unpack_from("<Q", data, 172)[0] == checksum_model(data[:172])
    at = 180
    for number, (size, stored, raw) in enumerate(table.tolist()):
        frame = data[at : at + size]
        part = (layers[number // 2].keys, layers[number // 2].values)[number % 2][:, 4:]
        assert kvmnn.decode(frame, dtype="fp16").tobytes() == part.tobytes()
        assert stored == checksum_model(frame)
        rows = 0
        for row in part:
            rows = checksum_model(row.tobytes(), rows)
        assert raw == rows
        at += size
    assert at == len(data)
