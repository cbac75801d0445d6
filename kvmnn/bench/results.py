"""What a comparison of codecs found, derived figures included."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..text import count, rate
from ..text.numbers import LEAST_RATE_BYTES


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call: on the clock, and of processor time summed over threads."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Result:
    """One codec on one array.

    Parameters
    ----------
    codec, version
        What was measured.
    raw_bytes, stored_bytes
        Before and after.
    encode, decode
        Timings; None where the codec failed.
    error
        Why there is no result.
    """

    codec: str
    version: str
    raw_bytes: int
    stored_bytes: int
    encode: Timing | None
    decode: Timing | None
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """Raw over stored bytes."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else None

    @property
    def break_even(self) -> float | None:
        """Link speed (bytes per second) below which compress + send + decompress beats sending raw; None if none does.

        With n raw bytes, ratio r, encode and decode speeds E and D (bytes per second, wall clock) and a link of B bytes
        per second, one after the other: ``n/E + n/(r B) + n/D < n/B``, so ``B < (1 - 1/r) / (1/E + 1/D)``. Work that
        overlaps the transfer pays up to higher speeds.
        """
        if not self.ratio or self.ratio <= 1 or self.encode is None or self.decode is None:
            return None
        seconds_per_byte = (self.encode.wall + self.decode.wall) / self.raw_bytes
        return (1 - 1 / self.ratio) / seconds_per_byte

    def dominates(self, other: Result) -> bool:
        """Whether it is nowhere worse than `other` in ratio and CPU time, and somewhere better, on the same bytes."""
        if self.encode is None or self.decode is None or other.encode is None or other.decode is None:
            return False
        mine = (self.stored_bytes, self.encode.cpu, self.decode.cpu)
        theirs = (other.stored_bytes, other.encode.cpu, other.decode.cpu)
        no_worse = all(a <= b for a, b in zip(mine, theirs, strict=True))
        return self.raw_bytes == other.raw_bytes and no_worse and mine != theirs

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON, derived figures included; speeds in bytes per second."""

        def speed(timing: Timing | None, kind: str) -> float | None:
            return None if timing is None else self.raw_bytes / max(getattr(timing, kind), 1e-9)

        return {
            **asdict(self),
            "ratio": self.ratio,
            "encode_bytes_per_s_cpu": speed(self.encode, "cpu"),
            "encode_bytes_per_s_wall": speed(self.encode, "wall"),
            "decode_bytes_per_s_cpu": speed(self.decode, "cpu"),
            "decode_bytes_per_s_wall": speed(self.decode, "wall"),
            "break_even_bytes_per_s": self.break_even,
        }

    def __str__(self) -> str:
        if self.encode is None or self.decode is None or self.ratio is None:
            return f"{self.codec:<24} failed: {self.error}"
        line = f"{self.codec:<22} {self.ratio:>7.4f}"
        if self.raw_bytes < LEAST_RATE_BYTES:
            return f"{line} {'-':>8} {'-':>8} {'-':>8} {'-':>8} {'-':>11}"
        times = (self.encode.cpu, self.encode.wall, self.decode.cpu, self.decode.wall)
        speeds = " ".join(f"{rate(self.raw_bytes, seconds):>8}" for seconds in times)
        pays = "never" if self.break_even is None else f"{self.break_even / 1e6:.1f}"
        return f"{line} {speeds} {pays:>11}"


@dataclass(frozen=True)
class Report:
    """All codecs on one array.

    Parameters
    ----------
    entropy_ratio
        The ratio at the order-0 entropy of the byte-split streams: what coders of single bytes could reach. None for
        data without entropy.
    sample_bytes
        How much of the array (its beginning) was measured.
    missing
        Packages that are not installed.
    note
        Why there are no dense streams; empty where there are.
    """

    name: str
    dtype: str
    array_bytes: int
    sample_bytes: int
    entropy_ratio: float | None
    rounds: int
    results: tuple[Result, ...]
    missing: tuple[str, ...]
    note: str = ""

    def dominated(self) -> dict[str, str]:
        """Codecs that another one beats or equals in ratio and in CPU time of both ways, and the smallest of those.

        Only codecs that were measured on the same bytes are compared. What is left is the Pareto front.
        """
        found: dict[str, str] = {}
        for one in self.results:
            better = [other for other in self.results if other.dominates(one)]
            if better:
                found[one.codec] = min(better, key=lambda result: result.stored_bytes).codec
        return found

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        dominated = self.dominated()
        results = [{**result.to_dict(), "dominated_by": dominated.get(result.codec)} for result in self.results]
        return {**vars(self), "results": results, "missing": list(self.missing)}

    def __str__(self) -> str:
        lines = [
            f"{'':<22} {'':>7} {'encode MB/s':>17} {'decode MB/s':>17} {'break-even':>11}",
            f"{'codec':<22} {'ratio':>7} {'cpu':>8} {'wall':>8} {'cpu':>8} {'wall':>8} {'MB/s':>11}",
        ]
        lines += [str(result) for result in self.results]
        lines += [f"{name:<22} not installed" for name in self.missing]
        lines += [
            f"{result.codec}: of the first {result.raw_bytes:,} bytes"
            for result in self.results
            if result.raw_bytes != self.sample_bytes
        ]
        lines += [self.note] if self.note else []
        if self.sample_bytes >= LEAST_RATE_BYTES:
            found = self.dominated().items()
            lines += [f"{codec}: dominated by {by} (ratio, CPU time both ways)" for codec, by in found]
        if any(result.raw_bytes < LEAST_RATE_BYTES for result in self.results):
            lines.append(f"-: speeds of less than {LEAST_RATE_BYTES:,} bytes are not shown")
        return "\n".join(lines)

    def heading(self, threads: int) -> str:
        """What was measured, on one line."""
        part = "" if self.sample_bytes == self.array_bytes else f", first {self.sample_bytes:,} measured"
        limit = "none" if self.entropy_ratio is None else f"{self.entropy_ratio:.4f}"
        return (
            f"{self.name}: {self.dtype}, {self.array_bytes:,} bytes{part}; order-0 entropy of its bytes {limit}"
            f"; {count(threads, 'thread')}, medians of {self.rounds}, every round trip LOSSLESS unless said"
        )


@dataclass(frozen=True)
class Machine:
    """What the codecs ran on."""

    processor: str
    cpus: int
    system: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All codecs on all arrays.

    Parameters
    ----------
    machine
        Where.
    threads
        Threads that each codec had.
    arrays
        One report for each array.
    """

    machine: Machine
    threads: int
    arrays: tuple[Report, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "machine": asdict(self.machine),
            "threads": self.threads,
            "arrays": [report.to_dict() for report in self.arrays],
        }

    def __str__(self) -> str:
        return "\n\n".join(f"{report.heading(self.threads)}\n{report}" for report in self.arrays)
