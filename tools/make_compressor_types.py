"""Record what torch makes of weights of rare types: `python tools/make_compressor_types.py OUT.tar.xz`.

Needs torch 2.13 and safetensors, neither of which kvmnn or its tests use. The archive holds checkpoints and, for each
type of weight file, the bytes that the published converter's operations give (load, cast, make contiguous, hand to
numpy), or that one of them fails, as `kvcm-convert-vectors/1`. A ``.safetensors`` file, which that converter does not
read, goes through the same operations once the safetensors package has loaded it. With `--check DIR` the operations
are first compared with recorded conversions of the converter itself.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import pickle
import struct
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FIELDS = ("magic", "version", "dtype_code", "reserved", "num_layers", "num_heads", "head_dim", "hidden_size")
FIELDS += ("compression_factor", "min_seq_len", "weight_count_per_layer", "metadata_size_bytes")
PREFIX = "compress_tk"
SIDE = 16
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")

Tensor = Any
Root = dict[Any, Any]


# -- the converter's operations ---------------------------------------------------------------------------------------


def words(tensor: Tensor, dtype: str) -> bytes:
    cast = tensor.detach().to(dtype=DTYPES[dtype], device="cpu").contiguous()
    if dtype == "bf16":
        cast = cast.view(torch.uint16)
    return bytes(cast.numpy().tobytes())


def convert(path: Path, dtype: str, prefixes: tuple[str, ...] = (PREFIX,)) -> tuple[bytes, tuple[int, ...]]:
    """The weight file of compressors with slots 0, 3, 6, and its header."""
    state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu")
    for outer in (state.get("model_state_dict"), state):
        if isinstance(outer, dict) and isinstance(outer.get("compressor"), dict):
            state = outer["compressor"]
            break
    parts = [key.split(".") for key in state if key.startswith(tuple(f"{prefix}." for prefix in prefixes))]
    layers = 1 + max(int(part[1]) for part in parts if len(part) > 3 and part[1].isdecimal())
    rows, cols = state[f"{prefixes[0]}.0.0.weight"].shape
    header = (0x4B56434D, 1, list(DTYPES).index(dtype), 0, layers, 0, rows, cols, cols // rows, 2, 3 * len(prefixes), 0)
    blocks = [struct.pack("<IIHHIIIIIIII", *header)]
    for place in (f"{prefix}.{layer}.{slot}" for layer in range(layers) for prefix in prefixes for slot in (0, 3, 6)):
        weight, name = state[f"{place}.weight"], f"{place}.bias"
        has_bias = name in state and state[name].numel() == weight.shape[0]
        blocks += [struct.pack("<III", *weight.shape, has_bias), words(weight, dtype)]
        if has_bias:
            blocks.append(words(state[name].reshape(weight.shape[0]), dtype))
    return b"".join(blocks), header


# -- checkpoints ------------------------------------------------------------------------------------------------------


def state(weight: Tensor, bias: Tensor = None, **more: Any) -> Root:
    """One layer whose first weight and bias are given; the others are plain."""
    plain = torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE) / 7 - 11
    found = {f"{PREFIX}.0.{slot}.weight": plain for slot in (3, 6)}
    found[f"{PREFIX}.0.0.weight"] = weight
    if bias is not None:
        found[f"{PREFIX}.0.0.bias"] = bias
    return found | more


def codes() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).reshape(SIDE, SIDE)


def floats(seed: int = 0, *shape: int) -> Tensor:
    """Random magnitudes over the range of float32, with the values that are hard to round."""
    random = torch.Generator().manual_seed(seed)
    shape = shape or (SIDE, SIDE)
    values = torch.randn(shape, generator=random, dtype=torch.float64)
    values *= torch.exp2(torch.randint(-30, 18, shape, generator=random, dtype=torch.float64))
    hard = [0.0, -0.0, 65504, 65520, -65536, 2**-24, 2**-25, 1 + 2**-11, 1 + 2**-11 + 2**-40, float("inf"), 3e38]
    count = min(len(hard), values.numel())
    values.view(-1)[:count] = torch.tensor(hard[:count], dtype=torch.float64)
    return values


def complex_of(dtype: torch.dtype) -> Tensor:
    return torch.complex(floats(1), floats(2)).to(dtype)


def negated(values: Tensor) -> Tensor:
    return torch._neg_view(values)


def rare_floats() -> Iterator[tuple[str, Root]]:
    for name in FLOAT8:
        values = codes().view(getattr(torch, name))
        yield name, state(values, values[3])
        yield f"{name}_transposed_parameter", state(torch.nn.Parameter(values.t(), False), values[:, 5])
    for name in ("float4_e2m1fn_x2", "bits8"):
        yield name, state(codes().view(getattr(torch, name)))
        yield f"{name}_unused", state(floats().float(), other=codes().view(getattr(torch, name)))
    values = codes()
    yield "uint8_and_float8_of_one_storage", state(values, values.view(torch.float8_e5m2)[4])
    yield "float8_and_uint8_of_one_storage", state(values.view(torch.float8_e5m2), values[4])
    values = floats().float()
    values.note = torch.nn.Parameter(torch.zeros(2))
    parameter = torch.nn.Parameter(floats().half()[0])
    parameter.note = "attributes"
    yield "attributes", state(values, parameter)
    for name in ("uint16", "uint32", "uint64"):
        random = torch.randint(-(2**63), 2**63 - 1, (SIDE, SIDE), generator=torch.Generator().manual_seed(3))
        yield name, state(random.view(getattr(torch, name))[:, :SIDE].contiguous())


def complexes() -> Iterator[tuple[str, Root]]:
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        name = str(dtype).removeprefix("torch.")
        values = complex_of(dtype)
        yield name, state(values, values[2])
        yield f"{name}_strided", state(values.t(), values[:, 4])
        yield f"{name}_conj", state(values.conj(), values[1].conj())
        values = torch.where(values.real == 0, torch.ones_like(values), values)  # torch gives zeros either sign
        yield f"{name}_neg", state(negated(values), negated(values[1]))
        yield f"{name}_neg_conj", state(negated(values.conj()))
    values = complex_of(torch.complex64)
    yield "real_part", state(values.real, values.real[:, 1])
    yield "imaginary_part_of_conj", state(values.conj().imag, values.conj().imag[3])


def negatives() -> Iterator[tuple[str, Root]]:
    whole = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16, torch.uint64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, *whole, torch.float8_e5m2):
        name = str(dtype).removeprefix("torch.")
        byte = dtype in (torch.bool, torch.uint8, torch.int8, torch.float8_e5m2)
        values = codes().view(dtype) if byte and dtype is not torch.bool else floats().clamp(-30000, 30000).to(dtype)
        yield f"neg_{name}", state(negated(values))
        yield f"neg_{name}_transposed", state(negated(values).t())
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        name, values = str(dtype).removeprefix("torch."), floats(5, SIDE).to(dtype)
        yield f"neg_bias_{name}", state(floats().float(), negated(values))
        yield f"neg_bias_{name}_four_by_four_transposed", state(floats().float(), negated(values.view(4, 4)).t())
        yield f"neg_bias_{name}_column", state(floats().float(), negated(floats().to(dtype)[:, 3]))
        yield f"neg_bias_{name}_column_of_one", state(floats().float(), negated(floats().to(dtype)[:, 3:4]))
        yield f"neg_bias_{name}_too_long", state(floats().float(), negated(floats(5, SIDE + 1).to(dtype)))


def without_floats() -> Iterator[tuple[str, Root]]:
    plain = floats().float().clamp(-9, 9)
    scales, zeros = torch.full((SIDE,), 0.25), torch.zeros(SIDE, dtype=torch.int64)
    kinds = {
        "quantised_tensor": lambda t: torch.quantize_per_tensor(t, 0.1, 3, torch.quint8),
        "quantised_qint32": lambda t: torch.quantize_per_tensor(t, 0.1, 3, torch.qint32),
        "quantised_channel": lambda t: torch.quantize_per_channel(t, scales[: len(t)], zeros[: len(t)], 0, torch.qint8),
        "sparse": lambda t: t.to_sparse(),
        "meta": lambda t: t.to("meta"),
    }
    for name, make in kinds.items():
        yield name, state(make(plain))
        yield f"{name}_unused", state(plain, other=make(plain))
        yield f"{name}_bias", state(plain, make(plain[0]))
        yield f"{name}_bias_too_short", state(plain, make(plain[0, :5]))
    yield "sparse_csr", state(plain.to_sparse_csr())
    yield "bias_none", state(plain) | {f"{PREFIX}.0.0.bias": None}
    yield "number_as_key", {"compressor": {**state(plain), 5: plain}}


class Flags:
    """Pickles as a tensor with these flags, which torch.save would not write."""

    def __init__(self, tensor: Tensor, flags: Any) -> None:
        self.tensor, self.flags = tensor, flags

    def __reduce_ex__(self, _: Any) -> Any:
        function, arguments = self.tensor.__reduce_ex__(2)
        return function, (*arguments[:6], self.flags)


def flags() -> Iterator[tuple[str, Root]]:
    values = floats().float()
    yield "flag_neg_false", state(Flags(values.double(), {"neg": False}))
    yield "flag_unknown", state(Flags(values, {"something": True}))
    yield "flag_conj_of_real", state(Flags(values, {"conj": True}))
    yield "flag_none", state(Flags(values, None))


# -- files before torch 0.4, by hand ----------------------------------------------------------------------------------


class Old:
    """A pickle as Python 2 and torch below 0.4 wrote it, protocol 2."""

    def __init__(self) -> None:
        self.roots: dict[str, Tensor] = {}

    def storage(self, kind: str, key: str, root: Tensor, view: tuple[str, int, int] | None = None) -> bytes:
        self.roots.setdefault(key, root)
        part = b"N" if view is None else b"(" + _string(view[0]) + _int(view[1]) + _int(view[2]) + b"t"
        name = b"ctorch\n" + kind.encode() + b"Storage\n"
        return b"(" + _string("storage") + name + _string(key) + _string("cpu") + _int(root.numel()) + part + b"tQ"

    def file(self, pairs: list[tuple[str, bytes]]) -> bytes:
        items = b"".join(b"](" + _string(key) + value + b"e" for key, value in pairs)
        root = b"\x80\x02ccollections\nOrderedDict\n](" + items + b"e\x85R."
        order = sorted(self.roots)
        keys = b"\x80\x02](" + b"".join(_string(key) for key in order) + b"e."
        system = b"\x80\x02}(" + _string("little_endian") + b"\x88" + _string("protocol_version") + _int(1001) + b"u."
        head = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + system + root + keys
        return head + b"".join(struct.pack("<q", v.numel()) + v.numpy().tobytes() for v in map(self.roots.get, order))


def _string(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


def _int(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _ints(*values: int) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"


def _rebuilt(storage: bytes, offset: int, shape: bytes, strides: bytes) -> bytes:
    return b"ctorch._utils\n_rebuild_tensor\n(" + storage + _int(offset) + shape + strides + b"tR"


def _with_state(kind: str, storage: bytes, offset: int, shape: bytes, strides: bytes) -> bytes:
    return b"ctorch\n" + kind.encode() + b"\n)\x81(" + storage + _int(offset) + shape + strides + b"tb"


def old_files() -> Iterator[tuple[str, bytes]]:
    square, row, lines = _ints(SIDE, SIDE), _ints(SIDE), _ints(SIDE, 1)
    area = SIDE * SIDE
    root = floats(7, 4, SIDE, SIDE).float().reshape(-1)
    names = [f"{PREFIX}.0.{slot}" for slot in (0, 3, 6)]

    def views(change: Callable[[Old, list[tuple[str, bytes]]], None] | None = None) -> bytes:
        old = Old()
        pairs = []
        for number, name in enumerate(names):
            part = old.storage("Float", "root", root, (f"view{number}", number * area, area))
            pairs.append((f"{name}.weight", _rebuilt(part, 0, square, lines)))
            short = old.storage("Float", "root", root, (f"bias{number}", 3 * area + number * SIDE, 2 * SIDE))
            pairs.append((f"{name}.bias", _rebuilt(short, 3, row, _ints(1))))
        if change is not None:
            change(old, pairs)
        return old.file(pairs)

    def again(old: Old, pairs: list[tuple[str, bytes]]) -> None:
        part = old.storage("Float", "root", root, ("view0", 0, area))
        pairs[2] = (pairs[2][0], _rebuilt(part, 0, square, _ints(1, SIDE)))

    def wholes(old: Old, pairs: list[tuple[str, bytes]]) -> None:
        pairs[0] = (pairs[0][0], _rebuilt(old.storage("Float", "root", root), 5, square, lines))

    def double(old: Old, pairs: list[tuple[str, bytes]]) -> None:
        other = floats(8).reshape(-1)
        part = old.storage("Double", "wide", other, ("wide part", 0, area))
        pairs[0] = (pairs[0][0], _rebuilt(part, 0, square, lines))

    yield "views", views()
    yield "views_one_twice", views(again)
    yield "views_beside_their_root", views(wholes)
    yield "views_of_float64", views(double)

    def classes(kind: str, storage: str, values: Tensor, wrap: bool = False) -> bytes:
        old = Old()
        pairs = []
        for number, name in enumerate(names):
            made = _with_state(kind, old.storage(storage, f"k{number}", values), 0, square, lines)
            if wrap:
                made = b"ctorch.nn.parameter\nParameter\n" + made + b"\x85R(\x88\x89Ntb"
            pairs.append((f"{name}.weight", made))
        return old.file(pairs)

    whole = floats(9).float().reshape(-1)
    yield "float_tensors", classes("FloatTensor", "Float", whole)
    yield "plain_tensors_as_parameters", classes("Tensor", "Float", whole, wrap=True)
    yield "half_tensors", classes("HalfTensor", "Half", whole.half())
    yield "int_tensors", classes("IntTensor", "Int", torch.arange(area, dtype=torch.int32) - 99)
    yield "class_and_storage_differ", classes("FloatTensor", "Double", whole.double())
    yield "cuda_tensors", classes("cuda.FloatTensor", "Float", whole)


# -- the archive ------------------------------------------------------------------------------------------------------


def files(folder: Path) -> Iterator[Path]:
    """Write every checkpoint."""
    zips = [*rare_floats(), *complexes(), *negatives(), *without_floats(), *flags()]
    for name, root in zips:
        path = folder / f"{name}.pth"
        torch.save(root, path)
        yield path
    for name, root in zips:
        if name in (
            "float8_e5m2",
            "complex64",
            "complex128_conj",
            "neg_float32_transposed",
            "quantised_tensor",
            "sparse",
        ):
            path = folder / f"legacy_{name}.pth"
            torch.save(root, path, _use_new_zipfile_serialization=False)
            yield path
        if name in ("uint16", "complex32", "complex64", "complex128", "neg_int16", "float8_e4m3fn", "real_part"):
            path = folder / f"big_endian_{name}.pth"
            path.write_bytes(_as_big_endian((folder / f"{name}.pth").read_bytes()))
            yield path
        if name in (*FLOAT8, "complex64", "uint16", "uint64", "float4_e2m1fn_x2", "float4_e2m1fn_x2_unused"):
            path = folder / f"{name}.safetensors"
            save_file({key: value.clone() for key, value in root.items()}, path)
            yield path
    for name, data in old_files():
        path = folder / f"old_{name}.pth"
        path.write_bytes(data)
        yield path


def _as_big_endian(data: bytes) -> bytes:
    """The same archive with another byte order record: its words then mean other numbers."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(zipfile.ZipInfo(name), b"big" if name.endswith("/byteorder") else old.read(name))
    return made.getvalue()


