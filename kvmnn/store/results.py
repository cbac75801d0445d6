"""What calls of a store return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .._util.text import compute_ratio, escape_control, format_rate, pluralize, shorten_names
from ..arrays.completeness import Completeness
from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import OpaqueState
from .namespace import Ids


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredPrefix:
    """The longest stored beginning of a text.

    Parameters
    ----------
    tokens
        Tokens that it covers; 0 for a miss.
    requested_tokens
        Tokens of the text.
    layers
        K and V of these tokens, ``[kv_head, token, head_dim]``, in new arrays; empty for a miss.
    dtype
        Their precision, ``"fp16"``, ``"bf16"`` or ``"fp32"``; None for a miss.
    others
        Other precisions in which the text is stored as well, and how many of its tokens each has.
    notes
        One line for each unit that was damaged and is a miss now, and for an engine that did not answer.
    outage
        Whether it is a miss because the engine did not answer.
    token_ids
        Of these tokens; None where they are not known.
    states
        State of layers that is not K and V, behind exactly these tokens.
    completeness
        What the prefix contains of each layer, for a model with windows or state; None for one with full attention in
        every layer.
    """

    tokens: int
    requested_tokens: int
    layers: list[LayerCache] = field(default_factory=list)
    dtype: str | None = None
    others: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    outage: bool = False
    token_ids: Ids | None = None
    states: tuple[OpaqueState, ...] = ()
    completeness: Completeness | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """A sentence for each kind of state that a model needs besides to continue; empty for a complete prefix."""
        return () if self.completeness is None else tuple(self.completeness.missing)

    @property
    def is_complete(self) -> bool:
        """Whether a model can continue from this."""
        return not self.missing


@dataclass(frozen=True, kw_only=True)
class StoreSession:
    """A session that was put away.

    Parameters
    ----------
    name
        Its name.
    token_ids
        All of its text.
    prefix
        What is still there of its K and V: the rest has to be computed again.
    """

    name: str
    token_ids: list[int]
    prefix: StoredPrefix


@dataclass(frozen=True, kw_only=True)
class PutResult:
    """What became of a text that was put.

    Parameters
    ----------
    tokens
        Of the text.
    known_tokens
        Of them stored before.
    stored_from
        Tokens before those that were stored now: fewer than `known_tokens` where a tail goes on, as blocks are whole.
    stored_tokens
        Of them stored now: fewer than `tokens` where the bound has no room for more, or an engine did not answer.
    raw_bytes
        Of K and V of the tokens from `stored_from` on, as they were given.
    stored_bytes
        Of the files that were made for them.
    state_bytes
        Of these the file with windows and state at the end of the text; 0 where there are none, or they were known.
    removed_bytes
        Of files that had to go for them, or were superfluous then.
    seconds
        Time it took.
    notes
        Why not all of the text is stored.
    outage
        Whether that is because the engine did not answer.
    """

    tokens: int
    known_tokens: int
    stored_from: int = 0
    stored_tokens: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    state_bytes: int = 0
    removed_bytes: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    outage: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self) | {"notes": list(self.notes)}

    def __str__(self) -> str:
        text = f"{pluralize(self.tokens, 'token')}: all of them were stored already"
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
        return text + (f"\n  {self.removed_bytes:,} bytes of files went" if self.removed_bytes else "")


@dataclass(frozen=True, kw_only=True)
class StoreExportResult:
    """A text that was written to a file.

    Parameters
    ----------
    output
        The file.
    tokens
        Of the text.
    bytes
        Of the file.
    dtype, others
        As those of `StoredPrefix`.
    """

    output: str
    tokens: int
    bytes: int
    dtype: str
    others: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.output}: {pluralize(self.tokens, 'token')}, {self.bytes:,} bytes, LOSSLESS (checksums compared)"


@dataclass(frozen=True, kw_only=True)
class CleanupResult:
    """What was removed.

    Parameters
    ----------
    units, bytes
        Units that the index knew, and bytes of their files.
    other_files, other_bytes
        Files that nothing referred to.
    young_files
        Of those that nothing refers to, past one machine: files that stay because a put may just have stored them.
    foreign
        Files in the store that are not kvmnn's, and stay.
    kept
        Why a text was not removed, or what of it was not, or why more is left than the bound; empty where all went.
    dtypes
        Of a text: the precisions that are meant.
    """

    units: int = 0
    bytes: int = 0
    other_files: int = 0
    other_bytes: int = 0
    young_files: int = 0
    kept: str = ""
    dtypes: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self) | {"dtypes": list(self.dtypes), "foreign": list(self.foreign)}

    def __str__(self) -> str:
        text = f"removed {pluralize(self.units, 'unit')}, {self.bytes:,} bytes{_format_dtypes(self.dtypes)}"
        if self.other_files:
            text += f", and {pluralize(self.other_files, 'file')} that nothing referred to"
            text += f", {self.other_bytes:,} bytes" if self.other_bytes else ""
        text += f": {self.kept}" if self.kept else ""
        if self.young_files:
            young_text = pluralize(self.young_files, "file")
            text += f"\n  that nothing refers to, and left as a put may be at work: {young_text} younger than an hour"
        if self.foreign:
            more_text = " ..." if len(self.foreign) > _MAX_NAMES_SHOWN else ""
            names = ", ".join(map(escape_control, self.foreign[:_MAX_NAMES_SHOWN])) + more_text
            text += f"\n  not kvmnn's, and left where they are: {pluralize(len(self.foreign), 'file')} ({names})"
        return text


_MAX_NAMES_SHOWN = 5


def explain_pinned_bytes(stored_bytes: int, max_bytes: int | None) -> str:
    """Why more is left than the bound: what is pinned, and what that goes on from."""
    return (
        f"{stored_bytes:,} bytes are left, of texts that are pinned"
        if max_bytes is not None and stored_bytes > max_bytes
        else ""
    )


def explain_kept_part(num_removed: int, num_left: int, *, is_pinned: bool) -> str:
    """Why a text of which some units were removed is there still, or its first `num_left` tokens are."""
    if not num_removed:
        return "it is pinned" if is_pinned else "other texts go on from it"
    return f"its first {pluralize(num_left, 'token')} stay, which other texts have or a pin keeps" if num_left else ""


@dataclass(frozen=True, kw_only=True)
class StoreVerifyResult:
    """What reading all units came to.

    Parameters
    ----------
    units, tokens, bytes
        Of what is as it was put: units, tokens they hold, bytes of their files.
    damaged
        One line for each unit that is not; none of its tokens is found from now on.
    states
        Windows and state of prefixes, each at its exact length, that are as they were put.
    lost
        Units that go on from damaged ones: nobody finds them without these, and they went with them.
    beside
        One line for each file of a directory, of models, pinned texts and sessions, that was not as its index knows it
        and was written again: without these files a lost index could not be made anew. Past one machine one for each
        session that is damaged, until `forget`, and one for each key of Redis that is of another type.
    anew
        One line for an index, or settings, that were lost or damaged and made anew when the store was opened.
    """

    units: int
    tokens: int
    bytes: int
    damaged: tuple[str, ...] = ()
    states: int = 0
    lost: int = 0
    beside: tuple[str, ...] = ()
    anew: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        lines = {"damaged": list(self.damaged), "beside": list(self.beside), "anew": list(self.anew)}
        return asdict(self) | lines

    def __str__(self) -> str:
        summary = (
            f"{pluralize(self.units, 'unit')}, {self.tokens:,} tokens, {self.bytes:,} "
            f"bytes{_format_states(self.states)}"
        )
        summary += ": all of it decoded and compared with its checksums"
        lines = [summary] if self.units or self.states or not self.damaged else []
        if self.damaged:
            lost_text = f", and {pluralize(self.lost, 'unit')} lost that went on from them" if self.lost else ""
            noun = "more unit" if self.units else "unit"
            lines += [f"{pluralize(len(self.damaged), noun)} damaged{lost_text}:", *self.damaged]
        if self.beside:
            lines += [f"{pluralize(len(self.beside), 'file')} beside the index damaged:", *self.beside]
        return "\n".join(lines)


MAX_LAST_IDS = 8


@dataclass(frozen=True, kw_only=True)
class StoreEntry:
    """A stored text: no longer one begins with it.

    Parameters
    ----------
    model, dtype
        What computed it, and its precision.
    tokens
        Of the text.
    bytes
        Of all units of the text, with its windows and state; texts that begin alike share units.
    pinned
        Whether it stays whatever the bound.
    unused_for
        How many uses of the store ago it was last used; None where that is not known.
    last_ids
        Its last token ids, `MAX_LAST_IDS` of them at most: texts mostly begin alike, and end otherwise.
    is_complete
        Whether a model can continue from all of it: not where windows or state are not stored for this length.
    """

    model: str
    dtype: str
    tokens: int
    bytes: int
    pinned: bool
    unused_for: int | None
    last_ids: tuple[int, ...] = ()
    is_complete: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON values."""
        return asdict(self) | {"last_ids": list(self.last_ids)}

    def __str__(self) -> str:
        return self.format_line(shorten_names([self.model])[self.model])

    def format_line(self, model: str) -> str:
        """For people, with a name of the model."""
        use_text = (
            "pinned" if self.pinned else "" if self.unused_for is None else f"{pluralize(self.unused_for, 'use')} ago"
        )
        line = f"{self.tokens:>9,} tokens  {self.bytes:>12,} bytes  {self.dtype}  {model}  {use_text}".rstrip()
        return line if self.is_complete else f"{line}  (without windows and state)"


