"""`kvmnn measure` against its own zstd calls: `python tools/bench/offline.py [--quick]` writes benchmarks/offline.*

1 GiB of generated dumps: 32 layers of K and V, 8,192 tokens of 8 heads x 128 dims in fp16. The limit of measuring is
the zstd calls that the evaluation is made of: every block of 64 tokens under every predictor, and the chosen payloads
together; the same calls, with one context and one buffer that are reused. Both take turns layer by layer. CPU times
are those of the process (user and system). The command itself runs once in a process of its own, with everything that
belongs to it, and is watched for its peak of anonymous memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import synthetic, table, write_results

from kvmnn._util.parallel import parallel_map
from kvmnn.analysis import MeasureOptions, Scope, _stream_meter, measure_dumps, select_dumps
from kvmnn.analysis.options import PREDICTOR_NAMES
from kvmnn.frames import _zstdlib

HEADS, DIMS, TOKENS, BLOCK = 8, 128, 8192, 64
FEW_TOKENS = 2048  # where two at a time are compared: short turns, so that what else the machine does hits all alike
CPU_LIMIT, SHARE_LIMIT, MEMORY_LIMIT = 1.10, 0.9, 500

Bytes = npt.NDArray[np.uint8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MiB instead of 1 GiB, and nothing is written")
    parser.add_argument("--data", choices=["kv", "noise"], default="kv", help="like K and V (default), or white noise")
    parser.add_argument("--no-limits", action="store_true", help="without entropy limits")
    options = parser.parse_args()
    layers = 2 if options.quick else 32
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        large, small = root / "large", root / "small"
        write_dumps(large, layers, options.data)
        write_dumps(small, 2, options.data, FEW_TOKENS)
        data = {
            "data": options.data,
            "limits": not options.no_limits,
            "bytes": layers * 4 * TOKENS * HEADS * DIMS,
            **one_core(large, layers, not options.no_limits),
            **two_cores(small, 5 if options.quick else 41),
        }
    sections = report(data)
    if options.quick:
        print("\n".join(sections), json.dumps(data, indent=1), sep="\n")
    else:
        print(write_results("offline", "kvmnn measure", sections, data).read_text())


def write_dumps(root: Path, layers: int, kind: str, tokens: int = TOKENS) -> None:
    """Every layer is a rotation of the same K and V along the dimensions, so that making them takes no time."""
    if kind == "noise":
        made = [np.random.default_rng(i).standard_normal((tokens, HEADS, DIMS), dtype=np.float32) for i in range(2)]
    else:
        made = [synthetic(part, HEADS, tokens, DIMS).transpose(1, 0, 2) for part in ("k", "v")]
    halves = [array.astype("<f2") for array in made]
    for layer in range(layers):
        folder = root / "run" / f"layer_{layer}"
        folder.mkdir(parents=True)
        for part, array in zip(("k", "v"), halves, strict=True):
            (folder / f"{part}_t0_{tokens}.bin").write_bytes(np.roll(array, layer, axis=-1).tobytes())
        fields = {"layer_id": layer, "seq_start": 0, "seq_len": tokens, "kv_heads": HEADS, "head_dim": DIMS}
        fields |= {"bytes_per_elem": 2, "dtype": "fp16", "stage": "prefill", "run_id": "run"}
        fields |= {f"{part}_file": f"{part}_t0_{tokens}.bin" for part in ("k", "v")}
        (folder / f"meta_t0_{tokens}.json").write_text(json.dumps(fields))


def measure_layers(root: Path, layers: list[int], threads: int = 1, limits: bool = True) -> int:
    options = MeasureOptions(scope=Scope(scope="layer_ids", layer_ids=tuple(layers)), limits=limits)
    measured = measure_dumps([str(root)], select_dumps([root], options.scope), options, threads=threads)
    return measured.totals.simulated_bytes()


# -- the zstd calls ---------------------------------------------------------------------------------------------------


def payloads_of(root: Path, layer: int, part: str, lane: int) -> list[Bytes]:
    """What zstd is called with for one lane: each block under each predictor, and the best of all together."""
    words = np.fromfile(next((root / "run" / f"layer_{layer}").glob(f"{part}_*.bin")), np.uint8)
    rows = np.ascontiguousarray(words[lane::2]).reshape(-1, HEADS * DIMS)
    names = PREDICTOR_NAMES if part == "k" else PREDICTOR_NAMES[:3]
    context, out = _zstdlib.ZstdContext(), np.empty(_zstdlib.max_compressed_size(rows.size), np.uint8)
    found, chosen = [], []
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK].reshape(-1)
        made = [
            np.frombuffer(_stream_meter.predict(block, HEADS, DIMS, number), np.uint8) for number in range(len(names))
        ]
        sizes = [context.compress_into(out, payload, 3) for payload in made]
        chosen.append(made[sizes.index(min(sizes))])
        found += made
    return [*found, np.concatenate(chosen)]


LANES = [(part, lane) for part in ("k", "v") for lane in (1, 0)]


def zstd_calls(payloads: list[Bytes]) -> Callable[[], int]:
    context, out = (
        _zstdlib.ZstdContext(),
        np.empty(_zstdlib.max_compressed_size(max(p.size for p in payloads)), np.uint8),
    )
    out.fill(0)

    def run() -> int:
        size = 0
        for payload in payloads:
            size = context.compress_into(out, payload, 3)
        return size

    return run


# -- one core ---------------------------------------------------------------------------------------------------------


def one_core(root: Path, layers: int, limits: bool) -> dict[str, Any]:
    ours = theirs = 0.0
    measure_layers(root, [0], limits=limits)
    for layer in range(layers):
        calls = [zstd_calls(payloads_of(root, layer, part, lane)) for part, lane in LANES]
        calls[0]()
        jobs: list[tuple[str, Callable[[], Any]]] = [
            ("ours", lambda n=layer: measure_layers(root, [n], limits=limits)),
            ("zstd", lambda c=calls: [call() for call in c]),
        ]
        for name, job in jobs if layer % 2 else reversed(jobs):
            start = time.process_time()
            job()
            taken = time.process_time() - start
            ours, theirs = (ours + taken, theirs) if name == "ours" else (ours, theirs + taken)
        del calls, jobs
    return {"measure_cpu_s": ours, "zstd_cpu_s": theirs, "cpu_ratio": ours / theirs, **command(root, theirs, limits)}


_CHILD = """
import resource, sys, threading, time
def anon():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon"))
peak, done = [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anon())
        time.sleep(0.01)
