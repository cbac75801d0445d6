"""The manual page, made from the command's parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ..version import version
from . import help
from .parser import GROUPS, verbs_of

_KEPT, _FILLED = (".RS -6n", ".nf"), (".fi", ".RE")
"""Around lines that are written for 80 columns: nearly without the margin of manual pages."""


def manual(parser: argparse.ArgumentParser) -> str:
    """The page ``kvmnn.1`` in the man macros of roff."""
    verbs = verbs_of(parser)
    summaries = {action.dest: action.help or "" for action in verbs._get_subactions()}
    summary = (parser.description or "").partition("\n")[0]
    lines = [f'.TH KVMNN 1 "" "kvmnn {version()}"', ".SH NAME", f"kvmnn \\- {_plain(summary)}"]
    lines += [".SH SYNOPSIS", ".B kvmnn", ".I VERB", "[options] ..."]
    lines += [".SH VERBS"]
    for title, names in GROUPS.items():
        lines += [f".SS {_plain(title)}"]
        for name in names:
            lines += [".TP", f".B {_plain(name)}", _plain(summaries[name])]
    for name, verb in verbs.choices.items():
        lines += [f".SH {_plain('kvmnn ' + name)}", ".nf", _plain(help.usage(verb).replace("%%", "%")), ".fi", ".PP"]
        lines += _paragraphs(verb.description or "")
        lines += _options(verb)
    return "\n".join([*lines, ".SH NOTES", *_paragraphs(parser.epilog or ""), ""])


def _options(verb: argparse.ArgumentParser) -> Iterator[str]:
    formatter = help.Formatter(verb.prog)
    for action, text in help.help_of(verb).items():
        yield from (".TP", f".B {_plain(formatter._format_action_invocation(action))}", _plain(text))


def _paragraphs(text: str) -> Iterator[str]:
    """Filled paragraphs; indented lines as they are."""
    kept = False
    for line in text.split("\n"):
        if not line:
            yield ".PP" if not kept else ""
            continue
        if kept != line.startswith(" "):
            kept = not kept
            yield from _KEPT if kept else _FILLED
        yield _plain(line)
    if kept:
        yield from _FILLED


def _plain(text: str) -> str:
    """A text without anything that roff would act on."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
