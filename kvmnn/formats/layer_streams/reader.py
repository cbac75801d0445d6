"""Decode folders of layer streams: as a source of arrays, as files, and to verify and describe them."""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.parallel import Progress
from ..._util.text import LOSSY, compute_ratio, escape_control, format_rate, pluralize
from ...arrays.array import Chunk, LazyArray, rechunk
from ...arrays.completeness import Completeness, format_missing
from ...arrays.layer_cache import LayerCache
from ...arrays.layers import collect_layers
from ...arrays.source import LOSSY_KEY, Source, is_rounded_by_codec, join_losses, list_losses
from ...errors import FrameError, KvmnnError, LimitError, ManifestError, MissingFileError, SourceError
from ...files.atomic import is_device, refuse_two_encodings
from ...files.mapped_file import FileHead, MappedFile
from ...files.schema import Record, json_key
from ...linear.header import read_header as read_linear_header
from ...profiles import Profile
from ...transform.header import read_header
from ..base import PathFormat
from ..options import ReadOptions
from ..restorer import RestoreResult
from ..sidecars import collect_folder_sidecars
from ..writer import build_output_metadata, iter_source_chunks, list_lost_information, list_stale_files, write_arrays
from .codecs import decode_cache, explain_unused_profile
from .document import (
    LAYERS_NAME,
    LayerStreamArray,
    LayerStreamEntry,
    LayerStreamsDocument,
    find_profile,
    read_layers_document,
)
from .writer import (
    compare_errors,
    compare_words,
    describe_absent_layers,
    describe_document,
    describe_document_scope,
    describe_layer,
    describe_losses,
    describe_unstored_bytes,
    order_elements,
)


class LayerStreams:
    """A folder of layer streams.

    Parameters
    ----------
    folder
        The folder, or its ``layers.json``.
    profile
        The profile's file; None looks for it near the folder, and does without where no stream needs it.

    Raises
    ------
    SourceError, ManifestError
        Where ``layers.json`` or the profile is not there, or damaged; for a folder that has frames, too.
    """

    def __init__(self, folder: str, profile: str | os.PathLike[str] | None = None) -> None:
        self.folder = _find_folder(folder)
        self.document: LayerStreamsDocument = read_layers_document(self.folder)
        _check_predicted_kl(self.folder, self.document)
        self.unused_reason: str | None = _find_unused_reason(self.folder, self.document)
        needs_profile = profile is not None or self.unused_reason is None
        self.profile: Profile | None = find_profile(self.folder, self.document, profile) if needs_profile else None

    def iter_layers(self) -> Iterator[tuple[LayerStreamEntry, LayerCache]]:
        """Yield each layer with its entry, from layer 0 up; all that the entry says is checked."""
        layers = decode_cache(self._iter_streams(), self.profile, self.document.codec)
        for entry in self.document.layers:
            try:
                cache = next(layers)
            except FrameError as error:
                raise FrameError(f"{self.folder}: {entry.file}: {error}") from None
            self._check_layer(entry, cache)
            yield entry, cache

    def _iter_streams(self) -> Iterator[Any]:
        for entry in self.document.layers:
            path = Path(self.folder, entry.file)
            if not path.is_file():
                raise MissingFileError(f"{path}: does not exist ({LAYERS_NAME} names it)")
            file = MappedFile(path)
            if file.size != entry.nbytes:
                raise ManifestError(f"{path}: has {file.size:,} bytes, {LAYERS_NAME} says {entry.nbytes:,}")
            stream = file.view(0, file.size)
            if hashlib.sha256(stream.data).hexdigest() != entry.sha256:
                raise ManifestError(f"{path}: does not match the sha256 of {LAYERS_NAME}")
            yield stream

    def _check_layer(self, entry: LayerStreamEntry, cache: LayerCache) -> None:
        for array, elements in zip(entry.arrays, (cache.keys, cache.values), strict=True):
            shape = (
                elements.shape if not array.token_major else (elements.shape[1], elements.shape[0], elements.shape[2])
            )
            if (cache.layer, shape, cache.dtype) != (entry.layer, array.shape, array.dtype):
                raise ManifestError(
                    f"{self.folder}: {entry.file}: holds {cache.dtype} {list(shape)} of layer {cache.layer}, "
                    f"{LAYERS_NAME} says {array.dtype} {list(array.shape)} of layer {entry.layer}"
                )
            if hashlib.sha256(order_elements(array, elements)).hexdigest() != array.sha256:
                raise ManifestError(
                    f"{self.folder}: {entry.file}: array {array.name!r} does not match the sha256 of {LAYERS_NAME}"
                )


