"""Options of several commands, parsers of their values, and errors for options without effect."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .command_parser import parse_byte_count as parse_byte_count
from .command_parser import parse_positive as parse_positive
from .command_parser import parse_whole as parse_whole
from .console import STDIO, UsageError
from .options import SpecAction, SpecField, add_spec_option

if TYPE_CHECKING:
    from ..arrays.axes import AxisSpec
    from .command_parser import ActionHelp


def was_given(arguments: argparse.Namespace, name: str) -> bool:
    """Return whether an option has a value other than its default."""
    return bool(hasattr(arguments, name) and getattr(arguments, name) != arguments.parser.get_default(name))


def refuse_given(arguments: argparse.Namespace, names: Iterable[str], reason: str, paths: Iterable[str] = ()) -> None:
    """Raise `UsageError` for the first of the options that was specified; `names` are those of the namespace.

    If `reason` is about the contents of `paths`, one that cannot be read is reported instead, as a `SourceError`.
    """
    for name in names:
        if was_given(arguments, name):
            check_readable(paths)
            raise UsageError(f"{get_option_name(arguments, name)} {reason}")


def check_readable(paths: Iterable[str]) -> None:
    """Raise `SourceError` for an input that is not there or whose folder cannot be read."""
    from ..errors import build_read_error

    for path in paths:
        if path != STDIO and "://" not in path:
            try:
                os.stat(path)
            except OSError as error:
                raise build_read_error(path, error) from None


def get_option_name(arguments: argparse.Namespace, name: str) -> str:
    """Return the name of an option in this command."""
    actions: list[argparse.Action] = arguments.parser._actions
    for action in actions:
        if action.dest == name:
            return action.option_strings[0 if isinstance(action, argparse.BooleanOptionalAction) else -1]
        if name in getattr(action, "dests", ()):
            return f"{action.option_strings[-1]}{action.get_key(name) if isinstance(action, SpecAction) else ''}"
    raise KeyError(name)


_AXES_DESCRIPTION = """\
For plain arrays, raw pages and batches. LETTERS has one letter for each axis, in order: l layer, b batch, h kv_head, t
token, d dimension, 2 K and V; without h the array is the one tensor of latent attention (MLA), which becomes K. Arrays
become layer_<n>.key and .value, [kv_head, token, dimension]. Where no axis is K and V or layer, names specify it."""

AXES_OPTION_NAMES = ("kv_axes", "kv_shape", "kv_batch", "kv_pages", "kv_half")


_ARRAY_PARTS = (
    SpecField("batch", "kv_batch", "this text of a batch, from 0", parse=lambda text: parse_index(text)),
    SpecField("decoder", "kv_half", "of an encoder-decoder cache K and V of the decoder's tokens", constant="decoder"),
    SpecField("encoder", "kv_half", "those of the encoder's output", constant="encoder"),
)


def add_part_option(parser: Any, fields: Sequence[SpecField]) -> None:
    """Add ``--part``, or further items of it."""
    title = "which part of an input that has several"
    add_spec_option(parser, "--part", title, fields, metavar="WHAT[,WHAT]")


def add_ignore_option(parser: Any, key: str, dest: str, text: str) -> None:
    """Add ``--ignore``, or a further word of it."""
    fields = [SpecField(key, dest, text, constant=True, default=False)]
    add_spec_option(parser, "--ignore", "read the input without", fields, metavar="WHAT[,WHAT]")


def add_axes_options(parser: Any) -> None:
    """Add ``--axes``, ``--shape`` and ``--pages``, and the items of ``--part`` that select one of several texts."""
    group = parser.add_argument_group("axes of arrays", _AXES_DESCRIPTION)
    group.add_argument(
        "--axes", dest="kv_axes", metavar="LETTERS", help="axis order of arrays, e.g. lhtd, thd, 2lthd; td: MLA"
    )
    group.add_argument(
        "--shape",
        dest="kv_shape",
        type=parse_shape,
        metavar="N,N,...",
        help="read arrays with this shape; -1: inferred length",
    )
    group.add_argument(
        "--pages",
        dest="kv_pages",
        action="store_true",
        default=None,
        help="the inputs are pages of one text, in order",
    )
    add_part_option(parser, _ARRAY_PARTS)


def build_axis_spec(arguments: argparse.Namespace, *, is_one_of_several: bool = False) -> AxisSpec:
    """Build the axis specification from the arguments."""
    from ..arrays.axes import AxisSpec

    axes, shape, batch, pages, half = (getattr(arguments, name, None) for name in AXES_OPTION_NAMES)
    if pages and not axes:
        raise UsageError("--pages: says that tokens go on from one input to the next, and needs --axes")
    if axes and getattr(arguments, "token_major", False):
        raise UsageError("--token-major and --axes both say how arrays lie: leave --token-major out")
    return AxisSpec(axes, shape, batch, skip_inapplicable=is_one_of_several, join_pages=bool(pages), half=half)


def parse_shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"(-1|[0-9]{1,15})(,(-1|[0-9]{1,15}))*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: expected lengths such as 2,32,-1,8,128")
    return tuple(map(int, text.split(",")))


def parse_index(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


EFFORT_CHOICES = ("exact", "balanced", "fast", "max")


def add_command(
    subparsers: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    text: str,
    *,
    examples: Sequence[str],
    shown: str,
    action_help: ActionHelp | None = None,
    has_details: bool = False,
) -> Any:
    """Add a sub-parser with the options that every verb has.

    Parameters
    ----------
    text
        The text of ``--help-all``; ``--help`` shows its first paragraph.
    examples
        Command lines: three or more, of which ``--help`` shows the first three.
    shown
        Options that ``--help`` shows in addition to the common ones, separated by blanks; others are in ``--help-all``.
    has_details
        Whether the command prints more with ``--verbose``.
    """
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=text,
        examples=examples,
        shown=shown.split(),
        action_help=action_help,
        add_help=False,
    )
    parser.set_defaults(run=run, parser=parser)
    for option in ("--json", "--quiet", *(["--verbose"] if has_details else [])):
        parser.accept(option)
    return parser


def add_threads_option(parser: Any) -> None:
    """Accept ``--threads``, and add ``--no-zstd``."""
    parser.accept("--threads")
    parser.add_argument("--no-zstd", action="store_true", help="behave as an engine without libzstd: RLE only")


class SingleValueAction(argparse.Action):
    """Store the value of an option that may be typed only once, instead of dropping all values but the last."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Store the value, or fail."""
        previous = getattr(namespace, self.dest)
        if previous is not None:
            raise argparse.ArgumentError(self, f"expected once, found {previous} and {values}")
        setattr(namespace, self.dest, values)