def case(folder: Path, path: Path, dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": f"{path.stem}{'_safetensors' if path.suffix == '.safetensors' else ''}_to_{dtype}",
        "scenario": path.stem,
        "pth": path.name,
        "pth_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "options": ["--dtype", dtype, "--prefix-order", PREFIX],
    }
    try:
        data, header = convert(path, dtype)
    except Exception as exc:
        return found | {"expect": {"status": "error", "exc": type(exc).__name__, "category": "error"}}
    target = folder / f"{found['id']}.bin"
    target.write_bytes(data)
    shape = f"hidden_size={header[7]}, head_dim={header[6]}"
    line = f"Wrote <OUT> (layers={header[4]}, weights/layer=3, dtype={dtype}, factor={header[8]}, {shape})"
    expect = {
        "status": "ok",
        "stdout": line,
        "bin": target.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "header": dict(zip(FIELDS, header, strict=True)),
    }
    return found | {"expect": expect, "nan": _has_nan(data[44:], dtype)}


def _has_nan(data: bytes, dtype: str) -> bool:
    """Whether any word may be NaN, in which case its bits are not promised; block heads do no harm here."""
    if dtype == "bf16":
        return bool((np.frombuffer(data, "<u2") & 0x7FFF > 0x7F80).any())
    return bool(np.isnan(np.frombuffer(data[: len(data) // 4 * 4], "<f2" if dtype == "fp16" else "<f4")).any())


def check(folder: Path) -> int:
    """Compare `convert` with conversions recorded from the published converter."""
    compared = 0
    for entry in json.loads((folder / "conv_index.json").read_text())["cases"]:
        options = dict(zip(entry["options"][::2], entry["options"][1::2], strict=True))
        if entry["expect"]["status"] != "ok" or not set(options) <= {"--dtype", "--prefix-order"}:
            continue
        names = options.get("--prefix-order", "compress_tk,compress_tv,compress_ik,compress_iv").split(",")
        prefixes = tuple(name.strip() for name in names if name.strip())
        if entry.get("nan"):
            continue
        data, _ = convert(folder / entry["pth"], options.get("--dtype", "fp16"), prefixes)
        if data != (folder / entry["expect"]["bin"]).read_bytes():
            raise SystemExit(f"{entry['id']}: other bytes than the published converter's")
        compared += 1
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="OUT.tar.xz")
    parser.add_argument("--check", type=Path, metavar="DIR", help="kvcm-convert-vectors/1 of the converter itself")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.check is not None:
        print(f"{check(options.check)} recorded conversions are the same")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cases = [case(folder, path, dtype) for path in list(files(folder)) for dtype in DTYPES]
        index = {
            "format": "kvcm-convert-vectors/1",
            "reference": "the published converter's operations",
            "torch": torch.__version__,
            "cases": cases,
        }
        (folder / "index.json").write_text(json.dumps(index, indent=1))
        options.target.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(options.target, "w:xz", preset=9) as archive:
            for path in sorted(folder.iterdir()):
                entry = tarfile.TarInfo(path.name)
                entry.size = path.stat().st_size
                with path.open("rb") as file:
                    archive.addfile(entry, file)
    done = sum(entry["expect"]["status"] == "ok" for entry in cases)
    print(f"{len(cases)} cases, {done} converted, {len(cases) - done} refused")


if __name__ == "__main__":
    main()
