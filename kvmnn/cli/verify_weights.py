"""``kvmnn verify`` of a compressor's weight file."""

from __future__ import annotations

import argparse
import os

from . import idle_options, packed_options, printing, weights_options


def verify_weight_file(arguments: argparse.Namespace) -> int:
    """Check the file, and compare it with its checkpoint if there is one; 1 for any difference."""
    from ..compressor import RejectionReport, has_weight_file_magic, verify_weights
    from ..errors import WeightsError

    if len(arguments.against) > 1:
        raise printing.UsageError("a weight file is verified against one checkpoint")
    packed_names = [name for name in packed_options.PACKED_OPTION_NAMES if name != "head_dim"]
    given_names = [*packed_names, "tensor", "skip_unsupported", "no_zstd", "max_bytes", "threads"]
    idle_options.refuse_given(arguments, given_names, f"is not about weight files, and {arguments.input} is one")
    if not arguments.against:
        conversion_options = ["dtype", *weights_options.CONVERSION_OPTION_NAMES, "as_reference"]
        idle_options.refuse_given(arguments, conversion_options, "needs --against: it tells of the conversion")
    against = arguments.against[0] if arguments.against else None
    if against is not None and has_weight_file_magic(against):
        raise printing.UsageError(
            f"--against {against}: is a weight file too: expected the checkpoint; kvmnn diff compares weight files"
        )
    size = os.path.getsize(arguments.input) if os.path.isfile(arguments.input) else 0
    try:
        with printing.progress_bar(arguments, size, "verify") as step:
            result = verify_weights(
                arguments.input,
                against=against,
                options=weights_options.build_convert_options(arguments, as_reference=arguments.as_reference),
                specified_options=weights_options.list_given_options(arguments),
                allow_trailing=arguments.allow_trailing,
                progress=step,
            )
    except WeightsError as exc:
        if arguments.json:
            printing.show_result(arguments, "verify", RejectionReport(path=arguments.input, against=against, error=exc))
        raise
    weights_options.report_notices(arguments, result.warnings, result.notices)
    if result.is_ok or arguments.json:
        printing.show_result(arguments, "verify", result)
    for line in result.format_complaints():
        printing.print_finding(line)
    return 0 if result.is_ok else 1
