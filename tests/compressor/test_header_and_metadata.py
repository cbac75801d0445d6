"""Header fields and metadata of weight files: what conversions write there, shows, and is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compressor_files import checkpoint, weight_file, weights

from kvmnn import KvmnnError
from kvmnn.cli import entry_point
from kvmnn.compressor import ConvertOptions, convert_checkpoint, export_weights, inspect_weights, kvcm, verify_weights
from kvmnn.compressor.kvcm import FIELD_OFFSETS, pack_metadata, unpack_metadata

STATE = weights()
ENTRIES = {"source": "run 7, epoch 3", "licence": "Apache-2.0", "na\u00efve": "a=b"}
"""On the command line and in files."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "c.pth", STATE)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = entry_point.main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return call


def changed(path: Path, **fields: int) -> Path:
    """The file with other header fields."""
    data = path.read_bytes()
    header = {**kvcm.parse_weight_file(data).header.to_dict(), **fields}
    target = path.with_name("changed.bin")
    target.write_bytes(kvcm.WeightFileHeader(**header).pack() + data[kvcm.HEADER_BYTES :])
    return target


# -- EXACT is said of the whole header --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("reserved", 1, 0),
        ("num_heads", 32, 0),
        ("head_dim", 0, 4),
        ("head_dim", 6, 4),
        ("hidden_size", 0, 12),
        ("compression_factor", 4, 3),
        ("min_seq_len", 9, 2),
    ],
)
def test_verify_compares_every_header_field(source: Path, shell: Any, field: str, value: int, expected: int) -> None:
    convert_checkpoint(source, source.with_name("w.bin"))
    path = changed(source.with_name("w.bin"), **{field: value})
    verdict = verify_weights(path, against=source)
    told = f"offset {FIELD_OFFSETS[field]}: header field {field} is {value}: expected {expected}"
    assert list(verdict.differences) == [told]
    assert not verdict.is_ok
    code, out, err = shell("compressor", "verify", path, "--against", source)
    assert (code, out, f"DIFFERS from {source}: {told}\n" in err) == (1, "", True)
    code, out, _ = shell("compressor", "verify", path, "--against", source, "--json")
    document = json.loads(out)
    assert (code, document["verdict"], document["differences"]) == (1, "reject", [told])


def test_verify_compares_fields_with_conversion_options(source: Path, shell: Any) -> None:
    told = ["--min-seq-len", "9", "--num-heads", "32", "--head-dim", "6", "--compression-factor", "7", "--as-reference"]
    path = source.with_name("w.bin")
    assert shell("compressor", "convert", source, path, *told)[0] == 0
    verdict = verify_weights(path, against=source)
    assert [text.split()[4] for text in verdict.differences] == [
        "num_heads", "head_dim", "compression_factor", "min_seq_len",
    ]  # fmt: skip
    options = ConvertOptions(min_seq_len=9, num_heads=32, head_dim=6, compression_factor=7)
    assert not verify_weights(path, against=source, options=options).differences


def test_verify_uses_dtype_and_prefixes_of_the_file_by_default(source: Path, shell: Any) -> None:
    path = source.with_name("w.bin")
    assert (
        shell("compressor", "convert", source, path, "--dtype", "bf16", "--prefix-order", "compress_tk,compress_tv")[0]
        == 0
    )
    code, out, err = shell("compressor", "verify", path, "--against", source)
    assert (code, "EXACT" in out) == (0, True)
    assert err == (
        "kvmnn: note: the file has compress_tk, compress_tv only: compress_ik, compress_iv of the checkpoint "
        "not compared\n"
    )
    code, _, err = shell("compressor", "verify", path, "--against", source, "--dtype", "fp16")
    assert (code, err.endswith("header field dtype_code is 1: expected 0\n")) == (1, True)
    code, _, err = shell(
        "compressor", "verify", path, "--against", source, "--prefix-order", ",".join(kvcm.DEFAULT_PREFIXES)
    )
    assert (code, "weight_count_per_layer is 6: expected 12" in err) == (1, True)


# -- metadata ---------------------------------------------------------------------------------------------------------


