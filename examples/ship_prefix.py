"""A prompt's KV cache, computed by a model here, as the prefix cache file that MNN loads on a phone.

    python examples/ship_prefix.py [BACKEND]

BACKEND names the layout of the phone's engine build: arm64-fp16 for most phones of the last years, arm64-fp32 for
older ones (`kvmnn mnn pack --help` lists all; docs/prefix-cache.md says which is which).
Needs the extra lm.
"""

import sys
import tempfile
from pathlib import Path

import kvmnn
from kvmnn.formats.mnn import pack
from kvmnn.lm import dump_kv
from kvmnn.packed import PackedGeometry
from kvmnn.packed.backends import BACKENDS

FIXTURES = Path(__file__).parent.parent / "fixtures"


def main(arguments: list[str]) -> None:
    backend = arguments[0] if arguments else "arm64-fp16"
    if backend not in BACKENDS:
        print(f"no backend {backend!r}: expected one of {', '.join(BACKENDS)}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        kv, prefix = Path(folder) / "kv", Path(folder) / "prefix"
        dumped = dump_kv(FIXTURES / "lm", FIXTURES / "lm" / "texts" / "calendar.py.txt", kv, tokens=256, dtype="fp16")
        print(dumped)
        print(pack(kvmnn.open(kv), str(prefix), PackedGeometry(backend=backend), name="system_prompt", cast=True))
        for file in sorted(prefix.rglob("*")):
            if file.is_file():
                print(f"  {file.relative_to(prefix)}  {file.stat().st_size:,} bytes")
        again = kvmnn.open(prefix)
        print(f"read back: {len(again.names)} arrays, {again.nbytes:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
