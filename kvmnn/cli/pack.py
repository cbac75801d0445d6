"""``kvmnn pack``: plain arrays to prefix-cache files."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import _common, _packed, _prefix_output
from ._common import UsageError

if TYPE_CHECKING:
    from ..cache_info import CacheInfo
    from ..layer_arrays import LayerArray
    from ..sources import Source

_TEXT = """Pack plain arrays into a prefix cache that the engine loads: <name>_<layer>.k and .v, their markers, and
<name>.kvmnn.json, from which kvmnn knows what the files hold.

IN is anything that kvmnn reads: arrays called layer_<n>.key and layer_<n>.value, past_key_values.<n>.key and .value, or
k and v with the layer as first of four axes; a KV dump; a bundle of frames. Shapes are [kv_head, token, head_dim]
(--token-major: [token, kv_head, head_dim]).

Layout: --backend, or --lp and --hp; what unpack or encode noted down is taken where nothing is said. Every file is read
back and compared before it appears."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = _common.add_verb(verbs, "pack", run, "plain arrays to a prefix cache", _TEXT)
    parser.add_argument("inputs", nargs="+", metavar="IN")
    _prefix_output.add_target(parser)
    _common.add_source(parser, "what the words are (default: the arrays' own type; raw words need it)")
    parser.add_argument("--token-major", action="store_true", help="the arrays are [token, kv_head, head_dim]")
    parser.add_argument("--cast", action="store_true", help="convert to the backend's dtype; LOSSY if it is narrower")
    _packed.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    _prefix_output.required_output(arguments)
    source = _common.load(arguments.inputs, arguments, frames=True)
    _common.report_skipped(source, arguments)
    arrays = _prefix_output.layers_of(source, arguments)
    info = _target(source, arrays, arguments)
    started = time.perf_counter()
    packed = _prefix_output.write(arguments, arrays, info, arguments.inputs, "pack")
    _prefix_output.report(arguments, "pack", packed, time.perf_counter() - started, source.notes)
    return 0


def _target(source: Source, arrays: list[LayerArray], arguments: argparse.Namespace) -> CacheInfo:
    from ..packing import plan
    from ..sources.mnn_model import fingerprint

    known, dtype = source.cache, arrays[0].array.dtype
    layout = _prefix_output.only_layout(arguments, arrays, known.layout if known else None, dtype)
    if layout.dtype != dtype and not arguments.cast:
        raise UsageError(f"the arrays are {dtype}, the layout holds {layout.dtype}: --cast converts them")
    info = plan(arrays, layout, _prefix_output.prefix_name(arguments, known), capacity=arguments.capacity, like=known)
    ids = _packed.token_ids(arguments.token_ids)
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
