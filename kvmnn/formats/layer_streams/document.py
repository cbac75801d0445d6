"""``layers.json``: the contents of a folder of layer streams, and the profile that they need."""

from __future__ import annotations

import json
import math
import os
from dataclasses import field
from pathlib import Path
from typing import Final, Literal

from ... import dtypes
from ..._util.dataclass import dataclass
from ..._util.packages import get_version
from ..._util.text import LOSSLESS, LOSSY, compute_ratio
from ...arrays.completeness import Completeness
from ...arrays.naming import find_name_error
from ...arrays.source import DEQUANTIZED_KEY, list_losses, parse_completeness, qualify_label
from ...dtypes import PARTS, Part
from ...errors import MissingFileError
from ...files.schema import JsonReader, Record, parse_document, read_bounded
from ...profiles import Profile
from ...profiles.search import ProfileFinder

LAYERS_NAME: Final = "layers.json"
ADAPTED_NAME: Final = "adapted.kvmp"
SCHEMA: Final = "kvmnn-layer-streams"
SCHEMA_VERSION: Final = 1
MAX_LAYERS = 4096
_MAX_DOCUMENT_BYTES = 64 << 20

LayerCodec = Literal["profile", "transform"]
LAYER_CODECS: Final[tuple[LayerCodec, ...]] = ("profile", "transform")


@dataclass(frozen=True, kw_only=True)
class LayerStreamArray(Record):
    """K or V of a layer, as an array of the input."""

    part: Part
    name: str
    #: ``[kv_head, token, dim]``, or ``[token, kv_head, dim]`` where `token_major`.
    shape: tuple[int, int, int]
    token_major: bool
    #: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    dtype: str
    #: Numpy type of the array's elements.
    array_dtype: str
    #: SHA-256 of the little-endian elements that decoding gives, in the array's order.
    sha256: str

    @property
    def nbytes(self) -> int:
        """Return the bytes of the elements."""
        return math.prod(self.shape) * dtypes.parse_dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class LayerErrors(Record):
    """Differences of the elements that decoding gives from those that were encoded; 0 for lossless streams."""

    #: The largest absolute difference of an element of K, and of V.
    max_key_error: float
    max_value_error: float
    #: Root mean square of the differences over that of the elements.
    relative_key_error: float
    relative_value_error: float


