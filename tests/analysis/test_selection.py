"""Which dumps are selected, and how damaged ones are skipped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from offline_model import words, write_dump

from kvmnn import SourceError
from kvmnn.analysis import (
    DumpSelection,
    MeasureOptions,
    NothingSelectedError,
    OptionError,
    Scope,
    add_source,
    measure_dumps,
    select_dumps,
)
from kvmnn.analysis.selection import is_dump_folder
from kvmnn.formats import open as open_source

K, V = words(1, 4), words(2, 4)


def skipped(root: Path, **scope: object) -> dict[str, int]:
    return dict(select_dumps([root], Scope(**scope)).skip_counts)  # type: ignore[arg-type]


FIELDS = [
    ({"layer_id": "zero"}, "meta_invalid_numeric_fields"),
    ({"seq_start": []}, "meta_invalid_numeric_fields"),
    ({"seq_len": float("inf")}, "meta_invalid_numeric_fields"),
    ({"kv_heads": float("nan")}, "meta_invalid_numeric_fields"),
    ({"head_dim": {"a": 1}}, "meta_invalid_numeric_fields"),
    ({"bytes_per_elem": "2.0"}, "meta_invalid_numeric_fields"),
    ({"seq_len": -1}, "invalid_shape"),
    ({"kv_heads": False}, "invalid_shape"),
    ({"head_dim": None}, "invalid_shape"),
    ({"k_file": None}, "missing_k_or_v_file"),
    ({"v_file": 7}, "missing_k_or_v_file"),
    ({"v_file": "gone.bin"}, "missing_k_or_v_binary"),
    ({"v_file": "a\0b"}, "missing_k_or_v_binary"),
    ({"v_file": "x" * 5000}, "missing_k_or_v_binary"),
    ({"k_file": "."}, "binary_read_error"),
    ({"k_file": "/dev/zero"}, "binary_read_error"),
    ({"bytes_per_elem": 8}, "unsupported_bytes_per_elem_8"),
    ({"bytes_per_elem": None}, "unsupported_bytes_per_elem_0"),
    ({"bytes_per_elem": -(10**20)}, f"unsupported_bytes_per_elem_{-(10**20)}"),
]


@pytest.mark.parametrize(("fields", "reason"), FIELDS)
def test_select_dumps_invalid_metadata_has_skip_reason(tmp_path, fields, reason):
    write_dump(tmp_path, 0, 0, K, V, **fields)
    assert skipped(tmp_path) == {reason: 1}


@pytest.mark.parametrize("fields", [{"seq_len": "4"}, {"kv_heads": 2.9}, {"layer_id": True}, {"head_dim": " 8 "}])
def test_select_dumps_numbers_are_converted_by_int(tmp_path, fields):
    write_dump(tmp_path, 0, 0, K, V, **fields)
    found = select_dumps([tmp_path], Scope())
    assert [(entry.tokens, entry.kv_heads, entry.head_dim, entry.is_complete()) for entry in found.entries] == [
        (4, 2, 8, True)
    ]


@pytest.mark.parametrize(
    "content", [b"{", b"", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"layer_id": ' + b"9" * 5000 + b"}"]
)
def test_select_dumps_malformed_json_is_skipped(tmp_path, content):
    (tmp_path / "meta_x.json").write_bytes(content)
    assert skipped(tmp_path) == {"meta_parse_error": 1}


def test_select_dumps_unreadable_metadata_is_skipped(tmp_path):
    (tmp_path / "meta_x.json").mkdir()
    os.mkfifo(tmp_path / "meta_y.json")
    (tmp_path / "meta_z.json").symlink_to("nowhere")
    assert skipped(tmp_path) == {"meta_parse_error": 3}


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"'])
def test_select_dumps_json_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "meta_x.json").write_text(content)
    with pytest.raises(SourceError, match=r"meta_x\.json: holds JSON that is not an object"):
        select_dumps([tmp_path], Scope())


def test_select_dumps_without_dumps_is_refused(tmp_path):
    with pytest.raises(SourceError, match="is not a directory"):
        select_dumps([tmp_path / "gone"], Scope())
    with pytest.raises(NothingSelectedError, match=r"has no meta_\*\.json file below it"):
        select_dumps([tmp_path], Scope())
    with pytest.raises(NothingSelectedError, match="No entries selected after filtering"):
        measure_dumps([], DumpSelection(), MeasureOptions())


@pytest.mark.parametrize(
    ("change", "size"),
    [
        ({"seq_len": 5}, None),
        ({"seq_len": 3}, None),
        ({"kv_heads": 10**30}, None),
        ({}, 0),
        ({}, 127),
        ({"bytes_per_elem": 4}, 126),
    ],
)
def test_measure_dumps_wrong_file_size_is_compression_failure(tmp_path, change, size):
    meta = write_dump(tmp_path, 0, 0, K, V, **change)
    write_dump(tmp_path, 1, 0, K, V)
    if size is not None:
        file = meta.parent / "v_t0_4.bin"
        file.write_bytes(bytes(size))
    selection = select_dumps([tmp_path], Scope())
    assert len(selection.entries) == 2
    found = measure_dumps(["x"], selection, MeasureOptions())
    assert dict(selection.skip_counts) == {"compression_failed": 1}
    assert found.totals.raw_bytes() == K.nbytes + V.nbytes


@pytest.mark.parametrize("large", [False, True])
def test_measure_dumps_file_changed_while_read_is_refused(tmp_path, large):
    k, v = (words(seed, 3000, dims=64) for seed in (1, 2)) if large else (K, V)
    meta = write_dump(tmp_path, 0, 0, k, v)
    write_dump(tmp_path, 1, 0, K, V)
    selection = select_dumps([tmp_path], Scope())
    file = meta.parent / json.loads(meta.read_text())["k_file"]
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(SourceError, match=r"k_t0_\d+\.bin: changed while it was read"):
        measure_dumps(["x"], selection, MeasureOptions(), real=True)


@pytest.mark.parametrize("real", [False, True])
def test_measure_dumps_file_removed_after_selection_is_refused(tmp_path, real):
    meta = write_dump(tmp_path, 0, 0, K, V)
    write_dump(tmp_path, 1, 0, K, V)
    selection = select_dumps([tmp_path], Scope())
    (meta.parent / "v_t0_4.bin").unlink()
    with pytest.raises(SourceError, match=r"layer_0/v_t0_4\.bin: cannot be read: No such file or directory"):
        measure_dumps(["x"], selection, MeasureOptions(), real=real)
    assert not selection.skip_counts


def test_measure_dumps_bad_dump_fails_its_group_once(tmp_path):
    write_dump(tmp_path, 0, 0, K, V)
    write_dump(tmp_path, 0, 4, K, V, seq_len=5)
    write_dump(tmp_path, 0, 8, K, V, run="other")
    selection = select_dumps([tmp_path], Scope())
    found = measure_dumps(["x"], selection, MeasureOptions(entry_mode="aggregate"))
    assert (found.num_groups, dict(selection.skip_counts)) == (2, {"compression_failed": 1})
    assert found.totals.raw_bytes() == K.nbytes + V.nbytes


def test_select_dumps_filters_count_no_skips(tmp_path):
    for layer in range(4):
        write_dump(tmp_path, layer, 0, K, V)
        write_dump(tmp_path, layer, 4, K[:1], V[:1])

    def taken(**scope: object) -> list[tuple[int, int]]:
        found = select_dumps([tmp_path], Scope(**scope))  # type: ignore[arg-type]
        assert found.num_scanned == 8 and not found.skip_counts
        return [(entry.layer, entry.tokens) for entry in found.entries]

    assert taken(front_n=1) == [(0, 4), (0, 1)]
    assert taken(stage="decode", front_n=3) == [(0, 1), (1, 1), (2, 1)]
    assert taken(scope="layer_range", layer_start=1, layer_end=2, stage="prefill") == [(1, 4), (2, 4)]
    assert taken(scope="layer_range", layer_start=3) == [(3, 4), (3, 1)]
    assert taken(scope="layer_ids", layer_ids=(3, 0, 3), min_seq_len=2) == [(0, 4), (3, 4)]
    assert taken(max_seq_len=1) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert taken(scope="front_n", max_seq_len=1) == [(0, 1), (1, 1)]
    assert taken(layer_end=2, max_seq_len=1) == [(2, 1)]
    assert taken(layer_ids=(3,), max_seq_len=1) == [(3, 1)]
    assert taken(min_seq_len=5) == []


def test_scope_options_of_two_scopes_are_refused(tmp_path):
    with pytest.raises(OptionError, match="options of front_n and layer_ids: say which with --scope"):
        Scope(front_n=1, layer_ids=(2,))
    assert Scope(scope="layer_ids", front_n=1, layer_ids=(2,)).includes_layer(2)


def test_measure_dumps_counts_all_scanned_layers(tmp_path):
    for layer in range(4):
        write_dump(tmp_path, layer, 0, K, V)
    found = measure_dumps(["x"], options=MeasureOptions(), selection=select_dumps([tmp_path], Scope(front_n=2)))
    assert (sorted(found.totals_by_layer), found.selection.layers) == ([0, 1], {0, 1, 2, 3})


def test_select_dumps_negative_layer_is_only_in_ranges(tmp_path):
    write_dump(tmp_path, -1, 0, K, V)
    assert not select_dumps([tmp_path], Scope(front_n=2)).entries
    assert len(select_dumps([tmp_path], Scope()).entries) == 1
    assert len(select_dumps([tmp_path], Scope(scope="layer_range", layer_start=-1)).entries) == 1


def test_select_dumps_distinguishes_runs_and_directories(tmp_path):
    write_dump(tmp_path, 0, 0, K, V, run="a")
    write_dump(tmp_path, 1, 0, K, V, run="a")
    write_dump(tmp_path, 0, 0, K, V, run=None)
    write_dump(tmp_path, 1, 0, K, V, run="c", run_id=5)
    found = select_dumps([tmp_path], Scope())
    assert len(found.dumps) == 3
    assert [entry.run_id for entry in found.entries] == ["a", "a", "", ""]


def test_select_dumps_fp32_is_rounded_or_skipped(tmp_path):
    wide = words(1, 4, dtype="<f4")
    wide[0, 0, :3] = [1e6, np.nan, -np.inf]
    write_dump(tmp_path, 0, 0, wide, wide)
    entry = select_dumps([tmp_path], Scope()).entries[0]
    assert next(entry.keys.iter_chunks(100)).tobytes() == wide.tobytes()
    entry = select_dumps([tmp_path], Scope(to_fp16=True)).entries[0]
    run = next(entry.keys.iter_chunks(100))
    with np.errstate(over="ignore"):
        assert run.tobytes() == wide.astype("<f2").tobytes()
    assert skipped(tmp_path, strict_fp16=True) == {"skip_fp32_strict": 1}


def test_add_source_is_measured_like_its_dump(tmp_path):
    write_dump(tmp_path / "dump", 0, 0, K, V)
    np.savez(tmp_path / "kv.npz", **{"layer_0.key": K.transpose(1, 0, 2), "layer_0.value": V.transpose(1, 0, 2)})
    dumped = measure_dumps(["x"], select_dumps([tmp_path / "dump"], Scope()), MeasureOptions())
    found = DumpSelection()
    add_source(found, open_source(str(tmp_path / "kv.npz")), Scope(), "kv.npz")
    measured = measure_dumps(["x"], found, MeasureOptions())
    assert measured.totals == dumped.totals

    wide = DumpSelection()
    np.savez(tmp_path / "wide.npz", k=K.transpose(1, 0, 2).astype("f4"), v=V.transpose(1, 0, 2).astype(">f4"))
    add_source(wide, open_source(str(tmp_path / "wide.npz")), Scope(to_fp16=True), "wide.npz")
    assert wide.num_rounded == 1
    rounded = measure_dumps(["x"], wide, MeasureOptions(scope=Scope(to_fp16=True))).totals
    assert rounded.lanes == dumped.totals.lanes and rounded.raw_bytes() == dumped.totals.raw_bytes()
    assert not is_dump_folder(str(tmp_path / "kv.npz")) and is_dump_folder(str(tmp_path / "dump"))


def test_add_source_applies_filters(tmp_path):
    arrays = {f"layers.{n}.{part}": K.transpose(1, 0, 2) for n in range(3) for part in ("key", "value")}
    np.savez(tmp_path / "kv.npz", **arrays)
    source = open_source(str(tmp_path / "kv.npz"))
    for scope, layers in (
        (Scope(), [0, 1, 2]),
        (Scope(front_n=2), [0, 1]),
        (Scope(stage="prefill"), []),
        (Scope(min_seq_len=5), []),
        (Scope(scope="layer_ids", layer_ids=(2,), strict_fp16=True), [2]),
    ):
        found = DumpSelection()
        add_source(found, source, scope, "kv.npz")
        assert ([entry.layer for entry in found.entries], found.num_scanned) == (layers, 3)


def test_add_source_different_k_and_v_shapes_are_refused(tmp_path):
    np.savez(tmp_path / "kv.npz", k=K.transpose(1, 0, 2), v=V.transpose(1, 0, 2)[:1])
    with pytest.raises(SourceError, match=r"layer 0: keys are \[2, 4, 8\] and values \[1, 4, 8\]"):
        add_source(DumpSelection(), open_source(str(tmp_path / "kv.npz")), Scope(), "kv.npz")


def test_add_source_fp32_keys_or_values_are_rounded(tmp_path):
    for name, types in (("k", ("<f4", "<f2")), ("v", ("<f2", "<f4")), ("none", ("<f2", "<f2"))):
        k, v = (part.transpose(1, 0, 2).astype(kind) for part, kind in zip((K, V), types, strict=True))
        np.savez(tmp_path / f"{name}.npz", k=k, v=v)
        for strict in (False, True):
            for to_fp16 in (False, True):
                found, scope = DumpSelection(), Scope(strict_fp16=strict, to_fp16=to_fp16)
                add_source(found, open_source(str(tmp_path / f"{name}.npz")), scope, "x")
                wide = name != "none" and not strict
                assert len(found.entries) == (0 if strict and name != "none" else 1)
                assert (found.num_rounded, found.num_fp32) == (wide and to_fp16, wide and not to_fp16)
