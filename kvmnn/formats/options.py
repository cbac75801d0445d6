"""What the caller says about an input."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..arrays.axes import AXES_AS_STORED, AxisSpec
from ..arrays.completeness import Completeness
from ..packed.cache_info import StateLayer, TokenIdsFingerprint
from ..packed.inference import PackedGeometry


@dataclass(frozen=True)
class ReadOptions:
    """What the caller asks of a source.

    Parameters
    ----------
    dtype
        Name of the dtype to take arrays as; None infers it from each array. Raw bytes need one. Files that tell fp16
        and bf16 apart by themselves (``.safetensors``, ``torch.save``, other engines) take their own alone; of numpy,
        which has no bf16, any of the word size.
    forbid_reinterpretation
        Refuse a `dtype` under which an array of numpy floats would be other numbers: for what computes with them.
        Frames do not care.
    fallback_dtypes
        What arrays and raw bytes whose own type does not say may be taken as, where `dtype` is None: the first that has
        the word size.
    tensors
        Names to take from a file of many arrays; empty takes all.
    skip_unsupported
        Leave arrays out that no frame holds (float64, int64, empty ...) instead of refusing the file. Arrays named in
        `tensors` are never left out.
    packed
        What packed files are said to be.
    decode_frames
        Recognise what kvmnn itself wrote: decode frames, and read the description of a packed cache that travels in
        metadata. Without it every file is taken as it is, and a frame is raw words.
    threads
        For decoding frames; None for all processors.
    engine
        What is wanted of caches of other engines.
    axis_spec
        How plain arrays lie, and which text of a batch is wanted.
    codes
        Take arrays of float8 types as their codes, one byte each, which frames keep; otherwise they are the float32
        numbers that these stand for.
    max_bytes
        Refuse inputs that hold more raw bytes than this in all; None for what their files can honestly hold, which
        each format bounds by itself (deflated members: 1,032 times their bytes).
    """

    dtype: str | None = None
    forbid_reinterpretation: bool = False
    fallback_dtypes: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    skip_unsupported: bool = False
    packed: PackedOptions | None = None
    decode_frames: bool = True
    threads: int | None = None
    engine: EngineOptions = field(default_factory=lambda: EngineOptions())
    axis_spec: AxisSpec = AXES_AS_STORED
    codes: bool = False
    max_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the caller wants of a file of another engine. Kv heads and the model are said in `PackedOptions`.

    Parameters
    ----------
    passthrough
        All that the file holds, in its own words, for frames from which the same file is written again: K and V of
        every layer as they lie there, in `Source.metadata` what is around them. Nothing needs to be known of heads.
    split_heads
        With `passthrough`: K and V of llama.cpp ``[token, kv_head, head_dim]`` where kv heads are known, for dense
        streams.
    allow_unknown_heads
        Take a row whose kv heads nothing says as one head: for what does not look at heads.
    default_to_first_stream
        Take the first of several streams: for what only looks.
    recorded_kv_heads
        Kv heads of each layer as they were noted down, where nothing else says them.
    recorded_layers, recorded_completeness
        Of a llama.cpp file with two caches: the layer of the model that each of its layers is, and what the model keeps
        for each, as they were noted down.
    stream
        Which stream of a llama.cpp file; None takes the only one that holds cells.
    sequence
        Cells of this sequence of a llama.cpp stream that several share; None takes the cells of all.
    window_cache
        Of a llama.cpp file with two caches, that of the sliding-window layers.
    raw_blocks
        Quantised blocks as the bytes that they are, ``[token, block, byte]``, not as the numbers that they stand for.
    invert
        llama.cpp's transforms of K and V to invert (`kvmnn.arrays.invert_source_transforms`). Both ``("none",)`` and
        None, which means unspecified, return the elements as stored in the file.
    """

    passthrough: bool = False
    split_heads: bool = False
    allow_unknown_heads: bool = False
    default_to_first_stream: bool = False
    recorded_kv_heads: tuple[int, ...] | None = None
    recorded_layers: tuple[int, ...] | None = None
    recorded_completeness: Completeness | None = None
    stream: int | None = None
    sequence: int | None = None
    window_cache: bool = False
    raw_blocks: bool = False
    invert: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PackedOptions:
    """What the caller says about packed files.

    Parameters
    ----------
    geometry
        What is known of the layout.
    valid_tokens
        Live tokens: none if unknown, one number for all layers, or one for each.
    prefix_name
        Which prefix of a directory that holds several.
    model
        Directory of the MNN model, for geometry and fingerprint.
    token_ids
        Those of the text that the cache was made from.
    layer_order
        Addresses (the files' names) of live files in the order of the layers.
    pid
        The engine's process, whose open files tell the order of the layers.
    ignore_markers
        Read a prefix cache whose markers are missing.
    trust_options
        Believe what is said of the files, also where their sizes and words speak for something else.
    prefer_packed_dump
        Take the packed variant of a dump that holds both.
    recorded_states
        Layers without K and V, as they were noted down; None where nothing was.
    heads
        Kv heads and head_dim of each layer with K and V, where they differ and were noted down.
    """

    geometry: PackedGeometry = field(default_factory=PackedGeometry)
    valid_tokens: tuple[int, ...] = ()
    prefix_name: str | None = None
    model: str | None = None
    token_ids: TokenIdsFingerprint | None = None
    layer_order: tuple[str, ...] = ()
    pid: int | None = None
    ignore_markers: bool = False
    trust_options: bool = False
    prefer_packed_dump: bool = False
    recorded_states: tuple[StateLayer, ...] | None = None
    heads: tuple[tuple[int, int], ...] = ()
