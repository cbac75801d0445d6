"""The libzstd in use, and whether its bytes are those that MNN would store.

MNN compresses with the one-shot ``ZSTD_compress`` at level 3 and accepts what the one-shot ``ZSTD_decompress`` accepts.
There are three bindings to these functions. The first that works is used; ``KVMNN_ZSTD`` (``bundled``, ``system`` or
``python``) forces one:

bundled
    The libzstd inside the ``zstandard`` package's cffi module, opened as a plain shared library (Linux and macOS).
system
    ``libzstd.so.1``, ``libzstd.so`` or ``libzstd.dylib``, which the engine itself searches for.
python
    ``zstandard``'s Python API, adapted to accept exactly what ``ZSTD_decompress`` accepts.

A library outside 1.5.2-1.5.6 is used only if there is no other: its frames decode everywhere, but their bytes differ
from those of MNN's vectors.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from ..errors import KvmnnError
from . import _zstdlib

# The zstandard package has libzstd twice: inside its C backend, and with public symbols inside its cffi backend, which
# the wheels for Linux and macOS ship. The latter is opened as a plain shared library, and the function addresses go to
# Cython: no GIL, no Python objects per call, contexts used again, and the one-shot semantics of ZSTD_decompress, which
# python-zstandard's own calls do not have. All three ways pass the same vectors. Nobody has run this on macOS.
#
# zstandard is pinned below 0.24, except for Python 3.14. From 0.24 on it brings libzstd 1.5.7, whose frames MNN decodes
# but whose bytes are not MNN's. 0.23 has wheels for CPython up to 3.13, and its source needs an older cffi that has
# none for 3.14. Under 3.14 pip therefore takes the newest zstandard, and kvmnn prefers a system libzstd 1.5.2 to 1.5.6.
# Without one, frames are lossless but not byte for byte MNN's: `kvmnn --version` says so, and manifests have
# `zstd_byte_exact` false.

DEFAULT_LEVEL = 3
"""The compression level MNN uses."""

BYTE_EXACT_VERSIONS = ((1, 5, 2), (1, 5, 6))
"""First and last libzstd version with equal bytes at level 3."""

Version = tuple[int, int, int]

_binding: str
_version: Version
_library: ctypes.CDLL | None = None


def get_version() -> str:
    """Return the libzstd version in use, such as ``"1.5.6"``."""
    return ".".join(map(str, _version))


def get_binding() -> str:
    """Return the binding in use: ``"bundled"``, ``"system"`` or ``"python"``."""
    return _binding


def is_byte_exact() -> bool:
    """Return whether frames from this libzstd are byte for byte those that MNN stores."""
    return _is_byte_exact_version(_version)


def _is_byte_exact_version(number: Version) -> bool:
    return BYTE_EXACT_VERSIONS[0] <= number <= BYTE_EXACT_VERSIONS[1]


# -- bindings --------------------------------------------------------------------------------------------------------


def _bind(forced_binding: str | None = None) -> None:
    """Bind `_zstdlib` to the first library that works, byte-exact ones first."""
    global _binding, _version, _library
    openers: dict[str, Callable[[], tuple[ctypes.CDLL, Version] | None]] = {
        "bundled": _open_bundled,
        "system": _open_system,
    }
    if forced_binding not in (None, "", "python", *openers):
        raise KvmnnError(f"KVMNN_ZSTD={forced_binding!r}: expected bundled, system or python")
    candidates: list[tuple[str, ctypes.CDLL, Version]] = []
    for name, opener in openers.items():
        if forced_binding in (None, "", name):
            library_info = opener()
            if library_info:
                candidates.append((name, *library_info))
    candidates.sort(key=lambda entry: not _is_byte_exact_version(entry[2]))
    if candidates:
        _binding, _library, _version = candidates[0]
        _zstdlib.use_library([_get_address(_library, name) for name in _zstdlib.FUNCTION_NAMES])
        return
    if forced_binding in openers:
        raise KvmnnError(f"KVMNN_ZSTD={forced_binding}: no such libzstd found")
    import zstandard

    _binding, _version, _library = "python", zstandard.ZSTD_VERSION, None
    _zstdlib.use_callables(_python_compress, _python_decompress)


def _open_bundled() -> tuple[ctypes.CDLL, Version] | None:
    spec = importlib.util.find_spec("zstandard")
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("_cffi.*")):
            if library := _load(str(path)):
                return library
    return None


def _open_system() -> tuple[ctypes.CDLL, Version] | None:
    for name in ("libzstd.so.1", "libzstd.so", "libzstd.dylib"):
        if library := _load(name):
            return library
    return None


def _load(path: str) -> tuple[ctypes.CDLL, Version] | None:
    try:
        library = ctypes.CDLL(path)
        version_number = library.ZSTD_versionNumber()
        for name in _zstdlib.FUNCTION_NAMES:
            _get_address(library, name)
    except (OSError, AttributeError):
        return None
    return library, (version_number // 10000, version_number // 100 % 100, version_number % 100)


def _get_address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


# -- zstandard's Python API --------------------------------------------------------------------------------------------

_MAGIC = 0xFD2FB528
_MAX_WINDOW = 1 << 31


def _python_compress(level: int, has_content_size: bool, data: memoryview) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=level, write_content_size=has_content_size, write_checksum=False).compress(
        data
    )


def _python_decompress(payload: memoryview, capacity: int) -> bytes:
    """Decompress as ``ZSTD_decompress`` does: all frames of the payload, skippable ones ignored, and no other bytes."""
    # zstandard decodes in one shot only frames with a content size, and its streaming limits window and block sizes
    # more strictly. So a single frame without a content size gets the remaining size; only if several frames have none
    # and exceed these limits, they are rejected and libzstd would accept them.
    import zstandard

    frames = []
    offset = 0
    while offset < len(payload):
        end = _zstdlib.find_frame_extent(payload, offset)
        if int.from_bytes(payload[offset : offset + 4], "little") == _MAGIC:
            frames.append(bytes(payload[offset:end]))
        offset = end
    sizes = [zstandard.frame_content_size(frame) for frame in frames]
    remaining_bytes = capacity - sum(size for size in sizes if size > 0)
    if remaining_bytes < 0:
        raise ValueError(f"zstd frames hold {capacity - remaining_bytes} bytes, {capacity} fit")
    if sizes.count(-1) == 1:
        unsized_index = sizes.index(-1)
        frames[unsized_index], sizes[unsized_index] = (
            _insert_content_size(frames[unsized_index], remaining_bytes),
            remaining_bytes,
        )
    parts = []
    for frame, size in zip(frames, sizes, strict=True):
        parts.append(_decompress_frame(frame, size, capacity))
        capacity -= len(parts[-1])
    return b"".join(parts)


def _insert_content_size(frame: bytes, size: int) -> bytes:
    """Return a frame without a content size with one of eight bytes."""
    descriptor = frame[4]
    end = 6 + (0, 1, 2, 4)[descriptor & 3]  # magic, descriptor, window descriptor, dictionary id
    return frame[:4] + bytes([descriptor | 0xC0]) + frame[5:end] + size.to_bytes(8, "little") + frame[end:]


def _decompress_frame(frame: bytes, content_size: int, capacity: int) -> bytes:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    if content_size > 0 or (content_size < 0 and capacity):
        return decompressor.decompress(frame, max_output_size=capacity)
    stream = decompressor.decompressobj()  # decompress() would not look into a frame that claims to be empty
    if stream.decompress(frame) or not stream.eof:
        raise ValueError("zstd frame is not empty as it should be")
    return b""


_bind(os.environ.get("KVMNN_ZSTD"))
