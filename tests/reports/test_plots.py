"""Plots of an evaluation: what is drawn, what is omitted, and that equal results give equal files."""

from __future__ import annotations

import hashlib
import itertools
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_results import BUDGETS, document, results, row
from repository import SUPPORT

from kvmnn.errors import KvmnnError, MissingDependencyError, OutputError
from kvmnn.evaluation.presets import expand_preset
from kvmnn.reports import figures, plot_style, plots, series
from kvmnn.reports.plot_style import PointLabel, label_points
from kvmnn.reports.records import DocumentTrace, FullCacheDifference, KeepMap


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return plots.write_plots(document(), tmp_path_factory.mktemp("plots") / "new")


@pytest.mark.slow
def test_write_plots_writes_all_as_png_and_svg(written: list[Path]) -> None:
    not_drawn = ("improvement_summary", "kl_over_bytes")  # the sample has no ablation and no divergences
    drawn = [name for name in plots.DRAW_FUNCTIONS if name not in not_drawn]
    assert [path.name for path in written] == [f"{name}.{kind}" for name in drawn for kind in ("png", "svg")]
    assert len(plots.DRAW_FUNCTIONS) == 9
    for path in written:
        head = path.read_bytes()[:200]
        assert head.startswith(b"\x89PNG\r\n" if path.suffix == ".png" else b"<?xml"), path
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(path.name for path in written)


