"""A K and a V buffer that grow, shrink and compact as a layer of a running engine does."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..checks import whole
from ..dtypes import Bytes, KVPair, Part
from ..errors import CacheDroppedWarning, KvmnnError, LimitError
from ..threads.pool import resolve_threads
from . import _layout
from .addressing import EXPAND_CHUNK
from .allocation import fresh, grown
from .buffers import Buffers, as_buffers, both_rows, by_part, plain_arrays, size_of
from .int8_sums import Int8Sums
from .kv_meta import KVMeta, erase_plan
from .layout import PackLayout
from .native import native_numbers, share_heads
from .reserve import INT32_MAX, Outcome, Pair, as_dialect, as_pairs, check_reserve, fork_outcome, upstream_outcome


class PackedCache:
    """One layer's packed K and V, byte for byte as the engine would hold them after the same operations.

    Parameters
    ----------
    layout
        The numbers of the layer and backend.
    dialect
        ``"fork"`` checks plans and applies pairs to all of the window; ``"upstream"`` does as MNN 3.6.1: where `remove`
        equals the tokens there are, it drops the cache and ignores the pairs (kvmnn then warns).
    on_invalid
        ``"raise"`` refuses a plan that the fork would not apply in full, and changes nothing; ``"engine"`` does what
        the dialect's engine does with it.
    expand_chunk
        Tokens of room beyond the need at each allocation; 64 in the engine.
    fresh_byte
        What memory holds that the engine allocates and does not clear. 0 for caches in files.
    threads
        Threads to share the heads among; None for one per processor.

    Examples
    --------
    >>> import numpy as np
    >>> layout = PackLayout.for_backend("x86-avx2", kv_heads=2, head_dim=8)
    >>> cache = PackedCache(layout)
    >>> cache.append(np.zeros((2, 200, 8), np.float32), np.zeros((2, 200, 8), np.float32))
    ()
    >>> cache.realloc(remove=200, reserve=[(0, 64), (128, 72)])
    ()
    >>> len(cache), cache.capacity
    (136, 264)
    """

    def __init__(
        self,
        layout: PackLayout,
        *,
        dialect: str = "fork",
        on_invalid: str = "raise",
        expand_chunk: int = EXPAND_CHUNK,
        fresh_byte: int = 0,
        threads: int | None = 1,
    ) -> None:
        if not isinstance(layout, PackLayout):
            raise TypeError(f"layout must be a PackLayout, not {type(layout).__name__}")
        if on_invalid not in ("raise", "engine"):
            raise KvmnnError(f"on_invalid is {on_invalid!r}: expected 'raise' or 'engine'")
        self._layout = layout
        self._dialect = as_dialect(dialect)
        self._on_invalid = on_invalid
        self._expand_chunk = whole(expand_chunk, "expand_chunk", 0, INT32_MAX)
        self._fresh_byte = whole(fresh_byte, "fresh_byte", 0, 255)
        self._threads = resolve_threads(threads)
        self._buffers: Buffers = (np.empty(0, np.uint8), np.empty(0, np.uint8))
        self._sums: Int8Sums | None = None
        self._capacity = self._past = 0

    @classmethod
    def from_buffers(
        cls,
        layout: PackLayout,
        key_buffer: Any,
        value_buffer: Any,
        past: int,
        *,
        capacity: int | None = None,
        copy: bool = True,
        **options: Any,
    ) -> PackedCache:
        """A cache that goes on where these buffers stand.

        Parameters
        ----------
        key_buffer, value_buffer
            What an engine wrote.
        past
            Live tokens in them.
        capacity
            Tokens they were allocated for. By default the most that gives their sizes, which can be a little more than
            the engine thinks it has: say it where growth has to happen at the engine's token.
        copy
            False to work in the buffers themselves until the cache grows; they must be writable then.
        options
            As for the constructor.

        Raises
        ------
        KvmnnError
            For sizes that do not fit. Appending to int8 buffers raises it too: the channel maxima that the engine
            quantises keys against are in no file.
        """
        cache = cls(layout, **options)
        if capacity is None:
            capacity = layout.capacity_of(size_of(key_buffer), size_of(value_buffer))
        room = layout.check_capacity(capacity)
        whole(past, "past", 0, room)
        packed = as_buffers(layout, key_buffer, value_buffer, room, writable=not copy)
        cache._buffers = (packed[0].copy(), packed[1].copy()) if copy else packed
        cache._capacity, cache._past = room, past
        return cache

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> PackLayout:
        """The numbers of the layer and backend."""
        return self._layout

    @property
    def dialect(self) -> str:
        """Whose rules it follows."""
        return self._dialect

    @property
    def past(self) -> int:
        """Live tokens."""
        return self._past

    @property
    def capacity(self) -> int:
        """Tokens there is room for; 0 before the first allocation."""
        return self._capacity

    @property
    def key_buffer(self) -> Bytes:
        """The K buffer itself; another one after growth."""
        return self._buffers[0]

    @property
    def value_buffer(self) -> Bytes:
        """The V buffer itself; another one after growth."""
        return self._buffers[1]

    @property
    def int8_sums(self) -> Int8Sums | None:
        """The engine's side arrays of an int8 cache; None for float layouts and for adopted buffers."""
        return self._sums

    def __len__(self) -> int:
        return self._past

    def __repr__(self) -> str:
        return f"<PackedCache of {self._past} tokens, room for {self._capacity}, {self._dialect}, {self._layout}>"

    def __eq__(self, other: object) -> bool:
        """Whether geometry and stored rows are equal, bit by bit; room, padding and dialect do not matter."""
        if not isinstance(other, PackedCache):
            return NotImplemented
        if (self._layout.places, self._past) != (other._layout.places, other._past):
            return False
        pairs = zip(self.to_arrays(), other.to_arrays(), strict=True)
        return all(np.array_equal(one.view(np.uint8), two.view(np.uint8)) for one, two in pairs)

    # -- reading -------------------------------------------------------------------------------------------------------

    def to_arrays(self, out: KVPair | None = None) -> KVPair:
        """All live tokens of K and V, each ``[kv_heads, past, head_dim]``, in `out` if that is given.

        int8 comes back as float32; `PackLayout.unrecoverable` says what is missing then.
        """
        if self._past == 0:
            return plain_arrays(self._layout, 0, out)
        return self.gather(0, self._past, out)

    def gather(self, start: int, count: int, out: KVPair | None = None) -> KVPair:
        """The live tokens ``[start, start + count)``, as `PackLayout.gather`."""
        if self._capacity == 0:
            raise KvmnnError(f"range of {count} tokens from {start}: the cache is empty")
        return self._layout.gather(
            *self._buffers, start, count, past=self._past, capacity=self._capacity, out=out, threads=self._threads
        )

    # -- the engine's operations ---------------------------------------------------------------------------------------

    def append(
        self, keys: Any, values: Any, *, remove: int = 0, reserve: Iterable[Pair] = (), previous: int | None = None
    ) -> tuple[str, ...]:
        """One step of the engine: make room after a plan, then add tokens.

        Parameters
        ----------
        keys, values
            ``[kv_heads, tokens, head_dim]`` words of the layout's size, or bytes in that order; float32 for int8.
        remove, reserve
            The plan, as for `realloc`.
        previous
            What the engine's shared counts say there was, where that is not `past`; upstream goes by it.

        Returns
        -------
        tuple of str
            What the engine complains about; always empty with ``on_invalid="raise"``.

        Notes
        -----
        Where everything is removed and no pair stays, the engine allocates anew for just these tokens; upstream even
        with pairs.
        """
        rows = self._rows(keys, values)
        count = rows[0].shape[1]
        pairs, before = self._checked(remove, reserve, previous)
        messages: tuple[str, ...] = ()
        if remove == before and (not pairs or self._dialect == "upstream"):
            self._start_anew(count, pairs)
        else:
            self._check_sums(count)
            messages = self._reallocate(remove, pairs, count, before, pushing=count)
        self._push(rows)
        return messages

    def step(self, meta: KVMeta, keys: Any, values: Any) -> tuple[str, ...]:
        """`append` after the plan in `meta`, with `meta.add` set; `meta.sync` is the caller's, after all layers."""
        meta.add = int(self._rows(keys, values)[0].shape[1])
        return self.append(keys, values, remove=meta.remove, reserve=meta.reserve, previous=meta.previous)

    def realloc(
        self, remove: int = 0, reserve: Iterable[Pair] = (), add: int = 0, *, previous: int | None = None
    ) -> tuple[str, ...]:
        """Drop the last `remove` tokens but for the pairs of `reserve`, with room for `add` more.

        Parameters
        ----------
        remove
            Tokens at the tail that form the window.
        reserve
            Pairs (begin, size), begin counted from the window's start, ascending.
        add
            Tokens that will be pushed next.
        previous
            As for `append`.

        Returns
        -------
        tuple of str
            What the engine complains about; always empty with ``on_invalid="raise"``.

        Raises
        ------
        KvmnnError
            For a plan that the fork would not apply in full, unless ``on_invalid="engine"``; for numbers that the
            engine cannot be given; where upstream would leave its buffers. Nothing has changed then.
        """
        pairs, before = self._checked(remove, reserve, previous)
        whole(add, "add", 0)
        if self._dialect == "upstream" and remove == before:
            self._start_anew(add, pairs)
            return ()
        return self._reallocate(remove, pairs, add, before, pushing=0)

    def push(self, keys: Any, values: Any) -> None:
        """Write tokens behind the live ones; there must be room for them (see `realloc`)."""
        rows = self._rows(keys, values)
        self._check_sums(rows[0].shape[1])
        if self._past + rows[0].shape[1] > self._capacity:
            raise KvmnnError(f"no room for {rows[0].shape[1]} tokens behind {self._past}: capacity {self._capacity}")
        self._push(rows)

    def erase(self, begin: int, end: int = 0) -> None:
        """Drop the tokens ``[begin, end)`` as the engine's ``eraseHistory`` plans it; end 0 means all from `begin`."""
        self.realloc(*erase_plan(self._past, begin, end))

    def clear(self) -> None:
        """Give everything back, as the engine does at a reset."""
        self._buffers = np.empty(0, np.uint8), np.empty(0, np.uint8)
        self._sums = None
        self._capacity = self._past = 0

    # -- how -----------------------------------------------------------------------------------------------------------

    def _rows(self, keys: Any, values: Any) -> Buffers:
        if self._layout.quantised and self._layout.dtype != "fp32":
            raise KvmnnError(f"int8 from {self._layout.dtype}: kvmnn knows the engine's arithmetic for fp32 only")
        return both_rows(keys, values, self._layout)

    def _checked(self, remove: int, reserve: Iterable[Pair], previous: int | None) -> tuple[tuple[Pair, ...], int]:
        """The pairs, and how many tokens the engine believes there are; numbers that it cannot be given are refused."""
        pairs = as_pairs(reserve)
        if (whole(remove, "remove", 0) or pairs) and self._capacity == 0:
            raise KvmnnError(f"remove is {remove} with {len(pairs)} pairs: nothing was allocated yet")
        return pairs, self._past if previous is None else whole(previous, "previous", 0)

    def _check_sums(self, count: int) -> None:
        if count and self._layout.quantised and self._sums is None and self._capacity:
            raise KvmnnError("cannot append to int8 buffers from elsewhere: their channel maxima are in no file")

    def _room_for(self, need: int) -> int:
        room = need + self._expand_chunk
        if room > INT32_MAX:
            raise LimitError(f"room for {room} tokens: the engine counts in 32 bits")
        return self._layout.check_capacity(room)

    def _start_anew(self, count: int, pairs: tuple[Pair, ...]) -> None:
        """Drop everything; allocate for `count` tokens if there are any."""
        room = self._room_for(count) if count else 0
        buffers = fresh(self._layout, room, self._fresh_byte) if room else None
        if pairs and self._past:
            warnings.warn(
                f"upstream drops all {self._past} tokens where remove equals them; {len(pairs)} reserve pairs ignored",
                CacheDroppedWarning,
                stacklevel=3,
            )
        self.clear()
        if buffers is not None:
            self._buffers, self._capacity = buffers, room
            if self._layout.quantised:
                self._sums = Int8Sums.fresh(self._layout, room, self._fresh_byte)

    def _reallocate(self, remove: int, pairs: tuple[Pair, ...], add: int, before: int, pushing: int) -> tuple[str, ...]:
        if self._on_invalid == "raise":
            check_reserve(self._past, remove, pairs, self._layout.quantised)
        outcome = self._outcome(remove, pairs, add, before)
        room = self._room_for(outcome.need) if outcome.need > self._capacity else self._capacity
        if outcome.past + pushing > room:
            raise KvmnnError(
                f"remove is {remove} with {self._past} tokens and {pushing} to come: the engine would make room for "
                f"{room} and write {pushing} behind {outcome.past}"
            )
        if room > self._capacity:
            self._grow(room)
        self._shift(outcome)
        self._past = outcome.past
        return outcome.messages

    def _outcome(self, remove: int, pairs: tuple[Pair, ...], add: int, before: int) -> Outcome:
        quantised = self._layout.quantised
        if self._dialect == "fork":
            return fork_outcome(self._past, remove, pairs, add, quantised)
        return upstream_outcome(self._past, remove, pairs, add, quantised, before, self._capacity)

    def _grow(self, room: int) -> None:
        """Larger buffers with every old row where it belongs, live or not."""
        self._buffers = grown(self._layout, self._buffers, self._capacity, room, self._fresh_byte)
        if self._sums is not None:
            self._sums = self._sums.grown(self._layout, room, self._fresh_byte)
        elif self._layout.quantised and self._capacity == 0:
            self._sums = Int8Sums.fresh(self._layout, room, self._fresh_byte)
        self._capacity = room

    def _shift(self, outcome: Outcome) -> None:
        moves = np.array([move for move in outcome.moves if move[0] != move[1]], np.uintp).reshape(-1, 3)
        if not len(moves):
            return

        buffers = by_part(self._buffers)

        def work(part: Part, first: int, last: int) -> None:
            _layout.shift(native_numbers(self._layout, part, self._capacity), buffers[part], first, last, moves)

        share_heads(work, self._layout.kv_heads, self._threads)

    def _push(self, both: Buffers) -> None:
        count = both[0].shape[1]
        if count == 0:
            return
        buffers, rows, sums = by_part(self._buffers), by_part(both), self._sums

        def work(part: Part, first: int, last: int) -> None:
            numbers = native_numbers(self._layout, part, self._capacity)
            packed, new = buffers[part], rows[part]
            if not self._layout.is_int8(part) or sums is None:
                _layout.scatter(numbers, packed, new, first, last, self._past)
            elif part == "key":
                _layout.quantise_keys(numbers, packed, sums.key_sum, sums.key_max, new, first, last, self._past)
            elif sums.value_sum is not None:
                _layout.quantise_values(numbers, packed, sums.value_sum, new, first, last, self._past)

        share_heads(work, self._layout.kv_heads, self._threads)
        self._past += count
