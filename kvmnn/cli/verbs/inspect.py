"""``kvmnn inspect``: what a frame, a bundle, or a file of arrays holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ...frames import inspection
from ...text import count, ratio
from .. import inspect_weights, packed_options, printing, shared_options, weights_options

if TYPE_CHECKING:
    from ...bundle.frame_set import DecodeOptions, FrameSet
    from ...frames.inspection import FrameInfo

_TEXT = """Account for every byte of a frame, or list what a bundle or a file of arrays holds.

A frame gives its table of streams. A manifest, a bundle directory or a frame with its manifest gives a line for each
array, totals, and each stream's share (-v: the table of every frame too). A .npy, .npz or .safetensors file or an MNN
dump gives the arrays that encode would take from it.

The directory of a prefix cache or of live cache files, or one of their .k and .v files, gives what it is, geometry,
live and padded bytes, and where something cannot be known from the files, what it may be.

The weight file of a KV compressor (.bin), or a checkpoint of one (.pth, .pt), gives its header and a table of its
weights: shape, bias, least and greatest value, mean, standard deviation, elements that are no number."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "inspect", run, "what a frame, bundle or file holds", _TEXT)
    parser.add_argument("inputs", nargs="+", metavar="FRAME|BUNDLE|FILE")
    shared_options.add_dtype(parser, "what a frame without a manifest holds (default: fp16 or fp32, by its streams)")
    parser.add_argument("--no-manifest", action="store_true", help="take a frame alone, whatever lies beside it")
    weights_options.add_group(parser)
    parser.add_argument("--no-zstd", action="store_true", help="judge as an engine without libzstd")
    packed_options.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...bundle.frame_set import DecodeOptions

    options = DecodeOptions(dtype=arguments.dtype, codecs=shared_options.codecs(arguments))
    documents = []
    for number, path in enumerate(arguments.inputs):
        document, text = _inspected(path, arguments, options)
        documents.append(document)
        printing.say(arguments, ("\n" if number else "") + text)
    if arguments.json:
        printing.print_json({"verb": "inspect", "inputs": documents})
    return 0


def _inspected(path: str, arguments: argparse.Namespace, options: DecodeOptions) -> tuple[dict[str, Any], str]:
    from ...bundle.frame_set import open_frames
    from ...formats.opening import kind_of
    from ..inspect_packed import account

    if not arguments.no_manifest and (weights_options.is_weight_file(path) or weights_options.is_checkpoint(path)):
        return inspect_weights.inspected(path, arguments)
    if kind_of(path) == "arrays":
        return account(path, arguments) or _source(path, arguments, options)
    frames = open_frames(path, use_manifest=not arguments.no_manifest, options=options)
    if frames.document is None:
        info = _frame_info(frames, 0, 0, options)
        return {"input": path, "kind": "frame", **info.to_dict()}, f"{path}: {info}"
    return _bundle(path, frames, arguments, options)


def _source(path: str, arguments: argparse.Namespace, options: DecodeOptions) -> tuple[dict[str, Any], str]:
    from ...formats import opening

    packed = packed_options.options(arguments)
    source = opening.open(path, dtype=options.dtype, skip_unsupported=True, packed=packed, frames=False)
    lines = [f"{path}: {count(len(source.arrays), 'array')} to encode"]
    lines += [f"  {a.name}: {a.dtype} {list(a.shape)} {a.order}, {a.nbytes:,} bytes" for a in source.arrays]
    lines += [f"  not: {line}" for line in source.skipped]
    arrays = [
        {"name": a.name, "dtype": a.dtype, "shape": list(a.shape), "array_dtype": a.array_dtype, "order": a.order}
        | {"raw_bytes": a.nbytes}
        for a in source.arrays
    ]
    return {"input": path, "kind": "arrays", "arrays": arrays, "skipped": source.skipped}, "\n".join(lines)


def _frame_info(frames: FrameSet, index: int, number: int, options: DecodeOptions) -> FrameInfo:
    """A frame's account, with the place of the frame in the message when it is none."""
    from ...errors import FrameError

    array = frames.arrays[index]
    entry = array.frames[number]
    try:
        return inspection.inspect(frames.frame(entry), dtype=array.dtype, codecs=options.codecs)
    except FrameError as exc:
        raise FrameError(f"{frames.path}: array {array.name!r}: frame {number}: {exc}") from None


