"""Messages about unknown inputs: what the content looks like, and the nearest supported format."""

from __future__ import annotations

import os
from pathlib import PurePath

from ..files.mapped_file import HEAD_BYTES
from ..files.zip_archive import read_first_member_name

UNKNOWN_FILE = "not a file kvmnn knows"
"""Message about a file of unknown content."""
_READABLE_FORMATS_ADVICE = (
    "kvmnn reads K and V as .npy, .npz, .safetensors, MNN's own files and those of docs/other-engines.md"
)
_UNPACK_ADVICE = "unpack it first"
_MODEL_ADVICE = "eval, generate and dump-kv take it"
_MNN_MODEL_ADVICE = "--model takes its folder, next to a cache"
_GGUF_MODEL_ADVICE = "--model takes it, next to a cache of llama.cpp"
_LAYER_STREAM_ADVICE = "name its folder, which has layers.json"
_READABLE_SUFFIXES = (".frame", ".npz", ".safetensors")
_RENAME_ADVICE = "name it with the suffix {}"
_CHECKPOINT_DESCRIPTION = ("a torch checkpoint", "kvmnn compressor convert makes a weight file of a KV compressor's")
_SAFETENSORS_ADVICE = "kvmnn encode takes one of arrays, kvmnn compressor convert a checkpoint"
_ZIP_MAGIC = b"PK\x03\x04"
_TORCH_LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # a pickle of torch's magic number
_DESCRIPTIONS_BY_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"GGUF", "a GGUF model", _GGUF_MODEL_ADVICE),
    (b"KVMP", "a profile of a model", "kvmnn profile inspect shows it"),
    (b"KVML", "the lossless stream of one layer", _LAYER_STREAM_ADVICE),
    (b"KVMX", "the lossy stream of one layer", _LAYER_STREAM_ADVICE),
    (b"KVMNNPX", "an export of a prefix store", "kvmnn store import STORE FILE reads it"),
    (b"KVMNNPE", "an encrypted file of a prefix store", "kvmnn store import STORE FILE --key-file KEY reads an export"),
    (b"\x93NUMPY", "a NumPy array", _RENAME_ADVICE.format(".npy")),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _READABLE_FORMATS_ADVICE),
    (_TORCH_LEGACY_MAGIC, *_CHECKPOINT_DESCRIPTION),
    (_ZIP_MAGIC, "a zip archive", _RENAME_ADVICE.format(".npz") + " if it holds arrays"),
    (b"\x1f\x8b", "a gzip archive", _UNPACK_ADVICE),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", _UNPACK_ADVICE),
    (b"\xfd7zXZ\x00", "an xz archive", _UNPACK_ADVICE),
    (b"BZh", "a bzip2 archive", _UNPACK_ADVICE),
    (b"\x7fELF", "a program", _READABLE_FORMATS_ADVICE),
)
_DESCRIPTION_BY_SUFFIX = {
    ".onnx": ("an ONNX model", _MODEL_ADVICE),
    ".gguf": ("a GGUF model", _GGUF_MODEL_ADVICE),
    ".mnn": ("the graph of an MNN model", _MNN_MODEL_ADVICE),
    ".mtok": ("the tokenizer of an MNN model", _MNN_MODEL_ADVICE),
    ".weight": ("the weights of an MNN model", _MNN_MODEL_ADVICE),
}


def explain_unknown_file(path: str, head: bytes, fallback_text: str = "") -> str:
    """Return a sentence about a file that begins with `head` (`HEAD_BYTES`), without its name.

    It ends with `fallback_text` if the content is unknown.
    """
    description = ("it is empty", "") if not head else _describe_content(PurePath(path).suffix.lower(), head)
    if description is None:
        return f"{UNKNOWN_FILE}{fallback_text}"
    kind_text, advice = description
    return f"{UNKNOWN_FILE}: {f'it looks like {kind_text} ({advice})' if advice else kind_text}"


def explain_unknown_folder(path: str) -> str:
    """Return a sentence about a directory of unknown content."""
    names = sorted(os.listdir(path))
    suffixes = {PurePath(name).suffix.lower() for name in names}
    if not names:
        explanation = "it is an empty folder (known are folders of frames, MNN's KV dumps and caches, and .npy files)"
    elif "manifest.json" in names:
        return "is a kvmnn bundle of frames: decode it, or encode it with --codec dense or mnn"
    elif "llm_config.json" in names or ".mnn" in suffixes:
        explanation = "it looks like the folder of an MNN model (--model takes it, next to a cache)"
    elif ".onnx" in suffixes:
        explanation = f"it looks like the folder of a model ({_MODEL_ADVICE})"
    elif readable_name := next((name for name in names if name.lower().endswith(_READABLE_SUFFIXES)), None):
        explanation = f"it is a folder with {readable_name}: name the file itself"
    else:
        explanation = (
            "the folder has no manifest.json of frames, no meta_*.json file below it as MNN's KV dumps have, no "
            "<name>_<layer>.k of a prefix cache and no .npy file"
        )
    return f"{UNKNOWN_FILE}: {explanation}"


def _describe_content(suffix: str, head: bytes) -> tuple[str, str] | None:
    """Return what the content looks like, and the nearest supported format; None if unknown."""
    if _is_torch_zip(suffix, head):
        return _CHECKPOINT_DESCRIPTION
    for magic, kind_text, advice in _DESCRIPTIONS_BY_MAGIC:
        if head.startswith(magic):
            return kind_text, advice
    if suffix in _DESCRIPTION_BY_SUFFIX:
        return _DESCRIPTION_BY_SUFFIX[suffix]
    if head[:1] == b"\x08" and head[1:2] < b"\x20" and head[2:3] == b"\x12":  # ir_version, then producer_name
        return _DESCRIPTION_BY_SUFFIX[".onnx"]
    if head[8:10] in (b'{"', b"{}") and int.from_bytes(head[:8], "little") < 1 << 40:
        named = suffix == ".safetensors"
        return "a safetensors file", _SAFETENSORS_ADVICE if named else _RENAME_ADVICE.format(".safetensors")
    return _describe_text(head)


def _is_torch_zip(suffix: str, head: bytes) -> bool:
    """Return whether torch wrote a zip archive: its first member is the pickle, or its suffix is torch's."""
    return head.startswith(_ZIP_MAGIC) and (
        read_first_member_name(head).endswith(b"/data.pkl") or suffix in (".pth", ".pt")
    )


def _describe_text(head: bytes) -> tuple[str, str] | None:
    text_end = head.rfind(b" ") if len(head) == HEAD_BYTES else len(head)  # inside a character, perhaps
    try:
        text = head[:text_end].decode()
    except UnicodeDecodeError:
        return None
    if not text or not all(letter.isprintable() or letter in "\n\r\t\f" for letter in text):
        return None
    if text.lstrip()[:1] in ("{", "["):
        return "JSON", "of JSON kvmnn reads manifests of frames, and plans"
    return "text", "eval, generate and dump-kv read it with --text"
