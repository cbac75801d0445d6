"""The engine continues from its own K and V after they went through files of other engines."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import hf_files
import llama_files
import mlx_files
import numpy as np
import pytest
from engine_client import CONTINUATION, GEOMETRY, NAME, PREFIX_IDS, continuation, needs_engine, unpack_fixture
from rope_model import plain_frequencies, rotate

from kvmnn import open as kvmnn_open
from kvmnn.cli.entry_point import main

pytestmark = needs_engine

TOKENS, HEADS, DIMS = 50, 2, 16
Pairs = list[tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_fixture("model", tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """K and V of the layers of the engine's own prefix, ``[kv_head, token, head_dim]``."""
    folder = tmp_path_factory.mktemp("written")
    prefix = unpack_fixture("prefix", folder)
    kvmnn("mnn", "unpack", prefix, *GEOMETRY, "--valid-tokens", TOKENS, "-o", folder / "arrays.npz")
    with np.load(folder / "arrays.npz") as arrays:
        return [(arrays[f"layer_{n}.key"], arrays[f"layer_{n}.value"]) for n in range(len(arrays.files) // 2)]


def kvmnn(*argv: object) -> None:
    assert main([str(arg) for arg in argv]) == 0


def saved_by_torch(folder: Path, pairs: Pairs) -> list[object]:
    return [hf_files.save(folder / "x.pt", hf_files.dynamic_cache([(k[None], v[None]) for k, v in pairs]))]


def saved_by_mlx(folder: Path, pairs: Pairs) -> list[object]:
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    metadata = {"0.model": "tiny", "2.0": ""}
    for layer, both in enumerate(pairs):
        for side, words in enumerate(both):
            room = np.zeros((1, HEADS, 64, DIMS), np.float32)
            room[0, :, :TOKENS] = words
            tensors[f"{layer}.{side}"] = ("F32", list(room.shape), room.tobytes())
        tensors[f"{layer}.2"] = ("I32", [], struct.pack("<i", TOKENS))
        metadata[f"1.{layer}"] = "KVCache"
    (folder / "x.safetensors").write_bytes(mlx_files.safetensors(Random(1), tensors, metadata))
    return [folder / "x.safetensors"]


def saved_by_llama_cpp(folder: Path, pairs: Pairs, erased: int = 0) -> list[object]:
    """A session of a Llama, the halves of whose heads this engine keeps as pairs; tokens before them were erased."""
    cells = [struct.pack("<iI", erased + at, 1) + struct.pack("<i", 0) for at in range(TOKENS)]
    data = struct.pack("<II", 1, TOKENS) + b"".join(cells) + struct.pack("<II", 0, len(pairs))
    row = struct.pack("<iQ", llama_files.NUMBERS["f32"], 4 * HEADS * DIMS)
    for side in (0, 1):
        for both in pairs:
            words = both[side].transpose(1, 0, 2)
            if side == 0:
                words = np.stack([words[..., : DIMS // 2], words[..., DIMS // 2 :]], axis=-1)
            data += row + words.tobytes()
    ids = [*range(erased), *PREFIX_IDS]
    head = llama_files.SESSION + struct.pack("<II", 10, len(ids)) + struct.pack(f"<{len(ids)}i", *ids)
    (folder / "x.session").write_bytes(head + struct.pack("<I", 5) + b"llama" + data)
    fields = {"attention__head_count_kv": HEADS, "attention__key_length": DIMS, "rope__dimension_count": DIMS}
    (folder / "m.gguf").write_bytes(llama_files.gguf(**fields, block_count=len(pairs), rope__freq_base=10000.0))
    return [folder / "x.session", "--model", folder / "m.gguf"]


def plain_arrays(folder: Path, pairs: Pairs) -> list[object]:
    named = {}
    for layer, (keys, values) in enumerate(pairs):
        named |= {f"past_key_values.{layer}.key": keys, f"past_key_values.{layer}.value": values}
    np.savez(folder / "x.npz", **{name: words.transpose(1, 0, 2)[None] for name, words in named.items()})
    return [folder / "x.npz", "--axes", "bthd"]


WAYS = [saved_by_torch, saved_by_mlx, saved_by_llama_cpp, plain_arrays]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_engine_continues_from_caches_of_other_formats(
    model: Path, pairs: Pairs, tmp_path: Path, way: Callable[[Path, Pairs], list[object]]
) -> None:
    """Packed, and by way of a store: the tokens are those after the engine's own prefix."""
    cache = way(tmp_path, pairs)
    kvmnn("mnn", "pack", *cache, "--backend", "x86-avx2", "--name", NAME, "-o", tmp_path / "packed")
    assert continuation(model, tmp_path / "packed", tmp_path / "scratch") == CONTINUATION
    (tmp_path / "ids.json").write_text(json.dumps(PREFIX_IDS))
    said = ["--token-ids", tmp_path / "ids.json"]
    kvmnn("store", "put", tmp_path / "store", *cache, *said, *([] if "--model" in cache else ["--fingerprint", "m"]))
    kvmnn("store", "get", tmp_path / "store", *said, "--backend", "x86-avx2", "--name", NAME, "-o", tmp_path / "got")
    assert continuation(model, tmp_path / "got", tmp_path / "again") == CONTINUATION


def test_engine_wrong_k_order_changes_tokens(model: Path, pairs: Pairs, tmp_path: Path) -> None:
    """The premise of the test above: K in llama.cpp's order gives other tokens."""
    session, *more = saved_by_llama_cpp(tmp_path, pairs)
    kvmnn(
        "mnn",
        "pack",
        session,
        *more,
        "--invert",
        "none",
        "--backend",
        "x86-avx2",
        "--name",
        NAME,
        "-o",
        tmp_path / "packed",
    )
    assert continuation(model, tmp_path / "packed", tmp_path / "scratch") != CONTINUATION


def test_rerotate_evicted_session_uses_theta_of_gguf(model: Path, pairs: Pairs, tmp_path: Path) -> None:
    """K as it would be after 26 tokens that were erased: rotated, it is the engine's own, and so are the tokens."""
    frequencies = plain_frequencies(10000.0, DIMS)
    later = [(rotate(keys, [26] * TOKENS, frequencies).astype(np.float32), values) for keys, values in pairs]
    session = saved_by_llama_cpp(tmp_path, later, erased=26)
    pack = ["mnn", "pack", *session, "--backend", "x86-avx2", "--name", NAME]
    kvmnn(*pack, "-o", tmp_path / "rotated", "--rerotate")
    info = kvmnn_open(str(tmp_path / "rotated")).cache
    assert info is not None and info.layers[0].text_positions == ((26, TOKENS),)
    assert continuation(model, tmp_path / "rotated", tmp_path / "scratch") == CONTINUATION
    kvmnn(*pack, "-o", tmp_path / "plain")
    assert continuation(model, tmp_path / "plain", tmp_path / "again") != CONTINUATION
