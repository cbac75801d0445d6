"""Files of plans: scores or attention as input, the document of ``kvmnn plan`` as output; plans of a cache by a
policy.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

import numpy as np

from .. import dtypes
from .._util.parallel import Progress
from ..arrays.array import LazyArray
from ..arrays.cast import to_float32
from ..arrays.layers import AmbiguousAxesError, LayerArray, check_kv_shapes, collect_layers, format_input_prefix
from ..arrays.naming import parse_conventional_name, parse_layer
from ..arrays.positions import read_token_positions
from ..arrays.source import FILE_KEY, Source
from ..dtypes import PARTS, Elements, Floats, Positions
from ..errors import MissingOptionError, OptionError, SourceError
from ..files.atomic import FileOutput
from ..files.schema import parse_document, read_bounded
from ..policies.h2o.config import H2OConfig
from ..policies.h2o.plan import LayerPlans, LayerScores, plan_layers
from ..policies.h2o.scores import sum_by_block, update_ema_scores
from ..policies.plan import CachePlan, PolicyLayerPlan, check_plannable, depends_on_channels, needs_values, plan_layer
from ..policies.policy import Policy
from ..policies.topk import compute_key_norms
from . import registry
from .mnn.packed_reader import PACKED
from .options import ReadOptions
from .sidecars import read_positions_sidecar


def plan_cache(
    source: Source,
    policy: Policy,
    output: str | None = None,
    *,
    token_major: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> CachePlan:
    """Select which tokens a policy would keep in every layer, as after one attention pass over the prompt.

    K is in memory one layer at a time, and not at all if the policy depends on lengths only; V is read where scores
    need it.

    Parameters
    ----------
    token_major
        Whether arrays of unknown axes are ``[token, kv_head, head_dim]``.
    """
    start_time = time.perf_counter()
    check_plannable(policy)
    _require_single_text(source)
    layer_arrays = _collect_layer_arrays(source, token_major)
    key_arrays = [entry for entry in layer_arrays if entry.part == "key"]
    policy.check_layers(key_arrays[-1].layer + 1)
    positions = _read_key_positions(source, key_arrays)
    cache = source.engine_cache
    if depends_on_channels(policy) and cache is not None and cache.altered:
        raise OptionError(
            f"{format_input_prefix(source)}{policy.name} looks at single channels, and {cache.engine} stores others "
            f"here ({', '.join(cache.altered)}): kvmnn decode IN -o DIR/ --invert {','.join(cache.altered)} undoes it"
        )
    value_by_layer = {entry.layer: entry for entry in layer_arrays if entry.part == "value"}
    if needs_values(policy) and len(value_by_layer) < len(key_arrays):
        raise OptionError(f"{format_input_prefix(source)}holds keys only: {policy.name} needs the values, too")
    layers = []
    for key, layer_positions in zip(key_arrays, positions, strict=True):
        nbytes = sum(entry.array.nbytes for entry in layer_arrays if entry.layer == key.layer)
        layers.append(_plan_key_layer(policy, key, value_by_layer.get(key.layer), nbytes, layer_positions))
        if progress:
            progress(key.array.nbytes)
    plan = CachePlan(
        policy=policy,
        layers=tuple(layers),
        seconds=time.perf_counter() - start_time,
        input=" ".join(source.inputs),
        output=output,
    )
    _write_plan(output, plan.to_plan_entries(), force, source.files)
    return plan


def _plan_key_layer(
    policy: Policy, key: LayerArray, value: LayerArray | None, nbytes: int, positions: Positions | None
) -> PolicyLayerPlan:
    heads, tokens, _ = key.geometry

    def compute_norms() -> Floats:
        if not policy.requires_norms:  # a random choice depends only on the number of heads
            return np.zeros((heads, tokens), np.float32)
        return compute_key_norms(_read_rows(key))

    def read_tensors() -> tuple[Elements, Elements | None]:
        return _read_rows(key), _read_rows(value) if value is not None and needs_values(policy) else None

    return plan_layer(policy, key.layer, tokens, nbytes, compute_norms, positions, tensors=read_tensors)


def _read_rows(entry: LayerArray) -> Elements:
    """Read K or V of a layer, ``[kv_head, token, head_dim]``."""
    elements = entry.array.to_numpy().view(dtypes.parse_dtype(entry.array.dtype).numpy_dtype)
    return elements.transpose(1, 0, 2) if entry.token_major else elements


def _collect_layer_arrays(source: Source, token_major: bool) -> list[LayerArray]:
    try:
        layer_arrays = collect_layers(source, token_major=token_major, allow_keys_only=True)
    except AmbiguousAxesError:
        raise
    except MissingOptionError as error:
        raise MissingOptionError(f"{error}; attention and scores are planned without --policy") from None
    if any(entry.part == "value" for entry in layer_arrays):
        check_kv_shapes(layer_arrays, format_input_prefix(source), require_same_head_dim=False)
    return layer_arrays


def _read_key_positions(source: Source, key_arrays: Sequence[LayerArray]) -> list[Positions | None]:
    """Return the true positions of these layers; None if they are unknown."""
    tokens = [key.geometry[1] for key in key_arrays]
    sidecar = read_positions_sidecar(source, tokens, [key.layer for key in key_arrays])
    if sidecar is not None:
        return list(sidecar.positions)
    position_map = read_token_positions(source)
    mapped_positions = [position_map.get(key.layer) for key in key_arrays]
    return [
        positions if positions is not None and positions.shape[-1] == count else None
        for positions, count in zip(mapped_positions, tokens, strict=True)
    ]


def _require_single_text(source: Source) -> None:
    details = source.engine_cache.details if source.engine_cache is not None else {}
    sequences = details.get("sequences", ())
    if len(sequences) > 1 and "sequence" not in details:
        raise MissingOptionError(
            f"{format_input_prefix(source)}holds tokens of {len(sequences)} sequences, and a policy keeps those of one "
            "text: --part sequence=N takes those of one"
        )


_MAX_JSON_BYTES = 256 << 20


def plan_from_file(
    path: str,
    config: H2OConfig | None = None,
    output: str | None = None,
    *,
    options: ReadOptions | None = None,
    input_kind: str | None = None,
    num_tokens: int | None = None,
    threads: int = 1,
    tile: int | None = None,
    batch: int | None = None,
    force: bool = False,
) -> LayerPlans:
    """Plan an eviction for every layer of a file of scores or of attention, as if each layer triggered now."""
    config = config or H2OConfig()
    start_time = time.perf_counter()
    scores = read_scores(
        path,
        config,
        options=options,
        input_kind=input_kind,
        num_tokens=num_tokens,
        threads=threads,
        tile=tile,
        batch=batch,
    )
    plans = plan_layers(scores, config)
    plans = replace(plans, input=path, output=output, seconds=time.perf_counter() - start_time)
    _write_plan(output, plans.to_plan_entries(), force, [path])
    return plans


def _write_plan(output: str | None, entries: object, force: bool, exclude: Sequence[str]) -> None:
    if output is not None:
        with FileOutput(output, force=force, exclude=exclude) as file:
            file.file.write((json.dumps(entries) + "\n").encode())
            file.commit()


def read_scores(
    path: str,
    config: H2OConfig,
    *,
    options: ReadOptions | None = None,
    input_kind: str | None = None,
    num_tokens: int | None = None,
    threads: int = 1,
    tile: int | None = None,
    batch: int | None = None,
) -> list[LayerScores]:
    """Return the block scores of each layer in a file.

    Parameters
    ----------
    input_kind
        ``"scores"``: ``[blocks]``, or ``[layers, blocks]``. ``"attention"``: ``[heads, keys]``, ``[heads, queries,
        keys]`` or ``[layers, heads, queries, keys]``; of a file with an array for each layer ``[batch, heads, queries,
        keys]``. None: scores with one axis, else attention.
    """
    layer_scores: list[LayerScores] = []
    arrays = _read_json_scores(path) if PurePath(path).suffix.lower() == ".json" else _read_float_arrays(path, options)
    for name, array in _select_batch_text(path, arrays, input_kind, batch):
        array_kind = input_kind or ("scores" if array.ndim == 1 else "attention")
        for label, layer_values in _split_array_layers(path, name, array, array_kind):
            if array_kind == "scores":
                kv_len = num_tokens or layer_values.size * config.effective_block_tokens
                layer_scores.append(LayerScores(name=label, kv_len=kv_len, scores=layer_values))
            elif (layer_values < 0).any():
                raise SourceError(
                    f"{path}: {label} has numbers below 0: expected attention, as softmax gives it: K and V are none "
                    "(--policy SPEC plans a cache)"
                )
            else:
                scores = _compute_block_scores(layer_values, config, threads, tile)
                layer_scores.append(LayerScores(name=label, kv_len=layer_values.shape[-1], scores=scores))
    return layer_scores


def _select_batch_text(
    path: str, arrays: list[tuple[str, Floats]], input_kind: str | None, batch: int | None
) -> list[tuple[str, Floats]]:
    """Select the arrays of one text: in arrays of one layer with four axes, the first axis is the batch."""
    if [name for name, _ in arrays] == list(PARTS):  # of a list of two tensors, which K and V often are
        arrays = [(f"layer_{layer}", array) for layer, (_, array) in enumerate(arrays)]
    is_by_layer = len(arrays) > 1 or parse_layer(arrays[0][0]) is not None
    batch_flags = [is_by_layer and array.ndim == 4 and input_kind != "scores" for _, array in arrays]
    if batch is not None and not any(batch_flags):
        raise OptionError(f"{path}: its arrays have no axis for a batch: leave --part batch out")
    selected_arrays = []
    for (name, array), is_batched in zip(arrays, batch_flags, strict=True):
        if not is_batched:
            selected_arrays.append((name, array))
            continue
        num_texts = array.shape[0]
        if batch is None and num_texts != 1:
            raise MissingOptionError(
                f"{path}: {name} has the shape {array.shape}, attention of a batch of {num_texts} texts: --part "
                "batch=N plans one of them, from 0"
            )
        if batch is not None and batch >= num_texts:
            raise OptionError(
                f"{path}: {name} is of a batch of {num_texts}: expected --part batch=0 to {num_texts - 1}"
            )
        selected_arrays.append((name, array[batch or 0]))
    return selected_arrays


_EXPECTED_SHAPES = {
    "scores": "(blocks,) or (layers, blocks)",
    "attention": "(heads, keys), (heads, queries, keys) or (layers, heads, queries, keys)",
}


def _split_array_layers(path: str, name: str, array: Floats, array_kind: str) -> list[tuple[str, Floats]]:
    """Split an array into its layers, each with its name."""
    layer_ndim = 1 if array_kind == "scores" else (2, 3)[array.ndim in (3, 4)]
    if array.ndim not in (layer_ndim, layer_ndim + 1) or not array.size:
        raise SourceError(f"{path}: {name} has the shape {array.shape}: expected {_EXPECTED_SHAPES[array_kind]}")
    return (
        [(name, array)]
        if array.ndim == layer_ndim
        else [(f"{name}[{layer}]", layer_values) for layer, layer_values in enumerate(array)]
    )


def _compute_block_scores(attention: Floats, config: H2OConfig, threads: int, tile: int | None) -> Floats:
    """Compute the score of each block after one update, starting from scores of zero."""
    sums = sum_by_block(attention, config.effective_block_tokens, threads=threads, tile=tile)
    num_rows = attention.shape[0] * (attention.shape[1] if attention.ndim == 3 else 1)
    return update_ema_scores(np.empty(0), sums, count=num_rows, alpha=float(config.effective_alpha))


def _read_float_arrays(path: str, options: ReadOptions | None) -> list[tuple[str, Floats]]:
    options = options or ReadOptions()
    if os.path.isdir(path) and registry.detect(path) is PACKED:
        raise _make_kv_input_error(path)
    engine = replace(options.engine, allow_unknown_heads=True, default_to_first_stream=True)
    source = registry.open(path, replace(options, engine=engine))
    if source.engine_cache is not None or FILE_KEY in source.metadata or any(map(parse_conventional_name, source)):
        raise _make_kv_input_error(path, f" ({source.engine_cache})" if source.engine_cache is not None else "")
    return [(array.name, _to_float32_array(array)) for array in source.arrays]


def _make_kv_input_error(path: str, description: str = "") -> MissingOptionError:
    return MissingOptionError(
        f"{path}: holds K and V{description}: planning needs attention, or scores of blocks, which no cache holds: "
        "--policy SPEC plans a cache by lengths or keys (streaming:budget=512, knorm:keep_ratio=0.5 ...); kvmnn eval "
        "MODEL --text FILE --policy h2o_engine computes attention with a model, and plans with it"
    )


def _to_float32_array(array: LazyArray) -> Floats:
    values = to_float32(np.concatenate([*array.iter_chunks()]), array.dtype)
    shape = array.shape if array.itemsize == array.coded_itemsize else (values.size,)
    return np.ascontiguousarray(values.reshape(shape, order=array.order))


def _read_json_scores(path: str) -> list[tuple[str, Floats]]:
    document = parse_document(read_bounded(Path(path), _MAX_JSON_BYTES), path, _MAX_JSON_BYTES).value
    score_lists = document if isinstance(document, list) and document and isinstance(document[0], list) else [document]
    for index, scores in enumerate(score_lists):
        if not isinstance(scores, list) or not all(type(score) in (int, float) for score in scores):
            raise SourceError(f"{path}: entry {index}: expected a list of scores, which are numbers")
    with np.errstate(over="ignore"):
        try:
            return [
                (f"layer {index}", np.array(scores, np.float64).astype(np.float32))
                for index, scores in enumerate(score_lists)
            ]
        except OverflowError:
            raise SourceError(f"{path}: a score is too large for a float") from None
