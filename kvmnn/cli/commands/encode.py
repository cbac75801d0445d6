"""``kvmnn encode``: arrays to frames, and frames to dense streams and back."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from .. import batch, console, dense_options, input_sources, layer_stream_options, packed_options, shared_options
from ..console import STDIO, UsageError

if TYPE_CHECKING:
    from ...arrays.source import Source
    from ...batch import InputPath, Task
    from ...bundle import DecodeOptions, EncodeOptions, EncodeResult, FrameSet
    from ...files.mapped_file import MappedFile

_DESCRIPTION = """\
Encode arrays into frames of MNN's lossless codec. IN is a .npy, .npz or .safetensors file, a folder of them, a KV
dump or prefix cache of MNN, a cache of llama.cpp, mlx-lm or transformers, raw elements (--dtype), or - for standard
input. Every frame is decoded and compared with its input before LOSSLESS is printed.

  -o FILE    one array: its frame, and FILE.json alongside, from which decode
             restores the same array
  -o DIR/    any number of arrays: one frame file each and DIR/manifest.json
  -o X.zarr  a Zarr store, each chunk a frame: zarr, xarray and dask read it;
             also at a URL, such as s3://bucket/X.zarr (docs/zarr.md)
  -o -       one frame and nothing else on standard output
  --jobs N   each file below IN by itself; -o DIR/ gets the same folders

Without -o, X.npy becomes X.npy.frame and X.npz becomes X.npz.frames/. Only input from standard input goes to standard
output, if that is a file or a pipe.

Several inputs make one bundle. The directory of a prefix cache gives the valid K and V of every layer, and decode
restores its files. A session or sequence file of llama.cpp and a prompt cache of mlx-lm are kept whole: decode writes
the same file, byte for byte (docs/other-engines.md). What torch.save stored of a cache of transformers is read as K
and V of every layer. Of float8 arrays frames keep the codes. Frames (a frame, a manifest, a bundle) become dense
streams with --codec dense, and MNN's frames with --codec mnn: the same arrays and manifest, with the effort,
predictors and codecs of the manifest.

