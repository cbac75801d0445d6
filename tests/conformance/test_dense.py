"""Dense streams that were kept, through the same code as tools/conformance.py."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dense_decoder
import pytest
from conformance import run_index
from dense_tables import Reject
from repository import SUPPORT

CHANGED = [
    *(("dtype", "bf16"), ("kv_heads", 1), ("tokens", 91), ("head_dim", 23), ("method", "frame"), ("rotary", True)),
    *(("words_sha256", "0"), ("words", "v_bf16.words"), ("refused", True), ("more", 1)),
]


def test_dense_every_vector_decodes_or_is_refused(unpacked: Callable[[str], Path]) -> None:
    folder = unpacked("dense")
    results = list(run_index(folder / "index.json", folder))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 39


def test_dense_each_rule_of_the_page_refuses_a_vector(unpacked: Callable[[str], Path]) -> None:
    """The rules are those that the decoder in plain Python names."""
    sources = "".join((SUPPORT / name).read_text("utf-8") for name in ("dense_tables.py", "dense_decoder.py"))
    rules = set(re.findall(r'^ +(?:check\(.*, |raise Reject\()f?"([^"]+?)(?:: {error})?"\)', sources, re.MULTILINE))
    folder, refusing = unpacked("dense_rules"), set()
    for case in json.loads((folder / "index.json").read_text("utf-8"))["cases"]:
        tables = (folder / case["table_set"]).read_bytes() if "table_set" in case else None
        with pytest.raises(Reject) as refusal:
            dense_decoder.decode((folder / case["stream"]).read_bytes(), tables=tables)
        assert str(refusal.value).startswith(case["why"])
        refusing.add(re.sub("the (escapes|exponents) end", "the {what} end", case["why"]))
    assert rules == refusing


def one_case(folder: Path, name: str, **changes: Any) -> Any:
    index = json.loads((folder / "index.json").read_text())
    (case,) = [case for case in index["cases"] if case["name"] == name]
    (folder / "changed.json").write_text(json.dumps({"format": index["format"], "cases": [case | changes]}))
    (result,) = run_index(folder / "changed.json", folder)
    return result.problems


@pytest.mark.parametrize(("field", "value"), CHANGED, ids=[field for field, _ in CHANGED])
def test_dense_changed_expectation_fails(
    unpacked: Callable[[str], Path], tmp_path: Path, field: str, value: object
) -> None:
    folder = shutil.copytree(unpacked("dense"), tmp_path / "dense")
    assert not one_case(folder, "v_fp16")
    assert one_case(folder, "v_fp16", **{field: value})


def test_dense_changed_history_tables_or_verdict_fails(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(unpacked("dense"), tmp_path / "dense")
    name = "history_and_tables_fp16"
    assert not one_case(folder, name)
    assert one_case(folder, name, history_rows=31)
    assert one_case(folder, name, table_set_id="0")
    assert one_case(folder, name, table_set="history_and_tables_bf16.kvmt")
    assert one_case(folder, "v_fp16", stream="k_half_fp16.kvmd")
    assert one_case(folder, "refused_cut", stream="v_fp16.kvmd")
