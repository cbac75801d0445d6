"""Which tests belong to a module, by the mirrored layout, and which changes are not drawn."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from changes import Change, changes_of

HERE = Path(__file__).parent
SOURCES = ("kvmnn/**/*.py", *(f"pyx/kvmnn/**/*.{kind}" for kind in ("pyx", "pxd", "c", "h")))

ALSO = {
    "kvmnn/arrays": ["tests/formats", "tests/bundle", "tests/analysis"],
    "kvmnn/bundle": ["tests/formats", "tests/cli/test_errors.py", "tests/cli/test_encode_decode.py"],
    "kvmnn/cli": ["tests/docs", "tests/bundle", "tests/formats"],
    "kvmnn/compressor": ["tests/conformance/test_compressor*.py", "tests/attacks/test_checkpoints.py"],
    "kvmnn/cli/commands": ["tests/compressor", "tests/policies/h2o", "tests/runtime"],
    "kvmnn/files": ["tests/faults", "tests/bundle", "tests/formats", "tests/cli/test_errors.py"],
    "kvmnn/formats": ["tests/bundle", "tests/cli/test_errors.py", "tests/cli/test_encode_decode.py"],
    "kvmnn/formats/mnn": ["tests/packed", "tests/cli/test_packed.py", "tests/conformance/test_layout.py"],
    "kvmnn/formats/plan_files.py": ["tests/cli/test_plan_cache.py", "tests/cli/test_plan.py", "tests/policies/h2o"],
    "kvmnn/frames": [
        "tests/conformance/test_frames.py",
        "tests/attacks/test_frame_bombs.py",
        "tests/attacks/test_frame_damage.py",
    ],
    "kvmnn/policies/h2o": [
        "tests/conformance/test_h2o.py",
        "tests/cli/test_plan.py",
        "tests/formats/test_h2o_files.py",
    ],
    "kvmnn/lm": ["tests/evaluation", "tests/attacks/test_models.py", "tests/cli/test_generate.py"],
    "kvmnn/lm/kv_dump.py": ["tests/cli/test_dump_kv.py"],
    "kvmnn/evaluation": ["tests/cli/test_eval.py", "tests/reports"],
    "kvmnn/analysis": ["tests/conformance/test_offline.py", "tests/cli/test_measure.py"],
    "kvmnn/packed": ["tests/conformance/test_layout.py", "tests/formats/mnn", "tests/cli/test_packed.py"],
    "kvmnn/policies": ["tests/conformance/test_policies.py", "tests/evaluation"],
    "kvmnn/reports": ["tests/evaluation", "tests/analysis"],
    "kvmnn/runtime": [
        "tests/conformance/test_store.py",
        "tests/docs/test_runtime.py",
        "tests/lm/test_lossless_store.py",
    ],
    "kvmnn/store": ["tests/cli/test_store.py", "tests/lm/test_stored_prefixes.py"],
    "kvmnn/_util": ["tests/analysis", "tests/bundle", "tests/cli", "tests/frames/test_many.py"],
    "kvmnn/*simd.*": ["tests/frames/test_simd.py", "tests/frames"],
    "kvmnn/*.py": ["tests/test_import.py", "tests/formats", "tests/packed", "tests/lm"],
}
"""Tests of a room besides those in the folder that mirrors it."""


def tests_of(root: Path, file: str, killers: Counter[str]) -> list[str]:
    """Those that noticed changes of this module before come first, then the one that mirrors it, then the room's."""
    module = Path(re.sub(r"^pyx/", "", file))
    folders = [Path("tests", *module.parts[1:depth]) for depth in range(len(module.parts) - 1, 1, -1)]
    named = [f"{folder}/test_{module.stem.lstrip('_')}.py" for folder in folders]
    also = [tests for place, tests in ALSO.items() if module.match(place) or place in map(str, module.parents)]
    patterns = [*named, *map(str, folders), *(pattern for tests in reversed(also) for pattern in tests)]
    found: dict[str, None] = {}
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            for test in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
                found[str(test.relative_to(root))] = None
    return sorted(found, key=lambda test: -killers[test])


# -- what is not drawn ------------------------------------------------------------------------------------------------


@cache
def written() -> dict[str, list[dict[str, str]]]:
    """explained.json: tunables, which are not drawn, and changes that may survive, each with its reason."""
    return json.loads((HERE / "explained.json").read_text())


def drawn_from(root: Path) -> list[Change]:
    """Every change that a test should notice."""
    files = sorted(str(path.relative_to(root)) for pattern in SOURCES for path in root.glob(pattern))
    return [change for file in files for change in changes_of(root, file) if not is_tunable(change)]


def is_tunable(change: Change) -> bool:
    """Whether the change is one of a number that may be another: memory, speed, how a plot looks."""
    return change.old.isdigit() and any(fits(entry, change) for entry in written()["tunables"])


def explanation(change: Change) -> str | None:
    return next((entry["why"] for entry in written()["survivors"] if fits(entry, change)), None)


def fits(entry: dict[str, str], change: Change) -> bool:
    """An entry names a file (or a folder, for tunables), a line's text or the beginning of it, and old -> new."""
    return (
        (change.file == entry["file"] or change.file.startswith(entry["file"] + "/"))
        and change.text.startswith(entry.get("line", ""))
        and entry.get("change", "") in (f"{change.old} -> {change.new}", "")
    )


def stale(entries: Iterable[dict[str, str]], changes: list[Change]) -> list[str]:
    """Entries that fit no change of the code as it is."""
    return [json.dumps(entry) for entry in entries if not any(fits(entry, change) for change in changes)]
