"""The exceptions that kvmnn raises."""

from __future__ import annotations


class KvmnnError(ValueError):
    """Something kvmnn was given is not what it must be.

    The message names what and where, what was found and what was expected. Every refusal of a frame, file or value is
    this class or one of its children; wrong Python types raise `TypeError` instead.
    """


class OptionError(KvmnnError):
    """Options that contradict each other or the input, or do not say enough. Exit code 2 of the command."""


class FrameError(KvmnnError):
    """Bytes that are not a frame MNN would decode."""


class ArrayTypeError(KvmnnError, TypeError):
    """An array of numbers of another type than words of a cache have; a `TypeError`, too."""


class LimitError(KvmnnError):
    """A size above a limit that the caller set or that the format has."""


class SourceError(KvmnnError):
    """A file or directory that cannot be read as what it should be."""


class MissingOptionError(OptionError, SourceError):
    """What an input does not say itself, and no option does: which axes, type, geometry, prefix or stream."""


class ManifestError(KvmnnError):
    """A manifest that is malformed or does not match its frames."""


class OutputError(KvmnnError):
    """An output that exists already or cannot be written."""


class MissingDependencyError(KvmnnError):
    """An optional package that this operation needs is not installed."""


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
    """A checkpoint that is damaged, asks for what is never executed, or holds no compressor."""


class ModelError(KvmnnError):
    """An ONNX decoder that cannot be run with its cache in kvmnn's hands; the message says what to export instead."""


class AttentionNotExposedError(ModelError):
    """Attention probabilities were asked for, and no tensor of the graph holds them."""


class CacheDroppedWarning(UserWarning):
    """The upstream dialect dropped a cache although reserve pairs asked for some of it to stay."""


class RestoreError(KvmnnError):
    """Stored rows that do not decode to what they were: the cache must not be read.

    Parameters
    ----------
    layer, start, count
        Which tokens of which layer.
    reason
        What is wrong with them.
    """

    def __init__(self, layer: int, start: int, count: int, reason: str) -> None:
        super().__init__(f"layer {layer}: tokens {start} to {start + count} cannot be restored: {reason}")
        self.layer, self.start, self.count = layer, start, count
