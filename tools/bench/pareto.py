"""Which codec is dominated by which: `python tools/bench/pareto.py` writes benchmarks/pareto.md, .json and .png.

K and V of a trained model (fixtures/kv_real) as fp16, bf16 (rounded from fp32) and fp32, from 64 KiB to 1 MiB: ratio
and CPU time of encoding and decoding on one thread, and time on the clock on two, all codecs in turn (`kvmnn.bench`).
Dense streams are told how K was rotated, as a trial finds it.
Measured are the rivals that are installed (make bench; ZipNN by make bench ZIPNN=zipnn).
A codec is dominated where another one is nowhere worse in ratio and in CPU time of both ways.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import BENCHMARKS, ROOT, table, write_results

from kvmnn.arrays.array import from_numpy
from kvmnn.bench import ArrayBenchReport, measure
from kvmnn.bench.codecs import make_plan
from kvmnn.dtypes import Part

SIZES = (64 << 10, 256 << 10, 1 << 20)
"""Bytes of the beginning; of a shorter array all, which is what is drawn."""
PARTS: dict[str, Part] = {"K": "key", "V": "value"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="turns of each codec (default: 15)")
    parser.add_argument("--name", default="pareto", help="of the files in benchmarks/ (default: pareto)")
    options = parser.parse_args()
    rounds, name = options.repeats, options.name
    reports: dict[tuple[str, str, str], tuple[ArrayBenchReport, ArrayBenchReport | None]] = {}
    for side, dtype, words in arrays():
        array, part = from_numpy("", words), PARTS[side]
        dense = make_plan(words, dtype=dtype, part=part)
        for nbytes in SIZES:
            size, whole = f"{min(nbytes, words.nbytes) >> 10:,} KiB", nbytes >= words.nbytes
            one = measure(array, max_bytes=nbytes, repeats=rounds, threads=1, dense=dense)
            two = (
                measure(array, max_bytes=nbytes, repeats=max(3, rounds // 3), threads=2, dense=dense) if whole else None
            )
            reports[side, dtype, size] = one, two
            print(f"{side} {dtype} {size}\n{one}\n", flush=True)
    draw({key: one for key, (one, two) in reports.items() if two}, BENCHMARKS / f"{name}.png")
    data = {" ".join(key): [made.to_dict() for made in pair if made] for key, pair in reports.items()}
    sections = [section(key, *pair) for key, pair in reports.items()]
    sections.insert(0, f"![ratio over encode speed]({name}.png)\n")
    print(write_results(name, "Codecs side by side: the Pareto front", sections, data))


def arrays() -> Iterator[tuple[str, str, Any]]:
    """K or V, dtype, words; a mebibyte or more of each."""
    folder = ROOT / "fixtures" / "kv_real"
    for side in ("k", "v"):
        yield side.upper(), "fp16", np.load(folder / f"{side}_fp16.npy")
    for side in ("k", "v"):
        words = np.load(folder / f"{side}_fp32.npy").view(np.uint32)
        yield side.upper(), "bf16", ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)
        yield side.upper(), "fp32", words.view(np.float32)


def section(key: tuple[str, str, str], one: ArrayBenchReport, two: ArrayBenchReport | None) -> str:
    dominated = one.find_dominated()
    walls = {result.codec: result for result in two.results} if two else {}
    rows = []
    for result in sorted(one.results, key=lambda result: -(result.ratio or 0)):
        if result.encode is None or result.decode is None or result.raw_bytes != one.sample_bytes:
            continue
        row = [
            result.codec,
            f"{result.ratio:.4f}",
            *(speed(result.raw_bytes, t.cpu) for t in (result.encode, result.decode)),
        ]
        if two:
            other = walls[result.codec]
            row += [speed(other.raw_bytes, t.wall) if t else "-" for t in (other.encode, other.decode)]
        rows.append([*row, dominated.get(result.codec, "**front**")])
    header = ["codec", "ratio", "encode", "decode", *(["encode, 2 threads", "decode, 2 threads"] if two else [])]
    missing = f" Not installed: {', '.join(one.missing)}." if one.missing else ""
    return f"## {' '.join(key)}\n\nMB/s of raw bytes.{missing}\n\n{table([*header, 'dominated by'], rows)}\n"


def speed(nbytes: int, seconds: float) -> str:
    return f"{nbytes / 1e6 / max(seconds, 1e-9):,.0f}"


def draw(reports: dict[tuple[str, str, str], ArrayBenchReport], path: Path) -> None:
    """Ratio over encode speed, a picture for each array, in one file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(3, 2, figsize=(14, 18), layout="constrained")
    for axes, ((side, dtype, size), report) in zip(places.flat, reports.items(), strict=True):
        dominated = report.find_dominated()
        for result in report.results:
            if result.encode is None or result.ratio is None or result.raw_bytes != report.sample_bytes:
                continue
            x, ours = result.raw_bytes / 1e6 / result.encode.cpu, result.codec.startswith("kvmnn")
            colour = "tab:blue" if ours else "tab:gray"
            axes.plot(x, result.ratio, "o", color=colour, fillstyle="none" if result.codec in dominated else "full")
            name = result.codec.removeprefix("kvmnn ")
            hollow = result.codec in dominated  # labels on two sides: they lie close together
            place = {"xytext": (-6, -3) if hollow else (6, -3), "ha": "right" if hollow else "left"}
            axes.annotate(name, (x, result.ratio), textcoords="offset points", fontsize=8, color=colour, **place)
        axes.set(xscale="log", title=f"{side} {dtype}, {size}", xlabel="encode, MB/s of CPU time", ylabel="ratio")
        axes.margins(x=0.3)
        axes.grid(alpha=0.3)
    figure.suptitle("Blue: kvmnn; hollow: dominated (ratio, CPU time of encode and decode)", fontsize=9)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
