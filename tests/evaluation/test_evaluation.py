"""Evaluations: equal tokens for all configurations, resumed runs, nothing measured twice.

Of the shipped model where its numbers matter, of a generated decoder of two layers where they do not.
"""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from repository import FIXTURES

from kvmnn.errors import KvmnnError, MissingDependencyError, OptionError, SourceError
from kvmnn.evaluation import EvaluationResult, RefusalWarning, evaluate, workers
from kvmnn.evaluation.presets import expand_preset
from kvmnn.evaluation.runner import CellStore, hash_model
from kvmnn.evaluation.settings import Configuration, EvaluationSettings, expand_configurations
from kvmnn.lm.documents import read_documents
from kvmnn.lm.tokenizer import Tokenizer
from kvmnn.policies import POLICIES

FIXTURE = FIXTURES / "lm"
MODEL = FIXTURE / "model.onnx"
NAMES = ("calendar.py.txt", "asyncio__tasks.py.txt")
QUICK = {"timing": False, "project_definitions": False}
TIMES = {
    "seconds",
    "model_seconds",
    "policy_seconds",
    "tokens_per_second",
    "ttft_seconds",
    "tpot_seconds",
    "attention_seconds",
}
OWN_PROCESS = {"process_peak_bytes", "process_opened_bytes"}


@pytest.fixture(scope="module")
def documents():
    tokenizer = Tokenizer.open_for_model(MODEL)
    found = {}

    def of(tokens, count=2):
        if (tokens, count) not in found:
            paths = [FIXTURE / "texts" / name for name in NAMES[:count]]
            found[tokens, count] = read_documents(paths, tokenizer, tokens)
        return found[tokens, count]

    return of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A generated decoder of two layers, with 128 positions of two texts of its own."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("tokenizers")
    import gate_models

    folder = gate_models.write_model(tmp_path_factory.mktemp("tiny"))
    tokenizer = Tokenizer.open_for_model(folder / "model")
    words = {name: (folder / "texts" / f"{name}.txt").read_text() for name in "abcd"}

    def of(tokens, count=2):
        paths = [folder / "a.txt", folder / "b.txt"][:count]
        for path, names in zip(paths, ("ab", "cd"), strict=False):
            path.write_text(" ".join(words[name] for name in names))
        return read_documents(paths, tokenizer, tokens)

    of.model = folder / "model"
    return of


def run(documents, wanted, jobs=0, store=None, progress=None, model=MODEL, **settings):
    return evaluate(
        model, documents, wanted, settings=EvaluationSettings(**settings), jobs=jobs, store=store, progress=progress
    )


def numbers(results):
    """Rows without what differs from run to run."""

    def strip(value):
        if isinstance(value, dict):
            return {key: strip(entry) for key, entry in value.items() if key not in TIMES | OWN_PROCESS}
        return [strip(entry) for entry in value] if isinstance(value, list) else value

    return strip(results.to_dict()["rows"])


class Counter:
    """Progress that stops everything after a number of cells."""

    def __init__(self, stop=None):
        self.stop = stop
        self.cells = self.tokens = 0
        self.planned = None

    def start(self, tokens, cells, reused):
        self.planned, self.reused = (tokens, cells), reused

    def advance(self, tokens, cells):
        self.cells += cells
        self.tokens += tokens
        if self.stop is not None and self.cells >= self.stop:
            raise KeyboardInterrupt


