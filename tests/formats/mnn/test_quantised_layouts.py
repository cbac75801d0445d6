"""Files that fit no layout of floats: int8 K is tried, and TQ3 and TQ4 rows are named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import llm_kv
import numpy as np
import pytest
from engine_client import unpack_fixture

from kvmnn import PackedCache
from kvmnn.packed.inference import PackedGeometry

HEADS = ("--kv-heads", 3, "--head-dim", 64)
ADDRESSES = ("00005500AAAA0000", "00005500AAAA1000")


def write_live(folder: Path, backend: str, int8: str, tokens: int) -> None:
    """Files of a session with int8 K, or K and V."""
    folder.mkdir()
    geometry = PackedGeometry(kv_heads=3, head_dim=64, backend=backend, flash_block=64, int8=int8)
    ((_, layout),) = geometry.list_candidates()
    arrays = llm_kv.read_layers(tokens)
    for layer, address in enumerate(ADDRESSES):
        cache = PackedCache(layout)
        cache.append(arrays[2 * layer], arrays[2 * layer + 1])
        for part, buffer in zip("kv", (cache.key_buffer, cache.value_buffer), strict=True):
            (folder / f"{address}.{part}").write_bytes(np.asarray(buffer).tobytes())


@pytest.mark.parametrize(
    "backend", ["x86-avx2", "x86-sse", "x86-avx512", "arm64-fp32-i8mm", "arm64-fp32-sdot", "arm64-sme2-fp32"]
)
def test_unpack_int8_keys_are_inferred(tmp_path, run, backend):
    write_live(tmp_path / "p", backend, "keys", 90)
    order = ("--layer-order", ",".join(ADDRESSES), "--valid-tokens", 90)
    said = run("mnn", "unpack", tmp_path / "p", *HEADS, *order, "-o", tmp_path / "x.npz")
    assert re.search(r"int8 K inferred \(--backend [\w-]+,int8=keys, attention_mode 9\)", said.err)
    assert "LOSSY" in said.out
    with np.load(tmp_path / "x.npz") as arrays:
        expected = llm_kv.read_layers(90)
        np.testing.assert_allclose(arrays["layer_1.value"], expected[3], rtol=1e-3)
        error = arrays["layer_0.key"] - (expected[0] - expected[0].max(axis=1, keepdims=True))
        assert np.abs(error).max() < 0.1


def test_unpack_int8_keys_and_values_are_inferred(tmp_path, run):
    write_live(tmp_path / "p", "x86-avx2", "both", 90)
    order = ("--layer-order", ",".join(ADDRESSES), "--valid-tokens", 90)
    stderr = run("mnn", "unpack", tmp_path / "p", *HEADS, *order, "-o", tmp_path / "x.npz").err
    options = "--backend x86-avx2,int8=both"
    assert f"int8 K and V inferred ({options}, attention_mode 10)" in stderr and "lP8 4, hP8 8" in stderr
    run("mnn", "unpack", tmp_path / "p", *HEADS, *order, *options.split(), "-o", tmp_path / "y.npz")  # as the note says
    assert (tmp_path / "y.npz").read_bytes() == (tmp_path / "x.npz").read_bytes()


@pytest.mark.parametrize(("written", "other"), [("keys", "both"), ("both", "keys")])
def test_unpack_of_the_other_int8_kind_names_the_one_that_fits(tmp_path, run, written, other):
    """Some models keep V in floats although attention_mode is 10."""
    write_live(tmp_path / "p", "x86-avx2", written, 90)
    options = (*HEADS, "--valid-tokens", 90, "--layer-order", ",".join(ADDRESSES), "-o", tmp_path / "x.npz")
    stderr = run("mnn", "unpack", tmp_path / "p", *options, "--backend", f"x86-avx2,int8={other}", code=1).err
    assert stderr.rstrip().endswith(f"; the sizes fit int8={written}")
    run("mnn", "unpack", tmp_path / "p", *options, "--backend", f"x86-avx2,int8={written}")


@pytest.mark.parametrize(("name", "row", "mode"), [("TQ3", 28, 11), ("TQ4", 36, 13)])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("options", [(), ("--backend", "x86-avx2")])
def test_commands_rotated_codes_are_named_and_refused(tmp_path, run, name, row, mode, both, options):
    """Sizes as MNN 3.6.1 made them with 40 tokens of 2 heads: 104 rows of 28 or 36 bytes, V of floats 65,536 bytes."""
    folder = tmp_path / "p"
    folder.mkdir()
    for address in ADDRESSES:
        (folder / f"{address}.k").write_bytes(np.random.default_rng(0).bytes(2 * 104 * row))
        (folder / f"{address}.v").write_bytes(np.random.default_rng(1).bytes(2 * 104 * row if both else 65_536))
    order = ("--layer-order", ",".join(ADDRESSES), "--valid-tokens", 40)
    arguments = (folder, "--kv-heads", 2, "--head-dim", 64, *order, *options)
    expected = f"of {name} rows ({row} bytes for 64 dims, attention_mode {mode + both}), which kvmnn does not read"
    assert expected in run("mnn", "unpack", *arguments, "-o", tmp_path / "x.npz", code=1).err
    assert expected in run("inspect", *arguments).out


def test_unpack_mismatch_of_every_layout_is_refused(tmp_path, run):
    folder = tmp_path / "p"
    folder.mkdir()
    for part in "kv":
        (folder / f"{ADDRESSES[0]}.{part}").write_bytes(b"\1" * 10_007)
    said = run(
        "mnn",
        "unpack",
        folder,
        "--kv-heads",
        2,
        "--head-dim",
        64,
        "--valid-tokens",
        4,
        "-o",
        tmp_path / "x.npz",
        code=1,
    ).err
    assert "fit none of the" in said


@pytest.mark.parametrize("command", ["inspect", "measure", "mnn unpack"])
def test_commands_wrong_head_dim_of_tiny_files_is_a_usage_error(tmp_path, run, command):
    rows = np.random.default_rng(0).standard_normal((2, 3, 8)).astype("f4")
    np.savez(tmp_path / "t.npz", **{"layer_0.key": rows, "layer_0.value": rows})
    run("mnn", "pack", tmp_path / "t.npz", "--backend", "x86-avx2", "--name", "s", "-o", tmp_path / "p")
    (tmp_path / "p" / "s.kvmnn.json").unlink()
    output = ("-o", tmp_path / "x.npz") if command == "mnn unpack" else ()
    heads = ("--kv-heads", 2, "--head-dim", 16, "--valid-tokens", 3)
    assert "fit none of the" in run(*command.split(), tmp_path / "p", *heads, *output, code=2).err


@pytest.fixture(scope="module")
def engine_files(tmp_path_factory):
    return unpack_fixture("quantised", tmp_path_factory.mktemp("engine")) / "quantised"


@pytest.mark.parametrize(("mode", "parts"), [(9, "K"), (10, "K and V")])
def test_unpack_int8_of_the_engine_is_inferred(engine_files, tmp_path, run, mode, parts):
    arguments = (engine_files / f"mode_{mode}", "--kv-heads", 2, "--head-dim", 64, "--valid-tokens", 40)
    said = run("mnn", "unpack", *arguments, "-o", tmp_path / "x.npz").err
    assert f"int8 {parts} inferred" in said and "lP 1, hP 4" in said and "(lP8 4, hP8 8), flash block 64" in said
    int8 = ("--backend", f"x86-avx2,int8={'keys' if mode == 9 else 'both'}")
    run("mnn", "unpack", *arguments, *int8, "-o", tmp_path / "y.npz")
    assert "equal" in run("diff", tmp_path / "x.npz", tmp_path / "y.npz").out


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("mode", [9, 10])
def test_unpack_int8_head_without_scales_is_refused(engine_files, tmp_path, run, mode, part):
    """A head that was not written has no scales: its rows are dequantised to zeros."""
    folder = shutil.copytree(engine_files / f"mode_{mode}", tmp_path / "p")
    path = max(folder.glob(f"*[0-9].{part}"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) // 2))
    backend = ("--backend", f"x86-avx2,int8={'keys' if mode == 9 else 'both'}")
    arguments = (folder, "--kv-heads", 2, "--head-dim", 64, "--valid-tokens", 40, *backend)
    message = f"{path.name}: rows 0 to 39 of KV head 1 are zero"
    assert message in run("mnn", "unpack", *arguments, "-o", tmp_path / "x.npz", code=1).err
    assert message in run("mnn", "unpack", *arguments, "--ignore", "contradictions", "-o", tmp_path / "x.npz").err


@pytest.mark.parametrize(
    ("mode", "name"), [(11, "K is of TQ3"), (12, "K and V are of TQ3"), (13, "K is of TQ4"), (14, "K and V are of TQ4")]
)
def test_unpack_rotated_codes_of_the_engine_are_named(engine_files, tmp_path, run, mode, name):
    arguments = (engine_files / f"mode_{mode}", "--kv-heads", 2, "--head-dim", 64, "--valid-tokens", 40)
    assert f"{name} rows" in run("mnn", "unpack", *arguments, "-o", tmp_path / "x.npz", code=1).err


def test_unpack_wrong_head_dim_is_the_first_reason_named(engine_files, tmp_path, run):
    """Int8 K of 2 x 64 have the size of TQ4 rows of 2 x 128."""
    arguments = (engine_files / "mode_9", "--kv-heads", 2, "--head-dim", 128, "--valid-tokens", 40)
    said = run("mnn", "unpack", *arguments, "-o", tmp_path / "x.npz", code=1).err
    assert "kv heads, head_dim or backend are others (--kv-heads, --head-dim, --backend), or K is of TQ4 rows" in said


def test_repack_of_int8_files_says_why_not(tmp_path, run):
    write_live(tmp_path / "p", "x86-avx2", "both", 90)
    options = (*HEADS, "--valid-tokens", 90, "--layer-order", ",".join(ADDRESSES), "--target-backend", "arm64-fp16")
    stderr = run("mnn", "repack", tmp_path / "p", *options, "-o", tmp_path / "out", code=1).err
    assert "K lacks a constant for each channel" in stderr and not (tmp_path / "out").exists()


def test_unpack_int8_of_more_tokens_than_rows_is_refused(tmp_path, run):
    write_live(tmp_path / "p", "x86-avx2", "keys", 90)
    options = (*HEADS, "--layer-order", ",".join(ADDRESSES), "--backend", "x86-avx2,int8=keys")
    refused = run("mnn", "unpack", tmp_path / "p", *options, "--valid-tokens", 96, "-o", tmp_path / "x.npz", code=2)
    assert "--valid-tokens says 96, but K and V of all layers are zero from row 90 on" in refused.err
