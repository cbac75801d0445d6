"""Frame files and their manifest: written, read, decoded, compared."""

from .accounts import DenseChunkInfo, RawChunkInfo, StreamStats
from .comparing import BundleDifference, compare_frame_set
from .decoding import DecodedChunk, decode_frames
from .dense_pieces import DenseOptions
from .encoding import EncodeOptions
from .frame_set import DecodeOptions, FrameSet, open_frames
from .inspecting import ArrayFramesInfo, BareFrameInfo, BareSequenceInfo, BundleInfo, inspect_frame_set
from .manifest import ArrayEntry, FrameEntry, Manifest
from .rotation_trial import search_layer_rope, search_rope
from .verifying import VerifyResult, verify_frame_set
from .writing import EncodeResult, check_encode_output, encode_source

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
    "encode_source",
    "inspect_frame_set",
    "open_frames",
    "search_layer_rope",
    "search_rope",
    "verify_frame_set",
]
