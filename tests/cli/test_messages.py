"""Messages about inputs and outputs that a verb cannot use: what they are, and what to do instead."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import compressor_files
import numpy as np
import packed_samples
import pytest

import kvmnn
from kvmnn.cli import streams
from kvmnn.errors import FrameError

WORDS = np.random.default_rng(1).standard_normal((2, 300, 8)).astype(np.float32)
ONNX = b"\x08\x08\x12\x07pytorch" + bytes(range(200))


@pytest.fixture
def here(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    np.save("k.npy", WORDS)
    np.savez("kv.npz", **{"layer_0.key": WORDS, "layer_0.value": -WORDS})
    compressor_files.checkpoint(Path("c.pth"), compressor_files.weights(1, head_dim=8))
    run("compressor", "convert", "c.pth", "w.bin", "-q")
    run("encode", "k.npy", "-q")
    Path("a.txt").write_text("some text")
    Path("m.onnx").write_bytes(ONNX)
    return tmp_path


@pytest.mark.parametrize("verb", ["verify", "decode", "inspect"])
@pytest.mark.parametrize(("name", "what"), [("a.txt", "it looks like text"), ("m.onnx", "it looks like an ONNX model")])
def test_unknown_file_is_described_by_its_content(here, run, verb, name, what):
    said = run(verb, name, code=1).err
    assert f"{name}: not a file kvmnn knows: {what}" in said
    assert "stream" not in said


@pytest.mark.parametrize("argv", ["compressor export {}", "compressor run {} kv.npz --axes htd"])
def test_wrong_weight_file_is_described_by_its_content(here, run, argv):
    expected = "expected a compressor's weight file (.bin), which kvmnn compressor convert makes of a checkpoint"
    assert f"a.txt: {expected}; it looks like text" in run(*argv.format("a.txt").split(), code=1).err
    assert f"m.onnx: {expected}; it looks like an ONNX model" in run(*argv.format("m.onnx").split(), code=1).err
    assert f"k.npy.frame: {expected}\n" in run(*argv.format("k.npy.frame").split(), code=1).err


@pytest.mark.parametrize("name", ["c.pth", "c", "old"])
@pytest.mark.parametrize("verb", ["verify", "compressor export", "decode", "encode"])
def test_checkpoint_message_names_convert(here, run, verb, name):
    Path("c").write_bytes(Path("c.pth").read_bytes())
    Path("old").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + bytes(range(100)))
    said = run(verb, name, code=1).err
    if (verb, name) == ("encode", "old"):  # which nobody can read
        assert "is a file of torch.save, a cache or a checkpoint, that cannot be read: offset 15" in said
    else:
        assert (
            "it looks like a torch checkpoint (kvmnn compressor convert makes a weight file of a KV compressor's)"
            in said
        )
    assert "npz" not in said


@pytest.mark.parametrize("name", ["k.npy.frame", "plain"])
def test_encode_frame_needs_explicit_dtype(here, run, name):
    Path("plain").write_bytes(kvmnn.encode(np.ones(41, np.float16)))
    for argv in (f"encode {name} -o q.frame", f"bench {name}"):
        said = run(*argv.split(), code=1).err
        assert f"{name}: is a frame already: kvmnn decode gives its array back" in said
        assert not Path("q.frame").exists()
    size = os.path.getsize(name)
    Path("even").write_bytes(Path(name).read_bytes() * 2)
    run("encode", "even", "--dtype", "fp16", "-o", "q.frame", "-q")
    run("decode", "q.frame", "-o", "q.bin", "-q")
    assert Path("q.bin").read_bytes() == Path("even").read_bytes() and os.path.getsize("q.bin") == 2 * size
    Path("broken.frame").write_bytes(b"\xb5\xff\xff\xff\xff\xff\xff\xff")
    assert "is a frame already" not in run("encode", "broken.frame", code=2).err


def test_convert_exported_npz_suggests_other_export(here, run):
    run("compressor", "export", "w.bin", "-o", "y.npz", "-q")
    said = run("compressor", "convert", "y.npz", "z.bin", code=1).err
    assert "y.npz: is a .npz file of arrays, which is not read as a checkpoint: kvmnn compressor export -o" in said
    run("compressor", "export", "w.bin", "-o", "y.safetensors", "-q")
    run("compressor", "convert", "y.safetensors", "z.bin", "-q")
    assert Path("z.bin").read_bytes() == Path("w.bin").read_bytes()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("compressor convert c.pth x/", "x/: is a directory: expected the name of a weight file (.bin)"),
        ("compressor export w.bin -o w.txt", "w.txt: expected a name that ends in .safetensors or .npz"),
        ("verify w.bin --against w.bin", "kvmnn diff compares weight files"),
        ("verify k.npy.frame --against w.bin", "--against w.bin: is a compressor's weight file"),
        ("measure kv.npz --out-json -", "--out-json and --out-md write files; --json prints the documents"),
    ],
)
def test_usage_errors_exit_2_and_leave_nothing(here, run, argv, said):
    before = sorted(here.iterdir())
    assert said in run(*argv.split(), code=2).err
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("part", ["k", "v"])
def test_truncated_layer_file_is_named(here, run, part):
    sample = packed_samples.write_prefix(here / "sys", packed_samples.arrays(3, 2, 30, 4), capacity=32)
    size = os.path.getsize(f"sys/sys_1.{part}") - 4
    os.truncate(f"sys/sys_1.{part}", size)
    for backend in (["--backend", "x86-avx2"], []):
        said = run("encode", "sys", "-o", "x/", *sample.options, *backend, code=1).err
        assert f"sys_1.{part}" in said and f"{size} " in said
        assert "sys_0" not in said and "sys_2" not in said


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros(4), "numpy type float64 is none that frames hold: expected float16, float32 or uint16 (bf16)"),
        (
            np.zeros(4, np.int32),
            "numpy type int32 does not say what its words are: --dtype fp32 takes them as they are",
        ),
        (np.zeros(4, np.int16), "int16 does not say what its words are: --dtype fp16 or bf16 takes them as they are"),
        (np.zeros(4, np.uint8), "raw bytes need a dtype (--dtype fp16, bf16, fp32)"),
    ],
)
def test_encode_unsupported_numpy_type_gets_advice(here, run, array, said):
    np.save("a.npy", array)
    code = 2 if "--dtype" in said else 1
    assert f"a.npy: {said}" in run("encode", "a.npy", code=code).err.replace("numpy type int16", "int16")


@pytest.mark.parametrize("dtype", [None, "fp16", "fp32"])
def test_decode_concatenated_frames_suggests_decode_all(dtype):
    frames = b"".join(map(kvmnn.encode, WORDS.astype(np.float16 if dtype == "fp16" else np.float32)))
    with pytest.raises(FrameError, match=r"; it is 2 frames one after another, which decode_all takes$"):
        kvmnn.decode(frames, dtype=dtype)
    with pytest.raises(FrameError) as broken:
        kvmnn.decode(frames[:-1], dtype=dtype)
    assert "decode_all" not in str(broken.value)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("argv", ["inspect k.npy", "decode k.npy.frame -o -", "verify k.npy.frame --json"])
def test_full_standard_output_is_named(here, monkeypatch, argv):
    from kvmnn.cli import main

    said = []
    monkeypatch.setattr("kvmnn.cli.streams.write_error_line", lambda kind, message: said.append(f"{kind}: {message}"))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(argv.split()) == 1
        monkeypatch.undo()
    assert said == ["error: standard output: No space left on device"]


# -- diff -------------------------------------------------------------------------------------------------------------


def test_diff_compares_weight_files(here, run):
    words = f"{(os.path.getsize('w.bin') - 44 - 12 * 12) // 2:,}"
    assert run("diff", "w.bin", "w.bin").out == f"equal: {words} words, bit by bit\n"
    run("compressor", "export", "w.bin")
    assert run("diff", "w.bin", "w.safetensors").out.startswith("equal: ")
    run("compressor", "convert", "c.pth", "o.bin", "--min-seq-len", 9, "--metadata", "a=b")
    assert run("diff", "w.bin", "o.bin", code=1).out.splitlines() == [
        "header field min_seq_len: 2 and 9 (first input, second input)",
        "header field metadata_size_bytes: 0 and 12 (first input, second input)",
        "metadata: other bytes (first input, second input)",
        f"equal otherwise: {words} words, bit by bit",
    ]
    data = bytearray(Path("w.bin").read_bytes())
    data[60] ^= 1
    Path("x.bin").write_bytes(data)
    said = run("diff", "w.bin", "x.bin", code=1).out
    assert "first difference: array 'compress_tk.0.0.weight'" in said
    assert f"1 of {words} words differ" in said


def test_diff_unequal_lengths_compare_the_common_tokens(here, run):
    one = packed_samples.arrays(1, 2, 30, 4)
    packed_samples.write_prefix(here / "a", one, capacity=32)
    packed_samples.write_prefix(here / "b", [array[:, :20] for array in one], capacity=20)
    known = ["--kv-heads", 2, "--head-dim", 4, "--backend", "x86-avx2"]
    said = run("diff", "a", "b", *known, "--valid-tokens", 30, "--second-valid-tokens", 20, code=1).out.splitlines()
    assert said == [
        "layer 0, K: 30 and 20 tokens; the first 20 are compared (first input, second input)",
        "layer 0, V: 30 and 20 tokens; the first 20 are compared (first input, second input)",
        "equal otherwise: 320 words, bit by bit",
    ]
    changed = one[1].copy()
    changed[1, 7, 2] += 1
    np.savez("c.npz", **{"layer_0.key": one[0], "layer_0.value": changed})
    said = run("diff", "c.npz", "b", *known, "--valid-tokens", 20, code=1).out
    assert "first difference: layer 0, V, head 1, token 7, dim 2" in said
    assert "1 of 320 words differ" in said
    assert (
        "--second-valid-tokens is about packed files"
        in run("diff", "a", "c.npz", *known, "--second-valid-tokens", 2, code=2).err
    )


@pytest.mark.slow
def test_line_ends_in_paths_are_escaped(tmp_path, run, monkeypatch):
    """In the line of a verb, in lines of many files and in their summary; JSON has the path itself."""
    monkeypatch.chdir(tmp_path)
    path = "t\nu/a\n b.npy"
    Path("t\nu").mkdir()
    Path(path).write_bytes(b"x")
    shown = "t\\nu/a\\n b.npy: "
    assert run("inspect", path, code=1).err.startswith(f"kvmnn: error: {shown}")
    found = run("inspect", "--jobs", 1, "t\nu", code=1)
    line = json.loads(found.out)
    assert line["path"] == path and line["error"].startswith(shown)
    assert f"the first: {shown}" in found.err
    assert found.err.count("\n") == 1


def test_message_lines_of_libraries_are_joined(capsys):
    """Several lines of a library become one; line ends in registered names are escaped."""
    streams.register_names(["dir/a\nb.npy"])
    try:
        streams.write_error_line("error", streams.format_message_line("dir/a\nb.npy: wrong\n  and more\n"))
    finally:
        streams.reset_names()
    assert capsys.readouterr().err == "kvmnn: error: dir/a\\nb.npy: wrong and more\n"


def test_error_line_is_at_most_1000_letters(run, tmp_path, monkeypatch) -> None:
    """Text of a foreign file does not fill the terminal; its beginning and end stay."""
    monkeypatch.chdir(tmp_path)
    np.savez("k.npz", **{"layer_0." + "x" * 3000: np.zeros((2, 3, 4), np.float16)})
    said = run("mnn", "unpack", "k.npz", "--tensor", "y" * 5000, "-o", "x/", code=2).err
    assert said.startswith("kvmnn: error: k.npz: no array named 'yyy")
    assert len(said) < 1000 and said.endswith("xxx'\n")
    assert re.search(r"y \.\.\. \([0-9,]+ letters more\) \.\.\. x", said)
    words = [f"no-such-file-{number}" for number in range(300)]
    assert len(run("encode", *words, "-o", "x/", code=1).err) < 1000
    assert len(run("encode", "k.npz", "--" + "o" * 5000, code=2).err) < 1000


@pytest.mark.parametrize(
    ("is_terminal", "variables", "shown"),
    [
        (True, {"TERM": "xterm"}, "\x1b[1;31mkvmnn: error:\x1b[0m gone.frame: "),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, "kvmnn: error: gone.frame: "),
        (True, {"TERM": "dumb"}, "kvmnn: error: gone.frame: "),
        (False, {"TERM": "xterm"}, "kvmnn: error: gone.frame: "),
    ],
)
def test_messages_have_colours_on_terminals_alone(is_terminal, variables, shown, monkeypatch, tmp_path) -> None:
    import io

    from kvmnn.cli import main

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    assert main(["inspect", "gone.frame"]) == 1
    assert stream.getvalue().startswith(shown)
