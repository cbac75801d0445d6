"""llama.cpp's transforms of K and V are inverted or noted in prefix caches, stores and comparisons."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace

import llama_files
import numpy as np
import pytest
from llama_files import Shape
from repository import ROOT

import kvmnn
from kvmnn.arrays import invert_source_transforms
from kvmnn.errors import MissingOptionError, OptionError
from kvmnn.formats.mnn import pack
from kvmnn.packed.inference import PackedGeometry

HEADS, TOKENS, DIMS, LAYERS = 2, 12, 64, 2
PACK = ("--backend", "arm64-fp16", "--name", "sys")


def words(layer: int, part: int) -> np.ndarray:
    """K or V ``[kv_head, token, head_dim]`` as a model of Hugging Face's has it."""
    rng = np.random.default_rng(10 * layer + part)
    return rng.normal(size=(HEADS, TOKENS, DIMS)).astype(np.float16)


def permuted(keys: np.ndarray) -> np.ndarray:
    """What the weights' permutation of llama.cpp's converter makes of K: [2, half] of a head becomes [half, 2]."""
    heads, tokens, dims = keys.shape
    return keys.reshape(heads, tokens, 2, dims // 2).swapaxes(-1, -2).reshape(heads, tokens, dims)


def session(architecture: str = "llama", *, named: bool = True) -> bytes:
    """A session file of such a model, or a sequence file, which does not name the architecture."""
    data = (llama_files.SESSION if named else llama_files.SEQUENCE) + struct.pack("<II", 10 if named else 3, TOKENS)
    data += struct.pack(f"<{TOKENS}i", *range(TOKENS))
    data += struct.pack("<I", len(architecture)) + architecture.encode() if named else b""
    data += struct.pack("<II", 1, TOKENS) + b"".join(struct.pack("<iIi", n, 1, 0) for n in range(TOKENS))
    data += struct.pack("<II", 0, LAYERS)
    for part in (0, 1):
        for layer in range(LAYERS):
            found = words(layer, part)
            found = permuted(found) if part == 0 else found
            data += struct.pack("<iQ", 1, HEADS * DIMS * 2) + found.transpose(1, 0, 2).tobytes()
    return data


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A session and a sequence of one Llama model, its header, and what Hugging Face computes."""
    monkeypatch.chdir(tmp_path)
    Path("x.session").write_bytes(session())
    Path("x.sequence").write_bytes(session(named=False))
    Path("qwen.session").write_bytes(session("qwen2"))
    Path("command-r.session").write_bytes(session("command-r"))
    fields = {"attention__head_count_kv": HEADS, "attention__key_length": DIMS, "block_count": LAYERS}
    Path("m.gguf").write_bytes(llama_files.gguf(**fields))
    Path("part.gguf").write_bytes(llama_files.gguf(**fields, rope__dimension_count=DIMS // 2))
    Path("qwen.gguf").write_bytes(llama_files.gguf("qwen2", **fields))
    arrays = {f"layer_{n}.{part}": words(n, i) for n in range(LAYERS) for i, part in enumerate(("key", "value"))}
    np.savez("own.npz", **arrays)
    return tmp_path


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("file", "said"), [("x.session", "--kv-heads 2"), ("x.sequence", "--model m.gguf")])
def test_pack_inverts_k_order_of_llama(here: Path, run, file: str, said: str) -> None:
    packed = run("mnn", "pack", file, *said.split(), *PACK, "-o", "sys/")
    note = "K of architecture 'llama': RoPE turns dimensions 2i and 2i + 1 together: brought into the order of other"
    assert (
        flat(packed.err).count("k-order") == 0 and note in flat(packed.err) and "--invert none keeps it" in packed.err
    )
    assert "LOSSLESS (undone: k-order, every file read back and compared)" in packed.out
    assert run("diff", "sys", "own.npz").out.startswith("equal: 6,144 words, bit by bit")
    found = kvmnn.open("sys")
    for layer in range(LAYERS):
        assert np.array_equal(found[f"layer_{layer}.key"].to_numpy(), words(layer, 0))
        assert np.array_equal(found[f"layer_{layer}.value"].to_numpy(), words(layer, 1))


def test_pack_invert_option_selects_transforms(here: Path, run) -> None:
    kept = run("mnn", "pack", "x.session", "--kv-heads", 2, *PACK, "--invert", "none", "-o", "kept/")
    assert "RoPE" not in kept.err and "undone" not in kept.out
    assert np.array_equal(kvmnn.open("kept")["layer_0.key"].to_numpy(), permuted(words(0, 0)))
    asked = run("mnn", "pack", "x.sequence", "--kv-heads", 2, *PACK, "--invert", "k-order", "-o", "asked/", "--json")
    assert json.loads(asked.out)["undone"] == ["k-order"] and "RoPE" not in asked.err
    assert "equal" in run("diff", "asked", "own.npz").out
    run(
        "mnn", "pack", "kept", *PACK, "--invert", "k-order", "-o", "mended/"
    )  # arrays of any input, as eval --initial-cache takes them
    assert "equal" in run("diff", "mended", "own.npz").out


def test_pack_unknown_k_order_is_noted(here: Path, run) -> None:
    nothing = "nothing says in which order llama.cpp has K: of Llama models and the like neighbours are turned together"
    for number, said in enumerate(("x.sequence --kv-heads 2", "command-r.session --kv-heads 2")):
        packed = run("mnn", "pack", *said.split(), *PACK, "-o", f"out{number}/")
        assert nothing in flat(packed.err) and "--invert k-order, or --invert none" in flat(packed.err)
    assert nothing in flat(run("mnn", "pack", "x.sequence", "--model", "part.gguf", *PACK, "-o", "part/").err)


def test_pack_k_in_halves_is_unchanged(here: Path, run) -> None:
    packed = run("mnn", "pack", "qwen.session", "--kv-heads", 2, *PACK, "-o", "qwen/")
    assert "RoPE" not in packed.err and "undone" not in packed.out
    assert np.array_equal(kvmnn.open("qwen")["layer_1.key"].to_numpy(), permuted(words(1, 0)))
    assert "RoPE" not in run("mnn", "pack", "x.sequence", "--model", "qwen.gguf", *PACK, "-o", "qwen2/").err


def test_unpack_keeps_k_order_with_a_note(here: Path, run) -> None:
    plain = run("mnn", "unpack", "x.session", "--kv-heads", 2, "-o", "plain.npz")
    assert "in other engines i and i + half a head: --invert k-order brings it into their order" in flat(plain.err)
    with np.load("plain.npz") as found:
        assert np.array_equal(found["layer_0.key"], permuted(words(0, 0)))
    undone = run("mnn", "unpack", "x.session", "--kv-heads", 2, "--invert", "k-order", "-o", "undone.npz")
    assert undone.err == "" and "LOSSLESS (live elements, read back and compared, undone: k-order)" in undone.out
    assert "equal" in run("diff", "undone.npz", "own.npz").out


def test_diff_inverts_k_order_of_llama_cpp_inputs(here: Path, run) -> None:
    far = run("diff", "own.npz", "x.session", "--kv-heads", 2, "--atol", 0.01, code=1)
    assert "K of architecture 'llama'" in far.err and "--invert k-order" in flat(far.err)
    for first, second in (("own.npz", "x.session"), ("x.session", "own.npz"), ("x.sequence", "x.session")):
        near = run("diff", first, second, "--kv-heads", 2, "--atol", 0, "--invert", "k-order")
        assert "within 0" in near.out and "RoPE" not in near.err
    assert run("diff", "x.session", "x.sequence", "--kv-heads", 2).err == "", "two of one engine lie alike"
    refused = run("diff", "own.npz", "own.npz", "--invert", "k-order", code=2).err
    assert "--invert is about caches of llama.cpp, and own.npz own.npz holds none" in flat(refused)


def test_frames_of_session_behave_like_the_session(here: Path, run) -> None:
    run("encode", "x.session", "-o", "f/")
    assert "RoPE turns" in run("mnn", "pack", "f", "--kv-heads", 2, *PACK, "-o", "sys/").err
    assert "equal" in run("diff", "sys", "own.npz").out
    assert "equal" in run("diff", "f", "own.npz", "--kv-heads", 2, "--invert", "k-order").out


@pytest.mark.parametrize("said", [[], ["--invert", "k-order"]], ids=["default", "explicit"])
def test_store_put_inverts_k_order(here: Path, run, said: list[str]) -> None:
    put = run("store", "put", "S", "x.session", "--kv-heads", 2, "--fingerprint", "m", *said)
    assert ("brought into the order of other engines" in flat(put.err)) == (not said)
    Path("ids.json").write_text(json.dumps(list(range(TOKENS))))
    run("store", "get", "S", "--token-ids", "ids.json", *PACK, "-o", "sys/")
    assert "equal" in run("diff", "sys", "own.npz").out


def test_store_put_invert_none_keeps_k_order(here: Path, run) -> None:
    put = run("store", "put", "S", "x.session", "--kv-heads", 2, "--fingerprint", "m", "--invert", "none")
    assert "RoPE" not in put.err
    Path("ids.json").write_text(json.dumps(list(range(TOKENS))))
    run("store", "get", "S", "--token-ids", "ids.json", "-o", "got.npz")
    assert "equal" in run("diff", "got.npz", "x.session", "--kv-heads", 2).out
    assert "--invert says nothing to store ls" in run("store", "ls", "S", "--invert", "none", code=2).err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("x.session --kv-heads 2 --invert all", "undo 'all': expected k-rotation, v-rotation or k-order"),
        ("x.session --kv-heads 2 --invert k-order,none", "undo 'none': expected k-rotation, v-rotation or k-order"),
        ("x.session --kv-heads 2 --invert v-rotation", "llama.cpp does no such thing to this cache: expected k-order"),
        ("qwen.session --kv-heads 2 --invert k-order", "does no such thing to this cache: leave --invert out"),
        (
            "x.session --kv-heads 2 --raw-blocks --invert k-order",
            "--invert is about numbers, not about a whole file or its",
        ),
        ("x.session --model qwen.gguf", "is of architecture 'llama', the model of 'qwen2'"),
    ],
)
def test_invert_invalid_value_is_refused(here: Path, run, argv: str, said: str) -> None:
    assert said in flat(run("mnn", "unpack", *argv.split(), "-o", "o.npz", code=2).err)
    assert not list(here.glob("o.*"))


def test_invert_rotation_precedes_k_order_and_rounds(here: Path, run) -> None:
    """K and V of q8_0 blocks, rotated by a Hadamard matrix, which is its own inverse."""
    data, caches = llama_files.state(Random(3), Shape(k_type="q8_0", v_type="q8_0", dims=DIMS, value_dims=DIMS), [12])
    Path("q.session").write_bytes(data)
    said = flat(run("mnn", "unpack", "q.session", "--kv-heads", 2, "-o", "as_is.npz").err)
    assert "(--invert k-rotation,v-rotation turns them back)" in said
    undone = run(
        "mnn", "unpack", "q.session", "--kv-heads", 2, "--invert", "k-order,k-rotation,v-rotation", "-o", "q.npz"
    )
    assert "LOSSY (dequantised from q8_0, undone: k-rotation, v-rotation, k-order)" in undone.out
    assert "; rounded by undoing k-rotation and v-rotation" in kvmnn.open("q.npz").metadata["kvmnn.lossy"]
    assert "Hadamard" not in undone.err
    hadamard = np.array([[(-1.0) ** (row & column).bit_count() for column in range(DIMS)] for row in range(DIMS)])
    with np.load("q.npz") as found:
        for layer in range(LAYERS):
            turned = caches[0][0].keys[layer].astype(np.float64) @ hadamard / 8
            expected = turned.reshape(HEADS, 12, DIMS // 2, 2).swapaxes(-1, -2).reshape(HEADS, 12, DIMS)
            assert np.allclose(found[f"layer_{layer}.key"], expected, rtol=1e-5, atol=1e-4)
            assert np.allclose(found[f"layer_{layer}.value"], caches[0][0].values[layer] @ hadamard / 8, atol=1e-4)
    packed = run("mnn", "pack", "q.session", "--kv-heads", 2, "--backend", "x86-avx2", "--name", "s", "-o", "p/")
    assert "LOSSY (dequantised from q8_0, undone: k-order" in packed.out
    assert "(--invert k-rotation,v-rotation turns them back)" in flat(packed.err)


def test_open_invert_equals_the_command(here: Path) -> None:
    source = kvmnn.open("x.session", kv_heads=HEADS)
    assert np.array_equal(source["layer_0.key"].to_numpy(), permuted(words(0, 0))), "words as they lie in the file"
    assert source.engine_cache is not None and source.engine_cache.altered == ("k-order",)
    mended = kvmnn.open("x.session", model="m.gguf", invert=["k-order"])
    assert (
        mended.inverted_transforms == ("k-order",)
        and mended.engine_cache is not None
        and not mended.engine_cache.altered
    )
    for layer in range(LAYERS):
        assert np.array_equal(mended[f"layer_{layer}.key"].to_numpy(), words(layer, 0))
        assert np.array_equal(mended[f"layer_{layer}.value"].to_numpy(), words(layer, 1))
    packed = pack(source, "sys", PackedGeometry(backend="arm64-fp16"), name="sys")
    assert packed.undone == ("k-order",) and any("brought into the order" in note for note in packed.notes)
    assert np.array_equal(kvmnn.open("sys")["layer_1.key"].to_numpy(), words(1, 0))
    layers = kvmnn.store.read_layer_caches(source)
    assert np.array_equal(layers[0].keys, words(0, 0))
    with pytest.raises(OptionError, match=r"--kv-heads N, or --model FILE.gguf \(in Python kv_heads=N, or model=\)"):
        kvmnn.open("x.session")
    with pytest.raises(OptionError, match="has to be said together with it"):
        invert_source_transforms(mended, ["k-order"])


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "bf16"])
@pytest.mark.parametrize("step", [64, 192, 130, 1 << 20])
def test_invert_k_order_in_chunks_of_any_size(tmp_path: Path, dtype: str, step: int) -> None:
    kind = {"fp16": np.float16, "fp32": np.float32, "bf16": np.uint16}[dtype]
    keys = np.arange(3 * 5 * 32).reshape(3, 5, 32).astype(kind)
    np.savez(tmp_path / "x.npz", **{"layer_0.key": permuted(keys), "layer_0.value": keys})
    source = kvmnn.open(tmp_path / "x.npz", invert=["k-order"], dtype=dtype)
    step -= step % keys.itemsize
    runs = list(source["layer_0.key"].reader(step))
    assert b"".join(run.tobytes() for run in runs) == keys.tobytes()
    assert {run.size for run in runs[:-1]} <= {step}
    assert np.array_equal(source["layer_0.value"].to_numpy(), keys)


@pytest.mark.parametrize("case", ["f16.session.bin", "f16.sequence.bin", "bf16_fa.session.bin"])
def test_invert_k_order_of_real_files(unpacked: Callable[[str], Path], tmp_path: Path, run, case: str) -> None:
    folder = unpacked("llama") / "b"
    with np.load(folder / f"{case}.expected0.npz") as found:
        expected = {name: found[name] for name in found}
    sources = [kvmnn.open(folder / case, model=folder / "model.gguf", invert=["k-order"])]
    if not case.startswith("bf16"):  # no backend of MNN's holds bf16 words
        packed = ("--backend", "arm64-fp16", "--name", "s", "-o", tmp_path / "sys")
        run("mnn", "pack", folder / case, "--model", folder / "model.gguf", *packed)
        sources.append(kvmnn.open(tmp_path / "sys"))
    for source in sources:
        for name, stored in expected.items():
            heads, tokens, dims = stored.shape
            own = stored.reshape(heads, tokens, dims // 2, 2).swapaxes(-1, -2).reshape(stored.shape)
            own = own if name.endswith("key") else stored
            assert np.array_equal(source[name].to_numpy().view(np.uint16), own.view(np.uint16)), name


def test_docs_example_of_invert_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "other-engines.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (example,) = [block for block in blocks if 'kvmnn.open("chat.session", kv_heads' in block]
    monkeypatch.chdir(tmp_path)
    data, caches = llama_files.state(Random(5), Shape(heads=8), [9])
    Path("chat.session").write_bytes(data)
    fields = {"attention__head_count_kv": 8, "attention__key_length": 32, "block_count": 2}
    Path("llama-3.2-1b.gguf").write_bytes(llama_files.gguf(**fields))
    found: dict[str, object] = {}
    exec(example, found)
    stored = caches[0][0].keys[0]
    own = stored.reshape(8, 9, 16, 2).swapaxes(-1, -2).reshape(8, 9, 32)
    assert np.array_equal(np.asarray(found["keys"]).view(np.uint16), own)
    assert np.array_equal(kvmnn.open("prefix/")["layer_0.key"].to_numpy().view(np.uint16), own)


def test_zarr_store_keeps_k_order_metadata(here: Path, run) -> None:
    run("encode", "x.session", "--kv-heads", 2, "-o", "x.zarr")
    assert "RoPE turns" in run("mnn", "pack", "x.zarr", *PACK, "-o", "sys/").err
    assert "equal" in run("diff", "sys", "own.npz").out


@pytest.mark.parametrize("architecture", ["granite", "mistral3", "olmo", "smollm3"])
def test_pack_architectures_permuting_k_are_inverted(here: Path, run, architecture: str) -> None:
    Path("other.session").write_bytes(session(architecture))
    packed = run("mnn", "pack", "other.session", "--kv-heads", 2, *PACK, "-o", "other/")
    assert f"K of architecture {architecture!r}: RoPE turns dimensions 2i and 2i + 1 together: brought" in flat(
        packed.err
    )
    assert run("diff", "other", "own.npz").out.startswith("equal: ")


def test_to_cache_warns_of_inverted_k_order(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=lambda words: words))
    with pytest.warns(UserWarning, match="of architecture 'llama': RoPE turns .*: brought into the order of other"):
        made = kvmnn.to_cache(kvmnn.open("x.session", kv_heads=HEADS), return_pairs=True)
    assert np.array_equal(made[1][0][0], words(1, 0))
    with pytest.warns(UserWarning, match="nothing says in which order llama.cpp has K"):
        kvmnn.to_cache(kvmnn.open("x.sequence", kv_heads=HEADS), return_pairs=True)
    kvmnn.to_cache(kvmnn.open("x.sequence", kv_heads=HEADS, invert=["none"]), return_pairs=True)  # without one


def test_to_cache_warns_of_missing_tokens(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=lambda words: words))
    state, _ = llama_files.state(Random(3), Shape(), [12], gaps=True, architecture="qwen2")
    Path("gaps.session").write_bytes(state)
    with pytest.warns(UserWarning, match="gaps.session: holds no beginning of a text, .* positions 0 to"):
        kvmnn.to_cache(kvmnn.open("gaps.session", kv_heads=2), return_pairs=True)


@pytest.mark.parametrize("form", ["d", "d.npz", "d.frames", "p"])
@pytest.mark.parametrize("places", [[0, 1, 5, 9], [[0, 1, 2, 3], [0, 1, 5, 9]], [6, 7, 8, 9], [0, 1, 2, 3]])
def test_to_cache_warns_of_an_evicted_cache(
    tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch, places: list[int] | list[list[int]], form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=lambda words: words))
    layers = [{"layer": n, "positions": [0, 1, 2, 3] if n == 0 else places} for n in range(3)]
    Path("d").mkdir()
    for number in range(3):
        for part in ("key", "value"):
            np.save(f"d/layer_{number}.{part}.npy", np.ones((2, 4, 8), np.float16))
    Path("d/positions.json").write_text(json.dumps({"tokens_seen": 10, "layers": layers}))
    if form == "d.npz":
        run("mnn", "unpack", "d", "-o", form)
    elif form == "d.frames":
        run("encode", "d", "-o", form)
    elif form == "p":
        run("mnn", "pack", "d", "--backend", "arm64-fp16", "--name", "x", "-o", form)
    if places == [0, 1, 2, 3]:
        kvmnn.to_cache(form, return_pairs=True)
        return
    with pytest.warns(UserWarning, match="layer 1 holds 4 tokens of positions up to 9, and so 1 more layer"):
        kvmnn.to_cache(form, return_pairs=True)


def test_to_cache_reads_as_open_does(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=lambda words: words))
    made = kvmnn.to_cache("x.session", kv_heads=HEADS, invert=["none"], return_pairs=True)
    assert np.array_equal(made[1][0][0], kvmnn.open("x.session", kv_heads=HEADS)["layer_1.key"].to_numpy())
    state, _ = llama_files.state(Random(3), Shape(), [3, 0, 5])
    Path("two.session").write_bytes(state)
    with pytest.raises(MissingOptionError, match=r"2 streams hold cells: --part stream=N says .*, in Python stream="):
        kvmnn.to_cache("two.session", kv_heads=2)
    two = kvmnn.to_cache("two.session", kv_heads=2, stream=2, invert=["none"], return_pairs=True)
    assert two[0][0].shape == (1, 2, 5, 32)
    with pytest.raises(OptionError, match=r"x\.session: is open: kv_heads say"):
        kvmnn.to_cache(kvmnn.open("x.session", kv_heads=HEADS), kv_heads=HEADS)


@pytest.mark.parametrize("name", ["past_key_values.{}.{}", "present.{}.{}", "model.layers.{}.self_attn.{}"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_to_cache_follows_the_table_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, in_memory: bool
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=lambda words: words))
    rows = np.random.default_rng(3).standard_normal((2, 2, 1, 2, 50, 16)).astype(np.float16)
    arrays = {name.format(n, p): rows[n, i] for n in range(2) for i, p in enumerate(("key", "value"))}
    np.savez(tmp_path / "x.npz", **arrays)
    made = kvmnn.to_cache(arrays if in_memory else tmp_path / "x.npz", return_pairs=True)
    assert all(np.array_equal(made[n][i], rows[n, i]) for n in range(2) for i in range(2))


def test_to_cache_ambiguous_axes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=lambda words: words))
    arrays = {f"{n}.{part}": np.ones((1, 2, 5, 8), np.float16) for n in range(2) for part in range(2)}
    with pytest.raises(MissingOptionError, match="nothing says whether 2 or 5 is the number of tokens"):
        kvmnn.to_cache(arrays)
    rows = np.random.default_rng(3).standard_normal((2, 300, 4, 16)).astype(np.float16)
    by_token = kvmnn.to_cache({f"0.{part}": rows[part] for part in range(2)}, return_pairs=True)  # too many for heads
    assert np.array_equal(by_token[0][1][0], rows[1].transpose(1, 0, 2))
    by_head = kvmnn.to_cache({f"0.{part}": rows[part].transpose(1, 0, 2) for part in range(2)}, return_pairs=True)
    assert np.array_equal(by_head[0][1], by_token[0][1])
    with pytest.warns(UserWarning, match="is read as 50 kv heads of 2 tokens"):
        kvmnn.to_cache({f"k_{n}" if k else f"v_{n}": np.ones((50, 2, 8), np.float16) for n in (0, 1) for k in (0, 1)})
