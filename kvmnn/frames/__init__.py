"""The lossless frame codec: arrays of words to the bytes that MNN would store, and back."""

from . import zstd
from .block import Block, encode_block
from .decoding import decode, verify_roundtrip
from .encoding import encode
from .hashing import fnv1a64
from .inspection import FrameInfo, StreamInfo, inspect
from .many import decode_many, encode_many
from .options import CODECS, EFFORTS, CodecOptions
from .sequence import decode_all
from .words import BF16Frame

__all__ = [
    "CODECS",
    "EFFORTS",
    "BF16Frame",
    "Block",
    "CodecOptions",
    "FrameInfo",
    "StreamInfo",
    "decode",
    "decode_all",
    "decode_many",
    "encode",
    "encode_block",
    "encode_many",
    "fnv1a64",
    "inspect",
    "verify_roundtrip",
    "zstd",
]
