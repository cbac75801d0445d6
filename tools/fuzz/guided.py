"""What guided.c calls for each input, in the Python that it embeds: each function is a target."""

from __future__ import annotations

import ctypes

from kvmnn.compressor.checkpoint import _pickles
from kvmnn.compressor.checkpoint.torch_names import Names, set_state
from kvmnn.errors import CheckpointError, FrameError, LimitError
from kvmnn.frames import _decoder, zstd

RLE_AND_ZSTD = 3
MOST_WORDS = 1 << 16


def zstd_decompress() -> int:
    """Where the function is that the decoder calls with a context."""
    address = ctypes.cast(zstd._library.ZSTD_decompress, ctypes.c_void_p).value  # type: ignore[union-attr]
    assert address is not None
    return address


def frames(data: memoryview) -> bytearray | None:
    """The words of a frame; None where it is refused."""
    try:
        frame = _decoder.Frame(data, 0, RLE_AND_ZSTD)
        if frame.words > MOST_WORDS:
            return None
        frame.decode()
    except FrameError:
        return None
    out = bytearray(frame.words * frame.stride)
    frame.join(memoryview(out).cast("B", (frame.words, frame.stride)))
    assert frame.equals(out)
    frame.close()
    return out


def streams(data: memoryview) -> None:
    """One stream, whatever follows it."""
    try:
        if len(data) < 6 or int.from_bytes(data[2:6], "little") <= MOST_WORDS:
            _decoder.decode_stream(data, RLE_AND_ZSTD)
    except FrameError:
        pass


def pickles(data: memoryview) -> None:
    """A pickle of a checkpoint, run as data."""
    try:
        end, _ = _pickles.scan(data, 0, 10_000)
        _pickles.load(data, 0, end, Names().resolve, _storage, set_state)
    except (CheckpointError, LimitError):
        pass


def _storage(name: object) -> object:
    raise CheckpointError("no storages here")
