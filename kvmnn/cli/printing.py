"""What verbs print, and how numbers are written."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import KvmnnError
from ..text import count, span

if TYPE_CHECKING:
    from ..packed.cache_info import CacheInfo


STDIO = "-"


class UsageError(KvmnnError):
    """The command line asks for something that makes no sense; exit code 2."""


def to_stdout(arguments: argparse.Namespace) -> bool:
    """Whether data goes to standard output: said so, or nothing said and it is no terminal."""
    if arguments.output == STDIO:
        return True
    return arguments.output is None and not arguments.json and not sys.stdout.isatty()


class Stdout:
    """Standard output as a sink for bytes: writes all of them, even where PYTHONUNBUFFERED makes writes partial."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of `data`."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[sys.stdout.buffer.write(rest) or 0 :]
        return len(data)

    def flush(self) -> None:
        """Hand buffered bytes to the system."""
        sys.stdout.buffer.flush()


def is_directory(output: str) -> bool:
    """Whether an output is meant as a directory."""
    return output.endswith(("/", os.sep)) or os.path.isdir(output)


def say(arguments: argparse.Namespace, line: str, *, data_on_stdout: bool = False) -> None:
    """The verb's result for people; silent where ``--json`` or ``-q`` says so."""
    if not arguments.quiet and not arguments.json:
        print(line, file=sys.stderr if data_on_stdout else sys.stdout)


def cache_document(info: CacheInfo | None) -> dict[str, Any] | None:
    """A packed cache for ``--json``."""
    from ..packed.cache_info import to_dict

    return None if info is None else {**to_dict(info), "live_bytes": info.live_bytes, "file_bytes": info.file_bytes}


class Result(Protocol):
    """What a verb's library function returns: the same for the shell and for a notebook."""

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""

    def __str__(self) -> str: ...


def show(arguments: argparse.Namespace, verb: str, result: Result, *, data_on_stdout: bool = False) -> None:
    """Print a result: as JSON for ``--json``, as text unless ``-q``."""
    if arguments.json:
        print_json({"verb": verb, **result.to_dict()})
    elif text := str(result):
        say(arguments, text, data_on_stdout=data_on_stdout)


def print_json(document: Any) -> None:
    """The verb's result as JSON."""
    print(json.dumps(document, indent=2))


@contextmanager
def progress(arguments: argparse.Namespace, total: int, label: str) -> Iterator[Callable[[int], object] | None]:
    """A function that takes a number of bytes done, or None where no bar is wanted: no terminal, or ``-q``.

    The bar appears only when the work takes longer than a second.
    """
    if arguments.quiet or not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(
        total=total, desc=label, unit="B", unit_scale=True, delay=1, leave=False, file=sys.stderr, dynamic_ncols=True
    ) as bar:
        yield bar.update


def summary(info: CacheInfo) -> str:
    """A cache in a few words."""
    from ..packed.fitting import describe

    tokens = sorted({layer.tokens for layer in info.layers})
    capacities = sorted({layer.capacity for layer in info.layers})
    return (
        f"{count(len(info.layers), 'layer')}, {describe(info.layout)}, {span(tokens)} tokens, "
        f"capacity {span(capacities)}"
    )


def share(live: int, whole: int) -> str:
    """Live and padded bytes, in words."""
    return f"{live:,} live bytes of {whole:,} ({100 * live / whole:.1f} %), {whole - live:,} padding and room"
