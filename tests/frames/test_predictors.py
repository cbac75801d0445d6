"""Spec strings, predictor sets and the predictors themselves."""

import codec_model
import pytest
from codec_samples import EXAMPLES, PREDICTOR_SETS, kv_like, run_bytes
from hypothesis import given
from hypothesis import strategies as st

import kvmnn
from kvmnn import KvmnnError
from kvmnn.frames import _streams
from kvmnn.frames.options import parse_spec

DATA = kv_like(300)

TOKENS = st.sampled_from(
    ["raw", "delta_seq", "xor_seq", "pair_delta", "RAW", "Raw", "raw ", " raw", "\traw\t", "raw\n", "\xa0raw", "", " ",
     "delta", "delta_seq xor_seq", "xor_seq\r", "raw\x00", " \t delta_seq \t ", "delta_seq,", ",xor_seq"]
)  # fmt: skip
SPECS = st.lists(TOKENS, max_size=5).map(",".join) | st.text(max_size=20)


@pytest.mark.slow
@EXAMPLES
@given(SPECS, st.booleans())
def test_parse_spec_equals_the_model(spec: str, default_raw: bool) -> None:
    assert parse_spec(spec, default_raw) == codec_model.parse_spec(spec, default_raw)


@pytest.mark.parametrize(
    ("spec", "default_raw", "names"),
    [
        ("", True, {"raw"}),
        ("", False, set()),
        (" ", False, {"raw"}),
        ("pair_delta", False, {"raw"}),
        ("RAW", True, {"raw"}),
        ("delta_seq", True, {"delta_seq"}),
        ("xor_seq, delta_seq", True, {"delta_seq", "xor_seq"}),
        ("raw,raw,raw", True, {"raw"}),
        ("raw\n,xor_seq", True, {"xor_seq"}),
        ("raw,delta_seq,xor_seq,pair_delta", True, {"raw", "delta_seq", "xor_seq"}),
    ],
)
def test_parse_spec_hand_written_specs(spec: str, default_raw: bool, names: set[str]) -> None:
    assert parse_spec(spec, default_raw) == names
    assert codec_model.parse_spec(spec, default_raw) == names


@pytest.mark.parametrize("names", PREDICTOR_SETS)
def test_encode_spec_string_equals_names(names: tuple[str, ...]) -> None:
    frame = kvmnn.encode(DATA, dtype="fp16", predictors=names)
    assert frame == kvmnn.encode(DATA, dtype="fp16", predictors=", ".join(reversed(names)))
    assert frame == kvmnn.encode(DATA, dtype="fp16", predictors=[*names, "pair_delta"])
    assert frame == codec_model.encode(DATA, 2, names)


@pytest.mark.parametrize("spec", ["", " ", "pair_delta", "nonsense", ",,"])
def test_encode_unknown_spec_string_means_raw(spec: str) -> None:
    assert kvmnn.encode(DATA, dtype="fp16", predictors=spec) == codec_model.encode(DATA, 2, ("raw",))


def test_encode_default_predictors_are_three() -> None:
    assert kvmnn.encode(DATA, dtype="fp16") == codec_model.encode(DATA, 2, ("raw", "delta_seq", "xor_seq"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nonsense",), "unknown predictor 'nonsense'"),
        (("raw", "RAW"), "unknown predictor 'RAW'"),
        ((), "at least one"),
        (("pair_delta",), "at least one"),
    ],
)
def test_encode_unknown_predictor_name_is_refused(names: tuple[str, ...], message: str) -> None:
    for option in ("predictors", "hi_predictors"):
        with pytest.raises(KvmnnError, match=message):
            kvmnn.encode(DATA, dtype="fp16", **{option: names})


@pytest.mark.parametrize("hi", PREDICTOR_SETS)
@pytest.mark.parametrize("lo", PREDICTOR_SETS)
def test_encode_separate_predictors_for_high_lane(lo: tuple[str, ...], hi: tuple[str, ...]) -> None:
    frame = kvmnn.encode(DATA, dtype="fp16", predictors=lo, hi_predictors=hi)
    assert frame == codec_model.encode(DATA, 2, lo, hi)
    streams = kvmnn.inspect(frame).streams
    assert streams[0].predictor in lo and streams[1].predictor in hi


def test_encode_fp32_with_hi_predictors_is_refused() -> None:
    with pytest.raises(KvmnnError, match="two-byte words"):
        kvmnn.encode(DATA, dtype="fp32", hi_predictors="raw")


@EXAMPLES
@given(st.binary(max_size=300) | run_bytes(), st.integers(0, 2))
def test_predict_equals_the_model_and_inverts(data: bytes, mode: int) -> None:
    predicted = _streams.predict(data, mode)
    assert predicted == codec_model.predict(data, mode)
    assert _streams.unpredict(predicted, mode) == data
    assert _streams.unpredict(data, mode) == codec_model.unpredict(data, mode)


def test_predict_hand_written_examples() -> None:
    assert _streams.predict(bytes([5, 3, 3, 255]), 1) == bytes([5, 254, 0, 252])
    assert _streams.predict(bytes([5, 3, 3, 255]), 2) == bytes([5, 6, 0, 252])


@pytest.mark.parametrize("mode", [-1, 3])
def test_predict_unknown_mode_is_refused(mode: int) -> None:
    for function in (_streams.predict, _streams.unpredict):
        with pytest.raises(KvmnnError, match=f"mode {mode}"):
            function(b"abc", mode)


@pytest.mark.parametrize("stride", [2, 4])
def test_split_lanes_equals_slices(stride: int) -> None:
    for words in (0, 1, 2, 15, 16, 17, 1000):
        data = bytes(i * 37 & 255 for i in range(words * stride))
        assert _streams.split_lanes(data, stride) == codec_model.split(data, stride)


@pytest.mark.parametrize(("size", "stride", "message"), [(6, 3, "word size 3"), (3, 2, "whole"), (6, 4, "whole")])
def test_split_lanes_invalid_size_is_refused(size: int, stride: int, message: str) -> None:
    with pytest.raises(KvmnnError, match=message):
        _streams.split_lanes(bytes(size), stride)
