"""The state that a model keeps for each layer, and how much of it a cache file contains.

A reader fills in `Completeness` from the file, the model or their shapes. Verbs that pass a cache to an engine (`store
put`, `pack`, `to_cache`) call `require_complete`: a model that continues from a part of its state writes garbage, and
nobody sees why. Verbs that only read arrays report `Completeness.missing` and continue. As text it is written into the
metadata of manifests, of ``.safetensors`` and ``.npz`` files and of Zarr stores, and next to ``.npy`` files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import field, replace
from typing import Any, Final, Literal, Self, get_args

from .._util.dataclass import dataclass
from .._util.text import format_layers, pluralize
from ..dtypes import PARTS, Part
from ..errors import ManifestError, SourceError
from ..files.schema import JsonReader, Record, json_key, parse_document
from .naming import LayerName, parse_conventional_name, parse_layer_name

StateKind = Literal["full", "window", "linear", "recurrent", "shared", "cross", "index", "unknown"]
STATE_KINDS: Final[tuple[StateKind, ...]] = get_args(StateKind)

_MAX_NUMBERED_LAYERS = 512  # larger numbers in names are of something else, in files of many thousand arrays
_MAX_LAYERS = 1 << 16  # of a document: a few bytes in it must not become a long list

_STATE_NAMES: Final[dict[StateKind, str]] = {
    "full": "full attention",
    "window": "a window",
    "linear": "linear attention",
    "recurrent": "recurrent or convolution state",
    "shared": "K and V of another layer",
    "cross": "cross-attention",
    "index": "an index of keys",
    "unknown": "state of an unknown kind",
}


@dataclass(frozen=True, kw_only=True)
class LayerStateInfo:
    """The state that a model keeps for one layer."""

    #: Number of the layer in the model, from 0.
    layer: int
    #: ``"full"``: K and V of every token; ``"window"``: of the last `window` tokens; ``"linear"``: the state of linear
    #: attention; ``"recurrent"``: convolution or recurrent state; ``"shared"``: none of its own, it reads that of layer
    #: `shared_with`; ``"cross"``: K and V of the encoder's output; ``"index"``: keys that select tokens.
    kind: StateKind = "full"
    #: Tokens that a layer of kind ``"window"`` attends to; None if unknown.
    window: int | None = None
    #: The layer whose K and V a layer of kind ``"shared"`` reads.
    shared_with: int | None = None
    #: Whether the arrays of the source contain this state.
    included: bool = True
    #: Location of state that the arrays do not contain, as the end of a sentence: ``"in the second cache of the
    #: session"``; empty if unknown.
    location: str = ""


def _list_runs(layers: Sequence[LayerStateInfo]) -> list[dict[str, Any]]:
    runs: list[tuple[LayerStateInfo, int]] = []
    for state in layers:
        first, size = runs[-1] if runs else (state, 0)
        if size and replace(first, layer=state.layer) == state and first.layer + size == state.layer:
            runs[-1] = first, size + 1
        else:
            runs.append((state, 1))
    names = ("kind", "window", "shared_with", "included", "location")
    return [{"layers": [first.layer, size], **{name: getattr(first, name) for name in names}} for first, size in runs]


@dataclass(frozen=True, kw_only=True)
class Completeness(Record):
    """The state of every layer of a model, and what else an engine needs to continue."""

    #: Every layer of the model, in order, also those without arrays.
    layers: tuple[LayerStateInfo, ...] = field(default=(), metadata={"convert": _list_runs})
    #: Sentence about tokens that the model has seen and that are not stored; empty if all are.
    evicted: str = ""
    #: Sentences about further state that the arrays do not contain.
    other_missing: tuple[str, ...] = field(default=(), metadata={"key": "other"})

    @classmethod
    def from_dict(cls, document: object, label: str = "document", *, complete: bool = False) -> Self:
        """Create a completeness from the result of `to_dict`; errors as for `kvmnn.files.schema.Record.from_dict`."""
        try:
            parsed = parse_completeness_node(JsonReader(document, label, ""))
        except ManifestError as error:
            raise SourceError(str(error)) from None
        return cls(layers=parsed.layers, evicted=parsed.evicted, other_missing=parsed.other_missing)

    @property
    @json_key("complete", before="layers")
    def is_complete(self) -> bool:
        """Return whether the arrays contain all that an engine needs to continue."""
        return not self.missing

    @property
    def included_layers(self) -> tuple[int, ...]:
        """Return the layers whose state the arrays contain."""
        return tuple(state.layer for state in self.layers if state.included)

    @property
    def is_plain(self) -> bool:
        """Return whether every layer has full attention and nothing is left out, as in most models."""
        return self.is_complete and all(state.kind == "full" for state in self.layers)

    @property
    @json_key(before="layers")
    def missing(self) -> list[str]:
        """Return a sentence for each kind of state that the arrays do not contain."""
        groups: dict[tuple[StateKind, int | None, str], list[int]] = {}
        for state in self.layers:
            if not state.included and state.kind != "shared":
                groups.setdefault((state.kind, state.window, state.location), []).append(state.layer)
        sentences = [self._describe_group(*group, layers) for group, layers in groups.items()]
        return [*sentences, *filter(None, [self.evicted]), *self.other_missing]

    def _describe_group(self, kind: StateKind, window: int | None, location: str, layers: list[int]) -> str:
        location_text = (
            f" and {'is' if len(layers) == 1 else 'are'} {location}" if location else ", which is not included"
        )
        verb = "has" if len(layers) == 1 else "have"
        state = describe_state(LayerStateInfo(layer=layers[0], kind=kind, window=window))
        return f"{len(layers):,} of {pluralize(len(self.layers), 'layer')} {verb} {state}{location_text}"

    def with_selected_layers(self, layers: Collection[int], location: str) -> Completeness:
        """Return the completeness of the arrays of `layers` alone; `location` states where the others are."""
        states = (
            state if state.layer in layers or not state.included else replace(state, included=False, location=location)
            for state in self.layers
        )
        return replace(self, layers=tuple(states))


def describe_state(state: LayerStateInfo) -> str:
    """Return the kind of a layer's state in words: ``"a window of 16 tokens"``."""
    if state.kind == "shared" and state.shared_with is not None:
        return f"K and V of layer {state.shared_with}"
    size = f" of {pluralize(state.window, 'token')}" if state.window is not None else ""
    return f"{_STATE_NAMES[state.kind]}{size}"


