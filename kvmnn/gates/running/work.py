"""What a model is given in a case: beginnings of texts, repeated tokens, several turns, and needles in texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ...errors import KvmnnError
from ...lm.documents import Document, Ids, TextTokenizer
from ...text import count
from ..demo.runs import bucket_of
from .settings import RunSettings

Prompts = Literal["text", "built-in text", "synthetic"]
"""Where prompts come from."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One piece of work.

    Attributes
    ----------
    name, bucket
        What it is called, and the length it stands for.
    turns
        Token ids of the prompt; of each further turn, those that follow what was generated before it.
    new_tokens
        Generated after each turn.
    answer
        Tokens that the model should give; empty where nothing is scored.
    prompts
        Where its tokens come from.
    """

    name: str
    bucket: str
    turns: tuple[tuple[int, ...], ...]
    new_tokens: int
    answer: tuple[int, ...] = field(default=())
    prompts: Prompts = "text"

    @property
    def tokens(self) -> int:
        """Tokens that are fed in all."""
        return sum(map(len, self.turns)) + self.steps

    @property
    def steps(self) -> int:
        """Tokens that are generated in all."""
        return self.new_tokens * len(self.turns)

    @property
    def digest(self) -> str:
        """Of all its tokens."""
        about = repr((self.turns, self.new_tokens, self.answer))
        return hashlib.sha256(about.encode()).hexdigest()


def synthetic(settings: RunSettings, vocabulary: int | None, bos: int | None) -> list[Workload]:
    """One token repeated, as the fork's bench has it: no text, so no quality."""
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


def text_beginnings(documents: Sequence[Document], settings: RunSettings, prompts: Prompts = "text") -> list[Workload]:
    """Beginnings of texts, a text for each length; where none is long enough, of texts one after another."""
    found = []
    for place, size in enumerate(settings.prompts):
        long = [document for document in documents if len(document.ids) >= size]
        if long:
            document = long[place % len(long)]
            name, ids = f"{document.name}:{size}", document.ids[:size]
        else:
            name, ids = f"{count(len(documents), 'text')}:{size}", _joined(documents, size)
        turns = (tuple(map(int, ids)),)
        found.append(Workload(name=name, bucket=str(size), turns=turns, new_tokens=settings.generate, prompts=prompts))
    return found


def _joined(documents: Sequence[Document], size: int) -> Ids:
    """The first tokens of texts one after another; only the first keeps its bos."""
    parts = [documents[0].ids, *(document.own_ids for document in documents[1:])]
    joined = np.concatenate(parts)
    if len(joined) < size:
        where = documents[0].name if len(documents) == 1 else f"{len(documents):,} texts"
        raise KvmnnError(
            f"{where}: {len(joined):,} tokens, a prompt has {size:,}: expected longer texts (--prompts) or shorter "
            "prompts (--config)"
        )
    return joined[:size]


def real_prompts(
    documents: Sequence[Document], settings: RunSettings, limit: int | None, notes: list[str]
) -> list[Workload]:
    """Prompts from texts, bucket by bucket, and round robin over the buckets, or as the texts follow each other.

    A text called ``prompt_<bucket>_<i>`` stands in its bucket whole; of others the beginning is taken, each text for
    one bucket. What does not fit the model's positions is left out with a note.
    """
    named = {document.name: bucket_of(document.name) for document in documents}
    pools: dict[str, list[tuple[int, Workload]]] = {}
    plain = [(place, document) for place, document in enumerate(documents) if named[document.name] == "other"]
    for place, document in enumerate(documents):
        bucket = named[document.name]
        if bucket != "other":
            pools.setdefault(bucket, []).append((place, _prompt(document, len(document.ids), bucket, settings)))
    next_one = 0
    for _ in range(settings.prompts_per_bucket):
        for size in settings.buckets:
            for step in range(len(plain)):
                place, document = plain[(next_one + step) % len(plain)]
                if len(document.ids) >= size:
                    pools.setdefault(str(size), []).append((place, _prompt(document, size, str(size), settings)))
                    next_one += step + 1
                    break
    found = [work for _, work in sorted(_chosen(pools, settings), key=lambda pair: pair[0])]
    fitting = [work for work in found if limit is None or work.tokens <= limit]
    left_out = sorted({int(work.bucket) if work.bucket.isdecimal() else 0 for work in found if work not in fitting})
    if left_out:
        sizes = ", ".join(map(str, left_out))
        asked = f"prompts of {sizes} tokens and {settings.demo_generate} new ones"
        notes.append(f"{asked} are left out: more than {limit:,} positions")
    if not fitting:
        sizes = ", ".join(map(str, settings.buckets))
        raise KvmnnError(f"the texts have no prompt of {sizes} tokens that the model has positions for")
    return fitting[: settings.max_prompts] if settings.max_prompts else fitting


