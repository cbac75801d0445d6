"""Items of tasks with one right answer, made of given texts: copying, retrieval, classification, completion."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice

import numpy as np

from .._util.dataclass import dataclass
from .._util.patterns import declare_pattern
from ..errors import KvmnnError
from ..lm.documents import Document, Ids, TextTokenizer

DEPTHS = (0.1, 0.5, 0.9)
"""Where in the context stands what is asked for, as shares of its tokens; items take turns."""

_QUERY_TOKENS, _COPIED_TOKENS = 24, 4
_SNIPPET_TOKENS = 20
_LABELS = (" red", " blue")
_VALUES = (
    "tiger",
    "salmon",
    "falcon",
    "camel",
    "spider",
    "whale",
    "rabbit",
    "eagle",
    "turtle",
    "donkey",
    "otter",
    "goose",
)
_MAX_COMPARED_TEXTS = 16
_PLACES = ("Bergen", "Lagos", "Quito", "Delhi", "Osaka", "Malmo", "Turin", "Perth", "Dakar", "Leeds", "Hanoi", "Sofia")
MIN_CONTEXT_TOKENS = 64
_MAX_ATTEMPTS_PER_ITEM = 50
_WORD_REGEX = declare_pattern(r"[A-Za-z_]\w{3,}")
_SHARED_PREFIX_CHARACTERS = 6
_REPEAT_DISTANCE_CHARACTERS = 160
"""A completed word occurred at least so far before, and not since, or it would be in every window."""


@dataclass(frozen=True, kw_only=True)
class TaskItem:
    """A context that is read first, a question after it, and the tokens that answer it."""

    context: tuple[int, ...]
    query: tuple[int, ...]
    answer: tuple[int, ...]
    #: First tokens of the possible answers, if there are only some; the most probable of them counts.
    choices: tuple[int, ...] = ()
    #: Share of the context before what is asked for; None where that is not one place.
    depth: float | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of its tokens."""
        return hashlib.sha256(repr((self.context, self.query, self.answer, self.choices)).encode()).hexdigest()


@dataclass(frozen=True)
class TaskTexts:
    """The texts from which items are drawn, and the number of tokens of a context."""

    documents: Sequence[Document]
    tokenizer: TextTokenizer
    tokens: int

    def draw_window(self, rng: np.random.Generator, document: Document | None = None) -> Ids:
        """Draw consecutive tokens of a text, as many as a context has, or the whole text."""
        if document is None:
            document = self.documents[int(rng.integers(len(self.documents)))]
        ids = document.own_ids
        start = int(rng.integers(max(1, len(ids) - self.tokens + 1)))
        return ids[start : start + self.tokens]

    def begin(self, *parts: Ids | Sequence[int]) -> tuple[int, ...]:
        """Concatenate tokens after the one that begins every text."""
        bos = self.tokenizer.bos
        return (*([] if bos is None else [bos]), *(int(token) for part in parts for token in part))

    def encode(self, text: str) -> list[int]:
        """Encode a part of a text."""
        return [int(token) for token in self.tokenizer.encode(text)]

    def split_answer(self, before: str, answer: str) -> tuple[list[int], list[int]]:
        """Encode both together; the answer begins with the first token that it changes."""
        all_ids, before_ids = self.encode(before + answer), self.encode(before)
        common = 0
        while common < min(len(before_ids), len(all_ids) - 1) and before_ids[common] == all_ids[common]:
            common += 1
        return all_ids[:common], all_ids[common:]


def _draw_copy_item(texts: TaskTexts, rng: np.random.Generator, depth: float) -> TaskItem | None:
    """Repeat the beginning of a passage of the context; the model goes on with it."""
    window = texts.draw_window(rng)
    place = int(depth * (len(window) - _QUERY_TOKENS - _COPIED_TOKENS))
    question_end = place + _QUERY_TOKENS
    return TaskItem(
        context=texts.begin(window),
        query=(*texts.encode("\n\n"), *map(int, window[place:question_end])),
        answer=tuple(map(int, window[question_end : question_end + _COPIED_TOKENS])),
        depth=depth,
    )


def _draw_retrieval_item(texts: TaskTexts, rng: np.random.Generator, depth: float) -> TaskItem | None:
    """Hide a word for each of three names at three depths, and ask for one."""
    window = texts.draw_window(rng)
    names = rng.choice(_PLACES, len(DEPTHS), replace=False)
    values = rng.choice(_VALUES, len(DEPTHS), replace=False)
    parts: list[Sequence[int]] = []
    begin = 0
    for place, name, value in zip(DEPTHS, names, values, strict=True):
        end = int(place * len(window))
        parts += [window[begin:end].tolist(), texts.encode(f"\nThe code of {name} is {value}.\n")]
        begin = end
    index = DEPTHS.index(depth)
    query, answer = texts.split_answer(f"\nThe code of {names[index]} is", f" {values[index]}")
    context = texts.begin(*parts, window[begin:])
    return TaskItem(context=context, query=tuple(query), answer=tuple(answer), depth=depth)