def test_convert_metadata_is_written_shown_and_compared(source: Path, shell: Any) -> None:
    path = source.with_name("w.bin")
    told = [argument for key, text in ENTRIES.items() for argument in ("--metadata", f"{key}={text}")]
    assert shell("compressor", "convert", source, path, *told)[0] == 0
    file = kvcm.read_weight_file(path)
    assert unpack_metadata(file.metadata) == ENTRIES
    assert file.header.metadata_size_bytes == len(file.metadata)
    assert len(file.metadata) % 4 == 0
    plain = source.with_name("plain.bin")
    convert_checkpoint(source, plain)
    blocks = plain.read_bytes()[kvcm.HEADER_BYTES :]
    assert path.read_bytes()[kvcm.HEADER_BYTES + len(file.metadata) :] == blocks
    _, out, _ = shell("compressor", "inspect", path)
    assert "  metadata\n    source                  run 7, epoch 3\n    licence                 Apache-2.0\n" in out
    (document,) = json.loads(shell("compressor", "inspect", path, "--json")[1])["inputs"]
    assert document["metadata"] == {"bytes": len(file.metadata), "entries": ENTRIES}
    assert document["parts"]["metadata"] == len(file.metadata)
    code, out, _ = shell("compressor", "verify", path, "--against", source, *told)
    assert (code, "EXACT" in out) == (0, True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["metadata 'a' is 'x': expected not there", "metadata 'b' is 'y': expected not there"]),
        (["--metadata", "a=x"], ["metadata 'b' is 'y': expected not there"]),
        (["--metadata", "a=z", "--metadata", "b=y"], ["metadata 'a' is 'x': expected 'z'"]),
    ],
)
def test_verify_different_metadata_is_a_difference(
    source: Path, shell: Any, options: list[str], expected: list[str]
) -> None:
    path = source.with_name("w.bin")
    convert_checkpoint(source, path, ConvertOptions(metadata={"a": "x", "b": "y"}))
    code, out, _ = shell("compressor", "verify", path, "--against", source, *options, "--json")
    told = [text for text in json.loads(out)["differences"] if "header field" not in text]
    assert code == 1
    assert [text.startswith(f"offset 44: {start}") for text, start in zip(told, expected, strict=True)] == [True] * len(
        expected
    )


def test_verify_metadata_order_is_no_difference(source: Path, shell: Any) -> None:
    path = source.with_name("w.bin")
    convert_checkpoint(source, path, ConvertOptions(metadata={"a": "x", "b": "y"}))
    code, out, _ = shell("compressor", "verify", path, "--against", source, "--metadata", "b=y", "--metadata", "a=x")
    assert (code, "EXACT" in out) == (0, True)
    convert_checkpoint(source, path, ConvertOptions(metadata=b'{"a": "x"}  '), overwrite=True)
    told = verify_weights(path, against=source, options=ConvertOptions(metadata={"a": "x"})).differences
    assert told == [
        "offset 44: metadata holds the same entries in other bytes: expected those of kvmnn compressor convert"
    ]


@pytest.mark.parametrize("metadata", [b"\xff\x00note", b"{", b'{"a": 1}', b'{"a": "b", "a": "c"}', b"[" * 4000])
def test_inspect_foreign_metadata_is_shown_as_bytes(tmp_path: Path, shell: Any, metadata: bytes) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(weight_file(metadata=metadata))
    assert kvcm.read_weight_file(path).metadata == metadata
    code, out, _ = shell("compressor", "inspect", path)
    assert (code, f"  metadata, {len(metadata)} bytes, {metadata[:32]!r}" in out) == (0, True)
    (document,) = json.loads(shell("compressor", "inspect", path, "--json")[1])["inputs"]
    assert document["metadata"] == {"bytes": len(metadata), "head": metadata[:64].hex()}


def test_inspect_metadata_control_characters_are_escaped(tmp_path: Path, shell: Any) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(weight_file(metadata=pack_metadata({"na\x1b[2Jme": "line\nline\x9b"})))
    _, out, _ = shell("compressor", "inspect", path)
    assert r"'na\x1b[2Jme'" in out
    assert r"'line\nline\x9b'" in out


def test_convert_invalid_metadata_is_refused(source: Path, shell: Any) -> None:
    path = source.with_name("w.bin")
    for text in ("novalue", "=value"):
        code, _, err = shell("compressor", "convert", source, path, "--metadata", text)
        assert (code, f"{text!r} is no entry: expected KEY=VALUE" in err) == (2, True)
    code, _, err = shell("compressor", "convert", source, path, "--metadata", "a=1", "--metadata", "a=2")
    assert (code, err) == (2, "kvmnn: error: --metadata has a key twice\n")
    code, _, err = shell("compressor", "convert", source, path, "--metadata", "a=\udcff")
    assert (code, "is no UTF-8 text" in err, path.exists()) == (1, True, False)
    with pytest.raises(KvmnnError, match="metadata 1 is no text"):
        convert_checkpoint(source, path, ConvertOptions(metadata={"a": 1}))  # type: ignore[dict-item]


def test_export_keeps_metadata(tmp_path: Path) -> None:
    for metadata, expected in ((b"{}", ("metadata", "{}")), (b"\xff", ("metadata_hex", "ff"))):
        path = tmp_path / "w.bin"
        path.write_bytes(weight_file(metadata=metadata))
        export_weights(path, tmp_path / "w.safetensors", overwrite=True)
        data = (tmp_path / "w.safetensors").read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert expected in header["__metadata__"].items()


def test_inspect_checkpoint_includes_metadata_to_be_written(source: Path) -> None:
    account = inspect_weights(source, ConvertOptions(metadata={"a": "b"}))
    assert account.header.metadata_size_bytes == len(account.metadata) == 12
