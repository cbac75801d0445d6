"""Export of a stored sequence, without those that share its units, as one file for another machine."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from ..arrays.layer_cache import LayerCache
from ..arrays.source import ROUNDED_TEXT, join_losses
from ..dense import RopeConfig
from ..dtypes import Bytes
from ..errors import KvmnnError, OptionError, SourceError
from ..files.atomic import FileOutput
from ..files.mapped_file import MappedFile
from ..files.schema import JsonReader, parse_document
from ..frames import CodecOptions
from ..frames.buffers import integrity_checksum
from ..profiles.profile import Profile
from ..profiles.search import ProfileFinder
from .backend import UNREADABLE_LOSS, PrefixMatch, UnitSlice, parse_codec_options
from .encryption import KEY_VARIABLE, NO_CIPHER, SEALED_MAGIC, StoreCipher, StoreKey, UnsealError, make_cipher
from .namespace import MAX_TOKENS, Ids, Namespace, TokenSequence, parse_namespace, validate_session_name
from .results import PutResult
from .unit import (
    MAX_TABLE_SETS_BYTES,
    DamagedUnitError,
    DenseUnitInfo,
    LayerUnitInfo,
    ReadyUnits,
    TableSetCache,
    TableSets,
    TokenSpan,
    Unit,
    UnitFrame,
    UnitHeader,
    parse_header,
    parse_unit,
)
from .unit_codec import DamagedSliceError, LoadedSlice, check_unit_matches, decode_slices, encode_frame_units
from .write_path import DenseStreamEncoder, DenseUnitPlan, HistoryRef, build_dense_info

if TYPE_CHECKING:
    from .layer_units import LayerUnitEncoder


@dataclass(frozen=True, eq=False)
class SequenceExporter:
    """Selects the units of a sequence; a unit that also contains other sequences is encoded again without them."""

    namespace: Namespace
    sequence: TokenSequence
    #: K and V of its tokens.
    layers: Sequence[LayerCache]
    #: Shared tables of its units, by key.
    tables: Mapping[bytes, TableSets]
    rotary: RopeConfig | None
    options: CodecOptions
    #: Encodes units by a profile, where units are so.
    layer_encoder: LayerUnitEncoder | None
    threads: int | None

    def build_units(
        self, prefix_match: PrefixMatch, data_by_unit: Mapping[int, Bytes]
    ) -> list[tuple[UnitSlice, Bytes]]:
        """Return the slices of a sequence with the bytes of their units."""
        exported_units = []
        begin_token = 0
        for unit_slice in prefix_match.slices:
            data = data_by_unit[unit_slice.unit]
            header = parse_header(data)
            if header.ids.size > unit_slice.skip + unit_slice.take:
                unit_slice, data = unit_slice._replace(skip=0), self._encode_again(begin_token, unit_slice, header)
            exported_units.append((unit_slice, data))
            begin_token += unit_slice.take
        return exported_units

    def _encode_again(self, begin_token: int, unit_slice: UnitSlice, header: UnitHeader) -> Bytes:
        span = begin_token, begin_token + unit_slice.take
        block_tokens = self.sequence.block_tokens
        encoded_units: list[tuple[tuple[UnitFrame, ...], DenseUnitInfo | None]] = []
        if header.layer_info is not None:
            assert self.layer_encoder is not None
            encoded_units.append((self.layer_encoder.encode_span(span), None))
        elif header.dense is None:
            encode_frame_units(
                self.layers, [span], self.options, lambda _, frames: encoded_units.append((frames, None)), self.threads
            )
        else:
            # without its first blocks, the unit refers to no rows before it
            dense = header.dense
            history = HistoryRef() if unit_slice.skip else HistoryRef(dense.history_rows, 0, dense.chain_length)
            plan = DenseUnitPlan(span, history, self.tables.get(dense.tables_key))
            DenseStreamEncoder(self.layers, self.namespace, self.rotary).encode_units(
                [plan],
                block_tokens,
                lambda _, streams, sums: encoded_units.append((streams, build_dense_info(plan, sums))),
                self.threads,
            )
        parent = self.sequence.get_parent_key(begin_token // block_tokens)
        ids = self.sequence.ids[slice(*span)]
        unit = Unit(self.namespace.key, parent, begin_token, ids, *encoded_units[0])
        unit = replace(unit, layer_info=header.layer_info, is_rounded=header.has_loss)
        return np.frombuffer(b"".join(bytes(piece) for piece in unit.to_pieces()), np.uint8)


EXPORT_MAGIC = b"KVMNNPX2"
_EXPORT_MAGIC_V1 = b"KVMNNPX1"
"""Magic of the first version, whose document has no checksum."""
_SIZE_STRUCT = struct.Struct("<I")
_CHECKSUM_STRUCT = struct.Struct("<Q")
_EXPORT_NAME = "export"
"""The name that a file is sealed under."""
_ROUNDED_AGAIN_KEY, _CODEC_OPTIONS_KEY = "rounded_again", "codec_options"
ROUNDED_AGAIN_LOSS = f"{ROUNDED_TEXT} before they were put, of an exported sequence"
_MAX_UNITS = 1 << 20
_MAX_TABLES = 1 << 10
_MAX_DOCUMENT_BYTES = 64 << 20


def write_exported(
    path: str | os.PathLike[str],
    namespace: Namespace,
    unit_slices: list[tuple[UnitSlice, Bytes]],
    tables: Sequence[TableSets],
    *,
    label: str = "",
    loss: str = "",
    codec_options: Mapping[str, float] | None = None,
    is_rounded_again: bool = False,
    force: bool,
    cipher: StoreCipher = NO_CIPHER,
) -> int:
    """Write the slices of a sequence, their tables, its label, loss and options of the codec that needs a profile.

    The file is sealed as values of the store are.
    """
    unit_entries = [
        {"bytes": data.size, "skip": unit_slice.skip, "take": unit_slice.take} for unit_slice, data in unit_slices
    ]
    table_entries = [{"bytes": len(table_set.data), "key": table_set.key.hex()} for table_set in tables]
    header: dict[str, Any] = {
        "space": namespace.to_json(),
        "units": unit_entries,
        **({"tables": table_entries} if table_entries else {}),
        **({"label": label} if label else {}),
        **({"loss": loss} if loss else {}),
        **({_CODEC_OPTIONS_KEY: dict(codec_options)} if codec_options else {}),
        **({_ROUNDED_AGAIN_KEY: True} if is_rounded_again else {}),
    }
    document = json.dumps(header).encode()
    head = EXPORT_MAGIC + _SIZE_STRUCT.pack(len(document)) + _CHECKSUM_STRUCT.pack(integrity_checksum(document))
    pieces: list[Bytes | bytes] = [
        head + document,
        *(data for _, data in unit_slices),
        *(table_set.data for table_set in tables),
    ]
    sealed_pieces = cipher.seal_pieces(pieces, _EXPORT_NAME)
    with FileOutput(path, force=force) as output:
        for piece in sealed_pieces:
            output.file.write(piece if isinstance(piece, bytes) else piece.data)
        output.commit()
    return sum(map(len, sealed_pieces))


def _read_label(document: JsonReader, file_label: str) -> str | None:
    """Return the label of an exported sequence; None if it had none. Refuse one that `PrefixStore.put` refuses."""
    if "label" not in document.value:
        return None
    label: str = document.get("label").read_str()
    try:
        validate_session_name(label, "its label")
    except KvmnnError as error:
        raise SourceError(f"{file_label}: {error}") from None
    return label


def read_exported_model(path: str | os.PathLike[str], key: StoreKey | bytes | None = None) -> str:
    """Return the fingerprint of the model of an exported sequence.

    Raises
    ------
    SourceError, OptionError
        As `read_exported`.
    """
    cipher = make_cipher(key)
    file = _open_exported(path, cipher)
    root = parse_document(_read_document(file)[0], file.label, _MAX_DOCUMENT_BYTES)
    return parse_namespace(root.get("space").read_str(), f"{file.label}: space", cipher.secret).model


def is_lossy(path: str | os.PathLike[str], key: StoreKey | bytes | None = None) -> bool:
    """Return whether an exported sequence has units that do not decode to what was put.

    Raises
    ------
    SourceError, OptionError
        As `read_exported`.
    """
    return any(unit.is_lossy for unit in _read_units(path, key))


def _read_units(path: str | os.PathLike[str], key: StoreKey | bytes | None) -> list[Unit]:
    cipher = make_cipher(key)
    _, slices, _ = _read_slices(_open_exported(path, cipher), cipher)
    return [loaded_slice.unit for loaded_slice in slices]


def read_layer_info(path: str | os.PathLike[str], key: StoreKey | bytes | None = None) -> LayerUnitInfo | None:
    """Return codec and profile of an exported sequence, None unless all its units have them; raise as `is_lossy`."""
    infos = [unit.layer_info for unit in _read_units(path, key)]
    first = infos[0]
    if first is None:
        return None
    is_equal = all(
        info is not None and (info.codec, info.profile_key) == (first.codec, first.profile_key) for info in infos
    )
    return first if is_equal else None


def read_codec_options(path: str | os.PathLike[str], key: StoreKey | bytes | None = None) -> dict[str, float]:
    """Return the options of the store that a sequence was exported from, with which its units are stored as they are.

    They are empty for codecs that need no profile; raises as `is_lossy`.
    """
    file = _open_exported(path, make_cipher(key))
    root = parse_document(_read_document(file)[0], file.label, _MAX_DOCUMENT_BYTES)
    return parse_codec_options(root.get(_CODEC_OPTIONS_KEY)) if _CODEC_OPTIONS_KEY in root.value else {}


def check_import(
    path: str | os.PathLike[str] | ExportedSequence, key: StoreKey | bytes | None = None, *, is_lossy_store: bool
) -> None:
    """Raise `OptionError` for a file of lossy units, unless the store is of such units: it would not say so."""
    if is_lossy_store:
        return
    if isinstance(path, ExportedSequence):
        name, is_lossy_sequence = path.path, bool(path.lossy_streams)
    else:
        name, is_lossy_sequence = os.fspath(path), is_lossy(path, key)
    if is_lossy_sequence:
        raise OptionError(
            f"{name}: is LOSSY, of transform streams: a store of other units would not say so: expected "
            "one of codec transform (--codec transform:PROFILE)"
        )


class ExportedSequence(NamedTuple):
    """A sequence from a file of `PrefixStore.export`."""

    #: The file.
    path: str
    #: Fingerprint of its model.
    model: str
    ids: Ids
    #: K and V of all layers.
    layers: list[LayerCache]
    #: Lossy streams of its units, by their tokens.
    lossy_streams: Mapping[TokenSpan, tuple[UnitFrame, ...]]
    #: Whether units that also had other sequences were rounded once more when it was exported.
    is_rounded_again: bool
    #: What its K and V had lost before they were put; empty for nothing.
    loss: str
    #: The label that it had; None for none.
    label: str | None

    def is_rounded_once_more(self, result: PutResult, ready_units: ReadyUnits) -> bool:
        """Return whether what was stored of lossy units had been rounded before."""
        is_rounded_again = self.is_rounded_again or ready_units.encoded_spans
        return bool(result.stored_bytes and self.lossy_streams and is_rounded_again)

    def describe_import(self, result: PutResult, ready_units: ReadyUnits) -> PutResult:
        """Return the result of putting it; without a loss where words were rounded more than once."""
        if not self.is_rounded_once_more(result, ready_units):
            return result
        note = f"{self.path}: is LOSSY, and its words were rounded once more: what was lost in all is not known"
        return replace(result, predicted_kl=None, notes=(*result.notes, note))


def read_exported(
    path: str | os.PathLike[str],
    threads: int | None = None,
    key: StoreKey | bytes | None = None,
    *,
    profile: ProfileFinder | Profile | str | os.PathLike[str] | None = None,
) -> tuple[str, Ids, list[LayerCache]]:
    """Read a file of `PrefixStore.export`; all bytes are compared with their checksums.

    Parameters
    ----------
    path
        File to read.
    threads
        Maximum number of threads for decoding; None for all processors.
    key
        Key of the store that it was exported from; None for a store without encryption.
    profile
        The profile of units by one, or its file; None looks in the folder of the file, and in the one above.

    Returns
    -------
    Fingerprint of the model, token ids, and K and V of all layers, for `PrefixStore.put`.

    Raises
    ------
    SourceError
        If the file is not an exported sequence, or is damaged; for a profile that is not there.
    OptionError
        If it is encrypted and there is no key, or the other way round.
    """
    sequence = load_exported(path, threads, key, profile=profile)
    return sequence.model, sequence.ids, sequence.layers


def load_exported(
    path: str | os.PathLike[str],
    threads: int | None = None,
    key: StoreKey | bytes | None = None,
    *,
    profile: ProfileFinder | Profile | str | os.PathLike[str] | None = None,
) -> ExportedSequence:
    """Read a file as `read_exported` does, with what `PrefixStore.import_file` needs of it, its label too."""
    cipher = make_cipher(key)
    file = _open_exported(path, cipher)
    namespace, slices, tables_by_name = _read_slices(file, cipher)
    folder = Path(path).absolute().parent
    profiles = (
        profile if isinstance(profile, ProfileFinder) else ProfileFinder(file.label, profile, [folder, folder.parent])
    )
    try:
        layers = decode_slices(
            namespace, slices, threads, tables=TableSetCache(tables_by_name.get, tuple), profiles=profiles
        )
    except DamagedSliceError as error:
        raise SourceError(f"{file.label}: unit {error.slice_index}: {error}") from None
    ids = np.concatenate([unit.ids[skip : skip + take] for unit, skip, take in slices])
    units = [unit for unit, _, _ in slices if unit.is_lossy]
    document = parse_document(_read_document(file)[0], file.label, _MAX_DOCUMENT_BYTES)
    is_rounded, is_rounded_again = any(unit.is_rounded for unit, _, _ in slices), _ROUNDED_AGAIN_KEY in document.value
    loss = join_losses(
        document.get("loss").read_str() if "loss" in document.value else "",
        ROUNDED_AGAIN_LOSS if units and is_rounded_again else "",
    )
    return ExportedSequence(
        file.label,
        namespace.model,
        ids,
        layers,
        {(unit.start, unit.start + unit.ids.size): unit.frames for unit in units},
        bool(units) and is_rounded_again,
        loss or (UNREADABLE_LOSS if is_rounded else ""),
        _read_label(document, file.label),
    )


def _read_slices(
    file: MappedFile | _ExportedBytes, cipher: StoreCipher
) -> tuple[Namespace, list[LoadedSlice], dict[str, bytes]]:
    """Return the namespace, the slices, and the tables by their names."""
    document, begin_byte = _read_document(file)
    root = parse_document(document, file.label, _MAX_DOCUMENT_BYTES)
    namespace = parse_namespace(root.get("space").read_str(), f"{file.label}: space", cipher.secret)
    slices: list[LoadedSlice] = []
    tokens = 0
    for unit_index, node in enumerate(root.get("units").read_list(min_len=1, max_len=_MAX_UNITS)):
        nbytes, skip, take = node.get("bytes").read_int(1), node.get("skip").read_int(0), node.get("take").read_int(1)
        try:
            unit = parse_unit(file.view(begin_byte, nbytes))
            if max(skip, take) > MAX_TOKENS or skip + take > unit.ids.size:
                raise DamagedUnitError(f"has {unit.ids.size:,} tokens: {skip + take:,} are asked for")
            check_unit_matches(unit, namespace, unit.ids, 0, MAX_TOKENS)
            if unit.start + skip != tokens:
                raise DamagedUnitError(
                    f"holds tokens from {unit.start + skip:,} on: those from {tokens:,} on are missing"
                )
        except DamagedUnitError as error:
            raise SourceError(f"{file.label}: unit {unit_index} {error}") from None
        slices.append(LoadedSlice(unit, skip, take))
        begin_byte += nbytes
        tokens += take
    tables_by_name: dict[str, bytes] = {}
    for node in root.get("tables").read_list(max_len=_MAX_TABLES) if "tables" in root.value else ():
        nbytes = node.get("bytes").read_int(1)
        if nbytes > MAX_TABLE_SETS_BYTES:
            raise node.get("bytes").error(f"at most {MAX_TABLE_SETS_BYTES}")
        name = f"{namespace.key.hex()}-{node.get('key').read_str()}"
        tables_by_name[name] = file.view(begin_byte, nbytes).tobytes()
        begin_byte += nbytes
    if begin_byte != file.size:
        raise SourceError(f"{file.label}: has {file.size - begin_byte:,} bytes after its units")
    return namespace, slices, tables_by_name


class _ExportedBytes(NamedTuple):
    """The bytes of a file, mapped or unsealed."""

    label: str
    data: Bytes

    @property
    def size(self) -> int:
        return int(self.data.size)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Return `nbytes` bytes from `offset`."""
        if offset + nbytes > self.size:
            raise SourceError(
                f"{self.label}: needs {nbytes} bytes at offset {offset}, but the file has {self.size} bytes"
            )
        return self.data[offset : offset + nbytes]

    def read_head(self, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes, or all if there are fewer."""
        return self.data[:nbytes].tobytes()


def _open_exported(path: str | os.PathLike[str], cipher: StoreCipher) -> MappedFile | _ExportedBytes:
    file = MappedFile(Path(path))
    magic = file.read_head(len(EXPORT_MAGIC))
    if magic != SEALED_MAGIC:
        if cipher.key_check and magic in (EXPORT_MAGIC, _EXPORT_MAGIC_V1):
            raise OptionError(f"{file.label}: is not encrypted, and there is a key ({cipher.key_source})")
        return file
    if not cipher.key_check:
        raise OptionError(
            f"{file.label}: is encrypted: the key of its store is needed (--key-file FILE, or {KEY_VARIABLE})"
        )
    try:
        return _ExportedBytes(file.label, cipher.unseal_array(file.view(0, file.size), _EXPORT_NAME))
    except UnsealError as error:
        raise SourceError(f"{file.label}: {error}: it is damaged, or of a store with another key") from None


def _read_document(file: MappedFile | _ExportedBytes) -> tuple[bytes, int]:
    """Return the document, and the position after it."""
    checksum_begin = len(EXPORT_MAGIC) + _SIZE_STRUCT.size
    head_bytes = checksum_begin + _CHECKSUM_STRUCT.size
    head = file.read_head(head_bytes)
    has_checksum = head.startswith(EXPORT_MAGIC)
    begin_byte = head_bytes if has_checksum else checksum_begin
    if not head.startswith((EXPORT_MAGIC, _EXPORT_MAGIC_V1)) or len(head) < head_bytes:
        raise SourceError(f"{file.label}: is no exported prefix: it does not begin with {EXPORT_MAGIC.decode()}")
    (size,) = _SIZE_STRUCT.unpack_from(head, len(EXPORT_MAGIC))
    if size > _MAX_DOCUMENT_BYTES or begin_byte + size > file.size:
        raise SourceError(f"{file.label}: its document would have {size:,} bytes, the file has {file.size:,}")
    document = file.view(begin_byte, size).tobytes()
    if has_checksum and _CHECKSUM_STRUCT.unpack_from(head, checksum_begin) != (integrity_checksum(document),):
        raise SourceError(f"{file.label}: its document does not match its checksum")
    return document, begin_byte + size
