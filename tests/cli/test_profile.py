"""kvmnn profile, and --codec profile:FILE and transform:FILE."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time

import linear_samples
import numpy as np
import pytest
from repository import FIXTURES

import kvmnn
from kvmnn.errors import OptionError
from kvmnn.formats import LayerStreamOptions


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A cache of the shipped model, and a profile that is made of another one."""
    from kvmnn.calibration import ProfileOptions, make_profile_from_caches
    from kvmnn.dense import RopeConfig
    from kvmnn.lm import dump_kv

    folder = tmp_path_factory.mktemp("work")
    texts = sorted((FIXTURES / "lm" / "texts").glob("*.txt"))
    for name, text, tokens in (("calib", texts[0], 500), ("kv", texts[1], 150)):
        dump_kv(FIXTURES / "lm", text, folder / name, tokens=tokens)
    rope = RopeConfig(10000.0, 16)
    make_profile_from_caches([folder / "calib"], folder / "p.kvmp", ProfileOptions(below=(0, 1)), rope=rope)
    return folder


def test_profile_make_inspect_and_verify(run, work, tmp_path) -> None:
    made = run("profile make", "--from", work / "calib", "-o", tmp_path / "a.kvmp", "--below", "0", "--rope", "none")
    assert "caches alone" in made.out
    shown = run("profile inspect", tmp_path / "a.kvmp")
    assert "6" in shown.out and "4 kv heads of 64, K not rotated" in shown.out
    document = json.loads(run("profile inspect", tmp_path / "a.kvmp", "--json").out)
    assert document["verb"] == "profile inspect" and len(document["layers"]) == 6
    assert {table["kind"] for table in document["tables"]} == {"linear", "transform"}
    assert "checksums" in run("profile verify", tmp_path / "a.kvmp").out
    assert "names no model" in run("profile verify", tmp_path / "a.kvmp", "--against", FIXTURES / "lm", code=1).err
    data = bytearray((tmp_path / "a.kvmp").read_bytes())
    data[-70] ^= 1
    (tmp_path / "a.kvmp").write_bytes(data)
    assert "damaged" in run("profile verify", tmp_path / "a.kvmp", code=1).err


def test_profile_verify_against_a_model(run, tmp_path) -> None:
    text = sorted((FIXTURES / "lm" / "texts").glob("*.txt"))[2]
    arguments = ["--text", text, "--tokens", "100", "--below", "0", "-o", tmp_path / "a.kvmp"]
    run("profile make", FIXTURES / "lm", *arguments)
    assert "made of this model" in run("profile verify", tmp_path / "a.kvmp", "--against", FIXTURES / "lm").out


def test_profile_make_purpose_selects_tables(run, work, tmp_path) -> None:
    sizes = {}
    for name, words in {
        "lossless": ["--for", "lossless"],
        "head": ["--for", "lossy", "--transform", "head"],
        "none": ["--for", "lossy", "--transform", "none"],
    }.items():
        path = tmp_path / f"{name}.kvmp"
        words = ["--from", work / "calib", "-o", path, "--below", "0", "--rope", "none", *words]
        document = json.loads(run("profile make", *words, "--json").out)
        kind = "linear" if name == "lossless" else "transform"
        assert [table["kind"] for table in document["tables"]] == [kind]
        assert kind in run("profile inspect", path).out
        sizes[name] = document["tables"][0]["bytes"]
    assert sizes["none"] < sizes["head"]
    lossless, lossy = f"profile:{tmp_path / 'none.kvmp'}", f"transform:{tmp_path / 'lossless.kvmp'},ratio=4"
    assert "no sections linear/" in run("encode", work / "kv", "-o", tmp_path / "a/", "--codec", lossless, code=1).err
    assert "no sections transform/" in run("encode", work / "kv", "-o", tmp_path / "a/", "--codec", lossy, code=1).err
    codec = f"profile:{tmp_path / 'lossless.kvmp'},below=2"
    assert "linear/*/2" in run("encode", work / "kv", "-o", tmp_path / "a/", "--codec", codec, code=1).err


def test_small_profiles_and_missed_ratios_are_noted(run, work, tmp_path) -> None:
    assert "500 tokens" in run("profile inspect", work / "p.kvmp").out
    encoded = run("encode", work / "kv", "-o", tmp_path / "s/", "--codec", f"transform:{work / 'p.kvmp'},ratio=40")
    assert "layer streams (transform, ratio=40), " in run("inspect", tmp_path / "s").out
    assert "made of 500 tokens" in encoded.out and "ratio 40 over words of 16 bits was asked for" in encoded.out
    lossless = run("encode", work / "kv", "-o", tmp_path / "t/", "--codec", f"profile:{work / 'p.kvmp'}")
    assert "500 tokens" not in lossless.out
    encoded = run(
        "encode", work / "kv", "-o", tmp_path / "u/", "--codec", f"transform:{work / 'p.kvmp'},ratio=4,below=0"
    )
    reached = json.loads((tmp_path / "u" / "layers.json").read_text())
    ratio = reached["raw_bytes"] / reached["stored_bytes"] / 2  # of fp32
    assert ("was asked for" in encoded.out) == (abs(ratio / 4 - 1) > 0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "x"], "no output"),
        (["-o", "a"], "expected either"),
        (["m", "--from", "x", "-o", "a"], "expected either"),
        (["m", "-o", "a"], "no texts"),
        (["--from", "x", "--tokens", "99", "-o", "a"], "--tokens"),
        (["m", "--text", "x", "--rope", "none", "-o", "a"], "--rope"),
    ],
)
def test_profile_make_options_that_contradict_each_other(run, words, message) -> None:
    assert message in run("profile make", *words, code=2).err


