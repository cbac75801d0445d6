"""K and V that some engine saved, made ready for a model to go on from: checked, in its dtype, one file for each array.

The files are a hand-over between processes, in a temporary directory: each process maps them and copies what it runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import numpy as np

from ..arrays.casting import CastStats
from ..arrays.completeness import require_complete
from ..arrays.layer_cache import LayerCache
from ..arrays.layers import LayerArray, collect_layers, format_input_prefix
from ..arrays.source import Source
from ..arrays.undoing import validate_transforms
from ..errors import OptionError, SourceError
from ..formats import open as open_source
from ..formats.options import PackedOptions, ReadOptions
from ..packed.cache_info import TokenIdsFingerprint
from ..packed.fitting import PackedGeometry
from ..text import format_range, pluralize
from .documents import Document, Ids, TextTokenizer, count_text_bytes
from .graph.graph_file import read_onnx_graph
from .graph.interface import DecoderInterface, read_interface
from .graph.model_files import find_model
from .start_files import load_layers, merge_casts_by_source, rewrite_layers, write_layers
from .start_positions import StoredTokensInfo, read_stored_tokens

UNDO_AUTO, UNDO_NONE = ("auto",), ("none",)
"""Of what is to be undone: let `kvmnn.evaluation.evaluate` find it by comparing with the model's own; nothing, also
where K and V are then not the model's."""

_TEMPORARY_PREFIX = "kvmnn-start-"


@dataclass(frozen=True, kw_only=True, eq=False)
class InitialCache:
    """The beginning of a text as another run left it. A context manager: at its end the files go.

    Attributes
    ----------
    name
        What results call it.
    description
        What it is, in a few words.
    tokens
        Stored in each layer.
    tokens_seen
        Tokens of the text that it stands for: the position of the next one.
    dtype
        Of the words as they were found.
    ids
        Those of all tokens seen; None where only their hash is known.
    ids_hash
        Their number and hash.
    sha256
        Of words, positions and ids.
    notes
        What a reader must know, in sentences.
    inverted_transforms
        What was asked to be undone: names of `kvmnn.arrays.undo`, `UNDO_AUTO` or `UNDO_NONE`.
    """

    name: str
    description: str
    tokens: tuple[int, ...]
    tokens_seen: int
    dtype: str
    inverted_transforms: tuple[str, ...] = ()
    ids: Ids | None = None
    ids_hash: TokenIdsFingerprint | None = None
    sha256: str = ""
    notes: tuple[str, ...] = ()
    directory: Path = field(repr=False)
    _temporary_directory: TemporaryDirectory[str] | None = field(default=None, repr=False)

    def load_layers(self) -> list[LayerCache]:
        """K and V of every layer, mapped."""
        return load_layers(self.directory)

    def trim_document(self, document: Document, tokenizer: TextTokenizer | None) -> Document:
        """A text of which only what comes behind the start is scored.

        The first token behind it is fed and not scored: no cache holds the logits that it would be scored by. A start
        without the token that begins every text is that of a text without it.

        Raises
        ------
        OptionError
            For a text that does not begin with the tokens of the start, or ends with them.
        """
        candidate_ids = [document.ids, *([document.own_ids] if document.begins_with_bos else [])]
        ids = next((candidate for candidate in candidate_ids if self._is_prefix_of(candidate)), None)
        if ids is None:
            raise OptionError(self._describe_mismatch(document))
        if len(ids) < self.tokens_seen + 2:
            is_limited = 0 < document.requested_tokens <= document.num_scored
            raise OptionError(
                f"{document.name}: {'--tokens takes' if is_limited else 'has'} {pluralize(len(ids), 'token')}, "
                f"{self.name} stands "
                f"for {self.tokens_seen:,}: expected at least {self.tokens_seen + 2:,}, as the first token behind a "
                "cache is not scored"
            )
        scored_ids = ids[self.tokens_seen + 1 :]
        return replace(
            document,
            ids=ids,
            scored_from=self.tokens_seen,
            begins_with_bos=document.begins_with_bos and ids is document.ids,
            nbytes=0 if tokenizer is None else count_text_bytes(tokenizer, scored_ids),
        )

    def with_transforms_inverted(self, names: Sequence[str]) -> InitialCache:
        """Return the start with K and V turned (`turned`), in files of its own that `close` removes."""
        directory = TemporaryDirectory(prefix=_TEMPORARY_PREFIX, ignore_cleanup_errors=True)
        try:
            digest = rewrite_layers(self.directory, Path(directory.name), names)
        except BaseException:
            directory.cleanup()
            raise
        return replace(
            self,
            description=f"{self.description}, undone: {', '.join(names)}",
            inverted_transforms=tuple(names),
            sha256=_finish_hash(digest, self.ids, self.ids_hash),
            directory=Path(directory.name),
            _temporary_directory=directory,
        )

    def close(self) -> None:
        """Remove the files."""
        if self._temporary_directory is not None:
            self._temporary_directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _is_prefix_of(self, ids: Ids) -> bool:
        if self.ids is None:
            first_ids = ids[: self.tokens_seen]
            return len(first_ids) == self.tokens_seen and TokenIdsFingerprint.from_ids(first_ids) == self.ids_hash
        num_common = min(len(ids), len(self.ids))
        return num_common > 0 and bool(np.array_equal(ids[:num_common], self.ids[:num_common]))

    def _describe_mismatch(self, document: Document) -> str:
        expectation = f"expected a text that begins with the {self.tokens_seen:,} tokens of the cache"
        if self.ids is None:
            return (
                f"{document.name}: its first tokens are not those of {self.name} (by the hash that the cache has of "
                f"them): {expectation}"
            )
        num_common = min(len(document.ids), len(self.ids))
        position = int(np.flatnonzero(document.ids[:num_common] != self.ids[:num_common])[0])
        text_id, cache_id = int(document.ids[position]), int(self.ids[position])
        hint = (
            ", its last token, which what follows in the text has changed" if position == len(self.ids) - 1 > 0 else ""
        )
        return (
            f"{document.name}: parts from {self.name} at token {position:,}: {text_id}, the cache has "
            f"{cache_id}{hint}: {expectation}"
        )


