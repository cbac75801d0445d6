"""Compressor weights: `python tools/bench/compressor.py [--quick] [--torch PYTHON]` writes benchmarks/compressor.*

Converts a generated training checkpoint of LLaVA-1.5-7B's compressor (32 layers, four compressors, AdamW's moments,
about 178 MB) to fp16 and verifies the result against it. Every figure is of child processes limited to one thread:
CPU time above the imports, the most anonymous memory seen while it runs, and the whole process. With a Python that has
torch (this one, or --torch PYTHON), `torch.load` and the same casts take turns with kvmnn.
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
from pathlib import Path
from typing import Any

from common import ROOT, table, write_results

sys.path.append(str(ROOT / "tools"))
from fixtures.compressor_checkpoint import parameters, training_state, write_checkpoint

CPU_LIMIT_S = 0.20
MEMORY_LIMIT_MB = 100

_KVMNN = """
import json, sys, time
from kvmnn.compressor.convert import convert_checkpoint
from kvmnn.compressor.verify import verify_weights
source, target, repeat = sys.argv[1], sys.argv[2], int(sys.argv[3])
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1000
most = anonymous()
def watch(_):
    global most
    most = max(most, anonymous())
def timed(job):
    start = time.process_time()
    job()
    return time.process_time() - start
found = {"convert": [], "verify": []}
for _ in range(repeat):
    found["convert"].append(timed(lambda: convert_checkpoint(source, target, force=True)))
    found["verify"].append(timed(lambda: verify_weights(target, against=source)))
convert_checkpoint(source, target, force=True, progress=watch)
verify_weights(target, against=source, progress=watch)
print(json.dumps({**found, "anonymous_mb": most}))
"""

_TORCH = """
import json, sys, time
import torch
torch.set_num_threads(1)
source, repeat = sys.argv[1], int(sys.argv[2])
def job():
    state = torch.load(source, map_location="cpu", weights_only=True)["model_state_dict"]["compressor"]
    return [value.to(torch.float16).numpy().tobytes() for name, value in state.items() if name.startswith("compress_")]
job()
found = []
for _ in range(repeat):
    start = time.process_time()
    job()
    found.append(time.process_time() - start)
print(json.dumps({"load_and_cast": found, "version": torch.__version__}))
"""

_TORCH_SCRIPT = """
import struct, sys
import torch
state = torch.load(sys.argv[1], map_location="cpu", weights_only=True)["model_state_dict"]["compressor"]
with open(sys.argv[2], "wb") as out:
    out.write(bytes(44))
    for layer in range(32):
        for prefix in ("compress_tk", "compress_tv", "compress_ik", "compress_iv"):
            for slot in (0, 3, 6):
                weight = state[f"{prefix}.{layer}.{slot}.weight"]
                out.write(struct.pack("<III", *weight.shape, 1))
                out.write(weight.to(torch.float16).numpy().tobytes())
                out.write(state[f"{prefix}.{layer}.{slot}.bias"].to(torch.float16).numpy().tobytes())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; for trying the script out")
    parser.add_argument("--torch", metavar="PYTHON", default=sys.executable, help="a Python that has torch")
    options = parser.parse_args()
    rounds, repeat = (2, 3) if options.quick else (7, 7)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "llava.pth", Path(folder) / "llava.bin"
        write_checkpoint(source, training_state(dict(parameters(32, 128, 5))))
        data = measured(source, target, rounds, repeat, options.torch if has_torch(options.torch) else None)
        data["checkpoint_bytes"], data["weight_file_bytes"] = source.stat().st_size, target.stat().st_size
    print(write_results("compressor", "Compressor weights", sections(data), data).read_text())


def has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0


