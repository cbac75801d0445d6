"""``kvmnn generate``: both texts, their first difference, kept tokens; one clear line for errors."""

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

FIXTURE = FIXTURES / "lm"
PROMPT = "def read_file(path):\n    return open("


@pytest.fixture
def generate(run: Callable[..., SimpleNamespace]) -> Callable[..., SimpleNamespace]:
    def call(*argv: object, code: int = 0) -> SimpleNamespace:
        found = run("generate", *argv, code=code)
        assert code == 0 or found.err.startswith("kvmnn: error: ")
        assert code == 0 or len(found.err.splitlines()) == 1
        return found

    return call


def document(found: SimpleNamespace) -> Any:
    return json.loads(found.out)


def test_generate_shows_both_texts_side_by_side(generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    asked = [FIXTURE, "--prompt", PROMPT, "--policy", "streaming", "--budget", 8, "--max-new-tokens", 24]
    said = generate(*asked).out
    found = document(generate(*asked, "--json"))
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


@pytest.mark.slow
def test_generate_large_budget_gives_equal_text(generate: Callable[..., Any]) -> None:
    asked = [FIXTURE, "--prompt", PROMPT, "--policy", "h2o_decayed_heads", "--budget", 400, "--max-new-tokens", 12]
    found = document(generate(*asked, "--json"))
    assert (found["label"], found["equal"], found["first_difference"]) == ("LOSSLESS", True, None)
    assert found["full"]["text"] == found["cut"]["text"]
    assert "equal: all 12 new tokens" in generate(*asked).out


def test_generate_without_policy_uses_the_full_cache(generate: Callable[..., Any]) -> None:
    found = document(generate(FIXTURE, "--prompt", PROMPT, "--max-new-tokens", 6, "--json"))
    assert (found["label"], found["cut"], found["policy"]["policy"]) == ("LOSSLESS", None, "full")
    said = generate(FIXTURE, "--prompt", PROMPT, "--max-new-tokens", 6).out
    assert said.startswith(found["full"]["text"].split("\n")[0]) and "LOSSY" not in said


@pytest.mark.slow
def test_generate_prompt_file_and_model_file(generate: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    tail = ["--max-new-tokens", 8, "--json"]
    by_text = document(generate(FIXTURE, "--prompt", PROMPT, *tail))
    by_file = document(generate(FIXTURE / "model.onnx", "--prompt-file", tmp_path / "prompt.txt", *tail))
    assert by_text["full"]["ids"] == by_file["full"]["ids"]
    assert by_file["prompt"] == PROMPT


@pytest.mark.slow
def test_generate_packed_layout_gives_equal_ids(generate: Callable[..., Any]) -> None:
    asked = [FIXTURE, "--prompt", PROMPT, "--policy", "streaming", "--budget", 16, "--max-new-tokens", 10, "--json"]
    plain, packed = document(generate(*asked)), document(generate(*asked, "--layout", "x86-avx2"))
    assert plain["cut"]["ids"] == packed["cut"]["ids"]


@pytest.mark.slow
def test_generate_seed_reproduces_the_text(generate: Callable[..., Any]) -> None:
    asked = [FIXTURE, "--prompt", PROMPT, "--max-new-tokens", 12, "--temperature", 1.5, "--top-k", 50, "--json"]
    one, again, other = (document(generate(*asked, "--seed", seed)) for seed in (7, 7, 8))
    assert one["full"]["ids"] == again["full"]["ids"] != other["full"]["ids"]
    assert one["sampling"] == {"temperature": 1.5, "top_k": 50, "seed": 7}


def test_generate_quiet_prints_only_the_result(generate: Callable[..., Any]) -> None:
    found = generate(FIXTURE, "--prompt", "x", "--max-new-tokens", 2, "-q")
    assert "new tokens" in found.out and found.err == ""


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--prompt", "x", "--policy", "nope"], 2, "unknown policy 'nope'"),
        (["--prompt", "x", "--policy", "streaming:sonk=4"], 2, "has no option 'sonk'"),
        (["--prompt", "x", "--budget", "5"], 2, "--budget and --skip-layers need a --policy"),
        (["--prompt", "x", "--policy", "h2o_engine", "--skip-layers", "0"], 2, "h2o_engine has no skip_layers"),
        (
            ["--prompt", "x", "--policy", "h2o_engine", "--budget", "5"],
            2,
            "h2o_engine: it has none: target_lossy_ratio",
        ),
        (["--prompt", "x", "--policy", "streaming:budget=9", "--budget", "5"], 2, "the policy says its size itself"),
        (["--prompt", "x", "--policy", "streaming", "--budget", "2"], 2, "streaming"),
        (["--prompt", "x", "--top-k", "5"], 2, "--top-k needs a --temperature"),
        (["--prompt", "x", "--temperature", "-1"], 2, "'-1' is not a number, at least 0"),
        (["--prompt", "x", "--temperature", "nan"], 2, "'nan' is not a number"),
        (["--prompt", "x", "--max-new-tokens", "0"], 2, "'0' is not a whole number above zero"),
        (["--prompt", "x", "--prompt-file", "y"], 2, "not allowed with argument"),
        ([], 2, "one of the arguments --prompt --prompt-file is required"),
        (["--prompt", "x", "--max-new-tokens", "4097"], 1, "at most 4,095 new ones"),
        (["--prompt", "x", "--max-new-tokens", "4097", "--policy", "streaming"], 1, "made for"),
        (["--prompt", b"\xff".decode("utf-8", "surrogateescape")], 1, "--prompt: is not UTF-8: byte 0 is 0xff"),
        (["--prompt-file", "/nonexistent"], 1, "/nonexistent"),
        (["--prompt", "x", "--tokenizer", "/nonexistent.json"], 1, "/nonexistent.json"),
        (["--prompt", "x", "--layout", "nope", "--max-new-tokens", "2"], 1, "nope"),
    ],
)
def test_generate_error_is_one_line_with_exit_code(
    generate: Callable[..., Any], argv: list[str], code: int, message: str
) -> None:
    assert message in generate(FIXTURE, *argv, code=code).err


