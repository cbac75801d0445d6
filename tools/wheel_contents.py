"""Say what the bytes of a wheel are: `python tools/wheel_contents.py dist/kvmnn-*.whl`."""

from __future__ import annotations

import argparse
import os
import zipfile
from collections import defaultdict
from typing import NamedTuple

KINDS = {".so": "compiled modules", ".pyd": "compiled modules", ".dylib": "compiled modules", ".py": "Python"}
OTHER_LIBRARIES = "libraries of others"
METADATA = "metadata, licences"
REST = "data and type stubs"


class Share(NamedTuple):
    """Files of one kind: how many, their bytes in the wheel and once installed."""

    files: int
    packed_bytes: int
    installed_bytes: int


def kind_of(name: str) -> str:
    """Return what a file of a wheel is."""
    folder = name.partition("/")[0]
    if folder.endswith(".libs"):
        return OTHER_LIBRARIES
    if folder.endswith(".dist-info"):
        return METADATA
    return KINDS.get(os.path.splitext(name)[1], REST)


def measure_contents(path: str) -> dict[str, Share]:
    """Return the share of each kind, the largest first; the zip's own directory is the rest of the file."""
    found: dict[str, Share] = defaultdict(lambda: Share(0, 0, 0))
    with zipfile.ZipFile(path) as wheel:
        for entry in wheel.infolist():
            share = found[kind_of(entry.filename)]
            found[kind_of(entry.filename)] = Share(
                share.files + 1, share.packed_bytes + entry.compress_size, share.installed_bytes + entry.file_size
            )
    left = os.path.getsize(path) - sum(share.packed_bytes for share in found.values())
    found["directory of the archive"] = Share(0, left, 0)
    return dict(sorted(found.items(), key=lambda item: -item[1].packed_bytes))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", metavar="WHEEL")
    path = parser.parse_args(argv).wheel
    print(f"wheel: {os.path.basename(path)}")
    print(f"{'':<26} {'files':>6} {'in the wheel':>13} {'installed':>13}  (bytes)")
    shares = measure_contents(path)
    for kind, share in shares.items():
        print(f"{kind:<26} {share.files:>6,} {share.packed_bytes:>13,} {share.installed_bytes:>13,}")
    total = Share(*map(sum, zip(*shares.values(), strict=True)))
    print(f"{'total':<26} {total.files:>6,} {total.packed_bytes:>13,} {total.installed_bytes:>13,}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
