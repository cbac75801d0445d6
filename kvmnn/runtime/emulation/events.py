"""What one call of a layer did, in the fields of the trace format ``kvmnn-store-trace/1`` (docs/runtime.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...dtypes import Elements
from ...frames import fnv1a64
from ...packed.compaction import ReservePair


@dataclass(frozen=True)
class PlanEvent:
    """A plan of the layer's last call was found: applied, or dropped as stale."""

    layer: int
    remove: int
    pairs: tuple[ReservePair, ...]
    is_applied: bool

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {
            "layer": self.layer,
            "remove": self.remove,
            "ok": int(self.is_applied),
            "pairs": _convert_pairs_to_lists(self.pairs),
        }


@dataclass(frozen=True)
class EditEvent:
    """Rows were dropped before the new ones were appended."""

    is_cleared: bool
    remove: int
    pairs: tuple[ReservePair, ...]

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {"clear": int(self.is_cleared), "remove": self.remove, "pairs": _convert_pairs_to_lists(self.pairs)}


@dataclass(frozen=True)
class RestoreEvent:
    """A block was looked up or decoded: `hit` is ``local_pos``, ``local_hash``, ``global`` or ``miss``."""

    start: int
    count: int
    raw_bytes: int
    compressed_bytes: int
    hit: str
    is_restored: bool

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {
            "s": self.start,
            "n": self.count,
            "raw": self.raw_bytes,
            "comp": self.compressed_bytes,
            "hit": self.hit,
            "ok": int(self.is_restored),
        }


@dataclass(frozen=True)
class DecodeEvent:
    """Probe and full: a block was decoded once."""

    start: int
    count: int
    raw_bytes: int
    hit: str
    is_decoded: bool

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {"s": self.start, "n": self.count, "raw": self.raw_bytes, "hit": self.hit, "ok": int(self.is_decoded)}


@dataclass(frozen=True)
class ScatterEvent:
    """Restored rows were written into the layer; not `is_written` where they lie outside it."""

    start: int
    count: int
    nbytes: int
    is_written: bool

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {"s": self.start, "n": self.count, "bytes": self.nbytes, "ok": int(self.is_written)}


@dataclass(frozen=True)
class ShrinkEvent:
    """The cold range ends before the watermark: all blocks of the layer go."""

    old_watermark: int
    new_watermark: int
    num_pending: int
    num_blocks: int
    num_discarded: int
    is_plan_cleared: bool

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {
            "from": self.old_watermark,
            "to": self.new_watermark,
            "pending": self.num_pending,
            "blocks": self.num_blocks,
            "discarded": self.num_discarded,
            "plan_cleared": int(self.is_plan_cleared),
        }


@dataclass(frozen=True, eq=False)
class BlockEvent:
    """A block was due: skipped, encoded in the call (``sync``) or handed to a worker (``async``)."""

    start: int
    count: int
    is_bootstrap: bool
    num_pending: int
    outcome: str
    keys: Elements | None = None
    values: Elements | None = None

    @property
    def raw_hash(self) -> int | None:
        """Hash of K's and then V's bytes; None where nothing was gathered."""
        if self.keys is None or self.values is None:
            return None
        return fnv1a64(self.values, fnv1a64(self.keys))

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        document: dict[str, Any] = {
            "s": self.start,
            "n": self.count,
            "boot": int(self.is_bootstrap),
            "pending": self.num_pending,
            "how": self.outcome,
        }
        raw_hash = self.raw_hash
        return document if raw_hash is None else document | {"raw_hash": format_hash(raw_hash)}


