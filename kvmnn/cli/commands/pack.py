"""``kvmnn pack``: plain arrays to prefix-cache files."""

from __future__ import annotations

import argparse
from typing import Any

from .. import console, dense_options, input_sources, packed_options, shared_options
from ..console import UsageError

_DESCRIPTION = """\
Pack plain arrays into a prefix cache that the engine loads: <name>_<layer>.k and .v, their markers, and
<name>.kvmnn.json, from which kvmnn knows what the files hold.

IN is anything that kvmnn reads: arrays called layer_<n>.key and layer_<n>.value, past_key_values.<n>.key and .value, or
k and v with the layer as first of four axes; a KV dump; a bundle of frames. Shapes are [kv_head, token, head_dim]
(--token-major: [token, kv_head, head_dim]).

Layout: --backend, or --lp and --hp; what unpack or encode noted down is taken where nothing is said. Every file is read
back and compared before it appears.

Where tokens were evicted, MNN needs to be told the length of the text after loading (the result shows the line of C++),
or K rotated to the first positions: --rerotate."""


_USED_OPTIONS = ("tokens", "model", "backend", "kv_heads", "head_dim", "lp", "hp", "flash_block", "token_ids", "name")
"""Options about packed files that here are about those that are written."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(subparsers, "pack", run, "plain arrays to a prefix cache", _DESCRIPTION)
    parser.add_argument("inputs", nargs="+", metavar="IN", help="arrays, a dump, a bundle")
    packed_options.add_target_options(parser)
    shared_options.add_source(parser, "what the words are (default: the arrays' own type; raw words need it)")
    parser.add_argument("--token-major", action="store_true", help="the arrays are [token, kv_head, head_dim]")
    parser.add_argument("--cast", action="store_true", help="convert to the backend's dtype; LOSSY if it is narrower")
    dense_options.add_rerotate_options(parser)
    packed_options.add_packed_options(parser, with_undo=True)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...formats.mnn import pack

    dense_options.check_rerotate_options(arguments)
    if arguments.output is None and len(arguments.inputs) > 1:
        raise UsageError("no output given for several inputs: use -o DIR/")
    output = console.choose_output(arguments, arguments.inputs[0], ".packed/")
    source = input_sources.load(
        arguments.inputs, arguments, with_frames=True, as_numbers=arguments.cast, used_options=_USED_OPTIONS
    )
    input_sources.report_skipped(source, arguments)
    is_gguf = packed_options.is_gguf(arguments.model)
    with console.progress_bar(arguments, source.nbytes, "pack") as step:
        pack_result = pack(
            source,
            output,
            packed_options.build_geometry(arguments),
            name=arguments.name,
            capacity=arguments.capacity,
            expected_tokens=arguments.tokens,
            token_ids=packed_options.hash_token_ids(arguments),
            model=None if is_gguf else arguments.model,
            token_major=arguments.token_major,
            cast=arguments.cast,
            rerotate=arguments.rerotate,
            rope=arguments.model if is_gguf and arguments.rope is None else arguments.rope,
            force=arguments.force,
            progress=step,
        )
    input_sources.report_notes(pack_result.notes[len(source.notes) :], arguments)
    console.show_result(arguments, "pack", pack_result)
    return 0
