"""Which units a URL means: a directory, Redis or Valkey, or what fsspec opens.

The prefix store: K and V of any text that was ever put, found again by its token ids.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy.typing as npt

from .._util.validation import repr_short, validate_int
from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import OpaqueState
from ..dense import RopeConfig
from ..errors import KvmnnError, MissingDependencyError, OptionError
from ..files.urls import URL_SCHEME_PATTERN, redact_url
from ..frames import CodecOptions
from . import export
from .backend import MAX_BLOCK_TOKENS, STORE_CODECS, StoreBackend, StoreSettings, check_settings_match
from .directory.index import DamagedIndexError
from .directory.maintenance import DirectoryBackend
from .namespace import build_namespace, split_windows, to_token_ids, validate_layers, validate_session_name
from .remote import BackendUnavailableError, RemoteBackend
from .remote.key_values import CircuitBreaker, KeyValueStore, ObjectStoreValues, RedisStoreValues
from .results import (
    CleanupResult,
    MatchResult,
    PinResult,
    PutResult,
    StoredPrefix,
    StoreExportResult,
    StoreListing,
    StoreSession,
    StoreStats,
    StoreVerifyResult,
)
from .sequence import SequenceStore, StateToPut
from .write_path import CodecChooser, RopeState, WriteOptions

DEFAULT_BLOCK_TOKENS = 64
DEFAULT_CODEC = "dense"
DEFAULT_CACHE_BYTES = 256 << 20
DEFAULT_TIMEOUT_SECONDS = 5.0

_REDIS_SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys")


def open_backend(
    url: str | os.PathLike[str],
    *,
    max_bytes: int | None,
    ram_bytes: int | None,
    block_tokens: int | None,
    codec: str | None,
    timeout: float | None,
    read_only: bool,
    create: bool,
) -> StoreBackend:
    """The units at a URL; parameters and errors as `PrefixStore`."""
    if block_tokens is not None:
        block_tokens = validate_int(block_tokens, "block_tokens", 1, MAX_BLOCK_TOKENS)
    if max_bytes is not None:
        max_bytes = validate_int(max_bytes, "max_bytes", 1)
    if codec not in (None, *STORE_CODECS):
        raise OptionError(f"codec is {repr_short(codec)}: expected one of {', '.join(STORE_CODECS)}")
    new_settings = StoreSettings(block_tokens or DEFAULT_BLOCK_TOKENS, codec or DEFAULT_CODEC) if create else None
    name = os.fspath(url)
    if not name:
        raise OptionError("the store has no name: expected a directory, or a URL")
    scheme_match = URL_SCHEME_PATTERN.match(name)
    if scheme_match is None:
        if ram_bytes is not None or timeout is not None:
            raise OptionError(f"{name}: ram_bytes and timeout are for stores past this machine, not for a directory")
        units = DirectoryBackend(Path(name), settings=new_settings, max_bytes=max_bytes, read_only=read_only)
        try:
            check_settings_match(name, StoreSettings(units.block_tokens, units.codec), block_tokens, codec)
        except OptionError:
            units.close()
            raise
        return units
    label = redact_url(name)
    return RemoteBackend(
        CircuitBreaker(_open_key_values(scheme_match[1], name, label, _validate_timeout(timeout)), label),
        block_tokens=block_tokens,
        codec=codec,
        new_settings=new_settings,
        ram_bytes=DEFAULT_CACHE_BYTES if ram_bytes is None else validate_int(ram_bytes, "ram_bytes", 0),
        read_only=read_only,
        max_bytes=max_bytes,
    )


def _open_key_values(scheme: str, url: str, label: str, timeout: float) -> KeyValueStore:
    try:
        return (RedisStoreValues if scheme in _REDIS_SCHEMES else ObjectStoreValues)(url, timeout)
    except KvmnnError:
        raise
    except ImportError as error:  # fsspec's protocols are packages of their own
        raise MissingDependencyError(f"{label}: {error}") from error
    except ValueError as error:  # of Redis' client and of fsspec, about the URL
        raise OptionError(
            f"{label}: is no URL of a store{'' if '@' in url or label != url else f': {error}'}"
        ) from error


def _validate_timeout(timeout: float | None) -> float:
    if timeout is None:
        return DEFAULT_TIMEOUT_SECONDS
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not 0 < timeout <= 3600:
        raise KvmnnError(f"timeout is {timeout!r}: expected seconds above 0, at most 3,600")
    return float(timeout)


T = TypeVar("T")
TokenIds = Sequence[int] | npt.NDArray[Any]


class PrefixStore:
    """K and V by the token ids that they were computed from.

    A text is cut into blocks of `block_tokens`. Texts that begin alike share their blocks, and any text is answered
    with the longest beginning that was ever put, to the token. Threads may share a store, and any number of processes
    a directory.

    Parameters
    ----------
    url
        A directory; ``redis://`` or ``valkey://`` (extra ``redis``); or what fsspec opens: ``s3://``, ``gs://``,
        ``file://``, ``memory://`` (extra ``object``).
    max_bytes
        Most bytes of all units, at least 1; None for no bound. What was not used for longest goes first, ends of texts
        before their beginnings; pinned prefixes never. Past this machine several processes may exceed it for a while.
    block_tokens
        Tokens of a block, for a store that is made; one that is there has its own, and None takes that, or 64.
    ram_bytes
        Past this machine: most bytes of units that are kept in memory; None for 256 MiB. In a directory the system
        does it.
    codec
        Of a store that is made: ``"dense"`` makes dense streams of what is at least 3 % smaller by them, and else
        frames; ``"frames"`` makes frames, which are decoded faster. A store that is there has its own, and None takes
        that, or ``"dense"``.
    effort
        Of frames, as for `kvmnn.encode`. ``"fast"`` is within 1 % of ``"exact"``, fp32 and bf16 are smaller by it.
    rotary
        Of dense streams: how the model rotated K, for all that is put; ``"none"`` for not at all, None tries what
        models in use have (`kvmnn.dense.find_rotary`). Wrong parameters cost size only.
    threads
        For encoding and decoding, at most this number; None for all processors.
    timeout
        Past this machine: seconds that an answer may take; None for 5. What is not answered is a miss, and for a second
        nothing more is tried; after each further time-out for twice as long, up to a minute.
    read_only
        Change nothing, and do not note down what was used: for a directory that cannot be written to.
    create
        Make the store where there is none.

    Raises
    ------
    SourceError
        For a directory that is no store, or one of another version.
    OptionError
        For another `block_tokens` or `codec` than the store has, and what is no URL.
    MissingDependencyError
        For a URL whose package is not installed.
    OutputError
        Where a store cannot be made.

    Examples
    --------
    ::

        with PrefixStore("prefixes/", max_bytes=4 << 30) as store:
            store.put(ids, layers, model=fingerprint)
            found = store.get(other_ids, model=fingerprint)
            rest = other_ids[found.tokens :]
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        max_bytes: int | None = None,
        *,
        block_tokens: int | None = None,
        ram_bytes: int | None = None,
        codec: str | None = None,
        effort: str = "fast",
        rotary: RopeConfig | Literal["none"] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
        read_only: bool = False,
        create: bool = True,
    ) -> None:
        options = CodecOptions(effort=effort)
        options.check()
        self._threads = None if threads is None else validate_int(threads, "threads", 1)
        self._backend = open_backend(
            url,
            max_bytes=max_bytes,
            ram_bytes=ram_bytes,
            block_tokens=block_tokens,
            codec=codec,
            timeout=timeout,
            read_only=read_only,
            create=create,
        )
        self._sequences = SequenceStore(
            self._backend, WriteOptions(options, RopeState(rotary), CodecChooser(), self._threads)
        )
        self._requested_tokens = self._hit_tokens = 0
        self._lock = threading.Lock()

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._backend.block_tokens

    @property
    def codec(self) -> str:
        """What units are made of, ``"dense"`` or ``"frames"``."""
        return self._backend.codec

    @property
    def models(self) -> tuple[str, ...]:
        """Fingerprints of the models whose prefixes are stored."""
        return tuple(sorted(self._with_retry(self._sequences.list_models)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was wrong with the store and was mended, one line each."""
        return tuple(self._backend.notes)

    def put(
        self,
        token_ids: TokenIds,
        layers: Sequence[LayerCache],
        *,
        model: str,
        windows: Collection[int] = (),
        states: Sequence[OpaqueState] = (),
    ) -> PutResult:
        """Store K and V of a text; what is there already, from the beginning on, is not stored again.

        Rows of a sliding window, and state that is not K and V, are stored with the prefix, at its exact length.

        Parameters
        ----------
        token_ids
            ``[token]``, whole numbers from 0 to 2**32 - 1.
        layers
            K and V of all of these tokens, of every layer that the model has, ``[kv_head, token, head_dim]``; of those
            of `windows` the last tokens are enough, with their positions and `tokens_seen`.
        model
            Fingerprint of the model that computed them: `kvmnn.formats.mnn.fingerprint`, or any text that no other
            model has.
        windows
            Numbers of the layers with a sliding window.
        states
            State of layers that is not K and V, behind exactly these tokens: of linear attention, convolutions.

        Raises
        ------
        KvmnnError
            For layers that do not hold each of these tokens once, or differ in dtype; and where texts of this model and
            dtype are stored whose layers have other shapes, or are others.
        OutputError
            Where files cannot be written; the store is as it was, or has a beginning of the text.
        """
        ids = to_token_ids(token_ids)
        full_layers, window_layers = split_windows(layers, windows)
        caches = validate_layers(full_layers, ids.size, window_layers)
        ordered = sorted(states, key=lambda state: (state.layer, state.name))
        namespace = build_namespace(caches, model, window_layers, ordered)
        state = StateToPut(window_layers, ordered) if namespace.needs_state else None
        try:
            return self._with_retry(lambda: self._sequences.put(ids, caches, namespace, state))
        except BackendUnavailableError as error:
            return PutResult(tokens=ids.size, known_tokens=0, notes=(str(error),), outage=True)

    def match(self, token_ids: TokenIds, *, model: str, dtype: str | None = None) -> int:
        """How many tokens of a text are stored, from its beginning on: what `get` would return.

        0 as well where the engine does not answer, which `find` says.

        Parameters
        ----------
        dtype
            As for `get`.
        """
        return self.find(token_ids, model=model, dtype=dtype).tokens

    def find(self, token_ids: TokenIds, *, model: str, dtype: str | None = None, partial: bool = False) -> MatchResult:
        """As `match`, with the precision that `get` would take, how much other precisions have, and whether the engine
        did not answer; with `partial` what `get` returns with it."""
        ids = to_token_ids(token_ids)
        try:
            namespace, stored, other_precisions = self._with_retry(
                lambda: self._sequences.find_longest(ids, model, dtype, partial=partial)
            )
        except BackendUnavailableError as error:
            return MatchResult(tokens=0, asked=ids.size, notes=(str(error),), outage=True)
        return MatchResult(
            tokens=stored.tokens, asked=ids.size, dtype=namespace.dtype if namespace else None, others=other_precisions
        )

    def get(self, token_ids: TokenIds, *, model: str, dtype: str | None = None, partial: bool = False) -> StoredPrefix:
        """K and V of the longest stored beginning of a text.

        A model with windows or state continues only from a length that these are stored at: the longest such beginning
        is returned, with all of it.

        A unit that is damaged is removed and said in the result's `notes`; what was stored before it is returned.

        Parameters
        ----------
        token_ids, model
            As for `put`.
        dtype
            Of what is wanted, ``"fp16"``, ``"bf16"`` or ``"fp32"``; None for whichever covers most, of equals the first
            that was put: `StoredPrefix.dtype` says it.
        partial
            Return the layers with full attention of the longest beginning, whatever else the model needs to continue;
            `StoredPrefix.missing` says what is not there.

        Raises
        ------
        KvmnnError
            Where the index cannot be read.
        """
        ids = to_token_ids(token_ids)
        try:
            prefix = self._with_retry(lambda: self._sequences.get(ids, model, dtype, partial=partial))
        except BackendUnavailableError as error:
            prefix = StoredPrefix(tokens=0, requested_tokens=ids.size, notes=(str(error),), outage=True)
        with self._lock:
            self._requested_tokens += prefix.requested_tokens
            self._hit_tokens += prefix.tokens
        return prefix

    def park(
        self,
        name: str,
        token_ids: TokenIds,
        layers: Sequence[LayerCache],
        *,
        model: str,
        windows: Collection[int] = (),
        states: Sequence[OpaqueState] = (),
    ) -> PutResult:
        """Put a session away under a name: its text is kept until `forget`, its K and V as those of any text.

        Parameters
        ----------
        name
            1 to 256 printable characters; a session that has it is replaced.
        token_ids, layers, model, windows, states
            As for `put`, errors as well. Where an engine does not answer the text is not kept either, as the result's
            `outage` says.
        """
        validate_session_name(name)
        put = self.put(token_ids, layers, model=model, windows=windows, states=states)
        full_layers, window_layers = split_windows(layers, windows)
        sorted_states = sorted(states, key=lambda state: (state.layer, state.name))
        namespace = build_namespace(
            sorted(full_layers, key=lambda cache: cache.layer), model, window_layers, sorted_states
        )
        try:
            self._with_retry(lambda: self._backend.save_session(name, namespace, to_token_ids(token_ids)))
        except BackendUnavailableError as error:
            return replace(put, notes=(*put.notes, f"the session was not noted down: {error}"), outage=True)
        return put

    def resume(self, name: str) -> StoreSession:
        """Take a session up again: its text, and what is still stored of its K and V.

        Raises
        ------
        KvmnnError
            Where no session has this name.
        OutageError
            Where the engine does not answer: whether there is such a session, and its text, is not known then.
        """
        namespace, ids = self._with_retry(lambda: self._backend.get_session(name))
        prefix = self.get(ids, model=namespace.model, dtype=namespace.dtype)
        return StoreSession(name=name, token_ids=ids.tolist(), prefix=prefix)

    def sessions(self) -> list[str]:
        """The names of all sessions that were put away."""
        return self._with_retry(self._backend.list_sessions)

    def forget(self, name: str) -> None:
        """Forget a session's name and text; its K and V stay until they have to go. Errors as `resume`."""
        self._with_retry(lambda: self._backend.delete_session(name))

    def pin(self, token_ids: TokenIds, *, model: str, dtype: str | None = None) -> PinResult:
        """Keep a text whatever the bound, until `unpin`.

        Parameters
        ----------
        dtype
            Which precision is meant; None for each that has all of the text.

        Raises
        ------
        KvmnnError
            Where not all of it is stored.
        """
        ids = to_token_ids(token_ids)

        def pin() -> list[tuple[str, bool]]:
            return [
                (namespace.dtype, self._backend.pin(namespace, ids))
                for namespace, _ in self._sequences.find_complete(ids, model, dtype)
            ]

        dtypes, are_new = zip(*self._with_retry(pin), strict=True)
        return PinResult(tokens=ids.size, pinned=True, was_pinned=not any(are_new), dtypes=dtypes)

    def unpin(self, token_ids: TokenIds, *, model: str, dtype: str | None = None) -> PinResult:
        """Let go of a text that was pinned, in this precision or in all.

        Raises
        ------
        KvmnnError
            Where it is not pinned, and not all of it is stored.
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
        return PinResult(tokens=ids.size, pinned=False, was_pinned=bool(unpinned_dtypes), dtypes=tuple(unpinned_dtypes))

    def delete(self, token_ids: TokenIds, *, model: str, dtype: str | None = None) -> CleanupResult:
        """Remove a text: what no other text continues, from its end to its beginning, and nothing that is pinned.

        Parameters
        ----------
        dtype
            As for `pin`.

        Raises
        ------
        KvmnnError
            Where not all of it is stored.
        """
        ids = to_token_ids(token_ids)

        def delete() -> CleanupResult:
            namespaces = [namespace for namespace, _ in self._sequences.find_complete(ids, model, dtype)]
            results = [self._backend.delete(self._sequences.make_sequence(namespace, ids)) for namespace in namespaces]
            return CleanupResult(
                units=sum(result.units for result in results),
                bytes=sum(result.bytes for result in results),
                kept="; ".join(dict.fromkeys(result.kept for result in results if result.kept)),
                dtypes=tuple(namespace.dtype for namespace in namespaces),
            )

        return self._with_retry(delete)

    def export(
        self,
        token_ids: TokenIds,
        path: str | os.PathLike[str],
        *,
        model: str,
        dtype: str | None = None,
        force: bool = False,
    ) -> StoreExportResult:
        """Write a text with its K and V to one file, which `import_file` of any store takes in.

        Parameters
        ----------
        dtype
            Which precision is meant; None for the first that was put of those that have all of the text.
        force
            Replace a file that exists.

        Raises
        ------
        KvmnnError
            Where not all of it is stored, or some of it is damaged.
        """
        ids = to_token_ids(token_ids)
        return self._with_retry(lambda: self._sequences.export(ids, path, model, dtype, force=force))

    def import_file(self, path: str | os.PathLike[str]) -> PutResult:
        """Take in a text that `export` wrote, under the model that computed it.

        Raises
        ------
        SourceError
            For a file that is none, or is damaged.
        OutputError
            As `put`.
        """
        model, ids, layers = export.read_exported(path, self._threads)
        return self.put(ids, layers, model=model)

    def gc(self, max_bytes: int | None = None) -> CleanupResult:
        """Remove files that nothing refers to, and texts until no more than `max_bytes` are left; None for no bound."""
        max_stored_bytes = None if max_bytes is None else validate_int(max_bytes, "max_bytes", 0)
        return self._with_retry(lambda: self._backend.collect_garbage(max_stored_bytes))

    def verify(self) -> StoreVerifyResult:
        """Read, decode and compare everything; what is damaged is removed, with all that follows it."""
        return self._with_retry(lambda: self._backend.verify(self._threads))

    def stats(self) -> StoreStats:
        """What the store holds, and what `get` found so far."""
        return self._with_retry(lambda: self._backend.collect_stats(self._requested_tokens, self._hit_tokens))

    def ls(self) -> StoreListing:
        """The stored texts, the last used first."""
        return self._with_retry(self._backend.list_entries)

    def close(self) -> None:
        """Note down what was used, and let go of the store; twice does nothing."""
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
        """Call once more where the index was damaged: it is made anew then."""
        try:
            return call()
        except DamagedIndexError:
            if self._backend.read_only:
                raise
            return call()
