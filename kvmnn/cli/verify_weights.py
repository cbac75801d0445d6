"""``kvmnn verify`` of a compressor's weight file."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from ..text import count
from . import printing, weights_options

if TYPE_CHECKING:
    from ..compressor.conversion.verify import Verdict

_SHOWN = 5


def run(arguments: argparse.Namespace) -> int:
    """Check the file, and compare it with its checkpoint if there is one; 1 for any difference."""
    from ..compressor.conversion.verify import verify
    from ..errors import WeightsError

    if len(arguments.against) > 1:
        raise printing.UsageError("a weight file is verified against one checkpoint")
    against = arguments.against[0] if arguments.against else None
    also = [name for name in ("min_seq_len", "num_heads") if getattr(arguments, name) is not None]
    size = os.path.getsize(arguments.input) if os.path.isfile(arguments.input) else 0
    try:
        with printing.progress(arguments, size, "verify") as step:
            verdict = verify(
                arguments.input,
                against=against,
                options=weights_options.options(arguments, dtype=None),
                also=also,
                allow_trailing=arguments.allow_trailing,
                progress=step,
            )
    except WeightsError as exc:
        if arguments.json:
            found = {"reason": exc.reason, "level": "format", "offset": exc.offset, "text": str(exc)}
            _print(arguments, against, {"verdict": "reject", "reasons": [exc.reason], "findings": [found]})
        raise
    _report(verdict, against, arguments)
    return 0 if verdict.ok else 1


def _report(verdict: Verdict, against: str | None, arguments: argparse.Namespace) -> None:
    errors = [finding for finding in verdict.findings if finding.is_error]
    warnings = [finding for finding in verdict.findings if not finding.is_error]
    weights_options.report(arguments, [f"{finding.text} ({finding.reason})" for finding in warnings], verdict.notices)
    if arguments.json:
        document = {
            "verdict": "reject" if not verdict.ok else "accept_warn" if warnings else "accept",
            "reasons": [finding.reason for finding in verdict.findings],
            "findings": [
                {"reason": finding.reason, "level": "semantic" if finding.is_error else "warning", "text": finding.text}
                for finding in verdict.findings
            ],
            "differences": verdict.differences,
            "compared_elements": verdict.compared,
            "notices": verdict.notices,
            "header": verdict.file.header.to_dict(),
            "bytes": verdict.file.size,
        }
        _print(arguments, against, document)
    for finding in errors:
        _complain(f"{arguments.input}: {finding.text} ({finding.reason})")
    for difference in verdict.differences[:_SHOWN]:
        _complain(f"{arguments.input}: DIFFERS from {against}: {difference}")
    if len(verdict.differences) > _SHOWN:
        _complain(f"{arguments.input}: DIFFERS from {against} in {len(verdict.differences) - _SHOWN} more places")
    if verdict.ok:
        header = verdict.file.header
        how = "VALID (no --against: nothing to compare with)"
        if against is not None:
            how = f"EXACT ({verdict.compared:,} elements compared with {against}, rounded to {header.dtype.name})"
        printing.say(
            arguments,
            f"{arguments.input}: {how}, {count(header.num_layers, 'layer')} of "
            f"{count(header.weight_count_per_layer, 'weight')}, {header.dtype.name}, "
            f"factor {header.compression_factor}, {verdict.file.size:,} bytes",
        )


def _print(arguments: argparse.Namespace, against: str | None, document: dict[str, Any]) -> None:
    printing.print_json({"verb": "verify", "kind": "weights", "input": arguments.input, "against": against, **document})


def _complain(text: str) -> None:
    print("kvmnn: error:", text, file=sys.stderr)
