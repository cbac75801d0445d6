"""Run conformance vectors: `python tools/conformance.py DIR...`.

Below each DIR every `index.json` and `cases.json` is a set; its `format` says which module of `vector_formats` checks
it, and `parts` (a list of file names, or an object of objects that name an `index`) adds further indexes of the same
folder. The last line for each DIR is `<DIR>: <passed> passed, <failed> failed`; the two numbers add up to the entries
in all its case lists. A format or a kind of case that is not known fails. Exit status 1 if anything failed or a DIR
holds no set.

The installed kvmnn is tested, never the checkout that this file lies in.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vector_formats import FORMATS, CaseResult

INDEX_NAMES = ("index.json", "cases.json")
REFERENCE_ONLY = ("runtime_cast_csrc.json",)


@dataclass
class Tally:
    passed: int = 0
    failed: int = 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dirs", nargs="+", metavar="DIR")
    parser.add_argument("-v", "--verbose", action="store_true", help="name every case, not only those that fail")
    options = parser.parse_args(argv)
    ok = True
    for name in options.dirs:
        tally = Tally()
        for result in run_tree(Path(name)):
            if result.problems:
                tally.failed += 1
                print(f"FAIL {result.name}: {'; '.join(result.problems)}")
            else:
                tally.passed += 1
                if options.verbose:
                    print(f"ok   {result.name}")
        print(f"{name}: {tally.passed} passed, {tally.failed} failed", flush=True)
        ok &= tally.failed == 0 and tally.passed > 0
    return 0 if ok else 1


def run_tree(root: Path) -> Iterator[CaseResult]:
    """The results of every set below `root`, in the order of their paths."""
    if not root.is_dir():
        yield CaseResult(str(root), ["not a directory"])
        return
    found = False
    for index_path in sorted(path for name in INDEX_NAMES for path in root.rglob(name)):
        found = True
        yield from run_index(index_path, root)
    if not found:
        yield CaseResult(str(root), [f"no set: expected {' or '.join(INDEX_NAMES)} somewhere below"])


def run_index(path: Path, root: Path) -> Iterator[CaseResult]:
    """The results of one index and of its parts."""
    label = str(path.relative_to(root).parent)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(index, dict):
            raise ValueError("expected a JSON object")
        parts = [] if path.name in REFERENCE_ONLY else part_files(index.get("parts", []))
    except (OSError, ValueError, TypeError, KeyError) as error:
        yield CaseResult(f"{label}/{path.name}", [f"unreadable index: {error}"])
        return
    yield from run_cases(path.parent, index, label)
    for part in parts:
        if part in REFERENCE_ONLY:
            continue
        yield from run_index(path.parent / part, root)


def part_files(parts: Any) -> list[str]:
    """The names of the further index files that an index lists."""
    return [str(part["index"]) for part in parts.values()] if isinstance(parts, dict) else list(parts)


def run_cases(folder: Path, index: dict[str, Any], label: str) -> Iterator[CaseResult]:
    run = FORMATS.get(index.get("format", ""))
    if run is not None:
        for result in run(folder, index):
            yield CaseResult(f"{label}/{result.name}", result.problems)
        return
    entries = case_entries(index)
    if not entries and "parts" in index:
        return  # an index of indexes has nothing of its own
    for list_name, number in entries or [("index", 0)]:
        yield CaseResult(f"{label}/{list_name}[{number}]", [f"unknown format {index.get('format')!r}"])


def case_entries(index: dict[str, Any]) -> list[tuple[str, int]]:
    lists = ("cases", "bad_frames", "kv_range", "predictor_specs", "analyze", "parse")
    return [(name, i) for name in lists if isinstance(index.get(name), list) for i in range(len(index[name]))]


if __name__ == "__main__":
    sys.exit(main())
