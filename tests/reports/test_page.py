"""The page of ``kvmnn report``: its contents for complete, partial, damaged and hostile inputs."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_files as files

from kvmnn.errors import SourceError
from kvmnn.gates.verdict import GateResult
from kvmnn.reports.page import Report, make_report
from kvmnn.reports.page.blocks import ChartBlock
from kvmnn.reports.page.inputs import read_inputs
from kvmnn.reports.page.page_sections import build_trend_section
from kvmnn.reports.page.records import REFERENCE_CASES
from kvmnn.reports.page.renderers import DARK_COLOURS, LIGHT_COLOURS, SCRIPT, SCRIPT_HASH, TEXT_ON_BACKGROUND
from kvmnn.reports.page.verdict import describe_gate_margin

pytest.importorskip("matplotlib")

EVIL = "<script>alert(1)</script>|\u202e]]>&amp;`x`"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return make_report([files.write_everything(tmp_path_factory.mktemp("all") / "round")])


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return report.to_html()


class Tree(HTMLParser):
    """Tags, their attributes, and texts, in order."""

    EMPTY = ("meta", "br", "circle", "path", "use", "rect", "line", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


def test_report_verdict_names_misses_and_distances(report: Report) -> None:
    head = report.verdict
    assert (head.word, head.summary) == ("FAIL", "1 of 6 cases passes; 5 fail.")
    store = dict(next(card for card in head.cases if card.name == "runtime_store").misses)
    assert store["lossless ratio"] == "1.170, limit >= 1.300 (0.130 below)"
    assert store["decompression"] == "352,709 us, limit > 0, <= 70,000 us (282,709 us above)"
    assert store["decode drop"] == "+16.30%, limit <= 5.00% (11.30 points above)"
    assert store["perplexity"] == "not measured: needs texts (--text)"


@pytest.mark.parametrize(
    ("value", "limit", "why", "said"),
    [
        ("0 us", "> 0, <= 70,000 us", "", "at the limit"),
        ("20", "<= 8", "", "12 above"),
        ("1 of 3", "all", "", ""),
        ("+4.00%", "<= +5.00%", "95 % +1.00% to +6.50% over 10 texts", "1.50 points above, by the upper end"),
        ("no baseline", "<= 5.00%", "", ""),
    ],
)
def test_describe_miss_names_the_distance(value: str, limit: str, why: str, said: str) -> None:
    assert (
        describe_gate_margin(GateResult(name="perplexity", verdict="fail", value=value, limit=limit, why=why)) == said
    )
    assert describe_gate_margin(GateResult(name="perplexity", verdict="pass", value=value, limit=limit, why=why)) == ""


@pytest.mark.slow
def test_page_compares_cases_with_the_reference(page: str) -> None:
    assert list(REFERENCE_CASES) == list(files.CASES)
    rows = re.findall(r'<tr role="row"><th scope="row" role="rowheader" class="left">(\w+)<.*?</tr>', page)
    assert rows[: len(files.CASES)] == list(files.CASES)
    row = re.search(r'rowheader" class="left">runtime_store<.*?</tr>', page)
    assert row is not None
    for text in ("3.114", "1.170", "3.643", "3.040", "41.53", "61.05", "-31.97%", "doc. 4.363", "doc. +17.86%"):
        assert f">{text}<" in row[0], text


def test_reference_totals_are_products_of_ratios() -> None:
    """Totals equal the product of the printed ratios up to rounding."""
    for name, case in REFERENCE_CASES.items():
        if case.total is not None and name.startswith("runtime"):
            assert case.total == pytest.approx(case.lossy * case.lossless, abs=1.1e-3)
        assert case.change == pytest.approx((case.decode - case.baseline) / case.baseline, abs=1e-3), name


def test_page_figures_equal_the_files(page: str) -> None:
    texts = ["1.3003", "1.1654", "LOSSLESS: 1,542 calls compared", "1.231", "2026-11-23T10:00:00", "1.3200", "687"]
    texts += ["+0.46%", "kvmnn measure dump --encode --json", "kvmnn eval model/ --text texts/", "ab" * 32]
    assert [text for text in texts if text not in page] == []


def test_page_is_self_contained(page: str) -> None:
    assert len(page.encode()) < 1_000_000
    tree = Tree(page)
    assert not tree.open
    assert not [tag for tag, _ in tree.tags if tag in ("link", "img", "iframe", "object", "embed", "base")]
    links = [value for _, attrs in tree.tags for name, value in attrs.items() if name in ("href", "src", "xlink:href")]
    assert links and all(link is not None and link.startswith("#") for link in links)
    assert "url(http" not in page and "@import" not in page and "https:" not in page
    assert page.count("<script>") == 1 and SCRIPT in page
    policy = next(str(attrs["content"]) for _, attrs in tree.tags if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and SCRIPT_HASH in policy and "script-src 'unsafe" not in policy


def test_page_is_accessible(page: str) -> None:
    tree = Tree(page)
    names = [tag for tag, _ in tree.tags]
    assert ("html", {"lang": "en"}) in tree.tags
    for tag in ("title", "header", "nav", "main", "footer", "h1"):
        assert names.count(tag) == 1 or tag == "title", tag
    assert names.count("table") == names.count("caption") == names.count("thead")
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in tree.tags if tag == "th")
    plots = [attrs for tag, attrs in tree.tags if tag == "svg" and attrs.get("class") == "plot"]
    assert len(plots) >= 10 and all(plot["role"] == "img" and plot["aria-label"] for plot in plots)
    ids = [attrs["id"] for _, attrs in tree.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    named = [attrs["aria-labelledby"] for _, attrs in tree.tags if "aria-labelledby" in attrs]
    assert named and set(named) <= set(ids)
    figures = names.count("figure")
    assert figures == len(plots) == page.count("Values of this plot")
    assert page.count("<circle cx=") > 100  # hover


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [LIGHT_COLOURS, DARK_COLOURS], ids=["light", "dark"])
def test_colours_have_enough_contrast(colours: dict[str, str]) -> None:
    def contrast(one: str, other: str) -> float:
        high, low = sorted((_luminance(colours[one]), _luminance(colours[other])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for text, paper in TEXT_ON_BACKGROUND:
        assert contrast(text, paper) >= 4.5, (text, paper)
    for series, paper in itertools.product([f"s{number}" for number in range(8)], ["paper", "card"]):
        assert contrast(series, paper) >= 3, (series, paper)


def test_page_plots_use_the_colours_of_the_page(page: str) -> None:
    for plot in re.findall(r'<svg[^>]*class="plot".*?</svg>', page, re.DOTALL):
        assert not re.search(r"#[0-9a-fA-F]{6}", plot)
        assert "var(--ink)" in plot and "DejaVu" not in plot


@pytest.mark.slow
def test_report_equal_input_gives_equal_pages(report: Report, page: str, tmp_path: Path) -> None:
    again = make_report([files.write_everything(tmp_path / "round")])
    assert again.to_html() == page and again.to_markdown() == report.to_markdown()


def test_page_escapes_texts_of_files(tmp_path: Path) -> None:
    passed = {"runtime_full": False, EVIL: False}
    root = tmp_path / "round"
    files.write_json(root / "summary.json", files.round_document(passed))
    document = files.case_document("runtime_full", passed=False)
    document["gates"][2] |= {"name": EVIL, "value": EVIL, "limit": EVIL, "why": EVIL}
    document["diagnoses"] = [EVIL]
    files.write_json(root / "runtime_full" / "gate.json", document)
    about = files.about_document() | {"model": EVIL, "machine": EVIL, "command": EVIL, "settings": {EVIL: EVIL}}
    files.write_json(root / "run.json", about)
    measured = files.measured_document()
    measured["breakdown"]["layers"] = {EVIL: measured["breakdown"]["layers"]["0"]}
    files.write_json(root / "measure.json", measured)
    codecs = files.codecs_document()
    codecs["arrays"][0]["results"][0]["codec"] = EVIL
    codecs["arrays"][0]["name"] = EVIL
    files.write_json(root / "bench.json", codecs)
    runs = files.runs_document("runtime_full")
    runs["pairs"][0]["work"] = EVIL
    files.write_json(root / "runtime_full" / "runs.json", runs)
    report = make_report([root])
    page, text = report.to_html(), report.to_markdown()
    assert page.count("<script>") == 1 and "alert(1)&lt;/script&gt;" in page and "\u202e" not in page + text
    assert not Tree(page).open
    lines = text.split("\n")
    for place, line in enumerate(lines):
        if line.startswith("| ---"):
            width = len(re.findall(r"(?<!\\)\|", line))
            for row in itertools.takewhile(lambda one: one.startswith("|"), lines[place - 1 :]):
                assert len(re.findall(r"(?<!\\)\|", row)) == width, row
    fenced = re.sub(r"^(`{3,})sh\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<", fenced)


def test_report_missing_parts_are_not_measured(tmp_path: Path) -> None:
    report = make_report([files.write_json(tmp_path / "measure.json", files.measured_document())])
    assert report.verdict.word == "No gates"
    page = report.to_html()
    for text in ("Cases: not measured", "Gates one by one: not measured", "Memory over time: not measured",
                 "Perplexity over budget: not measured", "Latency percentiles: not measured", "Trend: not measured",
                 "Codecs side by side: not measured", "Runs in pairs: not measured"):  # fmt: skip
        assert text in page, text
    assert "not measured" in report.to_markdown()


def test_report_partial_suite_names_missing_cases(tmp_path: Path) -> None:
    passed = dict.fromkeys(files.CASES[:4], True)
    report = make_report([files.write_round(tmp_path / "round", passed)])
    assert (report.verdict.word, report.verdict.summary) == ("PASS", "4 of 4 cases pass.")
    assert "these were not run, so not measured: llm_demo_full, llm_demo_store" in report.verdict.notes[0]


def test_report_unclear_gate_is_neither_pass_nor_fail(tmp_path: Path) -> None:
    root = files.write_round(tmp_path / "round", {"runtime_probe": False})
    why = "58.0 of 60.0 tok/s, 3 pairs side by side; 95 % -4.8% to +11.4%; the limit lies in it: more runs are needed"
    document = files.case_document("runtime_probe", passed=False) | {
        "verdict": "unclear", "gates": [files.gate("decode drop", "unclear", "+3.33%", "<= 5.00%", why)]
    }  # fmt: skip
    files.write_json(root / "runtime_probe" / "gate.json", document)
    found = make_report([root]).verdict
    assert (found.word, found.summary) == ("UNCLEAR", "0 of 1 case pass; 1 unclear.")
    assert found.cases[0].misses == (("decode drop", "unclear: +3.33%, limit <= 5.00%; 95 % -4.8% to +11.4%"),)
    files.write_json(root / "runtime_probe" / "gate.json", document | {"verdict": "pass"})
    with pytest.raises(SourceError, match="says pass, but its gates say unclear"):
        make_report([root])


@pytest.mark.slow
def test_report_round_with_changed_settings_is_marked(tmp_path: Path) -> None:
    root = files.write_round(tmp_path / "round")
    rounds = [files.past_round(1), files.past_round(2) | {"changed": ["kv_h2o_block_tokens 32 -> 16"]}]
    (root / "history.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rounds), encoding="utf-8")
    report = make_report([root])
    assert "changed since the round before" in report.to_html()
    assert "kv_h2o_block_tokens 32 -&gt; 16" in report.to_html()


def test_report_of_gate_run_output_equals_its_folder(tmp_path: Path) -> None:
    passed = {case: case == "runtime_full" for case in files.CASES}
    root = files.write_round(tmp_path / "round", passed)
    printed = {"verb": "gate run", "command": "kvmnn gate run m", **files.round_document(passed), "notes": []}
    printed["cases"] = [files.case_document(case, passed=one) for case, one in passed.items()]
    alone = make_report([files.write_json(tmp_path / "printed.json", printed)])
    both = make_report([root, tmp_path / "printed.json"])
    assert alone.verdict.cases == both.verdict.cases == make_report([root]).verdict.cases
    assert alone.verdict.summary == "1 of 6 cases passes; 5 fail." and "kvmnn gate run m" in alone.to_markdown()


def test_report_reads_the_reference_tool_document(tmp_path: Path) -> None:
    document = files.measured_document()["evaluation"]
    report = make_report([files.write_json(tmp_path / "upper.json", document)])
    assert "lossless ratio 1.2896" in report.to_html() and "Its layers are not measured" in report.to_markdown()
    assert "Command not recorded in: upper.json." in report.to_html()


def test_report_wrong_replay_is_the_first_note(tmp_path: Path) -> None:
    document = files.replay_document() | {"wrong_calls": 3}
    report = make_report([files.write_json(tmp_path / "replay.json", document)])
    assert report.verdict.notes[0].startswith("replay.json: WRONG: attention reads other bytes")


@pytest.mark.slow
def test_report_large_suite_is_below_one_megabyte(tmp_path: Path) -> None:
    passed = {f"runtime_full+block={place}": False for place in range(300)}
    root = files.write_round(tmp_path / "round", passed)
    files.write_json(root / "replay.json", files.replay_document(20000))
    made = make_report([root]).to_html()
    assert len(made.encode()) <= 1_000_000
    assert "0 of 300 cases pass; 300 fail." in made and "240 more cases" in made


def _broken() -> dict[str, tuple[str, object, str]]:
    row = files.row("runtime_full", passed=True)
    one = {"runtime_full": True}
    fits = files.round_document(one)
    return {
        "truncated JSON": ("eval.json", '{"rows": [', "is not JSON"),
        "empty": ("eval.json", "", "is not JSON"),
        "a list": ("eval.json", "[1]", "holds no JSON object"),
        "NaN": ("bench.json", '{"arrays": NaN}', "is not JSON"),
        "beyond float64": ("bench.json", '{"x": 1e999}', "beyond 10^18"),
        "too large": ("bench.json", '{"x": 1000000000000000001}', "beyond 10^18"),
        "number as text": ("replay.json", files.replay_document() | {"layers": "six"}, "expected a whole number"),
        "a field missing": ("replay.json", {**files.replay_document(), "metrics": {}}, "is missing"),
        "wrong count": ("summary.json", {**fits, "total_cases": 2}, "expected total_cases"),
        "contradicting verdict": ("summary.json", {**fits, "overall_pass": False}, "not what its cases say"),
        "contradicting gates": (
            "gate.json",
            files.case_document("runtime_full", passed=False) | {"overall_pass": True, "verdict": "pass"},
            "but its gates say fail",
        ),
        "an unknown verdict": (
            "gate.json",
            files.case_document("x", passed=True) | {"gates": [files.gate("a", "fine")]},
            "found 'fine'",
        ),
        "a row without a name": ("summary.json", {**fits, "rows": [{**row, "case": 3}]}, "expected text"),
        "a torn line": ("history.jsonl", '{"generated_at": "x", "cases": [', "history.jsonl: line 1: is not JSON"),
        "a long text": ("run.json", files.about_document() | {"machine": "x" * 30000}, "30,000 characters"),
    }


@pytest.mark.parametrize("name", sorted(_broken()))
def test_report_damaged_file_is_one_line_error(tmp_path: Path, name: str) -> None:
    file, content, said = _broken()[name]
    path = tmp_path / file
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    for inputs in ([tmp_path], [path]):
        with pytest.raises(SourceError) as error:
            make_report(inputs)
        assert said in str(error.value) and "\n" not in str(error.value) and file in str(error.value)


def test_report_inconsistent_inputs_are_refused(tmp_path: Path) -> None:
    root = files.write_round(tmp_path / "round")
    other = files.write_json(tmp_path / "other.json", files.round_document({"runtime_full": True}))
    with pytest.raises(SourceError, match=r"is another round of gates than summary\.json"):
        make_report([root, other])
    files.write_json(root / "runtime_full" / "gate.json", files.case_document("runtime_full", passed=True))
    with pytest.raises(SourceError, match=r"does not fit summary\.json, which says fail of runtime_full"):
        make_report([root])


def test_report_ignores_other_json_of_a_folder(tmp_path: Path) -> None:
    root = files.write_round(tmp_path / "round")
    files.write_json(root / "config.json", {"prompts": [1]})
    files.write_json(root / "old_case" / "gate.json", files.case_document("old_case", passed=True))
    report = make_report([root])
    assert report.ignored_files == (
        ("config.json", "not a result that a report knows"),
        ("old_case/gate.json", "a case that the last round does not have"),
    )
    assert "Left out: config.json (not a result that a report knows)" in report.to_html()
    with pytest.raises(SourceError, match="is no result that a report knows: expected what kvmnn eval"):
        make_report([root / "config.json"])
    with pytest.raises(SourceError, match="holds no result"):
        make_report([tmp_path])
    with pytest.raises(SourceError, match="does not exist"):
        make_report([tmp_path / "nothing.json"])


def test_page_columns_sort_by_their_numbers(page: str) -> None:
    row = re.search(r'rowheader" class="left">runtime_store<.*?</tr>', page)
    assert row is not None and 'data-v="3.114"' in row[0] and 'data-v="-0.319738"' in row[0]


def _set(value: object, number: float) -> object:
    """A document with every number in it replaced by one; whole numbers stay whole."""
    if isinstance(value, dict):
        return {key: _set(entry, number) for key, entry in value.items()}
    if isinstance(value, list):
        return [_set(entry, number) for entry in value]
    if type(value) is float:
        return number
    return int(number) if type(value) is int else value


@pytest.mark.parametrize("number", [0.0, -1.0, 1e18, 5e-324])
def test_report_extreme_numbers_are_drawn_or_refused(tmp_path: Path, number: float) -> None:
    """The page is written or refused in one line: no traceback, no warning of a plot."""
    made = 0
    for name in ("measured", "replay", "codecs", "runs"):
        document = files.runs_document("x") if name == "runs" else getattr(files, f"{name}_document")()
        path = files.write_json(tmp_path / f"{name}.json", _set(document, number))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                made += len(make_report([path]).to_html()) > 0
            except SourceError as error:
                assert "\n" not in str(error)
    assert made >= 2


def test_read_inputs_missing_ratio_is_no_point(tmp_path: Path) -> None:
    """A round without encoding has no lossless ratio, not one of 0."""
    past = []
    for place, lossless in enumerate((1.2, None, 0.0)):
        case = {"case": "a", "pass": False, "reason": "x", "lossy": 2.0, "lossless": lossless, "decode_tps": None}
        past.append({"generated_at": f"2026-11-2{place}", "overall_pass": False, "cases": [{**case, "drop": None}]})
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in past))
    found = read_inputs([tmp_path])
    points = {
        chart.title: chart.series[0].points
        for chart in build_trend_section(found).blocks
        if isinstance(chart, ChartBlock)
    }
    assert [point.y for point in points["Lossless ratio over rounds"]] == [1.2]
    assert len(points["Lossy ratio over rounds"]) == 3
    assert make_report([tmp_path]).to_html()


def test_report_without_gates_has_no_verdict(tmp_path: Path) -> None:
    root = files.write_everything(tmp_path / "round")
    text = make_report([root / "measure.json"]).to_markdown()
    assert "No gates were judged." in text and "There is a verdict" not in text
