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

from ..arrays.casting import Cast
from ..arrays.completeness import require_complete
from ..arrays.layer_cache import LayerCache
from ..arrays.layers import LayerArray, place_said, sorted_layers
from ..arrays.source import Source
from ..arrays.undoing import check_undo
from ..errors import OptionError, SourceError
from ..formats import open as open_source
from ..formats.options import PackedOptions, ReadOptions
from ..packed.cache_info import TokenIds
from ..packed.fitting import Geometry
from ..text import count, span
from .documents import Document, Ids, TextTokenizer, bytes_of
from .graph.graph_file import read_graph
from .graph.interface import DecoderInterface, read_interface
from .graph.model_files import find_model
from .start_files import by_source, layers_in, rewrite, write
from .start_positions import Held, held_positions

AUTO, AS_STORED = ("auto",), ("none",)
"""Of what is to be undone: let `kvmnn.evaluation.evaluate` find it by comparing with the model's own; nothing, also
where K and V are then not the model's."""

_PREFIX = "kvmnn-start-"


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """The beginning of a text as another run left it. A context manager: at its end the files go.

    Attributes
    ----------
    name
        What results call it.
    about
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
    undo
        What was asked to be undone: names of `kvmnn.arrays.undo`, `AUTO` or `AS_STORED`.
    """

    name: str
    about: str
    tokens: tuple[int, ...]
    tokens_seen: int
    dtype: str
    undo: tuple[str, ...] = ()
    ids: Ids | None = None
    ids_hash: TokenIds | None = None
    sha256: str = ""
    notes: tuple[str, ...] = ()
    directory: Path = field(repr=False)
    _owned: TemporaryDirectory[str] | None = field(default=None, repr=False)

    def layers(self) -> list[LayerCache]:
        """K and V of every layer, mapped."""
        return layers_in(self.directory)

    def begun(self, document: Document, tokenizer: TextTokenizer | None) -> Document:
        """A text of which only what comes behind the start is scored.

        The first token behind it is fed and not scored: no cache holds the logits that it would be scored by. A start
        without the token that begins every text is that of a text without it.

        Raises
        ------
        OptionError
            For a text that does not begin with the tokens of the start, or ends with them.
        """
        own = [document.ids, *([document.own_ids] if document.begins_with_bos else [])]
        ids = next((each for each in own if self._begins(each)), None)
        if ids is None:
            raise OptionError(self._parting(document))
        if len(ids) < self.tokens_seen + 2:
            cut = 0 < document.asked <= document.tokens
            raise OptionError(
                f"{document.name}: {'--tokens takes' if cut else 'has'} {count(len(ids), 'token')}, {self.name} stands "
                f"for {self.tokens_seen:,}: expected at least {self.tokens_seen + 2:,}, as the first token behind a "
                "cache is not scored"
            )
        scored = ids[self.tokens_seen + 1 :]
        return replace(
            document,
            ids=ids,
            begin=self.tokens_seen,
            begins_with_bos=document.begins_with_bos and ids is document.ids,
            nbytes=0 if tokenizer is None else bytes_of(tokenizer, scored),
        )

    def with_undone(self, names: Sequence[str]) -> Start:
        """Return the start with K and V turned (`turned`), in files of its own that `close` removes."""
        owned = TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        try:
            digest = rewrite(self.directory, Path(owned.name), names)
        except BaseException:
            owned.cleanup()
            raise
        return replace(
            self,
            about=f"{self.about}, undone: {', '.join(names)}",
            undo=tuple(names),
            sha256=_finished(digest, self.ids, self.ids_hash),
            directory=Path(owned.name),
            _owned=owned,
        )

    def close(self) -> None:
        """Remove the files."""
        if self._owned is not None:
            self._owned.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _begins(self, ids: Ids) -> bool:
        if self.ids is None:
            first = ids[: self.tokens_seen]
            return len(first) == self.tokens_seen and TokenIds.of(first) == self.ids_hash
        shared = min(len(ids), len(self.ids))
        return shared > 0 and bool(np.array_equal(ids[:shared], self.ids[:shared]))

    def _parting(self, document: Document) -> str:
        expected = f"expected a text that begins with the {self.tokens_seen:,} tokens of the cache"
        if self.ids is None:
            return (
                f"{document.name}: its first tokens are not those of {self.name} (by the hash that the cache has of "
                f"them): {expected}"
            )
        shared = min(len(document.ids), len(self.ids))
        place = int(np.flatnonzero(document.ids[:shared] != self.ids[:shared])[0])
        found, own = int(document.ids[place]), int(self.ids[place])
        why = ", its last token, which what follows in the text has changed" if place == len(self.ids) - 1 > 0 else ""
        return (
            f"{document.name}: parts from {self.name} at token {place:,}: {found}, the cache has {own}{why}: {expected}"
        )


