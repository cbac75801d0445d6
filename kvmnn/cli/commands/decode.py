"""``kvmnn decode``: frames to arrays."""

from __future__ import annotations

import argparse
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from .. import console, input_sources, layer_stream_options, packed_options, shared_options
from ..console import STDIO, UsageError

if TYPE_CHECKING:
    from ..._util.parallel import Progress
    from ...bundle import DecodeOptions, FrameSet

_DESCRIPTION = """\
Decode frames into the arrays they were made from. IN is a frame, a frame with its manifest (IN.json) alongside, a
manifest, a directory with a manifest.json, a Zarr store (X.zarr, s3://bucket/X.zarr), or - for standard input. With a
manifest the same arrays come back and their hashes are checked.

A frame alone, or several one after another, become a 1-D array of their elements: only a manifest has names and
shapes.

  -o X.npy                     one array
  -o X.npz, X.safetensors      any number of arrays
  -o DIR/                      one .npy file for each array
  -o X, -o X.bin, -o -         the raw elements of one array; for a name with
                               another suffix with --raw
  --output-kind dump -o DIR/   the KV dump that was encoded

Frames made from a prefix cache become its files again with -o DIR/ (--arrays: .npy files instead), byte for byte.
--model, --token-ids and --backend are compared with the manifest, and a difference is refused;
--ignore contradictions restores anyway.

Frames of a whole file of llama.cpp or MLX become that file again, byte for byte, with -o FILE or on standard output
(--arrays: its arrays in their stored layout; kvmnn mnn unpack gives K and V by heads).

The hashes that kvmnn stored in a Zarr store are checked.

Without -o, X.npy.frame and X.frame become X.npy, and X.frames/ of a whole file X. Only input from standard input goes
to standard output, as raw elements (if that is a file or a pipe)."""


_EXPECTED_OPTIONS = ("name", "backend", "lp", "hp", "flash_block", "model", "token_ids", "ignore_contradictions")


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "decode",
        run,
        "frames to arrays",
        _DESCRIPTION,
        examples=(
            "kvmnn decode keys.frame -o keys.npy",
            "kvmnn decode dump.frames/ -o dump/ --output-kind dump",
            "kvmnn decode sys.frames/ -o sys/",
        ),
        shown="--output --raw --dtype --output-kind --arrays --ignore",
    )
    parser.add_argument("input", metavar="IN", help="a frame, a manifest, a bundle; - for standard input")
    shared_options.add_output_option(parser, "file, directory, or - (standard output)")
    shared_options.add_raw_option(parser)
    shared_options.add_dtype_option(
        parser, "element type of a frame without a manifest (default: fp16 or fp32, by its streams)"
    )
    parser.accept("--max-input-bytes")
    parser.add_argument(
        "--output-kind",
        dest="form",
        choices=("dump",),
        help="restore the KV dump that was encoded, with its metadata files",
    )
    shared_options.add_ignore_option(parser, "manifest", "no_manifest", "the manifest next to frames")
    shared_options.add_profile_option(parser)
    shared_options.add_threads_option(parser)
    group = parser.add_argument_group("prefix caches", "what the restored files must match")
    group.add_argument("--arrays", action="store_true", help="write plain arrays, not the files they came from")
    group.add_argument("--name", metavar="NAME", help="what the engine calls the prefix (default: as before)")
    packed_options.add_layout_options(group)
    packed_options.add_origin_options(group)
    packed_options.add_contradictions_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ...bundle import DecodeOptions
    from ...formats import ZARR, has_format

    if input_sources.is_layer_streams(arguments.input):
        return layer_stream_options.decode(arguments)
    input_sources.refuse_idle_profile(arguments, [arguments.input])
    if has_format(arguments.input, ZARR):
        return _decode_zarr(arguments)
    options = DecodeOptions(
        dtype=arguments.dtype,
        codecs=shared_options.select_codecs(arguments),
        max_bytes=arguments.max_bytes,
        threads=arguments.threads,
    )
    frames = input_sources.open_frame_set(arguments.input, arguments, options)
    input_sources.check_dtype_matches(frames, arguments)
    is_on_stdout = console.is_data_to_stdout(arguments, arguments.input)
    if arguments.form and (is_on_stdout or arguments.arrays):
        raise UsageError("--output-kind dump writes a directory of files: use -o DIR/, and no --arrays")
    output = console.open_data_stdout(arguments, "data") if is_on_stdout else _choose_output(arguments, frames)
    with console.progress_bar(arguments, frames.raw_bytes, "decode") as step:
        restore_result = _restore_output(frames, output, options, arguments, step)
    console.show_result(arguments, "decode", restore_result, data_on_stdout=is_on_stdout)
    return 0


