"""``kvmnn decode``: frames to arrays."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from .. import packed_options, prefix_output, printing, shared_options
from ..printing import STDIO, UsageError

if TYPE_CHECKING:
    from ...bundle import DecodeOptions, FrameSet
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
    from ...bundle import DecodeOptions, open_frames
    from ...formats import restore

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
    on_stdout = printing.to_stdout(arguments)
    output = printing.data_stdout(arguments, "data") if on_stdout else _output(arguments, frames)
    info = _prefix_info(frames, output, arguments) if isinstance(output, str) else None
    if info:
        return _restore_prefix(frames, info, options, arguments)
    with printing.progress(arguments, frames.raw_bytes, "decode") as step:
        made = restore(frames, output, options, force=arguments.force, progress=step)
    printing.show(arguments, "decode", made, data_on_stdout=on_stdout)
    return 0


def _output(arguments: argparse.Namespace, frames: FrameSet) -> str:
    """The output's name: as given, or the input's without what encode appended."""
    path = PurePath(arguments.input)
    if arguments.output is not None:
        output: str = arguments.output
        return output
    if arguments.input == STDIO or path.suffix != ".frame" or len(frames.arrays) > 1:
        raise UsageError("no output given: use -o X.npy, -o X.npz, -o DIR/ or -o -")
    stem = path.with_suffix("")
    return str(stem if stem.suffix == ".npy" else stem.with_suffix(".npy"))


def _prefix_info(frames: FrameSet, output: str, arguments: argparse.Namespace) -> CacheInfo | None:
    """The prefix cache that the frames were made from, if that is what is to be written."""
    from ...formats import array_format

    info = frames.cache
    if info is None or info.kind != "prefix" or arguments.arrays:
        return None
    return None if array_format(output) and not printing.is_directory(output) else info


def _restore_prefix(frames: FrameSet, info: CacheInfo, options: DecodeOptions, arguments: argparse.Namespace) -> int:

    from ...errors import LimitError
    from ...formats.frames import of_frames
    from ...formats.mnn.prefix_writing import plan
    from ...formats.restoring import array_document

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
    more = {
        "input": arguments.input,
        "raw_bytes": frames.raw_bytes,
        "stored_bytes": frames.stored_bytes,
        "arrays": [array_document(array) for array in frames.arrays],
    }
    prefix_output.report(arguments, "decode", packed, seconds, more=more)
    return 0


def _check_same(info: CacheInfo, target: CacheInfo, arguments: argparse.Namespace) -> None:
    """Refuse, or with ``--force`` warn about, another layout, model or text than the cache was made with.

    Raises
    ------
    SourceError
        Saying what differs.
    """

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
