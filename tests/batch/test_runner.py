"""`kvmnn.batch.run_tasks`: every task once, in order, whatever happens to the processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import pytest
from many_works import Behaving, Writing, size

from kvmnn.batch import ProcessExecutor, Task, TaskJournal, TaskOutcome, run_tasks, runner
from kvmnn.batch.executors import DaskExecutor
from kvmnn.errors import KvmnnError, OptionError


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def calls(log: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(log.iterdir())}


def two() -> ProcessExecutor:
    return ProcessExecutor(2)


class Here(Executor):
    """Runs everything at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as exc:
            future.set_exception(exc)
        return future


# -- any executor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["same process", "threads", "processes", "own executor", "factory"])
def test_run_tasks_with_any_executor(kind: str, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}").write_bytes(bytes(number))
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    spawn = get_context("spawn")
    executors: dict[str, Any] = {
        "same process": Here,
        "threads": lambda: ThreadPoolExecutor(3),
        "processes": lambda: ProcessPoolExecutor(1, mp_context=spawn),
        "own executor": lambda: ProcessExecutor(1),
    }
    if kind == "factory":
        found = list(run_tasks(paths, size, lambda: ThreadPoolExecutor(2)))
    else:
        with executors[kind]() as executor:
            found = list(run_tasks(paths, size, executor))
            assert executor.submit(int, "7").result() == 7, "it is not shut down"
    assert [done.path for done in found] == paths
    assert [done.to_dict()["document"]["bytes"] for done in found] == list(range(20))
    assert all(done.ok and done.error is None and "\n" not in done.line for done in found)


@pytest.mark.parametrize("ahead", [0, -3, 1, lambda: 0, lambda: -1])
def test_run_tasks_max_running_below_one_submits_one_task(ahead: Any, tmp_path: Path) -> None:
    """A cluster without workers accepts no task at the moment; the run continues anyway."""
    paths = []
    for number in range(4):
        (tmp_path / str(number)).write_bytes(bytes(number))
        paths.append(str(tmp_path / str(number)))
    done = run_tasks(paths, size, Here(), max_running=ahead)
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(done), daemon=True)
    reader.start()
    reader.join(20)
    assert not reader.is_alive(), "it waits for a task that nobody was given"
    assert [each.path for each in found] == paths and all(each.ok for each in found)


def test_run_tasks_without_tasks() -> None:
    assert list(run_tasks([], size, Here())) == []


def test_run_tasks_failure_is_a_line_and_others_continue(tmp_path: Path, log: Path) -> None:
    names = ["a", "bad", "c", "raise", "e", "strange", "note"]
    found = [done.to_dict() for done in run_tasks(names, Behaving(str(log)), Here())]
    assert [line["ok"] for line in found] == [True, False, True, False, True, False, True]
    assert found[1]["error"] == "bad: is bad"
    assert found[3]["error"] == "raise: unexpected ZeroDivisionError: by zero"
    assert found[5]["error"].startswith("strange: unexpected TypeError: Object of type object is not JSON")
    assert found[6]["notes"] == ["noted"]
    assert "notes" not in found[0]


def test_run_tasks_system_and_memory_errors_are_lines() -> None:
    def work(task: Task) -> TaskOutcome:
        raise {"m": MemoryError(), "o": FileNotFoundError(2, "No such file or directory", "o")}[task.path]

    errors = [done.error for done in run_tasks(["m", "o"], work, Here())]
    assert errors == ["m: out of memory", "o: No such file or directory"]


def test_run_tasks_yields_in_order_while_others_run() -> None:
    gate = threading.Event()

    def work(task: Task) -> TaskOutcome:
        if task.path == "7":
            assert gate.wait(30)
        return TaskOutcome(document=task.path)

    with ThreadPoolExecutor(4) as executor:
        results = run_tasks(map(str, range(20)), work, executor)
        first = [next(results).path for _ in range(7)]
        assert first == list("0123456")
        gate.set()
        assert [done.path for done in results] == [str(number) for number in range(7, 20)]


