"""What a policy sees of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks import check_count
from ..dtypes import Floats
from ..errors import KvmnnError
from .ranking import key_norms


class Moment(Enum):
    """When a policy is asked: tokens have been appended, they have been attended, or a chunk of text has ended."""

    APPENDED = "appended"
    ATTENDED = "attended"
    CHUNK_END = "chunk end"


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerView:
    """One layer as a policy sees it.

    Parameters
    ----------
    tokens
        How many are stored.
    layer
        Which layer, from 0.
    keys, values
        ``[kv_head, token, head_dim]``, float16, float32 or uint16 (bf16); None where the policy does not look at them.
    scores
        Accumulated attention: ``[token]`` for all heads together or ``[kv_head, token]``.
    norms
        L2 norms of the keys, ``[kv_head, token]``, where they are known already; policies then need no keys.
    new
        Tokens of the latest step, or None where nobody counts steps.
    seen
        Tokens the model has seen; None for as many as are stored.
    steps
        Decode steps since the layer was last cut, or None where nobody counts them.

    Raises
    ------
    KvmnnError
        For numbers below 0 and shapes that do not fit `tokens`.
    TypeError
        For values of the wrong type.
    """

    tokens: int
    layer: int = 0
    keys: npt.NDArray[Any] | None = None
    values: npt.NDArray[Any] | None = None
    scores: Floats | None = None
    norms: Floats | None = None
    new: int | None = None
    seen: int | None = None
    steps: int | None = None

    @classmethod
    def trusted(cls, **fields: Any) -> LayerView:
        """A view of fields that fit, unchecked; those left out are as in the constructor."""
        view = object.__new__(cls)
        view.__dict__.update(fields)
        return view

    def __post_init__(self) -> None:
        where = f"layer {self.layer}"
        for name in ("tokens", "layer", "new", "seen", "steps"):
            number = getattr(self, name)
            if number is not None:
                check_count(f"{where}: {name}", number)
        for name in ("keys", "values"):
            array = getattr(self, name)
            if array is not None and not isinstance(array, np.ndarray):
                raise TypeError(f"{where}: {name} must be a numpy array, not {type(array).__name__}")
            if array is not None and (array.ndim != 3 or array.shape[1] != self.tokens):
                raise KvmnnError(
                    f"{where}: {name} have shape {list(array.shape)}: expected [kv_head, {self.tokens}, head_dim]"
                )
        if self.scores is not None:
            object.__setattr__(self, "scores", as_scores(where, self.scores, self.tokens))
        if self.norms is not None and (self.norms.ndim != 2 or self.norms.shape[1] != self.tokens):
            raise KvmnnError(f"{where}: norms have shape {list(self.norms.shape)}: expected [kv_head, {self.tokens}]")

    @property
    def kv_heads(self) -> int:
        """Heads of the keys, or of their norms."""
        known = self.norms if self.norms is not None else self.keys
        if known is None:
            raise KvmnnError(f"layer {self.layer}: neither keys nor their norms are known")
        return int(known.shape[0])

    def key_norms(self, first: int | None = None) -> Floats:
        """L2 norms of the keys of the `first` tokens (of all of them without it), float32 ``[kv_head, token]``."""
        if self.norms is not None:
            return self.norms[:, :first]
        if self.keys is None:
            raise KvmnnError(f"layer {self.layer}: neither keys nor their norms are known")
        return key_norms(self.keys[:, :first])

    @property
    def is_prompt(self) -> bool:
        """Whether everything seen came in the latest step, which is how kvpress tells a prompt from decoding."""
        return self.new is None or self.new == (self.tokens if self.seen is None else self.seen)


def as_scores(where: str, scores: npt.NDArray[Any], tokens: int) -> Floats:
    """Scores as float32 of one or two axes whose last has the length `tokens`."""
    array = np.asarray(scores)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{where}: scores are {array.dtype}: expected numbers")
    if array.ndim not in (1, 2) or array.shape[-1] != tokens:
        raise KvmnnError(f"{where}: scores have shape {list(array.shape)}: expected [{tokens}] or [kv_head, {tokens}]")
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32, copy=False)