thread = threading.Thread(target=watch); thread.start()
from kvmnn.cli import main
start = time.perf_counter()
code = main(sys.argv[1:])
seconds = time.perf_counter() - start
done.set(); thread.join()
used = resource.getrusage(resource.RUSAGE_SELF)
print("MEASURED", code, peak[0], used.ru_utime + used.ru_stime, seconds, file=sys.stderr)
"""


def command(root: Path, zstd_seconds: float, limits: bool) -> dict[str, Any]:
    """The whole command on one thread for its CPU time, and on all for its memory."""
    found: dict[str, Any] = {}
    scope = ["--scope", "layer_range", "--layer-start", "0", *([] if limits else ["--no-limits"])]
    for label, threads in (("one", ["--threads", "1"]), ("all", [])):
        arguments = ["measure", str(root), *scope, "-q", *threads]
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD, *arguments], capture_output=True, text=True, check=True
        )
        code, peak, cpu, wall = done.stderr.split("MEASURED", 1)[1].split()
        assert code == "0", done.stderr
        found[f"command_{label}"] = {"peak_mib": int(peak) / 1024, "cpu_s": float(cpu), "wall_s": float(wall)}
    found["command_cpu_ratio"] = found["command_one"]["cpu_s"] / zstd_seconds
    return found


# -- two cores --------------------------------------------------------------------------------------------------------


def two_cores(root: Path, rounds: int) -> dict[str, Any]:
    """Wall time of two layers: on one thread, on two, and in two processes; and of the zstd calls alike."""
    jobs = [zstd_calls(payloads_of(root, layer, part, lane)) for layer in (0, 1) for part, lane in LANES]
    halves = [jobs[:4], jobs[4:]]
    ways: dict[str, Callable[[], Any]] = {
        "zstd 1": lambda: [job() for job in jobs],
        "zstd 2": lambda: parallel_map(lambda half: [job() for job in half], halves, 2),
        "ours 1": lambda: measure_layers(root, [0, 1]),
        "ours 2": lambda: measure_layers(root, [0, 1], 2),
    }
    pair = _Pair(root)
    times: dict[str, list[float]] = {name: [] for name in (*ways, "processes 2")}
    for number in range(rounds + 1):
        turns = [*ways.items(), ("processes 2", pair.run)]
        for name, job in turns if number % 2 else reversed(turns):
            start = time.perf_counter()
            job()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    pair.close()
    gains = {
        "zstd": _gains(times["zstd 1"], times["zstd 2"]),
        "threads": _gains(times["ours 1"], times["ours 2"]),
        "processes": _gains(times["ours 1"], times["processes 2"]),
    }
    shares = {name: [a / b for a, b in zip(gains[name], gains["zstd"], strict=True)] for name in gains}
    return {
        "rounds": rounds,
        "gain": {name: statistics.median(found) for name, found in gains.items()},
        "threads_share": statistics.median(shares["threads"]),
        "processes_share": statistics.median(shares["processes"]),
    }


def _gains(one: list[float], two: list[float]) -> list[float]:
    return [a / b for a, b in zip(one, two, strict=True)]


class _Pair:
    """Two processes that wait, started and warm, for the word to measure a layer each."""

    def __init__(self, root: Path) -> None:
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(2)]
        self._pipes = [mine for mine, _ in ends]
        self._processes = [
            context.Process(target=_serve, args=(theirs, root, layer)) for layer, (_, theirs) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()

    def run(self) -> None:
        for pipe in self._pipes:
            pipe.send(True)
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join()


def _serve(pipe: Any, root: Path, layer: int) -> None:
    while pipe.recv():
        pipe.send(measure_layers(root, [layer]))


# -- report -----------------------------------------------------------------------------------------------------------


def report(data: dict[str, Any]) -> list[str]:
    one, both = data["command_one"], data["command_all"]
    rows = [
        ["measuring, layer by layer, over its zstd calls (CPU, one core)", f"{data['cpu_ratio']:.3f}", CPU_LIMIT],
        ["the whole command over the same calls (CPU, one core)", f"{data['command_cpu_ratio']:.3f}", CPU_LIMIT],
        ["two threads over one, share of what two zstd loops gain", f"{data['threads_share']:.2f}", SHARE_LIMIT],
        ["two processes over one, share of what two zstd loops gain", f"{data['processes_share']:.2f}", SHARE_LIMIT],
        ["peak of RssAnon, one thread", f"{one['peak_mib']:.0f} MiB", f"{MEMORY_LIMIT} MiB"],
        ["peak of RssAnon, all cores", f"{both['peak_mib']:.0f} MiB", f"{MEMORY_LIMIT} MiB"],
    ]
    size = data["bytes"] / 1e6
    what = "like K and V (first-order autoregressive)" if data["data"] == "kv" else "of white noise"
    limits = "with" if data["limits"] else "without"
    gain = data["gain"]
    text = (
        f"{data['bytes'] >> 20} MiB of fp16 dumps {what}, {limits} entropy limits. The whole command (wall): "
        f"{size / one['wall_s']:.0f} MB/s on one thread, {size / both['wall_s']:.0f} on all.\n"
        f"Two at a time gain: zstd loops {gain['zstd']:.2f} x, threads {gain['threads']:.2f} x, "
        f"processes {gain['processes']:.2f} x; medians of "
        f"{data['rounds']} rounds on {4 * 2 * FEW_TOKENS * HEADS * DIMS >> 20} MiB, shares within each round."
    )
    header = ["what", "measured", "limit"]
    return [text, "", table(header, [[str(cell) for cell in row] for row in rows]), ""]


if __name__ == "__main__":
    main()
