"""``kvmnn compressor run``: caches in, caches and their true positions out, one line of result."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import compressor_files
import numpy as np
import pytest
from compressor_model import to_words, weight_file
from packed_samples import arrays, write_prefix
from repository import FIXTURES

from kvmnn.cli.entry_point import main
from kvmnn.compressor import kvcm
from kvmnn.compressor.forward.compress import compress_cache
from kvmnn.compressor.forward.plan import ForwardOptions
from kvmnn.formats import open as open_source

SHAPE = (2, 1, 3, 21, 4)
ONNX = all(map(importlib.util.find_spec, ("onnx", "onnxruntime")))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(2)
    made = weight_file(random, layers=2, factor=5, dtype="fp16")
    with open("w.bin", "wb") as file:
        kvcm.write_weight_file(file, made.header, ((block.weight, block.bias) for block in made.iter_blocks()))
    keys, values = (random.standard_normal(SHAPE).astype(np.float32) for _ in range(2))
    np.savez("c.npz", k=keys, v=values)
    return SimpleNamespace(path=tmp_path, weights=kvcm.read_weight_file("w.bin"), keys=keys, values=values)


@pytest.fixture
def run(capsys):
    """The verb; of c.npz and what is made of it nothing but ``--axes`` says which axis is which."""

    def call(*argv: object, code: int = 0) -> SimpleNamespace:
        capsys.readouterr()
        axes = ["--axes", "lbhtd"] if "c.npz" in argv and "--axes" not in argv else []
        found = main(["compressor", "run", *map(str, argv), *axes])
        streams = capsys.readouterr()
        assert found == code, streams.err
        return streams

    return call


def test_compressor_run_stacked_cache_equals_compress_cache(here, run):
    said = run("w.bin", "c.npz", "-o", "o.npz", "--image-tokens", 11, "-v").out.splitlines()
    assert said == [
        "image: 11 tokens -> 3 (2 groups of 5, 1 kept)",
        "text: 10 tokens -> 2 (2 groups of 5, 0 kept)",
        "o.npz: LOSSY, 21 -> 5 tokens in 2 layers, token ratio 4.2000, 4,032 -> 960 bytes; "
        "the next token goes to place 5 and has position 21",
        "  axes lbhtd (--axes): layer 2, batch 1, kv_head 3, token 21, dimension 4",
    ]
    expected = compress_cache(here.weights, here.keys, here.values, ForwardOptions(image_len=11))
    with np.load("o.npz") as made:
        assert made.files == ["k", "v"]
        np.testing.assert_array_equal(made["k"], expected.keys)
        np.testing.assert_array_equal(made["v"], expected.values)
    document = json.loads((here.path / "o.npz.json").read_text())
    assert document["positions"] == [[0, 5], [5, 10], [10, 11], [11, 16], [16, 21]]
    assert (document["label"], document["new_len"], document["next_position"]) == ("LOSSY", 5, 21)
    assert (document["cache"], document["weights"]["file"]) == ("c.npz", "w.bin")
    assert sorted(path.name for path in here.path.iterdir()) == ["c.npz", "o.npz", "o.npz.json", "w.bin"]


@pytest.mark.parametrize(
    ("names", "axes"),
    [
        (("layers.{}.key", "layers.{}.value"), "bhtd"),
        (("past_key_values.{}.key", "past_key_values.{}.value"), "bhtd"),
        (("key_cache.{}", "value_cache.{}"), "htd"),
        (("k_{}", "v_{}"), "htd"),
        (("K{}", "V{}"), "htd"),
        (("run/layer_{}/k_t0_21", "run/layer_{}/v_t0_21"), "thd"),
    ],
)
def test_compressor_run_arrays_of_each_layer(here, run, names, axes):
    order = ["bhtd".index(letter) for letter in axes]
    cut = (lambda array: array) if "b" in axes else (lambda array: array[0])
    order = order if "b" in axes else [position - 1 for position in order]
    arrays = {
        name.format(layer): cut(array[layer]).transpose(order)
        for layer in (1, 0)
        for name, array in zip(names, (here.keys, here.values), strict=True)
    }
    np.savez("layers.npz", **arrays)
    run("w.bin", "layers.npz", "-o", "o.safetensors", "--axes", axes)
    expected = compress_cache(here.weights, here.keys, here.values)
    for array in open_source("o.safetensors").arrays:
        layer = int("".join(filter(str.isdigit, array.name))[0])
        whole = expected.values if "value" in array.name.split(".")[-1].lower() else expected.keys
        whole = expected.values if array.name.rpartition("/")[2][0] in "vV" else whole
        (piece,) = array.iter_chunks()
        found = piece.view(np.float32).reshape(array.shape)
        np.testing.assert_array_equal(found, cut(whole[layer]).transpose(order))


@pytest.mark.parametrize("axes", ["lthd", "lhtd", "tlbhd", "bldth"])
def test_compressor_run_axes_in_any_order(here, run, axes):
    def laid(array):
        order = ["lbhtd".index(letter) for letter in axes]
        return array.transpose(order) if "b" in axes else array[:, 0].transpose([max(n - 1, 0) for n in order])

    np.savez("other.npz", keys=laid(here.keys), values=laid(here.values))
    run("w.bin", "other.npz", "-o", "o.npz", "--axes", axes)
    expected = compress_cache(here.weights, here.keys, here.values)
    with np.load("o.npz") as made:
        np.testing.assert_array_equal(made["keys"], laid(expected.keys))
        np.testing.assert_array_equal(made["values"], laid(expected.values))


@pytest.fixture
def dump(here):
    """Layer 1 as the engine dumps it: 16 tokens of the prompt, then 5 more."""
    folder = here.path / "dump" / "run" / "layer_1"
    folder.mkdir(parents=True)
    for begin, end in ((0, 16), (16, 21)):
        meta = {"seq_len": end - begin, "kv_heads": 3, "head_dim": 4, "bytes_per_elem": 4}
        for letter, array in (("k", here.keys), ("v", here.values)):
            meta[f"{letter}_file"] = f"{letter}_t{begin}_{end}.bin"
            array[1, 0, :, begin:end].transpose(1, 0, 2).tofile(folder / meta[f"{letter}_file"])
        (folder / f"meta_t{begin}_{end}.json").write_text(json.dumps(meta))
    return here.path / "dump"


def test_compressor_run_mnn_dump_needs_no_axes(here, run, dump):
    main(["encode", "dump", "-o", "bundle/", "-q"])
    main(["decode", "bundle", "-o", "arrays.npz", "-q"])
    expected = compress_cache(here.weights, here.keys, here.values).keys[1, 0].transpose(1, 0, 2)
    for number, cache in enumerate(("dump", "bundle", "arrays.npz")):
        for axes in ([], ["--axes", "thd"]):
            assert "LOSSY, 21 -> 5 tokens in 1 layer" in run("w.bin", cache, "-o", f"{number}.npz", "-f", *axes).out
            with np.load(f"{number}.npz") as made:
                np.testing.assert_allclose(made["run/layer_1/k_t0_21"], expected, atol=1e-6)


def test_compressor_run_output_inside_dump_is_refused(here, run, dump):
    for meta in dump.rglob("meta_*.json"):
        meta.write_text(meta.read_text().replace("k_t0_16.bin", "k_t0_16.npz"))
    taken = dump / "run" / "layer_1" / "k_t0_16.npz"
    before = taken.with_suffix(".bin").rename(taken).read_bytes()
    assert "is the input itself" in run("w.bin", "dump", "-o", taken, "-f", code=1).err
    assert taken.read_bytes() == before


def test_compressor_run_dump_with_gap_is_refused(here, run, dump):
    (dump / "run" / "layer_1" / "meta_t0_16.json").rename(dump / "run" / "layer_1" / "meta_t1_17.json")
    for part in "kv":
        (dump / "run" / "layer_1" / f"{part}_t0_16.bin").rename(dump / "run" / "layer_1" / f"{part}_t1_17.bin")
    meta = dump / "run" / "layer_1" / "meta_t1_17.json"
    meta.write_text(meta.read_text().replace("t0_16", "t1_17"))
    assert "are both its keys, and do not follow each other" in run("w.bin", "dump", "-o", "o.npz", code=1).err


@pytest.mark.parametrize(
    ("names", "shape", "options", "axes"),
    [
        ("k v", (2, 1, 12, 40, 4), "", "lbhtd lbthd"),
        ("k_0 v_0", (1, 40, 12, 4), "", "bhtd bthd"),
        ("k_0 v_0", (40, 3, 4), "", "htd thd"),
        ("k_0 v_0", (9, 40, 4), "", "htd thd"),
        ("k_0 v_0", (9, 256, 4), "--valid-tokens 9", "htd thd"),
        ("k_0 v_0", (300, 12, 4), "", "htd thd"),
        ("layer_0.key layer_0.value", (12, 40, 4), "", "htd thd"),
        ("past_key_values.1.key past_key_values.1.value", (1, 12, 40, 4), "", "bhtd bthd"),
        ("present.1.key present.1.value", (1, 12, 40, 4), "", "bhtd bthd"),
        ("layer_0/k_t0_50 layer_0/v_t0_50", (40, 12, 4), "", "htd thd"),
    ],
)
def test_compressor_run_ambiguous_axes_are_refused(here, run, names, shape, options, axes):
    np.savez("two.npz", **dict.fromkeys(names.split(), np.ones(shape, np.float32)))
    first, other = axes.split()
    said = run("w.bin", "two.npz", "-o", "o.npz", *options.split(), code=2).err
    heads, tokens = shape[-3:-1]
    assert f"array '{names.split()[0]}' {list(shape)}: nothing says whether {heads} or {tokens} is" in said
    assert f"say --axes {first} ({tokens} tokens) or --axes {other} ({heads} tokens)" in said
    for choice in (first, other):
        run("w.bin", "two.npz", "-o", f"{choice}.npz", "--axes", choice)


@pytest.mark.parametrize(
    ("names", "shape", "options", "axes"),
    [
        ("k_0 v_0", (12, 300, 4), "", "htd (the shape has no other reading): kv_head 12, token 300"),
        ("k_0 v_0", (12, 40, 4), "--valid-tokens 13", "htd (the shape has no other reading): kv_head 12, token 40"),
        ("layer_1/k_t0_40 layer_1/v_t0_40", (40, 12, 4), "", "thd ('layer_1/k_t0_40' holds the number of tokens)"),
        ("run_layer_1_k_t0_40 run_layer_1_v_t0_40", (40, 50, 4), "", "token 40, kv_head 50, dimension 4"),
    ],
)
def test_compressor_run_infers_axes_from_shapes_and_names(here, run, names, shape, options, axes):
    np.savez("one.npz", **dict.fromkeys(names.split(), np.ones(shape, np.float32)))
    assert axes in run("w.bin", "one.npz", "-o", "o.npz", *options.split()).out


def test_compressor_run_too_many_valid_tokens_are_refused(here, run):
    assert (
        "c.npz: has 21 tokens, --valid-tokens says 22"
        in run("w.bin", "c.npz", "-o", "o.npz", "--valid-tokens", 22, code=2).err
    )
    np.savez("two.npz", k_0=np.ones((12, 40, 4), np.float32), v_0=np.ones((12, 40, 4), np.float32))
    assert (
        "'k_0' [12, 40, 4] has no 41 tokens" in run("w.bin", "two.npz", "-o", "o.npz", "--valid-tokens", 41, code=1).err
    )


@pytest.fixture
def cut(here):
    """A prefix cache of two layers that holds tokens 0 to 9 and 15 to 29 of 30."""
    packed = write_prefix(here.path / "whole", arrays(2, 3, 30, 4, seed=1), capacity=32)
    known = ["--kv-heads", "3", "--head-dim", "4", "--valid-tokens", "30", "--backend", "x86-avx2"]
    assert (
        main(["mnn", "compact", str(packed.path), "-o", "cut/", "--remove", "20", "--reserve", "5:15", "-q", *known])
        == 0
    )
    return "cut"


def test_compressor_run_keeps_positions_of_compacted_cache(here, run, cut):
    main(["mnn", "unpack", cut, "-o", "cut.safetensors", "-q"])
    for cache in (cut, "cut.safetensors"):
        said = run("w.bin", cache, "-o", "o.npz", "-f").out
        assert "the next token goes to place 5 and has position 30" in said
        assert "axes htd (a packed cache): kv_head 3, token 25, dimension 4" in said
        positions = json.loads((here.path / "o.npz.json").read_text())["positions"]
        assert positions == [[0, 5], [5, 10], [15, 20], [20, 25], [25, 30]]


def test_compressor_run_unequal_layer_tokens_are_refused(here, run, cut):
    document = here.path / "cut" / "sys.kvmnn.json"
    fields = json.loads(document.read_text())
    fields["layers"][1]["positions"] = [[5, 25]]
    document.write_text(json.dumps(fields))
    said = run("w.bin", cut, "-o", "o.npz", code=1).err
    assert "cut: layers 0 and 1 hold different tokens (0:10, 15:15; 5:25)" in said


@pytest.mark.parametrize(("dtype", "own"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_compressor_run_contradicted_dtype_is_refused(here, run, dtype, own):
    """The bytes of fp16 numbers read as bf16 are other numbers."""
    words = {"fp16": np.float16, "bf16": np.uint16}[own]
    np.savez("two.npz", k=np.ones((1, 1, 3, 300, 4), words), v=np.ones((1, 1, 3, 300, 4), words))
    main(["mnn", "unpack", "two.npz", "-o", "two.safetensors", "-q"])
    main(["encode", "two.npz", "-o", "two/", "-q"])
    said = run("w.bin", "two.safetensors", "-o", "o.npz", "--dtype", dtype, code=1).err
    assert f"holds {own} numbers, and {dtype} (--dtype) would make others of them: leave --dtype out" in said
    said = run("w.bin", "two/", "-o", "o.npz", "--dtype", dtype, code=2).err
    assert f"two/: the manifest says {own}, not {dtype} (--dtype)" in said
    if own == "fp16":
        assert "holds fp16 numbers" in run("w.bin", "two.npz", "-o", "o.npz", "--dtype", dtype, code=1).err


def test_compressor_run_contradicted_dump_dtype_is_refused(here, run, dump):
    for meta in dump.rglob("meta_*.json"):
        fields = {**json.loads(meta.read_text()), "dtype": "fp16", "bytes_per_elem": 2, "head_dim": 8}
        meta.write_text(json.dumps(fields))
    said = run("w.bin", "dump", "-o", "o.npz", "--dtype", "bf16", code=1).err
    assert "k_t0_16.bin: holds fp16 numbers, and bf16 (--dtype)" in said


def test_compressor_run_reads_axes_from_earlier_document(here, run):
    np.savez("first.npz", k_0=np.ones((100, 12, 4), np.float32), v_0=np.ones((100, 12, 4), np.float32))
    run("w.bin", "first.npz", "-o", "o.npz", "--axes", "thd")
    assert "LOSSY, 20 -> 4 tokens" in run("w.bin", "o.npz", "-o", "p.npz").out
    (here.path / "o.npz.json").unlink()
    assert "say --axes" in run("w.bin", "o.npz", "-o", "q.npz", code=2).err


def test_compressor_run_bf16_stays_bf16_in_safetensors(here, run):
    words = {"k": to_words(here.keys, "bf16"), "v": to_words(here.values, "bf16")}
    np.savez("b.npz", **words)
    run("w.bin", "b.npz", "-o", "o.safetensors", "--axes", "lbhtd")
    assert [(a.name, a.dtype, a.shape) for a in open_source("o.safetensors").arrays] == [
        ("k", "bf16", (2, 1, 3, 5, 4)),
        ("v", "bf16", (2, 1, 3, 5, 4)),
    ]
    run("w.bin", "o.safetensors", "-o", "again.npz", "--min-seq-len", 1)
    document = json.loads((here.path / "again.npz.json").read_text())
    assert (document["positions"], document["next_position"]) == ([[0, 21]], 21)


@pytest.mark.parametrize("engine", ["numpy", pytest.param("onnx", marks=pytest.mark.skipif(not ONNX, reason="no lm"))])
def test_compressor_run_fp16_engines_agree_in_json(here, run, engine):
    said = run("w.bin", "c.npz", "-o", "o.npz", "--precision", "fp16", "--engine", engine, "--json")
    document = json.loads(said.out)
    assert said.err == ""
    assert (document["verb"], document["label"], document["engine"]) == ("compress-kv", "LOSSY", engine)
    assert (document["tokens"], document["new_len"], document["raw_bytes"], document["stored_bytes"]) == (
        21,
        5,
        4032,
        480,
    )
    expected = compress_cache(here.weights, here.keys, here.values, ForwardOptions(precision="fp16"))
    with np.load("o.npz") as made:
        assert made["k"].dtype == np.float16
        np.testing.assert_allclose(made["k"], expected.keys, atol=2e-3, rtol=1e-2)


def test_compressor_run_valid_tokens_and_short_segments(here, run):
    said = run("w.bin", "c.npz", "-o", "o.npz", "--valid-tokens", 9)
    assert "o.npz: UNCHANGED (no segment with a compressor has 2 groups of 5 (text 1)), 9 -> 9" in said.out
    assert "1,728 -> 1,728 bytes; the next token goes to place 9 and has position 9" in said.out
    with np.load("o.npz") as made:
        np.testing.assert_array_equal(made["k"], here.keys[..., :9, :])
    assert "LOSSY" in run("w.bin", "c.npz", "-o", "p.npz", "--valid-tokens", 9, "--precision", "fp16").out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ("w.bin c.npz -o -", 2, "-o -: a .npz file is not written to standard output"),
        ("w.bin c.npz -o o.npy", 2, "o.npy: expected a .npz or .safetensors file as output"),
        ("w.bin - -o o.npz", 2, "read from files"),
        ("w.bin c.npz -o o.npz --image-tokens -1", 2, "'-1' is not a whole number"),
        ("w.bin c.npz -o c.npz -f", 1, "c.npz: is the input itself"),
        ("w.bin c.npz -o taken.npz", 1, "taken.npz: exists already"),
        ("w.bin c.npz -o free.npz", 1, "free.npz.json: exists already"),
        (
            "c.npz c.npz -o o.npz",
            1,
            "c.npz: expected a compressor's weight file (.bin), which kvmnn compressor convert makes",
        ),
        ("w.bin gone.npz -o o.npz", 1, "gone.npz: cannot be read"),
        (
            "w.bin c.npz -o o.npz --group-tokens 4",
            1,
            "nothing to compress: no compressor in the weight file takes groups of 4",
        ),
        ("w.bin c.npz -o o.npz --valid-tokens 0", 1, "nothing to compress: the cache is empty"),
        ("w.bin c.npz -o o.npz --axes lbht", 2, "axes 'lbht': expected h (kv_head), t (token), d (dimension)"),
        ("w.bin c.npz -o o.npz --axes htd", 1, "array 'k' has 5 axes [2, 1, 3, 21, 4], expected 3 (htd)"),
        ("w.bin c.npz -o o.npz --tensor k", 1, "array 'k' is K and there is no V to it"),
        ("w.bin other.npz -o o.npz", 1, "array 'scores' is neither K nor V by its name"),
        ("w.bin flat.npz -o o.npz", 2, "array 'k' has shape [1, 3, 21, 4]: expected five axes"),
        ("w.bin flat.npz -o o.npz --axes bhtd", 1, "array 'k' does not say which layer it is"),
        ("w.bin twice.npz -o o.npz --axes bhtd", 1, "arrays 'a.0.k' and 'b.0.k' are both K of layer 0"),
        ("w.bin five.npz -o o.npz --axes lbhtd", 2, "holds 2 pairs of K and V, each with all layers"),
        ("w.bin role.npz -o o.npz", 1, "arrays 'k' and 'key' have the same role"),
        ("w.bin uneven.npz -o o.npz --axes lbhtd", 1, "K has 2 layers, V 1"),
        ("w.bin nan.npz -o o.npz --axes lbhtd", 1, "keys of layer 0: batch 0, kv_head 2, token 7, dimension 1 is nan"),
        ("w.bin many.npz -o o.npz --axes lbhtd", 1, "has weights for 2 layers, the cache has a layer 3"),
        ("w.bin stale.npz -o o.npz --axes lbhtd", 1, "stale.npz.json: has positions for 1 tokens, stale.npz has 21"),
    ],
)
def test_compressor_run_error_is_one_line_without_output(here, run, argv, code, message):
    keys, values = here.keys, here.values
    bad = keys.copy()
    bad[0, 0, 2, 7, 1] = np.nan
    np.savez("other.npz", k=keys, v=values, scores=keys[0, 0, 0])
    np.savez("flat.npz", k=keys[0], v=values[0])
    np.savez("twice.npz", **{f"{a}.0.{b}": keys[0] for a in "ab" for b in "kv"})
    np.savez("five.npz", **{f"{a}.{b}": keys for a in "ab" for b in "kv"})
    np.savez("role.npz", k=keys, key=keys)
    np.savez("uneven.npz", k=keys, v=values[:1])
    np.savez("nan.npz", k=bad, v=values)
    np.savez("many.npz", k=np.concatenate([keys, keys]), v=np.concatenate([values, values]))
    np.savez("stale.npz", k=keys, v=values)
    document = {"schema": "kvmnn-compressed-kv", "schema_version": 1, "next_position": 1, "positions": [[0, 1]]}
    (here.path / "stale.npz.json").write_text(json.dumps(document))
    (here.path / "taken.npz").write_text("mine")
    (here.path / "free.npz.json").write_text("mine")
    before = {path.name: path.read_bytes() for path in here.path.iterdir()}
    said = run(*argv.split(), code=code)
    assert said.out == ""
    assert said.err.startswith("kvmnn: error: ")
    assert said.err.count("\n") == 1
    assert message in said.err
    assert {path.name: path.read_bytes() for path in here.path.iterdir()} == before


def test_compressor_run_missing_package_is_exit_code_3(here, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "needs the package onnx" in run("w.bin", "c.npz", "-o", "o.npz", "--engine", "onnx", code=3).err
    assert not (here.path / "o.npz").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2, this kvmnn reads 1"),
        ({"next_position": 20}, "positions are not spans within the 20 tokens seen"),
        ({"positions": [[0, 0], *[[n, n + 1] for n in range(1, 21)]]}, "positions are not spans"),
        ({"positions": [[0]]}, "positions[0]: has 1 entries"),
        ({"positions": 3}, "positions: found 3, expected a list"),
    ],
)
def test_compressor_run_damaged_document_is_refused(here, run, change, message):
    document = {"schema": "kvmnn-compressed-kv", "schema_version": 1, "next_position": 21}
    document["positions"] = [[n, n + 1] for n in range(21)]
    beside = here.path / "c.npz.json"
    beside.write_text(json.dumps({**document, **change}))
    assert message in run("w.bin", "c.npz", "-o", "o.npz", code=1).err
    beside.write_text(json.dumps(document))
    run("w.bin", "c.npz", "-o", "o.npz")
    for other in ("{}", "not json", '{"schema": "something else"}'):
        beside.write_text(other)
        run("w.bin", "c.npz", "-o", "o.npz", "-f")


@pytest.mark.parametrize(
    ("policy", "positions", "following"),
    [
        ([], list(range(40)), 40),
        (
            ["--policy", "streaming:sink=2,buffer=0", "--budget", 12, "--skip-layers", "none"],
            [0, 1, *range(30, 40)],
            40,
        ),
    ],
)
def test_compressor_run_dump_kv_folder_keeps_positions(tmp_path, monkeypatch, run, policy, positions, following):
    monkeypatch.chdir(tmp_path)
    Path("w.bin").write_bytes(compressor_files.weight_file(6, 6, head_dim=64, factor=2))
    text = FIXTURES / "lm" / "texts" / "trace.py.txt"
    dump = ["dump-kv", FIXTURES / "lm", "--text", text, "--max-tokens", 40, "-o", "kv", *policy]
    assert main([*map(str, dump)]) == 0
    assert "axes htd (as kvmnn dump-kv writes them)" in run("w.bin", "kv", "-o", "o.npz").out
    document = json.loads(Path("o.npz.json").read_text())
    assert document["positions"] == [[positions[i], positions[i + 1] + 1] for i in range(0, len(positions), 2)]
    assert document["next_position"] == following
    assert main(["encode", "kv", "-o", "kv.frames/", "-q"]) == 0
    assert "axes htd (as kvmnn dump-kv writes them)" in run("w.bin", "kv.frames", "-o", "f.npz").out
    assert (
        Path("f.npz.json").read_text().partition("positions")[2]
        == Path("o.npz.json").read_text().partition("positions")[2]
    )


def test_compressor_run_dump_kv_unequal_layers_are_refused(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    Path("w.bin").write_bytes(compressor_files.weight_file(2, 6, head_dim=8, factor=2))
    Path("kv").mkdir()
    layers = [{"layer": n, "tokens": 6, "positions": [*range(5), 5 + n]} for n in range(2)]
    Path("kv/positions.json").write_text(json.dumps({"kvmnn": "0.1.0", "format": "npy", "layers": layers}))
    for layer in range(2):
        for part in ("key", "value"):
            np.save(f"kv/layer_{layer}.{part}.npy", np.ones((2, 6, 8), np.float16))
    assert "layers or heads hold different tokens" in run("w.bin", "kv", "-o", "o.npz", code=1).err
    assert not Path("o.npz").exists()
