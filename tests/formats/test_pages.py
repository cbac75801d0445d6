"""Pages of LMCache and SGLang, and folders of vLLM's ExampleConnector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_files import folder

import kvmnn
from kvmnn.errors import KvmnnError, SourceError
from kvmnn.formats.raw import parse_page_name

SHAPE = (2, 3, 8, 2, 4)


def drawn(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, shape).astype("<u2")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("meta-llama-Llama-3@1@0@12ab@bfloat16.pt", ("bf16", None)),
        ("m@1@0@-12ab@half.pt", ("fp16", None)),
        ("m@1@0@12ab@float@17.data", ("fp32", 17)),
        ("a@b@1@0@12ab@float16@3.pt", ("fp16", 3)),
        ("m@1@0@12ab@fp8_e4m3.pt", ("float8_e4m3fn", None)),
        ("m@1@0@12ab@float8_e5m2@3.pt", ("float8_e5m2", 3)),
        ("m@1@0@12ab@uint8.pt", ("", None)),
        ("m@1@0@12ab@int4.pt", None),
        ("m@12ab@half.pt", None),
        ("m@1@12ab@half.pt", None),
        ("m@1@12ab@half@17.data", None),
        ("cache.pt", None),
        ("m@1@0@12ab@half@x.pt", None),
    ],
)
def test_parse_page_name_of_lmcache(name: str, said: Any) -> None:
    page = parse_page_name(f"folder@1@2@3@half/{name}")
    assert (page and page[:2]) == said


@pytest.mark.parametrize(
    ("type_in_name", "dtype", "is_read"),
    [
        ("bfloat16", "bf16", True),
        ("bfloat16", "fp16", False),
        ("half", "bf16", False),
        ("float", "fp16", False),
        ("half@7", "fp32", False),
        ("float8_e5m2", "float8_e4m3fn", False),
        ("float8_e4m3fn", "float8_e4m3fnuz", False),
        ("fp8_e4m3", "float8_e4m3fnuz", True),
        ("fp8", "float8_e5m2", False),
        ("uint8", "float8_e5m2fnuz", True),
        ("uint8", "bf16", True),
    ],
)
def test_open_page_conflicting_dtype_is_refused(tmp_path: Path, type_in_name: str, dtype: str, is_read: bool) -> None:
    path = tmp_path / f"org-model@1@0@12ab@{type_in_name}.data"
    path.write_bytes(drawn(5).tobytes())
    if is_read:
        assert kvmnn.open(path, dtype=dtype).arrays[0].shape
        return
    with pytest.raises(KvmnnError, match=rf"numbers, and {dtype} \(--dtype\) would make others of them"):
        kvmnn.open(path, dtype=dtype)


def test_open_lmcache_page(tmp_path: Path, run: Any) -> None:
    words = drawn(1)
    path = tmp_path / "org-model@1@0@12ab@bfloat16.pt"
    path.write_bytes(words.tobytes())
    whole = kvmnn.open(path)
    assert (len(whole), whole.arrays[0].dtype, whole.arrays[0].shape) == (1, "bf16", (words.size,))
    source = kvmnn.open(path, shape=(2, 3, 8, 2, 4), axes="2lthd")
    assert source["layer_2.value"].to_numpy().tobytes() == words[1, 2].transpose(1, 0, 2).tobytes()
    run("measure", path, "--shape", "2,3,8,2,4", "--axes", "2lthd")
    run("encode", path, "-o", tmp_path / "f/", "--shape", "2,3,-1,2,4", "--axes", "2lthd")
    assert list(kvmnn.open(tmp_path / "f")) == list(source)


def test_open_lmcache_page_of_one_layer(tmp_path: Path) -> None:
    words = drawn(2, (2, 8, 8))
    path = tmp_path / "org-model@1@0@12ab@half@5.pt"
    path.write_bytes(words.tobytes())
    source = kvmnn.open(path, shape=(2, 8, 2, 4), axes="2thd")
    assert list(source) == ["layer_5.key", "layer_5.value"]
    assert source["layer_5.key"].to_numpy().tobytes() == words[0].reshape(8, 2, 4).transpose(1, 0, 2).tobytes()


def test_open_sglang_page_needs_dtype(tmp_path: Path, run: Any) -> None:
    words = drawn(3)
    path = tmp_path / "0123abcd_model_0_1.bin"
    path.write_bytes(words.tobytes())
    with pytest.raises(SourceError, match="raw bytes need a dtype"):
        kvmnn.open(path, shape=SHAPE, axes="2lthd")
    run("measure", path, "--dtype", "bf16", "--shape", "2,3,8,2,4", "--axes", "2lthd")
    said = run("measure", path, "--dtype", "bf16", "--shape", "2,3,8,2,5", "--axes", "2lthd", code=2).err
    assert "has 384 words: expected 480 ([2, 3, 8, 2, 5])" in said


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((2, 7, 8), {"shape": (2, -1, 2, 4), "axes": "2thd"}),
        ((7, 2, 2, 4), {"axes": "t2hd"}),
        ((2, 7, 2, 4), {"axes": "2thd"}),
    ],
)
def test_open_vllm_folder(tmp_path: Path, shape: tuple[int, ...], said: Any) -> None:
    arrays = folder(tmp_path / "0cc175b9", shape)
    plain = kvmnn.open(tmp_path / "0cc175b9")
    assert list(plain)[:3] == [f"model.layers.{n}.self_attn.attn" for n in range(3)]
    source = kvmnn.open(tmp_path / "0cc175b9", **said)
    assert list(source) == [f"layer_{n}.{part}" for n in range(12) for part in ("key", "value")]
    two_first = arrays[10].reshape(7, 2, 2, 4).swapaxes(0, 1) if shape[0] == 7 else arrays[10].reshape(2, 7, 2, 4)
    expected = two_first[1].transpose(1, 0, 2)
    assert source["layer_10.value"].to_numpy().tobytes() == expected.tobytes()


def test_unpack_vllm_folder(tmp_path: Path, run: Any) -> None:
    arrays = folder(tmp_path / "0cc175b9", (7, 2, 2, 4))
    run("mnn", "unpack", tmp_path / "0cc175b9", "--axes", "t2hd", "-o", tmp_path / "kv.npz")
    assert np.load(tmp_path / "kv.npz")["layer_3.key"].tobytes() != arrays[3].tobytes()
    words = kvmnn.open(tmp_path / "kv.npz", dtype="bf16")["layer_3.key"].to_numpy()
    assert words.tobytes() == arrays[3].reshape(7, 2, 2, 4)[:, 0].transpose(1, 0, 2).tobytes()


def test_measure_vllm_folder_needs_axes(tmp_path: Path, run: Any) -> None:
    folder(tmp_path / "0cc175b9", (2, 7, 8), layers=2)
    assert "  model.layers.0.self_attn.attn: bf16 [2, 7, 8] C" in run("inspect", tmp_path / "0cc175b9").out
    said = run("measure", tmp_path / "0cc175b9", code=2).err
    assert "that have l for an axis of layers, or 2 in them for one of K and V" in said and said.count("\n") == 1
    (tmp_path / "0cc175b9" / "other.safetensors").write_bytes(b"x")
    assert "too few for a .safetensors file" in run("inspect", tmp_path / "0cc175b9", code=1).err


@pytest.mark.parametrize("axes", ["2lthd", "lt2hd", "thd2l", "2lhtd"])
def test_open_pages_of_one_text_are_joined(tmp_path: Path, run: Any, axes: str) -> None:
    lengths = {"2": 2, "l": 2, "h": 3, "d": 4}
    pages = []
    for number, tokens in enumerate((8, 8, 3)):
        words = drawn(number, tuple(tokens if letter == "t" else lengths[letter] for letter in axes))
        path = tmp_path / f"{'zmb'[number]}.bin"
        path.write_bytes(words.tobytes())
        pages.append((path, words.transpose([axes.index(letter) for letter in "2lhtd"])))
    expected = np.concatenate([words for _, words in pages], axis=3)
    shape = ",".join("-1" if letter == "t" else str(lengths[letter]) for letter in axes)
    said = ("--dtype", "bf16", f"--shape={shape}", "--axes", axes, "--pages")
    paths = [path for path, _ in pages]
    run("encode", *paths, "-o", tmp_path / "f/", *said)
    found = kvmnn.open(tmp_path / "f")
    assert len(found) == 4
    for layer in range(2):
        for side, part in enumerate(("key", "value")):
            assert np.array_equal(found[f"layer_{layer}.{part}"].to_numpy(), expected[side, layer])
    run("measure", *paths, *said)
    run("verify", tmp_path / "f", *(word for path in paths for word in ("--against", path)), *said)
    assert "--pages: they are pages of one text" in run("encode", *paths, "-o", tmp_path / "g/", *said[:-1], code=2).err
    assert "needs --axes" in run("encode", *paths, "-o", tmp_path / "g/", "--dtype", "bf16", "--pages", code=2).err


def test_open_pages_of_single_layers_are_joined(tmp_path: Path, run: Any) -> None:
    paths, expected = [], []
    for number in range(2):
        for layer in range(2):
            words = drawn(10 * number + layer, (2, 4, 6))
            path = tmp_path / f"m@1@0@{number}ab@half@{layer}.pt"
            path.write_bytes(words.tobytes())
            paths.append(path)
            expected.append(words.reshape(2, 4, 3, 2).transpose(0, 2, 1, 3))
    run("encode", *paths, "-o", tmp_path / "f/", "--shape", "2,-1,3,2", "--axes", "2thd", "--pages")
    found = kvmnn.open(tmp_path / "f")
    for layer in range(2):
        whole = np.concatenate([expected[layer], expected[2 + layer]], axis=2)
        assert found[f"layer_{layer}.value"].to_numpy().tobytes() == whole[1].tobytes()
    np.save(tmp_path / "layer_0.key.npy", np.zeros((2, 4, 3), np.float16))
    np.save(tmp_path / "layer_0.value.npy", np.zeros((2, 4, 3), np.float16))
    (tmp_path / "b").mkdir()
    np.save(tmp_path / "b/layer_0.key.npy", np.zeros((3, 4, 3), np.float16))
    np.save(tmp_path / "b/layer_0.value.npy", np.zeros((3, 4, 3), np.float16))
    several = [tmp_path / "layer_0.key.npy", tmp_path / "layer_0.value.npy", *(tmp_path / "b").iterdir()]
    said = run("measure", *several, "--axes", "htd", "--pages", code=1).err
    assert "expected the same but for their tokens" in said
