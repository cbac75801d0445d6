"""The runtime around a decoder of a real small LLM's size (random_decoder.py); a part of runtime.py.

Time per token at 2,048 tokens with the store off, on the front two layers, and on all 24, one token each in turn, on
two threads. Twice: as one run of the graph, where all rows must be there at once (`kvmnn generate --lossless`), and
layer by layer in numpy, where a thread brings back the blocks of the next layer while one computes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import random_decoder as form
from common import ratio, table

from kvmnn.lm import DecoderSession, Runner
from kvmnn.lm.session import StepResult
from kvmnn.runtime import LosslessRuntime, RuntimeConfig

PROMPT, THREADS, WARM, LIMIT = 2048, 2, 4, 1.05
STORED = {"front 2": 2, f"all {form.LAYERS}": form.LAYERS}
"""Layers in the scope."""

Floats = npt.NDArray[np.float32]
Feed = Callable[[int], Floats]
"""Feeds a token; the logits."""


def options(front_n: int) -> RuntimeConfig:
    """The engine's defaults in mode store, from the first decode step on."""
    keys = {"enable": True, "runtime_enable": True, "codec": "gear_delta", "runtime_mode": "store", "front_n": front_n}
    return RuntimeConfig.from_engine({f"kv_lossless_{key}": value for key, value in keys.items()})


