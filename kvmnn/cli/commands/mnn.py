"""``kvmnn mnn``: read, write and change the engine's packed files, and replay a cache through its runtime."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from .. import console, dense_options, input_sources, model_options, packed_options, shared_options
from ..console import UsageError

if TYPE_CHECKING:
    from ...formats.mnn import CompactionPlan
    from ...packed.cache_info import CacheInfo


_UNPACK_DESCRIPTION = """\
Turn packed K and V into plain arrays [kv_head, token, head_dim], called layer_<n>.key and layer_<n>.value. IN is the
directory of a prefix cache, of live cache files or of a packed KV dump, one of their .k or .v files, or anything else
that kvmnn reads.

  -o X.npz, X.safetensors  all arrays; .safetensors has what pack needs to
                           restore the files
  -o DIR/                  one .npy file for each array
  -o X.npy, -o X           one array (--tensor layer_0.key chooses); -o X
                           writes its raw elements
  --output-kind dump       a KV dump in -o DIR/ as the engine writes it,
                           [token, kv_head, head_dim]
  --output-kind packed-dump  its packed variant

Only valid elements are written, without padding and free capacity. Caches that the engine keeps in int8 are
dequantised to fp32 (codes times scales plus biases), and what cannot be recovered is reported."""


def add_unpack_parser(subparsers: Any) -> None:
    """Declare ``kvmnn mnn unpack``."""
    parser = shared_options.add_command(
        subparsers,
        "unpack",
        run_unpack,
        "packed files to plain arrays",
        _UNPACK_DESCRIPTION,
        examples=(
            "kvmnn mnn unpack sys/ -o sys.npz --backend x86-avx2 --kv-heads 2 --head-dim 64 --valid-tokens 50",
            "kvmnn mnn unpack sys/ -o dump/ --output-kind dump",
            "kvmnn mnn unpack chat.session --kv-heads 8 -o chat.safetensors",
        ),
        shown="--output --raw --tensor --output-kind --dtype --backend --kv-heads --head-dim --valid-tokens "
        "--model --name",
    )
    parser.add_argument("input", metavar="IN", help="the directory of a cache, one of its files, arrays")
    shared_options.add_output_option(parser, "file or directory (default: IN.safetensors, a dump: IN.dump/)")
    shared_options.add_raw_option(parser)
    shared_options.add_source_options(parser, "element type, where the pack numbers leave it open")
    parser.add_argument(
        "--output-kind",
        dest="form",
        choices=("arrays", "dump", "packed-dump"),
        default="arrays",
        help="what to write (default: arrays)",
    )
    parser.add_argument("--run-id", default="kvmnn", metavar="ID", help="of a dump (default: kvmnn)")
    packed_options.add_packed_options(parser, with_undo=True)


def run_unpack(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn mnn unpack``."""
    from ...formats.mnn import unpack

    suffix = ".safetensors" if arguments.form == "arrays" else f".{arguments.form}/"
    output = console.choose_output(arguments, arguments.input, suffix)
    source = input_sources.load([arguments.input], arguments, with_frames=True)
    input_sources.report_skipped(source, arguments)
    if arguments.form == "arrays":
        console.check_output_suffix(arguments, output, source.arrays)
    else:
        shared_options.refuse_given(arguments, ["raw"], "is about one array, and a dump is written")
    with console.progress_bar(arguments, source.nbytes, "unpack") as step:
        unpack_result = unpack(
            source,
            output,
            form=arguments.form,
            run_id=arguments.run_id,
            force=arguments.force,
            progress=step,
        )
    input_sources.report_notes(unpack_result.notes[len(source.notes) :], arguments)
    console.show_result(arguments, "unpack", unpack_result)
    return 0


_PACK_DESCRIPTION = """\
Pack plain arrays into a prefix cache that the engine loads: <name>_<layer>.k and .v, their markers, and
<name>.kvmnn.json, which describes the files for kvmnn. Every file is read back and compared before it appears.

IN is anything that kvmnn reads: arrays called layer_<n>.key and layer_<n>.value, past_key_values.<n>.key and .value,
or k and v with the layer as first of four axes; a KV dump; a bundle of frames. Shapes are [kv_head, token, head_dim]
(--token-major: [token, kv_head, head_dim]).

The layout is --backend, or its pack numbers (--backend lp=8,hp=8); by default the one that unpack or encode recorded.

Where tokens were evicted, MNN needs the length of the text after loading (the result shows the line of C++), or K
rotated to the first positions: --rerotate."""


