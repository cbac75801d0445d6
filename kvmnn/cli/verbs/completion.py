"""``kvmnn completion``: what shells complete, and the manual page."""

from __future__ import annotations

import argparse
from typing import Any

from .. import streams

_TEXT = """Print what a shell needs to complete verbs, options, their values and files, or the manual page; all of it is
made from the options of the kvmnn that prints it.

  kvmnn completion bash >~/.local/share/bash-completion/completions/kvmnn
  kvmnn completion zsh >~/.zfunc/_kvmnn       (with ~/.zfunc in $fpath)
  kvmnn completion fish >~/.config/fish/completions/kvmnn.fish
  kvmnn completion man >~/.local/share/man/man1/kvmnn.1"""

FORMS = ("bash", "zsh", "fish", "man")


def add_parser(verbs: Any) -> None:
    """Declare the verb, which prints a text and nothing else: no --json, nothing to be quiet about."""
    parser = verbs.add_parser("completion", help="completions for shells, the manual page", description=_TEXT)
    parser.add_argument("form", choices=FORMS, metavar="SHELL", help="bash, zsh or fish; man: the manual page")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from .. import build_parser, completions, manual

    parser = build_parser()
    if arguments.form == "man":
        streams.out(manual.manual(parser), end="")
    else:
        streams.out(completions.SHELLS[arguments.form](completions.described(parser)), end="")
    return 0
