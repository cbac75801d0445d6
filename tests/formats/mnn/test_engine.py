"""Files that the real engine (the MNN 3.6.1 wheel) reads and writes, against those of kvmnn."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from engine_client import (
    CONTINUATION,
    GEOMETRY,
    NAME,
    PREFIX_IDS,
    QUERY_IDS,
    Engine,
    continuation,
    needs_engine,
    unpack_fixture,
)

from kvmnn import KVMeta, PackedCache, PackLayout, SourceError
from kvmnn.cli.entry_point import main
from kvmnn.formats import open as open_any
from kvmnn.formats.mnn import mmap_cache as mnn_live
from kvmnn.formats.options import PackedOptions, ReadOptions
from kvmnn.packed.inference import PackedGeometry

pytestmark = needs_engine

LAYOUT = PackLayout(kv_heads=2, head_dim=16, dtype="fp32", lP=1, hP=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return unpack_fixture("model", tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return unpack_fixture("prefix", tmp_path_factory.mktemp("written"))


def kvmnn(*argv: object) -> None:
    assert main([str(arg) for arg in argv]) == 0


def described(prefix: Path) -> list[object]:
    return [prefix, *GEOMETRY, "--valid-tokens", 50]


@pytest.mark.parametrize("capacity", [None, 50, 114, 300])
def test_engine_loads_packed_prefix(model, prefix, tmp_path, capacity):
    kvmnn("mnn", "unpack", *described(prefix), "-o", tmp_path / "arrays.npz")
    room = [] if capacity is None else ["--capacity", capacity]
    target = [*GEOMETRY, "--name", NAME, *room]
    kvmnn("mnn", "pack", tmp_path / "arrays.npz", *target, "-o", tmp_path / "packed")
    assert continuation(model, tmp_path / "packed", tmp_path / "scratch") == CONTINUATION


def test_engine_loads_prefix_repacked_for_flash_attention(model, tmp_path, capsys):
    (tmp_path / "plain").mkdir()
    with Engine(model, tmp_path / "live", tmp_path / "plain", attention_mode=0) as engine:
        engine.call("prefix", NAME)
        engine.call("generate", PREFIX_IDS, 0)
    source = ("mnn", "repack", tmp_path / "plain", "--valid-tokens", 50)
    kvmnn(*source, "--target-backend", "x86-avx2", "-o", tmp_path / "same")
    assert "load it with attention_mode 0 (8, " in capsys.readouterr().err
    kvmnn(*source, "--target-backend", "x86-avx2,flash_block=64", "-o", tmp_path / "flash")
    assert "attention_mode" not in capsys.readouterr().err
    found = [
        continuation(model, tmp_path / folder, tmp_path / f"{folder}-{mode}", attention_mode=mode)
        for folder, mode in (("same", 0), ("flash", 8), ("same", 8))
    ]
    assert found[0] == found[1] == CONTINUATION != found[2]


def test_engine_loads_prefix_decoded_from_frames(model, prefix, tmp_path):
    kvmnn("encode", *described(prefix), "--model", model, "-o", f"{tmp_path}/frames/")
    kvmnn("decode", tmp_path / "frames", "--model", model, "-o", f"{tmp_path}/restored/")
    assert continuation(model, tmp_path / "restored", tmp_path / "scratch") == CONTINUATION


def test_engine_damaged_values_change_tokens(model, prefix, tmp_path):
    kvmnn("mnn", "unpack", *described(prefix), "-o", tmp_path / "arrays.npz")
    arrays = dict(np.load(tmp_path / "arrays.npz"))
    arrays["layer_0.value"][0] = -arrays["layer_0.value"][0]
    np.savez(tmp_path / "damaged.npz", **arrays)
    kvmnn("mnn", "pack", tmp_path / "damaged.npz", *GEOMETRY, "--name", NAME, "-o", tmp_path / "packed")
    found = continuation(model, tmp_path / "packed", tmp_path / "scratch")
    assert len(found) == 3
    assert found != CONTINUATION


def test_engine_partly_written_file_changes_tokens(model, prefix, tmp_path, capsys):
    """The engine checks sizes and markers alone, and V without rows gives other tokens: kvmnn refuses it."""
    broken = shutil.copytree(prefix, tmp_path / "broken")
    path = broken / f"{NAME}_0.v"
    path.write_bytes(bytes(path.stat().st_size))
    assert (
        main([*map(str, ("mnn", "repack", *described(broken), "--target-backend", "x86-avx2", "-o", tmp_path / "r"))])
        == 1
    )
    assert f"{NAME}_0.v: rows 0 to 49 of KV head 0 (and 1 more head like it) are zero" in capsys.readouterr().err
    found = continuation(model, broken, tmp_path / "scratch")
    assert len(found) == 3
    assert found != CONTINUATION


def test_engine_loads_renamed_prefix(model, tmp_path):
    """The engine writes, kvmnn ships and renames, another engine loads."""
    (tmp_path / "written").mkdir()
    with Engine(model, tmp_path / "scratch", tmp_path / "written") as engine:
        engine.call("prefix", "fresh")
        engine.call("generate", PREFIX_IDS, 0)
    assert (tmp_path / "written" / "fresh_1_sync.v").exists()
    kvmnn("encode", tmp_path / "written", *GEOMETRY, "--valid-tokens", 50, "-o", f"{tmp_path}/frames/")
    kvmnn("decode", tmp_path / "frames", "--name", "moved", "-o", f"{tmp_path}/restored/")
    assert continuation(model, tmp_path / "restored", tmp_path / "again", "moved") == CONTINUATION


def test_open_engine_prefix_needs_no_options(model, tmp_path):
    """Layout, heads and tokens are in the words; the backend of another build is refused."""
    (tmp_path / "written").mkdir()
    with Engine(model, tmp_path / "scratch", tmp_path / "written") as engine:
        engine.call("prefix", "fresh")
        engine.call("generate", PREFIX_IDS[:49], 0)
    cache = open_any(str(tmp_path / "written")).cache
    assert cache is not None
    assert (cache.layout.kv_heads, cache.layout.head_dim, cache.layout.hP, cache.layers[0].tokens) == (2, 16, 4, 49)
    other = PackedGeometry(kv_heads=2, head_dim=16, lP=1, hP=8, dtype="fp32")
    with pytest.raises(SourceError, match="x86-avx2"):
        open_any(str(tmp_path / "written"), ReadOptions(packed=PackedOptions(geometry=other, valid_tokens=(49,))))


@pytest.mark.parametrize("ids", [PREFIX_IDS, PREFIX_IDS[::-1]], ids=["same text", "other text"])
def test_open_document_of_prefix_that_engine_computed_again_is_refused(model, prefix, tmp_path, capsys, ids):
    """The engine writes files of the same name and size and leaves the document, which says that tokens are missing."""
    folder = tmp_path / "written"
    kvmnn("mnn", "compact", *described(prefix), "--reserve", "0:4,26:24", "-o", folder)
    sizes = {path.name: path.stat().st_size for path in folder.glob("sys_*")}
    assert main(["mnn", "repack", str(folder), "--target-backend", "x86-avx2", "-o", str(tmp_path / "r")]) == 0
    for marker in folder.glob("sys_*_sync.?"):
        marker.unlink()  # as a user who wants the prefix again
    with Engine(model, tmp_path / "scratch", folder) as engine:
        assert engine.call("prefix", NAME) == 0
        engine.call("generate", ids, 0)
    assert {path.name: path.stat().st_size for path in folder.glob("sys_*")} == sizes
    capsys.readouterr()
    verbs = (["encode", "-o", f"{tmp_path}/f/"], ["mnn", "unpack", "-o", f"{tmp_path}/x.npz"])
    for verb in verbs:
        assert main([*verb, str(folder)]) == 1, verb
        error = capsys.readouterr()
        assert "sys.kvmnn.json was written for other rows than those of layer 0" in error.err + error.out
        assert "compacted" not in error.err + error.out
    kvmnn("inspect", folder)
    assert "not known: sys.kvmnn.json was written for other rows" in capsys.readouterr().out
    assert main([*verbs[1], str(folder / "sys_1.k")]) == 1
    assert "than those of layer 1" in capsys.readouterr().err
    kvmnn(*verbs[0], folder, "--ignore", "contradictions")
    assert "LOSSLESS copy of LOSSY K and V" in capsys.readouterr().out
    (folder / "sys.kvmnn.json").unlink()
    kvmnn(*verbs[1], folder, *GEOMETRY)
    assert "50 tokens inferred" in capsys.readouterr().err


def test_encode_engine_prefix_of_continued_session(model, tmp_path):
    """The prefix file is the live cache: rows of the question and the answer follow those of the prefix."""
    (tmp_path / "written").mkdir()
    with Engine(model, tmp_path / "scratch", tmp_path / "written") as engine:
        engine.call("prefix", NAME)
        engine.call("generate", PREFIX_IDS, 0)
        engine.call("generate", QUERY_IDS, 3)
        for file in (tmp_path / "written").iterdir():
            shutil.copy(file, tmp_path / file.name)
    for file in (tmp_path / "written").iterdir():
        file.unlink()
    for file in tmp_path.glob("sys_*"):
        file.rename(tmp_path / "written" / file.name)
    kvmnn("encode", *described(tmp_path / "written"), "-o", f"{tmp_path}/frames/")
    kvmnn("decode", tmp_path / "frames", "-o", f"{tmp_path}/restored/")
    for file in (tmp_path / "written").iterdir():
        assert (tmp_path / "restored" / file.name).read_bytes() == file.read_bytes()
    assert continuation(model, tmp_path / "restored", tmp_path / "again") == CONTINUATION


def test_live_layer_order_by_birth_equals_descriptors(model, tmp_path):
    with Engine(model, tmp_path) as engine:
        engine.call("forward", PREFIX_IDS)
        addresses = sorted({path.stem for path in tmp_path.iterdir()})
        order, reason = mnn_live.sort_by_creation(tmp_path, addresses)
        has_times = "does not keep" not in reason and "as copies are" not in reason  # those of some systems are coarse
        assert order == mnn_live.list_open_addresses(tmp_path, engine.pid) or not has_times


@pytest.mark.parametrize(("begin", "end"), [(10, 35), (25, 50)])
def test_engine_continues_from_compacted_prefix(model, prefix, tmp_path, begin, end):
    """Compacted by kvmnn and loaded, or erased by the engine in a running session: the same tokens follow."""
    with Engine(model, tmp_path / "scratch") as engine:
        engine.call("forward", PREFIX_IDS)
        engine.call("erase", begin, end)
        expected = engine.call("generate", QUERY_IDS, 3)
    assert len(expected) == 3
    assert expected != CONTINUATION
    behind = ["--reserve", f"{end - begin}:{50 - end}"] if end < 50 else []
    kvmnn("mnn", "compact", *described(prefix), "--remove", 50 - begin, *behind, "-o", tmp_path / "small")
    with Engine(model, tmp_path / "again", tmp_path / "small") as engine:
        assert engine.call("prefix", NAME) == 1
        engine.call("generate", PREFIX_IDS[: 50 - end + begin], 0)
        assert engine.call("generate", QUERY_IDS, 3) == expected


# -- a running session ------------------------------------------------------------------------------------------------


def live(scratch: Path, pid: int, tokens: int, int8: str | None = None) -> dict[str, np.ndarray]:
    """The engine's caches as they lie in its files now."""
    geometry = PackedGeometry(kv_heads=2, head_dim=16, backend="x86-avx2", int8=int8)
    options = ReadOptions(packed=PackedOptions(geometry=geometry, valid_tokens=(tokens,), pid=pid))
    source = open_any(str(scratch), options)
    return {
        array.name: np.concatenate(list(array.iter_chunks())).view("<f4").reshape(array.shape)
        for array in source.arrays
    }


