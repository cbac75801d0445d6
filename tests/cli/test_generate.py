"""``kvmnn generate``: both texts, where they part, what was kept; and one clear line where it cannot."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repository import FIXTURES

from kvmnn.cli.command import main
from kvmnn.cli.side_by_side import columns, side_by_side, wrapped

FIXTURE = FIXTURES / "lm"
PROMPT = "def read_file(path):\n    return open("


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    def call(*argv: object, code: int = 0) -> SimpleNamespace:
        capsys.readouterr()
        found = main(["generate", *map(str, argv)])
        streams = capsys.readouterr()
        assert found == code, streams.err
        assert code == 0 or streams.err.startswith("kvmnn: error: ")
        assert code == 0 or len(streams.err.splitlines()) == 1
        return SimpleNamespace(out=streams.out, err=streams.err)

    return call


def document(found: SimpleNamespace) -> Any:
    return json.loads(found.out)


def test_both_texts_side_by_side(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    asked = [FIXTURE, "--prompt", PROMPT, "--policy", "streaming", "--budget", 8, "--max-tokens", 24]
    said = run(*asked).out
    found = document(run(*asked, "--json"))
    assert (found["verb"], found["label"], found["equal"]) == ("generate", "LOSSY", False)
    assert found["cut"]["tokens_kept"] == [8] * 6
    assert found["full"]["tokens_kept"] == [found["prompt_tokens"] + 23] * 6
    place = found["first_difference"]
    assert found["full"]["ids"][:place] == found["cut"]["ids"][:place]
    assert found["full"]["ids"][place] != found["cut"]["ids"][place]
    lines = said.splitlines()
    assert max(map(len, lines)) <= 100
    assert re.match(r"full cache +LOSSY: streaming 8$", lines[0])
    assert f"equal up to new token {place}, different from {place + 1} of 24 on" in said
    assert any("|" in line for line in lines[2:])
    assert found["full"]["text"].splitlines()[0][:20] in said
    assert re.search(r"tokens kept of seen +(\d+) of \1 +8 of \1", said)


def test_a_large_budget_gives_the_same_text(run: Callable[..., Any]) -> None:
    asked = [FIXTURE, "--prompt", PROMPT, "--policy", "h2o_decayed_heads", "--budget", 400, "--max-tokens", 12]
    found = document(run(*asked, "--json"))
    assert (found["label"], found["equal"], found["first_difference"]) == ("LOSSLESS", True, None)
    assert found["full"]["text"] == found["cut"]["text"]
    assert "equal: all 12 new tokens" in run(*asked).out


def test_the_full_cache_alone(run: Callable[..., Any]) -> None:
    found = document(run(FIXTURE, "--prompt", PROMPT, "--max-tokens", 6, "--json"))
    assert (found["label"], found["cut"], found["policy"]["policy"]) == ("LOSSLESS", None, "full")
    said = run(FIXTURE, "--prompt", PROMPT, "--max-tokens", 6).out
    assert said.startswith(found["full"]["text"].split("\n")[0]) and "LOSSY" not in said


def test_prompts_from_files_and_model_named_by_its_file(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    tail = ["--max-tokens", 8, "--json"]
    by_text = document(run(FIXTURE, "--prompt", PROMPT, *tail))
    by_file = document(run(FIXTURE / "model.onnx", "--prompt-file", tmp_path / "prompt.txt", *tail))
    assert by_text["full"]["ids"] == by_file["full"]["ids"]
    assert by_file["prompt"] == PROMPT


def test_packed_layouts_hold_the_same_cache(run: Callable[..., Any]) -> None:
    asked = [FIXTURE, "--prompt", PROMPT, "--policy", "streaming", "--budget", 16, "--max-tokens", 10, "--json"]
    plain, packed = document(run(*asked)), document(run(*asked, "--packed", "x86-avx2"))
    assert plain["cut"]["ids"] == packed["cut"]["ids"]


def test_seeds_draw_the_same_text_again(run: Callable[..., Any]) -> None:
    asked = [FIXTURE, "--prompt", PROMPT, "--max-tokens", 12, "--temperature", 1.5, "--top-k", 50, "--json"]
    one, again, other = (document(run(*asked, "--seed", seed)) for seed in (7, 7, 8))
    assert one["full"]["ids"] == again["full"]["ids"] != other["full"]["ids"]
    assert one["sampling"] == {"temperature": 1.5, "top_k": 50, "seed": 7}


def test_quiet_is_silent(run: Callable[..., Any]) -> None:
    found = run(FIXTURE, "--prompt", "x", "--max-tokens", 2, "-q")
    assert (found.out, found.err) == ("", "")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--prompt", "x", "--policy", "nope"], 2, "unknown policy 'nope'"),
        (["--prompt", "x", "--policy", "streaming:sonk=4"], 2, "has no option 'sonk'"),
        (["--prompt", "x", "--budget", "5"], 2, "--budget and --skip-layers need a --policy"),
        (["--prompt", "x", "--policy", "streaming:budget=9", "--budget", "5"], 2, "the policy says its size itself"),
        (["--prompt", "x", "--policy", "streaming", "--budget", "2"], 2, "streaming"),
        (["--prompt", "x", "--top-k", "5"], 2, "--top-k needs a --temperature"),
        (["--prompt", "x", "--temperature", "-1"], 2, "'-1' is not a number, at least 0"),
        (["--prompt", "x", "--temperature", "nan"], 2, "'nan' is not a number"),
        (["--prompt", "x", "--max-tokens", "0"], 2, "'0' is not a whole number above zero"),
        (["--prompt", "x", "--prompt-file", "y"], 2, "not allowed with argument"),
        ([], 2, "one of the arguments --prompt --prompt-file is required"),
        (["--prompt", "x", "--max-tokens", "4097"], 1, "at most 4,095 new ones"),
        (["--prompt", "x", "--max-tokens", "4097", "--policy", "streaming"], 1, "made for"),
        (["--prompt", b"\xff".decode("utf-8", "surrogateescape")], 1, "--prompt: is not UTF-8: byte 0 is 0xff"),
        (["--prompt-file", "/nonexistent"], 1, "/nonexistent"),
        (["--prompt", "x", "--tokenizer", "/nonexistent.json"], 1, "/nonexistent.json"),
        (["--prompt", "x", "--packed", "nope", "--max-tokens", "2"], 1, "nope"),
    ],
)
def test_one_line_and_a_code(run: Callable[..., Any], argv: list[str], code: int, message: str) -> None:
    assert message in run(FIXTURE, *argv, code=code).err


def test_a_model_that_is_none(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes((FIXTURE / "model.onnx").read_bytes()[:5000])
    shutil.copy(FIXTURE / "tokenizer.json", tmp_path)
    assert "model.onnx" in run(tmp_path, "--prompt", "x", code=1).err
    assert (
        "does not exist" in run(tmp_path / "no", "--prompt", "x", "--tokenizer", FIXTURE / "tokenizer.json", code=1).err
    )


@pytest.mark.parametrize("name", ["tokenizers", "onnxruntime"])
def test_a_missing_package_is_named(run: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert "kvmnn[lm]" in run(FIXTURE, "--prompt", "x", code=3).err


# -- the two columns --------------------------------------------------------------------------------------------------


def test_lines_are_cut_where_the_column_ends() -> None:
    assert wrapped("abcdef\n\ngh", 4) == ["abcd", "ef", "", "gh"]
    assert wrapped("a\tb", 10) == ["a   b"]
    assert wrapped("日本語x", 4) == ["日本", "語x"]
    assert columns("日本e\u0301") == 5


def test_no_text_commands_the_terminal() -> None:
    assert wrapped("a\x1b[2Jb\rc\x07\u202e", 80) == ["a\\x1b[2Jb\\rc\\x07\\u202e"]


def test_differing_lines_are_marked() -> None:
    shown = side_by_side(("left", "same\none\nx"), ("right", "same\ntwo"), 60).splitlines()
    column = (60 - 3) // 2
    marks = [line.ljust(60)[column + 1] for line in shown]
    assert marks == [" ", " ", " ", "|", "|"]
    assert shown[3].split("|") == ["one".ljust(column + 1), " two"]


def test_narrow_terminals_get_one_below_the_other() -> None:
    shown = side_by_side(("left", "a" * 40), ("right", "b"), 30)
    assert shown == f"-- left --\n{'a' * 30}\n{'a' * 10}\n\n-- right --\nb"
