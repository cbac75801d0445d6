"""Options may stand anywhere after the verb; misspelt options are reported before missing arguments."""

from __future__ import annotations

import argparse
import json
from itertools import permutations
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvmnn.cli import build_parser
from kvmnn.cli.command_parser import (
    COMMANDS,
    REPLACED_COMMANDS,
    REPLACED_OPTIONS,
    build_command_parser,
    list_command_parsers,
    parse_command_line,
    sort_words,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def namespace(words: list[str]) -> dict[str, object]:
    """What the words mean, but for how they were typed."""
    return {
        name: value for name, value in vars(parse_command_line(words)).items() if name not in ("run", "parser", "typed")
    }


LINES = [
    ("encode", ["a", "b", "c"], [["-o", "x/"], ["--effort=fast"], ["-q"], ["--tensor", "k"], ["--tensor", "v"]]),
    ("store", ["put", "S", "C", "D"], [["--model", "M"], ["--token-ids", "1,2"], ["-fq"], ["--size-limit", "3G"]]),
    ("verify", ["a", "b"], [["--against", "x"], ["--jobs", "2"], ["--json"]]),
    ("diff", ["a", "b"], [["--json"], ["--atol", "1"]]),
    ("eval", ["m"], [["--text", "t", "u"], ["--budget=5"], ["-o-"]]),
    ("decode", ["-"], [["-ox"], ["--forc"]]),
]


@pytest.mark.parametrize(("verb", "positional", "options"), LINES, ids=[line[0] for line in LINES])
def test_options_between_positional_arguments_mean_the_same(
    verb: str, positional: list[str], options: list[list[str]]
) -> None:
    """A sample of all interleavings; the order within each kind stays."""
    wanted = namespace([verb, *positional, *(word for option in options for word in option)])
    orders = list(permutations(range(len(positional) + len(options)), len(options)))
    for places in Random(1).sample(orders, k=min(len(orders), 60)):
        if list(places) != sorted(places):
            continue
        words, left, rest = [verb], list(options), list(positional)
        for at in range(len(positional) + len(options)):
            words += left.pop(0) if at in places else [rest.pop(0)]
        if ["--text", "t", "u"] in options and words.index("u") + 1 == words.index("m"):
            continue  # an option of many values takes all words up to the next option
        assert namespace(words) == wanted, words


def test_words_after_two_dashes_are_no_options() -> None:
    found = namespace(["encode", "a", "-o", "x/", "--", "-b", "--json"])
    assert (found["inputs"], found["output"], found["json"]) == (["a", "-b", "--json"], "x/", False)


def test_numbers_and_single_dashes_are_values() -> None:
    assert namespace(["encode", "-", "-o", "-"])["inputs"] == ["-"]
    found = namespace(["generate", "m", "--prompt", "-x is a flag", "--policy", "full"])
    assert found["prompt"] == "-x is a flag"
    order = sort_words(build_command_parser("encode")[1], ["--threads", "-1", "a"])
    assert (order.options, order.positional) == (["--threads", "-1"], ["a"])


def test_options_before_arguments_parse_in_every_verb() -> None:
    """Each option of each verb, before and after the arguments: argparse gives the same result."""
    verbs = list_command_parsers(build_parser())
    for verb in COMMANDS:
        parser = verbs[verb]
        for action in parser._actions:
            if not action.option_strings or action.nargs == 0 or action.nargs in ("+", "*"):
                continue
            name = action.option_strings[-1]
            value = str(next(iter(action.choices))) if action.choices else "1"
            before = sort_words(parser, [name, value, "p", "q"])
            behind = sort_words(parser, ["p", "q", name, value])
            assert before.to_words() == behind.to_words() == ["p", "q", name, value]
            assert sort_words(parser, [f"{name}={value}" if name[1] == "-" else name + value, "p"]).positional == ["p"]
            assert not before.unknown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("encode --hlep", "unrecognized arguments: --hlep (did you mean '--help'?)"),
        ("encode --effrot=fast", "unrecognized arguments: --effrot=fast (did you mean '--effort'?)"),
        ("store put S --modle M C", "unrecognized arguments: --modle (did you mean '--model'?)"),
        ("store match S --polcy lru", "unrecognized arguments: --polcy (see kvmnn store --help)"),
        ("encode a -o x/ --nonsense b", "unrecognized arguments: --nonsense (see kvmnn encode --help)"),
        ("encode -Z a", "unrecognized arguments: -Z"),
        ("encode --t 3 a", "ambiguous option: --t"),
        ("decode a b", "unrecognized arguments: b"),
        ("--verison", "did you mean '--version'"),
        ("-o x encode a", "options follow the verb: kvmnn encode -o"),
        ("--json", "the verb is missing"),
        ("mnn unpakc x", "there is no verb 'unpakc' (did you mean 'unpack'?) (see kvmnn mnn --help)"),
        ("mnn -o y unpack x", "options follow the verb: kvmnn mnn unpack -o"),
        ("--max-input-bytes 9 diff a b", "unrecognized arguments: --max-input-bytes"),
        ("encdoe --json", "there is no verb 'encdoe' (did you mean 'encode'?)"),
        ("encode", "the following arguments are required: IN"),
        ("encode a --tensor", "argument --tensor: expected one argument"),
    ],
)
def test_misspelt_option_is_reported_before_missing_arguments(run, line: str, said: str) -> None:
    assert said in run(*line.split(), code=2).err


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ("-q --threads 2 encode a", "encode a -q --threads=2"),
        ("--threads=2 --quiet encode a --json", "encode -q --json --thre 2 a"),
        ("-fq mnn -v --json compact a", "mnn compact a --force --quiet -v --json"),
        ("mnn --json unpack a", "mnn unpack --json a"),
    ],
)
def test_options_of_the_whole_program_stand_before_the_verb_or_after_it(before: str, behind: str) -> None:
    if " -v " in before:
        with pytest.raises(SystemExit):  # mnn compact has no more to print
            parse_command_line(before.split())
        before, behind = before.replace("-v ", ""), behind.replace("-v ", "")
    assert namespace(before.split()) == namespace(behind.split())


