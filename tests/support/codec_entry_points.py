"""The entry points that pyproject.toml declares, as they are installed: for processes that must find them by name."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from repository import ROOT

import kvmnn


def declared() -> dict[str, dict[str, str]]:
    """Group, name, value."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]


def installed_in(folder: Path) -> Path:
    """`folder` with the metadata of an installed kvmnn that has these entry points."""
    about = folder / "kvmnn-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvmnn\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in declared().items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
    return folder


def run_elsewhere(code: str, folder: Path, *argv: object) -> str:
    """Standard output of a program in a process of its own that has the entry points. Warnings are errors there."""
    paths = [str(installed_in(folder / "site")), str(Path(kvmnn.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-W", "error", "-c", code, *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
