"""The verbs on caches of llama.cpp and MLX: accepted input, required options, messages."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import hf_files
import llama_files
import mlx_files
import numpy as np
import pytest
from kept_files import there_and_back
from llama_files import Shape

import kvmnn
from kvmnn import RopeConfig
from kvmnn.formats.llama import read_gguf_rotary
from kvmnn.store import PrefixStore


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A session of 12 tokens in f16 and in q8_0, one with gaps, a model, a prompt cache, ids."""
    monkeypatch.chdir(tmp_path)
    for name, kind, gaps in (("x", "f16", False), ("q", "q8_0", False), ("gaps", "f16", True)):
        state, _ = llama_files.state(Random(3), Shape(k_type=kind, v_type=kind), [12], gaps=gaps)
        Path(f"{name}.session").write_bytes(state)
    Path("m.gguf").write_bytes(llama_files.gguf(attention__head_count_kv=2, attention__key_length=32, block_count=2))
    Path("c.safetensors").write_bytes(mlx_files.cache(Random(3), mlx_files.Shape(dims=32, value_dims=32))[0])
    hf_files.save(tmp_path / "c.pt", hf_files.dynamic_cache(hf_files.pairs(1)))
    Path("ids.json").write_text(json.dumps(list(range(12))))
    np.save("plain.npy", np.ones((2, 3), np.float16))
    return tmp_path


def test_measure_session_needs_no_heads(here: Path, run) -> None:
    found = json.loads(run("measure", "x.session", "--json", "--encode").out)
    by_heads = json.loads(run("measure", "x.session", "--json", "--encode", "--kv-heads", 2).out)
    assert found["breakdown"] == by_heads["breakdown"]
    assert run("measure", "c.safetensors").out


@pytest.mark.parametrize(("k_type", "v_type"), [("q8_0", "f16"), ("f16", "f32"), ("bf16", "q4_0")])
def test_measure_takes_keys_and_values_of_different_types(here: Path, run, k_type: str, v_type: str) -> None:
    """As with llama.cpp's -ctk alone; K measures as in a cache where V has its type."""
    found = {}
    for name, types in (("both", (k_type, v_type)), ("keys", (k_type, k_type))):
        state, _ = llama_files.state(Random(3), Shape(k_type=types[0], v_type=types[1]), [12])
        Path(f"{name}.session").write_bytes(state)
        found[name] = json.loads(run("measure", f"{name}.session", "--json").out)
    both, keys = (found[name]["breakdown"]["overall"] for name in ("both", "keys"))
    assert both["k"] == keys["k"]
    for part, kind in (("k", k_type), ("v", v_type)):
        word_bytes = 2 if kind in ("f16", "bf16") else 4  # blocks become fp32
        assert both[part]["raw_bytes"] == word_bytes * 2 * 12 * 2 * 32
    said = run("measure", "both.session", "--to-fp16").out
    assert "LOSSY: 2 fp32 entries were rounded to fp16 before anything else" in said


def test_pack_takes_keys_and_values_of_different_types(here: Path, run) -> None:
    state, ((cells,),) = llama_files.state(Random(3), Shape(k_type="q8_0", v_type="f16"), [12])
    Path("both.session").write_bytes(state)
    pack = ("mnn", "pack", "both.session", "--kv-heads", 2, "--backend", "x86-avx2", "--name", "p", "-o", "p/")
    assert (
        "the arrays are fp16 and fp32, a layout holds one type: --cast (cast=True) converts them"
        in run(*pack, code=2).err
    )
    run(*pack, "--cast", "--invert", "none")
    run("mnn", "unpack", "p", "-o", "back.npz")
    for layer in range(2):
        keys, values = (np.load("back.npz")[f"layer_{layer}.{part}"] for part in ("key", "value"))
        assert np.array_equal(keys, cells.keys[layer])
        finite = np.isfinite(cells.values[layer].view(np.float16))
        assert np.array_equal(values[finite], cells.values[layer].view(np.float16)[finite].astype(np.float32))


def test_pack_session_into_prefix_cache_round_trips(here: Path, run) -> None:
    run(
        "mnn",
        "pack",
        "x.session",
        "--model",
        "m.gguf",
        "--backend",
        "x86-avx2",
        "--cast",
        "--name",
        "sys",
        "-o",
        "sys/",
    )
    run("mnn", "unpack", "sys", "-o", "back.npz")
    run("mnn", "unpack", "x.session", "--kv-heads", 2, "--invert", "k-order", "-o", "plain.npz")
    assert "3,072 numbers within 0" in run("diff", "plain.npz", "back.npz", "--atol", 0).out


