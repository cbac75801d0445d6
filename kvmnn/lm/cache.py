"""The KV cache of a running model under an eviction policy or the H2O planner (docs/lm.md).

`ModelCache.begin_step` returns the past K and V and the bias that masks evicted tokens. `end_step` takes K, V and
attention of the step, and the policy selects the tokens that stay. Layers of equal length are one `TokenGroup`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays.layer_cache import LayerCache
from ..dtypes import Elements, Floats, Indices, KVPair, Positions
from ..errors import KvmnnError
from ..policies.cache import append_queries, take_rows
from ..policies.h2o import H2OPlanner
from ..policies.h2o.planner import H2OStats, StatsRecorder
from ..policies.layer_parameters import LayerParameters
from ..policies.policy import LayerState, Policy, PolicyInput, Selection, Trigger
from ..policies.scored import ScoredPolicy
from ..policies.scores import SumScores
from ..policies.topk import compute_key_norms
from ..policies.wrappers import take_tokens_of_cut_layer
from . import _eviction
from .kv_store import KVStore
from .onnx.decoder import StepResult

# Evicted tokens stay in place, masked by a bias on the attention scores (an input that the rewritten graph has), until
# they are an eighth of the live ones; then the live ones move to the front of the same buffers. Copying K and V at
# every token would cost as much as the model. Every step attends exactly what the policy keeps; the resident bytes are
# a little more, and are reported. Graphs that take no bias are cut at once.
#
# All layers with equally many tokens are one stack of rows: a policy selects for the stack in one call, and one kernel
# cuts the rows. Layers are separated only when a policy keeps different numbers of tokens of them.

_INITIAL_SLOTS = 256
_NO_ATTENTION = "the policy needs attention probabilities, which the model was not asked for"

#: Added to the attention scores of a masked slot: its weight is 0 after the softmax.
MASKED_BIAS = float(np.finfo(np.float32).min)


class TokenGroup:
    """Live tokens of layers that have equally many.

    A row contains the tokens of all layers of the group, of one layer, or of one KV head, by `rows_per_layer`.
    """

    def __init__(
        self, layers: tuple[int, ...], rows_per_layer: int, *, has_scores: bool = False, has_norms: bool = False
    ) -> None:
        self.layers = layers
        #: 0 where one row serves all layers, 1, or the number of KV heads.
        self.rows_per_layer = rows_per_layer
        #: Of each row: live tokens, slots of K and V in use (masked ones included), and `CacheState.num_steps`.
        self.num_live = self.num_slots = self.num_steps = 0
        rows = max(1, rows_per_layer * len(layers))
        self._rows = {
            layer: slice(i * rows_per_layer, i * rows_per_layer + max(1, rows_per_layer))
            for i, layer in enumerate(layers)
        }
        # ``[row, capacity]``; by live token: its slot (ascending), score and key norm; by slot: position in the text,
        # and the bias, which is 0 for live tokens and `MASKED_BIAS` for others.
        self.slots: Indices = np.empty((rows, _INITIAL_SLOTS), np.int64)
        #: 1 for tokens of a row that are stored only because another head of the layer keeps more; None without such.
        self.dead: Floats | None = None
        self.scores: Floats | None = np.empty((rows, _INITIAL_SLOTS), np.float32) if has_scores else None
        self.norms: Floats | None = np.empty((rows, _INITIAL_SLOTS), np.float32) if has_norms else None
        self._positions: Indices = np.empty((rows, _INITIAL_SLOTS), np.int64)
        self.bias: Floats = np.empty((rows, _INITIAL_SLOTS), np.float32)

    @property
    def num_masked(self) -> int:
        """Slots in use by tokens that are no longer live."""
        return self.num_slots - self.num_live

    def get_layer_rows(self, layer: int) -> slice:
        """Return the rows of a layer."""
        return self._rows[layer]

    def get_slot_positions(self, layer: int) -> Indices:
        """Return true positions of the tokens in a layer's slots, masked ones included, ``[row, slot]``."""
        return self._positions[self.get_layer_rows(layer), : self.num_slots]

    def get_layer_positions(self, layer: int) -> Indices:
        """Return text positions of a layer's live tokens, ``[row, token]``."""
        rows = self.get_layer_rows(layer)
        return np.take_along_axis(self._positions[rows], self.slots[rows, : self.num_live], axis=1)

    def append(self, count: int, num_seen: int) -> None:
        """Append `count` tokens from position `num_seen` of the text, in new slots: scores are 0, norms unknown."""
        end, num_slots = self.num_live + count, self.num_slots + count
        if num_slots > self.slots.shape[1]:
            capacity = max(num_slots, 2 * self.slots.shape[1])
            for name, table in self._list_tables():
                grown_table = np.empty((table.shape[0], capacity), table.dtype)
                grown_table[:, : table.shape[1]] = table
                setattr(self, name, grown_table)
        live_range, slot_range = slice(self.num_live, end), slice(self.num_slots, num_slots)
        self.slots[:, live_range] = np.arange(self.num_slots, num_slots)
        self._positions[:, slot_range] = np.arange(num_seen, num_seen + count)
        self.bias[:, slot_range] = 0
        if self.scores is not None:
            self.scores[:, live_range] = 0
        if self.norms is not None:
            self.norms[:, live_range] = np.nan
        if self.dead is not None:
            self.dead[:, live_range] = 0
        self.num_live, self.num_slots = end, num_slots

    def set_initial(self, positions: Indices) -> None:
        """Append the first tokens at text positions ``[token]`` for every row, or ``[row, token]``."""
        self.append(positions.shape[-1], 0)
        self._positions[:, : self.num_live] = positions

    def keep(self, indices: npt.NDArray[np.int64]) -> None:
        """Keep these live tokens, in any order: ``[kept]`` for all rows, or ``[row, kept]``."""
        indices = np.ascontiguousarray(np.atleast_2d(indices), np.int64)
        if indices.shape[0] not in (1, len(self.slots)):
            raise KvmnnError(
                f"layer {self.layers[0]}: tokens kept for {indices.shape[0]} rows: expected {len(self.slots)}"
            )
        tables = [table for table in (self.slots, self.scores, self.norms, self.dead) if table is not None]
        if not any(
            _eviction.compact_tables(ascending, self.num_live, self.slots, self.bias, MASKED_BIAS, tables)
            for ascending in (indices, np.sort(indices, axis=1))
        ):
            raise KvmnnError(
                f"layer {self.layers[0]}: tokens kept must be distinct and among the {self.num_live} that are stored"
            )
        self.num_live = indices.shape[1]
        self.num_steps = 0

    def keep_unequal(self, rows: Sequence[Indices]) -> None:
        """Keep these live tokens of each row, ascending. A row that keeps fewer stores fillers, which are masked."""
        count = max(map(len, rows))
        indices = np.empty((len(rows), count), np.int64)
        dead = np.zeros((len(rows), self.slots.shape[1]), np.float32)
        for row, kept_indices in enumerate(rows):
            fillers = np.setdiff1d(np.arange(self.num_live), kept_indices)[: count - len(kept_indices)]
            indices[row] = np.sort(np.concatenate([kept_indices, fillers]))
            dead[row, :count] = np.isin(indices[row], fillers)
        self.dead = None
        self.keep(indices)
        self.dead = dead
        self._mask_dead()

    def _mask_dead(self) -> None:
        if self.dead is not None:
            for row, is_dead in enumerate(self.dead[:, : self.num_live] > 0):
                self.bias[row, self.slots[row, : self.num_live][is_dead]] = MASKED_BIAS

    def mark_compacted(self) -> None:
        """Record that K and V of the live tokens were moved to the first slots."""
        num_live = self.num_live
        self._positions[:, :num_live] = np.take_along_axis(self._positions, self.slots[:, :num_live], axis=1)
        self.slots[:, :num_live] = np.arange(num_live)
        self.bias[:, :num_live] = 0
        self.num_slots = num_live
        self._mask_dead()

    def split_by_layer(self) -> list[TokenGroup]:
        """Return a group for each layer."""
        groups = []
        for layer in self.layers:
            group = TokenGroup((layer,), max(1, self.rows_per_layer))
            for name, table in self._list_tables():
                setattr(group, name, table[self.get_layer_rows(layer)].copy())
            group.num_live, group.num_slots, group.num_steps = self.num_live, self.num_slots, self.num_steps
            groups.append(group)
        return groups

    def _list_tables(self) -> list[tuple[str, npt.NDArray[Any]]]:
        names = ("slots", "scores", "norms", "dead", "_positions", "bias")
        return [(name, table) for name in names if (table := getattr(self, name)) is not None]


