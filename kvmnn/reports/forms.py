"""In which form results are written, by the name of the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import TypeVar

from ..errors import OptionError

_FormatName = TypeVar("_FormatName", bound=str)


def choose_format(
    path: str | os.PathLike[str], formats: Mapping[str, _FormatName], default: _FormatName
) -> _FormatName:
    """Return the form that the suffix of a name stands for.

    Parameters
    ----------
    path
        The file.
    formats
        Forms by their suffixes, in lower case.
    default
        Of a name without a suffix.

    Raises
    ------
    OptionError
        For another suffix: a file that says to be of one form is not written in another.
    """
    suffix = PurePath(path).suffix.lower()
    if not suffix:
        return default
    if suffix not in formats:
        *other_suffixes, last_suffix = formats
        raise OptionError(
            f"{os.fspath(path)}: results are not written as {suffix}: expected a name that ends in "
            f"{', '.join(other_suffixes)} or {last_suffix}"
        )
    return formats[suffix]