def test_session_with_gaps_is_packed_but_not_stored(here: Path, run) -> None:
    packed = run(
        "mnn", "pack", "gaps.session", "--kv-heads", 2, "--backend", "arm64-fp16", "--name", "sys", "-o", "sys/"
    )
    assert "true positions are as llama.cpp has them" in packed.err
    document = json.loads(Path("sys/sys.kvmnn.json").read_text())
    assert len(document["layers"][0]["positions"]) > 1
    put = ("store", "put", "store", "gaps.session", "--kv-heads", 2, "--fingerprint", "m")
    assert "holds no beginning of a text, whole and in order" in run(*put, code=1).err.replace("\n", " ")


def test_store_put_and_get_session(here: Path, run) -> None:
    run("store", "put", "store", "x.session", "--model", "m.gguf", "--token-ids", "ids.json", "--force")
    run("store", "get", "store", "--model", "m.gguf", "--token-ids", "ids.json", "-o", "got.npz")
    assert "equal" in run("diff", "got.npz", "x.session", "--kv-heads", 2, "--invert", "k-order").out
    Path("more.json").write_text(json.dumps([*range(12), 99]))
    said = run("store", "get", "store", "--model", "m.gguf", "--token-ids", "more.json", "-o", "part.npz").out
    assert said.startswith("12 of 13 tokens, fp16: 1 is left to compute\n")


def test_dequantised_numbers_have_no_lossless_label(here: Path, run) -> None:
    said = run("mnn", "unpack", "q.session", "--kv-heads", 2, "-o", "q.npz")
    assert "dequantised from q8_0" in said.out
    assert "LOSSY (dequantised from q8_0)" in said.out and "LOSSLESS" not in said.out
    unpacked = json.loads(run("mnn", "unpack", "q.session", "--kv-heads", 2, "-o", "q2.npz", "--json").out)
    assert unpacked["label"] == "LOSSY"
    run("mnn", "unpack", "q.session", "--kv-heads", 2, "--raw-blocks", "-o", "blocks.npz")
    with np.load("blocks.npz") as blocks:
        assert blocks["layer_0.key"].shape == (12, 2, 34)


@pytest.mark.parametrize(
    "argv",
    [
        "measure q.session",
        "measure q.session --encode",
        "store put store q.session --model m.gguf",
        "mnn unpack q.session --kv-heads 2 -o q.npz",
        "inspect q.session",
    ],
)
def test_dequantised_sizes_are_noted(here: Path, run, argv: str) -> None:
    said = run(*argv.split())
    found = " ".join((said.out + said.err).split())
    assert "dequantised from q8_0 to fp32: 3,264 bytes in the file became 12,288, and sizes and ratios are" in found


def test_measure_dequantised_to_fp16_is_lossy(here: Path, run) -> None:
    assert "LOSSY: 2 fp32 entries were rounded to fp16" in run("measure", "q.session", "--to-fp16").out
    assert json.loads(run("measure", "q.session", "--to-fp16", "--json").out)["label"] == "LOSSY"


@pytest.mark.parametrize("option", ["--encode", "--dense", "--no-limits"])
def test_measure_quantised_input_reports_file_bytes(here: Path, run, option: str) -> None:
    size = Path("q.session").stat().st_size
    argv = ["measure", "q.session", option, "--kv-heads", 2]
    made = json.loads(run(*argv, "--json").out)
    assert made["dequantised"] == {"types": ["q8_0"], "input_bytes": size}
    overall = (made if option == "--dense" else made["breakdown"])["overall"]
    name = {"--encode": "STORED", "--dense": "dense", "--no-limits": "simulated"}[option]
    times = overall[f"{name.lower()}_bytes"] / size
    note = f"words dequantised from q8_0: the input has {size:,} bytes, its words 12,288; {name} is {times:.2f} times"
    assert made["notes"] == [f"{note} the input"]
    assert note in " ".join(run(*argv).out.split())
    assert "dequantised" not in json.loads(run("measure", "x.session", option, "--json", "--kv-heads", 2).out)


