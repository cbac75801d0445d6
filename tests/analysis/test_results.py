"""Results of `kvmnn.analysis` equal the command's output."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from offline_model import words, write_dump

from kvmnn.analysis import (
    ALL_LAYERS_SCOPE,
    MeasureOptions,
    Scope,
    convert_to_fp16,
    format_reference_json,
    format_reference_markdown,
    measure_dumps,
    select_dumps,
    write_entropy_report,
)
from kvmnn.errors import OptionError, OutputError, SourceError

K, V = words(1, 40), words(2, 40)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dump(Path("dump"), 0, 0, K, V)
    write_dump(Path("dump"), 1, 0, K.astype("<f4"), V.astype("<f4"))
    return tmp_path


@pytest.mark.parametrize("to_fp16", [False, True])
def test_measure_dumps_result_equals_command_output(here, run, to_fp16):
    options = MeasureOptions(scope=Scope(to_fp16=to_fp16))
    found = measure_dumps([os.path.abspath("dump")], None, options, real=True, out_json="a/b.json", out_md="a/b.md")
    argv = ["measure", "dump", "--encode", *(["--to-fp16"] if to_fp16 else [])]
    assert run(*argv).out == f"{found}\n"
    said = {"verb": "measure", "command": f"kvmnn {' '.join(argv)} --json"}
    assert json.loads(run(*argv, "--json").out) == {**said, **found.to_dict()}
    assert Path("a/b.json").read_text() == format_reference_json(found)
    assert Path("a/b.md").read_text() == format_reference_markdown(found)
    assert found.label == ("LOSSY" if to_fp16 else "LOSSLESS")


def test_measure_dumps_output_conflicts_are_refused(here):
    with pytest.raises(OptionError, match="name the same file"):
        measure_dumps(["dump"], out_json="x", out_md="./x")
    Path("taken").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        measure_dumps(["dump"], out_json="y", out_md="taken")
    assert sorted(path.name for path in here.iterdir()) == ["dump", "taken"]


def test_entropy_report_equals_command_output(here, run):
    report = write_entropy_report(select_dumps(["dump"], ALL_LAYERS_SCOPE), "an")
    assert run("measure", "dump", "--analysis", "an", "-f").out == f"{report}\n"
    told = json.loads(run("measure", "dump", "--analysis", "an", "-f", "--json").out)
    assert told.pop("command") == "kvmnn measure dump --analysis an -f --json"
    assert told == {"verb": "measure", **report.to_dict()}


def test_convert_to_fp16_result_equals_command_output(here, run):
    found = convert_to_fp16("dump", "half", allow_fp16=True)
    assert run("measure", "dump", "--to-fp16", "other", "--allow-fp16").out == f"{found}\n"
    assert found.to_dict() | {"errors": []} == {
        "to_fp16": "half",
        "label": "LOSSY",
        "converted": 1,
        "copied": 1,
        "skipped": 0,
        "cast": found.cast_stats.to_dict(),
        "errors": [],
    }
    with pytest.raises(SourceError, match="is not a directory"):
        convert_to_fp16("gone", "half").require_dumps()
