"""``--rerotate``: K of evicted caches moved to the first positions, against an independent rotation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import packed_samples
import pytest
from repository import FIXTURES
from rope_model import plain_frequencies, rotate

from kvmnn import open as open_any
from kvmnn.formats.mnn import open_packed

LAYERS, HEADS, TOKENS, DIMS = 3, 2, 40, 16
KEPT = [*range(4), *range(12, 18), *range(30, 40)]
RESERVE = "0:4,12:6,30:10"
ROPE = f"theta=10000,dims={DIMS}"


class Cache:
    """A prefix of which `keys` are K before the rotation."""

    def __init__(self, folder: Path, dtype: str = "fp32", dims: int = DIMS, interleaved: bool = False) -> None:
        self.frequencies, self.interleaved = plain_frequencies(1e4, dims), interleaved
        arrays = packed_samples.arrays(LAYERS, HEADS, TOKENS, DIMS, seed=5)
        self.keys, self.values = arrays[::2], arrays[1::2]
        pairs = zip(self.at(range(TOKENS)), self.values, strict=True)
        words = [self.words(array, dtype) for pair in pairs for array in pair]
        hP = 4 if dtype == "fp32" else 16
        self.sample = packed_samples.write_prefix(folder, words, capacity=104, hP=hP)
        backend = {"fp32": "x86-avx2", "fp16": "arm64-fp16", "bf16": None}[dtype]
        layout = ["--backend", backend] if backend else ["--backend", "lp=1", "--backend", "hp=16", "--dtype", "bf16"]
        self.arguments = [folder, *self.sample.options, *layout]

    @staticmethod
    def words(array: np.ndarray, dtype: str) -> np.ndarray:
        if dtype == "bf16":
            return (np.ascontiguousarray(array, np.float32).view("<u4") >> np.uint32(16)).astype("<u2")
        return array.astype(packed_samples.WORDS[dtype])

    def at(self, positions: Any, tokens: Any = slice(None)) -> list[np.ndarray]:
        """K of some tokens at these positions, of each layer."""
        rotated = (rotate(k[:, tokens], positions, self.frequencies, interleaved=self.interleaved) for k in self.keys)
        return list(rotated)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.chdir(tmp_path)
    return Cache(tmp_path / "p")


def keys_of(path: str) -> list[np.ndarray]:
    source = open_any(path)
    words = [source[f"layer_{layer}.key"].to_numpy() for layer in range(LAYERS)]
    return [(w.astype("<u4") << np.uint32(16)).view("<f4") if w.dtype == np.uint16 else w for w in words]


def check(path: str, cache: Cache, tolerance: float = 2e-6) -> None:
    """K is that of the kept tokens at the first positions, V as it was, and the document has both positions."""
    for found, expected in zip(keys_of(path), cache.at(range(len(KEPT)), KEPT), strict=True):
        np.testing.assert_allclose(found, expected, atol=tolerance)
    for layer in open_packed(path).info.layers:
        assert layer.positions == ((0, len(KEPT)),)
        assert layer.text_positions == ((0, 4), (12, 6), (30, 10))


def test_compact_rerotates_k_to_the_first_positions(cache: Cache, run) -> None:
    printed = run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c", "--rerotate", "--rope", ROPE)
    check("c", cache)
    assert f"layers together, by\n    {ROPE}, as given, not checked: K does not show it\n" in printed.out
    assert "fp32 rounds this rotation by up to" in printed.out and "warning" not in printed.out
    source = open_any("c")
    for layer, values in enumerate(cache.values):
        np.testing.assert_array_equal(source[f"layer_{layer}.value"].to_numpy(), values[:, KEPT])


def test_compact_without_rerotate_warns_with_the_line_of_code(cache: Cache, run) -> None:
    printed = run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c").out
    assert "  warning: K has positions up to 39, and after loading MNN continues at 20:" in printed
    line = "const_cast<MNN::Transformer::LlmContext*>(llm->getContext())->all_seq_len = 40;"
    assert f"      {line}\n" in printed
    assert "which rows are\n  live only sys.kvmnn.json says: copy it with them\n" in printed
    assert all(len(each) <= 88 for each in printed.splitlines()[3:])
    document = json.loads(run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c", "-f", "--json").out)
    assert line in document["warnings"][0] and "rerotated" not in document
    for verb in (("mnn", "repack", "c", "--target-backend", "x86-avx512", "-o", "r"), ("mnn", "pack", "c", "-o", "q")):
        assert line in run(*verb).out


def test_compact_evicted_tail_records_next_position(cache: Cache, run) -> None:
    """The last tokens were evicted: the next one stands after them all the same, also after `repack`."""
    assert "all_seq_len = 40;" in run("mnn", "compact", *cache.arguments, "--reserve", "0:4,12:6", "-o", "c").out
    assert open_packed("c").info.next_position == 40
    assert "all_seq_len = 40;" in run("mnn", "repack", "c", "--target-backend", "x86-avx512", "-o", "r").out
    assert "warning" not in run("mnn", "compact", *cache.arguments, "--reserve", "0:30", "-o", "head").out
    assert open_packed("head").info.next_position is None


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("fp32", 2e-6), ("fp16", 6e-3), ("bf16", 6e-2)],
)
def test_repack_and_pack_rerotate_every_dtype(tmp_path, monkeypatch, run, dtype, tolerance) -> None:
    monkeypatch.chdir(tmp_path)
    cache = Cache(tmp_path / "p", dtype)
    run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c")
    options = ("--rerotate", "--rope", ROPE)
    run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "one", *options)
    check("one", cache, tolerance)
    target = {"fp32": "x86-avx512", "fp16": "x86-avx2", "bf16": "x86-avx2"}[dtype]
    printed = run("mnn", "repack", "c", "--target-backend", target, "-o", "r", *options).out
    check("r", cache, tolerance)
    assert "  LOSSY (K rotated" in printed
    run("mnn", "unpack", "c", "-o", "a.npz")
    run("mnn", "pack", "a.npz", "-o", "two", *options)
    check("two", cache, tolerance)
    document = json.loads(run("mnn", "pack", "a.npz", "-o", "two", *options, "-f", "--json").out)
    assert document["label"] == "LOSSY" and document["rerotated"]["tokens"] == 48
    assert 0 < document["rerotated"]["largest_error"] <= tolerance
    assert 0 < document["rerotated"]["largest_relative_error"] < 0.01


@pytest.mark.parametrize(("dims", "pairing"), [(DIMS, "interleaved"), (8, "half"), (4, "interleaved")])
def test_compact_rerotates_partial_dims_and_both_pairings(tmp_path, monkeypatch, run, dims, pairing) -> None:
    monkeypatch.chdir(tmp_path)
    cache = Cache(tmp_path / "p", dims=dims, interleaved=pairing == "interleaved")
    rope = f"theta=10000,dims={dims},pairing={pairing}"
    run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c", "--rerotate", "--rope", rope)
    check("c", cache)


def test_rerotate_second_time_changes_nothing(cache: Cache, run) -> None:
    options = ("--rerotate", "--rope", ROPE)
    run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c", *options)
    first = keys_of("c")
    printed = run("mnn", "repack", "c", "--target-backend", "x86-avx2", "-o", "r", *options).out
    assert "K was not rotated: nothing says that its tokens are at other positions than the first" in printed
    run("encode", "c", "-o", "frames/")
    run("decode", "frames", "-o", "back/")
    for form in ("npz", "safetensors", "npy"):
        out = "arrays/" if form == "npy" else f"a.{form}"
        run("mnn", "unpack", "c", "-o", out)
        packed = run("mnn", "pack", out, "--backend", "x86-avx2", "--name", "sys", "-o", f"{form}_pack", *options)
        assert "LOSSLESS" in packed.out
        check(f"{form}_pack", cache)
    for path in ("r", "back"):
        check(path, cache)
        for one, other in zip(keys_of(path), first, strict=True):
            np.testing.assert_array_equal(one, other)


def test_rerotate_without_record_does_not_claim_positions(cache: Cache, run) -> None:
    run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c")
    Path("c/sys.kvmnn.json").unlink()
    geometry = [*cache.arguments[1:], "--valid-tokens", len(KEPT), "--target-backend", "x86-avx2"]
    for verb, options in (("repack", geometry), ("pack", [*cache.arguments[1:], "--valid-tokens", len(KEPT)])):
        error = run("mnn", verb, "c", *options, "-o", "r", "--rerotate", "--rope", ROPE, code=2).err
        assert "c: nothing gives the positions of the tokens in the text, from which K is to be rotated" in error
        assert "(sys.kvmnn.json next to the files does)" in error and not Path("r").exists()


def test_rerotate_twice_compacted_cache_from_current_positions(cache: Cache, run) -> None:
    run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c", "--rerotate", "--rope", ROPE)
    assert "all_seq_len = 20;" in run("mnn", "compact", "c", "--reserve", "0:4,10:10", "-o", "d").out
    run("mnn", "compact", "c", "--reserve", "0:4,10:10", "-o", "e", "--rerotate", "--rope", ROPE)
    left = [*range(4), *range(30, 40)]
    for found, expected in zip(keys_of("e"), cache.at(range(14), left), strict=True):
        np.testing.assert_allclose(found, expected, atol=4e-6)
    assert open_packed("e").info.layers[0].text_positions == ((0, 4), (30, 10))


def test_rerotated_cache_is_no_prefix_of_its_text(cache: Cache, run) -> None:
    run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c", "--rerotate", "--rope", ROPE)
    run("mnn", "unpack", "c", "-o", "arrays/")
    ids = ",".join(map(str, range(20)))
    for path in ("c", "arrays"):
        printed = run("store", "put", "S", path, "--token-ids", ids, "--fingerprint", "m", code=1).err
        assert "layer 0 was cut: a cache without some tokens is no prefix" in printed
    assert "layer 0 holds the tokens 0:4, 12:6, 30:10, K rotated to positions 0:20" in run("inspect", "c").out


def test_rerotate_whole_prefix_is_unchanged(cache: Cache, run) -> None:
    printed = run("mnn", "compact", *cache.arguments, "--remove", 10, "-o", "c", "--rerotate").out
    assert "K was not rotated" in printed and "LOSSY: 30 of 40 tokens of each layer" in printed
    assert "UNCHANGED" in run("mnn", "compact", *cache.arguments, "--remove", 0, "-o", "d", "--rerotate").out
    for path in ("c", "d"):
        assert all(layer.text_positions is None for layer in open_packed(path).info.layers)


def test_rerotate_store_get_prefix_is_unchanged(cache: Cache, run) -> None:
    ids = ",".join(map(str, range(TOKENS)))
    run("store", "put", "S", *cache.arguments, "--token-ids", ids, "--fingerprint", "m")
    get = ("store", "get", "S", "--token-ids", ids, "--rerotate")
    printed = run(*get, "--backend", "x86-avx2", "--name", "sys", "-o", "q").out
    assert "K was not rotated" in printed and "LOSSLESS" in printed
    assert "--rerotate is about the prefix cache" in run(*get, "-o", "a.npz", code=2).err


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_rerotate_layers_of_different_lengths_is_refused(cache: Cache, run) -> None:
    plans = [{"layer": n, "remove": TOKENS, "pairs": [[0, 4], [30 - n, 10 + n]]} for n in range(LAYERS)]
    Path("plan.json").write_text(json.dumps(plans))
    printed = run("mnn", "compact", *cache.arguments, "--plan", "plan.json", "-o", "c").out
    assert "warning: layers hold 14 to 16 tokens, and MNN reads the same number of rows" in printed
    rerotate = ("--plan", "plan.json", "-o", "d", "--rerotate", "--rope", ROPE)
    assert "layers hold 14 to 16 tokens" in run("mnn", "compact", *cache.arguments, *rerotate, code=1).err
    assert not Path("d").exists()


def test_rerotate_layers_with_different_tokens(cache: Cache, run) -> None:
    plans = [{"layer": n, "remove": TOKENS, "pairs": [[n, 4], [20 + n, 10]]} for n in range(LAYERS)]
    Path("plan.json").write_text(json.dumps(plans))
    run("mnn", "compact", *cache.arguments, "--plan", "plan.json", "-o", "c", "--rerotate", "--rope", ROPE)
    for n, found in enumerate(keys_of("c")):
        kept = [*range(n, n + 4), *range(20 + n, 30 + n)]
        np.testing.assert_allclose(found, cache.at(range(14), kept)[n], atol=2e-6)


def test_rerotate_heads_with_different_tokens_is_refused(tmp_path, monkeypatch, run) -> None:
    monkeypatch.chdir(tmp_path)
    arrays = packed_samples.arrays(1, 2, 4, DIMS)
    Path("kv").mkdir()
    for name, words in zip(("layer_0.key", "layer_0.value"), arrays, strict=True):
        np.save(f"kv/{name}.npy", words)
    positions = {"layers": [{"layer": 0, "positions": [[0, 1, 8, 9], [0, 2, 8, 9]]}]}
    Path("kv/positions.json").write_text(json.dumps(positions))
    pack = ("mnn", "pack", "kv", "--backend", "x86-avx2", "--name", "sys", "-o", "q")
    assert "all_seq_len = 10;" in run(*pack).out
    printed = run(*pack, "-f", "--rerotate", "--rope", ROPE, code=2).err
    assert "heads of layer 0 hold different tokens of the text: K cannot be rotated" in printed


def test_rerotate_arrays_without_positions_is_refused(cache: Cache, run) -> None:
    run("mnn", "unpack", *cache.arguments, "-o", "a/")
    arrays = {path.stem: np.load(path) for path in Path("a").glob("*.npy")}
    np.savez("plain.npz", **arrays)
    pack = ("mnn", "pack", "plain.npz", "--backend", "x86-avx2", "--name", "sys", "-o", "q")
    printed = run(*pack, "--rerotate", "--rope", ROPE, code=2).err
    assert "nothing gives the positions of the tokens in the text" in printed and "positions.json" in printed


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--rope", ROPE], 2, "--rope needs --rerotate"),
        (["--rerotate", "--rope", "theta=10000"], 2, "does not say how many words of a head are rotated"),
        (["--rerotate", "--rope", "theta=10000,dims=32"], 2, "rope has 32 dims, the cache has heads of 16"),
        (["--rerotate", "--rope", "nowhere"], 1, "nowhere: "),
        (["--rerotate", "--rope", "p"], 1, "p: does not contain how K is rotated"),
        (["--rerotate"], 1, "nothing tells how K is rotated"),
        (["--plan-label", "x"], 2, "--plan-label needs --plan"),
    ],
)
def test_rerotate_impossible_rotation_writes_nothing(cache: Cache, run, options, code, message) -> None:
    printed = run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c", *options, code=code).err
    assert message in printed and len(printed.splitlines()) == 1
    assert not Path("c").exists()


# -- how K is rotated, of a trained model ------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The prefix of a trained model of theta 10000, of 400 tokens."""
    monkeypatch.chdir(tmp_path)
    parts = [np.load(FIXTURES / "kv_real" / f"{part}_fp16.npy").transpose(0, 2, 1, 3)[:, :, :400] for part in "kv"]
    layers = [np.ascontiguousarray(part[layer]) for layer in range(4) for part in parts]
    sample = packed_samples.write_prefix(tmp_path / "p", layers, capacity=464, hP=16)
    return [tmp_path / "p", *sample.options, "--backend", "arm64-fp16"]


