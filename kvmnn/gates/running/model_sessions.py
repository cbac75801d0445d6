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
        self._open_sessions: dict[bool, DecoderSession] = {}
        self.interface: DecoderInterface = self.get(attentions=False).interface

    def get(self, *, attentions: bool) -> DecoderSession:
        """Return the session, opened if it is not."""
        if attentions not in self._open_sessions:
            self._open_sessions[attentions] = DecoderSession.open(
                self._model, attentions=attentions, threads=self._threads
            )
        return self._open_sessions[attentions]

    def release(self, *, kept_kind: bool | None = None) -> None:
        """Close the sessions, but the one whose `attentions` is `kept_kind`: the next work does not need them."""
        self._open_sessions = {
            has_attentions: session
            for has_attentions, session in self._open_sessions.items()
            if has_attentions is kept_kind
        }
        gc.collect()
        trim_heap()
