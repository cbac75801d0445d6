"""One cell of an evaluation: a model, a configuration, a document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ...errors import KvmnnError, MissingDependencyError
from ...lm.documents import Document
from ...lm.graph.fingerprint import fingerprint
from ...lm.runner import Clock, Runner
from ...lm.session import DecoderSession
from ...lm.start_files import layers_in
from ...optional import package
from ...policies.base import Policy
from ...reports.start import LayerDistance
from ...store import PrefixStore
from ..setup.configurations import Configuration
from ..setup.settings import Settings
from . import memory
from .attention_time import attention_time
from .cells import ModelFacts, ProjectCell, ScoreCell, TimingCell
from .lossless import frame_sizes
from .project_definitions import measure_by_definition
from .scoring import feed_unscored
from .start_distances import distances_of
from .stored_scores import StoredScores, can_begin, scored_with
from .timing import generation_times, project_generation_times
from .tracing import Tracer

NUMBERS = 1
"""Raised whenever rows or scores of a step are computed differently, so that those of before are not taken up."""

Advance = Callable[[int], object]
"""Takes a number of further tokens fed."""


class RefusedError(KvmnnError):
    """A configuration that the model cannot run, or not by its project's definition; others can go on."""


@dataclass
class Measurer:
    """Cells of one model, one after the other.

    Parameters
    ----------
    model
        Path of the model.
    settings
        How.
    start
        Directory of K and V that texts begin with (`kvmnn.lm.start`), where they do.
    fresh
        Whether this process does nothing else, so that its peak memory means something.
    """

    model: str
    settings: Settings
    start: str | None = None
    fresh: bool = False
    _sessions: dict[tuple[bool, bool], DecoderSession] = field(default_factory=dict)
    _prefixes: tuple[PrefixStore, str, dict[str, object]] | None = None

    def runner(self, configuration: Configuration, document: Document) -> Runner:
        """A model ready for a document, its policy drawing from a generator of the document's own.

        Raises
        ------
        RefusedError
            Where the model cannot run the configuration.
        """
        draw = (self.settings.seed, int(document.sha256[:12], 16))
        policy = configuration.make(draw)
        try:
            return Runner(
                self._session(*self._wanted(policy)),
                policy,
                slack=self.settings.slack,
                packed=self.settings.packed,
                lossless=self.settings.runtime,
                positions=configuration.positions,
            )
        except MissingDependencyError:
            raise
        except KvmnnError as exc:
            if not policy.evicts:
                raise
            raise RefusedError(f"{configuration.policy}: {exc}") from exc

    def score(
        self,
        configuration: Configuration,
        document: Document,
        advance: Advance | None = None,
        *,
        trace: bool = False,
        first: bool = False,
    ) -> ScoreCell:
        """Quality, time and bytes of one document; with `first`, the peak memory of this process as well."""
        settings = self.settings
        runner = self.runner(configuration, document)
        start = memory.begin() if first and self.fresh else None
        sampled = _Bytes(runner, document.begin)
        traced = Tracer(runner, document.fed, _skipped(runner)) if trace else None

        def after(seen: int) -> None:
            new = seen - sampled.seen
            sampled.after(seen)
            if traced is not None:
                traced.after(seen)
            if advance is not None:
                advance(new)

        stored = self._stored(runner)
        try:
            distances = self._begin(runner, configuration, document, advance)
            scored, taken = scored_with(
                stored,
                runner,
                document.ids,
                chunk=settings.chunk,
                prompt=settings.prompt,
                deep_from=settings.deep_from,
                after=after,
                held=document.begin,
            )
        except KvmnnError as exc:
            if not runner.policy.evicts:
                raise KvmnnError(f"{document.name}: {exc}") from exc
            raise RefusedError(f"{configuration.policy}, {document.name}: {exc}") from exc
        peak = None if start is None else start.peak()
        cache = runner.cache
        return ScoreCell(
            model=_facts(runner.session),
            every=scored.every,
            deep=scored.deep,
            seconds=scored.seconds,
            model_seconds=runner.clock.model_seconds,
            policy_seconds=runner.clock.policy_seconds,
            cache_bytes_mean=sampled.mean,
            cache_bytes_peak=cache.peak_nbytes,
            tokens_kept=tuple(cache.tokens),
            tokens_seen=cache.seen,
            process_peak_bytes=peak,
            process_opened_bytes=None if start is None else start.resident,
            frames=frame_sizes(cache.layers(), settings.frame_dtype, settings.threads),
            h2o=cache.h2o_figures(),
            runtime=runner.runtime_figures(),
            trace=None if traced is None else traced.course(),
            stored_tokens=taken,
            stored_notes=tuple(stored.notes) if stored is not None and stored.notes else None,
            distances=distances,
            cut_tokens=runner.cut_tokens,
        )

    def _begin(
        self, runner: Runner, configuration: Configuration, document: Document, advance: Advance | None
    ) -> tuple[LayerDistance, ...] | None:
        """The tokens of the start: its own K and V, or computed here; how far the two are apart in the latter case."""
        if self.start is None:
            return None
        layers = layers_in(Path(self.start))
        if configuration.begun:
            runner.start(layers)
            return None
        feed_unscored(runner, document.ids, document.begin, self.settings.chunk, self.settings.prompt, advance)
        runner.clock = Clock()
        runner.cache.peak_nbytes = runner.cache.nbytes
        return tuple(distances_of(layers, runner.cache.layers()))

    def by_definition(
        self, configuration: Configuration, document: Document, advance: Advance | None = None
    ) -> ProjectCell:
        """The document by the definition of the configuration's project."""
        if configuration.definition is None:
            raise KvmnnError(f"{configuration.label}: belongs to no preset's project")
        runner = self.runner(configuration, document)
        ids = document.own_ids[: document.tokens]
        try:
            cell = measure_by_definition(runner, ids, configuration.definition, _skipped(runner))
        except KvmnnError as exc:
            raise RefusedError(f"{configuration.label} by its project's definition: {exc}") from exc
        if advance is not None:
            advance(len(ids))
        return cell

    def timing(self, configuration: Configuration, document: Document) -> TimingCell:
        """TTFT, TPOT and attention time, and what the configuration's project times by its own definition."""
        runner = self.runner(configuration, document)
        definition = configuration.definition
        try:
            cell = generation_times(runner, document.ids, self.settings.repeats)
            if definition is not None and definition.speed and self.settings.project_definitions:
                cell = replace(cell, project=project_generation_times(runner, document.own_ids, self.settings.repeats))
            return self._with_attention(cell, runner, document)
        except KvmnnError as exc:
            raise RefusedError(f"{configuration.label}, timed: {exc}") from exc

    def _stored(self, runner: Runner) -> StoredScores | None:
        """The beginnings of texts in the prefix store, where there is one and the policy can begin with them."""
        if self.settings.prefix_store is None or not can_begin(runner):
            return None
        if self._prefixes is None:
            settings = self.settings
            how: dict[str, object] = {"chunk": settings.chunk, "prompt": settings.prompt, "threads": settings.threads}
            how |= {
                "providers": settings.providers,
                "onnxruntime": package("onnxruntime").__version__,
                "numbers": NUMBERS,
            }
            self._prefixes = PrefixStore(self.settings.prefix_store), fingerprint(self.model), how
        store, model, about = self._prefixes
        attentions, bias = self._wanted(runner.policy)
        return StoredScores(store, model, {**about, "attentions": attentions, "bias": bias})

    def close(self) -> None:
        """Let go of the prefix store."""
        if self._prefixes is not None:
            self._prefixes[0].close()
            self._prefixes = None

    def _with_attention(self, cell: TimingCell, runner: Runner, document: Document) -> TimingCell:
        wanted = self._wanted(runner.policy)

        def open_profiled(folder: Path) -> DecoderSession:
            self._sessions.pop(wanted, None)  # a large model is held once
            return self._open(*wanted, folder)

        try:
            found = attention_time(runner, document.ids, open_profiled)
        except KvmnnError as exc:
            return replace(cell, no_attention=str(exc))
        return cell if found is None else replace(cell, attention_seconds=found.seconds)

    def _wanted(self, policy: Policy) -> tuple[bool, bool]:
        """Whether the policy's sessions give attention probabilities, and take biases."""
        return policy.needs_attention, self.settings.slack != 0 and policy.evicts

    def _session(self, attentions: bool, bias: bool) -> DecoderSession:
        key = (attentions, bias)
        if key not in self._sessions:
            self._sessions[key] = self._open(attentions, bias)
        return self._sessions[key]

    def _open(self, attentions: bool, bias: bool, profile: Path | None = None) -> DecoderSession:
        return DecoderSession.open(
            self.model,
            attentions=attentions,
            bias=bias,
            threads=self.settings.threads,
            providers=self.settings.providers,
            profile=profile,
        )


class _Bytes:
    """Mean of the bytes held, over the tokens fed from one on."""

    def __init__(self, runner: Runner, begin: int = 0) -> None:
        self._runner = runner
        self._sum = 0
        self._begin = self.seen = begin

    def after(self, seen: int) -> None:
        self._sum += self._runner.cache.nbytes * (seen - self.seen)
        self.seen = seen

    @property
    def mean(self) -> float:
        return self._sum / max(self.seen - self._begin, 1)


def _skipped(runner: Runner) -> tuple[int, ...]:
    """Layers that the policy never cuts."""
    return tuple(sorted(runner.policy.skipped(runner.session.interface.layers)))


def _facts(session: DecoderSession) -> ModelFacts:
    interface = session.interface
    return ModelFacts(
        layers=interface.layers,
        kv_heads=interface.kv_heads,
        query_heads=session.query_heads,
        head_dim=interface.head_dim,
        cache_dtype=np.dtype(interface.dtype).name,
        vocab=interface.vocab,
        max_positions=interface.max_positions,
    )
