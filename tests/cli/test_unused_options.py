"""An option without effect is refused, and the message names the alternative."""

from __future__ import annotations

from pathlib import Path

import compressor_files
import numpy as np
import plain_dumps
import pytest
from packed_samples import arrays, write_prefix

NOT_PACKED = "is about packed files of MNN's, and"
NO_HEADS = "is about packed files of MNN's and caches of llama.cpp, and"


@pytest.fixture
def here(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    words = np.random.default_rng(1).standard_normal((2, 300, 8)).astype(np.float32)
    np.savez("kv.npz", **{"layer_0.key": words, "layer_0.value": -words})
    np.save("k.npy", words)
    compressor_files.checkpoint(Path("c.pth"), compressor_files.weights(1, head_dim=8))
    run("compressor", "convert", "c.pth", "w.bin", "-q")
    run("encode", "kv.npz", "-o", "kv/", "-q")
    run("encode", "k.npy", "-q")
    write_prefix(tmp_path / "sys", arrays(1, 2, 30, 4), capacity=32)
    plain_dumps.dump(tmp_path / "dump")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("compressor export w.bin --precision fp16", "--precision needs --onnx"),
        ("encode k.npy --kv-heads 2 -o x", f"--kv-heads {NO_HEADS} k.npy holds none"),
        ("encode k.npy --valid-tokens 40 -o x", f"--valid-tokens {NOT_PACKED} k.npy holds none"),
        ("mnn unpack kv.npz --name sys -o x.npz", f"--name {NOT_PACKED} kv.npz holds none"),
        (
            "mnn repack kv/ --backend x86-avx2 --target-backend arm64-fp16 -o x/",
            f"--backend {NOT_PACKED} kv/ holds none",
        ),
        ("diff kv.npz kv/ --head-dim 8", f"--head-dim {NO_HEADS} kv.npz kv/ holds none"),
        (
            "mnn pack kv.npz --backend x86-avx2 --name s --layer-order pid=1 -o x/",
            f"--layer-order {NOT_PACKED} kv.npz holds none",
        ),
        ("compressor run w.bin kv.npz --axes htd --kv-heads 2", f"--kv-heads {NO_HEADS} kv.npz holds none"),
        ("verify kv/ --against kv.npz --backend x86-avx2", f"--backend {NOT_PACKED} kv.npz holds none"),
        ("verify kv/ --tensor k", "--tensor needs --against"),
        ("verify kv/ --dtype bf16", "the manifest says fp32 of 'layer_0.key', not bf16"),
        ("compressor verify w.bin --num-heads 2", "--num-heads needs --against"),
        ("verify w.bin --against c.pth --kv-heads 2", "--kv-heads is not about weight files, and w.bin is one"),
        ("decode kv/ --backend x86-avx2 -o x.npz", "--backend is about the files of a prefix cache, and plain arrays"),
        ("inspect w.bin --kv-heads 2", "--kv-heads changes nothing of what is said about w.bin"),
        (
            "compressor inspect w.bin --num-heads 2",
            "--num-heads is about checkpoints, and weight files are shown",
        ),
        ("verify w.bin --against c.pth --head-dim 8", "--head-dim is not about weight files, and w.bin is one"),
        ("inspect k.npy --valid-tokens 2", "--valid-tokens changes nothing of what is said about k.npy"),
        ("inspect k.npy w.bin --no-zstd", "--no-zstd changes nothing of what is said about k.npy w.bin"),
        ("inspect kv/ --dtype bf16", "the manifest says fp32 of 'layer_0.key', not bf16"),
        ("measure dump --online-chunk-seq 8", "--online-chunk-seq needs --entry-mode chunked or chunked_grouped"),
        ("measure dump --online-framing-bytes 8", "--online-framing-bytes needs --entry-mode chunked"),
        ("measure dump --aggregate-by-stage", "--aggregate-by-stage needs --entry-mode aggregate"),
        ("measure dump --codec-mode legacy --adaptive-block-seq 8", "--adaptive-block-seq needs --codec-mode adaptive"),
        ("measure dump --codec-mode legacy --k-hi-predictors raw", "--k-hi-predictors needs --codec-mode adaptive_v22"),
        ("measure dump --scope all --front-n 3", "--front-n needs --scope front_n"),
        ("measure dump --run-log x", "--run-log needs --analysis"),
        ("measure dump --allow-fp16", "--allow-fp16 needs --to-fp16"),
        ("measure dump --analysis x --encode", "--encode is not for --analysis"),
        ("measure dump --analysis x --speed load=1M", "--speed load is not for --analysis and --to-fp16"),
        ("measure dump --codec profile:p --speed load=1M", "--speed load is not for --codec (kvmnn bench times codecs"),
        ("measure dump --to-fp16 x --layer-ids 1", "--layer-ids is not for --to-fp16"),
        ("measure dump --dtype bf16", "--dtype is for other inputs than KV dumps, which say it themselves"),
        ("measure dump --kv-heads 2", f"--kv-heads {NO_HEADS} dump holds none"),
        ("store put st kv.npz --name a --token-ids 1", f"--name {NOT_PACKED} kv.npz holds none: --label names a text"),
    ],
)
def test_options_without_effect_are_refused(here, run, argv, said):
    before = sorted(here.iterdir())
    found = run(*argv.split(), code=2)
    assert (found.out, found.err.count("\n")) == ("", 1)
    assert said in found.err
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    "argv",
    [
        "mnn repack missing --model m --target-backend arm64-fp16 -o x/",
        "mnn unpack missing --part stream=0 -o x.npz",
        "mnn unpack missing --raw-blocks -o x.npz",
        "inspect missing --kv-heads 2",
        "inspect k.npy missing --no-zstd --axes htd --valid-tokens 2",
        "encode missing --kv-heads 2 -o x/",
        "encode missing.frame --kv-heads 2 -o x/",
        "verify kv/ --against missing --backend x86-avx2",
        "verify missing --profile p",
        "diff missing kv/ --head-dim 8",
        "diff kv/ missing --head-dim 8",
        "diff kv/ missing --second-valid-tokens 8",
        "measure missing --kv-heads 2",
        "store put st missing --name a --token-ids 1",
        "compressor run w.bin missing --axes htd --kv-heads 2",
        "compressor inspect missing --num-heads 2",
    ],
)
def test_missing_input_is_reported_before_options_without_effect(here, run, argv):
    before = sorted(here.iterdir())
    missing = "missing.frame" if "missing.frame" in argv else "missing"
    assert run(*argv.split(), code=1).err == f"kvmnn: error: {missing}: cannot be read: No such file or directory\n"
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    "argv",
    [
        "inspect sys k.npy --kv-heads 2 --head-dim 4 --valid-tokens 30 --backend x86-avx2",
        "compressor inspect c.pth w.bin --num-heads 2 --head-dim 8",
        "compressor verify w.bin --against c.pth --head-dim 8",
        "measure dump --entry-mode chunked --online-chunk-seq 8",
        "measure dump --front-n 3",
        "compressor export w.bin --onnx --precision fp32 -o onnx/",
    ],
)
def test_options_with_effect_are_accepted(here, run, argv):
    if "--onnx" in argv:
        pytest.importorskip("onnx")
    run(*argv.split())


def test_messages_name_options_of_the_verb(here, run):
    write_prefix(Path("noise"), arrays(2, 2, 64, 8), capacity=64)  # tells nothing
    said = run(
        "mnn",
        "repack",
        "noise",
        "--target-backend",
        "arm64-fp16",
        "--kv-heads",
        2,
        "--head-dim",
        8,
        "--valid-tokens",
        64,
        code=2,
    ).err
    assert "layouts fit the sizes of the files, say which (--backend, --dtype)" in said
    said = run("bench", "noise", code=2).err
    assert "the files do not say kv_heads (--kv-heads)" in said
    assert said.endswith("kvmnn bench has no such option, kvmnn mnn unpack has\n")
    known = ["--kv-heads", "2", "--head-dim", "4", "--valid-tokens", "30", "--backend", "x86-avx2"]
    assert "LOSSY" not in run("compressor", "run", "w.bin", "sys", "-o", "o.npz", *known, code=1).out
