"""Select the dumps to measure, with the reference's filters and skip reasons, and group them into compression units."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

from .._util.dataclass import dataclass
from ..arrays import layers
from ..arrays.completeness import Completeness, merge_completeness
from ..arrays.source import Source
from ..dtypes import PARTS, Part
from ..errors import KvmnnError, LimitError, MissingFileError, OptionError, SourceError
from ..files.change_detection import FileState
from ..files.schema import Record, json_key, read_bounded
from ..formats import detect, find_readable_entry
from ..formats import open as open_source
from .options import MeasureOptions, NothingSelectedError, Scope
from .tensor_reader import ArrayTensor, DumpTensor, EmptyTensor, FileTensor


@dataclass
class CodedInputInfo(Record):
    """Quantised inputs, whose elements were dequantised before they were measured."""

    json_keys = "dequantised"

    #: Names of the quantised types; empty if nothing was dequantised.
    types: tuple[str, ...] = ()
    #: Bytes of the quantised files; None if an input is not a file (standard input, a URL).
    nbytes: int | None = 0
    #: Bytes of these that are spare capacity after the valid tokens.
    room_bytes: int = 0

    def add_source(self, source: Source) -> None:
        """Count a source, if its elements were dequantised."""
        if source.dequantized_types:
            self.types = tuple(dict.fromkeys((*self.types, *source.dequantized_types)))
            nbytes = count_input_bytes(source)
            self.nbytes = None if nbytes is None or self.nbytes is None else self.nbytes + nbytes
            self.room_bytes += source.engine_cache.unused_bytes if source.engine_cache is not None else 0

    def describe(self, element_bytes: int, coded_bytes: int, label: str) -> list[str]:
        """Describe what the elements were dequantised from, and the ratio of `coded_bytes` to the input; empty if
        nothing was.
        """
        if not self.types:
            return []
        line = f"words dequantised from {', '.join(self.types)}"
        if self.nbytes:
            room = min(self.room_bytes, self.nbytes - 1)
            input_text = "the input without room" if room else "the input"
            line += f": the input has {self.nbytes:,} bytes" + (f", {room:,} of them room" if room else "")
            line += (
                f", its words {element_bytes:,}; {label} is {coded_bytes / (self.nbytes - room):.2f} times {input_text}"
            )
        return [line]

    @property
    @json_key(omit=True)
    def dequantised(self) -> dict[str, Any] | None:
        """The inputs as JSON values; None if nothing was dequantised."""
        room = {"room_bytes": self.room_bytes} if self.room_bytes else {}
        return {"types": self.types, "input_bytes": self.nbytes, **room} if self.types else None


def count_input_bytes(source: Source) -> int | None:
    """Return the number of bytes of the files that a source was read from; None if one of its inputs is not a file."""
    if not source.inputs or not all(map(os.path.exists, source.inputs)):
        return None
    files = {os.path.realpath(path) for path in source.files if os.path.isfile(path)}
    return sum(map(os.path.getsize, files)) or None


_MAX_META_BYTES = 64 << 20
_SUPPORTED_ITEMSIZES = (2, 4)


@dataclass(frozen=True)
class DumpEntry:
    """One dump: K and V of some tokens of a layer."""

    #: From its metadata; head_dim is that of K, if V has another.
    layer: int
    seq_start: int
    tokens: int
    kv_heads: int
    head_dim: int
    stage: str
    #: Empty if there is none.
    run_id: str
    keys: DumpTensor
    values: DumpTensor

    def get_tensor(self, part: Part) -> DumpTensor:
        """Return K or V."""
        return self.keys if part == "key" else self.values

    def is_complete(self) -> bool:
        """Return whether both tensors have the size that the metadata states."""
        return self.keys.is_complete() and self.values.is_complete()

    @property
    def location(self) -> str:
        """Path of a tensor's file, of one whose size differs from the metadata if there is one; else run and layer."""
        tensors = sorted((self.keys, self.values), key=lambda tensor: tensor.is_complete())
        files = [str(tensor.path) for tensor in tensors if isinstance(tensor, FileTensor)]
        return files[0] if files else f"{self.run_id}: layer {self.layer}"


