"""Measure a language model under a policy: `python tools/bench/lm.py` writes benchmarks/lm.md and .json.

On the shipped model, one thread of onnxruntime:

* time inside onnxruntime and time inside the policy (holding, scoring, choosing, cutting), for every policy, token by
  token and in chunks, from the moment on at which the cache is full; rounds in which all policies take turns;
* a step with numpy arrays in and out against one with bound buffers;
* `kvmnn eval` as a process: 20 texts of 2,000 tokens under 6 configurations on all cores, its time and memory;
* memory that texts of different lengths take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from common import ROOT, interleaved, ratio, table, write_results

from kvmnn.lm.runner import Runner, RunTimings
from kvmnn.lm.session import DecoderSession
from kvmnn.lm.tokenizer import Tokenizer
from kvmnn.policies import POLICIES, create_policy

MODEL = ROOT / "fixtures" / "lm"
BUDGET, SHARE_GOAL, EVAL_LIMIT_S = 512, 0.10, 900
OPTIONS: dict[str, dict[str, Any]] = {
    "l2_ratio": {"keep_ratio": 0.8, "prune_after": BUDGET},
    "l2_fixed": {"recent_ratio": 0.5},
    "h2o_heads": {"recent": BUDGET // 2},
}
EVALUATED = ["full", "recent_only", "streaming", "l2_fixed:recent_ratio=0.5", "h2o_decayed",
             "h2o_decayed_heads"]  # fmt: skip

Tokens = npt.NDArray[np.int64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and texts; for trying the script out")
    quick = parser.parse_args().quick
    ids = text_tokens()
    shares = [row for chunk in (1, 4) for row in policy_times(ids, chunk, rounds=3 if quick else 7)]
    evaluated = evaluate(texts=2 if quick else 20, tokens=500 if quick else 2000)
    bound = bindings(256 if quick else 1000)
    lengths = [memory_of(ids, tokens) for tokens in ((512, 1024) if quick else (1024, 2048, 4096))]
    data = {"policy_times": shares, "bindings": bound, "evaluation": evaluated, "memory": lengths}
    sections = [policy_section(shares), bindings_section(bound), evaluation_section(evaluated), memory_section(lengths)]
    print(write_results("lm", "A language model under a policy", sections, data).read_text(encoding="utf-8"))


def text_tokens() -> Tokens:
    """The longest text that ships, from its start."""
    path = max((MODEL / "texts").glob("*.txt"), key=lambda path: path.stat().st_size)
    tokenizer = Tokenizer.open_for_model(MODEL)
    return np.concatenate([[tokenizer.bos], tokenizer.encode(path.read_text(encoding="utf-8"))]).astype(np.int64)


# -- onnxruntime and the policy ----------------------------------------------------------------------------------------


def policy_times(ids: Tokens, chunk: int, rounds: int) -> list[dict[str, Any]]:
    """Medians over rounds of the time per token, once more than the budget has been seen."""
    session = DecoderSession.open(MODEL, attentions=True)
    plain = DecoderSession.open(MODEL)
    found: dict[str, list[RunTimings]] = {}
    for number in range(rounds + 1):
        for label, name, more in jobs():
            needs = POLICIES[name].requires if name else "lengths"
            policy = create_policy(name, **more) if name else None
            clock = read_full(Runner(session if "scores" in needs else plain, policy), ids, chunk)
            if number:  # the first round warms up
                found.setdefault(label, []).append(clock)
    rows = []
    for label, clocks in found.items():
        model = statistics.median(clock.model_seconds / clock.num_tokens for clock in clocks)
        policy = statistics.median(clock.policy_seconds / clock.num_tokens for clock in clocks)
        share = statistics.median(clock.policy_seconds / clock.model_seconds for clock in clocks)
        rows.append(
            {"policy": label, "chunk": chunk, "model_us": model * 1e6, "policy_us": policy * 1e6, "share": share}
        )
        print(rows[-1], flush=True)
    return rows


def jobs() -> list[tuple[str, str | None, dict[str, Any]]]:
    found: list[tuple[str, str | None, dict[str, Any]]] = [("full", None, {})]
    for name in POLICIES:
        more = {**({} if name == "l2_ratio" else {"budget": BUDGET}), **OPTIONS.get(name, {})}
        found.append((name, name, {**more, "skip_layers": ()}))
    random = {"budget": BUDGET, "recent_ratio": 0.5, "strategy": "random", "generator": np.random.default_rng(0)}
    found.append(("l2_fixed, random", "l2_fixed", {**random, "skip_layers": ()}))
    found.append(("l2_fixed, layers 0 and 1 whole", "l2_fixed", {"budget": BUDGET, "recent_ratio": 0.5}))
    return found


def read_full(runner: Runner, ids: Tokens, chunk: int) -> RunTimings:
    """Fill the cache, then time 512 tokens."""
    start = BUDGET + 64
    for first in range(0, start, 64):
        runner.step(ids[first : first + 64])
    runner.timings = RunTimings()
    for first in range(start, start + BUDGET, chunk):
        runner.step(ids[first : first + chunk])
    return runner.timings


def policy_section(rows: list[dict[str, Any]]) -> str:
    """Return the table of the policies' times; rows above the goal are marked and counted."""
    shares = [row["share"] for row in rows]
    above = sum(share > SHARE_GOAL for share in shares)
    text = (
        f"Budget {BUDGET}, microseconds for each token, medians. The policy's time is all that `ModelCache` does: "
        "holding, scoring, choosing, cutting, masks. Its share is of onnxruntime's time. "
        f"The goal is {SHARE_GOAL:.0%}: {above} of {len(rows)} rows are above it, the largest is {max(shares):.1%}."
    )
    body = [
        [
            row["policy"],
            str(row["chunk"]),
            f"{row['model_us']:.0f}",
            f"{row['policy_us']:.1f}",
            f"{row['share']:.1%}" + (" (**above**)" if row["share"] > SHARE_GOAL else ""),
        ]
        for row in rows
    ]
    header = ["policy", "tokens at once", "onnxruntime us", "policy us", "share"]
    return f"## Time of the policy\n\n{text}\n\n{table(header, body)}\n"


