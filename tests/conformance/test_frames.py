"""The vectors that MNN's own codec made, through the same code as tools/conformance.py."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from conformance import main, run_tree
from repository import FIXTURES


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frames")
    with tarfile.open(FIXTURES / "frames" / "vectors.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_every_vector_passes(vectors: Path) -> None:
    results = list(run_tree(vectors))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 175 + 169 + 7 + 52


def test_a_changed_expectation_fails(vectors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "set"
    copy.mkdir()
    for entry in vectors.iterdir():
        if entry.name != "index.json":
            (copy / entry.name).symlink_to(entry)
    index = (vectors / "index.json").read_text()
    changes = [
        ('"frame_fnv1a64": "9a68b200c5481428"', '"frame_fnv1a64": "9a68b200c5481429"'),
        ('"accept": true', '"accept": false'),
        ('"delta_seq": false', '"delta_seq": true'),
        ('"op": "encode16"', '"op": "encode99"'),
        ('"kv_len": 9', '"kv_len": 4'),
    ]
    for old, new in changes:
        assert old in index, old
        (copy / "index.json").write_text(index.replace(old, new, 1))
        assert main([str(copy)]) == 1
        assert capsys.readouterr().out.splitlines()[-1] == f"{copy}: 402 passed, 1 failed", old


def test_what_is_not_known_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.json").write_text('{"format": "somebody-elses-1", "cases": [{}, {}]}')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.json").write_text('{"format": "mnn-frame-vectors-1", "surprises": [{"x": 1}]}')
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "cases.json").write_text("not json")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}: 0 passed, 4 failed"
    assert main([str(tmp_path / "nowhere")]) == 1
