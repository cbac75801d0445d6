"""Tables of two projects: their configurations, and how they measured them.

A preset is measured twice: soundly, every configuration on the same tokens in the same chunks, and by its project's own
definitions (`Row.project`), so that the project's table can be made again.

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

from ...errors import KvmnnError
from ...policies.base import BUFFER
from ...policies.specs import numbers, parse_spec
from ...policies.streaming import Streaming
from ...text import did_you_mean
from .configurations import FULL, Configuration, ProjectDefinition, shares

SIZES = (256, 512, 1024)
STRATEGIES = ("keep_low", "keep_high", "random")
H2O = ((4, 32, 256), (8, 32, 256), (8, 64, 512))
"""Sink, recent and capacity of the project's H2O caches."""
STREAMING_SINK = 8
BASELINE_CHUNK = 1024

Options = Mapping[str, str]


def preset(spec: str, skip_layers: tuple[int, ...] | None = None) -> list[Configuration]:
    """The configurations of ``NAME`` or ``NAME:option=value,...``; lists are joined by ``+``.

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
    name, options = parse_spec(spec, FLAGS)
    if name not in PRESETS:
        raise KvmnnError(f"unknown preset {name!r}: expected one of {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}")
    make, known = PRESETS[name]
    known = (*known, "no_baseline")
    for option in options:
        if option not in known:
            meant = did_you_mean(option, known)
            raise KvmnnError(f"preset {name} has no option {option!r}: expected {', '.join(known)}{meant}")
        if option in FLAGS and options[option] != "true":
            raise KvmnnError(f"preset {name}: {option} takes no value")
    if "skip_layers" in known and skip_layers is not None:
        options.setdefault("skip_layers", "+".join(map(str, skip_layers)))
    made = [replace(entry, preset=name) for entry in make(options)]
    if "no_baseline" in options:
        made = [entry for entry in made if entry.policy != FULL]
    for entry in made:
        entry.make()
    return made


def _knorm_fixed(options: Options) -> Iterator[Configuration]:
    skip = _skipped(options)
    sizes = numbers(options["fix_kv_sizes"]) if "fix_kv_sizes" in options else SIZES
    strategies = options.get("strategies", "+".join(STRATEGIES)).split("+")
    if "keep_ratio" in options and "keep_ratios" in options:
        raise KvmnnError("knorm-fixed: keep_ratio and keep_ratios are the same: say one")
    ratios = shares(options.get("keep_ratios", options.get("keep_ratio", "0.2")))
    yield _baseline("E1")
    for size in sizes:
        for ratio, strategy in product(ratios, strategies):
            yield _fixed(f"fix {size} {strategy} {ratio:g}", size, ratio, strategy, skip)
        if "no_recent_only" not in options:
            yield _entry(f"recent_only {size}", "recent_only", {"budget": size, "skip_layers": skip})


def _knorm_ratio(options: Options) -> Iterator[Configuration]:
    skip, prune_after = _skipped(options), _number("knorm-ratio", options, "prune_after", 1000)
    yield _baseline("E1")
    for ratio in shares(options.get("keep_ratios", "1.0+0.8+0.5+0.3")):
        chosen = {"keep_ratio": ratio, "prune_after": prune_after, "skip_layers": skip}
        yield _entry(f"l2_compress {ratio:g} after {prune_after}", "l2_ratio", chosen)


def _knorm_ablation(options: Options) -> Iterator[Configuration]:
    """Each row differs from the one before in one thing; the last two are a pair of their own."""
    name, skip = "knorm-ablation", _skipped(options)
    threshold, size = _number(name, options, "prune_after", 512), _number(name, options, "fix_kv_size", 512)
    ratio, recent = _share(name, options, "keep_ratio", 0.8), _share(name, options, "recent", 0.5)
    base = {"keep_ratio": ratio, "skip_layers": skip}
    yield _baseline("E1")
    for label, form, first in (
        (f"by norm, from {threshold}", "original", threshold),
        (f"by norm, above {threshold}", "original", threshold + 1),  # the same as the project's threshold
        (f"in time, above {threshold}", "seed", threshold),
    ):
        yield _entry(f"{ratio:g} {label}", "l2_ratio", base | {"prune_after": first, "form": form})
    yield _fixed(f"fix {size} pure", size, 0.0, "keep_low", skip)
    yield _fixed(f"fix {size} hybrid {recent:g}", size, recent, "keep_low", skip)


def _streaming_h2o(options: Options) -> Iterator[Configuration]:
    caches = list(dict.fromkeys(cache for base in H2O for cache in _h2o_caches(base, options)))
    yield _baseline("E2")
    sinks = numbers(options["sink"]) if "sink" in options else (STREAMING_SINK,)
    for sink, window in product(sinks, dict.fromkeys(capacity for _, _, capacity in caches)):
        label = f"streaming_{sink}_{window}"
        lazy = Streaming.lazy(sink, window)
        chosen = {"budget": lazy.budget, "sink": sink, "buffer": BUFFER}
        definition = ProjectDefinition("E2", label, chunk=window, speed=True)
        yield Configuration(label, "streaming", chosen, definition=definition)
    for sink, recent, capacity in caches:
        label = f"h2o_{sink}_{recent}_{capacity}"
        chosen = {"budget": capacity, "sink": sink, "recent": recent, "buffer": BUFFER}
        definition = ProjectDefinition("E2", label, chunk=capacity, speed=True)
        yield Configuration(label, "h2o_tokens", chosen, definition=definition)


def _h2o_caches(base: tuple[int, int, int], options: Options) -> Iterator[tuple[int, int, int]]:
    """One of the project's caches with the numbers that were asked for in the place of its own."""
    if "capacity" in options and "heavy_hitter" in options:
        raise KvmnnError("streaming-h2o: capacity is sink + heavy_hitter + recent: say one of capacity, heavy_hitter")
    sinks, recents = (
        numbers(options[name]) if name in options else (own,)
        for name, own in zip(("sink", "recent"), base, strict=False)
    )
    for sink, recent in product(sinks, recents):
        if "heavy_hitter" in options:
            capacities = tuple(sink + heavy + recent for heavy in numbers(options["heavy_hitter"]))
        else:
            capacities = numbers(options["capacity"]) if "capacity" in options else (base[2],)
        for capacity in capacities:
            if capacity < max(sink + recent, 1):
                raise KvmnnError(f"streaming-h2o: capacity {capacity} has no room for {sink} sinks and {recent} recent")
            yield sink, recent, capacity


