"""``kvmnn report``: the plots of a run from its saved results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lm_results import document, results, row
from repository import FIXTURES

from kvmnn.cli.entry_point import main
from kvmnn.evaluation import read_results
from kvmnn.reports import plots


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "results.json"
    path.write_text(document().to_text("json"))
    return path


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_report_plots_equal_the_plots_of_eval(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fixture, text = FIXTURES / "lm", FIXTURES / "lm" / "texts" / "calendar.py.txt"
    run("eval", fixture, "--text", text, "--max-tokens", 48, "--chunk", 8, "--policy", "streaming", "--budget", 16,
        "--no-timing", "--plot", "one", "--plot-format", "svg", "-o", "results.json")  # fmt: skip
    stdout = run("report", "results.json", "-o", "other/", "--plot-format", "svg").out
    names = sorted(path.name for path in Path("one").iterdir())
    assert sorted(path.name for path in Path("other").iterdir()) == names and "keep_map.svg" in names
    for name in names:
        assert Path("one", name).read_bytes() == Path("other", name).read_bytes(), name
    assert f"{len(names)} plot files in other" in stdout
    assert "no keep_ratio_analysis: no policy ran with two values" in stdout


@pytest.mark.slow
def test_report_reads_printed_json(run, tmp_path, saved):
    path = tmp_path / "printed.json"
    path.write_text(json.dumps({"verb": "eval", **json.loads(saved.read_text())}, indent=2))
    assert read_results(path) == read_results(saved) == document()
    listing = json.loads(run("report", path, "-o", tmp_path / "p", "--plot-format", "svg", "--no-titles", "--json").out)
    assert [Path(name).name for name in listing["files"]] == [
        f"{name}.svg" for name in plots.DRAW_FUNCTIONS if name not in ("improvement_summary", "kl_over_bytes")
    ]
    assert list(listing["left_out"]) == ["improvement_summary", "kl_over_bytes"]
    drawn = b"".join(path.read_bytes() for path in (tmp_path / "p").iterdir())
    assert b"Perplexity over budget" not in drawn and b"perplexity" in drawn


@pytest.mark.slow
def test_report_existing_plots_need_force(run, tmp_path, saved):
    (tmp_path / "keep_map.svg").write_text("mine")
    svg = ("--plot-format", "svg")
    assert "keep_map.svg: exists already" in run("report", saved, "-o", tmp_path, *svg, code=1).err
    assert (tmp_path / "keep_map.svg").read_text() == "mine"
    run("report", saved, "-o", tmp_path, "-f", *svg, "-q")
    assert "mine" not in (tmp_path / "keep_map.svg").read_text()


def test_report_plot_format_pdf_is_drawn(run, tmp_path):
    rows = [
        row("full", "full", perplexity=8.0, nll=2.0),
        row("streaming 4", "streaming", budget=4, perplexity=9.0, nll=2.2),
    ]
    (tmp_path / "r.json").write_text(results(rows).to_text("json"))
    run("report", tmp_path / "r.json", "-o", f"{tmp_path}/p/", "--plot-format", "pdf")
    drawn = sorted((tmp_path / "p").iterdir())
    assert [path.name for path in drawn] == ["perplexity_over_budget.pdf", "strategy_comparison.pdf"]
    assert all(path.read_bytes().startswith(b"%PDF") for path in drawn)


def damaged(saved, where, value):
    """The document with one value replaced."""
    found = json.loads(saved.read_text())
    place = found
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    return json.dumps(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("rows", 1, "perplexity"), "many", "rows[1].perplexity: found 'many', expected a number"),
        (("rows", 1, "budget"), 10**400, "holds a number of 401 digits"),
        (("rows", 1, "label"), "x" * 100_000, "holds a text of 100,000 characters"),
        (("rows",), [{}] * 2000, "has 2,000 rows: expected at most 1,000"),
        (("rows",), [{}], "rows[0].label: is missing"),
        (("traces", 1, "step_tokens"), [1, 2], "cannot be drawn"),
        (("settings",), None, "holds no results of an evaluation"),
        (("documents",), 7, "documents: found 7, expected a list"),
    ],
)
def test_report_damaged_results_are_one_line_error(capsys, tmp_path, saved, where, value, message):
    path = tmp_path / "r.json"
    path.write_text(damaged(saved, where, value))
    fails(capsys, path, tmp_path / "plots", message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not JSON"),
        (b"[]", "holds no JSON object"),
        (b'{"verb": "measure"}', "holds no results of an evaluation"),
        (b'{"rows": ' + b"[" * 100_000, "is not JSON"),
        (b'{"rows": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"\x1c\0\0\0\xe0", "is not JSON: it is not even text; expected the JSON document that kvmnn eval -o"),
        (b"some words", "; expected the JSON document that kvmnn eval -o RESULTS.json writes"),
        (b"\xff\xfe", "is not JSON"),
        (None, "cannot be read"),
    ],
)
def test_report_other_files_are_one_line_error(capsys, tmp_path, data, message):
    path = tmp_path / "r.json"
    if data is not None:
        path.write_bytes(data)
    fails(capsys, path, tmp_path / "plots", message)


def fails(capsys, path, output, message):
    assert main(["report", str(path), "-o", f"{output}/", "--plot-format", "svg"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("kvmnn: error: ") and message in err
    assert not output.exists()


def test_report_output_directory_is_refused(run, tmp_path):
    said = run("report", tmp_path, "-o", f"{tmp_path}/x/", code=2).err
    assert "x/: is a directory, expected a file such as report.html" in said


@pytest.mark.slow
def test_report_plot_output_must_be_a_folder(run, tmp_path, saved):
    said = run("report", saved, "-o", tmp_path / "keep_map.pdf", code=2).err
    assert "keep_map.pdf: plots are several files: use -o DIR/ --plot-format pdf" in said
    assert "plots are files in a folder: use -o DIR/" in run("report", saved, "--no-titles", code=2).err
    said = run("report", saved, saved, "-o", f"{tmp_path}/p/", code=2).err
    assert "is a directory, expected a file such as report.html; the plots of one evaluation go into one" in said
    run("report", saved, "-o", tmp_path / "r.html", "-q")
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
