"""Help in an 80-column terminal: no line is longer, nothing is cut, every option is described."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from kvmnn.cli import build_parser
from kvmnn.cli.command_parser import (
    COMMANDS,
    SUBCOMMANDS,
    TOP_COMMANDS_BY_TITLE,
    collect_help,
    get_subparsers,
    list_command_parsers,
    parse_command_line,
)
from kvmnn.cli.commands import gate, store
from kvmnn.errors import KvmnnError
from kvmnn.packed.backends import get_backend


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The whole command's and those of the verbs, by their names."""
    parser = build_parser()
    groups = get_subparsers(parser).choices
    return {"kvmnn": parser, **{name: groups[name] for name in SUBCOMMANDS}, **list_command_parsers(parser)}


PARSERS = parsers()


def test_help_lists_each_verb_in_one_group() -> None:
    assert sorted(PARSERS) == sorted(["kvmnn", *SUBCOMMANDS, *COMMANDS])
    assert len(set(COMMANDS)) == len(COMMANDS)
    shown = PARSERS["kvmnn"].format_help()
    places = [shown.index(f"\n{title}:\n") for title in TOP_COMMANDS_BY_TITLE]
    assert places == sorted(places)
    for title, verbs in TOP_COMMANDS_BY_TITLE.items():
        section = shown.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  ([a-z-]+) ", section, re.MULTILINE) == list(verbs)


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("verb", sorted(PARSERS))
def test_help_lines_fit_the_terminal(verb, columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = PARSERS[verb]
    for shown in (parser.format_help(), parser.format_usage()):
        for line in shown.splitlines():
            example = columns < 80 and line.startswith(("  ", "usage: "))  # these are written for 80
            assert len(line) <= (80 if example else columns), line


@pytest.mark.parametrize("verb", sorted(PARSERS))
def test_help_of_any_width_has_equal_words(verb, monkeypatch) -> None:
    """A narrow terminal shows the words that a wide one shows."""

    def words(columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        return PARSERS[verb].format_help().split()

    assert words(80) == words(200)


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_describes_every_option(verb) -> None:
    for action, text in collect_help(PARSERS[verb]).items():
        assert text, action
        assert "(default " not in text, f"{action}: (default: ...)"
        default = action.default
        if type(default) in (int, float) and action.nargs != 0 and default > 0:
            assert "default" in text, f"{action}: says nothing of its default"


def test_options_have_equal_flags_in_all_verbs() -> None:
    """Each option has one letter and one meaning; flags of older versions are hidden."""
    seen: dict[str, set[tuple[str, ...]]] = {}
    for verb in COMMANDS:
        shown = {action for action in collect_help(PARSERS[verb]) if action.option_strings}
        for action in shown:
            seen.setdefault(action.dest, set()).add(tuple(action.option_strings))
        written = {"--output", "--out-json"} & {name for action in shown for name in action.option_strings}
        assert PARSERS[verb].accepts("--force") or not written, verb
    assert {dest: names for dest, names in seen.items() if len(names) > 1} == {}
    assert seen["provider"] == {("--provider",)}


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_is_short_and_has_three_examples(verb, run, monkeypatch) -> None:
    """60 lines of an 80-column terminal; the rest is in --help-all."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*verb.split(), "--help").out.splitlines()
    assert len(shown) <= 60
    assert len([line for line in shown if line.startswith("  kvmnn ")]) == 3
    everything = run(*verb.split(), "--help-all").out if verb != "completion" else ""
    parser = PARSERS[verb]
    for action in collect_help(parser):
        assert not action.option_strings or verb == "completion" or action.option_strings[-1] in everything
    assert set(parser.shown or ()) <= parser._option_string_actions.keys()


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_examples_parse(verb) -> None:
    for example in PARSERS[verb].examples:
        assert example.startswith(f"kvmnn {verb} ")
        parse_command_line(shlex.split(example)[1:])


@pytest.mark.parametrize("verb", ["store", "gate"])
def test_help_of_actions_is_short_and_has_examples(verb, run, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    actions = store._SPEC_BY_ACTION if verb == "store" else gate._OPTIONS_BY_ACTION
    for action in actions:
        shown = run(verb, action, "--help").out.splitlines()
        assert len(shown) <= 60
        assert any(line.startswith(f"  kvmnn {verb} {action} ") for line in shown), action


def test_help_folds_rare_options(run, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for verb in ("encode", "inspect", "mnn pack", "measure"):
        assert "--layer-order" not in run(*verb.split(), "--help").out
        more = run(*verb.split(), "--help").out.partition("More options (--help-all):")[2]
        assert "packed files" in " ".join(more.split())
        shown = run(*verb.split(), "--help-all").out
        assert "--layer-order" in shown
        assert max(map(len, shown.splitlines())) <= 80


def test_help_of_store_actions_lists_their_options_only(run) -> None:
    for action, options in store._SPEC_BY_ACTION.items():
        shown = run("store", action, "--help-all").out
        assert shown.startswith(f"usage: kvmnn store [options] {action} STORE{' [IN ...]' * bool(options.inputs)}\n")
        assert re.search(rf"^  (\w+, )?{action}\b.* (STORE|TRACE)", shown, re.MULTILINE)
        assert ("--token-ids IDS" in shown) == ("token_ids" in options.options)
        assert ("stream=N" in shown) == ("stream" in options.options)
        assert ("--capacity" in shown) == (action == "get")


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["encdoe"], "'encode'"),
        (["dump_kv"], "'dump-kv'"),
        (["encode", "x", "--effort", "exakt"], "'exact'"),
        (["mnn", "pack", "x", "-o", "y", "--backend", "arm64-pf16"], "'arm64-fp16'"),
        (["eval", "m", "--text", "t", "--policy", "streamin"], "'streaming'"),
        (["eval", "m", "--text", "t", "--preset", "knorm-fix"], "'knorm-fixed'"),
        (["eval", "m", "--text", "t", "--policy", "streaming:sinks=2"], "'sink'"),
        (["generate", "m", "--prompt", "p", "--policy", "L2-fixed"], "'l2_fixed'"),
        (["encode", "x", "--no-verfy"], "'--no-verify'"),
        (["completion", "fsh"], "'fish'"),
    ],
)
def test_misspelt_words_get_suggestions(run, argv, meant) -> None:
    assert f"did you mean {meant}" in run(*argv, code=2).err


def test_misspelt_backend_gets_suggestion() -> None:
    with pytest.raises(KvmnnError, match="did you mean 'arm64-fp16'"):
        get_backend("arm64_fp16")


def test_option_slots_are_fewer_than_580() -> None:
    """Options of the whole program, and of all verbs: once for each verb that has them, hidden ones included."""
    slots = {
        verb: [action for action in PARSERS[verb]._actions if action.option_strings] for verb in ("kvmnn", *COMMANDS)
    }
    assert sum(map(len, slots.values())) < 580
