"""Checkpoints and weight files for tests, whole and hostile."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fixtures.compressor_checkpoint import write_checkpoint

from kvmnn.compressor import kvcm

Floats = npt.NDArray[np.float32]


def weights(
    layers: int = 2,
    *,
    head_dim: int = 4,
    factor: int = 3,
    prefixes: tuple[str, ...] = kvcm.DEFAULT_PREFIXES,
    slots: tuple[int, ...] = kvcm.DEFAULT_SLOTS,
    seed: int = 0,
) -> dict[str, Floats]:
    """A compressor's state_dict with biases."""
    rng = np.random.default_rng(seed)
    found: dict[str, Floats] = {}
    for prefix in prefixes:
        for layer in range(layers):
            for slot in slots:
                columns = head_dim * (factor if slot == slots[0] else 1)
                found[f"{prefix}.{layer}.{slot}.weight"] = rng.standard_normal((head_dim, columns), np.float32)
                found[f"{prefix}.{layer}.{slot}.bias"] = rng.standard_normal(head_dim, np.float32)
    return found


def checkpoint(path: Path, root: Any) -> Path:
    """A zip checkpoint of `root`, whose arrays are float32."""
    write_checkpoint(path, root)
    return path


def archive(
    path: Path,
    data_pkl: bytes,
    storages: dict[str, bytes] | None = None,
    *,
    method: int = zipfile.ZIP_STORED,
    more: dict[str, bytes] | None = None,
) -> Path:
    """A zip archive around any bytes as data.pkl."""
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("archive/data.pkl", data_pkl)
        for key, data in (storages or {}).items():
            file.writestr(f"archive/data/{key}", data)
        for name, data in (more or {}).items():
            file.writestr(name, data)
    return path


def members(path: Path) -> dict[str, bytes]:
    """The members of an archive by the name below its top folder."""
    with zipfile.ZipFile(path) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def repack(path: Path, target: Path, changes: dict[str, bytes | None], **options: Any) -> Path:
    """An archive with other bytes, or without them, under some names."""
    found = {**members(path), **changes}
    data = found.pop("data.pkl")
    assert data is not None
    more = {f"archive/{name}": content for name, content in found.items() if content is not None}
    return archive(target, data, more=more, **options)


def legacy(path: Path, root: bytes, order: list[str], storages: list[bytes], **parts: bytes) -> Path:
    """A legacy checkpoint around the pickle of its object; `parts` replaces the other pickles by name."""
    pickles = {
        "magic": pickle.dumps(0x1950A86A20F9469CFC6C, 2),
        "protocol": pickle.dumps(1001, 2),
        "system": pickle.dumps({"little_endian": True}, 2),
        "root": root,
        "keys": pickle.dumps(order, 2),
        **parts,
    }
    path.write_bytes(b"".join(pickles.values()) + b"".join(storages))
    return path


def weight_file(
    layers: int = 1,
    count: int = 12,
    *,
    dtype_code: int = 0,
    head_dim: int = 2,
    factor: int = 2,
    bias: bool = True,
    metadata: bytes = b"",
    seed: int = 0,
    header: dict[str, int] | None = None,
) -> bytes:
    """The bytes of a weight file; `header` replaces fields after the blocks were made."""
    fields: dict[str, int] = {
        "dtype_code": dtype_code,
        "num_layers": layers,
        "head_dim": head_dim,
        "hidden_size": head_dim * factor,
        "compression_factor": factor,
        "weight_count_per_layer": count,
        "metadata_size_bytes": len(metadata),
    }
    sink = io.BytesIO()
    words = kvcm.DTYPES[dtype_code].numpy_dtype
    kvcm.write_weight_file(
        sink,
        kvcm.WeightFileHeader(**fields),
        _blocks(layers * count, words, head_dim, factor, bias, seed),
        metadata=metadata,
    )
    data = bytearray(sink.getvalue())
    data[: kvcm.HEADER_BYTES] = kvcm.WeightFileHeader(**{**fields, **(header or {})}).pack()
    return bytes(data)


def _blocks(
    number: int, words: np.dtype[Any], head_dim: int, factor: int, bias: bool, seed: int
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any] | None]]:
    rng = np.random.default_rng(seed)
    for index in range(number):
        columns = head_dim * (factor if index % 3 == 0 else 1)
        weight = rng.standard_normal((head_dim, columns), np.float32)
        shift = rng.standard_normal(head_dim, np.float32)
        yield _as(weight, words), _as(shift, words) if bias else None


def _as(values: Floats, words: np.dtype[Any]) -> npt.NDArray[Any]:
    if words.kind == "u":
        return (values.view(np.uint32) >> np.uint32(16)).astype(words)
    return values.astype(words)
