"""What each action of ``kvmnn store`` does."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..text import shorten_names
from . import loading, packed_options
from .printing import CommandResult, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..arrays.layer_cache import LayerCache
    from ..arrays.source import Source
    from ..store import MatchResult, PrefixStore, PutResult, StoredPrefix, StoreExportResult

_MAX_MODELS_SHOWN = 3


def read_layers(source: Source, arguments: argparse.Namespace) -> list[LayerCache]:
    """K and V of what is put, of each of its tokens."""
    from ..errors import KvmnnError
    from ..store import read_layer_caches
    from ..store.space import split_windows, validate_layers

    layers = read_layer_caches(source, token_major=arguments.token_major, with_windows=True, with_states=True)
    full_layers, window_layers = split_windows(layers, list_window_layers(layers))
    try:
        return [*validate_layers(full_layers, len(resolve_ids(source, arguments)), window_layers), *window_layers]
    except KvmnnError as error:
        raise KvmnnError(f"{' '.join(arguments.inputs)}: {error}") from None


def list_window_layers(layers: Sequence[LayerCache]) -> list[int]:
    """The layers that contain the last tokens of their text alone."""
    return [cache.layer for cache in layers if cache.tokens < cache.tokens_seen]


def _run_put(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    source, layers, model = arguments.read, arguments.layers, arguments.made_by
    other_models = [other_model for other_model in store.models if other_model != model]
    if other_models and model not in store.models and not arguments.force:
        raise UsageError(
            f"{arguments.store}: {_describe_models(other_models, model)}, these are of "
            f"{shorten_names([*other_models, model])[model]} "
            "(--force puts them as well)"
        )
    types = sorted({array.dtype for array in source.arrays})
    if len(types) > 1:
        note_text = f"the arrays are {' and '.join(types)}: put as {layers[0].dtype}, which has every number of them"
        loading.report_notes([note_text], arguments)
    dequantised = source.code_types
    if dequantised:
        note_text = (
            f"K and V were dequantised from {', '.join(dequantised)}: the store takes them for this model's own, and "
            "what it has of a text first stays (--fingerprint puts them apart)"
        )
        loading.report_notes([note_text], arguments)
    windows = list_window_layers(layers)
    put_result = store.put(resolve_ids(source, arguments), layers, model=model, windows=windows, states=source.states)
    _raise_if_unavailable(put_result)
    return put_result, 0


def _raise_if_unavailable(result: MatchResult | StoredPrefix | PutResult) -> None:
    from ..store import BackendUnavailableError

    if result.outage:
        raise BackendUnavailableError("; ".join(result.notes))


def resolve_ids(source: Source, arguments: argparse.Namespace) -> Any:
    """The token ids of what is put: as said, which must not contradict the file's own; else the file's."""
    from ..formats.llama import NO_TOKEN
    from ..store.sources import read_saved_ids, resolve_token_ids

    if arguments.token_ids is None:
        return resolve_token_ids(source)
    cache_ids = read_saved_ids(source)
    specified_ids = _load_ids(arguments)
    for token_index, (specified_id, cache_id) in enumerate(
        zip(specified_ids.tolist(), cache_ids if cache_ids is not None else [], strict=False)
    ):
        if specified_id != cache_id and cache_id != NO_TOKEN and not arguments.force:
            raise UsageError(
                f"{' '.join(arguments.inputs)}: its token {token_index} is {cache_id}, --token-ids says {specified_id} "
                "(leave --token-ids out, or --force)"
            )
    return (
        specified_ids
        if cache_ids is None or len(cache_ids) != len(specified_ids)
        else resolve_token_ids(source, specified_ids)
    )


def _run_match(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    ids, model = _load_ids(arguments), _choose_model(store, arguments)
    match_result = store.find(ids, model=model, dtype=arguments.dtype)
    _raise_if_unavailable(match_result)
    _report_other_precisions(match_result, arguments)
    _report_missed_precision(store, match_result, ids, model, arguments)
    return match_result, 0 if match_result.tokens else 1


def _report_other_precisions(
    result: MatchResult | StoredPrefix | StoreExportResult, arguments: argparse.Namespace
) -> None:
    """Which precision was taken, of several that have some of the text."""
    if result.others:
        other_precisions = " and ".join(f"{tokens:,} in {dtype}" for dtype, tokens in result.others.items())
        text = (
            f"taken in {result.dtype}, which has {result.tokens:,} tokens; stored as well: {other_precisions} (--dtype)"
        )
        loading.report_notes([text], arguments)


def _report_missed_precision(
    store: PrefixStore, result: MatchResult | StoredPrefix, ids: Any, model: str, arguments: Any
) -> None:
    """Where nothing is stored in the precision that was said, the one in which something is."""
    other_match = store.find(ids, model=model) if arguments.dtype is not None and not result.tokens else None
    if other_match is not None and other_match.tokens:
        text = (
            f"nothing is stored in {arguments.dtype}; {other_match.tokens:,} tokens are in {other_match.dtype} "
            f"(--dtype)"
        )
        loading.report_notes([text], arguments)
    partial_match = store.find(ids, model=model, dtype=arguments.dtype, partial=True) if not result.tokens else None
    if partial_match is not None and partial_match.tokens:
        text = (
            f"{partial_match.tokens:,} tokens of it are stored without windows and state, which are at other lengths "
            f"alone: a "
            "model continues only from there (get --partial takes the layers with full attention)"
        )
        loading.report_notes([text], arguments)


def _run_get(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    from ..packed.backends import BACKENDS
    from ..packed.fitting import PackedGeometry
    from ..store import write_prefix

    ids, model = _load_ids(arguments), _choose_model(store, arguments)
    geometry, dtype = packed_options.build_geometry(arguments), arguments.dtype
    if arguments.rerotate and arguments.name is None and arguments.capacity is None and geometry == PackedGeometry():
        raise UsageError("--rerotate is about the prefix cache of an engine: name its layout (--backend) and --name")
    if arguments.cast and arguments.name is None and arguments.capacity is None and geometry == PackedGeometry():
        raise UsageError("--cast is about the prefix cache of an engine: name its layout (--backend) and --name")
    if geometry.backend is not None and dtype is None:
        match_result, backend_dtype = store.find(ids, model=model), BACKENDS[geometry.backend].dtype
        if backend_dtype in match_result.others:  # and no engine takes the other
            dtype = backend_dtype
            text = (
                f"taken in {backend_dtype}, which {geometry.backend} holds; {match_result.tokens:,} tokens are in "
                f"{match_result.dtype}"
            )
            loading.report_notes([text], arguments)
    prefix = store.get(ids, model=model, dtype=dtype, partial=arguments.partial)
    _raise_if_unavailable(prefix)
    loading.report_notes(prefix.notes, arguments, "warning")
    _report_other_precisions(prefix, arguments)
    _report_missed_precision(store, prefix, ids, model, arguments)
    arguments.found = {"tokens": prefix.tokens, "asked": prefix.requested_tokens, "notes": list(prefix.notes)}
    result = write_prefix(
        prefix,
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
    return result, 0


def _run_verify(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    verify_result = store.verify()
    return verify_result, 1 if verify_result.damaged or verify_result.beside or verify_result.anew else 0


def _load_ids(arguments: argparse.Namespace) -> Any:
    from ..errors import KvmnnError
    from ..store.token_ids import to_token_ids

    ids = packed_options.load_ids(arguments)
    try:
        return to_token_ids(ids)
    except KvmnnError as error:
        raise type(error)(
            f"{packed_options.get_ids_label(arguments)}: {str(error).removeprefix('token ids: ')}"
        ) from None


def build_fingerprint(arguments: argparse.Namespace) -> str | None:
    """The model that the options name."""
    from pathlib import Path

    from ..errors import SourceError
    from ..formats.mnn import compute_fingerprint

    specified: str | None = arguments.fingerprint
    if arguments.model is None:
        return specified
    try:
        model_fingerprint = compute_fingerprint(arguments.model)
    except SourceError as error:
        folder = Path(arguments.model)
        if specified is not None and folder.is_dir() and not any(folder.glob("*.mnn")):
            return specified  # a folder of settings alone: the text names the model
        raise SourceError(f"{error}; --fingerprint TEXT names a model that is neither MNN's nor a .gguf") from None
    return model_fingerprint if specified is None else f"{model_fingerprint} {specified}"


def _describe_models(models: Sequence[str], extra_model: str) -> str:
    """Which models a store has prefixes of."""
    names = shorten_names([*models, extra_model])
    shown_names = ", ".join(names[model] for model in models[:_MAX_MODELS_SHOWN]) + (
        " ..." if len(models) > _MAX_MODELS_SHOWN else ""
    )
    return (
        f"holds prefixes of the model {shown_names}"
        if len(models) == 1
        else f"holds prefixes of {len(models)} models ({shown_names})"
    )


def _choose_model(store: PrefixStore, arguments: argparse.Namespace) -> str:
    """The model that is meant: as the options say, or the only one that the store has."""
    specified, stored_models = build_fingerprint(arguments), store.models
    if specified is not None and (specified in stored_models or not stored_models):
        return specified
    if specified is not None:
        from ..errors import KvmnnError

        raise KvmnnError(
            f"{arguments.store}: {_describe_models(stored_models, specified)}, not of "
            f"{shorten_names([*stored_models, specified])[specified]}"
        )
    if len(stored_models) > 1:
        raise UsageError(
            f"{arguments.store}: holds prefixes of {len(stored_models)} models: --model or --fingerprint says which"
        )
    return stored_models[0] if stored_models else "none"


def _make_sequence_action(name: str) -> Any:
    """An action that is a call of the store with a text."""

    def run_action(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
        call = getattr(store, name)
        return call(_load_ids(arguments), model=_choose_model(store, arguments), dtype=arguments.dtype), 0

    return run_action


def _run_export(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    model, force = _choose_model(store, arguments), arguments.force
    export_result = store.export(
        _load_ids(arguments), arguments.output, model=model, dtype=arguments.dtype, force=force
    )
    _report_other_precisions(export_result, arguments)
    return export_result, 0


def _run_import(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    model, ids, layers = arguments.read
    put_result = store.put(ids, layers, model=model)
    _raise_if_unavailable(put_result)
    return put_result, 0


STORE_ACTIONS: dict[str, Any] = {
    "put": _run_put,
    "match": _run_match,
    "get": _run_get,
    "ls": lambda store, arguments: (store.ls(), 0),
    "stat": lambda store, arguments: (store.stats(), 0),
    "verify": _run_verify,
    "gc": lambda store, arguments: (store.gc(arguments.store_bytes), 0),
    "rm": _make_sequence_action("delete"),
    "pin": _make_sequence_action("pin"),
    "unpin": _make_sequence_action("unpin"),
    "export": _run_export,
    "import": _run_import,
}
"""By its name: a function of the store and the arguments that gives the result and the exit code."""