def test_diff_notes_possible_rotation_of_quantised_caches(here: Path, run) -> None:
    for name, kind in (("f16", "f16"), ("q4", "q4_0")):
        shape = Shape(k_type=kind, v_type=kind, dims=64, value_dims=64)
        Path(f"{name}.session").write_bytes(llama_files.state(Random(3), shape, [12])[0])
    said = run("diff", "f16.session", "q4.session", "--kv-heads", 2, "--atol", 0.01, code=1)
    assert "quantised K and V rotated by a Hadamard matrix, and the file does not say so" in " ".join(said.err.split())
    assert "Hadamard" not in run("diff", "f16.session", "f16.session", "--kv-heads", 2).err


def test_raw_blocks_are_bytes(here: Path, run) -> None:
    said = run("inspect", "q.session", "--raw-blocks").out
    assert "layer_0.key: bytes [12, 2, 34] C, 816 bytes" in said
    assert "kv heads are not" not in said
    there_and_back(run, here / "q.session")
    run("encode", "q.session", "--raw-blocks", "--kv-heads", 2, "-o", "blocks/")
    assert "layer_0.key    bytes [12, 2, 34] C  816 -> " in run("inspect", "blocks").out


def test_diff_session_with_arrays_of_another_type(here: Path, run) -> None:
    """The same numbers in a session of llama.cpp and in plain arrays."""
    run("mnn", "unpack", "q.session", "--kv-heads", 2, "-o", "q.npz")
    with np.load("q.npz") as found:
        np.savez("half.npz", **{name: words.astype(np.float16) for name, words in found.items()})
    assert "within 0.1" in run("diff", "q.session", "half.npz", "--kv-heads", 2, "--atol", 0.1).out
    assert "further apart" in run("diff", "q.session", "half.npz", "--kv-heads", 2, "--atol", 1e-9, code=1).out


def test_inspect_session_shows_its_header(here: Path, run) -> None:
    said = run("inspect", "x.session").out
    assert "llama.cpp session: 2 layers, kv heads unknown, 12 tokens, f16" in said
    assert "kv heads are not in the file" in said
    frames = there_and_back(run, here / "x.session")
    assert "layer_0.key" in run("inspect", frames).out


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ("mnn unpack x.session -o o.npz", 2, "say --kv-heads N, or --model FILE.gguf"),
        ("mnn unpack x.session --kv-heads 5 -o o.npz", 2, "which are not 5 kv heads"),
        (
            "mnn unpack x.session --kv-heads 2 --backend x86-avx2 -o o.npz",
            2,
            "--backend is about packed files of MNN's",
        ),
        (
            "mnn unpack x.session --kv-heads 2 --valid-tokens 3 -o o.npz",
            2,
            "--valid-tokens is about packed files of MNN's",
        ),
        (
            "mnn unpack x.session --kv-heads 4 --model m.gguf -o o.npz",
            2,
            "4 for the cache, but the model in m.gguf has 2",
        ),
        ("mnn unpack x.session --model plain.npy -o o.npz", 1, "is no GGUF model"),
        (
            "mnn unpack x.session --kv-heads 2 --part stream=4 -o o.npz",
            2,
            "stream 4 holds no cells; --part stream=N (stream=) may be 0",
        ),
        (
            "mnn unpack x.session --kv-heads 2 --part sliding-window -o o.npz",
            2,
            "holds one cache: --part sliding-window (window_cache=) is about",
        ),
        ("encode plain.npy --raw-blocks -o o/", 2, "--raw-blocks is about quantised caches of llama.cpp and MLX"),
        (
            "measure c.pt --raw-blocks",
            2,
            "--raw-blocks is about quantised caches of llama.cpp and MLX, and c.pt holds none",
        ),
        (
            "measure c.pt --part sliding-window",
            2,
            "--part sliding-window is about caches of llama.cpp, and c.pt holds none",
        ),
        ("measure c.pt --kv-heads 2", 2, "is about packed files of MNN's and caches of llama.cpp, and c.pt holds none"),
        ("encode x.session --dtype bf16 -o o/", 1, "holds f16, not bf16"),
        ("mnn unpack x.session --kv-heads 2 --dtype bf16 -o o.npz", 1, "holds f16, read as fp16, not bf16"),
        (
            "inspect plain.npy --part sliding-window",
            2,
            "--part sliding-window changes nothing of what is said about plain.npy",
        ),
    ],
)
def test_engine_caches_invalid_requests_are_refused(here: Path, run, argv: str, code: int, said: str) -> None:
    assert said in " ".join(run(*argv.split(), code=code).err.split())
    assert not list(here.glob("o.*")) + list(here.glob("o/"))


