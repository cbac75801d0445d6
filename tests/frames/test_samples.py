"""What effort "fast" takes from a sample of a lane, from C."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import numpy.typing as npt
import pytest
from repository import NATIVE

pytestmark = pytest.mark.skipif(shutil.which("cc") is None or not NATIVE.exists(), reason="no C compiler or no sources")

NO, FOLLOWS, SHORT = 0, 1, 3
LOOK = 256


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("samples") / "samples.so"
    source = str(NATIVE / "frames" / "sample_stats.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-lm", "-o", str(library)], check=True)
    found = ctypes.CDLL(str(library))
    found.kvmnn_sample_entropy.restype = ctypes.c_double
    found.kvmnn_sample_max_count.restype = ctypes.c_size_t
    found.kvmnn_sample_drop_zeros.restype = ctypes.c_size_t
    found.kvmnn_samples_init()
    return found


def bits(samples: ctypes.CDLL, sample: npt.NDArray[np.uint8]) -> float:
    return float(samples.kvmnn_sample_entropy(sample.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(sample.size)))


def follows(samples: ctypes.CDLL, values: npt.NDArray[np.integer], every: int = 1) -> int:
    sample = values.astype(np.uint8)
    arguments = ctypes.c_size_t(sample.size), ctypes.c_size_t(every), ctypes.c_double(bits(samples, sample))
    return int(samples.kvmnn_sample_predictability(sample.ctypes.data_as(ctypes.c_void_p), *arguments))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 255, 256, 4096, 4352])
def test_sample_bits_equal_the_entropy(samples: ctypes.CDLL, n: int) -> None:
    rng = np.random.default_rng(n)
    for sample in (rng.integers(0, 256, n, np.uint8), rng.geometric(0.2, n).astype(np.uint8), np.full(n, 7, np.uint8)):
        counts = np.bincount(sample)
        shares = counts[counts > 0] / n
        assert bits(samples, sample) == pytest.approx(-(shares * np.log2(shares)).sum(), abs=1e-3)
        most = samples.kvmnn_sample_max_count(sample.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(n))
        assert most == counts.max()


@pytest.mark.parametrize(("n", "every"), [(1000, 1), (4096, 1), (4096, 4), (4352, 1)])
def test_sample_predictable_lane_is_detected(samples: ctypes.CDLL, n: int, every: int) -> None:
    rng = np.random.default_rng(n)
    noise = rng.integers(0, 256, n)
    assert follows(samples, noise, every) == NO
    assert follows(samples, np.round(rng.normal(60, 12, n)), every) == NO
    assert follows(samples, np.cumsum(rng.integers(0, 9, n)), every) == FOLLOWS
    assert follows(samples, np.bitwise_xor.accumulate(rng.integers(0, 9, n) * 16), every) == FOLLOWS
    assert follows(samples, np.repeat(noise, 2)[:n], every) == FOLLOWS
    assert follows(samples, np.where(np.repeat(rng.random(n // 16 + 1) < 0.5, 16)[:n], 0, noise), every) == FOLLOWS
    assert follows(samples, np.repeat(noise[: n // 4 * 4].reshape(-1, 4), 2, 0).reshape(-1)[:n], every) == SHORT


def test_sample_single_byte_is_not_predictable(samples: ctypes.CDLL) -> None:
    assert follows(samples, np.array([5])) == NO
    assert follows(samples, np.concatenate([np.random.default_rng(0).integers(0, 256, LOOK), [5]])) == NO


@pytest.mark.parametrize("used", [(), (0,), (2,), (0, 1, 2, 3), (1, 3), (3,)])
@pytest.mark.parametrize("size", [1, 100, LOOK, 3 * LOOK + 1, 3 * LOOK + 100, 4 * LOOK])
def test_sample_zero_probes_are_ignored(samples: ctypes.CDLL, used: tuple[int, ...], size: int) -> None:
    """But for one, if there are no others; and a look with a single byte that is no 0 stays."""
    looks = np.zeros((4, LOOK), np.uint8)
    for look in used:
        looks[look, -1 if look % 2 else 0] = look + 1
    sample = looks.reshape(-1)[:size].copy()
    left = [sample[i : i + LOOK] for i in range(0, size, LOOK) if sample[i : i + LOOK].any()]
    expected = np.concatenate(left) if left else sample[:LOOK].copy()
    n = samples.kvmnn_sample_drop_zeros(sample.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(size))
    assert sample[:n].tobytes() == expected.tobytes()
