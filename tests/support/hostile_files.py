"""Small valid files of every kind that kvmnn reads, to be damaged, and the commands that read them.

All are made here: arrays from seeded generators, containers by numpy, onnx and tokenizers, frames, manifests and packed
caches by kvmnn itself. `tests/attacks` cuts and flips them byte by byte; `tools/fuzz/files.py` damages larger ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import compressor_files
import gate_logs
import hostile_engines
import hostile_ropes
import hybrid_prefix
import numpy as np
import packed_samples
from reader_sample import Sample as Sample
from reader_sample import contents, made
from reader_sample import quietly as quietly

from kvmnn import encode


def array_inputs(half: np.ndarray, single: np.ndarray, frame_bytes: int) -> dict[str, dict[str, bytes]]:
    """Arrays in every container, and their frames: name of the input (a folder ends in /), file names, contents.

    half: float16 ``[token, kv_head, head_dim]``; single: float32.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "half.npy", half)
        np.save(folder / "fortran.npy", np.asfortranarray(single))
        np.save(folder / "big.npy", half.astype(">f2"))
        np.savez(folder / "stored.npz", a=half, b=single)
        np.savez_compressed(folder / "deflated.npz", a=half, b=single)
        (folder / "raw.bin").write_bytes(half.tobytes())
        write_dump(folder / "dump", half)
        cut = ["--chunk-bytes", str(frame_bytes)]
        made(["encode", folder / "stored.npz", "-o", f"{folder}/bundle/", *cut])
        made(["encode", folder / "half.npy", "-o", folder / "lone.frame", *cut])
        made(["decode", folder / "bundle", "-o", folder / "tensors.safetensors"])
        inputs: dict[str, dict[str, bytes]] = {}
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                inputs[path.name + "/"] = contents(path)
            elif path.suffix != ".json":
                beside = folder / (path.name + ".json")
                inputs[path.name] = {p.name: p.read_bytes() for p in (path, beside) if p.exists()}
    assert len(inputs) == 10, sorted(inputs)
    return inputs


def write_dump(folder: Path, half: np.ndarray) -> None:
    """K and V of one layer as MNN's engine dumps them: equal here."""
    folder.mkdir()
    tokens, heads, dims = half.shape
    for part in "kv":
        (folder / f"{part}_t0_{tokens}.bin").write_bytes(half.tobytes())
    document = {"layer_id": 0, "stage": "prefill", "token_begin": 0, "token_end": tokens, "seq_len": tokens}
    document |= {"kv_heads": heads, "head_dim": dims, "bytes_per_elem": 2, "dtype": "fp16"}
    document |= {"k_file": f"k_t0_{tokens}.bin", "v_file": f"v_t0_{tokens}.bin"}
    (folder / f"meta_t0_{tokens}.json").write_text(json.dumps(document))


# -- one sample for each reader ---------------------------------------------------------------------------------------


PREFIX = "--kv-heads 1 --head-dim 4 --backend x86-sse"


@cache
def samples() -> dict[str, Sample]:
    """A sample for each reader, by its name; those of models only where their packages are installed."""
    rng = np.random.default_rng(1)
    inputs = array_inputs(rng.normal(size=(3, 2, 2)).astype(np.float16), rng.normal(size=(2, 3)).astype(np.float32), 16)
    with tempfile.TemporaryDirectory() as name:
        found = {
            **_arrays(inputs),
            **_dense(Path(name, "dense")),
            **{
                kind: make(Path(name, kind))
                for kind, make in (_MAKERS | hostile_engines.MAKERS | hostile_ropes.MAKERS).items()
            },
        }
    with contextlib.suppress(ModuleNotFoundError):
        found |= _models()
    return found


