"""What changes the index: units that come, units that go. Each function runs inside a writing transaction."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import KvmnnError
from .lookup import Lookup, Text, stored_blocks
from .rows import Cursor, Number, PinRow, TailRow, UnitBytes, UnitParent
from .space import Space
from .token_ids import Ids, as_text, text_key

_AT_ONCE = 64
_LEAVES = "SELECT id, bytes FROM unit WHERE children = 0 AND pins = 0 ORDER BY used, id DESC"
_LOST = 0
"""The unit of a pinned text whose end is not there: the pin holds again once the text is put."""


class ParentGoneError(KvmnnError):
    """Blocks that a new unit follows were removed meanwhile."""


@dataclass(frozen=True)
class NewUnit:
    """A unit on its way in.

    Parameters
    ----------
    parent
        Key of the block before it.
    start
        Tokens of the text before it.
    ids
        Of its tokens.
    keys
        Of its whole blocks.
    nbytes
        Of its file.
    staged
        Where the file lies, or its bytes.
    behind
        Checksums of the last blocks before it, whose rows its streams refer to; empty where they refer to none.
    """

    parent: bytes
    start: int
    ids: Ids
    keys: Sequence[bytes]
    nbytes: int
    staged: Path | bytes
    behind: tuple[int, ...] = ()


def space_id(cursor: Cursor, space: Space) -> int:
    """The number of a space, which is noted down if it is new."""
    cursor.execute("INSERT OR IGNORE INTO space (key, document) VALUES (?, ?)", (space.key, space.to_json()))
    return cursor.need_row(Number, "SELECT id FROM space WHERE key = ?", (space.key,)).value


def next_tick(cursor: Cursor) -> int:
    """The tick of this use."""
    cursor.execute("UPDATE state SET tick = tick + 1")
    return _state(cursor, "tick")


def _state(cursor: Cursor, name: str) -> int:
    return cursor.need_row(Number, f"SELECT {name} FROM state").value


def touch(cursor: Cursor, units: Iterable[int]) -> None:
    """These units are used now."""
    tick = next_tick(cursor)
    cursor.execute_many("UPDATE unit SET used = ? WHERE id = ?", [(tick, unit) for unit in units])


def insert(
    cursor: Cursor,
    space: int,
    new: NewUnit,
    text: Text,
    has_all: Callable[[], bool],
    *,
    number: int | None = None,
) -> tuple[int, list[int]]:
    """Note a unit down; blocks that another process has put meanwhile stay that one's.

    Parameters
    ----------
    space
        Number of the space.
    text
        The text that the unit is of.
    has_all
        Whether the index has all of it by now.
    number
        Of a unit whose file has its name already; None for the next.

    Returns
    -------
    The number of the unit, 0 if others have all of it by now, and the units that it makes superfluous.

    Raises
    ------
    ParentGoneError
        Where the blocks before it are not there any more.
    """
    known = stored_blocks(cursor, new.keys)
    skip = next((number for number, key in enumerate(new.keys) if key not in known), len(new.keys))
    if skip == len(new.keys) and (new.ids.size == skip * text.block_tokens or has_all()):
        return 0, []
    parent_key = new.keys[skip - 1] if skip else new.parent
    branch = as_text(new.ids[skip * text.block_tokens : (skip + 1) * text.block_tokens])
    parent = None
    if parent_key != text.space:
        row = cursor.row(Number, "SELECT unit FROM block WHERE key = ?", (parent_key,))
        if row is None:
            raise ParentGoneError("the blocks before a unit are gone")
        parent = row.value
        cursor.execute("UPDATE unit SET children = children + 1 WHERE id = ?", (parent,))
    tick = _state(cursor, "tick")
    cursor.execute(
        "INSERT INTO unit VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0)",
        (number, space, parent, skip, new.start, new.ids.size, new.nbytes, tick),
    )
    unit = cursor.last_row
    cursor.execute_many(
        "INSERT OR REPLACE INTO block VALUES (?, ?, ?)",
        [(key, unit, skip + n) for n, key in enumerate(new.keys[skip:])],
    )
    cursor.execute("INSERT INTO branch VALUES (?, ?, ?)", (unit, parent_key, branch))
    cursor.execute("UPDATE state SET bytes = bytes + ?", (new.nbytes,))
    return unit, _superfluous(cursor, parent_key, branch, text.block_tokens)


@dataclass(frozen=True)
class NewState:
    """State of a prefix on its way in: its key, tokens of the prefix, bytes of what it holds and of its file."""

    key: bytes
    tokens: int
    raw_bytes: int
    nbytes: int


def insert_state(cursor: Cursor, space: int, new: NewState, parent: int | None, *, number: int | None = None) -> int:
    """Note state down as a unit without tokens that follows the one with the end of its prefix, `parent`.

    It goes with that unit, and before it. Of its row `start` are tokens of the prefix, and `skip` the bytes it holds.

    Returns
    -------
    The number of the unit; 0 where the state is there already.
    """
    if cursor.has_row("SELECT 1 FROM branch WHERE parent = ? AND text = x''", (new.key,)):
        return 0
    if parent is not None:
        cursor.execute("UPDATE unit SET children = children + 1 WHERE id = ?", (parent,))
    cursor.execute(
        "INSERT INTO unit VALUES (?, ?, ?, ?, ?, 0, ?, ?, 0, 0)",
        (number, space, parent, new.raw_bytes, new.tokens, new.nbytes, _state(cursor, "tick")),
    )
    unit = cursor.last_row
    cursor.execute("INSERT INTO branch VALUES (?, ?, x'')", (unit, new.key))
    cursor.execute("UPDATE state SET bytes = bytes + ?", (new.nbytes,))
    return unit


def _superfluous(cursor: Cursor, parent: bytes, text: bytes, block_tokens: int) -> list[int]:
    """The tail that a longer text repeats: a chat that grows would leave one at every turn."""
    row = cursor.row(
        TailRow,
        "SELECT unit.id, branch.text, children, pins, tokens < (skip + 1) * ? FROM branch JOIN unit "
        "ON unit.id = branch.unit WHERE branch.parent = ? AND branch.text < ? ORDER BY branch.text DESC LIMIT 1",
        (block_tokens, parent, text),
    )
    if row is None:
        return []
    return [row.unit] if row.is_tail and not row.children and not row.pins and text.startswith(row.text) else []


def pin(cursor: Cursor, key: bytes, unit: int, tokens: int) -> bool:
    """Keep a unit for a text with this `text_key`, `_LOST` where its end is lost; whether it was not pinned before."""
    row = cursor.row(Number, "SELECT unit FROM pin WHERE key = ?", (key,))
    if row is None or row.value == _LOST:
        cursor.execute("INSERT OR REPLACE INTO pin VALUES (?, ?, ?)", (key, unit, tokens))
        cursor.execute("UPDATE unit SET pins = pins + 1 WHERE id = ?", (unit,))
    return row is None


def pin_text(cursor: Cursor, lookup: Lookup, text: Text) -> None:
    """Pin a text; where it is not all stored its pin waits for it."""
    pin(cursor, text_key(text.space, text.ids), lookup.last_unit(text) or _LOST, text.ids.size)


def pin_again(cursor: Cursor, lookup: Lookup, text: Text) -> None:
    """Pins whose texts were lost hold again where this text begins with theirs."""
    for key, _, tokens in cursor.all_rows(PinRow, "SELECT key, unit, tokens FROM pin WHERE unit = ?", (_LOST,)):
        ids, keys = text.ids[:tokens], text.keys[: tokens // text.block_tokens]
        if ids.size == tokens and text_key(text.space, ids) == key:
            pin_text(cursor, lookup, Text(text.space, ids, keys, text.block_tokens, text.needs_state))


def note_session(cursor: Cursor, name: str, space: Space, ids: Ids) -> None:
    """Keep the text of a session under its name."""
    row = name, space_id(cursor, space), zlib.compress(ids.tobytes(), 1)
    cursor.execute("INSERT OR REPLACE INTO session VALUES (?, ?, ?)", row)


def remove_all(cursor: Cursor, units: Iterable[int]) -> int:
    """Forget units, those that follow others first; their bytes."""
    nbytes = 0
    for unit in units:
        row = cursor.row(UnitParent, "SELECT parent, bytes FROM unit WHERE id = ?", (unit,))
        if row is not None:
            for table, column in (("unit", "id"), ("block", "unit"), ("branch", "unit")):
                cursor.execute(f"DELETE FROM {table} WHERE {column} = ?", (unit,))
            cursor.execute("UPDATE pin SET unit = ? WHERE unit = ?", (_LOST, unit))
            cursor.execute("UPDATE unit SET children = children - 1 WHERE id = ?", (row.parent,))
            nbytes += row.nbytes
    cursor.execute("UPDATE state SET bytes = bytes - ?", (nbytes,))
    return nbytes


def held_bytes(cursor: Cursor) -> int:
    """Bytes of all units."""
    return _state(cursor, "bytes")


def with_followers(cursor: Cursor, unit: int) -> list[int]:
    """A unit and all that follow it, the last ones first: without it nobody finds them."""
    found = {unit: None}
    todo = [unit]
    for each in todo:
        new = [row.value for row in cursor.rows(Number, "SELECT id FROM unit WHERE parent = ?", (each,))]
        todo += [number for number in new if number not in found]
        found.update(dict.fromkeys(new))
    return todo[::-1]


def with_all_followers(cursor: Cursor, units: Iterable[int]) -> list[int]:
    """As `with_followers` of several units, each once."""
    return list(dict.fromkeys(each for unit in units for each in with_followers(cursor, unit)))


def evict(cursor: Cursor, max_bytes: int) -> list[int]:
    """Forget what was not used for longest, ends of texts first, until no more than `max_bytes` are left; which."""
    gone: list[int] = []
    left = held_bytes(cursor)
    while left > max_bytes:
        rows = cursor.all_rows(UnitBytes, f"{_LEAVES} LIMIT ?", (_AT_ONCE,))
        if not rows:
            break
        chosen: dict[int, None] = {}
        for unit, nbytes in rows:
            if left > max_bytes:
                left -= nbytes
                chosen[unit] = None
                alone = _end_of_state(cursor, unit) if left > max_bytes else None
                if alone is not None and alone.unit not in chosen:
                    left -= alone.nbytes
                    chosen[alone.unit] = None
        remove_all(cursor, chosen)
        gone += chosen
    return gone


def _end_of_state(cursor: Cursor, unit: int) -> UnitBytes | None:
    """The unit that only windows and state, `unit`, kept: without them it is of no use."""
    return cursor.row(
        UnitBytes,
        "SELECT id, bytes FROM unit WHERE id = (SELECT parent FROM unit WHERE id = ? AND tokens = 0) "
        "AND children = 1 AND pins = 0",
        (unit,),
    )


def leaves(cursor: Cursor, max_bytes: int) -> list[int]:
    """Of the units that `evict` would forget those that no unit follows."""
    left = held_bytes(cursor)
    found = []
    for unit, nbytes in cursor.rows(UnitBytes, _LEAVES):
        if left <= max_bytes:
            break
        left -= nbytes
        found.append(unit)
    return found
