"""Which layer an array is of, and whether it holds K or V, by its name: the one table of names.

A name is looked up in `NAME_TEMPLATES`; then in `INDEXED_NAME_TEMPLATE`; then by its words, so that
``model.layers.3.self_attn.k`` and ``k_3`` are K of layer 3: the last word for K or V, and the first number that stands
alone or behind a word for layer,
K or V. Names of `NAME_TEMPLATES`, and those of words, have heads before tokens where nobody says otherwise;
`INDEXED_NAME_TEMPLATE` ones come from engines of either order, and are asked about.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from ..dtypes import PARTS, Part
from ..errors import SourceError

AxisOrder = Literal["htd", "thd"]
"""Heads before tokens (``[kv_head, token, head_dim]``), or tokens before heads."""

NAME_TEMPLATES: tuple[tuple[str, AxisOrder], ...] = (
    ("layer_{layer}.{part}", "htd"),  # kvmnn itself
    ("past_key_values.{layer}.{part}", "htd"),  # inputs of decoders in ONNX, with a batch in front
    ("present.{layer}.{part}", "htd"),  # their outputs
    ("{folder}layer_{layer}/{letter}_t{start}_{end}", "thd"),  # MNN's KV dumps
    ("{folder}layer_{layer}/packed_{letter}_packed_t{start}_{end}", "htd"),  # their packed variant
)
"""Names that say part and layer, and the usual order of axes. A slash may be an underscore, as in names of files."""

INDEXED_NAME_TEMPLATE = "{cache}{layer}.{part}"
"""A layer and 0 for K, 1 for V, as in ``3.0``, ``past_key_values.3.1`` or ``layers_3_0``: pairs in lists, flattened."""

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
    return re.compile(text.replace("/", "[/_]"), re.DOTALL | re.ASCII)


_INDEXED_NAME_REGEX = re.compile(
    r"(?P<rest>(?:(?:past_key_values?|past|present|key_values|kv_cache|cache|layers?)[._/])?"
    r"(?P<layer>[0-9]{1,9})[._/])(?P<part>[01])",
    re.DOTALL,
)
_NAME_REGEXES = tuple((_compile_template(template), order) for template, order in NAME_TEMPLATES)
_PART_WORDS: dict[str, Part] = {
    **dict.fromkeys(("k", "key", "keys"), "key"),
    **dict.fromkeys(("v", "value", "values"), "value"),
}
_WORD_REGEX = re.compile(r"[A-Za-z]+\d*|\d+")
_LAYER_WORD_REGEX = re.compile(r"(?:layers?|l|keys?|values?|k|v)?(\d+)", re.IGNORECASE)


class ConventionalName(NamedTuple):
    """What a name in `NAME_TEMPLATES` says.

    Parameters
    ----------
    part, layer
        K or V of which layer.
    order
        Of the axes.
    start
        The first token; 0 where the name does not say.
    end
        Behind the last token; None where the name does not say: all but those of KV dumps, where an array may be a run
        of tokens of several.
    """

    part: Part
    layer: int
    order: AxisOrder
    start: int = 0
    end: int | None = None

    @property
    def is_dump(self) -> bool:
        """Whether the name is one of a KV dump."""
        return self.end is not None


def parse_conventional_name(name: str) -> ConventionalName | None:
    """What a name says that is in `NAME_TEMPLATES`; None for all others."""
    for pattern, order in _NAME_REGEXES:
        match = pattern.fullmatch(name)
        if match:
            groups = match.groupdict()
            letter = groups.get("letter") or groups["part"][0]
            tokens = [int(groups[key]) for key in ("start", "end") if key in groups]
            return ConventionalName(PARTS[letter == "v"], int(groups["layer"]), order, *tokens)
    return None


def is_indexed_name(name: str) -> bool:
    """Whether a name is one of `INDEXED_NAME_TEMPLATE`."""
    return _INDEXED_NAME_REGEX.fullmatch(name) is not None


def parse_part(where: str, name: str) -> tuple[Part, str]:
    """K or V by the last word that says so; and the name with that word replaced by ``*``.

    Raises
    ------
    SourceError
        For a name without such a word.
    """
    if match := _INDEXED_NAME_REGEX.fullmatch(name):
        return PARTS[int(match["part"])], f"{match['rest']}*"
    for word in reversed(list(_WORD_REGEX.finditer(name))):
        letters = word[0].rstrip("0123456789")
        part = _PART_WORDS.get(letters.lower())
        if part:
            return part, f"{name[: word.start()]}*{name[word.start() + len(letters) :]}"
    raise SourceError(
        f"{where}: array {name!r} is neither K nor V by its name: expected a word k, key or keys, v, value or values "
        "in it (--tensor chooses arrays)"
    )


def parse_layer(name: str) -> int | None:
    """The first number that stands alone or behind a word for layer, K or V."""
    for word in re.findall(r"[A-Za-z0-9]+", name):
        match = _LAYER_WORD_REGEX.fullmatch(word)
        if match and len(match[1]) < 10:
            return int(match[1])
    return None
