"""Measure one cell of an evaluation: a model, a configuration and a document; loss, memory, lossless sizes, traces."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.packages import import_optional
from ..arrays.layer_cache import LayerCache
from ..arrays.llama_transforms import iter_transform_combinations
from ..dtypes import PARTS, Elements, Part
from ..errors import FrameError, KvmnnError, MissingDependencyError
from ..frames import decoder, encoder
from ..lm.documents import Document
from ..lm.onnx.model_files import compute_fingerprint
from ..lm.runner import Runner, RunTimings
from ..lm.session import DecoderSession
from ..lm.warm_start import invert_named_transforms, load_layers, load_token_bytes
from ..lm.windows import count_tokens_in_windows, select_window
from ..policies.oracle import Oracle
from ..policies.policy import Policy
from ..quantization import create_codec
from ..reports.records import (
    MIN_NON_ROUNDING_DISTANCE,
    FrameSizeStats,
    KeepMap,
    KeptPositions,
    LayerDistanceStats,
    ModelInfo,
    RuntimeStats,
    TimeSeries,
)
from ..store import PrefixStore, load_key
from .divergence import ReferenceComparer, ReferenceWriter, get_reference_path
from .oracle import collect_later_attention
from .records import ProjectCell, ScoreCell, TimingCell
from .replay import FullCacheRecorder, read_full_cache_run
from .scoring import (
    CachedScores,
    StoredScores,
    can_use_store,
    feed_unscored,
    measure_by_definition,
    score_document,
    score_with_store,
)
from .settings import Configuration, EvaluationSettings
from .timing import measure_attention_time, measure_generation_times, measure_project_times

PEAK_DESCRIPTION = (
    "highest resident memory, in a process of its own, while the first document was scored: interpreter, onnxruntime, "
    "model, cache and logits, but not what opening the model took for a moment (Linux; elsewhere it is included); for "
    "steps before the first eviction, which are the full cache's, what its process took"
)
"""Meaning of `process_peak_bytes` of a row."""

_STATUS_PATH = Path("/proc/self/status")
_RESET_PATH = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MemoryBaseline:
    """Start of a memory measurement."""

    #: Resident bytes at that time; None if the system does not report them.
    resident_bytes: int | None

    def read_peak(self) -> int | None:
        """Return the peak resident memory since the baseline in bytes, or since process start if it cannot be reset."""
        return _read_status("VmHWM") or _read_rusage_peak()


def start_measurement() -> MemoryBaseline:
    """Free unused memory, and reset the peak that the system records."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc
    with suppress(OSError):
        _RESET_PATH.write_text("5")
    return MemoryBaseline(_read_status("VmRSS"))


def _read_status(name: str) -> int | None:
    """Read a size from ``/proc``; VmHWM belongs to the running program alone, unlike the peak of getrusage."""
    try:
        text = _STATUS_PATH.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _read_rusage_peak() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


FrameType = Literal["fp16", "fp32"]


@dataclass(frozen=True)
class QuantizedStart:
    """The quantised tokens at the beginning of a text that an initial cache provided."""

    #: Tokens of the text: those at lower positions are the cache's.
    tokens_seen: int
    #: Bytes of K and V of one of them in each layer, in the types of the cache's file.
    token_bytes: Sequence[float]


