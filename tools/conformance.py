"""Run conformance vectors: `python tools/conformance.py DIR...`.

Below each DIR every `index.json` and `cases.json` is a set; its `format` says which module of `vector_formats` checks
it, and `parts` (a list of file names, or an object of objects that name an `index`) adds further indexes of the same
folder. An archive `vectors.tar.xz` is unpacked to a temporary folder and searched in the same way, so
`python tools/conformance.py fixtures` runs all sets that ship with kvmnn.

The last line for each DIR is `<DIR>: <passed> passed, <failed> failed`; the two numbers add up to the entries in all
its case lists. Cases that this machine can compare in part only, such as bytes of frames under a libzstd that does not
give MNN's, are counted in lines before it. Besides, each of the following adds a failure of its own: an index that
cannot be read, a case list without entries, an index without any case, an index whose `count` is not its number of
cases. A format or a kind of case that is not known fails. Exit status 1 if anything failed or a DIR holds no set.

The installed kvmnn is tested, never the checkout that this file lies in.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vector_formats import FORMATS, CaseResult

INDEX_NAMES = ("index.json", "cases.json")
ARCHIVE_NAME = "vectors.tar.xz"
REFERENCE_ONLY = ("runtime_cast_csrc.json",)
CASE_LISTS = ("cases", "bad_frames", "kv_range", "predictor_specs", "snapshots", "analyze", "parse")
MAX_UNPACKED = 1 << 30
"""Bytes that an archive may unpack to; the largest of fixtures/ has 20 MB."""


@dataclass
class Tally:
    passed: int = 0
    failed: int = 0
    exempted: Counter[str] = field(default_factory=Counter)


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
            if result.exemption:
                tally.exempted[result.exemption] += 1
        for reason, number in tally.exempted.items():
            print(f"{name}: {number} of these were not compared in full: {reason}")
        print(f"{name}: {tally.passed} passed, {tally.failed} failed", flush=True)
        ok &= tally.failed == 0 and tally.passed > 0
    return 0 if ok else 1


def run_tree(root: Path) -> Iterator[CaseResult]:
    """The results of every set below `root`, archives included, in the order of their paths."""
    if not root.is_dir():
        yield CaseResult(str(root), ["not a directory"])
        return
    found = sorted([*index_files(root), *root.rglob(ARCHIVE_NAME)])
    for path in found:
        if path.name == ARCHIVE_NAME:
            yield from run_archive(path, str(path.relative_to(root)))
        else:
            yield from run_index(path, root)
    if not found:
        names = ", ".join(INDEX_NAMES)
        yield CaseResult(str(root), [f"no set: expected {names} or {ARCHIVE_NAME} somewhere below"])


def index_files(root: Path) -> list[Path]:
    return sorted(path for name in INDEX_NAMES for path in root.rglob(name))


def run_archive(path: Path, label: str) -> Iterator[CaseResult]:
    """The results of the sets in an archive."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = unpack(path, Path(scratch))
        except (OSError, ValueError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
            yield CaseResult(label, [f"unreadable archive: {error}"])
            return
        found = index_files(folder)
        for index_path in found:
            for result in run_index(index_path, folder):
                name = f"{label}/{result.name.removeprefix('./')}"
                yield CaseResult(name, result.problems, result.exemption)
        if not found:
            yield CaseResult(label, [f"no set: expected {' or '.join(INDEX_NAMES)} in it"])


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive of regular files, none of which can land outside `folder`; the folder."""
    with tarfile.open(archive, "r:xz") as stored:
        total = 0
        for member in stored:
            if not (member.isreg() or member.isdir()):
                raise ValueError(f"{member.name}: expected files and folders only")
            if member.name.startswith("/") or ".." in member.name.split("/"):
                raise ValueError(f"{member.name}: expected a name inside the folder")
            total += member.size
            if total > MAX_UNPACKED:
                raise ValueError(f"more than {MAX_UNPACKED} bytes unpacked")
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not before Python 3.11.4
        stored.extractall(folder, **options)
    return folder


def run_index(path: Path, root: Path, above: tuple[Path, ...] = ()) -> Iterator[CaseResult]:
    """The results of one index and of its parts."""
    label = str(path.relative_to(root).parent)
    try:
        if path in above:
            raise ValueError("it is a part of itself")
        index = read_index(path)
        parts = [] if path.name in REFERENCE_ONLY else part_files(index.get("parts", []))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        yield CaseResult(f"{label}/{path.name}", [f"unreadable index: {error}"])
        return
    counted = counting_problem(index)
    if counted:
        yield CaseResult(f"{label}/{path.name}", [counted])
    there = bool(counted)
    for result in run_cases(path.parent, index):
        there = True
        yield CaseResult(f"{label}/{result.name}", result.problems, result.exemption)
    if not there and not parts:
        yield CaseResult(f"{label}/{path.name}", [f"no cases of format {index.get('format')!r}"])
    for part in parts:
        if part not in REFERENCE_ONLY:
            yield from run_index(path.parent / part, root, (*above, path))


def read_index(path: Path) -> dict[str, Any]:
    index = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(index, dict):
        raise ValueError("expected a JSON object")
    for name in CASE_LISTS:
        if not isinstance(index.get(name, []), list):
            raise ValueError(f"{name}: expected a list")
    return index


def part_files(parts: Any) -> list[str]:
    """The names of the further index files that an index lists."""
    names = [part["index"] for part in parts.values()] if isinstance(parts, dict) else list(parts)
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"part {name!r}: expected a file of the same folder")
    return names


def counting_problem(index: dict[str, Any]) -> str | None:
    """What is wrong with the number of cases in an index, whatever its format: an emptied list must not pass."""
    for name in (*CASE_LISTS, "parts"):
        if name in index and not index[name]:
            return f"{name}: no entries"
    found = len(case_entries(index))
    if index.get("count", found) != found:
        return f"count: {index['count']!r}, but there are {found} cases"
    return None


def run_cases(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    name = index.get("format")
    run = FORMATS.get(name) if isinstance(name, str) else None
    return run(folder, index) if run else unknown_format(index)


def unknown_format(index: dict[str, Any]) -> Iterator[CaseResult]:
    for list_name, number in case_entries(index):
        yield CaseResult(f"{list_name}[{number}]", [f"unknown format {index.get('format')!r}"])


def case_entries(index: dict[str, Any]) -> list[tuple[str, int]]:
    return [(name, i) for name in CASE_LISTS if isinstance(index.get(name), list) for i in range(len(index[name]))]


if __name__ == "__main__":
    sys.exit(main())