@dataclass
class DumpSelection:
    """Dumps selected from the inputs, and what was excluded."""

    #: In the order of the search.
    entries: list[DumpEntry] = field(default_factory=list)
    #: Distinct run ids or directories.
    dumps: set[str] = field(default_factory=set)
    #: Layers in the inputs, whether or not in the scope.
    layers: set[int] = field(default_factory=set)
    #: Number of metadata files (or pairs of arrays) that were examined.
    num_scanned: int = 0
    #: Number of fp32 entries that are rounded to fp16 (`Scope.to_fp16`).
    num_rounded: int = 0
    #: Number of fp32 entries that are measured as fp32.
    num_fp32: int = 0
    #: Number of excluded entries by reason, in order of first occurrence.
    skip_counts: Counter[str] = field(default_factory=Counter)
    #: First excluded file (or layer) for each reason.
    skip_examples: dict[str, str] = field(default_factory=dict)
    #: Inputs that were dequantised.
    coded_input: CodedInputInfo = field(default_factory=CodedInputInfo)
    #: The part of the model's state that each input contains, if known.
    completeness_by_input: dict[str, Completeness | None] = field(default_factory=dict)
    #: Number of entries that each option excluded.
    filter_counts: Counter[str] = field(default_factory=Counter)

    @property
    def completeness(self) -> Completeness | None:
        """Return the part of the model's state that the arrays contain; None if unknown."""
        inputs = list(self.completeness_by_input.items())
        return inputs[0][1] if len(inputs) == 1 else merge_completeness(inputs)

    def require_entries(self) -> None:
        """Raise `NothingSelectedError` if nothing is selected."""
        if not self.entries:
            raise NothingSelectedError("No entries selected after filtering. Check --dump-dir/--stage/--scope options.")

    def describe_exclusions(self) -> str:
        """List the options and faults that excluded entries, the most frequent first."""
        counts = self.filter_counts + Counter(
            {_SKIP_REASON_TEXTS.get(name, name): n for name, n in self.skip_counts.items()}
        )
        return ", ".join(f"{number:,} of {self.num_scanned:,} by {name}" for name, number in counts.most_common())

    def check_size(self, max_bytes: int | None) -> None:
        """Raise `LimitError` if the entries have more bytes than `max_bytes`."""
        nbytes = sum(entry.tokens * (entry.keys.token_bytes + entry.values.token_bytes) for entry in self.entries)
        if max_bytes is not None and nbytes > max_bytes:
            raise LimitError(f"the entries hold {nbytes} raw bytes, above the limit of {max_bytes}")

    def list_files(self) -> list[str]:
        """List the binary files of all entries that are dumps."""
        tensors = (tensor for entry in self.entries for tensor in (entry.keys, entry.values))
        return [str(tensor.path) for tensor in tensors if isinstance(tensor, FileTensor)]

    def check_distinct_files(self) -> None:
        """Raise `OptionError` if inputs overlap, so that a file would be counted twice."""
        real_paths: set[str] = set()
        for path in self.list_files():
            real_path = os.path.realpath(path)
            if real_path in real_paths:
                raise OptionError(f"{path}: is taken twice: the inputs overlap")
            real_paths.add(real_path)

    def count_skip(self, reason: str, example: str) -> None:
        """Count a skipped entry."""
        self.skip_counts[reason] += 1
        self.skip_examples.setdefault(reason, example)

    def add_entry(self, entry: DumpEntry, dump: str) -> None:
        """Add an entry."""
        self.entries.append(entry)
        self.dumps.add(dump)
        tensors = entry.keys, entry.values
        self.num_rounded += any(tensor.stored_itemsize > tensor.measured_itemsize for tensor in tensors)
        self.num_fp32 += any(tensor.measured_itemsize == 4 for tensor in tensors)


_STAGE_OPTION, _LAYER_OPTIONS, _LENGTH_OPTIONS = "--stage", "--scope or its layers", "--min-seq-len or --max-seq-len"
_SKIP_REASON_TEXTS = {"skip_fp32_strict": "--strict-fp16 (they are fp32)"}


