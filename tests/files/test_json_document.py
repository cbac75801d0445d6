"""Settings files: what is no JSON object is refused in one line, and nothing large is read."""

from __future__ import annotations

import pytest

from kvmnn.errors import ManifestError, SourceError
from kvmnn.files import schema
from kvmnn.files.schema import loads_strict, parse_document, parse_object, read_object, read_object_or_empty


def test_read_object_missing_file_is_empty_or_error(tmp_path):
    path = tmp_path / "config.json"
    assert read_object_or_empty(path) == {}
    with pytest.raises(FileNotFoundError):
        read_object(path)
    path.write_text('{"layers": 2}')
    assert read_object(path) == read_object_or_empty(path) == {"layers": 2}
    assert read_object_or_empty(path / "below a file") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[" * 200_000, "is not JSON"), ("\xff", "is not JSON"), ("[1]", "no JSON object")],
    ids=["cut", "deep", "no UTF-8", "list"],
)
def test_read_object_malformed_document_is_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=message):
        read_object_or_empty(path)


def test_read_object_above_size_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "MAX_DOCUMENT_BYTES", 20)
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}' + " " * 12)
    assert read_object(path) == {"a": 1}
    path.write_text('{"a": 1}' + " " * 13)
    with pytest.raises(SourceError, match="more than 20 bytes"):
        read_object(path)
    with pytest.raises(SourceError, match="cannot be read"):
        read_object(tmp_path)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_parse_document_nan_is_refused_except_in_model_settings(tmp_path, constant):
    text = f'{{"a": [{constant}]}}'
    with pytest.raises(ManifestError, match=f"^x: is not valid JSON: {constant} is no number of JSON$"):
        parse_document(text, "x")
    with pytest.raises(SourceError, match=f"^x: is not JSON: {constant} is no number of JSON$"):
        parse_object(text.encode(), "x")
    with pytest.raises(ValueError, match=constant):
        loads_strict(text)
    path = tmp_path / "config.json"
    path.write_text(text.replace("]", ', "NaN"]'))
    with pytest.raises(SourceError, match=f"{constant} is no number"):
        read_object(path)
    for found in (read_object(path, allow_nan=True), read_object_or_empty(path)):
        assert str(found["a"][0]) == str(float(constant)) and found["a"][1] == "NaN"


def test_check_schema_other_name_or_version_is_refused():
    document = parse_document('{"schema": "a", "schema_version": 2}', "x")
    document.check_schema("a", 2)
    document.get("schema_version").check_version(2)
    with pytest.raises(ManifestError, match="found \"a\", expected 'b'"):
        document.check_schema("b", 2)
    with pytest.raises(ManifestError, match=r"^x: schema_version: found 2, expected 1, the version this kvmnn reads$"):
        document.check_schema("a", 1)
    with pytest.raises(ManifestError, match=r"^x: schema_version: found 2, expected at most 1: a later kvmnn wrote"):
        document.get("schema_version").check_version(1)