def test_rerotate_finds_rope_of_trained_k(trained, run) -> None:
    reserve = ("--reserve", "0:4,150:250")
    printed = run("mnn", "compact", *trained, *reserve, "-o", "c", "--rerotate").out
    assert "theta=10000,dims=64, found by trial, clearly in 4 of 4 layers" in printed
    run("mnn", "compact", *trained, *reserve, "-o", "d", "--rerotate", "--rope", "theta=10000,dims=64")
    assert all(Path("c", name.name).read_bytes() == name.read_bytes() for name in Path("d").glob("*.k"))
    run("mnn", "compact", *trained, *reserve, "-o", "e")
    again = run("mnn", "repack", "e", "--target-backend", "arm64-fp16", "-o", "f", "--rerotate").out
    assert "theta=10000,dims=64, found by trial" in again


def test_rerotate_model_that_differs_from_k_is_refused(trained, run) -> None:
    Path("model").mkdir()
    compact = ("mnn", "compact", *trained, "--reserve", "0:4,150:250", "-o", "c", "--rerotate")
    for fields in ({"rope_theta": 1e6}, {"rope_theta": 1e4, "model_type": "cohere"}):
        Path("model/config.json").write_text(json.dumps(fields))
        printed = run(*compact, "--rope", "model", code=1).err
        assert printed.startswith("kvmnn: error: model: K of layer 0 looks rotated by theta=10000,dims=64")
    Path("model/config.json").write_text(json.dumps({"rope_theta": 1e4}))
    assert "theta=10000,dims=64, as model has it" in run(*compact, "-f", "--rope", "model").out


