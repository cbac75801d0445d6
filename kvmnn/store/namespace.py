"""Namespaces, token sequences and their keys.

A namespace is a model, a precision and the shapes of its layers: only within one do prefixes share blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.patterns import declare_pattern
from .._util.text import pluralize
from .._util.validation import repr_short
from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import MAX_STATE_NAME_CHARS, OpaqueState
from ..dtypes import DTYPES, DType, Elements, parse_dtype
from ..errors import ArrayTypeError, KvmnnError, OptionError
from ..files.schema import JsonReader, parse_document
from ..packed.cache_info import MAX_TOKEN_ID

KEY_BYTES = 16
MAX_LAYERS = 4096
MAX_MODEL_CHARACTERS = 256

_MAX_SESSION_NAME_CHARACTERS = 256
_TENANT_REGEX = declare_pattern(r"[A-Za-z0-9._-]{1,64}")
_MAX_KV_HEADS = 1 << 16
_MAX_HEAD_DIM = 1 << 20
_MAX_DOCUMENT_BYTES = 1 << 20
_MAX_STATES = 1 << 14


class LayerShape(NamedTuple):
    """Shape of the K and V of a layer, without the tokens."""

    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    """Elements of V in one head; differs from K for latent attention, 0 if there is no V."""

    @property
    def dims(self) -> tuple[int, int]:
        """Elements of K and of V for one token in one head."""
        return self.head_dim, self.value_dim


class StateId(NamedTuple):
    """State other than K and V: its layer, and its name in the engine."""

    layer: int
    name: str


@dataclass(frozen=True)
class Namespace:
    """A model, its precision and its layers: only within one namespace do prefixes share blocks."""

    #: Fingerprint of the model.
    model: str
    #: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    dtype: str
    #: Layers with full attention, in order; their blocks are shared.
    layers: tuple[LayerShape, ...]
    #: Layers with a sliding window of which only the last tokens are stored, in order. Their rows, and opaque state,
    #: are stored with each prefix, at its exact length (`kvmnn.store.unit_codec`).
    windows: tuple[LayerShape, ...] = ()
    #: Layer and name of each state other than K and V, in order.
    states: tuple[StateId, ...] = ()
    #: Name of whom its sequences belong to; empty for those of a store that is not divided. It salts all keys.
    tenant: str = ""
    #: What an encrypted store hashes keys with; empty for one that is not.
    secret: bytes = field(default=b"", repr=False)

    @cached_property
    def key(self) -> bytes:
        """Key of the namespace, and of the empty prefix in it."""
        return hash_key(b"kvmnn prefix store 1\n" + self.to_json().encode(), self.secret)

    @property
    def element_dtype(self) -> DType:
        """The element type."""
        return parse_dtype(self.dtype)

    @cached_property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Index of the layer, and 0 for K or 1 for V, of each stream of a unit; layers without V have no 1."""
        return tuple(
            (layer_index, part)
            for layer_index, shape in enumerate(self.layers)
            for part in range(2)
            if shape.dims[part]
        )

    @property
    def needs_state(self) -> bool:
        """Return whether a model can only continue from a prefix whose windows and state are stored."""
        return bool(self.windows or self.states)

    @property
    def all_layers(self) -> tuple[LayerShape, ...]:
        """All layers that have K and V, in order."""
        return tuple(sorted((*self.layers, *self.windows)))

    @property
    def token_bytes(self) -> int:
        """Number of bytes of K and V of one token in all layers with full attention."""
        return self.element_dtype.itemsize * sum(shape.kv_heads * sum(shape.dims) for shape in self.layers)

    def make_sequence(self, ids: Ids, block_tokens: int) -> TokenSequence:
        """Return a sequence of this namespace, with the keys of its blocks."""
        keys = compute_block_keys(self.key, ids, block_tokens, self.secret)
        return TokenSequence(self.key, ids, keys, block_tokens, self.needs_state, self.secret)

    def to_json(self) -> str:
        """Return the JSON document, on one line."""
        document: dict[str, object] = {
            "model": self.model,
            "dtype": self.dtype,
            "layers": _shapes_to_lists(self.layers),
        }
        if self.needs_state:
            document |= {"windows": _shapes_to_lists(self.windows), "states": [list(state) for state in self.states]}
        if self.tenant:
            document["tenant"] = self.tenant
        return json.dumps(document, separators=(",", ":"), sort_keys=True)

    def __str__(self) -> str:
        """Return a text such as ``6 layers, 4 kv heads x 64 dims, fp32``."""
        shapes = sorted({shape[1:] for shape in self.all_layers})
        sizes = " and ".join(
            f"{pluralize(heads, 'kv head')} x {head_dim} dims{_describe_value_dim(head_dim, value_dim)}"
            for heads, head_dim, value_dim in shapes[:3]
        )
        states = f", {pluralize(len(self.states), 'state')}" if self.states else ""
        return f"{len(self.all_layers)} layers, {sizes}{' and more' if len(shapes) > 3 else ''}, {self.dtype}{states}"


