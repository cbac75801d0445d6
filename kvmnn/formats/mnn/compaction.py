"""Compact packed files as the engine compacts its caches: in place, with stale rows and unchanged file sizes.

A plan comes from `kvmnn plan`, `dump-kv` or `eval`. The engine does not store the original positions of the
remaining tokens; they are written to a JSON sidecar next to the files.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.parallel import Progress
from ..._util.text import LOSSY, UNCHANGED, format_layers, pluralize
from ..._util.validation import validate_int
from ...arrays.completeness import require_complete
from ...arrays.engine_cache import positions_to_runs
from ...arrays.layers import collect_layer_arrays
from ...arrays.source import COMPACTED_TEXT, list_losses, qualify_label
from ...bundle.passthrough import POSITIONS_NAME, TOKEN_IDS_NAME
from ...dense import RopeConfig
from ...dtypes import Bytes, Positions
from ...errors import KvmnnError, MissingOptionError, OptionError, SourceError
from ...files.atomic import DirectoryOutput, StagedFile, wrap_os_errors
from ...files.mapped_file import STDIN, MappedFile
from ...files.schema import JsonReader, Record, json_key, parse_document, read_bounded
from ...packed import cache_info
from ...packed.cache import PackedCache
from ...packed.cache_info import (
    CACHE_SIDECAR_SUFFIX,
    CacheInfo,
    LayerInfo,
    PositionRuns,
    TokenIdsFingerprint,
    build_cache_document,
    format_cache_summary,
    format_utilisation,
)
from ...packed.compaction import ReservePair, check_reserve, parse_pairs
from ..key_rotation import RerotationResult, expand_position_runs
from ..sidecars import parse_layer_number
from .packed_files import (
    check_leftover_layers,
    format_warning_lines,
    has_gaps,
    join_warnings,
    list_loading_files,
    list_position_warnings,
    list_prefix_files,
    validate_prefix_name,
)
from .packed_reader import PackedCacheReader
from .packer import RerotationPlan, plan_rerotation, resolve_prefix_name
from .prefix_writer import add_losses
from .row_hashes import dump_prefix_document
from .token_ids import parse_token_ids

_MAX_PLAN_BYTES: Final = 256 << 20
_FULL_CACHE_LABEL: Final = "full"
_MAX_SHOWN_LABELS: Final = 8


@dataclass(frozen=True)
class CompactionPlan:
    """The tokens of one layer to retain."""

    #: Number of last tokens that form the window; None for all.
    remove: int | None
    #: Pairs ``(begin, size)`` of the window that stay, ascending; begin counts from the window's start.
    reserve: tuple[ReservePair, ...]


def read_compaction_plans(path: str, info: CacheInfo, *, label: str | None = None) -> list[CompactionPlan]:
    """Read which tokens each layer of a cache retains; layers may differ.

    Parameters
    ----------
    path
        A JSON file (``"-"``: standard input): a list of ``{"layer": 0, "remove": N, "pairs": [[begin, size], ...]}``
        (``kvmnn plan``, ``-o`` or ``--json``); ``positions.json`` of ``kvmnn dump-kv --policy``, or its folder; or what
        ``kvmnn eval --plot DIR --json`` prints.
    info
        The cache.
    label
        Label of the policy, for an evaluation of several.

    Raises
    ------
    KvmnnError
        When the file is none of these, lacks a plan for a layer, retains other tokens than the cache contains or
        different ones in each head, or belongs to another text.
    MissingOptionError
        When an evaluation has several policies.
    """
    file = os.path.join(path, POSITIONS_NAME) if os.path.isdir(path) else path
    plans = _parse_plan_file(file, info, label)
    for layer, plan in zip(info.layers, plans, strict=True):
        try:
            apply_plan(layer, plan)
        except OptionError as error:
            raise SourceError(f"{'standard input' if file == STDIN else file}: {error}") from None
    return plans


def _parse_plan_file(file: str, info: CacheInfo, label: str | None) -> list[CompactionPlan]:
    if file == STDIN:
        stream = MappedFile(STDIN, max_bytes=_MAX_PLAN_BYTES)
        document = parse_document(stream.read_head(stream.size), stream.label, _MAX_PLAN_BYTES)
    else:
        document = parse_document(read_bounded(Path(file), _MAX_PLAN_BYTES), file, _MAX_PLAN_BYTES)
    if isinstance(document.value, dict) and "traces" in document.value:
        return _parse_evaluation_plans(document, info, label)
    if label is not None:
        raise SourceError(f"{document.label}: is no result of eval, of whose policies one could be named")
    if isinstance(document.value, dict) and "layers" in document.value:
        entries = document.get("layers").read_list()
        if any(isinstance(entry.value, dict) and {"pairs", "heads"} & entry.value.keys() for entry in entries):
            return _parse_pair_plans(document, entries, info)
        if file != STDIN:
            _check_token_ids(Path(file), info)
        tokens_seen = document.get("tokens_seen").read_int(1) if "tokens_seen" in document.value else None
        entry_by_layer = {parse_layer_number(entry, index): entry for index, entry in enumerate(entries)}
        positions_by_layer = {layer: entry.get("positions") for layer, entry in entry_by_layer.items()}
        return _parse_position_plans(document, info, positions_by_layer, tokens_seen)
    return _parse_pair_plans(document, document.read_list(), info)


def _parse_pair_plans(document: JsonReader, entries: Sequence[JsonReader], info: CacheInfo) -> list[CompactionPlan]:
    plans: dict[int, CompactionPlan] = {}
    for entry in entries:
        if isinstance(entry.value, dict) and "heads" in entry.value:
            raise _make_heads_differ_error(document.label, entry.get("layer").read_int(0))
        pairs = []
        for pair in entry.get("pairs").read_list():
            begin, size = pair.read_list(2, 2)
            pairs.append((begin.read_any_int(), size.read_any_int()))
        plans[entry.get("layer").read_int(0)] = CompactionPlan(entry.get("remove").read_int(0), tuple(pairs))
    num_layers = len(info.layers)
    if sorted(plans) != list(range(num_layers)) or len(entries) != num_layers:
        layers = sorted(entry.get("layer").read_int(0) for entry in entries)
        layers_text = f" for {format_layers(layers)}" if layers else ""
        raise SourceError(
            f"{document.label}: has {pluralize(len(entries), 'plan')}{layers_text}: expected one for each of "
            f"{format_layers(range(num_layers))}"
        )
    return [plans[layer] for layer in range(num_layers)]


def _parse_evaluation_plans(document: JsonReader, info: CacheInfo, label: str | None) -> list[CompactionPlan]:
    """Parse the plans that an evaluation recorded for a policy at the end of its first text."""
    trace_by_label = {trace.get("label").read_str(): trace for trace in document.get("traces").read_list()}
    labels = [name for name in trace_by_label if name != _FULL_CACHE_LABEL]
    if not labels:
        raise SourceError(f"{document.label}: records no tokens that a policy kept: eval does with --plot DIR")
    if label is None and len(labels) > 1:
        raise MissingOptionError(
            f"{document.label}: is of {len(labels)} policies: --plan-label names one: "
            + ", ".join(map(repr, labels[:_MAX_SHOWN_LABELS]))
            + (" ..." if len(labels) > _MAX_SHOWN_LABELS else "")
        )
    selected_label = labels[0] if label is None else label
    if selected_label not in trace_by_label:
        labels_text = ", ".join(map(repr, list(trace_by_label)[:_MAX_SHOWN_LABELS]))
        raise SourceError(f"{document.label}: has no policy {selected_label!r}: expected one of {labels_text}")
    trace = trace_by_label[selected_label]
    if "kept" not in trace.value or not trace.get("kept").value:
        raise SourceError(f"{document.label}: does not record the tokens that each layer kept: repeat the evaluation")
    positions_by_layer = {
        entry.get("layer").read_int(0): entry.get("positions") for entry in trace.get("kept").read_list()
    }
    return _parse_position_plans(
        document, info, positions_by_layer, trace.get("step_tokens").read_list(min_len=1)[-1].read_int(1)
    )


def _parse_position_plans(
    document: JsonReader, info: CacheInfo, positions_by_layer: dict[int, JsonReader], tokens_seen: int | None
) -> list[CompactionPlan]:
    layer_numbers = [layer.layer for layer in info.layers]
    if sorted(positions_by_layer) != layer_numbers:
        raise SourceError(
            f"{document.label}: has positions of {pluralize(len(positions_by_layer), 'layer')}, not of "
            f"{len(layer_numbers)}"
        )
    return [_plan_from_positions(layer, positions_by_layer[layer.layer], tokens_seen) for layer in info.layers]


def _plan_from_positions(layer: LayerInfo, node: JsonReader, tokens_seen: int | None) -> CompactionPlan:
    kept_positions = _parse_positions(node, layer.layer)
    stored_positions = expand_position_runs(layer.text_position_runs)
    indices = np.searchsorted(stored_positions, kept_positions)
    is_beyond = indices == len(stored_positions)
    missing_positions = kept_positions[is_beyond if is_beyond.any() else stored_positions[indices] != kept_positions]
    if missing_positions.size:
        raise SourceError(
            f"{node.label}: layer {layer.layer} keeps the token at position {missing_positions[0]:,}, and the cache "
            f"holds {pluralize(len(stored_positions), 'token')} up to {stored_positions[-1]:,}: expected the plan of "
            f"this text"
        )
    if tokens_seen is not None and stored_positions[-1] >= tokens_seen:
        raise SourceError(
            f"{node.label}: is of a text of {pluralize(tokens_seen, 'token')}, and layer {layer.layer} of the cache "
            f"holds tokens up to position {stored_positions[-1]:,}"
        )
    return _plan_from_indices(indices, len(stored_positions))


def _plan_from_indices(indices: Positions, num_tokens: int) -> CompactionPlan:
    """Make the plan that retains these tokens of `num_tokens`; the window starts after a first run that begins at 0."""
    runs = positions_to_runs(indices)
    window_start = runs[0][1] if runs and runs[0][0] == 0 else 0
    pairs = tuple((begin - window_start, size) for begin, size in runs if begin >= window_start and size)
    return CompactionPlan(num_tokens - window_start, pairs)


def _parse_positions(node: JsonReader, layer: int) -> Positions:
    """Parse the positions of one layer; `SourceError` if heads have different ones."""
    values: Any = node.value
    is_per_head = isinstance(values, list) and bool(values) and all(isinstance(row, list) for row in values)
    rows = node.read_list() if is_per_head else [node]
    for row in rows:
        if not isinstance(row.value, list) or not all(type(n) is int and 0 <= n < 1 << 31 for n in row.value):
            raise row.error("a list of positions")
    if any(row.value != rows[0].value for row in rows):
        raise _make_heads_differ_error(node.label, layer)
    positions = np.array(rows[0].value, np.int64)
    if (np.diff(positions) <= 0).any():
        raise node.error("ascending positions")
    return positions


def _make_heads_differ_error(label: str, layer: int) -> KvmnnError:
    return SourceError(
        f"{label}: layer {layer}: keeps tokens of its own in each KV head, and packed files hold the same in all: "
        "expected a plan of a policy that keeps those (streaming, recent_only ...)"
    )


def _check_token_ids(file: Path, info: CacheInfo) -> None:
    """Raise `SourceError` if the ids in a dump's folder are not those of the cache."""
    ids_path = file.with_name(TOKEN_IDS_NAME)
    if info.token_ids is None or not ids_path.is_file():
        return
    ids = parse_token_ids(read_bounded(ids_path, _MAX_PLAN_BYTES), str(ids_path))
    if len(ids) != info.token_ids.count or TokenIdsFingerprint.from_ids(ids) != info.token_ids:
        raise SourceError(f"{ids_path}: are not the {info.token_ids.count:,} token ids that the cache was made from")


