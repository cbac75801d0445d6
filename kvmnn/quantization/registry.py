"""The codecs by name, and their specs: ``NAME`` or ``NAME:option=value,...``; ``transform:FILE,...`` as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, get_type_hints

from .._util.text import suggest
from ..errors import KvmnnError
from ..policies.specs import split_spec
from .block_codecs import BLOCK_CODECS, KiviCodec, TQ3Codec, TQ4Codec
from .codec import CacheCodec
from .transform_codec import TransformCodec

CODECS: Final[Mapping[str, type[CacheCodec]]] = {
    codec.name: codec for codec in (*BLOCK_CODECS, TQ4Codec, TQ3Codec, KiviCodec, TransformCodec)
}
"""Classes of codecs by name."""

NO_CODEC = "none"
"""Stands for no codec where specs are listed."""


def create_codec(spec: str) -> CacheCodec | None:
    """Create the codec of a spec; None for ``"none"``.

    Raises
    ------
    KvmnnError
        For names and options that do not exist, and values that the codec refuses.
    """
    name, colon, option_text = spec.partition(":")
    if name == TransformCodec.name and colon and "=" not in option_text.partition(",")[0]:
        spec = f"{name}:profile={option_text}"  # as `encode --codec` takes it
    name, texts = split_spec(spec)
    if name == NO_CODEC and not texts:
        return None
    if name not in CODECS:
        expected_text = ", ".join([*CODECS, NO_CODEC])
        raise KvmnnError(f"no codec {name!r} of caches: expected {expected_text}{suggest(name, CODECS)}")
    codec_class = CODECS[name]
    option_names = [entry.name for entry in fields(codec_class)]
    type_hints = get_type_hints(codec_class)
    options: dict[str, Any] = {}
    for key, text in texts.items():
        if key not in option_names:
            raise KvmnnError(f"{name} has no option {key!r}: expected {', '.join(option_names)}")
        number_type = next((kind for kind in (int, float) if type_hints[key] in (kind, kind | None)), None)
        if number_type is not None:
            try:
                options[key] = number_type(text)
            except ValueError:
                raise KvmnnError(f"{name}: {key} is {text!r}: expected a number") from None
        else:
            options[key] = text
    return codec_class(**options)