# -- what holds for every policy --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 5])
def test_evaluate_budget_beyond_text_equals_full_cache(tiny, chunk):
    specs = [f"{name}:recent=50%" if name == "h2o_heads" else name for name in sorted(POLICIES)]
    wanted = expand_configurations([*specs, "l2_fixed:strategy=random"], [64])
    results = run(tiny(32), wanted, model=tiny.model, tokens=32, chunk=chunk, **QUICK)
    full, *others = numbers(results)
    assert results.refused == ()
    assert {row["policy"] for row in others} == set(POLICIES)
    quality = ("tokens", "nll", "perplexity", "accuracy", "bits_per_byte", "deep", "full_bytes", "frame_bytes")
    for row in others:
        assert row["kind"] == "not cut"
        assert {key: row[key] for key in quality} == {key: full[key] for key in quality}, row["label"]
        assert row["tokens_kept"] == [32] * 2
        assert (row["versus_full"]["nll"], row["versus_full"]["low"], row["versus_full"]["high"]) == (0, 0, 0)
        assert [d["nll"] for d in row["documents"]] == [d["nll"] for d in full["documents"]]
    assert any("nothing was evicted: a text of 32 tokens fits its budget." in note for note in results.notes)


@pytest.mark.slow
def test_evaluate_policies_keep_exactly_their_budget(tiny):
    specs = ["recent_only", "streaming", "h2o_decayed", "h2o_decayed_heads", "h2o_tokens:recent=8"]
    wanted = expand_configurations(specs, [32])
    for chunk in (1, 4):
        rows = run(tiny(128, 1), wanted, model=tiny.model, tokens=128, chunk=chunk, **QUICK).rows
        assert rows[0].tokens_kept == (128,) * 2
        for row in rows[1:-1]:
            assert row.tokens_kept == (32,) * 2, row.label
            assert row.kind == "LOSSY"
            assert row.lossy_ratio == 4
            assert row.ratio == pytest.approx(row.lossy_ratio * row.lossless_ratio)
            assert row.full_bytes == 2 * 2 * 2 * 128 * 8 * 2  # layers, K and V, heads, tokens, words, bytes
        lazy = rows[-1].tokens_kept
        assert lazy == (32,) * 2 if chunk > 1 else 32 < lazy[0] <= 32 + 64


@pytest.mark.slow
def test_evaluate_skip_layers_are_never_cut(documents):
    results = run(documents(64), expand_configurations(["streaming"], [16], (0, 5)), tokens=64, chunk=4, **QUICK)
    full, cut = results.rows
    assert cut.tokens_kept == (64, 16, 16, 16, 16, 64)
    assert (full.unequal_layers, cut.unequal_layers) == (False, True)
    assert any(note.startswith("Layers hold unequal numbers of tokens") and cut.label in note for note in results.notes)
    assert "(the least and the most): streaming 16 skip_layers=0+5 (16 to 64)." in " ".join(str(results).split())
    header, whole, *_ = csv.reader(io.StringIO(results.to_text("csv")))
    assert whole[header.index("unequal_layers")] == "false"


@pytest.mark.slow
def test_evaluate_packed_cache_equals_plain(tiny):
    wanted = expand_configurations(["l2_fixed:recent_ratio=0.5", "streaming"], [24])
    settings = {"model": tiny.model, "tokens": 80, "chunk": 2}
    plain = numbers(run(tiny(80, 1), wanted, **settings, **QUICK))
    packed = numbers(run(tiny(80, 1), wanted, packed="x86-avx2", **settings, **QUICK))
    assert [row["nll"] for row in plain] == [row["nll"] for row in packed]
    assert [row["frame_bytes"] for row in plain] == [row["frame_bytes"] for row in packed]


@pytest.mark.slow
def test_evaluate_stored_positions_raise_perplexity(documents):
    wanted = [
        Configuration("true", "streaming", {"budget": 64}),
        Configuration("stored", "streaming", {"budget": 64}, positions="stored"),
    ]
    full, true, stored = run(documents(512, 1), wanted, tokens=512, chunk=8, **QUICK).rows
    assert full.deep.nll < true.deep.nll
    assert stored.deep.perplexity > 3 * true.deep.perplexity


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_evaluate_row_sums_its_documents(documents):
    texts = documents(90)
    row = run(texts, expand_configurations(["streaming"], [30]), tokens=90, deep_from=70, chunk=5, **QUICK).rows[1]
    nll = sum(document.nll * document.tokens for document in row.documents)
    assert row.tokens == 180
    assert row.nll == pytest.approx(nll / 180)
    assert row.perplexity == pytest.approx(math.exp(row.nll))
    assert row.bits_per_byte == pytest.approx(nll / math.log(2) / sum(text.nbytes for text in texts))
    assert row.deep.tokens == 40
    assert row.seconds > row.model_seconds > 0
    assert row.policy_seconds > 0
    assert row.cache_bytes_peak >= row.cache_bytes_mean > 0
    assert row.versus_full.low <= row.versus_full.nll <= row.versus_full.high


