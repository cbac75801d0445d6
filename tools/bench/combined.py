"""Eviction first, then lossless storage, in one run: `python tools/bench/combined.py` writes benchmarks/combined.md.

On the shipped model and texts that it has not seen: the first two layers keep every token, the others are cut by the
engine's planner (``h2o_engine``), and the lossless runtime stores what is left of both. Ratios, perplexity and times
are of the same runs. Next to them stand the figures that the documents of the MNN fork give, and what those were.
"""

from __future__ import annotations

import argparse
from typing import Any

from common import ROOT, table, write_results

from kvmnn.evaluation import EvaluationResult, EvaluationSettings, evaluate, expand_configurations
from kvmnn.policies import H2OEngine
from kvmnn.reports.records import ResultRow, RuntimeLayerStats

MODEL = ROOT / "fixtures" / "lm"
FRONT = 2
ENGINE: dict[str, Any] = {
    "kv_h2o_enable": True,
    "kv_h2o_layer_start": FRONT,
    "kv_h2o_block_tokens": 32,
    "kv_h2o_sink_tokens": 16,
    "kv_h2o_recent_tokens": 96,
    "kv_h2o_target_lossy_ratio": 3.5,
    "kv_h2o_update_interval": 16,
    "kv_h2o_trigger_min_tokens": 384,
    "kv_lossless_enable": True,
    "kv_lossless_runtime_enable": True,
    "kv_lossless_codec": "gear_delta",
    "kv_lossless_runtime_mode": "store",
    "kv_lossless_scope": "front_n_and_h2o_kept",
    "kv_lossless_front_n": FRONT,
    "kv_lossless_block_tokens": 64,
    "kv_lossless_hot_sink_tokens": 16,
    "kv_lossless_hot_recent_tokens": 64,
}
"""The H2O keys are those of the fork's test scripts, whose figures its documents give."""
DOCUMENTS = [
    ["runtime_probe", "3.114", "1.401", "4.363"],
    ["runtime_full", "3.109", "1.401", "4.356"],
    ["runtime_store", "3.114", "1.401", "4.363"],
    ["llm_demo_full", "2.849", "1.510", "4.301"],
    ["llm_demo_store", "2.903", "1.269", "3.684"],
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two texts, fewer tokens; for trying the script out")
    parser.add_argument("--texts", type=int, default=6)
    arguments = parser.parse_args()
    tokens, prompt, count = (512, 440, 2) if arguments.quick else (1024, 640, arguments.texts)
    texts = sorted((MODEL / "texts").glob("*.txt"))[:count]
    planner = {"h2o_engine": H2OEngine.parse_engine_options(ENGINE)}
    wanted = expand_configurations(["h2o_engine"], [], None, planner)
    results = [
        evaluate(
            MODEL,
            texts,
            wanted,
            settings=EvaluationSettings(tokens=tokens, prompt=prompt, lossless=lossless, timing=True, repeats=2),
            jobs=2,
        )
        for lossless in (None, ENGINE)
    ]
    sections = [measured(results, len(texts), tokens, prompt), documents()]
    data = {"config": ENGINE, "results": [kept(result) for result in results]}
    print(write_results("combined", "Eviction first, then lossless storage", sections, data).read_text("utf-8"))


def kept(result: EvaluationResult) -> dict[str, Any]:
    """A result without what is of one text, or of the place where the model lies."""
    found = result.to_dict()
    found["model"]["path"] = "fixtures/lm"
    for row in found["rows"]:
        del row["documents"]
    return found


def measured(results: list[EvaluationResult], texts: int, tokens: int, prompt: int) -> str:
    """What was measured, a line for each of the four ways to hold the cache."""
    names = ("all tokens", f"layers from {FRONT} on: H2O")
    lines = [
        line(name if result is results[0] else f"{name}; stored", row)
        for result in results
        for name, row in zip(names, result.rows, strict=True)
    ]
    head = ["cache", "lossy", "lossless", "total", "encoded: front", "encoded: deep", "frames (fp16)", "PPL",
            "dNLL [95 %]", "ms a token"]  # fmt: skip
    about = (
        f"{texts} texts of {tokens:,} tokens, the first {prompt:,} as a prompt. *lossy*: bytes of all tokens over "
        "bytes of those kept; *lossless*: those over the bytes that hold them between two steps, hot tokens and room "
        "to grow included; *total*: their product. *encoded*: raw over compressed bytes of the blocks that were "
        f"stored, of the first {FRONT} layers and of the others, float32 as this model computes them. *frames*: kept "
        "tokens, all of them, as frames of half floats. Stored or not, the model computes the same bits; a step "
        "restores all blocks."
    )
    return "\n\n".join(["## Measured", about, table(head, lines), ""])


def line(name: str, row: ResultRow) -> list[str]:
    """The figures of one way."""
    found, change = row.runtime, row.versus_full
    interval = (
        "-" if change is None or change.low is None else f"{change.nll:+.4f} [{change.low:+.4f}, {change.high:+.4f}]"
    )
    front, deep = ("-", "-") if found is None else (encoded(found.layers[:FRONT]), encoded(found.layers[FRONT:]))
    ratios = [number(value) for value in (found.lossless_ratio, found.total_ratio)] if found else ["-", "-"]
    return [
        name, number(row.lossy_ratio), *ratios, front, deep, number(row.lossless_ratio), number(row.perplexity),
        interval,
        number(None if row.tpot_seconds is None else 1e3 * row.tpot_seconds),
    ]  # fmt: skip


def encoded(layers: tuple[RuntimeLayerStats, ...]) -> str:
    """Raw over compressed bytes of what was encoded in some layers."""
    coded = sum(layer.compressed_bytes for layer in layers)
    return number(sum(layer.raw_bytes for layer in layers) / coded if coded else None)


def documents() -> str:
    """The figures of the documents, and what they were."""
    what = (
        "Of another model, and none of them is a ratio of a run. *lossy* is the last plan of one layer, averaged over "
        "repeats (3.114 is the mean of 518/166 and 519/167 tokens; layers before `layer_start` keep everything). "
        "*lossless* 1.401 is a simulation over dumped caches with another codec, other predictors and another layout, "
        "taken into the table of the runtime; 1.510 and 1.269 are the engine's own counters, which leave out what was "
        "not encoded. *total* is the product of the two. They were measured before the planner had scores of its own "
        "for every layer."
    )
    return "\n\n".join(
        [
            "## What the documents of the MNN fork say",
            what,
            table(["case", "lossy", "lossless", "total"], DOCUMENTS),
            "",
        ]
    )


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
