"""Bad input and bad output: one clear line, exit code 1 or 2, no partial output."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import kvmnn
from kvmnn.cli.entry_point import main

KEYS = np.random.default_rng(3).standard_normal((4, 30, 32)).astype(np.float16)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with good and bad files, and the names in it."""
    monkeypatch.chdir(tmp_path)
    np.save("ok.npy", KEYS)
    np.save("double.npy", KEYS.astype(np.float64))
    np.save("object.npy", np.array([{}], object), allow_pickle=True)
    np.save("empty.npy", KEYS[:0])
    np.savez("pickle.npz", k=np.array([{}], object))
    np.savez("both.npz", k=KEYS, v=KEYS)
    Path("cut.npy").write_bytes(Path("ok.npy").read_bytes()[:-1])
    Path("odd.bin").write_bytes(b"123")
    Path("empty.bin").touch()
    Path("dir").mkdir()
    Path("words.frame").write_bytes(KEYS.tobytes())
    frame = kvmnn.encode(KEYS)
    Path("lone.frame").write_bytes(frame)
    Path("long.frame").write_bytes(frame + b"\0")
    Path("cut.frame").write_bytes(frame[:-1])
    Path("claims.frame").write_bytes(b"\xff\xff\xff\x7f" + b"\0\1\xff\xff\xff\x7f\x01\0\0\0x" * 2)
    Path("liar.frame").write_bytes(frame)
    Path("liar.frame.json").write_text("{}")
    assert main(["encode", "-q", "ok.npy", "-o", "side.frame"]) == 0
    assert main(["encode", "-q", "both.npz", "-o", "bundle"]) == 0
    os.mkdir("broken")
    document = json.loads(Path("bundle/manifest.json").read_text())
    document["arrays"][0]["frames"][0]["file"] = "../lone.frame"
    Path("broken/manifest.json").write_text(json.dumps(document))
    return tmp_path


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_ino for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        # what is read
        ("encode missing.npy -o x.frame", 1, "missing.npy: cannot be read: No such file"),
        ("encode cut.npy -o x.frame", 1, "cut.npy: is truncated"),
        ("encode double.npy -o x.frame", 1, "double.npy: numpy type float64 is none that frames hold"),
        ("encode double.npy --dtype fp16 -o x.frame", 1, "has 8-byte words, fp16 has 2-byte words"),
        ("encode object.npy -o x.frame", 1, "object.npy: holds Python objects (pickles), which are never loaded"),
        ("encode empty.npy -o x.frame", 1, "empty.npy: is empty (shape [0, 30, 32])"),
        ("encode pickle.npz -o x/", 1, "pickle.npz: member 'k.npy': holds Python objects"),
        ("encode odd.bin --dtype fp16 -o x.frame", 1, "odd.bin: 3 bytes are not a whole number of 2-byte fp16 words"),
        ("encode empty.bin --dtype fp16 -o x.frame", 1, "empty.bin: is empty"),
        ("encode odd.bin -o x.frame", 1, "raw bytes need a dtype (--dtype fp16, bf16 or fp32)"),
        ("encode dir -o x/", 1, "dir: not a file kvmnn knows: it is an empty folder"),
        ("encode bundle -o x/", 1, "is a kvmnn bundle of frames: decode it"),
        ("encode both.npz --tensor x -o x/", 2, "no array named 'x'; it has 'k', 'v'"),
        ("encode ok.npy --tensor x -o x/", 2, "no array named 'x'; it has 'ok'"),
        ("decode missing.frame -o x.npy", 1, "missing.frame: cannot be read: No such file"),
        ("decode long.frame -o x.npy", 1, "long.frame: "),
        ("decode cut.frame -o x.npy", 1, "cut.frame: "),
        ("decode claims.frame -o x.npy", 1, "claims.frame: "),
        ("decode ok.npy -o x.npy", 1, "(it is a .npy file)"),
        ("decode empty.bin -o x.npy", 1, "empty.bin: not a file kvmnn knows: it is empty"),
        ("decode dir -o x.npy", 1, "dir: has no manifest.json"),
        ("decode broken -o x/", 1, "arrays[0].frames[0].file: found \"../lone.frame\""),
        ("decode liar.frame -o x.npy", 1, "liar.frame.json: schema: is missing"),
        ("decode lone.frame --dtype fp32 -o x.npy", 1, "lone.frame: "),
        ("decode lone.frame --max-input-bytes 1K -o x.npy", 1, "above the limit of 1024"),
        ("verify long.frame", 1, "long.frame: "),
        ("verify lone.frame --against double.npy", 1, "double.npy: numpy type float64"),
        ("verify lone.frame --against missing.npy", 1, "missing.npy: cannot be read"),
        ("inspect long.frame", 1, "long.frame: "),
        ("inspect broken", 1, "arrays[0].frames[0].file"),
        ("bench cut.npy", 1, "cut.npy: is truncated"),
        # what is written
        ("encode ok.npy -o side.frame", 1, "side.frame: exists already"),
        ("encode ok.npy -o missing/x.frame", 1, "missing/x.frame: cannot be written: its folder "),
        ("encode ok.npy -o missing/x/", 1, "missing does not exist"),
        ("encode both.npz -o lone.frame", 2, "2 arrays need a directory"),
        ("encode both.npz -o x.frame", 2, "2 arrays need a directory"),
        ("encode both.npz -o x.npz", 2, "2 arrays need a directory"),
        ("encode both.npz -o lone.frame/", 1, "exists already and is not a directory"),
        ("encode ok.npy --force -o ok.npy", 1, "ok.npy: is the input itself"),
        ("encode words.frame --dtype fp16 --force -o words.frame", 1, "words.frame: is the input itself"),
        ("decode side.frame --raw --force -o side.frame", 1, "side.frame: is the input itself"),
        ("decode bundle --force -o bundle/k.frame", 2, "cannot hold 2 arrays"),
        ("decode bundle --force -o bundle/manifest.json", 2, "cannot hold 2 arrays"),
        ("decode bundle -o x.npy", 2, "x.npy: cannot hold 2 arrays"),
        ("decode side.frame -o ok.npy", 1, "ok.npy: exists already"),
        ("encode ok.npy -o /dev/full", 1, "/dev/full: cannot be written: No space left on device"),
        ("decode side.frame -o /dev/full", 1, "/dev/full: cannot be written: No space left on device"),
        # what is asked
        ("encode", 2, "the following arguments are required: IN"),
        ("encode ok.npy -o x.frame -o y.frame", 2, "argument -o/--output: expected once, found x.frame and y.frame"),
        ("frobnicate", 2, "there is no verb 'frobnicate'"),
        ("encode ok.npy --effort most -o x.frame", 2, "invalid choice: 'most'"),
        ("encode ok.npy --dtype fp8 -o x.frame", 2, "invalid choice: 'fp8'"),
        ("encode ok.npy --chunk-bytes 1X -o x.frame", 2, "'1X' is not a size"),
        ("encode ok.npy --chunk-bytes 1 -o x.frame", 2, "expected 0 (never cut) or at least 4"),
        ("encode ok.npy --threads 0 -o x.frame", 2, "'0' is not a whole number above zero"),
        ("encode ok.npy --threads -1 -o x.frame", 2, "argument --threads"),
        ("encode - - -o x/", 2, "standard input can be read only once"),
        ("decode side.frame --dtype fp32 -o x.npy", 2, "the manifest says fp16, not fp32"),
    ],
)  # fmt: skip
def test_error_is_one_line_without_output(here, capsys, argv, code, message):
    before = tree(here)
    capsys.readouterr()
    assert main(argv.split()) == code
    said = capsys.readouterr()
    assert said.err.startswith("kvmnn: error: ")
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert tree(here) == before


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/proc/self/attr"), reason="root writes everywhere")
def test_unwritable_output_is_one_line_error(here, capsys):
    for argv in (["encode", "ok.npy", "-o", "/proc/x.frame"], ["decode", "bundle", "-o", "/proc/x/"]):
        assert main(argv) == 1
        said = capsys.readouterr().err
        assert "cannot be written" in said
        assert said.count("\n") == 1


