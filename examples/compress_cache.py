"""Compress a KV cache, prove that nothing was lost, and show what each codec gives.

    python examples/compress_cache.py [CACHE]

CACHE is anything that kvmnn reads: .npy, .npz, .safetensors, a llama.cpp session, an MLX prompt cache, MNN's files.
Without it, the cache of the model that ships with kvmnn on one of its texts, which needs the extra lm.
"""

import sys
import tempfile
from pathlib import Path

import kvmnn
from kvmnn.bundle import DenseOptions, EncodeOptions, encode_source, open_frames, verify_frame_set
from kvmnn.lm import dump_kv

FIXTURES = Path(__file__).parent.parent / "fixtures"
CODECS = {
    "exact (MNN's own bytes)": EncodeOptions(effort="exact"),
    "fast (MNN decodes it)": EncodeOptions(effort="fast"),
    "dense (for kvmnn alone)": EncodeOptions(dense=DenseOptions()),
}


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if arguments:
            cache = Path(arguments[0])
        else:
            cache = work / "kv"
            dump_kv(FIXTURES / "lm", FIXTURES / "lm" / "texts" / "calendar.py.txt", cache, tokens=512, dtype="fp16")
        source = kvmnn.open(cache)
        print(f"{cache.name}: {len(source.names)} arrays, {source.nbytes:,} bytes")
        for label, options in CODECS.items():
            output = work / label.split()[0]
            result = encode_source(source, output, options)
            verdict = verify_frame_set(open_frames(output), source)
            print(f"{label:26} ratio {source.nbytes / result.stored_bytes:.3f}   {verdict}".splitlines()[0])


if __name__ == "__main__":
    main(sys.argv[1:])
