"""Samples of what tells which tokens stay, and how K is rotated: graphs, configurations, models, notes, results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_files
import numpy as np
import packed_samples
from mnn_graphs import Graph
from reader_sample import Sample, contents, made

_PACKED = "--kv-heads 1 --head-dim 4 --backend x86-sse --valid-tokens 5"


def _cache(folder: Path) -> dict[str, bytes]:
    packed_samples.write_prefix(folder, packed_samples.arrays(1, 1, 5, 4), capacity=69)
    return {f"cache/{name}": data for name, data in contents(folder).items()}


def _rope(folder: Path, files: dict[str, bytes], rope: str) -> Sample:
    command = f"mnn compact {{in}}/cache -o {{out}}/ {_PACKED} --reserve 0:1,3:2 --rerotate --rope {{in}}/{rope}"
    return Sample({**_cache(folder), **files}, (command,), tuple(files))


def _graph(folder: Path, *, tables: bool) -> Sample:
    graph, frequencies = Graph(), np.array([1.0, 0.01])
    graph.layer(graph.tables(frequencies, 3, 2) if tables else graph.angles(frequencies))
    return _rope(folder, {"model/llm.mnn": graph.to_bytes()}, "model")


def _configuration(folder: Path) -> Sample:
    by_kind = {kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    fields = {"head_dim": 4, "layer_types": ["full_attention"], "rope_parameters": by_kind, "no_rope_layers": [1]}
    return _rope(folder, {"model/config.json": json.dumps(fields).encode()}, "model")


def _gguf(folder: Path) -> Sample:
    data = llama_files.gguf(rope__freq_base=10000.0, rope__dimension_count=4, block_count=1)
    return _rope(folder, {"m.gguf": data}, "m.gguf")


def _plan(folder: Path, document: Any) -> Sample:
    command = f"mnn compact {{in}}/cache -o {{out}}/ {_PACKED} --plan {{in}}/plan.json"
    return Sample({**_cache(folder), "plan.json": json.dumps(document).encode()}, (command,), ("plan.json",))


def _rotated_prefix(folder: Path) -> Sample:
    """A prefix whose document has the positions of rotated K and those in the text."""
    cache = _cache(folder)
    made(["mnn", "compact", folder, *_PACKED.split(), "--reserve", "0:1,3:2", "-o", folder / "small"])
    made(
        [
            "mnn",
            "repack",
            folder / "small",
            "--target-backend",
            "x86-sse",
            "-o",
            folder / "c",
            "--rerotate",
            "--rope",
            "theta=9,dims=4",
        ]
    )
    files = {f"c/{name}": data for name, data in contents(folder / "c").items()}
    commands = (
        "mnn compact {in}/c -o {out}/ --reserve 0:1,2:1 --rerotate --rope theta=9,dims=4",
        "mnn unpack {in}/c -o {out}/",
    )
    return Sample({**cache, **files}, ("inspect {in}/c", *commands), ("c/sys.kvmnn.json",))


_POSITIONS = {"tokens_seen": 5, "layers": [{"layer": 0, "positions": [0, 1, 4]}]}
_TRACES = {"traces": [{"label": "a", "step_tokens": [5], "kept": [{"layer": 0, "positions": [[0, 1, 4]]}]}]}

MAKERS: dict[str, Callable[[Path], Sample]] = {
    "rotation in a graph": lambda folder: _graph(folder, tables=False),
    "rotation in tables of a graph": lambda folder: _graph(folder, tables=True),
    "rotation in a configuration": _configuration,
    "rotation in a .gguf": _gguf,
    "document of rotated K": _rotated_prefix,
    "plan of positions": lambda folder: _plan(folder, _POSITIONS),
    "plan of an evaluation": lambda folder: _plan(folder, _TRACES),
}
"""By the name of the reader."""
