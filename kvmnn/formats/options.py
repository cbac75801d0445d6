"""What the caller says about an input."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..arrays.axes import AXES_AS_STORED, AxisSpec
from ..arrays.completeness import Completeness
from ..packed.cache_info import StateLayer, TokenIdsFingerprint
from ..packed.inference import PackedGeometry


@dataclass(frozen=True)
class ReadOptions:
    """What the caller asks of a source."""

    #: Name of the dtype to take arrays as; None infers it from each array. Raw bytes need one. Files that tell fp16
    #: and bf16 apart by themselves (``.safetensors``, ``torch.save``, other engines) take their own alone; of
    #: numpy, which has no bf16, any of the word size.
    dtype: str | None = None
    #: Refuse a `dtype` under which an array of numpy floats would be other numbers: for what computes with them.
    #: Frames do not care.
    forbid_reinterpretation: bool = False
    #: What arrays and raw bytes whose own type does not say may be taken as, where `dtype` is None: the first that
    #: has the word size.
    fallback_dtypes: tuple[str, ...] = ()
    #: Names to take from a file of many arrays; empty takes all.
    tensors: tuple[str, ...] = ()
    #: Leave arrays out that no frame holds (float64, int64, empty ...) instead of refusing the file. Arrays named
    #: in `tensors` are never left out.
    skip_unsupported: bool = False
    #: What packed files are said to be.
    packed: PackedOptions | None = None
    #: Recognise what kvmnn itself wrote: decode frames, and read the description of a packed cache that travels in
    #: metadata. Without it every file is taken as it is, and a frame is raw words.
    decode_frames: bool = True
    #: For decoding frames; None for all processors.
    threads: int | None = None
    #: What is wanted of caches of other engines.
    engine: EngineOptions = field(default_factory=lambda: EngineOptions())
    #: How plain arrays lie, and which text of a batch is wanted.
    axis_spec: AxisSpec = AXES_AS_STORED
    #: Take arrays of float8 types as their codes, one byte each, which frames keep; otherwise they are the float32
    #: numbers that these stand for.
    codes: bool = False
    #: Refuse inputs that hold more raw bytes than this in all; None for what their files can honestly hold, which
    #: each format bounds by itself (deflated members: 1,032 times their bytes).
    max_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the caller wants of a file of another engine. Kv heads and the model are said in `PackedOptions`."""

    #: All that the file holds, in its own words, for frames from which the same file is written again: K and V of
    #: every layer as they lie there, in `Source.metadata` what is around them. Nothing needs to be known of heads.
    passthrough: bool = False
    #: With `passthrough`: K and V of llama.cpp ``[token, kv_head, head_dim]`` where kv heads are known, for dense
    #: streams.
    split_heads: bool = False
    #: Take a row whose kv heads nothing says as one head: for what does not look at heads.
    allow_unknown_heads: bool = False
    #: Take the first of several streams: for what only looks.
    default_to_first_stream: bool = False
    #: Kv heads of each layer as they were noted down, where nothing else says them.
    recorded_kv_heads: tuple[int, ...] | None = None
    #: Of a llama.cpp file with two caches: the layer of the model that each of its layers is, and what the model
    #: keeps for each, as they were noted down.
    recorded_layers: tuple[int, ...] | None = None
    recorded_completeness: Completeness | None = None
    #: Which stream of a llama.cpp file; None takes the only one that holds cells.
    stream: int | None = None
    #: Cells of this sequence of a llama.cpp stream that several share; None takes the cells of all.
    sequence: int | None = None
    #: Of a llama.cpp file with two caches, that of the sliding-window layers.
    window_cache: bool = False
    #: Quantised blocks as the bytes that they are, ``[token, block, byte]``, not as the numbers that they stand
    #: for.
    raw_blocks: bool = False
    #: llama.cpp's transforms of K and V to invert (`kvmnn.arrays.invert_source_transforms`). Both ``("none",)`` and
    #: None, which means unspecified, return the elements as stored in the file.
    invert: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PackedOptions:
    """What the caller says about packed files."""

    #: What is known of the layout.
    geometry: PackedGeometry = field(default_factory=PackedGeometry)
    #: Live tokens: none if unknown, one number for all layers, or one for each.
    valid_tokens: tuple[int, ...] = ()
    #: Which prefix of a directory that holds several.
    prefix_name: str | None = None
    #: Directory of the MNN model, for geometry and fingerprint.
    model: str | None = None
    #: Those of the text that the cache was made from.
    token_ids: TokenIdsFingerprint | None = None
    #: Addresses (the files' names) of live files in the order of the layers.
    layer_order: tuple[str, ...] = ()
    #: The engine's process, whose open files tell the order of the layers.
    pid: int | None = None
    #: Read a prefix cache whose markers are missing.
    ignore_markers: bool = False
    #: Believe what is said of the files, also where their sizes and words speak for something else.
    trust_options: bool = False
    #: Take the packed variant of a dump that holds both.
    prefer_packed_dump: bool = False
    #: Layers without K and V, as they were noted down; None where nothing was.
    recorded_states: tuple[StateLayer, ...] | None = None
    #: Kv heads and head_dim of each layer with K and V, where they differ and were noted down.
    heads: tuple[tuple[int, int], ...] = ()
