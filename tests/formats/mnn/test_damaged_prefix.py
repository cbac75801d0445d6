"""Damaged prefix caches, which the engine would not load, are refused, and inspect explains why (exit code 1)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import packed_samples
import pytest
from engine_client import unpack_fixture

from kvmnn import PackLayout
from kvmnn.dtypes import PARTS
from kvmnn.formats import find_packed
from kvmnn.formats.mnn import open_packed_files
from kvmnn.formats.options import PackedOptions
from kvmnn.packed.inference import PackedGeometry

GEOMETRY = ("--kv-heads", 2, "--head-dim", 16, "--backend", "x86-avx2")
DAMAGE = {
    "zero_k": (lambda p: os.truncate(p / "sys_1.k", 0), "sys_1.k is empty"),
    "half_v": (
        lambda p: os.truncate(p / "sys_1.v", 8192),
        "its layers differ in size: sys_1.v has 8192 bytes, that of the other layer 16384",
    ),
    "missing_v": (lambda p: (p / "sys_0.v").unlink(), "sys_0.v is missing"),
    "both": (  # the room of 64 tokens, as a layout has it
        lambda p: [os.truncate(p / f"sys_1.{part}", 8192) for part in "kv"],
        "its layers differ in size: sys_1.k has 8192 bytes, that of the other layer 14848",
    ),
    "first": (
        lambda p: [os.truncate(p / f"sys_0.{part}", 8192) for part in "kv"],
        "its layers differ in size: sys_0.k has 8192 bytes, that of the other layer 14848",
    ),
}


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return unpack_fixture("prefix", tmp_path)


@pytest.mark.parametrize("case", DAMAGE)
def test_commands_damaged_prefix_is_refused(prefix, run, case):
    damage, message = DAMAGE[case]
    damage(prefix)
    for verb in (
        ("mnn unpack", "-o", "x.npz"),
        ("encode", "-o", "b/"),
        ("measure",),
        ("mnn compact", "--remove", 1),
    ):
        error = run(verb[0], prefix, *GEOMETRY, "--valid-tokens", 50, *verb[1:], code=1).err
        assert message in error, verb
    assert os.listdir() == ["prefix"]


@pytest.mark.parametrize("case", DAMAGE)
def test_inspect_damaged_prefix_explains_why(prefix, run, case):
    damage, message = DAMAGE[case]
    damage(prefix)
    for options in ((), GEOMETRY, (*GEOMETRY, "--valid-tokens", 50)):
        assert f"would not load: {message}" in run("inspect", prefix, *options, code=1).out
    document = json.loads(run("inspect", prefix, "--json", code=1).out)["inputs"][0]
    assert document["problems"] == [message]


def test_inspect_missing_file_is_not_listed_with_a_size(prefix, run):
    DAMAGE["missing_v"][0](prefix)
    printed = run("inspect", prefix, *GEOMETRY, code=1).out
    assert "sys_0.v missing" in printed and "sys_0.v 0 bytes" not in printed
    DAMAGE["zero_k"][0](prefix)
    assert "sys_1.k 0 bytes" in run("inspect", prefix, code=1).out


def test_encode_cut_files_is_refused(prefix, run):
    """`--ignore contradictions` is no remedy: MNN deletes such a prefix."""
    DAMAGE["both"][0](prefix)
    error = run("encode", prefix, *GEOMETRY, "--valid-tokens", 50, "-o", "b/", code=1).err
    assert error.endswith("files were cut, and MNN would delete this prefix instead of loading it: compute it again\n")


def test_commands_files_that_are_all_cut_name_that_before_options(prefix, run):
    """No option makes the sizes fit: nobody should look for heads and tokens first."""
    asked = "the files do not say kv_heads (--kv-heads) and head_dim (--head-dim)"
    for layer in (0, 1):
        (prefix / f"sys_{layer}.k").write_bytes((prefix / f"sys_{layer}.k").read_bytes()[:8192])
        (prefix / f"sys_{layer}.v").write_bytes((prefix / f"sys_{layer}.v").read_bytes()[:-8])
    problem = (
        "no layout of floats has files of 8,192 bytes for K and 16,376 for V: they were cut, or contain int8 codes"
    )
    assert f"prefix: {problem}; {asked}" in run("encode", prefix, "-o", "b/", code=2).err
    assert f"not known: {problem}; {asked}" in run("inspect", prefix).out


def test_repack_forced_zero_rows_are_noted(prefix, run):
    options = (*GEOMETRY, "--valid-tokens", 60, "--target-backend", "x86-avx512")
    assert "expected at most 50" in run("mnn", "repack", prefix, *options, "-o", "r", code=2).err
    printed = run("mnn", "repack", prefix, *options, "-o", "r", "--ignore", "contradictions")
    note = "the last 10 of 60 tokens are zero in K and V of all layers: the model computed fewer tokens"
    assert note in printed.out + printed.err
    again = run("mnn", "repack", "r", "--target-backend", "x86-avx2", "-o", "s")  # its document says 60
    assert note in again.out + again.err


def test_inspect_missing_markers_exit_1(prefix, run):
    run("inspect", prefix)
    (prefix / "sys_1_sync.v").unlink()
    assert "would not load: 1 of 4 markers are missing" in run("inspect", prefix, code=1).out


def test_commands_ignoring_contradictions_read_remaining_rows(prefix, run):
    DAMAGE["both"][0](prefix)
    options = [*GEOMETRY, "--valid-tokens", 50, "-o", "x.npz", "--ignore", "contradictions"]
    unpacked = run("mnn", "unpack", prefix, *options)
    assert "read although its layers differ in size" in unpacked.err
    assert (
        "LOSSY (read as specified, although its layers differ in size" in unpacked.out
        and "LOSSLESS" not in unpacked.out
    )
    again = run("encode", "x.npz", "-o", "again/").out
    assert "LOSSLESS copy of LOSSY K and V" in again and "LOSSY: its layers differ in size" in again
    encoded = run("encode", prefix, *options[:-3], "b/", "--ignore", "contradictions").out
    assert "LOSSY" in encoded and "LOSSLESS" not in encoded and "files were cut" in encoded
    DAMAGE["zero_k"][0](prefix)
    assert "sys_1.k is empty" in run("mnn", "unpack", prefix, *options, code=1).err


def test_commands_damaged_file_is_named(prefix, run):
    os.truncate(prefix / "sys_1.k", 0)
    assert "sys_1.k is empty" in run("mnn", "unpack", prefix / "sys_1.k", *GEOMETRY, "-o", "x.npz", code=1).err
    run("mnn", "unpack", prefix / "sys_0.k", *GEOMETRY, "-o", "x.npz")


def test_size_mismatch_layers_with_other_state_are_allowed(tmp_path):
    """Layers without full attention keep state of other sizes in such files."""
    packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(4, 2, 50, 16), capacity=114)
    os.truncate(tmp_path / "p" / "sys_2.k", 4096)
    files = find_packed(str(tmp_path / "p"))
    assert files is not None and files.size_mismatch and files.load_problems
    layers = tuple(layer for layer in files.layers if layer.layer != 2)
    exempt = replace(files, layers=layers, states=(replace(files.layers[2], kind="linear"),))
    assert not exempt.size_mismatch and not exempt.load_problems


def test_size_mismatch_documented_layers_are_allowed(tmp_path):
    """Layers of other numbers of tokens, as kvmnn packs them: what is next to the files says so."""
    from kvmnn.packed import cache_info

    layers = packed_samples.arrays(2, 2, 50, 16)
    packed_samples.write_prefix(tmp_path / "p", layers[:2], capacity=114)
    for part, buffer in zip("kv", packed_samples.packed(*layers[2:], 1, 4, 64, 64), strict=True):
        (tmp_path / "p" / f"sys_1.{part}").write_bytes(buffer.tobytes())
        (tmp_path / "p" / f"sys_1_sync.{part}").touch()
    files = find_packed(str(tmp_path / "p"))
    assert files is not None
    geometry = PackedGeometry(kv_heads=2, head_dim=16, backend="x86-avx2")
    options = PackedOptions(geometry=geometry, valid_tokens=(50,), ignore_contradictions=True)
    info = open_packed_files(files, options).info
    (tmp_path / "p" / "sys.kvmnn.json").write_text(cache_info.dump_cache_info(info))
    documented = find_packed(str(tmp_path / "p"))
    assert documented is not None
    assert open_packed_files(documented, PackedOptions()).info == info


# -- files that were written in part: the engine loads them, and answers nonsense --------------------------------------

LAYOUT = PackLayout(kv_heads=2, head_dim=16, dtype="fp32", lP=1, hP=4)
KEY_HEAD_BYTES, VALUE_HEAD_BYTES = LAYOUT.key_head_bytes(114), LAYOUT.value_head_bytes(114)


def zero(path, begin, end=None):
    """Zero bytes of a file of the prefix, as they are before the engine's pages reach the disk."""
    data = bytearray(path.read_bytes())
    end = len(data) if end is None else end
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def zero_value_row(path, row):
    words = np.fromfile(path, np.float32)
    words[LAYOUT.value_index(np.int64(row), np.arange(16), 114)] = 0
    words.tofile(path)


