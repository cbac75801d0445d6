"""Load a model's file as a running graph: rewritten if needed, checked for equivalence, and cached."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import AttentionNotExposedError, ModelError
from .attention import find_attention
from .decoder import OnnxDecoder
from .decoder_checks import ReferenceOutputs, check_equivalence, compute_reference
from .graph_cache import GraphCache, strip_metadata
from .graph_rewrite import RewrittenGraph, add_biases, expose_attention, infer_types, split_merged_decoder
from .interface import DecoderInterface
from .model_files import (
    ModelFiles,
    get_opset,
    iter_external_tensors,
    read_onnx_graph,
    relocate_weights,
    resolve_dir,
    serialize_model,
)
from .onnx_session import SessionSettings, create_session


def create_decoder(
    files: ModelFiles,
    interface: DecoderInterface,
    settings: SessionSettings,
    *,
    attentions: bool,
    bias: bool,
    cache: bool,
) -> OnnxDecoder:
    """Create a decoder with attention probabilities and a bias input, as far as requested and possible."""
    plain_rewrite = RewrittenGraph(attentions=interface.attention_outputs if attentions else None)
    exposes_attention = attentions and interface.attention_outputs is None
    if interface.bias_inputs is not None:  # nothing has to be added
        plain_rewrite = replace(plain_rewrite, biases=interface.bias_inputs)
        bias = False
    bias = bias and interface.has_positions
    if not (exposes_attention or bias):
        return _create_plain_decoder(files, interface, settings, plain_rewrite)
    variant = "+".join(name for name, is_enabled in (("attentions", attentions), ("bias", bias)) if is_enabled)
    graph_cache = GraphCache(files.graph, variant) if cache else None
    cached = graph_cache.find() if graph_cache else None
    if cached:
        path, rewritten = cached
        try:
            return OnnxDecoder(create_session(path, path.parent, settings, files.label), interface, rewritten)
        except ModelError:  # it was damaged, or onnxruntime was built otherwise; made again
            cached = None
    reference: ReferenceOutputs | None = None
    reason = ""
    for with_bias in [True, False] if bias else [False]:
        if not (with_bias or exposes_attention):
            break
        model = read_onnx_graph(files.graph)
        relocate_weights(model, files.graph)
        rewritten = _rewrite_graph(model, interface, attentions=attentions, bias=with_bias)
        if with_bias and rewritten.biases is None:
            continue
        strip_metadata(model)
        has_external = any(True for _ in iter_external_tensors(model))
        graph = serialize_model(model, files.label)
        del model  # here and below: a large model is held once at a time
        with graph_cache.stage_graph(graph, has_external=has_external) if graph_cache else nullcontext() as staged:
            source: Path | bytes = staged.path if staged else graph
            del graph
            if reference is None:
                reference = compute_reference(_create_plain_decoder(files, interface, settings, RewrittenGraph()))
            try:
                runtime = create_session(source, resolve_dir(files.graph), settings, files.label)
            except ModelError as error:
                reason = str(error)
                continue
            decoder = OnnxDecoder(runtime, interface, rewritten)
            reason = check_equivalence(reference, decoder) or ""
            if reason:
                continue
            if rewritten.attentions:
                probe = decoder.run_step(np.zeros(1, np.int64), np.zeros(1, np.int64), decoder.create_empty_past())
                rewritten = replace(rewritten, query_heads=len(probe.attentions[0]) if probe.attentions else None)
            if staged:
                staged.commit(rewritten)
            return OnnxDecoder(runtime, interface, rewritten)
    if exposes_attention:
        raise AttentionNotExposedError(
            f"{files.label}: attention probabilities were found, but the graph that hands them out fails: {reason}; "
            'export with eager attention and without fusion (attn_implementation="eager")'
        )
    return _create_plain_decoder(files, interface, settings, plain_rewrite)


def _create_plain_decoder(
    files: ModelFiles, interface: DecoderInterface, settings: SessionSettings, rewritten: RewrittenGraph
) -> OnnxDecoder:
    return OnnxDecoder(
        create_session(files.graph, resolve_dir(files.graph), settings, files.label), interface, rewritten
    )


def _rewrite_graph(model: Any, interface: DecoderInterface, *, attentions: bool, bias: bool) -> RewrittenGraph:
    """Rewrite `model` in place."""
    is_unmerged = interface.branch_input is not None and split_merged_decoder(model, interface.branch_input)
    names = interface.attention_outputs if attentions else None
    bias_inputs = None
    attention_info = find_attention(model, get_opset(model), [value for _, value in interface.past_inputs])
    types = infer_types(model)
    if attentions and names is None:
        names = expose_attention(model, attention_info, types, interface.label)
    if bias:
        bias_inputs = add_biases(model, attention_info, types)
    return RewrittenGraph(names, bias_inputs, is_unmerged)
