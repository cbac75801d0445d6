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

POLICY_EPILOG = """A policy is NAME or NAME:option=value,...: 'streaming', 'h2o_decayed_heads:recent=50%',
'l2_fixed:strategy=random,recent_ratio=0.5' (docs/policies.md has them all); 'full' is the full cache. Tokens always
keep their true positions."""


def add_model_options(parser: Any) -> None:
    """MODEL and how it runs."""
    parser.add_argument("model", metavar="MODEL", help="an ONNX decoder with its KV cache outside: file or folder")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: the one beside the model)")
    parser.add_argument("--policy", metavar="SPEC", default="full", help="which tokens stay (default: full)")
    parser.add_argument(
        "--budget", type=shared_options.parse_whole, metavar="N", help="tokens that the policy keeps in each layer"
    )
    parser.add_argument(
        "--skip-layers", metavar="L+L", help="layers that are never cut, or none (default: the policy's)"
    )
    engine_config.add_config_options(parser)
    parser.add_argument("--packed", metavar="BACKEND", help="hold the cache in the packed layout of this MNN backend")
    parser.add_argument(
        "--chunk",
        type=shared_options.parse_positive,
        metavar="N",
        help="read the text N tokens at a time (default: at once)",
    )
    parser.add_argument(
        "--seed", type=shared_options.parse_whole, default=0, metavar="N", help="of all that is drawn (default: 0)"
    )
    parser.add_argument(
        "--threads",
        type=shared_options.parse_positive,
        default=1,
        metavar="N",
        help="threads of onnxruntime (default: 1)",
    )
    shared_options.add_provider(parser)


def build_run_options(arguments: argparse.Namespace) -> RunOptions:
    """How the model runs, as the arguments of `add_model_options` say."""
    from ..lm.graph.onnx_sessions import CPU_PROVIDERS
    from ..lm.run_options import RunOptions

    return RunOptions(
        tokenizer=arguments.tokenizer,
        chunk=arguments.chunk,
        packed=arguments.packed,
        lossless=_build_runtime_config(arguments),
        threads=arguments.threads,
        providers=tuple(arguments.provider) or CPU_PROVIDERS,
    )


def _build_runtime_config(arguments: argparse.Namespace) -> RuntimeConfig | None:
    document = engine_config.build_lossless_document(arguments)
    if document is None:
        return None
    from ..runtime import RuntimeConfig

    return RuntimeConfig.from_engine(document)


def build_policy(arguments: argparse.Namespace) -> LabelledPolicy:
    """The one policy that was asked for; `UsageError` where it makes no sense."""
    from ..errors import KvmnnError
    from ..policies.labels import LabelledPolicy, format_label
    from ..policies.specs import accepts_option, build_policy, expand_spec, parse_ints

    defaults = engine_config.read_policy_defaults(arguments, [arguments.policy])
    budgets = [] if arguments.budget is None else [arguments.budget]
    try:
        skip_layers = None if arguments.skip_layers is None else parse_ints(arguments.skip_layers)
        ((name, options),) = expand_spec(arguments.policy, budgets, skip_layers, defaults)
        policy = build_policy(name, options, (arguments.seed,))
    except KvmnnError as exc:
        raise UsageError(str(exc)) from None
    if not policy.can_evict and (budgets or skip_layers):
        raise UsageError("--budget and --skip-layers need a --policy")
    if skip_layers is not None and policy.can_evict and not accepts_option(arguments.policy, "skip_layers"):
        raise UsageError(f"--skip-layers has no effect here: {name} has no skip_layers")
    if budgets and options.get("budget") != arguments.budget:
        reason = (
            "the policy says its size itself"
            if accepts_option(arguments.policy, "budget")
            else f"{name}: {policy.budget_help}"
        )
        raise UsageError(f"--policy {arguments.policy} and --budget {arguments.budget}: {reason}".replace("`", ""))
    return LabelledPolicy(policy=policy, label=format_label(type(policy), options), options=options)
