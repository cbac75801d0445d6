"""``kvmnn transcode``: MNN's frames to dense streams, and back."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import console, dense_options, input_sources, shared_options
from ..console import STDIO, UsageError
from .encode import parse_frame_bytes

if TYPE_CHECKING:
    from ...bundle import DecodeOptions, EncodeOptions, FrameSet

_DESCRIPTION = """\
Make dense streams of frames, or MNN's frames of dense streams. The arrays are the same, byte for byte, and
so is all else that the manifest says of them.

IN is a frame, a frame with its manifest (IN.json) beside it, a manifest, a directory with a manifest.json, or "-" for
standard input; of a Zarr store kvmnn encode makes frames or, with --codec dense, dense streams.

--codec dense makes dense streams of K and V of layers (docs/dense.md) and leaves other arrays as frames; --codec mnn
makes frames of everything, with the effort, predictors and codecs that the manifest has: exact frames are those that
encode made, where the arrays are cut as they were.

  -o FILE    one array, and FILE.json beside it
  -o DIR/    any number of arrays, and DIR/manifest.json
  -o -       one frame or dense stream and nothing else on standard output

Everything is decoded and compared with what was decoded of IN before LOSSLESS is printed."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(
        subparsers, "transcode", run, "MNN's frames to dense streams, and back", _DESCRIPTION
    )
    parser.add_argument("input", metavar="IN", help="a frame, a manifest, a bundle; - for standard input")
    shared_options.add_output(parser, "file, directory, or - (standard output)")
    dense_options.add_codec(parser, is_required=True)
    dense_options.add_source_text(parser)
    shared_options.add_dtype(parser, "what a frame without a manifest holds (default: fp16 or fp32, by its streams)")
    parser.add_argument(
        "--effort", choices=shared_options.EFFORT_CHOICES, help="of frames (default: as the manifest has it)"
    )
    parser.add_argument(
        "--frame-bytes",
        type=parse_frame_bytes,
        metavar="SIZE",
        help="cut arrays that become frames above this many raw bytes (default: 16M; 0: never)",
    )
    parser.add_argument("--allow-raw", action="store_true", help="any array stays raw where it does not shrink")
    parser.add_argument("--no-manifest", action="store_true", help="take frames alone, whatever lies beside them")
    shared_options.add_max_bytes(parser)
    parser.add_argument(
        "--threads", type=shared_options.parse_positive, metavar="N", help="threads to use (default: all processors)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...bundle import DecodeOptions
    from ...errors import SourceError
    from ...formats import has_zarr_suffix, is_zarr_store, transcode

    if is_zarr_store(arguments.input):
        encode_command = f"kvmnn encode {arguments.input}" + (" --codec dense" if arguments.codec == "dense" else "")
        raise SourceError(f"{arguments.input}: is a Zarr store, no bundle of frames: {encode_command} takes its arrays")
    if arguments.output is None:
        raise UsageError("no output given: use -o FILE, -o DIR/ or -o -")
    if has_zarr_suffix(arguments.output):
        raise UsageError(f"-o {arguments.output}: a Zarr store is made by kvmnn encode, transcode makes a bundle")
    if arguments.codec == "mnn":
        shared_options.refuse_given(arguments, ["rope", *dense_options.SOURCE_TEXT_OPTIONS], "needs --codec dense")
    decode_options = DecodeOptions(dtype=arguments.dtype, max_bytes=arguments.max_bytes, threads=arguments.threads)
    frames = input_sources.open_frame_set(arguments.input, arguments, decode_options)
    input_sources.check_dtype_matches(frames, arguments)
    options = _build_options(arguments, frames, decode_options)
    is_on_stdout = arguments.output == STDIO
    if not is_on_stdout:
        console.note_output_folder(arguments, arguments.output, len(frames.arrays))
    output = console.open_data_stdout(arguments, "frame") if is_on_stdout else arguments.output
    with console.progress_bar(arguments, frames.raw_bytes, "transcode") as step:
        encode_result = transcode(
            frames, output, options, decode_options=decode_options, force=arguments.force, progress=step
        )
    text = encode_result.text(verbose=arguments.verbose)
    console.show_result(arguments, "transcode", encode_result, text=text, data_on_stdout=is_on_stdout)
    return 0


def _build_options(arguments: argparse.Namespace, frames: FrameSet, decode_options: DecodeOptions) -> EncodeOptions:
    from ...bundle import check_encode_output
    from ...formats.frames import make_original_source, read_encode_options

    options = replace(
        read_encode_options(frames),
        threads=arguments.threads,
        frame_bytes=arguments.frame_bytes,
        allow_raw=arguments.allow_raw,
    )
    if arguments.effort is not None:
        options = replace(options, effort=arguments.effort)
    if arguments.codec == "dense":
        source = make_original_source(frames, decode_options)
        if arguments.output != STDIO:  # before the rotation is looked for
            check_encode_output(source, arguments.output, force=arguments.force)
        options = replace(options, dense=dense_options.build_dense_options(arguments, source))
    return options
