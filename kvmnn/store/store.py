"""The prefix store: K and V by token ids, in a directory, Redis, Valkey or an object store."""

from __future__ import annotations

import os
import re
import threading
import time
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from .._util.text import LOSSY, pluralize
from .._util.validation import repr_short, validate_int
from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import OpaqueState
from ..arrays.source import ROUNDED_TEXT, join_losses
from ..dense import RopeConfig
from ..errors import KvmnnError, MissingDependencyError, OptionError, OutputError
from ..files.urls import URL_SCHEME_PATTERN, redact_url
from ..frames import CodecOptions, Effort
from ..profiles.search import ProfileFinder
from .backend import (
    MAX_BLOCK_TOKENS,
    STORE_CODECS,
    STORE_POLICIES,
    BackendUnavailableError,
    CodecProfile,
    StoreBackend,
    StoredText,
    StoreLimits,
    StoreSettings,
    check_settings_match,
)
from .directory.backend import DirectoryBackend
from .directory.index import DamagedIndexError
from .encryption import StoreCipher, StoreKey, make_cipher
from .namespace import (
    Ids,
    Namespace,
    build_namespace,
    split_windows,
    to_token_ids,
    validate_layers,
    validate_session_name,
    validate_tenant,
)
from .results import (
    MIN_HANDLE_LETTERS,
    MIN_REFERENCE_LETTERS,
    CleanupResult,
    LayerwisePrefix,
    MatchResult,
    NamespaceStats,
    PinResult,
    PutResult,
    StoreCopyResult,
    StoredPrefix,
    StoreEntry,
    StoreExportResult,
    StoreListing,
    StoreSession,
    StoreStats,
    StoreUsage,
    StoreVerifyResult,
)
from .sequence import SequenceStore, StateToPut
from .unit import LAYER_CODECS, ReadyUnits
from .usage import COUNTERS_FILE, StoreMetrics
from .write_path import CodecChooser, RopeState, WriteOptions

if TYPE_CHECKING:
    from ..profiles.profile import Profile
    from .export import ExportedSequence
    from .remote.key_values import CircuitBreaker, KeyValueStore

DEFAULT_BLOCK_TOKENS = 64
DEFAULT_CODEC = "dense"
DEFAULT_POLICY = "lru"
DEFAULT_CACHE_BYTES = 256 << 20
DEFAULT_TIMEOUT_SECONDS = 5.0

_LABELS_CHECKED_PER_PUT = 8
"""Labels of which a put that evicts looks whether their texts are there."""
_REDIS_SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys")


def _open_key_values(scheme: str, url: str, timeout: float | None, cipher: StoreCipher) -> CircuitBreaker:
    from .remote.key_values import CircuitBreaker, ObjectStoreValues, RedisStoreValues, SealedValues

    if timeout is None:
        timeout = DEFAULT_TIMEOUT_SECONDS
    elif isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not 0 < timeout <= 3600:
        raise KvmnnError(f"timeout is {timeout!r}: expected seconds above 0, at most 3,600")
    label = redact_url(url)
    key_values_type = RedisStoreValues if scheme in _REDIS_SCHEMES else ObjectStoreValues
    try:
        key_values: KeyValueStore = key_values_type(url, float(timeout))
    except KvmnnError:
        raise
    except ImportError as error:  # each protocol of fsspec needs its own package
        raise MissingDependencyError(f"{label}: {error}") from error
    except ValueError as error:  # the clients of Redis and fsspec raise it for an invalid URL
        is_public = "@" not in url and label == url  # else the reason may contain a password
        raise OptionError(f"{label}: is no URL of a store{f': {error}' if is_public else ''}") from error
    return CircuitBreaker(
        cast("KeyValueStore", SealedValues(key_values, cipher)) if cipher.secret else key_values, label
    )


def _make_codec_profile(
    codec: str | None,
    profiles: ProfileFinder,
    profile: Profile | str | os.PathLike[str] | None,
    options: Mapping[str, float] | None,
    folder: Path | None,
) -> CodecProfile | None:
    """Return what a new store records of the profile of its codec; None for a codec that needs none."""
    if codec not in LAYER_CODECS:
        if options:
            raise OptionError(f"codec_options are of the codecs {' and '.join(LAYER_CODECS)}, not of {codec!r}")
        return None
    caller_profile = profiles.read_caller_profile()
    if caller_profile is None or profile is None:
        raise OptionError(f"codec {codec!r} needs the profile of a model (kvmnn profile make)")
    from .layer_units import check_options, get_default_options  # which imports both codecs

    file = ""
    if isinstance(profile, str | os.PathLike):
        file = os.fspath(profile)
        file = os.path.basename(file) if folder is None else os.path.relpath(file, folder)
    checked_options = check_options(codec, options or {}, caller_profile)
    return CodecProfile(caller_profile.key.hex(), file, checked_options, get_default_options(codec, caller_profile))


_MAX_LOSS_BYTES = 2048
T = TypeVar("T")
TokenIds = Sequence[int] | npt.NDArray[Any]


