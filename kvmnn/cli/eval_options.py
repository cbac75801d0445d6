"""Options of ``kvmnn eval``: policies, measurement, ``--initial-cache``, and how plots are written."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..evaluation.options import EvaluationOptions
from . import input_sources, model_options, packed_options, shared_options
from .console import UsageError
from .options import add_dataclass_options, collect_values

if TYPE_CHECKING:
    from ..evaluation import Configuration, EvaluationSettings, TextOptions
    from ..evaluation.task_result import TaskOptions
    from ..lm.warm_start import InitialCache
    from ..policies.policy import Budget
    from ..reports.plots import PlotOptions


def add_plot_options(parser: Any) -> None:
    """Add ``--plot-format`` and ``--no-titles``."""
    parser.add_argument("--plot-format", metavar="KIND,...", help="of png, svg and pdf (default: png,svg)")
    parser.add_argument("--no-titles", action="store_true", help="plots without titles, for papers that have captions")


def build_plot_options(arguments: argparse.Namespace) -> PlotOptions:
    """Build the plot options; raise `OptionError` for unknown kinds of plots."""
    from ..reports.plots import PlotOptions

    formats = PlotOptions.kinds if arguments.plot_format is None else tuple(arguments.plot_format.split(","))
    return PlotOptions(kinds=formats, titles=not arguments.no_titles)


def add_comparison_options(parser: Any) -> None:
    """Add the options for the model, the texts and the configurations to compare."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="an ONNX decoder with its KV cache outside: file, folder, or name of a pulled model",
    )
    text_help = "texts: .txt, .jsonl, .parquet, folders of them"
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help=text_help)
    parser.add_argument("--field", default="text", metavar="NAME", help="key or column of the texts (default: text)")
    parser.add_argument(
        "--samples",
        type=shared_options.parse_positive,
        metavar="N",
        help="N of all texts, drawn by --seed (default: all)",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: alongside the model)")
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
        help="tokens kept in each layer, or a share of --max-tokens such as 25%%",
    )
    parser.add_argument(
        "--quant",
        action="append",
        default=[],
        metavar="SPEC",
        help="also hold the cache in this lossy codec, alone and with every policy (repeatable): q8_0 to q4_0, tq4, "
        "kivi:k=4,v=4,group=64, transform:FILE,kl=0.002 (a profile); none: policies without one",
    )
    model_options.add_config_options(parser)
    parser.add_argument(
        "--preset", action="append", default=[], metavar="SPEC", help="NAME[:OPTION=VALUE,...] (repeatable)"
    )
    parser.add_argument("--skip-layers", metavar="L+L", help="layers never cut, where a policy does not say; or none")


def add_setting_options(parser: Any) -> None:
    """Add the options that set how to measure."""
    group = parser.add_argument_group("how it is measured")
    add_dataclass_options(group, EvaluationOptions)
    parser.accept("--threads")
    parse_positive = shared_options.parse_positive
    group.add_argument("--jobs", type=parse_positive, default=1, metavar="N", help="processes at a time (default: 1)")
    shared_options.add_provider_option(group)
    group.add_argument(
        "--tasks",
        metavar="SPEC",
        help="also ask questions about contexts made of the texts: all, or copy,retrieval,classification,completion; "
        "items=24,tokens=512 among them",
    )


def build_configurations(arguments: argparse.Namespace, tokens: int) -> list[Configuration]:
    """Combine every policy with every budget, and add those of presets; raise `UsageError` for invalid ones.

    Shares of budgets are of `tokens`.
    """
    from ..errors import KvmnnError
    from ..evaluation.presets import expand_preset
    from ..evaluation.settings import combine_codecs, expand_configurations
    from ..policies.option_parser import parse_ints

    for spec in arguments.policy:
        _check_single_policy(spec)
    defaults = model_options.read_policy_defaults(arguments, arguments.policy)
    try:
        skip_layers = None if arguments.skip_layers is None else parse_ints(arguments.skip_layers)
        budgets = [budget.resolve(tokens) for budget in arguments.budget]
        all_configurations = expand_configurations(arguments.policy, budgets, skip_layers, defaults)
        all_configurations = combine_codecs(all_configurations, arguments.quant)
        for spec in arguments.preset:
            all_configurations += expand_preset(spec, skip_layers)
    except (KvmnnError, TypeError) as exc:
        raise UsageError(str(exc)) from exc
    if skip_layers is not None and not _has_skip_layers(arguments):
        raise UsageError("--skip-layers has no effect here: no policy and no preset of this run has skip_layers")
    return all_configurations


def _check_single_policy(spec: str) -> None:
    """Raise `UsageError` for several names in one ``--policy``."""
    from ..policies.policy import FullCache
    from ..policies.registry import MODEL_POLICIES, POLICIES

    names = spec.partition(":")[0].split(",")
    if len(names) > 1 and {FullCache.name, *POLICIES, *MODEL_POLICIES}.issuperset(names):
        raise UsageError(f"--policy {spec}: expected one policy: repeat --policy for each")


def build_task_options(arguments: argparse.Namespace) -> TaskOptions | None:
    """Build the tasks of ``--tasks``, None without; raise `UsageError` for invalid ones."""
    from ..errors import OptionError
    from ..evaluation.task_result import TaskOptions

    try:
        return None if arguments.tasks is None else TaskOptions.parse(arguments.tasks)
    except OptionError as error:
        raise UsageError(f"--tasks: {error}") from None


