"""The time of attention, measured by a pass of its own: profiles slow a model down."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ...lm.documents import Ids
from ...lm.graph.profile import AttentionTimeStats
from ...lm.runner import Runner
from ...lm.session import DecoderSession
from .timing import NUM_WARM_UP_TOKENS, feed_prompt, split_prompt

OpenProfiled = Callable[[Path], DecoderSession]
"""Opens the runner's model once more, with a profile in a folder."""


def measure_attention_time(runner: Runner, ids: Ids, open_profiled: OpenProfiled) -> AttentionTimeStats | None:
    """Mean time of attention in the steps of one token whose TPOT is measured.

    Parameters
    ----------
    runner
        Of the configuration. Its session goes once the prompt is read, and another stands in for it, so that the model
        is held once.
    ids
        int64 ``[1 + tokens]``, as for `kvmnn.evaluation.measuring.timing.generation_times`.
    open_profiled
        Opens the same model with a profile; called once the runner has let go of its session.

    Returns
    -------
    None where the text is too short for a step.

    Raises
    ------
    ModelError
        Where the attention of the model cannot be told from the rest.
    """
    prompt, decoded_ids = split_prompt(ids)
    if not len(decoded_ids):
        return None
    runner.reset()
    feed_prompt(runner, prompt)
    del runner.session
    with TemporaryDirectory(prefix="kvmnn-profile-", ignore_cleanup_errors=True) as folder:
        session = open_profiled(Path(folder))
        with closing(session.open_profile()) as profile:
            shutil.rmtree(folder, ignore_errors=True)  # nothing is left behind, even if this process is killed
            _warm_up(session, runner, decoded_ids)
            runner.session = session
            for index in range(len(decoded_ids)):
                runner.step(decoded_ids[index : index + 1])
            return profile.read_attention_time(len(decoded_ids))


def _warm_up(session: DecoderSession, runner: Runner, decoded_ids: Ids) -> None:
    """Run the model on the runner's cache, of which nothing changes."""
    session.probe_unequal_lengths()  # tried now, not between the steps
    cache = runner.cache
    past = [(layer.keys[None], layer.values[None]) for layer in cache.copy_layers()]
    for token in decoded_ids[:NUM_WARM_UP_TOKENS]:
        session.run_step(np.array([token]), np.array([cache.num_seen]), past)
