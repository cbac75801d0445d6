"""docs/runtime.md shows the measured table of eviction and storage."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from repository import DOCS, FIXTURES, ROOT

from kvmnn.evaluation import EvaluationSettings, evaluate, expand_configurations

RESULTS: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "combined.json").read_text(encoding="utf-8"))[
    "results"
]


def measured_table() -> str:
    measured = (ROOT / "benchmarks" / "combined.md").read_text(encoding="utf-8")
    return measured.split("restores all blocks.\n\n")[1].split("\n\n")[0]


def test_combined_table_in_docs_equals_benchmark() -> None:
    table = measured_table()
    assert table.count("\n") == 5 and table in (DOCS / "runtime.md").read_text(encoding="utf-8")


def test_combined_table_follows_from_its_json() -> None:
    lines = [line.split("|")[1:-1] for line in measured_table().splitlines()[2:]]
    rows = [row for result in RESULTS for row in result["rows"]]
    for cells, row in zip(lines, rows, strict=True):
        lossy, lossless, total, perplexity = (cells[at].strip() for at in (1, 2, 3, 7))
        assert perplexity == f"{math.exp(row['nll']):.3f}" and lossy == f"{row['lossy_ratio']:.3f}"
        if "runtime" in row:
            live, held = (row["runtime"][key] for key in ("live_bytes", "held_bytes"))
            assert lossless == f"{live / held:.3f}" and total == f"{row['lossy_ratio'] * live / held:.3f}"
            for cell, layers in ((cells[4], row["runtime"]["layers"][:2]), (cells[5], row["runtime"]["layers"][2:])):
                raw, coded = (sum(layer[key] for layer in layers) for key in ("raw_bytes", "compressed_bytes"))
                assert cell.strip() == f"{raw / coded:.3f}"


@pytest.mark.slow
def test_full_cache_perplexity_equals_the_shipped_model() -> None:
    (plain, stored) = RESULTS
    assert [row["nll"] for row in plain["rows"]] == [row["nll"] for row in stored["rows"]]
    documents = plain["documents"]
    texts = [FIXTURES / "lm" / "texts" / entry["name"] for entry in documents]
    found = evaluate(
        FIXTURES / "lm",
        texts,
        expand_configurations(["full"], []),
        settings=EvaluationSettings(tokens=plain["settings"]["tokens"], chunk=512, timing=False),
    )
    assert found.rows[0].nll == pytest.approx(plain["rows"][0]["nll"], abs=1e-6)
    assert found.rows[0].lossless_ratio == pytest.approx(plain["rows"][0]["lossless_ratio"], rel=1e-3)
