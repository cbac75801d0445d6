"""The protocol of a store backend, and the types that backends exchange with the rest of the store.

A backend finds, reads, adds and maintains units. `directory.backend.DirectoryBackend` keeps them as files with an
SQLite index, `remote.maintenance.RemoteBackend` as values of Redis, Valkey or an object store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from ..dtypes import Bytes
from ..errors import KvmnnError, ManifestError, OptionError, SourceError
from ..files.schema import JsonReader, parse_document
from .encryption import CIPHER_NAME, StoreCipher
from .namespace import Ids, Namespace, TokenSequence, compute_sequence_key
from .results import CleanupResult, NamespaceStats, StoreListing, StoreStats, StoreVerifyResult
from .unit import LAYER_CODECS, TableSetCache, TableSets, UnitHeader
from .unit_codec import PrefixState

if TYPE_CHECKING:
    from ..profiles.search import ProfileFinder

MAX_BLOCK_TOKENS = 1 << 16
PLAIN_CODECS = ("dense", "frames")
"""Codecs that need no profile."""
STORE_CODECS = (*PLAIN_CODECS, *LAYER_CODECS)
"""Codecs of new units; the first stores recorded none, and have frames."""
STORE_POLICIES = ("lru", "benefit")
"""What is evicted first: the least recently used, or what saves the fewest seconds per byte."""
BENEFIT_SCALE = 1 << 32
"""Benefits are integers, so that SQLite, Python and the simulator order units alike on all machines."""
MAX_UNIT_USES = 1 << 20
MAX_UNIT_PRIORITY = 1 << 62
CODEC_DESCRIPTIONS = {
    "dense": "dense streams",
    "frames": "frames",
    "profile": "profile streams",
    "transform": "transform streams",
}
_SETTINGS_SCHEMA, _SETTINGS_VERSION, _ENCRYPTED_SETTINGS_VERSION = "kvmnn-store", 1, 2
"""A version that knows nothing of encryption would take sealed units for damaged ones, and remove them."""
UNREADABLE_LOSS = "K and V lost something before they were put, and the record of what is missing or damaged"
_MAX_SETTINGS_BYTES = 1 << 20
_CHECKSUM_KEY = "checksum"


class CodecProfile(NamedTuple):
    """The profile of the codec of a store, and the options of the codec."""

    #: Key of the profile, in hexadecimal.
    key: str
    #: Its file when the store was made: from the folder of the store; of a store past this machine its name.
    file: str
    #: Options of the codec by name.
    options: Mapping[str, float]
    #: What the codec does by this profile where options say nothing; not written to settings.
    default_options: Mapping[str, float] = {}


class StoreSettings(NamedTuple):
    """Settings that are fixed when a store is created."""

    #: Tokens per block.
    block_tokens: int
    #: Codec of new units, one of `STORE_CODECS`.
    codec: str
    #: What is evicted first, one of `STORE_POLICIES`.
    policy: str = "lru"
    #: `StoreCipher.key_check` of the key that the store is encrypted with; empty if it is not.
    key_check: str = ""
    #: Of the codecs of `LAYER_CODECS`; None for others.
    profile: CodecProfile | None = None

    @property
    def is_lossy(self) -> bool:
        """Return whether units decode to other elements than were put."""
        return self.codec == LAYER_CODECS[1]

    def adopt_profile(self, profile: CodecProfile | None) -> StoreSettings:
        """Return settings with the file and options of a profile if it has their key: units name the key alone."""
        is_equal = profile is not None and self.profile is not None and profile.key == self.profile.key
        return self._replace(profile=profile) if is_equal else self


def compute_benefit(tokens: int, nbytes: int) -> int:
    """Return the benefit of a use of a unit: tokens that need not be computed, per byte, times `BENEFIT_SCALE`.

    Tokens stand in for seconds, which differ by a constant factor in one model. The priority of a unit is its benefit
    times its uses, plus the highest priority that was evicted before its last use (GreedyDual-Size with frequency,
    Cherkasova 1998): what nobody uses any more grows old.
    """
    return tokens * BENEFIT_SCALE // max(nbytes, 1)


def encode_settings(settings: StoreSettings, *, with_checksum: bool = True) -> bytes:
    """Return the JSON document of the settings, which shows by its checksum that nobody has changed it."""
    document: dict[str, object] = {
        "schema": _SETTINGS_SCHEMA,
        "schema_version": _ENCRYPTED_SETTINGS_VERSION if settings.key_check else _SETTINGS_VERSION,
        **{name: value for name, value in settings._asdict().items() if name not in ("key_check", "profile")},
    }
    if settings.key_check:
        document["encryption"] = {"cipher": CIPHER_NAME, "key_check": settings.key_check}
    if settings.profile is not None:
        key, file, options, _ = settings.profile
        document["profile"] = {"key": key, "file": file, "options": options}
    if with_checksum:
        document[_CHECKSUM_KEY] = _compute_checksum(document)
    return json.dumps(document).encode() + b"\n"


def _compute_checksum(document: Mapping[str, object]) -> str:
    values = {name: value for name, value in document.items() if name != _CHECKSUM_KEY}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def infer_settings(block_tokens: int, headers: Sequence[UnitHeader]) -> StoreSettings:
    """Return settings that were lost, by the headers of units; options of a profile's codec become the default ones."""
    infos = [header.layer_info for header in headers if header.layer_info is not None]
    if infos:
        info = next((info for info in infos if info.codec == LAYER_CODECS[1]), infos[0])
        return StoreSettings(block_tokens, info.codec, profile=CodecProfile(info.profile_key.hex(), "", {}))
    has_frames = bool(headers) and all(header.dense is None for header in headers)
    return StoreSettings(block_tokens, "frames" if has_frames else "dense")


