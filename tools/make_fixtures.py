"""Pack data from elsewhere into fixtures/, once: `python tools/make_fixtures.py frames DIR` and `kv_real DIR`.

`frames` takes a folder with frame vectors (format mnn-frame-vectors-1), `kv_real` one with the arrays
kv_real_{k,v}_{fp16,fp32}.npy, shaped [layer, token, head, dim]. Fixtures are golden: what is there is never made
again from kvmnn's own output.
"""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["frames", "kv_real"])
    parser.add_argument("source", type=Path, metavar="DIR")
    options = parser.parse_args()
    {"frames": pack_vectors, "kv_real": cut_arrays}[options.what](options.source, FIXTURES / options.what)


def pack_vectors(source: Path, target: Path) -> None:
    """All files of a vector set in one archive with nothing in it that depends on when or by whom it was made."""
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target / "vectors.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(str(path.relative_to(source)))
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(entry, file)


def cut_arrays(source: Path, target: Path) -> None:
    """The first tokens of every layer in fp16; of the first two layers' K also in fp32."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("k", "v"):
        array = np.load(source / f"kv_real_{name}_fp16.npy", mmap_mode="r")
        np.save(target / f"{name}_fp16.npy", np.ascontiguousarray(array[:, :TOKENS]))
    array = np.load(source / "kv_real_k_fp32.npy", mmap_mode="r")
    np.save(target / "k_fp32.npy", np.ascontiguousarray(array[:2, :TOKENS]))


if __name__ == "__main__":
    main()
