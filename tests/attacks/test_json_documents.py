"""Invalid and ambiguous JSON in every document that kvmnn reads, settings of models and tokenizers included.

What is valid and what is not is said by RFC 8259; the cases are made by tests/support/json_cases.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hostile_files import quietly, samples
from json_cases import places

from kvmnn.errors import KvmnnError
from kvmnn.files.schema import parse_document, read_object

NOT_JSON = {b"[]", b"{}", b"[,]", b"1,000", b"1 2", b"[] []", b"{} {}", b"true false"}
"""No documents, or other ones, but not wrong inside of brackets."""
EVERY = 3 if os.environ.get("KVMNN_ATTACKS") else 20
"""make attack tries every third case, make test-all has time for fewer."""
SLOW = {"settings of a model": 3 * EVERY, "tokenizer": 3 * EVERY}


def test_parse_document_invalid_json_is_refused(tmp_path: Path) -> None:
    for verdict, atom, text in places():
        found = refusal(lambda text=text: parse_document(text, "x"))
        if verdict != "either" and not (text == b"[" + atom + b"]" and atom in (b"", b" ", b"1,000")):
            assert (found is None) == (verdict == "yes"), (verdict, text[:80], found)
        (tmp_path / "x.json").write_bytes(text)
        found = refusal(lambda: read_object(tmp_path / "x.json"))
        if verdict == "no" or (verdict == "yes" and not text.strip().startswith(b"{")):
            assert found is not None or (text == b"[" + atom + b"]"), (verdict, text[:80])


def refusal(read: Any) -> str | None:
    try:
        read()
    except KvmnnError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        return str(error)
    return None


DOCUMENTS = [
    (kind, name) for kind, sample in sorted(samples().items()) for name in sample.damaged if name.endswith(".json")
]


def test_document_samples_cover_all_kinds() -> None:
    found = {name for _, name in DOCUMENTS}
    assert found >= {"manifest.json", "plan.json", "ids.json", "meta_t0_3.json", "runtime.json", "sys.kvmnn.json"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), DOCUMENTS, ids=lambda value: str(value))
def test_json_readers_refuse_invalid_values(kind: str, name: str, tmp_path: Path) -> None:
    """The case replaces the whole document, then each of its values.

    Every twentieth case, from another one on in each document, so that all of them meet some reader.
    """
    sample = samples()[kind]
    for file, data in sample.files.items():
        (tmp_path / "in" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / file).write_bytes(data)
    others = [other for other in sample.damaged if other != name]
    commands = [c for c in sample.commands if not any(f"{{in}}/{other}" in c.split() for other in others)]
    document = json.loads(sample.files[name])
    step = SLOW.get(kind, EVERY)
    for number, (_, atom, text) in enumerate(list(places())[len(name) % step :: step]):
        if number % 2 and len(atom) < 10_000:
            text = with_value(document, number // 2, atom)
        (tmp_path / "in" / name).write_bytes(text)
        out = tmp_path / f"out{number}"
        command = commands[number % len(commands)]
        code, errors = quietly(command.format(**{"in": tmp_path / "in", "out": out}).split())
        told = [line for line in errors.splitlines() if not line.startswith(("kvmnn: note: ", "kvmnn: warning: "))]
        says_verdict = code == 1 and command.startswith(("gate ", "mnn replay ", "store verify "))
        one_line = says_verdict or len(told) == (code != 0)
        assert code in (0, 1, 2) and one_line and len(errors) < 4000, (text[:200], code, errors[:4000])
        assert code == 0 or not [path for path in tmp_path.iterdir() if path.name.startswith((out.name, "."))], text[
            :200
        ]


def with_value(document: Any, number: int, atom: bytes) -> bytes:
    """The document with one of its values, at any depth, replaced by the atom."""
    marks: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            marks.append((value, key))
            if isinstance(inner, dict | list):
                walk(inner)

    walk(document)
    holder, key = marks[number % len(marks)]
    before = holder[key]
    holder[key] = "@here@"
    text = json.dumps(document).encode().replace(b'"@here@"', atom, 1)
    holder[key] = before
    return text
