"""What the verbs that run one model on one text share: model, policy, how it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import shared_options
from .printing import UsageError

if TYPE_CHECKING:
    from ..evaluation.setup.configurations import Configuration
    from ..evaluation.setup.documents import Ids
    from ..lm.runner import Runner
    from ..lm.session import DecoderSession
    from ..lm.tokenizer import Tokenizer

EPILOG = """A policy is NAME or NAME:option=value,...: 'streaming', 'h2o_decayed_heads:recent=50%',
'l2_fixed:strategy=random,recent_ratio=0.5' (docs/policies.md has them all); 'full' is the whole cache. Tokens always
keep their true positions."""


def add_model(parser: Any) -> None:
    """MODEL and how it runs."""
    parser.add_argument("model", metavar="MODEL", help="an ONNX decoder with its KV cache outside: file or folder")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: the one beside the model)")
    parser.add_argument("--policy", metavar="SPEC", default="full", help="which tokens stay (default: full)")
    parser.add_argument(
        "--budget", type=shared_options.whole, metavar="N", help="tokens that the policy keeps in each layer"
    )
    parser.add_argument(
        "--skip-layers", metavar="L+L", help="layers that are never cut, or none (default: the policy's)"
    )
    parser.add_argument("--packed", metavar="BACKEND", help="hold the cache in the packed layout of this MNN backend")
    parser.add_argument(
        "--chunk", type=shared_options.positive, metavar="N", help="read the text N tokens at a time (default: at once)"
    )
    parser.add_argument(
        "--seed", type=shared_options.whole, default=0, metavar="N", help="of all that is drawn (default: 0)"
    )
    parser.add_argument(
        "--threads", type=shared_options.positive, default=1, metavar="N", help="threads of onnxruntime (default: 1)"
    )
    parser.add_argument(
        "--provider", action="append", default=[], metavar="NAME", help="of onnxruntime (CPUExecutionProvider)"
    )


def configuration(arguments: argparse.Namespace) -> Configuration:
    """The one policy that was asked for; `UsageError` where it makes no sense."""
    from ..errors import KvmnnError
    from ..evaluation.setup.configurations import FULL, configurations, numbers

    budgets = [] if arguments.budget is None else [arguments.budget]
    try:
        skip = None if arguments.skip_layers is None else numbers(arguments.skip_layers)
        (found,) = configurations([arguments.policy], budgets, skip)
    except KvmnnError as exc:
        raise UsageError(str(exc)) from None
    if found.policy == FULL and (budgets or skip):
        raise UsageError("--budget and --skip-layers need a --policy")
    if budgets and found.options.get("budget") != arguments.budget:
        raise UsageError(
            f"--policy {arguments.policy} and --budget {arguments.budget}: the policy says its size itself"
        )
    return found


def open_model(arguments: argparse.Namespace, chosen: Configuration) -> tuple[DecoderSession, Tokenizer]:
    """The model, with attention probabilities where the policy needs them, and its tokenizer."""
    from ..lm.session import DecoderSession
    from ..lm.tokenizer import Tokenizer

    policy = chosen.make()
    tokenizer = Tokenizer.open(arguments.tokenizer or arguments.model)
    session = DecoderSession.open(
        arguments.model,
        attentions=policy is not None and policy.needs in ("scores", "head scores"),
        threads=arguments.threads,
        providers=tuple(arguments.provider or ["CPUExecutionProvider"]),
    )
    return session, tokenizer


def runner(arguments: argparse.Namespace, session: DecoderSession, chosen: Configuration | None) -> Runner:
    """The model under the policy; None: with the full cache."""
    from ..lm.runner import Runner

    policy = None if chosen is None else chosen.make((arguments.seed,))
    return Runner(session, policy, packed=arguments.packed)


def with_bos(tokenizer: Tokenizer, text: str) -> Ids:
    """Token ids of a text behind the token that begins every text.

    Raises
    ------
    KvmnnError
        Where that leaves no token.
    """
    import numpy as np

    from ..errors import KvmnnError

    own = np.asarray(tokenizer.encode(text), np.int64)
    ids = own if tokenizer.bos is None else np.concatenate([np.array([tokenizer.bos], np.int64), own])
    if not ids.size:
        raise KvmnnError("the text has no tokens, and the model has none that begins a text")
    return ids


@contextmanager
def token_progress(arguments: argparse.Namespace, total: int, label: str) -> Iterator[Callable[[int], object] | None]:
    """A function that takes a number of tokens done, or None where no bar is wanted."""
    if arguments.quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=label, unit="token", delay=1, leave=False, file=sys.stderr, dynamic_ncols=True) as bar:
        yield bar.update
