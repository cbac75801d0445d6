"""onnxruntime's telemetry is off: no file in the home directory, none at ``$TMPDIR/.ses``, no look-up by DNS."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import FIXTURES

from kvmnn._util.packages import import_optional

VARIABLE = "ORT_DISABLE_TELEMETRY"
COMMAND = [
    sys.executable,
    "-m",
    "kvmnn",
    "generate",
    str(FIXTURES / "lm"),
    "--prompt",
    "def f",
    "--max-new-tokens",
    "2",
]


def folders(tmp_path: Path, **more: str) -> dict[str, str]:
    """An environment with an empty home and temporary directory of its own, without the variable."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    kept = {key: value for key, value in os.environ.items() if key != VARIABLE and not key.startswith("XDG_")}
    return {**kept, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), **more}


@pytest.mark.slow
def test_generate_leaves_no_file_of_onnxruntime(tmp_path: Path) -> None:
    environment = folders(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "tmp" / ".ses").symlink_to(victim)
    subprocess.run(COMMAND, env=environment, check=True, capture_output=True)
    assert victim.read_text() == "precious"
    written = [path for path in (tmp_path / "home").rglob("*") if "Microsoft" in str(path) or path.suffix == ".db"]
    assert written == [] and list((tmp_path / "tmp").iterdir()) == [tmp_path / "tmp" / ".ses"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_generate_opens_no_internet_socket(tmp_path: Path) -> None:
    environment, trace = folders(tmp_path), tmp_path / "trace"
    # The upload begins 9 seconds later, with the look-up of its server.
    wait = "import runpy, sys, time; sys.argv[0] = 'kvmnn'\ntry: runpy.run_module('kvmnn', run_name='__main__')\n"
    wait += "except SystemExit: time.sleep(12)"
    command = ["strace", "-f", "-qq", "-e", "trace=network", "-o", str(trace), sys.executable, "-c", wait, *COMMAND[3:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "ptrace" in done.stderr.lower():
        pytest.skip("this machine lets nobody trace")
    assert done.returncode == 0, done.stderr
    assert re.findall(r".*AF_INET.*", trace.read_text()) == []


@pytest.mark.parametrize(("said", "expected"), [(None, "1"), ("0", "0"), ("", ""), ("1", "1")])
def test_import_optional_disables_telemetry_unless_set(
    monkeypatch: pytest.MonkeyPatch, said: str | None, expected: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if said is not None:
        monkeypatch.setenv(VARIABLE, said)
    import_optional("onnxruntime")
    assert os.environ[VARIABLE] == expected


def test_import_optional_of_other_package_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    import_optional("json")
    assert VARIABLE not in os.environ