def test_layer_streams_results_name_the_bytes_that_the_ratio_leaves_out(run, work, tmp_path) -> None:
    codec, profile_bytes = f"profile:{work / 'p.kvmp'}", (work / "p.kvmp").stat().st_size
    encoded = run("encode", work / "kv", "-o", tmp_path / "s/", "--codec", codec).out
    document = json.loads(run("encode", work / "kv", "-o", tmp_path / "t/", "--codec", codec, "--json").out)
    document_bytes = (tmp_path / "t" / "layers.json").stat().st_size
    sizes = document["model_profile_bytes"], document["document_bytes"], document["profile_bytes"]
    assert sizes == (profile_bytes, document_bytes, None)
    profile_text = f"(p.kvmp), {profile_bytes:,} bytes, not counted"
    text = f"{profile_text}; layers.json: {(tmp_path / 's' / 'layers.json').stat().st_size:,} bytes, not counted\n"
    for shown in (encoded, run("verify", tmp_path / "s").out, run("inspect", tmp_path / "s").out):
        assert text in shown
    assert f"{profile_text}\n" in run("measure", work / "kv", "--codec", codec).out
    shutil.copytree(tmp_path / "s", tmp_path / "far" / "away" / "s")
    info = json.loads(run("inspect", tmp_path / "s", "--json").out)["inputs"][0]
    assert (info["model_profile_bytes"], info["document_bytes"]) == (
        profile_bytes,
        (tmp_path / "s" / "layers.json").stat().st_size,
    )
    inspected = run("inspect", tmp_path / "far" / "away" / "s").out
    assert "(p.kvmp); layers.json: " in inspected  # without the profile its size is not known


