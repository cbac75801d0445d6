"""`--jobs`: each of many files is processed as the verb alone processes it.

In processes, but for what depends on none; tests/batch and test_batch_terminal.py have what becomes of processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import hostile_files
import llama_files
import mlx_files
import numpy as np
import pytest
from hf_files import pairs, save

from kvmnn._util.packages import get_version
from kvmnn.batch import Task
from kvmnn.batch.tasks import run_task
from kvmnn.cli import main
from kvmnn.cli.batch import format_task_line
from kvmnn.cli.batch_work import BATCH_COMMANDS, CommandWork
from kvmnn.errors import OptionError

HALF = np.random.default_rng(5).normal(size=(2, 9, 4)).astype(np.float16)
KV = {"layer_0.key": HALF, "layer_0.value": HALF * 2}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in/b/c").mkdir(parents=True)
    np.savez("in/a.npz", **KV)
    np.savez("in/b/a.npz", **KV)
    np.savez("in/b/c/z.npz", **KV)
    np.save("in/b/layer_3.key.npy", HALF)
    return tmp_path


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def timeless(value: Any) -> Any:
    """Without the times and commands that are in documents."""
    if isinstance(value, dict):
        return {key: timeless(entry) for key, entry in value.items() if "second" not in key and key != "command"}
    return [timeless(entry) for entry in value] if isinstance(value, list) else value


VERBS = [verb for verb in BATCH_COMMANDS if verb != "compressor verify"]  # which takes weight files alone


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_jobs_verify_weight_files_below_a_folder(tmp_path, capsys):
    sample = hostile_files.samples()["weights"]
    (tmp_path / "in").mkdir()
    for name, data in sample.files.items():
        (tmp_path / "in" / name).write_bytes(data)
    (tmp_path / "in" / "bad.bin").write_bytes(sample.files["w.bin"] + b"more")
    journal = str(tmp_path / "journal")
    argv = ["compressor", "verify", "--jobs", "1", str(tmp_path / "in"), "--resume", journal]
    assert main(argv) == 1
    assert {Path(line["path"]).name: line["ok"] for line in lines(capsys)} == {"bad.bin": False, "w.bin": True}
    assert main([*argv[:-1], f"{journal}2", "--allow-trailing"]) == 0
    assert [line["document"]["verb"] for line in lines(capsys)] == ["verify", "verify"]


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_jobs_documents_equal_the_verb_alone(here, capsys, verb):
    """All four verbs on one tree: paths in order, equal documents, nothing more on standard error."""
    tree = "in"
    if verb == "verify":
        assert main(["encode", "--jobs", "2", "in", "-o", "frames", "-q"]) == 0
        tree = "frames"
        capsys.readouterr()
    more = ["--encode"] if verb == "measure" else []
    assert main([verb, "--jobs", "2", tree, *more]) == (1 if verb == "measure" else 0)
    found = lines(capsys)
    assert [line["path"] for line in found] == sorted(line["path"] for line in found)
    assert len(found) == 4
    for line in found:
        output = ["-o", "alone/" if line["path"].endswith("npz") else "alone.frame", "-f"] if verb == "encode" else []
        code = main(
            [verb, line["path"], "--json", "--threads", "1", *more, *output][: None if verb != "inspect" else 3]
        )
        said = capsys.readouterr()
        assert line["ok"] == (code == 0)
        document = timeless(json.loads(said.out)) if said.out else None
        mine = timeless(line.get("document"))
        if verb == "encode":
            mine["output"] = document["output"] = ""
            for array in (*mine["arrays"], *document["arrays"]):
                array["frames"][0]["file"] = ""
        assert mine == document
        assert line.get("error") == (said.err.removeprefix("kvmnn: error: ").rstrip("\n") or None)


@pytest.mark.slow
def test_jobs_encode_mirrors_folders_in_output(here, capsys):
    assert main(["encode", "--jobs", "2", "in", "in/../extra.npy", "-o", "out"]) == 1
    assert "extra.npy: no such file" in capsys.readouterr().err
    np.save("extra.npy", HALF)
    assert main(["encode", "--jobs", "2", "in", "extra.npy", "-o", "out"]) == 0
    made = sorted(str(path.relative_to("out")) for path in Path("out").rglob("*") if path.is_file())
    assert [line["document"]["output"] for line in lines(capsys)] == [
        *("out/a.npz.frames/", "out/b/a.npz.frames/", "out/b/c/z.npz.frames/", "out/b/layer_3.key.npy.frame"),
        "out/extra.npy.frame",
    ]
    for name in ("a.npz", "b/a.npz", "b/c/z.npz"):
        assert made.count(f"{name}.frames/manifest.json") == 1
    assert main(["decode", "out/b/layer_3.key.npy.frame", "-o", "back.npy", "-q"]) == 0
    assert (np.load("back.npy") == HALF).all()


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_jobs_encode_keeps_a_folder_of_arrays_together(tmp_path, run, monkeypatch):
    """As the verb alone: single frames would not have the documents, nor show which of them were one cache."""
    monkeypatch.chdir(tmp_path)
    Path("in/kv").mkdir(parents=True)
    for name, array in KV.items():
        np.save(f"in/kv/{name}.npy", array)
    Path("in/kv/positions.json").write_text(json.dumps({"layers": [{"layer": 0, "positions": list(range(9))}]}))
    Path("in/kv/token_ids.json").write_text(json.dumps(list(range(9))))
    run("encode", "in/kv", "-o", "alone/")
    run("encode", "--jobs", "1", "in", "-o", "out")
    assert sorted(path.name for path in Path("out").iterdir()) == ["kv.frames"]
    for path in Path("alone").iterdir():
        assert Path("out/kv.frames", path.name).read_bytes() == path.read_bytes()
    (line,) = map(json.loads, run("verify", "--jobs", "1", "out").out.splitlines())
    assert line["document"]["label"] == "LOSSLESS" and line["document"]["arrays"] == 2
    run("decode", "out/kv.frames", "-o", "back/")
    assert {path.name: path.read_bytes() for path in Path("back").iterdir()} == {
        path.name: path.read_bytes() for path in Path("in/kv").iterdir()
    }


def test_jobs_encode_without_output_writes_next_to_inputs(here, capsys):
    assert main(["encode", "--jobs", "1", "in"]) == 0
    assert Path("in/b/c/z.npz.frames/manifest.json").exists()
    assert Path("in/b/layer_3.key.npy.frame.json").exists()
    capsys.readouterr()
    assert main(["encode", "--jobs", "1", "in"]) == 1, "and never replaces anything"
    assert all("exists already" in line["error"] for line in lines(capsys))
    assert main(["encode", "--jobs", "1", "in", "-f", "-q"]) == 0


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_jobs_existing_output_is_one_failure(here, capsys):
    Path("out/b").mkdir(parents=True)
    Path("out/b/layer_3.key.npy.frame.json").write_text("mine")
    assert main(["encode", "--jobs", "2", "in", "-o", "out"]) == 1
    found = lines(capsys)
    assert [line["ok"] for line in found] == [True, True, True, False]
    assert found[3]["error"] == (
        f"in/b/layer_3.key.npy: {here}/out/b/layer_3.key.npy.frame.json: exists already (-f or --force replaces it)"
    ), "a line names its file"
    assert Path("out/b/layer_3.key.npy.frame.json").read_text() == "mine"
    assert not Path("out/b/layer_3.key.npy.frame").exists()


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_jobs_several_folders_into_one_output_are_noted(here, capsys):
    Path("more").mkdir()
    np.savez("more/other.npz", **KV)
    assert main(["encode", "--jobs", "1", "in", "more/", "-o", "out", "-q"]) == 0
    assert capsys.readouterr().err == "" and Path("out/other.npz.frames").is_dir()
    assert main(["encode", "--jobs", "1", "in", "more/", "-o", "out", "-f"]) == 0
    assert "files of 2 folders (in, more/) are written into out without the names of these" in capsys.readouterr().err
    for argv in (["in", "more/other.npz", "-o", "alone"], ["in", "more"]):
        main(["encode", "--jobs", "1", *argv])
        assert "are written into" not in capsys.readouterr().err


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_jobs_failed_files_leave_no_folders(here, capsys):
    Path("bad/x/y").mkdir(parents=True)
    Path("bad/x/y/z.npy").write_bytes(b"damaged")
    assert main(["encode", "--jobs", "1", "bad", "-o", "new/out"]) == 1
    assert not Path("new").exists()
    assert len(lines(capsys)) == 1


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ("encode --jobs 2 in copy -o out", 2, "in/a.npz and copy/a.npz would both be written to {}/out/a.npz.frame"),
        ("encode --jobs 2 in in", 2, "in: is given twice"),
        ("encode --jobs 2 in in/b", 2, "in/b: lies in in, and would count twice"),
        ("encode --jobs 2 -", 2, "standard input is one input: --jobs and --dask take files and folders"),
        ("encode --jobs 2 in -o -", 2, "-o -: of many files the output is a folder: use -o DIR/"),
        ("encode --jobs 2 in -o in/a.npz", 2, "-o in/a.npz: of many files the output is a folder: use -o DIR/"),
        ("encode --jobs 2 in --threads 2", 2, "--threads is not for --jobs and --dask: each file has one thread"),
        ("encode in --resume r", 2, "--resume needs --jobs N or --dask ADDRESS"),
        ("inspect in --glob *.npy", 2, "--glob needs --jobs N or --dask ADDRESS"),
        ("verify in in", 2, "2 inputs: --jobs N verifies each of many, without it give one"),
        (
            "verify --jobs 2 in --against in/a.npz",
            2,
            "--against is not for --jobs and --dask: it is the original",
        ),
        ("measure --jobs 2 in --out-json x", 2, "--out-json is not for --jobs and --dask: it names one output"),
        ("measure --jobs 2 in --analysis x", 2, "--analysis is not for --jobs and --dask: it goes through whole trees"),
        ("measure --jobs 2 in --dask tcp://x:1", 2, "argument --dask: not allowed with argument --jobs"),
        ("measure --jobs 0 in", 2, "'0' is not a whole number above zero"),
        ("measure --jobs 2 gone", 1, "gone: no such file or directory"),
        ("verify --jobs 2 in", 1, "in: nothing there that kvmnn verify reads"),
        ("measure --jobs 2 in --resume in", 1, "in: cannot be written: Is a directory"),
        ("measure --jobs 2 in --resume in/a.npz", 1, "in/a.npz: line 1 is not of a run over many files"),
        ("measure --jobs 2 in --resume gone/r", 1, "gone/r: cannot be written: its folder gone does not exist"),
    ],
)
def test_jobs_invalid_requests_are_refused_first(here, capsys, argv, code, message):
    shutil.copytree("in", "copy")
    before = hostile_files.contents(here)
    assert main(argv.split()) == code
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]
    assert message.format(here) in last
    assert last.startswith("kvmnn: error: ")
    assert said.out == ""
    assert hostile_files.contents(here) == before


@pytest.mark.usefixtures("without_workers")
def test_jobs_error_lines_name_the_file(here, capsys):
    np.savez("in/half.npz", **{"layer_0.key": HALF})
    assert main(["measure", "--jobs", "1", "in"]) == 1
    said = {line["path"]: line["error"] for line in lines(capsys) if not line["ok"]}
    error = "in/half.npz: layer 0 has no array of its values: K alone is all that latent attention keeps, "
    error += f"of one kv head, and these have {len(HALF)}"
    assert said["in/half.npz"] == error
    assert main(["measure", "in/half.npz"]) == 1
    assert capsys.readouterr().err == f"kvmnn: error: {error}\n"


@pytest.mark.usefixtures("without_workers")
def test_jobs_measure_dense_equals_the_verb_alone(here, capsys):
    assert main(["measure", "--jobs", "1", "in/a.npz", "--dense", "--rope", "dims=4"]) == 0
    (line,) = lines(capsys)
    assert main(["measure", "in/a.npz", "--dense", "--rope", "dims=4", "--json"]) == 0
    assert timeless(line["document"]) == timeless(json.loads(capsys.readouterr().out))
    assert line["document"]["overall"]["dense_bytes"] > 0


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_jobs_terminal_gets_lines_of_text(here, capsys, monkeypatch, verb):
    """One line for each file with a summary of its document; JSON on request; with -q only failures."""
    Path("in/b/bad.npz").write_bytes(b"damaged")
    Path("in/b/layer_3.key.npy").unlink()
    tree = "in"
    texts = {
        "encode": "LOSSLESS, 288 -> ",
        "inspect": "2 arrays",
        "measure": "SIMULATED, 288 -> ",
        "verify": "LOSSLESS, 288 -> ",
    }
    if verb == "verify":
        assert main(["encode", "--jobs", "1", "in", "-o", "frames", "-q"]) == 1
        tree = "frames"
        Path("frames/b/bad.frame").write_bytes(b"damaged")
        capsys.readouterr()
    monkeypatch.setattr("kvmnn.cli.streams.is_terminal", lambda: True)
    argv = [verb, "--jobs", "1", tree, *(["-f"] if verb == "encode" else [])]
    assert main(argv) == 1
    found = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in found] == ["ok      ", "ok      ", "failed  ", "ok      "]
    assert found[2].startswith(f"failed  {tree}/b/bad.")
    assert all(f"{tree}/" in line and texts[verb] in line for line in found[:2])
    assert main([*argv, "-q"]) == 1
    assert [line[:8] for line in capsys.readouterr().out.splitlines()] == [line[:8] for line in found]
    assert main([*argv, "--json"]) == 1
    assert [line["ok"] for line in lines(capsys)] == [True, True, False, True]


def test_jobs_lines_qualify_sizes(tmp_path):
    """Unused capacity, frames larger than the file, dequantised numbers: text and JSON name them."""
    mlx, llama, frames = (str(tmp_path / name) for name in ("c.safetensors", "q.session", "c.frames"))
    Path(mlx).write_bytes(mlx_files.cache(Random(3), mlx_files.Shape(dims=32, value_dims=32))[0])
    shape = llama_files.Shape(k_type="q8_0", v_type="q8_0")
    Path(llama).write_bytes(llama_files.state(Random(3), shape, [12])[0])
    room, less, made = "bytes are room after the valid tokens", ", which is less", "words dequantised from q8_0"
    for verb, task, notes in (
        ("encode", Task(mlx, str(tmp_path / "c"), (".frames",)), [room, less]),
        ("encode", Task(llama, str(tmp_path / "q"), (".frames",)), [less]),
        ("measure", Task(llama), [made]),
        ("inspect", Task(frames), [room, less]),
        ("verify", Task(frames), [room, less]),
    ):
        line = run_task(CommandWork.from_words(verb), task, get_version()).to_dict()
        document = line["document"]["inputs"][0] if verb == "inspect" else line["document"]
        assert len(document["notes"]) == len(notes)
        for note, said in zip(notes, document["notes"], strict=True):
            assert note in said and said in format_task_line(line)


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_jobs_resume_repeats_failed_and_changed_files(here, capsys):
    """Finished files are printed as before; failed and changed ones run again, with a note."""
    Path("in/b/bad.npz").write_bytes(b"damaged")
    argv = ["measure", "--jobs", "1", "in/b", "--resume", "done.jsonl"]
    assert main(argv) == 1
    first = capsys.readouterr().out.splitlines()
    np.savez("in/b/bad.npz", **KV)
    assert main(argv) == 1
    second = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["ok"] for line in first] == [True, False, True, False]
    assert [json.loads(line)["ok"] for line in second] == [True, True, True, False]
    assert [second[0], second[2]] == [first[0], first[2]]
    np.savez("in/b/a.npz", **{name: array[:1] for name, array in KV.items()})
    with open("done.jsonl", "ab") as file:
        file.write(b'{"kvmnn_many": 1, "sha')
    assert main(argv) == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[1:3] == second[1:3]
    assert said.out.splitlines()[0] != second[0]
    assert said.err.splitlines()[:2] == [
        "kvmnn: note: done.jsonl: the last line was torn, and is done again",
        "kvmnn: note: 1 file in done.jsonl, changed since then or without output, done again",
    ]
    assert main([*argv, "--encode"]) == 2
    expected = (
        "done.jsonl: is of another run: real was the default there and is true here; "
        "name another file, or delete this one"
    )
    assert expected in capsys.readouterr().err


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_jobs_resume_notices_changed_positions(here, capsys):
    """positions.json is read with the array and is part of its frames."""
    np.save("in/layer_0.key.npy", KV["layer_0.key"])
    tokens = KV["layer_0.key"].shape[1]
    argv = ["encode", "--jobs", "1", "in/layer_0.key.npy", "-o", "out", "--resume", "r"]
    found = []
    for first in (None, 0, 5, None):
        if first is not None:
            layers = [{"positions": list(range(first, first + tokens))}]
            Path("in/positions.json").write_text(json.dumps({"layers": layers}))
        assert main(argv) == 0, capsys.readouterr().err
        found.append((capsys.readouterr().err.count("done again"), Path("out/layer_0.key.npy.frame.json").read_text()))
    assert [again for again, _ in found] == [0, 1, 1, 0]
    assert len({manifest for _, manifest in found}) == 3


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_jobs_resume_replaces_own_outputs_only(here, capsys):
    """Unchanged outputs of kvmnn are replaced when their input changes; changed ones need -f."""
    argv = ["encode", "--jobs", "1", "in/a.npz", "in/b/c", "-o", "out", "--resume", "r"]
    again = "kvmnn: note: 1 file in r, changed since then or without output, done again"
    assert main(argv) == 0
    for number in (1, 2):
        np.savez("in/a.npz", **{name: array[:number] for name, array in KV.items()})
        capsys.readouterr()
        assert main(argv) == 0
        assert capsys.readouterr().err.splitlines() == [again]
        manifest = json.loads(Path("out/a.npz.frames/manifest.json").read_text())
        assert {array["shape"][0] for array in manifest["arrays"]} == {number}
    Path("in/a.npz").write_bytes(b"damaged")
    assert main(argv) == 1
    assert again not in capsys.readouterr().err, "it was not done"
    np.savez("in/a.npz", **KV)
    assert main(argv) == 0, "the output from before is still kvmnn's"
    np.savez("in/a.npz", **{name: array[:1] for name, array in KV.items()})
    frame = next(Path("out/a.npz.frames").glob("*.frame"))
    frame.write_bytes(frame.read_bytes() + b"x")
    capsys.readouterr()
    assert main(argv) == 1
    said = capsys.readouterr()
    assert "exists already" in said.out and again not in said.err
    assert frame.read_bytes().endswith(b"x")
    assert main([*argv, "-f"]) == 0
    assert [line["ok"] for line in lines(capsys)] == [True, True]
    assert not frame.read_bytes().endswith(b"x")


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_jobs_damaged_torch_cache_is_a_failed_line(here, capsys):
    path = save(Path("in/b/c/cache.pt"), pairs(1))
    assert main(["inspect", "--jobs", "1", "in/b/c"]) == 0
    whole = path.read_bytes()
    capsys.readouterr()
    path.unlink()
    damaged = (b"", b"garbage", whole[:100], whole[: len(whole) // 2], whole[:-1])
    names = [f"in/b/c/cache{number}.pt" for number in range(len(damaged))]
    for name, data in zip(names, damaged, strict=True):
        Path(name).write_bytes(data)
    for verb in ("encode", "inspect", "measure"):
        assert main([verb, "--jobs", "1", "in/b/c", "-q"]) == 1
        found = {line.get("path"): line for line in lines(capsys)}
        for name in names:
            assert not found[name]["ok"] and found[name]["error"].startswith(f"{name}: "), (verb, name)


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_jobs_non_utf8_names(here, capsys):
    name = os.fsdecode(b"in/b/\xff\n\x1b.npz")
    shutil.copy("in/a.npz", name)
    assert main(["encode", "--jobs", "1", "in", "-o", "out", "--resume", "r"]) == 0
    assert main(["encode", "--jobs", "1", "in", "-o", "out", "--resume", "r"]) == 0
    found = lines(capsys)
    assert [line["path"] for line in found].count(name) == 2
    assert Path(os.fsdecode(b"out/b/\xff\n\x1b.npz.frames/manifest.json")).exists()
    Path(name).write_bytes(b"x")
    assert main(["inspect", "--jobs", "1", "in"]) == 1
    said = capsys.readouterr()
    assert "\\x1b" in said.err and "\x1b" not in said.err + said.out


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_jobs_hostile_files_are_one_line_each(tmp_path, capsys, monkeypatch):
    """Every sample cut, flipped and complete: one line each, and an error where the verb alone has one."""
    monkeypatch.chdir(tmp_path)
    number = 0
    for name, sample in hostile_files.samples().items():
        if name.startswith(("npy", "npz", "safetensors", "session", "cache", "weights", "dump", "prefix", "bundle")):
            for damage in ("whole", "cut", "flipped"):
                for file, data in sample.files.items():
                    if damage != "whole" and file in sample.damaged:
                        half = len(data) // 2
                        data = (
                            data[:half]
                            if damage == "cut"
                            else data[:half] + bytes([data[half] ^ 64]) + data[half + 1 :]
                        )
                    path = Path("all", f"{number:03} {damage}", file)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                number += 1
    for verb in VERBS:
        more = ["-o", "out"] if verb == "encode" else []
        assert main([verb, "--jobs", "2", "all", *more]) == 1
        said = capsys.readouterr()
        found = [json.loads(line) for line in said.out.splitlines()]
        assert len(found) > 9
        assert 0 < sum(line["ok"] for line in found) < len(found)
        assert [line["path"] for line in found] == list(dict.fromkeys(line["path"] for line in found))
        for line in found:
            assert line["ok"] == ("error" not in line)
            assert "please report" not in line.get("error", "")
        wrong = f"kvmnn: error: {sum(not line['ok'] for line in found)} of {len(found)} files failed, the first: "
        assert said.err.splitlines()[-1].startswith(wrong)
        assert not list(Path().rglob("*.tmp"))


# -- as work for any executor ------------------------------------------------------------------------------------------


def test_command_work_runs_a_verb(here):
    work = CommandWork.from_words("measure", "--encode")
    outcome = work(Task("in/a.npz"))
    assert outcome.error is None
    assert outcome.document["verb"] == "measure"
    outcome = work(Task("gone"))
    assert outcome.error == "gone: no such file or directory" or "gone" in str(outcome.error)
    assert work.compute_identity()["options"] == {"real": True}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("decode",), "'decode' is not done for many files"),
        (("encode", "--nonsense"), "unrecognized arguments: --nonsense"),
        (("encode", "--effort", "wrong"), "invalid choice: 'wrong'"),
        (("encode", "--jobs", "2"), "--jobs is about a run of many files: kvmnn.batch.run_tasks is told"),
        (("measure", "--threads", "2"), "--threads is about a run"),
    ],
)
def test_command_work_invalid_words_are_refused(words, message):
    with pytest.raises(OptionError, match=message):
        CommandWork.from_words(*words)


@pytest.mark.slow
def test_jobs_first_process_loads_no_formats(tmp_path: Path) -> None:
    """Other processes search for the files, which requires all formats."""
    np.save(tmp_path / "a.npy", np.zeros((4, 8), np.float16))
    code = (
        "import sys; from kvmnn.cli import main\n"
        f"assert main(['encode', '--jobs', '2', {str(tmp_path)!r}, '-o', {str(tmp_path / 'out')!r}]) == 0\n"
        "assert not {'numpy', 'kvmnn.formats', 'kvmnn.bundle'} & set(sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["ok"]
