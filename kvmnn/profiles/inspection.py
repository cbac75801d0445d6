"""Inspect and verify profiles: contents, checksums and the model that they belong to."""

from __future__ import annotations

import os
from dataclasses import field

from .._util.dataclass import dataclass
from .._util.text import format_layers, pluralize
from ..errors import KvmnnError
from ..files.schema import Record
from .geometry import LayerGeometry
from .profile import Profile, TextOrigin, describe_few_tokens

_MAX_TEXTS_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class TableSize(Record):
    """The tables of one kind."""

    kind: str
    sections: int
    nbytes: int = field(metadata={"key": "bytes"})


@dataclass(frozen=True, kw_only=True)
class ProfileInspection(Record):
    """The model and the contents of a profile."""

    input: str
    nbytes: int = field(metadata={"key": "bytes"})
    #: SHA-256 of the file, by which streams name it.
    key: str
    model: str
    fingerprint: str | None
    dtype: str
    tokens: int
    texts: tuple[TextOrigin, ...]
    layers: tuple[LayerGeometry, ...]
    tables: tuple[TableSize, ...]
    settings: dict[str, object]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.input}: profile of {self.model}, {self.nbytes:,} bytes, key {self.key[:16]}",
            f"  {self._describe_origin()}",
        ]
        groups: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            groups.setdefault(_describe_layer(layer), []).append(index)
        for text, numbers in groups.items():
            lines.append(f"  {format_layers(numbers)}: {text}")
        lines += [
            f"  {self._describe_kind(table.kind)}: {pluralize(table.sections, 'section')}, {table.nbytes:,} bytes"
            for table in self.tables
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _describe_kind(self, kind: str) -> str:
        below = self.settings.get("below")
        layers = f", below {', '.join(map(str, below))}" if isinstance(below, list) else ""
        mode = f", {self.settings['transform']}" if "transform" in self.settings else ""
        return {"linear": f"linear (lossless{layers})", "transform": f"transform (lossy{layers}{mode})"}.get(kind, kind)

    def _describe_origin(self) -> str:
        names = [text.name for text in self.texts[:_MAX_TEXTS_SHOWN]]
        more = f" and {len(self.texts) - len(names)} more" if len(self.texts) > len(names) else ""
        origin = "caches alone" if self.fingerprint is None else f"model {self.fingerprint[:16]}"
        return f"of {self.tokens:,} tokens ({', '.join(names)}{more}), {self.dtype}, {origin}"


@dataclass(frozen=True, kw_only=True)
class ProfileVerifyResult(Record):
    """Result of checking a profile."""

    input: str
    key: str
    sections: int
    nbytes: int = field(metadata={"key": "bytes"})
    #: Whether the model is the one it was made of; None where it was not compared.
    is_of_model: bool | None

    @property
    def ok(self) -> bool:
        """Return whether nothing differs."""
        return self.is_of_model is not False

    def __str__(self) -> str:
        text = f"{self.input}: the checksums of {pluralize(self.sections, 'section')} hold, {self.nbytes:,} bytes"
        if self.is_of_model is None:
            return text
        return f"{text}; {'made of this model' if self.is_of_model else 'DIFFERS: made of another model'}"


def inspect_profile(path: str | os.PathLike[str]) -> ProfileInspection:
    """Read a profile and describe it; the errors are those of `Profile.read`."""
    profile = Profile.read(path)
    info = profile.info
    return ProfileInspection(
        input=os.fspath(path),
        nbytes=profile.nbytes,
        key=profile.key.hex(),
        model=info.model,
        fingerprint=info.fingerprint,
        dtype=info.dtype,
        tokens=info.tokens,
        texts=info.texts,
        layers=info.layers,
        tables=measure_tables(profile),
        settings=dict(info.settings),
        notes=describe_few_tokens(info),
    )


def measure_tables(profile: Profile) -> tuple[TableSize, ...]:
    """Return the bytes of the tables of each kind, without what aligns them."""
    tables = []
    for kind in profile.kinds:
        arrays = profile.select(kind).values()
        tables.append(TableSize(kind=kind, sections=len(arrays), nbytes=sum(array.nbytes for array in arrays)))
    return tuple(tables)


def verify_profile(path: str | os.PathLike[str], fingerprint: str | None = None) -> ProfileVerifyResult:
    """Check every byte of a profile, and optionally that it is of a model.

    Parameters
    ----------
    fingerprint
        `kvmnn.lm.compute_fingerprint` of the model.

    Raises
    ------
    SourceError, ManifestError
        As `Profile.read`.
    KvmnnError
        For a profile of caches alone, which names no model, where one is to be compared.
    """
    profile = Profile.read(path)
    own_fingerprint = profile.info.fingerprint
    if fingerprint is not None and own_fingerprint is None:
        raise KvmnnError(f"{os.fspath(path)}: was made of caches alone, and names no model")
    return ProfileVerifyResult(
        input=os.fspath(path),
        key=profile.key.hex(),
        sections=len(profile.arrays),
        nbytes=profile.nbytes,
        is_of_model=None if fingerprint is None else fingerprint == own_fingerprint,
    )


def _describe_layer(layer: LayerGeometry) -> str:
    dims = f"{layer.head_dim}" if layer.value_dim == layer.head_dim else f"{layer.head_dim} (K), {layer.value_dim} (V)"
    rope = "K not rotated" if layer.rope is None else layer.rope.label
    window = "" if layer.window is None else f", window {layer.window:,}"
    return f"{pluralize(layer.kv_heads, 'kv head')} of {dims}, {rope}{window}"
