"""Memory that a prefix store takes: `python store_memory.py URL [RAM_BYTES]` puts and gets texts, and prints one line.

Every text has its own K and V, of which little is hard to compress, made again for each call.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np

from kvmnn import LayerCache
from kvmnn.frames._workspace import clear_workspaces
from kvmnn.store import PrefixStore

LAYERS, HEADS, HEAD_DIM, TOKENS, TEXTS = 4, 8, 128, 2048, 4
RAW = 2 * LAYERS * HEADS * HEAD_DIM * TOKENS * 4
"""Bytes of a text: 64 MiB."""
THREADS = 2


def anonymous() -> int:
    """Bytes that the process holds now, mapped files left out."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The most that the process held in a ``with`` block, above what it held at its beginning."""

    def __enter__(self) -> Peak:
        self._before = self._most = anonymous()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._ended.is_set():
            self._most = max(self._most, anonymous())
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.nbytes = max(self._most, anonymous()) - self._before


def text(number: int) -> list[int]:
    return [number * TOKENS + at for at in range(TOKENS)]


def caches(number: int) -> list[LayerCache]:
    rng = np.random.default_rng(number)
    made = []
    for layer in range(LAYERS):
        keys, values = (np.zeros((HEADS, TOKENS, HEAD_DIM), np.float32) for _ in range(2))
        keys[:, ::4] = rng.standard_normal((HEADS, TOKENS // 4, HEAD_DIM), np.float32)
        made.append(LayerCache(layer=layer, keys=keys, values=values))
    return made


def main(url: str, ram_bytes: int | None) -> dict[str, int]:
    puts, gets, stored = [], [], 0
    with PrefixStore(url, threads=THREADS, ram_bytes=ram_bytes) as store:
        store.put(
            [1], [LayerCache(layer=0, keys=np.zeros((1, 1, 4), "f4"), values=np.zeros((1, 1, 4), "f4"))], model="x"
        )
        begun = anonymous()
        for number in range(TEXTS):
            layers = caches(number)
            with Peak() as peak:
                stored = store.put(text(number), layers, model="m").stored_bytes
            puts.append(peak.nbytes)
            del layers
        working = anonymous()
        clear_workspaces()
        working -= anonymous()
        held = anonymous() - begun
        for number in range(TEXTS):
            with Peak() as peak:
                found = store.get(text(number), model="m")
            assert found.tokens == TOKENS
            gets.append(peak.nbytes)
            del found
        clear_workspaces()
        left = anonymous() - begun
    peaks = {"put": max(puts), "get": max(gets)}
    return {"raw": RAW, "stored": stored, "working": working, "held": held, "left": left, **peaks}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)))