def describe_lost_options(settings: StoreSettings, sources: Sequence[CodecProfile | None]) -> str:
    """Describe the options that replace those of the codec in inferred settings; empty if a source has them."""
    if settings.profile is None or any(source and source.key == settings.profile.key for source in sources):
        return ""
    from .layer_units import add_default_options  # which imports both codecs

    options_text = _format_options(add_default_options(settings.codec, {}))
    return f"; nothing says the options of its codec, and new units have {options_text}"


def explain_settings(path: str | Path, cipher: StoreCipher, headers: Sequence[UnitHeader] = ()) -> str:
    """Return the advice for a store that has lost both its settings and its index, with what units say."""
    settings = infer_settings(64, headers)._replace(key_check=cipher.key_check)
    example = encode_settings(settings, with_checksum=False).decode().strip()
    guess = "all values are guesses"
    if headers:
        codec_text = "codec is that" if settings.profile is None else "codec and key of the profile are those"
        guess = f"{codec_text} of the units, other values are guesses"
    return f"write what the store was made with into {path}, such as {example} ({guess})"


def find_contradicting_codec(codec: str, headers: Sequence[UnitHeader]) -> str | None:
    """Return the codec of units that settings with `codec` contradict; None if units may be of it.

    A store of dense streams may have frames, one of frames has nothing else. Units that are lossy count more than
    others.
    """
    codecs = {infer_settings(1, [header]).codec for header in headers}
    lossy_codec = LAYER_CODECS[1]
    if not codecs or codec == lossy_codec in codecs:
        return None
    if lossy_codec in codecs:
        return lossy_codec
    if codec == "frames":
        return None if codecs == {codec} else min(codecs - {codec})
    is_possible = codec in codecs or (codec == "dense" and "frames" in codecs)
    return None if is_possible else min(codecs)


