"""Type strings of foreign files never reach numpy's parser, which crashes or raises anything for some of them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from random import Random

import numpy as np
import pytest
from repository import ROOT

from kvmnn.dtypes import parse_numpy_type
from kvmnn.errors import ArrayTypeError

FATAL = ["M8[s/0]", "m8[s/0]", "<M8[3s/0]", "M8[ns/00]"]
"""End the process of numpy 2.4 by SIGFPE."""
ODD = [
    "", "<", "|", ",", "<,", "f", "<f", "f0", "<f3", "f02", "<f2,", "<f2,<f2", "(2,3)<f2", "(99999999999,)f2", "2f2",
    "V0", "V999999999999", "S-1", "U99999999999999999999", "M8[", "M8[s", "M8[2s/3]", "m8[\0]", "O", "|O8",
    "object", "a5", "{'names':['a'],'formats':['f2']}", "datetime64[s/0]", "void", "float128",
    "bfloat16", "float16\0",
    "\u0664", "<f\u0662", "f2" * 4000, "(" * 300 + "f2",
]  # fmt: skip
READ = """
import sys
import kvmnn
from kvmnn.errors import KvmnnError
from kvmnn.formats.mnn.token_ids import load_token_ids
for path in sys.argv[1:]:
    print(path, file=sys.stderr, flush=True)  # the last one, if a signal ends the process
    for open_it in (kvmnn.open, load_token_ids):
        try:
            open_it(path)
            print(path, "read")
        except KvmnnError as error:
            assert chr(10) not in str(error) and len(str(error)) < 600, str(error)
"""
"""Anything but a KvmnnError, and a signal above all, ends it."""


def npy(descr: object, literal: str | None = None) -> bytes:
    """A file of two fp16 words whose header has another type."""
    text = f"{{'descr': {literal or repr(descr)}, 'fortran_order': False, 'shape': (2,)}}\n".encode(
        "latin-1", "replace"
    )
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(4)


def zarr(folder: Path, descr: object) -> Path:
    """A Zarr array of version 2 with a type."""
    folder.mkdir()
    document = {"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": descr, "compressor": None, "fill_value": 0}
    (folder / ".zarray").write_text(json.dumps(document | {"order": "C", "filters": None}))
    (folder / "0").write_bytes(bytes(4))
    return folder


def damaged(seed: int) -> list[str]:
    """Type strings, cut, joined and with letters changed."""
    rng = Random(seed)
    seeds = [*FATAL, "<f2", ">u4", "|V2", "<M8[ns]", "<m8[3D]", "float16", "|S5", "<U3", "datetime64[us]", "c16"]
    letters = "<>|=fiuVbcSUOMm0123456789[],/() snDhu"
    found = []
    for _ in range(120):
        text = list("".join(rng.choices(seeds, k=rng.choice((1, 1, 2)))))
        for _ in range(rng.randrange(3)):
            text.insert(rng.randrange(len(text) + 1), rng.choice(letters))
        del text[rng.randrange(len(text) + 1) :][rng.choice((0, 0, 3)) :]
        found.append("".join(text))
    return found


def read(paths: list[Path]) -> list[str]:
    """What a process that opens the files prints; it must end by itself."""
    run = subprocess.run(
        [sys.executable, "-c", READ, *map(str, paths)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, (run.returncode, run.stderr[-2000:])
    return run.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_npy_hostile_types_never_end_the_process(tmp_path: Path, seed: int) -> None:
    paths = []
    for number, descr in enumerate([*FATAL, *ODD, *damaged(seed)]):
        path = tmp_path / f"{number}.npy"
        path.write_bytes(npy(descr))
        paths += [path, zarr(tmp_path / f"{number}.zarr", descr)]
        with zipfile.ZipFile(tmp_path / f"{number}.npz", "w") as archive:
            archive.writestr("a.npy", npy(descr))
        paths.append(tmp_path / f"{number}.npz")
    read(paths)


LITERALS = [
    "None", "3", "0x" + "f" * 9000, "[('a', '<f2')]", "[('a', 'M8[s/0]')]", "('<f2', (2,))", "{1: 2}", "b'<f2'",
    "-" * 9000 + "1", "[" * 150 + "]" * 150, "'<f2' '<M8[s/0]'", "1e999", "(0x" + "f" * 9000 + ",)",
]  # fmt: skip


def test_npy_header_other_literals_are_refused(tmp_path: Path) -> None:
    for number, literal in enumerate(LITERALS):
        (tmp_path / f"{number}.npy").write_bytes(npy(None, literal))
    assert read([tmp_path / f"{number}.npy" for number in range(len(LITERALS))]) == []


@pytest.mark.slow
def test_npy_header_invalid_shapes_are_refused(tmp_path: Path) -> None:
    for number, shape in enumerate(
        ["(0x" + "f" * 9000 + ",)", "(True,)", "((0x" + "f" * 9000 + ",),)", "(2.0,)", "(-1,)"]
    ):
        text = f"{{'descr': '<f2', 'fortran_order': False, 'shape': {shape}}}\n".encode()
        (tmp_path / f"{number}.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    assert read(sorted(tmp_path.iterdir())) == []


def test_parse_numpy_type_equals_numpy() -> None:
    for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16", "b1", "V2", "V7"):
        for order in "<>|=":
            dtype = np.dtype(order + kind)
            assert parse_numpy_type(dtype.str) == dtype
            assert parse_numpy_type(order + kind) == dtype
    assert parse_numpy_type("float16") == np.float16
    with pytest.raises(ArrayTypeError, match=r"pickles"):
        parse_numpy_type(np.dtype(object).str)
    for dtype in (np.dtype("M8[ns]"), np.dtype("U5"), np.dtype("S5"), np.longdouble):
        with pytest.raises(ArrayTypeError, match=r"is none that frames hold"):
            parse_numpy_type(np.dtype(dtype).str)


def test_npy_header_equals_numpy(tmp_path: Path) -> None:
    """Every type, order and shape that both accept."""
    from kvmnn.formats.npy import NpyHeader

    rng = Random(3)
    for kind in ("<f2", ">f4", "<f8", "|u1", "<i8", "|b1", "<c16", "|V2"):
        array = np.empty([rng.randrange(4) for _ in range(rng.randrange(5))], kind)
        array = np.asfortranarray(array) if rng.random() < 0.5 else array
        buffer = io.BytesIO()
        np.save(buffer, array)
        header = NpyHeader(buffer.getvalue(), "a")
        assert (header.shape, header.dtype) == (array.shape, array.dtype)
        assert (header.order == "F") == np.isfortran(array)
        assert header.header_bytes + header.nbytes == len(buffer.getvalue())
    old = b"{'descr': '<f2', 'fortran_order': False, 'shape': (3L, 4L), }"
    assert NpyHeader(b"\x93NUMPY\x01\x00" + len(old).to_bytes(2, "little") + old, "a").shape == (3, 4)


def test_npy_header_is_parsed_by_no_other_module() -> None:
    """``np.load`` and numpy's header readers parse type strings themselves."""
    # these map the temporary files that the same run has written
    own_files = {"kvmnn/lm/warm_start.py", "kvmnn/evaluation/replay.py"}
    for path in (ROOT / "kvmnn").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        is_own = path.relative_to(ROOT).as_posix() in own_files
        assert is_own or not any(word in text for word in ("np.load(", "read_array_header", "open_memmap")), path
