"""Shell completions and the manual page, generated from the command's parser.

shtab does the same, but has no fish and would be one more package to install.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator

from .._util.dataclass import dataclass
from .._util.packages import get_version
from . import command_parser
from .command_parser import (
    GROUP_SUMMARIES,
    SUBCOMMANDS,
    TOP_COMMANDS,
    TOP_COMMANDS_BY_TITLE,
    CommandParser,
    HelpFormatter,
    collect_help,
    expand_group,
    format_usage,
    get_subparsers,
    list_command_parsers,
)
from .options import SpecAction


@dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """An option of a verb: its names, the name of its value, the value's choices (none: any), its help."""

    names: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    help_text: str


@dataclass(frozen=True, kw_only=True)
class CommandSpec:
    """A verb with its options and the choices of its arguments (none: files)."""

    name: str
    summary: str
    options: tuple[OptionSpec, ...]
    choices: tuple[str, ...]


def describe_commands(parser: argparse.ArgumentParser) -> list[CommandSpec]:
    """Return the data about every verb that completion scripts need."""
    summaries = _collect_summaries(parser)
    return [
        CommandSpec(
            name=name,
            summary=summaries[name],
            options=tuple(_iter_option_specs(subparser)),
            choices=tuple(
                str(choice)
                for argument in subparser._actions
                if not argument.option_strings and argument.choices
                for choice in argument.choices
            ),
        )
        for name, subparser in list_command_parsers(parser).items()
    ]


