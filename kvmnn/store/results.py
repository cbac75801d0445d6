"""Results of the calls of a store."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from .._util.dataclass import dataclass
from .._util.text import LOSSLESS, LOSSY, compute_ratio, escape_control, format_rate, pluralize, shorten_names
from ..arrays.completeness import Completeness
from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import OpaqueState
from ..arrays.source import ROUNDED_TEXT, list_losses, qualify_label
from ..files.schema import Record, json_key
from .namespace import Ids

if TYPE_CHECKING:  # or every start would import its tables
    from ..reports.break_even import BreakEvenReport
_LOSSY_TEXT = f"{LOSSY}: K and V are rounded (transform streams)"

_STAT_HINT = "; store stat STORE TEXT has the nats expected, where known"
_LISTING_HINT = "K and V are rounded, as stored or before (store stat STORE TEXT says which, and the nats expected)"


def format_predicted_kl(predicted_kl: float | None) -> str:
    """Return what lossy units are expected to cost, after what says that they are."""
    if predicted_kl is None:
        return ", nats not known"
    return f", {predicted_kl:.2g} nats a token expected of texts like the profile's"


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredPrefix:
    """The longest stored prefix of a sequence."""

    #: Its length; 0 for a miss.
    tokens: int
    #: Tokens of the sequence.
    requested_tokens: int
    #: K and V of its tokens, ``[kv_head, token, head_dim]``, in new arrays; empty for a miss.
    layers: list[LayerCache] = field(default_factory=list)
    #: Their precision, ``"fp16"``, ``"bf16"`` or ``"fp32"``; None for a miss.
    dtype: str | None = None
    #: Tokens of the sequence that are stored in each other precision.
    other_precisions: Mapping[str, int] = field(default_factory=dict, metadata={"key": "others"})
    #: One line for each damaged unit, which is a miss now, and for a remote store that did not answer.
    notes: tuple[str, ...] = ()
    #: Whether it is a miss because a remote store did not answer.
    outage: bool = False
    #: Ids of its tokens; None if they are unknown.
    token_ids: Ids | None = None
    #: State of layers other than K and V, after exactly these tokens.
    states: tuple[OpaqueState, ...] = ()
    #: What the prefix contains of each layer, for a model with windows or state; None if all layers have full
    #: attention.
    completeness: Completeness | None = None
    #: Whether K and V are not exactly those that were put: of a store of transform streams.
    is_lossy: bool = False
    #: What some of its K and V had lost before they were put; empty for nothing. The sentence is of all texts of this
    #: model and precision.
    loss: str = ""
    #: Nats a token that the rounding of lossy units is expected to cost; None where nothing says it.
    predicted_kl: float | None = None

    @property
    def label(self) -> str | None:
        """Return ``LOSSY`` where K and V are not exactly those that were put, or had lost something before."""
        return LOSSY if self.is_lossy or self.loss else None

    @property
    def missing(self) -> tuple[str, ...]:
        """A sentence for each kind of state that a model needs to continue and that is missing."""
        return () if self.completeness is None else tuple(self.completeness.missing)

    @property
    def is_complete(self) -> bool:
        """Return whether a model can continue from it."""
        return not self.missing


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerwisePrefix:
    """The longest stored prefix of a sequence, whose layers are decoded while the caller uses those before them."""

    #: Its length; 0 for a miss.
    tokens: int
    #: Tokens of the sequence.
    requested_tokens: int
    #: Number of its layers.
    num_layers: int = 0
    #: Yields K and V of each layer once, in order, as `StoredPrefix.layers` has them. A damaged unit raises
    #: `DamagedPrefixError`: the layers before it must be dropped then, and the next `get` finds a shorter prefix.
    layers: Iterator[LayerCache] = field(default_factory=lambda: iter(()))
    #: As in `StoredPrefix`.
    dtype: str | None = None
    notes: tuple[str, ...] = ()
    outage: bool = False
    states: tuple[OpaqueState, ...] = ()
    is_lossy: bool = False
    loss: str = ""

    @property
    def label(self) -> str | None:
        """Return ``LOSSY`` where K and V are not exactly those that were put, or had lost something before."""
        return LOSSY if self.is_lossy or self.loss else None


@dataclass(frozen=True, kw_only=True)
class StoreSession:
    """A session that was parked."""

    #: Name of the session.
    name: str
    #: Its whole sequence.
    token_ids: list[int]
    #: Its stored prefix: K and V of the remaining tokens must be computed again.
    prefix: StoredPrefix


@dataclass(frozen=True, kw_only=True)
class PutResult(Record):
    """Result of a put."""

    #: Tokens of the sequence.
    tokens: int
    #: Tokens that were stored before.
    known_tokens: int
    #: Tokens before those that were stored now: fewer than `known_tokens` if a partial block is continued.
    stored_from: int = 0
    #: Tokens that are stored now: fewer than `tokens` if the limit does not allow more, or a remote store did not
    #: answer.
    stored_tokens: int = 0
    #: Bytes of K and V from token `stored_from` on.
    raw_bytes: int = 0
    #: Bytes of the files for them.
    stored_bytes: int = 0
    #: Part of `stored_bytes` in the file with windows and state; 0 if there are none, or they were stored before.
    state_bytes: int = 0
    #: Bytes of files that were evicted or superseded.
    removed_bytes: int = 0
    #: Time it took.
    seconds: float = 0.0
    #: Why the sequence is not completely stored, what was rounded once more, which label was replaced, and a line for
    #: each damaged unit, whose tokens are stored again.
    notes: tuple[str, ...] = ()
    #: Whether that is because a remote store did not answer.
    outage: bool = False
    #: Whether K and V are rounded, as a store of transform streams does.
    is_lossy: bool = field(default=False, metadata={"omit": True})
    #: Nats a token that this is expected to cost; None where nothing says it.
    predicted_kl: float | None = field(default=None, metadata={"omit": True})

    def __str__(self) -> str:
        text = f"{pluralize(self.tokens, 'token')}: all of them were stored already"
        text += ", and stay as they were rounded then" if self.is_lossy else ""
        if self.stored_tokens < self.tokens:
            outcome = "none of them is stored now" if self.removed_bytes else "nothing was stored"
            outcome = f"{self.stored_tokens:,} of them are stored now" if self.stored_tokens else outcome
            text = f"{pluralize(self.tokens, 'token')}: {outcome}: {'; '.join(self.notes)}"
        elif self.raw_bytes:
            num_new = self.tokens - self.known_tokens
            size_text = f"{self.raw_bytes:,} -> {self.stored_bytes:,} bytes"
            if self.state_bytes:
                size_text += f" ({self.state_bytes:,} of windows and state at this length)"
            from_text = f", stored from {self.stored_from:,} on" if self.stored_from < self.known_tokens else ""
            text = f"{pluralize(self.tokens, 'token')}, {num_new:,} of them new{from_text}: {size_text}"
            text += (
                f", ratio "
                f"{compute_ratio(self.raw_bytes, self.stored_bytes):.4f}{format_rate(self.raw_bytes, self.seconds)}"
            )
        if self.is_lossy:
            has_new_units = self.stored_bytes > self.state_bytes  # of those that were stored already nothing was read
            text += f"\n  {_LOSSY_TEXT}{format_predicted_kl(self.predicted_kl) if has_new_units else ''}"
        if self.stored_tokens == self.tokens:
            text += "".join(f"\n  {note}" for note in self.notes)
        return text + (f"\n  {self.removed_bytes:,} bytes of files evicted or replaced" if self.removed_bytes else "")


@dataclass(frozen=True, kw_only=True)
class StoreExportResult(Record):
    """Result of an export."""

    #: Path of the file.
    output: str
    #: Tokens of the sequence.
    tokens: int
    #: Size of the file.
    bytes: int
    #: As in `StoredPrefix`.
    dtype: str
    other_precisions: Mapping[str, int] = field(default_factory=dict, metadata={"key": "others"})
    is_lossy: bool = field(default=False, metadata={"omit": True})
    #: As in `StoredPrefix`.
    loss: str = field(default="", metadata={"omit": True})
    #: What was lost in the export itself.
    notes: tuple[str, ...] = field(default=(), metadata={"omit": True})

    @property
    @json_key()
    def label(self) -> str:
        """Return ``LOSSY`` for rounded K and V, ``LOSSLESS`` or ``LOSSLESS copy of LOSSY K and V``."""
        return LOSSY if self.is_lossy else qualify_label(LOSSLESS, list_losses(self.loss)) or LOSSLESS

    def __str__(self) -> str:
        label = f"{LOSSY} as stored" if self.is_lossy else self.label
        line = f"{self.output}: {pluralize(self.tokens, 'token')}, {self.bytes:,} bytes, {label} (checksums compared)"
        return "\n  ".join([line, *self.notes])


@dataclass(frozen=True, kw_only=True)
class StoreCopyResult(Record):
    """Result of copying the sequences of a namespace into another store."""

    #: Sequences that are stored there as a whole: those of `ls`, and others that have a label or a pin.
    texts: int
    #: How many of them have a label, and a pin.
    labels: int
    pins: int
    #: Whether K and V are rounded, as in a store of transform streams.
    is_lossy: bool = field(default=False, metadata={"omit": True})
    #: What was not copied, and what K and V had lost before.
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        text_text = _pluralize(self.texts, "text", is_lossy=self.is_lossy)
        line = f"{text_text} copied, {pluralize(self.labels, 'label')}, {pluralize(self.pins, 'pin')}"
        return "\n  ".join([line, *self.notes])


@dataclass(frozen=True, kw_only=True)
class CleanupResult(Record):
    """Result of a deletion or a garbage collection."""

    #: Units that were removed, and bytes of their files.
    units: int = 0
    bytes: int = 0
    #: Those of them that a garbage collection found lost: what they are of, or a unit before them, was gone or damaged.
    lost: int = field(default=0, metadata={"omit": True})
    #: Unreferenced files that were removed.
    other_files: int = 0
    other_bytes: int = 0
    #: Unreferenced files of a remote store that were kept, as a running put may have written them just now.
    young_files: int = 0
    #: Why a sequence, or part of it, was kept, or why the store is still above the limit; empty if everything was
    #: removed.
    kept: str = ""
    #: Tokens of a deleted sequence alone that stay and are still found, as they share a unit with tokens that other
    #: sequences have or a pin keeps.
    unshared_tokens: int = field(default=0, metadata={"omit": True})
    #: Tokens of a deleted sequence whose K and V no get found any more: damaged ones, evicted ones, and what followed.
    missing_tokens: int = field(default=0, metadata={"omit": True})
    #: Precisions of a sequence that were deleted.
    dtypes: tuple[str, ...] = ()
    #: Files in the store that kvmnn did not write; they were kept.
    foreign: tuple[str, ...] = ()
    #: Labels of shorter sequences that began a deleted one and went with it.
    lost_labels: tuple[str, ...] = field(default=(), metadata={"omit": True})
    #: Sessions that have token ids of a deleted sequence until they are removed.
    sessions: tuple[str, ...] = field(default=(), metadata={"omit": True})
    #: One line for each damaged unit of a deleted sequence, which was removed first.
    notes: tuple[str, ...] = field(default=(), metadata={"omit": True})
    #: Bytes above the limit of a garbage collection that are left, as pins keep them.
    excess_bytes: int = field(default=0, metadata={"omit": True})
    #: Whether the store is one of transform streams, whose K and V are not exactly those that were put.
    is_lossy: bool = field(default=False, metadata={"omit": True})

    def __str__(self) -> str:
        unit_text = _pluralize(self.units, "unit", is_lossy=self.is_lossy)
        text = f"removed {unit_text}, {self.bytes:,} bytes{_format_dtypes(self.dtypes)}"
        if self.other_files:
            text += f", and {pluralize(self.other_files, 'file')} that nothing referred to"
            text += f", {self.other_bytes:,} bytes" if self.other_bytes else ""
        text += f": {self.kept}" if self.kept else ""
        if self.lost:
            text += (
                f"\n  lost, as their bytes, their record or a unit before them was gone: {pluralize(self.lost, 'unit')}"
            )
        if self.missing_tokens:
            missing_text = pluralize(self.missing_tokens, "token")
            text += f"\n  {missing_text} of it were damaged or evicted before (store gc removes what nothing refers to)"
        if self.lost_labels:
            labels_text = ", ".join(map(escape_control, self.lost_labels))
            text += f"\n  shorter texts that began it went with it, as no pin keeps them: {labels_text}"
        if self.sessions:
            names = ", ".join(map(escape_control, self.sessions))
            text += f"\n  its token ids stay in sessions (store rm STORE NAME removes one): {names}"
        if self.young_files:
            young_text = pluralize(self.young_files, "file")
            text += f"\n  that nothing refers to, and left as a put may be at work: {young_text} younger than an hour"
        if self.foreign:
            more_text = " ..." if len(self.foreign) > _MAX_NAMES_SHOWN else ""
            names = ", ".join(map(escape_control, self.foreign[:_MAX_NAMES_SHOWN])) + more_text
            text += f"\n  not kvmnn's, and left where they are: {pluralize(len(self.foreign), 'file')} ({names})"
        return text

    @property
    def is_refused(self) -> bool:
        """Whether nothing was removed because a pin keeps it."""
        return not self.units and _PINNED_REASON in self.kept


_MAX_NAMES_SHOWN = 5
_PINNED_REASON = "it is pinned"


def count_excess_bytes(stored_bytes: int, max_bytes: int | None) -> int:
    """Return the bytes above a limit; None is none."""
    return 0 if max_bytes is None else max(stored_bytes - max_bytes, 0)


def explain_pinned_bytes(stored_bytes: int, max_bytes: int | None) -> str:
    """Explain why a store is still above its limit; empty if it is not."""
    return (
        f"{stored_bytes:,} bytes are left, {stored_bytes - max_bytes:,} above the limit, of texts that are pinned"
        if max_bytes is not None and stored_bytes > max_bytes
        else ""
    )


def explain_kept_part(num_removed: int, num_left: int, num_needed: int, *, is_pinned: bool) -> str:
    """Explain why a sequence, or its first `num_left` tokens, were not deleted.

    The first `num_needed` of them are in other sequences or pinned ones; the others share a unit with these.
    """
    if not num_removed and is_pinned:
        return _PINNED_REASON
    if not num_left:
        return ""
    if num_needed < num_left:
        return (
            f"its first {pluralize(num_left, 'token')} stay: {num_needed:,} that other texts have or a pin keeps, and "
            f"{num_left - num_needed:,} of this text alone, in a unit with some of these (store rm of those texts, "
            "then of what store ls shows of this one)"
        )
    if not num_removed:
        return "other texts go on from it"
    return f"its first {pluralize(num_left, 'token')} stay, which other texts have or a pin keeps"


@dataclass(frozen=True, kw_only=True)
class StoreVerifyResult(Record):
    """Result of a verification."""

    #: Intact units, the sum of their tokens (one in several units counts in each), and bytes of their files.
    units: int
    tokens: int
    bytes: int
    #: One line for each damaged unit; its tokens are not found any more.
    damaged: tuple[str, ...] = ()
    #: Intact state units.
    states: int = 0
    #: Units that follow damaged ones: they are unreachable, and were removed as well.
    lost: int = 0
    #: One line for each recovery file of a directory that was missing or damaged and was written again; for each
    #: damaged session of a remote store; for each damaged label; and for each Redis key of another type.
    damaged_files: tuple[str, ...] = ()
    #: One line for an index, or settings, that were lost or damaged and rebuilt when the store was opened.
    rebuilt_parts: tuple[str, ...] = ()
    #: Units whose K and V are not those that were computed: rounded before they were put, or by it.
    lossy_units: int = field(default=0, metadata={"omit": True})

    @property
    @json_key(before="units")
    def label(self) -> str | None:
        """Return ``LOSSY`` for rounded K and V, ``LOSSLESS`` where all units are those that were put, else None."""
        return LOSSY if self.lossy_units else LOSSLESS if (self.units or self.states) and not self.damaged else None

    def __str__(self) -> str:
        is_mixed = 0 < self.lossy_units < self.units
        unit_text = _pluralize(self.units, "unit", is_lossy=self.lossy_units > 0 and not is_mixed)
        unit_text += f" ({self.lossy_units:,} {LOSSY})" if is_mixed else ""
        token_text = _format_unit_tokens(self.units, self.tokens)
        summary = f"{unit_text}, {token_text}, {self.bytes:,} bytes{_format_states(self.states)}"
        proof = "all of it decoded and compared with its checksums"
        summary += f": {self.label} ({proof})" if self.label == LOSSLESS else f": {proof}"
        summary = summary if self.units or self.states else "no units are stored"
        lines = [summary] if self.units or self.states or not self.damaged else []
        if self.damaged:
            lost_text = f", and {pluralize(self.lost, 'unit')} lost that went on from them" if self.lost else ""
            noun = "more unit" if self.units else "unit"
            lines += [f"{pluralize(len(self.damaged), noun)} damaged{lost_text}:", *self.damaged]
        if self.damaged_files:
            lines += [f"{pluralize(len(self.damaged_files), 'file')} next to the index damaged:", *self.damaged_files]
        if self.rebuilt_parts:
            lines += [
                f"{pluralize(len(self.rebuilt_parts), 'part')} of the store lost, damaged or wrong:",
                *self.rebuilt_parts,
            ]
        return "\n".join(lines)


MAX_LAST_IDS = 8
MIN_HANDLE_LETTERS = 6
"""Letters of a key that `ls` shows."""
MIN_REFERENCE_LETTERS = 4
"""Letters of a key that name a text, if no other key begins with them."""


@dataclass(frozen=True, kw_only=True)
class StoreEntry(Record):
    """A stored sequence that is not the prefix of a longer one."""

    #: Fingerprint of its model, and its precision.
    model: str
    dtype: str
    #: Its length.
    tokens: int
    #: Bytes of all its units, with windows and state; sequences share units.
    bytes: int
    #: Whether it is exempt from eviction.
    pinned: bool
    #: Uses of texts of the namespace since its last use, of each unit the last alone; None if unknown.
    unused_for: int | None
    #: Its last token ids, at most `MAX_LAST_IDS`: they tell apart sequences with a common prefix.
    last_ids: tuple[int, ...] = ()
    #: Whether a model can continue from all of it: False if windows or state are missing for this length.
    is_complete: bool = True
    #: Key of the sequence, 32 hexadecimal digits; empty if its ids cannot be read. Its first letters are a handle.
    key: str = ""
    #: What `put` called it; empty if nothing did.
    label: str = ""
    #: Where codecs and prefixes pay; only if it was measured.
    break_even: BreakEvenReport | None = field(default=None, metadata={"omit": True})
    #: Whether K and V are not those that were computed: rounded before they were put, or by it. Of a store past this
    #: machine, those of some texts of this model and precision.
    is_lossy: bool = field(default=False, metadata={"omit": True})
    #: What K and V have lost; of `describe` alone.
    loss: str = field(default="", metadata={"omit": True})
    #: Nats a token that this is expected to cost; of `describe` alone, None where nothing says it.
    predicted_kl: float | None = field(default=None, metadata={"omit": True})

    def __str__(self) -> str:
        line = self.format_line(self.key[:MIN_HANDLE_LETTERS], shorten_names([self.model])[self.model])
        if self.loss:
            cost = format_predicted_kl(self.predicted_kl) if ROUNDED_TEXT in self.loss else ""
            line += f"\n  {LOSSY}: {escape_control(self.loss)}{cost}"
        return line if self.break_even is None else f"{line}\n\n{self.break_even}"

    def format_line(self, handle: str, model: str) -> str:
        """Return a line of a listing, with a handle, and a name of the model."""
        use_text = (
            "pinned" if self.pinned else "" if self.unused_for is None else f"{pluralize(self.unused_for, 'use')} ago"
        )
        line = (
            f"{handle}  {self.tokens:>9,} tokens  {self.bytes:>12,} bytes  {self.dtype}  {model}  {use_text}".rstrip()
        )
        line += f"  {LOSSY}" if self.is_lossy else ""
        line += f"  {escape_control(self.label)}" if self.label else ""
        line += "" if self.key else "  (damaged: store verify)"
        return line if self.is_complete else f"{line}  (without windows and state)"


@dataclass(frozen=True, kw_only=True)
class StoreListing(Record):
    """The stored sequences, the most recently used first."""

    #: The sequences.
    texts: tuple[StoreEntry, ...]
    #: Bytes of all units, each counted once.
    bytes: int = 0
    #: Names of the sessions.
    sessions: tuple[str, ...] = field(default=(), metadata={"omit": True})
    #: Number of namespaces with texts, if these are the texts of none and there are none; their names are their own.
    namespaces: int = field(default=0, metadata={"omit": True})

    def make_handles(self) -> list[str]:
        """Return the handle of each sequence: as many first letters of its key as tell it apart, at least six."""
        num_letters = next(
            (
                number
                for number in range(MIN_HANDLE_LETTERS, 32)
                if len({(entry.key[:number], entry.key) for entry in self.texts})
                == len({entry.key[:number] for entry in self.texts})
            ),
            32,
        )
        return [entry.key[:num_letters] or "-" * num_letters for entry in self.texts]

    def __str__(self) -> str:
        names = shorten_names(entry.model for entry in self.texts)
        handles = self.make_handles()
        lines = [
            entry.format_line(handle, names[entry.model]) for handle, entry in zip(handles, self.texts, strict=True)
        ]
        row_bytes = sum(entry.bytes for entry in self.texts)
        shared_note = f" (the rows have {row_bytes:,}, as texts share beginnings)" if row_bytes > self.bytes else ""
        total_text = f"{pluralize(len(lines), 'text')}, {self.bytes:,} bytes in all{shared_note}"
        if not lines:
            total_text = "no texts"
        if self.namespaces:
            namespaces_text = pluralize(self.namespaces, "namespace")
            total_text += f" outside of the {namespaces_text} (--namespace NAME; store stat --namespaces lists them)"
        if any(entry.is_lossy for entry in self.texts):
            total_text += f"\n{LOSSY}: {_LISTING_HINT}"
        if self.sessions:
            session_names = ", ".join(map(escape_control, self.sessions))
            total_text += (
                f"\n{pluralize(len(self.sessions), 'session')} (store rm STORE NAME removes one): {session_names}"
            )
        return "\n".join([*lines, total_text])


@dataclass(frozen=True, kw_only=True)
class MatchResult(Record):
    """Length of the stored prefix of a sequence."""

    #: Tokens that `get` would return, and tokens of the sequence.
    tokens: int
    asked: int
    #: As in `StoredPrefix`.
    dtype: str | None = None
    other_precisions: Mapping[str, int] = field(default_factory=dict, metadata={"key": "others"})
    notes: tuple[str, ...] = ()
    outage: bool = False
    is_lossy: bool = field(default=False, metadata={"omit": True})

    def __str__(self) -> str:
        return f"{self.tokens} {LOSSY}" if self.is_lossy else str(self.tokens)


@dataclass(frozen=True, kw_only=True)
class PinResult(Record):
    """Result of `pin` and `unpin`."""

    #: Tokens of the sequence.
    tokens: int
    #: Whether it is pinned now, and whether it was before.
    pinned: bool
    was_pinned: bool
    #: Precisions in which it was pinned or unpinned.
    dtypes: tuple[str, ...]
    #: Whether the store is one of transform streams, whose K and V are not exactly those that were put.
    is_lossy: bool = field(default=False, metadata={"omit": True})

    def __str__(self) -> str:
        state_text = "pinned" if self.pinned else "unpinned" if self.was_pinned else "not pinned"
        unchanged_text = " as before" if self.pinned == self.was_pinned else ""
        token_text = _pluralize(self.tokens, "token", is_lossy=self.is_lossy)
        return f"{token_text}{_format_dtypes(self.dtypes)}: {state_text}{unchanged_text}"


LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of latencies, in seconds."""

