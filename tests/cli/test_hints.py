"""A wrong folder, wrong axes or a wrong file: the message names the problem and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import llama_files
import numpy as np
import pytest
from llama_files import Shape
from slow_cases import mark_most_slow

import kvmnn

HEADS, TOKENS, DIMS = 2, 40, 8


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    arrays = {
        f"layer_{n}.{part}": rng.normal(size=(HEADS, TOKENS, DIMS)).astype(np.float16)
        for n in range(2)
        for part in ("key", "value")
    }
    np.savez("kv.npz", **arrays)
    for part in ("key", "value"):  # [layer, token, kv_head, dimension]
        np.save(f"{part}s.npy", np.stack([arrays[f"layer_{n}.{part}"].transpose(1, 0, 2) for n in range(2)]))
    np.save("both.npy", np.stack([np.load("keys.npy"), np.load("values.npy")]))
    return tmp_path


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("argv", "axes"),
    [
        ("measure keys.npy values.npy", "lthd"),
        ("measure keys.npy values.npy --dense", "lthd"),
        ("mnn unpack both.npy -o x.npz --axes 2lhtd", "2lthd"),
        ("encode both.npy -o x/ --axes 2lhtd", "2lthd"),
        ("encode keys.npy -o x/ --codec dense --rope none", "lthd"),
    ],
)
def test_hint_many_heads_of_few_tokens(run, argv: str, axes: str) -> None:
    said = flat(run(*argv.split()).err)
    assert f"is read as 40 kv heads of 2 tokens: where tokens come first, --axes {axes} says so" in said
    turned = [word for word in argv.split() if word not in ("--axes", "2lhtd")]
    assert "read as" not in run(*turned, "--axes", axes, *(["-f"] if "-o" in argv else [])).err


def test_hint_heads_only_where_they_matter(run) -> None:
    for argv in ("encode keys.npy -o x/", "measure kv.npz", "verify x --against keys.npy"):
        assert "read as" not in run(*argv.split()).err
    np.savez("short.npz", **{name: np.ones((16, 1, 8), np.float16) for name in ("layer_0.key", "layer_0.value")})
    assert "read as" not in run("measure", "short.npz").err


def test_measure_columns_name_the_axis_order(run) -> None:
    real = run("measure", "kv.npz", "--encode").out
    dense = run("measure", "kv.npz", "--dense", "--rope", "none").out
    assert "measured, [token, kv_head, head_dim] as dumps have them" in flat(real)
    assert "exact: frames as MNN makes them, of arrays as they lie" in flat(dense)
    run("encode", "kv.npz", "-o", "lie/")
    exact = json.loads(run("measure", "kv.npz", "--dense", "--rope", "none", "--json").out)["overall"]["exact_bytes"]
    assert exact == sum(path.stat().st_size for path in Path("lie").glob("*.frame"))
    by_token = kvmnn.open("both.npy", axes="2lthd")
    np.savez("t.npz", **{name: by_token[name].to_numpy().transpose(1, 0, 2) for name in by_token})
    run("encode", "t.npz", "-o", "token/")
    stored = json.loads(run("measure", "kv.npz", "--encode", "--json").out)["breakdown"]["overall"]["stored_bytes"]
    assert stored == sum(path.stat().st_size for path in Path("token").glob("*.frame"))


@pytest.mark.parametrize("form", [["f.npz"], ["f.frames"], ["f.zarr"], ["key.npy", "value.npy"]])
def test_fortran_order_arrays_equal_c_order(run, form: list[str]) -> None:
    arrays = dict(np.load("kv.npz"))
    np.savez("f.npz", **{name: np.asfortranarray(words) for name, words in arrays.items()})
    for part in ("key", "value"):  # [layer, kv_head, token, dimension], big-endian
        stack = np.stack([arrays[f"layer_{n}.{part}"] for n in range(2)]).astype(">f2")
        np.save(f"{part}.npy", np.asfortranarray(stack))
    for made in form[0].endswith((".frames", ".zarr")) * [form[0]]:
        run("encode", "f.npz", "-o", made)
    for more in ([], ["--dense", "--rope", "none"]):
        found, expected = (json.loads(run("measure", *of, *more, "--json").out) for of in (form, ["kv.npz"]))
        assert (found.get("overall"), found.get("breakdown")) == (expected.get("overall"), expected.get("breakdown"))
    run("mnn", "pack", *form, "--backend", "arm64-fp16", "--name", "x", "-o", "p/")
    Path("ids.json").write_text(json.dumps(list(range(TOKENS))))
    run("store", "put", "s", *form, "--token-ids", "ids.json", "--fingerprint", "m")
    run("store", "get", "s", "--token-ids", "ids.json", "-o", "s.npz")
    made = ["p", "s.npz"]
    if len(form) == 1:
        run("mnn", "unpack", *form, "--output-kind", "dump", "-o", "d/")
        made += [*form, "d"]
    for other in made:
        assert "equal: 2,560 words" in run("diff", "kv.npz", other).out


@pytest.mark.parametrize(
    "name", mark_most_slow(["m@1@0@12ab@float16.pt", "m@1@0@12ab@half@3.pt", "m@1@0@12ab@bfloat16.data"], 3)
)
def test_inspect_page_without_shape(run, name: str) -> None:
    np.arange(512, dtype=np.uint16).tofile(name)
    assert "1 array to encode" in run("inspect", name).out
    assert json.loads(run("inspect", "--jobs", 1, name).out)["document"]["inputs"][0]["arrays"][0]["shape"] == [512]


def test_diff_of_two_sessions_needs_no_heads(run) -> None:
    words = llama_files.state(Random(1), Shape(), [TOKENS])[0]
    Path("a.session").write_bytes(words)
    Path("b.session").write_bytes(words)
    assert "equal: " in run("diff", "a.session", "b.session").out
    assert "within 0" in run("diff", "a.session", "b.session", "--atol", 0).out
    assert "equal: " in run("diff", "a.session", "b.session", "--invert", "none").out
    for argv in (["a.session", "kv.npz"], ["a.session", "b.session", "--invert", "k-order"]):
        assert "--kv-heads N" in run("diff", *argv, code=2).err


def test_diff_of_other_types_names_the_option_that_compares_numbers(tmp_path, run) -> None:
    words = np.arange(256, dtype=np.float32).reshape(2, 8, 16)
    np.savez(tmp_path / "a.npz", k=words)
    np.savez(tmp_path / "b.npz", k=words.astype(np.float16))
    assert "words of fp32, not fp16: --atol X" in run("diff", tmp_path / "a.npz", tmp_path / "b.npz", code=1).err


def test_diff_without_common_arrays_is_reported(run) -> None:
    np.savez("other.npz", **{f"layer_0.{part}": np.ones((3, 5, 8), np.float16) for part in ("key", "value")})
    said = run("diff", "--atol", 0.1, "kv.npz", "other.npz", code=1).out
    assert (
        said.endswith("no numbers were compared: nothing has its like in the other input\n") and "0 numbers" not in said
    )


@pytest.mark.parametrize("kind", ["vllm", "npz", "frames"])
def test_hint_parent_folder_of_a_cache(run, kind: str) -> None:
    Path("top/req").mkdir(parents=True)
    if kind == "vllm":
        np.savez("one.npz", kv_cache=np.ones((2, 8, 2, 8), np.float16))
        run("mnn", "unpack", "one.npz", "-o", "top/req/layer.0.safetensors")
    elif kind == "npz":
        Path("kv.npz").rename("top/kv.npz")
    else:
        run("encode", "kv.npz", "-o", "top/req/")
    name = "kv.npz" if kind == "npz" else "req"
    said = flat(run("measure", "top", code=1).err)
    assert f"; {name!r} in it is what kvmnn reads: name that, or --jobs N takes" in said


def test_hint_json_that_is_no_manifest(run) -> None:
    Path("index.json").write_text('{"a": 1}')
    said = run("mnn", "pack", "index.json", "--backend", "arm64-fp16", "--name", "s", "-o", "q/", code=1).err
    assert 'index.json: schema: is missing: a manifest of kvmnn says "schema": "kvmnn-manifest"' in flat(said)


def test_store_names_accepted_models(run) -> None:
    said = flat(run("store", "--help-all").out)
    assert "of an MNN model, with its .mnn file, of an ONNX model, by its folder or the name of a pulled one" in said
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    said = run("store", "put", "s", "kv.npz", "--token-ids", "1,2", "--model", "hf", code=1).err
    assert "has no .mnn file" in said and "--fingerprint TEXT names a model" in said


def test_inspect_stream_numbers_have_separators_and_units(run) -> None:
    from kvmnn import dense

    words = np.load("kv.npz")["layer_0.key"].repeat(4, axis=0)
    Path("a.kvmd").write_bytes(dense.encode(words))
    Path("a.frame").write_bytes(kvmnn.encode(words))
    said = run("inspect", "a.kvmd").out
    assert "[8, 40, 8]: 5,120 -> " in said and "      header           28 bytes\n" in said
    said = run("inspect", "a.frame").out
    assert "2,560 words, 5,120 -> " in said and "  raw bytes     stored bits/byte" in said and "  2,560 " in said
    assert "(the checksum of each stream held; no manifest and no --against: nothing to compare" in flat(
        run("verify", "a.kvmd").out
    )


def test_pack_one_kv_head_is_singular(run) -> None:
    np.savez("one.npz", **{f"layer_0.{part}": np.ones((1, 5, 8), np.float16) for part in ("key", "value")})
    said = run("mnn", "pack", "one.npz", "--backend", "arm64-fp16", "--name", "s", "-o", "q/").out
    assert "1 kv head x 8 dims" in said


def test_pack_cast_without_change_is_lossless(run) -> None:
    words = {f"layer_0.{part}": np.full((1, 5, 8), 1.5, np.float32) for part in ("key", "value")}
    np.savez("one.npz", **words)
    said = run("mnn", "pack", "one.npz", "--backend", "arm64-fp16", "--cast", "--name", "s", "-o", "q/").out
    assert "LOSSLESS (fp32 -> fp16: none of 80 words changed)" in said
    words["layer_0.key"][0, 0, 0] = 1 / 3
    np.savez("two.npz", **words)
    said = run("mnn", "pack", "two.npz", "--backend", "arm64-fp16", "--cast", "--name", "s", "-o", "r/").out
    assert "LOSSY (fp32 -> fp16: 1 of 80 words changed" in said


def test_hint_replacing_is_of_python_or_of_the_command(run) -> None:
    run("encode", "kv.npz", "-o", "x/")
    with pytest.raises(kvmnn.errors.OutputError, match=r"exists already \(overwrite=True or force=True replaces it\)"):
        kvmnn.bundle.encode("kv.npz", "x/")
    assert "exists already (-f or --force replaces it)" in run("encode", "kv.npz", "-o", "x/", code=1).err
    run("encode", "--jobs", 1, "kv.npz", "-o", "y/")
    said = run("encode", "--jobs", 1, "kv.npz", "-o", "y/", code=1)
    assert "exists already (-f or --force replaces it)" in said.out + said.err


def test_errors_of_outputs_name_no_option_of_the_command() -> None:
    package = Path(kvmnn.__file__).parent
    texts = [path.read_text("utf-8") for path in package.rglob("*.py") if "cli" not in path.parts]
    assert len(texts) > 300 and not [text for text in texts if "force replaces it" in text or "force takes it" in text]
