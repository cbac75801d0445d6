"""Options of the lossless runtime, under the engine's names and with its defaults, and its two behaviours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Literal

from .._util.dataclass import dataclass
from .._util.text import suggest
from .._util.validation import repr_short, validate_int
from ..errors import KvmnnError
from ..frames.options import ACCEPTED_PREDICTORS, CODECS, EFFORTS, Effort
from ..packed.compaction import INT32_MAX
from ..policies.h2o import H2OConfig
from ..policies.h2o.config import QUANTIZED_MODES, check_choice

if TYPE_CHECKING:
    from ..profiles import Profile

Behaviour = Literal["sound", "engine"]
Mode = Literal["probe", "full", "store"]
LayerScope = Literal["none", "front_n", "h2o_kept", "front_n_and_h2o_kept"]
Verify = Literal["compare", "hash"]

MODES: tuple[Mode, ...] = ("probe", "full", "store")
SCOPES: tuple[LayerScope, ...] = ("none", "front_n", "h2o_kept", "front_n_and_h2o_kept")
ENGINE_CODEC = "gear_delta"
"""The only codec that the engine's runtime knows."""
PROFILE_CODECS = ("profile", "transform")
"""Codecs by the profile of a model, which the engine does not have: lossless, and LOSSY."""

_SCOPE_ALIASES = {"front_n+h2o_kept": "front_n_and_h2o_kept"}
_ENGINE_VALUES: dict[str, tuple[str, ...]] = {
    "scope": (*SCOPES, *_SCOPE_ALIASES),
    "runtime_mode": MODES,
    "codec": ("none", ENGINE_CODEC, *PROFILE_CODECS),
}
_CODECS_BY_RUNTIME_NAME: dict[str, tuple[tuple[str, ...], Effort | None]] = {
    "fp16_gear_predictive_v3": (CODECS, None),
    **{codec: ((codec,), None) for codec in CODECS},
    **{effort: (CODECS, effort) for effort in EFFORTS},
}
"""Stream codecs and effort by the name of a codec; the first is the engine's only one."""

_PREDICTOR_LISTS = ("predictors_k", "predictors_v")

FLASH_ATTENTION_MODE = 8

