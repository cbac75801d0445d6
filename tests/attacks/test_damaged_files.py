"""Every reader meets truncated, flipped and inconsistent files, and JSON that no encoder writes, via the command.

Whatever the damage: exit status 0, 1 or 2, one line of error, no exception, nothing half-written, an end in time.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from random import Random

import pytest
from hostile_files import quietly, samples

from kvmnn.formats import ARRAY_FORMATS

MORE = int(os.environ.get("KVMNN_ATTACKS", "1"))
"""So many times as many attacks: `make attack` asks for many more than `make test-all` has time for."""
CUTS, FLIPS, LIES = (10, 6, 9) if MORE == 1 else (25 * MORE, 15 * MORE, 12 * MORE)
SLOW = {"settings of a model", "tokenizer", "text", "ONNX", "dump, measured"}
"""Readers that take some 30 ms a file; they get a third."""
SECONDS = 10
TELLING = ("diff ", "gate ", "mnn replay ", "store match ", "store verify ")
"""Verbs whose exit status 1 is an answer, on standard output."""
DIGITS = b"9" * 5000
WRITTEN_LIES = [str(n).encode() for n in (0, 1, -1, 2, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 10**30)]
BINARY_LIES = [
    number.to_bytes(size, "little")
    for size in (4, 8)
    for number in (0, 1, 1 << 31, (1 << 31) - 1, 1 << 8 * size - 2, (1 << 8 * size) - 1)
]

HOSTILE_JSON = {
    "empty": b"",
    "deep list": b"[" * 200_000,
    "deep object": b'{"a":' * 200_000,
    "huge integer": b'{"a": ' + DIGITS + b"}",
    "list of a huge integer": b"[" + DIGITS + b"]",
    "lone surrogate": b'{"\\ud800": "\\udfff"}',
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "NUL": b'{"a": "\\u0000"}\0',
    "not a number": b'{"a": NaN, "b": -Infinity}',
    "huge float": b"[1e999999]",
    "list": b"[]",
    "word": b"null",
    "twice the same key": b'{"a": 1, "a": 2}',
}


def cut(data: bytes, slow: bool) -> Iterator[tuple[str, bytes]]:
    """Cut at every byte, or at every k-th."""
    for end in range(0, len(data), max(1, len(data) // (CUTS // 3 if slow else CUTS))):
        yield f"to {end} bytes", data[:end]


def flipped(data: bytes, slow: bool) -> Iterator[tuple[str, bytes]]:
    """Bytes flipped at random places."""
    rng = Random(len(data))
    for _ in range(FLIPS // 3 if slow else FLIPS):
        changed = bytearray(data)
        places = [rng.randrange(len(data)) for _ in range(rng.choice((1, 1, 2, 4)))]
        for place in places:
            changed[place] ^= rng.randrange(1, 256)
        yield f"at {places}", bytes(changed)


def lying(data: bytes, slow: bool) -> Iterator[tuple[str, bytes]]:
    """Numbers in text that say something else; in binary files, words that say very much or nothing.

    No lie is told again before all others were.
    """
    rng = Random(len(data))
    written = list(re.finditer(rb"\d+", data)) if data[:1] in b"{[" or data[:6] == b"\x93NUMPY" else []
    lies = WRITTEN_LIES if written else BINARY_LIES
    for lie in islice(cycle(rng.sample(lies, len(lies))), LIES // 3 if slow else LIES):
        if written:
            start, end = rng.choice(written).span()
        else:
            start = rng.randrange(max(1, len(data) - len(lie)))
            end = start + len(lie)
        yield f"{lie!r} at {start}", data[:start] + lie + data[end:]


DAMAGES = {"cut": cut, "flipped": flipped, "lying": lying}


class Reader:
    """A sample on disk, of which one file at a time is replaced."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.sample, self.folder = kind, samples()[kind], folder
        self.inside = folder / "in"
        self.calls = 0
        self.fill()

    def fill(self) -> None:
        """The files as they are, and no others."""
        shutil.rmtree(self.inside, ignore_errors=True)
        for name, data in self.sample.files.items():
            self.put(name, data)

    def restart(self) -> None:
        """Return to the sample as it is, without outputs of earlier calls."""
        shutil.rmtree(self.folder / "made", ignore_errors=True)
        self.fill()

    def put(self, name: str, data: bytes) -> None:
        path = self.inside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def run(self, command: str) -> tuple[int, str]:
        """One verb; everything that holds whatever its input is asserted here."""
        self.calls += 1
        out = self.folder / "made" / str(self.calls)
        out.parent.mkdir(exist_ok=True)
        inside, start = self.names(), time.monotonic()
        code, errors = quietly(command.format(**{"in": self.inside, "out": out}).split())
        assert time.monotonic() - start < SECONDS, "slow"
        assert code in (0, 1, 2), f"exit status {code}: {errors}"
        # Below an error there may be commands that would do.
        told = [
            line
            for line in errors.splitlines()
            if not line.startswith(("kvmnn: note: ", "kvmnn: warning: ", "  kvmnn "))
        ]
        assert all(line.startswith("kvmnn: error: ") for line in told), errors
        # verify has a line for each finding; others say on standard output what they found, inspect what is damaged
        is_answer = command.startswith(("verify ", *TELLING)) or (command.startswith("inspect ") and code == 1)
        assert len(told) == (code != 0) or is_answer, errors
        assert len(errors) < 4000, "a long line"
        if self.sample.is_written_to:
            self.fill()
        assert self.names() == inside, "the input's folder was changed"
        outputs = os.listdir(out.parent)
        left = [name for name in outputs if code != 0 and name.startswith(out.name)]
        left += [name for name in outputs if name.startswith(".") or ".tmp" in name]
        assert not left, f"left over: {left}"
        return code, errors

    def names(self) -> set[str]:
        """Files and folders of the input, but for the graphs that kvmnn.lm keeps next to a model."""
        found = {f"{folder}/{name}" for folder, folders, files in os.walk(self.inside) for name in (*folders, *files)}
        return {
            name for name in found if not re.fullmatch(rf"{re.escape(str(self.inside))}/[^/]*\.kvmnn-[^/]*\.onnx", name)
        }

    def commands(self, name: str) -> list[str]:
        """Those that read the file `name`: all of them, unless they name others of the damaged files."""
        others = [other for other in self.sample.damaged if other != name]
        return [c for c in self.sample.commands if not any(f"{{in}}/{other}" in c.split() for other in others)]


