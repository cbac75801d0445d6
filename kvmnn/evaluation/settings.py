"""Settings of an evaluation, and its configurations: policies with options and budgets, and their labels."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields, replace
from typing import Any, Literal, Self

from .._util.dataclass import dataclass
from .._util.option_fields import OPTION_KEY
from ..errors import KvmnnError, OptionError
from ..files.schema import Record
from ..policies.policy import Budget, FullCache, Policy
from ..policies.registry import (
    LabelledPolicy,
    convert_options_to_json,
    format_label,
    get_policy_class,
    hash_registered_file,
    is_known_class,
    is_registered,
    register_policy,
)
from ..policies.specs import accepts_option, build_policy, expand_spec, split_spec
from ..profiles import hash_profile
from ..quantization import create_codec
from ..runtime import RuntimeConfig
from .options import EvaluationOptions
from .records import CellKind

FULL_POLICY = FullCache.name
"""The policy that evicts nothing."""


@dataclass(frozen=True)
class ProjectDefinition(Record):
    """How a preset's project measured a configuration (see `presets`)."""

    #: ``"E1"``: token by token; ``"E2"``: in chunks.
    evaluation: Literal["E1", "E2"]
    #: The project's name for the configuration.
    label: str
    #: Tokens fed at once.
    chunk: int = 1
    #: Whether the project also timed generation (E3).
    speed: bool = False


@dataclass(frozen=True)
class Configuration(Record):
    """One line of the table: a policy with its options."""

    #: Name in the table.
    label: str
    #: ``"full"`` or a name in `kvmnn.policies.POLICIES`.
    policy: str = FULL_POLICY
    #: Arguments of the policy that differ from its defaults. Random generators are not among them: each document gets
    #: its own, from the settings' seed.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Name of its preset.
    preset: str | None = None
    #: Definition of the measurement in the preset's project.
    definition: ProjectDefinition | None = field(default=None, metadata={"key": "seed_method"})
    #: ``"stored"`` is a common mistake, for comparison: positions from the stored length.
    positions: Literal["true", "stored"] = "true"
    #: Whether it continues from the initial cache of the evaluation: K and V that were computed elsewhere.
    uses_initial_cache: bool = field(default=False, metadata={"key": "begun"})
    #: Spec of the lossy codec that holds the cache, with the options that differ from their defaults.
    codec: str | None = field(default=None, metadata={"omit": True})

    def create_policy(self, seed: Sequence[int] = (0,)) -> Policy:
        """Create the policy; one that draws at random gets a generator of this seed."""
        return build_policy(self.policy, self.options, seed)

    def list_options(self) -> dict[str, Any]:
        """Return all options of the policy as JSON values, defaults included."""
        return convert_options_to_json(self.create_policy().to_options())

    @property
    def is_baseline(self) -> bool:
        """Return whether this is the full cache as the model computes it."""
        is_plain = self.codec is None and self.positions == "true"
        return self.policy == FULL_POLICY and is_plain and not self.uses_initial_cache

    @property
    def identity(self) -> dict[str, Any]:
        """What the results depend on, as JSON values: all options, defaults included, without the label."""
        options = self.list_options()
        identity: dict[str, Any] = {"policy": self.policy, "options": options, "positions": self.positions}
        identity |= {} if self.codec is None else {"codec": self.codec}
        paths = [path for path in (self._find_codec_profile(), *map(options.get, _FILE_OPTIONS)) if path]
        identity |= {"profiles": [hash_profile(path) for path in paths]} if paths else {}
        if is_registered(self.policy):  # a changed policy has other results under the same name
            identity["file"] = hash_registered_file(self.policy)
        return identity | ({"begun": True} if self.uses_initial_cache else {})

    def _find_codec_profile(self) -> str:
        """Return the file that the codec reads, whose content may change under its name."""
        return getattr(None if self.codec is None else create_codec(self.codec), "profile", "")

    @classmethod
    def from_dict(cls, document: object, label: str = "configuration", *, complete: bool = False) -> Self:
        """Create a configuration from `to_dict`."""
        configuration = super().from_dict(document, label, complete=complete)
        options = {
            key: tuple(value) if isinstance(value, list) else value for key, value in configuration.options.items()
        }
        return replace(configuration, options=options)


