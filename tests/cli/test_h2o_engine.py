"""``--policy h2o_engine --engine-config FILE`` in eval, generate and dump-kv, and ``plan --engine-config``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from repository import FIXTURES

from kvmnn.policies.h2o import plan_blocks, sum_by_block

FIXTURE = FIXTURES / "lm"
TEXT = FIXTURE / "texts" / "calendar.py.txt"
CONFIG = {
    "kv_h2o_enable": True,
    "kv_h2o_block_tokens": 8,
    "kv_h2o_sink_tokens": 4,
    "kv_h2o_recent_tokens": 16,
    "kv_h2o_trigger_min_tokens": 48,
    "kv_h2o_update_interval": 5,
    "layer_nums": 6,
}
Run = Callable[..., SimpleNamespace]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_h2o_engine_reports_the_planner(run: Run, config: Path) -> None:
    asked = ["eval", FIXTURE, "--text", TEXT, "--max-tokens", 96, "--prefill-tokens", 60, "--no-timing", "--threads", 1]
    asked += ["--policy", "h2o_engine", "--engine-config", config]
    found = json.loads(run(*asked, "--json", "-q").out)
    full, row = found["rows"]
    assert "h2o" not in full and row["options"]["block_tokens"] == 8 and row["kind"] == "LOSSY"
    layers = row["h2o"]["layers"]
    assert [layer["tokens_kept"] for layer in layers] == row["tokens_kept"]
    assert row["tokens_kept"][:2] == [96, 96] and max(row["tokens_kept"][2:5]) < 96
    assert row["h2o"]["h2o_total_evict_tokens"] == sum(layer["h2o_total_evict_tokens"] for layer in layers) > 0
    assert {"h2o_lossy_ratio", "h2o_keep_ratio", "h2o_evict_us", "lossy_ratio"} <= set(layers[2])
    assert row["documents"][0]["h2o"] == row["h2o"]
    for table in (run(*asked, "-q").out, run(*asked).out):
        assert "The H2O planner by layer, under the engine's names" in table
        assert "| layer | kept of seen | lossy | h2o_lossy_ratio |" in table


@pytest.mark.slow
def test_generate_and_dump_kv_h2o_engine(run: Run, config: Path, tmp_path: Path) -> None:
    prompt = TEXT.read_text(encoding="utf-8")[:300]
    model = [FIXTURE, "--policy", "h2o_engine:block_tokens=4", "--engine-config", config]
    asked = ["generate", *model, "--prompt", prompt, "--max-new-tokens", 16]
    cut = json.loads(run(*asked, "--json").out)["cut"]
    assert [layer["tokens_kept"] for layer in cut["h2o"]["layers"]] == cut["tokens_kept"]
    assert min(cut["tokens_kept"]) < cut["tokens_seen"] == max(cut["tokens_kept"])
    assert "h2o_total_evict_tokens" in run(*asked).out
    written = ["dump-kv", *model, "--text", TEXT, "--max-tokens", 90, "--chunk", 1, "-o", tmp_path / "kv", "--json"]
    assert min(json.loads(run(*written).out)["tokens_kept"]) < 90


def test_plan_engine_config_is_overridden_by_options(run: Run, config: Path, tmp_path: Path) -> None:
    attention = np.random.default_rng(4).random((4, 1, 200), dtype=np.float32)
    np.save(tmp_path / "a.npy", attention)
    for options, more in (
        (("--h2o", "sink_tokens=20"), {"sink_tokens": 20}),
        ((), {}),
        (("--h2o", "keep_ratio=0.5"), None),
    ):
        found = json.loads(run("plan", tmp_path / "a.npy", "--engine-config", config, *options, "--json").out)
        said = {"target_mode": "static", "target_keep_ratio": 0.5} if more is None else more
        made = plan_blocks(
            sum_by_block(attention, 8), 200, block_tokens=8, **{"sink_tokens": 4, "recent_tokens": 16, **said}
        )  # type: ignore[arg-type]
        assert found["layers"][0]["pairs"] == [list(pair) for pair in made.reserve_pairs]
    static = tmp_path / "static.json"
    static.write_text(json.dumps({"kv_h2o_target_mode": "static", "kv_h2o_target_keep_ratio": 0.25}))
    config_of = json.loads(run("plan", tmp_path / "a.npy", "--engine-config", static, "--json").out)["config"]
    assert (config_of["target_mode"], config_of["keep_ratio"], config_of["block_tokens"]) == ("static", 0.25, 64)


@pytest.mark.parametrize("verb", ["eval", "generate", "plan"])
def test_engine_config_invalid_is_refused(run: Run, verb: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((2, 100), np.float32))
    base: dict[str, list[object]] = {
        "eval": ["eval", FIXTURE, "--text", TEXT, "--policy", "h2o_engine"],
        "generate": ["generate", FIXTURE, "--prompt", "x", "--policy", "h2o_engine"],
        "plan": ["plan", tmp_path / "a.npy"],
    }
    cases = [
        ("absent.json", None, "does not exist"),
        ("list.json", "[1]", "holds no JSON object"),
        ("broken.json", "{", "is not JSON"),
        ("key.json", '{"kv_h2o_blok": 1}', "kv_h2o_blok: is no option"),
        ("type.json", '{"kv_h2o_sink_tokens": 1.5}', "kv_h2o_sink_tokens must be an integer"),
    ]
    if verb != "plan":
        cases.append(("off.json", '{"kv_h2o_enable": false}', "kv_h2o_enable is not true"))
    for name, text, message in cases:
        if text is not None:
            (tmp_path / name).write_text(text)
        code = 1 if text is None or not text.startswith('{"') else 2
        err = run(*base[verb], "--engine-config", tmp_path / name, code=code).err
        assert message in err and err.count("\n") == 1
    if verb != "plan":
        (tmp_path / "good.json").write_text("{}")
        asked = [part if part != "h2o_engine" else "streaming" for part in base[verb]]
        err = run(*asked, "--engine-config", tmp_path / "good.json", code=2).err
        assert "nothing takes options from it; expected --policy h2o_engine" in err
