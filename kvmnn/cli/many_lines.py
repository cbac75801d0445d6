"""What a terminal shows of one of many files: a line for people, in the place of its JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..text import SIMULATED, count, visible


def line_of(done: Mapping[str, Any]) -> str:
    """A line about a file, out of the object that `kvmnn.many.Done.line` has."""
    if not done["ok"]:
        return f"failed  {done['error']}"
    found = ", ".join(filter(None, _said(done.get("document") or {})))
    return f"ok      {visible(done['path'], lines=False)}" + (f": {found}" if found else "")


def _said(document: Mapping[str, Any]) -> list[str]:
    """What of a document comes first: the label, the cache, the sizes."""
    if document["verb"] == "inspect":
        return _inspected(document["inputs"][0])
    return [document.get("label", ""), _sizes(document)]


def _inspected(found: Mapping[str, Any]) -> list[str]:
    cache = found.get("engine_cache")
    if cache is not None:
        tokens, layers = count(cache["tokens"], "token"), count(cache["layers"], "layer")
        types = "/".join(sorted(set(cache["types"])))
        return [f"{cache['engine']} {cache['kind']}", layers, tokens, types]
    arrays = found.get("arrays")
    number = len(arrays) + found.get("arrays_left_out", 0) if isinstance(arrays, list) else arrays
    kind = "" if isinstance(arrays, list) else str(found.get("kind", ""))
    return [kind, "" if number is None else count(number, "array"), _sizes(found)]


_SIZES = (("stored_bytes", ""), ("simulated_bytes", " simulated"), ("dense_bytes", " as dense streams"))


def _sizes(document: Mapping[str, Any]) -> str:
    """Bytes before and after, their ratio, and what changes its meaning."""
    sizes = document.get("breakdown", document).get("overall", document)
    for name, how in _SIZES:
        if name in sizes:
            raw, made = sizes["raw_bytes"], sizes[name]
            valid = sizes.get("valid_bytes", raw)
            times = f", ratio {valid / made:.4f}" if made and sizes.get("ratio", True) else ""
            said = "" if document.get("label") == SIMULATED else how
            return "; ".join([f"{raw:,} -> {made:,} bytes{said}{times}", *document.get("notes", ())])
    return ""
