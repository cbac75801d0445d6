"""The planner of all layers: against the slow model in both cadences, and their differences."""

from __future__ import annotations

from dataclasses import replace

import h2o_model
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmnn import KvmnnError
from kvmnn.policies.h2o import H2OConfig, H2OPlanner, PendingPlan, plan_blocks, sum_by_block

CONFIGS = st.builds(
    H2OConfig,
    block_tokens=st.integers(1, 8),
    sink_tokens=st.integers(0, 9),
    recent_tokens=st.integers(0, 9),
    target_lossy_ratio=st.floats(1, 6),
    ema_alpha=st.floats(0, 1),
    update_interval=st.integers(0, 5),
    trigger_min_tokens=st.integers(0, 40),
    layers=st.integers(1, 4),
    layer_start=st.integers(-1, 5),
    layer_end=st.integers(-1, 4),
    heads=st.just(3),
)


@settings(deadline=None, max_examples=60)
@given(
    CONFIGS, st.sampled_from(["layer-calls", "tokens"]), st.integers(1, 60), st.lists(st.integers(1, 3), max_size=14)
)
def test_planner_conversation_equals_the_model(config, cadence, prompt, steps):
    rng = np.random.default_rng(prompt)
    planner, model = H2OPlanner(config, cadence=cadence), h2o_model.Model(config, cadence)
    number = (lambda layer: layer) if cadence == "tokens" else (lambda layer: None)
    for layer in range(config.layers):
        assert planner.begin_call(0, prompt, decode=False, layer=number(layer)).remove == 0
        assert planner.end_call().kv_len == prompt
    planner.end_step()
    model.prompt(prompt)
    for add in steps:
        for layer in range(config.layers):
            drawn: dict[str, np.ndarray] = {}

            def attention(blocks, drawn=drawn):
                drawn["sums"] = (rng.integers(0, 4, blocks) / 3).astype(np.float32)
                return drawn["sums"].astype(float).tolist()

            before = model.layers[layer].length
            applied, scores = model.decode(layer, add, attention)
            todo = planner.begin_call(before, add, layer=number(layer))
            assert list(todo.reserve) == applied and todo.remove == (before if applied else 0)
            call = planner.end_call(drawn.get("sums"))
            assert (call.layer, call.kv_len) == (layer, model.layers[layer].length)
            assert call.scores.tolist() == (scores if call.is_enabled else call.scores.tolist())
            pending = planner.layers[layer].pending_plan
            assert (list(pending.pairs) if pending else None) == model.layers[layer].pending
        planner.end_step()
    assert planner.metrics.h2o_total_evict_tokens == model.total


def config(**more) -> H2OConfig:
    options = {"block_tokens": 8, "sink_tokens": 8, "recent_tokens": 8, "update_interval": 4, "trigger_min_tokens": 32}
    options["target_lossy_ratio"] = 2.0
    return H2OConfig(**{**options, "layers": 2, "layer_start": 0, "heads": 1, **more})


def talk(planner: H2OPlanner, lengths: list[int], add: int = 1, *, decode: bool = True) -> list[tuple[int, ...]]:
    """One step of all layers; the pairs that each applied."""
    applied = []
    for layer in range(len(lengths)):
        number = layer if planner.cadence == "tokens" else None
        todo = planner.begin_call(lengths[layer], add, decode=decode, layer=number)
        lengths[layer] = todo.kv_after + add
        sums = np.arange(planner.config.count_blocks(lengths[layer]), dtype=np.float32)
        planner.end_call(sums)
        applied.append(todo.reserve)
    planner.end_step()
    return applied


def test_planner_cadences_count_differently():
    """Interval 4 of two layers: in the engine layer 1 plans every second token and layer 0 never; by tokens both do."""
    when = {}
    for cadence in ("layer-calls", "tokens"):
        planner, lengths = H2OPlanner(config(), cadence=cadence), [0, 0]
        talk(planner, lengths, 100, decode=False)
        when[cadence] = [[bool(pairs) for pairs in talk(planner, lengths)] for _ in range(6)]
    assert [i for i, applied in enumerate(when["layer-calls"]) if any(applied)] == [2, 4]
    assert not any(applied[0] for applied in when["layer-calls"])
    assert [i for i, applied in enumerate(when["tokens"]) if any(applied)] == [4]
    assert when["tokens"][4] == [True, True]


