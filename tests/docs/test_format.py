"""The dumps, tables and verdicts of docs/format.md agree with kvmnn."""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np
import pytest
from repository import DOCS

import kvmnn
from kvmnn.frames import _decoder, _encoder, _streams, zstd
from kvmnn.frames.options import PREDICTORS, parse_spec

TEXT = (DOCS / "format.md").read_text(encoding="utf-8")
ANY_MODE, ANY_CODEC, RLE, ZSTD = 0b111, 0b11, 1, 2
CODEC_NUMBER = {RLE: 0, ZSTD: 1}

needs_exact_zstd = pytest.mark.skipif(not zstd.is_byte_exact(), reason="these bytes need libzstd 1.5.2 to 1.5.6")


# -- reading the page -----------------------------------------------------------------------------------------------


def section(title: str) -> str:
    """The text below a heading, up to the next heading of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"format.md has no section {title!r}"
    return found[1]


def tables(title: str) -> list[list[list[str]]]:
    """The tables of a section as rows of cells, header rows left out, backquotes kept."""
    blocks = re.findall(r"(?:^\|.*\n)+", section(title), re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in b.splitlines()[2:]] for b in blocks]


def code(cell: str) -> str:
    """What stands between the backquotes that make up a cell."""
    assert cell.startswith("`") and cell.endswith("`"), f"{cell} is no code"
    return cell[1:-1]


def spelled(cell: str) -> bytes:
    """Bytes from the page's notation: `3c`, `3c*5`, `00..7f`."""
    out = bytearray()
    for token in code(cell).split():
        if ".." in token:
            first, last = token.split("..")
            out += bytes(range(int(first, 16), int(last, 16) + 1))
        else:
            value, _, count = token.partition("*")
            out += bytes.fromhex(value) * int(count or 1)
    return bytes(out)


# -- making bytes ---------------------------------------------------------------------------------------------------


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def stream(payload: bytes, raw_len: int, codec: int = RLE, mode: int = 0) -> bytes:
    return bytes([mode, CODEC_NUMBER.get(codec, codec)]) + u32(raw_len) + u32(len(payload)) + payload


def zstd_frame(
    content: bytes, descriptor: int = 0x20, after_descriptor: bytes | None = None, tail: bytes = b""
) -> bytes:
    """A zstd frame of one raw block; single segment with a one-byte content size unless told otherwise."""
    if after_descriptor is None:
        after_descriptor = bytes([len(content)])
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    return bytes.fromhex("28b52ffd") + bytes([descriptor]) + after_descriptor + block + tail


def chunked(content: bytes, level: int, **options: Any) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor(level=level, **options).compress(content))


def is_accepted(frame: bytes, **options: Any) -> bool:
    try:
        kvmnn.decode(frame, **options)
    except kvmnn.FrameError:
        return False
    return True


# -- the three sections that comments in the code refer to ------------------------------------------------------------


@pytest.mark.parametrize("title", ["Streams", "Bounds", "Predictor specs"])
def test_sections_referenced_by_code_exist(title: str) -> None:
    assert section(title).strip()


def test_links_within_the_page_resolve() -> None:
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)", TEXT, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", TEXT)) <= anchors


# -- predictors, RLE, choice ----------------------------------------------------------------------------------------


def test_predictor_table_lists_all_in_order() -> None:
    names = [row[1] for row in tables("Predictors")[0]]
    assert names == list(PREDICTORS)


@pytest.mark.parametrize("row", tables("Predictors")[1], ids=lambda row: row[0])
def test_predictor_examples_round_trip(row: list[str]) -> None:
    lane = spelled(row[0])
    for mode, cell in enumerate(row[1:], start=1):
        assert _streams.predict(lane, mode) == spelled(cell)
        assert _streams.unpredict(spelled(cell), mode) == lane


@pytest.mark.parametrize("row", tables("RLE payload")[1], ids=lambda row: row[0])
def test_rle_examples_round_trip(row: list[str]) -> None:
    lane, payload = spelled(row[0]), spelled(row[1])
    assert _streams.encode_rle(lane) == payload
    assert _streams.decode_rle(payload, len(lane)) == lane


@pytest.mark.parametrize("row", tables("RLE payload")[2], ids=lambda row: f"{row[0]} as {row[1]}")
def test_rle_verdicts_match_the_decoder(row: list[str]) -> None:
    payload, raw_len = spelled(row[0]), int(row[1])
    frame = u32(raw_len) + stream(payload, raw_len) * 2
    assert is_accepted(frame) == row[2].startswith("accepted")


