"""Encode K and V of all layers of a source into a folder of layer streams."""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ... import dtypes
from ..._util.dataclass import dataclass
from ..._util.parallel import Progress
from ..._util.text import LOSSY, format_layers, format_rate, pluralize
from ...arrays.completeness import Completeness, describe_scope, format_missing
from ...arrays.engine_metadata import dump_metadata
from ...arrays.layer_cache import LayerCache
from ...arrays.layers import LayerArray, collect_layers, format_array_name, format_input_prefix
from ...arrays.source import (
    COMPLETENESS_KEY,
    DEQUANTIZED_KEY,
    LOSSY_KEY,
    ROUNDED_TEXT,
    WHOLE_FILE_KEYS,
    Source,
    check_source,
    is_rounded_by_codec,
    list_losses,
)
from ...dtypes import Elements
from ...errors import KvmnnError, OptionError, OutputError
from ...files.atomic import DirectoryOutput, StagedFile, refuse_input_folder, wrap_os_errors
from ...files.file_names import LAYER_STREAM_SUFFIXES
from ...files.schema import Record, json_key
from ...profiles import Profile, describe_few_tokens
from ...profiles.statistics import NUM_SINKS
from ...transform import MAX_KL, TransformOptions
from ...transform.steps import is_size_missed
from ..sidecars import read_positions_by_layer
from .codecs import CacheEncoder, LayerStreamOptions, decode_cache
from .document import (
    ADAPTED_NAME,
    LAYERS_NAME,
    LayerErrors,
    LayerStreamArray,
    LayerStreamEntry,
    LayerStreamsDocument,
    parse_layers_document,
)

_MAX_ERROR_DIFFERENCE = 1e-6
"""Of errors that are measured again."""
_MAX_EXACT_SHARE = 0.1
"""Of the bytes that were asked for: exact tokens that take more come on top of them (`plan_steps`)."""
_MAX_USEFUL_KL = 0.1
"""Nats a token: 4-bit formats lose 0.002 to 0.03, evicting half of a cache 0.01."""