class PlannedEviction:
    """Applies the planner's plans at the beginning of a step, and scores and plans every layer at its end."""

    # The planner expects one call a layer, each with two halves, while a model runs all layers between them. So what a
    # call will drop is read from the pending plan, and the calls are made when the step is done.

    def __init__(self, planner: H2OPlanner) -> None:
        self._planner = planner
        self._stats = StatsRecorder(planner)
        self._lengths: list[int] = []

    def begin_step(self, lengths: Sequence[int]) -> list[Indices | None]:
        """Return the tokens that each layer keeps, int64 ``[kept]``; None for a layer that keeps all."""
        self._lengths = list(lengths)
        tokens_by_layer: list[Indices | None] = []
        for state, length in zip(self._planner.layers, lengths, strict=True):
            plan = state.pending_plan
            if plan is None or not plan.is_applicable(length):
                tokens_by_layer.append(None)
            else:
                runs = [np.arange(begin, begin + size, dtype=np.int64) for begin, size in plan.pairs]
                tokens_by_layer.append(np.concatenate(runs))
        return tokens_by_layer

    def end_step(
        self, lengths: Sequence[int], num_new: int, *, decode: bool, read_attention: Callable[[int], Floats]
    ) -> None:
        """Score and plan after a step of `num_new` tokens; `read_attention` returns that of a layer's live tokens."""
        planner = self._planner
        evicting_layers = planner.config.evicting_layers
        for layer, (tokens_before, tokens_after) in enumerate(zip(self._lengths, lengths, strict=True)):
            number = layer if planner.cadence == "tokens" else None
            edit = planner.begin_call(tokens_before, num_new, decode=decode, layer=number)
            if edit.kv_after + num_new != tokens_after:
                raise KvmnnError(
                    f"layer {layer}: the planner keeps {edit.kv_after + num_new} tokens, {tokens_after} were kept"
                )
            self._stats.record(
                planner.end_call(rows=read_attention(layer) if decode and layer in evicting_layers else None)
            )
        planner.end_step()

    def to_stats(self, num_seen: int, lengths: Sequence[int]) -> H2OStats:
        """Return statistics so far, of layers that store `lengths` of `num_seen` tokens."""
        return self._stats.to_stats(num_seen, lengths)


