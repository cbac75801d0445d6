"""Foreign names and texts are escaped in every verb, so that none reaches a terminal as a command."""

from __future__ import annotations

import ast
import json
import sqlite3
import unicodedata
from pathlib import Path

import compressor_files
import numpy as np
import pytest
from hostile_files import samples
from repository import ROOT

import kvmnn
from kvmnn._util.packages import import_optional
from kvmnn.cli import main

NAME = "x\nINJECTED\x1b[31m\r\x9b2J\u202e\x7f\u2028"
"""A line of its own, colours, a return to the line's start, C1, the direction of writing, DEL, a separator."""

OUTLETS = {"cli/streams.py", "evaluation/worker_main.py"}
"""Modules that write to the standard streams; everything else goes through the first."""

MENTIONS = {"cli/entry_point.py", "cli/console.py"}
"""Modules that name the streams and write nothing to them: the last flush, and the terminal of the progress bar."""


# -- no print goes round the outlet ------------------------------------------------------------------------------------


def written(text: str) -> list[str]:
    """What a module writes to the standard streams by itself."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "input"):
            found.append(f"{node.lineno}: {node.func.id}")
        if isinstance(node, ast.Attribute) and node.attr.strip("_") in ("stdout", "stderr"):
            name = ast.unparse(node)
            found += [f"{node.lineno}: {name}"] if name.replace("_", "") in ("sys.stdout", "sys.stderr") else []
        if isinstance(node, ast.ImportFrom) and node.module == "sys":
            found.append(f"{node.lineno}: from sys import")
    return found


@pytest.mark.usefixtures("without_collector")
def test_output_goes_through_streams_only() -> None:
    package = ROOT / "kvmnn"
    round_it = {str(path.relative_to(package)): written(path.read_text()) for path in package.rglob("*.py")}
    assert {name: lines for name, lines in round_it.items() if lines and name not in OUTLETS | MENTIONS} == {}


@pytest.mark.parametrize("line", ["print('x')", "import sys; sys.stderr.write('x')", "from sys import stdout"])
def test_output_planted_print_is_found(line) -> None:
    assert written(line)


# -- a walk over all verbs ---------------------------------------------------------------------------------------------


def said(capfd: pytest.CaptureFixture[str], argv: list[str]) -> tuple[int, str]:
    """Exit code and everything that a verb says, native code included, after the checks that hold for all of it."""
    capfd.readouterr()
    code = main(argv)
    streams = capfd.readouterr()
    for text in streams:
        wrong = {c for c in text if not c.isprintable() and c != "\n" and unicodedata.category(c) != "Zs"}
        assert not wrong, (argv, wrong)
        lines = text.splitlines()
        assert not [line for line in lines if line.strip(" |-").startswith("INJECTED")], (argv, text)
    assert code in (0, 1, 2), streams.err
    return code, streams.out + streams.err


@pytest.mark.parametrize("kind", sorted(samples()))
def test_hostile_file_names_are_escaped(kind, tmp_path, capfd) -> None:
    """Every reader, its files in a folder with a hostile name; valid and invalid files."""
    sample = samples()[kind]
    folder = tmp_path / NAME / "in"
    for name, data in sample.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    for good in (True, False):
        for number, command in enumerate(sample.commands):
            out = tmp_path / f"{NAME}{good}{number}"
            argv = [word.replace("{in}", str(folder)).replace("{out}", str(out)) for word in command.split()]
            code, _ = said(capfd, argv)
            assert code == 0 or not good
            said(capfd, argv)  # the output exists
        for name in sample.damaged:
            (folder / name).write_bytes(sample.files[name][: len(sample.files[name]) // 2])


WORDS = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float16)


def in_npz(folder: Path, name: str) -> Path:
    np.savez(folder / "a.npz", **{name: WORDS, f"{name}2": WORDS.astype(np.float64)})
    return folder / "a.npz"


def in_safetensors(folder: Path, name: str) -> Path:
    entry = {"dtype": "F16", "shape": [2, 6, 8], "data_offsets": [0, WORDS.nbytes]}
    head = json.dumps({name: entry, "__metadata__": {name: name}}).encode()
    (folder / "a.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + WORDS.tobytes())
    return folder / "a.safetensors"


def in_manifest(folder: Path, name: str) -> Path:
    np.save(folder / "k.npy", WORDS)
    assert main(["encode", "-q", str(folder / "k.npy"), "-o", str(folder / "k.frame")]) == 0
    beside = folder / "k.frame.json"
    document = json.loads(beside.read_text())
    document["arrays"][0]["name"] = name
    beside.write_text(json.dumps(document))
    return folder / "k.frame"


@pytest.mark.parametrize("made", [in_npz, in_safetensors, in_manifest])
def test_hostile_array_names_are_escaped(made, tmp_path, capfd) -> None:
    path, out = str(made(tmp_path, NAME)), str(tmp_path / "out")
    for argv in (
        ["inspect", "-v", path],
        ["encode", "-v", path, "-o", f"{out}1/", "--ignore", "unsupported"],
        ["encode", path, "-o", f"{out}2/"],
        ["encode", path, "--tensor", "no", "-o", f"{out}3/"],
        ["encode", path, "--tensor", f"no{NAME}", "-o", f"{out}3/"],
        ["decode", path, "-o", f"{out}4/"],
        ["decode", path, "-o", f"{out}5.npz"],
        ["verify", path],
        ["verify", path, "--against", path],
        ["verify", f"{out}1", "--against", path],
        ["diff", path, path],
        ["diff", path, f"{out}1"],
        ["bench", path, "--repeats", "1"],
        ["measure", path],
        ["mnn", "pack", path, "-o", f"{out}6/", "--backend", "x86-avx2"],
        ["mnn", "unpack", path, "-o", f"{out}7/"],
        ["plan", path],
        ["compressor", "run", path, path, "-o", f"{out}8.npz"],
        ["mnn", "replay", path, "--engine-config", path],
        ["compressor", "convert", path, f"{out}9.bin"],
        ["compressor", "export", path, "-o", f"{out}10.npz"],
    ):
        said(capfd, argv)
        said(capfd, [*argv, "--json"])


def test_hostile_store_texts_are_escaped(tmp_path, capfd) -> None:
    """Model names in a store come from whoever wrote it."""
    store, ids, kv = f"{tmp_path}/{NAME}", ["--token-ids", f"{tmp_path}/ids.json"], f"{tmp_path}/kv.npz"
    np.savez(kv, **{f"layer_0.{part}": WORDS for part in ("key", "value")})
    (tmp_path / "ids.json").write_text("[1, 2, 3, 4, 5, 6]")
    put = ["store", "put", store, kv, *ids, "--fingerprint"]
    assert said(capfd, [*put, NAME])[0] == 1  # not printable
    assert said(capfd, [*put, "m"])[0] == 0
    assert said(capfd, ["store", "export", store, *ids, "-o", f"{tmp_path}/text"])[0] == 0
    for argv in (
        [*put, f"{NAME}2"],
        [*put, f"{NAME}2", "--force"],
        ["store", "ls", store],
        ["store", "stat", store],
        ["store", "match", store, *ids],
        ["store", "match", store, *ids, "--fingerprint", f"no{NAME}"],
        ["store", "get", store, *ids, "-o", f"{store}.npz"],
        ["store", "pin", store, *ids],
        ["store", "import", f"{store}2", f"{tmp_path}/text"],
        ["store", "ls", f"{store}2"],
        ["store", "get", f"{store}2", *ids, "-o", f"{tmp_path}/{NAME}/", "--backend", "x86-avx2", "--name", NAME],
        ["store", "import", f"{store}3", kv],
        ["store", "ls", kv],
        ["store", "ls", f"redis://{NAME}:x/0"],
        ["store", NAME, store],
    ):
        said(capfd, argv)
        said(capfd, [*argv, "--json"])
    for unit in Path(store).glob("units/*/*"):
        unit.write_bytes(unit.read_bytes()[:-1])
    assert said(capfd, ["store", "verify", store])[0] == 1
    for document in ({"model": NAME, "dtype": "fp16", "layers": [[0, 2, 8]]}, {NAME: NAME}, NAME):
        (index,) = Path(f"{store}2").glob("index*.sqlite")  # one that is made again has another name
        with sqlite3.connect(index) as connection:
            connection.execute("UPDATE space SET document = ?", (json.dumps(document),))
        connection.close()
        for action in (["ls"], ["stat"], ["match", *ids], ["get", *ids, "-o", f"{store}.npz", "-f"], ["verify"]):
            said(capfd, ["store", action[0], f"{store}2", *action[1:]])
    data = (tmp_path / "text").read_bytes()
    size = int.from_bytes(data[8:12], "little")
    document = data[12 : 12 + size].replace(b'"m', json.dumps(NAME).encode().replace(b"\\", b"\\\\")[:-1])
    (tmp_path / "text").write_bytes(data[:8] + len(document).to_bytes(4, "little") + document + data[12 + size :])
    assert said(capfd, ["store", "import", f"{store}4", f"{tmp_path}/text"])[0] == 1


@pytest.mark.parametrize("verb", ["encode", "eval", "generate", "mnn pack", "mnn compact"])
def test_hostile_command_line_words_are_escaped(verb, capfd) -> None:
    words = verb.split()
    for argv in ([*words, f"--{NAME}"], [*words, NAME, f"--dtype={NAME}"], [NAME], [*words, NAME, "-o", NAME]):
        said(capfd, argv)


@pytest.mark.parametrize("document", [{NAME: 1}, [NAME], {"schema": NAME}, {"arrays": [{NAME: NAME}]}, NAME])
def test_hostile_json_texts_are_escaped(document, tmp_path, capfd) -> None:
    (tmp_path / "k.frame").write_bytes(kvmnn.encode(WORDS))
    (tmp_path / "k.frame.json").write_text(json.dumps(document))
    np.save(tmp_path / "k.npy", WORDS)
    (tmp_path / "t.json").write_text(json.dumps(document))
    for argv in (
        ["decode", f"{tmp_path}/k.frame", "-o", f"{tmp_path}/o.npy"],
        ["inspect", f"{tmp_path}/t.json"],
        ["mnn", "replay", f"{tmp_path}/k.npy", "--engine-config", f"{tmp_path}/t.json"],
        ["mnn", "pack", f"{tmp_path}/k.npy", "-o", f"{tmp_path}/p/", "--token-ids", f"{tmp_path}/t.json"],
        ["mnn", "compact", f"{tmp_path}/k.npy", "-o", f"{tmp_path}/p/", "--plan", f"{tmp_path}/t.json"],
        ["plan", f"{tmp_path}/t.json"],
    ):
        said(capfd, argv)


def test_hostile_checkpoint_names_are_escaped(tmp_path, capfd) -> None:
    more = {NAME: np.zeros((2, 2), np.float32), f"compress_tk.0.{NAME}": np.zeros(2, np.float32)}
    path = compressor_files.checkpoint(tmp_path / "c.pth", compressor_files.weights(1) | more)
    only = compressor_files.checkpoint(tmp_path / "o.pth", more)
    told = [f"--metadata={NAME}={NAME}", f"--prefix-order={NAME},{NAME}2"]
    for argv in (
        ["inspect", "-v", str(path)],
        ["compressor", "convert", str(path), f"{tmp_path}/w.bin"],
        ["compressor", "convert", str(path), f"{tmp_path}/m.bin", told[0]],
        ["inspect", f"{tmp_path}/m.bin"],
        ["verify", f"{tmp_path}/m.bin", "--against", str(path)],
        ["verify", f"{tmp_path}/w.bin", "--against", str(only)],
        ["inspect", str(only)],
        ["compressor", "convert", str(only)],
        ["compressor", "convert", str(path), f"{tmp_path}/p.bin", told[1]],
        ["compressor", "export", f"{tmp_path}/w.bin", "-o", f"{tmp_path}/e.npz", told[1]],
    ):
        said(capfd, argv)


@pytest.mark.parametrize("name", ["llm_config.json", "config.json"])
def test_hostile_model_settings_are_escaped(tmp_path, capfd, name) -> None:
    np.savez(tmp_path / "kv.npz", **{"layer_0.key": WORDS, "layer_0.value": WORDS})
    for document in (
        {"hidden_size": NAME},
        {"head_dim": [NAME]},
        {NAME: NAME},
        [NAME],
        {"layer_nums": 1, "dtype": NAME},
    ):
        (tmp_path / name).write_text(json.dumps(document))
        said(capfd, ["mnn", "pack", f"{tmp_path}/kv.npz", "-o", f"{tmp_path}/p/", "--model", str(tmp_path)])


def test_hostile_tokenizer_words_are_escaped(tmp_path, capfd) -> None:
    """Generated text is printed in separate lines and never controls the terminal."""
    tokenizers = pytest.importorskip("tokenizers")
    from tiny_decoders import Tiny

    Tiny().save(tmp_path / "model.onnx")
    words = {f"w{n}\x1b[31m\r\u202e\x9b": n for n in range(48)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=next(iter(words))))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for columns in ("--json", "-q"):
        argv = ["generate", str(tmp_path), "--prompt", "a\x1b[2Jb", "--max-new-tokens", "4", columns]
        code, _ = said(capfd, [*argv, "--policy", "streaming", "--budget", "6"])
        assert code == 0


def test_hostile_onnx_names_are_not_printed(tmp_path, capfd) -> None:
    """Native code writes onnxruntime's lines to standard error, with unescaped names."""
    onnx = pytest.importorskip("onnx")
    onnxruntime = import_optional("onnxruntime")
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    unused = onnx.numpy_helper.from_array(np.zeros(3, np.float32), NAME)
    node = onnx.helper.make_node("Identity", ["x"], ["y"], name=NAME)
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([node], NAME, [value], [out], [unused])
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])
    capfd.readouterr()
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert capfd.readouterr() == ("", "")
    onnx.save(model, tmp_path / "model.onnx")
    for verb in ("generate --prompt a", "dump-kv --text a -o b", "eval --text a --policy full"):
        code, text = said(capfd, [*verb.split(), str(tmp_path)])
        assert code in (1, 2), text
