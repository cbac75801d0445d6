"""Compress the K and V of a file, and write a sidecar document with the text positions of the output's tokens."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.packages import get_version
from ..._util.parallel import Progress
from ..._util.text import LOSSY, UNCHANGED, pluralize
from ...arrays.kv_arrays import AxisHints, read_kv
from ...arrays.source import Source, strip_internal_metadata
from ...bundle.passthrough import POSITIONS_NAME
from ...dtypes import Positions
from ...errors import KvmnnError, ManifestError, OptionError, SourceError
from ...files.atomic import FileOutput
from ...files.schema import JsonReader, Record, parse_document, read_bounded
from ...formats import find_array_format, registry
from ...formats.options import ReadOptions
from ...formats.sidecars import PositionsSidecar, is_dump_kv_folder, read_positions_sidecar
from ...formats.writer import write_file
from ...packed.cache_info import CacheInfo, format_runs
from ..kvcm import read_weight_file
from .compress import compress_arrays, merge_spans
from .plan import CompressionPlan, EngineName, ForwardOptions, Precision

SCHEMA = "kvmnn-compressed-kv"
SCHEMA_VERSION = 1
SIDECAR_SUFFIX = ".json"
_MAX_SIDECAR_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class PositionSpans:
    """Text positions that each token of a cache represents: from `positions` up to but excluding `ends`."""

    #: ``[tokens]``.
    positions: Positions
    ends: Positions
    #: Text position of the next token.
    next_position: int

    @classmethod
    def from_token_count(cls, tokens: int) -> PositionSpans:
        """Return the spans of a cache without evicted tokens."""
        positions = np.arange(tokens, dtype=np.int64)
        return cls(positions, positions + 1, tokens)

    def take_first(self, tokens: int) -> PositionSpans:
        """Return the spans of the first `tokens` tokens."""
        if tokens >= self.positions.size:
            return self
        ends = self.ends[:tokens]
        return PositionSpans(self.positions[:tokens], ends, int(ends.max(initial=0)))

    def to_list(self) -> list[list[int]]:
        """Return ``[first, end]`` of each token."""
        return np.stack([self.positions, self.ends], axis=-1).tolist()  # type: ignore[no-any-return]


def render_sidecar(fields: dict[str, Any], spans: PositionSpans) -> bytes:
    """Render the sidecar document: `fields`, which include ``next_position``, then the spans on one line."""
    header_text = json.dumps({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **fields}, indent=2)
    spans_text = json.dumps(spans.to_list(), separators=(",", ":"))
    return f'{header_text[:-2]},\n  "positions": {spans_text}\n}}\n'.encode()


def read_spans(path: str, tokens: int) -> PositionSpans | None:
    """Read the spans of a cache file from its sidecar document; None if there is none."""
    root = _read_sidecar(path)
    if root is None:
        return None
    sidecar = path + SIDECAR_SUFFIX
    version = root.get("schema_version").read_int(1)
    if version != SCHEMA_VERSION:
        raise KvmnnError(f"{sidecar}: schema_version is {version}, this kvmnn reads {SCHEMA_VERSION}")
    next_position = root.get("next_position").read_int(0)
    pairs = [entry.read_list(2, 2) for entry in root.get("positions").read_list()]
    if len(pairs) != tokens:
        raise KvmnnError(f"{sidecar}: has positions for {len(pairs)} tokens, {path} has {tokens}")
    spans = np.array([[number.read_int(0) for number in pair] for pair in pairs], np.int64).reshape(tokens, 2)
    positions, ends = spans[:, 0], spans[:, 1]
    if (ends <= positions).any() or int(ends.max(initial=0)) > next_position:
        raise KvmnnError(f"{sidecar}: positions are not spans within the {next_position} tokens seen")
    return PositionSpans(positions, ends, next_position)


def get_cache_spans(path: str, cache: CacheInfo) -> PositionSpans:
    """Return the positions of the tokens of a packed cache, one list for all layers."""
    first_layer, *other_layers = cache.layers
    for layer in other_layers:
        if layer.positions != first_layer.positions:
            raise SourceError(
                f"{path}: layers {first_layer.layer} and {layer.layer} hold different tokens "
                f"({format_runs(first_layer.positions)}; {format_runs(layer.positions)}): a compressed cache "
                "has the same in all layers"
            )
    positions = np.concatenate(
        [np.arange(begin, begin + size, dtype=np.int64) for begin, size in first_layer.positions]
    )
    # Where the last tokens of the text were dropped, only its ids show how many they were.
    num_seen = int(positions.max()) + 1
    return PositionSpans(positions, positions + 1, max(num_seen, cache.token_ids.count if cache.token_ids else 0))


def get_sidecar_spans(path: str, sidecar_positions: PositionsSidecar) -> PositionSpans:
    """Return the positions of the tokens of a folder by its ``positions.json``, one list for all layers."""
    first_positions = sidecar_positions.positions[0]
    if any(
        layer_positions.ndim > 1 or not np.array_equal(layer_positions, first_positions)
        for layer_positions in sidecar_positions.positions
    ):
        raise SourceError(
            f"{path}: layers or heads hold different tokens ({POSITIONS_NAME}): a compressed cache has the same in all"
        )
    next_position = int(first_positions[-1]) + 1 if first_positions.size else 0
    if not sidecar_positions.is_rerotated:
        next_position = max(next_position, sidecar_positions.tokens_seen or 0)
    return PositionSpans(first_positions, first_positions + 1, next_position)


def _read_sidecar(path: str) -> JsonReader | None:
    """Read the sidecar document of a cache file; None if there is none."""
    sidecar = path + SIDECAR_SUFFIX
    if not os.path.isfile(sidecar):
        return None
    try:
        root = parse_document(read_bounded(Path(sidecar), _MAX_SIDECAR_BYTES), sidecar, _MAX_SIDECAR_BYTES)
    except (OSError, ManifestError, SourceError):
        return None
    return root if isinstance(root.value, dict) and root.value.get("schema") == SCHEMA else None


#: Reasons for which no output is written; a cache that is too short is written as it is.
_REFUSED_REASONS = ("factor", "no_text_mlp", "factor_not_trained", "empty", "disabled")


@dataclass(frozen=True, kw_only=True)
class CompressFileResult(Record):
    """Result of compressing a cache file."""

    json_keys = "output **document axes_text seconds"

    #: The three files, `cache` and `weights` without their directories.
    output: str
    cache: str
    weights: str
    #: Of the weight file.
    weights_sha256: str
    #: ``"LOSSY"``, or ``"UNCHANGED"`` if the output has the elements of the input.
    label: str
    #: Layer numbers.
    layers: tuple[int, ...]
    #: Letters for the axes of each array; every axis with its length, and the source of this.
    axes: str
    axes_text: str
    #: As in the options.
    precision: Precision
    engine: EngineName
    #: The applied plan, or the reason why nothing was compressed.
    plan: CompressionPlan
    #: Text position of the next token.
    next_position: int
    #: Bytes of the live tokens before and after.
    raw_bytes: int
    stored_bytes: int
    #: Elapsed time.
    seconds: float

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document that is written next to the output, without the positions."""
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
        Anything that `kvmnn.open` opens and that contains only K and V; docs/compressor-forward.md has the names.
    output
        A ``.npz`` or ``.safetensors`` file. It gets the names and axes of `cache`, and alongside OUTPUT.json with the
        true positions; both appear together or not at all.
    options
        Segments, factor, precision, engine.
    axes
        Letters for the axes of each array, such as ``"lthd"``, where nothing else defines them: the names, the kind of
        `cache`, or the document that an earlier compression wrote alongside it.
    read_options
        For `kvmnn.open`; `forbid_reinterpretation` applies in any case.
    overwrite
        Replace existing files.
    progress
        Called with bytes of K and V that are done.

    Raises
    ------
    KvmnnError
        As for `compress_cache`; also where nothing can be compressed, unless the cache is merely too short.
    SourceError
        For arrays that are neither K nor V, axes that do not fit, ambiguous shapes, and a packed cache whose layers
        contain different tokens.
    OptionError
        For an output of another format, and more live tokens than there are.
    OutputError
        If the output exists or cannot be written.
    """
    source = registry.open(cache, replace(read_options or ReadOptions(), forbid_reinterpretation=True))
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
    """Compress a `source` that was opened from `cache` already, as `compress_file` does."""
    start_time = time.perf_counter()
    options = options or ForwardOptions()
    weights, cache, output = os.fspath(weights), os.fspath(cache), os.fspath(output)
    check_output_path(output)
    weight_file = read_weight_file(weights)
    arrays = read_kv(cache, source.arrays, _resolve_axes(cache, source, axes, options.seq_len))
    num_stored = int(next(iter(arrays.layers.values()))[0].shape[2])
    num_live = num_stored if options.seq_len is None else options.seq_len
    if num_live > num_stored:
        raise OptionError(f"{cache}: has {num_stored} tokens, --valid-tokens says {num_live}")
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
        originals = [array for pair in arrays.pairs for array in pair]
        has_same_types = all(array.dtype == info.dtype for array, info in zip(originals, infos, strict=True))
        result = CompressFileResult(
            output=output,
            cache=PurePath(cache).name,
            weights=PurePath(weights).name,
            weights_sha256=weight_file.sha256,
            label=UNCHANGED if plan.reason and has_same_types else LOSSY,
            layers=tuple(arrays.layers),
            axes=arrays.axes,
            axes_text=arrays.description,
            precision=options.precision,
            engine=options.engine,
            plan=plan,
            next_position=spans.next_position,
            raw_bytes=sum(array.nbytes for array in originals) // num_stored * plan.seq_len,
            stored_bytes=sum(info.nbytes for info in infos),
            seconds=time.perf_counter() - start_time,
        )
        # What kvmnn recorded of the source's files does not hold for the output.
        chunks = ((number, array.reshape(-1).view(np.uint8)) for number, array in enumerate(restored_arrays))
        write_file(file, output, infos, chunks, strip_internal_metadata(source.metadata))
        if not file.is_device:
            file.open_sidecar(SIDECAR_SUFFIX).write(render_sidecar(result.document, spans))
        file.commit()
    return result


def check_output_path(output: str) -> None:
    """Raise `OptionError` for an output that cannot contain a cache."""
    output_format = find_array_format(output)
    if output_format is None or not output_format.is_multi_array or os.path.isdir(output):
        raise OptionError(f"{output}: expected a .npz or .safetensors file as output")


def _resolve_axes(cache: str, source: Source, axes: str | None, tokens: int | None) -> AxisHints:
    """Return the axes of the caller, of an earlier compression, or of a packed cache, in this order."""
    if axes is not None:
        return AxisHints(axes, "--axes")
    sidecar = _read_sidecar(cache)
    if sidecar is not None and isinstance(recorded_axes := sidecar.value.get("axes"), str):
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
