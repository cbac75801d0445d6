"""docs/reference.md is what the command's parser says today."""

from __future__ import annotations

import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "docs"


def test_the_reference_is_generated_from_the_options(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    reference = __import__("reference")
    assert reference.PAGE.read_text(encoding="utf-8") == reference.format_reference(), (
        "run python tools/docs/reference.py"
    )
    sys.modules.pop("reference")