OTHERS = "expected values in all 50 rows"
PARTLY_WRITTEN = {
    "head_of_v": (lambda p: zero(p / "sys_1.v", VALUE_HEAD_BYTES), "sys_1.v: rows 0 to 49 of KV head 1 are zero"),
    "whole_v": (
        lambda p: zero(p / "sys_0.v", 0),
        "sys_0.v: rows 0 to 49 of KV head 0 (and 1 more head like it) are zero",
    ),
    "tail_of_k": (  # tiles of 4 tokens
        lambda p: zero(p / "sys_0.k", KEY_HEAD_BYTES + 8 * 256),
        "sys_0.k: rows 32 to 49 of KV head 1 are zero",
    ),
    "first_head_of_k": (
        lambda p: zero(p / "sys_1.k", 0, KEY_HEAD_BYTES),
        "sys_1.k: rows 0 to 49 of KV head 0 are zero",
    ),
    "layer": (
        lambda p: [zero(p / f"sys_1.{part}", 0) for part in "kv"],
        "sys_1.k: rows 0 to 49 of KV head 0 (and 3 more heads like it) are zero",
    ),
    "last_row": (lambda p: zero_value_row(p / "sys_1.v", 49), "sys_1.v: row 49 of KV head 0 is zero"),
}


@pytest.mark.parametrize("options", [(), ("--valid-tokens", 50)], ids=["inferred", "specified"])
@pytest.mark.parametrize("case", PARTLY_WRITTEN)
def test_commands_partly_written_file_is_refused(prefix, run, case, options):
    damage, message = PARTLY_WRITTEN[case]
    damage(prefix)
    for verb in (
        ("mnn unpack", "-o", "x.npz"),
        ("mnn pack", "-o", "p"),
        ("mnn repack", "--target-backend", "arm64-fp16", "-o", "p"),
        ("mnn compact", "--remove", 1, "-o", "p"),
        ("encode", "-o", "b/"),
        ("measure",),
    ):
        error = run(verb[0], prefix, *GEOMETRY, *options, *verb[1:], code=1).err
        assert message in error and OTHERS in error and "--ignore contradictions" in error, verb
    assert os.listdir() == ["prefix"]
    ids = ("--token-ids", ",".join(map(str, range(50))), "--fingerprint", "m")
    assert message in run("store", "put", "S", prefix, *GEOMETRY, *ids, code=1).err


