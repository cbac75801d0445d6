"""README's table of speeds and the ratios of its demo equal the measurements."""

from __future__ import annotations

import json
import re
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
    "blosc2 shuffle+zstd (clevel 1)",
    "zstd -3",
    "lz4",
    "pcodec",
)
ARRAYS = ("K fp16", "V fp16", "K bf16", "K fp32")
WHOLE = {"K bf16": "512 KiB"}


def test_readme_codec_table_equals_benchmark() -> None:
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


def test_readme_exact_speed_range_equals_benchmark() -> None:
    rows = json.loads((ROOT / "benchmarks" / "codec.json").read_text(encoding="utf-8"))["one_thread"]
    times = [row["encode_over_zstd"] for row in rows]
    assert f"`exact` takes {min(times):.2f} to {max(times):.2f} times" in (ROOT / "README.md").read_text("utf-8")


def test_readme_wheel_size_equals_enforced_limit() -> None:
    (limit,) = re.findall(r"^MAX_BYTES=(\d+)$", (ROOT / "tools" / "wheel.sh").read_text("utf-8"), re.MULTILINE)
    assert f"at most {int(limit) / 1e6:.1f} MB" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("effort", ["exact", "fast"])
def test_readme_demo_ratios_equal_current_encoder(effort: str) -> None:
    words = np.load(ROOT / "fixtures" / "kv_real" / "k_fp16.npy")
    ratio = words.nbytes / len(kvmnn.encode(words, effort=effort))
    assert f"    kvmnn {effort:<18}{ratio:.4f} " in (ROOT / "README.md").read_text(encoding="utf-8")
