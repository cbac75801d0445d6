"""Axes that are said: arrays in any order become K and V of layers, word for word."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import llama_files
import mlx_files
import numpy as np
import pytest

import kvmnn
from kvmnn.arrays.layers import collect_layers
from kvmnn.errors import KvmnnError, OptionError, SourceError

LENGTHS = {"2": 2, "l": 3, "b": 2, "h": 4, "t": 5, "d": 6}


def words(seed: int, axes: str, dtype: str = "<f2") -> np.ndarray:
    kind = np.dtype(dtype)
    bits = np.random.default_rng(seed).integers(0, 1 << 8 * kind.itemsize, [LENGTHS[a] for a in axes], np.uint64)
    return bits.astype(f"<u{kind.itemsize}").view(kind)


def expected(array: np.ndarray, axes: str) -> dict[str, np.ndarray]:
    """K and V of layers by numpy."""
    order = [axes.index(letter) for letter in "2lbhtd" if letter in axes]
    whole = array.transpose(order)
    for place, letter in enumerate("2l"):
        whole = whole if letter in axes else np.expand_dims(whole, place)
    return {
        f"layer_{layer}.{part}": np.ascontiguousarray(whole[n, layer])
        for n, part in enumerate(("key", "value")[: whole.shape[0]])
        for layer in range(whole.shape[1])
    }


def assert_same(source: Any, wanted: dict[str, np.ndarray]) -> None:
    assert sorted(source) == sorted(wanted)
    for name, array in wanted.items():
        found = source[name]
        assert found.shape == array.shape and found.order == "C"
        for limit in (0, 64, 1000):
            assert b"".join(piece.tobytes() for piece in found.iter_chunks(limit)) == array.tobytes()
        assert found.to_numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize("axes", [*["".join(letters) for letters in permutations("2lhtd")][::7], "lb2thd", "td2bhl"])
def test_open_single_array_with_any_axes_gives_layers(tmp_path: Path, axes: str) -> None:
    array = words(len(axes), axes)
    np.save(tmp_path / "a.npy", array)
    source = kvmnn.open(tmp_path / "a.npy", axes=axes.upper() if axes[0] == "t" else axes)
    assert_same(source, expected(array, axes))
    assert source.axes == ("bhtd" if "b" in axes else "htd")


@pytest.mark.parametrize("form", ["npz", "deflated", "fortran", "big", "safetensors", "frames"])
@pytest.mark.parametrize("axes", ["thd", "htd", "dth", "lthd", "tlhd", "bthd"])
def test_open_axes_apply_in_every_container(tmp_path: Path, run: Any, axes: str, form: str) -> None:
    keys, values = words(1, axes, "<f4"), words(2, axes, "<f4")
    names = ("k", "v") if "l" in axes else ("layers.0.key", "layers.0.value")
    path = tmp_path / "a.npz"
    if form == "deflated":
        np.savez_compressed(path, **dict(zip(names, (keys, values), strict=True)))
    elif form == "big":
        np.savez(path, **{n: a.astype(">f4") for n, a in zip(names, (keys, values), strict=True)})
    else:
        made = map(np.asfortranarray, (keys, values)) if form == "fortran" else (keys, values)
        np.savez(path, **dict(zip(names, made, strict=True)))
    if form in ("safetensors", "frames"):
        run("encode", path, "-o", tmp_path / "f/")
        path = tmp_path / "f"
    if form == "safetensors":
        run("decode", path, "-o", tmp_path / "a.safetensors")
        path = tmp_path / "a.safetensors"
    if form == "big":
        keys, values = (a.astype(">f4").astype("<f4") for a in (keys, values))
    both = np.stack([keys, values])
    source = kvmnn.open(path, axes=axes)
    if form != "big":  # a NaN may lose its payload on the way to the other order, in numpy
        assert_same(source, expected(both, f"2{axes}"))
    assert source["layer_0.key"].array_dtype == "<f4"


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["past_key_values.{n}.key", "past_key_values.{n}.value"], [0, 1, 11]),
        (["present.{n}.key", "present.{n}.value"], [0, 1]),
        (["layer_{n}.key", "layer_{n}.value"], [3, 1]),
        (["{n}.0", "{n}.1"], [0, 1, 10]),
        (["past_key_values.{n}.0", "past_key_values.{n}.1"], [0, 1]),
        (["layers.{n}.keys", "layers.{n}.values"], [0, 2]),
        (["k_{n}", "v_{n}"], [0, 1]),
        (["model.layers.{n}.self_attn.k_cache", "model.layers.{n}.self_attn.v_cache"], [0, 1]),
        (["l{n}_k", "l{n}_v"], [0, 1]),
    ],
)
def test_open_layer_names_are_recognized(tmp_path: Path, names: list[str], layers: list[int]) -> None:
    arrays = {name.format(n=n): words(n + len(name), "thd") for n in layers for name in names}
    np.savez(tmp_path / "a.npz", **arrays)
    source = kvmnn.open(tmp_path / "a.npz", axes="thd")
    wanted = {}
    for n in layers:
        for part, name in zip(("key", "value"), names, strict=True):
            wanted[f"layer_{n}.{part}"] = np.ascontiguousarray(arrays[name.format(n=n)].transpose(1, 0, 2))
    assert_same(source, wanted)
    assert list(source) == sorted(wanted, key=lambda name: (int(name[6:].split(".")[0]), name))


def test_open_raw_file_takes_shape_and_batch(tmp_path: Path, run: Any) -> None:
    array = words(5, "2lbhtd")
    array.tofile(tmp_path / "page.bin")
    shape = ",".join(map(str, array.shape[:4])) + ",-1,6"
    said = run("inspect", tmp_path / "page.bin", "--dtype", "fp16", "--shape", shape, "--axes", "2lbhtd").out
    assert "layer_2.value: fp16 [2, 4, 5, 6] C, 480 bytes" in said
    source = kvmnn.open(tmp_path / "page.bin", dtype="fp16", shape=(2, 3, 2, 4, -1, 6), axes="2lbhtd", batch=1)
    assert_same(source, expected(np.ascontiguousarray(array[:, :, 1]), "2lhtd"))
    one = ("--dtype", "fp16", "--shape", shape, "--axes", "2lbhtd", "--part", "batch=0")
    run("encode", tmp_path / "page.bin", "-o", tmp_path / "f/", *one)
    run("verify", tmp_path / "f", "--against", tmp_path / "page.bin", *one)
    assert_same(kvmnn.open(tmp_path / "f"), expected(np.ascontiguousarray(array[:, :, 0]), "2lhtd"))


def refused(tmp_path: Path, message: str, error: type[Exception] = SourceError, **said: Any) -> None:
    with pytest.raises(error, match=message):
        kvmnn.open(tmp_path / "a.npz", **said)


def test_open_axes_that_do_not_fit_are_refused(tmp_path: Path, run: Any) -> None:
    np.savez(tmp_path / "a.npz", k_0=words(1, "thd"), v_0=words(2, "thd"))
    refused(tmp_path, r"'k_0' has 3 axes \[5, 4, 6\], expected 4 \(lthd\)", axes="lthd")
    for wrong in ("th", "thdd", "thdx", ""):
        refused(tmp_path, "expected h", OptionError, axes=wrong)
    refused(tmp_path, r"expected lengths from 1 on", OptionError, shape=(0, 3))
    refused(tmp_path, r"expected lengths from 1 on", OptionError, shape=(-1, -1))
    refused(tmp_path, r"shape .5, 24. has 2 axes, 'thd' 3", OptionError, shape=(5, 24), axes="thd")
    refused(tmp_path, r"'k_0' has 120 words: expected 119", shape=(7, 17))
    refused(tmp_path, r"expected a multiple of 7", shape=(7, -1))
    refused(tmp_path, r"axis of K and V has length 5", axes="2hdt", shape=(5, 2, 3, 4))
    refused(tmp_path, r"no axis for a batch", OptionError, axes="thd", batch=0)
    refused(
        tmp_path, r"a batch of 5: expected --part batch=0 to 4", OptionError, axes="bhtd", shape=(5, 2, 3, 4), batch=5
    )
    np.savez(tmp_path / "a.npz", k_0=words(1, "thd"), v_1=words(2, "thd"))
    refused(tmp_path, "layer 0 has no array of its values", axes="thd")
    np.savez(tmp_path / "a.npz", k_0=words(1, "thd"), layer_0_k=words(2, "thd"))
    refused(tmp_path, "several keys of layer 0", axes="thd")
    np.savez(tmp_path / "a.npz", a=words(1, "2thd"), b=words(1, "2thd"))
    refused(tmp_path, "does not say which layer", axes="2thd")
    np.savez(tmp_path / "a.npz", a=words(1, "thd"))
    refused(tmp_path, "neither K nor V", axes="thd")
    both = ("--axes", "thd", "--token-major")
    assert "leave --token-major out" in run("measure", tmp_path / "a.npz", *both, code=2).err
    assert "is not a shape" in run("encode", tmp_path / "a.npz", "--shape", "2,x", "-o", tmp_path / "f/", code=2).err


def test_verb_batch_without_selection_is_refused(tmp_path: Path, run: Any) -> None:
    np.savez(tmp_path / "a.npz", **{f"layer_0.{part}": words(1, "bhtd") for part in ("key", "value")})
    for verb in (("measure",), ("mnn pack", "--name", "x", "--backend", "arm64-fp16")):
        said = run(verb[0], tmp_path / "a.npz", *verb[1:], code=2).err
        assert "it is a batch of 2: --part batch=N takes one text of it, from 0" in said
    said = run("measure", tmp_path / "a.npz", "--part", "batch=1")
    assert "2 layers" not in said.out
    assert "text 1 of a batch of 2; the others are left out" in said.err.replace("\n", " ")
    said = run("encode", tmp_path / "a.npz", "--part", "batch=1", "-o", tmp_path / "one/").err
    assert "text 1 of a batch of 2; the others are left out" in said.replace("\n", " ")
    run("diff", tmp_path / "a.npz", tmp_path / "a.npz")


def test_encode_keys_and_values_in_separate_files(tmp_path: Path, run: Any) -> None:
    keys, values = words(1, "lthd"), words(2, "lthd")
    np.save(tmp_path / "keys.npy", keys)
    np.save(tmp_path / "values.npy", values)
    run("encode", tmp_path / "keys.npy", tmp_path / "values.npy", "--axes", "lthd", "-o", tmp_path / "f/")
    assert_same(kvmnn.open(tmp_path / "f"), expected(np.stack([keys, values]), "2lthd"))
    said = run("measure", tmp_path / "keys.npy", "--axes", "lthd", code=1).err
    assert "layer 0 has no array of its values" in said


def test_verb_ambiguous_axes_are_refused(tmp_path: Path, run: Any) -> None:
    np.savez(tmp_path / "a.npz", **{"0.0": words(1, "thd"), "0.1": words(2, "thd")})
    said = run("measure", tmp_path / "a.npz", code=2).err
    assert "nothing says whether 5 or 4 is the number of tokens: say --axes htd (4 tokens) or --axes thd (5" in said
    run("measure", tmp_path / "a.npz", "--axes", "thd")
    wide = np.zeros((5, 300, 6), np.float16)  # no decoder has 300 kv heads
    np.savez(tmp_path / "b.npz", **{"0.0": wide, "0.1": wide})
    run("measure", tmp_path / "b.npz")


def test_errors_of_missing_axes_name_option_and_keyword(tmp_path: Path) -> None:
    """Who calls a function has no options."""
    np.savez(tmp_path / "a.npz", **{"0.0": words(1, "thd"), "0.1": words(2, "thd")})
    np.savez(tmp_path / "b.npz", **{name: np.zeros((2, 3, 4, 5, 6), np.float16) for name in ("layer_0.key", "x")})
    for name, message in (
        ("a.npz", r"--axes htd \(4 tokens\) or --axes thd \(5 tokens\), in Python axes="),
        ("b.npz", r"\(--axes, in Python axes=, says how arrays lie\)"),
    ):
        with pytest.raises(KvmnnError, match=message):
            collect_layers(kvmnn.open(tmp_path / name))
    with pytest.raises(OptionError, match=r"leave --part batch \(batch=\) out"):
        kvmnn.open(tmp_path / "a.npz", batch=0, axes="thd")


def test_verb_undeclared_batch_error_names_the_option(tmp_path: Path, run: Any) -> None:
    """Four axes under a name that says K and V of a layer, as inputs of decoders in ONNX have."""
    path = tmp_path / "a.npz"
    rows = np.random.default_rng(1).normal(size=(2, 4, 128, 64)).astype(np.float16)
    np.savez(path, **{f"past_key_values.0.{part}": rows for part in ("key", "value")})
    said = " ".join(run("measure", path, code=2).err.split())
    assert "if it is a batch of 2, --axes bhtd --part batch=N takes one text of it, from 0" in said
    said = " ".join(run("measure", path, "--part", "batch=0", code=2).err.split())
    assert "'past_key_values.0.key' [2, 4, 128, 64] is the batch: say --axes bhtd --part batch=0 (in Python" in said
    np.savez(tmp_path / "one.npz", **{f"layer_0.{part}": rows[1] for part in ("key", "value")})
    one = ("diff", path, tmp_path / "one.npz")
    assert "say --axes bhtd --part batch=1" in " ".join(run(*one, "--part", "batch=1", code=2).err.split())
    assert run(*one, "--axes", "bhtd", "--part", "batch=1").out.startswith("equal: ")
    assert "first difference" in run(*one, "--axes", "bhtd", "--part", "batch=0", code=1).out
    none = run("diff", tmp_path / "one.npz", tmp_path / "one.npz", "--part", "batch=0", code=2).err
    assert "have no axis for a batch: leave --part batch out" in " ".join(none.split())


def test_open_axes_equal_to_those_of_the_format_are_accepted(tmp_path: Path, run: Any) -> None:
    rng = Random(3)
    (tmp_path / "x.session").write_bytes(llama_files.state(rng, llama_files.Shape(), [12])[0])
    (tmp_path / "c.safetensors").write_bytes(mlx_files.cache(rng, mlx_files.Shape(dims=32, value_dims=32))[0])
    for path, own, other, more in (
        (tmp_path / "x.session", "htd", "thd", {"kv_heads": 2}),
        (tmp_path / "c.safetensors", "htd", "thd", {}),
    ):
        alone, said = kvmnn.open(path, **more), kvmnn.open(path, axes=own, **more)
        assert {name: said[name].shape for name in said} == {name: alone[name].shape for name in alone}
        assert said.engine_cache is not None
        with pytest.raises(OptionError, match=rf"says itself how its arrays lie \({own}\): leave --axes and"):
            kvmnn.open(path, axes=other, **more)
    run("measure", tmp_path / "x.session", "--kv-heads", 2, "--axes", "htd")
    said = run("encode", tmp_path / "c.safetensors", "--axes", "htd", "-o", tmp_path / "f/").err
    assert "arrays are encoded, and decode will not write the file: --axes" in said.replace("\n", " ")
