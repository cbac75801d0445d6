"""Words that make a promise. Each is said only of what was compared, all of it."""

LOSSLESS = "LOSSLESS"
"""What came back was compared with what went in, every byte."""

LOSSY = "LOSSY"
"""Tokens, or bits of them, are gone."""

SIMULATED = "SIMULATED"
"""A size was computed; nothing was made that could be decoded and compared."""

UNCHANGED = "UNCHANGED"
"""Nothing was changed at all."""
