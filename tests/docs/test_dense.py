"""The commands of docs/dense.md print what the page shows; frames of dense streams decode to the original files."""

from __future__ import annotations

from pathlib import Path

from docs.commands import comparable, fresh_directory, retold
from repository import DOCS


def test_walk_through_prints_what_the_page_shows():
    page = (DOCS / "dense.md").read_text(encoding="utf-8")
    assert page.count("$ kvmnn ") == 6
    assert comparable(retold(page)) == comparable(page)


def test_walk_through_restores_frames_and_files(run):
    page = (DOCS / "dense.md").read_text(encoding="utf-8")
    with fresh_directory():
        for line in page.splitlines():
            if line.startswith("$ kvmnn "):
                run(*line.removeprefix("$ kvmnn ").removesuffix(" >/dev/null").split())
        for path in Path("f").iterdir():
            assert Path("back", path.name).read_bytes() == path.read_bytes()
        assert {path.name for path in Path("restored").glob("*.[kv]")} == {
            path.name for path in Path("cache").iterdir()
        }
        run("diff", "restored", "f")
