"""``kvmnn diff``: the first difference between two caches, and how many there are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import console, input_sources, packed_options, shared_options
from ..console import UsageError

if TYPE_CHECKING:
    from ...arrays.source import Source

_DESCRIPTION = """\
Compare two of anything that kvmnn reads, bit by bit: packed files, dumps, bundles and frames, files of arrays, weight
files of a compressor. Exit code 0: equal, 1: different.

Packed-file options apply to both inputs, except --second-valid-tokens; files that kvmnn wrote need none. Where arrays
are K and V of layers by their names, the order of their axes does not matter; where one has more tokens, the first
ones are compared. Where both have positions of their tokens, these are compared, too.

With --atol X the inputs may be of different engines and types: what each computed from the same text is compared in
numbers, layer by layer. --invert applies to the inputs that are llama.cpp's: what may have been done to each is
undone, and a note names it."""


def _load_both(*inputs: tuple[str, argparse.Namespace]) -> list[Source]:
    """Load both inputs; rows of two llama.cpp caches are compared as stored if the heads of both are unknown."""
    from ...errors import MissingOptionError
    from ...files.mapped_file import is_stream

    inputs = tuple((path, _select_model(path, arguments)) for path, arguments in inputs)
    try:
        return [_load_one(path, arguments) for path, arguments in inputs]
    except MissingOptionError:
        is_inverting = inputs[0][1].undo not in (None, ("none",))
        if is_inverting or not all(packed_options.is_llama(path) and not is_stream(path) for path, _ in inputs):
            raise
        sources = [_load_one(path, arguments, any_heads=True) for path, arguments in inputs]
        if any(source.engine_cache is None or source.engine_cache.kv_heads is not None for source in sources):
            raise
        return sources


def _select_model(path: str, arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments without ``--model`` if it belongs to the other input (.gguf: llama.cpp, else MNN)."""
    are_llama = [packed_options.is_llama(input_path) for input_path in (arguments.first, arguments.second)]
    if arguments.model is None or are_llama[0] == are_llama[1]:
        return arguments
    is_own = packed_options.is_gguf(arguments.model) == packed_options.is_llama(path)
    return arguments if is_own else _with_values(arguments, model=None)


def _load_one(path: str, arguments: argparse.Namespace, *, any_heads: bool = False) -> Source:
    from ...compressor import has_weight_file_magic, to_source

    if has_weight_file_magic(path):
        return to_source(path)
    is_inverting = arguments.undo is not None and packed_options.is_llama(path)
    input_arguments = _with_values(packed_options.select_input_arguments(arguments, path), undo=None)
    if is_inverting:  # `_undone` does it, of what all arrays say
        input_arguments = _with_values(input_arguments, undo=("none",), tensor=[])
    used_options = packed_options.PACKED_OPTION_NAMES
    return input_sources.load(
        [path],
        input_arguments,
        with_frames=True,
        used_options=used_options,
        any_heads=any_heads,
        is_one_of_several=True,
    )


def _with_values(arguments: argparse.Namespace, **values: Any) -> argparse.Namespace:
    """Return a copy of the arguments with other values."""
    return argparse.Namespace(**vars(arguments) | values)


def _invert_sources(sources: list[Source], arguments: argparse.Namespace) -> list[Source]:
    """Invert the llama.cpp transforms that ``--invert`` names in each source, and note which were applied."""
    from ...arrays.engine_transforms import invert_applied_transforms
    from ...formats.llama import ENGINE
    from ...formats.options import ReadOptions
    from ...formats.tensor_selection import select_from_source

    if arguments.undo is None:
        return sources
    inputs = (arguments.first, arguments.second)
    if not any(source.engine_cache and source.engine_cache.engine == ENGINE for source in sources):
        raise UsageError(f"--invert is about caches of llama.cpp, and {' '.join(inputs)} holds none")
    if arguments.blocks:
        raise UsageError("--invert is about numbers, and --raw-blocks keeps bytes: leave one of them out")
    inverted_sources = invert_applied_transforms(sources, arguments.undo)
    for path, source in zip(inputs, inverted_sources, strict=True):
        if arguments.undo != ("none",):
            transforms_text = (
                ", ".join(source.inverted_transforms or ()) or "nothing, as nothing of that was done to it"
            )
            console.print_note(arguments, f"{path}: undone: {transforms_text}")
    options = ReadOptions(tensors=tuple(arguments.tensor))
    return [select_from_source(source, path, options) for path, source in zip(inputs, inverted_sources, strict=True)]


