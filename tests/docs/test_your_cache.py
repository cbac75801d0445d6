"""The pages for new users: every command of docs/your-cache.md runs, tables of the other two follow from the code."""

from __future__ import annotations

import re

import pytest
from docs.commands import comparable, fresh_directory, retold
from repository import DOCS

from kvmnn.frames import zstd
from kvmnn.packed.backends import BACKENDS

PAGE = (DOCS / "your-cache.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    kvmnn (.*)$", PAGE, re.MULTILINE)


def read_rows(page: str, header: str) -> list[list[str]]:
    """Return the cells of the table that begins with `header`."""
    lines = page[page.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.skipif(not zstd.is_byte_exact(), reason="sizes of frames hold for libzstd 1.5.2 to 1.5.6")
def test_your_cache_outputs_equal_the_page() -> None:
    assert comparable(retold(PAGE)) == comparable(PAGE)


def test_your_cache_commands_run(run) -> None:
    engines = re.findall(r"\n\n\*\*([^*]+)\*\*", PAGE)
    assert engines == ["MNN", "llama.cpp", "Hugging Face", "vLLM"] and len(COMMANDS) == 5 * len(engines)
    with fresh_directory():
        for command in COMMANDS:
            run(*command.split())


def test_backend_page_equals_backends() -> None:
    rows = read_rows((DOCS / "backends.md").read_text(encoding="utf-8"), "| engine | `--backend`")
    assert len(rows) >= 8
    for _, names, elements, packs in rows:
        listed = [BACKENDS[name] for name in re.findall(r"`([a-z0-9-]+)`", names) if name in BACKENDS]
        types, numbers = elements.split("; "), packs.split("; ")
        assert listed and {row.dtype for row in listed} == set(types)
        assert {f"{row.lP}, {row.hP}" for row in listed} == set(numbers)


def test_bytes_of_a_token_follow_from_geometry() -> None:
    rows = read_rows((DOCS / "guarantees.md").read_text(encoding="utf-8"), "| model | layers, kv heads")
    for _, geometry, token, text in rows:
        layers, heads, dim = (int(number) for number in geometry.split(", "))
        assert token == f"{layers * 2 * heads * dim * 2:,} bytes"
        assert text == f"{layers * 2 * heads * dim * 2 * 4096 / 1e6:.0f} MB"
