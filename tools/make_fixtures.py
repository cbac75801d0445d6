"""Pack data from elsewhere into fixtures/, once: `python tools/make_fixtures.py frames DIR` and so on.

`frames` takes a folder with frame vectors (format mnn-frame-vectors-1), `compressor` one with those of compressor
weights (kvcm-*-vectors/1), `kv_real` one with the arrays
kv_real_{k,v}_{fp16,fp32}.npy, shaped [layer, token, head, dim], `mnn_engine` one with a model exported for MNN
(mnn_model_llama/) and a prefix cache that the engine wrote with it (mnn_prefix/engine_written_prefix/), `layout` one
with packed caches (format mnn-packed-kv-layout-vectors-1), `policies` one with what eviction policies keep (format
kv-policy-vectors-1), `real_kv` one with caches of running engines
(mnn_snapshots/, mnn_h2o_live/, mnn_prefix/), `h2o` one with planner vectors
(h2o-planner-vectors-1), `lm` one with a trained model, its texts and what
was measured on it (results.json). Fixtures are golden: what is there is never made again from kvmnn's own output.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(MAKERS))
    parser.add_argument("source", type=Path, metavar="DIR")
    options = parser.parse_args()
    MAKERS[options.what](options.source, FIXTURES / options.what)


def pack_vectors(source: Path, target: Path) -> None:
    """All files of a vector set in one archive with nothing in it that depends on when or by whom it was made."""
    pack_folder(source, target / "vectors.tar.xz")


def pack_engine(source: Path, target: Path) -> None:
    """A tiny model and a prefix cache of it."""
    pack_folder(source / "mnn_model_llama", target / "model.tar.xz")
    pack_folder(source / "mnn_prefix" / "engine_written_prefix", target / "prefix.tar.xz")


def pack_real(source: Path, target: Path) -> None:
    """Live caches, an eviction and prefix files, without the model that they came from."""
    pack_folder(source, target / "vectors.tar.xz", ("mnn_h2o_live", "mnn_prefix", "mnn_snapshots"))


def pack_folder(source: Path, target: Path, parts: tuple[str, ...] = (".",)) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in sorted(path for part in parts for path in (source / part).rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(str(path.relative_to(source)))
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(entry, file)


def cut_arrays(source: Path, target: Path) -> None:
    """The first tokens of every layer in fp16; of the first two layers' K also in fp32."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("k", "v"):
        array = np.load(source / f"kv_real_{name}_fp16.npy", mmap_mode="r")
        np.save(target / f"{name}_fp16.npy", np.ascontiguousarray(array[:, :TOKENS]))
    array = np.load(source / "kv_real_k_fp32.npy", mmap_mode="r")
    np.save(target / "k_fp32.npy", np.ascontiguousarray(array[:2, :TOKENS]))


def copy_model(source: Path, target: Path) -> None:
    """The trained model ready for use, its held-out texts, and the measurements that tests reproduce."""
    (target / "texts").mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        shutil.copyfile(source / name, target / Path(name).name)
    for text in sorted((source / "eval_texts").glob("*.txt")):
        shutil.copyfile(text, target / "texts" / text.name)
    results = json.loads((source / "results.json").read_text(encoding="utf-8"))
    (target / "expected.json").write_text(expected_lines(results), encoding="utf-8")


def expected_lines(results: dict[str, dict[str, object]]) -> str:
    """JSON with a line for each configuration, so that a difference can be read."""
    parts = []
    for title, name in RESULT_TABLES.items():
        head = {key: value for key, value in results[name].items() if key not in ("rows", "wall_seconds", "jobs")}
        rows = [json.dumps({key: row[key] for key in RESULT_KEYS if key in row}) for row in results[name]["rows"]]
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        parts.append("\n".join([f' "{title}": {{', *lines, '  "rows": [', "   " + ",\n   ".join(rows), "  ]", " }"]))
    return "{\n" + ",\n".join(parts) + "\n}\n"


MODEL_FILES = (
    "model.onnx",
    "model/config.json",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
    "split.json",
    "LICENSE.CPython.txt",
)
RESULT_TABLES = {
    "chunks_of_4": "policies_chunk4",
    "token_by_token": "policies_token_by_token",
    "peer_check": "peer_check_torch_dynamic_cache",
}
RESULT_KEYS = (
    *("name", "policy", "config", "tokens", "nll", "ppl", "accuracy", "tokens_deep", "ppl_deep", "accuracy_deep"),
    *("kv_tokens_all_layers", "delta_nll_deep_vs_full", "delta_nll_deep_se", "per_file_nll"),
    *("nll_onnx", "nll_torch", "acc_onnx", "acc_torch"),
)
MAKERS = {
    "compressor": pack_vectors,
    "frames": pack_vectors,
    "h2o": pack_vectors,
    "kv_real": cut_arrays,
    "layout": pack_vectors,
    "lm": copy_model,
    "mnn_engine": pack_engine,
    "offline": pack_vectors,
    "policies": pack_vectors,
    "real_kv": pack_real,
}

if __name__ == "__main__":
    main()
