"""Notebooks of examples/: run their cells without Jupyter, and show them as pages of the site.

    python tools/docs/notebooks.py examples/evaluate.ipynb      # runs the cells, and stores what they show

Outputs are what the last expression of a cell shows: its HTML, a figure, or its text; and what was printed.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def run_notebook(path: Path) -> dict[str, Any]:
    """Run all cells in the notebook's folder, in one namespace; return the notebook with their outputs."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    with contextlib.chdir(path.parent):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                cell["execution_count"] = count
                cell["outputs"] = run_cell("".join(cell["source"]), names, count)
    return notebook


def run_cell(source: str, names: dict[str, Any], count: int) -> list[Cell]:
    """Run a cell; return its outputs."""
    tree = ast.parse(source, f"cell {count}")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {count}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
    outputs: list[Cell] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        data = show_value(value)
        outputs.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return outputs


def show_value(value: Any) -> dict[str, Any]:
    """Return what a notebook shows of a value, by MIME type."""
    if hasattr(value, "savefig"):
        image = io.BytesIO()
        value.savefig(image, format="png", dpi=110, metadata={"Software": None}, bbox_inches="tight")
        return {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": ["<Figure>"]}
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(True)
    return data


def format_page(notebook: dict[str, Any], images: Path) -> str:
    """Format a notebook with its outputs as Markdown; figures become files next to `images`."""
    parts: list[str] = []
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/png" in data:
                path = images.with_name(f"{images.stem}_{number}.png")
                path.write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![figure of cell {number}]({path.name})")
            elif "text/html" in data:
                table = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
                # without pandas' attributes the theme lays it out as its own tables, which scroll if too wide
                parts.append(re.sub(r"\n\s*", "", re.sub("<table[^>]*>", "<table>", table)))
            else:
                parts.append(f"```text\n{''.join(data['text/plain'])}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Run notebooks and store their outputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    os.environ.setdefault("MPLBACKEND", "agg")
    for path in parser.parse_args().notebooks:
        text = json.dumps(run_notebook(path.resolve()), indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
