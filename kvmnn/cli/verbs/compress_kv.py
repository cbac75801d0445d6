"""``kvmnn compress-kv``: run a KV compressor on a cache. LOSSY."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ...compressor.kvcm import weight_file
from ...dtypes import Words
from ...text import LOSSY, UNCHANGED, count
from .. import loading, printing, shared_options
from ..printing import STDIO, UsageError

if TYPE_CHECKING:
    from ...arrays.kv_arrays import KVArrays
    from ...arrays.named_array import ArrayInfo
    from ...arrays.source import Source
    from ...compressor.forward.compressed_file import Spans
    from ...compressor.forward.plan import ForwardOptions, Plan
    from ...files.output import FileOutput


_TEXT = """Compress K and V of a cache with the weights of a KV compressor: every group of tokens becomes one. LOSSY.

WEIGHTS is a compressor's weight file (.bin; kvmnn convert makes one of a checkpoint). CACHE is a .npz or .safetensors
file, or the directory of an MNN KV dump, that holds in fp16, bf16 or fp32 either

  two arrays, K and V      [layer, batch, kv_head, token, dimension]; names such as k and v, keys and values
  two arrays a layer       [batch, kv_head, token, dimension] or [kv_head, token, dimension]; names with the layer's
                           number, such as layers.0.key and layers.0.value, past_key_values.0.key, k_0 and v_0

and nothing else (--tensor chooses). --axes says where axes lie otherwise: l layer, b batch, h kv_head, t token, d
dimension; an MNN KV dump needs --axes thd. Keys are taken as they are stored, that is, rotated.

The first --image-tokens tokens are compressed by the weights for images, the others by those for text; tokens behind
the last whole group of each stay as they are, and so does a segment with fewer than --min-seq-len groups.