def test_planner_second_turn_plans_by_cadence():
    """The engine applies layer 0's plan to every layer and drops the others'; by tokens each layer gets its own."""
    engine, lengths = H2OPlanner(config(update_interval=1, layers=2)), [0, 0]
    talk(engine, lengths, 60, decode=False)
    talk(engine, lengths)
    own = engine.layers[1].pending_plan
    assert own is not None
    first, second = talk(engine, lengths, 5, decode=False)
    assert first == second != ()
    assert engine.layers[1].pending_plan is own
    engine.begin_call(lengths[0])
    engine.end_call(np.zeros(engine.config.count_blocks(lengths[0] + 1)))
    stale = engine.begin_call(lengths[1])
    assert stale.is_stale and stale.was_pending and stale.remove == 0

    mine, lengths = H2OPlanner(config(update_interval=1), cadence="tokens"), [0, 0]
    talk(mine, lengths, 60, decode=False)
    talk(mine, lengths)
    plans = [layer.pending_plan.pairs for layer in mine.layers]
    assert talk(mine, lengths, 5, decode=False) == plans


def test_planner_stale_plan_scores_are_cut_only_by_tokens():
    for cadence, blocks in (("tokens", 8), ("layer-calls", 5)):
        planner, lengths = H2OPlanner(config(update_interval=1, layers=1), cadence=cadence), [0]
        talk(planner, lengths, 60, decode=False)
        talk(planner, lengths)
        todo = planner.begin_call(50, layer=0 if cadence == "tokens" else None)
        assert todo.is_stale and todo.kv_after == 50
        assert planner.layers[0].scores.size == blocks


def test_planner_new_prompt_resets_state():
    for cadence in ("tokens", "layer-calls"):
        planner, lengths = H2OPlanner(config(update_interval=1), cadence=cadence), [0, 0]
        talk(planner, lengths, 60, decode=False)
        talk(planner, lengths)
        assert all(layer.pending_plan for layer in planner.layers)
        total = planner.metrics.h2o_total_evict_tokens
        talk(planner, [0, 0], 70, decode=False)
        assert not any(layer.pending_plan or layer.scores.size for layer in planner.layers)
        assert planner.metrics.h2o_total_evict_tokens == total > 0
        planner.reset()
        assert planner.metrics.h2o_total_evict_tokens == 0


def test_planner_rows_equal_their_sums():
    rows = np.random.default_rng(1).random((3, 1, 101), dtype=np.float32)
    results = []
    for given_rows in (True, False):
        planner = H2OPlanner(config(heads=None if given_rows else 3, layers=1, update_interval=1))
        planner.begin_call(0, 100, decode=False)
        planner.end_call()
        planner.end_step()
        planner.begin_call(100)
        call = planner.end_call(rows=rows) if given_rows else planner.end_call(sum_by_block(rows, 8))
        results.append((call.scores.tolist(), call.plan.reserve_pairs))
    assert results[0] == results[1]
    assert results[0][1] == plan_blocks(results[0][0], 101, config()).reserve_pairs


