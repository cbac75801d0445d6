"""A language model as a function of tokens and a cache, which returns logits and the extended cache."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..dtypes import KVPair
from ..errors import KvmnnError
from ..policies.layer_parameters import LayerParameters
from .onnx.decoder import OnnxDecoder, StepResult
from .onnx.decoder_checks import UnequalLengthSupport, try_unequal_lengths
from .onnx.decoder_loader import create_decoder
from .onnx.graph_rewrite import RewrittenGraph
from .onnx.interface import read_interface
from .onnx.layer_parameters import read_layer_parameters
from .onnx.model_files import find_model, read_onnx_graph
from .onnx.onnx_session import CPU_PROVIDERS, SessionSettings
from .onnx.profile import SessionProfile

__all__ = ["DecoderSession", "StepResult"]


class DecoderSession:
    """An ONNX decoder whose KV cache is managed by the caller.

    Attributes
    ----------
    interface : DecoderInterface
        Sizes and names.
    query_heads : int or None
        From the model's settings or its attention; None where both are silent.
    has_attentions, has_bias : bool
        Whether steps report attention probabilities, and take a bias on the scores.
    """

    def __init__(self, decoder: OnnxDecoder, graph: Path = Path()) -> None:
        if not isinstance(decoder, OnnxDecoder):
            raise TypeError(f"a session is opened by DecoderSession.open(path), found a {type(decoder).__name__}")
        self._decoder = decoder
        self._graph = graph
        self._unequal_length_support: UnequalLengthSupport | None = None
        self.interface = decoder.interface
        self.query_heads = decoder.query_heads
        self.has_attentions = decoder.has_attentions
        self.has_bias = decoder.has_bias

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        attentions: bool = False,
        bias: bool = True,
        threads: int = 1,
        providers: Sequence[str] = CPU_PROVIDERS,
        cache: bool = True,
        profile: Path | None = None,
    ) -> DecoderSession:
        """Open a decoder.

        Parameters
        ----------
        path
            An ``.onnx`` file, or a folder with one (also in its subfolder ``onnx``) or with a ``genai_config.json``.
        attentions
            Report attention probabilities: the graph's own ``attentions.{i}``, or such outputs added to it.
        bias
            Let scores be masked, by inputs ``attention_bias.{i}`` added to the graph. Where that is impossible,
            `has_bias` is False.
        threads
            Threads of one operator; 0 leaves the number to onnxruntime.
        providers
            Execution providers of onnxruntime, the preferred one first.
        cache
            Store a changed graph for the next time, alongside the model (or in the user's cache directory).
        profile
            A folder for onnxruntime's profile, which `open_profile` reads; the caller removes it.

        Raises
        ------
        MissingDependencyError
            If onnx or onnxruntime is not installed.
        SourceError
            If there is no model, or its file is damaged.
        ModelError
            If the model cannot run with an external cache; the message states what to export instead.
        AttentionNotExposedError
            If no tensor of the graph contains the attention probabilities.
        KvmnnError
            For a provider that is not installed.
        """
        settings = SessionSettings(threads, providers, profile)
        settings.check()
        files = find_model(path)
        interface = read_interface(read_onnx_graph(files.graph), files)
        decoder = create_decoder(files, interface, settings, attentions=attentions, bias=bias, cache=cache)
        return cls(decoder, files.graph)

    def share(self, *, attentions: bool) -> DecoderSession | None:
        """Return a session of the same graph in memory that reports attention probabilities, or none.

        Returns
        -------
        DecoderSession or None
            None where that needs another graph: only graphs with inputs for the bias, and outputs for attention, of
            their own have both (`kvmnn model import` makes such graphs). Results are the same as of a session of its
            own.
        """
        interface = self.interface
        if interface.bias_inputs is None or (attentions and interface.attention_outputs is None):
            return None
        rewritten = RewrittenGraph(
            attentions=interface.attention_outputs if attentions else None, biases=interface.bias_inputs
        )
        session = type(self)(OnnxDecoder(self._decoder.runtime, interface, rewritten), self._graph)
        session._unequal_length_support = self._unequal_length_support
        return session

    def open_profile(self) -> SessionProfile:
        """Return the profile of a session that was opened with one; raise `ModelError` if it shows no attention."""
        return SessionProfile(self._decoder.runtime, self.interface)

    def read_layer_parameters(self) -> list[LayerParameters]:
        """Return rotations and output weights of every layer, as far as the graph shows them."""
        return read_layer_parameters(self._graph, self.interface)

    def create_empty_past(self) -> list[KVPair]:
        """Return a past of no tokens: K and V ``[1, kv_heads, 0, head_dim]`` for each layer."""
        return self._decoder.create_empty_past()

    def run_step(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        past: Sequence[KVPair],
        bias: Sequence[NDArray[np.float32]] | None = None,
        key_positions: Mapping[int, NDArray[np.int64]] | None = None,
        *,
        attentions: bool = True,
        queries: bool = False,
    ) -> StepResult:
        """Feed tokens.

        Parameters
        ----------
        ids
            int64 ``[token]``.
        positions
            Their true positions in the text, int64 ``[token]``, whatever was evicted.
        past
            Keys and values of each layer, ``[1, kv_head, past, head_dim]``, C-contiguous; only read.
        bias
            For each layer float32 ``[1, 1 or query_head, 1, past + token]``, added to the scores before the softmax:
            0 for a live slot; ``numpy.finfo(float32).min`` masks a slot, as long as its keys and values are finite.
            None is all zeros.
        key_positions
            For layers with a window whose graph takes them (`DecoderInterface.key_position_inputs`): true positions of
            past and new tokens, int64 ``[1, 1 or query_head, past + token]``. A layer that is absent holds the tokens
            right before the new ones.
        attentions
            Whether a session with attention probabilities returns those of this step.
        queries
            Whether the rotated queries are returned as well (`DecoderInterface.query_outputs`).

        Raises
        ------
        ModelError
            If onnxruntime fails, or layers of unequal lengths would make this graph's results wrong.
        KvmnnError
            If the arguments do not fit together, or a bias is given although `has_bias` is False.
        """
        label = self.interface.label
        if queries and self.interface.query_outputs is None:
            raise KvmnnError(f"{label}: has no outputs queries.0 and so on: kvmnn model import makes graphs with them")
        if ids.ndim != 1 or not len(ids) or positions.shape != ids.shape:
            raise KvmnnError(
                f"{label}: expected tokens and their positions, one row each, not empty; "
                f"found shapes {list(ids.shape)} and {list(positions.shape)}"
            )
        if len(past) != self.interface.layers:
            raise KvmnnError(f"{label}: expected the past of {self.interface.layers} layers, found {len(past)}")
        if len({keys.shape[2] for keys, _ in past}) > 1:
            self.check_unequal_lengths()
            if self.probe_unequal_lengths() == "single" and len(ids) > 1:
                raise self._decoder.build_error(
                    "takes one token at a time while its layers hold different numbers of tokens"
                )
        return self._decoder.run_step(ids, positions, past, bias, key_positions, attentions=attentions, queries=queries)

    def probe_unequal_lengths(self) -> UnequalLengthSupport:
        """Test, once, how tokens may be fed while layers store different numbers of tokens.

        Returns
        -------
        ``"chunks"``: any number at once. ``"single"``: one at a time. ``"none"``: not at all.
        """
        if self._unequal_length_support is None:
            self._unequal_length_support = try_unequal_lengths(self._decoder)
        return self._unequal_length_support

    def can_chunk_unequal_lengths(self) -> bool:
        """Return whether several tokens may be fed in one step while layers store different numbers of tokens."""
        return self.probe_unequal_lengths() == "chunks"

    def check_unequal_lengths(self) -> None:
        """Raise `ModelError` for a graph whose layers cannot store different numbers of tokens."""
        if self.probe_unequal_lengths() == "none":
            raise self._decoder.build_error(
                "its layers must hold equally many tokens; evict in all layers alike (no skip_layers), or export "
                "without GroupQueryAttention and with position_ids"
            )
