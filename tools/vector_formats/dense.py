"""`kvmnn-dense/1`: dense streams with their words, and streams that must be refused (docs/format-v2.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvmnn import dense
from kvmnn.errors import FrameError

from .common import CaseResult, Checker, run_list, sha256, unknown_lists

_FIELDS = {
    *("name", "stream", "words", "words_sha256", "dtype", "kv_heads", "tokens", "head_dim", "method", "rotary"),
    *("history", "history_rows", "table_set", "table_set_id", "refused", "why"),
}
_NUMPY = {"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32}


def run(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    """A case names files: `stream`; `words` and `history`, little-endian ``[kv_head, token, head_dim]``; `table_set`.

    `refused` is true for a stream that no decoder may accept, `why` the rule; it has no words.
    """
    yield from unknown_lists(index, ("cases",))
    yield from run_list(index["cases"], "cases", lambda case, check: _case(folder, case, check))


def _case(folder: Path, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_FIELDS)
    stream = (folder / case["stream"]).read_bytes()
    shape = (case["kv_heads"], -1, case["head_dim"])
    history = tables = None
    if "history" in case:
        history = np.fromfile(folder / case["history"], _NUMPY[case["dtype"]]).reshape(shape)
        check.field("history_rows", history.shape[1])
    table_set = (folder / case["table_set"]).read_bytes() if "table_set" in case else None
    if case["refused"]:
        try:
            tables = dense.SharedTables(table_set) if table_set is not None else None
            dense.decode(stream, history=history, tables=tables)
        except FrameError:
            return
        check.problems.append("decoded, but it must be refused")
        return
    if table_set is not None:
        tables = dense.SharedTables(table_set)
        check.field("table_set_id", f"{tables.id:016x}")
    info = dense.inspect(stream)
    for name in ("dtype", "kv_heads", "tokens", "head_dim", "method", "rotary"):
        check.field(name, getattr(info, name))
    found = dense.decode(stream, history=history, tables=tables)
    check.equal("numpy type", found.dtype, np.dtype(_NUMPY[case["dtype"]]))
    check.field("words_sha256", sha256(found.tobytes()))
    check.equal("words", found.tobytes() == (folder / case["words"]).read_bytes(), True)
