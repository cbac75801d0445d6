"""Completions for shells and a manual page, made from the command's parser.

Built here instead of with shtab, which has no fish and would be one more package to install.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from . import help
from .parser import verbs_of


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a verb: its names, the choices of its value (none: any), its help; `value` is what it is called."""

    names: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A verb with its options and the choices of its arguments (none: files)."""

    name: str
    summary: str
    options: tuple[Option, ...]
    choices: tuple[str, ...]


def described(parser: argparse.ArgumentParser) -> list[Verb]:
    """What completions need to know of every verb."""
    verbs = verbs_of(parser)
    summaries = {action.dest: action.help or "" for action in verbs._get_subactions()}
    return [
        Verb(
            name=name,
            summary=summaries[name],
            options=tuple(_options(verb)),
            choices=tuple(
                str(choice) for a in verb._actions if not a.option_strings and a.choices for choice in a.choices
            ),
        )
        for name, verb in verbs.choices.items()
    ]


def _options(verb: argparse.ArgumentParser) -> Iterator[Option]:
    for action, text in help.help_of(verb).items():
        if action.option_strings:
            yield Option(
                names=tuple(action.option_strings),
                value="" if action.nargs == 0 else str(action.metavar or action.dest.upper()),
                choices=tuple(map(str, action.choices or _names(action.dest))),
                text=text,
            )


def _names(value: str) -> Iterable[str]:
    """What a value that goes on (``NAME:option=value``) can begin with."""
    if value == "policy":
        from ..policies import POLICIES

        return POLICIES
    if value == "preset":
        from ..evaluation.setup.presets import PRESETS

        return PRESETS
    return ()


def bash(verbs: list[Verb]) -> str:
    """For ``~/.local/share/bash-completion/completions/kvmnn``."""
    lines = [
        "# bash completion of kvmnn",
        "_kvmnn() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=",
        "    COMPREPLY=()",
        "    if ((COMP_CWORD == 1)); then",
        f"        words='{' '.join(verb.name for verb in verbs)} --help --version'",
        "    else",
        "        case ${COMP_WORDS[1]}:$before in",
    ]
    for verb in verbs:
        for option in verb.options:
            if option.value:
                patterns = "|".join(f"{verb.name}:{name}" for name in option.names)
                lines.append(f"            {patterns}) words='{' '.join(option.choices)}'; [[ $words ]] || return ;;")
    lines += [
        "        esac",
        "        [[ $words ]] || case ${COMP_WORDS[1]} in",
    ]
    for verb in verbs:
        names = " ".join(name for option in verb.options for name in option.names if name.startswith("--"))
        arguments = f" || words='{' '.join(verb.choices)}'" if verb.choices else ""
        lines.append(f"            {verb.name}) [[ $word == -* ]] && words='{names}'{arguments} ;;")
    return "\n".join(
        [
            *lines,
            "        esac",
            "    fi",
            '    [[ $words ]] && mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")',
            "}",
            "complete -o bashdefault -o default -F _kvmnn kvmnn",
            "",
        ]
    )


def zsh(verbs: list[Verb]) -> str:
    """For a file ``_kvmnn`` in a folder of ``$fpath``."""

    def quoted(text: str) -> str:
        return "'" + text.replace("'", "'\\''") + "'"

    def plain(text: str) -> str:
        return "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in text)

    lines = ["#compdef kvmnn", "_kvmnn() {", "    local -a verbs=("]
    lines += [f"        {quoted(f'{verb.name}:{plain(verb.summary)}')}" for verb in verbs]
    lines += [
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe verb verbs",
        "        return",
        "    fi",
        "    shift words",
        "    (( CURRENT-- ))",
        "    case $words[1] in",
    ]
    for verb in verbs:
        lines.append(f"        {verb.name})")
        lines.append("            _arguments \\")
        for option in verb.options:
            values = f"({' '.join(option.choices)})" if option.choices else "_files"
            value = f":{plain(option.value)}:{values}" if option.value else ""
            lines += [f"                {quoted(f'*{name}[{plain(option.text)}]{value}')} \\" for name in option.names]
        arguments = f"({' '.join(verb.choices)})" if verb.choices else "_files"
        lines += [f"                {quoted(f'*:file:{arguments}')}", "            ;;"]
    return "\n".join([*lines, "    esac", "}", '_kvmnn "$@"', ""])


def fish(verbs: list[Verb]) -> str:
    """For ``~/.config/fish/completions/kvmnn.fish``."""

    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = ["# fish completion of kvmnn"]
    first = "complete -c kvmnn -n __fish_use_subcommand -f"
    lines += [f"{first} -a {quoted(verb.name)} -d {quoted(verb.summary)}" for verb in verbs]
    for verb in verbs:
        start = f"complete -c kvmnn -n {quoted(f'__fish_seen_subcommand_from {verb.name}')}"
        if verb.choices:
            lines.append(f"{start} -f -a {quoted(' '.join(verb.choices))}")
        for option in verb.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = " -r" if option.value else ""
            if option.choices:
                value = f" -x -a {quoted(' '.join(option.choices))}"
            lines.append(f"{start} {names}{value} -d {quoted(option.text)}")
    return "\n".join([*lines, ""])


SHELLS: dict[str, Callable[[list[Verb]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
