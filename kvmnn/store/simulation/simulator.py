"""A prefix store without contents: which tokens of a trace are found, within a limit and with a policy of eviction.

It repeats what a directory does: units of up to 512 tokens of one put, found by keys of blocks and to the symbol in the
block where two texts part; ends of texts are evicted before their beginnings; a use sets all units of a prefix to one
tick. `tests/store/test_simulation.py` compares it with real stores.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..._util.named_tuple import NamedTuple
from ..backend import STORE_POLICIES, compute_benefit
from ._kernel import POLICY_NUMBERS, SimulatedStore, find_next_uses
from .trace import BlockTrace

SIMULATED_POLICIES = (*STORE_POLICIES, "belady")
"""Those of real stores, and next use farthest away, which only a trace can know."""


class SimulationCounts(NamedTuple):
    """Result of a simulation."""

    #: Tokens that were found for each request.
    hits: npt.NDArray[np.int64]
    #: Bytes that were put and evicted, and units that were evicted.
    put_bytes: int
    evicted_bytes: int
    evicted_units: int
    #: Bytes at the end.
    stored_bytes: int


def simulate_store(
    blocks: BlockTrace,
    *,
    max_bytes: int | None,
    policy: str,
    unit_blocks: int,
    compute_unit_bytes: Callable[[int], int],
) -> SimulationCounts:
    """Run the requests of a trace through one store: a get, and a put of what was not found.

    Parameters
    ----------
    blocks
        The trace.
    max_bytes
        Limit on the bytes of all units; None for no limit.
    policy
        One of `SIMULATED_POLICIES`.
    unit_blocks
        Maximum number of whole blocks in a unit.
    compute_unit_bytes
        Returns the bytes of a unit by its tokens.
    """
    max_unit_tokens = (unit_blocks + bool(blocks.chunks)) * blocks.block_tokens
    unit_bytes = [0, *map(compute_unit_bytes, range(1, max_unit_tokens + 1))]
    store = SimulatedStore(
        blocks.keys,
        blocks.begins,
        blocks.trace.named_tokens,
        blocks.chunks,
        find_next_uses(blocks.keys, blocks.begins, blocks.num_keys) if policy == "belady" else np.empty(0, np.int64),
        np.array(unit_bytes, np.int64),
        np.array([compute_benefit(tokens, nbytes) for tokens, nbytes in enumerate(unit_bytes)], np.int64),
        num_keys=blocks.num_keys,
        block_tokens=blocks.block_tokens,
        symbol_tokens=blocks.trace.symbol_tokens,
        unit_blocks=unit_blocks,
        max_bytes=-1 if max_bytes is None else max_bytes,
        policy=POLICY_NUMBERS[policy],
    )
    hits = store.run()
    return SimulationCounts(hits, store.put_bytes, store.evicted_bytes, store.evicted_units, store.total_bytes)
