"""Default outputs are next to the input, under its name, and never replace a file."""

from __future__ import annotations

from pathlib import Path

import compressor_files
import numpy as np
import pytest

WORDS = np.random.default_rng(4).standard_normal((2, 12, 8)).astype(np.float32)


@pytest.fixture
def here(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    np.savez("in/kv.npz", **{"layer_0.key": WORDS, "layer_0.value": -WORDS})
    compressor_files.checkpoint(Path("in/comp.v1.pth"), compressor_files.weights(1, head_dim=8))
    run("compressor", "convert", "in/comp.v1.pth", "in/w.bin", "-q")
    run("mnn", "pack", "in/kv.npz", "-o", "in/sys/", "--name", "sys", "--backend", "x86-avx2", "-q")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "made"),
    [
        ("compressor convert in/comp.v1.pth", "in/comp.v1.bin"),
        ("compressor export in/w.bin", "in/w.safetensors"),
        ("compressor run in/w.bin in/kv.npz --axes htd", "in/kv.compressed.npz"),
        ("encode in/kv.npz", "in/kv.npz.frames/manifest.json"),
        ("mnn pack in/kv.npz --name p --backend x86-avx2", "in/kv.packed/p_0.k"),
        ("mnn unpack in/sys/", "in/sys.safetensors"),
        ("mnn unpack in/sys --output-kind dump", "in/sys.dump"),
        ("mnn repack in/sys --backend x86-avx2 --target-backend arm64-fp16", "in/sys.arm64-fp16/sys_0.k"),
        ("mnn compact in/sys --remove 4", "in/sys.compact/sys_0.k"),
    ],
)
def test_default_output_is_next_to_the_input(here, run, argv, made) -> None:
    run(*argv.split())
    assert Path(made).exists()
    before = Path(made).read_bytes() if Path(made).is_file() else b""
    error = run(*argv.split(), code=1).err
    assert error.startswith("kvmnn: error: ") and error.count("\n") == 1
    assert "exists already" in error and "--force" in error
    assert not before or Path(made).read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (
            "compressor export in/w.bin -o -",
            "a .safetensors file is not written to standard output: use -o OUT.safetensors",
        ),
        (
            "compressor export in/w.bin --onnx -o -",
            "a directory of files is not written to standard output: use -o DIR/",
        ),
        ("mnn pack in/kv.npz -o -", "a directory of files is not written to standard output: use -o DIR/"),
        ("mnn unpack in/sys -o -", "a .safetensors file is not written to standard output: use -o OUT.safetensors"),
        ("compressor run in/w.bin in/kv.npz -o -", "a .npz file is not written to standard output: use -o OUT.npz"),
    ],
)
def test_standard_output_unsupported_kind_is_refused(here, run, argv, what) -> None:
    assert run(*argv.split(), code=2).err == f"kvmnn: error: -o -: {what}\n"


@pytest.mark.parametrize(
    "argv",
    [
        "compressor convert -",
        "compressor export -",
        "mnn pack in/kv.npz in/kv.npz",
        "mnn compact . --remove 1",
    ],
)
def test_default_output_without_input_name_is_refused(here, run, argv) -> None:
    before = sorted(here.rglob("*"))
    assert "no output given" in run(*argv.split(), code=2).err
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("argv", ["decode in/kv.frames -o out", "mnn unpack in/sys -o out --backend x86-avx2"])
def test_several_arrays_without_suffix_become_a_directory(here, run, argv) -> None:
    run("encode", "in/kv.npz", "-o", "in/kv.frames", "-q")
    geometry = ["--kv-heads", "2", "--head-dim", "8"] if argv.startswith("mnn unpack") else []
    run(*argv.split(), *geometry)
    found = {path.name: np.load(path) for path in sorted(Path("out").iterdir())}
    assert list(found) == ["layer_0.key.npy", "layer_0.value.npy"]
    assert found["layer_0.key.npy"].tobytes() == WORDS.tobytes()


def test_single_array_without_suffix_is_raw_words(here, run) -> None:
    np.save("in/one.npy", WORDS)
    run("encode", "in/one.npy", "-o", "in/one.frame", "-q")
    run("decode", "in/one.frame", "-o", "words")
    assert Path("words").read_bytes() == WORDS.tobytes()


def test_unknown_suffix_needs_raw(run, tmp_path, monkeypatch) -> None:
    """A misspelt suffix once wrote a file without a shape."""
    monkeypatch.chdir(tmp_path)
    words = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    np.savez("k.npz", **{"layer_0.key": words})
    run("encode", "k.npz", "-o", "k.frame")
    for argv in (("decode", "k.frame"), ("mnn", "unpack", "k.npz")):
        said = run(*argv, "-o", "k.nyp", code=2).err
        assert "k.nyp: '.nyp' is none of .npy, .npz, .safetensors (did you mean '.npy'?); --raw writes" in said
        assert not Path("k.nyp").exists()
        for name in ("k.nyp", "a.bin", "b.raw", "words"):
            run(*argv, "-o", name, "-f", *(["--raw"] if name == "k.nyp" else []))
            assert Path(name).read_bytes() == words.tobytes()
            Path(name).unlink()
        assert "expected one array and a name such as X.bin" in run(*argv, "-o", "x.npy", "--raw", code=2).err
        assert "expected one array" in run(*argv, "-o", "x/", "--raw", code=2).err
    run("encode", "k.npz", "-o", "k.zarr")
    assert "'.nyp' is none of" in run("decode", "k.zarr", "-o", "k.nyp", code=2).err
    assert (
        "--raw is about one array"
        in run("mnn", "unpack", "k.npz", "--output-kind", "dump", "-o", "d/", "--raw", code=2).err
    )


@pytest.mark.parametrize(
    "argv", ["encode in/sys -o in/sys -f", "mnn unpack in/sys -o in/sys/", "encode in/sys/ -o ./in/sys/"]
)
def test_folder_of_the_input_is_no_output(here, run, argv) -> None:
    before = {path.name for path in Path("in/sys").iterdir()}
    assert "is the input itself" in run(*argv.split(), code=1).err
    assert {path.name for path in Path("in/sys").iterdir()} == before
