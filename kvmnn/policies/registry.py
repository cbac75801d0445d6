"""All policies by name, and their labels with options."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from importlib import util as import_util
from typing import Any, ClassVar, Self

from .._util.dataclass import dataclass
from .._util.text import suggest
from ..errors import KvmnnError
from ..files.schema import Record
from .composed import Composed, ThinK
from .h2o_blocks import H2OBlocks, H2OEngine
from .heavy_hitter import H2ODecayed, H2ODecayedHeads, H2OHeads, H2OTokens, ObservedAttention
from .key_norm import KNorm, L2Fixed, L2Ratio
from .key_value_scores import CUR, KeyDiff, LagKV, Leverage, RandomTokens
from .oracle import Oracle
from .policy import BudgetedPolicy, FullCache, Policy
from .profiled import DuoAttention, ExpectedAttentionStats, QFilter
from .prompt_scores import CapKV, Compactor, ExpectedAttention, NonCausal
from .query_scores import TOVA, Finch, PyramidKV, SimLayerKV, SnapKV
from .streaming import RecentOnly, Streaming, StreamingPress


@dataclass(frozen=True, kw_only=True)
class LabelledPolicy(Record):
    """A policy with its label in results."""

    json_keys = "label policy=policy.name options preset seed_method positions"

    policy: Policy = field(default_factory=FullCache)
    #: Name in tables.
    label: str = FullCache.name
    #: The options that were requested.
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"convert": lambda o: convert_options_to_json(o)})
    preset: ClassVar = None
    seed_method: ClassVar = None
    positions: ClassVar = "true"

    @classmethod
    def from_policy(cls, policy: Policy) -> Self:
        """Label a policy by those of its options that are not the defaults."""
        changed_options = {}
        for entry in fields(policy):
            if entry.repr and entry.init and getattr(policy, entry.name) != entry.default:
                changed_options[entry.name] = getattr(policy, entry.name)
        return cls(policy=policy, label=format_label(type(policy), changed_options), options=changed_options)


def format_label(policy: type[Policy], options: Mapping[str, Any]) -> str:
    """Format the policy, its budget, and every option that differs from its default: ``"streaming 256 sink=8"``."""
    # The budget is named, and so are layers that are never cut, whatever the defaults are: both decide what is stored.
    label_parts = [policy.name]
    budget, keep_ratio = options.get("budget"), options.get("keep_ratio")
    if budget is None and keep_ratio is None and issubclass(policy, BudgetedPolicy):
        budget, keep_ratio = policy.default_budget, policy.default_keep_ratio
    if budget is not None:
        label_parts.append(str(budget))
    if keep_ratio is not None:
        label_parts.append(f"{keep_ratio:.4g}")
    for entry in fields(policy):
        if entry.name == "skip_layers":
            skip_layers = options.get(entry.name, entry.default)
            label_parts += [f"{entry.name}={'+'.join(map(str, skip_layers))}"] if skip_layers else []
            continue
        if entry.name in ("budget", "keep_ratio", "generator") or entry.name not in options:
            continue
        if entry.default is MISSING or options[entry.name] != entry.default:
            label_parts.append(f"{entry.name}={options[entry.name]}")
    return " ".join(label_parts)


def convert_options_to_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options to JSON values: tuples become lists."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


#: Every policy that evicts and can decide for one layer alone, by its name.
POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        L2Ratio,
        L2Fixed,
        RecentOnly,
        Streaming,
        StreamingPress,
        H2OTokens,
        H2OBlocks,
        H2OHeads,
        H2ODecayed,
        H2ODecayedHeads,
        KNorm,
        ObservedAttention,
        RandomTokens,
        KeyDiff,
        LagKV,
        CUR,
        Leverage,
        SnapKV,
        PyramidKV,
        Finch,
        TOVA,
        SimLayerKV,
        ExpectedAttention,
        CapKV,
        NonCausal,
        Compactor,
    )
}

#: Policies that need more than one layer's state or cut more than tokens: the engine's, in `kvmnn.lm`, all layers of a
#: model at once; the oracle, in `kvmnn.evaluation`, what follows in the text; some a profile of the model; `ThinK`
#: cuts channels, and `Composed` is others.
MODEL_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (H2OEngine, Oracle, QFilter, ExpectedAttentionStats, DuoAttention, ThinK, Composed)
}

_REGISTERED: dict[str, type[Policy]] = {}
"""Policies of users, by name; they are among `POLICIES` as well."""

_PROCESS_TOKEN = os.urandom(8).hex()

_loading_paths: list[str] = []
"""The file that `load_registered_files` is importing."""


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Make a policy of one's own known by its name; a class decorator.

    `kvmnn.lm.evaluate` does it for policies that it is given. Worker processes import the file that defines the class;
    a class of a script (``__main__``) or a notebook is measured in the process itself, so that no script runs twice.

    Parameters
    ----------
    policy
        A frozen dataclass derived from `Policy`, defined at the top level of a file.

    Returns
    -------
    type
        The class itself.

    Raises
    ------
    KvmnnError
        For what is no policy, for a name of one of kvmnn's own policies, and for a class that is defined in a function.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy) and is_dataclass(policy)):
        raise KvmnnError(f"{policy!r:.60} is no policy: expected a dataclass derived from kvmnn.policies.Policy")
    name = policy.__dict__.get("name")
    if not isinstance(name, str) or not name.isidentifier():
        raise KvmnnError(f"{policy.__qualname__} has the name {name!r:.40}: expected a word such as 'low_norms'")
    if name in {FullCache.name, *POLICIES, *MODEL_POLICIES} - set(_REGISTERED):
        raise KvmnnError(f"{policy.__qualname__} has the name {name!r}, which is one of kvmnn's own policies")
    if "." in policy.__qualname__:
        raise KvmnnError(f"{policy.__qualname__} is defined in a function or class: expected the top level of a file")
    _REGISTERED[name] = POLICIES[name] = policy
    return policy


def is_known_class(policy: type[Policy]) -> bool:
    """Return whether a policy's name gives its class: it is one of kvmnn's own, or was registered and not redefined."""
    return policy in (FullCache, POLICIES.get(policy.name), MODEL_POLICIES.get(policy.name))


def is_registered(name: str) -> bool:
    """Return whether a policy is a user's."""
    return name in _REGISTERED


