"""Which dumps are measured: a walk over ``meta_*.json`` files, with the reference's filters and reasons to skip."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..arrays import layers
from ..arrays.completeness import Completeness
from ..arrays.source import Source
from ..dtypes import Part
from ..errors import LimitError, OptionError, SourceError
from ..files.changes import FileState
from ..files.json_document import read_bounded
from ..formats import folder_kind, is_frames, readable_within
from .coded_input import CodedInput
from .options import NothingSelectedError, Scope
from .token_runs import ArrayTensor, FileTensor, NoTensor, Tensor

_MAX_META = 64 << 20
_WIDTHS = (2, 4)


@dataclass(frozen=True)
class Entry:
    """One dump: K and V of some tokens of a layer.

    Parameters
    ----------
    layer, seq_start, tokens, kv_heads, head_dim, stage
        As its metadata says; head_dim is that of K, where V has another.
    run_id
        Empty where there is none.
    keys, values
        Its tensors.
    """

    layer: int
    seq_start: int
    tokens: int
    kv_heads: int
    head_dim: int
    stage: str
    run_id: str
    keys: Tensor
    values: Tensor

    def tensor(self, part: Part) -> Tensor:
        """K or V."""
        return self.keys if part == "key" else self.values

    def is_complete(self) -> bool:
        """Whether both tensors have the bytes that the metadata says."""
        return self.keys.is_complete() and self.values.is_complete()

    @property
    def where(self) -> str:
        """Its file, that of a tensor without the bytes that the metadata says where there is one; or its layer."""
        tensors = sorted((self.keys, self.values), key=lambda tensor: tensor.is_complete())
        files = [str(tensor.path) for tensor in tensors if isinstance(tensor, FileTensor)]
        return files[0] if files else f"{self.run_id}: layer {self.layer}"


@dataclass
class Selection:
    """What a walk found.

    Parameters
    ----------
    entries
        In the order of the walk.
    dumps
        What tells one dump from another: run ids, or directories.
    layers
        Numbers of the layers that were found, whether or not the scope takes them.
    scanned
        Metadata files (or pairs of arrays) that were looked at.
    converted
        Entries of fp32 words that are rounded to fp16, which `Scope.to_fp16` asks for.
    fp32
        Entries of fp32 words that are measured as they are.
    skipped
        Why others were left out, in the order in which the reasons came up.
    skipped_files
        The first file (or layer) for each of these reasons.
    coded
        Inputs whose words were made of codes before anything was measured.
    completeness
        The state of the model that the arrays contain, where that is known.
    filtered
        How many were left out silently, by the options that asked for it.
    """

    entries: list[Entry] = field(default_factory=list)
    dumps: set[str] = field(default_factory=set)
    layers: set[int] = field(default_factory=set)
    scanned: int = 0
    converted: int = 0
    fp32: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    skipped_files: dict[str, str] = field(default_factory=dict)
    coded: CodedInput = field(default_factory=CodedInput)
    completeness: Completeness | None = None
    filtered: Counter[str] = field(default_factory=Counter)

    def require_entries(self) -> None:
        """Raise `NothingSelectedError` if there are none."""
        if not self.entries:
            raise NothingSelectedError("No entries selected after filtering. Check --dump-dir/--stage/--scope options.")

    def describe_left_out(self) -> str:
        """Say which options and which faults left entries out, the most frequent first."""
        counts = self.filtered + Counter({_REASONS.get(name, name): n for name, n in self.skipped.items()})
        return ", ".join(f"{number:,} of {self.scanned:,} by {name}" for name, number in counts.most_common())

    def check_size(self, max_bytes: int | None) -> None:
        """Raise `LimitError` if the entries have more bytes than `max_bytes`."""
        nbytes = sum(entry.tokens * (entry.keys.token_bytes + entry.values.token_bytes) for entry in self.entries)
        if max_bytes is not None and nbytes > max_bytes:
            raise LimitError(f"the entries hold {nbytes} raw bytes, above the limit of {max_bytes}")

    def files(self) -> list[str]:
        """The binary files of all entries that are dumps."""
        tensors = (tensor for entry in self.entries for tensor in (entry.keys, entry.values))
        return [str(tensor.path) for tensor in tensors if isinstance(tensor, FileTensor)]

    def check_no_file_twice(self) -> None:
        """Raise `OptionError` if inputs overlap, so that a file would be counted twice."""
        seen: set[str] = set()
        for path in self.files():
            real = os.path.realpath(path)
            if real in seen:
                raise OptionError(f"{path}: is taken twice: the inputs overlap")
            seen.add(real)

    def skip(self, reason: str, where: str) -> None:
        """Leave one out."""
        self.skipped[reason] += 1
        self.skipped_files.setdefault(reason, where)

    def add(self, entry: Entry, dump: str) -> None:
        """Take one more."""
        self.entries.append(entry)
        self.dumps.add(dump)
        tensors = entry.keys, entry.values
        self.converted += any(tensor.width > tensor.word_bytes for tensor in tensors)
        self.fp32 += any(tensor.word_bytes == 4 for tensor in tensors)


_STAGE, _LAYERS, _LENGTHS = "--stage", "--scope or its layers", "--min-seq-len or --max-seq-len"
_REASONS = {"skip_fp32_strict": "--strict-fp16 (they are fp32)"}


class _SkipError(Exception):
    """A dump is left out for the reason in the message."""


def select(roots: Iterable[str | os.PathLike[str]], scope: Scope) -> Selection:
    """Walk the directories of MNN KV dumps.

    Raises
    ------
    NothingSelectedError
        When a directory has no metadata file.
    SourceError
        When there is no such directory, or a metadata file holds JSON that is no object.
    """
    found = Selection()
    for root in roots:
        add_dumps(found, Path(os.path.abspath(root)), scope)
    return found


def is_dump(path: str) -> bool:
    """Whether a path is to be walked: a directory that no other source or bundle of frames makes anything of."""
    return os.path.isdir(path) and not is_frames(path) and folder_kind(path) in ("dump", None)


def add_dumps(found: Selection, root: Path, scope: Scope) -> None:
    """Add the dumps below one directory to `found`; errors as for `select`."""
    if not root.is_dir():
        raise SourceError(f"{root}: is not a directory")
    metas = sorted(root.rglob("meta_*.json"))
    if not metas:
        raise NothingSelectedError(
            f"{root}: has no meta_*.json file below it, so it is not an MNN KV dump{_advice(str(root))}"
        )
    for meta in metas:
        found.scanned += 1
        try:
            _add(found, meta, scope)
        except _SkipError as reason:
            found.skip(str(reason), str(meta))


def _advice(root: str) -> str:
    """What to do with a folder that is no dump, if that is known."""
    inside = readable_within(root)
    return "" if inside is None else f"; {inside!r} in it is what kvmnn reads: name that, or --jobs N takes each file"


def select_source(found: Selection, source: Source, scope: Scope, label: str) -> None:
    """Add K and V of every layer of any source to `found`, or K alone of an engine without V; stage ``"unknown"``.

    Raises
    ------
    SourceError
        When arrays have no place in a cache.
    """
    arrays = layers.sorted_with_latents(source)
    values = {entry.layer: entry for entry in arrays if entry.part == "value"}
    found.coded.add(source)
    found.completeness = source.completeness
    for key in (entry for entry in arrays if entry.part == "key"):
        found.scanned += 1
        value = values.get(key.layer)
        heads, tokens, dims = key.geometry
        if value is not None and value.geometry[:2] != (heads, tokens):
            raise SourceError(
                f"{label}: layer {key.layer}: keys are {list(key.array.shape)} and values "
                f"{list(value.array.shape)}: expected as many heads and tokens"
            )
        wide = any(entry is not None and entry.array.dtype == "fp32" for entry in (key, value))
        if scope.stage not in ("both", "unknown"):
            found.filtered[_STAGE] += 1
            continue
        found.layers.add(key.layer)
        if not scope.takes_layer(key.layer):
            found.filtered[_LAYERS] += 1
            continue
        if not scope.takes_length(tokens):
            found.filtered[_LENGTHS] += 1
            continue
        if wide and scope.strict_fp16:
            found.skip("skip_fp32_strict", f"{label}: layer {key.layer}")
            continue
        k = ArrayTensor(key, to_fp16=scope.to_fp16)
        v = NoTensor(k) if value is None else ArrayTensor(value, to_fp16=scope.to_fp16)
        found.add(Entry(key.layer, 0, tokens, heads, dims, "unknown", label, k, v), label)


def _add(found: Selection, meta: Path, scope: Scope) -> None:
    """One metadata file, checked in the reference's order; filters are silent, `_SkipError` carries reasons."""
    fields = _load(meta)
    stage = str(fields.get("stage", "unknown"))
    if scope.stage not in ("both", stage):
        found.filtered[_STAGE] += 1
        return
    layer, seq_start, tokens, heads, dims, width = _numbers(fields)
    found.layers.add(layer)
    if not scope.takes_layer(layer):
        found.filtered[_LAYERS] += 1
        return
    if min(tokens, heads, dims) <= 0:
        raise _SkipError("invalid_shape")
    if not scope.takes_length(tokens):
        found.filtered[_LENGTHS] += 1
        return
    files = _files(meta, fields)
    if width not in _WIDTHS:
        raise _SkipError(f"unsupported_bytes_per_elem_{width}")
    if width == 4 and scope.strict_fp16:
        raise _SkipError("skip_fp32_strict")
    keys, values = (FileTensor(file, (tokens, heads, dims), width, to_fp16=scope.to_fp16) for file in files)
    run_id = fields.get("run_id")
    run_id = run_id if isinstance(run_id, str) else ""
    entry = Entry(layer, seq_start, tokens, heads, dims, stage, run_id, keys, values)
    found.add(entry, run_id or str(meta.parent))


