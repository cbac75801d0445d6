"""Garbage collections of measured rounds go through what a round made, not through all modules of a test run."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen_modules() -> None:
    """Leave out what there is: a round collects garbage when it closes sessions, which took a third of these tests."""
    gc.collect()
    gc.freeze()