@dataclass(frozen=True, kw_only=True)
class CompactResult(Record):
    """Result of compacting a prefix cache into a directory."""

    #: Paths of input and output.
    input: str
    output: str
    #: Elapsed time.
    seconds: float
    #: One line for each inferred property of the input.
    notes: tuple[str, ...] = ()
    #: Rotation of K to the first positions; None if not requested.
    rerotated: RerotationResult | None = field(default=None, metadata={"omit": True})
    #: The layout and layers before, and afterwards.
    after: CacheInfo = field(metadata={"key": "cache", "convert": build_cache_document})
    before: CacheInfo = field(metadata={"json": False})

    @property
    def warnings(self) -> list[str]:
        """Return lines about problems when MNN loads the files; empty for none."""
        return list_position_warnings(self.after)

    @property
    @json_key("warnings", after="rerotated")
    def _joined_warnings(self) -> list[str]:
        return join_warnings(self.warnings)

    @property
    @json_key(before="seconds")
    def tokens_before(self) -> int:
        """Return the number of tokens of all layers before compaction."""
        return sum(layer.tokens for layer in self.before.layers)

    @property
    @json_key(before="seconds")
    def tokens_after(self) -> int:
        """Return the number of tokens of all layers after compaction."""
        return sum(layer.tokens for layer in self.after.layers)

    @property
    @json_key(after="output")
    def label(self) -> str | None:
        """Return ``LOSSY`` if any token was dropped or any K was rotated, else ``UNCHANGED``.

        ``UNCHANGED copy of LOSSY K and V`` where these had lost something before.
        """
        is_rounded = self.rerotated is not None and self.rerotated.label == LOSSY
        label = LOSSY if self.tokens_after < self.tokens_before or is_rounded else UNCHANGED
        return qualify_label(label, list_losses(self.after.loss))

    def _describe_tokens(self) -> str:
        """Return how many tokens of how many, of each layer where all layers are equal."""
        counts = {
            (after.tokens, before.tokens) for after, before in zip(self.after.layers, self.before.layers, strict=True)
        }
        if len(counts) > 1:
            return f"{self.tokens_after:,} of {self.tokens_before:,} tokens of all layers"
        tokens_after, tokens_before = counts.pop()
        return (
            f"{tokens_after:,} of {tokens_before:,} tokens of {'each' if len(self.after.layers) > 1 else 'the'} layer"
        )

    def __str__(self) -> str:
        lines = [
            f"{self.output}: prefix {self.after.name!r}, {format_cache_summary(self.after)}",
            f"  {format_utilisation(self.after)}",
            f"  {self.label}: {self._describe_tokens()} stay; the files "
            "keep their size (repack or pack --capacity makes them smaller)",
            *(f"  {line}" for line in list_losses(self.after.loss)),
        ]
        if self.tokens_after < self.tokens_before:
            lines.append(
                "  rows of evicted tokens stay in the files, as the engine leaves them; which rows are\n"
                f"  live only {self.after.name}{CACHE_SIDECAR_SUFFIX} says: copy it with them"
            )
        lines += [f"  {self.rerotated}"] if self.rerotated else []
        return "\n".join([*lines, *format_warning_lines(self.warnings)])


