"""`eval --initial-cache` through the command, with caches that llama.cpp computed with the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from llama_engine import Engine
from llama_twin import Llama, neox_gguf, text_of
from repository import FIXTURES

from kvmnn.lm import Tokenizer

LM = FIXTURES / "lm"
TEXT = LM / "texts" / "calendar.py.txt"
HELD, SCORED = 128, 65


class Measured(NamedTuple):
    """What `eval --initial-cache` says: nats more than the full cache, distances of K and V at most, ways to "
    "undo, notes."""

    nats: float
    keys: float
    values: float
    undo: set[str]
    notes: str


def measured(run: Any, model: Path, text: Path, *start: object) -> Measured:
    chosen = ("--max-tokens", HELD + SCORED, "--chunk", 8, "--json", "-q")
    found = json.loads(run("eval", model, "--text", text, *chosen, "--initial-cache", *start).out)
    distances = found["start"]["distances"]
    most = {
        part: max((each["squares"] / each["own_squares"]) ** 0.5 for each in distances if each["part"] == part)
        for part in ("key", "value")
    }
    undo = {name for each in distances for name in each.get("undo") or ()}
    assert [row["tokens"] for row in found["rows"]] == [SCORED] * 2
    return Measured(found["rows"][1]["versus_full"]["nll"], most["key"], most["value"], undo, " ".join(found["notes"]))


def session(gguf: Path, path: Path, ids: list[int], kind: str, *, flash: bool = True) -> Path:
    with Engine(gguf, kind, flash=flash) as engine:
        for begin in range(0, len(ids), 64):
            engine.feed(ids[begin : begin + 64], begin)
        return engine.save(path, ids)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model as llama.cpp reads it."""
    return neox_gguf(LM, tmp_path_factory.mktemp("neox") / "neox.gguf")


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """The first tokens of the text, bos included."""
    return [0, *Tokenizer.open_for_model(LM).encode(TEXT.read_text())[: HELD - 1].tolist()]


# Nats and distances at most: of f32 they are llama.cpp's own rounding (its GELU is a table in fp16).
LIMITS = {
    "f32": (0.002, 0.003),
    "f16": (0.002, 0.003),
    "bf16": (0.01, 0.006),
    "q8_0": (0.01, 0.01),
    "q5_1": (0.05, 0.1),
    "q4_0": (0.2, 0.2),
    "iq4_nl": (0.2, 0.2),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_eval_initial_cache_of_llama_cpp_with_shipped_model(
    tmp_path: Path, run: Any, shipped: Path, ids: list[int], kind: str
) -> None:
    nats, apart = LIMITS[kind]
    path = session(shipped, tmp_path / "x.session", ids, kind)
    found = measured(run, LM, TEXT, path)
    rotated = {"k-rotation", "v-rotation"} if kind.startswith(("q", "iq")) else set()
    assert found.undo == rotated
    if rotated:
        assert "--invert k-rotation,v-rotation makes them roundings" in found.notes and found.nats > 0.5
        found = measured(run, LM, TEXT, path, "--invert", "k-rotation,v-rotation")
    assert max(found.keys, found.values) < apart and abs(found.nats) < nats


@pytest.mark.parametrize("flash", [True, False])
def test_eval_initial_cache_with_erased_middle(
    tmp_path: Path, run: Any, shipped: Path, ids: list[int], flash: bool
) -> None:
    """The remaining tokens attended to the erased ones: better than cutting the text, worse than the whole cache."""
    with Engine(shipped, "f32", flash=flash) as engine:
        engine.feed(ids[:64])
        engine.feed(ids[64:], 64)
        engine.erase(8, 72)
        path = engine.save(tmp_path / "x.session", ids)
    found = measured(run, LM, TEXT, path)
    assert max(found.keys, found.values) < 0.003 and "a layer holds 64 of 128 tokens" in found.notes
    assert 0.005 < found.nats < 0.5


CASES = [(2, 64, "f32"), (1, 80, "f32"), (2, 64, "q8_0"), (1, 64, "q8_0"), (4, 128, "q8_0"), (1, 96, "q8_0")]


@pytest.mark.parametrize(("kv_heads", "dims", "kind"), CASES)
def test_eval_initial_cache_of_llama_cpp_with_llama(
    tmp_path: Path, run: Any, kv_heads: int, dims: int, kind: str
) -> None:
    """GGUF files of Llama models permute K, and rotate it where it is quantised."""
    twin = Llama(kv_heads=kv_heads, dims=dims)
    model, text = twin.onnx(tmp_path / "model"), tmp_path / "text.txt"
    ids = np.random.default_rng(3).integers(0, twin.words, HELD + SCORED + 1).tolist()
    text.write_text(text_of(ids))
    path = session(twin.gguf(tmp_path / "m.gguf"), tmp_path / "x.session", ids[:HELD], kind)
    found = measured(run, model, text, path)
    expected = {"k-order"} | ({"k-rotation", "v-rotation"} if kind == "q8_0" and dims % 64 == 0 else set())
    assert found.undo == expected and all(name in found.notes for name in expected)
    whole = found.nats
    found = measured(run, model, text, path, "--invert", ",".join(expected))
    assert max(found.keys, found.values) < (0.002 if kind == "f32" else 0.02)
    assert abs(found.nats) < 0.05 < abs(whole)
