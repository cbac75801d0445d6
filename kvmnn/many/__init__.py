"""The same work on many files: by processes, by any executor, by a cluster; kept, so that it can be resumed."""

from .cluster import dask
from .finding import Found, Named, find
from .finished import FinishedFile
from .kinds import Kinds
from .processes import Processes
from .running import run
from .tasks import Done, Outcome, Task, Work

__all__ = [
    "Done",
    "FinishedFile",
    "Found",
    "Kinds",
    "Named",
    "Outcome",
    "Processes",
    "Task",
    "Work",
    "dask",
    "find",
    "run",
]