def parse_settings(data: bytes, label: str, codec: str | None = None) -> StoreSettings:
    """Parse the document of `encode_settings`, as one of `codec` if that is specified."""
    root = parse_document(data, label, _MAX_SETTINGS_BYTES)
    version, key_check = root.get("schema_version").read_int(1), ""
    if root.get("schema").read_str() != _SETTINGS_SCHEMA or version not in (
        _SETTINGS_VERSION,
        _ENCRYPTED_SETTINGS_VERSION,
    ):
        raise SourceError(f"{label}: is of another version: expected {_SETTINGS_SCHEMA} {_SETTINGS_VERSION}")
    if version == _ENCRYPTED_SETTINGS_VERSION:
        cipher_node = root.get("encryption").get("cipher")
        if cipher_node.read_str() != CIPHER_NAME:
            raise SourceError(str(cipher_node.error(CIPHER_NAME)))
        key_check = root.get("encryption").get("key_check").read_str()
        if not key_check:
            raise root.get("encryption").get("key_check").error("a text")
    block_tokens = root.get("block_tokens").read_int(1)
    if block_tokens > MAX_BLOCK_TOKENS:
        raise root.get("block_tokens").error(f"at most {MAX_BLOCK_TOKENS}")
    if codec is None:
        codec = root.get("codec").read_str() if "codec" in root.value else "frames"
    if codec not in STORE_CODECS:  # a later version wrote it
        raise SourceError(str(root.get("codec").error(f"one of {', '.join(STORE_CODECS)}")))
    policy = root.get("policy").read_str() if "policy" in root.value else "lru"
    if policy not in STORE_POLICIES:
        raise SourceError(str(root.get("policy").error(f"one of {', '.join(STORE_POLICIES)}")))
    profile = _parse_profile(root.get("profile")) if codec in LAYER_CODECS else None
    # documents of hand, and of the first versions, have none
    if _CHECKSUM_KEY in root.value and root.get(_CHECKSUM_KEY).read_str() != _compute_checksum(root.value):
        raise ManifestError(f"{label}: was changed by other means than kvmnn, as its checksum shows")
    return StoreSettings(block_tokens, codec, policy, key_check, profile)


def _parse_profile(node: JsonReader) -> CodecProfile:
    options = parse_codec_options(node.get("options"))
    return CodecProfile(node.get("key").read_sha256(), node.get("file").read_str(), options)


def parse_codec_options(node: JsonReader) -> dict[str, float]:
    """Return the options of a codec; `ManifestError` for anything but numbers by name."""
    if not isinstance(node.value, dict) or any(type(value) not in (int, float) for value in node.value.values()):
        raise node.error("an object of numbers")
    return dict(node.value)


def check_settings_match(
    label: str,
    settings: StoreSettings,
    block_tokens: int | None,
    codec: str | None,
    policy: str | None = None,
    profile: CodecProfile | None = None,
) -> None:
    """Raise `OptionError` if a store has other settings than the caller requests; None requests nothing."""
    if block_tokens not in (None, settings.block_tokens):
        raise OptionError(f"{label}: has blocks of {settings.block_tokens} tokens, not of {block_tokens}")
    if codec not in (None, settings.codec):
        raise OptionError(
            f"{label}: is a store of {CODEC_DESCRIPTIONS[settings.codec]}, not of {CODEC_DESCRIPTIONS[str(codec)]}"
        )
    if policy not in (None, settings.policy):
        raise OptionError(f"{label}: evicts by policy {settings.policy}, not by {policy}: fixed when a store is made")
    if profile is None or settings.profile is None:
        return
    if profile.key != settings.profile.key:
        raise OptionError(f"{label}: needs the profile {settings.profile.key[:16]}, this one is {profile.key[:16]}")
    requested, own = (
        _complete_options(settings.codec, options, profile) for options in (profile.options, settings.profile.options)
    )
    if profile.options and requested != own:
        raise OptionError(
            f"{label}: was made with {_format_options(settings.profile.options)}, not with "
            f"{_format_options(profile.options)}"
        )


def _complete_options(codec: str, options: Mapping[str, float], profile: CodecProfile) -> Mapping[str, float]:
    from .layer_units import add_default_options  # which imports both codecs

    return add_default_options(codec, {**profile.default_options, **options})


def _format_options(options: Mapping[str, float]) -> str:
    return ",".join(f"{name}={value:g}" for name, value in options.items()) or "the default options"


class StoredText(NamedTuple):
    """A sequence with its namespace."""

    namespace: Namespace
    ids: Ids

    @property
    def key(self) -> bytes:
        """Key of the sequence, whose first letters are its handle."""
        return compute_sequence_key(self.namespace.key, self.ids, self.namespace.secret)


