"""XXH64 in plain Python, written from the specification of xxHash."""

from __future__ import annotations

import struct

_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MASK = (1 << 64) - 1


def _rotl(number: int, by: int) -> int:
    return (number << by | number >> 64 - by) & _MASK


def _round(acc: int, lane: int) -> int:
    return _rotl((acc + lane * _P2) & _MASK, 31) * _P1 & _MASK


def xxh64(data: bytes, seed: int = 0) -> int:
    whole = len(data) // 32 * 32
    if whole:
        accs = [(seed + start) & _MASK for start in (_P1 + _P2, _P2, 0, -_P1)]
        for lanes in struct.iter_unpack("<4Q", data[:whole]):
            accs = [_round(acc, lane) for acc, lane in zip(accs, lanes, strict=True)]
        found = sum(_rotl(acc, by) for acc, by in zip(accs, (1, 7, 12, 18), strict=True)) & _MASK
        for acc in accs:
            found = ((found ^ _round(0, acc)) * _P1 + _P4) & _MASK
    else:
        found = (seed + _P5) & _MASK
    found = (found + len(data)) & _MASK
    rest = data[whole:]
    while len(rest) >= 8:
        found = (_rotl(found ^ _round(0, int.from_bytes(rest[:8], "little")), 27) * _P1 + _P4) & _MASK
        rest = rest[8:]
    if len(rest) >= 4:
        found = (_rotl(found ^ int.from_bytes(rest[:4], "little") * _P1 & _MASK, 23) * _P2 + _P3) & _MASK
        rest = rest[4:]
    for byte in rest:
        found = _rotl(found ^ byte * _P5 & _MASK, 11) * _P1 & _MASK
    found = (found ^ found >> 33) * _P2 & _MASK
    found = (found ^ found >> 29) * _P3 & _MASK
    return found ^ found >> 32
