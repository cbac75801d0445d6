"""Plain arrays unpacked from another engine's cache record their origin, and are treated as that cache."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import llama_files
import numpy as np
import pytest
from hf_files import cache_object, pairs, save
from llama_files import Shape

import kvmnn
from kvmnn.errors import ManifestError
from kvmnn.formats.npz import build_comment

Run = Callable[..., Any]
FORMATS = pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
PACK = ("--backend", "x86-avx2", "--cast", "--name", "sys")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A session of a Llama, whole and with gaps."""
    monkeypatch.chdir(tmp_path)
    for name, gaps in (("whole", False), ("gaps", True)):
        data, _ = llama_files.state(Random(3), Shape(k_type="q8_0"), [7], gaps=gaps)
        Path(f"{name}.session").write_bytes(data)
    return tmp_path


def tree(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def same(one: Any, other: Any) -> None:
    assert json.dumps(one.to_dict()) == json.dumps(other.to_dict())


@FORMATS
@pytest.mark.parametrize("name", ["whole", "gaps"])
def test_engine_notes_pack_equals_pack_of_session(here: Path, run: Run, name: str, suffix: str) -> None:
    session, arrays = f"{name}.session", f"a{suffix}"
    run("mnn", "unpack", session, "--kv-heads", 2, "-o", arrays)
    source, own = kvmnn.open(arrays), kvmnn.open(session, kv_heads=2)
    same(source.engine_cache, own.engine_cache)
    assert source.dequantized_types == ("q8_0",)
    assert "llama.cpp session: 2 layers, 2 kv heads of 32, 7 tokens" in run("inspect", arrays).out
    first = run("mnn", "pack", session, "--kv-heads", 2, *PACK, "-o", "p1/")
    second = run("mnn", "pack", arrays, *PACK, "-o", "p2/")
    assert "brought into the order of other engines" in second.err and "note: dequantised" in first.err
    assert tree("p1") == tree("p2")
    assert "equal" in run("diff", arrays, session, "--kv-heads", 2).out


@FORMATS
def test_engine_notes_round_trip_through_frames_and_stores(here: Path, run: Run, suffix: str) -> None:
    run("mnn", "unpack", "gaps.session", "--kv-heads", 2, "-o", f"a{suffix}")
    run("encode", f"a{suffix}", "-o", "f/")
    same(kvmnn.open("f").engine_cache, kvmnn.open(f"a{suffix}").engine_cache)
    run("decode", "f/", "-o", f"b{suffix}")
    assert Path(f"b{suffix}").read_bytes() == Path(f"a{suffix}").read_bytes()
    run("encode", f"a{suffix}", "-o", "x.zarr")
    run("mnn", "unpack", "x.zarr", "-o", f"c{suffix}")
    assert Path(f"c{suffix}").read_bytes() == Path(f"a{suffix}").read_bytes()


@FORMATS
def test_engine_notes_inverted_order_is_not_inverted_again(here: Path, run: Run, suffix: str) -> None:
    run("mnn", "unpack", "whole.session", "--kv-heads", 2, "--invert", "k-order", "-o", f"a{suffix}")
    run("mnn", "pack", "whole.session", "--kv-heads", 2, *PACK, "-o", "p1/")
    assert "order" not in run("mnn", "pack", f"a{suffix}", *PACK, "-o", "p2/").err
    assert tree("p1") == tree("p2")


@FORMATS
def test_engine_notes_token_ids_for_the_store(here: Path, run: Run, suffix: str) -> None:
    run("mnn", "unpack", "whole.session", "--kv-heads", 2, "-o", f"a{suffix}")
    run("store", "put", "s", "whole.session", "--kv-heads", 2, "--fingerprint", "m")
    assert "all of them were stored already" in run("store", "put", "s", f"a{suffix}", "--fingerprint", "m").out


@FORMATS
def test_engine_notes_layers_with_different_tokens(tmp_path: Path, run: Run, suffix: str) -> None:
    whole, window = pairs(3, layers=2, shape=(1, 2, 20, 4), dtype="fp16"), pairs(4, layers=1, dtype="fp16")
    states: list[dict[str, Any]] = [{"keys": keys, "values": values} for keys, values in whole]
    keys, values = window[0]
    states.insert(1, {"keys": keys, "values": values, "cumulative_length": 20, "sliding_window": 6})
    path = save(tmp_path / "a.pt", cache_object("DynamicCache", "DynamicLayer", states))
    run("mnn", "unpack", path, "-o", tmp_path / f"a{suffix}")
    source, own = kvmnn.open(tmp_path / f"a{suffix}"), kvmnn.open(path)
    same(source.engine_cache, own.engine_cache)
    assert source.axes == own.axes == "bhtd"
    assert kvmnn.open(tmp_path / f"a{suffix}", batch=0)["layer_0.key"].shape == (2, 20, 4)
    whole = source.engine_cache
    for numbers in ((1,), (0, 2), (1, 2)):
        names = tuple(f"layer_{number}.key" for number in numbers)
        said = kvmnn.open(path, tensors=names).engine_cache
        assert said is not None and said.layer_positions is not None and whole is not None
        assert [each.size for each in said.layer_positions] == [5 if number == 1 else 20 for number in numbers]
        assert said.layers == len(numbers) and len(said.types) == 2 * len(numbers)


@FORMATS
def test_engine_notes_of_selected_arrays_are_kept(here: Path, run: Run, suffix: str) -> None:
    """Also with the arrays' own axes given: tokens and the order of K are unchanged."""
    run("mnn", "unpack", "gaps.session", "--kv-heads", 2, "-o", f"a{suffix}")
    run("encode", f"a{suffix}", "-o", "f/")
    run("encode", f"a{suffix}", "-o", "x.zarr")
    whole = kvmnn.open(f"a{suffix}").engine_cache
    assert whole is not None and not whole.is_contiguous_prefix
    chosen = ("layer_0.key", "layer_0.value")
    opened = [kvmnn.open(f"a{suffix}", axes="htd"), kvmnn.open("gaps.session", kv_heads=2, tensors=chosen)]
    opened += [kvmnn.open(path, tensors=chosen) for path in (f"a{suffix}", "f", "x.zarr")]
    run("encode", f"a{suffix}", "--tensor", chosen[0], "--tensor", chosen[1], "-o", "g/")
    for source in (*opened, kvmnn.open("g")):
        found = source.engine_cache
        assert found is not None and not any("left out" in note for note in source.notes)
        assert (found.position_runs, found.altered, found.tokens) == (whole.position_runs, whole.altered, whole.tokens)
    run("diff", f"a{suffix}", f"a{suffix}", "--axes", "htd")
    wrong = ("--token-ids", "1,2,3", "--fingerprint", "m", "--force")
    for options in (("--axes", "htd"), ("--tensor", chosen[0], "--tensor", chosen[1])):
        said = run("store", "put", "s", f"a{suffix}", *options, *wrong, code=1).err
        assert "holds no beginning of a text" in said.replace("\n", " ")


@FORMATS
def test_engine_notes_of_other_axes_are_dropped(here: Path, run: Run, suffix: str) -> None:
    run("mnn", "unpack", "whole.session", "--kv-heads", 2, "-o", f"a{suffix}")
    source = kvmnn.open(f"a{suffix}", axes="thd")
    assert source.engine_cache is None
    note, loss = source.notes
    assert loss == "LOSSY: rounded by a cast: quantised to q8_0"
    assert note == f"what a{suffix} says of its tokens is left out: --axes and --shape make other arrays of it"
    again = run("encode", f"a{suffix}", f"a{suffix}", "-o", "two/").err.replace("\n", " ")
    assert f"what a{suffix} says of its tokens is left out: several inputs are taken together" in again


def test_engine_notes_changed_arrays_are_detected(here: Path, run: Run) -> None:
    run("mnn", "unpack", "whole.session", "--kv-heads", 2, "-o", "a.npz")
    with np.load("a.npz") as found, zipfile.ZipFile("a.npz") as archive:
        arrays, comment = dict(found), archive.comment
    np.savez("b.npz", **{name: array[:, 2:] for name, array in arrays.items()})
    with zipfile.ZipFile("b.npz", "a") as archive:
        archive.comment = comment
    source = kvmnn.open("b.npz")
    assert (source.engine_cache, list(source.metadata)) == (None, ["kvmnn.lossy"])
    assert source.notes == [
        "the arrays are not those, or not all, of which the file says what engine they come from",
        "LOSSY: rounded by a cast: quantised to q8_0",
    ]


def test_engine_notes_are_invisible_to_numpy(here: Path, run: Run) -> None:
    run("mnn", "unpack", "whole.session", "--kv-heads", 2, "-o", "a.npz")
    with np.load("a.npz") as found:
        assert found.files == [f"layer_{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]


def test_engine_notes_missing_in_folders_are_noted(here: Path, run: Run) -> None:
    said = "a/ does not say of what engine it is, nor which tokens it holds: .safetensors and .npz do"
    assert said in run("mnn", "unpack", "whole.session", "--kv-heads", 2, "-o", "a/").err
    assert kvmnn.open("a").engine_cache is None


def test_engine_notes_too_many_token_ids_for_npz(tmp_path: Path, run: Run) -> None:
    data, _ = llama_files.state(Random(3), Shape(layers=1, heads=1), [3], tokens=20_000)
    (tmp_path / "x.session").write_bytes(data)
    out = tmp_path / "a.npz"
    assert (
        f"{out} does not say the token ids, .safetensors does"
        in run("mnn", "unpack", tmp_path / "x.session", "--kv-heads", 1, "-o", out).err
    )
    cache = kvmnn.open(out).engine_cache
    assert cache is not None and cache.token_ids is None and cache.altered == ("k-order",)
    run("mnn", "unpack", tmp_path / "x.session", "--kv-heads", 1, "-o", tmp_path / "a.safetensors")
    cache = kvmnn.open(tmp_path / "a.safetensors").engine_cache
    assert cache is not None and cache.token_ids is not None and cache.token_ids.size == 20_000


OF_OTHERS = '{"version": 1, "shapes": {"a": [2, 2]}, "axes": null, "cache": {"tokens": %d%s}}'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "version"),
        ('{"version": 2}', "a later kvmnn"),
        ('{"version": 1, "shapes": {"a": [2, 2]}, "axes": null, "cache": {"engine": 3}}', "layers|tokens|engine"),
        (OF_OTHERS % (1 << 24, ""), "expected the tokens of the arrays"),
        (OF_OTHERS % (2, ', "layer_positions": [[], []]'), "positions of the layers that there are"),
        ("no JSON", "JSON"),
    ],
)
def test_engine_notes_malformed_are_refused(tmp_path: Path, text: str, why: str) -> None:
    np.savez(tmp_path / "a.npz", a=np.zeros((2, 2), np.float16))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.comment = build_comment({"kvmnn.engine_cache": text}) or b""
    with pytest.raises(ManifestError, match=why):
        kvmnn.open(tmp_path / "a.npz")


def test_engine_notes_foreign_comments_are_ignored(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.zeros((2, 2), np.float16))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.comment = b'{"made": "by me"}'
    assert kvmnn.open(tmp_path / "a.npz").metadata == {}
