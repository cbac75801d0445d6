"""How long MNN takes to the first token, computed and from K and V in memory: the file of --speed prefill=FILE.

python examples/time_engine.py MODEL TOKENS... > times.json   # such as 256 1024 2048; then kvmnn store stat --speed
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import kvmnn
from kvmnn.formats.options import PackedOptions
from kvmnn.packed import PackedGeometry
from kvmnn.store import PrefixStore, read_layer_caches, write_prefix

LAYOUT, ROUNDS = PackedGeometry(backend="x86-avx2"), 3
ENGINE = {"kvcache_mmap": True, "use_mmap": False, "reuse_kv": True, "attention_mode": 8, "use_template": False}
ENGINE |= {"memory": "high", "precision": "high", "thread_num": 2}  # time the settings that you serve with


def time_once(how, model, tokens, folder):  # in a process of its own: the engine keeps what it has computed
    import _mnncengine
    import MNN.llm

    llm, live, ids = MNN.llm.create(f"{model}/config.json"), tempfile.mkdtemp(), [1 + at % 250 for at in range(tokens)]
    llm.set_config(ENGINE | {"prefix_cache_path": folder, "tmp_path": live})
    llm.load(), llm.generate_init()
    with PrefixStore(f"{folder}/store-{tokens}") as store:
        prefix, started = store.get(ids[:-1], model=model) if how == "loaded" else None, time.perf_counter()
        if prefix is not None:
            write_prefix(prefix, ids, f"{folder}/", where="store", geometry=LAYOUT, name="p", model=model, force=True)
            name = ctypes.create_string_buffer((1).to_bytes(8, "little") * 2 + bytes(8) + b"p\0")
            call = ctypes.CDLL(_mnncengine.__file__)._ZN3MNN11Transformer3Llm18setPrefixCacheFileERKSsi
            call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
            text = ctypes.c_void_p(ctypes.addressof(name) + 24)
            assert call(ctypes.c_void_p.from_address(id(llm._c_obj) + 16), ctypes.byref(text), 0)
            llm._c_obj.generate(ids[:-1], 0)
        llm._c_obj.generate(ids[-1:] if prefix is not None else ids, 0)
        seconds = time.perf_counter() - started
        if how == "computed" and store.match(ids, model=model) < tokens:
            cache = PackedOptions(geometry=LAYOUT, valid_tokens=(tokens,), model=model, pid=os.getpid())
            store.put(ids, read_layer_caches(kvmnn.open(live, packed=cache)), model=model)
    return seconds


def main(model, *lengths):
    times = {"computed": {}, "loaded": {}}
    with tempfile.TemporaryDirectory() as folder:
        for tokens in lengths:
            for how, found in times.items():
                words = [sys.executable, __file__, "--once", how, model, tokens, folder]
                runs = [subprocess.run(words, capture_output=True, text=True, check=True) for _ in range(ROUNDS)]
                found[tokens] = statistics.median(float(run.stdout.split()[-1]) for run in runs)
    print(json.dumps(times))


if __name__ == "__main__":
    if sys.argv[1] == "--once":
        print(time_once(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]), flush=True)
        os._exit(0)  # the engine may crash in its static destructors
    main(*sys.argv[1:])
