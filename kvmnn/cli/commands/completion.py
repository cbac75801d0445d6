"""``kvmnn completion``: shell completions and the manual page."""

from __future__ import annotations

import argparse
from typing import Any

from .. import streams

_DESCRIPTION = """\
Print what a shell needs to complete verbs, options, their values and files, or the manual page. All of it is generated
from the options of the kvmnn that prints it.

  bash   for ~/.local/share/bash-completion/completions/kvmnn
  zsh    for ~/.zfunc/_kvmnn (with ~/.zfunc in $fpath)
  fish   for ~/.config/fish/completions/kvmnn.fish
  man    for ~/.local/share/man/man1/kvmnn.1"""

COMPLETION_FORMS = ("bash", "zsh", "fish", "man")


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command, which only prints a script: it has no --json and no --quiet."""
    parser = subparsers.add_parser(
        "completion",
        help="completions for shells, the manual page",
        description=_DESCRIPTION,
        examples=("kvmnn completion bash", "kvmnn completion zsh", "kvmnn completion man"),
        add_help=False,
    )
    parser.add_argument(
        "form", choices=COMPLETION_FORMS, metavar="SHELL", help="bash, zsh or fish; man: the manual page"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from .. import build_parser, completion_scripts

    parser = build_parser()
    if arguments.form == "man":
        streams.write_out(completion_scripts.format_manual(parser), end="")
    else:
        streams.write_out(
            completion_scripts.FORMATTER_BY_SHELL[arguments.form](completion_scripts.describe_commands(parser)), end=""
        )
    return 0