def _draw_classification_item(texts: TaskTexts, rng: np.random.Generator, depth: float) -> TaskItem | None:
    """Label snippets of two texts in turns, and ask for the label of a further one."""
    pair = find_different_texts(texts.documents)
    labels = [texts.split_answer("Label:", label)[1] for label in rng.permutation(_LABELS)]
    if labels[0][0] == labels[1][0]:
        raise KvmnnError("classification: the tokenizer has no words for its labels")
    context: list[int] = []
    while True:
        for index in map(int, rng.permutation(2)):
            snippet = texts.draw_window(rng, pair[index])
            begin = int(rng.integers(max(1, len(snippet) - _SNIPPET_TOKENS + 1)))
            question = [*texts.encode("Text: "), *map(int, snippet[begin : begin + _SNIPPET_TOKENS])]
            question += texts.encode("\nLabel:")
            if len(context) + len(question) + len(labels[index]) > texts.tokens:
                choices = tuple(label[0] for label in labels)
                return TaskItem(
                    context=texts.begin(context), query=tuple(question), answer=(labels[index][0],), choices=choices
                )
            context += [*question, *labels[index], *texts.encode("\n\n")]


def find_different_texts(documents: Sequence[Document]) -> tuple[Document, Document]:
    """Find the two texts that share the fewest of their tokens (Jaccard index), of the first 16."""
    token_sets = [(document, set(document.own_ids.tolist())) for document in documents[:_MAX_COMPARED_TEXTS]]
    if len(token_sets) < 2:
        raise KvmnnError("classification needs two texts: expected another one (--text)")
    first, second = min(
        combinations(token_sets, 2), key=lambda pair: len(pair[0][1] & pair[1][1]) / len(pair[0][1] | pair[1][1])
    )
    return first[0], second[0]


def _draw_completion_item(texts: TaskTexts, rng: np.random.Generator, depth: float) -> TaskItem | None:
    """Complete a line by a word that stood after the same characters before."""
    text = texts.tokenizer.decode(texts.draw_window(rng))
    candidates = []
    for match in _WORD_REGEX.finditer(text, len(text) // 2):
        before = text[max(0, match.start() - _SHARED_PREFIX_CHARACTERS) : match.start()]
        last = text.rfind(before + match[0], 0, match.start())
        if "\n" not in before and 0 <= last < match.start() - _REPEAT_DISTANCE_CHARACTERS:
            candidates.append((match, last))
    if not candidates:
        return None
    match, last = candidates[int(rng.integers(len(candidates)))]
    line_begin = text.rfind("\n", 0, match.start()) + 1
    before = text[line_begin : match.start()]
    spaces = before[len(before.rstrip(" ")) :]  # a space belongs to the token of the word after it
    query, answer = texts.split_answer(before.removesuffix(spaces), spaces + match[0])
    return TaskItem(
        context=texts.begin(texts.encode(text[:line_begin])),
        query=tuple(query),
        answer=tuple(answer),
        depth=last / match.start(),
    )


_DRAW_BY_TASK: dict[str, Callable[[TaskTexts, np.random.Generator, float], TaskItem | None]] = {
    "copy": _draw_copy_item,
    "retrieval": _draw_retrieval_item,
    "classification": _draw_classification_item,
    "completion": _draw_completion_item,
}

TASK_NAMES = tuple(_DRAW_BY_TASK)


def draw_items(task: str, texts: TaskTexts, num_items: int, seed: int) -> list[TaskItem]:
    """Draw the items of a task; the same ones for the same texts and seed.

    Raises
    ------
    KvmnnError
        For texts that are too few or too short for the task.
    """
    rng = np.random.default_rng([seed, *task.encode()])
    items = list(islice(_iter_items(task, texts, rng, num_items), num_items))
    if len(items) < num_items:
        raise KvmnnError(
            f"{task}: {len(items)} of {num_items} items could be made of the texts: expected longer ones, in which "
            "words occur again"
        )
    return items


def _iter_items(task: str, texts: TaskTexts, rng: np.random.Generator, num_items: int) -> Iterator[TaskItem]:
    num_drawn = 0
    for _ in range(_MAX_ATTEMPTS_PER_ITEM * num_items):
        item = _DRAW_BY_TASK[task](texts, rng, DEPTHS[num_drawn % len(DEPTHS)])
        if item is not None and item.query and item.answer and len(item.context) >= MIN_CONTEXT_TOKENS:
            num_drawn += 1
            yield item
