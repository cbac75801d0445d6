"""README's figures are those of the pages that say how they were measured."""

from __future__ import annotations

import json
import re

from repository import DOCS, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def read_table(page: str, first_cell: str) -> list[str]:
    """Return the cells after the first of the row that begins with `first_cell`."""
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {first_cell} |"))
    return [cell.strip().strip("*") for cell in line.split("|")[2:-1]]


def test_readme_is_at_most_110_lines() -> None:
    assert README.count("\n") <= 110


def test_readme_profile_ratios_equal_page_of_linear_streams() -> None:
    page = (DOCS / "format-linear.md").read_text(encoding="utf-8")
    for row, variant in (
        ("[`profile`](docs/profile.md), each layer alone", "own layer only"),
        ("`profile`, by two layers below", "two layers below"),
    ):
        measured = [read_table(page, f"{model}, {variant}")[0] for model in ("SmolLM2", "Gemma")]
        assert read_table(README, row)[:2] == measured


def test_readme_transform_ratios_equal_page_of_transform_streams() -> None:
    page = (DOCS / "format-transform.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")
        for line in page.splitlines()
        if re.match(r"\| (SmolLM2, each|Gemma, each|pred|the same with)", line)
    ]
    alone, below, attention, gemma_alone, gemma_below = ([cell.strip() for cell in row[3:5]] for row in rows)
    for row, smol, gemma in (
        ("[`transform`](docs/format-transform.md), each layer alone", alone, gemma_alone),
        ("`transform`, by two layers below", below, gemma_below),
        ("the same, steps by attention", attention, ["", ""]),
    ):
        ratio, gemma_ratio, loss = read_table(README, row)[:3]
        assert [ratio, gemma_ratio] == [smol[0], gemma[0]]
        shown = [float(value) for value in re.findall(r"0\.\d+", loss)]
        assert shown == [round(float(kl), 4) for kl in (smol[1], gemma[1]) if kl]


def test_readme_losses_equal_benchmark_of_real_models() -> None:
    data = json.loads((ROOT / "benchmarks" / "real.json").read_text(encoding="utf-8"))
    rows = {row["label"]: row for row in data["smollm2-135m"]["rows"]}
    labels = (
        "q8_0:when=prompt",
        "q4_0:when=prompt",
        "kivi:group=64,when=prompt",
        "transform:kl=0.002",
        "transform:kl=0.0065",
    )
    labels += ("h2o_decayed_heads 256 recent=128", "streaming 256", "recent_only 256")
    for label, bits, kl in zip(
        labels, read_table(README, "bits an element"), read_table(README, "KL, nats"), strict=True
    ):
        row = rows[next(key for key in rows if key.startswith(label))]
        assert f"{row.get('quantized_bits', 16 * row['kept_bytes'] / row['full_bytes']):.2f}" == bits.strip("*")
        assert f"{row['deep_divergence']['kl']:.4f}" == kl.strip("*")


def test_readme_wheel_size_equals_enforced_limit() -> None:
    (limit,) = re.findall(r"^MAX_BYTES=(\d+)$", (ROOT / "tools" / "wheel.sh").read_text("utf-8"), re.MULTILINE)
    assert f"at most {int(limit) / 1e6:.1f} MB" in README
