"""Throw hostile input at kvmnn for some minutes and compare with the reference codec, tests/support/codec_model.py.

    python tools/fuzz/run.py [--minutes 10] [--seed N] [--only frames,payloads,values,specs,files,profiles,streams]
    python tools/fuzz/run.py --case SEED:NUMBER          repeat one case, as a failure report names it

Every case is a function of the seed and its number. A worker process notes the number in a small shared file before it
starts the case, so that a crash or a hang is known to be its doing; what was found is saved in build/fuzz. One line a
minute; exit code 0 if nothing was found, 1 if something was.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tools/fuzz", "tests/support", "tools")]

KINDS = "frames,payloads,values,specs,files,profiles,streams"
JOURNAL = struct.Struct("<QQQQ")  # case number, cases done, frames accepted, peak KiB
PARALLEL_LIMIT = 3 << 30  # bytes of address space for a worker
RESIDENT_LIMIT = 700 << 10  # KiB of memory that a worker may have touched
HANG = 60  # seconds for one case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default=KINDS, help="kinds of cases, comma-separated")
    parser.add_argument("--case", metavar="SEED:NUMBER", help="run this case alone, in this process")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz", help="where failures are saved")
    parser.add_argument("--worker", metavar="JOURNAL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    kinds = arguments.only.split(",")
    if arguments.case:
        seed, number = map(int, arguments.case.split(":"))
        return one_case(seed, number, kinds)
    if arguments.worker:
        return work(arguments.worker, arguments.seed, kinds, arguments.out)
    return supervise(arguments, kinds)


# -- the supervisor ---------------------------------------------------------------------------------------------------


def supervise(arguments: argparse.Namespace, kinds: list[str]) -> int:
    start = time.monotonic()
    end = start + 60 * arguments.minutes
    print(f"fuzz: seed {arguments.seed}, {arguments.minutes:g} minutes, {', '.join(kinds)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvmnn-fuzz-") as folder:
        journal = Path(folder, "journal")
        journal.write_bytes(bytes(JOURNAL.size))
        command = [sys.executable, __file__, "--worker", str(journal), "--seed", str(arguments.seed)]
        command += ["--only", arguments.only, "--out", str(arguments.out)]
        worker = subprocess.Popen(command, cwd=folder, env={**os.environ, "TMPDIR": folder})
        try:
            found = watch(worker, journal, start, end)
        finally:
            worker.kill()
            worker.wait()
        number, done, accepted, peak = JOURNAL.unpack(journal.read_bytes())
    if found:
        if found != "reported":
            save(arguments.out, arguments.seed, number, kinds, found)
        return 1
    print(
        f"fuzz: {done} executions in {(time.monotonic() - start) / 60:.1f} minutes, {accepted} inputs accepted, "
        f"peak memory {peak >> 10} MiB, nothing found (seed {arguments.seed})",
        flush=True,
    )
    return 0


def watch(worker: subprocess.Popen[bytes], journal: Path, start: float, end: float) -> str | None:
    """None when the time is up, else what is wrong."""
    minute, last, since = 1, -1, time.monotonic()
    while True:
        try:
            code = worker.wait(0.5)
        except subprocess.TimeoutExpired:
            code = None
        now = time.monotonic()
        number, done, accepted, peak = JOURNAL.unpack(journal.read_bytes())
        if code == 1:
            return "reported"
        if code is not None:
            return f"the worker died with exit code {code}"
        if number != last:
            last, since = number, now
        elif now - since > HANG:
            return f"no end after {HANG} seconds"
        if now - start >= 60 * minute:
            print(f"minute {minute}: {done} executions, {accepted} accepted, peak {peak >> 10} MiB", flush=True)
            minute += 1
        if now >= end:
            return None


def save(out: Path, seed: int, number: int, kinds: list[str], what: str) -> None:
    """Report a failure, with its input where making it again does not end as the case itself did."""
    import cases

    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{seed}-{number}.json"
    record = {"seed": seed, "case": number, "only": kinds, "what": what}
    record["input"] = cases.describe(seed, number, kinds)
    path.write_text(json.dumps(record, indent=1))
    repeat = f"python tools/fuzz/run.py --case {seed}:{number} --only {','.join(kinds)}"
    print(f"FOUND in case {number}: {what}\n  saved as {path}; repeat with: {repeat}", flush=True)


# -- the worker -------------------------------------------------------------------------------------------------------


def work(journal_path: str, seed: int, kinds: list[str], out: Path) -> int:
    import cases

    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # the address sanitizer reserves terabytes
        resource.setrlimit(resource.RLIMIT_AS, (PARALLEL_LIMIT, PARALLEL_LIMIT))
    with open(journal_path, "r+b") as file, mmap.mmap(file.fileno(), JOURNAL.size) as journal:
        number = done = accepted = 0
        while True:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            journal[:] = JOURNAL.pack(number, done, accepted, peak)
            try:
                executions, good = cases.run(seed, number, kinds)
                if peak > RESIDENT_LIMIT and "asan" not in os.environ.get("LD_PRELOAD", ""):
                    raise AssertionError(f"{peak >> 10} MiB of memory touched, in this case or one before")
            except BaseException:
                save(out, seed, number, kinds, traceback.format_exc())
                return 1
            done += executions
            accepted += good
            number += 1


def one_case(seed: int, number: int, kinds: list[str]) -> int:
    import cases

    print(json.dumps(cases.describe(seed, number, kinds), indent=1))
    executions, accepted = cases.run(seed, number, kinds)
    print(f"{executions} executions, {accepted} accepted, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