@dataclass(frozen=True, kw_only=True)
class MeasureLayersResult(Record):
    """Sizes and losses of a cache as layer streams."""

    json_keys = (
        "label codec raw_bytes stored_bytes model_profile_bytes ratio predicted_kl tokens seconds profile options "
        "notes completeness layers"
    )

    document: LayerStreamsDocument = field(metadata={"json": False})
    #: Whether every stream was decoded, and compared where it is lossless.
    is_verified: bool = field(metadata={"json": False})
    seconds: float
    #: Bytes of the profile of a model that decoding needs, not counted in `stored_bytes`; None for tables learned in
    #: this cache alone, and if it needs none.
    model_profile_bytes: int | None
    #: Why it needs none; None if it does.
    unused_reason: str | None = field(default=None, metadata={"json": False})
    #: Whether the source is packed files, of which live elements alone are stored and compared.
    is_packed: bool = field(default=False, metadata={"json": False})
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str | None:
        """Return ``LOSSY``, ``LOSSLESS`` or ``LOSSLESS copy of LOSSY K and V`` if that was verified, else None."""
        return self.document.get_label(is_proved=self.is_verified)

    @property
    def codec(self) -> str:
        """Return ``"profile"`` or ``"transform"``."""
        return self.document.codec

    @property
    def raw_bytes(self) -> int:
        """Return the bytes of K and V."""
        return self.document.raw_bytes

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of the streams, and of a profile that was learned in this cache alone."""
        return self.document.stored_bytes

    @property
    def ratio(self) -> float:
        """Return raw bytes over stored bytes; a profile that belongs to a model is not counted."""
        return self.document.ratio

    @property
    def predicted_kl(self) -> float | None:
        """Return the KL divergence in nats a token that the encoder expects; None if unknown."""
        return self.document.predicted_kl

    @property
    def tokens(self) -> int:
        """Return the tokens of a layer."""
        return self.document.tokens

    @property
    def profile(self) -> str:
        """Return the key of the profile."""
        return self.document.profile_key

    @property
    def options(self) -> dict[str, Any]:
        """Return the settings of the codec that are not its defaults."""
        return self.document.options

    @property
    @json_key(omit=True)
    def completeness(self) -> Completeness | None:
        """Return how much of the model's state the streams contain; None where nothing records it."""
        return self.document.completeness

    @property
    @json_key("layers")
    def layers(self) -> tuple[LayerStreamEntry, ...]:
        """Return the stream of each layer."""
        return self.document.layers

    def __str__(self) -> str:
        lines = [describe_layer(entry) for entry in self.layers]
        proof = "all streams decoded, errors measured" if self.document.is_lossy else "all streams decoded and compared"
        proof = f"live elements, {proof}" if self.is_packed else proof
        lines += [
            f"total: {self.raw_bytes:,} -> {self.stored_bytes:,} bytes, ratio {self.ratio:.4f}, "
            f"{self.label}{describe_document_scope(self.document)} ({proof})",
            *describe_document(
                self.document, model_profile_bytes=self.model_profile_bytes, unused_reason=self.unused_reason
            ),
            *self.notes,
        ]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class EncodeLayersResult(MeasureLayersResult):
    """A cache that became layer streams."""

    json_keys = (
        "output label codec raw_bytes stored_bytes profile_bytes document_bytes model_profile_bytes ratio predicted_kl "
        "tokens seconds profile notes completeness layers"
    )

    output: str
    #: Bytes of ``layers.json``, not counted in `stored_bytes`.
    document_bytes: int

    @property
    def profile_bytes(self) -> int | None:
        """Return the bytes of `stored_bytes` that are tables learned in this cache; None for a profile of a model."""
        return self.document.profile_bytes

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """Return the result as a line; with `verbose` one more for each layer."""
        lines = [describe_layer(entry) for entry in self.layers] if verbose else []
        proof = "not verified"
        if self.is_verified:
            proof = "decoded, with the errors in layers.json" if self.document.is_lossy else "decoded and compared"
        proof = f"live elements, {proof}" if self.is_packed else proof
        scope = describe_document_scope(self.document)
        lines.append(
            f"{self.output}: {self.raw_bytes:,} -> {self.stored_bytes:,} bytes, ratio {self.ratio:.4f}, "
            f"{pluralize(len(self.layers), 'layer stream')}, "
            f"{f'{self.label}{scope} ({proof})' if self.label else proof}{format_rate(self.raw_bytes, self.seconds)}"
        )
        contents = describe_document(
            self.document,
            document_bytes=self.document_bytes,
            model_profile_bytes=self.model_profile_bytes,
            unused_reason=self.unused_reason,
        )
        lines += [f"  {line}" for line in dict.fromkeys([*contents, *self.notes])]
        return "\n".join(lines)


def describe_document_scope(document: LayerStreamsDocument) -> str:
    """Return the words after LOSSLESS where the streams contain a part of the model's state, else none."""
    return describe_scope(2 * len(document.layers)) if format_missing(document.completeness) else ""


def describe_layer(entry: LayerStreamEntry) -> str:
    """Describe the stream of a layer on a line."""
    text = (
        f"layer {entry.layer}: {entry.raw_bytes:,} -> {entry.nbytes:,} bytes, "
        f"ratio {entry.raw_bytes / entry.nbytes:.4f}"
    )
    if entry.errors is None:
        return text
    errors = entry.errors
    return (
        f"{text}, largest error {errors.max_key_error:.3g} (K), {errors.max_value_error:.3g} (V), relative "
        f"{errors.relative_key_error:.2%}, {errors.relative_value_error:.2%}"
    )


def describe_document(
    document: LayerStreamsDocument,
    *,
    document_bytes: int | None = None,
    model_profile_bytes: int | None = None,
    unused_reason: str | None = None,
) -> list[str]:
    """Describe what a reader should know: the profile, what the ratio leaves out, and what lossy streams cost."""
    if document.profile_bytes is None and unused_reason is not None:
        line = f"no layer was predicted ({unused_reason}): decoding needs no profile, and --codec dense is as small"
    elif document.profile_bytes is None:
        size_text = "" if model_profile_bytes is None else f", {model_profile_bytes:,} bytes, not counted"
        line = f"decoding needs the profile {document.profile_key[:16]} ({Path(document.profile_file).name}){size_text}"
    else:
        line = (
            f"tables learned in this cache: {document.profile_file}, {document.profile_bytes:,} of the "
            f"{document.stored_bytes:,} bytes"
        )
    if document_bytes is not None:
        line += f"; {LAYERS_NAME}: {document_bytes:,} bytes, not counted"
    return [line, *format_missing(document.completeness), *describe_losses(document)]


