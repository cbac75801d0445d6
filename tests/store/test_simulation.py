"""The simulator of a store: formats of traces, equal hits to a real store, equal figures of equal traces."""

from __future__ import annotations

import io
import json
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from repository import FIXTURES

from kvmnn import LayerCache
from kvmnn.errors import OptionError, SourceError
from kvmnn.store import PrefixStore, unit_codec
from kvmnn.store.backend import STORE_POLICIES
from kvmnn.store.directory import backend as directory_backend
from kvmnn.store.simulation import (
    MeasuredRatio,
    SimulationReport,
    TierSpeed,
    measure_store_ratios,
    parse_model_shape,
    read_trace,
    simulate,
)
from kvmnn.store.simulation.simulator import SIMULATED_POLICIES, simulate_store
from kvmnn.store.simulation.trace import RequestTrace, split_into_blocks

REQUESTS = [250, 10_000] if os.environ.get("KVMNN_ATTACKS") else [250]
SHAPE = parse_model_shape("2x2x64,fp16")


def write_lines(folder: Path, *documents: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in documents) + "\n")
    return path


def mooncake_line(length: int, *hashes: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": list(hashes)}


def make_rows(tokens: int) -> LayerCache:
    """Rows that are those of each block of 4: the size of a unit depends on the number of its tokens only."""
    block = np.random.default_rng(0).integers(0, 1 << 15, (2, 1, 4, 8), dtype=np.uint16).view(np.float16)
    keys, values = np.tile(block, (1, 1, tokens // 4 + 1, 1))[:, :, :tokens]
    return LayerCache(layer=0, keys=keys, values=values)


def random_texts(rng: np.random.Generator, number: int) -> list[list[int]]:
    """Texts that begin as others do, end within blocks, and go on from others."""
    texts: list[list[int]] = []
    for _ in range(number):
        text: list[int] = []
        if texts and rng.random() < 0.7:
            base = texts[rng.integers(max(0, len(texts) - 60), len(texts))]
            text = base[: rng.integers(1, len(base) + 1)] if rng.random() < 0.5 else list(base)
        text += rng.integers(0, 6, rng.integers(not text, 20)).tolist()
        texts.append(text[:60])
    return texts


@pytest.mark.parametrize("policy", STORE_POLICIES)
@pytest.mark.parametrize("requests", REQUESTS)
def test_simulator_finds_what_a_real_store_finds(requests, policy, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(directory_backend, "_TOUCH_INTERVAL_SECONDS", 0.0)  # each use is its own
    monkeypatch.setattr(unit_codec, "MAX_UNIT_TOKENS", 16)
    rng = np.random.default_rng(requests)
    texts = random_texts(rng, requests)
    with PrefixStore(tmp_path / "sizes", block_tokens=4, codec="frames", threads=1) as store:
        for tokens in range(1, 20):
            store.put(rng.integers(100, 1 << 30, tokens), [make_rows(tokens)], model="m")
    with sqlite3.connect(tmp_path / "sizes" / "index.sqlite") as index:
        size_by_tokens = dict(index.execute("SELECT tokens, bytes FROM unit"))
    index.close()
    max_bytes, hits = 12_000, []
    with PrefixStore(tmp_path / "store", max_bytes, block_tokens=4, codec="frames", policy=policy, threads=1) as store:
        for text in texts:
            hits.append(store.get(text, model="m").tokens)
            if hits[-1] < len(text):
                store.put(text, [make_rows(len(text))], model="m")
        stored_bytes = store.stats().bytes
    counts = simulate_store(
        split_into_blocks(read_trace(write_lines(tmp_path, *texts)), 4),
        max_bytes=max_bytes,
        policy=policy,
        unit_blocks=4,
        compute_unit_bytes=lambda tokens: size_by_tokens.get(tokens, 0),
    )
    assert counts.hits.tolist() == hits
    assert counts.stored_bytes == stored_bytes
    assert counts.evicted_units > requests // 2
    assert 0 < sum(hits) < sum(map(len, texts))


@pytest.mark.parametrize(
    ("lines", "trace_format", "symbol_tokens", "tokens"),
    [
        ([mooncake_line(700, 46, 47), mooncake_line(512, 46)], "mooncake", 512, [700, 512]),
        (
            [{"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1} | mooncake_line(20, 1, 2)],
            "bailian",
            16,
            [20],
        ),
        ([mooncake_line(9, "a", "b") | {"block_tokens": 8}], "kvmnn", 8, [9]),
        ([{"token_ids": [5, 6, 7]}, {"token_ids": [1]}], "tokens", 1, [3, 1]),
        (["[5, 6]", "5 6 7", "5,6,7"], "tokens", 1, [2, 3, 3]),
        ([mooncake_line(512, 1 << 63)], "mooncake", 512, [512]),
        ([mooncake_line(0)], "mooncake", 512, [0]),
        ([mooncake_line(700, 1), mooncake_line(511)], "mooncake", 512, [700, 511]),  # full blocks alone have hashes
    ],
)
def test_read_trace_detects_formats(lines, trace_format, symbol_tokens, tokens, tmp_path) -> None:
    trace = read_trace(write_lines(tmp_path, *lines))
    assert (trace.format, trace.symbol_tokens, trace.tokens.tolist()) == (trace_format, symbol_tokens, tokens)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no requests"),
        (["{"], "line 1: is no JSON"),
        (["7.5"], "line 1: expected an object or a list"),
        ([{"ids": [1]}], "line 1: expected hash_ids or token_ids, found ids"),
        ([mooncake_line(5, 1), {"input_length": 5}], "line 2: expected a list 'hash_ids'"),
        ([mooncake_line(-1, 1)], "input_length is -1"),
        ([mooncake_line(512, 1.5)], "a hash is 1.5"),
        ([{"token_ids": [-1]}], "expected token ids from 0"),
        ([{"token_ids": ["a"]}], "expected token ids from 0"),
        ([{"token_ids": [5]}, {"token_ids": []}], "line 2: expected 1 to 16,777,216 token ids, found 0"),
        (["[]"], "line 1: expected 1 to 16,777,216 token ids, found 0"),
        ([mooncake_line(5, 1) | {"block_tokens": 0}], "block_tokens is 0"),
        (["[" * 100_000], "is no JSON"),
        ([mooncake_line(5, 1), [7, 8]], "line 2: expected a request with hash_ids, as on the first line"),
        (
            [mooncake_line(9, 1) | {"block_tokens": 16}, mooncake_line(9, 1) | {"block_tokens": 32}],
            "line 2: block_tokens is 32: expected 16, as on the first line",
        ),
    ],
)
def test_read_trace_refuses_malformed_lines(lines, message, tmp_path) -> None:
    with pytest.raises(SourceError, match=r"trace\.jsonl") as raised:
        read_trace(write_lines(tmp_path, *lines))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            mooncake_line(2560, *range(10)),
            "expected 5 hashes for 2,560 tokens (512 a hash), found 10: block_tokens 256 would fit",
        ),
        (
            mooncake_line(10_240, *range(10)),
            "expected 20 hashes for 10,240 tokens (512 a hash), found 10: block_tokens 1024 would fit",
        ),
        (
            mooncake_line(100, 1, 2, 3) | {"chat_id": 1},
            "expected 6 or 7 hashes for 100 tokens (16 a hash), found 3: block_tokens 34 would fit",
        ),
        (mooncake_line(1, 1, 2), "expected 0 or 1 hashes for 1 token (512 a hash), found 2"),
        (
            mooncake_line(10, *range(6)) | {"block_tokens": 4},
            "expected 2 or 3 hashes for 10 tokens (4 a hash), found 6",
        ),
        (
            mooncake_line(512, 1, 2),
            "expected 1 hash for 512 tokens (512 a hash), found 2: block_tokens 256 would fit",
        ),
        (mooncake_line(5000), "expected 9 or 10 hashes for 5,000 tokens (512 a hash), found 0"),
        (mooncake_line(1 << 20, 1), "expected 2,048 hashes for 1,048,576 tokens (512 a hash), found 1"),
    ],
)
def test_read_trace_refuses_hashes_that_contradict_the_input_length(line, message, tmp_path) -> None:
    """The line before is right, and says nothing of the size of blocks."""
    first_line = {key: value for key, value in line.items() if key != "timestamp"}
    first_line |= {"input_length": 0, "hash_ids": []}
    with pytest.raises(SourceError) as raised:
        read_trace(write_lines(tmp_path, first_line, line))
    assert str(raised.value) == f"{tmp_path / 'trace.jsonl'}: line 2: {message}"


def test_read_trace_of_full_blocks_counts_the_tokens_after_them_as_new(tmp_path) -> None:
    lines = [mooncake_line(1100, 1, 2), mooncake_line(1100, 1, 2), mooncake_line(511)]
    report = replay(read_trace(write_lines(tmp_path, *lines)))
    assert (report.tokens, report.rows[0].hit_tokens) == (2711, 1024)


def test_read_trace_of_missing_file_is_an_error(tmp_path) -> None:
    with pytest.raises(SourceError, match="none: cannot be read"):
        read_trace(tmp_path / "none")


def test_read_trace_reads_a_pipe_once(tmp_path) -> None:
    """Hashes that are numbered need a second pass."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    document = json.dumps(mooncake_line(1000, "a", "b"))
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(pipe.write_text, f"{document}\n{document}\n")
        trace = read_trace(pipe)
    assert written.result() and trace.symbols.tolist() == [0, 1, 0, 1]


def random_trace(tmp_path: Path, requests: int = 400) -> RequestTrace:
    """A trace of Bailian's kind: chats that go on."""
    rng = np.random.default_rng(1)
    chats: list[list[int]] = []
    lines = []
    for number in range(requests):
        chat = list(chats[rng.integers(len(chats))]) if chats and rng.random() < 0.6 else [rng.integers(3)] * 8
        chat += [1000 * number + index for index in range(rng.integers(1, 40))]
        chats = [*chats, chat][-30:]
        lines.append(mooncake_line(16 * len(chat) - int(rng.integers(16)), *map(int, chat)) | {"chat_id": number})
    return read_trace(write_lines(tmp_path, *lines))


def replay(trace: RequestTrace, **options: object) -> SimulationReport:
    return simulate(trace, SHAPE, **{"sizes": [1 << 20, 4 << 20], "speed": TierSpeed(prefill=1000, load=1e9)} | options)


def test_simulate_twice_gives_equal_figures(tmp_path) -> None:
    first, second = (replay(random_trace(tmp_path)).to_dict() for _ in range(2))
    assert first == second


def test_simulate_of_larger_stores_and_of_the_yardstick_finds_more(tmp_path) -> None:
    report = replay(random_trace(tmp_path), ratios=[MeasuredRatio("dense", 1.5), MeasuredRatio("frames", 1.2)])
    rates = {(row.codec, row.policy, row.max_bytes): row.hit_rate for row in report.rows}
    for codec in ("dense", "frames"):
        for policy in SIMULATED_POLICIES:
            assert 0 < rates[codec, policy, 1 << 20] <= rates[codec, policy, 4 << 20] <= report.unlimited_hit_rate
        assert rates[codec, "belady", 1 << 20] > rates[codec, "lru", 1 << 20]
    assert rates["dense", "lru", 1 << 20] > rates["frames", "lru", 1 << 20]
    for row in report.rows:
        assert row.put_bytes - row.evicted_bytes >= row.stored_bytes
        assert row.stored_bytes <= (row.max_bytes or 1 << 62)
        assert row.saved_bytes == row.hit_tokens * SHAPE.token_bytes
        assert row.saved_seconds == pytest.approx(row.hit_tokens / 1000 - row.saved_bytes / row.ratio / 1e9)


@pytest.mark.parametrize(("sizes", "unit"), [([5000], "kB"), ([4 << 20, 1 << 40], "MB"), ([1 << 30, 1 << 40], "GB")])
def test_simulation_report_prints_sizes_in_a_unit_of_the_smallest(sizes, unit, tmp_path) -> None:
    report = replace(replay(random_trace(tmp_path, 50), sizes=sizes), trace="t")
    assert f"Sizes are {unit}." in str(report)
    number = sizes[0] / {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert f" {number:.2f} " in str(report)
    assert max(map(len, str(report).splitlines())) <= 80


def test_simulate_without_limit_finds_all_that_was_there(tmp_path) -> None:
    trace = random_trace(tmp_path)
    hit_tokens = replay(trace).rows[0].hit_tokens
    assert hit_tokens == split_into_blocks(trace, 16).count_reusable_tokens()
    assert hit_tokens > split_into_blocks(trace, 64).count_reusable_tokens()


def test_simulate_published_trace_finds_what_its_hashes_share() -> None:
    """The first 300 requests of Mooncake's conversation trace, counted by sets of beginnings."""
    path = FIXTURES / "traces" / "mooncake_conversation.jsonl"
    trace = read_trace(path)
    requests = [json.loads(line) for line in path.read_text().splitlines()]
    assert (trace.format, trace.symbol_tokens, len(requests)) == ("mooncake", 512, 300)
    assert trace.tokens.tolist() == trace.named_tokens.tolist() == [request["input_length"] for request in requests]
    seen: set[tuple[int, ...]] = set()
    hit_tokens = 0
    for request in requests:
        hashes = tuple(request["hash_ids"])
        beginnings = [hashes[:end] for end in range(1, len(hashes) + 1)]
        hit_tokens += min(512 * sum(beginning in seen for beginning in beginnings), request["input_length"])
        seen.update(beginnings)
    report = replay(trace, sizes=[400 << 20])
    assert report.rows[0].hit_tokens == hit_tokens == 345_966
    assert 0 < report.rows[1].hit_tokens < report.rows[0].hit_tokens


def test_simulate_counts_mooncake_blocks(tmp_path) -> None:
    lines = [
        mooncake_line(1100, 1, 2, 3),
        mooncake_line(1100, 1, 2, 4),
        mooncake_line(600, 1, 5),
        mooncake_line(600, 1, 5),
    ]
    report = replay(read_trace(write_lines(tmp_path, *lines)))
    assert report.rows[0].hit_tokens == 1024 + 512 + 600
    assert report.unlimited_hit_rate == pytest.approx(2136 / 3400)


def test_measured_ratios_are_those_of_real_stores() -> None:
    rows = np.cumsum(np.ones((2, 300, 16), np.float32), axis=1)
    cache = LayerCache(layer=0, keys=rows, values=rows)
    ratios = measure_store_ratios([(range(300), [cache])], threads=1)
    assert [ratio.codec for ratio in ratios] == ["dense", "frames"]
    assert all(ratio.ratio > 1.5 for ratio in ratios)


@pytest.mark.parametrize("text", ["", "8x8", "0x1x1", "2x2x2,fp8", "2x2x2,fp16 "])
def test_parse_model_shape_refuses(text) -> None:
    with pytest.raises(OptionError, match="model shape"):
        parse_model_shape(text)


def test_simulate_command_prints_and_draws(run, tmp_path, monkeypatch) -> None:
    random_trace(tmp_path)
    path, shape = str(tmp_path / "trace.jsonl"), "--model-shape=2x2x64"
    words = ["store", "simulate", path, shape, "--size", "1M,4M"]
    document = json.loads(run(*words, "--speed", "prefill=100", "-o", str(tmp_path / "plots"), "--json").out)
    assert [row["policy"] for row in document["rows"]] == ["any", *SIMULATED_POLICIES, *SIMULATED_POLICIES]
    assert (tmp_path / "plots" / "hit_rate.png").read_bytes().startswith(b"\x89PNG")
    cache = tmp_path / "kv.npz"
    rows = np.cumsum(np.ones((2, 300, 16), np.float32), axis=1)
    np.savez(cache, **{"layer_0.key": rows, "layer_0.value": rows})
    text = run(*words, "--policy", "lru", "--ratio", "measured", code=2).err
    assert "takes --ratio measured and caches together" in text
    other_rows = np.random.default_rng(0).standard_normal((2, 100, 16)).astype(np.float32)
    np.savez(tmp_path / "other.npz", **{"layer_0.key": other_rows, "layer_0.value": other_rows})
    measured = [path, "--model-shape=1x2x16,fp32", "--size", "1M,4M", "--ratio", "measured"]
    for other_shape in ("1x2x16,fp16", "2x2x16,fp32", "1x2x32,fp16"):  # the last has as many bytes a token
        refused = ("store", "simulate", path, "--model-shape", other_shape, *measured[2:], str(cache))
        message = f"kv.npz: is of another model shape: expected {other_shape} (--model-shape), found 1x2x16,fp32"
        assert message in run(*refused, code=2).err
    for caches in ([cache], [cache, tmp_path / "other.npz"]):
        layers = [
            LayerCache(layer=0, keys=np.load(file)["layer_0.key"], values=np.load(file)["layer_0.value"])
            for file in caches
        ]
        texts = [(range(1000 * index, 1000 * index + cache.tokens), [cache]) for index, cache in enumerate(layers)]
        ratios = {ratio.codec: pytest.approx(ratio.ratio, rel=0.01) for ratio in measure_store_ratios(texts)}
        document = json.loads(run("store", "simulate", *map(str, [*measured, *caches]), "--json").out)
        assert {row["codec"]: row["ratio"] for row in document["rows"]} == ratios
        assert document["measured_on"] == ", ".join(map(str, caches))
    shown = run("store", "simulate", *map(str, [*measured, cache])).out
    assert "Ratios are those of" in shown
    assert "Sizes are MB." in shown and " 4.19 " in shown
    with monkeypatch.context() as context:
        context.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path(path).read_bytes())))
        from_stdin = json.loads(run("store", "simulate", "-", *words[3:], "--json").out)
    assert from_stdin == json.loads(run(*words, "--json").out) | {"trace": "standard input"}
    assert "needs --model-shape" in run("store", "simulate", path, code=2).err
    assert "expected some of lru,benefit,belady (simulate), or lru" in run(*words, "--policy", "mru", code=2).err
    assert "says nothing to store simulate" in run(*words, "--token-ids", "1", code=2).err
