"""What the benchmarks share: interleaved timing, synthetic data, the machine, and where results go."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

import kvmnn
from kvmnn import _simd
from kvmnn.frames import zstd

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def interleaved(
    jobs: dict[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float],
    repeat: int = 1,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each job in each round; every round runs all jobs, so that drift hits them alike.

    `before` each of them something may be done that is not timed, and neither is it timed to free what the last made.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    for number in range(rounds):
        order = list(jobs.items())
        for name, job in order if number % 2 else reversed(order):
            before()
            start = clock()
            for _ in range(repeat - 1):
                job()
            made = job()
            times[name].append((clock() - start) / repeat)
            del made
    return times


def ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    """Median of the ratios of the rounds."""
    return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))


def repeats(seconds_guess: float, at_least: float = 0.01) -> int:
    """How often to run a job in one round so that the clock's grain does not matter."""
    return max(1, round(at_least / max(seconds_guess, 1e-7)))


def time_once(job: Callable[[], Any]) -> float:
    job()
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def synthetic(kind: str, heads: int, tokens: int, dims: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Something like a K or V cache, `[head, token, dim]`: first-order autoregressive over tokens for each channel.

    K has per-channel means, four channels a head of several times the size, and strong correlation; V is centred and
    nearly uncorrelated.
    """
    rng = np.random.default_rng(seed)
    rho = {"k": 0.9, "v": 0.3}[kind]
    noise = rng.standard_normal((heads, tokens, dims), dtype=np.float32)
    for t in range(1, tokens):
        noise[:, t] = rho * noise[:, t - 1] + np.float32((1 - rho * rho) ** 0.5) * noise[:, t]
    spread = np.exp(rng.normal(-0.5, 0.5, (heads, 1, dims))).astype(np.float32)
    mean = rng.normal(0, 1.0 if kind == "k" else 0.05, (heads, 1, dims)).astype(np.float32)
    if kind == "k":
        for head in range(heads):
            large = rng.choice(dims, 4, replace=False)
            mean[head, 0, large] *= 8
            spread[head, 0, large] *= 3
    return noise * spread + mean


def machine() -> dict[str, Any]:
    """The machine and the versions that the figures belong to; nothing that names the host."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kvmnn": kvmnn.__version__,
        "zstd": zstd.get_version(),
        "zstd_door": zstd.get_binding(),
        "zstandard": zstandard.__version__,
        "simd": _simd.simd_level(),
        "load": f"{os.getloadavg()[0]:.1f} at the end",  # above 1, other work slowed what was measured
    }


def write_results(
    name: str, title: str, sections: list[str], data: dict[str, Any], about: dict[str, Any] | None = None
) -> Path:
    """`benchmarks/<name>.md` and `.json`, with the machine on top; the latest run replaces the one before.

    `about`: the machine of the run that most figures are of, where not this one.
    """
    BENCHMARKS.mkdir(exist_ok=True)
    about = about or machine()
    lines = [f"# {title}", "", ", ".join(f"{key} {value}" for key, value in about.items()), "", *sections]
    path = BENCHMARKS / f"{name}.md"
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps({"machine": about, **data}, indent=1) + "\n", encoding="utf-8")
    return path


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(
        ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(row) + " |" for row in rows)]
    )