def read_initial_cache(
    cache: str | os.PathLike[str] | Source | object,
    model: DecoderInterface,
    token_ids: Sequence[int] | Ids | None = None,
    *,
    inverted_transforms: Sequence[str] = (),
    name: str | None = None,
    token_major: bool = False,
) -> InitialCache:
    """Make a cache ready for a model to go on from.

    Parameters
    ----------
    cache
        Anything that `kvmnn.open` takes, or what it gave. Kv heads and head_dim need not be said: they are the model's.
    model
        The model's interface (`DecoderSession.interface`).
    token_ids
        Of the text that the cache stands for, where the cache does not say them; evicted tokens included.
    inverted_transforms
        What llama.cpp did to K and V and nothing says: ``"k-rotation"``, ``"v-rotation"``, ``"k-order"``
        (`kvmnn.arrays.undoing`); ``["auto"]`` to let `evaluate` find it, ``["none"]`` to take all as it lies, also
        where it is not the model's.
    name
        What results call it; by default the names of the files.
    token_major
        Whether arrays are ``[token, kv_head, head_dim]``, where nothing says so.

    Raises
    ------
    OptionError
        For K and V of another geometry than the model's, and token ids that are not said, or not those of the cache.
    IncompleteCacheError
        For a part of the model's state.
    SourceError, KvmnnError
        For a cache that cannot be read, holds a position twice, or numbers that are not finite.
    """
    source = cache if isinstance(cache, Source) else open_source(cache, read_options_for(model))
    location = format_input_prefix(source).removesuffix(": ") or "the cache"
    require_complete(source.completeness, location, "the beginning of a text")
    arrays = collect_layers(source, token_major=token_major)
    _check_geometry(location, arrays, model)
    transforms = (
        () if tuple(inverted_transforms) == UNDO_AUTO else validate_transforms(inverted_transforms, model.head_dim)
    )
    specified_ids = None if token_ids is None else np.asarray(token_ids)
    stored_tokens = read_stored_tokens(source, [entry.geometry[1] for entry in arrays[::2]])
    ids, ids_hash, num_seen = _resolve_ids(location, source, stored_tokens, specified_ids)
    _check_positions(location, stored_tokens, num_seen, model)
    temporary_directory = TemporaryDirectory(prefix=_TEMPORARY_PREFIX, ignore_cleanup_errors=True)
    try:
        directory = Path(temporary_directory.name)
        casts, digest = write_layers(location, directory, arrays, stored_tokens, num_seen, model, transforms)
        sha256 = _finish_hash(digest, ids, ids_hash)
    except BaseException:
        temporary_directory.cleanup()
        raise
    casts = merge_casts_by_source(casts)
    return InitialCache(
        name=name or " ".join(PurePath(input_name).name or input_name for input_name in source.inputs),
        description=_describe_source(source, arrays, stored_tokens, num_seen)
        + (f", undone: {', '.join(transforms)}" if transforms else ""),
        tokens=tuple(entry.geometry[1] for entry in arrays[::2]),
        tokens_seen=num_seen,
        dtype="/".join(cast.source for cast in casts),
        ids=ids,
        ids_hash=ids_hash,
        sha256=sha256,
        inverted_transforms=tuple(inverted_transforms),
        notes=tuple(_list_notes(source, casts)),
        directory=directory,
        _temporary_directory=temporary_directory,
    )


