"""The manual page, made from the command's parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ..version import get_version
from . import help
from .parser import COMMANDS_BY_GROUP, get_subparsers

_VERBATIM_BEGIN, _VERBATIM_END = (".RS -6n", ".nf"), (".fi", ".RE")
"""Around lines that are written for 80 columns: nearly without the margin of manual pages."""


def format_manual(parser: argparse.ArgumentParser) -> str:
    """The page ``kvmnn.1`` in the man macros of roff."""
    subparsers = get_subparsers(parser)
    summaries = {action.dest: action.help or "" for action in subparsers._get_subactions()}
    summary = (parser.description or "").partition("\n")[0]
    lines = [f'.TH KVMNN 1 "" "kvmnn {get_version()}"', ".SH NAME", f"kvmnn \\- {_escape_roff(summary)}"]
    lines += [".SH SYNOPSIS", ".B kvmnn", ".I VERB", "[options] ..."]
    lines += [".SH VERBS"]
    for title, names in COMMANDS_BY_GROUP.items():
        lines += [f".SS {_escape_roff(title)}"]
        for name in names:
            lines += [".TP", f".B {_escape_roff(name)}", _escape_roff(summaries[name])]
    for name, subparser in subparsers.choices.items():
        lines += [
            f".SH {_escape_roff('kvmnn ' + name)}",
            ".nf",
            _escape_roff(help.format_usage(subparser).replace("%%", "%")),
            ".fi",
            ".PP",
        ]
        lines += _iter_paragraph_lines(subparser.description or "")
        lines += _iter_option_lines(subparser)
    return "\n".join([*lines, ".SH NOTES", *_iter_paragraph_lines(parser.epilog or ""), ""])


def _iter_option_lines(subparser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = help.HelpFormatter(subparser.prog)
    for action, text in help.collect_help(subparser).items():
        yield from (".TP", f".B {_escape_roff(formatter._format_action_invocation(action))}", _escape_roff(text))


def _iter_paragraph_lines(text: str) -> Iterator[str]:
    """Filled paragraphs; indented lines as they are."""
    is_verbatim = False
    for line in text.split("\n"):
        if not line:
            yield ".PP" if not is_verbatim else ""
            continue
        if is_verbatim != line.startswith(" "):
            is_verbatim = not is_verbatim
            yield from _VERBATIM_BEGIN if is_verbatim else _VERBATIM_END
        yield _escape_roff(line)
    if is_verbatim:
        yield from _VERBATIM_END


def _escape_roff(text: str) -> str:
    """A text without anything that roff would act on."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
