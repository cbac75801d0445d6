"""The three bindings to libzstd give the verdicts of ZSTD_decompress and, at equal versions, the same frames."""

import json
import os
import subprocess
import sys
from pathlib import Path

import codec_model
import pytest
import zstandard
from codec_samples import EXAMPLES, Payload, expected_verdict, frame_around, verdict, zstd_payloads
from hypothesis import given
from hypothesis import strategies as st
from repository import SUPPORT

from kvmnn import KvmnnError
from kvmnn.frames import _zstdlib, zstd

PAYLOADS = zstd_payloads()
BINDINGS = ["python", "bundled", "system"]


def run_binding(binding: str) -> dict:
    script = SUPPORT / "zstd_binding.py"
    paths = [str(script.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "KVMNN_ZSTD": binding, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    if f"KVMNN_ZSTD={binding}: no such libzstd found" in done.stderr:
        return {}
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    return {binding: run_binding(binding) for binding in BINDINGS}


@pytest.mark.slow
@pytest.mark.parametrize("binding", BINDINGS)
def test_zstd_binding_has_the_verdicts_of_zstd_decompress(reports: dict[str, dict], binding: str) -> None:
    report = reports[binding]
    if binding != "python" and not report:
        assert not _present(binding)
        pytest.skip(f"no {binding} libzstd on this machine")
    assert report["binding"] == binding
    expected = {payload.name: payload.accepted for payload in PAYLOADS}
    assert {name for name, got in report["verdicts"].items() if got != expected[name]} == set()
    assert report["wrong"] == []


@pytest.mark.slow
def test_zstd_bindings_make_the_same_frames(reports: dict[str, dict]) -> None:
    exact = {binding: report["frames"] for binding, report in reports.items() if report.get("byte_exact")}
    assert "python" in exact, f"zstandard {zstandard.__version__} is not byte-exact"
    same_version = [r["frames"] for r in reports.values() if r and r["version"] == reports["python"]["version"]]
    # Effort "fast" asks libzstd for what the Python API cannot say, and the high levels of "max" differ by version.
    assert all(_but(frames, 2) == _but(exact["python"], 2) for frames in same_version)
    for frames in exact.values():
        assert _but(_but(frames, 3), 2) == _but(_but(exact["python"], 3), 2)
        assert frames[-1] == exact["python"][-1]


def _but(frames: list[str], effort: int) -> list[str | None]:
    """The frames of all efforts but one; the last frame is of none."""
    return [None if i % 4 == effort else frame for i, frame in enumerate(frames[:-1])]


def _present(binding: str) -> bool:
    if binding == "system":
        return codec_model.library("libzstd.so.1") is not None
    folder = Path(zstandard.__file__).parent
    return any(codec_model.library(str(path)) for path in folder.glob("_cffi.*"))


def test_zstd_unknown_binding_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import kvmnn.frames"],
        env={**os.environ, "KVMNN_ZSTD": "front"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "KVMNN_ZSTD='front': expected bundled, system or python" in done.stderr


def test_zstd_of_a_compiled_module_alone_is_bound() -> None:
    code = "from kvmnn.frames import _zstdlib as z; print(z.decompress(z.compress(b'a' * 99, 3), 99) == b'a' * 99)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: payload.name)
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_zstd_payload_verdict_in_a_frame(payload: Payload, mode: int) -> None:
    frame = frame_around(payload.payload, len(payload.raw), codec=1, mode=mode)
    got = verdict(frame)
    assert (got is not None) == payload.accepted
    if got is not None:
        assert got[1][::2] == codec_model.unpredict(payload.raw, mode)
    assert verdict(frame, codecs=("rle",)) is None


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: payload.name)
def test_zstd_payload_verdict_of_the_reference(payload: Payload) -> None:
    for decompress in (codec_model.zstd_decompress_by_frames, codec_model.library("libzstd.so.1")):
        if decompress is None:
            continue
        try:
            out = decompress(payload.payload, len(payload.raw))
        except codec_model.Reject:
            assert not payload.accepted
        else:
            assert payload.accepted and out == payload.raw


@EXAMPLES
@given(st.data())
def test_zstd_any_concatenation_has_the_verdict_of_libzstd(data: st.DataObject) -> None:
    """Frames of any kind in any order, with an expected length that may be wrong."""
    payload, size = b"", 0
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["sized", "unsized", "checksum", "skippable"]))
        content = data.draw(st.binary(max_size=40))
        if kind == "skippable":
            number = data.draw(st.integers(0, 15))
            payload += (0x184D2A50 + number).to_bytes(4, "little") + len(content).to_bytes(4, "little") + content
        else:
            compressor = zstandard.ZstdCompressor(
                write_content_size=kind != "unsized", write_checksum=kind == "checksum"
            )
            payload += compressor.compress(content)
            size += len(content)
    size = max(1, size + data.draw(st.sampled_from([0, 0, 0, 1, -1])))
    at = data.draw(st.integers(-40, len(payload) - 1))
    if at >= 0:
        payload = payload[:at] + bytes([payload[at] ^ data.draw(st.integers(0, 255))]) + payload[at + 1 :]
    frame = frame_around(payload, size, codec=1)
    assert verdict(frame) == expected_verdict(frame)


def test_zstd_one_shot_functions_round_trip() -> None:
    for data in (b"", b"x", bytes(1000), bytes(range(256)) * 500):
        packed = _zstdlib.compress(data)
        assert packed == zstandard.ZstdCompressor(level=3).compress(data) == codec_model.zstd_compress(data)
        assert _zstdlib.decompress(packed, len(data)) == data
        with pytest.raises(ValueError, match="decode"):
            _zstdlib.decompress(packed, len(data) + 1)
        with pytest.raises(ValueError, match="decode"):
            _zstdlib.decompress(packed[:-1], len(data))


def test_zstd_use_library_invalid_table_is_refused() -> None:
    with pytest.raises(ValueError, match="non-zero addresses"):
        _zstdlib.use_library([1, 2, 3])
    with pytest.raises(ValueError, match="non-zero addresses"):
        _zstdlib.use_library([0] * len(_zstdlib.FUNCTION_NAMES))


def test_zstd_reports_binding_and_version() -> None:
    assert zstd.get_binding() in BINDINGS
    version = tuple(map(int, zstd.get_version().split(".")))
    assert zstd.is_byte_exact() == ((1, 5, 2) <= version <= (1, 5, 6))
    with pytest.raises(KvmnnError, match="expected bundled"):
        zstd._bind("window")


def test_zstd_frame_claiming_to_be_empty_is_checked() -> None:
    """With bytes still to come, where zstandard would take its word for it."""
    good = zstandard.ZstdCompressor().compress(b"abc")
    empty = b"\x28\xb5\x2f\xfd\x20\x00"
    assert zstd._python_decompress(memoryview(empty + b"\x01\x00\x00" + good), 3) == b"abc"
    with pytest.raises((ValueError, zstandard.ZstdError)):
        zstd._python_decompress(memoryview(empty + b"\x09\x00\x00x" + good), 3)
