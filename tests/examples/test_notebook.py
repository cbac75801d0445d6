"""The notebook of examples/ runs, and shows what it stores: numbers of this code, not of an earlier one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

NOTEBOOK = ROOT / "examples" / "evaluate.ipynb"


@pytest.fixture
def notebooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "docs"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    yield __import__("notebooks")
    sys.modules.pop("notebooks")


@pytest.mark.slow
def test_notebook_runs_and_shows_its_stored_outputs(notebooks: Any) -> None:
    for package in ("onnxruntime", "tokenizers", "pandas", "matplotlib"):
        pytest.importorskip(package)
    stored = json.loads(NOTEBOOK.read_text("utf-8"))
    now = notebooks.run_notebook(NOTEBOOK)
    assert [cell["source"] for cell in now["cells"]] == [cell["source"] for cell in stored["cells"]]
    shown = [[sorted(output.get("data", {})) for output in cell.get("outputs", [])] for cell in now["cells"]]
    assert shown == [[sorted(output.get("data", {})) for output in cell.get("outputs", [])] for cell in stored["cells"]]
    # processors round the model's numbers otherwise: sizes of frames differ by a few bytes, ratios do not
    texts = ["".join(notebook["cells"][-1]["outputs"][0]["text"]) for notebook in (now, stored)]
    shown_now, shown_before = (re.sub(r"-> [\d,]+ bytes", "-> N bytes", text) for text in texts)
    assert shown_now == shown_before and shown_now.count("-> N bytes") > 1
    (table,) = (cell for cell in now["cells"] if "keydiff" in "".join(cell["source"]))
    assert "streaming 128" in "".join(table["outputs"][0]["data"]["text/html"])


def test_notebook_page_has_code_tables_and_figures(notebooks: Any, tmp_path: Path) -> None:
    page = notebooks.format_page(json.loads(NOTEBOOK.read_text("utf-8")), tmp_path / "evaluate.md")
    assert page.count("```python") == 5 and "<table" in page
    (image,) = tmp_path.glob("*.png")
    assert f"]({image.name})" in page and image.read_bytes().startswith(b"\x89PNG")
    assert max(map(len, page.splitlines())) < 20_000
