"""A store past one machine: the same units in Redis, Valkey, or any object store that fsspec opens."""

from .remote_units import RemoteBackend
from .values import BackendUnavailableError

__all__ = ["BackendUnavailableError", "RemoteBackend"]