@pytest.mark.slow
def test_evaluate_duplicate_text_counts_once(documents, tmp_path):
    again = tmp_path / "again.txt"
    again.write_bytes((FIXTURE / "texts" / NAMES[0]).read_bytes() + b"# and more after what is scored\n")
    paths = [FIXTURE / "texts" / NAMES[0], again, FIXTURE / "texts" / NAMES[1], again]
    settings = EvaluationSettings(tokens=30, chunk=5, **QUICK)
    found = evaluate(FIXTURE, paths, "streaming", 16, settings=settings, jobs=0)
    assert [text.name for text in found.documents] == list(NAMES)
    alone = run(documents(30), expand_configurations(["streaming"], [16]), tokens=30, chunk=5, **QUICK)
    assert numbers(found) == numbers(alone)
    (note,) = (note for note in found.notes if "counted once" in note)
    assert note == (
        "2 texts have the same tokens as others before, counted once: again.txt those of calendar.py.txt, again.txt~2 "
        "those of calendar.py.txt. An interval is over different texts."
    )


def test_evaluate_one_document_has_no_interval(documents):
    results = run(documents(40, 1), expand_configurations(["recent_only"], [16]), tokens=40, **QUICK)
    versus = results.rows[1].versus_full
    assert versus.nll is not None
    assert (versus.low, versus.high, versus.note) == (None, None, "one document: no interval")
    assert "One document: there is no interval for the differences to the full cache." in results.notes


def test_evaluate_short_text_is_noted(tmp_path):
    (tmp_path / "short.txt").write_text("import os\n" * 5)
    texts = read_documents([tmp_path / "short.txt"], Tokenizer.open_for_model(MODEL), 500)
    results = run(texts, expand_configurations(["streaming"], [400]), tokens=500, **QUICK)
    assert results.rows[1].deep.to_dict() == {
        "from": 250,
        "tokens": 0,
        "nll": None,
        "perplexity": None,
        "accuracy": None,
    }
    assert results.rows[1].versus_full.deep_nll is None
    count = texts[0].num_scored
    note = f"short.txt has only {count} tokens to score, 500 were asked for: all of it was scored; shares of budgets"
    assert f"{note} are of 500." in results.notes
    assert any(f"a text of {count} tokens fits its budget" in note for note in results.notes)


def test_evaluate_text_of_one_token_is_noted(tmp_path):
    (tmp_path / "short.txt").write_text("a")
    notes = run([tmp_path / "short.txt"], [], tokens=30, **QUICK).notes
    assert "1 token is scored in each text, and none before it has a cache: expected longer texts." in notes
    assert any(note.startswith("short.txt has only 1 token to score") for note in notes)


def test_evaluate_frame_dtype_fp32_is_lossless(documents):
    full = run(documents(40, 1), [], tokens=40, frame_dtype="fp32", **QUICK).rows[0]
    assert (full.lossless_dtype, full.rounded_first, full.kind) == ("fp32", False, "LOSSLESS")
    assert full.full_bytes == full.kept_bytes == full.cache_bytes_peak
    assert full.lossless_ratio > 1


