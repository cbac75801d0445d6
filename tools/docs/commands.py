"""Run the `$ kvmnn ...` lines of a page of docs and compare what they print, or write it in: `--write PAGE`.

Commands stand in ```console blocks and share one fresh directory, in which `cache/` is a prefix cache that MNN 3.6.1
wrote and `model/` the model it belongs to (fixtures/mnn_engine), `ids.json` its 50 token ids, `ids20.json` 20 of them,
and `prompt.json` 40 and three others; and caches of other engines: `chat.session` with `model.gguf`,
`prompt.safetensors`, `cache.pt`, `vllm/`. Rates and versions vary and are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvmnn.cli.entry_point import main as kvmnn

sys.path.append(str(Path(__file__).parents[1]))
from conformance import unpack

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ENGINE_FILES = {
    "llama": {"a/f16_fa.session.bin": "chat.session", "a/model.gguf": "model.gguf"},
    "mlx": {"fp16.safetensors": "prompt.safetensors"},
    "hf": {"bf16.cache.pt": "cache.pt"},
}
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_VARYING = re.compile(r"\b\d+ MB/s|(?:kvmnn|zstd) \d+\.\d+\.\d+")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for page in options.pages:
        text = page.read_text(encoding="utf-8")
        told = retold(text)
        if options.write:
            page.write_text(told, encoding="utf-8")
        elif comparable(told) != comparable(text):
            raise SystemExit(f"{page}: its commands print something else by now (--write corrects it)")


def retold(text: str) -> str:
    """The page with what its commands print now."""
    with fresh_directory():
        return _BLOCK.sub(lambda block: f"```console\n{_run(block[1])}```", text)


def comparable(text: str) -> str:
    """The page without what varies from run to run and from machine to machine."""
    return _VARYING.sub("", text)


@contextlib.contextmanager
def fresh_directory() -> Iterator[None]:
    """A new working directory with the cache and its model."""
    with tempfile.TemporaryDirectory() as folder:
        for archive, name in (("prefix", "cache"), ("model", "model")):
            unpack(FIXTURES / "mnn_engine" / f"{archive}.tar.xz", Path(folder, name))
        ids = np.random.RandomState(77).randint(0, 250, 50).tolist()
        Path(folder, "ids.json").write_text(json.dumps(ids))
        Path(folder, "ids20.json").write_text(json.dumps(ids[:20]))
        Path(folder, "prompt.json").write_text(json.dumps([*ids[:40], 249, 248, 247]))
        write_engine_files(Path(folder))
        before = os.getcwd()
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def write_engine_files(folder: Path) -> None:
    """Write caches of llama.cpp, MLX and transformers, and a folder like those of vLLM's ExampleConnector."""
    for engine, names in ENGINE_FILES.items():
        with tempfile.TemporaryDirectory() as scratch:
            unpack(FIXTURES / engine / "vectors.tar.xz", Path(scratch))
            for source, target in names.items():
                shutil.copyfile(Path(scratch, source), folder / target)
    (folder / "vllm").mkdir()
    keys, values = (np.load(FIXTURES / "kv_real" / f"{part}_fp16.npy", mmap_mode="r") for part in "kv")
    for layer in range(2):
        both = np.stack([keys[layer, :64, :2], values[layer, :64, :2]]).reshape(2, 64, 128)
        described = {"dtype": "F16", "shape": both.shape, "data_offsets": [0, both.nbytes]}
        header = json.dumps({"kv_cache": described}).encode()
        file = folder / "vllm" / f"model.layers.{layer}.self_attn.attn.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + both.tobytes())


def _run(block: str) -> str:
    """The commands of a block, each with what it prints; `\\` at the end of a line continues it."""
    said = ""
    for command in re.findall(r"^\$ (.*(?:\\\n.*)*)$", block, re.MULTILINE):
        name, *argv = shlex.split(command)
        if name != "kvmnn":
            raise ValueError(f"{name!r} is not a command of the docs")
        printed = io.StringIO()
        # A page may leave out what a command prints as a shell does; errors would still appear.
        to_nowhere = argv[-1:] == [">/dev/null"]
        if to_nowhere:
            argv.pop()
        output = io.StringIO() if to_nowhere else printed
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(printed):
            code = kvmnn(argv)
        said += f"$ {command}\n{printed.getvalue()}" + (f"(exit code {code})\n" if code else "")
    return said


if __name__ == "__main__":
    main()
