"""What is said of an input that kvmnn does not know: what it looks like, and the nearest thing that is known."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import PurePath

from ..files.zip_archive import first_member

HEAD_BYTES = 4096
"""Of a file, that tell what it looks like."""

_ARRAYS = "kvmnn reads K and V as .npy, .npz, .safetensors, MNN's own files and those of docs/other-engines.md"
_UNPACK = "unpack it first"
_MODEL = "eval, generate and dump-kv take it"
_MNN_MODEL = "--model takes its folder, beside a cache"
_GGUF_MODEL = "--model takes it, beside a cache of llama.cpp"
_NAME = "name it with the suffix {}"
_CHECKPOINT = ("a torch checkpoint", "kvmnn convert makes a weight file of a KV compressor's")
_SAFETENSORS = "kvmnn encode takes one of arrays, kvmnn convert a checkpoint"
_ZIP = b"PK\x03\x04"
_TORCH_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # a pickle of torch's magic number
_SIGNS: tuple[tuple[bytes, str, str], ...] = (
    (b"GGUF", "a GGUF model", _GGUF_MODEL),
    (b"\x93NUMPY", "a NumPy array", _NAME.format(".npy")),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _ARRAYS),
    (_TORCH_LEGACY, *_CHECKPOINT),
    (_ZIP, "a zip archive", _NAME.format(".npz") + " if it holds arrays"),
    (b"\x1f\x8b", "a gzip archive", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", _UNPACK),
    (b"\xfd7zXZ\x00", "an xz archive", _UNPACK),
    (b"BZh", "a bzip2 archive", _UNPACK),
    (b"\x7fELF", "a program", _ARRAYS),
)
_SUFFIXES = {
    ".onnx": ("an ONNX model", _MODEL),
    ".gguf": ("a GGUF model", _GGUF_MODEL),
    ".mnn": ("the graph of an MNN model", _MNN_MODEL),
    ".mtok": ("the tokenizer of an MNN model", _MNN_MODEL),
    ".weight": ("the weights of an MNN model", _MNN_MODEL),
}


def file_not_known(path: str, head: bytes, otherwise: str = "") -> str:
    """A sentence about a file that begins with `head` (`HEAD_BYTES`), without its name.

    It ends with `otherwise` where nothing can be said of what the file looks like.
    """
    found = ("it is empty", "") if not head else _looks_like(PurePath(path).suffix.lower(), head)
    if found is None:
        return f"not a file kvmnn knows{otherwise}"
    what, nearest = found
    return f"not a file kvmnn knows: {f'it looks like {what} ({nearest})' if nearest else what}"


def looks_known(path: str, head: bytes) -> bool:
    """Whether a file is empty or looks like something that is no words of K and V."""
    return not head or _looks_like(PurePath(path).suffix.lower(), head) is not None


def folder_not_known(path: str) -> str:
    """The same about a directory."""
    names = sorted(os.listdir(path))
    suffixes = {PurePath(name).suffix.lower() for name in names}
    if not names:
        found = "it is an empty folder (known are folders of frames, MNN's KV dumps and caches, and .npy files)"
    elif "manifest.json" in names:
        found = "it is a kvmnn bundle: decode it"
    elif "llm_config.json" in names or ".mnn" in suffixes:
        found = "it looks like the folder of an MNN model (--model takes it, beside a cache)"
    elif ".onnx" in suffixes:
        found = f"it looks like the folder of a model ({_MODEL})"
    elif readable := _with(names, (".frame", ".npz", ".safetensors")):
        found = f"it is a folder with {readable}: name the file itself"
    else:
        found = (
            "the folder has no manifest.json of frames, no meta_*.json file below it as MNN's KV dumps have, no "
            "<name>_<layer>.k of a prefix cache and no .npy file"
        )
    return f"not a file kvmnn knows: {found}"


def _with(names: Iterable[str], suffixes: tuple[str, ...]) -> str | None:
    return next((name for name in names if name.lower().endswith(suffixes)), None)


def _looks_like(suffix: str, head: bytes) -> tuple[str, str] | None:
    """What, and the nearest thing that is known."""
    if _is_torch_zip(suffix, head):
        return _CHECKPOINT
    for sign, what, nearest in _SIGNS:
        if head.startswith(sign):
            return what, nearest
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if head[:1] == b"\x08" and head[1:2] < b"\x20" and head[2:3] == b"\x12":  # ir_version, then producer_name
        return _SUFFIXES[".onnx"]
    if head[8:10] in (b'{"', b"{}") and int.from_bytes(head[:8], "little") < 1 << 40:
        named = suffix == ".safetensors"
        return "a safetensors file", _SAFETENSORS if named else _NAME.format(".safetensors")
    return _text(head)


def _is_torch_zip(suffix: str, head: bytes) -> bool:
    """Whether torch wrote a zip archive: its first member is the pickle, or the suffix says so."""
    return head.startswith(_ZIP) and (first_member(head).endswith(b"/data.pkl") or suffix in (".pth", ".pt"))


def _text(head: bytes) -> tuple[str, str] | None:
    cut = head.rfind(b" ") if len(head) == HEAD_BYTES else len(head)  # inside a character, perhaps
    try:
        text = head[:cut].decode()
    except UnicodeDecodeError:
        return None
    if not text or not all(letter.isprintable() or letter in "\n\r\t\f" for letter in text):
        return None
    if text.lstrip()[:1] in ("{", "["):
        return "JSON", "of JSON kvmnn reads manifests of frames, and plans"
    return "text", "eval, generate and dump-kv read it with --text"
