"""The header of a model: values of every type are skipped by their own length."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvmnn.formats.llama.gguf import read_gguf_geometry

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values in GGUF, and struct's letters for them."""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize("count", [None, 0, 3])
@pytest.mark.parametrize("kind", NUMBERS)
def test_read_gguf_skips_values_of_every_type(tmp_path: Path, kind: int, count: int | None) -> None:
    """One value, or an array of them, before the requested fields."""
    letter = NUMBERS[kind]
    if count is None:
        value = struct.pack("<I", kind) + struct.pack(f"<{letter}", 1)
    else:
        value = struct.pack("<IIQ", 9, kind, count) + struct.pack(f"<{count}{letter}", *[1] * count)
    fields = {"llama.attention.head_count_kv": 2, "llama.attention.key_length": 32}
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 2 + len(fields))
    data += text("general.architecture") + struct.pack("<I", 8) + text("llama") + text("general.x") + value
    for name, number in fields.items():
        data += text(name) + struct.pack("<II", 4, number)
    (tmp_path / "m.gguf").write_bytes(data)
    assert read_gguf_geometry(str(tmp_path / "m.gguf"), 3) == ("llama", (2, 2, 2), 32)


def test_read_gguf_string_lists_and_heads_per_layer(tmp_path: Path) -> None:
    words = b"".join(text(word) for word in ("a", "", "bcd"))
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 4)
    data += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    data += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + words
    data += text("llama.attention.head_count_kv") + struct.pack("<IIQ3I", 9, 4, 3, 2, 1, 4)
    data += text("llama.attention.key_length") + struct.pack("<II", 4, 64)
    (tmp_path / "m.gguf").write_bytes(data)
    assert read_gguf_geometry(str(tmp_path / "m.gguf"), 3) == ("llama", (2, 1, 4), 64)