def test_run_tasks_pending_results_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first task runs, the number of others and the bytes of their lines are bounded."""
    gate = threading.Event()
    begun: list[str] = []

    def work(task: Task) -> TaskOutcome:
        begun.append(task.path)
        if task.path == "0":
            assert gate.wait(30)
        return TaskOutcome(document="x" * 1000)

    def begun_at_rest() -> int:
        last = -1
        while last != len(begun):
            last = len(begun)
            time.sleep(0.1)
        gate.set()
        return last

    for name, value, most in (("MAX_PENDING_TASKS", 10, 10), ("MAX_PENDING_LINE_BYTES", 20_000, 30)):
        monkeypatch.setattr(runner, name, value)
        begun.clear()
        gate.clear()
        with ThreadPoolExecutor(2) as executor:
            results = run_tasks(map(str, range(200)), work, executor)
            found: list[int] = []
            other = threading.Thread(target=lambda: found.append(begun_at_rest()))  # noqa: B023
            other.start()
            assert [done.path for done in results] == [str(number) for number in range(200)]
            other.join()
        assert 2 < found[0] <= most
        monkeypatch.undo()


def test_run_tasks_limits_tasks_in_the_executor() -> None:
    most = 0
    waiting: list[Future[Any]] = []

    class Counting(Here):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            nonlocal most
            future: Future[Any] = Future()
            waiting.append(future)
            most = max(most, sum(not each.done() for each in waiting))
            threading.Timer(0.05, lambda: future.set_result(fn(*args, **kwargs))).start()
            return future

    asked = iter([3] + [5] * 100)
    assert len(list(run_tasks(map(str, range(30)), lambda task: {}, Counting(), max_running=lambda: next(asked)))) == 30
    assert 3 < most <= 5
    most = 0
    assert len(list(run_tasks(map(str, range(9)), lambda task: {}, Counting(), max_running=2))) == 9
    assert most == 2


# -- processes that end ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "failing"),
    [
        ([f"{n}" for n in range(8)] + ["kill"] + [f"z{n}" for n in range(8)], ["kill"]),
        (["once", "b", "c", "d", "e"], []),
        (["kill1", "kill2", "c"], ["kill1", "kill2"]),
    ],
    ids=["one always killed", "one killed once", "only one survives"],
)
def test_run_tasks_killed_process_retries_once(names: list[str], failing: list[str], log: Path) -> None:
    found = list(run_tasks(names, Behaving(str(log)), two))
    assert [done.path for done in found] == names
    assert [done.path for done in found if not done.ok] == failing
    for done in found:
        if not done.ok:
            assert done.error == f"{done.path}: the process ended while it was at this, twice (out of memory?)"
    assert all(number in (1, 2) for number in calls(log).values()), "1: ended with another one before it began"
    assert active_children() == []


@pytest.mark.slow
def test_run_tasks_process_killed_while_sending_retries(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "STALL_CHECK_SECONDS", 0.3)
    names = ["a", "half", "c", "d", "e", "f"]
    assert [(done.path, done.ok) for done in run_tasks(names, Behaving(str(log)), two)] == [
        (name, True) for name in names
    ]
    assert calls(log)["half"] == 2


def test_run_tasks_broken_executor_instance_is_an_error(log: Path) -> None:
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
        pytest.raises(KvmnnError, match="the executor is broken and cannot be replaced: BrokenProcessPool"),
    ):
        list(run_tasks(["kill", "b"], Behaving(str(log)), executor))


def test_run_tasks_shut_down_executor_is_an_error() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(KvmnnError, match="the executor does nothing any more: RuntimeError: cannot schedule"):
        list(run_tasks(["a"], size, executor))


class Giving(Here):
    """Fails some tasks, like a cluster whose workers die."""

    def __init__(self, times: int, *, nothing: bool = False) -> None:
        self.times, self.nothing = times, nothing

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if (args and args[1].path == "x" and self.times) or self.nothing:
            self.times -= 1
            future: Future[Any] = Future()
            future.set_exception(RuntimeError("4 workers died"))
            return future
        return super().submit(fn, *args, **kwargs)


@pytest.mark.parametrize(("times", "ok"), [(1, True), (2, False)])
def test_run_tasks_retries_task_failed_by_executor_once(times: int, ok: bool, log: Path) -> None:
    found = list(run_tasks(["a", "x", "c"], Behaving(str(log)), Giving(times)))
    assert [done.path for done in found] == ["a", "x", "c"]
    assert [done.ok for done in found] == [True, ok, True]
    if not ok:
        assert found[1].error == "x: the process gave this up twice: RuntimeError: 4 workers died"


def test_run_tasks_executor_failing_every_task_is_an_error() -> None:
    with pytest.raises(KvmnnError, match="the executor does nothing any more: RuntimeError: 4 workers died"):
        list(run_tasks(["a", "b"], size, Giving(0, nothing=True)))


@pytest.mark.parametrize(("dying", "lost"), [(2, False), (3, True)])
def test_run_tasks_probe_lost_with_its_worker_is_resent(dying: int, lost: bool) -> None:
    class Dying(Giving):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            nonlocal dying
            if not args and dying:
                dying -= 1
                return Giving(1, nothing=True).submit(fn)
            return super().submit(fn, *args, **kwargs)

    results = run_tasks(["a", "x", "c"], size, Dying(2))
    if lost:
        with pytest.raises(KvmnnError, match="the executor does nothing any more"):
            list(results)
    else:
        assert [done.path for done in results] == ["a", "x", "c"]


def test_run_tasks_lost_cluster_without_results_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task is left to submit and no result arrives: the run probes the cluster."""

    class Client:
        status = "running"

        def get_executor(self, pure: bool) -> Here:
            return Here()

    class Gone(DaskExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            client.status = "closed"
            return Future()

    client = Client()
    monkeypatch.setattr(runner, "STALL_CHECK_SECONDS", 0.05)
    with pytest.raises(KvmnnError, match=r"^the Dask scheduler is gone \(closed\)"):
        list(run_tasks(["a"], size, Gone(client)))


def test_run_tasks_cluster_lost_during_probe_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        status = "running"

        def get_executor(self, pure: bool) -> Giving:
            return Giving(2)

    class Going(DaskExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            if args:
                return super().submit(fn, *args, **kwargs)
            client.status = "closed"
            return Future()

    client = Client()
    monkeypatch.setattr(runner, "STALL_CHECK_SECONDS", 0.05)
    with pytest.raises(KvmnnError, match=r"^the Dask scheduler is gone \(closed\)"):
        list(run_tasks(["a", "x", "c"], size, Going(client)))


@pytest.mark.slow
def test_run_tasks_closing_early_ends_processes(log: Path) -> None:
    results = run_tasks([f"slow{n}" for n in range(10)], Behaving(str(log), seconds=0.05), two)
    assert next(results).path == "slow0"
    started = time.monotonic()
    results.close()
    assert active_children() == []
    assert time.monotonic() - started < runner.STALL_CHECK_SECONDS


# -- outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_tasks_output_of_failed_attempt_is_replaced(tmp_path: Path, log: Path) -> None:
    tasks = [Task(name, str(tmp_path / name), (".out",)) for name in ("a", "once", "c")]
    assert [done.ok for done in run_tasks(tasks, Writing(str(log)), two)] == [True, True, True]
    assert (tmp_path / "once.out").read_text() == "once"


def test_run_tasks_existing_output_is_not_replaced(tmp_path: Path, log: Path) -> None:
    (tmp_path / "a.out").write_text("mine")
    tasks = [Task(name, str(tmp_path / name), (".out",)) for name in ("a", "b")]
    found = list(run_tasks(tasks, Writing(str(log)), Here()))
    assert [done.error for done in found] == [f"a: {tmp_path}/a.out: exists already", None]
    assert (tmp_path / "a.out").read_text() == "mine"


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["a", "a"], "a: is given twice"),
        ([Task("a", "o"), Task("b", "o")], "a and b would both be written to {}/o"),
        ([Task("a", "x", (".f",)), Task("b", "x.f")], "a and b would both be written to {}/x.f"),
        ([Task("a", "o"), Task("b", "o/p")], "b would be written into {}/o, which a is written to"),
        (
            [Task("a", "o/x/1"), Task("b", "o/z"), Task("c", "o/z/x/2")],
            "c would be written into {}/o/z, which b is written to",
        ),
        ([Task("a", "o", ("", "/p/q")), Task("b", "o/p/r")], "b would be written into {}/o, which a is written to"),
    ],
)
def test_run_tasks_clashing_tasks_are_refused_first(
    tasks: list[Any], message: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as found:
        next(run_tasks(tasks, Behaving(str(log)), Here()))
    assert str(found.value) == message.format(tmp_path)
    assert calls(log) == {}


# -- resumed -----------------------------------------------------------------------------------------------------------


def test_run_tasks_finished_tasks_are_skipped(tmp_path: Path, log: Path) -> None:
    names = [str(tmp_path / name) for name in ("a", "b", "bad", "d", "e")]
    for name in names:
        Path(name).write_text("1")
    work = Behaving(str(log))
    with TaskJournal(tmp_path / "kept", {}) as finished:
        results = run_tasks(names, work, Here(), max_running=1, journal=finished)
        before = [next(results) for _ in range(3)]
        results.close()
    done_before = set(calls(log))
    with TaskJournal(tmp_path / "kept", {}) as finished:
        after = list(run_tasks(names, work, Here(), journal=finished))
    assert [done.path for done in after] == names
    assert [done.line for done in after[:2]] == [done.line for done in before[:2]]
    assert calls(log) == {name: 1 + (name == "bad" and name in done_before) for name in ("a", "b", "bad", "d", "e")}


def test_run_tasks_changed_tasks_run_again(tmp_path: Path, log: Path) -> None:
    names = [str(tmp_path / name) for name in "abc"]
    tasks = [Task(name, name, (".out",)) for name in names]
    for name in names:
        Path(name).write_text("1")
    for _ in range(2):
        with TaskJournal(tmp_path / "kept", {}) as finished:
            assert all(done.ok for done in run_tasks(tasks, Writing(str(log)), Here(), journal=finished))
            assert finished.num_changed == 0
    Path(names[0]).write_text("22")  # the input
    Path(names[1] + ".out").unlink()  # the output is gone
    Path(names[2] + ".out").write_text("somebody else's")
    with TaskJournal(tmp_path / "kept", {}) as finished:
        found = list(run_tasks(tasks, Writing(str(log)), Here(), journal=finished))
        assert finished.num_changed == 2
    assert [done.ok for done in found] == [True, True, False], "an output is never replaced that may be another's"
    assert Path(names[2] + ".out").read_text() == "somebody else's"


def test_run_tasks_output_begun_by_killed_run_is_replaced(tmp_path: Path, log: Path) -> None:
    task = Task(str(tmp_path / "a"), str(tmp_path / "a"), (".out",))
    with TaskJournal(tmp_path / "kept", {}) as finished:
        finished.record_start(task)
    (tmp_path / "a.out").write_text("complete, and noted nowhere")
    with TaskJournal(tmp_path / "kept", {}) as finished:
        (done,) = run_tasks([task], Writing(str(log)), Here(), journal=finished)
    assert done.ok


def test_batch_import_loads_neither_numpy_nor_formats() -> None:
    """Many processes start quickly if the work needs neither."""
    probe = "import sys, kvmnn.batch; print(sorted({'numpy', 'kvmnn.formats', 'kvmnn.bundle'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("which", [0, 1])
def test_shutdown_ends_if_a_waiting_process_was_killed(which: int) -> None:
    """One process waits for a task with the lock that the other needs to be told to end."""
    executor = two()
    assert [each.result() for each in [executor.submit(int, str(n)) for n in range(6)]] == list(range(6))
    processes = list((executor._processes or {}).values())
    ending = threading.Thread(target=executor.shutdown, daemon=True)
    processes[which].kill()
    ending.start()
    ending.join(60)
    ended = not ending.is_alive()
    for process in processes:
        process.kill()
    assert ended
