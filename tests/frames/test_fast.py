"""Effort "fast": zstd frames of kvmnn's own writer. test_encoding.py has what all efforts promise."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import codec_model
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from codec_samples import kv_like, structured
from hypothesis import given, settings
from hypothesis import strategies as st

import kvmnn
from kvmnn.frames import fast

DIM = 64


def streams_of(frame: bytes) -> list[bytes]:
    return [frame[one.offset + 10 : one.offset + 10 + one.payload_bytes] for one in kvmnn.inspect(frame).streams]


def check(words: npt.NDArray[np.generic], dtype: str | None = None) -> bytes:
    frame = kvmnn.encode(words, dtype=dtype, effort="fast")
    raw = words.tobytes()
    assert codec_model.decode(frame, words.itemsize) == raw
    for lane, payload in enumerate(streams_of(frame)):
        found = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
        assert found.decompress(payload) == raw[lane :: words.itemsize]
    return frame


def cache(rng: np.random.Generator, rows: int, dtype: str, again: float, head: int = DIM) -> npt.NDArray[np.generic]:
    """Rows of a cache, of which a share stood there before, whole or in part."""
    values = rng.standard_normal((rows, head)).astype(np.float32) * rng.lognormal(0, 1, head).astype(np.float32)
    for row in np.flatnonzero(rng.random(rows) < again):
        part = int(rng.choice([head, head // 2, 3 * head // 4]))
        values[row, :part] = values[rng.integers(0, row + 1), :part]
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype({"fp16": np.float16, "fp32": np.float32}[dtype])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 900),
    dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
    again=st.sampled_from([0.0, 0.02, 0.4, 0.95, 1.0]),
    head=st.sampled_from([8, 16, 64, 80]),
)
def test_rows_that_come_again(seed: int, rows: int, dtype: str, again: float, head: int) -> None:
    words = cache(np.random.default_rng(seed), rows, dtype, again, head)
    frame = check(words, dtype)
    assert kvmnn.decode(frame, dtype=dtype).tobytes() == words.tobytes()


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("words", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 1024, 5000])
def test_lanes_of_every_kind(words: int, stride: int) -> None:
    for _, raw in structured(words, stride):
        check(np.frombuffer(raw, f"<u{stride}"), "bf16" if stride == 2 else "fp32")


@pytest.mark.parametrize("size", [65535, 65536, 65537, 65791, 65792, 131072, 131073, 200_000])
def test_at_the_ends_of_blocks_and_of_sizes(size: int) -> None:
    rng = np.random.default_rng(size)
    skewed = (rng.geometric(0.1, size) % 256).astype(np.uint16) << 8 | rng.integers(0, 256, size, np.uint16)
    check(skewed, "bf16")
    check(np.tile(skewed[:1000], size // 1000 + 1)[:size], "bf16")
    check(np.full(size, 0x3C00, np.uint16), "bf16")


def test_what_repeats_costs_little() -> None:
    words = cache(np.random.default_rng(1), 4000, "fp16", 0.0)
    words[2000:] = words[:2000]
    once, twice = check(words[:2000]), check(words)
    assert len(twice) < 1.01 * len(once)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("tokens", [64, 512])
def test_smooth_lanes(tokens: int, dtype: str) -> None:
    """A line with steps on it: short repeats everywhere, which a search for rows that are alike does not find."""
    steps = np.random.default_rng(0).integers(0, 2, (4, tokens, 64)) / 64
    words = (np.linspace(0.5, 1, 64) + steps).astype({"fp16": "<f2", "fp32": "<f4"}[dtype])
    made, exact = (kvmnn.encode(words, effort=effort) for effort in ("fast", "exact"))
    assert len(made) < 1.35 * len(exact)
    assert kvmnn.decode(made, dtype=dtype).tobytes() == words.tobytes()


def test_few_values_to_many() -> None:
    """Codes of every length, trees that are told as they are and in short."""
    rng = np.random.default_rng(2)
    for values in (2, 3, 5, 30, 127, 128, 129, 130, 200, 256):
        for power in (0.5, 2.0, 8.0):
            chances = np.arange(1, values + 1) ** -power
            lane = rng.permutation(256)[rng.choice(values, 30_000, p=chances / chances.sum())].astype(np.uint16)
            check(lane << 8 | rng.integers(0, 256, lane.size, np.uint16), "bf16")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_pieces(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = cache(np.random.default_rng(3), 3000, dtype, 0.3)
    whole = check(words, dtype)
    monkeypatch.setattr(fast, "PIECE_BYTES", 100_000)
    cut = check(words, dtype)
    assert len(whole) < len(cut)  # repeats do not reach from piece to piece
    assert all(payload.count(b"\x28\xb5\x2f\xfd") >= words.nbytes // 100_000 for payload in streams_of(cut))
    for threads in (1, 2, 5):
        assert kvmnn.encode(words, dtype=dtype, effort="fast", threads=threads) == cut


@pytest.mark.parametrize("kinds", [16, 400])
def test_an_array_of_repeats_is_cut_into_longer_pieces(kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is 3 times smaller, 8 times as long: each begins with what the others have as well."""
    rng = np.random.default_rng(5)
    words = rng.standard_normal((kinds, 64)).astype("<f4")[rng.integers(0, kinds, 2000)]
    monkeypatch.setattr(fast, "PIECE_BYTES", 1 << 16)
    made = check(words, "fp32")
    frames = [payload.count(b"\x28\xb5\x2f\xfd") for payload in streams_of(made)]
    assert (len(made) * 3 < words.nbytes) == (kinds == 16)
    assert frames == [1 if kinds == 16 else 8] * 4


