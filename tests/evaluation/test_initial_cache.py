"""Texts that continue from an initial cache: their scores, and the notes about them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import saved_starts
from repository import FIXTURES

import kvmnn.bundle
from kvmnn import PackedCache
from kvmnn import open as open_source
from kvmnn.arrays.completeness import IncompleteCacheError
from kvmnn.arrays.llama_transforms import TRANSFORMS, invert_transforms, validate_transforms
from kvmnn.errors import KvmnnError, OptionError, SourceError
from kvmnn.evaluation import EvaluationResult, EvaluationSettings, evaluate, expand_preset, read_results
from kvmnn.evaluation.scoring import compute_nll, feed_unscored, list_steps
from kvmnn.formats import encode_store
from kvmnn.formats.mnn import pack, unpack
from kvmnn.formats.options import PackedOptions
from kvmnn.lm import DecoderSession, Runner, RunOptions, Tokenizer, dump_kv, read_initial_cache
from kvmnn.lm.documents import read_document
from kvmnn.lm.warm_start import read_model_interface
from kvmnn.packed.cache_info import TokenIdsFingerprint
from kvmnn.packed.inference import PackedGeometry
from kvmnn.policies import create_policy

MODEL = FIXTURES / "lm"
TEXT = MODEL / "texts" / "trace.py.txt"
OTHER = MODEL / "texts" / "calendar.py.txt"
TOKENS, CHUNK = 40, 8
SETTINGS = EvaluationSettings(tokens=72, chunk=CHUNK, timing=False)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K and V of the first tokens, as the model computes them in the same steps."""
    path = tmp_path_factory.mktemp("start") / "kv"
    dump_kv(MODEL, TEXT, path, tokens=TOKENS, options=RunOptions(chunk=CHUNK))
    return path


