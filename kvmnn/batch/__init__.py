"""One kind of work on many files, by processes, any executor or a Dask cluster, with a journal to resume from."""

from .discovery import DiscoveryResult, InputKinds, InputPath, find_inputs
from .executors import ProcessExecutor, connect_dask
from .journal import TaskJournal
from .runner import run_tasks
from .tasks import Task, TaskFunction, TaskOutcome, TaskResult

__all__ = [
    "DiscoveryResult",
    "InputKinds",
    "InputPath",
    "ProcessExecutor",
    "Task",
    "TaskFunction",
    "TaskJournal",
    "TaskOutcome",
    "TaskResult",
    "connect_dask",
    "find_inputs",
    "run_tasks",
]
