"""``--codec profile:FILE`` and the verbs that read layer streams."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import console, input_sources, shared_options
from .console import STDIO, UsageError

if TYPE_CHECKING:
    from ..formats.layer_streams.codecs import LayerStreamOptions
    from ..formats.layer_streams.document import LayerCodec

_CODEC_NAMES = ("profile", "transform")
_SETTING_TYPES: dict[str, dict[str, type[int] | type[float] | type[str]]] = {
    "profile": {"below": int},
    "transform": {
        "kl": float,
        "ratio": float,
        "bits": float,
        "below": int,
        "first": int,
        "recent": int,
        "attention": str,
    },
}


def is_layer_codec(codec: str | None) -> bool:
    """Return whether a value of ``--codec`` names a codec of layer streams."""
    return codec is not None and codec.partition(":")[0] in _CODEC_NAMES


def parse_codec(text: str) -> str:
    """Check a value of ``--codec``; raise `ArgumentTypeError` for anything else."""
    if text in ("mnn", "dense"):
        return text
    split_codec(text)
    return text


def parse_layer_codec(text: str) -> str:
    """Check a value of ``--codec`` of verbs that take codecs of layer streams only."""
    split_codec(text, "")
    return text


def split_codec(text: str, engine_codecs: str = "mnn, dense, ") -> tuple[str, str, dict[str, Any]]:
    """Return codec, profile and settings of ``profile:FILE,below=1``."""
    name, _, values = text.partition(":")
    path, *pairs = values.split(",")
    if name not in _CODEC_NAMES or not path:
        from ..frames.options import EFFORTS

        if name in EFFORTS:
            raise argparse.ArgumentTypeError(f"{text!r} is an effort of frames: expected --effort {name}")
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected {engine_codecs}profile:FILE[,below=N] or transform:FILE[,kl=0.002], where FILE is a "
            "profile (kvmnn profile make)"
        )
    settings: dict[str, Any] = {}
    types = _SETTING_TYPES[name]
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in types or key in settings:
            expected = ", ".join(f"{option}=FILE" if types[option] is str else f"{option}=N" for option in types)
            raise argparse.ArgumentTypeError(f"{text!r}: {key!r}: expected {expected}")
        if types[key] is str and not value:
            raise argparse.ArgumentTypeError(f"{text!r}: {key} is empty: expected {key}=FILE")
        try:
            settings[key] = types[key](value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: {key} is {value!r}: expected a number") from None
    return name, path, settings


def build_options(arguments: argparse.Namespace) -> LayerStreamOptions:
    """Build the options of ``--codec``."""
    return parse_options(arguments.codec, verify=not arguments.no_verify)


def parse_options(text: str, *, verify: bool = True) -> LayerStreamOptions:
    """Parse the options of a codec of layer streams, which was checked."""
    from ..formats.layer_streams.codecs import LayerStreamOptions

    name, path, settings = split_codec(text)
    codec: LayerCodec = "transform" if name == "transform" else "profile"
    attention = settings.pop("attention", None)
    return LayerStreamOptions(codec=codec, profile=path, settings=settings, verify=verify, attention=attention)


def add_codec_option(parser: Any, help_text: str, **settings: Any) -> None:
    """Add ``--codec`` for codecs of layer streams only."""
    defaults = {"type": parse_layer_codec, "metavar": "profile:FILE|transform:FILE"}
    parser.add_argument("--codec", help=help_text, **{**defaults, **settings})


def encode(arguments: argparse.Namespace) -> int:
    """Encode the inputs of ``kvmnn encode`` into a folder of layer streams."""
    from ..files.file_names import has_zarr_suffix
    from ..files.urls import is_url, redact_url
    from ..formats.layer_streams.writer import encode_layers

    if arguments.output in (None, STDIO):
        raise UsageError("--codec profile and transform write a folder: use -o DIR/")
    if has_zarr_suffix(arguments.output) or is_url(arguments.output):
        raise UsageError(
            f"-o {redact_url(arguments.output)}: --codec profile and transform write a local folder of whole layers, "
            "which a Zarr store cannot hold (docs/zarr.md): use -o DIR/"
        )
    idle_names = (
        *("effort", "predictors", "predictors_k", "predictors_v", "hi_predictors", "frame_bytes", "block"),
        *("allow_raw", "no_zstd", "rope"),
    )
    name = arguments.codec.partition(":")[0]
    shared_options.refuse_given(arguments, idle_names, f"is not about --codec {name}")
    source = input_sources.load(arguments.inputs, arguments, with_frames=True, used_options=("model",))
    input_sources.report_skipped(source, arguments)
    with console.progress_bar(arguments, source.nbytes, "encode") as step:
        result = encode_layers(source, arguments.output, build_options(arguments), force=arguments.force, progress=step)
    console.show_result(arguments, "encode", result, text=result.text(verbose=arguments.verbose))
    return 0


def decode(arguments: argparse.Namespace) -> int:
    """Decode layer streams for ``kvmnn decode``."""
    from ..formats.layer_streams.reader import restore_layers
    from ..formats.options import ReadOptions

    if arguments.output in (None, STDIO):
        raise UsageError("no output given: use -o X.npz, -o X.safetensors or -o DIR/")
    console.check_output_suffix(arguments, arguments.output)
    options = ReadOptions(profile=arguments.profile, threads=arguments.threads, max_bytes=arguments.max_bytes)
    with console.progress_bar(arguments, 0, "decode") as step:
        result = restore_layers(arguments.input, arguments.output, options, force=arguments.force, progress=step)
    input_sources.report_notes([note for note in result.notes if note not in result.losses], arguments)
    console.show_result(arguments, "decode", result)
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Verify layer streams for ``kvmnn verify``; return 1 for any difference."""
    from ..formats.layer_streams.reader import verify_layers

    against = input_sources.load(arguments.against, arguments, with_frames=True) if arguments.against else None
    with console.progress_bar(arguments, 0, "verify") as step:
        result = verify_layers(arguments.input, against, profile=arguments.profile, progress=step)
    if not result.ok:
        return console.show_failed_result(arguments, "verify", result)
    console.show_result(arguments, "verify", result)
    return 0
