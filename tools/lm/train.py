"""Train the small GPT-NeoX language model of fixtures/lm on the CPython standard library, on a CPU.

`python tools/lm/train.py --out OUT --bf16 --steps 5120` (or `--minutes 45`): corpus, split by file, tokenizer,
training, and weights rounded to what fp16 holds. Needs torch, transformers and tokenizers (`pip install '.[peers]'`),
no network. With CPython 3.11.7 split, texts and tokenizer come out as they are in fixtures/lm, byte for byte; the
weights differ from run to run. `python tools/lm/export_onnx.py OUT OUT/model.onnx` exports the result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np

from kvmnn.errors import KvmnnError, SourceError

if TYPE_CHECKING:
    from corpus import Corpus
    from training import Trainer
    from transformers import GPTNeoXForCausalLM

CURRICULUM = "0:256,0.2:512,0.4:1024,0.7:1024+2048,0.87:1024+2048+4096"
REPORTED_LENGTHS = (512, 1024, 2048, 4096)


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser()
    options = parser.parse_args(arguments)
    if not options.prepare_only and (options.steps is None) == (options.minutes is None):
        parser.error("exactly one of --steps and --minutes is needed")
    if options.start_frac and not options.init:
        parser.error("--start-frac is for --init")
    try:
        for line in run(options):
            print(line, flush=True)
    except KvmnnError as exc:
        print(f"train.py: error: {exc}", file=sys.stderr)
        return 1
    except ImportError as exc:
        print(f"train.py: error: {exc.name} is missing: pip install torch transformers tokenizers", file=sys.stderr)
        return 3
    return 0


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for everything")
    add(
        "--stdlib",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        metavar="DIR",
        help="a CPython's standard library (default: the running one's)",
    )
    add("--prepare-only", action="store_true", help="stop after corpus, split and tokenizer")
    add("--steps", type=int, metavar="N", help="length of the run in optimiser steps")
    add("--minutes", type=float, metavar="M", help="length of the run in wall time")
    add("--init", type=Path, metavar="DIR", help="go on from an earlier run's folder, with a fresh optimiser")
    add("--start-frac", type=float, default=0.0, metavar="F", help="with --init: where in the schedule to go on")
    add("--vocab", type=int, default=2048, metavar="N", help="entries of the tokenizer (default: %(default)s)")
    add("--max-position", type=int, default=4096, metavar="N", help="positions (default: %(default)s)")
    add(
        "--curriculum",
        default=CURRICULUM,
        help="share of the run:window length, A+B takes turns; short windows first learn much faster on a CPU "
        "(default: %(default)s)",
    )
    add("--batch-tokens", type=int, default=4096, metavar="N", help="tokens of a step (default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="highest learning rate (default: %(default)s)")
    add("--min-lr", type=float, default=1e-4, help="learning rate at the end (default: %(default)s)")
    add("--warmup", type=int, default=100, metavar="N", help="steps of warm-up (default: %(default)s)")
    add("--wd", type=float, default=0.1, help="weight decay of matrices (default: %(default)s)")
    add("--val-seq", type=int, default=1024, metavar="N", help="window of validation (default: %(default)s)")
    add("--save-every", type=int, default=200, metavar="N", help="steps between checkpoints (default: %(default)s)")
    add("--bf16", action="store_true", help="bfloat16 autocast: twice as fast where the CPU has AVX512-BF16 or AMX")
    add("--compile", action="store_true", help="torch.compile (needs a C++ compiler)")
    add("--threads", type=int, metavar="N", help="threads of torch (default: torch's)")
    add("--seed", type=int, default=1234, help="of weights and windows (default: %(default)s)")
    return parser


def run(options: argparse.Namespace) -> Iterator[str]:
    """Do all stages; lines about the progress come on the way.

    Raises
    ------
    KvmnnError
        For a library, an earlier run or a curriculum that cannot be used.
    """
    from corpus import prepare

    options.out.mkdir(parents=True, exist_ok=True)
    corpus = prepare(options.stdlib, options.out, options.vocab)
    for name in ("training", "validation", "held_out"):
        documents, tokens = getattr(corpus.split, name), sum(map(len, getattr(corpus, name)))
        yield f"{name}: {len(documents)} documents, {sum(d.size for d in documents)} bytes, {tokens} tokens"
    if not options.prepare_only:
        yield from train(options, corpus)


def train(options: argparse.Namespace, corpus: Corpus) -> Iterator[str]:
    """Train, round the weights, measure, and write model and log."""
    import torch
    from training import Trainer, complete_config, round_to_half, save_checkpoint, validate
    from transformers.utils import logging

    logging.disable_progress_bar()
    random.seed(options.seed)
    np.random.seed(options.seed)  # noqa: NPY002 - the seed of the libraries' own draws
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    model, log = starting_point(options, corpus.tokenizer.get_vocab_size())
    stream = np.concatenate(corpus.validation)
    trainer = Trainer(model, recipe(options), corpus.training, stream, options.out, log)
    yield f"{sum(parameter.numel() for parameter in model.parameters())} parameters"
    yield from trainer.run()
    before = validate(model, stream, options.val_seq)
    round_to_half(model)
    summary = final_log(trainer, corpus, before, options)
    (options.out / "train_log.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    save_checkpoint(model.half(), options.out)
    complete_config(options.out / "config.json")
    yield f"validation loss {before:.4f}, {summary['val_loss_fp16_weights']:.4f} with weights rounded to fp16"


def starting_point(options: argparse.Namespace, vocabulary: int) -> tuple[GPTNeoXForCausalLM, list[dict[str, Any]]]:
    """A new model and an empty log, or an earlier run's."""
    import torch
    from training import LOG, new_model
    from transformers import GPTNeoXForCausalLM

    if not options.init:
        return new_model(vocabulary, options.max_position), []
    try:
        log = json.loads((options.init / LOG).read_text(encoding="utf-8"))
        model = GPTNeoXForCausalLM.from_pretrained(options.init, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as exc:
        raise SourceError(f"{options.init}: is no folder of an earlier run: {str(exc).splitlines()[0]}") from exc
    return model, log["log"] if isinstance(log, dict) else log  # a finished run has its log below its summary


def recipe(options: argparse.Namespace) -> Any:
    """The options that decide the training."""
    from training import Recipe, parse_curriculum

    try:
        curriculum = parse_curriculum(options.curriculum)
    except ValueError as exc:
        raise KvmnnError(f"--curriculum {options.curriculum}: {exc}") from None
    return Recipe(
        curriculum=curriculum,
        steps=options.steps,
        minutes=options.minutes,
        start=options.start_frac,
        batch_tokens=options.batch_tokens,
        learning_rate=options.lr,
        least_learning_rate=options.min_lr,
        warmup=options.warmup,
        weight_decay=options.wd,
        bf16=options.bf16,
        compiled=options.compile,
        seed=options.seed,
        save_every=options.save_every,
        validation_window=options.val_seq,
    )


def final_log(trainer: Trainer, corpus: Corpus, before: float, options: argparse.Namespace) -> dict[str, Any]:
    """What was trained how, and how good it is; `before` is the loss before the weights were rounded."""
    import torch
    from training import losses_by_length, validate

    model, stream = trainer.model, trainer.validation
    after = validate(model, stream, options.val_seq)
    folders = ("out", "stdlib", "init")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **trainer.totals,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "args": {name: value for name, value in vars(options).items() if name not in folders},
        "val_loss_fp32": before,
        "val_loss_fp16_weights": after,
        "val_ppl": math.exp(after),
        "val_loss_2048": validate(model, stream, 2048),
        "heldout_by_length": losses_by_length(model, corpus.held_out, REPORTED_LENGTHS),
        "log": trainer.log,
    }


if __name__ == "__main__":
    sys.exit(main())
