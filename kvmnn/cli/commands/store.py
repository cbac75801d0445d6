"""``kvmnn store``: K and V of texts, retrieved by the longest stored prefix."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..._util.named_tuple import NamedTuple
from ..._util.text import format_layers, pluralize, shorten_names
from ..._util.validation import repr_short
from .. import (
    break_even_options,
    console,
    dense_options,
    input_sources,
    layer_stream_options,
    packed_options,
    shared_options,
    store_simulation,
)
from ..command_parser import ActionHelp
from ..console import CommandResult, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ...arrays.layer_cache import LayerCache
    from ...arrays.source import Source
    from ...dense import RopeConfig
    from ...store import (
        MatchResult,
        PrefixStore,
        PutResult,
        StoredPrefix,
        StoreEntry,
        StoreExportResult,
        StoreKey,
        StoreStats,
    )
    from ...store.fingerprints import FingerprintMethod
    from ...store.results import CleanupResult

_MAX_MODELS_SHOWN = 3
_MAX_SESSION_TEXTS_SHOWN = 5
_MAX_LABEL_CHARACTERS, _MAX_LABEL_TOKENS = 40, 24
_LABEL_BEGINNING_CHARACTERS, _LABEL_END_CHARACTERS = 17, 18
"""Texts with one system prompt differ at their ends."""


def read_layers(source: Source, arguments: argparse.Namespace) -> list[LayerCache]:
    """Read K and V of every token of the sequence to store."""
    from ...errors import KvmnnError, OptionError
    from ...store import read_layer_caches
    from ...store.adapters import read_saved_ids
    from ...store.namespace import split_windows, validate_layers

    layers = read_layer_caches(
        source,
        token_major=arguments.token_major,
        with_windows=True,
        with_states=True,
        allow_absent_layers=arguments.ignore_contradictions,
    )
    full_layers, window_layers = split_windows(layers, list_window_layers(layers))
    ids = resolve_ids(source, arguments)
    try:
        return [*validate_layers(full_layers, len(ids), window_layers), *window_layers]
    except KvmnnError as error:
        text = f"{' '.join(arguments.inputs)}: {error}"
        if arguments.text is not None:
            text += f" ({len(ids):,} of --text, by the tokenizer of --model)"
            cache_ids = read_saved_ids(source)
            num_shared = 0 if cache_ids is None else min(len(cache_ids), len(ids))
            text += f"; the {num_shared:,} ids that the cache has are the same" if num_shared else ""
        raise (OptionError if isinstance(error, OptionError) else KvmnnError)(text) from None


def _name_ids_option(arguments: argparse.Namespace) -> str:
    return "--token-ids" if arguments.text is None else "--text"


def _check_num_layers(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` unless the cache has K and V of all layers of the model, if its folder says how many it has.

    What was put first settles the layers of a model: after a cache without its last one all others would be refused.
    """
    from ...errors import KvmnnError
    from ...formats.mnn.model import read_model_geometry

    folder = arguments.model
    if os.path.isfile(folder) and not packed_options.is_gguf(folder):
        folder = os.path.dirname(folder) or "."
    try:
        geometry = read_model_geometry(folder)
    except KvmnnError:  # it says nothing
        return
    kinds = [state.kind for state in geometry.states]
    num_expected = kinds.count("full") if kinds else geometry.num_layers
    is_certain = "unknown" not in kinds and (bool(kinds) or not arguments.read.states)
    numbers = [cache.layer for cache in arguments.layers]
    if is_certain and num_expected and len(numbers) not in (num_expected, geometry.num_layers):
        raise UsageError(
            f"{' '.join(arguments.inputs)}: has K and V of {pluralize(len(numbers), 'layer')} "
            f"({format_layers(numbers)}): expected {num_expected:,}, which the model in {arguments.model} has (--force "
            "puts them all the same)"
        )


def list_window_layers(layers: Sequence[LayerCache]) -> list[int]:
    """List the layers that contain only the last tokens of the sequence."""
    return [cache.layer for cache in layers if cache.tokens < cache.tokens_seen]


