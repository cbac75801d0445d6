"""Optional packages, imported when they are first needed."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import MissingDependencyError

_EXTRAS = {"matplotlib": "plot", "torch": "peers", "transformers": "peers", "pyarrow": "data"}


def package(name: str) -> Any:
    """The module `name`.

    Parameters
    ----------
    name
        What is imported, e.g. ``"onnx"`` or ``"matplotlib.figure"``.

    Raises
    ------
    MissingDependencyError
        Where it is not installed; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        top = name.partition(".")[0]
        extra = _EXTRAS.get(top, "lm")
        raise MissingDependencyError(f"this needs the package {top}: pip install 'kvmnn[{extra}]'") from error
