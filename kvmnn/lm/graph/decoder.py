"""A decoder's graph run by onnxruntime: what it is fed, what it gives.

Keys and values are plain numpy arrays on both sides. On the CPU that copies nothing: onnxruntime reads the arrays it is
given, and its outputs are numpy views of its own memory. Binding OrtValues instead (IOBinding) saves nothing there: a
step of the shipped model took 1.1, 2.9 and 4.0 ms at 128, 512 and 2,048 tokens in the past with numpy, and 2.2, 3.5 and
4.1 ms bound (fastest of 60, one thread, onnxruntime 1.31.1). On other devices the cache crosses to the host and back in
every step, which bound outputs would not spare either, since policies read and cut it on the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import KVPair
from ...errors import KvmnnError, ModelError
from .graph_file import one_line
from .interface import DecoderInterface
from .surgery import Operated


@dataclass
class Step:
    """What one step of the model gave.

    Attributes
    ----------
    logits
        float32 ``[token, vocab]``.
    present
        Keys and values of each layer, ``[1, kv_head, past + token, head_dim]``, past ones first; writable.
    attentions
        Probabilities of each layer, float32 ``[query_head, token, past + token]``; None where not asked for.
    seconds
        Time inside onnxruntime.
    """

    logits: NDArray[np.float32]
    present: list[KVPair]
    attentions: list[NDArray[np.float32]] | None
    seconds: float


class Decoder:
    """A graph and the session that runs it.

    Parameters
    ----------
    runtime
        An ``onnxruntime.InferenceSession``.
    interface
        Names and sizes of the graph.
    operated
        What was added to it.
    """

    def __init__(self, runtime: Any, interface: DecoderInterface, operated: Operated) -> None:
        self.runtime = runtime
        self._operated = operated
        self.interface = interface
        self.has_attentions = operated.attentions is not None
        self.has_bias = operated.biases is not None
        self.query_heads = operated.query_heads or interface.query_heads
        self._branch = None if operated.unmerged else interface.branch
        self._outputs = [interface.logits, *(name for pair in interface.present for name in pair)]
        self._outputs += operated.attentions or ()
        self._zeros = np.zeros((1, 1, 1, 0), np.float32)
        self._ones = np.ones((1, 0), interface.types.get(interface.mask or "", np.int64))

    def empty(self) -> list[KVPair]:
        """A past of no tokens: K and V ``[1, kv_heads, 0, head_dim]`` for each layer."""
        shape = (1, self.interface.kv_heads, 0, self.interface.head_dim)
        kind = self.interface.dtype
        return [(np.zeros(shape, kind), np.zeros(shape, kind)) for _ in range(self.interface.layers)]

    def run(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        past: Sequence[KVPair],
        bias: Sequence[NDArray[np.float32]] | None = None,
    ) -> Step:
        """Feed tokens; the arguments and results of `DecoderSession.step`, whose checks come before this."""
        feed = self._feed(ids, positions, past)
        self._feed_bias(feed, len(ids), past, bias)
        start = time.perf_counter()
        try:
            results = self.runtime.run(self._outputs, feed)
        except Exception as error:  # onnxruntime's errors share no class
            raise self.error(f"onnxruntime failed: {one_line(error)}") from error
        return self._step(results, len(ids), time.perf_counter() - start)

    def error(self, message: str) -> ModelError:
        """A refusal that names the model."""
        return ModelError(f"{self.interface.label}: {message}")

    def _feed(self, ids: NDArray[np.int64], positions: NDArray[np.int64], past: Sequence[KVPair]) -> dict[str, Any]:
        interface = self.interface
        held = max(keys.shape[2] for keys, _ in past)
        total = held + len(ids)
        feed: dict[str, Any] = {interface.ids: self._row(interface.ids, ids)}
        if interface.mask:
            feed[interface.mask] = self._mask(total)
        if interface.positions:
            feed[interface.positions] = self._row(interface.positions, positions)
        if interface.slots:
            feed[interface.slots] = np.arange(held, total, dtype=interface.types[interface.slots])
        if interface.all_logits:
            shape = (1,) * interface.ranks[interface.all_logits]
            feed[interface.all_logits] = np.zeros(shape, interface.types[interface.all_logits])
        if self._branch:
            feed[self._branch] = np.full((1,) * interface.ranks[self._branch], held > 0)
        for (key_name, value_name), (keys, values) in zip(interface.past, past, strict=True):
            feed[key_name], feed[value_name] = keys, values
        return feed

    def _row(self, name: str, values: NDArray[np.int64]) -> NDArray[Any]:
        return values[None].astype(self.interface.types[name], copy=False)

    def _feed_bias(
        self, feed: dict[str, Any], tokens: int, past: Sequence[KVPair], bias: Sequence[NDArray[np.float32]] | None
    ) -> None:
        names = self._operated.biases
        if names is None:
            if bias is not None:
                raise KvmnnError(f"{self.interface.label}: no bias can be added to the scores inside this graph")
        elif bias is not None:
            feed.update(zip(names, bias, strict=True))
        else:
            for name, (keys, _) in zip(names, past, strict=True):
                feed[name] = self._no_bias(keys.shape[2] + tokens)

    def _mask(self, total: int) -> NDArray[Any]:
        if self._ones.shape[1] < total:
            self._ones = np.ones((1, 2 * total), self._ones.dtype)
        return self._ones[:, :total]

    def _no_bias(self, total: int) -> NDArray[np.float32]:
        if self._zeros.shape[3] < total:
            self._zeros = np.zeros((1, 1, 1, 2 * total), np.float32)
        return self._zeros[..., :total]

    def _step(self, results: list[Any], tokens: int, seconds: float) -> Step:
        layers = self.interface.layers
        logits = results[0]
        if logits.ndim != 3 or logits.shape[1] != tokens:
            raise self.error(
                f"{self.interface.logits} has shape {list(logits.shape)} for {tokens} tokens; "
                "export with the logits of every token"
            )
        present = [(results[1 + 2 * layer], results[2 + 2 * layer]) for layer in range(layers)]
        attentions = None
        if self.has_attentions:
            attentions = [_by_head(array) for array in results[1 + 2 * layers :]]
        return Step(logits[0].astype(np.float32, copy=False), present, attentions, seconds)


def _by_head(probabilities: NDArray[Any]) -> NDArray[np.float32]:
    """``[head, query, key]`` of whatever layout a graph has for a batch of one."""
    return probabilities.reshape(-1, *probabilities.shape[-2:]).astype(np.float32, copy=False)
