"""The site: every page has a place, every link between pages leads somewhere, and bad ones are reported."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT


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
    page.write_text("[one](gone.md), [two](page.md#x), [three](../setup.py), *g*[*j*][*k*]", encoding="utf-8")
    (site.ROOT / "setup.py").touch()
    assert site.stage_page(page, [page]) == ["docs/page.md: links to gone.md, which does not exist"]
    staged = (tmp_path / "docs" / "page.md").read_text(encoding="utf-8")
    assert staged == "one, [two](../docs/page.md#x), three, *g*[*j*]\\[*k*]"
