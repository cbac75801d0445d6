"""What a terminal shows of one of many files: a line for people, in the place of its JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..text import SIMULATED, escape_control, pluralize


def format_task_line(task: Mapping[str, Any]) -> str:
    """A line about a file, out of the object that `kvmnn.many.Done.line` has."""
    if not task["ok"]:
        return f"failed  {task['error']}"
    details = ", ".join(filter(None, _list_details(task.get("document") or {})))
    return f"ok      {escape_control(task['path'], keep_line_ends=False)}" + (f": {details}" if details else "")


def _list_details(document: Mapping[str, Any]) -> list[str]:
    """What of a document comes first: the label, the cache, the sizes."""
    if document["verb"] == "inspect":
        return _list_inspected_details(document["inputs"][0])
    return [document.get("label", ""), _format_sizes(document)]


def _list_inspected_details(input_document: Mapping[str, Any]) -> list[str]:
    cache = input_document.get("engine_cache")
    if cache is not None:
        tokens, layers = pluralize(cache["tokens"], "token"), pluralize(cache["layers"], "layer")
        types = "/".join(sorted(set(cache["types"])))
        return [f"{cache['engine']} {cache['kind']}", layers, tokens, types]
    arrays = input_document.get("arrays")
    num_arrays = len(arrays) + input_document.get("arrays_left_out", 0) if isinstance(arrays, list) else arrays
    kind = "" if isinstance(arrays, list) else str(input_document.get("kind", ""))
    return [kind, "" if num_arrays is None else pluralize(num_arrays, "array"), _format_sizes(input_document)]


_SIZE_KEYS = (("stored_bytes", ""), ("simulated_bytes", " simulated"), ("dense_bytes", " as dense streams"))


def _format_sizes(document: Mapping[str, Any]) -> str:
    """Bytes before and after, their ratio, and what changes its meaning."""
    sizes = document.get("breakdown", document).get("overall", document)
    for name, suffix in _SIZE_KEYS:
        if name in sizes:
            raw_bytes, stored_bytes = sizes["raw_bytes"], sizes[name]
            valid_bytes = sizes.get("valid_bytes", raw_bytes)
            ratio_text = (
                f", ratio {valid_bytes / stored_bytes:.4f}" if stored_bytes and sizes.get("ratio", True) else ""
            )
            suffix_text = "" if document.get("label") == SIMULATED else suffix
            return "; ".join(
                [f"{raw_bytes:,} -> {stored_bytes:,} bytes{suffix_text}{ratio_text}", *document.get("notes", ())]
            )
    return ""