def _shapes_to_lists(shapes: Sequence[LayerShape]) -> list[list[int]]:
    return [list(shape if shape.value_dim != shape.head_dim else shape[:3]) for shape in shapes]


def describe_difference(first_namespace: Namespace, second_namespace: Namespace) -> tuple[str, str]:
    """Describe the difference between two namespaces of the same model and dtype."""
    if str(first_namespace) != str(second_namespace):
        return str(first_namespace), str(second_namespace)
    layers = zip(first_namespace.all_layers, second_namespace.all_layers, strict=False)
    first_shape, second_shape = next(((a, b) for a, b in layers if a != b), (None, None))
    if first_shape is None or second_shape is None:
        return _describe_states(first_namespace.states), _describe_states(second_namespace.states)
    return _describe_layer(first_shape), _describe_layer(second_shape)


def _describe_states(states: Sequence[StateId]) -> str:
    names = ", ".join(f"{state.name!r} of layer {state.layer}" for state in states[:3])
    return f"state {names}{' ...' if len(states) > 3 else ''}" if names else "state of no layer"


def _describe_layer(shape: LayerShape) -> str:
    return f"a layer {shape.layer} of {pluralize(shape.kv_heads, 'kv head')} x {shape.head_dim}, V {shape.value_dim}"


def _describe_value_dim(dims: int, value_dim: int) -> str:
    if value_dim == dims:
        return ""
    return f" (V {value_dim})" if value_dim else " (no V)"


def validate_model(model: object) -> str:
    """Return a fingerprint; raise `KvmnnError` or `TypeError` if it is invalid."""
    if not isinstance(model, str):
        raise TypeError(f"model must be a string, the fingerprint of a model, not {type(model).__name__}")
    if not model or len(model) > MAX_MODEL_CHARACTERS or not model.isprintable():
        raise KvmnnError(
            f"model is {repr_short(model)}: expected a fingerprint of 1 to {MAX_MODEL_CHARACTERS} printable characters"
        )
    return model


def validate_tenant(name: object) -> str:
    """Return the name of a tenant; raise `OptionError` or `TypeError` if it is invalid."""
    if not isinstance(name, str):
        raise TypeError(f"namespace must be a string, not {type(name).__name__}")
    if not _TENANT_REGEX.fullmatch(name):
        raise OptionError(f"namespace is {repr_short(name)}: expected 1 to 64 letters, digits and . _ -")
    return name


def validate_session_name(name: object, noun: str = "the name of a session") -> None:
    """Raise `KvmnnError` or `TypeError` for an invalid name of a session, or other `noun`."""
    if not isinstance(name, str):
        raise TypeError(f"{noun} must be a string, not {type(name).__name__}")
    if not name or len(name) > _MAX_SESSION_NAME_CHARACTERS or not name.isprintable():
        raise KvmnnError(
            f"{noun} is {repr_short(name)}: expected 1 to {_MAX_SESSION_NAME_CHARACTERS} printable characters"
        )