def _arrays(inputs: dict[str, dict[str, bytes]]) -> dict[str, Sample]:
    def array(name: str, *options: str) -> Sample:
        files, into = inputs[name], "{in}" if name.endswith("/") else f"{{in}}/{name}"
        words = " ".join(options)
        return Sample(files, (f"encode {into} -o {{out}}/ {words}",), tuple(files))

    frame, bundle = inputs["lone.frame"], inputs["bundle/"]
    alone = {"lone.frame": encode(bytes(range(24)), dtype="fp16", codecs=("zstd",))}
    return {
        "npy": array("half.npy"),
        "npy, Fortran order": array("fortran.npy"),
        "npy, big-endian": array("big.npy"),
        "npz": array("stored.npz"),
        "npz, deflated": array("deflated.npz"),
        "safetensors": array("tensors.safetensors"),
        "raw": array("raw.bin", "--dtype fp16"),
        "dump": array("dump/"),
        "folder": Sample(inputs["half.npy"], ("encode {in} -o {out}/",), tuple(inputs["half.npy"])),
        "dump, measured": Sample(inputs["dump/"], ("measure {in} --encode",), ("meta_t0_3.json", "k_t0_3.bin")),
        "frame": Sample(
            alone,
            (
                "inspect {in}/lone.frame",
                "decode {in}/lone.frame -o {out}.npy --max-input-bytes 1M",
                "verify {in}/lone.frame",
            ),
            ("lone.frame",),
        ),
        "manifest of a frame": Sample(
            frame,
            ("inspect {in}/lone.frame", "decode {in}/lone.frame -o {out}.npy --max-input-bytes 1M"),
            ("lone.frame.json",),
        ),
        "manifest of a bundle": Sample(
            bundle,
            ("verify {in}", "inspect {in} --json", "decode {in} -o {out}.npz --max-input-bytes 1M"),
            ("manifest.json",),
        ),
        "scores": Sample(
            inputs["fortran.npy"],
            ("plan {in}/fortran.npy --input-kind scores --valid-tokens 6 --h2o block_tokens=2",),
            ("fortran.npy",),
        ),
    }


def _dense(folder: Path) -> dict[str, Sample]:
    """A dense stream of rows, its manifest, and the configuration that says how K was rotated."""
    folder.mkdir()
    rows = np.random.default_rng(6).standard_normal((2, 2, 16))[:, np.arange(30) % 2]
    keys = (rows + 0.1 * np.random.default_rng(7).standard_normal((2, 30, 16))).astype(np.float16)
    np.save(folder / "k.npy", keys)
    made(["encode", folder / "k.npy", "-o", folder / "k.frame", "--codec", "dense", "--rope", "dims=8"])
    stream, index = (folder / "k.frame").read_bytes(), (folder / "k.frame.json").read_bytes()
    fields = {"rope_theta": 1e4, "head_dim": 8, "rope_scaling": {"type": "linear", "factor": 2.0}}
    reading = ("inspect {in}/k.frame", "decode {in}/k.frame -o {out}.npy --max-input-bytes 1M", "verify {in}/k.frame")
    more = ("encode {in}/k.frame --codec mnn -o {out}.frame", "measure {in}/k.frame --dense")
    settings = {"k.npy": (folder / "k.npy").read_bytes(), "config.json": json.dumps(fields).encode()}
    command = "encode {in}/k.npy --codec dense --model {in} -o {out}.frame"
    return {
        "dense stream": Sample({"k.frame": stream}, (*reading, more[0]), ("k.frame",)),
        "manifest of a dense stream": Sample(
            {"k.frame": stream, "k.frame.json": index}, reading + more, ("k.frame.json",)
        ),
        "configuration of a model": Sample(settings, (command,), ("config.json",)),
    }


def _prefix(folder: Path) -> Sample:
    """A prefix cache of 5 tokens, with a document of kvmnn, a model's settings and token ids next to it."""
    folder.mkdir()
    layers = packed_samples.arrays(1, 1, 5, 4)
    np.savez(folder / "kv.npz", **{"layer_0.key": layers[0], "layer_0.value": layers[1]})
    made(["mnn", "pack", folder / "kv.npz", "-o", folder / "sys", *PREFIX.split(), "--name", "sys"])
    return Sample(
        contents(folder / "sys"),
        ("inspect {in}", "mnn unpack {in} -o {out}.npz", "encode {in} -o {out}/"),
        ("sys.kvmnn.json",),
    )


def _bare_prefix(folder: Path) -> Sample:
    sample = _prefix(folder)
    files = {name: data for name, data in sample.files.items() if not name.endswith(".json")}
    asked = f"{PREFIX} --valid-tokens 5 --ignore markers"
    return Sample(
        files, (f"mnn unpack {{in}} -o {{out}}.npz {asked}", f"encode {{in}} -o {{out}}/ {asked}"), ("sys_0.k",)
    )