def test_encode_and_decode_with_a_profile(run, work, tmp_path) -> None:
    encoded = run("encode", work / "kv", "-o", tmp_path / "s/", "--codec", f"profile:{work / 'p.kvmp'}", "-v")
    assert "LOSSLESS (decoded and compared)" in encoded.out and "layer 5:" in encoded.out
    assert "layer streams" in run("inspect", tmp_path / "s").out
    for path in (tmp_path / "s").glob("*.kvm*"):
        assert "lossless stream of one layer (name its folder" in run("inspect", path, code=1).err
    assert "LOSSLESS" in run("verify", tmp_path / "s").out
    assert "every byte" in run("verify", tmp_path / "s", "--against", work / "kv").out
    assert "equal" in run("diff", tmp_path / "s", work / "kv").out
    refused = run("decode", tmp_path / "s", "-o", tmp_path / "x.kvmp", code=2).err
    assert "x.kvmp: arrays are written, not a profile: expected one of .npy, .npz, .safetensors, or a folder" in refused
    assert "LOSSLESS (read back, sha256 of layers.json)" in run("decode", tmp_path / "s", "-o", tmp_path / "back/").out
    for path in (work / "kv").glob("*"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name
    shutil.move(work / "p.kvmp", tmp_path / "moved")
    assert "--profile" in run("decode", tmp_path / "s", "-o", tmp_path / "b2/", code=1).err
    run("decode", tmp_path / "s", "-o", tmp_path / "b2/", "--profile", tmp_path / "moved")
    run("verify", tmp_path / "s", "--profile", tmp_path / "moved")
    shutil.move(tmp_path / "moved", work / "p.kvmp")


@pytest.mark.slow
def test_encode_and_pack_of_lossy_streams_say_lossy_in_every_result(run, work, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("encode", work / "kv", "--codec", f"transform:{work / 'p.kvmp'},kl=0.002", "-o", "tr")
    loss, copied = "LOSSY: K and V are rounded; KL divergence", "LOSSLESS copy of LOSSY K and V ("
    profile = f"profile:{work / 'p.kvmp'}"
    commands = [
        ("encode", "tr", "-o", "frames/"),
        ("inspect", "frames"),
        ("verify", "frames"),
        ("decode", "frames", "-o", "frames.npz"),
        ("encode", "frames.npz", "-o", "frames.npz.frames/"),
        ("mnn pack", "tr", "-o", "packed", "--name", "p", "--backend", "x86-avx512"),
        ("inspect", "packed"),
        ("mnn unpack", "packed", "-o", "packed.npz"),
        ("encode", "packed", "-o", "packed.frames/"),
        ("verify", "packed.frames", "--against", "packed"),
        ("decode", "packed.frames", "-o", "restored/"),
        ("encode", "packed", "--codec", profile, "-o", "streams"),
        ("inspect", "streams"),
        ("verify", "streams"),
        ("decode", "streams", "-o", "streams.npz"),
        ("mnn compact", "packed", "--remove", "0", "-o", "whole"),
        ("mnn compact", "packed", "--remove", "100", "--reserve", "0:20", "-o", "cut"),
        ("inspect", "cut"),
        ("mnn unpack", "cut", "--output-kind", "dump", "-o", "dump/"),
        ("encode", "tr", "-o", "x.zarr"),
        ("inspect", "x.zarr"),
        ("verify", "x.zarr"),
        ("decode", "x.zarr", "-o", "x.safetensors"),
        ("encode", "x.safetensors", "-o", "y.zarr"),
        ("encode", "y.zarr", "--no-verify", "-o", "unverified/"),
    ]
    labels = {"whole": "UNCHANGED copy of LOSSY K and V: 150", "dump/": "UNCHANGED copy of LOSSY K and V ("}
    labels |= {"cut": "LOSSY: 70 of 150", "unverified/": "LOSSY (not verified)"}
    for words in commands:
        out = run(*words).out
        assert loss in out, words
        assert words[0] == "inspect" or labels.get(words[-1], copied) in out, out
    for words in (
        ("encode", "tr", "-o", "again/"),
        ("encode", "tr", "-o", "again.zarr"),
        ("encode", "packed", "--codec", profile, "-o", "again.streams"),
        ("decode", "frames", "-o", "again.npz"),
        ("decode", "x.zarr", "-o", "again.safetensors"),
        ("mnn pack", "tr", "-o", "again.packed", "--name", "p", "--backend", "x86-avx512"),
        ("mnn unpack", "packed", "-o", "again.unpacked/"),
        ("mnn compact", "packed", "--remove", "0", "-o", "again.whole"),
        ("verify", "frames"),
        ("verify", "x.zarr"),
        ("verify", "streams"),
        ("inspect", "frames"),
        ("inspect", "x.zarr"),
        ("inspect", "streams"),
    ):
        document = json.loads(run(*words, "--json").out)
        document = document.get("inputs", [document])[0]
        assert [note.startswith(loss) for note in document["notes"]].count(True) == 1, words
        kind = "UNCHANGED" if "compact" in words[0] else "LOSSLESS"
        assert words[0] == "inspect" or document["label"] == f"{kind} copy of LOSSY K and V", words


def test_folder_of_lossy_arrays_records_the_loss(run, work, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    loss, copied = "LOSSY: K and V are rounded; KL divergence", "LOSSLESS copy of LOSSY K and V ("
    run("encode", work / "kv", "--codec", f"transform:{work / 'p.kvmp'},kl=0.002", "-o", "tr")
    decoded = run("decode", "tr", "-o", "folder/")
    assert "LOSSY" in decoded.out and "does not record" not in decoded.out + decoded.err
    for words in (
        ("folder", "-o", "frames/"),
        ("folder/layer_0.key.npy", "-o", "x.frame"),
        ("folder", "-o", "streams", "--codec", f"profile:{work / 'p.kvmp'}"),
    ):
        out = run("encode", *words).out
        assert copied in out and loss in out, out
    exact = run("encode", "folder", "-o", "exact_tr", "--codec", f"transform:{work / 'p.kvmp'},first=150")
    assert "here every error is 0" in exact.out
    run("decode", "exact_tr", "-o", "exact_folder/")
    assert (tmp_path / "exact_folder" / "loss.json").read_text() == (tmp_path / "folder" / "loss.json").read_text()
    run("decode", "frames", "-o", "again/")
    assert (tmp_path / "again" / "loss.json").read_bytes() == (tmp_path / "folder" / "loss.json").read_bytes()
    single = run("decode", "x.frame", "-o", "single.npy")
    assert "single.npy does not record that K and V are LOSSY" in single.out + single.err
    run("encode", work / "kv", "-o", "exact/")
    run("decode", "exact", "-o", "folder/", "-f")
    assert not (tmp_path / "folder" / "loss.json").exists()
    (tmp_path / "folder" / "loss.json").write_text('{"schema": "kvmnn-loss", "schema_version": 1, "loss": 1}')
    assert "loss.json" in run("encode", "folder", "-o", "damaged/", code=1).err
    assert not (tmp_path / "damaged").exists()


def test_layer_streams_of_packed_files_say_that_live_elements_are_compared(run, work, tmp_path) -> None:
    packed, streams = tmp_path / "packed", tmp_path / "streams"
    run("mnn pack", work / "kv", "-o", packed, "--name", "p", "--backend", "x86-avx512")
    encoded = run("encode", packed, "--codec", f"profile:{work / 'p.kvmp'}", "-o", streams, "--json")
    (note,) = json.loads(encoded.out)["notes"]
    cache = kvmnn.open(packed).cache
    assert cache.file_bytes > cache.live_bytes
    assert f"{cache.file_bytes - cache.live_bytes:,} bytes of padding" in note and "neither stored" in note
    profile = ("--codec", f"profile:{work / 'p.kvmp'}")
    encoded = run("encode", packed, *profile, "-o", streams, "-f").out
    assert "LOSSLESS (live elements, decoded and compared)" in encoded and note in encoded
    verified = run("verify", streams, "--against", packed).out
    assert "LOSSLESS (every live element compared with the original)" in verified and note in verified
    plain = run("verify", streams, "--against", work / "kv").out
    assert "LOSSLESS (every byte compared with the original)" in plain and "padding" not in plain


def test_encode_into_a_folder_of_the_other_kind_needs_force(run, work, tmp_path) -> None:
    folder, small = f"{tmp_path / 'out'}/", tmp_path / "small"
    small.mkdir()
    for path in (work / "kv").glob("*.npy"):
        np.save(small / path.name, np.load(path)[:, :8])
    as_streams = ("encode", work / "kv", "--codec", f"profile:{work / 'p.kvmp'}", "-o", folder)
    as_frames = ("encode", small, "-o", folder)
    nbytes = {as_streams: kvmnn.open(work / "kv").nbytes, as_frames: kvmnn.open(small).nbytes}
    run(*as_streams)
    for second, index in ((as_frames, "layers.json"), (as_streams, "manifest.json")):
        assert f"{index}: exists already (-f or --force replaces it)" in run(*second, code=1).err
        assert (tmp_path / "out" / index).exists()
        run(*second, "-f")
        assert not (tmp_path / "out" / index).exists()
        assert kvmnn.open(folder).nbytes == nbytes[second]
        run("verify", folder)


def test_encode_with_transform_says_lossy_everywhere(run, work, tmp_path) -> None:
    codec = f"transform:{work / 'p.kvmp'},ratio=4,below=0"
    for words in (
        ["encode", work / "kv", "-o", tmp_path / "s/", "--codec", codec],
        ["inspect", tmp_path / "s"],
        ["verify", tmp_path / "s"],
        ["verify", tmp_path / "s", "--against", work / "kv"],
        ["decode", tmp_path / "s", "-o", tmp_path / "back/"],
    ):
        out = run(*words).out
        assert "LOSSY" in out and "LOSSLESS" not in out, words
        if words[0] != "encode":
            assert json.loads(run(*words, "--json", *(["-f"] if words[0] == "decode" else [])).out)
        assert " LOSSY: K and V are rounded; KL divergence" in out
    assert np.load(tmp_path / "back" / "layer_0.key.npy").shape == np.load(work / "kv" / "layer_0.key.npy").shape


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("zip", "expected mnn, dense, profile:FILE"),
        ("fast", "expected --effort fast"),
        ("profile", "expected mnn, dense"),
        ("profile:a,kl=1", "expected below=N"),
        ("transform:a,kl=x", "expected a number"),
        ("transform:a,kl=1,kl=2", "'kl'"),
        ("profile:none.kvmp", "does not exist"),
    ],
)
def test_codecs_that_do_not_exist(run, work, tmp_path, codec, message) -> None:
    fails = 1 if "does not" in message else 2
    assert message in run("encode", work / "kv", "-o", tmp_path / "s/", "--codec", codec, code=fails).err
    assert not (tmp_path / "s").exists()


def test_layer_codecs_refuse_options_of_frames(run, work, tmp_path) -> None:
    codec = f"profile:{work / 'p.kvmp'}"
    for words, message in (
        (["-o", tmp_path / "s/", "--effort", "fast"], "--effort"),
        (["-o", "-"], "folder"),
        ([], "folder"),
    ):
        assert message in run("encode", work / "kv", "--codec", codec, *words, code=2).err
    assert "--profile" in run("verify", work / "kv", "--profile", "x", code=2).err


def test_measure_with_a_profile_counts_the_bytes_that_encode_writes(run, work, tmp_path) -> None:
    for codec, label in (("profile", "LOSSLESS"), ("transform", "LOSSY")):
        spec = f"{codec}:{work / 'p.kvmp'},below=0"
        encoded = json.loads(run("encode", work / "kv", "-o", tmp_path / codec, "--codec", spec, "--json").out)
        measured = json.loads(run("measure", work / "kv", "--codec", spec, "--json").out)
        assert (measured["verb"], measured["label"]) == ("measure", label)
        for key in ("raw_bytes", "stored_bytes", "profile", "layers", "predicted_kl"):
            assert measured[key] == encoded[key], key
        shown = run("measure", work / "kv", "--codec", spec).out
        assert f"{measured['stored_bytes']:,} bytes, ratio" in shown and label in shown
        assert ("largest error" in shown) == (codec == "transform")
    assert not list(work.glob("*.kvml"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dense"], "exclude each other"),
        (["--encode"], "--encode"),
        (["--front-n", "3"], "--front-n"),
        (["--speed", "prefill=100"], "--speed"),
        (["--to-fp16"], "--to-fp16"),
    ],
)
def test_measure_with_a_profile_refuses_idle_options(run, work, words, message) -> None:
    assert message in run("measure", work / "kv", "--codec", f"profile:{work / 'p.kvmp'}", *words, code=2).err
    assert "expected profile:FILE" in run("measure", work / "kv", "--codec", "dense", code=2).err


@pytest.mark.slow
def test_verify_of_several_folders_of_layer_streams_has_a_verdict_of_each(run, work, tmp_path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder, codec in zip(folders, ("profile", "transform"), strict=True):
        run("encode", work / "kv", "-o", folder, "--codec", f"{codec}:{work / 'p.kvmp'}")
    lines = [json.loads(line) for line in run("verify", *folders, "--jobs", "1").out.splitlines()]
    assert [(line["ok"], line["document"]["label"]) for line in lines] == [(True, "LOSSLESS"), (True, "LOSSY")]
    (folders[1] / "layer_2.kvmx").unlink()
    for verb in ("verify", "inspect"):
        lines = [json.loads(line) for line in run(verb, tmp_path, "--jobs", "1", code=1).out.splitlines()]
        assert [line["ok"] for line in lines] == [True, False]
    shown = run("inspect", *folders, code=1).out
    assert "INCOMPLETE: layer_2.kvmx: missing" in shown and "5 of 6 layer streams" in shown


def test_streams_away_from_their_profile_are_read_by_verbs_with_its_file(run, work, tmp_path) -> None:
    codec, streams = f"transform:{work / 'p.kvmp'},ratio=4", tmp_path / "far" / "away" / "s"
    run("encode", work / "kv", "-o", tmp_path / "s", "--codec", codec)
    streams.parent.mkdir(parents=True)
    shutil.move(tmp_path / "s", streams)
    for words in (
        ("diff", streams, streams),
        ("measure", streams, "--codec", codec),
        ("encode", streams, "-o", tmp_path / "frames/"),
        ("mnn pack", streams, "-o", tmp_path / "packed", "--name", "x", "--backend", "x86-avx2"),
    ):
        error = run(*words, code=1).err
        assert f"which is not there: --profile FILE says where it is, or copy it into {streams}" in error, error
        run(*words, "--profile", work / "p.kvmp")
    for words in (("diff", work / "kv", work / "kv"), ("encode", work / "kv", "-o", tmp_path / "x/")):
        assert "--profile is about layer streams" in run(*words, "--profile", work / "p.kvmp", code=2).err
    for words in (("verify",), ("decode", "-o", tmp_path / "y"), ("measure",), ("diff", work / "kv")):
        error = run(*words, tmp_path / "none", "--profile", work / "p.kvmp", code=1).err
        assert f"{tmp_path / 'none'}: cannot be read: No such file or directory" in error, words


def test_profile_make_from_lossy_caches_notes_the_loss(run, work, tmp_path) -> None:
    run("encode", work / "kv", "-o", tmp_path / "s/", "--codec", f"transform:{work / 'p.kvmp'},ratio=4")
    words = ["--rope", "none", "--below", "0", "--for", "lossless", "--json"]
    made = run("profile make", "--from", work / "kv", tmp_path / "s", "-o", tmp_path / "q.kvmp", *words)
    (note,) = [note for note in json.loads(made.out)["notes"] if "LOSSY" in note]
    assert note.startswith("s: LOSSY: K and V are rounded") and note.endswith("the profile is of what is left.")


@pytest.mark.slow
def test_profile_make_interrupted_names_the_folder_that_stays(work, tmp_path) -> None:
    output, folder = tmp_path / "q.kvmp", tmp_path / "q.kvmp.partial"
    words = ["profile", "make", FIXTURES / "lm", "--text", *sorted((FIXTURES / "lm" / "texts").glob("*.txt"))]
    with subprocess.Popen(
        [sys.executable, "-m", "kvmnn", *words, "-o", output], stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not folder.is_dir():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert error.endswith(
        f"kvmnn: note: what was done is kept in {folder}: the same command goes on from there\n"
        "kvmnn: error: interrupted\n"
    )
    assert folder.is_dir() and not output.exists()


def test_store_import_of_profile_streams_into_a_new_store_keeps_their_codec(run, work, tmp_path) -> None:
    ids = ["--token-ids", work / "kv" / "token_ids.json"]
    run("store put", tmp_path / "s", work / "kv", *ids, "--fingerprint", "m", "--codec", f"profile:{work / 'p.kvmp'}")
    run("store export", tmp_path / "s", *ids, "-o", tmp_path / "x.kv")
    dense, remote_store = ["--codec", "dense"], f"file://{tmp_path}/r"
    for store, words, codec in (
        (tmp_path / "t", [], "profile"),
        (tmp_path / "u", dense, "dense"),
        (remote_store, [], "profile"),
    ):
        noted = run("store import", store, tmp_path / "x.kv", "--profile", work / "p.kvmp", *words).err
        assert ("is of profile streams by" in noted) == (codec == "profile")
        assert json.loads(run("store stat", store, "--json").out)["codec"] == codec
    assert "streams by" not in run("store import", remote_store, tmp_path / "x.kv", "--profile", work / "p.kvmp").err


def test_bench_with_a_profile_measures_the_cache_as_a_whole(run, work) -> None:
    codecs = [f"profile:{work / 'p.kvmp'}", f"transform:{work / 'p.kvmp'},ratio=4"]
    words = ["bench", work / "kv", "--repeats", "1", "--codec", codecs[0], "--codec", codecs[1]]
    document = json.loads(run(*words, "--json").out)
    [array] = document["arrays"]
    results = {result["codec"]: result for result in array["results"]}
    assert {"kvmnn exact", "kvmnn fast", "kvmnn dense", "profile", "transform ratio=4"} <= set(results)
    assert {result["raw_bytes"] for result in results.values()} == {array["array_bytes"]}
    for codec, name in zip(codecs, ("profile", "transform ratio=4"), strict=True):
        measured = json.loads(run("measure", work / "kv", "--codec", codec, "--json").out)
        assert results[name]["stored_bytes"] == measured["stored_bytes"] and results[name]["decode"]["cpu"] > 0
    assert "loss" not in results["profile"] and results["transform ratio=4"]["loss"]["label"] == "LOSSY"
    labels = {name: result["label"] for name, result in results.items() if result["decode"]}
    assert labels.pop("transform ratio=4") == "LOSSY" and set(labels.values()) == {"LOSSLESS"}
    largest = max(
        max(layer["errors"][f"max_{part}_error"] for part in ("key", "value")) for layer in measured["layers"]
    )
    assert results["transform ratio=4"]["loss"]["max_error"] == pytest.approx(largest, rel=1e-5)
    assert results["profile"]["dominated_by"] != "transform ratio=4"
    assert "kvmnn dense" in {result["codec"] for result in document["break_even"]["codecs"]}


def test_bench_adapted_codec_takes_the_bytes_of_encode(run, tmp_path) -> None:
    cache = linear_samples.make_cache(2048, 2)
    np.savez(tmp_path / "kv.npz", **{
        f"layer_{layer.layer}.{part}": elements
        for layer in cache for part, elements in (("key", layer.keys), ("value", layer.values))
    })  # fmt: skip
    encoded = json.loads(
        run("encode", tmp_path / "kv.npz", "-o", tmp_path / "s/", "--codec", "dense", "--adapt", "--json").out
    )
    [array] = json.loads(run("bench", tmp_path / "kv.npz", "--repeats", "1", "--codec", "adapt", "--json").out)[
        "arrays"
    ]
    results = {result["codec"]: result for result in array["results"]}
    assert results["kvmnn dense, adapted"]["error"] is None
    # the tables are of one size, but for the name of the cache that they have
    assert abs(results["kvmnn dense, adapted"]["stored_bytes"] - encoded["stored_bytes"]) < 16
    assert results["kvmnn dense, adapted"]["stored_bytes"] < results["kvmnn dense"]["stored_bytes"]


def test_bench_with_a_profile_cuts_all_layers_to_the_sample(run, work) -> None:
    words = ["bench", work / "kv", "--repeats", "1", "--codec", f"profile:{work / 'p.kvmp'}"]
    shown = run(*words, "--sample-bytes", "500000").out
    assert "first 491,520 measured" in shown and "failed" not in shown  # 40 of 150 tokens
    assert "less than a token" in run(*words, "--sample-bytes", "500", code=2).err
    assert "--max" in run(*words, "--max", code=2).err


def test_bench_a_lossy_codec_that_breaks_its_promise_fails(run, work, monkeypatch) -> None:
    from kvmnn.bench import layer_codecs

    monkeypatch.setattr(layer_codecs, "decode_cache", _decode_with_an_error)
    shown = run("bench", work / "kv", "--repeats", "1", "--codec", f"transform:{work / 'p.kvmp'},below=0").out
    assert "failed: KvmnnError: the streams did not decode to what the encoder promises" in shown


def _decode_with_an_error(streams, profile, codec):
    from kvmnn.formats.layer_streams.codecs import decode_cache

    for layer in decode_cache(streams, profile, codec):
        layer.values[0, -1, 0] += 1
        yield layer


def test_bundles_are_encoded_by_a_profile_and_zarr_stores_are_none(run, work, tmp_path) -> None:
    codec = f"profile:{work / 'p.kvmp'}"
    run("encode", work / "kv", "-o", tmp_path / "bundle/")
    assert "LOSSLESS" in run("encode", tmp_path / "bundle", "-o", tmp_path / "s/", "--codec", codec).out
    assert "every byte" in run("verify", tmp_path / "s", "--against", work / "kv").out
    for output in (tmp_path / "x.zarr", "memory://x"):
        assert "Zarr" in run("encode", work / "kv", "-o", output, "--codec", codec, code=2).err
    assert not (tmp_path / "x.zarr").exists()
    run("encode", tmp_path / "s", "-o", tmp_path / "x.zarr")
    assert "equal" in run("diff", tmp_path / "x.zarr", work / "kv").out
    assert "LOSSLESS" in run("encode", tmp_path / "x.zarr", "-o", tmp_path / "t/", "--codec", codec).out


def _measure_attention(model, ids):
    """Return the mean attention of later queries, ``[layer, kv_head, token]``, as the model computes it."""
    from kvmnn.lm import DecoderSession

    session = DecoderSession.open(model, attentions=True)
    step = session.run_step(np.asarray(ids), np.arange(len(ids)), session.create_empty_past())
    layers = []
    for layer, probabilities in enumerate(step.attentions):
        kv_heads = step.present_pairs[layer][0].shape[1]
        later = np.tril(probabilities, -1).sum(axis=1) / np.maximum(np.arange(len(ids))[::-1], 1)
        layers.append(later.reshape(kv_heads, -1, len(ids)).mean(axis=1))
    return np.stack(layers).astype(np.float32)


def test_transform_with_attention_spends_bits_where_it_looks(run, work, tmp_path) -> None:
    ids = json.loads((work / "kv" / "token_ids.json").read_text())
    ids = ids if isinstance(ids, list) else ids["token_ids"]
    attention = _measure_attention(FIXTURES / "lm", ids)
    np.save(tmp_path / "attention.npy", attention)
    base = f"transform:{work / 'p.kvmp'},bits=2,below=0"
    errors = {}
    for name, codec in (("with", f"{base},attention={tmp_path / 'attention.npy'}"), ("without", base)):
        run("encode", work / "kv", "-o", tmp_path / name, "--codec", codec)
        assert "LOSSY" in run("verify", tmp_path / name, "--against", work / "kv").out
        run("decode", tmp_path / name, "-o", tmp_path / f"{name}-back/")  # needs no file of attention
        file = "layer_3.value.npy"
        difference = np.load(tmp_path / f"{name}-back" / file).astype(np.float64) - np.load(work / "kv" / file)
        errors[name] = (difference**2).sum(axis=(0, 2))
    order = np.argsort(attention[3].mean(axis=0)[4:])[::-1] + 4  # the first four are exact
    looked_at = order[:20]
    assert errors["with"][looked_at].sum() < 0.7 * errors["without"][looked_at].sum()
    document = json.loads((tmp_path / "with" / "layers.json").read_text())
    assert document["options"]["attention"] == "attention.npy"
    codec = f"{base},attention={tmp_path / 'attention.npy'}"
    measured = json.loads(run("measure", work / "kv", "--codec", codec, "--json").out)
    assert measured["stored_bytes"] == sum(entry["bytes"] for entry in document["layers"])


def test_transform_with_a_file_that_is_no_attention_of_the_cache_fails(run, work, tmp_path) -> None:
    (tmp_path / "bytes.npy").write_bytes(b"no array")
    np.save(tmp_path / "short.npy", np.ones((6, 4, 149), np.float32))
    np.save(tmp_path / "flat.npy", np.ones(150, np.float32))
    np.save(tmp_path / "negative.npy", -np.ones((6, 4, 150), np.float32))
    for name, message in (
        ("none.npy", "cannot be read: No such file"),
        ("bytes.npy", "not an array"),
        ("short.npy", "150 positions"),
        ("flat.npy", "expected one array"),
        ("negative.npy", "at least 0"),
    ):
        codec = f"transform:{work / 'p.kvmp'},ratio=4,attention={tmp_path / name}"
        failed = run("encode", work / "kv", "-o", tmp_path / "s/", "--codec", codec, code=1)
        assert message in failed.err and not (tmp_path / "s").exists(), name
    assert (
        "expected below=N"
        in run(
            "encode", work / "kv", "-o", tmp_path / "s/", "--codec", f"profile:{work / 'p.kvmp'},attention=x", code=2
        ).err
    )


def test_encode_dense_adapt_learns_tables_in_the_cache(run, work, tmp_path) -> None:
    rng = np.random.default_rng(2)
    base, mix = rng.normal(size=(600, 5)), rng.normal(size=(3, 5, 2, 16))
    rows = np.einsum("ti,lipn->lptn", base, mix) + 0.02 * rng.normal(size=(3, 2, 600, 16))
    arrays = {
        f"layer_{layer}.{part}": rows[layer, side].reshape(600, 2, 8).transpose(1, 0, 2).astype(np.float16)
        for layer in range(3)
        for side, part in enumerate(("key", "value"))
    }
    np.savez(tmp_path / "kv.npz", **arrays)
    words = ["encode", tmp_path / "kv.npz", "--codec", "dense", "--rope", "none"]
    result = run(*words, "--adapt", "-o", tmp_path / "s/")
    assert "LOSSLESS" in result.out and "tables learned in this cache: adapted.kvmp" in result.out
    assert "--adapt compared dense streams" in result.err
    document = json.loads(run(*words, "--adapt", "-o", tmp_path / "t/", "--json").out)
    assert document["stored_bytes"] > document["profile_bytes"] > 0
    plain = json.loads(run(*words, "-o", tmp_path / "d/", "--json").out)
    assert document["stored_bytes"] < plain["stored_bytes"]
    (info,) = json.loads(run("inspect", tmp_path / "s", "--json").out)["inputs"]
    assert info["profile_bytes"] == document["profile_bytes"]
    run("decode", tmp_path / "s", "-o", tmp_path / "back.npz")
    back = dict(np.load(tmp_path / "back.npz"))
    assert all(np.array_equal(back[name], array) for name, array in arrays.items())
    assert "every byte" in run("verify", tmp_path / "s", "--against", tmp_path / "kv.npz").out
    assert "equal" in run("diff", tmp_path / "s", tmp_path / "d").out
    assert "LOSSLESS" in run("encode", tmp_path / "d", "-o", tmp_path / "u/", "--codec", "dense", "--adapt").out
    (tmp_path / "s" / "adapted.kvmp").unlink()
    assert "adapted.kvmp), which is not there" in run("decode", tmp_path / "s", "-o", tmp_path / "b.npz", code=1).err


def test_encode_adapt_of_a_small_cache_gives_dense_streams(run, work, tmp_path) -> None:
    result = run("encode", work / "kv", "-o", tmp_path / "s/", "--codec", "dense", "--adapt", "--rope", "none")
    assert "too small for tables: dense streams" in result.err and "dense stream" in result.out
    assert "equal" in run("diff", tmp_path / "s", work / "kv").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "x/"], "--adapt needs --codec dense"),
        (["-o", "x/", "--codec", "profile:p.kvmp"], "--adapt needs --codec dense"),
        (["-o", "-", "--codec", "dense"], "--adapt writes a local folder"),
        (["-o", "x.zarr", "--codec", "dense"], "--adapt writes a local folder"),
        (["-o", "x/", "--codec", "dense", "--effort", "fast"], "--effort is about frames, and --adapt makes none"),
    ],
)
def test_encode_adapt_refuses_options_of_other_codecs(run, work, words, message) -> None:
    assert message in run("encode", work / "kv", "--adapt", *words, code=2).err


