"""Generated text: greedy and sampled, with the full cache and under policies; positions; first differences."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from repository import FIXTURES

from kvmnn.errors import KvmnnError
from kvmnn.lm.generation import (
    SamplingOptions,
    check_positions,
    decode_continuation,
    find_end_tokens,
    find_first_difference,
    generate_tokens,
    prefill,
)
from kvmnn.lm.onnx.model_files import ModelFiles
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.lm.tokenizer import Tokenizer
from kvmnn.policies import create_policy

FIXTURE = FIXTURES / "lm"
PROMPT = "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read"


@pytest.fixture(scope="module")
def session() -> DecoderSession:
    return DecoderSession.open(FIXTURE, attentions=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open_for_model(FIXTURE)


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return [int(tokenizer.bos or 0), *tokenizer.encode(PROMPT).tolist()]


def greedy_without_a_cache(session: DecoderSession, prompt: list[int], new: int) -> list[int]:
    """All of the text is fed again for every token: nothing to hold, nothing to get wrong."""
    ids = list(prompt)
    for _ in range(new):
        step = session.run_step(np.array(ids), np.arange(len(ids)), session.create_empty_past())
        ids.append(int(step.logits[-1].argmax()))
    return ids[len(prompt) :]


def test_generate_tokens_full_cache_equals_no_cache(session: DecoderSession, prompt: list[int]) -> None:
    made = generate_tokens(Runner(session), prompt, 12)
    assert list(made.ids) == greedy_without_a_cache(session, prompt, 12)
    assert made.stopped == "length"
    assert made.tokens_seen == len(prompt) + 11  # the last one is not fed
    assert set(made.tokens_kept) == {made.tokens_seen}
    assert made.token_seconds and made.model_seconds and made.token_seconds > made.model_seconds > 0


@pytest.mark.parametrize("name", ["streaming", "h2o_decayed_heads", "l2_fixed", "h2o_tokens"])
def test_generate_tokens_large_budget_changes_nothing(session: DecoderSession, prompt: list[int], name: str) -> None:
    full = generate_tokens(Runner(session), prompt, 10)
    cut = generate_tokens(Runner(session, create_policy(name, budget=500)), prompt, 10)
    assert cut.ids == full.ids
    assert cut.tokens_kept == full.tokens_kept


def test_generate_tokens_small_budget_has_true_positions(session: DecoderSession, prompt: list[int]) -> None:
    fed: list[list[int]] = []
    recorder = _recording(session, fed)
    made = generate_tokens(Runner(recorder, create_policy("streaming", budget=8, sink=2)), prompt, 20)
    assert set(made.tokens_kept) == {8}
    assert [place for places in fed for place in places] == list(range(len(prompt) + 19))
    assert made.ids != generate_tokens(Runner(session), prompt, 20).ids


def test_generate_tokens_prompt_chunks_change_nothing(session: DecoderSession, prompt: list[int]) -> None:
    whole, parts = prefill(Runner(session), prompt), prefill(Runner(session), prompt, 7)
    assert np.abs(whole - parts).max() < 1e-4


def test_generate_tokens_resets_the_runner(session: DecoderSession, prompt: list[int]) -> None:
    runner = Runner(session, create_policy("h2o_decayed", budget=12))
    assert generate_tokens(runner, prompt, 6).ids == generate_tokens(runner, prompt, 6).ids


def test_generate_tokens_stops_at_end_token(session: DecoderSession, prompt: list[int]) -> None:
    free = generate_tokens(Runner(session), prompt, 8).ids
    made = generate_tokens(Runner(session), prompt, 8, end_tokens={free[3]})
    assert made.stopped == "end of text"
    assert made.ids == free[: free.index(free[3]) + 1]


def test_generate_tokens_progress_counts_tokens(session: DecoderSession, prompt: list[int]) -> None:
    told: list[int] = []
    generate_tokens(Runner(session), prompt, 5, progress=told.append)
    assert sum(told) == 5


def test_generate_tokens_one_token_has_no_token_time(session: DecoderSession, prompt: list[int]) -> None:
    made = generate_tokens(Runner(session), prompt, 1)
    assert (len(made.ids), made.token_seconds, made.model_seconds, made.policy_seconds) == (1, None, None, None)
    assert made.tokens_seen == len(prompt)


def test_generate_tokens_invalid_arguments_are_refused(session: DecoderSession, prompt: list[int]) -> None:
    with pytest.raises(KvmnnError, match="max_tokens is 0"):
        generate_tokens(Runner(session), prompt, 0)
    with pytest.raises(KvmnnError, match="no tokens to begin with"):
        generate_tokens(Runner(session), [], 4)
    with pytest.raises(KvmnnError, match=r"more than the 4,096 positions .*: at most 4,0\d\d new ones"):
        generate_tokens(Runner(session, create_policy("streaming", budget=64)), prompt, 5000)


def test_check_positions_enforces_the_limit() -> None:
    check_positions("m", None, 10**6, 10**6)
    check_positions("m", 10, 8, 3)  # the third new token is never fed
    with pytest.raises(KvmnnError, match="at most 3 new ones"):
        check_positions("m", 10, 8, 4)
    check_positions("m", 10, 10, 1)
    with pytest.raises(KvmnnError, match="the prompt has 11 tokens, the model was made for 10 positions"):
        check_positions("m", 10, 11, 1)


# -- choosing ---------------------------------------------------------------------------------------------------------


def test_sampling_greedy_prefers_first_of_equal_logits() -> None:
    assert SamplingOptions().create_selector()(np.array([0, 2, 1, 2], np.float32)) == 1


def test_sampling_draws_follow_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    choose = SamplingOptions(temperature=1.0, seed=5).create_selector()
    counts = Counter(choose(logits) for _ in range(4000))
    assert [counts[token] / 4000 for token in range(4)] == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    sharp = SamplingOptions(temperature=0.5, seed=5).create_selector()
    squares = np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365
    counts = Counter(sharp(logits) for _ in range(4000))
    assert [counts[token] / 4000 for token in range(4)] == pytest.approx(squares.tolist(), abs=0.03)


def test_sampling_top_k_draws_most_probable() -> None:
    logits = np.arange(50, dtype=np.float32) / 10
    choose = SamplingOptions(temperature=2.0, top_k=3).create_selector()
    assert {choose(logits) for _ in range(300)} == {47, 48, 49}
    assert SamplingOptions(temperature=9.0, top_k=1).create_selector()(logits) == 49


@pytest.mark.parametrize("temperature", [1e-300, 1e-6])
def test_sampling_tiny_temperature_is_greedy(temperature: float) -> None:
    assert SamplingOptions(temperature=temperature).create_selector()(np.array([1, 3, 2, -np.inf], np.float32)) == 1


def test_sampling_equal_seeds_generate_equal_texts(session: DecoderSession, prompt: list[int]) -> None:
    texts = [
        generate_tokens(Runner(session), prompt, 12, sampling=SamplingOptions(temperature=1.5, seed=seed)).ids
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_non_finite_logits_are_refused() -> None:
    for temperature in (0.0, 1.0):
        for wrong in (np.nan, np.inf):
            with pytest.raises(KvmnnError, match="NaN or infinite"):
                SamplingOptions(temperature=temperature).create_selector()(np.array([0, wrong, -np.inf], np.float32))


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": 0}, {"seed": -1}],
)
def test_sampling_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(KvmnnError, match=next(iter(options))):
        SamplingOptions(**options)


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 3], 1), ([], [1], 0), ([], [], None), ([4, 2], [1, 2], 0)],
)
def test_find_first_difference_is_symmetric(one: list[int], other: list[int], place: int | None) -> None:
    assert find_first_difference(one, other) == find_first_difference(other, one) == place


def test_decode_continuation_is_text_after_the_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("def f(x):\n    return x\n").tolist()
    for cut in range(len(ids)):
        before = tokenizer.decode(ids[:cut])
        assert before + decode_continuation(tokenizer, ids[:cut], ids[cut:]) == tokenizer.decode(ids)
    odd = SimpleNamespace(decode=lambda ids: "x" * len(ids) if len(ids) < 3 else "yyy")
    assert decode_continuation(odd, [1, 2], [3]) == "x"  # the prompt reads differently with it: the new tokens alone


@pytest.mark.parametrize(
    ("config", "genai", "ends"),
    [
        ({"eos_token_id": 0}, {}, {0}),
        ({"eos_token_id": [1, 2]}, {"model": {"eos_token_id": 5}}, {1, 2}),
        ({}, {"model": {"eos_token_id": 5}}, {5}),
        ({"eos_token_id": None}, {}, set()),
        ({"eos_token_id": ["x", True]}, {}, set()),
        ({}, {"model": "odd"}, set()),
    ],
)
def test_find_end_tokens_of_configurations(config: dict[str, Any], genai: dict[str, Any], ends: set[int]) -> None:
    assert find_end_tokens(ModelFiles(Path("m"), config, genai)) == ends


def _recording(session: DecoderSession, fed: list[list[int]]) -> Any:
    """The session, every position that it is given noted down."""

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

        def run_step(self, ids: Any, positions: Any, *others: Any, **options: Any) -> Any:
            fed.append(positions.tolist())
            return session.run_step(ids, positions, *others, **options)

    return Recorder()
