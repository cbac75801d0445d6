"""Storing a sequence: encoding as units of frames or dense streams, and adding them to the backend.

The streams of a dense unit refer to rows before it (its history), which belong to units that are stored or about to be.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .._util.named_tuple import NamedTuple
from .._util.parallel import parallel_map, resolve_threads
from ..arrays.layer_cache import LayerCache
from ..dense import RopeConfig
from ..dense.header import MAX_RAW_BYTES, MAX_ROW_ELEMENTS, METHOD_FRAME, read_checksum, read_method
from ..dtypes import Elements
from ..errors import OptionError
from ..frames import CodecOptions
from ..frames.buffers import checksum_blocks, integrity_checksum
from .backend import AddResult, NewUnit, PrefixMatch, StoreBackend, UnitSlice
from .namespace import Namespace, TokenSequence, list_parts
from .unit import (
    MAX_CHAIN_UNITS,
    MAX_HISTORY_ROWS,
    MIN_TABLE_TOKENS,
    DamagedUnitError,
    DenseUnitInfo,
    LayerUnitInfo,
    ReadyUnits,
    TableSets,
    TokenSpan,
    Unit,
    UnitFrame,
    UnitHeader,
    build_table_sets,
    parse_header,
    select_rotary,
)
from .unit_codec import (
    ThreadScratch,
    count_blocks_per_unit,
    encode_frame_units,
    plan_unit_spans,
    view_token_bytes,
)

if TYPE_CHECKING:  # the encoders are imported by the functions that use them: reading does without
    from ..dense.encoder import ReferenceHints
    from .layer_units import LayerUnitEncoder

# A unit refers only to rows before it, which are read anyway: a text is read from its beginning, and leaves are evicted
# before what they follow. Rows are referred to only where checksums of their blocks say that they are those that are
# put, and a unit needs at most eight others. Tables are shared by all units of a model: clustering its own took a unit
# a fifth of its time, and gained 0.7 % in fp16 and nothing in fp32. Dense streams take two to four times as long to
# decode as frames: a put whose middle layer gains less than 3 % by them is stored as frames.


class HistoryRef(NamedTuple):
    """Rows before a unit that it refers to, the blocks that contain them, and the units to decode for them."""

    num_rows: int = 0
    num_blocks: int = 0
    chain_length: int = 0


class HistorySource(NamedTuple):
    """A unit that can be referred to: its last blocks, and the units to decode for them."""

    num_blocks: int
    chain_length: int


def checksum_part_blocks(elements: Elements, block_tokens: int) -> list[int]:
    """Return the checksum of each whole block in K or V of a layer."""
    num_blocks = elements.shape[1] // block_tokens
    return checksum_blocks(view_token_bytes(elements[:, : num_blocks * block_tokens]), block_tokens)


def combine_block_sums(sums: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return a checksum of each block over all layers, from those of K and V of each layer, in order."""
    return tuple(integrity_checksum(block_sums) for block_sums in np.array(sums, "<u8").T.copy())


def plan_history(sources: Sequence[HistorySource], block_tokens: int) -> HistoryRef:
    """Return the history of a unit: the nearest rows of the units before it whose chains are short enough."""
    num_blocks = chain_length = 0
    for distance, source in enumerate(reversed(sources), 1):
        remaining_blocks = count_history_blocks(block_tokens) - num_blocks
        if not remaining_blocks or distance + source.chain_length > MAX_CHAIN_UNITS:
            break
        num_blocks += min(remaining_blocks, source.num_blocks)
        chain_length = max(chain_length, distance + source.chain_length)
    return HistoryRef(min(MAX_HISTORY_ROWS, num_blocks * block_tokens), num_blocks, chain_length)


