"""The cache of an ONNX Runtime GenAI generator of the shipped model, compared with plain onnxruntime's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import FIXTURES

import kvmnn
from kvmnn.evaluation import EvaluationSettings, evaluate
from kvmnn.lm import Tokenizer
from kvmnn.lm.documents import read_document

genai = pytest.importorskip("onnxruntime_genai", reason="no wheel of onnxruntime-genai for this machine")


def settings(config: dict[str, int]) -> dict[str, object]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    decoder = {
        "filename": "model.onnx",
        "head_size": hidden // heads,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": config["num_hidden_layers"],
        "session_options": {"provider_options": []},
        "inputs": {
            **{name: name for name in ("input_ids", "attention_mask", "position_ids")},
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    model = {"type": "phi", "vocab_size": config["vocab_size"], "context_length": 256, "decoder": decoder, **ids}
    return {"model": model, "search": {"max_length": 64, "past_present_share_buffer": False}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model as ONNX Runtime GenAI loads it."""
    tmp_path = tmp_path_factory.mktemp("genai")
    for name in ("model.onnx", "tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(FIXTURES / "lm" / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "genai_config.json").write_text(json.dumps(settings(config)))
    return tmp_path


def generator_behind(folder: Path, ids: np.ndarray) -> Any:
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=64)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(ids.astype(np.int32))
    return generator


def test_genai_generator_cache_equals_onnxruntime(folder: Path) -> None:
    import onnxruntime

    config = json.loads((folder / "config.json").read_text())
    generator = generator_behind(folder, np.arange(1, 11))
    for _ in range(3):
        generator.generate_next_token()
    source = kvmnn.open(generator)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    assert len(source) == 2 * layers and source["layer_0.key"].shape[:3] == (1, heads, 12)  # one token after

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    ids = np.array(generator.get_sequence(0))[:12].astype(np.int64)[None]
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(12)[None]}
    for entry in session.get_inputs():
        if entry.name not in feed:
            feed[entry.name] = np.zeros([1, heads, 0, entry.shape[3]], np.float32)
    names = [f"present.{n}.{part}" for n in range(layers) for part in ("key", "value")]
    for name, expected in zip(names, session.run(names, feed), strict=True):
        found = source[name.replace("present.", "layer_")].to_numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_eval_continues_from_genai_generator(folder: Path) -> None:
    """K and V of the first 40 tokens differ in the last bits only, because step sizes differ."""
    text = FIXTURES / "lm" / "texts" / "trace.py.txt"
    ids = read_document(text, Tokenizer.open_for_model(FIXTURES / "lm"), 40).ids
    generator = generator_behind(folder, ids)
    settings = EvaluationSettings(tokens=104, chunk=8, timing=False)
    result = evaluate(FIXTURES / "lm", text, settings=settings, jobs=0, initial_source=generator, token_ids=ids)
    full, begun = result.rows
    assert full.tokens == begun.tokens == 104 - len(ids) and abs(begun.versus_full.nll) < 1e-4
    assert result.start is not None and result.start.tokens == (len(ids),) * 6
    assert 0 < max(each.relative_distance for each in result.start.distances) < 1e-4
