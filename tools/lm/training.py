"""The training of the small GPT-NeoX model with torch: windows of text, schedule, steps, and what is measured."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import Tokens
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from kvmnn.errors import SourceError

BETAS = (0.9, 0.95)
CLIP = 1.0
VALIDATION_BATCH = 4096  # tokens
VALIDATION_QUICK = 40 * 1024  # tokens, while training
TAIL = 256  # positions
PROGRESS_EVERY = 20  # steps
LOG = "train_log.json"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train.

    Parameters
    ----------
    curriculum
        From which share of the run on which window lengths (tokens) take turns.
    steps, minutes
        Length of the run by optimiser steps or by wall time; exactly one of them.
    start
        Share of the schedule that an earlier run has done.
    batch_tokens
        Tokens of one step.
    validation_window
        Tokens.
    """

    curriculum: tuple[tuple[float, tuple[int, ...]], ...]
    steps: int | None
    minutes: float | None
    start: float
    batch_tokens: int
    learning_rate: float
    least_learning_rate: float
    warmup: int
    weight_decay: float
    bf16: bool
    compiled: bool
    seed: int
    save_every: int
    validation_window: int

    def progress(self, step: int, seconds: float) -> float:
        """Share of the schedule that is done."""
        done = step / self.steps if self.steps else seconds / (60 * (self.minutes or math.inf))
        return self.start + (1 - self.start) * done

    def rate(self, step: int, progress: float) -> float:
        """A cosine from the highest to the least learning rate, with a linear start."""
        span = self.learning_rate - self.least_learning_rate
        cosine = self.least_learning_rate + 0.5 * span * (1 + math.cos(math.pi * progress))
        return cosine * min(1.0, (step + 1) / self.warmup)

    def window(self, step: int, progress: float) -> int:
        """Tokens of this step's windows."""
        lengths = [lengths for start, lengths in self.curriculum if progress >= start][-1]
        return lengths[step % len(lengths)]


def parse_curriculum(text: str) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """``"0:256,0.5:512+1024"``: from share 0 on windows of 256 tokens, from the half on 512 and 1024 in turns."""
    stages = []
    for item in text.split(","):
        share, _, lengths = item.partition(":")
        stages.append((float(share), tuple(int(length) for length in lengths.split("+"))))
    if stages[0][0] != 0 or stages != sorted(stages) or any(n < 1 for _, lengths in stages for n in lengths):
        raise ValueError("expected stages in order, the first from 0, with window lengths of at least 1")
    return tuple(stages)


@dataclass
class Windows:
    """Windows of the shuffled documents in a row that do not overlap; in every epoch another order and offset."""

    documents: Sequence[Tokens]
    length: int
    seed: int
    _stream: Tokens = field(init=False)
    _starts: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and the tokens that follow them, int64 ``[rows, length]``."""
        taken = [self._next() for _ in range(rows)]
        tokens = torch.from_numpy(np.stack(taken).astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]

    def _next(self) -> Tokens:
        if not self._starts:
            self._shuffle()
        start = self._starts.pop()
        return self._stream[start : start + self.length + 1]

    def _shuffle(self) -> None:
        order = self._random.permutation(len(self.documents))
        self._stream = np.concatenate([self.documents[index] for index in order])
        offset = int(self._random.integers(0, self.length))
        starts = np.arange(offset, len(self._stream) - self.length - 1, self.length)
        if not len(starts):
            raise SourceError(f"{len(self._stream)} training tokens hold no window of {self.length}")
        self._random.shuffle(starts)
        self._starts = list(starts)


def new_model(vocabulary: int, positions: int) -> GPTNeoXForCausalLM:
    """The untrained model. Its init is GPT-NeoX's small one, ``sqrt(2 / (5 hidden))``: 0.02 learns much slower."""
    config = GPTNeoXConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_act="gelu",
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        use_parallel_residual=True,
        tie_word_embeddings=False,
        layer_norm_eps=1e-5,
        initializer_range=0.04,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=True,
        attn_implementation="sdpa",
    )
    return GPTNeoXForCausalLM(config)


