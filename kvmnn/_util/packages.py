"""Lazy imports: names of a package (PEP 562), optional packages with an install hint, the version of kvmnn."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from ..errors import MissingDependencyError


def make_lazy_getattr(package: str, names_by_module: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module-level ``__getattr__``; `names_by_module` maps modules to their public names, split by spaces."""
    module_by_name = {name: module for module, names in names_by_module.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f".{module_by_name[name]}", package)
        value = module if module_by_name[name] == name else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__


_LM_PACKAGES = "onnxruntime onnx tokenizers"
_PACKAGES_BY_NEED = {
    **dict.fromkeys(_LM_PACKAGES.split(), _LM_PACKAGES),
    "opentelemetry": "opentelemetry-api",
    "zarr": "zarr ml_dtypes",
}
"""All packages that a verb needs if it needs one of them, so that a user installs them together."""

_FATAL_SEVERITY = 4
"""Severity from which onnxruntime prints lines. Lower ones contain unescaped names from the model, and the errors are
raised anyway."""

_TELEMETRY_VARIABLE = "ORT_DISABLE_TELEMETRY"
"""Read by onnxruntime 1.32 as it is imported. Without it onnxruntime writes a device id and a database to the user's
cache directory, opens ``$TMPDIR/.ses`` through symbolic links, and asks DNS for a server of Microsoft."""


def import_optional(name: str) -> Any:
    """Import an optional package; `MissingDependencyError` names what to install.

    onnxruntime is imported with its telemetry off, unless the environment has ``ORT_DISABLE_TELEMETRY`` already.
    """
    if name.partition(".")[0] == "onnxruntime":
        os.environ.setdefault(_TELEMETRY_VARIABLE, "1")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        package_name = name.partition(".")[0]
        raise MissingDependencyError(_format_need([package_name])) from error
    if name == "onnxruntime":
        module.set_default_logger_severity(_FATAL_SEVERITY)
    return module


def require_packages(*names: str) -> None:
    """Raise one `MissingDependencyError` for all packages of `names` that are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(_format_need(missing))


def _format_need(package_names: Sequence[str]) -> str:
    """Format what is missing, and one command that installs all of it."""
    words = " ".join(_PACKAGES_BY_NEED.get(name, name) for name in package_names)
    packages_text = f"package{'s' * (len(package_names) > 1)} {' and '.join(package_names)}"
    return f"this needs the {packages_text}: pip install {' '.join(dict.fromkeys(words.split()))}"


@cache
def get_version() -> str:
    """Return the version in pyproject.toml; read on demand, as importlib.metadata is slow to import."""
    from importlib import metadata

    return metadata.version("kvmnn")
