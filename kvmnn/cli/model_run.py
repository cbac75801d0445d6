"""What the verbs that run one model on one text share: their arguments."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import engine_config, shared_options
from .printing import UsageError

if TYPE_CHECKING:
    from ..lm.run_options import RunOptions
    from ..policies.labels import LabelledPolicy
    from ..runtime import RuntimeConfig

EPILOG = """A policy is NAME or NAME:option=value,...: 'streaming', 'h2o_decayed_heads:recent=50%',
'l2_fixed:strategy=random,recent_ratio=0.5' (docs/policies.md has them all); 'full' is the full cache. Tokens always
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
    engine_config.add_config(parser)
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
    shared_options.add_provider(parser)


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """How the model runs, as the arguments of `add_model` say."""
    from ..lm.graph.onnx_sessions import CPU
    from ..lm.run_options import RunOptions

    return RunOptions(
        tokenizer=arguments.tokenizer,
        chunk=arguments.chunk,
        packed=arguments.packed,
        lossless=_lossless(arguments),
        threads=arguments.threads,
        providers=tuple(arguments.provider) or CPU,
    )


def _lossless(arguments: argparse.Namespace) -> RuntimeConfig | None:
    document = engine_config.lossless_document(arguments)
    if document is None:
        return None
    from ..runtime import RuntimeConfig

    return RuntimeConfig.from_engine(document)


def policy(arguments: argparse.Namespace) -> LabelledPolicy:
    """The one policy that was asked for; `UsageError` where it makes no sense."""
    from ..errors import KvmnnError
    from ..policies.labels import LabelledPolicy, label_of
    from ..policies.specs import make, numbers, options_of, takes

    defaults = engine_config.policy_defaults(arguments, [arguments.policy])
    budgets = [] if arguments.budget is None else [arguments.budget]
    try:
        skip = None if arguments.skip_layers is None else numbers(arguments.skip_layers)
        ((name, options),) = options_of(arguments.policy, budgets, skip, defaults)
        made = make(name, options, (arguments.seed,))
    except KvmnnError as exc:
        raise UsageError(str(exc)) from None
    if not made.evicts and (budgets or skip):
        raise UsageError("--budget and --skip-layers need a --policy")
    if skip is not None and made.evicts and not takes(arguments.policy, "skip_layers"):
        raise UsageError(f"--skip-layers has no effect here: {name} has no skip_layers")
    if budgets and options.get("budget") != arguments.budget:
        why = "the policy says its size itself" if takes(arguments.policy, "budget") else f"{name}: {made.budget_means}"
        raise UsageError(f"--policy {arguments.policy} and --budget {arguments.budget}: {why}".replace("`", ""))
    return LabelledPolicy(policy=made, label=label_of(type(made), options), options=options)
