"""Texts of a suite, and the work that its cases make of them."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import KvmnnError
from ...lm.documents import Document, build_document_from_text, read_documents
from ...lm.generation import check_positions
from ...lm.graph.interface import DecoderInterface
from ...lm.tokenizer import Tokenizer
from .manifests import read_prompt_manifest
from .run_cases import RunCase
from .sample_text import SAMPLE_NAME, SAMPLE_TEXT
from .settings import RunSettings
from .work import (
    Workload,
    build_multi_turn_workloads,
    build_needle_workloads,
    build_prefix_workloads,
    build_prompt_workloads,
    build_synthetic_workloads,
)

_SYNTHETIC_NOTE = (
    "The prompts of the runtime cases are synthetic, one token repeated: their K and V compress better than those of "
    "texts."
)


class PromptTexts:
    """The texts that prompts and perplexity are taken of, as tokens of the model.

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
        The texts, none where none were given.

    Raises
    ------
    SourceError
        For texts that cannot be used, and where there are texts and no tokenizer.
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

    def _read(self, paths: Sequence[str]) -> list[Document]:
        if self._tokenizer is None:
            return []
        return read_documents(paths, self._tokenizer, self._max_tokens, notes=[])

    @property
    def sha256s(self) -> list[str]:
        """Of the texts, each once."""
        return list(dict.fromkeys(document.sha256 for document in (*self.documents, *self._prompt_documents)))

    def build_workloads(self, case: RunCase, interface: DecoderInterface) -> tuple[list[Workload], list[str]]:
        """Return the work of a case, and what a reader must know of it.

        Raises
        ------
        KvmnnError
            For texts that are missing or too short, and for work that needs more positions than the model has.
        """
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
            raise KvmnnError(f"{case.name} needs texts: expected --prompts DIR or FILE")
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
        sample = build_document_from_text(SAMPLE_NAME, SAMPLE_TEXT, tokenizer, max_tokens)
        notes.append("The prompts of the runtime cases are beginnings of the built-in text (--prompts takes others).")
        return build_prefix_workloads([sample], settings, "built-in text")
