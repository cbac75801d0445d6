"""Frame files and their manifest: written, read, decoded, compared."""

from .accounts import DensePiece, RawInfo, StreamTotal
from .comparing import Difference, compare
from .decoding import DecodedRun, decode_frames
from .dense_pieces import DenseOptions
from .encoding import EncodeOptions
from .frame_set import DecodeOptions, FrameSet, open_frames
from .inspecting import ArrayFrames, BundleInfo, LoneFrame, LoneFrames, inspect
from .manifest import ArrayEntry, FrameEntry, Manifest
from .rotation_trial import find_layer_rotations, find_rotary
from .verifying import Verified, verify
from .writing import Encoded, check_output, encode

__all__ = [
    "ArrayEntry",
    "ArrayFrames",
    "BundleInfo",
    "DecodeOptions",
    "DecodedRun",
    "DenseOptions",
    "DensePiece",
    "Difference",
    "EncodeOptions",
    "Encoded",
    "FrameEntry",
    "FrameSet",
    "LoneFrame",
    "LoneFrames",
    "Manifest",
    "RawInfo",
    "StreamTotal",
    "Verified",
    "check_output",
    "compare",
    "decode_frames",
    "encode",
    "find_layer_rotations",
    "find_rotary",
    "inspect",
    "open_frames",
    "verify",
]