def describe_absent_layers(profile: Profile, document: LayerStreamsDocument) -> tuple[str, ...]:
    """Describe the layers that a profile has and the streams have not; empty if they have all."""
    num_absent = len(profile.info.layers) - len(document.layers)
    if num_absent <= 0:
        return ()
    verb = "is" if num_absent == 1 else "are"
    return (
        f"K and V of {pluralize(len(document.layers), 'layer')}: {num_absent} that the profile has {verb} not in the "
        "input, and in no figure here",
    )


def describe_losses(document: LayerStreamsDocument) -> list[str]:
    """Describe what K and V have lost, before and then in streams that are lossy, in this order."""
    lines = [f"{LOSSY}: words dequantised from int8"] if document.is_dequantized else []
    lines += list_losses(document.metadata)
    if document.is_lossy:
        cost = "not known: the profile has no sensitivities"
        first = document.options.get("first", NUM_SINKS)
        if isinstance(first, int) and first < NUM_SINKS:
            cost = f"not known: profiles measure no loss of the first {NUM_SINKS} tokens, and first={first} rounds some"
        if document.bits_factor is not None:
            cost = f"not known: they take {document.bits_factor:.1f} times the bits that the profile predicts"
        if is_rounded_by_codec(document.metadata):
            cost = "not known: they were rounded before"
        if document.predicted_kl is not None:
            cost = f"{_format_kl(document.predicted_kl)} nats a token expected of texts like the profile's"
        lines.append(
            f"{LOSSY}: of a codec that rounds K and V, but here every error is 0"
            if document.is_exact
            else f"{LOSSY}: {ROUNDED_TEXT}; KL divergence of the predictions: {cost}"
        )
    return lines


def _format_kl(kl: float) -> str:
    return f"{kl:.2g}" if kl < 10 else f"{kl:.0f}"


def describe_unstored_bytes(source: Source) -> tuple[str, ...]:
    """Describe the bytes of packed files that layer streams do not store; empty for other inputs."""
    cache = source.cache
    num_bytes = 0 if cache is None else cache.file_bytes - cache.state_bytes - cache.live_bytes
    if num_bytes <= 0:
        return ()
    return (
        f"of the packed files {num_bytes:,} bytes of padding, free room and rows that are not live are neither stored "
        "nor compared (frames store them)",
    )


