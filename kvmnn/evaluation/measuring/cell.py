"""One cell of an evaluation: a model, a configuration, a document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ...errors import KvmnnError, MissingDependencyError
from ...lm.documents import Document
from ...lm.graph.fingerprint import compute_fingerprint
from ...lm.runner import Runner, RunTimings
from ...lm.session import DecoderSession
from ...lm.start_files import load_layers
from ...optional import import_optional
from ...policies.base import Policy
from ...reports.start import LayerDistanceStats
from ...store import PrefixStore
from ..setup.configurations import Configuration
from ..setup.settings import EvaluationSettings
from . import memory
from .attention_time import measure_attention_time
from .cells import ModelInfo, ProjectCell, ScoreCell, TimingCell
from .lossless import measure_frame_sizes
from .project_definitions import measure_by_definition
from .scoring import feed_unscored
from .start_distances import measure_distances
from .stored_scores import StoredScores, can_use_store, score_with_store
from .timing import measure_generation_times, measure_project_times
from .tracing import TimeSeriesRecorder

SCORES_VERSION = 1
"""Raised whenever rows or scores of a step are computed differently, so that those of before are not taken up."""

AdvanceCallback = Callable[[int], object]
"""Takes a number of further tokens fed."""


class UnsupportedConfigurationError(KvmnnError):
    """A configuration that the model cannot run, or not by its project's definition; others can go on."""


@dataclass
class CellMeasurer:
    """Cells of one model, one after the other.

    Parameters
    ----------
    model
        Path of the model.
    settings
        How.
    start
        Directory of K and V that texts begin with (`kvmnn.lm.start`), where they do.
    is_fresh_process
        Whether this process does nothing else, so that its peak memory means something.
    """

    model: str
    settings: EvaluationSettings
    start: str | None = None
    is_fresh_process: bool = False
    _sessions: dict[tuple[bool, bool], DecoderSession] = field(default_factory=dict)
    _prefixes: tuple[PrefixStore, str, dict[str, object]] | None = None

    def create_runner(self, configuration: Configuration, document: Document) -> Runner:
        """A model ready for a document, its policy drawing from a generator of the document's own.

        Raises
        ------
        RefusedError
            Where the model cannot run the configuration.
        """
        generator_seed = (self.settings.seed, int(document.sha256[:12], 16))
        policy = configuration.create_policy(generator_seed)
        try:
            return Runner(
                self._get_session(*self._get_session_key(policy)),
                policy,
                max_masked=self.settings.slack,
                packed=self.settings.packed,
                lossless=self.settings.runtime_config,
                positions=configuration.positions,
            )
        except MissingDependencyError:
            raise
        except KvmnnError as exc:
            if not policy.can_evict:
                raise
            raise UnsupportedConfigurationError(f"{configuration.policy}: {exc}") from exc

    def measure_score(
        self,
        configuration: Configuration,
        document: Document,
        advance: AdvanceCallback | None = None,
        *,
        record_trace: bool = False,
        measure_memory: bool = False,
    ) -> ScoreCell:
        """Quality, time and bytes of one document; with `measure_memory`, the peak memory of this process as well."""
        settings = self.settings
        runner = self.create_runner(configuration, document)
        memory_baseline = memory.start_measurement() if measure_memory and self.is_fresh_process else None
        byte_sampler = _ByteSampler(runner, document.scored_from)
        recorder = TimeSeriesRecorder(runner, document.num_fed, _list_skipped_layers(runner)) if record_trace else None

        def record_step(num_seen: int) -> None:
            num_new = num_seen - byte_sampler.num_seen
            byte_sampler.record(num_seen)
            if recorder is not None:
                recorder.record(num_seen)
            if advance is not None:
                advance(num_new)

        stored_scores = self._open_stored_scores(runner)
        try:
            distances = self._begin_document(runner, configuration, document, advance)
            score_result, num_from_store = score_with_store(
                stored_scores,
                runner,
                document.ids,
                chunk=settings.chunk,
                prompt=settings.prompt,
                tail_start=settings.deep_from,
                on_step=record_step,
                num_initial=document.scored_from,
            )
        except KvmnnError as exc:
            if not runner.policy.can_evict:
                raise KvmnnError(f"{document.name}: {exc}") from exc
            raise UnsupportedConfigurationError(f"{configuration.policy}, {document.name}: {exc}") from exc
        peak = None if memory_baseline is None else memory_baseline.read_peak()
        cache = runner.cache
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
            frames=measure_frame_sizes(cache.copy_layers(), settings.frame_dtype, settings.threads),
            h2o=cache.collect_h2o_stats(),
            runtime=runner.collect_runtime_stats(),
            trace=None if recorder is None else recorder.to_time_series(),
            stored_tokens=num_from_store,
            stored_notes=tuple(stored_scores.notes) if stored_scores is not None and stored_scores.notes else None,
            distances=distances,
            cut_tokens=runner.num_tokens_after_cut,
        )

    def _begin_document(
        self, runner: Runner, configuration: Configuration, document: Document, advance: AdvanceCallback | None
    ) -> tuple[LayerDistanceStats, ...] | None:
        """The tokens of the start: its own K and V, or computed here; how far the two are apart in the latter case."""
        if self.start is None:
            return None
        layers = load_layers(Path(self.start))
        if configuration.begun:
            runner.load_initial(layers)
            return None
        feed_unscored(runner, document.ids, document.scored_from, self.settings.chunk, self.settings.prompt, advance)
        runner.timings = RunTimings()
        runner.cache.peak_nbytes = runner.cache.nbytes
        return tuple(measure_distances(layers, runner.cache.copy_layers()))

    def measure_by_definition(
        self, configuration: Configuration, document: Document, advance: AdvanceCallback | None = None
    ) -> ProjectCell:
        """The document by the definition of the configuration's project."""
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

    def measure_timing(self, configuration: Configuration, document: Document) -> TimingCell:
        """TTFT, TPOT and attention time, and what the configuration's project times by its own definition."""
        runner = self.create_runner(configuration, document)
        definition = configuration.definition
        try:
            cell = measure_generation_times(runner, document.ids, self.settings.repeats)
            if definition is not None and definition.speed and self.settings.project_definitions:
                cell = replace(cell, project=measure_project_times(runner, document.own_ids, self.settings.repeats))
            return self._add_attention_time(cell, runner, document)
        except KvmnnError as exc:
            raise UnsupportedConfigurationError(f"{configuration.label}, timed: {exc}") from exc

    def _open_stored_scores(self, runner: Runner) -> StoredScores | None:
        """The beginnings of texts in the prefix store, where there is one and the policy can begin with them."""
        if self.settings.prefix_store is None or not can_use_store(runner):
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
            self._prefixes = PrefixStore(self.settings.prefix_store), compute_fingerprint(self.model), run_settings
        store, model, session_settings = self._prefixes
        attentions, bias = self._get_session_key(runner.policy)
        return StoredScores(store, model, {**session_settings, "attentions": attentions, "bias": bias})

    def close(self) -> None:
        """Let go of the prefix store."""
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
        """Whether the policy's sessions give attention probabilities, and take biases."""
        return policy.requires_attention, self.settings.slack != 0 and policy.can_evict

    def _get_session(self, attentions: bool, bias: bool) -> DecoderSession:
        key = (attentions, bias)
        if key not in self._sessions:
            self._sessions[key] = self._open_session(attentions, bias)
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
    """Mean of the bytes held, over the tokens fed from one on."""

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
    """Layers that the policy never cuts."""
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
    )
