"""Runs that are done, kept in a file, so that an interrupted suite goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from ...files.journal import JournalFormat, KeyedJournal

RUN_STORE_VERSION = 3
"""Raised whenever a run measures anything differently, so that runs of before are not reused."""

_JOURNAL_FORMAT = JournalFormat(
    tag="kvmnn_run",
    version=1,
    process_name="gate run",
    entry_description="a run of a gate suite",
    remedy="it is run again",
    skips_damage=True,
)


class RunStore(KeyedJournal):
    """Results of runs by the digest of everything that they depend on.

    Parameters
    ----------
    path
        A journal, made where it is not there; a line that a crash tore, or that somebody changed, is not used. None:
        in memory only.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        super().__init__(path, _JOURNAL_FORMAT)
        self.num_reused = 0

    def get(self, key: str) -> Any | None:
        """What is stored under a key; None where nothing is."""
        value = super().get(key)
        self.num_reused += value is not None
        return value


def compute_key(**about: Any) -> str:
    """The digest of what a run depends on."""
    return hashlib.sha256(json.dumps({"version": RUN_STORE_VERSION, **about}, sort_keys=True).encode()).hexdigest()