def test_parser_of_all_verbs_parses_program_options() -> None:
    assert build_parser().parse_args(["encode", "a", "-q"]).quiet


def test_help_precedes_errors(run) -> None:
    assert "usage: kvmnn encode" in run("encode", "--bogus", "-h").out
    assert "usage: kvmnn store [options] put STORE" in run("store", "put", "--help").out
    assert run("-V").out == run("--version").out
    assert "-V, --version" in run("--help").out


def test_mixed_order_command_lines_run(run) -> None:
    for name in ("layer_0.key", "layer_0.value"):
        np.save(f"{name}.npy", np.zeros((2, 5, 4), np.float16))
    run("encode", "layer_0.key.npy", "-o", "x/", "layer_0.value.npy", "--effort", "fast")
    assert len(json.loads(run("inspect", "--json", "x").out)["inputs"]) == 1
    run("store", "--fingerprint", "m", "put", "S", "--token-ids", "1,2,3,4,5", "x")
    assert run("store", "match", "--token-ids", "1,2,3", "S").out == "3\n"


def test_sort_words_keeps_the_meaning_of_argparse() -> None:
    """Lines with adjacent positional arguments parse as with argparse alone."""
    parser = build_command_parser("encode")[1]
    for line in ("x y -o z", "-o z x y", "--tensor a --tensor b x", "x -qvo z", "-oz --effo fast x"):
        words = line.split()
        known = [argparse.Namespace(), argparse.Namespace()]
        for into, given in zip(known, (words, sort_words(parser, words).to_words()), strict=True):
            parser.parse_known_args(given, into)
        assert known[0] == known[1]


@pytest.mark.parametrize("old", sorted(REPLACED_COMMANDS))
def test_replaced_commands_name_the_new_ones(run, old: str) -> None:
    assert run(old, "x", code=2).err == f"kvmnn: error: {old!r} is now {REPLACED_COMMANDS[old]!r}\n"


def test_replaced_options_name_the_new_ones(run) -> None:
    said = run("verify", "w.bin", "--as-reference", code=2).err
    assert said == "kvmnn: error: '--as-reference' is now 'kvmnn compressor verify --as-reference'\n"
    assert run("encode", "--help-packed", code=2).err == "kvmnn: error: '--help-packed' is now '--help-all'\n"
    assert run("eval", "m", "--tokens", "9", code=2).err == "kvmnn: error: '--tokens' is now '--max-tokens'\n"
    assert run("encode", "x", "--tokens=9", code=2).err == "kvmnn: error: '--tokens' is now '--valid-tokens'\n"
    assert run("encode", "x", "--batch", "0", code=2).err == "kvmnn: error: '--batch' is now '--part batch=N'\n"
    said = run("gate", "run", "m", "--max-lossless-decomp-p95-us", "9", code=2).err
    assert said.endswith("'--max-lossless-decomp-p95-us' is now '--limit max_lossless_decomp_p95_us=VALUE'\n")
    said = run("plan", "x", "--policy", "streaming", "--budget", "9", code=2).err
    assert said == "kvmnn: error: '--budget' is now '--policy NAME:budget=N'\n"
    assert run("diff", "x", "--ignore-mark", code=2).err.startswith("kvmnn: error: unrecognized arguments")
    assert run("diff", "x", "--ignore-markers", code=2).err == (
        "kvmnn: error: '--ignore-markers' is now '--ignore markers'\n"
    )
    for command, replaced in REPLACED_OPTIONS.items():
        known = list_command_parsers(build_parser())[command]._option_string_actions
        assert not known.keys() & replaced.keys(), command
