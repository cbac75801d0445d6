"""Words that make a promise. Each is said only of what was compared, all of it."""

LOSSLESS = "LOSSLESS"
"""What came back was compared with what went in, every byte."""

LOSSY = "LOSSY"
"""Tokens, or bits of them, are gone."""

UNCHANGED = "UNCHANGED"
"""Nothing was changed at all."""
