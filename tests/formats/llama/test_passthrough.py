"""llama.cpp files as frames that restore the files byte for byte."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path
from random import Random

import llama_files
import numpy as np
import pytest
from kept_files import there_and_back
from llama_files import BLOCKS, NUMBERS, PLAIN, SEQUENCE, SESSION, Shape

import kvmnn
from kvmnn.formats import PackedOptions, ReadOptions
from kvmnn.packed.inference import PackedGeometry

HEADS = ReadOptions(packed=PackedOptions(geometry=PackedGeometry(kv_heads=2)))


@pytest.mark.parametrize("seed", range(16))
def test_llama_passthrough_any_file_round_trips(tmp_path: Path, run, seed: int) -> None:
    rng = Random(seed)
    transposed = rng.random() < 0.3
    shape = Shape(
        layers=rng.randint(1, 3),
        heads=rng.choice((1, 2)),
        k_type=rng.choice(sorted(NUMBERS)),
        v_type=rng.choice(PLAIN if transposed else sorted(NUMBERS)),
        transposed=transposed,
        extra=rng.choice((0, 12)),
    )
    second = [rng.randint(1, 5)] if rng.random() < 0.3 else None
    cells = [rng.randint(0, 6) for _ in range(rng.randint(0, 2))] + [rng.randint(1, 30)]
    data, _ = llama_files.state(
        rng,
        shape,
        cells[: len(second or cells)],
        kind=rng.choice((SESSION, SEQUENCE)),
        second=second,
        gaps=True,
        recurrent=rng.choice((0, 0, 2)),
    )
    path = tmp_path / "x.session"
    path.write_bytes(data)
    frames = there_and_back(run, path)
    assert "LOSSLESS (every byte compared" in run("verify", frames, "--against", path).out


@pytest.mark.parametrize("name", ["f16", "q8_0"])
def test_llama_passthrough_frames_read_like_the_file(tmp_path: Path, run, name: str) -> None:
    data, _ = llama_files.state(Random(2), Shape(k_type=name, v_type=name), [9], gaps=True)
    path = tmp_path / "x.session"
    path.write_bytes(data)
    frames = there_and_back(run, path)
    one, two = kvmnn.open(path, HEADS), kvmnn.open(frames, HEADS)
    assert one.names == two.names
    for array in one:
        assert np.array_equal(one[array].to_numpy(), two[array].to_numpy(), equal_nan=True)
    assert str(one.engine_cache) == str(two.engine_cache)
    assert "equal" in run("diff", path, frames, "--kv-heads", 2).out


def test_llama_passthrough_records_kv_heads(tmp_path: Path, run) -> None:
    path = tmp_path / "x.session"
    path.write_bytes(llama_files.state(Random(2), Shape(), [9])[0])
    frames = there_and_back(run, path, "--kv-heads", 2)
    assert kvmnn.open(frames)["layer_0.key"].shape == (2, 9, 32)


@pytest.mark.parametrize("kind", BLOCKS)
def test_llama_passthrough_splits_block_fields_where_smaller(tmp_path: Path, run, kind: str) -> None:
    """Scales that are all the same are a lane without content; of random blocks nothing is gained."""
    shape, path = Shape(layers=1, k_type=kind, v_type="f16"), tmp_path / "x.session"
    data, _ = llama_files.state(Random(2), shape, [200])
    blocks, size = bytearray(data), llama_files.BLOCK_BYTES[kind]
    start = data.index(struct.pack("<iQ", llama_files.NUMBERS[kind], 2 * size)) + 12
    for at in range(start, start + 400 * size, size):
        blocks[at : at + 2] = b"\x00\x3c"
    path.write_bytes(bytes(blocks))
    frames = there_and_back(run, path)
    names = [entry["name"] for entry in json.loads((frames / "manifest.json").read_text())["arrays"]]
    assert "layer_0.key.scales" in names
    assert "layer_0.key.codes" in names


def test_llama_passthrough_long_regions_become_arrays(tmp_path: Path, run) -> None:
    """Logits in older sessions may be larger than K and V."""
    data, _ = llama_files.state(Random(2), Shape(), [9], version=9, outputs=(1, 300_001, 3))
    path = tmp_path / "x.session"
    path.write_bytes(data)
    frames = there_and_back(run, path)
    assert (frames / "manifest.json").stat().st_size < 20_000


@pytest.mark.parametrize(
    ("name", "noted"),
    [
        (b"a\n\x1b[31mb.session", r"a\x0a\x1b[31mb.session"),
        (b"x\xff.session", r"x\xff.session"),
        (b"\xc3\xa9", "\u00e9"),
    ],
)
def test_llama_passthrough_unprintable_name_is_escaped(tmp_path: Path, run, name: bytes, noted: str) -> None:
    path = tmp_path / os.fsdecode(name)
    path.write_bytes(llama_files.state(Random(2), Shape(), [9])[0])
    found = run("encode", path, "-o", tmp_path / "frames")
    document = json.loads((tmp_path / "frames" / "manifest.json").read_text())
    assert json.loads(document["metadata"]["kvmnn.file"])["name"] == noted
    assert ("the manifest calls the file" in found.err) == (noted != os.fsdecode(name))
    run("decode", tmp_path / "frames", "-o", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_llama_passthrough_message_has_all_sizes(tmp_path: Path, run) -> None:
    path = tmp_path / "x.session"
    path.write_bytes(llama_files.state(Random(2), Shape(), [9])[0])
    said = run("encode", path).out
    frames = tmp_path / "x.session.frames"
    whole = sum(file.stat().st_size for file in frames.iterdir())
    more = f"x.session has {path.stat().st_size:,} bytes, frames and manifest have {whole:,}, which is more; decode"
    assert more in said
    path.unlink()
    said = run("decode", tmp_path / "x.session.frames").out
    size = path.stat().st_size
    assert f"the file x.session of 4 arrays, frames and manifest of {whole:,} bytes -> {size:,} bytes" in said
    assert "LOSSLESS (read back, sha256 of the file)" in said
    assert path.exists()
    found = json.loads(run("encode", path, "-o", f"{tmp_path}/again/", "--json").out)
    sizes = {"bytes": path.stat().st_size, "stored_bytes": whole}
    more = f"frames and manifest have {whole:,} bytes, the file has {size:,}, which is less"
    assert found["notes"] == [more]
    assert more in run("inspect", frames).out
    assert found["file"] == {"name": "x.session", "format": "llama-state", **sizes, "room_bytes": 0}


@pytest.mark.parametrize("kind", llama_files.NUMBERS)
def test_llama_passthrough_is_never_larger_than_the_file(tmp_path: Path, run, kind: str) -> None:
    """Noise in small arrays, of which frames would be larger: stored as it is. What frames make smaller is not."""
    path = tmp_path / "x.session"
    shape = Shape(layers=1, k_type=kind, v_type=kind)
    path.write_bytes(llama_files.state(Random(3), shape, [5])[0])
    stored = json.loads((there_and_back(run, path) / "manifest.json").read_bytes())["arrays"]
    assert all(array["stored_bytes"] <= array["raw_bytes"] for array in stored)
    data = llama_files.state(Random(3), shape, [500])[0]
    zeros = len(data) // 3  # of V, which is the last two fifths at least
    path.write_bytes(data[:-zeros] + bytes(zeros))
    frames = there_and_back(run, path, "-f")
    stored = json.loads((frames / "manifest.json").read_bytes())["arrays"]
    assert any(array["stored_bytes"] < array["raw_bytes"] for array in stored)
    assert sum(file.stat().st_size for file in frames.iterdir()) < path.stat().st_size


def test_llama_passthrough_decodes_to_arrays_on_request(tmp_path: Path, run) -> None:
    path = tmp_path / "x.session"
    path.write_bytes(llama_files.state(Random(2), Shape(), [9])[0])
    frames = there_and_back(run, path)
    run("decode", frames, "-o", tmp_path / "plain.npz")
    with np.load(tmp_path / "plain.npz") as found:
        assert found["layer_0.key"].shape == (9, 64)
    run("mnn", "unpack", frames, "--kv-heads", 2, "-o", tmp_path / "heads.npz")
    with np.load(tmp_path / "heads.npz") as found:
        assert found["layer_0.key"].shape == (2, 9, 32)


def changed(frames: Path, change) -> None:
    document = json.loads((frames / "manifest.json").read_text())
    kept = json.loads(document["metadata"]["kvmnn.file"])
    change(kept)
    document["metadata"]["kvmnn.file"] = json.dumps(kept)
    (frames / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: kept.update(sha256="0" * 64), "does not match the sha256 of the file"),
        (lambda kept: kept.update(bytes=5), "the sum of the parts"),
        (lambda kept: kept.update(format="new-1"), "the format 'new-1' is not known"),
        (lambda kept: kept.update(schema_version=2), "the version this kvmnn reads"),
        (lambda kept: kept["parts"].reverse(), "does not match the sha256 of the file"),
        (lambda kept: kept["parts"].pop(), "the sum of the parts"),
        (lambda kept: kept["parts"][0].update(zlib="AAAA"), "bytes that zlib made"),
        (lambda kept: kept["parts"][0].update(zlib="="), "base64"),
        (lambda kept: kept["parts"][0].update(bytes=1 << 40), "bytes that are no array's"),
        (lambda kept: kept["parts"][1]["arrays"][0].__setitem__(0, "nobody"), "does not fit the array 'nobody'"),
        (lambda kept: kept["parts"][1]["arrays"][0].__setitem__(1, 7), "a multiple of what the arrays give"),
        (lambda kept: kept.update(kv_heads=[0]), "an integer of at least 1"),
    ],
)
def test_llama_passthrough_inconsistent_manifest_is_refused(tmp_path: Path, run, change, message: str) -> None:
    path, out = tmp_path / "x.session", tmp_path / "out"
    path.write_bytes(llama_files.state(Random(2), Shape(), [9])[0])
    frames = there_and_back(run, path)
    changed(frames, change)
    if "new-1" in message:
        assert message in run("mnn", "unpack", frames, "-o", f"{out}.npz", code=1).err
    else:
        assert message in run("decode", frames, "-o", out, code=1).err
    assert not out.exists()


def test_llama_passthrough_reads_standard_input(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = llama_files.state(Random(2), Shape(), [9])
    for argv in (
        ("encode", "-", "-o", f"{tmp_path}/f/"),
        ("mnn", "unpack", "-", "--kv-heads", 2, "-o", tmp_path / "o.npz"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        run(*argv)
    run("decode", tmp_path / "f", "-o", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    with np.load(tmp_path / "o.npz") as found:
        assert found["layer_0.key"].shape == (2, 9, 32)


@pytest.mark.parametrize("size", [100, 1000])
@pytest.mark.parametrize("kind", ["q8_0", "q5_1"])
def test_llama_passthrough_any_chunk_size_round_trips(tmp_path: Path, run, kind: str, size: int) -> None:
    path = tmp_path / "x.session"
    path.write_bytes(llama_files.state(Random(2), Shape(k_type=kind, v_type=kind), [30])[0])
    there_and_back(run, path, "--chunk-bytes", size, "--allow-raw")


def test_llama_passthrough_selected_arrays_are_no_whole_file(tmp_path: Path, run) -> None:
    path = tmp_path / "x.session"
    path.write_bytes(llama_files.state(Random(2), Shape(), [9])[0])
    (tmp_path / "y.session").write_bytes(path.read_bytes())
    run("encode", path, tmp_path / "y.session", "--kv-heads", 2, "-o", f"{tmp_path}/both/")
    assert "kvmnn.file" not in (tmp_path / "both/manifest.json").read_text()
    run("encode", path, "--kv-heads", 2, "--tensor", "layer_0.key", "-o", tmp_path / "one.frame")
    assert "kvmnn.file" not in (tmp_path / "one.frame.json").read_text()


def test_llama_passthrough_note_when_arrays_are_encoded(tmp_path: Path, run) -> None:
    data, _ = llama_files.state(Random(1), llama_files.Shape(1, 2, 8, 8), [5])
    for name in ("a", "b"):
        (tmp_path / f"{name}.session").write_bytes(data)
    one, other = tmp_path / "a.session", tmp_path / "b.session"
    said = "arrays are encoded, and decode will not write the file: "
    out = ("--kv-heads", 2, "-f", "-o", f"{tmp_path / 'x.frames'}/")
    assert f"{said}--tensor" in run("encode", one, "--tensor", "layer_0.key", *out).err
    assert f"{said}--part sequence" in run("encode", one, "--part", "sequence=0", *out).err
    assert f"{said}several inputs" in run("encode", one, other, *out).err
    assert said not in run("encode", one, "-f", "-o", f"{tmp_path / 'x.frames'}/").err
    assert said not in run("encode", one, "-q", "--tensor", "layer_0.key", *out).err


@pytest.mark.slow
def test_llama_passthrough_verify_compares_all_parts(tmp_path: Path, run) -> None:
    """Every third byte of a file of a hybrid model: token ids, positions, and the state after K and V."""
    shape = Shape(layers=1, dims=32, k_type="q8_0")
    data, _ = llama_files.state(Random(2), shape, [3], recurrent=1)
    path, other = tmp_path / "x.session", tmp_path / "other.session"
    path.write_bytes(data)
    frames = there_and_back(run, path)
    equal = 0
    for place in range(0, len(data), 3):
        other.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        said = run("verify", frames, "--against", other, code=1).err  # refused, or DIFFERS
        assert said.count("\n") == 1
        equal += f"DIFFERS from {other}: the file differs from byte {place:,} on, outside of its arrays" in said
    assert equal > 16
    other.write_bytes(data[:12] + b"\x01" + data[13:])  # the first token id
    assert json.loads(run("verify", frames, "--against", other, "--json", code=1).out)["difference"]["array"] is None


def test_llama_passthrough_verify_rebuilds_the_file(tmp_path: Path, run) -> None:
    """The parts besides arrays are verified by the hash of the file, as in decode."""
    path = tmp_path / "x.session"
    path.write_bytes(llama_files.state(Random(2), Shape(k_type="q8_0"), [9])[0])
    frames = there_and_back(run, path)
    assert "LOSSLESS (decoded, sha256 of all of x.session), " in run("verify", frames).out
    manifest = json.loads((frames / "manifest.json").read_text())
    kept = json.loads(manifest["metadata"]["kvmnn.file"])
    literal = next(part for part in kept["parts"] if "base64" in part)
    literal["base64"] = ("A" if literal["base64"][0] != "A" else "B") + literal["base64"][1:]
    manifest["metadata"]["kvmnn.file"] = json.dumps(kept)
    (frames / "manifest.json").write_text(json.dumps(manifest))
    assert "does not match the sha256 of the file" in run("verify", frames, code=1).err
    assert "does not match the sha256 of the file" in run("verify", frames, "--jobs", "1", code=1).out


@pytest.mark.parametrize("kinds", [("q8_0", "q4_0"), ("q8_0", "f16")])
def test_llama_passthrough_raw_blocks_need_no_heads(tmp_path: Path, run, kinds: tuple[str, str]) -> None:
    """If all arrays are blocks, no heads are needed; next to other types they are."""
    path = tmp_path / "x.session"
    path.write_bytes(llama_files.state(Random(2), Shape(k_type=kinds[0], v_type=kinds[1]), [9])[0])
    asked = "f16" in kinds
    said = run("encode", path, "--raw-blocks", "-o", tmp_path / "f/", code=2 if asked else 0)
    assert ("--kv-heads" in said.err) == asked
    if not asked:
        run("verify", tmp_path / "f", "--against", path, "--raw-blocks")
        run("decode", tmp_path / "f", "-o", tmp_path / "x.npz")
        blocks = np.load(tmp_path / "x.npz")["layer_0.value"]
        assert blocks.dtype == np.uint8 and blocks.shape == (9, 2, 18)
    run("encode", path, "--raw-blocks", "--kv-heads", 2, "-o", tmp_path / "g/")
