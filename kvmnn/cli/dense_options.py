"""Options for dense streams: the codec, the rotation of K, and ``--rerotate``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import console, layer_stream_options, packed_options, shared_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..arrays.source import Source
    from ..bundle import DenseOptions, EncodeResult
    from ..dense import RopeConfig

CODEC_CHOICES = ("mnn", "dense")
SOURCE_TEXT_OPTIONS = ("model", "token_ids")
"""Options about packed files that dense streams use as well."""

_ROPE_EXAMPLE = "theta=10000,dims=64"


def add_codec_options(parser: Any) -> None:
    """Add ``--codec`` and ``--rope``."""
    parser.add_argument(
        "--codec",
        action=shared_options.SingleValueAction,
        type=layer_stream_options.parse_codec,
        metavar="mnn|dense|profile:FILE|transform:FILE",
        help="mnn: frames (the default of arrays); dense: streams of K and V for kvmnn alone, smaller; "
        "profile:FILE[,below=N]: by a model's profile, smaller still; transform:FILE[,kl=0.002] (also ratio, bits, "
        "below, recent, attention=FILE): LOSSY, a fraction of that",
    )
    add_rope_option(parser)


def add_rope_option(parser: Any) -> None:
    """Add ``--rope``."""
    parser.add_argument(
        "--rope",
        type=_parse_rope_or_none,
        metavar=f"{_ROPE_EXAMPLE}[,pairing=interleaved]|none",
        help="with dense: how K was rotated; without it, --model DIR says so in its config.json, --model FILE.gguf in "
        "its header; where neither does it is found by trial, if it can be",
    )


def check_codec_options(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for options that contradict each other."""
    if arguments.codec != "dense":
        shared_options.refuse_given(arguments, ["rope"], "needs --codec dense")
    elif arguments.no_zstd:
        raise console.UsageError("--no-zstd is about engines, and none reads dense streams: leave it out")


FRAME_OPTIONS = (
    *("effort", "predictors", "predictors_k", "predictors_v", "hi_predictors"),
    *("frame_bytes", "block", "allow_raw"),
)
"""Options that dense streams do not use."""


def note_idle_frame_options(arguments: argparse.Namespace, result: EncodeResult) -> None:
    """Print a note for each frame option that had no effect because no frame was made."""
    if any(not frame.is_dense for array in result.manifest.arrays for frame in array.frames):
        return
    given_options = dict.fromkeys(
        shared_options.get_option_name(arguments, name)
        for name in FRAME_OPTIONS
        if shared_options.was_given(arguments, name)
    )
    if given_options:
        console.print_note(
            arguments, f"all arrays became dense streams: {' and '.join(given_options)} changed none of them"
        )


def build_dense_options(arguments: argparse.Namespace, source: Source, *, with_search: bool = True) -> DenseOptions:
    """Build the dense options from the arguments, or find the rotation by trial.

    Notes report what a model's configuration or the trial contributed.
    """
    from ..bundle import DenseOptions, search_layer_rope, search_rope
    from ..bundle.dense import plan_arrays

    ids = packed_options.load_ids(arguments) if arguments.token_ids is not None else None
    rope_by_layer = _read_layer_ropes(arguments, source)
    if rope_by_layer:
        return DenseOptions(layer_rotary=rope_by_layer, token_ids=ids)
    dense_options = DenseOptions(rotary=read_rope(arguments, source), token_ids=ids)
    if not with_search or arguments.rope is not None or dense_options.rotary is not None:
        return dense_options
    if not any(plan.part == "key" for plan in plan_arrays(source, dense_options).values()):
        return dense_options
    if rope_by_layer := search_layer_rope(source, dense_options):
        console.print_note(
            arguments, f"rotation of K, found by trial: {_format_layer_ropes(rope_by_layer)} (--model says it)"
        )
        return replace(dense_options, layer_rotary=rope_by_layer)
    rope = search_rope(source, dense_options)
    rope_text = "none found by trial, K is encoded as V is" if rope is None else f"{rope}, found by trial"
    console.print_note(arguments, f"rotation of K: {rope_text} (--rope or --model says it)")
    return replace(dense_options, rotary=rope)


