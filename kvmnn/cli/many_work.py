"""A verb as work on one of many files (`kvmnn.many`), wherever that is done."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from ..errors import OptionError
from ..files.changes import Reading
from ..many import Outcome, Task
from . import command, idle_options, parser, streams

VERBS = ("encode", "inspect", "measure", "verify")


@dataclass(frozen=True)
class VerbWork:
    """What ``kvmnn VERB --json`` does with one input, on one thread; the document is the one that it prints.

    Parameters
    ----------
    verb
        One of `VERBS`.
    options
        Values of the verb's options, as its parser has them.
    """

    verb: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, verb: str, *words: str) -> VerbWork:
        """The work that options as on the command line ask for, e.g. ``VerbWork.of("encode", "--effort", "fast")``.

        Raises
        ------
        OptionError
            For another verb, for words that are none of its options, and for those that say how a run of many goes
            (``--jobs``, ``--threads`` ...): `kvmnn.many.run` is told that.
        """
        if verb not in VERBS:
            raise OptionError(f"{verb!r} is not done for many files: expected one of {', '.join(VERBS)}")
        with streams.keeping() as said:
            try:
                arguments = parser.parse([verb, *words, "--", "-"])
            except SystemExit:
                raise OptionError("; ".join(said.errors) or "asks for help") from None
        for name in _OF_RUN:
            if idle_options.given(arguments, name):
                option = idle_options.option(arguments, name)
                raise OptionError(f"{option} is about a run of many files: kvmnn.many.run is told how it goes")
        return cls.taken_from(verb, arguments)

    @classmethod
    def taken_from(cls, verb: str, arguments: argparse.Namespace) -> VerbWork:
        """The work that a namespace asks for, but for what it says of many."""
        return cls(verb, {name: value for name, value in vars(arguments).items() if name not in _OF_THE_RUN})

    def identity(self) -> dict[str, Any]:
        """What the results depend on, as JSON has it."""
        from ..version import version

        # What was typed is for documents only; what may be replaced changes no result.
        options = {name: value for name, value in self.options.items() if name not in ("typed", "force")}
        said = {name: value for name, value in options.items() if value != _default(self.verb, name)}
        return {"kvmnn": version(), "verb": self.verb, "options": json.loads(json.dumps(said, default=str))}

    def __call__(self, task: Task) -> Outcome:
        arguments = argparse.Namespace(**{**_defaults(self.verb), **self.options})
        arguments.json, arguments.quiet = True, False
        arguments.inputs = [task.path]
        if hasattr(arguments, "threads"):
            arguments.threads = 1
        if task.output is not None:
            arguments.output, arguments.named = None, task.output
            arguments.force |= task.replace
            os.makedirs(os.path.dirname(os.path.abspath(task.output)), exist_ok=True)
        with streams.keeping() as said:
            try:
                with Reading():
                    arguments.run(arguments)
            except Exception as exc:
                streams.err("error", command.verdict(exc, arguments)[0])
            except SystemExit:
                pass  # and why was said
        error = "; ".join(said.errors) or None
        return Outcome(said.document, error, tuple(said.notes))


def prepare(verb: str) -> None:
    """Import what a verb needs."""
    _defaults(verb)
    for name in ("bundle", "formats", *(["offline.measuring"] if verb == "measure" else [])):
        import_module(f"..{name}", __package__)


_OF_RUN = ("jobs", "dask", "resume", "match", "threads")
_OF_THE_RUN = {*("run", "parser", "inputs", "dump_dir", "json", "quiet"), *_OF_RUN}


@cache
def _parser(verb: str) -> argparse.ArgumentParser:
    found: argparse.ArgumentParser = parser.verbs_of(parser.build_parser((verb,))).choices[verb]
    return found


@cache
def _defaults(verb: str) -> Mapping[str, Any]:
    """All that a namespace of the verb has, with nothing given."""
    made = _parser(verb)
    return {
        **{action.dest: action.default for action in made._actions if action.default is not argparse.SUPPRESS},
        **{name: made.get_default(name) for name in ("run", "parser")},
    }


def _default(verb: str, name: str) -> Any:
    with suppress(KeyError):
        return _defaults(verb)[name]
    return None