def measure_frame_sizes(
    layers: Iterable[LayerCache],
    dtype: FrameType = "fp16",
    threads: int = 1,
    start: QuantizedStart | None = None,
    windows: Mapping[int, int] = MappingProxyType({}),
) -> FrameSizeStats:
    """Encode K and V of every layer, decode and compare the frames, and count their bytes.

    Of layers with windows, of a full cache as well, tokens are counted that the layer still attends to: any engine may
    drop the others, and nothing is lost. Tokens of a quantised start are counted as their file stores them, also among
    the bytes of the frames: a frame of the dequantised numbers would be larger.
    """
    full_bytes = kept_bytes = frame_bytes = 0
    is_rounded = False
    name = dtype
    for layer in layers:
        window = windows.get(layer.layer)
        keys, values = select_window(layer, window)
        num_needed = layer.tokens_seen if window is None else min(layer.tokens_seen, window)
        if start is not None:
            positions = np.broadcast_to(layer.positions, layer.keys.shape[:2])
            is_needed, is_own = positions >= layer.tokens_seen - num_needed, positions >= start.tokens_seen
            num_start_tokens = float(np.mean(np.sum(is_needed & ~is_own, axis=1)))
            num_start_bytes = round(start.token_bytes[layer.layer] * num_start_tokens)
            kept_bytes, frame_bytes = kept_bytes + num_start_bytes, frame_bytes + num_start_bytes
            keys, values = layer.keys[is_needed & is_own], layer.values[is_needed & is_own]
        for part, rows in (("keys", keys), ("values", values)):
            elements, is_layer_rounded = _to_elements(rows, dtype)
            is_rounded |= is_layer_rounded
            name = "fp16" if elements.dtype == np.float16 else "fp32"
            full_bytes += num_needed * layer.kv_heads * layer.head_dim * elements.itemsize
            if not elements.size:  # nothing was kept of this layer
                continue
            frame = encoder.encode(elements, threads=threads)
            if not decoder.verify_roundtrip(frame, elements, threads=threads):
                raise FrameError(f"layer {layer.layer}: the frame of its {part} does not decode to them")
            kept_bytes += elements.nbytes
            frame_bytes += len(frame)
    return FrameSizeStats(
        dtype=name, rounded=is_rounded, full_bytes=full_bytes, kept_bytes=kept_bytes, frame_bytes=frame_bytes
    )


def measure_quantized_sizes(runner: Runner, dtype: FrameType = "fp16", threads: int = 1) -> FrameSizeStats:
    """Measure a cache in a lossy codec: bytes of its format, entropy-coded as well, and frames of what is not in it."""
    interface, cache = runner.session.interface, runner.cache
    num_elements = plain_bytes = coded_bytes = pending_bytes = frame_bytes = 0
    is_rounded = False
    itemsize = 2 if dtype == "fp16" else 4
    for sizes in runner.collect_quantized_sizes():
        num_elements += sizes.num_elements
        plain_bytes += sizes.plain_bytes
        coded_bytes += sizes.coded_bytes
        if not sizes.pending_rows.size:
            continue
        elements, is_part_rounded = _to_elements(sizes.pending_rows, dtype)
        is_rounded |= is_part_rounded
        itemsize = elements.itemsize
        frame = encoder.encode(elements, threads=threads)
        if not decoder.verify_roundtrip(frame, elements, threads=threads):
            raise FrameError("the frame of rows that are not quantised yet does not decode to them")
        pending_bytes += elements.nbytes
        frame_bytes += len(frame)
    num_needed = sum(count_tokens_in_windows(interface.windows, interface.layers, cache.num_seen))
    return FrameSizeStats(
        dtype="fp16" if itemsize == 2 else "fp32",
        rounded=is_rounded,
        full_bytes=num_needed * 2 * interface.kv_heads * interface.head_dim * itemsize,
        kept_bytes=plain_bytes + pending_bytes,
        frame_bytes=coded_bytes + frame_bytes,
        quantized_elements=num_elements,
        plain_bytes=plain_bytes,
        coded_bytes=coded_bytes,
    )


def measure_runtime_sizes(runner: Runner, stats: RuntimeStats, dtype: FrameType = "fp16") -> FrameSizeStats:
    """Count the bytes of a cache in a runtime whose codec rounds: streams, and rows that are not in any in `dtype`."""
    interface, cache = runner.session.interface, runner.cache
    own_itemsize = np.dtype(interface.dtype).itemsize
    itemsize = 2 if dtype == "fp16" else own_itemsize
    coded_raw_bytes = sum(layer.stored_raw_bytes for layer in stats.layers)
    stream_bytes = sum(layer.stored_bytes for layer in stats.layers)
    kept_bytes = (stats.live_bytes - coded_raw_bytes) * itemsize // own_itemsize + stream_bytes
    return FrameSizeStats(
        dtype="fp16" if itemsize == 2 else "fp32",
        rounded=itemsize < own_itemsize,
        full_bytes=cache.num_seen * 2 * interface.layers * interface.kv_heads * interface.head_dim * itemsize,
        kept_bytes=kept_bytes,
        frame_bytes=kept_bytes,  # no frame is made of either
        quantized_elements=coded_raw_bytes // own_itemsize,
        plain_bytes=stream_bytes,
        coded_bytes=stream_bytes,
    )


