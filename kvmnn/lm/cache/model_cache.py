"""The KV cache of a model that runs under an eviction policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ...arrays.layer_cache import LayerCache
from ...dtypes import Floats, Indices, KVPair, Positions, Words
from ...errors import KvmnnError
from ...h2o.figures import H2OFigures
from ...policies.base import Policy
from ...policies.evicting_cache import take_rows
from ...policies.ranking import key_norms
from ...policies.scoring import Summed
from ...policies.view import Moment, View
from ..graph.decoder import Step
from . import _eviction
from .kv_store import KVStore
from .planned_eviction import PlannedEviction
from .token_rows import TokenRows

SHARE = 8
"""Live tokens for each dead one that may be beside them before K and V are moved: then it costs little at any size."""


class ModelCache:
    """K, V, true positions, scores and key norms of all layers, cut together.

    A step is `begin` (what the model is to attend to), the model, `end`. A token that a policy evicts is dead from then
    on; where the model can be given a bias, its K and V stay where they lie, masked, until more than `slack` slots are
    dead, so that a cache is not copied at every step.

    Parameters
    ----------
    store
        What holds K and V.
    kv_heads, query_heads
        Heads of each layer.
    layers
        How many.
    policy
        Which tokens stay.
    slack
        Dead slots that may be in use, or None for an eighth of the live tokens. 0 for a model that takes no bias.
    biased
        Whether the model takes a bias.
    planned
        What evicts instead of the policy's rule, where a planner does.

    Attributes
    ----------
    seen : int
        Tokens that the model has seen.
    peak_nbytes : int
        The most bytes of K and V held at once so far.
    """

    def __init__(
        self,
        store: KVStore,
        *,
        layers: int,
        kv_heads: int,
        query_heads: int,
        policy: Policy,
        slack: int | None,
        biased: bool,
        planned: PlannedEviction | None = None,
    ) -> None:
        self._store = store
        self._kv_heads = kv_heads
        self._query_heads = query_heads
        self._policy = policy
        self._scoring = policy.scoring
        self._slack = slack
        self._biased = biased
        self._zeros = np.zeros(0, np.float32)
        self._new = 0
        self._prompt = False
        self.seen = 0
        self.peak_nbytes = 0
        skipped = policy.skipped(layers)
        cut = [layer for layer in range(layers) if policy.evicts and layer not in skipped]
        self._layers = layers
        self._begun: list[Positions] = [np.empty(0, np.int64)] * layers
        self._begun_seen = 0
        self._planned = planned
        self._groups: list[TokenRows] = []
        if planned is not None:
            self._groups = [TokenRows((layer,), 1) for layer in cut]
        elif cut:
            per_layer = kv_heads if policy.by_head else int(policy.needs_attention)
            scored, normed = policy.needs_attention, policy.needs == "keys"
            self._groups = [TokenRows(tuple(cut), per_layer, scored=scored, normed=normed)]

    # -- what is held --------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """Live tokens of each layer."""
        return [
            self.seen - self._begun_seen + places.shape[-1] if group is None else group.live
            for group, places in zip(self._by_layer(), self._begun, strict=True)
        ]

    @property
    def is_cut(self) -> bool:
        """Whether the policy has evicted any token of any layer."""
        whole = self.seen - self._begun_seen
        return any(group.live < whole + self._begun[group.layers[0]].shape[-1] for group in self._groups)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V held, those of masked tokens included."""
        return self._store.nbytes

    def positions(self, layer: int) -> Positions:
        """True positions of a layer's live tokens, ascending: int64 ``[token]``, or ``[kv_head, token]``."""
        group = self._by_layer()[layer]
        if group is None:
            begun, later = self._begun[layer], np.arange(self._begun_seen, self.seen, dtype=np.int64)
            return np.concatenate([begun, np.broadcast_to(later, (*begun.shape[:-1], len(later)))], axis=-1)
        rows = group.positions_of(layer)
        return rows[0] if len(rows) == 1 else rows

    def layers(self) -> list[LayerCache]:
        """The live tokens of every layer, copied."""
        caches = []
        for layer, (group, (keys, values)) in enumerate(zip(self._by_layer(), self._store.past(), strict=True)):
            kept = np.arange(keys.shape[2]) if group is None else group.slots[group.rows_of(layer), : group.live]
            kept = kept[0] if kept.ndim == 2 and len(kept) == 1 else kept
            caches.append(
                LayerCache(
                    layer=layer,
                    keys=take_rows(keys[0], kept),
                    values=take_rows(values[0], kept),
                    positions=self.positions(layer),
                    tokens_seen=self.seen,
                )
            )
        return caches

    def scores(self, layer: int) -> Floats | None:
        """Scores of a layer's live tokens, float32 ``[token]`` or ``[kv_head, token]``; None without scores."""
        group = self._by_layer()[layer]
        if group is None or group.scores is None:
            return None
        rows = group.scores[group.rows_of(layer), : group.live].copy()
        return rows[0] if group.per_layer == 1 else rows

    def settle(self) -> None:
        """Let go of the dead slots that are still held; what is attended does not change."""
        for group in self._groups:
            self._compact(group, 0)

    def h2o_figures(self) -> H2OFigures | None:
        """What the engine's planner did, where it is what evicts."""
        return None if self._planned is None else self._planned.figures(self.seen, self.tokens)

    def start(self, layers: Sequence[LayerCache]) -> None:
        """Begin with K and V of every layer that were computed elsewhere, as if a prompt of them had been read; cut."""
        pairs = [(layer.keys[np.newaxis], layer.values[np.newaxis]) for layer in layers]
        self._store.adopt(pairs, max(layer.tokens for layer in layers))
        self.peak_nbytes = self._store.nbytes
        self._begun, self._begun_seen = [layer.positions for layer in layers], layers[0].tokens_seen
        self._new = self.seen = self._begun_seen
        self._groups = [part for group in self._groups for part in self._parted(group)]
        for group in self._groups:
            members = [self._begun[layer] for layer in group.layers]
            rows = [np.broadcast_to(places, (max(1, group.per_layer), places.shape[-1])) for places in members]
            group.begin(np.concatenate(rows) if group.per_layer else rows[0])
            if group.norms is not None and self._policy.needs_norms:
                self._add_norms(group, group.norms, pairs, group.live)
        for moment in (Moment.ATTENDED, Moment.CHUNK_END):
            self._apply(moment)
        self.settle()

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, new: int, *, prompt: bool = False) -> tuple[list[KVPair], list[Floats] | None]:
        """`new` tokens are about to be attended: K and V of the past for every layer, and the bias if there is one.

        The bias is float32 ``[1, 1 or query_heads, 1, past + new]`` for each layer.

        Parameters
        ----------
        prompt
            The tokens are a prompt or part of one: the engine's planner neither scores nor plans at these.

        Raises
        ------
        KvmnnError
            Where the policy evicts some of the new tokens before they are attended and the model takes no bias.
        """
        if self._planned is not None:
            self._carry_out(self._planned)
        for group in self._groups:
            group.append(new, self.seen)
        self._new, self._prompt = new, prompt
        self.seen += new
        if self._planned is None:
            self._apply(Moment.APPENDED)
        return self._store.past(), self._bias()

    def end(self, step: Step) -> None:
        """The new tokens have been attended: take over what the model returned, score it, cut."""
        self._store.adopt(step.present, self._new, prompt=self._prompt)
        self.peak_nbytes = max(self.peak_nbytes, self._store.nbytes)
        if self._planned is not None:
            decode = not self._prompt and self._new != self.seen
            self._planned.end(self.tokens, self._new, decode=decode, rows=partial(self._rows, step))
            return
        if self._policy.prompt_only and self._new != self.seen:
            return
        for group in self._groups:
            if group.scores is not None:
                self._score(group, group.scores, step)
            if group.norms is not None and self._policy.needs_norms:
                self._add_norms(group, group.norms, step.present, self._new)
            if self._new != self.seen:
                group.steps += 1
        self._apply(Moment.ATTENDED)
        for group in self._groups:
            if self._is_full(group):
                self._compact(group, 0)

    def end_chunk(self) -> None:
        """A chunk of text has ended."""
        self._apply(Moment.CHUNK_END)
        for group in self._groups:
            if self._is_full(group):
                self._compact(group, 0)

    # -- how -----------------------------------------------------------------------------------------------------------

    def _by_layer(self) -> list[TokenRows | None]:
        found: list[TokenRows | None] = [None] * self._layers
        for group in self._groups:
            for layer in group.layers:
                found[layer] = group
        return found

    def _parted(self, group: TokenRows) -> list[TokenRows]:
        """The group, or where its layers begin with different tokens each of them by itself."""
        first = self._begun[group.layers[0]]
        alike = all(np.array_equal(self._begun[layer], first) for layer in group.layers)
        return [group] if alike else group.split()

    def _apply(self, moment: Moment) -> None:
        if moment not in self._policy.moments:
            return
        groups = []
        for group in self._groups:
            kept = self._policy.choose_stacked(self._view(group, moment))
            if isinstance(kept, list):
                alone = group.split()
                for layer, rows in zip(alone, self._kept_by_layer(group, kept), strict=True):
                    self._cut(layer, rows, moment)
                groups += alone
                continue
            if kept is not None:
                self._cut(group, kept, moment)
            groups.append(group)
        self._groups = groups

    def _carry_out(self, planned: PlannedEviction) -> None:
        """Drop what the plans of the step before say, before new tokens come."""
        kept = planned.begin(self.tokens)
        for group in self._groups:
            tokens = kept[group.layers[0]]
            if tokens is not None:
                group.cut(tokens)
                if self._is_full(group):
                    self._compact(group, 0)

    def _rows(self, step: Step, layer: int) -> Floats:
        """The attention of a layer's live tokens."""
        group, attentions = self._by_layer()[layer], step.attentions
        if attentions is None:
            raise KvmnnError("the policy needs attention probabilities, which the model was not asked for")
        if group is None or not group.dead:
            return attentions[layer]
        return _live_columns(attentions[layer], group.slots[:, : group.live])

    def _kept_by_layer(self, group: TokenRows, kept: list[Indices]) -> Iterator[Indices]:
        """What each layer of a group keeps, where layers keep different numbers of tokens."""
        for layer in group.layers:
            rows = kept[group.rows_of(layer)]
            if len({len(row) for row in rows}) != 1 or len(kept) != len(group.slots):
                raise KvmnnError(
                    f"layer {layer}: {self._policy.name} keeps {[len(row) for row in rows]} tokens: "
                    f"expected the same number in every head"
                )
            yield np.stack(rows)

    def _view(self, group: TokenRows, moment: Moment) -> View:
        live = group.live
        return View(
            tokens=live,
            layer=group.layers[0],
            scores=None if group.scores is None else group.scores[:, :live],
            norms=None if group.norms is None else group.norms[:, :live],
            new=self._new,
            seen=self.seen,
            steps=group.steps,
            moment=moment,
        )

    def _cut(self, group: TokenRows, kept: Indices, moment: Moment) -> None:
        if moment is not Moment.APPENDED:
            group.cut(kept)
            return
        past = group.width - self._new
        group.cut(kept)
        if group.live < self._new or (group.slots[:, group.live - self._new] != past).any():
            if not self._biased:
                raise KvmnnError(
                    f"layer {group.layers[0]}: the policy evicts some of {self._new} new tokens before attention, "
                    f"but this graph takes no bias that could mask them: feed fewer tokens at once"
                )
        elif self._is_full(group):
            self._compact(group, self._new)

    def _is_full(self, group: TokenRows) -> bool:
        """Whether more dead slots are in use than may be."""
        return group.dead > (group.live // SHARE if self._slack is None else self._slack)

    def _compact(self, group: TokenRows, new: int) -> None:
        """Let go of dead slots in K and V, which do not hold the last `new` tokens yet."""
        if group.dead == 0:
            return
        for layer in group.layers:
            self._store.compact(layer, group.slots[group.rows_of(layer)], group.live - new)
        group.compacted()

    def _bias(self) -> list[Floats] | None:
        if not any(group.dead for group in self._groups):
            return None
        if self.seen > self._zeros.size:
            self._zeros = np.zeros(2 * self.seen, np.float32)
        biases = [self._zeros[:tokens].reshape(1, 1, 1, -1) for tokens in self.tokens]
        for group in self._groups:
            rows = group.bias[:, : group.width]
            if group.per_layer > 1 and self._query_heads > group.per_layer:
                rows = np.repeat(rows, self._query_heads // group.per_layer, axis=0)
            heads = self._query_heads if group.per_layer > 1 else 1
            bias = np.ascontiguousarray(rows).reshape(-1, 1, heads, 1, group.width)
            for number, layer in enumerate(group.layers):
                biases[layer] = bias[number if len(bias) > 1 else 0]
        return biases

    def _score(self, group: TokenRows, scores: Floats, step: Step) -> None:
        attentions, scoring = step.attentions, self._scoring
        if attentions is None:
            raise KvmnnError("the policy needs attention probabilities, which the model was not asked for")
        if isinstance(scoring, Summed):
            fade = scoring.fade(self._new)
            for layer in group.layers:
                rows = group.rows_of(layer)
                _eviction.add_columns(attentions[layer], group.slots[rows], scores[rows], group.live, fade)
            return
        added = np.zeros((len(scores), group.live), np.float32)
        for layer in group.layers:
            rows = group.rows_of(layer)
            if scoring.by_query:
                weights = _live_columns(attentions[layer], group.slots[rows, : group.live])
                added[rows] = scoring.from_weights(weights, self._kv_heads, by_head=self._policy.by_head)
            else:
                _eviction.add_columns(attentions[layer], group.slots[rows], added[rows], group.live, 1.0)
        if not scoring.by_query:
            heads, queries = attentions[group.layers[0]].shape[:2]
            added = scoring.from_sums(added, heads * queries)
        scores[:, : group.live] = scoring.fold(scores[:, : group.live], added, self._new)

    def _add_norms(self, group: TokenRows, norms: Floats, present: Sequence[KVPair], new: int) -> None:
        keys: Words = np.concatenate([present[layer][0][0, :, -new:] for layer in group.layers])
        norms[:, group.live - new : group.live] = key_norms(keys)


def _live_columns(weights: Floats, slots: Indices) -> Floats:
    """Attention ``[query_head, query, slot]`` of the live slots only, ``[query_head, query, token]``."""
    if len(slots) == 1:
        return weights[:, :, slots[0]]
    per_query_head = np.repeat(slots, weights.shape[0] // len(slots), axis=0)
    return np.take_along_axis(weights, per_query_head[:, None, :], axis=2)
