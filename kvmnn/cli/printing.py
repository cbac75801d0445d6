"""What verbs print, and how numbers are written."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import KvmnnError
from . import printing

if TYPE_CHECKING:
    from ..packed.cache_info import CacheInfo


STDIO = "-"


LOSSLESS = "LOSSLESS"


LOSSY = "LOSSY"


UNCHANGED = "UNCHANGED"


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


def ratio(raw_bytes: int, stored_bytes: int) -> float:
    """Raw over stored bytes."""
    return raw_bytes / stored_bytes if stored_bytes else 0.0


def count(number: int, what: str) -> str:
    """``1 frame``, ``2 frames``."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def megabytes_per_second(nbytes: int, seconds: float) -> str:
    """A rate for people: 10^6 bytes a second."""
    return f"{nbytes / 1e6 / max(seconds, 1e-9):.0f} MB/s"


def say(arguments: argparse.Namespace, line: str, *, data_on_stdout: bool = False) -> None:
    """The verb's result for people; silent where ``--json`` or ``-q`` says so."""
    if not arguments.quiet and not arguments.json:
        print(line, file=sys.stderr if data_on_stdout else sys.stdout)


def cache_document(info: CacheInfo | None) -> dict[str, Any] | None:
    """A packed cache for ``--json``."""
    from ..packed.cache_info import to_dict

    return None if info is None else {**to_dict(info), "live_bytes": info.live_bytes, "file_bytes": info.file_bytes}


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
        f"{printing.count(len(info.layers), 'layer')}, {describe(info.layout)}, {_span(tokens)} tokens, "
        f"capacity {_span(capacities)}"
    )


def share(live: int, whole: int) -> str:
    """Live and padded bytes, in words."""
    return f"{live:,} live bytes of {whole:,} ({100 * live / whole:.1f} %), {whole - live:,} padding and room"


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"