COUNTER_DESCRIPTIONS = {
    "gets": "Calls of get.",
    "hits": "Calls of get that found something.",
    "requested_tokens": "Tokens of the texts that get was asked for.",
    "hit_tokens": "Tokens that get found.",
    "hit_bytes": "Bytes of K and V that get returned.",
    "puts": "Calls of put and park.",
    "put_tokens": "Tokens that put stored and that were not stored before.",
    "put_raw_bytes": "Bytes of K and V that put stored.",
    "put_bytes": "Bytes of the files for them.",
    "evicted_bytes": "Bytes of files that put evicted or replaced.",
    "evictions": "Calls of put that evicted or replaced anything.",
    "damages": "Damaged units that get found and removed.",
    "outages": "Calls that a remote store did not answer.",
}
"""The counters; each name is that of a metric, after `kvmnn_store_` and before `_total`."""


@dataclass(frozen=True, kw_only=True)
class CallLatency(Record):
    """Latencies of one kind of call."""

    #: Calls up to each of `LATENCY_BOUNDS` and above the bound before it, then those above the last.
    counts: tuple[int, ...]
    #: Seconds of all calls.
    seconds: float

    @property
    @json_key()
    def calls(self) -> int:
        """Number of calls."""
        return sum(self.counts)

    def estimate_quantile(self, fraction: float) -> float | None:
        """Return the bound that this fraction of all calls does not exceed; None without calls, inf above the last."""
        threshold, num_calls = fraction * self.calls, 0
        for bound, count in zip((*LATENCY_BOUNDS, float("inf")), self.counts, strict=True):
            num_calls += count
            if num_calls and num_calls >= threshold:
                return bound
        return None


