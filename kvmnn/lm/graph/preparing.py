"""From a model's file to the graph that runs: operated on where needed, proved, kept."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import AttentionNotExposedError, ModelError
from .attention import find_attention
from .decoder import Decoder
from .graph_file import external_tensors, home, opset, read_graph, relocate_weights, to_bytes
from .interface import DecoderInterface
from .kept_graphs import GraphCache, forget_facts
from .model_files import ModelFiles
from .onnx_sessions import Settings, start
from .proof import Expected, expect, fault
from .surgery import Operated, add_biases, expose
from .tensor_types import infer_types
from .unmerging import unmerge


def start_decoder(
    files: ModelFiles, interface: DecoderInterface, settings: Settings, *, attentions: bool, bias: bool, cache: bool
) -> Decoder:
    """A running decoder that gives attention probabilities and takes biases, as far as asked for and possible.

    Parameters
    ----------
    files, interface
        The model.
    settings
        How to run it.
    attentions
        Attention probabilities are needed.
    bias
        Biases are welcome.
    cache
        Keep the operated graph for the next time.

    Raises
    ------
    AttentionNotExposedError
        When `attentions` cannot be had.
    ModelError
        When onnxruntime does not take the graph.
    """
    own = Operated(attentions=interface.attentions if attentions else None)
    expose_them = attentions and interface.attentions is None
    bias = bias and interface.has_positions
    if not (expose_them or bias):
        return _plain(files, interface, settings, own)
    wanted = "+".join(name for name, on in (("attentions", attentions), ("bias", bias)) if on)
    kept = GraphCache(files.graph, wanted) if cache else None
    found = kept.find() if kept else None
    if found:
        path, operated = found
        try:
            return Decoder(start(path, path.parent, settings, files.label), interface, operated)
        except ModelError:  # it was damaged, or onnxruntime was built otherwise; made anew
            found = None
    expected: Expected | None = None
    reason = ""
    for with_bias in [True, False] if bias else [False]:
        if not (with_bias or expose_them):
            break
        model = read_graph(files.graph)
        relocate_weights(model, files.graph)
        operated = _operate(model, interface, attentions=attentions, bias=with_bias)
        if with_bias and operated.biases is None:
            continue
        forget_facts(model)
        has_external = any(True for _ in external_tensors(model))
        graph = to_bytes(model, files.label)
        del model  # here and below: a large model is held once at a time
        with kept.stage(graph, has_external=has_external) if kept else nullcontext() as staged:
            source: Path | bytes = staged.path if staged else graph
            del graph
            if expected is None:
                expected = expect(_plain(files, interface, settings, Operated()))
            try:
                runtime = start(source, home(files.graph), settings, files.label)
            except ModelError as error:
                reason = str(error)
                continue
            decoder = Decoder(runtime, interface, operated)
            reason = fault(expected, decoder) or ""
            if reason:
                continue
            if operated.attentions:
                probe = decoder.run(np.zeros(1, np.int64), np.zeros(1, np.int64), decoder.empty())
                operated = replace(operated, query_heads=len(probe.attentions[0]) if probe.attentions else None)
            if staged:
                staged.keep(operated)
            return Decoder(runtime, interface, operated)
    if expose_them:
        raise AttentionNotExposedError(
            f"{files.label}: attention probabilities were found, but the graph that hands them out fails: {reason}; "
            'export with eager attention and without fusion (attn_implementation="eager")'
        )
    return _plain(files, interface, settings, own)


def _plain(files: ModelFiles, interface: DecoderInterface, settings: Settings, operated: Operated) -> Decoder:
    return Decoder(start(files.graph, home(files.graph), settings, files.label), interface, operated)


def _operate(model: Any, interface: DecoderInterface, *, attentions: bool, bias: bool) -> Operated:
    """Change `model` in place."""
    unmerged = interface.branch is not None and unmerge(model, interface.branch)
    names = interface.attentions if attentions else None
    biases = None
    found = find_attention(model, opset(model), [value for _, value in interface.past])
    types = infer_types(model)
    if attentions and names is None:
        names = expose(model, found, types, interface.label)
    if bias:
        biases = add_biases(model, found, types)
    return Operated(names, biases, unmerged)