def format_missing(completeness: Completeness | None) -> list[str]:
    """Return a line for each kind of state that the arrays do not contain; empty if unknown."""
    return [] if completeness is None else [f"incomplete: {sentence}" for sentence in completeness.missing]


def describe_scope(num_arrays: int) -> str:
    """Return the words after LOSSLESS where the arrays contain a part of the model's state."""
    return f" for {'this array' if num_arrays == 1 else 'these arrays'}"


def format_missing_of_pair(pair: tuple[Completeness | None, Completeness | None]) -> list[str]:
    """Return the lines of `format_missing` for two inputs that are compared."""
    inputs = zip(("first input", "second input"), pair, strict=True)
    return [f"{name}: {line}" for name, completeness in inputs for line in format_missing(completeness)]


def build_pair_document(pair: tuple[Completeness | None, Completeness | None]) -> dict[str, Any]:
    """Return the entry ``completeness`` of a JSON document about two inputs; empty if nothing is known."""
    if pair == (None, None):
        return {}
    documents = [completeness and completeness.to_dict() for completeness in pair]
    return {"completeness": dict(zip(("first", "second"), documents, strict=True))}


SHIFTED_KEYS_TEXT: Final = (
    "K lacks a constant for each channel, which MNN takes off int8 keys (attention_mode 9, 10) and keeps in memory "
    "alone: the K of further tokens has it, so a continuation would be wrong; compute the cache with attention_mode 8"
)
"""Sentence about K of MNN's int8 caches. Softmax does not see the constants as long as all K lacks them."""


def add_missing_state(completeness: Completeness | None, sentence: str) -> Completeness:
    """Return the completeness with one more sentence about state that the arrays do not contain, unless it has it."""
    completeness = completeness or Completeness()
    if sentence in completeness.other_missing:
        return completeness
    return replace(completeness, other_missing=(*completeness.other_missing, sentence))


