"""``kvmnn compress-kv``: run a KV compressor on a cache. LOSSY."""

from __future__ import annotations

import argparse
from typing import Any

from .. import console, input_sources, packed_options, shared_options, weights_options
from ..console import STDIO, UsageError

_DESCRIPTION = """\
Compress K and V of a cache with the weights of a KV compressor: every group of tokens becomes one. LOSSY.

WEIGHTS is a compressor's weight file (.bin; kvmnn convert makes one of a checkpoint). CACHE is a .npz or .safetensors
file, a directory of .npy files, an MNN KV dump or prefix cache, that holds in fp16, bf16 or fp32 either

  two arrays, K and V   [layer, batch, kv_head, token, dimension]; names such as
                        k and v, keys and values
  two arrays a layer    [batch, kv_head, token, dimension] or
                        [kv_head, token, dimension]; names with the layer's
                        number, such as layers.0.key and layers.0.value,
                        past_key_values.0.key, k_0 and v_0

and nothing else (--tensor chooses). An MNN KV dump, and a file made of one, is [token, kv_head, dimension]; a folder
that kvmnn dump-kv wrote is [kv_head, token, dimension], and its positions are kept. --axes says where axes lie
otherwise: l layer, b batch, h kv_head, t token, d dimension. Names do not prove which axis is the tokens': where
nothing does (a dump, a packed cache, more than 256 for heads), --axes is asked for. Keys are taken as they are stored,
that is, rotated.

The first --image-tokens tokens are compressed by the weights for images, the others by those for text; tokens behind
the last whole group of each stay as they are, and so does a segment with fewer than --min-seq-len groups.

OUT (.npz or .safetensors) has the names and axes of CACHE. OUT.json beside it has the true positions that each token
stands for: the next token goes to place new_len of the cache, but its key is rotated for next_position."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(
        subparsers, "compress-kv", run, "run a KV compressor on a cache (LOSSY)", _DESCRIPTION
    )
    parser.add_argument("weights", metavar="WEIGHTS", help="weight file of a compressor (.bin)")
    parser.add_argument("cache", metavar="CACHE", help=".npz, .safetensors, or the directory of a dump")
    shared_options.add_output(parser, ".npz or .safetensors file (default: CACHE.compressed.npz)")
    shared_options.add_source(parser, "what the words are (default: each array's own type)", axes=False)
    parser.add_argument("--axes", metavar="LETTERS", help="the axes of each array, such as lthd")
    parser.add_argument(
        "--image-tokens",
        type=shared_options.parse_whole,
        default=0,
        metavar="N",
        help="tokens of the image, at the front (default: 0)",
    )
    parser.add_argument(
        "--tokens", type=shared_options.parse_whole, metavar="N", help="tokens that are live, where arrays are longer"
    )
    parser.add_argument(
        "--factor",
        type=shared_options.parse_whole,
        default=0,
        metavar="N",
        help="tokens in a group (default: the weights')",
    )
    parser.add_argument(
        "--min-seq-len",
        type=shared_options.parse_whole,
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
    parser.add_argument("--engine", choices=("numpy", "onnx"), default="numpy", help="what computes (default: numpy)")
    packed_options.add_packed_options(parser, with_tokens=False)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...compressor import ForwardOptions, check_output_path, compress_source

    if STDIO in (arguments.cache, arguments.weights):
        raise UsageError("a cache and weights are read from files, not from standard input")
    weights_options.check_is_weight_file(arguments.weights)
    kind = ".safetensors" if arguments.cache.endswith(".safetensors") else ".npz"
    output = console.choose_output(arguments, arguments.cache, f".compressed{kind}")
    check_output_path(output)
    options = ForwardOptions(
        image_len=arguments.image_tokens,
        factor=arguments.factor,
        min_seq_len=arguments.min_seq_len,
        seq_len=arguments.tokens,
        precision=arguments.precision,
        engine=arguments.engine,
    )
    source = input_sources.load(
        [arguments.cache], arguments, with_frames=True, as_numbers=True, used_options=("tokens",)
    )
    input_sources.report_skipped(source, arguments)
    with console.progress_bar(arguments, source.nbytes, "compress-kv") as step:
        result = compress_source(
            arguments.weights,
            source,
            arguments.cache,
            output,
            options,
            axes=arguments.axes,
            overwrite=arguments.force,
            progress=step,
        )
    if arguments.verbose:
        for segment in result.plan.segments:
            console.print_line(arguments, str(segment))
    console.show_result(arguments, "compress-kv", result)
    return 0
