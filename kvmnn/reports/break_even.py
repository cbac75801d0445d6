"""Break-even of codecs and of stored prefixes: link speeds, prefix lengths, times to the first token.

A codec saves time on a link or disk of B bytes a second if fetching the stored bytes and decoding them takes less time
than fetching the raw bytes, one after the other (reading: ``B < (raw - stored) / decode``); in a round trip the bytes
are encoded and sent as well (``B < (raw - stored) / (encode + decode)``).
"""

from __future__ import annotations

import os
import shutil
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Self

from .._util.dataclass import dataclass
from .._util.text import compute_ratio, pluralize
from ..errors import OptionError, SourceError
from ..files.schema import Record, json_key, parse_object, read_bounded
from .table import Column, Table, wrap_sentences

PREFIX_LENGTHS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Lengths of prefixes that a report has a row for."""

_MAX_FILE_BYTES = 1 << 20
_MAX_TOKENS = 1 << 24
_MAX_SECONDS = 1e6
_MAX_EXTRAPOLATION = 2
"""Lengths up to so many times the longest that was measured are predicted."""


@dataclass(frozen=True, kw_only=True)
class CodecTimes(Record):
    """Sizes and times of one codec on the same K and V."""

    codec: str
    raw_bytes: int
    stored_bytes: int
    #: Seconds of wall time for all of these bytes: the median, and what 95 % of the calls do not exceed.
    encode_p50: float
    encode_p95: float
    decode_p50: float
    decode_p95: float
    #: Part of the median of decoding that does not depend on the number of bytes.
    decode_base: float = 0.0

    @property
    @json_key()
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return compute_ratio(self.raw_bytes, self.stored_bytes)

    @property
    @json_key("read_bytes_per_s")
    def read_limit(self) -> float | None:
        """Speed of a link, in bytes per second, below which the codec saves time in reading; None if it never does."""
        return self._compute_limit(self.decode_p50)

    @property
    @json_key("read_p95_bytes_per_s")
    def read_limit_p95(self) -> float | None:
        """The `read_limit` if decoding takes the 95th percentile of its time."""
        return self._compute_limit(self.decode_p95)

    @property
    @json_key("round_trip_bytes_per_s")
    def round_trip_limit(self) -> float | None:
        """Speed of a link below which the codec saves time in a round trip; None if it never does."""
        return self._compute_limit(self.encode_p50 + self.decode_p50)

    @property
    @json_key("round_trip_p95_bytes_per_s")
    def round_trip_limit_p95(self) -> float | None:
        """The `round_trip_limit` if both calls take the 95th percentile of their times."""
        return self._compute_limit(self.encode_p95 + self.decode_p95)

    def _compute_limit(self, seconds: float) -> float | None:
        saved_bytes = self.raw_bytes - self.stored_bytes
        return saved_bytes / max(seconds, 1e-9) if saved_bytes > 0 else None

    def predict_decode_seconds(self, raw_bytes: float) -> float:
        """Return the seconds of decoding so many raw bytes."""
        return self.decode_base + (self.decode_p50 - self.decode_base) * raw_bytes / max(self.raw_bytes, 1)


@dataclass(frozen=True, kw_only=True)
class EngineTimes(Record):
    """Seconds from a prompt to its first token, by the number of tokens of the prompt, as an engine was timed."""

    #: The whole prompt computed.
    computed: Mapping[str, float]
    #: K and V of all tokens but the last in memory: handed to the engine, and the last token computed.
    loaded: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_speed(cls, tokens_per_second: float) -> Self:
        """Return the times of an engine whose time is proportional to the tokens, and that loads in no time."""
        return cls(computed={"1": 1 / tokens_per_second})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a JSON object with ``computed`` and, optionally, ``loaded``: seconds by numbers of tokens.

        Raises
        ------
        SourceError
            If the file cannot be read, or is not such an object.
        """
        label = os.fspath(path)
        times = cls.from_dict(parse_object(read_bounded(Path(path), _MAX_FILE_BYTES), label), label)
        if not times.computed:
            raise SourceError(f"{label}.computed: is empty: expected numbers of tokens and their seconds")
        for tokens, seconds in (*times.computed.items(), *times.loaded.items()):
            if not tokens.isascii() or not tokens.isdecimal() or not 0 < int(tokens) <= _MAX_TOKENS:
                raise SourceError(f"{label}: {tokens!r:.40} is no number of tokens from 1 to {_MAX_TOKENS:,}")
            if not 0 < seconds < _MAX_SECONDS:
                raise SourceError(f"{label}: {tokens} tokens take {seconds!r} seconds: expected some above 0")
        return times

    @property
    def max_tokens(self) -> int | None:
        """The longest prompt that is predicted; None for any."""
        max_timed = max(map(int, self.computed))
        return None if max_timed == 1 else max_timed * _MAX_EXTRAPOLATION

    def predict_computed(self, tokens: int) -> float:
        """Return the seconds of computing a prompt: attention takes a time that grows with each token, so the seconds
        per token lie on a straight line between the measured lengths.
        """
        points = [(length, seconds / length) for length, seconds in _sort_points(self.computed)]
        return _interpolate(points, tokens) * tokens

    def predict_loaded(self, tokens: int) -> float:
        """Return the seconds from K and V in memory to the first token."""
        points = _sort_points(self.loaded)
        return _interpolate(points, tokens) if points else 0.0


