"""The ``kvmnn`` command. Each verb is a module: arguments in, one library call, one printed result."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

_VERBS = (
    "encode",
    "decode",
    "inspect",
    "verify",
    "bench",
    "convert",
    "export",
    "compress-kv",
    "unpack",
    "pack",
    "compact",
    "repack",
    "diff",
    "measure",
    "plan",
    "replay",
    "eval",
    "generate",
    "dump-kv",
)
"""In the order of the help. Each is a module in verbs/, with _ for -, that is imported when it is needed."""

OK, DATA, USAGE, MISSING, TERMINATED, INTERRUPTED = 0, 1, 2, 3, 143, 130

_EPILOG = """exit codes: 0 ok, 1 bad data or failed check, 2 usage, 3 an optional package is missing, 130 interrupted

  kvmnn encode keys.npy -o keys.frame       writes keys.frame and keys.frame.json
  kvmnn inspect keys.frame
  kvmnn verify keys.frame --against keys.npy
  kvmnn decode keys.frame -o back.npy
  kvmnn convert compressor.pth compressor.bin && kvmnn verify compressor.bin --against compressor.pth"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and never lets an exception or ``SystemExit`` through."""
    try:
        arguments = _parse(sys.argv[1:] if argv is None else list(argv))
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else USAGE
    except BrokenPipeError:  # --version and --help print while they are parsed
        _forget_stdout()
        return DATA
    if arguments is None:
        return OK
    with _Terminable():
        return _guarded(arguments)


def _parse(argv: list[str]) -> argparse.Namespace | None:
    parser = _Parser(
        prog="kvmnn",
        description="Encode, decode, inspect and verify KV caches in MNN's lossless frame format.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions and exit")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=_Parser)
    for verb in argv[:1] if argv and argv[0] in _VERBS else _VERBS:
        import_module(".verbs." + verb.replace("-", "_"), __package__).add_parser(verbs)
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return None
    return arguments


def _guarded(arguments: argparse.Namespace) -> int:
    """Every way a verb can fail, as one line and an exit code."""
    from ..errors import KvmnnError, MissingDependencyError, OptionError

    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except OptionError as exc:
        return _fail(str(exc), USAGE)
    except MissingDependencyError as exc:
        return _fail(str(exc), MISSING)
    except KvmnnError as exc:
        return _fail(str(exc), DATA)
    except MemoryError:
        return _fail("out of memory", DATA)
    except BrokenPipeError:
        _forget_stdout()
        return _fail("standard output was closed by its reader", DATA)
    except OSError as exc:
        _forget_stdout()
        name = f"{exc.filename}: " if exc.filename else ""
        return _fail(f"{name}{exc.strerror or exc}", DATA)
    except _TerminatedError:
        return _fail("terminated", TERMINATED)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _fail(message: str, code: int) -> int:
    with suppress(OSError, ValueError):  # nobody may be listening any more
        print("kvmnn: error:", " ".join(message.split()), file=sys.stderr, flush=True)
    return code


def _forget_stdout() -> None:
    """What is still buffered cannot be written; without this the interpreter would complain about it on exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"kvmnn: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(USAGE)


class _Version(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        print(version_text(), flush=True)
        raise SystemExit(OK)


class _TerminatedError(BaseException):
    """SIGTERM arrived; raised so that temporary files are removed."""


class _Terminable:
    """While active, SIGTERM unwinds the stack instead of killing the process where it stands."""

    def __enter__(self) -> None:
        self._old: Any = None
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(signal.SIGTERM, self._handle)

    def __exit__(self, *_: object) -> None:
        if self._old is not None:
            signal.signal(signal.SIGTERM, self._old)

    @staticmethod
    def _handle(number: int, frame: FrameType | None) -> None:
        raise _TerminatedError


def version_text() -> str:
    """What ``kvmnn --version`` prints."""
    import platform

    import numpy as np

    from .. import _simd
    from ..frames import zstd
    from ..version import version

    exact = "yes" if zstd.byte_exact() else "no"
    return (
        f"kvmnn {version()}\n"
        f"Python {platform.python_version()}, numpy {np.__version__}\n"
        f"zstd {zstd.version()} ({zstd.binding()}), byte-exact with MNN: {exact}\n"
        f"SIMD level: {_simd.simd_level()}"
    )
