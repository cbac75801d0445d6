"""JSON Schemas (2020-12) of the documents that ``--json`` prints, derived from the classes of the results.

    python tools/docs/json_schemas.py            # writes docs/schemas/ and its list, docs/json.md

`DOCUMENTS` names the classes of each verb. Their keys, types and descriptions come from the code (`Record`); classes
that compute their documents, and functions that build parts of them, are described in `json_schema_overrides`. The
published schemas permit further keys, as a later version may add some; tests permit none but where a schema does.
"""

from __future__ import annotations

import argparse
import collections.abc
import inspect
import json
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

from json_schema_overrides import DOCUMENTS, EXTRA_KEYS, OVERRIDES  # noqa: E402

from kvmnn.files.schema import Record, _get_keys  # noqa: E402

SCHEMAS = ROOT / "docs" / "schemas"
PAGE = ROOT / "docs" / "json.md"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]
_PLAIN_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}
_COMMANDS_WITH_COMMAND_LINE = ("bench", "eval", "gate run", "measure", "mnn replay")


class UnknownTypeError(TypeError):
    """A type without a JSON form that is known here."""


class SchemaBuilder:
    """Builds the schemas of types, and collects those of classes as definitions."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}
        self._class_by_name: dict[str, object] = {}

    def build(self, annotation: Any, where: str) -> Schema:
        """Build the schema of a type; `where` is for messages."""
        if isinstance(annotation, dict):
            return annotation
        if inspect.isclass(annotation) and annotation in _PLAIN_TYPES:
            return {"type": _PLAIN_TYPES[annotation]}
        if annotation in (object, Any, typing.Any):
            return {}
        if isinstance(annotation, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
            return self.build(annotation.__value__, where)
        if hasattr(annotation, "__supertype__"):
            return self.build(annotation.__supertype__, where)
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is ClassVar:
            return self.build(arguments[0], where)
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin in (typing.Union, types.UnionType):
            return _unite([self.build(argument, where) for argument in arguments])
        if origin is tuple:
            return self._build_tuple(arguments, where)
        if origin in (list, collections.abc.Sequence, collections.abc.Iterable, frozenset, set):
            return {"type": "array", "items": self.build(arguments[0], where)}
        if origin in (dict, Mapping, collections.abc.Mapping):
            values = self.build(arguments[1], where)
            return {"type": "object", **({"additionalProperties": values} if values else {})}
        if annotation in (dict, tuple, list):
            return {"type": "object" if annotation is dict else "array"}
        if inspect.isclass(annotation):
            return self._build_class(annotation, where)
        raise UnknownTypeError(f"{where}: {annotation!r} has no known JSON form")

    def _build_tuple(self, arguments: tuple[Any, ...], where: str) -> Schema:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return {"type": "array", "items": self.build(arguments[0], where)}
        items = [self.build(argument, where) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}

    def _build_class(self, record_type: Any, where: str) -> Schema:
        qualified_name = f"{record_type.__module__}.{record_type.__qualname__}"
        if qualified_name not in OVERRIDES and not issubclass(record_type, Record):
            if issubclass(record_type, str | int | float):  # such as names of parts
                if issubclass(record_type, Enum):
                    return {"enum": [member.value for member in record_type]}
                return {"type": _PLAIN_TYPES[next(base for base in _PLAIN_TYPES if issubclass(record_type, base))]}
            if issubclass(record_type, tuple) and hasattr(record_type, "_fields"):
                hints = get_hints(record_type)
                return self._build_tuple(tuple(hints[name] for name in record_type._fields), where)
            raise UnknownTypeError(f"{where}: {qualified_name} is no Record, and json_schema_overrides lacks it")
        name = record_type.__name__.lstrip("_")
        while self._class_by_name.setdefault(name, record_type) is not record_type:
            name += "_"
        if name not in self.definitions:
            self.definitions[name] = {}
            self.definitions[name] = self._build_record(record_type, qualified_name)
        return {"$ref": f"#/$defs/{name}"}

    def _build_record(self, record_type: Any, qualified_name: str) -> Schema:
        override = OVERRIDES.get(qualified_name)
        if isinstance(override, dict):
            return self._resolve(override, qualified_name)
        schema = self._build_keys(record_type, qualified_name)
        if override is not None:
            override(schema)
        summary = inspect.getdoc(record_type) or ""
        return {"description": _to_plain_text(summary.split("\n\n")[0]), **schema}

    def _resolve(self, schema: Any, where: str) -> Any:
        """Replace ``{"$class": "module.Class"}`` in a schema that was written by hand by references."""
        if isinstance(schema, list):
            return [self._resolve(entry, where) for entry in schema]
        if not isinstance(schema, dict):
            return schema
        if "$class" in schema:
            return self.build(import_name(schema["$class"]), where)
        return {key: self._resolve(value, where) for key, value in schema.items()}

    def _build_keys(self, record_type: Any, qualified_name: str) -> Schema:
        properties: dict[str, Schema] = {}
        required: list[str] = []
        is_open = False
        for entry in _get_keys(record_type):
            where = f"{qualified_name}.{entry.name}"
            override = OVERRIDES.get(where)
            annotation, description = (override, "") if override else resolve_attribute(record_type, entry.name)
            if override is not None:
                annotation = override
            elif entry.convert is not None:
                converter = f"{entry.convert.__module__}.{entry.convert.__qualname__}"
                if converter in OVERRIDES:
                    annotation = OVERRIDES[converter]
                elif entry.convert in _PLAIN_TYPES:
                    annotation = entry.convert
                else:
                    annotation = get_hints(entry.convert).get("return", object)
            schema = self._resolve(self.build(annotation, where), where)
            if entry.inline:
                target, may_lack = self._open_inline(schema)
                properties |= target.get("properties", {})
                is_open |= "properties" not in target
                required += [] if may_lack else target.get("required", [])
                continue
            if description and "$ref" not in schema:
                schema = {"description": description, **schema}
            properties[entry.key] = schema
            # a value that is omitted is one of several, and None never is one of them
            if entry.omitted is _get_never():
                required.append(entry.key)
        schema = {"type": "object", "properties": properties, "required": list(dict.fromkeys(required))}
        return {**schema, "additionalProperties": True} if is_open else schema

    def _open_inline(self, schema: Schema) -> tuple[Schema, bool]:
        """Return the schema of an object whose keys are inserted, and whether there may be none."""
        for key in ("anyOf",):
            if key in schema:
                options = [option for option in schema[key] if option != {"type": "null"}]
                targets = [self._open_inline(option)[0] for option in options]
                merged: Schema = {"properties": {}}
                for target in targets:
                    merged["properties"] |= target.get("properties", {})
                shared = set.intersection(*(set(target.get("required", [])) for target in targets))
                merged["required"] = sorted(shared)
                return merged, len(options) != len(schema[key])
        if "$ref" in schema:
            return self.definitions[schema["$ref"].rpartition("/")[2]], False
        return schema, False


def _get_never() -> object:
    from kvmnn.files import schema

    return schema._NEVER


def _unite(schemas: list[Schema]) -> Schema:
    unique = [schema for index, schema in enumerate(schemas) if schema not in schemas[:index]]
    if {} in unique:
        return {}
    if len(unique) == 1:
        return unique[0]
    if all(set(schema) == {"type"} for schema in unique):
        names = [name for schema in unique for name in _as_list(schema["type"])]
        return {"type": list(dict.fromkeys(names))}
    if all(set(schema) == {"enum"} or schema == {"type": "null"} for schema in unique):
        return {"enum": [value for schema in unique for value in schema.get("enum", [None])]}
    return {"anyOf": unique}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@cache
def list_all_names() -> dict[str, Any]:
    """List the public names of all modules, for annotations whose names are imported for type checkers alone."""
    import kvmnn

    names: dict[str, Any] = {}
    for module in pkgutil.walk_packages(kvmnn.__path__, "kvmnn."):
        if module.name.endswith("__main__") or "integrations" in module.name:
            continue
        for name, value in vars(import_module(module.name)).items():
            if not name.startswith("__"):
                names.setdefault(name, value)
    return names


def get_hints(annotated: Any) -> dict[str, Any]:
    """Return the resolved annotations of a class or function."""
    try:
        return get_type_hints(annotated)
    except NameError:
        return get_type_hints(annotated, localns=list_all_names())


def resolve_attribute(record_type: Any, path: str) -> tuple[Any, str]:
    """Return the type of an attribute, such as ``manifest.effort``, and its description."""
    owner: Any = record_type
    description, has_none = "", False
    annotation: Any = record_type
    for name in path.split("."):
        options = get_args(owner) if get_origin(owner) in (typing.Union, types.UnionType) else (owner,)
        resolved = [_resolve_name(option, name) for option in options if option is not types.NoneType]
        has_none |= types.NoneType in options
        annotations, description = [entry[0] for entry in resolved], resolved[0][1]
        if len(annotations) > 1 and any(isinstance(entry, dict) for entry in annotations):
            annotation = {"enum": [entry["const"] for entry in annotations]}
        else:
            annotation = annotations[0] if len(annotations) == 1 else typing.Union[tuple(annotations)]  # noqa: UP007
        owner = annotation
    return annotation | None if has_none and not isinstance(annotation, dict) else annotation, description


def _resolve_name(owner: Any, name: str) -> tuple[Any, str]:
    member = inspect.getattr_static(owner, name, None)
    if isinstance(member, property) or hasattr(member, "func"):
        function = member.fget if isinstance(member, property) else member.func
        summary = (inspect.getdoc(function) or "").split("\n\n")[0]
        text = re.sub(r"^Return (whether )?", lambda match: "Whether " if match[1] else "", _to_plain_text(summary))
        return get_hints(function).get("return", object), text[:1].upper() + text[1:]
    hints = get_hints(owner)
    if name in hints and get_origin(hints[name]) is not ClassVar and hints[name] is not ClassVar:
        return hints[name], describe_field(owner, name)
    value = getattr(owner, name)  # a constant of the class
    return ({"const": value} if type(value) in _PLAIN_TYPES else type(value)), ""


@cache
def _read_descriptions(owner: Any) -> dict[str, str]:
    """Return what the source says of fields: ``#:`` lines above them, or a string below."""
    descriptions: dict[str, str] = {}
    try:
        lines = inspect.getsource(owner).splitlines()
    except (OSError, TypeError):
        return {}
    comment: list[str] = []
    for index, line in enumerate(lines):
        text = line.strip()
        if text.startswith("#:"):
            comment.append(text[2:].strip())
            continue
        if match := re.match(r"    (\w+): ", line):
            following = lines[index + 1].strip() if index + 1 < len(lines) else ""
            if comment:
                descriptions[match[1]] = " ".join(comment)
            elif following.startswith('"""') and following.count('"""') == 2:
                descriptions[match[1]] = following.strip('"')
            comment = []
        elif text:
            comment = []
    return descriptions


