"""Words of a command line in the order that argparse wants: positional arguments first, then options.

argparse fills positional arguments from one run of words, so that of ``encode a.npy -o x/ b.npy`` the last is left
over; its own remedy, ``parse_intermixed_args``, does not support parsers of verbs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence


class WordOrder:  # no dataclass, which takes longer to make than a line takes to sort
    """The words behind a verb, sorted."""

    def __init__(self) -> None:
        self.positional: list[str] = []
        """In the order in which they were given, as all."""
        self.options: list[str] = []
        """With their values."""
        self.unknown: list[str] = []
        """What looks like an option and is none of the verb's."""
        self.has_end = False
        """Whether ``--`` ends the options."""

    def words(self) -> list[str]:
        """Return all words, such that each positional argument stands next to the others."""
        if self.has_end:
            return [*self.options, "--", *self.positional]
        # before the options, as the help of `store put` depends on the action
        return [*self.positional, *self.options]


def sort_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> WordOrder:
    """Sort the words behind a verb by what its parser makes of each; values stay behind their options."""
    order = WordOrder()
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":
            order.has_end = True
            order.positional += words[at:]
            break
        if not _is_option(parser, word):
            order.positional.append(word)
            continue
        action, has_value = _find_action(parser, word)
        order.options.append(word)
        if action is None:
            order.unknown.append(word)
        elif not has_value:
            count = _value_count(parser, action, words, at)
            order.options += words[at : at + count]
            at += count
    return order


def _is_option(parser: argparse.ArgumentParser, word: str) -> bool:
    """Whether argparse takes a word for an option: no number, no text with blanks, no single dash."""
    is_number = parser._negative_number_matcher.match(word) is not None
    return len(word) > 1 and word[0] == "-" and not is_number and " " not in word.partition("=")[0]


def _find_action(parser: argparse.ArgumentParser, word: str) -> tuple[argparse.Action | None, bool]:
    """The action of a word, and whether the word itself has its value: ``--out=x``, ``-ox``."""
    known = parser._option_string_actions
    name, sign, _ = word.partition("=")
    if word in known or name in known:
        return (known[word], False) if word in known else (known[name], bool(sign))
    if word.startswith("--"):  # an abbreviation; argparse itself refuses one of several
        matches = [action for option, action in known.items() if option.startswith(name)]
        return (matches[0], bool(sign)) if matches else (None, False)
    for at, letter in enumerate(word[1:], 2):  # several letters in one word, the last of which may take a value
        action = known.get(f"-{letter}")
        if action is None:
            return None, False
        if action.nargs != 0:
            return action, at < len(word)
    return known[f"-{word[-1]}"], False


def _value_count(parser: argparse.ArgumentParser, action: argparse.Action, words: Sequence[str], at: int) -> int:
    """How many of the words from `at` on are values of an option."""
    most = 1
    if isinstance(action.nargs, int):
        most = action.nargs
    elif action.nargs in ("+", "*"):
        most = len(words)
    for count, word in enumerate(words[at : at + most]):
        if word == "--" or _is_option(parser, word):
            return count
    return min(most, len(words) - at)
