"""Files of token ids: what is refused before it is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvmnn.errors import SourceError
from kvmnn.formats.mnn.token_ids import load_token_ids


def test_a_file_above_a_gibibyte_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.touch()
    os.truncate(path, (1 << 30) + 1)
    with pytest.raises(SourceError, match=r"ids\.txt: 1073741825 bytes are too many for a list of token ids"):
        load_token_ids(str(path))
