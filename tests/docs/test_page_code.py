"""The Python blocks of README and all pages run on small data, a page's in one namespace, and commands of the tour."""

from __future__ import annotations

import ast
import doctest
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from textwrap import dedent
from typing import Any

import compressor_files
import gate_logs
import llama_files
import numpy as np
import offline_model
import pytest
import report_files
import transform_samples
from compressor_model import weight_file
from conformance import unpack
from mlx_files import safetensors
from repository import DOCS, FIXTURES, ROOT

import kvmnn
from kvmnn.compressor import kvcm

PAGES = {page.name: page for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: A block that no test runs has one of these, which also tells readers what it needs.
NEEDS = ("SLURMCluster", "redis://host")
#: Blocks that other tests run: of docs/format.md with the dump next to each, the script of MNN, and a whole program.
ELSEWHERE = {"format.md": "values = np.array", "prefix-store.md": "MNN.llm", "many.md": "CommandWork.from_words"}
#: Settings of the engine with which a cache of 300 tokens stores something.
ENGINE = {f"kv_lossless_{key}": True for key in ("enable", "runtime_enable")} | {
    "kv_lossless_codec": "gear_delta",
    "kv_lossless_runtime_mode": "store",
    "kv_lossless_front_n": 2,
    "kv_lossless_block_tokens": 32,
    "kv_lossless_hot_recent_tokens": 16,
    "kv_h2o_trigger_min_tokens": 64,
}
#: What a page needs besides numpy.
PACKAGES = {"README.md": "onnxruntime", "lm.md": "onnxruntime", "profile.md": "onnxruntime", "zarr.md": "xarray"} | {
    "compressor-forward.md": "onnxruntime",
    "report.md": "matplotlib",
    "operations.md": "cryptography",
    "other-engines.md": "torch",
}


def list_blocks(name: str) -> list[str]:
    text = PAGES[name].read_text(encoding="utf-8")
    if name == "README.md":
        indented = text.split("## Ten lines of Python\n\n")[1].split("\n## ")[0]
        block = "".join(f"{line[4:]}\n" for line in indented.splitlines())
        return [block.replace('pull_model("smollm2-135m").output', '"model/"')]  # which would be read from PyPI
    return BLOCK.findall(text)


def is_runnable(name: str, block: str) -> bool:
    elsewhere = ELSEWHERE.get(name)
    return not any(word in block for word in NEEDS) and not (elsewhere and elsewhere in block)


RUN = {name: [block for block in list_blocks(name) if is_runnable(name, block)] for name in PAGES}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages name: texts, caches and their ids, a cache of llama.cpp, dumps, weights of a compressor, logs."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "texts").mkdir()
    source = (FIXTURES / "lm" / "texts" / "trace.py.txt").read_text(encoding="utf-8")
    for name, begin in (("a.txt", 0), ("book.txt", 1000), ("texts/one.txt", 3000), ("texts/two.txt", 6000)):
        (folder / name).write_text(source[begin:][: 3000 if name.startswith("texts") else 600], encoding="utf-8")
    for name in ("story.txt", "prompt.txt"):
        shutil.copyfile(folder / "a.txt", folder / name)
    rng = np.random.default_rng(5)
    arrays = {f"layer_{n}.{part}": rows.cumsum(1).astype(np.float16) for n in range(6) for part in ("key", "value")
              for rows in [rng.standard_normal((4, 300, 64))]}  # fmt: skip
    tensors = {name: ("F16", [*array.shape], array.tobytes()) for name, array in arrays.items()}
    (folder / "cache.safetensors").write_bytes(safetensors(Random(1), tensors, {}))
    np.save(folder / "k.npy", arrays["layer_0.key"])
    np.save(folder / "v.npy", arrays["layer_0.value"])
    (folder / "ids.json").write_text(json.dumps([*range(300)]))
    (folder / "prompt.json").write_text(json.dumps([*range(200), 7, 8]))
    shape = llama_files.Shape(layers=4, heads=8, dims=4, value_dims=4)
    (folder / "chat.session").write_bytes(llama_files.state(Random(1), shape, [80])[0])
    fields = {"attention__head_count_kv": 8, "attention__key_length": 4, "block_count": 4, "rope__dimension_count": 4}
    (folder / "llama-3.2-1b.gguf").write_bytes(llama_files.gguf(**fields))
    config = {"rope_theta": 1e4, "hidden_size": 256, "num_attention_heads": 4, **ENGINE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "raw.bin").write_bytes(arrays["layer_0.key"].tobytes())
    weights = compressor_files.weights(layers=6, head_dim=64, factor=5)
    compressor_files.checkpoint(folder / "compressor.pth", weights)
    for number in range(2):
        words = [offline_model.words(seed, 32, 2, 16) for seed in (number, 9)]
        offline_model.write_dump(folder / "dumps", number, 0, *words)
    gate_logs.write_logs(folder / "out" / "logs", gate_logs.row())
    return folder


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with copies of the files."""
    folder = tmp_path / "here"
    shutil.copytree(files, folder)
    (folder / "model").symlink_to(FIXTURES / "lm")
    (folder / "fixtures").symlink_to(FIXTURES)
    monkeypatch.chdir(folder)
    return folder


def prepare(name: str, run: Callable[..., Any]) -> dict[str, Any]:
    """Write what only this page needs, and return the names that its blocks use and do not define."""
    if name == "report.md":
        report_files.write_everything(Path("round"))
    if name == "zarr.md":
        run("encode", "chat.session", "--kv-heads", 8, "-o", "cache.zarr")
    if name == "profile.md":
        run("dump-kv", "model/", "--text", "a.txt", "--max-tokens", 200, "-o", "cache/")
    if name in ("prefix-store.md", "runtime.md"):
        geometry = transform_samples.create_geometries(4, 2, 8, 8, kvmnn.RopeConfig(10000.0, 8))
        transform_samples.create_profile(geometry).write("model.kvmp")
    if name == "operations.md":
        for number, key in enumerate(("key", "new-key")):
            Path(key).write_bytes(bytes([number]) * 32)
            Path(key).chmod(0o600)
        run("store", "put", "old", "cache.safetensors", "--token-ids", "ids.json", "--fingerprint", "f",
            "--key-file", "key")  # fmt: skip
    random = np.random.default_rng(0)
    if name == "h2o.md":
        keys = random.standard_normal((2, 1, 8), np.float32)
        return {"keys": keys, "values": keys, "attention": np.full((32, 1, 37), 1 / 37, np.float32)}
    if name == "compressor-forward.md":
        rows = random.standard_normal((2, 1, 3, 621, 4), np.float32)
        made = weight_file(random, layers=2, factor=5, dtype="fp16")
        with open("compressor.bin", "wb") as file:
            kvcm.write_weight_file(file, made.header, ((block.weight, block.bias) for block in made.iter_blocks()))
        return {"keys": rows, "values": rows}
    return {}


#: Pages whose blocks run a model.
SLOW = ("README.md", "lm.md", "profile.md")


@pytest.mark.usefixtures("without_workers")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the sample of llama.cpp has NaN
@pytest.mark.filterwarnings("ignore::kvmnn.evaluation.RefusalWarning")  # the small model returns no queries
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name, blocks in RUN.items() if blocks],
)
def test_page_python_blocks_run(name: str, here: Path, run: Callable[..., Any]) -> None:
    if package := PACKAGES.get(name):
        pytest.importorskip(package)
    names = prepare(name, run)
    for number, block in enumerate(RUN[name]):
        if block.startswith(">>> "):
            test = doctest.DocTestParser().get_doctest(block, names, f"{name}, block {number}", None, None)
            result = doctest.DocTestRunner().run(test, clear_globs=False)
            assert result.failed == 0 and result.attempted
            names = test.globs
        else:
            exec(compile(block, f"{name}, block {number}", "exec"), names)


def test_pages_have_python_in_fences_only() -> None:
    """An indented block with an import or a call would not be run (README's is, see `list_blocks`)."""
    for name, page in PAGES.items():
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for block in re.findall(r"(?:^    .*\n)+", "" if name == "README.md" else text, re.MULTILINE):
            try:
                tree = ast.parse(dedent(block))
            except SyntaxError:
                continue
            kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.Call, ast.With)
            assert not any(isinstance(node, kinds) for node in ast.walk(tree)), f"{name}: {block}"


def test_blocks_that_other_tests_run_exist() -> None:
    assert all(any(word in block for block in list_blocks(name)) for name, word in ELSEWHERE.items())
    assert sum(map(len, RUN.values())) > 30


#: Lines that need PyPI, or a model for long: README has a shorter evaluation, tests/gates runs searches.
NOT_RUN = ("model pull", "gate search", "--policy h2o_decayed --budget 256 512")


def list_commands(name: str) -> list[str]:
    lines = re.findall(r"^    (?:\$ )?((?:kvmnn|cat) .*)$", PAGES[name].read_text(encoding="utf-8"), re.MULTILINE)
    return [line for line in lines if not any(words in line for words in NOT_RUN)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "tour.md"])
def test_page_commands_run(name: str, here: Path, run: Callable[..., Any]) -> None:
    """All other lines, in their order."""
    pytest.importorskip("onnxruntime")
    if name == "README.md":
        Path("texts/two.txt").unlink()  # a profile of half the text takes half the time
    else:
        unpack(FIXTURES / "mnn_engine" / "prefix.tar.xz", Path("prefix"))
    commands = list_commands(name)
    assert len(commands) > 3
    for command in commands:
        if "|" in command:
            script = command.replace("kvmnn", f"{shlex.quote(sys.executable)} -m kvmnn")
            subprocess.run(["sh", "-ec", script], check=True, timeout=120)
        else:
            words = shlex.split(command.replace("smollm2-135m ", "model/ "), comments=True)[1:]
            printed = run(*words, code=int(words[0] == "diff"))  # caches of two models differ
            assert words[0] != "diff" or "layer 0, K" in printed.out, printed.err
