"""Whether a stream turns its rows is chosen for each array by its size, and a frame is taken where that is smaller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dense_samples import to_dtype
from repository import FIXTURES

import kvmnn
from kvmnn import dense
from kvmnn.dense.header import is_rotated
from kvmnn.lm.session import DecoderSession
from kvmnn.lm.tokenizer import Tokenizer

Words = np.ndarray[Any, Any]
ROTARY = dense.RopeConfig(theta=10000.0, dims=16)
DTYPES = ["fp16", "bf16", "fp32"]
TOKENS = 700


def choose(array: Words, dtype: str, rotary: dense.RopeConfig, positions: Any = None) -> bytes:
    """The stream of one array, with the rotation or without it."""
    return dense.encode_many([array], dtype=dtype, rotary=rotary, positions=positions, choose_rotation=True)[0]


@pytest.fixture(scope="module")
def layers() -> list[Words]:
    """K of the shipped model in fp32, ``[kv_head, token, head_dim]`` of each layer."""
    tokenizer, session = Tokenizer.open_for_model(FIXTURES / "lm"), DecoderSession.open(FIXTURES / "lm")
    text = (FIXTURES / "lm" / "texts" / "trace.py.txt").read_text(encoding="utf-8")
    ids = np.array(tokenizer.encode(text)[:TOKENS])
    return [
        np.asarray(key[0])
        for key, _ in session.run_step(ids, np.arange(TOKENS), session.create_empty_past()).present_pairs
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("begin", "end"), [(0, 2), (0, 16), (300, 324), (300, 364), (0, 192), (0, TOKENS)])
def test_encode_rotated_key_is_never_larger_than_without_rotation_or_as_frame(
    layers: list[Words], dtype: str, begin: int, end: int
) -> None:
    for keys in layers:
        array = to_dtype(np.ascontiguousarray(keys[:, begin:end]), dtype)
        made = choose(array, dtype, ROTARY, np.arange(begin, end))
        assert dense.decode(made).tobytes() == array.tobytes()
        frame = kvmnn.encode(np.ascontiguousarray(array.transpose(1, 0, 2)), dtype=dtype, effort="fast")
        assert len(made) <= min(len(dense.encode(array, dtype=dtype)), len(frame) + 28)
        assert dense.inspect(made).rotary == is_rotated(made)


@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_wrong_rotation_of_a_long_array_is_left_out(layers: list[Words], dtype: str) -> None:
    array = to_dtype(layers[1], dtype)
    wrong = dense.RopeConfig(theta=3.0, dims=64, pairing="interleaved")
    made = choose(array, dtype, wrong)
    assert not is_rotated(made)
    assert made == dense.encode(array, dtype=dtype)


def test_encode_many_chooses_for_each_array(layers: list[Words]) -> None:
    arrays = [to_dtype(layers[1], "fp16"), np.zeros((4, TOKENS, 64), np.float16), to_dtype(layers[2], "fp16")]
    streams = dense.encode_many(arrays, rotary=ROTARY, choose_rotation=True)
    assert [is_rotated(stream) for stream in streams] == [True, False, True]
    for array, stream in zip(arrays, streams, strict=True):
        assert dense.decode(stream).tobytes() == array.tobytes()


def test_encode_tables_keep_their_rotation(layers: list[Words]) -> None:
    array = to_dtype(np.ascontiguousarray(layers[1][:, :64]), "fp16")
    tables = dense.SharedTables.from_arrays([to_dtype(layers[1], "fp16")], rotary=ROTARY)
    assert is_rotated(dense.encode_many([array], rotary=ROTARY, tables=[tables], choose_rotation=True)[0])


def chosen(group: list[Words]) -> list[bytes]:
    """The streams of arrays that are encoded together."""
    return dense.encode_many(group, rotary=ROTARY, choose_rotation=True)


@pytest.mark.parametrize("tokens", [40, TOKENS])
def test_measure_dense_counts_rotated_streams(layers: list[Words], tokens: int, run, tmp_path) -> None:
    for number, keys in enumerate(layers):
        np.save(tmp_path / f"layer_{number}.key.npy", to_dtype(np.ascontiguousarray(keys[:, :tokens]), "fp32"))
    said = run("measure", "--dense", tmp_path, "--rope", "theta=10000,dims=16").out
    cut = [np.ascontiguousarray(keys[:, :tokens]) for keys in layers]
    number = sum(is_rotated(stream) for group in (cut[:3], cut[3:]) for stream in chosen(group))
    assert 0 < number < len(layers)
    assert f"by theta=10000,dims=16 in {number} of 6 streams: others are smaller without" in " ".join(said.split())