class _SkipError(Exception):
    """A dump is skipped for the reason in the message."""


def select_dumps(roots: Iterable[str | os.PathLike[str]], scope: Scope) -> DumpSelection:
    """Select the dumps in directories of MNN KV dumps.

    Raises
    ------
    NothingSelectedError
        When a directory has no metadata file.
    SourceError
        When there is no such directory, or a metadata file contains JSON that is no object.
    """
    selection = DumpSelection()
    for root in roots:
        add_dumps(selection, Path(os.path.abspath(root)), scope)
    return selection


def is_dump_folder(path: str) -> bool:
    """Return whether a path is a directory to be searched for dumps: no other format recognises it."""
    return os.path.isdir(path) and detect(path).name in ("dump", "folder")


def add_dumps(selection: DumpSelection, root: Path, scope: Scope) -> None:
    """Add the dumps below one directory to `selection`; raise as `select_dumps` does."""
    if not root.is_dir():
        raise (SourceError if root.exists() else MissingFileError)(f"{root}: is not a directory")
    meta_paths = sorted(root.rglob("meta_*.json"))
    if not meta_paths:
        raise NothingSelectedError(
            f"{root}: has no meta_*.json file below it, so it is not an MNN KV dump{_suggest_readable(str(root))}"
        )
    with suppress(KvmnnError):  # faults are counted below, as the reference counts them
        selection.completeness_by_input[str(root)] = open_source(root).completeness
    for meta_path in meta_paths:
        selection.num_scanned += 1
        try:
            _add_dump(selection, meta_path, scope)
        except _SkipError as reason:
            selection.count_skip(str(reason), str(meta_path))


def _suggest_readable(root: str) -> str:
    """Suggest an entry of a folder without dumps that kvmnn can read; empty if there is none."""
    readable_name = find_readable_entry(root)
    return (
        ""
        if readable_name is None
        else f"; {readable_name!r} in it is what kvmnn reads: name that, or --jobs N takes each file"
    )


def add_source(selection: DumpSelection, source: Source, scope: Scope, label: str) -> None:
    """Add K and V of every layer of any source to `selection`, or K alone of an engine without V; stage ``"unknown"``.

    Raises
    ------
    SourceError
        When arrays have no place in a cache.
    """
    arrays = layers.collect_layers_or_latents(source)
    values = {entry.layer: entry for entry in arrays if entry.part == "value"}
    selection.coded_input.add_source(source)
    selection.completeness_by_input[label] = source.completeness
    for key in (entry for entry in arrays if entry.part == "key"):
        selection.num_scanned += 1
        value = values.get(key.layer)
        heads, tokens, dims = key.geometry
        if value is not None and value.geometry[:2] != (heads, tokens):
            raise SourceError(
                f"{label}: layer {key.layer}: keys are {list(key.array.shape)} and values "
                f"{list(value.array.shape)}: expected as many heads and tokens"
            )
        is_fp32 = any(entry is not None and entry.array.dtype == "fp32" for entry in (key, value))
        if scope.stage not in ("both", "unknown"):
            selection.filter_counts[_STAGE_OPTION] += 1
            continue
        selection.layers.add(key.layer)
        if not scope.includes_layer(key.layer):
            selection.filter_counts[_LAYER_OPTIONS] += 1
            continue
        if not scope.includes_length(tokens):
            selection.filter_counts[_LENGTH_OPTIONS] += 1
            continue
        if is_fp32 and scope.strict_fp16:
            selection.count_skip("skip_fp32_strict", f"{label}: layer {key.layer}")
            continue
        k = ArrayTensor(key, to_fp16=scope.to_fp16)
        v = EmptyTensor(k) if value is None else ArrayTensor(value, to_fp16=scope.to_fp16)
        selection.add_entry(DumpEntry(key.layer, 0, tokens, heads, dims, "unknown", label, k, v), label)


