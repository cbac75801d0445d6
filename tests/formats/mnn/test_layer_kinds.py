"""Prefix caches with layers of other kinds than full attention: their state is kept as bytes, never read as K and V."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import hybrid_prefix
import numpy as np
import pytest
from hybrid_prefix import read_files
from slow_cases import mark_most_slow

from kvmnn.formats import find_packed
from kvmnn.formats.mnn import open_packed_files
from kvmnn.formats.mnn.model import read_graph_geometry, read_model_geometry
from kvmnn.formats.options import PackedOptions

QWEN = "LLLFLLLF"
LFM = "CCFCCFCF"
LEFT_OUT = "6 of 8 layers have linear attention and are in files without K and V, valid after the last token alone"
SIZES = {
    "unlike": {},
    "fits": {"sizes": None},
    "fp16": {"dtype": "fp16", "hP": 16, "sizes": (128 * 3 * 2, 2 * 8 * 8 * 2)},
    "large": {"sizes": (40_000, 300_002), "seed": 5},
}


@pytest.fixture(autouse=True)
def _chdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("told", "case"),
    mark_most_slow(
        [
            (told, case)
            for (row, told), (column, case) in itertools.product(
                enumerate(["settings", "graph", "options", "words"]), enumerate(SIZES)
            )
            if not row or (row + column) % 2
        ],
        3,
    ),
)
def test_encode_hybrid_prefix_restores_every_file(run, case, told):
    full = hybrid_prefix.write_hybrid(Path("p"), QWEN, **SIZES[case])
    options: tuple[object, ...] = ("--kv-heads", 2, "--head-dim", 16) if told == "options" else ()
    if told == "settings":
        Path("m").mkdir()
        settings = {"layer_nums": 8, "attention_type": "mix", "key_value_shape": [2, 1, 0, 2, 16], "head_dim": 16}
        Path("m/llm_config.json").write_text(json.dumps(settings))
        options = ("--model", "m")
    if told == "graph":
        Path("m").mkdir()
        Path("m/llm.mnn").write_bytes(hybrid_prefix.build_graph([(kind, 2, 16) for kind in QWEN]))
        options = ("--model", "m")
    said = run("encode", "p", *options, "-o", "b/")
    assert "LOSSLESS for these arrays (decoded and compared; 16 packed files rebuilt in memory, every byte)" in said.out
    assert (
        f"incomplete: {LEFT_OUT}" in said.out
        and "state of layers without K and V: " in said.out
        and "12 files take" in said.out
    )
    assert ("taken for state of linear attention" in said.err) == (told != "graph")
    assert "sha256 of the files that were encoded" in run("decode", "b", "-o", "r/").out
    assert read_files("r") == read_files("p")
    assert "every byte compared" in run("verify", "b", "--against", "p").out
    run("mnn", "unpack", "b", "-o", "x.npz")
    with np.load("x.npz") as arrays:
        assert sorted(arrays) == [f"layer_{layer}.{part}" for layer in (3, 7) for part in ("key", "value")]
        np.testing.assert_array_equal(arrays["layer_7.value"], full[7][1])
    run("encode", "r", "-o", "again/")  # by the document that lies alongside the files
    run("decode", "again", "-o", "q/")
    assert read_files("q") == read_files("p")


def test_commands_hybrid_prefix_note_or_refuse_missing_state(run):
    hybrid_prefix.write_hybrid(Path("p"), QWEN)
    for verb in (("mnn", "unpack", "p", "-o", "x.npz"), ("measure", "p"), ("inspect", "p")):
        assert f"incomplete: {LEFT_OUT}" in run(*verb).out
        document = json.loads(run(*verb, "--json", *(["-f"] if "unpack" in verb else [])).out)
        completeness = document.get("completeness") or document["inputs"][0]["completeness"]
        assert completeness["missing"] == [LEFT_OUT]
    refused = (
        ("mnn", "compact", "p", "--remove", 5, "-o", "c/"),
        ("mnn", "pack", "p", "--backend", "x86-sse", "-o", "c/"),
        ("mnn", "pack", "x.npz", "--backend", "x86-avx2", "--name", "q", "-o", "c/"),
    )
    for arguments in refused:
        assert LEFT_OUT in run(*arguments, code=1).err
    assert sorted(os.listdir()) == ["p", "x.npz"]


def test_encode_hybrid_prefix_without_unused_rows_keeps_state(run):
    """Where K and V are read against their words the files are not covered, but state, which has none, is."""
    hybrid_prefix.write_hybrid(Path("p"), QWEN)
    said = run(
        "encode", "p", "--valid-tokens", 50, "--kv-heads", 1, "--head-dim", 32, "--ignore", "contradictions", "-o", "b/"
    ).out
    assert "LOSSY" in said
    run("decode", "b", "-o", "r/")
    files, restored = read_files("p"), read_files("r")
    assert [name for name in files if files[name] != restored[name]] == ["sys_3.k", "sys_3.v", "sys_7.k", "sys_7.v"]


@pytest.mark.parametrize("kinds", [LFM, "FCFC", "CCCCCCCF", "LF" * 12])
def test_sort_layers_any_order_of_kinds_is_inferred(kinds):
    hybrid_prefix.write_hybrid(Path("p"), kinds)
    found = _describe()
    expected = [layer for layer, kind in enumerate(kinds) if kind == "F"]
    assert [layer.layer for layer in found.info.layers] == expected
    assert [state.layer for state in found.info.states] == [n for n in range(len(kinds)) if n not in expected]


def test_sort_layers_different_layer_needs_mixed_model(run):
    hybrid_prefix.write_hybrid(Path("p"), "FFLF")
    assert "its layers differ in size" in run("encode", "p", "-o", "b/", code=1).err
    Path("m").mkdir()
    settings = {"layer_nums": 4, "attention_type": "mix", "key_value_shape": [2, 1, 0, 2, 16]}
    Path("m/llm_config.json").write_text(json.dumps(settings))
    assert "1 of 4 layers has linear attention" in run("encode", "p", "--model", "m", "-o", "b/").out
    hybrid_prefix.write_hybrid(Path("q"), "FFLF", sizes=None)
    assert "files do not end with empty rows as those of the other" in run("encode", "q", "-o", "c/", code=1).err


def test_inspect_hybrid_prefix_of_unmixed_model_would_not_load(run):
    """The exporter of MNN 3.6.1 calls Qwen3.5 full: its engine deletes such a prefix, as its layers differ in size."""
    hybrid_prefix.write_hybrid(Path("p"), QWEN)
    Path("m").mkdir()
    settings = {"layer_nums": 8, "attention_type": "full", "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    settings["layer_types"] *= 2
    Path("m/llm_config.json").write_text(json.dumps(settings))
    said = run("inspect", "p", "--model", "m", "--kv-heads", 2, "--head-dim", 16, code=1).out
    assert "would not load: its layers differ in size, which MNN takes for damage unless" in said
    assert "K and V in 2 of 8 layers" in said


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda: Path("p/sys_1.k").write_bytes(b""), "sys_1.k is empty"),
        (lambda: os.truncate("p/sys_1.v", 4000), "its layers differ in size"),
        (lambda: Path("p/sys_2.v").unlink(), "sys_2.v is missing"),
    ],
)
def test_commands_damaged_state_is_refused(run, damage, message):
    hybrid_prefix.write_hybrid(Path("p"), QWEN)
    damage()
    assert message in run("encode", "p", "-o", "b/", code=1).err
    assert message in run("inspect", "p", code=1).out
    assert os.listdir() == ["p"]


def test_decode_inconsistent_state_record_is_refused(run):
    hybrid_prefix.write_hybrid(Path("p"), QWEN)
    run("encode", "p", "-o", "b/")
    text = Path("b/manifest.json").read_text()
    document = json.loads(text)
    record = json.loads(document["metadata"]["kvmnn.packed_files"])
    cache = json.loads(document["metadata"]["kvmnn.cache"])

    def write(changed_record: object, changed_cache: object) -> None:
        document["metadata"]["kvmnn.packed_files"] = json.dumps(changed_record)
        document["metadata"]["kvmnn.cache"] = json.dumps(changed_cache)
        Path("b/manifest.json").write_text(json.dumps(document))

    for key, value in (("is_state", False), ("bytes", 1150), ("room", None), ("layer", 9), ("room", "layer_3.key")):
        files = [dict(entry) for entry in record["files"]]
        files[0][key] = value
        write({**record, "files": files}, cache)
        assert "kvmnn.packed_files" in run("decode", "b", "-o", "r/", code=1).err
    for change in ({"layer": 3}, {"kind": "full"}, {"key_bytes": 0}, {"key_bytes": 4}, {"layer": 8}):
        write(record, {**cache, "states": [{**cache["states"][0], **change}, *cache["states"][1:]]})
        run("decode", "b", "-o", "r/", code=1)
    write(record, {key: value for key, value in cache.items() if key != "states"})
    run("decode", "b", "-o", "r/", code=1)
    assert not Path("r").exists()


def test_read_graph_geometry_has_layer_kinds(tmp_path):
    layers = [("L", 0, 0), ("F", 2, 16), ("F", 1, 32), ("1", 2, 16), ("2", 1, 32)]
    (tmp_path / "llm.mnn").write_bytes(hybrid_prefix.build_graph(layers))
    found = read_graph_geometry(tmp_path / "llm.mnn")
    assert found is not None
    assert [state.kind for state in found.states] == ["linear", "full", "full", "shared", "shared"]
    assert [state.shared_with for state in found.states] == [None, None, None, 1, 2]
    assert found.layer_geometry[1:3] == ((2, 16), (1, 32)) and found.kv_heads is None
    (tmp_path / "llm.mnn").write_bytes(hybrid_prefix.build_graph(layers, linear_kind="short_conv"))
    assert read_model_geometry(str(tmp_path)).states[0].kind == "recurrent"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"layer_types": ["linear_attention", "sliding_attention", "conv", "odd", 7]},
            "linear full recurrent unknown unknown",
        ),
        ({"num_hidden_layers": 4, "full_attention_interval": 2}, "linear full linear full"),
        ({"text_config": {"layer_types": ["full_attention"] * 3, "num_kv_shared_layers": 1}}, "full full shared"),
        ({"layer_nums": 4, "layer_types": ["full_attention"]}, ""),
        ({"layer_types": "mix"}, ""),
        ({"layer_nums": 10**9, "full_attention_interval": 2}, ""),
    ],
)
def test_read_model_geometry_has_layer_kinds(tmp_path, settings, expected):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert " ".join(state.kind for state in read_model_geometry(str(tmp_path)).states) == expected


def test_inspect_layers_that_share_k_and_v_are_named(run):
    hybrid_prefix.write_hybrid(Path("p"), "FFF")
    Path("m").mkdir()
    layers = [("F", 2, 16), ("F", 2, 16), ("F", 2, 16), ("1", 2, 16), ("2", 2, 16)]
    Path("m/llm.mnn").write_bytes(hybrid_prefix.build_graph(layers))
    found = _describe(PackedOptions(model="m"))
    assert found.completeness is not None and found.completeness.is_complete
    assert [state.shared_with for state in found.completeness.layers] == [None, None, None, 1, 2]
    Path("m/llm.mnn").write_bytes(hybrid_prefix.build_graph(layers[:2] + layers[3:]))
    said = run("encode", "p", "--model", "m", "-o", "b/", code=1).err
    assert "has files of 3 layers, but the model in m has 2 of its own K and V or state, and 2 that read those" in said


def test_source_states_equal_bytes_of_files():
    hybrid_prefix.write_hybrid(Path("p"), "LLF")
    states = _describe().to_source().states
    assert [(state.layer, state.name) for state in states] == [
        (layer, name) for layer in (0, 1) for name in ("conv_state", "recurrent_state")
    ]
    assert states[3].read() == Path("p/sys_1.v").read_bytes()


def _describe(options: PackedOptions | None = None):
    files = find_packed("p")
    assert files is not None
    return open_packed_files(files, options or PackedOptions())
