"""``kvmnn dump-kv``: the KV cache of a model on a text, as files."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...text import LOSSLESS, LOSSY, count
from .. import model_run, printing, shared_options
from ..printing import UsageError

if TYPE_CHECKING:
    from ...arrays.casting import Cast
    from ...arrays.layer_cache import LayerCache
    from ...evaluation.setup.configurations import Configuration
    from ...evaluation.setup.documents import Document

_TEXT = f"""Let a model read a text and write its KV cache, whole or cut by a policy, for encode, measure and pack:

  --format npy   layer_<n>.key.npy and layer_<n>.value.npy, [kv_head, token, head_dim]
  --format mnn   a KV dump as MNN's engine writes it, [token, kv_head, head_dim]

  kvmnn dump-kv MODEL --text a.txt -o kv && kvmnn encode kv/*.npy -o kv.frames/ && kvmnn verify kv.frames/
  kvmnn dump-kv MODEL --text a.txt -o kv --format mnn --dtype fp16 && kvmnn measure kv

positions.json beside them has the true positions of the tokens that are there, token_ids.json every token of the text.
Rounding fp32 to fp16 is LOSSY, and so is a policy that evicts.

{model_run.EPILOG}"""

DEFAULT_TOKENS = 2048


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "dump-kv", run, "the KV cache of a model on a text, as files", _TEXT)
    model_run.add_model(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="what the model reads, UTF-8")
    parser.add_argument(
        "--tokens",
        type=shared_options.positive,
        default=DEFAULT_TOKENS,
        metavar="N",
        help=f"tokens that it reads, the one that begins a text included (default: {DEFAULT_TOKENS:,})",
    )
    shared_options.add_output(parser, "directory")
    parser.add_argument("--format", choices=("npy", "mnn"), default="npy", help="of the files (default: npy)")
    parser.add_argument("--dtype", choices=("fp16", "fp32"), help="of the words (default: the model's)")
    parser.add_argument("--run-id", default="kvmnn", metavar="ID", help="of an MNN dump (default: kvmnn)")


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...evaluation.setup.documents import read_document
    from ...lm.generation import check_positions, prefill

    if arguments.output is None or arguments.output == printing.STDIO:
        raise UsageError("no output given: use -o DIR")
    chosen = model_run.configuration(arguments)
    session, tokenizer = model_run.open_model(arguments, chosen)
    document = read_document(Path(arguments.text), tokenizer, max(arguments.tokens - 1, 1))
    ids = document.ids[: arguments.tokens]
    check_positions(session.interface.label, session.interface.max_positions, len(ids), 1)
    model = model_run.runner(arguments, session, chosen)
    started = time.perf_counter()
    prefill(model, ids.tolist(), arguments.chunk)
    caches = model.cache.layers()
    seconds = time.perf_counter() - started
    result = _write(arguments, chosen, document, caches, ids.tolist())
    if arguments.json:
        printing.print_json({"verb": "dump-kv", "output": arguments.output, "seconds": seconds, **result})
    printing.say(arguments, _line(arguments, result))
    return 0


def _write(
    arguments: argparse.Namespace,
    chosen: Configuration,
    document: Document,
    caches: list[LayerCache],
    ids: list[int],
) -> dict[str, Any]:
    """Write everything; what the JSON document says of it."""
    from ...files.output import DirectoryOutput
    from ...lm.kv_dump import POSITIONS, layer_arrays, write_about, write_mnn, write_npy
    from ...version import version

    arrays, cast = layer_arrays(caches, arguments.dtype)
    kept = [cache.tokens for cache in caches]
    about = {
        "kvmnn": version(),
        "label": _label(kept, len(ids), cast),
        "model": arguments.model,
        "text": {"name": document.name, "sha256": document.sha256},
        "policy": chosen.to_dict(),
        "format": arguments.format,
        "dtype": cast.target,
        "rounded": {
            "from": cast.source,
            "words": cast.words,
            "changed": cast.changed,
            "largest_error": cast.largest_error,
        },
    }
    protect = [arguments.text, arguments.model]
    with DirectoryOutput(arguments.output, force=arguments.force, protect=protect, index=POSITIONS) as output:
        if arguments.format == "npy":
            write_npy(arrays, output)
        else:
            write_mnn(arrays, output, arguments.run_id)
        write_about(output, caches, ids, about)
        output.commit()
    nbytes = sum(entry.array.nbytes for entry in arrays)
    return {**about, "tokens_seen": len(ids), "tokens_kept": kept, "asked_tokens": arguments.tokens, "bytes": nbytes}


def _label(kept: list[int], seen: int, cast: Cast) -> str:
    return LOSSY if min(kept) < seen or cast.changed else LOSSLESS


def _line(arguments: argparse.Namespace, result: dict[str, Any]) -> str:
    kept, seen, rounded = result["tokens_kept"], result["tokens_seen"], result["rounded"]
    low, high = min(kept), max(kept)
    share = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    reasons = []
    if low < seen:
        reasons.append(f"{result['policy']['label']}: {share} of {seen:,} tokens kept")
    if rounded["changed"]:
        reasons.append(
            f"{rounded['from']} rounded to {result['dtype']}: {rounded['changed']:,} of {rounded['words']:,} words "
            f"changed, largest error {rounded['largest_error']:.3g}"
        )
    how = f"{result['label']} ({'; '.join(reasons) or 'the words that the model computed'})"
    short = f", the text has only {seen:,} tokens" if seen < result["asked_tokens"] else ""
    return (
        f"{arguments.output}: {count(len(kept), 'layer')}, {share} tokens, {result['dtype']}, "
        f"{result['bytes']:,} bytes{short}\n  {how}"
    )
