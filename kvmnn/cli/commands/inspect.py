"""``kvmnn inspect``: the contents of a frame, a bundle, or a file of arrays."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .. import batch, console, input_sources, packed_options, shared_options

if TYPE_CHECKING:
    from ...files.mapped_file import MappedFile
    from ...formats import ArraysInfo

_DESCRIPTION = """\
Account for every byte of a frame, or list the arrays of a bundle, a file, a cache or a Zarr store. IN is any file or
folder that kvmnn reads.

A frame gives its table of streams. A manifest, a bundle directory or a frame with its manifest gives a line for each
array, totals, and each stream's share (-v: the table of every frame too). A .npy, .npz or .safetensors file, an MNN
dump or a directory of .npy files gives the arrays that encode would take from it (of more than 1,000 the first 1,000;
-v: all).

The directory of a prefix cache or of live cache files, or one of their .k and .v files, gives its kind, geometry,
valid and padded bytes, and where the files leave it open, the candidates.

A Zarr store gives its arrays, chunks and sizes.

The weight file of a KV compressor (.bin), or a checkpoint of one (.pth, .pt), gives its header and a table of its
weights: shape, bias, minimum and maximum, mean, standard deviation, and the number of elements that are NaN (kvmnn
compressor inspect has the options of a conversion).

