"""The shipped model in torch and in kvmnn. Without torch, transformers or kvpress these tests fail: make test-peers."""

from __future__ import annotations

import numpy as np
import pytest
from repository import FIXTURES

from kvmnn.lm.session import DecoderSession
from kvmnn.lm.tokenizer import Tokenizer

FIXTURE = FIXTURES / "lm"


@pytest.fixture(scope="session")
def decoder():
    """The model in torch, a mask of its own for every layer."""
    import torch
    from torch_reference import TorchDecoder, load_model

    torch.set_num_threads(1)
    return TorchDecoder(load_model(FIXTURE))


@pytest.fixture(scope="session")
def session():
    """The same in kvmnn, with attention probabilities."""
    return DecoderSession.open(FIXTURE, attentions=True, cache=False)


@pytest.fixture(scope="session")
def read():
    """The first tokens of a held-out text, the one that begins every text among them."""

    def first_tokens(name, tokens):
        text = (FIXTURE / "texts" / name).read_text(encoding="utf-8")
        ids = Tokenizer(FIXTURE / "tokenizer.json").encode(text)
        return np.concatenate([[0], ids])[:tokens].astype(np.int64)

    return first_tokens
