"""Change the code in small ways and see whether the tests of the room notice.

    python tools/mutants/run.py [--count 300] [--seed N]    draw changes, test them, list what survives
    python tools/mutants/run.py --only kvmnn/packed         of one file or folder
    python tools/mutants/run.py --survivors                 what survived, once more: against all tests of the room
    python tools/mutants/run.py --report                    what is known, nothing run
    python tools/mutants/run.py --tidy                      tested.jsonl: what is known, of the present code

Works on a copy of the tree in build/mutants, and adds what it finds to results.jsonl there: runs with other seeds add
up, what was tested already is not tested again, and a run that was ended goes on when it is started again. One change
of ten is one of Cython or C (--compiled), for which its module is built again. Exit code 0 if at least 95 % were
noticed and every survivor stands in explained.json with its reason; else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import rooms  # noqa: E402  (next to this file)
from changes import Change  # noqa: E402
from copied import Copy  # noqa: E402

ENOUGH = 0.95
TESTED = Path(__file__).with_name("tested.jsonl")
"""What earlier runs found, so that a fresh checkout goes on from there."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--compiled", type=float, default=0.1, help="share of changes in Cython and C")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="files or folders, such as kvmnn/packed; FILE:LINE, too"
    )
    parser.add_argument("--survivors", action="store_true", help="test again what survived")
    parser.add_argument("--report", action="store_true", help="print what is known")
    parser.add_argument("--tidy", action="store_true", help="write tested.jsonl again: changes of the code as it is")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "mutants")
    arguments = parser.parse_args()
    results = Results(arguments.work / "results.jsonl")
    every = rooms.drawn_from(ROOT)
    if old := rooms.stale([*rooms.written()["survivors"]], every):
        print("mutants: explained.json names what is not in the code:", *old, sep="\n  ")
        return 1
    if arguments.tidy:
        results.write_tested(every)
    elif not arguments.report:
        print(f"mutants: seed {arguments.seed}, {len(every)} changes to draw from", flush=True)
        copy = Copy(ROOT, arguments.work)
        left = chosen(every, results, arguments)
        for reach in ("thorough",) if arguments.survivors else ("near", "room"):
            left = [change for change in left if not noticed(copy, change, results, reach)]
    return report(every, results)


def noticed(copy: Copy, change: Change, results: Results, reach: str) -> bool:
    """Test a change, say what became of it, and add that to the results, but for what may be noticed farther on."""
    outcome = copy.tested(change, results.killers(change.file), reach)
    survived = outcome["outcome"] == "survived"
    if not survived or reach != "near":
        results.add(change, outcome)
        print(f"{outcome['outcome']:8} {outcome['seconds']:4.0f} s  {change.file}:{change.line} {change.old!r} -> "
              f"{change.new!r}  {outcome.get('by', '')}", flush=True)  # fmt: skip
    return not survived


def chosen(every: list[Change], results: Results, arguments: argparse.Namespace) -> list[Change]:
    """A random sample, without what is tested already; changes of one compiled module side by side.

    A seed puts changes in an order by their keys, so that it draws the same ones when other code has come or gone.
    """
    mine = [c for c in every if any(c.file.startswith(o) or f"{c.file}:{c.line}" == o for o in arguments.only)]
    if arguments.survivors:
        return [c for c in mine if results.outcome(c) == "survived" and rooms.explanation(c) is None]
    mine.sort(key=lambda change: hashlib.sha256(f"{arguments.seed} {change.key}".encode()).digest())
    python = [change for change in mine if change.file.endswith(".py")]
    compiled = [change for change in mine if not change.file.endswith(".py")]
    few = min(len(compiled), round(arguments.count * (arguments.compiled if python else 1)))
    drawn = python[: arguments.count - few] + sorted(compiled[:few], key=lambda change: change.file)
    return [change for change in drawn if results.outcome(change) is None]


class Results:
    """What is known of changes, one line of JSON each; the last of a change counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = [line for file in (TESTED, path) if file.exists() for line in file.read_text().splitlines()]
        self.found: dict[str, dict[str, Any]] = {record["key"]: record for record in map(json.loads, lines)}

    def add(self, change: Change, outcome: dict[str, Any]) -> None:
        record = {"key": change.key, "file": change.file, "line": change.line, **outcome}
        self.found[change.key] = record
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def write_tested(self, every: list[Change], path: Path = TESTED) -> None:
        """Write what is known of changes of the present code, and who noticed them; no name that is gone."""
        records = [{**self.found[c.key], "line": c.line} for c in every if c.key in self.found]
        for record in records:
            file, _, test = record.get("by", "").partition("::")
            name = re.match(r"\w*", test)[0]
            if not (ROOT / file).is_file():
                record.pop("by", None)
            elif f"def {name}(" not in (ROOT / file).read_text():
                record["by"] = file
        records.sort(key=lambda record: record["key"])
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    def outcome(self, change: Change) -> str | None:
        return self.found[change.key]["outcome"] if change.key in self.found else None

    def killers(self, file: str) -> Counter[str]:
        """How often a test file noticed a change of this module."""
        tests = (re.split("::| ", r["by"])[0] for r in self.found.values() if r["file"] == file and r.get("by"))
        return Counter(tests)


def report(every: list[Change], results: Results) -> int:
    """Figures of all changes of the present code that were tested; the survivors."""
    known = [(change, results.outcome(change)) for change in every if results.outcome(change) not in (None, "no build")]
    if not known:
        print("mutants: nothing tested")
        return 1
    survivors = [change for change, outcome in known if outcome == "survived"]
    open_ones = [change for change in survivors if rooms.explanation(change) is None]
    counts = Counter(outcome for _, outcome in known)
    for change in open_ones:
        print(f"survives: {change.file}:{change.line}: {change.old!r} -> {change.new!r}\n    {change.text}")
    for kind, is_kind in (("Python", True), ("Cython and C", False)):
        of_kind = [outcome for change, outcome in known if change.file.endswith(".py") is is_kind]
        noticed = sum(outcome != "survived" for outcome in of_kind)
        print(f"mutants: {kind}: {len(of_kind)} tested, {noticed} noticed")
    share = 1 - len(survivors) / len(known)
    print(f"mutants: {len(known)} tested, {100 * share:.1f} % noticed ({counts['timeout']} by a time-out); "
          f"{len(survivors)} survive, {len(survivors) - len(open_ones)} of them explained")  # fmt: skip
    return int(share < ENOUGH or bool(open_ones))


if __name__ == "__main__":
    sys.exit(main())