@pytest.mark.parametrize("wrong", ["theta=500000,dims=64", "theta=10000,dims=64,pairing=interleaved"])
def test_rerotate_rope_that_k_contradicts_is_refused_unless_forced(trained, run, wrong) -> None:
    compact = ("mnn", "compact", *trained, "--reserve", "0:4,150:250", "-o", "c", "--rerotate", "--rope")
    contradiction = f"K of layer 0 looks rotated by theta=10000,dims=64, not by {wrong}"
    printed = run(*compact, wrong, code=1).err
    assert (
        contradiction in printed
        and "--ignore contradictions rotates by it all the same" in printed
        and not Path("c").exists()
    )
    forced = run(*compact, wrong, "--ignore", "contradictions")
    assert contradiction in forced.err and f"{wrong}, as given, though K contradicts it" in forced.out
    right = run(*compact, "theta=10000,dims=64", "-f")
    assert "theta=10000,dims=64, as given and as K shows" in right.out and "looks rotated" not in right.err
    run("mnn", "compact", *trained, "--reserve", "0:4,150:250", "-o", "e")
    repack = ("mnn", "repack", "e", "--target-backend", "x86-avx2", "-o", "r", "--rerotate", "--rope")
    assert contradiction in run(*repack, wrong, code=1).err


def test_repack_rerotated_to_narrower_dtype_shows_no_error_of_the_wider(cache: Cache, run) -> None:
    run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c")
    options = ("--target-backend", "arm64-fp16", "-o", "r", "--rerotate", "--rope", ROPE)
    printed = run("mnn", "repack", "c", *options).out
    assert "computed in fp32, then converted to fp16" in printed and "of the length of its pair" not in printed