def _chosen(
    pools: dict[str, list[tuple[int, Workload]]], settings: RunSettings
) -> Iterator[tuple[tuple[int, int], Workload]]:
    """Of each bucket its first prompts, with what they are ordered by: all first ones, then all second ones; or texts
    as they follow each other, and the shorter first."""
    order = sorted(pools, key=lambda name: int(name) if name.isdecimal() else 1 << 40)
    for bucket, name in enumerate(order):
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for place, work in pools[name]:
            if work.turns not in seen and len(seen) < settings.prompts_per_bucket:
                yield ((len(seen), bucket) if settings.prompt_order == "stratified" else (place, bucket)), work
                seen.add(work.turns)


def _prompt(document: Document, size: int, bucket: str, settings: RunSettings) -> Workload:
    ids = tuple(map(int, document.ids[:size]))
    return Workload(name=f"{document.name}:{size}", bucket=bucket, turns=(ids,), new_tokens=settings.demo_generate)


def several_turns(documents: Sequence[Document], settings: RunSettings, limit: int | None) -> list[Workload]:
    """Three turns of one text each: a beginning, and two pieces that follow with answers between them."""
    size, new = min(settings.buckets), max(2, settings.demo_generate // 3)
    found = []
    for document in documents[: settings.prompts_per_bucket]:
        ids = tuple(map(int, document.ids))
        first = len(ids) - 2 * size
        first = first if limit is None else min(first, limit - 2 * size - 3 * new)
        if first < size or len(ids) < first + 2 * size:
            continue
        turns = (ids[:first], ids[first : first + size], ids[first + size : first + 2 * size])
        found.append(Workload(name=f"{document.name}:turns", bucket=str(first), turns=turns, new_tokens=new))
    if not found:
        raise KvmnnError(f"multi_turn: no text has the tokens of three turns: expected at least {3 * size} tokens")
    return found


def needles(
    documents: Sequence[Document], tokenizer: TextTokenizer, settings: RunSettings, limit: int | None
) -> list[Workload]:
    """A number hidden at three depths of each text, asked for in a second turn.

    What is generated between the two gives the planner the steps that it waits for before it evicts.
    """
    rng = np.random.default_rng(settings.seed)
    found = []
    for document in documents[: settings.prompts_per_bucket]:
        for depth in (0.1, 0.5, 0.9):
            secret = "".join(map(str, rng.integers(0, 10, 6)))
            answer = tuple(map(int, tokenizer.encode(secret)))
            needle = tuple(map(int, tokenizer.encode(f"\n# The secret number is {secret}\n")))
            question = tuple(map(int, tokenizer.encode("\n# The secret number is ")))
            ids = tuple(map(int, document.ids))
            room = settings.quality_tokens if limit is None else min(settings.quality_tokens, limit)
            new = max(settings.generate, len(answer) + 1)
            ids = ids[: max(1, room - len(needle) - len(question) - 2 * new)]
            place = max(1, int(len(ids) * depth))
            turns = ((*ids[:place], *needle, *ids[place:]), question)
            name = f"{document.name}:needle at {depth:.0%}"
            found.append(Workload(name=name, bucket=f"{depth:.0%}", turns=turns, new_tokens=new, answer=answer))
    return found