def count_history_blocks(block_tokens: int) -> int:
    """Return how many blocks contain the rows that a unit may refer to."""
    return -(-MAX_HISTORY_ROWS // block_tokens)


def load_history(
    backend: StoreBackend, sequence: TokenSequence, layers: Sequence[LayerCache], stored_prefix: PrefixMatch
) -> tuple[list[HistorySource], list[int]]:
    """Load the stored rows of a sequence that dense streams may refer to, in order, and the checksums of their blocks.

    The history ends before a unit that is not cached, consists of frames, or contains other rows than those to store.
    """
    size = sequence.block_tokens
    parts = list_parts(layers)
    sources: list[HistorySource] = []
    sums: list[int] = []
    remaining_blocks = count_history_blocks(size)
    for begin_token, end_token, unit_slice in reversed(_list_whole_blocks(stored_prefix, size)):
        header = _read_cached_header(backend, unit_slice.unit)
        if not remaining_blocks or header is None or header.dense is None:
            break
        first_block, num_blocks = unit_slice.skip // size, (end_token - begin_token) // size
        stored_sums = header.dense.block_sums[first_block : first_block + num_blocks][-remaining_blocks:]
        new_sums = combine_block_sums(
            [
                checksum_part_blocks(elements[:, end_token - len(stored_sums) * size : end_token], size)
                for elements in parts
            ]
        )
        num_equal = 0
        while num_equal < len(stored_sums) and stored_sums[-1 - num_equal] == new_sums[-1 - num_equal]:
            num_equal += 1
        if num_equal:
            sources.insert(0, HistorySource(num_equal, header.dense.chain_length))
            sums[:0] = new_sums[len(new_sums) - num_equal :]
            remaining_blocks -= num_equal
        # the rows before a slice that starts inside its unit may need a longer chain than the unit records
        if num_equal < num_blocks or (first_block and header.dense.history_rows):
            break
    return sources, sums


def _list_whole_blocks(stored_prefix: PrefixMatch, block_tokens: int) -> list[tuple[int, int, UnitSlice]]:
    """Return the slices that contain whole blocks, each with begin and end of these in the sequence."""
    spans = []
    begin_token = 0
    for unit_slice in stored_prefix.slices:
        end_token = min(begin_token + unit_slice.take, stored_prefix.num_blocks * block_tokens)
        if end_token > begin_token:
            spans.append((begin_token, end_token, unit_slice))
        begin_token += unit_slice.take
    return spans


def read_previous_header(
    backend: StoreBackend, sequence: TokenSequence, stored_prefix: PrefixMatch
) -> UnitHeader | None:
    """Return the header of the unit with the last stored whole block, if it is cached."""
    blocks = _list_whole_blocks(stored_prefix, sequence.block_tokens)
    return _read_cached_header(backend, blocks[-1][2].unit) if blocks else None


def _read_cached_header(backend: StoreBackend, unit: int) -> UnitHeader | None:
    data = backend.get_cached(unit)
    try:
        return None if data is None else parse_header(data)
    except DamagedUnitError:
        return None


DENSE_MAX_SIZE_RATIO = 0.97
"""Dense streams must be this much smaller than frames, which decode two to three times as fast."""
FRAME_RETRY_RATIO = 1.05
"""If a frame is at most this much larger than a stream, it may be smaller in another layer."""
SHARED_TABLES_MAX_OVERHEAD = 1.01
"""Shared tables may make streams this much larger than own tables, which take 25 % more time, and up to 75 % in short
units."""


class StreamKind(NamedTuple):
    """Key of streams that compress alike: index of the stream in its unit, and whether it refers to earlier rows."""

    part: int
    has_history: bool


class FrameComparison(NamedTuple):
    """A stream that was compared with a frame: compressed bytes per raw byte, and whether the frame was smaller."""

    kind: StreamKind
    compressed_fraction: float
    is_frame: bool


class LayerTrial(NamedTuple):
    """Encoded streams of one layer of a unit, by index, and the hints for similar rows from the last one."""

    unit_index: int
    streams: dict[int, UnitFrame]
    reference_hints: ReferenceHints | None

    def list_stream_bytes(self) -> list[int]:
        """Return the size of each stream."""
        return [len(stream.data) for stream in self.streams.values()]


class DenseUnitPlan(NamedTuple):
    """A unit to encode: its tokens, its history, and the shared tables of its streams, if any."""

    span: TokenSpan
    history: HistoryRef
    tables: TableSets | None


def supports_dense(namespace: Namespace, tokens: int) -> bool:
    """Return whether dense streams can contain units of so many tokens, on this machine."""
    max_row_elements = max(shape.kv_heads * max(shape.dims) for shape in namespace.layers)
    max_axis = max(max(shape.kv_heads, *shape.dims) for shape in namespace.layers)
    is_small_enough = max_row_elements <= MAX_ROW_ELEMENTS and max_axis < MAX_ROW_ELEMENTS
    return (
        sys.byteorder == "little"
        and is_small_enough
        and tokens * max_row_elements * namespace.element_dtype.itemsize <= MAX_RAW_BYTES
    )


def find_middle(units: Sequence[DenseUnitPlan]) -> int:
    """Return the index of the unit in the middle; not the last, which may be shorter, unless it is the only one."""
    return (len(units) - 1) // 2


class DenseStreamEncoder:
    """Encodes K and V of all layers of a whole sequence as dense streams.

    `rotary` are the RoPE parameters of K in streams without shared tables, which contain them.
    """

    def __init__(self, layers: Sequence[LayerCache], namespace: Namespace, rotary: RopeConfig | None) -> None:
        self._layers, self._namespace, self._rotary = layers, namespace, rotary
        self._parts = list_parts(layers)
        self._scratch = ThreadScratch()
        self.tries_frames = True, True
        """Whether frames of K, and of V, are tried in units with history, where a frame is rarely smaller."""
        self.only_frames = False, False
        """Whether K, and V, are frames inside their streams, without other methods being tried."""
        self.frame_losses: Mapping[StreamKind, float] = {}
        """Compressed bytes per raw byte of streams that were smaller than frames: frames are tried again only if a
        stream is more than `FRAME_RETRY_RATIO` times as large."""
        self.comparisons: list[FrameComparison] = []
        """The streams that were compared with frames."""

    def try_layer(self, units: Sequence[DenseUnitPlan], *, only_keys: bool = False) -> LayerTrial:
        """Encode K and V of the middle layer in the middle unit, or K only."""
        unit_index, middle_layer = find_middle(units), len(self._layers) // 2
        streams: dict[int, UnitFrame] = {}
        reference_hints = None
        for part, (layer, is_values) in enumerate(self._namespace.parts):
            if layer != middle_layer or (only_keys and is_values):
                continue
            streams[part], reference_hints = self._encode_part(units[unit_index], part, reference_hints)
        return LayerTrial(unit_index, streams, reference_hints)

    def measure_layer_frames(self, units: Sequence[DenseUnitPlan], options: CodecOptions) -> list[int]:
        """Return the sizes of frames for the arrays of `try_layer`."""
        from ..frames import encode_many

        span, layer = units[find_middle(units)].span, self._layers[len(self._layers) // 2]
        arrays = [np.ascontiguousarray(elements[:, slice(*span)]) for elements in list_parts([layer])]
        return list(map(len, encode_many(arrays, dtype=self._namespace.dtype, effort=options.effort, threads=1)))

    def encode_units(
        self,
        units: Sequence[DenseUnitPlan],
        block_tokens: int,
        on_unit: Callable[[int, tuple[UnitFrame, ...], tuple[int, ...]], object],
        threads: int | None = None,
        trial: LayerTrial | None = None,
    ) -> None:
        """Encode all units."""
        trial = trial or LayerTrial(-1, {}, None)
        open_units: dict[int, dict[int, tuple[UnitFrame, list[int]]]] = {}
        lock = threading.Lock()
        cores = resolve_threads(threads)

        def encode_parts(job: tuple[int, range]) -> None:
            unit_index, part_range = job
            begin_token, end_token = units[unit_index].span
            trial_streams = trial.streams if unit_index == trial.unit_index else {}
            reference_hints = trial.reference_hints if trial_streams else None
            encoded_parts = {}
            for part in part_range:
                frame = trial_streams.get(part)
                if frame is None:
                    frame, reference_hints = self._encode_part(units[unit_index], part, reference_hints)
                block_sums = checksum_part_blocks(self._parts[part][:, begin_token:end_token], block_tokens)
                encoded_parts[part] = frame, block_sums
            with lock:
                unit_parts = open_units.setdefault(unit_index, {})
                unit_parts.update(encoded_parts)
                if len(unit_parts) < len(self._parts):
                    return
                del open_units[unit_index]
            frames, sums = zip(*(unit_parts[part] for part in range(len(self._parts))), strict=True)
            on_unit(unit_index, frames, combine_block_sums(sums))

        parallel_map(encode_parts, _plan_dense_jobs(len(units), len(self._parts), cores), cores)

    def _encode_part(
        self, unit: DenseUnitPlan, part: int, reference_hints: ReferenceHints | None
    ) -> tuple[UnitFrame, ReferenceHints | None]:
        from ..dense.encoder import encode_as_frame, encode_next

        (begin_token, end_token), history, tables = unit
        kind, raw_bytes = StreamKind(part, bool(history.num_rows)), self._parts[part][:, begin_token:end_token].nbytes
        is_values = self._namespace.parts[part][1]
        if self.only_frames[is_values]:
            data = encode_as_frame(
                _to_token_rows(self._parts[part][:, begin_token:end_token], self._scratch), dtype=self._namespace.dtype
            )
            return UnitFrame(data, read_checksum(data), 0), reference_hints
        frame_threshold_bytes = FRAME_RETRY_RATIO * self.frame_losses.get(kind, 0) * raw_bytes
        if history.num_rows and not self.tries_frames[is_values]:
            frame_threshold_bytes = math.inf
        rows = _to_token_rows(self._parts[part][:, begin_token - history.num_rows : end_token], self._scratch)
        # without token ids: they change sizes by less than 0.1 %, and take a sixth to a third of the time
        data, new_hints = encode_next(
            rows,
            history.num_rows,
            reference_hints,
            dtype=self._namespace.dtype,
            rotary=None if tables or is_values else select_rotary(self._rotary, self._parts[part]),
            tables=tables.sets[part] if tables else None,
            frame_trial_min_bytes=frame_threshold_bytes,
        )
        if len(data) > frame_threshold_bytes or read_method(data) == METHOD_FRAME:
            self.comparisons.append(FrameComparison(kind, len(data) / raw_bytes, read_method(data) == METHOD_FRAME))
        return UnitFrame(data, read_checksum(data), 0), new_hints


def _to_token_rows(elements: Elements, scratch: ThreadScratch) -> Elements:
    """Return ``[token, kv_head, head_dim]``, contiguous, native and aligned; valid until `scratch` is used again."""
    by_token = elements.transpose(1, 0, 2)
    if by_token.flags.c_contiguous and by_token.flags.aligned and elements.dtype.isnative:
        return by_token
    native_buffer = scratch.get_buffer(elements.nbytes).view(elements.dtype.newbyteorder("="))
    scratch_rows: Elements = native_buffer.reshape(by_token.shape)
    np.copyto(scratch_rows, by_token)
    return scratch_rows


def _plan_dense_jobs(units: int, parts: int, cores: int) -> list[tuple[int, range]]:
    """Return unit and streams of each job.

    A thread encodes all streams of a unit, as hints for similar rows serve the next stream. Units are split if there
    are more threads than units left.
    """
    num_last = units % cores
    jobs = []
    for unit_index in range(units):
        num_pieces = 1 if unit_index < units - num_last else min(-(-cores // num_last), parts)
        step = -(-parts // num_pieces)
        jobs += [(unit_index, range(begin_part, min(begin_part + step, parts))) for begin_part in range(0, parts, step)]
    return jobs


def build_dense_info(unit: DenseUnitPlan, sums: tuple[int, ...]) -> DenseUnitInfo:
    """Return the dependencies of the streams of a unit."""
    key = unit.tables.key if unit.tables else b""
    return DenseUnitInfo(sums, unit.history.num_rows, unit.history.chain_length, key)


_BATCH_RAW_BYTES = 256 << 20
"""Raw bytes that are encoded before they are added: what a killed process loses of a put."""
MIN_OWN_TABLE_TOKENS = 64
"""Shorter units always use shared tables."""
RETRY_INTERVAL_UNITS = 16
"""Units between two trials of streams against frames, and of shared against own tables."""


class RopeState:
    """RoPE parameters of the models of a store: those that the caller specified, or searched for each namespace."""

    def __init__(self, specified: RopeConfig | Literal["none"] | None) -> None:
        if not (specified is None or specified == "none" or isinstance(specified, RopeConfig)):
            raise OptionError(f'rotary is {specified!r}: expected a kvmnn.Rotary, "none" or None')
        self._specified = specified
        self._rope_by_namespace: dict[bytes, RopeConfig | None] = {}

    def get_rope(self, namespace: Namespace, layers: Sequence[LayerCache]) -> RopeConfig | None:
        """Return those of a namespace, searched in the first sequence that is long enough."""
        if self._specified == "none":
            return None
        if self._specified is not None:
            max_dims = max(shape.head_dim for shape in namespace.layers)
            if self._specified.dims > max_dims:
                raise OptionError(f"rotary has {self._specified.dims} dims: expected at most the head_dim, {max_dims}")
            return self._specified
        if namespace.key not in self._rope_by_namespace:
            from ..dense import search_rope

            rope = search_rope(layers[0].keys, dtype=namespace.dtype)
            if rope is None and layers[0].tokens < MIN_TABLE_TOKENS:
                return None
            self._rope_by_namespace[namespace.key] = rope
        return self._rope_by_namespace[namespace.key]


class CodecDecision(NamedTuple):
    """Result of a trial."""

    #: Whether units get their own tables, as the shared ones come from a dissimilar sequence.
    has_own_tables: bool
    #: Whether frames of K, and of V, are almost as small as streams; None if the trial was on a short sequence.
    tries_frames: tuple[bool, bool] | None
    #: Whether only K, or only V, gains by streams: the other is stored as frames.
    only_frames: tuple[bool, bool] = (False, False)
    #: Streams that have been smaller than frames since (`DenseStreamEncoder.frame_losses`).
    frame_losses: Mapping[StreamKind, float] = MappingProxyType({})


class CodecChooser:
    """Results of the last trials, by key: a trial on each put would take a seventh of the time for short sequences."""

    def __init__(self) -> None:
        self._units_since_trial: dict[bytes, int] = {}
        self._decisions: dict[bytes, CodecDecision] = {}

    def is_due(self, key: bytes, num_units: int) -> bool:
        """Return whether a put of so many units needs a trial: the first, then one in `RETRY_INTERVAL_UNITS` units."""
        if key in self._units_since_trial:
            self._units_since_trial[key] += num_units
        return self._units_since_trial.get(key, RETRY_INTERVAL_UNITS) >= RETRY_INTERVAL_UNITS

    def get_decision(self, key: bytes) -> CodecDecision:
        """Return the result of the last trial."""
        return self._decisions.get(key, CodecDecision(False, None))

    def record_decision(self, key: bytes, decision: CodecDecision) -> None:
        """Store the result of a trial."""
        self._units_since_trial[key], self._decisions[key] = 0, decision

    def record_frames(self, key: bytes, comparisons: Sequence[FrameComparison]) -> None:
        """Update the result of the last trial with comparisons of frames and streams."""
        decision = self._decisions.get(key)
        if decision is None:
            return
        frame_losses = dict(decision.frame_losses)
        for kind, compressed_fraction, _ in comparisons:
            frame_losses[kind] = min(compressed_fraction, frame_losses.get(kind, compressed_fraction))
        for comparison in comparisons:
            if comparison.is_frame:
                frame_losses.pop(comparison.kind, None)
        self._decisions[key] = decision._replace(frame_losses=frame_losses)


class WriteOptions(NamedTuple):
    """Options of frames, RoPE parameters and trial results for dense streams, and maximum number of threads."""

    options: CodecOptions
    rope_state: RopeState
    codec_chooser: CodecChooser
    threads: int | None


def add_sequence(
    backend: StoreBackend,
    sequence: TokenSequence,
    layers: Sequence[LayerCache],
    namespace: Namespace,
    stored_prefix: PrefixMatch,
    write_options: WriteOptions,
    attention: npt.NDArray[Any] | None = None,
    ready_units: ReadyUnits | None = None,
    *,
    is_rounded: bool = False,
) -> Iterator[AddResult]:
    """Store the tokens of a sequence after its stored whole blocks; yield what each batch of units adds."""
    size, step = sequence.block_tokens, count_blocks_per_unit(namespace, sequence.block_tokens)
    start, tokens = stored_prefix.num_blocks * size, sequence.ids.size
    ready_spans = ready_units.plan_spans(start, tokens, size, step) if ready_units is not None else []
    spans = ready_spans or plan_unit_spans(start, tokens, size, step)
    batches = _split_batches(spans, namespace.token_bytes)
    unit_encoder: _FrameUnitEncoder | _DenseUnitEncoder | LayerUnitEncoder = _FrameUnitEncoder(layers, write_options)
    layer_encoder = make_layer_encoder(backend, layers, write_options.threads, attention, ready_units)
    if layer_encoder is not None:
        unit_encoder = layer_encoder
    elif backend.codec == "dense" and supports_dense(namespace, (step + 1) * size):
        streams = _DenseUnitEncoder(backend, sequence, layers, namespace, stored_prefix, write_options)
        if streams.is_dense_worth_it(batches[0], sequence):
            unit_encoder = streams
    for batch in batches:
        added = _add_batch(
            backend, sequence, namespace, batch, unit_encoder, ready_units or ReadyUnits({}), is_rounded=is_rounded
        )
        yield added._replace(predicted_kl=unit_encoder.predicted_kl, bits_factor=unit_encoder.bits_factor)
        if added.exceeded_limit:
            break


def make_layer_encoder(
    backend: StoreBackend,
    layers: Sequence[LayerCache],
    threads: int | None,
    attention: npt.NDArray[Any] | None = None,
    ready_units: ReadyUnits | None = None,
) -> LayerUnitEncoder | None:
    """Make the encoder of a store whose codec needs a profile; None for other stores."""
    profile_settings = backend.settings.profile
    if profile_settings is None:
        return None
    from .layer_units import LayerUnitEncoder  # which imports both codecs

    profile = backend.profiles.get(bytes.fromhex(profile_settings.key))
    return LayerUnitEncoder(layers, profile, backend.codec, profile_settings.options, attention, threads, ready_units)


_OnUnit = Callable[[int, tuple[UnitFrame, ...], DenseUnitInfo | LayerUnitInfo | None], object]
"""Called with the index, the frames or streams, and what else the header of each encoded unit says."""


class _FrameUnitEncoder:
    """Encodes units of frames."""

    tables = predicted_kl = bits_factor = None

    def __init__(self, layers: Sequence[LayerCache], write_options: WriteOptions) -> None:
        self._layers, self._write_options = layers, write_options

    def encode_batch(
        self, batch: Sequence[TokenSpan], sequence: TokenSequence, on_unit: _OnUnit
    ) -> list[tuple[int, ...]]:
        """Encode units; return for each the checksums of the preceding blocks that it refers to."""
        options, threads = self._write_options.options, self._write_options.threads
        encode_frame_units(
            self._layers, batch, options, lambda unit_index, frames: on_unit(unit_index, frames, None), threads
        )
        return [()] * len(batch)


class _DenseUnitEncoder:
    """Encodes units of dense streams, which refer to rows before them and to tables shared in the namespace."""

    predicted_kl = bits_factor = None

    def __init__(
        self,
        backend: StoreBackend,
        sequence: TokenSequence,
        layers: Sequence[LayerCache],
        namespace: Namespace,
        stored_prefix: PrefixMatch,
        write_options: WriteOptions,
    ) -> None:
        self._options, self._threads = write_options.options, write_options.threads
        self._chooser = write_options.codec_chooser
        rotary = write_options.rope_state.get_rope(namespace, layers)
        self._streams = DenseStreamEncoder(layers, namespace, rotary)
        previous_header = read_previous_header(backend, sequence, stored_prefix)
        self._follows_frames = previous_header is not None and previous_header.dense is None
        self._history_sources, self._history_sums = load_history(backend, sequence, layers, stored_prefix)
        self._next_plans: list[DenseUnitPlan] | None = None
        self._trial: LayerTrial | None = None
        self.tables = backend.tables.get_any(namespace.key)
        self._has_new_tables = self.tables is None and sequence.ids.size >= MIN_TABLE_TOKENS
        if self._has_new_tables:
            self.tables = build_table_sets(layers, namespace, rotary, write_options.threads)
            backend.tables.put(namespace.key, self.tables)
        self._chooser_key = namespace.key + (self.tables.key if self.tables else b"")
        self._has_own_tables = self._is_short = False

    def is_dense_worth_it(self, batch: Sequence[TokenSpan], sequence: TokenSequence) -> bool:
        """Return whether dense streams of a layer of the first batch are clearly smaller than frames.

        Short units use the codec of the unit before them: dense streams gain most from preceding rows, which frames
        cannot use. Between trials, the last result applies; a result in favour of frames is not stored, as it says
        nothing about other sequences.
        """
        plans = self._plan_units(batch, sequence)
        num_tokens = _count_tokens(plans[find_middle(plans)].span)
        self._is_short = num_tokens < MIN_TABLE_TOKENS
        if self._is_short:
            has_choice = self.tables is not None and num_tokens >= MIN_OWN_TABLE_TOKENS
            self._next_plans = self._plan_short_units(plans) if has_choice else plans
            return not self._follows_frames
        decision = self._chooser.get_decision(self._chooser_key)
        if self._chooser.is_due(self._chooser_key, len(plans)) or decision.tries_frames is None:
            return self._run_full_trial(plans)
        self._next_plans = self._apply_tables(plans, has_own_tables=decision.has_own_tables)
        self._streams.tries_frames, self._streams.frame_losses = decision.tries_frames, decision.frame_losses
        self._streams.only_frames = decision.only_frames
        return True

    def _run_full_trial(self, plans: list[DenseUnitPlan]) -> bool:
        trial, own_tables_trial, frame_bytes = self._run_trials(plans)
        own_tables = own_tables_trial is not None and _are_own_tables_better(own_tables_trial, trial)
        if own_tables:
            plans = self._apply_tables(plans, has_own_tables=True)
            trial = self._streams.try_layer(plans)
        are_near = [
            frame_size <= FRAME_RETRY_RATIO * size
            for frame_size, size in zip(frame_bytes, trial.list_stream_bytes(), strict=True)
        ]
        frames_near = are_near[0], are_near[-1]  # layers may have no V
        self._next_plans, self._trial, self._streams.tries_frames = plans, trial, frames_near
        is_dense_smaller = sum(trial.list_stream_bytes()) <= DENSE_MAX_SIZE_RATIO * sum(frame_bytes)
        if not is_dense_smaller:
            are_larger = [
                size > DENSE_MAX_SIZE_RATIO * frame_size
                for frame_size, size in zip(frame_bytes, trial.list_stream_bytes(), strict=True)
            ]
            self._streams.only_frames = are_larger[0], are_larger[-1]
            is_dense_smaller = not all(are_larger)
        # new tables are built from this sequence: a trial with them says nothing about others
        if is_dense_smaller and not self._has_new_tables:
            self._chooser.record_decision(
                self._chooser_key, CodecDecision(own_tables, frames_near, self._streams.only_frames)
            )
        return is_dense_smaller

    def _plan_short_units(self, plans: list[DenseUnitPlan]) -> list[DenseUnitPlan]:
        """Give short units their own tables, if these were smaller in the last trial."""
        own_plans, key = _drop_shared_tables(plans), self._chooser_key
        decision = self._chooser.get_decision(key)
        self._streams.frame_losses = decision.frame_losses
        if self._chooser.is_due(key, len(plans)):
            trial, own_tables_trial = parallel_map(
                lambda unit_plans: self._streams.try_layer(unit_plans, only_keys=True),
                [plans, own_plans],
                resolve_threads(self._threads),
            )
            decision = decision._replace(has_own_tables=_are_own_tables_better(own_tables_trial, trial))
            self._chooser.record_decision(key, decision)
            self._trial = own_tables_trial if decision.has_own_tables else trial
        return self._apply_tables(plans, has_own_tables=decision.has_own_tables)

    def _apply_tables(self, plans: list[DenseUnitPlan], *, has_own_tables: bool) -> list[DenseUnitPlan]:
        self._has_own_tables = has_own_tables
        return _drop_shared_tables(plans) if has_own_tables else plans

    def _run_trials(self, plans: Sequence[DenseUnitPlan]) -> tuple[LayerTrial, LayerTrial | None, list[int]]:
        """Encode a layer as planned, its K with own tables if they are shared, and measure its frames."""

        def try_alternatives() -> tuple[LayerTrial | None, list[int]]:
            own_tables_trial = None
            if self.tables is not None:
                own_tables_trial = self._streams.try_layer(_drop_shared_tables(plans), only_keys=True)
            return own_tables_trial, self._streams.measure_layer_frames(plans, self._options)

        calls: list[Callable[[], Any]] = [lambda: self._streams.try_layer(plans), try_alternatives]
        trial, (own_tables_trial, frame_bytes) = parallel_map(
            lambda run_trial: run_trial(), calls, resolve_threads(self._threads)
        )
        return trial, own_tables_trial, frame_bytes

    def _plan_units(self, batch: Sequence[TokenSpan], sequence: TokenSequence) -> list[DenseUnitPlan]:
        plans = []
        for span in batch:
            history = plan_history(self._history_sources, sequence.block_tokens)
            plans.append(DenseUnitPlan(span, history, self.tables))
            num_blocks = (span[1] - span[0]) // sequence.block_tokens
            self._history_sources = [*self._history_sources, HistorySource(num_blocks, history.chain_length)][
                -count_history_blocks(sequence.block_tokens) :
            ]
        return self._apply_tables(plans, has_own_tables=self._has_own_tables)

    def encode_batch(
        self, batch: Sequence[TokenSpan], sequence: TokenSequence, on_unit: _OnUnit
    ) -> list[tuple[int, ...]]:
        """Encode units, as `_FrameUnitEncoder.encode_batch`."""
        plans = self._next_plans or self._plan_units(batch, sequence)
        trial, self._next_plans, self._trial = self._trial, None, None
        sums: dict[int, tuple[int, ...]] = {}

        def emit_unit(unit_index: int, streams: tuple[UnitFrame, ...], unit_sums: tuple[int, ...]) -> None:
            on_unit(unit_index, streams, build_dense_info(plans[unit_index], unit_sums))
            sums[unit_index] = unit_sums

        self._streams.encode_units(plans, sequence.block_tokens, emit_unit, self._threads, trial)
        if not self._is_short:  # frames of short units say nothing about long ones
            self._chooser.record_frames(self._chooser_key, self._streams.comparisons)
        referenced_sums = []
        for unit_index, plan in enumerate(plans):
            referenced_sums.append(tuple(self._history_sums[len(self._history_sums) - plan.history.num_blocks :]))
            self._history_sums = [*self._history_sums, *sums[unit_index]][
                -count_history_blocks(sequence.block_tokens) :
            ]
        return referenced_sums


def _drop_shared_tables(plans: Sequence[DenseUnitPlan]) -> list[DenseUnitPlan]:
    return [plan if _count_tokens(plan.span) < MIN_OWN_TABLE_TOKENS else plan._replace(tables=None) for plan in plans]


def _are_own_tables_better(own_tables_trial: LayerTrial, shared_tables_trial: LayerTrial) -> bool:
    """Return whether own tables make K so much smaller that they are worth the time."""
    own_bytes, shared_bytes = own_tables_trial.list_stream_bytes()[0], shared_tables_trial.list_stream_bytes()[0]
    return shared_bytes > SHARED_TABLES_MAX_OVERHEAD * own_bytes


def _count_tokens(span: TokenSpan) -> int:
    return span[1] - span[0]


def _add_batch(
    backend: StoreBackend,
    sequence: TokenSequence,
    namespace: Namespace,
    batch: Sequence[TokenSpan],
    unit_encoder: _FrameUnitEncoder | _DenseUnitEncoder | LayerUnitEncoder,
    ready_units: ReadyUnits,
    *,
    is_rounded: bool,
) -> AddResult:
    new_units: dict[int, NewUnit] = {}
    with backend.stage() as staging:

        def stage_unit(
            unit_index: int, frames: tuple[UnitFrame, ...], info: DenseUnitInfo | LayerUnitInfo | None
        ) -> None:
            begin_token, end_token = batch[unit_index]
            begin_block, end_block = begin_token // sequence.block_tokens, end_token // sequence.block_tokens
            parent, ids = sequence.get_parent_key(begin_block), sequence.ids[begin_token:end_token]
            dense, layer_info = (None, info) if isinstance(info, LayerUnitInfo) else (info, None)
            had_loss = is_rounded or ready_units.is_rounded_again(batch[unit_index])
            unit = Unit(namespace.key, parent, begin_token, ids, frames, dense, layer_info, had_loss)
            staged = staging.write(unit.to_pieces())
            keys = sequence.keys[begin_block:end_block]
            nbytes = unit.nbytes + backend.unit_overhead_bytes
            new_units[unit_index] = NewUnit(parent, begin_token, ids, keys, nbytes, staged, has_loss=unit.has_loss)

        referenced_sums = unit_encoder.encode_batch(batch, sequence, stage_unit)
        ordered_units = [
            replace(new_units[unit_index], history_sums=sums) for unit_index, sums in enumerate(referenced_sums)
        ]
        return backend.add_units(namespace, sequence, ordered_units, unit_encoder.tables)


def _split_batches(spans: Sequence[TokenSpan], token_bytes: int) -> list[list[TokenSpan]]:
    batches: list[list[TokenSpan]] = [[]]
    batch_bytes = 0
    for begin_token, end_token in spans:
        nbytes = (end_token - begin_token) * token_bytes
        if batches[-1] and batch_bytes + nbytes > _BATCH_RAW_BYTES:
            batches.append([])
            batch_bytes = 0
        batches[-1].append((begin_token, end_token))
        batch_bytes += nbytes
    return batches