def _add_dump(selection: DumpSelection, meta_path: Path, scope: Scope) -> None:
    """Add the dump of a metadata file, checked in the reference's order; raise `_SkipError` for a fault."""
    fields = _load_meta(meta_path)
    stage = str(fields.get("stage", "unknown"))
    if scope.stage not in ("both", stage):
        selection.filter_counts[_STAGE_OPTION] += 1
        return
    layer, seq_start, tokens, heads, dims, itemsize = _parse_int_fields(fields)
    selection.layers.add(layer)
    if not scope.includes_layer(layer):
        selection.filter_counts[_LAYER_OPTIONS] += 1
        return
    if min(tokens, heads, dims) <= 0:
        raise _SkipError("invalid_shape")
    if not scope.includes_length(tokens):
        selection.filter_counts[_LENGTH_OPTIONS] += 1
        return
    files = _find_binaries(meta_path, fields)
    if itemsize not in _SUPPORTED_ITEMSIZES:
        raise _SkipError(f"unsupported_bytes_per_elem_{itemsize}")
    if itemsize == 4 and scope.strict_fp16:
        raise _SkipError("skip_fp32_strict")
    keys, values = (FileTensor(file, (tokens, heads, dims), itemsize, to_fp16=scope.to_fp16) for file in files)
    run_id = fields.get("run_id")
    run_id = run_id if isinstance(run_id, str) else ""
    entry = DumpEntry(layer, seq_start, tokens, heads, dims, stage, run_id, keys, values)
    selection.add_entry(entry, run_id or str(meta_path.parent))


