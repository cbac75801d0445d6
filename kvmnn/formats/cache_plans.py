"""Plans of a cache by a policy: any K and V that kvmnn reads in, the document of ``kvmnn plan`` out."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import numpy as np

from .. import dtypes
from ..arrays.held_tokens import held_tokens
from ..arrays.layers import AxesError, LayerArray, check_pairs, place_said, sorted_layers
from ..arrays.source import Source
from ..dtypes import Floats, Positions
from ..errors import MissingOptionError
from ..files.output import FileOutput
from ..policies.base import Policy
from ..policies.cache_plan import CachePlan, LayerKept, check_plannable, plan_layer
from ..policies.ranking import key_norms
from ..threads.pipeline import Progress
from .noted_positions import noted_positions


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
    started = time.perf_counter()
    check_plannable(policy)
    _check_one_text(source)
    arrays = _sorted(source, token_major)
    keys = [entry for entry in arrays if entry.part == "key"]
    policy.check_layers(keys[-1].layer + 1)
    positions = _positions(source, keys)
    layers = []
    for key, places in zip(keys, positions, strict=True):
        nbytes = sum(entry.array.nbytes for entry in arrays if entry.layer == key.layer)
        layers.append(_planned(policy, key, nbytes, places))
        if progress:
            progress(key.array.nbytes)
    plan = CachePlan(
        policy=policy,
        layers=tuple(layers),
        seconds=time.perf_counter() - started,
        input=" ".join(source.inputs),
        output=output,
    )
    if output is not None:
        with FileOutput(output, force=force, protect=source.files) as file:
            file.file.write((json.dumps(plan.entries()) + "\n").encode())
            file.commit()
    return plan


def _planned(policy: Policy, key: LayerArray, nbytes: int, places: Positions | None) -> LayerKept:
    heads, tokens, _ = key.geometry

    def norms() -> Floats:
        if not policy.needs_norms:  # a random choice: how many heads there are is all that is asked
            return np.zeros((heads, tokens), np.float32)
        words = key.array.to_numpy().view(dtypes.by_name(key.array.dtype).numpy)
        return key_norms(words.transpose(1, 0, 2) if key.token_major else words)

    return plan_layer(policy, key.layer, tokens, nbytes, norms, places)


def _sorted(source: Source, token_major: bool) -> list[LayerArray]:
    try:
        arrays = sorted_layers(source, token_major=token_major, keys_alone=True)
    except AxesError:
        raise
    except MissingOptionError as error:
        raise MissingOptionError(f"{error}; attention and scores are planned without --policy") from None
    if any(entry.part == "value" for entry in arrays):
        check_pairs(arrays, place_said(source), one_size=False)
    return arrays


def _positions(source: Source, keys: Sequence[LayerArray]) -> list[Positions | None]:
    """True positions of these layers; None where nothing says them."""
    tokens = [key.geometry[1] for key in keys]
    noted = noted_positions(source, tokens, [key.layer for key in keys])
    if noted is not None:
        return list(noted.positions)
    held = held_tokens(source)
    said = [held.get(key.layer) for key in keys]
    return [
        places if places is not None and places.shape[-1] == count else None
        for places, count in zip(said, tokens, strict=True)
    ]


def _check_one_text(source: Source) -> None:
    details = source.engine_cache.details if source.engine_cache is not None else {}
    several = details.get("sequences", ())
    if len(several) > 1 and "sequence" not in details:
        raise MissingOptionError(
            f"{place_said(source)}holds tokens of {len(several)} sequences, and a policy keeps those of one text: "
            "--sequence N takes those of one"
        )