@needs_exact_zstd
@pytest.mark.parametrize("row", tables("Choice of predictor and codec")[0], ids=lambda row: row[0])
def test_stream_choice_examples_match_the_encoder(row: list[str]) -> None:
    lane, payload = np.frombuffer(spelled(row[0]), np.uint8), spelled(row[1])
    mode, codec = re.match(r"(\w+), (RLE|ZSTD)", row[2]).groups()  # type: ignore[union-attr]
    assert _encoder.encode_stream(lane, ANY_MODE, ANY_CODEC) == stream(
        payload, lane.size, {"RLE": RLE, "ZSTD": ZSTD}[codec], PREDICTORS.index(mode)
    )


@needs_exact_zstd
def test_stream_choice_tie_has_equal_sizes() -> None:
    (row,) = (row for row in tables("Choice of predictor and codec")[0] if "ZSTD takes" in row[2])
    lane = np.frombuffer(spelled(row[0]), np.uint8)
    rle, by_zstd = (_encoder.encode_stream(lane, 1, codec) for codec in (RLE, ZSTD))
    assert len(rle) == len(by_zstd) == 10 + int(re.search(r"takes (\d+) bytes", row[2])[1])  # type: ignore[index]


@pytest.mark.parametrize("row", tables("Predictor specs")[0], ids=lambda row: row[0])
def test_predictor_specs_parse_as_shown(row: list[str]) -> None:
    spec = ast.literal_eval(code(row[0]))
    assert parse_spec(spec) == set(row[1].split(", "))
    assert parse_spec(spec, default_raw=False) == (set(row[1].split(", ")) if spec else set())


# -- verdicts on zstd payloads --------------------------------------------------------------------------------------

CONTENT = b"an example" * 12
WINDOW_31, WINDOW_32 = bytes([21 << 3]), bytes([22 << 3])
SKIPPABLE = bytes.fromhex("502a4d18 03000000 616263")
PLAIN = zstd_frame(CONTENT)


def zstd_payloads() -> dict[str, list[bytes]]:
    """Payloads for the rows of the table under "ZSTD payload"; all are meant for raw_len = len(CONTENT)."""
    checked = chunked(CONTENT, 3, write_checksum=True)
    return {
        "one zstd frame of any compression level": [chunked(CONTENT, level) for level in (-5, 1, 3, 19, 22)],
        "several zstd frames, their contents joined": [zstd_frame(CONTENT[:50]) + chunked(CONTENT[50:], 3)],
        "a skippable frame before or after a zstd frame": [SKIPPABLE + PLAIN, PLAIN + SKIPPABLE],
        "an empty zstd frame after a zstd frame": [PLAIN + zstd_frame(b"")],
        "a frame without content size": [chunked(CONTENT, 3, write_content_size=False)],
        "a frame with a correct checksum": [checked],
        "a dictionary ID field with the value 0": [zstd_frame(CONTENT, 0x21, bytes([0, len(CONTENT)]))],
        "window log 31": [zstd_frame(CONTENT, 0x00, WINDOW_31)],
        "no bytes at all": [b""],
        "skippable frames only": [SKIPPABLE, SKIPPABLE * 2],
        "content of raw_len + 1 bytes": [
            zstd_frame(CONTENT + b"!"),
            chunked(CONTENT + b"!", 3, write_content_size=False),
        ],
        "content of raw_len - 1 bytes": [zstd_frame(CONTENT[1:]), chunked(CONTENT[1:], 3, write_content_size=False)],
        "a frame with a wrong checksum": [checked[:-1] + bytes([checked[-1] ^ 1])],
        "a frame cut short": [PLAIN[:n] for n in range(1, len(PLAIN))],
        "bytes after the last frame that are no frame": [PLAIN + b"\0", PLAIN + b"\0" * 20, PLAIN + SKIPPABLE[:-1]],
        "a dictionary ID other than 0": [zstd_frame(CONTENT, 0x21, bytes([5, len(CONTENT)]))],
        "the reserved bit of the frame header descriptor set": [zstd_frame(CONTENT, 0x28)],
        "window log 32": [zstd_frame(CONTENT, 0x00, WINDOW_32)],
        "bytes that are no zstd frame": [CONTENT],
    }


def test_zstd_verdicts_match_the_decoder() -> None:
    payloads, rows = zstd_payloads(), tables("ZSTD payload")[0]
    assert {row[0] for row in rows} == set(payloads)
    for case, verdict in rows:
        for payload in payloads[case]:
            one = stream(payload, len(CONTENT), ZSTD)
            frame = u32(len(CONTENT)) + one + stream(bytes([len(CONTENT) - 1]) + CONTENT, len(CONTENT))
            assert is_accepted(frame) == (verdict == "accepted"), case
            if verdict == "accepted":
                assert kvmnn.decode(frame).view(np.uint8)[0::2].tobytes() == CONTENT, case


# -- verdicts on frames ---------------------------------------------------------------------------------------------

ONE = stream(b"\x00\xaa", 1)  # a stream of one byte
GOOD = u32(1) + ONE * 2