_PACK_USED_OPTIONS = (
    "tokens",
    "model",
    "ignore_contradictions",
    "backend",
    "kv_heads",
    "head_dim",
    "lp",
    "hp",
    "flash_block",
    "token_ids",
    "name",
)
"""Options for packed files that apply to the written files here."""


def add_pack_parser(subparsers: Any) -> None:
    """Declare ``kvmnn mnn pack``."""
    parser = shared_options.add_command(
        subparsers,
        "pack",
        run_pack,
        "plain arrays to a prefix cache",
        _PACK_DESCRIPTION,
        examples=(
            "kvmnn mnn pack kv.npz -o sys/ --backend arm64-fp16 --name sys",
            "kvmnn mnn pack dump.frames/ -o sys/ --backend x86-avx2 --capacity 4096",
            "kvmnn mnn pack chat.session -o phone/ --backend arm64-fp16 --kv-heads 8 --cast",
        ),
        shown="--output --backend --name --capacity --cast --rerotate --dtype --token-major --tensor "
        "--model --kv-heads",
    )
    parser.add_argument("inputs", nargs="+", metavar="IN", help="arrays, a dump, a bundle")
    packed_options.add_target_options(parser)
    shared_options.add_source_options(parser, "element type (default: the arrays' own; raw input needs it)")
    parser.add_argument("--token-major", action="store_true", help="the arrays are [token, kv_head, head_dim]")
    parser.add_argument("--cast", action="store_true", help="convert to the backend's dtype; LOSSY if it is narrower")
    dense_options.add_rerotate_options(parser)
    packed_options.add_packed_options(parser, with_undo=True)


