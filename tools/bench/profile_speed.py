"""Measure the speed of streams by a profile: `python tools/bench/profile_speed.py` writes benchmarks/profile_speed.md.

K and V of SmolLM2-135M in fp16, 2,048 tokens of a speech; profiles are made of a novel and of code. One thread, CPU
time, raw bytes; all cells take turns. Next to them the product alone that each needs, as numpy's matrix product.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import real
from common import interleaved, table, write_results

from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.calibration import ProfileOptions, make_profile_from_caches
from kvmnn.linear import decode_layers, encode_layers
from kvmnn.lm import DecoderSession, pull_model
from kvmnn.profiles import Profile
from kvmnn.transform import TransformMode, TransformOptions, decode_layer, encode_layer

MODEL = "smollm2-135m"
LAYERS = 6
"""Of the model's 30; their speeds differ by a few in a hundred."""

RATIO = 8
MODES: tuple[TransformMode, ...] = ("joint", "head", "diagonal", "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    pull_model(MODEL)
    session = DecoderSession.open(MODEL, threads=1)
    ids = {
        name: array.astype(np.int64)
        for name, array in np.load(real.FIXTURES / f"{real.MODELS[MODEL]}.npz").items()
        if name.endswith("_ids")
    }
    pairs = {text: real.read_text(session, ids[f"{text}_ids"])[0][:LAYERS] for text in real.TEXTS}
    measured, *others = pairs
    layers = [
        LayerCache(layer=layer, keys=keys.astype(np.float16), values=values.astype(np.float16))
        for layer, (keys, values) in enumerate(pairs[measured])
    ]
    with tempfile.TemporaryDirectory() as folder:
        caches = []
        for text in others:
            caches.append(Path(folder, f"{text}.npz"))
            words = {
                f"layer_{layer}.{part}": elements
                for layer, pair in enumerate(pairs[text])
                for part, elements in zip(("key", "value"), pair, strict=True)
            }
            np.savez(caches[-1], **words)
        profiles = {}
        for mode in MODES:
            settings = ProfileOptions(below=(0, 2), transform=mode, purpose=None if mode == "joint" else "lossy")
            path = Path(folder, f"{mode}.kvmp")
            make_profile_from_caches(caches, path, settings)
            profiles[mode] = Profile.read(path)
    jobs: dict[str, Callable[[], Any]] = {}
    sizes: dict[str, int] = {}
    for below in (0, 2):
        add_linear(jobs, sizes, layers, profiles["joint"], below)
    for mode in MODES:
        for below in (0, 2) if mode == "joint" else (0,):
            add_transform(jobs, sizes, layers, profiles[mode], mode, below)
    for width in sorted({layers[0].head_dim, layers[0].head_dim * layers[0].kv_heads}):
        add_products(jobs, layers, width)
    times = interleaved(jobs, options.rounds, time.process_time)
    raw_bytes = sum(cache.nbytes for cache in layers)
    speeds = {
        name: [raw_bytes / 1e6 / seconds for seconds in (min(taken), statistics.median(taken))]
        for name, taken in times.items()
    }
    data = {"speeds": speeds, "raw_bytes": raw_bytes, "sizes": sizes, "rounds": options.rounds}
    print(write_results("profile_speed", "Speed of streams by a profile", format_page(data), data).read_text())


def add_linear(
    jobs: dict[str, Callable[[], Any]], sizes: dict[str, int], layers: list[LayerCache], profile: Profile, below: int
) -> None:
    name = f"profile, {describe_level(below)}"
    streams = list(encode_layers(layers, profile, below=below))
    for cache, decoded in zip(layers, decode_layers(streams, profile), strict=True):
        real.check(
            name, cache.keys.tobytes() + cache.values.tobytes(), decoded.keys.tobytes() + decoded.values.tobytes()
        )
    sizes[name] = sum(map(len, streams))
    jobs[f"{name}: encode"] = lambda: list(encode_layers(layers, profile, below=below))
    jobs[f"{name}: decode"] = lambda: list(decode_layers(streams, profile))


def add_transform(
    jobs: dict[str, Callable[[], Any]],
    sizes: dict[str, int],
    layers: list[LayerCache],
    profile: Profile,
    mode: str,
    below: int,
) -> None:
    name = f"transform {mode}, {describe_level(below)}"
    options = TransformOptions(ratio=RATIO, below=below)

    def encode() -> list[bytes]:
        streams: list[bytes] = []
        lower: list[LayerCache] = []
        for cache in layers:
            encoding = encode_layer(cache, profile, lower[:below], options)
            streams.append(encoding.data)
            lower = [encoding.decoded, *lower[:1]]
        return streams

    def decode() -> list[LayerCache]:
        decoded: list[LayerCache] = []
        for data in streams:
            decoded.append(decode_layer(data, profile, decoded[: -below - 1 : -1] if below else ()))
        return decoded

    streams = encode()
    decode()  # whose checksums say that it is what encoding gave
    sizes[name] = sum(map(len, streams))
    jobs[f"{name}: encode"], jobs[f"{name}: decode"] = encode, decode


def add_products(jobs: dict[str, Callable[[], Any]], layers: list[LayerCache], width: int) -> None:
    """All rows of the layers times a square matrix of float32, by this many elements of a row."""
    rows = np.random.default_rng(1).standard_normal((2 * len(layers) * layers[0].keys.size // width, width), np.float32)
    matrix = np.ones((width, width), np.float32)
    jobs[f"matrix product, {width} x {width}"] = lambda: rows @ matrix


def describe_level(below: int) -> str:
    return f"{below} layers below" if below else "each layer alone"


def format_page(data: dict[str, Any]) -> list[str]:
    speeds = data["speeds"]
    rows = [
        [
            name,
            f"{data['raw_bytes'] / size:.3f}",
            *(f"{speed:.0f}" for way in ("encode", "decode") for speed in speeds[f"{name}: {way}"]),
        ]
        for name, size in data["sizes"].items()
    ]
    products = [[name, *(f"{speed:.0f}" for speed in speeds[name])] for name in speeds if ": " not in name]
    return [
        f"{LAYERS} layers of SmolLM2-135M in fp16, {data['raw_bytes']:,} bytes: 2,048 tokens of a speech; profiles of "
        f"{2 * real.TOKENS:,} tokens of a novel and code. MB/s of raw bytes, one thread, CPU time, best and median of "
        f"{data['rounds']}. `profile` is LOSSLESS, decoded and compared; `transform` is LOSSY, asked for a ratio of "
        f"{RATIO}; encoding includes decoding, as layers above are predicted from what a decoder has.",
        "",
        table(["streams", "ratio", "encode, best", "median", "decode, best", "median"], rows),
        "",
        "The product alone, float32, numpy's matrix product, of the same rows:",
        "",
        table(["product", "best", "median"], products),
        "",
    ]


if __name__ == "__main__":
    main()
