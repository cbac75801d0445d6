"""Notes next to the tables of an evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lm_results import document, row

from kvmnn.evaluation.notes import build_notes
from kvmnn.evaluation.presets import expand_preset
from kvmnn.evaluation.runner import _drop_duplicates
from kvmnn.evaluation.settings import EvaluationSettings
from kvmnn.lm.documents import Document
from kvmnn.lm.kv_store import describe_encoding
from kvmnn.policies.specs import build_policy, expand_spec
from kvmnn.reports.records import (
    DivergenceStats,
    FullCacheDifference,
    ResultRow,
    RuntimeLayerStats,
    RuntimeStats,
    TargetDivergence,
    merge_runtime_stats,
)
from kvmnn.runtime import RuntimeConfig


def of(spec: str, kind: str = "LOSSY", **more: Any) -> ResultRow:
    """The row of a policy as an evaluation makes it, with all its options."""
    ((name, options),) = expand_spec(spec)
    found = build_policy(name, options).to_options()
    sizes = {"budget": found.get("budget"), "keep_ratio": found.get("keep_ratio")}
    return row(spec, name, options=found, kind=kind, **sizes, **more)


def said(rows: list[ResultRow], tokens: int = 400, documents: int = 1, **settings: Any) -> list[str]:
    texts = [text(tokens, str(number)) for number in range(documents)]
    return list(build_notes(rows, texts, EvaluationSettings(tokens=tokens, **settings)))


def text(tokens: int, name: str) -> Document:
    return Document(name, np.arange(tokens + 1) % 9, tokens, "0" * 64)


def test_notes_unequal_default_budgets_are_listed() -> None:
    rows = [row("full", "full"), of("streaming"), of("recent_only"), of("h2o_engine"), of("h2o_blocks")]
    (note,) = (line for line in said(rows) if "unequal budgets" in line)
    assert note.startswith(
        "Policies ran with unequal budgets: streaming 512; recent_only 1,024; h2o_engine none; h2o_blocks 33.33 %. "
        "Compare rows of one budget only. Of h2o_engine: it has none: target_lossy_ratio, or target_keep_ratio"
    )


def test_notes_codecs_of_the_prompt_tell_how_many_tokens_they_code() -> None:
    rows = [
        row("full", "full"),
        of("full", codec="transform:profile=p.kvmp,kl=0.002,when=prompt"),
        of("full", codec="q8_0"),
    ]
    rows[1:] = [replace(entry, label=str(entry.codec)) for entry in rows[1:]]
    (note,) = (line for line in said(rows, chunk=16) if line.startswith("Only the first step is coded"))
    assert "coded, 16 of up to 400 tokens: transform:profile=p.kvmp,kl=0.002,when=prompt. Later tokens" in note
    assert not any("first step is coded" in line for line in said([rows[0], rows[2]], chunk=16))
    rows[2] = replace(rows[2], codec="q8_0:when=prompt", label="q8_0:when=prompt")
    assert any("q8_0:when=prompt. Later tokens" in line for line in said([rows[0], rows[2]], chunk=16))
    assert not any("first step is coded" in line for line in said(rows, prompt=400))


def test_notes_window_of_the_whole_budget_has_a_note() -> None:
    rows = [of("snapkv:budget=64"), of("snapkv:budget=65"), of("snapkv:budget=64,window=8"), of("pyramidkv:budget=32")]
    (note,) = (line for line in said(rows) if line.startswith("The window is the whole budget"))
    assert note.startswith("The window is the whole budget: snapkv:budget=64; pyramidkv:budget=32.")
    assert not any("whole budget" in line for line in said(rows[1:3]))


def test_notes_cuts_before_attention_that_leave_no_neighbour_have_a_note() -> None:
    specs = ["recent=16,buffer=8", "recent=32,buffer=8", "recent=16,buffer=16", "recent=16"]
    rows = [of(f"h2o_tokens:budget=64,{spec}") for spec in specs]
    (note,) = (line for line in said(rows, chunk=16) if line.startswith("Cut before a chunk is attended"))
    assert f"as recent is no more: {rows[0].label}. " in note and "buffer=16 or a larger recent" in note
    assert not any("before a chunk is attended" in line for line in said(rows, chunk=8))


def test_notes_equal_budgets_need_no_note() -> None:
    rows = [of("streaming:budget=64"), of("streaming:budget=32"), of("recent_only:budget=32"), of("knorm:budget=64")]
    assert any("unequal budgets: streaming 64 and 32; recent_only 32; knorm 64." in line for line in said(rows))
    rows[3] = of("recent_only:budget=64")
    assert not any("unequal budgets" in line for line in said(rows))
    assert not any("unequal budgets" in line for line in said([of("streaming:budget=64"), of("streaming")]))


@pytest.mark.parametrize(
    ("spec", "settings", "why"),
    [
        ("recent_only:budget=400", {}, "a text of 400 tokens fits its budget"),
        ("knorm:budget=300", {"chunk": 8}, "it cuts the first step only, which has 8 tokens: expected a longer prompt"),
        ("knorm:keep_ratio=1", {"prompt": 50}, "a text of 400 tokens fits its budget"),
        ("l2_ratio:keep_ratio=0.5", {}, "it cuts above prune_after 1,000, the text has 400 tokens: lower it"),
        (
            "l2_ratio:keep_ratio=0.5,prune_after=400",
            {},
            "it cuts above prune_after 400, the text has 400 tokens: lower it",
        ),
        ("h2o_engine", {}, "it plans from trigger_min_tokens 512 on, there are 400: lower it"),
        (
            "h2o_engine:trigger_min_tokens=64",
            {},
            "sink and recent reach the target, 336 of 400 tokens where 134 are to stay: lower recent_tokens (256)",
        ),
        (
            "h2o_engine:trigger_min_tokens=64,recent_tokens=8,sink_tokens=200,block_tokens=8",
            {},
            "sink and recent reach the target, 208 of 400 tokens where 134 are to stay: lower sink_tokens (200)",
        ),
        ("h2o_engine:trigger_min_tokens=64,target_lossy_ratio=1", {}, "its target is all of them"),
        (
            "h2o_blocks:trigger_min_tokens=64,budget=64",
            {},
            "sink and recent reach the target, 336 of 400 tokens where 64 are to stay: lower recent (256)",
        ),
        (
            "expected_attention:budget=64,phase=both",
            {"chunk": 16},
            "later steps are cut once in interval=64, and 24 steps followed the first: lower interval, or feed fewer "
            "tokens at a time",
        ),
        ("h2o_tokens:budget=390", {}, "no step gave it reason to"),  # up to `buffer` more are held
    ],
)
def test_notes_explain_why_nothing_was_evicted(spec: str, settings: dict[str, Any], why: str) -> None:
    rows = [of(spec, "LOSSLESS")]
    assert f"{spec}: nothing was evicted: {why}." in said(rows, **settings)
    assert not any("nothing was evicted" in line for line in said([of(spec)], **settings))


@pytest.mark.parametrize(
    ("settings", "late"),
    [
        ({"chunk": 128}, "streaming:budget=32; l2_fixed:budget=100"),
        ({"chunk": 8, "prompt": 128}, "streaming:budget=32; l2_fixed:budget=100"),
        ({"chunk": 500}, "streaming:budget=32; l2_fixed:budget=100"),
        ({"chunk": 64}, "l2_fixed:budget=100"),
        ({"chunk": 8, "prompt": 96}, None),
        ({"chunk": 1}, None),
    ],
)
def test_notes_name_rows_scored_before_eviction(settings: dict[str, Any], late: str | None) -> None:
    rows = [row("full", "full", kind="LOSSLESS"), of("streaming:budget=32"), of("l2_fixed:budget=100")]
    found = [line for line in said(rows, 128, **settings) if line.startswith("No scored token")]
    assert len(found) == (late is not None)
    if late is not None:
        assert f"No scored token saw the cut cache: {late}: a cache is cut after a step" in found[0]
        assert "a smaller --chunk" in found[0]


def test_notes_long_enough_text_needs_no_note() -> None:
    texts = [text(100, "short"), text(200, "long")]
    for chunk, late in ((100, False), (200, True)):
        found = list(build_notes([of("streaming:budget=32")], texts, EvaluationSettings(tokens=200, chunk=chunk)))
        assert any("No scored token" in line for line in found) == late


@pytest.mark.parametrize("documents", [1, 2, 9, 10])
def test_notes_few_documents_are_reported(documents: int) -> None:
    versus = FullCacheDifference(
        documents=documents, level=0.95, nll=0.1, low=None if documents == 1 else 0.0, high=0.2
    )
    few = [line for line in said([of("streaming", versus_full=versus)], documents=documents) if "interval" in line]
    if documents == 1:
        assert few == ["One document: there is no interval for the differences to the full cache."]
    elif documents < 10:
        assert len(few) == 1 and few[0].startswith(
            f"The intervals are over {documents} documents: with fewer than 10 they"
        )
        assert ("one is their range and holds the true difference half of the time" in few[0]) == (documents == 2)
    else:
        assert few == []
    assert not any("interval" in line for line in said([row("full", "full")], documents=documents))


def test_notes_presets_list_their_options() -> None:
    for name, expected in {
        "knorm-fixed": "l2_fixed with skip_layers=0+1, budget=256/512/1024, recent_ratio=0.2, strategy=keep_low/"
        "keep_high/random; recent_only with skip_layers=0+1, budget=256/512/1024.",
        "knorm-ratio": "l2_ratio with skip_layers=0+1, keep_ratio=1/0.8/0.5/0.3, prune_after=1000, form=seed.",
        "streaming-h2o": "streaming with skip_layers=none, budget=264/520, sink=8, buffer=64; h2o_tokens with "
        "skip_layers=none, budget=256/512, sink=4/8, recent=32/64, buffer=64.",
    }.items():
        rows = [
            row(
                entry.label,
                entry.policy,
                options=entry.list_options(),
                preset=name,
                budget=entry.options.get("budget"),
            )
            for entry in expand_preset(name)
        ]
        assert f"Preset {name}, options of its project where you said none: {expected}" in said(rows)
    assert not any(line.startswith("Preset") for line in said([of("streaming")]))


def test_notes_idle_runtime_names_option_to_change() -> None:
    def runtime(tokens: int, raw: int = 0) -> RuntimeStats:
        layers = tuple(RuntimeLayerStats(layer=n, tokens=tokens, raw_bytes=raw if n < 2 else 0) for n in range(6))
        sizes = {"appended_bytes": 9, "live_bytes": 9, "held_bytes": 9}
        return RuntimeStats(mode="store", h2o_lossless_raw_bytes=2 * raw, layers=layers, **sizes)

    def of_runs(key: str, *runs: tuple[str, RuntimeStats]) -> list[str]:
        config = RuntimeConfig.from_engine({"kv_lossless_runtime_mode": "store", **json.loads(key)})
        return describe_encoding(runs, config)

    (line,) = of_runs("{}", ("full", runtime(200)), ("streaming 64", runtime(64)))
    assert line == (
        "full, streaming 64: nothing was encoded: layers held 64 to 200 tokens at the end, a first block needs 512: "
        "the larger of h2o_trigger_min_tokens (512) and hot_sink_tokens + hot_recent_tokens + block_tokens "
        "(16 + 256 + 128). Lower these, or read more tokens."
    )
    (line,) = of_runs('{"kv_lossless_front_n": 0}', ("full", runtime(900)))
    assert line == "full: nothing was encoded: scope front_n with front_n 0 names no layer."
    (line,) = of_runs("{}", ("full", runtime(900)))
    assert "h2o_update_interval" in line
    (line,) = of_runs("{}", ("full", runtime(900, raw=5)))
    assert line == "Encoded: layers 0 to 1 of 6 (scope front_n, front_n 2); the others stay raw."


def test_notes_full_queue_is_not_out_of_scope() -> None:
    encoded = [RuntimeLayerStats(layer=n, tokens=900, raw_bytes=5) for n in range(4)]
    refused = [RuntimeLayerStats(layer=n, tokens=900, num_backpressure_skips=1) for n in range(4, 6)]
    config = RuntimeConfig(mode="store", front_n=6, max_queue=2)

    def lines(*layers: RuntimeLayerStats) -> list[str]:
        sizes = {"appended_bytes": 9, "live_bytes": 9, "held_bytes": 9}
        figures = RuntimeStats(mode="store", h2o_lossless_raw_bytes=20, layers=layers, **sizes)
        return describe_encoding([("full", figures)], config)

    (line,) = lines(*encoded, *refused)
    assert line == (
        "The queue was full (max_queue 2) before it came to layers 4 to 5, still raw at the end; "
        "more steps encode them."
    )
    _, outside = lines(*encoded, refused[0], RuntimeLayerStats(layer=5, tokens=900))
    assert outside.endswith("the others stay raw.")


def test_notes_idle_runtime_is_explained_per_text() -> None:
    def runtime(tokens: int, raw: int = 0) -> RuntimeStats:
        layers = (RuntimeLayerStats(layer=0, tokens=tokens, raw_bytes=raw),)
        sizes = {"appended_bytes": 9, "live_bytes": 9, "held_bytes": 9}
        return RuntimeStats(mode="store", h2o_lossless_raw_bytes=raw, layers=layers, **sizes)

    def lines(*runs: RuntimeStats) -> list[str]:
        empty = document().rows[0].documents[0]
        full = row(
            "full", "full", runtime=merge_runtime_stats(runs), documents=[replace(empty, runtime=one) for one in runs]
        )
        found = said([full], documents=len(runs), lossless={"kv_lossless_runtime_mode": "store"})
        return [line for line in found if "encoded" in line]

    (line,) = lines(runtime(300), runtime(300))
    assert line.startswith("full: nothing was encoded: layers held 300 tokens at the end, a first block needs 512: ")
    (line,) = lines(runtime(300), runtime(900, raw=5))
    assert line.startswith("full (1 of 2 texts): nothing was encoded: layers held 300 tokens at the end, ")
    short, interval = lines(runtime(300), runtime(200), runtime(900))
    assert short.startswith("full (2 of 3 texts): nothing was encoded: layers held 200 to 300 tokens at the end, ")
    assert interval.startswith("full (1 of 3 texts): nothing was encoded: no block came in the 16 steps between two ")


def test_notes_many_short_texts_are_one_sentence() -> None:
    texts = [text(tokens, f"t:{tokens}") for tokens in (20, 21, 22, 23, 400)]
    asked = EvaluationSettings(tokens=400)
    (line,) = build_notes([row("full", "full")], texts, asked)
    assert line == (
        "4 of 5 texts have fewer than the 400 tokens asked for, 20 (t:20) to 23: all of them was scored; "
        "shares of budgets are of 400."
    )
    assert len(list(build_notes([row("full", "full")], texts[1:], asked))) == 3


def test_notes_duplicate_texts_are_named() -> None:
    said_of: list[str] = []
    assert [found.name for found in _drop_duplicates([text(4, name) for name in "abcdefg"], said_of)] == ["a"]
    assert said_of == [
        "6 texts have the same tokens as others before, counted once: b those of a, c those of a, d those of a, "
        "e those of a, f those of a and 1 more. An interval is over different texts."
    ]


def test_notes_equal_reasons_are_merged() -> None:
    specs = [f"{policy}:budget={size}" for policy in ("streaming", "recent_only") for size in range(500, 506)]
    rows = [row("full", "full", kind="LOSSLESS"), *(of(spec, "LOSSLESS", evicted=False) for spec in specs)]
    found = said(rows)
    notes_of_none = [line for line in found if "nothing was evicted" in line]
    assert notes_of_none == [f"{'; '.join(specs)}: nothing was evicted: a text of 400 tokens fits its budget."]
    assert sum(line.startswith("Rows marked * evicted nothing") for line in found) == 1
    assert not any("Rows marked" in line for line in said([of("streaming", evicted=True)]))


def test_notes_measured_evictions_override_inference() -> None:
    late = [of("streaming:budget=32", evicted=False), of("recent_only:budget=32", evicted=True)]
    (note,) = (line for line in said(late, 128, chunk=1) if line.startswith("No scored token"))
    assert note.startswith("No scored token saw the cut cache: streaming:budget=32: ")


def test_notes_layers_hold_more_only_where_some_are_never_cut() -> None:
    unequal = {"unequal_layers": True, "tokens_kept": (32, 96)}
    rows = [of("pyramidkv:budget=64", **unequal), of("l2_fixed:budget=64,skip_layers=0+1", **unequal)]
    notes = [line for line in said(rows) if "layers" in line.lower()]
    assert notes == [
        "Layers hold unequal numbers of tokens (the least and the most): pyramidkv:budget=64 (32 to 96); "
        "l2_fixed:budget=64,skip_layers=0+1 (32 to 96).",
        "Some layers are never cut: l2_fixed:budget=64,skip_layers=0+1. They hold more than rows of the same budget "
        "that cut every layer.",
    ]


def test_notes_cut_after_the_last_token_is_no_missing_eviction() -> None:
    """With a codec or an initial cache rows are LOSSY whatever the policy did."""
    codec = {"codec": "q4_0", "evicted": False}
    (late,) = (line for line in said([of("knorm:budget=32", **codec)], 128, prompt=128) if "evicted" in line[:200])
    assert late.startswith("Rows marked *")
    lines = said([of("knorm:budget=32", **codec), of("knorm:budget=200", **codec)], 128, prompt=128)
    assert [line for line in lines if "nothing was evicted" in line] == [
        "knorm:budget=200: nothing was evicted: a text of 128 tokens fits its budget."
    ]
    assert [line.partition(": a cache")[0] for line in lines if line.startswith("No scored")] == [
        "No scored token saw the cut cache: knorm:budget=32"
    ]
    start = {"initial_cache": "a", "evicted": False, "tokens_kept": (90, 90)}
    lines = said([row("full", "full", kind="LOSSY", **start), of("streaming:budget=900", **start)])
    assert any("streaming:budget=900: nothing was evicted" in line for line in lines)
    assert not any(line.startswith("No scored") for line in lines)


def test_notes_target_divergence_is_compared_with_measured() -> None:
    sizes = [(0.0032, 0.003, 0.0034), (0.0032, 0.0015, 0.005), (0.0021, 0.00205, 0.0022), (0.0032, None, None)]
    rows = [
        row(
            f"transform {number}",
            "full",
            target_divergence=TargetDivergence(target=0.002, measured=kl, low=low, high=high),
        )
        for number, (kl, low, high) in enumerate(sizes)
    ]
    notes = [line for line in said(rows) if "was asked for" in line]
    assert notes[1] == (
        "transform 1: KL of 0.002 nats was asked for, 0.0032 measured (95 % 0.0015 to 0.005), 1.6 times as much."
    )
    assert notes[0].startswith(
        "transform 0: KL of 0.002 nats was asked for, 0.0032 measured (95 % 0.003 to 0.0034), 1.6"
    )
    assert "(no interval, one text)" in notes[3]
    assert ["a smaller kl costs bytes" in note for note in notes] == [True, False, False, True]
    assert ResultRow.from_dict(rows[0].to_dict()).target_divergence == rows[0].target_divergence


def test_notes_codecs_with_policies_have_two_divergences() -> None:
    stats = {kl: DivergenceStats(tokens=9, kl=kl, kl_p99=1.0, agreement=1.0) for kl in (0.004, 0.0061)}
    codec = "transform:profile=p.kvmp,kl=0.001"
    plain = of("streaming:budget=64", cut_divergence=stats[0.004])
    coded = replace(plain, codec=codec, label="both", cut_divergence=stats[0.0061])
    sized = replace(coded, codec="transform:profile=p.kvmp,ratio=4", label="sized")
    (note,) = (line for line in said([plain, coded, sized]) if "nats was asked for" in line)
    assert note == (
        "KL of 0.001 nats was asked for of the codec; behind policies what they cost is in it: both 0.0061 (0.004 "
        "without)."
    )
    whole = {kl: DivergenceStats(tokens=900, kl=kl, kl_p99=1.0, agreement=1.0) for kl in (0.001, 0.006)}
    unequal = replace(coded, cut_divergence=replace(stats[0.0061], tokens=800), divergence=whole[0.006])
    (note,) = (
        line for line in said([replace(plain, divergence=whole[0.001]), unequal]) if "nats was asked for" in line
    )
    assert note.endswith("over all scored tokens, as those after the cuts differ: both 0.006 (0.001 without).")
    (note,) = (line for line in said([coded]) if "nats was asked for" in line)
    assert "what they cost is in it (--quant none adds rows without it): both 0.0061." in note


def test_notes_missed_sizes_and_larger_rows_are_named() -> None:
    codecs = ["ratio=8", "ratio=7", "bits=2"]
    rows = [
        row(label, "full", codec=f"transform:profile=p.kvmp,{label}", quantized_bits=2.2, bytes_per_token=100.0)
        for label in codecs
    ]
    notes = said(rows)
    (note,) = (line for line in notes if "was asked for" in line)
    assert note.startswith("ratio=8: ratio 8 was asked for, 7.27 reached; bits=2: bits 2 was asked for, 2.2 reached. ")
    assert not any("without the policy" in line for line in notes)
    larger = replace(of("streaming:budget=64"), label="cut", codec=rows[0].codec, bytes_per_token=120.0)
    (note,) = (line for line in said([*rows, larger]) if "without the policy" in line)
    assert note.startswith("More bytes than their codec takes without the policy: cut (120 for 100 bytes/token). ")
    assert not any("without the policy" in line for line in said([*rows, replace(larger, bytes_per_token=99.0)]))


def test_notes_prompt_budgets_differ_from_others() -> None:
    rows = [of("knorm:budget=32", prompt_only=True), of("streaming:budget=32")]
    (note,) = (line for line in said(rows) if line.startswith("Cut once"))
    assert note.startswith("Cut once, at the end of the prompt: knorm:budget=32. Their budget is of the prompt;")
    assert not any(line.startswith("Cut once") for line in said(rows[1:]))
