"""The command's parser: every verb with its options, help that fits the terminal."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from ..text import suggest
from . import help, streams
from .word_order import sort_words

COMMANDS_BY_GROUP = {
    "frames": ("encode", "decode", "inspect", "verify", "diff", "transcode", "bench"),
    "KV caches of MNN": ("unpack", "pack", "repack", "compact", "store", "plan", "replay", "measure"),
    "language models": ("eval", "plot", "generate", "dump-kv", "gate", "report"),
    "compressor weights": ("convert", "export", "compress-kv"),
    "the command itself": ("completion",),
}
"""Verbs as the help has them. Each is a module in verbs/, with _ for -, that is imported when it is needed."""

_VERSION_OPTIONS = ("-V", "--version")
COMMANDS = tuple(verb for group in COMMANDS_BY_GROUP.values() for verb in group)

_TOP_DESCRIPTION = """The KV cache of LLMs on MNN, outside the engine: lossless frames, packed layouts, eviction.

The verbs, in groups; kvmnn VERB --help says more of each."""

_TOP_EPILOG = """\
exit codes: 0 ok, 1 bad data or a failed check, 2 usage, 3 an optional package is missing, 70 a defect of
kvmnn; 129, 130, 141, 143 ended by a signal

  kvmnn encode keys.npy -o keys.frame     writes keys.frame and keys.frame.json
  kvmnn inspect keys.frame
  kvmnn verify keys.frame --against keys.npy
  kvmnn decode keys.frame -o back.npy"""


def build_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of the command with `commands`: all of them, for completions and manuals."""
    parser = _TopParser(
        prog="kvmnn",
        description=_TOP_DESCRIPTION,
        epilog=_TOP_EPILOG,
    )
    parser.add_argument(*_VERSION_OPTIONS, action=_VersionAction, nargs=0, help="print versions and exit")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=CommandParser)
    for command_name in commands:
        import_module(".verbs." + command_name.replace("-", "_"), __package__).add_parser(subparsers)
    return parser


def parse_command_line(words: list[str]) -> argparse.Namespace:
    """The arguments in `words`; only the verb that is named is imported."""
    first_word = words[0] if words else ""
    command_name = first_word if first_word in COMMANDS else None
    parser = build_parser(
        [command_name]
        if command_name
        else COMMANDS
        if first_word.startswith("-") and first_word not in _VERSION_OPTIONS
        else []
    )
    if command_name is None:
        if not words:
            parser = build_parser()
        elif not first_word.startswith("-"):
            parser.error(f"there is no verb {first_word!r}{suggest(first_word, COMMANDS)}")
        _check_options_before_command(parser, words)
        arguments = parser.parse_args(words)
    else:
        subparser = get_subparsers(parser).choices[command_name]
        order = sort_words(subparser, words[1:])
        if order.unknown and not {"-h", "--help"} & {*order.options}:
            _refuse_words(subparser, order.unknown)
        arguments, extra_words = parser.parse_known_args([command_name, *order.to_words()])
        if extra_words:
            _refuse_words(subparser, extra_words)
    if not hasattr(arguments, "run"):
        parser.print_help()
        raise SystemExit(0)
    arguments.typed = {"words": words}
    return arguments


_NEGATIVE_NUMBER_REGEX = re.compile(r"-[0-9.][0-9.,:eE+-]*")  # lists as well, such as --shape -1,8,128: no option is so


def _refuse_words(parser: argparse.ArgumentParser, words: list[str]) -> NoReturn:
    """Refuse words that a verb does not take."""
    option_names = [option for action in parser._actions for option in action.option_strings]
    parser.error(f"unrecognized arguments: {' '.join(words)}{suggest(words[0].partition('=')[0], option_names)}")


def _check_options_before_command(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Refuse options of verbs that stand before the verb, and others that the command itself does not have."""
    unknown_words = sort_words(parser, words).unknown
    if unknown_words and not {"-h", "--help", *_VERSION_OPTIONS} & {*words}:
        command_name = next((word for word in words if word in COMMANDS), None)
        if command_name is not None:
            parser.error(f"options follow the verb: kvmnn {command_name} {unknown_words[0]} ...")
        _refuse_words(parser, unknown_words)


class CommandParser(argparse.ArgumentParser):
    """Says what it has to say as the whole command does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": help.HelpFormatter} | options)
        self._negative_number_matcher = _NEGATIVE_NUMBER_REGEX
        self.color = False  # Python 3.14 would have it

    def format_usage(self) -> str:
        self.usage = help.format_usage(self)
        return super().format_usage()

    def format_help(self) -> str:
        self.usage = help.format_usage(self)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        streams.write_error_line("error", f"{message} (see {self.prog} --help)")
        raise SystemExit(2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        streams.flush_out()
        super().exit(status, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        streams.write_out(message, end="")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choice_texts = [str(choice) for choice in action.choices]
            hint = suggest(str(value), choice_texts) or f" (choose from {', '.join(choice_texts)})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")


class _TopParser(CommandParser):
    def format_help(self) -> str:
        """As argparse has it, with the verbs in their groups."""
        action_by_command = {action.dest: action for action in get_subparsers(self)._get_subactions()}
        formatter = self._get_formatter()
        formatter.add_usage(help.format_usage(self), [], [])
        formatter.add_text(self.description)
        for title, names in COMMANDS_BY_GROUP.items():
            formatter.start_section(title)
            formatter.add_arguments([action_by_command[name] for name in names if name in action_by_command])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def get_subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[Any]:
    """The verbs that a parser has."""
    return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))


class _VersionAction(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        streams.write_out(format_version())
        streams.flush_out()
        raise SystemExit(0)


def format_version() -> str:
    """What ``kvmnn --version`` prints."""
    import platform

    import numpy as np

    from .. import _simd
    from ..frames import zstd
    from ..version import get_version

    byte_exact_text = "yes" if zstd.is_byte_exact() else "no"
    return (
        f"kvmnn {get_version()}\n"
        f"Python {platform.python_version()}, numpy {np.__version__}\n"
        f"zstd {zstd.get_version()} ({zstd.get_binding()}), byte-exact with MNN: {byte_exact_text}\n"
        f"SIMD level: {_simd.simd_level()}"
    )