def test_encode_folder_of_sessions_suggests_jobs(here: Path, run) -> None:
    folder = here / "caches"
    folder.mkdir()
    (here / "x.session").rename(folder / "x.session")
    more = "; --jobs N takes each file below it by itself"
    for words in ([], ["--kv-heads", 2]):
        said = run("encode", folder, *words, code=1).err
        assert "caches: not a file kvmnn knows: the folder has no manifest.json" in said and said.endswith(f"{more}\n")
    assert run("encode", folder, "--kv-heads", 2, "--jobs", 1, "-o", here / "frames").out.count('"ok": true') == 1
    assert "--jobs" not in run("mnn", "unpack", folder, "--kv-heads", 2, "-o", "o.npz", code=1).err


def test_store_put_session_uses_its_token_ids(here: Path, run) -> None:
    put = ("store", "put", "S", "x.session", "--kv-heads", 2, "--fingerprint", "m")
    said = run(*put, "--token-ids", "ids.json", code=2).err
    assert "x.session: its token 0 is " in said and "--token-ids says 0 (leave --token-ids out, or --force)" in said
    assert not Path("S").exists() or "0 texts" in run("store", "stat", "S").out
    assert run(*put).out.startswith("12 tokens, 12 of them new: ")
    own = np.frombuffer(Path("x.session").read_bytes(), "<i4", 12, 12).tolist()
    Path("own.json").write_text(json.dumps(own))
    assert run("store", "match", "S", "--token-ids", "own.json").out == "12\n"
    assert run(*put, "--token-ids", "own.json").out
    plain = ("store", "put", "S", "c.safetensors", "--fingerprint", "m")
    assert "c.safetensors: does not say its token ids: store put needs --token-ids IDS" in run(*plain, code=2).err


def test_diff_axes_apply_to_arrays_not_to_frames(here: Path, run) -> None:
    rows = np.random.default_rng(0).normal(size=(2, 2, 3, 10, 8)).astype(np.float16)
    np.save("rows.npy", rows)
    rows.tofile("page.bin")
    run("encode", "rows.npy", "--axes", "2lthd", "-o", "rows.frames/")
    assert run("diff", "rows.npy", "rows.frames", "--axes", "2lthd").out.startswith("equal: ")
    page = ("diff", "page.bin", "rows.frames", "--dtype", "fp16", "--shape", "2,2,3,10,8", "--axes", "2lthd")
    assert run(*page).out.startswith("equal: ")


@pytest.mark.parametrize(
    ("cells", "sequences", "choice"), [([5, 0, 9], 1, ("--part", "stream=2")), ([9], 3, ("--part", "sequence=0"))]
)
def test_store_put_session_of_several_texts_needs_token_ids(
    here: Path, run, cells: list[int], sequences: int, choice: tuple[object, ...]
) -> None:
    """The file has one list of ids, which would find K and V of another text."""
    data, caches = llama_files.state(Random(5), Shape(), cells, tokens=9, sequences=sequences)
    Path("x.session").write_bytes(data)
    put = ("store", "put", "S", "x.session", "--kv-heads", 2, *choice, "--fingerprint", "m")
    assert "does not say its token ids" in run(*put, code=2).err
    tokens = sum(0 in ids for ids in caches[0][-1].seqs)
    Path("ids.json").write_text(json.dumps(list(range(tokens))))
    if sequences == 1:
        noted = run(*put, "--token-ids", "ids.json").err
        assert "the 9 token ids of the file may be of any of its texts, and are left out" in " ".join(noted.split())
    stored = run("mnn", "unpack", "x.session", "--kv-heads", 2, *choice, "-o", "x.npz").err
    assert "the 9 token ids of the file" in " ".join(stored.split())
    assert "does not say its token ids" in run("store", "put", "S", "x.npz", "--fingerprint", "m", code=2).err


def test_inspect_session_json_has_ids_and_positions(tmp_path: Path, run) -> None:
    path = tmp_path / "x.session"
    data, caches = llama_files.state(Random(5), Shape(), [7, 0], tokens=9, gaps=True)
    path.write_bytes(data)
    said = json.loads(run("inspect", path, "--json").out)["inputs"][0]["engine_cache"]
    ids = [int.from_bytes(data[12 + 4 * n : 16 + 4 * n], "little", signed=True) for n in range(9)]
    assert said["token_ids"] == ids
    assert said["cells"] == [7, 0]
    positions = [begin + n for begin, size in said["positions"] for n in range(size)]
    assert positions == caches[0][0].positions
    shown = run("inspect", path).out
    assert "llama.cpp session" in shown and str(ids) not in shown, "the text stays short"


