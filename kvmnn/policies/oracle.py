"""The reference that other policies cannot reach: it has seen the attention of the tokens that are still to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np

from .._util.dataclass import dataclass
from ..dtypes import Floats
from ..errors import KvmnnError
from .policy import LayerState
from .scored import ScoredPolicy


@dataclass(frozen=True, kw_only=True)
class Oracle(ScoredPolicy):
    """Keep the tokens of each KV head that all later tokens of the text will attend to most.

    Paper: the upper bound of many, arXiv 2306.14048 (H2O) among them. Original: kvmnn's own.

    Parameters
    ----------
    budget, keep_ratio, phase, interval, wrapper
        As of `ScoredPolicy`.

    Attributes
    ----------
    later_attention : dict
        By the number of tokens seen at a cut: for each layer the attention that later tokens of the text pay with the
        full cache, summed over them and over the query heads of a group, float32 ``[kv_head, token]``. `kvmnn eval`
        fills it in a first run (`kvmnn.evaluation.oracle`).

    Notes
    -----
    Where it differs from an optimum: attention decides, not the loss, and it is that of the full cache; so a policy can
    exceed it.
    """

    name = "oracle"

    later_attention: dict[int, Sequence[Floats]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def compute_scores(self, layer: LayerState) -> Floats:
        num_seen = layer.tokens if layer.num_seen is None else layer.num_seen
        if num_seen not in self.later_attention:
            raise KvmnnError(f"{self.name} knows what follows in texts that kvmnn eval scores, and nothing else")
        scores = self.later_attention[num_seen][layer.layer]
        positions = np.arange(layer.tokens) if layer.positions is None else layer.positions
        return np.take_along_axis(scores, np.broadcast_to(positions, (len(scores), layer.tokens)), axis=1)
