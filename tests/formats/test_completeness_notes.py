"""Incomplete caches stay marked as incomplete in every format, and verbs report it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvmnn
from kvmnn.arrays.array import from_numpy
from kvmnn.arrays.completeness import Completeness, IncompleteCacheError, LayerStateInfo
from kvmnn.arrays.opaque_state import make_state
from kvmnn.arrays.source import COMPLETENESS_KEY, Source, merge_sources
from kvmnn.bundle import open_frames, verify_frame_set
from kvmnn.errors import ManifestError
from kvmnn.formats import encode_store, restore
from kvmnn.formats.frames import transcode
from kvmnn.formats.mnn import pack, unpack
from kvmnn.formats.mnn.unpacker import OutputForm
from kvmnn.packed.inference import PackedGeometry
from kvmnn.store import read_layer_caches

Run = Callable[..., Any]
WHERE = "in the second cache of the session"
MISSING = f"2 of 4 layers have a window of 8 tokens and are {WHERE}"


def part(folder: str = "x.session") -> Source:
    """Layers 0 and 3 of four, of which the others have windows."""
    numbers, rng = (0, 3), np.random.default_rng(5)
    states = [
        LayerStateInfo(layer=layer)
        if layer in numbers
        else LayerStateInfo(layer=layer, kind="window", window=8, included=False, location=WHERE)
        for layer in range(4)
    ]
    arrays = [
        from_numpy(f"layer_{layer}.{part}", rng.standard_normal((2, 20, 16)).astype(np.float16))
        for layer in numbers
        for part in ("key", "value")
    ]
    return Source(arrays, inputs=(folder,), completeness=Completeness(layers=tuple(states)))


def _bundle(source: Source) -> str:
    kvmnn.bundle.encode_source(source, "b/")
    return "b"


def _again(source: Source) -> str:
    kvmnn.bundle.encode_source(source, "b/")
    transcode(open_frames("b"), "t/")
    return "t"


def _store(source: Source) -> str:
    encode_store(source, "a.zarr")
    return "a.zarr"


def _unpacked(output: str, **options: Any) -> Callable[[Source], str]:
    def write(source: Source) -> str:
        unpack(source, output, **options)
        return output

    return write


def _restored(first: Callable[[Source], str], output: str) -> Callable[[Source], str]:
    def write(source: Source) -> str:
        restore(open_frames(first(source)), output)
        return output

    return write


WAYS = {
    "bundle": _bundle,
    "transcoded": _again,
    "zarr": _store,
    "safetensors": _unpacked("a.safetensors"),
    "npz": _unpacked("a.npz"),
    "folder": _unpacked("a/"),
    "dump": _unpacked("d/", form="dump"),
    "restored safetensors": _restored(_bundle, "r.safetensors"),
    "restored npz": _restored(_bundle, "r.npz"),
    "restored folder": _restored(_bundle, "r/"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("way", WAYS)
def test_completeness_round_trips_through_every_format(way: str) -> None:
    source = part()
    found = kvmnn.open(WAYS[way](source))
    assert found.completeness == source.completeness
    assert found.completeness is not None and found.completeness.missing == [MISSING]


@pytest.mark.parametrize("way", WAYS)
def test_completeness_of_full_attention_is_not_written(way: str) -> None:
    source = part()
    source.arrays = source.arrays[:2]
    source.completeness = Completeness(layers=(LayerStateInfo(layer=0),))
    found = kvmnn.open(WAYS[way](source))
    assert COMPLETENESS_KEY not in found.metadata
    assert not Path("a/completeness.json").exists()


@pytest.mark.parametrize("way", WAYS)
def test_completeness_of_selected_tensors(way: str) -> None:
    path = WAYS[way](part())
    names = [name for name in kvmnn.open(path) if "0" in name.partition("_t")[0]]
    found = kvmnn.open(path, tensors=tuple(names))
    assert found.completeness is not None
    chosen = "1 of 4 layers has full attention and is not among the chosen arrays"
    assert sorted(found.completeness.missing) == [chosen, MISSING]


def test_completeness_of_files_of_one_folder() -> None:
    source = part()
    shared = [LayerStateInfo(layer=n, kind="shared", shared_with=0, included=False) for n in (1, 2)]
    states = (LayerStateInfo(layer=0), *shared, LayerStateInfo(layer=3, kind="window", window=8))
    source.completeness = Completeness(layers=states)
    unpack(source, "a/")
    files = sorted(map(str, Path("a").glob("*.npy")))
    one, every = kvmnn.open(files[0]), merge_sources([kvmnn.open(path) for path in files])
    assert one.completeness is not None and len(one.completeness.missing) == 2  # K without V is no layer
    assert every.completeness == source.completeness
    assert every.completeness is not None and every.completeness.is_complete


def test_completeness_of_merged_inputs() -> None:
    unpack(part(), "a.safetensors")
    np.savez("b.npz", **{"layer_1.key": np.zeros((2, 20, 16), np.float16)})
    found = merge_sources([kvmnn.open("a.safetensors"), kvmnn.open("b.npz")])
    assert found.completeness is not None and found.completeness.missing == [f"a.safetensors: {MISSING}"]


@pytest.mark.parametrize("form", ["arrays", "dump"])
def test_completeness_of_folder_that_lost_layers_of_its_positions(run: Run, form: OutputForm) -> None:
    """The document of the positions, and nothing else in the folder, records how many layers there were."""
    source = Source(
        [
            from_numpy(f"layer_{layer}.{part}", np.full((2, 5, 4), 1 + layer, np.float16))
            for layer in range(3)
            for part in ("key", "value")
        ]
    )
    unpack(source, "d/", form=form)
    layers = [{"layer": layer, "positions": [0, 1, 2, 3, 4]} for layer in range(3)]
    Path("d/positions.json").write_text(json.dumps({"layers": layers}))
    assert kvmnn.open("d").completeness is None
    for path in list(Path("d").rglob("*")):
        if path.is_file() and "layer_2" in str(path):
            path.unlink()
    problem = "positions.json lists 3 layers, and K or V of layer 2 is missing"
    assert f"incomplete: {problem}" in run("inspect", "d").out
    said = run("encode", "d", "-o", "b/").out
    assert f"incomplete: {problem}" in said and "LOSSLESS for these arrays" in said
    assert f"incomplete: {problem}" in run("verify", "b", "--against", "d").out
    pack_options = ("--backend", "x86-avx2", "--name", "p", "--cast", "-o", "p/")
    for path in ("d", "b"):
        assert problem in run("mnn", "pack", path, *pack_options, code=1).err
    names = [name for name in kvmnn.open("d") if "layer_0" in name]
    run("mnn", "pack", "d", *pack_options, *(word for name in names for word in ("--tensor", name)))


@pytest.mark.parametrize(
    ("document", "shape", "problem"),
    [
        ({"kvmnn": "1", "format": "npy"}, (2, 8, 16), "positions.json lists 9 tokens of layers 0 to 1, and K or V has"),
        ({}, (2, 8, 4), "positions.json lists 9 tokens of layers 0 to 1, and K or V has at most 8"),
        (None, (2, 7, 4), "token_ids.json lists 9 tokens of layers 0 to 1, and K or V has at most 7"),
        (None, (2, 8, 4), None),  # the last token is not evaluated yet
        ({}, (2, 9, 4), None),
        ({}, (2, 8, 16), None),  # which axis are the tokens?
    ],
)
def test_completeness_of_folder_whose_arrays_lack_tokens_of_its_documents(
    run: Run, document: dict[str, Any] | None, shape: tuple[int, ...], problem: str | None
) -> None:
    """The documents next to the arrays, and nothing else in the folder, record how many tokens there were."""
    Path("d").mkdir()
    for layer in range(2):
        for part in ("key", "value"):
            np.save(f"d/layer_{layer}.{part}.npy", np.full(shape, 1 + layer, np.float16))
    Path("d/token_ids.json").write_text(json.dumps(list(range(9))))
    if document is not None:
        layers = [{"layer": layer, "tokens": 9, "positions": list(range(9))} for layer in range(2)]
        Path("d/positions.json").write_text(json.dumps({**document, "tokens_seen": 9, "layers": layers}))
    outputs = [run("encode", "d", "-o", "b/").out, run("verify", "b").out, run("verify", "b", "--against", "d").out]
    if problem is None:
        assert not any("incomplete" in output for output in outputs)
        return
    assert all(f"incomplete: {problem}" in output and "for these arrays" in output for output in outputs)
    restored = run("decode", "b", "-o", "back/").out
    assert f"incomplete: {problem}" in restored and "LOSSLESS for these arrays (read back" in restored
    source = kvmnn.open("back")  # whose completeness.json has the sentence already
    assert source.completeness is not None and len(source.completeness.missing) == 1
    assert problem in run("mnn", "pack", "d", "--backend", "x86-avx2", "--name", "p", "--cast", "-o", "p/", code=1).err
    single = kvmnn.open("d/layer_1.key.npy").completeness
    assert single is not None and single.missing[0].startswith(problem.replace("layers 0 to 1", "layer 1"))


@pytest.mark.parametrize(
    "wrong", ["", "[]", "{}", '{"schema": "x"}', '{"schema":"kvmnn-completeness","schema_version":2}']
)
def test_completeness_malformed_document_is_refused(wrong: str) -> None:
    unpack(part(), "a/")
    Path("a/completeness.json").write_text(wrong)
    with pytest.raises(ManifestError, match="completeness"):
        kvmnn.open("a")


def test_completeness_invalid_layers_are_refused() -> None:
    unpack(part(), "a/")
    path = Path("a/completeness.json")
    for layers in ([[0, 1 << 40]], [[1, 1]], [[0, 0]], 5):
        document = json.loads(path.read_text())
        for run, bad in zip(document["layers"], layers if isinstance(layers, list) else [layers], strict=False):
            run["layers"] = bad
        Path("a/completeness.json").write_text(json.dumps(document))
        with pytest.raises(ManifestError):
            kvmnn.open("a")
        unpack(part(), "a/", force=True)


def test_completeness_in_npz_with_long_comment() -> None:
    source = part()
    others = [replace(source.arrays[0], name=f"{n:0240}") for n in range(300)]
    source.arrays = [*source.arrays, *others]
    unpack(source, "a.npz")
    assert zipfile.ZipFile("a.npz").comment
    assert kvmnn.open("a.npz").completeness == source.completeness


def test_completeness_without_place_is_noted(run: Run) -> None:
    unpack(part(), "a.safetensors")
    found = run("mnn", "unpack", "a.safetensors", "--tensor", "layer_0.key", "-o", "k.npy")
    assert "k.npy does not record which state of the model it lacks" in found.err


@pytest.mark.parametrize(
    "make",
    [
        lambda source: read_layer_caches(source),
        lambda source: pack(source, "p/", PackedGeometry(backend="x86-avx2"), name="sys", cast=True),
    ],
    ids=["store put", "pack"],
)
def test_incomplete_cache_to_other_engine_is_refused(make: Callable[[Source], object]) -> None:
    with pytest.raises(IncompleteCacheError) as caught:
        make(part())
    assert MISSING in str(caught.value) and str(caught.value).startswith("x.session: ")
    assert not Path("p").exists()


def test_incomplete_cache_commands_exit_1_and_name_state(run: Run) -> None:
    unpack(part(), "a.safetensors")
    for words in (
        ("mnn", "pack", "a.safetensors", "--backend", "x86-avx2", "--cast", "--name", "s", "-o", "p/"),
        ("store", "put", "s/", "a.safetensors", "--fingerprint", "m", "--token-ids", ",".join(map(str, range(20)))),
    ):
        found = run(*words, code=1)
        assert MISSING in found.err and len(found.err.splitlines()) == 1
    assert not Path("p").exists() and not Path("s").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "a.safetensors"),
        ("measure", "a.safetensors"),
        ("measure", "a.safetensors", "--dense"),
        ("encode", "a.safetensors", "-o", "e/"),
        ("encode", "a.safetensors", "--codec", "dense", "-o", "e/"),
        ("encode", "a.safetensors", "-o", "e.zarr"),
        ("mnn", "unpack", "a.safetensors", "-o", "u.npz"),
        ("diff", "a.safetensors", "a.safetensors"),
        ("diff", "a.safetensors", "a.safetensors", "--atol", "1"),
        ("decode", "b/", "-o", "d/"),
        ("inspect", "b/"),
        ("inspect", "a.zarr"),
        ("decode", "a.zarr", "-o", "z.npz"),
        ("verify", "b/"),
        ("verify", "b/", "--against", "a.safetensors"),
        ("verify", "a.zarr"),
    ],
)
def test_incomplete_cache_is_reported_by_reading_commands(run: Run, words: tuple[str, ...]) -> None:
    unpack(part(), "a.safetensors")
    kvmnn.bundle.encode_source(kvmnn.open("a.safetensors"), "b/")
    encode_store(kvmnn.open("a.safetensors"), "a.zarr")
    out = run(*words).out
    assert f"incomplete: {MISSING}" in " ".join(out.split())
    assert "LOSSLESS" not in out or words[0] not in ("encode", "verify") or "LOSSLESS for these arrays (" in out
    for name in ("e", "e.zarr", "u.npz", "d", "z.npz"):
        path = Path(name)
        if path.exists():
            path.rename(f"{name}.first")
    document = json.loads(run(*words, "--json").out)
    document = document["inputs"][0] if words[0] == "inspect" else document
    said = document["completeness"]["first"] if words[0] == "diff" else document["completeness"]
    assert said["complete"] is False and said["missing"] == [MISSING]


def test_verify_against_names_state_that_was_not_compared() -> None:
    """Frames of arrays contain no other state, and may come from a file that does not record what is missing."""
    source = part()
    kvmnn.bundle.encode_source(replace(source, completeness=None), "b/")
    shown = verify_frame_set(open_frames("b")).completeness
    assert shown is not None and shown.missing == ["layers 1 to 2 are missing before layer 3"]
    source.states = [make_state(1, "conv_states", bytes(60)), make_state(2, "conv_states", bytes(40))]
    result = verify_frame_set(open_frames("b"), source)
    assert result.completeness == source.completeness
    first_line, missing_line, note = str(result).splitlines()
    assert "LOSSLESS for these arrays (every byte compared" in first_line
    assert missing_line == f"  incomplete: {MISSING}"
    assert note.startswith("  not compared: 100 bytes of state of 2 layers of the original (conv_states)")


def test_inspect_lists_layer_kinds(run: Run) -> None:
    unpack(part(), "a.safetensors")
    lines = [line.strip() for line in run("inspect", "a.safetensors").out.splitlines()]
    assert "layers 0, 3: full attention" in lines
    assert "layers 1 to 2: a window of 8 tokens, not included" in lines


def test_inspect_and_encode_say_gaps_that_put_refuses(tmp_path: Path, run: Run) -> None:
    """Layer 2 of a folder is missing, as after an interrupted copy: LOSSLESS is said of these arrays."""
    line = "incomplete: layer 2 is missing before layer 3"
    Path("a").mkdir()
    for layer in (0, 1, 3):
        for part in ("key", "value"):
            np.save(f"a/layer_{layer}.{part}.npy", np.ones((2, 20, 16), np.float16))
    Path("ids.json").write_text(json.dumps(list(range(20))))
    assert line in run("inspect", "a").out
    for verb in (
        ("encode", "a", "-o", "b/"),
        ("verify", "b"),
        ("decode", "b", "-o", "c.npz"),
        ("encode", *map(str, sorted(Path("a").iterdir())), "-o", "d/"),
    ):
        out = run(*verb).out
        assert "LOSSLESS" in out and line in out, verb
    for path in ("a", "b", "c.npz"):
        said = run("store", "put", "s/", path, "--token-ids", "ids.json", "--fingerprint", "m", code=1)
        assert "a part of the state: layer 2 is missing before layer 3" in said.err


def test_open_pairs_by_layer_number_with_a_hole_is_incomplete() -> None:
    pair = (np.ones((1, 2, 20, 16), np.float16),) * 2
    source = kvmnn.open(dict.fromkeys((0, 1, 3), pair))
    assert source.completeness is not None and source.completeness.included_layers == (0, 1, 3)
    kvmnn.bundle.encode_source(source, "b/")
    assert kvmnn.open("b").completeness == source.completeness and source.completeness.missing
