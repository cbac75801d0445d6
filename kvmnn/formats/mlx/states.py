"""The header of a prompt cache: which class each layer's cache is, and where its states lie."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..._util.text import pluralize
from ...errors import SourceError
from ...files.mapped_file import FileHead
from ..base import FileBytes
from ..safetensors import SafetensorsHeader, TensorEntry, read_header

_MAX_DETECT_HEADER_BYTES = 4 << 20
_CACHE_CLASS_REGEX = re.compile(rb'"[12]\.0"\s*:\s*"\w*Cache"|"[12]\.0"\s*:\s*"CacheList"')
_STATE_ENTRY_REGEX = re.compile(rb'"0\.0(\.\d+)*"\s*:\s*\{')
_NUMPY_TYPE_BY_KIND = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}
FLOAT_KINDS = tuple(_NUMPY_TYPE_BY_KIND)
_MAX_LAYERS = 1 << 16
_NATURAL_REGEX = re.compile(r"\d{1,9}", re.ASCII)


def has_cache_entries(head: FileHead) -> bool:
    """Return whether the metadata of a ``.safetensors`` file name the class of a cache."""
    header_bytes = int.from_bytes(head.data[:8], "little")
    if header_bytes > _MAX_DETECT_HEADER_BYTES:
        return False
    header = head.read(8 + header_bytes)[8:]
    return bool(_CACHE_CLASS_REGEX.search(header) and _STATE_ENTRY_REGEX.search(header))


class PromptCacheStates:
    """All that the header says.

    Parameters
    ----------
    file
        The whole file.
    """

    def __init__(self, file: FileBytes) -> None:
        self.file = file
        self.header: SafetensorsHeader = read_header(file)
        metadata = self.header.metadata
        # Newer files have the user's metadata under 0 and classes under 1; older ones settings, metadata, classes.
        self.is_new = metadata.get("1.0", "").endswith(("Cache", "CacheList"))
        prefix = "1" if self.is_new else "2"
        self.class_names = tuple(_iter_numbered_values(metadata, prefix))

    def find_tensor(self, name: str) -> TensorEntry:
        """Return a state by its name in the file; `SourceError` where there is none."""
        tensor_id = self.header.tensors.find_id(name)
        if tensor_id is None:
            raise SourceError(f"{self.file.label}: has no state {name!r:.40}")
        return self.header.tensors[tensor_id]

    def check_tensor(self, tensor: TensorEntry, kinds: tuple[str, ...], num_axes: int) -> None:
        """Raise `SourceError` unless a state has one of these types, as many axes, and elements."""
        if tensor.kind not in kinds or len(tensor.shape) != num_axes or 0 in tensor.shape:
            raise SourceError(
                f"{self.file.label}: the state {tensor.name!r:.40} is {tensor.kind} {list(tensor.shape)}: expected "
                f"{' or '.join(kinds)} [batch, kv_head, token, dimension]"
            )

    def read_scalar(self, name: str) -> int:
        """Return a whole number that is a state of its own."""
        tensor = self.find_tensor(name)
        if tensor.kind != "I32" or tensor.end - tensor.begin != 4:
            raise SourceError(f"{self.file.label}: the state {name!r:.40} is {tensor.kind}: expected one I32")
        return int(self._read_int32_values(tensor)[0])

    def read_flag(self, name: str) -> bool:
        """Return a truth value that is a state of its own."""
        tensor = self.find_tensor(name)
        if tensor.kind != "BOOL" or tensor.end - tensor.begin != 1:
            raise SourceError(f"{self.file.label}: the state {name!r:.40} is {tensor.kind}: expected one BOOL")
        return bool(self.file.view(self.header.data_start + tensor.begin, 1)[0])

    def read_int_list(self, name: str, num_texts: int) -> list[int]:
        """Return the whole numbers of a state that has one for each of `num_texts` texts."""
        tensor = self.find_tensor(name)
        if tensor.kind != "I32" or tensor.shape != (num_texts,):
            raise SourceError(
                f"{self.file.label}: the state {name!r:.40} is {tensor.kind} {list(tensor.shape)}: expected I32 "
                f"[{num_texts}]"
            )
        return [int(value) for value in self._read_int32_values(tensor)]

    def _read_int32_values(self, tensor: TensorEntry) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.file.view(self.header.data_start + tensor.begin, tensor.end - tensor.begin), "<i4")

    def list_settings(self, layer_number: int, setting_counts: tuple[int, ...]) -> list[str]:
        """Return the settings of a layer's cache in the metadata of older files, as texts."""
        settings = list(_iter_numbered_values(self.header.metadata, f"0.{layer_number}"))
        if len(settings) not in setting_counts:
            raise SourceError(
                f"{self.file.label}: layer {layer_number}: its {self.class_names[layer_number]:.40} has "
                f"{pluralize(len(settings), 'setting')}"
                f": expected {' or '.join(map(str, setting_counts))}"
            )
        return settings

    def read_int_settings(self, layer_number: int, setting_counts: tuple[int, ...]) -> list[int]:
        """Return the same as whole numbers; `SourceError` for what is none of up to nine digits."""
        return [self.parse_int_setting(layer_number, text) for text in self.list_settings(layer_number, setting_counts)]

    def parse_int_setting(self, layer_number: int, text: str) -> int:
        """Return a setting of a layer as a whole number."""
        if not _NATURAL_REGEX.fullmatch(text):
            raise SourceError(
                f"{self.file.label}: layer {layer_number}: its {self.class_names[layer_number]:.40} has the setting "
                f"{text!r:.40}: "
                "expected a whole number from 0 to 999,999,999"
            )
        return int(text)


def get_numpy_type(tensor: TensorEntry) -> str:
    """The numpy type of the words of a tensor of numbers."""
    return _NUMPY_TYPE_BY_KIND[tensor.kind]


def _iter_numbered_values(metadata: dict[str, str], prefix: str) -> Iterator[str]:
    """The texts under ``<prefix>.0``, ``<prefix>.1`` and so on."""
    for index in range(_MAX_LAYERS):
        text = metadata.get(f"{prefix}.{index}")
        if text is None:
            return
        yield text
