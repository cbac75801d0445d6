"""Reports of a simulation: hits of a trace for each codec, limit and policy, as a table, JSON and a picture."""

from __future__ import annotations

import gc
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from ..._util.dataclass import dataclass
from ..._util.named_tuple import NamedTuple
from ..._util.text import LOSSY, compute_ratio, escape_control, pluralize
from ..._util.validation import repr_short
from ...arrays.layer_cache import LayerCache
from ...dtypes import parse_dtype
from ...errors import OptionError
from ...files.schema import Record, json_key
from ...reports import plot_style
from ...reports.plots import write_figures
from ...reports.table import Column, Table, wrap_sentences
from ..backend import PLAIN_CODECS
from ..store import DEFAULT_BLOCK_TOKENS, PrefixStore
from ..unit import LAYER_CODECS
from ..unit_codec import MAX_UNIT_RAW_BYTES, MAX_UNIT_TOKENS
from .simulator import SIMULATED_POLICIES, simulate_store
from .trace import RequestTrace, split_into_blocks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TABLE_WIDTH = 80
_UNIT_HEADER_BYTES, _UNIT_TOKEN_BYTES, _UNIT_STREAM_BYTES = 64, 4, 24
"""Bytes of a unit without its streams: in all, of each token, of each stream."""


class ModelShape(NamedTuple):
    """Sizes of the K and V of a model."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * parse_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.layers}x{self.kv_heads}x{self.head_dim},{self.dtype}"

    def check_layers(self, layers: Sequence[LayerCache], label: str) -> None:
        """Raise `OptionError` for K and V of another shape or precision, whose ratio is not the model's.

        Of layers of unequal sizes, which no shape describes, the precision alone is compared.
        """
        shapes = {(len(layers), cache.kv_heads, cache.head_dim, cache.dtype) for cache in layers}
        dtypes = " and ".join(sorted({cache.dtype for cache in layers}))
        token_bytes = sum(cache.nbytes // max(cache.tokens, 1) for cache in layers)
        if len(shapes) == 1 and token_bytes == (shape := ModelShape(*shapes.pop())).token_bytes:
            is_same, actual = shape == self, str(shape)
        else:
            is_same, actual = dtypes == self.dtype, f"layers of unequal sizes, {dtypes}"
        if not is_same:
            raise OptionError(f"{label}: is of another model shape: expected {self} (--model-shape), found {actual}")


def parse_model_shape(text: str) -> ModelShape:
    """Parse ``LAYERSxKV_HEADSxHEAD_DIM[,DTYPE]``, fp16 by default; raise `OptionError` for anything else."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})x(\d{1,5})(?:,(fp16|bf16|fp32))?", text)
    shape = ModelShape(int(match[1]), int(match[2]), int(match[3]), match[4] or "fp16") if match else None
    if shape is None or not shape.token_bytes:
        raise OptionError(
            f"model shape {repr_short(text)}: expected LAYERSxKV_HEADSxHEAD_DIM[,DTYPE], such as 32x8x128,fp16"
        )
    return shape


class MeasuredRatio(NamedTuple):
    """Ratio of a codec, and what it was measured on."""

    codec: str
    ratio: float


def measure_store_ratios(
    caches: Sequence[tuple[Sequence[int], Sequence[LayerCache]]],
    *,
    codecs: Sequence[str] = PLAIN_CODECS,
    profile: str | os.PathLike[str] | None = None,
    codec_options: Mapping[str, float] | None = None,
    threads: int | None = None,
) -> list[MeasuredRatio]:
    """Put real caches into a new store of each codec and return its ratios.

    Parameters
    ----------
    caches
        Token ids, and K and V of all layers, ``[kv_head, token, head_dim]``, of texts of one model.
    codecs
        Codecs of `PrefixStore`.
    profile, codec_options
        For the codecs ``"profile"`` and ``"transform"``, as for `PrefixStore`.
    threads
        Maximum number of threads; None for all processors.
    """
    ratios = []
    for codec in codecs:
        with (
            tempfile.TemporaryDirectory() as folder,
            PrefixStore(
                Path(folder) / "store", codec=codec, profile=profile, codec_options=codec_options, threads=threads
            ) as store,
        ):
            results = [store.put(ids, layers, model="measured") for ids, layers in caches]
            raw_bytes, stored_bytes = (sum(getattr(r, name) for r in results) for name in ("raw_bytes", "stored_bytes"))
        ratios.append(MeasuredRatio(codec, compute_ratio(raw_bytes, stored_bytes)))
    return ratios


@dataclass(frozen=True, kw_only=True)
class TierSpeed(Record):
    """Speeds that turn tokens into seconds."""

    #: Tokens that the model computes in a second of prefill.
    prefill: float
    #: Bytes of the store that are read and decoded in a second; None if that takes no time.
    load: float | None = None

    def compute_saved_seconds(self, hit_tokens: int, stored_bytes: float) -> float:
        """Return seconds of computing less those of loading."""
        return hit_tokens / self.prefill - (stored_bytes / self.load if self.load else 0.0)


