"""What a run with the full cache leaves for other configurations: they compute nothing until they evict something.

Up to its first eviction a configuration does what the full cache does, step by step: K, V, logits and scores are the
same bits, as long as the same graph runs. So the full cache's run of a document writes K and V of all tokens, the
queries of its first step, and scores and times of every step next to its distributions; other configurations take
steps from there until their cache is no longer whole. Those that rank tokens by attention are computed from the
beginning.

Times of a step that was taken over are those of the run that computed it, and so is memory, where that was measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays.layer_cache import LayerCache
from ..dtypes import Floats
from ..lm.onnx.decoder import StepResult
from ..lm.runner import Runner
from .divergence import TokenScores
from .scoring import CachedScores

MAX_FOLDER_BYTES = 2 << 30
"""K, V and queries of all documents together; what would be more is not written."""

_CACHE_SUFFIX, _QUERY_SUFFIX, _STEP_SUFFIX = "-cache.npy", "-queries.npy", "-steps.npz"


class FullCacheRecorder:
    """Records a document as it is scored with the full cache.

    Parameters
    ----------
    runner
        Its runner, at the beginning of the text.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._queries: Sequence[Floats] | None = None
        self._nll: list[npt.NDArray[np.float64]] = []
        self._hits: list[npt.NDArray[np.bool_]] = []
        self._times: list[tuple[float, float]] = []
        self._peaks: list[int] = []
        runner.requests_queries = runner.session.interface.query_outputs is not None
        runner.on_step = self._record_queries

    def record_scores(self, logits: npt.NDArray[Any], scores: TokenScores) -> None:
        """Record the scores of a step."""
        self._nll.append(scores.nll)
        self._hits.append(scores.hits)

    def record_step(self, peak_bytes: int | None) -> None:
        """Record the end of a step, and the peak memory of the process so far."""
        timings = self._runner.timings
        self._times.append((timings.model_seconds, timings.policy_seconds))
        self._peaks.append(peak_bytes or 0)

    def write(self, path: Path) -> None:
        """Write the files of the document, unless those of all together were too large."""
        layers = self._runner.cache.copy_layers()
        queries = np.stack(self._queries) if self._queries is not None else None
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        nbytes += 0 if queries is None else queries.nbytes
        if nbytes + sum(entry.stat().st_size for entry in path.parent.glob("*.npy")) > MAX_FOLDER_BYTES:
            return
        np.save(f"{path}{_CACHE_SUFFIX}", np.stack([np.stack([layer.keys, layer.values]) for layer in layers]))
        if queries is not None:
            np.save(f"{path}{_QUERY_SUFFIX}", queries)
        times = np.diff(np.array([(0.0, 0.0), *self._times]), axis=0)
        partial_path = f"{path}-partial.npz"
        np.savez(
            partial_path, nll=np.concatenate(self._nll), hits=np.concatenate(self._hits), times=times,
            peaks=np.array(self._peaks, np.int64),
        )  # fmt: skip
        os.replace(partial_path, f"{path}{_STEP_SUFFIX}")  # last: the files are complete where it is there

    def _record_queries(self, step: StepResult) -> None:
        if step.queries is not None:  # views would hold all outputs of the step
            self._queries = [queries if queries.base is None else queries.copy() for queries in step.queries]
        self._runner.requests_queries, self._runner.on_step = False, None


def read_full_cache_run(path: Path) -> CachedScores | None:
    """Read what a recorder wrote for a document, K and V mapped; None where there is nothing."""
    if not Path(f"{path}{_STEP_SUFFIX}").exists():
        return None
    with np.load(f"{path}{_STEP_SUFFIX}") as steps:
        nll, hits, times, peaks = (steps[name] for name in ("nll", "hits", "times", "peaks"))
    cache = np.load(f"{path}{_CACHE_SUFFIX}", mmap_mode="r")
    query_path = Path(f"{path}{_QUERY_SUFFIX}")
    return CachedScores(
        tokens=cache.shape[3],
        layers=[LayerCache(layer=number, keys=layer[0], values=layer[1]) for number, layer in enumerate(cache)],
        nll=nll,
        hits=hits,
        queries=list(np.load(query_path)) if query_path.exists() else None,
        step_times=times,
        step_peaks=peaks,
    )
