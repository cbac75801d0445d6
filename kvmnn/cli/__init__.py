"""The command line: ``command.py`` is the way in, ``verbs/`` has a file for each verb."""

from .command import main

__all__ = ["main"]