def encode_layers(
    source: Source,
    output: str | os.PathLike[str],
    options: LayerStreamOptions,
    *,
    adapted: Profile | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> EncodeLayersResult:
    """Encode K and V of every layer of a source with a model's profile, into a folder.

    Parameters
    ----------
    source
        A cache: `kvmnn.open`. All its arrays are K or V of layers.
    output
        A folder.
    options
        Codec, profile, settings.
    adapted
        A profile of this cache alone, in place of the one that `options` name: it is written into the folder as
        ``adapted.kvmp``, and its bytes count.
    force
        Replace files that exist.
    progress
        Called with raw bytes.

    Raises
    ------
    OptionError
        For arrays that are not K or V of layers, and settings that the profile has no tables for.
    SourceError
        For a profile that cannot be read.
    KvmnnError
        For layers that the profile does not have, and a stream that does not decode to its input.
    OutputError
        For an output that exists or cannot be written.
    """
    check_source(source, "kvmnn.bundle.encode")
    refuse_input_folder(output, source.inputs)
    start = time.perf_counter()
    profile = Profile.read(options.profile) if adapted is None else adapted
    reader, encoder = LayerReader(source), CacheEncoder(profile, options)
    paths = [options.profile if adapted is None else None, options.attention]
    inputs = [*source.files, *(path for path in paths if path is not None)]
    with DirectoryOutput(output, force=force, exclude=inputs, index=LAYERS_NAME) as directory:
        if adapted is not None:
            directory.open_file(ADAPTED_NAME).write(adapted.to_bytes())
        entries, encoder = _encode_to_size(reader, encoder, profile, options, directory, progress)
        document = LayerStreamsDocument(
            codec=options.codec,
            profile_key=profile.key.hex(),
            profile_file=os.path.relpath(options.profile, output) if adapted is None else ADAPTED_NAME,
            options=options.document,
            predicted_kl=None if is_rounded_by_codec(source.metadata) else encoder.predicted_kl,
            metadata={key: text for key, text in dump_metadata(source).items() if key not in _DROPPED_KEYS}
            | _record_int8(source),
            layers=tuple(entries),
            profile_bytes=None if adapted is None else adapted.nbytes,
            bits_factor=encoder.bits_factor if encoder.has_sensitivities else None,
        )
        text = document.to_json()
        if parse_layers_document(text, LAYERS_NAME) != document:
            raise OutputError(f"{os.fspath(output)}: {LAYERS_NAME} does not read back as it was written")
        directory.open_file(LAYERS_NAME).write(text)
        directory.commit()
    return EncodeLayersResult(
        output=os.fspath(output),
        document=document,
        document_bytes=len(text),
        model_profile_bytes=profile.nbytes if adapted is None and encoder.unused_reason is None else None,
        unused_reason=encoder.unused_reason,
        is_verified=options.verify,
        seconds=time.perf_counter() - start,
        is_packed=source.cache is not None,
        notes=(
            *list_losses(document.metadata),
            *describe_unstored_bytes(source),
            *_list_notes(profile, reader, document, encoder.bits_factor),
        ),
    )


def measure_layers(
    source: Source, options: LayerStreamOptions, *, progress: Progress | None = None
) -> MeasureLayersResult:
    """Encode K and V of every layer of a source with a model's profile, decode and compare them, and store nothing.

    Parameters and errors are those of `encode_layers`; every stream is decoded, whatever `options.verify` says.
    """
    start = time.perf_counter()
    options = replace(options, verify=True)
    profile = Profile.read(options.profile)
    reader, encoder = LayerReader(source), CacheEncoder(profile, options)
    entries, encoder = _encode_to_size(reader, encoder, profile, options, None, progress)
    document = LayerStreamsDocument(
        codec=options.codec,
        profile_key=profile.key.hex(),
        profile_file=os.path.basename(options.profile),
        options=options.document,
        predicted_kl=None if is_rounded_by_codec(source.metadata) else encoder.predicted_kl,
        metadata=_record_int8(source)
        | {key: text for key, text in dump_metadata(source).items() if key in (COMPLETENESS_KEY, LOSSY_KEY)},
        layers=tuple(entries),
        bits_factor=encoder.bits_factor if encoder.has_sensitivities else None,
    )
    return MeasureLayersResult(
        document=document,
        model_profile_bytes=profile.nbytes if encoder.unused_reason is None else None,
        unused_reason=encoder.unused_reason,
        is_verified=True,
        seconds=time.perf_counter() - start,
        is_packed=source.cache is not None,
        notes=_list_notes(profile, reader, document, encoder.bits_factor),
    )


_DROPPED_KEYS = (*WHOLE_FILE_KEYS, DEQUANTIZED_KEY)


def _record_int8(source: Source) -> dict[str, str]:
    """Return metadata of elements that stand for MNN's int8 codes; of their decoded words there is none."""
    return {DEQUANTIZED_KEY: "int8"} if source.lossy else {}


def _list_notes(
    profile: Profile, reader: LayerReader, document: LayerStreamsDocument, bits_factor: float | None
) -> tuple[str, ...]:
    """Return what a reader should know of the profile, and a ratio that was missed."""
    notes = _compare_dtypes(profile, reader)
    notes += describe_absent_layers(profile, document)
    if document.stored_bytes > document.raw_bytes:
        notes += (f"the streams take more bytes than K and V, {document.stored_bytes:,} of {document.raw_bytes:,}",)
    if not document.is_lossy:
        return notes
    notes += describe_few_tokens(profile.info)
    if bits_factor is not None:
        reason = "its texts are few, unlike this one, or of another model"
        if not reader.has_positions:
            reason += ", or the first token is not at position 0, which is assumed without positions.json"
        reason += "" if document.bits_factor is None else "; the nats that it predicts do not hold then"
        notes += (f"{bits_factor:.1f} times the bits that the profile predicts: {reason}",)
    kl = document.predicted_kl
    if kl is not None and kl > _MAX_USEFUL_KL:
        notes += (f"{_format_kl(kl)} nats a token change what the model says: measure it (kvmnn eval --quant)",)
    settings: dict[str, Any] = {key: value for key, value in document.options.items() if key != "attention"}
    options = TransformOptions(**settings)
    target = 16 / options.bits if options.bits is not None else options.ratio
    itemsize = dtypes.DTYPES[reader.dtype].itemsize
    ratio = document.ratio * 2 / itemsize  # over fp16, as the target is
    if target is None or not is_size_missed(ratio, target):
        return notes
    reason = unlike = "the profile is of other texts"
    num_exact = min(options.first + options.recent, document.tokens)
    if ratio <= target and kl is not None and kl > 0.99 * MAX_KL:
        reason = "no larger loss is possible"
    elif ratio <= target and num_exact * target * itemsize / 2 > _MAX_EXACT_SHARE * document.tokens:
        reason = f"{num_exact:,} of {document.tokens:,} tokens are exact and come on top"
        share = num_exact / document.tokens  # as large as they are, the others should have reached the target
        if is_size_missed(ratio, 1 / ((1 - share) / target + share * itemsize / 2)):
            reason += f", and {unlike}"
    if options.bits is not None:
        return (*notes, f"{options.bits:g} bits were asked for, {16 / ratio:.2f} reached: {reason}")
    base = "" if itemsize == 2 else " over words of 16 bits"
    return (*notes, f"ratio {target:g}{base} was asked for, {ratio:.2f} reached: {reason}")


def _compare_dtypes(profile: Profile, reader: LayerReader) -> tuple[str, ...]:
    """Return a note where the profile was made of another kind of elements."""
    if profile.info.dtype == reader.dtype or {profile.info.dtype, reader.dtype} <= {"fp16", "fp32", "bf16"}:
        return ()
    return (f"the profile was made of {profile.info.dtype}, these are {reader.dtype}",)


class LayerReader:
    """Reads the layers of a source one after another."""

    def __init__(self, source: Source) -> None:
        self._entries = collect_layers(source)
        prefix = format_input_prefix(source)
        names = {entry.array.name for entry in self._entries}
        unnamed = [name for name in source if name not in names]
        if unnamed and len(self._entries) != 2 * len({entry.layer for entry in self._entries}):
            raise OptionError(f"{prefix}array {unnamed[0]!r} is neither K nor V of a layer: --tensor selects others")
        layers = sorted({entry.layer for entry in self._entries})
        missing_layers = sorted(set(range(layers[-1])).difference(layers))
        if missing_layers:
            raise OptionError(
                f"{prefix}has K and V of {format_layers(layers)} without {format_layers(missing_layers)}: layer "
                "streams are decoded from layer 0 up (--codec dense has each array by itself)"
            )
        if len({entry.array.dtype for entry in self._entries}) > 1:
            raise OptionError(f"{prefix}the arrays have several types: layer streams are of one")
        self._has_own_names = len(names) == len(self._entries)
        self._positions = read_positions_by_layer(source, as_rotated=True)
        text_positions = read_positions_by_layer(source)
        #: Whether K is rotated to other positions than those in the text.
        self.is_rerotated = any(
            not np.array_equal(positions, text_positions[layer]) for layer, positions in self._positions.items()
        )
        self.has_positions = bool(self._positions)
        self.dtype = self._entries[0].array.dtype
        self.num_layers = len(self._entries) // 2

    def __iter__(self) -> Iterator[tuple[LayerCache, list[LayerStreamArray]]]:
        for key, value in zip(self._entries[::2], self._entries[1::2], strict=True):
            elements = [self._read(entry) for entry in (key, value)]
            positions = self._positions.get(key.layer, np.arange(key.geometry[1]))
            cache = LayerCache(layer=key.layer, keys=elements[0], values=elements[1], positions=positions)
            arrays = [
                LayerStreamArray(
                    part=entry.part,
                    name=entry.array.name if self._has_own_names else format_array_name(entry.layer, entry.part),
                    shape=(entry.array.shape[0], entry.array.shape[1], entry.array.shape[2]),
                    token_major=entry.token_major,
                    dtype=self.dtype,
                    array_dtype=entry.array.array_dtype.replace(">", "<"),
                    sha256="",
                )
                for entry in (key, value)
            ]
            yield cache, arrays

    def _read(self, entry: LayerArray) -> Elements:
        words = np.empty(entry.array.nbytes, np.uint8)
        position = 0
        for chunk in entry.array.iter_chunks():
            words[position : position + chunk.size] = chunk
            position += chunk.size
        elements = words.view(dtypes.parse_dtype(self.dtype).numpy_dtype).reshape(entry.array.shape)
        return elements.transpose(1, 0, 2) if entry.token_major else elements


def _encode_to_size(
    reader: LayerReader,
    encoder: CacheEncoder,
    profile: Profile,
    options: LayerStreamOptions,
    directory: DirectoryOutput | None,
    progress: Progress | None,
) -> tuple[list[LayerStreamEntry], CacheEncoder]:
    """Write the stream of each layer if there is a directory; where a size is missed, try once more.

    Return the entries, and the encoder that made them.
    """
    files: list[StagedFile] = []

    def write_file(name: str, stream: bytes) -> None:
        if directory is not None:
            files.append(directory.open_file(name))
            files[-1].write(stream)
            files[-1].close()

    entries = list(_encode(reader, encoder, profile, options, write_file, progress))
    second_encoder = encoder.create_second_try()
    if second_encoder is None:
        return entries, encoder
    if directory is None:
        second_entries = list(_encode(reader, second_encoder, profile, options, lambda name, stream: None, None))
        return (second_entries, second_encoder) if second_encoder.is_nearer_than(encoder) else (entries, encoder)
    target = directory.target
    with wrap_os_errors(target):
        second_file = tempfile.TemporaryFile(dir=directory.staging_folder)  # noqa: SIM115

    def append(_: str, stream: bytes) -> None:
        with wrap_os_errors(target):
            second_file.write(stream)

    with second_file:
        second_entries = list(_encode(reader, second_encoder, profile, options, append, None))
        if not second_encoder.is_nearer_than(encoder):
            return entries, encoder
        second_file.seek(0)
        for file, entry in zip(files, second_entries, strict=True):
            file.rewrite()
            file.write(second_file.read(entry.nbytes))
            file.close()
    return second_entries, second_encoder


def _encode(
    reader: LayerReader,
    encoder: CacheEncoder,
    profile: Profile,
    options: LayerStreamOptions,
    write: Callable[[str, bytes], None],
    progress: Progress | None,
) -> Iterator[LayerStreamEntry]:
    """Write the stream of each layer, by its file's name, and yield its entry."""
    if options.attention is not None and reader.is_rerotated:
        raise OptionError("attention is of positions in the text, and K was rotated to others (--rerotate)")
    pending: list[tuple[LayerCache, list[LayerStreamArray]]] = []

    def iter_caches() -> Iterator[LayerCache]:
        for item in reader:
            pending.append(item)
            yield item[0]

    encoded, to_check = itertools.tee(encoder.encode(iter_caches()))
    decoded = decode_cache((layer.stream for layer in to_check), profile, options.codec) if options.verify else None
    for stream, result in encoded:
        cache, arrays = pending.pop(0)
        if decoded is not None:
            _require_equal(result, next(decoded))
        file_name = f"layer_{cache.layer}{LAYER_STREAM_SUFFIXES[options.codec]}"
        write(file_name, stream)
        yield LayerStreamEntry(
            layer=cache.layer,
            file=file_name,
            nbytes=len(stream),
            sha256=hashlib.sha256(stream).hexdigest(),
            arrays=tuple(
                _add_hash(array, elements) for array, elements in zip(arrays, (result.keys, result.values), strict=True)
            ),
            errors=measure_errors(cache, result) if options.codec == "transform" else None,
        )
        if progress is not None:
            progress(cache.nbytes)


def _require_equal(cache: LayerCache, decoded: LayerCache) -> None:
    for elements, decoded_elements in ((cache.keys, decoded.keys), (cache.values, decoded.values)):
        if elements.shape != decoded_elements.shape or not np.array_equal(
            _to_words(elements), _to_words(decoded_elements)
        ):
            raise KvmnnError(
                f"layer {cache.layer}: a stream did not decode to its own input; nothing was written (please report "
                "this)"
            )


def _to_words(elements: Elements) -> Any:
    return np.ascontiguousarray(elements).view(f"u{elements.dtype.itemsize}")


def _add_hash(array: LayerStreamArray, elements: Elements) -> LayerStreamArray:
    return LayerStreamArray(**{**vars(array), "sha256": hashlib.sha256(order_elements(array, elements)).hexdigest()})


def order_elements(array: LayerStreamArray, elements: Elements) -> bytes:
    """Return elements ``[kv_head, token, dim]`` as the little-endian bytes of an array."""
    ordered = elements.transpose(1, 0, 2) if array.token_major else elements
    return np.ascontiguousarray(ordered).tobytes()


def compare_words(entry: LayerStreamEntry, decoded: LayerCache, original: Source) -> str | None:
    """Describe the first difference of a decoded layer from the arrays of an original; None if there is none."""
    for array, elements in zip(entry.arrays, (decoded.keys, decoded.values), strict=True):
        if (problem := _find_mismatch(array, original)) is not None:
            return problem
        words, position = np.frombuffer(order_elements(array, elements), np.uint8), 0
        for chunk in original[array.name].iter_chunks():
            differs = np.flatnonzero(chunk != words[position : position + chunk.size])
            if differs.size:
                return f"array {array.name!r} first differs at byte {position + int(differs[0]):,}"
            position += chunk.size
    return None


def compare_errors(entry: LayerStreamEntry, decoded: LayerCache, original: Source) -> str | None:
    """Describe how the errors of a decoded layer are not those of its entry; None if they are."""
    originals = []
    for array in entry.arrays:
        if (problem := _find_mismatch(array, original)) is not None:
            return problem
        elements = original[array.name].to_numpy()
        originals.append(elements.transpose(1, 0, 2) if array.token_major else elements)
    errors = measure_errors(LayerCache(layer=entry.layer, keys=originals[0], values=originals[1]), decoded)
    for name, value in vars(errors).items():
        expected = getattr(entry.errors, name)
        if not np.isclose(value, expected, rtol=_MAX_ERROR_DIFFERENCE, atol=0):
            return f"layer {entry.layer}: {name} is {value:.4g}, {LAYERS_NAME} says {expected:.4g}"
    return None


def _find_mismatch(array: LayerStreamArray, original: Source) -> str | None:
    if array.name not in set(original):
        return f"array {array.name!r} is not in the original"
    original_array = original[array.name]
    if (original_array.nbytes, original_array.dtype) != (array.nbytes, array.dtype):
        return (
            f"array {array.name!r} is {array.dtype} {list(array.shape)}, in the original {original_array.dtype} "
            f"{list(original_array.shape)}"
        )
    return None


def measure_errors(cache: LayerCache, decoded: LayerCache) -> LayerErrors:
    """Measure the differences between a layer and what its stream decodes to; not finite elements are left out."""
    from ...profiles.geometry import to_float_heads

    largest, relative = [], []
    for elements, decoded_elements in ((cache.keys, decoded.keys), (cache.values, decoded.values)):
        original, restored = to_float_heads(elements), to_float_heads(decoded_elements)
        is_finite = np.isfinite(original) & np.isfinite(restored)
        differences, values = restored[is_finite] - original[is_finite], original[is_finite]
        norm = float(np.sqrt((values * values).sum()))
        largest.append(float(np.abs(differences).max(initial=0.0)))
        relative.append(float(np.sqrt((differences * differences).sum())) / norm if norm else 0.0)
    return LayerErrors(
        max_key_error=largest[0],
        max_value_error=largest[1],
        relative_key_error=relative[0],
        relative_value_error=relative[1],
    )
