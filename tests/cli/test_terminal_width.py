"""Results in a terminal of 80 columns: tables fit, sentences wrap between words; pipes get unwrapped lines."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import compressor_files
import numpy as np
import pytest

from kvmnn._util.text import wrap_text

WORDS = np.random.default_rng(4).standard_normal((2, 320, 64)).astype(np.float32)
VERBS = """
encode keys.npy
encode kv.npz -f -v
inspect keys.npy.frame -v
inspect kv.npz.frames
inspect kv.npz
verify kv.npz.frames --against kv.npz
decode keys.npy.frame -o back.npy
diff kv.npz kv.npz.frames
bench keys.npy --repeats 1
mnn pack kv.npz -o sys/ --name sys --backend x86-avx2
inspect sys/
mnn repack sys/ --backend x86-avx2 --target-backend arm64-fp16
mnn compact sys/ --remove 100 --reserve 0:10
store put prefixes kv.npz --token-ids ids.json --fingerprint m
store stat prefixes
store ls prefixes
store verify prefixes
measure kv.npz --encode
plan scores.npy
compressor convert comp.pth
inspect comp.bin
inspect comp.pth
verify comp.bin --against comp.pth
compressor export comp.bin
compressor run comp.bin kv.npz -v --axes htd
"""

WRITERS = (
    "encode",
    "decode",
    "mnn pack",
    "mnn repack",
    "mnn compact",
    "compressor convert",
    "compressor export",
    "compressor run",
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    # bench shows speeds from 1 MiB on; repeated, as compressing noise takes seconds.
    wide = np.tile(np.random.default_rng(5).standard_normal((2, 64, 64)), (1, 64, 1))
    np.save("keys.npy", wide.astype(np.float16))
    np.savez("kv.npz", **{f"layer_{n}.{part}": WORDS for n in range(2) for part in ("key", "value")})
    Path("ids.json").write_text(json.dumps(list(range(320))))
    np.save("scores.npy", np.random.default_rng(1).random((4, 1, 9000)).astype(np.float32))
    compressor_files.checkpoint(Path("comp.pth"), compressor_files.weights(2, head_dim=64))
    return tmp_path


@pytest.mark.slow
def test_results_fit_an_80_column_terminal(here, run, monkeypatch) -> None:
    rows: dict[str, list[str]] = {}
    for command in VERBS.strip().splitlines():
        lines = run(*command.split()).out.splitlines()
        rows[command] = [line for line in lines if len(re.findall(r" {3,}[\d.,]+", line)) > 2]
        assert not [line for line in rows[command] if len(line) > 80], "a table is too wide"
    assert sum(map(bool, rows.values())) >= 6, "there are tables to look at"
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda self: True, raising=False)
    for command in VERBS.strip().splitlines():
        writes = command.startswith(WRITERS)
        shown = run(*command.split(), *(["-f"] if writes else [])).out.splitlines()
        assert shown, command
        assert not [line for line in shown if len(line) > 80], command


def test_wrap_text_breaks_between_words() -> None:
    assert wrap_text("one two three\nfour", 9) == "one two\n    three\nfour"
    assert wrap_text("  a  1  2", 80) == "  a  1  2"
    assert wrap_text("  ab cd ef", 7) == "  ab cd\n      ef"
    assert wrap_text("x" * 30 + " y", 10) == "x" * 30 + "\n    y"
    assert wrap_text("  1:20,30:4,5:6", 12) == "  1:20,30:4,\n      5:6"
    assert wrap_text("日本 日本", 6) == "日本\n    日本"


def test_documents_are_not_wrapped(here, run, monkeypatch) -> None:
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda self: True, raising=False)
    long = Path("keys" + " with a long name" * 8 + ".npy")
    long.write_bytes(Path("keys.npy").read_bytes())
    assert json.loads(run("encode", str(long), "--json").out)["verb"] == "encode"
    assert max(map(len, run("completion", "bash").out.splitlines())) > 80