An array above --chunk-bytes is cut along its leading axes into several frames, which all processors share. Standard
output gets one frame, of up to 64 MiB. --codec dense makes dense streams of K and V, which are smaller and which kvmnn
alone reads (docs/dense.md); --codec profile:FILE and transform:FILE make streams of whole layers by the profile of a
model, lossless and LOSSY (docs/profile.md). A frame of incompressible elements is larger than they are: --joint-kv and
--allow-raw store such arrays raw, and the manifest has "stored": "raw"."""


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "encode",
        run,
        "arrays to frames",
        _DESCRIPTION,
        has_details=True,
        examples=(
            "kvmnn encode keys.npy -o keys.frame",
            "kvmnn encode dump/ -o dump.frames/ --effort fast",
            "kvmnn encode chat.session -o chat.frames/ --codec dense --kv-heads 8",
        ),
        shown="--output --dtype --tensor --effort --codec --model --no-verify --axes --jobs --resume",
    )
    parser.add_argument("inputs", nargs="+", metavar="IN", help="arrays, a dump, a prefix cache; - for standard input")
    shared_options.add_output_option(parser, "file, directory, or - (standard output)")
    shared_options.add_source_options(parser, "element type (default: the array's own; raw input needs it)")
    parser.add_argument(
        "--predictors",
        action=_PredictorsAction,
        metavar="[k:|v:|hi:]SPEC",
        help="e.g. raw,delta_seq (default: raw,delta_seq,xor_seq); repeatable: k:SPEC and v:SPEC for arrays that are K "
        "or V by their names, hi:SPEC for the high bytes of 16-bit words",
    )
    parser.set_defaults(predictors_k=None, predictors_v=None, hi_predictors=None)
    parser.add_argument(
        "--effort",
        choices=shared_options.EFFORT_CHOICES,
        help="exact: MNN's own bytes (default); balanced: one guess a stream, K and V two to three times as fast; "
        "fast: the least work, five to ten times as fast; max: the smallest frame MNN decodes (slow)",
    )
    parser.add_argument(
        "--chunk-bytes",
        dest="frame_bytes",
        type=_parse_frame_bytes,
        metavar="SIZE",
        help="cut arrays above this many raw bytes (default: 16M, 64M to a stream; 0: never)",
    )
    dense_options.add_codec_options(parser)
    parser.add_argument(
        "--adapt",
        action="store_true",
        help="with dense: learn tables in the cache itself, and store them and smaller streams where that pays (from "
        "some 2,000 tokens on)",
    )
    raw = parser.add_mutually_exclusive_group()
    raw.add_argument(
        "--joint-kv",
        dest="block",
        action="store_true",
        help="MNN's rule: store K and V of a layer raw where their frames together do not shrink",
    )
    raw.add_argument("--allow-raw", action="store_true", help="store any array raw where its frames do not shrink")
    shared_options.add_ignore_option(parser, "manifest", "no_manifest", "the manifest next to frames")
    parser.add_argument("--no-verify", action="store_true", help="do not decode and compare each frame")
    parser.accept("--max-input-bytes")
    shared_options.add_threads_option(parser)
    batch.add_batch_options(parser)
    packed_options.add_packed_options(parser)


class _PredictorsAction(argparse.Action):
    """``SPEC``, ``k:SPEC``, ``v:SPEC`` or ``hi:SPEC``: predictors of all arrays, of K, of V, of high bytes."""

    _dest_by_part: ClassVar = {
        "": "predictors",
        "k": "predictors_k",
        "v": "predictors_v",
        "hi": "hi_predictors",
    }
    dests = tuple(_dest_by_part.values())

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        from ...errors import KvmnnError
        from ...frames.options import resolve_predictors

        part, _, spec = values.rpartition(":")
        if part not in self._dest_by_part:
            raise argparse.ArgumentError(self, f"{values!r}: expected SPEC, k:SPEC, v:SPEC or hi:SPEC")
        try:  # as the engine reads it, but for names that it would pass over without a word
            resolve_predictors([name.strip(" \t") for name in spec.split(",")])
        except KvmnnError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self._dest_by_part[part], spec)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if batch.is_batch(arguments):
        return batch.run_batch(
            arguments, "encode", arguments.inputs, accepted_kinds=["arrays"], output=_make_task_factory
        )
    if arguments.adapt:
        return _encode_adapted(arguments)
    if layer_stream_options.is_layer_codec(arguments.codec):
        return layer_stream_options.encode(arguments)
    opened_input = _open_stream(arguments)
    if _is_transcoding(arguments, opened_input):
        return _transcode(arguments, opened_input or arguments.inputs[0])
    shared_options.refuse_given(arguments, ["no_manifest"], "is about frames, with --codec dense or --codec mnn")
    from ...bundle import EncodeOptions, check_encode_output, encode_source
    from ...formats import encode_store, has_zarr_suffix

    is_dense = arguments.codec == "dense"
    dense_options.check_codec_options(arguments)
    options = EncodeOptions(
        predictors=arguments.predictors,
        hi_predictors=arguments.hi_predictors,
        predictors_k=arguments.predictors_k,
        predictors_v=arguments.predictors_v,
        codecs=shared_options.select_codecs(arguments),
        effort=arguments.effort or "exact",
        frame_bytes=arguments.frame_bytes,
        threads=arguments.threads,
        verify=not arguments.no_verify,
        block=arguments.block,
        allow_raw=arguments.allow_raw,
    )
    is_to_zarr = has_zarr_suffix(arguments.output)
    _refuse_url(arguments.output, is_to_zarr)
    is_whole_file = packed_options.keeps_whole_file(arguments, arguments.inputs) and not is_to_zarr
    used_options = dense_options.SOURCE_TEXT_OPTIONS if is_dense else ()
    source = input_sources.load(
        arguments.inputs,
        arguments,
        used_options=used_options,
        is_whole_file=is_whole_file,
        as_layers=is_dense,
        codes=True,
        opened_input=opened_input,
    )
    input_sources.report_skipped(source, arguments)
    if not is_to_zarr:
        packed_options.note_arrays_only(arguments, arguments.inputs)
    is_on_stdout = console.is_data_to_stdout(arguments, arguments.inputs[0])
    path = None if is_on_stdout or is_to_zarr else _choose_output(arguments, source)
    if is_dense:
        if path is not None:  # before the rotation is looked for
            check_encode_output(source, path, force=arguments.force)
        options = replace(
            options, dense=dense_options.build_dense_options(arguments, source, with_search=not is_to_zarr)
        )
    with console.progress_bar(arguments, source.nbytes, "encode") as step:
        if is_to_zarr:
            encode_result: EncodeResult = encode_store(
                source, arguments.output, options, force=arguments.force, progress=step
            )
        else:
            output = console.open_data_stdout(arguments, "frame") if path is None else path
            encode_result = encode_source(source, output, options, force=arguments.force, progress=step)
    if is_dense:
        dense_options.note_idle_frame_options(arguments, encode_result)
    text = encode_result.text(verbose=arguments.verbose)
    console.show_result(arguments, "encode", encode_result, text=text, data_on_stdout=is_on_stdout)
    return 0


def _encode_adapted(arguments: argparse.Namespace) -> int:
    """Encode K and V of layers with ``--codec dense --adapt``, into a folder."""
    from ...bundle import EncodeOptions, check_encode_output
    from ...calibration import ADAPTATION_PASSES, encode_adapted
    from ...formats import has_zarr_suffix

    if arguments.codec != "dense":
        raise UsageError("--adapt needs --codec dense")
    if arguments.output == STDIO or has_zarr_suffix(arguments.output):
        raise UsageError(f"-o {arguments.output}: --adapt writes a local folder: use -o DIR/")
    _refuse_url(arguments.output, False)
    dense_options.check_codec_options(arguments)
    shared_options.refuse_given(arguments, dense_options.FRAME_OPTIONS, "is about frames, and --adapt makes none")
    source = input_sources.load(
        arguments.inputs, arguments, with_frames=True, used_options=dense_options.SOURCE_TEXT_OPTIONS
    )
    input_sources.report_skipped(source, arguments)
    path = _choose_output(arguments, source)
    check_encode_output(source, path, force=arguments.force)
    options = EncodeOptions(
        threads=arguments.threads,
        verify=not arguments.no_verify,
        dense=dense_options.build_dense_options(arguments, source),
    )
    with console.progress_bar(arguments, ADAPTATION_PASSES * source.nbytes, "encode") as step:
        result, note = encode_adapted(source, path, options, force=arguments.force, progress=step)
    console.print_note(arguments, note)
    console.show_result(arguments, "encode", result, text=result.text(verbose=arguments.verbose))
    return 0


def _open_stream(arguments: argparse.Namespace) -> MappedFile | None:
    """Open an input that is a stream and may contain frames; return None for any other."""
    from ...files.mapped_file import MappedFile, is_stream
    from ...formats import classify_path

    path = arguments.inputs[0]
    if arguments.codec is None or len(arguments.inputs) > 1 or not is_stream(path) or classify_path(path) is not None:
        return None
    return MappedFile(path, max_bytes=arguments.max_bytes)


def _is_transcoding(arguments: argparse.Namespace, opened_input: MappedFile | None) -> bool:
    """Return whether the input is frames and ``--codec`` requests another codec."""
    from ...formats import ZARR, classify_path, has_format
    from ...formats.registry import contains_frames

    path = arguments.inputs[0]
    if arguments.codec is None or len(arguments.inputs) > 1 or has_format(path, ZARR):
        return False
    if opened_input is not None:
        return contains_frames(opened_input)
    kind = classify_path(path)
    return kind == "frames" or (kind is None and os.path.isfile(path) and contains_frames(path))


def _transcode(arguments: argparse.Namespace, frames_input: str | MappedFile) -> int:
    """Encode the arrays of frames again."""
    from ...bundle import DecodeOptions
    from ...formats import has_zarr_suffix, transcode

    if arguments.output is None:
        raise UsageError("no output given: use -o FILE, -o DIR/ or -o -")
    if has_zarr_suffix(arguments.output):
        raise UsageError(
            f"-o {arguments.output}: a Zarr store is made of arrays (kvmnn decode), a bundle of frames: use -o DIR/"
        )
    idle_names = [name for name in vars(arguments) if name not in _TRANSCODE_OPTION_NAMES]
    reason = f"is not about frames, and {arguments.inputs[0]} is some"
    shared_options.refuse_given(arguments, idle_names, reason, arguments.inputs)
    if arguments.dtype not in (None, *shared_options.ELEMENT_TYPES):
        raise UsageError(f"--dtype {arguments.dtype}: frames without a manifest hold fp16, bf16 or fp32")
    if arguments.codec == "mnn":
        shared_options.refuse_given(arguments, ["rope", *dense_options.SOURCE_TEXT_OPTIONS], "needs --codec dense")
    decode_options = DecodeOptions(dtype=arguments.dtype, max_bytes=arguments.max_bytes, threads=arguments.threads)
    frames = input_sources.open_frame_set(frames_input, arguments, decode_options)
    input_sources.check_dtype_matches(frames, arguments)
    options = _build_transcode_options(arguments, frames, decode_options)
    is_on_stdout = arguments.output == STDIO
    if not is_on_stdout:
        console.note_output_folder(arguments, arguments.output, len(frames.arrays))
    output = console.open_data_stdout(arguments, "frame") if is_on_stdout else arguments.output
    with console.progress_bar(arguments, frames.raw_bytes, "transcode") as step:
        transcode_result = transcode(
            frames, output, options, decode_options=decode_options, force=arguments.force, progress=step
        )
    text = transcode_result.text(verbose=arguments.verbose)
    console.show_result(arguments, "transcode", transcode_result, text=text, data_on_stdout=is_on_stdout)
    return 0


_TRANSCODE_OPTION_NAMES = (
    *("run", "parser", "typed", "inputs", "output", "force", "json", "quiet", "verbose"),
    *("codec", "rope", "model", "token_ids", "dtype", "effort", "frame_bytes", "allow_raw", "no_manifest"),
    *("max_bytes", "threads"),
)


def _build_transcode_options(
    arguments: argparse.Namespace, frames: FrameSet, decode_options: DecodeOptions
) -> EncodeOptions:
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


def _refuse_url(output: str | None, is_store: bool) -> None:
    """Raise `UsageError` for a URL that is not one of a Zarr store, which would become a local folder."""
    from ...files.urls import is_url, redact_url

    if output is not None and not is_store and is_url(output):
        raise UsageError(f"-o {redact_url(output)}: a URL is written to as a Zarr store: -o {_ZARR_URL_EXAMPLE}")


_ZARR_URL_EXAMPLE = "s3://bucket/X.zarr"


def _make_task_factory(arguments: argparse.Namespace) -> Callable[[InputPath], Task]:
    """Return a function that makes the task of an input; its output is next to it, or below -o."""
    from ...batch import Task
    from ...files.file_names import FRAME_SUFFIX, FRAMES_FOLDER_SUFFIX, SIDECAR_SUFFIX, has_zarr_suffix

    folder: str | None = arguments.output
    if folder is not None and (
        folder == STDIO or has_zarr_suffix(folder) or (os.path.exists(folder) and not os.path.isdir(folder))
    ):
        raise UsageError(f"-o {folder}: of many files the output is a folder: use -o DIR/")
    _refuse_url(folder, False)
    endings = (FRAME_SUFFIX, FRAME_SUFFIX + SIDECAR_SUFFIX, FRAMES_FOLDER_SUFFIX.rstrip("/"))

    def make_task(named_input: InputPath) -> Task:
        base = named_input.path.rstrip("/" + os.sep) if folder is None else os.path.join(folder, named_input.name)
        return Task(named_input.path, base, endings)

    return make_task


def _choose_output(arguments: argparse.Namespace, source: Source) -> str:
    """Return the output path: as given, or the input's with a suffix appended, as gzip and zstd do."""
    from ...bundle.manifest import FRAME_SUFFIX
    from ...files.urls import is_url
    from ...formats import find_array_format
    from ...formats.bundle_writer import name_output

    output: str | None = arguments.output
    if batch_output := getattr(arguments, "named", None):  # one of many
        return name_output(str(batch_output), len(source))
    if output is None:
        if len(arguments.inputs) > 1 or arguments.inputs[0] == STDIO or is_url(arguments.inputs[0]):
            raise UsageError("no output given: use -o FILE, -o DIR/ or -o -")
        base_name: str = arguments.inputs[0].rstrip("/" + os.sep)
        if not PurePath(base_name).name.strip("."):
            raise UsageError(f"no output given and {arguments.inputs[0]!r} gives it no name: use -o DIR/")
        return name_output(base_name, len(source))
    is_file_name = (
        os.path.exists(output) or PurePath(output).suffix.lower() == FRAME_SUFFIX or find_array_format(output)
    )
    if len(source) > 1 and is_file_name and not console.is_directory_output(output):
        raise UsageError(f"{output}: {len(source)} arrays need a directory: use -o DIR/")
    console.note_output_folder(arguments, output, len(source))
    return output


def _parse_frame_bytes(text: str) -> int:
    """Parse the value of ``--chunk-bytes``."""
    from ...bundle.encoder import MIN_FRAME_BYTES

    size = shared_options.parse_byte_count(text)
    if 0 < size < MIN_FRAME_BYTES:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 (never cut) or at least {MIN_FRAME_BYTES}")
    return size
