"""Frames and their manifest of anything that kvmnn reads: `kvmnn.bundle.encode`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, overload

import numpy as np

from ..arrays.array import from_numpy
from ..arrays.axes import AXES_AS_STORED
from ..arrays.source import Source
from ..bundle.encoder import EncodeOptions, EncodeResult, encode_source
from ..errors import OptionError
from ..files.file_names import FRAME_SUFFIX, FRAMES_FOLDER_SUFFIX
from . import registry
from .layer_streams.codecs import LayerStreamOptions
from .layer_streams.writer import EncodeLayersResult, encode_layers
from .options import EngineOptions, ReadOptions

if TYPE_CHECKING:
    from .._util.parallel import Progress

ARRAY_NAME = "array"
"""Name of an array that has none."""


def name_output(path: str, num_arrays: int) -> str:
    """Return the name of the frames of an input: with a suffix appended, as gzip and zstd do."""
    return path.rstrip("/" + os.sep) + (FRAME_SUFFIX if num_arrays == 1 else FRAMES_FOLDER_SUFFIX)


@overload
def encode(
    values: object,
    output: str | os.PathLike[str] | None = None,
    options: EncodeOptions | None = None,
    *,
    read_options: ReadOptions | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> EncodeResult: ...


@overload
def encode(
    values: object,
    output: str | os.PathLike[str],
    options: LayerStreamOptions,
    *,
    read_options: ReadOptions | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> EncodeLayersResult: ...


def encode(
    values: object,
    output: str | os.PathLike[str] | None = None,
    options: EncodeOptions | LayerStreamOptions | None = None,
    *,
    read_options: ReadOptions | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> EncodeResult | EncodeLayersResult:
    """Encode a file, a cache in memory or arrays, decode the result and compare it.

    Parameters
    ----------
    values
        A path or anything else that `kvmnn.open` reads; the `Source` that it returns; one numpy array. Frames of a path
        keep the whole of a prefix cache or of a file of another engine, as those of ``kvmnn encode`` do, and
        `kvmnn.formats.restore` writes the same files; those of a `Source` keep its arrays.
    output
        A file for one array, a folder for several. Default for a path: its name with ``.frame`` or ``.frames/``.
    options
        Predictors, codecs, effort, dense streams and more; as for `kvmnn.bundle.encode_source`. With
        `kvmnn.formats.LayerStreamOptions`, K and V of every layer become streams by the profile of a model in the
        folder `output`, losslessly or with a loss; otherwise frames with their manifest.
    read_options
        How to read `values`: as `options` of `kvmnn.open`. With options that select or change arrays of a path
        (tensors, axes, a stream, a sequence ...) frames keep these arrays alone.
    overwrite
        Replace files that exist.
    progress
        Called with raw bytes.

    Returns
    -------
    EncodeResult or EncodeLayersResult
        Label, sizes, ratio and manifest. ``kvmnn.open(result.output)`` reads the arrays back, in their shapes.

    Raises
    ------
    MissingFileError
        If the path does not exist.
    OptionError
        If neither `output` nor a path gives the result a name.
    KvmnnError
        As `kvmnn.open` and `kvmnn.bundle.encode_source`.
    """
    if isinstance(values, np.ndarray):
        source = Source([from_numpy(ARRAY_NAME, values)])
    else:
        if isinstance(values, str | os.PathLike) and not isinstance(options, LayerStreamOptions):
            has_heads = options is not None and options.dense is not None
            read_options = _keep_whole(read_options or ReadOptions(), split_heads=has_heads)
        source = values if isinstance(values, Source) else registry.open(values, read_options)
    if isinstance(options, LayerStreamOptions):
        if output is None:
            raise OptionError("no output given: layer streams need a folder")
        return encode_layers(source, os.fspath(output), options, force=overwrite, progress=progress)
    if output is None:
        if not isinstance(values, str | os.PathLike) or not PurePath(values).name.strip("."):
            raise OptionError("no output given, and the input has no name: specify output")
        output = name_output(os.fspath(values), len(source))
    return encode_source(source, output, options, force=overwrite, progress=progress)


def _keep_whole(options: ReadOptions, *, split_heads: bool) -> ReadOptions:
    """Return the options to read a whole file for its frames, unless `options` select or change arrays of it."""
    is_part = options.tensors or options.axis_spec != AXES_AS_STORED or options.engine != EngineOptions()
    engine = options.engine if is_part else EngineOptions(passthrough=True, split_heads=split_heads)
    return replace(options, engine=engine, codes=True)
