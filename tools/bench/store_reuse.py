"""Reuse beyond the prefix: passages whose K and V were computed elsewhere, turned to their places in a prompt.

A prompt is a few passages and a question after them, here the text that follows. Each passage is computed alone, as a
store would have it; its K is turned to its new positions (`kvmnn.formats.key_rotation`), V is taken as it is. A share
of the tokens of each passage is computed again, in the prompt: its first ones, or those whose K and V of the second
layer differ most from what the whole prompt gives (what CacheBlend ranks by). Compared with the prompt computed whole,
in the distributions of the tokens after the passages.

    python tools/bench/store_reuse.py MODEL TEXT... --passage-tokens 298 --scored-tokens 130 \\
        --json benchmarks/store_reuse.json > benchmarks/store_reuse.md
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import table

from kvmnn.dense import RopeConfig
from kvmnn.dense.rope import RopeFrequencies
from kvmnn.formats.key_rotation import RotationErrorStats, rotate_rows
from kvmnn.lm import DecoderSession, Tokenizer

Floats = npt.NDArray[np.float32]
Past = list[tuple[Floats, Floats]]
FRACTIONS = (0.0, 0.15, 0.3)
RANKED_LAYER = 1
"""The first layer whose K and V depend on the tokens before: those of layer 0 are equal wherever a token stands."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--passage-tokens", type=int, default=256)
    parser.add_argument("--scored-tokens", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", default=["different texts", "one text"])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    session = DecoderSession.open(arguments.model, bias=False)
    tokenizer = Tokenizer.open_for_model(arguments.model)
    rope = RopeConfig.from_config(json.loads((Path(arguments.model) / "config.json").read_text()))
    assert rope is not None
    texts = [tokenizer.encode(Path(path).read_text(encoding="utf-8")).tolist() for path in arguments.texts]
    started = time.process_time()
    rows = []
    for kind, prompts in build_prompts(texts, arguments).items():
        if kind not in arguments.kinds:
            continue
        results = [measure_prompt(session, RopeFrequencies.from_config(rope), *prompt) for prompt in prompts]
        for key in results[0]:
            means = {name: float(np.mean([result[key][name] for result in results])) for name in results[0][key]}
            rows.append({"prompts": kind, "recomputed": key[0], "fraction": key[1], **means})
    document = {
        "model": Path(arguments.model).name,
        "texts": [Path(path).name for path in arguments.texts],
        **{name: getattr(arguments, name) for name in ("passages", "passage_tokens", "scored_tokens")},
        "cpu_seconds": time.process_time() - started,
        "rows": rows,
    }
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
    print(format_document(document))


def build_prompts(texts: Sequence[Sequence[int]], arguments: Any) -> dict[str, list[tuple[list[list[int]], list[int]]]]:
    """Return prompts of passages of one text, in its order, and of passages of different texts."""
    size, count = arguments.passage_tokens, arguments.passages
    need = size * count + arguments.scored_tokens
    if any(len(text) < need for text in texts):
        raise SystemExit(f"a text has fewer than {need} tokens")
    same = []
    for text in texts:
        passages = [list(text[index * size : (index + 1) * size]) for index in range(count)]
        same.append((passages, list(text[count * size : need])))
    mixed = []
    for index, text in enumerate(texts):
        others = [list(texts[(index + step) % len(texts)][:size]) for step in range(1, count)]
        mixed.append(([*others, list(text[:size])], list(text[size : size + arguments.scored_tokens])))
    return {"different texts": mixed, "one text": same}


def compute(session: DecoderSession, ids: Sequence[int], begin: int, past: Past | None = None) -> tuple[Floats, Past]:
    """Feed tokens from position `begin` on; return their logits, and K and V of past and new tokens."""
    positions = np.arange(begin, begin + len(ids), dtype=np.int64)
    step = session.run_step(np.array(ids, np.int64), positions, past or session.create_empty_past())
    return step.logits, [(keys.copy(), values.copy()) for keys, values in step.present_pairs]


def turn(keys: Floats, distance: int, rope: RopeFrequencies) -> Floats:
    """Turn K ``[1, kv_head, token, head_dim]`` by a distance in positions."""
    data = np.ascontiguousarray(keys).reshape(-1).view(np.uint8)
    distances = np.full(keys.shape[1] * keys.shape[2], distance, np.int64)
    turned = rotate_rows(data, "fp32", distances, rope, RotationErrorStats())
    return np.asarray(turned).view(np.float32).reshape(keys.shape)


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def measure_prompt(
    session: DecoderSession, rope: RopeFrequencies, passages: list[list[int]], question: list[int]
) -> dict[tuple[str, float], dict[str, float]]:
    """Return KL and nats for each way to choose tokens, and fraction of them."""
    begins = np.cumsum([0, *map(len, passages)]).tolist()
    whole_ids = [token for passage in passages for token in passage]
    _, whole = compute(session, whole_ids, 0)
    reference_logits, _ = compute(session, question, begins[-1], whole)
    reference = log_softmax(reference_logits)
    reused: Past = []
    alone = [compute(session, passage, 0)[1] for passage in passages]
    for layer in range(len(whole)):
        keys = [turn(past[layer][0], begin, rope) for past, begin in zip(alone, begins[:-1], strict=True)]
        reused.append((np.concatenate(keys, 2), np.concatenate([past[layer][1] for past in alone], 2)))
    deviations = sum(
        np.square(reused[RANKED_LAYER][part] - whole[RANKED_LAYER][part]).sum(axis=(0, 1, 3)) for part in range(2)
    )
    results = {}
    for how in ("first tokens", "highest deviation"):
        for fraction in FRACTIONS:
            if not fraction and how != "first tokens":
                continue
            is_recomputed = np.zeros(begins[-1], bool)
            is_recomputed[: begins[1]] = False  # a prefix is exact
            for begin, end in pairwise(begins[1:]):
                number = round(fraction * (end - begin))
                ranking = np.arange(end - begin) if how == "first tokens" else np.argsort(-deviations[begin:end])
                is_recomputed[begin + ranking[:number]] = True
            fused = fuse(session, whole_ids, reused, is_recomputed)
            logits, _ = compute(session, question, begins[-1], fused)
            scores = log_softmax(logits)
            targets = np.array(question[1:])
            rows = np.arange(len(targets))
            divergence = (np.exp(reference) * (reference - scores)).sum(axis=-1)
            results[how, fraction] = {
                "kl": float(divergence.mean()),
                "kl_max": float(divergence.max()),
                "nats": float((reference[rows, targets] - scores[rows, targets]).mean()),
                "equal_best": float((reference.argmax(-1) == scores.argmax(-1)).mean()),
                "reference_nats": float(-reference[rows, targets].mean()),
            }
    return results


def fuse(session: DecoderSession, ids: list[int], reused: Past, is_recomputed: npt.NDArray[np.bool_]) -> Past:
    """Compute the chosen tokens again, from left to right, each with what stands before it; take the others."""
    edges = [*np.flatnonzero(np.diff(is_recomputed.astype(np.int8), prepend=-1)).tolist(), len(ids)]
    past: Past = [(keys[:, :, :0], values[:, :, :0]) for keys, values in reused]
    for begin, end in pairwise(edges):
        if is_recomputed[begin]:
            past = [(np.ascontiguousarray(keys), np.ascontiguousarray(values)) for keys, values in past]
            _, past = compute(session, ids[begin:end], begin, past)
        else:
            past = [
                (
                    np.concatenate([old_keys, keys[:, :, begin:end]], 2),
                    np.concatenate([old_values, values[:, :, begin:end]], 2),
                )
                for (old_keys, old_values), (keys, values) in zip(past, reused, strict=True)
            ]
    return past


def format_document(document: dict[str, Any]) -> str:
    header = ["passages of", "recomputed", "%", "KL, nats", "largest", "added nats", "equal best, %", "nats, whole"]
    body = [
        [
            *(row["prompts"], row["recomputed"] if 0 < row["fraction"] < 1 else "-", f"{100 * row['fraction']:.0f}"),
            *(f"{row['kl']:.4f}", f"{row['kl_max']:.3f}", f"{row['nats']:+.4f}"),
            *(f"{100 * row['equal_best']:.1f}", f"{row['reference_nats']:.3f}"),
        ]
        for row in document["rows"]
    ]
    about = (
        f"{document['model']}, fp32; {len(document['texts'])} prompts of each kind: {document['passages']} passages of "
        f"{document['passage_tokens']} tokens, each computed alone and turned to its place, and the "
        f"{document['scored_tokens']} tokens after them, which are scored. Means over prompts; the share is of "
        "the tokens of each passage but the first, which is a prefix and exact. KL of the prompt computed whole from "
        f"the one that reuses. {document['cpu_seconds']:.0f} s of CPU time."
    )
    return f"# Passages reused beyond the prefix\n\n{about}\n\n{table(header, body)}"


if __name__ == "__main__":
    main()
