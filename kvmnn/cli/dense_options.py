"""Options about dense streams: which codec, and what K and V were computed with."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import engine_options, idle_options, packed_options, printing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..arrays.source import Source
    from ..bundle import DenseOptions, Encoded
    from ..dense import Rotary

CODECS = ("mnn", "dense")
TEXT = ("model", "token_ids")
"""Options about packed files that dense streams use as well."""

_ROPE = "theta=10000,dims=64"


def add_codec(parser: Any, *, required: bool = False) -> None:
    """``--codec`` and ``--rope``."""
    parser.add_argument(
        "--codec",
        choices=CODECS,
        default=None if required else "mnn",
        required=required,
        help=f"mnn: frames{'' if required else ' (default)'}; dense: streams of K and V for kvmnn alone, smaller",
    )
    add_rope(parser)


def add_rope(parser: Any) -> None:
    """``--rope``."""
    parser.add_argument(
        "--rope",
        type=_rope,
        metavar=f"{_ROPE}[,pairing=interleaved]|none",
        help="with dense: how K was rotated; without it, --model DIR says so in its config.json, --model FILE.gguf in "
        "its header; where neither does it is found by trial, if it can be",
    )


def add_text(parser: Any) -> None:
    """``--model`` and ``--token-ids``, for verbs that have nothing else to ask of them."""
    parser.add_argument("--model", metavar="DIR", help="with dense: a model whose config.json says how K was rotated")
    parser.add_argument(
        "--token-ids", metavar="IDS", help="with dense: ids of the text: 5,7,9 or a file: a JSON list, numbers, .npy"
    )


def check(arguments: argparse.Namespace) -> None:
    """`UsageError` for options that do not go together."""
    if arguments.codec != "dense":
        idle_options.refuse(arguments, ["rope"], "needs --codec dense")
    elif arguments.no_zstd:
        raise printing.UsageError("--no-zstd is about engines, and none reads dense streams: leave it out")


_OF_FRAMES = (
    *("effort", "predictors", "predictors_k", "predictors_v", "hi_predictors"),
    *("frame_bytes", "block", "allow_raw"),
)


def note_idle(arguments: argparse.Namespace, made: Encoded) -> None:
    """A note for options about frames, where none was made."""
    if any(not frame.is_dense for array in made.manifest.arrays for frame in array.frames):
        return
    if given := [idle_options.option(arguments, name) for name in _OF_FRAMES if idle_options.given(arguments, name)]:
        printing.note(arguments, f"all arrays became dense streams: {' and '.join(given)} changed none of them")


def options(arguments: argparse.Namespace, source: Source, *, trial: bool = True) -> DenseOptions:
    """What the arguments say, or a trial finds; notes for what a configuration or the trial says."""
    from ..bundle import DenseOptions, find_layer_rotations, find_rotary
    from ..bundle.dense_pieces import plan_arrays

    ids = packed_options.loaded_ids(arguments) if arguments.token_ids is not None else None
    by_layer = _layer_rotations(arguments, source)
    if by_layer:
        return DenseOptions(layer_rotary=by_layer, token_ids=ids)
    said = DenseOptions(rotary=rotary(arguments, source), token_ids=ids)
    if not trial or arguments.rope is not None or said.rotary is not None:
        return said
    if not any(plan.part == "key" for plan in plan_arrays(source, said).values()):
        return said
    if by_layer := find_layer_rotations(source, said):
        printing.note(arguments, f"rotation of K, found by trial: {_spell_rotations(by_layer)} (--model says it)")
        return replace(said, layer_rotary=by_layer)
    found = find_rotary(source, said)
    what = "none found by trial, K is encoded as V is" if found is None else f"{found}, found by trial"
    printing.note(arguments, f"rotation of K: {what} (--rope or --model says it)")
    return replace(said, rotary=found)


def _layer_rotations(arguments: argparse.Namespace, source: Source) -> dict[int, Rotary | None]:
    """Return how K of each layer is rotated, where the header of ``--model FILE.gguf`` has several ways."""
    from ..formats.llama import read_rotations

    if arguments.rope is not None or not engine_options.is_gguf(arguments.model):
        return {}
    found, notes = read_rotations(arguments.model)
    if not found:
        return {}
    if "k-order" in (source.undone or ()):
        found = {layer: each and replace(each, pairing="half") for layer, each in found.items()}
    present = set(source.completeness.included_layers if source.completeness is not None else found)
    found = {layer: each for layer, each in found.items() if layer in present}
    for line in [*notes, f"rotation of K: {_spell_rotations(found)}, as {arguments.model} says"]:
        printing.note(arguments, line)
    return found


def _spell_rotations(found: Mapping[int, Rotary | None]) -> str:
    """Return each rotation and its layers."""
    from ..arrays.layer_states import spell_layers

    groups: dict[str, list[int]] = {}
    for layer, each in found.items():
        groups.setdefault("none" if each is None else str(each), []).append(layer)
    return ", ".join(f"{text} in {spell_layers(layers)}" for text, layers in groups.items())


def rotary(arguments: argparse.Namespace, source: Source) -> Rotary | None:
    """``--rope``, or what the configuration of ``--model`` says; notes for what it does not."""
    if arguments.rope is not None or arguments.model is None:
        said: Rotary | str | None = arguments.rope
        return None if isinstance(said, str) else said
    found, notes = model_rotary(arguments.model, source)
    if found is not None:
        notes.append(f"rotation of K: {found}, as {arguments.model} says")
    for line in notes:
        printing.note(arguments, line)
    return found


def model_rotary(model: str, source: Source) -> tuple[Rotary | None, list[str]]:
    """What a folder's configuration or the header of a .gguf says; lines for what it does not."""
    from ..formats import read_rotary
    from ..formats.llama import read_gguf_rotary

    if engine_options.is_gguf(model):
        found, notes = read_gguf_rotary(model)
        if found is not None and "k-order" in (source.undone or ()):
            found = replace(found, pairing="half")
        return found, notes
    return read_rotary(model, max((array.shape[-1] for array in source.arrays if array.shape), default=1))


def _rope(text: str) -> Rotary | str:
    return text if text == "none" else parse_rope(text)


def parse_rope(text: str) -> Rotary:
    """Parse ``theta=10000,dims=64,pairing=interleaved``; `ArgumentTypeError` for anything else."""
    from ..dense import Rotary
    from ..errors import KvmnnError

    said: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("theta", "dims", "pairing") or name in said:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {_ROPE} and, for neighbours, pairing=interleaved")
        said[name] = value
    try:
        theta, dims = float(said.get("theta", "10000")), int(said.get("dims", "0"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers, as in {_ROPE}") from None
    if "dims" not in said:
        raise argparse.ArgumentTypeError(f"{text!r} does not say how many words of a head are rotated: {_ROPE}")
    try:
        return Rotary(theta=theta, dims=dims, pairing=said.get("pairing", "half"))
    except KvmnnError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