def _load_meta(meta_path: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(meta_path.stat().st_mode):
            raise _SkipError("meta_parse_error")
        fields = json.loads(read_bounded(meta_path, _MAX_META_BYTES).decode())
    except (OSError, SourceError, ValueError, RecursionError):
        raise _SkipError("meta_parse_error") from None
    if not isinstance(fields, dict):
        raise SourceError(f"{meta_path}: holds JSON that is not an object")
    return fields


def _parse_int_fields(fields: dict[str, Any]) -> tuple[int, int, int, int, int, int]:
    """Parse layer_id, seq_start, seq_len, kv_heads, head_dim and bytes_per_elem with `int`, as the reference does."""
    try:
        return (
            int(fields.get("layer_id", -1)),
            int(fields.get("seq_start", 0)),
            int(fields.get("seq_len", 0)),
            int(fields.get("kv_heads", 0)),
            int(fields.get("head_dim", 0)),
            int(fields.get("bytes_per_elem", 0)),
        )
    except (TypeError, ValueError, OverflowError):
        raise _SkipError("meta_invalid_numeric_fields") from None


def _find_binaries(meta_path: Path, fields: dict[str, Any]) -> list[FileState]:
    """Find the two binary files."""
    names = [fields.get("k_file"), fields.get("v_file")]
    if not all(isinstance(name, str) and name for name in names):
        raise _SkipError("missing_k_or_v_file")
    paths = [meta_path.parent / str(name) for name in names]
    if not all(_path_exists(path) for path in paths):
        raise _SkipError("missing_k_or_v_binary")
    return [_check_regular_file(path) for path in paths]


def _path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _check_regular_file(path: Path) -> FileState:
    """Return the state of a readable regular file; refuse devices and pipes, which may never end."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _SkipError("binary_read_error")
        with path.open("rb"):
            return FileState.from_path(path)
    except OSError:
        raise _SkipError("binary_read_error") from None


_NO_RUN_ID = "__no_run_id__"


@dataclass(frozen=True)
class CompressionUnit:
    """Dumps that are consecutive along the tokens."""

    #: In order of their first token.
    entries: tuple[DumpEntry, ...]
    #: Tokens in a chunk; the last one may be shorter.
    chunk_tokens: int
    #: Bytes of the format itself for K, and the same for V: framing of chunks, or a table of the dumps.
    extra_bytes: int

    @property
    def layer(self) -> int:
        """The common layer of all its dumps."""
        return self.entries[0].layer

    def get_geometry(self, part: Part) -> tuple[int, int]:
        """Return ``(kv_heads, head_dim)`` of K or V; latent attention has another head_dim for V."""
        _, heads, dims = self.entries[0].get_tensor(part).shape
        return heads, dims

    @property
    def tokens(self) -> int:
        """Total tokens of its dumps."""
        return sum(entry.tokens for entry in self.entries)

    @property
    def parts(self) -> list[Part]:
        """K and V; K alone if nothing is stored as V."""
        return [part for part in PARTS if self.count_raw_bytes(part)]

    def get_itemsize(self, part: Part) -> int:
        """Return the number of bytes of an element of K or V as it is measured: 2 or 4."""
        return self.entries[0].get_tensor(part).measured_itemsize

    def count_elements(self, part: Part) -> int:
        """Return the number of elements of K or V, which is the size of each byte lane."""
        heads, dims = self.get_geometry(part)
        return self.tokens * heads * dims

    def count_raw_bytes(self, part: Part) -> int:
        """Return the number of bytes of K or V as they are measured."""
        return self.tokens * self.entries[0].get_tensor(part).token_bytes

    def count_chunk_bytes(self, part: Part) -> int:
        """Return the number of bytes of the largest chunk of K or V as they are measured."""
        return min(self.chunk_tokens, self.tokens) * self.entries[0].get_tensor(part).token_bytes

    def iter_chunk_tokens(self) -> Iterator[int]:
        """Iterate over the tokens of each chunk."""
        tokens = self.tokens
        for start in range(0, tokens, self.chunk_tokens):
            yield min(self.chunk_tokens, tokens - start)

    def count_chunks(self) -> int:
        """Return the number of chunks of K, which is that of V."""
        return -(-self.tokens // self.chunk_tokens)

    def list_tensors(self, part: Part) -> list[DumpTensor]:
        """List K or V of all its dumps."""
        return [entry.get_tensor(part) for entry in self.entries]

    @property
    def is_rounded(self) -> bool:
        """Return whether all its elements are stored in 32 bits and measured in 16."""
        tensors = [tensor for entry in self.entries for tensor in (entry.keys, entry.values)]
        return all(tensor.stored_itemsize == 4 and tensor.measured_itemsize == 2 for tensor in tensors)

    def is_complete(self) -> bool:
        """Return whether every binary file has the size that its metadata states."""
        return all(entry.is_complete() for entry in self.entries)


def build_units(selection: DumpSelection, options: MeasureOptions) -> list[CompressionUnit]:
    """Group the selected dumps by the entry mode, in order of first appearance."""
    if options.is_grouped:
        groups = _group_entries(selection.entries, options.aggregate_by_stage)
    else:
        groups = [(entry,) for entry in selection.entries]
    return [_build_unit(entries, options) for entries in groups]


def _group_entries(entries: list[DumpEntry], by_stage: bool) -> list[tuple[DumpEntry, ...]]:
    entries_by_key: dict[tuple[object, ...], list[DumpEntry]] = {}
    for entry in entries:
        shapes = entry.keys.shape[1:], entry.values.shape[1:]
        itemsizes = entry.keys.measured_itemsize, entry.values.measured_itemsize
        key = (entry.run_id or _NO_RUN_ID, entry.layer, *shapes, *itemsizes, entry.stage if by_stage else None)
        entries_by_key.setdefault(key, []).append(entry)
    return [tuple(sorted(group, key=lambda entry: entry.seq_start)) for group in entries_by_key.values()]


def _build_unit(entries: tuple[DumpEntry, ...], options: MeasureOptions) -> CompressionUnit:
    tokens = sum(entry.tokens for entry in entries)
    if not options.is_chunked:
        extra_bytes = 4 + 4 * len(entries) if options.entry_mode == "aggregate" else 0
        return CompressionUnit(entries, tokens, extra_bytes)
    chunk_tokens = options.online_chunk_seq if 0 < options.online_chunk_seq < tokens else tokens
    return CompressionUnit(entries, chunk_tokens, -(-tokens // chunk_tokens) * options.online_framing_bytes)
