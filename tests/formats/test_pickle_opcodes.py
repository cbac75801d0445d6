"""The walk over a pickle that makes nothing: its limits."""

from __future__ import annotations

import pytest

from kvmnn.errors import CheckpointError
from kvmnn.formats.torch._opcodes import scan

PROTOCOL, NONE, POP, STOP = b"\x80\x02", b"N", b"0", b"."


@pytest.mark.parametrize("pairs", [0, 1, 50])
def test_scan_opcode_limit_is_inclusive(pairs: int) -> None:
    data = PROTOCOL + (NONE + POP) * pairs + NONE + STOP
    opcodes = 2 * pairs + 3
    assert scan(data, 0, opcodes) == (len(data), 2)
    assert scan(data + b"more", 0, opcodes) == (len(data), 2)
    with pytest.raises(CheckpointError, match=f"the pickle has more than {opcodes - 1} opcodes"):
        scan(data, 0, opcodes - 1)


@pytest.mark.parametrize("code", [b"r", b"j"], ids=["LONG_BINPUT", "LONG_BINGET"])
def test_scan_memo_limit_is_inclusive(code: bytes) -> None:
    most = 9
    for place in (0, most):
        scan(PROTOCOL + NONE + code + place.to_bytes(4, "little") + STOP, 0, most)
    with pytest.raises(CheckpointError, match=f"memo place {most + 1} is above the limit of {most}"):
        scan(PROTOCOL + NONE + code + (most + 1).to_bytes(4, "little") + STOP, 0, most)
