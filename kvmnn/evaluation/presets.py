"""Presets that reproduce the tables of two projects: their configurations, and their definitions of the measurements.

A preset is measured twice: soundly, every configuration on the same tokens in the same chunks, and by its project's own
definitions (`ResultRow.project_stats`), so that the project's table can be made again.

* **E1** (l2_compress, which KnormPress of kvpress follows; ``knorm-*``) feeds one token of the text at a time, without
  bos, and compresses after each: of n tokens n-1 are scored, perplexity is exp(mean NLL) and accuracy hits/(n-1). Its
  TTFT is the time of the very first call, one token into an empty cache; TPOT the mean of all other calls; throughput n
  over the time of all; its final cache size is that of the first layer that is not skipped.
* **E2** (StreamingLLM + H2O; ``streaming-h2o``) feeds chunks, also without bos, and each method has a chunk of its own:
  streaming its window, H2O its capacity, the baseline 1,024 tokens. The loss of a chunk of c tokens is the mean over
  the c-1 tokens that follow another one of the same chunk (the first of a chunk is never scored), weighted by c;
  perplexity is exp of the weighted mean. Chunks whose loss is not finite, and so those of one token, are left out. The
  caches are lazy: they cut when 64 tokens more than their size have come, and at the end of a chunk. So the methods
  score different tokens with different context, which makes the comparison unsound.
* **E3** (with E2) times generation after a warm-up of 5 tokens: TTFT is generating one token from the prompt, TPOT the
  time of generating N tokens, the prompt's included, divided by N. Its prompt and N are not recorded; here they are the
  first 64 tokens of the first text, and 64, and times are medians of `Settings.repeats` runs where the project has one.
  For its peak memory, that of torch's allocator on the device, stands the highest resident memory of the process. Its
  "attention time" needs a clock inside the model and is not measured.

**The ablation** (``knorm-ablation``) takes the two improvements that l2_compress / KnormPress names over the paper's
code apart. That code stores by norm and cuts from `prune_after` tokens on; the project stores in temporal order and
cuts above as many. So the step from the first to the second is the threshold alone, the next the order alone (attention
does not see it: keys carry their positions), and the last pair has tokens chosen by norm only against the same number
with a recent part protected (the hybrid). All of them skip the same layers, as the project's evaluation did.

True positions are given to the model in all of them, which l2_compress does by accident (layer 0 is not cut) and
StreamingLLM + H2O since it found out. Where a graph cannot evict before it attends, `kvmnn.lm.runner` says what happens
instead. Over several texts the projects' sums run on through all of them; times are means of the texts' values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from .._util.text import suggest
from ..errors import KvmnnError
from ..policies.option_parser import parse_ints
from ..policies.policy import DEFAULT_BUFFER_TOKENS
from ..policies.specs import split_spec
from ..policies.streaming import Streaming
from .settings import FULL_POLICY, Configuration, ProjectDefinition, parse_ratios

KNORM_SIZES = (256, 512, 1024)
KNORM_STRATEGIES = ("keep_low", "keep_high", "random")
H2O_CACHES = ((4, 32, 256), (8, 32, 256), (8, 64, 512))
"""Sink, recent and capacity of the project's H2O caches."""
STREAMING_SINK = 8
BASELINE_CHUNK_TOKENS = 1024

PresetOptions = Mapping[str, str]


def expand_preset(spec: str, skip_layers: tuple[int, ...] | None = None) -> list[Configuration]:
    """Expand ``NAME`` or ``NAME:option=value,...`` to the configurations of a preset; lists are joined by ``+``.

    Parameters
    ----------
    spec
        ``knorm-fixed``: fix_kv_sizes (256+512+1024), strategies (keep_low+keep_high+random), keep_ratios (0.2; the
        protected recent share, keep_ratio is the same), no_recent_only, skip_layers (0+1). ``knorm-ratio``: keep_ratios
        (1.0+0.8+0.5+0.3), prune_after (1000), skip_layers (0+1). ``knorm-ablation``: keep_ratio (0.8), prune_after
        (512), fix_kv_size (512), recent (0.5; the protected share of the hybrid), skip_layers (0+1).
        ``streaming-h2o``: sink, recent, and either capacity or heavy_hitter, tokens of its H2O caches: each takes the
        place of that number in the project's three. All of them: no_baseline, without the baseline by the project's
        definition (the full cache is measured all the same).
    skip_layers
        For presets that have the option and do not say.

    Raises
    ------
    KvmnnError
        For presets, options and values that do not exist.
    """
    name, options = split_spec(spec, FLAG_OPTIONS)
    if name not in PRESETS:
        raise KvmnnError(f"unknown preset {name!r}: expected one of {', '.join(PRESETS)}{suggest(name, PRESETS)}")
    create_entries, option_names = PRESETS[name]
    option_names = (*option_names, "no_baseline")
    for option in options:
        if option not in option_names:
            suggestion = suggest(option, option_names)
            raise KvmnnError(f"preset {name} has no option {option!r}: expected {', '.join(option_names)}{suggestion}")
        if option in FLAG_OPTIONS and options[option] != "true":
            raise KvmnnError(f"preset {name}: {option} takes no value")
    if "skip_layers" in option_names and skip_layers is not None:
        options.setdefault("skip_layers", "+".join(map(str, skip_layers)))
    configurations = [replace(entry, preset=name) for entry in create_entries(options)]
    if "no_baseline" in options:
        configurations = [entry for entry in configurations if entry.policy != FULL_POLICY]
    for entry in configurations:
        entry.create_policy()
    return configurations


