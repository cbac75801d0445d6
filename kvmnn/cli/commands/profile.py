"""``kvmnn profile``: profiles of models, by which K and V are coded."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import console, dense_options, shared_options
from ..console import UsageError

_MIN_TOKENS = 64
_MAKE_DESCRIPTION = """\
Make the profile of a model: what its K and V look like on texts, which encode --codec profile:FILE and transform:FILE
need. A profile belongs to the model; make it once, of texts like those to come.

MODEL reads the texts in windows of up to 2,048 tokens, once; then K and V of each layer are rounded in turn, and what
that costs in predictions is measured. That takes minutes for a model of 100 million parameters, and what was done is
kept in OUT.partial, where an interrupted command goes on.

--from makes a profile without a model, of caches alone (all that kvmnn opens, each from the first token of a text on):
for lossless streams it is as good, lossy ones then round all layers alike."""


def add_make_parser(subparsers: Any) -> None:
    """Declare ``kvmnn profile make``."""
    parser = shared_options.add_command(
        subparsers,
        "make",
        run_make,
        "the profile of a model, of texts or of caches",
        _MAKE_DESCRIPTION,
        examples=(
            "kvmnn profile make smollm2-135m --text texts/ -o smollm2.kvmp",
            "kvmnn profile make model/ --text a.txt b.txt --tokens 32768 -o model.kvmp",
            "kvmnn profile make --from kv/a kv/b -o model.kvmp",
        ),
        shown="--text --from --tokens --output",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="an ONNX decoder: file, folder or a pulled model")
    parser.add_argument("--text", nargs="+", metavar="FILE", help="texts that it reads, or folders of them")
    parser.add_argument("--from", dest="caches", nargs="+", metavar="CACHE", help="caches instead of a model and texts")
    parser.add_argument(
        "--tokens",
        dest="num_tokens",
        type=_parse_tokens,
        default=8192,
        metavar="N",
        help="tokens of the texts that are read (default: 8,192)",
    )
    parser.add_argument(
        "--below",
        type=_parse_below,
        default=(2,),
        metavar="N[,N]",
        help="tables of streams in which 0, 1 or 2 layers below predict a layer (default: 2)",
    )
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=("lossless", "lossy"),
        help="only the tables of profile:FILE, or only those of transform:FILE (default: both)",
    )
    parser.add_argument(
        "--transform",
        choices=("joint", "head", "diagonal", "none"),
        default="joint",
        help="how lossy streams turn rows: by one basis of all heads (the smallest streams), one for each head (less "
        "than a third of the tables, faster), or none, with and without weights of the elements (default: joint)",
    )
    dense_options.add_rope_option(parser)
    parser.accept("--threads")
    shared_options.add_output_option(parser, "the profile, .kvmp")


def _parse_tokens(text: str) -> int:
    tokens = shared_options.parse_positive(text)
    if tokens < _MIN_TOKENS:
        raise argparse.ArgumentTypeError(f"{text}: expected at least {_MIN_TOKENS} tokens")
    return tokens


def _parse_below(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not set(numbers) <= {"0", "1", "2"} or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of 0, 1 and 2, such as 0,2")
    return tuple(map(int, numbers))


def run_make(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn profile make``."""
    from ...calibration import ProfileOptions, make_profile, make_profile_from_caches

    if arguments.output in (None, console.STDIO):
        raise UsageError("no output given: use -o FILE.kvmp")
    if (arguments.model is None) == (arguments.caches is None):
        raise UsageError("expected either MODEL with --text, or --from with caches")
    options = ProfileOptions(
        tokens=arguments.num_tokens,
        below=arguments.below,
        threads=arguments.threads or 1,
        purpose=arguments.purpose,
        transform=arguments.transform,
    )
    with console.progress_bar(arguments, 0, "profile", unit="step") as step:
        if arguments.caches is not None:
            shared_options.refuse_given(arguments, ["text", "num_tokens"], "needs a MODEL")
            result = make_profile_from_caches(
                arguments.caches,
                arguments.output,
                options,
                rope=arguments.rope or "auto",
                overwrite=arguments.force,
                progress=step,
            )
        else:
            shared_options.refuse_given(arguments, ["rope"], "needs --from: a model's configuration says it")
            if not arguments.text:
                raise UsageError("no texts given: use --text FILE")
            with _note_partial(arguments):
                result = make_profile(
                    arguments.model, arguments.text, arguments.output, options, overwrite=arguments.force, progress=step
                )
    console.show_result(arguments, "profile make", result)
    return 0


@contextmanager
def _note_partial(arguments: argparse.Namespace) -> Iterator[None]:
    """Say where an interrupted command goes on."""
    try:
        yield
    except BaseException as error:
        folder = f"{arguments.output}.partial"
        if not isinstance(error, Exception) and Path(folder).is_dir():
            console.print_note(arguments, f"what was done is kept in {folder}: the same command goes on from there")
        raise


_INSPECT_DESCRIPTION = """\
Show what a profile is of: the model, texts, sizes and rotation of each layer, and its tables."""


def add_inspect_parser(subparsers: Any) -> None:
    """Declare ``kvmnn profile inspect``."""
    parser = shared_options.add_command(
        subparsers,
        "inspect",
        run_inspect,
        "what a profile is of, and its tables",
        _INSPECT_DESCRIPTION,
        examples=(
            "kvmnn profile inspect smollm2.kvmp",
            "kvmnn profile inspect smollm2.kvmp --json",
            "kvmnn profile inspect smollm2.kvmp --quiet",
        ),
        shown="",
    )
    parser.add_argument("input", metavar="FILE", help="a profile, .kvmp")
    shared_options.accept_table(parser)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn profile inspect``."""
    from ...profiles import inspect_profile

    console.show_result(arguments, "profile inspect", inspect_profile(arguments.input))
    return 0


_VERIFY_DESCRIPTION = """\
Check every byte of a profile against its checksums. With --against it must also be the profile of that model; another
model ends with exit code 1."""


def add_verify_parser(subparsers: Any) -> None:
    """Declare ``kvmnn profile verify``."""
    parser = shared_options.add_command(
        subparsers,
        "verify",
        run_verify,
        "check the checksums of a profile, and its model",
        _VERIFY_DESCRIPTION,
        examples=(
            "kvmnn profile verify smollm2.kvmp",
            "kvmnn profile verify smollm2.kvmp --against smollm2-135m",
            "kvmnn profile verify smollm2.kvmp --json",
        ),
        shown="--against",
    )
    parser.add_argument("input", metavar="FILE", help="a profile, .kvmp")
    parser.add_argument("--against", metavar="MODEL", help="the model that it should be of")


def run_verify(arguments: argparse.Namespace) -> int:
    """Carry ``kvmnn profile verify`` out; return 1 for another model."""
    from ...lm import compute_fingerprint
    from ...profiles import verify_profile

    fingerprint = None if arguments.against is None else compute_fingerprint(arguments.against)
    result = verify_profile(arguments.input, fingerprint)
    if not result.ok:
        return console.show_failed_result(arguments, "profile verify", result)
    console.show_result(arguments, "profile verify", result)
    return 0