@pytest.mark.parametrize("gaps", [False, True])
def test_dense_session_round_trips(here: Path, run, gaps: bool) -> None:
    """K and V by heads, at the positions of the file."""

    class Few(Random):
        def randbytes(self, n: int) -> bytes:
            return bytes(self.choice(b"\x00\x3c") for _ in range(n))

    name = "few.session"
    state, _ = llama_files.state(Few(3), Shape(k_type="f16", v_type="f16"), [12], gaps=gaps)
    Path(name).write_bytes(state)
    for how in (["--kv-heads", 2], ["--model", "m.gguf"]):
        run("encode", name, "-o", "d/", "--codec", "dense", *how, "--force")
        arrays = json.loads(Path("d/manifest.json").read_text())["arrays"]
        assert [frame["stored"] for array in arrays for frame in array["frames"]] == ["dense"] * 4
        assert "LOSSLESS" in run("decode", "d", "-o", "back.session", "--force").out
        assert Path("back.session").read_bytes() == Path(name).read_bytes()
        assert "LOSSLESS" in run("verify", "d", "--against", name).out
        run("mnn", "unpack", "d", "-o", "d.npz", "--force")
        run("mnn", "unpack", name, "--kv-heads", 2, "-o", "x.npz", "--force")
        with np.load("d.npz") as one, np.load("x.npz") as other:
            assert {n: one[n].tobytes() for n in one} == {n: other[n].tobytes() for n in other}


def test_dense_session_needs_heads_and_no_quantisation(here: Path, run) -> None:
    said = run("encode", "x.session", "-o", "d/", "--codec", "dense", code=2).err
    assert "--kv-heads or --model FILE.gguf says their heads" in said
    said = run("encode", "q.session", "-o", "d/", "--codec", "dense", "--kv-heads", 2, code=2).err
    assert "where they are not quantised" in said


def test_dense_session_rope_is_read_from_gguf(here: Path, run) -> None:
    heads = {"attention__head_count_kv": 2, "attention__key_length": 32, "block_count": 2}
    rope: dict[str, Any] = {"rope__dimension_count": 16, "rope__freq_base": 500000.0}
    Path("r.gguf").write_bytes(llama_files.gguf("llama", **heads, **rope))
    note = "rotation of K: theta=500000,dims=16,pairing=interleaved, as r.gguf says\n"
    Path("q.gguf").write_bytes(llama_files.gguf("qwen2", **heads, **rope))
    assert [str(read_gguf_rotary(name)[0]) for name in ("r.gguf", "q.gguf", "m.gguf")] == [
        "theta=500000,dims=16,pairing=interleaved",
        "theta=500000,dims=16",
        "None",
    ]
    for verb in (["encode", "-o", "d/", "--codec", "dense"], ["measure", "--dense"]):
        assert note in run(verb[0], "x.session", *verb[1:], "--model", "r.gguf").err
    run("encode", "x.session", "-o", "t/", "--codec", "dense", "--kv-heads", 2, "--rope", note.split()[3].rstrip(","))
    assert Path("t/layer_0.key.frame").read_bytes() == Path("d/layer_0.key.frame").read_bytes()
    scaled = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    Path("s.gguf").write_bytes(llama_files.gguf("llama", **heads, **rope, **scaled))
    said = run("measure", "x.session", "--dense", "--model", "s.gguf").err
    assert "scaling=linear with factor 4, as s.gguf says" in said
    Path("s.gguf").write_bytes(llama_files.gguf("llama", **heads, **rope, rope__scaling__type="longrope"))
    assert "rope scaling 'longrope' is left out" in run("measure", "x.session", "--dense", "--model", "s.gguf").err


