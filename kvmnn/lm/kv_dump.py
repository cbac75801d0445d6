"""Compute the KV cache of a model on a text, and write it as files."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

import numpy as np

from .. import dtypes
from .._util.dataclass import dataclass
from .._util.packages import get_version
from .._util.text import LOSSY, UNCHANGED, format_range, pluralize
from ..arrays.array import from_numpy
from ..arrays.cast import CastStats
from ..arrays.layer_cache import LayerCache
from ..arrays.layers import LayerArray, format_array_name
from ..bundle.passthrough import POSITIONS_NAME, TOKEN_IDS_NAME
from ..dtypes import PARTS
from ..errors import REPLACE_HINT, KvmnnError, OutputError
from ..files.atomic import DirectoryOutput, FileOutput
from ..files.schema import Record
from ..formats import npy
from ..formats.mnn.dump import write_dump
from ..policies.policy import FullCache, Policy
from ..policies.registry import LabelledPolicy
from ..reports.records import RuntimeStats
from ..reports.table import wrap_sentences
from ..reports.tables import format_runtime_text
from .chat_template import is_chat_file, read_prompt_ids
from .documents import Document, read_document
from .generation import check_positions, prefill
from .kv_store import describe_encoding
from .runner import RunOptions
from .tokenizer import Tokenizer


def build_layer_arrays(caches: Sequence[LayerCache], dtype: str | None = None) -> tuple[list[LayerArray], CastStats]:
    """Return K and V of every layer, interleaved, in `dtype` (default: their own), and the statistics of the cast."""
    cast = CastStats(caches[0].dtype, dtype or caches[0].dtype)
    target = dtypes.parse_dtype(cast.target).numpy_dtype
    arrays: list[LayerArray] = []
    for cache in caches:
        if cache.tokens == 0:
            raise KvmnnError(f"layer {cache.layer}: the policy keeps no token of it, so there is nothing to write")
        for part, elements in zip(PARTS, (cache.keys, cache.values), strict=True):
            words = cast.cast(np.ascontiguousarray(elements).view(np.uint8).reshape(-1)).view(target)
            if cast.source != cast.target and target.kind == "f":
                num_overflowed = int(np.isinf(words).sum() - np.isinf(elements).sum())
                if num_overflowed:
                    raise KvmnnError(
                        f"layer {cache.layer}: {num_overflowed} of its {part}s are beyond fp16 (65504): "
                        "dump them as fp32"
                    )
            array = from_numpy(format_array_name(cache.layer, part), words.reshape(elements.shape))
            arrays.append(LayerArray(cache.layer, part, array))
    return arrays, cast


_TEXT_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class RoundingStats(Record):
    """Changes by writing elements in another type."""

    #: The type of the model's cache: ``"fp16"`` or ``"fp32"``.
    source: str = field(metadata={"key": "from"})
    #: Words written, and those that do not have the same bits when read back.
    words: int
    changed: int
    #: The largest absolute difference among them.
    largest_error: float


@dataclass(frozen=True, kw_only=True)
class KVDumpResult(Record):
    """Result of writing a dump."""

    json_keys = (
        "output seconds **origin tokens_seen tokens_kept asked_tokens=requested_tokens bytes=nbytes runtime notes"
    )

    #: The directory.
    output: str
    #: Seconds of feeding the text.
    seconds: float
    #: The model's path as it was given, the text's file name and the digest of all of the file.
    model: str
    text_name: str
    text_sha256: str
    #: The policy.
    policy: LabelledPolicy
    #: Format of the files, and their element type.
    format: str
    dtype: str
    #: Changes by rounding.
    rounding: RoundingStats
    #: Tokens of the text: requested, read, and written for each layer.
    requested_tokens: int
    tokens_seen: int
    tokens_kept: tuple[int, ...]
    #: Bytes of K and V.
    nbytes: int
    #: Statistics of the lossless runtime, if it stored the cache; the output does not depend on it.
    runtime: RuntimeStats | None = field(default=None, metadata={"omit": True})
    #: Notes on the added bos, and on parts of the cache that stayed raw.
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Return ``LOSSY`` if tokens were evicted or elements rounded, else ``UNCHANGED``."""
        return LOSSY if min(self.tokens_kept) < self.tokens_seen or self.rounding.changed else UNCHANGED

    @property
    def origin(self) -> dict[str, Any]:
        """Return the origin of the elements, as in ``positions.json``."""
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

    def __str__(self) -> str:
        tokens_text = format_range(sorted(set(self.tokens_kept)))
        reasons = []
        if min(self.tokens_kept) < self.tokens_seen:
            reasons.append(f"{self.policy.label}: {tokens_text} of {self.tokens_seen:,} tokens kept")
        if self.rounding.changed:
            reasons.append(
                f"{self.rounding.source} rounded to {self.dtype}: {self.rounding.changed:,} of "
                f"{self.rounding.words:,} words changed, largest error {self.rounding.largest_error:.3g}"
            )
        is_short = self.tokens_seen < self.requested_tokens
        lines = [
            f"{self.output}: {pluralize(len(self.tokens_kept), 'layer')}, {tokens_text} tokens, {self.dtype}, "
            f"{self.nbytes:,} bytes{f', the text has only {self.tokens_seen:,} tokens' if is_short else ''}",
            f"  {self.label} ({'; '.join(reasons) or 'the words that the model computed'})",
        ]
        if self.runtime is not None:
            lines += ["", format_runtime_text([(self.policy.label, self.runtime)], _TEXT_WIDTH)]
            if self.notes:
                lines += ["", wrap_sentences(self.notes, _TEXT_WIDTH)]
        elif self.notes:
            lines.insert(1, indent(wrap_sentences(self.notes, _TEXT_WIDTH - 2), "  "))
        return "\n".join(lines)


