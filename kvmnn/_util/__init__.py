"""Helpers that every layer uses: text, numbers, validation, optional packages, threads."""
