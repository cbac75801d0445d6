"""``kvmnn compressor``: convert, verify, inspect, export and run weight files of KV compressors."""

from __future__ import annotations

import argparse
import os
from typing import Any

from .. import batch, console, input_sources, packed_options, shared_options, weights_options
from ..console import STDIO, UsageError

_CONVERT_DESCRIPTION = """\
Convert a KV-cache compressor's checkpoint (.pth, .pt, .safetensors) to a KVCM weight file (.bin). The bytes are those
of the published converter. Nothing in the checkpoint is executed, and torch is not needed.

Rounding to fp16 or bf16 is to the nearest; fp32 keeps every value of a float32 checkpoint.

For a .safetensors file of kvmnn compressor export, the defaults are those of the exported weight file: type, header
fields and metadata. What kvmnn compressor verify refuses is not written."""


def add_convert_parser(subparsers: Any) -> None:
    """Declare ``kvmnn compressor convert``."""
    parser = shared_options.add_command(
        subparsers,
        "convert",
        run_convert,
        "a compressor's .pth to the engine's .bin",
        _CONVERT_DESCRIPTION,
        examples=(
            "kvmnn compressor convert model.pth",
            "kvmnn compressor convert model.pth model.bin --dtype bf16",
            "kvmnn compressor convert export.safetensors -o model.bin -f",
        ),
        shown="--output --dtype --compression-factor --min-seq-len --num-heads --head-dim --metadata",
    )
    parser.add_argument("source", nargs="?", metavar="IN", help="checkpoint (- for standard input)")
    parser.add_argument(
        "target", nargs="?", metavar="OUT", help="weight file (- for standard output; default: IN as .bin)"
    )
    shared_options.add_output_option(parser, "the same as the second argument")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), help="type of the weights (default: fp16)")
    parser.accept("--max-input-bytes")
    weights_options.add_header_options(parser)
    weights_options.add_order_options(parser)
    parser.add_argument(
        "--as-reference",
        action="store_true",
        help="also write what no loader takes or verify refuses, and leave out biases of another length",
    )


