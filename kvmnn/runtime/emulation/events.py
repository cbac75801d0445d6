"""Events of one call of a layer, in the fields of the trace format ``kvmnn-store-trace/1`` (docs/runtime.md)."""

from __future__ import annotations

from dataclasses import field

from ..._util.dataclass import dataclass
from ...dtypes import Elements
from ...files.schema import Record, json_key
from ...frames import fnv1a64
from ...packed.compaction import ReservePair

_OMIT = {"omit": True}


def format_hash(number: int) -> str:
    """Format a hash as 16 hexadecimal digits."""
    return f"{number:016x}"


def _encode_outcome(outcome: bool | None) -> int:
    return -1 if outcome is None else int(outcome)


@dataclass(frozen=True)
class PlanEvent(Record):
    """The plan of the layer's last call was applied, or dropped as stale."""

    layer: int
    remove: int
    is_applied: bool = field(metadata={"key": "ok", "convert": int})
    pairs: tuple[ReservePair, ...]


@dataclass(frozen=True)
class EditEvent(Record):
    """Rows of the layer were removed, before new ones were appended: all (`is_cleared`), or those of a plan."""

    is_cleared: bool = field(metadata={"key": "clear", "convert": int})
    remove: int
    pairs: tuple[ReservePair, ...]


@dataclass(frozen=True)
class RestoreEvent(Record):
    """A block was looked up or decoded: `hit` is ``local_pos``, ``local_hash``, ``global`` or ``miss``."""

    start: int = field(metadata={"key": "s"})
    count: int = field(metadata={"key": "n"})
    raw_bytes: int = field(metadata={"key": "raw"})
    compressed_bytes: int = field(metadata={"key": "comp"})
    hit: str
    is_restored: bool = field(metadata={"key": "ok", "convert": int})


@dataclass(frozen=True)
class DecodeEvent(Record):
    """A stored block was decoded, or found in a decode cache, for the statistics only (modes probe and full).

    `hit` is the kind of the cache hit, or ``"miss"``; `is_decoded` is False if the block decoded to other bytes.
    """

    start: int = field(metadata={"key": "s"})
    count: int = field(metadata={"key": "n"})
    raw_bytes: int = field(metadata={"key": "raw"})
    hit: str
    is_decoded: bool = field(metadata={"key": "ok", "convert": int})


@dataclass(frozen=True)
class ScatterEvent(Record):
    """Restored rows were written into the layer; `is_written` is False if they were outside it."""

    start: int = field(metadata={"key": "s"})
    count: int = field(metadata={"key": "n"})
    nbytes: int = field(metadata={"key": "bytes"})
    is_written: bool = field(metadata={"key": "ok", "convert": int})


@dataclass(frozen=True)
class ShrinkEvent(Record):
    """The cold range ends before the watermark: all blocks of the layer are dropped."""

    old_watermark: int = field(metadata={"key": "from"})
    new_watermark: int = field(metadata={"key": "to"})
    num_pending: int = field(metadata={"key": "pending"})
    num_blocks: int = field(metadata={"key": "blocks"})
    num_discarded: int = field(metadata={"key": "discarded"})
    is_plan_cleared: bool = field(metadata={"key": "plan_cleared", "convert": int})


@dataclass(frozen=True, eq=False)
class BlockEvent(Record):
    """A block was due: skipped, encoded in the call (``sync``) or submitted to a worker (``async``)."""

    start: int = field(metadata={"key": "s"})
    count: int = field(metadata={"key": "n"})
    is_bootstrap: bool = field(metadata={"key": "boot", "convert": int})
    num_pending: int = field(metadata={"key": "pending"})
    outcome: str = field(metadata={"key": "how"})
    keys: Elements | None = field(default=None, metadata={"json": False})
    values: Elements | None = field(default=None, metadata={"json": False})

    @property
    def raw_hash(self) -> int | None:
        """Hash of the bytes of K and then V; None if no rows were read."""
        if self.keys is None or self.values is None:
            return None
        return fnv1a64(self.values, fnv1a64(self.keys))

    @property
    @json_key("raw_hash", omit=True)
    def _raw_hash_text(self) -> str | None:
        raw_hash = self.raw_hash
        return None if raw_hash is None else format_hash(raw_hash)


