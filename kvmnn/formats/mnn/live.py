"""The files behind a running engine's caches (``kvcache_mmap``): pairs ``<16 hex digits>.k`` and ``.v``.

The name is an address and does not tell which layer a pair belongs to. The order in which the engine opened the files
does, and that can be asked of the system while the engine runs; without it the order in which they were made is taken,
which the engine's first step goes by, and which is said to be inferred.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import MissingOptionError, SourceError
from ...files.birth_time import read_birth_time
from ...files.output import DirectoryOutput
from .packed_files import PackedFiles, PackedLayer, size_of

_CLOCK_TICK_NS = 100 * 10**6  # times of files are as coarse as the system's clock ticks
_DATA = re.compile(r"(?P<address>[0-9A-F]{16})\.(?P<part>[kv])")


def is_live(listing: set[str]) -> bool:
    """Whether a directory listing has live files."""
    return any(_DATA.fullmatch(name) for name in listing)


def find(path: str, order: tuple[str, ...] = (), pid: int | None = None) -> PackedFiles:
    """The live files in a directory, layer by layer, or the pair that one file belongs to.

    Parameters
    ----------
    order
        The addresses in the order of the layers.
    pid
        The engine's process: the order of its open descriptors is taken (Linux).

    Raises
    ------
    SourceError
        When there are none, or a file of a pair is missing.
    MissingOptionError
        When several pairs are there and nothing tells their order.
    """
    notes: tuple[str, ...] = ()
    if os.path.isdir(path):
        folder, wanted = Path(path), None
    else:
        folder, wanted = Path(path).parent, _address(path)
    try:
        found = sorted({m["address"] for m in map(_DATA.fullmatch, os.listdir(folder)) if m})
    except OSError as exc:
        raise SourceError(f"{folder}: cannot be read: {exc.strerror or exc}") from exc
    if not found:
        raise SourceError(f"{path}: has no live cache files, <16 hex digits>.k and .v")
    if wanted is not None:
        addresses = [wanted]
    elif order:
        addresses = _said(path, found, order)
    elif pid is not None:
        addresses = open_order(folder, pid)
        if sorted(addresses) != found:
            raise SourceError(
                f"{path}: has {len(found)} pairs of files, but process {pid} has {len(addresses)} of them open"
            )
    elif len(found) == 1:
        addresses = found
    else:
        addresses, reason = order_by_birth(folder, found)
        if not addresses:
            raise MissingOptionError(
                f"{path}: nothing in the {len(found)} pairs of files tells their layers, {reason}: say --pid PID of "
                "the running engine, or --layer-order ADDRESS,ADDRESS,..."
            )
        notes = (
            f"order of the {len(found)} layers inferred from when their files were made; --pid PID of the running "
            f"engine knows it, --layer-order {','.join(addresses[:2])},... says it",
        )
    return PackedFiles(
        kind="live",
        name="",
        path=path,
        layers=tuple(_layer(folder, number, address) for number, address in enumerate(addresses)),
        notes=notes,
    )


def write(
    path: str, layers: Sequence[tuple[Any, Any]], *, first_address: int = 0x1000, force: bool = False
) -> tuple[str, ...]:
    """Write packed buffers as the files of a session with ``kvcache_mmap``, all or none.

    Parameters
    ----------
    path
        The directory.
    layers
        The packed K and V buffer of each layer, as bytes or contiguous arrays (`PackedCache.buffers`).
    first_address
        Stands for the address of the first layer's manager; each further layer is named 4096 bytes later.
    force
        Replace files that exist.

    Returns
    -------
    tuple of str
        The addresses in the order of the layers. The files do not tell it: it is what `find` wants as `order`.

    Raises
    ------
    OutputError
        When a file exists or cannot be written.
    SourceError
        When there is no layer, or an address does not fit 64 bits.
    """
    if not layers:
        raise SourceError(f"{path}: there is no layer to write")
    last = first_address + 4096 * (len(layers) - 1)
    if first_address < 0 or last >= 1 << 64:
        raise SourceError(f"{path}: addresses {first_address:#x} to {last:#x}: expected 64-bit numbers")
    addresses = tuple(f"{first_address + 4096 * number:016X}" for number in range(len(layers)))
    with DirectoryOutput(path, force=force) as directory:
        directory.check_names([f"{address}.{part}" for address in addresses for part in "kv"])
        for address, buffers in zip(addresses, layers, strict=True):
            for part, buffer in zip("kv", buffers, strict=True):
                directory.file(f"{address}.{part}").write(memoryview(buffer).cast("B"))
        directory.commit()
    return addresses


def open_order(folder: Path, pid: int) -> list[str]:
    """Addresses of the files in `folder` that a process has open, in the order of its descriptors.

    Raises
    ------
    SourceError
        When the process cannot be looked into, or K and V files disagree about the order.
    """
    descriptors = Path(f"/proc/{pid}/fd")
    orders: dict[str, list[str]] = {"k": [], "v": []}
    try:
        for number in sorted(os.listdir(descriptors), key=int):
            try:
                target = Path(os.readlink(descriptors / number))
            except FileNotFoundError:
                continue  # closed meanwhile
            found = _DATA.fullmatch(target.name)
            if found and target.parent == folder.resolve() and found["address"] not in orders[found["part"]]:
                orders[found["part"]].append(found["address"])
    except OSError as exc:
        raise SourceError(f"process {pid}: its open files cannot be listed: {exc.strerror or exc}") from exc
    if orders["k"] != orders["v"]:
        raise SourceError(f"process {pid}: its K and V files are open in different orders")
    return orders["k"]


def order_by_birth(folder: Path, addresses: Sequence[str]) -> tuple[list[str], str]:
    """Addresses in the order in which their files were made: by time, and by inode where times are equal.

    Returns
    -------
    tuple
        The addresses, none where times tell no order; and why they do not.
    """
    orders = []
    for part in "kv":
        made: list[tuple[int, int, str]] = []
        for address in addresses:
            file = str(folder / f"{address}.{part}")
            size_of(file)
            born, status = read_birth_time(file), os.stat(file)
            if born is None:
                return [], "and this file system does not keep when files were made"
            if status.st_mtime_ns < born - _CLOCK_TICK_NS:
                return [], "and they are copies, made in any order"
            made.append((born, status.st_ino, address))
        orders.append([address for _, _, address in sorted(made)])
    return (orders[0], "") if orders[0] == orders[1] else ([], "and K and V were made in different orders")


def _address(path: str) -> str:
    found = _DATA.fullmatch(Path(path).name)
    if not found:
        raise SourceError(f"{path}: is not named as live cache files are, <16 hex digits>.k or .v")
    return found["address"]


def _said(path: str, found: list[str], order: tuple[str, ...]) -> list[str]:
    said = [address.upper() for address in order]
    if sorted(said) != found:
        raise SourceError(f"{path}: has the files {', '.join(found)}, the order names {', '.join(said)}")
    return said


def _layer(folder: Path, layer: int, address: str) -> PackedLayer:
    key, value = str(folder / f"{address}.k"), str(folder / f"{address}.v")
    return PackedLayer(layer=layer, key=key, value=value, key_bytes=size_of(key), value_bytes=size_of(value))