@dataclass(frozen=True, kw_only=True)
class StoreUsage(Record):
    """What a store did so far."""

    #: By the names of `COUNTER_DESCRIPTIONS`.
    counters: Mapping[str, int]
    get_latency: CallLatency
    put_latency: CallLatency

    @property
    @json_key()
    def hit_rate(self) -> float:
        """Tokens that were found, divided by those that were asked for."""
        return self.counters["hit_tokens"] / max(self.counters["requested_tokens"], 1)

    def __str__(self) -> str:
        counters = self.counters
        problems = [pluralize(counters[name], name[:-1]) for name in ("damages", "outages") if counters[name]]
        if not counters["gets"]:
            return "; ".join(["nothing was asked for yet", *problems])
        line = (
            f"{counters['hits']:,} of {counters['gets']:,} gets found something: {counters['hit_tokens']:,} of "
            f"{counters['requested_tokens']:,} tokens ({100 * self.hit_rate:.1f} %), {counters['hit_bytes']:,} bytes "
            "of K and V not computed again"
        )
        median, tail = (self.get_latency.estimate_quantile(fraction) for fraction in (0.5, 0.95))
        line += f"; a get took at most {median:g} s (half of them), {tail:g} s (95 %)"
        return "; ".join([line, *problems])


@dataclass(frozen=True, kw_only=True)
class NamespaceStats(Record):
    """What one namespace has in a store."""

    #: Its name; empty for the texts of none.
    name: str
    #: Its units, those of windows and state included, the sum of their tokens (one in several units counts in each),
    #: and bytes of their files.
    units: int
    tokens: int
    bytes: int

    def __str__(self) -> str:
        name_text = f"namespace {self.name}" if self.name else "no namespace"
        token_text = _format_unit_tokens(self.units, self.tokens)
        return f"{name_text}: {pluralize(self.units, 'unit')}, {token_text}, {self.bytes:,} bytes"