def test_generate_damaged_model_is_refused(generate: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes((FIXTURE / "model.onnx").read_bytes()[:5000])
    shutil.copy(FIXTURE / "tokenizer.json", tmp_path)
    assert "model.onnx" in generate(tmp_path, "--prompt", "x", code=1).err
    assert (
        "does not exist"
        in generate(tmp_path / "no", "--prompt", "x", "--tokenizer", FIXTURE / "tokenizer.json", code=1).err
    )


@pytest.mark.parametrize("name", ["tokenizers", "onnxruntime"])
def test_generate_missing_package_is_named(
    generate: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert (
        f"this needs the package {name}: pip install onnxruntime onnx tokenizers"
        in generate(FIXTURE, "--prompt", "x", code=3).err
    )


@pytest.mark.slow
def test_generate_store_reuses_the_prompt(generate: Callable[..., Any], tmp_path: Path) -> None:
    asked = [FIXTURE, "--prompt", PROMPT * 3, "--max-new-tokens", 3, "--store", tmp_path / "store"]
    first, again = document(generate(*asked, "--json")), document(generate(*asked, "--json"))
    assert (first["full"]["store"]["tokens"], first["full"]["store"]["put"]["known_tokens"]) == (0, 0)
    assert again["full"]["store"]["tokens"] == again["prompt_tokens"] - 1
    assert first["full"]["ids"] == again["full"]["ids"]
    assert "prompt from the store" in generate(*asked).out
    (tmp_path / "text").write_text("no store")
    refused = generate(*asked[:-1], tmp_path / "text", code=1)
    assert "text" in refused.err


def test_generate_store_that_does_not_answer_is_a_miss(generate: Callable[..., Any]) -> None:
    """Nothing listens at port 1."""
    pytest.importorskip("redis")
    asked = [FIXTURE, "--prompt", PROMPT, "--max-new-tokens", 3]
    found = document(generate(*asked, "--store", "redis://127.0.0.1:1/0", "--json"))
    assert found["full"]["ids"] == document(generate(*asked, "--json"))["full"]["ids"]
    assert found["full"]["store"]["tokens"] == 0 and "does not answer" in found["full"]["store"]["notes"][0]
