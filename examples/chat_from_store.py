"""A chat with an MNN model that outlives its process: K and V of what was said are parked in a prefix store.
Needs MNN and its exported model, on x86-64 Linux: pip install MNN==3.6.1 (another version may lack the function called)
python examples/chat_from_store.py MODEL STORE [NAME [--ids]]   # folders; a message a line; the chat NAME goes on
"""

import ctypes
import os
import sys
import tempfile
from contextlib import suppress

import MNN.llm

import kvmnn
from kvmnn.formats.mnn import compute_fingerprint
from kvmnn.formats.options import PackedOptions
from kvmnn.packed import PackedGeometry
from kvmnn.store import PrefixStore, read_layer_caches, write_prefix

AVX2, SETTINGS = PackedGeometry(backend="x86-avx2"), {"memory": "high", "precision": "high"}  # they change K and V
ENGINE = {"kvcache_mmap": True, "use_mmap": False, "reuse_kv": True, "attention_mode": 8, "use_template": False}


def set_prefix_file(llm, name):  # the exported C++ function, whose string has the old layout
    size, engine = len(name).to_bytes(8, "little"), ctypes.c_void_p.from_address(id(llm._c_obj) + 16)
    llm.prefix_name = ctypes.create_string_buffer(size + size + bytes(8) + name.encode() + b"\0")  # it is pointed to
    call = ctypes.CDLL(sys.modules["_mnncengine"].__file__)._ZN3MNN11Transformer3Llm18setPrefixCacheFileERKSsi
    assert call(engine, ctypes.byref(ctypes.c_void_p(ctypes.addressof(llm.prefix_name) + 24)), 0)


def main(model, folder, name="chat", *options):
    ready, tmp = tempfile.mkdtemp(), tempfile.mkdtemp()
    llm, fingerprint = MNN.llm.create(os.path.join(model, "config.json")), compute_fingerprint(model, SETTINGS)
    llm.set_config(ENGINE | SETTINGS | {"sampler_type": "greedy", "prefix_cache_path": ready, "tmp_path": tmp})
    llm.load(), llm.generate_init()
    engine, said, answers, stored, loss = llm._c_obj, [], [], 0, ""
    with PrefixStore(folder, max_bytes=4 << 30) as store:
        if (session := store.resume(name) if name in store.sessions() else None) is not None:
            said, stored, loss = session.token_ids, session.prefix.tokens, session.prefix.loss
        if stored:
            write_prefix(session.prefix, said, ready, where=folder, geometry=AVX2, name="p", model=model)
            set_prefix_file(llm, "p"), engine.generate(said[:stored], 0)  # taken from the files, not computed
        print(f"{name}: {stored:,} of {len(said):,} tokens from the store", flush=True)
        for line in sys.stdin:
            said += llm.tokenizer_encode(llm.apply_chat_template(line.strip()))
            num_before, answers = len(answers), engine.generate(said[max(stored, engine.get_current_history()) :], 64)
            said += [int(token) for token in answers[num_before:]]
            for token in [] if options else answers[num_before:]:
                with suppress(UnicodeDecodeError):  # of a part of a character
                    print(llm.tokenizer_decode(token), end="")
            print(said[-8:] if options else "", flush=True)
        if answers:
            end = engine.get_current_history()  # without a last token that ends the text
            kv = kvmnn.open(tmp, packed=PackedOptions(geometry=AVX2, valid_tokens=(end,), model=model, pid=os.getpid()))
            print(store.park(name, said[:end], read_layer_caches(kv), model=fingerprint, loss=loss))


main(*sys.argv[1:]) if len(sys.argv) > 2 and os.path.isfile(sys.argv[1] + "/config.json") else sys.exit(__doc__)
sys.stdout.flush(), os._exit(0)  # the engine may crash in its static destructors
