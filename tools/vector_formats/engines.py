"""Caches that other engines wrote: `llama-state-1` and `mlx-prompt-cache-1`.

Each case is a file: every field of it is compared with what kvmnn finds in the file, its arrays word for word with
those expected, and the file is written again from its frames, byte for byte.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvmnn
from kvmnn.bundle import encode_source, open_frames
from kvmnn.files.mapped_file import MappedFile
from kvmnn.formats import EngineOptions, PackedOptions, ReadOptions, restore_file
from kvmnn.formats.llama.state import LlamaState, parse_structure
from kvmnn.packed.inference import PackedGeometry

from .common import CaseResult, Checker, run_list, unknown_lists

_LLAMA = {
    *("file", "kind", "version", "tokens", "streams", "stream", "positions", "seqs", "v_transposed", "types"),
    *("kv_heads", "head_dim", "layers", "expected"),
}
_MLX = {"file", "kind", "dtype", "bits", "group_size", "layers", "kv_heads", "head_dim", "tokens", "expected"}


def run_llama(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    cases = index.get("cases", ())
    yield from run_list(cases, "cases", lambda case, check: _llama(folder, index, case, check))
    yield from unknown_lists(index, ("cases",))


def run_mlx(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    cases = index.get("cases", ())
    yield from run_list(cases, "cases", lambda case, check: _mlx(folder, case, check))
    yield from unknown_lists(index, ("cases",))


def _llama(folder: Path, index: dict[str, Any], case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_LLAMA)
    path = folder / case["file"]
    engine = EngineOptions(stream=case["stream"])
    said = PackedOptions(geometry=PackedGeometry(kv_heads=case["kv_heads"]))
    source = kvmnn.open(path, ReadOptions(packed=said, engine=engine))
    if "model" in index:
        model = PackedOptions(model=str(folder / index["model"]))
        by_model = kvmnn.open(path, ReadOptions(packed=model, engine=engine))
        check.equal("geometry by the model", _shapes(by_model), _shapes(source))
    cache = source.engine_cache
    assert cache is not None
    _state(parse_structure(MappedFile(path)), case, check)
    check.field("kind", cache.kind)
    check.field("types", list(cache.types))
    check.field("layers", cache.layers)
    check.field("kv_heads", cache.kv_heads)
    check.field("head_dim", cache.head_dim)
    check.field("v_transposed", cache.details["v_transposed"])
    _arrays(source, folder / case["expected"], check)
    _written_again(path, check)


def _state(state: LlamaState, case: dict[str, Any], check: Checker) -> None:
    check.field("version", state.version)
    check.field("tokens", state.token_ids.tolist())
    check.field("streams", len(state.caches[0]))
    stream = state.caches[0][case["stream"]]
    check.field("positions", stream.positions.tolist())
    check.field("seqs", stream.sequences_by_cell)


def _mlx(folder: Path, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_MLX)
    path = folder / case["file"]
    source = kvmnn.open(path)
    cache = source.engine_cache
    assert cache is not None
    quantised = cache.details["classes"] == ["QuantizedKVCache"]
    check.field("kind", "quantized" if quantised else "prompt_cache")
    if quantised:
        check.field("bits", cache.details["bits"])
        check.field("group_size", cache.details["group_size"])
    if not quantised or "dtype" in case:
        check.field("dtype", source.arrays[0].dtype)
    check.field("layers", cache.layers)
    check.field("kv_heads", cache.kv_heads)
    check.field("head_dim", cache.head_dim)
    check.field("tokens", cache.tokens)
    _arrays(source, folder / case["expected"], check)
    _written_again(path, check)


def _shapes(source: kvmnn.arrays.Source) -> list[Any]:
    return [[array.name, array.dtype, list(array.shape)] for array in source.arrays]


def _arrays(source: kvmnn.arrays.Source, path: Path, check: Checker) -> None:
    """The same names, shapes and bits as an archive has."""
    with np.load(path, allow_pickle=False) as expected:
        check.equal("arrays", sorted(source), sorted(expected.files))
        for name in sorted(set(source) & set(expected.files)):
            found, words = source[name].to_numpy(), expected[name]
            check.equal(f"shape of {name}", list(found.shape), list(words.shape))
            check.equal(f"bytes of a word of {name}", found.itemsize, words.itemsize)
            if found.shape == words.shape and found.itemsize == words.itemsize:
                unlike = found.view(f"u{found.itemsize}") != words.view(f"u{words.itemsize}")
                check.equal(f"words of {name} that differ", int(np.count_nonzero(unlike)), 0)


def _written_again(path: Path, check: Checker) -> None:
    """The file from its frames."""
    with tempfile.TemporaryDirectory() as scratch:
        frames, back = Path(scratch, "frames/"), Path(scratch, "back")
        encode_source(kvmnn.open(path, ReadOptions(engine=EngineOptions(passthrough=True))), f"{frames}/")
        restore_file(open_frames(str(frames)), back)
        check.equal("written again byte for byte", back.read_bytes() == path.read_bytes(), True)
