"""Sessions of the shipped model that the tests of a process share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from repository import FIXTURES

from kvmnn._util.packages import import_optional
from kvmnn.lm import DecoderSession

MODEL_FOLDER = FIXTURES / "lm"
_sessions: dict[tuple[object, ...], DecoderSession] = {}


def share_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process open the shipped model once for all: a session is a function without state, and opening it took
    a third of short evaluations.
    """
    open_session = DecoderSession.open

    def open_once(path: Any, **options: Any) -> DecoderSession:
        if Path(path).resolve() not in (MODEL_FOLDER, MODEL_FOLDER / "model.onnx") or options.get("profile"):
            return open_session(path, **options)
        import_optional("onnxruntime"), import_optional("onnx")  # tests hide them
        key = (options.get("attentions", False), options.get("bias", True), options.get("threads", 1))
        key += (tuple(options.get("providers", ())), options.get("cache", True))
        if key not in _sessions:
            _sessions[key] = open_session(path, **options)
        return _sessions[key]

    monkeypatch.setattr(DecoderSession, "open", open_once)
