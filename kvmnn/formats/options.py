"""The caller's options for reading an input."""

from __future__ import annotations

from dataclasses import field

from .._util.dataclass import dataclass
from ..arrays.axes import AXES_AS_STORED, AxisSpec
from ..arrays.completeness import Completeness
from ..packed.cache_info import StateLayer, TokenIdsFingerprint
from ..packed.inference import PackedGeometry


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading an input."""

    #: Name of the dtype to take arrays as; None infers it from each array. Raw bytes need one. Files that tell fp16
    #: and bf16 apart by themselves (``.safetensors``, ``torch.save``, other engines) take their own alone; of
    #: numpy, which has no bf16, any of the word size.
    dtype: str | None = None
    #: Reject a `dtype` that changes the values of an array of numpy floats, for callers that compute with them.
    forbid_reinterpretation: bool = False
    #: Dtypes for arrays and raw bytes of undefined type if `dtype` is None: the first of matching word size is used.
    fallback_dtypes: tuple[str, ...] = ()
    #: Names to take from a file of many arrays; empty takes all.
    tensors: tuple[str, ...] = ()
    #: Skip arrays that frames cannot store (float64, int64, empty ...) instead of rejecting the file. Arrays named in
    #: `tensors` are never skipped.
    skip_unsupported: bool = False
    #: Options of packed files.
    packed: PackedOptions | None = None
    #: Recognise kvmnn's own output: decode frames, and read the description of a packed cache in metadata. Otherwise a
    #: frame is raw words.
    decode_frames: bool = True
    #: Threads for decoding frames; None for all processors.
    threads: int | None = None
    #: Options of other engines' caches.
    engine: EngineOptions = field(default_factory=lambda: EngineOptions())
    #: Axes of plain arrays, and the selected text of a batch.
    axis_spec: AxisSpec = AXES_AS_STORED
    #: Return float8 arrays as codes of one byte, which frames store, instead of decoding them to float32.
    codes: bool = False
    #: Profile of layer streams; None looks for it near them.
    profile: str | None = None
    #: Maximum total raw bytes of an input; None for the limits of each format (deflated members: 1,032 times their
    #: bytes).
    max_bytes: int | None = None

    @property
    def model(self) -> str | None:
        """The model that `packed` names."""
        return self.packed.model if self.packed else None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options for files of other engines. `PackedOptions` has kv heads and the model."""

    #: Read the whole file for frames from which it can be restored: K and V of every layer in stored layout, and all
    #: other bytes in `Source.metadata`. Heads need not be known.
    passthrough: bool = False
    #: With `passthrough`: K and V of llama.cpp ``[token, kv_head, head_dim]`` where kv heads are known, for dense
    #: streams.
    split_heads: bool = False
    #: Treat a row as one head if kv heads are unknown, for callers that ignore heads.
    allow_unknown_heads: bool = False
    #: Use the first of several streams, for inspection.
    default_to_first_stream: bool = False
    #: Recorded kv heads of each layer, used if nothing else specifies them.
    recorded_kv_heads: tuple[int, ...] | None = None
    #: For a llama.cpp file with two caches: recorded model layer of each of its layers, and the model's state of each.
    recorded_layers: tuple[int, ...] | None = None
    recorded_completeness: Completeness | None = None
    #: Stream of a llama.cpp file; None selects the only one with cells.
    stream: int | None = None
    #: Select the cells of this sequence of a shared llama.cpp stream; None selects all cells.
    sequence: int | None = None
    #: Select the cache of the sliding-window layers of a llama.cpp file with two caches.
    window_cache: bool = False
    #: Return quantised blocks as raw bytes, ``[token, block, byte]``, without dequantising them.
    raw_blocks: bool = False
    #: llama.cpp's transforms of K and V to invert (`kvmnn.arrays.invert_source_transforms`). Both ``("none",)`` and
    #: None, which means unspecified, return the elements as stored in the file.
    invert: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PackedOptions:
    """Options for packed files."""

    #: Known properties of the layout.
    geometry: PackedGeometry = field(default_factory=PackedGeometry)
    #: Live tokens: none if unknown, one number for all layers, or one for each.
    valid_tokens: tuple[int, ...] = ()
    #: Name of the prefix, for a directory with several.
    prefix_name: str | None = None
    #: Directory of the MNN model, for geometry and fingerprint.
    model: str | None = None
    #: Fingerprint of the token ids of the cached text.
    token_ids: TokenIdsFingerprint | None = None
    #: Addresses (the files' names) of live files in the order of the layers.
    layer_order: tuple[str, ...] = ()
    #: Process id of the engine, whose open files reveal the order of the layers.
    pid: int | None = None
    #: Read a prefix cache whose markers are missing.
    ignore_markers: bool = False
    #: Read the files as specified even where their sizes and elements contradict that, or a manifest does.
    ignore_contradictions: bool = False
    #: Prefer the packed variant of a dump that has both.
    prefer_packed_dump: bool = False
    #: Recorded layers without K and V; None if not recorded.
    recorded_states: tuple[StateLayer, ...] | None = None
    #: Recorded kv heads and head_dim of each layer with K and V, if layers differ.
    heads: tuple[tuple[int, int], ...] = ()

    @property
    def is_of_frames(self) -> bool:
        """Return whether the files are compared with frames, whose manifest records their properties."""
        return self.recorded_states is not None
