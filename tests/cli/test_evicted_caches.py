"""The model and the evicted tokens of a packed cache: compared, shown, and never lost without a note."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def cut(prefix, run):
    """`cut/`: the same without 8 of its last 20 tokens."""
    run("mnn", "compact", *prefix.argv, "--remove", 20, "--reserve", "0:4,12:8", "-o", "cut/")
    return "layer 0 holds the tokens 0:54, 62:8"


def test_verify_and_diff_report_another_model(prefix, model, run):
    other = model.with_name("other")
    other.mkdir()
    (other / "llm.mnn").write_bytes(b"another graph")
    (other / "llm_config.json").write_bytes((model / "llm_config.json").read_bytes())
    run("encode", *prefix.argv, "--model", model, "-o", "f/")
    run("encode", *prefix.argv, "-o", "g/")
    run("verify", "f/", "--against", "p", "--model", model)
    for argv in (["verify", "f/", "--against", "p"], ["diff", "f/", *prefix.argv]):
        said = run(*argv, "--model", other, code=1).err
        assert f"f/: the cache is of another model than the one in {other}" in said
    said = run("verify", "g/", "--against", "p", "--model", model, code=1).err
    assert "g/: the manifest does not say which model the cache is of" in said
    Path("ids.json").write_text("[1, 2]")
    said = run("verify", "f/", "--against", "p", "--token-ids", "ids.json", code=1).err
    assert "f/: the manifest does not say which token ids the cache was made from" in said


def test_inspect_frames_shows_evicted_tokens(cut, run):
    run("encode", "cut/", "-o", "f/")
    assert f"  {cut}\n  {cut.replace('0', '1', 1)}\n" in run("inspect", "f/").out


LOSS_NOTE = "kvmnn: note: LOSSY: compacted: 62 of 70 tokens are here\n"


def test_unpack_to_dump_notes_lost_positions(cut, run):
    output = "x/"
    said = run("mnn", "unpack", "cut/", "--output-kind", "dump", "-o", output).err
    assert said == LOSS_NOTE + (
        f"kvmnn: note: {output} does not say which tokens of the text it holds, .safetensors and .npz do: {cut} and so "
        "on for 2 layers\n"
    )
    again = run("mnn", "pack", output, "--name", "q", "--backend", "x86-avx2", "-o", "q/").err
    text = "kvmnn: note: nothing says which tokens of the text the arrays hold: noted as the first 62\n"
    assert again == LOSS_NOTE + text


def test_decode_of_a_zarr_store_keeps_positions(cut, run):
    run("encode", "cut/", "-o", "s.zarr")
    assert "4 arrays, positions.json and loss.json" in run("decode", "s.zarr", "-o", "x/").out
    run("mnn", "pack", "x/", "--name", "p", "--backend", "x86-avx2", "-o", "r/")
    documents = [next(Path(folder).glob("*.kvmnn.json")) for folder in ("cut", "r")]
    layers = [json.loads(document.read_text())["layers"] for document in documents]
    assert [layer["positions"] for layer in layers[0]] == [layer["positions"] for layer in layers[1]]


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "x/"])
def test_unpack_and_pack_keep_positions(cut, run, name):
    assert run("mnn", "unpack", "cut/", "-o", name).err == LOSS_NOTE
    layout = ("--name", "p", "--backend", "x86-avx2") if name == "x/" else ()  # arrays alone know no layout
    said = run("mnn", "pack", name, *layout, "-o", "r/").err
    assert said == LOSS_NOTE + (
        "kvmnn: note: true positions are as positions.json next to the arrays has them\n" if name == "x/" else ""
    )
    assert cut in run("inspect", "r/").out


def test_diff_equal_rows_at_other_positions_differ(cut, run):
    run("mnn", "unpack", "cut/", "-o", "plain/")
    assert run("diff", "cut/", "plain/").out.startswith("equal")
    Path("plain/positions.json").unlink()
    run("mnn", "pack", "plain/", "--name", "p", "--backend", "x86-avx2", "-o", "first/")
    for atol, ending in (((), "equal otherwise: "), (("--atol", "0"), "nothing has its like")):
        said = run("diff", "cut/", "first/", *atol, code=1).out
        assert "token 54 stands at 62 and 54 of the text, and 7 more differ" in said
        assert ending in said


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ([0, 2], "layer 0: token 1 stands at 1 and 2 of the text, and 0 more differ"),
        ([[0, 1], [0, 3]], ""),  # the other does not say it by head
    ],
)
def test_diff_compares_positions_json(tmp_path, run, positions, said):
    for name, places in (("a", [0, 1]), ("b", positions)):
        folder = tmp_path / name
        folder.mkdir()
        for array in ("layer_0.key", "layer_0.value", "layer_1.key", "layer_1.value"):
            np.save(folder / f"{array}.npy", np.ones((2, 2, 4), np.float16))
        layers = [{"layer": 0, "positions": places}, {"layer": 1, "positions": [4, 7]}]
        (folder / "positions.json").write_text(json.dumps({"layers": layers}))
    found = run("diff", tmp_path / "a", tmp_path / "b", code=1 if said else 0)
    assert said in found.out
    run("diff", tmp_path / "a", tmp_path / "b", "--tensor", "layer_1.key")
    (tmp_path / "b" / "positions.json").unlink()
    run("diff", tmp_path / "a", tmp_path / "b")


def test_rotated_keys_are_a_loss_in_copies(prefix, run):
    """K of these arrays is no rotation that a trial finds: --ignore contradictions rotates it as --rope says."""
    rope = ("--rerotate", "--rope", "theta=10000,dims=6", "--ignore", "contradictions")
    run("mnn", "compact", *prefix.argv, "--remove", 20, "--reserve", "0:4,12:8", *rope, "-o", "rotated/")
    encoded = run("encode", "rotated/", "-o", "f/")
    assert "LOSSLESS copy of LOSSY K and V" in encoded.out and "K was rotated to other positions" in encoded.out