class StoreLimits(NamedTuple):
    """Limits on the bytes of units; None for no limit."""

    #: Of all units.
    max_bytes: int | None = None
    #: Of those of the tenant.
    quota: int | None = None


class UnitSlice(NamedTuple):
    """`take` tokens of a unit after its first `skip` tokens."""

    unit: int
    skip: int
    take: int
    #: Whether a record past this machine says that the unit has a loss.
    has_loss: bool = False


class StateLocation(NamedTuple):
    """Where the state of a prefix is stored: length of the prefix in tokens, and number of the unit."""

    tokens: int
    unit: int


class PrefixMatch(NamedTuple):
    """The longest stored prefix of a sequence."""

    #: The parts of units that contain it, in order.
    slices: tuple[UnitSlice, ...]
    #: Whole blocks among its tokens.
    num_blocks: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the prefix."""
        return sum(unit_slice.take for unit_slice in self.slices)

    def take_prefix(self, tokens: int, block_tokens: int) -> PrefixMatch:
        """Return the match of the first `tokens` tokens."""
        prefix_slices, remaining = [], tokens
        for unit_slice in self.slices:
            if remaining > 0:
                prefix_slices.append(unit_slice._replace(take=min(unit_slice.take, remaining)))
                remaining -= unit_slice.take
        return PrefixMatch(tuple(prefix_slices), min(self.num_blocks, tokens // block_tokens))

    def list_units(self) -> tuple[int, ...]:
        """Return the numbers of the units, each once."""
        return tuple(dict.fromkeys(unit_slice.unit for unit_slice in self.slices))


class BackendUnavailableError(KvmnnError):
    """The backend does not answer: a get is a miss, and a put stores nothing."""


class ConcurrentUpdateError(KvmnnError):
    """Another process removed or replaced the blocks that a new unit follows."""

    def __init__(self, message: str, added: AddResult | None = None) -> None:
        super().__init__(message)
        self.added = added
        """What was added nevertheless."""


@dataclass(frozen=True)
class NewUnit:
    """A unit that is to be added."""

    #: Key of the block before it.
    parent: bytes
    #: Tokens of the sequence before it.
    start: int
    #: Its token ids.
    ids: Ids
    #: Keys of its whole blocks.
    keys: Sequence[bytes]
    #: Size of its file in bytes.
    nbytes: int
    #: Path of the staged file, or its bytes.
    staged: Path | bytes
    #: Checksums of the preceding blocks whose rows its streams refer to; empty if they refer to none.
    history_sums: tuple[int, ...] = ()
    #: As in `Unit`.
    has_loss: bool = False


class ExceededLimit(NamedTuple):
    """A limit that leaves no room for some of the units of a put: these were not added, or were evicted."""

    #: ``"quota"`` or ``"max_bytes"``, and its bytes.
    name: str
    max_bytes: int
    #: Bytes of the units, where they are known: at least so many are needed.
    needed_bytes: int = 0
    #: Bytes of units that no eviction frees for them: pinned ones, and those that they continue. 0 for a tenant under
    #: a limit of all: what others have pinned is not for it to see.
    unevictable_bytes: int = 0

    def __str__(self) -> str:
        text = f"the {_LIMIT_DESCRIPTIONS[self.name]} has no room for more: "
        text += f"at least {self.needed_bytes:,} bytes are needed, " if self.needed_bytes else ""
        text += f"{self.max_bytes:,} are allowed" if self.needed_bytes else f"{self.max_bytes:,} bytes are allowed"
        if self.unevictable_bytes:
            text += f", {self.unevictable_bytes:,} of them taken by pinned texts and what comes before in this one"
        return text


_LIMIT_DESCRIPTIONS = {"max_bytes": "size limit (max_bytes, --size-limit)", "quota": "quota (quota, --quota)"}


class AddResult(NamedTuple):
    """Bytes that were added to the store, and bytes that were removed to make space."""

    stored_bytes: int
    removed_bytes: int
    predicted_kl: float | None = None
    """Of lossy units: nats a token that they are expected to cost; None where nothing says it."""
    exceeded_limit: ExceededLimit | None = None
    """The limit that leaves no room for some of the units: these were not added."""
    known_tokens: int | None = None
    """Tokens of the sequence that others had stored when the first unit was added; None if that was not looked up."""
    stored_from: int | None = None
    """First token of the units that were added: units that others had stored meanwhile are not; None without any."""
    stored_tokens: int = 0
    """Tokens of the units that were added."""
    bits_factor: float | None = None
    """Of lossy units: bits over those that the profile predicts, where so many that its losses do not hold."""

    def merge(self, later: AddResult) -> AddResult:
        """Return the sum of this result and that of a later addition to the same sequence."""
        return AddResult(
            self.stored_bytes + later.stored_bytes,
            self.removed_bytes + later.removed_bytes,
            later.predicted_kl,
            later.exceeded_limit,
            later.known_tokens if self.stored_from is None else self.known_tokens,
            later.stored_from if self.stored_from is None else self.stored_from,
            self.stored_tokens + later.stored_tokens,
            max(self.bits_factor or 0.0, later.bits_factor or 0.0) or None,
        )


def select_fitting(sizes: Sequence[int], unevictable_bytes: int, limit: int) -> int:
    """Return how many of the first units fit into a limit, with what cannot be evicted for them."""
    for index, nbytes in enumerate(sizes):
        unevictable_bytes += nbytes
        if unevictable_bytes > limit:
            return index
    return len(sizes)


class Staging(Protocol):
    """Temporary storage for the bytes of new units."""

    def write(self, pieces: Sequence[Bytes | bytes]) -> Path | bytes:
        """Write the pieces of a unit one after another; return the path of the file, or the bytes."""


class StoreBackend(Protocol):
    """Storage of units; any call may raise `KvmnnError`, and of a remote store `BackendUnavailableError`."""

    label: str
    """Name of the store in messages."""
    read_only: bool
    tenant: str
    """Whose sequences are listed and counted, and what the quota is of; the others are kept apart by their keys."""
    notes: list[str]
    """Problems that were repaired, one line each."""
    tables: TableSetCache
    cipher: StoreCipher
    """What values are sealed with, and what names are hashed with."""
    unit_overhead_bytes: int
    """Bytes that the store adds to those of a unit."""
    profiles: ProfileFinder

    @property
    def settings(self) -> StoreSettings:
        """Settings that were fixed when the store was created."""

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""

    @property
    def codec(self) -> str:
        """Codec of new units, one of `STORE_CODECS`."""

    @property
    def policy(self) -> str:
        """What is evicted first, one of `STORE_POLICIES`."""

    def list_namespaces(self) -> list[Namespace]:
        """Return all namespaces, in the order of their first puts."""

    def ensure_namespace(self, namespace: Namespace) -> None:
        """Record a namespace that has units, if its record was lost."""

    def has_sequences(self, namespace: Namespace) -> bool:
        """Return whether any unit of a namespace is stored."""

    def find_prefix(self, sequence: TokenSequence) -> PrefixMatch:
        """Find the longest stored prefix of a sequence."""

    def read_units(self, units: Sequence[int]) -> list[Bytes | None]:
        """Read the bytes of units; None for missing ones."""

    def get_cached(self, unit: int) -> Bytes | None:
        """Return the bytes of a unit that is available locally, without a round trip."""

    def find_unreadable(self, units: Sequence[int]) -> tuple[int, str] | None:
        """Return a unit that cannot be read, and why, as far as that is known without reading all of it, or None."""

    def has_losses(self, prefix_match: PrefixMatch) -> bool:
        """Return whether K and V of any unit of a prefix are not those computed, by their heads or records."""

    def stage(self) -> AbstractContextManager[Staging]:
        """Open temporary storage for new units."""

    def add_units(
        self, namespace: Namespace, sequence: TokenSequence, new: Sequence[NewUnit], tables: TableSets | None
    ) -> AddResult:
        """Add units of a sequence, in order, and the tables that some of them need."""

    def enforce_limit(self) -> tuple[int, ExceededLimit | None]:
        """Evict units until the store is within its limits; return the bytes that were removed, and for which limit."""

    def find_state(self, sequence: TokenSequence, tokens: int) -> StateLocation | None:
        """Find the state of the longest prefix of at most `tokens` tokens that has one."""

    def add_state(self, namespace: Namespace, sequence: TokenSequence, state: PrefixState) -> AddResult:
        """Add the state of a sequence whose units are stored."""

    def touch(self, units: Iterable[int], *, num_uses: int = 1) -> None:
        """Record that units were used; with `num_uses` 0, that they were put again, which saves nothing."""

    def quarantine(self, unit: int, reason: str, notes: list[str]) -> object:
        """Remove a damaged unit and append a line to `notes`; later searches do not find it."""

    def delete(self, sequence: TokenSequence) -> CleanupResult:
        """Remove the units of a sequence from its end on, up to one that another sequence needs or a pin keeps.

        Of a sequence of which parts are missing, what is left is removed.
        """

    def collect_garbage(self, max_bytes: int | None) -> CleanupResult:
        """Remove unreachable units and files, then evict units until at most `max_bytes` are left."""

    def verify(self, threads: int | None) -> StoreVerifyResult:
        """Read, decode and compare every unit."""

    def collect_stats(self, requested_tokens: int, hit_tokens: int, *, all_namespaces: bool = False) -> StoreStats:
        """Count what is stored, in the own namespace or in all; the tokens are copied into the result."""

    def collect_namespaces(self) -> list[NamespaceStats]:
        """Count what each namespace has, by name."""

    def list_entries(self) -> StoreListing:
        """Return the stored sequences, the most recently used first."""

    def pin(self, namespace: Namespace, ids: Ids) -> bool:
        """Exempt a sequence from eviction; return whether it was not pinned before."""

    def unpin(self, namespace: Namespace, ids: Ids) -> bool:
        """Remove the pin of a sequence; return whether it had one."""

    def save_session(self, name: str, namespace: Namespace, ids: Ids) -> None:
        """Store the token ids of a session under its name."""

    def get_session(self, name: str) -> tuple[Namespace, Ids]:
        """Return namespace and token ids of a session; raise `KvmnnError` if there is none with this name."""

    def list_sessions(self) -> list[str]:
        """Return the names of all sessions."""

    def delete_session(self, name: str) -> None:
        """Remove a session; raise `KvmnnError` if there is none with this name."""

    def iter_texts(self) -> Iterator[StoredText]:
        """Yield the sequences of `list_entries` whose ids can be read."""

    def iter_pinned(self) -> Iterator[StoredText]:
        """Yield the pinned sequences of the own namespaces whose ids can be read."""

    def save_loss(self, namespace: Namespace, loss: str) -> None:
        """Store what K and V of a namespace had lost before they were put; replaces what was stored."""

    def get_loss(self, namespace: Namespace) -> str:
        """Return what K and V of a namespace had lost before they were put; empty for nothing."""

    def save_label(self, label: str, namespace: Namespace, ids: Ids) -> None:
        """Store the label of a sequence; replaces its label before."""

    def get_label(self, namespace: Namespace, ids: Ids) -> str | None:
        """Return the label of a sequence; None if it has none, or a damaged one."""

    def list_label_keys(self) -> list[bytes]:
        """Return the keys of the sequences of all namespaces that have labels."""

    def iter_labels(
        self, keys: Sequence[bytes] | None = None, *, all_namespaces: bool = False
    ) -> Iterator[tuple[str, StoredText]]:
        """Yield labels and their sequences, of all `keys` or of these; damaged ones are skipped."""

    def list_damaged_labels(self) -> list[bytes]:
        """Return the keys of the sequences of all namespaces whose labels cannot be read."""

    def delete_labels(self, keys: Sequence[bytes]) -> None:
        """Remove the labels of the sequences with these keys (`namespace.compute_sequence_key`)."""

    def check_open(self) -> None:
        """Raise `KvmnnError` if the store was closed."""

    def close(self) -> None:
        """Flush pending records of last uses and release all resources; a second call does nothing."""
