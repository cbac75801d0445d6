"""The vectors that MNN's own codec made, through the same code as tools/conformance.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import codec_model
import pytest
from conformance import main, run_tree
from repository import DOCS


@pytest.fixture(scope="module")
def vectors(unpacked: Callable[[str], Path]) -> Path:
    return unpacked("frames")


def test_frames_every_vector_passes(vectors: Path) -> None:
    results = list(run_tree(vectors))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 175 + 169 + 7 + 52


def test_frames_every_short_zstd_vector_passes(unpacked: Callable[[str], Path]) -> None:
    results = list(run_tree(unpacked("frames_short")))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == (2 + 4) * 4


def test_frames_each_rule_of_the_page_refuses_a_vector(unpacked: Callable[[str], Path]) -> None:
    page = (DOCS / "format.md").read_text("utf-8")
    rules = set(re.findall(r"^\| (R\d+) \|", page, re.MULTILINE))
    refusing: set[str] = set()
    for name in ("frames", "frames_short"):
        folder = unpacked(name)
        for case in json.loads((folder / "index.json").read_text("utf-8"))["bad_frames"]:
            frame, stride = (folder / case["frame"]).read_bytes(), {"decode16": 2, "decode32": 4}.get(case["op"])
            if stride is None:
                continue
            for with_zstd, verdict in ((True, case["accept"]), (False, case["accept_without_zstd"])):
                try:
                    codec_model.decode(frame, stride, with_zstd)
                except codec_model.Reject as error:
                    assert not verdict, case["name"]
                    refusing.add(str(error).partition(":")[0])
                else:
                    assert verdict, case["name"]
    assert len(rules) == 12
    assert refusing == rules


def test_frames_changed_expectation_fails(vectors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_frames_that_cannot_be_compared_are_counted(
    vectors: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvmnn.frames import zstd

    monkeypatch.setattr(zstd, "_version", (1, 5, 8))
    assert main([str(vectors)]) == 0
    line = f"{vectors}: 2 of these were not compared in full: bytes of frames under libzstd 1.5.8, which are not MNN's"
    assert capsys.readouterr().out.splitlines() == [line, f"{vectors}: 403 passed, 0 failed"]