def _finish_hash(digest: Any, ids: Ids | None, ids_hash: TokenIdsFingerprint | None) -> str:
    """The hash of words and positions, with that of the ids."""
    digest.update(b"" if ids is None else ids.astype("<i8").tobytes())
    digest.update(b"" if ids_hash is None else ids_hash.sha256.encode())
    return str(digest.hexdigest())


def read_model_interface(model: str | os.PathLike[str]) -> DecoderInterface:
    """What a cache of a model has to fit, from its graph; weights are not looked at.

    Raises
    ------
    MissingDependencyError, SourceError, ModelError
        As `DecoderSession.open`.
    """
    files = find_model(model)
    return read_interface(read_onnx_graph(files.graph), files)


def read_options_for(model: DecoderInterface) -> ReadOptions:
    """How a cache of a model is opened: files that do not say heads are of the model's."""
    return ReadOptions(packed=PackedOptions(geometry=PackedGeometry(kv_heads=model.kv_heads, head_dim=model.head_dim)))


def _check_geometry(location: str, arrays: Sequence[LayerArray], model: DecoderInterface) -> None:
    numbers = [entry.layer for entry in arrays[::2]]
    if numbers != list(range(model.layers)):
        raise OptionError(
            f"{location}: has K and V of {pluralize(len(numbers), 'layer')} ({format_range(numbers)}), {model.label} "
            f"has "
            f"{model.layers}: expected a cache of the same model"
        )
    for keys, values in zip(arrays[::2], arrays[1::2], strict=True):
        for entry in (keys, values):
            heads, _, head_dim = entry.geometry
            if (heads, head_dim) != (model.kv_heads, model.head_dim):
                raise OptionError(
                    f"{location}: {entry.part} of layer {entry.layer} is of {pluralize(heads, 'kv head')} x "
                    f"{head_dim}, "
                    f"{model.label} has {model.kv_heads} x {model.head_dim}: expected a cache of the same model"
                )
        if keys.geometry != values.geometry:
            raise SourceError(
                f"{location}: layer {keys.layer}: keys are {list(keys.array.shape)}, values {list(values.array.shape)}"
            )


