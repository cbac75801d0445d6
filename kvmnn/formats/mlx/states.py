"""The header of a prompt cache: which class each layer's cache is, and where its states lie."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ...errors import SourceError
from ...files.mapped import MappedFile
from ...text import count
from ..file_bytes import FileBytes
from ..safetensors_header import Header, Tensor, read_header

_MOST_HEADER = 4 << 20
_CLASS = re.compile(rb'"[12]\.0"\s*:\s*"\w*Cache"|"[12]\.0"\s*:\s*"CacheList"')
_STATE = re.compile(rb'"0\.0(\.\d+)*"\s*:\s*\{')
_WORDS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}
WORD_TYPES = tuple(_WORDS)
_MOST_LAYERS = 1 << 16
_WHOLE = re.compile(r"\d{1,9}", re.ASCII)


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

    def find(self, name: str) -> Tensor:
        """Return a state by its name in the file; `SourceError` where there is none."""
        number = self.header.tensors.find(name)
        if number is None:
            raise SourceError(f"{self.file.label}: has no state {name!r:.40}")
        return self.header.tensors[number]

    def check(self, tensor: Tensor, kinds: tuple[str, ...], axes: int) -> None:
        """Raise `SourceError` unless a state has one of these types, as many axes, and elements."""
        if tensor.kind not in kinds or len(tensor.shape) != axes or 0 in tensor.shape:
            raise SourceError(
                f"{self.file.label}: the state {tensor.name!r:.40} is {tensor.kind} {list(tensor.shape)}: expected "
                f"{' or '.join(kinds)} [batch, kv_head, token, dimension]"
            )

    def read_scalar(self, name: str) -> int:
        """Return a whole number that is a state of its own."""
        tensor = self.find(name)
        if tensor.kind != "I32" or tensor.end - tensor.begin != 4:
            raise SourceError(f"{self.file.label}: the state {name!r:.40} is {tensor.kind}: expected one I32")
        return int(self._integers(tensor)[0])

    def read_flag(self, name: str) -> bool:
        """Return a truth value that is a state of its own."""
        tensor = self.find(name)
        if tensor.kind != "BOOL" or tensor.end - tensor.begin != 1:
            raise SourceError(f"{self.file.label}: the state {name!r:.40} is {tensor.kind}: expected one BOOL")
        return bool(self.file.view(self.header.start + tensor.begin, 1)[0])

    def read_numbers(self, name: str, size: int) -> list[int]:
        """Return the whole numbers of a state that has one for each of `size` texts."""
        tensor = self.find(name)
        if tensor.kind != "I32" or tensor.shape != (size,):
            raise SourceError(
                f"{self.file.label}: the state {name!r:.40} is {tensor.kind} {list(tensor.shape)}: expected I32 "
                f"[{size}]"
            )
        return [int(number) for number in self._integers(tensor)]

    def _integers(self, tensor: Tensor) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.file.view(self.header.start + tensor.begin, tensor.end - tensor.begin), "<i4")

    def list_settings(self, number: int, sizes: tuple[int, ...]) -> list[str]:
        """Return the settings of a layer's cache in the metadata of older files, as texts.

        Parameters
        ----------
        number
            Of the layer.
        sizes
            How many settings the versions of its class have.

        Raises
        ------
        SourceError
            For another number of settings.
        """
        found = list(_listed(self.header.metadata, f"0.{number}"))
        if len(found) not in sizes:
            raise SourceError(
                f"{self.file.label}: layer {number}: its {self.classes[number]:.40} has {count(len(found), 'setting')}"
                f": expected {' or '.join(map(str, sizes))}"
            )
        return found

    def read_settings(self, number: int, sizes: tuple[int, ...]) -> list[int]:
        """Return the same as whole numbers; `SourceError` for what is none of up to nine digits."""
        return [self.read_whole(number, text) for text in self.list_settings(number, sizes)]

    def read_whole(self, number: int, text: str) -> int:
        """Return a setting of a layer as a whole number."""
        if not _WHOLE.fullmatch(text):
            raise SourceError(
                f"{self.file.label}: layer {number}: its {self.classes[number]:.40} has the setting {text!r:.40}: "
                "expected a whole number from 0 to 999,999,999"
            )
        return int(text)


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