def _find_folder(path: str) -> str:
    """Return the folder of layer streams that a path names; `SourceError` for one that has frames, too."""
    if os.path.basename(path) == LAYERS_NAME:
        return os.path.dirname(path)
    refuse_two_encodings(path)
    return path


def _find_unused_reason(folder: str, document: LayerStreamsDocument) -> str | None:
    """Return why no stream of a folder needs the profile; None if one does, or cannot be read."""
    if document.codec != "profile" or document.profile_bytes is not None:
        return None
    headers = []
    for entry in document.layers:
        try:
            file = MappedFile(Path(folder, entry.file))
            headers.append(read_linear_header(file.view(0, file.size)))
        except KvmnnError:
            return None
    return explain_unused_profile(headers)


def _check_predicted_kl(folder: str, document: LayerStreamsDocument) -> None:
    """Raise `ManifestError` if the loss in ``layers.json`` is not that of the streams, where all of them have one.

    Streams that are missing or damaged are left to what decodes them.
    """
    # no loss in all is known then
    is_unknown = is_rounded_by_codec(document.metadata) or document.bits_factor is not None
    if not document.is_lossy or (document.predicted_kl is None and is_unknown):
        return
    if document.is_exact and document.predicted_kl == 0:
        return
    losses = []
    for entry in document.layers:
        try:
            file = MappedFile(Path(folder, entry.file))
            losses.append(read_header(file.view(0, file.size).data)[0].kl)
        except KvmnnError:
            return
    total, predicted = math.fsum(losses), document.predicted_kl
    if not math.isnan(total) and (predicted is None or not math.isclose(total, predicted, rel_tol=_MAX_KL_DIFFERENCE)):
        raise ManifestError(
            f"{Path(folder, LAYERS_NAME)}: predicted_kl is {predicted}: expected {total:.6g}, the sum of the losses in "
            "the headers of the streams"
        )


_MAX_KL_DIFFERENCE = 1e-4
"""Relative: headers hold binary32."""


class _DecodedLayers:
    """Decodes layers in order when arrays are read; those before the last one that was read are dropped."""

    def __init__(self, streams: LayerStreams) -> None:
        self._streams = streams
        self._lock = threading.Lock()
        self._layers: Iterator[tuple[LayerStreamEntry, LayerCache]] | None = None
        self._last: tuple[int, LayerCache] | None = None

    def get(self, layer: int) -> LayerCache:
        """Return a layer; reading them in order decodes each once."""
        with self._lock:
            if self._last is None or self._last[0] > layer:
                self._layers, self._last = self._streams.iter_layers(), None
            while self._last is None or self._last[0] < layer:
                assert self._layers is not None
                entry, cache = next(self._layers)
                self._last = entry.layer, cache
            return self._last[1]


def read(path: str, options: ReadOptions) -> Source:
    """Read a folder of layer streams as a source; arrays are decoded when they are read.

    Raises
    ------
    SourceError, ManifestError
        As `LayerStreams`.
    LimitError
        Above `options.max_bytes`.
    """
    return make_source(LayerStreams(path, options.profile), options)