@pytest.fixture(scope="module")
def layers(dump: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    return [tuple(np.load(dump / f"layer_{n}.{part}.npy") for part in ("key", "value")) for n in range(6)]


@pytest.fixture(scope="module")
def ids(dump: Path) -> list[int]:
    return json.loads((dump / "token_ids.json").read_text())


def measured(start: object, *policies: object, **more: object) -> EvaluationResult:
    return evaluate(MODEL, TEXT, list(policies), **{"settings": SETTINGS, "jobs": 0, "initial_source": start} | more)


def test_initial_cache_of_same_model_equals_full_run(dump: Path) -> None:
    result = measured(dump, "streaming:budget=16")
    full, alone, cut = result.rows
    assert (full.label, alone.label, cut.label) == ("full", "from kv", "streaming 16 from kv")
    assert (full.initial_cache, alone.initial_cache, cut.initial_cache) == (None, "kv", "kv")
    assert [row.is_full for row in result.rows] == [True, False, False]
    assert (full.tokens, full.nll, full.accuracy) == (alone.tokens, alone.nll, alone.accuracy)
    assert alone.tokens == 72 - TOKENS and alone.kind == "LOSSLESS" and alone.versus_full.nll == 0
    assert cut.kind == "LOSSY" and cut.tokens_kept == (16,) * 6 and cut.versus_full.nll > 0.01
    assert result.start is not None and result.start.tokens_seen == TOKENS
    assert all(each.equal == each.words == 4 * TOKENS * 64 for each in result.start.distances)
    assert "K and V of kv are bit for bit what the model computes of the same tokens." in result.notes


@pytest.mark.slow
def test_initial_cache_reference_is_scored_after_the_start(dump: Path, ids: list[int]) -> None:
    """By a loop of its own over the session."""
    document_ids = np.array(json.loads((dump / "token_ids.json").read_text()), np.int64)
    session = DecoderSession.open(MODEL, cache=False)
    runner = Runner(session)
    text = read_document(TEXT, Tokenizer.open_for_model(MODEL), 72).ids
    assert text[:TOKENS].tolist() == ids == document_ids.tolist()
    feed_unscored(runner, text, TOKENS, CHUNK)
    nll = [compute_nll(runner.step(text[b:e]), text[b + 1 : e + 1])[0] for b, e in list_steps(72, CHUNK, 0, TOKENS)]
    assert measured(dump).rows[0].nll == float(sum(part.sum() for part in nll)) / (72 - TOKENS)


@pytest.mark.slow
def test_initial_cache_coarser_types_cost_more(
    layers: list[tuple[np.ndarray, np.ndarray]], ids: list[int], tmp_path: Path
) -> None:
    found = []
    for kind in ("f32", "f16", "q8_0", "q4_0"):
        result = measured(saved_starts.llama(tmp_path / f"{kind}.session", layers, ids, kind))
        found.append(
            (abs(result.rows[1].versus_full.nll), max(each.relative_distance for each in result.start.distances))
        )
        assert result.rows[1].kind == ("LOSSLESS" if kind == "f32" else "LOSSY")
        bits = {"q8_0": 8.5, "q4_0": 4.5}.get(kind)
        assert result.start.bits == bits
        elements_per_token = 2 * 6 * 4 * 64
        assert result.rows[1].kept_bytes == elements_per_token * (TOKENS * (bits or 16) + (72 - TOKENS) * 16) / 8
        assert any(f"as its file stores them, {bits} bits a number" in note for note in result.notes) == bool(bits)
    assert found[0] == (0, 0) and 0 < found[1][0] < 1e-3
    assert [apart for _, apart in found] == sorted(apart for _, apart in found) and 1e-4 < found[1][1] < 1e-3
    assert found[2][1] < 0.01 < found[3][1] < 0.2
    kept = [0, 1, 2, 3, *range(30, TOKENS)]
    cut = [tuple(part[:, kept] for part in pair) for pair in layers]
    result = measured(saved_starts.llama(tmp_path / "cut.session", cut, ids, positions=kept))
    assert result.rows[1].versus_full.nll > 5 * max(loss for loss, _ in found)
    assert result.rows[1].tokens_kept == (72 - 26,) * 6 and result.rows[1].kind == "LOSSY"
    assert all(each.equal == each.words == 4 * 14 * 64 for each in result.start.distances)
    assert "positions 0 to 39 in 2 runs, a layer holds 14 of 40 tokens" in result.start.about


def test_initial_cache_quantised_counts_its_own_bits_after_unpack_and_encode(
    layers: list[tuple[np.ndarray, np.ndarray]], ids: list[int], tmp_path: Path, run
) -> None:
    saved_starts.llama(tmp_path / "q8.session", layers, ids, "q8_0")
    run("mnn", "unpack", tmp_path / "q8.session", "--kv-heads", 4, "-o", tmp_path / "q8.safetensors")
    header, codes = {}, np.zeros((4, TOKENS, 64), np.uint8)
    for number in range(6):
        for part in ("key", "value"):
            begin = len(header) * codes.size
            name = f"layer_{number}.{part}"
            header[name] = {
                "dtype": "F8_E4M3",
                "shape": list(codes.shape),
                "data_offsets": [begin, begin + codes.size],
            }
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + codes.tobytes() * len(header)
    (tmp_path / "f8.safetensors").write_bytes(data)
    for name, bits in (("q8", 8.5), ("f8", 8)):
        run("encode", tmp_path / f"{name}.safetensors", "-o", tmp_path / f"{name}.frames")
        for suffix in ("safetensors", "frames"):
            path = tmp_path / f"{name}.{suffix}"
            with read_initial_cache(path, read_model_interface(MODEL), ids) as start:
                assert start.token_bytes == (2 * 4 * 64 * bits / 8,) * 6


@pytest.mark.parametrize("int8", ["keys", "both"])
def test_initial_cache_int8_of_mnn_is_refused(
    layers: list[tuple[np.ndarray, np.ndarray]], ids: list[int], tmp_path: Path, int8: str
) -> None:
    """Its K lack a constant for each channel, which K of further tokens have; a copy of the arrays says so as well."""
    geometry = PackedGeometry(kv_heads=4, head_dim=64, backend="x86-avx2", flash_block=32, int8=int8)
    ((_, layout),) = geometry.list_candidates()
    addresses = [f"00005500AAAA{layer:04X}" for layer in range(6)]
    for address, pair in zip(addresses, layers, strict=True):
        cache = PackedCache(layout)
        cache.append(*pair)
        for part, buffer in zip("kv", (cache.key_buffer, cache.value_buffer), strict=True):
            (tmp_path / f"{address}.{part}").write_bytes(np.asarray(buffer).tobytes())
    options = PackedOptions(geometry=geometry, layer_order=tuple(addresses), valid_tokens=(TOKENS,))
    unpack(open_source(tmp_path, packed=options), str(tmp_path / "a.npz"))
    for source in (open_source(tmp_path, packed=options), open_source(tmp_path / "a.npz")):
        with pytest.raises(IncompleteCacheError, match="K lacks a constant for each channel"):
            read_initial_cache(source, read_model_interface(MODEL), ids)


@pytest.mark.slow
def test_initial_cache_with_codec_has_row_of_codec_alone(dump: Path) -> None:
    result = measured(dump, "streaming:budget=16", codecs=["none", "q8_0"])
    labels = ["full", "from kv", "streaming 16 from kv", "q8_0 from kv", "streaming 16 + q8_0 from kv"]
    assert [row.label for row in result.rows] == labels
    assert result.rows[3].bytes_per_token == 2 * 6 * 4 * 64 * 8.5 / 8 and result.rows[3].cut_divergence.kl > 0


@pytest.mark.slow
def test_initial_cache_reversed_keys_are_not_rounding(
    layers: list[tuple[np.ndarray, np.ndarray]], ids: list[int], tmp_path: Path
) -> None:
    turned = [(keys[:, :, ::-1], values) for keys, values in layers]
    path = saved_starts.llama(tmp_path / "turned.session", turned, ids)
    with pytest.raises(SourceError, match=r"turned\.session: compared on the first 40 tokens its K is no rounding of"):
        measured(path)
    with read_initial_cache(path, read_model_interface(MODEL), inverted_transforms=["none"]) as start:
        result = measured(start)
    assert any(note.startswith("The keys of turned.session are no roundings of this model's") for note in result.notes)
    assert {each.undo for each in result.start.distances} == {None}
    assert result.rows[1].versus_full.nll > 0.1


def as_llama_stores(part: str, words: np.ndarray, *, rotated: bool, reordered: bool) -> np.ndarray:
    """By dimensions: the order of Llama models in GGUF, then Hadamard's matrix by the parity of common bits."""
    dims = words.shape[-1]
    if reordered and part == "key":
        words = np.stack([words[..., place // 2 + place % 2 * dims // 2] for place in range(dims)], -1)
    if not rotated:
        return words
    size = dims if part == "key" else 64
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)], np.float64)
    blocks = words.reshape(*words.shape[:-1], dims // size, size).astype(np.float64)
    return (blocks @ (signs / size**0.5)).reshape(words.shape).astype(words.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("rotated", "reordered"), [(True, False), (False, True), (True, True)])
def test_initial_cache_llama_cpp_transforms_are_inverted(
    layers: list[tuple[np.ndarray, np.ndarray]], ids: list[int], tmp_path: Path, rotated: bool, reordered: bool
) -> None:
    how = {"rotated": rotated, "reordered": reordered}
    stored = [tuple(as_llama_stores(part, words, **how) for part, words in zip(("key", "value"), pair, strict=True))
              for pair in layers]  # fmt: skip
    path = saved_starts.llama(tmp_path / "a.session", stored, ids, "q8_0")
    with read_initial_cache(path, read_model_interface(MODEL), inverted_transforms=["none"]) as start:
        result = measured(start)
    said = [*["k-rotation"] * rotated, *["k-order"] * reordered, *["v-rotation"] * rotated]
    assert [each.undo for each in result.start.distances[:2]] == [
        tuple(name for name in said if name[0] == "k"),
        ("v-rotation",) if rotated else None,
    ]
    assert any(f"--invert {','.join(said)} makes them roundings of the model's own" in note for note in result.notes)
    with read_initial_cache(path, read_model_interface(MODEL), inverted_transforms=said) as start:
        mended = measured(start)
    assert result.rows[1].versus_full.nll > 0.2 > 20 * abs(mended.rows[1].versus_full.nll)
    assert max(each.relative_distance for each in mended.start.distances) < 0.01
    assert "undone: " in mended.start.about and not any("otherwise" in note for note in mended.notes)


@pytest.mark.parametrize("dims", [64, 128, 256])
def test_invert_transforms_is_the_inverse(dims: int) -> None:
    words = np.random.default_rng(2).standard_normal((2, 5, dims)).astype(np.float32)
    for part in ("key", "value"):
        stored = as_llama_stores(part, words, rotated=True, reordered=True)
        assert np.allclose(invert_transforms(stored, part, TRANSFORMS), words, atol=1e-5)
        assert np.array_equal(invert_transforms(stored, part, ()), stored)
    assert validate_transforms(["v-rotation", "k-order", "k-order"], dims) == ("v-rotation", "k-order")


def test_validate_transforms_invalid_names_are_refused(dump: Path) -> None:
    with pytest.raises(OptionError, match="undo 'turns': expected k-rotation, v-rotation or k-order"):
        validate_transforms(["turns"], 64)
    with pytest.raises(OptionError, match="undo v-rotation: heads have 80 dimensions: expected k-order"):
        validate_transforms(["v-rotation"], 80)
    with pytest.raises(OptionError, match="undo k-order: heads have 7 dimensions: expected nothing"):
        validate_transforms(["k-order"], 7)


@pytest.mark.slow
def test_initial_cache_evicted_dump_has_positions(dump: Path, tmp_path: Path) -> None:
    """knorm keeps other tokens in each head, and may drop the last ones: positions.json says what was seen."""
    chosen = create_policy("knorm", budget=20)
    dump_kv(MODEL, TEXT, tmp_path / "cut", chosen, tokens=TOKENS)
    result = measured(tmp_path / "cut")
    assert result.start.tokens_seen == TOKENS and result.start.tokens == (20,) * 6
    assert result.rows[1].kind == "LOSSY" and result.rows[1].versus_full.nll > 0
    assert all(each.equal > 0.5 * each.words for each in result.start.distances[:2])
    dump_kv(MODEL, TEXT, tmp_path / "mnn", chosen, tokens=TOKENS, format="mnn")
    assert measured(tmp_path / "mnn").rows[1].nll == result.rows[1].nll


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([[*range(20)]] * 3, "cut: layer 1 has positions of 3 heads: expected 4"),
        ([[*range(20)], [*range(19)]], "expected 20 ascending positions"),
        ([*range(19), 40], "cut: holds the token at position 40, of which no id is known"),
    ],
)
def test_initial_cache_mismatched_positions_are_refused(
    dump: Path, tmp_path: Path, said: list[object], message: str
) -> None:
    dump_kv(MODEL, TEXT, tmp_path / "cut", create_policy("knorm", budget=20), tokens=TOKENS)
    file = tmp_path / "cut" / "positions.json"
    document = json.loads(file.read_text())
    document["layers"][1]["positions"] = said
    file.write_text(json.dumps(document))
    with pytest.raises(KvmnnError, match=message):
        measured(tmp_path / "cut")


