"""A store past one machine: the same units in Redis, Valkey, or any object store that fsspec opens."""
