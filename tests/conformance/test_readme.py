"""fixtures/README.md: a line for each folder, and the numbers of cases that the sets have."""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance import INDEX_NAMES, REFERENCE_ONLY, case_entries
from repository import FIXTURES

WORDS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4}
ROWS = {
    match[1]: match[2]
    for match in re.finditer(r"^\| (\w+)/ \| (.*?) \|", (FIXTURES / "README.md").read_text("utf-8"), re.MULTILINE)
}


def read_indexes(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the indexes of a set, packed or not."""
    for path in folder.rglob("*.json"):
        if path.name in INDEX_NAMES:
            yield str(path.relative_to(folder)), json.loads(path.read_text("utf-8"))
    archive = folder / "vectors.tar.xz"
    if archive.exists():
        with tarfile.open(archive) as stored:
            for member in stored:
                path = Path(member.name)
                if path.name.endswith(("index.json", "cases.json")) and path.name not in REFERENCE_ONLY:
                    document = json.load(stored.extractfile(member))  # type: ignore[arg-type]
                    if isinstance(document, dict):
                        yield member.name, document


def test_fixtures_readme_has_a_line_for_each_folder() -> None:
    assert set(ROWS) == {path.name for path in FIXTURES.iterdir() if path.is_dir()}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_fixtures_readme_counts_are_those_of_the_sets(name: str) -> None:
    counts = Counter(
        (index, key) for index, document in read_indexes(FIXTURES / name) for key, _ in case_entries(document)
    )
    assert bool(counts) == bool(re.search(r"`[\w*-]+[-/][1-9]`", ROWS[name])), "a row names the format of its cases"
    text = re.sub(r"`[^`]*`", "", ROWS[name])
    figures = [int(number) for number in re.findall(r"\b\d+\b(?! bits)", text)]
    numbers = {*figures, sum(figures)} | {
        number for word, number in WORDS.items() if re.search(rf"\b{word}\b", ROWS[name])
    }
    assert set(counts.values()) <= numbers or counts.total() in numbers, (counts, ROWS[name])
