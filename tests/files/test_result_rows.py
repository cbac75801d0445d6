"""Results as notebooks and pandas show them: rows of their documents, short reprs, HTML."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import lm_results
import numpy as np
import pytest

import kvmnn
from kvmnn.errors import KvmnnError
from kvmnn.files.result_rows import MAX_HTML_ROWS, list_rows
from kvmnn.files.schema import Record

pandas = pytest.importorskip("pandas")

DOCUMENT = {
    "name": "x",
    "sizes": {"raw": 4, "by": {"k": 1}},
    "arrays": [
        {"name": "a", "bytes": 2, "results": [{"codec": "p", "ratio": 1.5}, {"codec": "q", "ratio": None}]},
        {"name": "b", "bytes": 3, "results": [{"codec": "p", "ratio": 2.0}]},
    ],
    "breakdown": {"layers": {"0": {"bytes": 5, "k": {"bytes": 2}}, "1": {"bytes": 6, "k": {"bytes": 3}}}},
}


@dataclass(frozen=True)
class _Entry(Record):
    name: str
    note: str = "<b>"


@dataclass(frozen=True)
class _Result(Record):
    title: str
    entries: tuple[_Entry, ...]
    array: object = field(default=None, metadata={"json": False})

    def __str__(self) -> str:
        return "two & a half\nand more"


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("", [{"name": "a", "bytes": 2}, {"name": "b", "bytes": 3}]),
        (
            "arrays.results",
            [
                {"name": "a", "bytes": 2, "codec": "p", "ratio": 1.5},
                {"name": "a", "bytes": 2, "codec": "q", "ratio": None},
                {"name": "b", "bytes": 3, "codec": "p", "ratio": 2.0},
            ],
        ),
        ("breakdown.layers", [{"layer": "0", "bytes": 5, "k.bytes": 2}, {"layer": "1", "bytes": 6, "k.bytes": 3}]),
    ],
)
def test_list_rows_of_a_document(path: str, rows: list[dict[str, object]]) -> None:
    assert list_rows(DOCUMENT, path) == rows


def test_list_rows_without_a_list_gives_the_scalars() -> None:
    assert list_rows({"name": "x", "sizes": {"raw": 4, "by": {"k": 1}}, "ids": [1, 2]}) == [
        {"name": "x", "sizes.raw": 4, "sizes.by.k": 1, "ids": [1, 2]}
    ]


def test_list_rows_unknown_list_is_an_error() -> None:
    with pytest.raises(KvmnnError, match="'rows' is no list of this result: it has sizes, arrays, breakdown"):
        list_rows(DOCUMENT, "rows")


def test_to_dataframe_has_a_line_for_each_row() -> None:
    result = lm_results.document()
    table = result.to_dataframe()
    assert list(table["label"]) == [row.label for row in result.rows]
    assert table["perplexity"][1] == result.rows[1].perplexity
    assert table["versus_full.low"][1] == result.rows[1].versus_full.low
    assert list(result.to_dataframe("documents")["name"]) == [document.name for document in result.documents]


def test_to_dataframe_without_pandas_names_it() -> None:
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "import kvmnn, numpy as np\n"
        "kvmnn.inspect(kvmnn.encode(np.ones(99, np.float16))).to_dataframe()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingDependencyError: this needs the package pandas: pip install pandas" in found.stderr


def test_repr_html_shows_rows_and_escapes_texts() -> None:
    text = _Result("t", tuple(_Entry(f"n{index}") for index in range(MAX_HTML_ROWS + 5)))._repr_html_()
    assert text.startswith("<table><caption>_Result: two &amp; a half (5 more rows: to_dataframe())</caption>")
    assert text.count("<tr>") == 1 + MAX_HTML_ROWS
    assert "<td>n0</td><td>&lt;b&gt;</td>" in text


def test_repr_html_of_an_evaluation_has_its_tables() -> None:
    text = lm_results.document()._repr_html_()
    assert "<th>policy</th><th>kind</th>" in text
    assert text.count("<table>") == text.count("</table>") > 1


def test_repr_of_results_is_short() -> None:
    array = np.ones((8, 64, 16), np.float16)
    cache = kvmnn.LayerCache(layer=0, keys=array, values=array)
    assert repr(cache).startswith("LayerCache(layer=0, keys=float16[8, 64, 16], values=float16[8, 64, 16]")
    long = _Result("t" * 1000, tuple(_Entry("n" * 500) for _ in range(99)), array)
    plan = kvmnn.plan_blocks(np.arange(100, dtype=np.float32), 6400)
    for result in (cache, long, plan, lm_results.document(), *lm_results.document().rows):
        assert len(repr(result)) < 400
    assert repr(_Entry("n")) == "_Entry(name='n', note='<b>')"
