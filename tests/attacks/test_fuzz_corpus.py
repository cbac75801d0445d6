"""The inputs that guided fuzzing kept (tools/fuzz/corpus): each reaches code that no other input reaches."""

from __future__ import annotations

import codec_model
import fuzz_inputs
import guided
import pytest


@pytest.mark.parametrize("target", fuzz_inputs.TARGETS)
def test_fuzz_inputs_decode_or_are_refused(target: str) -> None:
    kept, made = fuzz_inputs.kept(target), [*fuzz_inputs.made(target)]
    assert len(kept) > 20 and max(map(len, kept)) <= fuzz_inputs.MOST
    results = [getattr(guided, target)(memoryview(data)) for data in (*kept, *made)]
    if target == "frames":
        assert sum(result is not None for result in results) > len(made) > 10


def test_fuzz_frames_equal_reference() -> None:
    for data in fuzz_inputs.kept("frames"):
        found = guided.frames(memoryview(data))
        assert found == reference(data), data.hex()


def reference(data: bytes) -> bytes | None:
    if not 0 < int.from_bytes(data[:4], "little") <= guided.MOST_WORDS:
        return None
    for stride in (2, 4):
        try:
            return codec_model.decode(data, stride)
        except codec_model.Reject:
            pass
    return None
