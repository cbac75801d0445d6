"""The figure of divergence over bytes: points, series, and the Pareto front next to a plain search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from lm_results import results, row

from kvmnn.reports import divergence_figure, plot_style
from kvmnn.reports.divergence_figure import find_pareto_front, kl_over_bytes
from kvmnn.reports.figures import NothingToShowError
from kvmnn.reports.records import DivergenceStats
from kvmnn.reports.series import group_into_series


def point(label: str, policy: str, nbytes: float, kl: float, **more):
    divergence = DivergenceStats(tokens=9, kl=kl, kl_p99=kl, agreement=0.9)
    sizes = {"bytes_per_token": nbytes, "frame_bytes_per_token": nbytes * 0.8}
    whole = DivergenceStats(tokens=900, kl=kl / 100, kl_p99=kl, agreement=0.9)  # most of it before the cut
    return row(label, policy, perplexity=9.0, divergence=whole, cut_divergence=divergence, **sizes, **more)


ROWS = [
    row("full", "full", kind="LOSSLESS", perplexity=8.0, bytes_per_token=4000.0),
    point("streaming 64", "streaming", 500.0, 0.1, budget=64),
    point("streaming 128", "streaming", 1000.0, 0.04, budget=128),
    point("streaming 64 + q8_0", "streaming", 266.0, 0.11, budget=64, codec="q8_0"),
    point("q8_0", "full", 2100.0, 0.001, codec="q8_0"),
    point("q4_0", "full", 1100.0, 0.05, codec="q4_0"),
    row("streaming 900", "streaming", perplexity=8.0, bytes_per_token=4000.0, budget=900, evicted=False),
]


def test_find_pareto_front_equals_plain_search() -> None:
    generator = np.random.default_rng(2)
    for _ in range(30):
        points = [tuple(pair) for pair in generator.integers(0, 8, (12, 2)).tolist()]
        best = {a for a in points if not any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in points)}
        front = [points[index] for index in find_pareto_front(points)]
        assert set(front) == best and front == sorted(best)


def test_kl_over_bytes_shows_rows_with_a_divergence_and_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    monkeypatch.setattr(divergence_figure.plot_style, "add_line_labels", lambda _, found: ends.extend(found))
    with plot_style.use_style():
        figure = kl_over_bytes(results(ROWS))
    assert [end.name for end in ends] == ["streaming", "streaming + q8_0", "q8_0", "q4_0"]
    axes = figure.axes[0]
    rings = axes.lines[-1]
    front = list(zip(rings.get_xdata(), rings.get_ydata(), strict=True))
    assert front == [(266, 0.11), (500, 0.1), (1000, 0.04), (2100, 0.001)]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    colours = {line.get_color() for line in axes.lines if line.get_xdata()[0] in (2100, 1100)}
    assert len(colours) == 2  # each codec of the full cache has its own


def draw_caption(rows) -> str:
    with plot_style.use_style():
        return " ".join(" ".join(text.get_text() for text in kl_over_bytes(results(rows)).texts).split())


def test_kl_over_bytes_leaves_out_rows_that_did_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They equal rows of the codec or the policy alone, whose points they would hide."""
    ends = []
    monkeypatch.setattr(divergence_figure.plot_style, "add_line_labels", lambda _, found: ends.extend(found))
    untried = [
        point("knorm 64 + q8_0", "knorm", 2100.0, 0.001, budget=64, codec="q8_0", evicted=False),
        point("streaming 64 + kivi", "streaming", 500.0, 0.1, budget=64, codec="kivi", evicted=True, quantized_share=0),
    ]
    caption = draw_caption([*untried, *ROWS])
    assert [end.name for end in ends] == ["streaming", "streaming + q8_0", "q8_0", "q4_0"]
    assert (
        "Left out, and marked * in the table, as they evicted nothing in these texts or quantised nothing of what was "
        "kept: knorm 64 + q8_0; streaming 64 + kivi; streaming 900."
    ) in caption
    assert "Left out" not in draw_caption(ROWS[:-1])


def with_counts(row, cut: int, cut_kl: float, kl: float):
    """Change the row's divergences: `cut` of 900 tokens were scored after its first cut."""
    after_cut = DivergenceStats(tokens=cut, kl=cut_kl, kl_p99=1.0, agreement=0.9)
    return replace(row, cut_divergence=after_cut, divergence=replace(after_cut, tokens=900, kl=kl))


def get_front_ys(axes) -> list[float]:
    (rings,) = (line for line in axes.lines if line.get_markersize() == 11)
    return list(rings.get_ydata())


def test_kl_over_bytes_compares_rows_over_the_same_tokens() -> None:
    late = with_counts(ROWS[1], 373, 0.04184, 0.02061)  # 500 bytes
    early = with_counts(ROWS[3], 565, 0.03244, 0.02421)  # 266 bytes, and a lower mean over more tokens
    with plot_style.use_style():
        axes = kl_over_bytes(results([ROWS[0], late, early])).axes[0]
    assert get_front_ys(axes) == [0.02421, 0.02061]  # both are on the front
    assert axes.get_ylabel() == "KL divergence of all scored tokens (nats)"
    assert "Divergence of all scored tokens, 0 before a row's first cut: the tokens after it" in draw_caption(
        [ROWS[0], late, early]
    )
    with plot_style.use_style():
        equal = kl_over_bytes(results([ROWS[0], late, with_counts(early, 373, 0.03244, 0.02421)])).axes[0]
    assert get_front_ys(equal) == [0.03244]
    assert equal.get_ylabel() == "KL divergence after the cut (nats)"
    assert "Divergence of the tokens scored with an evicted or quantised cache." in draw_caption(ROWS)


def test_kl_over_bytes_caption_is_inside_the_png() -> None:
    name = "kivi:group=64,recent=64"
    rows = [ROWS[0], with_counts(ROWS[1], 373, 0.04, 0.02), point(f"s + {name}", "streaming", 300.0, 0.1, codec=name)]
    with plot_style.use_style():
        figure = kl_over_bytes(results(rows))
        figure.set_dpi(150)  # that of files
        box = figure.texts[-1].get_window_extent()
        ends = [plot_style.measure_text_inches(line, 7.5) for line in figure.texts[-1].get_text().split("\n")]
    assert box.width == pytest.approx(150 * max(ends), rel=0.005) and box.x1 <= figure.bbox.width


def test_kl_over_bytes_without_divergences_says_so() -> None:
    with pytest.raises(NothingToShowError, match="no row has a divergence"):
        kl_over_bytes(results([ROWS[0], ROWS[-1]]))


def test_codecs_of_the_prompt_are_marked_and_explained() -> None:
    spec = "transform:profile=/x/y/p.kvmp,kl=0.002,when=prompt"
    rows = [*ROWS, point(spec, "full", 900.0, 0.002, codec=spec)]
    assert group_into_series(rows[1:])[-1].name == "transform:p.kvmp,kl=0.002 (prompt)"
    with plot_style.use_style():
        captions = [text.get_text() for text in kl_over_bytes(results(rows)).texts]
    assert "(prompt): the codec rounds the prompt, later tokens are fp16." in " ".join(" ".join(captions).split())


def test_series_of_codecs_are_apart() -> None:
    names = [entry.name for entry in group_into_series(ROWS[1:])]
    assert names == ["streaming", "streaming + q8_0", "q8_0", "q4_0"]