def _fixed(label: str, size: int, ratio: float, strategy: str, skip: tuple[int, ...]) -> Configuration:
    chosen = {"budget": size, "recent_ratio": ratio, "strategy": strategy, "skip_layers": skip}
    return _entry(label, "l2_fixed", chosen)


def _entry(label: str, policy: str, options: Mapping[str, Any]) -> Configuration:
    """A configuration of l2_compress / KnormPress; its own label also names the layers that are never cut."""
    skipped = "+".join(map(str, options["skip_layers"]))
    ours = f"{label} skip_layers={skipped}" if skipped else label
    return Configuration(ours, policy, options, definition=ProjectDefinition("E1", label))


def _baseline(evaluation: str) -> Configuration:
    if evaluation == "E1":
        return Configuration("baseline", FULL, definition=ProjectDefinition("E1", "baseline"))
    return Configuration("baseline", FULL, definition=ProjectDefinition("E2", "baseline", BASELINE_CHUNK, speed=True))


def _skipped(options: Options) -> tuple[int, ...]:
    return numbers(options.get("skip_layers", "0+1"))


def _number(preset: str, options: Options, name: str, default: int) -> int:
    found = numbers(options[name]) if name in options else (default,)
    if len(found) != 1:
        raise KvmnnError(f"{preset}: {name} is {options[name]!r}: expected one number")
    return found[0]


def _share(preset: str, options: Options, name: str, default: float) -> float:
    found = shares(options[name]) if name in options else (default,)
    if len(found) != 1:
        raise KvmnnError(f"{preset}: {name} is {options[name]!r}: expected one share")
    return found[0]


FLAGS = ("no_baseline", "no_recent_only")
"""Options without a value."""

PRESETS: dict[str, tuple[Callable[[Options], Iterator[Configuration]], tuple[str, ...]]] = {
    "knorm-fixed": (
        _knorm_fixed,
        ("fix_kv_sizes", "strategies", "keep_ratios", "keep_ratio", "no_recent_only", "skip_layers"),
    ),
    "knorm-ratio": (_knorm_ratio, ("keep_ratios", "prune_after", "skip_layers")),
    "knorm-ablation": (_knorm_ablation, ("keep_ratio", "prune_after", "fix_kv_size", "recent", "skip_layers")),
    "streaming-h2o": (_streaming_h2o, ("sink", "heavy_hitter", "recent", "capacity")),
}
"""Every preset by its name: what makes its configurations, and its options."""
