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
  first 64 tokens of the first text, and 64. Its "attention time" needs a clock inside the model and is not measured.

True positions are given to the model in all of them, which l2_compress does by accident (layer 0 is not cut) and
StreamingLLM + H2O since it found out. Where a graph cannot evict before it attends, `kvmnn.lm.runner` says what happens
instead. Over several texts the projects' sums run on through all of them; times are means of the texts' values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...errors import KvmnnError
from ...policies.base import BUFFER
from ...policies.specs import numbers, parse_spec
from ...policies.streaming import Streaming
from ...text import did_you_mean
from .configurations import FULL, Configuration, ProjectDefinition, shares

SIZES = (256, 512, 1024)
STRATEGIES = ("keep_low", "keep_high", "random")
BASELINE_CHUNK = 1024


def preset(spec: str, skip_layers: tuple[int, ...] | None = None) -> list[Configuration]:
    """The configurations of ``NAME`` or ``NAME:option=value,...``; lists are joined by ``+``.

    Parameters
    ----------
    spec
        ``knorm-fixed``: fix_kv_sizes (256+512+1024), strategies (keep_low+keep_high+random), keep_ratio (0.2; the
        protected recent share), skip_layers (0+1). ``knorm-ratio``: keep_ratios (1.0+0.8+0.5+0.3), prune_after (1000),
        skip_layers (0+1). ``streaming-h2o`` has no options.
    skip_layers
        For presets that have the option and do not say.

    Raises
    ------
    KvmnnError
        For presets, options and values that do not exist.
    """
    name, options = parse_spec(spec)
    if name not in PRESETS:
        raise KvmnnError(f"unknown preset {name!r}: expected one of {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}")
    make, known = PRESETS[name]
    for option in options:
        if option not in known:
            meant = did_you_mean(option, known)
            raise KvmnnError(f"preset {name} has no option {option!r}: expected {', '.join(known) or 'none'}{meant}")
    if "skip_layers" in known and skip_layers is not None:
        options.setdefault("skip_layers", "+".join(map(str, skip_layers)))
    made = [replace(entry, preset=name) for entry in make(options)]
    for entry in made:
        entry.make()
    return made


def _knorm_fixed(options: Mapping[str, str]) -> list[Configuration]:
    skip = numbers(options.get("skip_layers", "0+1"))
    sizes = numbers(options["fix_kv_sizes"]) if "fix_kv_sizes" in options else SIZES
    strategies = options.get("strategies", "+".join(STRATEGIES)).split("+")
    ratios = shares(options.get("keep_ratio", "0.2"))
    found = [_baseline("E1")]
    for size in sizes:
        for ratio in ratios:
            for strategy in strategies:
                label = f"fix {size} {strategy} {ratio:g}"
                chosen = {"budget": size, "recent_ratio": ratio, "strategy": strategy, "skip_layers": skip}
                found.append(_entry(label, "l2_fixed", chosen))
        found.append(_entry(f"recent_only {size}", "recent_only", {"budget": size, "skip_layers": skip}))
    return found


def _knorm_ratio(options: Mapping[str, str]) -> list[Configuration]:
    skip = numbers(options.get("skip_layers", "0+1"))
    threshold = numbers(options.get("prune_after", "1000"))
    if len(threshold) != 1:
        raise KvmnnError(f"knorm-ratio: prune_after is {options['prune_after']!r}: expected one number")
    prune_after = threshold[0]
    found = [_baseline("E1")]
    for ratio in shares(options.get("keep_ratios", "1.0+0.8+0.5+0.3")):
        label = f"l2_compress {ratio:g} after {prune_after}"
        chosen = {"keep_ratio": ratio, "prune_after": prune_after, "skip_layers": skip}
        found.append(_entry(label, "l2_ratio", chosen))
    return found


def _streaming_h2o(_: Mapping[str, str]) -> list[Configuration]:
    found = [_baseline("E2")]
    for sink, window in ((8, 256), (8, 512)):
        label = f"streaming_{sink}_{window}"
        lazy = Streaming.lazy(sink, window)
        chosen = {"budget": lazy.budget, "sink": sink, "buffer": BUFFER}
        definition = ProjectDefinition("E2", label, chunk=window, speed=True)
        found.append(Configuration(label, "streaming", chosen, definition=definition))
    for sink, recent, capacity in ((4, 32, 256), (8, 32, 256), (8, 64, 512)):
        label = f"h2o_{sink}_{recent}_{capacity}"
        chosen = {"budget": capacity, "sink": sink, "recent": recent, "buffer": BUFFER}
        definition = ProjectDefinition("E2", label, chunk=capacity, speed=True)
        found.append(Configuration(label, "h2o_tokens", chosen, definition=definition))
    return found


def _entry(label: str, policy: str, options: Mapping[str, Any]) -> Configuration:
    """A configuration of l2_compress / KnormPress; its own label also names the layers that are never cut."""
    skipped = "+".join(map(str, options["skip_layers"]))
    ours = f"{label} skip_layers={skipped}" if skipped else label
    return Configuration(ours, policy, options, definition=ProjectDefinition("E1", label))


def _baseline(evaluation: str) -> Configuration:
    if evaluation == "E1":
        return Configuration("baseline", FULL, definition=ProjectDefinition("E1", "baseline"))
    return Configuration("baseline", FULL, definition=ProjectDefinition("E2", "baseline", BASELINE_CHUNK, speed=True))


PRESETS: dict[str, tuple[Callable[[Mapping[str, str]], list[Configuration]], tuple[str, ...]]] = {
    "knorm-fixed": (_knorm_fixed, ("fix_kv_sizes", "strategies", "keep_ratio", "skip_layers")),
    "knorm-ratio": (_knorm_ratio, ("keep_ratios", "prune_after", "skip_layers")),
    "streaming-h2o": (_streaming_h2o, ()),
}
"""Every preset by its name: what makes its configurations, and its options."""