def _expand_knorm_fixed(options: PresetOptions) -> Iterator[Configuration]:
    skip_layers = _parse_skip_layers(options)
    sizes = parse_ints(options["fix_kv_sizes"]) if "fix_kv_sizes" in options else KNORM_SIZES
    strategies = options.get("strategies", "+".join(KNORM_STRATEGIES)).split("+")
    if "keep_ratio" in options and "keep_ratios" in options:
        raise KvmnnError("knorm-fixed: keep_ratio and keep_ratios are the same: say one")
    ratios = parse_ratios(options.get("keep_ratios", options.get("keep_ratio", "0.2")))
    yield _build_baseline("E1")
    for size in sizes:
        for ratio, strategy in product(ratios, strategies):
            yield _build_fixed(f"fix {size} {strategy} {ratio:g}", size, ratio, strategy, skip_layers)
        if "no_recent_only" not in options:
            yield _build_entry(f"recent_only {size}", "recent_only", {"budget": size, "skip_layers": skip_layers})


def _expand_knorm_ratio(options: PresetOptions) -> Iterator[Configuration]:
    skip_layers, prune_after = _parse_skip_layers(options), _parse_number("knorm-ratio", options, "prune_after", 1000)
    yield _build_baseline("E1")
    for ratio in parse_ratios(options.get("keep_ratios", "1.0+0.8+0.5+0.3")):
        policy_options = {"keep_ratio": ratio, "prune_after": prune_after, "skip_layers": skip_layers}
        yield _build_entry(f"l2_compress {ratio:g} after {prune_after}", "l2_ratio", policy_options)


def _expand_knorm_ablation(options: PresetOptions) -> Iterator[Configuration]:
    """Yield rows that each differ from the one before in one option; the last two form a pair."""
    name, skip_layers = "knorm-ablation", _parse_skip_layers(options)
    threshold, size = _parse_number(name, options, "prune_after", 512), _parse_number(name, options, "fix_kv_size", 512)
    ratio, recent_ratio = _parse_ratio(name, options, "keep_ratio", 0.8), _parse_ratio(name, options, "recent", 0.5)
    base = {"keep_ratio": ratio, "skip_layers": skip_layers}
    yield _build_baseline("E1")
    for label, form, prune_after in (
        (f"by norm, from {threshold}", "original", threshold),
        (f"by norm, above {threshold}", "original", threshold + 1),  # the same as the project's threshold
        (f"in time, above {threshold}", "seed", threshold),
    ):
        yield _build_entry(f"{ratio:g} {label}", "l2_ratio", base | {"prune_after": prune_after, "form": form})
    yield _build_fixed(f"fix {size} pure", size, 0.0, "keep_low", skip_layers)
    yield _build_fixed(f"fix {size} hybrid {recent_ratio:g}", size, recent_ratio, "keep_low", skip_layers)


