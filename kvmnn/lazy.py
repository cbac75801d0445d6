"""Names of a folder that are imported when they are asked for (PEP 562), so that commands start at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package: `homes` has the module of each name; a module that is its own is itself."""

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f".{homes[name]}", package)
        return module if homes[name] == name else getattr(module, name)

    return __getattr__
