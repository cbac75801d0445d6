"""Whether files are what they were: sizes and times of the last change.

Tasks that are finished, kept in a file, so that an interrupted run goes on where it was.

The file has one JSON object a line, ``{"kvmnn_many", "sha256", "record"}``; the hash is that of the record's bytes, so
that lines that somebody edited are found. The first record is the work: its name, its options, kvmnn's version. Then
come tasks in the order in which things happened to them: begun (where their output was not there yet, or was that of an
earlier run), finished with their line and with what input and output were (`stamps`), or failed, which are done again
(`output_stamps`: what an earlier run wrote, and is still there). Lines are handed to the system at once and brought to
the disk once a second. A last line that a crash tore is dropped.
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
from ..files.atomic import is_device, wrap_os_errors
from ..files.file_names import COMPLETENESS_FILE, SIDECAR_FILES, SIDECAR_SUFFIX
from ..files.journal import lock_exclusive
from ..files.schema import loads_strict
from .tasks import Task, TaskResult


def compute_stamp(path: str) -> str | None:
    """Sizes and times of what lies at a path: of a file, and of what belongs to it by its name (``x.json`` of ``x``,
    ``x.v`` of ``x.k``) or is read beside it (``positions.json`` of ``x.npy``); of all files below a folder. None where
    nothing can be seen there.
    """
    try:
        if os.path.isdir(path):
            return _stamp_folder(path)
        return " ".join(
            [
                _stamp_file(path),
                *(_stamp_file(related) for related in _list_related_files(path) if os.path.exists(related)),
            ]
        )
    except OSError:
        return None


def _stamp_file(path: str) -> str:
    file_stat = os.stat(path)
    return f"{file_stat.st_size}:{file_stat.st_mtime_ns}"


def _list_related_files(path: str) -> list[str]:
    partner_suffix = {".k": ".v", ".v": ".k"}.get(path[-2:])
    names = (*SIDECAR_FILES, COMPLETENESS_FILE) if path.lower().endswith(".npy") else ()
    sidecar_paths = [os.path.join(os.path.dirname(path), name) for name in names]
    return [path + SIDECAR_SUFFIX, *([path[:-2] + partner_suffix] if partner_suffix else []), *sidecar_paths]


def _stamp_folder(path: str) -> str:
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(files):
            file = os.path.join(folder, name)
            try:
                file_stamp = _stamp_file(file)
            except OSError:  # a link to nothing
                file_stamp = "-"
            digest.update(os.fsencode(os.path.relpath(file, path)) + b"\0" + file_stamp.encode() + b"\0")
    return digest.hexdigest()


_FORMAT_VERSION = 1
_HEAD = f'{{"kvmnn_many": {_FORMAT_VERSION}, "sha256": "'.encode()
_MIDDLE = b'", "record": '
_TAIL = b"}\n"
_RECORD_OFFSET = len(_HEAD) + 64 + len(_MIDDLE)
_MAX_LINE_BYTES = 256 << 20
_SYNC_INTERVAL_SECONDS = 1.0


class _JournalEntry(NamedTuple):
    """Where a line is in the file, and what input and output were."""

    offset: int
    length: int
    stamps: str


class TaskJournal:
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
    num_loaded : int
        Tasks that were in the file.
    has_torn_line : bool
        Whether a torn line was dropped at its end.
    num_changed : int
        Tasks of the file whose input or output was not what it was, and that were done again.
    """

    def __init__(self, path: str | os.PathLike[str], work: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._work = json.loads(json.dumps(work))
        self._finished: dict[str, _JournalEntry] = {}
        self._started: set[str] = set()
        self._output_stamps: dict[str, Mapping[str, str | None]] = {}
        self._repeated: set[str] = set()
        self.has_torn_line = False
        self.num_changed = 0
        self._synced_at = time.monotonic()
        if is_device(self.path):
            raise OutputError(f"{self.path}: is no regular file, and cannot be continued")
        with wrap_os_errors(self.path):
            self._file: IO[bytes] = open(self.path, "a+b")  # noqa: SIM115  # kept open: all is appended to it
        try:
            lock_exclusive(self._file, self.path, "run")
            self._load_records()
        except BaseException:
            self._file.close()
            raise
        self.num_loaded = len(self._finished)

    def is_finished(self, task: Task) -> bool:
        """Whether a task is finished, its input and output what they were; if it is, `read_result` gives it."""
        key = _make_key(task.path)
        entry = self._finished.get(key)
        if entry is None:
            return False
        if entry.stamps == _dump_stamps(task, compute_stamp(task.path)):
            return True
        self._repeated.add(key)
        self._output_stamps[key] = _parse_output_stamps(entry.stamps)
        del self._finished[key]
        return False

    def read_result(self, task: Task) -> TaskResult:
        """The task as it was finished."""
        entry = self._finished[_make_key(task.path)]
        self._file.seek(entry.offset)
        record = loads_strict(_extract_record(self._file.read(entry.length), self.path, "a line"))
        return TaskResult(task.path, None, str(record["line"]))

    def was_started(self, task: Task) -> bool:
        """Whether a run began it that did not come to its end."""
        return _make_key(task.path) in self._started

    def is_own_output(self, task: Task) -> bool:
        """Whether all that is there of its output is what an earlier run wrote, unchanged."""
        output_stamps = self._output_stamps.get(_make_key(task.path))
        if output_stamps is None or task.output is None:
            return False
        return all(
            output_stamps.get(suffix) == current_stamp
            if current_stamp is not None
            else not os.path.lexists(task.output + suffix)
            for suffix, current_stamp in _stamp_outputs(task).items()
        )

    def record_start(self, task: Task) -> None:
        """Note that a task is begun whose output is not there, or is that of an earlier run."""
        if not self.was_started(task):
            self._started.add(_make_key(task.path))
            self._append({"begun": _make_key(task.path)})

    def record_end(self, task: Task, result: TaskResult, input_stamp: str | None) -> None:
        """Note what became of a task; `input_stamp` is the stamp of its input from before."""
        key = _make_key(task.path)
        self._started.discard(key)
        if result.ok:
            self.num_changed += key in self._repeated
            self._repeated.discard(key)
            self._output_stamps.pop(key, None)
            record = {"done": key, "stamps": _dump_stamps(task, input_stamp), "line": result.line}
            offset, length = self._append(record)
            self._finished[key] = _JournalEntry(offset, length, str(record["stamps"]))
        else:
            self._append(
                {"failed": key, "made": self._output_stamps[key]} if self.is_own_output(task) else {"failed": key}
            )

    def close(self) -> None:
        """Bring it to the disk and let go of it."""
        if not self._file.closed:
            with wrap_os_errors(self.path):
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
        with wrap_os_errors(self.path):
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
            if time.monotonic() - self._synced_at >= _SYNC_INTERVAL_SECONDS:
                self._sync()
        return offset, len(line)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def _load_records(self) -> None:
        self._file.seek(0)
        offset = line_number = 0
        while line := self._file.readline(_MAX_LINE_BYTES):
            if not line.endswith(b"\n") and self._is_torn(line, line_number):
                self.has_torn_line = True
                with wrap_os_errors(self.path):
                    self._file.truncate(offset)
                break
            line_number += 1
            self._apply_record(_parse_line(line, self.path, line_number), line_number, offset, len(line))
            offset += len(line)
        if line_number == 0:
            self._append({"work": self._work})

    def _is_torn(self, line: bytes, line_number: int) -> bool:
        """Whether the rest of the file is a line that a crash cut; `SourceError` where it is something else."""
        if line.startswith(_HEAD[: len(line)]) or (line_number and not line.strip(b"\0")):
            return not self._file.readline(1)
        raise _make_foreign_file_error(self.path, line_number + 1)

    def _apply_record(self, record: Mapping[str, Any], line_number: int, offset: int, length: int) -> None:
        if line_number == 1:
            if record.get("work") != self._work:
                raise OptionError(
                    f"{self.path}: is of another run: {_describe_difference(record.get('work'), self._work)}; "
                    "name another file, or delete this one"
                )
            return
        event = next(iter(record))
        key = record[event]
        self._started.discard(key)
        self._finished.pop(key, None)
        output_stamps = record.get("made")
        self._output_stamps.pop(key, None)
        if isinstance(output_stamps, dict):
            self._output_stamps[key] = output_stamps
        if event == "done":
            self._finished[key] = _JournalEntry(offset, length, str(record.get("stamps")))
        elif event == "begun":
            self._started.add(key)


def _parse_line(line: bytes, path: Path, line_number: int) -> Mapping[str, Any]:
    try:
        record = loads_strict(_extract_record(line, path, f"line {line_number}"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, SourceError):
            raise
        raise _make_foreign_file_error(path, line_number) from None
    if not isinstance(record, dict) or not record or ("work" in record) != (line_number == 1):
        raise _make_foreign_file_error(path, line_number)
    if line_number > 1 and not (
        set(record) & {"done", "begun", "failed"} and isinstance(next(iter(record.values())), str)
    ):
        raise _make_foreign_file_error(path, line_number)
    return record


def _extract_record(line: bytes, path: Path, where: str) -> bytes:
    """The bytes of the record in a line, if they have the hash that it names."""
    if not (
        line.startswith(_HEAD) and line.endswith(_TAIL) and line[_RECORD_OFFSET - len(_MIDDLE) :].startswith(_MIDDLE)
    ):
        raise SourceError(
            f"{path}: {where} is not of a run over many files, or was edited"
            + ("" if where == "line 1" else "; delete the line and its file is done again")
        )
    text = line[_RECORD_OFFSET : -len(_TAIL)]
    if hashlib.sha256(text).hexdigest().encode() != line[len(_HEAD) : len(_HEAD) + 64]:
        raise SourceError(
            f"{path}: {where} does not have the hash that it names: it was edited or is damaged; delete the line and "
            "its file is done again"
        )
    return text


def _make_foreign_file_error(path: Path, line_number: int) -> SourceError:
    return SourceError(
        f"{path}: line {line_number} is not of a run over many files (--resume): it would be overwritten"
    )


def _describe_difference(recorded: object, current: Mapping[str, Any]) -> str:
    """The first thing in which two works differ."""
    if not isinstance(recorded, dict):
        return "it does not say of which"
    key = next(key for key in {**current, **recorded} if current.get(key) != recorded.get(key))
    if isinstance(current.get(key), dict) and isinstance(recorded.get(key), dict):
        return _describe_difference(recorded[key], current[key])
    return f"{key} was {_format_option(recorded, key)} there and is {_format_option(current, key)} here"


def _format_option(options: Mapping[str, Any], key: str) -> str:
    return json.dumps(options[key]) if key in options else "the default"


def _make_key(path: str) -> str:
    return os.path.abspath(path)


def _stamp_outputs(task: Task) -> dict[str, str | None]:
    """What output is, by its endings."""
    return (
        {} if task.output is None else {suffix: compute_stamp(task.output + suffix) for suffix in task.output_suffixes}
    )


def _dump_stamps(task: Task, input_stamp: str | None) -> str:
    """What input and output are."""
    return json.dumps([input_stamp, _stamp_outputs(task)])


def _parse_output_stamps(stamps: str) -> Mapping[str, str | None]:
    """What output was."""
    try:
        output_stamps = json.loads(stamps)[1]
    except (ValueError, LookupError, TypeError):
        return {}
    return output_stamps if isinstance(output_stamps, dict) else {}
