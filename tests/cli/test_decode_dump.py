"""``kvmnn decode --output-kind dump`` restores the encoded KV dump."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_dumps import contents, dump

Run = Callable[..., Any]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for start in (0, 3):
        dump(Path("dumps/run_1/layer_0"), start=start)
    return tmp_path


def test_decode_to_dump_restores_the_dump(here: Path, run: Run) -> None:
    run("encode", "dumps/run_1", "-o", "run_1/")
    said = run("decode", "run_1", "--output-kind", "dump", "-o", "back/").out
    assert "back/: a KV dump of 4 arrays and 2 metadata files" in said
    assert "LOSSLESS (read back, sha256 of the manifest)" in said
    assert contents(Path("back")) == contents(Path("dumps/run_1"))
    assert "exists already" in run("decode", "run_1", "--output-kind", "dump", "-o", "back", code=1).err
    found = json.loads(run("decode", "run_1", "--output-kind", "dump", "-o", "back", "-f", "--json").out)
    assert found["metadata_files"] == ["layer_0/meta_t0_3.json", "layer_0/meta_t3_6.json"]
    assert contents(Path("back")) == contents(Path("dumps/run_1"))


def test_decode_without_output_kind_writes_arrays(here: Path, run: Run) -> None:
    run("encode", "dumps", "-o", "b/")
    run("decode", "b", "-o", "plain/")
    assert {path.suffix for path in Path("plain").iterdir()} == {".npy"}
    assert "--output-kind dump -o DIR/" in run("decode", "--help-all").out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ("b --output-kind dump", 2, "no output given"),
        ("b --output-kind dump -o -", 2, "--output-kind dump writes a directory"),
        ("b --output-kind dump --arrays -o back/", 2, "--output-kind dump writes a directory"),
        ("b --output-kind arrays -o back/", 2, "invalid choice"),
        ("k.npy.frame --output-kind dump", 1, "k.npy.frame: was not made from a whole KV dump"),
        ("k.npy.frame --output-kind dump -o back/", 1, "k.npy.frame: was not made from a whole KV dump"),
        ("b --output-kind dump -o k.npy", 1, "is not a directory"),
        ("b --output-kind dump --ignore manifest -o back/", 0, ""),
        ("b --output-kind dump --max-input-bytes 10 -o back/", 1, "above the limit of 10"),
    ],
)
def test_decode_to_dump_invalid_requests_are_refused(here: Path, run: Run, argv: str, code: int, message: str) -> None:
    np.save("k.npy", np.ones((2, 3, 4), np.float16))
    run("encode", "k.npy")
    run("encode", "dumps", "-o", "b/")
    assert message in run("decode", *argv.split(), code=code).err
    assert Path("back").exists() == (code == 0)


def test_decode_to_dump_hostile_name_is_one_line_error(here: Path, run: Run) -> None:
    run("encode", "dumps", "-o", "b/")
    manifest = json.loads(Path("b/manifest.json").read_text())
    document = json.loads(manifest["metadata"]["kvmnn.dump"])
    document["metadata_files"] = {"meta_\n\x1b[31m.json": '{"seq_len": "x"}'}
    manifest["metadata"]["kvmnn.dump"] = json.dumps(document)
    Path("b/manifest.json").write_text(json.dumps(manifest))
    error = run("decode", "b", "--output-kind", "dump", "-o", "back/", code=1).err
    assert error.count("\n") == 1
    assert "\x1b" not in error
    assert "seq_len is 'x'" in error
