"""Strict JSON: `Record` dataclasses written and read field by field, and bounded documents with precise errors."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import NoneType
from typing import Any, ClassVar, Literal, Self, TypeVar, cast, get_args, get_origin, get_type_hints

from .._util.named_tuple import NamedTuple
from .._util.validation import format_fields
from ..errors import ManifestError, SourceError, build_read_error
from . import result_rows

_TYPE_DESCRIPTIONS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


_Getter = TypeVar("_Getter", bound=Callable[..., object])


class _ComputedKey(NamedTuple):
    key: str | None
    before: str | None
    after: str | None
    inline: bool
    omit: bool
    convert: Callable[[Any], object] | None


def json_key(
    key: str | None = None,
    *,
    before: str | None = None,
    after: str | None = None,
    inline: bool = False,
    omit: bool = False,
    convert: Callable[[Any], object] | None = None,
) -> Callable[[_Getter], _Getter]:
    """Make a property of a `Record` a key of its document; place it below ``@property``."""

    def mark(getter: _Getter) -> _Getter:
        vars(getter)["json_key"] = _ComputedKey(key, before, after, inline, omit, convert)
        return getter

    return mark


class Record:
    """Base of dataclasses with a JSON form: an object with a key for each field, in their order.

    A field's metadata may have ``key``, if its key is not its name; ``omit``, to omit the key for the default value (or
    None); ``convert``, a function that returns the JSON value; ``inline``, to insert the value's own keys into the
    document; and ``json``: False for a field outside the document. `json_key` adds properties. To change the order or
    the keys, `json_keys` lists all of them, separated by spaces: ``key`` of an attribute of that name,
    ``key=path.to.attribute``, and ``**path.to.attribute`` to insert its keys; metadata and `json_key` of these
    attributes apply as well.

    Readable field types: bool, int, float, str, Literal, records, tuples and string mappings of these, object (any JSON
    value), and each of them or None. A tuple is a list in JSON.
    """

    json_keys: ClassVar[str] = ""
    rows_path: ClassVar[str] = ""
    """The list that is the result's table: keys joined by dots; by default the first list of objects."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):  # or dataclass would write one of any length
            cls.__repr__ = format_fields  # type: ignore[method-assign]

    def to_dataframe(self, rows: str = "") -> Any:
        """Return the result's table as a ``pandas.DataFrame``, with nested keys joined by dots.

        A list of numbers is one column (``tokens_kept``), where CSV has one for each element (``tokens_kept.0``).

        Parameters
        ----------
        rows
            Another list of the document, such as ``"arrays"``; keys of a list within a list are joined by dots.

        Raises
        ------
        MissingDependencyError
            If pandas is not installed.
        KvmnnError
            If the document has no such list.
        """
        return result_rows.to_dataframe(result_rows.list_rows(self.to_dict(), rows or self.rows_path))

    def _repr_html_(self) -> str:
        """Return the result's tables as notebooks show them."""
        if hasattr(self, "to_tables"):
            return "".join(table.to_html() for table in self.to_tables())
        rows = result_rows.list_rows(self.to_dict(), self.rows_path)
        return result_rows.format_html(f"{type(self).__name__}: {str(self).partition(chr(10))[0][:200]}", rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        document: dict[str, Any] = {}
        for name, key, convert, inline, omitted in _get_keys(cast("Any", type(self))):
            value = attrgetter(name)(self) if "." in name else getattr(self, name)
            if value is omitted or (omitted is not None and omitted is not _NEVER and value == omitted):
                continue
            if convert is not None:
                value = convert(value)
            value = value if type(value) in _PLAIN_TYPES else _to_json_value(value)
            if inline:
                document |= value
            else:
                document[key] = value
        return document

    @classmethod
    def from_dict(cls, document: object, label: str = "document", *, complete: bool = False) -> Self:
        """Create a record from the result of `to_dict`; unknown keys are ignored.

        Raises `SourceError` for a document of other types, and for records that have more than their document.
        """
        if not isinstance(document, Mapping):
            raise _make_error(label, document, "an object")
        values, record_type = {}, cast("Any", cls)
        for field_info in _get_fields(record_type):
            if field_info.key in document:
                values[field_info.name] = _parse_value(
                    field_info.annotation, document[field_info.key], f"{label}.{field_info.key}", complete
                )
            elif field_info.is_required or (complete and not field_info.is_optional):
                raise SourceError(f"{label}.{field_info.key}: is missing")
        constructor: Callable[..., Self] = cls
        return constructor(**values)


class _KeyInfo(NamedTuple):
    name: str
    key: str
    convert: Callable[[Any], object] | None
    inline: bool
    omitted: object
    """Value for which the key is omitted, or `_NEVER`."""


_NEVER = object()
_PLAIN_TYPES = frozenset({int, float, str, bool, NoneType})


@cache
def _get_keys(record_type: Any) -> tuple[_KeyInfo, ...]:
    own_fields = {field.name: field for field in fields(record_type)} if is_dataclass(record_type) else {}
    keys: list[_KeyInfo] = []
    for base in reversed(record_type.__mro__):
        for name in inspect.get_annotations(base):
            field = own_fields.pop(name, None)
            if field is not None and field.metadata.get("json", True):
                omitted = _NEVER
                if field.metadata.get("omit", False):
                    omitted = None if field.default is MISSING else field.default
                    omitted = omitted if field.default_factory is MISSING else field.default_factory()
                get = field.metadata.get
                keys.append(_KeyInfo(name, get("key", name), get("convert"), get("inline", False), omitted))
        for name, member in vars(base).items():
            computed = getattr(getattr(member, "fget", None), "json_key", None)
            if computed is not None:
                omitted = None if computed.omit else _NEVER
                key = _KeyInfo(name, computed.key or name, computed.convert, computed.inline, omitted)
                names = [entry.name for entry in keys]
                if name in names:  # a property of a base class, defined again
                    keys[names.index(name)] = key
                else:
                    index = len(names) if computed.before is None else names.index(computed.before)
                    keys.insert(index if computed.after is None else names.index(computed.after) + 1, key)
    return _select_keys(record_type.json_keys.split(), keys) if record_type.json_keys else tuple(keys)


def _select_keys(specs: list[str], keys: list[_KeyInfo]) -> tuple[_KeyInfo, ...]:
    """Return the keys that `Record.json_keys` lists, with the settings of their attributes."""
    key_by_name = {entry.name: entry for entry in keys}
    selected = []
    for spec in specs:
        key, _, name = spec.removeprefix("**").rpartition("=")
        entry = key_by_name.get(name, _KeyInfo(name, name, None, False, _NEVER))
        selected.append(entry._replace(key=key or entry.key, inline=entry.inline or spec.startswith("**")))
    return tuple(selected)


class _FieldInfo(NamedTuple):
    name: str
    key: str
    annotation: Any
    is_required: bool
    is_optional: bool
    """Whether `Record.to_dict` may omit its key."""


@cache
def _get_fields(record_type: Any) -> tuple[_FieldInfo, ...]:
    hints = get_type_hints(record_type)
    return tuple(
        _FieldInfo(
            field.name,
            field.metadata.get("key", field.name),
            hints[field.name],
            field.default is MISSING and field.default_factory is MISSING,
            field.metadata.get("omit", False),
        )
        for field in fields(record_type)
        if field.init and field.metadata.get("json", True)
    )


def finite_or_none(number: float | None) -> float | None:
    """Return None for infinity and NaN, which JSON lacks; for `convert`."""
    return number if number is not None and math.isfinite(number) else None


def _to_json_value(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [entry if type(entry) in _PLAIN_TYPES else _to_json_value(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _to_json_value(entry) for key, entry in value.items()}
    return value


def _parse_value(annotation: Any, value: Any, label: str, complete: bool) -> Any:
    arguments, origin = get_args(annotation), get_origin(annotation)
    if NoneType in arguments:
        if value is None:
            return None
        return _parse_value(next(a for a in arguments if a is not NoneType), value, label, complete)
    if annotation is object or annotation is Any:
        return value
    if origin is Literal:
        if value not in arguments:
            raise _make_error(label, value, " or ".join(map(repr, arguments)))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _make_error(label, value, "a list")
        if arguments[0] is int and all(type(entry) is int for entry in value):  # long ones are
            return tuple(value)
        return tuple(
            [_parse_value(arguments[0], entry, f"{label}[{index}]", complete) for index, entry in enumerate(value)]
        )
    if origin is not None:
        if not isinstance(value, Mapping):
            raise _make_error(label, value, "an object")
        return {str(key): _parse_value(arguments[1], entry, f"{label}.{key}", complete) for key, entry in value.items()}
    if issubclass(annotation, Record):
        return annotation.from_dict(value, label, complete=complete)
    if type(value) is not annotation and not (annotation is float and type(value) is int):
        raise _make_error(label, value, _TYPE_DESCRIPTIONS[annotation])
    return value


def _make_error(label: str, value: object, expectation: str) -> SourceError:
    value_text = repr(value)
    return SourceError(
        f"{label}: found {value_text if len(value_text) <= 80 else value_text[:77] + '...'}, expected {expectation}"
    )


MAX_DOCUMENT_BYTES = 16 << 20
"""Default size limit of a document."""

_MAX_INTEGER = 2**63 - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


def loads_strict(text: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON without Python's NaN, Infinity and -Infinity, which RFC 8259 forbids; `ValueError` for these."""
    return json.loads(text, object_pairs_hook=object_pairs_hook, parse_constant=_reject_constant)


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as an object; `ValueError` if a key occurs twice. For `loads_strict`."""
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("an object has the same key twice")
    return document


class JsonReader:
    """A JSON value with its location: `label` names the document, `path` the location in it.

    Every method raises `ManifestError` if the value does not have the expected type or range.
    """

    def __init__(self, value: Any, label: str, path: str) -> None:
        self.value = value
        self.label = label
        self.path = path

    def error(self, expectation: str) -> ManifestError:
        """Return an error that states the value and `expectation`."""
        value_text = json.dumps(self.value)
        value_text = value_text if len(value_text) <= 80 else value_text[:77] + "..."
        return ManifestError(f"{self.label}: {self.path or 'document'}: found {value_text}, expected {expectation}")

    def get(self, key: str) -> JsonReader:
        """Return the value under `key` of an object."""
        if not isinstance(self.value, dict):
            raise self.error("an object")
        path = f"{self.path}.{key}" if self.path else key
        if key not in self.value:
            raise ManifestError(f"{self.label}: {path}: is missing")
        return JsonReader(self.value[key], self.label, path)

    def read_list(self, min_len: int = 0, max_len: int | None = None) -> list[JsonReader]:
        """Return the entries of a list of at least `min_len` and at most `max_len` entries."""
        if not isinstance(self.value, list):
            raise self.error("a list")
        if len(self.value) < min_len or (max_len is not None and len(self.value) > max_len):
            raise ManifestError(f"{self.label}: {self.path}: has {len(self.value)} entries")
        return [JsonReader(value, self.label, f"{self.path}[{i}]") for i, value in enumerate(self.value)]

    def read_int(self, min_value: int) -> int:
        """Return an integer of at least `min_value` that fits 64 bits."""
        if type(self.value) is not int or not min_value <= self.value <= _MAX_INTEGER:
            raise self.error(f"an integer of at least {min_value}")
        return self.value

    def check_version(self, latest: int) -> None:
        """Check that the value is a version from 1 to `latest`."""
        if self.read_int(1) > latest:
            raise self.error(f"at most {latest}: a later kvmnn wrote this")

    def check_schema(self, schema: str, version: int) -> None:
        """Check that an object declares `schema` in `version`."""
        if self.get("schema").read_str() != schema:
            raise self.get("schema").error(repr(schema))
        if self.get("schema_version").read_int(1) != version:
            raise self.get("schema_version").error(f"{version}, the version this kvmnn reads")

    def read_any_int(self) -> int:
        """Return an integer of any size."""
        if type(self.value) is not int:
            raise self.error("an integer")
        return self.value

    def read_bool(self) -> bool:
        """Return a boolean."""
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    def read_str(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.error("a string")
        return self.value

    def read_str_list(self) -> tuple[str, ...]:
        """Return a list of strings."""
        return tuple(item.read_str() for item in self.read_list())

    def read_str_map(self) -> dict[str, str]:
        """Return an object whose values are strings."""
        if not isinstance(self.value, dict):
            raise self.error("an object of strings")
        return {key: self.get(key).read_str() for key in self.value}

    def read_sha256(self) -> str:
        """Return a SHA-256 in lower-case hexadecimal digits."""
        if not isinstance(self.value, str) or not _SHA256.fullmatch(self.value):
            raise self.error("64 hexadecimal digits")
        return self.value

    def read_file_name(self) -> str:
        """Return a normalised relative path that stays within the manifest's directory."""
        name = self.read_str()
        windows = PureWindowsPath(name)
        path = PurePosixPath(name)
        if not path.parts or windows.anchor or path.parts[0] == "/" or ".." in windows.parts or "\0" in name:
            raise self.error("a relative file name without '..'")
        if path.as_posix() != name:
            raise self.error(f"the name of a file, {path.as_posix()!r}")
        return name


def parse_document(text: str | bytes, label: str, max_bytes: int | None = None) -> JsonReader:
    """Parse a JSON document without duplicate keys; error messages begin with `label`."""
    limit = MAX_DOCUMENT_BYTES if max_bytes is None else max_bytes
    if len(text) > limit:
        raise ManifestError(f"{label}: is larger than {limit} bytes")
    try:
        return JsonReader(loads_strict(text, object_pairs_hook=reject_duplicate_keys), label, "")
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{label}: is not valid JSON: {str(error)[:200]}") from None


def read_bounded(path: Path, max_bytes: int | None = None) -> bytes:
    """Return the bytes of a file, up to a limit."""
    limit = MAX_DOCUMENT_BYTES if max_bytes is None else max_bytes
    try:
        with open(path, "rb", opener=_open_nonblocking) as stream:
            data = stream.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise build_read_error(path, error) from error
    if len(data) > limit:
        raise SourceError(f"{path}: holds more than {limit:,} bytes")
    return data


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without blocking: a named pipe without a writer reads as empty instead of waiting forever."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if hasattr(os, "set_blocking"):
        os.set_blocking(handle, True)
    return handle


def read_object(path: Path, max_bytes: int | None = None, *, allow_nan: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file of at most `max_bytes` bytes; `allow_nan` as in `parse_object`."""
    return parse_object(read_bounded(path, max_bytes), str(path), allow_nan=allow_nan)


def parse_object(text: bytes, label: str, *, allow_nan: bool = False) -> dict[str, Any]:
    """Parse a JSON object; `SourceError`, whose message begins with `label`, for anything else.

    With `allow_nan` it may contain NaN and Infinity: Python libraries write them into settings of models.
    """
    try:
        value = json.loads(text) if allow_nan else loads_strict(text)
    except UnicodeDecodeError:
        raise SourceError(f"{label}: is not JSON: it is not even text") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{label}: is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{label}: holds no JSON object: a {type(value).__name__} is not a JSON object")
    return value


def read_object_or_empty(path: Path) -> dict[str, Any]:
    """Read settings of a model or tokenizer with `read_object`, NaN allowed; empty if there is no such file."""
    try:
        return read_object(path, allow_nan=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def iter_values(document: object) -> Iterator[object]:
    """Yield every key, string, number and constant in a document, at any depth."""
    stack = [document]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            stack += value
        else:
            yield value