def is_registered_from_script() -> bool:
    """Return whether a script or a notebook defines a policy of a user: importing it would run it once more."""
    return any(policy.__module__ == "__main__" for policy in _REGISTERED.values())


def list_registered_files() -> list[str]:
    """List the files that define the policies of users, for other processes (`load_registered_files`).

    Raises
    ------
    KvmnnError
        For a class that no file defines, and while such a file is imported: it would start processes without end.
    """
    if _loading_paths:
        raise KvmnnError(
            f'{_loading_paths[-1]} measures when it is imported: expected if __name__ == "__main__": before that, or '
            "the policy in a file of its own"
        )
    return sorted({_get_file(policy) for policy in _REGISTERED.values()})


def hash_registered_file(name: str) -> str:
    """Return the SHA-256 of the file that defines a policy of a user: results are those of that code.

    A class that no file defines gets a value that no other process has, so that its results are never reused.
    """
    if _find_file(_REGISTERED[name]) is None:
        return f"{_PROCESS_TOKEN}-{id(_REGISTERED[name])}"
    with open(_get_file(_REGISTERED[name]), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def load_registered_files(paths: list[str]) -> None:
    """Import the files that another process listed, and register the policies that they define."""
    for number, path in enumerate(paths):
        spec = import_util.spec_from_file_location(f"kvmnn_user_policies_{number}", path)
        assert spec is not None and spec.loader is not None
        module = import_util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        _loading_paths.append(path)
        try:
            spec.loader.exec_module(module)
        finally:
            _loading_paths.pop()
        for value in list(vars(module).values()):
            if not (isinstance(value, type) and issubclass(value, Policy) and is_dataclass(value)):
                continue
            if value.__module__ == spec.name and "name" in value.__dict__:
                register_policy(value)


def _find_file(policy: type[Policy]) -> str | None:
    try:
        path = inspect.getfile(policy)
    except (TypeError, OSError):
        return None
    return path if os.path.isfile(path) else None  # a notebook names its cells as files


def _get_file(policy: type[Policy]) -> str:
    path = _find_file(policy)
    if path is None:
        raise KvmnnError(
            f"no file defines {policy.__qualname__}, and processes that measure must import it: save it as a file, or "
            "measure in this process (jobs=0)"
        )
    return path


def get_policy_class(name: str) -> type[Policy]:
    """Return the class of a policy, `FullCache` included."""
    if name == FullCache.name:
        return FullCache
    policies = POLICIES | MODEL_POLICIES
    if name not in policies:
        variants = [policy for policy in policies if name and policy.startswith(name)]
        suggestion = suggest(name, [FullCache.name, *policies])
        if variants and not suggestion:
            suggestion = f" (did you mean {', '.join(variants)}?)"
        raise KvmnnError(
            f"unknown policy {name!r}: expected {FullCache.name} or one of {', '.join(policies)}{suggestion}"
        )
    return policies[name]


def create_policy(name: str, **options: Any) -> Policy:
    """Create the policy called `name`, or `FullCache`; ``create_policy(p.name, **p.to_options()) == p``.

    Raises
    ------
    KvmnnError
        For names and options that do not exist, and for values that the policy refuses.
    """
    policy = get_policy_class(name)
    option_names = sorted(field.name for field in fields(policy) if field.init)
    for option in options:
        if option not in option_names:
            suggestion = suggest(option, option_names)
            raise KvmnnError(
                f"{name} has no option {option!r}: expected {', '.join(option_names) or 'none'}{suggestion}"
            )
    return policy(**options)
