"""The header of a prompt cache: which class each layer's cache is, and where its states lie."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...dtypes import Positions
from ...errors import SourceError
from ...files.mapped import MappedFile
from ..file_bytes import FileBytes
from ..safetensors_header import Header, Tensor, read_header
from .groups import BITS

PLAIN, QUANTISED, ROTATING = "KVCache", "QuantizedKVCache", "RotatingKVCache"
_MOST_HEADER = 4 << 20
_CLASS = re.compile(rb'"[12]\.0"\s*:\s*"\w*Cache"|"[12]\.0"\s*:\s*"CacheList"')
_STATE = re.compile(rb'"0\.0(\.\d+)*"\s*:\s*\{')
_WORDS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}
_MOST_LAYERS = 1 << 16


@dataclass(frozen=True, eq=False)
class Layer:
    """The cache of one layer.

    Parameters
    ----------
    number
        From 0.
    keys, values
        The tensors of K and of V: one, or codes, scales and biases.
    tokens
        Valid ones of each head.
    spans
        Where they lie among the rows of a head, ``(begin, end)`` in the order of the text.
    positions
        Where they stand in it.
    bits, group_size
        Of quantised groups; 0 without.
    """

    number: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    tokens: int
    spans: tuple[tuple[int, int], ...]
    positions: Positions
    bits: int = 0
    group_size: int = 0


def is_prompt_cache(path: str) -> bool:
    """Whether a file is a ``.safetensors`` file whose metadata name the class of a cache."""
    if not path.lower().endswith(".safetensors"):
        return False
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return length <= _MOST_HEADER and _names_cache(file.read(length))
    except OSError:
        return False


def holds_prompt_cache(file: MappedFile) -> bool:
    """The same of what was read from a stream, which has no name."""
    length = int.from_bytes(file.head(8), "little")
    return length <= _MOST_HEADER and _names_cache(file.head(8 + length)[8:])


def _names_cache(header: bytes) -> bool:
    return bool(_CLASS.search(header) and _STATE.search(header))


class States:
    """All that the header says.

    Parameters
    ----------
    file
        The whole file.

    Raises
    ------
    SourceError
        For a header that is damaged.
    """

    def __init__(self, file: FileBytes) -> None:
        self.file = file
        self.header: Header = read_header(file)
        metadata = self.header.metadata
        # Newer files have the user's metadata under 0 and classes under 1; older ones settings, metadata, classes.
        self.is_new = metadata.get("1.0", "").endswith(("Cache", "CacheList"))
        prefix = "1" if self.is_new else "2"
        self.classes = tuple(_listed(metadata, prefix))

    def layers(self) -> Iterator[Layer]:
        """The layers, checked; `SourceError` for classes that are not read and for states that do not fit them."""
        if not self.classes:
            raise SourceError(f"{self.file.label}: names no class of a cache")
        for number, kind in enumerate(self.classes):
            if kind == PLAIN:
                yield self._plain(number)
            elif kind == QUANTISED:
                yield self._quantised(number)
            elif kind == ROTATING:
                yield self._rotating(number)
            else:
                raise SourceError(
                    f"{self.file.label}: the cache of layer {number} is a {kind!r:.60}: K and V are read of {PLAIN}, "
                    f"{QUANTISED} and {ROTATING} (encode keeps any of them whole)"
                )

    def _plain(self, number: int) -> Layer:
        keys, values = self._pair(number)
        tokens = self._tokens(number, keys.shape[2])
        return Layer(number, (keys,), (values,), tokens, ((0, tokens),), np.arange(tokens))

    def _rotating(self, number: int) -> Layer:
        """The first `keep` tokens stay, the others are overwritten in turns: `index` is where the oldest is."""
        keys, values = self._pair(number)
        rows = keys.shape[2]
        if self.is_new:
            seen, keep, most, index = (self._scalar(f"{number}.{state}") for state in (2, 3, 4, 5))
        else:
            said = [_whole(text) for text in _listed(self.header.metadata, f"0.{number}")]
            keep, most, seen, index = said if len(said) == 4 else [-1] * 4
        turned = index < min(rows, seen)
        if not (0 <= keep <= most and 0 <= index <= rows and seen >= 1 and (not turned or keep <= rows)):
            raise SourceError(
                f"{self.file.label}: layer {number}: {seen} tokens, the first {keep} kept, in a window of {most}, the "
                f"next at {index}: do not fit {rows} rows"
            )
        if index == rows:
            spans = [(0, rows)]
        elif turned:
            spans = [(0, keep), (max(index, keep), rows), (keep, index)]
        else:
            spans = [(0, seen)]
        spans = [(begin, end) for begin, end in spans if begin < end]
        tokens = sum(end - begin for begin, end in spans)
        if not 1 <= tokens <= seen:
            raise SourceError(f"{self.file.label}: layer {number}: {tokens} rows hold tokens, and {seen} were seen")
        kept = min(keep, tokens) if seen > tokens else 0
        positions = np.concatenate([np.arange(kept), np.arange(seen - tokens + kept, seen)])
        return Layer(number, (keys,), (values,), tokens, tuple(spans), positions)

    def _pair(self, number: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer without groups."""
        keys, values = self._tensor(f"{number}.0"), self._tensor(f"{number}.1")
        for tensor in (keys, values):
            self._check(tensor, tuple(_WORDS), 4)
        if keys.shape[:3] != values.shape[:3] or keys.kind != values.kind:
            raise SourceError(f"{self.file.label}: layer {number}: K is {list(keys.shape)}, V is {list(values.shape)}")
        return keys, values

    def _quantised(self, number: int) -> Layer:
        if self.is_new:
            sizes = [self._scalar(f"{number}.{state}") for state in (3, 4)]
        else:
            said = list(_listed(self.header.metadata, f"0.{number}"))
            sizes = [_whole(text) for text in said[2:4]] if len(said) == 4 else []
        if len(sizes) != 2 or sizes[1] not in BITS or sizes[0] < 1:
            raise SourceError(f"{self.file.label}: layer {number}: its group size and bits are {sizes}")
        group, bits = sizes
        found = []
        for side in (0, 1):
            codes, scales, biases = (self._tensor(f"{number}.{side}.{place}") for place in range(3))
            self._check(codes, ("U32",), 4)
            for tensor in (scales, biases):
                self._check(tensor, tuple(_WORDS), 4)
            values = codes.shape[3] * 32 // bits
            expected = (*codes.shape[:3], values // group)
            if (scales.shape, biases.shape) != (expected, expected) or codes.shape[3] * 32 != expected[
                3
            ] * group * bits:
                raise SourceError(
                    f"{self.file.label}: layer {number}: codes {list(codes.shape)} of {bits} bits in groups of {group} "
                    f"do not fit scales {list(scales.shape)}"
                )
            if scales.kind != biases.kind:
                raise SourceError(f"{self.file.label}: layer {number}: scales are {scales.kind}, biases {biases.kind}")
            found.append((codes, scales, biases))
        if found[0][0].shape[:3] != found[1][0].shape[:3]:
            raise SourceError(f"{self.file.label}: layer {number}: K and V differ in shape")
        tokens = self._tokens(number, found[0][0].shape[2])
        return Layer(number, found[0], found[1], tokens, ((0, tokens),), np.arange(tokens), bits, group)

    def _tokens(self, number: int, capacity: int) -> int:
        """How many tokens are valid: as a state says, or a setting; older plain caches are cut at them."""
        if self.is_new:
            tokens = self._scalar(f"{number}.2")
        else:
            said = list(_listed(self.header.metadata, f"0.{number}"))
            tokens = _whole(said[1]) if len(said) == 4 else capacity
        if not 1 <= tokens <= capacity:
            raise SourceError(
                f"{self.file.label}: layer {number}: {tokens} tokens: expected at least 1 and at most {capacity}, for "
                "which there is room"
            )
        return tokens

    def _tensor(self, name: str) -> Tensor:
        number = self.header.tensors.find(name)
        if number is None:
            raise SourceError(f"{self.file.label}: has no state {name!r:.40}")
        return self.header.tensors[number]

    def _check(self, tensor: Tensor, kinds: tuple[str, ...], axes: int) -> None:
        if tensor.kind not in kinds or len(tensor.shape) != axes or 0 in tensor.shape:
            raise SourceError(
                f"{self.file.label}: the state {tensor.name!r:.40} is {tensor.kind} {list(tensor.shape)}: expected "
                f"{' or '.join(kinds)} [batch, kv_head, token, dimension]"
            )

    def _scalar(self, name: str) -> int:
        tensor = self._tensor(name)
        if tensor.kind != "I32" or tensor.end - tensor.begin != 4:
            raise SourceError(f"{self.file.label}: the state {name!r:.40} is {tensor.kind}: expected one I32")
        return int(np.frombuffer(self.file.view(self.header.start + tensor.begin, 4), "<i4")[0])


def numpy_type(tensor: Tensor) -> str:
    """The numpy type of the words of a tensor of numbers."""
    return _WORDS[tensor.kind]


def _listed(metadata: dict[str, str], prefix: str) -> Iterator[str]:
    """The texts under ``<prefix>.0``, ``<prefix>.1`` and so on."""
    for number in range(_MOST_LAYERS):
        text = metadata.get(f"{prefix}.{number}")
        if text is None:
            return
        yield text


def _whole(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else -1