def _bundle(
    path: str, frames: FrameSet, arguments: argparse.Namespace, options: DecodeOptions
) -> tuple[dict[str, Any], str]:
    from ...arrays.source import described_by
    from ...bundle.manifest import array_to_dict

    document = frames.document
    assert document is not None
    cache = described_by(document.metadata, path)
    streams = _Streams()
    arrays: list[dict[str, Any]] = []
    lines = [
        f"{path}: {count(len(frames.arrays), 'array')}, made by kvmnn {document.kvmnn_version}, "
        f"zstd {document.zstd_version}, effort {document.effort}"
    ]
    if cache:
        name = f" {cache.name!r}" if cache.name else ""
        told = printing.summary(cache)
        lines.append(f"  {cache.kind} cache{name}: {told}, {cache.file_bytes:,} bytes as packed files")
    width = max(len(array.name) for array in frames.arrays)
    for index, array in enumerate(frames.arrays):
        infos = [_frame_info(frames, index, number, options) for number in range(len(array.frames))]
        for info in infos:
            streams.add(info)
        times = ratio(array.nbytes, array.stored_bytes)
        lines.append(
            f"  {array.name:<{width}}  {array.dtype} {list(array.shape)} {array.order}  {array.nbytes:,} -> "
            f"{array.stored_bytes:,} bytes  ratio {times:.4f}  {count(len(infos), 'frame')}"
        )
        if arguments.verbose or sum(len(each.frames) for each in frames.arrays) == 1:
            for entry, info in zip(array.frames, infos, strict=True):
                lines.append(f"  {entry.file} at {entry.offset}: {info}".replace("\n", "\n    "))
        described = array_to_dict(array)
        for part, info in zip(described["frames"], infos, strict=True):
            part |= {"streams": info.to_dict()["streams"]}
        arrays.append({**described, "ratio": times})
    total = ratio(frames.raw_bytes, frames.stored_bytes)
    limit = streams.entropy_ratio
    lines.append(
        f"  total: {frames.raw_bytes:,} -> {frames.stored_bytes:,} bytes, ratio {total:.4f}"
        + ("" if limit is None else f" (order-0 limit {limit:.4f})")
    )
    lines += streams.lines()
    summary = {
        "input": path,
        "kind": "bundle",
        "raw_bytes": frames.raw_bytes,
        "stored_bytes": frames.stored_bytes,
        "ratio": total,
        "entropy_ratio": limit,
        "kvmnn_version": document.kvmnn_version,
        "zstd_version": document.zstd_version,
        "effort": document.effort,
        "cache": printing.cache_document(cache),
        "streams": streams.to_dict(),
        "arrays": arrays,
    }
    return summary, "\n".join(lines)


class _Streams:
    """All frames' streams of the same name, added up."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, Any]] = {}

    def add(self, info: FrameInfo) -> None:
        for stream in info.streams:
            total = self._sums.setdefault(
                f"{info.container} {stream.name}",
                {"raw_bytes": 0, "payload_bytes": 0, "header_bytes": 0, "entropy_bits": 0.0, "chosen": {}},
            )
            total["raw_bytes"] += stream.raw_bytes
            total["payload_bytes"] += stream.payload_bytes
            total["header_bytes"] += stream.HEADER_BYTES
            total["entropy_bits"] += (stream.entropy or 0.0) * stream.raw_bytes
            way = f"{stream.predictor}+{stream.codec}"
            total["chosen"][way] = total["chosen"].get(way, 0) + 1

    @property
    def entropy_ratio(self) -> float | None:
        bits = sum(total["entropy_bits"] for total in self._sums.values())
        return 8 * sum(total["raw_bytes"] for total in self._sums.values()) / bits if bits else None

    def lines(self) -> list[str]:
        return [
            f"    {name:<11} {total['raw_bytes']:>15,} -> {total['payload_bytes']:>15,} bytes  "
            f"{8 * total['payload_bytes'] / total['raw_bytes']:.3f} bits/byte (entropy "
            f"{total['entropy_bits'] / total['raw_bytes']:.3f})  "
            + ", ".join(f"{way} x{times}" for way, times in sorted(total["chosen"].items()))
            for name, total in self._sums.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            name: {
                "raw_bytes": total["raw_bytes"],
                "payload_bytes": total["payload_bytes"],
                "header_bytes": total["header_bytes"],
                "bits_per_byte": 8 * total["payload_bytes"] / total["raw_bytes"],
                "entropy": total["entropy_bits"] / total["raw_bytes"],
                "chosen": total["chosen"],
            }
            for name, total in self._sums.items()
        }