@pytest.mark.parametrize("case", PARTLY_WRITTEN)
def test_inspect_partly_written_file_is_a_problem(prefix, run, case):
    damage, message = PARTLY_WRITTEN[case]
    damage(prefix)
    for options in (GEOMETRY, (*GEOMETRY, "--valid-tokens", 50)):
        printed = run("inspect", prefix, *options, code=1).out
        assert f"  damaged: {message}" in printed and "layer 1: 50 of 116 tokens" in printed
    (problem,) = json.loads(run("inspect", prefix, *GEOMETRY, "--json", code=1).out)["inputs"][0]["problems"]
    assert problem.startswith(message)


@pytest.mark.parametrize("case", PARTLY_WRITTEN)
def test_commands_partly_written_file_can_be_read(prefix, run, case):
    damage, message = PARTLY_WRITTEN[case]
    damage(prefix)
    forced = (*GEOMETRY, "--ignore", "contradictions")
    assert message in run("mnn", "unpack", prefix, *forced, "-o", "x.npz").err
    assert "equal" in run("diff", prefix, "x.npz", *forced).out


@pytest.mark.parametrize("case", PARTLY_WRITTEN)
def test_commands_partly_written_file_next_to_a_document_is_refused(prefix, run, case):
    damage, message = PARTLY_WRITTEN[case]
    run("mnn", "pack", prefix, *GEOMETRY, "--capacity", 114, "-o", "p")
    damage(Path("p"))
    assert message in run("encode", "p", "-o", "b/", code=1).err
    assert f"  damaged: {message}" in run("inspect", "p", code=1).out
    run("encode", "p", "-o", "b/", "--ignore", "contradictions")
    run("verify", "b", "--against", "p", "--ignore", "contradictions")


@pytest.mark.parametrize("case", [case for case in PARTLY_WRITTEN if case != "last_row"])
def test_choose_layout_partly_written_file_is_named(prefix, run, case):
    """Without a backend the other layer shows the layout; a hint at backends would not help."""
    damage, message = PARTLY_WRITTEN[case]
    heads = ("--kv-heads", 2, "--head-dim", 16)
    run("mnn", "unpack", prefix, *heads, "-o", "x.npz")
    damage(prefix)
    error = run("mnn", "unpack", prefix, *heads, "-o", "y.npz", code=1).err
    is_inferred = case == "layer"  # which the samples of the layout take for no contradiction
    remedy = "takes the zero rows as tokens" if is_inferred else "or read it with --backend x86-avx2 --valid-tokens 50"
    assert message in error and remedy in error
    assert f"  damaged: {message}" in run("inspect", prefix, *heads, code=1).out
    run("mnn", "unpack", prefix, *GEOMETRY, "--valid-tokens", 50, "--ignore", "contradictions", "-o", "y.npz")


