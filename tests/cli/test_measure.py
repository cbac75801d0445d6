"""``kvmnn measure``: documents, tables, exit codes, no partial output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hf_files
import numpy as np
import pytest
from offline_model import words, write_dump
from reader_sample import made

from kvmnn.dtypes import PARTS

K, V = words(1, 40), words(2, 40)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dump(Path("dump"), 0, 0, K, V)
    write_dump(Path("dump"), 1, 0, K, V, seq_len=41)
    write_dump(Path("dump"), 2, 0, K.astype("<f4"), V.astype("<f4"))
    return tmp_path


def test_measure_writes_json_and_markdown(here, run):
    said = run("measure", "dump", "--out-json", "new/deep/a.json", "--out-md", "new/a.md").out
    made = json.loads(Path("new/deep/a.json").read_text())
    assert made["dump_dir"] == str(here / "dump")
    assert (made["scope"], made["selected_layers"]) == ("all", [0, 1, 2])
    assert (made["selected_entries"], made["skip_reasons"]) == (3, {"compression_failed": 1})
    assert Path("new/a.md").read_text().startswith("# H2O v6 Offline Lossless Summary\n\n- Dump dir: `/")
    assert said.endswith("Wrote new/deep/a.json\nWrote new/a.md\n")
    name = f"{here}/dump/run/layer_1/k_t0_40.bin"
    assert f"skipped: 1 compression_failed ({name})" in said
    assert "simulated: " in said and "byte entropy" in said and "STORED" not in said
    assert sorted(path.name for path in here.iterdir()) == ["dump", "new"]


def test_measure_names_missing_layers_of_dumps(here, run):
    """A layer between others is not there; a fault of a dump is a skip, as before."""
    write_dump(Path("part"), 0, 0, K, V)
    write_dump(Path("part"), 2, 0, K, V)
    problem = "layer 1 is missing before layer 2"
    assert run("measure", "part").out.splitlines()[-1] == f"incomplete: {problem}"
    document = json.loads(run("measure", "part", "--json").out)
    assert document["completeness"]["missing"] == [problem]
    np.savez(
        "more.npz", **{"layer_0.key": words(3, 40).transpose(1, 0, 2), "layer_0.value": words(4, 40).transpose(1, 0, 2)}
    )
    assert run("measure", "part", "more.npz").out.splitlines()[-1] == f"incomplete: {here}/part: {problem}"
    assert "incomplete" not in run("measure", "dump").out


def _damaged(name: str) -> str:
    """Three layers in a file, or a store, whose layer 1 has one bit that is not what it was; the rest is whole."""
    pairs = [(words(n, 40)[None], words(n + 3, 40)[None]) for n in range(3)]
    if name == "x.pt":
        file, part = hf_files.save(Path(name), hf_files.dynamic_cache(pairs)), pairs[1][0].tobytes()
    else:
        arrays = {f"layer_{n}.{p}": kv[0] for n, pair in enumerate(pairs) for p, kv in zip(PARTS, pair, strict=True)}
        np.savez("x.npz", **arrays)
        file, part = Path("x.npz"), arrays["layer_1.key"].tobytes()
    if name == "x.frames":
        made(["encode", "x.npz", "-o", "x.frames/"])
        file, part = Path("x.frames/layer_1.key.frame"), Path("x.frames/layer_1.key.frame").read_bytes()
    if name == "x.zarr":
        made(["encode", "x.npz", "-o", "x.zarr"])
        file = next(path for path in Path("x.zarr/layer_1.key/c").rglob("*") if path.is_file())
        part = file.read_bytes()
    data = bytearray(file.read_bytes())
    data[data.index(part) + len(part) // 2] ^= 1
    file.write_bytes(data)
    return name


@pytest.mark.parametrize("options", ["", "--encode --no-limits", "--json", "-q", "--entry-mode aggregate", "--fp32"])
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("x.pt", "x.pt: layer_1.key: member 'data/2': the data does not match its checksum"),
        ("x.npz", "x.npz: member 'layer_1.key.npy': the data does not match its checksum"),
        ("x.frames", "x.frames: array 'layer_1.key': the frame does not match the manifest's sha256"),
        ("x.zarr", "x.zarr: array 'layer_1.key': its words do not match the sha256 that kvmnn noted down"),
    ],
)
def test_measure_damaged_input_is_an_error(tmp_path, monkeypatch, run, name, where, options):
    monkeypatch.chdir(tmp_path)
    said = run("measure", _damaged(name), *options.split(), "--threads", 2, code=1)
    assert said.out == "" and where in said.err.replace("\n", " ")


def test_measure_damaged_input_with_jobs_is_a_failed_line(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    line = json.loads(run("measure", _damaged("x.pt"), "--jobs", 1, "--json", code=1).out.splitlines()[0])
    assert line["ok"] is False and "the data does not match its checksum" in line["error"]


def test_measure_overlapping_inputs_are_refused(here, run):
    for argv in (["dump", "dump/"], ["dump", "./dump"]):
        assert "is given twice, and would count twice" in run("measure", *argv, code=2).err
    assert "_t0_40.bin: is taken twice: the inputs overlap" in run("measure", "dump", "dump/run/layer_0", code=2).err
    assert "overlap" in run("measure", "dump", "dump/run/layer_0", "--analysis", "x/", code=2).err


def test_measure_names_skipped_files(here, run):
    write_dump(Path("dump"), 3, 0, K.astype("<f4"), V.astype("<f4"))
    said = run("measure", "dump", "--strict-fp16")
    assert f"skipped: 2 skip_fp32_strict ({here}/dump/run/layer_2/meta_t0_40.json, ...)" in said.out
    files = json.loads(run("measure", "dump", "--strict-fp16", "--json").out)["skipped_files"]
    assert files["skip_fp32_strict"] == f"{here}/dump/run/layer_2/meta_t0_40.json"


@pytest.mark.parametrize(
    ("options", "layers", "said"),
    [
        ("", ["0", "2"], "2 of 3 layers, 40 tokens each"),
        ("--scope front_n --front-n 2", ["0"], "1 of 3 layers, 40 tokens"),
        ("--scope front_n", ["0"], "1 of 3 layers, 40 tokens"),
        ("--layer-ids 0,2", ["0", "2"], "2 of 3 layers, 40 tokens each"),
    ],
)
def test_measure_total_names_layers_and_tokens(here, run, options, layers, said):
    assert f"\ntotal: {said}\n" in run("measure", "dump", *options.split()).out
    made = json.loads(run("measure", "dump", "--json", *options.split()).out)["breakdown"]
    total = made["overall"]
    assert (list(made["layers"]), made["found_layers"]) == (layers, 3)
    assert (total["layers"], total["least_tokens"], total["most_tokens"]) == (len(layers), 40, 40)
    assert [layer["tokens"] for layer in made["layers"].values()] == [40] * len(layers)


def test_measure_layers_of_unequal_lengths(here, run):
    write_dump(Path("other"), 0, 0, K, V)
    write_dump(Path("other"), 5, 0, K[:7], V[:7])
    assert "\ntotal: 2 layers, 7 to 40 tokens each\n" in run("measure", "other").out


def test_measure_existing_output_needs_overwrite(here, run):
    Path("a.json").write_text("mine")
    arguments = ("measure", "dump", "--out-json", "a.json", "--out-md", "a.md")
    assert "a.json: exists already (-f or --force replaces it)" in run(*arguments, code=1).err
    assert (Path("a.json").read_text(), Path("a.md").exists()) == ("mine", False)
    run(*arguments, "--force", "-q")
    assert json.loads(Path("a.json").read_text())["schema_version"] == 3


def test_measure_output_that_is_an_input_is_refused(here, run):
    target = next(Path("dump").rglob("k_*.bin"))
    before = target.read_bytes()
    assert "is the input itself" in run("measure", "dump", "--out-json", target, "--force", code=1).err
    assert target.read_bytes() == before


USAGE = [
    ([], "expected an INPUT"),
    (["dump", "--front-n", "0"], "--front-n must be > 0 when scope=front_n."),
    (["dump", "--k-hi-predictors", "foo"], "--k-hi-predictors: invalid predictor `foo`"),
    (["dump", "--scope", "layer_ids"], "--layer-ids must be non-empty when scope=layer_ids."),
    (["dump", "--scope", "layer_ids", "--layer-ids", "0,x"], "--layer-ids: '0,x' is not a list of whole numbers"),
    (["dump", "--zstd-level", "three"], "'three' is not a whole number"),
    (["dump", "--stage", "all"], "invalid choice"),
    (["dump", "--out-json", "x", "--out-md", "./x"], "name the same file"),
    (["dump", "--analysis", "x", "--to-fp16", "y"], "exclude each other"),
    (["dump", "dump", "--to-fp16", "y"], "takes one INPUT"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_measure_usage_error_is_exit_code_2(here, run, arguments, message):
    said = run("measure", *arguments, code=2)
    assert said.err.startswith("kvmnn: error: ") and message in said.err and not said.out


DATA = [
    (["dump", "--min-seq-len", "99999"], "No entries selected after filtering."),
    (["gone"], "gone"),
    (["empty"], "has no meta_*.json file below it"),
    (["dump", "--analysis", "an", "--run-log", "gone"], "gone: cannot be read"),
    (["empty", "--to-fp16", "y"], "has no meta_*.json file below it"),
    (["gone", "--to-fp16", "y"], "gone: is not a directory"),
    (["dump", "--out-json", "dump/run/layer_0/k_t0_40.bin/x.json"], "cannot be written"),
]


@pytest.mark.parametrize(("arguments", "message"), DATA)
def test_measure_bad_data_is_exit_code_1_without_output(here, run, arguments, message):
    Path("empty").mkdir()
    assert message in run("measure", *arguments, code=1).err
    assert sorted(path.name for path in here.iterdir()) == ["dump", "empty"]


def test_measure_json_explains_its_numbers(here, run):
    made = json.loads(run("measure", "dump", "--json", "--encode", "--front-n", "3").out)
    assert (made["verb"], made["label"]) == ("measure", "LOSSLESS")
    assert set(made["breakdown"]["meaning"]) == {"simulated", "limit", "stored"}
    overall, layers = made["breakdown"]["overall"], made["breakdown"]["layers"]
    assert list(layers) == ["0", "2"]
    assert overall["simulated_bytes"] == made["evaluation"]["compressed_bytes"]
    assert overall["raw_bytes"] == sum(layer["raw_bytes"] for layer in layers.values())
    assert overall["stored_bytes"] == overall["k"]["stored_bytes"] + overall["v"]["stored_bytes"] > 0
    assert overall["verified"] is True
    for part in ("k", "v"):
        lanes = layers["0"][part]["lanes"]
        total = sum(lane["simulated_bytes"] for lane in lanes.values()) + layers["0"][part]["framing_bytes"]
        assert total == layers["0"][part]["simulated_bytes"]
        assert lanes["hi"]["limit_ratio"] == pytest.approx(lanes["hi"]["raw_bytes"] / lanes["hi"]["limit_bytes"])
    made = json.loads(run("measure", "dump", "--json", "--no-limits", "--front-n", "1").out)
    assert made["label"] == "SIMULATED", "nothing was decoded"
    assert set(made["breakdown"]["meaning"]) == {"simulated"}
    assert "limit_bytes" not in made["breakdown"]["overall"]


def test_measure_fp32_is_shown_next_to_fp16(here, run):
    said = run("measure", "dump", "--to-fp16", "--fp32").out
    assert "\ntotal fp32 " in said and "\nlayer 2 fp32 " in said and "\nlayer 0 fp32 " not in said
    assert "\nfp32: 1 layer, simulated too: fp32 words as they are, nothing rounded" in said
    made = json.loads(run("measure", "dump", "--fp32", "--json", "--to-fp16").out)
    plain = json.loads(run("measure", "dump", "--json", "--to-fp16").out)
    assert (made.pop("command"), plain.pop("command")) == (
        "kvmnn measure dump --fp32 --json --to-fp16",
        "kvmnn measure dump --json --to-fp16",
    )
    fp32 = made["breakdown"].pop("fp32")
    assert made == plain
    assert (fp32["overall"]["layers"], list(fp32["layers"])) == (1, ["2"])
    assert fp32["overall"]["raw_bytes"] == 2 * (K.nbytes + V.nbytes)
    for part in ("k", "v"):
        lanes = fp32["layers"]["2"][part]["lanes"]
        assert list(lanes) == ["0", "1", "2", "3"]
        assert sum(lane["simulated_bytes"] for lane in lanes.values()) == fp32["overall"][part]["simulated_bytes"]
    assert "--fp32: no fp32 words were measured" in run("measure", "dump", "--fp32", "--layer-ids", "0").out
    alone = json.loads(run("measure", "dump", "--fp32", "--layer-ids", "2", "--json").out)["breakdown"]
    assert alone["fp32"]["layers"] == fp32["layers"]
    assert "exclude each other" in run("measure", "dump", "--fp32", "--strict-fp16", code=2).err


def test_measure_fp32_is_measured_as_fp32_unless_to_fp16(here, run):
    layer = json.loads(run("measure", "dump", "--layer-ids", "2", "--json", "--encode").out)
    assert (layer["label"], layer["evaluation"]["converted_fp32_entries"]) == ("LOSSLESS", 0)
    sizes = layer["breakdown"]["layers"]["2"]
    assert sizes["raw_bytes"] == 2 * (K.nbytes + V.nbytes) == layer["evaluation"]["raw_bytes"]
    assert sizes["stored_bytes"] < sizes["raw_bytes"]
    assert list(sizes["k"]["lanes"]) == ["hi", "lo", "0", "1", "2", "3"]
    total = sum(lane["simulated_bytes"] for lane in sizes["k"]["lanes"].values())
    assert total == sizes["k"]["simulated_bytes"]
    said = run("measure", "dump", "--layer-ids", "2", "--encode").out
    assert "fp32: 1 layer, fp32 words as they are" in said
    assert "fp32 is measured as fp32; the evaluation rounds it to fp16 first, as --to-fp16 does" in said
    assert "    lane 3" in said and "    hi" not in said and "LOSSY" not in said
    for argv in (["dump", "--to-fp16"], ["--to-fp16", "dump"]):
        made = json.loads(run("measure", *argv, "--layer-ids", "2", "--json").out)
        assert (made["label"], made["evaluation"]["converted_fp32_entries"]) == ("LOSSY", 1)
        assert made["breakdown"]["overall"]["raw_bytes"] == K.nbytes + V.nbytes
    lines = [json.loads(line) for line in run("measure", "dump", "--jobs", 1, "--to-fp16", "--json").out.splitlines()]
    assert lines and all(line["document"]["label"] == "LOSSY" for line in lines)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--strict-fp16", "--layer-ids", "2"], "2 of 3 by --scope or its layers, 1 of 3 by --strict-fp16 (they are"),
        (["--stage", "decode"], "Left out: 3 of 3 by --stage"),
        (["--min-seq-len", "99999"], "Left out: 3 of 3 by --min-seq-len or --max-seq-len"),
    ],
)
def test_measure_nothing_left_names_the_option(here, run, argv, said):
    told = run("measure", "dump", *argv, code=1).err
    assert said in told.replace("\n", " ") and "--dump-dir" not in told


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--to-fp16", "--strict-fp16"], "--to-fp16 and --strict-fp16 exclude each other"),
        (["--to-fp16", "--dense"], "--to-fp16 without DIR is for measuring"),
        (["--to-fp16", "--analysis", "x"], "--to-fp16 without DIR is for measuring"),
        (["--to-fp16", "--allow-fp16"], "--allow-fp16 needs --to-fp16 DIR"),
        (["--to-fp16", "x", "--jobs", "1"], "--to-fp16 is not for --jobs and --dask"),
    ],
)
def test_measure_to_fp16_without_effect_is_refused(here, run, argv, said):
    assert said in run("measure", "dump", *argv, code=2).err


def test_measure_encode_table_is_labelled_stored(here, run):
    said = run("measure", "dump", "--encode", "--front-n", "3", "--to-fp16").out
    assert "STORED: frames as MNN makes them were encoded, decoded and compared: LOSSLESS" in said
    assert "LOSSY: 1 fp32 entries were rounded to fp16" in said


def test_measure_sources_of_equal_numbers_agree(here, run):
    np.savez("kv.npz", k=K.transpose(1, 0, 2), v=V.transpose(1, 0, 2))
    np.save("k.npy", K.transpose(1, 0, 2))
    np.save("v.npy", V.transpose(1, 0, 2))
    alone = json.loads(run("measure", "dump", "--json", "--front-n", "1").out)
    for inputs in (["kv.npz"], ["k.npy", "v.npy"]):
        other = json.loads(run("measure", *inputs, "--json").out)
        assert other["breakdown"]["overall"] == alone["breakdown"]["overall"]
    np.savez("tokens.npz", k=K, v=V)
    other = json.loads(run("measure", "tokens.npz", "--token-major", "--json").out)
    assert other["breakdown"]["overall"] == alone["breakdown"]["overall"]
    both = json.loads(run("measure", "dump", "kv.npz", "--json", "--front-n", "1").out)["evaluation"]
    assert both["dump_dir"] == [str(here / "dump"), str(here / "kv.npz")]
    assert both["raw_bytes"] == 2 * alone["evaluation"]["raw_bytes"]
    run("encode", "kv.npz", "-o", "bundle/", "-q")
    bundle = json.loads(run("measure", "bundle", "--json").out)
    assert bundle["breakdown"]["overall"] == alone["breakdown"]["overall"]


@pytest.mark.slow
def test_measure_runs_as_a_program(here):
    done = subprocess.run(
        [sys.executable, "-m", "kvmnn", "measure", "dump", "-q", "--threads", "2"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "simulated" in done.stdout


def test_measure_analysis_writes_its_files(here, run):
    Path("log.csv").write_text("run_id,prompt_tokens\nrun,257\n")
    said = run("measure", "dump", "--analysis", "an", "--run-log", "log.csv").out
    assert "Dumps that could not be read whole: 1" in said
    names = ["grouped_summary.md", "head_metrics.csv", "layer_metrics.csv", "summary.md"]
    assert sorted(path.name for path in Path("an").iterdir()) == names
    assert "## 257-512" in Path("an/grouped_summary.md").read_text()
    assert "exists already" in run("measure", "dump", "--analysis", "an", code=1).err
    made = json.loads(run("measure", "dump", "--analysis", "an2", "--skip-head-metrics", "--json").out)
    assert (made["tensors"], made["failed"]) == (4, 1)
    assert sorted(path.name for path in Path("an2").iterdir()) == ["layer_metrics.csv", "summary.md"]


def test_measure_to_fp16_converts_a_tree(here, run):
    said = run("measure", "dump", "--to-fp16", "half", code=1)
    assert "LOSSY: 1 dump rounded to fp16, 0 copied, 1 skipped" in said.out
    assert "1 dump not converted, first: " in said.err
    Path("dump/run/layer_1/meta_t0_40.json").unlink()
    made = json.loads(run("measure", "dump", "--to-fp16", "half", "--allow-fp16", "--json").out)
    assert (made["converted"], made["copied"], made["skipped"]) == (0, 1, 1)
    halves = json.loads(run("measure", "half", "--json", "--front-n", "3").out)
    assert halves["evaluation"]["converted_fp32_entries"] == 0
