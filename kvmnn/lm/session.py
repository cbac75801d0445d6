"""One step of a decoder by onnxruntime, with the cache in the caller's hands."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import KvmnnError, ModelError
from .attention import find_attention
from .graph_file import one_line, opset, read_graph
from .interface import DecoderInterface, read_interface
from .model_files import ModelFiles, find_model
from .packages import package
from .surgery import Operated, add_biases, expose
from .tensor_types import infer_types

Floats: TypeAlias = NDArray[np.floating[Any]]
Pair: TypeAlias = tuple[Floats, Floats]

_SILENT = 4  # onnxruntime prints errors that it raises as well; ours name the model
_CPU = ("CPUExecutionProvider",)


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
    present: list[Pair]
    attentions: list[NDArray[np.float32]] | None
    seconds: float


class DecoderSession:
    """A decoder that runs one step at a time.

    Attributes
    ----------
    interface
        Sizes and names.
    query_heads
        Where it is known.
    has_attentions
        Whether steps report attention probabilities.
    has_bias
        Whether steps take a bias on the scores.
    """

    def __init__(self, runtime: Any, interface: DecoderInterface, operated: Operated) -> None:
        self._runtime = runtime
        self.interface = interface
        self._operated = operated
        self.query_heads = interface.query_heads
        self.has_attentions = operated.attentions is not None
        self.has_bias = operated.biases is not None
        self._outputs = [interface.logits, *(name for pair in interface.present for name in pair)]
        self._outputs += operated.attentions or ()
        self._zeros = np.zeros((1, 1, 1, 0), np.float32)
        self._ones = np.zeros((1, 0), interface.types.get(interface.mask or "", np.int64))

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        attentions: bool = False,
        bias: bool = True,
        threads: int = 1,
        providers: Sequence[str] = _CPU,
        cache: bool = True,
    ) -> DecoderSession:
        """Open a decoder."""
        files = find_model(path)
        model = read_graph(files.graph)
        interface = read_interface(model, files)
        operated = _operate(model, interface, attentions=attentions, bias=bias)
        return cls(_start(model, files, threads, providers), interface, operated)

    def empty(self) -> list[Pair]:
        """A past of no tokens: K and V ``[1, kv_heads, 0, head_dim]`` for each layer."""
        shape = (1, self.interface.kv_heads, 0, self.interface.head_dim)
        kind = self.interface.dtype
        return [(np.zeros(shape, kind), np.zeros(shape, kind)) for _ in range(self.interface.layers)]

    def step(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        past: Sequence[Pair],
        bias: Sequence[NDArray[np.float32]] | None = None,
    ) -> Step:
        """Feed tokens."""
        feed = self._feed(ids, positions, past)
        self._feed_bias(feed, len(ids), past, bias)
        start = time.perf_counter()
        try:
            results = self._runtime.run(self._outputs, feed)
        except Exception as error:  # onnxruntime's errors share no class
            raise ModelError(f"{self.interface.label}: onnxruntime failed: {one_line(error)}") from error
        seconds = time.perf_counter() - start
        return self._step(results, seconds)

    def chunks_with_unequal_lengths(self) -> bool:
        """Whether several tokens can be fed at once on layers of unequal lengths."""
        return True

    def _feed(self, ids: NDArray[np.int64], positions: NDArray[np.int64], past: Sequence[Pair]) -> dict[str, Any]:
        interface = self.interface
        total = max(keys.shape[2] for keys, _ in past) + len(ids)
        feed: dict[str, Any] = {interface.ids: ids[None].astype(interface.types[interface.ids], copy=False)}
        if interface.mask:
            feed[interface.mask] = self._mask(total)
        if interface.positions:
            feed[interface.positions] = positions[None].astype(interface.types[interface.positions], copy=False)
        for (key_name, value_name), (keys, values) in zip(interface.past, past, strict=True):
            feed[key_name], feed[value_name] = keys, values
        return feed

    def _feed_bias(
        self, feed: dict[str, Any], tokens: int, past: Sequence[Pair], bias: Sequence[NDArray[np.float32]] | None
    ) -> None:
        names = self._operated.biases
        if names is None:
            if bias is not None:
                raise KvmnnError(f"{self.interface.label}: this graph takes no bias on its scores")
            return
        if bias is not None:
            feed.update(zip(names, bias, strict=True))
            return
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

    def _step(self, results: list[Any], seconds: float) -> Step:
        layers = self.interface.layers
        logits = results[0][0].astype(np.float32, copy=False)
        present = [(results[1 + 2 * layer], results[2 + 2 * layer]) for layer in range(layers)]
        attentions = None
        if self.has_attentions:
            attentions = [_by_head(array) for array in results[1 + 2 * layers :]]
        return Step(logits, present, attentions, seconds)


def _by_head(probabilities: NDArray[Any]) -> NDArray[np.float32]:
    """``[head, query, key]`` of whatever layout a graph has for a batch of one."""
    return probabilities.reshape(-1, *probabilities.shape[-2:]).astype(np.float32, copy=False)


def _operate(model: Any, interface: DecoderInterface, *, attentions: bool, bias: bool) -> Operated:
    names = interface.attentions if attentions else None
    biases = None
    if bias or (attentions and names is None):
        found = find_attention(model, opset(model), [value for _, value in interface.past])
        types = infer_types(model)
        if attentions and names is None:
            names = expose(model, found, types, interface.label)
        if bias and interface.has_positions:
            biases = add_biases(model, found, types)
    return Operated(names, biases)


def _start(model: Any, files: ModelFiles, threads: int, providers: Sequence[str]) -> Any:
    runtime = package("onnxruntime")
    available = runtime.get_available_providers()
    for provider in providers:
        if provider not in available:
            raise KvmnnError(f"onnxruntime has no provider {provider}; it has {', '.join(available)}")
    options = runtime.SessionOptions()
    options.log_severity_level = _SILENT
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(files.graph.absolute().parent)
    )
    try:
        return runtime.InferenceSession(model.SerializeToString(), options, providers=list(providers))
    except Exception as error:  # onnxruntime's errors share no class
        raise ModelError(f"{files.label}: onnxruntime does not take this graph: {one_line(error)}") from error