def _hybrid_prefix(folder: Path) -> Sample:
    """A prefix of a layer with K and V and one with state of another kind, as kvmnn describes and frames it."""
    folder.mkdir()
    hybrid_prefix.write_hybrid(folder / "p", "LLF", sizes=(24, 40), tokens=5, heads=1, dims=4)
    made(["encode", folder / "p", *PREFIX.split(), "--valid-tokens", 5, "-o", folder / "b/"])
    made(["decode", folder / "b", "-o", folder / "r/"])
    files = {f"b/{name}": data for name, data in contents(folder / "b").items()}
    files |= {f"r/{name}": data for name, data in contents(folder / "r").items()}
    commands = ("decode {in}/b -o {out}/", "encode {in}/r -o {out}/", "mnn unpack {in}/r -o {out}.npz")
    return Sample(files, commands, ("b/manifest.json", "r/sys.kvmnn.json", "r/sys_0.k"))


def _model_settings(folder: Path) -> Sample:
    sample = _bare_prefix(folder)
    layers = {"layer_nums": 1, "key_value_shape": [2, 1, 0, 1, 4], "attention_mask": "float", "hidden_size": 4}
    settings = {"config.json": {"llm_config": "llm_config.json"}, "llm_config.json": layers}
    files = {f"model/{name}": json.dumps(document).encode() for name, document in settings.items()}
    graph = {"model/llm.mnn": b"any bytes: only their hash is taken"}
    command = f"mnn unpack {{in}}/cache -o {{out}}.npz {PREFIX} --valid-tokens 5 --ignore markers --model {{in}}/model"
    cache = {f"cache/{name}": data for name, data in sample.files.items()}
    return Sample({**cache, **files, **graph}, (command,), tuple(files))


def _token_ids(folder: Path) -> Sample:
    sample = _bare_prefix(folder)
    files = {"ids.json": b"[1, 2, 3, 4, 5]", "ids.txt": b"1 2 3 4 5\n", "ids.npy": saved(np.arange(5))}
    cache = {f"cache/{name}": data for name, data in sample.files.items()}
    commands = tuple(
        f"encode {{in}}/cache -o {{out}}/ {PREFIX} --valid-tokens 5 --ignore markers --token-ids {{in}}/{name}"
        for name in files
    )
    return Sample({**cache, **files}, commands, tuple(files))


def _packing(folder: Path) -> Sample:
    """Arrays that are packed, measured, compared with a copy of theirs, and run through the runtime."""
    folder.mkdir()
    layers = packed_samples.arrays(1, 1, 5, 4)
    named = {"layer_0.key": layers[0], "layer_0.value": layers[1]}
    np.savez(folder / "kv.npz", **named)
    (folder / "same").mkdir()
    np.savez(folder / "same/kv.npz", **named)
    (folder / "runtime.json").write_text(json.dumps(_RUNTIME))
    commands = (
        f"mnn pack {{in}}/kv.npz -o {{out}}/ {PREFIX} --name sys",
        "measure {in}/kv.npz",
        "diff {in}/kv.npz {in}/same/kv.npz",
        "mnn replay {in}/kv.npz --engine-config {in}/runtime.json",
    )
    return Sample(contents(folder), commands, ("kv.npz",))


_RUNTIME = {
    "kv_lossless_enable": True, "kv_lossless_runtime_enable": True, "kv_lossless_runtime_mode": "store",
    "kv_lossless_codec": "gear_delta", "kv_lossless_scope": "front_n", "kv_lossless_front_n": 1,
    "kv_lossless_block_tokens": 1, "kv_lossless_hot_sink_tokens": 0, "kv_lossless_hot_recent_tokens": 1,
    "kv_h2o_trigger_min_tokens": 1,
}  # fmt: skip
"""Something of five tokens is stored: a replay that stores nothing fails."""


def _runtime_settings(folder: Path) -> Sample:
    files = _packing(folder).files
    return Sample(files, ("mnn replay {in}/kv.npz --engine-config {in}/runtime.json",), ("runtime.json",))


def _repacking(folder: Path) -> Sample:
    sample = _prefix(folder)
    commands = (
        "mnn repack {in} --target-backend arm64-fp16 -o {out}/",
        "diff {in} {in}",
        "mnn compact {in} --remove 2 -o {out}/",
    )
    return Sample(sample.files, commands, ("sys_0.k", "sys_0.v", "sys.kvmnn.json"))


def _compressing(folder: Path, damaged: str = "kv.npz") -> Sample:
    folder.mkdir()
    weights = compressor_files.weight_file(count=6, head_dim=2, factor=2)
    keys, values = np.random.default_rng(1).normal(size=(2, 1, 1, 6, 2)).astype(np.float32)
    np.savez(folder / "kv.npz", k=keys, v=values)
    return Sample(
        {"w.bin": weights, **contents(folder)},
        ("compressor run {in}/w.bin {in}/kv.npz -o {out}.npz --axes lhtd",),
        (damaged,),
    )