# -- copies ------------------------------------------------------------------------------------------------------------


def bindings(rounds: int) -> dict[str, Any]:
    """A step of the plain graph at a past of the budget: numpy arrays in and out, and buffers bound beforehand."""
    session = onnxruntime.InferenceSession(str(MODEL / "model.onnx"), _one_thread(), providers=["CPUExecutionProvider"])
    feed: dict[str, Any] = {"input_ids": np.array([[5]]), "position_ids": np.array([[BUDGET]])}
    feed["attention_mask"] = np.ones((1, BUDGET + 1), np.int64)
    rng = np.random.default_rng(0)
    for value in session.get_inputs()[3:]:
        feed[value.name] = rng.standard_normal((1, value.shape[1], BUDGET, value.shape[3])).astype(np.float32)
    names = [value.name for value in session.get_outputs()]
    binding = session.io_binding()
    held = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
    for name, array in zip(names, session.run(names, feed), strict=True):
        held[name] = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, np.float32)
        binding.bind_ortvalue_output(name, held[name])
    for name in feed:
        binding.bind_ortvalue_input(name, held[name])
    times = interleaved(
        {"numpy": lambda: session.run(names, feed), "bound": lambda: session.run_with_iobinding(binding)},
        rounds,
        time.perf_counter,
    )
    found = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
    return {"numpy_us": found["numpy"], "bound_us": found["bound"], "ratio": ratio(times, "numpy", "bound")}


def _one_thread() -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return options


def bindings_section(found: dict[str, Any]) -> str:
    text = (
        f"One token at a past of {BUDGET}. onnxruntime reads numpy inputs where they lie and hands out its own memory, "
        f"so nothing is copied at a step but by the Concat of the graph itself; what `ModelCache` moves is in the "
        f"policy's time. Binding every buffer beforehand saves no more:"
    )
    body = [[f"{found['numpy_us']:.0f}", f"{found['bound_us']:.0f}", f"{found['ratio']:.3f}"]]
    return f"## Copies\n\n{text}\n\n{table(['numpy in and out, us', 'IOBinding, us', 'numpy / IOBinding'], body)}\n"


