"""The command line of ``kvmnn eval``: what is compared, and how it is measured."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import engine_config, shared_options
from .printing import UsageError

if TYPE_CHECKING:
    from ..evaluation import Configuration, EvaluationSettings, TextOptions
    from ..policies.budget import Budget


def add_compared_options(parser: Any) -> None:
    """The model, the texts and the configurations."""
    parser.add_argument("model", metavar="MODEL", help="an ONNX decoder with its KV cache outside: file or folder")
    text_help = "texts: .txt, .jsonl, .parquet, folders of them"
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help=text_help)
    parser.add_argument("--field", default="text", metavar="NAME", help="key or column of the texts (default: text)")
    parser.add_argument(
        "--samples",
        type=shared_options.parse_positive,
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
        type=_parse_budget,
        default=[],
        metavar="N",
        help="tokens kept in each layer, or a share of --tokens such as 25%%",
    )
    engine_config.add_config_options(parser)
    parser.add_argument(
        "--preset", action="append", default=[], metavar="SPEC", help="NAME[:OPTION=VALUE,...] (repeatable)"
    )
    parser.add_argument("--skip-layers", metavar="L+L", help="layers never cut, where a policy does not say; or none")


def add_setting_options(parser: Any) -> None:
    """How it is measured."""
    parse_positive, parse_whole = shared_options.parse_positive, shared_options.parse_whole
    group = parser.add_argument_group("how it is measured")
    add = group.add_argument
    add(
        "--tokens",
        type=parse_positive,
        default=2048,
        metavar="N",
        help="tokens of each text that are scored (default: 2048)",
    )
    add("--chunk", type=parse_positive, default=1, metavar="N", help="tokens fed at once (default: 1)")
    add(
        "--prompt",
        type=parse_whole,
        default=0,
        metavar="N",
        help="tokens of the first step, a prompt (default: as --chunk)",
    )
    add(
        "--deep",
        type=parse_whole,
        metavar="N",
        help="also report tokens from this position on, those of --prompt never (default: half of --tokens)",
    )
    add(
        "--seed", type=parse_whole, default=0, metavar="N", help="of random policies, bootstrap, --samples (default: 0)"
    )
    add("--threads", type=parse_positive, metavar="N", help="onnxruntime's, in each process (default: all over --jobs)")
    add("--jobs", type=parse_positive, default=1, metavar="N", help="processes at a time (default: 1)")
    add("--packed", metavar="BACKEND", help="hold the cache in this packed layout, such as x86-avx2")
    add(
        "--slack",
        type=parse_whole,
        metavar="N",
        help="evicted tokens that may stay masked (default: 1 in 8 of those kept)",
    )
    shared_options.add_provider(group)
    add("--providers", dest="provider", nargs="+", action="extend", help=argparse.SUPPRESS)  # its older name
    add(
        "--frame-dtype",
        choices=("fp16", "fp32"),
        default="fp16",
        help="words in the frames: rounded to fp16 as engines hold them, or an fp32 cache as it is (default: fp16)",
    )
    add("--store", metavar="STORE", help="take beginnings of texts that were scored before from this prefix store")
    add("--repeats", type=parse_positive, metavar="N", help="runs of the timed generation (default: 3)")
    add("--no-timing", action="store_true", help="do not measure TTFT, TPOT and attention time")
    add(
        "--no-project-definitions",
        dest="no_project_definitions",
        action="store_true",
        help="do not measure presets by their projects' definitions",
    )
    add("--no-as-seed", dest="no_project_definitions", action="store_true", help=argparse.SUPPRESS)  # its older name


def build_configurations(arguments: argparse.Namespace) -> list[Configuration]:
    """Every policy with every budget, and those of presets; `UsageError` for what cannot be."""
    from ..errors import KvmnnError
    from ..evaluation.setup.configurations import expand_configurations
    from ..evaluation.setup.presets import expand_preset
    from ..policies.specs import parse_ints

    defaults = engine_config.read_policy_defaults(arguments, arguments.policy)
    try:
        skip_layers = None if arguments.skip_layers is None else parse_ints(arguments.skip_layers)
        budgets = [budget.resolve(arguments.tokens) for budget in arguments.budget]
        all_configurations = expand_configurations(arguments.policy, budgets, skip_layers, defaults)
        for spec in arguments.preset:
            all_configurations += expand_preset(spec, skip_layers)
    except (KvmnnError, TypeError) as exc:
        raise UsageError(str(exc)) from exc
    if skip_layers is not None and not _has_skip_layers(arguments):
        raise UsageError("--skip-layers has no effect here: no policy and no preset of this run has skip_layers")
    return all_configurations


def _has_skip_layers(arguments: argparse.Namespace) -> bool:
    from ..evaluation.setup.presets import PRESETS
    from ..policies.specs import accepts_option

    presets = (spec.partition(":")[0] for spec in arguments.preset)
    return any(accepts_option(spec, "skip_layers") for spec in arguments.policy) or any(
        "skip_layers" in PRESETS[name][1] for name in presets
    )


def build_text_options(arguments: argparse.Namespace) -> TextOptions:
    """Which texts are taken; `UsageError` for what cannot be."""
    from ..errors import KvmnnError
    from ..evaluation import TextOptions

    try:
        return TextOptions(field=arguments.field, samples=arguments.samples, seed=arguments.seed)
    except KvmnnError as exc:
        raise UsageError(f"--{exc}") from None


def build_settings(arguments: argparse.Namespace) -> EvaluationSettings:
    """How it is measured."""
    from ..evaluation import EvaluationSettings
    from ..threads.pool import cpu_count

    return EvaluationSettings(
        tokens=arguments.tokens,
        chunk=arguments.chunk,
        prompt=arguments.prompt,
        deep_from=-1 if arguments.deep is None else arguments.deep,
        seed=arguments.seed,
        threads=arguments.threads or max(1, cpu_count() // arguments.jobs),
        providers=tuple(arguments.provider) or EvaluationSettings.providers,
        slack=arguments.slack,
        packed=arguments.packed,
        frame_dtype=arguments.frame_dtype,
        repeats=EvaluationSettings.repeats if arguments.repeats is None else arguments.repeats,
        project_definitions=not arguments.no_project_definitions,
        timing=not arguments.no_timing,
        traces=arguments.plot is not None,
        lossless=engine_config.build_lossless_document(arguments),
        prefix_store=arguments.store,
    )


def _parse_budget(text: str) -> Budget:
    """Tokens, or a share of them below all."""
    from ..errors import KvmnnError
    from ..policies.budget import Budget

    try:
        budget = Budget.parse(text)
    except KvmnnError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
    if budget.share is not None and budget.share >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of tokens or a share below 100%")
    return budget
