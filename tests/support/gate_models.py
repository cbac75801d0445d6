"""A tiny decoder with a tokenizer, texts and settings under which its cache is cut and stored within a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tiny_decoders import Tiny
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 40

SETTINGS: dict[str, Any] = {
    "prompts": [40],
    "generate": 12,
    "token": 3,
    "buckets": [16, 40],
    "prompts_per_bucket": 1,
    "demo_generate": 12,
    "repeats": 2,
    "quality_texts": 10,
    "quality_tokens": 40,
    "quality_prompt": 30,
    "perplexity_target": 1000,
    "kv_h2o_layer_start": 1,
    "kv_h2o_trigger_min_tokens": 16,
    "kv_h2o_block_tokens": 4,
    "kv_h2o_sink_tokens": 2,
    "kv_h2o_recent_tokens": 4,
    "kv_h2o_update_interval": 2,
    "kv_lossless_front_n": 1,
    "kv_lossless_block_tokens": 4,
    "kv_lossless_hot_sink_tokens": 0,
    "kv_lossless_hot_recent_tokens": 4,
    "kv_lossless_async_threads": 0,
}


def write_model(folder: Path, **changed: Any) -> Path:
    """`model/`, `texts/` and `run.json` in a folder; the folder."""
    (folder / "model").mkdir(parents=True)
    (folder / "texts").mkdir()
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)} | {"?": WORDS}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "model" / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "model" / "config.json").write_text(json.dumps({"num_key_value_heads": 2, "num_attention_heads": 4}))
    (folder / "model" / "model.onnx").write_bytes(Tiny(queries=True).model().SerializeToString())
    rng = np.random.default_rng(3)
    for name in "abcdefghij":
        words = rng.integers(0, WORDS, 100)
        (folder / "texts" / f"{name}.txt").write_text(" ".join(f"w{word}" for word in words))
    (folder / "run.json").write_text(json.dumps(SETTINGS | changed))
    return folder
