"""K and V of one layer; a cache is a sequence of them."""

from __future__ import annotations

import numpy as np

from .. import dtypes
from .._util.dataclass import dataclass
from .._util.validation import format_fields
from ..dtypes import Elements, Positions
from ..errors import ArrayTypeError, KvmnnError


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerCache:
    """K and V of one layer, and the text positions of their tokens.

    Parameters
    ----------
    layer
        Number of the layer in the model, from 0.
    keys, values
        ``[kv_head, token, head_dim]``, of one type: float16, float32, or uint16 for bf16. V may have another head_dim
        than K, or 0 (latent attention), which the prefix store accepts, and models in ONNX do not.
    positions
        True position of each stored token, ``[token]``, or ``[kv_head, token]`` where heads keep different ones; by
        default 0, 1, 2 ...
    ends
        Like `positions`: the true position after the last token that a stored one stands for. By default every stored
        token stands for one.
    tokens_seen
        Tokens the model has seen, stored or not: the true position of the next one. By default the highest of `ends`.

    Raises
    ------
    KvmnnError
        For shapes that do not agree, positions below 0, or spans that are empty or reach beyond `tokens_seen`.
    ArrayTypeError
        For arrays that are not float16, float32 or uint16: a `KvmnnError` and a `TypeError`.
    """

    __repr__ = format_fields

    layer: int
    keys: Elements
    values: Elements
    positions: Positions = None  # type: ignore[assignment]  # filled in below
    ends: Positions = None  # type: ignore[assignment]
    tokens_seen: int = -1

    def __post_init__(self) -> None:
        where = f"layer {self.layer}"
        if self.layer < 0:
            raise KvmnnError(f"{where}: layers count from 0")
        check_kv_pair(where, self.keys, self.values, num_axes=3, require_same_head_dim=False)
        positions = (
            np.arange(self.tokens, dtype=np.int64) if self.positions is None else _to_int64(where, self.positions)
        )
        ends = positions + 1 if self.ends is None else _to_int64(where, self.ends)
        if positions.shape not in ((self.tokens,), (self.kv_heads, self.tokens)) or ends.shape != positions.shape:
            raise KvmnnError(
                f"{where}: positions {list(positions.shape)} and ends {list(ends.shape)} do not fit "
                f"{self.kv_heads} heads of {self.tokens} tokens"
            )
        is_sequential = all(array is None for array in (self.positions, self.ends))  # 0, 1, 2 ...: as they should be
        end = self.tokens if is_sequential else int(ends.max(initial=0))
        num_seen = end if self.tokens_seen == -1 else self.tokens_seen
        if end > num_seen or (not is_sequential and ((positions < 0).any() or (ends <= positions).any())):
            raise KvmnnError(
                f"{where}: positions must not be below 0, ends must lie after them and within the {num_seen} tokens "
                f"seen"
            )
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "ends", ends)
        object.__setattr__(self, "tokens_seen", num_seen)

    @property
    def dtype(self) -> str:
        """Return ``"fp16"``, ``"bf16"`` or ``"fp32"``."""
        return dtypes.infer_dtype(self.keys).name

    @property
    def kv_heads(self) -> int:
        """Return the number of stored heads."""
        return int(self.keys.shape[0])

    @property
    def tokens(self) -> int:
        """Return the number of stored tokens: the cache slot of the next one."""
        return int(self.keys.shape[1])

    @property
    def head_dim(self) -> int:
        """Return the number of elements of K of a token in one head."""
        return int(self.keys.shape[2])

    @property
    def value_dim(self) -> int:
        """Return the number of elements of V of a token in one head."""
        return int(self.values.shape[2])

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of K and V."""
        return self.keys.nbytes + self.values.nbytes


def check_kv_pair(
    where: str, keys: Elements, values: Elements, *, num_axes: int, require_same_head_dim: bool = True
) -> None:
    """Raise an error if types, axes or shapes of K and V differ; `require_same_head_dim` includes the head_dim."""
    for name, array in (("keys", keys), ("values", values)):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{where}: {name} must be a numpy array, not {type(array).__name__}")
        try:
            dtypes.infer_dtype(array)
        except ArrayTypeError:
            expectation = "expected float16, float32, or uint16 for bf16"
            raise ArrayTypeError(f"{where}: {name} are {array.dtype}: {expectation}") from None
        if array.ndim != num_axes:
            raise KvmnnError(f"{where}: {name} have shape {list(array.shape)}: expected {num_axes} axes")
    if keys.shape != values.shape and (require_same_head_dim or keys.shape[:-1] != values.shape[:-1]):
        expectation = "the same for both" if require_same_head_dim else "the same heads and tokens for both"
        raise KvmnnError(
            f"{where}: keys have shape {list(keys.shape)}, values {list(values.shape)}: expected {expectation}"
        )
    if keys.dtype != values.dtype:
        raise KvmnnError(f"{where}: keys are {keys.dtype}, values {values.dtype}: expected the same for both")
    for array in (keys, values) if require_same_head_dim else (keys,):
        if array.shape[-1] == 0 or array.shape[-3] == 0:
            raise KvmnnError(f"{where}: shape {list(array.shape)} has no heads or no head_dim")


def _to_int64(where: str, array: Positions) -> Positions:
    array = np.asarray(array)
    if array.dtype.kind not in "iu":
        raise KvmnnError(f"{where}: positions are {array.dtype}: expected integers")
    return array.astype(np.int64)
