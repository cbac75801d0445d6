"""The floors of the house: imports point down, and no files import each other in a circle (docs/design.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from repository import ROOT

FLOORS = (
    ("__main__",),
    ("cli",),
    ("reports.page",),
    ("gates",),
    ("evaluation", "batch", "calibration"),
    ("lm", "compressor", "analysis", "bench"),
    ("runtime", "store", "quantization"),
    ("formats", "reports"),
    ("bundle", "policies"),
    ("linear", "transform"),
    ("profiles",),
    ("arrays", "integrations", "dense"),
    ("frames", "packed"),
    ("files",),
    ("_util",),
    ("_simd", "dtypes"),
    ("_interrupt", "errors"),
)
"""From the top down; rooms of one floor do not know each other."""

EXCEPTIONS = {
    ("kvmnn", "lm"): {"evaluation"},  # kvmnn.lm.evaluate: the name users look for, found when it is asked for
    ("kvmnn", "bundle"): {"formats"},  # kvmnn.bundle.encode, which opens its input
}
"""Faces that hand on names from a room above them."""


@cache
def nodes(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The import statements of a module, which is parsed once however many tests read it."""
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom))


def modules(root: Path) -> dict[str, Path]:
    """Every module below `root` by its dotted name; packages by their own."""
    found = {}
    for path in [*root.rglob("*.py"), *root.rglob("*.pyi")]:
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a module imports, those inside functions and for type checkers included."""
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in nodes(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                full = ".".join([*base, alias.name])
                yield full if full in known else ".".join(base)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room(name: str) -> str | None:
    """The folder or top-level module that a module belongs to; None for what is not in the house.

    A folder in a room has a floor of its own where `FLOORS` names it.
    """
    parts = name.split(".")
    if parts[0] != "kvmnn" or len(parts) == 1:
        return None
    nested = ".".join(parts[1:3])
    return nested if any(nested in names for names in FLOORS) else parts[1]


def wrong_arrows(root: Path) -> list[str]:
    known = modules(root)
    floor = {name: height for height, names in enumerate(FLOORS) for name in names}
    wrong = []
    for name, path in sorted(known.items()):
        here = room(name)
        if here is None:
            continue
        for target in imports(name, path, known):
            there = room(target)
            if target.split(".")[0] != "kvmnn" or there == here:
                continue
            if there is None:
                wrong.append(f"{name} imports the face of the whole package")
            elif there in EXCEPTIONS.get(tuple(name.split(".")), ()):
                continue
            elif here not in floor or there not in floor:
                wrong.append(f"{name} -> {target}: no floor for one of them")
            elif floor[there] <= floor[here]:
                wrong.append(f"{name} -> {target}")
    return wrong


def circle(root: Path) -> list[str]:
    """Modules that import each other in a circle; none if there is no circle. A package's face is not its content."""
    known = modules(root)
    graph = {name: set(imports(name, path, known)) & set(known) - {name} for name, path in known.items()}
    for name in list(graph):
        if known[name].stem == "__init__" and tuple(name.split(".")) in EXCEPTIONS:
            graph[name] = {target for target in graph[name] if room(target) not in EXCEPTIONS[tuple(name.split("."))]}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.usefixtures("without_collector")
def test_imports_point_down() -> None:
    assert wrong_arrows(ROOT / "kvmnn") == []


@pytest.mark.usefixtures("without_collector")
def test_imports_have_no_circle() -> None:
    assert circle(ROOT / "kvmnn") == []


@pytest.mark.parametrize(
    ("file", "line", "arrow"),
    [
        ("frames/options.py", "from ..packed import layout", "kvmnn.frames.options -> kvmnn.packed.layout"),
        ("files/file_names.py", "def f():\n    from ..cli import main", "kvmnn.files.file_names -> kvmnn.cli"),
        ("packed/layout.py", "import kvmnn.policies.policy", "kvmnn.packed.layout -> kvmnn.policies.policy"),
        ("arrays/naming.py", "from .. import encode", "kvmnn.arrays.naming imports the face of the whole package"),
        ("new.py", "from .errors import KvmnnError", "kvmnn.new -> kvmnn.errors: no floor for one of them"),
    ],
)
def test_imports_planted_upward_import_is_reported(tmp_path: Path, file: str, line: str, arrow: str) -> None:
    for name, path in modules(ROOT / "kvmnn").items():
        copy = tmp_path / "kvmnn" / path.relative_to(ROOT / "kvmnn")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
        assert name
    planted = tmp_path / "kvmnn" / file
    planted.write_text((planted.read_text() if planted.exists() else "") + f"\n{line}\n")
    assert arrow in wrong_arrows(tmp_path / "kvmnn")


def test_imports_planted_circle_is_reported(tmp_path: Path) -> None:
    (tmp_path / "kvmnn").mkdir()
    (tmp_path / "kvmnn" / "__init__.py").write_text("")
    (tmp_path / "kvmnn" / "a.py").write_text("from . import b\n")
    (tmp_path / "kvmnn" / "b.py").write_text("from .a import x\n")
    assert set(circle(tmp_path / "kvmnn")) == {"kvmnn.a", "kvmnn.b"}
