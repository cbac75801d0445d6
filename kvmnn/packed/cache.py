"""A K and a V buffer that grow, shrink and compact as a layer of a running engine does, int8 sums included."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._util.parallel import resolve_threads
from .._util.validation import validate_int
from ..dtypes import Bytes, Floats, KVPair, Part
from ..errors import CacheDroppedWarning, KvmnnError, LimitError
from . import _layout
from .compaction import (
    INT32_MAX,
    CompactionOutcome,
    KVMeta,
    ReservePair,
    check_reserve,
    parse_pairs,
    plan_erase,
    simulate_fork_realloc,
    simulate_upstream_realloc,
    validate_dialect,
)
from .layout import (
    BufferPair,
    PackLayout,
    get_nbytes,
    make_filled_bytes,
    make_native_params,
    make_plain_arrays,
    run_over_heads,
    split_kv,
    to_byte_buffers,
    to_row_pair,
)
from .params import EXPAND_CHUNK


def allocate_buffers(layout: PackLayout, capacity: int, fill_byte: int) -> BufferPair:
    """Allocate K and V as the engine does: zeroed only if its kernels read padding."""
    clear_keys = layout.int8_keys or layout.head_dim % layout.lP != 0
    clear_values = layout.int8_values or layout.lP > 1
    return (
        make_filled_bytes(layout.key_bytes(capacity), 0 if clear_keys else fill_byte),
        make_filled_bytes(layout.value_bytes(capacity), 0 if clear_values else fill_byte),
    )


def resize_buffers(
    layout: PackLayout, buffers: BufferPair, capacity: int, new_capacity: int, fill_byte: int
) -> BufferPair:
    """Return buffers for `new_capacity` tokens with every row of `buffers`, live or not, in its place."""
    # Rows of K, and of V in blocks, keep their offsets, and the new part of each head is zeroed. Without a flash block
    # V has the same number of columns, each of them longer; their new part is zeroed only if lP is above 1.
    heads = layout.kv_heads
    keys = np.zeros((heads, layout.key_head_bytes(new_capacity)), np.uint8)
    values = np.zeros((heads, layout.value_head_bytes(new_capacity)), np.uint8)
    if capacity == 0:
        return keys.reshape(-1), values.reshape(-1)
    old_keys, old_values = (buffer.reshape(heads, -1) for buffer in buffers)
    keys[:, : old_keys.shape[1]] = old_keys
    if layout.flash_block is not None:
        values[:, : old_values.shape[1]] = old_values
    else:
        if layout.lP == 1:
            values.fill(fill_byte)
        columns = layout.value_shape(new_capacity)[1]
        new_columns, old_columns = (part.reshape(heads, columns, -1) for part in (values, old_values))
        new_columns[:, :, : old_columns.shape[2]] = old_columns
    return keys.reshape(-1), values.reshape(-1)


@dataclass
class Int8Sums:
    """Side arrays of an int8 cache: sums and running maxima."""

    #: Sum over the dims of each dequantised key, ``[kv_heads, token slots]``, slots in groups of hP8.
    key_sum: Floats
    #: Running maximum of each channel, ``[kv_heads, head_dim]``; what keys are quantised against.
    key_max: Floats
    #: Sum over the tokens of each block of each dequantised value, ``[kv_heads, blocks, dims]``, dims in groups of hP8;
    #: None where values are not int8.
    value_sum: Floats | None

    @classmethod
    def allocate(cls, layout: PackLayout, capacity: int, fill_byte: int = 0) -> Int8Sums:
        """Allocate the arrays; memory that the engine leaves uninitialised is filled with `fill_byte`."""
        key_max = np.full((layout.kv_heads, layout.head_dim), np.finfo(np.float32).min, np.float32)
        value_sum = np.zeros(_get_value_sum_shape(layout, capacity), np.float32) if layout.int8_values else None
        return cls(_allocate_key_sum(layout, capacity, fill_byte), key_max, value_sum)

    def resize(self, layout: PackLayout, capacity: int, fill_byte: int = 0) -> Int8Sums:
        """Return the arrays for a larger capacity."""
        key_sum = _allocate_key_sum(layout, capacity, fill_byte)
        key_sum[:, : self.key_sum.shape[1]] = self.key_sum
        value_sum = self.value_sum
        if value_sum is not None:
            resized = np.zeros(_get_value_sum_shape(layout, capacity), np.float32)
            resized[:, : value_sum.shape[1]] = value_sum
            value_sum = resized
        return Int8Sums(key_sum, self.key_max, value_sum)


def _allocate_key_sum(layout: PackLayout, capacity: int, fill_byte: int) -> Floats:
    tiles, _, slots, _ = layout.key_shape(capacity)
    return np.full((layout.kv_heads, tiles * slots * 4), fill_byte, np.uint8).view(np.float32)


def _get_value_sum_shape(layout: PackLayout, capacity: int) -> tuple[int, int, int]:
    blocks, columns, _, width, _ = layout.value_shape(capacity)
    return layout.kv_heads, blocks, columns * width


class PackedCache:
    """One layer's packed K and V, byte for byte as the engine would store them after the same operations.

    Parameters
    ----------
    layout
        Parameters of the layer and backend.
    dialect
        ``"fork"`` checks plans and applies pairs to all of the window; ``"upstream"`` does as MNN 3.6.1: where `remove`
        equals the tokens there are, it drops the cache and ignores the pairs (kvmnn then warns).
    on_invalid
        ``"raise"`` refuses a plan that the MNN fork would not apply in full, and changes nothing; ``"engine"`` does
        what the dialect's engine does with it.
    expand_chunk
        Tokens of capacity beyond the need at each allocation; 64 in the engine.
    fill_byte
        Content of memory that the engine allocates and does not clear. 0 for caches in files.
    threads
        Threads to share the heads among; None for one per processor.

    Examples
    --------
    >>> import numpy as np
    >>> layout = PackLayout.from_backend("x86-avx2", kv_heads=2, head_dim=8)
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
        fill_byte: int = 0,
        threads: int | None = 1,
    ) -> None:
        if not isinstance(layout, PackLayout):
            raise TypeError(f"layout must be a PackLayout, not {type(layout).__name__}")
        if on_invalid not in ("raise", "engine"):
            raise KvmnnError(f"on_invalid is {on_invalid!r}: expected 'raise' or 'engine'")
        self._layout = layout
        self._dialect = validate_dialect(dialect)
        self._on_invalid = on_invalid
        self._expand_chunk = validate_int(expand_chunk, "expand_chunk", 0, INT32_MAX)
        self._fill_byte = validate_int(fill_byte, "fill_byte", 0, 255)
        self._threads = resolve_threads(threads)
        self._buffers: BufferPair = (np.empty(0, np.uint8), np.empty(0, np.uint8))
        self._int8_sums: Int8Sums | None = None
        self._capacity = self._past_length = 0

    @classmethod
    def from_buffers(
        cls,
        layout: PackLayout,
        key_buffer: Any,
        value_buffer: Any,
        past_length: int,
        *,
        capacity: int | None = None,
        copy: bool = True,
        **options: Any,
    ) -> PackedCache:
        """Create a cache that continues from these buffers.

        Parameters
        ----------
        key_buffer, value_buffer
            Buffers that an engine wrote.
        past_length
            Number of live tokens in them.
        capacity
            Their capacity in tokens. By default the largest that fits their sizes, which can be slightly above the
            engine's own: specify it if growth must happen at the engine's token.
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
            capacity = layout.infer_capacity(get_nbytes(key_buffer), get_nbytes(value_buffer))
        buffer_capacity = layout.check_capacity(capacity)
        validate_int(past_length, "past", 0, buffer_capacity)
        byte_buffers = to_byte_buffers(layout, key_buffer, value_buffer, buffer_capacity, writable=not copy)
        cache._buffers = (byte_buffers[0].copy(), byte_buffers[1].copy()) if copy else byte_buffers
        cache._capacity, cache._past_length = buffer_capacity, past_length
        return cache

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> PackLayout:
        """Return the parameters of the layer and backend."""
        return self._layout

    @property
    def dialect(self) -> str:
        """Return the dialect: ``"fork"`` or ``"upstream"``."""
        return self._dialect

    @property
    def past_length(self) -> int:
        """Return the number of live tokens."""
        return self._past_length

    @property
    def capacity(self) -> int:
        """Return the capacity in tokens; 0 before the first allocation."""
        return self._capacity

    @property
    def key_buffer(self) -> Bytes:
        """Return the K buffer itself; another one after growth."""
        return self._buffers[0]

    @property
    def value_buffer(self) -> Bytes:
        """Return the V buffer itself; another one after growth."""
        return self._buffers[1]

    @property
    def int8_sums(self) -> Int8Sums | None:
        """Return the engine's side arrays of an int8 cache; None for float layouts and for adopted buffers."""
        return self._int8_sums

    def __len__(self) -> int:
        return self._past_length

    def __repr__(self) -> str:
        return (
            f"<PackedCache of {self._past_length} tokens, room for {self._capacity}, {self._dialect}, {self._layout}>"
        )

    def __eq__(self, other: object) -> bool:
        """Return whether geometry and stored rows are bitwise equal; capacity, padding and dialect do not matter."""
        if not isinstance(other, PackedCache):
            return NotImplemented
        if (self._layout.placement_key, self._past_length) != (other._layout.placement_key, other._past_length):
            return False
        pairs = zip(self.to_arrays(), other.to_arrays(), strict=True)
        return all(
            np.array_equal(own_array.view(np.uint8), other_array.view(np.uint8)) for own_array, other_array in pairs
        )

    # -- reading -------------------------------------------------------------------------------------------------------

    def to_arrays(self, out: KVPair | None = None) -> KVPair:
        """Return all live tokens of K and V, each ``[kv_heads, past, head_dim]``, in `out` if that is given.

        Int8 is returned as float32; `PackLayout.unrecoverable_parts` describes what is lost.
        """
        if self._past_length == 0:
            return make_plain_arrays(self._layout, 0, out)
        return self.gather(0, self._past_length, out)

    def gather(self, start: int, count: int, out: KVPair | None = None) -> KVPair:
        """Return the live tokens ``[start, start + count)``, as `PackLayout.gather`."""
        if self._capacity == 0:
            raise KvmnnError(f"range of {count} tokens from {start}: the cache is empty")
        return self._layout.gather(
            *self._buffers,
            start,
            count,
            past_length=self._past_length,
            capacity=self._capacity,
            out=out,
            threads=self._threads,
        )

    # -- the engine's operations ---------------------------------------------------------------------------------------

    def append(
        self,
        keys: Any,
        values: Any,
        *,
        remove: int = 0,
        reserve: Iterable[ReservePair] = (),
        previous: int | None = None,
    ) -> tuple[str, ...]:
        """Run one step of the engine: compact by a plan, then add tokens.

        Where everything is removed and no pair stays, the engine allocates again for just these tokens; upstream even
        with pairs.

        Parameters
        ----------
        keys, values
            ``[kv_heads, tokens, head_dim]`` words of the layout's size, or bytes in that order; float32 for int8.
        remove, reserve
            The plan, as for `realloc`.
        previous
            Token count by the engine's shared counts, if it differs from `past_length`; upstream uses it.

        Returns
        -------
        tuple of str
            Messages that the engine prints; always empty with ``on_invalid="raise"``.
        """
        rows = self._to_rows(keys, values)
        num_new = rows[0].shape[1]
        pairs, engine_past = self._check_plan(remove, reserve, previous)
        messages: tuple[str, ...] = ()
        if remove == engine_past and (not pairs or self._dialect == "upstream"):
            self._restart(num_new, pairs)
        else:
            self._require_int8_sums(num_new)
            messages = self._reallocate(remove, pairs, num_new, engine_past, num_pushed=num_new)
        self._push(rows)
        return messages

    def step(self, meta: KVMeta, keys: Any, values: Any) -> tuple[str, ...]:
        """Call `append` with the plan in `meta`, and set `meta.add`; the caller calls `meta.sync` after all layers."""
        meta.add = int(self._to_rows(keys, values)[0].shape[1])
        return self.append(keys, values, remove=meta.remove, reserve=meta.reserve, previous=meta.previous)

    def realloc(
        self, remove: int = 0, reserve: Iterable[ReservePair] = (), add: int = 0, *, previous: int | None = None
    ) -> tuple[str, ...]:
        """Drop the last `remove` tokens but for the pairs of `reserve`, with capacity for `add` more.

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
            Messages that the engine prints; always empty with ``on_invalid="raise"``.

        Raises
        ------
        KvmnnError
            For a plan that the fork would not apply in full, unless ``on_invalid="engine"``; for numbers that the
            engine cannot be given; where upstream would leave its buffers. Nothing has changed then.
        """
        pairs, engine_past = self._check_plan(remove, reserve, previous)
        validate_int(add, "add", 0)
        if self._dialect == "upstream" and remove == engine_past:
            self._restart(add, pairs)
            return ()
        return self._reallocate(remove, pairs, add, engine_past, num_pushed=0)

    def push(self, keys: Any, values: Any) -> None:
        """Write tokens after the live ones; there must be capacity for them (see `realloc`)."""
        rows = self._to_rows(keys, values)
        self._require_int8_sums(rows[0].shape[1])
        if self._past_length + rows[0].shape[1] > self._capacity:
            raise KvmnnError(
                f"no room for {rows[0].shape[1]} tokens after {self._past_length}: capacity {self._capacity}"
            )
        self._push(rows)

    def erase(self, begin: int, end: int = 0) -> None:
        """Drop the tokens ``[begin, end)`` as the engine's ``eraseHistory`` plans it; end 0 means all from `begin`."""
        self.realloc(*plan_erase(self._past_length, begin, end))

    def clear(self) -> None:
        """Release everything, as the engine does at a reset."""
        self._buffers = np.empty(0, np.uint8), np.empty(0, np.uint8)
        self._int8_sums = None
        self._capacity = self._past_length = 0

    # -- internals -----------------------------------------------------------------------------------------------------

    def _to_rows(self, keys: Any, values: Any) -> BufferPair:
        if self._layout.is_quantized and self._layout.dtype != "fp32":
            raise KvmnnError(f"int8 from {self._layout.dtype}: kvmnn knows the engine's arithmetic for fp32 only")
        return to_row_pair(keys, values, self._layout)

    def _check_plan(
        self, remove: int, reserve: Iterable[ReservePair], previous: int | None
    ) -> tuple[tuple[ReservePair, ...], int]:
        """Return the pairs, and the tokens by the engine's counts; reject numbers that the engine cannot represent."""
        pairs = parse_pairs(reserve)
        if (validate_int(remove, "remove", 0) or pairs) and self._capacity == 0:
            raise KvmnnError(f"remove is {remove} with {len(pairs)} pairs: nothing was allocated yet")
        return pairs, self._past_length if previous is None else validate_int(previous, "previous", 0)

    def _require_int8_sums(self, num_new: int) -> None:
        if num_new and self._layout.is_quantized and self._int8_sums is None and self._capacity:
            raise KvmnnError("cannot append to int8 buffers from elsewhere: their channel maxima are in no file")

    def _compute_capacity(self, min_capacity: int) -> int:
        capacity = min_capacity + self._expand_chunk
        if capacity > INT32_MAX:
            raise LimitError(f"room for {capacity} tokens: the engine counts in 32 bits")
        return self._layout.check_capacity(capacity)

    def _restart(self, num_new: int, pairs: tuple[ReservePair, ...]) -> None:
        """Drop everything; allocate for `num_new` tokens if there are any."""
        capacity = self._compute_capacity(num_new) if num_new else 0
        buffers = allocate_buffers(self._layout, capacity, self._fill_byte) if capacity else None
        if pairs and self._past_length:
            warnings.warn(
                f"upstream drops all {self._past_length} tokens where remove equals them; {len(pairs)} reserve pairs "
                f"ignored",
                CacheDroppedWarning,
                stacklevel=3,
            )
        self.clear()
        if buffers is not None:
            self._buffers, self._capacity = buffers, capacity
            if self._layout.is_quantized:
                self._int8_sums = Int8Sums.allocate(self._layout, capacity, self._fill_byte)

    def _reallocate(
        self, remove: int, pairs: tuple[ReservePair, ...], add: int, engine_past: int, num_pushed: int
    ) -> tuple[str, ...]:
        if self._on_invalid == "raise":
            check_reserve(self._past_length, remove, pairs, self._layout.is_quantized)
        past_length, capacity, is_quantized = self._past_length, self._capacity, self._layout.is_quantized
        if self._dialect == "fork":
            outcome = simulate_fork_realloc(past_length, remove, pairs, add, is_quantized)
        else:
            outcome = simulate_upstream_realloc(past_length, remove, pairs, add, is_quantized, engine_past, capacity)
        if outcome.min_capacity > capacity:
            capacity = self._compute_capacity(outcome.min_capacity)
        if outcome.past_length + num_pushed > capacity:
            raise KvmnnError(
                f"remove is {remove} with {self._past_length} tokens and {num_pushed} to come: the engine would make "
                f"room for {capacity} and write {num_pushed} after {outcome.past_length}"
            )
        if capacity > self._capacity:
            self._grow(capacity)
        self._shift(outcome)
        self._past_length = outcome.past_length
        return outcome.messages

    def _grow(self, capacity: int) -> None:
        """Allocate larger buffers with every old row in its place, live or not."""
        self._buffers = resize_buffers(self._layout, self._buffers, self._capacity, capacity, self._fill_byte)
        if self._int8_sums is not None:
            self._int8_sums = self._int8_sums.resize(self._layout, capacity, self._fill_byte)
        elif self._layout.is_quantized and self._capacity == 0:
            self._int8_sums = Int8Sums.allocate(self._layout, capacity, self._fill_byte)
        self._capacity = capacity

    def _shift(self, outcome: CompactionOutcome) -> None:
        moves = np.array([move for move in outcome.moves if move[0] != move[1]], np.uintp).reshape(-1, 3)
        if not len(moves):
            return

        buffers = split_kv(self._buffers)

        def shift_heads(part: Part, first: int, last: int) -> None:
            _layout.shift(make_native_params(self._layout, part, self._capacity), buffers[part], first, last, moves)

        run_over_heads(shift_heads, self._layout.kv_heads, self._threads)

    def _push(self, row_pair: BufferPair) -> None:
        count = row_pair[0].shape[1]
        if count == 0:
            return
        buffers, rows, sums = split_kv(self._buffers), split_kv(row_pair), self._int8_sums

        def push_heads(part: Part, first: int, last: int) -> None:
            params = make_native_params(self._layout, part, self._capacity)
            buffer, new_rows = buffers[part], rows[part]
            if not self._layout.is_int8(part) or sums is None:
                _layout.scatter(params, buffer, new_rows, first, last, self._past_length)
            elif part == "key":
                _layout.quantize_keys(
                    params, buffer, sums.key_sum, sums.key_max, new_rows, first, last, self._past_length
                )
            elif sums.value_sum is not None:
                _layout.quantize_values(params, buffer, sums.value_sum, new_rows, first, last, self._past_length)

        run_over_heads(push_heads, self._layout.kv_heads, self._threads)
        self._past_length += count
