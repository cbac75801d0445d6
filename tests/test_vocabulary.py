"""Names of kvmnn say what things are: no bare participle or pronoun, limits ``MAX_`` and ``MIN_``, unique classes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest
from repository import ROOT

PACKAGE = ROOT / "kvmnn"
TESTS = ROOT / "tests"

_EMPTY_WORDS_TEXT = """
found made said told asked held kept known given tried taken noted placed laid meant wanted gone
one ones other others each mine rest here back whole much least most longest
behind beside afar anew
"""
EMPTY_WORDS = frozenset(_EMPTY_WORDS_TEXT.split())
"""Bare participles, pronouns and prepositions: none tells a reader what the value is."""

TEST_FOLDERS = frozenset(
    {
        "_util",
        "analysis",
        "arrays",
        "attacks",
        "batch",
        "bench",
        "bundle",
        "cli",
        "compressor",
        "conformance",
        "dense",
        "docs",
        "evaluation",
        "faults",
        "files",
        "formats",
        "frames",
        "gates",
        "integrations",
        "lm",
        "memory",
        "packed",
        "peers",
        "policies",
        "reports",
        "runtime",
        "store",
        "tools",
    }
)
"""Folders of tests whose names are ``test_<unit>_<condition>_<result>``, as are those directly below ``tests/``."""

_SENTENCE_WORDS_TEXT = """
said told asked tells speaks lies lie laid meanwhile anew afar beside behind room nobody somebody
"""
SENTENCE_STARTS = re.compile(
    r"test_(a|an|the|what|which|whatever|who|whoever|where|it|its|there|nothing|every|all|no|some)(_|$)"
)
SENTENCE_WORDS = frozenset(_SENTENCE_WORDS_TEXT.split())
"""A test's name begins with the unit under test, and has none of the words that the package does not use either."""

LIMIT_WORDS = re.compile(r"_?(MOST|LEAST|FEW|FEWEST|LONGEST|SMALLEST|LARGEST)(_|$)")

JSON_KEYS = frozenset(
    {
        "kvmnn/reports/records.py: kept",
        "kvmnn/store/results.py: asked",
        "kvmnn/store/results.py: kept",
        "kvmnn/store/adapters.py: asked",
    }
)
"""Fields whose names are keys of published JSON, which stay."""


def iter_bad_names(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield ``path: name`` for names of classes, functions, parameters and variables that say nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name.strip("_").lower() in EMPTY_WORDS or LIMIT_WORDS.match(name):
            yield f"{path}: {name}"


def iter_own_names(path: str, tree: ast.Module) -> Iterator[str]:
    """As `iter_bad_names`, without the parameter ``other`` of operators, whose name is Python's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and re.fullmatch(r"__\w+__", node.name):
            for argument in node.args.args:
                argument.arg = "self" if argument.arg == "other" else argument.arg
    yield from iter_bad_names(path, tree)


def iter_bad_test_names(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield ``path: name`` of tests whose name is a sentence that does not begin with the unit under test."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        if SENTENCE_STARTS.match(node.name) or SENTENCE_WORDS & set(node.name.split("_")):
            yield f"{path}: {node.name}"


@cache
def read_modules() -> dict[str, ast.Module]:
    """The syntax trees of all modules of the package by their paths."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def find_duplicate_classes(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Public class names that several modules define, with the modules."""
    paths_by_name: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                paths_by_name[node.name].append(path)
    return {name: paths for name, paths in paths_by_name.items() if len(paths) > 1}


@pytest.mark.usefixtures("without_collector")
def test_package_names_follow_the_vocabulary() -> None:
    bad_names = {name for path, tree in read_modules().items() for name in iter_own_names(path, tree)}
    assert sorted(bad_names - JSON_KEYS) == []
    assert sorted(JSON_KEYS - bad_names) == []


def test_package_public_class_names_are_unique() -> None:
    assert find_duplicate_classes(read_modules()) == {}


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("def found(): ...", "found"),
        ("class Made: ...", "Made"),
        ("def read(asked): ...", "asked"),
        ("def read():\n    kept = 1", "kept"),
        ("numbers = [other for other in range(3)]", "other"),
        ("key = lambda one: one", "one"),
        ("_MOST_BYTES = 1", "_MOST_BYTES"),
        ("class Settings:\n    LONGEST: int = 3", "LONGEST"),
    ],
)
def test_package_planted_name_is_reported(code: str, name: str) -> None:
    assert f"planted.py: {name}" in set(iter_own_names("planted.py", ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["MAX_BYTES = 1", "def __eq__(self, other): ...", "def read_header(path): ...", "min_tokens = 1"]
)
def test_package_good_name_is_accepted(code: str) -> None:
    assert list(iter_own_names("good.py", ast.parse(code))) == []


def test_package_planted_duplicate_class_is_reported() -> None:
    modules = {
        "a.py": ast.parse("class Row: ..."),
        "b.py": ast.parse("class Row: ..."),
        "c.py": ast.parse("class _Row: ..."),
    }
    assert find_duplicate_classes(modules) == {"Row": ["a.py", "b.py"]}


@pytest.mark.usefixtures("without_collector")
def test_test_names_begin_with_the_unit() -> None:
    paths = [path for folder in sorted(TEST_FOLDERS) for path in sorted((TESTS / folder).rglob("test_*.py"))]
    bad_names = [
        name
        for path in (*sorted(TESTS.glob("test_*.py")), *paths)
        for name in iter_bad_test_names(str(path.relative_to(TESTS)), ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert bad_names == []


@pytest.mark.parametrize(
    "name", ["test_what_is_refused", "test_a_file_appears", "test_encode_text_is_said", "test_the"]
)
def test_test_names_planted_sentence_is_reported(name: str) -> None:
    assert list(iter_bad_test_names("x.py", ast.parse(f"def {name}(): ..."))) == [f"x.py: {name}"]


def test_test_names_good_name_is_accepted() -> None:
    assert list(iter_bad_test_names("x.py", ast.parse("def test_encode_empty_array_is_refused(): ..."))) == []