_TENANT_SEPARATOR = "\x1f"  # no name of a session contains it


def make_session_name(tenant: str, name: object, noun: str = "the name of a session") -> str:
    """Return the name under which a session of a tenant is stored; raise as `validate_session_name`."""
    validate_session_name(name, noun)
    return f"{tenant}{_TENANT_SEPARATOR}{name}" if tenant else str(name)


def list_session_names(tenant: str, stored_names: Iterable[str]) -> list[str]:
    """Return the names of the sessions of a tenant, from those under which sessions are stored."""
    pairs = [name.rpartition(_TENANT_SEPARATOR) for name in stored_names]
    return [name for owner, _, name in pairs if owner == tenant]


def build_namespace(
    layers: Sequence[LayerCache],
    model: str,
    windows: Sequence[LayerCache] = (),
    states: Sequence[OpaqueState] = (),
    tenant: str = "",
    secret: bytes = b"",
) -> Namespace:
    """Return the namespace of the caches of all layers, in order; of `windows` only the last tokens are stored."""
    shapes, window_shapes = (
        tuple(LayerShape(cache.layer, cache.kv_heads, cache.head_dim, cache.value_dim) for cache in caches)
        for caches in (layers, windows)
    )
    found_dtypes = {cache.dtype for cache in (*layers, *windows)}
    if len(found_dtypes) > 1:
        raise KvmnnError(f"the layers are {' and '.join(sorted(found_dtypes))}: expected one dtype")
    names = tuple(StateId(state.layer, state.name) for state in states)
    return _validate_namespace(
        Namespace(
            validate_model(model),
            found_dtypes.pop() if found_dtypes else "fp16",
            shapes,
            window_shapes,
            names,
            tenant,
            secret,
        )
    )


def parse_namespace(text: object, label: str, secret: bytes = b"") -> Namespace:
    """Parse the document of `Namespace.to_json`; errors are `KvmnnError`, and start with `label`."""
    if not isinstance(text, str):
        raise KvmnnError(f"{label}: is no JSON text")
    root = parse_document(text, label, _MAX_DOCUMENT_BYTES)
    dtype = root.get("dtype")
    if dtype.read_str() not in DTYPES:
        raise dtype.error(f"one of {', '.join(DTYPES)}")
    needs_state = "windows" in root.value
    shapes = _parse_shapes(root.get("layers"), 0 if needs_state else 1)
    windows = _parse_shapes(root.get("windows"), 0) if needs_state else ()
    states = []
    for entry in root.get("states").read_list(max_len=_MAX_STATES) if needs_state else ():
        layer, name = entry.read_list(min_len=2, max_len=2)
        states.append(StateId(layer.read_int(0), name.read_str()))
    tenant = root.get("tenant").read_str() if "tenant" in root.value else ""
    try:
        return _validate_namespace(
            Namespace(
                validate_model(root.get("model").read_str()),
                dtype.read_str(),
                shapes,
                windows,
                tuple(states),
                validate_tenant(tenant) if tenant else "",
                secret,
            )
        )
    except KvmnnError as error:
        raise KvmnnError(f"{label}: {error}") from None


def _parse_shapes(node: JsonReader, min_layers: int) -> tuple[LayerShape, ...]:
    shapes = []
    for entry in node.read_list(min_len=min_layers, max_len=MAX_LAYERS):
        layer, heads, dims, *value_nodes = entry.read_list(min_len=3, max_len=4)
        value_dim = value_nodes[0] if value_nodes else dims
        shapes.append(LayerShape(layer.read_int(0), heads.read_int(1), dims.read_int(1), value_dim.read_int(0)))
    return tuple(shapes)


