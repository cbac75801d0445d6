"""``kvmnn dump-kv``: the KV cache of a model on a text, as files."""

from __future__ import annotations

import argparse
import os
from typing import Any

from .. import console, model_options, shared_options
from ..console import UsageError

_DESCRIPTION = f"""\
Let a model read a text and write its KV cache, full or cut by a policy, for encode, measure and mnn pack. Rounding
fp32 to fp16 is LOSSY, and so is a policy that evicts.

  --format npy   layer_<n>.key.npy and layer_<n>.value.npy,
                 [kv_head, token, head_dim]
  --format mnn   a KV dump as MNN's engine writes it,
                 [token, kv_head, head_dim]

positions.json in the folder has the true positions of the tokens that remain, token_ids.json every token of the text.

{model_options.POLICY_EPILOG}"""

DEFAULT_TOKENS = 2048


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "dump-kv",
        run,
        "the KV cache of a model on a text, as files",
        _DESCRIPTION,
        examples=(
            "kvmnn dump-kv model/ --text a.txt -o kv/",
            "kvmnn dump-kv model/ --text a.txt -o dump/ --format mnn --dtype fp16",
            "kvmnn dump-kv model/ --text a.txt -o kv/ --policy streaming --budget 256",
        ),
        shown="--text --output --format --dtype --max-tokens --policy --budget --tokenizer",
    )
    model_options.add_model_options(parser)
    parser.add_argument(
        "--text", required=True, metavar="FILE", help="what the model reads, UTF-8; .json: messages of a chat"
    )
    parser.add_argument(
        "--max-tokens",
        type=shared_options.parse_positive,
        default=DEFAULT_TOKENS,
        metavar="N",
        help=f"tokens that it reads, the one that begins a text included (default: {DEFAULT_TOKENS:,})",
    )
    shared_options.add_output_option(parser, "directory")
    parser.add_argument("--format", choices=("npy", "mnn"), default="npy", help="of the files (default: npy)")
    parser.add_argument("--dtype", choices=("fp16", "fp32"), help="of the words (default: the model's)")
    parser.add_argument(
        "--attention",
        metavar="FILE",
        help="also write what tokens drew of the attention, .npy, for encode --codec transform:PROFILE,attention=FILE",
    )
    parser.add_argument("--run-id", default="kvmnn", metavar="ID", help="of an MNN dump (default: kvmnn)")


def run(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn dump-kv``."""
    from ...lm import dump_kv

    if arguments.output is None or arguments.output == console.STDIO:
        raise UsageError("no output given: use -o DIR")
    if arguments.output.endswith((".npz", ".npy", ".safetensors")) and not os.path.isdir(arguments.output):
        raise UsageError(f"-o {arguments.output}: expected the name of a folder: dump-kv writes a file for each array")
    if arguments.lossless is not None and (arguments.chunk or arguments.max_tokens) >= arguments.max_tokens:
        raise UsageError(
            "--lossless: blocks are encoded from the second step on, and this text is read in one: expected --chunk N, "
            f"N below the {arguments.max_tokens:,} tokens"
        )
    result = dump_kv(
        arguments.model,
        arguments.text,
        arguments.output,
        model_options.build_policy(arguments),
        tokens=arguments.max_tokens,
        format=arguments.format,
        dtype=arguments.dtype,
        run_id=arguments.run_id,
        overwrite=arguments.force,
        options=model_options.build_run_options(arguments),
        attention=arguments.attention,
    )
    console.show_result(arguments, "dump-kv", result)
    return 0
