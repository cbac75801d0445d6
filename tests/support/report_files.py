"""A folder of results as verbs leave them, with made-up figures that measure nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_results

from kvmnn.runtime.metrics import RuntimeLayerMetrics, RuntimeMetrics

CASES = ("runtime_baseline", "runtime_probe", "runtime_full", "runtime_store", "llm_demo_full", "llm_demo_store")


def gate(name: str, verdict: str, value: str = "", limit: str = "", why: str = "") -> dict[str, str]:
    """A gate as ``gate.json`` has it."""
    return {"name": name, "verdict": verdict, "value": value, "limit": limit, "why": why}


def gates_of(case: str, *, passed: bool) -> list[dict[str, str]]:
    """Some gates of a case."""
    found = [gate("lossy ratio", "pass", "3.114", ">= 3.000", "least of the runs")]
    if case != "runtime_baseline":
        found.append(gate("consistency", "pass", "0 bytes differ", "0", "K and V at 6 of 64 steps (39 MiB)"))
    if not passed:
        found += [
            gate("lossless ratio", "fail", "1.170", ">= 1.300", "raw over compressed bytes"),
            gate("decompression", "fail", "352,709 us", "> 0, <= 70,000 us"),
            gate("decode drop", "fail", "+16.30%", "<= 5.00%", "53.459 of 63.868 tok/s"),
            gate("perplexity", "not measured", "", "<= +5.00%", "needs texts (--text)"),
        ]
    return [*found, gate("cache hits", "off")]


def case_document(case: str, *, passed: bool) -> dict[str, Any]:
    """``gate.json`` of a case."""
    gates = gates_of(case, passed=passed)
    failure = ", ".join(f"{one['name']} {one['verdict']}" for one in gates if one["verdict"] not in ("pass", "off"))
    verdict = "pass" if passed else "fail"
    return {
        "case": case,
        "verdict": verdict,
        "overall_pass": passed,
        "failure": failure,
        "strict": True,
        "gates": gates,
    }


def row(case: str, *, passed: bool) -> dict[str, Any]:
    """A row of ``summary.json``."""
    both = {"case": case, "overall_pass": passed, "failure_reason": "" if passed else "lossless ratio fail"}
    if case.startswith("runtime"):
        return {
            "suite": "runtime", "mode": case.removeprefix("runtime_"), **both, "lossy_best": 3.114,
            "lossless_selected_value": 1.17, "decode_gate_tps": 41.53, "decode_best": 42.0, "decode_baseline": 61.05,
            "decode_drop_ratio": 0.319738, "decode_drop_target": 0.05, "kv_content_consistency_pass": True,
        }  # fmt: skip
    return {
        "suite": "llm_demo", "mode": case.removeprefix("llm_demo_"), **both, "candidate_lossy_ratio_avg": 1.871,
        "candidate_lossless_ratio_avg": 1.454, "candidate_runtime_total_ratio_avg": 2.68,
        "candidate_decode_tps_avg": 53.4585, "baseline_decode_tps_avg": 63.8684, "decode_drop_ratio": 0.16299,
        "decode_drop_target": 0.08,
    }  # fmt: skip


def round_document(passed: dict[str, bool]) -> dict[str, Any]:
    """``summary.json``."""
    return {
        "generated_at": "2026-11-22T13:42:25", "overall_pass": all(passed.values()), "total_cases": len(passed),
        "rows": [row(case, passed=one) for case, one in passed.items()],
    }  # fmt: skip


def latency(scale: float) -> dict[str, float]:
    """Percentiles of operations."""
    return {
        "count": 60, "total_us": 6000 * scale, "p50_us": 100 * scale, "p95_us": 400 * scale, "p99_us": 900 * scale,
        "max_us": 1200 * scale,
    }  # fmt: skip


def side(speed: float, *, compressed: bool) -> dict[str, Any]:
    """A run."""
    return {
        "prompt_tokens": 512, "decode_tokens": 64, "prefill_seconds": 0.5, "decode_seconds": 64 / speed,
        "lossy_ratio": 3.1 if compressed else 1.0, "held_ratio": 0.98, "encoded_ratio": 1.25 if compressed else None,
        "total_ratio": 3.04 if compressed else 1.0,
        "latencies": {"decompress": latency(2), "verify": latency(1)} if compressed else {},
    }  # fmt: skip


def runs_document(case: str) -> dict[str, Any]:
    """``runs.json`` of a case."""
    pairs = [
        {"work": f"text{work}:512", "bucket": "512", "prompts": "texts", "round": 1,
         "without": side(60 + work, compressed=False),
         "candidate": side(50 + work, compressed=True)}
        for work in range(3)
    ]  # fmt: skip
    quality = {"mean": 0.0046, "low": 0.0016, "high": 0.0081, "texts": 10, "tokens": 960, "lossy_ratio": 3.1}
    return {
        "kvmnn_gate_runs": 1, "stamp": "", "case": case, "mode": "store", "pairs": pairs, "comparisons": [],
        "quality": quality, "notes": [],
    }  # fmt: skip


def about_document() -> dict[str, Any]:
    """``run.json``."""
    return {
        "kvmnn_gate_run": 1, "command": "kvmnn gate run model/ -o round/", "model": "model/", "model_sha256": "ab" * 32,
        "kvmnn": "0.1.0", "python": "3.11.7", "machine": "Linux-x86_64", "processors": 2,
        "settings": {"prompts": [768], "generate": 64},
        "cases": {"runtime_full": {"mode": "full", "engine": {"kv_h2o_block_tokens": 32}}},
    }  # fmt: skip


def past_round(number: int) -> dict[str, Any]:
    """A line of ``history.jsonl``."""
    cases = [
        {"case": case, "pass": number > 1, "reason": "" if number > 1 else "lossy ratio fail",
         "lossy": 2.5 + number / 9, "lossless": 1.2 + number / 50, "decode_tps": 40.0 + number, "drop": 0.05}
        for case in CASES
    ]  # fmt: skip
    return {"generated_at": f"2026-11-2{number}T10:00:00", "overall_pass": number > 1, "cases": cases}


def measured_document(layers: int = 6) -> dict[str, Any]:
    """What ``kvmnn measure --encode --json`` prints."""

    def sizes(stored: float) -> dict[str, Any]:
        return {
            "raw_bytes": 393216, "simulated_bytes": int(393216 / stored), "simulated_ratio": stored - 0.01,
            "limit_bytes": 337405.8, "limit_ratio": 1.1654, "stored_bytes": int(393216 / stored),
            "stored_ratio": stored, "stored_frames": 1, "verified": True,
        }  # fmt: skip

    every = {
        str(layer): {"tokens": 768, **sizes(1.3), "k": sizes(1.25 + layer / 100), "v": sizes(1.35 - layer / 100)}
        for layer in range(layers)
    }
    evaluation = {
        "schema_version": 3, "dump_dir": "dump", "codec": "fp16_gear_predictive_zstd", "raw_bytes": 4718592,
        "compressed_bytes": 3659028, "k_lossless_ratio": 1.2507, "v_lossless_ratio": 1.3309,
        "weighted_lossless_ratio": 1.2895752642505058,
    }  # fmt: skip
    return {
        "verb": "measure", "command": "kvmnn measure dump --encode --json",
        "label": "LOSSLESS", "evaluation": evaluation,
        "breakdown": {"meaning": {"limit": "order-0 entropy"}, "found_layers": layers, "overall": sizes(1.3003),
                      "layers": every},
    }  # fmt: skip


def replay_document(steps: int = 129) -> dict[str, Any]:
    """What ``kvmnn mnn replay --json`` prints."""
    points = [
        {"step": step, "tokens": 512 + step, "appended_bytes": 12288 * (512 + step), "live_bytes": 12288 * (512 + step),
         "held_bytes": 11000 * (512 + step), "ratio": 1.2, "queue_depth_peak": 3, "step_us": 17000.0}
        for step in range(steps)
    ]  # fmt: skip
    layers = [
        RuntimeLayerMetrics(
            layer=layer, tokens=768, raw_bytes=1310720, compressed_bytes=1310720 - 90000 * (layer + 1),
            held_bytes=1097476,
        ).to_dict()
        for layer in range(6)
    ]  # fmt: skip
    metrics = RuntimeMetrics().to_dict() | {
        "h2o_lossless_ratio": 1.2311569452285767, "h2o_lossless_raw_bytes": 7864320,
        "h2o_lossless_compressed_bytes": 6387748, "h2o_lossless_fallback_count": 0,
        "lossy_ratio": 1.0, "lossless_ratio": 1.153436727095127, "total_ratio": 1.153436727095127,
        "held_bytes": 8181796, "layers": layers,
        **{name: latency(place + 1) for place, name in enumerate(("compress", "decompress", "wait", "verify"))},
    }  # fmt: skip
    return {
        "verb": "replay", "command": "kvmnn mnn replay dump --engine-config c.json --json",
        "behaviour": "sound", "layers": 6,
        "prompt": 512, "tokens": 768, "compared_calls": 1542, "wrong_calls": 0, "seconds": 5.4, "metrics": metrics,
        "points": points,
    }  # fmt: skip


def codecs_document() -> dict[str, Any]:
    """What ``kvmnn bench --json`` prints."""

    def timing(speed: float) -> dict[str, float]:
        return {"wall": 786432 / speed, "cpu": 786432 / speed}

    results = [
        {"codec": codec, "version": "1", "raw_bytes": 786432, "stored_bytes": int(786432 / ratio),
         "encode": timing(speed), "decode": timing(9 * speed), "error": None, "ratio": ratio, "dominated_by": None}
        for codec, ratio, speed in (("kvmnn fast", 1.32, 687e6), ("zstd -3", 1.19, 433e6), ("kvmnn max", 1.34, 4.5e5))
    ]  # fmt: skip
    array = {
        "name": "layer_0.key", "dtype": "fp16", "array_bytes": 786432, "sample_bytes": 786432, "entropy_ratio": 1.1959,
        "rounds": 2, "results": results, "missing": ["lz4"],
    }  # fmt: skip
    machine = {"processor": "x86_64", "cpus": 2, "system": "Linux"}
    return {"verb": "bench", "command": "kvmnn bench dump --json", "machine": machine, "threads": 1, "arrays": [array]}


def write_json(path: Path, document: Any) -> Path:
    """A JSON file, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def write_round(root: Path, passed: dict[str, bool] | None = None) -> Path:
    """What ``gate run`` leaves."""
    passed = passed or {case: case == "runtime_baseline" for case in CASES}
    write_json(root / "summary.json", round_document(passed))
    write_json(root / "run.json", about_document())
    for case, one in passed.items():
        name = "gate.json" if case.startswith("runtime") else "llm_demo_report.json"
        more = {} if case.startswith("runtime") else {"bucket_report": {}}
        write_json(root / case / name, {**case_document(case, passed=one), **more})
        write_json(root / case / "runs.json", runs_document(case))
    lines = [json.dumps(past_round(number)) for number in (1, 2, 3)]
    (root / "history.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def write_everything(root: Path) -> Path:
    """A round, and a result of every other verb."""
    write_round(root)
    write_json(root / "eval.json", {**lm_results.document().to_dict(), "command": "kvmnn eval model/ --text texts/"})
    write_json(root / "measure.json", measured_document())
    write_json(root / "replay.json", replay_document())
    write_json(root / "bench.json", codecs_document())
    return root
