"""Which tokens of a batch are padding: ``attention_mask`` and token ids that were saved with a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..._util.text import pluralize
from ...arrays.engine_cache import BatchText
from ...errors import SourceError
from .objects import AnyTensor, TransformersCache

_MASK_NAMES = ("attention_mask", "decoder_attention_mask")
_TOKEN_ID_NAMES = (("input_ids", "sequences", "token_ids"), ("decoder_input_ids", "sequences"))
_INTEGER_TYPES = ("int64", "int32", "int16", "uint8", "bool")
_MAX_MISSING_TOKENS = 1  # a model's last token has an id, and no K and V until the model goes on


@dataclass(frozen=True, eq=False)
class BatchTexts:
    """The texts of a batch."""

    #: One for each; empty where the file has neither mask nor ids for them.
    entries: tuple[BatchText, ...] = ()
    #: What is left out, as sentences.
    notes: list[str] = field(default_factory=list)
    #: Why tokens are missing in the cache, as a sentence; empty where none are.
    eviction_text: str = ""


def find_batch_texts(
    label: str, cache: TransformersCache, num_tokens: int, batch: int, *, has_halves: bool, is_exact: bool
) -> BatchTexts:
    """Find the texts of a batch by what was saved with a cache."""
    batch_texts = BatchTexts()
    mask = _read_batch_matrix(cache, _MASK_NAMES[has_halves : has_halves + 1], batch, batch_texts.notes)
    ids = _read_batch_matrix(cache, _TOKEN_ID_NAMES[has_halves], batch, batch_texts.notes)
    max_columns = max((matrix.shape[1] for matrix in (mask, ids) if matrix is not None), default=0)
    if max_columns > num_tokens + _MAX_MISSING_TOKENS and not is_exact:
        source_name = "mask" if mask is not None and mask.shape[1] == max_columns else "ids"
        eviction_text = (
            f"{pluralize(num_tokens, 'token')} are stored and {source_name} of {max_columns:,} were saved with them; "
            f"nothing tells which "
            "tokens these are"
        )
        return BatchTexts(notes=batch_texts.notes, eviction_text=eviction_text)
    is_token = np.ones((batch, num_tokens), bool)
    if mask is not None:
        num_masked_columns = min(mask.shape[1], num_tokens)
        is_token[:, :num_masked_columns] = mask[:, :num_masked_columns] != 0
        if num_masked_columns < num_tokens:
            batch_texts.notes.append(
                f"attention_mask has {num_masked_columns:,} of {pluralize(num_tokens, 'token')}: the others count as "
                f"text"
            )
    if not is_token.any(axis=1).all():
        raise SourceError(f"{label}: attention_mask leaves no token of text {int(np.argmin(is_token.any(axis=1)))}")
    if ids is not None and ids.shape[1] < num_tokens:
        batch_texts.notes.append(
            f"{pluralize(ids.shape[1], 'token id')} for {pluralize(num_tokens, 'token')}: they are left out"
        )
        ids = None
    elif ids is not None and ids.shape[1] > num_tokens:
        num_extra = ids.shape[1] - num_tokens
        batch_texts.notes.append(
            f"the last {pluralize(num_extra, 'token id')} of {ids.shape[1]:,} {_choose_have_form(num_extra)} no K and "
            f"V yet"
        )
        ids = ids[:, :num_tokens]
    if ids is None and is_token.all():
        return batch_texts
    entries = [
        BatchText(np.flatnonzero(is_token[text]), None if ids is None else ids[text, is_token[text]].astype(np.int64))
        for text in range(batch)
    ]
    return BatchTexts(tuple(entries), batch_texts.notes)


def _choose_have_form(count: int) -> str:
    return "has" if count == 1 else "have"


def _read_batch_matrix(
    cache: TransformersCache, names: Sequence[str], batch: int, notes: list[str]
) -> npt.NDArray[np.int64] | None:
    """Whole numbers of every text of the batch, by the first of these names."""
    for name in names:
        tensor = cache.sidecar_tensors.get(name)
        if tensor is None:
            continue
        shape = tuple(tensor.shape)
        if shape[0:1] == shape and batch == 1:
            shape = (1, *shape)
        if len(shape) != 2 or shape[0] != batch:
            notes.append(f"{name} {list(tensor.shape)} is not used: expected [{batch}, token]")
            continue
        elements = _read_int64_elements(tensor)
        if elements is None:
            notes.append(f"{name} of type {tensor.type_name} is not used")
            continue
        return elements.reshape(shape)
    return None


def _read_int64_elements(tensor: AnyTensor) -> npt.NDArray[np.int64] | None:
    type_name = tensor.type_name
    if type_name not in (*_INTEGER_TYPES, "float32", "float16"):
        return None
    elements = np.array(tensor.read_elements_unbounded())  # of memory the bits, of files numbers
    if type_name.startswith("float"):
        return np.asarray(elements.view("f4" if type_name == "float32" else "f2") != 0, np.int64)
    values: npt.NDArray[np.int64] = elements.view({"bool": "u1"}.get(type_name, type_name)).astype(np.int64)
    return values