def run_pack(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn mnn pack``."""
    from ...formats.mnn import pack

    dense_options.check_rerotate_options(arguments)
    if arguments.output is None and len(arguments.inputs) > 1:
        raise UsageError("no output given for several inputs: use -o DIR/")
    output = console.choose_output(arguments, arguments.inputs[0], ".packed/")
    source = input_sources.load(
        arguments.inputs, arguments, with_frames=True, as_numbers=arguments.cast, used_options=_PACK_USED_OPTIONS
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
            ignore_contradictions=arguments.ignore_contradictions,
            force=arguments.force,
            progress=step,
        )
    input_sources.report_notes(pack_result.notes[len(source.notes) :], arguments)
    console.show_result(arguments, "pack", pack_result)
    return 0


_REPACK_DESCRIPTION = """\
Write a prefix cache in the layout of another backend, such as one computed on a PC for a phone.

Where the backends' dtypes differ, elements are converted, to nearest even: fp32 to fp16 is LOSSY, and the result has
the number of changed elements; fp16 to fp32 is LOSSLESS."""


def add_repack_parser(subparsers: Any) -> None:
    """Declare ``kvmnn mnn repack``."""
    parser = shared_options.add_command(
        subparsers,
        "repack",
        run_repack,
        "a packed cache for another backend",
        _REPACK_DESCRIPTION,
        examples=(
            "kvmnn mnn repack sys/ -o phone/ --backend x86-avx2 --target-backend arm64-fp16 --kv-heads 2 "
            "--head-dim 64 --valid-tokens 50",
            "kvmnn mnn repack sys/ --target-backend arm64-fp16",
            "kvmnn mnn repack sys/ -o phone/ --target-backend arm64-fp16 --capacity 4096 --json",
        ),
        shown="--output --backend --target-backend --kv-heads --head-dim --valid-tokens --name --capacity "
        "--model --rerotate",
    )
    parser.add_argument("input", metavar="IN", help="the directory of a prefix cache, or one of its files")
    packed_options.add_target_options(parser)
    dtype_help = "element type, where the pack numbers leave it open"
    shared_options.add_source_options(parser, dtype_help, axes=False, profile=False)
    packed_options.add_packed_options(parser, with_engines=False)
    packed_options.add_target_backend_option(parser)
    dense_options.add_rerotate_options(parser)


def run_repack(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn mnn repack``."""
    from ...formats.mnn import repack

    dense_options.check_rerotate_options(arguments)
    if arguments.to is None:
        raise UsageError("--target-backend needs the name of a backend: --target-backend NAME,flash_block=N")
    output = console.choose_output(arguments, arguments.input, f".{arguments.to}/")
    source = input_sources.load([arguments.input], arguments, with_frames=True, used_options=("name",))
    input_sources.report_skipped(source, arguments)
    with console.progress_bar(arguments, source.nbytes, "repack") as step:
        pack_result = repack(
            source,
            output,
            arguments.to,
            flash_block=arguments.target_flash_block,
            name=arguments.name,
            capacity=arguments.capacity,
            model=arguments.model,
            rerotate=arguments.rerotate,
            rope=arguments.rope,
            ignore_contradictions=arguments.ignore_contradictions,
            force=arguments.force,
            progress=step,
        )
    input_sources.report_notes(pack_result.notes[len(source.notes) :], arguments)
    console.show_result(arguments, "repack", pack_result)
    return 0


_COMPACT_DESCRIPTION = """\
Compact the packed files of a prefix cache or of a live one: of the last --remove tokens only the --reserve pairs stay,
begin:size, begin counted from the start of that window. LOSSY. As in the engine, files keep their size, and bytes
after the valid tokens stay as they were, with rows of evicted tokens; kvmnn mnn repack does not copy those.

<name>.kvmnn.json has the number of valid tokens and the true position of each: copy it with the files.

K keeps its rotary positions, and MNN counts from 0 after loading: it needs the length of the text (the result shows
the line of C++), or K rotated to the first positions: --rerotate."""


def add_compact_parser(subparsers: Any) -> None:
    """Declare ``kvmnn mnn compact``."""
    parser = shared_options.add_command(
        subparsers,
        "compact",
        run_compact,
        "drop tokens from packed files as the engine does",
        _COMPACT_DESCRIPTION,
        examples=(
            "kvmnn mnn compact sys/ -o small/ --remove 160 --reserve 0:64,128:32 --valid-tokens 160 --model MODEL/",
            "kvmnn mnn compact sys/ -o small/ --plan plan.json",
            "kvmnn mnn compact sys/ -o small/ --plan plan.json --rerotate --model MODEL/",
        ),
        shown="--output --remove --reserve --plan --rerotate --model --backend --kv-heads --head-dim --valid-tokens",
    )
    parser.add_argument("input", metavar="IN", help="the directory of a prefix cache or of live files")
    shared_options.add_output_option(parser, "directory to write the files to (default: IN.compact/)")
    shared_options.add_dtype_option(parser, "element type, where the pack numbers leave it open")
    parser.add_argument(
        "--remove", type=_parse_signed, metavar="N", help="tokens in the window at the end (default: all)"
    )
    parser.add_argument(
        "--reserve", type=_parse_pairs, default=(), metavar="BEGIN:SIZE,...", help="what stays of the window"
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="one plan for each layer instead (-: standard input): a JSON list of "
        '{"layer": 0, "remove": N, "pairs": [[begin, size], ...]} '
        "(kvmnn plan); positions.json of dump-kv --policy, or its folder; or the --json of eval --plot",
    )
    parser.add_argument("--plan-label", metavar="LABEL", help="of an evaluation of several policies, which")
    dense_options.add_rerotate_options(parser)
    parser.add_argument("--dialect", choices=("fork", "upstream"), default="fork", help="whose rules (default: fork)")
    packed_options.add_packed_options(parser, with_engines=False)


def run_compact(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn mnn compact``."""
    from ...formats.mnn import compact, open_packed

    dense_options.check_rerotate_options(arguments)
    output = console.choose_output(arguments, arguments.input, ".compact/")
    cache_reader = open_packed(arguments.input, packed_options.build_packed_options(arguments))
    input_sources.report_notes(cache_reader.notes, arguments)
    plans = _read_plans_or_options(arguments, cache_reader.info)
    with console.progress_bar(arguments, cache_reader.info.file_bytes, "compact") as step:
        compact_result = compact(
            cache_reader,
            plans,
            output,
            name=arguments.name,
            dialect=arguments.dialect,
            rerotate=arguments.rerotate,
            rope=arguments.rope,
            model=arguments.model,
            ignore_contradictions=arguments.ignore_contradictions,
            force=arguments.force,
            progress=step,
        )
    input_sources.report_notes(compact_result.notes[len(cache_reader.notes) :], arguments)
    console.show_result(arguments, "compact", compact_result)
    return 0


def _read_plans_or_options(arguments: argparse.Namespace, info: CacheInfo) -> list[CompactionPlan]:
    from ...formats.mnn import CompactionPlan, read_compaction_plans

    if arguments.plan is None:
        shared_options.refuse_given(arguments, ["plan_label"], "needs --plan")
        return [CompactionPlan(arguments.remove, arguments.reserve)]
    if arguments.remove is not None or arguments.reserve:
        raise UsageError("--plan stands for --remove and --reserve: say one or the other")
    return read_compaction_plans(arguments.plan, info, label=arguments.plan_label)


def _parse_signed(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,19}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    pairs = []
    for pair in text.split(","):
        numbers = re.fullmatch(r"(-?\d{1,19}):(-?\d{1,19})", pair)
        if not numbers:
            raise argparse.ArgumentTypeError(f"{pair!r} is not a pair begin:size of whole numbers")
        pairs.append((int(numbers[1]), int(numbers[2])))
    return tuple(pairs)


_REPLAY_DESCRIPTION = """\
Run K and V that were computed once through the lossless runtime, the first tokens as a prompt and the others one by
one: what would be compressed, when, and its size. What attention would read is compared with the cache, by default at
the ends; LOSSLESS needs --compare all. A difference is exit code 1, and so is a configuration with which nothing is
compressed and nothing evicted.

CACHE is anything that kvmnn reads as K and V of layers. --engine-config is the engine's own JSON file (its
kv_lossless_ and kv_h2o_ keys; docs/runtime.md). Evictions need --scores: attention probabilities, [layer, head, query,
key] or an array [head, query, key] for each layer."""


def add_replay_parser(subparsers: Any) -> None:
    """Declare ``kvmnn mnn replay``."""
    parser = shared_options.add_command(
        subparsers,
        "replay",
        run_replay,
        "a cache run through the lossless runtime",
        _REPLAY_DESCRIPTION,
        examples=(
            "kvmnn mnn replay dump/ --engine-config config.json --prefill-tokens 512",
            "kvmnn mnn replay dump/ --engine-config config.json --compare all --plot plots/",
            "kvmnn mnn replay dump/ --engine-config config.json --scores attention.npz --json",
        ),
        shown="--engine-config --prefill-tokens --behaviour --scores --compare --plot --token-major --dtype",
    )
    parser.add_argument("inputs", nargs="+", metavar="CACHE", help="K and V of layers")
    parser.add_argument(
        "--engine-config", dest="config", required=True, metavar="FILE", help="the engine's JSON configuration"
    )
    parser.add_argument(
        "--prefill-tokens",
        type=shared_options.parse_positive,
        metavar="N",
        help="tokens of the prompt (default: half)",
    )
    parser.add_argument(
        "--behaviour",
        choices=("sound", "engine"),
        default="sound",
        help="engine: with the MNN fork's defects (default: sound)",
    )
    parser.add_argument("--scores", metavar="FILE", help="attention probabilities, for evictions")
    parser.add_argument(
        "--compare",
        choices=("ends", "all"),
        default="ends",
        help="which calls to compare: ends, those of the first two steps and the last, or all (default: ends)",
    )
    parser.add_argument("--plot", metavar="DIR", help="draw memory, ratio, queue, latency into DIR (matplotlib)")
    shared_options.accept_table(parser)
    shared_options.add_source_options(parser, "element type, where the input does not have it")
    parser.add_argument("--token-major", action="store_true", help="arrays are [token, kv_head, head_dim]")
    packed_options.add_packed_options(parser)


def run_replay(arguments: argparse.Namespace) -> int:
    """Run ``kvmnn mnn replay``."""
    from ..._util.text import pluralize
    from ...formats import registry
    from ...runtime import read_attention, read_trace, replay_plots, replay_trace

    if arguments.plot:
        replay_plots.check_can_write(arguments.plot, arguments.force)
    config = model_options.read_runtime_config(arguments.config)
    source = input_sources.load(arguments.inputs, arguments, with_frames=True)
    input_sources.report_skipped(source, arguments)
    source.token_major |= arguments.token_major
    trace = read_trace(source)
    attention = None
    if arguments.scores:
        if not config.h2o.enable:
            console.print_note(
                arguments, f"{arguments.scores} plans no eviction: {arguments.config} has no kv_h2o_enable"
            )
        attention = read_attention(registry.open(arguments.scores), len(trace.layers), trace.tokens)
    with console.progress_bar(arguments, trace.tokens, "replaying", unit="token") as progress:
        result = replay_trace(
            trace,
            config,
            prompt=arguments.prefill_tokens,
            behaviour=arguments.behaviour,
            attention=attention,
            compare=arguments.compare,
            progress=progress,
        )
    written_paths = result.plot(arguments.plot, overwrite=arguments.force) if arguments.plot else []
    console.show_result(arguments, "replay", result)
    if written_paths:
        console.print_line(arguments, f"{pluralize(len(written_paths), 'plot file')} in {arguments.plot}")
    return 0 if result.has_passed else 1
