"""Every `PrefixStore` of a test is encrypted, unless it is given a key of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

KEY = bytes(range(32))


def encrypt_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `PrefixStore` another default, and commands and other processes the environment's key."""
    from kvmnn.store import PrefixStore

    defaults = PrefixStore.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "key", KEY)
    monkeypatch.setenv("KVMNN_STORE_KEY", KEY.hex())


@pytest.fixture(params=["plain", "encrypted"], autouse=True)
def encryption(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run each test of a module that imports this twice."""
    if request.param == "encrypted":
        pytest.importorskip("cryptography")
        encrypt_all(monkeypatch)
    yield request.param
