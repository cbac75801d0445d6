"""`-q` keeps results and hides notes in every verb; `--dtype` is refused if it contradicts the input."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random

import mlx_files
import numpy as np
import pytest
from hostile_files import samples
from mlx_files import Shape

from kvmnn.cli import build_parser, main
from kvmnn.cli.command_parser import COMMANDS as VERB_COMMANDS
from kvmnn.cli.command_parser import list_command_parsers

COMMANDS = [(name, command) for name, sample in samples().items() for command in sample.commands]
SEEN = {verb for verb in VERB_COMMANDS for _, command in COMMANDS if command.startswith(f"{verb} ")}


def said(argv: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output without times, and standard error of a verb."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(argv)
    out.flush()
    text = out.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
    return code, re.sub(r"\d[\d.,e-]*( (MB|tokens)/s| s\b| us\b| ms\b)", "TIME", text), err.getvalue()


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[f"{name}: {command}"[:60] for name, command in COMMANDS])
def test_quiet_keeps_results_and_drops_notes(tmp_path: Path, name: str, command: str) -> None:
    results = []
    for quiet in (False, True):
        for file, data in samples()[name].files.items():
            path = tmp_path / "in" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        out = str(tmp_path / ("quiet" if quiet else "aloud"))
        argv = [word.format(**{"in": str(tmp_path / "in"), "out": out}) for word in command.split()]
        code, text, errors = said([*argv, *(["-q"] if quiet else [])])
        results.append((code, text.replace(out, "OUT")))
        if quiet:
            assert re.findall(r"^kvmnn: (?!error: |refused: ).*", errors, re.MULTILINE) == []
    if not command.startswith(("bench ", "eval ", "generate ", "mnn replay ")):  # which say how long things took
        assert results[0] == results[1]
    assert results[0][0] == results[1][0]


def test_quiet_is_an_option_of_every_verb() -> None:
    verbs = list_command_parsers(build_parser())
    assert {verb for verb in VERB_COMMANDS if not verbs[verb].accepts("--quiet")} == {"completion"}
    assert len(SEEN) > 10


def test_quiet_keeps_data_on_standard_output(tmp_path: Path, capfdbinary) -> None:
    np.save(tmp_path / "k.npy", np.zeros((2, 3, 4), np.float16))
    assert main(["encode", str(tmp_path / "k.npy"), "-o", "-"]) == 0
    aloud = capfdbinary.readouterr()
    assert main(["encode", str(tmp_path / "k.npy"), "-o", "-", "-q"]) == 0
    quiet = capfdbinary.readouterr()
    assert aloud.out == quiet.out
    assert b"LOSSLESS" in aloud.err
    assert quiet.err == b""


# -- --dtype -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run) -> Path:
    monkeypatch.chdir(tmp_path)
    words = np.random.default_rng(1).standard_normal((2, 5, 4))
    np.savez("kv.npz", half=words.astype(np.float16), single=words.astype(np.float32))
    np.savez("half.npz", **{"layer_0.key": words.astype(np.float16)})
    run("encode", "kv.npz", "-o", "kv/")
    run("encode", "half.npz", "-o", "half.zarr")
    data, _ = mlx_files.cache(Random(1), Shape(dtype="bf16"))
    Path("c.safetensors").write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("verb", ["verify kv", "decode kv -o x.npz", "inspect kv"])
def test_dtype_not_of_all_arrays_is_refused(here: Path, run, verb: str) -> None:
    for dtype, name in (("fp16", "'single', not fp16"), ("fp32", "'half', not fp32")):
        assert (
            f"the manifest says {'fp32' if dtype == 'fp16' else 'fp16'} of {name}"
            in run(*verb.split(), "--dtype", dtype, code=2).err
        )


@pytest.mark.parametrize(
    "argv",
    [
        "verify half.zarr",
        "decode half.zarr -o x.npz",
        "inspect half.zarr",
        "encode c.safetensors -o x/",
        "mnn unpack c.safetensors -o x.npz",
    ],
)
def test_dtype_contradicted_by_file_is_refused(here: Path, run, argv: str) -> None:
    own = "bf16" if "c.safe" in argv else "fp16"
    for dtype in {"fp16", "bf16", "fp32"} - {own}:
        refused = run(*argv.split(), "--dtype", dtype, code=1).err
        assert re.search(rf"{own} (numbers|words).* {dtype}|not {dtype}|{dtype} has", refused)
    run(*argv.split(), "--dtype", own)
    assert json.loads(run(*argv.split(), "--dtype", own, "--json", *(["-f"] if "-o" in argv else [])).out)