@pytest.mark.slow
def test_initial_cache_every_format_gives_the_same_start(
    layers: list[tuple[np.ndarray, np.ndarray]], ids: list[int], tmp_path: Path
) -> None:
    npz = saved_starts.npz(tmp_path / "kv.npz", layers)
    kvmnn.bundle.encode_source(kvmnn.open(npz), tmp_path / "kv.frames")
    encode_store(kvmnn.open(npz), tmp_path / "kv.zarr")
    pack(kvmnn.open(npz), str(tmp_path / "prefix"), PackedGeometry(backend="x86-avx2"), name="p")
    starts = {
        "llama.cpp": saved_starts.llama(tmp_path / "a.session", layers, ids),
        "torch": saved_starts.torch(tmp_path / "a.pt", layers),
        "MLX": saved_starts.mlx(tmp_path / "a.safetensors", layers),
        "npz": npz,
        "frames": tmp_path / "kv.frames",
        "Zarr": tmp_path / "kv.zarr",
        "MNN's prefix": tmp_path / "prefix",
        "in memory": [tuple(part[None] for part in pair) for pair in layers],
        "axes": kvmnn.open(saved_starts.npz(tmp_path / "all.npy", layers, "2lthd"), axes="2lthd"),
    }
    model, hashes = read_model_interface(MODEL), set()
    for name, cache in starts.items():
        with read_initial_cache(cache, model, ids) as start:
            hashes.add(start.sha256)
            assert start.name == ("<list in memory>" if name == "in memory" else Path(start.name).name)
            for found, (keys, values) in zip(start.load_layers(), layers, strict=True):
                assert np.array_equal(found.keys, keys) and np.array_equal(found.values, values), name
    assert len(hashes) == 1
    assert measured(starts["in memory"], token_ids=ids).rows[1].kind == "LOSSLESS"


