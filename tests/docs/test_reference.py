"""docs/reference.md is generated from the command's parser."""

from __future__ import annotations

import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "docs"


def test_reference_equals_generated_page(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    reference = __import__("reference")
    assert reference.PAGE.read_text(encoding="utf-8") == reference.format_reference(), (
        "run python tools/docs/reference.py"
    )
    sys.modules.pop("reference")