def describe_field(owner: Any, name: str) -> str:
    """Return the description of a field of a class or its bases; empty if there is none."""
    for base in getattr(owner, "__mro__", ()):
        if name in _read_descriptions(base):
            return _to_plain_text(_read_descriptions(base)[name])
    return ""


def _to_plain_text(text: str) -> str:
    return re.sub(r"`+~?([^`]*)`+", r"\1", " ".join(text.split()))


def import_name(qualified_name: str) -> Any:
    """Import ``module.Class``."""
    module, _, name = qualified_name.rpartition(".")
    return getattr(import_module(module), name)


def build_schema(verb: str) -> Schema:
    """Build the schema of the document of a verb, such as ``"mnn pack"``."""
    builder = SchemaBuilder()
    word, class_names, form = DOCUMENTS[verb]
    options = [builder.build(import_name(name.split()[0]), verb) for name in class_names]
    verb_key = {"description": "The verb that printed the document.", "const": word}
    if form == "inputs":
        properties = {"verb": verb_key, "inputs": {"type": "array", "items": _unite(options)}}
        body: Schema = {"type": "object", "properties": properties, "required": ["verb", "inputs"]}
    else:
        head: Schema = {"verb": verb_key}
        if verb in _COMMANDS_WITH_COMMAND_LINE:
            head["command"] = {"description": "The command line that printed the document.", "type": "string"}
        bodies = []
        for option, name in zip(options, class_names, strict=True):
            own_head = {**head, "verb": {**verb_key, "const": name.split()[1]}} if " " in name else head
            bodies.append(_insert_head(builder, option, own_head, EXTRA_KEYS.get(verb, {})))
        bodies += [build_store_failure(word)] if form == "store" else []
        body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
    definitions = _collect_used(body, builder.definitions)
    return {
        "$schema": DIALECT,
        "title": f"kvmnn {verb} --json",
        **body,
        **({"$defs": definitions} if definitions else {}),
    }


