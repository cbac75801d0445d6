"""What a file is, by its first bytes and its name."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from kvmnn.compressor.checkpoint import is_checkpoint


def test_is_checkpoint_distinguishes_torch_and_numpy_archives(tmp_path: Path) -> None:
    arrays, torch, neither = (str(tmp_path / name) for name in ("a.zip", "t.zip", "n.bin"))
    np.savez(tmp_path / "made.npz", k=np.zeros(2))
    (tmp_path / "made.npz").rename(arrays)
    with zipfile.ZipFile(torch, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    Path(neither).write_bytes(b"not an archive")
    assert [is_checkpoint(path) for path in (arrays, torch, neither)] == [False, True, False]
    assert is_checkpoint(str(tmp_path / "any.PTH")) and is_checkpoint(str(tmp_path / "any.pt"))
