"""Files of frames with their manifest: encode, decode, inspect and verify."""

from typing import TYPE_CHECKING, Any

from .._util.packages import make_lazy_getattr

if TYPE_CHECKING:
    from ..formats.bundle_writer import encode
    from .decoder import DecodedChunk, decode_frames
    from .dense import DenseOptions, search_layer_rope, search_rope
    from .encoder import EncodeOptions, EncodeResult, check_encode_output, encode_source
    from .frame_set import DecodeOptions, FrameSet, open_frames
    from .inspection import (
        ArrayFramesInfo,
        BareFrameInfo,
        BareSequenceInfo,
        BundleInfo,
        DenseChunkInfo,
        RawChunkInfo,
        StreamStats,
        inspect_frame_set,
    )
    from .manifest import ArrayEntry, FrameEntry, Manifest
    from .verification import BundleDifference, VerifyResult, compare_frame_set, verify_frame_set
else:
    _get_own = make_lazy_getattr(
        __name__,
        {
            "decoder": "DecodedChunk decode_frames",
            "dense": "DenseOptions search_layer_rope search_rope",
            "encoder": "EncodeOptions EncodeResult check_encode_output encode_source",
            "frame_set": "DecodeOptions FrameSet open_frames",
            "inspection": (
                "ArrayFramesInfo BareFrameInfo BareSequenceInfo BundleInfo DenseChunkInfo RawChunkInfo "
                "StreamStats inspect_frame_set"
            ),
            "manifest": "ArrayEntry FrameEntry Manifest",
            "verification": "BundleDifference VerifyResult compare_frame_set verify_frame_set",
        },
    )

    def __getattr__(name: str) -> Any:
        """`encode`, which reads all formats and stands on this folder, when it is asked for (PEP 562)."""
        if name == "encode":
            from ..formats.bundle_writer import encode

            return encode
        return _get_own(name)

    def __dir__() -> list[str]:
        return sorted(__all__)


__all__ = [
    "ArrayEntry",
    "ArrayFramesInfo",
    "BareFrameInfo",
    "BareSequenceInfo",
    "BundleDifference",
    "BundleInfo",
    "DecodeOptions",
    "DecodedChunk",
    "DenseChunkInfo",
    "DenseOptions",
    "EncodeOptions",
    "EncodeResult",
    "FrameEntry",
    "FrameSet",
    "Manifest",
    "RawChunkInfo",
    "StreamStats",
    "VerifyResult",
    "check_encode_output",
    "compare_frame_set",
    "decode_frames",
    "encode",
    "encode_source",
    "inspect_frame_set",
    "open_frames",
    "search_layer_rope",
    "search_rope",
    "verify_frame_set",
]