def _run_put(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    from ...arrays.completeness import format_missing, infer_completeness
    from ...arrays.source import is_rounded_by_codec
    from ...formats.layer_streams.codecs import read_attention

    _refuse_loss(arguments, is_lossy_store=store.is_lossy)
    source, layers, model = arguments.read, arguments.layers, arguments.made_by
    _refuse_second_model(store, model, arguments)
    types = sorted({array.dtype for array in source.arrays})
    if len(types) > 1:
        note_text = f"the arrays are {' and '.join(types)}: put as {layers[0].dtype}, which has every number of them"
        input_sources.report_notes([note_text], arguments)
    dequantised = source.code_types
    if dequantised:
        note_text = (
            f"K and V were dequantised from {', '.join(dequantised)}: the store takes them for this model's own, and "
            "what it has of a text first stays (--fingerprint puts them apart)"
        )
        input_sources.report_notes([note_text], arguments)
    windows = list_window_layers(layers)
    ids = resolve_ids(source, arguments)
    label = arguments.label or _make_label(ids, arguments)
    attention = None if arguments.attention is None else read_attention(arguments.attention)
    put_result = store.put(
        ids,
        layers,
        model=model,
        windows=windows,
        states=source.states,
        label=label,
        keep_label=arguments.label is None,
        attention=attention,
        loss=_shorten_loss(source.metadata),
    )
    _raise_if_unavailable(put_result)
    if arguments.ignore_contradictions and put_result.stored_tokens == put_result.tokens:
        absent_lines = format_missing(infer_completeness(source))
        put_result = replace(put_result, notes=(*put_result.notes, *absent_lines))
    if put_result.stored_bytes and put_result.is_lossy and is_rounded_by_codec(source.metadata):
        note_text = "K and V were rounded before: what was lost in all is not known"
        put_result = replace(put_result, predicted_kl=None, notes=(*put_result.notes, note_text))
    if arguments.label is not None and put_result.stored_tokens < put_result.tokens:
        text = f"the label {arguments.label!r} was not given: texts that are stored as a whole have labels"
        input_sources.report_notes([text], arguments)
    if arguments.label is not None and (num_texts := store.count_labelled(arguments.label)) > 1:
        text = f"{num_texts} texts are called {arguments.label!r} now: name them by their handles (store ls)"
        input_sources.report_notes([text], arguments)
    return put_result, _get_put_code(put_result)


def _refuse_second_model(store: PrefixStore, model: str, arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for K and V of another model than the store has, unless ``--force`` is given."""
    models = store.models
    if models and model not in models and not arguments.force:
        raise UsageError(
            f"{arguments.store}: {_describe_models(models, model)}, these are of "
            f"{shorten_names([*models, model])[model]} (--force puts them as well)"
        )


def _shorten_loss(metadata: Mapping[str, str]) -> str:
    """Return what K and V have lost without numbers, which are of one text."""
    from ...arrays.source import CAST_TEXT, LOSSY_KEY, join_losses

    sentences = [text for text in metadata.get(LOSSY_KEY, "").split("; ") if not text.startswith("KL divergence")]
    return join_losses(*(text.partition(", ")[0] if text.startswith(CAST_TEXT) else text for text in sentences))


def _refuse_loss(arguments: argparse.Namespace, *, is_lossy_store: bool) -> None:
    """Raise for input that records a loss, unless the store says LOSSY of all that it has.

    K and V of a model that were cast are taken: they are what an engine of that type computes with.
    """
    from ...arrays.source import LOSSY_KEY, is_only_cast

    loss = arguments.read.metadata.get(LOSSY_KEY, "")
    if loss and not is_only_cast(loss) and not is_lossy_store:
        raise UsageError(
            f"{' '.join(arguments.inputs)}: is LOSSY, as it records: a store of lossless units would not say so: "
            "expected a store of transform streams (--codec transform:PROFILE)"
        )


def _make_label(ids: Any, arguments: argparse.Namespace) -> str | None:
    """Return a short text, or the beginning and the end of a long one, if the model's tokenizer can be opened."""
    from ...errors import KvmnnError

    read_text: str | None = getattr(arguments, "read_text", None)
    parts = [read_text] if read_text is not None and len(arguments.loaded_ids) == len(ids) else []
    if not parts and arguments.model is not None:
        from ...lm.tokenizer import Tokenizer

        try:
            if Tokenizer.find_file(arguments.model) is None:
                return None
            tokenizer = Tokenizer.open_for_model(arguments.model)
            is_short = len(ids) <= 2 * _MAX_LABEL_TOKENS
            pieces = [ids] if is_short else [ids[:_MAX_LABEL_TOKENS], ids[-_MAX_LABEL_TOKENS:]]
            parts = list(map(tokenizer.decode, pieces))
        except KvmnnError:
            return None
    parts = [" ".join("".join(char if char.isprintable() else " " for char in part).split()) for part in parts]
    text = " ... ".join(parts)
    return (text if len(text) <= _MAX_LABEL_CHARACTERS else _shorten_label(text)) or None


def _shorten_label(text: str) -> str:
    """Return the first and the last words of a text."""
    beginning, end = text[:_LABEL_BEGINNING_CHARACTERS], text[-_LABEL_END_CHARACTERS:]
    if text[_LABEL_BEGINNING_CHARACTERS] != " ":
        beginning = beginning.rpartition(" ")[0] or beginning
    if text[-_LABEL_END_CHARACTERS - 1] != " ":
        end = end.partition(" ")[2] or end
    return f"{beginning.strip()} ... {end.strip()}"


def _raise_if_unavailable(result: MatchResult | StoredPrefix | PutResult) -> None:
    from ...store import BackendUnavailableError

    if result.outage:
        raise BackendUnavailableError("; ".join(result.notes))


def resolve_ids(source: Source, arguments: argparse.Namespace) -> Any:
    """Return the token ids to store: those of the options, which must match the file's, or else the file's.

    Of a text that goes on after the cache's tokens, the ids of these.
    """
    from ...formats.llama import NO_TOKEN
    from ...store.adapters import read_saved_ids, resolve_token_ids

    if arguments.token_ids is None and arguments.text is None:
        return resolve_token_ids(source)
    cache_ids = read_saved_ids(source)
    specified_ids = _load_ids(arguments)
    num_cache_ids = 0 if cache_ids is None else len(cache_ids)
    for token_index, (specified_id, cache_id) in enumerate(
        zip(specified_ids.tolist(), cache_ids if cache_ids is not None else [], strict=False)
    ):
        if specified_id != cache_id and cache_id != NO_TOKEN and not arguments.force:
            option = _name_ids_option(arguments)
            raise UsageError(
                f"{' '.join(arguments.inputs)}: its token {token_index} is {cache_id}, {option} says {specified_id} "
                f"(leave {option} out, or --force): {num_cache_ids:,} ids in the cache, {len(specified_ids):,} of "
                f"{option}"
            )
    if arguments.text is not None and 0 < num_cache_ids < len(specified_ids):
        if not hasattr(arguments, "has_text_note"):  # it is resolved again with the layers
            arguments.has_text_note = True
            text = f"the cache has the first {num_cache_ids:,} of the {len(specified_ids):,} tokens of --text"
            input_sources.report_notes([text], arguments)
        specified_ids = specified_ids[:num_cache_ids]
    return (
        specified_ids
        if cache_ids is None or len(cache_ids) != len(specified_ids)
        else resolve_token_ids(source, specified_ids)
    )


def _run_match(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    ids, model = _load_ids(arguments), _choose_model(store, arguments)
    match_result = store.find(ids, model=model, dtype=arguments.dtype)
    _raise_if_unavailable(match_result)
    input_sources.report_notes(match_result.notes, arguments, "warning")
    _report_other_precisions(match_result, arguments)
    _report_missed_precision(store, match_result, ids, model, arguments)
    return match_result, 0 if match_result.tokens else 1


def _report_other_precisions(
    result: MatchResult | StoredPrefix | StoreExportResult, arguments: argparse.Namespace
) -> None:
    """Report which precision was used, if several contain part of the sequence."""
    if result.other_precisions:
        other_precisions = " and ".join(f"{tokens:,} in {dtype}" for dtype, tokens in result.other_precisions.items())
        text = (
            f"taken in {result.dtype}, which has {result.tokens:,} tokens; stored as well: {other_precisions} (--dtype)"
        )
        input_sources.report_notes([text], arguments)


def _report_missed_precision(
    store: PrefixStore, result: MatchResult | StoredPrefix, ids: Any, model: str, arguments: Any
) -> None:
    """Report the precision that has a prefix if the requested one has none."""
    other_match = store.find(ids, model=model) if arguments.dtype is not None and not result.tokens else None
    if other_match is not None and other_match.tokens:
        text = (
            f"nothing is stored in {arguments.dtype}; {other_match.tokens:,} tokens are in {other_match.dtype} "
            f"(--dtype)"
        )
        input_sources.report_notes([text], arguments)
    partial_match = store.find(ids, model=model, dtype=arguments.dtype, partial=True) if not result.tokens else None
    if partial_match is not None and partial_match.tokens:
        text = (
            f"{partial_match.tokens:,} tokens of it are stored without windows and state, which are at other lengths "
            f"alone: a "
            "model continues only from there (get --partial takes the layers with full attention)"
        )
        input_sources.report_notes([text], arguments)
    elif arguments.resolved is not None and not result.tokens:
        text = "this text was put, and is damaged or was evicted since: nothing of it is left"
        input_sources.report_notes([text], arguments)


def _run_get(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    from ...packed.backends import BACKENDS
    from ...packed.inference import PackedGeometry
    from ...store import write_prefix
    from ...store.fingerprints import MNN_METHOD

    ids, model = _load_ids(arguments), _choose_model(store, arguments)
    geometry, dtype = packed_options.build_geometry(arguments), arguments.dtype
    if arguments.rerotate and arguments.name is None and arguments.capacity is None and geometry == PackedGeometry():
        raise UsageError("--rerotate is about the prefix cache of an engine: name its layout (--backend) and --name")
    if arguments.cast and arguments.name is None and arguments.capacity is None and geometry == PackedGeometry():
        raise UsageError("--cast is about the prefix cache of an engine: name its layout (--backend) and --name")
    if geometry.backend is not None and dtype is None:
        match_result, backend_dtype = store.find(ids, model=model), BACKENDS[geometry.backend].dtype
        if backend_dtype in match_result.other_precisions:  # and no engine takes the other
            dtype = backend_dtype
            text = (
                f"taken in {backend_dtype}, which {geometry.backend} holds; {match_result.tokens:,} tokens are in "
                f"{match_result.dtype}"
            )
            input_sources.report_notes([text], arguments)
    prefix = store.get(ids, model=model, dtype=dtype, partial=arguments.partial)
    _raise_if_unavailable(prefix)
    input_sources.report_notes(prefix.notes, arguments, "warning")
    _report_other_precisions(prefix, arguments)
    _report_missed_precision(store, prefix, ids, model, arguments)
    mnn_model, makes_prefix = arguments.model, arguments.name is not None or geometry != PackedGeometry()
    if mnn_model is not None and makes_prefix and _choose_fingerprint_method(mnn_model) is not MNN_METHOD:
        text = (
            f"{mnn_model}: is no MNN model: the prefix cache does not record which model it is for (a handle in place "
            "of --text leaves --model to the MNN model's folder)"
        )
        input_sources.report_notes([text], arguments)
        mnn_model = None
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
        model=mnn_model,
        force=arguments.force,
        threads=arguments.threads,
    )
    input_sources.report_notes(result.written.notes, arguments)
    return result, 0


def _run_verify(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    verify_result = store.verify()
    return (
        verify_result,
        1 if verify_result.damaged or verify_result.damaged_files or verify_result.rebuilt_parts else 0,
    )


def _run_gc(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    cleanup_result = store.gc(arguments.store_bytes)
    return cleanup_result, 1 if cleanup_result.excess_bytes else 0


def _load_ids(arguments: argparse.Namespace) -> Any:
    from ...errors import KvmnnError
    from ...store.namespace import to_token_ids

    if arguments.resolved is not None:
        return arguments.resolved.ids
    ids = _encode_text(arguments) if arguments.text is not None else packed_options.load_ids(arguments)
    try:
        return to_token_ids(ids)
    except KvmnnError as error:
        raise type(error)(
            f"{packed_options.get_ids_label(arguments)}: {str(error).removeprefix('token ids: ')}"
        ) from None


def _encode_text(arguments: argparse.Namespace) -> Any:
    """Return the ids of ``--text``: of a JSON list of messages as the chat template of the model renders it."""
    from ...lm.chat_template import is_chat_file, read_prompt_ids
    from ...lm.tokenizer import Tokenizer

    if not hasattr(arguments, "loaded_ids"):
        text, arguments.loaded_ids = read_prompt_ids(arguments.text, Tokenizer.open_for_model(arguments.model))
        if is_chat_file(arguments.text):
            # without the words of the template, with which all chats begin and end
            text = " ".join(message["content"] for message in json.loads(text)["messages"])
        arguments.read_text = text
    return arguments.loaded_ids


def build_fingerprint(arguments: argparse.Namespace) -> str | None:
    """Return the fingerprint of the model that the options name."""
    specified: str | None = arguments.fingerprint
    if arguments.model is None:
        return specified
    from pathlib import Path

    from ...errors import SourceError
    from ...store.encryption import make_cipher
    from ...store.fingerprints import read_or_compute_fingerprint

    try:
        model_fingerprint = read_or_compute_fingerprint(
            arguments.model,
            Path(arguments.store),
            write=arguments.action not in _READ_ONLY_ACTIONS,
            cipher=make_cipher(arguments.key),
            method=_choose_fingerprint_method(arguments.model),
        )
    except SourceError as error:
        folder = Path(arguments.model)
        if specified is not None and folder.is_dir() and not _has_model_files(folder):
            return specified  # a folder of settings alone: the text names the model
        raise SourceError(f"{error}; --fingerprint TEXT names a model that is none of MNN, ONNX and .gguf") from None
    return model_fingerprint if specified is None else f"{model_fingerprint} {specified}"


def _has_model_files(folder: Path) -> bool:
    """Return whether a folder has an MNN or ONNX model."""
    return any(any(folder.glob(pattern)) for pattern in ("*.mnn", "*.onnx", "onnx/*.onnx", "genai_config.json"))


def _choose_fingerprint_method(model: str) -> FingerprintMethod:
    """Choose how to compute the fingerprint of a model: for one of ONNX as ``generate --store`` does."""
    from pathlib import Path

    from ...store.fingerprints import MNN_METHOD, FingerprintMethod

    path = Path(model)
    if packed_options.is_gguf(model) or (path.is_dir() and (any(path.glob("*.mnn")) or not _has_model_files(path))):
        return MNN_METHOD
    from ...lm.onnx.model_files import compute_fingerprint, find_model, list_fingerprint_files

    return FingerprintMethod(compute_fingerprint, list_fingerprint_files, lambda name: find_model(name).graph)


def _describe_models(models: Sequence[str], extra_model: str) -> str:
    """Describe which models have prefixes in a store."""
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
    """Return the model of the options, or the only one in the store."""
    if arguments.resolved is not None:
        model: str = arguments.resolved.namespace.model
        return model
    specified, stored_models = build_fingerprint(arguments), store.models
    if specified is not None and (specified in stored_models or not stored_models):
        return specified
    if specified is not None:
        from ...errors import KvmnnError

        raise KvmnnError(
            f"{arguments.store}: {_describe_models(stored_models, specified)}, not of "
            f"{shorten_names([*stored_models, specified])[specified]}"
        )
    if len(stored_models) > 1:
        raise UsageError(
            f"{arguments.store}: holds prefixes of {len(stored_models)} models: --model or --fingerprint says which"
        )
    return stored_models[0] if stored_models else "none"


def _forget_session(store: PrefixStore, name: str) -> CleanupResult | None:
    """Remove the session with this name and return what was done; None where none has it, or a text has it as label."""
    from ...errors import KvmnnError
    from ...store.results import MIN_HANDLE_LETTERS, CleanupResult

    if name not in store.sessions() or store.has_label(name):
        return None
    texts = []
    with suppress(KvmnnError):  # a damaged session is removed, too
        texts = store.find_session_texts(name)
    store.forget(name)
    names = [
        f"{text.key.hex()[:MIN_HANDLE_LETTERS]} ({pluralize(text.ids.size, 'token')})"
        for text in texts[:_MAX_SESSION_TEXTS_SHOWN]
    ]
    names += ["..."] if len(texts) > len(names) else []
    reason = f"only the session {repr_short(name)} was removed, with its token ids"
    reason += f"; these texts with K and V of it stay: {', '.join(names)}" if names else ""
    return CleanupResult(kept=reason)


def _run_remove(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    from ...errors import KvmnnError

    cleanup_result = store.delete(_load_ids(arguments), model=_choose_model(store, arguments), dtype=arguments.dtype)
    input_sources.report_notes(cleanup_result.notes, arguments, "warning")
    if cleanup_result.is_refused:
        raise KvmnnError(f"{arguments.store}: nothing was removed: the text is pinned (kvmnn store unpin)")
    return cleanup_result, 0


def _run_pin(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    return store.pin(_load_ids(arguments), model=_choose_model(store, arguments), dtype=arguments.dtype), 0


def _run_unpin(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    """Unpin a text that may be gone, with all others of its model: then no stored model is that of the pin."""
    ids = _load_ids(arguments)
    model: str | None = build_fingerprint(arguments)
    if arguments.resolved is not None or (model is None and len(store.models) > 1):
        model = _choose_model(store, arguments)
    return store.unpin(ids, model=model, dtype=arguments.dtype), 0


def _run_export(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    model, force = _choose_model(store, arguments), arguments.force
    export_result = store.export(
        _load_ids(arguments), arguments.output, model=model, dtype=arguments.dtype, force=force
    )
    _report_other_precisions(export_result, arguments)
    return export_result, 0


def _run_stat(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    result = _read_stats(store, arguments)
    if not break_even_options.has_speed(arguments):
        return result, 0
    from dataclasses import replace

    from ...errors import KvmnnError
    from ...store.tier_times import MAX_TIMED_TOKENS, TIMED_CODECS, measure_break_even

    if _names_text(arguments):
        ids, model, dtype = _load_ids(arguments), _choose_model(store, arguments), arguments.dtype
    else:
        keys = [entry.key for entry in store.ls().texts if entry.key]
        if not keys:
            raise KvmnnError(f"{arguments.store}: --speed times a stored text, and there is none")
        text = store.resolve(keys[0])
        ids, model, dtype = text.ids, text.namespace.model, text.namespace.dtype
    prefix = store.get(ids[:MAX_TIMED_TOKENS], model=model, dtype=dtype)
    report = measure_break_even(
        prefix.layers,
        codecs=tuple(dict.fromkeys([store.codec, *TIMED_CODECS])),
        profile=store.profile,
        codec_options=store.codec_options,
        engine=break_even_options.read_engine_times(arguments),
        link=arguments.load_speed,
        threads=arguments.threads,
    )
    if store.is_lossy:
        note_text = "K and V are the rounded ones of a LOSSY store: of exact ones the ratios differ."
        report = replace(report, notes=(note_text,))
    return replace(result, break_even=report), 0


def _read_stats(store: PrefixStore, arguments: argparse.Namespace) -> StoreStats | StoreEntry:
    if arguments.namespaces:
        if arguments.namespace is not None or _names_text(arguments):
            raise UsageError("--namespaces is about all of them: no --namespace and no text")
        return replace(store.stats(all_namespaces=True), namespaces=tuple(store.namespaces()))
    if not _names_text(arguments):
        return store.stats()
    return store.describe(_load_ids(arguments), model=_choose_model(store, arguments), dtype=arguments.dtype)


def _get_put_code(put_result: PutResult) -> int:
    """Return 1 if not all of a text is stored, by this put or by an earlier one."""
    return 1 if put_result.stored_tokens < put_result.tokens else 0


def _names_text(arguments: argparse.Namespace) -> bool:
    """Return whether a label, a handle, ids or a text say which stored text is meant."""
    return any(value is not None for value in (arguments.resolved, arguments.token_ids, arguments.text))


def _run_import(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    from ...store.export import read_exported_model

    _refuse_second_model(store, read_exported_model(arguments.inputs[0], arguments.key), arguments)
    put_result = store.import_file(arguments.read, label=arguments.label)
    _raise_if_unavailable(put_result)
    return put_result, _get_put_code(put_result)


def _run_serve_metrics(store: PrefixStore, arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    """Serve the figures of a store until Ctrl-C."""
    from ...store.metrics import format_prometheus, make_metrics_server

    def read_text() -> str:
        # sums, without a label of the namespace: names of tenants are sealed in the store, and whoever reads a monitor
        # would see them all
        return format_prometheus(store.usage(all_namespaces=True), store.stats(all_namespaces=True))

    with make_metrics_server(read_text, arguments.listen) as server:
        host, port = str(server.server_address[0]), server.server_address[1]
        console.print_note(arguments, f"http://{host}:{port}/metrics, until Ctrl-C", "serving")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return store.stats(all_namespaces=True), 0


STORE_ACTIONS: dict[str, Any] = {
    "put": _run_put,
    "match": _run_match,
    "get": _run_get,
    "ls": lambda store, arguments: (store.ls(), 0),
    "stat": _run_stat,
    "verify": _run_verify,
    "gc": _run_gc,
    "rm": _run_remove,
    "pin": _run_pin,
    "unpin": _run_unpin,
    "export": _run_export,
    "import": _run_import,
    "serve-metrics": _run_serve_metrics,
}
"""By its name: a function of the store and the arguments that gives the result and the exit code."""


_DESCRIPTION = """\
Store K and V of texts in a directory and find them again by their token ids: the store answers with the longest stored
prefix, to the token. Equal prefixes are stored once, losslessly (docs/prefix-store.md).

  put STORE CACHE...  store K and V of a text
  match STORE         stored tokens of a text, by heads of units; exit 1 if none
  get STORE -o OUT    write the longest stored prefix: arrays as mnn unpack
                      writes them, or with --backend and --name the prefix
                      cache that an engine loads (--cast: in its dtype);
                      --partial: full attention alone, without windows
                      and state, which no model continues from
  ls, stat STORE      texts, sessions; sizes, hits; --speed: where they pay
  serve-metrics STORE Prometheus text over HTTP (--listen)
  verify STORE        decode and compare all, remove damage (--dry-run: name it)
  gc STORE            remove unreferenced data; --size-limit SIZE: and texts
                      by the policy of the store, down to SIZE
  rm STORE            remove a session, or what no other text or pin needs
  pin, unpin STORE    protect a text from eviction, or no longer
  export STORE -o F   write a text to one file, for another machine
  import STORE F      import such a file
  simulate TRACE      what a store would find of a trace; - is standard input:
                      --model-shape, --size, --policy, --ratio; -o DIR draws it

TEXT, after the store, is a label or handle of ls, in place of ids. --text FILE makes ids by the tokenizer of --model; a
.json file is a list of messages, which the chat template of the model renders.
--token-ids specifies a text: numbers (5,7,9), or a file: a JSON list, numbers or .npy; - is standard input. put needs
none for a cache that has its ids, as llama.cpp's sessions do. CACHE is anything kvmnn reads: an engine's prefix cache,
live files of a running engine, a dump, frames, arrays called layer_<n>.key and layer_<n>.value.

--model specifies the model that computed it, by the fingerprint of the folder of an MNN model, with its .mnn file, of
an ONNX model, by its folder or the name of a pulled one (as generate --store), or of a llama.cpp FILE.gguf; for any
other model, such as a folder of transformers, use --fingerprint TEXT. Both together
name a model and the settings that it ran with, where they change K and V ("memory=low precision=low"). put needs
neither for a cache that records its model; the other actions need neither where the store has one model. A store takes
a second model only with --force.

Sliding windows and the state of linear attention are stored with a text, at its exact length: such a text is resumed
only from lengths that were put."""

_EXAMPLES = (
    "kvmnn store put prefixes/ sys/ --model model/ --token-ids ids.json",
    "kvmnn store match prefixes/ --token-ids 5,7,9",
    "kvmnn store get prefixes/ --token-ids prompt.json -o kv.npz",
    "kvmnn store ls prefixes/",
    "kvmnn store stat prefixes/ --json",
    "kvmnn store serve-metrics prefixes/ --listen :9465",
    "kvmnn store verify prefixes/",
    "kvmnn store gc prefixes/ --size-limit 20G",
    "kvmnn store rm prefixes/ 3fa91c",
    "kvmnn store pin prefixes/ --token-ids ids.json",
    "kvmnn store unpin prefixes/ --token-ids ids.json",
    "kvmnn store export prefixes/ --token-ids ids.json -o text.kv",
    "kvmnn store import prefixes/ text.kv",
    "kvmnn store simulate t.jsonl --model-shape 32x8x128 --size 4G,16G",
)


_REFERENCE = "[TEXT]"


class _ActionSpec(NamedTuple):
    options: tuple[str, ...] = ()
    inputs: str = ""
    """Arguments after the store; empty if there are none. ``"[TEXT]"`` is a label or handle, in place of ids."""


_MODEL_OPTIONS = ("token_ids", "text", "model", "fingerprint", "dtype", "namespace", "key_file")
_LAYOUT_OPTIONS = ("backend", "lp", "hp", "flash_block", "name", "capacity")
_INPUT_OPTIONS = (
    *("tensor", "skip_unsupported", "token_major", "undo", "max_bytes"),
    *(*shared_options.AXES_OPTION_NAMES, *packed_options.PACKED_OPTION_NAMES, *packed_options.SELECTION_OPTIONS),
)
_CREATION_OPTIONS = (
    *("store_bytes", "namespace", "quota", "key_file", "block_tokens", "codec", "profile", "policies", "effort"),
    "threads",
)
_SPEC_BY_ACTION = {
    "put": _ActionSpec(
        (*_MODEL_OPTIONS, *_INPUT_OPTIONS, *_CREATION_OPTIONS, "rope", "force", "label", "attention"), "CACHE"
    ),
    "match": _ActionSpec(_MODEL_OPTIONS, _REFERENCE),
    "get": _ActionSpec(
        (*_MODEL_OPTIONS, *_LAYOUT_OPTIONS, "output", "force", "threads", "cast", "rerotate", "partial", "profile"),
        _REFERENCE,
    ),
    "ls": _ActionSpec(("namespace", "key_file")),
    "stat": _ActionSpec((*_MODEL_OPTIONS, "namespaces", "threads", *break_even_options.SPEED_NAMES), _REFERENCE),
    "serve-metrics": _ActionSpec(("listen", "key_file")),
    "verify": _ActionSpec(("threads", "profile", "key_file", "dry_run")),
    "gc": _ActionSpec(("store_bytes", "key_file")),
    "rm": _ActionSpec(_MODEL_OPTIONS, _REFERENCE),
    "pin": _ActionSpec(_MODEL_OPTIONS, _REFERENCE),
    "unpin": _ActionSpec(_MODEL_OPTIONS, _REFERENCE),
    "export": _ActionSpec((*_MODEL_OPTIONS, "output", "force", "profile"), _REFERENCE),
    "import": _ActionSpec((*_CREATION_OPTIONS, "rope", "label", "max_bytes", "force"), "FILE"),
    "simulate": _ActionSpec((*store_simulation.SIMULATION_OPTIONS, "tensor", "output", "force"), "CACHE"),
}
_ALL_OPTIONS = tuple(dict.fromkeys(name for action in _SPEC_BY_ACTION.values() for name in action.options))
_CREATING_ACTIONS = ("put", "import")
_READ_ONLY_ACTIONS = ("match", "ls", "stat", "serve-metrics", "export")
_PART_ACTIONS = ("get", "match", "rm", "unpin")
"""Actions for a text of which only a beginning is left, or nothing, too."""
_READ_IF_POSSIBLE_ACTIONS = ("get", "verify")
"""Actions that write to a store only if it is writable: they record uses, and remove damaged units."""


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    options = {
        name: (*action.options, *(["inputs"] if action.inputs else [])) for name, action in _SPEC_BY_ACTION.items()
    }
    parser = shared_options.add_command(
        subparsers,
        "store",
        run,
        "prefixes of texts, stored and found by their tokens",
        _DESCRIPTION,
        examples=_EXAMPLES,
        shown="--token-ids --model --fingerprint --output --size-limit --capacity --codec --partial",
        action_help=ActionHelp("action", options, _describe_action),
    )
    parser.add_argument("action", choices=tuple(_SPEC_BY_ACTION), metavar="ACTION", help=", ".join(_SPEC_BY_ACTION))
    parser.add_argument("store", metavar="STORE", help="a directory, redis:// or s3:// ...; put and import make it")
    parser.add_argument(
        "inputs",
        nargs="*",
        default=[],
        metavar="IN",
        help="put: caches of the text; import: a file of export; else a label or handle; rm: or a session",
    )
    packed_options.add_origin_options(
        parser,
        "its fingerprint says which model computed it",
        kinds="folder of an MNN or ONNX model, name of a pulled one, or a .gguf file",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="ids of a text by the model's tokenizer; .json: messages of a chat"
    )
    parser.add_argument(
        "--label",
        metavar="TEXT",
        help="put, import: name of the text (default: its beginning and end, or that of the file)",
    )
    parser.add_argument(
        "--attention",
        metavar="FILE",
        help="put, into a store of transform streams: what tokens drew of the attention (dump-kv --attention)",
    )
    parser.add_argument(
        "--fingerprint",
        metavar="TEXT",
        help="name of the model that computed it, without --model; with --model the engine's settings",
    )
    parser.add_argument("--namespace", metavar="NAME", help="whose texts: nobody finds those of another namespace")
    parser.add_argument(
        "--namespaces", action="store_true", help="stat: of the whole store, with the bytes of each namespace"
    )
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="key of an encrypted store: 32 bytes, or 64 hexadecimal digits (default: KVMNN_STORE_KEY has these)",
    )
    parser.add_argument(
        "--quota",
        type=shared_options.parse_byte_count,
        metavar="SIZE",
        help="put, import: most bytes of the units of the namespace, for this call alone: the store keeps no quota "
        "(default: no bound)",
    )
    parser.add_argument(
        "--size-limit",
        dest="store_bytes",
        type=shared_options.parse_byte_count,
        metavar="SIZE",
        help="put, import, gc: most bytes of all units; K, M, G are powers of 1024 (default: no bound)",
    )
    parser.add_argument(
        "--block-tokens",
        type=shared_options.parse_positive,
        metavar="N",
        help="tokens in a block of a new store (default: 64)",
    )
    parser.add_argument(
        "--codec",
        type=layer_stream_options.parse_codec,
        metavar="CODEC",
        help="of a new store: dense (default), mnn, profile:FILE[,below=N], or LOSSY transform:FILE[,kl=0.002]",
    )
    dense_options.add_rope_option(parser)
    parser.add_argument(
        "--effort",
        choices=shared_options.EFFORT_CHOICES,
        default="fast",
        help="of frames: how hard to compress (default: fast, within 1%% of exact)",
    )
    parser.accept("--threads")
    parser.accept("--max-input-bytes")
    shared_options.accept_table(parser)
    shared_options.add_output_option(parser, "get: file or directory; export: a file")
    parser.add_argument(
        "--capacity",
        type=shared_options.parse_positive,
        metavar="N",
        help="get: capacity of the prefix cache in tokens",
    )
    parser.add_argument(
        "--cast", action="store_true", help="get: convert to the backend's dtype; LOSSY if it is narrower"
    )
    parser.add_argument(
        "--rerotate",
        action="store_true",
        help="get: K at the positions 0, 1, 2 ..., as pack --rerotate; a stored prefix has these already",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="get: layers with full attention alone",
    )
    parser.add_argument("--dry-run", action="store_true", help="verify: name what is damaged, and remove nothing")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:9464",
        metavar="HOST:PORT",
        help="serve-metrics: where to listen (default: 127.0.0.1:9464; without HOST: 127.0.0.1)",
    )
    shared_options.add_source_options(parser, "put: element type of raw input; else the precision to look up")
    parser.set_defaults(has_own_profile=True)
    parser.add_argument("--token-major", action="store_true", help="put: arrays are [token, kv_head, head_dim]")
    packed_options.add_packed_options(parser, with_text=False, with_undo=True)
    store_simulation.add_simulation_options(parser)


def _describe_action(action: str) -> str:
    """Return the part of the description about one action."""
    title, actions, about_texts, about_models, _ = _DESCRIPTION.split("\n\n")
    lines = re.findall(rf"^  (?:\w+, )?{action}\b.*(?:\n {{10,}}.*)*", actions, re.MULTILINE)
    has_texts = "token_ids" in _SPEC_BY_ACTION[action].options
    return "\n\n".join([title, *lines, *([about_texts, about_models] if has_texts else [])])


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out; with ``--json`` a failure has its document, too."""
    from ...errors import KvmnnError

    arguments.noted = []
    try:
        result, code = _run_action(arguments)
    except KvmnnError as error:
        if arguments.json:
            from ...store import BackendUnavailableError

            partial_document = _add_notes(getattr(arguments, "found", {}), arguments.noted)
            if isinstance(error, BackendUnavailableError):
                partial_document = {**partial_document, "outage": True}
            message = packed_options.add_unpack_hint(arguments, str(error))
            console.print_json({"verb": f"store {arguments.action}", **partial_document, "error": message})
        raise
    error_text = _explain_failure(arguments.action, result) if code else ""
    console.show_result(arguments, f"store {arguments.action}", _ResultWithNotes(result, arguments.noted, error_text))
    return code


def _explain_failure(action: str, result: Any) -> str:
    """Explain why an action whose result is shown exits with 1."""
    if action == "match":
        return "nothing of this text is stored"
    if action == "verify":
        return "; ".join((*result.damaged, *result.damaged_files, *result.rebuilt_parts))
    if action == "gc":
        return str(result.kept)
    return "; ".join(result.notes)


class _ResultWithNotes(NamedTuple):
    """A result whose document has the notes that went to standard error, and why the command exits with 1."""

    result: CommandResult
    notes: list[str]
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return _add_notes(self.result.to_dict(), self.notes) | ({"error": self.error} if self.error else {})

    def __str__(self) -> str:
        return str(self.result)


def _add_notes(document: dict[str, Any], new_notes: list[str]) -> dict[str, Any]:
    notes = list(dict.fromkeys([*document.get("notes", []), *new_notes]))
    return document | {"notes": notes} if notes else document


def _run_action(arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    from ...errors import OutputError
    from ...files.urls import redact_url
    from ...store import PrefixStore
    from ...store.directory.files import remove_unused_store
    from ...store.directory.index import DamagedIndexError

    action = _SPEC_BY_ACTION[arguments.action]
    used_options = action.options if arguments.table is None else (*action.options, "force")
    idle_names = [name for name in _ALL_OPTIONS if name not in used_options]
    shared_options.refuse_given(arguments, idle_names, f"says nothing to store {arguments.action}")
    if arguments.action == "simulate":
        return store_simulation.run_simulation(arguments), 0
    takes_reference = action.inputs == _REFERENCE
    if bool(arguments.inputs) != bool(action.inputs) and not (takes_reference and not arguments.inputs):
        expectation = f"needs {action.inputs}" if action.inputs else "takes nothing but the store"
        raise UsageError(f"store {arguments.action} {expectation}")
    if arguments.action == "import" and len(arguments.inputs) > 1:
        raise UsageError("store import takes one file")
    arguments.resolved = None
    num_named = len(arguments.inputs) * takes_reference + sum(
        value is not None for value in (arguments.token_ids, arguments.text)
    )
    if "token_ids" in action.options and not num_named and arguments.action not in ("put", "stat"):
        raise UsageError(f"store {arguments.action} needs --token-ids IDS, or a label or handle (store ls)")
    if arguments.text is not None and arguments.model is None:
        raise UsageError("--text needs --model DIR, whose tokenizer makes token ids of it")
    if num_named > 1:
        raise UsageError("one of --token-ids, --text, and a label or handle says which text")
    if "output" in action.options and arguments.output in (None, console.STDIO):
        output_text = "FILE, a file of its own" if arguments.action == "export" else "OUT, a file or directory"
        not_text = "" if arguments.output is None else ", not standard output"
        raise UsageError(f"store {arguments.action} needs -o {output_text}{not_text}")
    if arguments.store.startswith("memory://"):
        raise UsageError(f"{arguments.store}: is gone when this command ends: expected a place that stays")
    if arguments.codec not in (None, "dense"):
        shared_options.refuse_given(arguments, ["rope"], "needs --codec dense")
    codec, profile, codec_options = _split_codec(arguments)
    is_creating = arguments.action in _CREATING_ACTIONS
    if is_creating and arguments.store_bytes == 0:
        raise UsageError(f"store {arguments.action} --size-limit 0: expected at least 1, or no bound")
    if is_creating and arguments.policies not in (None, ("lru",), ("benefit",)):
        raise UsageError(f"store {arguments.action} --policy {','.join(arguments.policies)}: expected lru or benefit")
    key = arguments.key = _load_key(arguments)
    new_folder = arguments.store if is_creating and _is_new_directory(arguments.store) else None
    if is_creating:  # of an input that cannot be read no store is made
        if arguments.action == "import":
            from ...store.export import check_import, load_exported

            _check_file_size(arguments)
            if new_folder is not None or _is_new_remote_store(arguments):
                if codec is None:
                    codec, profile, codec_options = _adopt_codec(arguments, key, profile)
                check_import(arguments.inputs[0], key, is_lossy_store=codec == "transform")
            is_existing = new_folder is None and "://" not in arguments.store
            # a directory that is there knows whether it takes the file, and where its profile is
            file = arguments.inputs[0]
            arguments.read = file if is_existing else load_exported(file, key=key, profile=profile)
        else:
            arguments.read = _load_source(arguments)
            arguments.made_by = _choose_put_model(arguments)
            if not (arguments.force or arguments.ignore_contradictions):
                _check_provenance(arguments)
            arguments.layers = read_layers(arguments.read, arguments)
            if arguments.model is not None and not arguments.force:
                _check_num_layers(arguments)
            if arguments.attention is not None and codec != "transform" and new_folder is not None:
                raise UsageError("--attention is about the steps of lossy streams: needs --codec transform:FILE")
            if new_folder is not None:
                _refuse_loss(arguments, is_lossy_store=codec == "transform")
    open_store = partial(
        PrefixStore,
        arguments.store,
        arguments.store_bytes if is_creating else None,
        block_tokens=arguments.block_tokens,
        codec=codec,
        profile=profile,
        codec_options=codec_options,
        policy=arguments.policies[0] if is_creating and arguments.policies else None,
        rotary=_read_rope(arguments) if is_creating else None,
        effort=arguments.effort,
        threads=arguments.threads,
        namespace=arguments.namespace,
        quota=arguments.quota,
        key=key,
        create=is_creating,
    )
    is_unwritable = _is_unwritable(arguments.store)
    arguments.store = redact_url(arguments.store)  # messages name it

    def run_with_store(*, read_only: bool) -> tuple[CommandResult, int]:
        with open_store(read_only=read_only) as store:
            try:
                if arguments.action == "rm" and arguments.inputs:
                    forgotten = _forget_session(store, arguments.inputs[0])
                    if forgotten is not None:
                        return forgotten, 0
                if takes_reference and arguments.inputs:
                    takes_part = arguments.action in _PART_ACTIONS
                    arguments.resolved = store.resolve(arguments.inputs[0], partial=takes_part)
                    dtype = arguments.resolved.namespace.dtype
                    if arguments.dtype not in (None, dtype):
                        raise UsageError(
                            f"{arguments.store}: {repr_short(arguments.inputs[0])} is a text in {dtype}, not in "
                            f"{arguments.dtype}: leave --dtype out, or name the other text (store ls)"
                        )
                    arguments.dtype = dtype
                result_and_code: tuple[CommandResult, int] = STORE_ACTIONS[arguments.action](store, arguments)
            finally:
                input_sources.report_notes(store.notes, arguments, "warning")
        return result_and_code

    is_reader = arguments.action in _READ_ONLY_ACTIONS
    try:
        return run_with_store(
            read_only=is_reader
            or arguments.dry_run
            or (arguments.action in _READ_IF_POSSIBLE_ACTIONS and is_unwritable)
        )
    except DamagedIndexError as error:  # whoever may write makes it again, as get does
        if not is_reader or is_unwritable:
            raise
        try:
            return run_with_store(read_only=False)
        except OutputError:
            raise error from None
    finally:
        if new_folder is not None:  # without a unit it would only fix a codec that the next put may not want
            remove_unused_store(new_folder)


def _adopt_codec(
    arguments: argparse.Namespace, key: StoreKey | None, profile: str | None
) -> tuple[str | None, str | None, dict[str, float] | None]:
    """Return the codec of the units of an exported text, for a new store, the file of their profile, and its options.

    With these the units are stored as they are: lossy ones are not rounded once more.
    """
    from pathlib import Path

    from ...profiles.search import ProfileFinder
    from ...store.export import read_codec_options, read_layer_info

    file = arguments.inputs[0]
    info = read_layer_info(file, key)
    if info is None:
        return None, profile, None
    folder = Path(file).absolute().parent
    profile = ProfileFinder(file, profile, [folder, folder.parent]).find_file(info.profile_key)
    options = read_codec_options(file, key)
    option_texts = "".join(f", {name}={value:g}" for name, value in options.items())
    is_lossy = info.codec == "transform"
    codec_text = f"{'LOSSY, of transform' if is_lossy else 'of profile'} streams by {profile}{option_texts}"
    hint = "" if is_lossy else " (--codec dense makes another)"
    console.print_note(arguments, f"{file}: is {codec_text}, and so is the new store{hint}")
    return info.codec, profile, options


def _is_new_remote_store(arguments: argparse.Namespace) -> bool:
    """Return whether a store is not there past this machine, so that its codec is that of the file to import."""
    from ...errors import SourceError
    from ...store import PrefixStore

    if "://" not in arguments.store or arguments.codec is not None:
        return False
    try:
        PrefixStore(arguments.store, create=False, read_only=True, key=arguments.key).close()
    except SourceError:
        return True
    return False


def _check_file_size(arguments: argparse.Namespace) -> None:
    """Raise `LimitError` for a file to import that is larger than ``--max-input-bytes``."""
    from ...errors import LimitError

    path = arguments.inputs[0]
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    if arguments.max_bytes is not None and size > arguments.max_bytes:
        raise LimitError(f"{path}: has {size} bytes, above the limit of {arguments.max_bytes}")


def _is_new_directory(store: str) -> bool:
    """Return whether a store is a directory that does not exist: a refused command must not make it, of one codec."""
    return "://" not in store and not os.path.exists(store)


def _load_key(arguments: argparse.Namespace) -> StoreKey | None:
    """Read the key of the store; report a file that others can read."""
    from ...store.encryption import find_exposed_mode, load_key

    key = load_key(arguments.key_file)
    mode = "" if arguments.key_file is None else find_exposed_mode(arguments.key_file)
    if mode:
        text = f"{arguments.key_file}: others can read the key (mode {mode}): chmod 600"
        input_sources.report_notes([text], arguments, "warning")
    return key


def _split_codec(arguments: argparse.Namespace) -> tuple[str | None, str | None, dict[str, float] | None]:
    """Return the codec of a new store, the profile's file, and the options of the codec."""
    if not layer_stream_options.is_layer_codec(arguments.codec):
        return "frames" if arguments.codec == "mnn" else arguments.codec, arguments.profile, None
    shared_options.refuse_given(arguments, ["profile"], "is said twice: --codec names the profile")
    return layer_stream_options.split_codec(arguments.codec)


def _is_unwritable(store: str) -> bool:
    """Return whether a store is a directory without write permission."""
    return os.path.isdir(store) and not os.access(store, os.W_OK)


def _load_source(arguments: argparse.Namespace) -> Source:
    from ...arrays.engine_transforms import to_common_order
    from ...store.adapters import extract_states

    source = extract_states(
        input_sources.load(
            arguments.inputs,
            arguments,
            with_frames=True,
            used_options=("model", "token_ids", "ignore_contradictions"),  # layers without K and V
        )
    )
    input_sources.report_skipped(source, arguments)
    if resolve_ids(source, arguments) is None:
        where = " ".join(arguments.inputs)
        if (cache := source.engine_cache) is not None and cache.texts:
            raise UsageError(f"{where}: is a batch of {cache.batch}: --part batch=N takes one text of it, from 0")
        raise UsageError(f"{where}: does not say its token ids: store put needs --token-ids IDS")
    source, notes = to_common_order(source)
    input_sources.report_notes(notes, arguments)
    return source


def _read_rope(arguments: argparse.Namespace) -> RopeConfig | Literal["none"] | None:
    """Read the rotation of K from ``--rope`` or ``--model``; None if neither states it."""
    from ...errors import KvmnnError

    if arguments.rope is not None or arguments.model is None:
        specified: RopeConfig | Literal["none"] | None = arguments.rope
        return specified
    try:
        return dense_options.read_model_rope(arguments.model, arguments.read)[0]
    except KvmnnError:  # it says nothing: the store looks for it
        return None


def _check_provenance(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for a model or a text other than the cache records, such as frames of packed files."""
    from ...formats.mnn import check_recorded_provenance
    from ...packed.cache_info import TokenIdsFingerprint
    from ...store.fingerprints import MNN_METHOD

    info = arguments.read.cache
    if info is None:
        return
    model, token_ids = arguments.model, None
    is_mnn_model = model is not None and _choose_fingerprint_method(model) is MNN_METHOD
    model_fingerprint = arguments.made_by.partition(" ")[0] if is_mnn_model else None
    if info.token_ids is not None and (arguments.token_ids is not None or arguments.text is not None):
        ids = _load_ids(arguments)
        num_ids = len(ids) if arguments.text is None else info.token_ids.count  # a text may go on after the cache
        token_ids = TokenIdsFingerprint.from_ids(ids[:num_ids])
    check_recorded_provenance(info, " ".join(arguments.inputs), token_ids, model_fingerprint, error_type=UsageError)


def _choose_put_model(arguments: argparse.Namespace) -> str:
    """Return the model to store for: that of the options, or else of the cache."""
    source = arguments.read
    model = build_fingerprint(arguments)
    if model is None and source.cache:
        model = source.cache.model
    if model is None:
        raise UsageError(
            f"{' '.join(arguments.inputs)}: does not say which model computed it: --model or --fingerprint says it"
        )
    return model
