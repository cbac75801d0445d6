"""Profiles of tiny models: what is measured is what the definitions say, and an interrupted command goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from repository import FIXTURES
from tiny_models import MODELS

import kvmnn
from kvmnn.arrays import LayerCache
from kvmnn.calibration import ProfileOptions, make_profile, make_profile_from_caches
from kvmnn.calibration.layers import find_cache_layers, read_model_layers
from kvmnn.calibration.metrics import KeyMetrics, compute_value_metrics
from kvmnn.calibration.queries import QueryMoments
from kvmnn.calibration.sensitivity import RowTransform, SensitivityProbe, compute_divergence
from kvmnn.calibration.texts import read_windows
from kvmnn.dense import RopeConfig
from kvmnn.errors import KvmnnError, OutputError
from kvmnn.lm import DecoderSession, compute_fingerprint, dump_kv, import_model
from kvmnn.lm.onnx.model_files import find_model
from kvmnn.lm.runner import Runner
from kvmnn.lm.tokenizer import Tokenizer
from kvmnn.policies import create_policy
from kvmnn.profiles import LayerGeometry, Profile, Statistics, build_rows
from kvmnn.profiles.geometry import rotate_heads
from kvmnn.store.adapters import read_layer_caches

TEXTS = sorted((FIXTURES / "lm" / "texts").glob("*.txt"))[:3]
OPTIONS = ProfileOptions(tokens=600)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A llama and a gemma with windows, of random weights."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "gemma3"):
        path = folder / f"{name}.gguf"
        path.write_bytes(tiny_models.build_gguf(*tiny_models.build_gguf_parts(MODELS[name])))
        import_model(path, folder / name)
    return {name: folder / name for name in ("llama", "gemma3")}


def read_text(session: DecoderSession, ids: np.ndarray, last: int) -> tuple[list[LayerCache], object]:
    """K and V of a text, and the step of its last tokens, with queries and attentions."""
    first = len(ids) - last
    begin = session.run_step(ids[:first], np.arange(first), session.create_empty_past())
    step = session.run_step(ids[first:], np.arange(first, len(ids)), begin.present_pairs, queries=True)
    caches = [LayerCache(layer=i, keys=k[0], values=v[0]) for i, (k, v) in enumerate(step.present_pairs)]
    return caches, step


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_key_metric_predicts_how_errors_change_scores(models: dict[str, Path], name: str) -> None:
    """An error e in un-rotated K changes scores by e times the queries turned back: e M e is their weighted square."""
    session = DecoderSession.open(models[name], attentions=True)
    layers, _ = read_model_layers(find_model(models[name]), session.interface, 64)
    rng = np.random.default_rng(0)
    ids = rng.integers(3, tiny_models.VOCAB, 60)
    _, step = read_text(session, ids, 3)
    metrics = KeyMetrics(layers)
    metrics.add(step.queries, step.attentions)
    for layer, geometry in enumerate(layers):
        group = session.query_heads // geometry.kv_heads
        for head in range(geometry.kv_heads):
            error = rng.normal(size=geometry.head_dim)
            unordered = np.empty(geometry.head_dim)
            unordered[geometry.pair_order] = error
            rotated = rotate_heads(np.tile(unordered, (1, len(ids), 1)), np.arange(len(ids)), geometry.rope, 1)[0]
            expected = 0.0
            for query_head in range(head * group, head * group + group):
                scores = step.queries[layer][query_head] @ rotated.T
                weights = step.attentions[layer][query_head]
                expected += ((weights * (1 - weights) * scores**2)[:, 4:]).sum() / 3
            found = error @ metrics.to_metrics()[layer, "key"][head] @ error
            assert np.isclose(found, expected, rtol=1e-4)
    restored = KeyMetrics(layers)
    restored.restore(metrics.to_arrays())
    assert np.array_equal(restored.to_metrics()[0, "key"], metrics.to_metrics()[0, "key"])


def test_value_metric_is_of_the_output_projections(models: dict[str, Path]) -> None:
    session = DecoderSession.open(models["llama"])
    files = find_model(models["llama"])
    layers, _ = read_model_layers(files, session.interface, 64)
    metrics = compute_value_metrics(files, session.interface, layers)
    assert metrics is not None
    weights = tiny_models.build_weights(MODELS["llama"])
    for layer, geometry in enumerate(layers):
        matrix = weights[f"model.layers.{layer}.self_attn.o_proj.weight"].astype(np.float64)
        group = tiny_models.HEADS // geometry.kv_heads
        for head in range(geometry.kv_heads):
            expected = np.zeros((geometry.head_dim, geometry.head_dim))
            for query_head in range(head * group, head * group + group):
                part = matrix[:, query_head * geometry.head_dim : (query_head + 1) * geometry.head_dim]
                part = part[:, geometry.pair_order]
                expected += part.T @ part
            assert np.allclose(metrics[layer, "value"][head], expected, rtol=1e-5)


def test_value_metric_of_other_exports(tmp_path: Path) -> None:
    model = FIXTURES / "lm" / "model.onnx"
    session = DecoderSession.open(model)
    files = find_model(model)
    layers, _ = read_model_layers(files, session.interface, 64)
    assert [layer.rope.dims for layer in layers] == [16] * 6  # a quarter of 64
    metrics = compute_value_metrics(files, session.interface, layers)
    assert metrics is not None and metrics[5, "value"].shape == (4, 64, 64)
    assert all(np.linalg.eigvalsh(metric).min() > -1e-6 for metric in metrics.values())


def test_sensitivity_is_the_divergence_after_rounding(models: dict[str, Path]) -> None:
    session = DecoderSession.open(models["llama"])
    layers, _ = read_model_layers(find_model(models["llama"]), session.interface, 64)
    ids = np.random.default_rng(1).integers(3, tiny_models.VOCAB, 96)
    result = session.run_step(ids[:64], np.arange(64), session.create_empty_past())
    caches = [LayerCache(layer=i, keys=k[0], values=v[0]) for i, (k, v) in enumerate(result.present_pairs)]
    statistics = Statistics(layers)
    statistics.add(caches)
    probe = SensitivityProbe(session, caches, ids[64:])
    for layer, part in ((0, "key"), (3, "value")):
        transform = RowTransform.from_statistics(statistics, layer, part, None)
        rows = build_rows(caches[layer], layers[layer])[part == "value"]
        rounded = transform.round_rows(rows, transform.rms / 2)
        assert np.abs((rounded - rows) @ transform.forward).max() <= transform.rms / 4 + 1e-6
        assert np.allclose(transform.round_rows(rows, 1e-9), rows, atol=1e-6)
        found = probe.measure(layer, part, layers[layer], transform)
        assert 0 < found < np.inf
        assert found == probe.measure(layer, part, layers[layer], transform)


def test_divergence_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(2)
    logits = [rng.normal(scale=4, size=(7, 50)).astype(np.float32) for _ in range(2)]
    first, second = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(1, keepdims=True) for x in logits)
    assert np.isclose(compute_divergence(*logits), (first * np.log(first / second)).sum(), rtol=1e-5)
    assert abs(compute_divergence(logits[0], logits[0])) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_make_profile_names_model_layers_and_texts(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    output = tmp_path / "a.kvmp"
    steps: list[int] = []
    result = make_profile(models[name], TEXTS, output, OPTIONS, progress=steps.append)
    profile = Profile.read(output)
    assert result.key == profile.key.hex() and result.nbytes == output.stat().st_size and result.has_sensitivities
    assert profile.info.fingerprint == compute_fingerprint(models[name])
    assert (profile.info.model, profile.info.dtype, profile.info.tokens) == (name, "fp32", 600)
    assert [text.name for text in profile.info.texts] == [path.name for path in TEXTS][: len(profile.info.texts)]
    assert "linear" in profile.kinds and steps and not Path(f"{output}.partial").exists()
    assert any(layer.window for layer in profile.layers) == (name == "gemma3")
    with pytest.raises(OutputError, match="exists"):
        make_profile(models[name], TEXTS, output, OPTIONS)


class Interrupted(Exception):
    pass


def test_make_profile_goes_on_where_it_was_interrupted(models: dict[str, Path], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.kvmp", tmp_path / "parts.kvmp"
    make_profile(models["llama"], TEXTS, whole, OPTIONS)
    total = 0
    for limit in (2, 4, 12, 1000):
        done = 0

        def count(steps: int, limit: int = limit) -> None:
            nonlocal done
            done += steps
            if done > limit:
                raise Interrupted

        try:
            make_profile(models["llama"], TEXTS, parts, OPTIONS, progress=count)
        except Interrupted:
            assert not parts.exists()
        total += done
    assert parts.read_bytes() == whole.read_bytes()
    folder = tmp_path / "parts.kvmp.partial"
    folder.mkdir()
    (folder / "state.json").write_text("{")
    damage_note = f"{folder} of an interrupted command was damaged: all texts were read again."
    assert damage_note not in make_profile(models["llama"], TEXTS, parts, OPTIONS, overwrite=True).notes
    folder.mkdir()
    (folder / "state.json").write_text("{")
    (folder / "statistics.kvms").write_bytes(b"damaged")
    assert damage_note in make_profile(models["llama"], TEXTS, parts, OPTIONS, overwrite=True).notes
    assert parts.read_bytes() == whole.read_bytes() and not folder.exists()


def test_make_profile_does_not_replace_what_another_interrupted_call_has_read(
    models: dict[str, Path], tmp_path: Path
) -> None:
    def interrupt(steps: int) -> None:
        if (folder / "statistics.kvms").exists():
            raise Interrupted

    def interrupt_at_once(steps: int) -> None:
        raise Interrupted

    output, folder = tmp_path / "a.kvmp", tmp_path / "a.kvmp.partial"
    fewer = replace(OPTIONS, tokens=OPTIONS.tokens // 2)
    with pytest.raises(Interrupted):
        make_profile(models["llama"], TEXTS, output, OPTIONS, progress=interrupt)
    state = {path.name: path.read_bytes() for path in folder.iterdir()}
    windows = read_windows(TEXTS, Tokenizer.open_for_model(models["llama"]), OPTIONS.tokens, None, [])
    tokens = len(windows[0].ids)
    with pytest.raises(
        OutputError, match=rf"a\.kvmp\.partial: has {tokens} tokens of an interrupted command of other options"
    ):
        make_profile(models["llama"], TEXTS, output, fewer)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == state and not output.exists()
    with pytest.raises(Interrupted):
        make_profile(models["llama"], TEXTS, output, fewer, overwrite=True, progress=interrupt_at_once)
    make_profile(models["llama"], TEXTS, output, fewer)  # of its own texts alone, not of those that it replaced
    make_profile(models["llama"], TEXTS, tmp_path / "b.kvmp", fewer)
    assert output.read_bytes() == (tmp_path / "b.kvmp").read_bytes() and not folder.exists()


def test_make_profile_of_an_export_without_queries_says_so(tmp_path: Path) -> None:
    result = make_profile(FIXTURES / "lm", TEXTS, tmp_path / "a.kvmp", ProfileOptions(tokens=300, below=(0,)))
    assert any("queries" in note for note in result.notes)
    assert len(Profile.read(tmp_path / "a.kvmp").layers) == 6


def test_make_profile_from_caches_finds_the_rotation(tmp_path: Path) -> None:
    caches = [tmp_path / f"kv{index}" for index in range(2)]
    for path, text in zip(caches, TEXTS, strict=False):
        dump_kv(FIXTURES / "lm", text, path, tokens=300)
    found = make_profile_from_caches(caches, tmp_path / "a.kvmp", ProfileOptions(below=(1,)))
    stated = make_profile_from_caches(
        caches, tmp_path / "b.kvmp", ProfileOptions(below=(1,)), rope=RopeConfig(10000.0, 16)
    )
    profile = Profile.read(tmp_path / "a.kvmp")
    assert profile.info.fingerprint is None and (found.tokens, found.texts) == (600, 2)
    assert not found.has_sensitivities and "caches alone" in str(found)
    expected = LayerGeometry.from_cache(
        LayerCache(layer=0, keys=np.zeros((4, 1, 64), np.float16), values=np.zeros((4, 1, 64), np.float16)),
        RopeConfig(10000.0, 16),
    )
    assert all(layer.is_equivalent(expected) for layer in profile.layers)
    assert stated.tables == found.tables
    other = tmp_path / "other"
    other.mkdir()
    for name in ("key", "value"):
        np.save(other / f"layer_0.{name}.npy", np.zeros((2, 9, 8), np.float16))
    with pytest.raises(KvmnnError, match="other: "):
        make_profile_from_caches([caches[0], other], tmp_path / "c.kvmp")
    assert not (tmp_path / "c.kvmp").exists()


def test_make_profile_of_a_short_text_says_that_it_is_short(models: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text(TEXTS[0].read_text()[:60])
    result = make_profile(models["llama"], [text], tmp_path / "a.kvmp", ProfileOptions(below=(0,)))
    assert "the texts are too short: errors of K count alike in all directions" in result.notes


def test_find_cache_layers_doubts_a_rotation_of_some_layers(tmp_path: Path) -> None:
    dump_kv(FIXTURES / "lm", TEXTS[0], tmp_path / "kv", tokens=300)
    rotated = read_layer_caches(kvmnn.open(tmp_path / "kv"))[:1]
    noise = np.random.default_rng(0).standard_normal(rotated[0].keys.shape).astype(rotated[0].keys.dtype)
    (clear,) = find_cache_layers(rotated)[1]
    (mixed,) = find_cache_layers([*rotated, replace(rotated[0], layer=1, keys=noise)])[1]
    assert clear == "rotation of K, found by trial: theta=10000,dims=16 (1 layer)"
    assert mixed.startswith(f"{clear}, none (1 layer); most models rotate K of all layers or of none: ")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_query_moments_tables_are_those_of_unrotated_queries(models: dict[str, Path], name: str) -> None:
    """Mean, covariance and first direction of a text's queries, which the model reads in two steps."""
    session = DecoderSession.open(models[name], attentions=True)
    parameters = session.read_layer_parameters()
    kv_heads, query_heads = session.interface.kv_heads, session.query_heads
    assert query_heads is not None
    moments = QueryMoments(parameters, query_heads, kv_heads, session.interface.head_dim)
    ids = np.random.default_rng(0).integers(3, tiny_models.VOCAB, 60)
    past, queries = session.create_empty_past(), []
    for begin, end in ((0, 41), (41, 60)):
        step = session.run_step(ids[begin:end], np.arange(begin, end), past, queries=True)
        assert step.queries is not None
        moments.add_queries(step.queries, begin)
        past, queries = step.present_pairs, [*queries, step.queries]
    caches = [LayerCache(layer=i, keys=k[0], values=v[0]) for i, (k, v) in enumerate(past)]
    moments.add_keys(caches)
    restored = QueryMoments(parameters, query_heads, kv_heads, session.interface.head_dim)
    restored.restore(moments.to_arrays())
    tables = restored.build_tables()
    assert all(np.array_equal(array, tables[key]) for key, array in moments.build_tables().items())
    for layer, cache in enumerate(caches):
        rotated = np.concatenate([part[layer] for part in queries], axis=1)[:, 4:].astype(np.float64)
        plain = parameters[layer].rotation.undo(rotated.astype(np.float32), np.arange(4, 60))
        first_keys = parameters[layer].rotation.undo(cache.keys[:, 4:], np.arange(4, 60)).mean(axis=1)
        filters, scores = np.zeros((kv_heads, rotated.shape[2])), np.zeros(kv_heads)
        for head, (rows, rotated_rows) in enumerate(zip(plain, rotated, strict=True)):
            group = query_heads // kv_heads
            np.testing.assert_allclose(tables[f"queries/{layer}/key/mean"][head], rows.mean(axis=0), atol=1e-5)
            covariance = np.cov(rows.astype(np.float64).T)
            np.testing.assert_allclose(tables[f"queries/{layer}/key/covariance"][head], covariance, atol=1e-4)
            direction = np.linalg.svd(rotated_rows)[2][0]
            filters[head // group] += direction * np.sign((rotated_rows @ direction).mean()) / group
            logits = [  # the score of the mean query to the mean key so many tokens before it
                rows.mean(axis=0) @ parameters[layer].rotation.undo(first_keys[head // group][None], np.array([d]))[0]
                for d in range(499, -1, -1)
            ]
            powers = np.exp(np.array(logits) / np.sqrt(rotated.shape[2]))
            scores[head // group] += np.cumsum(powers / powers.sum()).mean() / group
        np.testing.assert_allclose(tables[f"queries/{layer}/key/filter"], filters, atol=1e-3)
        np.testing.assert_allclose(tables[f"queries/{layer}/key/score"], scores, atol=1e-4)


def test_profiled_policies_cut_by_the_profile_that_was_made(models: dict[str, Path], tmp_path: Path) -> None:
    profile = str(tmp_path / "llama.kvmp")
    make_profile(models["llama"], TEXTS[:1], profile, ProfileOptions(tokens=64, below=(0,)))
    session, other = (DecoderSession.open(models[name]) for name in ("llama", "gemma3"))
    lengths_by_name = {}
    for name in ("qfilter", "expected_attention_stats", "duo_attention"):
        options = {"profile": profile}
        if name == "duo_attention":
            options = {"pattern": profile, "sink": 2, "recent": 6}
        policy = create_policy(name, keep_ratio=0.25, **options)
        runner = Runner(session, policy)
        runner.step(np.arange(3, 103))
        rows = [row for layer in range(tiny_models.LAYERS) for row in runner.cache.list_head_positions(layer)]
        lengths_by_name[name] = sorted(map(len, rows))
        if name != "duo_attention":  # scores of heads fit another model of as many
            with pytest.raises(KvmnnError, match="expected float32"):
                Runner(other, policy).step([3, 4] * 50)
    assert lengths_by_name.pop("duo_attention") == [8] * 6 + [100] * 2
    assert set(map(tuple, lengths_by_name.values())) == {(25,) * 8}