def test_encode_adapt_with_jobs_writes_a_folder_for_each_file(run, tmp_path) -> None:
    for name in ("a", "b"):
        keys = np.random.default_rng(0).normal(size=(2, 20, 8)).astype(np.float16)
        np.savez(tmp_path / f"{name}.npz", **{"layer_0.key": keys, "layer_0.value": keys + 1})
    words = ["--codec", "dense", "--adapt", "--rope", "none", "--jobs", "1"]
    run("encode", tmp_path / "a.npz", tmp_path / "b.npz", *words, "-o", tmp_path / "out/")
    assert "equal" in run("diff", tmp_path / "out" / "b.npz.frames", tmp_path / "b.npz").out


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("transform:{p},kl=-1", "kl is -1.0: expected 1e-09 to 100"),
        ("transform:{p},kl=1,ratio=2", "kl, ratio and bits: expected one of them"),
        ("transform:{p},recent=-1", "recent is -1: expected at least 0"),
        ("transform:{p},attention", "attention is empty: expected attention=FILE"),
        ("profile:{p},below=7", "below is 7: expected at most 2"),
    ],
)
def test_codec_values_out_of_range_exit_with_code_2(run, work, tmp_path, setting, message) -> None:
    codec = setting.format(p=work / "p.kvmp")
    assert message in run("encode", work / "kv", "-o", tmp_path / "s/", "--codec", codec, code=2).err
    assert not (tmp_path / "s").exists()