def build_store_failure(word: str) -> Schema:
    """Return the schema of what a failed verb of a store prints: what was found until then, and the error."""
    properties = {"verb": {"const": word}, "error": {"type": "string"}}
    return {
        "description": "A failure, after what was learned before it.",
        "type": "object",
        "properties": properties,
        "required": ["verb", "error"],
        "additionalProperties": True,
    }


def _insert_head(builder: SchemaBuilder, option: Schema, head: Schema, extra: Schema) -> Schema:
    """Return the schema of an object with the verb before its own keys."""
    while "$ref" in option:
        option = builder.definitions[option["$ref"].rpartition("/")[2]]
    if "anyOf" in option:
        return {"anyOf": [_insert_head(builder, entry, head, extra) for entry in option["anyOf"]]}
    required = [*head, *option.get("required", [])]
    return {**option, "properties": {**head, **option.get("properties", {}), **extra}, "required": required}


def _collect_used(body: Any, definitions: dict[str, Schema]) -> dict[str, Schema]:
    used: dict[str, Schema] = {}

    def visit(schema: Any) -> None:
        if isinstance(schema, dict):
            name = str(schema.get("$ref", "")).rpartition("/")[2]
            if name and name not in used:
                used[name] = definitions[name]
                visit(definitions[name])
            for value in schema.values():
                visit(value)
        elif isinstance(schema, list):
            for value in schema:
                visit(value)

    visit(body)
    return dict(sorted(used.items()))


