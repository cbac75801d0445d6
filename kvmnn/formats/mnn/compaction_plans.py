"""Which tokens of each layer stay, as files have it: pairs of `kvmnn plan`, positions of `dump-kv` and `eval`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...arrays.engine_cache import runs_of
from ...bundle.beside import POSITIONS, TOKEN_IDS
from ...dtypes import Positions
from ...errors import KvmnnError, MissingOptionError, SourceError
from ...files.json_document import Node, parse, read_bounded
from ...packed.cache_info import CacheInfo, LayerInfo, TokenIds
from ...packed.reserve import Pair
from ...text import count
from ..row_rotation import positions_of
from .token_ids import parsed_token_ids

_MAX_BYTES: Final = 256 << 20
_FULL: Final = "full"
_MAX_LABELS: Final = 8


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
    reserve: tuple[Pair, ...]


def read_plans(path: str, info: CacheInfo, *, label: str | None = None) -> list[CompactionPlan]:
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
    file = Path(path, POSITIONS) if Path(path).is_dir() else Path(path)
    document = parse(read_bounded(file, _MAX_BYTES), str(file), _MAX_BYTES)
    if isinstance(document.value, dict) and "traces" in document.value:
        return _of_evaluation(document, info, label)
    if label is not None:
        raise SourceError(f"{file}: is no result of eval, of whose policies one could be named")
    if isinstance(document.value, dict) and "layers" in document.value:
        entries = document.at("layers").items()
        if any(isinstance(entry.value, dict) and {"pairs", "heads"} & entry.value.keys() for entry in entries):
            return _of_pairs(document, entries, info)
        _check_ids(file, info)
        seen = document.at("tokens_seen").integer(1) if "tokens_seen" in document.value else None
        layers = {_number(entry, place): entry for place, entry in enumerate(entries)}
        return _of_positions(document, info, {n: entry.at("positions") for n, entry in layers.items()}, seen)
    return _of_pairs(document, document.items(), info)


def _of_pairs(document: Node, entries: Sequence[Node], info: CacheInfo) -> list[CompactionPlan]:
    plans: dict[int, CompactionPlan] = {}
    for entry in entries:
        if isinstance(entry.value, dict) and "heads" in entry.value:
            raise _heads_differ(document.where, entry.at("layer").integer(0))
        pairs = []
        for pair in entry.at("pairs").items():
            begin, size = pair.items(2, 2)
            pairs.append((begin.whole(), size.whole()))
        plans[entry.at("layer").integer(0)] = CompactionPlan(entry.at("remove").integer(0), tuple(pairs))
    layers = len(info.layers)
    if sorted(plans) != list(range(layers)) or len(entries) != layers:
        raise SourceError(f"{document.where}: has plans for {len(entries)} layers: expected one for each of {layers}")
    return [plans[layer] for layer in range(layers)]


def _of_evaluation(document: Node, info: CacheInfo, label: str | None) -> list[CompactionPlan]:
    """The plans that an evaluation recorded of one of its policies, at the end of its first text."""
    traces = {trace.at("label").text(): trace for trace in document.at("traces").items()}
    labels = [name for name in traces if name != _FULL]
    if not labels:
        raise SourceError(f"{document.where}: records no tokens that a policy kept: eval does with --plot DIR")
    if label is None and len(labels) > 1:
        raise MissingOptionError(
            f"{document.where}: is of {len(labels)} policies: --plan-label names one: "
            + ", ".join(map(repr, labels[:_MAX_LABELS]))
            + (" ..." if len(labels) > _MAX_LABELS else "")
        )
    wanted = labels[0] if label is None else label
    if wanted not in traces:
        shown = ", ".join(map(repr, list(traces)[:_MAX_LABELS]))
        raise SourceError(f"{document.where}: has no policy {wanted!r}: expected one of {shown}")
    trace = traces[wanted]
    if "kept" not in trace.value or not trace.at("kept").value:
        raise SourceError(f"{document.where}: does not record the tokens that each layer kept: repeat the evaluation")
    entries = {entry.at("layer").integer(0): entry.at("positions") for entry in trace.at("kept").items()}
    return _of_positions(document, info, entries, trace.at("step_tokens").items(least=1)[-1].integer(1))


def _of_positions(
    document: Node, info: CacheInfo, positions: dict[int, Node], tokens_seen: int | None
) -> list[CompactionPlan]:
    layers = [layer.layer for layer in info.layers]
    if sorted(positions) != layers:
        raise SourceError(f"{document.where}: has positions of {count(len(positions), 'layer')}, not of {len(layers)}")
    return [_of_layer(layer, positions[layer.layer], tokens_seen) for layer in info.layers]


def _of_layer(layer: LayerInfo, said: Node, tokens_seen: int | None) -> CompactionPlan:
    kept, held = _positions(said, layer.layer), positions_of(layer.text_runs)
    places = np.searchsorted(held, kept)
    inside = places < len(held)
    if not inside.all() or (held[places] != kept).any():
        missing = kept[~inside][0] if not inside.all() else kept[held[places] != kept][0]
        raise SourceError(
            f"{said.where}: layer {layer.layer} keeps the token at position {missing:,}, and the cache holds "
            f"{count(len(held), 'token')} up to {held[-1]:,}: expected the plan of this text"
        )
    if tokens_seen is not None and held[-1] >= tokens_seen:
        raise SourceError(
            f"{said.where}: is of a text of {count(tokens_seen, 'token')}, and layer {layer.layer} of the cache holds "
            f"tokens up to position {held[-1]:,}"
        )
    return _plan_of(places, len(held))


def _plan_of(places: Positions, tokens: int) -> CompactionPlan:
    """The plan that keeps these of so many tokens: the window begins behind the first tokens that stay."""
    runs = runs_of(places)
    start = runs[0][1] if runs and runs[0][0] == 0 else 0
    pairs = tuple((begin - start, size) for begin, size in runs if begin >= start and size)
    return CompactionPlan(tokens - start, pairs)


def _positions(said: Node, layer: int) -> Positions:
    """Positions of one layer; `SourceError` where heads have different ones."""
    values: Any = said.value
    by_head = isinstance(values, list) and bool(values) and all(isinstance(row, list) for row in values)
    rows = [list(_integers(row)) for row in (said.items() if by_head else [said])]
    if any(row != rows[0] for row in rows):
        raise _heads_differ(said.where, layer)
    kept = np.array(rows[0], np.int64)
    if (np.diff(kept) <= 0).any():
        raise said.wrong("ascending positions")
    return kept


def _integers(row: Node) -> Iterable[int]:
    values: Any = row.value
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 31 for value in values):
        raise row.wrong("a list of positions")
    return values


def _heads_differ(where: str, layer: int) -> KvmnnError:
    return SourceError(
        f"{where}: layer {layer}: keeps tokens of its own in each KV head, and packed files hold the same in all: "
        "expected a plan of a policy that keeps those (streaming, recent_only ...)"
    )


def _check_ids(file: Path, info: CacheInfo) -> None:
    """`SourceError` where the text of a dump, of which its folder has the ids, is not that of the cache."""
    beside = file.with_name(TOKEN_IDS)
    if info.token_ids is None or not beside.is_file():
        return
    ids = parsed_token_ids(read_bounded(beside, _MAX_BYTES), str(beside))
    if len(ids) != info.token_ids.count or TokenIds.of(ids) != info.token_ids:
        raise SourceError(f"{beside}: are not the {info.token_ids.count:,} token ids that the cache was made from")


def _number(layer: Node, place: int) -> int:
    return layer.at("layer").integer(0) if isinstance(layer.value, dict) and "layer" in layer.value else place