def test_rerotated_cache_is_as_small_as_before(run, work, tmp_path) -> None:
    """Its K is un-rotated by the positions that it has now, not by those in the text."""
    run("mnn pack", work / "kv", "-o", tmp_path / "p", "--name", "p", "--backend", "x86-avx512")
    sizes, cut = [], ["mnn compact", tmp_path / "p", "--remove", "100", "--reserve", "0:20,40:30"]
    for name, words in (("kept", []), ("rotated", ["--rerotate", "--rope", "theta=10000,dims=16"])):
        run(*cut, *words, "-o", tmp_path / name)
        streams = tmp_path / f"{name}.streams"
        codec = ["--codec", f"profile:{work / 'p.kvmp'}"]
        sizes.append(json.loads(run("encode", tmp_path / name, "-o", streams, *codec, "--json").out)["stored_bytes"])
        assert "LOSSLESS" in run("verify", streams, "--against", tmp_path / name).out
        run("mnn pack", streams, "-o", tmp_path / f"{name}.back", "--name", "p", "--backend", "x86-avx512")
        documents = [
            json.loads((tmp_path / f"{name}{suffix}" / "p.kvmnn.json").read_text()) for suffix in ("", ".back")
        ]
        assert documents[0]["layers"] == documents[1]["layers"]
    assert sizes[1] < 1.01 * sizes[0]
    np.save(tmp_path / "a.npy", np.ones((6, 4, 150), np.float32))
    codec = f"transform:{work / 'p.kvmp'},attention={tmp_path / 'a.npy'}"
    assert "K was rotated" in run("encode", tmp_path / "rotated", "-o", tmp_path / "x/", "--codec", codec, code=2).err


