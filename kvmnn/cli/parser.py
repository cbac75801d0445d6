"""The command's parser: every verb with its options, help that fits the terminal."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from ..text import did_you_mean
from . import help, streams
from .word_order import sort_words

GROUPS = {
    "frames": ("encode", "decode", "inspect", "verify", "diff", "transcode", "bench"),
    "KV caches of MNN": ("unpack", "pack", "repack", "compact", "store", "plan", "replay", "measure"),
    "language models": ("eval", "plot", "generate", "dump-kv", "gate", "report"),
    "compressor weights": ("convert", "export", "compress-kv"),
    "the command itself": ("completion",),
}
"""Verbs as the help has them. Each is a module in verbs/, with _ for -, that is imported when it is needed."""

_VERSION = ("-V", "--version")
VERBS = tuple(verb for group in GROUPS.values() for verb in group)

_TEXT = """The KV cache of LLMs on MNN, outside the engine: lossless frames, packed layouts, eviction.

The verbs, in groups; kvmnn VERB --help says more of each."""

_EPILOG = """exit codes: 0 ok, 1 bad data or a failed check, 2 usage, 3 an optional package is missing, 70 a defect of
kvmnn; 129, 130, 141, 143 ended by a signal

  kvmnn encode keys.npy -o keys.frame     writes keys.frame and keys.frame.json
  kvmnn inspect keys.frame
  kvmnn verify keys.frame --against keys.npy
  kvmnn decode keys.frame -o back.npy"""


def build_parser(verbs: Sequence[str] = VERBS) -> argparse.ArgumentParser:
    """The parser of the command with `verbs`: all of them, for completions and manuals."""
    parser = _Top(
        prog="kvmnn",
        description=_TEXT,
        epilog=_EPILOG,
    )
    parser.add_argument(*_VERSION, action=_Version, nargs=0, help="print versions and exit")
    added = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=Parser)
    for verb in verbs:
        import_module(".verbs." + verb.replace("-", "_"), __package__).add_parser(added)
    return parser


def parse(words: list[str]) -> argparse.Namespace:
    """The arguments in `words`; only the verb that is named is imported."""
    first = words[0] if words else ""
    verb = first if first in VERBS else None
    parser = build_parser([verb] if verb else VERBS if first.startswith("-") and first not in _VERSION else [])
    if verb is None:
        if not words:
            parser = build_parser()
        elif not first.startswith("-"):
            parser.error(f"there is no verb {first!r}{did_you_mean(first, VERBS)}")
        _check_options_before_verb(parser, words)
        arguments = parser.parse_args(words)
    else:
        named = verbs_of(parser).choices[verb]
        order = sort_words(named, words[1:])
        if order.unknown and not {"-h", "--help"} & {*order.options}:
            _refuse(named, order.unknown)
        arguments, extra = parser.parse_known_args([verb, *order.words()])
        if extra:
            _refuse(named, extra)
    if not hasattr(arguments, "run"):
        parser.print_help()
        raise SystemExit(0)
    arguments.typed = {"words": words}
    return arguments


_NEGATIVE_NUMBERS = re.compile(r"-[0-9.][0-9.,:eE+-]*")  # lists as well, such as --shape -1,8,128: no option is so


def _refuse(parser: argparse.ArgumentParser, words: list[str]) -> NoReturn:
    """Refuse words that a verb does not take."""
    known = [option for action in parser._actions for option in action.option_strings]
    parser.error(f"unrecognized arguments: {' '.join(words)}{did_you_mean(words[0].partition('=')[0], known)}")


def _check_options_before_verb(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Refuse options of verbs that stand before the verb, and others that the command itself does not have."""
    unknown = sort_words(parser, words).unknown
    if unknown and not {"-h", "--help", *_VERSION} & {*words}:
        verb = next((word for word in words if word in VERBS), None)
        if verb is not None:
            parser.error(f"options follow the verb: kvmnn {verb} {unknown[0]} ...")
        _refuse(parser, unknown)


class Parser(argparse.ArgumentParser):
    """Says what it has to say as the whole command does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": help.Formatter} | options)
        self._negative_number_matcher = _NEGATIVE_NUMBERS
        self.color = False  # Python 3.14 would have it

    def format_usage(self) -> str:
        self.usage = help.usage(self)
        return super().format_usage()

    def format_help(self) -> str:
        self.usage = help.usage(self)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        streams.err("error", f"{message} (see {self.prog} --help)")
        raise SystemExit(2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        streams.flush()
        super().exit(status, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        streams.out(message, end="")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            meant = did_you_mean(str(value), known) or f" (choose from {', '.join(known)})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{meant}")


class _Top(Parser):
    def format_help(self) -> str:
        """As argparse has it, with the verbs in their groups."""
        shown = {action.dest: action for action in verbs_of(self)._get_subactions()}
        formatter = self._get_formatter()
        formatter.add_usage(help.usage(self), [], [])
        formatter.add_text(self.description)
        for title, names in GROUPS.items():
            formatter.start_section(title)
            formatter.add_arguments([shown[name] for name in names if name in shown])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def verbs_of(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[Any]:
    """The verbs that a parser has."""
    return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))


class _Version(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        streams.out(version_text())
        streams.flush()
        raise SystemExit(0)


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
