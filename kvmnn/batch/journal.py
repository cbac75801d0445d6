"""Journal of finished tasks, with which an interrupted run resumes.

The file is a `kvmnn.files.journal`. Its first record is the work: its name, options, and kvmnn's version. Each further
record is an event of a task: ``begun`` (its output did not exist, or was that of an earlier run), ``done`` with its
line of output and the stamps of input and output (sizes and modification times), or ``failed``, which the next run
repeats (``made``: stamps of the output that an earlier run wrote and that still exists).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .._util.named_tuple import NamedTuple
from ..errors import OptionError, OutputError
from ..files.file_names import FOLDER_FILES, SIDECAR_SUFFIX
from ..files.journal import Journal, JournalEntry, JournalFormat
from .tasks import Task, TaskResult


def compute_stamp(path: str) -> str | None:
    """Return sizes and times of last change of a file and its related files, or a hash over the files of a folder.

    Related are ``x.json`` of ``x``, ``x.v`` of ``x.k``, and sidecars such as ``positions.json`` of ``x.npy``. The
    result is None if nothing can be read.
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
    names = FOLDER_FILES if path.lower().endswith(".npy") else ()
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


_JOURNAL_FORMAT = JournalFormat(
    tag="kvmnn_many",
    version=1,
    process_name="run",
    entry_description="of a run over many files (--resume)",
    remedy="its file is done again",
    sync_interval_seconds=1.0,
)


class _FinishedTask(NamedTuple):
    """Position of a task's record in the file, and the stamps of its input and output."""

    offset: int
    length: int
    stamps: str


class TaskJournal:
    """Journal of finished tasks by path. Memory holds only their offsets in the file.

    Parameters
    ----------
    path
        The file; made if it is not there, continued if it is.
    work
        The work as JSON values; a file of other work is refused.

    Raises
    ------
    OptionError
        For a file of other work.
    SourceError
        For a file that contains something else, was edited, or cannot be read.
    OutputError
        Where another run is writing it, and from the methods when it cannot be written.

    Attributes
    ----------
    num_loaded : int
        Tasks that were in the file.
    num_changed : int
        Tasks of the file whose input or output was not what it was, and that were done again.
    """

    def __init__(self, path: str | os.PathLike[str], work: Mapping[str, Any]) -> None:
        self._work = json.loads(json.dumps(work))
        self._finished: dict[str, _FinishedTask] = {}
        self._started: set[str] = set()
        self._output_stamps: dict[str, Mapping[str, str | None]] = {}
        self._repeated: set[str] = set()
        self.num_changed = 0
        self._journal = Journal(path, _JOURNAL_FORMAT)
        try:
            self._load_records()
        except BaseException:
            self._journal.close()
            raise
        self.num_loaded = len(self._finished)

    def is_finished(self, task: Task) -> bool:
        """Return whether a task is finished and its input and output are unchanged; `read_result` then returns its
        result.
        """
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
        """Return the recorded result of a finished task."""
        entry = self._finished[_make_key(task.path)]
        record = self._journal.read_record(entry.offset, entry.length)
        return TaskResult(task.path, None, str(record["line"]))

    def was_started(self, task: Task) -> bool:
        """Return whether an earlier run started a task and did not end it."""
        return _make_key(task.path) in self._started

    def is_own_output(self, task: Task) -> bool:
        """Return whether all existing output of a task was written by an earlier run and is unchanged."""
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
        """Record the start of a task whose output does not exist, or is that of an earlier run."""
        if not self.was_started(task):
            self._started.add(_make_key(task.path))
            self._journal.append({"begun": _make_key(task.path)})

    def record_end(self, task: Task, result: TaskResult, input_stamp: str | None) -> None:
        """Record the result of a task; `input_stamp` is the stamp of its input before it ran."""
        key = _make_key(task.path)
        self._started.discard(key)
        if result.ok:
            self.num_changed += key in self._repeated
            self._repeated.discard(key)
            self._output_stamps.pop(key, None)
            record = {"done": key, "stamps": _dump_stamps(task, input_stamp), "line": result.line}
            offset, length = self._journal.append(record)
            self._finished[key] = _FinishedTask(offset, length, str(record["stamps"]))
        else:
            self._journal.append(
                {"failed": key, "made": self._output_stamps[key]} if self.is_own_output(task) else {"failed": key}
            )

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._journal.path

    @property
    def has_torn_line(self) -> bool:
        """Return whether an incomplete last line was dropped."""
        return self._journal.has_torn_line

    def close(self) -> None:
        """Flush the file to disk and close it."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is None:
            self.close()
        else:
            with suppress(OSError, OutputError):
                self.close()

    def _load_records(self) -> None:
        is_new = True
        for entry in self._journal.read_entries():
            is_new = False
            self._apply_record(entry)
        if is_new:
            self._journal.append({"work": self._work})

    def _apply_record(self, entry: JournalEntry) -> None:
        record, is_first = entry.record, entry.number == 1
        if not isinstance(record, dict) or not record or ("work" in record) != is_first:
            raise self._journal.make_foreign_error(entry.number)
        if is_first:
            if record.get("work") != self._work:
                raise OptionError(
                    f"{self.path}: is of another run: {_describe_difference(record.get('work'), self._work)}; "
                    "name another file, or delete this one"
                )
            return
        event, key = next(iter(record.items()))
        if event not in ("done", "begun", "failed") or not isinstance(key, str):
            raise self._journal.make_foreign_error(entry.number)
        self._started.discard(key)
        self._finished.pop(key, None)
        output_stamps = record.get("made")
        self._output_stamps.pop(key, None)
        if isinstance(output_stamps, dict):
            self._output_stamps[key] = output_stamps
        if event == "done":
            self._finished[key] = _FinishedTask(entry.offset, entry.length, str(record.get("stamps")))
        elif event == "begun":
            self._started.add(key)


def _describe_difference(recorded: object, current: Mapping[str, Any]) -> str:
    """Describe the first difference between two works."""
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
    """Return the stamp of each output of a task by its suffix."""
    return (
        {} if task.output is None else {suffix: compute_stamp(task.output + suffix) for suffix in task.output_suffixes}
    )


def _dump_stamps(task: Task, input_stamp: str | None) -> str:
    return json.dumps([input_stamp, _stamp_outputs(task)])


def _parse_output_stamps(stamps: str) -> Mapping[str, str | None]:
    try:
        output_stamps = json.loads(stamps)[1]
    except (ValueError, LookupError, TypeError):
        return {}
    return output_stamps if isinstance(output_stamps, dict) else {}
