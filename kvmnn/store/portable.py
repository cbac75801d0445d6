"""A stored text as one file, to be taken to another machine."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dtypes import Bytes
from ..errors import SourceError
from ..files.json_document import parse
from ..files.mapped import MappedFile
from ..files.output import FileOutput
from ..frames.hashing import checksum
from .decoding import DamagedStretchError, Stretch, check_unit, decode_stretches
from .lookup import Place
from .space import Space, from_json
from .table_sets import MOST_BYTES, KeptTables, TableSets
from .token_ids import MAX_TOKENS, Ids
from .unit import DamagedError
from .unit import parse as parse_unit

MAGIC = b"KVMNNPX2"
_UNCHECKED = b"KVMNNPX1"
"""Of files whose document has no checksum, as kvmnn wrote them at first."""
_SIZE = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")
_MAX_UNITS = 1 << 20
_MAX_TABLES = 1 << 10
_MAX_DOCUMENT = 64 << 20


def write(
    path: str | os.PathLike[str],
    space: Space,
    places: list[tuple[Place, Bytes]],
    tables: Sequence[TableSets],
    *,
    force: bool,
) -> int:
    """Write the units of a text and their tables behind a document that says which tokens of each unit
    are meant; bytes.
    """
    units = [{"bytes": data.size, "skip": place.skip, "take": place.take} for place, data in places]
    kept = [{"bytes": len(each.data), "key": each.key.hex()} for each in tables]
    about: dict[str, Any] = {"space": space.to_json(), "units": units, **({"tables": kept} if kept else {})}
    document = json.dumps(about).encode()
    with FileOutput(path, force=force) as output:
        output.file.write(MAGIC + _SIZE.pack(len(document)) + _CHECKSUM.pack(checksum(document)) + document)
        for _, data in places:
            output.file.write(data.data)
        for each in tables:
            output.file.write(each.data)
        output.commit()
    nbytes = sum(data.size for _, data in places) + sum(len(each.data) for each in tables)
    return len(MAGIC) + _SIZE.size + _CHECKSUM.size + len(document) + nbytes


def read_exported(path: str | os.PathLike[str], threads: int | None = None) -> tuple[str, Ids, list[LayerCache]]:
    """The text in a file that `PrefixStore.export` made, every byte of its units compared.

    Returns
    -------
    Fingerprint of the model, token ids, and K and V of all layers: what `PrefixStore.put` takes.

    Raises
    ------
    SourceError
        For a file that is none, or is damaged.
    """
    file = MappedFile(Path(path))
    document, begin = _document(file)
    root = parse(document, file.label, _MAX_DOCUMENT)
    space = from_json(root.at("space").text(), f"{file.label}: space")
    stretches: list[Stretch] = []
    tokens = 0
    for number, node in enumerate(root.at("units").items(least=1, most=_MAX_UNITS)):
        nbytes, skip, take = node.at("bytes").integer(1), node.at("skip").integer(0), node.at("take").integer(1)
        try:
            unit = parse_unit(file.view(begin, nbytes))
            if max(skip, take) > MAX_TOKENS or skip + take > unit.ids.size:
                raise DamagedError(f"has {unit.ids.size:,} tokens: {skip + take:,} are asked for")
            check_unit(unit, space, unit.ids, 0, MAX_TOKENS)
            if unit.start + skip != tokens:
                raise DamagedError(f"holds tokens from {unit.start + skip:,} on: those from {tokens:,} on are missing")
        except DamagedError as error:
            raise SourceError(f"{file.label}: unit {number} {error}") from None
        stretches.append(Stretch(unit, skip, take))
        begin += nbytes
        tokens += take
    kept: dict[str, bytes] = {}
    for node in root.at("tables").items(most=_MAX_TABLES) if "tables" in root.value else ():
        nbytes = node.at("bytes").integer(1)
        if nbytes > MOST_BYTES:
            raise node.at("bytes").wrong(f"at most {MOST_BYTES}")
        name = f"{space.key.hex()}-{node.at('key').text()}"
        kept[name] = file.view(begin, nbytes).tobytes()
        begin += nbytes
    if begin != file.size:
        raise SourceError(f"{file.label}: has {file.size - begin:,} bytes behind its units")
    try:
        layers = decode_stretches(space, stretches, threads, tables=KeptTables(kept.get, tuple))
    except DamagedStretchError as error:
        raise SourceError(f"{file.label}: unit {error.number}: {error}") from None
    ids = np.concatenate([unit.ids[skip : skip + take] for unit, skip, take in stretches])
    return space.model, ids, layers


def _document(file: MappedFile) -> tuple[bytes, int]:
    """The document, and where it ends."""
    head = file.head(len(MAGIC) + _SIZE.size + _CHECKSUM.size)
    begin = len(head) if head.startswith(MAGIC) else len(MAGIC) + _SIZE.size
    if not head.startswith((MAGIC, _UNCHECKED)) or len(head) < len(MAGIC) + _SIZE.size + _CHECKSUM.size:
        raise SourceError(f"{file.label}: is no exported prefix: it does not begin with {MAGIC.decode()}")
    (size,) = _SIZE.unpack_from(head, len(MAGIC))
    if size > _MAX_DOCUMENT or begin + size > file.size:
        raise SourceError(f"{file.label}: its document would have {size:,} bytes, the file has {file.size:,}")
    document = file.view(begin, size).tobytes()
    if head.startswith(MAGIC) and _CHECKSUM.unpack_from(head, len(MAGIC) + _SIZE.size)[0] != checksum(document):
        raise SourceError(f"{file.label}: its document does not match its checksum")
    return document, begin + size