class Replay:
    """`PackedCache` for each layer, doing what the engine does; rows that are new come from the engine's files."""

    def __init__(self, layers: int) -> None:
        self.meta = KVMeta(dialect="upstream")
        self.caches = [PackedCache(LAYOUT, dialect="upstream") for _ in range(layers)]

    def forward(self, found: dict[str, np.ndarray], count: int) -> None:
        for layer, cache in enumerate(self.caches):
            rows = (found[f"layer_{layer}.{part}"][:, -count:] for part in ("key", "value"))
            cache.step(self.meta, *rows)
        self.meta.sync()

    def check(self, found: dict[str, np.ndarray], scratch: Path, pid: int) -> None:
        """The same arrays; and the same files to the last stale row."""
        files = mnn_live.find_mmap_files(str(scratch), pid=pid)
        for layer, cache in enumerate(self.caches):
            keys, values = cache.to_arrays()
            np.testing.assert_array_equal(keys, found[f"layer_{layer}.key"])
            np.testing.assert_array_equal(values, found[f"layer_{layer}.value"])
            assert Path(files.layers[layer].key).read_bytes() == cache.key_buffer.tobytes()
            assert Path(files.layers[layer].value).read_bytes() == cache.value_buffer.tobytes()


def test_live_files_equal_replay(model, tmp_path):
    ids = [*PREFIX_IDS, *QUERY_IDS, *PREFIX_IDS]
    replay = Replay(2)
    with Engine(model, tmp_path, None) as engine:

        def forward(tokens: list[int]) -> dict[str, np.ndarray]:
            history = engine.call("forward", tokens)
            expected = replay.meta.previous - replay.meta.remove + replay.meta.compute_reserve_size() + len(tokens)
            assert history == expected
            found = live(tmp_path, engine.pid, history)
            replay.forward(found, len(tokens))
            replay.check(found, tmp_path, engine.pid)
            return found

        first = forward(ids)
        forward([11])

        engine.call("erase", 20, 60)
        replay.meta.erase(20, 60)
        erased = forward([12, 13])
        np.testing.assert_array_equal(erased["layer_1.key"][:, :20], first["layer_1.key"][:, :20])
        np.testing.assert_array_equal(erased["layer_1.key"][:, 20:67], first["layer_1.key"][:, 60:])

        plan = [[0, 8], [16, 5], [40, 10]]
        engine.call("reserve", 60, plan)
        replay.meta.set_info(0, 60, [(begin, size) for begin, size in plan])
        kept = forward([14])
        assert kept["layer_0.key"].shape[1] == 10 + 23 + 1
        np.testing.assert_array_equal(kept["layer_0.value"][:, 18:23], erased["layer_0.value"][:, 26:31])
        forward(PREFIX_IDS * 3)  # past the capacity: the files grow


