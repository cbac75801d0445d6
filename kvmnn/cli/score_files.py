"""Scores or attention in files, as the planner wants them: a vector of block scores and a length for each layer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays.named_array import NamedArray
from ..dtypes import Floats
from ..errors import SourceError
from ..files.json_document import unique_keys
from ..formats import opening
from ..formats.options import ReadOptions
from ..h2o.config import H2OConfig
from ..h2o.scores import block_sums, updated

KINDS = ("scores", "attention")


@dataclass(frozen=True)
class LayerScores:
    """What is known of one layer.

    Attributes
    ----------
    name
        Where it came from.
    kv_len
        Tokens.
    scores
        float32 ``[blocks]``.
    """

    name: str
    kv_len: int
    scores: Floats


def read_scores(
    path: str,
    config: H2OConfig,
    *,
    options: ReadOptions | None = None,
    kind: str | None = None,
    tokens: int | None = None,
    threads: int = 1,
    tile: int | None = None,
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
        ``[heads, queries, keys]`` or ``[layers, heads, queries, keys]``. None: scores with one axis, else attention.
    tokens
        Tokens of every layer, for scores; by default all blocks are full.
    threads, tile
        As for `block_sums`.

    Raises
    ------
    SourceError
        For a file that holds something else.
    """
    arrays = _json(path) if PurePath(path).suffix.lower() == ".json" else _arrays(path, options)
    found: list[LayerScores] = []
    for name, array in arrays:
        what = kind or ("scores" if array.ndim == 1 else "attention")
        single = 1 if what == "scores" else (2, 3)[array.ndim in (3, 4)]
        if array.ndim not in (single, single + 1) or not array.size:
            raise SourceError(f"{path}: {name} has the shape {array.shape}: expected {_EXPECTED[what]}")
        layers = [(name, array)] if array.ndim == single else [(f"{name}[{i}]", a) for i, a in enumerate(array)]
        for label, part in layers:
            if what == "attention":
                if (part < 0).any():
                    raise SourceError(f"{path}: {label} has numbers below 0: expected attention, as softmax gives it")
                sums = block_sums(part, config.block, threads=threads, tile=tile)
                count = part.shape[0] * (part.shape[1] if part.ndim == 3 else 1)
                scores = updated(np.empty(0), sums, count=count, alpha=float(config.alpha))
                found.append(LayerScores(label, part.shape[-1], scores))
            else:
                found.append(LayerScores(label, tokens or part.size * config.block, part))
    return found


_EXPECTED = {
    "scores": "(blocks,) or (layers, blocks)",
    "attention": "(heads, keys), (heads, queries, keys) or (layers, heads, queries, keys)",
}


def _arrays(path: str, options: ReadOptions | None) -> list[tuple[str, Floats]]:
    source = opening.open(path, options, frames=False)
    return [(array.name, _floats(array)) for array in source.arrays]


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
    try:
        with open(path, "rb") as file:
            document = json.load(file, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as exc:
        raise SourceError(f"{path}: is not valid JSON: {str(exc)[:200]}") from None
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
