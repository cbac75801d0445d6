"""What the verbs that deal with packed files share: the arguments that say what no file says."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..packed.backends import BACKENDS
from . import shared_options

if TYPE_CHECKING:
    from ..formats.options import PackedOptions
    from ..packed.cache_info import CacheInfo, TokenIds
    from ..packed.fitting import Geometry

_MAX_IDS = 1 << 30


def add_packed(parser: Any, backend: str = "--backend") -> None:
    """Everything that can be said about packed files; `backend` is the option that names theirs."""
    group = parser.add_argument_group("packed files", "what prefix caches and live cache files do not say themselves")
    add_layout(group, backend)
    group.add_argument("--kv-heads", type=shared_options.positive, metavar="N", help="kv heads of a layer")
    group.add_argument("--head-dim", type=shared_options.positive, metavar="N", help="dimensions of a head")
    group.add_argument("--int8", choices=("keys", "both"), help="what the engine quantised (attention_mode 9 or 10)")
    group.add_argument("--tokens", type=_numbers, default=(), metavar="N[,N...]", help="live tokens (of each layer)")
    add_text(group)
    group.add_argument("--name", metavar="NAME", help="which prefix, where a directory holds several")
    group.add_argument("--layer-order", type=_addresses, default=(), metavar="HEX,...", help="live files by layer")
    group.add_argument(
        "--pid", type=shared_options.positive, metavar="PID", help="the engine's process, which knows the order"
    )
    group.add_argument("--ignore-markers", action="store_true", help="read a prefix whose markers are missing")
    group.add_argument("--packed", action="store_true", help="of a KV dump with both, take the packed variant")


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


def add_text(parser: Any) -> None:
    """``--model`` and ``--token-ids``: what the cache was computed with and from."""
    parser.add_argument("--model", metavar="DIR", help="the MNN model's directory: geometry where it holds it")
    parser.add_argument("--token-ids", metavar="FILE", help="ids of the text: a JSON list, numbers, or a .npy file")


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
    said = replace(geometry(arguments, arguments.dtype), int8=arguments.int8)
    return PackedOptions(
        geometry=said if known is None else said.or_else(of_layout(known.layout)),
        tokens=arguments.tokens or (tuple(layer.tokens for layer in known.layers) if known else ()),
        name=arguments.name,
        model=arguments.model,
        token_ids=token_ids(arguments.token_ids),
        layer_order=arguments.layer_order,
        pid=arguments.pid,
        ignore_markers=arguments.ignore_markers,
        packed_dump=arguments.packed,
    )


def token_ids(path: str | None) -> TokenIds | None:
    """Count and hash of the ids in a file.

    Raises
    ------
    SourceError
        For a file that holds no list of ids.
    """
    if path is None:
        return None
    from ..errors import KvmnnError, SourceError
    from ..files.mapped import MappedFile
    from ..packed.cache_info import TokenIds

    file = MappedFile(path)
    if file.size > _MAX_IDS:
        raise SourceError(f"{file.label}: {file.size} bytes are too many for a list of token ids")
    try:
        return TokenIds.of(_ids(file.head(file.size)))
    except (ValueError, OverflowError) as exc:
        if isinstance(exc, KvmnnError):
            raise SourceError(f"{file.label}: {exc}") from None
        raise SourceError(f"{file.label}: holds no list of token ids") from None


def _ids(data: bytes) -> Any:
    import io
    import json

    import numpy as np

    if data.startswith(b"\x93NUMPY"):
        return np.load(io.BytesIO(data), allow_pickle=False).reshape(-1)
    text = data.decode()
    return (
        json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in re.split(r"[\s,]+", text.strip())]
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(shared_options.positive(part) for part in text.split(","))


def _addresses(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not all(re.fullmatch(r"[0-9A-Fa-f]{16}", part) for part in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of addresses of 16 hexadecimal digits")
    return found


def _block(text: str) -> Any:
    return "none" if text == "none" else shared_options.positive(text)