def read_start(
    cache: str | os.PathLike[str] | Source | object,
    model: DecoderInterface,
    token_ids: Sequence[int] | Ids | None = None,
    *,
    undo: Sequence[str] = (),
    name: str | None = None,
    token_major: bool = False,
) -> Start:
    """Make a cache ready for a model to go on from.

    Parameters
    ----------
    cache
        Anything that `kvmnn.open` takes, or what it gave. Kv heads and head_dim need not be said: they are the model's.
    model
        The model's interface (`DecoderSession.interface`).
    token_ids
        Of the text that the cache stands for, where the cache does not say them; evicted tokens included.
    undo
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
    source = cache if isinstance(cache, Source) else open_source(cache, reading(model))
    where = place_said(source).removesuffix(": ") or "the cache"
    require_complete(source.completeness, where, "the beginning of a text")
    arrays = sorted_layers(source, token_major=token_major)
    _check_geometry(where, arrays, model)
    undoing = () if tuple(undo) == AUTO else check_undo(undo, model.head_dim)
    said = None if token_ids is None else np.asarray(token_ids)
    held = held_positions(source, [entry.geometry[1] for entry in arrays[::2]])
    ids, hashed, seen = _ids(where, source, held, said)
    _check_positions(where, held, seen, model)
    owned = TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    try:
        directory = Path(owned.name)
        casts, digest = write(where, directory, arrays, held, seen, model, undoing)
        finished = _finished(digest, ids, hashed)
    except BaseException:
        owned.cleanup()
        raise
    casts = by_source(casts)
    return Start(
        name=name or " ".join(PurePath(each).name or each for each in source.inputs),
        about=_about(source, arrays, held, seen) + (f", undone: {', '.join(undoing)}" if undoing else ""),
        tokens=tuple(entry.geometry[1] for entry in arrays[::2]),
        tokens_seen=seen,
        dtype="/".join(cast.source for cast in casts),
        ids=ids,
        ids_hash=hashed,
        sha256=finished,
        undo=tuple(undo),
        notes=tuple(_notes(source, casts)),
        directory=directory,
        _owned=owned,
    )


def _finished(digest: Any, ids: Ids | None, hashed: TokenIds | None) -> str:
    """The hash of words and positions, with that of the ids."""
    digest.update(b"" if ids is None else ids.astype("<i8").tobytes())
    digest.update(b"" if hashed is None else hashed.sha256.encode())
    return str(digest.hexdigest())


def model_interface(model: str | os.PathLike[str]) -> DecoderInterface:
    """What a cache of a model has to fit, from its graph; weights are not looked at.

    Raises
    ------
    MissingDependencyError, SourceError, ModelError
        As `DecoderSession.open`.
    """
    files = find_model(model)
    return read_interface(read_graph(files.graph), files)


def reading(model: DecoderInterface) -> ReadOptions:
    """How a cache of a model is opened: files that do not say heads are of the model's."""
    return ReadOptions(packed=PackedOptions(geometry=Geometry(kv_heads=model.kv_heads, head_dim=model.head_dim)))


def _check_geometry(where: str, arrays: Sequence[LayerArray], model: DecoderInterface) -> None:
    numbers = [entry.layer for entry in arrays[::2]]
    if numbers != list(range(model.layers)):
        raise OptionError(
            f"{where}: has K and V of {count(len(numbers), 'layer')} ({span(numbers)}), {model.label} has "
            f"{model.layers}: expected a cache of the same model"
        )
    for keys, values in zip(arrays[::2], arrays[1::2], strict=True):
        for entry in (keys, values):
            heads, _, dims = entry.geometry
            if (heads, dims) != (model.kv_heads, model.head_dim):
                raise OptionError(
                    f"{where}: {entry.part} of layer {entry.layer} is of {count(heads, 'kv head')} x {dims}, "
                    f"{model.label} has {model.kv_heads} x {model.head_dim}: expected a cache of the same model"
                )
        if keys.geometry != values.geometry:
            raise SourceError(
                f"{where}: layer {keys.layer}: keys are {list(keys.array.shape)}, values {list(values.array.shape)}"
            )