def test_transform_that_keeps_all_tokens_says_that_nothing_is_rounded(run, work, tmp_path) -> None:
    codec = f"transform:{work / 'p.kvmp'},kl=0.002,recent=9999"
    out = run("encode", work / "kv", "-o", tmp_path / "s/", "--codec", codec).out
    assert "but here every error is 0" in out and "are rounded" not in out
    assert json.loads((tmp_path / "s" / "layers.json").read_text())["predicted_kl"] == 0
    assert "more bytes than K and V" in out


def test_truncated_profile_is_reported_as_unreadable(run, work, tmp_path) -> None:
    data = (work / "p.kvmp").read_bytes()
    (tmp_path / "q.kvmp").write_bytes(data)
    run("encode", work / "kv", "-o", tmp_path / "s/", "--codec", f"profile:{tmp_path / 'q.kvmp'}")
    (tmp_path / "q.kvmp").write_bytes(data[:5000])
    error = run("verify", tmp_path / "s", code=1).err
    assert "which cannot be read (" in error and "has 5,000 in all" in error


def test_transform_exact_tokens_come_on_top_of_a_ratio(run, work, tmp_path) -> None:
    """Others do not pay for them: 60 of 150 tokens alone take more than 8 to 1 has."""
    results = {}
    for recent in (0, 60):
        codec = f"transform:{work / 'p.kvmp'},ratio=8,recent={recent}"
        encoded = run("encode", work / "kv", "-o", tmp_path / f"{recent}/", "--codec", codec, "--json")
        results[recent] = json.loads(encoded.out)
    errors = [[layer["errors"]["relative_value_error"] for layer in result["layers"]] for result in results.values()]
    assert max(errors[1]) < 1.2 * max(errors[0])
    tokens = results[0]["tokens"]
    assert any(f"64 of {tokens} tokens are exact and come on top" in note for note in results[60]["notes"])


