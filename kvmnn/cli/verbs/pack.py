"""``kvmnn pack``: plain arrays to prefix-cache files."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import loading, packed_options, prefix_output, shared_options
from ..printing import UsageError

if TYPE_CHECKING:
    from ...arrays.layers import LayerArray
    from ...arrays.source import Source
    from ...packed.cache_info import CacheInfo

_TEXT = """Pack plain arrays into a prefix cache that the engine loads: <name>_<layer>.k and .v, their markers, and
<name>.kvmnn.json, from which kvmnn knows what the files hold.

IN is anything that kvmnn reads: arrays called layer_<n>.key and layer_<n>.value, past_key_values.<n>.key and .value, or
k and v with the layer as first of four axes; a KV dump; a bundle of frames. Shapes are [kv_head, token, head_dim]
(--token-major: [token, kv_head, head_dim]).

Layout: --backend, or --lp and --hp; what unpack or encode noted down is taken where nothing is said. Every file is read
back and compared before it appears."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "pack", run, "plain arrays to a prefix cache", _TEXT)
    parser.add_argument("inputs", nargs="+", metavar="IN")
    prefix_output.add_target(parser)
    shared_options.add_source(parser, "what the words are (default: the arrays' own type; raw words need it)")
    parser.add_argument("--token-major", action="store_true", help="the arrays are [token, kv_head, head_dim]")
    parser.add_argument("--cast", action="store_true", help="convert to the backend's dtype; LOSSY if it is narrower")
    packed_options.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    prefix_output.required_output(arguments)
    source = loading.load(arguments.inputs, arguments, frames=True)
    loading.report_skipped(source, arguments)
    arrays = prefix_output.layers_of(source, arguments)
    info = _target(source, arrays, arguments)
    started = time.perf_counter()
    packed = prefix_output.write(arguments, arrays, info, arguments.inputs, "pack")
    prefix_output.report(arguments, "pack", packed, time.perf_counter() - started, source.notes)
    return 0


def _target(source: Source, arrays: list[LayerArray], arguments: argparse.Namespace) -> CacheInfo:
    from ...formats.mnn.model import fingerprint
    from ...formats.mnn.prefix_writing import plan

    known, dtype = source.cache, arrays[0].array.dtype
    layout = prefix_output.only_layout(arguments, arrays, known.layout if known else None, dtype)
    if layout.dtype != dtype and not arguments.cast:
        raise UsageError(f"the arrays are {dtype}, the layout holds {layout.dtype}: --cast converts them")
    info = plan(arrays, layout, prefix_output.prefix_name(arguments, known), capacity=arguments.capacity, like=known)
    ids = packed_options.token_ids(arguments.token_ids)
    tokens = {layer.tokens for layer in info.layers}
    if arguments.tokens and tokens != set(arguments.tokens):
        raise UsageError(f"the arrays have {max(tokens)} tokens, --tokens says {max(arguments.tokens)}")
    if ids and known is None and tokens != {ids.count}:
        raise UsageError(f"the arrays have {max(tokens)} tokens, {arguments.token_ids} has {ids.count} ids")
    return replace(
        info,
        token_ids=ids or info.token_ids,
        model=fingerprint(arguments.model) if arguments.model else info.model,
    )