def run_convert(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn compressor convert``."""
    from ...compressor import prepare_conversion

    source, target = _resolve_paths(arguments)
    if console.is_directory_output(target):
        raise UsageError(f"{target}: is a directory: expected the name of a weight file (.bin)")
    to_stdout = target == STDIO
    if to_stdout and arguments.json:
        raise UsageError("--json and the weights both want standard output: name an output file")
    weight_plan = prepare_conversion(
        source,
        weights_options.build_convert_options(arguments, as_reference=arguments.as_reference),
        specified_options=weights_options.list_given_options(arguments),
        max_bytes=arguments.max_bytes,
    )
    stdout = console.Stdout()
    with console.progress_bar(arguments, weight_plan.nbytes, "convert") as step:
        convert_result = weight_plan.write_weight_file(
            stdout if to_stdout else target, overwrite=arguments.force, progress=step
        )
        if to_stdout:
            stdout.flush()
    weights_options.report_notices(arguments, convert_result.warnings, convert_result.notices)
    console.show_result(arguments, "convert", convert_result, data_on_stdout=to_stdout)
    return 0


def _resolve_paths(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return input and output, which is an argument or an option."""
    paths = [path for path in (arguments.source, arguments.target, arguments.output) if path is not None]
    if len(paths) == 1 and arguments.output is None:
        return paths[0], console.choose_output(arguments, paths[0], ".bin")
    if len(paths) != 2:
        raise UsageError("convert needs one input and at most one output: kvmnn compressor convert IN [OUT]")
    return paths[0], paths[1]


_VERIFY_DESCRIPTION = """\
Check the weight file of a KV compressor (.bin) in structure and values. With --against its checkpoint, every weight,
every bias, every header field and the metadata are compared with what kvmnn compressor convert would write: give the
options that the conversion had. Any difference ends with exit code 1.

--jobs N verifies each weight file below folders."""


def add_verify_parser(subparsers: Any) -> None:
    """Declare ``kvmnn compressor verify``."""
    parser = shared_options.add_command(
        subparsers,
        "verify",
        run_verify,
        "a weight file against its checkpoint",
        _VERIFY_DESCRIPTION,
        examples=(
            "kvmnn compressor verify model.bin",
            "kvmnn compressor verify model.bin --against model.pth --dtype bf16",
            "kvmnn compressor verify weights/ --jobs 4",
        ),
        shown="--against --dtype --compression-factor --min-seq-len --num-heads --head-dim --metadata "
        "--allow-trailing --as-reference --jobs",
    )
    parser.add_argument("inputs", nargs="+", metavar="WEIGHTS", help="a weight file (.bin)")
    parser.add_argument("--against", action="append", default=[], metavar="FILE", help="the checkpoint")
    shared_options.add_dtype_option(parser, "with --against: type of the weights")
    weights_options.add_header_options(parser)
    weights_options.add_order_options(parser)
    parser.add_argument(
        "--allow-trailing",
        action="store_true",
        help="only warn of bytes after the last weight, as loaders take them",
    )
    parser.add_argument(
        "--as-reference",
        action="store_true",
        help="with --against: accept what convert --as-reference leaves out (biases of another length)",
    )
    batch.add_batch_options(parser)


def run_verify(arguments: argparse.Namespace) -> int:
    """Carry ``kvmnn compressor verify`` out; 1 for any difference."""
    if batch.is_batch(arguments):
        refused_reasons = {"against": "it is the checkpoint of one weight file"}
        return batch.run_batch(
            arguments,
            "compressor verify",
            arguments.inputs,
            accepted_kinds=["weights"],
            not_for_many=refused_reasons,
        )
    if len(arguments.inputs) > 1:
        raise UsageError(f"{len(arguments.inputs)} inputs: --jobs N verifies each of many, without it give one")
    arguments.input = arguments.inputs[0]
    weights_options.check_is_weight_file(arguments.input)
    return verify_weight_file(arguments)


def verify_weight_file(arguments: argparse.Namespace) -> int:
    """Check the file `arguments.input`, and compare it with its checkpoint if there is one; 1 for any difference."""
    from ...compressor import RejectionReport, has_weight_file_magic, verify_weights
    from ...errors import WeightsError

    if len(arguments.against) > 1:
        raise UsageError("a weight file is verified against one checkpoint")
    if not arguments.against:
        conversion_options = ["dtype", *weights_options.CONVERSION_OPTION_NAMES, "as_reference"]
        shared_options.refuse_given(arguments, conversion_options, "needs --against: it tells of the conversion")
    against = arguments.against[0] if arguments.against else None
    if against is not None and has_weight_file_magic(against):
        raise UsageError(
            f"--against {against}: is a weight file too: expected the checkpoint; kvmnn diff compares weight files"
        )
    as_reference = getattr(arguments, "as_reference", False)
    size = os.path.getsize(arguments.input) if os.path.isfile(arguments.input) else 0
    try:
        with console.progress_bar(arguments, size, "verify") as step:
            result = verify_weights(
                arguments.input,
                against=against,
                options=weights_options.build_convert_options(arguments, as_reference=as_reference),
                specified_options=weights_options.list_given_options(arguments),
                allow_trailing=getattr(arguments, "allow_trailing", False),
                progress=step,
            )
    except WeightsError as exc:
        if arguments.json:
            console.show_result(arguments, "verify", RejectionReport(path=arguments.input, against=against, error=exc))
        raise
    weights_options.report_notices(arguments, result.warnings, result.notices)
    if result.is_ok or arguments.json:
        console.show_result(arguments, "verify", result)
    for line in result.format_complaints():
        console.print_finding(line)
    return 0 if result.is_ok else 1


_INSPECT_DESCRIPTION = """\
Show the header of a KV compressor's weight file (.bin), or what a conversion of a checkpoint (.pth, .pt, .safetensors)
would write, and a table of its weights: shape, bias, minimum and maximum, mean, standard deviation, and the number of
elements that are NaN."""


def add_inspect_parser(subparsers: Any) -> None:
    """Declare ``kvmnn compressor inspect``."""
    parser = shared_options.add_command(
        subparsers,
        "inspect",
        run_inspect,
        "header and table of a weight file or checkpoint",
        _INSPECT_DESCRIPTION,
        examples=(
            "kvmnn compressor inspect model.bin",
            "kvmnn compressor inspect model.pth --compression-factor 4",
            "kvmnn compressor inspect model.bin --json",
        ),
        shown="--dtype --compression-factor --min-seq-len --num-heads --head-dim --metadata --prefix-order "
        "--slot-order",
    )
    parser.add_argument("inputs", nargs="+", metavar="IN", help="a weight file (.bin) or a checkpoint")
    shared_options.add_dtype_option(parser, "of a checkpoint: type of the weights")
    weights_options.add_header_options(parser)
    weights_options.add_order_options(parser)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn compressor inspect``."""
    from ... import compressor
    from ...errors import SourceError

    documents: list[dict[str, Any]] = []
    has_checkpoint = False
    for path in arguments.inputs:
        is_checkpoint = not compressor.is_weight_file(path) and compressor.is_checkpoint(path)
        has_checkpoint |= is_checkpoint
        if os.path.isfile(path) and not (is_checkpoint or compressor.is_weight_file(path)):
            weights_options.check_is_weight_file(path)
            raise SourceError(f"{path}: expected a compressor's weight file (.bin) or a checkpoint")
    if not has_checkpoint:
        conversion_options = ["dtype", *weights_options.CONVERSION_OPTION_NAMES]
        reason = "is about checkpoints, and weight files are shown"
        shared_options.refuse_given(arguments, conversion_options, reason, arguments.inputs)
    for path in arguments.inputs:
        info, text = inspect_weight_file(path, arguments)
        console.register_document_names(info.to_dict())
        console.print_line(arguments, ("\n" if documents else "") + text)
        documents.append(info.to_dict())
    if arguments.json:
        console.print_json({"verb": "inspect", "inputs": documents})
    return 0


def inspect_weight_file(path: str, arguments: argparse.Namespace) -> tuple[console.CommandResult, str]:
    """Inspect a weight file or a checkpoint; return the result and its text."""
    from ... import compressor, formats
    from ...errors import CheckpointError
    from ...files.mapped_file import FileHead

    try:
        info = compressor.inspect_weights(path, weights_options.build_convert_options(arguments))
    except CheckpointError as error:
        if reason := formats.describe_damage(FileHead.from_path(path)):  # nobody can know what it was
            raise CheckpointError(f"{path}: {reason}") from error
        raise
    return info, str(info)


_EXPORT_DESCRIPTION = """\
Write the weights and biases of a KVCM weight file (.bin) under the names that a checkpoint gives them. The elements
are copied unchanged, and read back: LOSSLESS. In .npz, which has no bf16, bf16 elements become uint16.

With --onnx, OUT is a directory that gets compress_tk.onnx and so on: graphs that turn groups of tokens into tokens,
one for each kind of compressor, with the weights of all layers (extra lm)."""


def add_export_parser(subparsers: Any) -> None:
    """Declare ``kvmnn compressor export``."""
    parser = shared_options.add_command(
        subparsers,
        "export",
        run_export,
        "a compressor's .bin to .safetensors or .npz",
        _EXPORT_DESCRIPTION,
        examples=(
            "kvmnn compressor export model.bin -o model.safetensors",
            "kvmnn compressor export model.bin --onnx -o graphs/",
            "kvmnn compressor export model.bin --onnx --precision fp16 -o graphs/",
        ),
        shown="--output --onnx --precision --prefix-order --slot-order",
    )
    parser.add_argument("weights", metavar="WEIGHTS", help="weight file (- for standard input)")
    shared_options.add_output_option(
        parser, ".safetensors or .npz file, a directory with --onnx (default: next to WEIGHTS)"
    )
    weights_options.add_order_options(parser)
    parser.add_argument("--onnx", action="store_true", help="write ONNX graphs that compute, not tensors")
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp16"),
        help="with --onnx (default: fp32); fp16: round as an fp16 runtime does, after every Linear",
    )


def run_export(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn compressor export``."""
    from ...compressor import export_onnx, export_weights

    if not arguments.onnx:
        shared_options.refuse_given(arguments, ["precision"], "needs --onnx: tensors are copied as they are")
    if arguments.onnx and (arguments.prefix_order or arguments.slot_order):
        raise UsageError("--prefix-order and --slot-order name tensors; the graphs of --onnx have none")
    weights_options.check_is_weight_file(arguments.weights)
    output = console.choose_output(arguments, arguments.weights, ".onnx/" if arguments.onnx else ".safetensors")
    if arguments.onnx:
        graphs = export_onnx(
            arguments.weights, output, precision=arguments.precision or "fp32", overwrite=arguments.force
        )
        console.show_result(arguments, "export", graphs)
        return 0
    tensors = export_weights(
        arguments.weights,
        output,
        prefixes=arguments.prefix_order,
        slots=arguments.slot_order,
        overwrite=arguments.force,
    )
    console.show_result(arguments, "export", tensors)
    return 0


_RUN_DESCRIPTION = """\
Compress K and V of a cache with the weights of a KV compressor: every group of tokens becomes one. LOSSY. WEIGHTS is a
compressor's weight file (.bin; kvmnn compressor convert makes one of a checkpoint). CACHE is a .npz or .safetensors
file, a directory of .npy files, an MNN KV dump or prefix cache.

CACHE contains in fp16, bf16 or fp32 either

  two arrays, K and V   [layer, batch, kv_head, token, dimension]; names such as
                        k and v, keys and values
  two arrays a layer    [batch, kv_head, token, dimension] or
                        [kv_head, token, dimension]; names with the layer's
                        number, such as layers.0.key and layers.0.value,
                        past_key_values.0.key, k_0 and v_0

and nothing else (--tensor chooses). An MNN KV dump, and a file made of one, is [token, kv_head, dimension]; a folder
that kvmnn dump-kv wrote is [kv_head, token, dimension], and its positions are kept. --axes specifies another order: l
layer, b batch, h kv_head, t token, d dimension. Names do not prove which axis is the tokens': where nothing does (a
dump, a packed cache, more than 256 for heads), --axes is required. Keys are taken as they are stored, that is,
rotated.

The first --image-tokens tokens are compressed by the weights for images, the others by those for text; tokens after
the last whole group of each stay unchanged, and so does a segment with fewer than --min-seq-len groups.

OUT (.npz or .safetensors) has the names and axes of CACHE. OUT.json alongside has the true positions that each token
stands for: the next token goes to place new_len of the cache, but its key is rotated for next_position."""


def add_run_parser(subparsers: Any) -> None:
    """Declare ``kvmnn compressor run``."""
    parser = shared_options.add_command(
        subparsers,
        "run",
        run_compressor,
        "run a KV compressor on a cache (LOSSY)",
        _RUN_DESCRIPTION,
        has_details=True,
        examples=(
            "kvmnn compressor run model.bin kv.npz",
            "kvmnn compressor run model.bin dump/ -o small.safetensors --image-tokens 256",
            "kvmnn compressor run model.bin kv.npz --axes lthd --precision fp16",
        ),
        shown="--output --axes --image-tokens --valid-tokens --group-tokens --min-seq-len --precision "
        "--engine --tensor --dtype",
    )
    parser.add_argument("weights", metavar="WEIGHTS", help="weight file of a compressor (.bin)")
    parser.add_argument("cache", metavar="CACHE", help=".npz, .safetensors, or the directory of a dump")
    shared_options.add_output_option(parser, ".npz or .safetensors file (default: CACHE.compressed.npz)")
    shared_options.add_source_options(parser, "element type (default: each array's own)", axes=False)
    parser.add_argument("--axes", metavar="LETTERS", help="the axes of each array, such as lthd")
    parser.add_argument(
        "--image-tokens",
        type=shared_options.parse_whole,
        default=0,
        metavar="N",
        help="tokens of the image, at the front (default: 0)",
    )
    parser.add_argument(
        "--valid-tokens",
        dest="tokens",
        type=shared_options.parse_whole,
        metavar="N",
        help="valid tokens, where arrays are longer",
    )
    parser.add_argument(
        "--group-tokens",
        dest="factor",
        type=shared_options.parse_whole,
        default=0,
        metavar="N",
        help="tokens in a group (default: the weights')",
    )
    parser.add_argument(
        "--min-seq-len",
        type=shared_options.parse_whole,
        default=0,
        metavar="N",
        help="least number of groups (default: the weights')",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp16"),
        default="fp32",
        help="fp16: round as an fp16 runtime does, after every Linear; OUT is then fp16",
    )
    parser.add_argument("--engine", choices=("numpy", "onnx"), default="numpy", help="what computes (default: numpy)")
    packed_options.add_packed_options(parser, with_tokens=False)


def run_compressor(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn compressor run``."""
    from ...compressor import ForwardOptions, check_output_path, compress_source

    if STDIO in (arguments.cache, arguments.weights):
        raise UsageError("a cache and weights are read from files, not from standard input")
    weights_options.check_is_weight_file(arguments.weights)
    kind = ".safetensors" if arguments.cache.endswith(".safetensors") else ".npz"
    output = console.choose_output(arguments, arguments.cache, f".compressed{kind}")
    check_output_path(output)
    options = ForwardOptions(
        image_len=arguments.image_tokens,
        factor=arguments.factor,
        min_seq_len=arguments.min_seq_len,
        seq_len=arguments.tokens,
        precision=arguments.precision,
        engine=arguments.engine,
    )
    source = input_sources.load(
        [arguments.cache], arguments, with_frames=True, as_numbers=True, used_options=("tokens",)
    )
    input_sources.report_skipped(source, arguments)
    with console.progress_bar(arguments, source.nbytes, "compress-kv") as step:
        result = compress_source(
            arguments.weights,
            source,
            arguments.cache,
            output,
            options,
            axes=arguments.axes,
            overwrite=arguments.force,
            progress=step,
        )
    if arguments.verbose:
        for segment in result.plan.segments:
            console.print_line(arguments, str(segment))
    console.show_result(arguments, "compress-kv", result)
    return 0
