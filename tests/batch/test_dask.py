"""`kvmnn.batch` on a local Dask cluster: killed workers, memory limits, a scheduler that disappears."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import many_works
import numpy as np
import pytest

from kvmnn import batch
from kvmnn.cli import main
from kvmnn.errors import KvmnnError

distributed = pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of distributed and tornado, when processes are killed
    pytest.mark.xdist_group("dask"),
]


WORKERS = 2


def cluster(**options: Any) -> Any:
    import dask

    dask.config.set({"distributed.scheduler.allowed-failures": 1, "distributed.admin.tick.limit": "1h"})
    return distributed.LocalCluster(
        **{"n_workers": WORKERS, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50, **options}
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster(memory_limit=0, processes=False) as found:  # of threads; `harmed` has processes
        yield found.scheduler_address


@pytest.fixture(scope="module")
def harmed() -> Iterator[Any]:
    """A function that gives a cluster whose workers may be killed; when it was closed, another one."""
    made: list[Any] = []

    def running() -> Any:
        if not made or made[-1].status != distributed.Status.running or len(made[-1].scheduler.workers) < WORKERS:
            made.append(cluster(memory_limit="400MB"))
        return made[-1]

    try:
        yield running
    finally:
        for found in made:
            found.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def calls(log: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(log.iterdir())}


def done(address: str, names: list[str], work: Any, **options: Any) -> list[batch.TaskResult]:
    with batch.connect_dask(address) as (executor, ahead):
        return list(batch.run_tasks(names, work, executor, **{"max_running": ahead, **options}))


def test_dask_results_are_in_order_and_unique(address: str, log: Path) -> None:
    names = [f"{number:03}" for number in range(60)] + ["bad"]
    found = done(address, names, many_works.Behaving(str(log)))
    assert [each.path for each in found] == names
    assert [each.error for each in found if not each.ok] == ["bad: is bad"]
    assert calls(log) == dict.fromkeys(names, 1)


@pytest.mark.slow
def test_dask_non_utf8_path_is_processed(address: str, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    Path(path).write_bytes(b"123")
    (each,) = done(address, [path], many_works.size)
    assert (each.path, each.to_dict()["document"]) == (path, {"bytes": 3})


@pytest.mark.slow
def test_dask_results_are_released_as_they_arrive(address: str, log: Path) -> None:
    """The cluster keeps no result that was delivered."""
    most = 0
    with batch.connect_dask(address) as (executor, _), distributed.Client(address, set_as_default=False) as client:
        results = batch.run_tasks([str(n) for n in range(80)], many_works.Behaving(str(log)), executor, max_running=4)
        for number, _ in enumerate(results):
            if number % 10 == 9:
                held = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
                most = max(most, held)
        until = time.monotonic() + 10
        while held and time.monotonic() < until:
            held = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
    assert held == 0
    assert 0 < most < 40


@pytest.mark.slow
def test_dask_killed_workers_lose_no_task(harmed: Any, log: Path, tmp_path: Path) -> None:
    """Both workers are killed in turn: each file has one result and one complete output."""
    names = [f"{number:02}" for number in range(40)]
    tasks = [batch.Task(name, str(tmp_path / name), (".out",)) for name in names]
    found = harmed()
    with batch.connect_dask(found.scheduler_address) as (executor, ahead):
        pids = [worker.pid for worker in found.workers.values()]
        results = batch.run_tasks(tasks, many_works.SlowWriting(str(log), 0.05), executor, max_running=ahead)
        lines = []
        for number, each in enumerate(results):
            lines.append(each)
            if number in (5, 15):
                os.kill(pids.pop(), signal.SIGKILL)
    assert [each.path for each in lines] == names
    assert [each.error for each in lines if not each.ok] == []
    assert sorted(path.name for path in tmp_path.glob("*.out")) == [f"{name}.out" for name in names]


@pytest.mark.slow
def test_dask_memory_limit_fails_one_task_only(harmed: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that needs too much memory is one failed line; each other file succeeds."""
    names = [f"{number:02}" for number in range(10)] + ["big"] + [f"{number:02}" for number in range(10, 20)]
    found = harmed()
    monkeypatch.setattr(found.scheduler, "allowed_failures", 0)
    lines: list[batch.TaskResult] = []
    work = threading.Thread(
        target=lambda: lines.extend(done(found.scheduler_address, names, many_works.Behaving(str(log)))), daemon=True
    )
    work.start()
    work.join(120)  # Dask waits for ever for workers that its nannies do not bring back
    assert not work.is_alive(), f"{len(found.scheduler.workers)} workers are left"
    assert [each.path for each in lines] == names
    assert [each.path for each in lines if not each.ok] == ["big"]
    (error,) = [each.error for each in lines if not each.ok]
    assert error is not None and error.startswith("big: the process gave this up twice: KilledWorker: ")
    assert set(calls(log)) == set(names)


@pytest.mark.slow
def test_dask_scheduler_loss_ends_the_run(harmed: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmnn.batch.executors.CONNECT_TIMEOUT_SECONDS", 2)
    found = harmed()
    with batch.connect_dask(found.scheduler_address) as (executor, ahead):
        results = batch.run_tasks(
            [str(n) for n in range(400)], many_works.Behaving(str(log), 0.1), executor, max_running=ahead
        )
        next(results)
        threading.Thread(target=found.close, daemon=True).start()
        with pytest.raises(KvmnnError, match=r"^the (executor does nothing any more: |Dask scheduler is gone)"):
            list(results)


@pytest.mark.slow
def test_dask_verbs_equal_local_processes(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Encoded, then resumed: the same lines as from local processes, except for times."""
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        path = Path("in", str(number % 2), f"{number}.npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.full((2, 3, 4), number, np.float16))
    Path("in/1/bad.npy").write_bytes(b"damaged")
    assert main(["encode", "--dask", address, "in", "-o", "a", "--resume", "kept"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert main(["encode", "--jobs", "1", "in", "-o", "b"]) == 1
    others = capsys.readouterr().out.splitlines()
    there = [line.replace(f"{tmp_path}/", "") for line in lines]  # names from the root on: workers are elsewhere
    assert [timeless(line) for line in there] == [timeless(line.replace('"b/', '"a/')) for line in others]
    assert main(["encode", "--dask", address, "in", "-o", "a", "--resume", "kept"]) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if '"ok": true' in line] == [
        line for line in lines if '"ok": true' in line
    ]
    assert main(["verify", "--dask", address, "a", "-q"]) == 0


def timeless(line: str) -> Any:
    found = json.loads(line)
    found.pop("seconds")
    found.get("document", {}).pop("seconds", None)
    return found


@pytest.mark.slow
def test_dask_unreachable_address_is_one_line_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr("kvmnn.batch.executors.CONNECT_TIMEOUT_SECONDS", 0.5)
    left: list[str] = []
    monkeypatch.setattr(distributed.Client, "close", lambda client: left.append(client.status))
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.ones(4, np.float16))
    messages = {1: "no Dask scheduler answers there: ", 2: "is no address of a Dask scheduler: "}
    for address, code in (("tcp://127.0.0.1:1", 1), ("nonsense://x", 2), ("127.0.0.1:notaport", 2)):
        assert main(["inspect", "--dask", address, "."]) == code
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith(f"kvmnn: error: {address}: {messages[code]}")
        assert said.err.count("\n") == 1
        deadline = time.monotonic() + 10
        while not left and time.monotonic() < deadline:  # threads of distributed may hold the client for a moment
            gc.collect()
            time.sleep(0.05)
        assert left and set(left) == {"closed"}, "one that is not waits for its scheduler when it is collected"
        left.clear()