@pytest.mark.slow
def test_evaluate_traces_follow_first_document(documents):
    wanted = expand_configurations(["streaming:skip_layers=0"], [16])
    results = run(documents(300), wanted, tokens=300, chunk=4, traces=True, **QUICK)
    full, cut = results.traces
    assert (full.label, full.document) == ("full", "calendar.py.txt")
    assert full.step_tokens[-1] == cut.step_tokens[-1] == 300
    assert len(cut.step_tokens) <= 256
    assert full.keep_map.kept[-1] == tuple(range(300))
    assert cut.keep_map.layer == 1
    assert cut.keep_map.kept[-1] == (0, 1, 2, 3, *range(288, 300))
    assert [layer.layer for layer in cut.kept] == [*range(len(cut.kept))] and len(cut.kept) > 1
    assert cut.kept[0].positions == (tuple(range(300)),)
    assert all(layer.positions == (cut.keep_map.kept[-1],) for layer in cut.kept[1:])
    assert max(cut.cache_bytes) <= max(full.cache_bytes)
    assert run(documents(300), [], tokens=300, chunk=50, **QUICK).traces == ()


@pytest.mark.slow
def test_evaluate_generation_times_are_positive(tiny):
    wanted = expand_configurations(["streaming"], [24])
    for row in run(tiny(70, 1), wanted, model=tiny.model, tokens=70, repeats=2, chunk=10, timing=True).rows:
        assert row.ttft_seconds > 0
        assert row.tpot_seconds > 0
        assert row.attention_seconds > 0
    short = run(read_like(tiny(70, 1)), wanted, model=tiny.model, tokens=1, repeats=1, timing=True).rows[0]
    assert short.tpot_seconds is None
    assert short.attention_seconds is None


def read_like(texts):
    from dataclasses import replace

    return [replace(texts[0], ids=texts[0].ids[:2])]


@pytest.mark.slow
def test_evaluate_prompt_policies_treat_first_chunk_as_prompt(tiny):
    wanted = expand_configurations(["knorm", "streaming_press"], [16])
    results = run(tiny(40, 1), wanted, model=tiny.model, tokens=40, **QUICK)
    assert [row.kind for row in results.rows] == ["LOSSLESS", "not cut", "not cut"]
    why = "it cuts the first step only, which has 1 token: expected a longer prompt"
    assert f"knorm 16; streaming_press 16: nothing was evicted: {why}." in results.notes
    results = run(tiny(40, 1), wanted, model=tiny.model, tokens=40, chunk=20, **QUICK)
    assert [row.tokens_kept for row in results.rows] == [(40,) * 2, (36,) * 2, (36,) * 2]


# -- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluate_preset_has_project_definition(documents):
    texts = documents(60)
    wanted = expand_preset("knorm-fixed:fix_kv_sizes=32,strategies=keep_low")
    results = run(texts, wanted, tokens=60, timing=False)
    full, baseline, low, window = results.rows
    assert [row.label for row in results.rows] == [
        "full",
        "baseline",
        "fix 32 keep_low 0.2 skip_layers=0+1",
        "recent_only 32 skip_layers=0+1",
    ]
    assert full.project_stats is None
    assert (baseline.nll, baseline.preset) == (full.nll, "knorm-fixed")
    for row in (baseline, low, window):
        seen = row.project_stats
        assert (seen.evaluation, seen.scored_tokens, seen.text_tokens) == ("E1", 118, 120)
        assert seen.ttft_seconds > 0
        assert seen.tokens_per_second > 0
    assert baseline.project_stats.final_cache_tokens == 59
    assert low.project_stats.final_cache_tokens == window.project_stats.final_cache_tokens == 32
    assert low.tokens_kept == (60, 60, 32, 32, 32, 32)
    # Without bos and the first token it is another quantity, but not far off.
    assert baseline.project_stats.nll == pytest.approx(baseline.nll, rel=0.2)
    assert baseline.project_stats.nll != baseline.nll