def make_source(streams: LayerStreams, options: ReadOptions) -> Source:
    """Return the arrays of layer streams, decoded when they are read."""
    document = streams.document
    if options.max_bytes is not None and document.raw_bytes > options.max_bytes:
        raise LimitError(f"{streams.folder}: holds {document.raw_bytes:,} bytes: max_bytes is {options.max_bytes:,}")
    layers = _DecodedLayers(streams)
    arrays = [
        LazyArray(
            name=array.name,
            dtype=array.dtype,
            shape=array.shape,
            array_dtype=array.array_dtype,
            order="C",
            reader=partial(_iter_chunks, layers, entry.layer, array),
        )
        for entry in document.layers
        for array in entry.arrays
        if not options.tensors or array.name in options.tensors
    ]
    missing = set(options.tensors) - {array.name for array in arrays}
    if missing:
        raise SourceError(f"{streams.folder}: has no array {min(missing)!r}")
    names = [LAYERS_NAME, *(entry.file for entry in document.layers)]
    names += [] if document.profile_bytes is None else [document.profile_file]
    files = [str(Path(streams.folder, name)) for name in names]
    source = Source(arrays, dict(document.metadata), inputs=(streams.folder,), opened_files=tuple(files))
    source.lossy = document.is_dequantized
    source.token_major = any(array.token_major for entry in document.layers for array in entry.arrays)
    if document.is_lossy and not (document.is_exact and LOSSY_KEY in source.metadata):  # or what was lost before
        loss = describe_document(document)[-1].removeprefix(f"{LOSSY}: ")
        source.metadata[LOSSY_KEY] = join_losses(document.metadata.get(LOSSY_KEY, ""), loss)
    return source


def _iter_chunks(layers: _DecodedLayers, layer: int, array: LayerStreamArray, chunk_bytes: int) -> Iterator[Chunk]:
    cache = layers.get(layer)
    elements = cache.keys if array.part == "key" else cache.values
    words = np.frombuffer(order_elements(array, elements), np.uint8)
    yield from rechunk(iter([words]), chunk_bytes, words.size)


def _has_layers_document(head: FileHead) -> bool:
    if head.kind == "folder":
        return os.path.isfile(os.path.join(head.path, LAYERS_NAME))
    return os.path.basename(head.path) == LAYERS_NAME


LAYER_STREAMS = PathFormat(name="layer streams", kinds=("folder", "file"), check=_has_layers_document, read_path=read)


class RestoreLayersResult(RestoreResult):
    """Arrays that were decoded from layer streams."""

    @property
    @json_key(after="output")
    def label(self) -> str | None:
        """Return ``LOSSLESS``, ``LOSSY`` for streams that are, or ``LOSSLESS copy of LOSSY K and V``."""
        return LOSSY if self.unknown_properties else super().label

    def __str__(self) -> str:
        return super().__str__().replace("sha256 of the manifest", f"sha256 of {LAYERS_NAME}")


