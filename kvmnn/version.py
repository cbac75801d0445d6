"""The version of the installed package."""

from functools import cache


@cache
def get_version() -> str:
    """As in pyproject.toml; looked up when asked for, because importlib.metadata is a fifth of the import's time."""
    from importlib import metadata

    return metadata.version("kvmnn")
