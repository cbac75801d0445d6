"""``kvmnn plan``: which tokens H2O, or another policy, would keep."""

from __future__ import annotations

import argparse
import shutil
from typing import TYPE_CHECKING, Any

from .. import (
    axes_options,
    engine_options,
    h2o_options,
    idle_options,
    loading,
    packed_options,
    printing,
    shared_options,
    streams,
)
from ..printing import UsageError

if TYPE_CHECKING:
    from ...h2o.layer_plans import LayerPlans
    from ...policies import Policy
    from ...policies.cache_plan import CachePlan

_TEXT = """Plan an eviction: what would stay, and a picture of it. Nothing is changed.

Without --policy, H2O as the engine plans it, from scores of blocks or from attention. Every layer is planned as if it
triggered now. IN is an array with one axis (scores of blocks) or with two to four (attention: [heads, keys], [heads,
queries, keys], [layers, heads, queries, keys]), a file of one such array for each layer, or a .json list of scores.
What torch.save(outputs.attentions) wrote is a list of layers, [batch, heads, queries, keys]: --batch N takes one text.

  kvmnn plan attention.npy --block 64 --sink 32 --recent 256 --target-ratio 3.5
  kvmnn plan attention.npy --config config.json
  kvmnn plan scores.npz -o plan.json

With --policy, a cache: anything that kvmnn reads, as a prompt that was attended once. SPEC is one of `kvmnn eval`,
of a policy that looks at lengths or keys, as a cache holds no attention.

  kvmnn plan cache.pt --policy streaming:sink=4,budget=512 -o plan.json
  kvmnn plan chat.session --kv-heads 8 --policy knorm:keep_ratio=0.5
  kvmnn compact CACHE/ -o small/ --plan plan.json

Pairs are begin:size of stored tokens, for `kvmnn compact`. Where each KV head keeps tokens of its own, the document has
those of each head, and compact refuses it: packed files hold the same tokens for all heads."""

_OF_CACHES = (
    "seed",
    "token_major",
    *(name for name in axes_options.NAMES if name != "kv_batch"),
    *(name for name in packed_options.LAYING if name != "tokens"),
    *engine_options.CHOOSING,
)


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "plan", run, "which tokens H2O or a policy would keep", _TEXT)
    parser.add_argument("inputs", nargs="+", metavar="IN", help="scores of blocks, or attention; with --policy a cache")
    shared_options.add_output(parser, "JSON file for `kvmnn compact --plan`; - for standard output")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="SPEC", help="NAME[:OPTION=VALUE,...], which plans a cache"
    )
    parser.add_argument(
        "--seed", type=shared_options.whole, default=0, metavar="N", help="of a random policy (default: 0)"
    )
    parser.add_argument("--no-map", action="store_true", help="leave the picture out")
    shared_options.add_source(parser, "what raw words are")
    parser.add_argument("--token-major", action="store_true", help="arrays of K and V are [token, kv_head, head_dim]")
    parser.add_argument(
        "--tokens",
        type=packed_options.numbers,
        default=(),
        metavar="N[,N...]",
        help="tokens that scores are about; live tokens of packed files (of each layer)",
    )
    h2o_options.add_h2o(parser)
    packed_options.add_packed(parser, tokens=False)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    to_stdout = arguments.output == printing.STDIO
    if arguments.json and to_stdout:
        raise UsageError("--json and -o - both want standard output")
    output = None if to_stdout else arguments.output
    plan = _of_cache(arguments, output) if arguments.policy else _of_scores(arguments, output)
    if to_stdout:
        printing.print_json(plan.entries())
    if arguments.json:
        printing.show(arguments, "plan", plan)
    width = shutil.get_terminal_size().columns if streams.on_terminal() else 100
    for line in plan.lines(width=width, picture=not arguments.no_map):
        printing.say(arguments, line, data_on_stdout=to_stdout)
    return 0


def _of_scores(arguments: argparse.Namespace, output: str | None) -> LayerPlans:
    from ...formats.h2o_files import plan_file
    from ...formats.options import ReadOptions

    idle_options.refuse(arguments, _OF_CACHES, "is about a cache, which is planned with --policy SPEC")
    if len(arguments.inputs) > 1:
        raise UsageError("several inputs: K and V are planned with --policy SPEC, scores or attention as one file")
    if len(arguments.tokens) > 1:
        raise UsageError("--tokens: expected one number, which all layers of scores have")
    return plan_file(
        arguments.inputs[0],
        h2o_options.config(arguments),
        output,
        options=ReadOptions(
            dtype=arguments.dtype, tensors=tuple(arguments.tensor), skip_unsupported=arguments.skip_unsupported
        ),
        kind=arguments.kind,
        tokens=arguments.tokens[0] if arguments.tokens else None,
        threads=arguments.engine_threads,
        tile=arguments.tile,
        batch=arguments.kv_batch,
        force=arguments.force,
    )


def _of_cache(arguments: argparse.Namespace, output: str | None) -> CachePlan:
    from ...formats.cache_plans import plan_cache

    why = "is about H2O, from scores or attention; of a policy options are said as --policy NAME:option=value"
    idle_options.refuse(arguments, h2o_options.NAMES, why)
    idle_options.refuse(arguments, ["blocks"], "is about bytes, and policies look at numbers: leave it out")
    policy = _policy(arguments)
    asked = argparse.Namespace(**vars(arguments) | {"undo": ("none",)})  # rotated or not, norms are the same
    source = loading.load(arguments.inputs, asked, frames=True, any_heads=not policy.by_head)
    loading.report_skipped(source, arguments)
    with printing.progress(arguments, sum(array.nbytes for array in source.arrays) // 2, "plan") as step:
        return plan_cache(
            source,
            policy,
            output,
            token_major=arguments.token_major,
            force=arguments.force,
            progress=step,
        )


def _policy(arguments: argparse.Namespace) -> Policy:
    from ...errors import KvmnnError
    from ...policies.cache_plan import check_plannable
    from ...policies.specs import make, options_of

    if len(arguments.policy) > 1:
        raise UsageError("--policy: a plan is of one policy: say one")
    (spec,) = arguments.policy
    try:
        ((name, options),) = options_of(spec)
        policy = make(name, options, (arguments.seed,))
        check_plannable(policy)
    except KvmnnError as exc:
        raise UsageError(f"--policy {spec}: {exc}") from None
    return policy
