"""tools/conformance.py itself: what it counts, what it must not let pass, and archives."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance import main
from repository import FIXTURES, ROOT

GOOD: dict[str, Any] = {
    "format": "mnn-frame-vectors-1",
    "predictor_specs": [
        {"name": "one", "spec": "xor_seq", "default_raw": False, "raw": False, "delta_seq": False, "xor_seq": True}
    ],
}
Told = Callable[..., tuple[int, str]]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Exit status and last line of a run, without the folder's name."""

    def run(*folders: Path) -> tuple[int, str]:
        code = main([str(folder) for folder in folders])
        return code, capsys.readouterr().out.splitlines()[-1].removeprefix(f"{folders[-1]}: ")

    return run


def put(folder: Path, index: object, name: str = "index.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(index if isinstance(index, str) else json.dumps(index))
    return folder


def put_archive(folder: Path, *members: tarfile.TarInfo, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "vectors.tar.xz", "w:xz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name.replace("__", "."))
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
        for member in members:
            archive.fileobj.write(member.tobuf())  # addfile refuses sizes without content, from Python 3.13 on
    return folder


def test_runner_every_shipped_archive_is_a_set_or_test_data() -> None:
    """Every archive of vectors is one that `conformance.py fixtures` finds; the other folders hold no index."""
    plain = {"dense_rules", "frames_short", "gates", "policies"}
    with_vectors = {path.parent.name for path in FIXTURES.glob("*/vectors.tar.xz")} | plain
    data = {path.name for path in FIXTURES.iterdir() if path.is_dir()} - with_vectors
    shipped = {"float8", "kv_real", "llama_windows", "llm_kv", "lm", "lm_import", "lm_real", "mnn_engine"}
    assert data == shipped | {"quantization", "traces"}
    assert {path.parent.name for name in ("index.json", "cases.json") for path in FIXTURES.rglob(name)} == plain


def test_runner_good_set_passes(tmp_path: Path, told: Told) -> None:
    assert told(put(tmp_path / "plain", GOOD)) == (0, "1 passed, 0 failed")
    put_archive(tmp_path / "packed", index__json=json.dumps(GOOD))
    assert told(tmp_path / "packed") == (0, "1 passed, 0 failed")
    assert told(tmp_path) == (0, "2 passed, 0 failed")


def test_runner_unknown_format_fails(tmp_path: Path, told: Told) -> None:
    put(tmp_path / "a", {"format": "somebody-elses-1", "cases": [{}, {}]})
    put(tmp_path / "b", {"format": "mnn-frame-vectors-1", "surprises": [{"x": 1}]})
    put(tmp_path / "c", "not json", "cases.json")
    assert told(tmp_path) == (1, "0 passed, 4 failed")
    assert told(tmp_path / "nowhere") == (1, "0 passed, 1 failed")


@pytest.mark.parametrize(
    "index",
    [
        {"format": "mnn-frame-vectors-1"},
        {"format": "h2o-planner-vectors-1", "cases": []},
        {"format": "somebody-elses-1", "cases": []},
        {"format": ["mnn-frame-vectors-1"]},
        {"format": "h2o-planner-vectors-1", "cases": {}},
        {"format": "h2o-planner-vectors-1", "cases": 5},
        {"format": "kvcm-vectors/1", "parts": []},
        {"format": "kvcm-vectors/1", "parts": ["../index.json"]},
        {"format": "kvcm-vectors/1", "parts": ["index.json"]},
        {"format": "kvcm-vectors/1", "parts": {"a": "b"}},
        {"format": "kvcm-vectors/1", "parts": 5},
        [],
        "[" * 100_000,
    ],
)
def test_runner_index_without_checks_fails(tmp_path: Path, told: Told, index: object) -> None:
    assert told(put(tmp_path, index)) == (1, "0 passed, 1 failed")


def test_runner_empty_list_or_wrong_count_fails(tmp_path: Path, told: Told) -> None:
    assert told(put(tmp_path, {**GOOD, "cases": []})) == (1, "1 passed, 1 failed")
    assert told(put(tmp_path, {**GOOD, "count": 2})) == (1, "1 passed, 1 failed")
    assert told(put(tmp_path, {**GOOD, "count": 1})) == (0, "1 passed, 0 failed")


def link(name: str, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    return entry


def huge(name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = tarfile.GNUTYPE_SPARSE
    entry.size = 1 << 40
    return entry


@pytest.mark.parametrize("member", [tarfile.TarInfo("../evil"), link("evil", "/etc/passwd"), huge("evil")])
def test_runner_archive_member_outside_its_folder_fails(tmp_path: Path, told: Told, member: tarfile.TarInfo) -> None:
    put_archive(tmp_path / "set", member, index__json=json.dumps(GOOD))
    assert told(tmp_path / "set") == (1, "0 passed, 1 failed")
    assert not (tmp_path / "evil").exists()


def test_runner_broken_or_empty_archive_fails(tmp_path: Path, told: Told) -> None:
    whole = (put_archive(tmp_path, index__json=json.dumps(GOOD)) / "vectors.tar.xz").read_bytes()
    for data in (b"", whole[: len(whole) // 2], bytes(1000)):
        (tmp_path / "vectors.tar.xz").write_bytes(data)
        assert told(tmp_path) == (1, "0 passed, 1 failed")
    put_archive(tmp_path, readme="nothing here")
    assert told(tmp_path) == (1, "0 passed, 1 failed")


@pytest.mark.slow
def test_runner_works_from_any_directory(tmp_path: Path) -> None:
    put(tmp_path / "set", GOOD)
    script = str(ROOT / "tools" / "conformance.py")
    done = subprocess.run([sys.executable, script, "set"], cwd=tmp_path, capture_output=True, text=True, env=plain())
    assert (done.returncode, done.stdout, done.stderr) == (0, "set: 1 passed, 0 failed\n", "")


def plain() -> dict[str, str]:
    """The environment without PYTHONSAFEPATH, which keeps the script's own folder off the path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
