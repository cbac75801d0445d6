"""Continue a model from a saved cache: find ids and positions, check and cast K and V, and write one file for each
array.

The files pass the cache to other processes, which map them; they are in a temporary directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import field, replace
from hashlib import sha256
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import numpy as np

from .. import dtypes
from .._util.dataclass import dataclass
from .._util.text import format_range, pluralize
from ..arrays.cast import CastStats, merge_cast_stats
from ..arrays.completeness import require_complete
from ..arrays.layer_cache import LayerCache
from ..arrays.layers import LayerArray, collect_layers, format_input_prefix
from ..arrays.llama_transforms import TRANSFORMS, Transform, invert_transforms, validate_transforms
from ..arrays.source import Source
from ..bundle.passthrough import TOKEN_IDS_NAME
from ..dtypes import Elements, Part, Positions
from ..errors import OptionError, SourceError
from ..files.atomic import wrap_os_errors
from ..formats import open as open_source
from ..formats.mnn.token_ids import parse_token_ids
from ..formats.options import PackedOptions, ReadOptions
from ..formats.sidecars import read_positions_sidecar, read_sidecar
from ..packed.cache_info import TokenIdsFingerprint
from ..packed.inference import PackedGeometry
from .documents import Document, Ids, TextTokenizer, count_text_bytes
from .onnx.interface import DecoderInterface, read_interface
from .onnx.model_files import find_model, read_onnx_graph


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTokensInfo:
    """The tokens of a text that a cache contains."""

    #: Positions in each layer, int64 ``[token]``, or ``[kv_head, token]`` if heads differ.
    positions: tuple[Positions, ...]
    #: Tokens of the text; None if unknown.
    num_seen: int | None = None
    #: Ids of the tokens; None if unknown.
    ids: Ids | None = None

    @property
    def end(self) -> int:
        """Return the position after the last token."""
        return 1 + max(int(layer_positions.max()) for layer_positions in self.positions)

    @property
    def is_whole_text(self) -> bool:
        """Return whether every layer stores all tokens of the text."""
        tokens = self.end
        holds_all = all(
            layer_positions.shape[-1] == tokens and (np.sort(layer_positions, axis=-1) == np.arange(tokens)).all()
            for layer_positions in self.positions
        )
        return holds_all and self.num_seen in (None, tokens)

    def __str__(self) -> str:
        min_tokens = min(layer_positions.shape[-1] for layer_positions in self.positions)
        return f"a layer holds {min_tokens:,} of {pluralize(self.num_seen or self.end, 'token')}"


def read_stored_tokens(source: Source, tokens_by_layer: Sequence[int]) -> StoredTokensInfo:
    """Read the stored tokens that a source specifies; by default each layer stores the first tokens of a text."""
    location = " ".join(source.inputs)
    sidecar = read_positions_sidecar(source, tokens_by_layer)
    cache, engine = source.cache, source.engine_cache
    layers = cache.layers if cache is not None else ()
    if any(layer.text_positions is not None for layer in layers) or (sidecar is not None and sidecar.is_rerotated):
        raise SourceError(
            f"{location}: its K was rotated to the first positions, and a text continues at its own: "
            "start from the cache before --rerotate"
        )
    if sidecar is not None:  # written by `kvmnn dump-kv`
        ids_text = read_sidecar(source, TOKEN_IDS_NAME)
        sidecar_ids = None if ids_text is None else parse_token_ids(*ids_text)
        return StoredTokensInfo(positions=sidecar.positions, num_seen=sidecar.tokens_seen, ids=sidecar_ids)
    if cache is not None:
        positions = [
            np.concatenate([np.arange(begin, begin + size, dtype=np.int64) for begin, size in layer.positions])
            for layer in cache.layers
        ]
    elif engine is not None and engine.layer_positions is not None:
        positions = [np.asarray(layer_positions, np.int64) for layer_positions in engine.layer_positions]
    elif engine is not None and engine.positions is not None:
        positions = [np.asarray(engine.positions, np.int64)] * engine.layers
    else:
        positions = [np.arange(number, dtype=np.int64) for number in tokens_by_layer]
    position_counts = [len(layer_positions) for layer_positions in positions]
    if position_counts != list(tokens_by_layer):
        raise SourceError(
            f"{location}: says the positions of {position_counts} tokens, its layers hold {list(tokens_by_layer)}"
        )
    ids = engine.token_ids if engine is not None else None
    return StoredTokensInfo(positions=tuple(positions), ids=None if ids is None else np.asarray(ids, np.int64))


#: For a model whose graph rotates neighbours together, as one from a GGUF file may: K of other engines is put into that
#: order, the inverse of ``"k-order"``.
REVERSED_K_ORDER = "k-order-reversed"

_ABOUT_FILE = "start.json"
_FILE_PARTS = (*dtypes.PARTS, "positions")


def load_token_bytes(directory: Path) -> tuple[float, ...] | None:
    """Return the bytes of a token in each layer of the cache that `write_layers` wrote; None if it was not quantised.

    They are those of K and V in the input's types, as `InitialCache.token_bytes`.
    """
    token_bytes = json.loads((directory / _ABOUT_FILE).read_text())["token_bytes"]
    return None if token_bytes is None else tuple(token_bytes)


def load_layers(directory: Path) -> list[LayerCache]:
    """Return K and V of every layer, mapped, from the files of `write_layers`."""
    header = json.loads((directory / _ABOUT_FILE).read_text())
    caches = []
    for layer in range(header["layers"]):
        keys, values, positions = (np.load(directory / f"{layer}.{part}.npy", mmap_mode="r") for part in _FILE_PARTS)
        caches.append(
            LayerCache(layer=layer, keys=keys, values=values, positions=positions, tokens_seen=header["tokens_seen"])
        )
    return caches


def write_layers(
    location: str,
    directory: Path,
    arrays: Sequence[LayerArray],
    stored_tokens: StoredTokensInfo,
    num_seen: int,
    model: DecoderInterface,
    transforms: Sequence[Transform],
    token_bytes: Sequence[float] | None = None,
) -> tuple[list[CastStats], Any]:
    """Write arrays in the model's dtype and ascending positions; return the statistics of the casts, and a hash."""
    target = dtypes.infer_dtype(np.empty(0, model.dtype)).name
    casts, digest = [], sha256()
    with wrap_os_errors(directory):
        for entry in arrays:
            positions = stored_tokens.positions[entry.layer]
            order = np.argsort(positions, axis=-1, kind="stable")
            cast = CastStats(entry.array.dtype, target)
            elements = invert_transforms(_cast_array(location, entry, cast), entry.part, transforms)
            if not (np.diff(order) == 1).all():
                elements = (
                    np.take_along_axis(elements, order[:, :, None], axis=1) if order.ndim == 2 else elements[:, order]
                )
            casts.append(cast)
            _save_layer(
                directory, entry.layer, entry.part, elements, np.take_along_axis(positions, order, axis=-1), digest
            )
        header = {"layers": model.layers, "tokens_seen": num_seen, "token_bytes": token_bytes}
        (directory / _ABOUT_FILE).write_text(json.dumps(header))
    return casts, digest