def measured(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Rows for the graph and for the layers, each for what is stored."""
    path = form.save(folder / "decoder.onnx")
    session = DecoderSession.open(path, bias=False, threads=THREADS, cache=False)
    ids = np.random.default_rng(2).integers(0, form.VOCAB, PROMPT)
    prompt = session.run_step(ids, np.arange(PROMPT), session.create_empty_past()).present_pairs
    return graph_rows(session, prompt, steps) + layer_rows(path, prompt, steps)


def graph_rows(session: DecoderSession, prompt: Any, steps: int) -> list[dict[str, Any]]:
    def runner(lossless: RuntimeConfig | None) -> Runner:
        made = Runner(session, lossless=lossless)
        made.cache.begin_step(PROMPT)
        made.cache.end_step(
            StepResult(np.empty((0, 0), np.float32), [(k.copy(), v.copy()) for k, v in prompt], None, 0.0)
        )
        return made

    made = []
    for name, front_n in STORED.items():
        off, on = runner(None), runner(options(front_n))
        store: Any = on._kv_store

        def own(on: Runner = on) -> float:
            return on.timings.policy_seconds

        feeds = {"off": lambda id, off=off: off.step([id]), "on": lambda id, on=on: on.step([id])}
        row = compared(feeds, own, store._runtime, steps)
        made.append({"way": "one run of the graph", "stored": name, **row})
        print(made[-1], flush=True)
        store._runtime.close()
    return made


def compared(feeds: dict[str, Feed], own: Callable[[], float], runtime: LosslessRuntime, steps: int) -> dict[str, Any]:
    """Feed the same tokens to both, in turn; what they give must be equal bit for bit."""
    wall: dict[str, list[float]] = {"off": [], "on": []}
    cpu: dict[str, list[float]] = {"off": [], "on": []}
    inside: list[float] = []
    given: dict[str, Floats] = {}
    for step in range(WARM + steps):
        if step == WARM:
            runtime.wait()  # the prompt is being encoded since the first step
        order, owned = list(feeds.items()), own()
        for name, feed in order if step % 2 else reversed(order):
            began, cpu_began = time.perf_counter(), time.process_time()
            given[name] = feed(step % form.VOCAB)
            if step >= WARM:
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - cpu_began)
        inside += [own() - owned] * (step >= WARM)
        assert given["on"].tobytes() == given["off"].tobytes()
    figures = runtime.collect_metrics()
    restores = figures.decompress.count
    return {
        "off_ms": 1e3 * statistics.median(wall["off"]),
        "on_ms": 1e3 * statistics.median(wall["on"]),
        "on_over_off": ratio(wall, "on", "off"),
        "cpu_on_over_off": ratio(cpu, "on", "off"),
        "runtime_ms": 1e3 * statistics.median(inside),
        "restores": restores,
        "ahead": figures.restores_ahead / restores,
        "late": figures.restores_late / restores,
        "encoded_ratio": figures.h2o_lossless_ratio,
        "blocks": sum(layer.blocks for layer in figures.layers),
    }


# -- layer by layer ----------------------------------------------------------------------------------------------------


def layer_rows(path: Path, prompt: Any, steps: int) -> list[dict[str, Any]]:
    weights = read_weights(path)
    made = []
    for name, front_n in STORED.items():
        off, on = PlainCache(WARM + steps), runtime_of(front_n)
        for cache in (off, on):
            for layer, (keys, values) in enumerate(prompt):
                cache.begin_call(layer, keys[0], values[0])
                cache.end_call()
            cache.end_step()
        models = [Layered(weights, cache) for cache in (off, on)]
        with on:
            feeds = {"off": models[0].feed, "on": models[1].feed}
            row = compared(feeds, lambda model=models[1]: model.cache_seconds, on, steps)
        made.append({"way": "layer by layer", "stored": name, **row})
        print(made[-1], flush=True)
    return made


def runtime_of(front_n: int) -> LosslessRuntime:
    return LosslessRuntime(
        options(front_n), layers=form.LAYERS, kv_heads=form.KV_HEADS, head_dim=form.HEAD_DIM, dtype="fp32"
    )


class PlainCache:
    """Rows in arrays with room for all steps: what a runtime is compared with."""

    def __init__(self, room: int) -> None:
        shape = (form.LAYERS, 2, form.KV_HEADS, PROMPT + room, form.HEAD_DIM)
        self._rows = np.zeros(shape, np.float32)
        self._tokens = [0] * form.LAYERS

    def begin_call(self, layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        begin = self._tokens[layer]
        self._tokens[layer] = end = begin + keys.shape[1]
        rows = self._rows[layer]
        rows[0, :, begin:end], rows[1, :, begin:end] = keys, values
        return rows[0, :, :end], rows[1, :, :end]

    def end_call(self) -> None:
        pass

    def end_step(self) -> None:
        pass


def read_weights(path: Path) -> dict[str, Floats]:
    """The decoder's weights, mapped."""
    data = path.with_suffix(".data")
    found = {}
    for tensor in onnx.load(str(path), load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            found[tensor.name] = np.memmap(data, np.float32, "r", int(place["offset"]), tuple(tensor.dims)).view(
                np.ndarray
            )
    return found


class Layered:
    """The decoder in numpy, one layer after another, on a cache."""

    def __init__(self, weights: dict[str, Floats], cache: PlainCache | LosslessRuntime) -> None:
        self._weights, self._cache = weights, cache
        self._position = PROMPT
        self.cache_seconds = 0.0

    def feed(self, id: int) -> Floats:
        """One token through all layers; the logits."""
        weights, place = self._weights, self._position
        x = weights["embed"][id].copy()
        for layer in range(form.LAYERS):
            tag = f"{layer}."
            x = x + self._attention(norm(x), layer, weights["cos"][place], weights["sin"][place]) @ weights[tag + "o.w"]
            normed = norm(x)
            gate = normed @ weights[tag + "gate.w"]
            inner = gate / (1 + np.exp(-gate)) * (normed @ weights[tag + "up.w"])
            x = x + inner @ weights[tag + "down.w"]
            self._timed(self._cache.end_call)
        self._timed(self._cache.end_step)
        self._position += 1
        logits: Floats = norm(x) @ weights["head"]
        return logits

    def _attention(self, x: Floats, layer: int, cosines: Floats, sines: Floats) -> Floats:
        query, key, value = (
            (x @ self._weights[f"{layer}.{name}.w"] + self._weights[f"{layer}.{name}.b"]).reshape(-1, form.HEAD_DIM)
            for name in "qkv"
        )
        query, key = rotated(query, cosines, sines), rotated(key, cosines, sines)
        keys, values = self._timed(self._cache.begin_call, layer, key[:, None], value[:, None])
        query = query.reshape(form.KV_HEADS, -1, form.HEAD_DIM)
        scores = query @ keys.transpose(0, 2, 1) * np.float32(form.HEAD_DIM**-0.5)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        mixed: Floats = (powers / powers.sum(-1, keepdims=True)) @ values
        return mixed.reshape(-1)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        found = call(*arguments)
        self.cache_seconds += time.perf_counter() - began
        return found


def norm(x: Floats) -> Floats:
    return x / np.sqrt(np.mean(x * x) + np.float32(1e-6))


def rotated(heads: Floats, cosines: Floats, sines: Floats) -> Floats:
    first, second = np.split(heads, 2, axis=1)
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=1)


# -- what is written ---------------------------------------------------------------------------------------------------


def section(found: list[dict[str, Any]], steps: int) -> str:
    header = ["how it runs", "stored", "off, ms", "on, ms", "on / off", "CPU", "runtime, ms", "restores", "ahead",
              "late", "ratio encoded"]  # fmt: skip
    cells = [
        [
            row["way"],
            row["stored"],
            f"{row['off_ms']:.1f}",
            f"{row['on_ms']:.1f}",
            f"**{row['on_over_off']:.2f}**",
            f"{row['cpu_on_over_off']:.2f}",
            f"{row['runtime_ms']:.1f}",
            f"{row['restores']:,}",
            f"{row['ahead']:.0%}",
            f"{row['late']:.0%}",
            f"{row['encoded_ratio']:.3f}",
        ]
        for row in found
    ]
    return (
        f"## A decoder of {form.LAYERS} layers\n\n"
        f"Qwen2-0.5B's geometry ({form.LAYERS} layers, {form.HEADS} query and {form.KV_HEADS} KV heads of "
        f"{form.HEAD_DIM}, MLP {form.INNER}, float32, random weights, a vocabulary of {form.VOCAB}) after "
        f"{PROMPT:,} tokens, the engine's default options in mode store; {steps} tokens, the store off and on in turn "
        f"at each; {THREADS} threads for the graph, one for the layers (numpy), one for the runtime. Time of a token, "
        f"medians (*on / off* of the ratios at each token; *CPU* of CPU time, in which a thread that spins while it "
        f"waits counts); all logits are equal bit for bit. Aim for the front two: on / off at most {LIMIT:g}. "
        f"*Runtime*: what a token takes inside the runtime, as the model waits for it. *Ahead*: share of the restored "
        f"blocks that a thread had ready before they were needed; *late*: those that it was still decoding then. A run "
        f"of the graph needs all blocks at once: the caller and the thread decode them side by side.\n\n"
        f"{table(header, cells)}\n"
    )
