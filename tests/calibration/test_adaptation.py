"""Tables learned in a cache: what comes back, what counts, and caches where they do not pay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvmnn
from kvmnn import bundle
from kvmnn.bundle import EncodeResult
from kvmnn.calibration import encode_adapted
from kvmnn.dense import RopeConfig
from kvmnn.dense.rope import RopeFrequencies
from kvmnn.errors import KvmnnError, OptionError, OutputError
from kvmnn.formats.layer_streams.document import ADAPTED_NAME, LAYERS_NAME
from kvmnn.formats.layer_streams.reader import inspect_layers, restore_layers, verify_layers
from kvmnn.formats.layer_streams.writer import EncodeLayersResult
from kvmnn.profiles import Profile
from kvmnn.profiles.geometry import rotate_heads

ROPE = RopeConfig(10000.0, 8)
HEADS = 2


def build_arrays(
    tokens: int, dims: tuple[int, ...] = (8, 8, 8, 8), positions: Any = None, rope: RopeConfig | None = ROPE
) -> dict[str, np.ndarray]:
    """Build K, rotated, and V that follow from a few common values, as a model's do: float32 by name."""
    rng = np.random.default_rng(5)
    base = rng.normal(size=(tokens, 6))
    positions = np.arange(tokens) if positions is None else positions
    arrays = {}
    for layer, dim in enumerate(dims):
        rows = np.einsum("ti,ipn->tpn", base, rng.normal(size=(6, 2, HEADS * dim)))
        rows += 0.05 * rng.normal(size=rows.shape)
        keys, values = (rows[:, part].reshape(tokens, HEADS, dim).transpose(1, 0, 2) for part in (0, 1))
        if rope is not None:
            keys = rotate_heads(keys, positions, RopeFrequencies.from_config(rope), 1)
        arrays |= {f"layer_{layer}.key": keys.astype(np.float32), f"layer_{layer}.value": values.astype(np.float32)}
    return arrays