class PrefixStore:
    """Store of K and V by the token ids that they were computed from.

    A sequence is split into blocks of `block_tokens`. Sequences with a common prefix share blocks, and `get` returns
    the longest stored prefix of any sequence, to the token. Threads may share a store, and any number of processes a
    directory.

    Parameters
    ----------
    url
        A directory; ``redis://`` or ``valkey://`` (extra ``redis``); or what fsspec opens: ``s3://``, ``gs://``,
        ``file://``, ``memory://`` (extra ``object``).
    max_bytes
        Limit on the bytes of all units, at least 1; None for no limit. Units are evicted by `policy`, ends of
        sequences before their beginnings, and pinned prefixes never. Several processes that use a remote store may
        exceed it for a while.
    block_tokens
        Tokens per block of a new store; None for 64. An existing store keeps its own value, which must match.
    ram_bytes
        Limit on the bytes of units of a remote store that are cached in memory; None for 256 MiB. For a directory the
        operating system caches.
    codec
        Codec of a new store; None for ``"dense"``. ``"dense"`` uses dense streams where they are at least 3 % smaller
        than frames; ``"frames"`` always uses frames, which decode faster. ``"profile"`` and ``"transform"`` use streams
        by the profile of a model, losslessly and LOSSY: what `get` returns of a store of transform streams is not what
        was put. An existing store keeps its own value, which must match.
    profile
        The profile of the model (`kvmnn.profiles.Profile`), or its file; required for a new store of these codecs. A
        store records its key; without the profile nothing is put or returned. None looks for it where it was when the
        store was made, in a directory, and in the one above.
    codec_options
        Options of these codecs for a new store: ``below``; of ``"transform"`` one of ``kl`` (nats a token, 0.002 by
        default), ``ratio`` and ``bits``, and ``first``, tokens at the beginning of a text that are exact.
    policy
        What a new store evicts first; None for ``"lru"``, the least recently used units. ``"benefit"``: those that
        save the fewest seconds per byte: tokens x uses / bytes, plus the highest such number that was evicted before
        their last use, so that old uses fade. An existing store keeps its own value, which must match.
    effort
        Effort for frames, as for `kvmnn.encode`. ``"fast"`` is within 1 % of ``"exact"``; fp32 and bf16 become smaller
        with it.
    rotary
        RoPE parameters of K for dense streams; ``"none"`` if K is not rotated, None to search common parameters
        (`kvmnn.dense.search_rope`). Wrong parameters only cost size.
    threads
        Maximum number of threads for encoding and decoding; None for all processors.
    timeout
        Seconds to wait for an answer of a remote store; None for 5. A request without an answer is a miss, and for a
        second no further one is sent; after each further time-out this pause doubles, up to a minute.
    read_only
        Change nothing, and do not record uses: for a directory without write permission.
    create
        Create the store if it does not exist.
    namespace
        Whose sequences these are, such as the name of a tenant: 1 to 64 letters, digits and ``. _ -``. Its name salts
        all keys, so that nobody finds what another namespace has, and `ls`, `models`, `sessions`, `stats` and
        `resolve` are about this one alone. None for the sequences of no namespace. `gc` and `verify` are for all.
    quota
        Limit on the bytes of the units of this namespace, at least 1; None for no limit. Units are evicted as for
        `max_bytes`, and none of another namespace.
    key
        Key of an encrypted store (extra ``encryption``): 32 random bytes, or what `load_key` returns. A new store is
        encrypted with it. None for a store that is not encrypted.

    Raises
    ------
    SourceError
        If the directory is not a store, or has another version.
    OptionError
        If the store has another `block_tokens`, `codec`, `policy` or `key`, or the URL is invalid.
    MissingDependencyError
        If the package for the URL, or for encryption, is not installed.
    OutputError
        If the store cannot be created.

    Examples
    --------
    ::

        with PrefixStore("prefixes/", max_bytes=4 << 30) as store:
            store.put(ids, layers, model=fingerprint)
            prefix = store.get(other_ids, model=fingerprint)
            remaining_ids = other_ids[prefix.tokens :]
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        max_bytes: int | None = None,
        *,
        block_tokens: int | None = None,
        ram_bytes: int | None = None,
        codec: str | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        codec_options: Mapping[str, float] | None = None,
        policy: str | None = None,
        effort: Effort = "fast",
        rotary: RopeConfig | Literal["none"] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
        read_only: bool = False,
        create: bool = True,
        namespace: str | None = None,
        quota: int | None = None,
        key: StoreKey | bytes | None = None,
    ) -> None:
        options = CodecOptions(effort=effort)
        options.check()
        cipher = make_cipher(key)
        self._key = key
        self._threads = None if threads is None else validate_int(threads, "threads", 1)
        if block_tokens is not None:
            block_tokens = validate_int(block_tokens, "block_tokens", 1, MAX_BLOCK_TOKENS)
        if max_bytes is not None:
            max_bytes = validate_int(max_bytes, "max_bytes", 1)
        limits = StoreLimits(max_bytes, None if quota is None else validate_int(quota, "quota", 1))
        tenant = self._tenant = "" if namespace is None else validate_tenant(namespace)
        if codec not in (None, *STORE_CODECS):
            raise OptionError(f"codec is {repr_short(codec)}: expected one of {', '.join(STORE_CODECS)}")
        if policy not in (None, *STORE_POLICIES):
            raise OptionError(f"policy is {repr_short(policy)}: expected one of {', '.join(STORE_POLICIES)}")
        name = os.fspath(url)
        if not name:
            raise OptionError("the store has no name: expected a directory, or a URL")
        scheme_match = URL_SCHEME_PATTERN.match(name)
        folder = None if scheme_match is not None else Path(name)
        profiles = ProfileFinder(
            redact_url(name), profile, [] if folder is None else [folder, folder.absolute().parent]
        )
        codec_profile = _make_codec_profile(codec, profiles, profile, codec_options, folder)
        new_settings = StoreSettings(
            block_tokens or DEFAULT_BLOCK_TOKENS,
            codec or DEFAULT_CODEC,
            policy or DEFAULT_POLICY,
            profile=codec_profile,
        )
        settings = new_settings if create else None
        self._backend: StoreBackend
        counters_path = None
        if scheme_match is not None:
            from .remote.maintenance import RemoteBackend  # directories are opened without it

            self._backend = RemoteBackend(
                _open_key_values(scheme_match[1], name, timeout, cipher),
                block_tokens=block_tokens,
                codec=codec,
                policy=policy,
                new_settings=settings,
                ram_bytes=DEFAULT_CACHE_BYTES if ram_bytes is None else validate_int(ram_bytes, "ram_bytes", 0),
                read_only=read_only,
                limits=limits,
                tenant=tenant,
                cipher=cipher,
                profiles=profiles,
            )
        elif ram_bytes is not None or timeout is not None:
            raise OptionError(f"{name}: ram_bytes and timeout are for stores past this machine, not for a directory")
        else:
            directory = DirectoryBackend(
                Path(name),
                settings=settings,
                limits=limits,
                tenant=tenant,
                read_only=read_only,
                profiles=profiles,
                cipher=cipher,
            )
            self._backend = directory
            counters_path = Path(name) / COUNTERS_FILE
            try:
                check_settings_match(name, directory.settings, block_tokens, codec, policy, codec_profile)
            except OptionError:
                directory.close()
                raise
        self._sequences = SequenceStore(
            self._backend, WriteOptions(options, RopeState(rotary), CodecChooser(), self._threads)
        )
        self._requested_tokens = self._hit_tokens = 0
        self._metrics = StoreMetrics(
            counters_path,
            read_only=read_only,
            tenant=cipher.seal_name(tenant) if tenant and counters_path is not None else "",
        )
        self._lock = threading.Lock()

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self._backend.block_tokens

    @property
    def codec(self) -> str:
        """Codec of new units: ``"dense"``, ``"frames"``, ``"profile"`` or ``"transform"``."""
        return self._backend.codec

    @property
    def policy(self) -> str:
        """What is evicted first, ``"lru"`` or ``"benefit"``."""
        return self._backend.policy

    @property
    def profile(self) -> Profile | None:
        """The profile of the codec; None if it needs none. Raises `SourceError` where it is not there."""
        settings = self._backend.settings.profile
        return None if settings is None else self._backend.profiles.get(bytes.fromhex(settings.key))

    @property
    def codec_options(self) -> Mapping[str, float]:
        """Options of the codec that the store was made with; after the loss of its settings the default ones."""
        settings = self._backend.settings.profile
        if settings is None:
            return {}
        from .layer_units import add_default_options

        return add_default_options(self.codec, settings.options)

    @property
    def is_lossy(self) -> bool:
        """Whether what `get` returns is not what was put: a store of transform streams."""
        return self._backend.settings.is_lossy

    @property
    def models(self) -> tuple[str, ...]:
        """Fingerprints of the models whose prefixes are stored."""
        return tuple(sorted(self._with_retry(self._sequences.list_models)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Problems of the store that were repaired, one line each."""
        return tuple(self._backend.notes)

    def put(
        self,
        token_ids: TokenIds,
        layers: Sequence[LayerCache],
        *,
        model: str,
        windows: Collection[int] = (),
        states: Sequence[OpaqueState] = (),
        label: str | None = None,
        keep_label: bool = False,
        attention: npt.ArrayLike | None = None,
        loss: str = "",
    ) -> PutResult:
        """Store K and V of a sequence; the prefix that is stored already is not stored again.

        Rows of a sliding window, and state other than K and V, are stored for the exact length of the sequence.

        Parameters
        ----------
        token_ids
            ``[token]``, integers from 0 to 2**32 - 1.
        layers
            K and V of all of these tokens, for every layer of the model, ``[kv_head, token, head_dim]``. Layers in
            `windows` may have only the last tokens, with their positions and `tokens_seen`.
        model
            Fingerprint of the model that computed them: `kvmnn.formats.mnn.compute_fingerprint`, or any text that is
            unique to it.
        windows
            Numbers of the layers with a sliding window.
        states
            State of layers other than K and V after exactly these tokens: of linear attention, of convolutions.
        label
            Name of the sequence, for `ls` and `resolve`, 1 to 256 printable characters; replaces its name before.
        keep_label
            Do not replace a label that the sequence has already.
        attention
            Of a store of transform streams: the mean attention probability that later tokens gave each token, floats
            ``[layer, kv_head, token]``. Tokens that drew more lose less, at fewer bytes for the same loss of all.
        loss
            A sentence about what K and V have lost before, by a cast for example: what `get` returns of what this put
            stores says LOSSY. Of K and V that continue what `get` returned it is `StoredPrefix.loss`.

        Returns
        -------
        PutResult
            Tokens and bytes that were stored. A remote store that does not answer is reported as `outage`, not raised.

        Raises
        ------
        KvmnnError
            If a layer does not contain each token once, layers differ in dtype, or the store has layers of other shapes
            for this model and dtype.
        OutputError
            If files cannot be written; the store is unchanged, or contains a prefix of the sequence.
        """
        if label is not None:
            validate_session_name(label, "a label")
        put, namespace, ids = self._put(token_ids, layers, model, windows, states, attention, loss=loss)
        return self._save_label(label, put, namespace, ids, keep_label=keep_label)

    def _save_label(
        self, label: str | None, put: PutResult, namespace: Namespace, ids: Ids, *, keep_label: bool
    ) -> PutResult:
        """Save the label of a sequence that is stored as a whole; return the result with a note if it had another."""
        if label is None or put.stored_tokens < ids.size:
            return put
        old_label = self._with_retry(lambda: self._backend.get_label(namespace, ids))
        if old_label == label or (keep_label and old_label is not None):
            return put
        self._with_retry(lambda: self._backend.save_label(label, namespace, ids))
        note = f"its label was {repr_short(old_label)}, and is {repr_short(label)} now"
        return put if old_label is None else replace(put, notes=(*put.notes, note))

    def _put(
        self,
        token_ids: TokenIds,
        layers: Sequence[LayerCache],
        model: str,
        windows: Collection[int] = (),
        states: Sequence[OpaqueState] = (),
        attention: npt.ArrayLike | None = None,
        ready_units: ReadyUnits | None = None,
        loss: str = "",
    ) -> tuple[PutResult, Namespace, Ids]:
        ids = to_token_ids(token_ids)
        if attention is not None and not self.is_lossy:
            raise OptionError(f"attention is about the steps of lossy streams: the store has codec {self.codec!r}")
        full_layers, window_layers = split_windows(layers, windows)
        caches = validate_layers(full_layers, ids.size, window_layers)
        sorted_states = sorted(states, key=lambda state: (state.layer, state.name))
        secret = self._backend.cipher.secret
        namespace = build_namespace(caches, model, window_layers, sorted_states, self._tenant, secret)
        state = StateToPut(window_layers, sorted_states) if namespace.needs_state else None
        try:
            weights = None if attention is None else np.asarray(attention)
            if loss:
                _, stored_part, _ = self._with_retry(lambda: self._sequences.find_longest(ids, model, namespace.dtype))
                if stored_part.tokens < ids.size:
                    self._save_loss(namespace, loss)
            result = self._with_retry(
                lambda: self._sequences.put(ids, caches, namespace, state, weights, ready_units, is_rounded=bool(loss))
            )
            if result.stored_bytes:  # again, if a gc of another process removed it before there was a unit
                self._save_loss(namespace, loss)
        except BackendUnavailableError as error:
            result = PutResult(tokens=ids.size, known_tokens=0, notes=(str(error),), outage=True)
        if result.known_tokens and not result.outage:
            note = self._describe_stored_part(namespace, ids, loss, result.known_tokens)
            result = replace(result, notes=(*result.notes, note) if note else result.notes)
        self._metrics.record_put(result)
        if result.removed_bytes:
            self._delete_some_labels(StoredText(namespace, ids).key)
        return result, namespace, ids

    def _save_loss(self, namespace: Namespace, loss: str) -> None:
        """Add what K and V have lost to what those of the namespace had lost before."""
        if loss:
            earlier_loss = self._with_retry(lambda: self._backend.get_loss(namespace))
            joined_loss = join_losses(earlier_loss, *loss.split("; "))
            if joined_loss != earlier_loss and len(joined_loss.encode()) <= _MAX_LOSS_BYTES:
                self._with_retry(lambda: self._backend.save_loss(namespace, joined_loss))

    def _describe_stored_part(self, namespace: Namespace, ids: Ids, loss: str, known_tokens: int) -> str:
        """Return a note where tokens that were stored before have lost more or less than what was put; empty if not."""

        def read_losses() -> tuple[bool, str]:
            older_loss = self._backend.get_loss(namespace)
            if not (loss or older_loss):
                return False, ""
            if self.is_lossy:  # every unit has losses then, by the put itself
                losses, _ = self._sequences.read_losses(ids[:known_tokens], namespace)
                return losses.is_rounded, older_loss
            sequence = self._sequences.make_sequence(namespace, ids)
            prefix_match = self._backend.find_prefix(sequence).take_prefix(known_tokens, sequence.block_tokens)
            return self._backend.has_losses(prefix_match), older_loss

        try:
            has_loss, older_loss = self._with_retry(read_losses)
        except BackendUnavailableError:
            return ""
        stay_text = f"{pluralize(known_tokens, 'token')} stay as they were stored before"
        if not has_loss:
            return f"{stay_text}, and have not lost what these K and V had lost: {loss}" if loss else ""
        lost_more = [sentence for sentence in older_loss.split("; ") if sentence and sentence not in loss.split("; ")]
        return (
            f"{stay_text}, and some K and V of this model and precision had lost then what these have not: "
            f"{'; '.join(lost_more)} (store rm of all texts that begin so, then put)"
            if lost_more
            else ""
        )

    def _delete_some_labels(self, key: bytes) -> None:
        """Delete those labels next to a key whose texts were evicted.

        Keys are hashes: who evicts for each put and looks at a few labels leaves few of them without a text.
        """
        with suppress(KvmnnError):  # the text is put, whatever becomes of labels
            keys = sorted(self._backend.list_label_keys())
            begin_index = bisect(keys, key)
            next_keys = [*keys[begin_index:], *keys[:begin_index]][:_LABELS_CHECKED_PER_PUT]
            self._delete_labels_without_texts(next_keys)

    def _delete_labels_without_texts(self, keys: Sequence[bytes] | None = None) -> None:
        """Delete the labels of texts that are not stored as a whole any more, of all namespaces."""
        texts = [text for _, text in self._backend.iter_labels(keys, all_namespaces=True)]
        self._backend.delete_labels([text.key for text in texts if not self._sequences.is_stored(text)])

    def match(self, token_ids: TokenIds, *, model: str, dtype: str | None = None) -> int:
        """Return how many of the first tokens of a sequence are stored, as `get` would return them.

        It is 0 as well if a remote store does not answer; `find` reports which it is.

        Parameters
        ----------
        token_ids, model, dtype
            As for `get`.
        """
        return self.find(token_ids, model=model, dtype=dtype).tokens

    def find(self, token_ids: TokenIds, *, model: str, dtype: str | None = None, partial: bool = False) -> MatchResult:
        """Find the longest stored prefix without reading K and V of it.

        Of a directory, heads and sizes of the files are compared: a unit that is lost, cut or without its tables is
        removed as `get` does. Damage within K and V shows when they are read.

        Parameters
        ----------
        token_ids, model, dtype, partial
            As for `get`.

        Returns
        -------
        MatchResult
            Its length and precision, the tokens that other precisions have, and whether the store did not answer.
        """
        ids = to_token_ids(token_ids)
        notes: list[str] = []
        try:
            namespace, stored, other_precisions = self._with_retry(
                lambda: self._sequences.find_readable(ids, model, dtype, notes, partial=partial)
            )
            if notes and not self._backend.read_only:
                self._metrics.record_damages(len(notes))
            is_lossy = namespace is not None and (self.is_lossy or self._backend.has_losses(stored.prefix_match))
        except BackendUnavailableError as error:
            return MatchResult(tokens=0, asked=ids.size, notes=(str(error),), outage=True)
        return MatchResult(
            tokens=stored.tokens,
            asked=ids.size,
            dtype=namespace.dtype if namespace else None,
            other_precisions=other_precisions,
            notes=tuple(notes),
            is_lossy=is_lossy,
        )

    def get(self, token_ids: TokenIds, *, model: str, dtype: str | None = None, partial: bool = False) -> StoredPrefix:
        """Return K and V of the longest stored prefix of a sequence.

        A model with windows or state can only continue from a length at which these are stored: the longest such prefix
        is returned. A damaged unit is removed and reported in the `notes` of the result; the units before it are
        returned.

        Parameters
        ----------
        token_ids, model
            As for `put`.
        dtype
            Required precision, ``"fp16"``, ``"bf16"`` or ``"fp32"``; None for the one with the longest prefix, of equal
            ones the first that was put. `StoredPrefix.dtype` reports it.
        partial
            Return the layers with full attention of the longest prefix, even if the model needs more to continue;
            `StoredPrefix.missing` lists it.

        Returns
        -------
        StoredPrefix
            The prefix; its `tokens` are 0 for a miss, and if a remote store does not answer.

        Raises
        ------
        KvmnnError
            If the index cannot be read.
        """
        started = time.perf_counter()
        ids = to_token_ids(token_ids)
        try:
            prefix = self._with_retry(lambda: self._sequences.get(ids, model, dtype, partial=partial))
        except BackendUnavailableError as error:
            prefix = StoredPrefix(tokens=0, requested_tokens=ids.size, notes=(str(error),), outage=True)
        self._count_hit(prefix, started)
        return prefix

    def get_by_layer(self, token_ids: TokenIds, *, model: str, dtype: str | None = None) -> LayerwisePrefix:
        """Return the longest stored prefix, with an iterator over its layers in place of a list.

        The first layers are there while threads decode the others. They need as much memory as a list of them does.

        Parameters
        ----------
        token_ids, model, dtype
            As for `get`, as well as the result and the errors. Closing the iterator ends the work.
        """
        started = time.perf_counter()
        ids = to_token_ids(token_ids)
        try:
            prefix = self._with_retry(lambda: self._sequences.get_by_layer(ids, model, dtype))
        except BackendUnavailableError as error:
            prefix = LayerwisePrefix(tokens=0, requested_tokens=ids.size, notes=(str(error),), outage=True)
        self._count_hit(prefix, started)
        return prefix

    def _count_hit(self, prefix: StoredPrefix | LayerwisePrefix, started: float) -> None:
        with self._lock:
            self._requested_tokens += prefix.requested_tokens
            self._hit_tokens += prefix.tokens
        self._metrics.record_get(prefix, time.perf_counter() - started)

    def park(
        self,
        name: str,
        token_ids: TokenIds,
        layers: Sequence[LayerCache],
        *,
        model: str,
        windows: Collection[int] = (),
        states: Sequence[OpaqueState] = (),
        loss: str = "",
    ) -> PutResult:
        """Store a session under a name: its token ids until `forget`, its K and V as those of any sequence.

        Parameters
        ----------
        name
            1 to 256 printable characters; replaces a session with the same name.
        token_ids, layers, model, windows, states, loss
            As for `put`, as well as errors. If a remote store does not answer, nothing is stored and `outage` is set.
        """
        validate_session_name(name)
        put, namespace, ids = self._put(token_ids, layers, model, windows, states, loss=loss)
        try:
            self._with_retry(lambda: self._backend.save_session(name, namespace, ids))
        except BackendUnavailableError as error:
            return replace(put, notes=(*put.notes, f"the session was not noted down: {error}"), outage=True)
        return put

    def resume(self, name: str) -> StoreSession:
        """Return the token ids of a session, and the stored prefix of its K and V.

        Raises
        ------
        KvmnnError
            If there is no session with this name.
        BackendUnavailableError
            If a remote store does not answer.
        """
        namespace, ids = self._with_retry(lambda: self._backend.get_session(name))
        prefix = self.get(ids, model=namespace.model, dtype=namespace.dtype)
        return StoreSession(name=name, token_ids=ids.tolist(), prefix=prefix)

    def sessions(self) -> list[str]:
        """Return the names of all sessions."""
        return self._with_retry(self._backend.list_sessions)

    def forget(self, name: str) -> None:
        """Delete name and token ids of a session; its K and V stay until they are evicted. Raise as `resume` does."""
        self._with_retry(lambda: self._backend.delete_session(name))

    def pin(self, token_ids: TokenIds, *, model: str, dtype: str | None = None) -> PinResult:
        """Exempt a sequence from eviction until `unpin`.

        Parameters
        ----------
        token_ids, model
            As for `put`.
        dtype
            Precision to pin; None for each that contains the whole sequence.

        Raises
        ------
        KvmnnError
            If the sequence is not completely stored.
        """
        ids = to_token_ids(token_ids)

        def pin() -> list[tuple[str, bool]]:
            return [
                (namespace.dtype, self._backend.pin(namespace, ids))
                for namespace, _ in self._sequences.find_complete(ids, model, dtype)
            ]

        dtypes, are_new = zip(*self._with_retry(pin), strict=True)
        return PinResult(
            tokens=ids.size, pinned=True, was_pinned=not any(are_new), dtypes=dtypes, is_lossy=self.is_lossy
        )

    def unpin(self, token_ids: TokenIds, *, model: str | None, dtype: str | None = None) -> PinResult:
        """Remove the pin of a sequence, in one precision or in all, whether it is still stored or not.

        Parameters
        ----------
        token_ids
            As for `put`.
        model
            As for `put`; None for every model under which it is pinned.
        dtype
            As for `pin`.

        Raises
        ------
        KvmnnError
            If it is neither pinned nor completely stored.
        """
        ids = to_token_ids(token_ids)

        def unpin() -> list[str]:
            unpinned_dtypes = [
                namespace.dtype
                for namespace in self._sequences.list_namespaces(model, dtype)
                if self._backend.unpin(namespace, ids)
            ]
            if not unpinned_dtypes:
                self._sequences.find_complete(ids, model, dtype)
            return unpinned_dtypes

        unpinned_dtypes = self._with_retry(unpin)
        return PinResult(
            tokens=ids.size,
            pinned=False,
            was_pinned=bool(unpinned_dtypes),
            dtypes=tuple(unpinned_dtypes),
            is_lossy=self.is_lossy,
        )

    def delete(self, token_ids: TokenIds, *, model: str, dtype: str | None = None) -> CleanupResult:
        """Remove a sequence from its end on, up to a unit that another sequence needs or a pin keeps.

        A unit stays as a whole: `CleanupResult.unshared_tokens` of this sequence alone stay with it, and are found
        until the other sequences are deleted, and then what is left of this one, by its handle of `ls`.

        A sequence that is pinned itself is left as it is, with its label. Shorter sequences that begin it go with it
        unless a pin keeps them, or windows or state at their length: the result names those with a label. Of a sequence
        with a label that is damaged, or was evicted in part, what is left is removed.

        Parameters
        ----------
        token_ids, model, dtype
            As for `pin`.

        Raises
        ------
        KvmnnError
            If the sequence is not completely stored, and has no label.
        """
        ids = to_token_ids(token_ids)
        notes: list[str] = []

        def delete() -> CleanupResult:
            namespaces = self._sequences.find_deletable(ids, model, dtype, notes)
            labelled_prefixes = [
                (label, text)
                for label, text in self._backend.iter_labels()
                if text.namespace in namespaces
                and text.ids.size < ids.size
                and np.array_equal(text.ids, ids[: text.ids.size])
                and self._sequences.is_stored(text)
            ]
            results = [self._delete_with_prefixes(namespace, ids) for namespace in namespaces]
            unpinned = [
                namespace for namespace, result in zip(namespaces, results, strict=True) if not result.is_refused
            ]
            labels = {label for namespace in unpinned if (label := self._backend.get_label(namespace, ids)) is not None}
            self._backend.delete_labels([StoredText(namespace, ids).key for namespace in unpinned])
            lost_prefixes = [(label, text) for label, text in labelled_prefixes if not self._sequences.is_stored(text)]
            self._backend.delete_labels([text.key for _, text in lost_prefixes])
            num_units = sum(result.units for result in results)
            reasons = dict.fromkeys(result.kept for result in results if result.kept)
            if labels and not num_units:  # else it looks as if nothing was done
                reasons[f"only the label {', '.join(map(repr_short, sorted(labels)))} was removed"] = None
            return CleanupResult(
                units=num_units,
                bytes=sum(result.bytes for result in results),
                kept="; ".join(reasons),
                unshared_tokens=max(result.unshared_tokens for result in results),
                missing_tokens=max(
                    result.missing_tokens if namespace.layers else 0
                    for namespace, result in zip(namespaces, results, strict=True)
                ),
                dtypes=tuple(namespace.dtype for namespace in namespaces),
                lost_labels=tuple(sorted({label for label, _ in lost_prefixes})),
                sessions=tuple(self._list_sessions_of(namespaces, ids)),
                notes=tuple(notes),
                is_lossy=self.is_lossy,
            )

        try:
            return self._with_retry(delete)
        finally:
            self._metrics.record_damages(len(notes))

    def _delete_with_prefixes(self, namespace: Namespace, ids: Ids) -> CleanupResult:
        """Delete a sequence, then shorter ones that begin it: one that ends within a block has that block in a unit
        that reaches beyond what a longer one uses of it, so that it stays at first.
        """
        result = step = self._backend.delete(self._sequences.make_sequence(namespace, ids))
        while step.units and step.unshared_tokens:
            num_left = self._backend.find_prefix(self._sequences.make_sequence(namespace, ids)).tokens
            step = self._backend.delete(self._sequences.make_sequence(namespace, ids[:num_left]))
            if step.units:
                result = replace(
                    step,
                    units=result.units + step.units,
                    bytes=result.bytes + step.bytes,
                    missing_tokens=result.missing_tokens,
                )
        return result

    def _list_sessions_of(self, namespaces: Collection[Namespace], ids: Ids) -> Iterator[str]:
        """Yield the names of sessions that begin with a text, or begin it: they have ids of it."""
        for name in self._backend.list_sessions():
            with suppress(KvmnnError):  # of a damaged session
                namespace, session_ids = self._backend.get_session(name)
                if namespace in namespaces and _have_common_beginning(ids, session_ids):
                    yield name

    def find_session_texts(self, name: str) -> list[StoredText]:
        """Find the sequences of `ls` that go on from the text of a session, or begin it. Raise as `resume` does."""

        def find_texts() -> list[StoredText]:
            namespace, ids = self._backend.get_session(name)
            texts = self._backend.iter_texts()
            return [text for text in texts if text.namespace == namespace and _have_common_beginning(text.ids, ids)]

        return self._with_retry(find_texts)

    def resolve(self, reference: str, *, partial: bool = False) -> StoredText:
        """Return the sequence that a label or a handle names.

        Parameters
        ----------
        reference
            A label of `put`, or the first letters of a key, four at least, as `ls` shows them.
        partial
            Also return a labelled sequence of which only a beginning is left, or nothing, for `get`, `match`, `delete`
            and `unpin`.

        Raises
        ------
        KvmnnError
            If there is none, or more than one, or not all of it is left.
        """
        is_handle = re.fullmatch(rf"[0-9a-f]{{{MIN_REFERENCE_LETTERS},32}}", reference) is not None

        def find_all() -> tuple[list[StoredText], list[StoredText]]:
            """Return the sequences that are stored as a whole; if there is none, those that are not, too."""
            labelled = list(self._backend.iter_labels())
            named = [text for label, text in labelled if label == reference]
            texts = [text for text in named if self._sequences.is_stored(text)]
            if not texts and is_handle:
                by_key = [text for _, text in labelled if text.key.hex().startswith(reference)]
                texts = [text for text in self._backend.iter_texts() if text.key.hex().startswith(reference)]
                texts += filter(self._sequences.is_stored, by_key)
                named += by_key
            cut_texts = [] if texts else named
            texts, cut_texts = (list({text.key: text for text in group}.values()) for group in (texts, cut_texts))
            return cut_texts if partial and len(cut_texts) == 1 else texts, cut_texts

        texts, cut_texts = self._with_retry(find_all)
        if len(texts) == 1:
            return texts[0]
        keys = ", ".join(text.key.hex()[:16] for text in texts[:4])
        problem = f"{len(texts)} texts are called so: {keys}" if texts else "there is no text with this label or handle"
        if not texts and re.fullmatch(rf"[0-9a-f]{{1,{MIN_REFERENCE_LETTERS - 1}}}", reference):
            problem += f", and a handle has at least {MIN_REFERENCE_LETTERS} letters"
        problem = self._describe_cut(cut_texts[0]) if cut_texts and not texts else f"{problem} (kvmnn store ls)"
        num_damaged = 0 if texts or cut_texts else len(self._with_retry(self._backend.list_damaged_labels))
        if num_damaged:
            problem += (
                f"; {pluralize(num_damaged, 'label')} cannot be read: use the handle (kvmnn store gc removes them)"
            )
        raise KvmnnError(f"{self._backend.label}: {repr_short(reference)}: {problem}")

    def _describe_cut(self, text: StoredText) -> str:
        """Say how much is left of a sequence that is not stored as a whole any more."""
        model, dtype, num_tokens = text.namespace.model, text.namespace.dtype, text.ids.size
        left = self.find(text.ids, model=model, dtype=dtype)
        problem = "is damaged" if left.notes else "is damaged, or was evicted"
        left_text = f"{left.tokens:,} of {pluralize(num_tokens, 'token')} are left (kvmnn store verify)"
        return ": ".join([f"its text {problem}", left_text, *left.notes])

    def has_label(self, label: str) -> bool:
        """Return whether any sequence has this label, whether all of it is stored or not."""
        return self._with_retry(lambda: any(name == label for name, _ in self._backend.iter_labels()))

    def count_labelled(self, label: str) -> int:
        """Return how many sequences have this label; `resolve` takes it only of one."""
        return self._with_retry(
            lambda: sum(name == label and self._sequences.is_stored(text) for name, text in self._backend.iter_labels())
        )

    def describe(self, token_ids: TokenIds, *, model: str, dtype: str | None = None) -> StoreEntry:
        """Return the entry of `ls` for a sequence.

        Parameters
        ----------
        token_ids, model, dtype
            As for `get`.

        Raises
        ------
        KvmnnError
            If not all of it is stored, or a longer sequence continues it: `ls` has only that one.
        """
        ids = to_token_ids(token_ids)
        keys = {
            StoredText(namespace, ids).key.hex()
            for namespace in self._with_retry(self._backend.list_namespaces)
            if (namespace.tenant, namespace.model) == (self._tenant, model) and dtype in (None, namespace.dtype)
        }
        entry = next((entry for entry in self.ls().texts if entry.key in keys), None)
        if entry is None:
            self._with_retry(lambda: self._sequences.find_complete(ids, model, dtype))  # which says how much is missing
            reason = "a longer one goes on from it"
            texts = self._with_retry(lambda: list(self._backend.iter_texts()))
            if not any(np.array_equal(text.ids[: ids.size], ids) for text in texts if text.namespace.model == model):
                reason = "it is damaged, or a longer one that goes on from it (kvmnn store verify)"
            raise KvmnnError(
                f"{self._backend.label}: this text of {ids.size:,} tokens is stored, but not listed: {reason}"
            )
        if not entry.is_lossy:
            return entry
        namespaces = self._with_retry(lambda: self._sequences.list_namespaces(model, entry.dtype))
        namespace = next(namespace for namespace in namespaces if StoredText(namespace, ids).key.hex() == entry.key)
        losses, loss = self._with_retry(lambda: self._sequences.read_losses(ids, namespace))
        own_loss = f"{ROUNDED_TEXT} (transform streams)" if losses.is_lossy else ""
        return replace(entry, loss=join_losses(loss, own_loss), predicted_kl=losses.select_predicted_kl(loss))

    def export(
        self,
        token_ids: TokenIds,
        path: str | os.PathLike[str],
        *,
        model: str,
        dtype: str | None = None,
        force: bool = False,
    ) -> StoreExportResult:
        """Write a sequence with its K and V to one file, for `import_file`.

        Any store can import the file; if this store is encrypted, only one with the same key.

        Parameters
        ----------
        token_ids, model
            As for `put`.
        path
            File to write.
        dtype
            Precision to export; None for the first that was put of those that contain the whole sequence.
        force
            Replace an existing file.

        Raises
        ------
        KvmnnError
            If the sequence is not completely stored, or a unit is damaged.
        """
        ids = to_token_ids(token_ids)
        return self._with_retry(lambda: self._sequences.export(ids, path, model, dtype, force=force))

    def import_file(self, path: str | os.PathLike[str] | ExportedSequence, *, label: str | None = None) -> PutResult:
        """Store a sequence from a file of `export`, under the fingerprint of its model.

        Parameters
        ----------
        path
            The file, or what `kvmnn.store.export.load_exported` read of it. Lossy units of the profile and the options
            of this store are stored as they are; others are rounded once more, which `notes` says.
        label
            As for `put`. None uses the label in the file, unless the stored sequence has a label already.

        Raises
        ------
        SourceError
            If the file is not an exported sequence, or is damaged.
        OutputError
            As `put`.
        """
        from .export import ROUNDED_AGAIN_LOSS, ExportedSequence, check_import, load_exported

        check_import(path, self._key, is_lossy_store=self.is_lossy)
        exported = (
            path
            if isinstance(path, ExportedSequence)
            else load_exported(path, self._threads, self._key, profile=self._backend.profiles.with_folders_of(path))
        )
        ready_units = ReadyUnits(exported.lossy_streams)
        put, namespace, ids = self._put(
            exported.ids, exported.layers, exported.model, ready_units=ready_units, loss=exported.loss
        )
        if exported.is_rounded_once_more(put, ready_units):
            self._save_loss(namespace, ROUNDED_AGAIN_LOSS)
        put = exported.describe_import(put, ready_units)
        if exported.loss and put.stored_bytes:
            put = replace(put, notes=(*put.notes, f"{LOSSY}: {exported.loss}"))
        return self._save_label(label or exported.label, put, namespace, ids, keep_label=label is None)

    def copy_texts(self, target: PrefixStore) -> StoreCopyResult:
        """Put the sequences of this namespace into that of another store, with labels, pins and what they had lost.

        The other store may have another key, codec or block size. Sequences of models with windows or state, and
        damaged ones, are not copied, which the notes of the result say, nor sessions and counts of uses. A sequence
        lies in a temporary file for a while, sealed with the key of this store.

        Parameters
        ----------
        target
            An open store; its limits apply.

        Returns
        -------
        StoreCopyResult
            What is stored there now of the sequences of this one, whether put by this call or before.

        Raises
        ------
        OptionError
            If this store is LOSSY and the other one would not say so.
        OutputError
            As `put`; what was copied before stays.
        BackendUnavailableError
            If a remote store does not answer.
        """
        import tempfile  # which takes a while to import

        if self.is_lossy and not target.is_lossy:
            raise OptionError(
                f"{target._backend.label}: has codec {target.codec!r}, and the texts are LOSSY, of transform streams: "
                "expected a store of codec transform"
            )
        from .export import load_exported

        texts, pinned_keys, num_damaged = self._with_retry(self._collect_texts)
        copies: list[tuple[StoredText, str | None]] = []
        names_by_note: dict[str, list[str]] = {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text"
            for text in texts:
                name = f"{text.key.hex()[:MIN_HANDLE_LETTERS]} ({pluralize(text.ids.size, 'token')})"
                model, dtype = text.namespace.model, text.namespace.dtype
                try:
                    self.export(text.ids, path, model=model, dtype=dtype, force=True)
                    exported = load_exported(path, self._threads, self._key, profile=self._backend.profiles)
                except (BackendUnavailableError, OutputError):
                    raise
                except KvmnnError as error:
                    names_by_note.setdefault(f"not copied: {error}", []).append(name)
                    continue
                put = target.import_file(exported._replace(path="its export"))
                if put.outage:
                    raise BackendUnavailableError("; ".join(put.notes))
                for note in put.notes:
                    names_by_note.setdefault(note, []).append(name)
                if put.stored_tokens == put.tokens:
                    copies.append((text, exported.label))
                    if text.key in pinned_keys:
                        target.pin(text.ids, model=model, dtype=dtype)
        notes = [
            f"{names[0]}{f' and {len(names) - 1:,} more' if names[1:] else ''}: {note}"
            for note, names in names_by_note.items()
        ]
        stored_copies = [
            (text, label)
            for text, label in copies
            if target.match(text.ids, model=text.namespace.model, dtype=text.namespace.dtype) == text.ids.size
        ]
        if len(stored_copies) < len(copies):
            notes.append(f"evicted again for later ones: {pluralize(len(copies) - len(stored_copies), 'text')}")
        num_pins = sum(text.key in pinned_keys for text, _ in stored_copies)
        num_lost_pins = self.stats().pinned - num_pins
        if num_damaged:
            notes.append(f"not copied, as they are damaged: {pluralize(num_damaged, 'text')} (kvmnn store verify)")
        if num_lost_pins > 0:
            notes.append(f"not copied, as their texts are not: {pluralize(num_lost_pins, 'pin')}")
        return StoreCopyResult(
            texts=len(stored_copies),
            labels=sum(label is not None for _, label in stored_copies),
            pins=num_pins,
            is_lossy=self.is_lossy,
            notes=tuple(notes),
        )

    def _collect_texts(self) -> tuple[list[StoredText], set[bytes], int]:
        """Return the listed sequences, the most recently used last, then labelled and pinned ones that begin them.

        Also the keys of pinned sequences, and the number of listed sequences that cannot be read.
        """
        text_by_key = {text.key: text for text in self._backend.iter_texts()}
        keys = [bytes.fromhex(entry.key) for entry in reversed(self._backend.list_entries().texts)]
        texts = {key: text_by_key[key] for key in keys if key in text_by_key}
        num_damaged = sum(key not in texts for key in keys)
        pinned = {text.key: text for text in self._backend.iter_pinned()}
        texts |= {text.key: text for _, text in self._backend.iter_labels()} | pinned
        return list(texts.values()), set(pinned), num_damaged

    def gc(self, max_bytes: int | None = None) -> CleanupResult:
        """Remove unreferenced files, then evict sequences until at most `max_bytes` are left; None evicts nothing."""
        max_stored_bytes = None if max_bytes is None else validate_int(max_bytes, "max_bytes", 0)

        def collect() -> CleanupResult:
            result = self._backend.collect_garbage(max_stored_bytes)
            self._backend.delete_labels(self._backend.list_damaged_labels())
            self._delete_labels_without_texts()
            return replace(result, is_lossy=self.is_lossy)

        return self._with_retry(collect)

    def verify(self) -> StoreVerifyResult:
        """Read, decode and compare all units; damaged ones are removed, with all units that follow them.

        Units of a directory whose model is lost, which no call can use, are named as damaged, and left to `gc`.
        """
        result = self._with_retry(lambda: self._backend.verify(self._threads))
        if not self._backend.read_only:
            self._metrics.record_damages(len(result.damaged))
        handles = [key.hex()[:MIN_HANDLE_LETTERS] for key in self._with_retry(self._backend.list_damaged_labels)]
        label_notes = [
            f"{self._backend.label}: the label of the text {handle} cannot be read (gc removes it)"
            for handle in handles
        ]
        return replace(result, damaged_files=(*result.damaged_files, *label_notes))

    def stats(self, *, all_namespaces: bool = False) -> StoreStats:
        """Return counts of what is stored, in this namespace or in all of them, and the hits of `get` so far."""
        stats = self._with_retry(
            lambda: self._backend.collect_stats(self._requested_tokens, self._hit_tokens, all_namespaces=all_namespaces)
        )
        usage = self.usage(all_namespaces=all_namespaces)
        return replace(
            stats, usage=usage, codec_options=self.codec_options, is_encrypted=bool(self._backend.cipher.key_check)
        )

    def namespaces(self) -> list[NamespaceStats]:
        """Return what each namespace has, by name: for whoever runs the store, as the names are the tenants' own."""
        return self._with_retry(self._backend.collect_namespaces)

    def usage(self, *, own: bool = False, all_namespaces: bool = False) -> StoreUsage:
        """Return what was done so far in this namespace, or in all of them.

        By all processes with a directory; with `own`, and of a remote store, by this object alone.
        """
        return self._metrics.read(own=own, all_namespaces=all_namespaces)

    def add_metrics_listener(self, listener: Callable[[str, float], object]) -> None:
        """Call `listener` after each ``"get"`` and ``"put"`` from now on, with the seconds that it took."""
        self._metrics.add_listener(listener)

    def ls(self) -> StoreListing:
        """Return the stored sequences, the most recently used first, and the names of the sessions."""
        listing = replace(self._with_retry(self._backend.list_entries), sessions=tuple(self.sessions()))
        if listing.texts or self._tenant:
            return listing
        return replace(listing, namespaces=len({entry.name for entry in self.namespaces()} - {""}))

    def close(self) -> None:
        """Record uses and close the store; a second call does nothing."""
        self._metrics.flush()
        self._backend.close()

    def __enter__(self) -> Self:
        self._backend.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PrefixStore {self._backend.label}>"

    def _with_retry(self, call: Callable[[], T]) -> T:
        """Repeat a call once if the index was damaged: the second call rebuilds it."""
        try:
            return call()
        except DamagedIndexError:
            if self._backend.read_only:
                raise
            return call()


def _have_common_beginning(ids: Ids, other_ids: Ids) -> bool:
    """Return whether one of two sequences begins the other."""
    num_common = min(ids.size, other_ids.size)
    return np.array_equal(ids[:num_common], other_ids[:num_common])
