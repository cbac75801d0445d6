"""A manifest is accepted only if everything in it is consistent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmnn.bundle import manifest
from kvmnn.errors import ManifestError

HASH = "0" * 64


def document() -> dict[str, Any]:
    return {
        "schema": "kvmnn-manifest",
        "schema_version": 1,
        "kvmnn_version": "0.1.0",
        "zstd": {"version": "1.5.6", "byte_exact": True},
        "effort": "exact",
        "codecs": ["rle", "zstd"],
        "predictors": ["raw"],
        "hi_predictors": None,
        "raw_bytes": 24,
        "stored_bytes": 50,
        "metadata": {"format": "pt"},
        "arrays": [
            {
                "name": "k",
                "shape": [2, 3, 2],
                "dtype": "fp16",
                "array_dtype": ">f2",
                "order": "F",
                "raw_bytes": 24,
                "stored_bytes": 50,
                "sha256": HASH,
                "frames": [
                    {"file": "k.frame", "offset": 0, "bytes": 30, "raw_bytes": 12, "sha256": HASH},
                    {"file": "k.frame", "offset": 30, "bytes": 20, "raw_bytes": 12, "sha256": HASH},
                ],
            }
        ],
    }


def read(value: Any) -> manifest.Manifest:
    return manifest.parse_manifest(value if isinstance(value, bytes) else json.dumps(value).encode())


def test_manifest_round_trips():
    found = read(document())
    assert json.loads(manifest.dump_manifest(found)) == document()
    assert read(manifest.dump_manifest(found)) == found
    (array,) = found.arrays
    assert (array.nbytes, array.stored_bytes, array.order, array.is_big_endian) == (24, 50, "F", True)


def test_manifest_unknown_keys_are_ignored():
    value = document()
    value["later"] = value["arrays"][0]["later"] = value["arrays"][0]["frames"][0]["later"] = {"x": [1]}
    assert read(value) == read(document())


MISSING = object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "other", "schema: found \"other\", expected 'kvmnn-manifest'"),
        ("schema_version", 4, "schema_version: found 4, expected 1 to 3, the versions this kvmnn reads"),
        ("schema_version", True, "schema_version"),
        ("arrays", [], "arrays: has 0 entries"),
        ("arrays", {}, "arrays: found {}, expected a list"),
        ("arrays.0", 5, "arrays[0].dtype: "),
        ("arrays.0.name", MISSING, "arrays[0].name: is missing"),
        ("arrays.0.name", 7, "arrays[0].name: found 7, expected a string"),
        ("arrays.0.dtype", "fp8", "arrays[0].dtype: found \"fp8\", expected one of fp16, bf16, fp32"),
        ("arrays.0.dtype", "fp32", "arrays[0].array_dtype: found \">f2\", expected a type of 4 bytes"),
        ("arrays.0.array_dtype", "O", "arrays[0].array_dtype"),
        ("arrays.0.array_dtype", "|f2", "arrays[0].array_dtype"),
        ("arrays.0.order", "K", "arrays[0].order: found \"K\", expected 'C' or 'F'"),
        ("arrays.0.shape", [2, 3], "arrays[0].raw_bytes: found 24, expected 12, as its shape"),
        ("arrays.0.shape", [2, -3, -2], "arrays[0].shape[1]: found -3"),
        ("arrays.0.shape", [2.0, 3, 2], "arrays[0].shape[0]: found 2.0"),
        ("arrays.0.shape", [0], "arrays[0].shape[0]: found 0"),
        ("arrays.0.shape", [1 << 40] * 40, "arrays[0].raw_bytes"),
        ("arrays.0.shape", [1] * 65, "arrays[0].shape: has 65 entries"),
        ("arrays.0.sha256", "xyz", "arrays[0].sha256"),
        ("arrays.0.sha256", None, "arrays[0].sha256"),
        ("arrays.0.raw_bytes", 26, "arrays[0].raw_bytes: found 26, expected 24, the sum"),
        ("arrays.0.stored_bytes", 51, "arrays[0].stored_bytes: found 51, expected 50"),
        ("raw_bytes", 25, "raw_bytes: found 25, expected 24"),
        ("arrays.0.frames", [], "arrays[0].frames: has 0 entries"),
        ("arrays.0.frames.0.raw_bytes", 11, "arrays[0].frames[0].raw_bytes: found 11, expected a multiple of 2"),
        ("arrays.0.frames.0.offset", -1, "arrays[0].frames[0].offset: found -1"),
        ("arrays.0.frames.0.bytes", 13, "arrays[0].frames[0].bytes: found 13, expected an integer of at least 14"),
        ("arrays.0.frames.0.bytes", 1 << 70, "arrays[0].frames[0].bytes"),
        ("arrays.0.frames.0.file", "../k.frame", "expected a relative file name without '..'"),
        ("arrays.0.frames.0.file", "a/../../k", "expected a relative file name without '..'"),
        ("arrays.0.frames.0.file", "..\\k", "expected a relative file name without '..'"),
        ("arrays.0.frames.0.file", "/etc/passwd", "expected a relative file name"),
        ("arrays.0.frames.0.file", "C:\\k", "expected a relative file name"),
        ("arrays.0.frames.0.file", "", "expected a relative file name"),
        ("arrays.0.frames.0.file", "a\0b", "expected a relative file name"),
        ("metadata", {"a": 1}, "metadata.a: found 1, expected a string"),
        ("effort", None, "effort: found null, expected a string, as there are frames"),
        ("codecs", "zstd", "codecs: found \"zstd\", expected a list"),
        ("zstd", None, "zstd.version: "),
        ("zstd.byte_exact", 1, "zstd.byte_exact: found 1, expected true or false"),
    ],
)  # fmt: skip
def test_manifest_inconsistent_value_is_refused(path, value, message):
    whole = document()
    *folders, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    node: Any = whole
    for key in folders:
        node = node[key]
    if value is MISSING:
        del node[last]
    else:
        node[last] = value
    with pytest.raises(ManifestError) as caught:
        read(whole)
    text = str(caught.value)
    assert message in text or (message.endswith(": ") and "expected an object" in text)
    assert "\n" not in text


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1, "a": 2}', b"9" * 5000, b"null", b"[]"]
)
def test_manifest_malformed_json_is_refused(text):
    with pytest.raises(ManifestError):
        read(text)


def test_manifest_duplicate_array_name_is_refused():
    value = document()
    value["arrays"] *= 2
    with pytest.raises(ManifestError, match=r"arrays\[1\].name: 'k' is already taken"):
        read(value)


def test_load_manifest_error_names_the_file(tmp_path):
    with pytest.raises(ManifestError, match=r"m.json: cannot be read"):
        manifest.load_manifest(tmp_path / "m.json")
    (tmp_path / "m.json").write_bytes(b"{}")
    with pytest.raises(ManifestError, match=r'm.json: schema: is missing: a manifest of kvmnn says "schema": "kvmnn-m'):
        manifest.load_manifest(tmp_path / "m.json")


def test_manifest_dense_streams_record_rope_without_frames():
    value = document() | {"schema_version": 3, "effort": None, "codecs": [], "predictors": []}
    value["arrays"][0] |= {"order": "C", "array_dtype": "<f2"}
    for frame in value["arrays"][0]["frames"]:
        frame |= {"stored": "dense", "axes": "htd", "rope": "theta=500,dims=2"}
    found = read(value)
    assert json.loads(manifest.dump_manifest(found)) == value
    assert (found.effort, found.rope) == (None, "theta=500,dims=2")
    value["arrays"][0]["frames"][0]["rope"] = 5
    with pytest.raises(ManifestError, match=r"frames\[0\].rope: found 5, expected a string"):
        read(value)