def _live(folder: Path) -> Sample:
    folder.mkdir()
    layers = packed_samples.arrays(1, 1, 5, 4)
    for part, buffer in zip("kv", packed_samples.packed(*layers, 1, 4, 64, 69), strict=True):
        (folder / f"00005560831CAB70.{part}").write_bytes(buffer.tobytes())
    command = "mnn unpack {in} -o {out}.npz --kv-heads 1 --head-dim 4 --valid-tokens 5 --layer-order 00005560831CAB70"
    return Sample(contents(folder), (command,), ("00005560831CAB70.k",))


def _store(folder: Path) -> Sample:
    """A prefix store of one text of 5 tokens."""
    files = _token_ids(folder).files
    words = ["--token-ids", str(folder / "ids.json")]
    (folder / "ids.json").write_bytes(files["ids.json"])
    made(["store", "put", folder / "s", folder / "kv.npz", *words, "--fingerprint", "m", "--block-tokens", "4"])
    found = {f"s/{name}": data for name, data in contents(folder / "s").items()}
    text = "--token-ids {in}/ids.json"
    commands = (
        f"store get {{in}}/s {text} -o {{out}}.npz",
        "store verify {in}/s",
        "store ls {in}/s",
        f"store match {{in}}/s {text}",
        f"store export {{in}}/s {text} -o {{out}}",
        "store stat {in}/s",
        "store gc {in}/s --size-limit 1M",
    )
    return Sample({**found, "ids.json": files["ids.json"]}, commands, tuple(found), is_written_to=True)


def _exported(folder: Path) -> Sample:
    """A text of a prefix store as one file."""
    _store(folder)
    made(["store", "export", folder / "s", "--token-ids", folder / "ids.json", "-o", folder / "text"])
    command = "store import {out} {in}/text"
    return Sample({"text": (folder / "text").read_bytes()}, (command,), ("text",))


def _plan(folder: Path) -> Sample:
    sample = _bare_prefix(folder)
    document = [{"layer": 0, "remove": 5, "pairs": [[0, 2], [4, 1]]}]
    cache = {f"cache/{name}": data for name, data in sample.files.items()}
    command = f"mnn compact {{in}}/cache -o {{out}}/ {PREFIX} --valid-tokens 5 --ignore markers --plan {{in}}/plan.json"
    return Sample({**cache, "plan.json": json.dumps(document).encode()}, (command,), ("plan.json",))


def _weights(_: Path) -> Sample:
    data = compressor_files.weight_file(count=6, head_dim=1, factor=2, metadata=b"{}")
    commands = ("verify {in}/w.bin", "inspect {in}/w.bin", "compressor export {in}/w.bin -o {out}.safetensors")
    return Sample({"w.bin": data}, commands, ("w.bin",))


def _checkpoint(folder: Path) -> Sample:
    folder.mkdir()
    state = compressor_files.weights(1, head_dim=1, factor=2, prefixes=("compress_tk",))
    path = compressor_files.checkpoint(folder / "c.pth", {"model_state_dict": {"compressor": state}})
    command = "compressor convert {in}/c.pth {out}.bin --prefix-order compress_tk --as-reference"
    return Sample({"c.pth": path.read_bytes()}, (command,), ("c.pth",))


def _checkpoint_tensors(folder: Path) -> Sample:
    folder.mkdir()
    state = compressor_files.weights(1, head_dim=1, factor=2, prefixes=("compress_tk",))
    header: dict[str, object] = {}
    data = b""
    for name, array in state.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text + data
    command = "compressor convert {in}/c.safetensors {out}.bin --prefix-order compress_tk --as-reference"
    return Sample({"c.safetensors": file}, (command,), ("c.safetensors",))


def _gate_file(folder: Path, damaged: str) -> Sample:
    """What a run of the engine leaves after: a log, its table, an offline evaluation, limits, what was printed."""
    log = gate_logs.write_logs(folder, gate_logs.row())
    made(["gate", "parse", log, "-o", folder / "m.csv"])
    (folder / "gates.json").write_text('{"lossy_target": 2, "cases": {"a": {"async_threads": 1}}}')
    (folder / "online.json").write_text('{"lossless_ratio": 1.4, "raw_bytes": 14, "compressed_bytes": 10}')
    options = {
        "gates.json": "--gates {in}/gates.json --case a",
        "online.json": "--offline-lossless-online-json {in}/online.json",
        "stdout.log": "--bench-stdout-log {in}/stdout.log",
    }
    command = f"gate check {{in}}/m.csv {options.get(damaged, '--limit runtime_mode=store')}"
    if damaged == "run_0001.log":
        command = "gate parse {in}/run_0001.log -o {out}.csv"
    return Sample(contents(folder), (command,), (damaged,))


