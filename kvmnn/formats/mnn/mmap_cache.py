"""Files that back a running engine's caches (``kvcache_mmap``): pairs ``<16 hex digits>.k`` and ``.v``.

The name is an address and does not identify the layer of a pair. The order in which the engine opened the files does,
and the system reports it while the engine runs. Otherwise the order of creation is used, which is that of the engine's
first step, and a note says that it is inferred.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..._util.patterns import declare_pattern
from ...errors import MissingOptionError, SourceError
from ...files.atomic import DirectoryOutput
from ...files.file_info import read_birth_time
from .packed_files import PackedFiles, PackedLayer, get_file_size, list_folder

_MAX_CLOCK_TICK_NS = 100 * 10**6  # times of files are as coarse as the system's clock ticks
_DATA_NAME_REGEX = declare_pattern(r"(?P<address>[0-9A-F]{16})\.(?P<part>[kv])")


def has_mmap_files(listing: set[str]) -> bool:
    """Return whether a directory listing has live files."""
    return any(_DATA_NAME_REGEX.fullmatch(name) for name in listing)


def find_mmap_files(path: str, layer_order: tuple[str, ...] = (), pid: int | None = None) -> PackedFiles:
    """Return the live files in a directory, layer by layer, or the pair that one file belongs to."""
    notes: tuple[str, ...] = ()
    if os.path.isdir(path):
        folder, wanted_address = Path(path), None
    else:
        folder, wanted_address = Path(path).parent, _parse_address(path)
    name_matches = map(_DATA_NAME_REGEX.fullmatch, list_folder(folder))
    found_addresses = sorted({name_match["address"] for name_match in name_matches if name_match})
    if not found_addresses:
        raise SourceError(f"{path}: has no live cache files, <16 hex digits>.k and .v")
    if wanted_address is not None:
        addresses = [wanted_address]
    elif layer_order:
        addresses = _parse_layer_order(path, found_addresses, layer_order)
    elif pid is not None:
        addresses = list_open_addresses(folder, pid)
        if sorted(addresses) != found_addresses:
            raise SourceError(
                f"{path}: has {len(found_addresses)} pairs of files, but process {pid} has {len(addresses)} of them "
                f"open"
            )
    elif len(found_addresses) == 1:
        addresses = found_addresses
    else:
        addresses, reason = sort_by_creation(folder, found_addresses)
        if not addresses:
            raise MissingOptionError(
                f"{path}: nothing in the {len(found_addresses)} pairs of files tells their layers, {reason}: "
                "say --layer-order pid=PID of the running engine, or --layer-order ADDRESS,ADDRESS,..."
            )
        notes = (
            f"order of the {len(found_addresses)} layers inferred from when their files were made; --layer-order "
            f"pid=PID of the running engine knows it, --layer-order {','.join(addresses[:2])},... says it",
        )
    return PackedFiles(
        kind="live",
        name="",
        path=path,
        layers=tuple(PackedLayer.from_folder(folder, layer, address) for layer, address in enumerate(addresses)),
        notes=notes,
    )


def write_mmap_files(
    path: str, layers: Sequence[tuple[Any, Any]], *, first_address: int = 0x1000, force: bool = False
) -> tuple[str, ...]:
    """Write packed buffers as the files of a session with ``kvcache_mmap``, all or none."""
    if not layers:
        raise SourceError(f"{path}: there is no layer to write")
    last_address = first_address + 4096 * (len(layers) - 1)
    if first_address < 0 or last_address >= 1 << 64:
        raise SourceError(f"{path}: addresses {first_address:#x} to {last_address:#x}: expected 64-bit numbers")
    addresses = tuple(f"{first_address + 4096 * layer_number:016X}" for layer_number in range(len(layers)))
    with DirectoryOutput(path, force=force) as directory:
        directory.check_names([f"{address}.{part}" for address in addresses for part in "kv"])
        for address, buffers in zip(addresses, layers, strict=True):
            for part, buffer in zip("kv", buffers, strict=True):
                directory.open_file(f"{address}.{part}").write(memoryview(buffer).cast("B"))
        directory.commit()
    return addresses


def list_open_addresses(folder: Path, pid: int) -> list[str]:
    """Return the addresses in the names of the files in `folder` that a process has open, by ascending descriptor."""
    descriptor_folder = Path(f"/proc/{pid}/fd")
    addresses_by_part: dict[str, list[str]] = {"k": [], "v": []}
    try:
        for descriptor in sorted(os.listdir(descriptor_folder), key=int):
            try:
                target = Path(os.readlink(descriptor_folder / descriptor))
            except FileNotFoundError:
                continue  # closed meanwhile
            name_match = _DATA_NAME_REGEX.fullmatch(target.name)
            if name_match and target.parent == folder.resolve():
                addresses = addresses_by_part[name_match["part"]]
                addresses += [name_match["address"]] if name_match["address"] not in addresses else []
    except OSError as exc:
        raise SourceError(f"process {pid}: its open files cannot be listed: {exc.strerror or exc}") from exc
    if addresses_by_part["k"] != addresses_by_part["v"]:
        raise SourceError(f"process {pid}: its K and V files are open in different orders")
    return addresses_by_part["k"]


def sort_by_creation(folder: Path, addresses: Sequence[str]) -> tuple[list[str], str]:
    """Return addresses in the order of creation of their files: by time, and by inode if times are equal.

    Returns no addresses, and the reason, where the times are not those of the engine, which makes K and V of a layer
    and then writes both; what copies files writes each before it makes the next, in an order of its own.
    """
    orders, lives = [], []
    for part in "kv":
        file_times: list[tuple[int, int, str]] = []
        for address in addresses:
            file = str(folder / f"{address}.{part}")
            get_file_size(file)
            birth_ns, status = read_birth_time(file), os.stat(file)
            if birth_ns is None:
                return [], "and this file system does not keep when files were made"
            if status.st_mtime_ns < birth_ns - _MAX_CLOCK_TICK_NS:
                return [], "and they are copies, made in any order"
            file_times.append((birth_ns, status.st_ino, address))
            lives.append((birth_ns, status.st_mtime_ns))
        orders.append([address for _, _, address in sorted(file_times)])
    if not _has_overlap(lives):
        return [], "and each was written before the next was made, as copies are"
    return (orders[0], "") if orders[0] == orders[1] else ([], "and K and V were made in different orders")


def _has_overlap(lives: Sequence[tuple[int, int]]) -> bool:
    """Return whether a file was written after a later one was made; `lives` are times of creation and last writing."""
    last_write_ns = 0
    for birth_ns, write_ns in sorted(lives):
        if birth_ns < last_write_ns:
            return True
        last_write_ns = max(last_write_ns, write_ns)
    return False


def _parse_address(path: str) -> str:
    name_match = _DATA_NAME_REGEX.fullmatch(Path(path).name)
    if not name_match:
        raise SourceError(f"{path}: is not named as live cache files are, <16 hex digits>.k or .v")
    return name_match["address"]


def _parse_layer_order(path: str, found_addresses: list[str], layer_order: tuple[str, ...]) -> list[str]:
    ordered_addresses = [address.upper() for address in layer_order]
    if sorted(ordered_addresses) != found_addresses:
        raise SourceError(
            f"{path}: has the files {', '.join(found_addresses)}, the order names {', '.join(ordered_addresses)}"
        )
    return ordered_addresses
