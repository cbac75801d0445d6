"""Frames with huge claims are refused before memory is allocated, and no refusal leaks."""

import subprocess
import sys
from pathlib import Path

import pytest
from hostile_frames import BOMBS
from repository import SUPPORT

import kvmnn
from kvmnn import FrameError

CHILD = """
import resource, sys
sys.path[:0] = sys.argv[1:]
import kvmnn
from hostile_frames import BOMBS, honest_but_large
kvmnn.decode(kvmnn.encode(b"warm", dtype="fp16"))
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (24 << 20),) * 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, bomb in BOMBS.items():
    for options in ({}, {"dtype": "fp16"}, {"dtype": "fp32"}, {"codecs": ("rle",)}, {"threads": 4}):
        for function in (kvmnn.decode, lambda f, **o: kvmnn.decode_many([f], **o)):
            try:
                function(bomb, **options)
            except kvmnn.FrameError:
                continue
            sys.exit(f"{name}: accepted")
    try:
        kvmnn.inspect(bomb)
    except kvmnn.FrameError:
        continue
    sys.exit(f"{name}: accepted by inspect")
large = honest_but_large()
try:
    kvmnn.decode(large, max_bytes=1 << 20)
except kvmnn.LimitError:
    pass
else:
    sys.exit("max_bytes ignored")
try:
    kvmnn.decode(large)
except MemoryError:
    pass
else:
    sys.exit("256 MiB in 24 MiB?")
if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 8 << 10:
    sys.exit("memory was taken")
"""


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_frame_bomb_is_refused(name: str) -> None:
    for options in ({}, {"dtype": "fp16"}, {"dtype": "fp32"}):
        with pytest.raises(FrameError):
            kvmnn.decode(BOMBS[name], **options)
        with pytest.raises(FrameError):
            kvmnn.inspect(BOMBS[name], entropy=False, **options)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc and RLIMIT_AS")
def test_frame_bombs_take_no_memory() -> None:
    """In a child whose address space may grow by 24 MiB, so that even reserving memory would fail."""
    command = [sys.executable, "-P", "-c", CHILD, str(SUPPORT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


LEAK = """
import resource
import kvmnn
data = bytes(range(256)) * 40
frames = [kvmnn.encode(data, dtype=dtype, codecs=(codec,)) for dtype in ("fp16", "fp32") for codec in ("rle", "zstd")]
def rounds(count):
    for _ in range(count):
        for frame in frames:
            kvmnn.decode(frame)
            kvmnn.inspect(frame)
            for bad in (frame[:-1], frame + b"x", frame[:200] + b"?" + frame[201:], frame[:30]):
                try:
                    kvmnn.decode(bad)
                except kvmnn.FrameError:
                    pass
        for effort in ("exact", "fast"):
            kvmnn.encode(data, dtype="fp16", effort=effort)
        kvmnn.decode_many(frames, threads=3)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = rounds(100)
grown = rounds(700) - before
assert grown < 2 << 10, f"{grown} KiB more after 700 rounds"
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="ru_maxrss is in KiB on Linux only")
def test_frame_refusals_leak_no_memory() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", LEAK], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
