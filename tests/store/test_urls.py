"""URLs of remote stores: invalid ones, missing packages, and secrets in messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefixes import MODEL

from kvmnn.errors import MissingDependencyError, OptionError
from kvmnn.store import PrefixStore


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://[x:1/0", r"redis://\[x:1/0: is no URL of a store: "),
        ("redis://h:port/0", "redis://h:port/0: is no URL of a store: .*'port'"),
        ("redis://h:99999/0", "is no URL of a store: "),
        ("redis://h/0?socket_timeout=x", "is no URL of a store: .*socket_timeout"),
        ("redis://h/0?nonsense=1", "is no URL of a store: its option 'nonsense' is unknown"),
        ("redis://h/prefixes", "is no URL of a store: 'prefixes' is no number of a database"),
        ("rediss://h/0/x", "is no URL of a store: '0/x' is no number of a database"),
        ("nowhere://x", "nowhere://x: is no URL of a store: .*nowhere"),
        ("redis://me:sec/ret@h/0", "is no URL of a store$"),
    ],
)
def test_open_invalid_url_is_refused(url: str, said: str) -> None:
    pytest.importorskip("redis")
    pytest.importorskip("fsspec")
    with pytest.raises(OptionError, match=said):
        PrefixStore(url)


def test_open_url_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")

    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(MissingDependencyError, match="s3://bucket/x: Install s3fs to access S3"):
        PrefixStore("s3://bucket/x")


def test_open_url_secrets_are_redacted() -> None:
    pytest.importorskip("redis")
    with PrefixStore("redis://me:secret@127.0.0.1:1/0", timeout=0.2) as store:
        (note,) = store.get([1], model=MODEL).notes
        assert "secret" not in note and "127.0.0.1:1/0" in note
    with PrefixStore("redis://127.0.0.1:1/0?password=hunter2&db=0", timeout=0.2) as store:
        (note,) = store.get([1], model=MODEL).notes
        assert "hunter2" not in note and "127.0.0.1:1/0?password=***&db=0: does not answer" in note
    with pytest.raises(OptionError) as error:
        PrefixStore("redis://127.0.0.1:1/x?password=hunter2")
    assert "hunter2" not in str(error.value)


def test_url_of_a_directory_store_is_refused(tmp_path: Path) -> None:
    """Another store in it would take its tables for its own, and remove them."""
    pytest.importorskip("fsspec")
    PrefixStore(tmp_path / "S").close()
    names = sorted(path.name for path in (tmp_path / "S").iterdir())
    with pytest.raises(OptionError, match="is the directory of a store: expected its path without file://"):
        PrefixStore(f"file://{tmp_path}/S")
    assert sorted(path.name for path in (tmp_path / "S").iterdir()) == names