@dataclass(frozen=True, kw_only=True)
class StoreListing:
    """The stored texts, the last used first, and the bytes of all units, each counted once."""

    texts: tuple[StoreEntry, ...]
    bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {"texts": [entry.to_dict() for entry in self.texts], "bytes": self.bytes}

    def __str__(self) -> str:
        names = shorten_names(entry.model for entry in self.texts)
        lines = [entry.format_line(names[entry.model]) for entry in self.texts]
        row_bytes = sum(entry.bytes for entry in self.texts)
        shared_note = f" (the rows have {row_bytes:,}, as texts share beginnings)" if row_bytes > self.bytes else ""
        total_text = f"{pluralize(len(lines), 'text')}, {self.bytes:,} bytes in all{shared_note}"
        return "\n".join([*lines, total_text]) if lines else "no texts"


@dataclass(frozen=True, kw_only=True)
class MatchResult:
    """How many tokens of a text are stored.

    Parameters
    ----------
    tokens, asked
        Tokens that `get` would return, of how many that the text has.
    dtype, others, notes, outage
        As those of `StoredPrefix`.
    """

    tokens: int
    asked: int
    dtype: str | None = None
    others: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    outage: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self) | {"notes": list(self.notes)}

    def __str__(self) -> str:
        return str(self.tokens)


