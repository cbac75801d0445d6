"""Encoder-decoder caches: both halves by name, and one of them with --part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_files import KINDS, Instance, encoder_decoder_cache, in_memory, pairs, save

import kvmnn
from kvmnn.errors import OptionError

Pair = tuple[np.ndarray, np.ndarray]


def made(batch: int = 1) -> tuple[list[Pair], list[Pair]]:
    """K and V of two layers, of 6 tokens of the decoder and 30 of the encoder."""
    finite: list[list[Pair]] = []
    for seed, tokens in ((1, 6), (2, 30)):
        drawn = np.random.default_rng(seed).standard_normal((2, 2, batch, 2, tokens, 16)).astype("<f4")
        finite.append([(keys, values) for keys, values in drawn])
    return finite[0], finite[1]


def forms(decoder: list[Pair], encoder: list[Pair]) -> dict[str, Any]:
    four = [(*first, *second) for first, second in zip(decoder, encoder, strict=True)]
    six = [(*first, None, *second, None) for first, second in zip(decoder, encoder, strict=True)]
    cache = encoder_decoder_cache(decoder, encoder)
    as_module = Instance(cache.name, {"_modules": {**cache.state}, "is_updated": {0: True}})
    named = {"past_key_values": cache, "logits": np.ones((1, 6, 3), "<f4")}
    return {
        "cache": cache,
        "legacy": tuple(four),
        "list": four,
        "iterated": tuple(six),
        "module": as_module,
        "dict": named,
    }


@pytest.mark.parametrize("form", ["cache", "legacy", "list", "iterated", "module", "dict"])
def test_open_encoder_decoder_cache_names_both_halves(tmp_path: Path, form: str) -> None:
    decoder, encoder = made()
    value = forms(decoder, encoder)[form]
    path = save(tmp_path / "cache.pt", value)
    for given in (path, *([] if form == "module" else [in_memory(value)])):
        source = kvmnn.open(given)
        expected = {
            f"layer_{n}.{half}.{part}": words.tobytes()
            for half, layers in (("decoder", decoder), ("encoder", encoder))
            for n, pair in enumerate(layers)
            for part, words in zip(("key", "value"), pair, strict=True)
        }
        assert {name: source[name].to_numpy().tobytes() for name in source} == expected
        for half, layers in (("decoder", decoder), ("encoder", encoder)):
            one = kvmnn.open(given, half=half)
            assert list(one) == [f"layer_{n}.{part}" for n in range(2) for part in ("key", "value")]
            assert one["layer_1.value"].to_numpy().tobytes() == layers[1][1].tobytes()
            assert one.engine_cache is not None and one.engine_cache.tokens == layers[0][0].shape[2]
            assert one.completeness is not None and not one.completeness.is_complete


def test_open_onnx_names_of_decoder_and_encoder(tmp_path: Path, run: Any) -> None:
    """As the inputs of Whisper in ONNX are called."""
    decoder, encoder = made()
    arrays = {
        f"past_key_values.{n}.{half}.{part}": words
        for half, layers in (("decoder", decoder), ("encoder", encoder))
        for n, pair in enumerate(layers)
        for part, words in zip(("key", "value"), pair, strict=True)
    }
    np.savez(tmp_path / "onnx.npz", **arrays)
    for half, layers in (("decoder", decoder), ("encoder", encoder)):
        run("mnn", "unpack", tmp_path / "onnx.npz", "--part", half, "-o", tmp_path / f"{half}.npz")
        with np.load(tmp_path / f"{half}.npz") as back:
            assert back["past_key_values.1.key"].tobytes() == layers[1][0].tobytes()
    assert "measure" not in run("measure", tmp_path / "onnx.npz", "--part", "encoder").err
    batch = kvmnn.open(tmp_path / "onnx.npz", half="decoder", axes="bhtd", batch=0)
    assert batch["layer_0.key"].shape == (2, 6, 16)


def test_commands_need_part_of_encoder_decoder_cache(tmp_path: Path, run: Any) -> None:
    path = save(tmp_path / "cache.pt", encoder_decoder_cache(*made()))
    shown = run("inspect", path).out
    assert "layer_0.decoder.key: fp32 [1, 2, 6, 16]" in shown and "layer_1.encoder.value: fp32 [1, 2, 30, 16]" in shown
    assert run("inspect", path, "--part", "encoder").out.count("[1, 2, 30, 16]") == 4
    run("encode", path, "-o", tmp_path / "frames/")
    run("verify", tmp_path / "frames", "--against", path)
    for given in (path, tmp_path / "frames"):
        for command in (
            ("measure", given),
            ("plan", given, "--policy", "streaming"),
            ("diff", given, given, "--atol", "0"),
        ):
            assert "--part decoder or --part encoder takes one of them" in run(*command, code=2).err
            run(*command, "--part", "encoder")
    both = "K and V of the encoder, which the model needs too, are left out"
    assert both in run("measure", path, "--part", "decoder").out
    put = ("store", "put", tmp_path / "store", path, "--fingerprint", "ab" * 32)
    (tmp_path / "ids.json").write_text(str(list(range(6))))
    assert both in run(*put, "--part", "decoder", "--token-ids", tmp_path / "ids.json", code=1).err
    packed = ("--backend", "arm64-fp16", "--cast", "--name", "sys", "-o", tmp_path / "out/")
    assert both in run("mnn", "pack", path, "--part", "decoder", *packed, code=1).err


def test_open_half_of_decoder_only_cache_is_refused(tmp_path: Path, run: Any) -> None:
    path = save(tmp_path / "cache.pt", tuple(pairs(1)))
    assert "not of a decoder and an encoder: leave --part out" in run("inspect", path, "--part", "decoder", code=2).err
    with pytest.raises(OptionError, match="leave --part out"):
        kvmnn.open(path, half="encoder")


def test_open_cache_with_empty_encoder_is_plain(tmp_path: Path) -> None:
    decoder, _ = made()
    cache = encoder_decoder_cache(decoder, [])
    cache.state["cross_attention_cache"] = Instance(KINDS + "DynamicCache", {"layers": []})
    source = kvmnn.open(save(tmp_path / "cache.pt", cache))
    assert list(source)[:2] == ["layer_0.key", "layer_0.value"]


def test_open_half_and_batch_of_cache(tmp_path: Path) -> None:
    decoder, encoder = made(batch=3)
    path = save(tmp_path / "cache.pt", encoder_decoder_cache(decoder, encoder))
    source = kvmnn.open(path, half="encoder", batch=2)
    assert source["layer_1.key"].to_numpy().tobytes() == encoder[1][0][2].tobytes()
