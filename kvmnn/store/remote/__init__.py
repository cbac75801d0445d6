"""A store past one machine: the same units in Redis, Valkey, or any object store that fsspec opens."""

from .key_values import BackendUnavailableError
from .maintenance import RemoteBackend

__all__ = ["BackendUnavailableError", "RemoteBackend"]