def test_open_zero_rows_that_contradict_no_others_are_read(prefix, run):
    """One empty row before others is no half of a file, and neither are arrays that are zero in all heads."""
    zero_value_row(prefix / "sys_1.v", 20)
    run("mnn", "unpack", prefix, *GEOMETRY, "-o", "x.npz")
    arrays = {f"layer_{layer}.{part}": np.zeros((2, 50, 16), np.float32) for layer in range(2) for part in PARTS}
    np.savez("zero.npz", **arrays)
    run("mnn", "pack", "zero.npz", "--backend", "x86-avx2", "--name", "z", "-o", "z")
    run("mnn", "unpack", "z", "-o", "y.npz")


def test_inspect_missing_layer_of_a_document_is_a_problem(prefix, run):
    run("mnn", "pack", prefix, *GEOMETRY, "-o", "p")
    for name in ("sys_1.k", "sys_1.v", "sys_1_sync.k", "sys_1_sync.v"):
        os.remove(f"p/{name}")
    problem = "sys.kvmnn.json: describes 2 layers, but there are files of 1"
    assert f"  damaged: {problem}" in run("inspect", "p", code=1).out
    assert json.loads(run("inspect", "p", "--json", code=1).out)["inputs"][0]["problems"] == [problem]


def test_commands_renamed_files_without_their_document_are_refused(prefix, run):
    """Of a compacted prefix the document alone says which rows are live."""
    plan = ("--remove", 50, "--reserve", "0:8,16:5", "--valid-tokens", 50)
    run("mnn", "compact", prefix, *GEOMETRY, *plan, "-o", "c")
    for path in Path("c").glob("sys_*"):
        path.rename(f"c/new{path.name[3:]}")
    problem = "sys.kvmnn.json describes no files next to it"
    message = f"c: {problem}: rename it to new.kvmnn.json if these files were renamed, else remove it"
    repack = ("mnn", "repack", "c", *GEOMETRY, "--target-backend", "x86-avx512")
    for verb in (repack, ("mnn", "unpack", "c"), ("encode", "c"), ("measure", "c/new_0.k")):
        output = () if verb[0] == "measure" else ("-o", "out/")
        assert (
            message.replace("c:", f"{verb[-1]}:" if verb[0] == "measure" else "c:") in run(*verb, *output, code=1).err
        )
    assert not os.path.exists("out")
    assert problem in run("inspect", "c").out
    said = run(*repack, "-o", "out", "--ignore", "contradictions").out
    assert "LOSSLESS copy of LOSSY K and V" in said and f"LOSSY: {problem}: whether it is that of prefix 'new'" in said
    assert problem in run("inspect", "out").out
    os.rename("c/sys.kvmnn.json", "c/new.kvmnn.json")
    assert "LOSSLESS" in run(*repack, "-o", "out", "-f").out and "13 tokens" in run("inspect", "out").out
    Path("c/sys.kvmnn.json").write_text("{}")  # the files have their own
    run(*repack, "-o", "out", "-f")


def test_pack_layers_of_unequal_size_are_refused(prefix, run):
    """MNN deletes such a prefix; `inspect` finds the same."""
    counts = enumerate((80, 60))
    arrays = {f"layer_{n}.{part}": np.ones((2, count, 16), np.float32) for n, count in counts for part in PARTS}
    np.savez("uneven.npz", **arrays)
    pack = ("mnn", "pack", "uneven.npz", "--backend", "x86-avx2", "--name", "un", "-o", "un")
    error = run(*pack, code=2).err
    assert "MNN would not load this prefix: its layers differ in size: un_1.k has 7680 bytes" in error
    assert "its layers have 60 to 80 tokens, expected the same number in all; --capacity 80 writes" in error
    assert not os.path.exists("un")
    printed = run(*pack, "--capacity", 80).out
    assert "same number of rows\n    of every layer: what it generates is wrong" in printed
    assert "continues at" not in printed
    assert "would not load" not in run("inspect", "un").out


def test_pack_model_without_weights_is_noted(prefix, run):
    """A pulled model has settings, and no .mnn file: they are taken, as by the verbs that read packed files."""
    run("mnn", "unpack", prefix, *GEOMETRY, "-o", "x.npz")
    Path("m").mkdir()
    Path("m/llm_config.json").write_text('{"layer_nums": 2}')
    pack = ("mnn", "pack", "x.npz", "--backend", "x86-avx2", "--name", "p", "-o", "p", "--model", "m")
    assert "m has no .mnn file: its settings are taken" in run(*pack).err
    assert "computed by the model" not in run("inspect", "p").out
