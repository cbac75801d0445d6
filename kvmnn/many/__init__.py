"""The same work on many files: by processes, by any executor, by a cluster; kept, so that it can be resumed."""

from .cluster import connect_dask
from .finding import DiscoveryResult, InputPath, find_inputs
from .finished import TaskJournal
from .kinds import InputKinds
from .processes import ProcessExecutor
from .running import run_tasks
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
