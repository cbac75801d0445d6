"""What `kvmnn export` noted of a weight file in the metadata of a ``.safetensors`` file, taken up by a conversion."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from ..kvcm.header import DTYPES, MAGIC, MAX_U32, Header
from .selection import ConvertOptions

TEXT_KEY, HEX_KEY = "metadata", "metadata_hex"
"""Where the weight file's own metadata stands: as text, or as hexadecimal digits where it is no UTF-8."""

_FIELDS = tuple(field.name for field in fields(Header))
_TAKEN = ("compression_factor", "min_seq_len", "num_heads", "head_dim")


class Noted(NamedTuple):
    """The header and the metadata of the weight file that was exported."""

    header: Header
    metadata: bytes

    def complete(self, options: ConvertOptions, given: Collection[str]) -> ConvertOptions:
        """`options` with what was noted in the place of every default; names in `given` were said."""
        noted: dict[str, Any] = {name: getattr(self.header, name) for name in _TAKEN}
        noted |= {"dtype": self.header.dtype.name, "metadata": self.metadata}
        plain = ConvertOptions()
        taken = {
            name: value
            for name, value in noted.items()
            if name not in given and getattr(options, name) == getattr(plain, name)
        }
        return replace(options, **taken)

    def notices(self, made: Header, metadata: bytes) -> Iterator[str]:
        """What a conversion took over, and what it did not."""
        yield "header fields and metadata that were not said are those that the checkpoint's own metadata notes"
        for name in _FIELDS:
            before, now = getattr(self.header, name), getattr(made, name)
            if before != now:
                yield f"header field {name} is {now}, the checkpoint's metadata notes {before}"
        if metadata != self.metadata:
            yield "the metadata is another than the checkpoint's own metadata notes"


def noted_in(texts: Mapping[str, str]) -> Noted | None:
    """What an export noted; None where `texts` hold no such thing, or nothing that can be."""
    numbers = {name: texts.get(name, "") for name in _FIELDS}
    if numbers["magic"] != str(MAGIC) or not all(re.fullmatch(r"\d{1,10}", text) for text in numbers.values()):
        return None
    header = Header(**{name: int(text) for name, text in numbers.items()})
    if header.dtype_code >= len(DTYPES) or max(map(int, numbers.values())) > MAX_U32:
        return None
    try:
        metadata = texts.get(TEXT_KEY, "").encode() or bytes.fromhex(texts.get(HEX_KEY, ""))
    except ValueError:
        return None
    return Noted(header, metadata)
