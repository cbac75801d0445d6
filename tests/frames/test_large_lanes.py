"""Effort "exact" on lanes whose streams are made a lane or a stream at a time: the bytes stay MNN's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import zstandard

import kvmnn
from kvmnn.frames import _encoder, _streams, _zstdlib

MIB = 1 << 20


def smallest(lane: bytes, modes: tuple[int, ...]) -> tuple[int, bytes]:
    """The first of the shortest zstd payloads, by trying each; of lanes that no RLE makes shorter."""
    made = [(mode, _zstdlib.compress(_streams.predict(lane, mode))) for mode in modes]
    return min(made, key=lambda one: len(one[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "stride"),
    [(MIB // 4, 2), (MIB // 4 + 1, 2), (MIB // 4, 4), (MIB + 9, 4), (8 * MIB + 5, 2), (16 * MIB + 3, 2)],
)
def test_encode_exact_large_lane_keeps_smallest_stream(words: int, stride: int) -> None:
    rng = np.random.default_rng(words)
    values = rng.standard_normal(words, dtype=np.float32)
    values += np.repeat(rng.standard_normal(words // 64 + 1, dtype=np.float32) * 20, 64)[:words]
    raw = values.astype({2: np.float16, 4: np.float32}[stride]).view(np.uint8)
    frame = kvmnn.encode(raw, dtype={2: "fp16", 4: "fp32"}[stride], threads=1)
    lanes = _streams.split_lanes(raw, stride)
    for one, lane in zip(kvmnn.inspect(frame).streams, lanes, strict=True):
        _, payload = smallest(lane, (0, 1, 2))
        assert frame[one.payload_offset : one.payload_offset + one.payload_bytes] == payload


@pytest.mark.parametrize("modes", [("raw", "xor_seq"), ("delta_seq", "xor_seq"), ("delta_seq",)])
def test_encode_exact_large_lane_with_some_predictors(modes: tuple[str, ...]) -> None:
    words = 3 * 4096 + 1
    raw = np.random.default_rng(1).normal(0, 3, words).cumsum().astype(np.float16).view(np.uint8)
    frame = kvmnn.encode(raw, dtype="fp16", predictors=modes, hi_predictors=("xor_seq", "delta_seq"), threads=1)
    wanted = [tuple(("raw", "delta_seq", "xor_seq").index(name) for name in sorted(modes)), (1, 2)]
    for one, lane, allowed in zip(kvmnn.inspect(frame).streams, _streams.split_lanes(raw, 2), wanted, strict=True):
        _, payload = smallest(lane, tuple(sorted(allowed)))
        assert frame[one.payload_offset : one.payload_offset + one.payload_bytes] == payload
    assert kvmnn.decode(frame).tobytes() == raw.tobytes()


@pytest.mark.parametrize("share", [0.3, 0.45, 0.48, 0.5, 0.52, 0.55, 0.7])
@pytest.mark.parametrize("steps_last", [False, True])
def test_early_abort_never_drops_smaller_candidate(share: float, steps_last: bool) -> None:
    """One part is best as it is, the other as steps: libzstd is stopped where a stream is too long already."""
    words = 600_000
    rng = np.random.default_rng(int(1000 * share))
    plain = rng.geometric(0.1, int(words * share)).astype(np.uint8) * 7
    steps = np.cumsum(rng.geometric(0.1, words - plain.size)).astype(np.uint8)
    lane = np.concatenate([plain, steps] if steps_last else [steps, plain])
    lane[100_000:230_000] = 5
    raw = np.stack([rng.integers(0, 256, words, np.uint8), lane], 1).reshape(-1)
    frame = kvmnn.encode(raw, dtype="bf16", threads=1)
    for one, part in zip(kvmnn.inspect(frame).streams, _streams.split_lanes(raw, 2), strict=True):
        mode, payload = smallest(part, (0, 1, 2))
        assert one.predictor == ("raw", "delta_seq", "xor_seq")[mode]
        assert frame[one.payload_offset : one.payload_offset + one.payload_bytes] == payload
    assert kvmnn.encode(raw, dtype="bf16", threads=2) == frame


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3, 9, 19])
def test_early_abort_bound_leaves_enough_capacity(level: int) -> None:
    """A stream is given up where it has passed the best so far by a KiB; what is shorter must be as with all room."""
    rng = np.random.default_rng(level)
    context = _zstdlib.ZstdContext()
    for stream in mixed(rng, 3 if level > 9 else 20):
        whole = _zstdlib.compress(stream, level)
        out = np.empty(len(whole) + 1024, np.uint8)
        assert context.compress_into(out, stream, level) == len(whole)
        assert out[: len(whole)].tobytes() == whole


def mixed(rng: np.random.Generator, count: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Streams of several kinds of bytes: noise, bells, few values, one value, copies with errors and without."""
    for _ in range(count):
        parts = []
        for _ in range(rng.integers(1, 8)):
            n, again = (int(x) for x in rng.integers((1, 5), (200_000, 5_000)))
            noise = rng.integers(0, 256, n, np.uint8)
            copies = np.resize(rng.integers(0, 256, again, np.uint8), n)
            bell = np.clip(rng.normal(128, rng.uniform(1, 60), n), 0, 255).astype(np.uint8)
            errors = np.where(rng.random(n) < rng.uniform(0, 0.3), noise, copies)
            parts.append([noise, bell, noise % 5, noise[:1].repeat(n), copies, errors][rng.integers(6)])
        yield np.concatenate(parts)


def test_early_abort_does_not_change_the_next_stream() -> None:
    """As effort "max" tries them: without the content size, and no longer than the best so far."""
    data = np.random.default_rng(1).integers(0, 256, 1_200_000, np.uint8)
    for level in (1, 3, 9):
        assert _encoder.encode_candidate(data, 2, 0, 0, 2, level, False, 1_000) is None
        size, *_, stream = _encoder.encode_candidate(data, 2, 0, 0, 2, level, False, 1 << 60)
        assert zstandard.ZstdDecompressor().decompress(stream[10:], max_output_size=600_000) == data[::2].tobytes()
        assert size == len(stream) - 10
