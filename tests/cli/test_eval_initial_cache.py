"""``kvmnn eval --initial-cache``: a cache that an engine saved, its scores, and one line for every error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import saved_starts
from repository import FIXTURES

from kvmnn.cli.entry_point import main

MODEL = FIXTURES / "lm"
TEXT = MODEL / "texts" / "trace.py.txt"
TOKENS = 40
BASE = ["eval", str(MODEL), "--text", str(TEXT), "--max-tokens", "56", "--chunk", "8", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`kv` of dump-kv, `a.session` and `a.pt` with its arrays, `ids.json`."""
    found = tmp_path_factory.mktemp("from")
    dump = ["dump-kv", str(MODEL), "--text", str(TEXT), "--max-tokens", str(TOKENS), "--chunk", "8", "-q"]
    assert main([*dump, "-o", str(found / "kv")]) == 0
    layers = [tuple(np.load(found / "kv" / f"layer_{n}.{part}.npy") for part in ("key", "value")) for n in range(6)]
    ids = json.loads((found / "kv" / "token_ids.json").read_text())
    saved_starts.llama(found / "a.session", layers, ids)
    saved_starts.torch(found / "a.pt", layers, np.float16, batch=2)
    (found / "ids.json").write_text(json.dumps(ids))
    return found


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def fails(capsys, *arguments):
    code, out, err = run(capsys, *arguments)
    assert out == "" and err.startswith("kvmnn: error: ") and err.count("\n") == 1
    return code, err


FORMS = {
    "MNN prefix cache": ["mnn", "pack", "kv", "--backend", "x86-avx2", "--name", "p", "-o"],
    "dense streams": ["encode", "kv", "--codec", "dense", "-o"],
}


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_eval_initial_cache_in_any_format(capsys, folder, tmp_path, monkeypatch, form):
    """The cache equals the model's own bit for bit, and has the same scores."""
    monkeypatch.chdir(folder)
    made = tmp_path / "x"
    assert run(capsys, *FORMS[form], made)[0] == 0
    more = ["--no-timing", "-o", tmp_path / "r.json"]
    code, out, err = run(capsys, *BASE, "--initial-cache", made, "--token-ids", "ids.json", *more, "-q")
    assert (code, err) == (0, "") and "| policy |" in out
    document = json.loads((tmp_path / "r.json").read_text())
    own, begun = document["rows"]
    assert own["nll"] == begun["nll"] and begun["start"] == made.name
    distances = document["start"]["distances"]
    assert len(distances) == 12 and all(each["equal"] == each["words"] for each in distances)


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_initial_cache_table_and_json(capsys, folder, tmp_path):
    asked = [*BASE, "--initial-cache", folder / "a.session", "--policy", "streaming", "--budget", "16"]
    code, out, err = run(capsys, *asked, "-o", tmp_path / "r.json")
    assert (code, err) == (0, "")
    table = out.splitlines()
    assert table[2].startswith("| full | LOSSLESS |") and table[3].startswith("| from a.session | LOSSLESS |")
    assert table[4].startswith("| streaming 16 from a.session | LOSSY | 16 |")
    assert "Rows from a.session begin with its K and V of the first 40 tokens (llama.cpp session: 6 layers" in out
    document = json.loads((tmp_path / "r.json").read_text())
    full, alone, cut = document["rows"]
    assert "start" not in full and alone["start"] == cut["start"] == "a.session"
    assert full["nll"] == alone["nll"] != cut["nll"] and {row["tokens"] for row in document["rows"]} == {16}
    assert document["start"]["tokens_seen"] == TOKENS and len(document["start"]["distances"]) == 12
    assert not document["settings"]["timing"]
    code, out, err = run(capsys, "report", tmp_path / "r.json", "-o", f"{tmp_path}/plots/")
    assert code == 0 and (tmp_path / "plots" / "strategy_comparison.png").is_file()
    code, out, err = run(capsys, "report", tmp_path / "r.json", "-o", tmp_path / "page.html")
    assert code == 0 and "from a.session" in (tmp_path / "page.html").read_text()


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_initial_cache_notes_name_the_file(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder)
    code, out, _ = run(capsys, *BASE, "--initial-cache", "a.pt", "--part", "batch=1", "--token-ids", "ids.json")
    assert code == 0 and "a.pt: text 1 of a batch of 2" in " ".join(out.split())


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_initial_cache_part_and_token_ids(capsys, folder):
    ids = ["--token-ids", folder / "ids.json"]
    code, _, err = run(capsys, *BASE, "--initial-cache", folder / "a.pt", "--part", "batch=1", *ids, "-q")
    assert (code, err) == (0, "")
    assert "--part batch=N takes one text" in fails(capsys, *BASE, "--initial-cache", folder / "a.pt", *ids)[1]
    assert (
        "does not say its token ids: expected --token-ids IDS"
        in fails(capsys, *BASE, "--initial-cache", folder / "a.pt", "--part", "batch=1")[1]
    )
    assert (
        "its token 0 is 0, --token-ids says 5"
        in fails(capsys, *BASE, "--initial-cache", folder / "a.session", "--token-ids", "5,6")[1]
    )