def _sort_points(times: Mapping[str, float]) -> list[tuple[int, float]]:
    return sorted((int(tokens), seconds) for tokens, seconds in times.items())


def _interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Return the value at `x` on straight lines through points, which go on outside of them, but never below half of
    the least value.
    """
    if len(points) == 1:
        return points[0][1]
    index = min(max(bisect_left([place for place, _ in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return max(value, min(y for _, y in points) / 2)


@dataclass(frozen=True, kw_only=True)
class PrefixPrediction(Record):
    """What is predicted of a prompt of which all tokens but the last are stored."""

    codec: str
    tokens: int
    stored_bytes: int
    #: Seconds to the first token: computed, and from the store over the link of the report.
    computed_seconds: float
    stored_seconds: float
    #: Speed of a link above which the store is faster; 0 if it is at any, None if it is at none.
    min_link: float | None

    @property
    @json_key()
    def is_loading_faster(self) -> bool:
        """Whether loading beats computing."""
        return self.stored_seconds < self.computed_seconds


@dataclass(frozen=True, kw_only=True)
class BreakEvenReport(Record):
    """Speeds of links and lengths of prefixes at which codecs pay."""

    #: Of each codec.
    codecs: tuple[CodecTimes, ...]
    #: Speed of the link or disk, in bytes per second; None for one that takes no time.
    link: float | None = None
    #: For each codec, ``"raw"`` for none, and length; none where the speed of the engine is unknown.
    prefixes: tuple[PrefixPrediction, ...] = ()
    #: By codec: from how many tokens on loading is faster; codecs with which it never is are missing.
    first_tokens: Mapping[str, int] = field(default_factory=dict)
    #: A sentence for each thing that the reader of the numbers must know.
    notes: tuple[str, ...] = field(default=(), metadata={"omit": True})

    def to_tables(self) -> list[Table]:
        """Return the tables of codecs and of prefixes."""
        tables = [Table.from_items("Break-even of codecs", _CODEC_COLUMNS, self.codecs)]
        if self.prefixes:
            tables.append(Table.from_items("Time to the first token, predicted", _PREFIX_COLUMNS, self.prefixes))
        return tables

    def list_notes(self) -> list[str]:
        """Return sentences that say what the numbers mean."""
        notes = [
            "Reading: below this speed of a link or disk, fetching stored bytes and decoding them takes less time than "
            "fetching raw bytes, one after the other; round trip: with encoding and sending as well. p95: with times "
            "that 95 % of the calls do not exceed."
        ]
        if self.prefixes:
            link_text = "a link that takes no time" if self.link is None else f"a link of {self.link / 1e6:,.1f} MB/s"
            first_texts = [self._format_first(codec, tokens) for codec, tokens in self.first_tokens.items()] or [
                "with no codec"
            ]
            notes.append(
                f"All tokens of the prompt but the last come from the store, over {link_text}. Loading beats computing "
                f"there: {', '.join(first_texts)}. Link: the speed above which it does."
            )
        names = {times.codec.partition(" ")[0] for times in self.codecs}
        untimed_codecs = [name for name in _PROFILE_CODECS if name not in names]
        if untimed_codecs:
            notes[0] += (
                f" Not timed, without the profile of a model: {' and '.join(untimed_codecs)} (kvmnn bench IN --codec "
                f"{untimed_codecs[0]}:FILE)."
            )
        notes[0] = " ".join([notes[0], *self.notes])
        return notes

    def _format_first(self, codec: str, tokens: int) -> str:
        text = f"{codec} from {pluralize(tokens, 'token')} on"
        has_fixed_time = any(times.codec == codec and times.decode_base for times in self.codecs)
        return text if has_fixed_time or codec == _RAW_TIMES.codec else f"{text} (without the fixed time of a get)"

    def __str__(self) -> str:
        width = shutil.get_terminal_size((100, 24)).columns
        blocks = [f"{table.title}\n{table.to_terminal(width)}" for table in self.to_tables()]
        return "\n\n".join([*blocks, wrap_sentences(self.list_notes(), width)])


_PROFILE_CODECS = ("profile", "transform")


def _format_link(speed: float | None) -> str:
    return "never" if speed is None else f"{speed / 1e6:,.1f}"


_CODEC_COLUMNS = (
    Column("codec", lambda times: times.codec, is_left_aligned=True),
    Column("ratio", lambda times: f"{times.ratio:.4f}"),
    Column("reading MB/s", lambda times: _format_link(times.read_limit)),
    Column("p95", lambda times: _format_link(times.read_limit_p95)),
    Column("round trip MB/s", lambda times: _format_link(times.round_trip_limit)),
    Column("p95", lambda times: _format_link(times.round_trip_limit_p95)),
)

_PREFIX_COLUMNS = (
    Column("codec", lambda row: row.codec, is_left_aligned=True),
    Column("tokens", lambda row: f"{row.tokens:,}"),
    Column("stored bytes", lambda row: f"{row.stored_bytes:,}"),
    Column("compute ms", lambda row: f"{row.computed_seconds * 1e3:,.1f}"),
    Column("load ms", lambda row: f"{row.stored_seconds * 1e3:,.1f}"),
    Column("faster", lambda row: "loading" if row.is_loading_faster else "computing", drop_rank=2),
    Column("link MB/s", lambda row: "any" if row.min_link == 0 else _format_link(row.min_link)),
)


_RAW_TIMES = CodecTimes(
    codec="raw", raw_bytes=1, stored_bytes=1, encode_p50=0.0, encode_p95=0.0, decode_p50=0.0, decode_p95=0.0
)
"""K and V as they are: what a codec must beat."""


def compute_break_even(
    codecs: Sequence[CodecTimes],
    *,
    token_bytes: float | None = None,
    engine: EngineTimes | None = None,
    link: float | None = None,
    lengths: Sequence[int] = PREFIX_LENGTHS,
) -> BreakEvenReport:
    """Return the link speeds at which each codec saves time, and times to the first token with a stored prefix.

    Parameters
    ----------
    codecs
        Sizes and times, all of the same K and V.
    token_bytes
        Raw bytes of K and V of one token; without them, or without `engine`, prefixes are left out.
    engine
        Seconds that the engine takes.
    link
        Bytes per second of the link or disk that stored bytes come from; None for one that takes no time.
    lengths
        Tokens of prompts; those of more than twice the longest that the engine was timed with are left out.
    """
    if link is not None and link <= 0:
        raise OptionError(f"link is {link!r} bytes a second: expected more than 0")
    prefixes, first_tokens = [], {}
    for times in (*codecs, _RAW_TIMES) if engine is not None and token_bytes else ():
        predictor = _Predictor(times, float(token_bytes or 0), engine or EngineTimes.from_speed(1.0), link)
        max_tokens = predictor.engine.max_tokens
        prefixes += [predictor.predict(n) for n in lengths if max_tokens is None or n <= max_tokens]
        if (first := predictor.find_first_tokens()) is not None:
            first_tokens[times.codec] = first
    return BreakEvenReport(codecs=tuple(codecs), link=link, prefixes=tuple(prefixes), first_tokens=first_tokens)


class _Predictor:
    """Predicts the times to the first token with one codec."""

    def __init__(self, times: CodecTimes, token_bytes: float, engine: EngineTimes, link: float | None) -> None:
        self.engine = engine
        self._times, self._token_bytes, self._link = times, token_bytes, link

    def predict(self, tokens: int) -> PrefixPrediction:
        raw_bytes = (tokens - 1) * self._token_bytes
        stored_bytes = raw_bytes / self._times.ratio
        local_seconds = self._times.predict_decode_seconds(raw_bytes) + self.engine.predict_loaded(tokens)
        computed_seconds = self.engine.predict_computed(tokens)
        spare_seconds = computed_seconds - local_seconds
        return PrefixPrediction(
            codec=self._times.codec,
            tokens=tokens,
            stored_bytes=round(stored_bytes),
            computed_seconds=computed_seconds,
            stored_seconds=local_seconds + (stored_bytes / self._link if self._link else 0.0),
            min_link=stored_bytes / spare_seconds if spare_seconds > 0 else None,
        )

    def find_first_tokens(self) -> int | None:
        """Return from which length on loading is faster; None if it is not at the longest that is predicted."""
        fastest = self.engine.max_tokens or PREFIX_LENGTHS[-1]
        if not self.predict(fastest).is_loading_faster:
            return None
        slowest = 1
        while slowest < fastest:
            middle = (slowest + fastest) // 2
            if self.predict(middle).is_loading_faster:
                fastest = middle
            else:
                slowest = middle + 1
        return fastest
