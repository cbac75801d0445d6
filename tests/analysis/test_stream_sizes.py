"""Sizes of byte lanes against slow plain Python, for all shapes, options, SIMD levels and numbers of threads."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import offline_model
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offline_model import words, write_dump

from kvmnn import KvmnnError, _simd
from kvmnn.analysis import (
    DumpSelection,
    LanePredictors,
    MeasureOptions,
    MeasureResult,
    OptionError,
    Scope,
    _stream_meter,
    add_source,
    build_reference_document,
    count_work_bytes,
    measure_dumps,
    select_dumps,
)
from kvmnn.analysis.measurement import MemoryBudget
from kvmnn.analysis.options import PREDICTOR_NAMES, apply_predictor, bitshuffle, invert_predictor
from kvmnn.formats import open as open_source

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 70))


@pytest.fixture(autouse=True, scope="module", params=_simd.simd_levels())
def level(request):
    before = _simd.simd_level()
    _simd.set_simd_level(request.param)
    yield
    _simd.set_simd_level(before)


def lane_of(shape: tuple[int, ...], seed: int, spread: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, spread, shape).astype(np.uint8)


@given(SHAPES, st.integers(0, 99), st.sampled_from(PREDICTOR_NAMES))
@settings(max_examples=150, deadline=None)
def test_apply_predictor_equals_the_model_and_inverts(shape, seed, name):
    lane = lane_of(shape, seed, 256)
    made = apply_predictor(lane, name)
    assert made.tobytes() == offline_model.predict(lane, name).tobytes()
    assert invert_predictor(made, name).tobytes() == lane.tobytes()


@given(st.binary(max_size=100))
@settings(max_examples=150, deadline=None)
def test_bitshuffle_equals_the_model(data):
    assert bitshuffle(data) == offline_model.bitshuffle(data)


def test_apply_predictor_invalid_lane_is_refused():
    with pytest.raises(TypeError, match=r"expected uint8 \[token, kv_head, head_dim\]"):
        apply_predictor(np.zeros((2, 3), np.uint8), "raw")
    with pytest.raises(KvmnnError, match="unknown predictor 'sub'"):
        invert_predictor(np.zeros((2, 3, 4), np.uint8), "sub")
    assert apply_predictor(np.zeros((0, 3, 4), np.uint8), "pair_delta").shape == (0, 3, 4)
    for arguments in (
        (b"abc", 1, 2, 0),
        (b"ab", 0, 1, 0),
        (b"ab", 1, 0, 0),
        (b"ab", 1, 1, len(PREDICTOR_NAMES)),
        (b"ab", 1, 1, -1),
    ):
        with pytest.raises(ValueError, match=r"no whole tokens|no predictor"):
            _stream_meter.predict(*arguments)


@pytest.mark.slow
@given(
    SHAPES,
    st.integers(0, 99),
    st.sampled_from([1, 3, 256]),
    st.lists(st.sampled_from(PREDICTOR_NAMES), min_size=1, max_size=5, unique=True),
    st.integers(1, 6),
    st.sampled_from([1, 3, 9, -3]),
    st.booleans(),
    st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_stream_meter_size_equals_the_model(shape, seed, spread, names, block, level, shuffled, step):
    tokens, heads, dims = shape
    meter = _stream_meter.StreamMeter()
    for lane in (0, 1):  # the second time with what the first left over
        data = lane_of((*shape, 2), seed + lane, spread)
        meter.configure(lane, heads, dims, block, [PREDICTOR_NAMES.index(n) for n in names], level, shuffled, True)
        meter.start(tokens)
        for start in range(0, tokens, step):
            meter.feed(data[start : start + step].reshape(-1))
        size, blocks, won, limit = meter.finish()
        mine = np.ascontiguousarray(data[..., lane])
        expected, modes = offline_model.stream_size(mine, names, block, level, shuffled)
        assert size + blocks + 8 == expected
        assert dict(zip(names, won, strict=True)) == modes
        counts = np.bincount(mine.reshape(-1))
        share = counts[counts > 0] / mine.size
        assert limit == pytest.approx(-(share * np.log2(share)).sum() * mine.size / 8, abs=1e-6)


def test_stream_meter_reconfigured_sizes_stay_correct():
    meter = _stream_meter.StreamMeter()
    names = list(PREDICTOR_NAMES)
    for tokens, block in ((9, 2), (300, 400), (40, 3), (500, 499), (1, 1)):
        data = words(tokens, tokens)
        meter.configure(1, 2, 8, block, range(len(names)), 3, True, False)
        meter.start(tokens)
        meter.feed(data.reshape(-1).view(np.uint8))
        size, blocks, _, limit = meter.finish()
        lane = np.ascontiguousarray(data.view(np.uint8).reshape(tokens, 2, 8, 2)[..., 1])
        assert size + blocks + 8 == offline_model.stream_size(lane, names, block, 3, True)[0]
        assert limit == 0
    assert meter.count_buffer_bytes() > 0
    meter.free_buffers()
    assert meter.count_buffer_bytes() == 0


def test_stream_meter_invalid_arguments_are_refused():
    meter = _stream_meter.StreamMeter()
    with pytest.raises(ValueError, match=r"setup\(\) first"):
        meter.start(1)
    for bad in (
        (2, 1, 1, 1, [0]),
        (0, 0, 1, 1, [0]),
        (0, 1, 0, 1, [0]),
        (0, 1, 1, 0, [0]),
        (0, 1, 1, 1, []),
        (0, 1, 1, 1, [len(PREDICTOR_NAMES)]),
    ):
        with pytest.raises(ValueError, match="expected"):
            meter.configure(*bad, 3, False, True)
    meter.configure(0, 2, 2, 4, [0], 3, False, True)
    with pytest.raises(ValueError, match="no whole tokens, or more"):
        meter.feed(bytes(8))
    meter.start(2)
    for size in (7, 24):
        with pytest.raises(ValueError, match="no whole tokens, or more"):
            meter.feed(bytes(size))
    meter.feed(bytes(8))
    with pytest.raises(ValueError, match="1 of 2 tokens"):
        meter.finish()


OPTIONS = st.builds(
    MeasureOptions,
    scope=st.just(Scope(to_fp16=True)),
    entry_mode=st.sampled_from(["per_meta", "aggregate", "chunked", "chunked_grouped"]),
    online_chunk_seq=st.sampled_from([0, 1, 5, 100]),
    online_framing_bytes=st.integers(0, 20),
    aggregate_by_stage=st.booleans(),
    codec_mode=st.sampled_from(["adaptive_v22", "legacy"]),
    adaptive_block_seq=st.sampled_from([1, 4, 64, 1 << 70]),
    bitshuffle=st.booleans(),
    zstd_level=st.sampled_from([1, 3]),
    predictors=st.builds(LanePredictors, k_lo=st.sampled_from([("xor_seq",), ("pair_delta", "raw", "pair_delta")])),
)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    """Two layers, two runs, prefill and decode, fp16 and fp32, out of order, and one that is short."""
    root = tmp_path_factory.mktemp("dumps")
    write_dump(root, 0, 12, words(1, 1), words(2, 1))
    write_dump(root, 0, 0, words(3, 12), words(4, 12))
    write_dump(root, 0, 13, words(5, 1), words(6, 1))
    write_dump(root, 1, 0, words(7, 30, dims=7), words(8, 30, dims=7), run="other")
    write_dump(root, 1, 40, words(9, 9, dims=7, dtype="<f4"), words(10, 9, dims=7, dtype="<f4"), run="other")
    write_dump(root, 1, 0, words(11, 6), words(12, 6), seq_len=7)
    return root


@pytest.mark.slow
@given(OPTIONS)
@settings(max_examples=60, deadline=None)
def test_measure_dumps_sums_equal_the_model(dumps, options):
    found = build_reference_document(measure_dumps(["x"], select_dumps([dumps], options.scope), options, threads=2))
    groups: dict = {}
    for number, (layer, start, k, v, run, stage) in enumerate(DUMPS):
        key = (run, layer, stage if options.aggregate_by_stage else 0) if options.is_grouped else number
        groups.setdefault(key, []).append((start, k, v))
    sizes, extra, raw = {"k": 0, "v": 0}, 0, 0
    for group in groups.values():
        group.sort(key=lambda entry: entry[0])
        for part, index in (("k", 1), ("v", 2)):
            rows = np.concatenate([entry[index] for entry in group]).astype("<f2")
            raw += rows.nbytes
            step = options.online_chunk_seq or len(rows)
            pieces = [rows[i : i + step] for i in range(0, len(rows), step)] if options.is_chunked else [rows]
            extra = 4 + 4 * len(group) if options.entry_mode == "aggregate" else 0
            sizes[part] += extra + sum(piece_size(piece, part, options) for piece in pieces)
            sizes[part] += options.online_framing_bytes * len(pieces) if options.is_chunked else 0
    assert (found["k_compressed_bytes"], found["v_compressed_bytes"]) == (sizes["k"], sizes["v"])
    assert found["raw_bytes"] == raw
    assert found["skip_reasons"] == {"compression_failed": 1}
    assert found["converted_fp32_entries"] == 1


DUMPS = [  # in the order of the walk
    (1, 0, words(7, 30, dims=7), words(8, 30, dims=7), "other", "prefill"),
    (1, 40, words(9, 9, dims=7, dtype="<f4"), words(10, 9, dims=7, dtype="<f4"), "other", "prefill"),
    (0, 0, words(3, 12), words(4, 12), "run", "prefill"),
    (0, 12, words(1, 1), words(2, 1), "run", "decode"),
    (0, 13, words(5, 1), words(6, 1), "run", "decode"),
]


def piece_size(piece: np.ndarray, part: str, options: MeasureOptions) -> int:
    lanes = piece.view(np.uint8).reshape(*piece.shape, 2)
    total = 0
    for name, lane in (("hi", lanes[..., 1]), ("lo", lanes[..., 0])):
        adaptive = options.codec_mode == "adaptive_v22"
        names = (
            list(options.predictors.get_lane(f"{part}_{name}"))
            if adaptive
            else [{"hi": "delta_seq", "lo": "raw"}[name]]
        )
        block = min(options.adaptive_block_seq, len(piece)) if adaptive else len(piece)
        total += offline_model.stream_size(
            np.ascontiguousarray(lane), names, block, options.zstd_level, options.bitshuffle, adaptive
        )[0]
    return total


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_measure_dumps_does_not_depend_on_threads_or_memory(dumps, threads, monkeypatch):
    options = MeasureOptions(entry_mode="chunked_grouped", online_chunk_seq=5)
    monkeypatch.setattr("kvmnn.analysis.measurement.MAX_MEMORY_BYTES", 1)
    monkeypatch.setattr("kvmnn.analysis.tensor_reader.CHUNK_BYTES", 40)
    seen: list[int] = []
    measured = measure_dumps(
        ["x"], select_dumps([dumps], options.scope), options, real=True, threads=threads, progress=seen.append
    )
    reference = measure_dumps(["x"], select_dumps([dumps], options.scope), options, threads=1)
    assert build_reference_document(measured) == build_reference_document(reference)
    assert sum(seen) == 2 * measured.totals.raw_bytes()


def test_measure_dumps_large_mapped_files_equal_the_model(tmp_path):
    keys, values = words(1, 3000, dims=64), words(2, 3000, dims=64, dtype="<f2")
    write_dump(tmp_path / "a", 0, 0, keys, values)
    options = MeasureOptions()
    found = measure_dumps(["x"], select_dumps([tmp_path], options.scope), options)
    assert (
        found.totals.lanes["k_hi"].simulated_bytes
        == offline_model.stream_size(
            np.ascontiguousarray(keys.view(np.uint8).reshape(3000, 2, 64, 2)[..., 1]),
            list(PREDICTOR_NAMES),
            64,
            3,
            False,
        )[0]
    )


def test_measure_dumps_real_frames_are_counted(dumps):
    import kvmnn

    options = MeasureOptions(scope=Scope(front_n=1))
    found = measure_dumps(["x"], select_dumps([dumps], options.scope), options, real=True)
    mine = [array for layer, _, k, _, _, _ in DUMPS if layer == 0 for array in (k,)]
    assert found.totals.stored_sizes["key"].bytes == sum(len(kvmnn.encode(array)) for array in mine)
    assert found.totals.stored_sizes["key"].frames == 3
    assert found.totals.stored_bytes() > found.totals.stored_sizes["key"].bytes


def test_measure_dumps_failed_roundtrip_is_an_error(dumps, monkeypatch):
    monkeypatch.setattr("kvmnn.analysis.stream_sizes.verify_roundtrip", lambda *_, **__: False)
    options = MeasureOptions()
    with pytest.raises(KvmnnError, match="did not decode to its own input"):
        measure_dumps(["x"], select_dumps([dumps], options.scope), options, real=True)


def test_memory_budget_oversized_item_runs_alone():
    import threading

    budget, order = MemoryBudget(10), []
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with budget.reserve(50):
            inside.set()
            go_on.wait(10)
            order.append("first")

    def second() -> None:
        inside.wait(10)
        go_on.set()
        with budget.reserve(1):
            order.append("second")

    threads = [threading.Thread(target=job) for job in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert order == ["first", "second"]


REFUSED = [
    (lambda: Scope(front_n=0), "--front-n must be > 0 when scope=front_n."),
    (lambda: Scope(stage="all"), "--stage is 'all'"),
    (lambda: MeasureOptions(adaptive_block_seq=0), "--adaptive-block-seq must be > 0."),
    (lambda: MeasureOptions(online_chunk_seq=-1), "--online-chunk-seq must be >= 0."),
    (lambda: MeasureOptions(online_framing_bytes=-1), "--online-framing-bytes must be >= 0."),
    (lambda: MeasureOptions(zstd_level=23), "--zstd-level must be <= 22."),
    (lambda: MeasureOptions(codec_mode="new"), "--codec-mode is 'new'"),
    (
        lambda: MeasureOptions(predictors=LanePredictors(v_lo=("delta",))),
        "--v-lo-predictors: invalid predictor `delta`",
    ),
    (lambda: MeasureOptions(predictors=LanePredictors(k_hi=())), "--k-hi-predictors: predictor list is empty"),
    (lambda: MeasureOptions(scope=Scope(scope="layer_ids")), "--layer-ids must be non-empty when scope=layer_ids."),
    # of two faults, the one that the reference's tool names
    (
        lambda: MeasureOptions(
            adaptive_block_seq=0, predictors=LanePredictors(k_hi=()), scope=Scope(scope="layer_ids")
        ),
        "--adaptive-block-seq must be > 0.",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_measure_options_invalid_are_refused(make, message):
    with pytest.raises(OptionError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_measure_dumps_values_beyond_int64_are_exact(dumps):
    options = MeasureOptions(
        scope=Scope(scope="layer_range", layer_start=-(10**30), max_seq_len=10**30),
        entry_mode="chunked",
        online_chunk_seq=10**30,
        adaptive_block_seq=10**30,
        online_framing_bytes=10**30,
        zstd_level=-(10**30),
    )
    found = build_reference_document(measure_dumps(["x"], select_dumps([dumps], options.scope), options))
    assert found["k_chunk_meta_bytes"] == 5 * 10**30
    assert sys.getsizeof(found["k_compressed_bytes"]) > 32


ROUNDED = Scope(to_fp16=True)


def measure_fp32(folder: Path, options: MeasureOptions, heads_first: bool, **how: object) -> MeasureResult:
    """Measure the fp32 words of a folder as they are."""
    selection = DumpSelection()
    if heads_first:
        add_source(selection, open_source(folder / "kv.npz"), options.scope, "kv")
    else:
        selection = select_dumps([folder], options.scope)
    assert selection.num_rounded == 0 and selection.num_fp32 == len(selection.entries)
    return measure_dumps(["x"], selection, options, **how)


@pytest.mark.parametrize("heads_first", [False, True])
def test_measure_fp32_stored_is_frames_of_fp32_words(tmp_path, heads_first):
    import kvmnn

    k, v = (words(seed, 90, dtype="<f4") for seed in (1, 2))
    if heads_first:
        np.savez(tmp_path / "kv.npz", k=k.transpose(1, 0, 2), v=v.transpose(1, 0, 2))
    else:
        write_dump(tmp_path, 0, 0, k, v)
    seen: list[int] = []
    found = measure_fp32(tmp_path, MeasureOptions(), heads_first, real=True, threads=2, progress=seen.append)
    assert found.label == "LOSSLESS"
    assert found.totals.stored_sizes["key"].bytes == len(kvmnn.encode(k))
    assert found.totals.stored_bytes() == len(kvmnn.encode(k)) + len(kvmnn.encode(v))
    assert sum(seen) == 2 * (k.nbytes + v.nbytes) == 2 * found.totals.raw_bytes()
    assert sum(seen) == count_work_bytes(found.selection, found.options, True)
    document = build_reference_document(found)
    assert (document["raw_bytes"], document["converted_fp32_entries"]) == (k.nbytes + v.nbytes, 0)
    blocks = sum(document["k_hi_mode_counts"].values())
    assert blocks == sum(document["k_lo_mode_counts"].values()) == 2 * -(-90 // 64)


@pytest.mark.parametrize("mode", ["aggregate", "chunked_grouped"])
def test_measure_fp32_and_fp16_never_share_a_stream(tmp_path, mode):
    halves = [words(seed, 30) for seed in (1, 2)]
    wides = [words(seed, 30, dtype="<f4") for seed in (3, 4)]
    write_dump(tmp_path, 0, 0, *halves)
    write_dump(tmp_path, 0, 30, *wides)
    options = MeasureOptions(entry_mode=mode)
    found = measure_dumps(["x"], select_dumps([tmp_path], options.scope), options, real=True)
    assert (found.num_groups, found.totals.raw_bytes()) == (2, sum(array.nbytes for array in (*halves, *wides)))
    assert found.totals.lanes["k_hi"].raw_bytes == halves[0].size
    assert [found.totals.fp32_lanes["key", lane].raw_bytes for lane in range(4)] == [wides[0].size] * 4
    rounded = MeasureOptions(entry_mode=mode, scope=ROUNDED)
    assert measure_dumps(["x"], select_dumps([tmp_path], ROUNDED), rounded).num_groups == 1


@pytest.mark.parametrize("mode", ["adaptive_v22", "legacy"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_measure_fp32_four_lanes_equal_the_model(tmp_path, mode, heads_first):
    k, v = (words(seed, 90, dtype="<f4") for seed in (1, 2))
    if heads_first:
        np.savez(tmp_path / "kv.npz", k=k.transpose(1, 0, 2), v=v.transpose(1, 0, 2))
        selection = DumpSelection()
        add_source(selection, open_source(tmp_path / "kv.npz"), ROUNDED, "kv")
    else:
        write_dump(tmp_path, 0, 0, k, v)
        selection = select_dumps([tmp_path], ROUNDED)
    options = MeasureOptions(fp32=True, codec_mode=mode, entry_mode="chunked", online_framing_bytes=5, scope=ROUNDED)
    found = measure_dumps(["x"], selection, options, threads=2)
    assert found.totals.fp32 is not None and found.totals.fp32 == found.totals_by_layer[0].fp32
    for part, array in (("key", k), ("value", v)):
        lanes = np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, 4)
        expected = 0
        for number in range(4):
            half = "hi" if number >= 2 else "lo"
            names = list(options.predictors.get_lane(f"{part[0]}_{half}"))
            names = names if mode == "adaptive_v22" else [{"hi": "delta_seq", "lo": "raw"}[half]]
            block = 64 if mode == "adaptive_v22" else 90
            lane = np.ascontiguousarray(lanes[..., number])
            size, modes = offline_model.stream_size(lane, names, block, 3, False, mode == "adaptive_v22")
            made = found.totals.fp32.lanes[part, number]
            assert (made.raw_bytes, made.simulated_bytes, dict(made.modes)) == (lane.size, size, modes)
            expected += size
        assert found.totals.fp32.sum_lanes([part]).simulated_bytes == expected + 5
    assert found.totals.fp32.sum_lanes().raw_bytes == k.nbytes + v.nbytes
    plain = measure_dumps(["x"], selection, replace(options, fp32=False))
    beside, found.totals.fp32 = found.totals.fp32, None
    assert found.totals == plain.totals
    exact = measure_fp32(tmp_path, replace(options, scope=Scope()), heads_first)
    assert exact.totals.fp32 == beside
    assert exact.totals.raw_bytes() == k.nbytes + v.nbytes
    assert exact.totals.simulated_bytes() == beside.sum_lanes().simulated_bytes
    assert exact.totals.limit_bytes() == beside.sum_lanes().limit_bytes


def test_measure_dumps_frames_are_split_at_max_frame_bytes(dumps, monkeypatch):
    """A frame has as many whole tokens as fit: three here."""
    mine = [k for layer, _, k, _, _, _ in DUMPS if layer == 0]
    heads, dims = mine[0].shape[1:]
    monkeypatch.setattr("kvmnn.analysis.stream_sizes.MAX_FRAME_BYTES", 3 * 2 * heads * dims + 1)
    options = MeasureOptions(scope=Scope(front_n=1))
    found = measure_dumps(["x"], select_dumps([dumps], options.scope), options, real=True)
    assert found.totals.stored_sizes["key"].frames == sum(-(-len(array) // 3) for array in mine)
