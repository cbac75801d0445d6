"""The table of eviction and storage on docs/runtime.md is the one that was measured."""

from __future__ import annotations

import json

from repository import DOCS, ROOT


def test_the_table_is_the_benchmarks() -> None:
    measured = (ROOT / "benchmarks" / "combined.md").read_text(encoding="utf-8")
    table = measured.split("restores all blocks.\n\n")[1].split("\n\n")[0]
    assert table.count("\n") == 5 and table in (DOCS / "runtime.md").read_text(encoding="utf-8")
    results = json.loads((ROOT / "benchmarks" / "combined.json").read_text(encoding="utf-8"))["results"]
    plain, stored = ([(row["nll"], row["lossy_ratio"]) for row in result["rows"]] for result in results)
    assert plain == stored