@pytest.mark.slow
def test_initial_cache_wider_and_narrower_types(
    layers: list[tuple[np.ndarray, np.ndarray]], ids: list[int], tmp_path: Path
) -> None:
    model = read_model_interface(MODEL)
    with read_initial_cache(saved_starts.torch(tmp_path / "h.pt", layers, np.float16), model, ids) as start:
        (first, *_), notes = start.load_layers(), start.notes
        assert first.keys.dtype == np.float32 and notes == ()
        assert np.array_equal(first.keys, layers[0][0].astype(np.float16).astype(np.float32))
        result = measured(start, "recent_only:budget=9,skip_layers=none")
        assert [row.label for row in result.rows] == ["full", "from h.pt", "recent_only 9 from h.pt"]
        assert start.directory.is_dir()
        with pytest.raises(OptionError, match="token_ids are those of a start that is read"):
            measured(start, token_ids=ids)
    assert not start.directory.exists()
    half = type(model)(**{**vars(model), "dtype": np.float16})
    with read_initial_cache(saved_starts.npz(tmp_path / "wide.npz", layers), half, ids) as start:
        assert start.load_layers()[0].keys.dtype == np.float16
        assert "narrower than the cache's, which is LOSSY: fp32 -> fp16" in start.notes[0]
    huge = [(keys * 1e6, values) for keys, values in layers]
    with pytest.raises(SourceError, match="of its keys are not finite as fp16"):
        read_initial_cache(saved_starts.npz(tmp_path / "huge.npz", huge), half, ids)