_ENGINE_KEY_PREFIX = "kv_lossless_"
_SWITCH_OPTIONS = ("enable", "runtime_enable", "store_disable_front", "strict_roundtrip_check")
_MIN_VALUES = {
    "front_n": 0,
    "block_tokens": 1,
    "hot_recent_tokens": 0,
    "hot_sink_tokens": 0,
    "kept_sample_layers": 0,
    "kept_sample_token_interval": 0,
    "front_sample_token_interval": 0,
    "store_bootstrap_tokens": 0,
    "store_grouped_step_tokens": 0,
    "async_threads": 0,
    "max_queue": 1,
    "decode_cache_blocks": 0,
}
_TEXT_OPTIONS = ("predictors_k", "predictors_v", "codec_runtime", "codec")
_CHOICE_OPTIONS = ("scope", "runtime_mode")
_LOSS_OPTIONS = ("kl", "ratio", "bits")
MAX_ASYNC_THREADS = 256


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Options of a `LosslessRuntime`; the defaults are the engine's, with which nothing is compressed.

    Attributes
    ----------
    enable, runtime_enable, codec
        All three must be set, `codec` to ``"gear_delta"``, for anything to be compressed. No codecs of the engine, for
        behaviour "sound" and mode ``"store"`` alone: ``"profile"``, lossless, and ``"transform"``, which is LOSSY,
        store cold rows as streams by `profile`, each layer alone.
    profile
        The profile of the model, or its file, with tables that predict from no layers below (``--below 0``).
    kl, ratio, bits
        Of codec ``"transform"``, as in `kvmnn.transform.TransformOptions`.
    layer_numbers
        Number in the model of each layer of the runtime, where it has only some of them.
    mode
        ``"probe"`` measures one layer, ``"full"`` encodes and decodes without touching the cache, ``"store"`` replaces
        cold rows by their frames.
    scope
        Layers to compress: the first `front_n`, those of `h2o`'s range, both, or none.
    front_n
        Layers of the front.
    block_tokens
        Tokens of a block.
    hot_sink_tokens, hot_recent_tokens
        Tokens at the start and at the end that are never compressed.
    kept_sample_layers, kept_sample_token_interval, front_sample_token_interval
        Number of layers of the range, and decode steps, to compress in mode ``"full"`` (the last one also in
        ``"store"``). 0 layers means all.
    store_disable_front
        In mode ``"store"`` leave the front layers raw.
    store_bootstrap_tokens, store_grouped_step_tokens
        Engine only: tokens of the first and of every later block in mode ``"store"``; 0 derives them from
        `block_tokens`.
    predictors_k, predictors_v
        Predictors that the encoder tries for K and for V, as `kvmnn.encode` reads them.
    async_threads
        Threads that encode; 0 encodes in the call itself.
    max_queue
        Encodings that may wait before further blocks have to.
    decode_cache_blocks
        Entries of each cache of decoded blocks; 0 for none.
    strict_roundtrip_check
        Compare what a block decodes to with what went in.
    h2o
        Options of the eviction planner. Its trigger and interval also govern when blocks are encoded.
    flash_attention
        Whether the engine adds up un-normalised attention tile by tile; only the attention scores depend on it.
    layer_nums
        Number of layers in the model's configuration; None if it has none.
    effort
        Behaviour "sound" only, no key of the engine: how hard blocks are encoded, as `kvmnn.encode` takes it. The
        default decodes fastest, and on blocks of this size it is hardly ever larger than ``"exact"``, the engine's own.
    verify
        Behaviour "sound" only, no key of the engine: ``"compare"`` decodes every block and compares all its bytes
        before its rows are dropped; ``"hash"`` keeps their hash instead and checks it whenever they are restored.
    decode_cache_bytes
        Behaviour "sound" only: bytes of decoded rows that may be kept, in at most `decode_cache_blocks` entries. 0, the
        default, keeps none: every copy takes back memory that a block gained.
    max_bytes_in_flight
        Behaviour "sound" only: raw bytes that may be in encoding, and as many in restores ahead of their call.
    prefetch_layers
        Behaviour "sound" only: layers whose blocks threads decode ahead of their call.

    Raises
    ------
    KvmnnError
        For a number below its least value and for a name that does not exist.
    TypeError
        For a value of the wrong type.
    """

    enable: bool = False
    runtime_enable: bool = False
    codec: str = "none"
    mode: Mode = "probe"
    scope: LayerScope = "front_n"
    front_n: int = 2
    block_tokens: int = 128
    hot_recent_tokens: int = 256
    hot_sink_tokens: int = 16
    kept_sample_layers: int = 1
    kept_sample_token_interval: int = 1
    front_sample_token_interval: int = 1
    store_disable_front: bool = False
    store_bootstrap_tokens: int = 32
    store_grouped_step_tokens: int = 256
    codec_runtime: str = "fp16_gear_predictive_v3"
    predictors_k: str = "raw,delta_seq,xor_seq,pair_delta"
    predictors_v: str = "raw,delta_seq,xor_seq"
    async_threads: int = 1
    max_queue: int = 256
    decode_cache_blocks: int = 64
    strict_roundtrip_check: bool = False
    h2o: H2OConfig = field(default_factory=lambda: H2OConfig(enable=False))
    flash_attention: bool = True
    layer_nums: int | None = None
    effort: Effort = "fast"
    verify: Verify = "compare"
    decode_cache_bytes: int = 0
    max_bytes_in_flight: int = 64 << 20
    prefetch_layers: int = 1
    profile: Profile | str | None = None
    kl: float | None = None
    ratio: float | None = None
    bits: float | None = None
    layer_numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (*_SWITCH_OPTIONS, "flash_attention"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, not {type(getattr(self, name)).__name__}")
        for name, minimum in _MIN_VALUES.items():
            validate_int(getattr(self, name), name, minimum, _get_max_value(name))
        for name in _TEXT_OPTIONS:
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a string, not {type(getattr(self, name)).__name__}")
        if self.layer_nums is not None:
            validate_int(self.layer_nums, "layer_nums", 1, INT32_MAX)
        if self.mode not in MODES:
            raise KvmnnError(f"mode is {self.mode!r}: expected one of {', '.join(MODES)}")
        if self.effort not in EFFORTS:
            raise KvmnnError(f"effort is {repr_short(self.effort)}: expected one of {', '.join(EFFORTS)}")
        if self.verify not in ("compare", "hash"):
            raise KvmnnError(f"verify is {self.verify!r}: expected 'compare' or 'hash'")
        for name in ("decode_cache_bytes", "max_bytes_in_flight", "prefetch_layers"):
            validate_int(getattr(self, name), name, 0)
        if self.codec_runtime not in _CODECS_BY_RUNTIME_NAME:
            expected = ", ".join(_CODECS_BY_RUNTIME_NAME)
            raise KvmnnError(f"codec_runtime is {repr_short(self.codec_runtime)}: expected one of {expected}")
        if self.scope not in SCOPES:
            raise KvmnnError(f"scope is {repr_short(self.scope)}: expected one of {', '.join(SCOPES)}")
        if not isinstance(self.h2o, H2OConfig):
            raise TypeError(f"h2o must be an H2OConfig, not {type(self.h2o).__name__}")
        if self.codec in PROFILE_CODECS and (self.mode != "store" or self.profile is None):
            raise KvmnnError(
                f"codec {self.codec}: expected mode 'store' and a profile (kvmnn profile make --below 0), found mode "
                f"{self.mode!r} and {'none' if self.profile is None else 'one'}"
            )
        if self.codec != PROFILE_CODECS[1] and (self.kl, self.ratio, self.bits) != (None, None, None):
            raise KvmnnError(f"kl, ratio and bits are of codec {PROFILE_CODECS[1]}, not of {self.codec}")
        if self.h2o.quantised:
            raise KvmnnError("h2o.quantised: the runtime reads float rows, an int8 cache would be misread")

    @classmethod
    def from_engine(cls, document: Mapping[str, Any], *, lenient: bool = False) -> RuntimeConfig:
        """Read the options in an engine's JSON configuration, with its defaults and clamps.

        Parameters
        ----------
        document
            The object in the engine's ``config.json``. Keys that do not concern the cache are ignored.
        lenient
            Accept unknown names of modes, scopes, codecs and predictors, and silently use the engine's fallback.

        Raises
        ------
        KvmnnError
            For ``kv_`` keys that do not exist (the engine ignores them: a typing error then goes unseen), for values of
            the wrong type, for names that do not exist, and for an ``attention_mode`` that quantises K or V, which the
            engine would read as floats.
        TypeError
            For a document that is no mapping.
        """
        if not isinstance(document, Mapping) or not all(isinstance(key, str) for key in document):
            raise TypeError(f"document must be a mapping of names, not {type(document).__name__}")
        known_keys = {
            f"{_ENGINE_KEY_PREFIX}{name}"
            for name in (*_SWITCH_OPTIONS, *_MIN_VALUES, *_TEXT_OPTIONS, *_CHOICE_OPTIONS, "profile", *_LOSS_OPTIONS)
        }
        unknown_keys = sorted(
            key for key in document if key.startswith("kv_") and not key.startswith("kv_h2o_") and key not in known_keys
        )
        if unknown_keys:
            names = sorted(known_keys)
            suggestion = suggest(unknown_keys[0], names) if len(unknown_keys) == 1 else ""
            advice = suggestion or f"; expected names out of {', '.join(names)}"
            raise KvmnnError(f"{', '.join(unknown_keys)}: no option of the runtime{advice}")
        values: dict[str, Any] = {"h2o": H2OConfig.from_engine(document, lenient=lenient)}
        values |= _read_options(document, _SWITCH_OPTIONS, bool) | _read_options(document, _TEXT_OPTIONS, str)
        values |= _read_options(document, ("profile",), str)
        values |= {name: float(number) for name, number in _read_options(document, _LOSS_OPTIONS, float).items()}
        for name, number in _read_options(document, tuple(_MIN_VALUES), int).items():
            validate_int(number, _ENGINE_KEY_PREFIX + name, -INT32_MAX - 1, _get_max_value(name))
            values[name] = max(_MIN_VALUES[name], number)
        choices = _read_options(document, _CHOICE_OPTIONS, str)
        if lenient and values.get("codec_runtime") not in _CODECS_BY_RUNTIME_NAME:
            values.pop("codec_runtime", None)  # the engine reads this key nowhere
        if not lenient:
            _check_names({**values, **choices})
        if "scope" in choices:  # the engine takes an unknown name for the default
            scope = _SCOPE_ALIASES.get(choices["scope"], choices["scope"])
            values["scope"] = scope if scope in SCOPES else "front_n"
        if "runtime_mode" in choices:
            values["mode"] = choices["runtime_mode"] if choices["runtime_mode"] in MODES else "probe"
        values["flash_attention"] = _parse_flash_attention(document)
        values["layer_nums"] = document.get("layer_nums")
        return cls(**values)

    @staticmethod
    def identify(document: Mapping[str, Any]) -> dict[str, Any]:
        """Return an engine's options with the key of the profile's file in place of its path.

        Results are stored under these: a path may name another profile tomorrow.
        """
        from ..profiles import hash_profile

        name = f"{_ENGINE_KEY_PREFIX}profile"
        path = document.get(name)
        return {**document, name: hash_profile(path)} if isinstance(path, str) else dict(document)

    def with_num_layers(self, num_layers: int, bytes_per_token: int) -> RuntimeConfig:
        """Return these options for `num_layers` layers whose K and V have `bytes_per_token` bytes a token."""
        h2o = replace(self.h2o, layers=num_layers, bytes_per_token=bytes_per_token)
        return replace(self, h2o=h2o, layer_nums=num_layers)

    # -- what follows from them ----------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Return whether the runtime compresses anything."""
        return self.enable and self.runtime_enable and self.codec in (ENGINE_CODEC, *PROFILE_CODECS)

    @property
    def is_lossy(self) -> bool:
        """Return whether stored rows are rounded: codec ``"transform"``."""
        return self.is_active and is_lossy_codec(self.codec)

    @property
    def replaces_rows(self) -> bool:
        """Whether rows are freed once they are encoded, so that each call must first restore them from frames."""
        return self.enable and self.runtime_enable and self.mode == "store"

    @property
    def min_first_block_tokens(self) -> int:
        """Minimum tokens of a layer in the scope before its first block is encoded."""
        return max(self.h2o.effective_trigger_tokens, self.hot_sink_tokens + self.hot_recent_tokens + self.block_tokens)

    @property
    def codecs(self) -> tuple[str, ...]:
        """Stream codecs that the engine's encoder tries, whatever `codec_runtime` says."""
        return CODECS

    @property
    def sound_codecs(self) -> tuple[str, ...]:
        """Stream codecs that behaviour "sound" tries: those of `codec_runtime`."""
        return _CODECS_BY_RUNTIME_NAME[self.codec_runtime][0]

    @property
    def sound_effort(self) -> Effort:
        """How hard behaviour "sound" encodes: as `codec_runtime` says, else `effort`."""
        return _CODECS_BY_RUNTIME_NAME[self.codec_runtime][1] or self.effort


