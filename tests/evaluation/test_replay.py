"""Steps that are taken from the full cache's run change no number of any row, and are not computed again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from repository import FIXTURES

from kvmnn.evaluation import EvaluationSettings, measure
from kvmnn.evaluation.workers import run_tasks
from kvmnn.lm import evaluate, import_model
from kvmnn.lm.session import DecoderSession

TEXTS = sorted((FIXTURES / "lm" / "texts").glob("*.txt"))[:2]
POLICIES = [
    "streaming",
    "h2o_decayed",
    "knorm",
    "snapkv:window=8",
    "keydiff:phase=both,interval=3",
    "keydiff:wrapper=ada",
    "expected_attention",
    "pyramidkv:window=8",
    "think",
    "composed:policies=keydiff+snapkv@window=8",
]
CODECS = ["none", "kivi:group=8,recent=0,when=prompt", "kivi:group=8,recent=16"]
TIMES = {"seconds", "model_seconds", "policy_seconds", "process_peak_bytes", "process_opened_bytes"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    path = folder / "llama.gguf"
    path.write_bytes(tiny_models.build_gguf(*tiny_models.build_gguf_parts(tiny_models.MODELS["llama"])))
    import_model(path, folder / "llama")
    return folder / "llama"


def measure_cells(
    model: Path, texts: int, settings: EvaluationSettings, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], int]:
    """All cells without their times, and the tokens that the model read."""
    cells, counts = [], []

    def run(*arguments: Any, **options: Any) -> Any:
        for event in run_tasks(*arguments, **options):
            if event.cell is not None:
                cells.append({k: v for k, v in dataclasses.asdict(event.cell).items() if k not in TIMES})
            yield event

    original = DecoderSession.run_step

    def count(self: DecoderSession, ids: Any, *arguments: Any, **options: Any) -> Any:
        counts.append(len(ids))
        return original(self, ids, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("kvmnn.evaluation.runner.run_tasks", run)
        patch.setattr(DecoderSession, "run_step", count)
        evaluate(model, TEXTS[:texts], POLICIES, [40], codecs=CODECS, settings=settings, jobs=0)
    return cells, sum(counts)


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "texts"), [(0, 1), (48, 2)])
def test_replayed_steps_give_the_numbers_of_computed_ones(
    model: Path, monkeypatch: pytest.MonkeyPatch, prompt: int, texts: int
) -> None:
    settings = EvaluationSettings(tokens=96, chunk=8, prompt=prompt, timing=False)
    replayed, num_tokens = measure_cells(model, texts, settings, monkeypatch)
    monkeypatch.setattr(measure, "read_full_cache_run", lambda path: None)
    computed, num_all_tokens = measure_cells(model, texts, settings, monkeypatch)
    assert len(replayed) == len(computed) > texts * 20
    assert replayed == computed
    assert num_tokens < 0.8 * num_all_tokens


def test_row_in_a_worker_has_at_least_the_memory_of_the_steps_it_took(model: Path) -> None:
    settings = EvaluationSettings(tokens=96, chunk=8, prompt=48, timing=False)
    full, cut = evaluate(model, TEXTS[:1], ["knorm"], [40], settings=settings, jobs=1).rows
    assert full.process_peak_bytes and cut.process_peak_bytes
    assert cut.process_peak_bytes > 0.9 * full.process_peak_bytes
