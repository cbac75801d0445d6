"""Drives a real MNN engine: `python engine_driver.py MODEL_DIR SCRATCH_DIR SETTINGS`, SETTINGS being a JSON object.

Reads one JSON list a line from standard input, an operation and its arguments, and answers each with one line of JSON.
The engine may crash in its static destructors, so the process ends without running them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import _mnncengine
import MNN.llm

SETTINGS = {
    "kvcache_mmap": True,
    "use_mmap": False,
    "precision": "high",
    "memory": "high",
    "thread_num": 1,
    "reuse_kv": True,
    "attention_mode": 8,
    "sampler_type": "greedy",
    "use_template": False,
}
_LLM_POINTER = 16  # where the Python object keeps its Llm*


class Engine:
    """One loaded model and the operations on it that the tests need."""

    def __init__(self, model: str, scratch: str, settings: str) -> None:
        self._llm = MNN.llm.create(str(Path(model, "config.json")))
        self._llm.set_config(SETTINGS | {"tmp_path": scratch} | json.loads(settings))
        self._llm.load()
        self._llm.generate_init()
        self._raw = ctypes.c_void_p.from_address(id(self._llm._c_obj) + _LLM_POINTER)
        self._library = ctypes.CDLL(_mnncengine.__file__)
        self._kept: list[Any] = []  # the engine keeps pointers to what it is given

    def forward(self, ids: list[int]) -> int:
        self._llm.forward(ids)
        return self.history()

    def history(self) -> int:
        return int(self._llm._c_obj.get_current_history())

    def erase(self, begin: int, end: int) -> int:
        self._llm._c_obj.erase_history(begin, end)
        return self.history()

    def reserve(self, remove: int, pairs: list[list[int]]) -> int:
        flat = [number for pair in pairs for number in pair]
        plan = (ctypes.c_int * len(flat))(*flat)
        self._kept.append(plan)
        set_info = self._library._ZN3MNN11Transformer3Llm14setKVCacheInfoEmmPii
        set_info.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int]
        set_info(self._raw, 0, remove, plan, len(pairs))
        return self.history()

    def prefix(self, name: str) -> int:
        text = name.encode()
        header = len(text).to_bytes(8, "little") * 2 + (0).to_bytes(8, "little", signed=True)
        block = ctypes.create_string_buffer(header + text + b"\0")
        string = ctypes.c_void_p(ctypes.addressof(block) + len(header))
        self._kept += [block, string]
        set_file = self._library._ZN3MNN11Transformer3Llm18setPrefixCacheFileERKSsi
        set_file.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        return int(bool(set_file(self._raw, ctypes.byref(string), 0)))

    def set_length(self, tokens: int) -> int:
        """Set `LlmContext::all_seq_len`, the position of the next token, and return what it was.

        ``mContext`` is the first member of `Llm` after its table of virtual functions, and ``all_seq_len`` the third
        integer of what it points to (llm.hpp of MNN 3.6.1).
        """
        assert self._raw.value is not None
        context = ctypes.c_void_p.from_address(self._raw.value + ctypes.sizeof(ctypes.c_void_p)).value
        assert context is not None
        length = ctypes.c_int.from_address(context + 2 * ctypes.sizeof(ctypes.c_int))
        before, length.value = length.value, tokens
        return before

    def generate(self, ids: list[int], count: int) -> list[int]:
        found = self._llm._c_obj.generate(ids, count)
        return [int(token) for token in found] if found is not None else []


def main() -> None:
    engine = Engine(*sys.argv[1:4])
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        print("@" + json.dumps(getattr(engine, operation)(*arguments)), flush=True)
    os._exit(0)


main()
