"""What guided.c calls for each input, in the Python that it embeds: each function is a target."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import safetensors_model

from kvmnn.dtypes import BF16, FP16, FP32
from kvmnn.errors import CheckpointError, FrameError, LimitError, SourceError
from kvmnn.formats import _safetensors_header
from kvmnn.formats.torch import _pickles
from kvmnn.formats.torch.allowed_globals import AllowedGlobals, set_tensor_state
from kvmnn.frames import _decoder, tuning, zstd
from kvmnn.frames.encoder import encode_elements
from kvmnn.frames.options import CodecOptions

RLE_AND_ZSTD = 3
MOST_WORDS = 1 << 16
MOST_MADE = 12 << 10
"""Words that the writer is given."""
PIECE_BYTES, LANE_BYTES = tuning.FAST_SEGMENT_BYTES, tuning.SEGMENT_LANE_BYTES
NOISE = np.random.default_rng(1).integers(0, 1 << 16, 1 << 18).astype(np.uint16)
RARE = (16 - np.log2(np.arange(1, (1 << 16) + 1)).astype(np.uint8)).astype(np.uint8)


def zstd_decompress() -> int:
    """Where the function is that the decoder calls with a context."""
    address = ctypes.cast(zstd._library.ZSTD_decompress, ctypes.c_void_p).value  # type: ignore[union-attr]
    assert address is not None
    return address


def frames(data: memoryview) -> bytearray | None:
    """The words of a frame; None where it is refused."""
    try:
        frame = _decoder.ParsedFrame(data, 0, RLE_AND_ZSTD)
        if frame.num_elements > MOST_WORDS:
            return None
        frame.decode()
    except FrameError:
        return None
    out = bytearray(frame.num_elements * frame.itemsize)
    frame.join(memoryview(out).cast("B", (frame.num_elements, frame.itemsize)))
    assert frame.equals(out)
    frame.close()
    return out


def writer(data: memoryview) -> tuple[bytes, bytes] | None:
    """The frame of effort "fast" or "balanced" of words that the input tells of, decoded once more, and the words."""
    if not data:
        return None
    option, words = data[0], expanded(data)
    if words.size == 0:
        return None
    kind = (FP16, BF16, FP32, FP32)[option & 3]
    effort = "balanced" if option & 32 else "fast"
    tuning.FAST_SEGMENT_BYTES = (PIECE_BYTES, PIECE_BYTES, 1 << 10, 10 << 10)[option >> 2 & 3]
    tuning.SEGMENT_LANE_BYTES = tuning.FAST_SEGMENT_BYTES // 2
    try:
        frame = encode_elements(words, CodecOptions(effort=effort).to_lane_options(kind), 1)
    finally:
        tuning.FAST_SEGMENT_BYTES, tuning.SEGMENT_LANE_BYTES = PIECE_BYTES, LANE_BYTES
    found = _decoder.ParsedFrame(frame, kind.itemsize, RLE_AND_ZSTD)
    found.decode()
    assert found.equals(words), "decoded to other words"
    found.close()
    return frame, words.tobytes()


def expanded(data: memoryview) -> npt.NDArray[np.uint8]:
    """Words: after the first byte, which has options, lie they themselves or steps that make them.

    A step has 5 bytes: what and where noise begins, which lanes (others are noise), a parameter, and how many words: up
    to 2,047, times 16 where the last bits are set.
    """
    stride, lanes, end = (2, 2, 4, 4)[data[0] & 3], np.empty((MOST_MADE, 4), np.uint8), 0
    if data[0] & 16:
        return np.frombuffer(data[1 : 1 + (len(data) - 1) // stride * stride], np.uint8)
    for at in range(1, len(data) - 4, 5):
        what, mask, parameter = data[at : at + 3]
        count = (data[at + 3] | (data[at + 4] >> 5) << 8) << (4 if data[at + 4] & 15 == 15 else 0)
        count = min(count, MOST_MADE - end)
        noise = NOISE[(at * 31 + (what >> 3)) * 5 :][:count]
        some, wide, kind = noise >> 8, noise.astype(np.uint8), what & 7
        back = (parameter + 1) * {6: 16, 7: 256}.get(kind, 1)  # the last two as rows lie
        part = lanes[end : end + count]
        for lane in range(stride):
            if not mask >> lane & 1 or (kind >= 5 and back > end):
                part[:, lane] = np.roll(wide, lane + 1)
            elif kind == 0:
                part[:, lane] = parameter
            elif kind == 1:
                part[:, lane] = some % (parameter + 1)
            elif kind == 2:
                part[:, lane] = RARE[noise] * (parameter | 1)
            elif kind == 3:
                part[:, lane] = np.arange(count) * parameter
            elif kind == 4:
                part[:, lane] = np.where(wide < parameter, 0x3C, some)
            else:
                part[:, lane] = np.resize(lanes[end - back : end, lane], count)
        end += count
    return np.ascontiguousarray(lanes[:end, :stride]).reshape(-1)


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
        _pickles.load(data, 0, end, AllowedGlobals().resolve, _storage, set_tensor_state)
    except (CheckpointError, LimitError):
        pass


def headers(data: memoryview) -> None:
    """The header of a .safetensors file: the verdict and the values of Python's JSON parser."""
    text = bytes(data)
    try:
        found = _scanned(text)
    except SourceError as error:
        if "above the limit" in str(error):  # of bytes as they are written: escapes are longer than what they say
            return
        found = None
    if b"-0" not in text:  # which JSON has for 0 and the format does not need
        assert found == safetensors_model.header(text)


def _scanned(text: bytes) -> safetensors_model.Found | None:
    places, kinds, numbers = COLUMNS if len(text) < MOST_HEADER else _columns(len(text))
    count, names, metadata = _safetensors_header.scan(text, "x", safetensors_model.SIZES, places, kinds, numbers)
    tensors = [
        (name, names[kind], _safetensors_header.read_shape_at(text, place), begin, end)
        for name, kind, place, begin, end in zip(
            _safetensors_header.read_strings_at(text, places[0, :count], places[1, :count]),
            kinds[:count].tolist(),
            places[2, :count].tolist(),
            numbers[0, :count].tolist(),
            numbers[1, :count].tolist(),
            strict=True,
        )
    ]
    if len({tensor[0] for tensor in tensors}) < count:
        return None
    return sorted(tensors, key=lambda tensor: tensor[3:]), metadata


def _columns(length: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Room for the tensors of a header of so many bytes."""
    most = length // _safetensors_header.MIN_ENTRY_BYTES + 1
    return np.empty((3, most), np.uint32), np.empty(most, np.uint8), np.empty((3, most), np.int64)


MOST_HEADER = 700
COLUMNS = _columns(MOST_HEADER)


def _storage(name: object) -> object:
    raise CheckpointError("no storages here")
