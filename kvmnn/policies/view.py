"""What a policy sees of the tokens that it decides about."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..checks import validate_count
from ..dtypes import Floats
from ..errors import KvmnnError
from .ranking import compute_key_norms


class Trigger(Enum):
    """When a policy is asked: tokens have been appended, they have been attended, or a chunk of text has ended."""

    AFTER_APPEND = "appended"
    AFTER_ATTENTION = "attended"
    CHUNK_END = "chunk end"


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyInput:
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
    num_new
        Tokens of the latest step, or None where steps are not counted.
    num_seen
        Tokens the model has seen; None for as many as are stored.
    num_steps
        Decode steps since the tokens were last cut, or None where they are not counted.
    trigger
        When the policy is asked.
    """

    tokens: int
    layer: int = 0
    scores: Floats | None = None
    norms: Floats | None = None
    num_new: int | None = None
    num_seen: int | None = None
    num_steps: int | None = None
    trigger: Trigger = Trigger.AFTER_ATTENTION

    @property
    def has_norms(self) -> bool:
        """Whether `get_key_norms` has an answer."""
        return self.norms is not None

    @property
    def num_key_rows(self) -> int:
        """Rows that `get_key_norms` has."""
        return len(self._require_norms())

    @property
    def is_prompt(self) -> bool:
        """Whether everything seen came in the latest step, which is how kvpress tells a prompt from decoding."""
        return self.num_new is None or self.num_new == (self.tokens if self.num_seen is None else self.num_seen)

    def get_key_norms(self, num_tokens: int | None = None) -> Floats:
        """L2 norms of the keys of the `num_tokens` tokens (of all of them without it), float32 ``[row, token]``."""
        return self._require_norms()[:, :num_tokens]

    def get_row_scores(self) -> Floats:
        """The scores as float32 ``[row, token]``, also where one row serves a layer."""
        if self.scores is None:
            raise KvmnnError(f"layer {self.layer}: no scores are known")
        return self.scores if self.scores.ndim == 2 else self.scores[None]

    def with_trigger(self, trigger: Trigger) -> Self:
        """The same at another moment."""
        if trigger is self.trigger:
            return self
        copied_input = copy(self)
        object.__setattr__(copied_input, "trigger", trigger)
        return copied_input

    def _require_norms(self) -> Floats:
        if self.norms is None:
            raise KvmnnError(f"layer {self.layer}: neither keys nor their norms are known")
        return self.norms


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerState(PolicyInput):
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
        location = f"layer {self.layer}"
        for name in ("tokens", "layer", "num_new", "num_seen", "num_steps"):
            number = getattr(self, name)
            if number is not None:
                validate_count(f"{location}: {name}", number)
        for name in ("keys", "values"):
            array = getattr(self, name)
            if array is not None and not isinstance(array, np.ndarray):
                raise TypeError(f"{location}: {name} must be a numpy array, not {type(array).__name__}")
            if array is not None and (array.ndim != 3 or array.shape[1] != self.tokens):
                raise KvmnnError(
                    f"{location}: {name} have shape {list(array.shape)}: expected [kv_head, {self.tokens}, head_dim]"
                )
        if self.scores is not None:
            object.__setattr__(self, "scores", to_scores(location, self.scores, self.tokens))
        if self.norms is not None and (self.norms.ndim != 2 or self.norms.shape[1] != self.tokens):
            raise KvmnnError(
                f"{location}: norms have shape {list(self.norms.shape)}: expected [kv_head, {self.tokens}]"
            )

    @property
    def has_norms(self) -> bool:
        return self.norms is not None or self.keys is not None

    @property
    def num_key_rows(self) -> int:
        return super().num_key_rows if self.keys is None else int(self.keys.shape[0])

    def get_key_norms(self, num_tokens: int | None = None) -> Floats:
        if self.norms is None and self.keys is not None:
            return compute_key_norms(self.keys[:, :num_tokens])
        return super().get_key_norms(num_tokens)


def to_scores(location: str, scores: npt.NDArray[Any], tokens: int) -> Floats:
    """Scores as float32 of one or two axes whose last has the length `tokens`."""
    array = np.asarray(scores)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{location}: scores are {array.dtype}: expected numbers")
    if array.ndim not in (1, 2) or array.shape[-1] != tokens:
        raise KvmnnError(
            f"{location}: scores have shape {list(array.shape)}: expected [{tokens}] or [kv_head, {tokens}]"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32, copy=False)
