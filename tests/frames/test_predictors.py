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
def test_specs_are_read_as_by_the_engine(spec: str, default_raw: bool) -> None:
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
def test_specs_by_hand(spec: str, default_raw: bool, names: set[str]) -> None:
    assert parse_spec(spec, default_raw) == names
    assert codec_model.parse_spec(spec, default_raw) == names


@pytest.mark.parametrize("names", PREDICTOR_SETS)
def test_a_spec_string_and_its_names_are_the_same(names: tuple[str, ...]) -> None:
    frame = kvmnn.encode(DATA, dtype="fp16", predictors=names)
    assert frame == kvmnn.encode(DATA, dtype="fp16", predictors=", ".join(reversed(names)))
    assert frame == kvmnn.encode(DATA, dtype="fp16", predictors=[*names, "pair_delta"])
    assert frame == codec_model.encode(DATA, 2, names)


@pytest.mark.parametrize("spec", ["", " ", "pair_delta", "nonsense", ",,"])
def test_a_spec_string_is_never_refused(spec: str) -> None:
    assert kvmnn.encode(DATA, dtype="fp16", predictors=spec) == codec_model.encode(DATA, 2, ("raw",))


def test_no_predictors_means_the_runtimes_three() -> None:
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
def test_names_are_checked(names: tuple[str, ...], message: str) -> None:
    for option in ("predictors", "hi_predictors"):
        with pytest.raises(KvmnnError, match=message):
            kvmnn.encode(DATA, dtype="fp16", **{option: names})


@pytest.mark.parametrize("hi", PREDICTOR_SETS)
@pytest.mark.parametrize("lo", PREDICTOR_SETS)
def test_separate_sets_for_low_and_high_bytes(lo: tuple[str, ...], hi: tuple[str, ...]) -> None:
    frame = kvmnn.encode(DATA, dtype="fp16", predictors=lo, hi_predictors=hi)
    assert frame == codec_model.encode(DATA, 2, lo, hi)
    streams = kvmnn.inspect(frame).streams
    assert streams[0].predictor in lo and streams[1].predictor in hi


def test_four_byte_words_have_one_set() -> None:
    with pytest.raises(KvmnnError, match="two-byte words"):
        kvmnn.encode(DATA, dtype="fp32", hi_predictors="raw")


@EXAMPLES
@given(st.binary(max_size=300) | run_bytes(), st.integers(0, 2))
def test_predictors_and_their_inverses(data: bytes, mode: int) -> None:
    predicted = _streams.predict(data, mode)
    assert predicted == codec_model.predict(data, mode)
    assert _streams.unpredict(predicted, mode) == data
    assert _streams.unpredict(data, mode) == codec_model.unpredict(data, mode)


def test_predictors_by_hand() -> None:
    assert _streams.predict(bytes([5, 3, 3, 255]), 1) == bytes([5, 254, 0, 252])
    assert _streams.predict(bytes([5, 3, 3, 255]), 2) == bytes([5, 6, 0, 252])


@pytest.mark.parametrize("mode", [-1, 3])
def test_other_modes_are_refused(mode: int) -> None:
    for function in (_streams.predict, _streams.unpredict):
        with pytest.raises(KvmnnError, match=f"mode {mode}"):
            function(b"abc", mode)


@pytest.mark.parametrize("stride", [2, 4])
def test_split(stride: int) -> None:
    for words in (0, 1, 2, 15, 16, 17, 1000):
        data = bytes(i * 37 & 255 for i in range(words * stride))
        assert _streams.split_lanes(data, stride) == codec_model.split(data, stride)


@pytest.mark.parametrize(("size", "stride", "message"), [(6, 3, "word size 3"), (3, 2, "whole"), (6, 4, "whole")])
def test_split_refuses(size: int, stride: int, message: str) -> None:
    with pytest.raises(KvmnnError, match=message):
        _streams.split_lanes(bytes(size), stride)