_FILE_OPTIONS = ("profile", "pattern")
"""Options of policies that name files."""

PolicyLike = str | Policy | Configuration
"""A policy by its spec or itself, or a configuration."""


# -- from the command line --------------------------------------------------------------------------------------------


def expand_configurations(
    specs: Iterable[str],
    budgets: Sequence[int],
    skip_layers: tuple[int, ...] | None = None,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Configuration]:
    """Combine every policy with every budget.

    A budget that a policy of the run does not take is passed over for that policy; the notes of the results say which.

    Parameters
    ----------
    specs
        ``NAME`` or ``NAME:option=value,...``, read by `kvmnn.policies.specs`.
    budgets
        Tokens. A spec that says its own budget or keep_ratio is taken once, and one without any budget to take uses
        its policy's default.
    skip_layers
        Layers never cut, for specs that do not say.
    defaults
        Options that specs of a policy do not say, by its name.

    Raises
    ------
    OptionError
        For budgets that none of the policies takes.
    KvmnnError
        For policies and options that do not exist and values that the policy refuses.
    """
    specs = list(specs)
    expanded = [
        build_configuration(*options) for spec in specs for options in expand_spec(spec, budgets, skip_layers, defaults)
    ]
    check_budgets(specs, budgets)
    return expanded


def parse_budget(text: str) -> Budget:
    """Parse a number of tokens, or a share of them below 100 %; raise `OptionError` for anything else."""
    with suppress(KvmnnError):
        budget = Budget.parse(text)
        if budget.share is None or budget.share < 1:
            return budget
    raise OptionError(f"{text!r} is not a whole number of tokens or a share below 100%")


def check_budgets(specs: Sequence[str], budgets: Sequence[int]) -> None:
    """Raise `OptionError` for budgets without effect, because no policy takes one."""
    if not budgets or not specs or any(accepts_option(spec, "budget") for spec in specs):
        return
    budget_texts = [f"{spec}: {get_policy_class(split_spec(spec)[0]).budget_help}" for spec in specs]
    sizes_text = " and ".join(f"{budget:,}" for budget in budgets)
    raise OptionError(f"a budget of {sizes_text} tokens has no effect here; {'; '.join(budget_texts)}".replace("`", ""))


def resolve_configurations(
    policies: PolicyLike | Sequence[PolicyLike], budgets: int | str | Sequence[int | str], tokens: int
) -> list[Configuration]:
    """Resolve the arguments of `kvmnn.evaluation.evaluate`; shares of budgets are of `tokens`."""
    entries = [policies] if isinstance(policies, PolicyLike) else policies
    sizes = [budgets] if isinstance(budgets, int | str) else budgets
    budget_tokens = [parse_budget(str(size)).resolve(tokens) for size in sizes]
    if budget_tokens and not any(isinstance(entry, str) for entry in entries):
        names = ", ".join(entry.name if isinstance(entry, Policy) else str(entry) for entry in entries) or "none"
        raise OptionError(
            f"budgets are for policies by their specs; a policy that was created has its own, and given are {names}: "
            f"expected a spec such as 'streaming', or create_policy('streaming', budget={budget_tokens[0]}) and no "
            "budgets"
        )
    check_budgets([entry for entry in entries if isinstance(entry, str)], budget_tokens)
    resolved: list[Configuration] = []
    for entry in entries:
        if isinstance(entry, str):
            resolved += [build_configuration(*options) for options in expand_spec(entry, budget_tokens)]
        elif isinstance(entry, Policy):
            if not is_known_class(type(entry)):
                register_policy(type(entry))
            labelled_policy = LabelledPolicy.from_policy(entry)
            resolved.append(Configuration(labelled_policy.label, entry.name, dict(labelled_policy.options)))
        elif isinstance(entry, Configuration):
            resolved.append(entry)
        else:
            raise OptionError(
                f"{entry!r} is a {type(entry).__name__}: expected specs such as 'streaming:budget=256', policies or "
                "configurations"
            )
    return resolved


