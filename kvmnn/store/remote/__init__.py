"""A store past one machine: the same units in Redis, Valkey, or any object store that fsspec opens."""

from .remote_units import RemoteUnits
from .values import OutageError

__all__ = ["OutageError", "RemoteUnits"]
