"""The shipped model is opened once for all evaluations in a process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_session(shared_sessions: None) -> None:
    """Share sessions in every test."""
