"""The results of tasks: accuracy with intervals under every configuration, and the options that they were drawn by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .._util.dataclass import dataclass
from .._util.text import suggest
from ..errors import OptionError
from ..files.schema import Record
from ..reports.records import Refusal
from ..reports.table import Column, Table, wrap_sentences
from .proportions import compute_paired_drop, compute_wilson_interval
from .settings import Configuration
from .task_items import MIN_CONTEXT_TOKENS, TASK_NAMES, TaskItem

_MAX_ITEMS, _MAX_TOKENS = 10_000, 1 << 20


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Record):
    """Which tasks, and how many items of how many tokens.

    Parameters
    ----------
    names
        Of `kvmnn.evaluation.task_items.TASK_NAMES`, in order.
    items
        Items of each task.
    tokens
        Tokens of a context, about: what is hidden in it comes on top.

    Raises
    ------
    OptionError
        For no or unknown tasks, and numbers out of range.
    """

    names: tuple[str, ...] = TASK_NAMES
    items: int = 24
    tokens: int = 512

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in TASK_NAMES:
                raise OptionError(f"{name[:60]!r} is no task{suggest(name, TASK_NAMES)}: {', '.join(TASK_NAMES)}")
        if not self.names or len(set(self.names)) < len(self.names):
            raise OptionError(f"tasks: expected each once, of {', '.join(TASK_NAMES)}")
        if not 1 <= self.items <= _MAX_ITEMS:
            raise OptionError(f"items: found {self.items}, expected 1 to {_MAX_ITEMS:,}")
        if not MIN_CONTEXT_TOKENS <= self.tokens <= _MAX_TOKENS:
            raise OptionError(f"tokens: found {self.tokens}, expected {MIN_CONTEXT_TOKENS} to {_MAX_TOKENS:,}")

    @classmethod
    def parse(cls, spec: str) -> TaskOptions:
        """Parse ``all`` or ``NAME,NAME,...`` with ``items=N`` and ``tokens=N`` among them."""
        names: list[str] = []
        numbers: dict[str, int] = {}
        for part in filter(None, map(str.strip, spec.split(","))):
            name, sign, text = part.partition("=")
            if not sign:
                names += TASK_NAMES if name == "all" else [name]
            elif name not in ("items", "tokens") or not text.isdecimal() or len(text) > 9:
                raise OptionError(f"{part[:60]!r}: expected items=N or tokens=N")
            else:
                numbers[name] = int(text)
        return cls(names=tuple(names or TASK_NAMES), **numbers)


@dataclass(frozen=True, kw_only=True)
class DepthScore(Record):
    """Right answers to what stands at one depth of the context, in percent of it."""

    depth_percent: int
    num_items: int
    num_right: int


@dataclass(frozen=True, kw_only=True)
class TaskScore(Record):
    """Accuracy of one task under one configuration."""

    task: str
    num_items: int
    num_right: int
    #: 95 % interval of the accuracy (Wilson).
    low: float
    high: float
    #: Items that are right with the full cache only, and under this configuration only.
    num_lost: int
    num_gained: int
    #: Drop of the accuracy against the full cache, a share of all items, with a 95 % interval over the pairs.
    drop: float
    drop_low: float
    drop_high: float
    #: By depth, where what is asked for stands at one.
    depths: tuple[DepthScore, ...] = ()

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.num_right / self.num_items

    @classmethod
    def from_answers(
        cls, task: str, items: Sequence[TaskItem], hits: Sequence[bool], full_hits: Sequence[bool]
    ) -> TaskScore:
        """Compute the score from the answers to each item, here and with the full cache."""
        pairs = list(zip(full_hits, hits, strict=True))
        counts = {pair: pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))}
        drop, drop_low, drop_high = compute_paired_drop(*counts.values())
        low, high = compute_wilson_interval(sum(hits), len(hits))
        hits_by_depth: dict[int, list[bool]] = {}
        for item, hit in zip(items, hits, strict=True):
            if item.depth is not None and task != "completion":
                hits_by_depth.setdefault(round(100 * item.depth), []).append(hit)
        return cls(
            task=task,
            num_items=len(hits),
            num_right=sum(hits),
            low=low,
            high=high,
            num_lost=counts[True, False],
            num_gained=counts[False, True],
            drop=drop,
            drop_low=drop_low,
            drop_high=drop_high,
            depths=tuple(
                DepthScore(depth_percent=depth, num_items=len(values), num_right=sum(values))
                for depth, values in sorted(hits_by_depth.items())
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TaskRow(Record):
    """All tasks under one configuration."""

    configuration: Configuration
    scores: tuple[TaskScore, ...]
    #: Mean share of the tokens of the context that all layers hold when the question is asked.
    stored_share: float


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation(Record):
    """Accuracy of tasks under every configuration, the full cache first; ``str()`` is two tables."""

    kvmnn: str
    options: TaskOptions
    #: Tokens fed at once, of the first step (0: as the others), and seed of the items.
    chunk: int
    prompt: int
    seed: int
    rows: tuple[TaskRow, ...]
    notes: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()

    def get_score(self, row: TaskRow, task: str) -> TaskScore:
        """Return the score of a task."""
        return next(score for score in row.scores if score.task == task)

    def format_table(self, width: int | None = None) -> str:
        """Format the tables and notes: aligned for `width` columns, or as Markdown."""
        tables = [self._build_accuracy_table(), *self._iter_depth_tables()]
        title_mark = "" if width is not None else "### "
        parts = [
            f"{title_mark}{table.title}\n\n{table.to_markdown() if width is None else table.to_terminal(width)}"
            for table in tables
        ]
        notes = "\n".join(self.notes) if width is None else wrap_sentences(self.notes, width)
        return "\n\n".join([*parts, notes])

    def __str__(self) -> str:
        return self.format_table(100)

    def _build_accuracy_table(self) -> Table:
        columns = [
            Column("cache", lambda row: str(row.configuration.label), is_left_aligned=True),
            Column("kept", lambda row: f"{row.stored_share:.0%}"),
            *(Column(task, self._make_cell(task)) for task in self.options.names),
        ]
        title = f"Tasks: right answers with 95 % interval, {self.options.items} items each"
        return Table.from_items(title, columns, self.rows)

    def _make_cell(self, task: str) -> Callable[[TaskRow], str]:
        def format_cell(row: TaskRow) -> str:
            score = self.get_score(row, task)
            return f"{score.accuracy:.0%} [{score.low:.0%}, {score.high:.0%}]"

        return format_cell

    def _iter_depth_tables(self) -> Iterator[Table]:
        for task in self.options.names:
            depths = [depth.depth_percent for depth in self.get_score(self.rows[0], task).depths]
            if not depths:
                continue
            columns = [
                Column("cache", lambda row: str(row.configuration.label), is_left_aligned=True),
                *(Column(f"at {depth} %", self._make_depth_cell(task, depth)) for depth in depths),
            ]
            yield Table.from_items(f"{task}, by where in the context it stands", columns, self.rows)

    def _make_depth_cell(self, task: str, depth: int) -> Callable[[TaskRow], str]:
        def format_cell(row: TaskRow) -> str:
            score = next(entry for entry in self.get_score(row, task).depths if entry.depth_percent == depth)
            return f"{score.num_right} of {score.num_items}"

        return format_cell
