"""Time to the first token with and without a prefix store, on onnxruntime and on MNN 3.6.1: a part of store.py."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import interleaved, table

from kvmnn import LayerCache
from kvmnn.lm import DecoderSession, Runner
from kvmnn.profiles import Profile
from kvmnn.reports.break_even import CodecTimes, EngineTimes, PrefixPrediction, compute_break_even
from kvmnn.store import PrefixStore

SIZES = (16, 64, 256, 512, 1024, 2048)
"""Tokens of the prompts with onnxruntime; from 512 on they have a row of their own."""

ENGINE_SIZES = (256, 512, 1024, 1536, 2048)
CALIBRATED_SIZES = (256, 1024, 2048)
"""Tokens of the prompts with MNN, and of those that the prediction of the others comes from."""

CLOCKS = ("wall", "cpu", "user")
CODECS = ("dense", "frames")
PROFILE_CODECS = ("profile", "transform")
NEW_TOKENS = 16


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
    return {"model": "SmolLM2-135M, fp32, onnxruntime with its own threads", "rows": rows}


def with_mnn(
    folder: Path, model: str, shape: tuple[int, int], ids: Sequence[int], rounds: int, profile: str | None
) -> dict[str, Any]:
    """The same with MNN on one thread, in a process for each measurement; from the engine's own files, and predicted.

    What is predicted of a length comes from sizes and times of the codecs on the longest text, and from the engine's
    times at `CALIBRATED_SIZES`.
    """
    folder.mkdir()
    job = {"model": model, "kv_heads": shape[0], "head_dim": shape[1], "folder": str(folder), "profile": profile}
    codecs = CODECS if profile is None else CODECS + PROFILE_CODECS
    script = Path(__file__).with_name("store_engine.py")

    def run(how: str, tokens: int, **more: Any) -> dict[str, Any]:
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # whose threads wait as MNN's do
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # gigabytes in all, which the system would write out
            words = json.dumps(
                {**job, "scratch": scratch, "ids": [int(token) for token in ids[:tokens]], "how": how, **more}
            )
            done = subprocess.run([sys.executable, str(script), words], capture_output=True, text=True, env=environment)
        answers = [line for line in done.stdout.splitlines() if line.startswith("@")]
        if not answers:
            raise SystemExit(f"the engine gave no answer: {done.stderr[-2000:] or done.stdout[-2000:]}")
        found: dict[str, Any] = json.loads(answers[-1][1:])
        return found

    filled = run("fill", ENGINE_SIZES[-1], sizes=ENGINE_SIZES, codecs=codecs)
    for tokens in ENGINE_SIZES:
        run("own", tokens)
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for tokens in ENGINE_SIZES:
            for how in ("computed", "own", *codecs):
                more = {"codec": how} if how in codecs else {}
                runs.setdefault((how, tokens), []).append(run("store" if more else how, tokens, **more))
    equal_tokens = {}
    for tokens in ENGINE_SIZES:
        plain = run("computed", tokens, new_tokens=NEW_TOKENS)["generated"]
        for codec in codecs:
            stored = run("store", tokens, codec=codec, new_tokens=NEW_TOKENS)["generated"]
            equal_tokens[codec, tokens] = _count_equal(plain, stored)
    rows = []
    for clock in CLOCKS:
        medians = {key: _take_medians(each, clock) for key, each in runs.items()}
        for place, tokens in enumerate(ENGINE_SIZES):
            for codec in codecs:
                found = medians[codec, tokens]
                rows.append(
                    {
                        "clock": clock,
                        "tokens": tokens,
                        "codec": codec,
                        "equal_tokens": equal_tokens[codec, tokens],
                        **filled["puts"][codec][place],
                        "plain": medians["computed", tokens]["seconds"],
                        "own": medians["own", tokens]["seconds"],
                        "stored": found["seconds"],
                        "get": found["get"],
                        "written": found["written"],
                    }
                )
    about = f"{filled['layers']} layers, {shape[0]} kv heads x {shape[1]} dims, fp32, MNN 3.6.1 on one thread"
    result = {"model": about, "rows": rows, "rounds": rounds, "times": filled["times"]}
    return result if profile is None else {**result, "profile": _describe_profile(profile)}


def _describe_profile(path: str) -> str:
    profile = Profile.read(path)
    return (
        "`profile` (lossless) and `transform` (LOSSY, kl=0.002, without attention) code by a profile of "
        f"{profile.info.tokens:,} tokens of other texts; its {Path(path).stat().st_size / 1e6:.1f} MB are not in these "
        "bytes. Ratios are over fp32; over fp16 that of `transform` is half."
    )


def _count_equal(ids: Sequence[int], others: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next((at for at, (one, other) in enumerate(zip(ids, others, strict=True)) if one != other), len(ids))


def _take_medians(runs: Sequence[dict[str, Any]], clock: str) -> dict[str, float]:
    taken = [each[clock] for each in runs]
    return {name: statistics.median(each[name] for each in taken) for name in taken[0]}


def _predict(found: dict[str, Any], clock: str, codec: str) -> dict[int, PrefixPrediction]:
    """What break-even says of every length, from the times with this codec at some.

    Files are written in half the time from what frames decode to, whose tokens of a head lie together: the engine's
    times are those of one codec.
    """
    rows = {row["tokens"]: row for row in found["rows"] if (row["clock"], row["codec"]) == (clock, codec)}

    def take(compute: Callable[[dict[str, Any]], float]) -> dict[str, float]:
        return {str(tokens): compute(rows[tokens]) for tokens in CALIBRATED_SIZES}

    engine = EngineTimes(computed=take(lambda row: row["plain"]), loaded=take(lambda row: row["stored"] - row["get"]))
    times = [CodecTimes.from_dict(each) for each in found["times"][clock] if each["codec"] == codec]
    token_bytes = rows[ENGINE_SIZES[-1]]["raw_bytes"] / ENGINE_SIZES[-1]
    report = compute_break_even(times, token_bytes=token_bytes, engine=engine, lengths=ENGINE_SIZES)
    return {row.tokens: row for row in report.prefixes if row.codec == codec}


def first_sections(first: dict[str, Any]) -> list[str]:
    lines = [
        "## Time to the first token\n",
        "Median: the whole prompt computed, or all but its last token from the store. Bytes are those of K and V; "
        "link: the speed above which fetching what is stored and restoring it is faster than computing.\n",
    ]
    header = ["tokens", "computed, ms", "from the store, ms", "times", "bytes", "stored", "ratio", "link, MB/s"]
    found = first["onnxruntime"]
    body = [row_cells(row) for row in found["rows"] if row["tokens"] >= 512]
    lines += ["### onnxruntime\n", f"{found['model']}. {break_even(found['rows'])}\n", table(header, body) + "\n"]
    if "MNN" not in first:
        return [*lines, "MNN was not measured: no model was given (`--mnn`).\n"]
    found = first["MNN"]
    lines += [
        "### MNN\n",
        f"{found['model']}, settings `precision: high, memory: high`; medians of {found['rounds']} processes each, in "
        f"turns. After each prompt {NEW_TOKENS} tokens were generated greedily, computed and from the store; equal: "
        "how many of them came before the first that differed. get: in a process that has made one before; files: "
        "written for the engine; engine: it maps them and computes the last token; own files: the same prompt from "
        "files that the engine wrote.\n",
    ]
    if "profile" in found:
        lines.append(found["profile"] + "\n")
    parts = ["equal", "get, ms", "files, ms", "engine, ms", "own files, ms"]
    for clock, title in (("wall", "Wall time"), ("cpu", "Time of the processors")):
        rows = [row for row in found["rows"] if row["clock"] == clock]
        body = [
            [
                *(row["codec"], *row_cells(row), f"{row['equal_tokens']} of {NEW_TOKENS}"),
                *(f"{part * 1e3:.0f}" for part in parts_of(row)),
            ]
            for row in rows
            if row["tokens"] >= 512
        ]
        lines += [f"{title}:\n", table(["codec", *header, *parts], body) + "\n"]
    lines += [
        "### Predicted\n",
        f"What `store stat --speed prefill=FILE` predicts from the engine's times at {_list(CALIBRATED_SIZES)} tokens "
        "(computed, and with this codec from K and V in memory to the first token) and from the codec's times on this "
        "text, next to what the engine took. The other lengths were not shown to it. cpu: time of the processors; "
        "user: without the system's part, which for one and the same `get` varies by hundreds of milliseconds with the "
        "state of the memory (large pages).\n",
    ]
    body = []
    for row in found["rows"]:
        if row["codec"] in CODECS and row["tokens"] not in CALIBRATED_SIZES:
            predicted = _predict(found, row["clock"], row["codec"])[row["tokens"]]
            body.append([
                row["clock"], f"{row['tokens']:,}", row["codec"],
                *_compare(predicted.computed_seconds, row["plain"]),
                *_compare(predicted.stored_seconds, row["stored"]),
            ])  # fmt: skip
    headings = ["predicted, ms", "engine, ms", "off"]
    return [
        *lines,
        table(["clock", "tokens", "codec", *headings, *(f"store: {name}" for name in headings)], body) + "\n",
    ]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)


def _compare(predicted: float, measured: float) -> list[str]:
    return [f"{predicted * 1e3:.0f}", f"{measured * 1e3:.0f}", f"{predicted / measured - 1:+.1%}"]


def row_cells(row: dict[str, Any]) -> list[str]:
    return [
        *(f"{row['tokens']:,}", f"{row['plain'] * 1e3:.0f}", f"{row['stored'] * 1e3:.0f}"),
        f"{row['plain'] / row['stored']:.1f}",
        *(f"{row['raw_bytes']:,}", f"{row['stored_bytes']:,}"),
        *(f"{row['raw_bytes'] / row['stored_bytes']:.4f}", link_speed(row)),
    ]


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
