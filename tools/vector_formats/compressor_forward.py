"""`kvcm-forward-vectors/1`: caches before and after a KV compressor, by every engine that is installed.

Where a case has no new length, the reference leaves a broken cache after and kvmnn must refuse.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmnn import KvmnnError
from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.compressor import kvcm
from kvmnn.compressor.forward.compress import CompressResult, compress_cache, compress_layers
from kvmnn.compressor.forward.plan import ENGINES, EngineName, ForwardOptions, Precision

from .common import CaseResult, Checker, run_list, unknown_lists

Floats = npt.NDArray[Any]

_TOLERANCE: dict[Precision, tuple[float, float]] = {"fp32": (1e-4, 1e-5), "fp16": (2e-3, 1e-2)}
_FIELDS = {
    *("id", "bin", "npz", "layers", "batch", "heads", "head_dim", "seq_len", "cache_len", "config", "effective"),
    *("prefixes", "bin_dtype", "new_len", "unchanged"),
    # what the reference itself did, next to what it should have done
    *("ref_csrc_new_len", "ref_cache_unchanged"),
    *("max_abs_diff_torch_f32_vs_cpp_f32", "max_abs_diff_f16_emul_vs_cpp_f16"),
}
_CONFIG = {"compression_factor", "min_seq_len", "image_kv_len"}
_ARRAYS = {"k_in", "v_in", "k_out", "v_out", "k_out_f16", "v_out_f16"}


def run(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    entries = index.get("cases", ())
    named = [{**case, "name": case.get("id", "")} if isinstance(case, dict) else case for case in entries]
    yield from run_list(named, "cases", lambda case, check: _case(folder, case, check))
    yield from unknown_lists(index, ("cases",))


def engines() -> list[EngineName]:
    """The engines whose packages are installed."""
    there = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))
    return [name for name in ENGINES if name == "numpy" or there]


def _case(folder: Path, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_FIELDS)
    check.equal("unknown settings", sorted(set(case["config"]) - _CONFIG), [])
    weights = kvcm.read_weight_file(folder / case["bin"])
    check.field("prefixes", weights.header.weight_count_per_layer // kvcm.SLOTS_PER_PREFIX)
    check.field("bin_dtype", weights.header.dtype_code)
    with np.load(folder / case["npz"]) as file:
        arrays = {name: file[name] for name in file.files}
    check.equal("unknown arrays", sorted(set(arrays) - _ARRAYS), [])
    for name in ("k_in", "v_in"):
        shape = tuple(case[field] for field in ("layers", "batch", "heads", "seq_len", "head_dim"))
        check.equal(f"shape of {name}", arrays[name].shape, shape)
    for engine in engines():
        _run(weights, case, arrays, check, engine, "fp32")
        if "k_out_f16" in arrays:
            _run(weights, case, arrays, check, engine, "fp16")


def _run(
    weights: kvcm.WeightFile,
    case: dict[str, Any],
    arrays: dict[str, Floats],
    check: Checker,
    engine: EngineName,
    precision: Precision,
) -> None:
    options = _options(case, engine, precision)
    # After the live tokens lies what must never be read.
    spare = max(case.get("cache_len", 0) - case["seq_len"], 0)
    keys, values = (_padded(arrays[name], spare) for name in ("k_in", "v_in"))
    before = keys.tobytes(), values.tobytes()
    try:
        made = compress_cache(weights, keys, values, options)
    except KvmnnError as error:
        if case["new_len"] is not None:
            check.equal(f"{engine} {precision}", f"refused: {error}", "accepted")
        made = None
    check.equal("input after the call", (keys.tobytes(), values.tobytes()) == before, True)
    if made is None:
        return
    check.field("new_len", made.num_tokens)
    effective = {
        "factor": made.plan.factor,
        "min_seq_len": made.plan.min_seq_len,
        "image_len": made.plan.image_len,
    }
    check.field("effective", effective)
    if "ref_csrc_new_len" in case:
        check.field("ref_csrc_new_len", made.num_tokens)
    check.equal("positions", _positions(made), list(range(case["seq_len"])))
    for name, array in (("k", made.keys), ("v", made.values)):
        _compare(f"{engine} {precision} {name}", array, _expected(arrays, name, precision), check, precision)
    if case.get("unchanged"):
        check.equal("unchanged", made.plan.reason is not None, True)
    if engine == "numpy":
        _compare_layers(weights, case, arrays, made, options, check)


def _options(case: dict[str, Any], engine: EngineName, precision: Precision) -> ForwardOptions:
    config = case["config"]
    return ForwardOptions(
        image_len=config["image_kv_len"],
        factor=config["compression_factor"],
        min_seq_len=config["min_seq_len"],
        seq_len=case["seq_len"],
        precision=precision,
        engine=engine,
    )


def _padded(array: Floats, tokens: int) -> Floats:
    return np.pad(array, [(0, 0)] * 3 + [(0, tokens), (0, 0)], constant_values=np.nan)


def _expected(arrays: dict[str, Floats], name: str, precision: Precision) -> Floats:
    """The output, or the input where the case has none because nothing changes."""
    if precision == "fp16":
        return arrays[f"{name}_out_f16"]
    return arrays.get(f"{name}_out", arrays[f"{name}_in"])


def _compare(what: str, found: Floats, expected: Floats, check: Checker, precision: Precision) -> None:
    if not check.equal(f"shape of {what}", found.shape, expected.shape):
        return
    absolute, relative = _TOLERANCE[precision]
    x, y = found.astype(np.float64), expected.astype(np.float64)
    difference = np.abs(x - y) - (absolute + relative * np.abs(y))
    if x.size and not difference.max() <= 0:
        check.problems.append(f"{what}: off by up to {np.abs(x - y).max():.3g}, expected {absolute} + {relative}|x|")


def _positions(made: CompressResult) -> list[int]:
    """Every true position that the new tokens stand for, in order: all of them, each once."""
    spans = zip(made.positions.tolist(), made.ends.tolist(), strict=True)
    return [position for first, end in spans for position in range(first, end)]


def _compare_layers(
    weights: kvcm.WeightFile,
    case: dict[str, Any],
    arrays: dict[str, Floats],
    made: CompressResult,
    options: ForwardOptions,
    check: Checker,
) -> None:
    """The same cache as `LayerCache`s, which have no batch and no dead tokens."""
    absolute, _ = _TOLERANCE[options.precision]
    options = ForwardOptions(**{**vars(options), "seq_len": None})
    for row in range(case["batch"]):
        layers = [
            LayerCache(layer=layer, keys=arrays["k_in"][layer, row], values=arrays["v_in"][layer, row])
            for layer in range(case["layers"])
        ]
        new, _ = compress_layers(weights, layers, options)
        for layer in new:
            for name, found, whole in (("keys", layer.keys, made.keys), ("values", layer.values, made.values)):
                same = np.allclose(found, whole[layer.layer, row], rtol=0, atol=absolute)
                check.equal(f"{name} of layer {layer.layer} as LayerCache", bool(same), True)
            check.equal("positions of a LayerCache", layer.positions.tolist(), made.positions.tolist())
            check.equal("tokens seen by a LayerCache", layer.tokens_seen, made.next_position)