@dataclass(frozen=True, kw_only=True)
class PinResult:
    """Whether a text of so many tokens stays whatever the bound, whether it did before, and in which precisions."""

    tokens: int
    pinned: bool
    was_pinned: bool
    dtypes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self) | {"dtypes": list(self.dtypes)}

    def __str__(self) -> str:
        state_text = "pinned" if self.pinned else "not pinned"
        unchanged_text = " as before" if self.pinned == self.was_pinned else ""
        return f"{pluralize(self.tokens, 'token')}{_format_dtypes(self.dtypes)}: {state_text}{unchanged_text}"


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What a store holds, and what this process got from it.

    Parameters
    ----------
    texts, units, blocks, tokens
        Stored texts (`StoreEntry`), units, whole blocks in them, and tokens; tails count as tokens only.
    states
        Windows and state of prefixes, each valid at its exact length.
    bytes, raw_bytes
        Of all units' files, and of the K and V in them.
    index_bytes
        Of the index.
    models
        Fingerprints.
    pinned, sessions
        Pinned prefixes, and sessions put away.
    codec
        What new units are made of, ``"dense"`` or ``"frames"``.
    asked_tokens, found_tokens
        By `get` of this object: tokens of the texts, and those that were found. They are no part of `to_dict`, as a
        command has got nothing.
    """

    texts: int
    units: int
    blocks: int
    tokens: int
    bytes: int
    raw_bytes: int
    index_bytes: int
    models: tuple[str, ...]
    pinned: int
    sessions: int
    codec: str
    asked_tokens: int
    found_tokens: int
    states: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        document = asdict(self) | {"models": list(self.models), "ratio": compute_ratio(self.raw_bytes, self.bytes)}
        return {name: value for name, value in document.items() if name not in ("asked_tokens", "found_tokens")}

    def __str__(self) -> str:
        size_ratio = compute_ratio(self.raw_bytes, self.bytes)
        lines = [
            f"{pluralize(self.texts, 'text')}: {pluralize(self.units, 'unit')}, "
            f"{pluralize(self.blocks, 'whole block')}, "
            f"{self.tokens:,} tokens{_format_states(self.states)}",
            f"  {self.raw_bytes:,} -> {self.bytes:,} bytes" + (f", ratio {size_ratio:.4f}" if self.bytes else ""),
            f"  index {self.index_bytes:,} bytes, {self.pinned:,} pinned, {pluralize(self.sessions, 'session')}, codec "
            f"{self.codec}",
        ]
        return "\n".join([*lines, *(f"  model {escape_control(model)}" for model in self.models)])


def _format_states(num_states: int) -> str:
    return f", windows and state at {pluralize(num_states, 'length')}" if num_states else ""


def _format_dtypes(dtypes: Sequence[str]) -> str:
    return f" in {' and '.join(dtypes)}" if len(dtypes) > 1 else ""
