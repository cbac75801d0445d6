"""``kvmnn verify``: prove that frames decode to what they were made from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ...text import count, span
from .. import (
    axes_options,
    engine_options,
    idle_options,
    loading,
    many_options,
    packed_options,
    printing,
    shared_options,
    verify_weights,
    weights_options,
)

if TYPE_CHECKING:
    from ...arrays.source import Source
    from ...bundle import FrameSet
    from ...packed.cache_info import CacheInfo

_TEXT = """Decode frames again and prove what comes out.

With a manifest the hash of every frame and of every array is checked; with --against the bytes themselves are compared
with the original file (several --against make one set, as several inputs of encode do). Either prints LOSSLESS.
Frames without a manifest can only be shown to decode, and then the word is DECODES. Any mismatch ends with exit code 1.

Of a Zarr store (X.zarr) the hashes that kvmnn noted down in it are checked.

The weight file of a KV compressor (.bin) is checked in structure and sense; with --against its checkpoint, every
weight, every bias, every header field and the metadata are compared with what kvmnn convert would write: tell the
options that it was told.

--jobs N verifies each frame, bundle and weight file below folders (--help-many)."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "verify", run, "prove that frames decode to their arrays", _TEXT)
    parser.add_argument("inputs", nargs="+", metavar="IN", help="a frame, a manifest, a bundle; a weight file")
    parser.add_argument("--against", action="append", default=[], metavar="FILE", help="the original (repeatable)")
    shared_options.add_source(parser, "what a frame without a manifest, or a file of raw words, holds")
    parser.add_argument("--no-manifest", action="store_true", help="take frames alone, whatever lies beside them")
    shared_options.add_max_bytes(parser)
    shared_options.add_threads(parser)
    many_options.add_many(parser)
    packed_options.add_packed(parser)
    weights_options.add_group(parser, trailing=True)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out; 1 for any difference."""
    if many_options.asked(arguments):
        takes = ["frames", "weights"]
        refused = {"against": "it is the original of one input; the hashes of each file are checked"}
        return many_options.run(arguments, "verify", arguments.inputs, takes=takes, not_for_many=refused)
    if len(arguments.inputs) > 1:
        raise printing.UsageError(
            f"{len(arguments.inputs)} inputs: --jobs N verifies each of many, without it give one"
        )
    arguments.input = arguments.inputs[0]
    from ...bundle import DecodeOptions, verify
    from ...compressor import is_weight_file
    from ...formats import is_kept, is_store, verify_file

    if is_store(arguments.input):
        return _run_store(arguments)
    if not arguments.no_manifest and is_weight_file(arguments.input):
        return verify_weights.run(arguments)
    told = [name for name in weights_options.TOLD if name != "head_dim"]
    told += ["allow_trailing", "as_reference"]
    idle_options.refuse(arguments, told, f"is about weight files, and {arguments.input} is none")
    options = DecodeOptions(
        dtype=arguments.dtype,
        codecs=shared_options.codecs(arguments),
        max_bytes=arguments.max_bytes,
        threads=arguments.threads,
    )
    if not arguments.against:
        why = "needs --against: it says how the packed files of an original lie"
        idle_options.refuse(arguments, packed_options.LAYING, why)
        about = ["tensor", "skip_unsupported", *axes_options.NAMES]
        idle_options.refuse(arguments, about, "needs --against: it is about the original")
    frames = loading.open_frames(arguments.input, arguments, options)
    if not arguments.against:
        loading.check_dtype(frames, arguments)
    against = _original(frames, arguments) if arguments.against else None
    with printing.progress(arguments, frames.raw_bytes, "verify") as step:
        if against is None and is_kept(frames):
            found = verify_file(frames, options, progress=step)
        else:
            found = verify(frames, against, options, progress=step)
    if not found.ok:
        return printing.show_failure(arguments, "verify", found)
    printing.show(arguments, "verify", found)
    return 0


def _run_store(arguments: argparse.Namespace) -> int:
    """The hashes that kvmnn noted down in a Zarr store."""
    from ...formats import ReadOptions, verify_store

    others = ("against", "no_manifest", "no_zstd", *weights_options.TOLD, "allow_trailing", "as_reference")
    idle = (*others, *axes_options.NAMES, *packed_options.LAYING, *engine_options.CHOOSING)
    idle_options.refuse(
        arguments, idle, f"says nothing about {arguments.input}, a Zarr store (kvmnn diff compares two)"
    )
    options = ReadOptions(
        dtype=arguments.dtype,
        tensors=tuple(arguments.tensor),
        skip_unsupported=arguments.skip_unsupported,
        frames=False,
        threads=arguments.threads,
        max_bytes=arguments.max_bytes,
    )
    with printing.progress(arguments, 0, "verify") as step:
        found = verify_store(arguments.input, options, progress=step)
    printing.show(arguments, "verify", found)
    return 0


def _original(frames: FrameSet, arguments: argparse.Namespace) -> Source:
    """What the frames were made from; what it does not say of itself is as the frames have it."""
    from ...compressor import is_weights
    from ...formats import is_kept

    packed_options.check_origin(arguments, frames.cache, frames.path)
    for path in filter(is_weights, arguments.against):
        raise printing.UsageError(f"--against {path}: is a compressor's weight file, which no frames are made of")
    dtypes = [array.dtype for array in frames.arrays]
    source = loading.load(
        arguments.against,
        arguments,
        dtypes,
        known=frames.cache,
        whole=is_kept(frames) or frames.packed_record is not None,
        as_layers=False,
        original_of=frames,
        codes=True,
    )
    loading.report_skipped(source, arguments)
    if frames.cache is not None and source.cache is not None:
        printing.note(arguments, f"the original is read as the frames say: {_geometry(frames.cache)}")
    return source


def _geometry(cache: CacheInfo) -> str:
    """What a description says that packed files do not."""
    tokens = span(sorted({layer.tokens for layer in cache.layers}))
    layouts = dict.fromkeys(map(cache.layout_of, cache.layers))
    heads = " or ".join(f"{count(layout.kv_heads, 'kv head')} of {layout.head_dim}" for layout in layouts)
    return f"{tokens} tokens in {count(len(cache.layers), 'layer')}, {heads}"
