"""The commands of docs/dense.md do what the page says: a prefix cache as dense streams, as frames of them, and back."""

from __future__ import annotations

from pathlib import Path

from docs.commands import comparable, fresh_directory, retold
from repository import DOCS


def test_the_walk_through():
    page = (DOCS / "dense.md").read_text(encoding="utf-8")
    assert page.count("$ kvmnn ") == 6
    assert comparable(retold(page)) == comparable(page)


def test_what_it_leaves_behind(run):
    """Frames of dense streams are the frames of the cache, and its files come back."""
    page = (DOCS / "dense.md").read_text(encoding="utf-8")
    with fresh_directory():
        for line in page.splitlines():
            if line.startswith("$ kvmnn "):
                run(*line.removeprefix("$ kvmnn ").split())
        for path in Path("f").iterdir():
            assert Path("back", path.name).read_bytes() == path.read_bytes()
        assert {path.name for path in Path("restored").glob("*.[kv]")} == {
            path.name for path in Path("cache").iterdir()
        }
        run("diff", "restored", "f")
