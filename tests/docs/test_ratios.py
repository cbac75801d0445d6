"""The figures of docs/ratios.md are those of benchmarks/ratios.md, whose head is that of its script."""

from __future__ import annotations

import re

from docs.ratios import HEAD
from repository import DOCS, ROOT

PAGE = (DOCS / "ratios.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "benchmarks" / "ratios.md").read_text(encoding="utf-8")


def read_rows(title: str) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the rows of a table of the benchmark by array, dtype and layer, each by column."""
    head, _, *lines = MEASURED.split(f"### {title}\n\n")[1].split("\n\n")[0].splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    rows = {}
    for line in lines:
        row = dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        rows[tuple(row[key] for key in ("array", "arrays", "dtype", "layer") if key in row)] = row
    return rows


def test_benchmark_begins_with_head_of_script() -> None:
    assert MEASURED.startswith(HEAD)


def test_effort_table_equals_measured_ratios() -> None:
    rows = read_rows("Whole arrays")
    table = dict(re.findall(r"^\| (exact|fast|max) \|[^|]*\| (.*) \|$", PAGE, re.MULTILINE))
    assert set(table) == {"exact", "fast", "max"}
    for effort, cells in table.items():
        for dtype, cell in zip(("fp16", "bf16", "fp32"), cells.split(" | "), strict=True):
            assert cell == ", ".join(rows[f"kv_real_{part}", dtype][effort] for part in "kv")


def test_repeat_figures_equal_measured_ratios() -> None:
    rows, pairs = read_rows("Layer by layer"), read_rows("K and V together")
    section = PAGE.split("## When V gains more")[1].split("**Predictors.**")[0]
    column = "head, token, dim"
    for part, layer in (("v", 1), ("v", 2), ("v", 3), ("k", 0)):
        assert rows[f"kv_real_{part}", "fp16", str(layer)][column] in section
    assert rows["kv_real_v", "fp16", "0"]["distinct rows"] in section
    both = pairs["kv_real_k + kv_real_v", "fp16"]
    assert all(both[key] in section for key in ("layers 0 and 1", "deeper layers", "all"))


def test_block_figures_equal_measured_ratios() -> None:
    rows = read_rows("Tokens in a block")
    text = PAGE.split("**Blocks.**")[1].split("\n\n")[0]
    for part, tokens in (("k", ("16", "64", "all")), ("v", ("16", "64", "128", "all"))):
        assert all(rows[f"kv_real_{part}", "fp16"][key] in text for key in tokens)
