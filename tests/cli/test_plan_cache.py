"""``kvmnn plan CACHE --policy SPEC``: any cache in, pairs for ``kvmnn mnn compact`` out."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import hf_files
import llama_files
import mlx_files
import numpy as np
import pytest

from kvmnn.policies import LayerState, create_policy


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(5)
    layers = [tuple(rng.standard_normal((1, 2, 40, 8)).astype(np.float32) for _ in range(2)) for _ in range(3)]
    hf_files.save(tmp_path / "cache.pt", hf_files.dynamic_cache(layers))
    np.savez(
        "kv.npz", **{f"layer_{n}.{part}": words[0] for n, kv in enumerate(layers) for part, words in zip(
            ("key", "value"), kv, strict=True)},
    )  # fmt: skip
    np.save("attention.npy", rng.random((2, 4, 1, 100), np.float32))
    return layers


@pytest.mark.parametrize("spec", ["streaming:sink=4,budget=16", "recent_only:keep_ratio=0.3,skip_layers=1"])
@pytest.mark.parametrize("planned", ["cache.pt", "sys"])
def test_plan_cache_compacts_a_prefix(here, run, spec, planned):
    run("mnn", "pack", "cache.pt", "--backend", "x86-avx2", "--name", "sys", "-o", "sys/")
    said = run("plan", planned, "--policy", spec, "-o", "plan.json")
    assert "LOSSY" in said.out and "--reserve" in said.out
    run("mnn", "compact", "sys/", "--plan", "plan.json", "-o", "small/")
    run("mnn", "unpack", "small/", "-o", "small.npz")
    small = dict(np.load("small.npz"))
    policy = create_policy(spec.partition(":")[0], **(
        {"sink": 4, "budget": 16} if spec.startswith("s") else {"keep_ratio": 0.3, "skip_layers": (1,)}
    ))  # fmt: skip
    for layer, pair in enumerate(here):
        kept = policy.select_or_all(LayerState(tokens=40, layer=layer))
        for part, words in zip(("key", "value"), pair, strict=True):
            assert (small[f"layer_{layer}.{part}"] == words[0][:, kept]).all()
    again = json.loads(run("plan", "small/", "--policy", "recent_only:budget=3", "--json").out)
    assert [layer["positions"] for layer in again["layers"]] == [[[37, 3]]] * 3


def test_plan_cache_per_head_plan_has_no_pairs(here, run):
    run("mnn", "pack", "cache.pt", "--backend", "x86-avx2", "--name", "sys", "-o", "sys/")
    said = run("plan", "sys/", "--policy", "knorm:keep_ratio=0.5,skip_layers=0", "-o", "plan.json").out
    assert "20 of 40 tokens stay in each KV head in 2 of 3 layers" in said and "--reserve" not in said
    document = json.loads(Path("plan.json").read_text())
    assert document[0] == {"layer": 0, "remove": 0, "pairs": []}
    for layer, (keys, _) in enumerate(here[1:], 1):
        kept = create_policy("knorm", keep_ratio=0.5).select_or_all(LayerState(tokens=40, layer=layer, keys=keys[0]))
        found = [[token for begin, size in runs for token in range(begin, begin + size)]
                 for runs in document[layer]["heads"]]  # fmt: skip
        assert found == np.sort(kept, axis=1).tolist()
    assert "plan.json: the plan; kvmnn mnn compact refuses it, as each KV head keeps tokens of its own" in said
    refused = run("mnn", "compact", "sys/", "--plan", "plan.json", "-o", "small/", code=1).err
    assert "plan.json: layer 1: keeps tokens of its own in each KV head" in " ".join(refused.split())
    assert not Path("small").exists()


def test_plan_cache_reads_every_format(here, run):
    Path("chat.session").write_bytes(llama_files.state(Random(1), llama_files.Shape(), [25])[0])
    Path("q.session").write_bytes(llama_files.state(Random(1), llama_files.Shape(k_type="q8_0", dims=64), [25])[0])
    Path("prompt.safetensors").write_bytes(mlx_files.cache(Random(1), mlx_files.Shape(tokens=25, capacity=30))[0])
    run("encode", "prompt.safetensors", "-o", "f/", "-q")
    run("encode", "kv.npz", "-o", "kv.zarr", "-q")
    run("mnn", "unpack", "kv.npz", "--output-kind", "dump", "-o", "dump/", "-q")
    np.save("all.npy", np.ones((2, 3, 40, 2, 8), np.float16))
    for path, *more in (["chat.session"], ["q.session"], ["prompt.safetensors"], ["f/"], ["kv.zarr"], ["dump/"],
                        ["all.npy", "--axes", "2lthd"]):  # fmt: skip
        found = json.loads(run("plan", path, *more, "--policy", "streaming:budget=12", "--json").out)
        tokens = found["layers"][0]["tokens"]
        assert tokens in (25, 40) and found["input"] == path and found["verb"] == "plan"
        assert {json.dumps(layer["pairs"]) for layer in found["layers"]} == {json.dumps([[0, 4], [tokens - 8, 8]])}
    said = run("plan", "q.session", "--policy", "knorm:budget=5", "--kv-heads", 2)
    assert "5 of 25 tokens stay in each KV head" in said.out and "Hadamard" not in said.err
    assert "--kv-heads N" in run("plan", "chat.session", "--policy", "knorm:budget=5", code=2).err


SCORED = {
    "keydiff": {"budget": 10},
    "lagkv": {"keep_ratio": 0.5, "lag": 8},
    "cur": {"budget": 12, "wrapper": "chunkkv", "chunk": 5},
    "random": {"budget": 7, "seed": 3},
    "composed": {"policies": "keydiff+lagkv@lag=8", "budget": 12},
}


@pytest.mark.parametrize("name", SCORED)
def test_plan_cache_scored_policy_keeps_what_it_selects(here, run, name):
    spec = f"{name}:{','.join(f'{key}={value}' for key, value in SCORED[name].items())}"
    policy = create_policy(name, **SCORED[name])
    np.savez("t.npz", **{f"layer_{n}.{part}": words[0].transpose(1, 0, 2) for n, kv in enumerate(here)
                         for part, words in zip(("key", "value"), kv, strict=True)})  # fmt: skip
    for path, *more in (["kv.npz"], ["cache.pt"], ["t.npz", "--token-major"]):
        run("plan", path, *more, "--policy", spec, "-f", "-o", "plan.json")
        for layer, ((keys, values), entry) in enumerate(
            zip(here, json.loads(Path("plan.json").read_text()), strict=True)
        ):
            kept = policy.select_or_all(LayerState(tokens=40, layer=layer, keys=keys[0], values=values[0]))
            rows = entry.get("heads") or [entry["pairs"]] * 2
            found = [[token for begin, size in runs for token in range(begin, begin + size)] for runs in rows]
            assert found == np.broadcast_to(kept, (2, kept.shape[-1])).tolist()


def test_plan_cache_scored_policy_refuses_what_the_cache_lacks(here, run):
    arrays = {name: words for name, words in np.load("kv.npz").items() if "key" in name}
    np.savez("keys.npz", **arrays)
    assert "stay" in run("plan", "keys.npz", "--policy", "keydiff:budget=9").out
    assert (
        "keys.npz: holds keys only: lagkv needs the values"
        in run("plan", "keys.npz", "--policy", "lagkv:budget=9", code=2).err
    )
    Path("q.session").write_bytes(llama_files.state(Random(1), llama_files.Shape(k_type="q8_0", dims=64), [25])[0])
    assert "stay" in run("plan", "q.session", "--kv-heads", 2, "--policy", "keydiff:budget=9").out
    said = run("plan", "q.session", "--kv-heads", 2, "--policy", "lagkv:budget=9,lag=4", code=2).err
    assert "lagkv looks at single channels, and llama.cpp stores others here" in said and "--invert" in said


def test_plan_cache_json_document(here, run):
    found = json.loads(run("plan", "kv.npz", "--policy", "l2_fixed:budget=10,recent_ratio=0.2", "--json").out)
    assert found["policy"] == {
        "label": "l2_fixed 10 recent_ratio=0.2",
        "policy": "l2_fixed",
        "options": {"skip_layers": [], "budget": 10, "keep_ratio": None, "recent_ratio": 0.2, "strategy": "keep_low"},
    }
    assert (found["label"], found["by_head"], found["bytes"], found["bytes_after"]) == ("LOSSY", True, 15360, 3840)
    to_stdout = run("plan", "kv.npz", "--policy", "streaming:budget=10", "-o", "-")
    assert json.loads(to_stdout.out)[0] == {"layer": 0, "remove": 40, "pairs": [[0, 4], [34, 6]]}
    assert "LOSSY" in to_stdout.err
    assert "LOSSY" in run("plan", "kv.npz", "--policy", "streaming:budget=10", "-q").out
    assert run("plan", "kv.npz", "--policy", "streaming:budget=10", "-o", "-", "-q").err == ""


def test_plan_cache_random_policy_follows_the_seed(here, run):
    argv = ("plan", "kv.npz", "--policy", "l2_fixed:budget=10,strategy=random", "-o", "-", "-q")
    first = run(*argv).out
    assert first == run(*argv, "--seed", 0).out != run(*argv, "--seed", 1).out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "kv.npz",
            "kv.npz: holds K and V: planning needs attention, or scores of blocks, which no cache holds: --policy",
        ),
        ("kv.npz --axes htd", "--axes is about a cache, which is planned with --policy SPEC"),
        ("attention.npy --seed 3", "--seed is about a cache, which is planned with --policy SPEC"),
        ("attention.npy attention.npy", "several inputs: K and V are planned with --policy SPEC"),
        ("attention.npy --valid-tokens 5,6", "--valid-tokens: expected one number"),
        (
            "kv.npz --policy streaming --h2o sink_tokens=8",
            "--h2o sink_tokens is about H2O, from scores or attention; of a policy options are",
        ),
        ("kv.npz --policy streaming --engine-config c.json", "--engine-config is about H2O"),
        ("kv.npz --policy streaming --input-kind scores", "--input-kind is about H2O"),
        ("kv.npz --policy streaming --h2o keep_ratio=0.5", "--h2o keep_ratio is about H2O"),
        (
            "kv.npz --policy streaming --valid-tokens 40",
            "--valid-tokens is about packed files of MNN's, and kv.npz holds none",
        ),
        ("kv.npz --policy streaming --policy knorm", "--policy: a plan is of one policy"),
        ("kv.npz --policy nothing", "--policy nothing: unknown policy 'nothing'"),
        ("kv.npz --policy knorm", "knorm: expected a budget (tokens) or a keep_ratio"),
        (
            "kv.npz --policy streaming:budget=25%",
            "streaming: budget is 25%: expected a number of tokens, or keep_ratio",
        ),
        (
            "kv.npz --policy h2o_blocks:keep_ratio=0.5",
            "h2o_blocks needs attention, which a cache does not hold: expect",
        ),
        ("kv.npz --policy knorm:budget=5,skip_layers=3", "skip_layers names layer 3"),
        ("kv.npz --policy snapkv:budget=5", "snapkv needs queries, which a cache does not hold: kvmnn eval MODEL"),
        ("kv.npz --policy leverage:budget=5", "leverage needs rotation, which a cache does not hold: kvmnn eval MODEL"),
        (
            "kv.npz --policy keydiff:budget=5,wrapper=critical",
            "keydiff needs output weights, which a cache does not hold",
        ),
        ("kv.npz --policy keydiff:budget=5,wrapper=ada", "keydiff keeps different numbers of tokens in heads of one"),
        ("kv.npz --policy keydiff:budget=5,phase=decoding", "phase is 'decoding', and a plan cuts a prompt"),
        ("kv.npz --policy keydiff:budget=5,by_layer=1+2", "by_layer has relative budgets of 2 layers, the model has 3"),
        ("attention.npy --policy streaming", "attention and scores are planned without --policy"),
        ("kv.npz --policy streaming --json -o -", "--json and -o - both want standard output"),
        ("chat.session --policy streaming:budget=9", "holds tokens of 2 sequences, and a policy keeps those of one"),
        (
            "chat.session --policy streaming:budget=9 --raw-blocks",
            "--raw-blocks is about bytes, and policies look at numbers",
        ),
    ],
)
def test_plan_cache_error_is_one_line(here, run, argv, message):
    Path("chat.session").write_bytes(llama_files.state(Random(1), llama_files.Shape(), [25], sequences=2)[0])
    said = run("plan", *argv.split(), code=2)
    lines = [line for line in said.err.splitlines() if "note: " not in line]
    assert len(lines) == 1 and lines[0].startswith("kvmnn: error: ") and message in lines[0]
    assert said.out == ""


def test_plan_cache_existing_output_needs_force(here, run):
    Path("plan.json").write_text("mine")
    assert "exists already" in run("plan", "kv.npz", "--policy", "streaming", "-o", "plan.json", code=1).err
    assert Path("plan.json").read_text() == "mine"
    run("plan", "kv.npz", "--policy", "streaming", "-f", "-o", "plan.json")
    assert [entry["pairs"] for entry in json.loads(Path("plan.json").read_text())] == [[], [], []]


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 19])
def test_plan_cache_small_ratio_keeps_a_token_or_is_refused(here, run, tokens):
    """8 tokens x 0.05 once kept none, and attention over no token is undefined."""
    rng = np.random.default_rng(tokens)
    np.savez("short.npz", **{f"layer_0.{part}": rng.random((2, tokens, 16), np.float32) for part in ("key", "value")})
    for spec in ("knorm", "l2_fixed:skip_layers=none", "recent_only:skip_layers=none", "streaming_press:sink=0"):
        asked = f"{spec}{',' if ':' in spec else ':'}keep_ratio=0.05"
        assert json.loads(run("plan", "short.npz", "--policy", asked, "--json").out)["layers"][0]["tokens_after"] == 1
    if tokens > 1:
        said = run("plan", "short.npz", "--policy", "streaming:keep_ratio=0.05", code=2).err
        assert f"a keep_ratio of 0.05 is 1 of {tokens} tokens and leaves no window after 4 sinks" in said
