"""Windows of texts: what a model reads to make its profile."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from .._util.dataclass import dataclass
from ..dtypes import Indices
from ..errors import KvmnnError
from ..lm.documents import Document, read_documents
from ..lm.tokenizer import Tokenizer
from ..profiles import TextOrigin

MAX_WINDOW_TOKENS = 2048
MIN_WINDOW_TOKENS, MIN_SHARE_TOKENS = 32, 256


@dataclass(frozen=True, eq=False)
class TextWindow:
    """Tokens that are read together, as a text of their own."""

    document: Document
    #: int64 ``[token]``.
    ids: Indices


def read_windows(
    paths: Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    num_tokens: int,
    max_positions: int | None,
    notes: list[str],
) -> list[TextWindow]:
    """Return windows of all texts by turns, of `num_tokens` tokens together or of all there are.

    Raises
    ------
    KvmnnError
        For texts that are too short for one window.
    """
    documents = read_documents(paths, tokenizer, num_tokens, notes=notes)
    share = max(MIN_SHARE_TOKENS, num_tokens // len(documents))  # so that all texts have their part
    window_tokens = min(MAX_WINDOW_TOKENS, max_positions or MAX_WINDOW_TOKENS, num_tokens, share)
    queues = [_split_document(document, window_tokens) for document in documents]
    windows: list[TextWindow] = []
    num_missing = num_tokens
    while any(queues) and num_missing >= MIN_WINDOW_TOKENS:
        for queue in queues:
            if queue and num_missing >= MIN_WINDOW_TOKENS:
                window = queue.pop(0)
                windows.append(TextWindow(window.document, window.ids[:num_missing]))
                num_missing -= len(windows[-1].ids)
    if not windows:
        raise KvmnnError(f"the texts have no window of {MIN_WINDOW_TOKENS} tokens: a profile needs thousands")
    if num_missing >= MIN_WINDOW_TOKENS:
        notes.append(f"{num_tokens:,} tokens were asked for, the texts have {num_tokens - num_missing:,}.")
    return windows


def list_origins(windows: Sequence[TextWindow]) -> tuple[TextOrigin, ...]:
    """Return each text of the windows with the tokens that are read of it."""
    tokens_by_name: dict[str, int] = {}
    for window in windows:
        name = window.document.name
        tokens_by_name[name] = tokens_by_name.get(name, 0) + len(window.ids)
    documents = {window.document.name: window.document for window in windows}
    return tuple(
        TextOrigin(name=name, sha256=documents[name].sha256, tokens=tokens) for name, tokens in tokens_by_name.items()
    )


def _split_document(document: Document, window_tokens: int) -> list[TextWindow]:
    """Split a document; each window begins with the token that begins every text, if there is one."""
    first = document.ids[:1] if document.begins_with_bos else document.ids[:0]
    later_ids = document.ids[len(first) :]
    size = window_tokens - len(first)
    windows = [np.concatenate([first, later_ids[begin : begin + size]]) for begin in range(0, len(later_ids), size)]
    return [TextWindow(document, ids) for ids in windows if len(ids) >= MIN_WINDOW_TOKENS]
