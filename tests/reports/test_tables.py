"""Results of an evaluation as Markdown, CSV and a table for terminals."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace

import pytest
from lm_results import BUDGETS, document, results, row

from kvmnn.policies.h2o.planner import H2OStats, PlannerLayerStats
from kvmnn.reports import tables
from kvmnn.reports.records import ProjectStats, Refusal, RuntimeStats, merge_runtime_stats
from kvmnn.reports.tables import build_h2o_table, build_pivot_table, build_project_table, build_runtime_table


def cells(table: str) -> list[dict[str, str]]:
    """The first Markdown table of a text, a dict for each row."""
    lines = [line for line in table.split("\n\n")[0].splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(split[0], line, strict=True)) for line in split[2:]]


def test_markdown_rows_use_the_units_of_the_headings() -> None:
    sample = document()
    table = cells(tables.format_markdown(sample))
    assert [line["policy"] for line in table] == [entry.label for entry in sample.rows]
    full, cut = table[0], table[1]
    assert full["budget (tokens)"] == full["dNLL (nats) [95 %]"] == full["PPL change (%)"] == "-"
    assert (full["kind"], cut["kind"]) == ("LOSSLESS", "LOSSY")
    assert cut["PPL"] == "11.0757"
    assert cut["PPL change (%)"] == f"{100 * (math.exp(12 / 128) - 1):+.2f}" == "+9.83"
    assert cut["accuracy (%)"] == "49.61"
    assert cut["accuracy change (%)"] == f"{100 * (0.49605 / 0.5148 - 1):+.2f}"
    assert cut["dNLL (nats) [95 %]"] == "+0.0938 [+0.0750, +0.1172]"
    assert cut["deep dNLL (nats) [95 %]"] == "+0.1875 [+0.1594, +0.2063]"
    assert cut["TTFT (ms)"] == "310.00" and cut["TPOT (ms)"] == "1.210"
    assert cut["tokens/s"] == "826"
    assert cut["policy/model time (%)"] == "5.0"
    assert cut["tokens kept"] == "128"
    assert cut["cache peak (MiB)"] == "1.500"
    assert (cut["LOSSY ratio"], cut["LOSSLESS ratio"], cut["product"]) == ("16.000", "1.3219", "21.150")


def test_markdown_row_of_a_codec_has_no_memory_of_its_dequantized_numbers() -> None:
    sample = document()
    coded = replace(sample.rows[1], label="q4_0", codec="q4_0")
    full, line = cells(tables.format_markdown(replace(sample, rows=(sample.rows[0], coded))))
    assert "-" not in (full["cache mean (MiB)"], full["cache peak (MiB)"])
    assert line["cache mean (MiB)"] == line["cache peak (MiB)"] == "-" and line["LOSSY ratio"] == "16.000"


def test_markdown_omits_columns_without_values() -> None:
    text = tables.format_markdown(document())
    assert "process peak" not in text  # the document has none
    table = cells(
        tables.format_markdown(results([row("full", "full", perplexity=2.0), row("streaming 4", "streaming")]))
    )
    assert table == [
        {"policy": "full", "kind": "LOSSY", "PPL": "2.0000"},
        {"policy": "streaming 4", "kind": "LOSSY", "PPL": "-"},
    ]


def test_markdown_shows_unequal_layers_and_percentages() -> None:
    entry = row("l2_ratio 0.25", "l2_ratio", keep_ratio=0.25, tokens_kept=(2048, 2048, 512))
    (line,) = cells(tables.format_markdown(results([entry])))
    assert line["budget (tokens)"] == "25 %"
    assert line["tokens kept"] == "512 to 2,048"


def test_markdown_label_cannot_break_the_table() -> None:
    text = tables.format_markdown(results([row("a|b\nc", "streaming", perplexity=1.5)]))
    assert "| a\\|b c | LOSSY | 1.5000 |" in text


def test_foreign_labels_are_escaped_in_markdown_and_csv() -> None:
    found = results([row("<img src=x>@team|=1", "streaming"), row("=cmd()", "streaming", perplexity=-0.5)])
    text = tables.format_markdown(found)
    assert r"| \<img src=x>@&#8203;team\|=1 |" in text
    assert "<img" not in text.replace(r"\<img", "")
    lines = list(csv.reader(io.StringIO(tables.format_csv(found))))
    labels = {line[0] for line in lines[1:]}
    assert "'=cmd()" in labels and "=cmd()" not in labels
    assert all(not cell.startswith(("=", "@", "+")) for line in lines for cell in line)


def test_presets_have_a_separate_table() -> None:
    sample = document()
    whole = ProjectStats(evaluation="E2", label="baseline", perplexity=10.0, accuracy=0.5, chunk=1024)
    numbers = sample.rows[-1].project_stats
    assert numbers is not None
    cut = replace(sample.rows[-1], project_stats=replace(numbers, accuracy=0.4))
    no = row(
        "x", "h2o_tokens", preset="streaming-h2o", project_stats=ProjectStats(evaluation="E2", label="x", refused="a|b")
    )
    rows = (*sample.rows[:-1], cut, row("baseline", "full", preset="streaming-h2o", project_stats=whole), no)
    parts = tables.format_markdown(replace(sample, rows=rows)).split("\n\n")
    assert parts[1] == "By the definitions of StreamingLLM + H2O (docs/lm.md says where they differ):"
    second = parts[2].splitlines()
    assert second[0] == (
        "| policy | preset | PPL | PPL change (%) | accuracy (%) | accuracy change (%) | TPOT (ms) | chunk (tokens) "
        "| generated (tokens) | evaluation | refused |"
    )
    assert second[2] == (
        "| h2o_8_32_256 | streaming-h2o | 12.5000 | +25.00 | 40.00 | -20.00 | 1.200 | 256 | 64 | E2 | - |"
    )
    assert second[3] == "| baseline | streaming-h2o | 10.0000 | - | 50.00 | - | - | 1,024 | - | E2 | - |"
    assert second[4] == "| x | streaming-h2o | - | - | - | - | - | - | - | E2 | a\\|b |"
    assert "by the definition" not in tables.format_markdown(results([row("full", "full")])).lower()


def test_notes_describe_the_measurement() -> None:
    sample = document()
    full, cut, *rest = sample.rows
    rows = (full, replace(cut, rounded_first=True), *rest)
    refused = (Refusal(label="h2o 8", reason="no attention"),)
    lines = tables.build_notes(replace(sample, rows=rows, notes=("b.txt is\nshort.",), refused=refused))
    assert lines[0] == (
        "2 documents, 4,096 tokens, 4,094 scored by each row, fed 4 tokens at a time, deep: the 2,048 of them "
        "from token 1,024 on, seed 0, 1 thread."
    )
    assert lines[1] == "Model: tiny, K and V in float32, kvmnn 0.1.0."
    assert any("paired bootstrap" in line for line in lines)
    assert "The frames hold fp16: the cache was rounded before, which is LOSSY." in lines
    assert any(line.startswith("Bytes/token: bytes kept, K and V as fp16, over tokens") for line in lines)
    assert lines[-2:] == ["b.txt is short.", "Not run: h2o 8: no attention"]


def test_notes_omit_what_was_not_measured() -> None:
    text = "\n".join(tables.build_notes(results([row("full", "full")])))
    assert "LOSS" not in text and "bootstrap" not in text and "Change" not in text
    assert tables.format_markdown(results([])).startswith("| policy |\n| --- |\n")


@pytest.mark.parametrize("width", [20, 60, 100, 150, 400])
def test_terminal_table_fits_and_names_omitted_columns(width: int) -> None:
    sample = document()
    text = tables.format_terminal(sample, width)
    lines = text.split("\n\n")[0].splitlines()
    headings = lines[0].split("  ")
    assert headings[0] == "policy" and "PPL" in lines[0]
    if width >= 60:
        assert max(map(len, lines)) <= width
    assert (f"Not shown in {width} columns (a wider terminal, -v, --csv, --json): " in " ".join(text.split())) == (
        width < 400
    )
    if width >= 100:
        assert "LOSSY" in lines[3]
    assert "By the definitions of StreamingLLM + H2O" in text and "h2o_8_32_256  streaming-h2o  12.5000" in text
    assert len(lines) == 2 + len(sample.rows)


def test_csv_has_every_scalar_once_and_reads_back() -> None:
    sample = document()
    lines = list(csv.DictReader(io.StringIO(tables.format_csv(sample))))
    rows = [line for line in lines if not line["document"]]
    assert [line["label"] for line in rows] == [entry.label for entry in sample.rows]
    for line, entry in zip(rows, sample.rows, strict=True):
        assert float(line["perplexity"]) == entry.perplexity  # exactly: repr round-trips
        assert line["budget"] == ("" if entry.budget is None else str(entry.budget))
        assert line["tokens_kept.5"] == str(entry.tokens_kept[5])
        assert line["deep.tokens"] == "2048"
        assert line["versus_full.low"] == ("" if entry.versus_full is None else repr(entry.versus_full.low))
        assert line["process_peak_bytes"] == ""
    assert "versus_full" not in lines[0] and "as_seed" not in lines[0]
    of_documents = [line for line in lines if line["label"] == "streaming 128" and line["document"]]
    assert [line["document"] for line in of_documents] == ["a.txt", "b.txt"]
    assert float(of_documents[0]["nll"]) == sample.rows[1].documents[0].nll
    assert len(lines) == 3 * len(sample.rows)


def test_csv_quotes_special_characters() -> None:
    text = tables.format_csv(results([row('a,"b"\nc', "x", rounded_first=True, nll=0.1)]))
    (line,) = csv.DictReader(io.StringIO(text))
    assert (line["label"], line["rounded_first"], line["nll"]) == ('a,"b"\nc', "true", "0.1")


def test_sample_budgets_are_as_expected() -> None:
    assert {entry.budget for entry in document().rows} == {None, *BUDGETS}


def test_terminal_80_columns_shorten_labels_first() -> None:
    sample = document()
    long = [
        replace(entry, label=f"{entry.label} strategy=keep_high recent_ratio=0.5 skip_layers={number}")
        for number, entry in enumerate(sample.rows)
    ]
    for rows in (sample.rows, tuple(long)):
        text = tables.format_terminal(replace(sample, rows=rows), 80)
        table = text.split("\n\n")[0].splitlines()
        assert "dNLL (nats) [95 %]" in table[0] and "PPL" in table[0]
        assert table[0].endswith("LOSSY ratio") and table[3].endswith(" 16.000")  # what is held, before the times
        assert "+0.0938 [+0.0750, +0.1172]" in table[3]
        assert max(map(len, text.splitlines())) <= 80
        labels = [line.split("  ")[0] for line in table[2:]]
        assert len(set(labels)) == len(labels) == len(rows)
    assert "streaming 128 keep_high rec" in table[3]
    assert " is streaming 128 strategy=keep_high" in " ".join(text.split())


def test_terminal_80_columns_show_unequal_layers() -> None:
    rows = [*document().rows, row("l2_ratio 0.25", "l2_ratio", tokens_kept=(2048, 512), unequal_layers=True)]
    table = tables.format_terminal(results(rows), 80).split("\n\n")[0].splitlines()
    assert table[-1].endswith("512 to 2,048") or " 512 to 2,048 " in table[-1]
    assert "dNLL (nats) [95 %]" in table[0] and max(map(len, table)) <= 80


def test_pivot_by_protected_fraction_names_the_best() -> None:
    rows = [row("full", "full", perplexity=9.0)]
    for share, low, drawn in ((0.3, 49.87, 50.94), (0.4, 49.59, 50.76), (0.5, 52.24, 51.90)):
        for strategy, value in (("keep_low", low), ("random", drawn)):
            options = {"recent_ratio": share, "strategy": strategy}
            rows.append(row(f"{strategy} {share}", "l2_fixed", options=options, budget=512, perplexity=value))
    rows.append(row("window", "recent_only", budget=512, perplexity=53.0))
    _, columns, lines = build_pivot_table(rows) or ("", [], [])
    assert [column.heading for column in columns] == [
        "budget", "recent", "l2_fixed keep_low", "l2_fixed random", "recent_only", "best",
    ]  # fmt: skip
    assert lines == [
        ["512", "0.3", "49.87", "50.94", "53.00", "l2_fixed keep_low"],
        ["512", "0.4", "49.59", "50.76", "53.00", "l2_fixed keep_low"],
        ["512", "0.5", "52.24", "51.90", "53.00", "l2_fixed random"],
    ]
    assert "| 512 | 0.5 | 52.24 | 51.90 | 53.00 | l2_fixed random |" in tables.format_markdown(results(rows))
    assert build_pivot_table(rows[:2]) is None
    alone = [row(f"{b}", "streaming" if b > 9 else "knorm", budget=b, perplexity=b) for b in (8, 16, 32)]
    assert build_pivot_table(alone) is None  # nothing to compare with at any size


def test_pivot_by_budget_names_the_best() -> None:
    rows = [row(f"{p} {b}", p, budget=b, perplexity=10.0 + b / c) for p, c in (("a", 8), ("b", 9)) for b in (64, 128)]
    rows.append(row("c 64", "c", budget=64, perplexity=11.0))
    _, _, lines = build_pivot_table(rows) or ("", [], [])
    assert lines == [["64", "18.00", "17.11", "11.00", "c"], ["128", "26.00", "24.22", "-", "b"]]
    text = tables.format_terminal(results(rows), 80)
    assert max(map(len, text.splitlines())) <= 80 and "best" in text


def test_pivot_of_unequal_bytes_names_each_that_none_of_at_most_its_bytes_beats() -> None:
    rows = []
    for size in (64, 128):
        for policy, perplexity, nbytes in (("a", 20.0, 10.0), ("b", 19.0, 20.0), ("c", 19.5, 30.0), ("d", 19.0, 25.0)):
            rows.append(
                row(f"{policy} {size}", policy, budget=size, perplexity=perplexity, bytes_per_token=nbytes * size)
            )
    title, _, lines = build_pivot_table(rows) or ("", [], [])
    assert [line[-1] for line in lines] == ["a (640 B); b (1,280 B)", "a (1,280 B); b (2,560 B)"]
    assert "each is named that no row of at most its bytes beats" in title
    near = [replace(entry, bytes_per_token=100.0 + (entry.policy == "b")) for entry in rows]  # within 1 %: equal
    title, _, lines = build_pivot_table(near) or ("", [], [])
    assert [line[-1] for line in lines] == ["-", "-"] and "at most its bytes" not in title  # b and d are a tie
    cheap = [replace(entry, bytes_per_token=10.0 if entry.policy == "b" else 100.0) for entry in rows]
    assert [line[-1] for line in (build_pivot_table(cheap) or ("", [], []))[2]] == ["b", "b"]


def test_project_table_aligns_numbers_and_shows_mib() -> None:
    numbers = ProjectStats(evaluation="E2", label="a", perplexity=2.0, process_peak_bytes=3 << 20)
    _, columns, lines = build_project_table([row("a", "streaming", preset="streaming-h2o", project_stats=numbers)]) or (
        "",
        [],
        [],
    )
    by_heading = dict(zip([column.heading for column in columns], lines[0], strict=True))
    assert (by_heading["PPL"], by_heading["process peak (MiB)"]) == ("2.0000", "3")
    assert [column.heading for column in columns if column.is_left_aligned] == ["policy", "preset"]


def test_h2o_table_names_policies_if_several() -> None:
    figures = H2OStats(layers=(PlannerLayerStats(layer=7, tokens_seen=8, tokens_kept=4, triggers=1),))
    for runs, heading, cell in (([("a", figures)], "layer", "7"), ([("a", figures), ("b", figures)], "policy", "a")):
        _, columns, lines = build_h2o_table(runs) or ("", [], [])
        assert (columns[0].heading, lines[0][0], len(lines)) == (heading, cell, len(runs))


def test_runtime_table_title_names_sums_over_texts() -> None:
    figures = RuntimeStats(mode="store", appended_bytes=8, live_bytes=4, held_bytes=2)
    sample = document()
    for texts, said in ((1, "of the same runs"), (2, "sums over 2 texts")):
        found = replace(sample, rows=(replace(sample.rows[0], runtime=figures),), documents=sample.documents[:texts])
        title = f"The runtime around the cache, {said} (docs/runtime.md):"
        assert title in tables.format_markdown(found) and title in tables.format_terminal(found, 100)
    assert len(title) <= 80


def test_runtime_table_ratios_are_never_dropped() -> None:
    figures = RuntimeStats(mode="store", appended_bytes=8, live_bytes=4, held_bytes=2)
    _, columns, _ = build_runtime_table([("full", figures)]) or ("", [], [])
    assert [column.heading for column in columns if column.drop_rank == 0] == [
        "policy", "mode", "lossy", "lossless", "total",
    ]  # fmt: skip


def test_runtime_table_of_a_lossy_codec_has_no_lossless_ratio() -> None:
    sizes = {"h2o_lossless_raw_bytes": 4, "h2o_lossless_compressed_bytes": 1}
    figures = RuntimeStats(mode="store", appended_bytes=8, live_bytes=4, held_bytes=2, is_lossy=True, **sizes)
    both = merge_runtime_stats([figures, replace(figures, is_lossy=False)])
    assert both is not None and both.is_lossy and both.eviction_ratio == 2
    _, _, lines = build_runtime_table([("full", figures)]) or ("", [], [])
    assert lines[0][2:5] == ["4.000", "-", "4.000"]
    document = figures.to_dict()
    assert (document["lossy_ratio"], document["lossless_ratio"], document["total_ratio"]) == (4.0, None, 4.0)
    assert (document["h2o_lossless_ratio"], lines[0][5]) == (None, "4.000")


def test_runtime_table_of_a_lossy_codec_that_encoded_nothing_has_no_lossless_ratio() -> None:
    figures = RuntimeStats(mode="store", appended_bytes=8, live_bytes=4, held_bytes=5, is_lossy=True)
    _, _, lines = build_runtime_table([("full", figures)]) or ("", [], [])
    assert lines[0][2:6] == ["2.000", "-", "1.600", "-"]


def test_pivot_tie_has_no_best() -> None:
    sizes = {64: (11.0, 11.0, 12.0), 128: (11.001, 11.002, 12.0), 256: (11.0, 12.0, 12.0)}
    rows = [
        row(f"{policy} {budget}", policy, budget=budget, perplexity=value)
        for budget, values in sizes.items()
        for policy, value in zip("abc", values, strict=True)
    ]
    _, _, lines = build_pivot_table(rows) or ("", [], [])
    assert [line[-1] for line in lines] == ["-", "-", "a"]
    assert "- for a tie" in tables.format_markdown(results(rows))