def test_transform_fp32_exact_tokens_take_no_bits_of_others(run, work, tmp_path) -> None:
    """They take 32 bits an element, twice what the bits of fp16 are counted in: others got 1.84 bits for 2."""
    encoded = json.loads(
        run(
            "encode", work / "kv", "-o", tmp_path / "s/", "--codec", f"transform:{work / 'p.kvmp'},bits=4", "--json"
        ).out
    )
    elements = encoded["raw_bytes"] // 4
    exact = elements * 4 // encoded["tokens"]
    coded_bits = (8 * encoded["stored_bytes"] - 32 * exact) / (elements - exact)
    assert coded_bits == pytest.approx(4, rel=0.06), encoded["notes"]


@pytest.mark.parametrize(("setting", "has_both"), [("ratio=4,first=16", False), ("ratio=8", True)])
def test_ratio_that_exact_tokens_alone_do_not_explain_is_noted(run, work, tmp_path, setting, has_both) -> None:
    codec = f"transform:{work / 'p.kvmp'},{setting}"
    notes = json.loads(run("encode", work / "kv", "-o", tmp_path / "s/", "--codec", codec, "--json").out)["notes"]
    texts = ", and the profile is of other texts" if has_both else ""
    assert any(note.endswith(f"tokens are exact and come on top{texts}") for note in notes), notes


