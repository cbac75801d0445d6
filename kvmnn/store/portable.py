"""A stored text as one file, to be taken to another machine."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dtypes import Bytes
from ..errors import SourceError
from ..files.json_document import parse
from ..files.mapped import MappedFile
from ..files.output import FileOutput
from .decoding import DamagedStretchError, Stretch, check_unit, decode_stretches
from .lookup import Place
from .space import Space, from_json
from .token_ids import MAX_TOKENS, Ids
from .unit import DamagedError
from .unit import parse as parse_unit

MAGIC = b"KVMNNPX1"
_SIZE = struct.Struct("<I")
_MAX_UNITS = 1 << 20
_MAX_DOCUMENT = 64 << 20


def write(path: str | os.PathLike[str], space: Space, places: list[tuple[Place, Bytes]], *, force: bool) -> int:
    """Write the units of a text, as they are, behind a document that says which tokens of each are meant; bytes."""
    units = [{"bytes": data.size, "skip": place.skip, "take": place.take} for place, data in places]
    document = json.dumps({"space": space.to_json(), "units": units}).encode()
    with FileOutput(path, force=force) as output:
        output.file.write(MAGIC + _SIZE.pack(len(document)) + document)
        for _, data in places:
            output.file.write(data.data)
        output.commit()
    return len(MAGIC) + _SIZE.size + len(document) + sum(data.size for _, data in places)


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
    head = file.head(len(MAGIC) + _SIZE.size)
    if not head.startswith(MAGIC) or len(head) < len(MAGIC) + _SIZE.size:
        raise SourceError(f"{file.label}: is no exported prefix: it does not begin with {MAGIC.decode()}")
    (size,) = _SIZE.unpack_from(head, len(MAGIC))
    begin = len(head) + size
    if size > _MAX_DOCUMENT or begin > file.size:
        raise SourceError(f"{file.label}: its document would have {size:,} bytes, the file has {file.size:,}")
    root = parse(file.view(len(head), size).tobytes(), file.label, _MAX_DOCUMENT)
    space = from_json(root.at("space").text(), f"{file.label}: space")
    stretches: list[Stretch] = []
    for number, node in enumerate(root.at("units").items(least=1, most=_MAX_UNITS)):
        nbytes, skip, take = node.at("bytes").integer(1), node.at("skip").integer(0), node.at("take").integer(1)
        try:
            unit = parse_unit(file.view(begin, nbytes))
            if max(skip, take) > MAX_TOKENS or skip + take > unit.ids.size:
                raise DamagedError(f"has {unit.ids.size:,} tokens: {skip + take:,} are asked for")
            check_unit(unit, space, unit.ids, 0, MAX_TOKENS)
        except DamagedError as error:
            raise SourceError(f"{file.label}: unit {number} {error}") from None
        stretches.append(Stretch(unit, skip, take))
        begin += nbytes
    if begin != file.size:
        raise SourceError(f"{file.label}: has {file.size - begin:,} bytes behind its units")
    try:
        layers = decode_stretches(space, stretches, threads)
    except DamagedStretchError as error:
        raise SourceError(f"{file.label}: unit {error.number}: {error}") from None
    ids = np.concatenate([unit.ids[skip : skip + take] for unit, skip, take in stretches])
    return space.model, ids, layers