def add_output_option(parser: Any, text: str) -> None:
    """Add ``-o`` of one output, and accept ``-f``."""
    parser.add_argument("-o", "--output", action=SingleValueAction, metavar="OUT", help=text)
    parser.accept("--force")


def accept_table(parser: Any) -> None:
    """Accept ``--table`` and ``-f``."""
    parser.accept("--table")
    parser.accept("--force")


def add_raw_option(parser: Any) -> None:
    """Add ``--raw``."""
    parser.add_argument(
        "--raw", action="store_true", help="write the raw elements of one array to OUT, whatever its suffix"
    )


def add_provider_option(parser: Any) -> None:
    """Add ``--provider``."""
    parser.add_argument(
        "--provider",
        action="append",
        default=[],
        metavar="NAME",
        help="of onnxruntime, the preferred first (repeatable; default: CPUExecutionProvider)",
    )


ELEMENT_TYPES = ("fp16", "bf16", "fp32")
_FLOAT8_CODE_TYPES = (
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
)  # numpy takes long to import


def add_source_options(parser: Any, dtype_help: str, *, axes: bool = True, profile: bool = True) -> None:
    """Add ``--dtype``, ``--tensor`` and ``--ignore unsupported``; with `axes` also the options for the axis order.

    With `profile` also ``--profile``, for verbs whose inputs may be layer streams.
    """
    add_dtype_option(parser, dtype_help, with_float8=True)
    parser.add_argument("--tensor", action="append", default=[], metavar="NAME", help="take this array (repeatable)")
    add_ignore_option(
        parser, "unsupported", "skip_unsupported", "arrays that frames do not support (float64, int64, empty ...)"
    )
    if profile:
        add_profile_option(parser)
    if axes:
        add_axes_options(parser)


def add_profile_option(parser: Any) -> None:
    """Add ``--profile``."""
    parser.add_argument(
        "--profile", metavar="FILE", help="profile of layer streams (default: looked for alongside them)"
    )


def add_dtype_option(parser: Any, text: str, *, with_float8: bool = False) -> None:
    """Add ``--dtype``; `with_float8` also accepts the float8 types of one-byte codes."""
    names = (*ELEMENT_TYPES, *(_FLOAT8_CODE_TYPES if with_float8 else ()))
    parser.add_argument("--dtype", choices=names, metavar="TYPE", help=f"{text}: {', '.join(names)}")


def select_codecs(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the codecs that ``--no-zstd`` permits."""
    return ("rle",) if arguments.no_zstd else ("rle", "zstd")


def resolve_model_names(arguments: argparse.Namespace) -> None:
    """Replace names of pulled models in ``--model`` and ``--rope`` by their folders, where these options take one."""
    for option in ("model", "rope") if getattr(arguments, "has_model_option", False) else ():
        model = getattr(arguments, option, None)
        if isinstance(model, str) and not os.path.exists(model):
            from ..lm.importer.catalog import resolve_model_path  # lm takes a second to import

            setattr(arguments, option, str(resolve_model_path(model)))
