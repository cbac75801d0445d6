"""Encryption at rest: keys of stores, sealed values, and the secret that names are hashed with.

A value is sealed with XAES-256-GCM (C2SP): AES-256-GCM with a key derived for each value from the first half of a
random nonce of 24 bytes. So random nonces do not run out: two equal ones are to be expected after 2^80 values, where
plain AES-256-GCM should stop at 2^32. docs/format-store.md documents the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .._util.packages import import_optional
from .._util.patterns import declare_pattern
from ..dtypes import Bytes
from ..errors import OptionError, SourceError, build_read_error

KEY_VARIABLE = "KVMNN_STORE_KEY"
"""Environment variable with a key, as 64 hexadecimal digits."""
SEALED_MAGIC = b"KVMNNPE1"
_PLAIN_MAGICS = (b"{", b"KVMNNPU", b"KVMNNPS")
"""First bytes of the namespaces, units and states of a store that is not encrypted; others are damaged."""
CIPHER_NAME = "XAES-256-GCM"

_KEY_BYTES = 32
_KEY_DIGITS_REGEX = declare_pattern(rb"\s*([0-9A-Fa-f]{64})\s*")
_HALF_KEY_REGEX = declare_pattern(rb"[0-9A-Fa-f]{32}")
_MAX_KEY_FILE_BYTES = 4096
_OTHERS_MODE = 0o077
_NONCE_BYTES, _TAG_BYTES = 24, 16
_HEAD_STRUCT = struct.Struct("<8sQ")
_PART_OVERHEAD_BYTES = _NONCE_BYTES + _TAG_BYTES
_CIPHER_BLOCK_BYTES = 16
_CHECK_BYTES = 16
_UNSEAL_REASON = "does not decrypt"


class UnsealError(SourceError):
    """A value does not decrypt: it is damaged, sealed with another key, or belongs under another name."""


class StoreKey:
    """The key of an encrypted store.

    Parameters
    ----------
    secret
        32 random bytes.
    source
        Where they are from, for messages.
    """

    __slots__ = ("secret", "source")

    def __init__(self, secret: bytes, source: str = "key=") -> None:
        if not isinstance(secret, bytes | bytearray):
            raise TypeError(f"key must be {_KEY_BYTES} bytes, not {type(secret).__name__}")
        if len(secret) != _KEY_BYTES:
            raise OptionError(f"{source}: has {len(secret):,} bytes, a key has {_KEY_BYTES}")
        self.secret = bytes(secret)
        self.source = source

    def __repr__(self) -> str:
        return f"<StoreKey from {self.source}>"


def read_key(path: str | os.PathLike[str]) -> StoreKey:
    """Read a key from a file: 32 bytes, or 64 hexadecimal digits.

    Raises
    ------
    SourceError
        If the file cannot be read.
    OptionError
        If it has anything else. The message does not contain what it has.
    """
    label = os.fspath(path)
    try:
        with open(label, "rb") as file:
            data = file.read(_MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise build_read_error(label, error) from None
    secret = _parse_key_digits(data) if len(data) != _KEY_BYTES else data
    if secret is None or _HALF_KEY_REGEX.fullmatch(secret):
        size_text = f"more than {_MAX_KEY_FILE_BYTES:,}" if len(data) > _MAX_KEY_FILE_BYTES else f"{len(data):,}"
        what = f"{_KEY_BYTES} hexadecimal digits, half a key" if secret else f"{size_text} bytes"
        raise OptionError(f"{label}: is no key: expected {_KEY_BYTES} bytes or 64 hexadecimal digits, found {what}")
    return StoreKey(secret, label)


def load_key(path: str | os.PathLike[str] | None = None) -> StoreKey | None:
    """Read the key from a file, or else from the environment variable `KEY_VARIABLE`; None if neither is set.

    Raises
    ------
    SourceError, OptionError
        As `read_key`.
    """
    if path is not None:
        return read_key(path)
    text = os.environ.get(KEY_VARIABLE, "")
    if not text:
        return None
    secret = _parse_key_digits(text.encode("utf-8", "replace"))
    if secret is None:
        raise OptionError(f"{KEY_VARIABLE}: is no key: expected 64 hexadecimal digits, found {len(text):,} characters")
    return StoreKey(secret, KEY_VARIABLE)


def find_exposed_mode(path: str | os.PathLike[str]) -> str:
    """Return the mode of a key file that others may read or write, such as ``0644``; empty for any other."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return ""
    return f"{stat.S_IMODE(mode):04o}" if stat.S_ISREG(mode) and os.name == "posix" and mode & _OTHERS_MODE else ""


