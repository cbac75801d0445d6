"""``kvmnn verify``: decode frames and compare them with the original input; check weight files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..._util.text import format_range, pluralize
from .. import batch, console, input_sources, layer_stream_options, packed_options, shared_options

if TYPE_CHECKING:
    from ...arrays.source import Source
    from ...bundle import FrameSet
    from ...packed.cache_info import CacheInfo


_DESCRIPTION = """\
Decode frames again and prove the result. With a manifest the hash of every frame and of every array is checked; with
--against the bytes are compared with the original file. Either prints LOSSLESS. Frames without a manifest can only be
shown to decode: DECODES. Any mismatch ends with exit code 1.

Several --against make one set, as several inputs of encode do.

Of a Zarr store (X.zarr) the hashes that kvmnn stored in it are checked. Layer streams (encode --codec profile:FILE or
transform:FILE) are decoded and compared with the hashes in their layers.json; the words of lossy ones are those that it
promises, and --against shows where they differ.

The weight file of a KV compressor (.bin) is checked in structure and values; with --against its checkpoint, every
weight, every bias, every header field and the metadata are compared with what kvmnn compressor convert would write
(kvmnn compressor verify has the options of a conversion).

--jobs N verifies each frame, bundle, weight file and folder of layer streams below folders."""


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "verify",
        run,
        "prove that frames decode to their arrays",
        _DESCRIPTION,
        examples=(
            "kvmnn verify keys.frame",
            "kvmnn verify keys.frame --against keys.npy",
            "kvmnn verify frames/ --jobs 4",
        ),
        shown="--against --dtype --ignore --jobs --resume",
    )
    parser.add_argument("inputs", nargs="+", metavar="IN", help="a frame, a manifest, a bundle; a weight file")
    parser.add_argument("--against", action="append", default=[], metavar="FILE", help="the original (repeatable)")
    shared_options.add_source_options(parser, "element type of a frame without a manifest, or of raw input")
    parser.set_defaults(has_own_profile=True)
    shared_options.add_ignore_option(parser, "manifest", "no_manifest", "the manifest next to frames")
    parser.accept("--max-input-bytes")
    shared_options.accept_table(parser)
    shared_options.add_threads_option(parser)
    batch.add_batch_options(parser)
    packed_options.add_packed_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn verify``; return 1 for any difference."""
    if batch.is_batch(arguments):
        takes = ["frames", "weights"]
        refused_reasons = {"against": "it is the original of one input; the hashes of each file are checked"}
        return batch.run_batch(
            arguments, "verify", arguments.inputs, accepted_kinds=takes, not_for_many=refused_reasons
        )
    if len(arguments.inputs) > 1:
        raise console.UsageError(f"{len(arguments.inputs)} inputs: --jobs N verifies each of many, without it give one")
    arguments.input = arguments.inputs[0]
    from ...bundle import DecodeOptions, verify_frame_set
    from ...compressor import is_weight_file
    from ...formats import ZARR, can_restore_file, has_format, verify_file

    if input_sources.is_layer_streams(arguments.input):
        return layer_stream_options.verify(arguments)
    input_sources.refuse_idle_profile(arguments, [arguments.input])
    if has_format(arguments.input, ZARR):
        return _verify_zarr(arguments)
    if not arguments.no_manifest and is_weight_file(arguments.input):
        return _verify_weight_file(arguments)
    options = DecodeOptions(
        dtype=arguments.dtype,
        codecs=shared_options.select_codecs(arguments),
        max_bytes=arguments.max_bytes,
        threads=arguments.threads,
    )
    if not arguments.against:
        reason = "needs --against: it says how the packed files of an original lie"
        shared_options.refuse_given(arguments, packed_options.PACKED_OPTION_NAMES, reason)
        original_options = ["tensor", "skip_unsupported", *shared_options.AXES_OPTION_NAMES]
        shared_options.refuse_given(arguments, original_options, "needs --against: it is about the original")
    frames = input_sources.open_frame_set(arguments.input, arguments, options)
    if not arguments.against:
        input_sources.check_dtype_matches(frames, arguments)
    against = _load_original(frames, arguments) if arguments.against else None
    with console.progress_bar(arguments, frames.raw_bytes, "verify") as step:
        if against is None and can_restore_file(frames):
            verify_result = verify_file(frames, options, progress=step)
        else:
            verify_result = verify_frame_set(frames, against, options, progress=step)
    if not verify_result.ok:
        return console.show_failed_result(arguments, "verify", verify_result)
    console.show_result(arguments, "verify", verify_result)
    return 0


def _verify_weight_file(arguments: argparse.Namespace) -> int:
    """Verify a compressor's weight file, against its checkpoint if one is given."""
    from .compressor import verify_weight_file

    idle_names = [*packed_options.PACKED_OPTION_NAMES, "tensor", "skip_unsupported", "no_zstd", "max_bytes", "threads"]
    shared_options.refuse_given(arguments, idle_names, f"is not about weight files, and {arguments.input} is one")
    return verify_weight_file(arguments)


def _verify_zarr(arguments: argparse.Namespace) -> int:
    """Verify a Zarr store against the hashes that kvmnn recorded in it."""
    from ...formats import ReadOptions, verify_store

    idle_names = (
        *("against", "no_manifest", "no_zstd"),
        *shared_options.AXES_OPTION_NAMES,
        *packed_options.PACKED_OPTION_NAMES,
        *packed_options.SELECTION_OPTIONS,
    )
    shared_options.refuse_given(
        arguments, idle_names, f"says nothing about {arguments.input}, a Zarr store (kvmnn diff compares two)"
    )
    options = ReadOptions(
        dtype=arguments.dtype,
        tensors=tuple(arguments.tensor),
        skip_unsupported=arguments.skip_unsupported,
        decode_frames=False,
        threads=arguments.threads,
        max_bytes=arguments.max_bytes,
    )
    with console.progress_bar(arguments, 0, "verify") as step:
        verify_result = verify_store(arguments.input, options, progress=step)
    console.show_result(arguments, "verify", verify_result)
    return 0


def _load_original(frames: FrameSet, arguments: argparse.Namespace) -> Source:
    """Load the input that the frames were made from; take missing properties from the frames."""
    from ...compressor import has_weight_file_magic
    from ...formats import can_restore_file

    packed_options.check_provenance(arguments, frames.cache, frames.path)
    for path in filter(has_weight_file_magic, arguments.against):
        raise console.UsageError(f"--against {path}: is a compressor's weight file, which no frames are made of")
    dtypes, record = [array.dtype for array in frames.arrays], frames.packed_record
    source = input_sources.load(
        arguments.against,
        arguments,
        dtypes,
        cache_info=frames.cache,
        is_whole_file=can_restore_file(frames) or (record is not None and not record.left_out),
        as_layers=False,
        original_of=frames,
        codes=True,
    )
    input_sources.report_skipped(source, arguments)
    if frames.cache is not None and source.cache is not None:
        console.print_note(arguments, f"the original is read as the frames say: {_format_geometry(frames.cache)}")
    return source


def _format_geometry(cache: CacheInfo) -> str:
    """Format the properties of a packed cache that its files do not record: tokens, layers, heads."""
    tokens = format_range(sorted({layer.tokens for layer in cache.layers}))
    layouts = dict.fromkeys(map(cache.get_layer_layout, cache.layers))
    heads = " or ".join(f"{pluralize(layout.kv_heads, 'kv head')} of {layout.head_dim}" for layout in layouts)
    return f"{tokens} tokens in {pluralize(len(cache.layers), 'layer')}, {heads}"
