"""What dense streams take of a cache, layer by layer, beside MNN's frames: all made, decoded and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..arrays.completeness import Completeness, completeness_document, report_missing
from ..arrays.named_array import Piece
from ..arrays.source import Source
from ..arrays.strided import in_c_order
from ..bundle import DenseOptions
from ..bundle.dense_groups import at_once, encode_group, groups_of, side_by_side
from ..bundle.dense_pieces import DensePlan, plan_arrays
from ..dense.header import is_rotated
from ..dtypes import PART_LETTERS, PARTS, Part
from ..errors import KvmnnError
from ..files.changes import Reading
from ..frames import encode, matches
from ..text import LOSSLESS, count, ratio, span
from ..threads.pipeline import Progress
from ..threads.pool import resolve_threads
from .coded_input import CodedInput
from .stored_sizes import FRAME_BYTES

MEANING = (
    "exact: frames as MNN makes them, of arrays as they lie; dense: streams for kvmnn alone (docs/dense.md); all made, "
    f"decoded and compared: {LOSSLESS}"
)


@dataclass
class DenseSizes:
    """Bytes of K, of V or of both: their words, their frames of effort exact, their dense streams."""

    raw_bytes: int = 0
    exact_bytes: int = 0
    dense_bytes: int = 0

    def __iadd__(self, other: DenseSizes) -> DenseSizes:
        self.raw_bytes += other.raw_bytes
        self.exact_bytes += other.exact_bytes
        self.dense_bytes += other.dense_bytes
        return self

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON, with ratios."""
        return {
            "raw_bytes": self.raw_bytes,
            "exact_bytes": self.exact_bytes,
            "exact_ratio": ratio(self.raw_bytes, self.exact_bytes),
            "dense_bytes": self.dense_bytes,
            "dense_ratio": ratio(self.raw_bytes, self.dense_bytes),
        }

    def line(self, label: str) -> str:
        """A line of the table."""
        sizes = (f"{made:>13,} {ratio(self.raw_bytes, made):>7.4f}" for made in (self.exact_bytes, self.dense_bytes))
        return f"{label:<9} {self.raw_bytes:>13,} {' '.join(sizes)}"


@dataclass(frozen=True, kw_only=True)
class DenseMeasurement:
    """What `measure_dense` gives.

    Parameters
    ----------
    inputs
        What was measured.
    dtypes, tokens
        Of the layers; the words are measured as they are.
    layers
        By number and part.
    rope
        How K was taken as rotated, as `--rope` takes it; None where it was not. Where layers differ, each way once.
    rotated_streams, key_streams
        Streams of K that turn their rows so, as the others are smaller without that; and all streams of K.
    left_out
        Names of arrays that are no K or V of layers.
    coded
        The inputs, where the words were made of codes.
    completeness
        The state of the model that the arrays contain, where that is known.
    """

    inputs: tuple[str, ...]
    dtypes: tuple[str, ...]
    tokens: tuple[int, ...]
    layers: dict[int, dict[Part, DenseSizes]] = field(default_factory=dict)
    rope: str | None = None
    rotated_streams: int = 0
    key_streams: int = 0
    left_out: tuple[str, ...] = ()
    coded: CodedInput = field(default_factory=CodedInput)
    completeness: Completeness | None = None

    @property
    def notes(self) -> list[str]:
        """What changes the meaning of the sizes, in lines."""
        sizes = self.of(list(self.layers))
        return self.coded.note(sizes.raw_bytes, sizes.dense_bytes, "dense")

    def of(self, layers: Sequence[int], parts: Sequence[Part] = PARTS) -> DenseSizes:
        """Sizes of several layers together."""
        found = DenseSizes()
        for layer in layers:
            for part in parts:
                found += self.layers[layer].get(part, DenseSizes())
        return found

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""

        def document(layers: Sequence[int]) -> dict[str, Any]:
            parts = {PART_LETTERS[part]: self.of(layers, [part]).to_dict() for part in self._parts(layers)}
            return {**self.of(layers).to_dict(), **parts}

        return {
            "label": LOSSLESS,
            "notes": self.notes,
            "inputs": list(self.inputs),
            "meaning": MEANING,
            "dtypes": list(self.dtypes),
            "rotary": self.rope is not None,
            "rope": self.rope,
            "rotated_streams": self.rotated_streams,
            "key_streams": self.key_streams,
            "left_out": list(self.left_out),
            **self.coded.to_dict(),
            **completeness_document(self.completeness),
            "overall": {"layers": len(self.layers), **document(list(self.layers))},
            "layers": {str(layer): document([layer]) for layer in self.layers},
        }

    def __str__(self) -> str:
        lines = [f"{'':<9} {'raw bytes':>13} {'exact':>13} {'ratio':>7} {'dense':>13} {'ratio':>7}"]
        for label, layers in [*((f"layer {n}", [n]) for n in self.layers), ("total", list(self.layers))]:
            lines.append(self.of(layers).line(label))
            lines += [self.of(layers, [part]).line(f"  {PART_LETTERS[part].upper()}") for part in self._parts(layers)]
        what = f"{count(len(self.layers), 'layer')} of {' and '.join(self.dtypes)}, {span(self.tokens)} tokens"
        how = "without rotation (--rope or --model says how it was rotated)"
        if self.rope is not None:
            how = f"as rotated (RoPE) by {self.rope}"
            if self.rotated_streams < self.key_streams:
                how += (
                    f" in {self.rotated_streams:,} of {count(self.key_streams, 'stream')}: others are smaller without"
                )
        has_keys = "key" in self._parts(list(self.layers))
        lines += ["", f"total: {what}" + (f"; K taken {how}" if has_keys else ""), MEANING, *self.notes]
        lines += report_missing(self.completeness)
        if self.left_out:
            lines.append(f"left out, no K or V of layers: {', '.join(self.left_out)}")
        return "\n".join(lines)

    def _parts(self, layers: Sequence[int]) -> list[Part]:
        return [part for part in PARTS if any(part in self.layers[layer] for layer in layers)]


