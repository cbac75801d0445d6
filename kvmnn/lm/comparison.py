"""Text from a model under a policy beside the text of its full cache, and where the two part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..policies.base import Policy
from ..policies.full import Full
from ..policies.labels import LabelledPolicy
from ..reports.tables import h2o_text, runtime_text
from ..reports.text_table import wrapped as as_lines
from ..store import PrefixStore, Put
from ..text import LOSSLESS, LOSSY, span
from ..text.side_by_side import side_by_side, wrapped
from ..threads.pipeline import Progress
from .cache.lossless_store import storing_notes
from .generation import Generation, ending_tokens, generate_tokens, warm_up
from .graph.fingerprint import fingerprint
from .graph.model_files import find_model
from .prompt import prompt_ids
from .run_options import RunOptions
from .sampling import Sampling
from .stored_prefixes import StoredPrefixes
from .tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What one cache made of a prompt.

    Attributes
    ----------
    generation
        Tokens, sizes and times.
    text
        The new tokens as text.
    """

    generation: Generation
    text: str

    @property
    def label(self) -> str:
        """Whether the cache lost anything."""
        return LOSSY if min(self.generation.tokens_kept) < self.generation.tokens_seen else LOSSLESS

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**self.generation.to_dict(), "text": self.text}


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A prompt continued with the full cache, and under a policy.

    Attributes
    ----------
    model
        Its path, as it was given.
    prompt, prompt_tokens
        The text, and its tokens with the one that begins every text.
    policy
        The policy that was asked for.
    sampling
        How tokens were chosen, by both.
    full
        With the full cache.
    cut
        Under the policy; None where it is the full cache.
    notes
        What a reader must know, in sentences.
    """

    model: str
    prompt: str
    prompt_tokens: int
    policy: LabelledPolicy
    sampling: Sampling
    full: Continuation
    cut: Continuation | None
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Whether the cache that was asked for lost anything."""
        return (self.cut or self.full).label

    @property
    def first_difference(self) -> int | None:
        """The first new token at which the texts part, counted from 0; None where they are equal."""
        return None if self.cut is None else first_difference(self.full.generation.ids, self.cut.generation.ids)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        sampling = self.sampling
        return {
            "model": self.model,
            "label": self.label,
            "policy": self.policy.to_dict(),
            "prompt": self.prompt,
            "prompt_tokens": self.prompt_tokens,
            "first_difference": self.first_difference,
            "equal": self.first_difference is None,
            "sampling": {"temperature": sampling.temperature, "top_k": sampling.top_k, "seed": sampling.seed},
            "full": self.full.to_dict(),
            "cut": None if self.cut is None else self.cut.to_dict(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join(self.lines(shutil.get_terminal_size((100, 24)).columns))

    def lines(self, width: int) -> list[str]:
        """Both texts beside each other in `width` columns, where they part, and what each run took."""
        if self.cut is None:
            alone = [*wrapped(self.full.text, width), "", *_numbers({self.policy.label: self.full.generation})]
            return [*alone, *_runtime({self.policy.label: self.full.generation}, width), *self._said(width)]
        full, cut = self.full.generation, self.cut.generation
        both = side_by_side(
            ("full cache", self.full.text), (f"{self.cut.label}: {self.policy.label}", self.cut.text), width
        )
        place = self.first_difference
        if place is None:
            equal = f"equal: all {len(full.ids):,} new tokens"
        else:
            equal = f"equal up to new token {place:,}, different from {place + 1:,} of {len(full.ids):,} on"
        lines = [both, "", equal, *_numbers({Full.name: full, self.policy.label: cut})]
        lines += _runtime({Full.name: full, self.policy.label: cut}, width)
        if cut.h2o is not None:
            lines += ["", h2o_text(cut.h2o, width)]
        return [*lines, *self._said(width)]

    def _said(self, width: int) -> list[str]:
        return ["", as_lines(self.notes, width)] if self.notes else []


def generate(
    model: str | os.PathLike[str],
    prompt: str,
    policy: Policy | LabelledPolicy | None = None,
    *,
    max_tokens: int = 64,
    sampling: Sampling | None = None,
    options: RunOptions | None = None,
    store: PrefixStore | None = None,
    progress: Progress | None = None,
) -> Generated:
    """Continue a prompt with a model's full cache and with its cache under a policy.

    Parameters
    ----------
    model
        An ONNX decoder: file or folder, its ``tokenizer.json`` beside it.
    prompt
        At least one token, the one that begins every text included.
    policy
        Which tokens stay; without one only the full cache runs.
    max_tokens
        New tokens, at least one.
    sampling
        How they are chosen, by the same draws for both; greedily by default, so that every difference is the policy's.
    options
        How the model runs.
    store
        Prefixes that were computed before: the full cache begins with the longest one, and what it computed is put.
        K and V are found under the model's fingerprint (`fingerprint`), which is taken over the whole model first.
    progress
        Told 1 for each new token of either.

    Raises
    ------
    MissingDependencyError
        Where onnxruntime, onnx or tokenizers is not installed.
    SourceError, ModelError
        For a model or tokenizer that cannot be opened.
    KvmnnError
        For a policy that the model cannot run, or more positions than it was made for.
    """
    chosen = policy if isinstance(policy, LabelledPolicy) else LabelledPolicy.of(policy or Full())
    sampling, options = sampling or Sampling(), options or RunOptions()
    session, tokenizer = options.open(model, chosen.policy)
    ids = prompt_ids(tokenizer, prompt)
    ends = ending_tokens(find_model(model))
    prefixes = None if store is None else StoredPrefixes(store, fingerprint(model))
    warm_up(session, ids[0])

    def run(policy: Policy) -> Continuation:
        made = generate_tokens(
            options.runner(session, policy),
            ids,
            max_tokens,
            sampling=sampling,
            ends=ends,
            chunk=options.chunk,
            prefixes=None if policy.evicts else prefixes,
            progress=progress,
        )
        return Continuation(generation=made, text=continuation(tokenizer, ids, made.ids))

    full, cut = run(Full()), run(chosen.policy) if chosen.policy.evicts else None
    return Generated(
        model=os.fspath(model),
        prompt=prompt,
        prompt_tokens=len(ids),
        policy=chosen,
        sampling=sampling,
        full=full,
        cut=cut,
        notes=(*_start_notes(tokenizer, prompt), *_notes(full, cut, chosen, options, len(ids))),
    )


def _start_notes(tokenizer: Tokenizer, prompt: str) -> Iterator[str]:
    """What was put before the prompt."""
    already = tokenizer.bos is not None and tokenizer.encode(prompt)[:1].tolist() == [tokenizer.bos]
    note = tokenizer.start.note(1, int(already), what="prompt")
    if note is not None:
        yield note


def _notes(
    full: Continuation, cut: Continuation | None, chosen: LabelledPolicy, options: RunOptions, prompt: int
) -> Iterator[str]:
    """Why nothing went, and why nothing was stored."""
    made = [(Full.name, full.generation), *([] if cut is None else [(chosen.label, cut.generation)])]
    if full.generation.store is not None:
        yield from full.generation.store.notes
        if cut is not None:
            yield f"{chosen.label}: computed from the beginning, as a policy must see every token come."
    if cut is not None and cut.label == LOSSLESS:
        first = min(options.chunk or prompt, prompt)
        why = chosen.policy.why_all_stay(first, cut.generation.tokens_seen)
        yield f"{chosen.label}: nothing was evicted: {why or 'no step gave it reason to'}."
    if options.lossless is not None:
        runs = [(label, one.runtime) for label, one in made if one.runtime is not None]
        yield from storing_notes(runs, options.lossless)


class Decoding(Protocol):
    """What is needed of `kvmnn.lm.tokenizer.Tokenizer` to give tokens back as text."""

    def decode(self, ids: Sequence[int]) -> str: ...


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part, counted from 0; None where they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def continuation(tokenizer: Decoding, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of the new tokens behind that of the prompt; alone some tokens would read differently."""
    before, text = tokenizer.decode(list(prompt)), tokenizer.decode([*prompt, *new])
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(list(new))


def _numbers(made: dict[str, Generation]) -> list[str]:
    """Aligned lines of what each run took."""
    rows: list[tuple[str, Callable[[str, Generation], str]]] = [
        ("", lambda label, one: label),
        ("new tokens", lambda label, one: f"{len(one.ids):,} ({one.stopped})"),
        ("tokens kept of seen", lambda label, one: f"{_range(one.tokens_kept)} of {one.tokens_seen:,}"),
        ("K and V held", lambda label, one: f"{one.cache_bytes / (1 << 20):.2f} MiB"),
        ("prompt from the store", lambda label, one: f"{one.store.tokens:,} tokens" if one.store else "-"),
        ("first token after", lambda label, one: f"{1e3 * one.prompt_seconds:.1f} ms"),
        ("time per token", lambda label, one: _milliseconds(one.token_seconds)),
        ("  in the model", lambda label, one: _milliseconds(one.model_seconds)),
        ("  in the policy", lambda label, one: _milliseconds(one.policy_seconds)),
    ]
    if not any(one.store for one in made.values()):
        rows = [row for row in rows if row[0] != "prompt from the store"]
    cells = [[heading, *(text(label, one) for label, one in made.items())] for heading, text in rows]
    sizes = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    table = ["  ".join(text.ljust(size) for text, size in zip(line, sizes, strict=True)).rstrip() for line in cells]
    stores = [one.store for one in made.values() if one.store is not None]
    puts = [store.put for store in stores if store.put is not None and not _is_told(store.put, store.notes)]
    return [*table, *(f"put into the store: {put}" for put in puts)]


def _is_told(put: Put, notes: Sequence[str]) -> bool:
    """Whether the notes say already why nothing was put."""
    return bool(put.notes) and set(put.notes) <= set(notes)


def _runtime(made: dict[str, Generation], width: int) -> list[str]:
    """A table of what the lossless runtime did, where there was one."""
    figures = [(label, one.runtime) for label, one in made.items() if one.runtime is not None]
    return ["", runtime_text(figures, width)] if figures else []


def _range(numbers: Sequence[int]) -> str:
    return span(sorted(set(numbers)))


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f} ms"