def test_options_that_it_has_no_form_for_are_those_of_balanced() -> None:
    words = cache(np.random.default_rng(4), 500, "fp16", 0.3)
    for options in ({"predictors": "delta_seq"}, {"hi_predictors": "xor_seq"}, {"codecs": ("rle",)}):
        assert kvmnn.encode(words, effort="fast", **options) == kvmnn.encode(words, effort="balanced", **options)
    plain = kvmnn.encode(words, effort="fast", predictors="raw,delta_seq")
    assert plain == kvmnn.encode(words, effort="fast")
    assert {stream.predictor for stream in kvmnn.inspect(plain).streams} == {"raw"}


@pytest.mark.parametrize("effort", ["fast", "balanced"])
@pytest.mark.parametrize("data", [b"", b"abc"])
def test_what_is_no_words(effort: str, data: bytes) -> None:
    with pytest.raises(kvmnn.KvmnnError, match=r"nothing to encode|not a whole number"):
        kvmnn.encode(data, dtype="fp16", effort=effort)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_never_much_larger_than_the_input(dtype: str) -> None:
    for size in (4, 400, 4000, 400_000):
        noise = np.random.default_rng(size).bytes(size)
        assert len(kvmnn.encode(noise, dtype=dtype, effort="fast")) <= size + 4 * (10 + 16) + 3 * (size // 65536 + 4)


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the zstd command")
def test_the_zstd_command_reads_it(tmp_path: Path) -> None:
    for dtype, again in (("fp16", 0.4), ("bf16", 0.0), ("fp32", 0.9)):
        words = cache(np.random.default_rng(6), 3000, dtype, again)
        for lane, payload in enumerate(streams_of(kvmnn.encode(words, dtype=dtype, effort="fast"))):
            (tmp_path / "lane.zst").write_bytes(payload)
            done = subprocess.run(["zstd", "-dc", tmp_path / "lane.zst"], capture_output=True, check=True)
            assert done.stdout == words.tobytes()[lane :: words.itemsize]


def test_a_cache_without_repeats_still_has_its_matches() -> None:
    """What drifts slowly has matches that are no rows."""
    for dtype in ("fp16", "bf16", "fp32"):
        data = kv_like(1 << 17, dtype)
        assert len(kvmnn.encode(data, dtype=dtype, effort="fast")) < 1.05 * len(kvmnn.encode(data, dtype=dtype))