def test_read_stored_tokens_rerotated_k_is_refused(cache: Cache, run) -> None:
    """K was rotated to the first positions, so it does not continue the text."""
    from kvmnn.errors import SourceError
    from kvmnn.lm.warm_start import read_stored_tokens

    run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c", "--rerotate", "--rope", ROPE)
    run("mnn", "unpack", "c", "-o", "arrays/")
    for path in ("c", "arrays"):
        with pytest.raises(SourceError, match="its K was rotated to the first positions"):
            read_stored_tokens(open_any(path), [20] * LAYERS)


def test_decode_evicted_prefix_warns_of_positions(cache: Cache, run) -> None:
    run("mnn", "compact", *cache.arguments, "--reserve", RESERVE, "-o", "c")
    run("encode", "c", "-o", "frames/")
    assert "all_seq_len = 40;" in run("decode", "frames", "-o", "back/").out
    assert "warnings" in json.loads(run("decode", "frames", "-o", "again/", "--json").out)


def test_rerotate_layers_with_different_rope(tmp_path, monkeypatch, run) -> None:
    """Trained K of theta 10000, of which every other layer is rotated as by theta 1000000 instead."""
    monkeypatch.chdir(tmp_path)
    keys, values = (np.load(FIXTURES / "kv_real" / f"{part}_fp16.npy").transpose(0, 2, 1, 3) for part in "kv")
    places, one, other = np.arange(300), plain_frequencies(1e4, 64), plain_frequencies(1e6, 64)
    layers = []
    for layer in range(4):
        key = keys[layer][:, :300]
        if layer % 2:
            key = rotate(rotate(key, -places, one), places, other).astype(np.float16)
        layers += [np.ascontiguousarray(key), np.ascontiguousarray(values[layer][:, :300])]
    sample = packed_samples.write_prefix(tmp_path / "p", layers, capacity=364, hP=16)
    compact = ("mnn", "compact", tmp_path / "p", *sample.options, "--backend", "arm64-fp16", "-o", "c", "--rerotate")
    printed = run(*compact, "--reserve", "0:4,100:200").out
    assert "theta=10000,dims=64 in 2 layers and theta=1000000,dims=64 in 2 layers, found by trial" in printed
    few = [np.ascontiguousarray(words[:, :16]) for words in layers]
    sample = packed_samples.write_prefix(tmp_path / "few", few, capacity=80, hP=16)
    compact = ("mnn", "compact", tmp_path / "few", *sample.options, "--backend", "arm64-fp16", "-o", "d", "--rerotate")
    refused = run(*compact, "--reserve", "1:15", code=1).err
    assert "(16 tokens) does not show it; that of 1 of " in refused and "--rope theta=10000,dims=64, if all " in refused
