"""The sessions of a suite's model: each holds all weights, so they are open only as long as they are needed."""

from __future__ import annotations

import gc

from ...lm.graph.interface import DecoderInterface
from ...lm.graph.onnx_sessions import trim_heap
from ...lm.session import DecoderSession


class ModelSessions:
    """Sessions with and without attention probabilities, whose price is part of a candidate's speed.

    Parameters
    ----------
    model
        An ONNX decoder: file or folder.
    threads
        Of onnxruntime.

    Attributes
    ----------
    interface
        Sizes and names of the model.

    Raises
    ------
    SourceError, ModelError
        For a model that cannot be used.
    """

    def __init__(self, model: str, threads: int) -> None:
        self._model, self._threads = model, threads
        self._open: dict[bool, DecoderSession] = {}
        self.interface: DecoderInterface = self.get(attentions=False).interface

    def get(self, *, attentions: bool) -> DecoderSession:
        """Return the session, opened if it is not."""
        if attentions not in self._open:
            self._open[attentions] = DecoderSession.open(self._model, attentions=attentions, threads=self._threads)
        return self._open[attentions]

    def release(self, *, keep: bool | None = None) -> None:
        """Close the sessions, but the one whose `attentions` is `keep`: the next work does not need them."""
        self._open = {kind: session for kind, session in self._open.items() if kind is keep}
        gc.collect()
        trim_heap()