@pytest.mark.slow
def test_write_plots_equal_results_give_equal_svg(written: list[Path], tmp_path: Path) -> None:
    """In another process, with any settings of matplotlib, which stay unchanged."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from lm_results import document; "
        "from kvmnn.reports import plots; import matplotlib; "
        "matplotlib.rcParams.update({'figure.facecolor': 'red', 'font.size': 30, 'svg.hashsalt': 'other'}); "
        "plots.write_plots(document(), sys.argv[2], options=plots.PlotOptions(kinds=('svg',))); "
        "assert matplotlib.rcParams['font.size'] == 30 and 'matplotlib.pyplot' not in sys.modules"
    )
    tests = str(SUPPORT)
    subprocess.run([sys.executable, "-c", code, tests, str(tmp_path / "again")], check=True, timeout=120)
    for path in (path for path in written if path.suffix == ".svg"):
        ours, again = (hashlib.sha256(p.read_bytes()).hexdigest() for p in (path, tmp_path / "again" / path.name))
        assert ours == again, path.name
        assert b"<dc:date>" not in path.read_bytes()


def test_write_plots_existing_file_needs_force(tmp_path: Path) -> None:
    whole = [entry for entry in document().rows if entry.budget is None]
    made = results([*whole, row("streaming 4", "streaming", budget=4, perplexity=20.0, nll=3.0)])
    (tmp_path / "perplexity_over_budget.svg").write_text("mine")
    with pytest.raises(OutputError, match=r"perplexity_over_budget\.svg: exists already"):
        plots.write_plots(made, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["perplexity_over_budget.svg"]
    plots.write_plots(made, tmp_path, force=True)
    assert (tmp_path / "perplexity_over_budget.svg").read_text() != "mine"


def test_write_plots_without_data_reports_skip_reasons(tmp_path: Path) -> None:
    rows = [
        row("full", "full", perplexity=8.0, nll=2.0),
        row("streaming 4", "streaming", budget=4, perplexity=9.0, nll=2.2),
    ]
    left_out: dict[str, str] = {}
    made = plots.write_plots(results(rows), tmp_path / "new", skip_reasons=left_out)
    assert {path.stem for path in made} == {"perplexity_over_budget", "strategy_comparison"}
    assert left_out == {
        "accuracy_over_budget": "no policy with a budget has a measured accuracy",
        "perplexity_accuracy_tradeoff": "no policy has both a perplexity and an accuracy",
        "keep_ratio_analysis": "no policy ran with two values of recent_ratio or keep_ratio and all else equal",
        "improvement_summary": "no two rows differ in an improvement of l2_compress only (--preset knorm-ablation)",
        "memory_over_time": "no run recorded the bytes of its cache",
        "keep_map": "no run that cuts the cache recorded which tokens live",
        "kl_over_bytes": "no row has a divergence from the full cache after a cut",
    }


def test_write_plots_without_any_plot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvmnnError, match="nothing to plot: perplexity_over_budget: no policy"):
        plots.write_plots(results([row("full", "full", perplexity=8.0)]), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_write_plots_without_matplotlib_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match="package matplotlib: pip install matplotlib"):
        plots.write_plots(document(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ({"perplexity": math.nan}, {"perplexity": math.inf}, {"versus_full": None}, {"budget": 0}),
        ({"perplexity": 5000.0}, {"accuracy": None}, {"options": {"$a_$\\bad": "x" * 200}}),
    ],
    ids=["NaN and infinity", "extreme"],
)
def test_write_plots_odd_values_draw_without_warning(changes: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    rows = list(document().rows)
    for place, change in enumerate(changes, 2):
        rows[place] = replace(rows[place], **change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = plots.PlotOptions(kinds=("svg",))
        assert plots.write_plots(replace(document(), rows=tuple(rows)), tmp_path / "new", options=options)


def test_line_styles_of_24_policies_are_distinct() -> None:
    looks = [tuple(sorted(plot_style.make_line_style(index).items())) for index in range(24)]
    assert len(set(looks)) == 24


# -- series -----------------------------------------------------------------------------------------------------------


def test_series_ignore_options_derived_from_the_budget() -> None:
    rows = [row(f"h2o {b}", "h2o_decayed", budget=b, options={"sink": 4, "recent": b // 2}) for b in BUDGETS]
    (only,) = series.group_into_series(rows)
    assert (only.name, only.rows) == ("h2o_decayed", rows)


def test_series_split_by_options_differing_at_one_budget() -> None:
    rows = [
        row("a", "l2_fixed", budget=64, options={"strategy": "keep_high"}),
        row("b", "l2_fixed", budget=64),  # keep_low by default
        row("c", "l2_fixed", budget=32, options={"strategy": "keep_low", "budget": 32}),
        row("d", "l2_fixed", budget=32, options={"strategy": "keep_low", "budget": 32}, positions="stored"),
    ]
    found = {entry.name: [r.label for r in entry.rows] for entry in series.group_into_series(rows)}
    assert found == {
        "l2_fixed keep_high": ["a"],
        "l2_fixed keep_low": ["b", "c"],
        "l2_fixed keep_low stored positions": ["d"],
    }


def test_series_join_options_with_equal_budget_fraction() -> None:
    rows = [row(f"{b}", "h2o_decayed", budget=b, options={"recent": b // 2}) for b in BUDGETS]
    rows += [row(f"{b} fixed", "h2o_decayed", budget=b, options={"recent": 32}) for b in BUDGETS]
    found = {entry.name: len(entry.rows) for entry in series.group_into_series(rows)}
    assert found == {"h2o_decayed recent=50%": 3, "h2o_decayed recent=32": 3}


def test_series_of_indistinguishable_rows_use_their_labels() -> None:
    rows = [row("one", "streaming", budget=8), row("two", "streaming", budget=8, preset="p")]
    assert [entry.name for entry in series.group_into_series(rows)] == ["streaming", "two"]


def test_series_do_not_split_by_ignored_options() -> None:
    rows = [row(str(x), "l2_fixed", budget=8, options={"recent_ratio": x}) for x in (0.1, 0.2)]
    assert len(series.group_into_series(rows)) == 2
    assert len(series.group_into_series(rows, ignored_options=("recent_ratio",))) == 1


def test_series_intervals_are_differences_around_the_value() -> None:
    versus = FullCacheDifference(
        documents=2, level=0.95, nll=0.1, low=0.05, high=0.2, accuracy=-0.02, accuracy_low=-0.03, accuracy_high=0.0
    )
    entry = row("a", "streaming", perplexity=10.0, accuracy=0.5, versus_full=versus)
    ppl, hits = series.perplexity(entry, 1), series.accuracy(entry, 1)
    assert (ppl.y, hits.y) == (10.0, 50.0)
    assert ppl.low == pytest.approx(10 * math.exp(-0.05)) and ppl.high == pytest.approx(10 * math.exp(0.1))
    assert hits.low == pytest.approx(49.0) and hits.high == pytest.approx(52.0)
    alone = row("a", "streaming", perplexity=10.0, versus_full=replace(versus, low=None))
    assert series.perplexity(alone, 1).low is None


def test_series_treat_sinks_as_counts_not_fractions() -> None:
    """streaming-h2o has 4 of 256, 8 of 256 and 8 of 512; the first and the last are equal fractions by accident."""
    made = expand_preset("streaming-h2o")[1:]
    rows = [row(c.label, c.policy, budget=c.options["budget"], options=dict(c.options)) for c in made]
    found = {entry.name: [r.label for r in entry.rows] for entry in series.group_into_series(rows)}
    assert found == {
        "streaming": ["streaming_8_256", "streaming_8_512"],
        "h2o_tokens sink=4": ["h2o_4_32_256"],
        "h2o_tokens sink=8": ["h2o_8_32_256", "h2o_8_64_512"],
    }
    # 264 and 520 tokens of streaming are compared with 256 and 512 of H2O
    assert figures._group_similar_budgets(series.group_into_series(rows)) == [(256, 264), (512, 520)]


def test_group_similar_budgets_splits_budgets_of_one_series() -> None:
    rows = [row(str(b), "streaming", budget=b) for b in (0, 100, 103, 200)]
    assert figures._group_similar_budgets(series.group_into_series(rows)) == [(0,), (100,), (103,), (200,)]


def test_thin_ticks_do_not_touch() -> None:
    assert figures.thin_ticks([128, 256, 264, 512, 520], 1.2) == [128, 256, 512]


# -- parts ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1, 2), max_size=12), st.floats(0.001, 0.08))
def test_spread_positions_keeps_gap_and_bounds(places: list[float], gap: float) -> None:
    found = plot_style.spread_positions(sorted(places), gap)
    assert len(found) == len(places)
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(found))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in found)


@pytest.mark.parametrize("place", [(0, 0.5), (1, 0.5), (0.5, 0), (0.5, 1), (0, 0), (1, 1)])
def test_label_points_at_the_edge_stay_in_the_plot(place: tuple[float, float]) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure(figsize=(4, 3)).subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    label_points(axes, [PointLabel(*place, "1,024", "black")])
    axes.figure.draw_without_rendering()
    box, text = axes.get_window_extent(), axes.texts[0].get_window_extent()
    assert box.x0 <= text.x0 and text.x1 <= box.x1 and box.y0 <= text.y0 and text.y1 <= box.y1


def test_spread_positions_moves_only_crowded_labels() -> None:
    assert plot_style.spread_positions([0.1, 0.4, 0.9], 0.1) == pytest.approx([0.1, 0.4, 0.9])
    assert plot_style.spread_positions([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])


def test_keep_map_image_shows_live_and_evicted_cells() -> None:
    recorded = KeepMap(layer=0, kv_head=0, steps=(1, 2, 3, 4), kept=((0,), (0, 1), (0, 2), (0, 3)))
    image, tokens = figures._make_keep_image(recorded)
    live, gone, unseen = 0, 1, 2
    assert tokens == 4
    assert image.T.tolist() == [
        [live, unseen, unseen, unseen],
        [live, live, unseen, unseen],
        [live, gone, live, unseen],
        [live, gone, gone, live],
    ]


def test_keep_map_image_of_long_document_is_bounded() -> None:
    steps = tuple(range(1000, 100_001, 1000))
    kept = tuple(tuple(range(seen - 500, seen)) for seen in steps)
    image, tokens = figures._make_keep_image(KeepMap(layer=0, kv_head=0, steps=steps, kept=kept))
    assert tokens == 100_000 and image.shape == (400, 400)
    assert set(image[:, -1].tolist()) == {0, 1}


def test_keep_map_caption_names_all_rows_without_a_panel() -> None:
    steps = tuple(range(1, 21))
    windows = {f"streaming {size}": tuple(tuple(range(max(0, n - size), n)) for n in steps) for size in range(1, 12)}
    windows["streaming 3 + q8_0"] = windows["streaming 3"]
    windows["q8_0"] = tuple(tuple(range(n)) for n in steps)
    rows = [row(label, label.split()[0], perplexity=9.0) for label in ("full", *windows)]
    traces = [
        DocumentTrace(
            label=label,
            document="a.txt",
            step_tokens=steps,
            cache_bytes=steps,
            keep_map=KeepMap(layer=0, kv_head=0, steps=steps, kept=kept),
        )
        for label, kept in {"full": windows["q8_0"], **windows}.items()
    ]
    made = figures.keep_map(replace(results(rows), traces=tuple(traces)))
    assert [axes.get_title() for axes in made.axes] == [f"streaming {size}" for size in range(1, 10)]
    assert " ".join(made.texts[-1].get_text().split()) == (
        "Coloured: live. Grey: evicted. Document: a.txt. As streaming 3: streaming 3 + q8_0. "
        "Not shown: streaming 10, streaming 11. Nothing evicted: q8_0."
    )


# -- looks ------------------------------------------------------------------------------------------------------------


def colours_of(made: Any) -> dict[str, str]:
    """The colour of the sample next to each name right of a plot."""
    found = {}
    for axes in made.axes:
        height = {round(line.get_ydata()[0], 9): line for line in axes.lines if line.get_transform() == axes.transAxes}
        for text in axes.texts:
            line = height.get(round(text.get_position()[1], 9))
            if line is not None:
                found[text.get_text()] = line.get_color()
    return found


@pytest.mark.slow
def test_policy_has_one_colour_in_all_figures() -> None:
    sample = document()
    looks = series.LineStyles(sample.rows)
    expected = {
        name: looks.get_style(label)["color"]
        for name, label in (
            ("streaming", "streaming 128"),
            ("keep_low", "l2_fixed 128 keep_low"),
            ("random", "l2_fixed 128 random"),
            ("h2o_decayed_heads", "h2o_decayed_heads 128"),
            ("h2o_tokens", "h2o_8_32_256"),
        )
    }
    assert len(set(expected.values())) == 5
    seen = dict.fromkeys(expected, 0)
    for draw in [
        draw for name, draw in plots.DRAW_FUNCTIONS.items() if name not in ("improvement_summary", "kl_over_bytes")
    ]:
        for text, colour in colours_of(draw(sample)).items():
            for name, wanted in expected.items():
                if name in text:
                    assert colour == wanted, (draw.__name__, text)
                    seen[name] += 1
    assert seen["streaming"] == 4 and seen["keep_low"] > 10, seen
    bars = figures.strategy_comparison(sample)
    assert {tuple(bar.get_facecolor()[:3]) for axes in bars.axes for bar in axes.patches} == {
        plot_style_rgb(colour) for colour in expected.values()
    }
    maps = figures.keep_map(sample)
    shown = [axes.images[0].cmap(0)[:3] for axes in maps.axes]
    assert shown == [plot_style_rgb(expected["streaming"]), plot_style_rgb(expected["h2o_decayed_heads"])]


def plot_style_rgb(colour: str) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return to_rgb(colour)


def test_policy_colour_is_independent_of_other_rows() -> None:
    rows = [row(f"l2_ratio {x}", "l2_ratio", keep_ratio=x, perplexity=9.0) for x in (0.5, 0.8)]  # in some figures only
    sample = replace(document(), rows=(document().rows[0], *rows, *document().rows[1:]))
    lines = colours_of(figures.perplexity_over_budget(sample))
    assert (
        lines["streaming"]
        == series.LineStyles(sample.rows).get_style("streaming 128")["color"]
        == plot_style.make_line_style(1)["color"]
    )


def test_line_styles_of_variants_share_colour_and_differ() -> None:
    found = [plot_style.make_line_style(index, variant) for index in range(9) for variant in range(4)]
    assert len({tuple(sorted(entry.items())) for entry in found}) == 36
    assert len({plot_style.make_line_style(3, variant)["color"] for variant in range(4)}) == 1


# -- axes -------------------------------------------------------------------------------------------------------------


@given(st.floats(0.5, 1e5), st.floats(3, 1e4))
def test_log_ticks_are_4_to_12_within_the_range(low: float, factor: float) -> None:
    ticks = figures.compute_log_ticks(low, low * factor)
    assert 4 <= len(ticks) <= 12
    assert all(low <= tick <= low * factor for tick in ticks)


def test_perplexities_far_apart_get_log_axis_with_ticks() -> None:
    rows = [row("full", "full", perplexity=9.0)]
    rows += [row(f"s {b}", "streaming", budget=b, perplexity=9.5 + 2000 / b) for b in (16, 64, 256)]
    (axes,) = figures.perplexity_over_budget(results(rows)).axes
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log"
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 5


def test_strategy_comparison_keeps_order_and_names_log_axis() -> None:
    rows = [row("full", "full", perplexity=9.0)]
    costs = {"streaming": 9.3, "recent_only": 60.0, "knorm": 9.1, "h2o_decayed": 9.2}
    rows += [row(f"{name} 64", name, budget=64, perplexity=cost) for name, cost in costs.items()]
    (axes,) = figures.strategy_comparison(results(rows)).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [*costs][::-1]  # the first on top
    assert axes.get_xlabel() == "relative perplexity change (%)\nlogarithmic beyond 10 %"
    rows[2] = replace(rows[2], perplexity=9.4)
    (axes,) = figures.strategy_comparison(results(rows)).axes
    assert axes.get_xlabel() == "relative perplexity change (%)"


def test_tradeoff_points_are_all_labelled() -> None:
    sample = document()
    (axes,) = figures.perplexity_accuracy_tradeoff(sample).axes
    numbers = [text for text in axes.texts if text.get_text().isdigit()]
    assert len(numbers) == len(sample.rows) - 1
    assert {text.get_text() for text in numbers} == {str(budget) for budget in BUDGETS}


def test_add_caption_of_many_short_words_is_inside_the_figure() -> None:
    from matplotlib.figure import Figure

    made = Figure(figsize=(10.25, 4), dpi=150)
    plot_style.add_caption(made, "h2o 1 + q8_0, " * 60)
    box = laid_out(made).texts[-1].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= made.bbox.width


def laid_out(made: Any) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(made).draw()
    return made


def one_policy() -> Any:
    sample = document()
    return replace(sample, rows=(sample.rows[0], sample.rows[1]), traces=sample.traces[:1])


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["one policy", "all"])
def test_captions_stay_inside_figures_and_off_the_axes(rows: str) -> None:
    sample = document() if rows == "all" else one_policy()
    for draw in plots.DRAW_FUNCTIONS.values():
        try:
            made = laid_out(draw(sample))
        except figures.NothingToShowError:
            continue
        for text in made.texts:
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= made.bbox.width and box.y0 >= 0, draw.__name__
            for label in (axes.xaxis.label for axes in made.axes):
                assert not label.get_text() or label.get_window_extent().y0 > box.y1, draw.__name__


@pytest.mark.parametrize("draw", [figures.strategy_comparison, figures.keep_ratio_analysis, figures.keep_map])
def test_panels_are_inside_their_figure_and_disjoint(draw: Any) -> None:
    boxes = [axes.get_position() for axes in draw(document()).axes]
    assert len(boxes) > 1
    for box in boxes:
        assert 0 <= box.x0 < box.x1 <= 1 and 0 <= box.y0 < box.y1 <= 1
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_keep_ratios_without_budget_are_one_line() -> None:
    rows = [
        row(f"l2_ratio {x}", "l2_ratio", options={"keep_ratio": x}, keep_ratio=x, perplexity=9.0) for x in (0.5, 0.8)
    ]
    (axes,) = figures.keep_ratio_analysis(results(rows)).axes
    assert axes.get_xlabel() == "share kept" and list(axes.get_xticks()) == [0.5, 0.8]


def test_line_names_are_right_of_their_samples() -> None:
    made = figures.perplexity_over_budget(document())
    (axes,) = made.axes
    samples = [line.get_xdata()[-1] for line in axes.lines if line.get_transform() == axes.transAxes]
    names = [text.get_position()[0] for text in axes.texts if text.get_text() and text.get_text() in colours_of(made)]
    assert len(names) == len(samples) / 2 > 1 and min(names) > max(samples) > 1


def test_tradeoff_labels_avoid_the_star() -> None:
    rows = [row("full", "full", perplexity=9.0, accuracy=0.5)]
    costs = ((256, 9.002, 0.4999), (128, 9.01, 0.4995), (64, 9.05, 0.495), (32, 9.4, 0.48))
    rows += [row(f"s {b}", "streaming", budget=b, perplexity=p, accuracy=a) for b, p, a in costs]
    made = laid_out(figures.perplexity_accuracy_tradeoff(results(rows)))
    for axes in made.axes:
        star = axes.transData.transform((9.0, 50.0))
        for text in (text for text in axes.texts if text.get_text().isdigit()):
            box = text.get_window_extent()
            near = [max(low - at, at - high, 0) for at, low, high in zip(star, box.min, box.max, strict=True)]
            assert max(near) > 5, text.get_text()


def test_tradeoff_crowded_points_get_a_second_panel() -> None:
    rows = [row("full", "full", perplexity=9.0, accuracy=0.5)]
    costs = ((512, 9.1), (256, 9.2), (128, 9.3), (64, 9.5), (32, 30.0))
    rows += [row(f"s {b}", "streaming", budget=b, perplexity=p, accuracy=4.5 / p) for b, p in costs]
    whole, near = figures.perplexity_accuracy_tradeoff(results(rows)).axes
    assert (near.get_title() or near.get_title(loc="left")) == "Near the full cache"
    assert near.get_xlim()[1] < 10 < whole.get_xlim()[1]
    numbers = [{text.get_text() for text in axes.texts if text.get_text().isdigit()} for axes in (whole, near)]
    assert numbers == [{"32"}, {"512", "256", "128", "64"}]
    assert len(figures.perplexity_accuracy_tradeoff(results(rows[:-1])).axes) == 1


def test_memory_over_time_identical_policies_share_a_line() -> None:
    sample = document()
    traces = (sample.traces[0], sample.traces[1], replace(sample.traces[1], label="h2o_decayed_heads 256"))
    made = figures.memory_over_time(replace(sample, traces=traces))
    samples = [
        line for line in made.axes[0].lines if not line.get_clip_on() and line.get_color() != plot_style.INK_COLOUR
    ]
    assert samples and {line.get_linestyle() for line in samples} == {"-"}
    assert "these policies hold the same, their colours take turns" in " ".join(made.texts[0].get_text().split())
    alone = figures.memory_over_time(replace(sample, traces=traces[:2]))
    assert "take turns" not in alone.texts[0].get_text() and "codec" not in alone.texts[0].get_text()


def test_memory_over_time_leaves_codecs_out_and_says_so() -> None:
    sample = document()
    coded = row("q4_0", "full", perplexity=9.0, accuracy=0.4)
    coded = replace(coded, codec="q4_0")
    traces = (sample.traces[0], sample.traces[1], replace(sample.traces[0], label="q4_0"))
    made = figures.memory_over_time(replace(sample, rows=(*sample.rows, coded), traces=traces))
    plain = figures.memory_over_time(replace(sample, traces=traces[:2]))
    assert len(made.axes[0].lines) == len(plain.axes[0].lines)
    assert "Rows with a codec are left out" in made.texts[0].get_text()
    for caption in (made.texts[0].get_text(), plain.texts[0].get_text()):
        assert "Bytes after the cut of a step; the cache peak of tables is before it." in " ".join(caption.split())


def test_find_improvements_measures_each_step_alone() -> None:
    found = [
        row(entry.label, entry.policy, options=entry.list_options(), budget=entry.options.get("budget"),
            keep_ratio=entry.options.get("keep_ratio"), perplexity=ppl, accuracy=ppl / 100)
        for entry, ppl in zip(expand_preset("knorm-ablation"), (9.0, 10.0, 10.1, 10.1, 11.0, 9.9), strict=True)
    ]  # fmt: skip
    steps = figures.find_improvements(found)
    assert [(step.name.split("\n")[0], step.baseline, step.variant) for step in steps] == [
        ("threshold", found[1], found[2]),
        ("order", found[2], found[3]),
        ("hybrid, 512 tokens", found[4], found[5]),
    ]
    made = figures.improvement_summary(results(found))
    widths = [bar.get_width() for bar in made.axes[0].patches]
    assert widths == pytest.approx([100 * (9.9 / 11 - 1), 0.0, 1.0])  # the first on top
    assert [text.get_text() for text in made.axes[0].get_yticklabels()][2] == "threshold\nfrom 512 -> above 512"


# -- files ------------------------------------------------------------------------------------------------------------


PDF_AND_PNG = plots.PlotOptions(kinds=("pdf", "png"))


@pytest.mark.slow
def test_write_plots_as_pdf_and_png_is_reproducible_and_untitled(tmp_path: Path) -> None:
    """Of two figures: matplotlib takes half a second for the fonts of each."""
    rows = [
        row("full", "full", perplexity=8.0, nll=2.0),
        row("streaming 4", "streaming", budget=4, perplexity=9.0, nll=2.2),
    ]
    first, again = (plots.write_plots(results(rows), tmp_path / name, options=PDF_AND_PNG) for name in "ab")
    assert [path.suffix for path in again] == [".pdf", ".png"] * 2
    assert first[0].read_bytes().startswith(b"%PDF")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert all(b"/Type3" not in path.read_bytes() and b"/FontFile2" in path.read_bytes() for path in first[::2])
    made = figures.perplexity_over_budget(document())
    assert made.axes[0].get_title(loc="left") == "Perplexity over budget" or made.axes[0].get_title()
    plot_style.remove_titles(made)
    assert made.axes[0].get_title(loc="left") == made.axes[0].get_title() == ""
    panels = figures.strategy_comparison(document())
    plot_style.remove_titles(panels)
    assert "budget 128 tokens" in (panels.axes[0].get_title(loc="left") + panels.axes[0].get_title())
    for wrong in ((), ("gif",), ("png", "png")):
        with pytest.raises(KvmnnError, match="expected some of png, svg, pdf"):
            plots.PlotOptions(kinds=wrong)


@pytest.mark.slow
def test_write_plots_has_text_that_journals_take(written: list[Path]) -> None:
    """Not outlines; the fonts of PDF are tested above."""
    vector_files = [path for path in written if path.suffix == ".svg"]
    assert len(vector_files) == 7
    assert all(b"<text " in path.read_bytes() for path in vector_files)
