"""Words of a command line in the order that argparse wants: positional arguments first, then options.

argparse fills positional arguments from one run of words, so that of ``encode a.npy -o x/ b.npy`` the last is left
over; its own remedy, ``parse_intermixed_args``, does not support parsers of verbs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence


class SortedWords:  # no dataclass, which takes longer to make than a line takes to sort
    """The words behind a verb, sorted."""

    def __init__(self) -> None:
        self.positional: list[str] = []
        """In the order in which they were given, as all."""
        self.options: list[str] = []
        """With their values."""
        self.unknown: list[str] = []
        """What looks like an option and is none of the verb's."""
        self.has_end_marker = False
        """Whether ``--`` ends the options."""

    def to_words(self) -> list[str]:
        """Return all words, such that each positional argument stands next to the others."""
        if self.has_end_marker:
            return [*self.options, "--", *self.positional]
        # before the options, as the help of `store put` depends on the action
        return [*self.positional, *self.options]


def sort_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> SortedWords:
    """Sort the words behind a verb by what its parser makes of each; values stay behind their options."""
    sorted_words = SortedWords()
    next_index = 0
    while next_index < len(words):
        word = words[next_index]
        next_index += 1
        if word == "--":
            sorted_words.has_end_marker = True
            sorted_words.positional += words[next_index:]
            break
        if not is_option_word(parser, word):
            sorted_words.positional.append(word)
            continue
        action, has_value = find_option_action(parser, word)
        sorted_words.options.append(word)
        if action is None:
            sorted_words.unknown.append(word)
        elif not has_value:
            count = count_values(parser, action, words, next_index)
            sorted_words.options += words[next_index : next_index + count]
            next_index += count
    return sorted_words


def is_option_word(parser: argparse.ArgumentParser, word: str) -> bool:
    """Whether argparse takes a word for an option: no number, no text with blanks, no single dash."""
    is_number = parser._negative_number_matcher.match(word) is not None
    return len(word) > 1 and word[0] == "-" and not is_number and " " not in word.partition("=")[0]


def find_option_action(parser: argparse.ArgumentParser, word: str) -> tuple[argparse.Action | None, bool]:
    """The action of a word, and whether the word itself has its value: ``--out=x``, ``-ox``."""
    action_by_option = parser._option_string_actions
    name, sign, _ = word.partition("=")
    if word in action_by_option or name in action_by_option:
        return (action_by_option[word], False) if word in action_by_option else (action_by_option[name], bool(sign))
    if word.startswith("--"):  # an abbreviation; argparse itself refuses one of several
        matches = [action for option, action in action_by_option.items() if option.startswith(name)]
        return (matches[0], bool(sign)) if matches else (None, False)
    for letter_end, letter in enumerate(word[1:], 2):  # several letters in one word, the last of which may take a value
        action = action_by_option.get(f"-{letter}")
        if action is None:
            return None, False
        if action.nargs != 0:
            return action, letter_end < len(word)
    return action_by_option[f"-{word[-1]}"], False


def count_values(
    parser: argparse.ArgumentParser, action: argparse.Action, words: Sequence[str], begin_index: int
) -> int:
    """How many of the words from `begin_index` on are values of an option."""
    max_count = 1
    if isinstance(action.nargs, int):
        max_count = action.nargs
    elif action.nargs in ("+", "*"):
        max_count = len(words)
    for count, word in enumerate(words[begin_index : begin_index + max_count]):
        if word == "--" or is_option_word(parser, word):
            return count
    return min(max_count, len(words) - begin_index)
