"""Which tokens of each layer stay, as files have it: pairs of `kvmnn plan`, positions of `dump-kv` and `eval`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...arrays.engine_cache import positions_to_runs
from ...bundle.beside import POSITIONS_NAME, TOKEN_IDS_NAME
from ...dtypes import Positions
from ...errors import KvmnnError, MissingOptionError, SourceError
from ...files.json_document import JsonReader, parse_document, read_bounded
from ...packed.cache_info import CacheInfo, LayerInfo, TokenIdsFingerprint
from ...packed.reserve import ReservePair
from ...text import pluralize
from ..row_rotation import expand_position_runs
from .token_ids import parse_token_ids

_MAX_PLAN_BYTES: Final = 256 << 20
_FULL_CACHE_LABEL: Final = "full"
_MAX_SHOWN_LABELS: Final = 8


@dataclass(frozen=True)
class CompactionPlan:
    """What stays of one layer.

    Parameters
    ----------
    remove
        Tokens at the tail that form the window; None for all there are.
    reserve
        Pairs ``(begin, size)`` of the window that stay, ascending; begin counts from the window's start.
    """

    remove: int | None
    reserve: tuple[ReservePair, ...]


def read_compaction_plans(path: str, info: CacheInfo, *, label: str | None = None) -> list[CompactionPlan]:
    """Read which tokens stay of each layer of a cache; layers may keep different ones.

    Parameters
    ----------
    path
        A JSON file: a list of ``{"layer": 0, "remove": N, "pairs": [[begin, size], ...]}`` (``kvmnn plan``, ``-o`` or
        ``--json``); ``positions.json`` of ``kvmnn dump-kv --policy``, or its folder; or what ``kvmnn eval --plot DIR
        --json`` prints.
    info
        The cache.
    label
        Of an evaluation of several policies: whose tokens.

    Raises
    ------
    KvmnnError
        When the file is none of these, has not one plan for each layer, keeps other tokens than the cache holds or
        different ones in each head, or is of another text.
    MissingOptionError
        When an evaluation has several policies.
    """
    file = Path(path, POSITIONS_NAME) if Path(path).is_dir() else Path(path)
    document = parse_document(read_bounded(file, _MAX_PLAN_BYTES), str(file), _MAX_PLAN_BYTES)
    if isinstance(document.value, dict) and "traces" in document.value:
        return _parse_evaluation_plans(document, info, label)
    if label is not None:
        raise SourceError(f"{file}: is no result of eval, of whose policies one could be named")
    if isinstance(document.value, dict) and "layers" in document.value:
        entries = document.get("layers").read_list()
        if any(isinstance(entry.value, dict) and {"pairs", "heads"} & entry.value.keys() for entry in entries):
            return _parse_pair_plans(document, entries, info)
        _check_token_ids(file, info)
        tokens_seen = document.get("tokens_seen").read_int(1) if "tokens_seen" in document.value else None
        entry_by_layer = {_parse_layer_number(entry, index): entry for index, entry in enumerate(entries)}
        return _parse_position_plans(
            document,
            info,
            {layer_number: entry.get("positions") for layer_number, entry in entry_by_layer.items()},
            tokens_seen,
        )
    return _parse_pair_plans(document, document.read_list(), info)


def _parse_pair_plans(document: JsonReader, entries: Sequence[JsonReader], info: CacheInfo) -> list[CompactionPlan]:
    plans: dict[int, CompactionPlan] = {}
    for entry in entries:
        if isinstance(entry.value, dict) and "heads" in entry.value:
            raise _make_heads_differ_error(document.label, entry.get("layer").read_int(0))
        pairs = []
        for pair in entry.get("pairs").read_list():
            begin, size = pair.read_list(2, 2)
            pairs.append((begin.read_any_int(), size.read_any_int()))
        plans[entry.get("layer").read_int(0)] = CompactionPlan(entry.get("remove").read_int(0), tuple(pairs))
    num_layers = len(info.layers)
    if sorted(plans) != list(range(num_layers)) or len(entries) != num_layers:
        raise SourceError(
            f"{document.label}: has plans for {len(entries)} layers: expected one for each of {num_layers}"
        )
    return [plans[layer] for layer in range(num_layers)]


def _parse_evaluation_plans(document: JsonReader, info: CacheInfo, label: str | None) -> list[CompactionPlan]:
    """The plans that an evaluation recorded of one of its policies, at the end of its first text."""
    trace_by_label = {trace.get("label").read_str(): trace for trace in document.get("traces").read_list()}
    labels = [name for name in trace_by_label if name != _FULL_CACHE_LABEL]
    if not labels:
        raise SourceError(f"{document.label}: records no tokens that a policy kept: eval does with --plot DIR")
    if label is None and len(labels) > 1:
        raise MissingOptionError(
            f"{document.label}: is of {len(labels)} policies: --plan-label names one: "
            + ", ".join(map(repr, labels[:_MAX_SHOWN_LABELS]))
            + (" ..." if len(labels) > _MAX_SHOWN_LABELS else "")
        )
    selected_label = labels[0] if label is None else label
    if selected_label not in trace_by_label:
        labels_text = ", ".join(map(repr, list(trace_by_label)[:_MAX_SHOWN_LABELS]))
        raise SourceError(f"{document.label}: has no policy {selected_label!r}: expected one of {labels_text}")
    trace = trace_by_label[selected_label]
    if "kept" not in trace.value or not trace.get("kept").value:
        raise SourceError(f"{document.label}: does not record the tokens that each layer kept: repeat the evaluation")
    positions_by_layer = {
        entry.get("layer").read_int(0): entry.get("positions") for entry in trace.get("kept").read_list()
    }
    return _parse_position_plans(
        document, info, positions_by_layer, trace.get("step_tokens").read_list(min_len=1)[-1].read_int(1)
    )


def _parse_position_plans(
    document: JsonReader, info: CacheInfo, positions_by_layer: dict[int, JsonReader], tokens_seen: int | None
) -> list[CompactionPlan]:
    layer_numbers = [layer.layer for layer in info.layers]
    if sorted(positions_by_layer) != layer_numbers:
        raise SourceError(
            f"{document.label}: has positions of {pluralize(len(positions_by_layer), 'layer')}, not of "
            f"{len(layer_numbers)}"
        )
    return [_plan_from_positions(layer, positions_by_layer[layer.layer], tokens_seen) for layer in info.layers]


def _plan_from_positions(layer: LayerInfo, node: JsonReader, tokens_seen: int | None) -> CompactionPlan:
    kept_positions, stored_positions = (
        _parse_positions(node, layer.layer),
        expand_position_runs(layer.text_position_runs),
    )
    indices = np.searchsorted(stored_positions, kept_positions)
    is_in_range = indices < len(stored_positions)
    if not is_in_range.all() or (stored_positions[indices] != kept_positions).any():
        missing_position = (
            kept_positions[~is_in_range][0]
            if not is_in_range.all()
            else kept_positions[stored_positions[indices] != kept_positions][0]
        )
        raise SourceError(
            f"{node.label}: layer {layer.layer} keeps the token at position {missing_position:,}, and the cache holds "
            f"{pluralize(len(stored_positions), 'token')} up to {stored_positions[-1]:,}: expected the plan of this "
            f"text"
        )
    if tokens_seen is not None and stored_positions[-1] >= tokens_seen:
        raise SourceError(
            f"{node.label}: is of a text of {pluralize(tokens_seen, 'token')}, and layer {layer.layer} of the cache "
            f"holds "
            f"tokens up to position {stored_positions[-1]:,}"
        )
    return _plan_from_indices(indices, len(stored_positions))


def _plan_from_indices(indices: Positions, num_tokens: int) -> CompactionPlan:
    """The plan that keeps these of so many tokens: the window begins behind the first tokens that stay."""
    runs = positions_to_runs(indices)
    window_start = runs[0][1] if runs and runs[0][0] == 0 else 0
    pairs = tuple((begin - window_start, size) for begin, size in runs if begin >= window_start and size)
    return CompactionPlan(num_tokens - window_start, pairs)


def _parse_positions(node: JsonReader, layer: int) -> Positions:
    """Positions of one layer; `SourceError` where heads have different ones."""
    values: Any = node.value
    is_per_head = isinstance(values, list) and bool(values) and all(isinstance(row, list) for row in values)
    rows = [list(_parse_position_list(row)) for row in (node.read_list() if is_per_head else [node])]
    if any(row != rows[0] for row in rows):
        raise _make_heads_differ_error(node.label, layer)
    positions = np.array(rows[0], np.int64)
    if (np.diff(positions) <= 0).any():
        raise node.error("ascending positions")
    return positions


def _parse_position_list(row: JsonReader) -> Iterable[int]:
    values: Any = row.value
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 31 for value in values):
        raise row.error("a list of positions")
    return values


def _make_heads_differ_error(label: str, layer: int) -> KvmnnError:
    return SourceError(
        f"{label}: layer {layer}: keeps tokens of its own in each KV head, and packed files hold the same in all: "
        "expected a plan of a policy that keeps those (streaming, recent_only ...)"
    )


def _check_token_ids(file: Path, info: CacheInfo) -> None:
    """`SourceError` where the text of a dump, of which its folder has the ids, is not that of the cache."""
    ids_path = file.with_name(TOKEN_IDS_NAME)
    if info.token_ids is None or not ids_path.is_file():
        return
    ids = parse_token_ids(read_bounded(ids_path, _MAX_PLAN_BYTES), str(ids_path))
    if len(ids) != info.token_ids.count or TokenIdsFingerprint.from_ids(ids) != info.token_ids:
        raise SourceError(f"{ids_path}: are not the {info.token_ids.count:,} token ids that the cache was made from")


def _parse_layer_number(layer: JsonReader, index: int) -> int:
    return layer.get("layer").read_int(0) if isinstance(layer.value, dict) and "layer" in layer.value else index
