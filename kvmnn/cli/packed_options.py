"""What the verbs that deal with packed files share: the arguments that say what no file says."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..packed.backends import BACKENDS
from . import engine_options, help, idle_options, printing, shared_options

if TYPE_CHECKING:
    from ..formats.options import PackedOptions
    from ..packed.cache_info import CacheInfo, TokenIds
    from ..packed.fitting import Geometry


def add_packed(
    parser: Any,
    backend: str = "--backend",
    *,
    tokens: bool = True,
    second_tokens: bool = False,
    text: bool = True,
    undo: bool = False,
) -> None:
    """Everything that can be said about packed files; `backend` is the option that names theirs.

    Without `tokens` and `text` the verb has ``--tokens`` and those of `add_text` already; with `second_tokens` it
    compares two inputs; with `undo` K and V are for other engines than that which computed them.
    """
    group = parser.add_argument_group("packed files", _PACKED_TEXT)
    add_layout(group, backend)
    group.add_argument("--kv-heads", type=shared_options.positive, metavar="N", help="kv heads of a layer")
    group.add_argument("--head-dim", type=shared_options.positive, metavar="N", help="dimensions of a head")
    if tokens:
        group.add_argument("--tokens", type=numbers, default=(), metavar="N[,N...]", help="live tokens (of each layer)")
    if second_tokens:
        said = "live tokens of B (default: --tokens)"
        group.add_argument("--second-tokens", type=numbers, default=(), metavar="N[,N...]", help=said)
    if text:
        add_text(group)
    add_finding(group)
    group.add_argument("--packed", action="store_true", help="of a KV dump with both, take the packed variant")
    said = "read packed files as specified, also where their words contradict it"
    if not shared_options.has_option(parser, "--force"):
        group.add_argument("--force", dest="trust", action="store_true", help=said)
    else:  # one option for both: who replaces a file must learn that it silences the refusal as well
        force = next(action for action in parser._actions if "--force" in action.option_strings)
        force.help = f"{force.help}; {said}"
    help.fold(parser, group, "--help-packed")
    engine_options.add_engine(parser, undo=undo)


_PACKED_TEXT = (
    "What prefix caches and live cache files do not say themselves. Where sizes and words of the files leave one "
    "answer, it is inferred; what they contradict is refused, unless --force is given."
)


def add_layout(parser: Any, backend: str) -> None:
    """What stands for pack numbers: a backend, or the numbers; and the flash block."""
    parser.add_argument(
        backend, dest="backend", choices=tuple(BACKENDS), metavar="NAME", help=f"one of {', '.join(BACKENDS)}"
    )
    parser.add_argument(
        "--lp", type=shared_options.positive, metavar="N", help="pack number lP, where no backend is named"
    )
    parser.add_argument(
        "--hp", type=shared_options.positive, metavar="N", help="pack number hP, where no backend is named"
    )
    parser.add_argument("--flash-block", type=_block, metavar="N|none", help="tokens in a block of V (64), or none")


def add_finding(parser: Any) -> None:
    """Which files are meant, what is quantised in them, and in which order they lie."""
    parser.add_argument(
        "--int8", choices=("keys", "both"), help="what the engine quantised (attention_mode 9, 10; inferred)"
    )
    parser.add_argument("--name", metavar="NAME", help="which prefix, where a directory holds several")
    parser.add_argument("--layer-order", type=_addresses, default=(), metavar="HEX,...", help="live files by layer")
    parser.add_argument(
        "--pid", type=shared_options.positive, metavar="PID", help="the engine's process, which knows the order"
    )
    parser.add_argument("--ignore-markers", action="store_true", help="read a prefix whose markers are missing")


def add_text(parser: Any, model: str = "their geometry") -> None:
    """``--model``, of which `model` is taken, and ``--token-ids``: what the cache was computed with and from."""
    parser.add_argument(
        "--model", metavar="DIR", help=f"the MNN model's directory, a llama.cpp cache's .gguf file: {model}"
    )
    parser.add_argument(
        "--token-ids", metavar="IDS", help="ids of the text: 5,7,9 or a file: a JSON list, numbers, .npy"
    )


def add_target(parser: Any) -> None:
    """``-o``, ``-f`` and ``--capacity`` of a prefix cache that is written."""
    shared_options.add_output(parser, "directory to write the files to (default: beside IN)")
    parser.add_argument(
        "--capacity",
        type=shared_options.positive,
        metavar="N",
        help="tokens to leave room for (default: as before, else no more than there are: the engine makes room itself)",
    )


def geometry(arguments: argparse.Namespace, dtype: str | None = None) -> Geometry:
    """What the arguments say about the layout."""
    from ..packed.fitting import Geometry

    return Geometry(
        kv_heads=getattr(arguments, "kv_heads", None),
        head_dim=getattr(arguments, "head_dim", None),
        dtype=dtype,
        backend=arguments.backend,
        lP=arguments.lp,
        hP=arguments.hp,
        flash_block=arguments.flash_block,
    )


def options(arguments: argparse.Namespace, known: CacheInfo | None = None) -> PackedOptions | None:
    """What the arguments say about packed files, and for the rest what is `known`; None for verbs that read none."""
    from ..formats.options import PackedOptions
    from ..packed.fitting import of_layout

    if not hasattr(arguments, "ignore_markers"):
        return None
    dtype = arguments.dtype if arguments.dtype in shared_options.WORD_TYPES else None  # no layout has codes
    said = replace(geometry(arguments, dtype), int8=arguments.int8)
    return PackedOptions(
        geometry=said if known is None else said.or_else(of_layout(known.layout)),
        tokens=_tokens(arguments) or (tuple(layer.tokens for layer in known.layers) if known else ()),
        name=arguments.name,
        model=arguments.model,
        token_ids=token_ids(arguments),
        layer_order=arguments.layer_order,
        pid=arguments.pid,
        ignore_markers=arguments.ignore_markers,
        trust=known is not None or getattr(arguments, "trust", False) or getattr(arguments, "force", False),
        packed_dump=arguments.packed,
        states=known.states if known else None,
        heads=_heads(known),
    )


def _heads(known: CacheInfo | None) -> tuple[tuple[int, int], ...]:
    if known is None or known.is_uniform:
        return ()
    return tuple((layout.kv_heads, layout.head_dim) for layout in map(known.layout_of, known.layers))


LAYING = (
    *("tokens", "model", "backend", "kv_heads", "head_dim", "lp", "hp", "flash_block", "int8", "token_ids", "name"),
    *("layer_order", "pid", "ignore_markers", "packed", "trust"),
)
"""The options about packed files, as the namespace calls them."""


def refuse_idle(arguments: argparse.Namespace, paths: Sequence[str], used: Sequence[str] = ()) -> None:
    """`UsageError` for an option about packed files where no input is any, but for those that are `used` otherwise."""
    engine_options.refuse_idle(arguments, paths)
    idle = [name for name in LAYING if name not in used and idle_options.given(arguments, name)]
    if any(map(engine_options.is_llama, paths)) or any(map(engine_options.has_engine_file, paths)):
        idle = [name for name in idle if name not in engine_options.HEADS]
    if idle and not any(map(may_be_packed, paths)):
        for name in idle:
            about = "packed files of MNN's" + (" and caches of llama.cpp" if name in engine_options.HEADS else "")
            idle_options.refuse(arguments, [name], f"is about {about}, and {' '.join(paths)} holds none")


def check_origin(arguments: argparse.Namespace, info: CacheInfo | None, where: str) -> None:
    """`SourceError` where ``--model`` or ``--token-ids`` are others than those that a cache was made with."""
    from ..errors import SourceError
    from ..formats.mnn import origin_differences

    model = None if engine_options.is_gguf(arguments.model) else arguments.model  # of the other input
    if info is not None and (model or arguments.token_ids):
        for difference in origin_differences(info, model, token_ids(arguments)):
            raise SourceError(f"{where}: {difference}")


def may_be_packed(path: str) -> bool:
    """Whether the options about packed files have something to say of a path."""
    from ..errors import KvmnnError
    from ..formats.mnn import find_packed, has_packed_dump

    try:
        return has_packed_dump(path) or find_packed(path) is not None
    except (KvmnnError, OSError):
        return True  # and what is wrong with it is said when it is read


def in_the_words_of(arguments: argparse.Namespace, message: str) -> str:
    """A message about packed files, with the names that the verb's options have."""
    if hasattr(arguments, "backend"):
        message = re.sub(r"--backend\b", idle_options.option(arguments, "backend"), message)
    if any(not hasattr(arguments, name[2:].replace("-", "_")) for name in re.findall(_SAID, message)):
        message += f"; {arguments.parser.prog} has no such option, kvmnn unpack has"
    if not hasattr(arguments, "cast"):
        message = message.replace("--cast converts them", "arrays (-o OUT.npz) become it by kvmnn pack --cast")
    return message


