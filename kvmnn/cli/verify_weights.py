"""``kvmnn verify`` of a compressor's weight file."""

from __future__ import annotations

import argparse
import os

from . import idle_options, packed_options, printing, weights_options


def run(arguments: argparse.Namespace) -> int:
    """Check the file, and compare it with its checkpoint if there is one; 1 for any difference."""
    from ..compressor import Rejection, is_weights, verify
    from ..errors import WeightsError

    if len(arguments.against) > 1:
        raise printing.UsageError("a weight file is verified against one checkpoint")
    packed = [name for name in packed_options.LAYING if name != "head_dim"]
    idle = [*packed, "tensor", "skip_unsupported", "no_zstd", "max_bytes", "threads"]
    idle_options.refuse(arguments, idle, f"is not about weight files, and {arguments.input} is one")
    if not arguments.against:
        told = ["dtype", *weights_options.TOLD, "as_reference"]
        idle_options.refuse(arguments, told, "needs --against: it tells of the conversion")
    against = arguments.against[0] if arguments.against else None
    if against is not None and is_weights(against):
        raise printing.UsageError(
            f"--against {against}: is a weight file too: expected the checkpoint; kvmnn diff compares weight files"
        )
    size = os.path.getsize(arguments.input) if os.path.isfile(arguments.input) else 0
    try:
        with printing.progress(arguments, size, "verify") as step:
            verdict = verify(
                arguments.input,
                against=against,
                options=weights_options.options(arguments, as_reference=arguments.as_reference),
                given=weights_options.given(arguments),
                allow_trailing=arguments.allow_trailing,
                progress=step,
            )
    except WeightsError as exc:
        if arguments.json:
            printing.show(arguments, "verify", Rejection(path=arguments.input, against=against, error=exc))
        raise
    weights_options.report(arguments, verdict.warnings, verdict.notices)
    if verdict.ok or arguments.json:
        printing.show(arguments, "verify", verdict)
    for line in verdict.complaints():
        printing.complain(line)
    return 0 if verdict.ok else 1
