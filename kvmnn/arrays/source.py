"""The arrays and metadata of one input, or of several merged into one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import islice
from typing import Final

from .._util.dataclass import dataclass
from .._util.text import LOSSY, escape_control
from ..packed import cache_info
from ..packed.cache_info import CacheInfo
from .array import LazyArray, LazyArrayList
from .completeness import Completeness, infer_completeness, load_completeness_json, merge_completeness
from .engine_cache import EngineCacheInfo
from .llama_transforms import Transform
from .naming import check_name
from .opaque_state import OpaqueState

DUMP_KEY: Final = "kvmnn.dump"
"""Key of `Source.metadata` for the metadata files of a KV dump; bundles keep it, so that the dump can be restored."""
FILE_KEY: Final = "kvmnn.file"
"""Metadata key for all bytes of another engine's file but K and V."""
SIDECAR_KEY: Final = "kvmnn.beside"
"""Metadata key for sidecars: files next to arrays that record their tokens."""
ENGINE_KEY: Final = "kvmnn.engine_cache"
"""Metadata key for the description of another engine's cache whose K and V are stored as plain arrays."""
COMPLETENESS_KEY: Final = "kvmnn.completeness"
"""Metadata key for the state that the arrays contain, and what they lack (`kvmnn.arrays.completeness`)."""
PACKED_FILES_KEY: Final = "kvmnn.packed_files"
"""Metadata key for the bytes of packed files besides the rows of live tokens."""
LOSSY_KEY: Final = "kvmnn.lossy"
"""Metadata key of arrays that are not exactly those that an engine computed: a sentence about what was lost."""
CAST_TEXT: Final = "rounded by a cast: "
"""Beginning of such a sentence where nothing was lost but by a cast of the words that a model computed."""
DEQUANTIZED_KEY: Final = "kvmnn.dequantised"
"""Metadata key of manifests for the type whose codes the arrays lack: ``"int8"``, of MNN's quantised caches."""
WHOLE_FILE_KEYS: Final = (DUMP_KEY, FILE_KEY, PACKED_FILES_KEY)
"""Keys that only manifests contain: other files of arrays cannot be restored to the original folder or file."""


