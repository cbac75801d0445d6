"""Names of a folder that are imported when they are asked for (PEP 562), so that commands start at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def make_lazy_getattr(package: str, module_by_name: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package: `module_by_name` has the module of each name; a module that is its own is
    itself.
    """

    def __getattr__(name: str) -> Any:
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f".{module_by_name[name]}", package)
        return module if module_by_name[name] == name else getattr(module, name)

    return __getattr__
