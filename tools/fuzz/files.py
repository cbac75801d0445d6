"""Hostile files for tools/fuzz/run.py: every kind of input the command takes, damaged, through the command itself."""

from __future__ import annotations

import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from damage import damaged
from hostile_files import array_inputs, quietly

NUMBERS = (
    b"0",
    b"1",
    b"-1",
    b"2",
    b"65536",
    b"4294967296",
    b"9223372036854775807",
    b"1e9",
    b"null",
    b'"2"',
    b"[2]",
    b"1.5",
)
WORDS = (
    b'"fp16"',
    b'"<f8"',
    b'"../x"',
    b'"/etc/passwd"',
    b"true",
    b"null",
    b"{}",
    b"[]",
    b'""',
    b'"\\u0000"',
    b'"\xff"',
)


@cache
def originals() -> dict[str, dict[str, bytes]]:
    """Valid inputs by name: relative file names and contents."""
    rng = np.random.default_rng(1)
    half = rng.normal(size=(3, 25, 32)).astype(np.float16)
    return array_inputs(half, rng.normal(size=(4, 6)).astype(np.float32), 4096)


def make(rng: Random) -> dict[str, Any]:
    name = rng.choice(sorted(originals()))
    files = dict(originals()[name])
    made: dict[str, Any] = {"input": name}
    for file in rng.choices(sorted(files), k=rng.choice((1, 1, 2))):
        data = files.get(file)
        if data is None:
            continue
        if rng.random() < 0.04:
            del files[file]
        elif rng.random() < 0.6 and re.search(rb"[{:]", data[:400]):
            files[file] = edited(rng, data)
        else:
            files[file] = damaged(rng, data)
    return {**made, **files}


def edited(rng: Random, data: bytes) -> bytes:
    """JSON or a numpy header with a number, a string or a key changed."""
    text = list(re.finditer(rb"-?\b\d+\b" if rng.random() < 0.5 else rb'"[^"]*"|\'[^\']*\'', data[:6000]))
    if not text:
        return data
    found = rng.choice(text)
    new = rng.choice(NUMBERS if found.group()[:1] not in (b'"', b"'") else (*WORDS, *NUMBERS, rng.choice(text).group()))
    if data[:6] == b"\x93NUMPY":  # keep the header's length, so that it is parsed at all
        new = new.replace(b'"', b"'")[: len(found.group())].ljust(len(found.group()))
    return data[: found.start()] + new + data[found.end() :]


def check(rng: Random, made: dict[str, Any]) -> tuple[int, int]:
    """Each verb on the input: exit code 0, 1 or 2, one line of error at most, and never a traceback."""
    name = made["input"]
    folder = Path(tempfile.mkdtemp(prefix="kvmnn-files-"))
    try:
        where = folder / name
        (where if name.endswith("/") else folder).mkdir(exist_ok=True)
        for file, data in made.items():
            if file != "input":
                ((where if name.endswith("/") else folder) / file).write_bytes(data)
        path, out = str(where), str(folder / "out")
        dtype = rng.choice(([], ["--dtype", "fp16"], ["--dtype", "fp32"]))
        if name.startswith(("bundle", "lone")):
            extension = rng.choice((".npy", ".npz", ".safetensors", "", "/"))
            verbs = [
                ["decode", path, "-o", out + extension, "--max-input-bytes", "16M", *dtype],
                ["inspect", path, *rng.choice(([], ["--json"]))],
                ["verify", path],
            ]
        else:
            verbs = [
                ["encode", path, "-o", out + "/", "--chunk-bytes", rng.choice(("64M", "4096", "0")), *dtype],
                ["encode", path, "-o", out + ".frame", "--effort", "fast", *dtype],
            ]
        good = 0
        for argv in verbs:
            code, errors = quietly(argv)
            good += code == 0
            assert code in (0, 1, 2), f"{argv}: exit code {code}: {errors}"
            assert "Traceback" not in errors and "out of memory" not in errors, f"{argv}: {errors}"
            assert code == 0 or errors.startswith("kvmnn: error: ") or code == 2 or errors.count("\n") == 1, (
                argv,
                errors,
            )
            left = [p.name for p in folder.iterdir() if p.name.startswith(".") or ".tmp" in p.name]
            assert not left, f"{argv}: leaves {left}"
            if code != 0 and argv[0] in ("encode", "decode"):
                made_out = [
                    p.name for p in folder.iterdir() if p.name.startswith("out") and p.name not in before(verbs, argv)
                ]
                assert not made_out, f"{argv}: failed and left {made_out}"
        return len(verbs), good
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def before(verbs: list[list[str]], argv: list[str]) -> set[str]:
    """Output names of the verbs that ran before this one."""
    names = {Path(v[v.index("-o") + 1]).name for v in verbs[: verbs.index(argv)] if "-o" in v}
    return names | {name + ".json" for name in names}