def _resolve_ids(
    location: str, source: Source, stored_tokens: StoredTokensInfo, specified_ids: Ids | None
) -> tuple[Ids | None, TokenIdsFingerprint | None, int]:
    """The ids of all tokens seen, or what is known of them, and how many they are."""
    source_ids, ids_hash = stored_tokens.ids, source.cache.token_ids if source.cache is not None else None
    if specified_ids is not None:
        TokenIdsFingerprint.from_ids(specified_ids, "--token-ids")
        ids = specified_ids.astype(np.int64)
        if source_ids is not None:
            num_common = min(len(ids), len(source_ids))
            mismatches = np.flatnonzero(ids[:num_common] != source_ids[:num_common])
            if mismatches.size:
                position = int(mismatches[0])
                raise OptionError(
                    f"{location}: its token {position} is {source_ids[position]}, --token-ids says {ids[position]}"
                )
        if ids_hash is not None and TokenIdsFingerprint.from_ids(ids) != ids_hash:
            raise OptionError(f"{location}: was made from {ids_hash.count:,} other token ids than --token-ids says")
    elif source_ids is not None:
        ids = source_ids
    elif ids_hash is not None:
        return None, ids_hash, ids_hash.count
    else:
        raise OptionError(f"{location}: does not say its token ids: expected --token-ids IDS")
    end = stored_tokens.end
    if len(ids) < end:
        raise OptionError(
            f"{location}: holds the token at position {end - 1:,}, of which no id is known: "
            f"{'--token-ids says' if specified_ids is not None else 'it has'} {pluralize(len(ids), 'id')}"
        )
    if specified_ids is not None and stored_tokens.is_whole_text and len(ids) > end:
        raise OptionError(
            f"{location}: holds {pluralize(end, 'token')}, --token-ids says {pluralize(len(ids), 'id')}, and nothing "
            f"says which "
            "of them are held"
        )
    num_seen = stored_tokens.num_seen or (
        end if specified_ids is None else len(ids)
    )  # a session may name a token more, not computed yet
    return ids[:num_seen], None, num_seen


def _check_positions(location: str, stored_tokens: StoredTokensInfo, num_seen: int, model: DecoderInterface) -> None:
    if model.max_positions is not None and num_seen >= model.max_positions:
        raise OptionError(
            f"{location}: stands for {num_seen:,} tokens, {model.label} was made for {model.max_positions:,} positions"
        )
    for layer, positions in enumerate(stored_tokens.positions):
        rows = np.sort(np.atleast_2d(positions), axis=1)
        if positions.ndim > 1 and len(rows) != model.kv_heads:
            raise SourceError(
                f"{location}: layer {layer} has positions of {len(rows)} heads: expected {model.kv_heads}"
            )
        if (duplicates := np.argwhere(np.diff(rows, axis=1) == 0)).size:
            row, column = duplicates[0]
            raise SourceError(
                f"{location}: layer {layer} holds position {rows[row, column]} more than once: expected one text "
                "(--sequence N takes that of one sequence)"
            )
        if int(rows.max(initial=-1)) >= num_seen or int(rows.min(initial=0)) < 0:
            raise SourceError(
                f"{location}: layer {layer} holds position {rows.max()}, of a text of {num_seen:,} tokens"
            )
    if not model.has_positions and not stored_tokens.is_whole_text:
        raise OptionError(
            f"{location}: lacks tokens of its text ({stored_tokens}), and {model.label} takes no positions, so that "
            f"those behind "
            "would be shifted: expected a whole cache, or a model that is exported with position_ids"
        )


def _describe_source(
    source: Source, arrays: Sequence[LayerArray], stored_tokens: StoredTokensInfo, num_seen: int
) -> str:
    if source.engine_cache is not None:
        return f"{source.engine_cache}{'' if stored_tokens.is_whole_text else f', {stored_tokens}'}"
    first = arrays[0]
    heads, _, head_dim = first.geometry
    kind_text = "" if source.cache is None else f"MNN {source.cache.kind} cache: "
    tokens = format_range(sorted({entry.geometry[1] for entry in arrays}))
    total_text = "" if stored_tokens.is_whole_text else f" of {num_seen:,}"
    return (
        f"{kind_text}{pluralize(len(arrays) // 2, 'layer')}, {heads} x {head_dim}, {tokens} tokens{total_text}, "
        f"{first.array.dtype}"
    )


def _list_notes(source: Source, casts: Sequence[CastStats]) -> list[str]:
    source_notes = (note if note.startswith(source.inputs) else note[:1].upper() + note[1:] for note in source.notes)
    notes = [f"{note}." for note in source_notes]
    cast_texts = [str(cast) for cast in casts if cast.changed]
    if cast_texts:
        notes.append(f"The model's own dtype is narrower than the cache's, which is LOSSY: {'; '.join(cast_texts)}.")
    return notes
