"""Plan which tokens of a stored cache a policy would keep; each layer is treated as a prompt that was attended once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from .._util.dataclass import dataclass
from .._util.text import LOSSY, UNCHANGED, format_range, pluralize
from ..arrays.engine_cache import positions_to_runs
from ..dtypes import Elements, Floats, Indices, Positions
from ..errors import OptionError
from ..files.schema import Record, json_key
from ..packed.cache_info import PositionRuns
from .composed import Composed
from .h2o.plan import format_reserve
from .policy import LayerState, Policy
from .profiled import DuoAttention
from .registry import POLICIES, LabelledPolicy, convert_options_to_json
from .scored import ScoredPolicy, TensorName

_MAX_SHOWN_RUNS = 4
_MIN_MAP_COLUMNS = 10
_LEGEND = "# kept, . dropped, 1 to 9 tenths kept"


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyLayerPlan(Record):
    """The tokens of one layer that stay."""

    json_keys = "**plan_entry tokens tokens_after bytes=nbytes bytes_after skipped positions=_kept_positions"

    layer: int
    #: Stored tokens.
    tokens: int
    #: Bytes of K and V of the layer.
    nbytes: int
    #: Stored tokens that stay, ascending: int64 ``[kept]``, or ``[kv_head, kept]`` where heads keep different ones;
    #: None: all stay.
    kept_indices: Indices | None = None
    #: Whether the policy never cuts this layer.
    skipped: bool = False
    #: Text position of each stored token; None if it is not known for all heads.
    positions: Positions | None = None

    @property
    def tokens_after(self) -> int:
        """Return the number of tokens that stay in each KV head."""
        return self.tokens if self.kept_indices is None else int(self.kept_indices.shape[-1])

    @property
    def bytes_after(self) -> int:
        """Return the number of bytes of K and V of the tokens that stay."""
        return self.nbytes // self.tokens * self.tokens_after

    def list_runs(self) -> list[PositionRuns]:
        """Return ``(begin, size)`` runs of the tokens that stay: of all heads, or of each head."""
        indices = np.arange(self.tokens) if self.kept_indices is None else self.kept_indices
        return [positions_to_runs(row) for row in np.atleast_2d(indices)]

    @property
    def plan_entry(self) -> dict[str, Any]:
        """Return the entry of a layer for `kvmnn mnn compact --plan`, which refuses ``heads`` instead of ``pairs``."""
        if self.kept_indices is None:
            return {"layer": self.layer, "remove": 0, "pairs": []}
        rows = [[list(run) for run in runs] for runs in self.list_runs()]
        selection: dict[str, Any] = {"pairs": rows[0]} if self.kept_indices.ndim == 1 else {"heads": rows}
        return {"layer": self.layer, "remove": self.tokens, **selection}

    def render_map(self, group: int) -> str:
        """Render one letter for each `group` tokens: how many of all heads stay."""
        shares = np.ones(self.tokens)
        if self.kept_indices is not None:
            rows = np.atleast_2d(self.kept_indices)
            shares = np.bincount(rows.reshape(-1), minlength=self.tokens) / len(rows)
        group_shares = [float(shares[i : i + group].mean()) for i in range(0, self.tokens, group)]
        return "".join(
            str(min(9, max(1, round(10 * share)))) if 0 < share < 1 else "#" if share else "." for share in group_shares
        )

    @property
    def _kept_positions(self) -> list[list[int]] | None:
        if self.positions is None or (self.kept_indices is not None and self.kept_indices.ndim > 1):
            return None
        positions_after = self.positions if self.kept_indices is None else self.positions[self.kept_indices]
        return [list(run) for run in positions_to_runs(positions_after)]


def _build_policy_document(policy: Policy) -> dict[str, Any]:
    return {
        "label": LabelledPolicy.from_policy(policy).label,
        "policy": policy.name,
        "options": convert_options_to_json(policy.to_options()),
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class CachePlan(Record):
    """The tokens of a cache that a policy would keep."""

    #: The input, and the file that the plan was written to, if any.
    input: str | None = None
    output: str | None = None
    #: Elapsed time.
    seconds: float = 0.0
    #: The policy that decided.
    policy: Policy = field(metadata={"convert": _build_policy_document})
    layers: tuple[PolicyLayerPlan, ...]

    @property
    @json_key(after="output")
    def label(self) -> str:
        """Return ``"LOSSY"`` if any layer would drop tokens, else ``"UNCHANGED"``."""
        return LOSSY if any(layer.tokens_after < layer.tokens for layer in self.layers) else UNCHANGED

    @property
    @json_key("by_head", before="layers")
    def is_per_head(self) -> bool:
        """Return whether KV heads of any layer keep different tokens, which packed files cannot store."""
        return any(layer.kept_indices is not None and layer.kept_indices.ndim > 1 for layer in self.layers)

    @property
    @json_key("bytes", before="layers")
    def bytes_before(self) -> int:
        """Return the number of bytes of K and V of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    @json_key(before="layers")
    def bytes_after(self) -> int:
        """Return the number of bytes of the kept K and V."""
        return sum(layer.bytes_after for layer in self.layers)

    def to_plan_entries(self) -> list[dict[str, Any]]:
        """Return the document of ``-o``."""
        return [layer.plan_entry for layer in self.layers]

    def format_lines(self, *, width: int = 100, picture: bool = True) -> list[str]:
        """Format a row for each layer, or for several that keep the same, in `width` columns."""
        groups_by_key: dict[Hashable, list[PolicyLayerPlan]] = {}
        for layer in self.layers:
            kept_bytes = None if layer.kept_indices is None else layer.kept_indices.tobytes()
            key = layer.tokens, layer.nbytes, layer.skipped, layer.tokens_after, kept_bytes
            groups_by_key.setdefault(key, []).append(layer)
        groups = list(groups_by_key.values())
        rows = [("layers", "tokens", "stay", "bytes"), *map(_format_row, groups)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = ["  " + "  ".join(map(str.rjust, row, widths)) for row in rows]
        num_columns = max(_MIN_MAP_COLUMNS, width - len(table[0]) - 2)
        tokens = -(-max(layer.tokens for layer in self.layers) // num_columns)
        lines = [self._format_head(), table[0]]
        for group, row in zip(groups, table[1:], strict=True):
            map_text = group[0].render_map(tokens) if picture else ""
            lines.append(f"{row}  {'never cut' if group[0].skipped else map_text}".rstrip())
            if (pairs := _format_reserve(group[0])) is not None:
                lines.append(f"    --remove {group[0].tokens} --reserve {pairs}")
        if picture:
            suffix = " of all KV heads" if self.is_per_head else ""
            lines.append(f"  {pluralize(tokens, 'token')} a letter: {_LEGEND}{suffix}")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.format_lines())

    def _format_head(self) -> str:
        name = LabelledPolicy.from_policy(self.policy).label
        bytes_text = pluralize(self.bytes_before, "byte")
        if self.label == UNCHANGED:
            return f"{name}: {UNCHANGED}, all tokens stay, {bytes_text} of K and V: {self._explain_unchanged()}"
        cut_layers = [layer for layer in self.layers if layer.tokens_after < layer.tokens]
        tokens_after = format_range(sorted({layer.tokens_after for layer in cut_layers}))
        tokens = format_range(sorted({layer.tokens for layer in cut_layers}))
        scope_parts = ["in each KV head"] if self.is_per_head else []
        if len(cut_layers) < len(self.layers):
            scope_parts.append(f"in {len(cut_layers)} of {len(self.layers)} layers")
        share = _format_percent(self.bytes_after, self.bytes_before)
        summary = " ".join([f"{tokens_after} of {tokens} tokens stay", *scope_parts])
        return f"{name}: {LOSSY}, {summary}, {share} of {bytes_text} of K and V"

    def _explain_unchanged(self) -> str:
        layer_tokens = [layer.tokens for layer in self.layers if not layer.skipped]
        if not layer_tokens:
            return "none of its layers is ever cut"
        if not self.policy.can_evict:
            return "it keeps everything"
        return (
            self.policy.explain_no_eviction(max(layer_tokens), max(layer_tokens))
            or f"its budget is {self.policy.budget_help}"
        )


def check_plannable(policy: Policy) -> None:
    """Raise `OptionError` for a policy that needs more than lengths, keys and values, with what it lacks."""
    remedy = f"kvmnn eval MODEL --text FILE --policy {policy.name} runs it with a model"
    if policy.requires_attention:
        plannable = ", ".join(name for name, policy_class in POLICIES.items() if _can_plan_class(policy_class))
        raise OptionError(
            f"{policy.name} needs attention, which a cache does not hold: expected one of {plannable}; or attention or "
            f"scores of blocks as IN, which are planned without --policy ({remedy})"
        )
    if isinstance(policy, ScoredPolicy):
        missing_tensors = sorted(policy.required_tensors - _STORED_TENSORS)
        if missing_tensors:
            names = " and ".join(missing_tensors)
            raise OptionError(f"{policy.name} needs {names}, which a cache does not hold: {remedy}")
        if policy.phase == "decoding":
            raise OptionError(f"{policy.name}: phase is 'decoding', and a plan cuts a prompt: expected prompt or both")
        if policy.wrapper == "ada" or isinstance(policy, DuoAttention):
            raise OptionError(
                f"{policy.name} keeps different numbers of tokens in heads of one layer, which no plan holds: {remedy}"
            )
    elif policy.requires == "tensors":
        raise OptionError(f"{policy.name} looks at all tensors of a layer, of which a cache lacks some: {remedy}")


_STORED_TENSORS: frozenset[TensorName] = frozenset({"keys", "values"})


def _can_plan_class(policy_class: type[Policy]) -> bool:
    if issubclass(policy_class, ScoredPolicy):
        return policy_class.tensors <= _STORED_TENSORS and policy_class not in (DuoAttention, Composed)
    return policy_class.requires in ("lengths", "keys")


def needs_values(policy: Policy) -> bool:
    """Return whether a plan by this policy reads V."""
    return isinstance(policy, ScoredPolicy) and "values" in policy.required_tensors


def depends_on_channels(policy: Policy) -> bool:
    """Return whether a plan changes with a rotation or another order of the channels, the same for all tokens."""
    return isinstance(policy, ScoredPolicy) and policy.name not in _POLICIES_OF_PRODUCTS


_POLICIES_OF_PRODUCTS = ("random", "keydiff", "cur")
"""Their scores are of lengths and inner products, which a rotation leaves as they are, or of nothing."""


def plan_layer(
    policy: Policy,
    layer: int,
    tokens: int,
    nbytes: int,
    norms: Callable[[], Floats],
    positions: Positions | None = None,
    *,
    tensors: Callable[[], tuple[Elements, Elements | None]] | None = None,
) -> PolicyLayerPlan:
    """Plan one layer under a policy.

    Parameters
    ----------
    norms
        Returns the key norms, float32 ``[kv_head, token]``.
    positions
        Text positions of the stored tokens, int64 ``[token]`` or ``[kv_head, token]``, where they are known.
    tensors
        Returns K, and V where `needs_values`, ``[kv_head, token, head_dim]``, for a `ScoredPolicy`.
    """
    shared_positions = positions if positions is not None and positions.ndim == 1 else None
    if layer in policy.skip_layers:
        return PolicyLayerPlan(layer=layer, tokens=tokens, nbytes=nbytes, skipped=True, positions=shared_positions)
    # The policy gets tokens whose positions do not ascend in the order of the text; of equal ones the first stored
    # first.
    order = None
    if shared_positions is not None and (np.diff(shared_positions) < 0).any():
        order = np.argsort(shared_positions, kind="stable")
    state = LayerState(tokens=tokens, layer=layer)
    if isinstance(policy, ScoredPolicy) and tensors is not None:
        keys, values = (
            array if array is None or order is None else np.ascontiguousarray(array[:, order]) for array in tensors()
        )
        state = LayerState(tokens=tokens, layer=layer, keys=keys, values=values)
    elif policy.is_per_head:
        norm_rows = norms()
        state = LayerState(tokens=tokens, layer=layer, norms=norm_rows if order is None else norm_rows[:, order])
    indices = policy.select(state)
    if indices is not None:
        indices = np.sort(indices if order is None else order[indices], axis=-1)
        if indices.ndim == 2 and (indices == indices[0]).all():
            indices = indices[0]
        if indices.shape[-1] == tokens:
            indices = None
    return PolicyLayerPlan(layer=layer, tokens=tokens, nbytes=nbytes, kept_indices=indices, positions=shared_positions)


def _format_row(group: Sequence[PolicyLayerPlan]) -> tuple[str, str, str, str]:
    first = group[0]
    runs = positions_to_runs(np.array([layer.layer for layer in group]))
    run_texts = [str(begin) if size == 1 else f"{begin}-{begin + size - 1}" for begin, size in runs]
    layers_text = ",".join(run_texts[:_MAX_SHOWN_RUNS] + ["..."] * (len(run_texts) > _MAX_SHOWN_RUNS))
    percent = _format_percent(first.bytes_after, first.nbytes)
    return layers_text, f"{first.tokens:,}", f"{first.tokens_after:,}", percent


def _format_percent(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %"


def _format_reserve(layer: PolicyLayerPlan) -> str | None:
    if layer.kept_indices is None or layer.kept_indices.ndim > 1 or not layer.kept_indices.size:
        return None
    return format_reserve(layer.list_runs()[0])
