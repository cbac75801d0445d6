"""Make profiles: of a model and texts, or of caches alone (docs/profile.md)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.text import pluralize
from .._util.validation import validate_int
from ..arrays.layer_cache import LayerCache
from ..arrays.source import list_losses
from ..dense import RopeConfig
from ..dtypes import PARTS, Part, infer_dtype
from ..errors import REPLACE_HINT, KvmnnError, OutputError
from ..files.atomic import FileOutput
from ..files.schema import Record, loads_strict
from ..formats import open as open_source
from ..linear import build_tables as build_linear_tables
from ..lm.onnx.model_files import compute_fingerprint, find_model
from ..lm.session import DecoderSession
from ..lm.tokenizer import Tokenizer
from ..profiles import (
    LayerGeometry,
    Profile,
    ProfileInfo,
    Statistics,
    TableSize,
    TextOrigin,
    describe_few_tokens,
    measure_tables,
)
from ..profiles.statistics import NUM_SINKS
from ..reports.table import wrap_sentences
from ..store.adapters import read_layer_caches
from ..transform import MODES, TransformMode
from ..transform import Metrics as TransformMetrics
from ..transform import build_tables as build_transform_tables
from .layers import find_cache_layers, read_model_layers
from .metrics import KeyMetrics, Metric, Metrics, compute_value_metrics
from .queries import QueryMoments
from .sensitivity import RowTransform, SensitivityProbe
from .texts import TextWindow, list_origins, read_windows

Progress = Callable[[int], object]
Sensitivities = dict[tuple[int, Part], float]

MAX_BELOW = 2
DEFAULT_TOKENS = 8192
_PROBE_PREFIX_TOKENS, _PROBE_TOKENS, _NUM_PROBES = 384, 128, 2
_STEP_TOKENS = 128
"""More at once take more memory: with 252 the peak of SmolLM2-135M is a fifth higher."""
_STEPS_PER_SAMPLE = 2
_QUERIES_PER_SAMPLE = 4
_TEXT_WIDTH = 80
_STATE_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What a profile is made of, and how.

    Parameters
    ----------
    tokens
        Tokens of the texts that the model reads.
    below
        For each of these numbers (0, 1, 2) tables of streams in which so many layers below a layer predict it.
    name
        Name of the model in the profile; by default that of its path.
    threads
        Threads of onnxruntime; 0 leaves the number to it.
    purpose
        ``"lossless"``: tables of linear streams alone, for which the model only reads the texts. ``"lossy"``: of
        transform streams, and the model's queries. None: all.
    transform
        How transform streams turn rows: as `kvmnn.transform.build_tables` has it.
    """

    tokens: int = DEFAULT_TOKENS
    below: tuple[int, ...] = (2,)
    purpose: Literal["lossless", "lossy"] | None = None
    transform: TransformMode = "joint"
    name: str | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        validate_int(self.tokens, "tokens", 64)
        for number in self.below:
            validate_int(number, "below", 0, MAX_BELOW)
        if not self.below or len(set(self.below)) < len(self.below):
            raise KvmnnError(f"below is {list(self.below)}: expected some of 0, 1 and 2")
        validate_int(self.threads, "threads", 0)
        if self.purpose not in (None, "lossless", "lossy"):
            raise KvmnnError(f"purpose is {self.purpose!r:.40}: expected 'lossless', 'lossy' or None")
        if self.transform not in MODES:
            raise KvmnnError(f"transform is {self.transform!r:.40}: expected one of {', '.join(MODES)}")


@dataclass(frozen=True, kw_only=True)
class ProfileMakeResult(Record):
    """A profile that was made."""

    output: str
    nbytes: int = field(metadata={"key": "bytes"})
    #: The profile's key, in hexadecimal.
    key: str
    model: str
    layers: int
    #: Tokens that were read, and texts or caches.
    tokens: int
    texts: int
    #: Bytes of each kind of tables, such as ``"linear"``.
    tables: tuple[TableSize, ...]
    #: Whether metrics and sensitivities of the model are in it; else lossy steps follow the size of the elements.
    has_sensitivities: bool
    #: CPU seconds of this process for reading, for the sensitivities, and for building tables.
    reading_seconds: float
    sensitivity_seconds: float
    table_seconds: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        tables = ", ".join(f"{table.kind} {table.nbytes:,} bytes" for table in self.tables)
        lines = [
            f"{self.output}: profile of {self.model}, {pluralize(self.layers, 'layer')}, {self.nbytes:,} bytes",
            f"  of {self.tokens:,} tokens in {pluralize(self.texts, 'text')}; tables: {tables}",
            f"  key {self.key[:16]}, CPU time of this run: {self.reading_seconds:.0f} s reading, "
            f"{self.sensitivity_seconds:.0f} s sensitivities, {self.table_seconds:.0f} s tables",
        ]
        if self.notes:
            lines += ["", wrap_sentences(self.notes, _TEXT_WIDTH)]
        return "\n".join(lines)


