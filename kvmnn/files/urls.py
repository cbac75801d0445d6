"""URLs, and the file systems behind them, which fsspec opens."""

from __future__ import annotations

import re
from typing import Any

from ..errors import MissingDependencyError, OptionError
from ..optional import package

SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What file systems raise where there is no such file."""
_SECRET = re.compile(r"(?<=://)[^/@]*@")
_OPTION = re.compile(r"(?i)([?&;][^=&;#]*(?:pass|secret|token|key)[^=&;#]*=)[^&;#]*")


def is_url(path: str) -> bool:
    """Whether a path begins as a URL does."""
    return SCHEME.match(path) is not None


def without_secret(url: str) -> str:
    """A URL without name and password, for messages; options that are secrets are masked."""
    return _OPTION.sub(r"\1***", _SECRET.sub("", url)) if is_url(url) else url


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it, without a slash at its end.

    Raises
    ------
    MissingDependencyError
        Without fsspec, or the package that it needs for this kind of URL.
    OptionError
        For what is no URL of a file system.
    """
    fsspec, label = package("fsspec"), without_secret(url)
    options = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
    try:
        found, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:  # protocols are packages of their own
        raise MissingDependencyError(f"{label}: {error}") from error
    except ValueError as error:
        raise OptionError(f"{label}: is no URL of files{'' if '@' in url or label != url else f': {error}'}") from error
    return found, str(path).rstrip("/")


def first_line(error: BaseException) -> str:
    """What an error of a file system says, in one line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
