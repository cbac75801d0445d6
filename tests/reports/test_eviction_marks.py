"""Rows of policies that evicted nothing are marked wherever results are shown, and are never the best."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import lm_results
import pytest
from lm_results import results, row

from kvmnn.evaluation import EvaluationResult, read_results
from kvmnn.reports import plot_style, tables
from kvmnn.reports.figures import (
    accuracy_over_budget,
    perplexity_accuracy_tradeoff,
    perplexity_over_budget,
    strategy_comparison,
)
from kvmnn.reports.page import make_report
from kvmnn.reports.records import DivergenceStats, FullCacheDifference, Refusal, ResultRow
from kvmnn.reports.series import describe_untried
from kvmnn.reports.tables import build_pivot_table

FULL = {"kind": "LOSSLESS", "evicted": False}


def scored(
    label: str, policy: str, budget: int, perplexity: float, *, evicted: bool | None = True, kind: str = ""
) -> ResultRow:
    kind = kind or ("LOSSY" if evicted else "LOSSLESS")
    more = {"perplexity": perplexity, "accuracy": 0.5, "tokens": 100, "evicted": evicted}
    return row(label, policy, kind=kind, budget=budget, options={"budget": budget}, **more)


@pytest.fixture
def rows() -> list[ResultRow]:
    """At 64 tokens l2_ratio evicted nothing, at 512 nothing did; quality of the full cache is 10."""
    return [
        row("full", "full", perplexity=10.0, accuracy=0.5, tokens=100, **FULL),
        scored("streaming 64", "streaming", 64, 12.0),
        scored("streaming 512", "streaming", 512, 10.0, evicted=False),
        scored("recent_only 64", "recent_only", 64, 11.0),
        scored("recent_only 512", "recent_only", 512, 10.0, evicted=False),
        scored("l2_ratio 64", "l2_ratio", 64, 10.0, evicted=False),
        scored("l2_ratio 512", "l2_ratio", 512, 10.0, evicted=False, kind="LOSSY"),  # cut when all was scored
    ]


def test_pivot_marks_rows_without_eviction_and_never_as_best(rows: list[ResultRow]) -> None:
    _, columns, lines = build_pivot_table(rows) or ("", [], [])
    assert [column.heading for column in columns] == ["budget", "streaming", "recent_only", "l2_ratio", "best"]
    assert lines == [
        ["64", "12.00", "11.00", "10.00 *", "recent_only"],
        ["512", "10.00 *", "10.00 *", "10.00 *", "-"],
    ]
    text = tables.format_markdown(results(rows))
    assert "Numbers marked * are of policies that evicted nothing, which are never the best." in text
    assert "- for a tie. Numbers" in text  # one text has no intervals
    kinds = {line[0]: line[1] for line in tables.build_table(results(rows)).lines}
    assert (kinds["full"], kinds["streaming 512 *"], kinds["l2_ratio 512 *"]) == ("LOSSLESS", "not cut", "LOSSY")
    assert "Numbers marked *" not in tables.format_markdown(results([*rows[:2], rows[3]]))


def test_pivot_marks_rows_whose_codec_quantised_nothing(rows: list[ResultRow]) -> None:
    """They equal rows of the policy alone, with which they would tie."""
    idle = [
        replace(rows[index], label=f"{rows[index].label} + kivi", codec="kivi", quantized_share=share, kind="LOSSY")
        for index, share in ((3, 0.0), (1, 0.2))
    ]
    lines = (build_pivot_table([*rows, *idle]) or ("", [], []))[2]
    assert lines[0] == ["64", "12.00", "11.00", "10.00 *", "11.00 *", "12.00", "recent_only"]
    text = tables.format_markdown(results([*rows, *idle]))
    assert "are of policies that evicted nothing or of codecs that quantised nothing, which are never the best" in text
    assert "| recent_only 64 + kivi * | LOSSY |" in text and "| streaming 64 + kivi | LOSSY |" in text


def test_table_marks_codecs_that_quantised_nothing_without_a_policy() -> None:
    """Their kind is that of policies that evicted nothing; what was quantised after the last token is LOSSY."""
    divergence = DivergenceStats(tokens=100, kl=0.0, kl_p99=0.0, agreement=1.0)
    full = row("full", "full", perplexity=10.0, accuracy=0.5, tokens=100, **FULL)
    coded = [
        replace(full, label=label, codec="kivi", quantized_share=share, kind=kind, divergence=divergence, **more)
        for label, share, kind, more in (
            ("idle", 0.0, "LOSSLESS", {}),
            ("late", 0.5, "LOSSY", {}),
            ("seen", 0.5, "LOSSY", {"cut_divergence": divergence}),
        )
    ]
    found = results([full, *coded])
    kinds = {line[0]: line[1] for line in tables.build_table(found).lines}
    assert kinds == {"full": "LOSSLESS", "idle *": "not cut", "late *": "LOSSY", "seen": "LOSSY"}
    lines = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [(line["kind"], line["untried"]) for line in lines] == [
        (each["kind"], str(each["untried"]).lower()) for each in found.to_dict()["rows"]
    ]
    assert [line["untried"] for line in lines] == ["false", "true", "true", "false"]
    assert describe_untried(found.rows) == (
        "quantised nothing of what was kept or quantised nothing before the last token was scored"
    )


def test_pivot_marks_older_results_by_their_kind() -> None:
    old = [row("full", "full", perplexity=10.0, kind="LOSSLESS")]
    for policy, kind in (("streaming", "LOSSY"), ("l2_ratio", "LOSSLESS")):
        old += [scored(f"{policy} {size}", policy, size, 9.0, evicted=None, kind=kind) for size in (64, 128)]
    _, _, lines = build_pivot_table(old) or ("", [], [])
    assert [line[-1] for line in lines] == ["streaming", "streaming"] and "evicted" not in old[1].to_dict()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 400])
def test_table_marks_rows_at_any_width(rows: list[ResultRow], width: int) -> None:
    rows[5] = scored("l2_ratio 64 prune_after=1000 form=original skip_layers=0+1", "l2_ratio", 64, 10.0, evicted=False)
    text = results(rows).format_table(width)
    marks = {
        line.split("  ")[0].rstrip().endswith(" *") for line in text.splitlines() if line.startswith("streaming 512")
    }
    assert marks == {True}
    assert sum(line.split("  ")[0].rstrip().endswith(" *") for line in text.split("\n\n")[0].splitlines()) == 4
    assert "| streaming 512 * |" in results(rows).format_table() and "| streaming 64 |" in results(rows).format_table()


def test_csv_and_json_have_evicted_key(rows: list[ResultRow]) -> None:
    found = results(rows)
    lines = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [line["kind"] for line in lines] == ["LOSSLESS", "LOSSY", "not cut", "LOSSY", "not cut", "not cut", "LOSSY"]
    assert [line["evicted"] for line in lines] == ["false", "true", "false", "true", "false", "false", "false"]
    documents = found.to_dict()["rows"]
    assert [each["evicted"] for each in documents] == [each.evicted for each in rows]
    assert [each["kind"] for each in documents] == [line["kind"] for line in lines]
    assert [each["untried"] for each in documents] == [each.is_untried for each in rows] and documents[-1]["untried"]
    assert [each.has_no_eviction for each in rows] == [False, False, True, False, True, True, True]


def test_describe_refusals_joins_equal_reasons() -> None:
    refused = tuple(Refusal(label=f"h2o {size}", reason="no attention") for size in (1, 2, 3))
    found = results([], refused=(*refused, Refusal(label="x", reason="other")))
    assert tables.describe_refusals(found.refused) == ["h2o 1; h2o 2; h2o 3: no attention", "x: other"]
    assert "Not run: h2o 1; h2o 2; h2o 3: no attention" in tables.format_markdown(found)


@pytest.mark.parametrize("draw", [perplexity_over_budget, accuracy_over_budget, perplexity_accuracy_tradeoff])
def test_line_plots_have_hollow_points_and_a_caption(draw: object, rows: list[ResultRow]) -> None:
    pytest.importorskip("matplotlib")
    with plot_style.use_style():
        made = draw(results(rows))  # type: ignore[operator]
    hollow = [line for axes in made.axes for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert sum(len(line.get_xdata()) for line in hollow) == 4
    assert "Hollow: evicted nothing in these texts." in next(text.get_text() for text in made.texts)
    with plot_style.use_style():
        made = draw(results([each for each in rows if not each.has_no_eviction]))  # type: ignore[operator]
    assert "Hollow" not in next(text.get_text() for text in made.texts)


def inside(axes: object, text: object) -> bool:
    """Whether a text lies in its panel, of which the next one hides the rest."""
    panel, box = axes.get_window_extent(), text.get_window_extent()  # type: ignore[attr-defined]
    return bool(panel.x0 <= box.x0 and box.x1 <= panel.x1)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [1e-4, 0.02, 3.0])
def test_strategy_comparison_bar_labels_are_inside_the_panel(sign: int, size: float) -> None:
    """Includes the label of 0, on the side of the axis without a bar."""
    pytest.importorskip("matplotlib")
    found = [row("full", "full", perplexity=10.0, accuracy=0.5, **FULL)]
    for budget in (64, 256, 512):
        for policy, share in (("streaming", 1.0), ("recent_only", 0.5), ("l2_fixed", 0.0)):
            value = 10.0 * max(1 + sign * size * share, 0.1)
            versus = FullCacheDifference(documents=2, level=0.95, nll=0.0, low=-0.01, high=0.02)
            each = scored(f"{policy} {budget}", policy, budget, value, evicted=share > 0)
            wide = {"accuracy": 0.5 - sign * share * 1e-5, "versus_full": versus if share == 1 else None}
            found.append(replace(each, **wide))
    with plot_style.use_style():
        made = strategy_comparison(results(found))
    made.canvas.draw()
    texts = [(axes, text) for axes in made.axes for text in axes.texts if text.get_text()]
    assert len(texts) == 2 * 9 and sum(text.get_text() == "+0.0*" for _, text in texts) == 6
    assert [text.get_text() for axes, text in texts if not inside(axes, text)] == []


def saved(found: EvaluationResult, path: Path) -> Path:
    path.write_text(found.to_text("json"))
    return path


def test_report_of_evaluation_compares_rows_of_unequal_bytes_fairly(rows: list[ResultRow], tmp_path: Path) -> None:
    sizes = {"streaming 64": 100.0, "recent_only 64": 150.0}
    unequal = [replace(entry, bytes_per_token=sizes.get(entry.label)) for entry in rows]
    text = make_report([saved(results(unequal), tmp_path / "e.json")]).to_markdown().replace("\\", "")
    assert [line for line in text.splitlines() if line.startswith("- 64 tokens kept")] == [  # a bullet for each row
        "- 64 tokens kept: 2 of 2 rows are beaten by no row of at most the same bytes.",
        "- 64 tokens kept, 100 bytes a token: streaming 64, perplexity +20.00%.",
        "- 64 tokens kept, 150 bytes a token: recent_only 64, perplexity +10.00%.",
    ]


def test_report_of_evaluation_compares_rows_that_cut_the_prompt_apart(rows: list[ResultRow], tmp_path: Path) -> None:
    apart = [replace(entry, prompt_only=entry.label == "streaming 64") for entry in rows]
    text = make_report([saved(results(apart), tmp_path / "e.json")]).to_markdown().replace("\\", "")
    assert "64 tokens kept: recent_only 64, perplexity +10.00%." in text
    assert "64 tokens of the prompt kept: streaming 64, perplexity +20.00%." in text


def test_report_of_evaluation_opens_with_its_cost(rows: list[ResultRow], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = make_report([saved(results(rows), tmp_path / "e.json")])
    text, page = report.to_markdown(), report.to_html()
    head = text[: text.index("\n## ")]
    assert head.splitlines()[2].startswith(
        "**Evaluation**: e.json: 6 configurations against the full cache (perplexity 10.00)"
    )
    assert "64 tokens kept: recent\\_only 64 is the best of 2, perplexity +10.00%." in head
    assert "512 tokens kept" not in head and "4 configurations evicted nothing in these texts" in head
    assert "No gates were judged" not in head and text.index("## Perplexity over budget") == text.index("\n## ") + 1
    assert "streaming 512 \\*" in text and "Hollow, and marked \\*" in text and "streaming 512 *" in page
    assert report.to_dict()["verdict"] == "Evaluation"


def test_report_with_gates_keeps_their_verdict_first(tmp_path: Path) -> None:
    import report_files

    root = report_files.write_everything(tmp_path / "round")
    assert make_report([root]).verdict.word in ("PASS", "FAIL", "NOT MEASURED", "UNCLEAR")


def test_read_results_keeps_evicted_key(tmp_path: Path) -> None:
    found = lm_results.document()
    assert read_results(saved(found, tmp_path / "r.json")).to_dict() == json.loads(found.to_text("json"))


def test_read_results_older_deep_range_is_kept(tmp_path: Path) -> None:
    document = lm_results.document().to_dict()
    document["settings"] |= {"prompt": 1500, "deep_from": 1024}
    (tmp_path / "r.json").write_text(json.dumps(document))
    assert "from token 1,024 on" in read_results(tmp_path / "r.json").format_table()
