"""README's table of speeds is that of benchmarks/pareto.json, and its demo has the ratios that there are."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from repository import ROOT

import kvmnn

CODECS = (
    "kvmnn dense",
    "kvmnn exact",
    "kvmnn balanced",
    "kvmnn fast",
    "blosc2 shuffle+zstd",
    "zstd -3",
    "lz4",
    "pcodec",
)
ARRAYS = ("K fp16", "V fp16", "K bf16", "K fp32")
WHOLE = {"K bf16": "512 KiB"}


def test_readme_has_the_figures_that_were_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "pareto.json").read_text(encoding="utf-8"))
    reports = [measured[f"{array} {WHOLE.get(array, '1,024 KiB')}"][0] for array in ARRAYS]
    lines = [f"| codec | {' | '.join(ARRAYS)} |", "|---|" + len(ARRAYS) * "---|"]
    lines += [f"| {codec} | {' | '.join(cell(report, codec) for report in reports)} |" for codec in CODECS]
    assert "\n".join(lines) in (ROOT / "README.md").read_text(encoding="utf-8")


def cell(report: dict[str, Any], codec: str) -> str:
    (result,) = (each for each in report["results"] if each["codec"] == codec)
    assert result["raw_bytes"] == report["sample_bytes"] == report["array_bytes"]
    encode, decode = (result["raw_bytes"] / 1e6 / result[way]["cpu"] for way in ("encode", "decode"))
    return f"{result['ratio']:.3f}, {encode:,.0f} / {decode:,.0f}"


@pytest.mark.parametrize("effort", ["exact", "fast"])
def test_ratios_of_the_demo_are_those_of_today(effort: str) -> None:
    words = np.load(ROOT / "fixtures" / "kv_real" / "k_fp16.npy")
    ratio = words.nbytes / len(kvmnn.encode(words, effort=effort))
    assert f"    kvmnn {effort:<18}{ratio:.4f} " in (ROOT / "README.md").read_text(encoding="utf-8")