class _Job(NamedTuple):
    plan: DensePlan
    layer: int
    piece: Piece


def measure_dense(
    source: Source,
    options: DenseOptions | None = None,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> DenseMeasurement:
    """Make dense streams and exact frames of K and V of every layer, decode and compare them, and count their bytes.

    Parameters
    ----------
    source
        K and V of layers (`kvmnn.open`); other arrays are left out. Words are taken as they are, nothing is rounded.
    options
        How K was rotated, and the token ids, where they are known.
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

    def work(group: list[_Job]) -> list[tuple[DenseSizes, bool]]:
        streams = encode_group([(job.plan, job.piece) for job in group], verify=True)
        return [
            (DenseSizes(job.piece.size, _exact_bytes(job, share), len(stream)), is_rotated(stream))
            for job, stream in zip(group, streams, strict=True)
        ]

    source = replace(source, arrays=[in_c_order(array) if array.order == "F" else array for array in source.arrays])
    plans = plan_arrays(source, options or DenseOptions())
    layers: dict[int, dict[Part, DenseSizes]] = {}
    rotated = [0, 0]
    groups = groups_of((source[name], plan) for name, plan in plans.items())
    workers = at_once(groups.largest, threads)
    share = max(1, resolve_threads(threads) // workers)
    with Reading():
        for group, found in side_by_side(work, groups.gathered(_jobs(source, plans), lambda _: True), workers):
            for job, (sizes, turns) in zip(group, found, strict=True):
                rotated = [rotated[0] + turns, rotated[1] + (job.plan.part == "key")]
                parts = layers.setdefault(job.layer, {})
                parts[job.plan.part] = parts.get(job.plan.part, DenseSizes())
                parts[job.plan.part] += sizes
                if progress:
                    progress(job.piece.size)
            del group, job
    coded = CodedInput()
    coded.add(source)
    return DenseMeasurement(
        inputs=source.inputs,
        dtypes=tuple(sorted({plan.dtype for plan in plans.values()})),
        tokens=tuple(sorted({plan.tokens for plan in plans.values()})),
        layers=dict(sorted(layers.items())),
        rope="; ".join(dict.fromkeys(str(plan.rotary) for plan in plans.values() if plan.rotary)) or None,
        rotated_streams=rotated[0],
        key_streams=rotated[1],
        left_out=tuple(name for name in source if name not in plans),
        coded=coded,
        completeness=source.completeness,
    )


def _jobs(source: Source, plans: dict[str, DensePlan]) -> Iterator[_Job]:
    for name, plan in plans.items():
        for number, piece in enumerate(source[name].pieces(plan.nbytes)):
            yield _Job(plan, number if plan.layer is None else plan.layer, piece)
            del piece


def _exact_bytes(job: _Job, threads: int) -> int:
    """Bytes of the frames of a piece, proved."""
    exact = 0
    for start in range(0, job.piece.size, FRAME_BYTES):
        run = job.piece[start : start + FRAME_BYTES]
        frame = encode(run, dtype=job.plan.dtype, threads=threads)
        if not matches(frame, run, dtype=job.plan.dtype, threads=threads):
            raise KvmnnError("a frame did not decode to its own input (please report this)")
        exact += len(frame)
    return exact
