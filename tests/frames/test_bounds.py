"""What hostile frames cost, and what importing kvmnn costs."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from codec_samples import stream
from repository import SUPPORT

import kvmnn
from kvmnn import FrameError

MOST = (1 << 32) - 1


def frame(words: int, *streams: bytes) -> bytes:
    return struct.pack("<I", words) + b"".join(streams)


ZSTD_HEADER = b"\x28\xb5\x2f\xfd\x00\x58"
BOMBS = {
    "14 bytes": frame(MOST, struct.pack("<BBII", 0, 0, MOST, 0)),
    "14 bytes, zstd": frame(MOST, struct.pack("<BBII", 0, 1, MOST, 0)),
    "two empty payloads": frame(MOST, stream(0, 0, MOST, b""), stream(0, 0, MOST, b"")),
    "four empty payloads": frame(MOST, *[stream(0, 1, MOST, b"")] * 4),
    "RLE of two bytes": frame(MOST, *[stream(0, 0, MOST, b"\xffa")] * 2),
    "RLE of a thousand bytes": frame(MOST, *[stream(0, 0, MOST, b"\xffa" * 500)] * 4),
    "zstd of one block": frame(MOST, *[stream(0, 1, MOST, ZSTD_HEADER + b"\x03\x00\x10a")] * 2),
    "zstd that claims it": frame(
        MOST, *[stream(0, 1, MOST, b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", MOST) + b"\x01\0\0")] * 2
    ),
    "raw_len beyond the word count": frame(1, stream(0, 0, MOST, b"\xffa" * 500), stream(0, 0, 1, b"\0a")),
    "payload_len beyond the frame": frame(8, struct.pack("<BBII", 0, 0, 8, MOST) + b"\x84a"),
}

CHILD = """
import resource, sys
sys.path[:0] = sys.argv[1:]
import kvmnn
from test_bounds import BOMBS, honest_but_large
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


def honest_but_large() -> bytes:
    """128 MiB words of one byte value in a few kilobytes: a frame that may be decoded if one wants to."""
    blocks = b"\x02\x00\x10a" * 1023 + b"\x03\x00\x10a"
    words = 128 << 20
    return frame(words, *[stream(0, 1, words, ZSTD_HEADER + blocks)] * 2)


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_bombs_are_no_frames(name: str) -> None:
    for options in ({}, {"dtype": "fp16"}, {"dtype": "fp32"}):
        with pytest.raises(FrameError):
            kvmnn.decode(BOMBS[name], **options)
        with pytest.raises(FrameError):
            kvmnn.inspect(BOMBS[name], entropy=False, **options)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc and RLIMIT_AS")
def test_bombs_cost_nothing() -> None:
    """In a child that may take 24 MiB more address space than it has, so that even asking for memory would fail."""
    command = [sys.executable, "-P", "-c", CHILD, str(SUPPORT), str(Path(__file__).parent)]
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


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="ru_maxrss is in KiB on Linux only")
def test_nothing_leaks() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", LEAK], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_import_is_light() -> None:
    code = "import sys; import numpy; a = set(sys.modules); import kvmnn; print(*sorted(set(sys.modules) - a))"
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "kvmnn.frames._decoder" in loaded
    heavy = {"torch", "onnxruntime", "tqdm", "pandas", "scipy", "matplotlib", "asyncio", "multiprocessing", "unittest"}
    assert {name.split(".")[0] for name in loaded} & heavy == set()
    assert len(loaded) < 120


def test_public_names() -> None:
    assert all(hasattr(kvmnn, name) for name in kvmnn.__all__)
    assert {"encode", "decode", "inspect", "fnv1a64", "encode_many", "decode_many", "encode_block"} <= set(
        kvmnn.__all__
    )
