"""Documents of ``--json`` next to their published schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from repository import DOCS

SCHEMAS = DOCS / "schemas"


@cache
def load_validator(name: str) -> Any:
    """Load the published schema of a command, permitting no keys but its own; None if it has none."""
    from jsonschema import Draft202012Validator

    path = SCHEMAS / f"{name}.json"
    return Draft202012Validator(close_schema(json.loads(path.read_text()))) if path.exists() else None


def close_schema(schema: Any) -> Any:
    """Permit only the listed keys of objects, unless the schema itself permits others."""
    if isinstance(schema, list):
        return [close_schema(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close_schema(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def list_problems(words: Sequence[str], text: str) -> list[str]:
    """List what is wrong with the document that a command printed; none if it is no document with a schema."""
    names = [word for word in words if not word.startswith("-")][:2]
    validator = load_validator("-".join(names)) or load_validator("".join(names[:1]))
    try:
        document = json.loads(text)
    except ValueError:
        return []
    if isinstance(document, dict) and {"path", "ok"} <= set(document):  # the line of one of many files
        document = document.get("document")
    if validator is None or not isinstance(document, dict):
        return []
    return [format_problem(problem) for error in validator.iter_errors(document) for problem in select_problems(error)]


def select_problems(error: Any) -> list[Any]:
    """Select, of alternatives that all failed, the one with the fewest problems."""
    if not error.context:
        return [error]
    alternatives: dict[Any, list[Any]] = {}
    for entry in error.context:
        alternatives.setdefault(entry.schema_path[0], []).extend(select_problems(entry))
    return min(alternatives.values(), key=len)


def format_problem(problem: Any) -> str:
    message = problem.message if len(problem.message) < 300 else f"{problem.message[:100]} ... {problem.message[-150:]}"
    return f"{problem.json_path}: {message} (python tools/docs/json_schemas.py writes the schemas)"
