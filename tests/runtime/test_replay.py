"""A history run through a runtime again, from Python and from the shell."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from mlx_files import safetensors
from repository import FIXTURES

from kvmnn import KvmnnError
from kvmnn import open as open_source
from kvmnn.cli.entry_point import main
from kvmnn.errors import SourceError
from kvmnn.runtime import KVTrace, ReplayResult, RuntimeConfig, read_trace, replay_trace
from kvmnn.runtime.strict.codec import RowCodec

KEYS: dict[str, Any] = {
    "kv_lossless_enable": True,
    "kv_lossless_runtime_enable": True,
    "kv_lossless_codec": "gear_delta",
    "kv_lossless_runtime_mode": "store",
    "kv_lossless_front_n": 4,
    "kv_lossless_block_tokens": 32,
    "kv_lossless_hot_recent_tokens": 32,
    "kv_lossless_async_threads": 0,
    "kv_h2o_trigger_min_tokens": 64,
    "kv_h2o_update_interval": 1,
}
EVICTING = KEYS | {
    "kv_h2o_enable": True,
    "kv_lossless_scope": "front_n_and_h2o_kept",
    "kv_lossless_front_n": 2,
    "kv_h2o_block_tokens": 8,
    "kv_h2o_sink_tokens": 8,
    "kv_h2o_recent_tokens": 16,
    "kv_h2o_update_interval": 4,
    "kv_h2o_target_lossy_ratio": 1.3,
    "kv_h2o_trigger_min_tokens": 110,
}
TOKENS = 160


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first tokens of the real cache, as [layer, kv_head, token, head_dim]."""
    path = tmp_path_factory.mktemp("replay") / "cache.npz"
    parts = {part: np.load(FIXTURES / "kv_real" / f"{part}_fp16.npy")[:, :TOKENS] for part in "kv"}
    np.savez(path, **{part: array.transpose(0, 2, 1, 3) for part, array in parts.items()})
    return path


@pytest.fixture(scope="module")
def history(cache: Path) -> KVTrace:
    return read_trace(open_source(str(cache)))


