"""What attention and the output projection make of errors in K and V: one matrix for each kv head.

An error e in un-rotated K at position p changes the score of a query q at position t by the product of e and of the
query turned back by p; the probability a of the pair changes by a (1 - a) times that. So the metric of K is the mean of
a (1 - a) R^T q q^T R over pairs. An error in V passes the output projection W: its metric is the sum of W^T W over the
query heads of the kv head.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.packages import import_optional
from ..dtypes import Floats, Part
from ..errors import KvmnnError
from ..files.mapped_file import MappedFile
from ..lm.onnx.attention import find_attention_nodes
from ..lm.onnx.interface import DecoderInterface
from ..lm.onnx.model_files import ModelFiles, read_onnx_graph, resolve_dir
from ..profiles import LayerGeometry
from ..profiles.statistics import NUM_SINKS

Metric = npt.NDArray[np.float64]
"""``[kv_head, dim, dim]``, the elements of a head in the order of rows."""
Metrics = dict[tuple[int, Part], Metric]

_MIN_WEIGHT = 1e-6
"""Pairs of a smaller a (1 - a) are left out: all of a long text together weigh less than one that counts."""
_LAYOUT_OPERATORS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Cast"}
_PRODUCT_OPERATORS = {"MatMul", "Gemm"}
_MAX_STEPS = 8


class KeyMetrics:
    """Sums of the metrics of K over queries.

    Parameters
    ----------
    layers
        Sizes and rotation of each layer.
    """

    def __init__(self, layers: Sequence[LayerGeometry]) -> None:
        self._layers = tuple(layers)
        self._sums = [np.zeros((layer.kv_heads, layer.head_dim, layer.head_dim)) for layer in layers]
        self._rotations: dict[bytes, npt.NDArray[np.complex64]] = {}
        self.num_queries = 0

    def add(self, queries: Sequence[Floats], attentions: Sequence[Floats]) -> None:
        """Add the queries of a step that reads the tokens right after those of a cache, which contains all of a text.

        Parameters
        ----------
        queries
            Of each layer, rotated: float32 ``[query_head, token, head_dim]``.
        attentions
            Probabilities of each layer: float32 ``[query_head, token, past + token]``.
        """
        self.num_queries += queries[0].shape[1]
        for geometry, sums, layer_queries, layer_attentions in zip(
            self._layers, self._sums, queries, attentions, strict=True
        ):
            weights = layer_attentions * (1 - layer_attentions)
            weights[..., :NUM_SINKS] = 0  # these are stored exactly
            group = len(layer_queries) // geometry.kv_heads
            for head, (head_queries, head_weights) in enumerate(zip(layer_queries, weights, strict=True)):
                for query, query_weights in zip(head_queries, head_weights, strict=True):
                    rows = self._unrotate_query(geometry, query, query_weights)
                    sums[head // group] += rows.T @ rows

    def to_metrics(self) -> Metrics:
        """Return the mean over all queries."""
        if not self.num_queries:
            raise KvmnnError("the metrics of K are of no queries")
        return {(layer, "key"): sums / self.num_queries for layer, sums in enumerate(self._sums)}

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the sums as arrays that `restore` takes."""
        arrays: dict[str, npt.NDArray[Any]] = {f"extras/{layer}/key/sums": s for layer, s in enumerate(self._sums)}
        return {**arrays, "extras/num_queries": np.array(self.num_queries)}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the sums of `to_arrays`; `ValueError` or `KeyError` for arrays of other layers."""
        for layer, sums in enumerate(self._sums):
            sums[:] = arrays[f"extras/{layer}/key/sums"]
        self.num_queries = int(arrays["extras/num_queries"])

    def _unrotate_query(self, geometry: LayerGeometry, query: Floats, weights: Floats) -> Floats:
        """Return the query rotated back by each position of enough weight, times the weight's root: ``[row, d]``."""
        positions = np.flatnonzero(weights > _MIN_WEIGHT)
        roots = np.sqrt(weights[positions])[:, None]
        if geometry.rope is None:
            return np.asarray(roots * query, np.float32)
        ordered = query[geometry.pair_order].astype(np.float32)
        dims = geometry.rope.dims
        pairs = ordered[:dims].view(np.complex64)
        rows = np.empty((len(positions), geometry.head_dim), np.float32)
        table = self._get_rotation(geometry, len(weights))[positions]
        rows[:, :dims] = (pairs * table * roots).view(np.float32)
        rows[:, dims:] = ordered[dims:] * roots
        return rows

    def _get_rotation(self, geometry: LayerGeometry, tokens: int) -> npt.NDArray[np.complex64]:
        """Return the factors that turn a pair back by positions from 0 on, complex64 ``[position, pair]``."""
        assert geometry.rope is not None
        key = geometry.rope.turns.tobytes()
        table = self._rotations.get(key)
        if table is None or len(table) < tokens:
            units = np.arange(2 * tokens, dtype=np.uint64)[:, None] * geometry.rope.turns
            table = np.exp(-2j * np.pi / 2.0**64 * units.view(np.int64)).astype(np.complex64)
            self._rotations[key] = table
        return table


