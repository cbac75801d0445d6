"""Which units a URL means: a directory, Redis or Valkey, or what fsspec opens."""

from __future__ import annotations

import os
from pathlib import Path

from ..checks import shown, whole
from ..errors import KvmnnError, MissingDependencyError, OptionError
from ..files.urls import SCHEME, without_secret
from .beside import CODECS, MAX_BLOCK_TOKENS, Settings, check_settings
from .directory_units import DirectoryUnits
from .remote import RemoteUnits
from .remote.object_values import ObjectValues
from .remote.redis_values import RedisValues
from .remote.values import Patient, Values
from .units import Units

BLOCK_TOKENS = 64
CODEC = "dense"
RAM_BYTES = 256 << 20
TIMEOUT = 5.0

_REDIS = ("redis", "rediss", "unix", "valkey", "valkeys")


def open_units(
    url: str | os.PathLike[str],
    *,
    max_bytes: int | None,
    ram_bytes: int | None,
    block_tokens: int | None,
    codec: str | None,
    timeout: float | None,
    read_only: bool,
    create: bool,
) -> Units:
    """The units at a URL; parameters and errors as `PrefixStore`."""
    if block_tokens is not None:
        block_tokens = whole(block_tokens, "block_tokens", 1, MAX_BLOCK_TOKENS)
    if max_bytes is not None:
        max_bytes = whole(max_bytes, "max_bytes", 1)
    if codec not in (None, *CODECS):
        raise OptionError(f"codec is {shown(codec)}: expected one of {', '.join(CODECS)}")
    made = Settings(block_tokens or BLOCK_TOKENS, codec or CODEC) if create else None
    name = os.fspath(url)
    if not name:
        raise OptionError("the store has no name: expected a directory, or a URL")
    found = SCHEME.match(name)
    if found is None:
        if ram_bytes is not None or timeout is not None:
            raise OptionError(f"{name}: ram_bytes and timeout are for stores past this machine, not for a directory")
        units = DirectoryUnits(Path(name), settings=made, max_bytes=max_bytes, read_only=read_only)
        try:
            check_settings(name, Settings(units.block_tokens, units.codec), block_tokens, codec)
        except OptionError:
            units.close()
            raise
        return units
    label = without_secret(name)
    return RemoteUnits(
        Patient(_values(found[1], name, label, _seconds(timeout)), label),
        block_tokens=block_tokens,
        codec=codec,
        made=made,
        ram_bytes=RAM_BYTES if ram_bytes is None else whole(ram_bytes, "ram_bytes", 0),
        read_only=read_only,
        max_bytes=max_bytes,
    )


def _values(scheme: str, url: str, label: str, timeout: float) -> Values:
    try:
        return (RedisValues if scheme in _REDIS else ObjectValues)(url, timeout)
    except KvmnnError:
        raise
    except ImportError as error:  # fsspec's protocols are packages of their own
        raise MissingDependencyError(f"{label}: {error}") from error
    except ValueError as error:  # of Redis' client and of fsspec, about the URL
        raise OptionError(
            f"{label}: is no URL of a store{'' if '@' in url or label != url else f': {error}'}"
        ) from error


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        return TIMEOUT
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not 0 < timeout <= 3600:
        raise KvmnnError(f"timeout is {timeout!r}: expected seconds above 0, at most 3,600")
    return float(timeout)
