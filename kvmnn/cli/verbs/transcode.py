"""``kvmnn transcode``: MNN's frames to dense streams, and back."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import dense_options, idle_options, loading, printing, shared_options
from ..printing import STDIO, UsageError
from .encode import frame_bytes

if TYPE_CHECKING:
    from ...bundle import DecodeOptions, EncodeOptions, FrameSet

_TEXT = """Make dense streams of frames, or MNN's frames of dense streams. The arrays are the same, byte for byte, and
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


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "transcode", run, "MNN's frames to dense streams, and back", _TEXT)
    parser.add_argument("input", metavar="IN", help="a frame, a manifest, a bundle; - for standard input")
    shared_options.add_output(parser, "file, directory, or - (standard output)")
    dense_options.add_codec(parser, required=True)
    dense_options.add_text(parser)
    shared_options.add_dtype(parser, "what a frame without a manifest holds (default: fp16 or fp32, by its streams)")
    parser.add_argument("--effort", choices=shared_options.EFFORTS, help="of frames (default: as the manifest has it)")
    parser.add_argument(
        "--frame-bytes",
        type=frame_bytes,
        metavar="SIZE",
        help="cut arrays that become frames above this many raw bytes (default: 16M; 0: never)",
    )
    parser.add_argument("--allow-raw", action="store_true", help="any array stays raw where it does not shrink")
    parser.add_argument("--no-manifest", action="store_true", help="take frames alone, whatever lies beside them")
    shared_options.add_max_bytes(parser)
    parser.add_argument(
        "--threads", type=shared_options.positive, metavar="N", help="threads to use (default: all processors)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...bundle import DecodeOptions
    from ...errors import SourceError
    from ...formats import is_named_zarr, is_store, transcode

    if is_store(arguments.input):
        again = f"kvmnn encode {arguments.input}" + (" --codec dense" if arguments.codec == "dense" else "")
        raise SourceError(f"{arguments.input}: is a Zarr store, no bundle of frames: {again} takes its arrays")
    if arguments.output is None:
        raise UsageError("no output given: use -o FILE, -o DIR/ or -o -")
    if is_named_zarr(arguments.output):
        raise UsageError(f"-o {arguments.output}: a Zarr store is made by kvmnn encode, transcode makes a bundle")
    if arguments.codec == "mnn":
        idle_options.refuse(arguments, ["rope", *dense_options.TEXT], "needs --codec dense")
    reading = DecodeOptions(dtype=arguments.dtype, max_bytes=arguments.max_bytes, threads=arguments.threads)
    frames = loading.open_frames(arguments.input, arguments, reading)
    loading.check_dtype(frames, arguments)
    options = _options(arguments, frames, reading)
    on_stdout = arguments.output == STDIO
    if not on_stdout:
        printing.note_folder(arguments, arguments.output, len(frames.arrays))
    output = printing.data_stdout(arguments, "frame") if on_stdout else arguments.output
    with printing.progress(arguments, frames.raw_bytes, "transcode") as step:
        made = transcode(frames, output, options, decoding=reading, force=arguments.force, progress=step)
    text = made.text(verbose=arguments.verbose)
    printing.show(arguments, "transcode", made, text=text, data_on_stdout=on_stdout)
    return 0


def _options(arguments: argparse.Namespace, frames: FrameSet, reading: DecodeOptions) -> EncodeOptions:
    from ...bundle import check_output
    from ...formats.transcoding import options_of, source_of

    options = replace(
        options_of(frames),
        threads=arguments.threads,
        frame_bytes=arguments.frame_bytes,
        allow_raw=arguments.allow_raw,
    )
    if arguments.effort is not None:
        options = replace(options, effort=arguments.effort)
    if arguments.codec == "dense":
        source = source_of(frames, reading)
        if arguments.output != STDIO:  # before the rotation is looked for
            check_output(source, arguments.output, force=arguments.force)
        options = replace(options, dense=dense_options.options(arguments, source))
    return options