def _to_elements(values: npt.NDArray[Any], dtype: FrameType) -> tuple[npt.NDArray[Any], bool]:
    if dtype == "fp16" and values.dtype == np.float32:
        with np.errstate(over="ignore"):
            return values.astype(np.float16), True
    return values, False


MAX_SAMPLES = 128


class TimeSeriesRecorder:
    """Samples a run at most `MAX_SAMPLES` times.

    Parameters
    ----------
    runner
        Whose cache is looked at.
    tokens
        That will be fed.
    skipped_layers
        Layers that are never cut: live tokens are those of KV head 0 of the first other layer.
    """

    def __init__(self, runner: Runner, tokens: int, skipped_layers: tuple[int, ...]) -> None:
        layers = runner.session.interface.layers
        self._runner = runner
        self._layer = next((layer for layer in range(layers) if layer not in skipped_layers), 0)
        self._tokens_per_sample = max(1, -(-tokens // MAX_SAMPLES))
        self._tokens = tokens
        self._next_sample = 1
        self._step_tokens: list[int] = []
        self._cache_bytes: list[int] = []
        self._kept_positions: list[list[int]] = []

    def record(self, num_seen: int) -> None:
        """Sample the cache after a chunk, if it is time; `num_seen` tokens of the text have been fed."""
        if num_seen < self._next_sample and num_seen < self._tokens:
            return
        self._next_sample = (num_seen // self._tokens_per_sample + 1) * self._tokens_per_sample
        cache = self._runner.cache
        positions = cache.get_positions(self._layer)
        self._step_tokens.append(num_seen)
        self._cache_bytes.append(cache.nbytes)
        self._kept_positions.append((positions if positions.ndim == 1 else positions[0]).tolist())

    def to_time_series(self) -> TimeSeries:
        """Return the samples so far."""
        step_tokens = tuple(self._step_tokens)
        keep_map = KeepMap(
            layer=self._layer, kv_head=0, steps=step_tokens, kept=tuple(map(tuple, self._kept_positions))
        )
        return TimeSeries(
            step_tokens=step_tokens,
            cache_bytes=tuple(self._cache_bytes),
            keep_map=keep_map,
            kept=self._list_final_positions(),
        )

    def _list_final_positions(self) -> tuple[KeptPositions, ...]:
        """List the positions that every layer stores now."""
        cache, layers = self._runner.cache, self._runner.session.interface.layers
        rows = (np.atleast_2d(cache.get_positions(layer)).tolist() for layer in range(layers))
        return tuple(KeptPositions(layer=layer, positions=tuple(map(tuple, heads))) for layer, heads in enumerate(rows))


_BLOCK_ELEMENTS = 1 << 20
"""Numbers that are compared at once in float64."""


def measure_distances_to_model(
    start: Sequence[LayerCache], computed_layers: Sequence[LayerCache]
) -> Iterator[LayerDistanceStats]:
    """Measure the distance of K and V of every layer, at the positions that the initial cache stores."""
    for start_layer, computed in zip(start, computed_layers, strict=True):
        for part in PARTS:
            distance = measure_distance_to_model(start_layer, computed, part, ())
            if distance.relative_distance > MIN_NON_ROUNDING_DISTANCE:
                transformed = (
                    measure_distance_to_model(start_layer, computed, part, transforms)
                    for transforms in iter_transform_combinations(part, start_layer.head_dim)
                )
                close_distance = next(
                    (
                        candidate
                        for candidate in transformed
                        if candidate.relative_distance <= MIN_NON_ROUNDING_DISTANCE
                    ),
                    None,
                )
                distance = replace(distance, undo=None if close_distance is None else close_distance.undo)
            yield distance


def measure_distance_to_model(
    start_layer: LayerCache, computed: LayerCache, part: Part, transforms: tuple[str, ...]
) -> LayerDistanceStats:
    """Measure how far K or V of a layer is from the model's own, after `transforms` are inverted."""
    start_rows, model_rows = (getattr(cache, f"{part}s") for cache in (start_layer, computed))
    positions = np.broadcast_to(start_layer.positions, (start_layer.kv_heads, start_layer.tokens))
    heads = [
        _sum_squares(invert_named_transforms(start_rows[head], part, transforms), model_rows[head], positions[head])
        for head in range(start_layer.kv_heads)
    ]
    num_elements, num_equal, squares, own_squares = (sum(head_sums) for head_sums in zip(*heads, strict=True))
    return LayerDistanceStats(
        layer=start_layer.layer,
        part=part,
        words=int(num_elements),
        equal=int(num_equal),
        squares=float(squares),
        own_squares=float(own_squares),
        undo=transforms or None,
    )


def _sum_squares(start_rows: Elements, model_rows: Elements, positions: np.ndarray) -> tuple[float, ...]:
    """Return of one head: elements, equal ones, squared differences, and squares of the model's own values."""
    num_elements = num_equal = 0
    squares = own_squares = 0.0
    step = max(1, _BLOCK_ELEMENTS // start_rows.shape[1])
    for begin in range(0, len(positions), step):
        start_block = np.ascontiguousarray(start_rows[begin : begin + step])
        model_block = np.ascontiguousarray(model_rows[positions[begin : begin + step]])
        bits = np.dtype(f"u{start_block.itemsize}")
        num_elements, num_equal = (
            num_elements + start_block.size,
            num_equal + int(np.count_nonzero(start_block.view(bits) == model_block.view(bits))),
        )
        model_float64 = model_block.astype(np.float64)
        squares += float(np.square(start_block - model_float64).sum())
        own_squares += float(np.square(model_float64).sum())
    return num_elements, num_equal, squares, own_squares


SCORES_VERSION = 1
"""Raised whenever rows or scores of a step are computed differently, so that those of before are not taken up."""

AdvanceCallback = Callable[[int], object]
"""Takes a number of further tokens fed."""


class UnsupportedConfigurationError(KvmnnError):
    """A configuration that the model cannot run, or not by its project's definition; others continue."""


@dataclass
class CellMeasurer:
    """Measures cells of one model, one at a time."""

    #: Path of the model.
    model: str
    settings: EvaluationSettings
    #: Directory of the initial cache (`kvmnn.lm.warm_start`), if there is one.
    start: str | None = None
    #: Directory of the full cache's distributions, which other configurations are compared with, if any are.
    references: str | None = None
    #: Whether this process does nothing else, so that its peak memory is meaningful.
    is_fresh_process: bool = False
    _sessions: dict[tuple[bool, bool], DecoderSession] = field(default_factory=dict)
    _prefixes: tuple[PrefixStore, str, dict[str, object]] | None = None

    def create_runner(self, configuration: Configuration, document: Document) -> Runner:
        """Create a runner for a document, whose policy has a random generator of its own."""
        generator_seed = (self.settings.seed, int(document.sha256[:12], 16))
        policy = configuration.create_policy(generator_seed)
        runtime_config = self.settings.runtime_config
        if runtime_config is not None and runtime_config.is_lossy and configuration.is_baseline:
            runtime_config = None  # others are compared with the full cache as the model computes it
        elif runtime_config is not None and runtime_config.is_lossy:
            # Encodings that are not done when a step begins would leave it the exact rows, and the loss would be less.
            runtime_config = replace(runtime_config, async_threads=0)
        try:
            return Runner(
                self._get_session(*self._get_session_key(policy)),
                policy,
                max_masked=self.settings.slack,
                packed=self.settings.packed,
                lossless=runtime_config,
                codec=None if configuration.codec is None else create_codec(configuration.codec),
                positions=configuration.positions,
            )
        except MissingDependencyError:
            raise
        except KvmnnError as exc:
            if not policy.can_evict and configuration.codec is None:
                raise
            raise UnsupportedConfigurationError(f"{configuration.label}: {exc}") from exc

    def measure_score_cell(
        self,
        configuration: Configuration,
        document: Document,
        advance: AdvanceCallback | None = None,
        *,
        record_trace: bool = False,
        measure_memory: bool = False,
    ) -> ScoreCell:
        """Measure quality, time and bytes of a document; with `measure_memory`, also this process's peak memory."""
        settings = self.settings
        runner = self.create_runner(configuration, document)
        memory_baseline = start_measurement() if measure_memory and self.is_fresh_process else None
        byte_sampler = _ByteSampler(runner, document.scored_from)
        recorder = TimeSeriesRecorder(runner, document.num_fed, _list_skipped_layers(runner)) if record_trace else None

        full_run = self._create_recorder(configuration, document, runner)

        def record_step(num_seen: int) -> None:
            num_new = num_seen - byte_sampler.num_seen
            byte_sampler.record(num_seen)
            if full_run is not None:
                full_run.record_step(None if memory_baseline is None else memory_baseline.read_peak())
            if recorder is not None:
                recorder.record(num_seen)
            if advance is not None:
                advance(num_new)

        stored_scores = self._open_stored_scores(runner)
        try:
            if isinstance(runner.policy, Oracle):
                session = self._get_session(True, self._get_session_key(runner.policy)[1])
                collect_later_attention(
                    session, document.ids, runner.policy, chunk=settings.chunk, prompt=settings.prompt
                )
            distances = self._begin_document(runner, configuration, document, advance)
            earlier_run = None if stored_scores is not None else self._find_full_run(configuration, document, runner)
            options: dict[str, Any] = {} if earlier_run is None else {"cached_scores": earlier_run}
            if full_run is not None:
                options["on_scores"] = full_run.record_scores
            with self._open_observer(configuration, document) as observer:
                score_result, num_from_store = score_with_store(
                    stored_scores,
                    runner,
                    document.ids,
                    chunk=settings.chunk,
                    prompt=settings.prompt,
                    tail_start=settings.deep_from,
                    on_step=record_step,
                    num_initial=document.scored_from,
                    observer=observer,
                    **options,
                )
            divergence = None
            if isinstance(observer, ReferenceComparer):
                divergence = observer.to_divergence(score_result.deep.tokens)
        except KvmnnError as exc:
            if not runner.policy.can_evict:
                raise KvmnnError(f"{document.name}: {exc}") from exc
            raise UnsupportedConfigurationError(f"{configuration.policy}, {document.name}: {exc}") from exc
        peak = None if memory_baseline is None else memory_baseline.read_peak()
        if peak is not None and score_result.num_replayed and earlier_run is not None:
            assert earlier_run.step_peaks is not None
            peak = max(peak, int(earlier_run.step_peaks[score_result.num_replayed - 1]))
        if full_run is not None:
            full_run.write(get_reference_path(Path(self.references or ""), document))
        cache, runtime_stats = runner.cache, runner.collect_runtime_stats()
        return ScoreCell(
            model=_build_model_info(runner.session),
            every=score_result.every,
            deep=score_result.deep,
            seconds=score_result.seconds,
            model_seconds=runner.timings.model_seconds,
            policy_seconds=runner.timings.policy_seconds,
            cache_bytes_mean=byte_sampler.mean,
            cache_bytes_peak=cache.peak_nbytes,
            tokens_kept=tuple(cache.tokens),
            tokens_seen=cache.num_seen,
            process_peak_bytes=peak,
            process_opened_bytes=None if memory_baseline is None else memory_baseline.resident_bytes,
            frames=measure_quantized_sizes(runner, settings.frame_dtype, settings.threads)
            if runner.codec is not None
            else measure_runtime_sizes(runner, runtime_stats, settings.frame_dtype)
            if runtime_stats is not None and runtime_stats.is_rounded
            else measure_frame_sizes(
                cache.copy_layers(),
                settings.frame_dtype,
                settings.threads,
                self._find_quantized_start(configuration, document),
                runner.session.interface.windows,
            ),
            h2o=cache.collect_h2o_stats(),
            runtime=runtime_stats,
            trace=None if recorder is None else recorder.to_time_series(),
            stored_tokens=num_from_store,
            stored_notes=tuple(stored_scores.notes) if stored_scores is not None and stored_scores.notes else None,
            distances=distances,
            cut_tokens=runner.num_tokens_after_cut,
            lossy_tokens=runner.num_tokens_after_loss,
            has_cut=cache.has_evicted,
            divergence=divergence,
        )

    def write_reference(
        self, configuration: Configuration, document: Document, advance: AdvanceCallback | None = None
    ) -> None:
        """Score a document with the full cache for its distributions alone."""
        settings, runner = self.settings, self.create_runner(configuration, document)
        feed_unscored(runner, document.ids, document.scored_from, settings.chunk, settings.prompt, advance)
        num_seen = document.scored_from

        def record_step(end: int) -> None:
            nonlocal num_seen
            if advance is not None:
                advance(end - num_seen)
            num_seen = end

        with self._open_observer(configuration, document) as observer:
            score_document(
                runner,
                document.ids,
                chunk=settings.chunk,
                prompt=settings.prompt,
                tail_start=settings.deep_from,
                on_step=record_step,
                num_initial=document.scored_from,
                observer=observer,
            )

    def _open_observer(
        self, configuration: Configuration, document: Document
    ) -> AbstractContextManager[ReferenceWriter | ReferenceComparer | None]:
        """Open what writes the full cache's distributions, or compares others with them; None if there are none."""
        if self.references is None:
            return nullcontext()
        path = get_reference_path(Path(self.references), document)
        if configuration.is_baseline:
            return ReferenceWriter(path)
        return ReferenceComparer(path) if path.exists() else nullcontext()

    def _create_recorder(
        self, configuration: Configuration, document: Document, runner: Runner
    ) -> FullCacheRecorder | None:
        """Return what records the full cache's run for other configurations; None where that cannot be."""
        settings = self.settings
        if self.references is None or not configuration.is_baseline or self.start is not None:
            return None
        if settings.prefix_store is not None or settings.packed is not None or settings.runtime_config is not None:
            return None
        return FullCacheRecorder(runner)

    def _find_full_run(self, configuration: Configuration, document: Document, runner: Runner) -> CachedScores | None:
        """Return the full cache's run of a document, if this configuration computes the same bits until it evicts."""
        if self.references is None or configuration.is_baseline or self.start is not None:
            return None
        has_same_graph = self._get_session_key(runner.policy) == (False, False)
        if not has_same_graph and runner.session.share(attentions=False) is None:
            return None
        return read_full_cache_run(get_reference_path(Path(self.references), document))

    def _begin_document(
        self, runner: Runner, configuration: Configuration, document: Document, advance: AdvanceCallback | None
    ) -> tuple[LayerDistanceStats, ...] | None:
        """Load the initial cache, or compute its tokens here and return how far the two differ."""
        if self.start is None:
            return None
        layers = load_layers(Path(self.start))
        if configuration.uses_initial_cache:
            runner.load_initial(layers)
            return None
        feed_unscored(runner, document.ids, document.scored_from, self.settings.chunk, self.settings.prompt, advance)
        runner.timings = RunTimings()
        runner.cache.peak_nbytes = runner.cache.nbytes
        return tuple(measure_distances_to_model(layers, runner.cache.copy_layers()))

    def _find_quantized_start(self, configuration: Configuration, document: Document) -> QuantizedStart | None:
        """Return what the initial cache takes in its file; None unless the row continues from a quantised one."""
        if self.start is None or not configuration.uses_initial_cache:
            return None
        token_bytes = load_token_bytes(Path(self.start))
        return None if token_bytes is None else QuantizedStart(document.scored_from, token_bytes)

    def measure_by_definition(
        self, configuration: Configuration, document: Document, advance: AdvanceCallback | None = None
    ) -> ProjectCell:
        """Measure a document by the definition of the configuration's project."""
        if configuration.definition is None:
            raise KvmnnError(f"{configuration.label}: belongs to no preset's project")
        runner = self.create_runner(configuration, document)
        ids = document.own_ids[: document.num_scored]
        try:
            cell = measure_by_definition(runner, ids, configuration.definition, _list_skipped_layers(runner))
        except KvmnnError as exc:
            raise UnsupportedConfigurationError(f"{configuration.label} by its project's definition: {exc}") from exc
        if advance is not None:
            advance(len(ids))
        return cell

    def measure_timing_cell(self, configuration: Configuration, document: Document) -> TimingCell:
        """Measure TTFT, TPOT and attention time, and the times that the configuration's project defines."""
        runner = self.create_runner(configuration, document)
        definition = configuration.definition
        try:
            cell = measure_generation_times(runner, document.ids, self.settings.repeats)
            if definition is not None and definition.speed and self.settings.project_definitions:
                cell = replace(
                    cell, project_times=measure_project_times(runner, document.own_ids, self.settings.repeats)
                )
            return self._add_attention_time(cell, runner, document)
        except KvmnnError as exc:
            raise UnsupportedConfigurationError(f"{configuration.label}, timed: {exc}") from exc

    def _open_stored_scores(self, runner: Runner) -> StoredScores | None:
        """Return the scores in the prefix store; None without one, or if the policy cannot continue from a prefix."""
        if self.settings.prefix_store is None or runner.codec is not None or not can_use_store(runner):
            return None
        if self._prefixes is None:
            settings = self.settings
            run_settings: dict[str, object] = {
                "chunk": settings.chunk,
                "prompt": settings.prompt,
                "threads": settings.threads,
            }
            run_settings |= {
                "providers": settings.providers,
                "onnxruntime": import_optional("onnxruntime").__version__,
                "numbers": SCORES_VERSION,
            }
            prefix_store = PrefixStore(self.settings.prefix_store, key=load_key())
            self._prefixes = prefix_store, compute_fingerprint(self.model), run_settings
        store, model, session_settings = self._prefixes
        attentions, bias = self._get_session_key(runner.policy)
        return StoredScores(store, model, {**session_settings, "attentions": attentions, "bias": bias})

    def close(self) -> None:
        """Close the prefix store."""
        if self._prefixes is not None:
            self._prefixes[0].close()
            self._prefixes = None

    def _add_attention_time(self, cell: TimingCell, runner: Runner, document: Document) -> TimingCell:
        session_key = self._get_session_key(runner.policy)

        def open_profiled(folder: Path) -> DecoderSession:
            self._sessions.pop(session_key, None)  # a large model is held once
            return self._open_session(*session_key, folder)

        try:
            attention_stats = measure_attention_time(runner, document.ids, open_profiled)
        except KvmnnError as exc:
            return replace(cell, no_attention=str(exc))
        return cell if attention_stats is None else replace(cell, attention_seconds=attention_stats.seconds)

    def _get_session_key(self, policy: Policy) -> tuple[bool, bool]:
        """Return whether a session for the policy needs attention probabilities, and whether it needs a bias input."""
        return policy.requires_attention, self.settings.slack != 0 and policy.can_evict

    def _get_session(self, attentions: bool, bias: bool) -> DecoderSession:
        key = (attentions, bias)
        if key not in self._sessions:
            candidates = (session.share(attentions=attentions) for session in self._sessions.values())
            shared = next((session for session in candidates if session is not None), None)
            self._sessions[key] = shared or self._open_session(attentions, bias)
        return self._sessions[key]

    def _open_session(self, attentions: bool, bias: bool, profile: Path | None = None) -> DecoderSession:
        return DecoderSession.open(
            self.model,
            attentions=attentions,
            bias=bias,
            threads=self.settings.threads,
            providers=self.settings.providers,
            profile=profile,
        )


class _ByteSampler:
    """Mean of the cache bytes over the tokens fed after the first `begin`."""

    def __init__(self, runner: Runner, begin: int = 0) -> None:
        self._runner = runner
        self._sum = 0
        self._begin = self.num_seen = begin

    def record(self, num_seen: int) -> None:
        self._sum += self._runner.cache.nbytes * (num_seen - self.num_seen)
        self.num_seen = num_seen

    @property
    def mean(self) -> float:
        return self._sum / max(self.num_seen - self._begin, 1)


def _list_skipped_layers(runner: Runner) -> tuple[int, ...]:
    """List the layers that the policy never cuts."""
    return tuple(sorted(runner.policy.resolve_skip_layers(runner.session.interface.layers)))


def _build_model_info(session: DecoderSession) -> ModelInfo:
    interface = session.interface
    return ModelInfo(
        layers=interface.layers,
        kv_heads=interface.kv_heads,
        query_heads=session.query_heads,
        head_dim=interface.head_dim,
        cache_dtype=np.dtype(interface.dtype).name,
        vocab=interface.vocab_size,
        max_positions=interface.max_positions,
        windowed_layers=len(interface.windows),
        window=max(interface.windows.values(), default=None),
    )
