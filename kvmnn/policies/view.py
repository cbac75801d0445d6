"""What a policy sees of the tokens that it decides about."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

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
class View:
    """The stored tokens of one layer, or of several layers that store equally many.

    Arrays have a row for each set of tokens that is chosen: for each KV head where heads choose for themselves, else
    for each layer; the rows of one layer come after those of the one before it.

    Parameters
    ----------
    tokens
        How many are stored.
    layer
        Which layer, from 0; of several the first.
    scores
        What attention gave to each token so far: float32 ``[row, token]`` (of one layer also ``[token]``).
    norms
        L2 norms of the keys, float32 ``[row, token]``.
    new
        Tokens of the latest step, or None where steps are not counted.
    seen
        Tokens the model has seen; None for as many as are stored.
    steps
        Decode steps since the tokens were last cut, or None where they are not counted.
    moment
        When the policy is asked.
    """

    tokens: int
    layer: int = 0
    scores: Floats | None = None
    norms: Floats | None = None
    new: int | None = None
    seen: int | None = None
    steps: int | None = None
    moment: Moment = Moment.ATTENDED

    @property
    def has_norms(self) -> bool:
        """Whether `key_norms` has an answer."""
        return self.norms is not None

    @property
    def key_rows(self) -> int:
        """Rows that `key_norms` has."""
        return len(self._norms())

    @property
    def is_prompt(self) -> bool:
        """Whether everything seen came in the latest step, which is how kvpress tells a prompt from decoding."""
        return self.new is None or self.new == (self.tokens if self.seen is None else self.seen)

    def key_norms(self, first: int | None = None) -> Floats:
        """L2 norms of the keys of the `first` tokens (of all of them without it), float32 ``[row, token]``."""
        return self._norms()[:, :first]

    def row_scores(self) -> Floats:
        """The scores as float32 ``[row, token]``, also where one row serves a layer."""
        if self.scores is None:
            raise KvmnnError(f"layer {self.layer}: no scores are known")
        return self.scores if self.scores.ndim == 2 else self.scores[None]

    def at(self, moment: Moment) -> Self:
        """The same at another moment."""
        if moment is self.moment:
            return self
        view = copy(self)
        object.__setattr__(view, "moment", moment)
        return view

    def _norms(self) -> Floats:
        if self.norms is None:
            raise KvmnnError(f"layer {self.layer}: neither keys nor their norms are known")
        return self.norms


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerView(View):
    """One layer, with its keys and values; everything is checked.

    Parameters
    ----------
    keys, values
        ``[kv_head, token, head_dim]``, float16, float32 or uint16 (bf16); None where the policy does not look at them.
    scores
        ``[token]`` for all heads together or ``[kv_head, token]``; any numbers, which become float32.
    norms
        ``[kv_head, token]``, where they are known already; policies then need no keys.

    Raises
    ------
    KvmnnError
        For numbers below 0 and shapes that do not fit `tokens`.
    TypeError
        For values of the wrong type.
    """

    keys: npt.NDArray[Any] | None = None
    values: npt.NDArray[Any] | None = None

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
    def has_norms(self) -> bool:
        return self.norms is not None or self.keys is not None

    @property
    def key_rows(self) -> int:
        return super().key_rows if self.keys is None else int(self.keys.shape[0])

    def key_norms(self, first: int | None = None) -> Floats:
        if self.norms is None and self.keys is not None:
            return key_norms(self.keys[:, :first])
        return super().key_norms(first)


def as_scores(where: str, scores: npt.NDArray[Any], tokens: int) -> Floats:
    """Scores as float32 of one or two axes whose last has the length `tokens`."""
    array = np.asarray(scores)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{where}: scores are {array.dtype}: expected numbers")
    if array.ndim not in (1, 2) or array.shape[-1] != tokens:
        raise KvmnnError(f"{where}: scores have shape {list(array.shape)}: expected [{tokens}] or [kv_head, {tokens}]")
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32, copy=False)
