"""Time to the first token with and without a prefix store, on onnxruntime and on MNN 3.6.1: a part of store.py."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import interleaved, table

from kvmnn import LayerCache
from kvmnn.lm import DecoderSession, Runner
from kvmnn.store import PrefixStore

SIZES = (16, 64, 256, 512, 1024, 2048)
"""Tokens of the prompts; from 512 on they have a row of their own."""


def computed(session: DecoderSession, ids: Sequence[int]) -> list[LayerCache]:
    """K and V of a text."""
    runner = Runner(session)
    runner.step(ids)
    return runner.cache.copy_layers()


def with_onnxruntime(folder: Path, session: DecoderSession, ids: Sequence[int], rounds: int) -> dict[str, Any]:
    """Seconds to the logits after a prompt: all of it computed, or all but its last token from the store."""
    rows = []
    for tokens in SIZES:
        prompt = ids[:tokens]
        layers = computed(session, prompt)
        with PrefixStore(folder / str(tokens)) as store:
            put = store.put(prompt, layers, model="m")

            def plain(prompt: Sequence[int] = prompt) -> None:
                Runner(session).step(prompt)

            def stored(prompt: Sequence[int] = prompt, store: PrefixStore = store) -> None:
                runner = Runner(session)
                found = store.get(prompt[:-1], model="m")
                runner.load_initial(found.layers)
                runner.step(prompt[found.tokens :])

            times = interleaved({"plain": plain, "stored": stored}, rounds, time.perf_counter)
        sizes = {"raw_bytes": sum(cache.nbytes for cache in layers), "stored_bytes": put.stored_bytes}
        rows.append({"tokens": tokens, **sizes, **{name: statistics.median(each) for name, each in times.items()}})
    return {"model": "The shipped model, fp32, onnxruntime with its own threads", "rows": rows}


def with_mnn(folder: Path, model: str, kv_heads: str, head_dim: str, rounds: int) -> dict[str, Any]:
    """The same with MNN on one thread, in a process for each measurement, median; and from the engine's own files."""
    folder.mkdir()
    ids = np.random.RandomState(5).randint(0, 250, SIZES[-1]).tolist()

    def run(how: str, tokens: int) -> dict[str, Any]:
        job = {"model": model, "kv_heads": int(kv_heads), "head_dim": int(head_dim), "ids": ids[:tokens]}
        job |= {"folder": str(folder), "how": how, "sizes": SIZES}
        script = Path(__file__).with_name("store_engine.py")
        done = subprocess.run([sys.executable, str(script), json.dumps(job)], capture_output=True, text=True)
        answers = [line for line in done.stdout.splitlines() if line.startswith("@")]
        if not answers:
            raise SystemExit(f"the engine gave no answer: {done.stderr[-2000:] or done.stdout[-2000:]}")
        found: dict[str, Any] = json.loads(answers[-1][1:])
        return found

    filled = run("fill", SIZES[-1])
    rows = []
    for tokens, sizes in zip(SIZES, filled["puts"], strict=True):
        run("own", tokens)
        found = {how: [run(how, tokens) for _ in range(rounds)] for how in ("computed", "own", "store")}
        rows.append(
            {
                "tokens": tokens,
                **sizes,
                "plain": statistics.median(each["seconds"] for each in found["computed"]),
                "own": statistics.median(each["seconds"] for each in found["own"]),
                "stored": statistics.median(each["seconds"] for each in found["store"]),
                "get": statistics.median(each["get"] for each in found["store"]),
                "written": statistics.median(each["written"] for each in found["store"]),
            }
        )
    about = f"{filled['layers']} layers, {kv_heads} kv heads x {head_dim} dims, fp32, MNN 3.6.1 on one thread"
    return {"model": about, "rows": rows}


def first_sections(first: dict[str, Any]) -> list[str]:
    lines = [
        "## Time to the first token\n",
        "Wall time, median: the whole prompt computed, or all but its last token from the store. Bytes are those of K "
        "and V; link: the speed above which fetching what is stored and restoring it is faster than computing.\n",
    ]
    for engine, found in first.items():
        rows = [row for row in found["rows"] if row["tokens"] >= 512]
        header = ["tokens", "computed, ms", "from the store, ms", "times", "bytes", "stored", "ratio", "link, MB/s"]
        own = ["get, ms", "files, ms", "engine, ms", "own files, ms"] if engine == "MNN" else []
        body = [
            [
                *(f"{row['tokens']:,}", f"{row['plain'] * 1e3:.0f}", f"{row['stored'] * 1e3:.0f}"),
                f"{row['plain'] / row['stored']:.1f}",
                *(f"{row['raw_bytes']:,}", f"{row['stored_bytes']:,}"),
                *(f"{row['raw_bytes'] / row['stored_bytes']:.4f}", link_speed(row)),
                *([_ms(part) for part in parts_of(row)] if own else []),
            ]
            for row in rows
        ]
        lines += [
            f"### {engine}\n",
            f"{found['model']}. {break_even(found['rows'])}\n",
            table(header + own, body) + "\n",
        ]
    if "MNN" not in first:
        lines.append("MNN was not measured: no model was given (`--mnn`).\n")
    return lines


def parts_of(row: dict[str, Any]) -> list[float]:
    """`get`, the files written, the engine's part; and all of it with the engine's own files."""
    return [row["get"], row["written"] - row["get"], row["stored"] - row["written"], row["own"]]


def link_speed(row: dict[str, Any]) -> str:
    saved = row["plain"] - row["stored"]
    return f"{row['stored_bytes'] / 1e6 / saved:.1f}" if saved > 0 else "-"


def break_even(rows: Sequence[dict[str, Any]]) -> str:
    """From what length on the store is faster, between the lengths that were measured."""
    slower = [row for row in rows if row["stored"] >= row["plain"]]
    if not slower:
        return f"The store is faster from the shortest prompt on that was measured, {rows[0]['tokens']} tokens."
    last = slower[-1]
    faster = [row for row in rows if row["tokens"] > last["tokens"]]
    if not faster:
        return f"The store is slower at {last['tokens']:,} tokens."
    one, other = last["stored"] - last["plain"], faster[0]["plain"] - faster[0]["stored"]
    at = last["tokens"] + (faster[0]["tokens"] - last["tokens"]) * one / (one + other)
    return (
        f"The store is faster from about {at:.0f} tokens on (slower at {last['tokens']}, faster at "
        f"{faster[0]['tokens']}, a straight line between them)."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"
