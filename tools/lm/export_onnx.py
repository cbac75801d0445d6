"""Export a GPT-NeoX checkpoint (the Pythia family) to ONNX with its KV cache as inputs and outputs, without torch.

`python tools/lm/export_onnx.py DIR OUT.onnx [--attentions]`: DIR holds config.json and model.safetensors. Inputs are
input_ids, attention_mask, position_ids and past_key_values.{i}.key/value, outputs logits, present.{i}.key/value and,
with --attentions, the attention probabilities attentions.{i}. Weights that fp16 holds exactly are stored in fp16; all
arithmetic is fp32.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gpt_neox import NeoxConfig, build
from weights import read_weights

from kvmnn.errors import KvmnnError, SourceError
from kvmnn.files.atomic import FileOutput


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="DIR", help="folder with config.json and model.safetensors")
    parser.add_argument("output", type=Path, metavar="OUT", help="the .onnx file to write")
    parser.add_argument("--attentions", action="store_true", help="add the outputs attentions.{i}")
    parser.add_argument("-f", "--force", action="store_true", help="replace a file that exists")
    options = parser.parse_args(arguments)
    try:
        print(export(options.checkpoint, options.output, attentions=options.attentions, force=options.force))
    except KvmnnError as exc:
        print(f"export_onnx.py: error: {exc}", file=sys.stderr)
        return 1
    return 0


def export(checkpoint: Path, output: Path, *, attentions: bool = False, force: bool = False) -> str:
    """Write the model and say in a line what was written.

    Raises
    ------
    KvmnnError
        For a checkpoint that is missing, damaged or of another family, and for output that cannot be written.
    """
    config = NeoxConfig.of(read_config(checkpoint / "config.json"))
    model = build(config, read_weights(checkpoint / "model.safetensors"), attentions=attentions)
    data = model.SerializeToString()
    with FileOutput(output, force=force) as file:
        file.file.write(data)
        file.commit()
    return f"{output}: {len(data)} bytes, {len(model.graph.node)} nodes"


def read_config(path: Path) -> dict[str, Any]:
    """A config.json.

    Raises
    ------
    SourceError
        Where it is missing or is not a JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise SourceError(f"{path}: is not valid JSON: {exc}") from None
    if not isinstance(config, dict):
        raise SourceError(f"{path}: is not a JSON object")
    return config


if __name__ == "__main__":
    sys.exit(main())
