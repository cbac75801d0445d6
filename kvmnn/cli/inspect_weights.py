"""``kvmnn inspect`` of a compressor's weight file or checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

from . import weights_options


def inspected(path: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The account of a file as a JSON document and as text."""
    from ..compressor import inspect

    account = inspect(path, weights_options.options(arguments))
    return account.to_dict(), str(account)
