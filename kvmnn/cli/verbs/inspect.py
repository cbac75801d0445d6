"""``kvmnn inspect``: what a frame, a bundle, or a file of arrays holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .. import (
    axes_options,
    engine_options,
    idle_options,
    loading,
    many_options,
    packed_options,
    printing,
    shared_options,
    weights_options,
)

if TYPE_CHECKING:
    from ...files.mapped import MappedFile
    from ...formats import ArraysInfo

_TEXT = """Account for every byte of a frame, or list what a bundle or a file of arrays holds.

A frame gives its table of streams. A manifest, a bundle directory or a frame with its manifest gives a line for each
array, totals, and each stream's share (-v: the table of every frame too). A .npy, .npz or .safetensors file, an MNN
dump or a directory of .npy files gives the arrays that encode would take from it (of more than 1,000 the first 1,000;
-v: all).

The directory of a prefix cache or of live cache files, or one of their .k and .v files, gives what it is, geometry,
live and padded bytes, and where something cannot be known from the files, what it may be.

A Zarr store gives its arrays, chunks and sizes.

The weight file of a KV compressor (.bin), or a checkpoint of one (.pth, .pt), gives its header and a table of its
weights: shape, bias, least and greatest value, mean, standard deviation, elements that are no number.

--jobs N inspects each file below folders by itself (--help-many)."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "inspect", run, "what a frame, bundle or file holds", _TEXT)
    parser.add_argument(
        "inputs", nargs="+", metavar="IN", help="a frame, a bundle, any file or folder that kvmnn reads"
    )
    shared_options.add_dtype(
        parser, "what a frame without a manifest holds (default: fp16 or fp32, by its streams)", float8=True
    )
    parser.add_argument("--no-manifest", action="store_true", help="take frames alone, whatever lies beside them")
    shared_options.add_max_bytes(parser)
    weights_options.add_group(parser)
    parser.add_argument("--no-zstd", action="store_true", help="judge as an engine without libzstd")
    axes_options.add_axes(parser)
    many_options.add_many(parser)
    packed_options.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    if many_options.asked(arguments):
        return many_options.run(arguments, "inspect", arguments.inputs, takes=["arrays", "frames", "weights"])
    _refuse_idle(arguments)
    documents, code = [], 0
    for number, path in enumerate(arguments.inputs):
        found, text = _inspected(path, arguments)
        document = found.to_dict()
        documents.append(document)
        printing.expect_names(document)
        printing.say(arguments, ("\n" if number else "") + text)
        code = max(code, 0 if getattr(found, "is_loadable", True) else 1)
    if arguments.json:
        printing.print_json({"verb": "inspect", "inputs": documents})
    return code


def _refuse_idle(arguments: argparse.Namespace) -> None:
    """Exit code 2 for an option that is about none of the inputs."""
    used = {name for path in arguments.inputs for name in _used(path, arguments)}
    idle = [name for name in (*_FRAMES, *weights_options.TOLD, *_ABOUT_CACHES) if name not in used]
    inputs = " ".join(arguments.inputs)
    idle_options.refuse(arguments, idle, f"changes nothing of what is said about {inputs}: leave it out")


_ABOUT_CACHES = (*packed_options.LAYING, *engine_options.CHOOSING, *axes_options.NAMES)
_FRAMES = ("dtype", "no_manifest", "max_bytes", "no_zstd")


def _used(path: str, arguments: argparse.Namespace) -> tuple[str, ...]:
    """The options that count for an input, by what it is."""
    from ... import compressor

    weights = not arguments.no_manifest and not _says_axes(arguments)
    if weights and compressor.is_weight_file(path):
        return ()
    if weights and compressor.is_checkpoint(path):
        return ("dtype", *weights_options.TOLD)
    if _is_stream(path):
        return (*_FRAMES, "kv_batch", *engine_options.HEADS, *engine_options.CHOOSING, *axes_options.NAMES)
    if not _is_of_arrays(path, arguments):
        return _FRAMES
    if engine_options.is_engine_file(path):
        return ("dtype", "max_bytes", "kv_batch", "kv_half", *engine_options.used(path))
    return (
        "dtype",
        "max_bytes",
        *axes_options.NAMES,
        *(packed_options.LAYING if packed_options.may_be_packed(path) else ()),
    )


def _is_of_arrays(path: str, arguments: argparse.Namespace) -> bool:
    """Whether arrays are listed: those of a file that says so, or raw words whose shape or axes are said."""
    from ...formats import kind_of

    return kind_of(path) == "arrays" or (_says_axes(arguments) and kind_of(path) is None)


def _is_stream(path: str) -> bool:
    """Whether only what is read once can say what it is."""
    from ...files.mapped import is_stream
    from ...formats import kind_of

    return is_stream(path) and kind_of(path) is None


def _says_axes(arguments: argparse.Namespace) -> bool:
    return any(getattr(arguments, name) is not None for name in axes_options.NAMES)


def _inspected(path: str, arguments: argparse.Namespace) -> tuple[printing.Result, str]:
    """What an input holds, and the same as text."""
    from ... import compressor, formats
    from ...bundle import DecodeOptions, inspect
    from ...errors import CheckpointError
    from ...files.mapped import MappedFile
    from ...formats.mnn import inspect_packed

    weights = not arguments.no_manifest and not _says_axes(arguments)
    if weights and (compressor.is_weight_file(path) or compressor.is_checkpoint(path)):
        try:
            account = compressor.inspect(path, weights_options.options(arguments))
        except CheckpointError as error:
            if reason := formats.damage(path):  # nobody can know what it was
                raise CheckpointError(f"{path}: {reason}") from error
            raise
        return account, str(account)
    if formats.is_store(path) and not _says_axes(arguments):
        limits = formats.ReadOptions(dtype=arguments.dtype, skip_unsupported=True, max_bytes=arguments.max_bytes)
        store = formats.inspect_store(path, limits)
        return store, str(store if arguments.verbose else store.first())
    opened = MappedFile(path, max_bytes=arguments.max_bytes) if _is_stream(path) else path
    if _is_of_arrays(path, arguments) or (isinstance(opened, MappedFile) and formats.holds_arrays(opened)):
        if packed := inspect_packed(path, packed_options.options(arguments)):
            return packed, str(packed)
        arrays = _arrays(opened, arguments)
        shown = arrays if arguments.verbose else arrays.first()
        return shown, str(shown)
    options = DecodeOptions(
        dtype=arguments.dtype, codecs=shared_options.codecs(arguments), max_bytes=arguments.max_bytes
    )
    found = loading.open_frames(opened, arguments, options)
    loading.check_dtype(found, arguments)
    frames = inspect(found, options)
    return frames, frames.text(verbose=arguments.verbose)


def _arrays(path: str | MappedFile, arguments: argparse.Namespace) -> ArraysInfo:
    from ... import formats

    packed = packed_options.options(arguments)
    limits = formats.ReadOptions(
        laid=axes_options.laid(arguments),
        max_bytes=arguments.max_bytes,
        codes=True,
        engine=engine_options.options(arguments, any_heads=True, any_stream=True),
    )
    source = formats.open(
        path, limits, dtype=arguments.dtype, skip_unsupported=True, packed=packed, frames=False, codes=True
    )
    engine_options.refuse_no_blocks(arguments, source)
    return formats.inspect(source)