def apply_plan(layer: LayerInfo, plan: CompactionPlan) -> LayerInfo:
    """Return the layer after its plan is applied."""
    remove = layer.tokens if plan.remove is None else plan.remove
    try:
        pairs = parse_pairs(plan.reserve)
        check_reserve(layer.tokens, validate_int(remove, "remove", 0), pairs, is_quantized=False)
    except KvmnnError as exc:
        raise OptionError(f"layer {layer.layer}: {exc}") from None
    start = layer.tokens - remove
    retained_ranges = [(0, start), *((start + start_token, size) for start_token, size in pairs)]
    tokens = start + sum(size for _, size in pairs)
    if not tokens:
        raise OptionError(
            f"layer {layer.layer}: nothing would stay of its {layer.tokens} tokens: --remove N drops only the last N "
            "(0: none), --reserve BEGIN:SIZE keeps some of these"
        )

    def select_runs(positions: PositionRuns) -> PositionRuns:
        slices = (_iter_run_slices(positions, begin, size) for begin, size in retained_ranges)
        return cache_info.merge_runs(run for runs in slices for run in runs)

    text_positions = None if layer.text_positions is None else select_runs(layer.text_positions)
    return replace(layer, tokens=tokens, positions=select_runs(layer.positions), text_positions=text_positions)


