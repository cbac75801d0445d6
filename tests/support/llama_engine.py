"""llama.cpp itself (llama-cpp-python), quiet: contexts that are fed, saved and loaded. Skips where it is not there."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

llama = pytest.importorskip("llama_cpp", reason="without llama.cpp: make test-peers LLAMA=llama-cpp-python")

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}


@llama.llama_log_callback
def silent(*_: Any) -> None:
    """What llama.cpp would say of every model and context."""


llama.llama_backend_init()
llama.llama_log_set(silent, ctypes.c_void_p())


class Engine:
    """A context of llama.cpp."""

    def __init__(
        self, model: Path, kind: str = "f16", *, flash: bool = True, seqs: int = 1, unified: bool = True
    ) -> None:
        settings = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(str(model).encode(), settings)
        assert self.model
        context = llama.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_threads, context.n_threads_batch = 256 * seqs, 64, 1, 1
        context.type_k = context.type_v = TYPES[kind]
        context.flash_attn_type = int(flash)
        context.n_seq_max, context.kv_unified = seqs, unified
        self.context = llama.llama_init_from_model(self.model, context)
        assert self.context

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        llama.llama_free(self.context)
        llama.llama_model_free(self.model)

    def feed(self, ids: list[int], first: int = 0, seq: int = 0) -> np.ndarray:
        """The logits after the last of the ids."""
        batch = llama.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for number, token in enumerate(ids):
            batch.token[number], batch.pos[number], batch.n_seq_id[number] = token, first + number, 1
            batch.seq_id[number][0] = seq
            batch.logits[number] = number == len(ids) - 1
        assert llama.llama_decode(self.context, batch) == 0
        logits = llama.llama_get_logits_ith(self.context, len(ids) - 1)
        words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        found = np.ctypeslib.as_array(logits, (words,)).copy()
        llama.llama_batch_free(batch)
        return found

    def erase(self, begin: int, end: int) -> None:
        assert llama.llama_memory_seq_rm(llama.llama_get_memory(self.context), 0, begin, end)

    def save(self, path: Path, ids: list[int], seq: int | None = None) -> Path:
        array = (llama.llama_token * len(ids))(*ids)
        if seq is None:
            assert llama.llama_state_save_file(self.context, str(path).encode(), array, len(ids))
        else:
            assert llama.llama_state_seq_save_file(self.context, str(path).encode(), seq, array, len(ids))
        return path

    def load(self, path: Path, seq: int | None = None) -> list[int]:
        array, count = (llama.llama_token * 512)(), ctypes.c_size_t()
        if seq is None:
            assert llama.llama_state_load_file(self.context, str(path).encode(), array, 512, ctypes.byref(count))
        else:
            assert llama.llama_state_seq_load_file(
                self.context, str(path).encode(), seq, array, 512, ctypes.byref(count)
            )
        return list(array[: count.value])