@dataclass(frozen=True, kw_only=True)
class SimulationRow(Record):
    """Result of one codec, policy and limit."""

    policy: str
    #: Codec whose ratio was measured; empty if the ratio was specified.
    codec: str
    #: Raw over stored bytes of K and V.
    ratio: float
    #: Limit on the bytes of all units; None for no limit.
    max_bytes: int | None
    #: Requests of which anything was found, and tokens that were found.
    hit_requests: int
    hit_tokens: int
    #: Tokens that were found, divided by all input tokens.
    hit_rate: float
    #: Bytes of K and V that were not computed again.
    saved_bytes: int
    #: Seconds of prefill that were saved, less those of loading; None without speeds.
    saved_seconds: float | None
    #: Bytes that were written and evicted, and bytes at the end.
    put_bytes: int
    evicted_bytes: int
    stored_bytes: int
    #: Whether the codec rounds K and V.
    is_lossy: bool = field(default=False, metadata={"omit": True})


@dataclass(frozen=True, kw_only=True)
class SimulationReport(Record):
    """Result of `simulate`."""

    trace: str
    #: Format of the trace.
    format: str
    requests: int
    #: Input tokens of all requests.
    tokens: int
    #: Tokens of a block of the simulated store.
    block_tokens: int
    model_shape: str
    token_bytes: int
    speed: TierSpeed | None
    rows: tuple[SimulationRow, ...] = field(default=())
    #: Caches whose ratio was measured; empty if the ratio was specified.
    measured_on: str = field(default="", metadata={"omit": True})

    @property
    @json_key()
    def unlimited_hit_rate(self) -> float:
        """Hit rate of a store without a limit: no policy has a higher one."""
        return max((row.hit_rate for row in self.rows if row.max_bytes is None), default=0.0)

    def __str__(self) -> str:
        heading = (
            f"{self.trace} ({self.format}): {pluralize(self.requests, 'request')}, {self.tokens:,} tokens; K and V of "
            f"{self.model_shape}: {self.token_bytes:,} bytes a token"
        )
        unit, unit_bytes = self.choose_size_unit()
        notes = [f"Sizes are {unit}. Hits: share of all input tokens. Saved: K and V that came from the store."]
        if self.measured_on:
            notes.append(f"Ratios are those of {escape_control(self.measured_on)} together.")
        if any(row.is_lossy for row in self.rows):
            notes.append(f"{LOSSY}: codec {LAYER_CODECS[1]} rounds K and V.")
        if self.speed is not None:
            notes.append(f"Seconds at {self.speed.prefill:,.0f} tokens a second of prefill, less those of loading.")
        table = Table.from_items("", _make_columns(unit_bytes), self.rows)
        heading = wrap_sentences([heading], _TABLE_WIDTH)
        return f"{heading}\n{table.to_terminal(_TABLE_WIDTH)}\n{wrap_sentences(notes, _TABLE_WIDTH)}"

    def choose_size_unit(self) -> tuple[str, float]:
        """Return the largest unit that the smallest limit has one of, and its bytes."""
        smallest = min((row.max_bytes for row in self.rows if row.max_bytes is not None), default=0)
        return next(((name, nbytes) for name, nbytes in _SIZE_UNITS if smallest >= nbytes), _SIZE_UNITS[-1])

    def plot(self, directory: str | os.PathLike[str], *, force: bool = False) -> list[Path]:
        """Write ``hit_rate.png`` and ``hit_rate.svg`` (extra ``plot``) into a directory; return the files."""
        return write_figures(_iter_figures(self), directory, force)


_SIZE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def _make_columns(unit_bytes: float) -> tuple[Column, ...]:
    def format_bytes(nbytes: int | None) -> str:
        if nbytes is None:
            return "no limit"
        return f"{nbytes / unit_bytes:,.2f}" if nbytes < 99.995 * unit_bytes else f"{nbytes / unit_bytes:,.0f}"

    return (
        Column("policy", lambda row: row.policy, is_left_aligned=True),
        Column("codec", lambda row: row.codec or None),
        Column("ratio", lambda row: f"{row.ratio:.3f}"),
        Column("size", lambda row: format_bytes(row.max_bytes)),
        Column("hits %", lambda row: f"{100 * row.hit_rate:.2f}"),
        Column("saved", lambda row: format_bytes(row.saved_bytes)),
        Column("seconds", lambda row: None if row.saved_seconds is None else f"{row.saved_seconds:,.0f}"),
        Column("written", lambda row: format_bytes(row.put_bytes)),
        Column("evicted", lambda row: format_bytes(row.evicted_bytes)),
    )


