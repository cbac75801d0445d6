"""``kvmnn plan``: which tokens H2O, or another policy, would keep."""

from __future__ import annotations

import argparse
import shutil
from typing import TYPE_CHECKING, Any

from ..._util.text import LOSSY
from .. import console, input_sources, model_options, packed_options, shared_options, streams
from ..console import UsageError

if TYPE_CHECKING:
    from ...policies import Policy
    from ...policies.h2o.plan import LayerPlans
    from ...policies.plan import CachePlan

_DESCRIPTION = """\
Plan an eviction: which tokens would stay, and a picture of it. Nothing is changed. Without --policy, H2O as the engine
plans it, from scores of blocks or from attention; every layer is planned as if it triggered now. With --policy, any
policy that looks at lengths, keys or values, of a cache.

Without --policy, IN is an array with one axis (scores of blocks) or with two to four (attention: [heads, keys],
[heads, queries, keys], [layers, heads, queries, keys]), a file of one such array for each layer, or a .json list of
scores. What torch.save(outputs.attentions) wrote is a list of layers, [batch, heads, queries, keys]: --part batch=N
takes one text.

With --policy, IN is anything that kvmnn reads as a cache, taken as a prompt that was attended once. SPEC is one of
kvmnn eval, of a policy that looks at lengths, keys or values, as a cache has neither attention nor queries.

Pairs are begin:size of stored tokens, for kvmnn mnn compact --plan. Where each KV head keeps tokens of its own, the
document has those of each head, and compact refuses it: packed files have the same tokens for all heads."""

_CACHE_OPTIONS = (
    "seed",
    "token_major",
    *(name for name in shared_options.AXES_OPTION_NAMES if name != "kv_batch"),
    *(name for name in packed_options.PACKED_OPTION_NAMES if name != "tokens"),
    *packed_options.SELECTION_OPTIONS,
)


