"""Another implementation of encrypted values and keyed names, from docs/format-store.md: hashlib, hmac, cryptography.

XAES-256-GCM by the key derivation of NIST SP 800-108 that the package cryptography has, which kvmnn does not use.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Sequence

from cryptography.hazmat.primitives.ciphers import algorithms
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.kbkdf import KBKDFCMAC, CounterLocation, Mode


def expand(key: bytes, purpose: str) -> bytes:
    """HKDF-Expand of RFC 5869, 32 bytes."""
    return hmac.new(key, b"kvmnn prefix store: " + purpose.encode() + b"\x01", "sha256").digest()


def xaes(key: bytes, nonce: bytes) -> tuple[AESGCM, bytes]:
    """The cipher of one message, and the nonce that it takes."""
    kdf = KBKDFCMAC(
        algorithm=algorithms.AES256,
        mode=Mode.CounterMode,
        length=32,
        rlen=2,
        llen=None,
        location=CounterLocation.BeforeFixed,
        label=None,
        context=None,
        fixed=b"X\0" + nonce[:12],
    )
    return AESGCM(kdf.derive(key)), nonce[12:]


def open_part(key: bytes, part: bytes, associated: bytes) -> bytes:
    cipher, nonce = xaes(expand(key, "values"), part[:24])
    return cipher.decrypt(nonce, part[24:], associated)


def open_value(key: bytes, data: bytes, name: str) -> bytes:
    """What is in a sealed value of this name; raises `InvalidTag`."""
    magic, head_bytes = struct.unpack_from("<8sQ", data)
    assert magic == b"KVMNNPE1"
    end = 16 + 24 + head_bytes + 16
    found = open_part(key, data[16:end], name.encode())
    if len(data) > end:
        found += open_part(key, data[end:], name.encode() + data[end - 16 : end])
    return found


def key_check(key: bytes) -> str:
    return expand(key, "check")[:16].hex()


def hashed(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, key=expand(key, "names") if key else b"").digest()


def space_key(key: bytes, model: str, layers: Sequence[Sequence[int]], tenant: str = "") -> bytes:
    document = {"dtype": "fp16", "layers": layers, "model": model, **({"tenant": tenant} if tenant else {})}
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    return hashed(key, b"kvmnn prefix store 1\n" + text.encode())


def packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def text_key(key: bytes, space: bytes, ids: Sequence[int]) -> str:
    return hashed(key, b"text" + space + packed(ids)).hex()


def block_keys(key: bytes, space: bytes, ids: Sequence[int], block_tokens: int) -> list[bytes]:
    keys, parent = [], space
    for at in range(0, len(ids) - block_tokens + 1, block_tokens):
        parent = hashed(key, parent + packed(ids[at : at + block_tokens]))
        keys.append(parent)
    return keys


def masked(key: bytes, parent: bytes, ids: Sequence[int]) -> list[int]:
    """What stands for ids in the index and in names of records."""
    found = []
    for one in ids:
        parent = hashed(key, b"order" + parent + packed([one]))
        found.append(int.from_bytes(parent[:4], "little"))
    return found