def causal_attention(layers: int, heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    values = np.random.default_rng(0).random((layers, heads, TOKENS, TOKENS), np.float32)
    masked = np.tril(values)
    return masked / masked.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("behaviour", ["sound", "engine"])
@pytest.mark.parametrize("mode", ["probe", "full", "store"])
def test_replay_compares_rows_read_by_attention(history: KVTrace, behaviour: Any, mode: str) -> None:
    config = RuntimeConfig.from_engine(KEYS | {"kv_lossless_runtime_mode": mode})
    result = replay_trace(history, config, prompt=100, behaviour=behaviour, compare="all")
    assert (result.wrong_calls, result.compared_calls) == (0, 4 * 61)
    assert (result.layers, result.prompt, result.tokens, len(result.points)) == (4, 100, TOKENS, 61)
    assert ("LOSSLESS: 244 calls compared" in str(result)) == (mode == "store")
    assert ("equal in the 244 of 244 calls" in str(result)) == (mode != "store")
    assert result.metrics.h2o_lossless_ratio > 1


def test_replay_lossless_requires_all_calls(history: KVTrace) -> None:
    result = replay_trace(history, RuntimeConfig.from_engine(KEYS), prompt=100)
    assert (result.compared_calls, result.num_calls) == (12, 244)
    assert "LOSSLESS" not in str(result)
    assert str(result).splitlines()[-1] == "equal in the 12 of 244 calls that were compared"
    assert str(replace(result, wrong_calls=3)).splitlines()[-1].startswith("WRONG: ")


def test_replay_of_a_part_of_a_cache_says_what_is_missing(cache: Path, tmp_path: Path, run: Any) -> None:
    """As all verbs that read arrays: what was compared is less than the state of the model."""
    arrays = {
        f"layer_{layer}.{name}": np.load(cache)[name[0]][layer] for layer in (0, 1, 3) for name in ("key", "value")
    }
    np.savez(tmp_path / "part.npz", **arrays)
    (tmp_path / "config.json").write_text(json.dumps(KEYS))
    words = ("mnn", "replay", tmp_path / "part.npz", "--engine-config", tmp_path / "config.json", "--compare", "all")
    lines = run(*words).out.splitlines()
    assert lines[-2].startswith("LOSSLESS for these arrays: 243 calls compared")
    assert lines[-1] == "incomplete: layer 2 is missing before layer 3"
    document = json.loads(run(*words, "--json").out)
    assert document["completeness"]["missing"] == ["layer 2 is missing before layer 3"]
    result = ReplayResult.from_dict(document, complete=True)
    assert result.completeness is not None and result.format_lines()[-2:] == lines[-2:]
    with pytest.raises(SourceError, match="completeness"):
        ReplayResult.from_dict(document | {"completeness": {"layers": 3}})
    (tmp_path / "replay.json").write_text(json.dumps(document))
    run("report", tmp_path / "replay.json", "-o", tmp_path / "r.md")
    assert "incomplete: layer 2 is missing before layer 3" in (tmp_path / "r.md").read_text()


def test_replay_of_lossy_keys_and_values_is_a_copy_of_these(cache: Path, tmp_path: Path, run: Any) -> None:
    arrays = dict(np.load(cache))
    tensors = {part: ("F16", list(arrays[part].shape), arrays[part].tobytes()) for part in arrays}
    metadata = {"kvmnn.lossy": "quantised to q8_0"}
    (tmp_path / "cast.safetensors").write_bytes(safetensors(Random(0), tensors, metadata))
    (tmp_path / "config.json").write_text(json.dumps(KEYS))
    words = ("mnn", "replay", tmp_path / "cast.safetensors", "--engine-config", tmp_path / "config.json")
    lines = run(*words, "--compare", "all").out.splitlines()
    assert lines[-2].startswith("LOSSLESS copy of LOSSY K and V: 324 calls compared")
    assert lines[-1] == "LOSSY: quantised to q8_0"
    document = json.loads(run(*words, "--json").out)
    assert document["loss"] == "quantised to q8_0"
    assert ReplayResult.from_dict(document, complete=True).loss == "quantised to q8_0"


def test_replay_stores_all_cold_tokens(history: KVTrace) -> None:
    result = replay_trace(history, RuntimeConfig.from_engine(KEYS))
    assert result.prompt == TOKENS // 2
    assert [layer.blocks for layer in result.metrics.layers] == [(TOKENS - 16 - 32) // 32] * 4
    assert result.points[-1].held_bytes == result.metrics.held_bytes
    assert result.points[-1].appended_bytes == result.points[-1].live_bytes == 4 * TOKENS * 4 * 64 * 2 * 2


def test_replay_evicts_before_storing(history: KVTrace) -> None:
    config = RuntimeConfig.from_engine(EVICTING)
    attention = tuple(causal_attention(4, 2))
    result = replay_trace(history, config, prompt=100, attention=attention, compare="all")
    assert result.wrong_calls == 0
    metrics = result.metrics
    assert [layer.tokens == TOKENS for layer in metrics.layers] == [True, True, False, False]
    assert all(layer.blocks for layer in metrics.layers)
    assert metrics.lossy_ratio > 1.2 and metrics.total_ratio == pytest.approx(
        metrics.lossy_ratio * metrics.lossless_ratio
    )
    with pytest.raises(KvmnnError, match="kv_h2o_enable without attention"):
        replay_trace(history, config)


def test_replay_emulation_with_evictions(history: KVTrace) -> None:
    result = replay_trace(
        history,
        RuntimeConfig.from_engine(EVICTING),
        prompt=100,
        behaviour="engine",
        attention=tuple(causal_attention(4, 2)),
        compare="all",
    )
    assert result.wrong_calls == 0 and result.metrics.h2o_total_evict_tokens > 0


@pytest.mark.parametrize(
    ("tokens", "noted", "shown"),
    [(24, 1, [*range(0, 24, 2), 23]), (25, 1, [*range(0, 25, 2)]), (402, 3, [*range(0, 400, 39), 401])],
)
def test_replay_records_a_sample_of_steps_and_the_last(tokens: int, noted: int, shown: list[int]) -> None:
    rows = np.zeros((1, tokens, 4), np.float16)
    result = replay_trace(KVTrace(((rows, rows),), "fp16"), RuntimeConfig(), prompt=1)
    lines = {point.step: str(point) for point in result.points}
    assert list(lines) == sorted({*range(0, tokens, noted), tokens - 1})
    assert result.format_lines()[2 : 2 + len(shown)] == [lines[step] for step in shown]


def test_read_trace_transposes_token_major_source(tmp_path: Path) -> None:
    rows = np.arange(2 * 3 * 5 * 4).reshape(2, 3, 5, 4).astype(np.float16)  # K and V, [kv_head, token, head_dim]
    np.savez(tmp_path / "cache.npz", **{part: rows[at].transpose(1, 0, 2)[None] for at, part in enumerate("kv")})
    source = open_source(str(tmp_path / "cache.npz"))
    source.token_major = True
    found = read_trace(source)
    assert (found.kv_heads, found.tokens, found.head_dim) == (3, 5, 4)
    assert [part.view(np.float16).tolist() for part in found.layers[0]] == rows.tolist()


def test_replay_invalid_trace_is_refused() -> None:
    rows = np.zeros((2, 3, 4), np.float16)
    for layers, message in (
        (((rows, rows), (rows[:1], rows[:1])), "expected .kv_head, token, head_dim., the same for all"),
        (((rows[:, :0], rows[:, :0]),), "no tokens"),
    ):
        with pytest.raises(KvmnnError, match=message):
            KVTrace(layers, "fp16")
    history = KVTrace(((rows, rows),), "fp16")
    with pytest.raises(KvmnnError, match="prompt is 4: expected at most 3"):
        replay_trace(history, RuntimeConfig(), prompt=4)
    with pytest.raises(KvmnnError, match="compare is 'some': expected one of ends, all"):
        replay_trace(history, RuntimeConfig(), compare="some")
    for attention, message in (
        ([], "attention of 0 layers: expected 1"),
        ([np.ones((2, 3, 2), np.float32)], r"attention of layer 0 has shape \[2, 3, 2\]: expected \[2, 3, 3\]"),
        ([-np.ones((2, 3, 3), np.float32)], "attention of layer 0 is below 0"),
    ):
        with pytest.raises(KvmnnError, match=message):
            replay_trace(history, RuntimeConfig(), attention=attention)


def test_replay_command_writes_result(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(EVICTING))
    np.save("attention.npy", causal_attention(4, 2))
    command = ["mnn", "replay", str(cache), "--engine-config", "config.json", "--prefill-tokens", "100"]
    assert main([*command, "--scores", "attention.npy", "--compare", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 layers, 160 tokens: 100 as prompt, 60 as steps"
    assert lines[-1] == "LOSSLESS: 244 calls compared, every byte that attention reads is right"
    assert main([*command, "--scores", "attention.npy", "--json", "--behaviour", "engine"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verb"] == "replay" and document["behaviour"] == "engine"
    assert {"h2o_lossless_ratio", "layers", "compress"} <= set(document["metrics"]) and len(document["points"]) == 61


@pytest.mark.parametrize(
    ("config", "more", "code", "message"),
    [
        (EVICTING, [], 1, "without attention"),
        ({"kv_lossles_enable": True}, [], 1, "kv_lossles_enable: no option of the runtime"),
        (KEYS | {"layer_nums": 32}, [], 1, "layer_nums is 32, the model has 4 layers"),
        (KEYS, ["--prefill-tokens", "161"], 2, "prompt is 161: expected at most 160"),
        (KEYS, ["--behaviour", "safe"], 2, "invalid choice"),
        (EVICTING, ["--scores", "short.npy"], 1, "attention of 3 layers: expected 4"),
        (EVICTING, ["--scores", "flat.npy"], 1, "flat.npy: attention of layer 0 has shape"),
        (EVICTING, ["--scores", "nan.npy"], 1, "nan.npy: attention of layer 1 is below 0 or not finite"),
        (
            EVICTING,
            ["--scores", "heads.npz"],
            1,
            "heads.npz: attention of layer 1 has shape [3, 160, 160]: expected",
        ),
        (
            KEYS | {"kv_lossless_frontn": 1},
            [],
            1,
            "error: config.json: kv_lossless_frontn: no option of the runtime",
        ),
        (KEYS | {"layer_nums": "4"}, [], 1, "error: config.json: layer_nums must be an integer, not str"),
    ],
)
def test_replay_command_invalid_input_is_refused(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    more: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(config))
    np.save("short.npy", causal_attention(3, 1))
    np.save("flat.npy", np.ones((4, TOKENS, 9), np.float32))
    wrong = causal_attention(4, 2)
    np.savez("heads.npz", *wrong[:1], *causal_attention(3, 3))
    wrong[1, 1, 5, 5] = np.nan
    np.save("nan.npy", wrong)
    assert main(["mnn", "replay", str(cache), "--engine-config", "config.json", *more]) == code
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_replay_command_draws_plots(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(KEYS))
    command = ["mnn", "replay", str(cache), "--engine-config", "config.json", "--plot", "plots"]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "8 plot files in plots"
    names = {f"{what}_over_steps.{kind}" for what in ("memory", "ratio", "queue", "latency") for kind in ("png", "svg")}
    assert {path.name for path in Path("plots").iterdir()} == names
    assert main(command) == 1
    assert main([*command, "--force", "-q"]) == 0


def test_replay_encodings_after_last_token_are_counted(history: KVTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = RowCodec.encode

    def slow(self: RowCodec, rows: Any) -> Any:
        time.sleep(0.3)
        return encode(self, rows)

    monkeypatch.setattr(RowCodec, "encode", slow)
    short = KVTrace(tuple((keys[:, :100], values[:, :100]) for keys, values in history.layers[:1]), "fp16")
    result = replay_trace(short, RuntimeConfig.from_engine(KEYS | {"kv_lossless_async_threads": 1}), prompt=98)
    assert result.metrics.layers[0].blocks == 1 and "nothing was compressed" not in str(result)
    assert result.points[-1].held_bytes == result.metrics.held_bytes


def test_replay_layer_without_blocks_has_no_ratio(history: KVTrace) -> None:
    lines = str(replay_trace(history, RuntimeConfig.from_engine(KEYS | {"kv_lossless_front_n": 1}))).splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("layer "))) + 1 :]
    assert float(table[0].split()[5]) > 1 and table[1].split()[5] == "-"
    (wait,) = [line for line in table if line.startswith("wait")]
    assert wait.split() == ["wait", "0", "x,", "p50", "-", "us,", "p95", "-", "us,", "p99", "-", "us"]


def test_replay_scores_without_plan_give_a_note(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(KEYS))
    np.save("a.npy", causal_attention(4, 1))
    assert main(["mnn", "replay", str(cache), "--engine-config", "config.json", "--scores", "a.npy", "-q"]) == 0
    assert main(["mnn", "replay", str(cache), "--engine-config", "config.json", "--scores", "a.npy"]) == 0
    assert capsys.readouterr().err == "kvmnn: note: a.npy plans no eviction: config.json has no kv_h2o_enable\n"


def test_replay_without_compression_does_not_pass(history: KVTrace) -> None:
    idle = replay_trace(history, RuntimeConfig.from_engine({}), prompt=100)
    assert "lossless -, lossy 1.000, total -: nothing was compressed" in str(idle)
    assert str(idle).splitlines()[-1].startswith("NOT MEASURED: nothing was compressed: the configuration does not")
    assert "LOSSLESS" not in str(idle) and not idle.has_passed
    assert idle.to_dict()["not_measured"].startswith("nothing was compressed")
    stored = replay_trace(history, RuntimeConfig.from_engine(KEYS), prompt=100)
    assert (
        "nothing was compressed" not in str(stored) and stored.has_passed and stored.to_dict()["not_measured"] is None
    )


@pytest.mark.parametrize("changed", [{"kv_lossless_enable": False}, {"kv_lossless_hot_recent_tokens": 10**6}])
def test_replay_of_a_configuration_that_stores_nothing_fails(
    cache: Path, tmp_path: Path, run: Any, changed: dict[str, Any]
) -> None:
    (tmp_path / "c.json").write_text(json.dumps(KEYS | changed))
    for compare in ("ends", "all"):
        found = run("mnn", "replay", cache, "--engine-config", tmp_path / "c.json", "--compare", compare, code=1)
        assert "NOT MEASURED: nothing was compressed" in " ".join(found.out.split())
        assert "LOSSLESS" not in found.out and "lossless 0" not in found.out


@pytest.mark.parametrize("mode", ["probe", "full"])
def test_replay_of_a_mode_that_measures_only_has_no_ratio_of_stored_bytes(
    cache: Path, tmp_path: Path, run: Any, mode: str
) -> None:
    (tmp_path / "c.json").write_text(json.dumps(KEYS | {"kv_lossless_runtime_mode": mode}))
    found = run("mnn", "replay", cache, "--engine-config", tmp_path / "c.json", "--compare", "all")
    assert f"lossless -, lossy 1.000, total -: mode {mode} measures and stores nothing; of what it compressed 1." in (
        " ".join(found.out.split())
    )
    assert f"compared, as mode {mode} stores nothing: every row is held as it was appended" in found.out
    assert "LOSSLESS" not in found.out
    document = run("mnn", "replay", cache, "--engine-config", tmp_path / "c.json", "--json").out
    metrics = json.loads(document)["metrics"]
    assert metrics["lossless_ratio"] is None and metrics["total_ratio"] is None and metrics["h2o_lossless_ratio"] > 1
    (tmp_path / "replay.json").write_text(document)
    run("report", tmp_path / "replay.json", "-o", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert (
        "held not measured, in all not measured" in page and "nothing was stored, so attention read every row" in page
    )


@pytest.mark.slow
def test_steps_before_the_first_block_have_no_ratio(history: KVTrace, tmp_path: Path) -> None:
    idle = replay_trace(history, RuntimeConfig.from_engine({}), prompt=100)
    assert {point.ratio for point in idle.points} == {None} and " 1.000 " not in str(idle.points[0])
    pytest.importorskip("matplotlib")
    assert len(idle.plot(tmp_path)) > 3


def test_replay_that_only_evicts_passes(history: KVTrace) -> None:
    keys = EVICTING | {"kv_lossless_enable": False}
    result = replay_trace(history, RuntimeConfig.from_engine(keys), prompt=100, attention=tuple(causal_attention(4, 2)))
    assert result.is_idle and result.metrics.lossy_ratio > 1 and result.has_passed


def test_replay_ambiguous_token_axis_needs_axes(tmp_path, run) -> None:
    parts = {part: np.load(FIXTURES / "kv_real" / f"{part}_fp16.npy")[:1, :300] for part in "kv"}
    np.savez(tmp_path / "thd.npz", **parts)  # [layer, token, kv_head, head_dim]
    np.savez(tmp_path / "htd.npz", **{part: array.transpose(0, 2, 1, 3) for part, array in parts.items()})
    (tmp_path / "c.json").write_text(json.dumps(KEYS))
    asked = ["--engine-config", tmp_path / "c.json", "--prefill-tokens", 250, "--json"]
    refused = run("mnn", "replay", tmp_path / "thd.npz", *asked, code=2).err
    assert "300 heads, more than 256: where tokens come first, say so (--token-major, in Python axes=)" in refused
    found = json.loads(run("mnn", "replay", tmp_path / "thd.npz", *asked, "--token-major").out)
    there = json.loads(run("mnn", "replay", tmp_path / "htd.npz", *asked).out)
    assert found["tokens"] == there["tokens"] == 300
    name = "h2o_lossless_compressed_bytes"
    assert found["metrics"][name] == there["metrics"][name] > 0