@pytest.mark.slow
def test_initial_cache_results_are_saved_read_and_drawn(dump: Path, tmp_path: Path) -> None:
    result = measured(dump, "streaming", settings=SETTINGS, budgets=[16, 24])
    path = tmp_path / "r.json"
    path.write_text(result.to_text("json"))
    read = read_results(path)
    assert read.rows == result.rows and read.start == result.start
    lines = read.to_csv().splitlines()
    assert "start" in lines[0].split(",") and sum(line.startswith("from kv,") for line in lines) == 2
    assert max(map(len, result.format_table(80).splitlines())) <= 80
    written = {path.name for path in result.plot(tmp_path / "plots")}
    assert {"perplexity_over_budget.png", "strategy_comparison.svg"} <= written


@pytest.mark.slow
def test_initial_cache_with_workers_and_resumed_cells(dump: Path, tmp_path: Path) -> None:
    cells = tmp_path / "cells"
    one = measured(dump, jobs=2, store=cells)
    lines = len(cells.read_text().splitlines())
    again = measured(dump, jobs=2, store=cells)
    assert lines == len(cells.read_text().splitlines()) == 2
    assert [row.nll for row in one.rows] == [row.nll for row in again.rows]
    evaluate(MODEL, TEXT, settings=SETTINGS, jobs=0, store=cells)  # a text from its beginning is another cell
    assert len(cells.read_text().splitlines()) == lines + 1


@pytest.mark.slow
def test_initial_cache_without_bos_matches_text_without_it(tmp_path: Path) -> None:
    """Engines that put no bos before a text."""
    session = DecoderSession.open(MODEL, cache=False)
    ids = Tokenizer.open_for_model(MODEL).encode(TEXT.read_text())[:24]
    runner = Runner(session)
    feed_unscored(runner, ids, 24, CHUNK)
    rows = [(row.keys, row.values) for row in runner.cache.copy_layers()]
    result = measured(saved_starts.llama(tmp_path / "a.session", rows, ids.tolist()))
    assert result.rows[1].kind == "LOSSLESS" and result.rows[1].nll == result.rows[0].nll
    assert result.documents[0].tokens == 71 - 24


