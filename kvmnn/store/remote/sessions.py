"""Sessions in another engine: a document under the name, in hexadecimal digits."""

from __future__ import annotations

import hashlib
import json

from ...checks import shown
from ...errors import KvmnnError, ManifestError, SourceError
from ...files.json_document import parse
from ..catalog import check_name
from ..space import Space, from_json
from ..token_ids import Ids, as_ids
from .values import OutageError, Patient

_FOLDER = "sessions"
_MAX_BYTES = 256 << 20


def note(values: Patient, name: str, space: Space, ids: Ids) -> None:
    """Keep the text of a session under its name."""
    document = {"space": space.to_json(), "ids": ids.tolist(), "checksum": _sum(name, space, ids)}
    values.put_many({_key(name): json.dumps(document).encode()})


def found(values: Patient, name: str) -> tuple[Space, Ids]:
    """Space and text of a session; `KvmnnError` where there is none of this name."""
    where = f"{values.label}: session {shown(name)}"
    root = parse(_data(values, name), where, _MAX_BYTES)
    try:
        space = from_json(root.at("space").text(), where)
        ids = as_ids([node.integer(0) for node in root.at("ids").items(least=1)])
        if root.value.get("checksum", "") not in ("", _sum(name, space, ids)):  # earlier ones have none
            raise SourceError("it does not match its checksum")
    except KvmnnError as error:
        raise SourceError(f"{where} is damaged: {error}") from None
    return space, ids


def _data(values: Patient, name: str) -> bytes:
    (data,) = values.get_many([_key(name)])
    if data is None:
        raise KvmnnError(f"{values.label}: there is no session {shown(name)}")
    return data


def damaged(values: Patient) -> list[str]:
    """What is wrong with sessions."""
    wrong = []
    for name in names(values):
        try:
            found(values, name)
        except OutageError:
            raise
        except (SourceError, ManifestError) as error:
            wrong.append(str(error))
    return wrong


def names(values: Patient) -> list[str]:
    """All names."""
    found_names = []
    for key in values.names_in(_FOLDER):
        try:
            found_names.append(bytes.fromhex(key).decode())
        except ValueError:
            continue
    return sorted(found_names)


def forget(values: Patient, name: str) -> None:
    """Forget a session, a damaged one, too; `KvmnnError` where there is none of this name."""
    _data(values, name)
    values.delete([_key(name)])


def _sum(name: str, space: Space, ids: Ids) -> str:
    data = json.dumps([name, space.to_json()]).encode() + ids.tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _key(name: str) -> str:
    check_name(name)
    return f"{_FOLDER}/{name.encode().hex()}"