def rejected_frames() -> dict[str, list[tuple[bytes, dict[str, Any]]]]:
    """Frames for the rows of the table under "Decoder", with options of decode."""

    def plain(*frames: bytes) -> list[tuple[bytes, dict[str, Any]]]:
        return [(frame, {}) for frame in frames]

    return {
        "R1": plain(b"", GOOD[:3]),
        "R2": plain(u32(0), u32(0) + bytes(20), u32(0) + ONE * 2),
        "R3": plain(GOOD[:4], GOOD[:13], u32(1) + ONE, u32(1) + ONE + ONE[:9], u32(1) + ONE * 3),
        "R4": plain(GOOD[:-1], u32(1) + ONE + ONE[:6] + u32(3) + ONE[10:]),
        "R5": plain(u32(1) + ONE + stream(b"\x00\xaa", 0)),
        "R6": plain(u32(1) + ONE + stream(b"\x00\xaa", 1, codec=2), u32(1) + stream(b"\x00\xaa", 1, codec=255) + ONE),
        "R7": plain(u32(1) + ONE + stream(b"\x00", 1), u32(1) + ONE + stream(b"", 1)),
        "R8": plain(u32(1) + ONE + stream(zstd_frame(b"ab"), 1, ZSTD), u32(1) + ONE + stream(b"", 1, ZSTD)),
        "R9": plain(u32(1) + ONE + stream(b"\x00\xaa", 1, mode=3), u32(1) + stream(b"\x00\xaa", 1, mode=255) + ONE),
        "R10": plain(u32(2) + ONE * 2, u32(1) + ONE + stream(b"\x01\xaa\xaa", 2), u32(1) + ONE + stream(b"", 0)),
        "R11": plain(GOOD + b"\0", u32(1) + ONE * 4 + b"\0", u32(1) + ONE * 5),
        "R12": [(u32(1) + ONE + stream(zstd_frame(b"a"), 1, ZSTD), {"codecs": ("rle",)})],
    }


def test_rejected_frames_table_matches_the_decoder() -> None:
    cases = rejected_frames()
    assert [row[0] for row in tables("Decoder")[0]] == list(cases)
    assert is_accepted(GOOD) and is_accepted(u32(1) + ONE * 4)
    for case, frames in cases.items():
        for frame, options in frames:
            assert not is_accepted(frame, **options), case
            for dtype in ("fp16", "fp32"):
                assert not is_accepted(frame, dtype=dtype, **options), case


def test_single_empty_stream_is_ten_bytes() -> None:
    assert _encoder.encode_stream(np.empty(0, np.uint8), ANY_MODE, ANY_CODEC) == bytes(10)
    assert _decoder.decode_stream(b"\x09\x09" + bytes(8), ANY_CODEC) == (b"", 10)


# -- bounds ---------------------------------------------------------------------------------------------------------


def zstd_of_rle_block(raw_len: int) -> bytes:
    """A zstd frame of one RLE block, whatever its size."""
    return bytes.fromhex("28b52ffd a0") + u32(raw_len) + (raw_len << 3 | 2 | 1).to_bytes(3, "little") + b"\x07"


def two_lanes(payload: bytes, raw_len: int, codec: int) -> bytes:
    return u32(raw_len) + stream(payload, raw_len, codec) * 2


def test_bounds_table_matches_the_decoder() -> None:
    factors = {row[0]: float(row[1]) for row in tables("Bounds")[0]}
    tokens = b"\xff\x00" * 2
    most = int(factors["RLE"] * len(tokens))
    assert kvmnn.decode(two_lanes(tokens, most, RLE)).size == most
    with pytest.raises(kvmnn.FrameError, match="cannot come from"):
        kvmnn.decode(two_lanes(tokens, most + 1, RLE))
    most = (1 << 21) - 1
    assert factors["ZSTD"] == 1 << 19 and most < factors["ZSTD"] * 4 <= most + 1
    for raw_len in (2, 128 << 10, (128 << 10) + 1, most):
        assert kvmnn.decode(two_lanes(zstd_of_rle_block(raw_len), raw_len, ZSTD)).size == raw_len
        with pytest.raises(kvmnn.FrameError, match="cannot come from"):
            kvmnn.decode(two_lanes(zstd_of_rle_block(raw_len), raw_len + 1, ZSTD))


# -- the rest of the page -------------------------------------------------------------------------------------------


def test_hash_values_equal_fnv1a64() -> None:
    assert f"{kvmnn.fnv1a64(b''):016x}" in section("Hash") and str(kvmnn.fnv1a64(b"")) in section("Hash")
    for text, value in tables("Hash")[0]:
        assert f"{kvmnn.fnv1a64(ast.literal_eval(code(text)).encode()):016x}" == code(value)
    assert kvmnn.fnv1a64(b"bar", kvmnn.fnv1a64(b"foo")) == kvmnn.fnv1a64(b"foobar")


