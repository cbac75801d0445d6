"""Raw words: files of any name, and pipes."""

from __future__ import annotations

import os
import threading

import pytest
from sources import WORDS, content, only

from kvmnn import formats
from kvmnn.errors import SourceError
from kvmnn.formats import ReadOptions


def test_raw_words_are_read(tmp_path):
    (tmp_path / "keys.bin").write_bytes(WORDS.tobytes())
    array = only(tmp_path / "keys.bin", dtype="bf16")
    assert (array.name, array.dtype, array.shape, array.array_dtype) == ("keys", "bf16", (48,), "<u2")
    assert content(array, 10) == WORDS.tobytes()


@pytest.mark.parametrize(
    ("data", "dtype", "message"),
    [
        (b"1234", None, "raw bytes need a dtype"),
        (b"", "fp16", "is empty"),
        (b"123456", "fp32", "whole number of 4-byte"),
    ],
)
def test_raw_invalid_size_or_dtype_is_refused(tmp_path, data, dtype, message):
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(SourceError, match=message):
        formats.open(str(tmp_path / "a.bin"), ReadOptions(dtype=dtype))


def test_raw_pipe_is_spooled(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(WORDS.tobytes(),))
    writer.start()
    assert content(only(pipe, dtype="fp32")) == WORDS.tobytes()
    writer.join()


def test_open_missing_file_is_refused(tmp_path):
    with pytest.raises(SourceError, match="No such file"):
        formats.open(str(tmp_path / "a.npy"))