def save(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def make_options(rope: RopeConfig | None = ROPE) -> bundle.EncodeOptions:
    return bundle.EncodeOptions(dense=bundle.DenseOptions(rotary=rope))


def measure_dense_bytes(cache: Path, folder: Path, rope: RopeConfig | None = ROPE, **settings: Any) -> int:
    return bundle.encode_source(kvmnn.open(cache, **settings), f"{folder}/", make_options(rope)).stored_bytes


def to_bf16(array: np.ndarray) -> np.ndarray:
    return (array.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("rope", [ROPE, None])
def test_encode_adapted_gives_the_same_files_in_fewer_bytes(
    tmp_path: Path, dtype: str, rope: RopeConfig | None
) -> None:
    convert = {"fp16": lambda a: a.astype(np.float16), "bf16": to_bf16, "fp32": lambda a: a}[dtype]
    arrays = {name: convert(array) for name, array in build_arrays(700, rope=rope).items()}
    cache = save(tmp_path / "kv", arrays)
    settings = {"dtype": "bf16"} if dtype == "bf16" else {}
    result, note = encode_adapted(kvmnn.open(cache, **settings), tmp_path / "out", make_options(rope))
    assert isinstance(result, EncodeLayersResult) and result.label == "LOSSLESS"
    assert result.stored_bytes < 0.9 * measure_dense_bytes(cache, tmp_path / "dense", rope, **settings)
    files = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir() if path.name != LAYERS_NAME}
    assert result.stored_bytes == sum(files.values()) and result.profile_bytes == files[ADAPTED_NAME]
    assert f"{result.profile_bytes:,} of the {result.stored_bytes:,} bytes" in str(result)
    assert f"{result.stored_bytes:,} ({result.profile_bytes:,} of tables)" in note
    (tmp_path / "out").rename(tmp_path / "moved")
    restore_layers(str(tmp_path / "moved"), f"{tmp_path / 'back'}/")
    for name in arrays:
        assert (tmp_path / "back" / f"{name}.npy").read_bytes() == (cache / f"{name}.npy").read_bytes()


def test_encode_adapted_is_read_without_an_option(tmp_path: Path) -> None:
    cache = save(tmp_path / "kv", build_arrays(700))
    result, _ = encode_adapted(kvmnn.open(cache), tmp_path / "out", make_options())
    assert isinstance(result, EncodeLayersResult)
    info = inspect_layers(str(tmp_path / "out"))
    assert info.document.stored_bytes == result.stored_bytes and info.document.ratio == result.ratio
    assert f"tables learned in this cache: {ADAPTED_NAME}" in str(info)
    assert verify_layers(str(tmp_path / "out"), kvmnn.open(cache)).proof == "bytes"
    source = kvmnn.open(tmp_path / "out")
    assert np.array_equal(source["layer_3.key"].to_numpy(), np.load(cache / "layer_3.key.npy"))
    assert str(tmp_path / "out" / ADAPTED_NAME) in source.files


@pytest.mark.parametrize("damage", [None, b"KVMP"])
def test_adapted_streams_without_their_tables_fail(tmp_path: Path, damage: bytes | None) -> None:
    encode_adapted(kvmnn.open(save(tmp_path / "kv", build_arrays(700))), tmp_path / "out", make_options())
    tables = tmp_path / "out" / ADAPTED_NAME
    tables.unlink() if damage is None else tables.write_bytes(damage)
    state = "is not there" if damage is None else "cannot be read"
    with pytest.raises(KvmnnError, match=rf"need the profile [0-9a-f]{{16}} \(adapted.kvmp\), which {state}"):
        verify_layers(str(tmp_path / "out"))
    assert inspect_layers(str(tmp_path / "out")).document.profile_bytes


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_encode_adapted_of_few_tokens_gives_dense_streams(tmp_path: Path, tokens: int) -> None:
    cache = save(tmp_path / "kv", build_arrays(tokens))
    result, note = encode_adapted(kvmnn.open(cache), tmp_path / "out", make_options())
    assert isinstance(result, EncodeResult) and result.output == f"{tmp_path / 'out'}/"
    assert "dense streams" in note
    assert {path.name for path in (tmp_path / "out").iterdir()} > {"manifest.json"}
    assert not (tmp_path / "out" / ADAPTED_NAME).exists()
    assert result.stored_bytes == measure_dense_bytes(cache, tmp_path / "dense")
    source = kvmnn.open(tmp_path / "out")
    assert all(source[name].to_numpy().tobytes() == np.load(cache / f"{name}.npy").tobytes() for name in source)


def test_encode_adapted_leaves_out_tables_that_do_not_pay(tmp_path: Path) -> None:
    arrays = build_arrays(700)
    rng = np.random.default_rng(3)
    for name in ("layer_0.key", "layer_0.value"):  # noise, of which nothing can be learned
        arrays[name] = rng.normal(size=arrays[name].shape).astype(np.float32)
    cache = save(tmp_path / "kv", arrays)
    result, _ = encode_adapted(kvmnn.open(cache), tmp_path / "out", make_options())
    assert isinstance(result, EncodeLayersResult)
    layers = {name.split("/")[1] for name in Profile.read(tmp_path / "out" / ADAPTED_NAME).arrays}
    assert layers == {"1", "2", "3"}
    assert verify_layers(str(tmp_path / "out"), kvmnn.open(cache)).label == "LOSSLESS"


@pytest.mark.parametrize("kind", ["common gaps", "gaps of layers", "gaps of heads", "other sizes", "stacked"])
def test_encode_adapted_of_unequal_layers_gives_the_same_words(tmp_path: Path, kind: str) -> None:
    tokens = 500
    rng = np.random.default_rng(1)
    positions = [np.sort(rng.choice(900, tokens, replace=False)).tolist() for _ in range(4)]
    dims = (8, 16, 8, 10) if kind == "other sizes" else (8, 8, 8, 8)
    arrays = build_arrays(tokens, dims, np.array(positions[0]) if kind == "common gaps" else None)
    if kind == "stacked":
        names = ("key", "value")
        arrays = {name: np.stack([arrays[f"layer_{layer}.{name}"] for layer in range(4)]) for name in names}
    cache = save(tmp_path / "kv", {name: array.astype(np.float16) for name, array in arrays.items()})
    if "gaps" in kind:
        by_layer: list[Any] = [positions[0]] * 4 if kind == "common gaps" else positions
        if kind == "gaps of heads":
            by_layer = [[positions[0], positions[1]]] * 4
        document = {"tokens_seen": 900, "layers": [{"layer": n, "positions": p} for n, p in enumerate(by_layer)]}
        (cache / "positions.json").write_text(json.dumps(document))
    source = kvmnn.open(cache)
    result, note = encode_adapted(source, tmp_path / "out", make_options())
    assert isinstance(result, EncodeResult) == (kind == "gaps of heads"), note
    share = 0.95 if kind == "common gaps" else 1
    assert result.stored_bytes <= share * measure_dense_bytes(cache, tmp_path / "dense")
    decoded = kvmnn.open(tmp_path / "out")
    for part in ("key", "value"):
        words = [
            b"".join(side[name].to_numpy().tobytes() for name in sorted(side) if name.endswith(part))
            for side in (source, decoded)
        ]
        assert words[0] == words[1] and len(words[0]) > 10_000


def test_encode_adapted_of_layers_from_another_one_on_gives_dense_streams(tmp_path: Path) -> None:
    arrays = {name.replace("layer_0", "layer_7"): array for name, array in build_arrays(700, (8,)).items()}
    result, note = encode_adapted(kvmnn.open(save(tmp_path / "kv", arrays)), tmp_path / "out", make_options())
    assert isinstance(result, EncodeResult) and "of layer 7 without layers 0 to 6" in note


def test_encode_adapted_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    source = kvmnn.open(save(tmp_path / "kv", build_arrays(700)))
    encode_adapted(source, tmp_path / "out", make_options())
    with pytest.raises(OutputError, match="exists"):
        encode_adapted(source, tmp_path / "out", make_options())
    bundle.encode_source(source, f"{tmp_path / 'dense'}/", make_options())
    with pytest.raises(OutputError, match="exists already"):
        encode_adapted(source, tmp_path / "dense", make_options())
    assert not (tmp_path / "dense" / LAYERS_NAME).exists()
    encode_adapted(source, tmp_path / "dense", make_options(), force=True)
    assert not (tmp_path / "dense" / "manifest.json").exists()
    assert kvmnn.open(tmp_path / "dense").nbytes == source.nbytes
    np.save(tmp_path / "x.npy", np.zeros((3, 5), np.float16))
    with pytest.raises(OptionError, match="no array can be a dense stream"):
        encode_adapted(kvmnn.open(tmp_path / "x.npy"), tmp_path / "x", make_options())


def test_encode_adapted_interrupted_leaves_nothing(tmp_path: Path) -> None:
    source = kvmnn.open(save(tmp_path / "kv", build_arrays(700)))
    calls = []
    encode_adapted(source, tmp_path / "out", make_options(), progress=calls.append)
    for stop in (0, len(calls) // 2, len(calls) - 1):
        steps = iter(range(len(calls)))

        def interrupt(_: int, steps: Any = steps, stop: int = stop) -> None:
            if next(steps) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            encode_adapted(source, tmp_path / "cut", make_options(), progress=interrupt)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "out"]
