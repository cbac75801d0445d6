"""Break-even of codecs and of stored prefixes: the numbers against their definitions, and the verbs that print them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transform_samples
from linear_samples import make_cache, make_profile

from kvmnn import LayerCache
from kvmnn.dense.rope import RopeConfig
from kvmnn.errors import OptionError, SourceError
from kvmnn.reports.break_even import BreakEvenReport, CodecTimes, EngineTimes, compute_break_even
from kvmnn.store import PrefixStore
from kvmnn.store.tier_times import measure_codec_times

TIMES = CodecTimes(
    codec="dense", raw_bytes=10_000, stored_bytes=8_000, encode_p50=2.0, encode_p95=3.0, decode_p50=1.0, decode_p95=4.0
)
ENGINE = EngineTimes(computed={"100": 1.0, "200": 3.0}, loaded={"100": 0.1, "200": 0.2})


def test_codec_limits_are_saved_bytes_over_seconds() -> None:
    limits = (TIMES.read_limit, TIMES.read_limit_p95, TIMES.round_trip_limit, TIMES.round_trip_limit_p95)
    assert limits == (2000.0, 500.0, 2000 / 3, 2000 / 7)
    for link in (1999.0, 2001.0):  # fetching stored bytes and decoding them, or fetching raw bytes
        assert (8_000 / link + 1.0 < 10_000 / link) == (link < limits[0])


def test_codec_without_gain_never_pays() -> None:
    grown = CodecTimes.from_dict({**TIMES.to_dict(), "stored_bytes": 10_001})
    assert grown.read_limit is None and grown.round_trip_limit_p95 is None
    assert "never" in str(compute_break_even([grown]))


def test_engine_times_go_through_measured_points() -> None:
    assert [ENGINE.predict_computed(n) for n in (100, 200)] == [1.0, 3.0]
    assert ENGINE.predict_computed(150) == pytest.approx(150 * 0.0125)  # seconds per token lie on a line
    assert ENGINE.predict_loaded(150) == pytest.approx(0.15)
    quadratic = EngineTimes(computed={str(n): 1e-3 * n + 2e-6 * n * n for n in (256, 512, 2048)})
    for tokens in (300, 1024, 1536, 3000):
        assert quadratic.predict_computed(tokens) == pytest.approx(1e-3 * tokens + 2e-6 * tokens * tokens)
    assert EngineTimes.from_speed(50).predict_computed(1000) == pytest.approx(20.0)


def test_prefix_prediction_adds_link_decoding_and_engine() -> None:
    report = compute_break_even([TIMES], token_bytes=10.0, engine=ENGINE, link=500.0, lengths=(101, 1000))
    row, raw_row = report.prefixes  # 1,000 tokens are more than twice the longest that was timed
    assert (raw_row.codec, raw_row.tokens, raw_row.stored_bytes) == ("raw", 101, 1000)
    assert raw_row.stored_seconds == pytest.approx(1000 / 500 + ENGINE.predict_loaded(101))
    assert (row.tokens, row.stored_bytes) == (101, 800)
    assert row.stored_seconds == pytest.approx(800 / 500 + 0.1 + ENGINE.predict_loaded(101))
    assert row.is_loading_faster == (row.stored_seconds < row.computed_seconds) is False
    at_limit = compute_break_even([TIMES], token_bytes=10.0, engine=ENGINE, link=row.min_link, lengths=(101,))
    assert at_limit.prefixes[0].stored_seconds == pytest.approx(row.computed_seconds)


def test_first_tokens_are_where_loading_begins_to_be_faster() -> None:
    slow_start = CodecTimes.from_dict({**TIMES.to_dict(), "decode_p50": 0.6, "decode_base": 0.5})
    report = compute_break_even([slow_start], token_bytes=10.0, engine=ENGINE)
    first = report.first_tokens["dense"]
    assert f"dense from {first} tokens on, raw from" in report.list_notes()[1]
    unknown = compute_break_even([TIMES], token_bytes=10.0, engine=ENGINE)
    assert "token on (without the fixed time of a get)" in unknown.list_notes()[1].replace("tokens", "token")
    lengths = (first - 1, first)
    rows = compute_break_even([slow_start], token_bytes=10.0, engine=ENGINE, lengths=lengths).prefixes
    assert [row.is_loading_faster for row in rows if row.codec == "dense"] == [False, True]
    assert not compute_break_even([TIMES], token_bytes=10.0, engine=ENGINE, link=1.0).first_tokens


def test_report_survives_its_document() -> None:
    report = compute_break_even([TIMES], token_bytes=10.0, engine=ENGINE, link=5e3)
    assert BreakEvenReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    with pytest.raises(OptionError, match="more than 0"):
        compute_break_even([TIMES], link=0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "computed"),
        ('{"computed": {}}', "is empty"),
        ('{"computed": {"-5": 1}}', "no number of tokens"),
        ('{"computed": {"5": 0}}', "expected some above 0"),
        ('{"computed": {"5": "1"}}', "a number"),
        ('{"computed": {"5": 1}, "loaded": {"0": 1}}', "no number of tokens"),
        ("[", "JSON"),
    ],
)
def test_engine_times_damaged_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(SourceError, match=message):
        EngineTimes.read(path)


def _make_layers(tokens: int) -> list[LayerCache]:
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((2, 2, tokens, 16)).astype(np.float16)
    return [LayerCache(layer=0, keys=rows[0], values=rows[1])]


def test_measured_times_are_of_what_the_store_does(tmp_path: Path) -> None:
    layers = _make_layers(200)
    times = measure_codec_times(layers, codecs=("frames",))[0]
    with PrefixStore(tmp_path / "s", codec="frames") as store:
        stored_bytes = store.put(range(200), layers, model="m").stored_bytes
    assert (times.raw_bytes, times.stored_bytes) == (2 * 2 * 200 * 16 * 2, stored_bytes)
    assert 0 < times.decode_p50 <= times.decode_p95 and 0 < times.encode_p50 <= times.encode_p95
    assert 0 <= times.decode_base <= times.decode_p50


@pytest.mark.parametrize("codec", ["profile", "transform"])
def test_stat_of_store_by_profile_times_its_own_codec(run: Any, tmp_path: Path, codec: str) -> None:
    geometry = transform_samples.create_geometries(2, 2, 8, 8, RopeConfig(10000.0, 8))
    profile = transform_samples.create_profile(geometry) if codec == "transform" else make_profile()
    profile.write(tmp_path / "p.kvmp")
    layers = make_cache(150, "fp16", seed=3)
    if codec == "transform":
        layers = transform_samples.create_caches(5, 150, geometry)
    options = {"kl": 0.01} if codec == "transform" else {"below": 1}
    with PrefixStore(tmp_path / "s", codec=codec, profile=tmp_path / "p.kvmp", codec_options=options) as store:
        stored_bytes = store.put(range(150), layers, model="m").stored_bytes
        assert store.profile is not None and store.profile.key == profile.key and store.codec_options == options
    report = json.loads(run("store", "stat", str(tmp_path / "s"), "--speed", "load=1M", "--json").out)["break_even"]
    assert [row["codec"] for row in report["codecs"]] == [codec, "dense", "frames"]
    if codec == "profile":  # of the same words and options the store's own bytes
        assert report["codecs"][0]["stored_bytes"] == stored_bytes
    assert bool(report.get("notes")) == (codec == "transform")
    untimed = "transform" if codec == "profile" else "profile"
    text = " ".join(BreakEvenReport.from_dict(report).list_notes())
    assert f"without the profile of a model: {untimed} (" in text and ("LOSSY store" in text) == (codec == "transform")


def test_bench_measure_and_stat_print_break_even_and_report_shows_it(run: Any, tmp_path: Path) -> None:
    layers = _make_layers(200)
    arrays = {"layer_0.key": layers[0].keys, "layer_0.value": layers[0].values}
    np.savez(tmp_path / "kv.npz", **arrays)
    with PrefixStore(tmp_path / "s") as store:
        store.put(range(200), layers, model="m")
    (tmp_path / "times.json").write_text(json.dumps({"computed": {"100": 1.0, "200": 2.5}, "loaded": {"100": 0.01}}))
    speed = f"prefill={tmp_path / 'times.json'},load=1M"
    results = tmp_path / "results"
    results.mkdir()
    commands = {
        "bench": ["bench", str(tmp_path / "kv.npz"), "--repeats", "1"],
        "measure": ["measure", str(tmp_path / "kv.npz"), "--no-limits"],
        "stat": ["store", "stat", str(tmp_path / "s")],
    }
    for name, command in commands.items():
        document = json.loads(run(*command, "--speed", speed, "--json").out)
        (results / f"{name}.json").write_text(json.dumps(document))
        report = BreakEvenReport.from_dict(document["break_even"])
        assert report.link == 1 << 20
        assert "profile of a model: profile and transform (kvmnn bench" in report.list_notes()[0]
        assert {row.tokens for row in report.prefixes} == {64, 256}
        assert all(row.is_loading_faster for row in report.prefixes if row.codec in ("dense", "kvmnn dense"))
    assert "break_even" not in json.loads(run("store", "stat", str(tmp_path / "s"), "--json").out)
    run("report", str(results), "-o", str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text().count("time to the first token, predicted</caption>") == 3
    assert (
        "no file"
        in run(*("store", "simulate", "t", "--model-shape", "1x1x1", "--size", "1M", "--speed", speed), code=2).err
    )
    with PrefixStore(tmp_path / "none"):
        pass
    assert "there is none" in run("store", "stat", str(tmp_path / "none"), "--speed", "load=1M", code=1).err
    assert "is not for" in run("measure", str(tmp_path / "kv.npz"), "--to-fp16", "--speed", "load=1M", code=2).err
