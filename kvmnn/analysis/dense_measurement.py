"""Measure dense streams next to MNN's frames, layer by layer; each is encoded, decoded and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.parallel import Progress, resolve_threads
from .._util.text import LOSSLESS, compute_ratio, format_range, pluralize
from ..arrays.array import Chunk, to_c_contiguous
from ..arrays.completeness import Completeness, format_missing
from ..arrays.source import Source
from ..bundle import DenseOptions
from ..bundle.dense import DensePlan, compute_num_workers, encode_group, map_in_order, plan_arrays, plan_groups
from ..dense.header import is_rotated
from ..dtypes import PART_LETTERS, PARTS, Part
from ..errors import KvmnnError
from ..files.change_detection import InputGuard
from ..files.schema import Record
from ..frames import encode, verify_roundtrip
from ..reports.break_even import BreakEvenReport
from .selection import CodedInputInfo
from .stream_sizes import MAX_FRAME_BYTES

DENSE_SIZES_MEANING = (
    "exact: frames as MNN makes them, of arrays as they lie; dense: streams for kvmnn alone (docs/dense.md); all made, "
    f"decoded and compared: {LOSSLESS}"
)


@dataclass
class DenseSizeStats(Record):
    """Bytes of K, V or both: raw, as frames of effort exact, and as dense streams."""

    json_keys = "raw_bytes exact_bytes exact_ratio dense_bytes dense_ratio"

    raw_bytes: int = 0
    exact_bytes: int = 0
    dense_bytes: int = 0

    def __iadd__(self, other: DenseSizeStats) -> DenseSizeStats:
        self.raw_bytes += other.raw_bytes
        self.exact_bytes += other.exact_bytes
        self.dense_bytes += other.dense_bytes
        return self

    @property
    def exact_ratio(self) -> float:
        """Raw bytes over the bytes of exact frames."""
        return compute_ratio(self.raw_bytes, self.exact_bytes)

    @property
    def dense_ratio(self) -> float:
        """Raw bytes over the bytes of dense streams."""
        return compute_ratio(self.raw_bytes, self.dense_bytes)

    def format_line(self, label: str) -> str:
        """Format the sizes as a line of the table."""
        size_texts = (
            f"{num_bytes:>13,} {compute_ratio(self.raw_bytes, num_bytes):>7.4f}"
            for num_bytes in (self.exact_bytes, self.dense_bytes)
        )
        return f"{label:<9} {self.raw_bytes:>13,} {' '.join(size_texts)}"


@dataclass(frozen=True, kw_only=True)
class DenseMeasureResult(Record):
    """Sizes of the dense codec and of exact frames, by layer."""

    json_keys = (
        "label notes inputs meaning dtypes rotary rope rotated_streams key_streams left_out **coded_input "
        "completeness overall=_overall_document layers=_layer_documents break_even"
    )

    #: Paths of the inputs.
    inputs: tuple[str, ...]
    #: Of the layers; elements are not converted.
    dtypes: tuple[str, ...]
    tokens: tuple[int, ...]
    #: By layer number and part.
    sizes_by_layer: dict[int, dict[Part, DenseSizeStats]] = field(default_factory=dict)
    #: Rotation of K as for `--rope`; None if it was encoded as not rotated. Each rotation once, if layers differ.
    rope: str | None = None
    #: Streams of K that use the rotation (the others are smaller without it); all streams of K.
    rotated_streams: int = 0
    key_streams: int = 0
    #: Names of arrays other than K and V of layers.
    left_out: tuple[str, ...] = ()
    #: Inputs whose elements were dequantised.
    coded_input: CodedInputInfo = field(default_factory=CodedInputInfo)
    #: The part of the model's state that the arrays contain, if known.
    completeness: Completeness | None = field(default=None, metadata={"omit": True})
    #: Where codecs and prefixes pay; only if it was measured.
    break_even: BreakEvenReport | None = field(default=None, metadata={"omit": True})
    label: ClassVar = LOSSLESS
    meaning: ClassVar = DENSE_SIZES_MEANING

    @property
    def notes(self) -> list[str]:
        """Lines that qualify the sizes."""
        sizes = self.sum_layers(list(self.sizes_by_layer))
        return self.coded_input.describe(sizes.raw_bytes, sizes.dense_bytes, "dense")

    def sum_layers(self, layers: Sequence[int], parts: Sequence[Part] = PARTS) -> DenseSizeStats:
        """Return the sizes of several layers together."""
        total = DenseSizeStats()
        for layer in layers:
            for part in parts:
                total += self.sizes_by_layer[layer].get(part, DenseSizeStats())
        return total

    @property
    def rotary(self) -> bool:
        """Return whether K was encoded as rotated (RoPE)."""
        return self.rope is not None

    @property
    def _overall_document(self) -> dict[str, Any]:
        return {"layers": len(self.sizes_by_layer), **self._build_document(list(self.sizes_by_layer))}

    @property
    def _layer_documents(self) -> dict[str, Any]:
        return {str(layer): self._build_document([layer]) for layer in self.sizes_by_layer}

    def _build_document(self, layers: Sequence[int]) -> dict[str, Any]:
        parts = {PART_LETTERS[part]: self.sum_layers(layers, [part]).to_dict() for part in self._list_parts(layers)}
        return {**self.sum_layers(layers).to_dict(), **parts}

    def __str__(self) -> str:
        lines = [f"{'':<9} {'raw bytes':>13} {'exact':>13} {'ratio':>7} {'dense':>13} {'ratio':>7}"]
        for label, layers in [
            *((f"layer {n}", [n]) for n in self.sizes_by_layer),
            ("total", list(self.sizes_by_layer)),
        ]:
            lines.append(self.sum_layers(layers).format_line(label))
            lines += [
                self.sum_layers(layers, [part]).format_line(f"  {PART_LETTERS[part].upper()}")
                for part in self._list_parts(layers)
            ]
        scope_text = (
            f"{pluralize(len(self.sizes_by_layer), 'layer')} of {' and '.join(self.dtypes)}, "
            f"{format_range(self.tokens)} tokens"
        )
        rotation_text = "without rotation (--rope or --model says how it was rotated)"
        if self.rope is not None:
            rotation_text = f"as rotated (RoPE) by {self.rope}"
            if self.rotated_streams < self.key_streams:
                rotation_text += (
                    f" in {self.rotated_streams:,} of {pluralize(self.key_streams, 'stream')}: others are smaller "
                    f"without"
                )
        has_keys = "key" in self._list_parts(list(self.sizes_by_layer))
        lines += [
            "",
            f"total: {scope_text}" + (f"; K taken {rotation_text}" if has_keys else ""),
            DENSE_SIZES_MEANING,
            *self.notes,
        ]
        lines += format_missing(self.completeness)
        if self.left_out:
            lines.append(f"left out, no K or V of layers: {', '.join(self.left_out)}")
        lines += ["", str(self.break_even)] if self.break_even is not None else []
        return "\n".join(lines)

    def _list_parts(self, layers: Sequence[int]) -> list[Part]:
        return [part for part in PARTS if any(part in self.sizes_by_layer[layer] for layer in layers)]


class _DenseJob(NamedTuple):
    plan: DensePlan
    layer: int
    chunk: Chunk


def measure_dense(
    source: Source,
    options: DenseOptions | None = None,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> DenseMeasureResult:
    """Encode K and V of every layer as dense streams and exact frames, decode and compare them, and count their bytes.

    Parameters
    ----------
    source
        K and V of layers (`kvmnn.open`); other arrays are left out. Words are taken as they are, nothing is rounded.
    options
        Rotation of K, and the token ids, if known.
    threads
        None for all processors.
    progress
        Called with raw bytes.

    Raises
    ------
    OptionError
        When there is no K or V among the arrays, or `options` are not for them.
    KvmnnError
        When an input is damaged; if a stream or a frame does not decode to its input, which would be a defect of kvmnn
        or of the machine.
    """

    def encode_and_measure(group: list[_DenseJob]) -> list[tuple[DenseSizeStats, bool]]:
        streams = encode_group([(job.plan, job.chunk) for job in group], verify=True)
        return [
            (
                DenseSizeStats(job.chunk.size, _count_exact_bytes(job, threads_per_worker), len(stream)),
                is_rotated(stream),
            )
            for job, stream in zip(group, streams, strict=True)
        ]

    source = replace(
        source, arrays=[to_c_contiguous(array) if array.order == "F" else array for array in source.arrays]
    )
    plans = plan_arrays(source, options or DenseOptions())
    layers: dict[int, dict[Part, DenseSizeStats]] = {}
    rotation_counts = [0, 0]
    groups = plan_groups((source[name], plan) for name, plan in plans.items())
    workers = compute_num_workers(groups.max_group_bytes, threads)
    threads_per_worker = max(1, resolve_threads(threads) // workers)
    with InputGuard():
        for group, sizes_and_rotations in map_in_order(
            encode_and_measure, groups.collect(_iter_dense_jobs(source, plans), lambda _: True), workers
        ):
            for job, (sizes, is_stream_rotated) in zip(group, sizes_and_rotations, strict=True):
                rotation_counts = [
                    rotation_counts[0] + is_stream_rotated,
                    rotation_counts[1] + (job.plan.part == "key"),
                ]
                parts = layers.setdefault(job.layer, {})
                parts[job.plan.part] = parts.get(job.plan.part, DenseSizeStats())
                parts[job.plan.part] += sizes
                if progress:
                    progress(job.chunk.size)
            del group, job
    coded_input = CodedInputInfo()
    coded_input.add_source(source)
    return DenseMeasureResult(
        inputs=source.inputs,
        dtypes=tuple(sorted({plan.dtype for plan in plans.values()})),
        tokens=tuple(sorted({plan.tokens for plan in plans.values()})),
        sizes_by_layer=dict(sorted(layers.items())),
        rope="; ".join(dict.fromkeys(str(plan.rotary) for plan in plans.values() if plan.rotary)) or None,
        rotated_streams=rotation_counts[0],
        key_streams=rotation_counts[1],
        left_out=tuple(name for name in source if name not in plans),
        coded_input=coded_input,
        completeness=source.completeness,
    )


def _iter_dense_jobs(source: Source, plans: dict[str, DensePlan]) -> Iterator[_DenseJob]:
    for name, plan in plans.items():
        for number, chunk in enumerate(source[name].iter_chunks(plan.nbytes)):
            yield _DenseJob(plan, number if plan.layer is None else plan.layer, chunk)
            del chunk


def _count_exact_bytes(job: _DenseJob, threads: int) -> int:
    """Return the size of the exact frames of a chunk, each of which was decoded and compared."""
    exact_bytes = 0
    for start in range(0, job.chunk.size, MAX_FRAME_BYTES):
        block = job.chunk[start : start + MAX_FRAME_BYTES]
        frame = encode(block, dtype=job.plan.dtype, threads=threads)
        if not verify_roundtrip(frame, block, dtype=job.plan.dtype, threads=threads):
            raise KvmnnError("a frame did not decode to its own input (please report this)")
        exact_bytes += len(frame)
    return exact_bytes