@dataclass(frozen=True)
class BlockAppliedEvent(Record):
    """The result of a block was added to the layer's state."""

    layer: int
    start: int = field(metadata={"key": "s"})
    count: int = field(metadata={"key": "n"})
    raw_bytes: int = field(metadata={"key": "raw"})
    compressed_bytes: int = field(metadata={"key": "comp"})
    attempted_bytes: int = field(metadata={"key": "att"})
    key_bytes: int = field(metadata={"key": "kb"})
    value_bytes: int = field(metadata={"key": "vb"})
    raw_hash: int = field(metadata={"key": "rh", "convert": format_hash})
    blob_hash: int = field(metadata={"key": "bh", "convert": format_hash})
    is_from_dropped: bool = field(metadata={"key": "origin", "convert": int})
    is_counted: bool = field(metadata={"key": "counted", "convert": int})
    is_fallback: bool = field(metadata={"key": "fb", "convert": int})
    is_skipped: bool = field(metadata={"key": "skip", "convert": int})
    is_dropped: bool | None = field(metadata={"key": "dropped", "convert": _encode_outcome})
    is_cached: bool | None = field(metadata={"key": "seeded", "convert": _encode_outcome})
    num_trimmed: int = field(metadata={"key": "trimmed"})
    is_scheduled: bool = field(metadata={"key": "scheduled", "convert": int})
    queue_length: int = field(metadata={"key": "queue"})


@dataclass(eq=False)
class CallEvent(Record):
    """All events of one call.

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

    json_keys = (
        "call layer index kv=kv_len plan edit shrink block reset=is_reset erased=num_erased restore=restores "
        "scatter=scatters applied=applied_blocks decode=decodes apply=is_in_scope budget cold=cold_range "
        "m_token_end=is_token_end state metrics ratio"
    )

    call: int
    layer: int
    index: int = 0
    kv_len: int = 0
    plan: PlanEvent | None = field(default=None, metadata=_OMIT)
    edit: EditEvent | None = field(default=None, metadata=_OMIT)
    is_reset: bool = field(default=False, metadata=_OMIT | {"convert": int})
    num_erased: int = field(default=0, metadata=_OMIT)
    restores: list[RestoreEvent] = field(default_factory=list, metadata=_OMIT)
    scatters: list[ScatterEvent] = field(default_factory=list, metadata=_OMIT)
    is_in_scope: bool | None = field(default=None, metadata=_OMIT | {"convert": int})
    budget: int | None = field(default=None, metadata=_OMIT)
    cold_range: tuple[int, int] | None = field(default=None, metadata=_OMIT)
    shrink: ShrinkEvent | None = field(default=None, metadata=_OMIT)
    block: BlockEvent | None = field(default=None, metadata=_OMIT)
    decodes: list[DecodeEvent] = field(default_factory=list, metadata=_OMIT)
    applied_blocks: list[BlockAppliedEvent] = field(default_factory=list, metadata=_OMIT)
    is_planned: bool = False
    is_token_end: bool = field(default=False, metadata=_OMIT | {"convert": int})
    token_step: int = 0
    state: tuple[int, ...] = ()
    metrics: tuple[int, ...] = ()
    ratio: float = 1.0

    @property
    def has_effect(self) -> bool:
        """Return whether the call did anything beyond appending rows."""
        lists = self.restores or self.scatters or self.decodes or self.applied_blocks
        event = self.plan or self.edit or self.shrink or self.block
        return bool(lists or event or self.is_reset or self.num_erased or self.is_planned)
