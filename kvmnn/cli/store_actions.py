"""What each action of ``kvmnn store`` does."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..text import short_names
from . import loading, packed_options
from .printing import Result, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..arrays.layer_cache import LayerCache
    from ..arrays.source import Source
    from ..store import Exported, Matched, Prefix, PrefixStore, Put

_NAMED = 3


def layers_read(source: Source, arguments: argparse.Namespace) -> list[LayerCache]:
    """K and V of what is put, of each of its tokens."""
    from ..errors import KvmnnError
    from ..store import layers_of
    from ..store.space import checked_layers, split_windows

    layers = layers_of(source, token_major=arguments.token_major, with_windows=True, with_states=True)
    full, last = split_windows(layers, windows_in(layers))
    try:
        return [*checked_layers(full, len(ids_of(source, arguments)), last), *last]
    except KvmnnError as error:
        raise KvmnnError(f"{' '.join(arguments.inputs)}: {error}") from None


def windows_in(layers: Sequence[LayerCache]) -> list[int]:
    """The layers that contain the last tokens of their text alone."""
    return [cache.layer for cache in layers if cache.tokens < cache.tokens_seen]


def _put(store: PrefixStore, arguments: argparse.Namespace) -> tuple[Result, int]:
    source, layers, model = arguments.read, arguments.layers, arguments.made_by
    others = [other for other in store.models if other != model]
    if others and model not in store.models and not arguments.force:
        raise UsageError(
            f"{arguments.store}: {_held(others, model)}, these are of {short_names([*others, model])[model]} "
            "(--force puts them as well)"
        )
    types = sorted({array.dtype for array in source.arrays})
    if len(types) > 1:
        text = f"the arrays are {' and '.join(types)}: put as {layers[0].dtype}, which has every number of them"
        loading.report_notes([text], arguments)
    dequantised = source.code_types
    if dequantised:
        text = (
            f"K and V were dequantised from {', '.join(dequantised)}: the store takes them for this model's own, and "
            "what it has of a text first stays (--fingerprint puts them apart)"
        )
        loading.report_notes([text], arguments)
    windows = windows_in(layers)
    put = store.put(ids_of(source, arguments), layers, model=model, windows=windows, states=source.states)
    _refuse_outage(put)
    return put, 0


def _refuse_outage(result: Matched | Prefix | Put) -> None:
    from ..store import OutageError

    if result.outage:
        raise OutageError("; ".join(result.notes))


def ids_of(source: Source, arguments: argparse.Namespace) -> Any:
    """The token ids of what is put: as said, which must not contradict the file's own; else the file's."""
    from ..formats.llama import NO_TOKEN
    from ..store.sources import saved_ids, token_ids_of

    if arguments.token_ids is None:
        return token_ids_of(source)
    own = saved_ids(source)
    said = _ids(arguments)
    for place, (one, other) in enumerate(zip(said.tolist(), own if own is not None else [], strict=False)):
        if one != other and other != NO_TOKEN and not arguments.force:
            raise UsageError(
                f"{' '.join(arguments.inputs)}: its token {place} is {other}, --token-ids says {one} "
                "(leave --token-ids out, or --force)"
            )
    return said if own is None or len(own) != len(said) else token_ids_of(source, said)


def _match(store: PrefixStore, arguments: argparse.Namespace) -> tuple[Result, int]:
    ids, model = _ids(arguments), _model(store, arguments)
    found = store.find(ids, model=model, dtype=arguments.dtype)
    _refuse_outage(found)
    _report_others(found, arguments)
    _report_missed(store, found, ids, model, arguments)
    return found, 0 if found.tokens else 1


def _report_others(found: Matched | Prefix | Exported, arguments: argparse.Namespace) -> None:
    """Which precision was taken, of several that have some of the text."""
    if found.others:
        others = " and ".join(f"{tokens:,} in {dtype}" for dtype, tokens in found.others.items())
        text = f"taken in {found.dtype}, which has {found.tokens:,} tokens; stored as well: {others} (--dtype)"
        loading.report_notes([text], arguments)


def _report_missed(store: PrefixStore, found: Matched | Prefix, ids: Any, model: str, arguments: Any) -> None:
    """Where nothing is stored in the precision that was said, the one in which something is."""
    other = store.find(ids, model=model) if arguments.dtype is not None and not found.tokens else None
    if other is not None and other.tokens:
        text = f"nothing is stored in {arguments.dtype}; {other.tokens:,} tokens are in {other.dtype} (--dtype)"
        loading.report_notes([text], arguments)
    part = store.find(ids, model=model, dtype=arguments.dtype, partial=True) if not found.tokens else None
    if part is not None and part.tokens:
        text = (
            f"{part.tokens:,} tokens of it are stored without windows and state, which are at other lengths alone: a "
            "model continues only from there (get --partial takes the layers with full attention)"
        )
        loading.report_notes([text], arguments)


def _get(store: PrefixStore, arguments: argparse.Namespace) -> tuple[Result, int]:
    from ..packed.backends import BACKENDS
    from ..packed.fitting import Geometry
    from ..store import write_prefix

    ids, model = _ids(arguments), _model(store, arguments)
    geometry, dtype = packed_options.geometry(arguments), arguments.dtype
    if arguments.rerotate and arguments.name is None and arguments.capacity is None and geometry == Geometry():
        raise UsageError("--rerotate is about the prefix cache of an engine: name its layout (--backend) and --name")
    if arguments.cast and arguments.name is None and arguments.capacity is None and geometry == Geometry():
        raise UsageError("--cast is about the prefix cache of an engine: name its layout (--backend) and --name")
    if geometry.backend is not None and dtype is None:
        stored, held = store.find(ids, model=model), BACKENDS[geometry.backend].dtype
        if held in stored.others:  # and no engine takes the other
            dtype = held
            text = f"taken in {held}, which {geometry.backend} holds; {stored.tokens:,} tokens are in {stored.dtype}"
            loading.report_notes([text], arguments)
    found = store.get(ids, model=model, dtype=dtype, partial=arguments.partial)
    _refuse_outage(found)
    loading.report_notes(found.notes, arguments, "warning")
    _report_others(found, arguments)
    _report_missed(store, found, ids, model, arguments)
    arguments.found = {"tokens": found.tokens, "asked": found.asked, "notes": list(found.notes)}
    made = write_prefix(
        found,
        ids,
        arguments.output,
        where=arguments.store,
        geometry=geometry,
        name=arguments.name,
        capacity=arguments.capacity,
        cast=arguments.cast,
        rerotate=arguments.rerotate,
        model=arguments.model,
        force=arguments.force,
        threads=arguments.threads,
    )
    return made, 0


def _verify(store: PrefixStore, arguments: argparse.Namespace) -> tuple[Result, int]:
    verified = store.verify()
    return verified, 1 if verified.damaged or verified.beside or verified.anew else 0


def _ids(arguments: argparse.Namespace) -> Any:
    from ..errors import KvmnnError
    from ..store.token_ids import as_ids

    ids = packed_options.loaded_ids(arguments)
    try:
        return as_ids(ids)
    except KvmnnError as error:
        raise type(error)(f"{packed_options.ids_label(arguments)}: {str(error).removeprefix('token ids: ')}") from None


def fingerprint_said(arguments: argparse.Namespace) -> str | None:
    """The model that the options name."""
    from pathlib import Path

    from ..errors import SourceError
    from ..formats.mnn import fingerprint

    said: str | None = arguments.fingerprint
    if arguments.model is None:
        return said
    try:
        found = fingerprint(arguments.model)
    except SourceError as error:
        folder = Path(arguments.model)
        if said is not None and folder.is_dir() and not any(folder.glob("*.mnn")):
            return said  # a folder of settings alone: the text names the model
        raise SourceError(f"{error}; --fingerprint TEXT names a model that is neither MNN's nor a .gguf") from None
    return found if said is None else f"{found} {said}"


def _held(known: Sequence[str], other: str) -> str:
    """Which models a store has prefixes of."""
    names = short_names([*known, other])
    some = ", ".join(names[model] for model in known[:_NAMED]) + (" ..." if len(known) > _NAMED else "")
    return (
        f"holds prefixes of the model {some}" if len(known) == 1 else f"holds prefixes of {len(known)} models ({some})"
    )


def _model(store: PrefixStore, arguments: argparse.Namespace) -> str:
    """The model that is meant: as the options say, or the only one that the store has."""
    said, known = fingerprint_said(arguments), store.models
    if said is not None and (said in known or not known):
        return said
    if said is not None:
        from ..errors import KvmnnError

        raise KvmnnError(f"{arguments.store}: {_held(known, said)}, not of {short_names([*known, said])[said]}")
    if len(known) > 1:
        raise UsageError(
            f"{arguments.store}: holds prefixes of {len(known)} models: --model or --fingerprint says which"
        )
    return known[0] if known else "none"


def _of_text(name: str) -> Any:
    """An action that is a call of the store with a text."""

    def do(store: PrefixStore, arguments: argparse.Namespace) -> tuple[Result, int]:
        call = getattr(store, name)
        return call(_ids(arguments), model=_model(store, arguments), dtype=arguments.dtype), 0

    return do


def _export(store: PrefixStore, arguments: argparse.Namespace) -> tuple[Result, int]:
    model, force = _model(store, arguments), arguments.force
    written = store.export(_ids(arguments), arguments.output, model=model, dtype=arguments.dtype, force=force)
    _report_others(written, arguments)
    return written, 0


def _import(store: PrefixStore, arguments: argparse.Namespace) -> tuple[Result, int]:
    model, ids, layers = arguments.read
    put = store.put(ids, layers, model=model)
    _refuse_outage(put)
    return put, 0


ACTIONS: dict[str, Any] = {
    "put": _put,
    "match": _match,
    "get": _get,
    "ls": lambda store, arguments: (store.ls(), 0),
    "stat": lambda store, arguments: (store.stats(), 0),
    "verify": _verify,
    "gc": lambda store, arguments: (store.gc(arguments.store_bytes), 0),
    "rm": _of_text("delete"),
    "pin": _of_text("pin"),
    "unpin": _of_text("unpin"),
    "export": _export,
    "import": _import,
}
"""By its name: a function of the store and the arguments that gives the result and the exit code."""