def _decode_zarr(arguments: argparse.Namespace) -> int:
    """Decode the arrays of a Zarr store."""
    from ...formats import ReadOptions, restore_store

    shared_options.refuse_given(
        arguments, ("form", "no_manifest", "no_zstd", *_EXPECTED_OPTIONS), "is about frames, and a store is read"
    )
    is_on_stdout = console.is_data_to_stdout(arguments, arguments.input)
    if not is_on_stdout and arguments.output is None:
        raise UsageError("no output given: use -o X.npz, -o X.safetensors, -o DIR/ or -o -")
    options = ReadOptions(
        dtype=arguments.dtype, decode_frames=False, threads=arguments.threads, max_bytes=arguments.max_bytes
    )
    output = console.open_data_stdout(arguments, "data") if is_on_stdout else arguments.output
    if isinstance(output, str):
        console.check_output_suffix(arguments, output)
    with console.progress_bar(arguments, 0, "decode") as step:
        restore_result = restore_store(arguments.input, output, options, force=arguments.force, progress=step)
    input_sources.report_notes(restore_result.notes, arguments)
    console.show_result(arguments, "decode", restore_result, data_on_stdout=is_on_stdout)
    return 0


_WRITTEN_TEXTS = {"arrays": "plain arrays are", "file": "another file is", "dump": "a dump is"}
_WHOLE_TEXTS = {"file": "a whole file", "dump": "a dump", "prefix": "a prefix cache"}


def _restore_output(
    frames: FrameSet,
    output: str | console.Stdout,
    options: DecodeOptions,
    arguments: argparse.Namespace,
    progress: Progress | None,
) -> console.CommandResult:
    """Write a KV dump if requested, else the file or prefix cache that the frames were made from, or plain arrays."""
    from ...formats import PackedOptions, find_restored_form, restore
    from ...formats.mnn import RestorePrefixResult

    path = output if isinstance(output, str) else None
    form = arguments.form or ("arrays" if arguments.arrays else find_restored_form(frames, path))
    if form in _WRITTEN_TEXTS:
        reason = f"is about the files of a prefix cache, and {_WRITTEN_TEXTS[form]} written"
        shared_options.refuse_given(arguments, _EXPECTED_OPTIONS, reason)
    if form in _WHOLE_TEXTS:
        shared_options.refuse_given(arguments, ["raw"], f"is about one array, and {_WHOLE_TEXTS[form]} is written")
    elif path is not None:
        console.check_output_suffix(arguments, path, frames.arrays)
    expected = PackedOptions()
    if form == "prefix":
        expected = PackedOptions(
            geometry=packed_options.build_geometry(arguments),
            prefix_name=arguments.name,
            model=arguments.model,
            token_ids=packed_options.hash_token_ids(arguments),
            ignore_contradictions=arguments.ignore_contradictions,
        )
    restore_result = restore(
        frames, output, options, form=form, expected=expected, force=arguments.force, progress=progress
    )
    if isinstance(restore_result, RestorePrefixResult):
        input_sources.report_notes(restore_result.warnings, arguments, "warning")
    else:
        input_sources.report_notes(restore_result.notes, arguments)
    return restore_result


def _choose_output(arguments: argparse.Namespace, frames: FrameSet) -> str:
    """Return the output path: as given, or the input's without the suffix that encode appended."""
    from ...formats import can_restore_file

    path = PurePath(arguments.input)
    if arguments.output is not None:
        output: str = arguments.output
        return output
    if path.suffix in (".frames", ".frame") and not arguments.arrays and can_restore_file(frames):
        return str(path.with_suffix(""))
    if arguments.input == STDIO or path.suffix != ".frame" or len(frames.arrays) > 1:
        raise UsageError(f"no output given: use {_list_outputs(arguments, frames)}")
    stem = path.with_suffix("")
    return (
        str(stem) if stem.suffix == ".npy" else f"{stem}.npy"
    )  # K and V of a layer differ in what looks like a suffix


def _list_outputs(arguments: argparse.Namespace, frames: FrameSet) -> str:
    """List outputs that the frames can be decoded to, first that which gives back what was encoded."""
    from ...bundle.passthrough import parse_passthrough
    from ...formats.mnn import can_restore_prefix

    passthrough = parse_passthrough(frames.document.metadata, frames.path) if frames.document else None
    if passthrough is not None and not arguments.arrays:
        return f"-o {passthrough.name} for the file that was encoded, -o X.npz or -o DIR/ for its arrays, or -o -"
    if can_restore_prefix(frames, "DIR/") and not arguments.arrays:
        return "-o DIR/ for the files of the prefix that was encoded, -o X.npz for its arrays"
    return "-o X.npy, -o X.npz, -o DIR/ or -o -"