OUT (.npz or .safetensors) has the names and axes of CACHE. OUT.json beside it has the true positions that each token
stands for: the next token goes to place new_len of the cache, but its key is rotated for next_position."""

_NOTHING_TO_DO = ("factor", "no_text_mlp", "factor_not_trained", "empty", "disabled")


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "compress-kv", run, "run a KV compressor on a cache (LOSSY)", _TEXT)
    parser.add_argument("weights", metavar="WEIGHTS")
    parser.add_argument("cache", metavar="CACHE")
    shared_options.add_output(parser, ".npz or .safetensors file")
    shared_options.add_source(parser, "what the words are (default: each array's own type)")
    parser.add_argument("--axes", metavar="LETTERS", help="the axes of each array, e.g. lthd (see above)")
    parser.add_argument(
        "--image-tokens",
        type=shared_options.whole,
        default=0,
        metavar="N",
        help="tokens of the image, at the front (default 0)",
    )
    parser.add_argument(
        "--tokens", type=shared_options.whole, metavar="N", help="tokens that are live, where arrays are longer"
    )
    parser.add_argument(
        "--factor", type=shared_options.whole, default=0, metavar="N", help="tokens in a group (default: the weights')"
    )
    parser.add_argument(
        "--min-seq-len",
        type=shared_options.whole,
        default=0,
        metavar="N",
        help="least number of groups (default: the weights')",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp16"),
        default="fp32",
        help="fp16: round as an fp16 runtime does, after every Linear; OUT is then fp16",
    )
    parser.add_argument("--engine", choices=("numpy", "onnx"), default="numpy", help="what computes (default numpy)")


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...arrays.kv_arrays import read_kv
    from ...compressor.forward.compressed_file import SUFFIX, Spans, read_spans, render
    from ...compressor.forward.compressing import compress_arrays, merge_spans
    from ...compressor.forward.plan import ForwardOptions
    from ...errors import KvmnnError
    from ...files.output import FileOutput

    _check_output(arguments)
    options = ForwardOptions(
        image_len=arguments.image_tokens,
        factor=arguments.factor,
        min_seq_len=arguments.min_seq_len,
        seq_len=arguments.tokens,
        precision=arguments.precision,
        engine=arguments.engine,
    )
    weights = weight_file.read(arguments.weights)
    source = loading.load([arguments.cache], arguments)
    loading.report_skipped(source, arguments)
    cache = read_kv(arguments.cache, source.arrays, arguments.axes)
    stored = int(next(iter(cache.layers.values()))[0].shape[2])
    spans = (read_spans(arguments.cache, stored) or Spans.of_plain(stored)).first(
        stored if options.seq_len is None else options.seq_len
    )
    started = time.perf_counter()
    total = sum(array.nbytes for array in source.arrays)
    protect = [arguments.weights, arguments.cache]
    with FileOutput(arguments.output, force=arguments.force, protect=protect) as file:
        if not file.is_device:
            file.check_beside(SUFFIX)
        with printing.progress(arguments, total, "compress-kv") as step:
            layers, plan = compress_arrays(weights, cache.layers, options, progress=step)
        if plan.reason in _NOTHING_TO_DO:
            raise KvmnnError(f"{arguments.cache}: nothing to compress: {plan.explanation}")
        spans = Spans(*merge_spans(plan, spans.positions, spans.ends), spans.next_position)
        infos, arrays = cache.restore(layers)
        report = _describe(arguments, cache, plan, options, spans, infos)
        _write(file, arguments.output, source, infos, arrays)
        if not file.is_device:
            file.beside(SUFFIX).write(render(report, spans))
        file.commit()
    _report(arguments, report, plan, time.perf_counter() - started)
    return 0


def _check_output(arguments: argparse.Namespace) -> None:
    if arguments.output is None:
        raise UsageError("no output given: use -o OUT.npz or -o OUT.safetensors")
    if PurePath(arguments.output).suffix.lower() not in (".npz", ".safetensors") or os.path.isdir(arguments.output):
        raise UsageError(f"{arguments.output}: expected a .npz or .safetensors file as output")
    if STDIO in (arguments.cache, arguments.weights):
        raise UsageError("a cache and weights are read from files, not from standard input")


def _describe(
    arguments: argparse.Namespace,
    cache: KVArrays,
    plan: Plan,
    options: ForwardOptions,
    spans: Spans,
    infos: list[ArrayInfo],
) -> dict[str, Any]:
    import hashlib

    from ...version import version

    with open(arguments.weights, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    before = [array for pair in cache.pairs for array in pair]
    stored = before[0].shape[cache.axes.index("t")]
    raw = sum(array.nbytes for array in before) // stored * plan.seq_len
    same = plan.reason is not None and all(a.dtype == b.dtype for a, b in zip(before, infos, strict=True))
    return {
        "label": UNCHANGED if same else LOSSY,
        "kvmnn_version": version(),
        "weights": {"file": PurePath(arguments.weights).name, "sha256": digest},
        "cache": PurePath(arguments.cache).name,
        "layers": list(cache.layers),
        "axes": cache.axes,
        "precision": options.precision,
        "engine": options.engine,
        "plan": plan.to_dict(),
        "note": plan.explanation or None,
        "tokens": plan.seq_len,
        "new_len": plan.new_len,
        "token_ratio": plan.ratio,
        "next_position": spans.next_position,
        "raw_bytes": raw,
        "stored_bytes": sum(info.nbytes for info in infos),
    }


def _write(file: FileOutput, output: str, source: Source, infos: list[ArrayInfo], arrays: list[Words]) -> None:
    """The arrays, and what the source said of itself but for what kvmnn says of caches, which no longer holds."""
    import numpy as np

    from ...formats.writing import writer_for

    metadata = {key: value for key, value in source.metadata.items() if not key.startswith("kvmnn.")}
    runs = ((number, array.reshape(-1).view(np.uint8)) for number, array in enumerate(arrays))
    writer_for(output, infos)(file.file, infos, runs, metadata)


def _report(arguments: argparse.Namespace, report: dict[str, Any], plan: Plan, seconds: float) -> None:
    if arguments.json:
        printing.print_json({"verb": "compress-kv", "output": arguments.output, **report, "seconds": seconds})
        return
    if arguments.verbose:
        for segment in plan.segments:
            printing.say(
                arguments,
                f"{segment.kind}: {count(segment.tokens, 'token')} -> {segment.new_tokens:,} "
                f"({count(segment.groups, 'group')} of {segment.factor}, "
                f"{segment.tokens - segment.grouped} kept)",
            )
    note = f" ({plan.explanation})" if plan.reason else ""
    printing.say(
        arguments,
        f"{arguments.output}: {report['label']}{note}, {plan.seq_len:,} -> {count(plan.new_len, 'token')} in "
        f"{count(len(report['layers']), 'layer')}, token ratio {plan.ratio:.4f}, "
        f"{report['raw_bytes']:,} -> {report['stored_bytes']:,} bytes; the next token goes to place {plan.new_len:,} "
        f"and has position {report['next_position']:,}",
    )
