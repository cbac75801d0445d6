"""Files of other engines through encode and decode, by the command."""

from __future__ import annotations

from pathlib import Path


def there_and_back(run, path: Path, *options: object) -> Path:
    """The frames of a file, once decode has written the same file from them."""
    frames, back = path.with_name(path.name + ".frames"), path.with_name("back" + path.suffix)
    run("encode", path, "-o", f"{frames}/", "-q", *options)
    run("decode", frames, "-o", back, "-q", "-f")
    assert back.read_bytes() == path.read_bytes()
    return frames
