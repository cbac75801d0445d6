"""Make model.safetensors again from an ONNX file that export_onnx.py wrote: the weights are stored only once.

`python tools/lm/unexport.py DIR OUT`: DIR holds model.onnx, config.json and the tokenizer; OUT becomes a folder that
transformers loads and that export_onnx.py takes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
from export_onnx import read_config
from google.protobuf.message import DecodeError
from gpt_neox import NeoxConfig
from graph_writer import HALF_SUFFIX
from onnx import numpy_helper
from weights import Weights, write_weights

from kvmnn.errors import KvmnnError, SourceError

BESIDE = ("config.json", "tokenizer.json", "tokenizer_config.json")
TRANSPOSED = ".T"
STORED_NAMES = {"embed_in.weight": "gpt_neox.embed_in.weight"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="DIR", help="folder with model.onnx and config.json")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("-f", "--force", action="store_true", help="replace a model.safetensors that exists")
    options = parser.parse_args(arguments)
    try:
        tensors = unexport(options.model, options.output, force=options.force)
    except KvmnnError as exc:
        print(f"unexport.py: error: {exc}", file=sys.stderr)
        return 1
    print(f"{options.output / 'model.safetensors'}: {len(tensors)} tensors")
    return 0


def unexport(model: Path, output: Path, *, force: bool = False) -> Weights:
    """Write the checkpoint folder of an exported model and return its weights.

    Raises
    ------
    KvmnnError
        For ONNX files that another exporter wrote or that are damaged, and for output that cannot be written.
    """
    config = read_config(model / "config.json")
    tensors = weights_of(model / "model.onnx", NeoxConfig.of(config))
    output.mkdir(parents=True, exist_ok=True)
    write_weights(output / "model.safetensors", tensors, force=force)
    for name in BESIDE:
        if (model / name).exists():
            shutil.copyfile(model / name, output / name)
    return tensors


def weights_of(path: Path, config: NeoxConfig) -> Weights:
    """The weights of an exported model by the names of transformers, float16 or float32 as they are stored.

    Raises
    ------
    SourceError
        Where the file is no ONNX model of export_onnx.py or does not have the weights that `config` promises.
    """
    found: Weights = {}
    for initializer in _load(path).graph.initializer:
        name = initializer.name.removesuffix(HALF_SUFFIX)
        if name.startswith("c_") or name == "rope.inv_freq":
            continue
        value = numpy_helper.to_array(initializer)
        plain = name.removesuffix(TRANSPOSED)
        value = value.T if plain != name else value
        found[STORED_NAMES.get(plain, plain)] = np.ascontiguousarray(value)
    missing = _expected(config) - found.keys()
    if missing:
        raise SourceError(f"{path}: has no weight {min(missing)!r}: expected a model that export_onnx.py wrote")
    return found


def _load(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path)
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except DecodeError:
        raise SourceError(f"{path}: is not an ONNX model") from None


def _expected(config: NeoxConfig) -> set[str]:
    norms = ["input_layernorm", "post_attention_layernorm"]
    linear = ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
    names = {"gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias"}
    for layer in range(config.layers):
        names |= {f"gpt_neox.layers.{layer}.{part}.weight" for part in norms + linear}
        names |= {f"gpt_neox.layers.{layer}.{part}.bias" for part in norms}
    return names


if __name__ == "__main__":
    sys.exit(main())