#: Live tokens for each masked slot that may be in use before K and V are moved: then moving costs little at any size.
LIVE_PER_MASKED_SLOT = 8


class ModelCache:
    """K, V, text positions, scores and key norms of all layers, cut in one operation.

    A step is `begin_step` (what the model is to attend to), the model, `end_step`. Where the model takes a bias, K and
    V of an evicted token stay in their slots, masked, until more than `max_masked` slots are masked.

    Parameters
    ----------
    store
        Storage of K and V.
    num_layers, kv_heads, query_heads
        Layers of the model, and heads of each.
    policy
        The eviction policy.
    max_masked
        Masked slots that may be in use, or None for an eighth of the live tokens. 0 for a model that takes no bias.
    takes_bias
        Whether the model takes a bias.
    planned_eviction
        Planner that evicts instead of the policy's rule, if any.
    parameters
        Of each layer, for policies that need it.

    Attributes
    ----------
    num_seen : int
        Tokens that the model has seen.
    peak_nbytes : int
        The most bytes of K and V in memory at once so far.
    """

    def __init__(
        self,
        store: KVStore,
        *,
        num_layers: int,
        kv_heads: int,
        query_heads: int,
        policy: Policy,
        max_masked: int | None,
        takes_bias: bool,
        planned_eviction: PlannedEviction | None = None,
        parameters: Sequence[LayerParameters] | None = None,
    ) -> None:
        self._store = store
        self._parameters = parameters
        self._queries: list[Floats] | None = None
        self._has_edited_keys = False
        self._kv_heads = kv_heads
        self._query_heads = query_heads
        self._policy = policy
        self._score_accumulator = policy.score_accumulator
        self._max_masked = max_masked
        self._takes_bias = takes_bias
        self._zeros = np.zeros(0, np.float32)
        self._num_new = 0
        self._is_prompt = False
        self.num_seen = 0
        self.peak_nbytes = 0
        skipped_layers = policy.resolve_skip_layers(num_layers)
        evicting_layers = [layer for layer in range(num_layers) if policy.can_evict and layer not in skipped_layers]
        self._num_layers = num_layers
        self._initial_positions: list[Positions] = [np.empty(0, np.int64)] * num_layers
        self._initial_seen = 0
        self._planned_eviction = planned_eviction
        self._groups: list[TokenGroup] = []
        if planned_eviction is not None:
            self._groups = [TokenGroup((layer,), 1) for layer in evicting_layers]
        elif evicting_layers:
            rows_per_layer = kv_heads if policy.is_per_head else int(policy.requires_attention)
            has_scores, has_norms = policy.requires_attention, policy.requires == "keys"
            self._groups = [
                TokenGroup(tuple(evicting_layers), rows_per_layer, has_scores=has_scores, has_norms=has_norms)
            ]

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """Live tokens of each layer."""
        return [
            self.num_seen - self._initial_seen + positions.shape[-1] if group is None else group.num_live
            for group, positions in zip(self._list_groups_by_layer(), self._initial_positions, strict=True)
        ]

    @property
    def has_evicted(self) -> bool:
        """Return whether the policy has evicted any token of any layer, in some head at least, or changed a key."""
        num_later = self.num_seen - self._initial_seen
        return self._has_edited_keys or any(
            group.dead is not None or group.num_live < num_later + self._initial_positions[group.layers[0]].shape[-1]
            for group in self._groups
        )

    @property
    def nbytes(self) -> int:
        """Number of bytes of K and V in memory, masked tokens included."""
        return self._store.nbytes

    def get_positions(self, layer: int) -> Positions:
        """Return text positions of a layer's live tokens, ascending: int64 ``[token]``, or ``[kv_head, token]``."""
        group = self._list_groups_by_layer()[layer]
        if group is None:
            initial = self._initial_positions[layer]
            later = np.arange(self._initial_seen, self.num_seen, dtype=np.int64)
            return np.concatenate([initial, np.broadcast_to(later, (*initial.shape[:-1], len(later)))], axis=-1)
        rows = group.get_layer_positions(layer)
        return rows[0] if len(rows) == 1 else rows

    def list_head_positions(self, layer: int) -> list[Positions]:
        """List the text positions of the tokens that each KV head of a layer attends to, ascending.

        Heads have different numbers of them under a policy that gives a layer one budget.
        """
        group = self._list_groups_by_layer()[layer]
        rows = np.atleast_2d(self.get_positions(layer))
        if group is None or group.dead is None:
            return list(rows)
        is_dead = group.dead[group.get_layer_rows(layer), : group.num_live] > 0
        return [row[~dead] for row, dead in zip(rows, is_dead, strict=True)]

    def copy_layers(self) -> list[LayerCache]:
        """Return copies of the live tokens of every layer."""
        caches, groups = [], self._list_groups_by_layer()
        for layer, (group, (keys, values)) in enumerate(zip(groups, self._store.get_past(), strict=True)):
            if group is None:
                slots = np.arange(keys.shape[2])
            else:
                slots = group.slots[group.get_layer_rows(layer), : group.num_live]
                slots = slots[0] if len(slots) == 1 else slots
            caches.append(
                LayerCache(
                    layer=layer,
                    keys=take_rows(keys[0], slots),
                    values=take_rows(values[0], slots),
                    positions=self.get_positions(layer),
                    tokens_seen=self.num_seen,
                )
            )
        return caches

    def get_scores(self, layer: int) -> Floats | None:
        """Return scores of a layer's live tokens, float32 ``[token]`` or ``[kv_head, token]``; None without scores."""
        group = self._list_groups_by_layer()[layer]
        if group is None or group.scores is None:
            return None
        rows = group.scores[group.get_layer_rows(layer), : group.num_live].copy()
        return rows[0] if group.rows_per_layer == 1 else rows

    def compact_all(self) -> None:
        """Remove all masked slots; attention does not change."""
        for group in self._groups:
            self._compact_group(group)

    def collect_h2o_stats(self) -> H2OStats | None:
        """Return statistics of the engine's planner; None for another policy."""
        return None if self._planned_eviction is None else self._planned_eviction.to_stats(self.num_seen, self.tokens)

    def load_initial(self, layers: Sequence[LayerCache]) -> None:
        """Load K and V of every layer that were computed elsewhere, as if they were a prompt, and cut."""
        pairs = [(layer.keys[np.newaxis], layer.values[np.newaxis]) for layer in layers]
        self._store.set_present(pairs, max(layer.tokens for layer in layers))
        self.peak_nbytes = self._store.nbytes
        self._initial_positions, self._initial_seen = [layer.positions for layer in layers], layers[0].tokens_seen
        self._num_new = self.num_seen = self._initial_seen
        groups, self._groups = self._groups, []
        for group in groups:
            first_positions = self._initial_positions[group.layers[0]]
            is_uniform = all(np.array_equal(self._initial_positions[layer], first_positions) for layer in group.layers)
            self._groups += [group] if is_uniform else group.split_by_layer()
        for group in self._groups:
            members = [self._initial_positions[layer] for layer in group.layers]
            rows = [
                np.broadcast_to(positions, (max(1, group.rows_per_layer), positions.shape[-1])) for positions in members
            ]
            group.set_initial(np.concatenate(rows) if group.rows_per_layer else rows[0])
            if group.norms is not None and self._policy.requires_norms:
                self._add_norms(group, group.norms, pairs, group.num_live)
        for trigger in (Trigger.AFTER_ATTENTION, Trigger.CHUNK_END):
            self._apply_policy(trigger)
        self.compact_all()

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin_step(self, num_new: int, *, is_prompt: bool = False) -> tuple[list[KVPair], list[Floats] | None]:
        """Return K and V of the past for every layer, and the bias if there is one, for a step of `num_new` tokens.

        The bias is float32 ``[1, 1 or query_heads, 1, past + new]`` for each layer.

        Parameters
        ----------
        is_prompt
            The tokens are a prompt or part of one: the engine's planner neither scores nor plans at these.

        Raises
        ------
        KvmnnError
            Where the policy evicts some of the new tokens before they are attended and the model takes no bias.
        """
        if self._planned_eviction is not None:
            tokens_by_layer = self._planned_eviction.begin_step(self.tokens)
            for group in self._groups:
                tokens = tokens_by_layer[group.layers[0]]
                if tokens is not None:
                    group.keep(tokens)
                    self._compact_if_full(group)
        for group in self._groups:
            group.append(num_new, self.num_seen)
        self._num_new, self._is_prompt = num_new, is_prompt
        self.num_seen += num_new
        if self._planned_eviction is None:
            self._apply_policy(Trigger.AFTER_APPEND)
        return self._store.get_past(), self._build_bias()

    def end_step(self, step: StepResult) -> None:
        """Store K and V of the new tokens, update the scores, and cut."""
        self._store.set_present(step.present_pairs, self._num_new, is_prompt=self._is_prompt)
        self.peak_nbytes = max(self.peak_nbytes, self._store.nbytes)
        if self._planned_eviction is not None:
            self._planned_eviction.end_step(
                self.tokens,
                self._num_new,
                decode=not self._is_prompt and self._num_new != self.num_seen,
                read_attention=partial(self._read_live_attention, step),
            )
            return
        if self._policy.is_prompt_only and self._num_new != self.num_seen:
            return
        if isinstance(self._policy, ScoredPolicy) and self._policy.requires_queries:
            self._add_queries(step, self._policy.query_window)
        for group in self._groups:
            if group.scores is not None:
                self._update_scores(group, group.scores, step)
            if group.norms is not None and self._policy.requires_norms:
                self._add_norms(group, group.norms, step.present_pairs, self._num_new)
            if self._num_new != self.num_seen:
                group.num_steps += 1
        self._apply_policy(Trigger.AFTER_ATTENTION)
        for group in self._groups:
            self._compact_if_full(group)

    def end_chunk(self) -> None:
        """Cut at the end of a chunk of text."""
        self._apply_policy(Trigger.CHUNK_END)
        for group in self._groups:
            self._compact_if_full(group)

    # -- internals -----------------------------------------------------------------------------------------------------

    def _list_groups_by_layer(self) -> list[TokenGroup | None]:
        groups: list[TokenGroup | None] = [None] * self._num_layers
        for group in self._groups:
            for layer in group.layers:
                groups[layer] = group
        return groups

    def _apply_policy(self, trigger: Trigger) -> None:
        if trigger not in self._policy.triggers:
            return
        groups = []
        for group in self._groups:
            num_live = group.num_live
            policy_input = PolicyInput(
                tokens=num_live,
                layer=group.layers[0],
                scores=None if group.scores is None else group.scores[:, :num_live],
                norms=None if group.norms is None else group.norms[:, :num_live],
                num_new=self._num_new,
                num_seen=self.num_seen,
                num_steps=group.num_steps,
                trigger=trigger,
            )
            if isinstance(self._policy, ScoredPolicy):
                selection = self._select_by_layer(self._policy, group, policy_input)
            else:
                selection = self._policy.select_stacked(policy_input)
            if not isinstance(selection, list):
                if selection is not None:
                    self._keep_in_group(group, selection, trigger)
                groups.append(group)
                continue
            for layer_group in group.split_by_layer():  # layers keep different numbers of tokens
                (layer,) = layer_group.layers
                rows = selection[group.get_layer_rows(layer)]
                if isinstance(self._policy, ScoredPolicy) and len({len(row) for row in rows}) != 1:
                    if not self._takes_bias:
                        raise KvmnnError(
                            f"layer {layer}: {self._policy.name} keeps different numbers of tokens in heads of one "
                            f"layer, and this graph takes no bias that could mask the fillers"
                        )
                    layer_group.keep_unequal(rows)
                    groups.append(layer_group)
                    continue
                if len({len(row) for row in rows}) != 1 or len(selection) != len(group.slots):
                    raise KvmnnError(
                        f"layer {layer}: {self._policy.name} keeps {[len(row) for row in rows]} tokens: "
                        f"expected the same number in every head"
                    )
                self._keep_in_group(layer_group, np.stack(rows), trigger)
                groups.append(layer_group)
        self._groups = groups

    def _select_by_layer(self, policy: ScoredPolicy, group: TokenGroup, policy_input: PolicyInput) -> Selection:
        """Select for each layer of a group by its K, V and queries."""
        if not policy.is_due(policy_input):
            return None
        rows: list[Indices] = []
        num_live = group.num_live
        past = self._store.get_past()
        for layer in group.layers:
            layer_rows = group.get_layer_rows(layer)
            slots = group.slots[layer_rows, :num_live]
            keys, values = (array[0] for array in past[layer])
            if group.num_masked:
                keys, values = take_rows(keys, slots), take_rows(values, slots)
            state = LayerState(
                tokens=num_live,
                layer=layer,
                keys=keys[:, :num_live],
                values=values[:, :num_live],
                queries=None if self._queries is None else self._queries[layer],
                positions=group.get_layer_positions(layer),
                parameters=None if self._parameters is None else self._parameters[layer],
                is_dead=None if group.dead is None else group.dead[layer_rows, :num_live] > 0,
                num_new=policy_input.num_new,
                num_seen=policy_input.num_seen,
                num_steps=policy_input.num_steps,
                trigger=policy_input.trigger,
            )
            selection = policy.select_stacked(state)
            layer_indices = [np.arange(num_live)] * len(slots) if selection is None else list(selection)
            if policy.edits_keys:
                kept_indices = np.stack(layer_indices)
                edited_keys = policy.edit_keys(take_tokens_of_cut_layer(state, kept_indices))
                if edited_keys is not None:
                    self._has_edited_keys = True
                    self._store.put_keys(layer, np.take_along_axis(slots, kept_indices, axis=1), edited_keys)
            rows += layer_indices
        if all(len(row) == num_live for row in rows):
            return None
        return rows if len({len(row) for row in rows}) > 1 else np.stack(rows)

    def _add_queries(self, step: StepResult, window: int | None) -> None:
        """Add a step's queries to the latest ones of each layer."""
        if step.queries is None:
            raise KvmnnError("the policy needs queries, which the model was not asked for")
        earlier = self._queries
        self._queries = [
            append_queries(None if earlier is None else earlier[layer], queries, window)
            for layer, queries in enumerate(step.queries)
        ]

    def _read_live_attention(self, step: StepResult, layer: int) -> Floats:
        if step.attentions is None:
            raise KvmnnError(_NO_ATTENTION)
        attention, group = step.attentions[layer], self._list_groups_by_layer()[layer]
        if group is None or not group.num_masked:
            return attention
        return _select_live_columns(attention, group.slots[:, : group.num_live])

    def _keep_in_group(self, group: TokenGroup, indices: Indices, trigger: Trigger) -> None:
        if trigger is not Trigger.AFTER_APPEND:
            group.keep(indices)
            return
        num_past = group.num_slots - self._num_new
        group.keep(indices)
        if group.num_live < self._num_new or (group.slots[:, group.num_live - self._num_new] != num_past).any():
            if not self._takes_bias:
                raise KvmnnError(
                    f"layer {group.layers[0]}: the policy evicts some of {self._num_new} new tokens before attention, "
                    f"but this graph takes no bias that could mask them: feed fewer tokens at once"
                )
        else:
            self._compact_if_full(group, self._num_new)

    def _compact_if_full(self, group: TokenGroup, num_new: int = 0) -> None:
        max_masked = group.num_live // LIVE_PER_MASKED_SLOT if self._max_masked is None else self._max_masked
        if group.num_masked > max_masked:
            self._compact_group(group, num_new)

    def _compact_group(self, group: TokenGroup, num_new: int = 0) -> None:
        """Drop masked slots from K and V, which do not contain the last `num_new` tokens yet."""
        if group.num_masked == 0:
            return
        for layer in group.layers:
            self._store.compact(layer, group.slots[group.get_layer_rows(layer)], group.num_live - num_new)
        group.mark_compacted()

    def get_key_positions(self) -> dict[int, Indices]:
        """Return the true position of the token in each slot, the new ones included, by layers that may evict.

        int64 ``[1, 1 or query_heads, past + new]``, after `begin_step`.
        """
        positions_by_layer = {}
        for group in self._groups:
            for layer in group.layers:
                rows = group.get_slot_positions(layer)
                if len(rows) > 1 and self._query_heads > len(rows):
                    rows = np.repeat(rows, self._query_heads // len(rows), axis=0)
                positions_by_layer[layer] = np.ascontiguousarray(rows)[None]
        return positions_by_layer

    def _build_bias(self) -> list[Floats] | None:
        if not any(group.num_masked or group.dead is not None for group in self._groups):
            return None
        if self.num_seen > self._zeros.size:
            self._zeros = np.zeros(2 * self.num_seen, np.float32)
        biases = [self._zeros[:tokens].reshape(1, 1, 1, -1) for tokens in self.tokens]
        for group in self._groups:
            rows = group.bias[:, : group.num_slots]
            if group.rows_per_layer > 1 and self._query_heads > group.rows_per_layer:
                rows = np.repeat(rows, self._query_heads // group.rows_per_layer, axis=0)
            heads = self._query_heads if group.rows_per_layer > 1 else 1
            bias = np.ascontiguousarray(rows).reshape(-1, 1, heads, 1, group.num_slots)
            for number, layer in enumerate(group.layers):
                biases[layer] = bias[number if len(bias) > 1 else 0]
        return biases

    def _update_scores(self, group: TokenGroup, scores: Floats, step: StepResult) -> None:
        attentions, accumulator = step.attentions, self._score_accumulator
        if attentions is None:
            raise KvmnnError(_NO_ATTENTION)
        if isinstance(accumulator, SumScores):
            fade_factor = accumulator.fade_factor(self._num_new)
            for layer in group.layers:
                rows = group.get_layer_rows(layer)
                _eviction.add_columns(attentions[layer], group.slots[rows], scores[rows], group.num_live, fade_factor)
            return
        step_scores = np.zeros((len(scores), group.num_live), np.float32)
        for layer in group.layers:
            rows = group.get_layer_rows(layer)
            if accumulator.requires_queries:
                weights = _select_live_columns(attentions[layer], group.slots[rows, : group.num_live])
                step_scores[rows] = accumulator.sum_weights(
                    weights, self._kv_heads, per_head=self._policy.is_per_head, num_summed=step.num_summed
                )
            else:
                _eviction.add_columns(attentions[layer], group.slots[rows], step_scores[rows], group.num_live, 1.0)
        if not accumulator.requires_queries:
            heads, queries = attentions[group.layers[0]].shape[:2]
            step_scores = accumulator.normalize_sums(step_scores, heads * queries * step.num_summed)
        scores[:, : group.num_live] = accumulator.fold(scores[:, : group.num_live], step_scores, self._num_new)

    def _add_norms(self, group: TokenGroup, norms: Floats, present: Sequence[KVPair], num_new: int) -> None:
        keys: Elements = np.concatenate([present[layer][0][0, :, -num_new:] for layer in group.layers])
        norms[:, group.num_live - num_new : group.num_live] = compute_key_norms(keys)


def _select_live_columns(weights: Floats, slots: Indices) -> Floats:
    """Select the live slots of attention ``[query_head, query, slot]``: ``[query_head, query, token]``."""
    if len(slots) == 1:
        return weights[:, :, slots[0]]
    per_query_head = np.repeat(slots, weights.shape[0] // len(slots), axis=0)
    return np.take_along_axis(weights, per_query_head[:, None, :], axis=2)