def _ids(where: str, source: Source, held: Held, said: Ids | None) -> tuple[Ids | None, TokenIds | None, int]:
    """The ids of all tokens seen, or what is known of them, and how many they are."""
    own, hashed = held.ids, source.cache.token_ids if source.cache is not None else None
    if said is not None:
        TokenIds.of(said, "--token-ids")
        ids = said.astype(np.int64)
        if own is not None:
            shared = min(len(ids), len(own))
            differ = np.flatnonzero(ids[:shared] != own[:shared])
            if differ.size:
                place = int(differ[0])
                raise OptionError(f"{where}: its token {place} is {own[place]}, --token-ids says {ids[place]}")
        if hashed is not None and TokenIds.of(ids) != hashed:
            raise OptionError(f"{where}: was made from {hashed.count:,} other token ids than --token-ids says")
    elif own is not None:
        ids = own
    elif hashed is not None:
        return None, hashed, hashed.count
    else:
        raise OptionError(f"{where}: does not say its token ids: expected --token-ids IDS")
    last = held.end
    if len(ids) < last:
        raise OptionError(
            f"{where}: holds the token at position {last - 1:,}, of which no id is known: "
            f"{'--token-ids says' if said is not None else 'it has'} {count(len(ids), 'id')}"
        )
    if said is not None and held.is_whole and len(ids) > last:
        raise OptionError(
            f"{where}: holds {count(last, 'token')}, --token-ids says {count(len(ids), 'id')}, and nothing says which "
            "of them are held"
        )
    seen = held.seen or (last if said is None else len(ids))  # a session may name a token more, not computed yet
    return ids[:seen], None, seen


def _check_positions(where: str, held: Held, seen: int, model: DecoderInterface) -> None:
    if model.max_positions is not None and seen >= model.max_positions:
        raise OptionError(
            f"{where}: stands for {seen:,} tokens, {model.label} was made for {model.max_positions:,} positions"
        )
    for layer, places in enumerate(held.positions):
        rows = np.sort(np.atleast_2d(places), axis=1)
        if places.ndim > 1 and len(rows) != model.kv_heads:
            raise SourceError(f"{where}: layer {layer} has positions of {len(rows)} heads: expected {model.kv_heads}")
        if (same := np.argwhere(np.diff(rows, axis=1) == 0)).size:
            row, place = same[0]
            raise SourceError(
                f"{where}: layer {layer} holds position {rows[row, place]} more than once: expected one text "
                "(--sequence N takes that of one sequence)"
            )
        if int(rows.max(initial=-1)) >= seen or int(rows.min(initial=0)) < 0:
            raise SourceError(f"{where}: layer {layer} holds position {rows.max()}, of a text of {seen:,} tokens")
    if not model.has_positions and not held.is_whole:
        raise OptionError(
            f"{where}: lacks tokens of its text ({held}), and {model.label} takes no positions, so that those behind "
            "would be shifted: expected a whole cache, or a model that is exported with position_ids"
        )


def _about(source: Source, arrays: Sequence[LayerArray], held: Held, seen: int) -> str:
    if source.engine_cache is not None:
        return f"{source.engine_cache}{'' if held.is_whole else f', {held}'}"
    first = arrays[0]
    heads, _, dims = first.geometry
    kind = "" if source.cache is None else f"MNN {source.cache.kind} cache: "
    tokens = span(sorted({entry.geometry[1] for entry in arrays}))
    of = "" if held.is_whole else f" of {seen:,}"
    return f"{kind}{count(len(arrays) // 2, 'layer')}, {heads} x {dims}, {tokens} tokens{of}, {first.array.dtype}"


def _notes(source: Source, casts: Sequence[Cast]) -> list[str]:
    said = (note if note.startswith(source.inputs) else note[:1].upper() + note[1:] for note in source.notes)
    notes = [f"{note}." for note in said]
    changed = [str(cast) for cast in casts if cast.changed]
    if changed:
        notes.append(f"The model's own dtype is narrower than the cache's, which is LOSSY: {'; '.join(changed)}.")
    return notes