@pytest.mark.parametrize("undo", [[], ["--invert", "none"]])
def test_store_put_takes_the_rotation_of_a_gguf_model(
    here: Path, run, monkeypatch: pytest.MonkeyPatch, undo: list[str]
) -> None:
    """Rotated pairs are neighbours in llama.cpp's Llama and half a head apart elsewhere."""
    heads = {"attention__head_count_kv": 2, "attention__key_length": 32, "block_count": 2}
    rope: dict[str, Any] = {"rope__dimension_count": 32, "rope__freq_base": 500000.0}
    Path("r.gguf").write_bytes(llama_files.gguf("llama", **heads, **rope))
    taken = []
    made = PrefixStore.__init__
    monkeypatch.setattr(
        PrefixStore, "__init__", lambda self, *args, **kw: (taken.append(kw["rotary"]), made(self, *args, **kw))[1]
    )
    put = ("store", "put", "store", "x.session", "--model", "r.gguf", *undo)
    run(*put)
    run(*put, "--rope", "none")
    pairing = "interleaved" if undo else "half"
    assert taken == [RopeConfig(theta=500000.0, dims=32, pairing=pairing), "none"]


def test_measure_raw_blocks_are_refused(here: Path, run) -> None:
    said = run("measure", "q.session", "--raw-blocks", code=1).err
    assert "holds bytes, not the numbers of K or V: blocks that stay blocks (--raw-blocks) are for encode" in said


@pytest.mark.parametrize("swapped", [False, True])
def test_diff_gguf_model_applies_to_the_session(here: Path, run, swapped: bool) -> None:
    pack = ("mnn", "pack", "x.session", "--model", "m.gguf", "--backend", "x86-avx2", "--cast", "--name", "sys")
    run(*pack, "--invert", "none", "-o", "sys/")
    inputs = ("x.session", "sys") if swapped else ("sys", "x.session")
    assert "3,072 numbers within 0" in run("diff", *inputs, "--model", "m.gguf", "--atol", 0).out


@pytest.mark.parametrize("heads", [2, [2, 2, 2]])
@pytest.mark.parametrize("argv", ["encode x.session -o f/", "mnn unpack x.session -o o.npz", "store put s/ x.session"])
def test_gguf_model_of_more_layers_is_refused(here: Path, run, heads: int | list[int], argv: str) -> None:
    path = Path("other.gguf")
    path.write_bytes(llama_files.gguf(attention__head_count_kv=heads, attention__key_length=32, block_count=3))
    said = "x.session: has K and V of 2 layers, a cache of the model in other.gguf has 3: it is of another model"
    assert said in run(*argv.split(), "--model", path, code=2).err
    assert "another model" not in run(*argv.split(), "--model", "m.gguf").err


@pytest.mark.parametrize(
    "fields",
    [
        {"block_count": 2},
        {"nextn_predict_layers": 1},
        {"block_count": 2, "nextn_predict_layers": 1},
        {"attention__shared_kv_layers": 1},
        {"attention__head_count_kv": [2, 0, 2]},
        {"decoder_block_count": 2},
    ],
)
def test_gguf_model_layers_without_own_k_are_accepted(here: Path, run, fields: dict[str, Any]) -> None:
    said = {"attention__head_count_kv": 2, "attention__key_length": 32, "block_count": 3, **fields}
    Path("m.gguf").write_bytes(llama_files.gguf(**said))
    assert "another model" not in run("mnn", "unpack", "x.session", "--model", "m.gguf", "-o", "o.npz").err


def test_gguf_model_gemma3n_shared_layers_are_accepted(here: Path, run) -> None:
    """Older files of Gemma 3n lack the number, which llama.cpp hardcodes."""
    Path("g.session").write_bytes(llama_files.state(Random(3), Shape(), [12], architecture="gemma3n")[0])
    fields = {"attention__head_count_kv": 2, "attention__key_length": 32, "block_count": 3}
    Path("g.gguf").write_bytes(llama_files.gguf("gemma3n", **fields))
    run("mnn", "unpack", "g.session", "--model", "g.gguf", "-o", "o.npz")


def write_ids(name: str, ids: list[int], tokens: int) -> None:
    """A session of a Qwen with these ids and so many cells."""
    data, _ = llama_files.state(Random(3), Shape(), [tokens], tokens=len(ids), architecture="qwen2")
    Path(name).write_bytes(data[:12] + np.array(ids, "<i8").astype("<u4").tobytes() + data[12 + 4 * len(ids) :])