def with_jobs(arguments: argparse.Namespace, message: str) -> str:
    """A message about a folder of files, with the option that takes it."""
    of_one = getattr(arguments, "against", None)
    if getattr(arguments, "jobs", 0) is None and not of_one and _FOLDER.search(message):
        message += "; --jobs N takes each file below it by itself"
    return message


_FOLDER = re.compile("not a file kvmnn knows: (it is a folder with|the folder has no manifest)")


_SAID = re.compile(r"--(?:kv-heads|head-dim|backend)\b")


def _tokens(arguments: argparse.Namespace) -> tuple[int, ...]:
    """The live tokens that were said: of each layer, or one number for all."""
    said: tuple[int, ...] | int | None = arguments.tokens
    return said if isinstance(said, tuple) else (said,) if said else ()


def token_ids(arguments: argparse.Namespace) -> TokenIds | None:
    """Count and hash of the ids in the file that ``--token-ids`` names, where it does."""
    from ..packed.cache_info import TokenIds

    if arguments.token_ids is None:
        return None
    return TokenIds.of(loaded_ids(arguments), ids_label(arguments))


def loaded_ids(arguments: argparse.Namespace) -> Any:
    """The ids that ``--token-ids`` says, or that are in the file it names; read once, as that may be a pipe."""
    from ..formats.mnn import load_token_ids
    from ..packed.cache_info import MAX_TOKEN_ID

    if not hasattr(arguments, "loaded_ids"):
        said = arguments.token_ids
        arguments.loaded_ids = _parsed(said, MAX_TOKEN_ID) if _said(said) else load_token_ids(said)
    return arguments.loaded_ids


