"""``kvmnn verify``: prove that frames decode to what they were made from."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ...text import LOSSLESS, count, megabytes_per_second, ratio
from .. import loading, packed_options, printing, shared_options, verify_weights, weights_options

if TYPE_CHECKING:
    from ...bundle.comparing import Difference
    from ...bundle.frame_set import FrameSet

_TEXT = """Decode frames again and prove what comes out.

With a manifest the hash of every frame and of every array is checked; with --against the bytes themselves are compared
with the original file (several --against make one set, as several inputs of encode do). Either prints LOSSLESS.
A frame alone can only be shown to decode, and then the word is DECODES. Any mismatch ends with exit code 1.

The weight file of a KV compressor (.bin) is checked in structure and sense; with --against its checkpoint, every
weight, every bias and the header are compared with what the conversion gives."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "verify", run, "prove that frames decode to their arrays", _TEXT)
    parser.add_argument("input", metavar="FRAME|BUNDLE|WEIGHTS")
    parser.add_argument("--against", action="append", default=[], metavar="FILE", help="the original (repeatable)")
    shared_options.add_source(parser, "what a frame without a manifest, or a file of raw words, holds")
    parser.add_argument("--no-manifest", action="store_true", help="take a frame alone, whatever lies beside it")
    shared_options.add_threads(parser)
    packed_options.add_packed(parser)
    weights_options.add_group(parser, trailing=True)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    if not arguments.no_manifest and weights_options.is_weight_file(arguments.input):
        return verify_weights.run(arguments)
    from ...arrays.source import described_by
    from ...bundle.comparing import compare
    from ...bundle.decoding import decode_frames
    from ...bundle.frame_set import DecodeOptions, open_frames

    options = DecodeOptions(dtype=arguments.dtype, codecs=shared_options.codecs(arguments), threads=arguments.threads)
    frames = open_frames(arguments.input, use_manifest=not arguments.no_manifest, options=options)
    started = time.perf_counter()
    difference: Difference | None = None
    with printing.progress(arguments, frames.raw_bytes, "verify") as step:
        if arguments.against:
            known = described_by(frames.document.metadata, arguments.input) if frames.document else None
            dtypes = [array.dtype for array in frames.arrays]
            source = loading.load(arguments.against, arguments, dtypes, known=known)
            loading.report_skipped(source, arguments)
            difference = compare(frames, source.arrays, options, progress=step)
        else:
            deque(decode_frames(frames, options, check_frames=True, progress=step), maxlen=0)
    _report(frames, difference, arguments, time.perf_counter() - started)
    return 0 if difference is None else 1


def _report(frames: FrameSet, difference: Difference | None, arguments: argparse.Namespace, seconds: float) -> None:
    proof = "bytes" if arguments.against else "sha256" if frames.document else None
    label = None if difference else LOSSLESS if proof else "DECODES"
    if arguments.json:
        printing.print_json(
            {
                "verb": "verify",
                "input": arguments.input,
                "against": arguments.against,
                "label": label or "DIFFERS",
                "proof": proof,
                "difference": None if difference is None else difference._asdict(),
                "raw_bytes": frames.raw_bytes,
                "stored_bytes": frames.stored_bytes,
                "ratio": ratio(frames.raw_bytes, frames.stored_bytes),
                "arrays": len(frames.arrays),
                "frames": sum(len(array.frames) for array in frames.arrays),
                "seconds": seconds,
            }
        )
    if difference is not None:
        print(
            f"kvmnn: error: {arguments.input}: DIFFERS from {', '.join(arguments.against)}: "
            f"array {difference.array!r} {difference.what}",
            file=sys.stderr,
        )
        return
    how = {
        "bytes": f"{LOSSLESS} (every byte compared with {', '.join(arguments.against)})",
        "sha256": f"{LOSSLESS} (decoded, sha256 of the manifest)",
        None: "DECODES (no manifest and no --against: nothing to compare with)",
    }[proof]
    printing.say(
        arguments,
        f"{arguments.input}: {how}, {count(len(frames.arrays), 'array')}, "
        f"{frames.stored_bytes:,} -> {frames.raw_bytes:,} bytes, "
        f"ratio {ratio(frames.raw_bytes, frames.stored_bytes):.4f}, "
        f"{megabytes_per_second(frames.raw_bytes, seconds)}",
    )