def _validate_namespace(namespace: Namespace) -> Namespace:
    numbers = [shape.layer for shape in namespace.layers]
    if namespace.needs_state:
        window_numbers, states = [shape.layer for shape in namespace.windows], list(namespace.states)
        if (
            numbers != sorted(set(numbers))
            or window_numbers != sorted(set(window_numbers))
            or states != sorted(set(states))
        ):
            raise KvmnnError(f"the layers are {repr_short([numbers, window_numbers])}: expected each once, in order")
        for state in namespace.states:
            if not 0 < len(state.name) <= MAX_STATE_NAME_CHARS or not state.name.isprintable():
                raise KvmnnError(f"the name of a state is {repr_short(state.name)}")
        numbers = [shape.layer for shape in namespace.all_layers] or [0]
    if not numbers or len(numbers) > MAX_LAYERS:
        raise KvmnnError(f"there are {len(numbers):,} layers: expected 1 to {MAX_LAYERS:,}")
    if numbers != sorted(set(numbers)):
        raise KvmnnError(f"the layers are {repr_short(numbers)}: expected each once, in order")
    for shape in namespace.all_layers:
        if not (1 <= shape.kv_heads <= _MAX_KV_HEADS and shape.head_dim >= 1 and max(shape.dims) <= _MAX_HEAD_DIM):
            raise KvmnnError(f"layer {shape.layer} has {shape.kv_heads:,} kv heads x {max(shape.dims):,} dims")
    return namespace


def split_windows(layers: Sequence[LayerCache], windows: Collection[int]) -> tuple[list[LayerCache], list[LayerCache]]:
    """Return the layers that contain all tokens, and those of `windows` that only contain the last tokens.

    A layer with a window that still contains every token belongs to the first: it is valid for any prefix of the
    sequence.
    """
    full_layers, window_layers = [], []
    for cache in layers:
        if not isinstance(cache, LayerCache):
            raise ArrayTypeError(f"layers are {type(cache).__name__}: expected kvmnn.LayerCache")
        num_seen, num_cached = cache.tokens_seen, cache.tokens
        if cache.layer not in windows or num_cached == num_seen:
            full_layers.append(cache)
            continue
        if not num_cached or not np.array_equal(cache.positions, np.arange(num_seen - num_cached, num_seen)):
            raise KvmnnError(f"layer {cache.layer} has a window, and does not contain the last tokens of its text")
        window_layers.append(cache)
    return full_layers, sorted(window_layers, key=lambda cache: cache.layer)


def validate_layers(layers: Sequence[LayerCache], tokens: int, windows: Sequence[LayerCache] = ()) -> list[LayerCache]:
    """Return the layers in order.

    Each must contain K and V of all `tokens` tokens of the sequence and of no others; `windows` must end with it.
    """
    for cache in layers:
        if not isinstance(cache, LayerCache):
            raise ArrayTypeError(f"layers are {type(cache).__name__}: expected kvmnn.LayerCache")
    sorted_layers = sorted(layers, key=lambda cache: cache.layer)
    for cache in windows:
        if cache.tokens_seen != tokens:
            raise KvmnnError(
                f"layer {cache.layer} has a window that ends after {cache.tokens_seen:,} tokens, there are {tokens:,} "
                "token ids"
            )
    expected_positions = np.arange(tokens)
    for cache in sorted_layers:
        if cache.tokens != tokens:
            raise OptionError(f"layer {cache.layer} holds {cache.tokens:,} tokens, there are {tokens:,} token ids")
        if not ((cache.positions == expected_positions).all() and (cache.ends == expected_positions + 1).all()):
            raise KvmnnError(
                f"layer {cache.layer} does not hold the tokens 0 to {tokens - 1:,} of its text, each once: a cache "
                "that was cut is no prefix"
            )
    return sorted_layers


def list_parts(layers: Sequence[LayerCache]) -> list[Elements]:
    """Return K and V of each layer, in the order of `Namespace.parts`."""
    return [elements for cache in layers for elements in (cache.keys, cache.values) if elements.shape[2]]


