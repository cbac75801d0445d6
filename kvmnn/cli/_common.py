"""What the verbs share: arguments, sources, sizes, progress, printing."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import KvmnnError

if TYPE_CHECKING:
    from ..cache_info import CacheInfo
    from ..sources import Source

STDIO = "-"
LOSSLESS = "LOSSLESS"
LOSSY = "LOSSY"
UNCHANGED = "UNCHANGED"


class UsageError(KvmnnError):
    """The command line asks for something that makes no sense; exit code 2."""


# -- arguments --------------------------------------------------------------------------------------------------------


def byte_count(text: str) -> int:
    """A size such as ``4096``, ``64M`` or ``1G`` (powers of 1024), in bytes."""
    found = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected a number of bytes, K, M or G")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[found[2].upper()]


def positive(text: str) -> int:
    """A whole number above zero."""
    if not re.fullmatch(r"\d{1,9}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def whole(text: str) -> int:
    """A whole number, zero included."""
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def add_verb(verbs: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, text: str) -> Any:
    """A sub-parser with the options that every verb has."""
    parser = verbs.add_parser(
        name,
        help=summary,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors and what --json asks for")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more")
    return parser


def add_threads(parser: Any) -> None:
    """``--threads`` and ``--no-zstd``."""
    parser.add_argument("--threads", type=positive, metavar="N", help="threads to use (default: all processors)")
    parser.add_argument("--no-zstd", action="store_true", help="behave as an engine without libzstd: RLE only")


def add_output(parser: Any, text: str) -> None:
    """``-o`` and ``-f``."""
    parser.add_argument("-o", "--output", metavar="OUT", help=text)
    parser.add_argument("-f", "--force", action="store_true", help="replace files that exist")


def add_source(parser: Any, dtype_help: str) -> None:
    """``--dtype``, ``--tensor`` and ``--skip-unsupported``."""
    add_dtype(parser, dtype_help)
    parser.add_argument("--tensor", action="append", default=[], metavar="NAME", help="take this array (repeatable)")
    parser.add_argument(
        "--skip-unsupported",
        action="store_true",
        help="leave out arrays that no frame holds (float64, int64, empty ...) instead of refusing the file",
    )


def add_dtype(parser: Any, text: str) -> None:
    """``--dtype``."""
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), help=text)


def codecs(arguments: argparse.Namespace) -> tuple[str, ...]:
    """What ``--no-zstd`` leaves."""
    return ("rle",) if arguments.no_zstd else ("rle", "zstd")


# -- sources ----------------------------------------------------------------------------------------------------------


def load(
    paths: Sequence[str],
    arguments: argparse.Namespace,
    fallbacks: Sequence[str] = (),
    *,
    frames: bool = False,
    known: CacheInfo | None = None,
) -> Source:
    """All arrays of all inputs as one source, with distinct names: a taken name gets ``~2``, ``~3`` ... appended.

    With `frames`, frames are inputs too; what packed files do not say and the arguments neither is taken from `known`.
    What describes a packed cache is kept only if it is the only input.
    """
    from dataclasses import replace

    from ..cache_info import METADATA_KEY
    from ..opening import open_any
    from ..sources import ReadOptions, Source, open_source
    from . import _packed

    if list(paths).count(STDIO) > 1:
        raise UsageError("standard input can be read only once")
    options = ReadOptions(
        dtype=arguments.dtype,
        fallbacks=tuple(fallbacks),
        tensors=tuple(arguments.tensor),
        skip_unsupported=arguments.skip_unsupported,
        packed=_packed.options(arguments, known),
    )
    whole = Source([])
    taken: set[str] = set()
    for path in paths:
        source = open_any(path, options) if frames else open_source(path, options)
        if len(paths) == 1:
            return source
        for array in source.arrays:
            name, count = array.name, 1
            while name in taken:
                count += 1
                name = f"{array.name}~{count}"
            taken.add(name)
            whole.arrays.append(replace(array, name=name))
        for key, value in source.metadata.items():
            if key != METADATA_KEY:
                whole.metadata.setdefault(key, value)
        whole.skipped.extend(source.skipped)
        whole.notes.extend(source.notes)
        whole.token_major |= source.token_major
    return whole


def report_skipped(source: Source, arguments: argparse.Namespace) -> None:
    """One line on standard error for each array that was left out, and for each thing that was inferred."""
    if not arguments.quiet:
        for line in source.notes:
            print(f"kvmnn: note: {line}", file=sys.stderr)
        for line in source.skipped:
            print(f"kvmnn: skipped: {line}", file=sys.stderr)


# -- output -----------------------------------------------------------------------------------------------------------


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
    from ..cache_info import to_dict

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


def version_text() -> str:
    """What ``kvmnn --version`` prints."""
    import platform

    import numpy as np

    from .. import __version__, _streams, zstd

    exact = "yes" if zstd.byte_exact() else "no"
    return (
        f"kvmnn {__version__}\n"
        f"Python {platform.python_version()}, numpy {np.__version__}\n"
        f"zstd {zstd.version()} ({zstd.door()}), byte-exact with MNN: {exact}\n"
        f"SIMD level: {_streams.simd_level()}"
    )
