"""Fingerprints of models that a store directory remembers: hashing the weights takes longer than reading a prefix."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from .._util.named_tuple import NamedTuple
from ..errors import KvmnnError
from ..files.schema import JsonReader, parse_document, read_bounded
from ..files.temporary import TemporaryPath
from ..formats.mnn.model import compute_fingerprint, list_fingerprint_files
from .directory.files import SETTINGS_FILE, RecoveryFiles
from .encryption import NO_CIPHER, StoreCipher

FINGERPRINTS_FOLDER = "models"

_MIN_AGE_SECONDS = 5.0
"""Files that changed more recently are not remembered: a further change may leave their times as they are."""
_MAX_DOCUMENT_BYTES = 1 << 20
_WEIGHTS_KEY = "weights"


class FingerprintMethod(NamedTuple):
    """How the fingerprint of one kind of models is computed."""

    compute: Callable[[str], str]
    #: Lists the files that `compute` reads.
    list_files: Callable[[str], Sequence[str | os.PathLike[str]]]
    #: Finds the first of them, whose contents name the others, without reading it: that takes longer than to read a
    #: prefix. None where `list_files` is fast.
    find_graph: Callable[[str], str | os.PathLike[str]] | None = None


MNN_METHOD = FingerprintMethod(compute_fingerprint, list_fingerprint_files)
"""Of folders of MNN models and .gguf files."""


def read_or_compute_fingerprint(
    model: str,
    store: Path,
    *,
    write: bool = True,
    cipher: StoreCipher = NO_CIPHER,
    method: FingerprintMethod | None = None,
) -> str:
    """Return the fingerprint of a model, which the directory of the store remembers if `write` is set.

    It is computed again unless each file has the size, the times, the device and the number that it had then. Times of
    the last change of a file's status cannot be set by programs. Without `method` it is that of MNN models.
    """
    method = method or MNN_METHOD
    path = store / FINGERPRINTS_FOLDER / make_memo_name(model)
    with suppress(KvmnnError, OSError):
        data = cipher.unseal(read_bounded(path, _MAX_DOCUMENT_BYTES), path.name)
        root = parse_document(data, str(path))
        if root.get("files").value == _read_states(_list_known_files(method, model, root)):
            return root.get("fingerprint").read_str()
    try:
        files = method.list_files(model)
        states = _read_states(files)
    except OSError:
        return method.compute(model)
    fingerprint = method.compute(model)
    if not write or not _may_write(store, cipher):
        return fingerprint
    with suppress(OSError):
        newest_change = max(state[-1] for state in states) / 1e9
        is_settled = time.time() - newest_change > _MIN_AGE_SECONDS
        if is_settled and _read_states(method.list_files(model)) == states:
            folder = os.path.dirname(files[0])
            weights = [os.path.relpath(file, folder or ".") for file in files[1:]]
            document = json.dumps({"fingerprint": fingerprint, "files": states, _WEIGHTS_KEY: weights}).encode()
            _write_memo(path, cipher.seal(document, path.name))
    return fingerprint


def _may_write(store: Path, cipher: StoreCipher) -> bool:
    """Return whether the directory is that of a store with this key: without it an encrypted store is left alone."""
    if not (store / SETTINGS_FILE).is_file():
        return False
    with suppress(KvmnnError):
        return RecoveryFiles(store, cipher).read_key_check() in (None, cipher.key_check)
    return False


def _list_known_files(method: FingerprintMethod, model: str, memo: JsonReader) -> Sequence[str | os.PathLike[str]]:
    """List the files of a model. Those that a memo names are still the right ones if the graph has not changed."""
    if method.find_graph is None:
        return method.list_files(model)
    graph = method.find_graph(model)
    weights = [node.read_str() for node in memo.get(_WEIGHTS_KEY).read_list()]
    return [graph, *(os.path.join(os.path.dirname(graph), name) for name in weights)]


def make_memo_name(model: str) -> str:
    """Return the file name for a model's path, which it does not contain."""
    return hashlib.blake2b(os.path.realpath(model).encode(), digest_size=16).hexdigest() + ".json"


def _read_states(paths: Sequence[str | os.PathLike[str]]) -> list[list[int]]:
    """Return size, device, number, and times of the last change of contents and status of each file."""
    stats = map(os.stat, paths)
    return [[stat.st_size, stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns] for stat in stats]


def _write_memo(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    staged = TemporaryPath(path)
    try:
        staged.path.write_bytes(data)
        os.replace(staged.path, path)
    finally:
        staged.path.unlink(missing_ok=True)
        staged.release()
