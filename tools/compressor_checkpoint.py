"""Make a KV-compressor's training checkpoint as torch.save writes it, without torch.

`python tools/compressor_checkpoint.py OUT [--layers N] [--head-dim D] [--factor F]`: random float32 weights and biases
of four compressors a layer, the unused attention weights, and AdamW's two moments for each of them. The defaults give
LLaVA-1.5-7B's compressor, about 178 MB.
"""

from __future__ import annotations

import argparse
import io
import pickle
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

PREFIXES = ("compress_tk", "compress_tv", "compress_ik", "compress_iv")
SLOTS = (0, 3, 6)
_ALIGNMENT = 64

Floats = npt.NDArray[np.float32]


class _Named:
    """Pickles as a module-level name that need not exist."""

    def __init__(self, module: str, name: str) -> None:
        self.line = f"c{module}\n{name}\n".encode()


REBUILD = _Named("torch._utils", "_rebuild_tensor_v2")
FLOAT_STORAGE = _Named("torch", "FloatStorage")
ORDERED_DICT = _Named("collections", "OrderedDict")


class TensorPickler(pickle._Pickler):
    """Pickles float32 arrays as torch does; `storages` are the arrays in the order of their keys."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[Floats] = []

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        if isinstance(obj, _Named):
            if known := self.memo.get(id(obj)):
                return self.write(self.get(known[0]))
            self.write(obj.line)
            return self.memoize(obj)
        if isinstance(obj, np.ndarray):
            return self._save_array(obj)
        return super().save(obj, save_persistent_id)

    def _save_array(self, array: Floats) -> None:
        key = str(len(self.storages))
        self.storages.append(array)
        strides = tuple(stride // array.itemsize for stride in array.strides)
        self.save(REBUILD)
        self.write(pickle.MARK)
        self.save(("storage", FLOAT_STORAGE, key, "cpu", array.size))
        self.write(pickle.BINPERSID)
        for value in (0, array.shape, strides, False):
            self.save(value)
        self.save(ORDERED_DICT)
        self.write(pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.TUPLE + pickle.REDUCE)


def parameters(layers: int, head_dim: int, factor: int, seed: int = 0) -> Iterator[tuple[str, Floats]]:
    """Names and values of all parameters, in the order of a state_dict."""
    rng = np.random.default_rng(seed)
    for prefix in PREFIXES:
        for layer in range(layers):
            for slot in SLOTS:
                columns = head_dim * factor if slot == SLOTS[0] else head_dim
                scale = np.float32(columns**-0.5)
                yield f"{prefix}.{layer}.{slot}.weight", rng.standard_normal((head_dim, columns), np.float32) * scale
                yield f"{prefix}.{layer}.{slot}.bias", rng.standard_normal(head_dim, np.float32) * scale
    for layer in range(layers):
        yield f"attention.{layer}.weight", rng.standard_normal((1, head_dim), np.float32)
        yield f"attention.{layer}.bias", rng.standard_normal(1, np.float32)


def training_state(weights: dict[str, Floats]) -> dict[str, Any]:
    """What a training loop saves: weights, AdamW's state, scheduler and loss."""
    moments = {
        number: {"step": np.float32([100.0]), "exp_avg": value * np.float32(0.01), "exp_avg_sq": value * value}
        for number, value in enumerate(weights.values())
    }
    groups = [{"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": list(moments)}]
    return {
        "epoch": 3,
        "model_state_dict": {"compressor": weights},
        "optimizer_state_dict": {"state": moments, "param_groups": groups},
        "scheduler_state_dict": {"last_epoch": 3, "best": 0.25},
        "loss": 0.25,
    }


def write_checkpoint(path: Path, root: Any, *, name: str = "archive") -> None:
    """Write an object of float32 arrays in torch's zip layout: stored, each storage aligned to 64 bytes."""
    with path.open("wb") as file:
        directory: list[bytes] = []
        pickled = io.BytesIO()
        pickler = TensorPickler(pickled)
        pickler.dump(root)
        _member(file, directory, f"{name}/data.pkl", pickled.getvalue())
        _member(file, directory, f"{name}/byteorder", b"little")
        for key, array in enumerate(pickler.storages):
            _member(file, directory, f"{name}/data/{key}", array.tobytes())
        _member(file, directory, f"{name}/version", b"3\n")
        begin = file.tell()
        file.write(b"".join(directory))
        size = file.tell() - begin
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, len(directory), len(directory), size, begin, 0))


def _member(file: BinaryIO, directory: list[bytes], name: str, data: bytes) -> None:
    offset = file.tell()
    crc = zlib.crc32(data)
    encoded = name.encode()
    padding = -(offset + 30 + len(encoded) + 4) % _ALIGNMENT
    extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    numbers = (20, 0, 0, 0, 0x21, crc, len(data), len(data), len(encoded))
    file.write(struct.pack("<4s5H3L2H", b"PK\3\4", *numbers, len(extra)) + encoded + extra + data)
    directory.append(struct.pack("<4sH5H3L5H2L", b"PK\1\2", 20, *numbers, 0, 0, 0, 0, 0, offset) + encoded)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--factor", type=int, default=5)
    options = parser.parse_args(argv)
    weights = dict(parameters(options.layers, options.head_dim, options.factor))
    write_checkpoint(options.output, training_state(weights))


if __name__ == "__main__":
    main()
