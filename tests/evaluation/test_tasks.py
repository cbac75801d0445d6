"""Tasks: items made of texts, right answers under policies, and intervals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("tokenizers")

from kvmnn.errors import KvmnnError, OptionError
from kvmnn.evaluation import (
    EvaluationSettings,
    TaskEvaluation,
    TaskOptions,
    evaluate_tasks,
    read_documents,
    read_results,
)
from kvmnn.evaluation.proportions import compute_paired_drop, compute_wilson_interval
from kvmnn.evaluation.task_items import TASK_NAMES, TaskTexts, draw_items, find_different_texts
from kvmnn.lm import DecoderSession, Runner, Tokenizer

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "fixtures" / "lm"
TEXTS = [MODEL / "texts" / name for name in ("calendar.py.txt", "trace.py.txt", "smtpd.py.txt")]


@pytest.fixture(scope="module")
def texts() -> TaskTexts:
    tokenizer = Tokenizer.open_for_model(MODEL)
    return TaskTexts(read_documents(TEXTS, tokenizer, 1500), tokenizer, 160)


def test_intervals_equal_published_values() -> None:
    """Newcombe, Statistics in Medicine 17 (1998): 81 of 263, page 857; pairs 36, 12, 2, 0, page 2635."""
    assert compute_wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert compute_paired_drop(36, 12, 2, 0) == pytest.approx((0.2, 0.0569, 0.3404), abs=5e-5)
    assert compute_paired_drop(36, 2, 12, 0) == pytest.approx((-0.2, -0.3404, -0.0569), abs=5e-5)
    assert compute_wilson_interval(0, 0) == (0, 1)
    drop, low, high = compute_paired_drop(20, 0, 0, 0)
    assert drop == 0
    assert low < -0.1
    assert high > 0.1


@pytest.mark.parametrize("task", TASK_NAMES)
def test_draw_items_is_seeded_and_answers_stand_in_the_context(texts: TaskTexts, task: str) -> None:
    items, again, other = (draw_items(task, texts, 6, seed) for seed in (0, 0, 1))
    assert items == again != other
    for item in items:
        context = texts.tokenizer.decode(item.context)
        answer = texts.tokenizer.decode(item.answer)
        assert answer.strip() in context
        if task == "copy":
            assert texts.tokenizer.decode(item.query).strip() + answer in context
        if task == "classification":
            assert item.answer[0] in item.choices
            assert len(set(item.choices)) == 2


def test_draw_items_unsuitable_texts_are_refused(texts: TaskTexts, tmp_path: Path) -> None:
    with pytest.raises(KvmnnError, match="needs two texts"):
        find_different_texts(texts.documents[:1])
    (tmp_path / "a.txt").write_text("one two three")
    short = TaskTexts(read_documents([tmp_path / "a.txt"], texts.tokenizer, 99), texts.tokenizer, 64)
    with pytest.raises(KvmnnError, match="0 of 4 items could be made"):
        draw_items("copy", short, 4, 0)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("copi", "'copi' is no task (did you mean 'copy'?)"),
        ("copy,copy", "expected each once"),
        ("copy,items=0", "items: found 0"),
        ("tokens=8", "tokens: found 8"),
        ("copy,depth=3", "expected items=N or tokens=N"),
    ],
)
def test_task_options_invalid_specs_are_refused(spec: str, said: str) -> None:
    with pytest.raises(OptionError) as error:
        TaskOptions.parse(spec)
    assert said in str(error.value)
    assert TaskOptions.parse("all,items=3") == TaskOptions(items=3)


def test_evaluate_tasks_equals_greedy_decoding(texts: TaskTexts, tmp_path: Path) -> None:
    """The full cache's answers are those of a loop that decodes greedily; a store gives them again."""
    settings = EvaluationSettings(chunk=16, timing=False, threads=1)
    options = TaskOptions.parse("copy,completion,items=6,tokens=96")
    results = [
        evaluate_tasks(
            MODEL, texts.documents, ["streaming"], [16], tasks=options, settings=settings, store=tmp_path / "s"
        )
        for _ in range(2)
    ]
    assert results[0] == results[1]
    full, cut = results[0].rows
    assert (full.stored_share, full.configuration.label) == (1.0, "full")
    assert cut.stored_share < 0.3
    session = DecoderSession.open(MODEL, threads=1)
    shorter = TaskTexts(texts.documents, texts.tokenizer, 96)
    hits = []
    for item in draw_items("copy", shorter, 6, 0):
        runner = Runner(session)
        runner.step(item.context)
        given = [int(runner.step(item.query)[-1].argmax())]
        while len(given) < len(item.answer):
            given.append(int(runner.step(given[-1:])[-1].argmax()))
        hits.append(tuple(given) == item.answer)
    score = results[0].get_score(full, "copy")
    assert (score.num_right, score.num_lost, score.num_gained) == (sum(hits), 0, 0)
    assert sum(depth.num_items for depth in score.depths) == 6
    assert TaskEvaluation.from_dict(json.loads(json.dumps(results[0].to_dict())), "x") == results[0]
    assert "copy, by where in the context it stands" in results[0].format_table(80)


@pytest.mark.slow
def test_eval_command_adds_tasks(tmp_path: Path, run) -> None:
    words = ["eval", MODEL, "--text", *TEXTS[:2], "--max-tokens", 32, "--chunk", 16, "--no-timing", "--threads", 1]
    words += ["--policy", "streaming", "--budget", "25%", "--tasks", "copy,items=3,tokens=64"]
    document = json.loads(run(*words, "-o", tmp_path / "r.json", "--json").out)
    assert [row["configuration"]["label"] for row in document["tasks"]["rows"]] == ["full", "streaming 16"]
    assert np.isclose(document["tasks"]["rows"][1]["stored_share"], 16 / 65, atol=0.3)
    assert "### Tasks: right answers" in read_results(tmp_path / "r.json").to_text("markdown")
    assert "--tasks: 'x' is no task" in run(*words[:-1], "x", code=2).err
