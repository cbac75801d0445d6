"""Plans of a cache by a policy: any K and V that kvmnn reads in, the document of ``kvmnn plan`` out."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import numpy as np

from .. import dtypes
from ..arrays.held_tokens import read_token_positions
from ..arrays.layers import AmbiguousAxesError, LayerArray, check_kv_shapes, collect_layers, format_input_prefix
from ..arrays.source import Source
from ..dtypes import Floats, Positions
from ..errors import MissingOptionError
from ..files.output import FileOutput
from ..policies.base import Policy
from ..policies.cache_plan import CachePlan, PolicyLayerPlan, check_plannable, plan_layer
from ..policies.ranking import compute_key_norms
from ..threads.pipeline import Progress
from .noted_positions import read_positions_sidecar


def plan_cache(
    source: Source,
    policy: Policy,
    output: str | None = None,
    *,
    token_major: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> CachePlan:
    """What a policy would keep of every layer, seen as a prompt that was attended once. Nothing is changed.

    Of K one layer at a time is in memory, and none where the policy looks at lengths only; V is never read.

    Parameters
    ----------
    source
        K and V of layers (`kvmnn.open`).
    policy
        One that needs no attention.
    output
        A JSON file to write, for `kvmnn compact --plan`.
    token_major
        Whether arrays are ``[token, kv_head, head_dim]``, where nothing says so.
    force
        Replace the output where it exists.
    progress
        Called with bytes of K.

    Raises
    ------
    OptionError
        For a policy that needs attention, and layers to skip that are not there.
    SourceError, KvmnnError
        For arrays that are not K and V of layers, and tokens of several texts.
    """
    start_time = time.perf_counter()
    check_plannable(policy)
    _require_single_text(source)
    layer_arrays = _collect_layer_arrays(source, token_major)
    key_arrays = [entry for entry in layer_arrays if entry.part == "key"]
    policy.check_layers(key_arrays[-1].layer + 1)
    positions = _read_key_positions(source, key_arrays)
    layers = []
    for key, layer_positions in zip(key_arrays, positions, strict=True):
        nbytes = sum(entry.array.nbytes for entry in layer_arrays if entry.layer == key.layer)
        layers.append(_plan_key_layer(policy, key, nbytes, layer_positions))
        if progress:
            progress(key.array.nbytes)
    plan = CachePlan(
        policy=policy,
        layers=tuple(layers),
        seconds=time.perf_counter() - start_time,
        input=" ".join(source.inputs),
        output=output,
    )
    if output is not None:
        with FileOutput(output, force=force, exclude=source.files) as file:
            file.file.write((json.dumps(plan.to_plan_entries()) + "\n").encode())
            file.commit()
    return plan


def _plan_key_layer(policy: Policy, key: LayerArray, nbytes: int, positions: Positions | None) -> PolicyLayerPlan:
    heads, tokens, _ = key.geometry

    def compute_norms() -> Floats:
        if not policy.requires_norms:  # a random choice: how many heads there are is all that is asked
            return np.zeros((heads, tokens), np.float32)
        elements = key.array.to_numpy().view(dtypes.parse_dtype(key.array.dtype).numpy_dtype)
        return compute_key_norms(elements.transpose(1, 0, 2) if key.token_major else elements)

    return plan_layer(policy, key.layer, tokens, nbytes, compute_norms, positions)


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
    """True positions of these layers; None where nothing says them."""
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
            f"text: "
            "--sequence N takes those of one"
        )