def _read_chat(path: Path, tokenizer: Tokenizer) -> Document:
    """Return the messages of a chat as a document of all its tokens."""
    text, ids = read_prompt_ids(os.fspath(path), tokenizer)
    return Document(
        name=path.name, ids=np.array(ids, np.int64), nbytes=0, sha256=hashlib.sha256(text.encode()).hexdigest()
    )


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
    attention: str | os.PathLike[str] | None = None,
) -> KVDumpResult:
    """Run a model on a text, cut its cache by a policy, and write K and V of every layer.

    Parameters
    ----------
    model
        An ONNX decoder: file or folder, with its ``tokenizer.json`` alongside.
    text
        A UTF-8 file; ``.json``: messages of a chat (`kvmnn.lm.chat_template`).
    output
        A directory that does not exist yet. It also gets ``positions.json`` (true positions of the stored tokens) and
        ``token_ids.json`` (every token of the text).
    policy
        The eviction policy; by default all tokens stay.
    tokens
        Maximum number of tokens to read, an added BOS included.
    format
        ``"npy"``: ``layer_<n>.key.npy`` and ``layer_<n>.value.npy``, ``[kv_head, token, head_dim]``. ``"mnn"``: a KV
        dump as MNN's engine writes it, ``[token, kv_head, head_dim]``.
    dtype
        Element type; by default that of the model's cache.
    run_id
        Id of an MNN dump.
    overwrite
        Replace an existing output.
    options
        Settings of the model.
    attention
        A file, .npy, that gets the attention which tokens drew: float32 ``[layer, kv_head, position]``, the mean
        probability that later tokens gave each, over the query heads of a kv head (of the last token: 0). Transform
        streams take it as ``attention=FILE``. Needs the full cache.

    Raises
    ------
    MissingDependencyError
        If onnxruntime, onnx or tokenizers is not installed.
    SourceError, ModelError
        For a model, tokenizer or text that cannot be read, and one that shows no attention.
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
    if attention is not None:
        if not isinstance(labelled_policy.policy, FullCache) or options.lossless is not None:
            raise KvmnnError("attention is noted of the full cache alone: expected no policy, and no lossless storage")
        if not overwrite and Path(attention).exists():
            raise OutputError(f"{os.fspath(attention)}: exists already ({REPLACE_HINT} replaces it)")
    session, tokenizer = options.open_model(model, labelled_policy.policy, attentions=attention is not None)
    is_chat = is_chat_file(os.fspath(text))
    document = (
        _read_chat(Path(text), tokenizer) if is_chat else read_document(Path(text), tokenizer, max(tokens - 1, 1))
    )
    ids: Sequence[int] = document.ids[:tokens].tolist()
    check_positions(session.interface.label, session.interface.max_positions, len(ids), 1)
    runner = options.create_runner(session, labelled_policy.policy)
    runner.sums_attention = attention is not None
    start_time = time.perf_counter()
    prefill(runner, ids, options.chunk)
    caches = runner.cache.copy_layers()
    seconds = time.perf_counter() - start_time
    runtime_stats = runner.collect_runtime_stats()
    bos_note = (
        f"{document.name}: messages of a chat, as the chat template of the model renders them"
        if is_chat
        else tokenizer.bos_info.format_note(1, int(document.has_own_bos))
    )
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
        rounding=RoundingStats(
            source=cast.source, words=cast.words, changed=cast.changed, largest_error=cast.largest_error
        ),
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
            for entry in arrays:
                file = directory.open_file(f"{entry.array.name}.npy")
                npy.write_header(file, entry.array)
                for chunk in entry.array.iter_chunks():
                    file.write(chunk.data)
        else:
            write_dump(arrays, directory, run_id)
        layers = [
            {"layer": cache.layer, "tokens": cache.tokens, "positions": cache.positions.tolist()} for cache in caches
        ]
        positions = {**dump.origin, "tokens_seen": caches[0].tokens_seen, "layers": layers}
        directory.open_file(TOKEN_IDS_NAME).write((json.dumps(ids) + "\n").encode())
        directory.open_file(POSITIONS_NAME).write((json.dumps(positions) + "\n").encode())
        directory.commit()
    if attention is not None and runner.attention_sums is not None:
        with FileOutput(attention, force=overwrite) as output_file:
            array = from_numpy("attention", runner.attention_sums.compute_means())
            npy.write_header(output_file.file, array)
            for chunk in array.iter_chunks():
                output_file.file.write(chunk.data)
            output_file.commit()
    return dump