def _iter_run_slices(positions: PositionRuns, begin: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the runs that contain the stored tokens ``[begin, begin + size)``."""
    num_passed = 0
    for first, length in positions:
        slice_start, slice_end = max(begin - num_passed, 0), min(begin + size - num_passed, length)
        if slice_start < slice_end:
            yield first + slice_start, slice_end - slice_start
        num_passed += length


def compact(
    reader: PackedCacheReader,
    plans: Sequence[CompactionPlan],
    output: str,
    *,
    name: str | None = None,
    dialect: str = "fork",
    rerotate: bool = False,
    rope: RopeConfig | str | None = None,
    model: str | None = None,
    ignore_contradictions: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> CompactResult:
    """Copy packed files into a directory and compact the copies, all or none.

    Parameters
    ----------
    reader
        The files: `open_packed`.
    plans
        One for each layer, or one for all.
    output
        The directory; it is created if necessary.
    name
        Name of the prefix to write; None keeps the existing name.
    dialect
        The dialect whose rules apply (`kvmnn.PackedCache`).
    rerotate
        Rotate K to the positions 0, 1, 2 ..., where MNN continues after loading.
    rope, model
        RoPE parameters of K: `kvmnn.Rotary`, or a model that has them; otherwise they are searched.
    ignore_contradictions
        Take a `rope` that K contradicts.
    force
        Replace files that exist; the inputs are never replaced.
    progress
        Called with bytes of packed files.

    Raises
    ------
    OptionError
        When there is no name.
    KvmnnError
        For plans that cannot be applied unchanged; nothing is written then.
    """
    start_time = time.perf_counter()
    info = reader.info
    layer_plans = _expand_plans(reader, plans, dialect)  # what no name mends comes first
    name = resolve_prefix_name(name, info)
    with DirectoryOutput(output, force=force, exclude=reader.files.opened_files) as directory:
        layers = tuple(apply_plan(layer, plan) for layer, plan in zip(info.layers, layer_plans, strict=True))
        info = add_losses(info, reader.ignored_conflict)
        after = replace(info, kind="prefix", name=validate_prefix_name(name), layers=layers, next_position=None)
        if info.next_token_position > after.next_token_position and has_gaps(after):
            after = replace(after, next_position=info.next_token_position)
        rerotation = None
        if rerotate:
            keys = [entry for entry in collect_layer_arrays(reader.to_source().arrays) if entry.part == "key"]
            rerotation = plan_rerotation(
                after,
                keys,
                rope,
                model,
                label=reader.files.path,
                evidence_info=info,
                ignore_contradictions=ignore_contradictions,
            )
            after = rerotation.info
        _write_compacted_files(reader, layer_plans, after, directory, dialect, rerotation, progress)
        directory.commit()
    return CompactResult(
        input=reader.files.path,
        output=output,
        before=info,
        after=after,
        seconds=time.perf_counter() - start_time,
        notes=(*reader.notes, *list_losses(info.loss), *(rerotation.rope.notes if rerotation else ())),
        rerotated=rerotation.result if rerotation else None,
    )


def _expand_plans(reader: PackedCacheReader, plans: Sequence[CompactionPlan], dialect: str) -> list[CompactionPlan]:
    """Return a plan for each layer, validated as far as possible without applying it."""
    info = reader.info
    if info.layout.is_quantized:
        raise KvmnnError(f"{reader.files.path}: an int8 cache: the engine keeps no part of a window of those")
    require_complete(reader.completeness, reader.files.path, "a compacted cache")
    if len(plans) not in (1, len(info.layers)):
        raise KvmnnError(f"{len(plans)} plans for {len(info.layers)} layers: expected one, or one for each")
    layer_plans = list(plans) if len(plans) == len(info.layers) else list(plans) * len(info.layers)
    if dialect == "upstream":
        _check_upstream(info, layer_plans)
    return layer_plans


def _write_compacted_files(
    reader: PackedCacheReader,
    plans: Sequence[CompactionPlan],
    after: CacheInfo,
    output_folder: DirectoryOutput,
    dialect: str,
    rerotation: RerotationPlan | None,
    progress: Progress | None,
) -> None:
    info = reader.info
    names = list_prefix_files(after)
    output_folder.check_names(names)
    output_folder.replace_files(list_loading_files(after))  # as `write_prefix` does
    check_leftover_layers(output_folder.target, after, names)
    for files, before, layer, plan in zip(reader.files.layers, info.layers, after.layers, plans, strict=True):
        key, value = (
            _copy_file(path, output_folder.open_file(target))
            for path, target in zip((files.key, files.value), names[2 * layer.layer :], strict=False)
        )
        _compact_layer(key, value, info, before, plan, layer.tokens, dialect)
        if rerotation:
            with _open_mapped(key) as keys:
                rerotation.rotate_file(layer.layer, keys, info.get_layer_layout(layer), layer.capacity)
        if progress:
            progress(files.key_bytes + files.value_bytes)
    for file_name in names[2 * len(after.layers) :]:
        file = output_folder.open_file(file_name)
        if file_name.endswith(CACHE_SIDECAR_SUFFIX):
            losses = rerotation.result.losses if rerotation else ()
            recorded_info = add_losses(after, _describe_eviction(info, after), *losses)
            file.write(dump_prefix_document(recorded_info, output_folder.staging_folder))


def _describe_eviction(before: CacheInfo, after: CacheInfo) -> str:
    """Return what the document of a compacted cache is to say of its tokens; empty if all stay."""
    num_after, num_before = (sum(layer.tokens for layer in info.layers) for info in (after, before))
    if num_after == num_before:
        return ""
    pairs = {(layer.tokens, old.tokens) for layer, old in zip(after.layers, before.layers, strict=True)}
    if len(pairs) == 1:
        ((num_after, num_before),) = pairs
        return f"{COMPACTED_TEXT}{num_after:,} of {num_before:,} tokens are here"
    return f"{COMPACTED_TEXT}{num_after:,} of {num_before:,} tokens of all layers are here"


def _check_upstream(info: CacheInfo, plans: Sequence[CompactionPlan]) -> None:
    for layer, plan in zip(info.layers, plans, strict=True):
        if plan.remove in (None, layer.tokens):
            raise KvmnnError(
                f"layer {layer.layer}: MNN 3.6.1 drops the cache where remove is all {layer.tokens} tokens: "
                "remove fewer, or choose the fork's dialect"
            )


def _copy_file(path: str, file: StagedFile) -> StagedFile:
    with wrap_os_errors(file.target):
        shutil.copyfile(path, file.path)
    return file


def _compact_layer(
    key: StagedFile,
    value: StagedFile,
    info: CacheInfo,
    layer: LayerInfo,
    plan: CompactionPlan,
    expected_tokens: int,
    dialect: str,
) -> None:
    with _open_mapped(key) as keys, _open_mapped(value) as values:
        layout, capacity = info.get_layer_layout(layer), layer.capacity
        cache = PackedCache.from_buffers(
            layout, keys, values, layer.tokens, capacity=capacity, copy=False, dialect=dialect
        )
        cache.realloc(layer.tokens if plan.remove is None else plan.remove, plan.reserve)
        if len(cache) != expected_tokens:
            raise KvmnnError(f"layer {layer.layer}: {len(cache)} tokens stayed, the plan keeps {expected_tokens}")
        del cache


@contextmanager
def _open_mapped(file: StagedFile) -> Iterator[Bytes]:
    with wrap_os_errors(file.target), open(file.path, "r+b") as handle:
        mapping = mmap.mmap(handle.fileno(), 0)
    yield np.frombuffer(mapping, np.uint8)
    mapping.flush()
