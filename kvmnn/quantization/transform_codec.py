"""Transform streams (`kvmnn.transform`) as a codec of a cache: K and V of whole tokens, by a model's profile."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from ..arrays.layer_cache import LayerCache
from ..dtypes import Floats, Part
from ..errors import KvmnnError
from ..profiles import Profile
from ..transform import TransformOptions, encode_layer, get_tables, plan_steps, split_heads
from ..transform.steps import DEFAULT_KL
from .codec import CacheCodec, CacheShape, Field, FieldSizes, QuantizedRows, TextCoder

_NUM_EXACT_TOKENS = 4
_MAX_FP16 = 65504


class _TransformCoder(TextCoder):
    """Encodes the tokens of each step that it is handed as streams of their own, layer by layer.

    Where heads hold different tokens, each head of a layer is a layer, by the profile that `split_heads` makes.
    """

    def __init__(self, codec: TransformCodec, profile: Profile, heads_per_layer: int) -> None:
        self._codec, self._profile, self._heads_per_layer = codec, profile, heads_per_layer
        self._keys: dict[int, npt.NDArray[Any]] = {}
        options = codec.build_options(0, heads_per_layer > 1)
        # Of coded tokens alone: each stream has other numbers of tokens, and only the first has exact ones.
        self._plan = plan_steps(get_tables(profile), options, 1)
        self._lower: list[LayerCache] = []

    def count_due(self, part: Part, num_pending: int) -> int:
        # Each stream has its own header and knows nothing of earlier ones, so a few tokens at a time would cost much.
        count = max(num_pending - self._codec.recent, 0)
        return count if self._codec.when == "prompt" or count >= self._codec.block else 0

    def quantize(
        self, layer: int, part: Part, rows: Floats, positions: npt.NDArray[np.int64], head: int = 0
    ) -> QuantizedRows:
        if not np.isfinite(rows).all() or np.abs(rows).max(initial=0) > _MAX_FP16:
            raise KvmnnError(f"layer {layer}: {part}s beyond fp16, which transform streams of an evaluation hold")
        elements = rows.astype(np.float16)
        if part == "key":  # which depends on V only where a row of V is so far off that it is stored exactly, K with it
            self._keys[head] = elements
        keys = self._keys[head]
        layer = layer * self._heads_per_layer + head
        if layer == 0 and part == "key":
            self._lower = []
        cache = LayerCache(
            layer=layer,
            keys=keys,
            values=np.zeros_like(keys) if part == "key" else elements,
            positions=positions,
        )
        options = self._codec.build_options(int((positions < _NUM_EXACT_TOKENS).sum()), self._heads_per_layer > 1)
        encoding = encode_layer(cache, self._profile, self._lower, options, plan=self._plan)
        shape = (*rows.shape[:2], 1)
        if part == "key":
            return QuantizedRows(encoding.decoded.keys.astype(np.float32), (np.zeros(shape),))
        self._lower = [encoding.decoded, *self._lower[:1]]
        share = len(encoding.data) / (rows.shape[0] * rows.shape[1])
        return QuantizedRows(encoding.decoded.values.astype(np.float32), (np.full(shape, share),))

    def measure(self, layer: int, part: Part, fields: Sequence[Field]) -> FieldSizes:
        num_bytes = math.ceil(round(float(fields[0].sum()), 3))
        return FieldSizes(num_bytes, num_bytes)


@dataclass(frozen=True, kw_only=True)
class TransformCodec(CacheCodec):
    """Transform streams of the fp16 numbers of K and V; the bytes of a layer's stream are counted with its V.

    Tokens that a policy evicts after they were encoded take their share of the stream's bytes with them. Behind a
    policy that keeps different tokens of heads, each head has streams of its own, predicted from no layers below.

    Parameters
    ----------
    profile
        The profile of the model (`kvmnn.profiles`), made with a model's sensitivities where `kl` is to be known.
    kl, ratio, bits
        As of `kvmnn.transform.TransformOptions`: at most one, 0.002 nats by default.
    below
        Layers below that predict a layer; -1: as many as the profile has tables for.
    block
        Tokens that have come together since the last stream when the next one is made, unless `when` is ``"prompt"``.
    """

    profile: str = ""
    kl: float | None = None
    ratio: float | None = None
    bits: float | None = None
    below: int = -1
    block: int = 64

    name: ClassVar[str] = "transform"
    reads_file: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.profile:
            raise KvmnnError("transform: expected transform:FILE,kl=0.002 (kvmnn profile make)")
        if self.block < 1:
            raise KvmnnError(f"transform: block is {self.block}: expected at least 1")
        self.build_options(_NUM_EXACT_TOKENS)

    @property
    def label(self) -> str:
        return self.spec.replace(f"profile={self.profile}", os.path.basename(self.profile), 1)

    @property
    def has_size(self) -> bool:
        """Return whether a size is specified, and not a loss."""
        return self.ratio is not None or self.bits is not None

    @property
    def target_kl(self) -> float | None:
        """The divergence in nats that is asked for; None where a size is."""
        return None if self.has_size else DEFAULT_KL if self.kl is None else self.kl

    def to_options(self) -> dict[str, Any]:
        return super().to_options() | {"kl": self.target_kl}

    def build_options(self, first: int, is_per_head: bool = False) -> TransformOptions:
        """Return the options of streams whose first tokens are stored exactly."""
        return TransformOptions(
            kl=self.kl,
            ratio=self.ratio,
            bits=self.bits,
            below=None if is_per_head or self.below == -1 else self.below,
            first=first,
        )

    def start_text(self, shape: CacheShape) -> TextCoder:
        profile = Profile.read(self.profile)
        sizes = {(layer.kv_heads, layer.head_dim, layer.value_dim) for layer in profile.layers}
        if len(profile.layers) != shape.layers or sizes != {(shape.kv_heads, shape.head_dim, shape.head_dim)}:
            raise KvmnnError(
                f"{self.profile}: is the profile of another model: the cache has {shape.layers} layers of "
                f"{shape.kv_heads} heads of {shape.head_dim} elements"
            )
        if "transform" not in profile.kinds:
            raise KvmnnError(f"{self.profile}: has no sections transform/* (tables of lossy streams)")
        if shape.is_per_head:
            return _TransformCoder(self, _get_head_profile(profile), shape.kv_heads)
        return _TransformCoder(self, profile, 1)


_HEAD_PROFILES: dict[bytes, Profile] = {}
"""What `split_heads` made of the profile that was last used, by its key: each text of an evaluation needs it."""


def _get_head_profile(profile: Profile) -> Profile:
    if profile.key not in _HEAD_PROFILES:
        _HEAD_PROFILES.clear()
        _HEAD_PROFILES[profile.key] = split_heads(profile)
    return _HEAD_PROFILES[profile.key]
