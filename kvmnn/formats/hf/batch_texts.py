"""Which tokens of a batch are padding: ``attention_mask`` and token ids that were saved with a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...arrays.engine_cache import BatchText
from ...errors import SourceError
from ...text import count
from .objects import AnyTensor, Cache

_MASKS = ("attention_mask", "decoder_attention_mask")
_IDS = (("input_ids", "sequences", "token_ids"), ("decoder_input_ids", "sequences"))
_INTEGERS = ("int64", "int32", "int16", "uint8", "bool")
_MOST_MISSING = 1  # a model's last token has an id, and no K and V until the model goes on


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts of a batch.

    Parameters
    ----------
    entries
        One for each; empty where the file has neither mask nor ids for them.
    notes
        What is left out, as sentences.
    evicted
        Why tokens are missing in the cache, as a sentence; empty where none are.
    """

    entries: tuple[BatchText, ...] = ()
    notes: list[str] = field(default_factory=list)
    evicted: str = ""


def find_texts(where: str, cache: Cache, tokens: int, batch: int, *, has_halves: bool, is_exact: bool) -> Texts:
    """Find the texts of a batch by what was saved with a cache.

    Parameters
    ----------
    where
        What messages call it.
    tokens
        That the cache has seen of each text, padding included.
    batch
        Texts.
    has_halves
        Whether masks and ids of the encoder are there as well as those of the decoder.
    is_exact
        Whether `tokens` is what the cache has counted: longer masks and ids do not tell that it was cut.

    Raises
    ------
    SourceError
        For a text whose mask leaves no token.
    """
    found = Texts()
    mask = _matrix(cache, _MASKS[has_halves : has_halves + 1], batch, found.notes)
    ids = _matrix(cache, _IDS[has_halves], batch, found.notes)
    longest = max((matrix.shape[1] for matrix in (mask, ids) if matrix is not None), default=0)
    if longest > tokens + _MOST_MISSING and not is_exact:
        what = "mask" if mask is not None and mask.shape[1] == longest else "ids"
        evicted = (
            f"{count(tokens, 'token')} are stored and {what} of {longest:,} were saved with them; nothing tells which "
            "tokens these are"
        )
        return Texts(notes=found.notes, evicted=evicted)
    columns = np.ones((batch, tokens), bool)
    if mask is not None:
        known = min(mask.shape[1], tokens)
        columns[:, :known] = mask[:, :known] != 0
        if known < tokens:
            found.notes.append(f"attention_mask has {known:,} of {count(tokens, 'token')}: the others count as text")
    if not columns.any(axis=1).all():
        raise SourceError(f"{where}: attention_mask leaves no token of text {int(np.argmin(columns.any(axis=1)))}")
    if ids is not None and ids.shape[1] < tokens:
        found.notes.append(f"{count(ids.shape[1], 'token id')} for {count(tokens, 'token')}: they are left out")
        ids = None
    elif ids is not None and ids.shape[1] > tokens:
        more = ids.shape[1] - tokens
        found.notes.append(f"the last {count(more, 'token id')} of {ids.shape[1]:,} {_has(more)} no K and V yet")
        ids = ids[:, :tokens]
    if ids is None and columns.all():
        return found
    entries = [
        BatchText(np.flatnonzero(columns[text]), None if ids is None else ids[text, columns[text]].astype(np.int64))
        for text in range(batch)
    ]
    return Texts(tuple(entries), found.notes)


def _has(number: int) -> str:
    return "has" if number == 1 else "have"


def _matrix(cache: Cache, names: Sequence[str], batch: int, notes: list[str]) -> npt.NDArray[np.int64] | None:
    """Whole numbers of every text of the batch, by the first of these names."""
    for name in names:
        tensor = cache.beside.get(name)
        if tensor is None:
            continue
        shape = tuple(tensor.shape)
        if shape[0:1] == shape and batch == 1:
            shape = (1, *shape)
        if len(shape) != 2 or shape[0] != batch:
            notes.append(f"{name} {list(tensor.shape)} is not used: expected [{batch}, token]")
            continue
        words = _words(tensor)
        if words is None:
            notes.append(f"{name} of type {tensor.type_name} is not used")
            continue
        return words.reshape(shape)
    return None


def _words(tensor: AnyTensor) -> npt.NDArray[np.int64] | None:
    kind = tensor.type_name
    if kind not in (*_INTEGERS, "float32", "float16"):
        return None
    words = np.array(tensor.view())  # of memory the bits, of files numbers
    if kind.startswith("float"):
        return np.asarray(words.view("f4" if kind == "float32" else "f2") != 0, np.int64)
    numbers: npt.NDArray[np.int64] = words.view({"bool": "u1"}.get(kind, kind)).astype(np.int64)
    return numbers
