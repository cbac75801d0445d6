"""Training runs, resumes, and gives a model that exports; windows and schedule follow the recipe."""

from __future__ import annotations

import json

import export_onnx
import numpy as np
import pytest
import train
from training import Recipe, Windows, parse_curriculum
from transformers import GPTNeoXForCausalLM

from kvmnn.errors import SourceError
from kvmnn.lm.session import DecoderSession
from kvmnn.lm.tokenizer import Tokenizer

TINY = [
    "--vocab",
    "400",
    "--curriculum",
    "0:64,0.5:32+64",
    "--batch-tokens",
    "256",
    "--val-seq",
    "64",
    "--threads",
    "1",
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A folder of files as long as those of a standard library, of few words that are so long that tokens are few."""
    folder = tmp_path_factory.mktemp("library")
    random = np.random.default_rng(2)
    words = ["a" * 90, "b" * 90, "ab" * 45, "abba" * 20]
    for number in range(120):
        size = 24_000 if number < 60 else 7_000
        text = " ".join(random.choice(words, size // 90))
        (folder / f"module{number}.py").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    arguments = ["--out", str(folder), "--stdlib", str(library), "--steps", "12", "--save-every", "6"]
    assert train.main([*arguments, *TINY]) == 0
    return folder


def test_train_reduces_loss_and_logs_it(trained):
    log = json.loads((trained / "train_log.json").read_text(encoding="utf-8"))
    assert (log["steps"], log["tokens_seen"]) == (12, 12 * 256)
    assert [entry["step"] for entry in log["log"]] == [6, 12]
    assert log["log"][1]["val_loss"] < log["log"][0]["val_loss"] < 6.5
    assert log["val_loss_fp16_weights"] == pytest.approx(log["val_loss_fp32"], abs=1e-3)
    assert json.loads((trained / "split.json").read_text(encoding="utf-8"))["train"]["documents"] == 60
    assert len(list((trained / "texts").iterdir())) == 20


def test_train_output_exports_and_runs(trained):
    line = export_onnx.export(trained, trained / "model.onnx")
    assert "368 nodes" in line
    assert (trained / "model.onnx").stat().st_size < 11_000_000  # every weight is one that fp16 holds
    tokenizer = Tokenizer(trained / "tokenizer.json")
    session = DecoderSession.open(trained, cache=False)
    ids = tokenizer.encode("abba aaaa bbbb")
    logits = session.run_step(ids, np.arange(len(ids)), session.create_empty_past()).logits
    assert logits.shape == (len(ids), tokenizer.vocab_size)
    assert np.isfinite(logits).all()


def test_train_resumes_from_an_earlier_run(library, trained, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((trained / "tokenizer.json").read_bytes())
    arguments = ["--out", str(tmp_path), "--stdlib", str(library), "--init", str(trained), "--start-frac", "0.5"]
    assert train.main([*arguments, "--steps", "4", "--save-every", "4", *TINY]) == 0
    log = json.loads((tmp_path / "train_log.json").read_text(encoding="utf-8"))
    assert log["steps"] == 16
    assert [entry["step"] for entry in log["log"]] == [6, 12, 16]
    earlier = json.loads((trained / "train_log.json").read_text(encoding="utf-8"))
    assert log["val_loss_fp32"] < earlier["log"][0]["val_loss"]
    vocabulary = Tokenizer(tmp_path / "tokenizer.json").vocab_size
    assert GPTNeoXForCausalLM.from_pretrained(tmp_path).config.vocab_size == vocabulary


def test_train_wrong_option_is_one_line_error(library, tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "out"), "--stdlib", str(library), *TINY]
    assert train.main([*arguments, "--steps", "1", "--curriculum", "0.5:64"]) == 1
    assert train.main([*arguments, "--steps", "1", "--init", str(tmp_path)]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        "train.py: error: --curriculum 0.5:64: expected stages in order, the first from 0, "
        "with window lengths of at least 1"
    )
    assert second.startswith(f"train.py: error: {tmp_path}: is no folder of an earlier run")
    for wrong in ([], ["--steps", "1", "--minutes", "1"], ["--steps", "1", "--start-frac", "0.5"]):
        with pytest.raises(SystemExit):
            train.main([*arguments, *wrong])


def test_windows_cover_the_stream_once_an_epoch():
    documents = [np.arange(100 * n, 100 * n + 100, dtype=np.uint16) for n in range(7)]
    windows, again = Windows(documents, 16, seed=3), Windows(documents, 16, seed=3)
    seen = []
    for _ in range(40):
        inputs, targets = windows.batch(1)
        assert (inputs[0, 1:] == targets[0, :-1]).all()
        assert (inputs == again.batch(1)[0]).all()
        seen.append(tuple(inputs[0].tolist()))
    assert len(set(seen)) == 40
    assert sum(map(len, seen)) == len({token for window in seen for token in window})
    with pytest.raises(SourceError, match="hold no window of 700"):
        Windows(documents, 700, seed=3).batch(1)


def test_recipe_schedule_of_rate_and_window():
    recipe = Recipe(
        curriculum=parse_curriculum("0:256,0.5:512+1024"),
        steps=100,
        minutes=None,
        start=0.0,
        batch_tokens=4096,
        learning_rate=1.0,
        least_learning_rate=0.1,
        warmup=10,
        weight_decay=0.1,
        bf16=False,
        compiled=False,
        seed=0,
        save_every=10,
        validation_window=64,
    )
    assert recipe.progress(50, 1e9) == 0.5
    assert recipe.rate(0, 0.0) == pytest.approx(0.1)
    assert recipe.rate(50, 0.5) == pytest.approx(0.55)
    assert recipe.rate(99, 1.0) == pytest.approx(0.1)
    assert [recipe.window(step, 0.49) for step in (0, 1)] == [256, 256]
    assert [recipe.window(step, 0.5) for step in (50, 51, 52)] == [512, 1024, 512]
