"""Files of token ids that are refused before they are read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvmnn.errors import SourceError
from kvmnn.formats.mnn.token_ids import load_token_ids


def test_load_token_ids_too_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.touch()
    os.truncate(path, (1 << 30) + 1)
    with pytest.raises(SourceError, match=r"ids\.txt: 1073741825 bytes are too many for a list of token ids"):
        load_token_ids(str(path))


def test_load_token_ids_array_holds_one_text(tmp_path: Path) -> None:
    """``[1, token]`` is what tokenizers make of one."""
    path = tmp_path / "ids.npy"
    for shape in ((6,), (1, 6)):
        np.save(path, np.arange(6).reshape(shape))
        assert load_token_ids(str(path)).tolist() == [0, 1, 2, 3, 4, 5]
    for shape in ((2, 3), (6, 1), (1, 1, 6)):
        np.save(path, np.arange(6).reshape(shape))
        with pytest.raises(SourceError, match=r"ids\.npy: token ids: expected those of one text, \[token\], found"):
            load_token_ids(str(path))
