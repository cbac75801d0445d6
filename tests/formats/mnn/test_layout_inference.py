"""Layouts inferred from the values and sizes of K and V."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import llm_kv
import numpy as np
import packed_samples
import pytest
from slow_cases import mark_most_slow

import kvmnn
from kvmnn import PackLayout, SourceError
from kvmnn.formats.mnn.layout_inference import AmbiguousLayoutError
from kvmnn.formats.options import PackedOptions, ReadOptions
from kvmnn.packed.backends import BACKENDS
from kvmnn.packed.inference import PackedGeometry

HEADS = PackedGeometry(kv_heads=llm_kv.KV_HEADS, head_dim=llm_kv.HEAD_DIM)
LAYOUTS = ("x86-avx2", "x86-avx512", "arm64-sme2-fp32", "arm64-bf16-v86", "arm32-fp16", "arm64-fp16", "arm64-sme2-fp16")
"""One backend of each layout."""


def read(path, geometry=HEADS, tokens=(), **options):
    return kvmnn.open(str(path), ReadOptions(packed=PackedOptions(geometry=geometry, valid_tokens=tokens, **options)))


def check(source, layers):
    for number, expected in enumerate(layers):
        found = source[f"layer_{number // 2}.{('key', 'value')[number % 2]}"].to_numpy()
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("backend", "tokens"),
    mark_most_slow(
        [*itertools.product(LAYOUTS, [50, 64]), *zip(LAYOUTS, itertools.cycle([16, 17, 96]), strict=False)], 6
    ),
)
def test_choose_layout_real_model_infers_all_parameters(tmp_path, backend, tokens):
    layers = llm_kv.write_prefix(tmp_path / "p", backend, tokens)
    for geometry in (HEADS, PackedGeometry(head_dim=llm_kv.HEAD_DIM), PackedGeometry()):
        source = read(tmp_path / "p", geometry)
        check(source, layers)
        assert any("inferred" in note for note in source.notes)


@pytest.mark.parametrize(
    ("backend", "number"),
    mark_most_slow([*zip(LAYOUTS, itertools.cycle([20, 41]), strict=False), *itertools.product(LAYOUTS, [70])], 7),
)
def test_choose_layout_other_token_count_is_noted(tmp_path, backend, number):
    """A number that leaves rows out contradicts no layout: a note names it, as it does empty rows that are taken."""
    layers = llm_kv.write_prefix(tmp_path / "p", backend, 50)
    if number > 50:
        with pytest.raises(SourceError, match=r"zero from row 50 on .*expected at most 50; --ignore contradictions"):
            read(tmp_path / "p", PackedGeometry(), (number,))
    source = read(tmp_path / "p", PackedGeometry(), (number,), ignore_contradictions=number > 50)
    layout = source.cache.layout
    assert (layout.kv_heads, layout.head_dim) == (llm_kv.KV_HEADS, llm_kv.HEAD_DIM)
    rows = min(number, 50)
    found = source["layer_0.key"].to_numpy()
    np.testing.assert_array_equal(found[:, :rows], layers[0][:, :rows])
    assert any("more tokens" in note if number < 50 else "fewer tokens" in note for note in source.notes)


@pytest.mark.parametrize("backend", LAYOUTS)
def test_choose_layout_full_files_use_dimension_means(tmp_path, backend):
    """Full files have no empty rows to infer from."""
    layers = llm_kv.write_prefix(tmp_path / "p", backend, 64, room=0)
    check(read(tmp_path / "p", HEADS, (64,)), layers)


@pytest.mark.parametrize(
    ("said", "real"),
    mark_most_slow(
        [(LAYOUTS[i], LAYOUTS[(i + step) % len(LAYOUTS)]) for step in (1, 3) for i in range(len(LAYOUTS))], 7
    ),
)
def test_choose_layout_wrong_backend_is_refused(tmp_path, said, real):
    """Whatever fits the sizes: 64 tokens of 128 put only full tiles and blocks into the files."""
    llm_kv.write_prefix(tmp_path / "p", real, 64)
    geometry = PackedGeometry(kv_heads=llm_kv.KV_HEADS, head_dim=llm_kv.HEAD_DIM, backend=said)
    tokens = 64 * BACKENDS[real].hP // BACKENDS[real].hP
    with pytest.raises(SourceError) as error:
        read(tmp_path / "p", geometry, (tokens,))
    layout = next(name for name in ("x86-avx2", "x86-avx512", real) if _alike(name, real))
    assert f"--backend {layout}" in str(error.value)


def _alike(one, other):
    a, b = BACKENDS[one], BACKENDS[other]
    return (a.dtype, a.lP, a.hP) == (b.dtype, b.lP, b.hP)


@pytest.mark.parametrize("stale", [False, True])
def test_choose_layout_after_eviction_is_inferred(tmp_path, stale):
    """Rows of tokens that are gone stay in the files of a running engine, and nothing is empty that was not."""
    layers = llm_kv.write_prefix(tmp_path / "p", "x86-avx2", 96)
    layout = PackLayout.from_backend("x86-avx2", kv_heads=llm_kv.KV_HEADS, head_dim=llm_kv.HEAD_DIM)
    kept = list(range(8)) + list(range(60, 96))
    for layer in range(2):
        paths = [tmp_path / "p" / f"sys_{layer}.{part}" for part in "kv"]
        buffers = [np.frombuffer(path.read_bytes(), np.uint8).copy() for path in paths]
        pair = [array[:, kept] for array in layers[2 * layer :][:2]]
        layout.scatter(*pair, *buffers, 0, past_length=96, capacity=160)
        for path, buffer in zip(paths, buffers, strict=True):
            path.write_bytes(buffer.tobytes())
    geometry = HEADS if stale else HEADS.merge_defaults(PackedGeometry(dtype="fp32"))
    source = read(tmp_path / "p", geometry, (len(kept),))
    check(source, [array[:, kept] for array in layers])
    assert source.cache.layout.hP == 4


@pytest.mark.parametrize("heads", [1, 6, 12])
def test_choose_layout_wrong_heads_are_refused(tmp_path, heads):
    llm_kv.write_prefix(tmp_path / "p", "x86-avx2", 50)
    geometry = PackedGeometry(kv_heads=heads, head_dim=192 // heads, backend="x86-avx2")
    with pytest.raises(SourceError, match="the words speak for --kv-heads 3 --head-dim 64 --backend x86-avx2"):
        read(tmp_path / "p", geometry, (50,))
    forced = read(tmp_path / "p", geometry, (50,), ignore_contradictions=True)
    assert "the words contradict what was specified" in " ".join(forced.notes)


def test_choose_layout_ambiguous_noise_lists_choices(tmp_path):
    """K and V of noise in full files: no layout is likelier, and each choice reads the files."""
    packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(2, 2, 64, 8), capacity=64)
    with pytest.raises(AmbiguousLayoutError, match="4 layouts fit") as error:
        read(tmp_path / "p", PackedGeometry(kv_heads=2, head_dim=8), (64,))
    assert len(error.value.choices) == 4
    assert "--backend x86-avx2" in error.value.choices
    with pytest.raises(AmbiguousLayoutError, match=r"kv_heads .--kv-heads. and head_dim .--head-dim.*--valid-tokens"):
        read(tmp_path / "p", PackedGeometry())


def test_choose_layout_noise_with_empty_rows_is_inferred(tmp_path):
    layers = packed_samples.arrays(2, 2, 50, 8)
    packed_samples.write_prefix(tmp_path / "p", layers, lP=1, hP=8, capacity=114, padding=b"\0")
    for geometry in (PackedGeometry(kv_heads=2, head_dim=8), PackedGeometry(head_dim=8), PackedGeometry()):
        check(read(tmp_path / "p", geometry), layers)


def test_choose_layout_smooth_arrays_are_never_refused(tmp_path):
    """Arrays that no model made, whose means differ by token and not by dimension."""
    ramp = np.arange(2 * 2 * 2 * 64 * 16, dtype=np.float32).reshape(4, 2, 64, 16)
    for name, backend in (("a", "x86-avx2"), ("b", "x86-avx512")):
        numbers = BACKENDS[backend]
        packed_samples.write_prefix(tmp_path / name, list(ramp), lP=1, hP=numbers.hP, capacity=64)
        geometry = PackedGeometry(kv_heads=2, head_dim=16, backend=backend)
        check(read(tmp_path / name, geometry, (64,)), list(ramp))


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("geometry", "name"), [(HEADS, "sys_0.k"), (PackedGeometry(), "sys_1.v")])
def test_choose_layout_stray_byte_is_named(tmp_path, geometry, name):
    """One byte after the rows contradicts every layout: the error says which, and how to read the files with it."""
    layers = llm_kv.write_prefix(tmp_path / "p", "arm64-fp16", 50)
    path = tmp_path / "p" / name
    data = bytearray(path.read_bytes())
    data[len(data) - 4] = 0x41
    path.write_bytes(data)
    expected = (
        rf"{name}, byte {len(data) - 4:,} \(head 2, row 1\d\d, dim \d\d\) is .*, and 50 live tokens leave 0 there"
    )
    with pytest.raises(AmbiguousLayoutError, match=expected) as error:
        read(tmp_path / "p", geometry)
    assert [choice.rpartition("--backend")[2] for choice in error.value.choices] == [" arm64-fp16 --valid-tokens 50"]
    backend_geometry = HEADS.merge_defaults(PackedGeometry(backend="arm64-fp16"))
    check(read(tmp_path / "p", backend_geometry, (50,)), layers)


def test_infer_tokens_of_continued_session_is_ambiguous(tmp_path):
    """A prefix of 50 whose session went on to 80 tokens: the room is still that of 50."""
    llm_kv.write_prefix(tmp_path / "p", "x86-avx2", 80, room=34)
    with pytest.raises(
        AmbiguousLayoutError, match="80 rows are not empty, but the room is that of a prefix of"
    ) as error:
        read(tmp_path / "p")
    assert error.value.choices[0] == "--valid-tokens 80" and "--valid-tokens 50" in error.value.choices


def test_infer_tokens_of_full_files(tmp_path):
    layers = llm_kv.write_prefix(tmp_path / "p", "x86-avx2", 50, room=0)
    check(read(tmp_path / "p"), layers)


def test_infer_tokens_of_files_with_extra_capacity(tmp_path):
    layers = llm_kv.write_prefix(tmp_path / "p", "x86-avx2", 50, room=250)
    check(read(tmp_path / "p"), layers)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llm_kv.write_prefix(Path("p"), "x86-avx2", 64)
    return "p"


def test_commands_wrong_backend_exit_2(prefix, run):
    said = ["--kv-heads", 3, "--head-dim", 64, "--valid-tokens", 64, "--backend", "x86-avx512"]
    Path("ids.json").write_text(json.dumps(list(range(64))))
    verbs = (
        ("mnn", "unpack", "p", "-o", "x.npz"),
        ("encode", "p", "-o", "b/"),
        ("measure", "p"),
        ("store", "put", "s", "p", "--fingerprint", "m", "--token-ids", "ids.json"),
        ("diff", "p", "p"),
        ("mnn", "compact", "p", "--remove", 10, "-o", "c/"),
    )
    for verb in verbs:
        error = run(*verb, *said, code=2).err
        assert "the words speak for --kv-heads 3 --head-dim 64 --backend x86-avx2" in error, verb
    error = run(
        "mnn", "repack", "p", "--backend", "x86-avx512", "--target-backend", "arm64-fp16", "-o", "r/", *said[:6], code=2
    ).err
    assert "the words speak for --kv-heads 3 --head-dim 64 --backend x86-avx2" in error
    assert sorted(os.listdir()) == ["ids.json", "p"]


def test_commands_force_continues_with_warning(prefix, run):
    said = [
        "--kv-heads",
        3,
        "--head-dim",
        64,
        "--valid-tokens",
        64,
        "--backend",
        "x86-avx512",
        "--ignore",
        "contradictions",
    ]
    for verb in (("measure", "p"), ("diff", "p", "p"), ("mnn", "unpack", "p", "-o", "x.npz")):
        assert "the words contradict what was specified" in run(*verb, *said).err


def test_commands_without_options_read_fresh_prefix(prefix, run):
    said = run("mnn", "unpack", "p", "-o", "x.npz", "--json")
    assert "layout inferred from the words: 3 kv heads x 64 dims, fp32, lP 1, hP 4" in said.err
    notes = json.loads(said.out)["notes"]
    assert "64 tokens inferred" in " ".join(notes) and "layout inferred" in " ".join(notes)
    with np.load("x.npz") as arrays:
        np.testing.assert_array_equal(arrays["layer_1.key"], llm_kv.read_layers(64)[2])
    assert "read as 2 layers, 3 kv heads x 64 dims" in run("encode", "p", "-o", "b/").out


def test_commands_wrong_backend_error_names_inferred_layout(prefix, run):
    error = run("mnn", "unpack", "p", "--backend", "x86-avx512", "-o", "x.npz", code=2).err
    assert "the words speak for --kv-heads 3 --head-dim 64 --backend x86-avx2" in error
    llm_kv.write_prefix(Path("q"), "x86-avx2", 50)
    error = run("mnn", "unpack", "q", "--backend", "x86-avx512", "-o", "x.npz", code=2).err
    assert "they speak for --kv-heads 3 --head-dim 64 --backend x86-avx2" in error


def test_ambiguous_layout_error_lists_whole_commands(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    packed_samples.write_prefix(Path("p"), packed_samples.arrays(2, 2, 64, 8), capacity=64)
    error = run("mnn", "unpack", "p", "-o", "x.npz", "--kv-heads", 2, "--head-dim", 8, "--valid-tokens", 64, code=2).err
    line = "  kvmnn mnn unpack p -o x.npz --kv-heads 2 --head-dim 8 --valid-tokens 64 --backend x86-avx2"
    assert line in error.splitlines()
    for each in error.splitlines():
        if each.startswith("  kvmnn "):
            run(*each.split()[1:], "-f")


def test_encode_wrong_heads_error_names_inferred_layout(tmp_path, run):
    llm_kv.write_prefix(tmp_path / "p", "x86-avx2", 80)
    said = run("encode", tmp_path / "p", "--kv-heads", 6, "--head-dim", 32, "-o", tmp_path / "b/", code=2).err
    assert (
        "the words speak for --kv-heads 3 --head-dim 64 --backend x86-avx2" in said
        and "--ignore contradictions" in said
    )


@pytest.mark.parametrize(
    "options",
    [
        ("--kv-heads", 5),
        ("--head-dim", 48),
        ("--kv-heads", 5, "--valid-tokens", 64),
        ("--kv-heads", 5, "--head-dim", 64),
    ],
)
def test_encode_heads_that_no_layout_has_error_names_inferred_layout(prefix, run, options):
    error = run("encode", prefix, *options, "-o", "b/", code=2).err
    assert "--kv-heads 3 --head-dim 64 --backend x86-avx2" in error and "do not say" not in error
