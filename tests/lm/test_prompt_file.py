"""A prompt is read up to its limit, and no further."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmnn.errors import SourceError
from kvmnn.lm import tokenizer
from kvmnn.lm.tokenizer import read_prompt_file


def test_read_prompt_file_limit_is_inclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MAX_PROMPT_BYTES", 6)
    path = tmp_path / "prompt.txt"
    path.write_text("äöü")
    assert read_prompt_file(str(path)) == "äöü"
    path.write_text("äöü!")
    with pytest.raises(SourceError, match="7 bytes are too many for a prompt"):
        read_prompt_file(str(path))