def test_damaged_frame_fails_verify_and_decode(here, capsys):
    data = bytearray(Path("bundle/v.frame").read_bytes())
    data[-1] ^= 1
    Path("bundle/v.frame").write_bytes(data)
    before = tree(here)
    for argv in (["verify", "bundle"], ["decode", "bundle", "-o", "x/"], ["decode", "bundle", "-o", "x.npz"]):
        assert main(argv) == 1
        said = capsys.readouterr()
        assert "LOSSLESS" not in said.out
        assert "bundle: array 'v'" in said.err
        assert said.err.count("\n") == 1
    assert tree(here) == before


def test_verify_difference_is_exit_code_1(here, capsys):
    other = KEYS.copy()
    other[1, 2, 3] += 1
    np.save("other.npy", other)
    assert main(["verify", "side.frame", "--against", "other.npy"]) == 1
    said = capsys.readouterr()
    assert "DIFFERS from other.npy: array 'ok' first differs at element [1, 2, 3]" in said.err
    assert said.out == ""


def test_decode_fortran_order_to_safetensors_is_refused(here, capsys):
    np.save("f.npy", np.asfortranarray(KEYS))
    assert main(["encode", "-q", "f.npy", "-o", "f.frame"]) == 0
    before = tree(here)
    assert main(["decode", "f.frame", "-o", "f.safetensors"]) == 1
    assert "Fortran order" in capsys.readouterr().err
    assert tree(here) == before


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, OSError(28, "No space left on device")])
def test_error_during_work_leaves_no_output(here, capsys, monkeypatch, error):
    def fail(*_: object, **__: object) -> bytes:
        raise error

    monkeypatch.setattr("kvmnn.bundle.encoder.encode_for_file", fail)
    monkeypatch.setattr("kvmnn.bundle.encoder.EncodeOptions.__post_init__", lambda self: None)
    before = tree(here)
    assert main(["encode", "ok.npy", "-o", "x.frame"]) == (130 if error is KeyboardInterrupt else 1)
    assert capsys.readouterr().err.count("\n") == 1
    assert tree(here) == before