def test_transform_of_rounded_words_expects_no_loss_in_numbers(run, work, tmp_path) -> None:
    first, second = f"transform:{work / 'p.kvmp'},bits=2", f"transform:{work / 'p.kvmp'},bits=3"
    run("encode", work / "kv", "-o", tmp_path / "a/", "--codec", first)
    assert "were rounded before" in run("measure", tmp_path / "a", "--codec", second).out
    encoded = json.loads(run("encode", tmp_path / "a", "-o", tmp_path / "b/", "--codec", second, "--json").out)
    assert encoded["predicted_kl"] is None and encoded["label"] == "LOSSY"
    put = run("store put", tmp_path / "st", tmp_path / "a", "--codec", second, "--model", FIXTURES / "lm")
    assert "was lost in all is not known" in put.out and "expected of texts" not in put.out
    assert "expected once" in run("measure", work / "kv", "--codec", first, "--codec", second, code=2).err


def test_transform_of_some_layers_counts_their_loss_and_is_read_back(run, tmp_path) -> None:
    import transform_samples

    from kvmnn.dense.rope import RopeConfig

    geometry = transform_samples.create_geometries(3, 2, 8, 8, RopeConfig(10000.0, 8))
    transform_samples.create_profile(geometry).write(tmp_path / "p.kvmp")
    caches = transform_samples.create_caches(5, 50, geometry)[:2]
    named = {f"layer_{c.layer}.{part}": words for c in caches for part, words in (("key", c.keys), ("value", c.values))}
    np.savez(tmp_path / "kv.npz", **named)
    codec = f"transform:{tmp_path / 'p.kvmp'},kl=0.02"
    encoded = json.loads(run("encode", tmp_path / "kv.npz", "-o", tmp_path / "s/", "--codec", codec, "--json").out)
    assert 0 < encoded["predicted_kl"] < 0.0199
    sentence = "K and V of 2 layers: 1 that the profile has is not in the input, and in no figure here"
    assert sentence in encoded["notes"]
    assert sentence in run("verify", tmp_path / "s").out and sentence in run("inspect", tmp_path / "s").out
    assert sentence in run("verify", tmp_path / "s", "--against", tmp_path / "kv.npz").out
    np.savez(tmp_path / "one.npz", **{name: words for name, words in named.items() if name.startswith("layer_0.")})
    encoded = run("encode", tmp_path / "one.npz", "-o", tmp_path / "one/", "--codec", codec)
    assert "K and V of 1 layer: 2 that the profile has are not in" in encoded.out
    run("decode", tmp_path / "s", "-o", tmp_path / "back.npz")


def test_verify_against_an_original_with_more_layers_differs(run, work, tmp_path) -> None:
    (tmp_path / "kv").mkdir()
    for path in (work / "kv").glob("layer_[0-2].*"):
        shutil.copy(path, tmp_path / "kv")
    run("encode", tmp_path / "kv", "-o", tmp_path / "s/", "--codec", f"profile:{work / 'p.kvmp'}")
    assert "LOSSLESS" in run("verify", tmp_path / "s", "--against", tmp_path / "kv").out
    differs = run("verify", tmp_path / "s", "--against", work / "kv", code=1)
    assert "layer 3 is in the original only" in differs.out + differs.err and "LOSSLESS" not in differs.out


def test_losses_before_a_codec_stay_in_records_of_copies(run, work, tmp_path) -> None:
    """Of a cast and two roundings each copy records all three, the first first."""
    codec = f"transform:{work / 'p.kvmp'},bits=3"
    shutil.copytree(work / "kv", tmp_path / "kv")
    cast = {"schema": "kvmnn-loss", "schema_version": 1, "loss": "rounded by a cast: fp32 to fp16, 7 words changed"}
    (tmp_path / "kv" / "loss.json").write_text(json.dumps(cast))
    for name, output in (("kv", "t1"), ("t1", "t2"), ("t2", "frames")):
        options = ("--codec", codec) if output != "frames" else ()
        run("encode", tmp_path / name, "-o", tmp_path / f"{output}/", *options)
    loss = kvmnn.open(tmp_path / "frames").metadata["kvmnn.lossy"]
    first, second = "the profile has no sensitivities", "they were rounded before"
    assert loss.startswith(cast["loss"] + "; K and V are rounded") and loss.index(first) < loss.index(second)
    assert loss.count("rounded by a cast") == 1 and loss.count("K and V are rounded") == 2


@pytest.mark.parametrize(
    ("codec", "settings", "message"),
    [
        ("x", {}, "expected 'profile' or 'transform'"),
        ("transform", {"kl": 1.0, "ratio": 3.0}, "expected one of them"),
        ("transform", {"kl": "x"}, "kl is 'x': expected a number"),
        ("transform", {"first": "x"}, "first must be an integer, not str"),
        ("profile", {"below": "x"}, "below must be an integer, not str"),
    ],
)
def test_layer_stream_options_refuse_bad_values_at_once(codec, settings, message) -> None:
    with pytest.raises(OptionError, match=message):
        LayerStreamOptions(codec=codec, profile="p.kvmp", settings=settings)


def test_encode_of_a_part_from_the_middle_without_positions_is_noted(run, work, tmp_path) -> None:
    """K is turned back by wrong positions: nothing else says that the predicted nats do not hold."""
    document = json.loads((work / "calib" / "positions.json").read_text())
    for begin, has_positions in ((0, False), (250, False), (250, True)):
        folder = tmp_path / f"{begin} {has_positions}"
        folder.mkdir()
        for path in (work / "calib").glob("layer_*.npy"):
            np.save(folder / path.name, np.ascontiguousarray(np.load(path)[:, begin : begin + 250]))
        if has_positions:
            layers = [{**layer, "positions": list(range(250, 500))} for layer in document["layers"]]
            (folder / "positions.json").write_text(json.dumps({**document, "layers": layers}))
        codec = f"transform:{work / 'p.kvmp'},kl=0.002"
        shown = " ".join(run("encode", folder, "-o", tmp_path / f"{folder.name}.s", "--codec", codec).out.split())
        is_noted = "times the bits that the profile predicts" in shown and "not at position 0" in shown
        assert is_noted == (begin > 0 and not has_positions), shown


def test_diff_of_two_lossy_caches_names_each_in_the_note_of_its_loss(run, work, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        run("encode", work / "kv", "-o", f"{name}/", "--codec", f"transform:{work / 'p.kvmp'},below=0")
    notes = run("diff", "one", "two").err.splitlines()
    assert [note.partition(" are rounded")[0] for note in notes] == [
        f"kvmnn: note: {name}: LOSSY: K and V" for name in ("one", "two")
    ]
