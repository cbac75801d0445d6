"""The scripts of examples/ run on what ships with kvmnn, in a process of their own, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine_client import needs_engine, unpack_fixture
from repository import FIXTURES, ROOT

from kvmnn.reports.break_even import EngineTimes

EXAMPLES = ROOT / "examples"
TEXT = str(FIXTURES / "lm" / "texts" / "trace.py.txt")
PROMISES = {
    "compress_cache": (
        [],
        ("exact (MNN's own bytes)", "dense (for kvmnn alone)", "LOSSLESS copy of LOSSY K and V (every byte compared"),
    ),
    "evaluate_policies": ([str(FIXTURES / "lm"), TEXT, "plots"], ("streaming", "h2o_decayed_heads", ".svg")),
    "own_policy": ([], ("low_norms 128", "streaming 128")),
    "ship_prefix": ([], ("system_prompt_0.k", "read back: 12 arrays, 1,572,864 bytes")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISES)
def test_example_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    arguments, promises = PROMISES[name]
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for promise in promises:
        assert promise in done.stdout


@pytest.mark.slow
@needs_engine
def test_chat_goes_on_in_another_process(tmp_path: Path) -> None:
    """Two processes that share a store say what one says that hears all messages."""
    model, script = unpack_fixture("model", tmp_path), EXAMPLES / "chat_from_store.py"
    assert len(script.read_text().splitlines()) < 60

    def chat(store: str, messages: str) -> list[str]:
        argv = [sys.executable, "-P", script, model, tmp_path / store, "chat", "--ids"]
        done = subprocess.run(argv, input=messages, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first, second = chat("store", "hello there\n"), chat("store", "what is new\n")
    assert "chat: 0 of 0 tokens from the store" in first
    assert any(re.fullmatch(r"chat: (\d+) of \1 tokens from the store", line) for line in second)
    answers = [line for line in [*first, *second] if line.startswith("[")]
    assert len(answers) == 2
    assert answers == [line for line in chat("another", "hello there\nwhat is new\n") if line.startswith("[")]


@needs_engine
@pytest.mark.parametrize("arguments", [[], ["model"], ["no-model", "store"]])
def test_chat_without_a_model_prints_its_usage(arguments: list[str], tmp_path: Path) -> None:
    argv = [sys.executable, "-P", EXAMPLES / "chat_from_store.py", *arguments]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "MODEL STORE" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_engine
def test_times_of_the_engine_are_a_file_of_speed(tmp_path: Path) -> None:
    model, script = unpack_fixture("model", tmp_path), EXAMPLES / "time_engine.py"
    argv = [sys.executable, "-P", script, model, "8", "24"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (tmp_path / "times.json").write_text(done.stdout)
    times = EngineTimes.read(tmp_path / "times.json")
    assert set(times.computed) == set(times.loaded) == {"8", "24"}


def test_examples_are_the_tested_ones() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} >= set(PROMISES)


def test_ship_prefix_unknown_backend_is_refused() -> None:
    argv = [sys.executable, "-P", EXAMPLES / "ship_prefix.py", "pixel"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("no backend 'pixel': expected one of generic, ")
