"""Options of the planner, and the values that the engine derives from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.text import suggest
from ..._util.validation import repr_short, validate_int
from ...errors import KvmnnError
from ...packed.compaction import INT32_MAX

ADAPTIVE, STATIC = "adaptive", "static"

QUANTIZED_MODES = (1, 2, 9, 10)  # values of the engine's ``attention_mode`` with which K or V are int8

_ENGINE_KEYS = {
    "kv_h2o_enable": "enable",
    "kv_h2o_layer_start": "layer_start",
    "kv_h2o_layer_end": "layer_end",
    "kv_h2o_block_tokens": "block_tokens",
    "kv_h2o_sink_tokens": "sink_tokens",
    "kv_h2o_recent_tokens": "recent_tokens",
    "kv_h2o_target_keep_ratio": "target_keep_ratio",
    "kv_h2o_target_mode": "target_mode",
    "kv_h2o_target_lossy_ratio": "target_lossy_ratio",
    "kv_h2o_floor": "floor",  # no key of the engine, which has its own rule only
    "kv_h2o_ema_alpha": "ema_alpha",
    "kv_h2o_update_interval": "update_interval",
    "kv_h2o_trigger_min_tokens": "trigger_min_tokens",
    "layer_nums": "layers",
}
FLOORS = ("engine", "keep")
_IGNORED_KEYS = {"kv_h2o_log_stats"}
ENGINE_KEY_BY_FIELD = {attribute: key for key, attribute in _ENGINE_KEYS.items()}


@dataclass(frozen=True, kw_only=True)
class H2OConfig:
    """Options of the H2O planner, with the engine's defaults.

    Values outside a range are not refused but clamped where they are used, as the engine does.

    Raises
    ------
    KvmnnError
        For a number beyond the engine's 32 bits, for NaN, and for a mode that is neither.
    TypeError
        For a value of the wrong type.
    """

    #: Tokens in a block, the unit that is kept or dropped; at least 1 is used.
    block_tokens: int = 64
    #: Tokens at the start and at the end whose blocks always stay; a block that they only touch stays as well.
    sink_tokens: int = 32
    recent_tokens: int = 256
    #: ``"adaptive"``: keep one token in `target_lossy_ratio`; ``"static"``: keep the share `target_keep_ratio`.
    target_mode: str = ADAPTIVE
    #: At least 1 is used. The engine's own default is 3.0; its test scripts and published tables have 3.5.
    target_lossy_ratio: float = 3.0
    #: 0 to 1.
    target_keep_ratio: float = 0.5
    #: What happens where sinks and recent tokens, in whole blocks, reach the target: the ``"engine"`` drops nothing, by
    #: the rule of its documents (``"keep"``) these stay and all others are dropped.
    floor: str = "engine"
    #: Weight of the old score in the running mean, 0 to 1.
    ema_alpha: float = 0.9
    #: Calls between two triggers; what a call is, the planner's cadence says. At least 1 is used.
    update_interval: int = 16
    #: Tokens below which nothing is planned; at least 1 is used.
    trigger_min_tokens: int = 512
    #: Attention layers of the model (the engine's ``layer_nums``).
    layers: int = 32
    #: First and last layer that evicts; a negative end means the last layer. The engine's default start is 2.
    layer_start: int = 2
    layer_end: int = -1
    #: If False, nothing is planned.
    enable: bool = True
    #: Whether K or V are int8; the engine then evicts nothing.
    quantised: bool = False
    #: Query heads, by whose number the sums are divided; None takes it from the attention rows.
    heads: int | None = None
    #: K and V bytes of one token of one layer, ``2 * kv_heads * head_dim * element bytes``, for the ratio of bytes.
    #: None counts tokens alone and leaves the plan's own bytes out.
    bytes_per_token: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                validate_int(value, field.name, -INT32_MAX - 1, INT32_MAX)
            elif field.type == "int | None" and value is not None:
                validate_int(value, field.name, 1, INT32_MAX)
            elif field.type == "float":
                _check_number(value, field.name)
            elif field.type == "bool" and not isinstance(value, bool):
                raise TypeError(f"{field.name} must be a bool, not {type(value).__name__}")
        if self.target_mode not in (ADAPTIVE, STATIC):
            raise KvmnnError(f"target_mode is {self.target_mode!r}: expected 'adaptive' or 'static'")
        if self.floor not in FLOORS:
            raise KvmnnError(f"floor is {self.floor!r}: expected one of {', '.join(FLOORS)}")

    @classmethod
    def from_engine(cls, document: Mapping[str, Any], *, lenient: bool = False, **defaults: Any) -> H2OConfig:
        """Create options from an engine's JSON configuration; other keys are ignored.

        Parameters
        ----------
        document
            The object in the engine's ``config.json``.
        lenient
            Read an unknown ``kv_h2o_target_mode`` as the engine does, for which any value but ``"static"`` is adaptive.
        defaults
            Attributes that no key has, such as `heads`.

        Raises
        ------
        KvmnnError
            For ``kv_h2o_`` keys or a mode that do not exist, and values that cannot be used.
        """
        values = {"enable": False, **defaults}
        for key, value in document.items():
            if key in _ENGINE_KEYS:
                values[_ENGINE_KEYS[key]] = value
            elif key.startswith("kv_h2o_") and key not in _IGNORED_KEYS:
                suggestion = suggest(key, _ENGINE_KEYS) or f"; expected one of {', '.join(_ENGINE_KEYS)}"
                raise KvmnnError(f"{key}: is no option of the planner{suggestion}")
        if "target_mode" in values:
            mode = values["target_mode"]
            if not lenient:
                check_choice(ENGINE_KEY_BY_FIELD["target_mode"], mode, (ADAPTIVE, STATIC))
            values["target_mode"] = STATIC if mode == STATIC else ADAPTIVE
        try:
            return cls(**values)
        except (TypeError, KvmnnError) as error:
            name, _, problem = str(error).partition(" ")
            raise KvmnnError(f"{ENGINE_KEY_BY_FIELD.get(name, name)} {problem}") from None

    @property
    def clamped_options(self) -> dict[str, tuple[float, float]]:
        """Return options outside their range by attribute: the given value, and the clamped one."""
        layers, last_layer = self.evicting_layers, self.effective_layers - 1
        effective: dict[str, float] = {
            "block_tokens": self.effective_block_tokens,
            "sink_tokens": max(0, self.sink_tokens),
            "recent_tokens": max(0, self.recent_tokens),
            "target_keep_ratio": min(1.0, max(0.0, self.target_keep_ratio)),
            "target_lossy_ratio": max(1.0, self.target_lossy_ratio),
            "ema_alpha": min(1.0, max(0.0, self.ema_alpha)),
            "update_interval": self.effective_interval,
            "trigger_min_tokens": self.effective_trigger_tokens,
            "layers": self.effective_layers,
            "layer_start": layers.start,
            "layer_end": self.layer_end if self.layer_end < 0 else min(self.layer_end, last_layer),
        }
        return {name: (getattr(self, name), to) for name, to in effective.items() if getattr(self, name) != to}

    # -- values as the engine uses them --------------------------------------------------------------------------------

    @property
    def effective_block_tokens(self) -> int:
        """Return the number of tokens in a block."""
        return max(1, self.block_tokens)

    @property
    def effective_interval(self) -> int:
        """Return the calls between triggers."""
        return max(1, self.update_interval)

    @property
    def effective_trigger_tokens(self) -> int:
        """Return the minimum length that triggers."""
        return max(1, self.trigger_min_tokens)

    @property
    def effective_alpha(self) -> np.float32:
        """Return the weight of the old score."""
        return np.float32(min(1.0, max(0.0, float(self.ema_alpha))))

    @property
    def effective_keep_ratio(self) -> np.float32:
        """Return the share of tokens to keep, before floor and blocks: float32."""
        if self.target_mode == STATIC:
            return np.float32(min(1.0, max(0.0, float(self.target_keep_ratio))))
        with np.errstate(over="ignore"):  # beyond float32 is infinite, which leaves one block
            return np.float32(1) / np.float32(max(1.0, float(self.target_lossy_ratio)))

    @property
    def effective_layers(self) -> int:
        """Return the number of layers."""
        return max(1, self.layers)

    @property
    def evicting_layers(self) -> range:
        """Return the layers that evict."""
        last_layer = self.effective_layers - 1
        start = min(max(0, self.layer_start), last_layer)
        end = last_layer if self.layer_end < 0 else min(self.layer_end, last_layer)
        return range(start, end + 1)

    def count_blocks(self, kv_len: int) -> int:
        """Return the number of blocks of `kv_len` tokens."""
        return -(-kv_len // self.effective_block_tokens)


def _check_number(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if isinstance(value, int) and abs(value) >= 1 << 1000:
        raise KvmnnError(f"{name} is too large for a float")
    if math.isnan(value):
        raise KvmnnError(f"{name} is NaN: expected a number")


def check_choice(key: str, value: object, choices: Sequence[str]) -> None:
    """Raise an error for a value that is not one of `choices`; the engine would silently use its default."""
    if value not in choices:
        suggestion = suggest(value, choices) if isinstance(value, str) else ""
        raise KvmnnError(f"{key} is {repr_short(value)}: expected one of {', '.join(choices)}{suggestion}")
