"""The journal of finished tasks: torn, edited, of other work, or a foreign file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from many_works import size

from kvmnn._util.packages import get_version
from kvmnn.batch import Task, TaskJournal, TaskOutcome, run_tasks
from kvmnn.batch.tasks import run_task
from kvmnn.errors import KvmnnError, OptionError, OutputError, SourceError

WORK = {"kvmnn": "0", "verb": "measure", "options": {"real": True}}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("abc"):
        Path(name).write_bytes(bytes(number))
    return [Task(name) for name in "abc"]


def fill(tasks: list[Task], path: str = "kept") -> bytes:
    with TaskJournal(path, WORK) as kept:
        for task in tasks:
            kept.record_end(
                task,
                run_task(size, task, get_version()),
                f"{os.stat(task.path).st_size}:{os.stat(task.path).st_mtime_ns}",
            )
    return Path(path).read_bytes()


def there(tasks: list[Task], path: str = "kept") -> str:
    with TaskJournal(path, WORK) as kept:
        return "".join(task.path for task in tasks if kept.is_finished(task))


def test_journal_records_are_loaded_unchanged(tasks: list[Task]) -> None:
    data = fill(tasks)
    with TaskJournal("kept", WORK) as kept:
        assert kept.num_loaded == 3
        for number, task in enumerate(tasks):
            assert kept.is_finished(task)
            assert kept.read_result(task).to_dict()["document"] == {"bytes": number}
    assert Path("kept").read_bytes() == data, "reading changes nothing"
    for line in data.splitlines():
        assert set(json.loads(line)) == {"kvmnn_many", "sha256", "record"}


def test_journal_identifies_absolute_and_relative_paths(tasks: list[Task], tmp_path: Path) -> None:
    fill(tasks)
    assert there([Task(str(tmp_path / "a")), Task("./b"), Task("x/a")], str(tmp_path / "kept")) == f"{tmp_path}/a./b"


@pytest.mark.slow
def test_journal_torn_at_every_byte_keeps_complete_lines(tasks: list[Task]) -> None:
    """Lines before the cut stay, the torn line is dropped, and lines written later are read again."""
    data = fill(tasks)
    ends = [match.end() for match in re.finditer(b"\n", data)]
    for cut in range(len(data)):
        Path("kept").write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        with TaskJournal("kept", WORK) as kept:
            assert kept.num_loaded == max(0, whole - 1)
            assert kept.has_torn_line == (cut not in (0, *ends))
        assert there(tasks) == "abc"[: max(0, whole - 1)]
    Path("kept").write_bytes(data + bytes(5000))
    assert there(tasks) == "abc", "zeros, as a power cut leaves them"
    assert fill(tasks[:1]).startswith(data)


def test_journal_changed_byte_is_refused(tasks: list[Task]) -> None:
    data = fill(tasks[:1])
    first = data.index(b"\n") + 1
    for at in range(first, len(data) - 1):
        Path("kept").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(SourceError, match=r"^kept: line [23] (is not of a run|does not have the hash)") as found:
            TaskJournal("kept", WORK)
        assert "\n" not in str(found.value)
    Path("kept").write_bytes(data)
    assert there(tasks) == "a"


def test_journal_deleted_line_is_not_finished(tasks: list[Task]) -> None:
    lines = fill(tasks).splitlines(keepends=True)
    Path("kept").write_bytes(b"".join([*lines[:2], *lines[3:]]))
    assert there(tasks) == "ac"


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b"hello", b"{}\n", b'{"kvmnn_cell": 2, "key": "x"}\n', b"\0" * 10, b"\n", b"\x93NUMPY" + bytes(90)],
)
def test_journal_foreign_file_is_not_overwritten(tasks: list[Task], content: bytes) -> None:
    Path("kept").write_bytes(content)
    with pytest.raises(SourceError, match=r"^kept: line 1 is not of a run over many files"):
        TaskJournal("kept", WORK)
    assert Path("kept").read_bytes() == content


def test_journal_of_other_work_is_refused(tasks: list[Task]) -> None:
    fill(tasks)
    for work, message in (
        ({**WORK, "verb": "encode"}, 'verb was "measure" there and is "encode" here'),
        ({**WORK, "options": {}}, "real was true there and is the default here"),
        ({**WORK, "kvmnn": "1"}, 'kvmnn was "0" there and is "1" here'),
    ):
        with pytest.raises(OptionError, match=r"^kept: is of another run: ") as found:
            TaskJournal("kept", work)
        assert message in str(found.value)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_journal_path_that_is_no_file_is_refused(tasks: list[Task], make: Callable[[str], None]) -> None:
    make("kept")
    with pytest.raises(OutputError, match=r"^kept: "):
        TaskJournal("kept", WORK)


def test_journal_second_writer_is_refused(tasks: list[Task]) -> None:
    with (
        TaskJournal("kept", WORK),
        pytest.raises(OutputError, match=r"^kept: another run is writing it$"),
    ):
        TaskJournal("kept", WORK)


def test_journal_input_changed_during_work_is_not_finished(tasks: list[Task]) -> None:
    def work(task: Task) -> TaskOutcome:
        Path(task.path).write_text("longer than before")
        return TaskOutcome()

    from concurrent.futures import ThreadPoolExecutor

    with TaskJournal("kept", WORK) as kept, ThreadPoolExecutor(1) as executor:
        assert len(list(run_tasks(tasks[:1], work, executor, journal=kept))) == 1
    assert there(tasks) == ""


def test_journal_on_device_is_refused(tasks: list[Task]) -> None:
    with pytest.raises(KvmnnError, match=r"^/dev/full: is no regular file"):
        TaskJournal("/dev/full", WORK)


def test_journal_folder_changes_with_any_file_below_it(tasks: list[Task]) -> None:
    Path("d/e").mkdir(parents=True)
    Path("d/e/x").write_text("1")
    Path("d/gone").symlink_to("nothing")
    folder = Task("d")
    from concurrent.futures import ThreadPoolExecutor

    def inspect() -> int:
        with TaskJournal("kept", WORK) as kept, ThreadPoolExecutor(1) as executor:
            list(run_tasks([folder], lambda task: {}, executor, journal=kept))
            return kept.num_changed

    assert [inspect(), inspect()] == [0, 0]
    Path("d/e/x").write_text("22")
    assert [inspect(), inspect()] == [1, 0]
    Path("d/e/y").touch()
    assert inspect() == 1


def test_journal_unrecorded_output_is_replaced_after_a_kill(tasks: list[Task]) -> None:
    """Killed after the new output exists and before the journal records it."""
    from concurrent.futures import ThreadPoolExecutor

    made: list[bool] = []

    def work(task: Task) -> TaskOutcome:
        made.append(task.replace)
        Path(str(task.output)).write_bytes(Path(task.path).read_bytes())
        return TaskOutcome()

    def go() -> None:
        with TaskJournal("kept", WORK) as kept, ThreadPoolExecutor(1) as executor:
            list(run_tasks([Task("a", "out")], work, executor, journal=kept))

    go()
    Path("a").write_text("other")
    go()
    assert Path("kept").read_bytes().count(b'{"begun"') == 2
    lines = Path("kept").read_bytes().splitlines(keepends=True)
    Path("kept").write_bytes(b"".join(lines[:-1]))
    go()
    assert made == [True, True, True]
    Path("out").write_text("of somebody else")
    Path("a").write_text("another one")
    go()
    assert made[3:] == [False]


def test_journal_output_with_dangling_link_is_not_its_own(tasks: list[Task]) -> None:
    task = Task("a", "out", ("", ".more"))
    Path("out").write_text("1")
    with TaskJournal("kept", WORK) as kept:
        kept.record_end(task, run_task(size, task, get_version()), "seen")
        assert not kept.is_finished(task) and kept.is_own_output(task)
        Path("out.more").symlink_to("nothing")
        assert not kept.is_own_output(task)
        Path("out.more").unlink()
        Path("out").unlink()
        assert kept.is_own_output(task)