# -- as processes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_large_output_through_pipe_is_complete(here, unbuffered):
    """With PYTHONUNBUFFERED a single write to a pipe may take only a part."""
    values = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float16)
    np.save("big.npy", values)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with start("encode", "big.npy", "-o", "-", "-q", env=environment) as process:
        made, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert made == kvmnn.encode(values)
    with start("decode", "-", "-o", "-", "-q", env=environment, stdin=subprocess.PIPE) as process:
        back, err = process.communicate(made, timeout=60)
    assert (process.returncode, back) == (0, values.tobytes())


def start(*argv: str, **options: object) -> subprocess.Popen[bytes]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, "-m", "kvmnn", *argv], **pipes)  # type: ignore[call-overload]


@pytest.mark.slow
def test_full_disk_leaves_no_output(here):
    before = tree(here)
    np.save("big.npy", np.random.default_rng(0).standard_normal(1 << 18).astype(np.float16))
    before = tree(here)

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    for output in ("x.frame", "x/"):
        process = start("encode", "big.npy", "-o", output, preexec_fn=small_files)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert b"cannot be written: File too large" in err
        assert err.count(b"\n") == 1
        assert tree(here) == before


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_leaves_no_output(here, number, code):
    np.save("big.npy", np.frombuffer(np.random.default_rng(0).bytes(96 << 20), np.float32))
    before = set(tree(here))
    process = start("encode", "big.npy", "-o", "x/", "--chunk-bytes", "1M")
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in here.glob(".x*/*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.startswith(b"kvmnn: error: ")
    assert err.count(b"\n") == 1
    assert set(tree(here)) == before


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
def test_second_interrupt_ends_long_calls(here, threads):
    """A call of libzstd at its highest levels takes ten seconds and more for such a lane."""
    np.save("big.npy", np.frombuffer(np.random.default_rng(0).bytes(16 << 20), np.float16))
    before = set(tree(here))
    process = start("encode", "big.npy", "-o", "x.frame", "--effort", "max", "--threads", threads)
    deadline = time.monotonic() + 30
    while not any(here.glob(".x*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(1)
    begun = time.monotonic()
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begun < 5
    assert (process.returncode, err) == (130, b"kvmnn: error: interrupted\n")
    assert set(tree(here)) == before


@pytest.mark.slow
def test_closed_pipe_is_exit_code_141(here):
    np.save("big.npy", np.random.default_rng(0).standard_normal(1 << 20).astype(np.float16))
    with start("encode", "big.npy", "-o", "-", "-q") as process:
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
    assert process.returncode == 141  # as every other command before `| head`: silently, as if SIGPIPE had ended it
    assert err == b""


@pytest.mark.slow
def test_full_standard_error_keeps_the_exit_code(here):
    with open("/dev/full", "wb") as full:
        process = start("encode", "cut.npy", "-o", "x.frame", stderr=full)
        assert process.communicate(timeout=60)[0] == b""
        assert process.returncode == 1


@pytest.mark.slow
def test_full_standard_output_is_an_error(here):
    with open("/dev/full", "wb") as full:
        process = start("encode", "ok.npy", "-o", "-", "-q", stdout=full)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (1, b"kvmnn: error: standard output: No space left on device\n")
        process = start("inspect", "lone.frame", stdout=full)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (1, b"kvmnn: error: standard output: No space left on device\n")