def _check_axes_used(sources: Sequence[Source], arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for ``--axes`` and ``--shape`` that match neither input."""
    from ...arrays.axes import matches_axis_spec

    axis_spec = shared_options.build_axis_spec(arguments)
    if (axis_spec.axes or axis_spec.shape) and not any(matches_axis_spec(source, axis_spec) for source in sources):
        reason = "their arrays have another number of axes, or say themselves how they lie"
        message = f"fits neither {arguments.first} nor {arguments.second}: {reason}"
        shared_options.refuse_given(arguments, ["kv_axes", "kv_shape"], message)


def _select_from_batches(sources: Sequence[Source], arguments: argparse.Namespace) -> list[Source]:
    """Select one text from the batch of each source; at least one source must have a batch."""
    from ...arrays.axes import AxisSpec, apply_axis_spec

    if arguments.kv_batch is None:
        return list(sources)
    axis_spec = AxisSpec(batch=arguments.kv_batch, skip_inapplicable=True)
    selected_sources = [apply_axis_spec(source, axis_spec, " ".join(source.inputs)) for source in sources]
    if all(original is selected for original, selected in zip(sources, selected_sources, strict=True)):
        where = f"{arguments.first} and {arguments.second}"
        raise UsageError(f"{where}: their arrays have no axis for a batch: leave --part batch out")
    return selected_sources


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "diff",
        run,
        "the first difference between two caches",
        _DESCRIPTION,
        examples=(
            "kvmnn diff dump/ dump.frames/",
            "kvmnn diff a.npz b.npz --atol 0.001",
            "kvmnn diff chat.session cache/ --kv-heads 8 --invert k-rotation",
        ),
        shown="--atol --dtype --tensor --axes --invert --backend --kv-heads",
    )
    parser.add_argument("first", metavar="A", help="anything that kvmnn reads")
    parser.add_argument("second", metavar="B", help="what it is compared with")
    shared_options.accept_table(parser)
    shared_options.add_source_options(parser, "element type, where neither the array nor pack numbers have it")
    parser.add_argument(
        "--atol",
        type=_parse_tolerance,
        metavar="X",
        help="compare K and V of layers in numbers: none may be further apart than X (default: bit by bit)",
    )
    packed_options.add_packed_options(parser, with_second_tokens=True, with_undo=True)


def _parse_tolerance(text: str) -> float:
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance: expected a number of at least 0")
    return tolerance


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ..._util.text import LOSSY
    from ...arrays import compare_allclose, compare_bitwise
    from ...arrays.engine_transforms import describe_order_conflicts
    from ...compressor import describe_header_differences
    from ...formats.sidecars import read_positions_by_layer

    paths = (arguments.first, arguments.second)
    packed_options.refuse_idle_packed_options(arguments, paths)
    input_sources.refuse_idle_profile(arguments, paths)
    if not packed_options.may_be_packed(arguments.second):
        shared_options.refuse_given(
            arguments, ["second_tokens"], f"is about packed files, and {arguments.second} holds none", paths
        )
    common_arguments = _with_values(arguments, kv_batch=None)  # a batch is cut below, where both are known
    second_arguments = _with_values(common_arguments, tokens=arguments.second_tokens or arguments.tokens)
    sources = _load_both((arguments.first, common_arguments), (arguments.second, second_arguments))
    _check_axes_used(sources, arguments)
    if not any(array.array_dtype == "|u1" for source in sources for array in source.arrays):
        shared_options.refuse_given(
            arguments, ["blocks"], f"is about quantised K and V, and {' '.join(paths)} holds none"
        )
    first, second = _invert_sources(_select_from_batches(sources, arguments), arguments)
    for path, source in zip(paths, (first, second), strict=True):
        notes = [f"{path}: {note}" if note.startswith(f"{LOSSY}: ") else note for note in source.notes]
        input_sources.report_notes(notes, arguments)
        input_sources.report_notes(source.skipped_arrays, arguments, "skipped")
        packed_options.check_provenance(arguments, source.cache, path)
    input_sources.report_notes(describe_order_conflicts(first, second), arguments)
    position_maps = read_positions_by_layer(first), read_positions_by_layer(second)
    if arguments.atol is not None:
        tolerance_report = compare_allclose(first, second, arguments.atol, position_maps)
        console.show_result(arguments, "diff", tolerance_report)
        return 0 if tolerance_report.equal else 1
    if all(map(packed_options.may_be_packed, paths)):
        console.print_note(arguments, "of packed files live elements are compared, not padding, free room or names")
    diff_report = compare_bitwise(first, second, position_maps)
    header_mismatches = describe_header_differences(first.metadata, second.metadata)
    diff_report = replace(diff_report, unlike=(*header_mismatches, *diff_report.unlike))
    console.show_result(arguments, "diff", diff_report)
    types = [sorted({array.dtype for array in source.arrays}) for source in (first, second)]
    if types[0] != types[1]:
        types_text = ", not ".join(" and ".join(names) for names in types)
        console.print_note(arguments, f"words of {types_text}: --atol X compares them in numbers")
    return 0 if diff_report.equal else 1