def _read_layer_ropes(arguments: argparse.Namespace, source: Source) -> dict[int, RopeConfig | None]:
    """Return the rotation of K of each layer, if the header of ``--model FILE.gguf`` has several."""
    from ..formats.llama import read_rotations

    if arguments.rope is not None or not packed_options.is_gguf(arguments.model):
        return {}
    rope_by_layer, notes = read_rotations(arguments.model)
    if not rope_by_layer:
        return {}
    if "k-order" in (source.inverted_transforms or ()):
        rope_by_layer = {layer: rope and replace(rope, pairing="half") for layer, rope in rope_by_layer.items()}
    states = source.completeness.layers if source.completeness is not None else ()
    present_layers = {state.layer for state in states if state.included} if states else set(rope_by_layer)
    rope_by_layer = {layer: rope for layer, rope in rope_by_layer.items() if layer in present_layers}
    for line in [*notes, f"rotation of K: {_format_layer_ropes(rope_by_layer)}, as {arguments.model} says"]:
        console.print_note(arguments, line)
    return rope_by_layer


def _format_layer_ropes(rope_by_layer: Mapping[int, RopeConfig | None]) -> str:
    """Format each rotation and its layers."""
    from .._util.text import format_layers

    groups: dict[str, list[int]] = {}
    for layer, rope in rope_by_layer.items():
        groups.setdefault("none" if rope is None else str(rope), []).append(layer)
    return ", ".join(f"{text} in {format_layers(layers)}" for text, layers in groups.items())


def read_rope(arguments: argparse.Namespace, source: Source) -> RopeConfig | None:
    """Return ``--rope``, or the rotation in the configuration of ``--model``; print notes about the latter."""
    if arguments.rope is not None or arguments.model is None:
        specified: RopeConfig | str | None = arguments.rope
        return None if isinstance(specified, str) else specified
    model_rope, notes = read_model_rope(arguments.model, source)
    if model_rope is not None:
        notes.append(f"rotation of K: {model_rope}, as {arguments.model} says")
    for line in notes:
        console.print_note(arguments, line)
    return model_rope


def read_model_rope(model: str, source: Source) -> tuple[RopeConfig | None, list[str]]:
    """Return the rotation in a folder's configuration or graph or a .gguf header, and notes for missing parameters."""
    from ..formats import read_config_rotary
    from ..formats.llama import read_gguf_rotary

    if packed_options.is_gguf(model):
        rope, notes = read_gguf_rotary(model)
        if rope is not None and "k-order" in (source.inverted_transforms or ()):
            rope = replace(rope, pairing="half")
        return rope, notes
    rope, notes = read_config_rotary(model, max((array.shape[-1] for array in source.arrays if array.shape), default=1))
    if rope is None:  # exports of MNN have it in the graph alone
        from ..formats.mnn.rope import read_graph_rotary

        rope = read_graph_rotary(model)
        notes = notes if rope is None else []
    return rope, notes


def _parse_rope_or_none(text: str) -> RopeConfig | str:
    return text if text == "none" else parse_rope(text)


def parse_rope(text: str) -> RopeConfig:
    """Parse ``theta=10000,dims=64,pairing=interleaved``; raise `ArgumentTypeError` for anything else."""
    from ..dense import RopeConfig
    from ..errors import KvmnnError

    value_by_name: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("theta", "dims", "pairing") or name in value_by_name:
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected {_ROPE_EXAMPLE} and, for neighbours, pairing=interleaved"
            )
        value_by_name[name] = value
    try:
        theta, dims = float(value_by_name.get("theta", "10000")), int(value_by_name.get("dims", "0"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers, as in {_ROPE_EXAMPLE}") from None
    if "dims" not in value_by_name:
        raise argparse.ArgumentTypeError(f"{text!r} does not say how many words of a head are rotated: {_ROPE_EXAMPLE}")
    try:
        return RopeConfig(theta=theta, dims=dims, pairing=value_by_name.get("pairing", "half"))
    except KvmnnError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def add_rerotate_options(parser: Any) -> None:
    """Add ``--rerotate`` and ``--rope``."""
    parser.add_argument(
        "--rerotate",
        action="store_true",
        help="rotate K of an evicted cache to the positions 0, 1, 2 ..., where MNN continues after loading (LOSSY)",
    )
    parser.add_argument(
        "--rope",
        type=_parse_rope_or_model,
        metavar="theta=10000,dims=64[,pairing=interleaved]|MODEL",
        help="with --rerotate: how K is rotated, or a model that has it (a folder, config.json, FILE.gguf); without it "
        "--model has it, or it is found by trial",
    )


def check_rerotate_options(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for ``--rope`` without ``--rerotate``."""
    if not arguments.rerotate:
        shared_options.refuse_given(arguments, ["rope"], "needs --rerotate")


def _parse_rope_or_model(text: str) -> RopeConfig | str:
    return parse_rope(text) if text.startswith(("theta=", "dims=", "pairing=")) else text
