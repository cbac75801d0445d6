"""Packed caches on the command line: round trips, compaction, repacking, comparison, refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import packed_samples
import pytest

from kvmnn import PackedCache, PackLayout

TOKENS = 70
ON_AVX2 = ["--backend", "x86-avx2"]


def layer_files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("sys_?.?"))}


def zero_padded(arrays, **numbers) -> dict[str, bytes]:
    found = {}
    for index, part in enumerate(("0.k", "0.v", "1.k", "1.v")):
        pair = packed_samples.packed(*arrays[index // 2 * 2 :][:2], padding=b"\0", **numbers)
        found[f"sys_{part}"] = pair[index % 2].tobytes()
    return found


AVX2_FILES = {"lP": 1, "hP": 4, "block": 64}


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_packed_cache_shows_geometry_and_sizes(prefix, run):
    said = run("inspect", *prefix.argv).out
    assert "p: MNN prefix cache 'sys', 2 layers, 27,520 bytes, all markers there" in said
    assert "2 kv heads x 6 dims, fp32, lP 1, hP 4, flash block 64, 70 tokens, capacity 116" in said
    assert "13,440 live bytes of 27,520 (48.8 %), 14,080 padding and room" in said
    assert "sys_1.v 8,192 bytes (3,360 live, 4,832 not)" in said
    document = json.loads(run("inspect", *prefix.argv, "--json").out)["inputs"][0]
    assert (document["kind"], document["padded_bytes"]) == ("prefix cache", 14_080)
    assert document["layers"][0]["live_bytes"] == 6_720


def test_inspect_packed_without_geometry_lists_candidates(prefix, run):
    said = run("inspect", "p").out
    assert "not known: the files do not say kv_heads (--kv-heads) and head_dim (--head-dim)" in said
    assert "not checked: whether all rows were written" in said
    said = run("inspect", "p", "--kv-heads", 2, "--head-dim", 6).out
    assert "may be: arm32-fp16: 2 kv heads x 6 dims, fp16" in said
    assert said.count("arm32-fp16") == 1
    assert "x86-avx2" in said
    Path("p/sys_0_sync.k").unlink()
    assert "would not load: 1 of 4 markers are missing" in run("inspect", *prefix.argv, code=1).out


@pytest.mark.parametrize(
    "option", [["--backend", "arm64-fp32"], ["--head-dim", 60], ["--valid-tokens", 500]], ids=lambda option: option[0]
)
def test_inspect_packed_with_options_that_files_contradict_is_refused(prefix, run, option):
    """As unpack refuses them, and not as a cache whose layout is not known."""
    said = run("inspect", *prefix.argv, *option, code=2)
    assert said.out == "" and "p: " in said.err and "not known" not in said.err
    assert run("mnn", "unpack", *prefix.argv, *option, "-o", "u.npz", code=2).err == said.err


def test_inspect_packed_shows_every_prefix(prefix, run):
    packed_samples.write_prefix(Path("p"), packed_samples.arrays(1, 2, 3, 6), name="other", capacity=67)
    said = run("inspect", "p").out
    assert "MNN prefix cache 'other', 1 layer" in said
    assert "MNN prefix cache 'sys', 2 layers" in said
    document = json.loads(run("inspect", "p", "--json").out)["inputs"][0]
    assert [entry["name"] for entry in document["prefixes"]] == ["other", "sys"]
    assert "'other'" not in run("inspect", "p", "--name", "sys").out


def test_inspect_packed_of_one_file_names_layer_and_marker(prefix, run):
    options = prefix.argv[1:]
    said = run("inspect", "p/sys_1.k", *options).out
    assert said.startswith("p/sys_1.k: MNN prefix cache 'sys', K and V of layer 1 alone, ")
    said = run("inspect", "p/sys_1_sync.k", code=1).err
    assert "p/sys_1_sync.k: is an empty marker: layer 1 of prefix 'sys' is complete" in " ".join(said.split())


def test_packed_names_and_padding_are_reported_as_not_compared(prefix, run):
    run("encode", *prefix.argv, "-o", "b/")
    assert "names of the files" not in run("verify", "b", "--against", "p").out
    Path("q").mkdir()
    for path in Path("p").iterdir():
        Path("q", path.name.replace("sys", "other")).write_bytes(path.read_bytes())
    said = run("verify", "b", "--against", "q").out
    assert "the names of the files differ: the prefix is 'sys' here and 'other' in the original" in said
    note = "of packed files live elements are compared, not padding, free room or names"
    assert note in run("diff", *prefix.argv[:1], "q", *prefix.argv[1:]).err
    assert note not in run("diff", "b", *prefix.argv).err
    assert "kvmnn mnn pack writes packed files from it" in run("mnn", "compact", "b", "--remove", 1, code=2).err


def test_pack_at_smallest_capacity_prints_line_about_document(prefix, run):
    run("mnn", "unpack", *prefix.argv, "-o", "a.npz")
    pack = ("mnn", "pack", "a.npz", *ON_AVX2, "--name", "x")
    assert "x.kvmnn.json has what files without room do not show" in run(*pack, "--capacity", TOKENS, "-o", "q/").out
    assert "x.kvmnn.json" not in run(*pack, "--capacity", TOKENS + 64, "-o", "r/").out


def test_packed_token_id_count_must_match(prefix, run):
    np.save("ids.npy", np.arange(TOKENS - 1))
    assert "69 token ids for 70 tokens" in run("encode", *prefix.argv, "--token-ids", "ids.npy", "-o", "b/", code=2).err
    np.save("more.npy", np.arange(TOKENS + 7))
    more = ("--token-ids", "more.npy")
    argv = [*prefix.argv[:1], "--kv-heads", 2, "--head-dim", 6, *ON_AVX2, *more]
    for verb in (
        ("encode", *argv, "-o", "b/"),
        ("mnn", "repack", *argv, "--target-backend", "arm64-fp16", "-o", "b/"),
        ("mnn", "unpack", *argv, "-o", "b/"),
        ("store", "put", "b/", *argv, "--fingerprint", "m"),
    ):
        error = run(*verb, code=2).err
        assert "77 token ids, but 70 rows of K and V are not zero (in 2 of 2 layers the last 7 of 77" in error, verb
        assert not Path("b").exists() or verb[0] == "store"
    run("mnn", "unpack", *prefix.argv, "-o", "a/")
    pack = ["mnn", "pack", "a/", *ON_AVX2, "--name", "x", "-o", "q/", "--token-ids"]
    assert "the arrays have 70 tokens, ids.npy has 69 ids" in run(*pack, "ids.npy", code=2).err
    for text, message in (("1 2 x", "holds no list of token ids"), ("[1.5]", "expected a list"), ("", "no list")):
        Path("ids.txt").write_text(text)
        assert message in run(*pack, "ids.txt", code=1).err
    Path("ids.txt").write_text(", ".join(map(str, range(TOKENS))))
    run(*pack, "ids.txt")
    without = prefix.argv[: prefix.argv.index("--valid-tokens")]
    document = json.loads(run("encode", *without, "--token-ids", "ids.txt", "-o", "c/", "--json").out)
    assert document["cache"]["token_ids"]["count"] == document["cache"]["layers"][0]["tokens"] == TOKENS
    document = json.loads(run("decode", "c", "-o", "r/", "--json").out)
    assert (document["label"], document["raw_bytes"], len(document["arrays"])) == ("LOSSLESS", 13_440, 4)


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a/"])
def test_unpack_and_pack_round_trip(prefix, run, name):
    assert "LOSSLESS" in run("mnn", "unpack", *prefix.argv, "-o", name).out
    inputs = sorted(Path("a").glob("*.npy")) if name == "a/" else [name]
    options = [] if name == "a.safetensors" else [*ON_AVX2, "--name", "sys", "--capacity", 114]
    said = run("mnn", "pack", *inputs, *options, "-o", "q/")
    assert "LOSSLESS (every file read back and compared)" in said.out
    assert layer_files("q") == zero_padded(prefix.arrays, **AVX2_FILES, capacity=114)
    assert {path.name for path in Path("q").iterdir()} == {
        *(path.name for path in Path("p").iterdir()),
        "sys.kvmnn.json",
    }
    assert "equal: 3,360 words" in run("diff", "q", *prefix.argv).out


def test_unpack_single_array(prefix, run):
    run("mnn", "unpack", *prefix.argv, "--tensor", "layer_1.value", "-o", "v.npy")
    np.testing.assert_array_equal(np.load("v.npy"), prefix.arrays[3])
    assert (
        "no array named 'layer_2.key'"
        in run("mnn", "unpack", *prefix.argv, "--tensor", "layer_2.key", "-o", "x", code=2).err
    )
    assert "is not written to standard output" in run("mnn", "unpack", *prefix.argv, "-o", "-", code=2).err


def test_unpack_to_dump_equals_the_cache(prefix, run):
    run("mnn", "unpack", *prefix.argv, "--output-kind", "dump", "--run-id", "r1", "-o", "d/")
    assert "equal: 3,360 words" in run("diff", "d", *prefix.argv).out
    plain = np.fromfile("d/r1/layer_1/v_t0_70.bin", np.float32).reshape(TOKENS, 2, 6)
    np.testing.assert_array_equal(plain.swapaxes(0, 1), prefix.arrays[3])
    meta = json.loads(Path("d/r1/layer_1/meta_t0_70.json").read_text())
    assert list(meta)[:6] == ["layer_id", "seq_start", "seq_len", "seq_end_exclusive", "kv_heads", "head_dim"]
    assert list(meta)[6:12] == ["bytes_per_elem", "dtype", "add", "tensor_seq_len", "quant_key", "quant_value"]
    assert list(meta)[12:] == ["flash_attention", "stage", "run_id", "k_file", "v_file"]
    run("mnn", "unpack", "d", "--output-kind", "dump", "--run-id", "r1", "-o", "e/")
    assert Path("e/r1/layer_0/k_t0_70.bin").read_bytes() == Path("d/r1/layer_0/k_t0_70.bin").read_bytes()
    run("mnn", "unpack", *prefix.argv, "--output-kind", "packed-dump", "-o", "d/")  # next to the other one
    assert "equal: 3,360 words" in run("diff", "d", *prefix.argv, "--part", "packed-variant").out
    assert Path("d/kvmnn/layer_0/packed_k_packed_t0_70.bin").stat().st_size == 2 * 72 * 6 * 4
    assert (
        "is not a run id"
        in run("mnn", "unpack", *prefix.argv, "--output-kind", "dump", "--run-id", "../x", "-o", "f/", code=1).err
    )
    assert "use --output-kind dump" in run("mnn", "unpack", "d", "--output-kind", "packed-dump", "-o", "f/", code=2).err


def test_packed_encode_and_decode_round_trip(prefix, run, model):
    Path("ids.json").write_text(json.dumps(list(range(TOKENS))))
    run("encode", *prefix.argv, "--model", model, "--token-ids", "ids.json", "-o", "b/")
    assert "27,520 bytes as packed files" in run("inspect", "b").out
    proved = run("verify", "b", "--against", "p")
    assert "LOSSLESS (every byte compared with p)" in proved.out
    assert f"read as the frames say: {TOKENS} tokens in 2 layers, 2 kv heads of 6" in proved.err
    assert "--valid-tokens needs --against" in run("verify", "b", "--valid-tokens", "40", code=2).err
    said = run("decode", "b", "-o", "q", "--model", model, "--token-ids", "ids.json", *ON_AVX2)
    assert "LOSSLESS" in said.out
    assert said.err == ""
    assert layer_files("q") == layer_files("p")
    assert "made from 70 token ids" in run("inspect", "q").out
    run("encode", "q", "-o", "c/")  # the document next to the files says all there is to say
    assert Path("c/layer_1.key.frame").read_bytes() == Path("b/layer_1.key.frame").read_bytes()
    run("decode", "b", "-o", "arrays/", "--arrays")
    np.testing.assert_array_equal(np.load("arrays/layer_0.value.npy"), prefix.arrays[1])
    run("decode", "b", "-o", "a.safetensors")
    run("mnn", "pack", "a.safetensors", "-o", "r/")
    assert layer_files("r") == zero_padded(prefix.arrays, **AVX2_FILES, capacity=114)  # tokens alone


def test_packed_decode_for_another_model_is_refused(prefix, run, model):
    Path("ids").write_text(" ".join(map(str, range(TOKENS))))
    Path("others").write_text(" ".join(map(str, range(1, TOKENS + 1))))
    run("encode", *prefix.argv, "--model", model, "--token-ids", "ids", "-o", "b/")
    (model / "llm.mnn").write_bytes(b"another graph")
    for options, reason in (
        (["--model", model], "the cache is of another model than the one in"),
        (["--token-ids", "others"], "the cache was made from other token ids than those in others"),
        (["--backend", "x86-avx512"], "asked for was 2 kv heads x 6 dims, fp32, lP 1, hP 8"),
    ):
        said = run("decode", "b", "-o", "q/", *options, code=2)
        assert reason in said.err
        assert len(said.err.splitlines()) == 1
        assert not Path("q").exists()
        said = run("decode", "b", "-o", "q/", *options, "--ignore", "contradictions")
        assert f"kvmnn: warning: {reason}" in said.err or reason in said.err
        for path in Path("q").iterdir():
            path.unlink()
        Path("q").rmdir()
    run("encode", *prefix.argv, "-o", "plain/")
    assert "does not say which model" in run("decode", "plain", "-o", "q/", "--model", model, code=2).err
    assert "does not say which token ids" in run("decode", "plain", "-o", "q/", "--token-ids", "ids", code=2).err


def test_packed_decode_of_single_layers_writes_arrays(prefix, run):
    """Single layers are no prefix cache."""
    run("encode", *prefix.argv, "--tensor", "layer_0.key", "--tensor", "layer_0.value", "-o", "b/")
    run("decode", "b", "-o", "q/")
    assert sorted(path.name for path in Path("q").iterdir()) == ["layer_0.key.npy", "layer_0.value.npy"]


def test_packed_encode_in_chunks_round_trips(prefix, run):
    run("encode", *prefix.argv, "--chunk-bytes", "4K", "-o", "b/")
    run("decode", "b", "-o", "q/")
    assert layer_files("q") == layer_files("p")


def test_verify_without_manifest_explains_what_is_there(prefix, run):
    assert "p: is a cache of MNN, no bundle: kvmnn encode makes" in run("verify", "p", code=1).err
    run("encode", *prefix.argv, "-o", "b/")
    Path("b/manifest.json").unlink()
    assert "kvmnn verify b --jobs 1 shows which of them decode" in run("verify", "b", code=1).err
    labels = [json.loads(line)["document"]["label"] for line in run("verify", "b", "--jobs", 1).out.splitlines()]
    assert set(labels) == {"DECODES"}


def test_verify_against_files_of_other_dtype_names_both(prefix, run):
    run("encode", *prefix.argv, "-o", "b/")
    run("mnn", "repack", *prefix.argv, "--target-backend", "arm64-fp16", "-o", "q/")
    error = run("verify", "b", "--against", "q", code=1).err
    assert "q: its files hold 2 kv heads x 6 dims, fp16" in error and "the bundle 2 kv heads x 6 dims, fp32" in error


def test_packed_stale_or_contradicted_document_is_refused(prefix, run):
    run("mnn", "unpack", *prefix.argv, "-o", "a.safetensors")
    run("mnn", "pack", "a.safetensors", "-o", "q/")
    assert "says another number of tokens" in run("mnn", "unpack", "q", "--valid-tokens", 9, "-o", "x.npz", code=2).err
    said = run("mnn", "unpack", "q", "--backend", "x86-avx512", "-o", "x.npz", code=2).err
    assert "hP 4, flash block 64, which is not what was asked for" in said
    with open("q/sys_1.k", "ab") as file:
        file.write(bytes(192))
    assert "does not describe the files next to it any more" in run("mnn", "unpack", "q", "-o", "x.npz", code=1).err
    Path("q/sys.kvmnn.json").write_text('{"schema": "kvmnn-cache", "schema_version": 2}')
    assert "schema_version: found 2" in run("mnn", "unpack", "q", "-o", "x.npz", code=1).err


# -- pack -------------------------------------------------------------------------------------------------------------


def test_pack_accepts_common_array_names(prefix, run):
    stacked = [np.stack(prefix.arrays[first::2]) for first in (0, 1)]
    np.save("k.npy", stacked[0])
    np.save("v.npy", stacked[1])
    names = {f"past_key_values.{i // 2}.{('key', 'value')[i % 2]}": a[None] for i, a in enumerate(prefix.arrays)}
    np.savez("past.npz", **names)
    np.savez("short.npz", **{f"{'kv'[i % 2]}_{i // 2}": a for i, a in enumerate(prefix.arrays)})
    np.savez("tokens.npz", **{name: array.swapaxes(1, 2) for name, array in names.items()})
    for layer in (0, 1):
        folder = Path(f"dump/run/layer_{layer}")
        folder.mkdir(parents=True)
        for begin, end in ((0, 40), (40, TOKENS)):
            files = {f"{part}_file": f"{part}_t{begin}_{end}.bin" for part in "kv"}
            for part, array in zip("kv", prefix.arrays[2 * layer :], strict=False):
                plain = np.ascontiguousarray(array.swapaxes(0, 1)[begin:end])
                (folder / files[f"{part}_file"]).write_bytes(plain.tobytes())
            meta = {"seq_start": begin, "seq_len": end - begin, "kv_heads": 2, "head_dim": 6, "bytes_per_elem": 4}
            (folder / f"meta_t{begin}_{end}.json").write_text(json.dumps(meta | files))
    expected = zero_padded(prefix.arrays, **AVX2_FILES, capacity=TOKENS)
    inputs_of = (["k.npy", "v.npy"], ["past.npz"], ["short.npz"], ["tokens.npz", "--token-major"], ["dump"])
    for number, inputs in enumerate(inputs_of):
        run("mnn", "pack", *inputs, *ON_AVX2, "--name", "sys", "-o", f"q{number}/")
        assert layer_files(f"q{number}") == expected, inputs
    assert "equal" in run("diff", "dump", *prefix.argv[:1], *prefix.argv[1:]).out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--name", "x"], 2, "layouts are known for what was said: name one"),
        ([*ON_AVX2], 2, "the prefix needs a name: --name NAME"),
        ([*ON_AVX2, "--name", "../x"], 2, "is not a name for a prefix"),
        ([*ON_AVX2, "--name", "x", "--capacity", "69"], 2, "capacity is 69: expected at least the 70 tokens"),
        (["--backend", "arm64-fp16", "--name", "x"], 2, "the arrays are fp32, the layout holds fp16: --cast"),
        ([*ON_AVX2, "--name", "x", "--valid-tokens", "9"], 2, "the arrays have 70 tokens, --valid-tokens says 9"),
        (["--backend", "x86-avx3", "--name", "x"], 2, "invalid choice: 'x86-avx3'"),
    ],
)
def test_pack_invalid_options_are_refused(prefix, run, options, code, message):
    run("mnn", "unpack", *prefix.argv, "-o", "a/")
    said = run("mnn", "pack", "a/", *options, "-o", "q/", code=code)
    assert message in said.err
    assert not Path("q").exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"layer_0.key": (2, 3, 4)}, "layer 0 has no array of its values"),
        ({"layer_0.key": (2, 3, 4), "layer_0.value": (2, 3, 5)}, "layer 0: keys are [2, 3, 4] and values [2, 3, 5]"),
        ({"layer_1.key": (2, 3, 4), "layer_1.value": (2, 3, 4)}, "all layers from 0 on, these are [1]"),
        ({"weights": (2, 3, 4)}, "'weights': its name does not say whether it is K or V"),
        ({"layer_0.key": (2, 12), "layer_0.value": (2, 12)}, "expected [kv_head, token, head_dim]"),
        ({"layer_0.key": (1, 3, 4), "layer_0.value": (1, 3, 4), "k": (1, 3, 4)}, "'layer_0.key' and 'k' are both"),
    ],
)
def test_pack_arrays_that_are_no_cache_are_refused(tmp_path, monkeypatch, run, arrays, message):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", **{name: np.ones(shape, np.float32) for name, shape in arrays.items()})
    code = 2 if "weights" in arrays else 1  # --axes might say what its name does not
    assert message in run("mnn", "pack", "a.npz", *ON_AVX2, "--name", "x", "-o", "q/", code=code).err


def test_pack_existing_files_need_force(prefix, run):
    run("mnn", "unpack", *prefix.argv, "-o", "a.safetensors")
    run("mnn", "pack", "a.safetensors", "-o", "q/")
    assert "exists already" in run("mnn", "pack", "a.safetensors", "-o", "q/", code=1).err
    run("mnn", "pack", "a.safetensors", "-o", "q/", "--force")
    for part in "kv":
        Path(f"q/sys_2.{part}").touch()
    said = run("mnn", "pack", "a.safetensors", "-o", "q/", "--force", code=1).err
    assert "belongs to a prefix of the same name with more layers" in said


def test_packed_output_that_is_an_input_is_refused(prefix, run):
    """Even with --force."""
    before = layer_files("p")
    to = ["-o", "p/", "--force"]
    for argv in (
        ["mnn", "repack", "p", *prefix.argv[3:], "--backend", "x86-avx2", "--target-backend", "x86-avx512", *to],
        ["mnn", "compact", *prefix.argv, "--remove", 9, *to],
        ["mnn", "pack", *prefix.argv, "--name", "sys", *to],
    ):
        assert "is the input itself" in run(*argv, code=1).err
    assert layer_files("p") == before


# -- repack -----------------------------------------------------------------------------------------------------------


def test_repack_to_fp16_and_back(prefix, run):
    said = run(
        "mnn", "repack", "p", "--backend", "x86-avx2", *prefix.argv[3:], "--target-backend", "arm64-fp16", "-o", "h/"
    ).out
    assert "LOSSY (fp32 -> fp16: " in said
    halves = [array.astype(np.float16) for array in prefix.arrays]
    assert layer_files("h") == zero_padded(halves, lP=1, hP=16, block=64, capacity=116)
    document = json.loads(run("mnn", "repack", "h", "--target-backend", "arm64-sme2-fp16", "-o", "s/", "--json").out)
    assert (document["label"], document["cast"]["changed"]) == ("LOSSLESS copy of LOSSY K and V", 0)
    encoded = run("encode", "s", "-o", "s.frames")
    assert "LOSSLESS copy of LOSSY K and V" in encoded.out and "rounded by a cast: fp32 to fp16" in encoded.out
    ids = ",".join(map(str, range(prefix.arrays[0].shape[1])))
    run("store put", "st", "s", "--fingerprint", "x", "--token-ids", ids)  # words of the engine's own type are taken
    assert layer_files("s") == zero_padded(halves, lP=2, hP=64, block=64, capacity=116)
    said = run(
        "mnn",
        "repack",
        "s",
        "--backend",
        "arm64-sme2-fp16",
        "--target-backend",
        "x86-avx2",
        "-o",
        "b/",
        "--capacity",
        70,
    ).out
    assert "LOSSLESS copy of LOSSY K and V (fp16 -> fp32: none of 3,360 words changed" in said
    wide = [array.astype(np.float32) for array in halves]
    assert layer_files("b") == zero_padded(wide, **AVX2_FILES, capacity=70)
    np.savez("a.npz", k=prefix.arrays[0], v=prefix.arrays[1])
    assert (
        "is not a packed cache" in run("mnn", "repack", "a.npz", "--target-backend", "x86-avx2", "-o", "x/", code=2).err
    )


def test_repack_result_line_has_rows_left_out_and_cast(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    arrays = packed_samples.arrays(2, 2, TOKENS, 6)
    packed_samples.write_prefix(Path("p"), arrays, capacity=TOKENS + 64, padding=b"\0")
    source = ["mnn", "repack", "p", "--kv-heads", 2, "--head-dim", 6, "--backend", "x86-avx2", "--valid-tokens", 30]
    said = run(*source, "--target-backend", "arm64-fp16", "-o", "h").out
    assert "30 tokens leave 40 rows out; fp32 -> fp16: 1,4" in said
    said = run(*source, "--target-backend", "x86-avx512", "-o", "w").out
    assert "30 tokens leave 40 rows out)" in said  # nothing is cast


def test_writers_of_prefixes_without_flash_attention_name_the_attention_mode(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    arrays = packed_samples.arrays(2, 2, TOKENS, 6)
    packed_samples.write_prefix(Path("p"), arrays, block=None, capacity=114)
    source = ["p", "--kv-heads", 2, "--head-dim", 6, "--backend", "x86-avx2,flash_block=none", "--valid-tokens", TOKENS]
    repack = ["mnn", "repack", *source, "--target-backend"]
    run("mnn", "unpack", *source, "-o", "a.npz")
    pack = ["mnn", "pack", "a.npz", "--name", "sys", "--backend"]
    ids = ",".join(map(str, range(TOKENS)))
    run("store", "put", "S", "a.npz", "--fingerprint", "m", "--token-ids", ids)
    get = ["store", "get", "S", "--token-ids", ids, "--name", "sys", "--backend"]
    mode = "V is written without flash attention: load it with attention_mode 0 (8, MNN's default, gives wrong tokens)"
    for verb, backend in ((repack, "x86-avx2"), (pack, "x86-avx2"), (get, "x86-avx2,flash_block=none")):
        option = f"{verb[-1]} NAME,flash_block=64 writes files for attention_mode 8"
        assert f"{mode}; {option}\n" in run(*verb, backend, "-o", "none", "-f").err
        assert "no flash attention" in run("inspect", "none").out
        said = run(*verb, "x86-avx2,flash_block=64", "--capacity", 114, "-o", "flash", "-f")
        assert "attention_mode" not in said.err and "flash block 64" in said.out
        assert layer_files("flash") == zero_padded(arrays, **AVX2_FILES, capacity=114)
        said = run(*verb, "x86-avx2,flash_block=32", "-o", "odd", "-f").err
        assert f"V has blocks of 32 tokens, which MNN has in no attention_mode; {option}" in said
    assert "needs the name of a backend" in run(*repack, "flash_block=64", "-o", "x", code=2).err
    assert "invalid choice: 'lp=8'" in run(*repack, "x86-avx2,lp=8", "-o", "x", code=2).err


def test_pack_cast_that_overflows_is_refused(prefix, run):
    keys = prefix.arrays[0].copy()
    keys[0, :3, 0] = 1e6
    np.savez("a.npz", k=keys, v=prefix.arrays[1])
    to = ["--backend", "arm64-fp16", "--cast", "--name", "x"]
    refused = run("mnn", "pack", "a.npz", *to, "-o", "h/", code=1).err
    assert "layer 0: 3 numbers of its keys are beyond fp16: expected a layout of fp32" in refused
    assert not Path("h").exists()


# -- compact ----------------------------------------------------------------------------------------------------------


def test_compact_equals_the_engine(prefix, run):
    plan = [(0, 8), (16, 5), (40, 10)]
    said = run("mnn", "compact", *prefix.argv, "--remove", 60, "--reserve", "0:8,16:5,40:10", "-o", "c/").out
    assert "LOSSY: 33 of 70 tokens of each layer stay" in said
    said = run("mnn", "compact", *prefix.argv, "--remove", 60, "--reserve", "0:60", "-o", "whole/").out
    assert "UNCHANGED: 70 of 70 tokens of each layer stay" in said
    layout = PackLayout(2, 6, "fp32", 1, 4)
    for layer in (0, 1):
        files = [Path(f"p/sys_{layer}.{part}").read_bytes() for part in "kv"]
        cache = PackedCache.from_buffers(layout, *files, TOKENS)
        cache.realloc(60, plan)
        assert Path(f"c/sys_{layer}.k").read_bytes() == cache.key_buffer.tobytes()
        assert Path(f"c/sys_{layer}.v").read_bytes() == cache.value_buffer.tobytes()
    assert "layer 1 holds the tokens 0:18, 26:5, 50:10" in run("inspect", "c").out
    run("mnn", "compact", "c", "--remove", 20, "--reserve", "2:1,10:10", "-o", "d/")
    assert "layer 0 holds the tokens 0:13, 15:1, 50:10" in run("inspect", "d").out
    run("mnn", "unpack", "d", "-o", "d.npz")
    kept = [*range(13), 15, *range(50, 60)]
    np.testing.assert_array_equal(np.load("d.npz")["layer_1.key"], prefix.arrays[2][:, kept])
    run("encode", "d", "-o", "b/")
    run("decode", "b", "-o", "e/")
    assert "layer 0 holds the tokens 0:13, 15:1, 50:10" in run("inspect", "e").out


def test_compact_plan_of_each_layer(prefix, run, monkeypatch):
    plan = [{"layer": 1, "remove": 70, "pairs": [[0, 16], [24, 8]]}, {"layer": 0, "remove": 5, "pairs": []}]
    Path("plan.json").write_text(json.dumps(plan))
    document = json.loads(run("mnn", "compact", *prefix.argv, "--plan", "plan.json", "-o", "c/", "--json").out)
    assert [layer["tokens"] for layer in document["cache"]["layers"]] == [65, 24]
    assert document["cache"]["layers"][1]["positions"] == [[0, 16], [24, 8]]
    run("mnn", "unpack", "c", "-o", "c.npz")
    assert np.load("c.npz")["layer_1.value"].shape == (2, 24, 6)
    with open("plan.json", "rb") as stream:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stream))
        run("mnn", "compact", *prefix.argv, "--plan", "-", "-o", "piped/")
    assert layer_files("piped") == layer_files("c")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"[")))
    assert (
        "standard input: is not valid JSON"
        in run("mnn", "compact", *prefix.argv, "--plan", "-", "-o", "d/", code=1).err
    )
    Path("plan.json").write_text(json.dumps(plan[:1]))
    assert "has 1 plan for layer" in run("mnn", "compact", *prefix.argv, "--plan", "plan.json", "-o", "d/", code=1).err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--reserve", "0:8,4:8"], 2, "reserve[1] is (4, 8): starts before 8"),
        (["--reserve", "20:8,4:8"], 2, "reserve[1] is (4, 8): starts before 28"),
        (["--reserve", "-1:8"], 2, "reserve[0] is (-1, 8): expected begin at 0 or after"),
        (["--reserve", "0:-8"], 2, "reserve[0] is (0, -8): expected a size of at least 1"),
        (["--reserve", "0:0"], 2, "expected a size of at least 1"),
        (["--reserve", "0:2147483648"], 2, "size of reserve[0] is 2147483648: expected at most 2147483647"),
        (["--reserve", "2147483647:2147483647"], 2, "ends at 4294967294, expected at most the window's 70 tokens"),
        (["--reserve", "4294967296:1"], 2, "begin of reserve[0] is 4294967296"),
        (["--reserve", "65:6"], 2, "ends at 71"),
        (["--remove", "71"], 2, "remove is 71: expected at most the 70 live tokens"),
        (["--remove", "-1"], 2, "remove is -1"),
        (["--remove", "70"], 2, "nothing would stay of its 70 tokens: --remove N drops only the last N (0: none)"),
        (["--dialect", "upstream", "--reserve", "0:8"], 1, "MNN 3.6.1 drops the cache where remove is all 70"),
        (["--reserve", "0-8"], 2, "'0-8' is not a pair begin:size"),
        (["--remove", "many"], 2, "'many' is not a whole number"),
        (["--plan", "none.json"], 1, "none.json"),
    ],
)
def test_compact_invalid_plan_is_refused(prefix, run, options, code, message):
    options = [f"{options[0]}={options[1]}", *options[2:]] if len(options) == 2 else options
    said = run("mnn", "compact", *prefix.argv, *options, "-o", "c/", code=code)
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert not Path("c").exists()


def test_compact_needs_packed_files(tmp_path, run):
    np.savez(tmp_path / "a.npz", k=np.ones((1, 2, 3), np.float32))
    assert "holds no packed files" in run("mnn", "compact", tmp_path / "a.npz", "-o", tmp_path / "c", code=2).err


# -- diff -------------------------------------------------------------------------------------------------------------


def test_diff_packed_names_the_first_difference(prefix, run):
    arrays = [array.copy() for array in prefix.arrays]
    arrays[1][1, 66, 5] = 2.5
    arrays[3][0, 0, 0] = -0.0
    packed_samples.write_prefix(Path("q"), arrays, capacity=70)
    said = run("diff", *prefix.argv[:1], "q", *prefix.argv[1:], code=1).out
    value = float(prefix.arrays[1][1, 66, 5])
    assert f"first difference: layer 0, V, head 1, token 66, dim 5: {value!r} and 2.5" in said
    assert "2 of 3,360 words differ" in said
    document = json.loads(run("diff", "p", "q", *prefix.argv[1:], "--json", code=1).out)
    assert document["differing"] == 2
    assert document["first"]["layer"] == 0
    assert (document["first"]["part"], document["first"]["head"], document["first"]["token"]) == ("value", 1, 66)


def test_diff_unequal_shapes_compare_the_common_part(prefix, run):
    np.savez("a.npz", **{"layer_0.key": prefix.arrays[0], "layer_0.value": prefix.arrays[1][:, :9]})
    said = run("diff", "a.npz", *prefix.argv, code=1).out
    assert "layer 0, V: 9 and 70 tokens; the first 9 are compared" in said
    assert "layer 1, K: only in the second" in said
    np.save("half.npy", prefix.arrays[0].astype(np.float16))
    np.save("full.npy", prefix.arrays[0])
    assert "fp16 and fp32" in run("diff", "half.npy", "full.npy", code=1).out
    assert "equal" in run("diff", "full.npy", "full.npy").out
    np.save("other.npy", -prefix.arrays[0])
    assert "array 'full', index [0, 0, 0]" in run("diff", "full.npy", "other.npy", code=1).out


def test_diff_frames_and_nan(prefix, run):
    run("encode", *prefix.argv, "-o", "b/")
    assert "equal: 3,360 words, bit by bit" in run("diff", "b", *prefix.argv).out
    nan = prefix.arrays[0].copy()
    nan[0, 0, 0] = np.nan
    np.save("nan.npy", nan)
    assert "equal" in run("diff", "nan.npy", "nan.npy").out


# -- int8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("int8", ["keys", "both"])
def test_packed_int8_cache_is_read_with_a_note(tmp_path, monkeypatch, run, int8):
    monkeypatch.chdir(tmp_path)
    layout = PackLayout.from_backend("x86-avx2", kv_heads=2, head_dim=6, int8_keys=True, int8_values=int8 == "both")
    cache = PackedCache(layout)
    cache.append(*packed_samples.arrays(1, 2, TOKENS, 6))
    Path("live").mkdir()
    Path("live/00005560831CAB70.k").write_bytes(cache.key_buffer.tobytes())
    Path("live/00005560831CAB70.v").write_bytes(cache.value_buffer.tobytes())
    argv = ["live", "--kv-heads", 2, "--head-dim", 6, "--valid-tokens", TOKENS, "--backend", f"int8={int8}"]
    said = run("mnn", "unpack", *argv, *ON_AVX2, "-o", "a.npz")
    assert "LOSSY (int8 times scale plus bias)" in said.out
    assert "LOSSY: keys: int8 codes hold each key minus its channel's maximum" in said.err
    incomplete = "  incomplete: K lacks a constant for each channel"
    assert incomplete in said.out
    assert ("values: rounded to 256 steps" in said.err) == (int8 == "both")
    found = dict(np.load("a.npz"))
    for part, expected in zip(("key", "value"), cache.to_arrays(), strict=True):
        np.testing.assert_array_equal(found[f"layer_0.{part}"], expected)
    # Frames keep the words, not the codes: neither verb may call that lossless.
    made = run("encode", *argv, *ON_AVX2, "-q", "-o", "frames/").out
    assert "LOSSY for these arrays (int8 times scale plus bias; of the dequantised words, decoded and compared)" in made
    said = run("verify", "frames/", "--against", *argv, *ON_AVX2).out
    assert "LOSSY for these arrays (every byte of the words dequantised from int8 compared with live)" in said
    assert "LOSSLESS" not in made + said
    assert json.loads(run("verify", "frames/", "--json").out)["label"] == "LOSSY"
    said = run("verify", "frames/").out
    assert "LOSSY for these arrays (decoded, sha256 of the manifest, of the words dequantised from int8)" in said
    assert json.loads(Path("frames/manifest.json").read_text())["metadata"]["kvmnn.dequantised"] == "int8"
    said = run("mnn", "unpack", "frames/", "-o", "unpacked.npz").out
    said += run("encode", "frames/", "-o", "dense/", "--codec", "dense").out + run("verify", "dense/").out
    said += run("decode", "frames/", "-o", "words.npz").out
    said += run("encode", *argv, *ON_AVX2, "-o", "x.zarr").out + run("verify", "x.zarr").out
    said += run("decode", "x.zarr", "-o", "zarr.npz").out
    assert said.count("LOSSY (") + said.count("LOSSY for these arrays (") == 7
    assert said.count("incomplete: K lacks") == 7 and "LOSSLESS" not in said
    for path in ("a.npz", "words.npz", "zarr.npz"):  # here the words are the input
        said = run("encode", path, "-o", "words/", "-f").out + run("verify", "words/").out
        assert said.count("LOSSLESS copy of LOSSY K and V") == said.count("incomplete: K lacks") == 2
    assert "K lacks a constant" in run("profile", "make", "--from", "a.npz", "-o", "p.kvmp", code=1).err
    np.savez("bare.npz", **found)
    run("profile", "make", "--from", "bare.npz", "--for", "lossless", "--below", 0, "--rope", "none", "-o", "p.kvmp")
    codec = ["--codec", "profile:p.kvmp,below=0"]
    said = run("encode", *argv, *ON_AVX2, "-o", "streams/", *codec).out + run("verify", "streams/").out
    said += run("verify", "streams/", "--against", *argv, *ON_AVX2).out + run("measure", *argv, *ON_AVX2, *codec).out
    said += run("decode", "streams/", "-o", "streamed.npz").out + run("mnn", "unpack", "streams/", "-o", "u.npz").out
    assert said.count("LOSSY (") + said.count("LOSSY for these arrays (") == 6 and "LOSSLESS" not in said
    assert json.loads(run("verify", "streams/", "--json").out)["label"] == "LOSSY"
    assert "LOSSLESS copy of LOSSY K and V" in run("encode", "streamed.npz", "-o", "s/", *codec).out
    said = run("inspect", *argv, *ON_AVX2).out
    assert incomplete in said
    assert f"int8 {'K and V' if int8 == 'both' else 'K'} (lP8 4, hP8 8)" in said
    assert "(840 live" in said
    assert "int8 caches need the backend named" in run("mnn", "unpack", *argv, "-o", "b.npz", code=2).err
    compact = ["mnn", "compact", *argv, *ON_AVX2, "--remove", 3, "-o", "c/"]  # no name would help
    assert "an int8 cache: the engine keeps no part of a window" in run(*compact, code=1).err
    fewer = run("mnn", "unpack", *argv, *ON_AVX2, "--valid-tokens", TOKENS - 3, "-o", "fewer.npz").err
    doubt = f"rows after the {TOKENS - 3} tokens are not zero, up to row {TOKENS}: more tokens may be live than"
    assert doubt in fewer and doubt not in run("mnn", "unpack", *argv, *ON_AVX2, "-o", "all.npz").err
    repack = ["mnn", "repack", *argv, "--backend", "x86-avx2", "--target-backend", "x86-sse", "-o", "d/"]
    assert "K lacks a constant for each channel" in run(*repack, code=1).err


@pytest.mark.parametrize("int8", ["keys", "both"])
def test_commands_that_hand_int8_keys_to_an_engine_refuse(tmp_path, monkeypatch, run, int8):
    """Whatever the arrays went through: K of a continuation has the constants that they lack."""
    monkeypatch.chdir(tmp_path)
    layout = PackLayout.from_backend("x86-avx2", kv_heads=2, head_dim=6, int8_keys=True, int8_values=int8 == "both")
    cache = PackedCache(layout)
    cache.append(*packed_samples.arrays(1, 2, TOKENS, 6))
    Path("live").mkdir()
    Path("live/00005560831CAB70.k").write_bytes(cache.key_buffer.tobytes())
    Path("live/00005560831CAB70.v").write_bytes(cache.value_buffer.tobytes())
    live = ["live", "--kv-heads", 2, "--head-dim", 6, "--valid-tokens", TOKENS]
    live += ["--backend", f"int8={int8}", "--backend", "x86-avx2"]
    paths = ["a.npz", "a.safetensors", "folder/", "frames/", "dense/", "a.zarr", "dump/", "old/"]
    for path in paths[:3]:
        run("mnn", "unpack", *live, "-o", path)
    run("encode", *live, "-o", "frames/")
    run("encode", "a.safetensors", "-o", "dense/", "--codec", "dense")
    run("encode", *live, "-o", "a.zarr")
    run("mnn", "unpack", "frames/", "--output-kind", "dump", "-o", "dump/")
    run("encode", *live, "-o", "old/")  # as earlier versions wrote it, which recorded the type alone
    manifest = json.loads(Path("old/manifest.json").read_text())
    manifest["metadata"] = {"kvmnn.dequantised": "int8"}
    Path("old/manifest.json").write_text(json.dumps(manifest))
    ids = ["--token-ids", ",".join(map(str, range(TOKENS))), "--fingerprint", "m"]
    for path in paths:
        for options in ([], ["--rerotate"]):
            target = ["--backend", "x86-avx2", "--name", "sys", "-o", "packed/"]
            said = run("mnn", "pack", path, *target, *options, code=1).err
            assert "cannot make a prefix cache of a part of the state: K lacks a constant for each channel" in said
            assert "compute the cache with attention_mode 8" in said
    for source in (["a.npz"], ["old/"], live):
        assert "K lacks a constant for each channel" in run("store", "put", "store/", *source, *ids, code=1).err
    pack = ["mnn", "pack", *live, "--name", "sys", "-o", "packed/", "--ignore", "contradictions"]
    assert "K lacks a constant" in run(*pack, code=1).err
    assert not Path("store").exists() and not Path("packed").exists()
