"""The time of attention: measured in the timed steps, found in the executed graph, no temporary files left."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from repository import FIXTURES
from tiny_decoders import Tiny

from kvmnn.errors import ModelError
from kvmnn.evaluation import EvaluationSettings, evaluate
from kvmnn.evaluation.timing import measure_attention_time
from kvmnn.lm.documents import Document
from kvmnn.lm.onnx.profile import AttentionTimeStats
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.policies import create_policy
from kvmnn.policies.policy import Policy

IDS = np.arange(60) % 48
FORMS = {
    "written": (Tiny(), 2 * 4),  # of each layer FusedMatMul, Add, Softmax, MatMul
    "written, three dimensions": (Tiny(form="rank3"), 2 * 4),
    "written, sinks": (Tiny(sinks=True), 2 * 6),
    "fp16, softmax in fp32": (Tiny(half=True, softmax32=True), None),
    "merged": (Tiny(merged=True), 2 * 4),
    "GroupQueryAttention": (Tiny(form="gqa"), 2),
    "MultiHeadAttention": (Tiny(form="mha", groups=1), 2),
    "standard operator": (Tiny(form="standard"), 2),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go; empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def timed(path: Path, policy: Policy | None = None, ids: np.ndarray = IDS) -> AttentionTimeStats | None:
    def open_with(profile: Path | None) -> DecoderSession:
        return DecoderSession.open(path, bias=policy is not None, cache=False, profile=profile)

    return measure_attention_time(Runner(open_with(None), policy), ids, open_with)


@pytest.mark.parametrize(("tiny", "operators"), FORMS.values(), ids=FORMS.keys())
def test_attention_time_is_part_of_step_time(tiny: Tiny, operators: int | None, tmp_path: Path, folder: Path) -> None:
    path = tiny.save(tmp_path / "model.onnx")
    found = timed(path)
    assert found is not None
    assert 0 < found.seconds < found.model_seconds
    assert not list(folder.iterdir())
    session = DecoderSession.open(path, bias=False, profile=folder)
    with closing(session.open_profile()) as profile:
        assert operators in (None, len(profile.nodes))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "streaming"])
def test_attention_time_of_shipped_model(policy: str | None, folder: Path) -> None:
    found = timed(FIXTURES / "lm" / "model.onnx", policy and create_policy(policy, budget=16, skip_layers=(0,)))
    assert found is not None
    assert 0 < found.seconds < found.model_seconds
    assert not list(folder.iterdir())


def test_attention_time_without_decoding_is_none(tmp_path: Path) -> None:
    assert timed(Tiny().save(tmp_path / "model.onnx"), ids=IDS[:2]) is None


def test_attention_time_profiles_the_steps_of_tpot(tmp_path: Path, folder: Path) -> None:
    """The last 32 tokens but one are profiled; the prompt is not, and the cache is unchanged."""
    path = Tiny().save(tmp_path / "model.onnx")
    runner = Runner(DecoderSession.open(path, bias=False))
    measure_attention_time(runner, IDS, lambda profile: DecoderSession.open(path, bias=False, profile=profile))
    other = Runner(DecoderSession.open(path, bias=False))
    other.step(IDS[:27])
    for token in IDS[27:59]:
        other.step([token])
    assert runner.cache.num_seen == other.cache.num_seen == 59
    for layer, expected in zip(runner.cache.copy_layers(), other.cache.copy_layers(), strict=True):
        np.testing.assert_allclose(layer.keys, expected.keys, atol=1e-5)


def test_attention_time_hidden_softmax_is_unknown(tmp_path: Path, folder: Path) -> None:
    """onnxruntime decomposes an fp16 softmax on the CPU, so the executed graph has no softmax operator."""
    path = Tiny(half=True).save(tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="the time of attention is not known: it is not found in the graph"):
        timed(path)
    results = evaluate(
        path, [document()], settings=EvaluationSettings(tokens=40, chunk=8, repeats=1, timing=True), jobs=0
    )
    assert results.rows[0].tpot_seconds is not None
    assert results.rows[0].attention_seconds is None
    heads, _, line = (text.split(" | ") for text in results.to_text("markdown").splitlines()[:3])
    assert line[heads.index("attention (ms)")] == "-"
    assert [note for note in results.notes if note.startswith("No attention time in 1 row: ")]
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_evaluate_attention_time_is_a_table_column(tmp_path: Path) -> None:
    path = Tiny().save(tmp_path / "model.onnx")
    results = evaluate(
        path,
        [document()],
        ["streaming"],
        [8],
        settings=EvaluationSettings(tokens=40, chunk=8, repeats=1, timing=True),
        jobs=0,
    )
    assert all(row.to_dict()["attention_seconds"] > 0 for row in results.rows)
    assert "attention_seconds" in results.to_csv().splitlines()[0].split(",")
    assert "attention (ms)" in results.to_text("markdown")
    assert not [note for note in results.notes if "attention" in note]


def test_evaluate_without_timing_opens_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    plain: Callable[..., DecoderSession] = DecoderSession.open
    monkeypatch.setattr(
        DecoderSession, "open", lambda *args, **more: opened.append(more.get("profile")) or plain(*args, **more)
    )
    path = Tiny().save(tmp_path / "model.onnx")
    for timing in (False, True):
        opened.clear()
        evaluate(path, [document()], settings=EvaluationSettings(tokens=40, chunk=8, repeats=1, timing=timing), jobs=0)
        assert [profile is not None for profile in opened] == [False, True][: 1 + timing]


@pytest.mark.slow
def test_worker_sigterm_removes_its_temporary_folder() -> None:
    """The folder of a profile is removed, whatever the worker was doing."""
    code = (
        "import sys, json, tempfile\n"
        "from kvmnn.evaluation import worker_main\n"
        "def serve(order, lines):\n"
        "    with tempfile.TemporaryDirectory() as folder:\n"
        "        print(folder, file=lines, flush=True)\n"
        "        sys.stdin.read(); __import__('time').sleep(60)\n"
        "worker_main._run_request = serve\n"
        "sys.exit(worker_main.main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"{}")
        process.stdin.close()
        folder = Path(process.stdout.readline().decode().strip())
        assert folder.is_dir()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not folder.exists()


def document() -> Document:
    return Document(name="a.txt", ids=IDS[:41].astype(np.int64), nbytes=40, sha256="0" * 64)
