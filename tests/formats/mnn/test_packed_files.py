"""Finding and reading packed files: refused files, inferred geometry, and that only live elements are read."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import packed_samples
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmnn import KvmnnError, OutputError, PackLayout, SourceError
from kvmnn.dtypes import PARTS
from kvmnn.formats import find_packed
from kvmnn.formats import open as open_any
from kvmnn.formats.mnn import CompactionPlan, compact, open_packed, pack, packed_io, repack, unpack
from kvmnn.formats.mnn import mmap_cache as mnn_live
from kvmnn.formats.mnn import packed_files as mnn_prefix
from kvmnn.formats.mnn.model import compute_fingerprint, read_model_geometry
from kvmnn.formats.mnn.packed_io import PackedPartWriter
from kvmnn.formats.options import PackedOptions, ReadOptions
from kvmnn.packed import cache_info
from kvmnn.packed.inference import PackedGeometry, find_matches, infer_layout

AVX2 = PackedGeometry(kv_heads=2, head_dim=6, backend="x86-avx2")


def read(path, tokens=(), geometry=AVX2, **options):
    return open_any(str(path), ReadOptions(packed=PackedOptions(geometry=geometry, valid_tokens=tokens, **options)))


def words(array):
    return np.concatenate(list(array.iter_chunks())).view(array.array_dtype).reshape(array.shape)


@pytest.fixture
def prefix(tmp_path):
    return packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(2, 2, 70, 6), capacity=114)


# -- reading ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_packed_files_of_any_geometry_round_trip(tmp_path_factory, data):
    # a row of one element that repeats a byte would read as empty
    heads, dims, tokens = (data.draw(st.integers(least, most)) for least, most in ((1, 3), (2, 20), (1, 90)))
    lP, hP = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 3, 4, 8, 16, 64]))
    block = data.draw(st.sampled_from([64, 5, None]))
    capacity = tokens + data.draw(st.integers(0, 70))
    dtype = data.draw(st.sampled_from(["fp16", "bf16", "fp32"]))
    step = data.draw(st.integers(1, 200)) * np.dtype(packed_samples.WORDS[dtype]).itemsize
    sample = packed_samples.write_prefix(
        tmp_path_factory.mktemp("any"),
        packed_samples.arrays(1, heads, tokens, dims, dtype),
        lP=lP,
        hP=hP,
        block=block,
        capacity=capacity,
    )
    geometry = PackedGeometry(kv_heads=heads, head_dim=dims, dtype=dtype, lP=lP, hP=hP, flash_block=block or "none")
    source = read(sample.path, (tokens,), geometry)
    for array, expected in zip(source.arrays, sample.arrays, strict=True):
        np.testing.assert_array_equal(words(array), expected)
        assert b"".join(piece.tobytes() for piece in array.reader(step)) == expected.tobytes()


def test_read_full_files_of_filled_memory_uses_geometry(tmp_path):
    """The files end with words, so that their last bytes do not tell what memory was filled with (0xa5)."""
    sample = packed_samples.write_prefix(
        tmp_path / "p", packed_samples.arrays(1, 2, 9, 10, "fp16"), lP=1, hP=8, block=5, capacity=9
    )
    geometry = PackedGeometry(kv_heads=2, head_dim=10, dtype="fp16", lP=1, hP=8, flash_block=5)
    source = read(sample.path, (9,), geometry)
    np.testing.assert_array_equal(words(source.arrays[0]), sample.arrays[0])


def test_read_arrays_are_named_by_layer(prefix):
    source = read(prefix.path, (70,))
    assert [array.name for array in source.arrays] == ["layer_0.key", "layer_0.value", "layer_1.key", "layer_1.value"]
    assert source.cache.layers[1].positions == ((0, 70),)
    assert source.notes == []


def test_read_single_file_reads_its_layer(prefix):
    source = read(prefix.path / "sys_1.v", (70,))
    assert [array.name for array in source.arrays] == ["layer_1.key", "layer_1.value"]
    np.testing.assert_array_equal(words(source.arrays[0]), prefix.arrays[2])


def test_read_layers_of_different_token_counts(prefix):
    source = read(prefix.path, (70, 9))
    assert [array.shape[1] for array in source.arrays] == [70, 70, 9, 9]


# -- what is missing or does not fit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "geometry", "message"),
    [
        ((), AVX2, r"say --valid-tokens N \(at most 116; in Python PackedOptions\(valid_tokens=\(N,\)\)\)"),
        ((117,), AVX2, r"layer 0: 117 tokens: expected at least 1 and at most 116"),
        ((0,), AVX2, r"0 tokens"),
        ((1, 2, 3), AVX2, r"3 numbers of tokens for 2 layers"),
        ((70,), PackedGeometry(kv_heads=5, head_dim=6), r"fit none of the \d+ layouts known for 5 kv heads x 6 dims"),
        (
            (70,),
            PackedGeometry(kv_heads=2, head_dim=6, backend="x86-avx512"),
            r"K file of 5568 bytes is not a whole number",
        ),
        (
            (70,),
            PackedGeometry(kv_heads=2, head_dim=6, backend="x86-avx2", flash_block="none"),
            r"do not belong together: 5568 bytes give K room for 116 tokens, 8192 bytes give V room for 128",
        ),
        ((70,), PackedGeometry(kv_heads=2, head_dim=6, lP=7, hP=9), r"no layout is known"),
    ],
)
def test_read_missing_geometry_is_refused(prefix, tokens, geometry, message):
    with pytest.raises(SourceError, match=message):
        read(prefix.path, tokens, geometry)


def test_infer_pack_parameters_only_if_unique(prefix):
    source = read(prefix.path, (70,), PackedGeometry(kv_heads=2, head_dim=6, dtype="fp32"))
    assert "of those known only that of generic/x86-sse/x86-avx2" in source.notes[0]
    assert source.notes[1:] == ["flash block 64 inferred from the sizes of the files"]
    source = read(prefix.path, (70,), PackedGeometry(kv_heads=2, head_dim=6))
    assert (
        "of 2 that fit the sizes of the files the words speak for that of generic/x86-sse/x86-avx2" in source.notes[0]
    )


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (PackedGeometry(head_dim=8), r"do not say kv_heads \(--kv-heads\)"),
        (PackedGeometry(kv_heads=2), r"do not say head_dim \(--head-dim\)"),
        (PackedGeometry(kv_heads=2, head_dim=8), r"4 layouts fit the sizes .* hP 8, .* hP 4"),
    ],
)
def test_infer_layout_noise_in_full_files_is_refused(tmp_path, geometry, message):
    sample = packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(2, 2, 64, 8), capacity=64)
    with pytest.raises(SourceError, match=message):
        read(sample.path, (64,), geometry)


def test_infer_flash_block_undecided_uses_engine_default(tmp_path):
    sample = packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(1, 2, 64, 8), capacity=64)
    named = PackedGeometry(kv_heads=2, head_dim=8, backend="x86-avx2")
    source = read(sample.path, (64,), named)
    assert source.notes == [
        "flash block 64 taken, the engine's default; the sizes would fit --backend flash_block=none as well"
    ]
    with pytest.raises(SourceError, match="layouts fit"):
        read(sample.path, (64,), PackedGeometry(kv_heads=2, head_dim=8, dtype="fp32"))
    assert read(sample.path, (64,), named.merge_defaults(PackedGeometry(flash_block="none"))).notes == []


@settings(max_examples=200)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.sampled_from([(1, 4), (1, 8), (2, 64), (4, 8), (3, 5)]),
    st.sampled_from([64, 7, None]),
    st.integers(1, 400),
)
def test_infer_capacity_is_highest_with_equal_files(heads, dims, packs, block, capacity):
    layout = PackLayout(heads, dims, "fp32", *packs, block)
    sizes = layout.key_bytes(capacity), layout.value_bytes(capacity)
    found = layout.find_capacity(*sizes)
    assert found is not None
    assert found >= capacity
    assert (layout.key_bytes(found), layout.value_bytes(found)) == sizes
    assert (layout.key_bytes(found + 1), layout.value_bytes(found + 1)) != sizes
    assert layout.find_capacity(sizes[0] + 1, sizes[1]) is None
    assert layout.find_capacity(0, sizes[1]) is None


def test_find_matches_contains_the_real_layout():
    for name in ("x86-avx2", "x86-avx512", "arm64-fp16", "arm64-sme2-fp16", "arm64-bf16-v86"):
        layout = PackLayout.from_backend(name, kv_heads=3, head_dim=20)
        sizes = [(layout.key_bytes(177), layout.value_bytes(177))]
        found = find_matches(PackedGeometry(kv_heads=3, head_dim=20), sizes)
        assert any(name in fit.backends.split("/") for fit in found), name
        assert infer_layout("x", PackedGeometry(kv_heads=3, head_dim=20, backend=name), sizes).layout.hP == layout.hP


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "sys_0_sync.v").unlink(), r"1 of 4 markers are missing, sys_0_sync\.v first"),
        (lambda p: (p / "sys_1.k").unlink(), r"sys_1\.k is missing"),
        (lambda p: [(p / f"sys_0{x}").unlink() for x in (".k", ".v")], "no files of layer 0, but of layer 1"),
        (
            lambda p: os.truncate(p / "sys_1.v", 8191),
            "its layers differ in size: sys_1.v has 8191 bytes, that of the other layer 8192",
        ),
        (lambda p: os.truncate(p / "sys_1.v", 0), "sys_1.v is empty"),
        (lambda p: os.truncate(p / "sys_1.k", 192 * 40), "its layers differ in size"),
        (lambda p: ((p / "sys_1.k").unlink(), (p / "sys_1.k").mkdir()), "not a regular file"),
        (lambda p: (p / "other_0.k").touch(), "2 prefixes, say which with --name: 'other', 'sys'"),
    ],
)
def test_read_incomplete_files_are_refused(prefix, change, message):
    change(prefix.path)
    with pytest.raises(SourceError, match=message):
        read(prefix.path, (70,))


def test_read_missing_markers_can_be_ignored(prefix):
    (prefix.path / "sys_0_sync.k").unlink()
    source = read(prefix.path, (70,), ignore_markers=True)
    assert len(source.arrays) == 4
    unpacked = unpack(source, str(prefix.path.parent / "x.npz"))
    assert unpacked.label == "LOSSLESS copy of LOSSY K and V"
    assert unpacked.losses[0].startswith("LOSSY: 1 of 4 markers are missing, sys_0_sync.k first")
    assert unpacked.losses[0].endswith("not checked whether its files belong together")


def test_read_file_truncated_after_open_is_refused(prefix):
    source = read(prefix.path, (70,))
    os.truncate(prefix.path / "sys_0.k", 100)
    with pytest.raises(SourceError, match="changed while it was read: has 100 bytes, had 5568"):
        words(source.arrays[0])


@pytest.mark.parametrize(
    ("tokens", "notes"),
    [
        ((50,), []),
        (
            (40,),
            [
                "in 2 of 2 layers rows after the 40 tokens are not zero, up to row 50: more tokens may be live than "
                "--valid-tokens says"
            ],
        ),
    ],
)
@pytest.mark.parametrize("padding", [b"\0", b"\xa5"])
def test_read_rows_after_token_count_are_noted(tmp_path, tokens, notes, padding):
    made = packed_samples.arrays(2, 2, 50, 6)
    sample = packed_samples.write_prefix(tmp_path / "p", made, capacity=114, padding=padding)
    assert read(sample.path, tokens).notes == notes


@pytest.mark.parametrize("padding", [b"\0", b"\xa5"])
def test_read_valid_tokens_beyond_rows_of_one_layer_are_refused(tmp_path, padding):
    made = packed_samples.arrays(2, 2, 50, 6)
    sample = packed_samples.write_prefix(tmp_path / "p", made, capacity=114, padding=padding)
    message = r"sys_0\.k: rows 50 to 59 of KV head 0 \(and 3 more heads like it\) are zero .* --valid-tokens has more"
    with pytest.raises(SourceError, match=message):
        read(sample.path, (60, 50))
    source = read(sample.path, (60, 50), ignore_contradictions=True)
    loss = "sys_0.k: rows 50 to 59 of KV head 0 (and 3 more heads like it) are zero"
    assert source.cache.loss.startswith(loss) and source.cache.loss.endswith("the zero rows are taken as tokens")
    assert "in 1 of 2 layers the last 10 of 60 tokens are all zero" in source.notes[0]


def test_encode_of_files_written_in_part_says_so_in_all_copies(tmp_path, run):
    sample = packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(2, 2, 50, 6), capacity=114)
    keys = next(sample.path.glob("*_1.k"))
    content = keys.read_bytes()
    keys.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    options = ("--ignore", "contradictions", "--kv-heads", 2, "--head-dim", 6, "--backend", "x86-avx2")
    out = run("encode", sample.path, *options, "--valid-tokens", 50, "-o", tmp_path / "f").out
    for text in (out, run("verify", tmp_path / "f").out, run("decode", tmp_path / "f", "-o", tmp_path / "back").out):
        assert "LOSSLESS copy of LOSSY K and V" in text
        assert f"LOSSY: {keys.name}: rows 0 to 49 of KV head 1 are zero" in text


@pytest.mark.parametrize("padding", [b"\0", b"\xa5"])
@pytest.mark.parametrize("num_ids", [49, 51, 57])
def test_read_other_number_of_token_ids_is_refused(tmp_path, num_ids, padding):
    made = packed_samples.arrays(2, 2, 50, 6)
    sample = packed_samples.write_prefix(tmp_path / "p", made, capacity=114, padding=padding)
    ids = cache_info.TokenIdsFingerprint.from_ids(range(num_ids))
    rows = "50 rows of K and V are not zero" if num_ids > 50 else "rows after the 49 tokens are not zero, up to row 50"
    with pytest.raises(SourceError, match=f"{num_ids} token ids, but .*{rows}"):
        read(sample.path, token_ids=ids)
    notes = read(sample.path, (num_ids,), token_ids=ids).notes
    assert [f"{'fewer' if num_ids > 50 else 'more'} tokens may be live" in note for note in notes] == [True]
    if num_ids > 50:
        assert read(sample.path, token_ids=ids, ignore_contradictions=True).cache.layers[0].tokens == num_ids


def test_read_token_ids_that_document_contradicts_are_refused(prefix):
    cache = read(prefix.path, (70,)).cache
    document = prefix.path / "sys.kvmnn.json"
    document.write_text(cache_info.dump_cache_info(cache))
    for num_ids in (69, 71):
        ids = cache_info.TokenIdsFingerprint.from_ids(range(num_ids))
        with pytest.raises(SourceError, match=f"{num_ids} token ids, but its document says 70 tokens: expected 70;"):
            read(prefix.path, token_ids=ids)
        assert read(prefix.path, token_ids=ids, ignore_contradictions=True).cache.token_ids == ids
    assert read(prefix.path, token_ids=cache_info.TokenIdsFingerprint.from_ids(range(70))).notes == []


def test_read_token_ids_of_evicted_tokens_are_accepted(prefix):
    """A document of 70 tokens that remain of 100."""
    cache = read(prefix.path, (70,)).cache
    layers = tuple(replace(layer, positions=((0, 4), (34, 66))) for layer in cache.layers)
    (prefix.path / "sys.kvmnn.json").write_text(cache_info.dump_cache_info(replace(cache, layers=layers)))
    for num_ids in (70, 100):
        ids = cache_info.TokenIdsFingerprint.from_ids(range(num_ids))
        assert read(prefix.path, token_ids=ids).cache.token_ids == ids
    with pytest.raises(SourceError, match="101 token ids, but its document says 70 tokens: expected 70 to 100;"):
        read(prefix.path, token_ids=cache_info.TokenIdsFingerprint.from_ids(range(101)))


def test_read_document_is_compared_by_value(prefix):
    source = read(prefix.path, (70,))
    (prefix.path / "sys.kvmnn.json").write_text(cache_info.dump_cache_info(source.cache))
    assert read(prefix.path).notes == []
    with pytest.raises(SourceError, match="says another number of tokens than was given: 70, not 69"):
        read(prefix.path, (69,))
    for file in prefix.path.glob("sys_1*"):
        file.unlink()
    with pytest.raises(SourceError, match="describes 2 layers, but there are files of 1"):
        read(prefix.path)
    assert read(prefix.path / "sys_0.k").cache.layers[0].tokens == 70


def test_read_missing_layer_is_detected_by_markers(prefix):
    for part in "kv":
        (prefix.path / f"sys_1.{part}").unlink()
    with pytest.raises(SourceError, match="prefix 'sys' has no files of layer 1, but a marker of layer 1"):
        read(prefix.path, (70,))


def test_find_prefix_name_with_underscores_and_digits(tmp_path):
    sample = packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(2, 1, 3, 4), name="a_1_0", capacity=8)
    files = mnn_prefix.find_prefix(str(sample.path))
    assert (files.name, len(files.layers)) == ("a_1_0", 2)
    with pytest.raises(SourceError, match="has no prefix 'b'; it has 'a_1_0'"):
        mnn_prefix.find_prefix(str(sample.path), "b")
    with pytest.raises(SourceError, match="is not named as prefix-cache files are"):
        mnn_prefix.find_prefix(str(sample.path / "x.k"))


@pytest.mark.parametrize("bad", [0, -3])
def test_packed_geometry_numbers_below_one_are_refused(bad):
    for name in ("kv_heads", "head_dim", "lP", "hP", "flash_block"):
        with pytest.raises(KvmnnError, match=f"{name} is {bad}"):
            PackedGeometry(**{name: bad})


# -- packed dumps -----------------------------------------------------------------------------------------------------


def write_dump(folder, dtype="fp16", *, used=21, room=85, block=64, **changes):
    layers = packed_samples.arrays(1, 2, used, 6, dtype)
    layout = PackLayout(2, 6, dtype, 1, 8, block)
    fields = {"layout": "packed", "layer_id": 0, "used_seq_len": used, "max_seq_len": room, "kv_heads": 2}
    fields |= {"head_dim": 6, "bytes_per_elem": layout.itemsize, "pack_h": 8, "pack_l": 1, "flash_upper_kv": block}
    fields |= {"key_stride_bytes": layout.key_head_bytes(room), "value_stride_bytes": layout.value_head_bytes(room)}
    fields |= {"key_used_bytes": layout.key_head_bytes(used), "value_used_bytes": layout.value_head_bytes(used)}
    fields |= {"stage": "prefill", "run_id": "r", "k_file": "packed_k.bin", "v_file": "packed_v.bin"}
    folder = folder / "r" / "layer_0"
    folder.mkdir(parents=True)
    for part, buffer in zip("kv", packed_samples.packed(*layers, 1, 8, block, used), strict=True):
        (folder / f"packed_{part}.bin").write_bytes(buffer.tobytes())
    (folder / f"packed_meta_packed_t0_{used}.json").write_text(json.dumps(fields | changes))
    return layers


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_packed_dump_is_read(tmp_path, dtype):
    layers = write_dump(tmp_path, dtype)
    source = open_any(str(tmp_path))
    assert [array.name for array in source.arrays] == ["r/layer_0/packed_k", "r/layer_0/packed_v"]
    for array, expected in zip(source.arrays, layers, strict=True):
        np.testing.assert_array_equal(words(array), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "plain"}, "layout is 'plain', expected 'packed'"),
        ({"bytes_per_elem": 1}, "bytes_per_elem is 1"),
        ({"used_seq_len": 86}, "used_seq_len is 86, above max_seq_len, 85"),
        ({"used_seq_len": 60}, "key_used_bytes is 288, expected 768 for 60 tokens"),
        ({"key_stride_bytes": 7}, "key_stride_bytes is 7, expected 1056"),
        ({"pack_h": 0}, "pack_h is 0"),
        ({"k_file": "../../x"}, "leads out of the dump directory"),
        ({"kv_heads": 3}, "has 576 bytes, its metadata says 864"),
    ],
)
def test_packed_dump_inconsistent_metadata_is_refused(tmp_path, changes, message):
    write_dump(tmp_path, **changes)
    with pytest.raises(SourceError, match=message):
        open_any(str(tmp_path))


# -- models -----------------------------------------------------------------------------------------------------------


def test_read_model_geometry_of_directory(tmp_path):
    (tmp_path / "llm_config.json").write_text('{"layer_nums": 2, "key_value_shape": [2, 1, 0, 8, 256]}')
    (tmp_path / "config.json").write_text('{"attention_mode": 0, "layer_nums": 9}')
    found = read_model_geometry(str(tmp_path))
    assert (found.num_layers, found.kv_heads, found.head_dim, found.flash_block) == (2, 8, 256, "none")
    (tmp_path / "llm_config.json").write_text('{"num_key_value_heads": 3, "head_dim": -1, "num_hidden_layers": 4}')
    (tmp_path / "config.json").write_text('{"attention_mode": 8}')
    found = read_model_geometry(str(tmp_path))
    assert (found.num_layers, found.kv_heads, found.head_dim, found.flash_block) == (4, 3, None, 64)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SourceError, match="not a JSON object"):
        read_model_geometry(str(tmp_path))


def test_read_model_of_other_layer_count_is_refused(prefix, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "llm.mnn").write_bytes(b"graph")
    (model / "llm_config.json").write_text('{"layer_nums": 3, "key_value_shape": [2, 1, 0, 2, 6]}')
    with pytest.raises(SourceError, match=r"has files of 2 layers, but the model in .* has 3"):
        read(prefix.path, (70,), PackedGeometry(backend="x86-avx2"), model=str(model))
    (model / "llm_config.json").write_text('{"layer_nums": 2, "key_value_shape": [2, 1, 0, 2, 6]}')
    source = read(prefix.path, (70,), PackedGeometry(backend="x86-avx2"), model=str(model))
    assert source.cache.model == compute_fingerprint(str(model))


def test_compute_fingerprint_covers_graph_and_weights(tmp_path):
    (tmp_path / "llm.mnn").write_bytes(b"graph")
    (tmp_path / "llm.mnn.weight").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    first = compute_fingerprint(str(tmp_path))
    (tmp_path / "config.json").write_text('{"thread_num": 4}')
    (tmp_path / "tokenizer.txt").touch()
    assert compute_fingerprint(str(tmp_path)) == compute_fingerprint(str(tmp_path), {}) == first
    assert (
        compute_fingerprint(str(tmp_path), {"precision": "low", "memory": "high"})
        == f"{first} memory=high precision=low"
    )
    (tmp_path / "llm.mnn.weight").write_bytes(b"weightz")
    assert compute_fingerprint(str(tmp_path)) != first
    with pytest.raises(SourceError, match=r"has no \.mnn file"):
        compute_fingerprint(str(tmp_path.parent))


# -- writing ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[0, 1 << 30], ids=["mapped", "at once"])
def at_once(request, monkeypatch):
    """Files are mapped and filled page by page, or written from memory."""
    monkeypatch.setattr(packed_io, "_MAX_IN_MEMORY_BYTES", request.param)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_packed_part_writer_accepts_runs_of_any_size(at_once, tmp_path_factory, data):
    heads, dims, tokens = (data.draw(st.integers(1, most)) for most in (3, 9, 70))
    lP, hP = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 4, 8]))
    block = data.draw(st.sampled_from([64, 5, None]))
    order = data.draw(st.sampled_from(["head", "token"]))
    capacity = tokens + data.draw(st.integers(0, 9))
    layout = PackLayout(heads, dims, "fp16", lP, hP, block)
    layers = packed_samples.arrays(1, heads, tokens, dims, "fp16")
    expected = packed_samples.packed(*layers, lP, hP, block, capacity, b"\0")
    folder = tmp_path_factory.mktemp("part")
    for part, array, buffer in zip(PARTS, layers, expected, strict=True):
        path = folder / part
        path.touch()
        file = PackedPartWriter(path, path, layout, part, capacity=capacity, num_tokens=tokens, order=order)
        plain = array if order == "head" else array.swapaxes(0, 1)
        data_bytes = np.frombuffer(plain.tobytes(), np.uint8)
        step = data.draw(st.integers(1, 500))
        runs = [data_bytes[start : start + step] for start in range(0, data_bytes.size, step)]
        for run in runs:
            file.write_rows(run)
        file.rewind()
        assert b"".join(run.tobytes() for run in file.iter_chunks()) == array.tobytes()
        assert all(file.matches_next(run) for run in runs)
        file.rewind()
        assert not all(file.matches_next(run ^ np.uint8(1)) for run in runs)
        file.close()
        assert path.read_bytes() == buffer.tobytes()


def test_packed_part_writer_missing_rows_are_refused(tmp_path):
    (tmp_path / "x").touch()
    layout = PackLayout(1, 4, "fp32", 1, 4)
    file = PackedPartWriter(tmp_path / "x", tmp_path / "x", layout, "key", capacity=8, num_tokens=2)
    file.write_rows(np.zeros(16, np.uint8))
    with pytest.raises(KvmnnError, match="1 rows came, 2 were announced"):
        file.rewind()
    with pytest.raises(KvmnnError, match="more rows came than 2 tokens have"):
        file.write_rows(np.zeros(32, np.uint8))
    file.close()


def test_find_packed_other_directory_is_none(tmp_path):
    assert find_packed(str(tmp_path)) is None
    assert find_packed(str(tmp_path / "x.npy")) is None


def test_live_files_round_trip(tmp_path):
    rng = np.random.default_rng(4)
    layout = PackLayout(kv_heads=2, head_dim=6, dtype="fp32", lP=1, hP=4)
    plain = [rng.standard_normal((2, 2, 9, 6)).astype(np.float32) for _ in range(3)]
    buffers = [layout.pack(k, v, capacity=40) for k, v in plain]
    order = mnn_live.write_mmap_files(str(tmp_path / "live"), buffers, first_address=0x7F00_0000_1000)
    assert order[0] == "00007F0000001000" and len(set(order)) == 3
    found = mnn_live.find_mmap_files(str(tmp_path / "live"), layer_order=order)
    for layer, (k, v) in zip(found.layers, plain, strict=True):
        back = layout.unpack(Path(layer.key).read_bytes(), Path(layer.value).read_bytes(), 9)
        assert np.array_equal(back[0], k) and np.array_equal(back[1], v)
    with pytest.raises(OutputError):
        mnn_live.write_mmap_files(str(tmp_path / "live"), buffers, first_address=0x7F00_0000_1000)
    assert (
        mnn_live.write_mmap_files(str(tmp_path / "live"), buffers, first_address=0x7F00_0000_1000, force=True) == order
    )
    for layers, address in (([], 0), (buffers, -1), (buffers, 2**64 - 9)):
        with pytest.raises(SourceError):
            mnn_live.write_mmap_files(str(tmp_path / "other"), layers, first_address=address)
    assert not (tmp_path / "other").exists()
    lowest = mnn_live.write_mmap_files(str(tmp_path / "lowest"), buffers[:2], first_address=0)
    assert lowest == ("0000000000000000", "0000000000001000")


def test_open_document_without_row_hashes_is_believed(tmp_path):
    """Earlier versions wrote none. Where there are some, they are checked, and those of a copy are its own."""
    tokens = 20
    words = np.random.default_rng(1).standard_normal((2, tokens, 16)).astype(np.float32)
    arrays = {f"layer_{n}.{part}": words + n for n in (0, 1) for part in ("key", "value")}
    np.savez(tmp_path / "a.npz", **arrays)
    pack(open_any(str(tmp_path / "a.npz")), str(tmp_path / "p"), PackedGeometry(backend="x86-avx2"), name="p")
    repack(open_any(str(tmp_path / "p")), str(tmp_path / "q"), "arm64-fp16", name="q")
    documents = [json.loads((tmp_path / name / f"{name}.kvmnn.json").read_text()) for name in "pq"]
    hashes = [document.pop("row_hashes") for document in documents]
    assert all(len(each) == 2 for each in hashes) and not set(hashes[0]) & set(hashes[1])
    (tmp_path / "q" / "q_1.v").write_bytes((tmp_path / "q" / "q_0.v").read_bytes())
    path = tmp_path / "q" / "q.kvmnn.json"
    with pytest.raises(SourceError, match=r"q\.kvmnn\.json was written for other rows than those of layer 1: MNN"):
        open_any(str(tmp_path / "q"))
    path.write_text(json.dumps(documents[1]))
    assert len(open_any(str(tmp_path / "q"))) == 4
    for invalid in ([], hashes[1][:1], ["x", "y"], {}, None, [None, None]):
        path.write_text(json.dumps({**documents[1], "row_hashes": invalid}))
        with pytest.raises(KvmnnError, match="row_hashes"):
            open_any(str(tmp_path / "q"))


class Killed(BaseException):
    """A run that ends in the midst of its renames."""


def _count_changes(monkeypatch: pytest.MonkeyPatch, last: int) -> list[str]:
    """End the run after `last` renames and removals of files in place."""
    changes: list[str] = []

    def count(change: Any) -> Any:
        def call(path: Any, *others: Any, **options: Any) -> Any:
            if len(changes) == last:
                raise Killed
            changes.append(str(path))
            return change(path, *others, **options)

        return call

    monkeypatch.setattr("os.replace", count(os.replace))
    monkeypatch.setattr("pathlib.Path.unlink", count(Path.unlink))
    return changes


@pytest.mark.parametrize("verb", ["pack", "compact"])
def test_replacing_prefix_that_is_killed_never_leaves_markers_without_description(tmp_path, monkeypatch, verb):
    """Evicted tokens and losses stand in the description alone, so that the rest would be taken for a prefix."""
    tokens, geometry = 20, PackedGeometry(backend="x86-avx2")
    arrays = {f"layer_{n}.{part}": np.ones((2, tokens, 16), np.float16) for n in (0, 1) for part in ("key", "value")}
    np.savez(tmp_path / "a.npz", **arrays)
    pack(open_any(str(tmp_path / "a.npz")), str(tmp_path / "packed"), geometry, name="p", cast=True)
    packed, folder = open_packed(str(tmp_path / "packed")), tmp_path / "p"
    compact(packed, [CompactionPlan(4, ())], str(tmp_path / "old"))
    for last in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "old", folder)
        with monkeypatch.context() as patch, suppress(Killed):
            changes = _count_changes(patch, last)
            if verb == "pack":
                pack(open_any(str(tmp_path / "a.npz")), str(folder), geometry, name="p", cast=True, force=True)
            else:
                compact(packed, [CompactionPlan(2, ())], str(folder), force=True)
        has_markers, has_description = len(list(folder.glob("p_*_sync.?"))) == 4, (folder / "p.kvmnn.json").exists()
        assert has_description or not has_markers, changes
        if len(changes) < last:
            break
    assert 13 < last < 39 and has_markers
