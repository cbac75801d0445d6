"""Measure what more calibration text gives: `python tools/bench/profile_growth.py [TEXT ...]`.

Profiles of SmolLM2-135M are made of growing numbers of tokens of fixtures/lm_real/texts, fixtures/lm/texts and the
texts named, by turns. Each codes the texts of real.py, which none of them has: losslessly, and with transform streams
whose ratios are compared at equal KL. Writes a page to benchmarks.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import real
from common import ROOT, table, write_results

from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.calibration import ProfileOptions, make_profile
from kvmnn.linear import decode_layers, encode_layers
from kvmnn.lm import DecoderSession, pull_model
from kvmnn.profiles import Profile

MODEL = "smollm2-135m"
MEASURED_TEXT = "enum.py.txt"
"""The code that real.py measures is a part of it."""
SIZES = (12_288, 49_152, 196_608)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, help="further texts that are not those of real.py")
    parser.add_argument("--tokens", nargs="+", type=int, default=SIZES)
    options = parser.parse_args()
    folders = (real.FIXTURES / "texts", ROOT / "fixtures" / "lm" / "texts")
    own = [path for folder in folders for path in sorted(folder.glob("*.txt")) if path.name != MEASURED_TEXT]
    texts = [*own, *options.texts]
    pull_model(MODEL)
    reference = dict(np.load(real.FIXTURES / f"{real.MODELS[MODEL]}.npz"))
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "profile.kvmp")
            result = make_profile(MODEL, texts, path, ProfileOptions(tokens=tokens, below=(0, 2), threads=1))
            profile = Profile.read(path)
        rows.append(measure_profile(profile, reference) | {"tokens": result.tokens, "texts": result.texts})
        write_results("profile_growth", "What more calibration text gives", format_page(rows), {"rows": rows})


def measure_profile(profile: Profile, reference: dict[str, Any]) -> dict[str, Any]:
    """Lossless bytes of fp16 by text, and rows of transform streams."""
    session = DecoderSession.open(MODEL, attentions=True, threads=1)
    sizes = []
    for text in real.TEXTS:
        pairs, _ = real.read_text(session, reference[f"{text}_ids"].astype(np.int64))
        caches = [
            LayerCache(layer=layer, keys=keys.astype(np.float16), values=values.astype(np.float16))
            for layer, (keys, values) in enumerate(pairs)
        ]
        size = {"text": text, "raw": sum(cache.nbytes for cache in caches)}
        for codec, below in zip(real.KVMNN_CODECS[3:], (0, 2), strict=True):
            streams = list(encode_layers(caches, profile, below=below))
            for cache, decoded in zip(caches, decode_layers(streams, profile), strict=True):
                real.check(codec, cache.keys.tobytes(), decoded.keys.tobytes())
                real.check(codec, cache.values.tobytes(), decoded.values.tobytes())
            size[codec] = sum(map(len, streams))
        sizes.append(size)
    return {"sizes": sizes, "transforms": real.measure_transforms(session, reference, list(real.TEXTS), profile)}


def format_page(rows: list[dict[str, Any]]) -> list[str]:
    ratios = [real.interpolate_ratios(row["transforms"]) for row in rows]
    lossless = [
        [f"{row['tokens']:,}", str(row["texts"]), codec, *format_sizes(row["sizes"], codec)]
        for row in rows
        for codec in real.KVMNN_CODECS[3:]
    ]
    lossy = [
        [f"{row['tokens']:,}", level, *(f"{ratio:.2f}" for ratio in ratio_by_level[level])]
        for row, ratio_by_level in zip(rows, ratios, strict=True)
        for level in real.LEVELS
    ]
    return [
        f"{MODEL}, the three texts of [real.md](real.md), of which no profile has a part; calibration texts: Python "
        "source, speeches, a novel, and those named on the command line.",
        "",
        f"Lossless, fp16, all layers of {real.TOKENS:,} tokens, decoded and compared:",
        "",
        table(["calibration tokens", "texts", "streams", "all", *real.TEXTS.values()], lossless),
        "",
        f"LOSSY, transform streams of {real.PROMPT:,} tokens, all bytes counted; KL of the tokens after them, measured "
        f"at asked KLs of {' and '.join(map(str, real.ASKED_KL))} and interpolated:",
        "",
        table(["calibration tokens", "streams", *(f"ratio at KL {kl}" for kl in real.COMPARED_KL)], lossy),
        "",
    ]


def format_sizes(sizes: list[dict[str, Any]], codec: str) -> list[str]:
    total = sum(size["raw"] for size in sizes) / sum(size[codec] for size in sizes)
    return [f"{ratio:.3f}" for ratio in (total, *(size["raw"] / size[codec] for size in sizes))]


if __name__ == "__main__":
    main()