@dataclass(frozen=True, kw_only=True)
class LayerStreamEntry(Record):
    """The stream of a layer."""

    layer: int
    file: str
    nbytes: int = field(metadata={"key": "bytes"})
    #: SHA-256 of the stream.
    sha256: str
    arrays: tuple[LayerStreamArray, ...]
    #: Of lossy streams.
    errors: LayerErrors | None = field(default=None, metadata={"omit": True})

    @property
    def raw_bytes(self) -> int:
        """Return the bytes of K and V."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, kw_only=True)
class LayerStreamsDocument(Record):
    """All of ``layers.json``."""

    codec: LayerCodec
    #: SHA-256 of the profile's file, in hexadecimal, and its name when the streams were made.
    profile_key: str
    profile_file: str
    #: Options of the codec, as the user said them.
    options: dict[str, object]
    #: KL divergence in nats a token that the encoder expects; None where the profile has no sensitivities of what was
    #: rounded, K and V were rounded before, or `bits_factor` belies it.
    predicted_kl: float | None
    metadata: dict[str, str]
    layers: tuple[LayerStreamEntry, ...]
    #: Bytes of a profile that was learned in this cache alone: it is in the folder, and counts.
    profile_bytes: int | None = field(default=None, metadata={"omit": True})
    #: Bits of lossy streams over those that the profile predicts, where they are so many that its losses do not hold.
    bits_factor: float | None = field(default=None, metadata={"omit": True})

    @property
    def is_lossy(self) -> bool:
        """Return whether decoding gives other elements than were encoded."""
        return self.codec == "transform"

    @property
    def is_exact(self) -> bool:
        """Return whether every error of every layer was measured and is 0."""
        return all(entry.errors is not None and not any(vars(entry.errors).values()) for entry in self.layers)

    @property
    def is_dequantized(self) -> bool:
        """Return whether the elements stand for MNN's int8 codes, which the streams lack."""
        return DEQUANTIZED_KEY in self.metadata

    @property
    def completeness(self) -> Completeness | None:
        """Return how much of the model's state the streams contain; None where nothing records it."""
        names = [array.name for entry in self.layers for array in entry.arrays]
        return parse_completeness(self.metadata, names, LAYERS_NAME)

    def get_label(self, *, is_proved: bool) -> str | None:
        """Return ``LOSSY``, ``LOSSLESS`` where that was proved, else None; of LOSSY K and V see `qualify_label`."""
        if self.is_lossy or self.is_dequantized:
            return LOSSY
        return qualify_label(LOSSLESS if is_proved else None, list_losses(self.metadata))

    @property
    def raw_bytes(self) -> int:
        """Return the bytes of K and V of all layers."""
        return sum(entry.raw_bytes for entry in self.layers)

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all streams, and of a profile of this cache alone."""
        return sum(entry.nbytes for entry in self.layers) + (self.profile_bytes or 0)

    @property
    def ratio(self) -> float:
        """Return the bytes of K and V over `stored_bytes`."""
        return compute_ratio(self.raw_bytes, self.stored_bytes)

    @property
    def tokens(self) -> int:
        """Return the largest number of tokens of a layer."""
        return max(array.shape[0 if array.token_major else 1] for entry in self.layers for array in entry.arrays)

    def to_json(self) -> bytes:
        """Return the bytes of the file."""
        document = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "kvmnn_version": get_version(),
            "lossy": self.is_lossy,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            **self.to_dict(),
        }
        return (json.dumps(document, indent=1) + "\n").encode()


def read_layers_document(folder: str) -> LayerStreamsDocument:
    """Read ``layers.json`` of a folder.

    Raises
    ------
    SourceError, ManifestError
        Where it is not there, or is damaged.
    """
    path = Path(folder, LAYERS_NAME)
    try:
        return parse_layers_document(read_bounded(path, _MAX_DOCUMENT_BYTES), str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{path}: does not exist") from None


def parse_layers_document(text: bytes, label: str) -> LayerStreamsDocument:
    """Read the bytes of ``layers.json``; messages begin with `label`."""
    root = parse_document(text, label, _MAX_DOCUMENT_BYTES)
    root.check_schema(SCHEMA, SCHEMA_VERSION)
    codec = next((codec for codec in LAYER_CODECS if codec == root.get("codec").value), None)
    if codec is None:
        raise root.get("codec").error(" or ".join(map(repr, LAYER_CODECS)))
    options, predicted = root.get("options"), root.get("predicted_kl")
    if not isinstance(options.value, dict):
        raise options.error("an object")
    if predicted.value is not None and type(predicted.value) not in (int, float):
        raise predicted.error("a number or null")
    document = LayerStreamsDocument(
        codec=codec,
        profile_key=root.get("profile_key").read_sha256(),
        profile_file=root.get("profile_file").read_str(),
        options=options.value,
        predicted_kl=None if predicted.value is None else float(predicted.value),
        metadata=root.get("metadata").read_str_map(),
        layers=tuple(
            _parse_layer(entry, index) for index, entry in enumerate(root.get("layers").read_list(1, MAX_LAYERS))
        ),
        profile_bytes=root.get("profile_bytes").read_int(1) if "profile_bytes" in root.value else None,
        bits_factor=_parse_bits_factor(root.get("bits_factor")) if "bits_factor" in root.value else None,
    )
    names = [array.name for entry in document.layers for array in entry.arrays]
    files = [entry.file for entry in document.layers]
    for kind, values in (("arrays", names), ("files", files)):
        if len(set(values)) < len(values):
            raise root.get("layers").error(f"{kind} that differ in name")
    if root.get("lossy").read_bool() != document.is_lossy:
        raise root.get("lossy").error(f"{str(document.is_lossy).lower()} of codec {codec!r}")
    for key, expected in (("raw_bytes", document.raw_bytes), ("stored_bytes", document.stored_bytes)):
        if root.get(key).read_int(0) != expected:
            raise root.get(key).error(f"{expected}, the sum of its parts")
    return document


def _parse_bits_factor(node: JsonReader) -> float:
    if type(node.value) not in (int, float) or not node.value > 0:
        raise node.error("a number above 0")
    return float(node.value)


def _parse_layer(node: JsonReader, index: int) -> LayerStreamEntry:
    if node.get("layer").read_int(0) != index:
        raise node.get("layer").error(f"{index}: layers are in order from 0 on")
    arrays = tuple(map(_parse_array, node.get("arrays").read_list(2, 2)))
    if tuple(array.part for array in arrays) != PARTS:
        raise node.get("arrays").error("one of K and one of V")
    heads_and_tokens = [_get_heads_and_tokens(array) for array in arrays]
    if heads_and_tokens[0] != heads_and_tokens[1] or arrays[0].dtype != arrays[1].dtype:
        raise node.get("arrays").error("K and V of the same heads, tokens and type")
    errors = None
    if "errors" in node.value:
        entry = node.get("errors")
        names = ("max_key_error", "max_value_error", "relative_key_error", "relative_value_error")
        values = {name: entry.get(name) for name in names}
        for value in values.values():
            if type(value.value) not in (int, float):
                raise value.error("a number")
        errors = LayerErrors(**{name: float(value.value) for name, value in values.items()})
    return LayerStreamEntry(
        layer=index,
        file=node.get("file").read_file_name(),
        nbytes=node.get("bytes").read_int(1),
        sha256=node.get("sha256").read_sha256(),
        arrays=arrays,
        errors=errors,
    )


def _get_heads_and_tokens(array: LayerStreamArray) -> tuple[int, int]:
    first, second, _ = array.shape
    return (second, first) if array.token_major else (first, second)


def _parse_array(node: JsonReader) -> LayerStreamArray:
    part: Part | None = next((part for part in PARTS if part == node.get("part").value), None)
    if part is None:
        raise node.get("part").error(" or ".join(map(repr, PARTS)))
    name = node.get("name").read_str()
    if name_error := find_name_error(name):
        raise node.get("name").error(f"a name of an array ({name_error})")
    dtype = node.get("dtype").read_str()
    if dtype not in dtypes.DTYPES:
        raise node.get("dtype").error(f"one of {', '.join(dtypes.DTYPES)}")
    array_dtype = node.get("array_dtype").read_str()
    if (
        array_dtype not in ("<f2", "<f4", "<u2", "<i2", "|V2", "<i4", "<u4", "|V4")
        or int(array_dtype[2]) != dtypes.parse_dtype(dtype).itemsize
    ):
        raise node.get("array_dtype").error(f"a numpy type of {dtype}")
    shape = [axis.read_int(1) for axis in node.get("shape").read_list(3, 3)]
    return LayerStreamArray(
        part=part,
        name=name,
        shape=(shape[0], shape[1], shape[2]),
        token_major=node.get("token_major").read_bool(),
        dtype=dtype,
        array_dtype=array_dtype,
        sha256=node.get("sha256").read_sha256(),
    )


def find_profile(folder: str, document: LayerStreamsDocument, path: str | os.PathLike[str] | None = None) -> Profile:
    """Return the profile that the streams of a folder need.

    Parameters
    ----------
    path
        Its file; None looks where it was when they were made, in the folder, and in the one above.

    Raises
    ------
    SourceError
        Where it is not there, or another one was given; the message has the key.
    """
    finder = ProfileFinder(folder, path, [Path(folder), Path(folder).absolute().parent])
    finder.add_name(document.profile_file)
    return finder.get(bytes.fromhex(document.profile_key))