def _gate_records(folder: Path) -> Sample:
    """Records of prompts, and the history of a decode speed."""
    for side in ("without", "with"):
        gate_logs.write_demo(folder / side, {"prompt_8_1": gate_logs.record()})
    commands = (
        "gate demo {in}/without {in}/with",
        "gate demo {in}/without/metrics/prompt_8_1.jsonl {in}/with/metrics/prompt_8_1.jsonl",
        "gate parse {in}/with/metrics -o {out}.json",
    )
    return Sample(contents(folder), commands, ("with/metrics/prompt_8_1.jsonl",))


def _gate_round(folder: Path) -> Sample:
    """Cases that were judged; `gate summary` writes next to them, so a copy is judged."""
    log = gate_logs.write_logs(folder.with_name("gate logs"), gate_logs.row())
    made(["gate", "check", log, "-o", folder, "--limit", "runtime_mode=store"])
    names = ("runtime_store/summary.md", "runtime_store/gate.json")
    history = {"generated_at": "2026-01-02T03:04:05", "overall_pass": True, "cases": [{"case": "a", "pass": True}]}
    (folder / "history.jsonl").write_text(json.dumps(history) + "\n")
    commands = ("gate summary {in}", "gate history {in}")
    return Sample(contents(folder), commands, (*names, "history.jsonl"), is_written_to=True)


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


_MAKERS: dict[str, Callable[[Path], Sample]] = {
    "document of a prefix cache": _prefix,
    "prefix": _bare_prefix,
    "prefix with linear attention": _hybrid_prefix,
    "live": _live,
    "arrays, packed and replayed": _packing,
    "prefix, repacked": _repacking,
    "cache, compressed": _compressing,
    "weights, compressing": lambda folder: _compressing(folder, "w.bin"),
    "settings of a runtime": _runtime_settings,
    "settings of an MNN model": _model_settings,
    "token ids": _token_ids,
    "plan": _plan,
    "store": _store,
    "text of a store": _exported,
    "weights": _weights,
    "checkpoint": _checkpoint,
    "tables of a benchmark": lambda folder: _gate_file(folder, "m.csv"),
    "tables of a benchmark, logs": lambda folder: _gate_file(folder, "run_0001.log"),
    "tables of a benchmark, limits": lambda folder: _gate_file(folder, "gates.json"),
    "tables of a benchmark, offline": lambda folder: _gate_file(folder, "online.json"),
    "tables of a benchmark, printed": lambda folder: _gate_file(folder, "stdout.log"),
    "records of a benchmark": _gate_records,
    "round of gates": _gate_round,
    "checkpoint, safetensors": _checkpoint_tensors,
}


def _models() -> dict[str, Sample]:
    """A decoder of one layer with its tokenizer and settings."""
    from tiny_decoders import Tiny
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    settings = {
        "tokenizer_config.json": {"add_bos_token": True, "bos_token": {"content": "a"}},
        "special_tokens_map.json": {"bos_token": "a"},
        "config.json": {"num_key_value_heads": 2, "vocab_size": 8, "bos_token_id": 0},
        "generation_config.json": {"bos_token_id": 0},
        "genai_config.json": {"model": {"decoder": {"filename": "model.onnx"}}},
    }
    files = {name: json.dumps(document).encode() for name, document in settings.items()}
    graph = {"model.onnx": Tiny(layers=1, head_dim=2, vocab=8).model().SerializeToString()}
    words = {"tokenizer.json": tokenizer.to_str().encode(), "text.txt": b"a b a"}
    all_files = {**files, **graph, **words}
    commands = ("dump-kv {in} --text {in}/text.txt --max-tokens 3 -o {out}",)
    return {
        "settings of a model": Sample(all_files, commands, tuple(files)),
        "tokenizer": Sample(all_files, commands, ("tokenizer.json",)),
        "text": Sample(all_files, commands, ("text.txt",)),
        "ONNX": Sample(all_files, commands, ("model.onnx",)),
    }