class IncompleteCacheError(SourceError):
    """A cache that contains only a part of the model's state, where all of it is required."""


def require_complete(completeness: Completeness | None, where: str, purpose: str) -> None:
    """Raise `IncompleteCacheError` unless the arrays contain all that an engine needs to continue."""
    if completeness is None or completeness.is_complete:
        return
    missing_text = "; ".join(completeness.missing)
    raise IncompleteCacheError(f"{where}: cannot make {purpose} of a part of the state: {missing_text}")


def parse_completeness_node(node: JsonReader) -> Completeness:
    """Read what `Completeness.to_dict` wrote."""
    layers: list[LayerStateInfo] = []
    for run in node.get("layers").read_list():
        first_layer, size = (field.read_int(0) for field in run.get("layers").read_list(2, 2))
        if first_layer != len(layers) or not 0 < size <= _MAX_LAYERS - first_layer:
            raise run.get("layers").error(f"runs of layers that follow each other, of at most {_MAX_LAYERS:,}")
        kind_node, included_node = run.get("kind"), run.get("included")
        if kind_node.read_str() not in STATE_KINDS:
            raise kind_node.error(f"one of {', '.join(STATE_KINDS)}")
        state = LayerStateInfo(
            layer=0,
            kind=next(field for field in STATE_KINDS if field == kind_node.read_str()),
            window=_optional_integer(run.get("window")),
            shared_with=_optional_integer(run.get("shared_with")),
            included=included_node.read_bool(),
            location=run.get("location").read_str(),
        )
        layers.extend(replace(state, layer=number) for number in range(first_layer, first_layer + size))
    return Completeness(
        layers=tuple(layers), evicted=node.get("evicted").read_str(), other_missing=node.get("other").read_str_list()
    )


def _optional_integer(node: JsonReader) -> int | None:
    return None if node.value is None else node.read_int(0)


COMPLETENESS_SCHEMA: Final = "kvmnn-completeness"
COMPLETENESS_SCHEMA_VERSION: Final = 1
MAX_COMPLETENESS_BYTES: Final = 16 << 20  # of the text
NOT_SELECTED_LOCATION: Final = "not among the chosen arrays"
_MAX_LISTED_NAMES = 1 << 16  # more arrays than two for each layer that a document may have


def dump_completeness_json(completeness: Completeness, names: Iterable[str]) -> str:
    """Return the text for a source with this completeness and arrays of these names."""
    name_list = list(names)
    document = {
        "schema": COMPLETENESS_SCHEMA,
        "schema_version": COMPLETENESS_SCHEMA_VERSION,
        "arrays": name_list if len(name_list) <= 2 * _MAX_LISTED_NAMES else [],
        **completeness.to_dict(),
    }
    return json.dumps(document, separators=(",", ":"))


def load_completeness_json(text: str | bytes, names: Iterable[str], where: str) -> Completeness:
    """Return what `dump_completeness_json` wrote, for all or some of those arrays."""
    root = parse_document(text, where, MAX_COMPLETENESS_BYTES)
    root.check_schema(COMPLETENESS_SCHEMA, COMPLETENESS_SCHEMA_VERSION)
    return select_completeness(parse_completeness_node(root), root.get("arrays").read_str_list(), names)


def select_completeness(
    completeness: Completeness, names: Iterable[str], selected_names: Iterable[str]
) -> Completeness:
    """Return the completeness of some of the arrays with `names`: layers that lack one are not included."""
    incomplete = {layer for layer, _ in _parse_layer_parts(names) - _parse_layer_parts(selected_names)}
    if not incomplete:
        return completeness
    return completeness.with_selected_layers(
        {state.layer for state in completeness.layers} - incomplete, NOT_SELECTED_LOCATION
    )


def _parse_layer_parts(names: Iterable[str]) -> set[tuple[int, Part]]:
    """Return layer and part of each array whose name has both; formats spell the same name in several ways."""
    return {
        (parsed_name.layer, parsed_name.part)
        for parsed_name in map(parse_conventional_name, names)
        if parsed_name is not None
    }


