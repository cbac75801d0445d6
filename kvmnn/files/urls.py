"""URLs and their file systems, opened by fsspec."""

from __future__ import annotations

from typing import Any

from .._util.packages import import_optional
from .._util.patterns import declare_pattern
from ..errors import MissingDependencyError, OptionError

URL_SCHEME_PATTERN = declare_pattern(r"([a-z][a-z0-9+.-]*)://")
NOT_FOUND_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Exceptions of file systems for a missing file."""
_CREDENTIALS_PATTERN = declare_pattern(r"(?<=://)[^/@]*@")
_SECRET_OPTION_PATTERN = declare_pattern(r"(?i)([?&;][^=&;#]*(?:pass|secret|token|key)[^=&;#]*=)[^&;#]*")


def is_url(path: str) -> bool:
    """Return whether a path begins as a URL does."""
    return URL_SCHEME_PATTERN.match(path) is not None


def redact_url(url: str) -> str:
    """Return a URL for messages, without name and password and with secret options masked."""
    return _SECRET_OPTION_PATTERN.sub(r"\1***", _CREDENTIALS_PATTERN.sub("", url)) if is_url(url) else url


def open_file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it without a trailing slash."""
    fsspec, label = import_optional("fsspec"), redact_url(url)
    options = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:  # protocols are packages of their own
        raise MissingDependencyError(f"{label}: {error}") from error
    except ValueError as error:
        raise OptionError(f"{label}: is no URL of files{'' if '@' in url or label != url else f': {error}'}") from error
    return filesystem, str(path).rstrip("/")


def first_error_line(error: BaseException) -> str:
    """Return the message of a file system's error as one line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
