"""A decoder's graph run by onnxruntime: its inputs and outputs.

Keys and values are plain numpy arrays on both sides. On the CPU that copies nothing: onnxruntime reads the arrays it is
given, and its outputs are numpy views of its own memory. Binding OrtValues instead (IOBinding) saves nothing there: a
step of the shipped model took 1.1, 2.9 and 4.0 ms at 128, 512 and 2,048 tokens in the past with numpy, and 2.2, 3.5 and
4.1 ms bound (fastest of 60, one thread, onnxruntime 1.31.1). On other devices the cache crosses to the host and back in
every step, which bound outputs would not spare either, since policies read and cut it on the host.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import KVPair
from ...errors import KvmnnError, ModelError
from .graph_rewrite import RewrittenGraph
from .interface import DecoderInterface
from .model_files import format_error


@dataclass
class StepResult:
    """Outputs of one step of the model."""

    #: float32 ``[token, vocab]``.
    logits: NDArray[np.float32]
    #: Keys and values of each layer, ``[1, kv_head, past + token, head_dim]``, past ones first; writable.
    present_pairs: list[KVPair]
    #: Probabilities of each layer, float32 ``[query_head, token, past + token]``; None where not asked for.
    attentions: list[NDArray[np.float32]] | None
    #: Time inside onnxruntime.
    seconds: float
    #: Rotated queries of each layer, float32 ``[query_head, token, head_dim]``; None where not asked for.
    queries: list[NDArray[np.float32]] | None = None
    #: Queries over which each row of `attentions` is summed; 1 where every token has its own row.
    num_summed: int = 1


class OnnxDecoder:
    """An onnxruntime session of a graph, its interface, and the tensors that were added to it."""

    def __init__(self, runtime: Any, interface: DecoderInterface, rewritten: RewrittenGraph) -> None:
        self.runtime = runtime
        self._bias_inputs = rewritten.biases
        self.interface = interface
        self.has_attentions = rewritten.attentions is not None
        self.has_bias = rewritten.biases is not None
        self.query_heads = rewritten.query_heads or interface.query_heads
        self._branch_input = None if rewritten.unmerged else interface.branch_input
        self._outputs = [interface.logits_output, *(name for pair in interface.present_outputs for name in pair)]
        self._attention_outputs = rewritten.attentions or ()
        self._zeros = np.zeros((1, 1, 1, 0), np.float32)
        self._ones = np.ones((1, 0), interface.types.get(interface.mask_input or "", np.int64))

    def create_empty_past(self) -> list[KVPair]:
        """Return a past of no tokens: K and V ``[1, kv_heads, 0, head_dim]`` for each layer."""
        shape = (1, self.interface.kv_heads, 0, self.interface.head_dim)
        dtype = self.interface.dtype
        return [(np.zeros(shape, dtype), np.zeros(shape, dtype)) for _ in range(self.interface.layers)]

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
        """Feed tokens; arguments and results are those of `DecoderSession.run_step`, which checks them."""
        feed = self._build_inputs(ids, positions, past)
        if self._bias_inputs is None:
            if bias is not None:
                raise KvmnnError(f"{self.interface.label}: no bias can be added to the scores inside this graph")
        else:
            feed.update(zip(self._bias_inputs, bias or self._build_zero_biases(past, len(ids)), strict=True))
        for layer, name in self.interface.key_position_inputs.items():
            if key_positions is not None and layer in key_positions:
                feed[name] = key_positions[layer]
            else:
                first = positions[0] - past[layer][0].shape[2]
                feed[name] = np.arange(first, positions[0] + len(ids))[None, None]
        has_attentions = self.has_attentions and attentions
        outputs = [*self._outputs, *(self._attention_outputs if has_attentions else ())]
        outputs += (self.interface.query_outputs or ()) if queries else ()
        start = time.perf_counter()
        try:
            results = self.runtime.run(outputs, feed)
        except Exception as error:  # onnxruntime's errors share no class
            raise self.build_error(f"onnxruntime failed: {format_error(error)}") from error
        seconds = time.perf_counter() - start
        layers, logits = self.interface.layers, results[0]
        if logits.ndim != 3 or logits.shape[1] != len(ids):
            raise self.build_error(
                f"{self.interface.logits_output} has shape {list(logits.shape)} for {len(ids)} tokens; "
                "export with the logits of every token"
            )
        present = [(results[1 + 2 * layer], results[2 + 2 * layer]) for layer in range(layers)]
        tensors = [  # for a batch of one, ``[head, query, key]`` whatever the graph's layout
            array.reshape(-1, *array.shape[-2:]).astype(np.float32, copy=False) for array in results[1 + 2 * layers :]
        ]
        return StepResult(
            logits[0].astype(np.float32, copy=False),
            present,
            tensors[:layers] if has_attentions else None,
            seconds,
            tensors[-layers:] if queries else None,
        )

    def build_error(self, message: str) -> ModelError:
        """Return an error that names the model."""
        return ModelError(f"{self.interface.label}: {message}")

    def _build_inputs(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], past: Sequence[KVPair]
    ) -> dict[str, Any]:
        interface = self.interface
        num_past = max(keys.shape[2] for keys, _ in past)
        total = num_past + len(ids)
        inputs: dict[str, Any] = {interface.ids_input: self._to_row(interface.ids_input, ids)}
        if interface.mask_input:
            if self._ones.shape[1] < total:
                self._ones = np.ones((1, 2 * total), self._ones.dtype)
            inputs[interface.mask_input] = self._ones[:, :total]
        if interface.positions_input:
            inputs[interface.positions_input] = self._to_row(interface.positions_input, positions)
        if interface.slots_input:
            inputs[interface.slots_input] = np.arange(num_past, total, dtype=interface.types[interface.slots_input])
        if interface.all_logits_input:
            shape = (1,) * interface.ranks[interface.all_logits_input]
            inputs[interface.all_logits_input] = np.zeros(shape, interface.types[interface.all_logits_input])
        if self._branch_input:
            inputs[self._branch_input] = np.full((1,) * interface.ranks[self._branch_input], num_past > 0)
        for (key_name, value_name), (keys, values) in zip(interface.past_inputs, past, strict=True):
            inputs[key_name], inputs[value_name] = keys, values
        return inputs

    def _to_row(self, name: str, values: NDArray[np.int64]) -> NDArray[Any]:
        return values[None].astype(self.interface.types[name], copy=False)

    def _build_zero_biases(self, past: Sequence[KVPair], num_new: int) -> list[NDArray[np.float32]]:
        totals = [keys.shape[2] + num_new for keys, _ in past]
        if self._zeros.shape[3] < max(totals):
            self._zeros = np.zeros((1, 1, 1, 2 * max(totals)), np.float32)
        return [self._zeros[..., :total] for total in totals]
