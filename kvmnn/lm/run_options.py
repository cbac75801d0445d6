"""How a model is opened and run on one text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..policies.base import Policy
from ..runtime import RuntimeConfig
from .graph.onnx_sessions import CPU_PROVIDERS
from .runner import Runner
from .session import DecoderSession
from .tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a model runs, whatever it reads and whichever policy cuts its cache.

    Parameters
    ----------
    tokenizer
        Its ``tokenizer.json``; by default the one beside the model.
    chunk
        Tokens of the prompt that are fed at once; None feeds all in one step, which is what policies that act once on
        a prompt expect.
    packed
        Hold the cache in the packed layout of this backend (`Runner`).
    lossless
        Hold the cache in a lossless runtime of these options.
    threads
        Of onnxruntime; 0 leaves the number to it.
    providers
        Execution providers of onnxruntime, the preferred one first.
    """

    tokenizer: str | os.PathLike[str] | None = None
    chunk: int | None = None
    packed: str | None = None
    lossless: RuntimeConfig | None = None
    threads: int = 1
    providers: Sequence[str] = CPU_PROVIDERS

    def open_model(self, model: str | os.PathLike[str], policy: Policy) -> tuple[DecoderSession, Tokenizer]:
        """The model, with attention probabilities where the policy needs them, and its tokenizer.

        Raises
        ------
        MissingDependencyError
            Where onnxruntime, onnx or tokenizers is not installed.
        SourceError, ModelError
            As `DecoderSession.open` and `Tokenizer.open_for_model`.
        """
        tokenizer = Tokenizer.open_for_model(self.tokenizer or model)
        session = DecoderSession.open(
            model, attentions=policy.requires_attention, threads=self.threads, providers=self.providers
        )
        return session, tokenizer

    def create_runner(self, session: DecoderSession, policy: Policy) -> Runner:
        """The model with its cache under a policy."""
        return Runner(session, policy, packed=self.packed, lossless=self.lossless)