@dataclass
class Trainer:
    """A model under training.

    Parameters
    ----------
    validation
        One stream of tokens.
    output
        Folder of checkpoints and of the log.
    log
        What earlier runs have logged.
    """

    model: GPTNeoXForCausalLM
    recipe: Recipe
    training: Sequence[Tokens]
    validation: Tokens
    output: Path
    log: list[dict[str, Any]]

    def __post_init__(self) -> None:
        last: dict[str, Any] = self.log[-1] if self.log else {"step": 0, "tokens": 0, "seconds": 0.0}
        self.steps_before: int = last["step"]
        self.tokens_before: int = last["tokens"]
        self.seconds_before: float = last["seconds"]
        self.step = self.tokens = 0
        seed = self.recipe.seed + self.steps_before  # windows in another order than before
        lengths = {length for _, lengths in self.recipe.curriculum for length in lengths}
        self._windows = {length: Windows(self.training, length, seed + length) for length in sorted(lengths)}
        self._optimiser = optimiser(self.model, self.recipe)
        self._loss = torch.compile(loss) if self.recipe.compiled else loss
        self._losses: list[float] = []

    def run(self) -> Iterator[str]:
        """Train to the end of the schedule; lines about the progress come on the way."""
        self._begin = time.monotonic()
        self.model.train()
        while (progress := self.recipe.progress(self.step, self.seconds)) < 1:
            rate = self._take_step(progress)
            if self.step % PROGRESS_EVERY == 0:
                recent = np.mean(self._losses[-PROGRESS_EVERY:])
                speed = self.tokens / self.seconds
                yield f"step {self.step} ({progress:.1%}): loss {recent:.4f}, rate {rate:.2e}, {speed:.0f} tokens/s"
            if self.step % self.recipe.save_every == 0:
                yield self._save(rate)

    @property
    def seconds(self) -> float:
        """Wall time of this run so far."""
        return time.monotonic() - self._begin

    @property
    def totals(self) -> dict[str, Any]:
        """Steps, tokens and seconds of all runs."""
        return {
            "steps": self.steps_before + self.step,
            "tokens_seen": self.tokens_before + self.tokens,
            "train_seconds": round(self.seconds_before + self.seconds, 1),
        }

    def _take_step(self, progress: float) -> float:
        rate = self.recipe.rate(self.step, progress)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        length = self.recipe.window(self.step, progress)
        inputs, targets = self._windows[length].batch(max(1, self.recipe.batch_tokens // length))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.recipe.bf16):
            value = self._loss(self.model, inputs, targets)
        self._optimiser.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimiser.step()
        self.step += 1
        self.tokens += inputs.numel()
        self._losses.append(value.item())
        return rate

    def _save(self, rate: float) -> str:
        measured = validate(self.model, self.validation, self.recipe.validation_window, VALIDATION_QUICK)
        totals = self.totals
        entry = {"step": totals["steps"], "seconds": totals["train_seconds"], "tokens": totals["tokens_seen"]}
        recent = float(np.mean(self._losses[-self.recipe.save_every :]))
        self.log.append({**entry, "train_loss": recent, "val_loss": measured, "lr": rate})
        save_checkpoint(self.model, self.output)
        (self.output / LOG).write_text(json.dumps(self.log, indent=1) + "\n", encoding="utf-8")
        return f"step {self.step}: validation loss {measured:.4f}, perplexity {math.exp(measured):.3f}; saved"


def optimiser(model: GPTNeoXForCausalLM, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=BETAS, eps=1e-8)


def loss(
    model: GPTNeoXForCausalLM, inputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """Cross entropy of the next tokens (nats)."""
    logits = model(input_ids=inputs, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


@torch.no_grad()
def validate(model: GPTNeoXForCausalLM, stream: Tokens, window: int, most: int | None = None) -> float:
    """Mean loss (nats) over windows from the start of `stream`, of `most` tokens or of all.

    Raises
    ------
    SourceError
        Where `stream` is shorter than one window.
    """
    windows = min((len(stream) - 1) // window, (most or len(stream)) // window)
    if not windows:
        raise SourceError(f"{len(stream)} validation tokens hold no window of {window}")
    rows = max(1, VALIDATION_BATCH // window)
    total = 0.0
    model.eval()
    for first in range(0, windows, rows):
        starts = [index * window for index in range(first, min(first + rows, windows))]
        tokens = torch.from_numpy(np.stack([stream[s : s + window + 1] for s in starts]).astype(np.int64))
        total += loss(model, tokens[:, :-1], tokens[:, 1:], "sum").item()
    model.train()
    return total / (windows * window)


@torch.no_grad()
def losses_by_length(
    model: GPTNeoXForCausalLM, documents: Sequence[Tokens], lengths: Sequence[int]
) -> dict[int, dict[str, float]]:
    """Loss and perplexity of the first tokens of each document in one pass, and of the last 256 positions of them."""
    model.eval()
    table = {}
    for length in lengths:
        rows = [_token_losses(model, tokens[: length + 1]) for tokens in documents if len(tokens) > length]
        if rows:
            mean = float(np.mean(rows))
            tail = float(np.mean([row[-TAIL:] for row in rows]))
            table[length] = {
                "nll": mean,
                "ppl": math.exp(mean),
                "tokens": len(rows) * length,
                "ppl_last256": math.exp(tail),
            }
    model.train()
    return table


def _token_losses(model: GPTNeoXForCausalLM, tokens: Tokens) -> list[float]:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    values: list[float] = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="none").tolist()
    return values


@torch.no_grad()
def round_to_half(model: GPTNeoXForCausalLM) -> None:
    """Round every weight to one that fp16 holds, so that storing it in fp16 loses nothing."""
    for parameter in model.parameters():
        parameter.copy_(parameter.half().float())


def save_checkpoint(model: GPTNeoXForCausalLM, folder: Path) -> None:
    """Write the model next to `folder`'s files, then put each new file in the place of the old one."""
    temporary = folder / "checkpoint.tmp"
    model.save_pretrained(temporary)
    for path in temporary.iterdir():
        os.replace(path, folder / path.name)
    temporary.rmdir()


def complete_config(path: Path) -> None:
    """Spell the rotary settings as transformers 4 reads them, too."""
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rope: Mapping[str, Any] = config.get("rope_parameters") or {}
    if rope:
        config["rotary_pct"] = rope["partial_rotary_factor"]
        config["rotary_emb_base"] = int(rope["rope_theta"])
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
