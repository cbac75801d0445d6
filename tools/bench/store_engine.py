"""One prompt answered by an MNN engine, timed: `python store_engine.py JOB`, a JSON object; prints one.

Run by store.py, each time in a process of its own, as the engine may crash in its static destructors and keeps what it
has computed. JOB: `model`, `kv_heads`, `head_dim`, `ids`, `folder` for files and stores, `scratch`, an empty folder for
what this process alone needs, `new_tokens` to generate after the first (default: none), `profile`, the model's, for
codecs that need it, and `how`:

* `"fill"`: compute, and put the beginnings of `sizes` tokens, each into a store of its own in `folder`, for each of
  `codecs`; then the times of the codecs on the longest, as break-even takes them;
* `"computed"`: the whole prompt;
* `"own"`: all but the last token from the engine's own files, which are written where they are not there;
* `"store"`: the same from the store of `codec`: `get`, the files written, the files loaded.

Seconds are wall time, those of the processors under `cpu`, and under `user` these without the system's part: to make
room for arrays with large pages takes the system 4 to 320 ms, by the state of the memory, which nothing predicts.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import kvmnn
from kvmnn import LayerCache
from kvmnn.formats.options import PackedOptions
from kvmnn.packed.inference import PackedGeometry
from kvmnn.store import PrefixStore, read_layer_caches, write_prefix
from kvmnn.store.tier_times import measure_codec_times

PROFILE_SETTINGS: dict[str, dict[str, float]] = {"profile": {}, "transform": {"kl": 0.002}}
"""Options of the codecs that need a profile."""

SETTINGS = {"kvcache_mmap": True, "use_mmap": False, "reuse_kv": True, "attention_mode": 8, "use_template": False}
SETTINGS |= {"memory": "high", "precision": "high", "thread_num": 1, "sampler_type": "greedy"}
"""One thread: of two, one that waits for the other calls the scheduler without end, half a second of a processor where
others use it as well."""


CLOCKS = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
    "user": lambda: resource.getrusage(resource.RUSAGE_SELF).ru_utime,
}


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

    def generate(self, ids: list[int], count: int) -> list[int]:
        """New tokens after these ids."""
        return [int(token) for token in self._llm._c_obj.generate(ids, count)]


class Watch:
    """Seconds since it was made, by each of `CLOCKS`."""

    def __init__(self) -> None:
        self._started = {name: clock() for name, clock in CLOCKS.items()}
        self.times: dict[str, dict[str, float]] = {name: {} for name in CLOCKS}

    def note(self, name: str) -> None:
        for clock, started in self._started.items():
            self.times[clock][name] = CLOCKS[clock]() - started


def main(job: dict[str, Any]) -> dict[str, Any]:
    ids, folder = job["ids"], job["folder"]
    geometry = PackedGeometry(backend="x86-avx2", kv_heads=job["kv_heads"], head_dim=job["head_dim"])
    ready, live = tempfile.mkdtemp(dir=job["scratch"]), tempfile.mkdtemp(dir=job["scratch"])
    own = job["how"] == "own"
    engine = Engine(job["model"], folder if own else ready, live)
    if job["how"] == "fill":
        engine.compute(ids)
        options = PackedOptions(geometry=geometry, valid_tokens=(len(ids),), model=job["model"], pid=os.getpid())
        layers = read_layer_caches(kvmnn.open(live, packed=options))
        puts = {codec: [fill(job, codec, ids[:size], layers) for size in job["sizes"]] for codec in job["codecs"]}
        timed = [codec for codec in job["codecs"] if codec not in PROFILE_SETTINGS]
        times = {
            name: [each.to_dict() for each in measure_codec_times(layers, codecs=timed, clock=clock)]
            for name, clock in CLOCKS.items()
        }
        return {"puts": puts, "layers": len(layers), "times": times}
    if own and not Path(folder, f"own{len(ids)}_0.k").exists():
        engine.prefix(f"own{len(ids)}")
        engine.compute(ids[:-1])
        return {"written": True}
    tokens = 0
    with open_store(job, job.get("codec"), len(ids)) as store:
        store.get(ids[:-1], model="m")  # a server has the tables of its model, and memory for a result
        watch = Watch()
        if job["how"] == "store":
            found = store.get(ids[:-1], model="m")
            watch.note("get")
            write_prefix(found, ids, ready, where="store", geometry=geometry, name="p")
            watch.note("written")
            tokens = found.tokens
            assert tokens == len(ids) - 1 and engine.prefix("p")
        elif own:
            tokens = len(ids) - 1
            assert engine.prefix(f"own{len(ids)}")
        if tokens:
            engine.compute(ids[:tokens])
        if job.get("new_tokens"):
            return {"generated": engine.generate(ids[tokens:], job["new_tokens"])}
        engine.compute(ids[tokens:])
        watch.note("seconds")
        return watch.times


def open_store(job: dict[str, Any], codec: str | None, size: int) -> PrefixStore:
    """The store of a text of this size; without a codec an empty one."""
    more: dict[str, Any] = (
        {"profile": job["profile"], "codec_options": PROFILE_SETTINGS[codec]} if codec in PROFILE_SETTINGS else {}
    )
    return PrefixStore(Path(job["folder"], f"{codec}-{size}"), codec=codec, **more)


def fill(job: dict[str, Any], codec: str, ids: list[int], layers: list[LayerCache]) -> dict[str, int]:
    """Raw and stored bytes of a text."""
    size = len(ids)
    cut = [LayerCache(layer=one.layer, keys=one.keys[:, :size], values=one.values[:, :size]) for one in layers]
    with open_store(job, codec, size) as store:
        put = store.put(ids, cut, model="m")
    return {"raw_bytes": sum(one.nbytes for one in cut), "stored_bytes": put.stored_bytes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", metavar="JOB", type=json.loads, help="what to do, as JSON")
    print("@" + json.dumps(main(parser.parse_args().job)), flush=True)
    os._exit(0)
