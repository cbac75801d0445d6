"""The command line of ``kvmnn eval``: what is compared, and how it is measured."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import engine_config, shared_options
from .printing import UsageError

if TYPE_CHECKING:
    from ..evaluation import Configuration, Settings, TextOptions
    from ..policies.budget import Budget


def add_compared(parser: Any) -> None:
    """The model, the texts and the configurations."""
    parser.add_argument("model", metavar="MODEL", help="an ONNX decoder with its KV cache outside: file or folder")
    texts = "texts: .txt, .jsonl, .parquet, folders of them"
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help=texts)
    parser.add_argument("--field", default="text", metavar="NAME", help="key or column of the texts (default: text)")
    parser.add_argument(
        "--samples",
        type=shared_options.positive,
        metavar="N",
        help="N of all texts, drawn by --seed (default: all)",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: beside the model)")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="SPEC", help="NAME[:OPTION=VALUE,...] (repeatable)"
    )
    parser.add_argument(
        "--budget",
        nargs="+",
        action="extend",
        type=_budget,
        default=[],
        metavar="N",
        help="tokens kept in each layer, or a share of --tokens such as 25%%",
    )
    engine_config.add_config(parser)
    parser.add_argument(
        "--preset", action="append", default=[], metavar="SPEC", help="NAME[:OPTION=VALUE,...] (repeatable)"
    )
    parser.add_argument("--skip-layers", metavar="L+L", help="layers never cut, where a policy does not say; or none")


def add_settings(parser: Any) -> None:
    """How it is measured."""
    positive, whole = shared_options.positive, shared_options.whole
    group = parser.add_argument_group("how it is measured")
    add = group.add_argument
    add(
        "--tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="tokens of each text that are scored (default: 2048)",
    )
    add("--chunk", type=positive, default=1, metavar="N", help="tokens fed at once (default: 1)")
    add("--prompt", type=whole, default=0, metavar="N", help="tokens of the first step, a prompt (default: as --chunk)")
    add(
        "--deep",
        type=whole,
        metavar="N",
        help="also report tokens from this position on, those of --prompt never (default: half of --tokens)",
    )
    add("--seed", type=whole, default=0, metavar="N", help="of random policies, bootstrap, --samples (default: 0)")
    add("--threads", type=positive, metavar="N", help="onnxruntime's, in each process (default: all over --jobs)")
    add("--jobs", type=positive, default=1, metavar="N", help="processes at a time (default: 1)")
    add("--packed", metavar="BACKEND", help="hold the cache in this packed layout, such as x86-avx2")
    add("--slack", type=whole, metavar="N", help="evicted tokens that may stay masked (default: 1 in 8 of those kept)")
    shared_options.add_provider(group)
    add("--providers", dest="provider", nargs="+", action="extend", help=argparse.SUPPRESS)  # its older name
    add(
        "--frame-dtype",
        choices=("fp16", "fp32"),
        default="fp16",
        help="words in the frames: rounded to fp16 as engines hold them, or an fp32 cache as it is (default: fp16)",
    )
    add("--store", metavar="STORE", help="take beginnings of texts that were scored before from this prefix store")
    add("--repeats", type=positive, metavar="N", help="runs of the timed generation (default: 3)")
    add("--no-timing", action="store_true", help="do not measure TTFT, TPOT and attention time")
    add(
        "--no-project-definitions",
        dest="no_project_definitions",
        action="store_true",
        help="do not measure presets by their projects' definitions",
    )
    add("--no-as-seed", dest="no_project_definitions", action="store_true", help=argparse.SUPPRESS)  # its older name


def configurations(arguments: argparse.Namespace) -> list[Configuration]:
    """Every policy with every budget, and those of presets; `UsageError` for what cannot be."""
    from ..errors import KvmnnError
    from ..evaluation.setup.configurations import configurations
    from ..evaluation.setup.presets import preset
    from ..policies.specs import numbers

    defaults = engine_config.policy_defaults(arguments, arguments.policy)
    try:
        skip = None if arguments.skip_layers is None else numbers(arguments.skip_layers)
        budgets = [budget.of(arguments.tokens) for budget in arguments.budget]
        found = configurations(arguments.policy, budgets, skip, defaults)
        for spec in arguments.preset:
            found += preset(spec, skip)
    except (KvmnnError, TypeError) as exc:
        raise UsageError(str(exc)) from exc
    if skip is not None and not _takes_skip_layers(arguments):
        raise UsageError("--skip-layers has no effect here: no policy and no preset of this run has skip_layers")
    return found


def _takes_skip_layers(arguments: argparse.Namespace) -> bool:
    from ..evaluation.setup.presets import PRESETS
    from ..policies.specs import takes

    presets = (spec.partition(":")[0] for spec in arguments.preset)
    return any(takes(spec, "skip_layers") for spec in arguments.policy) or any(
        "skip_layers" in PRESETS[name][1] for name in presets
    )


def text_options(arguments: argparse.Namespace) -> TextOptions:
    """Which texts are taken; `UsageError` for what cannot be."""
    from ..errors import KvmnnError
    from ..evaluation import TextOptions

    try:
        return TextOptions(field=arguments.field, samples=arguments.samples, seed=arguments.seed)
    except KvmnnError as exc:
        raise UsageError(f"--{exc}") from None


def settings(arguments: argparse.Namespace) -> Settings:
    """How it is measured."""
    from ..evaluation import Settings
    from ..threads.pool import cpu_count

    return Settings(
        tokens=arguments.tokens,
        chunk=arguments.chunk,
        prompt=arguments.prompt,
        deep_from=-1 if arguments.deep is None else arguments.deep,
        seed=arguments.seed,
        threads=arguments.threads or max(1, cpu_count() // arguments.jobs),
        providers=tuple(arguments.provider) or Settings.providers,
        slack=arguments.slack,
        packed=arguments.packed,
        frame_dtype=arguments.frame_dtype,
        repeats=Settings.repeats if arguments.repeats is None else arguments.repeats,
        project_definitions=not arguments.no_project_definitions,
        timing=not arguments.no_timing,
        traces=arguments.plot is not None,
        lossless=engine_config.lossless_document(arguments),
        prefix_store=arguments.store,
    )


def _budget(text: str) -> Budget:
    """Tokens, or a share of them below all."""
    from ..errors import KvmnnError
    from ..policies.budget import Budget

    try:
        found = Budget.parse(text)
    except KvmnnError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
    if found.share is not None and found.share >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of tokens or a share below 100%")
    return found
