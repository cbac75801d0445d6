"""Small changes of source text: a comparison, a sign, `and` for `or`, a constant plus one.

`changes_of` finds every place of a file where one can be made: Python is parsed, Cython and C are read token by token.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SWAPS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
    "and": "or",
    "or": "and",
    "&&": "||",
    "||": "&&",
    "+": "-",
    "-": "+",
    "+=": "-=",
    "-=": "+=",
}


@dataclass(frozen=True)
class Change:
    """Bytes `start` to `end` of `file` replaced by `new`."""

    file: str
    line: int
    text: str
    """The whole line, without the space around it."""
    place: int
    """Which of the places with the same line, old and new text this is, from 0."""
    start: int
    end: int
    old: str
    new: str

    @property
    def key(self) -> str:
        """What names this change also when lines above it have come and gone."""
        return f"{self.file}: {self.text}: {self.old!r} -> {self.new!r}" + (f" ({self.place})" if self.place else "")

    def applied(self, source: bytes) -> bytes:
        assert source[self.start : self.end].decode() == self.old, self
        return source[: self.start] + self.new.encode() + source[self.end :]


def changes_of(root: Path, file: str) -> list[Change]:
    source = (root / file).read_bytes()
    spans = sorted(set(_python(source) if file.endswith(".py") else _compiled(source, file.endswith((".c", ".h")))))
    lines = source.split(b"\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    changes: list[Change] = []
    number = 0
    seen: dict[tuple[str, str, str], int] = {}
    for start, end, new in spans:
        while starts[number + 1] <= start:
            number += 1
        old, text = source[start:end].decode(), lines[number].strip().decode()
        place = seen.get((text, old, new), 0)
        seen[text, old, new] = place + 1
        changes.append(Change(file, number + 1, text, place, start, end, old, new))
    return changes


Span = tuple[int, int, str]


# -- Python -----------------------------------------------------------------------------------------------------------


def _python(source: bytes) -> Iterator[Span]:
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)

    def begin(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.end_lineno - 1] + node.end_col_offset

    def operator(left: ast.expr, right: ast.expr, pattern: bytes) -> Iterator[Span]:
        """The operator between two operands: brackets and comments may stand there, too."""
        between = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment.group()), source[end(left) : begin(right)])
        if found := re.search(pattern, between):
            first = end(left) + found.start()
            yield first, first + len(found.group()), SWAPS[" ".join(found.group().decode().split())]

    for node in _evaluated(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                yield from operator(left, right, rb"[<>]=?|[!=]=|is\s+not|is|not\s+in|in")
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from operator(left, right, rb"and|or")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            yield from operator(node.left, node.right, rb"[+-]")
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            yield from operator(node.target, node.value, rb"[+-]=")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield begin(node), begin(node) + 1, "+"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield begin(node), end(node), str(node.value + 1)


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that is run: no annotations, no Literal, nothing in f-strings, whose places are not known."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment") or isinstance(value, ast.JoinedStr):
            continue
        if isinstance(node, ast.Subscript) and name == "slice" and "Literal" in ast.dump(node.value):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from _evaluated(child)


# -- Cython and C -----------------------------------------------------------------------------------------------------

_SKIPPED = {
    False: r"\"\"\"[\s\S]*?\"\"\"|'[^'\n]*'|\"[^\"\n]*\"|\#[^\n]*|^[ ]*(?:cimport|from|import|cdef\ extern)[^\n]*"
    r"|<\s*(?:const\ )?(?:unsigned\ )?\w+(?:\s*\[[^\]]*\]|\s*\*)*\s*>|except\??\ -1",
    True: r"/\*[\s\S]*?\*/|//[^\n]*|'(?:\\.|[^'\n])+'|\"(?:\\.|[^\"\n])*\"|^[ ]*\#(?:[^\n]*\\\n)*[^\n]*",
}
_TOKENS = r"->|<<=?|>>=?|\+\+|--|::1|[<>]=?|[!=]=|&&|\|\||(?<=[\w)\]]\ )[+-](?=\ )|[+-]=|\b(?:and|or)\b|\b\d+\b(?!\.)"
_KEPT = ("::1", "->", "<<", ">>", "<<=", ">>=", "++", "--")


def _compiled(source: bytes, is_c: bool) -> Iterator[Span]:
    text = source.decode("latin-1")  # places are those of bytes
    skipped = re.sub(_SKIPPED[is_c], lambda found: re.sub(r"[^\n]", " ", found.group()), text, flags=re.X | re.M)
    for found in re.finditer(_TOKENS, skipped):
        token = found.group()
        if token.isdigit():
            yield found.start(), found.end(), str(int(token) + 1)
        elif token not in _KEPT and not (is_c and token in ("and", "or")):
            yield found.start(), found.end(), SWAPS[token]
