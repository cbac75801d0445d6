"""Storage of K and V as a lossy codec leaves them: the arrays of the model, with numbers that a decoder would read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .._util.dataclass import dataclass
from ..dtypes import PARTS, Elements, Floats, Indices, KVPair, Part, Positions
from ..quantization import CacheCodec, CacheShape
from ..quantization.codec import Field
from .kv_store import PlainStore
from .onnx.interface import DecoderInterface


@dataclass(frozen=True, eq=False)
class QuantizedPartSizes:
    """K or V of one layer: numbers that are quantised and their bytes, and rows that are not quantised yet."""

    num_elements: int
    plain_bytes: int
    coded_bytes: int
    #: ``[row, head_dim]``, of all heads.
    pending_rows: Elements


class _PartTable:
    """What the codec stores of K or V of a layer, by slot; the first slots of each head are quantised."""

    def __init__(self, heads: int) -> None:
        self.num_quantized: Indices = np.zeros(heads, np.int64)
        self._fields: list[Field] = []

    def put(self, heads: slice, begin: int, fields: Sequence[Field]) -> None:
        """Store the fields of slots from `begin` on of some heads."""
        num_heads, end = len(self.num_quantized), begin + fields[0].shape[1]
        if not self._fields:
            self._fields = [np.zeros((num_heads, 0, *entry.shape[2:]), entry.dtype) for entry in fields]
        for number, entry in enumerate(fields):
            table = self._fields[number]
            if table.shape[1] < end:
                grown_table = np.zeros((num_heads, max(end, 2 * table.shape[1]), *table.shape[2:]), table.dtype)
                grown_table[:, : table.shape[1]] = table
                self._fields[number] = table = grown_table
            table[heads, begin:end] = entry
        self.num_quantized[heads] = end

    def compact(self, slots: Indices, num_live: int) -> None:
        """Keep the first `num_live` slots of each row of `slots`, ascending."""
        rows = np.broadcast_to(slots[:, :num_live], (len(self.num_quantized), num_live))
        num_left = np.count_nonzero(rows < self.num_quantized[:, None], axis=1)
        for table in self._fields:
            for head, count in enumerate(num_left):
                table[head, :count] = table[head, rows[head, :count]]
        self.num_quantized = num_left.astype(np.int64)

    def iter_groups(self, *, splits_heads: bool = False) -> Iterator[tuple[slice, int]]:
        """Yield heads that have equally many quantised slots, together where all have, and their number."""
        counts = self.num_quantized
        if not splits_heads and (counts == counts[0]).all():
            yield slice(0, len(counts)), int(counts[0])
        else:
            yield from ((slice(head, head + 1), int(count)) for head, count in enumerate(counts))

    def get_fields(self, heads: slice, count: int) -> list[Field]:
        """Return the fields of the quantised slots of some heads."""
        return [table[heads, :count] for table in self._fields]


class QuantizedStore(PlainStore):
    """Stores the arrays of the model; tokens are replaced by what the codec makes of them, once."""

    def __init__(
        self, empty_pairs: Sequence[KVPair], interface: DecoderInterface, codec: CacheCodec, *, is_per_head: bool
    ) -> None:
        super().__init__(empty_pairs)
        self._codec, self._is_per_head = codec, is_per_head
        shape = CacheShape(interface.layers, interface.kv_heads, interface.head_dim, is_per_head)
        self._coder = codec.start_text(shape)
        self._tables = [[_PartTable(interface.kv_heads) for _ in PARTS] for _ in range(interface.layers)]
        self._has_quantized_prompt = False
        #: Whether any token was quantised so far.
        self.has_quantized = False

    def quantize_due(self, get_positions: Callable[[int], Positions]) -> None:
        """Quantise the tokens whose time has come; `get_positions` returns the positions of a layer's tokens."""
        if self._codec.when == "prompt" and self._has_quantized_prompt:
            return
        self._has_quantized_prompt = True
        for layer, tables in enumerate(self._tables):
            positions: Positions | None = None
            for number, part in enumerate(PARTS):
                for heads, begin in list(tables[number].iter_groups(splits_heads=self._is_per_head)):
                    count = self._coder.count_due(part, self._pairs[layer][0].shape[2] - begin)
                    if count < 1:
                        continue
                    positions = get_positions(layer) if positions is None else positions
                    token_positions = positions[heads.start] if positions.ndim == 2 else positions
                    self._quantize(layer, part, heads, slice(begin, begin + count), token_positions)

    def _quantize(self, layer: int, part: Part, heads: slice, tokens: slice, positions: Positions) -> None:
        number = PARTS.index(part)
        elements = self._pairs[layer][number]
        if not elements.flags.writeable:
            elements = elements.copy()
            pair = self._pairs[layer]
            self._pairs[layer] = (elements, pair[1]) if number == 0 else (pair[0], elements)
        rows: Floats = np.ascontiguousarray(elements[0, heads, tokens], np.float32)
        quantized = self._coder.quantize(layer, part, rows, positions[tokens], heads.start)
        elements[0, heads, tokens] = quantized.rows
        self.has_quantized = True
        self._tables[layer][number].put(heads, tokens.start, quantized.fields)

    def compact(self, layer: int, slots: Indices, num_live: int) -> None:
        super().compact(layer, slots, num_live)
        for table in self._tables[layer]:
            table.compact(slots, num_live)

    def measure_sizes(self, first_slots: Sequence[Indices]) -> Iterator[QuantizedPartSizes]:
        """Measure what is stored of K and V of every layer.

        Parameters
        ----------
        first_slots
            Slots before these are not counted, of each layer: ``[1]``, or ``[kv_head]``.
        """
        for layer, tables in enumerate(self._tables):
            begins = np.broadcast_to(first_slots[layer], len(tables[0].num_quantized))
            splits_heads = bool((begins != begins[0]).any())
            for number, part in enumerate(PARTS):
                elements, plain_bytes, coded_bytes, num_elements = self._pairs[layer][number][0], 0, 0, 0
                pending = []
                for heads, count in tables[number].iter_groups(splits_heads=splits_heads):
                    begin = int(begins[heads.start])
                    pending.append(elements[heads, max(count, begin) :].reshape(-1, elements.shape[2]))
                    if count > begin:
                        fields = [entry[:, begin:] for entry in tables[number].get_fields(heads, count)]
                        sizes = self._coder.measure(layer, part, fields)
                        plain_bytes, coded_bytes = plain_bytes + sizes.plain_bytes, coded_bytes + sizes.coded_bytes
                        num_elements += elements[heads, begin:count].size
                yield QuantizedPartSizes(num_elements, plain_bytes, coded_bytes, np.concatenate(pending))