def _collect_summaries(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the help summary of every verb, and of every action of a group of verbs."""
    subparsers = get_subparsers(parser)
    summaries = {action.dest: action.help or "" for action in subparsers._get_subactions()}
    for group in SUBCOMMANDS:
        for action in get_subparsers(subparsers.choices[group])._get_subactions():
            summaries[f"{group} {action.dest}"] = action.help or ""
    return summaries


def _iter_option_specs(subparser: CommandParser) -> Iterator[OptionSpec]:
    own_help = command_parser.collect_help(subparser)
    for action, text in {**{action: action.help or "" for action in subparser.program_actions}, **own_help}.items():
        if action.option_strings:
            yield OptionSpec(
                names=tuple(action.option_strings),
                value="" if action.nargs == 0 else str(action.metavar or action.dest.upper()),
                choices=tuple(map(str, action.choices or _list_value_prefixes(action))),
                help_text=text,
            )


def _list_value_prefixes(action: argparse.Action) -> Iterable[str]:
    """List how a value with keys (``NAME:option=value``, ``KEY=VALUE,...``) can begin."""
    if isinstance(action, SpecAction):
        return action.value_prefixes
    if action.dest == "policy":
        from ..policies import POLICIES

        return POLICIES
    if action.dest == "preset":
        from ..evaluation.presets import PRESETS

        return PRESETS
    return ()


def format_bash(commands: list[CommandSpec]) -> str:
    """Format the script for ``~/.local/share/bash-completion/completions/kvmnn``."""
    lines = [
        "# bash completion of kvmnn",
        "_kvmnn() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} verb=${COMP_WORDS[1]} words=",
        "    COMPREPLY=()",
        f'    [[ $verb == @({"|".join(SUBCOMMANDS)}) ]] && verb+=" ${{COMP_WORDS[2]}}"',
        "    if ((COMP_CWORD == 1)); then",
        f"        words='{' '.join(TOP_COMMANDS)} --help --version'",
        *(
            line
            for group, names in SUBCOMMANDS.items()
            for line in (
                f"    elif ((COMP_CWORD == 2)) && [[ ${{COMP_WORDS[1]}} == {group} ]]; then",
                f"        words='{' '.join(names)} --help'",
            )
        ),
        "    else",
        "        case $verb:$before in",
    ]
    for command in commands:
        for option in command.options:
            if option.value:
                patterns = "|".join(f"'{command.name}:{name}'" for name in option.names)
                lines.append(f"            {patterns}) words='{' '.join(option.choices)}'; [[ $words ]] || return ;;")
    lines += [
        "        esac",
        "        [[ $words ]] || case $verb in",
    ]
    for command in commands:
        names = " ".join(name for option in command.options for name in option.names if name.startswith("--"))
        arguments = f" || words='{' '.join(command.choices)}'" if command.choices else ""
        lines.append(f"            '{command.name}') [[ $word == -* ]] && words='{names}'{arguments} ;;")
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


def format_zsh(commands: list[CommandSpec]) -> str:
    """Format the script for a file ``_kvmnn`` in a folder of ``$fpath``."""

    def quote(text: str) -> str:
        return "'" + text.replace("'", "'\\''") + "'"

    def escape(text: str) -> str:
        return "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in text)

    summaries = GROUP_SUMMARIES | {command.name: command.summary for command in commands}
    lines = ["#compdef kvmnn", "_kvmnn() {", "    local -a verbs=("]
    lines += [f"        {quote(f'{name}:{escape(summaries[name])}')}" for name in TOP_COMMANDS]
    lines += [
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe verb verbs",
        "        return",
        "    fi",
        "    shift words",
        "    (( CURRENT-- ))",
        "    local verb=$words[1]",
    ]
    for group, names in SUBCOMMANDS.items():
        lines += [f"    if [[ $verb == {group} ]]; then", "        verbs=("]
        texts = [f"{name}:{escape(summaries[f'{group} {name}'])}" for name in names]
        lines += [f"            {quote(text)}" for text in texts]
        lines += [
            "        )",
            "        if (( CURRENT == 2 )); then",
            "            _describe verb verbs",
            "            return",
            "        fi",
            "        shift words",
            "        (( CURRENT-- ))",
            '        verb+=" $words[1]"',
            "    fi",
        ]
    lines.append("    case $verb in")
    for command in commands:
        lines.append(f"        {quote(command.name)})")
        lines.append("            _arguments \\")
        for option in command.options:
            values = f"({' '.join(option.choices)})" if option.choices else "_files"
            value = f":{escape(option.value)}:{values}" if option.value else ""
            lines += [
                f"                {quote(f'*{name}[{escape(option.help_text)}]{value}')} \\" for name in option.names
            ]
        arguments = f"({' '.join(command.choices)})" if command.choices else "_files"
        lines += [f"                {quote(f'*:file:{arguments}')}", "            ;;"]
    return "\n".join([*lines, "    esac", "}", '_kvmnn "$@"', ""])


def format_fish(commands: list[CommandSpec]) -> str:
    """Format the script for ``~/.config/fish/completions/kvmnn.fish``."""

    def quote(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    seen = "__fish_seen_subcommand_from"
    lines = ["# fish completion of kvmnn"]
    top_prefix = "complete -c kvmnn -n __fish_use_subcommand -f"
    summaries = GROUP_SUMMARIES | {command.name: command.summary for command in commands}
    lines += [f"{top_prefix} -a {quote(name)} -d {quote(summaries[name])}" for name in TOP_COMMANDS]
    for group, names in SUBCOMMANDS.items():
        condition = f"{seen} {group}; and not {seen} {' '.join(names)}"
        group_prefix = f"complete -c kvmnn -n {quote(condition)} -f"
        lines += [f"{group_prefix} -a {quote(name)} -d {quote(summaries[f'{group} {name}'])}" for name in names]
    for command in commands:
        group, _, name = command.name.rpartition(" ")
        condition = f"{seen} {group}; and {seen} {name}" if group else f"{seen} {name}"
        if not group and any(name in names for names in SUBCOMMANDS.values()):
            condition += f"; and not {seen} {' '.join(SUBCOMMANDS)}"
        command_prefix = f"complete -c kvmnn -n {quote(condition)}"
        if command.choices:
            lines.append(f"{command_prefix} -f -a {quote(' '.join(command.choices))}")
        for option in command.options:
            flags = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = " -r" if option.value else ""
            if option.choices:
                value = f" -x -a {quote(' '.join(option.choices))}"
            lines.append(f"{command_prefix} {flags}{value} -d {quote(option.help_text)}")
    return "\n".join([*lines, ""])


FORMATTER_BY_SHELL: dict[str, Callable[[list[CommandSpec]], str]] = {
    "bash": format_bash,
    "zsh": format_zsh,
    "fish": format_fish,
}


_VERBATIM_BEGIN, _VERBATIM_END = (".RS -6n", ".nf"), (".fi", ".RE")
"""Around lines that are written for 80 columns: nearly without the margin of manual pages."""


def format_manual(parser: argparse.ArgumentParser) -> str:
    """Format the manual page ``kvmnn.1`` with the man macros of roff."""
    summaries = _collect_summaries(parser)
    summary = (parser.description or "").partition("\n")[0]
    lines = [f'.TH KVMNN 1 "" "kvmnn {get_version()}"', ".SH NAME", f"kvmnn \\- {_escape_roff(summary)}"]
    lines += [".SH SYNOPSIS", ".B kvmnn", ".I VERB", "[options] ..."]
    lines += [".SH VERBS"]
    for title, names in TOP_COMMANDS_BY_TITLE.items():
        lines += [f".SS {_escape_roff(title)}"]
        for name in (command for top in names for command in expand_group(top)):
            lines += [".TP", f".B {_escape_roff(name)}", _escape_roff(summaries[name])]
    lines += [".SH OPTIONS", "Before the verb or after it, where the verb accepts them."]
    lines += _iter_option_lines(parser)
    for name, subparser in list_command_parsers(parser).items():
        lines += [
            f".SH {_escape_roff('kvmnn ' + name)}",
            ".nf",
            _escape_roff(format_usage(subparser).replace("%%", "%")),
            ".fi",
            ".PP",
        ]
        lines += _iter_paragraph_lines(subparser.description or "")
        lines += _iter_option_lines(subparser)
        lines += [".PP", *_iter_paragraph_lines("\n".join(map(command_parser.format_example, subparser.examples)))]
    return "\n".join([*lines, ".SH NOTES", *_iter_paragraph_lines(parser.epilog or ""), ""])


def _iter_option_lines(subparser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = HelpFormatter(subparser.prog)
    for action, text in collect_help(subparser).items():
        yield from (".TP", f".B {_escape_roff(formatter._format_action_invocation(action))}", _escape_roff(text))


def _iter_paragraph_lines(text: str) -> Iterator[str]:
    """Yield roff lines: text as filled paragraphs, indented lines verbatim."""
    is_verbatim = False
    for line in text.split("\n"):
        if not line:
            yield ".PP" if not is_verbatim else ""
            continue
        if is_verbatim != line.startswith(" "):
            is_verbatim = not is_verbatim
            yield from _VERBATIM_BEGIN if is_verbatim else _VERBATIM_END
        yield _escape_roff(line)
    if is_verbatim:
        yield from _VERBATIM_END


def _escape_roff(text: str) -> str:
    """Escape everything in a text that roff would interpret."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