def restore_layers(
    path: str,
    output: str,
    options: ReadOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoreResult:
    """Decode layer streams and write the arrays, all or those that `options` name; hashes are compared.

    Raises
    ------
    KvmnnError
        For streams that are damaged, a profile that is not there, and an output that cannot be written.
    """
    start = time.perf_counter()
    options = options or ReadOptions()
    streams = LayerStreams(path, options.profile)
    source = make_source(streams, options)
    hashes = {array.name: array.sha256 for entry in streams.document.layers for array in entry.arrays}
    files = write_arrays(
        output,
        source.arrays,
        iter_source_chunks(source, progress),
        build_output_metadata(source, output),
        hashes=None if is_device(output) else [hashes[name] for name in source],
        force=force,
        exclude=source.files,
        threads=options.threads,
    )
    losses = tuple(describe_losses(streams.document))
    return RestoreLayersResult(
        input=streams.folder,
        output=output,
        arrays=tuple(source.arrays),
        is_verified=True,
        is_read_back=not is_device(output),
        files=tuple(files),
        stored_bytes=streams.document.stored_bytes,
        seconds=time.perf_counter() - start,
        sidecars=tuple(collect_folder_sidecars(source.metadata, streams.folder)) if files else (),
        losses=losses,
        unknown_properties=describe_document(streams.document)[-1]
        if streams.document.is_lossy or streams.document.is_dequantized
        else "",
        notes=(
            *losses,
            *format_missing(streams.document.completeness),
            *list_lost_information(source, output),
            *list_stale_files(output, files, source.metadata),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class LayerStreamsInfo(Record):
    """Contents of a folder of layer streams, and the result of its verification if there was one."""

    input: str
    document: LayerStreamsDocument = field(metadata={"inline": True})
    #: ``"sha256"``: all streams were decoded and compared with the hashes of ``layers.json``; ``"bytes"``: with the
    #: original; None: nothing was decoded.
    proof: str | None = None
    #: The first difference from the original.
    difference: str | None = None
    #: What was compared with the original: ``"every byte"``, or of packed files ``"every live element"``.
    compared: str = field(default="every byte", metadata={"json": False})
    seconds: float = 0.0
    #: Bytes of ``layers.json``, not counted in `document`.
    document_bytes: int
    #: Bytes of the profile of a model that decoding needs, not counted; None for one in the folder, or not there, and
    #: if it needs none.
    model_profile_bytes: int | None
    #: Why it needs none; None if it does.
    unused_reason: str | None = field(default=None, metadata={"json": False})
    #: Files of `document` that are not there, or have another size: what was not decoded is described without them.
    missing: tuple[str, ...] = field(default=(), metadata={"omit": True})
    notes: tuple[str, ...] = field(default=(), metadata={"omit": True})

    @property
    def is_loadable(self) -> bool:
        """Return whether all files are there."""
        return not self.missing

    @property
    def ok(self) -> bool:
        """Return whether there is no difference."""
        return self.difference is None

    @property
    @json_key(omit=True)
    def completeness(self) -> Completeness | None:
        """Return how much of the model's state the streams contain; None where nothing records it."""
        return self.document.completeness

    @property
    @json_key(after="input")
    def label(self) -> str | None:
        """Return ``LOSSY``; ``LOSSLESS``, or ``LOSSLESS copy of LOSSY K and V``, if proved; ``DIFFERS``; or None."""
        if self.difference is not None:
            return "DIFFERS"
        return self.document.get_label(is_proved=self.proof is not None)

    @property
    @json_key(after="label")
    def tokens(self) -> int:
        """Return the largest number of tokens of a layer."""
        return self.document.tokens

    @property
    @json_key(after="tokens")
    def raw_bytes(self) -> int:
        """Return the bytes of K and V of the layers whose streams are there."""
        return sum(entry.raw_bytes for entry in self._present_layers)

    @property
    @json_key(after="raw_bytes")
    def stored_bytes(self) -> int:
        """Return the bytes of the streams that are there, and of a profile of this cache alone."""
        profile_bytes = 0 if self.document.profile_file in self.missing else self.document.profile_bytes or 0
        return sum(entry.nbytes for entry in self._present_layers) + profile_bytes

    @property
    @json_key(after="stored_bytes")
    def ratio(self) -> float:
        """Return `raw_bytes` over `stored_bytes`."""
        return compute_ratio(self.raw_bytes, self.stored_bytes)

    @property
    def _present_layers(self) -> list[LayerStreamEntry]:
        return [entry for entry in self.document.layers if entry.file not in self.missing]

    def __str__(self) -> str:
        document = self.document
        if self.difference is not None:
            return f"{self.input}: DIFFERS: {self.difference}"
        scope = describe_document_scope(document)
        proof = {
            None: "",
            "sha256": f", {self.label}{scope} (decoded, sha256 of {LAYERS_NAME})",
            "bytes": f", {self.label}{scope} ({self.compared} compared with the original)",
        }[self.proof]
        if document.is_lossy and self.proof is not None:
            claim = f"decodes to what {LAYERS_NAME} says, bit by bit"
            if self.proof != "sha256":
                claim = (
                    f"decodes to what {LAYERS_NAME} says; largest and relative errors of each layer are those it says"
                )
            proof = f", {LOSSY}{scope} ({claim})"
        codec = ", ".join(
            [document.codec, *(f"{name}={_format_value(value)}" for name, value in document.options.items())]
        )
        count_text = f"{len(self._present_layers):,} of " if self.missing else ""
        lines = [
            f"{self.input}: {count_text}{pluralize(len(document.layers), 'layer stream')} ({escape_control(codec)}), "
            f"{pluralize(self.tokens, 'token')}, {self.raw_bytes:,} -> {self.stored_bytes:,} bytes, "
            f"ratio {self.ratio:.4f}{proof}{format_rate(self.raw_bytes, self.seconds) if self.proof else ''}"
        ]
        if self.missing:
            names = ", ".join(self.missing[:_MAX_NAMED_FILES])
            more = f" and {len(self.missing) - _MAX_NAMED_FILES:,} more" if len(self.missing) > _MAX_NAMED_FILES else ""
            lines.append(f"  INCOMPLETE: {names}{more}: missing, or of another size than {LAYERS_NAME} says")
        contents = describe_document(
            document,
            document_bytes=self.document_bytes,
            model_profile_bytes=self.model_profile_bytes,
            unused_reason=self.unused_reason,
        )
        lines += [f"  {line}" for line in dict.fromkeys([*contents, *self.notes])]
        return "\n".join(lines)

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; with `verbose` also a line for each layer."""
        lines = [describe_layer(entry) for entry in self.document.layers] if verbose else []
        return "\n".join([*lines, str(self)])


_MAX_NAMED_FILES = 5


def _format_value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.is_file() and path.stat().st_size == size
    except OSError:
        return False


def _count_document_bytes(folder: str) -> int:
    return Path(folder, LAYERS_NAME).stat().st_size


def _count_model_profile_bytes(document: LayerStreamsDocument, profile: Profile | None) -> int | None:
    return profile.nbytes if profile is not None and document.profile_bytes is None else None


def inspect_layers(path: str) -> LayerStreamsInfo:
    """Describe a folder of layer streams; its profile says which layers are absent, and need not be there."""
    folder = _find_folder(path)
    document = read_layers_document(folder)
    _check_predicted_kl(folder, document)
    sizes = {entry.file: entry.nbytes for entry in document.layers}
    if document.profile_bytes is not None:
        sizes[document.profile_file] = document.profile_bytes
    missing = tuple(name for name, size in sizes.items() if not _has_size(Path(folder, name), size))
    unused_reason = _find_unused_reason(folder, document)
    try:
        model = find_profile(folder, document) if unused_reason is None else None
    except KvmnnError:
        model = None
    return LayerStreamsInfo(
        input=path,
        document=document,
        document_bytes=_count_document_bytes(folder),
        model_profile_bytes=_count_model_profile_bytes(document, model),
        unused_reason=unused_reason,
        missing=missing,
        notes=(*list_losses(document.metadata), *(() if model is None else describe_absent_layers(model, document))),
    )


def verify_layers(
    path: str,
    against: Source | None = None,
    *,
    profile: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> LayerStreamsInfo:
    """Decode all layer streams of a folder, and compare them with their hashes, or with the original.

    Parameters
    ----------
    against
        The original, whose words lossless streams must give; lossy ones must differ from it by the errors that
        ``layers.json`` has. None compares hashes.
    profile
        As for `LayerStreams`.

    Raises
    ------
    KvmnnError
        For streams that are damaged or do not match ``layers.json``; for an original of other arrays.
    """
    start = time.perf_counter()
    streams = LayerStreams(path, profile)
    differences: list[str] = []
    for entry, cache in streams.iter_layers():
        if against is not None:
            problem = compare_errors(entry, cache, against) if entry.errors else compare_words(entry, cache, against)
            differences += [] if problem is None else [problem]
        if progress is not None:
            progress(entry.raw_bytes)
    if against is not None and not differences:
        stored_layers = {entry.layer for entry in streams.document.layers}
        other_layers = sorted({entry.layer for entry in collect_layers(against)} - stored_layers)
        if other_layers:
            differences.append(f"layer {other_layers[0]} is in the original only, as {len(other_layers):,} in all are")
    losses = list_losses(streams.document.metadata)
    return LayerStreamsInfo(
        input=path,
        document=streams.document,
        proof="sha256" if against is None else "bytes",
        difference=next(iter(differences), None),
        compared="every byte" if against is None or against.cache is None else "every live element",
        seconds=time.perf_counter() - start,
        document_bytes=_count_document_bytes(streams.folder),
        model_profile_bytes=_count_model_profile_bytes(streams.document, streams.profile),
        unused_reason=streams.unused_reason,
        notes=(
            *losses,
            *(() if against is None else describe_unstored_bytes(against)),
            *(() if streams.profile is None else describe_absent_layers(streams.profile, streams.document)),
        ),
    )
