"""``kvmnn encode``: arrays to frames."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ...text import LOSSLESS, count, megabytes_per_second, ratio
from .. import loading, packed_options, printing, shared_options
from ..printing import STDIO, UsageError

if TYPE_CHECKING:
    from ...arrays.source import Source
    from ...bundle.encoding import EncodeOptions
    from ...bundle.manifest import Manifest
    from ...packed.cache_info import CacheInfo

_TEXT = """Encode arrays into the frames that MNN would store.

IN is a .npy, .npz or .safetensors file, the directory of an MNN KV dump, any other file of raw words (--dtype says of
which kind), or "-" for standard input (raw words or a .npy file). Several inputs make one bundle. The directory of a
prefix cache gives the live K and V of every layer, and decode makes its files again.

  -o FILE    one array: its frame, and FILE.json beside it, from which decode restores the very array
  -o DIR/    any number of arrays: one frame file each and DIR/manifest.json
  -o -       one frame and nothing else on standard output

Without -o the frame goes to standard output if that is a file or a pipe; on a terminal, X.npy becomes X.npy.frame.
An array above --frame-bytes is cut along its leading axes into several frames.
Every frame is decoded and compared with its input before LOSSLESS is printed."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "encode", run, "arrays to frames", _TEXT)
    parser.add_argument("inputs", nargs="+", metavar="IN")
    shared_options.add_output(parser, "file, directory, or - (standard output)")
    shared_options.add_source(parser, "what the words are (default: the array's own type; raw words need it)")
    parser.add_argument("--predictors", metavar="SPEC", help="e.g. raw,delta_seq (default: raw,delta_seq,xor_seq)")
    parser.add_argument("--hi-predictors", metavar="SPEC", help="other predictors for the high bytes of 16-bit words")
    parser.add_argument(
        "--effort",
        choices=("exact", "fast", "max"),
        default="exact",
        help="exact: MNN's own bytes; fast: one guess a stream; max: the smallest frame MNN decodes (slow)",
    )
    parser.add_argument(
        "--frame-bytes",
        type=shared_options.byte_count,
        default=None,
        metavar="SIZE",
        help="cut arrays above this many raw bytes (default 64M, 16M for packed files; 0: never)",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not decode and compare each frame")
    shared_options.add_threads(parser)
    packed_options.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...bundle.encoding import FRAME_BYTES, MIN_FRAME_BYTES, PACKED_FRAME_BYTES, EncodeOptions

    if arguments.frame_bytes and arguments.frame_bytes < MIN_FRAME_BYTES:
        raise UsageError(f"--frame-bytes {arguments.frame_bytes}: expected 0 (never cut) or at least {MIN_FRAME_BYTES}")
    options = EncodeOptions(
        predictors=arguments.predictors,
        hi_predictors=arguments.hi_predictors,
        codecs=shared_options.codecs(arguments),
        effort=arguments.effort,
        frame_bytes=FRAME_BYTES if arguments.frame_bytes is None else arguments.frame_bytes,
        threads=arguments.threads,
        verify=not arguments.no_verify,
    )
    source = loading.load(arguments.inputs, arguments)
    loading.report_skipped(source, arguments)
    if source.cache and arguments.frame_bytes is None:
        options = replace(options, frame_bytes=PACKED_FRAME_BYTES)
    started = time.perf_counter()
    if printing.to_stdout(arguments):
        return _to_stdout(source, arguments, options)
    output = arguments.output or _derived(arguments.inputs, len(source.arrays))
    document = _write(source, output, arguments, options)
    _report(document, output, arguments, time.perf_counter() - started, source.cache)
    if source.cache:
        packed = source.cache.file_bytes
        times = ratio(packed, document.stored_bytes)
        printing.say(arguments, f"  the packed files have {packed:,} bytes, {times:.2f} times as many as the frames")
    return 0


def _to_stdout(source: Source, arguments: argparse.Namespace, options: EncodeOptions) -> int:
    from ...bundle.encoding import encode_to_bytes

    if len(source.arrays) > 1:
        raise UsageError(f"standard output carries one frame, not {len(source.arrays)}: write to a directory (-o DIR/)")
    if arguments.json:
        raise UsageError("--json and the frame both want standard output: write the frame to a file (-o FILE)")
    (array,) = source.arrays
    if array.piece_count(options.frame_bytes) > 1:
        raise UsageError(
            f"standard output carries one frame, but {array.nbytes} bytes are above --frame-bytes: "
            "use --frame-bytes 0 or -o FILE"
        )
    started = time.perf_counter()
    with printing.progress(arguments, array.nbytes, "encode") as step:
        made = encode_to_bytes(array, options, step)
    seconds = time.perf_counter() - started
    stdout = printing.Stdout()
    stdout.write(made)
    stdout.flush()
    line = _line(array.name, array.nbytes, len(made), 1, options.verify, seconds)
    printing.say(arguments, line, data_on_stdout=True)
    return 0


def _derived(inputs: list[str], arrays: int) -> str:
    """The output's name where none was given: as gzip and zstd do it, the input's with something appended."""
    if len(inputs) > 1 or inputs[0] == STDIO:
        raise UsageError("no output given: use -o FILE, -o DIR/ or -o -")
    base = inputs[0].rstrip("/" + os.sep)
    if not PurePath(base).name.strip("."):
        raise UsageError(f"no output given and {inputs[0]!r} gives it no name: use -o DIR/")
    return base + (".frame" if arrays == 1 else ".frames/")


def _write(source: Source, output: str, arguments: argparse.Namespace, options: EncodeOptions) -> Manifest:
    from ...bundle.encoding import encode_to_directory, encode_to_file
    from ...bundle.manifest import FILE_NAME, FRAME_SUFFIX
    from ...files.output import DirectoryOutput, FileOutput
    from ...formats.opening import array_format

    many = len(source.arrays) > 1
    is_file = os.path.exists(output) or PurePath(output).suffix.lower() == FRAME_SUFFIX or array_format(output)
    if many and is_file and not printing.is_directory(output):
        raise UsageError(f"{output}: {len(source.arrays)} arrays need a directory: use -o DIR/")
    total = sum(array.nbytes for array in source.arrays)
    protect = [path for path in arguments.inputs if path != STDIO]
    with printing.progress(arguments, total, "encode") as step:
        if many or printing.is_directory(output):
            directory = DirectoryOutput(output, force=arguments.force, protect=protect, index=FILE_NAME)
            with directory:
                document = encode_to_directory(
                    source.arrays, directory, options, metadata=source.metadata, progress=step
                )
                directory.commit()
        else:
            with FileOutput(output, force=arguments.force, protect=protect) as file:
                document = encode_to_file(source.arrays, file, options, metadata=source.metadata, progress=step)
                file.commit()
    return document


def _report(
    document: Manifest, output: str, arguments: argparse.Namespace, seconds: float, cache: CacheInfo | None
) -> None:
    from ...bundle.manifest import array_to_dict

    verified = not arguments.no_verify
    frames = sum(len(array.frames) for array in document.arrays)
    if arguments.json:
        printing.print_json(
            {
                "verb": "encode",
                "output": output,
                "label": LOSSLESS if verified else None,
                "raw_bytes": document.raw_bytes,
                "stored_bytes": document.stored_bytes,
                "ratio": ratio(document.raw_bytes, document.stored_bytes),
                "seconds": seconds,
                "effort": document.effort,
                "kvmnn_version": document.kvmnn_version,
                "zstd_version": document.zstd_version,
                "byte_exact": document.zstd_byte_exact and document.effort == "exact",
                "cache": printing.cache_document(cache),
                "arrays": [
                    {**array_to_dict(array), "ratio": ratio(array.nbytes, array.stored_bytes)}
                    for array in document.arrays
                ],
            }
        )
        return
    if arguments.verbose:
        for array in document.arrays:
            printing.say(
                arguments,
                f"{array.name}: {array.dtype} {list(array.shape)}, {array.nbytes:,} -> {array.stored_bytes:,} bytes, "
                f"ratio {ratio(array.nbytes, array.stored_bytes):.4f}",
            )
    name = output if len(document.arrays) == 1 else f"{output} ({count(len(document.arrays), 'array')})"
    printing.say(arguments, _line(name, document.raw_bytes, document.stored_bytes, frames, verified, seconds))


def _line(name: str, raw_bytes: int, stored_bytes: int, frames: int, verified: bool, seconds: float) -> str:
    return (
        f"{name}: {raw_bytes:,} -> {stored_bytes:,} bytes, ratio {ratio(raw_bytes, stored_bytes):.4f}, "
        f"{count(frames, 'frame')}, {LOSSLESS + ' (decoded and compared)' if verified else 'not verified'}, "
        f"{megabytes_per_second(raw_bytes, seconds)}"
    )
