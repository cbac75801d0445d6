"""Codecs side by side on the same data: ratio, speed, and when compressing pays."""

from .benchmark import compare, measure, turns
from .results import Comparison, Machine, Report, Result, Timing

__all__ = ["Comparison", "Machine", "Report", "Result", "Timing", "compare", "measure", "turns"]
