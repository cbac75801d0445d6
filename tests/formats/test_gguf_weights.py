"""Tensors of GGUF files as float32."""

from pathlib import Path

import numpy as np
import pytest
import tiny_models

from kvmnn.errors import SourceError
from kvmnn.formats.llama.gguf_tensors import GgufModel

BLOCKS = dict(np.load(Path(__file__).parents[2] / "fixtures" / "lm_import" / "blocks.npz"))
NAMES = sorted(name.removesuffix(".blocks") for name in BLOCKS if name.endswith(".blocks"))


def write_tensor(path: Path, shape: tuple[int, ...], type_number: int, data: bytes) -> GgufModel:
    path.write_bytes(tiny_models.build_gguf_of_blocks({"general.architecture": "x"}, {"t": (shape, type_number, data)}))
    return GgufModel(str(path))


@pytest.mark.parametrize("name", NAMES)
def test_read_tensor_gives_values_of_gguf_py(tmp_path, name) -> None:
    type_name, number = name.split(".")
    blocks, values = BLOCKS[f"{name}.blocks"], BLOCKS[f"{name}.values"]
    model = write_tensor(tmp_path / "m.gguf", values.shape, int(number), blocks.tobytes())
    assert model.tensors["t"].type_name.lower() == type_name
    np.testing.assert_array_equal(model.read_tensor("t").view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize(("number", "dtype"), [(0, "<f4"), (1, "<f2")])
def test_read_tensor_gives_plain_floats(tmp_path, number, dtype) -> None:
    values = np.arange(-12, 12, dtype=dtype).reshape(2, 3, 4) / 7
    model = write_tensor(tmp_path / "m.gguf", values.shape, number, values.astype(dtype).tobytes())
    np.testing.assert_array_equal(model.read_tensor("t"), values.astype(dtype).astype(np.float32))


def test_read_tensor_gives_bfloat16(tmp_path) -> None:
    words = np.array([[0x3F80, 0xC000], [0x0001, 0x7F80]], "<u2")
    model = write_tensor(tmp_path / "m.gguf", (2, 2), 30, words.tobytes())
    expected = (words.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(model.read_tensor("t"), expected)


def test_read_rows_cuts_large_tensors_at_whole_rows(tmp_path) -> None:
    values = np.random.Generator(np.random.PCG64(1)).standard_normal((3000, 700), np.float32)
    model = write_tensor(tmp_path / "m.gguf", values.shape, 0, values.tobytes())
    chunks = list(model.read_rows(model.tensors["t"]))
    assert len(chunks) > 1
    np.testing.assert_array_equal(np.concatenate(chunks), values)


def test_gguf_model_refuses_two_tensors_of_a_name(tmp_path) -> None:
    values = np.zeros((1, 4), np.float32)
    data = tiny_models.build_gguf({"general.architecture": "x"}, {"a": values, "b": values})
    (tmp_path / "m.gguf").write_bytes(data.replace(b"\1\0\0\0\0\0\0\0b", b"\1\0\0\0\0\0\0\0a"))
    with pytest.raises(SourceError, match="two tensors 'a'"):
        GgufModel(str(tmp_path / "m.gguf"))


def test_gguf_model_follows_alignment(tmp_path) -> None:
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    fields = {"general.architecture": "x", "general.alignment": 256}
    (tmp_path / "m.gguf").write_bytes(tiny_models.build_gguf(fields, {"a": values, "b": values + 8}, alignment=256))
    model = GgufModel(str(tmp_path / "m.gguf"))
    np.testing.assert_array_equal(model.read_tensor("b"), values + 8)
