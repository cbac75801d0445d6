"""Workloads of the cases: prompts from texts, repeated tokens, several turns, and retrieval."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.text import pluralize
from ...errors import KvmnnError, MissingFileError, SourceError
from ...files.schema import loads_strict, read_bounded
from ...lm.documents import Document, Ids, TextTokenizer, build_document_from_text, read_documents
from ...lm.generation import check_positions
from ...lm.onnx.interface import DecoderInterface
from ...lm.tokenizer import Tokenizer
from ..demo import parse_bucket
from .cases import RunCase
from .settings import RunSettings

PROMPT_FILE_KEYS = ("prompt_file", "prompt_path", "file", "path", "filename", "name")
"""Keys of an object in a list of prompts; the first one that is present names the file."""

SAMPLE_NAME = "built-in text"
"""Name in results of the built-in text, the default for prompts."""


def read_sample_text() -> str:
    """Return that text: prose, a recipe, a letter, a program, a table.

    It was written for kvmnn and nothing in it repeats, as K and V of repeated words compress better than those of a
    text.
    """
    return (files(__package__) / "sample_text.txt").read_text("utf-8")


def read_long_sample_text() -> str:
    """Return that text and a part of a novel of 1851 (public domain): enough for ten texts of 512 tokens."""
    return read_sample_text() + "\n" + (files(__package__) / "sample_novel.txt").read_text("utf-8")


_MAX_MANIFEST_BYTES = 16 << 20
_MAX_PROMPTS = 10_000


def read_prompt_manifest(manifest: str, texts: Sequence[str]) -> list[str]:
    """Read a list of files; each is returned once."""
    root = next((Path(path) for path in texts if Path(path).is_dir()), Path(manifest).parent)
    try:
        data = read_bounded(Path(manifest), _MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{manifest}: does not exist (prompt_manifest)") from None
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise SourceError(f"{manifest}: is not UTF-8: expected a line for each prompt") from None
    prompt_paths: dict[str, None] = {}
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        path = root / _parse_file_name(line.strip(), f"{manifest}: line {line_number}")
        if not path.is_file():
            raise SourceError(f"{manifest}: line {line_number}: {path}: is no file")
        prompt_paths.setdefault(str(path))
    if not 0 < len(prompt_paths) <= _MAX_PROMPTS:
        raise SourceError(f"{manifest}: names {len(prompt_paths):,} prompts: expected 1 to {_MAX_PROMPTS:,}")
    return list(prompt_paths)


def _parse_file_name(line: str, where: str) -> str:
    try:
        value: Any = loads_strict(line) if line[0] in '{"' else line
    except (ValueError, RecursionError):
        raise SourceError(f"{where}: is not JSON, and begins like it") from None
    if isinstance(value, dict):
        value = next((value[key] for key in PROMPT_FILE_KEYS if key in value), None)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise SourceError(f"{where}: names no file: expected one of {', '.join(PROMPT_FILE_KEYS)}")
    return value


PromptKind = Literal["text", "built-in text", "synthetic"]
"""Source of prompts."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts and answers of one conversation."""

    #: Name, and length class.
    name: str
    bucket: str
    #: Token ids of the prompt and of each further turn, which follows the generated tokens.
    turns: tuple[tuple[int, ...], ...]
    #: Tokens to generate after each turn.
    new_tokens: int
    #: Expected answer; empty if none is scored.
    answer: tuple[int, ...] = field(default=())
    #: Source of the prompts.
    prompts: PromptKind = "text"

    @property
    def num_tokens(self) -> int:
        """Total tokens that are fed."""
        return sum(map(len, self.turns)) + self.num_steps

    @property
    def num_steps(self) -> int:
        """Total tokens that are generated."""
        return self.new_tokens * len(self.turns)

    @property
    def digest(self) -> str:
        """Hash of all its tokens."""
        content = repr((self.turns, self.new_tokens, self.answer))
        return hashlib.sha256(content.encode()).hexdigest()


def build_synthetic_workloads(settings: RunSettings, vocabulary: int | None, bos: int | None) -> list[Workload]:
    """Build prompts that repeat one token, as the MNN fork's benchmark does; they have no text, and so no quality."""
    token = settings.token
    if vocabulary is not None and token >= vocabulary:
        raise KvmnnError(f"token {token}: the vocabulary has {vocabulary:,}: expected a smaller one")
    return [
        Workload(
            name=f"synthetic_{size}",
            bucket=str(size),
            turns=(((bos,) if bos is not None else ()) + (token,) * (size - (bos is not None)),),
            new_tokens=settings.generate,
            prompts="synthetic",
        )
        for size in settings.prompts
    ]


