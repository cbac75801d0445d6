"""Which tokens of a stored cache a policy would keep: its layers, each as a prompt that was attended once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.engine_cache import runs_of
from ..dtypes import Floats, Indices, Positions
from ..errors import OptionError
from ..packed.cache_info import Ranges
from ..text import LOSSY, UNCHANGED, count, span
from .base import Policy
from .labels import LabelledPolicy, jsonable
from .registry import POLICIES
from .view import LayerView

_MOST_PAIRS = 100
_MOST_RUNS = 4
_LEAST_COLUMNS = 10
_LEGEND = "# kept, . dropped, 1 to 9 tenths kept"


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerKept:
    """What stays of one layer.

    Attributes
    ----------
    layer
        Its number.
    tokens
        That are stored.
    nbytes
        Of its K and V.
    kept
        Stored tokens that stay, ascending: int64 ``[kept]``, or ``[kv_head, kept]`` where heads keep different ones;
        None: all stay.
    skipped
        Whether the policy never cuts this layer.
    positions
        True position of each stored token; None where nothing says it of all heads.
    """

    layer: int
    tokens: int
    nbytes: int
    kept: Indices | None = None
    skipped: bool = False
    positions: Positions | None = None

    @property
    def tokens_after(self) -> int:
        """Tokens that stay, in each KV head."""
        return self.tokens if self.kept is None else int(self.kept.shape[-1])

    @property
    def bytes_after(self) -> int:
        """Bytes of K and V of those."""
        return self.nbytes // self.tokens * self.tokens_after

    def runs(self) -> list[Ranges]:
        """``(begin, size)`` runs of the stored tokens that stay: of all heads, or of each."""
        kept = np.arange(self.tokens) if self.kept is None else self.kept
        return [runs_of(row) for row in np.atleast_2d(kept)]

    def entry(self) -> dict[str, Any]:
        """What `kvmnn compact --plan` reads of a layer; with ``heads`` instead of ``pairs`` it refuses it."""
        if self.kept is None:
            return {"layer": self.layer, "remove": 0, "pairs": []}
        rows = [[list(run) for run in runs] for runs in self.runs()]
        what: dict[str, Any] = {"pairs": rows[0]} if self.kept.ndim == 1 else {"heads": rows}
        return {"layer": self.layer, "remove": self.tokens, **what}

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **self.entry(),
            "tokens": self.tokens,
            "tokens_after": self.tokens_after,
            "bytes": self.nbytes,
            "bytes_after": self.bytes_after,
            "skipped": self.skipped,
            "positions": self._positions_after(),
        }

    def letters(self, group: int) -> str:
        """A letter for `group` tokens each: how many of all heads stay."""
        shares = np.ones(self.tokens)
        if self.kept is not None:
            rows = np.atleast_2d(self.kept)
            shares = np.bincount(rows.reshape(-1), minlength=self.tokens) / len(rows)
        return "".join(_letter(float(shares[i : i + group].mean())) for i in range(0, self.tokens, group))

    def _positions_after(self) -> list[list[int]] | None:
        if self.positions is None or (self.kept is not None and self.kept.ndim > 1):
            return None
        places = self.positions if self.kept is None else self.positions[self.kept]
        return [list(run) for run in runs_of(places)]


@dataclass(frozen=True, kw_only=True, eq=False)
class CachePlan:
    """What a policy would keep of a cache.

    Attributes
    ----------
    policy
        What decided.
    layers
        What stays of each.
    seconds
        Time that it took.
    input, output
        What was read, and the file that the plan was written to, if any.
    """

    policy: Policy
    layers: tuple[LayerKept, ...]
    seconds: float = 0.0
    input: str | None = None
    output: str | None = None

    @property
    def label(self) -> str:
        """``"LOSSY"`` if any layer would drop tokens, else ``"UNCHANGED"``."""
        return LOSSY if any(layer.tokens_after < layer.tokens for layer in self.layers) else UNCHANGED

    @property
    def by_head(self) -> bool:
        """Whether KV heads of any layer keep different tokens, which no packed file holds."""
        return any(layer.kept is not None and layer.kept.ndim > 1 for layer in self.layers)

    @property
    def bytes_before(self) -> int:
        """Bytes of K and V of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of what stays."""
        return sum(layer.bytes_after for layer in self.layers)

    def entries(self) -> list[dict[str, Any]]:
        """The document of ``-o``."""
        return [layer.entry() for layer in self.layers]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "input": self.input,
            "output": self.output,
            "label": self.label,
            "seconds": self.seconds,
            "policy": {
                "label": LabelledPolicy.of(self.policy).label,
                "policy": self.policy.name,
                "options": jsonable(self.policy.options()),
            },
            "by_head": self.by_head,
            "bytes": self.bytes_before,
            "bytes_after": self.bytes_after,
            "layers": [layer.to_dict() for layer in self.layers],
        }

    def lines(self, *, width: int = 100, picture: bool = True) -> list[str]:
        """For people: a row for each layer, or for several that keep the same, in `width` columns."""
        alike: dict[Hashable, list[LayerKept]] = {}
        for layer in self.layers:
            alike.setdefault(_likeness(layer), []).append(layer)
        groups = list(alike.values())
        rows = [("layers", "tokens", "stay", "bytes"), *map(_figures, groups)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = ["  " + "  ".join(map(str.rjust, row, widths)) for row in rows]
        room = max(_LEAST_COLUMNS, width - len(table[0]) - 2)
        tokens = -(-max(layer.tokens for layer in self.layers) // room)
        lines = [self._head(), table[0]]
        for group, row in zip(groups, table[1:], strict=True):
            drawn = group[0].letters(tokens) if picture else ""
            lines.append(f"{row}  {'never cut' if group[0].skipped else drawn}".rstrip())
            if (pairs := _pairs(group[0])) is not None:
                lines.append(f"    --remove {group[0].tokens} --reserve {pairs}")
        if picture:
            of = " of all KV heads" if self.by_head else ""
            lines.append(f"  {count(tokens, 'token')} a letter: {_LEGEND}{of}")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _head(self) -> str:
        name = LabelledPolicy.of(self.policy).label
        before = count(self.bytes_before, "byte")
        if self.label == UNCHANGED:
            return f"{name}: {UNCHANGED}, all tokens stay, {before} of K and V: {self._why()}"
        cut = [layer for layer in self.layers if layer.tokens_after < layer.tokens]
        after, tokens = (span(sorted({*found})) for found in zip(*map(_lengths, cut), strict=True))
        where = ["in each KV head"] if self.by_head else []
        where += [f"in {len(cut)} of {len(self.layers)} layers"] if len(cut) < len(self.layers) else []
        share = _share(self.bytes_after, self.bytes_before)
        stay = " ".join([f"{after} of {tokens} tokens stay", *where])
        return f"{name}: {LOSSY}, {stay}, {share} of {before} of K and V"

    def _why(self) -> str:
        cut = [layer.tokens for layer in self.layers if not layer.skipped]
        if not cut:
            return "none of its layers is ever cut"
        if not self.policy.evicts:
            return "it keeps everything"
        return self.policy.why_all_stay(max(cut), max(cut)) or f"its budget is {self.policy.budget_means}"


def check_plannable(policy: Policy) -> None:
    """Raise `OptionError` for a policy that ranks tokens by what no cache holds."""
    if policy.needs_attention:
        able = ", ".join(name for name, each in POLICIES.items() if each.needs in ("lengths", "keys"))
        raise OptionError(
            f"{policy.name} needs attention, which a cache does not hold: expected one of {able}; or attention or "
            f"scores of blocks as IN, which are planned without --policy (kvmnn eval MODEL --text FILE --policy "
            f"{policy.name} computes attention with a model)"
        )


def plan_layer(
    policy: Policy,
    layer: int,
    tokens: int,
    nbytes: int,
    norms: Callable[[], Floats],
    positions: Positions | None = None,
) -> LayerKept:
    """What a policy would keep of one layer.

    Parameters
    ----------
    policy
        One that `check_plannable` accepts.
    layer, tokens, nbytes
        Its number, what it stores, and the bytes of that.
    norms
        Those of its keys, float32 ``[kv_head, token]``; asked for where keys decide.
    positions
        True position of each stored token, ``[token]``, or ``[kv_head, token]`` where heads hold different ones. Where
        they do not ascend, the policy sees the tokens in the order of the text; of equal ones the first stored first.
    """
    shared = positions if positions is not None and positions.ndim == 1 else None
    if layer in policy.skip_layers:
        return LayerKept(layer=layer, tokens=tokens, nbytes=nbytes, skipped=True, positions=shared)
    order = None
    if shared is not None and (np.diff(shared) < 0).any():
        order = np.argsort(shared, kind="stable")
    found = norms() if policy.by_head else None
    if found is not None and order is not None:
        found = found[:, order]
    kept = policy.choose(LayerView(tokens=tokens, layer=layer, norms=found))
    if kept is not None:
        kept = np.sort(kept if order is None else order[kept], axis=-1)
        if kept.ndim == 2 and (kept == kept[0]).all():
            kept = kept[0]
        if kept.shape[-1] == tokens:
            kept = None
    return LayerKept(layer=layer, tokens=tokens, nbytes=nbytes, kept=kept, positions=shared)


def _likeness(layer: LayerKept) -> Hashable:
    """What layers that are one row have in common."""
    kept = None if layer.kept is None else layer.kept.tobytes()
    return layer.tokens, layer.nbytes, layer.skipped, layer.tokens_after, kept


def _numbers(layers: Sequence[LayerKept]) -> str:
    """``0-3,6``; of very many runs the first."""
    runs = runs_of(np.array([layer.layer for layer in layers]))
    said = [str(begin) if size == 1 else f"{begin}-{begin + size - 1}" for begin, size in runs]
    return ",".join(said[:_MOST_RUNS] + ["..."] * (len(said) > _MOST_RUNS))


def _figures(group: Sequence[LayerKept]) -> tuple[str, str, str, str]:
    first = group[0]
    return _numbers(group), f"{first.tokens:,}", f"{first.tokens_after:,}", _share(first.bytes_after, first.nbytes)


def _lengths(layer: LayerKept) -> tuple[int, int]:
    return layer.tokens_after, layer.tokens


def _share(part: int, of: int) -> str:
    return f"{100 * part / of:.1f} %"


def _letter(share: float) -> str:
    if share in (0, 1):
        return "#" if share else "."
    return str(min(9, max(1, round(10 * share))))


def _pairs(layer: LayerKept) -> str | None:
    """As `kvmnn compact --reserve` reads them, or the first of very many; None where it takes none."""
    if layer.kept is None or layer.kept.ndim > 1 or not layer.kept.size:
        return None
    (runs,) = layer.runs()
    shown = ",".join(f"{begin}:{size}" for begin, size in runs[:_MOST_PAIRS])
    left = len(runs) - _MOST_PAIRS
    return shown if left <= 0 else f"{shown} ... {count(left, 'pair')} more (-o writes them all)"