def compute_value_metrics(
    files: ModelFiles, interface: DecoderInterface, layers: Sequence[LayerGeometry]
) -> Metrics | None:
    """Return the metrics of V of every layer from the output projections in a graph; None where these are not found."""
    model = read_onnx_graph(files.graph)
    weights = _OutputProjectionFinder(model).find([value for _, value in interface.past_inputs])
    if weights is None:
        return None
    metrics: Metrics = {}
    folder = resolve_dir(files.graph)
    for layer, (geometry, (tensor, is_transposed)) in enumerate(zip(layers, weights, strict=True)):
        matrix = _read_tensor(tensor, folder).astype(np.float64)
        matrix = matrix if is_transposed else matrix.T
        if matrix.ndim != 2 or matrix.shape[1] % (geometry.kv_heads * geometry.value_dim):
            return None
        by_head = matrix.reshape(len(matrix), geometry.kv_heads, -1, geometry.value_dim)
        order = geometry.get_order("value")
        metrics[layer, "value"] = np.einsum("okgi,okgj->kij", by_head, by_head, optimize=True)[:, order][:, :, order]
    return metrics


def _read_tensor(tensor: Any, folder: Path) -> npt.NDArray[Any]:
    """Read a weight; onnx's own reader refuses files that are linked, as those of model hubs are."""
    onnx = import_optional("onnx")
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        values: npt.NDArray[Any] = onnx.numpy_helper.to_array(tensor)
        return values
    entries = {entry.key: entry.value for entry in tensor.external_data}
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    shape, begin = tuple(tensor.dims), int(entries.get("offset", 0))
    data = MappedFile(folder / entries["location"]).view(begin, math.prod(shape) * dtype.itemsize)
    external: npt.NDArray[Any] = data.view(dtype.newbyteorder("<")).reshape(shape)
    return external


class _OutputProjectionFinder:
    """Finds, for each layer, the weight that multiplies what its attention gives."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self._producer = {name: node for node in model.graph.node for name in node.output}
        self._consumers: dict[str, list[Any]] = defaultdict(list)
        for node in model.graph.node:
            for name in node.input:
                self._consumers[name].append(node)

    def find(self, past_values: Sequence[str]) -> list[tuple[Any, bool]] | None:
        """Return the tensors and whether they lie ``[out, in]``; None unless every layer has one."""
        spans = find_attention_nodes(self._model, past_values)
        weights = [self._follow(span[-1].output[0]) for span in spans]
        complete = [weight for weight in weights if weight is not None]
        return complete if complete and len(complete) == len(past_values) else None

    def _follow(self, name: str) -> tuple[Any, bool] | None:
        for _ in range(_MAX_STEPS):
            node = next((n for n in self._consumers[name] if n.op_type in _LAYOUT_OPERATORS | _PRODUCT_OPERATORS), None)
            if node is None or node.input[0] != name:
                return None
            if node.op_type in _PRODUCT_OPERATORS:
                is_transposed = any(entry.name == "transB" and entry.i for entry in node.attribute)
                return self._find_weight(node.input[1], is_transposed)
            name = node.output[0]
        return None

    def _find_weight(self, name: str, is_transposed: bool) -> tuple[Any, bool] | None:
        while name in self._producer and self._producer[name].op_type in ("Cast", "Identity", "Transpose"):
            node = self._producer[name]
            name, is_transposed = node.input[0], is_transposed != (node.op_type == "Transpose")
        tensor = self._initializers.get(name)
        return None if tensor is None else (tensor, is_transposed)
