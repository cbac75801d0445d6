"""Tasks that are finished, kept in a file, so that an interrupted run goes on where it was.

The file has one JSON object a line, ``{"kvmnn_many", "sha256", "record"}``; the hash is that of the record's bytes, so
that lines that somebody edited are found. The first record is the work: its name, its options, kvmnn's version. Then
come tasks in the order in which things happened to them: begun (where their output was not there yet, or was that of an
earlier run), finished with their line and with what input and output were (`stamps`), or failed, which are done again
(`made`: what an earlier run wrote, and is still there). Lines are handed to the system at once and brought to the disk
once a second. A last line that a crash tore is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from ..errors import OptionError, OutputError, SourceError
from ..files.appending import lock_for_one
from ..files.json_document import loads
from ..files.output import failures, is_device
from .stamps import stamp
from .tasks import Done, Task

_FORMAT = 1
_HEAD = f'{{"kvmnn_many": {_FORMAT}, "sha256": "'.encode()
_MIDDLE = b'", "record": '
_TAIL = b"}\n"
_RECORD_AT = len(_HEAD) + 64 + len(_MIDDLE)
_LONGEST = 256 << 20
_SECONDS_BETWEEN = 1.0


class _Kept(NamedTuple):
    """Where a line is in the file, and what input and output were."""

    offset: int
    length: int
    stamps: str


class FinishedFile:
    """Finished tasks by their paths. In memory is where each lies in the file.

    Parameters
    ----------
    path
        The file; made if it is not there, continued if it is.
    work
        What is done, as JSON has it: a file of other work is refused.

    Raises
    ------
    OptionError
        For a file of other work.
    SourceError
        For a file that holds something else, was edited, or cannot be read.
    OutputError
        Where another run is writing it, and from the methods when it cannot be written.

    Attributes
    ----------
    found : int
        Tasks that were in the file.
    torn : bool
        Whether a torn line was dropped at its end.
    changed : int
        Tasks of the file whose input or output was not what it was, and that were done again.
    """

    def __init__(self, path: str | os.PathLike[str], work: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._work = json.loads(json.dumps(work))
        self._done: dict[str, _Kept] = {}
        self._begun: set[str] = set()
        self._made: dict[str, Mapping[str, str | None]] = {}
        self._again: set[str] = set()
        self.torn = False
        self.changed = 0
        self._synced = time.monotonic()
        if is_device(self.path):
            raise OutputError(f"{self.path}: is no regular file, and cannot be continued")
        with failures(self.path):
            self._file: IO[bytes] = open(self.path, "a+b")  # noqa: SIM115  # kept open: all is appended to it
        try:
            lock_for_one(self._file, self.path, "run")
            self._load()
        except BaseException:
            self._file.close()
            raise
        self.found = len(self._done)

    def has(self, task: Task) -> bool:
        """Whether a task is finished, its input and output what they were; if it is, `read` gives it."""
        key = _key(task.path)
        kept = self._done.get(key)
        if kept is None:
            return False
        if kept.stamps == _stamps(task, stamp(task.path)):
            return True
        self._again.add(key)
        self._made[key] = _made_of(kept.stamps)
        del self._done[key]
        return False

    def read(self, task: Task) -> Done:
        """The task as it was finished."""
        kept = self._done[_key(task.path)]
        self._file.seek(kept.offset)
        record = loads(_record(self._file.read(kept.length), self.path, "a line"))
        return Done(task.path, None, str(record["line"]))

    def was_begun(self, task: Task) -> bool:
        """Whether a run began it that did not come to its end."""
        return _key(task.path) in self._begun

    def wrote(self, task: Task) -> bool:
        """Whether all that is there of its output is what an earlier run wrote, unchanged."""
        made = self._made.get(_key(task.path))
        if made is None or task.output is None:
            return False
        return all(
            made.get(end) == found if found is not None else not os.path.lexists(task.output + end)
            for end, found in _outputs(task).items()
        )

    def begin(self, task: Task) -> None:
        """Note that a task is begun whose output is not there, or is that of an earlier run."""
        if not self.was_begun(task):
            self._begun.add(_key(task.path))
            self._append({"begun": _key(task.path)})

    def end(self, task: Task, done: Done, seen: str | None) -> None:
        """Note what became of a task; `seen` is the stamp of its input from before."""
        key = _key(task.path)
        self._begun.discard(key)
        if done.ok:
            self.changed += key in self._again
            self._again.discard(key)
            self._made.pop(key, None)
            record = {"done": key, "stamps": _stamps(task, seen), "line": done.line}
            offset, length = self._append(record)
            self._done[key] = _Kept(offset, length, str(record["stamps"]))
        else:
            self._append({"failed": key, "made": self._made[key]} if self.wrote(task) else {"failed": key})

    def close(self) -> None:
        """Bring it to the disk and let go of it."""
        if not self._file.closed:
            with failures(self.path):
                self._sync()
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is None:
            self.close()
        else:
            with suppress(OSError, OutputError):
                self.close()

    def _append(self, record: Mapping[str, Any]) -> tuple[int, int]:
        text = json.dumps(record).encode()
        line = _HEAD + hashlib.sha256(text).hexdigest().encode() + _MIDDLE + text + _TAIL
        with failures(self.path):
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
            if time.monotonic() - self._synced >= _SECONDS_BETWEEN:
                self._sync()
        return offset, len(line)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _load(self) -> None:
        self._file.seek(0)
        offset = number = 0
        while line := self._file.readline(_LONGEST):
            if not line.endswith(b"\n") and self._is_torn(line, number):
                self.torn = True
                with failures(self.path):
                    self._file.truncate(offset)
                break
            number += 1
            self._take(_parsed(line, self.path, number), number, offset, len(line))
            offset += len(line)
        if number == 0:
            self._append({"work": self._work})

    def _is_torn(self, line: bytes, number: int) -> bool:
        """Whether the rest of the file is a line that a crash cut; `SourceError` where it is something else."""
        if line.startswith(_HEAD[: len(line)]) or (number and not line.strip(b"\0")):
            return not self._file.readline(1)
        raise _not_ours(self.path, number + 1)

    def _take(self, record: Mapping[str, Any], number: int, offset: int, length: int) -> None:
        if number == 1:
            if record.get("work") != self._work:
                raise OptionError(
                    f"{self.path}: is of another run: {_difference(record.get('work'), self._work)}; "
                    "name another file, or delete this one"
                )
            return
        kind = next(iter(record))
        key = record[kind]
        self._begun.discard(key)
        self._done.pop(key, None)
        made = record.get("made")
        self._made.pop(key, None)
        if isinstance(made, dict):
            self._made[key] = made
        if kind == "done":
            self._done[key] = _Kept(offset, length, str(record.get("stamps")))
        elif kind == "begun":
            self._begun.add(key)


def _parsed(line: bytes, path: Path, number: int) -> Mapping[str, Any]:
    try:
        record = loads(_record(line, path, f"line {number}"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, SourceError):
            raise
        raise _not_ours(path, number) from None
    if not isinstance(record, dict) or not record or ("work" in record) != (number == 1):
        raise _not_ours(path, number)
    if number > 1 and not (set(record) & {"done", "begun", "failed"} and isinstance(next(iter(record.values())), str)):
        raise _not_ours(path, number)
    return record


def _record(line: bytes, path: Path, where: str) -> bytes:
    """The bytes of the record in a line, if they have the hash that it names."""
    if not (line.startswith(_HEAD) and line.endswith(_TAIL) and line[_RECORD_AT - len(_MIDDLE) :].startswith(_MIDDLE)):
        raise SourceError(
            f"{path}: {where} is not of a run over many files, or was edited"
            + ("" if where == "line 1" else "; delete the line and its file is done again")
        )
    text = line[_RECORD_AT : -len(_TAIL)]
    if hashlib.sha256(text).hexdigest().encode() != line[len(_HEAD) : len(_HEAD) + 64]:
        raise SourceError(
            f"{path}: {where} does not have the hash that it names: it was edited or is damaged; delete the line and "
            "its file is done again"
        )
    return text


def _not_ours(path: Path, number: int) -> SourceError:
    return SourceError(f"{path}: line {number} is not of a run over many files (--resume): it would be overwritten")


def _difference(then: object, now: Mapping[str, Any]) -> str:
    """The first thing in which two works differ."""
    if not isinstance(then, dict):
        return "it does not say of which"
    key = next(key for key in {**now, **then} if now.get(key) != then.get(key))
    if isinstance(now.get(key), dict) and isinstance(then.get(key), dict):
        return _difference(then[key], now[key])
    return f"{key} was {_value(then, key)} there and is {_value(now, key)} here"


def _value(options: Mapping[str, Any], key: str) -> str:
    return json.dumps(options[key]) if key in options else "the default"


def _key(path: str) -> str:
    return os.path.abspath(path)


def _outputs(task: Task) -> dict[str, str | None]:
    """What output is, by its endings."""
    return {} if task.output is None else {end: stamp(task.output + end) for end in task.endings}


def _stamps(task: Task, seen: str | None) -> str:
    """What input and output are."""
    return json.dumps([seen, _outputs(task)])


def _made_of(stamps: str) -> Mapping[str, str | None]:
    """What output was."""
    try:
        found = json.loads(stamps)[1]
    except (ValueError, LookupError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