@pytest.mark.slow
def test_evaluate_streaming_h2o_preset_has_lazy_cache_sizes(documents):
    wanted = [entry for entry in expand_preset("streaming-h2o") if entry.label in ("baseline", "h2o_4_32_256")]
    results = run(documents(400, 1), wanted, tokens=400, chunk=8, repeats=1, timing=True)
    _, baseline, h2o = results.rows
    assert h2o.tokens_kept == (256,) * 6
    assert (h2o.project_stats.chunk, h2o.project_stats.final_cache_tokens) == (256, 256)
    assert (h2o.project_stats.scored_tokens, h2o.project_stats.chunks_left_out) == (398, 0)
    assert (baseline.project_stats.chunk, baseline.project_stats.scored_tokens) == (1024, 399)
    for row in (baseline, h2o):
        assert row.project_stats.tpot_seconds * row.project_stats.tokens_per_second == pytest.approx(1)
        assert row.project_stats.repeats == 1
        assert row.project_stats.attention_seconds == pytest.approx(row.attention_seconds / 6)  # of one layer


# -- cells ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluate_interrupted_run_resumes(tiny, tmp_path):
    texts, wanted = tiny(40), expand_configurations(["streaming", "l2_fixed:strategy=random"], [16])
    settings = {"model": tiny.model, "tokens": 40, **QUICK}
    whole = numbers(run(texts, wanted, **settings))
    path = tmp_path / "cells.jsonl"
    with CellStore(path) as store, pytest.raises(KeyboardInterrupt):
        run(texts, wanted, store=store, progress=Counter(stop=3), **settings)
    with CellStore(path) as store:
        assert len(store) == 3
        progress = Counter()
        assert numbers(run(texts, wanted, store=store, progress=progress, **settings)) == whole
        tokens = (3 + 2) * 40  # the full cache is scored again for its distributions on two texts
        assert (progress.planned, progress.reused) == ((tokens, 3), 3)
        assert (progress.tokens, progress.cells) == (tokens, 3)
    with CellStore(path) as store:
        progress = Counter()
        first = run(texts, wanted, store=store, progress=progress, **settings)
        assert progress.planned == (0, 0)
        assert first == run(texts, wanted, store=store, **settings)  # times and all
        progress = Counter()
        run(texts, wanted, store=store, progress=progress, seed=9, **settings)
        assert progress.cells == 6


def test_evaluate_malformed_stored_cell_is_refused(documents, tmp_path):
    path, texts = tmp_path / "cells.jsonl", documents(30, 1)
    run(texts, [], store=path, tokens=30, **QUICK)
    record = json.loads(path.read_text())["record"]
    for cell, message in (({}, r"\.model: is missing"), (record["value"] | {"seconds": "x"}, r"\.seconds: found 'x'")):
        with CellStore(path) as store:
            store.put(record["key"], cell)
        with pytest.raises(SourceError, match=rf"cells\.jsonl: cell{message}"):
            run(texts, [], store=path, tokens=30, **QUICK)


@pytest.mark.slow
def test_evaluate_equal_configurations_are_measured_once(tiny):
    wanted = [Configuration("a", "streaming", {"budget": 9}), Configuration("b", "streaming", {"budget": 9})]
    progress = Counter()
    rows = run(tiny(30, 1), [*wanted, wanted[0]], progress=progress, model=tiny.model, tokens=30, **QUICK).rows
    assert [row.label for row in rows] == ["full", "a", "b"]
    assert progress.cells == 2
    notes = run(tiny(30, 1), [*wanted, wanted[0]], model=tiny.model, tokens=30, **QUICK).notes
    assert any(note.endswith("of the tokens can be, and measured once: a.") for note in notes)
    other = Configuration("a", "streaming", {"budget": 10})
    rows = run(tiny(30, 1), [wanted[0], other], model=tiny.model, tokens=30, **QUICK).rows
    assert [row.label for row in rows] == ["full", "a", "a (2)"]


