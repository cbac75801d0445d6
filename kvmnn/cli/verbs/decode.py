"""``kvmnn decode``: frames to arrays."""

from __future__ import annotations

import argparse
import time
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ...formats.writing import write_directory
from ...text import LOSSLESS, count, megabytes_per_second
from .. import packed_options, prefix_output, printing, shared_options
from ..printing import STDIO, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...bundle.decoding import Decoded
    from ...bundle.frame_set import DecodeOptions, FrameSet
    from ...packed.cache_info import CacheInfo

_TEXT = """Decode frames into the arrays they were made from.

IN is a frame, a frame with its manifest (IN.json) beside it, a manifest, a directory with a manifest.json, or "-" for
one frame on standard input. With a manifest the very arrays come back and their hashes are checked; a frame alone
becomes a 1-D array.

  -o X.npy                     one array
  -o X.npz, X.safetensors      any number of arrays
  -o DIR/                      one .npy file for each array
  -o X, -o -                   the raw words of one array

Frames made from a prefix cache become its files again with -o DIR/ (--arrays: .npy files instead), byte for byte in
every live element. --model, --token-ids and --backend are compared with what the manifest says, and what differs is
refused; --force restores all the same.

Without -o raw words go to standard output if that is a file or a pipe; on a terminal, X.npy.frame becomes X.npy."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "decode", run, "frames to arrays", _TEXT)
    parser.add_argument("input", metavar="IN")
    shared_options.add_output(parser, "file, directory, or - (standard output)")
    shared_options.add_dtype(parser, "what a frame without a manifest holds (default: fp16 or fp32, by its streams)")
    parser.add_argument(
        "--max-bytes", type=shared_options.byte_count, metavar="SIZE", help="refuse to decode more raw bytes than this"
    )
    parser.add_argument("--no-manifest", action="store_true", help="take a frame alone, whatever lies beside it")
    shared_options.add_threads(parser)
    group = parser.add_argument_group("prefix caches", "what is expected of the files that are restored")
    group.add_argument("--arrays", action="store_true", help="write plain arrays, not the files they came from")
    group.add_argument("--name", metavar="NAME", help="what the engine calls the prefix (default: as before)")
    packed_options.add_layout(group, "--backend")
    packed_options.add_text(group)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...bundle.decoding import decode_frames
    from ...bundle.frame_set import DecodeOptions, open_frames

    options = DecodeOptions(
        dtype=arguments.dtype,
        codecs=shared_options.codecs(arguments),
        max_bytes=arguments.max_bytes,
        threads=arguments.threads,
    )
    frames = open_frames(arguments.input, use_manifest=not arguments.no_manifest, options=options)
    if frames.document is not None and arguments.dtype not in (None, *(array.dtype for array in frames.arrays)):
        said = frames.arrays[0].dtype
        raise UsageError(f"the manifest says {said}, not {arguments.dtype} (--no-manifest ignores it)")
    started = time.perf_counter()

    def runs(step: Callable[[int], object] | None) -> Iterator[Decoded]:
        return decode_frames(frames, options, progress=step)

    if printing.to_stdout(arguments):
        output = "standard output"
        _to_stdout(frames, runs, arguments)
    else:
        output = arguments.output or _derived(arguments.input, frames)
        info = _prefix_info(frames, output, arguments)
        if info:
            return _restore_prefix(frames, info, options, arguments)
        _write(frames, runs, output, arguments)
    _report(frames, output, arguments, time.perf_counter() - started)
    return 0


def _to_stdout(frames: FrameSet, runs: Any, arguments: argparse.Namespace) -> None:
    from ...formats.raw import write_raw

    if len(frames.arrays) > 1:
        raise UsageError(f"standard output carries one array, not {len(frames.arrays)}: use -o DIR/ or -o X.npz")
    if arguments.json:
        raise UsageError("--json and the data both want standard output: write the data to a file (-o FILE)")
    stdout = printing.Stdout()
    with printing.progress(arguments, frames.raw_bytes, "decode") as step:
        write_raw(stdout, frames.arrays, runs(step), {})
    stdout.flush()


def _prefix_info(frames: FrameSet, output: str, arguments: argparse.Namespace) -> CacheInfo | None:
    """The prefix cache that the frames were made from, if that is what is to be written."""
    from ...arrays.source import described_by
    from ...formats.opening import array_format

    info = described_by(frames.document.metadata, arguments.input) if frames.document else None
    if info is None or info.kind != "prefix" or arguments.arrays:
        return None
    return None if array_format(output) and not printing.is_directory(output) else info


def _restore_prefix(frames: FrameSet, info: CacheInfo, options: DecodeOptions, arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from ...errors import LimitError
    from ...formats.frames import of_frames
    from ...formats.mnn.prefix_writing import plan

    source = replace(of_frames(frames, options), cache=info)
    arrays = prefix_output.layers_of(source, arguments)
    target = replace(info, layout=prefix_output.only_layout(arguments, arrays, info.layout, info.layout.dtype))
    _check_same(info, target, arguments)
    planned = plan(arrays, target.layout, prefix_output.prefix_name(arguments, info), like=info)
    if options.max_bytes is not None and planned.file_bytes > options.max_bytes:
        raise LimitError(
            f"{arguments.input}: its files have {planned.file_bytes} bytes, above the limit of {options.max_bytes}"
        )
    started = time.perf_counter()
    packed = prefix_output.write(arguments, arrays, planned, [arguments.input, *frames.paths], "decode")
    seconds = time.perf_counter() - started
    more = {"input": arguments.input, "raw_bytes": frames.raw_bytes, "stored_bytes": frames.stored_bytes}
    prefix_output.report(arguments, "decode", packed, seconds, more=more | {"arrays": _arrays(frames)})
    return 0


def _check_same(info: CacheInfo, target: CacheInfo, arguments: argparse.Namespace) -> None:
    """Refuse, or with ``--force`` warn about, another layout, model or text than the cache was made with.

    Raises
    ------
    SourceError
        Saying what differs.
    """
    import sys

    from ...errors import SourceError
    from ...formats.mnn.model import fingerprint
    from ...packed.fitting import describe

    found = []
    if target.layout != info.layout:
        found.append(f"the cache has {describe(info.layout)}; asked for was {describe(target.layout)}")
    if arguments.model and info.model is None:
        found.append("the manifest does not say which model the cache is of")
    elif arguments.model and fingerprint(arguments.model) != info.model:
        found.append(f"the cache is of another model than the one in {arguments.model}")
    ids = packed_options.token_ids(arguments.token_ids)
    if ids and info.token_ids is None:
        found.append("the manifest does not say which token ids the cache was made from")
    elif ids and ids != info.token_ids:
        found.append(f"the cache was made from other token ids than those in {arguments.token_ids}")
    if found and not arguments.force:
        raise SourceError(f"{arguments.input}: {found[0]} (--force restores it all the same)")
    if not arguments.quiet:
        for line in found:
            print(f"kvmnn: warning: {line}", file=sys.stderr)


def _derived(name: str, frames: FrameSet) -> str:
    """The output's name where none was given: the input's without what encode appended."""
    path = PurePath(name)
    if name == STDIO or path.suffix != ".frame" or len(frames.arrays) > 1:
        raise UsageError("no output given: use -o X.npy, -o X.npz, -o DIR/ or -o -")
    stem = path.with_suffix("")
    return str(stem if stem.suffix == ".npy" else stem.with_suffix(".npy"))


def _write(frames: FrameSet, runs: Any, output: str, arguments: argparse.Namespace) -> None:
    from ...files.output import DirectoryOutput, FileOutput
    from ...formats.writing import writer_for

    metadata = frames.document.metadata if frames.document else {}
    protect = [path for path in [arguments.input, *frames.paths] if path != STDIO]
    with printing.progress(arguments, frames.raw_bytes, "decode") as step:
        if printing.is_directory(output):
            with DirectoryOutput(output, force=arguments.force, protect=protect) as directory:
                write_directory(directory, frames.arrays, runs(step))
                directory.commit()
            return
        writer = writer_for(output, frames.arrays)
        with FileOutput(output, force=arguments.force, protect=protect) as file:
            writer(file.file, frames.arrays, runs(step), metadata)
            file.commit()


def _report(frames: FrameSet, output: str, arguments: argparse.Namespace, seconds: float) -> None:
    proved = frames.document is not None
    if arguments.json:
        printing.print_json(
            {
                "verb": "decode",
                "input": arguments.input,
                "output": output,
                "label": LOSSLESS if proved else None,
                "raw_bytes": frames.raw_bytes,
                "stored_bytes": frames.stored_bytes,
                "seconds": seconds,
                "arrays": _arrays(frames),
            }
        )
        return
    what = f"{LOSSLESS} (sha256 of the manifest)" if proved else "no manifest to check it against"
    line = (
        f"{output}: {count(len(frames.arrays), 'array')}, {frames.stored_bytes:,} -> {frames.raw_bytes:,} "
        f"bytes, {what}, {megabytes_per_second(frames.raw_bytes, seconds)}"
    )
    printing.say(arguments, line, data_on_stdout=printing.to_stdout(arguments))


def _arrays(frames: FrameSet) -> list[dict[str, Any]]:
    return [
        {"name": a.name, "dtype": a.dtype, "shape": list(a.shape), "array_dtype": a.array_dtype} for a in frames.arrays
    ]
