import json

import pytest

from kvmnn.arrays.completeness import (
    Completeness,
    IncompleteCacheError,
    LayerStateInfo,
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
