"""Batches with padding: tokens that attention_mask excludes are dropped, on either side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_files import Output, cache_object, dynamic_cache, pairs, save, static_cache

import kvmnn
from kvmnn.errors import SourceError

TOKENS = 12


def batch(lengths: list[int], side: str, *, more: int = 0) -> dict[str, np.ndarray]:
    """Token ids and mask of padded texts; `more` ids have no K and V yet."""
    mask = np.zeros((len(lengths), TOKENS + more), "<i8")
    for row, length in enumerate(lengths):
        mask[row, -length - more :] = side == "left"
        mask[row, :length] |= side == "right"
    ids = np.arange(100, 100 + mask.size, dtype="<i8").reshape(mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [dynamic_cache, lambda made: static_cache(made, 30)])
def test_open_padding_of_one_text_is_dropped(tmp_path: Path, side: str, kind: Any) -> None:
    made = pairs(2, shape=(1, 2, TOKENS, 4), dtype="fp16")
    beside = batch([7], side)
    path = save(tmp_path / "cache.pt", {"past_key_values": kind(made), **beside})
    for source in (kvmnn.open(path), kvmnn.open({"past_key_values": made, **beside})):
        chosen = slice(5, None) if side == "left" else slice(None, 7)
        assert source["layer_1.value"].to_numpy().tobytes() == made[1][1][:, :, chosen].tobytes()
        cache = source.engine_cache
        assert cache is not None and cache.tokens == 7 and cache.is_contiguous_prefix
        assert cache.token_ids is not None and cache.token_ids.tolist() == beside["input_ids"][0, chosen].tolist()
        assert "5 rows of padding left out (attention_mask): 7 tokens of 12 rows" in source.notes


def test_open_gaps_of_mask_are_dropped(tmp_path: Path) -> None:
    made = pairs(2, shape=(1, 2, TOKENS, 4), dtype="bf16")
    mask = np.array([[0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0]], "<i8")
    source = kvmnn.open(save(tmp_path / "cache.pt", {"cache": dynamic_cache(made), "attention_mask": mask}))
    expected = made[0][0][:, :, np.flatnonzero(mask[0])]
    assert source["layer_0.key"].to_numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [[12, 7], [3, 9, 12], [5, 5]])
def test_open_batch_texts_have_their_own_tokens(tmp_path: Path, run: Any, side: str, lengths: list[int]) -> None:
    made = pairs(3, shape=(len(lengths), 2, TOKENS, 4), dtype="fp16")
    beside = batch(lengths, side)
    path = save(tmp_path / "cache.pt", {"past_key_values": dynamic_cache(made), **beside})
    run("encode", path, "-o", tmp_path / "frames/")
    run("mnn", "unpack", path, "-o", tmp_path / "plain.npz")
    for text, length in enumerate(lengths):
        chosen = slice(TOKENS - length, None) if side == "left" else slice(None, length)
        for given in (path, tmp_path / "frames", tmp_path / "plain.npz", {"past_key_values": made, **beside}):
            source = kvmnn.open(given, batch=text)
            assert source["layer_1.key"].to_numpy().tobytes() == made[1][0][text, :, chosen].tobytes()
            cache = source.engine_cache
            assert cache is not None and (cache.tokens, cache.batch, cache.is_contiguous_prefix) == (length, 1, True)
            assert cache.token_ids is not None
            assert cache.token_ids.tolist() == beside["input_ids"][text, chosen].tolist()


def test_open_padded_batch_is_no_whole_text(tmp_path: Path, run: Any) -> None:
    made = pairs(3, shape=(2, 2, TOKENS, 8), dtype="fp16")
    made = [tuple(np.where(np.isfinite(part), part, 0).astype("<f2") for part in pair) for pair in made]
    path = save(tmp_path / "cache.pt", {"past_key_values": dynamic_cache(made), **batch([12, 7], "left")})
    cache = kvmnn.open(path).engine_cache
    assert cache is not None and cache.has_padding and not cache.is_contiguous_prefix
    assert "batch of 2 (7 to 12 tokens and padding)" in run("inspect", path).out
    put = ("store", "put", tmp_path / "store", path, "--fingerprint", "ab" * 32)
    assert "--part batch=N" in run(*put, code=2).err
    assert "7 tokens" in run(*put, "--part", "batch=1").out
    run("measure", path, "--part", "batch=1")


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpack_padded_batch_names_its_rows(tmp_path: Path, run: Any, side: str) -> None:
    made = pairs(2, shape=(3, 2, TOKENS, 4), dtype="fp32")
    path = save(tmp_path / "cache.pt", {"past_key_values": dynamic_cache(made), **batch([7, 12, 9], side)})
    note = (
        "the arrays contain rows of padding: 5 of text 0, 3 of text 2 (--part batch=N takes one text without them, in "
        "Python batch=)"
    )
    shown = run("mnn", "unpack", path, "-o", tmp_path / "all.npz")
    assert "LOSSLESS (all rows, padding included, read back and compared)" in shown.out and note in shown.err
    assert note in json.loads(run("mnn", "unpack", path, "-o", tmp_path / "more.npz", "--json").out)["notes"]
    assert note in run("encode", path, "-o", tmp_path / "frames/").err
    assert note in run("decode", tmp_path / "frames", "-o", tmp_path / "back.npz").err + run("inspect", path).out
    shown = run("mnn", "unpack", path, "-o", tmp_path / "one.npz", "--part", "batch=2")
    assert "LOSSLESS (live elements, read back and compared)" in shown.out
    assert "text 2 of a batch of 3; the others are left out, and 3 rows of padding\n" in shown.err
    shown = run("mnn", "unpack", path, "-o", tmp_path / "whole.npz", "--part", "batch=1")
    assert "padding" not in shown.out + shown.err


def test_open_windows_drop_their_padding(tmp_path: Path) -> None:
    """Rows of a window are the last columns of the mask."""
    made = pairs(5, shape=(2, 2, TOKENS, 4), dtype="fp16")
    window = {"keys": made[0][0][:, :, -7:].copy(), "values": made[0][1][:, :, -7:].copy()}
    window |= {"cumulative_length": TOKENS, "sliding_window": 8}
    value = cache_object("DynamicCache", "DynamicSlidingWindowLayer", [window])
    value.state["layers"] += dynamic_cache(made[1:]).state["layers"]
    path = save(tmp_path / "cache.pt", {"past_key_values": value, **batch([12, 5], "left")})
    long, short = (kvmnn.open(path, batch=text) for text in (0, 1))
    assert long.engine_cache is not None and long.engine_cache.layer_position_runs == (((5, 7),), ((0, 12),))
    assert short.engine_cache is not None and short.engine_cache.is_contiguous_prefix and short.engine_cache.tokens == 5
    assert short["layer_0.key"].to_numpy().tobytes() == made[0][0][1, :, -5:].tobytes()


def test_open_token_id_without_keys_is_dropped(tmp_path: Path) -> None:
    """As after generate, whose sequences end with a token that the model has not seen."""
    made = pairs(3, shape=(1, 2, TOKENS, 4), dtype="fp16")
    beside = batch([7], "left", more=1)
    source = kvmnn.open(save(tmp_path / "cache.pt", {"past_key_values": dynamic_cache(made), **beside}))
    cache = source.engine_cache
    assert cache is not None and cache.token_ids is not None
    assert cache.token_ids.tolist() == beside["input_ids"][0, 5:12].tolist()
    assert "the last 1 token id of 13 has no K and V yet" in source.notes


def test_open_mask_of_prompt_keeps_generated_tokens(tmp_path: Path) -> None:
    made = pairs(3, shape=(1, 2, TOKENS, 4), dtype="fp16")
    beside = {"attention_mask": np.array([[0, 0, 1, 1]], "<i8"), "input_ids": np.array([[0, 0, 5, 6]], "<i8")}
    source = kvmnn.open(save(tmp_path / "cache.pt", {"past_key_values": dynamic_cache(made), **beside}))
    cache = source.engine_cache
    assert cache is not None and cache.tokens == 10 and cache.token_ids is None
    assert "attention_mask has 4 of 12 tokens: the others count as text" in source.notes
    assert "4 token ids for 12 tokens: they are left out" in source.notes


def test_open_invalid_masks_are_refused(tmp_path: Path) -> None:
    made = pairs(3, shape=(2, 2, TOKENS, 4), dtype="fp16")
    for mask, said in ((np.ones((2, 1, 12, 12), "<f4"), "expected"), (np.ones((3, 12), "<i8"), "expected")):
        source = kvmnn.open(save(tmp_path / "cache.pt", {"cache": dynamic_cache(made), "attention_mask": mask}))
        assert any("is not used" in note and said in note for note in source.notes)
    nothing = {"cache": dynamic_cache(made), "attention_mask": np.array([[1] * 12, [0] * 12], "<i8")}
    with pytest.raises(SourceError, match="attention_mask leaves no token of text 1"):
        kvmnn.open(save(tmp_path / "cache.pt", nothing))


def test_open_generate_output_has_ids_of_all_but_last_token(tmp_path: Path) -> None:
    made = pairs(3, shape=(2, 2, TOKENS, 4), dtype="fp16")
    name = "transformers.generation.utils.GenerateDecoderOnlyOutput"
    ids = np.arange(2 * TOKENS + 2, dtype="<i8").reshape(2, TOKENS + 1)
    output = Output(name, {"sequences": ids, "past_key_values": dynamic_cache(made)})
    source = kvmnn.open(save(tmp_path / "cache.pt", output), batch=1)
    cache = source.engine_cache
    assert cache is not None and cache.token_ids is not None
    assert cache.token_ids.tolist() == ids[1, :TOKENS].tolist()
