"""The same work on many files: by processes, by any executor, by a cluster; kept, so that it can be resumed."""

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
