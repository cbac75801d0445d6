"""Help that fits the terminal: paragraphs are filled, lists stay lists, options of a few are folded away."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

_MAX_HELP_COLUMNS = 100
_MIN_HELP_COLUMNS = 40
_HELP_START_COLUMN = 26


class HelpFormatter(argparse.HelpFormatter):
    """Breaks lines between words only; lines that begin with blanks are lists or examples, and stay as they are."""

    def __init__(self, prog: str, **options: Any) -> None:
        columns = max(_MIN_HELP_COLUMNS, min(_MAX_HELP_COLUMNS, shutil.get_terminal_size().columns))
        super().__init__(prog, **options | {"max_help_position": _HELP_START_COLUMN, "width": columns - 1})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = _fill_paragraphs(text, width - len(indent))
        return "\n".join(indent + line if line else "" for line in lines).rstrip("\n")

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap_words(" ".join(text.split()), width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        values = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {values}"


def format_usage(parser: argparse.ArgumentParser) -> str:
    """One line of what must be given; the options stand below anyhow."""
    formatter = HelpFormatter(parser.prog)

    def format_action(action: argparse.Action) -> str:
        if action.option_strings:
            values = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
            return f"{action.option_strings[-1]} {values}"
        return formatter._format_args(action, formatter._get_default_metavar_for_positional(action))

    words = [parser.prog, "[options]"]
    words += [
        f"({' | '.join(map(format_action, group._group_actions))})"
        for group in parser._mutually_exclusive_groups
        if group.required
    ]
    words += [format_action(action) for action in parser._actions if action.option_strings and action.required]
    words += [format_action(action) for action in parser._actions if not action.option_strings]
    return " ".join(words).replace("%", "%%")


def fold_group(parser: argparse.ArgumentParser, group: Any, option: str) -> None:
    """Show the options of a group only where `option` asks for them."""
    texts = {action: action.help for action in group._group_actions}
    for action in texts:
        action.help = argparse.SUPPRESS
    group.add_argument(
        option, action=_UnfoldAction, nargs=0, group=group, texts=texts, help="show these options and exit"
    )


def narrow_help(
    parser: argparse.ArgumentParser,
    dest: str,
    options: Mapping[str, Collection[str]],
    describe_choice: Callable[[str], str],
) -> None:
    """Let the help behind one of the words that `dest` may be show what concerns it only.

    Parameters
    ----------
    options
        Of each word, which options it has; those that no word names are of all.
    describe_choice
        What the help says of a word.
    """
    help_action = next(action for action in parser._actions if isinstance(action, argparse._HelpAction))
    narrowing_action = _NarrowHelpAction(help_action, dest, options, describe_choice)
    for actions in (parser._actions, *(group._group_actions for group in parser._action_groups)):
        actions[:] = [narrowing_action if action is help_action else action for action in actions]
    for name in help_action.option_strings:
        parser._option_string_actions[name] = narrowing_action


def collect_help(parser: argparse.ArgumentParser) -> dict[argparse.Action, str]:
    """All options with their help, those that are folded away included, and none that are hidden."""
    texts = {action: action.help or "" for action in parser._actions}
    for action in parser._actions:
        if isinstance(action, _UnfoldAction):
            texts |= action.texts
    return {action: text.replace("%%", "%") for action, text in texts.items() if text != argparse.SUPPRESS}


class _UnfoldAction(argparse.Action):
    def __init__(self, *, group: Any, texts: dict[argparse.Action, str], **options: Any) -> None:
        super().__init__(default=argparse.SUPPRESS, **options)
        self._group, self.texts = group, texts

    def covers_only(self, names: Collection[str]) -> bool:
        """Whether these are all its options."""
        return all(action.dest in names for action in self.texts)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action, text in self.texts.items():
            action.help = text
        formatter = parser._get_formatter()
        formatter.start_section(self._group.title)
        formatter.add_text(self._group.description)
        formatter.add_arguments(list(self.texts))
        formatter.end_section()
        parser._print_message(formatter.format_help())
        parser.exit()


class _NarrowHelpAction(argparse._HelpAction):
    def __init__(
        self,
        help_action: argparse.Action,
        dest: str,
        options: Mapping[str, Collection[str]],
        describe_choice: Callable[[str], str],
    ) -> None:
        super().__init__(help_action.option_strings, dest=help_action.dest, help=help_action.help)
        self._dest, self._options, self._describe_choice = dest, options, describe_choice

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        word = str(getattr(namespace, self._dest, None))
        if word in self._options:
            self._narrow_to(parser, word)
        parser.print_help()
        parser.exit()

    def _narrow_to(self, parser: argparse.ArgumentParser, word: str) -> None:
        parser.description = self._describe_choice(word)
        hidden_names = {name for names in self._options.values() for name in names} - set(self._options[word])
        for action in list(parser._actions):
            if action.dest == self._dest:
                action.metavar, action.help = word, argparse.SUPPRESS
            elif action.dest in hidden_names and not action.option_strings:
                action.help = argparse.SUPPRESS
                parser._actions.remove(action)
            elif action.dest in hidden_names or (
                isinstance(action, _UnfoldAction) and action.covers_only(hidden_names)
            ):
                action.help = argparse.SUPPRESS
        for group in parser._action_groups:
            if all(action.help == argparse.SUPPRESS for action in group._group_actions):
                group.description = None


def _fill_paragraphs(text: str, width: int) -> Iterator[str]:
    """The lines of a text of paragraphs and indented lines."""
    paragraph: list[str] = []
    for line in [*text.strip("\n").split("\n"), ""]:
        if line.strip() and not line.startswith(" "):
            paragraph.append(line.strip())
            continue
        if paragraph:
            yield from _wrap_words(" ".join(paragraph), width)
            paragraph.clear()
        yield line


def _wrap_words(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
