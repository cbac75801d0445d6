"""Every `kvmnn` line of README and docs/ parses: verbs and options exist, and their values are of the right kind."""

from __future__ import annotations

import re
import shlex

import pytest
from repository import DOCS, ROOT

from kvmnn.cli.command_parser import parse_command_line

PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.glob("*.md")) if page.name != "reference.md")]
LINE = re.compile(r"^(?:    (?:\$ )?|\$ )(?:cat \S+ \| )?kvmnn (.*)$", re.MULTILINE)


def read_commands(text: str) -> list[list[str]]:
    """Return the words after `kvmnn` of each command, without comments, redirections and what follows a pipe."""
    commands = []
    for line in LINE.findall(text.replace("\\\n", " ")):
        for part in re.split(r" && kvmnn ", line):
            words = shlex.split(part, comments=True)
            ends = [at for at, word in enumerate(words) if word in ("|", "&&") or word.startswith(">")]
            commands.append(words[: ends[0]] if ends else words)
    return commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_commands_parse(page) -> None:
    for words in read_commands(page.read_text(encoding="utf-8")):
        try:
            parse_command_line(words)
        except SystemExit as end:
            assert end.code == 0, f"kvmnn {' '.join(words)}"


def test_page_commands_are_found() -> None:
    assert sum(len(read_commands(page.read_text(encoding="utf-8"))) for page in PAGES) > 150