def _parse_key_digits(data: bytes) -> bytes | None:
    match = _KEY_DIGITS_REGEX.fullmatch(data)
    return None if match is None else bytes.fromhex(match[1].decode())


class StoreCipher:
    """What a store without encryption does to values and names: nothing."""

    secret = b""
    """Key of the hashes that names are made of; empty for hashes without a key."""
    key_check = ""
    """Tells keys apart without revealing them; empty if there is none."""
    key_source = ""
    unit_overhead_bytes = value_overhead_bytes = 0
    """Bytes that are added to a unit of a head and a body, and to any other value."""

    def seal(self, data: bytes, name: str) -> bytes:
        """Return the bytes to store for a value under a name."""
        return data

    def unseal(self, data: bytes, name: str) -> bytes:
        """Return the value that is stored under a name; raise `UnsealError` if it was not sealed so."""
        return data

    def seal_pieces(self, pieces: Sequence[Bytes | bytes], name: str) -> list[Bytes | bytes]:
        """Return the bytes to store for a head, the first piece, and a body, all others."""
        return list(pieces)

    def unseal_array(self, data: Bytes, name: str) -> Bytes:
        """Return the bytes of `seal_pieces`, one after the other; raise as `unseal`."""
        return data

    def unseal_head(self, data: Bytes, name: str) -> Bytes:
        """Return the bytes of the head at least; raise as `unseal`."""
        return data

    def seal_name(self, name: str) -> str:
        """Return a text that stands for a name, the same one each time."""
        return name

    def unseal_name(self, sealed_name: str) -> str:
        """Return the name; raise as `unseal`."""
        return sealed_name

    def seal_text(self, text: str, name: str) -> str:
        """Return the text to store for a text."""
        return text

    def unseal_text(self, text: str, name: str) -> str:
        """Return the text that is stored under a name; raise as `unseal`."""
        return text


