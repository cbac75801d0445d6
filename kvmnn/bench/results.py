"""What a comparison of codecs found, derived figures included."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..text import format_mb_per_second, pluralize
from ..text.numbers import MIN_RATE_BYTES


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call: on the clock, and of processor time summed over threads."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class CodecBenchResult:
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

    def dominates(self, competitor: CodecBenchResult) -> bool:
        """Whether it is nowhere worse than `competitor` in ratio and CPU time, and somewhere better, on the same
        bytes.
        """
        if self.encode is None or self.decode is None or competitor.encode is None or competitor.decode is None:
            return False
        own_costs = (self.stored_bytes, self.encode.cpu, self.decode.cpu)
        competitor_costs = (competitor.stored_bytes, competitor.encode.cpu, competitor.decode.cpu)
        is_no_worse = all(a <= b for a, b in zip(own_costs, competitor_costs, strict=True))
        return self.raw_bytes == competitor.raw_bytes and is_no_worse and own_costs != competitor_costs

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON, derived figures included; speeds in bytes per second."""

        def compute_speed(timing: Timing | None, clock: str) -> float | None:
            return None if timing is None else self.raw_bytes / max(getattr(timing, clock), 1e-9)

        return {
            **asdict(self),
            "ratio": self.ratio,
            "encode_bytes_per_s_cpu": compute_speed(self.encode, "cpu"),
            "encode_bytes_per_s_wall": compute_speed(self.encode, "wall"),
            "decode_bytes_per_s_cpu": compute_speed(self.decode, "cpu"),
            "decode_bytes_per_s_wall": compute_speed(self.decode, "wall"),
            "break_even_bytes_per_s": self.break_even,
        }

    def __str__(self) -> str:
        if self.encode is None or self.decode is None or self.ratio is None:
            return f"{self.codec:<24} failed: {self.error}"
        line = f"{self.codec:<22} {self.ratio:>7.4f}"
        if self.raw_bytes < MIN_RATE_BYTES:
            return f"{line} {'-':>8} {'-':>8} {'-':>8} {'-':>8} {'-':>11}"
        times = (self.encode.cpu, self.encode.wall, self.decode.cpu, self.decode.wall)
        speeds = " ".join(f"{format_mb_per_second(self.raw_bytes, seconds):>8}" for seconds in times)
        break_even_text = "never" if self.break_even is None else f"{self.break_even / 1e6:.1f}"
        return f"{line} {speeds} {break_even_text:>11}"


@dataclass(frozen=True)
class ArrayBenchReport:
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
    results: tuple[CodecBenchResult, ...]
    missing: tuple[str, ...]
    note: str = ""

    def find_dominated(self) -> dict[str, str]:
        """Codecs that another one beats or equals in ratio and in CPU time of both ways, and the smallest of those.

        Only codecs that were measured on the same bytes are compared. What is left is the Pareto front.
        """
        dominated_by: dict[str, str] = {}
        for codec_result in self.results:
            dominating = [competitor for competitor in self.results if competitor.dominates(codec_result)]
            if dominating:
                dominated_by[codec_result.codec] = min(dominating, key=lambda result: result.stored_bytes).codec
        return dominated_by

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        dominated_by = self.find_dominated()
        results = [{**result.to_dict(), "dominated_by": dominated_by.get(result.codec)} for result in self.results]
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
        if self.sample_bytes >= MIN_RATE_BYTES:
            dominated_by = self.find_dominated().items()
            lines += [f"{codec}: dominated by {winner} (ratio, CPU time both ways)" for codec, winner in dominated_by]
        if any(result.raw_bytes < MIN_RATE_BYTES for result in self.results):
            lines.append(f"-: speeds of less than {MIN_RATE_BYTES:,} bytes are not shown")
        return "\n".join(lines)

    def format_heading(self, threads: int) -> str:
        """What was measured, on one line."""
        sample_text = "" if self.sample_bytes == self.array_bytes else f", first {self.sample_bytes:,} measured"
        entropy_text = "none" if self.entropy_ratio is None else f"{self.entropy_ratio:.4f}"
        return (
            f"{self.name}: {self.dtype}, {self.array_bytes:,} bytes{sample_text}; order-0 entropy of its bytes "
            f"{entropy_text}"
            f"; {pluralize(threads, 'thread')}, medians of {self.rounds}, every round trip LOSSLESS unless said"
        )


@dataclass(frozen=True)
class MachineInfo:
    """What the codecs ran on."""

    processor: str
    cpus: int
    system: str


@dataclass(frozen=True, kw_only=True)
class BenchReport:
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

    machine: MachineInfo
    threads: int
    arrays: tuple[ArrayBenchReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "machine": asdict(self.machine),
            "threads": self.threads,
            "arrays": [report.to_dict() for report in self.arrays],
        }

    def __str__(self) -> str:
        return "\n\n".join(f"{report.format_heading(self.threads)}\n{report}" for report in self.arrays)