_ENGINE_NOTE = (
    "remove is that of kvmnn mnn compact and of MNN's fork (Livia-Tassel/MNN); alibaba/MNN drops a cache of which all "
    "is removed, so token 0 always stays there: remove N - 1, a first pair 0:4 becomes 0:3, every other begin is less "
    "by 1 (docs/layout.md)"
)


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "plan",
        run,
        "which tokens H2O or a policy would keep",
        _DESCRIPTION,
        examples=(
            "kvmnn plan attention.npy --h2o block_tokens=64,sink_tokens=32,target_ratio=3.5",
            "kvmnn plan cache.pt --policy streaming:sink=4,budget=512 -o plan.json",
            "kvmnn plan attention.npy --engine-config config.json",
            "kvmnn plan scores.npz -o plan.json",
            "kvmnn plan chat.session --kv-heads 8 --policy knorm:keep_ratio=0.5",
        ),
        shown="--output --policy --seed --no-map --engine-config --h2o --valid-tokens --kv-heads --part",
    )
    parser.add_argument("inputs", nargs="+", metavar="IN", help="scores of blocks, or attention; with --policy a cache")
    shared_options.add_output_option(parser, "JSON file for `kvmnn mnn compact --plan`; - for standard output")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="SPEC", help="NAME[:OPTION=VALUE,...], which plans a cache"
    )
    parser.add_argument(
        "--seed", type=shared_options.parse_whole, default=0, metavar="N", help="random seed of the policy (default: 0)"
    )
    shared_options.accept_table(parser)
    parser.add_argument("--no-map", action="store_true", help="leave the picture out")
    shared_options.add_source_options(parser, "element type of raw input")
    parser.add_argument("--token-major", action="store_true", help="arrays of K and V are [token, kv_head, head_dim]")
    parser.add_argument(
        "--valid-tokens",
        dest="tokens",
        type=packed_options.parse_counts,
        default=(),
        metavar="N[,N...]",
        help="tokens that scores are about; valid tokens of packed files (of each layer)",
    )
    model_options.add_h2o_options(parser)
    packed_options.add_packed_options(parser, with_tokens=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    to_stdout = arguments.output == console.STDIO
    if arguments.json and to_stdout:
        raise UsageError("--json and -o - both want standard output")
    output = None if to_stdout else arguments.output
    plan = _plan_cache(arguments, output) if arguments.policy else _plan_scores(arguments, output)
    if to_stdout:
        console.print_json(plan.to_plan_entries())
    if arguments.json:
        console.show_result(arguments, "plan", plan)
    else:
        console.write_table(arguments, plan)
    width = shutil.get_terminal_size().columns if streams.is_terminal() else 100
    for line in plan.format_lines(width=width, picture=not arguments.no_map):
        console.print_line(arguments, line, data_on_stdout=to_stdout)
    is_per_head = getattr(plan, "is_per_head", False)
    if arguments.output is not None:
        refusal = "kvmnn mnn compact refuses it, as each KV head keeps tokens of its own"
        purpose = refusal if is_per_head else "for kvmnn mnn compact --plan"
        where = "standard output" if to_stdout else arguments.output
        console.print_line(arguments, f"{where}: the plan; {purpose}", data_on_stdout=to_stdout)
    if plan.label == LOSSY and not arguments.config and not is_per_head:  # only the fork has such a config
        console.print_note(arguments, _ENGINE_NOTE)
    return 0


def _plan_scores(arguments: argparse.Namespace, output: str | None) -> LayerPlans:
    from ...formats.options import ReadOptions
    from ...formats.plan_files import plan_from_file

    shared_options.refuse_given(arguments, _CACHE_OPTIONS, "is about a cache, which is planned with --policy SPEC")
    if len(arguments.inputs) > 1:
        raise UsageError("several inputs: K and V are planned with --policy SPEC, scores or attention as one file")
    if len(arguments.tokens) > 1:
        raise UsageError("--valid-tokens: expected one number, which all layers of scores have")
    return plan_from_file(
        arguments.inputs[0],
        model_options.build_h2o_config(arguments),
        output,
        options=ReadOptions(
            dtype=arguments.dtype, tensors=tuple(arguments.tensor), skip_unsupported=arguments.skip_unsupported
        ),
        input_kind=arguments.kind,
        num_tokens=arguments.tokens[0] if arguments.tokens else None,
        threads=arguments.engine_threads,
        tile=arguments.tile,
        batch=arguments.kv_batch,
        force=arguments.force,
    )


def _plan_cache(arguments: argparse.Namespace, output: str | None) -> CachePlan:
    from ...formats.plan_files import plan_cache

    reason = "is about H2O, from scores or attention; of a policy options are said as --policy NAME:option=value"
    shared_options.refuse_given(arguments, model_options.H2O_OPTION_NAMES, reason)
    shared_options.refuse_given(arguments, ["blocks"], "is about bytes, and policies look at numbers: leave it out")
    policy = _build_policy(arguments)
    cache_arguments = argparse.Namespace(**vars(arguments) | {"undo": ("none",)})  # rotated or not, norms are the same
    source = input_sources.load(arguments.inputs, cache_arguments, with_frames=True, any_heads=not policy.is_per_head)
    input_sources.report_skipped(source, arguments)
    with console.progress_bar(arguments, sum(array.nbytes for array in source.arrays) // 2, "plan") as step:
        return plan_cache(
            source,
            policy,
            output,
            token_major=arguments.token_major,
            force=arguments.force,
            progress=step,
        )


def _build_policy(arguments: argparse.Namespace) -> Policy:
    from ...errors import KvmnnError
    from ...policies.plan import check_plannable
    from ...policies.specs import build_policy, expand_spec

    if len(arguments.policy) > 1:
        raise UsageError("--policy: a plan is of one policy: say one")
    (spec,) = arguments.policy
    try:
        ((name, options),) = expand_spec(spec)
        policy = build_policy(name, options, (arguments.seed,))
        check_plannable(policy)
    except KvmnnError as exc:
        raise UsageError(f"--policy {spec}: {exc}") from None
    return policy
