"""Options for packed files and caches of other engines: properties that the files do not record."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from .._util.patterns import declare_pattern
from ..packed.backends import BACKENDS
from . import console, shared_options
from .console import UsageError
from .options import SpecField, add_spec_option

if TYPE_CHECKING:
    from ..arrays.source import Source
    from ..formats.options import EngineOptions, PackedOptions
    from ..packed.cache_info import CacheInfo, TokenIdsFingerprint
    from ..packed.inference import PackedGeometry

SELECTION_OPTIONS = ("stream", "sequence", "window", "blocks")
"""The options, as the namespace calls them."""
_FIELD_BY_OPTION = {
    "stream": "stream",
    "sequence": "sequence",
    "window": "window_cache",
    "blocks": "raw_blocks",
    "undo": "invert",
}
HEAD_OPTIONS = ("kv_heads", "head_dim", "model")
"""Options for packed files that also apply to caches of llama.cpp."""
_LLAMA_OPTIONS = ("stream", "sequence", "window")
_PART_OPTIONS = ("tensor", "kv_axes", "kv_batch", "kv_half", *SELECTION_OPTIONS)
"""Options that select or change arrays of a file, so that frames do not represent the whole file."""


_HEADS_HINT = "For a llama.cpp file, --kv-heads N or --model FILE.gguf specifies the number of heads of a row."


def add_engine_options(
    parser: Any, text: str | None = _HEADS_HINT, *, with_blocks: bool = True, with_undo: bool = False
) -> None:
    """Declare the options of llama.cpp files, ``--raw-blocks`` if `with_blocks`, and ``--invert`` if `with_undo`."""
    shared_options.add_part_option(parser, _LLAMA_PARTS)
    group = parser.add_argument_group("caches of other engines", text)
    if with_blocks:
        group.add_argument(
            "--raw-blocks",
            dest="blocks",
            action="store_true",
            help="quantised blocks as their bytes [token, block, byte], not as numbers",
        )
    if with_undo:
        add_undo_option(group)


_LLAMA_PARTS = (
    SpecField("stream", "stream", "this stream of a llama.cpp file", parse=shared_options.parse_whole),
    SpecField("sequence", "sequence", "the tokens of this sequence of a stream", parse=shared_options.parse_whole),
    SpecField(
        "sliding-window",
        "window",
        "of two caches in a file that of layers with a sliding window",
        constant=True,
        default=False,
    ),
)


def add_undo_option(parser: Any) -> None:
    """Add ``--invert``."""
    parser.add_argument(
        "--invert",
        dest="undo",
        type=lambda text: tuple(text.split(",")),
        metavar="WHAT[,WHAT]",
        help="what llama.cpp did to K and V: k-rotation, v-rotation (of what it quantised), k-order (Llama models); or "
        "none",
    )


def build_engine_options(
    arguments: argparse.Namespace, *, is_whole_file: bool = False, any_heads: bool = False, any_stream: bool = False
) -> EngineOptions:
    """Build the options for caches of other engines from the arguments."""
    from ..formats.options import EngineOptions

    option_values = {
        field_name: getattr(arguments, name)
        for name, field_name in _FIELD_BY_OPTION.items()
        if hasattr(arguments, name)
    }
    is_by_heads = is_whole_file and getattr(arguments, "codec", None) == "dense"
    return EngineOptions(
        passthrough=is_whole_file,
        split_heads=is_by_heads,
        allow_unknown_heads=any_heads,
        default_to_first_stream=any_stream,
        **option_values,
    )


def refuse_idle_engine_options(arguments: argparse.Namespace, paths: Sequence[str]) -> None:
    """Raise `UsageError` for an option that applies to none of the inputs."""
    given_names = [name for name in SELECTION_OPTIONS if shared_options.was_given(arguments, name)]
    if given_names and not any(map(is_llama, paths)):
        reason = f"is about caches of llama.cpp, and {' '.join(paths)} holds none"
        shared_options.refuse_given(arguments, _LLAMA_OPTIONS, reason, paths)
    if given_names and not any(map(is_engine_file, paths)):
        reason = f"is about quantised caches of llama.cpp and MLX, and {' '.join(paths)} holds none"
        shared_options.refuse_given(arguments, ["blocks"], reason, paths)


def refuse_blocks_without_quantized(arguments: argparse.Namespace, source: Source) -> None:
    """Raise `UsageError` for ``--raw-blocks`` when nothing is quantised."""
    if getattr(arguments, "blocks", False) and not any(array.array_dtype == "|u1" for array in source.arrays):
        raise UsageError(f"--raw-blocks is about quantised K and V, and {' '.join(source.inputs)} holds none")


def list_used_options(path: str) -> tuple[str, ...]:
    """List the engine options, and those of `HEAD_OPTIONS`, that apply to a path."""
    if is_llama(path):
        return (*HEAD_OPTIONS, *SELECTION_OPTIONS)
    return ("blocks",) if is_engine_file(path) else ()


def select_input_arguments(arguments: argparse.Namespace, path: str) -> argparse.Namespace:
    """Return the arguments with the engine options that do not apply to this input reset."""
    used_names = list_used_options(path)
    reset_values = {name: arguments.parser.get_default(name) for name in SELECTION_OPTIONS if name not in used_names}
    return argparse.Namespace(**vars(arguments) | reset_values)


def is_engine_file(path: str) -> bool:
    """Return whether the options of other engines' caches apply to a path: such a file, frames of one, or a stream."""
    from ..files.mapped_file import is_stream
    from ..formats import detect_engine_name

    return is_stream(path) or detect_engine_name(path) not in (None, "torch-cache")