def simulate(
    trace: RequestTrace,
    shape: ModelShape,
    *,
    sizes: Sequence[int],
    policies: Sequence[str] = SIMULATED_POLICIES,
    ratios: Sequence[MeasuredRatio] = (MeasuredRatio("", 1.0),),
    speed: TierSpeed | None = None,
    measured_on: str = "",
) -> SimulationReport:
    """Replay a trace in stores of each size, policy and ratio, and in one without limit.

    Each request is a `get` of its input, followed by a `put` of what was not found. Equal traces give equal results.

    Parameters
    ----------
    trace
        Result of `read_trace`.
    shape
        The model.
    sizes
        Limits on the bytes of all units.
    policies
        Some of ``"lru"``, ``"benefit"`` (seconds saved x uses / bytes) and ``"belady"``, the yardstick.
    ratios
        Ratio of each codec: `measure_store_ratios`.
    speed
        Speeds for the seconds; None reports none.
    measured_on
        Caches whose ratios these are, for the report.

    Raises
    ------
    OptionError
        If a policy is unknown, or a size or ratio is out of range.
    """
    unknown = [policy for policy in policies if policy not in SIMULATED_POLICIES]
    if unknown or not policies:
        raise OptionError(f"policy {repr_short(unknown or '')}: expected some of {', '.join(SIMULATED_POLICIES)}")
    if any(size < 1 for size in sizes) or any(not 0.5 <= ratio <= 100 for _, ratio in ratios):
        raise OptionError("sizes are bytes from 1 on, and ratios numbers from 0.5 to 100")
    blocks = split_into_blocks(trace, DEFAULT_BLOCK_TOKENS)
    unit_blocks = max(
        1, min(MAX_UNIT_TOKENS, MAX_UNIT_RAW_BYTES // shape.token_bytes) // blocks.block_tokens
    )  # a block of the trace is never split
    rows = []
    num_tokens = int(trace.tokens.sum())
    runs = [(policies[0], None), *((policy, size) for size in sizes for policy in policies)]
    with _pause_garbage_collection():
        for codec, ratio in ratios:

            def compute_unit_bytes(tokens: int, ratio: float = ratio) -> int:
                nbytes = round(tokens * shape.token_bytes / ratio) + _UNIT_HEADER_BYTES
                return nbytes + _UNIT_TOKEN_BYTES * tokens + _UNIT_STREAM_BYTES * 2 * shape.layers

            for policy, size in runs:
                counts = simulate_store(
                    blocks,
                    max_bytes=size,
                    policy=policy,
                    unit_blocks=unit_blocks,
                    compute_unit_bytes=compute_unit_bytes,
                )
                hit_tokens = int(counts.hits.sum())
                loaded_bytes = hit_tokens * shape.token_bytes / ratio
                rows.append(
                    SimulationRow(
                        policy=policy if size is not None else "any",
                        codec=codec,
                        ratio=ratio,
                        max_bytes=size,
                        hit_requests=int((counts.hits > 0).sum()),
                        hit_tokens=hit_tokens,
                        hit_rate=hit_tokens / max(num_tokens, 1),
                        saved_bytes=hit_tokens * shape.token_bytes,
                        saved_seconds=speed.compute_saved_seconds(hit_tokens, loaded_bytes) if speed else None,
                        put_bytes=counts.put_bytes,
                        evicted_bytes=counts.evicted_bytes,
                        stored_bytes=counts.stored_bytes,
                        is_lossy=codec == LAYER_CODECS[1],
                    )
                )
    return SimulationReport(
        trace=trace.label,
        format=trace.format,
        requests=int(trace.tokens.size),
        tokens=num_tokens,
        block_tokens=blocks.block_tokens,
        model_shape=f"{shape.layers} layers, {shape.kv_heads} kv heads x {shape.head_dim} dims, {shape.dtype}",
        token_bytes=shape.token_bytes,
        speed=speed,
        rows=tuple(rows),
        measured_on=measured_on,
    )


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Pause the search for cycles: it would walk millions of rows, and a simulation makes none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _iter_figures(report: SimulationReport) -> Iterator[tuple[str, Figure]]:
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    unit, unit_bytes = report.choose_size_unit()
    for row in report.rows:
        if row.max_bytes is not None:
            series.setdefault((row.codec, row.policy), []).append((row.max_bytes / unit_bytes, 100 * row.hit_rate))
    names = [" ".join(filter(None, key)) for key in series]
    with plot_style.use_style():
        figure, axes = plot_style.make_figure(4.8, 3.2, [*names, "no limit"])
        axes.set_xscale("log")
        ends = []
        for index, (name, points) in enumerate(zip(names, series.values(), strict=True)):
            style = plot_style.make_line_style(index)
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, **style)
            ends.append(plot_style.LineEnd(name, xs[-1], ys[-1], style))
        style = plot_style.FULL_CACHE_STYLE
        best = 100 * report.unlimited_hit_rate
        axes.axhline(best, **style)
        if ends:
            ends.append(plot_style.LineEnd("no limit", max(end.x for end in ends), best, style))
        sizes = sorted({x for points in series.values() for x, _ in points})
        axes.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"Size of the store in {unit}")
        axes.set_ylabel("Tokens found, % of all input tokens")
        plot_style.set_title(axes, "Hit rate over the size of the store")
        plot_style.add_line_labels(axes, ends)
        plot_style.add_caption(figure, f"{report.requests:,} requests, {report.model_shape}.")
    yield "hit_rate", figure
