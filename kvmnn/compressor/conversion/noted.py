"""What `kvmnn export` noted of a weight file in the metadata of a ``.safetensors`` file, taken up by a conversion."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from ..kvcm.header import DTYPES, MAGIC, MAX_U32, WeightFileHeader
from .selection import ConvertOptions

TEXT_KEY, HEX_KEY = "metadata", "metadata_hex"
"""Where the weight file's own metadata stands: as text, or as hexadecimal digits where it is no UTF-8."""

_HEADER_FIELDS = tuple(field.name for field in fields(WeightFileHeader))
_INHERITED_FIELDS = ("compression_factor", "min_seq_len", "num_heads", "head_dim")


class ExportedMetadata(NamedTuple):
    """The header and the metadata of the weight file that was exported."""

    header: WeightFileHeader
    metadata: bytes

    def fill_defaults(self, options: ConvertOptions, specified_options: Collection[str]) -> ConvertOptions:
        """`options` with what was noted in the place of every default; names in `specified_options` were said."""
        exported: dict[str, Any] = {name: getattr(self.header, name) for name in _INHERITED_FIELDS}
        exported |= {"dtype": self.header.dtype.name, "metadata": self.metadata}
        defaults = ConvertOptions()
        inherited = {
            name: value
            for name, value in exported.items()
            if name not in specified_options and getattr(options, name) == getattr(defaults, name)
        }
        return replace(options, **inherited)

    def iter_notices(self, written_header: WeightFileHeader, metadata: bytes) -> Iterator[str]:
        """What a conversion took over, and what it did not."""
        yield "header fields and metadata that were not said are those that the checkpoint's own metadata notes"
        for name in _HEADER_FIELDS:
            exported_value, written_value = getattr(self.header, name), getattr(written_header, name)
            if exported_value != written_value:
                yield f"header field {name} is {written_value}, the checkpoint's metadata notes {exported_value}"
        if metadata != self.metadata:
            yield "the metadata is another than the checkpoint's own metadata notes"


def read_exported_metadata(texts: Mapping[str, str]) -> ExportedMetadata | None:
    """What an export noted; None where `texts` hold no such thing, or nothing that can be."""
    field_texts = {name: texts.get(name, "") for name in _HEADER_FIELDS}
    if field_texts["magic"] != str(MAGIC) or not all(re.fullmatch(r"\d{1,10}", text) for text in field_texts.values()):
        return None
    header = WeightFileHeader(**{name: int(text) for name, text in field_texts.items()})
    if header.dtype_code >= len(DTYPES) or max(map(int, field_texts.values())) > MAX_U32:
        return None
    try:
        metadata = texts.get(TEXT_KEY, "").encode() or bytes.fromhex(texts.get(HEX_KEY, ""))
    except ValueError:
        return None
    return ExportedMetadata(header, metadata)
