"""`mnn-frame-vectors-1`: encoding, decode verdicts, packed ranges and predictor specs of the frame codec."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvmnn import KvmnnError, decode, encode, fnv1a64, inspect
from kvmnn.frames import _decoder, _encoder, _streams, zstd
from kvmnn.frames.options import CODECS, PREDICTORS, parse_spec, to_mode_bits
from kvmnn.packed.layout import PackLayout

from .common import CaseResult, Checker, run_list, sha256, unknown_lists

_LISTS = ("cases", "bad_frames", "kv_range", "predictor_specs")
_CONTAINERS = {"encode16": "fp16", "encode32": "fp32", "decode16": "fp16", "decode32": "fp32"}
_NO_ZSTD = ("rle",)


def run(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    yield from run_list(index.get("cases", ()), "cases", lambda case, check: _encode_case(folder, case, check))
    yield from run_list(
        index.get("bad_frames", ()), "bad_frames", lambda case, check: _decode_case(folder, case, check)
    )
    yield from run_list(index.get("kv_range", ()), "kv_range", lambda case, check: _range_case(folder, case, check))
    yield from run_list(index.get("predictor_specs", ()), "predictor_specs", _spec_case)
    yield from unknown_lists(index, _LISTS)


# -- encoding ---------------------------------------------------------------------------------------------------------


def _encode_case(folder: Path, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_ENCODE_FIELDS)
    data = (folder / case["input"]).read_bytes()
    check.field("input_len", len(data))
    check.field("input_sha256", sha256(data))
    check.field("input_fnv1a64", _hash_text(data))
    try:
        frame = _encode(case, data, CODECS)
        without = _encode(case, data, _NO_ZSTD)
    except KvmnnError:
        check.field("ok", False)
        return
    check.field("ok", True)
    if not case["ok"]:
        return
    if zstd.is_byte_exact() or case["same_with_zstd_1_5_7"]:
        check.equal("frame", sha256(frame), sha256((folder / case["frame"]).read_bytes()))
        check.field("frame_len", len(frame))
        check.field("frame_sha256", sha256(frame))
        check.field("frame_fnv1a64", _hash_text(frame))
        check.field("streams", _streams_of(case, frame))
    else:
        check.exempt(f"bytes of frames under libzstd {zstd.get_version()}, which are not MNN's")
        if zstd.get_version() == "1.5.7":
            check.field("same_with_zstd_1_5_7", frame == (folder / case["frame"]).read_bytes())
    check.field("frame_nozstd_len", len(without))
    check.field("frame_nozstd_sha256", sha256(without))
    for made, codecs in ((frame, CODECS), (without, _NO_ZSTD)):
        check.equal("round trip", sha256(_decode(case["op"], made, codecs, len(data))), sha256(data))


_ENCODE_FIELDS = {
    *("name", "note", "op", "lo", "hi", "input", "input_len", "input_sha256", "input_fnv1a64", "ok", "frame"),
    *("frame_len", "frame_sha256", "frame_fnv1a64", "streams", "frame_nozstd_len", "frame_nozstd_sha256"),
    "same_with_zstd_1_5_7",
}


def _encode(case: dict[str, Any], data: bytes, codecs: tuple[str, ...]) -> bytes:
    op = case["op"]
    if op == "encode16":
        return encode(data, dtype="fp16", predictors=case["lo"], hi_predictors=case["hi"], codecs=codecs)
    if op == "encode32":
        return encode(data, dtype="fp32", predictors=case["lo"], codecs=codecs)
    if op == "stream":
        return _encoder.encode_stream(data, to_mode_bits(parse_spec(case["lo"])), _allow(codecs))
    if op == "rle":
        return _streams.encode_rle(data)
    raise ValueError(f"unknown op {op!r}")


def _streams_of(case: dict[str, Any], frame: bytes) -> list[dict[str, int]] | None:
    if case["op"] == "rle":
        return None
    if case["op"] == "stream":
        return [
            {
                "mode": frame[0],
                "codec": frame[1],
                "raw_len": int.from_bytes(frame[2:6], "little"),
                "payload_len": int.from_bytes(frame[6:10], "little"),
            }
        ]
    return [
        {
            "mode": PREDICTORS.index(stream.predictor),
            "codec": CODECS.index(stream.codec),
            "raw_len": stream.raw_bytes,
            "payload_len": stream.payload_bytes,
        }
        for stream in inspect(frame).streams
    ]


# -- decoding ---------------------------------------------------------------------------------------------------------


def _decode_case(folder: Path, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_DECODE_FIELDS)
    frame = (folder / case["frame"]).read_bytes()
    check.field("frame_len", len(frame))
    check.field("frame_sha256", sha256(frame))
    for verdict, codecs in (("accept", CODECS), ("accept_without_zstd", _NO_ZSTD)):
        try:
            output = _decode(case["op"], frame, codecs, case.get("expected_len"))
        except KvmnnError:
            check.field(verdict, False)
            continue
        if check.field(verdict, True):
            check.equal("output", sha256(output), sha256((folder / case["output"]).read_bytes()))
            check.field("output_len", len(output))
            check.field("output_sha256", sha256(output))
    if zstd.get_version() == "1.5.7":
        check.field("accept_zstd_1_5_7", _accepts(case, frame))


_DECODE_FIELDS = {
    *("name", "why", "op", "frame", "frame_len", "frame_sha256", "accept", "accept_without_zstd", "accept_zstd_1_5_7"),
    *("output", "output_len", "output_sha256", "expected_len"),
}


def _decode(op: str, frame: bytes, codecs: tuple[str, ...], expected: int | None) -> bytes:
    if op in _CONTAINERS:
        return decode(frame, dtype=_CONTAINERS[op], codecs=codecs).tobytes()
    if op in ("stream", "unstream"):
        return _decoder.decode_stream(frame, _allow(codecs))[0]
    if op in ("rle", "unrle"):
        if expected is None:
            raise ValueError(f"{op} without expected_len")
        return _streams.decode_rle(frame, expected)
    raise ValueError(f"unknown op {op!r}")


def _accepts(case: dict[str, Any], frame: bytes) -> bool:
    try:
        _decode(case["op"], frame, CODECS, case.get("expected_len"))
    except KvmnnError:
        return False
    return True


# -- packed ranges ----------------------------------------------------------------------------------------------------


def _range_case(folder: Path, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_RANGE_FIELDS)
    files = {name: (folder / entry["path"]).read_bytes() for name, entry in case["files"].items()}
    for name, entry in case["files"].items():
        check.equal(f"sha256 of the input file {name}", sha256(files[name]), entry["sha256"])
    layout = PackLayout(
        kv_heads=case["kv_heads"],
        head_dim=case["head_dim"],
        dtype={2: "fp16", 4: "fp32"}[case["bytes"]],
        lP=case["lP"],
        hP=case["hP"],
        flash_block=case["flash_block_kv"],
    )
    past, capacity = case["kv_len"], case["max_len"]
    keys, values = bytearray(files["k"]), bytearray(files["v"])
    try:
        k, v = layout.gather(keys, values, case["start"], case["count"], past_length=past, capacity=capacity)
        layout.zero(keys, values, case["start"], case["count"], past_length=past, capacity=capacity)
    except KvmnnError:
        check.field("ok", False)
        check.equal("K and V after a refusal", (keys, values), (files["k"], files["v"]))
        return
    check.field("ok", True)
    check.equal("gathered K", sha256(k.tobytes()), sha256(files["kout"]))
    check.equal("gathered V", sha256(v.tobytes()), sha256(files["vout"]))
    check.equal("zeroed K", sha256(keys), sha256(files["kzero"]))
    check.equal("zeroed V", sha256(values), sha256(files["vzero"]))
    layout.scatter(k, v, keys, values, case["start"], past_length=past, capacity=capacity)
    check.equal("K after scatter", sha256(keys), sha256(files["k"]))
    check.equal("V after scatter", sha256(values), sha256(files["v"]))


_RANGE_FIELDS = {
    *("name", "kv_heads", "head_dim", "bytes", "lP", "hP", "flash_block_kv", "start", "count", "kv_len", "max_len"),
    *("ok", "files"),
}

# -- predictor specs --------------------------------------------------------------------------------------------------


def _spec_case(case: dict[str, Any], check: Checker) -> None:
    check.known_fields({"name", "spec", "default_raw", *PREDICTORS})
    found = parse_spec(case["spec"], case["default_raw"])
    for name in PREDICTORS:
        check.field(name, name in found)


def _hash_text(data: bytes) -> str:
    return f"{fnv1a64(data):016x}"


def _allow(codecs: tuple[str, ...]) -> int:
    return sum(1 << CODECS.index(name) for name in codecs)
