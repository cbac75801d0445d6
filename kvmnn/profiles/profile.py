"""A profile of a model: tables for codecs, made of texts once and kept in a file (docs/format-profile.md)."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.text import pluralize
from ..arrays.layer_cache import LayerCache
from ..dtypes import DTYPES
from ..errors import KvmnnError
from ..files.atomic import FileOutput
from ..files.schema import JsonReader, Record
from . import sections
from .geometry import LayerGeometry

MAGIC, VERSION = b"KVMP", 1
_KIND = "profile of a model (kvmnn profile make)"
KEY_BYTES = 32
_MAX_LAYERS = 4096
_MIN_TYPICAL_TOKENS = 4096
"""By a profile of 2,048 tokens of a model with rows of 192 elements, another text lost 0.0065 nats, not 0.002."""


@dataclass(frozen=True, kw_only=True)
class TextOrigin(Record):
    """A text, or a cache, of which a profile was made."""

    name: str
    #: SHA-256 of the text's bytes, in hexadecimal; None for caches, whose text is not known.
    sha256: str | None
    #: Tokens of it that were read.
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ProfileInfo(Record):
    """What a profile is of."""

    #: Name of the model, for people.
    model: str
    #: `kvmnn.lm.compute_fingerprint` of the model; None where no model was run.
    fingerprint: str | None
    #: Element type of the K and V that were read: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    dtype: str
    texts: tuple[TextOrigin, ...]
    layers: tuple[LayerGeometry, ...]
    #: Settings of the tables, by kind.
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all calibration texts."""
        return sum(text.tokens for text in self.texts)

    @classmethod
    def from_json(cls, reader: JsonReader) -> ProfileInfo:
        """Read what `to_dict` returns; `ManifestError` for anything else."""
        fingerprint, settings = reader.get("fingerprint"), reader.get("settings")
        if reader.get("dtype").read_str() not in DTYPES:
            raise reader.get("dtype").error(f"one of {', '.join(DTYPES)}")
        if not isinstance(settings.value, dict):
            raise settings.error("an object")
        texts = [
            TextOrigin(
                name=text.get("name").read_str(),
                sha256=None if text.get("sha256").value is None else text.get("sha256").read_sha256(),
                tokens=text.get("tokens").read_int(0),
            )
            for text in reader.get("texts").read_list()
        ]
        return cls(
            model=reader.get("model").read_str(),
            fingerprint=None if fingerprint.value is None else fingerprint.read_sha256(),
            dtype=reader.get("dtype").read_str(),
            texts=tuple(texts),
            layers=tuple(LayerGeometry.from_json(entry) for entry in reader.get("layers").read_list(1, _MAX_LAYERS)),
            settings=settings.value,
        )


class Profile:
    """A profile: what it is of, and its arrays.

    Parameters
    ----------
    info
        What it is of.
    arrays
        Tables by name: ``"<kind>/<layer>/<side>/<name>"``. They are copied.

    Attributes
    ----------
    info : ProfileInfo
    arrays : mapping of str to ndarray
        Read-only, as in the file.
    key : bytes
        SHA-256 of the file, 32 bytes: streams name the profile they need by it.

    Raises
    ------
    KvmnnError
        For names, types and sizes that the format does not have.
    """

    info: ProfileInfo
    arrays: Mapping[str, npt.NDArray[Any]]
    key: bytes

    def __init__(self, info: ProfileInfo, arrays: Mapping[str, npt.ArrayLike]) -> None:
        self._load(b"".join(sections.write_sections(MAGIC, VERSION, info.to_dict(), arrays)), "profile")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile, and check all of it.

        Raises
        ------
        SourceError, ManifestError
            For a file that is not there, is none, has another version or is damaged.
        """
        return cls.from_bytes(sections.read_file(Path(path)), os.fspath(path))

    @classmethod
    def from_bytes(cls, data: bytes, label: str = "profile") -> Profile:
        """Read a profile from the bytes of its file; messages begin with `label`."""
        profile = cls.__new__(cls)
        profile._load(data, label)
        return profile

    def _load(self, data: bytes, label: str) -> None:
        header, arrays = sections.read_sections(data, label, MAGIC, VERSION, _KIND)
        self.info = ProfileInfo.from_json(header)
        self.arrays = MappingProxyType(arrays)
        self.key = hashlib.sha256(data).digest()
        self._data = data

    @property
    def layers(self) -> tuple[LayerGeometry, ...]:
        """Return sizes and rotation of each layer."""
        return self.info.layers

    @property
    def nbytes(self) -> int:
        """Return the size of the file."""
        return len(self._data)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of tables that there are, such as ``"linear"`` and ``"transform"``."""
        return tuple(sorted({name.partition("/")[0] for name in self.arrays}))

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
        return self._data

    def write(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the file; `OutputError` where it exists, unless `force`."""
        with FileOutput(path, force=force) as output:
            output.file.write(self._data)
            output.commit()

    def select(self, kind: str) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a kind, by what follows ``"<kind>/"`` in their names."""
        prefix = f"{kind}/"
        return {name.removeprefix(prefix): array for name, array in self.arrays.items() if name.startswith(prefix)}

    def get_array(self, name: str, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
        """Return an array; `KvmnnError` where it is missing or has another type or shape."""
        array = self.arrays.get(name)
        if array is None:
            raise KvmnnError(f"the profile has no section {name!r}")
        if array.dtype != np.dtype(dtype) or array.shape != tuple(shape):
            raise KvmnnError(
                f"section {name!r} of the profile is {array.dtype} {list(array.shape)}: expected {dtype} {list(shape)}"
            )
        return array

    def check_layer(self, cache: LayerCache) -> LayerGeometry:
        """Return the geometry of a cache's layer; `KvmnnError` where the profile is of another."""
        if cache.layer >= len(self.layers):
            raise KvmnnError(f"layer {cache.layer}: the profile is of {pluralize(len(self.layers), 'layer')}")
        geometry = self.layers[cache.layer]
        geometry.check_cache(cache)
        return geometry

    def __repr__(self) -> str:
        return f"Profile({self.info.model}: {len(self.layers)} layers, {self.nbytes:,} bytes, {self.key.hex()[:16]})"


def describe_few_tokens(info: ProfileInfo) -> tuple[str, ...]:
    """Return a note where a profile was made of so few tokens that other texts miss what it predicts."""
    if info.tokens >= _MIN_TYPICAL_TOKENS:
        return ()
    return (
        f"the profile is made of {info.tokens:,} tokens: ratios and losses of other texts miss what is asked for "
        "(8,192 or more are better)",
    )


def hash_profile(path: str | os.PathLike[str]) -> str:
    """Return the key of a profile's file in hexadecimal; empty for a file that cannot be read."""
    try:
        status = os.stat(path)
        return _hash_file(os.fspath(path), status.st_size, status.st_mtime_ns)
    except OSError:
        return ""


@functools.lru_cache(maxsize=8)
def _hash_file(path: str, size: int, modified_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