def is_lossy_codec(codec: str) -> bool:
    """Return whether a codec of the runtime rounds what it stores: ``"transform"``."""
    return codec == PROFILE_CODECS[1]


def check_num_layers(config: RuntimeConfig, num_layers: int) -> int:
    """Return `num_layers`; raise `KvmnnError` if the configuration has another number."""
    validate_int(num_layers, "layers", 1, INT32_MAX)
    if config.layer_nums not in (None, num_layers):
        raise KvmnnError(
            f"layer_nums is {config.layer_nums}, the model has {num_layers} layers: the engine would restore blocks "
            f"into other layers; expected {num_layers}"
        )
    return num_layers


def _check_names(values: Mapping[str, Any]) -> None:
    for name, choices in _ENGINE_VALUES.items():
        if name in values:
            check_choice(_ENGINE_KEY_PREFIX + name, values[name], choices)
    for name in _PREDICTOR_LISTS:
        for predictor in values.get(name, "").split(",") if values.get(name) else ():
            check_choice(_ENGINE_KEY_PREFIX + name, predictor.strip(" \t"), ACCEPTED_PREDICTORS)


def _parse_flash_attention(document: Mapping[str, Any]) -> bool:
    mode = document.get("attention_mode", FLASH_ATTENTION_MODE)
    if isinstance(mode, bool) or not isinstance(mode, int):
        raise KvmnnError(f"attention_mode is {repr_short(mode)}: expected an integer")
    if mode in QUANTIZED_MODES:
        raise KvmnnError(
            f"attention_mode {mode} quantises K or V: the engine's store would read the int8 buffers as floats; "
            "expected 0 or 8"
        )
    return mode // FLASH_ATTENTION_MODE == 1


def _read_options(document: Mapping[str, Any], names: tuple[str, ...], kind: type) -> dict[str, Any]:
    """Return the values of the keys that are present; each must be of `kind`."""
    options = {}
    for name in names:
        key = _ENGINE_KEY_PREFIX + name
        if key not in document:
            continue
        value = document[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number if kind is float else isinstance(value, kind)) or (kind is int and isinstance(value, bool)):
            raise KvmnnError(f"{key} is {repr_short(value)}: expected {_KIND_NAMES[kind]}")
        options[name] = value
    return options


_KIND_NAMES = {bool: "true or false", int: "an integer", str: "a string", float: "a number"}


def _get_max_value(name: str) -> int:
    return MAX_ASYNC_THREADS if name == "async_threads" else INT32_MAX
