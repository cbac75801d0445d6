"""The commands of docs/prefix-cache.md print what the page says."""

from __future__ import annotations

import pytest
from docs.commands import comparable, retold
from repository import DOCS

from kvmnn.frames import zstd


@pytest.mark.skipif(not zstd.is_byte_exact(), reason="sizes of frames hold for libzstd 1.5.2 to 1.5.6")
def test_walk_through_prints_what_the_page_shows():
    page = (DOCS / "prefix-cache.md").read_text(encoding="utf-8")
    assert page.count("$ kvmnn ") > 8
    assert comparable(retold(page)) == comparable(page)