@pytest.fixture
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Reader:
    return Reader(request.param, tmp_path)


READERS = sorted(samples())


def test_samples_cover_every_file_kind() -> None:
    """A new reader is added here and in tests/support/hostile_files.py."""
    assert {name.split(",")[0] for name in READERS} >= {
        *("npy", "npz", "safetensors", "raw", "dump", "prefix", "live", "document of a prefix cache"),
        *("dense stream", "manifest of a dense stream", "configuration of a model"),
        *("frame", "manifest of a frame", "manifest of a bundle", "weights", "checkpoint", "scores", "plan"),
        *("rotation in a graph", "rotation in tables of a graph", "rotation in a configuration", "rotation in a .gguf"),
        *("plan of positions", "plan of an evaluation"),
        *("token ids", "settings of an MNN model", "store", "text of a store"),
        *("tables of a benchmark", "records of a benchmark", "round of gates"),
        *("session of llama.cpp", "cache of MLX", "cache of transformers"),
        "zarr",
        *(suffix[1:] for suffix in ARRAY_FORMATS),
    }


@pytest.mark.parametrize("reader", READERS, indirect=True)
def test_undamaged_sample_is_read(reader: Reader) -> None:
    for command in reader.sample.commands:
        assert reader.run(command)[0] == 0


def collect_problems(reader: Reader, attacks: Iterable[tuple[str, str, bytes, list[str]]]) -> list[str]:
    """Run each attack (file, damage, new bytes, commands); return those that raised, hung or left files."""
    problems = []
    for name, what, data, commands in attacks:
        reader.put(name, data)
        for command in commands:
            try:
                reader.run(command)
            except (Exception, SystemExit) as error:
                problems.append(f"{name} {what}, {command!r}: {error!r}")
                reader.restart()
                reader.put(name, data)
    return problems


# One item for each reader, not for each file and damage: those were 690, and an item costs pytest more than most
# attacks.
@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, indirect=True)
def test_damaged_files_are_read_or_refused(reader: Reader) -> None:
    """Every kind of damage in every file of every reader; `make attack` does many times as many."""
    problems = []
    for name in reader.sample.damaged:
        commands, whole = reader.commands(name), reader.sample.files[name]
        for what, damage in DAMAGES.items():
            reader.restart()
            attacks = (
                (name, f"{what} {place}", data, [commands[number % len(commands)]])
                for number, (place, data) in enumerate(damage(whole, reader.kind in SLOW))
            )
            problems += collect_problems(reader, attacks)
    assert not problems, "\n".join([f"{len(problems)} problems", *problems[:20]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "reader",
    [kind for kind in READERS if any(name.endswith(".json") for name in samples()[kind].damaged)],
    indirect=True,
)
def test_json_from_no_encoder_is_read_or_refused(reader: Reader) -> None:
    problems = []
    gc.disable()  # what earlier tests left would be finalized deep in a document, where no stack is left for it
    for name in reader.sample.damaged:
        if name.endswith(".json"):
            reader.restart()
            commands = reader.commands(name)  # each reads the document by the same function
            attacks = (
                (name, what, data, [commands[number % len(commands)]])
                for number, (what, data) in enumerate(HOSTILE_JSON.items())
            )
            problems += collect_problems(reader, attacks)
    gc.enable()
    assert not problems, "\n".join([f"{len(problems)} problems", *problems[:20]])
