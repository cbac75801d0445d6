"""Dense streams on the command line: encode, transcode, measure; messages and refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from dense_samples import near_rows, rotated, to_dtype

import kvmnn

TOKENS = 150


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(4)
    arrays = {}
    for number in range(2):
        keys = rotated(near_rows(rng, 2, TOKENS, 16), 8, 500.0, np.arange(TOKENS), "interleaved")
        arrays[f"layer_{number}.key"] = to_dtype(keys, "fp16")
        arrays[f"layer_{number}.value"] = to_dtype(near_rows(rng, 2, TOKENS, 16), "fp16")
    np.savez("kv.npz", **arrays)
    np.save("k.npy", arrays["layer_0.key"])
    np.savez("other.npz", mask=np.ones((2, 90), np.float16))
    Path("model").mkdir()
    document = {"rope_theta": 500, "hidden_size": 64, "num_attention_heads": 4, "partial_rotary_factor": 0.5}
    Path("model/config.json").write_text(json.dumps(document | {"model_type": "gptj"}))
    return tmp_path


ROPE = "theta=500,dims=8,pairing=interleaved"


def test_dense_encode_verify_decode_inspect(run):
    said = run("encode", "kv.npz", "-o", "d/", "--codec", "dense", "--rope", ROPE).out
    assert said.startswith("d/ (4 arrays): 38,400 -> ") and ", 4 dense streams, LOSSLESS (decoded and compared)" in said
    assert "LOSSLESS (decoded, sha256 of the manifest), 4 arrays" in run("verify", "d").out
    assert "LOSSLESS (every byte compared with kv.npz)" in run("verify", "d", "--against", "kv.npz").out
    assert run("diff", "d", "kv.npz").out.startswith("equal: ")
    said = run("inspect", "d").out
    assert "made by kvmnn" in said and "dense streams alone" in said and "dense rows x4" in said
    run("decode", "d", "-o", "back.npz")
    with np.load("back.npz") as back, np.load("kv.npz") as before:
        assert {name: back[name].tobytes() for name in back} == {name: before[name].tobytes() for name in before}


def test_dense_rope_is_read_from_the_model(run):
    for name, argv in (("r", ["--rope", ROPE]), ("m", ["--model", "model"]), ("c", ["--model", "model/config.json"])):
        run("encode", "kv.npz", "-o", f"{name}/", "--codec", "dense", *argv)
    assert len({Path(name, "layer_1.key.frame").read_bytes() for name in "rmc"}) == 1
    Path("model/config.json").write_text('{"model_type": "gpt2", "n_embd": 64}')
    found = run("encode", "kv.npz", "-o", "n/", "--codec", "dense", "--model", "model")
    assert "model: its configuration says no rotary parameters (such as rope_theta): --rope gives them" in found.err
    assert "found by trial (--rope or --model says it)" in found.err
    run("encode", "kv.npz", "-o", "u/", "--codec", "dense")  # what is not said is found as where no model is given
    assert Path("n/layer_0.key.frame").read_bytes() == Path("u/layer_0.key.frame").read_bytes()


def test_dense_rope_is_found_by_trial(run):
    rng = np.random.default_rng(5)
    keys = rotated(near_rows(rng, 2, 400, 32, 40), 32, 10000.0, np.arange(400), "half")
    np.savez("found.npz", **{"layer_0.key": keys, "layer_0.value": near_rows(rng, 2, 400, 32, 40)})
    told = run("encode", "found.npz", "-o", "t/", "--codec", "dense", "--rope", "dims=32")
    found = run("encode", "found.npz", "-o", "f/", "--codec", "dense")
    note = "kvmnn: note: rotation of K: theta=10000,dims=32, found by trial (--rope or --model says it)\n"
    assert (told.err, found.err) == ("", note)
    assert Path("t/layer_0.key.frame").read_bytes() == Path("f/layer_0.key.frame").read_bytes()
    run("encode", "found.npz", "-o", "n/", "--codec", "dense", "--rope", "none")
    assert Path("n/layer_0.key.frame").stat().st_size > Path("f/layer_0.key.frame").stat().st_size
    for verb in (["measure", "found.npz", "--dense"], ["encode", "n", "-o", "g/", "--codec", "dense"]):
        assert run(*verb).err.endswith(note)
    assert Path("t/layer_0.key.frame").read_bytes() == Path("g/layer_0.key.frame").read_bytes()
    np.savez("plain.npz", **{"layer_0.key": near_rows(rng, 2, 400, 32, 40)})
    missed = run("encode", "plain.npz", "-o", "m/", "--codec", "dense").err
    assert missed.startswith("kvmnn: note: rotation of K: none found by trial, K is encoded as V is (--rope or")
    np.savez("values.npz", **{"layer_0.value": near_rows(rng, 2, 400, 32, 40)})
    for argv in (["encode", "values.npz", "-o", "v/", "--codec", "dense"], ["measure", "values.npz", "--dense"]):
        said = run(*argv)
        assert "LOSSLESS" in said.out and "rotation" not in said.out + said.err  # there is no K


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["kv.npz", "--rope", ROPE], 2, "--rope needs --codec dense"),
        (["kv.npz", "--model", "model"], 2, "--model is about packed files of MNN's and caches of llama.cpp"),
        (["kv.npz", "--codec", "dense", "--rope", "dims=x"], 2, "expected numbers, as in theta=10000,dims=64"),
        (["kv.npz", "--codec", "dense", "--rope", "dims=3"], 2, "dims is 3: expected an even number"),
        (["kv.npz", "--codec", "dense", "--rope", "dims=8,dims=8"], 2, "expected theta=10000,dims=64"),
        (["kv.npz", "--codec", "dense", "--rope", "theta=5"], 2, "does not say how many words of a head are rotated"),
        (["kv.npz", "--codec", "dense", "--rope", "theta=x"], 2, "expected numbers, as in theta=10000,dims=64"),
        (["kv.npz", "--codec", "dense", "--rope", "theta=nan,dims=8"], 2, "theta is nan"),
        (["kv.npz", "--codec", "dense", "--rope", "dims=32"], 2, "has 16 words a head: 32 of them cannot be rotated"),
        (["kv.npz", "--codec", "dense", "--no-zstd"], 2, "--no-zstd is about engines, and none reads dense streams"),
        (
            ["kv.npz", "--codec", "dense", "--token-ids", "5,7"],
            2,
            "2 token ids are fewer than the tokens of every layer",
        ),
        (
            ["kv.npz", "--codec", "dense", "--model", "nowhere"],
            1,
            "nowhere: cannot be read: No such file or directory",
        ),
        (["other.npz", "--codec", "dense"], 2, "no array can be a dense stream: array 'mask': its name does not say"),
        (["kv.npz", "--codec", "tight"], 2, "'tight': expected mnn, dense, profile:FILE"),
        (["kv.npz", "--codec", "dense", "-o", "z.zarr"], 2, "every chunk of a Zarr store is a frame"),
    ],
)
def test_dense_encode_invalid_options_are_refused(run, argv, code, message):
    output = [] if "-o" in argv else ["-o", "d/"]
    found = run("encode", *output, *argv, code=code)
    assert message in found.err and found.err.count("\n") == 1
    assert not Path("d").exists() and not Path("z.zarr").exists()


def test_dense_transcode_and_back_gives_equal_frames(run):
    run("encode", "kv.npz", "other.npz", "-o", "f/")
    said = run("encode", "f", "-o", "d/", "--codec", "dense", "--rope", ROPE).out
    assert "4 dense streams, 1 frame, LOSSLESS" in said and "\n  f has " in said
    run("encode", "d", "-o", "back/", "--codec", "mnn")
    for path in Path("f").iterdir():
        assert Path("back", path.name).read_bytes() == path.read_bytes()
    found = json.loads(run("encode", "d", "-o", "fast/", "--codec", "mnn", "--effort", "fast", "--json").out)
    assert (found["verb"], found["input"], found["effort"], found["label"]) == ("transcode", "d", "fast", "LOSSLESS")


def test_dense_stream_without_manifest_is_read(run):
    run("encode", "k.npy", "-o", "k.frame", "--codec", "dense", "--rope", ROPE)
    run("encode", "k.npy", "-o", "m.frame")
    stream = Path("k.frame").read_bytes()
    Path("lone").write_bytes(stream)
    run("encode", "lone", "-o", "n.frame", "--codec", "mnn")
    assert Path("n.frame").read_bytes() == Path("m.frame").read_bytes()
    run("decode", "lone", "-o", "back.npy")
    assert Path("back.npy").read_bytes() == Path("k.npy").read_bytes()
    assert "DECODES" in run("verify", "lone").out
    said = run("inspect", "lone").out
    assert said.startswith("lone: fp16 dense stream [2, 150, 16]") and f"rotary {ROPE}" in said
    assert json.loads(run("inspect", "lone", "--json").out)["inputs"][0]["kind"] == "dense"
    Path("lone").write_bytes(stream[:-1])
    assert "dense stream has " in run("decode", "lone", "-o", "x.npy", code=1).err
    for end in (0, 3, 4, 27, 28):
        Path("short.frame").write_bytes(stream[:end])
        assert run("decode", "short.frame", "-o", "x.npy", code=1).err.count("\n") == 1 and not Path("x.npy").exists()


def test_streams_and_frames_are_read_under_any_name(run):
    run("encode", "k.npy", "-o", "k.frame", "--codec", "dense", "--rope", ROPE)
    Path("k.kvmd").write_bytes(Path("k.frame").read_bytes())
    run("diff", "k.kvmd", "k.npy")
    assert np.array_equal(kvmnn.open("k.kvmd")["k.kvmd"].to_numpy(), np.load("k.npy"))
    run("encode", "k.npy", "-o", "m.frame")
    np.save("flat.npy", np.load("k.npy").ravel())
    frame = Path("m.frame").read_bytes()
    Path("frames").write_bytes(frame * 2)
    assert np.array_equal(kvmnn.open("frames")["frames"].to_numpy(), np.tile(np.load("flat.npy"), 2))
    Path("frames").write_bytes(frame)
    run("diff", "frames", "flat.npy")
    Path("frames").write_bytes(frame + b"\0\0")
    assert "frames: not a file kvmnn knows" in run("diff", "frames", "flat.npy", code=2).err
    Path("even").write_bytes(frame * 2)  # of words, where that is said
    assert kvmnn.open("even", dtype="fp16")["even"].shape == (len(frame),)


def test_transcode_reports_standard_input(run, monkeypatch):
    run("encode", "k.npy", "-o", "k.frame", "--codec", "dense", "--rope", ROPE)
    with Path("k.frame").open("rb") as stream:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stream))
        said = run("encode", "-", "-o", "m.frame", "--codec", "mnn").out
    assert f"  standard input has {Path('k.frame').stat().st_size:,} bytes for the same arrays" in said


def test_encode_folder_named_like_a_file_is_noted(run):
    said = "k.kvmd becomes a folder, as 4 arrays are not one file (-o k.kvmd/ says so)"
    assert said in run("encode", "kv.npz", "-o", "k.kvmd", "--codec", "dense", "--rope", ROPE).err
    assert "becomes a folder" not in run("encode", "kv.npz", "-o", "k.kvmd", "-f").err
    assert "becomes a folder" not in run("encode", "kv.npz", "-o", "f").err
    assert "m.frames becomes a folder" in run("encode", "f", "-o", "m.frames", "--codec", "mnn").err


@pytest.mark.parametrize("verb", [("encode", "-o", "w/", "--codec", "dense"), ("measure", "--dense")])
def test_dense_name_without_k_or_v_is_exit_code_2_with_hint(run, verb):
    words = np.load("k.npy").transpose(1, 0, 2)[None]
    np.save("words.npy", words)
    np.save("k1.npy", words)
    for axes in ((), ("--axes", "lthd")):
        said = run(verb[0], "words.npy", *verb[1:], *axes, code=2).err
        assert "by its name" in said or "its name does not say" in said
        assert "(an array of a .npy file is called as the file)" in said
    run(verb[0], "k1.npy", *verb[1:], "--axes", "lthd")
    np.save("words.npy", np.stack([words, words]))
    run(verb[0], "words.npy", *verb[1:], "--axes", "2lthd", *(["-f"] if verb[0] == "encode" else []))


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["f", "-o", "d/"], 1, "is a kvmnn bundle of frames: decode it, or encode it with --codec dense or mnn"),
        (
            ["f", "--codec", "mnn", "-o", "d/", "--predictors", "raw"],
            2,
            "--predictors is not about frames, and f is some",
        ),
        (["f", "--codec", "dense"], 2, "no output given: use -o FILE, -o DIR/ or -o -"),
        (["f", "--codec", "mnn", "-o", "d/", "--rope", ROPE], 2, "--rope needs --codec dense"),
        (["f", "--codec", "mnn", "-o", "d/", "--token-ids", "1,2"], 2, "--token-ids needs --codec dense"),
        (["f", "--codec", "mnn", "-o", "f/"], 1, "is the input itself"),
        (["f", "--codec", "mnn", "-o", "f/", "-f"], 1, "is the input itself"),
        (["f", "--codec", "mnn", "-o", "k.npy"], 1, "k.npy"),
        (["f", "--codec", "mnn", "-o", "-"], 2, "a stream carries one frame, not 4"),
        (
            ["kv.npz", "--codec", "mnn", "-o", "d/", "--ignore=manifest"],
            2,
            "--ignore manifest is about frames, with --codec",
        ),
        (["f", "--codec", "mnn", "-o", "d.zarr"], 2, "-o d.zarr: a Zarr store is made of arrays (kvmnn decode)"),
        (["nowhere", "--codec", "mnn", "-o", "d/"], 1, "nowhere: "),
    ],
)
def test_transcode_invalid_inputs_are_refused(run, argv, code, message):
    run("encode", "kv.npz", "-o", "f/")
    before = {path.name: path.read_bytes() for path in Path("f").iterdir()}
    found = run("encode", *argv, code=code)
    assert message in found.err and found.err.count("\n") == 1
    assert not Path("d").exists()
    assert {path.name: path.read_bytes() for path in Path("f").iterdir()} == before


def test_measure_dense_reports_sizes(run):
    run("encode", "kv.npz", "-o", "f/")
    run("encode", "kv.npz", "-o", "d/", "--codec", "dense", "--model", "model")
    said = run("measure", "kv.npz", "--dense", "--model", "model").out
    assert (
        "exact: frames as MNN makes them, of arrays as they lie; dense: streams for kvmnn alone" in said
        and "LOSSLESS" in said
    )
    assert f"K taken as rotated (RoPE) by {ROPE}" in said
    found = json.loads(run("measure", "kv.npz", "--dense", "--rope", ROPE, "--json").out)
    assert found["overall"]["layers"] == 2 and found["rotary"] and found["rope"] == ROPE
    for name in ("0", "1"):
        for part, key in (("key", "k"), ("value", "v")):
            sizes = found["layers"][name][key]
            assert sizes["exact_bytes"] == Path(f"f/layer_{name}.{part}.frame").stat().st_size
            assert sizes["dense_bytes"] == Path(f"d/layer_{name}.{part}.frame").stat().st_size
            assert f"{sizes['dense_ratio']:.4f}" in said and f"{sizes['exact_bytes']:,}" in said
    both = json.loads(run("measure", "d", "--dense", "--rope", ROPE, "--json").out)
    assert both["layers"] == found["layers"]
    said = run("measure", "kv.npz", "other.npz", "--dense", "--rope", "none").out
    assert "left out, no K or V of layers: mask" in said and "without rotation (--rope or --model says how" in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rope", ROPE], "--rope needs --dense"),
        (["--dense", "--encode"], "--encode is not for --dense, which takes all layers as they are"),
        (["--dense", "--zstd-level", "5"], "--zstd-level is not for --dense"),
        (["--dense", "--front-n", "1"], "--front-n is not for --dense"),
        (["--dense", "--analysis", "x"], "--analysis, --to-fp16, --dense and --codec exclude each other"),
        (["--model", "model"], "--model is about packed files of MNN's"),
    ],
)
def test_measure_dense_invalid_options_are_refused(run, argv, message):
    found = run("measure", "kv.npz", *argv, code=2)
    assert message in found.err and found.err.count("\n") == 1


def test_dense_decode_k_and_v_get_separate_names(run):
    run("encode", "kv.npz", "-o", "d/", "--codec", "dense", "--rope", "none")
    for part in ("key", "value"):
        run("decode", f"d/layer_0.{part}.frame")
        assert np.load(f"d/layer_0.{part}.npy").size
    assert not Path("d/layer_0.npy").exists()


def test_dense_keys_alone_with_axes(run):
    np.save("keys.npy", np.load("k.npy").transpose(1, 0, 2)[None])
    run("encode", "keys.npy", "-o", "alone/", "--codec", "dense", "--axes", "lthd", "--rope", "none")
    run("encode", "k.npy", "-o", "plain/", "--codec", "dense", "--rope", "none")
    made = next(Path("alone").glob("*.frame")).read_bytes()
    assert made == next(Path("plain").glob("*.frame")).read_bytes()
    assert "kvmnn dense" in run("bench", "keys.npy", "--axes", "lthd", "--repeats", "1").out


def test_dense_verify_needs_the_axes_of_encode(run):
    np.save("keys.npy", np.stack([np.load("k.npy").transpose(1, 0, 2)] * 2))
    run("encode", "keys.npy", "-o", "alone/", "--codec", "dense", "--axes", "lthd", "--rope", "none")
    assert "LOSSLESS" in run("verify", "alone", "--against", "keys.npy", "--axes", "lthd").out
    assert "by --axes, then part these, too" in run("verify", "alone", "--against", "keys.npy", code=1).err


def test_dense_rope_is_recorded_in_the_manifest(run):
    made = json.loads(run("encode", "kv.npz", "-o", "d/", "--codec", "dense", "--model", "model", "--json").out)
    document = json.loads(Path("d/manifest.json").read_text())
    assert made["rope"] == ROPE and json.loads(run("inspect", "d", "--json").out)["inputs"][0]["rope"] == ROPE
    assert [array["frames"][0].get("rope") for array in document["arrays"]] == [ROPE, None, ROPE, None]
    run("encode", "kv.npz", "-o", "n/", "--codec", "dense", "--rope", "none")
    assert "rope" not in Path("n/manifest.json").read_text()


def test_dense_manifest_omits_frame_settings(run):
    settings = ("effort", "codecs", "predictors", "hi_predictors")
    run("encode", "kv.npz", "-o", "d/", "--codec", "dense", "--rope", "none")
    run("encode", "kv.npz", "other.npz", "-o", "both/", "--codec", "dense", "--rope", "none")
    document, both = (json.loads(Path(name, "manifest.json").read_text()) for name in ("d", "both"))
    assert [document[name] for name in settings] == [None, [], [], None] and both["effort"] == "exact"
    run("encode", "kv.npz", "-o", "f/")
    run("encode", "d", "-o", "back/", "--codec", "mnn")
    assert all(path.read_bytes() == Path("back", path.name).read_bytes() for path in Path("f").iterdir())


def test_dense_unused_frame_options_are_noted(run):
    options = ["--codec", "dense", "--rope", "none", "--effort", "fast", "--allow-raw"]
    said = " ".join(run("encode", "kv.npz", "-o", "d/", *options).err.split())
    assert "note: all arrays became dense streams: --effort and --allow-raw changed none of them" in said
    assert "became" not in run("encode", "kv.npz", "other.npz", "-o", "e/", *options).err
    assert "became" not in run("encode", "kv.npz", "-o", "f/", *options[:4]).err
    run("encode", "d", "-o", "fast/", "--codec", "mnn")  # which the manifest has, for frames of them
    assert json.loads(Path("fast/manifest.json").read_text())["effort"] == "fast"


@pytest.mark.parametrize("of", ["arrays", "frames"])
def test_dense_existing_output_is_refused_before_rope_search(run, monkeypatch, of):
    run("encode", "kv.npz", "-o", "f/")
    run("encode", "k.npy", "-o", "k.frame")
    Path("out").mkdir()
    Path("out/layer_1.value.frame").write_bytes(b"x")
    monkeypatch.setattr("kvmnn.bundle.search_rope", lambda *_: pytest.fail("was looked for"))
    for name, output in (("kv.npz" if of == "arrays" else "f", "out/"), ("k.npy", "k.frame")):
        name = "k.frame" if of == "frames" and name == "k.npy" else name
        found = run("encode", name, "-o", output, "--codec", "dense", code=1)
        assert "exists already" in found.err or "is the input itself" in found.err
        assert found.err.count("\n") == 1 and sorted(path.name for path in Path("out").iterdir()) == [
            "layer_1.value.frame"
        ]