--jobs N inspects each file below folders by itself."""


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "inspect",
        run,
        "what a frame, bundle or file holds",
        _DESCRIPTION,
        has_details=True,
        examples=(
            "kvmnn inspect keys.frame",
            "kvmnn inspect dump.frames/ -v",
            "kvmnn inspect sys/ --backend x86-avx2 --json",
        ),
        shown="--dtype --ignore --backend --kv-heads --axes --jobs",
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="IN", help="a frame, a bundle, any file or folder that kvmnn reads"
    )
    shared_options.add_dtype_option(
        parser, "element type of a frame without a manifest (default: fp16 or fp32, by its streams)", with_float8=True
    )
    shared_options.add_ignore_option(parser, "manifest", "no_manifest", "the manifest next to frames")
    parser.accept("--max-input-bytes")
    shared_options.accept_table(parser)
    parser.add_argument("--no-zstd", action="store_true", help="judge as an engine without libzstd")
    shared_options.add_axes_options(parser)
    batch.add_batch_options(parser)
    packed_options.add_packed_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if batch.is_batch(arguments):
        return batch.run_batch(arguments, "inspect", arguments.inputs, accepted_kinds=["arrays", "frames", "weights"])
    _refuse_idle(arguments)
    if arguments.table and len(arguments.inputs) > 1:
        raise console.UsageError(f"--table of {len(arguments.inputs)} inputs: give one")
    documents, code = [], 0
    for input_index, path in enumerate(arguments.inputs):
        info, text = _inspect_input(path, arguments)
        document = info.to_dict()
        documents.append(document)
        console.register_document_names(document)
        console.write_table(arguments, info)
        console.print_line(arguments, ("\n" if input_index else "") + text)
        code = max(code, 0 if getattr(info, "is_loadable", True) else 1)
    if arguments.json:
        console.print_json({"verb": "inspect", "inputs": documents})
    return code


def _refuse_idle(arguments: argparse.Namespace) -> None:
    """Exit with code 2 for an option that applies to none of the inputs."""
    used_names = {name for path in arguments.inputs for name in _list_used_options(path, arguments)}
    idle_names = [name for name in (*_FRAME_OPTION_NAMES, *_CACHE_OPTIONS) if name not in used_names]
    inputs = " ".join(arguments.inputs)
    reason = f"changes nothing of what is said about {inputs}: leave it out"
    shared_options.refuse_given(arguments, idle_names, reason, arguments.inputs)


_CACHE_OPTIONS = (
    *packed_options.PACKED_OPTION_NAMES,
    *packed_options.SELECTION_OPTIONS,
    *shared_options.AXES_OPTION_NAMES,
)
_FRAME_OPTION_NAMES = ("dtype", "no_manifest", "max_bytes", "no_zstd")


def _list_used_options(path: str, arguments: argparse.Namespace) -> tuple[str, ...]:
    """List the options that apply to an input of this kind."""
    from ... import compressor

    may_be_weights = not arguments.no_manifest and not _has_axes_options(arguments)
    if may_be_weights and compressor.is_weight_file(path):
        return ()
    if may_be_weights and compressor.is_checkpoint(path):
        return ("dtype",)
    if _is_stream(path):
        return (
            *_FRAME_OPTION_NAMES,
            "kv_batch",
            *packed_options.HEAD_OPTIONS,
            *packed_options.SELECTION_OPTIONS,
            *shared_options.AXES_OPTION_NAMES,
        )
    if not _lists_arrays(path, arguments):
        return _FRAME_OPTION_NAMES
    if packed_options.is_engine_file(path):
        return ("dtype", "max_bytes", "kv_batch", "kv_half", *packed_options.list_used_options(path))
    return (
        "dtype",
        "max_bytes",
        *shared_options.AXES_OPTION_NAMES,
        *(packed_options.PACKED_OPTION_NAMES if packed_options.may_be_packed(path) else ()),
    )


def _lists_arrays(path: str, arguments: argparse.Namespace) -> bool:
    """Return whether arrays are listed: for a file of arrays, or raw elements with a given shape or axes."""
    from ...formats import classify_path

    return classify_path(path) == "arrays" or (_has_axes_options(arguments) and classify_path(path) is None)


def _is_stream(path: str) -> bool:
    """Return whether the input is a stream whose format its name does not show."""
    from ...files.mapped_file import is_stream
    from ...formats import classify_path

    return is_stream(path) and classify_path(path) is None


def _has_axes_options(arguments: argparse.Namespace) -> bool:
    return any(getattr(arguments, name) is not None for name in shared_options.AXES_OPTION_NAMES)


def _inspect_input(path: str, arguments: argparse.Namespace) -> tuple[console.CommandResult, str]:
    """Inspect an input; return the result and its text."""
    from ... import compressor, formats
    from ...bundle import DecodeOptions, inspect_frame_set
    from ...files.mapped_file import FileHead, MappedFile
    from ...formats.mnn import inspect_packed

    may_be_weights = not arguments.no_manifest and not _has_axes_options(arguments)
    if may_be_weights and (compressor.is_weight_file(path) or compressor.is_checkpoint(path)):
        from .compressor import inspect_weight_file

        return inspect_weight_file(path, arguments)
    if input_sources.is_layer_streams(path):
        from ...formats.layer_streams.reader import inspect_layers

        layers = inspect_layers(path)
        return layers, layers.text(verbose=arguments.verbose)
    if formats.has_format(path, formats.ZARR) and not _has_axes_options(arguments):
        limits = formats.ReadOptions(dtype=arguments.dtype, skip_unsupported=True, max_bytes=arguments.max_bytes)
        store = formats.inspect_store(path, limits)
        return store, str(store if arguments.verbose else store.truncate())
    opened_input = MappedFile(path, max_bytes=arguments.max_bytes) if _is_stream(path) else path
    if _lists_arrays(path, arguments) or (
        isinstance(opened_input, MappedFile) and formats.detect(FileHead.from_stream(opened_input)).name != "raw"
    ):
        if packed := inspect_packed(path, packed_options.build_packed_options(arguments)):
            return packed, str(packed)
        arrays = _inspect_arrays(opened_input, arguments)
        shown_info = arrays if arguments.verbose else arrays.truncate()
        return shown_info, str(shown_info)
    options = DecodeOptions(
        dtype=arguments.dtype, codecs=shared_options.select_codecs(arguments), max_bytes=arguments.max_bytes
    )
    frame_set = input_sources.open_frame_set(opened_input, arguments, options)
    input_sources.check_dtype_matches(frame_set, arguments)
    frames = inspect_frame_set(frame_set, options)
    return frames, frames.text(verbose=arguments.verbose)


def _inspect_arrays(path: str | MappedFile, arguments: argparse.Namespace) -> ArraysInfo:
    from ... import formats

    packed = packed_options.build_packed_options(arguments)
    limits = formats.ReadOptions(
        axis_spec=shared_options.build_axis_spec(arguments),
        max_bytes=arguments.max_bytes,
        codes=True,
        engine=packed_options.build_engine_options(arguments, any_heads=True, any_stream=True),
    )
    source = formats.open(
        path, limits, dtype=arguments.dtype, skip_unsupported=True, packed=packed, decode_frames=False, codes=True
    )
    packed_options.refuse_blocks_without_quantized(arguments, source)
    return formats.inspect(source)