def _save_layer(directory: Path, layer: int, part: Part, elements: Elements, positions: Positions, digest: Any) -> None:
    """Save K or V of a layer, and its positions once, and update a hash."""
    for name, array in ((part, elements), *([("positions", positions)] if part == "key" else [])):
        array = np.ascontiguousarray(array)
        np.save(directory / f"{layer}.{name}.npy", array)
        digest.update(array.data.cast("B"))


def invert_named_transforms(elements: Elements, part: Part, names: Sequence[str]) -> Elements:
    """Invert transforms of K or V ``[..., head_dim]``: names of `TRANSFORMS`, or `REVERSED_K_ORDER`."""
    elements = invert_transforms(elements, part, [name for name in TRANSFORMS if name in names])
    if REVERSED_K_ORDER in names and part == "key":
        halves = elements.reshape(*elements.shape[:-1], 2, elements.shape[-1] // 2)
        elements = np.ascontiguousarray(halves.swapaxes(-1, -2)).reshape(elements.shape)
    return elements


def rewrite_layers(source: Path, target: Path, names: Sequence[str]) -> Any:
    """Copy a directory's files to another with transforms inverted; return a hash as `write_layers` does."""
    digest = sha256()
    with wrap_os_errors(target):
        for cache in load_layers(source):
            for part, elements in zip(dtypes.PARTS, (cache.keys, cache.values), strict=True):
                elements = invert_named_transforms(elements, part, names)
                _save_layer(target, cache.layer, part, elements, cache.positions, digest)
        (target / _ABOUT_FILE).write_text((source / _ABOUT_FILE).read_text())
    return digest


def _cast_array(location: str, entry: LayerArray, cast: CastStats) -> Elements:
    """Return an array as ``[kv_head, token, head_dim]`` in the model's dtype; raise an error for non-finite numbers."""
    source_array = entry.array.to_numpy().view(dtypes.parse_dtype(entry.array.dtype).numpy_dtype)
    source_array = np.ascontiguousarray(source_array.transpose(1, 0, 2) if entry.token_major else source_array)
    data = cast.cast(source_array.view(np.uint8).reshape(-1))
    elements = data.view(dtypes.parse_dtype(cast.target).numpy_dtype).reshape(source_array.shape)
    num_nonfinite = elements.size - int(np.count_nonzero(np.isfinite(elements)))
    if num_nonfinite:
        target_note = " as fp16 (the model's)" if cast.target == "fp16" and cast.source != "fp16" else ""
        raise SourceError(
            f"{location}: layer {entry.layer}: {num_nonfinite:,} of the {elements.size:,} numbers of its {entry.part}s "
            f"are not finite{target_note}"
        )
    return elements


#: Transforms to invert: let `kvmnn.evaluation.evaluate` find them by comparing with the model's own K and V; none.
UNDO_AUTO, UNDO_NONE = ("auto",), ("none",)

_TEMPORARY_PREFIX = "kvmnn-start-"


@dataclass(frozen=True, kw_only=True, eq=False)
class InitialCache:
    """A saved cache of the beginning of a text. A context manager that removes its files at the end."""

    #: Name in results.
    name: str
    #: Short description.
    description: str
    #: Tokens stored in each layer.
    tokens: tuple[int, ...]
    #: Tokens of the text, which is the position of the next one.
    tokens_seen: int
    #: Element type of the input.
    dtype: str
    #: Bytes of K and V of a token in each layer, in the input's types; None unless any of these is quantised.
    token_bytes: tuple[float, ...] | None = None
    #: Transforms to invert: names of `kvmnn.arrays.engine_transforms`, `UNDO_AUTO` or `UNDO_NONE`.
    inverted_transforms: tuple[str, ...] = ()
    #: Ids of all tokens seen; None if only their hash is known.
    ids: Ids | None = None
    #: Number and hash of the ids.
    ids_hash: TokenIdsFingerprint | None = None
    #: Hash of elements, positions and ids.
    sha256: str = ""
    #: Notes for the reader, in sentences.
    notes: tuple[str, ...] = ()
    directory: Path = field(repr=False)
    _temporary_directory: TemporaryDirectory[str] | None = field(default=None, repr=False)

    def load_layers(self) -> list[LayerCache]:
        """Return K and V of every layer, mapped."""
        return load_layers(self.directory)

    def trim_document(self, document: Document, tokenizer: TextTokenizer | None) -> Document:
        """Return a document of which only the tokens after the cache are scored.

        The first token after the cache is fed and not scored, as no cache has the logits that would score it. A cache
        without the token that begins every text is that of a text without it.

        Raises
        ------
        OptionError
            For a text that does not begin with the tokens of the cache, or ends with them.
        """
        candidate_ids = [document.ids, *([document.own_ids] if document.begins_with_bos else [])]
        ids = next((candidate for candidate in candidate_ids if self._is_prefix_of(candidate)), None)
        if ids is None:
            raise OptionError(self._describe_mismatch(document))
        if len(ids) < self.tokens_seen + 2:
            is_limited = 0 < document.requested_tokens <= document.num_scored
            min_tokens = self.tokens_seen + 2
            # a text's first token counts as none of --max-tokens
            expected = (
                f"--max-tokens of {min_tokens - len(ids) + document.requested_tokens:,} or more, for " * is_limited
            )
            raise OptionError(
                f"{document.name}: {'--max-tokens takes' if is_limited else 'has'} {pluralize(len(ids), 'token')}, "
                f"{self.name} stands for {self.tokens_seen:,}: expected {expected}at least {min_tokens:,}, as the "
                "first token after a cache is not scored"
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
        """Return the cache with transforms of K and V inverted, in temporary files that `close` removes."""
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
    """Prepare a saved cache for a model to continue from.

    Parameters
    ----------
    cache
        Anything that `kvmnn.open` takes or returns. KV heads and head_dim default to the model's.
    model
        The model's interface (`DecoderSession.interface`).
    token_ids
        Ids of the text, evicted tokens included, where the cache does not contain them.
    inverted_transforms
        Transforms that llama.cpp applied to K and V without recording them: ``"k-rotation"``, ``"v-rotation"``,
        ``"k-order"`` (`kvmnn.arrays.llama_transforms`); ``["auto"]`` to let `evaluate` find them, ``["none"]`` to use
        all as stored, even if that is not the model's layout.
    name
        Name in results; by default the names of the files.
    token_major
        Whether arrays are ``[token, kv_head, head_dim]``, where nothing specifies it.

    Raises
    ------
    OptionError
        For K and V of another geometry than the model's, and token ids that are missing or not those of the cache.
    IncompleteCacheError
        For a part of the model's state.
    SourceError, KvmnnError
        For a cache that cannot be read, has a position twice, or numbers that are not finite.
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
        token_bytes = _compute_token_bytes(source, arrays)
        casts, digest = write_layers(
            location, directory, arrays, stored_tokens, num_seen, model, transforms, token_bytes
        )
        sha256 = _finish_hash(digest, ids, ids_hash)
    except BaseException:
        temporary_directory.cleanup()
        raise
    casts = [  # K and V may have different dtypes
        merge_cast_stats([cast for cast in casts if cast.source == name])
        for name in sorted({cast.source for cast in casts})
    ]
    return InitialCache(
        name=name or " ".join(PurePath(input_name).name or input_name for input_name in source.inputs),
        description=_describe_source(source, arrays, stored_tokens, num_seen)
        + (f", undone: {', '.join(transforms)}" if transforms else ""),
        tokens=tuple(entry.geometry[1] for entry in arrays[::2]),
        tokens_seen=num_seen,
        dtype="/".join(cast.source for cast in casts),
        token_bytes=token_bytes,
        ids=ids,
        ids_hash=ids_hash,
        sha256=sha256,
        inverted_transforms=tuple(inverted_transforms),
        notes=tuple(_list_notes(source, casts)),
        directory=directory,
        _temporary_directory=temporary_directory,
    )


def _compute_token_bytes(source: Source, arrays: Sequence[LayerArray]) -> tuple[float, ...] | None:
    """Compute `InitialCache.token_bytes`: from the types that another engine's file names, and float8."""
    engine = source.engine_cache
    has_types = engine is not None and bool(engine.dequantised) and len(engine.types) == len(arrays)
    if not has_types and not any(entry.array.element for entry in arrays):
        return None
    layers = len(arrays) // 2  # `types` has those of K of all layers, then V; `arrays` has K and V of each
    num_bytes = [0.0] * layers
    for number, entry in enumerate(arrays):
        kv_heads, _, head_dim = entry.geometry
        word_bits = 8 if entry.array.element else 8 * dtypes.parse_dtype(entry.array.dtype).itemsize
        bits: float = word_bits
        if has_types and engine is not None:
            bits = engine.type_bits.get(engine.types[number // 2 + number % 2 * layers], bits)
        num_bytes[number // 2] += kv_heads * head_dim * bits / 8
    return tuple(num_bytes)


def _finish_hash(digest: Any, ids: Ids | None, ids_hash: TokenIdsFingerprint | None) -> str:
    """Return the hash of elements and positions, with that of the ids."""
    digest.update(b"" if ids is None else ids.astype("<i8").tobytes())
    digest.update(b"" if ids_hash is None else ids_hash.sha256.encode())
    return str(digest.hexdigest())


def read_model_interface(model: str | os.PathLike[str]) -> DecoderInterface:
    """Read the properties that a cache must match from a model's graph, without its weights."""
    files = find_model(model)
    return read_interface(read_onnx_graph(files.graph), files)


def read_options_for(model: DecoderInterface) -> ReadOptions:
    """Return options to open a cache of a model: files that do not specify heads have the model's."""
    return ReadOptions(packed=PackedOptions(geometry=PackedGeometry(kv_heads=model.kv_heads, head_dim=model.head_dim)))


def _check_geometry(location: str, arrays: Sequence[LayerArray], model: DecoderInterface) -> None:
    numbers = [entry.layer for entry in arrays[::2]]
    if numbers != list(range(model.layers)):
        raise OptionError(
            f"{location}: has K and V of {pluralize(len(numbers), 'layer')} ({format_range(numbers)}), {model.label} "
            f"has {model.layers}: expected a cache of the same model"
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
    """Return the ids of all tokens seen, as far as known, and their number."""
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
            "says which of them are held"
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
                "(--part sequence=N takes that of one sequence)"
            )
        if int(rows.max(initial=-1)) >= num_seen or int(rows.min(initial=0)) < 0:
            raise SourceError(
                f"{location}: layer {layer} holds position {rows.max()}, of a text of {num_seen:,} tokens"
            )
    if not model.has_positions and not stored_tokens.is_whole_text:
        raise OptionError(
            f"{location}: lacks tokens of its text ({stored_tokens}), and {model.label} takes no positions, so that "
            "those after would be shifted: expected a whole cache, or a model that is exported with position_ids"
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
