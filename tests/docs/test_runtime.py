"""Tables of docs/runtime.md list every option, and the traces that it names exist."""

from __future__ import annotations

import json
import re
import tarfile

from repository import DOCS, FIXTURES

from kvmnn.runtime.config import _CHOICE_OPTIONS, _LOSS_OPTIONS, _MIN_VALUES, _SWITCH_OPTIONS, _TEXT_OPTIONS

PAGE = DOCS / "runtime.md"


def test_named_traces_ship() -> None:
    table = PAGE.read_text().split("| engine | sound | trace |\n")[1].split("\n\n")[0]
    named = {name for line in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", line.rsplit("|", 2)[-2])}
    with tarfile.open(FIXTURES / "store" / "vectors.tar.xz") as archive:
        index = json.load(archive.extractfile("index.json"))  # type: ignore[arg-type]
    assert len(named) > 15
    assert named <= {case["name"] for case in index["cases"]}


def test_option_table_lists_every_option() -> None:
    table = PAGE.read_text().split("| key `kv_lossless_...` |")[1].split("\n\n")[0]
    told = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert told == {*_MIN_VALUES, *_CHOICE_OPTIONS, *_SWITCH_OPTIONS, *_TEXT_OPTIONS, *_LOSS_OPTIONS, "profile"}