def test_eval_initial_cache_unused_options_are_refused(capsys, folder):
    cache = ["--initial-cache", folder / "a.session"]
    for more, said in (
        (["--token-ids", "1,2"], "--token-ids is about the cache of --initial-cache, which is missing"),
        (["--invert", "k-order"], "--invert is about the cache of --initial-cache"),
        ([*cache, "--invert", "all"], "undo 'all': expected k-rotation, v-rotation or k-order"),
        (["--part", "batch=0"], "--part batch is about the cache of --initial-cache"),
        (["--part", "sequence=0"], "--part sequence is about the cache of --initial-cache"),
        (["--backend", "x86-avx2"], "--backend is about the cache of --initial-cache"),
        ([*cache, "--backend", "x86-avx2"], "--backend is about packed files of MNN's"),
        ([*cache, "--timing"], "--timing has no effect with --initial-cache: nothing is timed"),
        ([*cache, "--store", "s"], "--store has no effect with --initial-cache"),
        ([*cache, "--preset", "streaming-h2o"], "--preset has no effect with --initial-cache"),
    ):
        code, err = fails(capsys, *BASE, *more)
        assert code == 2 and said in err
    code, err = fails(capsys, *BASE, *cache, "--policy", "h2o_decayed", "--budget", "32")
    assert code == 2 and "h2o_decayed ranks tokens by the attention that they drew" in err


def test_eval_initial_cache_unreadable_is_one_line_error(capsys, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "no\x1b[31m.session").write_bytes((folder / "a.session").read_bytes()[:-1])
    for path in (tmp_path / "missing", tmp_path / "empty", tmp_path / "no\x1b[31m.session", TEXT, MODEL / "model.onnx"):
        code, err = fails(capsys, *BASE, "--initial-cache", path)
        assert code == 1 and "\x1b" not in err
    output = ["-o", folder / "a.session", "-f"]
    before = (folder / "a.session").read_bytes()
    assert fails(capsys, *BASE, "--initial-cache", folder / "a.session", *output)[0] == 1
    assert (folder / "a.session").read_bytes() == before


@pytest.mark.slow
def test_eval_initial_cache_interrupt_removes_temporary_files(folder, tmp_path):
    """Interrupted while a process measures: files of K and V are removed, finished cells stay."""
    command = [sys.executable, "-P", "-m", "kvmnn", *BASE, "--initial-cache", str(folder / "kv"), "--chunk", "1"]
    command[command.index("56")] = "1500"
    with subprocess.Popen(
        [*command, "--resume", str(tmp_path / "cells"), "-q"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("kvmnn-start-*/start.json")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(tmp_path.glob("kvmnn-start-*/start.json"))
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
        assert process.wait(30) == 130
    assert b"Traceback" not in err and not list(tmp_path.glob("kvmnn-*"))
