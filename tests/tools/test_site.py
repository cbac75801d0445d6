"""The site: every page has a place, every link between pages leads somewhere, and bad ones are reported."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT

MAX_WRITTEN_WORDS = 38_000
"""Words of README and docs/ outside code, without the generated reference: nobody reads more."""


@pytest.fixture
def site(tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_builder", ROOT / "tools" / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SOURCES = tmp_path
    return module


def test_site_names_all_pages_of_docs(site: ModuleType) -> None:
    assert site.list_unlisted_pages() == []


def test_site_links_between_pages_exist(site: ModuleType) -> None:
    pages = site.list_pages()
    assert [problem for path in pages for problem in site.stage_page(path, pages)] == []
    index = (site.SOURCES / "index.md").read_text(encoding="utf-8")
    assert "](docs/tour.md)" in index and "](benchmarks/pareto.md)" in index


def test_site_broken_link_is_reported(site: ModuleType, tmp_path: Path) -> None:
    site.ROOT = tmp_path / "project"
    page = site.ROOT / "docs" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text("# x\n[one](gone.md), [two](page.md#x), [three](../setup.py), *g*[*j*][*k*]", encoding="utf-8")
    (site.ROOT / "setup.py").touch()
    assert site.stage_page(page, [page]) == ["docs/page.md: links to gone.md, which does not exist"]
    staged = (tmp_path / "docs" / "page.md").read_text(encoding="utf-8")
    assert staged == "# x\none, [two](../docs/page.md#x), three, *g*[*j*]\\[*k*]"


def test_site_link_to_missing_heading_is_reported(site: ModuleType, tmp_path: Path) -> None:
    site.ROOT = tmp_path / "project"
    page, other = (site.ROOT / "docs" / name for name in ("page.md", "other.md"))
    page.parent.mkdir(parents=True)
    page.write_text("# A page\n\n[one](#a-page) [two](#b) [three](other.md#llamacpp-and-more) [four](other.md#no)")
    other.write_text("## llama.cpp and `more`\n\n```text\n# no\n```\n")
    assert site.stage_page(page, [page, other]) == [
        "docs/page.md: links to #b, a heading that does not exist",
        "docs/page.md: links to other.md#no, a heading that does not exist",
    ]


def count_written_words(text: str) -> int:
    """Count words of prose and tables: code, commands and their outputs (fenced or indented) do not count."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = [block for block in re.split(r"\n\s*\n", prose) if not block.startswith("    ")]
    return sum(1 for word in " ".join(blocks).split() if re.search(r"\w", word))


def test_site_counts_words_outside_code() -> None:
    text = "# A page\n\nTwo words | 3.\n\n    $ kvmnn encode\n\n```console\n$ kvmnn decode\n```\n\n* one\n"
    assert count_written_words(text) == 6


def test_site_written_pages_stay_within_limit(site: ModuleType) -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    counts = {page.name: count_written_words(page.read_text(encoding="utf-8")) for page in pages}
    del counts["reference.md"]  # written by tools/docs/reference.py
    assert len(counts) > 30 and sum(counts.values()) <= MAX_WRITTEN_WORDS, sorted(counts.items())
