"""Pieces of a layer: where they are cut, joined and dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmnn.dtypes import FP16
from kvmnn.runtime.positions import PositionRuns
from kvmnn.runtime.schedule import ColdRange
from kvmnn.runtime.strict.layer_storage import LayerStorage, TokenSegment

BLOCK, SINK, RECENT = 8, 4, 6


class Store:
    """Rows whose due pieces are stored at once, their rows kept aside."""

    def __init__(self) -> None:
        self.rows = LayerStorage(2, 3, FP16)
        self.aside: dict[int, Any] = {}
        self.plain = np.empty((2, 2, 0, 3), np.float16)
        self.next = 0

    def append(self, count: int) -> None:
        numbers = np.arange(self.next, self.next + count) % 2000
        new = np.broadcast_to(numbers[None, None, :, None], (2, 2, count, 3)).astype(np.float16)
        self.rows.append(new[0], new[1], self.next)
        self.plain = np.concatenate([self.plain, new], axis=2)
        self.next += count

    def store(self) -> None:
        for piece in self.rows.split_cold(ColdRange(SINK, max(SINK, self.rows.tokens - RECENT)), BLOCK):
            assert piece.state == "due" and piece.count <= BLOCK
            self.aside[id(piece)] = (piece, piece.rows)
            piece.rows, piece.state = None, "stored"

    def write(self, piece: TokenSegment, out: Any) -> None:
        """As `rows_of`, into an array."""
        out[...] = self.rows_of(piece)

    def rows_of(self, piece: TokenSegment) -> Any:
        return piece.rows if piece.rows is not None else self.aside[id(piece)][1]

    def keep(self, mask: Any) -> None:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        pairs = [(int(begin), int(end - begin)) for begin, end in edges.reshape(-1, 2)]
        self.rows.replace_contents(self.rows.select(pairs, self.rows_of, block_tokens=BLOCK, hot_sink=SINK))
        self.plain = self.plain[:, :, mask.astype(bool)]

    def check(self) -> None:
        out = np.empty_like(self.plain)
        assert self.rows.tokens == out.shape[2]
        self.rows.copy_to(out, self.write)
        assert out.tobytes() == self.plain.tobytes()
        positions = self.rows.positions.to_array() % 2000
        assert positions.tolist() == self.plain[0, 0, :, 0].astype(int).tolist()


histories = st.lists(
    st.one_of(st.tuples(st.just("append"), st.integers(1, 40)), st.tuples(st.just("keep"), st.integers(0, 1 << 30))),
    min_size=1,
    max_size=12,
)


@given(histories)
@settings(deadline=None)
def test_layer_storage_any_history_keeps_rows_and_few_segments(history: list[tuple[str, int]]) -> None:
    store = Store()
    for what, number in history:
        if what == "append":
            store.append(number)
        elif store.rows.tokens:
            rng = np.random.default_rng(number)
            runs = rng.integers(1, 12, store.rows.tokens)
            mask = np.repeat(rng.random(runs.size) < rng.random(), runs)[: store.rows.tokens]
            store.keep(mask.astype(int))
        store.check()
        store.store()
        store.check()
        raw = sum(piece.count for piece in store.rows.segments if piece.state == "raw")
        assert raw + store.rows.hot_buffer.count < SINK + RECENT + BLOCK
        assert len(store.rows.segments) <= 3 + 2 * store.rows.tokens / BLOCK
    due_from = store.rows.find_next_due_end(SINK, BLOCK)
    store.append(max(0, due_from - store.rows.tokens))
    assert store.rows.split_cold(ColdRange(SINK, due_from - 1), BLOCK) == []
    assert store.rows.split_cold(ColdRange(SINK, due_from), BLOCK)


def test_layer_storage_cut_block_becomes_raw_and_merges() -> None:
    store = Store()
    store.append(SINK + 4 * BLOCK + RECENT)
    store.store()
    before = list(store.rows.segments)
    mask = np.ones(store.rows.tokens, int)
    mask[SINK + BLOCK + 2 : SINK + 3 * BLOCK - 2] = 0  # 2 tokens of the second block stay, and 2 of the third
    store.keep(mask)
    assert [(piece.count, piece.state) for piece in store.rows.segments] == [
        (4, "raw"), (8, "stored"), (4, "raw"), (8, "stored")
    ]  # fmt: skip
    assert [piece.is_alive for piece in before] == [True, True, False, False, True]
    assert store.rows.segments[1] is before[1]
    store.store()
    assert [piece.state for piece in store.rows.segments] == ["raw", "stored", "stored", "stored"]
    store.check()


def test_layer_storage_remaining_rows_do_not_keep_the_block_alive() -> None:
    store = Store()
    store.append(SINK + 3 * BLOCK + RECENT)
    store.store()
    mask = np.ones(store.rows.tokens, int)
    mask[SINK + BLOCK : SINK + BLOCK + 5] = 0
    store.keep(mask)
    assert [(piece.count, piece.state) for piece in store.rows.segments] == [
        (4, "raw"), (8, "stored"), (3, "raw"), (8, "stored")
    ]  # fmt: skip
    assert all(piece.owns_rows for piece in store.rows.segments)
    store.check()


def test_layer_storage_short_blocks_are_merged() -> None:
    store = Store()
    store.append(SINK + 4 * BLOCK + RECENT)
    store.store()
    mask = np.ones(store.rows.tokens, int)
    mask[SINK + 3 : SINK + BLOCK] = 0
    store.keep(mask)
    store.store()
    assert [piece.count for piece in store.rows.segments] == [4, 3, 8, 8, 8]
    mask = np.ones(store.rows.tokens, int)
    mask[SINK + 3 + 4 : SINK + 3 + 8] = 0
    store.keep(mask)
    store.store()
    assert [(piece.count, piece.state) for piece in store.rows.segments][1:] == [(7, "stored")] + [(8, "stored")] * 2


def test_position_runs_merge_adjacent_ranges() -> None:
    runs = PositionRuns()
    runs.append(0, 10)
    runs.append(10, 5)
    runs.append(20, 5)
    assert runs.to_array().tolist() == [*range(15), *range(20, 25)]
    assert runs.exclude_positions(3, 22) == [(0, 3), (17, 3)]
    assert runs.exclude_positions(15, 20) == [(0, 20)]
    assert runs.exclude_positions(0, 99) == []
    kept = runs.select([(0, 2), (14, 3)])
    assert kept.to_array().tolist() == [0, 1, 14, 20, 21] and kept.end == 22
    assert PositionRuns().to_array().size == 0 and PositionRuns().end == 0
