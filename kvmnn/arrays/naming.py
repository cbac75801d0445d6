"""Names of arrays: the layer and part (K or V) that they state, and which names arrays may have.

A name is looked up in `NAME_TEMPLATES`; then in `INDEXED_NAME_TEMPLATE`; then by its words, so that
``model.layers.3.self_attn.k`` and ``k_3`` are K of layer 3: the last word for K or V, and the first number that stands
alone or after a word for layer, K or V. Heads come before tokens unless specified otherwise; `INDEXED_NAME_TEMPLATE`
names come from engines of either order, so that their axes must be specified. Names are checked where arrays enter.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import PurePath
from typing import Literal

from .._util.named_tuple import NamedTuple
from .._util.patterns import declare_pattern
from ..dtypes import PARTS, Part
from ..errors import SourceError

AxisOrder = Literal["htd", "thd"]  # heads before tokens (``[kv_head, token, head_dim]``), or tokens before heads

#: Names with part and layer, and the usual order of axes. A slash may be an underscore, as in names of files.
NAME_TEMPLATES: tuple[tuple[str, AxisOrder], ...] = (
    ("layer_{layer}.{part}", "htd"),  # kvmnn itself
    ("past_key_values.{layer}.{part}", "htd"),  # inputs of decoders in ONNX, with a batch in front
    ("present.{layer}.{part}", "htd"),  # their outputs
    ("{folder}layer_{layer}/{letter}_t{start}_{end}", "thd"),  # MNN's KV dumps
    ("{folder}layer_{layer}/packed_{letter}_packed_t{start}_{end}", "htd"),  # their packed variant
)

#: A layer and 0 for K, 1 for V, as in ``3.0``, ``past_key_values.3.1`` or ``layers_3_0``: pairs in lists, flattened.
INDEXED_NAME_TEMPLATE = "{cache}{layer}.{part}"

_PLACEHOLDERS = {
    "{folder}": r"(?P<folder>(?:.*/)?)",
    "{layer}": r"(?P<layer>\d{1,9})",
    "{part}": "(?P<part>key|value)",
    "{letter}": "(?P<letter>[kv])",
    "{start}": r"(?P<start>\d{1,18})",
    "{end}": r"(?P<end>\d{1,18})",
}


def _compile_template(template: str) -> re.Pattern[str]:
    text = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
    for placeholder, pattern in _PLACEHOLDERS.items():
        text = text.replace(placeholder, pattern)
    return declare_pattern(text.replace("/", "[/_]"), re.DOTALL | re.ASCII)


_INDEXED_NAME_REGEX = declare_pattern(
    r"(?P<rest>(?:(?:past_key_values?|past|present|key_values|kv_cache|cache|layers?)[._/])?"
    r"(?P<layer>[0-9]{1,9})[._/])(?P<part>[01])",
    re.DOTALL,
)
_NAME_REGEXES = tuple((_compile_template(template), order) for template, order in NAME_TEMPLATES)
_PART_WORDS: dict[str, Part] = {
    **dict.fromkeys(("k", "key", "keys"), "key"),
    **dict.fromkeys(("v", "value", "values"), "value"),
}
_WORD_REGEX = declare_pattern(r"[A-Za-z]+\d*|\d+")
_LAYER_WORD_REGEX = declare_pattern(r"(?:layers?|l|keys?|values?|k|v)?(\d+)", re.IGNORECASE)


class ConventionalName(NamedTuple):
    """Contents of a name of `NAME_TEMPLATES`."""

    #: Part and layer.
    part: Part
    layer: int
    #: Order of the axes.
    order: AxisOrder
    #: The first token; 0 unless the name states it.
    start: int = 0
    #: The end of the token range; None unless the name states it, as only names of KV dumps do, where several arrays
    #: may form a layer.
    end: int | None = None

    @property
    def is_dump(self) -> bool:
        """Return whether the name is one of a KV dump."""
        return self.end is not None


def parse_conventional_name(name: str) -> ConventionalName | None:
    """Parse a name of `NAME_TEMPLATES`; None for all others."""
    for pattern, order in _NAME_REGEXES:
        match = pattern.fullmatch(name)
        if match:
            groups = match.groupdict()
            letter = groups.get("letter") or groups["part"][0]
            tokens = [int(groups[key]) for key in ("start", "end") if key in groups]
            return ConventionalName(PARTS[letter == "v"], int(groups["layer"]), order, *tokens)
    return None


class LayerName(NamedTuple):
    """What a name states beyond doubt: the layer, and the cache and the part where it has them."""

    #: What the name has before the layer: the same for all layers of a cache.
    cache: str
    layer: int
    part: Part | None = None
    #: Tokens of a segment of a KV dump; None for others.
    tokens: tuple[int, int] | None = None


_LAYER_WORD_NAME_REGEX = declare_pattern(r"(?<![A-Za-z])layers?[._/]?([0-9]{1,9})(?![0-9])", re.IGNORECASE)


def parse_layer_name(name: str) -> LayerName | None:
    """Parse a name of a template, or one with the word layer and a number; None for numbers that may be of anything."""
    parsed_name = parse_conventional_name(name)
    if parsed_name is not None:
        tokens = None if parsed_name.end is None else (parsed_name.start, parsed_name.end)
        folder = "" if tokens is None else name[: name.rindex("layer_")]
        return LayerName(folder, parsed_name.layer, parsed_name.part, tokens)
    if match := _INDEXED_NAME_REGEX.fullmatch(name):
        return LayerName("", int(match["layer"]), PARTS[int(match["part"])])
    if match := _LAYER_WORD_NAME_REGEX.search(name):
        with suppress(SourceError):
            return LayerName(name[: match.start()], int(match[1]), parse_part("", name)[0])
        return LayerName(name[: match.start()], int(match[1]))
    return None


def is_indexed_name(name: str) -> bool:
    """Return whether a name is one of `INDEXED_NAME_TEMPLATE`."""
    return _INDEXED_NAME_REGEX.fullmatch(name) is not None


def parse_part(where: str, name: str) -> tuple[Part, str]:
    """Return K or V by the last word for either, and the name with that word replaced by ``*``."""
    if match := _INDEXED_NAME_REGEX.fullmatch(name):
        return PARTS[int(match["part"])], f"{match['rest']}*"
    for word in reversed(list(_WORD_REGEX.finditer(name))):
        letters = word[0].rstrip("0123456789")
        part = _PART_WORDS.get(letters.lower())
        if part:
            return part, f"{name[: word.start()]}*{name[word.start() + len(letters) :]}"
    raise SourceError(
        f"{where}: array {name!r} is neither K nor V by its name: expected a word k, key or keys, v, value or values "
        "in it (--tensor, in Python tensors=, chooses arrays)"
    )


def parse_layer(name: str) -> int | None:
    """Return the first number that stands alone or follows a word for layer, K or V."""
    for word in re.findall(r"[A-Za-z0-9]+", name):
        match = _LAYER_WORD_REGEX.fullmatch(word)
        if match and len(match[1]) < 10:
            return int(match[1])
    return None


MAX_NAME_BYTES = 255  # in UTF-8: the limit of file systems
_CONTROL_REGEX = declare_pattern(r"[\x00-\x1f\x7f-\x9f]")
_SURROGATE_REGEX = declare_pattern(r"[\ud800-\udfff]")


def find_name_error(name: str) -> str | None:
    """Return why an array may not have this name; None if it may."""
    # Some formats cut or alter such names (a zip archive ends names at a NUL), and so do terminals.
    if name.isascii() and name.isprintable() and len(name) <= MAX_NAME_BYTES:
        return None  # nearly all are, and there may be a million
    if match := _CONTROL_REGEX.search(name):
        return f"has the control character {match[0]!r} in it"
    if match := _SURROGATE_REGEX.search(name):
        return f"is not Unicode: it has the lone surrogate {match[0]!r} in it"
    nbytes = len(name.encode())
    return f"has {nbytes:,} bytes, above the limit of {MAX_NAME_BYTES}" if nbytes > MAX_NAME_BYTES else None


def check_name(name: str, where: str) -> None:
    """Raise `SourceError` if an array may not have this name; the message begins with `where`."""
    if name_error := find_name_error(name):
        raise SourceError(f"{where}: the array name {shorten_name(name)} {name_error}")


def shorten_name(name: str, max_chars: int = 60) -> str:
    """Format a name for a message: quoted, unprintable characters escaped, the middle of a long one left out."""
    short_name = name if len(name) <= max_chars else f"{name[: max_chars // 2]}...{name[-max_chars // 2 :]}"
    return ascii(short_name) if find_name_error(short_name) else repr(short_name)


def array_name_from_path(path: str) -> str:
    """Return the name of the only array in a file: the file's without its suffix, sanitized."""
    return sanitize_name(PurePath(path).stem)


def sanitize_name(name: str) -> str:
    """Escape control characters and bytes that are not UTF-8 in a file's name."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return _CONTROL_REGEX.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