@dataclass(frozen=True)
class BlockAppliedEvent:
    """The result of a block was taken into the layer's state."""

    layer: int
    start: int
    count: int
    raw_bytes: int
    compressed_bytes: int
    attempted_bytes: int
    key_bytes: int
    value_bytes: int
    raw_hash: int
    blob_hash: int
    is_from_dropped: bool
    is_counted: bool
    is_fallback: bool
    is_skipped: bool
    is_dropped: bool | None
    is_seeded: bool | None
    num_trimmed: int
    is_scheduled: bool
    queue_length: int

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {
            "layer": self.layer,
            "s": self.start,
            "n": self.count,
            "raw": self.raw_bytes,
            "comp": self.compressed_bytes,
            "att": self.attempted_bytes,
            "kb": self.key_bytes,
            "vb": self.value_bytes,
            "rh": format_hash(self.raw_hash),
            "bh": format_hash(self.blob_hash),
            "origin": int(self.is_from_dropped),
            "counted": int(self.is_counted),
            "fb": int(self.is_fallback),
            "skip": int(self.is_skipped),
            "dropped": _encode_outcome(self.is_dropped),
            "seeded": _encode_outcome(self.is_seeded),
            "trimmed": self.num_trimmed,
            "scheduled": int(self.is_scheduled),
            "queue": self.queue_length,
        }


@dataclass(eq=False)
class CallEvent:
    """Everything that one call did.

    Attributes
    ----------
    call
        Number of the call.
    layer, index
        The layer that ran and the one that the engine took it for.
    kv_len
        Tokens after the new ones were appended.
    is_in_scope
        Whether the scope covers the call; None in a prefill.
    budget, cold_range
        Tokens that count, and the range that may be compressed.
    is_planned
        Whether the eviction planner made a plan in this call.
    is_token_end, token_step
        Whether the index was the last one, and the decode steps so far.
    state, metrics, ratio
        As `EmulatedRuntime.list_state_values` and `EmulatedRuntime.report` after the call.
    """

    call: int
    layer: int
    index: int = 0
    kv_len: int = 0
    plan: PlanEvent | None = None
    edit: EditEvent | None = None
    is_reset: bool = False
    num_erased: int = 0
    restores: list[RestoreEvent] = field(default_factory=list)
    scatters: list[ScatterEvent] = field(default_factory=list)
    is_in_scope: bool | None = None
    budget: int | None = None
    cold_range: tuple[int, int] | None = None
    shrink: ShrinkEvent | None = None
    block: BlockEvent | None = None
    decodes: list[DecodeEvent] = field(default_factory=list)
    applied_blocks: list[BlockAppliedEvent] = field(default_factory=list)
    is_planned: bool = False
    is_token_end: bool = False
    token_step: int = 0
    state: tuple[int, ...] = ()
    metrics: tuple[int, ...] = ()
    ratio: float = 1.0

    @property
    def has_effect(self) -> bool:
        """Whether the call did anything beyond appending rows."""
        lists = self.restores or self.scatters or self.decodes or self.applied_blocks
        event = self.plan or self.edit or self.shrink or self.block
        return bool(lists or event or self.is_reset or self.num_erased or self.is_planned)

    def to_dict(self) -> dict[str, Any]:
        """The trace's event, without the fields about live rows."""
        document: dict[str, Any] = {"call": self.call, "layer": self.layer, "index": self.index, "kv": self.kv_len}
        for name, single in (("plan", self.plan), ("edit", self.edit), ("shrink", self.shrink), ("block", self.block)):
            if single is not None:
                document[name] = single.to_dict()
        if self.is_reset:
            document["reset"] = 1
        if self.num_erased:
            document["erased"] = self.num_erased
        for name, events in (("restore", self.restores), ("scatter", self.scatters), ("applied", self.applied_blocks)):
            if events:
                document[name] = [event.to_dict() for event in events]
        if self.decodes:
            document["decode"] = [event.to_dict() for event in self.decodes]
        if self.is_in_scope is not None:
            document["apply"] = int(self.is_in_scope)
        if self.budget is not None and self.cold_range is not None:
            document |= {"budget": self.budget, "cold": list(self.cold_range)}
        if self.is_token_end:
            document["m_token_end"] = 1
        return document | {"state": list(self.state), "metrics": list(self.metrics), "ratio": self.ratio}


def format_hash(number: int) -> str:
    """A hash as 16 digits."""
    return f"{number:016x}"


def _convert_pairs_to_lists(pairs: tuple[ReservePair, ...]) -> list[list[int]]:
    return [list(pair) for pair in pairs]


def _encode_outcome(outcome: bool | None) -> int:
    return -1 if outcome is None else int(outcome)
