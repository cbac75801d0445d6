"""What a packed cache was made with and what was cut of it: compared, shown, and lost only with a word."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cut(prefix, run):
    """`cut/`: the same without 8 of its last 20 tokens."""
    run("compact", *prefix.argv, "--remove", 20, "--reserve", "0:4,12:8", "-o", "cut/")
    return "layer 0 holds the tokens 0:54, 62:8"


def test_another_model_is_a_difference(prefix, model, run):
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


def test_frames_say_what_was_cut(cut, run):
    run("encode", "cut/", "-o", "f/")
    assert f"  {cut}\n  {cut.replace('0', '1', 1)}\n" in run("inspect", "f/").out


@pytest.mark.parametrize("argv", ["-o x/", "--as dump -o x/"])
def test_where_tokens_stood_is_lost_with_a_word(cut, run, argv):
    output = argv.split()[-1]
    said = run("unpack", "cut/", *argv.split()).err
    assert said == (
        f"kvmnn: note: {output} does not say which tokens of the text it holds, .safetensors and .npz do: {cut} and so "
        "on for 2 layers\n"
    )
    again = run("pack", output, "--name", "q", "--backend", "x86-avx2", "-o", "q/").err
    assert again == ("kvmnn: note: nothing says which tokens of the text the arrays hold: noted as the first 62\n")


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz"])
def test_files_that_say_where_tokens_stood(cut, run, name):
    assert run("unpack", "cut/", "-o", name).err == ""
    assert run("pack", name, "-o", "r/").err == ""
    assert cut in run("inspect", "r/").out
