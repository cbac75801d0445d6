"""Many files: `python tools/bench/many.py [--quick]` writes benchmarks/many.* (wall time: needs a quiet machine)

The same files by one process alone (the verb called for one after the other, no pool), by --jobs 1 and by --jobs 2,
which take turns; medians. Wall time says what a user gets; CPU time of --jobs 2 over that of one process says what the
pool costs, and is sound on a busy machine, too. Start of processes and of Python is in all of them.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import synthetic, table, write_results

LAYERS, HEADS, DIMS = 4, 8, 128
LIMIT = 1.8
"""What --jobs 2 must be faster than one process, in wall time."""

ALONE = """
import sys
from kvmnn.cli import VerbWork
from kvmnn.many import Kinds, Task, find
verb, root, out = sys.argv[1:4]
work = VerbWork.of(verb, *sys.argv[4:])
for named in find([root], Kinds(arrays=verb != "verify", frames=verb == "verify")).taken:
    outcome = work(Task(named.path, f"{out}/{named.name}" if verb == "encode" else None))
    assert outcome.error is None, outcome.error
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer files and rounds; nothing is written")
    parser.add_argument("--files", type=int, default=256, help="how many (default: 256)")
    parser.add_argument("--rounds", type=int, default=5, help="how often (default: 5)")
    arguments = parser.parse_args()
    quick = arguments.quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files, nbytes = make(folder / "in", 8 if quick else arguments.files, tokens=256)
        rows = [measured(folder, verb, options, 1 if quick else arguments.rounds) for verb, options in WORK]
        memory = peaks(folder, 4 if quick else 16)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    busy = f" The machine was busy: wall times say little, and {LIMIT} is not judged." if load > cores + 1 else ""
    sections = [
        f"{files} files of {nbytes / files / 1e6:.1f} MB in 8 folders: K and V of {LAYERS} layers, {HEADS} heads of "
        f"{DIMS}, fp16, synthetic. Seconds of wall time, Python's start included. CPU: of --jobs 2 over one process, "
        f"all processes together. --jobs 2 of encode and measure may not be below {LIMIT} x one process, on {cores} "
        f"cores; the load on the machine was {load:.1f} at the end.{busy}",
        "",
        table(
            ["verb", "one process s", "--jobs 1 s", "--jobs 2 s", "times as fast", "CPU"],
            [
                [
                    *(row["verb"], f"{row['alone']:.2f}", f"{row['jobs 1']:.2f}", f"{row['jobs 2']:.2f}"),
                    *(f"{row['speed_up']:.2f}", f"{row['cpu']:.2f}"),
                ]
                for row in rows
            ],
        ),
        "",
        "Memory of the largest process of `encode --jobs 2` (greatest resident set, mapped files included):",
        "",
        table(
            ["files", "MB each", "MB of a process"],
            [[str(row["files"]), f"{row['each_mb']:.1f}", f"{row['peak_mb']:.0f}"] for row in memory],
        ),
    ]
    if quick:
        print("\n".join(sections))
    else:
        print(write_results("many", "Many files", sections, {"verbs": rows, "memory": memory}))
    slow = [row["verb"] for row in rows if row["speed_up"] < LIMIT and row["verb"] != "verify" and not busy]
    sys.exit(f"below {LIMIT} x one process: {', '.join(slow)}" if slow and not quick else 0)


WORK = (("encode", ()), ("measure", ()), ("verify", ()))


def make(folder: Path, files: int, tokens: int) -> tuple[int, int]:
    """Files of K and V, and their bytes together."""
    parts = {part: synthetic(part, HEADS, tokens, DIMS).astype(np.float16) for part in "kv"}
    nbytes = 0
    for number in range(files):
        path = folder / str(number % 8) / f"{number:03}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {
            f"layer_{layer}.{name}": np.roll(parts[part], 7 * number + layer, axis=-1)
            for layer in range(LAYERS)
            for part, name in (("k", "key"), ("v", "value"))
        }
        np.savez(path, **arrays)
        nbytes += path.stat().st_size
    return files, nbytes


def measured(folder: Path, verb: str, options: tuple[str, ...], rounds: int) -> dict[str, Any]:
    root = folder / "in"
    if verb == "verify":
        root = folder / "frames"
        timed([*KVMNN, "encode", "--jobs", "2", str(folder / "in"), "-o", str(root)])
    ways = {
        "alone": [sys.executable, "-P", "-c", ALONE, verb, str(root), str(folder / "out"), *options],
        **{f"jobs {jobs}": [*KVMNN, verb, "--jobs", str(jobs), str(root), *options] for jobs in (1, 2)},
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, command in ways.items() if number % 2 else reversed(ways.items()):
            more = ["-o", str(folder / "out")] if verb == "encode" and name != "alone" else []
            found = timed([*command, *more])
            shutil.rmtree(folder / "out", ignore_errors=True)
            if number:  # the first round brings everything into memory
                times[name].append(found)
    wall = {name: statistics.median(wall for wall, _ in found) for name, found in times.items()}
    pairs = list(zip(times["alone"], times["jobs 2"], strict=True))
    return {
        "verb": verb,
        **wall,
        "speed_up": statistics.median(alone[0] / two[0] for alone, two in pairs),
        "cpu": statistics.median(two[1] / alone[1] for alone, two in pairs),
    }


KVMNN = [sys.executable, "-P", "-m", "kvmnn"]


def timed(command: list[str]) -> tuple[float, float]:
    """Wall time, and CPU time of a command and its processes."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peaks(folder: Path, files: int) -> list[dict[str, Any]]:
    """The same for more files, and for larger ones."""
    rows = []
    for number, tokens in ((files, 256), (4 * files, 256), (files, 1024)):
        shutil.rmtree(folder / "peak", ignore_errors=True)
        shutil.rmtree(folder / "out", ignore_errors=True)
        made, nbytes = make(folder / "peak", number, tokens)
        command = [*KVMNN, "encode", "--jobs", "2", str(folder / "peak"), "-o", str(folder / "out")]
        done = subprocess.run([sys.executable, "-c", PEAK, *command], check=True, capture_output=True, text=True)
        rows.append({"files": made, "each_mb": nbytes / made / 1e6, "peak_mb": int(done.stdout) * 1024 / 1e6})
    return rows


if __name__ == "__main__":
    main()
