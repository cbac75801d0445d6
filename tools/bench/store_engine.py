"""One prompt answered by an MNN engine, timed: `python store_engine.py JOB`, a JSON object; prints one.

Run by store.py, each time in a process of its own, as the engine may crash in its static destructors and keeps what it
has computed. JOB: `model`, `kv_heads`, `head_dim`, `ids`, `folder` for files and stores, and `how`:

* `"fill"`: compute, and put the beginnings of `sizes` tokens, each into a store of its own in `folder`;
* `"computed"`: the whole prompt;
* `"own"`: all but the last token from the engine's own files, which are written where they are not there;
* `"store"`: the same from the store: `get`, the files written, the files loaded.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import kvmnn
from kvmnn import LayerCache
from kvmnn.formats.options import PackedOptions
from kvmnn.packed.inference import PackedGeometry
from kvmnn.store import PrefixStore, read_layer_caches, write_prefix

SETTINGS = {"kvcache_mmap": True, "use_mmap": False, "reuse_kv": True, "attention_mode": 8, "use_template": False}
SETTINGS |= {"memory": "high", "precision": "high", "thread_num": 1, "sampler_type": "greedy"}


class Engine:
    """A loaded model; every call is of its first and only prompt."""

    def __init__(self, model: str, prefixes: str, live: str) -> None:
        import MNN.llm  # it prints a line, and --help does not need it

        self._llm = MNN.llm.create(str(Path(model, "config.json")))
        self._llm.set_config(SETTINGS | {"prefix_cache_path": prefixes, "tmp_path": live})
        self._llm.load()
        self._llm.generate_init()

    def prefix(self, name: str) -> bool:
        """Whether the files are there; else the next call writes them."""
        import _mnncengine

        text, count = name.encode(), len(name).to_bytes(8, "little")
        self._kept = ctypes.create_string_buffer(count + count + bytes(8) + text + b"\0")
        string = ctypes.c_void_p(ctypes.addressof(self._kept) + 24)
        call = ctypes.CDLL(_mnncengine.__file__)._ZN3MNN11Transformer3Llm18setPrefixCacheFileERKSsi
        call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        return bool(call(ctypes.c_void_p.from_address(id(self._llm._c_obj) + 16), ctypes.byref(string), 0))

    def compute(self, ids: list[int]) -> None:
        """Until the logits after the last id are there."""
        self._llm._c_obj.generate(ids, 0)


def main(job: dict[str, Any]) -> dict[str, Any]:
    ids, folder = job["ids"], job["folder"]
    geometry = PackedGeometry(backend="x86-avx2", kv_heads=job["kv_heads"], head_dim=job["head_dim"])
    ready, live = tempfile.mkdtemp(dir=folder), tempfile.mkdtemp(dir=folder)
    own = job["how"] == "own"
    engine = Engine(job["model"], folder if own else ready, live)
    if job["how"] == "fill":
        engine.compute(ids)
        options = PackedOptions(geometry=geometry, valid_tokens=(len(ids),), model=job["model"], pid=os.getpid())
        layers = read_layer_caches(kvmnn.open(live, packed=options))
        return {"puts": [fill(folder, ids[:size], layers) for size in job["sizes"]], "layers": len(layers)}
    if own and not Path(folder, f"own{len(ids)}_0.k").exists():
        engine.prefix(f"own{len(ids)}")
        engine.compute(ids[:-1])
        return {"written": True}
    tokens, times = 0, {}
    with PrefixStore(Path(folder, str(len(ids))), create=job["how"] != "store") as store:
        started = time.perf_counter()
        if job["how"] == "store":
            found = store.get(ids[:-1], model="m")
            times["get"] = time.perf_counter() - started
            write_prefix(found, ids, ready, where="store", geometry=geometry, name="p")
            times["written"] = time.perf_counter() - started
            tokens = found.tokens
            assert tokens == len(ids) - 1 and engine.prefix("p")
        elif own:
            tokens = len(ids) - 1
            assert engine.prefix(f"own{len(ids)}")
        if tokens:
            engine.compute(ids[:tokens])
        engine.compute(ids[tokens:])
        return {**times, "seconds": time.perf_counter() - started}


def fill(folder: str, ids: list[int], layers: list[LayerCache]) -> dict[str, int]:
    """Raw and stored bytes of a text."""
    size = len(ids)
    cut = [LayerCache(layer=one.layer, keys=one.keys[:, :size], values=one.values[:, :size]) for one in layers]
    with PrefixStore(Path(folder, str(size))) as store:
        put = store.put(ids, cut, model="m")
    return {"raw_bytes": sum(one.nbytes for one in cut), "stored_bytes": put.stored_bytes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", metavar="JOB", type=json.loads, help="what to do, as JSON")
    print("@" + json.dumps(main(parser.parse_args().job)), flush=True)
    os._exit(0)
