"""The bench: every codec's round trip is checked, and the figures derived are what they say."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import kvmnn
from kvmnn import bench
from kvmnn.bench import ArrayBenchReport, CodecBenchResult, Timing, benchmark, codecs
from kvmnn.bench.codecs import BenchCodec
from kvmnn.cli.entry_point import main

KEYS = np.random.default_rng(4).standard_normal((64, 64)).astype(np.float16)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_bench_codec_every_installed_codec_round_trips(dtype):
    data = KEYS.view(np.uint8).ravel()
    found, missing = codecs.find_installed_codecs(dtype, 1)
    for codec in found + codecs.make_kvmnn_codecs(dtype, 1, with_max=True):
        back = codec.decode(codec.encode(data))
        assert benchmark._is_same(back, data), codec.name
        assert codec.version
    assert set(missing) <= {"lz4", "blosc2", "bitshuffle", "pcodec", "zipnn"}


def test_bench_result_break_even_rate_follows_from_times():
    second = Timing(wall=1.0, cpu=1.0)
    result = CodecBenchResult("x", "1", 100, 50, encode=second, decode=second)
    assert result.ratio == 2
    # 2 s of work save 50 of 100 bytes: at 25 bytes per second sending them takes as long
    assert result.break_even == pytest.approx(25)
    bandwidth = result.break_even
    assert 2 + 50 / bandwidth == pytest.approx(100 / bandwidth)
    assert CodecBenchResult("x", "1", 100, 101, encode=second, decode=second).break_even is None
    slow = Timing(second.wall, second.cpu, wall_p95=2 * second.wall)
    assert CodecBenchResult("x", "1", 100, 50, encode=slow, decode=slow).break_even_p95 == pytest.approx(
        (1 - 1 / 2) * 100 / (4 * second.wall)
    )
    assert CodecBenchResult("x", "1", 100, 50, encode=second, decode=second).break_even_p95 is None


def test_bench_failing_codec_is_a_row_of_the_table(tmp_path, capsys, monkeypatch):
    def broken(data):
        raise RuntimeError("no luck")

    liars = [BenchCodec("liar", "1", bytes, lambda made: made[::-1]), BenchCodec("broken", "1", broken, bytes)]
    monkeypatch.setattr(codecs, "find_installed_codecs", lambda dtype, threads: (liars, ["absent"]))
    np.save(tmp_path / "k.npy", KEYS)
    assert main(["bench", str(tmp_path / "k.npy"), "--repeats", "1"]) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "failed: KvmnnError: the round trip changed the data" in lines["liar"]
    assert "failed: RuntimeError: no luck" in lines["broken"]
    assert "not measured, as they are not installed: absent (pip install absent)" in lines
    assert {"kvmnn exact", "kvmnn balanced", "kvmnn fast", "kvmnn max"} <= set(lines)


def test_bench_json_has_every_codec(tmp_path, capsys):
    np.save(tmp_path / "k.npy", KEYS)
    assert main(["bench", str(tmp_path / "k.npy"), "--repeats", "1", "--sample-bytes", "4K", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["arrays"]
    assert (report["array_bytes"], report["sample_bytes"], report["dtype"]) == (8192, 4096, "fp16")
    exact = report["results"][0]
    assert exact["codec"] == "kvmnn exact"
    assert exact["ratio"] == pytest.approx(4096 / exact["stored_bytes"])
    assert exact["encode_bytes_per_s_wall"] == pytest.approx(4096 / exact["encode"]["wall"])


def test_compare_gives_slow_codecs_fewer_turns_by_default(tmp_path, monkeypatch):
    np.save(tmp_path / "k.npy", KEYS)
    monkeypatch.setattr(benchmark, "MAX_CODEC_SECONDS", 1e-9)
    source = kvmnn.open(tmp_path / "k.npy")
    calls: list[int] = []
    (report,) = bench.compare(source, progress=calls.append).arrays
    assert sum(calls) == bench.count_runs(source, None, 1)
    assert {result.rounds for result in report.results if result.encode} == {1}
    assert "kvmnn exact: of 1 turn: more than" in str(report)
    (report,) = bench.compare(source, repeats=2).arrays
    assert {result.rounds for result in report.results} == {None}


def test_bench_compare_equals_the_command(tmp_path, capsys):
    np.save(tmp_path / "k.npy", KEYS)
    source = kvmnn.open(tmp_path / "k.npy")
    calls: list[int] = []
    found = bench.compare(source, repeats=1, progress=calls.append)
    assert sum(calls) == bench.count_runs(source, 1, 1)
    assert main(["bench", str(tmp_path / "k.npy"), "--repeats", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    document = found.to_dict()
    assert {"verb", "command", *document} == set(said)
    assert set(document["arrays"][0]["results"][0]) == set(said["arrays"][0]["results"][0])
    assert str(found).startswith("k: fp16, 8,192 bytes; order-0 entropy of its bytes would give ratio ")
    assert all(result.version != "unknown" for result in found.arrays[0].results)


def test_bench_result_small_array_has_no_rate():
    second = Timing(cpu=1.0, wall=1.0)
    small, large = (
        str(CodecBenchResult("x", "1", size, size // 2, encode=second, decode=second)) for size in (1000, 1 << 20)
    )
    assert small.split() == ["x", "2.0000", "-", "-", "-", "-", "-"]
    assert large.split() == ["x", "2.0000", "1", "1", "1", "1", "0.3"]
    assert len(small) == len(large)


def test_bench_pareto_front_has_undominated_codecs():
    def result(codec: str, stored: int, encode: float, decode: float, raw: int = 1 << 20) -> CodecBenchResult:
        return CodecBenchResult(codec, "1", raw, stored, encode=Timing(9.0, encode), decode=Timing(9.0, decode))

    failed = CodecBenchResult("failed", "1", 1 << 20, 0, encode=None, decode=None, error="no")
    results = [
        result("small", 100, 5.0, 1.0),
        result("quick", 200, 1.0, 1.0),
        result("slower", 200, 1.5, 1.0),
        result("large", 300, 6.0, 1.0),
        result("equal", 200, 1.0, 1.0),
        result("part", 300, 9.0, 9.0, raw=1 << 19),
        failed,
    ]
    report = ArrayBenchReport("k", "fp16", 1 << 20, 1 << 20, None, 1, tuple(results), ())
    assert report.find_dominated() == {"slower": "quick", "large": "small"}
    assert [one["dominated_by"] for one in report.to_dict()["results"]] == [
        None,
        None,
        "quick",
        "small",
        None,
        None,
        None,
    ]
    assert "large: dominated by small (ratio, CPU time both ways)" in str(report).splitlines()
    assert "dominated" not in str(replace(report, sample_bytes=1000))


def test_bench_totals_are_sums_over_all_arrays(tmp_path, capsys, monkeypatch):
    """So that small arrays, which have no speeds of their own, have them together."""
    monkeypatch.setattr(codecs, "find_installed_codecs", lambda dtype, threads: ([], []))
    halves = np.tile(np.random.default_rng(1).standard_normal((2, 3000)).astype(np.float16), 100)  # quick to compress
    np.savez(tmp_path / "kv.npz", a=halves[0], b=halves[1])
    report = bench.compare(kvmnn.open(tmp_path / "kv.npz"), repeats=1)
    total = next(result for result in report.totals if result.codec == "kvmnn fast")
    parts = [result for array in report.arrays for result in array.results if result.codec == total.codec]
    assert total.raw_bytes == halves.nbytes and total.stored_bytes == sum(part.stored_bytes for part in parts)
    assert total.encode.wall == pytest.approx(sum(part.encode.wall for part in parts))
    assert report.to_dict()["totals"][0]["raw_bytes"] == halves.nbytes
    block = str(report).split("\n\n")[2].splitlines()
    assert block[0].startswith("All 2 arrays, sums of bytes and of times") and str(total) in block
    assert " - " not in str(total) and " - " in str(parts[0])
    np.save(tmp_path / "k.npy", halves[0])
    assert "All 1" not in str(bench.compare(kvmnn.open(tmp_path / "k.npy"), repeats=1))


def test_bench_damaged_array_is_refused(tmp_path, capsys):
    words = np.arange(3000, dtype=np.uint16).view(np.float16)
    np.savez(tmp_path / "x.npz", words)
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[data.index(words.tobytes()) + 1000] ^= 1
    (tmp_path / "x.npz").write_bytes(data)
    assert main(["bench", str(tmp_path / "x.npz"), "--repeats", "1"]) == 1
    assert "the data does not match its checksum" in " ".join(capsys.readouterr().err.split())


def test_bench_max_on_sample_also_measures_exact_on_it(tmp_path, capsys, monkeypatch):
    """So that no ratio stands next to one of other bytes."""
    monkeypatch.setattr(benchmark, "MAX_EFFORT_SAMPLE_BYTES", 1024)
    monkeypatch.setattr(codecs, "find_installed_codecs", lambda dtype, threads: ([], []))
    np.save(tmp_path / "k.npy", KEYS)
    source = kvmnn.open(tmp_path / "k.npy")
    turns: list[int] = []
    (report,) = bench.compare(source, repeats=1, progress=turns.append).arrays
    sizes = {result.codec: result.raw_bytes for result in report.results}
    assert sizes["kvmnn exact, first MiB"] == sizes["kvmnn max, first MiB"] == 1024
    assert {size for name, size in sizes.items() if not name.endswith("MiB")} == {report.sample_bytes}
    assert sum(turns) == bench.count_runs(source, 1, 1)
    (report,) = bench.compare(source, repeats=1, with_max=True).arrays
    assert {result.raw_bytes for result in report.results} == {report.sample_bytes}


def test_bench_result_slow_rate_is_not_zero():
    second = Timing(wall=10.0, cpu=40.0)
    line = str(CodecBenchResult("x", "1", 1 << 22, 1 << 21, encode=second, decode=second))
    assert line.split()[2:6] == ["0.1", "0.4", "0.1", "0.4"]