class Xaes256Gcm:
    """XAES-256-GCM of C2SP by the package cryptography.

    Parameters
    ----------
    key
        32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._ciphers = import_optional("cryptography.hazmat.primitives.ciphers")
        self._aead = import_optional("cryptography.hazmat.primitives.ciphers.aead")
        self._invalid_tag: type[Exception] = import_optional("cryptography.exceptions").InvalidTag
        self._key = key
        self._local = threading.local()
        # the subkey of CMAC for messages of whole blocks
        doubled = int.from_bytes(self._encrypt_blocks(bytes(_CIPHER_BLOCK_BYTES)), "big") << 1
        if doubled >> 128:
            doubled = (doubled ^ 0x87) & ((1 << 128) - 1)
        self._subkey = doubled.to_bytes(_CIPHER_BLOCK_BYTES, "big")

    def _encrypt_blocks(self, blocks: bytes) -> bytes:
        """Encrypt single blocks; each thread has a context, which no other may use meanwhile."""
        encryptor: Any = getattr(self._local, "encryptor", None)
        if encryptor is None:
            algorithm, mode = self._ciphers.algorithms.AES(self._key), self._ciphers.modes.ECB()
            encryptor = self._local.encryptor = self._ciphers.Cipher(algorithm, mode).encryptor()
        return bytes(encryptor.update(blocks))

    def _derive_message_key(self, nonce: bytes) -> bytes:
        """Return the AES-256 key of a message."""
        blocks = b"".join(bytes((0, number, ord("X"), 0)) + nonce[:12] for number in (1, 2))
        mask = int.from_bytes(2 * self._subkey, "big")
        return self._encrypt_blocks((int.from_bytes(blocks, "big") ^ mask).to_bytes(32, "big"))

    def encrypt(self, data: bytes, associated: bytes, nonce: bytes | None = None) -> bytes:
        """Return nonce, ciphertext and tag; the nonce is random unless it is specified."""
        nonce = nonce or os.urandom(_NONCE_BYTES)
        sealed: bytes = self._aead.AESGCM(self._derive_message_key(nonce)).encrypt(nonce[12:], data, associated)
        return nonce + sealed

    def decrypt(self, part: bytes, associated: bytes) -> bytes:
        """Return the data of `encrypt`; raise `UnsealError`."""
        if len(part) < _PART_OVERHEAD_BYTES:
            raise UnsealError(_UNSEAL_REASON)
        nonce = part[:_NONCE_BYTES]
        try:
            aead = self._aead.AESGCM(self._derive_message_key(nonce))
            return bytes(aead.decrypt(nonce[12:], part[_NONCE_BYTES:], associated))
        except self._invalid_tag:
            raise UnsealError(_UNSEAL_REASON) from None

    def encrypt_pieces(self, pieces: Sequence[Bytes | bytes], associated: bytes) -> list[Bytes | bytes]:
        """Return the pieces of `encrypt` of all pieces."""
        nonce = os.urandom(_NONCE_BYTES)
        encryptor = self._make_gcm(nonce).encryptor()
        encryptor.authenticate_additional_data(associated)
        ciphertext = [encryptor.update(piece) for piece in pieces]
        encryptor.finalize()
        return [nonce, *ciphertext, encryptor.tag]

    def decrypt_into(self, part: Bytes, associated: bytes, buffer: Bytes) -> None:
        """Decrypt into the beginning of a buffer, which has 16 bytes more; raise `UnsealError`."""
        if part.size < _PART_OVERHEAD_BYTES:
            raise UnsealError(_UNSEAL_REASON)
        decryptor = self._make_gcm(part[:_NONCE_BYTES].tobytes(), part[-_TAG_BYTES:].tobytes()).decryptor()
        decryptor.authenticate_additional_data(associated)
        decryptor.update_into(part[_NONCE_BYTES:-_TAG_BYTES].data, buffer.data)
        try:
            decryptor.finalize()
        except self._invalid_tag:
            raise UnsealError(_UNSEAL_REASON) from None

    def _make_gcm(self, nonce: bytes, tag: bytes | None = None) -> Any:
        algorithm = self._ciphers.algorithms.AES(self._derive_message_key(nonce))
        return self._ciphers.Cipher(algorithm, self._ciphers.modes.GCM(nonce[12:], tag))


class AeadCipher(StoreCipher):
    """Sealed values, and hashes with a secret, by a key."""

    unit_overhead_bytes = _HEAD_STRUCT.size + 2 * _PART_OVERHEAD_BYTES
    value_overhead_bytes = _HEAD_STRUCT.size + _PART_OVERHEAD_BYTES

    def __init__(self, key: StoreKey) -> None:
        self._aead = Xaes256Gcm(_derive_key(key, b"values"))
        self.secret = _derive_key(key, b"names")
        self.key_check = _derive_key(key, b"check")[:_CHECK_BYTES].hex()
        self.key_source = key.source

    def seal(self, data: bytes, name: str) -> bytes:
        return _HEAD_STRUCT.pack(SEALED_MAGIC, len(data)) + self._aead.encrypt(data, name.encode())

    def unseal(self, data: bytes, name: str) -> bytes:
        begin_byte, end_byte = _find_head(data[: _HEAD_STRUCT.size], len(data))
        if end_byte != len(data):
            raise UnsealError(f"has {len(data):,} bytes: its head says {end_byte:,}")
        return self._aead.decrypt(data[begin_byte:], name.encode())

    def seal_pieces(self, pieces: Sequence[Bytes | bytes], name: str) -> list[Bytes | bytes]:
        head = self.seal(bytes(pieces[0]), name)
        return [head, *self._aead.encrypt_pieces(pieces[1:], name.encode() + head[-_TAG_BYTES:])]

    def unseal_array(self, data: Bytes, name: str) -> Bytes:
        begin_byte, end_byte = _find_head(data[: _HEAD_STRUCT.size].tobytes(), data.size)
        head = self._aead.decrypt(data[begin_byte:end_byte].tobytes(), name.encode())
        if end_byte == data.size:
            return np.frombuffer(head, np.uint8)
        size = max(len(head) + data.size - end_byte - _PART_OVERHEAD_BYTES, 0)
        buffer = np.empty(size + _CIPHER_BLOCK_BYTES, np.uint8)
        head_tag = data[end_byte - _TAG_BYTES : end_byte].tobytes()
        self._aead.decrypt_into(data[end_byte:], name.encode() + head_tag, buffer[len(head) :])
        buffer[: len(head)] = np.frombuffer(head, np.uint8)
        buffer.flags.writeable = False
        return buffer[:size]

    def unseal_head(self, data: Bytes, name: str) -> Bytes:
        begin_byte, end_byte = _find_head(data[: _HEAD_STRUCT.size].tobytes(), data.size)
        return np.frombuffer(self._aead.decrypt(data[begin_byte:end_byte].tobytes(), name.encode()), np.uint8)

    def seal_name(self, name: str) -> str:
        data = name.encode()
        # a nonce that is a keyed hash of the name: equal names give equal texts, and nothing else does
        nonce = hashlib.blake2b(data, digest_size=_NONCE_BYTES, key=self.secret).digest()
        return self._aead.encrypt(data, b"name", nonce).hex()

    def unseal_name(self, sealed_name: str) -> str:
        try:
            return self._aead.decrypt(bytes.fromhex(sealed_name), b"name").decode()
        except ValueError:
            raise UnsealError(_UNSEAL_REASON) from None

    def seal_text(self, text: str, name: str) -> str:
        return self.seal(text.encode(), name).hex()

    def unseal_text(self, text: str, name: str) -> str:
        try:
            return self.unseal(bytes.fromhex(text), name).decode()
        except ValueError:
            raise UnsealError(_UNSEAL_REASON) from None


NO_CIPHER = StoreCipher()
"""The cipher of a store without encryption."""


def make_cipher(key: StoreKey | bytes | None) -> StoreCipher:
    """Return the cipher of a key; raise `MissingDependencyError` if the package cryptography is missing."""
    if key is None:
        return NO_CIPHER
    return AeadCipher(key if isinstance(key, StoreKey) else StoreKey(key))


def check_key_matches(label: str, key_check: str, cipher: StoreCipher) -> None:
    """Raise `OptionError` if a store with this `key_check` is opened with another key, or with none."""
    if key_check == cipher.key_check:
        return
    if not cipher.key_check:
        raise OptionError(f"{label}: is encrypted: its key is needed (--key-file FILE, or {KEY_VARIABLE})")
    if not key_check:
        raise OptionError(
            f"{label}: is not encrypted, and there is a key ({cipher.key_source}): leave it out, or name a new store"
        )
    raise OptionError(f"{label}: is encrypted with another key than that of {cipher.key_source}")


def infer_key_check(samples: Iterable[tuple[str, Bytes]], cipher: StoreCipher) -> str | None:
    """Return the `key_check` that a store must have by names and bytes of its values; None if no value tells it.

    It is a text that no key has if values are sealed with a key other than that of `cipher`. One sealed value is
    enough, whatever others are there: without the key nothing may be added to such a store, or removed.
    """
    key_checks = set()
    for name, data in samples:
        head = data[: len(SEALED_MAGIC)].tobytes()
        if head != SEALED_MAGIC:
            if head.startswith(_PLAIN_MAGICS):
                key_checks.add("")
            continue
        try:
            cipher.unseal_head(data, name)
        except UnsealError:
            key_checks.add("?")
        else:
            key_checks.add(cipher.key_check or "?")
    sealed_checks = key_checks - {""}
    if not sealed_checks:
        return "" if key_checks else None
    return cipher.key_check if cipher.key_check in sealed_checks else "?"


def _derive_key(key: StoreKey, purpose: bytes) -> bytes:
    """Return the first block of HKDF-Expand (RFC 5869) with SHA-256."""
    return hmac.digest(key.secret, b"kvmnn prefix store: " + purpose + b"\x01", "sha256")


def _find_head(data: bytes, num_bytes: int) -> tuple[int, int]:
    """Return where the first part begins and ends."""
    if len(data) < _HEAD_STRUCT.size:
        raise UnsealError(f"has {num_bytes:,} bytes: too few for a sealed value")
    magic, head_bytes = _HEAD_STRUCT.unpack(data)
    end_byte = _HEAD_STRUCT.size + _PART_OVERHEAD_BYTES + head_bytes
    if magic != SEALED_MAGIC or end_byte > num_bytes:
        raise UnsealError("is not sealed as values of this store are")
    return _HEAD_STRUCT.size, end_byte
