"""Sessions in another engine: a document under the name, in hexadecimal digits."""

from __future__ import annotations

import hashlib
import json

from ...checks import repr_short
from ...errors import KvmnnError, ManifestError, SourceError
from ...files.json_document import parse_document
from ..catalog import validate_session_name
from ..space import Namespace, parse_namespace
from ..token_ids import Ids, to_token_ids
from .values import BackendUnavailableError, CircuitBreaker

_SESSIONS_FOLDER = "sessions"
_MAX_SESSION_BYTES = 256 << 20


def save_session(key_values: CircuitBreaker, name: str, namespace: Namespace, ids: Ids) -> None:
    """Keep the text of a session under its name."""
    document = {
        "space": namespace.to_json(),
        "ids": ids.tolist(),
        "checksum": _compute_session_checksum(name, namespace, ids),
    }
    key_values.put_many({_make_session_key(name): json.dumps(document).encode()})


def read_session(key_values: CircuitBreaker, name: str) -> tuple[Namespace, Ids]:
    """Space and text of a session; `KvmnnError` where there is none of this name."""
    label = f"{key_values.label}: session {repr_short(name)}"
    root = parse_document(_read_session_bytes(key_values, name), label, _MAX_SESSION_BYTES)
    try:
        namespace = parse_namespace(root.get("space").read_str(), label)
        ids = to_token_ids([node.read_int(0) for node in root.get("ids").read_list(min_len=1)])
        if root.value.get("checksum", "") not in (
            "",
            _compute_session_checksum(name, namespace, ids),
        ):  # earlier ones have none
            raise SourceError("it does not match its checksum")
    except KvmnnError as error:
        raise SourceError(f"{label} is damaged: {error}") from None
    return namespace, ids


def _read_session_bytes(key_values: CircuitBreaker, name: str) -> bytes:
    (data,) = key_values.get_many([_make_session_key(name)])
    if data is None:
        raise KvmnnError(f"{key_values.label}: there is no session {repr_short(name)}")
    return data


def list_damaged_sessions(key_values: CircuitBreaker) -> list[str]:
    """What is wrong with sessions."""
    problems = []
    for name in list_session_names(key_values):
        try:
            read_session(key_values, name)
        except BackendUnavailableError:
            raise
        except (SourceError, ManifestError) as error:
            problems.append(str(error))
    return problems


def list_session_names(key_values: CircuitBreaker) -> list[str]:
    """All names."""
    session_names = []
    for key in key_values.list_names(_SESSIONS_FOLDER):
        try:
            session_names.append(bytes.fromhex(key).decode())
        except ValueError:
            continue
    return sorted(session_names)


def delete_session(key_values: CircuitBreaker, name: str) -> None:
    """Forget a session, a damaged one, too; `KvmnnError` where there is none of this name."""
    _read_session_bytes(key_values, name)
    key_values.delete([_make_session_key(name)])


def _compute_session_checksum(name: str, namespace: Namespace, ids: Ids) -> str:
    data = json.dumps([name, namespace.to_json()]).encode() + ids.tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _make_session_key(name: str) -> str:
    validate_session_name(name)
    return f"{_SESSIONS_FOLDER}/{name.encode().hex()}"