def is_llama(path: str) -> bool:
    """Return whether a path is a llama.cpp file, frames of one, or a stream, which may be one."""
    from ..files.mapped_file import is_stream
    from ..formats import detect_engine_name
    from ..formats.llama import FORMAT_NAME

    return is_stream(path) or detect_engine_name(path) == FORMAT_NAME


def has_engine_file(path: str) -> bool:
    """Return whether a path is a folder that contains a cache file of another engine, which only ``--jobs`` reads."""
    if not os.path.isdir(path):
        return False
    with suppress(OSError):
        return any(
            is_engine_file(os.path.join(path, name)) for name in islice(sorted(os.listdir(path)), _MAX_FILES_CHECKED)
        )
    return False


_MAX_FILES_CHECKED = 1000


def keeps_whole_file(arguments: argparse.Namespace, paths: Sequence[str]) -> bool:
    """Return whether frames store the whole of the only input rather than selected arrays of it."""
    return len(paths) == 1 and not any(shared_options.was_given(arguments, name) for name in _PART_OPTIONS)


def note_arrays_only(arguments: argparse.Namespace, paths: Sequence[str]) -> None:
    """Print a note when a file could be stored whole but the options select only its arrays."""
    from . import console

    files = [path for path in paths if os.path.isfile(path) and is_engine_file(path)]
    if files and not keeps_whole_file(arguments, paths):
        part_option = next((name for name in _PART_OPTIONS if shared_options.was_given(arguments, name)), None)
        reason = (
            "several inputs make one set of arrays"
            if part_option is None
            else shared_options.get_option_name(arguments, part_option)
        )
        console.print_note(
            arguments, f"{' '.join(files)}: arrays are encoded, and decode will not write the file: {reason}"
        )


def is_gguf(path: str | None) -> bool:
    """Return whether a model is a llama.cpp model."""
    from ..formats.llama import is_gguf

    return path is not None and is_gguf(path)


def add_packed_options(
    parser: Any,
    *,
    with_tokens: bool = True,
    with_second_tokens: bool = False,
    with_text: bool = True,
    with_engines: bool = True,
    with_undo: bool = False,
) -> None:
    """Add all options about packed files, and `with_engines` those about caches of other engines.

    Without `with_tokens` and `with_text` the verb has its own ``--valid-tokens`` and `add_origin_options`; with
    `with_second_tokens` it compares two inputs; with `with_undo` K and V are for other engines than that which
    computed them.
    """
    group = parser.add_argument_group("packed files", _PACKED_DESCRIPTION)
    add_layout_options(group, [INT8])
    group.add_argument("--kv-heads", type=shared_options.parse_positive, metavar="N", help="kv heads of a layer")
    group.add_argument("--head-dim", type=shared_options.parse_positive, metavar="N", help="dimensions of a head")
    if with_tokens:
        group.add_argument(
            "--valid-tokens",
            dest="tokens",
            type=parse_counts,
            default=(),
            metavar="N[,N...]",
            help="valid tokens (of each layer)",
        )
    if with_second_tokens:
        option_help = "valid tokens of B (default: --valid-tokens)"
        group.add_argument(
            "--second-valid-tokens",
            dest="second_tokens",
            type=parse_counts,
            default=(),
            metavar="N[,N...]",
            help=option_help,
        )
    if with_text:
        add_origin_options(group)
    add_discovery_options(group)
    packed_variant = SpecField(
        "packed-variant", "packed", "of a KV dump with both the packed one", constant=True, default=False
    )
    shared_options.add_part_option(parser, [packed_variant])
    if with_engines:
        add_engine_options(parser, with_undo=with_undo)


