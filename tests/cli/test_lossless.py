"""``--lossless`` in eval and generate: the same numbers, and the three ratios of the same run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repository import FIXTURES

FIXTURE = FIXTURES / "lm"
TEXT = FIXTURE / "texts" / "calendar.py.txt"
KEYS = {"scope": "front_n", "front_n": 6, "block_tokens": 32, "hot_recent_tokens": 16, "hot_sink_tokens": 4}
H2O = {"h2o_trigger_min_tokens": 48, "h2o_update_interval": 4}
Run = Callable[..., SimpleNamespace]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    document = {f"kv_lossless_{key}": value for key, value in KEYS.items()} | {f"kv_{k}": v for k, v in H2O.items()}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**document, "kv_lossless_runtime_mode": "probe", "llm_model": "x", "layer_nums": 6}))
    return path


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_lossless_keeps_scores_and_reports_ratios(run: Run, config: Path) -> None:
    asked: list[Any] = [
        "eval",
        FIXTURE,
        "--text",
        TEXT,
        "--max-tokens",
        110,
        "--prefill-tokens",
        90,
        "--no-timing",
        "--threads",
        1,
    ]
    asked += ["--policy", "streaming", "--budget", 64]
    plain = json.loads(run(*asked, "--json", "-q").out)
    found = json.loads(run(*asked, "--json", "-q", "--lossless", "store", "--engine-config", config).out)
    spec = "store:" + ",".join(f"{key}={value}" for key, value in (KEYS | H2O).items())
    by_keys = json.loads(run(*asked, "--json", "-q", "--lossless", spec).out)
    assert found["settings"]["lossless"]["kv_lossless_front_n"] == 6 and "lossless" not in plain["settings"]
    for before, row, other in zip(plain["rows"], found["rows"], by_keys["rows"], strict=True):
        assert "runtime" not in before and (row["nll"], row["accuracy"]) == (before["nll"], before["accuracy"])
        figures = row["runtime"]
        assert figures["mode"] == "store" and figures["h2o_lossless_raw_bytes"] > 0
        assert row["policy"] != "full" or sum(layer["blocks"] for layer in figures["layers"]) > 0
        assert figures["total_ratio"] == pytest.approx(figures["lossy_ratio"] * figures["lossless_ratio"])
        assert figures["lossy_ratio"] == row["lossy_ratio"]
        assert row["documents"][0]["runtime"] == figures
        assert [layer["stored_bytes"] for layer in other["runtime"]["layers"]] == [
            layer["stored_bytes"] for layer in figures["layers"]
        ]
    table = run(*asked, "--lossless", "probe", "--engine-config", config).out
    assert "The runtime around the cache" in table and "| full | probe | 1.000 |" in table


@pytest.mark.slow
def test_generate_lossless_gives_equal_text(run: Run, config: Path) -> None:
    prompt = TEXT.read_text(encoding="utf-8")[:300]
    asked = ["generate", FIXTURE, "--prompt", prompt, "--policy", "h2o_heads:recent=50%", "--budget", 64]
    asked += ["--max-new-tokens", 6]
    plain = json.loads(run(*asked, "--json").out)
    stored = json.loads(run(*asked, "--json", "--lossless", "store", "--engine-config", config).out)
    for side in ("full", "cut"):
        assert stored[side]["ids"] == plain[side]["ids"] and "runtime" not in plain[side]
        assert stored[side]["runtime"]["h2o_lossless_raw_bytes"] > 0
    assert "The runtime around the cache" in run(*asked, "--lossless", "full", "--engine-config", config).out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lossless", "stored"], "--lossless stored: expected one of probe, full, store"),
        (["--lossless", "store:blocks=3"], "kv_lossless_blocks: no option of the runtime"),
        (["--lossless", "store:front_n=many"], "kv_lossless_front_n is 'many': expected an integer"),
        (["--lossless", "store:front_n"], "'front_n' is not option=value"),
        (
            ["--lossless", "store:enable=false"],
            "enable=false: enable is what the mode says; expected no such key",
        ),
        (["--lossless", "store:runtime_mode=probe"], "runtime_mode is what the mode says"),
        (
            ["--lossless", "store", "--layout", "x86-avx2"],
            "--layout and --lossless: a cache is held in one of them",
        ),
    ],
)
def test_lossless_invalid_options_are_refused(run: Run, options: list[str], message: str) -> None:
    for verb in (["generate", FIXTURE, "--prompt", "x"], ["eval", FIXTURE, "--text", TEXT, "--policy", "streaming"]):
        err = run(*verb, *options, code=2).err
        assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lossless", "store", "--quant", "q8_0"], "codecs (--quant) and --lossless: a cache is held in one"),
        (["--layout", "x86-avx2", "--quant", "q8_0"], "codecs (--quant) and --layout: a cache is held in one"),
        (["--lossless", "store:codec=transform,profile=none.kvmp"], "none.kvmp: does not exist"),
    ],
)
def test_eval_refuses_before_any_row_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr("kvmnn.evaluation.runner.run_tasks", None)  # a row that runs is a TypeError
    err = run(
        "eval",
        FIXTURE,
        "--text",
        TEXT,
        "--policy",
        "streaming",
        "--budget",
        64,
        *options,
        code=2 if "--quant" in options else 1,
    ).err
    assert message in err and "Error" not in err


def test_lossless_invalid_engine_config_names_the_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"kv_lossless_frontn": 1}')
    err = run("generate", FIXTURE, "--prompt", "x", "--lossless", "store", "--engine-config", path, code=2).err
    assert f"{path}: kv_lossless_frontn: no option of the runtime (did you mean 'kv_lossless_front_n'?)" in err


@pytest.mark.slow
def test_lossless_runtime_columns_are_explained(run: Run) -> None:
    asked = ["--lossless", "probe", "--max-tokens", 3]
    for out in (
        run("generate", FIXTURE, "--prompt", "def", "--max-new-tokens", 2, "--lossless", "probe").out,
        run("eval", FIXTURE, "--text", TEXT, *asked).out,
    ):
        assert "lossless: those over held, the bytes that hold them" in " ".join(out.split())


@pytest.mark.slow
def test_lossless_nothing_encoded_is_explained(run: Run) -> None:
    asked = ["generate", FIXTURE, "--prompt", "def", "--max-new-tokens", 2, "--lossless", "store"]
    out = run(*asked).out
    assert "full: nothing was encoded: layers held" in out and "a first block needs 512" in " ".join(out.split())
    *_, note = json.loads(run(*asked, "--policy", "streaming", "--budget", 900, "--json").out)["notes"]
    assert note.startswith("full, streaming 900: nothing was encoded: layers held")
