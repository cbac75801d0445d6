"""The exceptions that kvmnn raises."""

from __future__ import annotations

import errno
from typing import Final

REPLACE_HINT: Final = "overwrite=True or force=True"
"""What lets a function replace its output, in messages. The command puts its own option there."""


class KvmnnError(ValueError):
    """Base of kvmnn's errors: an invalid frame, file or value.

    The message names what and where, what was found and what was expected. Every rejection of a frame, file or value is
    this class or a subclass; wrong Python types raise `TypeError` instead.
    """


class OptionError(KvmnnError):
    """Options that conflict with each other or the input, or are incomplete. Exit code 2 of the command."""


class FrameError(KvmnnError):
    """Bytes that are not a frame which MNN would decode."""


class ArrayTypeError(KvmnnError, TypeError):
    """An array whose element type no cache has; also a `TypeError`."""


class LimitError(KvmnnError):
    """A size above a limit of the caller or of the format."""


class SourceError(KvmnnError):
    """A file or directory that cannot be read in the expected format."""


class MissingFileError(SourceError, FileNotFoundError):
    """A file or directory that does not exist; also a `FileNotFoundError`."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.ENOENT


def build_read_error(path: object, error: OSError) -> SourceError:
    """Build the error of a path that the system cannot read: `MissingFileError` if it is not there."""
    is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return (MissingFileError if is_missing else SourceError)(f"{path}: cannot be read: {error.strerror or error}")


class MissingOptionError(OptionError, SourceError):
    """A property that neither the input nor an option specifies: axes, type, geometry, prefix or stream."""


class UnsuitableOptionError(OptionError, SourceError):
    """An option that the input contradicts: an array it lacks, a shape, geometry or number of tokens it has not."""


class ManifestError(KvmnnError):
    """A manifest that is malformed or does not match its frames."""


class OutputError(KvmnnError):
    """An output that already exists or cannot be written."""


class MissingDependencyError(KvmnnError):
    """An optional package that is required is not installed."""


class WeightsError(KvmnnError):
    """A compressor weight file that breaks its format.

    Parameters
    ----------
    message
        What and where, what was found, what was expected.
    reason
        Short code for machines, e.g. ``"truncated_block"``; docs/compressor-weights.md lists them.
    offset
        Position in the file (bytes) of the field that is wrong.
    """

    def __init__(self, message: str, *, reason: str, offset: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.offset = offset


class CheckpointError(SourceError):
    """A checkpoint that is damaged, contains pickle code that is never executed, or has no compressor."""


class ModelError(KvmnnError):
    """An ONNX decoder without a cache that kvmnn can control; the message says what to export instead."""


class AttentionNotExposedError(ModelError):
    """Attention probabilities are required, but no tensor of the graph contains them."""


class CacheDroppedWarning(UserWarning):
    """The upstream dialect dropped a cache although reserve pairs retain tokens of it."""


class RestoreError(KvmnnError):
    """Stored rows that do not decode to the original: the cache must not be read.

    Parameters
    ----------
    layer, start, count
        The tokens and their layer.
    reason
        Reason of the failure.
    """

    def __init__(self, layer: int, start: int, count: int, reason: str) -> None:
        super().__init__(f"layer {layer}: tokens {start} to {start + count} cannot be restored: {reason}")
        self.layer, self.start, self.count = layer, start, count
