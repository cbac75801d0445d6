"""LOSSLESS of packed files: decode restores the encoded files to the last byte."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path

import llm_kv
import numpy as np
import packed_samples
import pytest
from engine_client import unpack_fixture

from kvmnn import PackLayout
from kvmnn.cli import main
from kvmnn.formats.mnn import compute_fingerprint
from kvmnn.packed.params import locate_element

GEOMETRY = ("--kv-heads", 2, "--head-dim", 16)
FRESH = (*GEOMETRY, "--backend", "x86-avx2", "--valid-tokens", 50)


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """What the engine wrote for a prefix of 50 tokens."""
    monkeypatch.chdir(tmp_path)
    return unpack_fixture("prefix", tmp_path)


def read_files(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix in (".k", ".v")}


def test_encode_fresh_prefix_is_verified_without_unused_bytes(prefix, run):
    made = json.loads(run("encode", prefix, *FRESH, "-o", "b/", "--json").out)
    assert made["label"] == "LOSSLESS"
    assert made["packed_files"] == {
        "files": 4,
        "bytes": 62_464,
        "rebuilt": True,
        "left_out": "",
        "room_bytes": 0,
        "room_stored_bytes": 0,
    }
    assert len(made["arrays"]) == 4
    said = run("decode", "b", "-o", "r/").out
    assert "LOSSLESS (every file read back, sha256 of the files that were encoded)" in said
    assert read_files("r") == read_files(prefix)
    assert "is the input itself" in run("decode", "b", "-o", "./b/", "-f", code=1).err
    assert read_files("b") == {}


def test_pack_and_store_put_refuse_another_model_or_text_than_frames_record(prefix, run, tmp_path):
    model, other = unpack_fixture("model", tmp_path / "m"), unpack_fixture("model", tmp_path / "n")
    weights = Path(other, "llm.mnn.weight")
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    for name, begin in (("ids", 0), ("others", 1)):
        Path(f"{name}.json").write_text(json.dumps(list(range(begin, begin + 50))))
    Path("more.json").write_text(json.dumps(list(range(60))))
    given = ("--model", model, "--token-ids", "ids.json")
    run("encode", prefix, *FRESH[:-2], *given, "-o", "b/")
    run("mnn", "unpack", prefix, *FRESH[:-2], *given, "-o", "a.safetensors")
    for source in ("b", "a.safetensors"):
        for verb in (("mnn", "pack", source, "-o", "p/"), ("store", "put", "s", source)):
            for model_given, ids, message in (
                (other, "ids", "says another model than was given"),
                (model, "others", "says another sequence of token ids than was given"),
                (model, "more", "says another sequence of token ids than was given"),
            ):
                options = ("--model", model_given, "--token-ids", f"{ids}.json")
                assert message in run(*verb, *options, code=2).err
                assert not os.path.exists("p") and not os.path.exists("s")
    run("mnn", "pack", "b", *given, "-o", "p/")
    run("mnn", "pack", "b", "--model", other, "-o", "q/", "--ignore", "contradictions")
    assert json.loads(Path("q/sys.kvmnn.json").read_text())["model"] == compute_fingerprint(other)
    run("store", "put", "s", "b", *given)


def test_pack_refuses_more_token_ids_than_frames_have_tokens(prefix, run):
    Path("more.json").write_text(json.dumps(list(range(60))))
    run("encode", prefix, *FRESH, "-o", "b/")
    error = run("mnn", "pack", "b", "--token-ids", "more.json", "-o", "p/", code=2).err
    assert "60 token ids, but its document says 50 tokens: expected 50" in error


def test_verify_against_other_layers_ends_with_exit_code_1(prefix, run):
    run("encode", prefix, *FRESH, "-o", "b/")
    for suffix in (".k", ".v", "_sync.k", "_sync.v"):
        source = Path(prefix, f"sys_1{suffix}")
        source.with_name(f"sys_2{suffix}").write_bytes(source.read_bytes())
    error = run("verify", "b", "--against", prefix, code=1).err
    assert "has 3 layers with K and V, and the frames have 2 (kvmnn diff names those that differ)" in error
    for path in (*Path(prefix).glob("sys_1*"), *Path(prefix).glob("sys_2*")):
        path.unlink()
    assert "has 1 layer with K and V, and the frames have 2" in run("verify", "b", "--against", prefix, code=1).err


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (("--kv-heads", 2, "--head-dim", 16, "--backend", "arm32-fp16", "--valid-tokens", 100), "sys_0.v, byte 2,624"),
        (("--kv-heads", 4, "--head-dim", 8, "--backend", "x86-avx2", "--valid-tokens", 50), "sys_0.k, byte 1,544"),
        (("--kv-heads", 1, "--head-dim", 32, "--backend", "x86-avx2", "--valid-tokens", 50), "sys_0.k, byte 7,424"),
    ],
)
def test_encode_wrong_geometry_names_the_first_difference(prefix, run, options, first):
    error = run("encode", prefix, *options, "-o", "b/", code=2).err
    assert first in error and "--ignore contradictions" in error
    assert run("encode", prefix, *options, "-o", "b/", "--force", code=2).err == error  # it replaces outputs alone
    assert not os.path.exists("b")
    said = run("encode", prefix, *options, "-o", "b/", "--ignore", "contradictions").out
    assert "LOSSY" in said and "LOSSLESS" not in said and "not all of the packed files is kept: " in said
    assert first in said
    for verb in (("decode", "b", "-o", "r/"), ("verify", "b")):
        said = run(*verb).out
        assert "LOSSY" in said and "LOSSLESS" not in said
    assert "DIFFERS" in run("verify", "b", "--against", prefix, code=1).err
    assert "not all of the packed files is kept" in run("inspect", "b").out


@pytest.mark.slow
def test_encode_any_geometry_that_is_lossless_restores_the_files(prefix, run):
    """Every geometry that sizes allow is refused or restores the same files."""
    original, passed = read_files(prefix), 0
    sizes = [(1, 32), (2, 16), (4, 8), (8, 4), (16, 2)]
    backends = ("x86-avx2", "x86-avx512", "arm32-fp16", "arm64-fp16", "arm64-bf16-v86")
    for (heads, dims), backend, tokens in itertools.product(sizes, backends, (1, 50, 116)):
        options = ("--kv-heads", heads, "--head-dim", dims, "--backend", backend, "--valid-tokens", tokens)
        if tokens > 50 and (heads, dims, backend) == (2, 16, "x86-avx2"):  # rows of zeros: refused otherwise
            options = (*options, "--ignore", "contradictions")
        code = main([str(word) for word in ("encode", prefix, *options, "-o", "b/", "-q", "--json")])
        if code == 0:
            run("decode", "b", "-o", "r/")
            assert read_files("r") == original, options
            run("verify", "b", "--against", prefix)
            passed += 1
            for folder in ("b", "r"):
                for path in Path(folder).iterdir():
                    path.unlink()
                Path(folder).rmdir()
    assert passed >= 3  # 50 tokens, and more with rows of zeros


# -- files with more than live rows -----------------------------------------------------------------------------------


def test_encode_fewer_tokens_than_rows_keeps_all_files(prefix, run):
    """An engine that erased 10 of 50 tokens leaves their rows in the files, which nothing records."""
    note = "50 rows of K and V of all layers are not empty, of which an engine may have left some (--valid-tokens)"
    for verb in (("encode", "-o", "all/"), ("mnn repack", "--target-backend", "arm64-fp32", "-o", "repacked/")):
        assert f"note: 50 tokens inferred: {note}" in run(verb[0], prefix, *verb[1:]).err
    assert f"note: 50 tokens inferred: {note}" in run("inspect", prefix).out
    said = run("encode", prefix, *GEOMETRY, "--backend", "x86-avx2", "--valid-tokens", 40, "-o", "b/")
    assert "LOSSLESS (decoded and compared; 4 packed files rebuilt in memory, every byte)" in said.out
    assert "4 packed files with more than live tokens (evicted rows, padding): " in said.out
    assert "rows after the 40 tokens are not zero, up to row 50: more tokens may be live" in said.err
    assert "every byte compared" in run("verify", "b", "--against", prefix).out
    run("decode", "b", "-o", "r/")
    assert read_files("r") == read_files(prefix)
    run("mnn", "unpack", "r", "-o", "r.npz")
    run("mnn", "unpack", prefix, "-o", "all.npz")
    with np.load("r.npz") as live, np.load("all.npz") as rows:
        assert len(live) == 4 and all(np.array_equal(live[name], rows[name][:, :40]) for name in rows)


def test_unpack_document_of_fewer_tokens_than_rows_gives_a_note(prefix, run):
    """An engine that computed the prefix again, with more tokens, leaves the document of the older one."""
    run("encode", prefix, *GEOMETRY, "--backend", "x86-avx2", "--valid-tokens", 40, "-o", "b/")
    run("decode", "b", "-o", "r/")
    note = "rows after the 40 tokens are not zero, up to row 50: more tokens may be live than sys.kvmnn.json says"
    assert note in run("mnn", "unpack", "r", "-o", "r.npz").err
    assert note in run("inspect", "r").out


def test_compacted_prefix_records_what_was_evicted_as_a_loss(prefix, run):
    run("mnn", "compact", prefix, *FRESH, "--remove", 40, "--reserve", "0:10,20:5", "-o", "small/")
    unpacked = run("mnn", "unpack", "small", "-o", "small.npz")
    assert "more tokens may be live" not in unpacked.err  # rows of evicted tokens are expected
    loss = "LOSSY: compacted: 25 of 50 tokens are here"
    assert "LOSSLESS copy of LOSSY K and V" in unpacked.out and loss in unpacked.out
    encoded = run("encode", "small.npz", "-o", "f/").out
    assert "LOSSLESS copy of LOSSY K and V" in encoded and loss in encoded


def test_encode_compacted_prefix_keeps_stale_rows(prefix, run):
    run("mnn", "compact", prefix, *FRESH, "--remove", 40, "--reserve", "0:10,20:5", "-o", "small/")
    made = json.loads(run("encode", "small/", "-o", "b/", "--json").out)
    assert made["label"] == "LOSSLESS copy of LOSSY K and V" and made["raw_bytes"] == 12_800
    room = made["packed_files"]
    assert room["room_bytes"] == 62_464 and 0 < room["room_stored_bytes"] < 30_000
    said = run("decode", "b", "-o", "r/").out
    assert "sha256 of the files that were encoded" in said
    assert read_files("r") == read_files("small")
    proof = "LOSSLESS copy of LOSSY K and V (every byte compared with small/)"
    assert proof in run("verify", "b", "--against", "small/").out
    Path("small/sys.kvmnn.json").unlink()  # the manifest says which rows are live
    verified = run("verify", "b", "--against", "small/")
    assert proof in verified.out and "--valid-tokens" not in verified.err
    assert "DIFFERS" in run("verify", "b", "--against", prefix, code=1).err
    run("mnn", "compact", prefix, *FRESH, "--remove", 40, "--reserve", "0:10,20:5", "-fo", "small/")
    stored = room["room_stored_bytes"]
    text = f"4 packed files with more than live tokens (evicted rows, padding): {stored:,} more bytes store that"
    assert text in run("inspect", "b").out
    made_text = run("encode", "small/", "-fo", "b/").out
    bundle_bytes = sum(path.stat().st_size for path in Path("b").iterdir())
    assert text in made_text and f"{bundle_bytes:,} with the manifest)" in made_text
    assert f"-> {bundle_bytes - stored - Path('b/manifest.json').stat().st_size:,} bytes, ratio" in made_text


def test_encode_prefix_of_continued_session_keeps_later_rows(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    layers = llm_kv.write_prefix(Path("p"), "x86-avx2", 80, room=34)  # a prefix of 50, and 30 tokens after it
    said = run("encode", "p", "--kv-heads", 3, "--head-dim", 64, "--valid-tokens", 50, "-o", "b/")
    assert "LOSSLESS (decoded and compared; 4 packed files rebuilt in memory, every byte)" in said.out
    run("decode", "b", "-o", "r/")
    assert read_files("r") == read_files("p")
    run("mnn", "unpack", "b", "-o", "x.npz")  # tokens alone
    with np.load("x.npz") as arrays:
        assert sorted(arrays) == ["layer_0.key", "layer_0.value", "layer_1.key", "layer_1.value"]
        np.testing.assert_array_equal(arrays["layer_1.value"], layers[3][:, :50])
    run("decode", "b", "-o", "arrays/", "--arrays")
    assert len(list(Path("arrays").iterdir())) == 4
    assert "equal" in run("diff", "b", "x.npz").out
    assert "layer_0.keyroom" not in run("measure", "b").out
    run("store", "put", "s", "b", "--fingerprint", "m", "--token-ids", ",".join(map(str, range(50))))
    run("encode", "p", "--kv-heads", 3, "--head-dim", 64, "--valid-tokens", 50, "--codec", "dense", "-o", "d/")
    run("decode", "d", "-o", "q/")
    assert read_files("q") == read_files("p")
    run("encode", "b", "--codec", "dense", "-o", "t/")
    run("decode", "t", "-o", "u/")
    assert read_files("u") == read_files("p")


@pytest.mark.parametrize("block", [64, None])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_encode_files_of_filled_memory_keep_unused_bytes(tmp_path, monkeypatch, run, dtype, block):
    """Unused bytes of buffers in memory are arbitrary: here noise."""
    monkeypatch.chdir(tmp_path)
    packed_samples.write_prefix(
        Path("p"), packed_samples.arrays(2, 2, 30, 10, dtype), lP=2, hP=8, block=block, capacity=70, padding=b"\xa5"
    )
    rng = np.random.default_rng(1)
    for path in Path("p").glob("sys_?.?"):
        words = np.frombuffer(path.read_bytes(), np.uint8).copy()
        words[words == 0xA5] = rng.integers(0, 255, np.count_nonzero(words == 0xA5))
        path.write_bytes(words.tobytes())
    options = [
        "--kv-heads",
        2,
        "--head-dim",
        10,
        "--backend",
        "lp=2",
        "--backend",
        "hp=8",
        "--dtype",
        dtype,
        "--valid-tokens",
        30,
    ]
    run("encode", "p", *options, "--backend", f"flash_block={block or 'none'}", "-o", "b/")
    run("decode", "b", "-o", "r/", "--name", "other")
    renamed = {name.replace("other", "sys"): data for name, data in read_files("r").items()}
    assert renamed == read_files("p")


def test_verify_detects_changed_byte_of_unused_capacity(prefix, run):
    run("mnn", "compact", prefix, *FRESH, "--remove", 40, "-o", "small/")
    run("encode", "small/", "-o", "b/")
    for name, place in (("sys_1.v", 8_000), ("sys_0.k", 14_847)):
        data = bytearray(Path("small", name).read_bytes())
        data[place] ^= 1
        Path("small", name).write_bytes(data)
        assert "DIFFERS" in run("verify", "b", "--against", "small/", code=1).err
        data[place] ^= 1
        Path("small", name).write_bytes(data)
    run("verify", "b", "--against", "small/")


def test_verify_detects_changed_unused_byte_of_fresh_prefix(prefix, run):
    run("encode", prefix, *FRESH, "-o", "b/")
    data = bytearray((prefix / "sys_1.k").read_bytes())
    data[-1] = 1
    (prefix / "sys_1.k").write_bytes(data)
    assert "DIFFERS" in run("verify", "b", "--against", prefix, code=1).err


# -- damaged bundles --------------------------------------------------------------------------------------------------


def change_record(folder: Path, change) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    record = json.loads(manifest["metadata"]["kvmnn.packed_files"])
    change(record)
    manifest["metadata"]["kvmnn.packed_files"] = json.dumps(record)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["files"][0].update(sha256="0" * 64), "does not give back what was packed into it"),
        (lambda r: r["files"][0].update(sha256="x"), "sha256"),
        (lambda r: r["files"][0].update(bytes=4), "layer 0: expected 14848 bytes of its keys"),
        (lambda r: r["files"][0].update(room="layer_9.keyroom"), "there is no array 'layer_9.keyroom'"),
        (lambda r: r["files"][0].update(room="layer_0.key"), "layer 0: expected 14848 bytes"),
        (lambda r: r["files"][1].update(room=r["files"][0]["room"]), "two files have the same room"),
        (lambda r: r["files"][0].update(part="keys"), "one of key, value"),
        (lambda r: r["files"].pop(), "expected K and V of each layer by turns"),
        (lambda r: r["files"].reverse(), "expected K and V of each layer by turns"),
        (lambda r: r.update(schema_version=2), "schema_version"),
    ],
)
def test_decode_mismatched_record_is_refused(prefix, run, change, message):
    run("mnn", "compact", prefix, *FRESH, "--remove", 40, "-o", "small/")
    run("encode", "small/", "-o", "b/")
    change_record(Path("b"), change)
    assert message in run("decode", "b", "-o", "r/", code=1).err
    assert not os.path.exists("r")


@pytest.mark.parametrize(("name", "value"), [("capacity", 117), ("head_dim", 17)])
def test_verify_refuses_description_that_decode_refuses(prefix, run, name, value):
    run("encode", prefix, *FRESH, "-o", "b/")
    path = Path("b/manifest.json")
    manifest = json.loads(path.read_text())
    metadata = manifest["metadata"]
    changed, count = re.subn(rf'"{name}": \d+', f'"{name}": {value}', metadata["kvmnn.cache"])
    assert count
    metadata["kvmnn.cache"] = changed
    path.write_text(json.dumps(manifest))
    for argv in (("verify", "b"), ("verify", "b", "--against", prefix), ("decode", "b", "-o", "r/")):
        assert "bytes" in run(*argv, code=1).err


def test_repack_and_pack_that_leave_rows_out_say_lossy(prefix, run):
    options = (*GEOMETRY, "--backend", "x86-avx2", "--valid-tokens", 40)
    reason = "40 tokens leave 10 rows out"
    for argv in (("repack", prefix, *options, "--target-backend", "arm64-fp32"), ("unpack", prefix, *options)):
        text = run("mnn", *argv, "-o", f"{argv[0]}/").out
        assert "LOSSY" in text and reason in text and "LOSSLESS" not in text


@pytest.mark.parametrize("output", ["u.safetensors", "u.npz", "u/"])
def test_unpack_records_the_rows_that_it_leaves_out(prefix, run, output):
    """What reads the output knows of the loss, as it does of that of repack."""
    reason = "40 tokens leave 10 rows out"
    run("mnn", "unpack", prefix, *GEOMETRY, "--backend", "x86-avx2", "--valid-tokens", 40, "-o", output)
    assert "LOSSY: 50 rows of K and V of all layers are not empty" in run("inspect", output).out
    packed = run("mnn", "pack", output, "--name", "sys", "--backend", "x86-avx2", "-o", "q/")
    assert "LOSSLESS copy of LOSSY K and V" in packed.out and reason in packed.out
    assert reason in run("inspect", "q").out
    assert reason in run("encode", output, "-o", "b/").out


@pytest.mark.parametrize("kind", ["dump", "packed-dump"])
def test_unpack_dump_records_the_rows_that_it_leaves_out(prefix, run, kind):
    options = (*GEOMETRY, "--backend", "x86-avx2", "--valid-tokens", 40, "--output-kind", kind)
    run("mnn", "unpack", prefix, *options, "-o", "d/")
    assert "40 tokens leave 10 rows out" in run("inspect", "d").out


def test_unpack_npy_notes_that_the_loss_is_not_recorded(prefix, run):
    options = (*GEOMETRY, "--backend", "x86-avx2", "--valid-tokens", 40, "--tensor", "layer_0.key")
    note = "k.npy does not record that K and V are LOSSY"
    assert note in run("mnn", "unpack", prefix, *options, "-o", "k.npy").err


def test_decode_older_bundle_claims_live_elements_only(prefix, run):
    """Bundles of earlier versions record only the live elements."""
    run("encode", prefix, *FRESH, "-o", "b/")
    path = Path("b/manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["metadata"]["kvmnn.packed_files"]
    path.write_text(json.dumps(manifest))
    assert "LOSSLESS (live elements of every file read back and compared)" in run("decode", "b", "-o", "r/").out
    assert "every live element compared" in run("verify", "b", "--against", prefix).out


# -- live files, and parts --------------------------------------------------------------------------------------------


def test_encode_live_files_claims_live_elements_only(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    layers = packed_samples.arrays(1, 2, 20, 6)
    Path("live").mkdir()
    for part, buffer in zip("kv", packed_samples.packed(*layers, 1, 4, 64, 84), strict=True):
        Path(f"live/00005560831CAB70.{part}").write_bytes(buffer.tobytes())
    options = ["--kv-heads", 2, "--head-dim", 6, "--valid-tokens", 20, "--backend", "x86-avx2"]
    assert "LOSSLESS (live elements, decoded and compared)" in run("encode", "live", *options, "-o", "b/").out
    assert "every live element compared" in run("verify", "b", "--against", "live").out


def test_encode_one_array_of_a_prefix_claims_that_array(prefix, run):
    said = run("encode", prefix, *FRESH, "--tensor", "layer_1.key", "-o", "k.frame").out
    assert "LOSSLESS (decoded and compared)" in said
    assert "kvmnn.packed_files" not in Path("k.frame.json").read_text()


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("block", [64, 5, None])
@pytest.mark.parametrize(("lP", "hP"), [(1, 4), (2, 8), (3, 4), (4, 8)])
def test_locate_element_inverts_the_index(part, block, lP, hP):
    layout = PackLayout(kv_heads=1, head_dim=10, dtype="fp16", lP=lP, hP=hP, flash_block=block)
    capacity = 70
    for token, dim in itertools.product((0, 1, 4, 5, 63, 64, 69), (0, 1, 3, 9)):
        index = layout.key_index(token, dim) if part == "key" else layout.value_index(token, dim, capacity)
        assert locate_element(layout, part, int(index), capacity) == (token, dim)
