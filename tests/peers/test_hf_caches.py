"""Caches of transformers: in memory, saved by torch, and restored; a model continues from a restored cache."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvmnn
from kvmnn.errors import SourceError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# transformers 5.24 calls the argument `cache`, which earlier versions do not have.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
SHAPES = [(1, 2, 20, 32), (3, 1, 7, 6), (2, 4, 1, 8), (1, 1, 300, 3)]


def drawn(seed: int, dtype: str, shape: tuple[int, ...], layers: int = 3) -> list[tuple[Any, Any]]:
    """(K, V) of layers; all bit patterns, NaN and infinities too, in some rows."""
    draws = torch.Generator().manual_seed(seed)
    bits = torch.int32 if dtype == "fp32" else torch.int16
    low, high = torch.iinfo(bits).min, torch.iinfo(bits).max

    def one() -> Any:
        tensor = torch.randn(*shape, generator=draws).to(getattr(torch, DTYPES[dtype]))
        tensor[..., 0, :] = torch.randint(low, high, (*shape[:2], shape[3]), generator=draws, dtype=bits).view(
            tensor.dtype
        )
        return tensor

    return [(one(), one()) for _ in range(layers)]


def words(tensor: Any) -> np.ndarray:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


def assert_same(source: kvmnn.arrays.Source, pairs: list[tuple[Any, Any]], dtype: str) -> None:
    assert list(source) == [f"layer_{layer}.{part}" for layer in range(len(pairs)) for part in ("key", "value")]
    for layer, pair in enumerate(pairs):
        for part, tensor in zip(("key", "value"), pair, strict=True):
            found = source[f"layer_{layer}.{part}"]
            assert (found.dtype, found.shape) == (dtype, tuple(tensor.shape))
            assert found.to_numpy().tobytes() == words(tensor).tobytes()


def dynamic(pairs: list[tuple[Any, Any]]) -> Any:
    cache = transformers.DynamicCache()
    for layer, (keys, values) in enumerate(pairs):
        cache.update(keys, values, layer)
    return cache


def static(pairs: list[tuple[Any, Any]], rows: int) -> Any:
    batch, heads, tokens, dims = pairs[0][0].shape
    config = transformers.LlamaConfig(
        num_hidden_layers=len(pairs), num_attention_heads=heads, num_key_value_heads=heads, hidden_size=heads * dims
    )
    config.head_dim = dims
    cache = transformers.StaticCache(config=config, max_cache_len=rows)
    for layer, (keys, values) in enumerate(pairs):
        cache.update(keys, values, layer, {"cache_position": torch.arange(tokens)})
    assert int(cache.get_seq_length()) == tokens and batch == cache.layers[0].keys.shape[0]
    return cache


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_open_cache_in_memory_round_trips(dtype: str, shape: tuple[int, ...]) -> None:
    pairs = drawn(len(dtype) + sum(shape), dtype, shape)
    cache = dynamic(pairs)
    for held in (cache, pairs, tuple(pairs), {"past_key_values": cache, "n": 3}, dict(enumerate(pairs))):
        assert_same(kvmnn.open(held), pairs, dtype)
    assert_same(kvmnn.open(static(pairs, shape[2] + 9)), pairs, dtype)
    again = kvmnn.to_cache(kvmnn.open(cache))
    assert isinstance(again, transformers.DynamicCache)
    assert_same(kvmnn.open(again), pairs, dtype)
    returned = kvmnn.to_cache(cache, return_pairs=True)
    assert isinstance(returned, tuple) and returned[0][0].dtype == pairs[0][0].dtype
    assert_same(kvmnn.open(transformers.DynamicCache(returned)), pairs, dtype)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_open_saved_cache_equals_pairs(tmp_path: Path, dtype: str, shape: tuple[int, ...], zipped: bool) -> None:
    pairs = drawn(7 + sum(shape), dtype, shape)
    cache = dynamic(pairs)
    strided = [(k.transpose(1, 2).contiguous().transpose(1, 2), v[:, :, :, :]) for k, v in pairs]
    output = transformers.modeling_outputs.CausalLMOutputWithPast(past_key_values=cache, logits=torch.zeros(2))
    kinds = {
        "cache": cache,
        "pairs": pairs,
        "legacy": tuple(pairs),
        "triples": tuple(cache),
        "dict": {"past_key_values": cache, "input_ids": torch.arange(4)[None], "text": "x"},
        "lists": {"key_cache": [k for k, _ in pairs], "value_cache": [v for _, v in pairs]},
        "named": {f"past_key_values.{n}.{('key', 'value')[m]}": pairs[n][m] for n in range(3) for m in range(2)},
        "numbers": dict(enumerate(pairs)),
        "strided": strided,
        "output": output,
        "static": static(pairs, shape[2] + 5),
    }
    for kind, value in kinds.items():
        path = tmp_path / f"{kind}{'.pt' if zipped else '.bin'}"
        torch.save(value, path, _use_new_zipfile_serialization=zipped)
        found = kvmnn.open(path)
        if kind == "named":
            assert list(found)[:2] == ["past_key_values.0.key", "past_key_values.0.value"]
            found.arrays = [*found.arrays]
            assert found.arrays[1].to_numpy().tobytes() == words(pairs[0][1]).tobytes()
        else:
            assert_same(found, pairs, dtype)


def test_open_unsupported_cache_is_refused(tmp_path: Path) -> None:
    pairs = drawn(1, "fp32", (1, 2, 4, 4))
    refused = [
        ({"a": dynamic(pairs), "b": dynamic(pairs)}, "holds 2 caches"),
        ([(k.expand(1500, -1, -1, -1), v.expand(1500, -1, -1, -1)) for k, v in pairs], "expanded"),
        ([(k[:, :, :2], v) for k, v in pairs], "expected .batch, kv_head, token, head_dim. for both"),
        ([(k.double(), v.double()) for k, v in pairs], "type float64 is not one"),
        (transformers.DynamicCache(), "without a layer"),
    ]
    for number, (value, message) in enumerate(refused):
        torch.save(value, tmp_path / f"{number}.pt")
        with pytest.raises(SourceError, match=message):
            kvmnn.open(tmp_path / f"{number}.pt")
        if "expanded" not in message:
            with pytest.raises(SourceError, match=message):
                kvmnn.open(value)


def test_open_sliding_window_reports_its_tokens(tmp_path: Path) -> None:
    config = transformers.MistralConfig(sliding_window=8, num_hidden_layers=2)
    pairs = drawn(3, "fp32", (1, 2, 20, 4), layers=2)
    cache = transformers.DynamicCache(config=config)
    for layer, (keys, values) in enumerate(pairs):
        cache.update(keys, values, layer)
    torch.save(cache, tmp_path / "c.pt")
    for opened in (kvmnn.open(cache), kvmnn.open(tmp_path / "c.pt")):
        assert opened["layer_1.key"].to_numpy().tobytes() == words(pairs[1][0][:, :, -7:]).tobytes()
        assert opened.notes == ["layer 0 holds the last 7 of 20 tokens (sliding window), and so do 1 more"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_continues_from_restored_cache(tmp_path: Path, run: Any, dtype: str) -> None:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    ids = torch.randint(0, 97, (2, 30))
    with torch.no_grad():
        cache = transformers.DynamicCache()
        model(ids[:, :24], past_key_values=cache)
        torch.save(cache, tmp_path / "c.pt")
        expected = model(ids[:, 24:], past_key_values=cache).logits
        run("encode", tmp_path / "c.pt", "-o", tmp_path / "c.frames/")
        run("verify", tmp_path / "c.frames", "--against", tmp_path / "c.pt")
        found = model(ids[:, 24:], past_key_values=kvmnn.to_cache(tmp_path / "c.frames")).logits
        assert torch.equal(found, expected)
        other = kvmnn.to_cache(tmp_path / "c.frames")
        other.layers[1].keys[0, 0, 3] += 1
        assert not torch.equal(model(ids[:, 24:], past_key_values=other).logits, expected)


@pytest.mark.parametrize("tokens", [5, 7, 8, 24])
def test_sliding_window_model_continues_from_restored_cache(tmp_path: Path, run: Any, tokens: int) -> None:
    """Before and after the windows have slid; from the cache, its file, frames and a Zarr store."""
    torch.manual_seed(5)
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    ids = torch.randint(0, 97, (1, tokens + 6))
    with torch.no_grad():
        cache = model(ids[:, :tokens], use_cache=True).past_key_values
        torch.save(cache, tmp_path / "c.pt")
        restored = [kvmnn.to_cache(cache), kvmnn.to_cache(tmp_path / "c.pt")]
        for name in ("c.frames", "c.zarr"):
            run("encode", tmp_path / "c.pt", "-o", tmp_path / name)
            restored.append(kvmnn.to_cache(tmp_path / name))
        steps = [ids[:, tokens : tokens + 4], ids[:, tokens + 4 :]]
        expected = [model(step, past_key_values=cache).logits for step in steps]
        for other in restored:
            found = [model(step, past_key_values=other).logits for step in steps]
            for one, two in zip(found, expected, strict=True):
                # what has not slid keeps all tokens, and masks them: sums in another order under transformers 4
                assert torch.equal(one, two) if tokens > 7 else torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("tokens", [5, 8, 24])
def test_model_continues_from_static_window_cache(tmp_path: Path, tokens: int) -> None:
    """Windows of static caches have one row more than those of dynamic caches, which `to_cache` makes."""
    torch.manual_seed(6)
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    ids = torch.randint(0, 97, (1, tokens + 3))
    with torch.no_grad():
        cache = transformers.StaticCache(config=config, max_cache_len=40)
        model(ids[:, :tokens], past_key_values=cache)
        torch.save(cache, tmp_path / "c.pt")
        expected = model(ids, use_cache=False).logits[:, tokens:]
        for given in (cache, tmp_path / "c.pt"):
            restored = kvmnn.to_cache(given)
            steps = [model(ids[:, n : n + 1], past_key_values=restored).logits for n in range(tokens, tokens + 3)]
            assert torch.allclose(torch.cat(steps, 1), expected, atol=1e-5)


def test_encoder_decoder_model_continues_from_restored_cache(tmp_path: Path, run: Any) -> None:
    torch.manual_seed(7)
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    given, ids = torch.randint(1, 97, (1, 11)), torch.randint(1, 97, (1, 8))
    with torch.no_grad():
        output = model(input_ids=given, decoder_input_ids=ids[:, :5], use_cache=True)
        torch.save(output.past_key_values, tmp_path / "c.pt")
        run("encode", tmp_path / "c.pt", "-o", tmp_path / "c.frames/")
        expected = model(input_ids=given, decoder_input_ids=ids).logits[:, 5:]
        for source in (output.past_key_values, tmp_path / "c.pt", tmp_path / "c.frames"):
            cache = kvmnn.to_cache(source)
            assert type(cache) is transformers.EncoderDecoderCache
            found = model(
                encoder_outputs=(torch.zeros(1, 11, 32),), decoder_input_ids=ids[:, 5:], past_key_values=cache
            ).logits
            assert torch.allclose(found, expected, atol=1e-5)


def test_convolution_cache_is_refused(tmp_path: Path) -> None:
    config = transformers.Lfm2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    with torch.no_grad():
        cache = transformers.Lfm2ForCausalLM(config).eval()(torch.ones(1, 6, dtype=torch.long)).past_key_values
    torch.save(cache, tmp_path / "c.pt")
    for source in (cache, tmp_path / "c.pt"):
        with pytest.raises(SourceError, match="1 of 2 layers has recurrent or convolution state"):
            kvmnn.to_cache(source)


def test_torch_saves_tensors_as_the_samples_assume() -> None:
    """The samples of the other tests are written without torch; torch writes this one."""
    made = io.BytesIO()
    torch.save(tuple(drawn(1, "fp16", (1, 1, 2, 2), layers=1)), made)
    assert b"_rebuild_tensor_v2" in made.getvalue()
