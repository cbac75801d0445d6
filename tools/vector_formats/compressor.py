"""`kvcm-convert-vectors/1` and `kvcm-corrupt-vectors/1`: compressor checkpoints to weight files, and broken files.

Every case runs through the command line, which is what people use. While it runs, an audit hook watches for what a
pickle could start; anything of that kind fails the case.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvmnn.cli.entry_point import EXIT_USAGE, main
from kvmnn.compressor import kvcm
from kvmnn.compressor.kvcm import to_float32

from .common import CaseResult, Checker, run_list, sha256, unknown_lists

_CONVERT_FIELDS = {"id", "scenario", "pth", "pth_sha256", "options", "expect", "lenient", "nan", "security"}
_EXPECT_FIELDS = {
    *("status", "stdout", "bin", "sha256", "size", "header"),
    # what the reference did where it failed
    *("exc", "category", "partial_output_bytes"),
}
_LENIENT_FIELDS = {"note", "bin", "sha256", "size", "header"}
_CORRUPT_FIELDS = {
    *("name", "file", "sha256", "size", "verdict", "reason", "reasons_any_of", "level"),
    *("ref_csrc_loader", "ref_src_loader"),
}
_NO_REASON = ("valid", "undetectable")


def run_convert(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    yield from run_list(_named(index, "id"), "cases", lambda case, check: _convert_case(folder, case, check))
    yield from unknown_lists(index, ("cases",))


def run_corrupt(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    yield from run_list(_named(index, "file"), "cases", lambda case, check: _corrupt_case(folder, case, check))
    yield from unknown_lists(index, ("cases",))


def _named(index: dict[str, Any], key: str) -> list[Any]:
    return [
        {**case, "name": str(case.get(key, ""))} if isinstance(case, dict) else case for case in index.get("cases", ())
    ]


# -- conversion -------------------------------------------------------------------------------------------------------


def _convert_case(folder: Path, case: dict[str, Any], check: Checker) -> None:
    expect, lenient = case["expect"], case.get("lenient")
    check.known_fields(_CONVERT_FIELDS)
    check.equal("unknown expectations", sorted(set(expect) - _EXPECT_FIELDS), [])
    check.equal("unknown lenient expectations", sorted(set(lenient or ()) - _LENIENT_FIELDS), [])
    source = folder / (case["pth"] or "missing.pth")
    if case["pth"] is not None:
        check.field("pth_sha256", sha256(source.read_bytes()))
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "out.bin"
        arguments = [str(source), str(target), *case["options"], "--as-reference"]
        done = command("compressor", "convert", *arguments)
        check.equal("what the checkpoint started", done.started, [])
        if expect["status"] == "ok":
            check.equal("exit code", done.code, 0)
            lines = done.stdout.replace(str(target), "<OUT>").splitlines()
            check.equal("stdout", lines[0] if lines else "", expect["stdout"])
            _output(folder, expect, target, check, nan=case.get("nan", False))
        elif expect["status"] != "error":
            check.problems.append(f"unknown status {expect['status']!r}")
        elif lenient is not None:
            check.equal("exit code", done.code, 0)
            check.equal("a note on the extension", "kvmnn: note: " in done.stderr, True)
            _output(folder, lenient, target, check, nan=False)
        else:
            check.equal("refused", done.code in (1, EXIT_USAGE), True)
            check.equal("exit code of bad usage", done.code == EXIT_USAGE, expect["category"] == "bad_option")
            check.equal("one line of error", done.stderr.count("\n"), 1)
        if expect["status"] == "error" and lenient is None:
            check.equal("files left over", os.listdir(scratch), [])
        else:
            told = command("compressor", "convert", *arguments, "--json", "--force")
            check.equal("header", json.loads(told.stdout)["header"], (lenient or expect)["header"])


def _output(folder: Path, expect: dict[str, Any], target: Path, check: Checker, *, nan: bool) -> None:
    if not target.exists():
        check.problems.append("no output was written")
        return
    made, expected = target.read_bytes(), (folder / expect["bin"]).read_bytes()
    check.equal("size", len(made), expect["size"])
    if nan:
        check.equal("bytes but those of NaN", _without_nan(made), _without_nan(expected))
        return
    check.equal("bytes", made == expected, True)
    check.equal("sha256", sha256(made), expect["sha256"])


def _without_nan(data: bytes) -> tuple[Any, ...]:
    """A file's header and blocks, with one NaN for all."""
    file = kvcm.parse_weight_file(data)
    blocks = []
    for block in file.iter_blocks():
        for words in (block.weight, block.bias):
            if words is not None:
                bits = np.ascontiguousarray(words).view(f"u{words.itemsize}").copy()
                bits[np.isnan(to_float32(words))] = np.iinfo(bits.dtype).max
                blocks.append(bits.tobytes())
    return file.header, file.metadata, blocks


# -- corrupt files ----------------------------------------------------------------------------------------------------


def _corrupt_case(folder: Path, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_CORRUPT_FIELDS)
    path = folder / case["file"]
    data = path.read_bytes()
    check.field("size", len(data))
    check.field("sha256", sha256(data))
    done = command("compressor", "verify", str(path), "--json")
    document = json.loads(done.stdout)
    if not check.field("verdict", document["verdict"]):
        return
    accepted = document["verdict"] != "reject"
    check.equal("exit code", done.code, 0 if accepted else 1)
    _reasons(case, document, check)
    if accepted:
        for loader in ("ref_csrc_loader", "ref_src_loader"):
            check.equal(f"verdict of {loader} on what kvmnn takes", "accept", case[loader]["verdict"])
        file, again = kvcm.read_weight_file(path), io.BytesIO()
        kvcm.write_weight_file(
            again, file.header, ((b.weight, b.bias) for b in file.iter_blocks()), metadata=file.metadata
        )
        check.equal("written again", again.getvalue() == data, True)


def _reasons(case: dict[str, Any], document: dict[str, Any], check: Checker) -> None:
    """The reason that comes first must be one of those allowed, and the expected one among all that are given."""
    found, allowed = document["reasons"], case["reasons_any_of"]
    if case["reason"] in _NO_REASON:
        check.equal("reasons", found, [])
        return
    check.equal("a reason", bool(found), True)
    if "any" not in allowed and case["reason"] != "any":
        check.equal(f"{found[0]} is one of {allowed}", found[0] in allowed, True)
        told = case["reason"] in (found if document["findings"][0]["level"] != "format" else allowed)
        check.equal(f"{case['reason']} among {found}, or allowed instead", told, True)
        level = "format" if found[0] == "reserved_nonzero" else document["findings"][0]["level"]
        check.equal("level", "semantic" if level == "warning" else level, case["level"])


# -- the command line -------------------------------------------------------------------------------------------------


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str
    started: list[str]


def command(*arguments: str) -> Done:
    """Run `kvmnn` in this process; `started` names the events that a harmless run does not cause."""
    out, err = io.StringIO(), io.StringIO()
    with _watched() as started, redirect_stdout(out), redirect_stderr(err):
        code = main(list(arguments))
    return Done(code, out.getvalue(), err.getvalue(), list(started))


_EVENTS = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "os.startfile")
_watching: list[list[str]] = []


def _hook(event: str, _: Any) -> None:
    if _watching and event in _EVENTS:
        _watching[-1].append(event)


@contextmanager
def _watched() -> Iterator[list[str]]:
    _install_hook()
    _watching.append([])
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


@cache
def _install_hook() -> None:
    """Once: a hook cannot be taken away again."""
    sys.addaudithook(_hook)