@pytest.mark.parametrize(("mode", "int8"), [(9, "keys"), (10, "both")])
def test_int8_engine_caches_are_within_one_step(model, tmp_path, mode, int8):
    ids = [*PREFIX_IDS, *QUERY_IDS, *PREFIX_IDS]
    found = {}
    for name, settings, kind in (("plain", {}, None), ("int8", {"attention_mode": mode, "reuse_kv": False}, int8)):
        with Engine(model, tmp_path / name, **settings) as engine:
            engine.call("forward", ids)
            found[name] = live(tmp_path / name, engine.pid, len(ids), kind)
    keys, values = found["plain"]["layer_0.key"], found["plain"]["layer_0.value"]
    shifted = keys - keys.max(axis=1, keepdims=True)  # what the engine quantises
    step = (shifted.max(axis=2, keepdims=True) - shifted.min(axis=2, keepdims=True)) / 255
    assert (np.abs(found["int8"]["layer_0.key"] - shifted) <= 0.51 * step + 1e-6).all()
    step = (values.max(axis=1, keepdims=True) - values.min(axis=1, keepdims=True)) / 255
    most = 0.51 * step + 1e-6 if int8 == "both" else 0
    assert (np.abs(found["int8"]["layer_0.value"] - values) <= most).all()


@pytest.mark.parametrize(("mode", "int8"), [(9, "keys"), (10, "both")])
def test_engine_continues_int8_keys_only_with_their_constants(model, prefix, tmp_path, capsys, mode, int8):
    """Why `pack` refuses them: K of the query has the constants that MNN takes off its int8 keys."""
    with Engine(model, tmp_path / "live", attention_mode=mode, reuse_kv=False) as engine:
        engine.call("forward", PREFIX_IDS)
        arrays = live(tmp_path / "live", engine.pid, 50, int8)
        backend = ("--kv-heads", 2, "--head-dim", 16, "--backend", f"x86-avx2,int8={int8}")
        order = ("--valid-tokens", 50, "--layer-order", f"pid={engine.pid}")
        kvmnn("mnn", "unpack", tmp_path / "live", *backend, *order, "-o", tmp_path / "a.npz")
    target = (*GEOMETRY, "--name", NAME)
    assert main(["mnn", "pack", str(tmp_path / "a.npz"), *target, "-o", str(tmp_path / "refused")]) == 1
    assert "K lacks a constant for each channel" in capsys.readouterr().err
    geometry = PackedGeometry(kv_heads=2, head_dim=16, backend="x86-avx2")
    exact = open_any(str(prefix), ReadOptions(packed=PackedOptions(geometry=geometry, valid_tokens=(50,))))
    found = {}
    for name in ("shifted", "whole"):
        np.savez(tmp_path / f"{name}.npz", **arrays)  # without the record
        kvmnn("mnn", "pack", tmp_path / f"{name}.npz", *target, "-o", tmp_path / name)
        found[name] = continuation(model, tmp_path / name, tmp_path / f"scratch-{name}")
        for layer in range(2):
            key = f"layer_{layer}.key"
            arrays[key] = arrays[key] + exact[key].to_numpy().max(axis=1, keepdims=True)
    assert found["whole"] == CONTINUATION != found["shifted"]