def refusal(start: object, error: type[KvmnnError] = OptionError, **more: object) -> str:
    with pytest.raises(error) as caught:
        measured(start, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_initial_cache_missing_or_wrong_ids_are_refused(
    layers: list[tuple[np.ndarray, np.ndarray]], ids: list[int], tmp_path: Path
) -> None:
    npz = saved_starts.npz(tmp_path / "kv.npz", layers)
    assert "kv.npz: does not say its token ids: expected --token-ids IDS" in refusal(npz)
    assert "holds 40 tokens, --token-ids says 41 ids" in refusal(npz, token_ids=[*ids, 5])
    assert "position 39, of which no id is known: --token-ids says 39 ids" in refusal(npz, token_ids=ids[:-1])
    wrong = [*ids[:-3], ids[-3] + 1, *ids[-2:]]
    assert f"parts from kv.npz at token 37: {ids[-3]}, the cache has {ids[-3] + 1}: " in refusal(npz, token_ids=wrong)
    session = saved_starts.llama(tmp_path / "a.session", layers, ids)
    assert f"its token 37 is {ids[-3]}, --token-ids says {ids[-3] + 1}" in refusal(session, token_ids=wrong)
    for tokens, found in ((TOKENS, f"{TOKENS + 1} tokens"), (8, "9 tokens")):
        message = refusal(session, settings=EvaluationSettings(tokens=tokens, chunk=CHUNK, timing=False))
        assert message == (
            f"trace.py.txt: --max-tokens takes {found}, a.session stands for 40: expected --max-tokens of 41 or more, "
            "for at least 42, as the first token after a cache is not scored"
        )
    fewer = saved_starts.npz(tmp_path / "fewer.npz", layers[:5])
    assert "has K and V of 5 layers (0 to 4), " in refusal(fewer, token_ids=ids) and "has 6" in refusal(fewer)
    narrow = saved_starts.npz(tmp_path / "n.npz", [tuple(part[:, :, :32] for part in pair) for pair in layers])
    message = refusal(narrow, token_ids=ids)
    assert "n.npz: key of layer 0 is of 4 kv heads x 32, " in message and "has 4 x 64: expected a cache of" in message
    rows = saved_starts.npz(tmp_path / "heads.npz", [tuple(part[:2] for part in pair) for pair in layers])
    assert "is of 2 kv heads x 64" in refusal(rows, token_ids=ids)
    twice = saved_starts.llama(tmp_path / "twice.session", layers, ids, positions=[0, *range(TOKENS - 1)])
    assert "layer 0 holds position 0 more than once" in refusal(twice, SourceError)
    (tmp_path / "torn.session").write_bytes(session.read_bytes()[:-5])
    assert "torn.session" in refusal(tmp_path / "torn.session", SourceError)
    spoiled = [(np.where(keys > 1, np.nan, keys), values) for keys, values in layers]
    bad = saved_starts.npz(tmp_path / "bad.npz", spoiled)
    assert "numbers of its keys are not finite" in refusal(bad, SourceError, token_ids=ids)
    assert "expected one of the two" in refusal(
        session, settings=EvaluationSettings(tokens=72, prefix_store=str(tmp_path / "s"))
    )
    with pytest.raises(OptionError, match="a preset measures texts from their beginning"):
        measured(session, *expand_preset("streaming-h2o"))
    with pytest.raises(OptionError, match="h2o_decayed ranks tokens by the attention that they drew"):
        measured(session, "h2o_decayed:budget=20")
    with pytest.raises(OptionError, match=r"calendar.py.txt: parts from a.session at token \d+: "):
        evaluate(MODEL, [TEXT, OTHER], settings=SETTINGS, jobs=0, initial_source=session)


def test_initial_cache_ids_known_by_hash_only(
    layers: list[tuple[np.ndarray, np.ndarray]], ids: list[int], tmp_path: Path
) -> None:
    source = kvmnn.open(saved_starts.npz(tmp_path / "kv.npz", layers))
    for name, of in (("p", ids), ("q", [*ids[:-1], 7])):
        pack(
            source,
            str(tmp_path / name),
            PackedGeometry(backend="x86-avx2"),
            name=name,
            token_ids=TokenIdsFingerprint.from_ids(of),
        )
    assert measured(tmp_path / "p").rows[1].kind == "LOSSLESS"
    assert "its first tokens are not those of q (by the hash that the cache has of them)" in refusal(tmp_path / "q")
    assert "was made from 40 other token ids" in refusal(tmp_path / "q", token_ids=ids)
