"""Every `PrefixStore` of a test is encrypted, unless it is given a key of its own."""

from __future__ import annotations

import pytest

KEY = bytes(range(32))
PLAIN_ONLY = pytest.mark.parametrize("encryption", ["plain"], indirect=True)
"""For a test that reads or forges the bytes of a unit."""


def encrypt_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `PrefixStore` another default, and commands and other processes the environment's key."""
    from kvmnn.store import PrefixStore

    defaults = PrefixStore.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "key", KEY)
    monkeypatch.setenv("KVMNN_STORE_KEY", KEY.hex())
