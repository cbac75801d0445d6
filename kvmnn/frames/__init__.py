"""The lossless frame codec: arrays to the bytes that MNN would store, and back."""

from typing import TYPE_CHECKING

from .._util.packages import make_lazy_getattr
from . import zstd  # gives the compiled modules their libzstd

if TYPE_CHECKING:
    from .api import decode_all, decode_many, encode_many
    from .block import Block, encode_block
    from .buffers import BF16Frame, ShapedFrame, fnv1a64
    from .decoder import decode, verify_roundtrip
    from .encoder import encode
    from .inspection import FrameInfo, StreamInfo, inspect
    from .options import CODECS, EFFORTS, CodecOptions, Effort
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            "api": "decode_all decode_many encode_many",
            "block": "Block encode_block",
            "buffers": "BF16Frame ShapedFrame fnv1a64",
            "decoder": "decode verify_roundtrip",
            "encoder": "encode",
            "inspection": "FrameInfo StreamInfo inspect",
            "options": "CODECS EFFORTS CodecOptions Effort",
        },
    )

__all__ = [
    "CODECS",
    "EFFORTS",
    "BF16Frame",
    "Block",
    "CodecOptions",
    "Effort",
    "FrameInfo",
    "ShapedFrame",
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
