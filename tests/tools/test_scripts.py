"""Every script of tools/ starts from any directory, and names only files that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from repository import ROOT
from script_server import ScriptServer

TOOLS = ROOT / "tools"
SCRIPTS = sorted(
    str(path.relative_to(TOOLS)) for path in TOOLS.rglob("*.py") if '\nif __name__ == "__main__":' in path.read_text()
)
SHELL = sorted(str(path.relative_to(TOOLS)) for path in TOOLS.rglob("*.sh"))
NEEDED = {
    "fixtures/compressor_types.py": "torch",
    "fixtures/float8.py": "torch",
    "fixtures/hf_layers.py": "torch",
    "fixtures/mlx_classes.py": "mlx",
}
OF_OTHERS = {"docs/KVCacheCompressionWeightFormat.md"}  # InfiniLM's
PATHS = re.compile(r"(?<![\w/.-])((?:tools|tests|pyx|fixtures|docs|benchmarks)/[\w./-]*\w)")


def test_script_list_is_complete() -> None:
    assert {"conformance.py", "fuzz/run.py", "bench/codec.py", "docs/ratios.py"} <= set(SCRIPTS)
    assert SHELL == [
        "demo.sh",
        "fuzz/dense.sh",
        "fuzz/guided.sh",
        "fuzz/profile_streams.sh",
        "fuzz/threads.sh",
        "progress.sh",
        "sanitize.sh",
        "test_aarch64.sh",
        "test_zarr.sh",
        "wheel.sh",
    ]


@pytest.fixture(scope="module")
def scripts() -> Iterator[ScriptServer]:
    server = ScriptServer()
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_help_works_from_any_directory(script: str, scripts: ScriptServer, tmp_path: Path) -> None:
    if script in NEEDED:
        pytest.importorskip(NEEDED[script])
    done = scripts(TOOLS / script, "--help", folder=tmp_path)
    assert (done["code"], done["err"]) == (0, "")
    assert done["out"].startswith("usage: ")
    assert not list(tmp_path.iterdir())


def test_dense_benchmark_reports_axis_order(tmp_path: Path) -> None:
    np.save(tmp_path / "k.npy", np.zeros((1, 4, 70, 8), np.float16))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, str(TOOLS / "bench/dense.py"), "--keys", str(tmp_path / "k.npy")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = "k.npy: read as 70 heads of 4 tokens: say --heads-first where it is the other way round\n"
    assert done.returncode == 1 and done.stderr.endswith(said) and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_fuzzing_runs_and_repeats_a_case() -> None:
    command = [sys.executable, str(TOOLS / "fuzz/run.py"), "--seed", "7"]
    for options, text in ((["--minutes", "0.03"], "nothing found (seed 7)"), (["--case", "7:1"], "executions, ")):
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and text in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("script", SHELL)
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["sh", "-n", str(TOOLS / script)], check=True)


NAMING = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")),
    *(path for folder in ("docs", "fixtures", "tests/attacks") for path in (ROOT / folder).glob("*.md")),
    *(path for path in TOOLS.rglob("*") if path.suffix in (".py", ".sh", ".c")),
]


@pytest.mark.parametrize("path", NAMING, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_name_existing_files(path: Path) -> None:
    named = {name for name in PATHS.findall(path.read_text(encoding="utf-8")) if "NAME" not in name} - OF_OTHERS
    assert [name for name in named if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}.*"))] == []
