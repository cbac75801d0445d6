"""The units of one text, and nothing of the texts that share them: what is put in a file for another machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dense import RopeConfig
from ..dtypes import Bytes
from ..frames import CodecOptions
from .behind import HistoryRef
from .dense_encoding import DenseStreamEncoder, DenseUnitPlan, build_dense_info
from .encoding import encode_frame_units
from .lookup import PrefixMatch, TokenSequence, UnitSlice
from .space import Namespace
from .table_sets import TableSets
from .unit import DenseUnitInfo, Unit, UnitFrame, UnitHeader, parse_header


class SequenceExporter:
    """Units that are taken as they are, or, where other texts go on in them, made anew of what is asked for.

    Parameters
    ----------
    namespace, sequence, layers
        The text, with K and V of its tokens.
    tables
        That its units need, by their keys.
    rotary, options, threads
        How units are made.
    """

    def __init__(
        self,
        namespace: Namespace,
        sequence: TokenSequence,
        layers: Sequence[LayerCache],
        tables: Mapping[bytes, TableSets],
        rotary: RopeConfig | None,
        options: CodecOptions,
        threads: int | None,
    ) -> None:
        self._namespace, self._sequence, self._layers, self._tables = namespace, sequence, layers, tables
        self._rotary, self._options, self._threads = rotary, options, threads

    def build_units(
        self, prefix_match: PrefixMatch, data_by_unit: Mapping[int, Bytes]
    ) -> list[tuple[UnitSlice, Bytes]]:
        """The units with the tokens of a text, and which tokens of each are meant."""
        exported_units = []
        begin_token = 0
        for unit_slice in prefix_match.slices:
            data = data_by_unit[unit_slice.unit]
            header = parse_header(data)
            if header.ids.size > unit_slice.skip + unit_slice.take:
                unit_slice, data = unit_slice._replace(skip=0), self._encode_again(begin_token, unit_slice, header)
            exported_units.append((unit_slice, data))
            begin_token += unit_slice.take
        return exported_units

    def _encode_again(self, begin_token: int, unit_slice: UnitSlice, header: UnitHeader) -> Bytes:
        span = begin_token, begin_token + unit_slice.take
        block_tokens = self._sequence.block_tokens
        frames, dense_info = (
            self._encode_frames(span) if header.dense is None else self._encode_streams(span, unit_slice, header.dense)
        )
        parent = self._sequence.get_parent_key(begin_token // block_tokens)
        unit = Unit(
            self._namespace.key, parent, begin_token, self._sequence.ids[begin_token : span[1]], frames, dense_info
        )
        return np.frombuffer(b"".join(bytes(piece) for piece in unit.to_pieces()), np.uint8)

    def _encode_frames(self, span: tuple[int, int]) -> tuple[tuple[UnitFrame, ...], None]:
        encoded_units: list[tuple[UnitFrame, ...]] = []
        encode_frame_units(
            self._layers, [span], self._options, lambda _, frames: encoded_units.append(frames), self._threads
        )
        return encoded_units[0], None

    def _encode_streams(
        self, span: tuple[int, int], unit_slice: UnitSlice, dense: DenseUnitInfo
    ) -> tuple[tuple[UnitFrame, ...], DenseUnitInfo]:
        """As those that it is made of; what is cut at its beginning, too, refers to nothing before it."""
        history = HistoryRef() if unit_slice.skip else HistoryRef(dense.history_rows, 0, dense.chain_length)
        unit = DenseUnitPlan(span, history, self._tables.get(dense.tables_key))
        encoded_units: list[tuple[tuple[UnitFrame, ...], tuple[int, ...]]] = []
        streams = DenseStreamEncoder(self._layers, self._namespace, self._rotary)
        block_tokens = self._sequence.block_tokens
        streams.encode_units(
            [unit], block_tokens, lambda _, frames, sums: encoded_units.append((frames, sums)), self._threads
        )
        frames, sums = encoded_units[0]
        return frames, build_dense_info(unit, sums)