@pytest.mark.slow
def test_evaluate_worker_processes_equal_one_process(tiny):
    texts, wanted = tiny(60), expand_configurations(["h2o_decayed"], [16])
    settings = {"model": tiny.model, "tokens": 60}
    here = run(texts, wanted, **settings, **QUICK)
    progress = Counter()
    there = run(texts, wanted, jobs=4, progress=progress, **settings, **QUICK)  # a document in each
    assert numbers(there) == numbers(here)
    assert (progress.tokens, progress.cells) == (4 * 60, 4)
    for row in there.rows:
        assert 10_000_000 < row.process_opened_bytes <= row.process_peak_bytes < 2_000_000_000
    assert here.rows[0].process_peak_bytes is None
    lazy = run(texts[:1], expand_preset("streaming-h2o")[:1], jobs=1, **settings, timing=False).rows[1]
    assert lazy.project_stats.process_peak_bytes == lazy.process_peak_bytes > 10_000_000
    assert EvaluationResult.from_dict(json.loads(there.to_text("json"))) == there


@pytest.mark.slow
def test_evaluate_memory_does_not_grow_with_text(documents):
    wanted = expand_configurations(["streaming"], [64])
    peaks = []
    for tokens in (192, 768):
        cut = run(documents(tokens, 1), wanted, jobs=2, tokens=tokens, chunk=32, **QUICK).rows[1]
        peaks.append(cut.process_peak_bytes - cut.process_opened_bytes)
    assert peaks[1] < peaks[0] + 4_000_000


def test_evaluate_worker_error_is_reraised(documents, tmp_path):
    bad = tmp_path / "model.onnx"
    bad.write_bytes(MODEL.read_bytes()[:1000])
    with pytest.raises(KvmnnError) as caught:
        evaluate(bad, documents(30, 1), [], settings=EvaluationSettings(tokens=30, **QUICK), jobs=1)
    assert str(bad) in str(caught.value)
    assert type(workers._create_error("MissingDependencyError", "x")) is MissingDependencyError
    assert type(workers._create_error("WeightsError", "x")) is KvmnnError
    assert type(workers._create_error("TypeError", "x")) is TypeError
    assert type(workers._create_error("MemoryError", "x")) is MemoryError


def test_evaluate_worker_exit_is_reported(documents, monkeypatch):
    monkeypatch.setattr(workers.sys, "executable", "/bin/false")
    with pytest.raises(KvmnnError, match="full: the process that measured it ended with code 1"):
        run(documents(30, 1), [], jobs=1, tokens=30, **QUICK)


def test_evaluate_refused_configuration_does_not_stop_others(documents):
    # Without a bias nothing can mask the tokens that go before they are attended.
    wanted = expand_configurations(["h2o_tokens:recent=4,buffer=0", "streaming"], [16])
    with pytest.warns(RefusalWarning, match="^h2o_tokens 16 .* was not run: .* feed fewer tokens at once"):
        results = run(documents(64, 1), wanted, tokens=64, chunk=32, slack=0, **QUICK)
    assert [row.label for row in results.rows] == ["full", "streaming 16"]
    (refused,) = results.refused
    assert refused.label.startswith("h2o_tokens 16")
    assert "feed fewer tokens at once" in refused.reason and refused.label not in refused.reason


@pytest.mark.slow
def test_evaluate_files_equal_documents(documents):
    paths = [FIXTURE / "texts" / name for name in NAMES]
    settings = EvaluationSettings(tokens=30, chunk=5, **QUICK)
    found = evaluate(FIXTURE, paths, expand_configurations(["streaming"], [16]), settings=settings, jobs=0)
    alone = run(documents(30), expand_configurations(["streaming"], [16]), tokens=30, chunk=5, **QUICK)
    assert numbers(found) == numbers(alone)
    assert evaluate(FIXTURE, paths, settings=found.settings, jobs=0).settings == found.settings
    assert "streaming 16" in str(found)
    assert found.to_text("markdown").startswith("| policy |")
    assert found.to_text("csv").startswith("label,document,scope,policy")


