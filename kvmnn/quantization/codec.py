"""The interface of a lossy codec of a cache, and the entropy-coded size of what it stores.

A codec is made from a spec (`kvmnn.quantization.create_codec`) and bound to a model's cache by `start_text`, which
gives the coder of one text. As the text goes on, the coder is handed rows of K or V of one layer, in the order of the
layers and K before V, and returns what a decoder would read from what it stores, together with that: fields, arrays
with an entry for each row, which the caller keeps next to the rows, and drops with them when tokens are evicted. At the
end `measure` counts the bytes of all fields that are left.

To add a codec: a frozen dataclass derived from `CacheCodec` whose fields are the options of its spec, and an entry in
`kvmnn.quantization.registry.CODECS`. `NumberFormatCodec` in `block_codecs` is short.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from ..dtypes import Floats, Part
from ..errors import FrameError, KvmnnError
from ..frames import _zstdlib

Field = npt.NDArray[Any]
"""What is stored of rows: ``[kv_head, token, ...]``."""


class CacheShape(NamedTuple):
    """The sizes of a model's cache."""

    layers: int
    kv_heads: int
    head_dim: int
    #: Whether the KV heads of a layer may hold different tokens.
    is_per_head: bool = False


class QuantizedRows(NamedTuple):
    """Rows as a decoder reads them, and what is stored of them."""

    #: float32 ``[kv_head, token, head_dim]``.
    rows: Floats
    #: Arrays ``[kv_head, token, ...]``, as many and of the same dtypes at every call.
    fields: tuple[Field, ...]


class FieldSizes(NamedTuple):
    """Bytes of stored rows."""

    #: As the format stores them.
    plain_bytes: int
    #: Entropy-coded without loss, decoded and compared.
    coded_bytes: int

    def __add__(self, other: tuple[int, ...]) -> FieldSizes:  # type: ignore[override]
        return FieldSizes(self.plain_bytes + other[0], self.coded_bytes + other[1])


class TextCoder(ABC):
    """The coder of one text."""

    def count_due(self, part: Part, num_pending: int) -> int:
        """Return how many of the oldest tokens that are not quantised yet are quantised now."""
        return num_pending

    @abstractmethod
    def quantize(
        self, layer: int, part: Part, rows: Floats, positions: npt.NDArray[np.int64], head: int = 0
    ) -> QuantizedRows:
        """Quantise further rows of K or V of a layer.

        Parameters
        ----------
        rows
            float32 ``[kv_head, token, head_dim]``, K as the model rotated them. Heads come one at a time, in order,
            where `CacheShape.is_per_head`.
        positions
            Positions in the text, ``[token]``, ascending.
        head
            Number of the first head of `rows`.
        """

    @abstractmethod
    def measure(self, layer: int, part: Part, fields: Sequence[Field]) -> FieldSizes:
        """Count the bytes of all fields of a layer's K or V that are left, ``[kv_head, token, ...]`` each."""


@dataclass(frozen=True, kw_only=True)
class CacheCodec(ABC):
    """A lossy codec of K and V; its fields are the options of its spec.

    Parameters
    ----------
    recent
        Tokens at the end that are not quantised yet; they are counted as 16 bits for each number.
    when
        ``"always"``: every token is quantised once, as soon as `recent` others follow it, after the step that attended
        it. ``"prompt"``: only tokens of the first step of a text, at its end.
    """

    recent: int = 0
    when: Literal["always", "prompt"] = "always"

    name: ClassVar[str]
    reads_file: ClassVar[bool] = False
    """Whether `start_text` reads a file, which may be missing or of another model."""

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise KvmnnError(f"{self.name}: recent is {self.recent}: expected at least 0")
        if self.when not in ("always", "prompt"):
            raise KvmnnError(f"{self.name}: when is {self.when!r}: expected 'always' or 'prompt'")

    @abstractmethod
    def start_text(self, shape: CacheShape) -> TextCoder:
        """Return a coder for a text; raise `KvmnnError` for caches that the format does not hold."""

    @property
    def spec(self) -> str:
        """The spec of the codec: its name and the options that differ from their defaults."""
        options = [
            f"{entry.name}={getattr(self, entry.name)}"
            for entry in self._list_fields()
            if getattr(self, entry.name) != entry.default
        ]
        return ":".join([self.name, *([",".join(options)] if options else [])])

    def to_options(self) -> dict[str, Any]:
        """Return all options of the spec as JSON values, those at their defaults included."""
        return {entry.name: getattr(self, entry.name) for entry in self._list_fields()}

    def _list_fields(self) -> list[dataclasses.Field[Any]]:
        """List the options of a codec's own before those of all codecs."""
        return sorted(dataclasses.fields(self), key=lambda entry: entry.name in ("recent", "when"))

    @property
    def label(self) -> str:
        """The spec for people: files without their folders."""
        return self.spec


def measure_streams(streams: Sequence[Field]) -> int:
    """Count the bytes of streams, each compressed by zstd and compared with what that decompresses to."""
    total = 0
    for stream in streams:
        data = np.ascontiguousarray(stream).tobytes()
        coded = _zstdlib.compress(data, _ZSTD_LEVEL)
        if _zstdlib.decompress(coded, len(data)) != data:
            raise FrameError("a stream of quantised rows does not decompress to itself")
        total += min(len(coded), len(data))
    return total


_ZSTD_LEVEL = 3


def split_bytes(words: Field) -> list[Field]:
    """Split words of 16 bits into their low and their high bytes, which compress better apart."""
    halves = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 2)
    return [halves[:, 0], halves[:, 1]]
