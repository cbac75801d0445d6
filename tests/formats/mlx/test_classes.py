"""Every cache class of mlx-lm, as four versions saved them: K and V are read, other classes are named."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import mlx_files
import numpy as np
import pytest
from kept_files import there_and_back
from mlx_files import Shape
from repository import FIXTURES

import kvmnn
from kvmnn.arrays.completeness import IncompleteCacheError
from kvmnn.errors import SourceError

HEADS, DIMS = 2, 32
PADDINGS = (2, 0, 5)
VERSIONS = ("0.24.0", "0.28.3", "0.31.3", "0.32.2")


@cache
def files() -> dict[str, bytes]:
    """The fixture's files by name: `VERSION-CASE`."""
    data = lzma.decompress((FIXTURES / "mlx/classes.tar.xz").read_bytes())
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = {member.name: archive.extractfile(member) for member in archive}
    return {name.removesuffix(".safetensors"): file.read() for name, file in members.items() if file}


def rows(texts: int, layer: int, part: int, positions: list[int]) -> np.ndarray:
    """What tools/fixtures/mlx_classes.py put in for tokens at these positions of their texts."""
    found = np.empty((texts, HEADS, len(positions), DIMS), np.float16)
    for text in range(texts):
        for head in range(HEADS):
            for place, position in enumerate(positions):
                for dim in range(DIMS):
                    value = position * 13 + layer * 101 + part * 211 + head * 17 + dim * 5 + text * 31
                    found[text, head, place, dim] = value % 2039
    return found


def put(path: Path, name: str) -> Path:
    path.write_bytes(files()[name])
    return path


def cases(*names: str) -> list[str]:
    return [f"{version}-{name}" for version in VERSIONS for name in names if f"{version}-{name}" in files()]


def check_layer(source: kvmnn.arrays.Source, layer: int, positions: list[int], text: int | None = None) -> None:
    """K and V of a layer, of one text (`text` of the batch) or of all."""
    for part, name in enumerate(("key", "value")):
        expected = rows(1 if text is None else len(PADDINGS), layer, part, positions)[text or 0]
        assert np.array_equal(source[f"layer_{layer}.{name}"].to_numpy(), expected)


@pytest.mark.parametrize("name", cases("plain", "quantised", "arrays", "mamba", "list", "window", "chunked", "batch"))
def test_mlx_files_of_every_version_round_trip(tmp_path: Path, run, name: str) -> None:
    there_and_back(run, put(tmp_path / "x.safetensors", name))


@pytest.mark.parametrize("name", cases("plain", "window"))
def test_mlx_plain_layers_and_windows_have_positions(tmp_path: Path, name: str) -> None:
    source = kvmnn.open(put(tmp_path / "x.safetensors", name))
    if name.endswith("plain"):
        expected = {0: list(range(9)), 1: list(range(9))}
    else:  # layer 0 keeps the first two
        expected = {0: [0, 1, *range(29, 35)], 1: list(range(35)), 2: list(range(27, 35))}
        assert source.completeness is not None
        assert [state.window for state in source.completeness.layers] == [8, None, 8]
    for layer, positions in expected.items():
        check_layer(source, layer, positions)


def test_mlx_quantised_caches_of_all_versions_are_equal(tmp_path: Path) -> None:
    found = [kvmnn.open(put(tmp_path / f"{name}.safetensors", name)) for name in cases("quantised")]
    assert len(found) == len(VERSIONS)
    for source in found:
        assert source.engine_cache is not None
        assert str(source.engine_cache) == (
            "MLX prompt cache: 2 layers, 2 kv heads of 32, 9 tokens, 4 bits in groups of 32/8 bits in groups of 32"
        )
        for array, first in zip(source.arrays, found[0].arrays, strict=True):
            assert np.array_equal(array.to_numpy(), first.to_numpy())
        check_close = np.abs(source["layer_0.key"].to_numpy() - rows(1, 0, 0, list(range(9)))[0].astype(np.float32))
        assert check_close.max() < 4  # 8 bits of rows up to 2,039


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mlx_quantised_three_settings_equal_four(tmp_path: Path, seed: int, bits: int) -> None:
    rng = Random(seed)
    shape = Shape(bits=bits, new=False, tokens=rng.randint(1, 6), dims=rng.choice((64, 96)))
    sources = []
    for settings in (3, 4):
        data, _ = mlx_files.cache(Random(seed), replace(shape, settings=settings))
        (tmp_path / f"{settings}.safetensors").write_bytes(data)
        sources.append(kvmnn.open(tmp_path / f"{settings}.safetensors"))
    for three, four in zip(sources[0].arrays, sources[1].arrays, strict=True):
        assert np.array_equal(three.to_numpy(), four.to_numpy())


@pytest.mark.parametrize(
    ("name", "layers", "missing"),
    [
        *(
            (n, [2], "3 of 4 layers have recurrent or convolution state and are in the file as ArraysCache")
            for n in cases("arrays")
        ),
        *(
            (n, [1], "1 of 2 layers has recurrent or convolution state and is in the file as MambaCache")
            for n in cases("mamba")
        ),
        *(
            (n, [1], "1 of 2 layers has state of an unknown kind and is in the file as CacheList")
            for n in cases("list")
        ),
    ],
)
def test_mlx_other_classes_next_to_plain_layers_are_named(
    tmp_path: Path, run, name: str, layers: list[int], missing: str
) -> None:
    path = put(tmp_path / "x.safetensors", name)
    source = kvmnn.open(path)
    assert list(source) == [f"layer_{layer}.{part}" for layer in layers for part in ("key", "value")]
    for layer in layers:
        check_layer(source, layer, list(range(9)))
    assert source.completeness is not None
    assert source.completeness.missing == [missing]
    for verb in (
        ["inspect", path],
        ["measure", path],
        ["encode", path, "--tensor", f"layer_{layers[0]}.key", "-o", tmp_path / "f/"],
    ):
        assert missing in run(*verb).out
    for verb in (["inspect", path], ["measure", path]):
        assert missing in run(*verb, "--json").out
    ids = ",".join(map(str, range(9)))
    for verb in (
        ["store", "put", tmp_path / "store", path, "--fingerprint", "m", "--token-ids", ids],
        ["mnn", "pack", path, "--name", "p", "--backend", "arm64-fp16", "-o", tmp_path / "prefix/"],
    ):
        result = run(*verb, code=1)
        assert missing in result.err
        assert len(result.err.splitlines()) == 1