@dataclass
class Source:
    """Named arrays and the metadata of their input.

    A source maps names to arrays, in the input's order: ``source["k"].to_numpy()`` reads one, ``list(source)`` gives
    the names. Elements are read only on demand.

    Parameters
    ----------
    arrays
        In the input's order.
    metadata
        Other text that the input carried, e.g. ``__metadata__`` of a ``.safetensors`` file.
    skipped_arrays
        One line for each array that was left out.
    notes
        One line for each property that was inferred, and neither read nor specified.
    cache
        Description of the packed files, if the input is packed files.
    engine_cache
        Description of the cache of another engine, if the input is one.
    completeness
        The state of each layer of the model, and how much of it the arrays contain; None if unknown.
    states
        State of layers that is not K and V. The arrays do not contain it: `completeness` says that it is not included,
        and verbs that keep it alongside the arrays call `kvmnn.arrays.opaque_state.include_states`.
    token_major
        Whether the arrays are ``[token, kv_head, head_dim]``.
    axes
        Letters for the axes of each array, if the input declares them: b batch, h kv_head, t token, d dimension.
    lossy
        Whether the words differ from the input's, because they were computed from what an engine had rounded.
    inverted_transforms
        Transforms of llama.cpp that were inverted (`kvmnn.arrays.engine_transforms`); None if none were specified.
    doubt
        Why the arrays may differ from what the engine stored, if the caller forced the reading; else empty.
    has_assumed_positions
        Whether nothing records the positions of the tokens of packed files, which are taken as the first.
    inputs
        Inputs that were opened: paths, and ``"-"`` for standard input.
    opened_files
        Further files that are read: those in directories, manifests, metadata.
    """

    arrays: Sequence[LazyArray]
    metadata: dict[str, str] = field(default_factory=dict)
    skipped_arrays: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)
    cache: CacheInfo | None = None
    engine_cache: EngineCacheInfo | None = None
    completeness: Completeness | None = None
    states: Sequence[OpaqueState] = ()
    doubt: str = ""
    has_assumed_positions: bool = False
    token_major: bool = False
    axes: str | None = None
    lossy: bool = False
    inverted_transforms: tuple[Transform, ...] | None = None
    inputs: tuple[str, ...] = ()
    opened_files: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Return every file that is read, and directories that were opened. Outputs never replace them."""
        return self.inputs + self.opened_files

    @property
    def dequantized_types(self) -> tuple[str, ...]:
        """Return the quantised types that the words were decoded from; empty if the words are those of the input."""
        return self.code_types or (("int8",) if self.lossy else ())

    @property
    def code_types(self) -> tuple[str, ...]:
        """Return the quantised types that the words were decoded from, except MNN's int8."""
        engine = self.engine_cache.dequantised if self.engine_cache is not None else ()
        return tuple(dict.fromkeys((*engine, *self.elements)))

    @property
    def elements(self) -> tuple[str, ...]:
        """Return the float8 types that some of the arrays were decoded from."""
        if isinstance(self.arrays, LazyArrayList):
            return self.arrays.elements
        return tuple(dict.fromkeys(array.element for array in self.arrays if array.element and array.itemsize > 1))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the arrays, in order."""
        return tuple(self)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all arrays."""
        if isinstance(self.arrays, LazyArrayList):
            return self.arrays.nbytes
        return sum(array.nbytes for array in self.arrays)

    def __getitem__(self, name: str) -> LazyArray:
        if isinstance(self.arrays, LazyArrayList):
            matching_array = self.arrays.find(name)
        else:
            matching_array = next((array for array in self.arrays if array.name == name), None)
        if matching_array is not None:
            return matching_array
        raise KeyError(f"no array named {name!r}; there are {', '.join(map(repr, islice(self, 8))) or 'none'}")

    def __iter__(self) -> Iterator[str]:
        return (
            self.arrays.iter_names()
            if isinstance(self.arrays, LazyArrayList)
            else (array.name for array in self.arrays)
        )

    def __len__(self) -> int:
        return len(self.arrays)

    def __repr__(self) -> str:
        array_texts = [f"{array.name}: {array.type_name} {list(array.shape)}" for array in self.arrays[:8]]
        if len(self.arrays) > len(array_texts):
            array_texts.append(f"{len(self.arrays) - len(array_texts)} more")
        return f"<Source {' + '.join(self.inputs)} ({self.nbytes:,} bytes) {'; '.join(array_texts)}>"


def merge_sources(sources: Sequence[Source]) -> Source:
    """Merge the arrays of all sources under distinct names: a duplicate name gets ``~2``, ``~3`` ... appended.

    A single source is returned as it is. Of several, the first wins if metadata has the same key. Descriptions of one
    input are dropped: a cache (`Source.cache`, `Source.engine_cache`) and kvmnn's own metadata
    (`strip_internal_metadata`), except facts about the tokens that all inputs share, as ``.npy`` files of one folder
    do. State that an input lacks stays missing.
    """
    if len(sources) == 1:
        return sources[0]
    merged = Source([])
    arrays: list[LazyArray] = []
    skipped_arrays: list[str] = []
    used_names: set[str] = set()
    sidecar_texts = {source.metadata.get(SIDECAR_KEY) for source in sources}
    for source in sources:
        for array in source.arrays:
            name, suffix = array.name, 1
            while name in used_names:
                suffix += 1
                name = f"{array.name}~{suffix}"
            check_name(name, " ".join(source.inputs))
            used_names.add(name)
            arrays.append(replace(array, name=name))
        if (
            source.engine_cache is not None
            or source.cache is not None
            or (SIDECAR_KEY in source.metadata and len(sidecar_texts) > 1)
        ):
            merged.notes.append(
                f"what {' '.join(source.inputs)} says of its tokens is left out: several inputs are taken together"
            )
        loss = join_losses(*(metadata.get(LOSSY_KEY, "") for metadata in (merged.metadata, source.metadata)))
        merged.metadata = strip_internal_metadata(source.metadata) | merged.metadata
        merged.metadata |= {LOSSY_KEY: loss} if loss else {}
        skipped_arrays.extend(source.skipped_arrays)
        merged.notes.extend(source.notes)
        merged.token_major |= source.token_major
        merged.lossy |= source.lossy
        merged.inputs += source.inputs
        merged.opened_files += source.opened_files
    merged.arrays, merged.skipped_arrays = arrays, skipped_arrays
    merged.completeness = _merge_source_completeness(merged, sources)
    if len(sidecar_texts) == 1 and (sidecar_text := sidecar_texts.pop()) is not None:
        merged.metadata[SIDECAR_KEY] = sidecar_text
    return merged


