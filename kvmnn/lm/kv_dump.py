"""Compute the KV cache of a model on a text, and write it as files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .. import dtypes
from .._util.packages import get_version
from .._util.text import LOSSY, UNCHANGED, format_range, pluralize
from ..arrays.array import LazyArray, from_numpy
from ..arrays.cast import CastStats
from ..arrays.layer_cache import LayerCache
from ..arrays.layers import LayerArray, format_array_name
from ..bundle.passthrough import POSITIONS_NAME, TOKEN_IDS_NAME
from ..dtypes import PARTS, Part
from ..errors import KvmnnError
from ..files.atomic import DirectoryOutput
from ..files.schema import Record
from ..formats import npy
from ..formats.mnn.dump_writer import write_dump
from ..policies.policy import FullCache, Policy
from ..policies.registry import LabelledPolicy
from ..reports.records import RuntimeStats
from ..reports.tables import format_runtime_text, wrap_sentences
from .documents import read_document
from .generation import check_positions, prefill
from .kv_store import describe_encoding
from .runner import RunOptions


def build_layer_arrays(caches: Sequence[LayerCache], dtype: str | None = None) -> tuple[list[LayerArray], CastStats]:
    """K and V of every layer by turns, as words of `dtype` (as they are by default), and what the cast changed."""
    cast = CastStats(caches[0].dtype, dtype or caches[0].dtype)
    arrays: list[LayerArray] = []
    for cache in caches:
        if cache.tokens == 0:
            raise KvmnnError(f"layer {cache.layer}: the policy keeps no token of it, so there is nothing to write")
        for part, elements in zip(PARTS, (cache.keys, cache.values), strict=True):
            arrays.append(LayerArray(cache.layer, part, _build_array(cache.layer, part, elements, cast)))
    return arrays, cast


def write_layer_npy(arrays: Sequence[LayerArray], output: DirectoryOutput) -> list[str]:
    """``layer_<n>.key.npy`` and ``.value.npy``, ``[kv_head, token, head_dim]``; their names. The caller commits."""
    names = []
    for entry in arrays:
        name = f"{entry.array.name}.npy"
        file = output.open_file(name)
        npy.write_header(file, entry.array)
        for piece in entry.array.iter_chunks():
            file.write(piece.data)
        names.append(name)
    return names


def write_sidecars(
    output: DirectoryOutput, caches: Sequence[LayerCache], ids: Sequence[int], origin: Mapping[str, Any]
) -> None:
    """What the arrays do not say: ``positions.json`` with the true positions, ``token_ids.json`` with the text."""
    layers = [{"layer": cache.layer, "tokens": cache.tokens, "positions": cache.positions.tolist()} for cache in caches]
    document = {**origin, "tokens_seen": caches[0].tokens_seen, "layers": layers}
    output.open_file(TOKEN_IDS_NAME).write((json.dumps([int(token) for token in ids]) + "\n").encode())
    output.open_file(POSITIONS_NAME).write((json.dumps(document) + "\n").encode())


def _build_array(layer: int, part: Part, elements: npt.NDArray[Any], cast: CastStats) -> LazyArray:
    data = cast.cast(np.ascontiguousarray(elements).view(np.uint8).reshape(-1))
    target = dtypes.parse_dtype(cast.target)
    if cast.source != cast.target and target.numpy_dtype.kind == "f":
        num_overflowed = int(np.isinf(data.view(target.numpy_dtype)).sum() - np.isinf(elements).sum())
        if num_overflowed:
            raise KvmnnError(
                f"layer {layer}: {num_overflowed} of its {part}s are beyond fp16 (65504): dump them as fp32"
            )
    return from_numpy(format_array_name(layer, part), data.view(target.numpy_dtype).reshape(elements.shape))


_TEXT_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class RoundingStats(Record):
    """What writing words in another type changed."""

    #: The type of the model's cache: ``"fp16"`` or ``"fp32"``.
    source: str = field(metadata={"key": "from"})
    #: Words written, and those that do not have the same bits when read back.
    words: int
    changed: int
    #: The largest absolute difference among them.
    largest_error: float

    @classmethod
    def from_cast(cls, cast: CastStats) -> RoundingStats:
        """What a cast counted."""
        return cls(source=cast.source, words=cast.words, changed=cast.changed, largest_error=cast.largest_error)


@dataclass(frozen=True, kw_only=True)
class KVDumpResult:
    """What was written."""

    #: The directory.
    output: str
    #: Of reading the text.
    seconds: float
    #: The model's path as it was given, the text's file name and the digest of all of the file.
    model: str
    text_name: str
    text_sha256: str
    #: What cut the cache.
    policy: LabelledPolicy
    #: Of the files, and of their words.
    format: str
    dtype: str
    #: What the words lost.
    rounding: RoundingStats
    #: Of the text: asked for, read, and written for each layer.
    requested_tokens: int
    tokens_seen: int
    tokens_kept: tuple[int, ...]
    #: Of K and V.
    nbytes: int
    #: What the lossless runtime did, where the cache lay in one; what is written does not depend on it.
    runtime: RuntimeStats | None = None
    #: What was put before the text, what of the cache stayed raw, and why.
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """``LOSSY`` if tokens or bits are gone, else ``UNCHANGED``: the model's own words, none of them rounded."""
        return LOSSY if min(self.tokens_kept) < self.tokens_seen or self.rounding.changed else UNCHANGED

    def to_origin(self) -> dict[str, Any]:
        """Where the words come from, as ``positions.json`` has it."""
        return {
            "kvmnn": get_version(),
            "label": self.label,
            "model": self.model,
            "text": {"name": self.text_name, "sha256": self.text_sha256},
            "policy": self.policy.to_dict(),
            "format": self.format,
            "dtype": self.dtype,
            "rounded": self.rounding.to_dict(),
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "output": self.output,
            "seconds": self.seconds,
            **self.to_origin(),
            "tokens_seen": self.tokens_seen,
            "tokens_kept": list(self.tokens_kept),
            "asked_tokens": self.requested_tokens,
            "bytes": self.nbytes,
            **({"runtime": self.runtime.to_dict()} if self.runtime is not None else {}),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        tokens_text = format_range(sorted(set(self.tokens_kept)))
        length_note = (
            f", the text has only {self.tokens_seen:,} tokens" if self.tokens_seen < self.requested_tokens else ""
        )
        return (
            f"{self.output}: {pluralize(len(self.tokens_kept), 'layer')}, {tokens_text} tokens, {self.dtype}, "
            f"{self.nbytes:,} bytes{length_note}\n{indent(self._format_notes(), '  ')}  {self.label} "
            f"({self._explain_label(tokens_text)})" + self._format_runtime()
        )

    def _format_notes(self) -> str:
        """The notes, unless they stand below the table of the runtime; ends with a newline where there are any."""
        return wrap_sentences(self.notes, _TEXT_WIDTH - 2) + "\n" if self.notes and self.runtime is None else ""

    def _format_runtime(self) -> str:
        if self.runtime is None:
            return ""
        parts = [
            format_runtime_text([(self.policy.label, self.runtime)], _TEXT_WIDTH),
            *([wrap_sentences(self.notes, _TEXT_WIDTH)] * bool(self.notes)),
        ]
        return "".join(f"\n\n{part}" for part in parts)

    def _explain_label(self, tokens_text: str) -> str:
        reasons = []
        if min(self.tokens_kept) < self.tokens_seen:
            reasons.append(f"{self.policy.label}: {tokens_text} of {self.tokens_seen:,} tokens kept")
        if self.rounding.changed:
            reasons.append(
                f"{self.rounding.source} rounded to {self.dtype}: {self.rounding.changed:,} of "
                f"{self.rounding.words:,} words changed, largest error {self.rounding.largest_error:.3g}"
            )
        return "; ".join(reasons) or "the words that the model computed"


def dump_kv(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    output: str | os.PathLike[str],
    policy: Policy | LabelledPolicy | None = None,
    *,
    tokens: int,
    format: Literal["npy", "mnn"] = "npy",
    dtype: Literal["fp16", "fp32"] | None = None,
    run_id: str = "kvmnn",
    overwrite: bool = False,
    options: RunOptions | None = None,
) -> KVDumpResult:
    """Let a model read a text, cut its cache by a policy, and write K and V of every layer.

    Parameters
    ----------
    model
        An ONNX decoder: file or folder, its ``tokenizer.json`` beside it.
    text
        A UTF-8 file.
    output
        A directory that does not exist yet. Beside the arrays it gets ``positions.json`` (true positions of the tokens
        that are there) and ``token_ids.json`` (every token of the text).
    policy
        Which tokens stay; without one all do.
    tokens
        Tokens of the text that are read, the one that begins every text included; at most those there are.
    format
        ``"npy"``: ``layer_<n>.key.npy`` and ``layer_<n>.value.npy``, ``[kv_head, token, head_dim]``. ``"mnn"``: a KV
        dump as MNN's engine writes it, ``[token, kv_head, head_dim]``.
    dtype
        Of the words; by default that of the model's cache.
    run_id
        Of an MNN dump.
    overwrite
        Replace what exists.
    options
        How the model runs.

    Raises
    ------
    MissingDependencyError
        Where onnxruntime, onnx or tokenizers is not installed.
    SourceError, ModelError
        For a model, tokenizer or text that cannot be read.
    OutputError
        For an output that exists or cannot be written.
    KvmnnError
        For a policy that the model cannot run or that leaves a layer empty, more tokens than the model has positions,
        and values beyond fp16 that are to be written as such.
    """
    labelled_policy = (
        policy if isinstance(policy, LabelledPolicy) else LabelledPolicy.from_policy(policy or FullCache())
    )
    options = options or RunOptions()
    session, tokenizer = options.open_model(model, labelled_policy.policy)
    document = read_document(Path(text), tokenizer, max(tokens - 1, 1))
    ids: Sequence[int] = document.ids[:tokens].tolist()
    check_positions(session.interface.label, session.interface.max_positions, len(ids), 1)
    runner = options.create_runner(session, labelled_policy.policy)
    start_time = time.perf_counter()
    prefill(runner, ids, options.chunk)
    caches = runner.cache.copy_layers()
    seconds = time.perf_counter() - start_time
    runtime_stats = runner.collect_runtime_stats()
    bos_note = tokenizer.bos_info.format_note(1, int(document.has_own_bos))
    notes = [] if bos_note is None else [bos_note]
    if runtime_stats is not None and options.lossless is not None:
        notes += describe_encoding([(labelled_policy.label, runtime_stats)], options.lossless)
    arrays, cast = build_layer_arrays(caches, dtype)
    dump = KVDumpResult(
        output=os.fspath(output),
        seconds=seconds,
        model=os.fspath(model),
        text_name=document.name,
        text_sha256=document.sha256,
        policy=labelled_policy,
        format=format,
        dtype=cast.target,
        rounding=RoundingStats.from_cast(cast),
        requested_tokens=tokens,
        tokens_seen=len(ids),
        tokens_kept=tuple(cache.tokens for cache in caches),
        nbytes=sum(entry.array.nbytes for entry in arrays),
        runtime=runtime_stats,
        notes=tuple(notes),
    )
    with DirectoryOutput(
        dump.output, force=overwrite, exclude=[os.fspath(text), dump.model], index=POSITIONS_NAME
    ) as directory:
        if format == "npy":
            write_layer_npy(arrays, directory)
        else:
            write_dump(arrays, directory, run_id)
        write_sidecars(directory, caches, ids, dump.to_origin())
        directory.commit()
    return dump
