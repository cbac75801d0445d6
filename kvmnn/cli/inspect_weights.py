"""``kvmnn inspect`` of a compressor's weight file or checkpoint."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import weights_options

if TYPE_CHECKING:
    from ..compressor.conversion.inspect import Account


def inspected(path: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The account of a file as a JSON document and as text."""
    if weights_options.is_weight_file(path):
        return _weight_file(path)
    return _checkpoint(path, arguments)


def _weight_file(path: str) -> tuple[dict[str, Any], str]:
    from ..compressor.conversion.inspect import of_file
    from ..compressor.kvcm.weight_file import read

    file = read(path, allow_trailing=True)
    account = of_file(file)
    warnings = [text for _, text in file.warnings]
    if file.trailing:
        warnings.append(f"{file.trailing} bytes follow the last block: kvmnn verify refuses the file")
    head = [f"{path}: compressor weights, {file.header.dtype.name}, {file.size:,} bytes"]
    head += [f"  warning: {text}" for text in warnings]
    document = {"input": path, "kind": "weights", "dtype": file.header.dtype.name, "warnings": warnings}
    return document | _document(account), "\n".join(head + _lines(account, "header"))


def _checkpoint(path: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..compressor.checkpoint.opening import open_checkpoint
    from ..compressor.conversion.inspect import of_checkpoint

    checkpoint = open_checkpoint(path)
    account, selection = of_checkpoint(checkpoint, weights_options.options(arguments))
    notices = checkpoint.notices + selection.notices
    head = [f"{path}: checkpoint ({checkpoint.kind}) with compressor weights, {checkpoint.size:,} bytes"]
    head += [f"  note: {text}" for text in notices]
    head += [f"  warning: {text}" for text in selection.warnings]
    document = {
        "input": path,
        "kind": "checkpoint",
        "container": checkpoint.kind,
        "warnings": selection.warnings,
        "notices": notices,
        "unused": selection.unused,
    }
    return document | _document(account), "\n".join(head + _lines(account, "header as kvmnn convert would write it"))


def _document(account: Account) -> dict[str, Any]:
    return {
        "header": account.header.to_dict(),
        "bytes": account.size,
        "parts": account.parts,
        "weights": [row.to_dict() for row in account.rows],
    }


def _lines(account: Account, title: str) -> list[str]:
    lines = [f"  {title}"]
    lines += [f"    {name:<23} {_value(name, value)}" for name, value in account.header.to_dict().items()]
    width = max(len(row.name) for row in account.rows)
    kind = max(8, *(len(row.dtype) for row in account.rows))
    lines.append(
        f"  {'weight':<{width}}  {'shape':>13}  bias  {'type':<{kind}} {'min':>11} {'max':>11} {'mean':>11} "
        f"{'std':>11}  non-finite"
    )
    for row in account.rows:
        numbers = (row.minimum, row.maximum, row.mean, row.std)
        lines.append(
            f"  {row.name:<{width}}  {f'{row.shape[0]} x {row.shape[1]}':>13}  {'yes' if row.bias else 'no':<4}  "
            f"{row.dtype:<{kind}} {' '.join('          -' if n is None else f'{n:>11.4g}' for n in numbers)}  "
            f"{row.non_finite or ''}".rstrip()
        )
    lines.append("  bytes")
    lines += [f"    {name:<28} {nbytes:>15,}" for name, nbytes in account.parts.items()]
    lines.append(f"    {'file':<28} {account.size:>15,}")
    return lines


def _value(name: str, value: int) -> str:
    if name == "magic":
        return f"{value:#010x}"
    if name == "dtype_code":
        return f"{value} ({('fp16', 'bf16', 'fp32')[value]})"
    return str(value) + (" (not given)" if value == 0 and name in ("num_heads", "head_dim", "hidden_size") else "")
