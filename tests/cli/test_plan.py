"""``kvmnn plan``: scores or attention in, pairs and a picture out."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from kvmnn import PackedCache
from kvmnn.cli.entry_point import main
from kvmnn.policies.h2o import plan_blocks, sum_by_block

RNG = np.random.default_rng(4)
ATTENTION = RNG.random((2, 4, 1, 500), dtype=np.float32)
OPTIONS = ("--h2o", "block_tokens=16,sink_tokens=16,recent_tokens=40,target_ratio=3.5")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("layers.npy", ATTENTION)
    np.save("heads.npy", ATTENTION[0, :, 0].astype(np.float16))
    np.save("scores.npy", np.arange(20, dtype=np.float32))
    np.savez("scores.npz", layer_0=np.arange(20, dtype=np.float32), layer_1=-np.arange(20, dtype=np.float32))
    return tmp_path


@pytest.fixture
def run(capsys):
    def call(*argv: object, code: int = 0) -> SimpleNamespace:
        capsys.readouterr()
        found = main(["plan", *map(str, argv)])
        streams = capsys.readouterr()
        assert found == code, streams.err
        return streams

    return call


def expected(attention, **more):
    sums = sum_by_block(attention, 16)
    return plan_blocks(
        sums, 500, block_tokens=16, sink_tokens=16, recent_tokens=40, **{"target_lossy_ratio": 3.5, **more}
    )


def test_plan_attention_of_layers_equals_python(here, run):
    found = json.loads(run("layers.npy", *OPTIONS, "--json").out)
    for layer, attention in zip(found["layers"], ATTENTION, strict=True):
        made = expected(attention)
        assert layer["pairs"] == [list(pair) for pair in made.reserve_pairs]
        assert (layer["remove"], layer["tokens"], layer["tokens_after"]) == (500, 500, made.num_final_tokens)
        assert layer["keep"] == "".join("01"[int(kept)] for kept in made.keep)
        assert layer["lossy_ratio"] == float(made.lossy_ratio) and layer["lossy_ratio_of"] == "tokens"
    assert found["label"] == "LOSSY" and found["verb"] == "plan" and found["config"]["block_tokens"] == 16


def test_plan_text_has_pairs_and_picture(here, run):
    made = expected(ATTENTION[0, :, 0].astype(np.float16))
    head, pairs, picture, legend = run("heads.npy", *OPTIONS).out.splitlines()
    assert (
        head == f"layer 0 (heads): LOSSY, {made.num_final_tokens} of 500 tokens stay, {made.lossy_ratio:.3f} x tokens, "
        f"target 143"
    )
    assert pairs == "  --remove 500 --reserve " + ",".join(f"{b}:{n}" for b, n in made.reserve_pairs)
    letters = picture.split()[1]
    assert letters[0] == "S" and letters[-4:] == "RRRR" and letters.count("#") == made.keep.sum() - 5
    assert "16 tokens a letter" in legend
    assert run("heads.npy", *OPTIONS, "--no-map").out.splitlines() == [head, pairs]
    assert run("heads.npy", *OPTIONS, "-q").out.splitlines() == [head, pairs, picture, legend]


def test_plan_file_is_accepted_by_compact(here, run, capsys):
    run("scores.npz", "--h2o", "block_tokens=8,sink_tokens=8,recent_tokens=8", "-o", "plan.json")
    plans = json.loads((here / "plan.json").read_text())
    assert [entry["pairs"] for entry in plans] == [[[0, 8], [112, 48]], [[0, 48], [152, 8]]]
    assert "exists already" in run("scores.npz", "-o", "plan.json", code=1).err
    run("scores.npz", "-f", "-o", "plan.json", "--h2o", "recent_tokens=9999")
    assert json.loads((here / "plan.json").read_text()) == [{"layer": n, "remove": 0, "pairs": []} for n in (0, 1)]
    from kvmnn import PackLayout

    layout = PackLayout.from_backend("x86-avx2", kv_heads=1, head_dim=8)
    for entry in plans:
        cache = PackedCache(layout)
        cache.append(np.zeros((1, 160, 8), np.float32), np.zeros((1, 160, 8), np.float32))
        cache.realloc(entry["remove"], entry["pairs"])
        assert len(cache) == 56


def test_plan_to_standard_output(here, run):
    streams = run("scores.npy", "-o", "-", "--h2o", "block_tokens=8,sink_tokens=8,recent_tokens=8")
    assert json.loads(streams.out)[0]["remove"] == 160
    assert "LOSSY" in streams.err
    assert "standard output" in run("scores.npy", "-o", "-", "--json", code=2).err


def test_plan_floor_keep_drops_all_but_sinks_and_recent_tokens(here, run):
    limits = "sink_tokens=64,recent_tokens=640"  # 704 of 1,280 tokens, where 427 are to stay
    assert "UNCHANGED, all 1,280 tokens stay" in run("scores.npy", "--h2o", limits).out
    assert "LOSSY, 704 of 1,280 tokens stay" in run("scores.npy", "--h2o", f"{limits},floor=keep").out
    assert "expected engine or keep" in run("scores.npy", "--h2o", "floor=kept", code=2).err


def test_plan_without_eviction_is_unchanged(here, run):
    assert (
        "UNCHANGED, all 1,280 tokens stay: sink and recent reach"
        in run("scores.npy", "--h2o", "recent_tokens=1280").out
    )
    assert "UNCHANGED, all 1,280 tokens stay" in run("scores.npy", "--h2o", "keep_ratio=1,recent_tokens=0").out


def test_plan_json_scores_with_infinite_numbers(here, run):
    (here / "a.json").write_text("[[1, NaN, -Infinity, 2e999]]")
    assert "a.json: is not valid JSON: NaN is no number of JSON" in run("a.json", code=1).err
    (here / "a.json").write_text("[[1, -2e999, 0, 2e999], [3, 1, 2, 0]]")
    found = json.loads(
        run(
            "a.json",
            "--h2o",
            "recent_tokens=0",
            "--json",
            "--h2o",
            "block_tokens=10",
            "--valid-tokens",
            40,
            "--h2o",
            "sink_tokens=0",
        ).out
    )
    assert [layer["keep"] for layer in found["layers"]] == ["1001", "1010"]


def test_plan_scores_of_every_dtype_and_order(here, run):
    scores = np.arange(20, dtype=np.float32)
    (here / "bf16.bin").write_bytes((scores.view(np.uint32) >> 16).astype("<u2").tobytes())
    np.save("big.npy", scores.astype(">f2"))
    np.save("fortran.npy", np.asfortranarray(ATTENTION))
    options = ("--h2o", "block_tokens=8,sink_tokens=8,recent_tokens=8", "--json")
    expected_pairs = json.loads(run("scores.npy", *options).out)["layers"][0]["pairs"]
    assert json.loads(run("bf16.bin", "--dtype", "bf16", *options).out)["layers"][0]["pairs"] == expected_pairs
    assert json.loads(run("big.npy", *options).out)["layers"][0]["pairs"] == expected_pairs
    layers = [json.loads(run(name, *OPTIONS, "--json").out)["layers"] for name in ("layers.npy", "fortran.npy")]
    assert [layer["pairs"] for layer in layers[0]] == [layer["pairs"] for layer in layers[1]]


def test_plan_bytes_and_static_targets(here, run):
    found = json.loads(run("scores.npy", "--h2o", "keep_ratio=0.5,recent_tokens=64,bytes_per_token=256", "--json").out)
    (layer,) = found["layers"]
    assert layer["target"] == 640 and layer["lossy_ratio_of"] == "bytes"
    assert layer["lossy_ratio"] == float(np.float32(1280 * 256) / np.float32(640 * 256 + 8 * len(layer["pairs"])))


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("nowhere.npy",), 1, "nowhere.npy"),
        (("scores.npy", "--valid-tokens", "9"), 1, "20 scores for 9 tokens"),
        (("scores.npy", "--input-kind", "attention"), 1, r"shape (20,)"),
        (("layers.npy", "--input-kind", "scores"), 1, "expected (blocks,)"),
        (("keys.npy",), 1, "keys has numbers below 0: expected attention"),
        (("raw.bin",), 2, "dtype"),
        (("scores.npy", "--h2o", "block_tokens=0"), 2, "--h2o: block_tokens"),
        (("scores.npy", "--h2o", "sink_tokens=-1"), 2, "--h2o: sink_tokens"),
        (("scores.npy", "--h2o", "target_ratio=0.5"), 2, "expected at least 1"),
        (("scores.npy", "--h2o", "target_ratio=nan"), 2, "not a number"),
        (("scores.npy", "--h2o", "keep_ratio=2"), 2, "expected 0 to 1"),
        (("scores.npy", "--h2o", "keep_ratio=1,target_ratio=2"), 2, "specify one of them"),
        (("scores.npy", "--h2o", "alpha=7"), 2, "--h2o alpha"),
        (("bad.json",), 1, "not valid JSON"),
        (("text.json",), 1, "list of scores"),
        (("mixed.json",), 1, "entry 1"),
        (("huge.json",), 1, "too large"),
        (("empty.json",), 1, "shape (0,)"),
        (("deep.json",), 1, "not valid JSON"),
    ],
)
def test_plan_error_is_one_line(here, run, argv, code, message):
    np.save("keys.npy", RNG.standard_normal((2, 30, 8)).astype(np.float16))
    (here / "raw.bin").write_bytes(bytes(8))
    (here / "bad.json").write_text("[1,")
    (here / "text.json").write_text('{"a": 1}')
    (here / "mixed.json").write_text("[[1], [true]]")
    (here / "huge.json").write_text("[1" + "0" * 400 + "]")
    (here / "empty.json").write_text("[]")
    (here / "deep.json").write_text("[" * 100_000)
    said = run(*argv, code=code).err
    assert said.startswith("kvmnn: error: ") and said.count("\n") == 1
    assert message in said


@pytest.mark.parametrize(
    ("options", "lower"),
    [
        ("", "lower --h2o recent_tokens (256)"),
        ("--h2o recent_tokens=16,block_tokens=16", "lower --h2o sink_tokens (32)"),
        ("--h2o recent_tokens=4,sink_tokens=4", "lower --h2o block_tokens (64)"),
        (
            "--h2o recent_tokens=40,sink_tokens=40,block_tokens=1",
            "lower --h2o recent_tokens (40) and --h2o sink_tokens (40)",
        ),
    ],
)
def test_plan_floors_covering_everything_name_the_option(tmp_path, run, options, lower):
    np.save(tmp_path / "a.npy", np.full((2, 100), 0.01, np.float32))
    said = run(tmp_path / "a.npy", "--no-map", *options.split()).out
    assert "UNCHANGED, all 100 tokens stay: sink and recent reach the target" in said and said.endswith(f"{lower}\n")


def test_plan_notes_how_the_engine_reads_its_config(here, run):
    config = {
        "kv_h2o_block_tokens": -5,
        "kv_h2o_recent_tokens": 32,
        "kv_h2o_ema_alpha": 1.5,
        "attention_mode": 10,
    }
    (here / "config.json").write_text(json.dumps(config))
    notes = run("scores.npy", "--engine-config", "config.json").err.splitlines()
    assert notes == [
        "kvmnn: note: config.json: attention_mode 10 holds K or V in int8, so the engine evicts nothing; the plan is "
        "what it would evict otherwise",
        "kvmnn: note: config.json: kv_h2o_block_tokens -5 counts as 1",
        "kvmnn: note: config.json: kv_h2o_ema_alpha 1.5 counts as 1.0",
    ]
    (here / "config.json").write_text('{"kv_h2o_target_mode": "statc"}')
    refused = run("scores.npy", "--engine-config", "config.json", code=2).err
    assert (
        "config.json: kv_h2o_target_mode is 'statc': expected one of adaptive, static (did you mean 'static'?)"
        in refused
    )
    (here / "config.json").write_text("{}")
    said = run("scores.npy", "--engine-config", "config.json").err
    assert "config.json: kv_h2o_enable is not true, so the engine evicts nothing" in said
    assert said.count("\n") == 1
    (here / "config.json").write_text('{"kv_h2o_enable": true, "kv_h2o_layer_start": 1}')
    assert run("scores.npy", "--engine-config", "config.json").err == ""