def _expand_streaming_h2o(options: PresetOptions) -> Iterator[Configuration]:
    caches = list(dict.fromkeys(cache for base in H2O_CACHES for cache in _expand_h2o_caches(base, options)))
    yield _build_baseline("E2")
    sinks = parse_ints(options["sink"]) if "sink" in options else (STREAMING_SINK,)
    for sink, window in product(sinks, dict.fromkeys(capacity for _, _, capacity in caches)):
        label = f"streaming_{sink}_{window}"
        policy = Streaming.from_window(sink, window)
        policy_options = {"budget": policy.budget, "sink": sink, "buffer": DEFAULT_BUFFER_TOKENS}
        definition = ProjectDefinition("E2", label, chunk=window, speed=True)
        yield Configuration(label, "streaming", policy_options, definition=definition)
    for sink, recent, capacity in caches:
        label = f"h2o_{sink}_{recent}_{capacity}"
        policy_options = {"budget": capacity, "sink": sink, "recent": recent, "buffer": DEFAULT_BUFFER_TOKENS}
        definition = ProjectDefinition("E2", label, chunk=capacity, speed=True)
        yield Configuration(label, "h2o_tokens", policy_options, definition=definition)


def _expand_h2o_caches(base: tuple[int, int, int], options: PresetOptions) -> Iterator[tuple[int, int, int]]:
    """Expand one of the project's caches with the requested numbers in place of its own."""
    if "capacity" in options and "heavy_hitter" in options:
        raise KvmnnError("streaming-h2o: capacity is sink + heavy_hitter + recent: say one of capacity, heavy_hitter")
    sinks, recents = (
        parse_ints(options[name]) if name in options else (default,)
        for name, default in zip(("sink", "recent"), base, strict=False)
    )
    for sink, recent in product(sinks, recents):
        if "heavy_hitter" in options:
            capacities = tuple(sink + num_heavy + recent for num_heavy in parse_ints(options["heavy_hitter"]))
        else:
            capacities = parse_ints(options["capacity"]) if "capacity" in options else (base[2],)
        for capacity in capacities:
            if capacity < max(sink + recent, 1):
                raise KvmnnError(f"streaming-h2o: capacity {capacity} has no room for {sink} sinks and {recent} recent")
            yield sink, recent, capacity


def _build_fixed(label: str, size: int, ratio: float, strategy: str, skip_layers: tuple[int, ...]) -> Configuration:
    policy_options = {"budget": size, "recent_ratio": ratio, "strategy": strategy, "skip_layers": skip_layers}
    return _build_entry(label, "l2_fixed", policy_options)


def _build_entry(label: str, policy: str, options: Mapping[str, Any]) -> Configuration:
    """Build a configuration of l2_compress / KnormPress; its label also names the layers that are never cut."""
    skip_text = "+".join(map(str, options["skip_layers"]))
    full_label = f"{label} skip_layers={skip_text}" if skip_text else label
    return Configuration(full_label, policy, options, definition=ProjectDefinition("E1", label))


def _build_baseline(evaluation: str) -> Configuration:
    if evaluation == "E1":
        return Configuration("baseline", FULL_POLICY, definition=ProjectDefinition("E1", "baseline"))
    return Configuration(
        "baseline", FULL_POLICY, definition=ProjectDefinition("E2", "baseline", BASELINE_CHUNK_TOKENS, speed=True)
    )


def _parse_skip_layers(options: PresetOptions) -> tuple[int, ...]:
    return parse_ints(options.get("skip_layers", "0+1"))


def _parse_number(preset: str, options: PresetOptions, name: str, default: int) -> int:
    values = parse_ints(options[name]) if name in options else (default,)
    if len(values) != 1:
        raise KvmnnError(f"{preset}: {name} is {options[name]!r}: expected one number")
    return values[0]


def _parse_ratio(preset: str, options: PresetOptions, name: str, default: float) -> float:
    values = parse_ratios(options[name]) if name in options else (default,)
    if len(values) != 1:
        raise KvmnnError(f"{preset}: {name} is {options[name]!r}: expected one share")
    return values[0]


FLAG_OPTIONS = ("no_baseline", "no_recent_only")
"""Options without a value."""

PRESETS: dict[str, tuple[Callable[[PresetOptions], Iterator[Configuration]], tuple[str, ...]]] = {
    "knorm-fixed": (
        _expand_knorm_fixed,
        ("fix_kv_sizes", "strategies", "keep_ratios", "keep_ratio", "no_recent_only", "skip_layers"),
    ),
    "knorm-ratio": (_expand_knorm_ratio, ("keep_ratios", "prune_after", "skip_layers")),
    "knorm-ablation": (_expand_knorm_ablation, ("keep_ratio", "prune_after", "fix_kv_size", "recent", "skip_layers")),
    "streaming-h2o": (_expand_streaming_h2o, ("sink", "heavy_hitter", "recent", "capacity")),
}
"""Every preset by its name: what makes its configurations, and its options."""
