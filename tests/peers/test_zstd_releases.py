"""libzstd from 1.3.8 on and the zstd command decode the payloads of frames of all efforts.

Releases come from the source archives of `zstandard`, which have libzstd's C files: built once, in build/zstd-releases.
KVMNN_ZSTD_LIBRARIES names shared libraries to take instead, with colons between them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from codec_samples import kv_like, structured
from repository import ROOT

import kvmnn
from kvmnn.frames import tuning

RELEASES = {  # of libzstd, and of the zstandard that has it
    "1.3.8": "0.11.1",
    "1.4.3": "0.12.0",
    "1.4.4": "0.13.0",
    "1.4.5": "0.14.1",
    "1.4.8": "0.15.2",
    "1.5.0": "0.16.0",
    "1.5.2": "0.18.0",
    "1.5.5": "0.21.0",
    "1.5.6": "0.23.0",
    "1.5.7": "0.25.0",
}
FOLDER = ROOT / "build" / "zstd-releases"
GIVEN = [path for path in os.environ.get("KVMNN_ZSTD_LIBRARIES", "").split(":") if path]
BLOCKS = ("raw block", "RLE block", "compressed block")
LITERALS = ("raw literals", "RLE literals", "Huffman", "treeless")
TABLES = ("predefined", "single", "fitted", "repeated")


def arrays() -> Iterator[tuple[str, bytes]]:
    """Words of every kind, as (dtype, bytes)."""
    rng = np.random.default_rng(1)
    for dtype, stride in (("fp16", 2), ("bf16", 2), ("fp32", 4)):
        for words in (1, 40, 300, 3000):
            yield from ((dtype, raw) for _, raw in structured(words, stride))
        yield dtype, kv_like(200_000, dtype)
        yield dtype, bytes(600_000 * stride)
        lane = np.concatenate([np.full(100_000, 7), rng.integers(0, 200, 140_000)]).astype(np.uint8)
        yield dtype, with_noise(rng, lane, stride)  # blocks of one value
        for shape in ((2048, 64), (200, 960)):  # the first is a block
            rows = rng.integers(8, 200, shape, np.uint8)
            copies = np.concatenate([rng.permutation(rows), rng.permutation(rows)])
            copies[:, -1] = 7  # all that is new, between copies of one length
            yield dtype, with_noise(rng, np.concatenate([rows, copies]).reshape(-1), stride)
        rows = rng.standard_normal((900, 64)).astype(np.float32)
        for again in (0.02, 0.3, 0.9):  # rows that were there before, whole or in part
            for row in np.flatnonzero(rng.random(900) < again):
                part = int(rng.choice([64, 32, 48]))
                rows[row, :part] = rows[rng.integers(0, row + 1), :part]
            words = rows.astype(np.float16) if dtype == "fp16" else rows
            yield (
                dtype,
                (words.view(np.uint32) >> 16).astype(np.uint16).tobytes() if dtype == "bf16" else words.tobytes(),
            )
        for values in (2, 30, 129, 256):  # codes of every length, tables told in both ways
            chances = np.arange(1, values + 1) ** -3.0
            lane = rng.permutation(256)[rng.choice(values, 90_000, p=chances / chances.sum())].astype(np.uint8)
            yield dtype, with_noise(rng, lane, stride)


def with_noise(rng: np.random.Generator, lane: npt.NDArray[np.uint8], stride: int) -> bytes:
    """Words whose high bytes are a lane, and all others noise, so that no word comes again."""
    return np.stack([*rng.integers(0, 256, (stride - 1, lane.size), np.uint8), lane], 1).tobytes()


def payloads() -> Iterator[tuple[str, bytes, bytes]]:
    """What zstd has to make of each: (effort, payload, bytes)."""
    for dtype, raw in arrays():
        for effort in ("exact", "balanced", "fast", "max"):
            if effort == "max" and len(raw) > 20_000:
                continue
            frame = kvmnn.encode(raw, dtype=dtype, effort=effort, codecs=("zstd",))
            streams = kvmnn.inspect(frame, dtype=dtype, entropy=False).streams
            for lane, stream in enumerate(streams):
                payload = frame[stream.payload_offset : stream.payload_offset + stream.payload_bytes]
                if stream.predictor == "raw":
                    yield effort, payload, raw[lane :: len(streams)]


@pytest.fixture(scope="module")
def samples() -> list[tuple[str, bytes, bytes]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "SEGMENT_LANE_BYTES", 50_000)
        whole = list(payloads())
        patch.setattr(tuning, "FAST_SEGMENT_BYTES", 70_000)
        return whole + [sample for sample in payloads() if sample[0] == "fast"]


def parts_of(payload: bytes) -> set[str]:
    """What the blocks of zstd frames with one segment are made of (RFC 8878)."""
    found, at = set[str](), 0
    while at < len(payload):
        assert payload[at : at + 4] == b"\x28\xb5\x2f\xfd" and payload[at + 4] & 0x27 == 0x20
        at += 5 + (1, 2, 4, 8)[payload[at + 4] >> 6]
        last = False
        while not last:
            header = int.from_bytes(payload[at : at + 3], "little")
            last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
            found.add(BLOCKS[kind])
            at += 3
            if kind == 2:
                found |= parts_of_block(payload[at : at + size])
            at += 1 if kind == 1 else size
    return found


def parts_of_block(block: bytes) -> set[str]:
    kind, form = block[0] & 3, block[0] >> 2 & 3
    found = {LITERALS[kind]}
    if kind < 2:
        header = (1, 2, 1, 3)[form]
        number = int.from_bytes(block[:header], "little") >> (3, 4, 3, 4)[form]
        at = header + (number if kind == 0 else 1)
    else:
        header, width = (3, 3, 4, 5)[form], (10, 10, 14, 18)[form]
        at = header + (int.from_bytes(block[:header], "little") >> 4 + width)
        found.add("one stream" if form == 0 else "four streams")
        if kind == 2:
            found.add("weights as they are" if block[header] >= 128 else "weights in short")
    count = block[at]
    at += 1 if count < 128 else 2 if count < 255 else 3
    if count:
        found |= {
            f"{TABLES[block[at] >> shift & 3]} {what}" for shift, what in ((6, "gaps"), (4, "offsets"), (2, "matches"))
        }
    return found


def test_samples_cover_every_part_of_the_writer(samples: list[tuple[str, bytes, bytes]]) -> None:
    found = set[str]()
    for effort, payload, _ in samples:
        if effort == "fast":
            found |= parts_of(payload)
    tables = {f"{kind} {what}" for kind in TABLES[:3] for what in ("gaps", "offsets", "matches")}
    assert {
        *BLOCKS,
        *LITERALS,
        "one stream",
        "four streams",
        "weights as they are",
        "weights in short",
    } | tables <= found


def built(release: str) -> Path:
    """libzstd of a release as a shared library."""
    made = FOLDER / f"libzstd-{release}.so"
    if made.exists():
        return made
    package = f"zstandard-{RELEASES[release]}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(FOLDER)]
    subprocess.run([*pip, package.replace("-", "==")], check=True)
    with tarfile.open(FOLDER / f"{package}.tar.gz") as archive:
        archive.extractall(FOLDER, filter="data")
    folder = FOLDER / package / "zstd"
    together = [path for name in ("zstd.c", "zstdlib.c") if (path := folder / name).exists()]
    apart = [path for part in ("common", "compress", "decompress") for path in sorted((folder / part).glob("*.c"))]
    compiler = ["cc", "-O1", "-w", "-fPIC", "-shared", "-DZSTD_DISABLE_ASM=1", f"-I{folder}", f"-I{folder / 'common'}"]
    subprocess.run([*compiler, *map(str, together or apart), "-o", str(made)], check=True)
    return made


@pytest.mark.parametrize("which", GIVEN or RELEASES)
def test_zstd_release_reads_payloads(which: str, samples: list[tuple[str, bytes, bytes]]) -> None:
    library = ctypes.CDLL(str(which if GIVEN else built(which)))
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    number = library.ZSTD_versionNumber()
    assert GIVEN or which == f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    for effort, payload, raw in samples:
        out = ctypes.create_string_buffer(len(raw))
        assert library.ZSTD_decompress(out, len(raw), payload, len(payload)) == len(raw), effort
        assert out.raw == raw, effort


@pytest.mark.parametrize("which", GIVEN or RELEASES)
def test_zstd_release_needs_at_most_one_extra_kib(which: str) -> None:
    """The encoder relies on this limit where it gives up streams that are already too long."""
    library = ctypes.CDLL(str(which if GIVEN else built(which)))
    library.ZSTD_compress.restype = ctypes.c_size_t
    library.ZSTD_compress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]

    def compressed(raw: bytes, level: int, room: int) -> bytes:
        out = ctypes.create_string_buffer(room)
        size = library.ZSTD_compress(out, room, raw, len(raw), level)
        assert size <= room
        return out.raw[:size]

    for _, raw in arrays():
        for level in (1, 3, 9):
            whole = compressed(raw, level, len(raw) + len(raw) // 256 + 64)
            assert compressed(raw, level, len(whole) + 1024) == whole


def test_zstd_command_reads_payloads(samples: list[tuple[str, bytes, bytes]]) -> None:
    command = shutil.which("zstd")
    assert command, "the zstd command is needed"
    every = [sample for sample in samples if sample[0] == "fast"]
    done = subprocess.run([command, "-dc"], input=b"".join(one[1] for one in every), capture_output=True, check=True)
    assert done.stdout == b"".join(one[2] for one in every)