_PACKED_DESCRIPTION = (
    "For prefix caches and live cache files. Where sizes and contents of the files leave one answer, it is inferred; "
    "what they contradict is refused, unless --ignore contradictions is given."
)


def _parse_int8(text: str) -> str:
    if text not in ("keys", "both"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected int8=keys or int8=both")
    return text


def _parse_block(text: str) -> Any:
    return "none" if text == "none" else shared_options.parse_positive(text)


_FLASH_BLOCK = SpecField(
    "flash_block", "flash_block", "tokens in a block of V (64), or none", parse=_parse_block, metavar="N|none"
)
_PACK_NUMBERS = (
    SpecField("lp", "lp", "pack number lP", parse=shared_options.parse_positive),
    SpecField("hp", "hp", "pack number hP", parse=shared_options.parse_positive),
    _FLASH_BLOCK,
)
INT8 = SpecField(
    "int8", "int8", "what the engine quantised (attention_mode 9, 10; inferred)", parse=_parse_int8, metavar="keys|both"
)


def add_layout_options(parser: Any, extra_fields: Sequence[SpecField] = ()) -> None:
    """Add ``--backend``, a name or pack numbers, and the flash block."""
    add_spec_option(
        parser,
        "--backend",
        f"layout of the files: NAME is one of {', '.join(BACKENDS)}, or lp and hp in its place",
        [*_PACK_NUMBERS, *extra_fields],
        metavar="NAME[,KEY=VALUE...]",
        words=tuple(BACKENDS),
        default=None,
    )


def add_target_backend_option(parser: Any) -> None:
    """Add ``--target-backend``, a name and perhaps a flash block."""
    add_spec_option(
        parser,
        "--target-backend",
        "backend whose layout is wanted; without flash_block that of IN stays",
        [replace(_FLASH_BLOCK, dest="target_flash_block")],
        metavar="NAME[,KEY=VALUE]",
        words=tuple(BACKENDS),
        dest="to",
        default=None,
        required=True,
    )


def add_discovery_options(parser: Any) -> None:
    """Add the options that select the files and the order of their layers."""
    parser.add_argument("--name", metavar="NAME", help="which prefix, where a directory holds several")
    parser.add_argument(
        "--layer-order",
        action=_LayerOrderAction,
        default=(),
        metavar="HEX,...|pid=PID",
        help="live files by layer: their addresses, or the engine's process, which knows the order",
    )
    parser.set_defaults(pid=None)
    shared_options.add_ignore_option(
        parser, "markers", "ignore_markers", "the sync markers of a prefix, where they are missing"
    )
    add_contradictions_option(parser)


def add_contradictions_option(parser: Any) -> None:
    """Add the word ``contradictions`` of ``--ignore``."""
    shared_options.add_ignore_option(
        parser, "contradictions", "ignore_contradictions", "what contradicts the options, and read as these say"
    )


def add_origin_options(
    parser: Any,
    model_use: str = "geometry and heads",
    kinds: str = "the MNN model's directory, name of a pulled model, a llama.cpp cache's .gguf file",
) -> None:
    """Add ``--model``, whose help is `kinds` and `model_use`, and ``--token-ids``: the cache's model and text."""
    parser.add_argument("--model", metavar="DIR", help=f"{kinds}: {model_use}")
    parser.set_defaults(has_model_option=True)
    parser.add_argument(
        "--token-ids", metavar="IDS", help="ids of the text: 5,7,9 or a file: a JSON list, numbers, .npy"
    )


def add_target_options(parser: Any) -> None:
    """Add ``-o``, ``-f`` and ``--capacity`` for a prefix cache to write."""
    shared_options.add_output_option(parser, "directory for the files (default: alongside IN)")
    parser.add_argument(
        "--capacity",
        type=shared_options.parse_positive,
        metavar="N",
        help="capacity in tokens (default: as before, else the valid tokens: the engine grows it)",
    )


def build_geometry(arguments: argparse.Namespace, dtype: str | None = None) -> PackedGeometry:
    """Build the specified part of the layout from the arguments."""
    from ..packed.inference import PackedGeometry

    return PackedGeometry(
        kv_heads=getattr(arguments, "kv_heads", None),
        head_dim=getattr(arguments, "head_dim", None),
        dtype=dtype,
        backend=arguments.backend,
        lP=arguments.lp,
        hP=arguments.hp,
        flash_block=arguments.flash_block,
    )


def build_packed_options(arguments: argparse.Namespace, cache_info: CacheInfo | None = None) -> PackedOptions | None:
    """Build the options for packed files from the arguments, completed from `cache_info`.

    Returns None for verbs that read no packed files.
    """
    from ..formats.options import PackedOptions
    from ..packed.inference import make_geometry

    if not hasattr(arguments, "ignore_markers"):
        return None
    dtype = arguments.dtype if arguments.dtype in shared_options.ELEMENT_TYPES else None  # no layout has codes
    specified = replace(build_geometry(arguments, dtype), int8=arguments.int8)
    return PackedOptions(
        geometry=specified if cache_info is None else specified.merge_defaults(make_geometry(cache_info.layout)),
        valid_tokens=_get_tokens(arguments)
        or (tuple(layer.tokens for layer in cache_info.layers) if cache_info else ()),
        prefix_name=arguments.name,
        model=arguments.model,
        token_ids=hash_token_ids(arguments),
        layer_order=arguments.layer_order,
        pid=arguments.pid,
        ignore_markers=arguments.ignore_markers,
        ignore_contradictions=cache_info is not None or getattr(arguments, "ignore_contradictions", False),
        prefer_packed_dump=arguments.packed,
        recorded_states=cache_info.states if cache_info else None,
        heads=_list_layer_heads(cache_info),
    )


def _list_layer_heads(cache_info: CacheInfo | None) -> tuple[tuple[int, int], ...]:
    if cache_info is None or cache_info.is_uniform:
        return ()
    return tuple((layout.kv_heads, layout.head_dim) for layout in map(cache_info.get_layer_layout, cache_info.layers))


PACKED_OPTION_NAMES = (
    *("tokens", "model", "backend", "kv_heads", "head_dim", "lp", "hp", "flash_block", "int8", "token_ids", "name"),
    *("layer_order", "pid", "ignore_markers", "packed", "ignore_contradictions"),
)
"""The options about packed files, as the namespace calls them."""


def refuse_idle_packed_options(
    arguments: argparse.Namespace, paths: Sequence[str], used_options: Sequence[str] = ()
) -> None:
    """Raise `UsageError` for an option about packed files when no input is one.

    Options in `used_options`, which have another use, are not refused.
    """
    refuse_idle_engine_options(arguments, paths)
    given_names = [
        name for name in PACKED_OPTION_NAMES if name not in used_options and shared_options.was_given(arguments, name)
    ]
    if any(map(is_llama, paths)) or any(map(has_engine_file, paths)):
        given_names = [name for name in given_names if name not in HEAD_OPTIONS]
    if given_names and not any(map(may_be_packed, paths)):
        for name in given_names:
            subject = "packed files of MNN's" + (" and caches of llama.cpp" if name in HEAD_OPTIONS else "")
            subject += f", and {' '.join(paths)} holds none"
            hint = ": --label names a text of a store" if name == "name" and hasattr(arguments, "label") else ""
            shared_options.refuse_given(arguments, [name], f"is about {subject}{hint}", paths)


def check_provenance(arguments: argparse.Namespace, info: CacheInfo | None, where: str) -> None:
    """Raise `SourceError` when ``--model`` or ``--token-ids`` differ from those that a cache was made with."""
    from ..errors import SourceError
    from ..formats.mnn import list_provenance_mismatches

    model = None if is_gguf(arguments.model) else arguments.model  # of the other input
    if info is not None and (model or arguments.token_ids):
        for difference in list_provenance_mismatches(info, model, hash_token_ids(arguments)):
            raise SourceError(f"{where}: {difference}")


def may_be_packed(path: str) -> bool:
    """Return whether the options about packed files apply to a path."""
    from ..errors import KvmnnError
    from ..formats.mnn import find_packed, has_packed_dump

    try:
        return has_packed_dump(path) or find_packed(path) is not None
    except (KvmnnError, OSError):
        return True  # and what is wrong with it is said when it is read


def add_unpack_hint(arguments: argparse.Namespace, message: str) -> str:
    """Extend a message that names options which this command lacks with a hint to ``kvmnn mnn unpack``."""
    if any(not hasattr(arguments, name[2:].replace("-", "_")) for name in _OPTION_IN_MESSAGE_REGEX.findall(message)):
        message += f"; {arguments.parser.prog} has no such option, kvmnn mnn unpack has"
    if not hasattr(arguments, "cast"):
        message = message.replace(
            "--cast (cast=True) converts them", "arrays (-o OUT.npz) become it by kvmnn mnn pack --cast"
        )
    return message


def add_jobs_hint(arguments: argparse.Namespace, message: str) -> str:
    """Add the ``--jobs`` option to a message that rejects a folder of files."""
    is_of_one = getattr(arguments, "against", None)
    if getattr(arguments, "jobs", 0) is None and not is_of_one and _FOLDER_MESSAGE_REGEX.search(message):
        message += "; --jobs N takes each file below it by itself"
    return message


_FOLDER_MESSAGE_REGEX = declare_pattern("not a file kvmnn knows: (it is a folder with|the folder has no manifest)")


_OPTION_IN_MESSAGE_REGEX = declare_pattern(r"--(?:kv-heads|head-dim|backend)\b")


def _get_tokens(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Return the specified numbers of valid tokens: one of each layer, or one for all."""
    specified: tuple[int, ...] | int | None = arguments.tokens
    return specified if isinstance(specified, tuple) else (specified,) if specified else ()


def hash_token_ids(arguments: argparse.Namespace) -> TokenIdsFingerprint | None:
    """Return count and hash of the ids of ``--token-ids``; None without the option."""
    from ..packed.cache_info import TokenIdsFingerprint

    if arguments.token_ids is None:
        return None
    return TokenIdsFingerprint.from_ids(load_ids(arguments), get_ids_label(arguments))


def load_ids(arguments: argparse.Namespace) -> Any:
    """Return the ids of ``--token-ids`` or of the file it names; read once, as that may be a pipe."""
    from ..formats.mnn import load_token_ids
    from ..packed.cache_info import MAX_TOKEN_ID

    if not hasattr(arguments, "loaded_ids"):
        text = arguments.token_ids
        arguments.loaded_ids = _parse_ids(text, MAX_TOKEN_ID) if _looks_like_ids(text) else load_token_ids(text)
    return arguments.loaded_ids


def get_ids_label(arguments: argparse.Namespace) -> str:
    """Return the name of the ids in messages: the option, or the file that it names."""
    text: str = arguments.token_ids
    return "--token-ids" if _looks_like_ids(text) else "standard input" if text == console.STDIO else text


def _looks_like_ids(ids: str) -> bool:
    """Return whether a text is a list of ids, perhaps a malformed one, and not a file name."""
    return ids != console.STDIO and _IDS_REGEX.match(ids) is not None and not os.path.exists(ids)


_IDS_REGEX = declare_pattern(r"[-+.,\[\]\s\d]*$|\s*\[|[^/]*,")
"""Text that is (almost) a list of ids, if no file has this name: only numbers, a bracket, or a comma outside a path."""


def _parse_ids(ids_text: str, max_id: int) -> list[int]:
    """Parse numbers up to `max_id`, separated by spaces or commas, or a JSON list; raise `OptionError` for others."""
    from .._util.text import escape_control
    from ..errors import OptionError

    text = ids_text.strip()
    words = re.split(r"\s*,\s*|\s+", text[text.startswith("[") : len(text) - text.endswith("]")].strip())
    problem = ""
    if text.startswith("[") != text.endswith("]"):
        problem = "one of its brackets is missing"
    elif words == [""]:
        problem = "it is empty"
    else:
        for word_index, word in enumerate(words):
            if not re.fullmatch(r"\d{1,10}", word) or int(word) > max_id:
                problem = f"number {word_index + 1} is {escape_control(word[:40]) or 'empty'}"
                break
    if problem:
        shown_text = escape_control(ids_text if len(ids_text) <= 60 else ids_text[:57] + "...") or "''"
        expectation = f"numbers from 0 to {max_id:,} between commas, as 5,7,9, or a file's name"
        raise OptionError(f"--token-ids {shown_text}: {problem}: expected {expectation}")
    return [int(word) for word in words]


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse ``32`` or ``32,48``: numbers above zero."""
    return tuple(shared_options.parse_positive(part) for part in text.split(","))


class _LayerOrderAction(argparse.Action):
    dests = ("layer_order", "pid")

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        try:
            if str(values).startswith("pid="):
                namespace.pid = shared_options.parse_positive(values[4:])
            else:
                namespace.layer_order = _parse_addresses(values)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def _parse_addresses(text: str) -> tuple[str, ...]:
    addresses = tuple(text.split(","))
    if not all(re.fullmatch(r"[0-9A-Fa-f]{16}", part) for part in addresses):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of addresses of 16 hexadecimal digits")
    return addresses