def combine_codecs(configurations: Sequence[Configuration], codecs: str | Sequence[str]) -> list[Configuration]:
    """Combine the full cache and all configurations that are not of a preset with every codec, in its order.

    Parameters
    ----------
    codecs
        Specs as `kvmnn.quantization.create_codec` takes them, ``"none"`` for the cache as it is; without any, the
        configurations stay as they are.

    Raises
    ------
    KvmnnError
        For codecs and options that do not exist, and values that a codec refuses.
    """
    specs = [codecs] if isinstance(codecs, str) else codecs
    plain_configurations = [entry for entry in configurations if entry.preset is None]
    preset_configurations = [entry for entry in configurations if entry.preset is not None]
    combined = []
    created = [create_codec(spec) for spec in specs] or [None]
    num_labels = Counter(codec.label for codec in created if codec is not None)
    for codec in created:
        if codec is None:
            combined += plain_configurations
            continue
        label = codec.label if num_labels[codec.label] == 1 else codec.spec  # profiles of one name in two folders
        combined.append(Configuration(label, codec=codec.spec))
        combined += [
            replace(entry, label=f"{entry.label} + {label}", codec=codec.spec)
            for entry in plain_configurations
            if not entry.is_baseline
        ]
    return combined + preset_configurations


def build_configuration(policy: str, options: Mapping[str, Any], **fields_by_name: Any) -> Configuration:
    """Build a configuration, labelled by its options, and check them."""
    configuration = Configuration(
        format_label(get_policy_class(policy), options), policy, dict(options), **fields_by_name
    )
    configuration.create_policy()
    return configuration


def parse_ratios(text: str) -> tuple[float, ...]:
    """Parse a list of numbers such as ``0.2+0.5``."""
    try:
        ratios = tuple(float(part) for part in re.split(r"[+,]", text))
    except ValueError:
        raise KvmnnError(f"{text!r}: expected numbers such as 0.2+0.5") from None
    if not all(math.isfinite(ratio) for ratio in ratios):
        raise KvmnnError(f"{text!r}: expected finite numbers")
    return ratios


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(EvaluationOptions, Record):
    """Settings of an evaluation."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, info = getattr(self, entry.name), entry.metadata.get(OPTION_KEY)
            min_value = 1 if entry.name == "threads" else info and info.min_value
            # of deep_from a negative number is the default
            if None not in (value, min_value) and value < min_value and entry.name != "deep_from":
                raise KvmnnError(f"{entry.name} is {value}: expected at least {min_value}")
        if self.frame_dtype not in ("fp16", "fp32"):
            raise KvmnnError(f"frame_dtype is {self.frame_dtype!r}: expected 'fp16' or 'fp32'")
        if self.deep_from < 0:
            object.__setattr__(self, "deep_from", self.tokens // 2)
        object.__setattr__(self, "deep_from", max(self.deep_from, self.prompt))
        if self.packed is not None and self.runtime_config is not None:
            raise KvmnnError("packed and lossless: a cache is held packed or in the lossless runtime")
        object.__setattr__(self, "providers", tuple(self.providers))

    @property
    def runtime_config(self) -> RuntimeConfig | None:
        """Options of the lossless runtime that stores the cache; None without one."""
        return None if self.lossless is None else RuntimeConfig.from_engine(self.lossless)

    def select_cell_settings(self, kind: CellKind) -> dict[str, Any]:
        """Select the settings that a cell of this kind depends on (`kvmnn.evaluation.runner`)."""
        relevant = EvaluationSettings.from_dict(self.to_dict()).to_dict()  # without what a subclass adds
        if self.lossless is not None:
            relevant["lossless"] = RuntimeConfig.identify(self.lossless)
        for name in ("as_seed", "timing", "traces", "prefix_store"):
            relevant.pop(name, None)
        if kind != "timing":
            del relevant["repeats"]
        if kind != "score":
            del relevant["deep_from"], relevant["frame_dtype"], relevant["prompt"]
        if kind == "seed":
            del relevant["chunk"]
        return relevant