def make_profile(
    model: str | os.PathLike[str],
    texts: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    options: ProfileOptions | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ProfileMakeResult:
    """Let a model read texts, and write its profile.

    What was read is kept in a folder ``<output>.partial`` until the profile is there: the same call goes on where
    another one was interrupted; one with other options, texts or model needs `overwrite`.

    Parameters
    ----------
    model
        An ONNX decoder: file, folder, or a pulled model of the catalog.
    texts
        Files and folders, as `kvmnn.lm.evaluate` takes them.
    output
        The profile, ``.kvmp``.
    options
        How much is read, and what is made of it.
    overwrite
        Replace an existing output, and what another interrupted call has kept.
    progress
        Called with the number of steps of the model that were made since the last call.

    Raises
    ------
    MissingDependencyError
        If onnxruntime, onnx or tokenizers is not installed.
    SourceError, ModelError
        For a model, tokenizer or text that cannot be read, and a rotation that is not known.
    OutputError
        For an output that exists or cannot be written.
    KvmnnError
        For texts that are too short.
    """
    options = options or ProfileOptions()
    _check_output(output, overwrite)
    notes: list[str] = []
    files = find_model(model)
    tokenizer = Tokenizer.open_for_model(model)
    is_lossy = options.purpose != "lossless"
    session = DecoderSession.open(model, attentions=is_lossy and _has_queries(model), threads=options.threads)
    interface = session.interface
    windows = read_windows(texts, tokenizer, options.tokens, interface.max_positions, notes)
    layers, layer_notes = read_model_layers(files, interface, max(len(window.ids) for window in windows))
    notes += layer_notes
    fingerprint = compute_fingerprint(model)
    work = _WorkFolder(output, fingerprint, windows, layers, is_lossy)
    start = time.process_time()
    query_heads = session.query_heads or interface.kv_heads
    queries = QueryMoments(session.read_layer_parameters(), query_heads, interface.kv_heads, interface.head_dim)
    statistics, key_metrics = work.load(layers, queries, notes, overwrite=overwrite)
    for index in range(statistics.num_texts, len(windows)):
        caches = _read_window(session, windows[index], key_metrics, queries, progress)
        statistics.add(caches)
        queries.add_keys(caches)
        work.save(statistics, key_metrics, queries)
    reading_seconds, start = time.process_time() - start, time.process_time()
    metrics: Metrics = {}
    sensitivities: Sensitivities = {}
    if is_lossy:
        value_metrics = compute_value_metrics(files, interface, layers)
        metrics = _collect_metrics(key_metrics, value_metrics, notes, has_queries=session.has_attentions)
        sensitivities = _measure_sensitivities(session, windows, statistics, metrics, work, progress)
    sensitivity_seconds = time.process_time() - start
    info = ProfileInfo(
        model=options.name or Path(model).name,
        fingerprint=fingerprint,
        dtype=infer_dtype(np.empty(0, interface.dtype)).name,
        texts=list_origins(windows),
        layers=tuple(layers),
        settings=_describe_options(options, bool(sensitivities)),
    )
    result = _write_profile(
        output, info, statistics, metrics, sensitivities, options, overwrite,
        (reading_seconds, sensitivity_seconds), notes, queries.build_tables() if is_lossy else None,
    )  # fmt: skip
    work.remove()
    return result


def make_profile_from_caches(
    caches: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    options: ProfileOptions | None = None,
    *,
    rope: RopeConfig | Literal["none", "auto"] = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ProfileMakeResult:
    """Write a profile of caches alone: means and covariances, without what only a model tells.

    Parameters
    ----------
    caches
        Anything that `kvmnn.open` reads, each all of the tokens of a text from the first one on.
    rope
        Rotation of K in all layers; ``"auto"`` finds that of each layer by trial in the first cache.

    Raises
    ------
    SourceError
        For a cache that cannot be read, or lacks tokens.
    KvmnnError
        For caches of different models.
    OutputError
        As `make_profile`, whose other parameters are the same.
    """
    options = options or ProfileOptions()
    _check_output(output, overwrite)
    start = time.process_time()
    statistics: Statistics | None = None
    origins: list[TextOrigin] = []
    notes: list[str] = []
    losses: dict[str, str] = {}
    dtype_name = ""
    for path in caches:
        source = open_source(path)
        for loss in list_losses(source.metadata):
            losses.setdefault(loss, Path(path).name)
        layers = read_layer_caches(source)
        if statistics is None:
            geometries, notes = find_cache_layers(layers, rope)
            statistics, dtype_name = Statistics(geometries), layers[0].dtype
        try:
            statistics.add(layers)
        except KvmnnError as error:
            raise KvmnnError(f"{os.fspath(path)}: {error}") from None
        origins.append(TextOrigin(name=Path(path).name, sha256=None, tokens=layers[0].tokens))
        if progress is not None:
            progress(1)
    if statistics is None:
        raise KvmnnError("a profile is made of at least one cache")
    notes += [f"{name}: {loss}; the profile is of what is left." for loss, name in losses.items()]
    if options.purpose != "lossless":
        notes.append(
            "Made of caches alone: lossless tables are complete; steps of lossy streams follow the size of the "
            "elements, as only a model tells what errors cost."
        )
    info = ProfileInfo(
        model=options.name or Path(caches[0]).name,
        fingerprint=None,
        dtype=dtype_name,
        texts=tuple(origins),
        layers=statistics.layers,
        settings=_describe_options(options, False),
    )
    reading_seconds = time.process_time() - start
    return _write_profile(output, info, statistics, {}, {}, options, overwrite, (reading_seconds, 0.0), notes)


def _write_profile(
    output: str | os.PathLike[str],
    info: ProfileInfo,
    statistics: Statistics,
    metrics: Metrics,
    sensitivities: Sensitivities,
    options: ProfileOptions,
    overwrite: bool,
    seconds: tuple[float, float],
    notes: Sequence[str],
    query_tables: Mapping[str, npt.NDArray[Any]] | None = None,
) -> ProfileMakeResult:
    start = time.process_time()
    transform_metrics = _to_transform_metrics(statistics, metrics) if metrics else None
    by_layer = None
    if sensitivities:
        by_layer = [[sensitivities[layer, part] for part in PARTS] for layer in range(len(info.layers))]
    arrays: dict[str, npt.NDArray[Any]] = dict(query_tables or {})
    for below in sorted(options.below):
        if options.purpose != "lossy":
            arrays |= build_linear_tables(statistics, below=below)
        if options.purpose != "lossless":
            arrays |= build_transform_tables(
                statistics, transform_metrics, by_layer, below=below, mode=options.transform
            )
    profile = Profile(info, arrays)
    profile.write(output, force=overwrite)
    return ProfileMakeResult(
        output=os.fspath(output),
        nbytes=profile.nbytes,
        key=profile.key.hex(),
        model=info.model,
        layers=len(info.layers),
        tokens=info.tokens,
        texts=len(info.texts),
        tables=measure_tables(profile),
        has_sensitivities=bool(sensitivities),
        reading_seconds=seconds[0],
        sensitivity_seconds=seconds[1],
        table_seconds=time.process_time() - start,
        notes=(*notes, *describe_few_tokens(info)),
    )


def _describe_options(options: ProfileOptions, has_sensitivities: bool) -> dict[str, Any]:
    """Return the settings as the profile has them."""
    transform = {} if options.purpose == "lossless" else {"transform": options.transform}
    return {"below": list(options.below), "sensitivities": has_sensitivities, **transform}


def _collect_metrics(
    key_metrics: KeyMetrics, value_metrics: Metrics | None, notes: list[str], *, has_queries: bool
) -> Metrics:
    metrics: Metrics = key_metrics.to_metrics() if key_metrics.num_queries else {}
    if not metrics:
        reason = "the texts are too short" if has_queries else "the graph has no outputs queries.{i}"
        notes.append(f"{reason}: errors of K count alike in all directions")
    if value_metrics is None:
        notes.append("the output projections were not found: errors of V count alike in all directions")
    return metrics | (value_metrics or {})


def _to_transform_metrics(statistics: Statistics, metrics: Metrics) -> TransformMetrics:
    """Return the metrics of all layers; all errors of a side without one count alike."""
    by_part: dict[Part, list[Metric]] = {part: [] for part in PARTS}
    for layer, geometry in enumerate(statistics.layers):
        for part in PARTS:
            identity = np.broadcast_to(
                np.eye(geometry.get_dim(part)), (geometry.kv_heads, *[geometry.get_dim(part)] * 2)
            )
            by_part[part].append(metrics.get((layer, part), identity))
    return TransformMetrics(key=by_part["key"], value=by_part["value"])


def _check_output(output: str | os.PathLike[str], overwrite: bool) -> None:
    if not overwrite and Path(output).exists():
        raise OutputError(f"{os.fspath(output)}: exists already ({REPLACE_HINT} replaces it)")


def _has_queries(model: str | os.PathLike[str]) -> bool:
    """Return whether a graph reports queries, without which attention probabilities are of no use."""
    from ..lm.onnx.interface import read_interface
    from ..lm.onnx.model_files import read_onnx_graph

    files = find_model(model)
    return read_interface(read_onnx_graph(files.graph), files).query_outputs is not None


def _read_window(
    session: DecoderSession,
    window: TextWindow,
    key_metrics: KeyMetrics,
    queries: QueryMoments,
    progress: Progress | None,
) -> list[LayerCache]:
    """Let the model read a window, and return K and V; after some steps a few tokens give their attention as well."""
    past, position = session.create_empty_past(), 0
    has_queries = session.has_attentions and session.interface.query_outputs is not None
    steps = [(_STEP_TOKENS - _QUERIES_PER_SAMPLE // _STEPS_PER_SAMPLE, False)] * _STEPS_PER_SAMPLE
    while position < len(window.ids):
        for size, is_sampled in [*steps, (_QUERIES_PER_SAMPLE, has_queries)]:
            ids = window.ids[position : position + size]
            if not len(ids):
                break
            positions = np.arange(position, position + len(ids), dtype=np.int64)
            result = session.run_step(ids, positions, past, attentions=is_sampled, queries=has_queries)
            if result.queries is not None:
                queries.add_queries(result.queries, position)
            past, position = result.present_pairs, position + len(ids)
            if result.queries is not None and result.attentions is not None:
                key_metrics.add(result.queries, result.attentions)
        if progress is not None:
            progress(1)
    return [LayerCache(layer=layer, keys=keys[0], values=values[0]) for layer, (keys, values) in enumerate(past)]


def _measure_sensitivities(
    session: DecoderSession,
    windows: Sequence[TextWindow],
    statistics: Statistics,
    metrics: Metrics,
    work: _WorkFolder,
    progress: Progress | None,
) -> Sensitivities:
    """Return the KL divergence per square of the step of each layer and side, as a mean over a few windows."""
    sites = [(layer, part) for layer in range(len(statistics.layers)) for part in PARTS]
    transforms = {site: RowTransform.from_statistics(statistics, *site, metrics.get(site)) for site in sites}
    values: dict[tuple[int, Part], list[float]] = {site: [] for site in sites}
    for index, (prefix, following) in enumerate(_select_probes(windows)):
        probe: SensitivityProbe | None = None
        for layer, part in sites:
            name = f"{index}/{layer}/{part}"
            if name not in work.sensitivities:
                if probe is None:
                    window = TextWindow(windows[0].document, prefix)
                    probe = SensitivityProbe(session, _read_plainly(session, window), following)
                value = probe.measure(layer, part, statistics.layers[layer], transforms[layer, part])
                work.add_sensitivity(name, value)
            values[layer, part].append(work.sensitivities[name])
            if progress is not None:
                progress(1)
    return {site: float(np.mean(site_values)) for site, site_values in values.items() if site_values}


def _select_probes(windows: Sequence[TextWindow]) -> list[tuple[Any, Any]]:
    """Return prefixes and what follows, of windows of different texts where there are enough."""
    first_by_name: dict[str, TextWindow] = {}
    for window in windows:
        first_by_name.setdefault(window.document.name, window)
    chosen = [*first_by_name.values(), *(w for w in windows if w not in list(first_by_name.values()))]
    probes = []
    for window in chosen[:_NUM_PROBES]:
        prefix = min(_PROBE_PREFIX_TOKENS, len(window.ids) // 2)
        probes.append((window.ids[:prefix], window.ids[prefix : prefix + _PROBE_TOKENS]))
    return probes


def _read_plainly(session: DecoderSession, window: TextWindow) -> list[LayerCache]:
    result = session.run_step(
        window.ids, np.arange(len(window.ids), dtype=np.int64), session.create_empty_past(), attentions=False
    )
    pairs = enumerate(result.present_pairs)
    return [LayerCache(layer=layer, keys=keys[0], values=values[0]) for layer, (keys, values) in pairs]


class _WorkFolder:
    """What was done so far, in a folder next to the output; of another model or other texts it is not used."""

    def __init__(
        self,
        output: str | os.PathLike[str],
        fingerprint: str,
        windows: Sequence[TextWindow],
        layers: Sequence[LayerGeometry],
        is_lossy: bool,
    ) -> None:
        self._folder = Path(f"{os.fspath(output)}.partial")
        digest = hashlib.sha256()
        for window in windows:
            digest.update(len(window.ids).to_bytes(8, "little") + window.ids.tobytes())
        self._settings = {
            "version": _STATE_VERSION,
            "fingerprint": fingerprint,
            "is_lossy": is_lossy,
            "ids": digest.hexdigest(),
            "layers": hashlib.sha256(json.dumps([layer.to_dict() for layer in layers]).encode()).hexdigest(),
        }
        self._statistics_path = self._folder / "statistics.kvms"
        self.sensitivities: dict[str, float] = {}

    def load(
        self, layers: Sequence[LayerGeometry], queries: QueryMoments, notes: list[str], *, overwrite: bool
    ) -> tuple[Statistics, KeyMetrics]:
        """Return what an earlier call has read, or nothing, and fill `queries`; add a note if it was damaged.

        `OutputError` if another call has read something, unless `overwrite`.
        """
        statistics, key_metrics, num_other_tokens = Statistics(layers), KeyMetrics(layers), 0
        try:
            document = loads_strict((self._folder / "state.json").read_bytes())
            loaded = Statistics.load(self._statistics_path)
            if document["settings"] != self._settings:
                # The statistics leave out sinks; every window has more tokens than these.
                num_other_tokens = loaded.num_tokens + loaded.num_skipped + NUM_SINKS * loaded.num_texts
            else:
                key_metrics.restore(loaded.extras)
                queries.restore(loaded.extras)
                sensitivities = {str(name): float(value) for name, value in document["sensitivities"].items()}
                statistics, self.sensitivities = loaded, sensitivities
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # nothing, or nothing that can be used
            key_metrics = KeyMetrics(layers)
            if self._statistics_path.exists():
                notes.append(f"{self._folder} of an interrupted command was damaged: all texts were read again.")
        if num_other_tokens and not overwrite:
            raise OutputError(
                f"{self._folder}: has {num_other_tokens:,} tokens of an interrupted command of other options, texts or "
                f"another model ({REPLACE_HINT} replaces them, another output keeps them)"
            )
        if not statistics.num_texts:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._statistics_path.unlink(missing_ok=True)  # of other settings than the state says from now on
            self._write_state()
        return statistics, key_metrics

    def save(self, statistics: Statistics, key_metrics: KeyMetrics, queries: QueryMoments) -> None:
        """Keep all that was read so far."""
        statistics.extras = key_metrics.to_arrays() | queries.to_arrays()
        statistics.save(self._statistics_path)

    def add_sensitivity(self, name: str, value: float) -> None:
        """Keep a sensitivity."""
        self.sensitivities[name] = value
        self._write_state()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write_state(self) -> None:
        document = {"settings": self._settings, "sensitivities": self.sensitivities}
        with FileOutput(self._folder / "state.json", force=True) as output:
            output.file.write(json.dumps(document).encode())
            output.commit()
