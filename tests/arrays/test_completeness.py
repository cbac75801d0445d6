import json

import pytest

from kvmnn.arrays.completeness import (
    Completeness,
    IncompleteCacheError,
    LayerStateInfo,
    infer_completeness,
    parse_completeness_node,
    require_complete,
)
from kvmnn.errors import ManifestError
from kvmnn.files.schema import parse_document


def windowed(included: bool) -> Completeness:
    """Twelve layers, of which each sixth has full attention."""
    return Completeness(
        layers=tuple(
            LayerStateInfo(layer=number)
            if number % 6 == 5
            else LayerStateInfo(
                layer=number,
                kind="window",
                window=16,
                included=included,
                location="" if included else "in the second cache of the session",
            )
            for number in range(12)
        )
    )


def test_require_complete_complete_state_passes() -> None:
    require_complete(windowed(included=True), "a.session", "a prefix cache")
    require_complete(None, "a.session", "a prefix cache")


def test_require_complete_missing_window_layers_are_counted_and_located() -> None:
    with pytest.raises(IncompleteCacheError) as caught:
        require_complete(windowed(included=False), "a.session", "a prefix cache")
    assert str(caught.value) == (
        "a.session: cannot make a prefix cache of a part of the state: 10 of 12 layers have a window of 16 tokens and "
        "are in the second cache of the session"
    )


def test_completeness_shared_layer_without_arrays_is_complete() -> None:
    assert Completeness(
        layers=(LayerStateInfo(layer=0), LayerStateInfo(layer=1, kind="shared", included=False))
    ).is_complete


def test_completeness_selected_layers_are_incomplete() -> None:
    part = windowed(included=True).with_selected_layers({5, 11}, "not selected (--tensor)")
    assert part.missing == ["10 of 12 layers have a window of 16 tokens and are not selected (--tensor)"]


def test_completeness_evicted_tokens_and_scales_are_missing() -> None:
    found = Completeness(
        layers=(LayerStateInfo(layer=0),), evicted="8 of 20 tokens are stored", other_missing=("no scales",)
    )
    assert found.missing == ["8 of 20 tokens are stored", "no scales"]


@pytest.mark.parametrize("included", [True, False])
def test_completeness_document_round_trips(included: bool) -> None:
    written = windowed(included).to_dict()
    assert written["complete"] is included
    assert parse_completeness_node(parse_document(json.dumps(written), "x")) == windowed(included)
    assert len(written["layers"]) == 4


@pytest.mark.parametrize(
    ("key", "value"), [("layers", [1, 5]), ("layers", [0, 1 << 40]), ("kind", "half"), ("included", 1), ("window", -1)]
)
def test_completeness_malformed_document_is_refused(key: str, value: object) -> None:
    written = windowed(included=True).to_dict()
    written["layers"][0][key] = value
    with pytest.raises(ManifestError):
        parse_completeness_node(parse_document(json.dumps(written), "x"))


PAIRS = [f"layer_{layer}.{part}" for layer in (0, 1, 3) for part in ("key", "value")]


@pytest.mark.parametrize(
    ("names", "sentences"),
    [
        (PAIRS, ["layer 2 is missing before layer 3"]),
        (PAIRS[:3], ["layer 1 has K and no V"]),
        (["0.0", "0.1", "4.1"], ["layers 1 to 3 are missing before layer 4", "layer 4 has V and no K"]),
        ([f"model.layers.{layer}.self_attn.attn" for layer in (3, 5)], ["layer 4 is missing before layer 5"]),
        (["r/layer_0/k_t0_16", "r/layer_0/k_t20_21"], ["layer 0 lacks 4 tokens before token 20"]),
        (["layer_0_v_t16_17", "layer_1_v_t16_17"], ["layers 0 to 1 lack 16 tokens before token 16"]),
        (["a/layer_0/k_t0_1", "b/layer_0/k_t0_1", "b/layer_2/k_t0_1"], ["b/: layer 1 is missing before layer 2"]),
    ],
)
def test_infer_completeness_names_gaps(names: list[str], sentences: list[str]) -> None:
    completeness = infer_completeness(names)
    assert completeness is not None and completeness.missing == sentences


@pytest.mark.parametrize(
    "names",
    [
        PAIRS[:4],
        [name for name in PAIRS[:4] if name.endswith("key")],  # latent attention
        ["k", "v"],
        ["k_100", "k_300", "prompt_1.key"],  # numbers of anything
        ["a/layer_0/k_t0_16", "a/layer_0/k_t16_17", "b/layer_1/k_t0_16"],
        ["layer_3.key", "layer_999999999.key"],
    ],
)
def test_infer_completeness_is_silent_without_gaps(names: list[str]) -> None:
    assert infer_completeness(names) is None
