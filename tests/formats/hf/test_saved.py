"""Saved caches of transformers: read as data in every form; files that hold no cache are refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import compressor_files
import hf_files
import numpy as np
import pytest
from hf_files import Instance, cache_object, dynamic_cache, pairs, save, static_cache

import kvmnn
from kvmnn.errors import KvmnnError, SourceError
from kvmnn.formats.sidecars import read_positions_sidecar

KINDS = "transformers.cache_utils."


def assert_same(source: Any, expected: list[hf_files.Pair], dtype: str = "bf16") -> None:
    assert list(source) == [f"layer_{n}.{part}" for n in range(len(expected)) for part in ("key", "value")]
    for number, pair in enumerate(expected):
        for part, words in zip(("key", "value"), pair, strict=True):
            found = source[f"layer_{number}.{part}"]
            assert (found.dtype, found.shape, found.to_numpy().tobytes()) == (dtype, words.shape, words.tobytes())


@pytest.mark.parametrize("shape", [(1, 2, 5, 4), (3, 1, 1, 7), (2, 5, 70, 3)], ids=str)
@pytest.mark.parametrize("dtype", hf_files.TYPES)
def test_open_saved_every_form_of_cache(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    made = pairs(sum(shape), layers=3, shape=shape, dtype=dtype)
    keys, values = ([pair[part] for pair in made] for part in (0, 1))
    four = {"key_cache": keys, "value_cache": values, "_seen_tokens": shape[2]}
    forms = {
        "cache": (dynamic_cache(made), "cache"),
        "list": (made, "pairs"),
        "lists": ([list(pair) for pair in made], "pairs"),
        "tuple": (tuple(made), "legacy"),
        "iterated": (tuple((k, v, None) for k, v in made), "legacy"),
        "dict": ({"past_key_values": dynamic_cache(made), "text": "x", "n": 3}, "dict"),
        "deeper": ({"output": {"past_key_values": tuple(made)}, "epoch": 1}, "dict"),
        "numbers": (dict(enumerate(made)), "dict"),
        "names": ({f"layer_{n}": pair for n, pair in enumerate(made)}, "dict"),
        "dicts": ([{"key": k, "value": v} for k, v in made], "pairs"),
        "dicts by layer": ({n: {"k": k, "v": v} for n, (k, v) in enumerate(made)}, "dict"),
        "two lists": ({"keys": keys, "values": values}, "dict"),
        "transformers 4": (Instance(KINDS + "DynamicCache", four), "cache"),
        "static": (static_cache(made, shape[2] + 4), "static"),
        "static, full": (static_cache(made, shape[2]), "static"),
        "static, no length": (static_cache(made, shape[2] + 300, says_length=False), "static"),
        "static, buffers": (
            Instance(
                KINDS + "StaticCache",
                {
                    "_buffers": {f"{part}_cache_{n}": buffer for part, buffers in (("key", keys), ("value", values))
                                 for n, buffer in enumerate(buffers)},
                    "max_cache_len": shape[2],
                },
            ),
            "static",
        ),
    }  # fmt: skip
    for name, (value, kind) in forms.items():
        source = kvmnn.open(save(tmp_path / f"{name}.bin", value))
        assert_same(source, made, dtype)
        said = source.engine_cache
        assert said is not None and (said.engine, said.kind) == ("transformers", kind), name
        assert (said.layers, said.batch, said.kv_heads, said.tokens, said.head_dim) == (3, *shape), name
    assert source.axes == "bhtd"


def test_open_saved_dict_keeps_tensor_names(tmp_path: Path) -> None:
    ((keys, values),) = pairs(1, layers=1)
    path = save(tmp_path / "a.pt", {"past_key_values.0.key": keys, "past_key_values.0.value": values})
    assert list(kvmnn.open(path)) == ["past_key_values.0.key", "past_key_values.0.value"]
    other = save(tmp_path / "b.pt", {"w.0.weight": keys, "w.0.bias": values})
    with pytest.raises(SourceError, match="not a file kvmnn knows: it looks like a torch checkpoint"):
        kvmnn.open(other)


def test_open_saved_tensors_are_paired_by_name(tmp_path: Path, run: Any) -> None:
    """Dicts by any name of K and V, tensors in a list; next to them whole numbers that are no cache."""
    made = pairs(1, layers=3, dtype="fp16", shape=(1, 2, 5, 4))
    both = np.array(made)
    keys, values = map(np.ascontiguousarray, both.swapaxes(0, 1))
    named = [(n, pair) for n, pair in enumerate(made)]
    forms: dict[str, tuple[Any, tuple[str, ...]]] = {
        "words": ({f"{letter}_{n}": pair["kv".index(letter)] for n, pair in named for letter in "kv"}, ()),
        "numbers": ({f"{n}.{number}": pair[number] for n, pair in named for number in (0, 1)}, ("--axes", "bhtd")),
        "stacked": ({"key_cache": keys, "value_cache": values}, ("--axes", "lbhtd")),
        "two": ((keys, values), ("--axes", "lbhtd")),
        "list": (list(both), ("--axes", "2bhtd")),
        "all": (both, ("--axes", "l2bhtd")),
    }
    forms["ids"] = (forms["words"][0] | {"input_ids": np.arange(5), "length": np.array(5)}, ())
    for name, (value, options) in forms.items():
        run("mnn", "unpack", save(tmp_path / f"{name}.pt", value), *options, "-o", tmp_path / f"{name}.npz")
        with np.load(tmp_path / f"{name}.npz") as back:
            assert len(back) == 6, name
            for words, wanted in zip(back.values(), both.reshape(6, 1, 2, 5, 4), strict=True):
                assert words.shape in (wanted.shape, wanted.shape[1:]) and words.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize(
    "value",
    [
        {"k.weight": np.ones((2, 3), "<f4"), "v.weight": np.ones((2, 3), "<f4")},
        {"k": np.ones((2, 3, 4), "<f4"), "norm": np.ones(3, "<f4")},
        [np.ones((2, 3, 4), "<f4"), np.ones(3, "<f4")],
        {"input_ids": np.arange(4)},
    ],
    ids=["weights", "norms", "list", "ids"],
)
def test_open_saved_other_tensors_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SourceError, match="not a file kvmnn knows: it looks like a torch checkpoint"):
        kvmnn.open(save(tmp_path / "a.pt", value))


def test_open_saved_cache_with_token_ids(tmp_path: Path) -> None:
    made = pairs(2)
    ids = np.arange(5, dtype="<i8")[None] + 7
    source = kvmnn.open(save(tmp_path / "a.pt", {"cache": dynamic_cache(made), "input_ids": ids}))
    assert source.engine_cache is not None and source.engine_cache.token_ids is not None
    assert source.engine_cache.token_ids.tolist() == [7, 8, 9, 10, 11]
    longer = kvmnn.open(save(tmp_path / "b.pt", {"cache": dynamic_cache(made), "input_ids": ids[:, :4].copy()}))
    assert longer.engine_cache is not None and longer.engine_cache.token_ids is None


def test_open_saved_empty_layers_and_windows(tmp_path: Path) -> None:
    made = pairs(3, layers=3)
    states: list[dict[str, Any]] = [{"keys": keys, "values": values} for keys, values in made]
    states[1] = {"keys": None, "values": None, "is_initialized": False}
    source = kvmnn.open(save(tmp_path / "a.pt", cache_object("DynamicCache", "DynamicLayer", states)))
    assert list(source) == ["layer_0.key", "layer_0.value", "layer_2.key", "layer_2.value"]
    assert source.notes == ["1 layer of DynamicCache without K and V left out: 1"]
    slid = [{"keys": k, "values": v, "cumulative_length": 20, "sliding_window": 6} for k, v in made]
    source = kvmnn.open(save(tmp_path / "b.pt", cache_object("DynamicCache", "DynamicSlidingWindowLayer", slid)))
    assert source.notes == ["layer 0 holds the last 5 of 20 tokens (sliding window), and so do 2 more"]
    assert source.engine_cache is not None and source.engine_cache.position_runs == ((15, 5),)


def test_open_saved_windows_next_to_full_layers(tmp_path: Path, run: Any) -> None:
    """As in caches of models whose layers take turns; frames of them know their positions as well."""
    whole, window = pairs(3, layers=2, shape=(1, 2, 20, 4)), pairs(4, layers=1)
    states: list[dict[str, Any]] = [{"keys": keys, "values": values} for keys, values in whole]
    keys, values = window[0]
    states.insert(1, {"keys": keys, "values": values, "cumulative_length": 20, "sliding_window": 6})
    source = kvmnn.open(save(tmp_path / "a.pt", cache_object("DynamicCache", "DynamicLayer", states)))
    cache = source.engine_cache
    assert cache is not None
    assert (cache.positions, cache.tokens, cache.is_ascending, cache.is_contiguous_prefix) == (None, 20, True, False)
    assert cache.layer_position_runs == (((0, 20),), ((15, 5),), ((0, 20),))
    assert cache.to_dict()["layer_positions"] == [[[0, 20]], [[15, 5]], [[0, 20]]]
    run("encode", tmp_path / "a.pt", "-o", tmp_path / "f")
    run("verify", tmp_path / "f", "--against", tmp_path / "a.pt")
    noted = read_positions_sidecar(kvmnn.open(tmp_path / "f"), [20, 5, 20])
    assert noted is not None and noted.tokens_seen == 20
    assert [each.tolist() for each in noted.positions] == [list(range(20)), list(range(15, 20)), list(range(20))]


def refusals() -> dict[str, tuple[Any, str]]:
    made = pairs(4)
    ((keys, values), *_) = made
    static = static_cache(made, 9)
    static.state["layers"][0].state["cumulative_length"] = np.array([10], "<i8")
    quantised = {"keys": keys, "values": values, "_quantized_keys": keys, "_quantized_values": values}
    return {
        "two caches": ({"a": dynamic_cache(made), "b": dynamic_cache(pairs(5))}, r"holds 2 caches \('a', 'b'\)"),
        "half a cache": (
            Instance(KINDS + "EncoderDecoderCache", {"self_attention_cache": dynamic_cache(made)}),
            "EncoderDecoderCache whose cross_attention_cache is no cache",
        ),
        "quantised": (
            cache_object("QuantizedCache", "QuantoQuantizedLayer", [quantised]),
            "layer 0 is a QuantoQuantizedLayer, whose older tokens are quantised: expected a DynamicCache",
        ),
        "state of another kind": (
            cache_object("DynamicCache", "LinearAttentionLayer", [{"conv_states": keys, "recurrent_states": values}]),
            "DynamicCache without K and V: it has conv_states, recurrent_states",
        ),
        "empty": (cache_object("DynamicCache", "DynamicLayer", []), "DynamicCache without a layer that holds anything"),
        "longer than its buffers": (static, "says 10 tokens, and its buffers have 9"),
        "zeros": (static_cache([(keys * 0, values * 0)], 8, says_length=False), "none of the 8 rows"),
        "shapes": ([(keys, values[:, :, :3].copy())], r"K is \[1, 2, 5, 4\] and V \[1, 2, 3, 4\]: expected"),
        "axes": ([(keys[0].copy(), values[0].copy())], r"expected \[batch, kv_head, token, head_dim\]"),
        "types": ([(keys, values.view("<f2"))], "K is bfloat16 and V float16: expected one type"),
        "integers": ([(keys.astype("<i8"), values.astype("<i8"))], "type int64 is not one that frames hold"),
        "uneven lists": (
            {"key_cache": [keys, keys], "value_cache": [values]},
            "a dict with 2 key_cache and 1 value_cache",
        ),
        "expanded": (
            [(np.broadcast_to(keys[:, :, :1, :1].copy(), (1, 2, 5, 4096)),) * 2] * 2,
            "its tensors have 327,680 bytes, and 8 are stored",
        ),
    }


@pytest.mark.parametrize("name", refusals())
def test_open_saved_invalid_cache_is_refused(tmp_path: Path, name: str, run: Any) -> None:
    value, message = refusals()[name]
    path = save(tmp_path / "c.pt", value)
    with pytest.raises(SourceError, match=message):
        kvmnn.open(path)
    said = run("encode", path, "-o", tmp_path / "out/", code=1).err
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()
    assert run("inspect", path, code=1).err.count("\n") == 1


def test_open_saved_attributes_without_names(tmp_path: Path) -> None:
    made = pairs(1)
    layers = [Instance(KINDS + "DynamicLayer", {"keys": k, "values": v, 3: 4, None: 5}) for k, v in made]
    path = save(tmp_path / "c.pt", Instance(KINDS + "DynamicCache", {"layers": layers, (1,): 2}))
    assert_same(kvmnn.open(path), made)
    lists = {"key_cache": [k for k, _ in made], "value_cache": [v for _, v in made], 1: 2, None: 3}
    assert_same(kvmnn.open(save(tmp_path / "d.pt", lists)), made)


@pytest.mark.parametrize("seed", range(3))
def test_open_saved_damaged_pickle_is_refused(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = pairs(seed)
    path = save(tmp_path / "c.pt", static_cache(made, 8) if seed else {"cache": dynamic_cache(made), 1: "x"})
    members = compressor_files.members(path)
    for _ in range(60):
        data = bytearray(members["data.pkl"])
        for place in rng.integers(0, len(data), rng.integers(1, 4)):
            data[place] = rng.integers(0, 256)
        damaged = compressor_files.repack(path, tmp_path / "d.pt", {"data.pkl": bytes(data)})
        with contextlib.suppress(KvmnnError):
            for array in kvmnn.open(damaged).arrays:
                array.to_numpy()


def test_open_saved_repeated_references_are_cheap(tmp_path: Path) -> None:
    """A small pickle that refers to the same layer or list again and again."""
    cache, layer = (
        f"ctransformers.cache_utils\n{name}\n)\x81".encode("latin-1") for name in ("DynamicCache", "DynamicLayer")
    )
    layers = cache + b"}X\x06\0\0\0layers](" + layer + b"q\0" + b"h\0" * 70_000 + b"esb."
    nested = b"]q\0" + b"".join(b"](" + (b"h" + bytes([n])) * 200 + b"eq" + bytes([n + 1]) for n in range(60))
    for number, (pickled, message) in enumerate(
        [(layers, "of 70,001 layers: at most 65,536 are read"), (nested + b".", "looks like a torch checkpoint")]
    ):
        path = compressor_files.archive(tmp_path / f"{number}.pt", b"\x80\x02" + pickled)
        with pytest.raises(SourceError, match=message):
            kvmnn.open(path)


def test_open_saved_checkpoint_is_named(tmp_path: Path, run: Any) -> None:
    path = compressor_files.checkpoint(tmp_path / "c.pth", compressor_files.weights(1, head_dim=8))
    assert "compress_tk" in run("inspect", path).out
    assert "it looks like a torch checkpoint (kvmnn compressor convert makes" in run("encode", path, code=1).err


def test_open_saved_unrelated_options_are_refused(tmp_path: Path, run: Any) -> None:
    path = save(tmp_path / "c.pt", dynamic_cache(pairs(1)))
    for verb in ("inspect", "measure"):
        assert "--part stream" in run(verb, path, "--part", "stream=1", code=2).err
    assert "holds a cache, no weights: encode" in run("compressor", "convert", path, tmp_path / "x.bin", code=1).err


def test_open_saved_pickle_of_other_names_is_refused(tmp_path: Path, run: Any) -> None:
    path = save(tmp_path / "c.pt", Instance("posix.system", {"keys": 1}))
    said = run("encode", path, code=1).err
    assert "cannot be read: the pickle asks for 'posix.system', which is not among the names" in said
    assert said.count("\n") == 1


def test_open_saved_damaged_file_error_is_the_same_everywhere(tmp_path: Path, run: Any) -> None:
    """It may have been a cache or a checkpoint: every verb reports this in the same words."""
    whole = save(tmp_path / "c.pt", dynamic_cache(pairs(1, shape=(1, 2, 40, 32)))).read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"DynamicLayer")] ^= 1
    for number, data in enumerate((whole[:60], whole[: len(whole) // 2], whole[:-10], bytes(flipped))):
        for name in ("cut.pt", "cut"):
            (tmp_path / name).write_bytes(data)
            said = {run(verb, tmp_path / name, code=1).err for verb in ("inspect", "measure", "encode")}
            assert len(said) == 1
            (line,) = said
            assert line.startswith(
                f"kvmnn: error: {tmp_path / name}: is a file of torch.save, a cache or a checkpoint, "
            )
            assert ("member 'data.pkl': the data does not match" if number == 3 else "a zip archive without") in line


def test_commands_accept_saved_cache(tmp_path: Path, run: Any) -> None:
    made = pairs(6, shape=(1, 2, 40, 8), dtype="fp16")
    finite = [tuple(np.where(np.isfinite(part), part, 0).astype("<f2") for part in pair) for pair in made]
    path = save(tmp_path / "c.pt", dynamic_cache(finite))
    assert "transformers cache: 2 layers, 2 kv heads of 8, 40 tokens, float16" in run("inspect", path).out
    run("encode", path, "-o", tmp_path / "c.frames/")
    assert "LOSSLESS" in run("verify", tmp_path / "c.frames", "--against", path).out
    run("diff", path, tmp_path / "c.frames")
    run("measure", path)
    packed = ("--name", "sys", "--backend", "arm64-fp16")
    run("mnn", "pack", path, "-o", tmp_path / "sys/", *packed)
    run("diff", tmp_path / "sys", path)
    (tmp_path / "ids.json").write_text(str(list(range(40))))
    run("store", "put", tmp_path / "store", path, "--fingerprint", "ab" * 32, "--token-ids", tmp_path / "ids.json")
    run("decode", tmp_path / "c.frames", "-o", tmp_path / "c.npz")
    assert np.load(tmp_path / "c.npz")["layer_1.value"].shape == (1, 2, 40, 8)


@pytest.mark.parametrize(("own", "other"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp32", "fp16")])
def test_open_saved_conflicting_dtype_is_refused(tmp_path: Path, own: str, other: str) -> None:
    made = pairs(1, dtype=own)
    path = save(tmp_path / "cache.pt", tuple(made))
    assert_same(kvmnn.open(path, dtype=own), made, own)
    said = rf"holds {own} numbers, and {other} \(--dtype\) would make others of them"
    with pytest.raises(SourceError, match=said):
        kvmnn.open(path, dtype=other)
