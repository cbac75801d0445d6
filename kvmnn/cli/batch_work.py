"""A verb as work on one of many files (`kvmnn.batch`), wherever that is done."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from .._util.dataclass import dataclass
from ..batch import Task, TaskOutcome
from ..errors import OptionError
from ..files.change_detection import InputGuard
from . import command_parser, entry_point, shared_options, streams

BATCH_COMMANDS = ("encode", "inspect", "measure", "verify", "compressor verify")


@dataclass(frozen=True)
class CommandWork:
    """The work of ``kvmnn COMMAND --json`` on one input, on one thread; its document is the printed one.

    Parameters
    ----------
    command_name
        One of `BATCH_COMMANDS`.
    options
        Values of the verb's options, as its parser has them.
    """

    command_name: str
    options: Mapping[str, Any]

    @classmethod
    def from_words(cls, command_name: str, *words: str) -> CommandWork:
        """Create the work of options as on the command line, e.g. ``CommandWork.from_words("encode", "--effort",
        "fast")``.

        Raises
        ------
        OptionError
            For another verb, for words that are not options of it, and for options of the whole run (``--jobs``,
            ``--threads`` ...), which belong to `kvmnn.batch.run_tasks`.
        """
        if command_name not in BATCH_COMMANDS:
            raise OptionError(
                f"{command_name!r} is not done for many files: expected one of {', '.join(BATCH_COMMANDS)}"
            )
        with streams.capture_output() as captured:
            try:
                arguments = command_parser.parse_command_line([*command_name.split(), *words, "--", "-"])
            except SystemExit:
                raise OptionError("; ".join(captured.errors) or "asks for help") from None
        for name in _BATCH_ONLY_OPTIONS:
            if shared_options.was_given(arguments, name):
                option = shared_options.get_option_name(arguments, name)
                raise OptionError(f"{option} is about a run of many files: kvmnn.batch.run_tasks is told how it goes")
        return cls.from_arguments(command_name, arguments)

    @classmethod
    def from_arguments(cls, command_name: str, arguments: argparse.Namespace) -> CommandWork:
        """Create the work of a namespace, without its options about many files."""
        return cls(
            command_name, {name: value for name, value in vars(arguments).items() if name not in _EXCLUDED_ARGUMENTS}
        )

    def compute_identity(self) -> dict[str, Any]:
        """Return everything that the results depend on, as JSON values."""
        from .._util.packages import get_version

        # What was typed is for documents only; what may be replaced changes no result.
        options = {name: value for name, value in self.options.items() if name not in ("typed", "force")}
        changed_options = {
            name: value for name, value in options.items() if value != _get_default(self.command_name, name)
        }
        return {
            "kvmnn": get_version(),
            "verb": self.command_name,
            "options": json.loads(json.dumps(changed_options, default=str)),
        }

    def __call__(self, task: Task) -> TaskOutcome:
        arguments = argparse.Namespace(**{**_get_defaults(self.command_name), **self.options})
        arguments.json, arguments.quiet = True, False
        arguments.inputs = [task.path]
        if hasattr(arguments, "threads"):
            arguments.threads = 1
        if task.output is not None:
            arguments.output, arguments.named = None, task.output
            arguments.force |= task.replace
            os.makedirs(os.path.dirname(os.path.abspath(task.output)), exist_ok=True)
        code = 0
        with streams.capture_output() as captured:
            try:
                with InputGuard():
                    code = arguments.run(arguments)
            except Exception as exc:
                streams.write_error_line("error", entry_point.describe_error(exc, arguments)[0])
            except SystemExit:
                pass  # and why was said
        error = "; ".join(captured.errors) or ("is incomplete (its document says what is missing)" if code else None)
        return TaskOutcome(captured.document, error, tuple(captured.notes))


def import_command(command_name: str) -> None:
    """Import the modules of a command."""
    _get_defaults(command_name)
    for name in ("bundle", "formats", *(["analysis.measurement"] if command_name == "measure" else [])):
        import_module(f"..{name}", __package__)


_BATCH_ONLY_OPTIONS = ("jobs", "dask", "resume", "match", "threads")
_EXCLUDED_ARGUMENTS = {*("run", "parser", "inputs", "json", "quiet"), *_BATCH_ONLY_OPTIONS}


@cache
def _make_parser(command_name: str) -> argparse.ArgumentParser:
    return command_parser.build_command_parser(command_name)[1]


@cache
def _get_defaults(command_name: str) -> Mapping[str, Any]:
    """Return the namespace of the command without options."""
    subparser = _make_parser(command_name)
    return {
        **{action.dest: action.default for action in subparser._actions if action.default is not argparse.SUPPRESS},
        **subparser._defaults,
    }


def _get_default(command_name: str, name: str) -> Any:
    with suppress(KeyError):
        return _get_defaults(command_name)[name]
    return None
