"""Lossy codecs of caches: formats in which engines quantise K and V, as rows of an evaluation."""

from .codec import CacheCodec, CacheShape, FieldSizes, QuantizedRows
from .registry import CODECS, create_codec

__all__ = ["CODECS", "CacheCodec", "CacheShape", "FieldSizes", "QuantizedRows", "create_codec"]
