"""Measure encrypted prefix stores: `python tools/bench/store_encryption.py [--model DIR]` prints the figures.

K and V of a text of 2,048 tokens in fp16, of the shipped model or another. CPU time, one thread, in turns:

* sealing and unsealing the units that a put makes, in the pieces that it writes;
* `put` and `get`, plain and encrypted.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from common import ROOT, interleaved
from store_first_tokens import computed

from kvmnn import LayerCache
from kvmnn.lm import DecoderSession, Tokenizer
from kvmnn.store import PrefixStore, StoreKey
from kvmnn.store.encryption import AeadCipher
from kvmnn.store.unit import parse_unit

KEY = bytes(range(32))
TOKENS = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=ROOT / "fixtures" / "lm", help="a model, default: the shipped one"
    )
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    texts = sorted((ROOT / "fixtures" / "lm" / "texts").glob("*.txt"))
    tokenizer = Tokenizer.open_for_model(arguments.model)
    ids = next(ids for text in texts if len(ids := tokenizer.encode(text.read_text("utf-8"))[:TOKENS]) == TOKENS)
    layers = [
        LayerCache(layer=cache.layer, keys=cache.keys.astype("<f2"), values=cache.values.astype("<f2"))
        for cache in computed(DecoderSession.open(arguments.model), ids)
    ]
    raw_bytes = sum(cache.keys.nbytes + cache.values.nbytes for cache in layers)
    print(f"{len(ids):,} tokens, {len(layers)} layers, {raw_bytes:,} bytes of K and V")
    for codec in ("dense", "frames"):
        with tempfile.TemporaryDirectory() as folder:
            measure_calls(Path(folder), ids, layers, codec, arguments.rounds)
            measure_units(Path(folder), arguments.rounds)


def measure_calls(folder: Path, ids: list[int], layers: list[LayerCache], codec: str, rounds: int) -> None:
    """Print the seconds of `put` and `get`."""

    def open_store(name: str) -> PrefixStore:
        return PrefixStore(folder / name, codec=codec, threads=1, key=None if name == "plain" else KEY)

    def put(name: str) -> None:
        with open_store(name) as store:
            assert store.put(ids, layers, model="m").stored_tokens == len(ids)

    def get(name: str) -> None:
        with open_store(name) as store:
            assert store.get(ids, model="m").tokens == len(ids)

    def clear() -> None:
        for path in folder.iterdir():
            shutil.rmtree(path)

    jobs = {"plain": lambda: put("plain"), "encrypted": lambda: put("encrypted")}
    put_times = interleaved(jobs, rounds, time.process_time, before=clear)
    clear()
    put("plain"), put("encrypted")
    get_times = interleaved({name: lambda name=name: get(name) for name in jobs}, rounds, time.process_time)
    for what, found in (("put", put_times), ("get", get_times)):
        medians = {name: statistics.median(seconds) for name, seconds in found.items()}
        print(f"{codec}: {what}: {', '.join(f'{name} {seconds:.4f} s' for name, seconds in medians.items())}")


def measure_units(folder: Path, rounds: int) -> None:
    """Print bytes a second of CPU time for the units of the plain store."""
    cipher = AeadCipher(StoreKey(KEY))
    units = [np.fromfile(path, np.uint8) for path in sorted(folder.glob("plain/units/*/*.unit"))]
    pieces = [parse_unit(unit).to_pieces() for unit in units]
    sealed = [
        np.frombuffer(b"".join(bytes(piece) for piece in cipher.seal_pieces(unit, "units")), np.uint8)
        for unit in pieces
    ]
    jobs = {
        "seal": lambda: [cipher.seal_pieces(unit, "units") for unit in pieces],
        "unseal": lambda: [cipher.unseal_array(unit, "units") for unit in sealed],
    }
    total = sum(unit.size for unit in units)
    for name, seconds in interleaved(jobs, rounds, time.process_time).items():
        median = statistics.median(seconds)
        print(f"{name}: {len(units)} units of {total // len(units):,} bytes: {total / median / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