def _has_skip_layers(arguments: argparse.Namespace) -> bool:
    from ..evaluation.presets import PRESETS
    from ..policies.specs import accepts_option

    presets = (spec.partition(":")[0] for spec in arguments.preset)
    return any(accepts_option(spec, "skip_layers") for spec in arguments.policy) or any(
        "skip_layers" in PRESETS[name][1] for name in presets
    )


def build_text_options(arguments: argparse.Namespace) -> TextOptions:
    """Build the options that select texts; raise `UsageError` for invalid ones."""
    from ..errors import KvmnnError
    from ..evaluation import TextOptions

    try:
        return TextOptions(field=arguments.field, samples=arguments.samples, seed=arguments.seed or 0)
    except KvmnnError as exc:
        raise UsageError(f"--{exc}") from None


def build_settings(arguments: argparse.Namespace) -> EvaluationSettings:
    """Build the evaluation settings from the arguments."""
    from .._util.parallel import cpu_count
    from ..evaluation import EvaluationSettings

    return EvaluationSettings(
        **collect_values(EvaluationOptions, arguments),
        threads=arguments.threads or max(1, cpu_count() // arguments.jobs),
        providers=tuple(arguments.provider) or EvaluationSettings.providers,
        traces=arguments.plot is not None,
        lossless=model_options.build_lossless_document(arguments),
    )


def _parse_budget(text: str) -> Budget:
    """Parse a number of tokens, or a share of them below 100 %."""
    from ..errors import KvmnnError
    from ..evaluation.settings import parse_budget

    try:
        return parse_budget(text)
    except KvmnnError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


_PACKED_NAMES = (
    *("backend", "lp", "hp", "flash_block", "int8", "name", "layer_order", "pid", "ignore_markers"),
    "ignore_contradictions",
)
_CACHE_OPTIONS = ("token_ids", "undo", "dtype", "tensor", "skip_unsupported", "token_major", "profile")
_EXCLUDED_OPTIONS = (
    ("timing", "nothing is timed"),
    ("prefix_store", "a prefix store says what texts begin with, too"),
    ("preset", "a preset measures texts from their beginning"),
)


def add_start_options(parser: Any) -> None:
    """Add ``--initial-cache`` and the options that describe this cache."""
    group = parser.add_argument_group("initial cache that an engine saved")
    group.add_argument(
        "--initial-cache",
        dest="start",
        nargs="+",
        action="extend",
        metavar="CACHE",
        help="K and V of the beginning of the texts, of the same model: anything kvmnn reads; what follows is scored",
    )
    group.add_argument(
        "--token-ids",
        metavar="IDS",
        help="ids of its text, where it has none: 5,7,9 or a file: a JSON list, numbers, .npy",
    )
    group.add_argument(
        "--invert",
        dest="undo",
        type=lambda text: tuple(text.split(",")),
        metavar="WHAT[,WHAT]",
        help="what llama.cpp did to K and V: k-rotation, v-rotation (of what it quantised), k-order (Llama models); "
        "auto tries all, and takes what is nearest to the model's own K and V; none takes them as they lie",
    )
    shared_options.add_dtype_option(group, "element type of raw input")
    group.add_argument("--tensor", action="append", default=[], metavar="NAME", help="take this array (repeatable)")
    shared_options.add_ignore_option(group, "unsupported", "skip_unsupported", "its arrays that are not K and V")
    group.add_argument("--token-major", action="store_true", help="its arrays are [token, kv_head, head_dim]")
    shared_options.add_profile_option(group)
    shared_options.add_axes_options(parser)
    packed_group = parser.add_argument_group(
        "packed files", "What MNN's prefix caches and live files do not say themselves."
    )
    packed_options.add_layout_options(packed_group, [packed_options.INT8])
    packed_options.add_discovery_options(packed_group)
    packed_options.add_engine_options(parser, "What llama.cpp's files hold several of.", with_blocks=False)


@contextmanager
def open_initial_cache(arguments: argparse.Namespace) -> Iterator[InitialCache | None]:
    """Open the cache of ``--initial-cache`` as the start of the texts; return None without one.

    Raises `UsageError` for options that have no effect.
    """
    if arguments.start is None:
        names = (*_CACHE_OPTIONS, *shared_options.AXES_OPTION_NAMES, *_PACKED_NAMES, *packed_options.SELECTION_OPTIONS)
        shared_options.refuse_given(arguments, names, "is about the cache of --initial-cache, which is missing")
        yield None
        return
    for name, reason in _EXCLUDED_OPTIONS:
        shared_options.refuse_given(arguments, [name], f"has no effect with --initial-cache: {reason}")
    from ..lm.warm_start import read_initial_cache, read_model_interface

    model = read_model_interface(arguments.model)
    fixed_values = {
        "tokens": (),
        "model": None,
        "packed": False,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
    }
    cache_arguments = argparse.Namespace(**vars(arguments) | fixed_values | {"undo": None})
    source = input_sources.load(
        arguments.start, cache_arguments, with_frames=True, used_options=("token_ids", *fixed_values)
    )
    input_sources.report_notes(source.skipped_arrays, arguments, "skipped")
    ids = None if arguments.token_ids is None else packed_options.load_ids(arguments)
    with read_initial_cache(
        source, model, ids, inverted_transforms=arguments.undo or (), token_major=arguments.token_major
    ) as initial_cache:
        yield initial_cache
