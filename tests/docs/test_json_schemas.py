"""The schemas of ``--json`` documents: current, complete, and true of what every verb prints."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import compressor_files
import gate_logs
import numpy as np
import packed_samples
import pytest
from json_documents import SCHEMAS, list_problems, load_validator
from jsonschema import Draft202012Validator
from offline_model import write_dump
from prefixes import layers_of
from repository import ROOT

from kvmnn.cli.command_parser import COMMANDS
from kvmnn.cli.commands.store import STORE_ACTIONS

IDS = [*range(100, 150)]
ENGINE = {
    "kv_lossless_enable": True,
    "kv_lossless_runtime_enable": True,
    "kv_lossless_codec": "gear_delta",
    "kv_lossless_runtime_mode": "store",
    "kv_lossless_scope": "front_n",
    "kv_lossless_front_n": 1,
    "kv_lossless_block_tokens": 4,
    "kv_lossless_hot_sink_tokens": 0,
    "kv_lossless_hot_recent_tokens": 4,
    "kv_lossless_async_threads": 0,
}
PACKED = "--backend x86-avx2 --kv-heads 2 --head-dim 6 --valid-tokens 70"
QUICK = f"""
encode kv.npz -o frames
encode keys.npy -o dense --codec dense
decode frames -o back.npz
inspect frames keys.npy w.bin
inspect p {PACKED}
verify frames --against kv.npz
diff kv.npz back.npz
diff kv.npz back.npz --atol 0.1
bench keys.npy
measure kv.npz
measure kv.npz --dense
measure dump --analysis entropies
measure dump --to-fp16 converted
store put S kv.npz --token-ids ids.json --fingerprint m
store match S --token-ids ids.json
store get S --token-ids ids.json -o got.npz
store ls S
store stat S
store verify S
store pin S --token-ids ids.json
store unpin S --token-ids ids.json
store export S --token-ids ids.json -o ids.kvmnn
store rm S --token-ids ids.json
store import S ids.kvmnn
store gc S --size-limit 1M
store simulate trace.jsonl --model-shape 2x2x4,fp16 --size 1M
plan kv.npz --policy streaming:budget=8
plan scores.npz
mnn unpack p -o unpacked.npz {PACKED}
mnn pack unpacked.npz -o engine --name x --backend x86-avx2
mnn repack p -o other --target-backend arm64-fp32 --name sys {PACKED}
plan unpacked.npz --policy streaming:budget=8 -o plan.json
mnn compact p -o compact --plan plan.json {PACKED}
mnn replay kv.npz --engine-config engine.json
gate parse logs/run_0001.log -o m.csv
gate check m.csv --case runtime_store --logs-dir logs -o round/runtime_store
gate demo without with --case llm_demo_store -o round
gate summary round
model list
compressor convert c.pth -o w2.bin
compressor verify w.bin
compressor inspect w.bin
compressor export w.bin -o w.safetensors
compressor run w.bin c.npz -o small.npz --axes lbhtd
"""
FAILING = (
    "mnn replay kv.npz --engine-config engine.json",  # these words have no smaller frames
    "gate summary round",
    "gate run model --suite runtime --suite-config run.json --text texts -o gates",  # a random decoder
    "gate search model --text texts --suite-config run.json --policy streaming --budget 12 --max-cells 1 -o search",
)
WITH_MODEL = """
dump-kv model --text texts/a.txt --max-tokens 40 -o dumped
eval model --text texts/a.txt --policy streaming --budget 8 --max-tokens 40 -o evaluated.json
generate model --prompt 'w1 w2 w3' --policy streaming --budget 8 --max-new-tokens 4
profile make --from dumped -o p.kvmp --below 0 --rope none
profile inspect p.kvmp
profile verify p.kvmp
report evaluated.json -o report.html
gate run model --suite runtime --suite-config run.json --text texts -o gates
gate history gates
gate search model --text texts --suite-config run.json --policy streaming --budget 12 --max-cells 1 -o search
model import x.gguf -o imported
"""


def test_schema_files_are_current() -> None:
    sys.path.insert(0, str(ROOT / "tools" / "docs"))
    try:
        import json_schemas
    finally:
        del sys.path[0]
    files = json_schemas.build_files()
    assert {file.path for file in files if file.path.suffix == ".json"} == set(SCHEMAS.glob("*.json"))
    for file in files:
        assert file.path.read_text() == file.text, f"{file.path}: run tools/docs/json_schemas.py"
    for path in SCHEMAS.glob("*.json"):
        Draft202012Validator.check_schema(json.loads(path.read_text()))


def test_schemas_cover_each_verb_with_a_document() -> None:
    commands = {command for command in COMMANDS if command not in ("completion", "store", "gate")}
    commands |= {f"store {action}" for action in STORE_ACTIONS if action != "serve-metrics"} | {"store simulate"}
    commands |= {f"gate {action}" for action in ("run", "search", "parse", "check", "demo", "summary", "history")}
    names = {command.replace(" ", "-") for command in commands}
    assert {path.stem for path in SCHEMAS.glob("*.json")} == names
    words = [line.split() for line in list_commands(QUICK + WITH_MODEL)]
    called = {"-".join(pair[:2]) for pair in words} | {pair[0] for pair in words}
    assert names - called == {"model-pull"}  # whose document is that of model import; tests/lm pulls


def test_schema_of_a_changed_document_is_not_met() -> None:
    document = {
        "verb": "store match",
        "tokens": 1,
        "asked": 2,
        "dtype": None,
        "others": {},
        "notes": [],
        "outage": False,
    }
    assert not list_problems(["store", "match"], json.dumps(document))
    for change in ({"tokens": "1"}, {"verb": "match"}, {"more": 1}):
        assert list_problems(["store", "match"], json.dumps(document | change))
    del document["asked"]
    assert "'asked' is a required property" in list_problems(["store", "match"], json.dumps(document))[0]


def list_commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def run_all(run: Any, text: str) -> None:
    """Run commands with ``--json``: each prints a document that has a schema and meets it."""
    for line in list_commands(text):
        words = shlex.split(line)
        found = run(*words, "--json", code=int(line in FAILING))
        assert "verb" in json.loads(found.out), line
        assert load_validator("-".join(words[:2])) or load_validator(words[0]), line


def test_json_schemas_hold_of_each_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.chdir(tmp_path)
    arrays = {
        f"layer_{cache.layer}.{part}": words
        for cache in layers_of(IDS)
        for part, words in (("key", cache.keys), ("value", cache.values))
    }
    np.savez("kv.npz", **arrays)
    np.save("keys.npy", arrays["layer_0.key"])
    np.savez("scores.npz", layer_0=np.arange(70, dtype=np.float32), layer_1=np.arange(70, dtype=np.float32))
    np.savez("c.npz", k=np.ones((2, 1, 3, 21, 2), np.float32), v=np.ones((2, 1, 3, 21, 2), np.float32))
    words = np.ones((20, 2, 4), np.float32)
    write_dump(Path("dump"), 0, 0, words, words)
    compressor_files.checkpoint(Path("c.pth"), compressor_files.weights())
    Path("ids.json").write_text(json.dumps(IDS))
    Path("trace.jsonl").write_text(json.dumps({"token_ids": IDS}) + "\n")
    Path("engine.json").write_text(json.dumps(ENGINE))
    packed_samples.write_prefix(Path("p"), packed_samples.arrays(2, 2, 70, 6), capacity=114)
    Path("w.bin").write_bytes(compressor_files.weight_file(layers=2))
    gate_logs.write_logs(Path("logs"), gate_logs.row(5.81), gate_logs.row(6.0, prompt=1024))
    gate_logs.write_demo(Path("without"), {"prompt_128_1": gate_logs.record()})
    gate_logs.write_demo(Path("with"), {"prompt_128_1": gate_logs.record(decode_us=80_000_000)})
    run_all(run, QUICK)


@pytest.mark.slow
def test_json_schemas_hold_of_verbs_with_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any, without_workers: None
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("tokenizers")
    import gate_models
    import tiny_models

    monkeypatch.chdir(gate_models.write_model(tmp_path / "work"))
    monkeypatch.setenv("KVMNN_MODELS", str(tmp_path / "models"))
    data = tiny_models.build_gguf(*tiny_models.build_gguf_parts(tiny_models.MODELS["llama"]))
    Path("x.gguf").write_bytes(data)
    run_all(run, WITH_MODEL)
