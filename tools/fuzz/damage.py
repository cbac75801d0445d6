"""Bytes damaged in the ways that files and frames are."""

from __future__ import annotations

from random import Random


def damaged(rng: Random, data: bytes) -> bytes:
    """One to four changes of the kinds that storage and attackers make."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not out:
            break
        at = rng.randrange(len(out)) if rng.random() < 0.5 else min(rng.randrange(40), len(out) - 1)
        n = rng.choice((1, 1, 2, 4, 10, rng.randrange(1, 60)))
        change = rng.randrange(8)
        if change == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            out[at] = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
        elif change == 2:
            del out[at : at + n]
        elif change == 3:
            out[at:at] = rng.randbytes(n)
        elif change == 4:
            out[at:at] = out[at : at + n] * rng.randrange(1, 4)
        elif change == 5:
            number = rng.choice((0, 1, 2, len(out), len(out) - 14, 255, 65535, 1 << 24, 1 << 31, (1 << 32) - 1))
            out[at : at + 4] = max(0, number).to_bytes(4, "little")[: len(out) - at]
        elif change == 6:
            del out[rng.randrange(len(out)) :]
        else:
            other = rng.randrange(len(out))
            out[at : at + n], out[other : other + n] = out[other : other + n], out[at : at + n]
    return bytes(out)
