"""What one call of a layer did, in the fields of the trace format ``kvmnn-store-trace/1`` (docs/runtime.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...dtypes import Words
from ...frames import fnv1a64
from ...packed.reserve import Pair


@dataclass(frozen=True)
class PlanEvent:
    """A plan of the layer's last call was found: applied, or dropped as stale."""

    layer: int
    remove: int
    pairs: tuple[Pair, ...]
    ok: bool

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {"layer": self.layer, "remove": self.remove, "ok": int(self.ok), "pairs": _lists(self.pairs)}


@dataclass(frozen=True)
class EditEvent:
    """Rows were dropped before the new ones were appended."""

    clear: bool
    remove: int
    pairs: tuple[Pair, ...]

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {"clear": int(self.clear), "remove": self.remove, "pairs": _lists(self.pairs)}


@dataclass(frozen=True)
class RestoreEvent:
    """A block was looked up or decoded: `hit` is ``local_pos``, ``local_hash``, ``global`` or ``miss``."""

    start: int
    count: int
    raw_bytes: int
    compressed_bytes: int
    hit: str
    ok: bool

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {
            "s": self.start,
            "n": self.count,
            "raw": self.raw_bytes,
            "comp": self.compressed_bytes,
            "hit": self.hit,
            "ok": int(self.ok),
        }


@dataclass(frozen=True)
class DecodeEvent:
    """Probe and full: a block was decoded once."""

    start: int
    count: int
    raw_bytes: int
    hit: str
    ok: bool

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {"s": self.start, "n": self.count, "raw": self.raw_bytes, "hit": self.hit, "ok": int(self.ok)}


@dataclass(frozen=True)
class ScatterEvent:
    """Restored rows were written into the layer; not `ok` where they lie outside it."""

    start: int
    count: int
    nbytes: int
    ok: bool

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {"s": self.start, "n": self.count, "bytes": self.nbytes, "ok": int(self.ok)}


@dataclass(frozen=True)
class ShrinkEvent:
    """The cold range ends before the watermark: all blocks of the layer go."""

    before: int
    after: int
    pending: int
    blocks: int
    discarded: int
    plan_cleared: bool

    def to_dict(self) -> dict[str, Any]:
        """The trace's object."""
        return {
            "from": self.before,
            "to": self.after,
            "pending": self.pending,
            "blocks": self.blocks,
            "discarded": self.discarded,
            "plan_cleared": int(self.plan_cleared),
        }


@dataclass(frozen=True, eq=False)
class BlockEvent:
    """A block was due: skipped, encoded in the call (``sync``) or handed to a worker (``async``)."""

    start: int
    count: int
    bootstrap: bool
    pending: int
    how: str
    keys: Words | None = None
    values: Words | None = None

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
            "boot": int(self.bootstrap),
            "pending": self.pending,
            "how": self.how,
        }
        raw_hash = self.raw_hash
        return document if raw_hash is None else document | {"raw_hash": hexadecimal(raw_hash)}


@dataclass(frozen=True)
class AppliedEvent:
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
    from_dropped: bool
    counted: bool
    fallback: bool
    skipped: bool
    dropped: bool | None
    seeded: bool | None
    trimmed: int
    scheduled: bool
    queue: int

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
            "rh": hexadecimal(self.raw_hash),
            "bh": hexadecimal(self.blob_hash),
            "origin": int(self.from_dropped),
            "counted": int(self.counted),
            "fb": int(self.fallback),
            "skip": int(self.skipped),
            "dropped": _tried(self.dropped),
            "seeded": _tried(self.seeded),
            "trimmed": self.trimmed,
            "scheduled": int(self.scheduled),
            "queue": self.queue,
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
    applies
        Whether the scope covers the call; None in a prefill.
    budget, cold
        Tokens that count, and the range that may be compressed.
    planned
        Whether the eviction planner made a plan in this call.
    token_end, token_step
        Whether the index was the last one, and the decode steps so far.
    state, metrics, ratio
        As `EngineRuntime.state_figures` and `EngineRuntime.reported` after the call.
    """

    call: int
    layer: int
    index: int = 0
    kv_len: int = 0
    plan: PlanEvent | None = None
    edit: EditEvent | None = None
    reset: bool = False
    erased: int = 0
    restores: list[RestoreEvent] = field(default_factory=list)
    scatters: list[ScatterEvent] = field(default_factory=list)
    applies: bool | None = None
    budget: int | None = None
    cold: tuple[int, int] | None = None
    shrink: ShrinkEvent | None = None
    block: BlockEvent | None = None
    decodes: list[DecodeEvent] = field(default_factory=list)
    applied: list[AppliedEvent] = field(default_factory=list)
    planned: bool = False
    token_end: bool = False
    token_step: int = 0
    state: tuple[int, ...] = ()
    metrics: tuple[int, ...] = ()
    ratio: float = 1.0

    @property
    def happened(self) -> bool:
        """Whether the call did anything beyond appending rows."""
        lists = self.restores or self.scatters or self.decodes or self.applied
        single = self.plan or self.edit or self.shrink or self.block
        return bool(lists or single or self.reset or self.erased or self.planned)

    def to_dict(self) -> dict[str, Any]:
        """The trace's event, without the fields about live rows."""
        document: dict[str, Any] = {"call": self.call, "layer": self.layer, "index": self.index, "kv": self.kv_len}
        for name, single in (("plan", self.plan), ("edit", self.edit), ("shrink", self.shrink), ("block", self.block)):
            if single is not None:
                document[name] = single.to_dict()
        if self.reset:
            document["reset"] = 1
        if self.erased:
            document["erased"] = self.erased
        for name, events in (("restore", self.restores), ("scatter", self.scatters), ("applied", self.applied)):
            if events:
                document[name] = [event.to_dict() for event in events]
        if self.decodes:
            document["decode"] = [event.to_dict() for event in self.decodes]
        if self.applies is not None:
            document["apply"] = int(self.applies)
        if self.budget is not None and self.cold is not None:
            document |= {"budget": self.budget, "cold": list(self.cold)}
        if self.token_end:
            document["m_token_end"] = 1
        return document | {"state": list(self.state), "metrics": list(self.metrics), "ratio": self.ratio}


def hexadecimal(number: int) -> str:
    """A hash as 16 digits."""
    return f"{number:016x}"


def _lists(pairs: tuple[Pair, ...]) -> list[list[int]]:
    return [list(pair) for pair in pairs]


def _tried(outcome: bool | None) -> int:
    return -1 if outcome is None else int(outcome)