def ids_label(arguments: argparse.Namespace) -> str:
    """What messages call the ids: the option, or the file that it names."""
    said: str = arguments.token_ids
    return "--token-ids" if _said(said) else "standard input" if said == printing.STDIO else said


def _said(ids: str) -> bool:
    """Whether these are ids themselves, or meant as such, and not the name of a file."""
    return ids != printing.STDIO and _IDS.match(ids) is not None and not os.path.exists(ids)


_IDS = re.compile(r"[-+.,\[\]\s\d]*$|\s*\[|[^/]*,")
"""What is or looks like ids, where no file is called so: numbers alone, a bracket, or a comma in what is no path."""


def _parsed(said: str, most: int) -> list[int]:
    """Numbers up to `most` between spaces or commas, or a JSON list; `OptionError` for what is none."""
    from ..errors import OptionError
    from ..text import visible

    text = said.strip()
    words = re.split(r"\s*,\s*|\s+", text[text.startswith("[") : len(text) - text.endswith("]")].strip())
    wrong = ""
    if text.startswith("[") != text.endswith("]"):
        wrong = "one of its brackets is missing"
    elif words == [""]:
        wrong = "it is empty"
    else:
        for place, word in enumerate(words):
            if not re.fullmatch(r"\d{1,10}", word) or int(word) > most:
                wrong = f"number {place + 1} is {visible(word[:40]) or 'empty'}"
                break
    if wrong:
        shown = visible(said if len(said) <= 60 else said[:57] + "...") or "''"
        expected = f"numbers from 0 to {most:,} between commas, as 5,7,9, or a file's name"
        raise OptionError(f"--token-ids {shown}: {wrong}: expected {expected}")
    return [int(word) for word in words]


def numbers(text: str) -> tuple[int, ...]:
    """``32`` or ``32,48``: numbers above zero."""
    return tuple(shared_options.positive(part) for part in text.split(","))


def _addresses(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not all(re.fullmatch(r"[0-9A-Fa-f]{16}", part) for part in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of addresses of 16 hexadecimal digits")
    return found


def _block(text: str) -> Any:
    return "none" if text == "none" else shared_options.positive(text)
