"""README's figures are those of the pages that say how they were measured."""

from __future__ import annotations

import json
import re

from repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
REAL = json.loads((ROOT / "benchmarks" / "real.json").read_text(encoding="utf-8"))
MODELS = ("smollm2-135m", "gemma3-270m")


def read_table(page: str, first_cell: str) -> list[str]:
    """Return the cells after the first of the row that begins with `first_cell`."""
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {first_cell} |"))
    return [cell.strip().strip("*") for cell in line.split("|")[2:-1]]


def test_readme_is_at_most_110_lines() -> None:
    assert README.count("\n") <= 110


def test_readme_lossless_ratios_equal_benchmark_of_real_models() -> None:
    rows = {
        "frames, `--effort exact`": "exact",
        "frames, `--effort fast`": "fast",
        "[`--codec dense`](docs/dense.md)": "dense",
        "[`--codec profile`](docs/profile.md), each layer alone": "profile, alone",
        "`profile`, by two layers below": "profile, two below",
    }
    for row, codec in rows.items():
        for model, shown in zip(MODELS, read_table(README, row), strict=False):
            sizes = [entry["bytes"] for entry in REAL[model]["sizes"] if entry["dtype"] == "fp16"]
            assert len(sizes) == 3
            assert shown == f"{sum(size['raw'] for size in sizes) / sum(size[codec] for size in sizes):.3f}"


def test_readme_transform_ratios_equal_benchmark_of_real_models() -> None:
    rows = {
        "[`--codec transform`](docs/format-transform.md), each layer alone": "each layer alone",
        "`transform`, by two layers below": "two layers below",
        "the same, steps by attention": "two layers below, steps by attention",
    }
    for row, level in rows.items():
        *ratios, loss, _ = read_table(README, row)
        for model, ratio in zip(MODELS, ratios, strict=True):
            compared = REAL[model]["ratios_at_kl"]
            assert loss == f"KL {compared['kl'][0]} nats"
            assert ratio == f"{compared[level][0]:.1f}"


def test_readme_losses_equal_benchmark_of_real_models() -> None:
    rows = {row["label"]: row for row in REAL["smollm2-135m"]["rows"]}
    labels = (
        *("q8_0:when=prompt", "q4_0:when=prompt", "kivi:group=64,when=prompt"),
        *("tq4:when=prompt", "tq3:when=prompt"),
        *("h2o_decayed_heads 256 recent=128", "streaming 256", "recent_only 256"),
    )
    for label, bits, kl in zip(
        labels, read_table(README, "bits an element"), read_table(README, "KL, nats"), strict=True
    ):
        row = rows[next(key for key in rows if key.startswith(label))]
        assert f"{row.get('quantized_bits', 16 * row['kept_bytes'] / row['full_bytes']):.2f}" == bits.strip("*")
        assert f"{row['deep_divergence']['kl']:.4f}" == kl.strip("*")


def test_readme_wheel_size_equals_enforced_limit() -> None:
    (limit,) = re.findall(r"^MAX_BYTES=(\d+)$", (ROOT / "tools" / "wheel.sh").read_text("utf-8"), re.MULTILINE)
    assert f"at most {int(limit) / 1e6:.1f} MB" in README
