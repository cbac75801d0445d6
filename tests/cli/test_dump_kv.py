"""``kvmnn dump-kv``: caches of a model in the formats that encode, measure and pack read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import FIXTURES

from kvmnn.lm.session import DecoderSession
from kvmnn.lm.tokenizer import Tokenizer

FIXTURE = FIXTURES / "lm"
TEXT = FIXTURE / "texts" / "trace.py.txt"
TOKENS, LAYERS = 90, 6


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def model_says() -> tuple[list[int], list[tuple[np.ndarray, np.ndarray]]]:
    """Ids of the text, and K and V of them all in one step, straight from the session."""
    tokenizer, session = Tokenizer.open_for_model(FIXTURE), DecoderSession.open(FIXTURE)
    ids = [tokenizer.bos, *tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: TOKENS - 1].tolist()]
    step = session.run_step(np.array(ids), np.arange(TOKENS), session.create_empty_past())
    return ids, [(keys[0].copy(), values[0].copy()) for keys, values in step.present_pairs]


def dump(run: Callable[..., Any], *more: object, out: str = "kv") -> Any:
    argv = ["dump-kv", FIXTURE, "--text", TEXT, "--max-tokens", TOKENS, "-o", out, *more, "--json"]
    return json.loads(run(*argv).out)


def npy_files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.npy"))


def test_dump_kv_equals_the_model(run: Callable[..., Any], model_says: Any) -> None:
    ids, layers = model_says
    found = dump(run)
    assert (found["label"], found["dtype"], found["tokens_kept"]) == ("UNCHANGED", "fp32", [TOKENS] * LAYERS)
    assert found["rounded"]["changed"] == 0
    assert len(npy_files("kv")) == 2 * LAYERS
    for layer, (keys, values) in enumerate(layers):
        assert np.array_equal(np.load(f"kv/layer_{layer}.key.npy"), keys)
        assert np.array_equal(np.load(f"kv/layer_{layer}.value.npy"), values)
    assert json.loads(Path("kv/token_ids.json").read_text()) == ids
    positions = json.loads(Path("kv/positions.json").read_text())
    assert positions["tokens_seen"] == TOKENS
    assert [entry["positions"] for entry in positions["layers"]] == [list(range(TOKENS))] * LAYERS
    assert found["bytes"] == sum(np.load(path).nbytes for path in npy_files("kv"))


def test_dump_kv_attention_is_what_later_tokens_gave(run: Callable[..., Any], model_says: Any, folder: Path) -> None:
    from kvmnn.calibration import ProfileOptions, make_profile_from_caches
    from kvmnn.dense import RopeConfig

    ids, layers = model_says
    dump(run, "--attention", "drawn.npy")
    drawn = np.load("drawn.npy")
    session = DecoderSession.open(FIXTURE, attentions=True)
    step = session.run_step(np.array(ids), np.arange(TOKENS), session.create_empty_past())
    assert drawn.shape == (LAYERS, layers[0][0].shape[0], TOKENS) and drawn.dtype == np.float32
    for layer, weights in enumerate(step.attentions):
        below = np.tril(np.ones((TOKENS, TOKENS)), -1)
        means = (weights * below).sum(1) / np.maximum(below.sum(0), 1)
        means = means.reshape(drawn.shape[1], -1, TOKENS).mean(1)
        np.testing.assert_allclose(drawn[layer], means, atol=1e-6)
        assert np.abs(np.load(f"kv/layer_{layer}.key.npy") - layers[layer][0]).max() < 1e-3
    options = ProfileOptions(below=(0,), purpose="lossy")
    make_profile_from_caches(["kv"], "p.kvmp", options, rope=RopeConfig(10000.0, 16))
    encoded = run("encode", "kv", "-o", "small/", "--codec", "transform:p.kvmp,kl=0.01,attention=drawn.npy", "--json")
    assert json.loads(encoded.out)["label"] == "LOSSY"
    errors = run("dump-kv", FIXTURE, "--text", TEXT, "-o", "b", "--attention", "drawn.npy", code=1).err
    assert "drawn.npy: exists already" in errors
    cut = ["--policy", "streaming", "--budget", "20", "--attention", "c.npy"]
    assert "full cache" in run("dump-kv", FIXTURE, "--text", TEXT, "-o", "b", *cut, code=1).err


def test_dump_kv_chat_has_the_ids_of_the_store(run: Callable[..., Any]) -> None:
    pytest.importorskip("jinja2")
    folder = Path("model")
    folder.mkdir()
    for name in ("model.onnx", "config.json", "tokenizer.json"):
        (folder / name).symlink_to(FIXTURE / name)
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
    config = json.loads((FIXTURE / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    Path("chat.json").write_text(json.dumps({"messages": [{"role": "user", "content": "Why?"}]}))
    found = json.loads(run("dump-kv", folder, "--text", "chat.json", "-o", "kv", "--json").out)
    assert found["notes"] == ["chat.json: messages of a chat, as the chat template of the model renders them"]
    ids = Tokenizer.open_for_model(folder).encode("<user>Why?<answer>").tolist()
    assert json.loads(Path("kv/token_ids.json").read_text()) == ids
    run("store", "put", "S", "kv", "--text", "chat.json", "--model", folder, "--fingerprint", "m")
    assert (
        run("store", "match", "S", "--text", "chat.json", "--model", folder, "--fingerprint", "m").out
        == f"{len(ids)}\n"
    )
    Path("list.json").write_text("[1, 2]")
    assert "list.json" in run("dump-kv", folder, "--text", "list.json", "-o", "x", code=1).err


def test_dump_kv_reports_rounding(run: Callable[..., Any], model_says: Any) -> None:
    found = dump(run, "--dtype", "fp16")
    assert (found["label"], found["dtype"], found["rounded"]["from"]) == ("LOSSY", "fp16", "fp32")
    changed, worst = 0, 0.0
    for layer, pair in enumerate(model_says[1]):
        for part, words in zip(("key", "value"), pair, strict=True):
            here = np.load(f"kv/layer_{layer}.{part}.npy")
            assert here.dtype == np.float16 and np.array_equal(here, words.astype(np.float16))
            changed += int((here.astype(np.float32) != words).sum())
            worst = max(worst, float(np.abs(here.astype(np.float64) - words).max()))
    assert (found["rounded"]["changed"], found["rounded"]["largest_error"]) == (changed, worst)
    said = run("dump-kv", FIXTURE, "--text", TEXT, "--max-tokens", TOKENS, "-o", "kv", "--dtype", "fp16", "-f").out
    assert f"LOSSY (fp32 rounded to fp16: {changed:,} of" in said


def test_dump_kv_loss_marks_copies(run: Callable[..., Any], folder: Path) -> None:
    dump(run, "--dtype", "fp16", out="kv")
    dump(run, "--policy", "streaming", "--budget", 20, out="cut")
    dump(run, out="exact")
    evicted = f"LOSSY: evicted before dump-kv: 20 of {TOKENS} tokens are here"
    for name, loss in (("kv", "LOSSY: rounded by a cast: fp32 to fp16, "), ("cut", evicted), ("exact", "")):
        label = "LOSSLESS copy of LOSSY K and V" if loss else "LOSSLESS"
        argv = (("encode", name, "-o", f"{name}.frames"), ("verify", f"{name}.frames", "--against", name))
        for words in (*argv, ("decode", f"{name}.frames", "-o", f"{name}.back/")):
            document = json.loads(run(*words, "--json").out)
            assert document["label"] == label, words
            assert any(loss in note for note in document["notes"]) or not loss, words
        copied = {path.name: path.read_bytes() for path in Path(f"{name}.back").iterdir()}
        assert copied == {path.name: path.read_bytes() for path in Path(name).iterdir()}  # and no loss.json
    rounded = run("store", "put", "S", "kv", "--fingerprint", "m", "--token-ids", "kv/token_ids.json")
    assert "rounded by a cast" in rounded.err
    put = run("store", "put", "T", "kv", "--model", FIXTURE, "--text", TEXT)  # which has more tokens
    assert put.err.count(f"the cache has the first {TOKENS} of the ") == 1 and f"{TOKENS} tokens, " in put.out
    other = ("store", "put", "T", "kv", "--model", FIXTURE, "--text", FIXTURE / "texts" / "calendar.py.txt")
    assert "(leave --text out, or --force)" in run(*other, code=2).err
    positions = json.loads(Path("kv/positions.json").read_text())
    for damage in ({"rounded": 1, "layers": 1}, {"rounded": {"changed": "1"}, "layers": [1, {"tokens": "1"}]}):
        Path("kv/positions.json").write_text(json.dumps(positions | damage))
        assert "LOSSY: positions.json says so" in run("encode", "kv", "-o", "damaged.frames", "-f").out


@pytest.mark.parametrize("policy", ["streaming", "h2o_decayed_heads", "l2_fixed", "knorm"])
def test_dump_kv_evicted_cache_matches_its_positions(run: Callable[..., Any], model_says: Any, policy: str) -> None:
    found = dump(run, "--policy", policy, "--budget", 20)
    assert (found["label"], found["tokens_kept"]) == ("LOSSY", [20] * LAYERS)
    positions = json.loads(Path("kv/positions.json").read_text())
    for entry, (keys, values) in zip(positions["layers"], model_says[1], strict=True):
        places = np.broadcast_to(np.array(entry["positions"]), (keys.shape[0], entry["tokens"]))
        for part, words in (("key", keys), ("value", values)):
            here = np.load(f"kv/layer_{entry['layer']}.{part}.npy")
            kept = np.take_along_axis(words, places[:, :, None], axis=1)
            assert np.array_equal(here, kept), (policy, entry["layer"], part)  # one step: eviction comes after it
    assert len(json.loads(Path("kv/token_ids.json").read_text())) == TOKENS


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [(), ("--policy", "l2_fixed", "--budget", 20, "--skip-layers", "0+1")],
    ids=["whole", "layers unequal"],
)
@pytest.mark.parametrize("form", ["npy", "mnn"])
def test_dump_kv_output_passes_all_other_verbs(run: Callable[..., Any], form: str, cut: tuple[str, ...]) -> None:
    """dump-kv -> encode -> verify -> decode, -> measure, -> pack -> unpack."""
    dump(run, "--format", form, *cut)
    inputs = npy_files("kv") if form == "npy" else ["kv"]
    encoded = json.loads(run("encode", *inputs, "-o", "frames/", "--json").out)
    label = "LOSSLESS copy of LOSSY K and V" if cut else "LOSSLESS"
    assert (len(encoded["arrays"]), encoded["label"]) == (2 * LAYERS, label)
    verified = json.loads(run("verify", "frames/", "--json").out)
    assert verified["label"] == label
    run("decode", "frames/", "-o", "back/")
    if form == "npy":
        for path in inputs:
            assert (Path("back") / Path(path).name).read_bytes() == Path(path).read_bytes()
    measured = json.loads(run("measure", *inputs, "--json").out)
    assert measured["verb"] == "measure"
    pack = ("mnn", "pack", *inputs, "--name", "p", "--backend", "x86-avx2")
    run(*pack, "--capacity", TOKENS, "-o", "packed/")  # one size for layers of unequal numbers of tokens
    run("mnn", "unpack", "packed/", "-o", "plain/")
    dump(run, *cut, out="again")
    for path in npy_files("again"):
        assert (Path("plain") / path.name).read_bytes() == path.read_bytes()


def test_dump_kv_mnn_format_has_the_engine_layout(run: Callable[..., Any], model_says: Any) -> None:
    dump(run, "--format", "mnn", "--dtype", "fp16", "--run-id", "r1")
    for layer, (keys, values) in enumerate(model_says[1]):
        meta = json.loads(Path(f"kv/r1/layer_{layer}/meta_t0_{TOKENS}.json").read_text())
        assert (meta["seq_len"], meta["kv_heads"], meta["head_dim"], meta["dtype"]) == (TOKENS, 4, 64, "fp16")
        for name, words in ((meta["k_file"], keys), (meta["v_file"], values)):
            here = np.fromfile(f"kv/r1/layer_{layer}/{name}", np.float16).reshape(TOKENS, 4, 64)
            assert np.array_equal(here, words.astype(np.float16).transpose(1, 0, 2))


@pytest.mark.slow
def test_dump_kv_chunk_size_keeps_the_budget(run: Callable[..., Any]) -> None:
    at_once = dump(run, "--policy", "h2o_decayed", "--budget", 20)
    by_token = dump(run, "--policy", "h2o_decayed", "--budget", 20, "--chunk", 1, out="slow")
    assert at_once["tokens_kept"] == by_token["tokens_kept"] == [20] * LAYERS


@pytest.mark.slow
def test_dump_kv_short_text_is_noted(run: Callable[..., Any], folder: Path) -> None:
    (folder / "short.txt").write_text("def f(): pass\n")
    argv = ["dump-kv", FIXTURE, "--text", "short.txt", "-o", "kv"]
    found = json.loads(run(*argv, "--json").out)
    assert 2 < found["tokens_seen"] < 20
    assert f"the text has only {found['tokens_seen']} tokens" in run(*argv, "-f").out
    one = json.loads(run(*argv, "--max-tokens", 1, "-f", "--json").out)
    assert one["tokens_kept"] == [1] * LAYERS


@pytest.mark.slow
def test_dump_kv_existing_output_needs_force(run: Callable[..., Any]) -> None:
    dump(run)
    before = {path.name: path.stat().st_mtime_ns for path in Path("kv").iterdir()}
    argv = ["dump-kv", FIXTURE, "--text", TEXT, "--max-tokens", 5, "-o", "kv"]
    assert "exists already" in run(*argv, code=1).err
    assert {path.name: path.stat().st_mtime_ns for path in Path("kv").iterdir()} == before
    run(*argv, "-f")
    assert np.load("kv/layer_0.key.npy").shape == (4, 5, 64)


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--text", str(TEXT)], 2, "no output given"),
        (["--text", str(TEXT), "-o", "-"], 2, "no output given"),
        (["-o", "kv"], 2, "--text"),
        (["--text", str(TEXT), "-o", "kv", "--max-tokens", "4097"], 1, "4,096 positions"),
        (["--text", "empty.txt", "-o", "kv"], 1, "empty.txt: is empty"),
        (["--text", "latin.txt", "-o", "kv"], 1, "is not UTF-8"),
        (["--text", "none.txt", "-o", "kv"], 1, "none.txt"),
        (["--text", str(TEXT), "-o", "latin.txt", "--max-tokens", "5"], 1, "latin.txt: exists already"),
        (
            ["--text", str(TEXT), "-o", "kv", "--max-tokens", "9", "--format", "mnn", "--run-id", "../x"],
            1,
            "not a run id",
        ),
        (
            ["--text", str(TEXT), "-o", "kv", "--max-tokens", "9", "--policy", "recent_only", "--budget", "0"],
            1,
            "layer 0: the policy keeps no token of it",
        ),
    ],
)
def test_dump_kv_error_is_one_line_without_output(
    run: Callable[..., Any], folder: Path, argv: list[str], code: int, message: str
) -> None:
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    found = run("dump-kv", FIXTURE, *argv, code=code)
    assert message in found.err and len(found.err.splitlines()) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["empty.txt", "latin.txt"]


@pytest.mark.slow
def test_dump_kv_lossless_runtime_changes_no_number(run: Callable[..., Any]) -> None:
    keys = "front_n=2,block_tokens=16,hot_recent_tokens=8,hot_sink_tokens=4,h2o_trigger_min_tokens=16"
    spec = f"store:{keys},h2o_update_interval=1"
    plain = dump(run, "--chunk", 10)
    found = dump(run, "--chunk", 10, "--lossless", spec, out="stored")
    assert "runtime" not in plain and found["runtime"]["mode"] == "store"
    assert [layer["blocks"] > 0 for layer in found["runtime"]["layers"]] == [True] * 2 + [False] * (LAYERS - 2)
    added, encoded = found["notes"]
    assert plain["notes"] == [added] and "which was added (bos_token of tokenizer_config.json" in added
    assert encoded == "Encoded: layers 0 to 1 of 6 (scope front_n, front_n 2); the others stay raw."
    for path in npy_files("kv"):
        assert path.read_bytes() == (Path("stored") / path.name).read_bytes()
    argv = ["dump-kv", FIXTURE, "--text", TEXT, "--max-tokens", TOKENS, "-o", "kv", "-f", "--lossless", spec]
    out = run(*argv, "--chunk", 10).out
    assert "The runtime around the cache" in out and "the others stay raw." in out
    assert max(map(len, out.splitlines())) <= 80
    for chunk in ([], ["--chunk", TOKENS]):
        assert "expected --chunk N, N below the 90 tokens" in run(*argv, *chunk, code=2).err
