"""What the small model is trained on: the CPython standard library, split by file, and a tokenizer learned from it.

Nothing is drawn at random or picked by hand. Files are taken in the order of the SHA-256 of their relative path: the
first long modules that are no tests are held out, the next files of moderate size validate, all others train.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvmnn.errors import SourceError

END_OF_TEXT = "<|endoftext|>"
"""Comes before every document, in training as in evaluation; id 0."""
RULE = "sorted by sha256(relative path); see split_documents in tools/lm/corpus.py"

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "bad_coding", "badsyntax"}
)  # other people's code, code pages, and files that are wrong on purpose
MIN_BYTES = 200
MAX_FOREIGN = 0.05  # share of characters beyond ASCII
HELD_OUT = 20
HELD_OUT_BYTES = range(22_000, 90_001)
VALIDATION = 40
VALIDATION_BYTES = range(6_000, 40_001)
NEVER_HELD_OUT = ("lib2to3", "pydoc_data", "idlelib")
TOPICS = "pydoc_data/topics.py"
MIN_TOPIC = 200

Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Document:
    """A file of the library by its path below it, or a help topic."""

    path: str
    text: str

    @property
    def size(self) -> int:
        """Bytes of its UTF-8 form."""
        return len(self.text.encode())

    @property
    def sha256(self) -> str:
        """Of its UTF-8 form, line ends as newlines."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Split:
    """Which documents train, validate and are held out."""

    training: Sequence[Document]
    validation: Sequence[Document]
    held_out: Sequence[Document]


@dataclass(frozen=True)
class Corpus:
    """A split with its tokenizer, and every document as token ids with `END_OF_TEXT` in front."""

    split: Split
    tokenizer: Tokenizer
    training: list[Tokens]
    validation: list[Tokens]
    held_out: list[Tokens]


def prepare(stdlib: Path, output: Path, vocabulary: int) -> Corpus:
    """Read and split the library, learn the tokenizer, and write what belongs next to a model.

    Parameters
    ----------
    stdlib
        Folder of a CPython's standard library.
    output
        Folder for ``tokenizer.json`` (taken as it is where it exists), ``split.json`` and the held-out ``texts/``.
    vocabulary
        Entries of a new tokenizer.

    Raises
    ------
    SourceError
        Where `stdlib` holds too few files to split.
    """
    split = split_documents(list(stdlib_documents(stdlib)))
    if len(split.held_out) < HELD_OUT or len(split.validation) < VALIDATION or not split.training:
        raise SourceError(
            f"{stdlib}: is not a complete standard library: {len(split.training)} files are left to train on"
        )
    split = Split(list(with_topics(split.training)), split.validation, split.held_out)
    saved = output / "tokenizer.json"
    if saved.exists():
        tokenizer = Tokenizer.from_file(str(saved))
    else:
        tokenizer = learn_tokenizer((document.text for document in split.training), vocabulary)
        tokenizer.save(str(saved))
    encoded = [encode(tokenizer, part) for part in (split.training, split.validation, split.held_out)]
    corpus = Corpus(split, tokenizer, *encoded)
    write_texts(split.held_out, output / "texts")
    (output / "split.json").write_text(json.dumps(description(corpus), indent=1) + "\n", encoding="utf-8")
    return corpus


def stdlib_documents(root: Path) -> Iterator[Document]:
    """Every usable source file below `root`, in the order of folders and names."""
    for base, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):  # that holds paths of a build machine
                path = Path(base, name)
                text = usable_text(path.read_bytes())
                if text is not None:
                    yield Document(path.relative_to(root).as_posix(), text)


def usable_text(raw: bytes) -> str | None:
    """The text with newlines for line ends; None for tiny files, for other encodings and for tables of characters."""
    if len(raw) < MIN_BYTES:
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if sum(ord(character) > 127 for character in text) > MAX_FOREIGN * len(text):
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def split_documents(documents: Iterable[Document]) -> Split:
    """Held out, validation, training: in this order, by the hash of the path."""
    training: list[Document] = []
    validation: list[Document] = []
    held_out: list[Document] = []
    for document in sorted(documents, key=lambda document: hashlib.sha256(document.path.encode()).hexdigest()):
        may_be_held_out = "test" not in document.path and not document.path.startswith(NEVER_HELD_OUT)
        if len(held_out) < HELD_OUT and may_be_held_out and document.size in HELD_OUT_BYTES:
            held_out.append(document)
        elif (
            len(validation) < VALIDATION
            and document.size in VALIDATION_BYTES
            and not document.path.startswith("pydoc_data")
        ):
            validation.append(document)
        else:
            training.append(document)
    return Split(training, validation, held_out)


def with_topics(documents: Iterable[Document]) -> Iterator[Document]:
    """pydoc's topics are strings with escapes in a dict: their texts come in place of the file."""
    for document in documents:
        if document.path != TOPICS:
            yield document
            continue
        tree = ast.parse(document.text)
        topics = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
        for name, text in sorted(topics.items()):
            if len(text) > MIN_TOPIC:
                yield Document(f"{document.path}#{name}", text)


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of `vocabulary` entries, whose first is `END_OF_TEXT`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Tokens]:
    """Token ids of each document, `END_OF_TEXT` first."""
    first = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch([document.text for document in documents])
    return [np.array([first, *encoding.ids], dtype=np.uint16) for encoding in encodings]


def write_texts(documents: Iterable[Document], folder: Path) -> None:
    """One file for each document, slashes of its path as two underscores."""
    folder.mkdir(parents=True, exist_ok=True)
    for document in documents:
        target = folder / (document.path.replace("/", "__") + ".txt")
        target.write_text(document.text, encoding="utf-8", newline="\n")


def description(corpus: Corpus) -> dict[str, Any]:
    """What split.json says: sizes, names, and hashes of what was held out."""
    split = corpus.split
    validation_files = [document.path for document in split.validation]
    return {
        "python": sysconfig.get_config_var("py_version") or sysconfig.get_python_version(),
        "rule": RULE,
        "train": _sizes(split.training, corpus.training),
        "validation": {**_sizes(split.validation, corpus.validation), "files": validation_files},
        "heldout": [
            {"file": document.path, "sha256": document.sha256, "bytes": document.size, "tokens": len(tokens)}
            for document, tokens in zip(split.held_out, corpus.held_out, strict=True)
        ],
    }


def _sizes(documents: Sequence[Document], encoded: Sequence[Tokens]) -> dict[str, int]:
    return {
        "documents": len(documents),
        "bytes": sum(document.size for document in documents),
        "tokens": sum(map(len, encoded)),
    }