def test_mlx_frames_of_whole_file_name_states(tmp_path: Path, run) -> None:
    path = put(tmp_path / "x.safetensors", "0.31.3-arrays")
    assert "incomplete" not in run("encode", path, "-o", tmp_path / "f/").out
    said = run("inspect", tmp_path / "f").out
    assert "layers 0 to 1, 3: recurrent or convolution state" in said
    assert "state_0.0" in said
    assert "layer_0" not in said
    with pytest.raises(IncompleteCacheError, match="3 of 4 layers"):
        from kvmnn.store.adapters import read_layer_caches

        read_layer_caches(kvmnn.open(tmp_path / "f"))


@pytest.mark.parametrize("name", cases("chunked", "chunked_short"))
def test_mlx_chunked_caches_have_positions(tmp_path: Path, name: str) -> None:
    source = kvmnn.open(put(tmp_path / "x.safetensors", name))
    held = {layer: p.tolist() for layer, p in _positions(source).items()}
    chunked = [0] if name.endswith("chunked") else [0, 1]
    if name.endswith("short"):
        assert all(positions == list(range(9)) for positions in held.values())
    else:  # older versions cut whole steps of the buffer; this one all but the last chunk, before each token
        first = 63 if name.startswith("0.32") else 256
        assert held == {0: list(range(first, 320)), 1: list(range(320))}
    for layer, positions in held.items():
        check_layer(source, layer, positions)
    assert source.completeness is not None
    assert [state.window for state in source.completeness.layers][: len(chunked)] == [256] * len(chunked)


def _positions(source: kvmnn.arrays.Source) -> dict[int, np.ndarray]:
    described = source.engine_cache
    assert described is not None
    if described.layer_positions is not None:
        return dict(enumerate(described.layer_positions))
    assert described.positions is not None
    return dict.fromkeys(range(described.layers), described.positions)


@pytest.mark.parametrize("name", cases("batch", "batch_window_short", "batch_window"))
@pytest.mark.parametrize("text", range(3))
def test_mlx_batch_texts_are_read_without_padding(tmp_path: Path, run, name: str, text: int) -> None:
    path = put(tmp_path / "x.safetensors", name)
    seen = 35 if name.endswith("batch_window") else 9
    assert f"batch of 3 ({seen - 5} to {seen} tokens and padding)" in run("inspect", path).out
    run("mnn", "unpack", path, "--part", f"batch={text}", "-o", tmp_path / "out/")
    source = kvmnn.open(tmp_path / "out")
    tokens = seen - PADDINGS[text]
    window = min(8, tokens) if name.endswith("batch_window") else tokens
    check_layer(source, 0, list(range(tokens - window, tokens)), text)
    check_layer(source, 1, list(range(tokens)), text)
    if name.endswith("batch"):
        ids = ",".join(map(str, range(tokens)))
        put_it = ["store", "put", tmp_path / "store", path, "--fingerprint", "m", "--token-ids", ids]
        assert "is a batch" in run(*put_it, code=1).err
        assert f"{tokens} tokens" in run(*put_it, "--part", f"batch={text}").out


SETTINGS = [
    ("0.31.3-quantised", "0.0.0", "999999999", "999,999,999 tokens: expected at least 1 and at most 9"),
    ("0.31.3-quantised", "0.0.0", "9" * 5000, "expected a whole number from 0 to 999,999,999"),
    ("0.31.3-quantised", "0.0.0", "-1", "the setting '-1': expected a whole number"),
    ("0.31.3-quantised", "0.1.1", "nan", "the setting 'nan': expected a whole number"),
    ("0.31.3-quantised", "0.0.1", "0", "groups of 0 codes"),
    ("0.31.3-quantised", "0.0.2", "7", "of 7 bits"),
    ("0.31.3-window", "0.0.2", "999999999", "rows hold tokens|have seen"),
    ("0.31.3-window", "0.0.3", "x", "the setting 'x'"),
    ("0.31.3-chunked", "0.0.1", "999999999", "have seen"),
    ("0.31.3-chunked", "0.0.0", "0", "in chunks of 0"),
    ("0.31.3-chunked", "0.0.1", "٣", "expected a whole number"),
    ("0.31.3-batch_window", "0.0.2", "900", "does not fit"),
    ("0.31.3-batch_window", "0.0.0", "-8", "expected a whole number"),
]


@pytest.mark.parametrize(("name", "key", "value", "message"), SETTINGS)
def test_mlx_inconsistent_settings_are_refused(
    tmp_path: Path, run, name: str, key: str, value: str, message: str
) -> None:
    path = put(tmp_path / "x.safetensors", name)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert key in header["__metadata__"]
    header["__metadata__"][key] = value
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(SourceError, match=message):
        kvmnn.open(path)
    there_and_back(run, path)
