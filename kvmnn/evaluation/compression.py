"""`evaluate_with_compression`: perplexity and accuracy of one text, as l2_compress / KnormPress define them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from .._util.text import pluralize
from ..errors import KvmnnError
from ..lm.runner import Runner
from ..lm.session import DecoderSession
from ..lm.tokenizer import Tokenizer
from ..lm.windows import count_outside, count_tokens_in_windows
from .runner import PathLike
from .scoring import compute_perplexity, measure_by_definition
from .settings import ProjectDefinition, build_configuration


def evaluate_with_compression(
    model: PathLike | DecoderSession,
    tokenizer: PathLike | Tokenizer | None,
    text: str,
    keep_ratio: float = 1.0,
    prune_after: int = 1000,
    skip_layers: Sequence[int] = (0, 1),
    *,
    fix_kv_size: int | None = None,
    strategy: str = "keep_low",
    max_tokens: int | None = None,
    threads: int = 1,
) -> dict[str, float]:
    """Score a text token by token with its cache cut by key norms, as the project's function of this name does.

    The text is fed without a first token, all but its own first token are scored, and K and V are cut after every
    step (the rows of ``kvmnn eval --preset knorm-ratio`` and ``knorm-fixed`` in *their definition*).

    Parameters
    ----------
    model
        An ONNX decoder: file, folder, name of a model that was pulled, or a session of it.
    tokenizer
        Its tokenizer or ``tokenizer.json``; None for the one next to the model.
    text
        The text.
    keep_ratio
        Share of the tokens stored that every cut keeps, those of the lowest key norms; with `fix_kv_size` the share of
        it that the most recent tokens have for certain.
    prune_after
        Tokens above which a cache is cut; without effect with `fix_kv_size`.
    skip_layers
        Layers that are never cut.
    fix_kv_size
        Keep at most so many tokens (the project's ``fix_size_l2_compress``).
    strategy
        With it: ``"keep_low"``, ``"keep_high"`` or ``"random"``.
    max_tokens
        Only the first tokens of the text.
    threads
        Of onnxruntime, where `model` is no session.

    Returns
    -------
    dict
        ``perplexity`` (infinite if it exceeds float64), ``accuracy`` (share of tokens that were the most probable one),
        ``loss`` (nats a token), ``tokens`` (scored), ``final_cache_tokens`` (of the first layer that is cut) and
        ``lossy_ratio`` (tokens of the text over those stored at the end, all layers; those within the window of a
        layer that has one).

    Raises
    ------
    KvmnnError
        For a model, tokenizer or options that cannot be used, and a text of less than two tokens or of more than the
        model has positions.

    Examples
    --------
    ::

        results = evaluate_with_compression("fixtures/lm", None, text, keep_ratio=0.8, prune_after=100)
        print(f"PPL: {results['perplexity']:.2f}, Acc: {results['accuracy']:.2%}")
    """
    if fix_kv_size is None:
        options = {"keep_ratio": keep_ratio, "prune_after": prune_after, "skip_layers": tuple(skip_layers)}
        configuration = build_configuration("l2_ratio", options)
    else:
        configuration = build_configuration(
            "l2_fixed",
            {
                "budget": fix_kv_size,
                "recent_ratio": keep_ratio,
                "strategy": strategy,
                "skip_layers": tuple(skip_layers),
            },
        )
    if not isinstance(tokenizer, Tokenizer):
        if tokenizer is None and isinstance(model, DecoderSession):
            raise KvmnnError("a session has no tokenizer: expected one, or its tokenizer.json")
        tokenizer = Tokenizer.open_for_model(os.fspath(model) if tokenizer is None else tokenizer)  # type: ignore[arg-type]
    ids = np.asarray(tokenizer.encode(text), np.int64)[:max_tokens]
    if len(ids) < 2:
        raise KvmnnError(
            f"the text has {pluralize(len(ids), 'token')}: expected at least 2, as the first one is not scored"
        )
    session = model if isinstance(model, DecoderSession) else DecoderSession.open(model, threads=threads)
    limit = session.interface.max_positions
    if limit is not None and len(ids) > limit:
        raise KvmnnError(f"the text has {len(ids):,} tokens, the model was made for {limit:,}: expected max_tokens")
    runner = Runner(session, configuration.create_policy())
    skipped_layers = tuple(sorted(runner.policy.resolve_skip_layers(session.interface.layers)))
    cell = measure_by_definition(runner, ids, ProjectDefinition("E1", configuration.label), skipped_layers)
    loss = cell.weighted_nll / cell.weight
    perplexity = compute_perplexity(loss)
    return {
        "perplexity": float("inf") if perplexity is None else perplexity,
        "accuracy": cell.hits / cell.scored_tokens,
        "loss": loss,
        "tokens": cell.scored_tokens,
        "final_cache_tokens": cell.final_cache_tokens,
        "lossy_ratio": _compute_lossy_ratio(runner),
    }


def _compute_lossy_ratio(runner: Runner) -> float:
    """Return tokens of the text over those that are stored, of all layers, as far as these still attend to them."""
    cache, windows = runner.cache, runner.session.interface.windows
    num_full = sum(count_tokens_in_windows(windows, len(cache.tokens), cache.num_seen))
    num_kept = sum(
        tokens - float(np.mean(count_outside(cache.get_positions(layer), cache.num_seen, windows.get(layer))))
        for layer, tokens in enumerate(cache.tokens)
    )
    return num_full / num_kept
