"""Plans of ``compact`` that `plan`, `dump-kv` and `eval` write, for each layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import packed_samples
import pytest

from kvmnn.formats.mnn import open_packed

TOKENS = 30
KEPT = ([0, 1, 2, 9, 10, 11, 28, 29], [4, 5, 6, 7, 20, 27, 28, 29])


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    monkeypatch.chdir(tmp_path)
    sample = packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(2, 2, TOKENS, 8), capacity=94)
    return [tmp_path / "p", *sample.options, "--backend", "x86-avx2"]


def write(path: str, document: Any) -> str:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(json.dumps(document))
    return path


def dumped(kept: Any = KEPT, seen: int | None = TOKENS) -> dict[str, Any]:
    """As ``positions.json`` of `dump-kv` has it."""
    layers = [{"layer": n, "tokens": len(row), "positions": row} for n, row in enumerate(kept)]
    return {"label": "LOSSY", "layers": layers} | ({} if seen is None else {"tokens_seen": seen})


def trace(label: str, kept: Any = KEPT) -> dict[str, Any]:
    """As the results of `eval` have it."""
    layers = [{"layer": n, "positions": [row]} for n, row in enumerate(kept)]
    return {"label": label, "document": "a.txt", "step_tokens": [1, TOKENS], "cache_bytes": [1, 2], "kept": layers}


def positions(path: str) -> list[list[int]]:
    layers = open_packed(path).info.layers
    return [[at for begin, size in layer.positions for at in range(begin, begin + size)] for layer in layers]


def check(prefix: list[object], run, plan: str, *options: object, dialect: str = "fork") -> None:
    run("mnn", "compact", *prefix, "--plan", plan, "-o", "c", "-f", "--dialect", dialect, *options)
    assert positions("c") == list(KEPT)
    run("mnn", "unpack", *prefix, "-o", "before.npz", "-f")
    run("mnn", "unpack", "c", "-o", "after.npz", "-f")
    with np.load("before.npz") as before, np.load("after.npz") as after:
        for name in before:
            np.testing.assert_array_equal(after[name], before[name][:, KEPT[int(name[6])]])


@pytest.mark.parametrize("by_head", [False, True])
def test_plan_file_accepts_positions_of_a_dump(prefix, run, by_head) -> None:
    kept = [[row, row] for row in KEPT] if by_head else KEPT
    write("kv/positions.json", dumped(kept))
    for plan in ("kv", "kv/positions.json"):
        check(prefix, run, plan)


def test_plan_file_with_first_tokens_suits_both_dialects(prefix, run) -> None:
    """MNN 3.6.1 drops a cache of which all is the window: it begins after the first tokens that stay."""
    write("kv/positions.json", dumped([KEPT[0], KEPT[0]]))
    for dialect in ("fork", "upstream"):
        run("mnn", "compact", *prefix, "--plan", "kv", "-o", "c", "-f", "--dialect", dialect)
        assert positions("c") == [KEPT[0]] * 2


def test_plan_file_accepts_evaluation_of_one_policy(prefix, run) -> None:
    check(prefix, run, write("e.json", {"verb": "eval", "traces": [trace("full", [[0]] * 2), trace("streaming 8")]}))


def test_plan_file_of_several_policies_needs_label(prefix, run) -> None:
    write("e.json", {"traces": [trace("full"), trace("streaming 8"), trace("recent_only 8", [[1], [2]])]})
    said = run("mnn", "compact", *prefix, "--plan", "e.json", "-o", "c", code=2).err
    assert "is of 2 policies: --plan-label names one: 'streaming 8', 'recent_only 8'" in said
    check(prefix, run, "e.json", "--plan-label", "streaming 8")
    said = run("mnn", "compact", *prefix, "--plan", "e.json", "--plan-label", "x", "-o", "c", "-f", code=1).err
    assert "has no policy 'x': expected one of 'full', 'streaming 8', 'recent_only 8'" in said


def test_plan_file_accepts_plan_command_json(prefix, run) -> None:
    policy = ("plan", *prefix, "--policy", "streaming:sink=4,budget=12")
    Path("1.json").write_text(run(*policy, "--json").out)
    run(*policy, "-o", "2.json")
    for plan in ("1.json", "2.json"):
        run("mnn", "compact", *prefix, "--plan", plan, "-o", plan[0])
        assert positions(plan[0]) == [[0, 1, 2, 3, *range(22, 30)]] * 2


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_plan_file_accepts_dump_kv_and_eval_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run) -> None:
    """From a model to a compacted cache: the tokens that its own evicted cache has."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("tokenizers")
    from repository import FIXTURES

    monkeypatch.chdir(tmp_path)
    text = FIXTURES / "lm" / "texts" / "calendar.py.txt"
    policy = ("--policy", "streaming:sink=4,budget=24")
    for name, more in (("full", ()), ("cut", policy)):
        run("dump-kv", FIXTURES / "lm", "--text", text, "--max-tokens", 64, "-o", name, *more)
    run("mnn", "pack", "full", "--backend", "x86-avx2", "--name", "sys", "-o", "prefix", "--cast")
    evaluate = ("eval", FIXTURES / "lm", "--text", text, "--max-tokens", 64, *policy, "--plot", "plots", "--json")
    evaluate = (*evaluate, "--no-timing")
    Path("e.json").write_text(run(*evaluate).out)
    for plan in ("cut", "e.json"):
        run("mnn", "compact", "prefix", "--plan", plan, "-o", "c", "-f")
        assert positions("c") == [[0, 1, 2, 3, *range(44, 64)]] * len(positions("c"))
    run("mnn", "unpack", "c", "-o", "c.npz")
    with np.load("c.npz") as found:
        for name in found:
            np.testing.assert_array_equal(found[name], np.load(f"cut/{name}.npy").astype(np.float32))
    Path("cut/token_ids.json").write_text(json.dumps([*range(64)]))
    Path("ids.json").write_text(json.dumps([*range(1, 65)]))
    run(
        "mnn",
        "pack",
        "full",
        "--backend",
        "x86-avx2",
        "--name",
        "sys",
        "-o",
        "other",
        "--cast",
        "--token-ids",
        "ids.json",
    )
    said = run("mnn", "compact", "other", "--plan", "cut", "-o", "d", code=1).err
    assert "cut/token_ids.json: are not the 64 token ids that the cache was made from" in said


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (dumped([[0, 1], [0, 30]]), "layer 1 keeps the token at position 30, and the cache holds 30 tokens up to 29"),
        (dumped(seen=20), "is of a text of 20 tokens, and layer 0 of the cache holds tokens up to position 29"),
        (dumped([[0, 1]]), "has positions of 1 layer, not of 2"),
        (dumped([[[0, 1], [0, 2]]] * 2), "layer 0: keeps tokens of its own in each KV head"),
        (dumped([[1, 0]] * 2), "expected ascending positions"),
        (dumped([["a"]] * 2), "expected a list of positions"),
        (dumped([[]] * 2), "nothing would stay"),
        ({"traces": []}, "records no tokens that a policy kept: eval does with --plot DIR"),
        ({"traces": [{"label": "x"}]}, "does not record the tokens that each layer kept"),
        ({"traces": 3}, "found 3, expected a list"),
        ({"layers": []}, "has positions of 0 layers, not of 2"),
        ({"layers": [{"layer": 0, "heads": [[[0, 1]]]}]}, "layer 0: keeps tokens of its own in each KV head"),
        (
            [{"layer": 0, "remove": 30, "pairs": [[0, 4]]}],
            "has 1 plan for layer 0: expected one for each of layers 0 to 1",
        ),
        (5, "found 5, expected a list"),
    ],
)
def test_plan_file_mismatched_plan_is_refused(prefix, run, document, message) -> None:
    said = run("mnn", "compact", *prefix, "--plan", write("plan.json", document), "-o", "c", code=1).err
    assert message in said and len(said.splitlines()) == 1
    assert not Path("c").exists()


def test_plan_file_missing_plan_is_refused(prefix, run) -> None:
    Path("empty").mkdir()
    for plan in ("nowhere.json", "empty"):
        said = run("mnn", "compact", *prefix, "--plan", plan, "-o", "c", code=1).err
        assert plan in said and "No such file" in said
    write("plan.json", [])
    said = run("mnn", "compact", *prefix, "--plan", "plan.json", "--plan-label", "x", "-o", "c", code=1).err
    assert "is no result of eval" in said