@pytest.mark.parametrize(("more", "note"), [(1, "the last token id of 21 has"), (3, "the last 3 token ids of 23 have")])
def test_store_put_more_ids_than_cells_uses_ids_with_cells(here: Path, run, more: int, note: str) -> None:
    """Some builds of llama.cpp write the id that is not evaluated yet."""
    ids = list(range(10, 30 + more))
    write_ids("more.session", ids, 20)
    words = ("store", "put", "s/", "more.session", "--kv-heads", 2, "--fingerprint", "m")
    found = run(*words)
    assert f"{note} no cell" in found.err and found.out.startswith("20 tokens, 20 of them new")
    run(*words, "--token-ids", ",".join(map(str, ids)))
    run(*words, "--token-ids", ",".join(map(str, ids[:20])))
    assert kvmnn.store.resolve_token_ids(kvmnn.open("more.session", kv_heads=2)).tolist() == ids[:20]


def test_store_put_fewer_ids_than_cells_is_refused(here: Path, run) -> None:
    write_ids("fewer.session", list(range(10, 29)), 20)
    words = ("store", "put", "s/", "fewer.session", "--kv-heads", 2, "--fingerprint", "m")
    assert "has 19 token ids for 20 tokens: specify all ids (--token-ids)" in run(*words, code=1).err
    assert not Path("s").exists()
    run(*words, "--token-ids", ",".join(map(str, range(10, 30))))


def test_store_put_image_ids_are_32_bit_without_placeholders(here: Path, run) -> None:
    ids = [5, 6, *(0x9E3779B9 * place % 2**32 for place in range(1, 17)), 7, 8]
    write_ids("hashed.session", ids, 20)
    words = ("store", "put", "s/", "hashed.session", "--kv-heads", 2, "--fingerprint", "m")
    run(*words)
    assert run("store", "match", "s/", "--token-ids", ",".join(map(str, ids))).out == "20\n"
    write_ids("null.session", [5, 6, *[-1] * 16, 7, 8], 20)
    words = ("store", "put", "t/", "null.session", "--kv-heads", 2, "--fingerprint", "m")
    assert "token 2 has the id -1, which stands for any picture or embedding" in run(*words, code=1).err
    run(*words, "--token-ids", ",".join(map(str, ids)))


def test_store_get_with_gguf_writes_a_packed_prefix(here: Path, run) -> None:
    """The geometry is from the model's header, the dtype is the backend's."""
    data, _ = llama_files.state(Random(3), Shape(), [20], architecture="qwen2")
    Path("x.session").write_bytes(data)
    fields = {"block_count": 2, "embedding_length": 128, "attention__head_count": 4, "attention__head_count_kv": 2}
    Path("m.gguf").write_bytes(llama_files.gguf("qwen2", **fields))
    run("store", "put", "s/", "x.session", "--model", "m.gguf")
    ids = ",".join(map(str, np.frombuffer(data, "<i4", 20, 12)))
    words = ("store", "get", "s/", "--token-ids", ids, "--model", "m.gguf", "--backend", "x86-avx2", "-o", "p/")
    assert "the layout holds fp32: --cast (cast=True) converts them" in run(*words, "--name", "sys", code=2).err
    assert "2 kv heads x 32 dims, fp32" in run(*words, "--name", "sys", "--cast").out
    assert "within 0" in run("diff", "p/", "x.session", "--model", "m.gguf", "--atol", "0").out
    assert "--cast is about the prefix cache" in run(*words[:7], "-o", "a.npz", "--cast", code=2).err
    run("store", "put", "t/", "p/", "--token-ids", ids)  # the prefix knows its model
    Path("m2.gguf").write_bytes(llama_files.gguf("qwen2", **(fields | {"attention__head_count_kv": 4})))
    words = ("store", "put", "u/", "p/", "--token-ids", ids, "--model", "m2.gguf")
    assert "kv heads" in run(*words, code=2).err


def test_pack_and_later_verbs_carry_loss_of_q8_0(here: Path, run) -> None:
    loss = "rounded by a cast: quantised to q8_0"
    packed = run("mnn", "pack", "q.session", "--kv-heads", 2, "--backend", "x86-avx2", "--name", "s", "-o", "s/").out
    assert "LOSSY (dequantised from q8_0" in packed
    assert json.loads(Path("s/s.kvmnn.json").read_text())["loss"] == loss
    for verb in (
        ("mnn", "repack", "s", "--target-backend", "arm64-fp32", "-o", "r"),
        ("mnn", "unpack", "r", "-o", "a.npz"),
        ("encode", "a.npz", "-o", "f/"),
        ("decode", "f", "-o", "back/"),
    ):
        printed = run(*verb).out
        assert "LOSSLESS copy of LOSSY K and V" in printed and f"LOSSY: {loss}" in printed
