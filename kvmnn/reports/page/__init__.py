"""One page of results: gates, evaluations, measurements, replays and codec comparisons."""

from .report import Report, make_report

__all__ = ["Report", "make_report"]