def name_file(verb: str) -> str:
    """Return the name of a verb's schema."""
    return verb.replace(" ", "-") + ".json"


def format_schema(schema: Schema) -> str:
    """Format a schema as its file has it."""
    return json.dumps(schema, indent=1) + "\n"


PAGE_TEXT = """\
# JSON documents

`--json` makes a verb print one document on standard output, and nothing else there. Each has a schema
([JSON Schema 2020-12](https://json-schema.org/draft/2020-12)), derived from the code and tested against real outputs.
Keys stay and keep their meaning; a later version may add keys, so programs ignore those that they do not know. Sizes
are in bytes and times in seconds where the key does not name another unit; infinity and NaN are `null`.

A failure without a document leaves standard output empty: the exit code and one line on standard error tell why.
With `--jobs`, `encode`, `inspect`, `measure`, `verify` and `compressor verify` print one object for each file and line,
with the document under `document` ([thousands of files](many.md)).

Written by `python tools/docs/json_schemas.py`.

| command | schema |
|---|---|
"""


class SchemaFile(NamedTuple):
    """A file that this tool writes."""

    path: Path
    text: str


def build_files() -> list[SchemaFile]:
    """Build all files: the schemas, and the page that lists them."""
    files = [SchemaFile(SCHEMAS / name_file(verb), format_schema(build_schema(verb))) for verb in DOCUMENTS]
    rows = [f"| `kvmnn {verb} --json` | [{name_file(verb)}](schemas/{name_file(verb)}) |\n" for verb in DOCUMENTS]
    return [*files, SchemaFile(PAGE, PAGE_TEXT + "".join(rows))]


def main() -> int:
    """Write the schemas and their page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    SCHEMAS.mkdir(exist_ok=True)
    files = build_files()
    for path in set(SCHEMAS.glob("*.json")) - {file.path for file in files}:
        path.unlink()
    for file in files:
        file.path.write_text(file.text, encoding="utf-8")
    print(f"{len(files) - 1} schemas in {SCHEMAS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
