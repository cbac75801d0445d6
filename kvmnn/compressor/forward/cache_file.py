"""A compressor applied to a cache in a file; a document beside the output has the true positions of its tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np

from ...arrays.kv_arrays import KVArrays, SaidAxes, read_kv
from ...arrays.named_array import ArrayInfo
from ...arrays.source import Source, others_metadata
from ...dtypes import Words
from ...errors import KvmnnError, OptionError
from ...files.output import FileOutput
from ...formats import array_format, opening
from ...formats.noted_positions import is_of_dump_kv, noted_positions
from ...formats.options import ReadOptions
from ...formats.writing import write_file
from ...text import LOSSY, UNCHANGED, count
from ...threads.pipeline import Progress
from ...version import version
from ..kvcm.weight_file import read
from .compressed_file import SUFFIX, Spans, read_axes, read_spans, render, spans_of_cache, spans_of_notes
from .compressing import compress_arrays, merge_spans
from .compression_plan import CompressionPlan
from .options import EngineName, ForwardOptions, Precision

_REFUSED = ("factor", "no_text_mlp", "factor_not_trained", "empty", "disabled")
"""Reasons for which no output is written; a cache that is too short is written as it is."""


@dataclass(frozen=True, kw_only=True)
class CompressedFile:
    """A compressed cache that was written.

    Attributes
    ----------
    output, cache, weights
        The three files, `cache` and `weights` without their directories.
    weights_sha256
        Of the weight file.
    label
        ``"LOSSY"``, or ``"UNCHANGED"`` where the output has the words of the input.
    layers
        Their numbers.
    axes, axes_text
        Letters for the axes of each array; every axis with its length, and what says so.
    precision, engine
        As in the options.
    plan
        What was done, or why nothing was.
    next_position
        True position of the next token.
    raw_bytes, stored_bytes
        Bytes of the live tokens before and after.
    seconds
        Time taken.
    """

    output: str
    cache: str
    weights: str
    weights_sha256: str
    label: str
    layers: tuple[int, ...]
    axes: str
    axes_text: str
    precision: Precision
    engine: EngineName
    plan: CompressionPlan
    next_position: int
    raw_bytes: int
    stored_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"output": self.output, **self.document(), "axes_text": self.axes_text, "seconds": self.seconds}

    def document(self) -> dict[str, Any]:
        """What stands in the document beside the output, but for the positions."""
        return {
            "label": self.label,
            "kvmnn_version": version(),
            "weights": {"file": self.weights, "sha256": self.weights_sha256},
            "cache": self.cache,
            "layers": list(self.layers),
            "axes": self.axes,
            "precision": self.precision,
            "engine": self.engine,
            "plan": self.plan.to_dict(),
            "note": self.plan.explanation or None,
            "tokens": self.plan.seq_len,
            "new_len": self.plan.new_len,
            "token_ratio": self.plan.ratio,
            "next_position": self.next_position,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
        }

    def __str__(self) -> str:
        plan = self.plan
        note = f" ({plan.explanation})" if plan.reason else ""
        return (
            f"{self.output}: {self.label}{note}, {plan.seq_len:,} -> {count(plan.new_len, 'token')} in "
            f"{count(len(self.layers), 'layer')}, token ratio {plan.ratio:.4f}, "
            f"{self.raw_bytes:,} -> {self.stored_bytes:,} bytes; the next token goes to place {plan.new_len:,} "
            f"and has position {self.next_position:,}\n  {self.axes_text}"
        )


def compress_file(
    weights: str | os.PathLike[str],
    cache: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: ForwardOptions | None = None,
    *,
    axes: str | None = None,
    read_options: ReadOptions | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> CompressedFile:
    """Compress the K and V in a file or directory.

    Parameters
    ----------
    weights
        The weight file.
    cache
        Anything that `kvmnn.open` opens, with nothing but K and V in it; docs/compressor-forward.md has the names.
    output
        A ``.npz`` or ``.safetensors`` file. It gets the names and axes of `cache`, and beside it OUTPUT.json with the
        true positions; both appear together or not at all.
    options
        Segments, factor, precision, engine.
    axes
        Letters for the axes of each array, such as ``"lthd"``, where nothing else says them: the names, the kind of
        `cache`, or the document that an earlier compression left beside it.
    read_options
        For `kvmnn.open`; `as_numbers` holds in any case.
    force
        Replace what exists.
    progress
        Called with bytes of K and V that were dealt with.

    Raises
    ------
    KvmnnError
        As for `compress`; also where nothing can be compressed, unless the cache is merely too short.
    SourceError
        For arrays that are neither K nor V, axes that do not fit, shapes with two readings and nothing that says which,
        and a packed cache whose layers hold different tokens.
    OptionError
        For an output of another format, and more live tokens than there are.
    OutputError
        When the output exists or cannot be written.
    """
    source = opening.open(cache, replace(read_options or ReadOptions(), as_numbers=True))
    return compress_source(weights, source, cache, output, options, axes=axes, force=force, progress=progress)


def compress_source(
    weights: str | os.PathLike[str],
    source: Source,
    cache: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: ForwardOptions | None = None,
    *,
    axes: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> CompressedFile:
    """As `compress_file`, with a `source` that was opened from `cache` already."""
    started = time.perf_counter()
    options = options or ForwardOptions()
    weights, cache, output = os.fspath(weights), os.fspath(cache), os.fspath(output)
    check_output(output)
    weight_file = read(weights)
    arrays = read_kv(cache, source.arrays, _said_axes(cache, source, axes, options.seq_len))
    stored = int(next(iter(arrays.layers.values()))[0].shape[2])
    live = stored if options.seq_len is None else options.seq_len
    if live > stored:
        raise OptionError(f"{cache}: has {stored} tokens, --tokens says {live}")
    spans = read_spans(cache, stored) or (spans_of_cache(cache, source.cache) if source.cache else None)
    if spans is None and (noted := noted_positions(source, [stored] * len(arrays.layers), list(arrays.layers))):
        spans = spans_of_notes(cache, noted)
    spans = (spans or Spans.of_plain(stored)).first(live)
    with FileOutput(output, force=force, protect=[weights, cache, *source.files]) as file:
        if not file.is_device:
            file.check_beside(SUFFIX)
        layers, plan = compress_arrays(weight_file, arrays.layers, options, progress=progress)
        if plan.reason in _REFUSED:
            raise KvmnnError(f"{cache}: nothing to compress: {plan.explanation}")
        spans = Spans(*merge_spans(plan, spans.positions, spans.ends), spans.next_position)
        infos, words = arrays.restore(layers)
        result = CompressedFile(
            output=output,
            cache=PurePath(cache).name,
            weights=PurePath(weights).name,
            weights_sha256=weight_file.sha256,
            label=UNCHANGED if plan.reason and _same_types(arrays, infos) else LOSSY,
            layers=tuple(arrays.layers),
            axes=arrays.axes,
            axes_text=arrays.described,
            precision=options.precision,
            engine=options.engine,
            plan=plan,
            next_position=spans.next_position,
            raw_bytes=_live_bytes(arrays, plan.seq_len),
            stored_bytes=sum(info.nbytes for info in infos),
            seconds=time.perf_counter() - started,
        )
        _write(file, output, source, infos, words)
        if not file.is_device:
            file.beside(SUFFIX).write(render(result.document(), spans))
        file.commit()
    return result


def check_output(output: str) -> None:
    """Refuse an output that cannot hold a cache: `OptionError`."""
    known = array_format(output)
    if known is None or not known.holds_many or os.path.isdir(output):
        raise OptionError(f"{output}: expected a .npz or .safetensors file as output")


def _said_axes(cache: str, source: Source, axes: str | None, tokens: int | None) -> SaidAxes:
    """What says how the arrays lie: the caller, an earlier compression, or what kvmnn noted down of a packed cache."""
    if axes is not None:
        return SaidAxes(axes, "--axes")
    if (noted := read_axes(cache)) is not None:
        return SaidAxes(noted, cache + SUFFIX)
    if source.axes is not None:
        return SaidAxes(source.axes, "as the cache has them")
    if is_of_dump_kv(source):
        return SaidAxes("htd", "as kvmnn dump-kv writes them")
    known = source.cache
    heads_and_tokens = known and {(known.layout.kv_heads, layer.tokens) for layer in known.layers}
    if heads_and_tokens and {array.shape[:-1] for array in source.arrays} == heads_and_tokens:
        return SaidAxes("htd", "a packed cache")
    return SaidAxes(token_major=source.token_major, least_tokens=tokens or 0)


def _same_types(arrays: KVArrays, infos: Sequence[ArrayInfo]) -> bool:
    before = (array.dtype for pair in arrays.pairs for array in pair)
    return all(dtype == info.dtype for dtype, info in zip(before, infos, strict=True))


def _live_bytes(arrays: KVArrays, live: int) -> int:
    before = [array for pair in arrays.pairs for array in pair]
    stored = before[0].shape[arrays.axes.index("t")]
    return sum(array.nbytes for array in before) // stored * live


def _write(file: FileOutput, output: str, source: Source, infos: list[ArrayInfo], arrays: list[Words]) -> None:
    """The arrays, and the source's metadata but for what kvmnn noted down of its files, which no longer holds."""
    metadata = others_metadata(source.metadata)
    runs = ((number, array.reshape(-1).view(np.uint8)) for number, array in enumerate(arrays))
    write_file(file, output, infos, runs, metadata)
