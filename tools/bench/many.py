"""Many files: `python tools/bench/many.py [--quick]` writes benchmarks/many.* (wall time: needs a quiet machine)

The same files by one process alone (the verb called for one after the other, no pool), by two such processes at once
with half of the files each, which is what the machine has to give, and by --jobs 2; they take turns, medians of the
rounds. Wall time says what a user gets; CPU time over that of one process says what a second process costs (caches and
memory that two share, another start of Python), and beyond that what the pool costs. All include the start of Python,
with modules compiled before, as they are where kvmnn is installed. Ten minutes.
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
LIMIT, SHARE = 1.8, 0.95
"""How many times as fast as one process --jobs 2 must be, in wall time; or this share of what two processes alone are,
where the machine does not give as much."""

ALONE = """
import sys
from kvmnn.cli import CommandWork
from kvmnn.batch import InputKinds, Task, find_inputs
verb, root, out, part, parts = sys.argv[1:]
work = CommandWork.from_words(verb)
taken = find_inputs([root], InputKinds(arrays=verb != "verify", frames=verb == "verify")).inputs
for named in taken[int(part) :: int(parts)]:
    outcome = work(Task(named.path, f"{out}/{named.name}" if verb == "encode" else None))
    assert outcome.error is None, outcome.error
"""

VERBS = {"encode": 1, "measure": 1, "verify": 4}
"""And how often each of the files is there for it: `verify` is too quick for fewer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer files and rounds; nothing is written")
    parser.add_argument("--files", type=int, default=256, help="how many (default: 256)")
    parser.add_argument("--rounds", type=int, default=3, help="how often (default: 3)")
    arguments = parser.parse_args()
    quick = arguments.quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        files, nbytes = make(folder / "in", 8 if quick else arguments.files, tokens=256)
        rows = [measured(folder, verb, copies, 1 if quick else arguments.rounds) for verb, copies in VERBS.items()]
        memory = peaks(folder, 4 if quick else 16)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    busy = f" The machine was busy: wall times say little, and {LIMIT} is not judged." if load > cores + 1 else ""
    sections = [
        f"{files} files of {nbytes / files / 1e6:.1f} MB in 8 folders: K and V of {LAYERS} layers, {HEADS} heads of "
        f"{DIMS}, fp16, synthetic; verify has the frames of {VERBS['verify'] * files}. Seconds of wall time, Python's "
        f"start included; medians of {1 if quick else arguments.rounds} rounds. Two at once: two processes that know "
        f"nothing of each other, each with half of the files. --jobs 2 may not be below {LIMIT} x one process, or, "
        f"where two at once are not much faster than that, below {SHARE} of what they are. {cores} cores; the load on "
        f"the machine was {load:.1f} at the end.{busy}",
        "",
        table(
            ["verb", "one process s", "two at once s", "--jobs 2 s", "two at once: times as fast", "--jobs 2"],
            [
                [
                    *(row["verb"], f"{row['one']:.2f}", f"{row['two']:.2f}", f"{row['jobs 2']:.2f}"),
                    *(f"{row['two_faster']:.2f}", f"{row['jobs_faster']:.2f}"),
                ]
                for row in rows
            ],
        ),
        "",
        "CPU time of all processes together over that of one process, and that in seconds:",
        "",
        table(
            ["verb", "one process s", "two at once", "--jobs 2"],
            [[row["verb"], f"{row['cpu']:.2f}", f"{row['two_cpu']:.2f}", f"{row['jobs_cpu']:.2f}"] for row in rows],
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
    slow = [row["verb"] for row in rows if row["jobs_faster"] < min(LIMIT, SHARE * row["two_faster"]) and not busy]
    sys.exit(f"--jobs 2 is too slow: {', '.join(slow)}" if slow and not quick else 0)


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


def measured(folder: Path, verb: str, copies: int, rounds: int) -> dict[str, Any]:
    root, out = folder / "in", folder / "out"
    if verb == "verify":
        root = folder / "frames"
        timed([*KVMNN, "encode", "--jobs", "2", str(folder / "in"), "-o", str(root / "0")])
        for number in range(1, copies):
            shutil.copytree(root / "0", root / str(number), copy_function=os.link)
    alone = [sys.executable, "-P", "-c", ALONE, verb, str(root), str(out)]
    jobs = [*KVMNN, verb, "--jobs", "2", str(root), *(["-o", str(out)] if verb == "encode" else [])]
    ways = {"one": [[*alone, "0", "1"]], "two": [[*alone, "0", "2"], [*alone, "1", "2"]], "jobs 2": [jobs]}
    one_file = str(next(path for path in sorted(root.rglob("*.npz" if verb != "verify" else "*.frames"))))
    timed([*KVMNN, verb, "--jobs", "1", one_file, *(["-o", str(out)] if verb == "encode" else [])])  # compiles modules
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, commands in ways.items() if number % 2 else reversed(ways.items()):
            shutil.rmtree(out, ignore_errors=True)
            times[name].append(timed(*commands))
    shutil.rmtree(out, ignore_errors=True)

    def median(name: str, of: int) -> float:
        return statistics.median(found[of] for found in times[name])

    def over(one: str, other: str, of: int) -> float:
        pairs = zip(times[one], times[other], strict=True)
        return statistics.median(a[of] / b[of] for a, b in pairs)

    return {
        "verb": verb,
        **{name: median(name, 0) for name in ways},
        "two_faster": over("one", "two", 0),
        "jobs_faster": over("one", "jobs 2", 0),
        "cpu": median("one", 1),
        "two_cpu": over("two", "one", 1),
        "jobs_cpu": over("jobs 2", "one", 1),
    }


KVMNN = [sys.executable, "-P", "-m", "kvmnn"]


def timed(*commands: list[str]) -> tuple[float, float]:
    """Wall time, and CPU time, of commands at once and their processes."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    failed = [command for command, process in zip(commands, running, strict=True) if process.wait()]
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if failed:
        sys.exit(f"failed: {failed[0]}")
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