def build_prefix_workloads(
    documents: Sequence[Document], settings: RunSettings, prompts: PromptKind = "text"
) -> list[Workload]:
    """Build prompts of each length from beginnings of texts, or of concatenated texts if none is long enough."""
    workloads = []
    for size_index, size in enumerate(settings.prompts):
        long_documents = [document for document in documents if len(document.ids) >= size]
        if long_documents:
            document = long_documents[size_index % len(long_documents)]
            name, ids = f"{document.name}:{size}", document.ids[:size]
        else:
            name, ids = f"{pluralize(len(documents), 'text')}:{size}", _concat_documents(documents, size)
        turns = (tuple(map(int, ids)),)
        workloads.append(
            Workload(name=name, bucket=str(size), turns=turns, new_tokens=settings.generate, prompts=prompts)
        )
    return workloads


def _concat_documents(documents: Sequence[Document], size: int) -> Ids:
    """Return the first tokens of concatenated texts; only the first text keeps its bos."""
    parts = [documents[0].ids, *(document.own_ids for document in documents[1:])]
    token_ids = np.concatenate(parts)
    if len(token_ids) < size:
        where = documents[0].name if len(documents) == 1 else f"{len(documents):,} texts"
        raise KvmnnError(
            f"{where}: {len(token_ids):,} tokens, a prompt has {size:,}: expected longer texts (--text) or shorter "
            "prompts (--suite-config)"
        )
    return token_ids[:size]


def build_prompt_workloads(
    documents: Sequence[Document], settings: RunSettings, limit: int | None, notes: list[str]
) -> list[Workload]:
    """Build prompts from texts, ordered by bucket, round robin over the buckets, or in the order of the texts.

    A text called ``prompt_<bucket>_<i>`` stands in its bucket whole; of others the beginning is taken, each text for
    one bucket. What does not fit the model's positions is left out with a note.
    """
    bucket_by_name = {document.name: parse_bucket(document.name) for document in documents}
    pools: dict[str, list[tuple[int, Workload]]] = {}
    unnamed_documents = [
        (document_index, document)
        for document_index, document in enumerate(documents)
        if bucket_by_name[document.name] == "other"
    ]
    for document_index, document in enumerate(documents):
        bucket = bucket_by_name[document.name]
        if bucket != "other":
            pools.setdefault(bucket, []).append(
                (document_index, _build_prompt_workload(document, len(document.ids), bucket, settings))
            )
    next_index = 0
    for _ in range(settings.prompts_per_bucket):
        for size in settings.buckets:
            for step in range(len(unnamed_documents)):
                document_index, document = unnamed_documents[(next_index + step) % len(unnamed_documents)]
                if len(document.ids) >= size:
                    pools.setdefault(str(size), []).append(
                        (document_index, _build_prompt_workload(document, size, str(size), settings))
                    )
                    next_index += step + 1
                    break
    workloads = [work for _, work in sorted(_select_prompts(pools, settings), key=lambda pair: pair[0])]
    fitting = [work for work in workloads if limit is None or work.num_tokens <= limit]
    skipped_sizes = sorted(
        {int(work.bucket) if work.bucket.isdecimal() else 0 for work in workloads if work not in fitting}
    )
    if skipped_sizes:
        sizes = ", ".join(map(str, skipped_sizes))
        prompts_text = f"prompts of {sizes} tokens and {settings.demo_generate} new ones"
        notes.append(f"{prompts_text} are left out: more than {limit:,} positions")
    if not fitting:
        sizes = ", ".join(map(str, settings.buckets))
        raise KvmnnError(f"the texts have no prompt of {sizes} tokens that the model has positions for")
    return fitting[: settings.max_prompts] if settings.max_prompts else fitting