def _load(meta: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(meta.stat().st_mode):
            raise _SkipError("meta_parse_error")
        fields = json.loads(read_bounded(meta, _MAX_META).decode())
    except (OSError, SourceError, ValueError, RecursionError):
        raise _SkipError("meta_parse_error") from None
    if not isinstance(fields, dict):
        raise SourceError(f"{meta}: holds JSON that is not an object")
    return fields


def _numbers(fields: dict[str, Any]) -> tuple[int, int, int, int, int, int]:
    """layer_id, seq_start, seq_len, kv_heads, head_dim, bytes_per_elem: whatever `int` takes, as in the reference."""
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


def _files(meta: Path, fields: dict[str, Any]) -> list[FileState]:
    """The two binary files."""
    names = [fields.get("k_file"), fields.get("v_file")]
    if not all(isinstance(name, str) and name for name in names):
        raise _SkipError("missing_k_or_v_file")
    paths = [meta.parent / str(name) for name in names]
    if not all(_exists(path) for path in paths):
        raise _SkipError("missing_k_or_v_binary")
    return [_regular(path) for path in paths]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _regular(path: Path) -> FileState:
    """A regular file that can be opened; devices and pipes, which may never end, cannot."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _SkipError("binary_read_error")
        with path.open("rb"):
            return FileState.of(path)
    except OSError:
        raise _SkipError("binary_read_error") from None