# -- kvmnn eval --------------------------------------------------------------------------------------------------------


def evaluate(texts: int, tokens: int) -> dict[str, Any]:
    """`kvmnn eval`, token by token, as a user runs it."""
    paths = sorted(str(path) for path in (MODEL / "texts").glob("*.txt"))[:texts]
    found: dict[str, Any] = {"texts": texts, "tokens": tokens, "configurations": len(EVALUATED), "runs": []}
    for chunk in (1, 4):
        command = [
            sys.executable,
            "-m",
            "kvmnn",
            "eval",
            str(MODEL),
            "--text",
            *paths,
            "--budget",
            str(BUDGET),
            "--json",
        ]
        for policy in EVALUATED[1:]:
            command += ["--policy", policy]
        command += [
            "--timing",
            "--max-tokens",
            str(tokens),
            "--chunk",
            str(chunk),
            "--jobs",
            str(len(os.sched_getaffinity(0))),
        ]
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - begun
        if done.returncode:
            raise SystemExit(done.stderr)
        rows = json.loads(done.stdout)["rows"]
        peaks = [row["process_peak_bytes"] for row in rows if row["process_peak_bytes"]]
        found["runs"].append({"chunk": chunk, "seconds": seconds, "process_peak_bytes": max(peaks), "rows": len(rows)})
        print(found["runs"][-1], flush=True)
    return found


def evaluation_section(found: dict[str, Any]) -> str:
    text = (
        f"`kvmnn eval` on {found['texts']} texts of {found['tokens']:,} tokens under {found['configurations']} "
        f"configurations at budget {BUDGET}, with timing and frames, a process for each core. The limit is "
        f"{EVAL_LIMIT_S} s."
    )
    body = [
        [str(run["chunk"]), f"{run['seconds']:.0f}", f"{run['process_peak_bytes'] / 2**20:.0f}"]
        for run in found["runs"]
    ]
    return f"## Evaluation\n\n{text}\n\n{table(['tokens at once', 'seconds', 'MiB, one process at most'], body)}\n"


# -- memory ------------------------------------------------------------------------------------------------------------

MEMORY = """
import resource, sys
import numpy as np
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.policies import create_policy
model, tokens = sys.argv[1], int(sys.argv[2])
ids = np.load(sys.stdin.buffer)
runner = Runner(DecoderSession.open(model), create_policy("streaming", budget=512))
for first in range(0, 1024, 4):
    runner.step(ids[first : first + 4])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for first in range(1024, tokens, 4):
    runner.step(ids[first : first + 4])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(before, after, runner.cache.nbytes)
"""


def memory_of(ids: Tokens, tokens: int) -> dict[str, Any]:
    """Peak memory of a process after 1,024 tokens and after `tokens`, with a window of 512."""
    with tempfile.TemporaryFile() as file:
        np.save(file, np.resize(ids, max(tokens, 1024)))
        file.seek(0)
        command = [sys.executable, "-P", "-c", MEMORY, str(MODEL), str(tokens)]
        printed = subprocess.run(command, stdin=file, capture_output=True, text=True, check=True).stdout
    before, after, held = map(int, printed.split())
    return {"tokens": tokens, "peak_at_1024_kib": before, "peak_kib": after, "cache_bytes": held}


def memory_section(rows: list[dict[str, Any]]) -> str:
    text = "A process that reads a text in chunks of 4 with `streaming` at a budget of 512: peak memory, MiB."
    body = [
        [
            f"{row['tokens']:,}",
            f"{row['peak_at_1024_kib'] / 1024:.1f}",
            f"{row['peak_kib'] / 1024:.1f}",
            f"{row['cache_bytes'] / 2**20:.2f}",
        ]
        for row in rows
    ]
    header = ["tokens", "after 1,024 tokens", "at the end", "cache held at the end"]
    return f"## Memory\n\n{text}\n\n{table(header, body)}\n"


if __name__ == "__main__":
    main()