def _merge_source_completeness(merged: Source, sources: Sequence[Source]) -> Completeness | None:
    """Return the completeness of all arrays together, which may be those of one cache in several files."""
    texts = {source.metadata.get(COMPLETENESS_KEY) for source in sources}
    text = texts.pop() if len(texts) == 1 else None
    if text is not None:
        merged.metadata[COMPLETENESS_KEY] = text
        return parse_completeness(merged.metadata, merged, " ".join(merged.inputs))
    completeness = merge_completeness([(" ".join(source.inputs), source.completeness) for source in sources])
    return infer_completeness(merged.names) if completeness is None else completeness


def parse_completeness(metadata: dict[str, str], names: Iterable[str], where: str) -> Completeness | None:
    """Parse the completeness of arrays of these names from metadata; without it, return what the names show."""
    text = metadata.get(COMPLETENESS_KEY)
    return (
        infer_completeness(names)
        if text is None
        else load_completeness_json(text, names, f"{where}: metadata {COMPLETENESS_KEY!r}")
    )


def check_source(source: object, alternative: str) -> None:
    """Raise `TypeError` for anything but a `Source`; `alternative` is the function that takes paths."""
    if not isinstance(source, Source):
        raise TypeError(
            f"source is {type(source).__name__}: expected what kvmnn.open returns; {alternative} takes paths"
        )


def list_losses(loss: str | Mapping[str, str] | None) -> list[str]:
    """Return a line about what K and V have lost, of a sentence or of metadata; empty if nothing is recorded."""
    text = loss if isinstance(loss, str) else (loss or {}).get(LOSSY_KEY)
    return [f"{LOSSY}: {escape_control(text)[:_MAX_LOSS_CHARACTERS]}"] if text else []


_MAX_LOSS_CHARACTERS = 600


ROUNDED_TEXT: Final = "K and V are rounded"
"""The beginning of what sources record that transform streams rounded."""


COMPACTED_TEXT: Final = "compacted: "
"""The beginning of what documents of compacted packed files record; rows of evicted tokens stay in these files."""


def join_losses(*losses: str) -> str:
    """Join sentences about what K and V have lost, the first loss first; empty and repeated ones are left out."""
    joined = ""
    for loss in losses:
        if loss and loss not in joined:
            joined = f"{joined}; {loss}" if joined else loss
    return joined


def is_rounded_by_codec(metadata: Mapping[str, str]) -> bool:
    """Return whether K and V come from transform streams: what a second rounding costs in all is then not known."""
    return ROUNDED_TEXT in metadata.get(LOSSY_KEY, "")


def is_only_cast(loss: str) -> bool:
    """Return whether nothing was lost but by casts of the words that a model computed."""
    return all(sentence.startswith(CAST_TEXT) for sentence in loss.split("; "))


def qualify_label(label: str | None, losses: Sequence[str]) -> str | None:
    """Return the label of a copy whose K and V may have lost something before (`list_losses`).

    ``LOSSLESS`` and ``UNCHANGED`` become ``... copy of LOSSY K and V``, and None becomes ``LOSSY``.
    """
    if not losses or label in {LOSSY, "DIFFERS"}:
        return label
    return f"{label} copy of {LOSSY} K and V" if label else LOSSY


def strip_internal_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """Return metadata without kvmnn's own entries about a whole input, which are wrong for a part or for several."""
    return {key: value for key, value in metadata.items() if key == LOSSY_KEY or not key.startswith("kvmnn.")}


def select_subset_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """Select the metadata that stays true of a subset of the arrays, such as the engine cache's description."""
    subset_keys = (SIDECAR_KEY, ENGINE_KEY, COMPLETENESS_KEY)
    return strip_internal_metadata(metadata) | {key: metadata[key] for key in subset_keys if key in metadata}


def parse_cache_info(metadata: dict[str, str], where: str) -> CacheInfo | None:
    """Parse the description of a packed cache in metadata; None if there is none."""
    text = metadata.get(cache_info.METADATA_KEY)
    return None if text is None else cache_info.load_cache_info(text, f"{where}: metadata {cache_info.METADATA_KEY!r}")