def test_planner_refused_half_step_changes_nothing():
    planner = H2OPlanner(config(heads=None, layers=1, update_interval=1))
    with pytest.raises(KvmnnError, match="end"):
        planner.end_call()
    planner.begin_call(0, 100, decode=False)
    with pytest.raises(KvmnnError, match="not ended"):
        planner.begin_call(0)
    planner.end_call()
    with pytest.raises(KvmnnError, match=r"previous is 0 while the layer holds 100 tokens.*end_step\(\)"):
        planner.begin_call(100)
    planner.end_step()
    planner.begin_call(100)
    for options, message in [
        ({}, "either"),
        ({"sums": [1.0], "rows": np.ones((1, 101))}, "either"),
        ({"sums": np.ones(13)}, "config.heads"),
        ({"rows": np.ones((1, 100))}, "100 keys"),
        ({"rows": np.ones((1, 2, 101))}, "queries"),
    ]:
        with pytest.raises(KvmnnError, match=message):
            planner.end_call(**options)
        assert planner.clock.global_step == 0 and planner.layers[0].scores.size == 0
    assert planner.end_call(rows=np.ones((1, 101), np.float32)).has_triggered
    planner = H2OPlanner(config(layers=1), on_invalid="engine")
    assert planner.begin_call(100).remove == 100  # the shared count is 0, so the engine drops what there is
    planner = H2OPlanner(config(layers=1))
    planner.meta.previous = 100
    planner.begin_call(100)
    with pytest.raises(KvmnnError, match="3 sums for 101 tokens: expected 13"):
        planner.end_call([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("cadence", "arguments", "message"),
    [
        ("tokens", {"kv_length": 5}, "layer"),
        ("tokens", {"kv_length": 5, "layer": 2}, "layer is 2"),
        ("layer-calls", {"kv_length": 5, "layer": 0}, "counts layers by itself"),
        ("layer-calls", {"kv_length": -1}, "kv_length"),
        ("layer-calls", {"kv_length": 2**31 - 1}, "add"),
    ],
)
def test_planner_invalid_calls_are_refused(cadence, arguments, message):
    with pytest.raises(KvmnnError, match=message):
        H2OPlanner(config(), cadence=cadence).begin_call(**arguments)


def test_planner_unknown_modes_are_refused():
    with pytest.raises(KvmnnError, match="cadence"):
        H2OPlanner(cadence="steps")
    with pytest.raises(KvmnnError, match="on_invalid"):
        H2OPlanner(on_invalid="ignore")


def test_planner_disabled_or_quantised_layers_are_unchanged():
    for options in ({"enable": False}, {"quantised": True}, {"layer_start": 1, "layer_end": 0}):
        planner, lengths = H2OPlanner(config(update_interval=1, **options)), [0, 0]
        talk(planner, lengths, 60, decode=False)
        for _ in range(3):
            assert talk(planner, lengths) == [(), ()]
        assert planner.metrics.h2o_total_evict_tokens == 0


FORWARDS = st.lists(
    st.tuples(st.sampled_from(["decode"] * 6 + ["turn", "new", "removed"]), st.integers(1, 3), st.integers(1, 60)),
    max_size=20,
)


@settings(deadline=None, max_examples=150)
@given(CONFIGS, FORWARDS, st.integers(1, 60), st.booleans())
def test_planner_turns_and_leftover_plans_equal_engine_model(config, forwards, prompt, enable):
    """Second turns, new prompts over a cleared cache, and what one layer's plan does to the next layer's."""
    config = replace(config, enable=enable or prompt % 5 > 0)
    planner, model = H2OPlanner(config, on_invalid="engine"), h2o_model.EngineModel(config)
    lengths = [0] * config.layers
    for number, (kind, few, many) in enumerate([("turn", 1, prompt), *forwards]):
        add = few if kind == "decode" else many

        def attention(blocks, number=number):
            return ((np.arange(blocks) * 7919 + number * 104729) % 17 / 8).astype(np.float32)

        steps = model.forward(add, kind == "decode", lambda n: attention(n).astype(float).tolist(), kind == "removed")
        if kind == "removed":
            planner.meta.remove = planner.meta.previous
        for manager, step in enumerate(steps):
            todo = planner.begin_call(lengths[manager], add, decode=kind == "decode")
            found = planner.meta.remove, list(planner.meta.reserve)
            lengths[manager] = todo.kv_after + add
            call = planner.end_call(attention(config.count_blocks(lengths[manager])))
            assert (todo.kv_before, todo.kv_after, todo.is_stale, *found) == (
                *(step.before, step.after, step.stale),
                *(step.remove, step.reserve),
            )
            assert call.layer == step.layer
            assert (call.scores.tolist() if call.is_enabled else []) == step.scores
        assert planner.end_step() == model.previous
        assert [layer.scores.tolist() for layer in planner.layers] == model.scores


def test_planner_disabled_leftover_plan_reaches_every_layer():
    """Without H2O nothing is cleared between layers, so what layer 0 applies layer 1 applies too."""
    planner = H2OPlanner(config(enable=False))
    planner.meta.previous = 20
    planner.layers[0].pending_plan = PendingPlan(20, (0, 4, 8, 4))
    found = []
    for _ in range(2):
        found.append(planner.begin_call(20).reserve)
        planner.end_call()
    assert found == [((0, 4), (8, 4))] * 2
    assert planner.end_step() == 20 - 20 + 8 + 1


def test_planner_by_tokens_cuts_scores_when_plan_is_applied():
    planner = H2OPlanner(config(layers=1, update_interval=1), cadence="tokens")
    planner.begin_call(60, layer=0)
    sums = np.array([1, 9, 2, 8, 3, 0, 0, 0], np.float32)
    made = planner.end_call(sums).plan
    assert made.keep.tolist() == [True, True, False, True, False, False, True, True]
    before = planner.layers[0].scores
    assert before.size == 8
    assert planner.begin_call(61, layer=0).kv_after == made.num_final_tokens == 37
    assert planner.layers[0].scores.tolist() == before[made.keep].tolist()


def test_planner_budget_is_at_least_one_token():
    planner = H2OPlanner(config(layers=1, trigger_min_tokens=100))
    planner.meta.previous, planner.metrics.h2o_keep_ratio = 9, 0.01
    planner.begin_call(9)
    assert planner.end_call(np.ones(2)).final_keep == 1
    planner.metrics.h2o_keep_ratio = 0.25
    planner.begin_call(9)
    assert planner.end_call(np.ones(2)).final_keep == 3  # 2.5 rounded away from 0
