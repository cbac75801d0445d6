"""Stored prefixes of a model: a text starts with the longest stored prefix, and is stored when it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import dtypes
from ..errors import KvmnnError
from ..files.schema import Record
from ..store import PrefixStore, PutResult, StoredPrefix
from .runner import Runner


@dataclass(frozen=True, kw_only=True)
class StoreUseStats(Record):
    """What a store did for one text."""

    #: Tokens of the prompt that were not computed.
    tokens: int
    #: Finding, reading, decoding and handing over their K and V; part of the time to the first token.
    get_seconds: float
    #: What became of the text that was put afterwards; None before.
    put: PutResult | None = None
    #: What was wrong in the store, in sentences.
    notes: tuple[str, ...] = ()


class StoredPrefixes:
    """Stored prefixes of one model, whose fingerprint is `model` (`kvmnn.lm.compute_fingerprint`).

    Examples
    --------
    ::

        with PrefixStore("prefixes/") as store:
            prefixes = StoredPrefixes(store, compute_fingerprint("pythia/"))
            prefix = prefixes.begin_text(runner, ids)
            logits = runner.step(ids[prefix.tokens :])
            prefixes.put_text(runner, ids)
    """

    def __init__(self, store: PrefixStore, model: str) -> None:
        self._store = store
        self._model = model

    def begin_text(self, runner: Runner, ids: Sequence[int]) -> StoredPrefix:
        """Reset a runner and load the longest stored prefix of a text; its last token remains to be fed.

        Raises
        ------
        KvmnnError
            If the policy of the runner evicts, or K and V are not those of its model.
        """
        runner.reset()
        if len(ids) < 2:
            return StoredPrefix(tokens=0, requested_tokens=0)
        dtype = dtypes.infer_dtype(np.empty(0, runner.session.interface.dtype)).name
        prefix = self._store.get(ids[:-1], model=self._model, dtype=dtype)
        if prefix.tokens:
            runner.load_initial(prefix.layers)
        return prefix

    def put_text(self, runner: Runner, ids: Sequence[int]) -> PutResult:
        """Store K and V of all tokens that a runner has been fed, `ids`.

        A store that cannot be written does not stop the text: `PutResult.notes` explains why nothing was stored.
        """
        layers = runner.cache.copy_layers()
        try:
            return self._store.put(ids, layers, model=self._model)
        except KvmnnError as error:
            return PutResult(tokens=len(ids), known_tokens=0, notes=(str(error),))
