"""The files of the H2O planner: scores or attention of each layer in, plans for `kvmnn compact` out."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays.named_array import NamedArray
from ..arrays.names import conventional, layer_of
from ..arrays.source import FILE_KEY
from ..dtypes import PARTS, Floats
from ..errors import MissingOptionError, OptionError, SourceError
from ..files.json_document import parse, read_bounded
from ..files.output import FileOutput
from ..h2o.config import H2OConfig
from ..h2o.layer_plans import LayerPlans, LayerScores, plan_layers
from ..h2o.scores import block_sums, updated
from . import opening
from .options import ReadOptions

_MAX_JSON = 256 << 20


def plan_file(
    path: str,
    config: H2OConfig | None = None,
    output: str | None = None,
    *,
    options: ReadOptions | None = None,
    kind: str | None = None,
    tokens: int | None = None,
    threads: int = 1,
    tile: int | None = None,
    batch: int | None = None,
    force: bool = False,
) -> LayerPlans:
    """Plan an eviction for every layer of a file of scores or of attention, as if each layer triggered now.

    Parameters
    ----------
    path, config, options, kind, tokens, threads, tile, batch
        As for `read_scores`.
    output
        A JSON file to write, for `kvmnn compact --plan`.
    force
        Replace it where it exists.

    Raises
    ------
    KvmnnError
        As for `kvmnn.h2o.plan` and `read_scores`; `OutputError` for the output.
    """
    config = config or H2OConfig()
    started = time.perf_counter()
    scores = read_scores(
        path, config, options=options, kind=kind, tokens=tokens, threads=threads, tile=tile, batch=batch
    )
    plans = plan_layers(scores, config)
    plans = replace(plans, input=path, output=output, seconds=time.perf_counter() - started)
    if output is not None:
        with FileOutput(output, force=force, protect=[path]) as file:
            file.file.write((json.dumps(plans.entries()) + "\n").encode())
            file.commit()
    return plans


def read_scores(
    path: str,
    config: H2OConfig,
    *,
    options: ReadOptions | None = None,
    kind: str | None = None,
    tokens: int | None = None,
    threads: int = 1,
    tile: int | None = None,
    batch: int | None = None,
) -> list[LayerScores]:
    """Block scores of each layer in a file.

    Parameters
    ----------
    path
        A file of arrays that kvmnn reads, one for each layer in the order of the file; or a ``.json`` file with a list
        of scores, or a list of such lists.
    config
        For the blocks, and for the mean of attention: one step from zeros.
    options
        For files of arrays.
    kind
        ``"scores"``: ``[blocks]``, or ``[layers, blocks]``. ``"attention"``: ``[heads, keys]``,
        ``[heads, queries, keys]`` or ``[layers, heads, queries, keys]``; of a file with an array for each layer
        ``[batch, heads, queries, keys]``. None: scores with one axis, else attention.
    tokens
        Tokens of every layer, for scores; by default all blocks are full.
    threads, tile
        As for `block_sums`.
    batch
        Which text of a batch, from 0; None for the only one.

    Raises
    ------
    SourceError, ManifestError
        For a file that holds something else; `MissingOptionError` for a cache, and for a batch of several texts
        without `batch`; `OptionError` for a text that is not there.
    """
    found: list[LayerScores] = []
    arrays = _json(path) if PurePath(path).suffix.lower() == ".json" else _arrays(path, options)
    for name, array in _texts(path, arrays, kind, batch):
        what = kind or ("scores" if array.ndim == 1 else "attention")
        for label, part in _layers(path, name, array, what):
            if what == "scores":
                found.append(LayerScores(name=label, kv_len=tokens or part.size * config.block, scores=part))
            elif (part < 0).any():
                raise SourceError(
                    f"{path}: {label} has numbers below 0: expected attention, as softmax gives it: K and V are none "
                    "(--policy SPEC plans a cache)"
                )
            else:
                scores = _scored(part, config, threads, tile)
                found.append(LayerScores(name=label, kv_len=part.shape[-1], scores=scores))
    return found


def _texts(
    path: str, arrays: list[tuple[str, Floats]], kind: str | None, batch: int | None
) -> list[tuple[str, Floats]]:
    """The arrays of one text: where each is of one layer, the first of four axes is a batch."""
    if [name for name, _ in arrays] == list(PARTS):  # of a list of two tensors, which K and V often are
        arrays = [(f"layer_{number}", array) for number, (_, array) in enumerate(arrays)]
    is_by_layer = len(arrays) > 1 or layer_of(arrays[0][0]) is not None
    of_batch = [is_by_layer and array.ndim == 4 and kind != "scores" for _, array in arrays]
    if batch is not None and not any(of_batch):
        raise OptionError(f"{path}: its arrays have no axis for a batch: leave --batch out")
    found = []
    for (name, array), has_batch in zip(arrays, of_batch, strict=True):
        if not has_batch:
            found.append((name, array))
            continue
        texts = array.shape[0]
        if batch is None and texts != 1:
            raise MissingOptionError(
                f"{path}: {name} has the shape {array.shape}, attention of a batch of {texts} texts: --batch N plans "
                "one of them, from 0"
            )
        if batch is not None and batch >= texts:
            raise OptionError(f"{path}: {name} is of a batch of {texts}: expected --batch 0 to {texts - 1}")
        found.append((name, array[batch or 0]))
    return found


_EXPECTED = {
    "scores": "(blocks,) or (layers, blocks)",
    "attention": "(heads, keys), (heads, queries, keys) or (layers, heads, queries, keys)",
}


def _layers(path: str, name: str, array: Floats, what: str) -> list[tuple[str, Floats]]:
    """The layers in an array, each with its name."""
    single = 1 if what == "scores" else (2, 3)[array.ndim in (3, 4)]
    if array.ndim not in (single, single + 1) or not array.size:
        raise SourceError(f"{path}: {name} has the shape {array.shape}: expected {_EXPECTED[what]}")
    return [(name, array)] if array.ndim == single else [(f"{name}[{i}]", part) for i, part in enumerate(array)]


def _scored(attention: Floats, config: H2OConfig, threads: int, tile: int | None) -> Floats:
    """Block scores after one step from zeros."""
    sums = block_sums(attention, config.block, threads=threads, tile=tile)
    rows = attention.shape[0] * (attention.shape[1] if attention.ndim == 3 else 1)
    return updated(np.empty(0), sums, count=rows, alpha=float(config.alpha))


def _arrays(path: str, options: ReadOptions | None) -> list[tuple[str, Floats]]:
    options = options or ReadOptions()
    if os.path.isdir(path) and not opening.is_frames(path) and opening.folder_kind(path) == "packed":
        raise _holds_kv(path)
    source = opening.open(path, replace(options, engine=replace(options.engine, any_heads=True, any_stream=True)))
    if source.engine_cache is not None or FILE_KEY in source.metadata or any(map(conventional, source)):
        raise _holds_kv(path, f" ({source.engine_cache})" if source.engine_cache is not None else "")
    return [(array.name, _floats(array)) for array in source.arrays]


def _holds_kv(path: str, what: str = "") -> MissingOptionError:
    return MissingOptionError(
        f"{path}: holds K and V{what}: planning needs attention, or scores of blocks, which no cache holds: --policy "
        "SPEC plans a cache by lengths or keys (streaming:budget=512, knorm:keep_ratio=0.5 ...); kvmnn eval MODEL "
        "--text FILE --policy h2o_engine computes attention with a model, and plans with it"
    )


def _floats(array: NamedArray) -> Floats:
    words = np.concatenate([*array.pieces()])
    if array.dtype == "fp16":
        values: npt.NDArray[Any] = words.view("<f2").astype(np.float32)
    elif array.dtype == "fp32":
        values = words.view("<f4").astype(np.float32)
    else:
        values = (words.view("<u2").astype(np.uint32) << 16).view(np.float32)
    shape = array.shape if array.itemsize == array.word_bytes else (values.size,)
    return np.ascontiguousarray(values.reshape(shape, order=array.order))


def _json(path: str) -> list[tuple[str, Floats]]:
    document = parse(read_bounded(Path(path), _MAX_JSON), path, _MAX_JSON).value
    lists = document if isinstance(document, list) and document and isinstance(document[0], list) else [document]
    for number, scores in enumerate(lists):
        if not isinstance(scores, list) or not all(type(score) in (int, float) for score in scores):
            raise SourceError(f"{path}: entry {number}: expected a list of scores, which are numbers")
    with np.errstate(over="ignore"):
        try:
            return [
                (f"layer {number}", np.array(scores, np.float64).astype(np.float32))
                for number, scores in enumerate(lists)
            ]
        except OverflowError:
            raise SourceError(f"{path}: a score is too large for a float") from None