MAX_ID = MAX_TOKEN_ID
MAX_TOKENS = 1 << 24
Ids = npt.NDArray[np.uint32]
"""Token ids, ``[token]``, little-endian."""

_SHORT_ID_BYTES, _LONG_ID_BYTES = 3, 5
"""Bytes of an id in a sort key, big-endian; a long one starts with `_ESCAPE_BYTE`."""
_ESCAPE_BYTE = 0xFF
_MIN_LONG_ID = _ESCAPE_BYTE << 16
"""The smallest id whose first byte would be `_ESCAPE_BYTE`. Ids of vocabularies are smaller; placeholders of pictures
are hashes of up to 32 bits."""


def to_token_ids(token_ids: Sequence[int] | npt.NDArray[Any]) -> Ids:
    """Convert token ids to an array."""
    try:
        array = np.asarray(token_ids)
    except (ValueError, OverflowError):
        raise KvmnnError("token ids: expected a list of at least one whole number, found no numbers") from None
    if array.dtype.kind in "fO" and array.ndim == 1:  # integers too large for the types of numpy
        for number, token_id in enumerate(token_ids):
            if type(token_id) is int and not 0 <= token_id <= MAX_ID:
                raise _make_id_error(number, token_id)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        found_text = "none" if array.shape == (0,) else f"{array.dtype.name} of shape {list(array.shape)}"
        raise KvmnnError(f"token ids: expected a list of at least one whole number, found {found_text}")
    if array.size > MAX_TOKENS:
        raise KvmnnError(f"token ids: there are {array.size:,}, expected at most {MAX_TOKENS:,}")
    min_id, max_id = int(array.min()), int(array.max())
    if min_id < 0 or max_id > MAX_ID:
        raise _make_id_error(int(array.argmin() if min_id < 0 else array.argmax()), min_id if min_id < 0 else max_id)
    return array.astype("<u4")


def _make_id_error(id_index: int, token_id: int) -> KvmnnError:
    return KvmnnError(f"token ids: number {id_index + 1:,}: expected one from 0 to {MAX_ID:,}, found {token_id:,}")


def hash_key(data: bytes, secret: bytes = b"") -> bytes:
    """Return the BLAKE2b hash of 16 bytes of which all keys and names are made; `secret` is that of the store."""
    return hashlib.blake2b(data, digest_size=KEY_BYTES, key=secret).digest()


def compute_block_keys(parent: bytes, ids: Ids, block_tokens: int, secret: bytes = b"") -> list[bytes]:
    """Return the keys of all whole blocks of `ids`, which follow the block with the key `parent`.

    A key is the `hash_key` of the key of the previous block and the ids as little-endian 32-bit integers.
    """
    data, step = ids.tobytes(), 4 * block_tokens
    keys = []
    for begin_byte in range(0, len(data) - step + 1, step):
        parent = hash_key(parent + data[begin_byte : begin_byte + step], secret)
        keys.append(parent)
    return keys


def compute_sequence_key(namespace_key: bytes, ids: Ids, secret: bytes = b"") -> bytes:
    """Return the key of a whole sequence in a namespace."""
    return hash_key(b"text" + namespace_key + ids.tobytes(), secret)


def compute_state_key(parent: bytes, ids: Ids, secret: bytes = b"") -> bytes:
    """Return the key of the state of a prefix that ends with `ids`, which follow the block with the key `parent`."""
    return hash_key(b"kvmnn prefix state" + parent + ids.astype("<u4").tobytes(), secret)


def mask_ids(parent: bytes, ids: Ids, secret: bytes) -> Ids:
    """Return ids that stand for those after the block with the key `parent`, in names and in the index.

    Without a secret these are the ids. With one, each is made of a hash of all before it: two lists have as many of
    them in common as they have ids in common (but for one pair in 2**32), and nothing else is to be seen of the ids.
    """
    if not secret:
        return ids
    masked_ids, chain = [], parent
    for token_id in ids.astype("<u4").tolist():
        chain = hash_key(b"order" + chain + token_id.to_bytes(4, "little"), secret)
        masked_ids.append(int.from_bytes(chain[:4], "little"))
    return np.array(masked_ids, "<u4")


