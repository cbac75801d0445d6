"""Which units a URL means: a directory, Redis or Valkey, or what fsspec opens."""

from __future__ import annotations

import os
from pathlib import Path

from ..checks import repr_short, validate_int
from ..errors import KvmnnError, MissingDependencyError, OptionError
from ..files.urls import URL_SCHEME_PATTERN, redact_url
from .beside import MAX_BLOCK_TOKENS, STORE_CODECS, StoreSettings, check_settings_match
from .directory_units import DirectoryBackend
from .remote import RemoteBackend
from .remote.object_values import ObjectStoreValues
from .remote.redis_values import RedisStoreValues
from .remote.values import CircuitBreaker, KeyValueStore
from .units import StoreBackend

DEFAULT_BLOCK_TOKENS = 64
DEFAULT_CODEC = "dense"
DEFAULT_CACHE_BYTES = 256 << 20
DEFAULT_TIMEOUT_SECONDS = 5.0

_REDIS_SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys")


def open_backend(
    url: str | os.PathLike[str],
    *,
    max_bytes: int | None,
    ram_bytes: int | None,
    block_tokens: int | None,
    codec: str | None,
    timeout: float | None,
    read_only: bool,
    create: bool,
) -> StoreBackend:
    """The units at a URL; parameters and errors as `PrefixStore`."""
    if block_tokens is not None:
        block_tokens = validate_int(block_tokens, "block_tokens", 1, MAX_BLOCK_TOKENS)
    if max_bytes is not None:
        max_bytes = validate_int(max_bytes, "max_bytes", 1)
    if codec not in (None, *STORE_CODECS):
        raise OptionError(f"codec is {repr_short(codec)}: expected one of {', '.join(STORE_CODECS)}")
    new_settings = StoreSettings(block_tokens or DEFAULT_BLOCK_TOKENS, codec or DEFAULT_CODEC) if create else None
    name = os.fspath(url)
    if not name:
        raise OptionError("the store has no name: expected a directory, or a URL")
    scheme_match = URL_SCHEME_PATTERN.match(name)
    if scheme_match is None:
        if ram_bytes is not None or timeout is not None:
            raise OptionError(f"{name}: ram_bytes and timeout are for stores past this machine, not for a directory")
        units = DirectoryBackend(Path(name), settings=new_settings, max_bytes=max_bytes, read_only=read_only)
        try:
            check_settings_match(name, StoreSettings(units.block_tokens, units.codec), block_tokens, codec)
        except OptionError:
            units.close()
            raise
        return units
    label = redact_url(name)
    return RemoteBackend(
        CircuitBreaker(_open_key_values(scheme_match[1], name, label, _validate_timeout(timeout)), label),
        block_tokens=block_tokens,
        codec=codec,
        new_settings=new_settings,
        ram_bytes=DEFAULT_CACHE_BYTES if ram_bytes is None else validate_int(ram_bytes, "ram_bytes", 0),
        read_only=read_only,
        max_bytes=max_bytes,
    )


def _open_key_values(scheme: str, url: str, label: str, timeout: float) -> KeyValueStore:
    try:
        return (RedisStoreValues if scheme in _REDIS_SCHEMES else ObjectStoreValues)(url, timeout)
    except KvmnnError:
        raise
    except ImportError as error:  # fsspec's protocols are packages of their own
        raise MissingDependencyError(f"{label}: {error}") from error
    except ValueError as error:  # of Redis' client and of fsspec, about the URL
        raise OptionError(
            f"{label}: is no URL of a store{'' if '@' in url or label != url else f': {error}'}"
        ) from error


def _validate_timeout(timeout: float | None) -> float:
    if timeout is None:
        return DEFAULT_TIMEOUT_SECONDS
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not 0 < timeout <= 3600:
        raise KvmnnError(f"timeout is {timeout!r}: expected seconds above 0, at most 3,600")
    return float(timeout)