def infer_completeness(names: Iterable[str]) -> Completeness | None:
    """Return what the names of arrays show to be missing; None if they show nothing.

    That is a layer between others, K or V of a layer where others have both, and tokens before or between the segments
    of a KV dump. A model may have layers without K and V there: with those a cache is not its whole state either. No
    name shows that the last layers are missing.
    """
    sentences = _describe_caches(names, lambda entries: [*_describe_absent_layers(entries), *_list_gaps(entries)])
    return Completeness(other_missing=tuple(sentences)) if sentences else None


def accept_absent_layers(completeness: Completeness | None, names: Iterable[str]) -> Completeness | None:
    """Return the completeness for a model without K and V in the layers between others that `names` lack."""
    if completeness is None:
        return None
    sentences = _describe_caches(names, _describe_absent_layers)
    other_missing = tuple(sentence for sentence in completeness.other_missing if sentence not in sentences)
    return replace(completeness, other_missing=other_missing)


def _describe_caches(names: Iterable[str], describe: Callable[[Sequence[LayerName]], list[str]]) -> list[str]:
    """Return the sentences that `describe` returns of the names of each cache; none if they may be of anything."""
    groups: dict[str, list[LayerName]] = {}
    for count, entry in enumerate(map(parse_layer_name, names)):
        if count >= 2 * _MAX_LISTED_NAMES or (entry is not None and entry.layer >= _MAX_NUMBERED_LAYERS):
            return []
        if entry is not None:
            groups.setdefault(entry.cache, []).append(entry)
    return [
        f"{cache}: {sentence}" if cache and len(groups) > 1 else sentence
        for cache, entries in groups.items()
        for sentence in describe(entries)
    ]


def _describe_absent_layers(entries: Sequence[LayerName]) -> list[str]:
    """Return a sentence about the layers between those of one cache that have no array."""
    layers = sorted({entry.layer for entry in entries})
    absent = sorted(set(range(layers[0], layers[-1])) - set(layers))
    verb = "is" if len(absent) == 1 else "are"
    return [f"{format_layers(absent)} {verb} missing before layer {layers[-1]}"] if absent else []


def _list_gaps(entries: Sequence[LayerName]) -> list[str]:
    """Return a sentence for each kind of gap in the layers of one cache that have arrays."""
    layers = sorted({entry.layer for entry in entries})
    sentences = []
    layers_by_part = {part: {entry.layer for entry in entries if entry.part == part} for part in PARTS}
    keys, values = layers_by_part["key"], layers_by_part["value"]
    if keys & values:
        for text, one_part_layers in (("K and no V", keys - values), ("V and no K", values - keys)):
            if one_part_layers:
                verb = "has" if len(one_part_layers) == 1 else "have"
                sentences.append(f"{format_layers(sorted(one_part_layers))} {verb} {text}")
    layers_by_gap: dict[tuple[int, int], list[int]] = {}
    position_by_layer = dict.fromkeys(layers, 0)
    for (start, end), layer in sorted((entry.tokens, entry.layer) for entry in entries if entry.tokens is not None):
        if start > position_by_layer[layer]:
            layers_by_gap.setdefault((position_by_layer[layer], start), []).append(layer)
        position_by_layer[layer] = max(position_by_layer[layer], end)
    for (start, end), gap_layers in sorted(layers_by_gap.items()):
        verb = "lacks" if len(gap_layers) == 1 else "lack"
        sentences.append(f"{format_layers(gap_layers)} {verb} {pluralize(end - start, 'token')} before token {end:,}")
    return sentences


def merge_completeness(inputs: Sequence[tuple[str, Completeness | None]]) -> Completeness | None:
    """Return the completeness of several inputs, by their names; None if none of them has any."""
    # Layers of different inputs may be of different models, so one input never supplies what another lacks.
    if all(completeness is None for _, completeness in inputs):
        return None
    lines = [
        f"{name}: {line}"
        for name, input_completeness in inputs
        if input_completeness is not None
        for line in input_completeness.missing
    ]
    return Completeness(other_missing=tuple(lines))
