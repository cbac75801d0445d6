"""One page about what was measured: gates, evaluations, measurements, replays and comparisons of codecs."""

from .report import Report, make_report

__all__ = ["Report", "make_report"]
