"""Files of a running engine: how they are assigned to layers."""

from __future__ import annotations

import os
import shutil
import time

import numpy as np
import packed_samples
import pytest

from kvmnn import SourceError
from kvmnn.files.file_info import read_birth_time
from kvmnn.formats import open as open_any
from kvmnn.formats.mnn import mmap_cache as mnn_live
from kvmnn.formats.options import PackedOptions, ReadOptions
from kvmnn.packed.inference import PackedGeometry

AVX2 = PackedGeometry(kv_heads=2, head_dim=6, backend="x86-avx2")
HAS_BIRTH_TIME = read_birth_time(__file__) is not None


def read(path, tokens=(), geometry=AVX2, **options):
    return open_any(str(path), ReadOptions(packed=PackedOptions(geometry=geometry, valid_tokens=tokens, **options)))


def words(array):
    return np.concatenate(list(array.iter_chunks())).view(array.array_dtype).reshape(array.shape)


@pytest.fixture
def live(tmp_path):
    layers = packed_samples.arrays(2, 2, 20, 6)
    for layer, address in enumerate(("00005560831CAB70", "000055C4C7A96F40")):
        for part, buffer in zip("kv", packed_samples.packed(*layers[2 * layer :][:2], 1, 4, 64, 84), strict=True):
            (tmp_path / f"{address}.{part}").write_bytes(buffer.tobytes())
    return tmp_path, layers


def test_mmap_cache_copied_files_need_layer_order(live):
    path, layers = live
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))  # older than the file itself, as copies are
    with pytest.raises(
        SourceError, match=r"tells their layers, and they are copies, made in any order: say --layer-order pid"
    ):
        read(path, (20,))
    order = ("000055c4c7a96f40", "00005560831CAB70")
    source = read(path, (20,), layer_order=order)
    assert source.cache.kind == "live"
    np.testing.assert_array_equal(words(source.arrays[0]), layers[2])
    with pytest.raises(SourceError, match="the order names"):
        read(path, (20,), layer_order=order[:1])
    one = read(path / "00005560831CAB70.v", (20,))
    np.testing.assert_array_equal(words(one.arrays[1]), layers[1])


@pytest.mark.skipif(not HAS_BIRTH_TIME, reason="needs a file system that keeps when files were made")
def test_mmap_cache_layers_are_ordered_by_birth(tmp_path):
    """Whatever their names: the second address is that of the first layer."""
    layers = packed_samples.arrays(3, 2, 20, 6)
    for layer, address in enumerate(("000055C4C7A96F40", "00005560831CAB70", "0000557000000000")):
        paths = [tmp_path / f"{address}.{part}" for part in "kv"]
        buffers = packed_samples.packed(*layers[2 * layer :][:2], 1, 4, 64, 84)
        for path in paths:  # as the engine does, before it writes both
            path.touch()
        time.sleep(0.02)
        for path, buffer in zip(paths, buffers, strict=True):
            path.write_bytes(buffer.tobytes())
    source = read(tmp_path, (20,))
    assert "order of the 3 layers inferred from when their files were made" in source.notes[0]
    for number in range(3):
        np.testing.assert_array_equal(words(source.arrays[2 * number]), layers[2 * number])
    (tmp_path / "0000557000000000.v").rename(tmp_path / "aside")
    (tmp_path / "00005560831CAB70.v").unlink()
    time.sleep(0.02)
    (tmp_path / "00005560831CAB70.v").write_bytes((tmp_path / "aside").read_bytes())
    (tmp_path / "aside").rename(tmp_path / "0000557000000000.v")
    with pytest.raises(SourceError, match="and K and V were made in different orders"):
        read(tmp_path, (20,))


@pytest.mark.parametrize("reverse", [False, True])
def test_mmap_cache_copies_with_times_of_their_own_need_layer_order(live, tmp_path, reverse):
    """As ``cp`` without -p makes them, in the order of names or any other."""
    path, _ = live
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in sorted(path.glob("*.[kv]"), reverse=reverse):
        shutil.copyfile(file, copy / file.name)
    reason = "each was written before the next was made, as copies are" if HAS_BIRTH_TIME else "does not keep"
    with pytest.raises(SourceError, match=reason):
        read(copy, (20,))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_mmap_cache_layers_are_ordered_by_open_descriptors(live):
    path, layers = live
    handles = [os.open(path / f"{name}.{part}", os.O_RDONLY) for name in
               ("000055C4C7A96F40", "00005560831CAB70") for part in "kv"]  # fmt: skip
    try:
        source = read(path, (20,), pid=os.getpid())
        np.testing.assert_array_equal(words(source.arrays[0]), layers[2])
        os.close(handles.pop())
        os.close(handles.pop())
        with pytest.raises(SourceError, match=r"has 2 pairs of files, but process .* has 1 of them open"):
            read(path, (20,), pid=os.getpid())
    finally:
        for handle in handles:
            os.close(handle)
    with pytest.raises(SourceError, match="open files cannot be listed"):
        mnn_live.list_open_addresses(path, 2**22 + 1)