def measured(source: Path, target: Path, rounds: int, repeat: int, torch: str | None) -> dict[str, Any]:
    """Medians over all rounds, in each of which kvmnn and torch take turns."""
    runs: dict[str, list[Any]] = {"kvmnn": [], "torch": [], "kvmnn_process": [], "torch_process": []}
    for _ in range(rounds):
        runs["kvmnn"].append(child(sys.executable, _KVMNN, source, target, repeat))
        runs["kvmnn_process"].append(
            process(sys.executable, "-m", "kvmnn", "compressor", "convert", str(source), str(target), "-f", "-q")
        )
        if torch is not None:
            runs["torch"].append(child(torch, _TORCH, source, repeat))
            runs["torch_process"].append(process(torch, "-c", _TORCH_SCRIPT, str(source), f"{target}.torch"))
    found: dict[str, Any] = {
        "convert_cpu_s": statistics.median(t for run in runs["kvmnn"] for t in run["convert"]),
        "verify_cpu_s": statistics.median(t for run in runs["kvmnn"] for t in run["verify"]),
        "anonymous_mb": max(run["anonymous_mb"] for run in runs["kvmnn"]),
        "process_cpu_s": statistics.median(cpu for cpu, _ in runs["kvmnn_process"]),
        "process_wall_s": statistics.median(wall for _, wall in runs["kvmnn_process"]),
        "rounds": rounds,
        "repeats": repeat,
    }
    if torch is not None:
        found |= {
            "torch": runs["torch"][0]["version"],
            "torch_warm_cpu_s": statistics.median(t for run in runs["torch"] for t in run["load_and_cast"]),
            "torch_process_cpu_s": statistics.median(cpu for cpu, _ in runs["torch_process"]),
            "torch_process_wall_s": statistics.median(wall for _, wall in runs["torch_process"]),
        }
    return found


def child(python: str, script: str, *arguments: object) -> Any:
    command = [python, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=_one_thread())
    return json.loads(done.stdout)


def process(*command: str) -> tuple[float, float]:
    """CPU and wall seconds of a whole process."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, env=_one_thread())
    wall, after = time.perf_counter() - start, os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return cpu, wall


def _one_thread() -> dict[str, str]:
    safe = {"PYTHONSAFEPATH": "1"}  # kvmnn is the installed one, not what lies in the checkout
    return {**os.environ, **safe, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def sections(data: dict[str, Any]) -> list[str]:
    rows = [
        ["convert to fp16, above the imports", f"{data['convert_cpu_s']:.3f} s CPU", f"{CPU_LIMIT_S:.2f} s"],
        [
            "verify against the checkpoint, above the imports",
            f"{data['verify_cpu_s']:.3f} s CPU",
            f"{CPU_LIMIT_S:.2f} s",
        ],
        ["most anonymous memory of either", f"{data['anonymous_mb']:.0f} MB", f"{MEMORY_LIMIT_MB} MB"],
        [
            "whole process `kvmnn compressor convert`",
            f"{data['process_cpu_s']:.2f} s CPU, {data['process_wall_s']:.2f} s wall",
            "",
        ],
    ]
    found = [
        f"A training checkpoint of {data['checkpoint_bytes'] / 1e6:.0f} MB, of which a third are the compressor's own "
        f"storages, to a weight file of {data['weight_file_bytes'] / 1e6:.1f} MB; sha256, checksums, fsync included. "
        f"Medians of {data['rounds']} rounds of {data['repeats']}; one thread.",
        "",
        table(["what", "measured", "limit"], rows),
    ]
    if "torch" not in data:
        return [*found, "", "torch was not installed: no comparison."]
    warm = data["torch_warm_cpu_s"] / data["convert_cpu_s"]
    cpu = data["torch_process_cpu_s"] / data["process_cpu_s"]
    wall = data["torch_process_wall_s"] / data["process_wall_s"]
    compared = [
        ["torch.load + casts, warm, nothing written", f"{data['torch_warm_cpu_s']:.3f} s CPU", f"{warm:.2f} x kvmnn's"],
        [
            "a script that imports torch and writes the blocks",
            f"{data['torch_process_cpu_s']:.2f} s CPU, {data['torch_process_wall_s']:.2f} s wall",
            f"{cpu:.1f} x CPU, {wall:.1f} x wall",
        ],
    ]
    return [
        *found,
        "",
        f"Beside it, in turn, torch {data['torch']}:",
        "",
        table(["what", "measured", "ratio"], compared),
    ]


if __name__ == "__main__":
    main()