def test_block_rule_matches_encode_block() -> None:
    constant, noise = np.zeros(600, np.float16), np.random.default_rng(1).bytes(1200)
    keys, values = constant, np.frombuffer(noise, np.float16)
    kept = kvmnn.encode_block(keys, values)
    assert kept.is_stored and kept.value_frame is not None and len(kept.value_frame) > len(noise)  # joint
    assert kept.ratio == np.float32(kept.raw_bytes / kept.attempted_bytes)
    dropped = kvmnn.encode_block(values, values)
    assert not dropped.is_stored and not dropped.fallback and dropped.ratio == 1.0
    assert dropped.compressed_bytes == dropped.raw_bytes and dropped.blob_hash == 0
    failed = kvmnn.encode_block(constant, b"", dtype="fp16")
    assert not failed.is_stored and failed.fallback and failed.ratio == 1.0
    assert kept.raw_hash == kvmnn.fnv1a64(keys.tobytes() + values.tobytes())
    assert kept.key_frame is not None
    assert kept.blob_hash == kvmnn.fnv1a64(kept.key_frame + kept.value_frame)


def test_container_sizes_equal_inspect() -> None:
    last = tables("Containers")[0][-1]
    assert last[0] == "bytes that are not payload"
    for cell, dtype in zip(last[1:], (np.float16, np.float32), strict=True):
        assert kvmnn.inspect(kvmnn.encode(np.ones(3, dtype))).header_bytes == int(cell)
    smallest = re.search(r"smallest frame \| (\d+) bytes \(FP16\), (\d+) bytes", section("Limits"))
    assert smallest
    assert [len(kvmnn.encode(np.ones(1, dtype))) for dtype in (np.float16, np.float32)] == [
        *map(int, smallest.groups())
    ]


def test_bf16_is_the_fp16_container() -> None:
    words = np.arange(5, dtype=np.uint16)
    frame = kvmnn.encode(words)
    assert frame == kvmnn.encode(words.view(np.float16)) == kvmnn.encode(words, dtype="bf16")
    assert kvmnn.decode(frame, dtype="bf16").dtype == np.uint16


WALKS = re.findall(r"^### (Frame .*)", TEXT, re.MULTILINE)


def test_walk_throughs_are_present() -> None:
    assert len(WALKS) >= 3


@pytest.mark.parametrize("title", WALKS)
def test_walk_through_dump_equals_the_frame(title: str) -> None:
    text = section(title)
    scope: dict[str, Any] = {"np": np}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], scope)  # type: ignore[index]  # noqa: RUF100, S102
    values = scope["values"]
    dump = bytearray()
    for line in re.search(r"```text\n(.*?)```", text, re.DOTALL)[1].splitlines():  # type: ignore[index]
        offset, _, row = line.partition("  ")
        assert int(offset, 16) == len(dump)
        dump += bytes.fromhex(row)
    explained = bytearray()
    for offset, cell, _field, _meaning in tables(title)[0]:
        assert int(offset) == len(explained)
        explained += bytes.fromhex(code(cell))
    assert explained == dump
    assert kvmnn.decode(bytes(dump)).tobytes() == values.tobytes()
    if zstd.is_byte_exact() or b"\x28\xb5\x2f\xfd" not in dump:
        assert kvmnn.encode(values) == dump
    dtype = {2: "fp16", 4: "fp32"}[values.itemsize]
    for n in range(len(dump)):
        assert not is_accepted(bytes(dump[:n]), dtype=dtype)


def test_fp32_frame_cut_after_second_stream_is_fp16() -> None:
    frame = kvmnn.encode(np.ones(3, np.float32))
    cut = frame[: kvmnn.inspect(frame).streams[2].offset]
    assert is_accepted(cut) and not is_accepted(cut, dtype="fp32")


@pytest.mark.parametrize("title", WALKS)
def test_walk_through_fields_match_inspect(title: str) -> None:
    frame = b"".join(bytes.fromhex(code(row[1])) for row in tables(title)[0])
    info = kvmnn.inspect(frame)
    offsets = {int(row[0]) for row in tables(title)[0]}
    assert {s.offset for s in info.streams} | {s.payload_offset for s in info.streams} <= offsets
    for offset, cell, field, meaning in tables(title)[0]:
        if field.endswith(("raw_len", "payload_len", "words", "content size")):
            assert int.from_bytes(bytes.fromhex(code(cell)), "little") == int(meaning), offset
        if field.endswith("mode"):
            assert meaning in {s.predictor for s in info.streams if s.offset == int(offset)}
        if field.endswith("codec"):
            assert meaning.lower() in {s.codec for s in info.streams if s.offset + 1 == int(offset)}