def sum_by_namespace(counts: Iterable[tuple[str, int, int, int]]) -> list[NamespaceStats]:
    """Sum up names with units, tokens and bytes; return one result for each name, in their order."""
    sums: dict[str, tuple[int, int, int]] = {}
    for name, units, tokens, nbytes in counts:
        total_units, total_tokens, total_bytes = sums.get(name, (0, 0, 0))
        sums[name] = total_units + units, total_tokens + tokens, total_bytes + nbytes
    return [
        NamespaceStats(name=name, units=units, tokens=tokens, bytes=nbytes)
        for name, (units, tokens, nbytes) in sorted(sums.items())
    ]


@dataclass(frozen=True, kw_only=True)
class StoreStats(Record):
    """Contents of a store, and hits of this object."""

    #: Stored sequences (`StoreEntry`), units, whole blocks, and the sum of the tokens of units, of partial blocks too:
    #: tokens that several units have, as texts part within a block, count in each, as their bytes do.
    texts: int
    units: int
    blocks: int
    tokens: int
    #: Bytes of all unit files, and of the K and V in them.
    bytes: int
    raw_bytes: int
    #: Size of the index of all namespaces; None in the figures of one, and for a remote store, which has none.
    index_bytes: int | None
    #: Fingerprints of the models.
    models: tuple[str, ...]
    #: Pinned sequences, and sessions.
    pinned: int
    sessions: int
    #: Codec of new units: ``"dense"``, ``"frames"``, ``"profile"`` or ``"transform"``.
    codec: str
    #: Requested tokens and hits of `get` of this object. They are not part of `to_dict`.
    asked_tokens: int = field(metadata={"json": False})
    found_tokens: int = field(metadata={"json": False})
    #: State units, each valid at one length.
    states: int = 0
    #: What is evicted first, ``"lru"`` or ``"benefit"``.
    policy: str = "lru"
    #: Whether processes without a limit record no uses, each of which would cost an object store a request.
    ignores_uses: bool = field(default=False, metadata={"omit": True})
    #: Key of the profile that units need, in hexadecimal; empty if they need none.
    profile: str = field(default="", metadata={"omit": True})
    #: Options of the codec of new units, such as ``kl``, ``ratio`` or ``bits``: the loss or size that was asked for.
    codec_options: Mapping[str, float] = field(default_factory=dict, metadata={"omit": True})
    #: Whether K and V are not exactly those that were put.
    is_lossy: bool = field(default=False, metadata={"omit": True})
    #: What K and V of some texts had lost before they were put; empty for nothing.
    loss: str = field(default="", metadata={"omit": True})
    #: Lossy units whose steps went by attention; None for none that are lossy, and past this machine.
    attention_units: int | None = field(default=None, metadata={"omit": True})
    #: Units that no get finds, as their bytes or a unit before them are gone, until `verify` removes them. The figures
    #: above count those of a directory, and those of a remote store that have bytes.
    lost_units: int = field(default=0, metadata={"omit": True})
    #: Whether the store is encrypted.
    is_encrypted: bool = field(default=False, metadata={"omit": True})
    #: What each namespace has; only if it was asked for.
    namespaces: tuple[NamespaceStats, ...] = field(default=(), metadata={"omit": True})
    #: What all processes did so far in these namespaces; of a remote store, this object.
    usage: StoreUsage | None = field(default=None, metadata={"omit": True})
    #: Where codecs and prefixes pay; only if it was measured.
    break_even: BreakEvenReport | None = field(default=None, metadata={"omit": True})

    @property
    @json_key()
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return compute_ratio(self.raw_bytes, self.bytes)

    def __str__(self) -> str:
        lines = [
            f"{pluralize(self.texts, 'text')}: {pluralize(self.units, 'unit')}, "
            f"{pluralize(self.blocks, 'whole block')}, "
            f"{_format_unit_tokens(self.units, self.tokens)}{_format_states(self.states)}",
            f"  {self.raw_bytes:,} -> {self.bytes:,} bytes" + (f", ratio {self.ratio:.4f}" if self.bytes else ""),
            f"  {self.pinned:,} pinned, {pluralize(self.sessions, 'session')}, codec {self.codec}, "
            f"policy {self.policy}",
        ]
        if self.lost_units:
            lost_text = pluralize(self.lost_units, "unit")
            lost_text += " without bytes, or after such a unit: no get finds them (store verify)"
            lines.append(f"  damaged: {lost_text}")
        lines += ["  uses are those by processes with a limit alone (object store)"] if self.ignores_uses else []
        lines += [] if self.index_bytes is None else [f"  index of the whole store {self.index_bytes:,} bytes"]
        options_text = ", ".join(f"{name}={value:g}" for name, value in self.codec_options.items())
        lines += [f"  codec options {options_text}"] if options_text else []
        lines += [f"  {_LOSSY_TEXT}{_STAT_HINT}"] if self.is_lossy else []
        if self.loss:
            loss_text = f"{LOSSY} before the put, some texts: {escape_control(self.loss)}"
            lines += textwrap.wrap(loss_text, 80, initial_indent="  ", subsequent_indent="    ")
        if self.attention_units is not None:
            lines.append(f"  {self.attention_units:,} of {pluralize(self.units, 'unit')} with steps by attention")
        lines += [f"  its units need the profile {self.profile[:16]}"] if self.profile else []
        lines += ["  encrypted"] if self.is_encrypted else []
        counters = {} if self.usage is None else self.usage.counters
        if any(counters.get(name) for name in ("gets", "damages", "outages")):
            lines += textwrap.wrap(str(self.usage), 80, initial_indent="  ", subsequent_indent="    ")
        lines += [f"  model {escape_control(model)}" for model in self.models]
        text = "\n".join([*lines, *(f"  {namespace}" for namespace in self.namespaces)])
        return text if self.break_even is None else f"{text}\n\n{self.break_even}"


def _pluralize(number: int, noun: str, *, is_lossy: bool) -> str:
    """Return a number of units or tokens; of rounded ones with the word that says so."""
    return pluralize(number, f"{LOSSY} {noun}" if is_lossy else noun)


def _format_unit_tokens(num_units: int, num_tokens: int) -> str:
    """Return a number of tokens, and that it is of units: two that part within a block both have its beginning."""
    return f"{num_tokens:,} tokens{' summed over units' if num_units > 1 else ''}"


def _format_states(num_states: int) -> str:
    return f", windows and state at {pluralize(num_states, 'length')}" if num_states else ""


def _format_dtypes(dtypes: Sequence[str]) -> str:
    return f" in {' and '.join(dtypes)}" if len(dtypes) > 1 else ""
