"""A compressor applied to a cache in a file; a document beside the output has the true positions of its tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np

from ...arrays.kv_arrays import AxisHints, KVArrays, read_kv
from ...arrays.named_array import ArrayInfo
from ...arrays.source import Source, strip_internal_metadata
from ...dtypes import Elements
from ...errors import KvmnnError, OptionError
from ...files.output import FileOutput
from ...formats import find_array_format, opening
from ...formats.noted_positions import is_dump_kv_folder, read_positions_sidecar
from ...formats.options import ReadOptions
from ...formats.writing import write_file
from ...text import LOSSY, UNCHANGED, pluralize
from ...threads.pipeline import Progress
from ...version import get_version
from ..kvcm.weight_file import read_weight_file
from .compressed_file import (
    SIDECAR_SUFFIX,
    PositionSpans,
    get_cache_spans,
    get_sidecar_spans,
    read_axes,
    read_spans,
    render_sidecar,
)
from .compressing import compress_arrays, merge_spans
from .compression_plan import CompressionPlan
from .options import EngineName, ForwardOptions, Precision

_REFUSED_REASONS = ("factor", "no_text_mlp", "factor_not_trained", "empty", "disabled")
"""Reasons for which no output is written; a cache that is too short is written as it is."""


@dataclass(frozen=True, kw_only=True)
class CompressFileResult:
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
        return {"output": self.output, **self.to_document(), "axes_text": self.axes_text, "seconds": self.seconds}

    def to_document(self) -> dict[str, Any]:
        """What stands in the document beside the output, but for the positions."""
        return {
            "label": self.label,
            "kvmnn_version": get_version(),
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
            f"{self.output}: {self.label}{note}, {plan.seq_len:,} -> {pluralize(plan.new_len, 'token')} in "
            f"{pluralize(len(self.layers), 'layer')}, token ratio {plan.ratio:.4f}, "
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
    overwrite: bool = False,
    progress: Progress | None = None,
) -> CompressFileResult:
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
        For `kvmnn.open`; `forbid_reinterpretation` holds in any case.
    overwrite
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
    source = opening.open(cache, replace(read_options or ReadOptions(), forbid_reinterpretation=True))
    return compress_source(weights, source, cache, output, options, axes=axes, overwrite=overwrite, progress=progress)


def compress_source(
    weights: str | os.PathLike[str],
    source: Source,
    cache: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: ForwardOptions | None = None,
    *,
    axes: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> CompressFileResult:
    """As `compress_file`, with a `source` that was opened from `cache` already."""
    start_time = time.perf_counter()
    options = options or ForwardOptions()
    weights, cache, output = os.fspath(weights), os.fspath(cache), os.fspath(output)
    check_output_path(output)
    weight_file = read_weight_file(weights)
    arrays = read_kv(cache, source.arrays, _resolve_axes(cache, source, axes, options.seq_len))
    num_stored = int(next(iter(arrays.layers.values()))[0].shape[2])
    num_live = num_stored if options.seq_len is None else options.seq_len
    if num_live > num_stored:
        raise OptionError(f"{cache}: has {num_stored} tokens, --tokens says {num_live}")
    spans = read_spans(cache, num_stored) or (get_cache_spans(cache, source.cache) if source.cache else None)
    if spans is None and (
        sidecar_positions := read_positions_sidecar(source, [num_stored] * len(arrays.layers), list(arrays.layers))
    ):
        spans = get_sidecar_spans(cache, sidecar_positions)
    spans = (spans or PositionSpans.from_token_count(num_stored)).take_first(num_live)
    with FileOutput(output, force=overwrite, exclude=[weights, cache, *source.files]) as file:
        if not file.is_device:
            file.check_sidecar(SIDECAR_SUFFIX)
        layers, plan = compress_arrays(weight_file, arrays.layers, options, progress=progress)
        if plan.reason in _REFUSED_REASONS:
            raise KvmnnError(f"{cache}: nothing to compress: {plan.explanation}")
        spans = PositionSpans(*merge_spans(plan, spans.positions, spans.ends), spans.next_position)
        infos, restored_arrays = arrays.restore(layers)
        result = CompressFileResult(
            output=output,
            cache=PurePath(cache).name,
            weights=PurePath(weights).name,
            weights_sha256=weight_file.sha256,
            label=UNCHANGED if plan.reason and _has_same_types(arrays, infos) else LOSSY,
            layers=tuple(arrays.layers),
            axes=arrays.axes,
            axes_text=arrays.description,
            precision=options.precision,
            engine=options.engine,
            plan=plan,
            next_position=spans.next_position,
            raw_bytes=_count_live_bytes(arrays, plan.seq_len),
            stored_bytes=sum(info.nbytes for info in infos),
            seconds=time.perf_counter() - start_time,
        )
        _write_arrays(file, output, source, infos, restored_arrays)
        if not file.is_device:
            file.open_sidecar(SIDECAR_SUFFIX).write(render_sidecar(result.to_document(), spans))
        file.commit()
    return result


def check_output_path(output: str) -> None:
    """Refuse an output that cannot hold a cache: `OptionError`."""
    output_format = find_array_format(output)
    if output_format is None or not output_format.is_multi_array or os.path.isdir(output):
        raise OptionError(f"{output}: expected a .npz or .safetensors file as output")


def _resolve_axes(cache: str, source: Source, axes: str | None, tokens: int | None) -> AxisHints:
    """What says how the arrays lie: the caller, an earlier compression, or what kvmnn noted down of a packed cache."""
    if axes is not None:
        return AxisHints(axes, "--axes")
    if (recorded_axes := read_axes(cache)) is not None:
        return AxisHints(recorded_axes, cache + SIDECAR_SUFFIX)
    if source.axes is not None:
        return AxisHints(source.axes, "as the cache has them")
    if is_dump_kv_folder(source):
        return AxisHints("htd", "as kvmnn dump-kv writes them")
    cache_info = source.cache
    heads_and_tokens = cache_info and {(cache_info.layout.kv_heads, layer.tokens) for layer in cache_info.layers}
    if heads_and_tokens and {array.shape[:-1] for array in source.arrays} == heads_and_tokens:
        return AxisHints("htd", "a packed cache")
    return AxisHints(token_major=source.token_major, min_tokens=tokens or 0)


def _has_same_types(arrays: KVArrays, infos: Sequence[ArrayInfo]) -> bool:
    original_types = (array.dtype for pair in arrays.pairs for array in pair)
    return all(dtype == info.dtype for dtype, info in zip(original_types, infos, strict=True))


def _count_live_bytes(arrays: KVArrays, num_live: int) -> int:
    original_arrays = [array for pair in arrays.pairs for array in pair]
    num_stored = original_arrays[0].shape[arrays.axes.index("t")]
    return sum(array.nbytes for array in original_arrays) // num_stored * num_live


def _write_arrays(
    file: FileOutput, output: str, source: Source, infos: list[ArrayInfo], arrays: list[Elements]
) -> None:
    """The arrays, and the source's metadata but for what kvmnn noted down of its files, which no longer holds."""
    metadata = strip_internal_metadata(source.metadata)
    runs = ((number, array.reshape(-1).view(np.uint8)) for number, array in enumerate(arrays))
    write_file(file, output, infos, runs, metadata)
