"""encode, decode, inspect and verify: files in, files out, one line of result, the right exit code."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from mlx_files import safetensors

import kvmnn

KEYS = np.random.default_rng(2).standard_normal((4, 30, 32)).astype(np.float16)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("keys.npy", KEYS)
    np.savez("both.npz", k=KEYS, v=-KEYS.astype(np.float32))
    return tmp_path


def shell(*argv: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "kvmnn", *argv], input=data, capture_output=True, timeout=60)


# -- one array ---------------------------------------------------------------------------------------------------------


def test_encode_decode_verify_inspect_work_together(here, run):
    said = run("encode", "keys.npy", "-o", "keys.frame")
    assert "LOSSLESS (decoded and compared)" in said.out
    assert said.err == ""
    assert Path("keys.frame").read_bytes() == kvmnn.encode(KEYS)
    assert "order-0 byte entropy: " in run("inspect", "keys.frame").out
    assert "LOSSLESS (every byte compared" in run("verify", "keys.frame", "--against", "keys.npy").out
    assert "LOSSLESS (read back, sha256" in run("decode", "keys.frame", "-o", "back.npy").out
    assert Path("back.npy").read_bytes() == Path("keys.npy").read_bytes()


def test_rates_are_shown_for_large_inputs_only(here, run):
    np.save("large.npy", np.zeros(1 << 19, np.float16))
    for name, rates in (("keys", 0), ("large", 1)):
        for argv in (
            ["encode", f"{name}.npy", "-o", f"{name}.frame"],
            ["verify", f"{name}.frame"],
            ["decode", f"{name}.frame", "-o", f"{name}.back.npy"],
            ["mnn", "unpack", f"{name}.npy", "-o", f"{name}.out.npy"],
        ):
            said = run(*argv).out
            assert said.count(" MB/s") == rates
            assert ",\n" not in said


def test_lossless_label_needs_a_comparison(here, run):
    said = run("encode", "keys.npy", "-o", "keys.frame", "--no-verify")
    assert "not verified" in said.out
    assert "LOSSLESS" not in said.out
    Path("alone.frame").write_bytes(Path("keys.frame").read_bytes())
    for argv in (["alone.frame"], ["keys.frame", "--ignore", "manifest"]):
        said = run("verify", *argv)
        assert "DECODES" in said.out
        assert "LOSSLESS" not in said.out
    assert "LOSSLESS" not in run("decode", "alone.frame", "-o", "a.npy").out
    assert "LOSSLESS" in run("verify", "alone.frame", "--against", "keys.npy").out
    assert "LOSSLESS" in run("verify", "keys.frame").out


@pytest.mark.parametrize("kind", ["<f2", ">f2", "<i2", "<u2", "<f4", ">f4", ">u4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_decode_restores_the_npy_file(here, run, kind, order):
    np.save("a.npy", np.asarray(KEYS.view(f"<u{kind[2]}").astype(kind), order=order))
    dtype = "fp16" if kind[2] == "2" else "fp32"
    run("encode", "a.npy", "-o", "a.frame", "--dtype", dtype, "--chunk-bytes", "4K")
    run("verify", "a.frame", "--against", "a.npy")
    run("decode", "a.frame", "-o", "b.npy")
    assert Path("a.npy").read_bytes() == Path("b.npy").read_bytes()
    run("decode", "a.frame", "-o", "b.bin")
    assert Path("b.bin").read_bytes() == np.load("a.npy").ravel(order="K").tobytes()


def test_encode_raw_words_round_trip(here, run):
    Path("k.bin").write_bytes(KEYS.tobytes())
    run("encode", "k.bin", "--dtype", "bf16", "-o", "k.frame")
    run("verify", "k.frame", "--against", "k.bin")
    run("decode", "k.frame", "-o", "k.npy")
    assert np.load("k.npy").dtype == np.uint16
    run("decode", "k.frame", "-o", "back.bin")
    assert Path("back.bin").read_bytes() == KEYS.tobytes()


def test_decode_frame_without_manifest_is_one_dimensional(here, run):
    Path("k.frame").write_bytes(kvmnn.encode(KEYS))
    run("decode", "k.frame", "-o", "k.npy")
    np.testing.assert_array_equal(np.load("k.npy").view(np.uint16), KEYS.ravel().view(np.uint16))
    run("decode", "k.frame", "-o", "b.npy", "--dtype", "bf16")
    assert np.load("b.npy").dtype == np.uint16


def test_encode_without_output_names_a_file(here, run):
    """Even if standard output is redirected: notebooks and logs get no binary data."""
    assert "LOSSLESS" in run("encode", "keys.npy").out
    assert Path("keys.npy.frame.json").exists()
    Path("keys.npy").unlink()
    assert "LOSSLESS" in run("decode", "keys.npy.frame").out
    np.testing.assert_array_equal(np.load("keys.npy"), KEYS)
    run("encode", "both.npz")
    assert Path("both.npz.frames/manifest.json").exists()
    assert "no output given" in run("encode", "keys.npy", "both.npz", code=2).err
    assert "no output given" in run("decode", "both.npz.frames", code=2).err
    assert "no output given" in run("decode", "both.npz.frames/manifest.json", code=2).err
    Path("lone.bin").write_bytes(kvmnn.encode(KEYS))
    assert "no output given" in run("decode", "lone.bin", code=2).err


def test_encode_no_zstd_uses_rle_only(here, run):
    run("encode", "keys.npy", "-o", "k.frame", "--no-zstd")
    assert Path("k.frame").read_bytes() == kvmnn.encode(KEYS, codecs=("rle",))
    run("verify", "k.frame", "--no-zstd")
    run("encode", "keys.npy", "-o", "z.frame")
    assert "z.frame" in run("decode", "z.frame", "--no-zstd", "-o", "x.npy", code=1).err


def test_quiet_prints_nothing(here, run):
    for argv in (("encode", "keys.npy", "-o", "k.frame"), ("decode", "k.frame", "-o", "k.npy"), ("verify", "k.frame")):
        out, err = run(*argv, "-q")
        assert (out.count("LOSSLESS"), err) == (1, "")
    assert "keys" in run("encode", "keys.npy", "-o", "k.frame", "-f", "-v").out


# -- many arrays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", ["back.npz", "back.safetensors", "back/"])
def test_encode_bundle_round_trips(here, run, back):
    run("encode", "both.npz", "-o", "out/", "--chunk-bytes", "4096")
    assert sorted(path.name for path in Path("out").iterdir()) == ["k.frame", "manifest.json", "v.frame"]
    assert "2 arrays" in run("verify", "out", "--against", "both.npz").out
    run("decode", "out", "-o", back)
    again = back if not back.endswith("/") else None
    if again:
        run("verify", "out/manifest.json", "--against", again)
    else:
        np.testing.assert_array_equal(np.load("back/k.npy"), KEYS)
        run("verify", "out", "--against", "back/k.npy", "--against", "back/v.npy")


def test_decode_to_npz_equals_numpy(here, run):
    run("encode", "both.npz", "-o", "out")
    run("decode", "out", "-o", "back.npz")
    with np.load("back.npz") as back, np.load("both.npz") as both:
        assert back.files == both.files
        for name in both.files:
            np.testing.assert_array_equal(back[name], both[name])
            assert back[name].dtype == both[name].dtype


def test_safetensors_metadata_round_trips(here, run):
    from kvmnn.arrays.array import ArrayInfo
    from kvmnn.formats.safetensors import build_header

    head, _ = build_header([ArrayInfo(name="k", dtype="fp16", shape=KEYS.shape, array_dtype="<f2")], {"model": "tiny"})
    Path("a.safetensors").write_bytes(head + KEYS.tobytes())
    run("encode", "a.safetensors", "-o", "a.frame")
    run("decode", "a.frame", "-o", "b.safetensors")
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()


def test_tensor_option_selects_arrays(here, run):
    run("encode", "both.npz", "--tensor", "v", "-o", "v.frame")
    run("verify", "v.frame", "--against", "both.npz", "--tensor", "v")
    assert "DIFFERS" not in run("verify", "v.frame").out
    assert "array 'k' is not in the frames" in run("verify", "v.frame", "--against", "both.npz", code=1).err
    np.savez("mixed.npz", k=KEYS, ids=np.arange(3))
    assert "int64" in run("encode", "mixed.npz", "-o", "m.frame", code=1).err
    said = run("encode", "mixed.npz", "-o", "m.frame", "--ignore", "unsupported")
    assert said.err.startswith("kvmnn: skipped: mixed.npz: member 'ids.npy'")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("part", ["", "k:", "v:", "hi:"])
def test_encode_unknown_predictor_is_refused(here, run, part):
    np.save("k.npy", np.zeros((2, 4, 8), np.float16))
    error = run("encode", "k.npy", "--predictors", f"{part}raw,bogus", code=2).err
    assert "unknown predictor 'bogus': expected raw, delta_seq, xor_seq" in error
    assert not Path("k.npy.frame").exists()


def test_encode_separate_predictors_for_keys_and_values(here, run):
    run("encode", "both.npz", "-o", "out", "--predictors", "k:xor_seq", "--predictors", "v:delta_seq")
    with np.load("both.npz") as archive:
        both = dict(archive)
    assert Path("out/k.frame").read_bytes() == kvmnn.encode(both["k"], predictors="xor_seq")
    assert Path("out/v.frame").read_bytes() == kvmnn.encode(both["v"], predictors="delta_seq")
    assert json.loads(Path("out/manifest.json").read_text())["predictors"] == ["delta_seq", "xor_seq"]
    assert "xor_seq+" in run("inspect", "out").out
    run("verify", "out", "--against", "both.npz")
    run("encode", "both.npz", "-o", "some", "--predictors", "v:delta_seq", "--predictors", "raw")
    assert Path("some/k.frame").read_bytes() == kvmnn.encode(both["k"], predictors="raw")
    np.save("weights.npy", KEYS)
    assert "neither K nor V by its name" in run("encode", "weights.npy", "--predictors", "k:raw", code=1).err
    assert not Path("weights.npy.frame").exists()


def test_encode_inputs_of_equal_names_are_numbered(here, run):
    Path("run").mkdir()
    np.save("run/keys.npy", KEYS + 1)
    run("encode", "keys.npy", "run/keys.npy", "-o", "out")
    names = [array["name"] for array in json.loads(Path("out/manifest.json").read_text())["arrays"]]
    assert names == ["keys", "keys~2"]
    run("verify", "out", "--against", "keys.npy", "--against", "run/keys.npy")


def test_encode_into_existing_directory_keeps_other_files(here, run):
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    run("encode", "keys.npy", "-o", "out")
    assert sorted(path.name for path in Path("out").iterdir()) == ["keys.frame", "manifest.json", "notes.txt"]
    assert "exists already" in run("encode", "keys.npy", "-o", "out", code=1).err
    run("encode", "keys.npy", "-o", "out", "--force", "--effort", "fast")
    assert "effort fast" in run("inspect", "out").out


# -- inspect, JSON -----------------------------------------------------------------------------------------------------


def test_inspect_frame_equals_python_inspect(here, run):
    Path("k.frame").write_bytes(kvmnn.encode(KEYS))
    assert str(kvmnn.inspect(Path("k.frame").read_bytes())) in run("inspect", "k.frame").out
    (found,) = json.loads(run("inspect", "k.frame", "--json").out)["inputs"]
    assert found.pop("input") == "k.frame"
    assert found.pop("kind") == "frame"
    assert found == kvmnn.inspect(Path("k.frame").read_bytes()).to_dict()


def test_inspect_bundle_and_arrays(here, run):
    run("encode", "both.npz", "-o", "out", "--chunk-bytes", "4K")
    text = run("inspect", "out").out
    assert "fp32 lane3" in text
    assert "total: 23,040 ->" in text
    assert run("inspect", "-v", "out").out.count("words, ") == 6
    found = json.loads(run("inspect", "out", "keys.npy", "--json").out)["inputs"]
    assert [f["kind"] for f in found] == ["bundle", "arrays"]
    streams = found[0]["streams"]
    headers = 4 * sum(len(array["frames"]) for array in found[0]["arrays"])
    assert sum(s["payload_bytes"] + s["header_bytes"] for s in streams.values()) + headers == found[0]["stored_bytes"]
    assert found[1]["arrays"][0]["name"] == "keys"


def test_json_output_is_one_document(here, run):
    for argv in (
        ["encode", "keys.npy", "-o", "k.frame"],
        ["verify", "k.frame"],
        ["decode", "k.frame", "-o", "b.npy"],
        ["verify", "k.frame", "--against", "b.npy"],
    ):
        said = run(*argv, "--json")
        document = json.loads(said.out)
        assert document["verb"] == argv[0]
        assert document["label"] == "LOSSLESS"
        assert said.err == ""
    np.save("other.npy", KEYS + 1)
    said = run("verify", "k.frame", "--against", "other.npy", "--json", code=1)
    document = json.loads(said.out)
    assert (document["label"], document["difference"]["array"]) == ("DIFFERS", "keys")


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_encode_and_decode_through_pipes():
    made = shell("encode", "-", "--dtype", "fp16", data=KEYS.tobytes())
    assert made.returncode == 0, made.stderr
    assert made.stdout == kvmnn.encode(KEYS)
    assert b"LOSSLESS" in made.stderr
    back = shell("decode", "-", "-o", "-", "-q", data=made.stdout)
    assert (back.returncode, back.stdout, back.stderr) == (0, KEYS.tobytes(), b"")


def test_encode_npy_from_standard_input():
    buffer = io.BytesIO()
    np.save(buffer, KEYS)
    assert shell("encode", "-", data=buffer.getvalue()).stdout == kvmnn.encode(KEYS)


def test_encode_to_a_stream_has_the_label_of_what_was_lost(here):
    metadata = {"kvmnn.lossy": "rounded by a cast: fp32 to fp16"}
    tensors = {"layer_0.key": ("F16", list(KEYS.shape), KEYS.tobytes())}
    Path("k.safetensors").write_bytes(safetensors(Random(0), tensors, metadata))
    source = kvmnn.open("k.safetensors")
    results = [kvmnn.bundle.encode_source(source, output) for output in (io.BytesIO(), "k.frame")]
    assert {result.label for result in results} == {"LOSSLESS copy of LOSSY K and V"}
    assert "LOSSY: rounded by a cast: fp32 to fp16" in str(results[0])


def test_encode_several_frames_to_standard_output_is_refused(here, run):
    assert "use --chunk-bytes 0 or -o FILE" in run("encode", "keys.npy", "-o", "-", "--chunk-bytes", "4K", code=2).err
    assert "carries one frame, not 2" in run("encode", "both.npz", "-o", "-", code=2).err
    assert "--json" in run("encode", "keys.npy", "-o", "-", "--json", code=2).err
    run("encode", "both.npz", "-o", "out")
    assert "carries one array, not 2" in run("decode", "out", "-o", "-", code=2).err


# -- the command itself ------------------------------------------------------------------------------------------------


def test_version_names_libraries(run):
    text = run("--version").out
    assert text.startswith(f"kvmnn {kvmnn.__version__}\n")
    for word in (
        "Python 3",
        "numpy ",
        f"zstd {kvmnn.frames.zstd.get_version()}",
        "byte-exact with MNN: ",
        "SIMD level: ",
    ):
        assert word in text


def test_help_lists_verbs(run):
    assert "VERB" in run().out
    for verb in ("encode", "decode", "inspect", "verify", "bench"):
        assert verb in run("--help").out
        assert "--json" in run(verb, "--help").out
