"""Run by test_zstd.py in a process of its own: what kvmnn does through the binding that KVMNN_ZSTD names, as JSON."""

import json
import sys

import numpy as np
import zstandard
from codec_samples import frame_around, kv_like, structured, verdict, zstd_payloads

import kvmnn
from kvmnn.frames import _encoder, _zstdlib, tuning, zstd


def report() -> dict:
    verdicts, wrong = {}, []
    for payload in zstd_payloads():
        frame = frame_around(payload.payload, len(payload.raw), codec=1)
        got = verdict(frame, "fp16")
        verdicts[payload.name] = got is not None
        if got is not None and got[1][::2] != payload.raw:
            wrong.append(payload.name)
        try:
            same = _zstdlib.decompress(payload.payload, len(payload.raw)) == payload.raw
        except ValueError:
            same = False
        if same != (got is not None):
            wrong.append(f"{payload.name}, payload alone")
    frames = []
    for dtype, stride in (("fp16", 2), ("fp32", 4)):
        for words in (1, 40, 1000):
            for _, raw in structured(words, stride):
                for effort in ("exact", "balanced", "fast", "max"):
                    frame = kvmnn.encode(raw, dtype=dtype, effort=effort)
                    frames.append(f"{kvmnn.fnv1a64(frame):x}")
                    if verdict(frame) != (dtype, raw):
                        wrong.append(f"round trip {dtype} {words} {effort}")
    tuning.SEGMENT_LANE_BYTES = 20_000
    small = kv_like(50_000)
    frames.append(f"{kvmnn.fnv1a64(kvmnn.encode(small, dtype='fp16', effort='balanced', threads=2)):x}")
    if kvmnn.decode(kvmnn.encode(small, dtype="fp16", effort="balanced")).tobytes() != small:
        wrong.append("pieces")
    large = kv_like(700_000)
    frame = kvmnn.encode(large, dtype="fp16", threads=3)
    frames.append(f"{kvmnn.fnv1a64(frame):x}")
    if kvmnn.decode(frame, threads=3).tobytes() != large:
        wrong.append("round trip on threads")
    noise = np.random.default_rng(5).integers(0, 9, 5000, np.uint8).tobytes()
    unsized = _encoder.encode_candidate(noise, 2, 0, 0, 2, 3, False, 1 << 40)[3][10:]
    if zstandard.get_frame_parameters(unsized).content_size != zstandard.CONTENTSIZE_UNKNOWN:
        wrong.append("content size written")
    wrong += [
        f"{n} zero bytes"
        for n in (0, 1, 100, 200_000)
        if _zstdlib.decompress(_zstdlib.compress(bytes(n)), n) != bytes(n)
    ]
    return {
        "binding": zstd.get_binding(),
        "version": zstd.get_version(),
        "byte_exact": zstd.is_byte_exact(),
        "verdicts": verdicts,
        "frames": frames,
        "wrong": wrong,
    }


if __name__ == "__main__":
    json.dump(report(), sys.stdout)