def test_evaluate_settings_beyond_model_are_refused_early(documents, tmp_path):
    wanted = expand_configurations(["recent_only", "streaming:skip_layers=0+9"], [16])
    with pytest.raises(OptionError, match="skip_layers names layer 9, the model has 6 layers: expected 0 to 5"):
        run(documents(30, 1), wanted, tokens=30, store=tmp_path / "cells", **QUICK)
    with pytest.raises(
        OptionError, match=r"31 tokens are to be scored, .* 30 positions: expected at most --max-tokens 30"
    ):
        (tmp_path / "model.onnx").write_bytes(MODEL.read_bytes())
        (tmp_path / "config.json").write_text('{"max_position_embeddings": 30}')
        evaluate(tmp_path, documents(31, 1), [], settings=EvaluationSettings(tokens=31, **QUICK), jobs=0)
    assert not (tmp_path / "cells").exists() or not (tmp_path / "cells").stat().st_size


def test_evaluate_without_texts_is_refused():
    with pytest.raises(KvmnnError, match="expected at least one text"):
        evaluate(MODEL, [], [])
    with pytest.raises(SourceError, match="nowhere: does not exist"):
        hash_model("nowhere")


def test_hash_model_covers_graph_and_weights(tmp_path):
    graph = tmp_path / "model[1].onnx"
    graph.write_bytes(b"graph")
    one = hash_model(graph)
    (tmp_path / "model[1].onnx_data").write_bytes(b"weights")
    two = hash_model(graph)
    (tmp_path / "model[1].onnx_data").write_bytes(b"Weights")
    assert len({one, two, hash_model(graph)}) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens is 0: expected at least 1"),
        ({"chunk": 0}, "chunk is 0"),
        ({"seed": -1}, "expected at least 0"),
        ({"frame_dtype": "fp64"}, "frame_dtype is 'fp64': expected 'fp16' or 'fp32'"),
    ],
)
def test_evaluation_settings_invalid_are_refused(settings, message):
    with pytest.raises(KvmnnError, match=message):
        EvaluationSettings(**settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "budget", "settings", "evicted"),
    [
        ("streaming", 16, {"chunk": 4}, True),
        ("streaming", 48, {"chunk": 4}, False),
        ("streaming", 16, {"chunk": 48}, False),  # cut when every token was scored
        ("streaming", 16, {"chunk": 4, "prompt": 48}, False),
        ("streaming", 16, {"chunk": 4, "prompt": 40}, True),
        ("h2o_tokens:sink=2,recent=8,buffer=0", 16, {"chunk": 48}, True),  # cut before they are attended
        ("h2o_engine:block_tokens=4,sink_tokens=4,recent_tokens=8,trigger_min_tokens=16,update_interval=1",
         None, {"chunk": 1, "prompt": 20}, True),
        ("l2_ratio", 16, {"chunk": 1}, False),  # cuts above 1,000 tokens
    ],
)  # fmt: skip
def test_evaluate_rows_report_scored_evictions(tiny, spec, budget, settings, evicted):
    wanted = expand_configurations([spec], [] if budget is None else [budget])
    result = run(tiny(48, 1), wanted, model=tiny.model, tokens=48, **settings, **QUICK)
    full, row = result.rows
    assert (full.evicted, full.has_no_eviction) == (False, False)
    assert (row.evicted, row.has_no_eviction) == (evicted, not evicted)
    assert evicted == (abs(row.nll - full.nll) > 1e-4)


@pytest.mark.parametrize(
    ("deep", "prompt", "expected"), [(-1, 0, 48), (-1, 60, 60), (10, 60, 60), (70, 60, 70), (10, 0, 10)]
)
def test_evaluation_settings_deep_from_is_at_least_prompt(documents, deep, prompt, expected):
    settings = EvaluationSettings(tokens=96, prompt=prompt, deep_from=deep, chunk=12)
    assert settings.deep_from == expected
    text = documents(96, 1)
    row = run(text, [], tokens=96, prompt=prompt, deep_from=deep, chunk=12, **QUICK).rows[0]
    assert (row.deep.begin, row.deep.tokens) == (expected, 96 - expected)