def to_sort_key(ids: Ids) -> bytes:
    """Return ids as bytes that sort in the order of the ids: 3 bytes for a usual id, 5 for one too large for these."""
    id_bytes = np.ascontiguousarray(ids.astype(">u4").view(np.uint8).reshape(-1, 4))
    if not ids.size or int(ids.max()) < _MIN_LONG_ID:
        return id_bytes[:, 4 - _SHORT_ID_BYTES :].tobytes()
    are_long = (ids >= _MIN_LONG_ID).tolist()
    return b"".join(
        bytes([_ESCAPE_BYTE]) + id_row.tobytes() if is_long else id_row[4 - _SHORT_ID_BYTES :].tobytes()
        for id_row, is_long in zip(id_bytes, are_long, strict=True)
    )


def count_common_ids(first: bytes, second: bytes) -> int:
    """Count the ids in the common prefix of two sort keys."""
    size = min(len(first), len(second))
    return count_ids_in_sort_key(
        first[: count_common_entries(np.frombuffer(first, np.uint8, size), np.frombuffer(second, np.uint8, size))]
    )


def count_ids_in_sort_key(sort_key: bytes) -> int:
    """Return how many whole ids the bytes of a sort key have."""
    count = sort_key[::_SHORT_ID_BYTES].find(_ESCAPE_BYTE)
    if count < 0:
        return len(sort_key) // _SHORT_ID_BYTES
    position = count * _SHORT_ID_BYTES
    while position < len(sort_key):
        position += _LONG_ID_BYTES if sort_key[position] == _ESCAPE_BYTE else _SHORT_ID_BYTES
        count += position <= len(sort_key)
    return count


def count_common_entries(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> int:
    """Return the length of the common prefix of two arrays."""
    size = min(first.size, second.size)
    differing = np.flatnonzero(first[:size] != second[:size])
    return int(differing[0]) if differing.size else size


@dataclass(frozen=True)
class TokenSequence:
    """Token ids with the keys of their blocks."""

    #: Key of the namespace.
    namespace_key: bytes
    #: Token ids of the whole sequence.
    ids: Ids
    #: Keys of its whole blocks.
    keys: Sequence[bytes]
    #: Tokens per block of the store.
    block_tokens: int
    #: Whether its model has windows or state: a stored prefix is only usable where these are stored as well.
    needs_state: bool = False
    #: That of the namespace.
    secret: bytes = field(default=b"", repr=False)

    def get_parent_key(self, block_index: int) -> bytes:
        """Return the key of the block before this one; of the namespace, if it is the first."""
        return self.keys[block_index - 1] if block_index else self.namespace_key

    def get_block(self, block_index: int) -> Ids:
        """Return the ids of a block; the last one may be partial."""
        return self.ids[block_index * self.block_tokens : (block_index + 1) * self.block_tokens]

    def take_prefix(self, tokens: int) -> TokenSequence:
        """Return the first `tokens` tokens."""
        keys = self.keys[: tokens // self.block_tokens]
        return TokenSequence(
            self.namespace_key, self.ids[:tokens], keys, self.block_tokens, self.needs_state, self.secret
        )

    def get_end(self, tokens: int) -> tuple[bytes, Ids]:
        """Return, of the first `tokens` tokens, the last ids, at most a block, and the key of the block before them."""
        block_index = (tokens - 1) // self.block_tokens
        return self.get_parent_key(block_index), self.ids[block_index * self.block_tokens : tokens]

    def iter_state_keys(self, tokens: int) -> Iterator[tuple[int, bytes]]:
        """Yield length and state key of each prefix of at most `tokens` tokens, the longest first."""
        for size in range(tokens, 0, -1):
            yield size, compute_state_key(*self.get_end(size), self.secret)
