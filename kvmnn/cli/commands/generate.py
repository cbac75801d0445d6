"""``kvmnn generate``: text from a model under a policy next to that of the full cache."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from .. import console, model_options, shared_options
from ..console import UsageError

if TYPE_CHECKING:
    from ...store import PrefixStore

_DESCRIPTION = f"""\
Continue a prompt with a model whose KV cache is under a policy, and with the full cache: where the two texts differ,
how many tokens remained, and the time of a token. Greedy by default, so that every difference is the policy's.

{model_options.POLICY_EPILOG}"""


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "generate",
        run,
        "text under a policy next to that of the full cache",
        _DESCRIPTION,
        examples=(
            "kvmnn generate model/ --prompt 'Once upon a time' --policy streaming --budget 64",
            "kvmnn generate model/ --prompt-file p.txt --max-new-tokens 200 --temperature 0.8 --seed 3",
            "kvmnn generate model/ --prompt-file - --store prefixes/",
        ),
        shown="--prompt --prompt-file --policy --budget --max-new-tokens --temperature --top-k --seed --store "
        "--tokenizer --lossless",
    )
    model_options.add_model_options(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file with it; - is standard input")
    parser.add_argument(
        "--max-new-tokens",
        type=shared_options.parse_positive,
        default=64,
        metavar="N",
        help="new tokens (default: 64)",
    )
    parser.add_argument(
        "--temperature", type=_parse_temperature, default=0.0, metavar="T", help="draw tokens (default: 0)"
    )
    parser.add_argument(
        "--top-k", type=shared_options.parse_positive, metavar="K", help="draw from the K most probable only"
    )
    parser.add_argument("--store", metavar="STORE", help="start from this prefix store, and add what is computed")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ...lm import SamplingOptions, generate

    if arguments.top_k is not None and arguments.temperature == 0:
        raise UsageError("--top-k needs a --temperature above 0")
    policy = model_options.build_policy(arguments)
    prompt = _read_prompt(arguments)
    tokens = arguments.max_new_tokens * (1 + policy.policy.can_evict)
    store_context = nullcontext() if arguments.store is None else _open_store(arguments.store)
    with store_context as store, console.progress_bar(arguments, tokens, "generate", unit="token") as step:
        result = generate(
            arguments.model,
            prompt,
            policy,
            max_tokens=arguments.max_new_tokens,
            sampling=SamplingOptions(temperature=arguments.temperature, top_k=arguments.top_k, seed=arguments.seed),
            options=model_options.build_run_options(arguments),
            store=store,
            progress=step,
        )
    console.show_result(arguments, "generate", result)
    return 0


def _open_store(directory: str) -> PrefixStore:
    from ...store import PrefixStore, load_key

    return PrefixStore(directory, key=load_key())


def _parse_temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, at least 0")
    return value


def _read_prompt(arguments: argparse.Namespace) -> str:
    from ...lm.tokenizer import decode_utf8, read_prompt_file

    if arguments.prompt is None:
        return read_prompt_file(arguments.prompt_file)
    return decode_utf8(arguments.prompt.encode("utf-8", "surrogateescape"), "--prompt")
