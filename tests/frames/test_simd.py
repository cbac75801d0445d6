"""Every SIMD level gives the same bytes, whatever the size and the alignment; and the native self-test."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import codec_model
import numpy as np
import pytest
from codec_samples import kv_like, runs, structured
from repository import NATIVE, ROOT, SELFTEST

import kvmnn
from kvmnn import KvmnnError, _simd
from kvmnn.frames import _streams, verify_roundtrip

SIZES = [*range(301), 4093, 4095, 4096, 4097, 4111, 8191, 8192, 8195]


def test_simd_levels_begin_with_baseline() -> None:
    levels = _simd.simd_levels()
    assert levels[0] == "baseline" and _simd.simd_level() in levels
    with pytest.raises(KvmnnError, match=r"'avx1024' is not available.*baseline"):
        _simd.set_simd_level("avx1024")
    assert _simd.simd_level() in levels


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists() or platform.machine() != "x86_64", reason="Linux on x86-64")
def test_simd_levels_match_the_processor() -> None:
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert flags is not None
    known = {*flags[1].split()}
    few = {"avx2", "f16c", "bmi1", "bmi2"}
    more = few | {f"avx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "ifma")}
    expected = ["baseline", *(["avx2"] if few <= known else []), *(["avx512"] if more <= known else [])]
    assert _simd.simd_levels() == expected


CLANG = next(filter(shutil.which, ("clang", *(f"clang-{version}" for version in range(24, 12, -1)))), None)


@pytest.mark.skipif(CLANG is None, reason="no clang")
@pytest.mark.parametrize("source", sorted(NATIVE.rglob("*.c")), ids=lambda path: path.name)
def test_simd_kernels_compile_with_clang(source: Path) -> None:
    """Older ones too, which know fewer names of builtin functions than GCC."""
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    subprocess.run([CLANG, "-fsyntax-only", "-std=c11", *warnings, "-I", str(ROOT / "pyx"), str(source)], check=True)


def pool(seed: int) -> memoryview:
    """Bytes with runs of every length, and noise after them."""
    rng = np.random.default_rng(seed)
    return memoryview(runs(rng, 2500, 2) + rng.bytes(5000))


def test_simd_streams_of_every_size_equal_the_model(level: str) -> None:
    assert _simd.simd_level() == level
    data = pool(1)
    for n in SIZES:
        for offset in (0, 1, 4321 % (len(data) - n)):
            stream = data[offset : offset + n]
            raw = bytes(stream)
            for mode in (0, 1, 2):
                predicted = _streams.predict(stream, mode)
                assert predicted == codec_model.predict(raw, mode), (n, offset, mode)
                assert _streams.unpredict(memoryview(b"x" + predicted)[1:], mode) == raw, (n, offset, mode)
            if n:
                assert _streams.encode_rle(stream) == codec_model.rle_encode(raw), (n, offset)


@pytest.mark.parametrize("stride", [2, 4])
def test_simd_lanes_of_every_size_equal_the_model(level: str, stride: int) -> None:
    data = pool(2)
    for words in [*range(1, 140), 1023, 1024, 1025, 2047, 2049]:
        for offset in (0, 1, 3):
            raw = data[offset : offset + words * stride]
            assert _streams.split_lanes(raw, stride) == codec_model.split(bytes(raw), stride), (words, offset)


@pytest.mark.parametrize("stride", [2, 4])
def test_simd_level_does_not_change_frames(level: str, stride: int) -> None:
    dtype = "fp16" if stride == 2 else "fp32"
    for words in (1, 17, 300, 4099):
        for name, raw in structured(words, stride, seed=9):
            frame = kvmnn.encode(memoryview(b"?" + raw)[1:], dtype=dtype)
            assert frame == codec_model.encode(raw, stride), name
            out = bytearray(len(raw) + 1)
            kvmnn.decode(frame, out=memoryview(out)[1:])
            assert out[1:] == raw, name
            assert verify_roundtrip(frame, memoryview(b"?" + raw)[1:], dtype=dtype), name


def fast_sources() -> list[tuple[str, bytes]]:
    """K and V, of odd sizes; and high bytes with codes of all lengths, of nearly eight bits, of one bit."""
    rng = np.random.default_rng(5)
    found = [(dtype, bytes(kv_like(50_001, dtype))) for dtype in ("fp16", "bf16", "fp32")]
    for values, power in ((200, 0.0), (256, 2.0), (20, 0.5), (2, 0.0)):
        chances = np.arange(1, values + 1) ** -power
        for words in (255, 256, 1027, 70_001):
            high = rng.choice(values, words, p=chances / chances.sum()).astype(np.uint16)
            found.append(("bf16", (high << 8 | rng.integers(0, 256, words, np.uint16)).tobytes()))
    return found


def test_simd_level_does_not_change_fast_frames(level: str) -> None:
    assert [kvmnn.fnv1a64(kvmnn.encode(raw, dtype=dtype, effort="fast")) for dtype, raw in SOURCES] == HASHES
    assert [_streams.compute_order0_entropy(RAW[:n]) for n in range(1, 300)] == ENTROPIES


RAW = kv_like(50_001)
SOURCES = fast_sources()
HASHES = [kvmnn.fnv1a64(kvmnn.encode(raw, dtype=dtype, effort="fast")) for dtype, raw in SOURCES]
ENTROPIES = [_streams.compute_order0_entropy(RAW[:n]) for n in range(1, 300)]


def test_simd_level_is_set_by_environment() -> None:
    code = "from kvmnn import _simd; print(_simd.simd_level())"
    for name in _simd.simd_levels():
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, "KVMNN_SIMD": name},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == name, done.stderr
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "KVMNN_SIMD": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "'none' is not available" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("cc") and SELFTEST.exists()), reason="no C compiler or no sources")
def test_simd_native_selftest_passes(tmp_path: Path) -> None:
    """The table of every level, from C, with guard bytes around every buffer; `make test-aarch64` runs the same."""
    program = tmp_path / "selftest"
    sources = ["-I", str(ROOT / "pyx"), str(NATIVE / "frames" / "lanes.c"), str(SELFTEST / "lanes.c")]
    subprocess.run(["cc", "-O3", "-std=c11", "-Wall", "-Wextra", "-Werror", *sources, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in {*_simd.simd_levels()} - {"avx512"}:  # lanes have the loops of AVX2 there
        assert name in done.stdout