def _select_prompts(
    pools: dict[str, list[tuple[int, Workload]]], settings: RunSettings
) -> Iterator[tuple[tuple[int, int], Workload]]:
    """Yield the first prompts of each bucket, each with its sort key."""
    bucket_names = sorted(pools, key=lambda bucket: int(bucket) if bucket.isdecimal() else 1 << 40)
    for bucket_index, bucket in enumerate(bucket_names):
        selected_turns: set[tuple[tuple[int, ...], ...]] = set()
        for document_index, work in pools[bucket]:
            if work.turns not in selected_turns and len(selected_turns) < settings.prompts_per_bucket:
                yield (
                    (
                        (len(selected_turns), bucket_index)
                        if settings.prompt_order == "stratified"
                        else (document_index, bucket_index)
                    ),
                    work,
                )
                selected_turns.add(work.turns)


def _build_prompt_workload(document: Document, size: int, bucket: str, settings: RunSettings) -> Workload:
    ids = tuple(map(int, document.ids[:size]))
    return Workload(name=f"{document.name}:{size}", bucket=bucket, turns=(ids,), new_tokens=settings.demo_generate)


def build_multi_turn_workloads(
    documents: Sequence[Document], settings: RunSettings, limit: int | None
) -> list[Workload]:
    """Build three turns from each text: its beginning, and two continuations that follow generated answers."""
    size, new_tokens = min(settings.buckets), max(2, settings.demo_generate // 3)
    workloads = []
    for document in documents[: settings.prompts_per_bucket]:
        ids = tuple(map(int, document.ids))
        first_size = len(ids) - 2 * size
        first_size = first_size if limit is None else min(first_size, limit - 2 * size - 3 * new_tokens)
        if first_size < size or len(ids) < first_size + 2 * size:
            continue
        turns = (ids[:first_size], ids[first_size : first_size + size], ids[first_size + size : first_size + 2 * size])
        workloads.append(
            Workload(name=f"{document.name}:turns", bucket=str(first_size), turns=turns, new_tokens=new_tokens)
        )
    if not workloads:
        raise KvmnnError(f"multi_turn: no text has the tokens of three turns: expected at least {3 * size} tokens")
    return workloads


def build_needle_workloads(
    documents: Sequence[Document], tokenizer: TextTokenizer, settings: RunSettings, limit: int | None
) -> list[Workload]:
    """Build needle-in-a-haystack prompts: a number hidden at three depths of each text, requested in a second turn.

    What is generated between the two gives the planner the steps that it waits for before it evicts.
    """
    rng = np.random.default_rng(settings.seed)
    workloads = []
    for document in documents[: settings.prompts_per_bucket]:
        for depth in (0.1, 0.5, 0.9):
            secret = "".join(map(str, rng.integers(0, 10, 6)))
            answer = tuple(map(int, tokenizer.encode(secret)))
            needle = tuple(map(int, tokenizer.encode(f"\n# The secret number is {secret}\n")))
            question = tuple(map(int, tokenizer.encode("\n# The secret number is ")))
            ids = tuple(map(int, document.ids))
            max_prompt_tokens = settings.quality_tokens if limit is None else min(settings.quality_tokens, limit)
            new_tokens = max(settings.generate, len(answer) + 1)
            ids = ids[: max(1, max_prompt_tokens - len(needle) - len(question) - 2 * new_tokens)]
            needle_position = max(1, int(len(ids) * depth))
            turns = ((*ids[:needle_position], *needle, *ids[needle_position:]), question)
            name = f"{document.name}:needle at {depth:.0%}"
            workloads.append(
                Workload(name=name, bucket=f"{depth:.0%}", turns=turns, new_tokens=new_tokens, answer=answer)
            )
    return workloads


def split_document(document: Document, tokens: int) -> list[Document]:
    """Split a text into parts of `tokens` tokens, each after the token that begins every text; a rest is left out."""
    first = document.ids[:1] if document.begins_with_bos else document.ids[:0]
    ids, size = document.ids[len(first) :], tokens + 1 - len(first)
    return [
        replace(
            document,
            name=f"{document.name}, part {number + 1}",
            ids=np.concatenate([first, ids[begin : begin + size]]),
            sha256=hashlib.sha256(f"{document.sha256} {begin}".encode()).hexdigest(),
            requested_tokens=tokens,
        )
        for number, begin in enumerate(range(0, len(ids) - size + 1, size))
    ]


_SYNTHETIC_NOTE = (
    "The prompts of the runtime cases are synthetic, one token repeated: their K and V compress better than those of "
    "texts."
)


class PromptTexts:
    """Texts for prompts and perplexity, as tokens of the model.

    Parameters
    ----------
    model
        Its file or folder, for messages and the tokenizer.
    settings
        Which prompts.
    texts
        Files and folders as `kvmnn.lm.documents.read_documents` takes them.
    tokenizer
        Its ``tokenizer.json``; by default the one of the model. Without any, prompts are synthetic.

    Attributes
    ----------
    documents
        The texts; none if none were specified.
    """

    def __init__(
        self, model: str, settings: RunSettings, texts: Sequence[str] = (), tokenizer: str | None = None
    ) -> None:
        self._model, self._settings = model, settings
        self._max_tokens = max(*settings.buckets, *settings.prompts, settings.quality_tokens, 4 * min(settings.buckets))
        needs_tokenizer = bool(texts or tokenizer or settings.prompt_manifest)
        self._tokenizer = (
            Tokenizer.open_for_model(tokenizer or model) if needs_tokenizer or Tokenizer.find_file(model) else None
        )
        self.documents = self._read(texts) if texts else []
        prompt_paths = read_prompt_manifest(settings.prompt_manifest, texts) if settings.prompt_manifest else []
        self._prompt_documents = self._read(prompt_paths) if prompt_paths else self.documents

    def _read(self, paths: Sequence[str], max_tokens: int = 0) -> list[Document]:
        if self._tokenizer is None:
            return []
        return read_documents(paths, self._tokenizer, max_tokens or self._max_tokens, notes=[])

    def split(self, texts: Sequence[str], count: int) -> None:
        """Take parts of few long texts, or of the built-in one, as `count` texts or as many as there are."""
        size = max(*self._settings.prompts, self._settings.quality_tokens)
        if texts:
            documents = self._read(texts, count * (size + 1))
        else:
            tokenizer, text = self._tokenizer or Tokenizer.open_for_model(self._model), read_long_sample_text()
            documents = [build_document_from_text(SAMPLE_NAME, text, tokenizer, count * (size + 1))]
        self.documents = [part for document in documents for part in split_document(document, size)][:count]

    @property
    def sha256s(self) -> list[str]:
        """SHA-256 of each text, without repetitions."""
        return list(dict.fromkeys(document.sha256 for document in (*self.documents, *self._prompt_documents)))

    def build_workloads(self, case: RunCase, interface: DecoderInterface) -> tuple[list[Workload], list[str]]:
        """Build the workloads of a case, and notes on them."""
        notes: list[str] = []
        workloads = self._build_workloads(case, interface, notes)
        for workload in workloads:
            prompt_tokens = sum(map(len, workload.turns))
            check_positions(interface.label, interface.max_positions, prompt_tokens, workload.num_steps)
        return workloads, notes

    def _build_workloads(self, case: RunCase, interface: DecoderInterface, notes: list[str]) -> list[Workload]:
        settings, limit = case.settings, interface.max_positions
        if case.kind == "runtime":
            return self._build_runtime_workloads(case, interface, notes)
        if not (self._prompt_documents if case.kind == "llm_demo" else self.documents) or self._tokenizer is None:
            raise KvmnnError(f"{case.name} needs texts: expected --text DIR or FILE")
        if case.kind == "llm_demo":
            return build_prompt_workloads(self._prompt_documents, settings, limit, notes)
        if case.kind == "multi_turn":
            return build_multi_turn_workloads(self.documents, settings, limit)
        return build_needle_workloads(self.documents, self._tokenizer, settings, limit)

    def _build_runtime_workloads(self, case: RunCase, interface: DecoderInterface, notes: list[str]) -> list[Workload]:
        settings, tokenizer = case.settings, self._tokenizer
        if settings.synthetic or tokenizer is None:
            if tokenizer is None and not settings.synthetic:
                notes.append(f"{self._model} has no tokenizer.json (--tokenizer), so no text can be a prompt.")
            notes += [_SYNTHETIC_NOTE] if case.mode else []
            return build_synthetic_workloads(
                settings, interface.vocab_size, None if tokenizer is None else tokenizer.bos
            )
        if self.documents:
            return build_prefix_workloads(self.documents, settings)
        max_tokens = max(*settings.prompts, 2)
        sample = build_document_from_text(SAMPLE_NAME, read_sample_text(), tokenizer, max_tokens)
        notes.append("The prompts of the runtime cases are beginnings of the built-in text (--text takes others).")
        return build_prefix_workloads([sample], settings, "built-in text")
