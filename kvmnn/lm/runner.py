"""Run a model on texts with its cache under a policy; long prompts in steps of bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Literal

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from ..arrays.layer_cache import LayerCache
from ..dtypes import Floats, KVPair
from ..errors import KvmnnError
from ..policies.h2o_blocks import H2OEngine
from ..policies.policy import FullCache, Policy, Trigger
from ..policies.scored import ScoredPolicy
from ..quantization import CacheCodec
from ..reports.records import RuntimeStats
from ..runtime import RuntimeConfig
from ..runtime.metrics import RuntimeMetrics
from .attention_sums import AttentionSums
from .cache import ModelCache, PlannedEviction
from .kv_store import KVStore, LosslessStore, PackedStore, PlainStore
from .onnx.decoder import StepResult
from .onnx.onnx_session import CPU_PROVIDERS
from .quantized_store import QuantizedPartSizes, QuantizedStore
from .session import DecoderSession
from .tokenizer import Tokenizer
from .windows import count_outside

TokenArray = npt.NDArray[np.int64]


@dataclass
class RunTimings:
    """Elapsed times in seconds."""

    #: Time inside onnxruntime.
    model_seconds: float = 0.0
    #: Time of storing, scoring, selecting and cutting: everything in `ModelCache`.
    policy_seconds: float = 0.0
    #: Tokens fed.
    num_tokens: int = 0


class Runner:
    """A decoder with its cache: each step feeds tokens, returns logits, and cuts the cache.

    Parameters
    ----------
    session
        The model, opened with ``attentions=True`` where the policy scores tokens by them.
    policy
        The eviction policy; by default all tokens stay.
    max_masked
        Evicted tokens that may stay masked in the buffers until K and V are compacted; None for an eighth of those
        kept. 0 cuts at once, and so does a graph that takes no bias. It changes the resident bytes
        (`ModelCache.nbytes`), not which tokens are attended.
    packed
        Store K and V in the packed layout of this backend, such as ``"x86-avx2"``: packed, reallocated and unpacked at
        every step, with the same results.
    lossless
        Store K and V in a lossless runtime of these options (`kvmnn.lm.kv_store`), with the same results.
    codec
        Replace K and V by what this lossy codec makes of them, after the step that attended them and after the cut.
        Evicted tokens are then cut at once.
    positions
        ``"true"``: every token has its position in the text. ``"stored"`` uses the position in the cut cache of layer
        0 instead, a common mistake; it is here to show its price.

    Attributes
    ----------
    num_tokens_after_cut
        Tokens that were attended over a cache from which the policy had evicted something.
    num_tokens_after_loss
        Tokens that were attended over a cache that is not the one that the model computed: the policy had evicted
        something of it, a lossy codec or runtime held it, or it was loaded (`load_initial`).
    on_step
        Called with the model's output of each step, before the cache is cut; or None.
    requests_queries
        Whether that output has the queries, whatever the policy needs.

    Raises
    ------
    OptionError
        For layers to skip that the model does not have.
    KvmnnError
        Where the graph takes no positions (they would be those of the cut cache), gives no attention probabilities or
        allows no layers of unequal lengths, and the policy needs them.

    Examples
    --------
    ::

        session = DecoderSession.open("pythia/", attentions=True)
        runner = Runner(session, create("h2o_decayed", budget=256))
        logits = runner.step(tokenizer.encode("Once upon a time"))
    """

    def __init__(
        self,
        session: DecoderSession,
        policy: Policy | None = None,
        *,
        max_masked: int | None = None,
        packed: str | None = None,
        lossless: RuntimeConfig | None = None,
        codec: CacheCodec | None = None,
        positions: Literal["true", "stored"] = "true",
    ) -> None:
        policy = policy or FullCache()
        if policy.can_evict and not session.interface.has_positions:
            raise KvmnnError(
                f"{session.interface.label} has no input for positions, so a cut cache would shift them: export it "
                f"with position_ids to run it under a policy"
            )
        if policy.requires_attention and not session.has_attentions:
            raise KvmnnError(f"{policy.name} needs attention probabilities: open the session with attentions=True")
        if policy.requires_queries and session.interface.query_outputs is None:
            raise KvmnnError(
                f"{policy.name} needs queries, which {session.interface.label} does not return: kvmnn model import "
                f"makes graphs that do"
            )
        layers = session.interface.layers
        policy.check_layers(layers)
        if layers > 1 and (policy.cuts_layers_apart or 0 < len(policy.resolve_skip_layers(layers)) < layers):
            session.check_unequal_lengths()
        if positions not in ("true", "stored"):
            raise KvmnnError(f"positions is {positions!r}: expected 'true' or 'stored'")
        if max_masked is not None and max_masked < 0:
            raise KvmnnError(f"slack is {max_masked}: expected at least 0")
        self.session = session
        self.policy = policy
        self._max_masked = max_masked
        if (packed is not None) + (lossless is not None) + (codec is not None) > 1:
            raise KvmnnError("a cache is held packed or in the lossless runtime or by a codec: expected one of these")
        self.codec = codec
        self._packed = packed
        self._lossless = lossless
        self._positions = positions
        self._parameters = session.read_layer_parameters() if isinstance(policy, ScoredPolicy) else None
        self.on_step: Callable[[StepResult], object] | None = None
        self.requests_queries = False
        self.sums_attention = False
        self.reset()

    def reset(self) -> None:
        """Begin a new text."""
        interface, session = self.session.interface, self.session
        per_head = self.policy.is_per_head and interface.kv_heads > 1
        takes_bias = session.has_bias and (session.query_heads is not None or not per_head)
        self._kv_store: KVStore
        if self._lossless is not None:
            self._kv_store = LosslessStore(interface, self._lossless, per_head=self.policy.is_per_head)
        elif self._packed is not None:
            self._kv_store = PackedStore(interface, self._packed, per_head=self.policy.is_per_head)
        elif self.codec is not None:
            self._kv_store = QuantizedStore(session.create_empty_past(), interface, self.codec, is_per_head=per_head)
        else:
            self._kv_store = PlainStore(session.create_empty_past())
        planned_eviction = None
        if isinstance(self.policy, H2OEngine):
            token_bytes = 2 * interface.kv_heads * interface.head_dim * np.dtype(interface.dtype).itemsize
            planned_eviction = PlannedEviction(self.policy.create_planner(interface.layers, token_bytes))
        self.cache = ModelCache(
            self._kv_store,
            num_layers=interface.layers,
            kv_heads=interface.kv_heads,
            query_heads=session.query_heads or interface.kv_heads,
            policy=self.policy,
            max_masked=self._max_masked if takes_bias and self.codec is None else 0,
            takes_bias=takes_bias,
            planned_eviction=planned_eviction,
            parameters=self._parameters,
        )
        self.attention_sums = AttentionSums(interface.layers, interface.kv_heads) if self.sums_attention else None
        self.timings = RunTimings()
        self.num_tokens_after_cut = self.num_tokens_after_loss = 0
        self._has_initial = False
        self._is_consistent = True

    def collect_runtime_stats(self) -> RuntimeStats | None:
        """Compact the cache and return statistics of the lossless runtime on the text so far; None without one."""
        if not isinstance(self._kv_store, LosslessStore):
            return None
        self.cache.compact_all()
        return self._kv_store.to_stats()

    def collect_quantized_sizes(self) -> list[QuantizedPartSizes]:
        """Compact the cache and measure what its codec stores, for K and V of every layer; nothing without a codec.

        Tokens that a layer does not attend to any more are not counted.
        """
        if not isinstance(self._kv_store, QuantizedStore):
            return []
        self.cache.compact_all()
        windows, num_seen = self.session.interface.windows, self.cache.num_seen
        first_slots = [
            count_outside(self.cache.get_positions(layer), num_seen, windows.get(layer))
            for layer in range(self.session.interface.layers)
        ]
        return list(self._kv_store.measure_sizes(first_slots))

    def _quantize_due(self) -> None:
        if isinstance(self._kv_store, QuantizedStore):
            self._kv_store.quantize_due(self.cache.get_positions)

    def collect_runtime_metrics(self) -> RuntimeMetrics | None:
        """Return all metrics of the lossless runtime, percentiles included; None without one."""
        return self._kv_store.collect_metrics() if isinstance(self._kv_store, LosslessStore) else None

    def load_initial(self, layers: Sequence[LayerCache]) -> None:
        """Begin a text with K and V that were computed elsewhere, instead of feeding its first tokens, and cut them.

        A policy that evicts treats them as a prompt that was read in one step.

        Parameters
        ----------
        layers
            K and V of every layer, in order, in the model's own dtype, tokens by ascending position. Some may be
            missing; the next token's position is `LayerCache.tokens_seen`.

        Raises
        ------
        KvmnnError
            After tokens were fed; under a policy that ranks by attention, which is unknown for these tokens; for K and
            V that are not of this model; and for missing tokens where the model takes no positions or the policy keeps
            the same tokens in all heads.
        """
        if self.cache.num_seen or not self._is_consistent:
            raise KvmnnError("K and V from elsewhere begin a text: reset the runner first")
        reason = explain_no_warm_start(self.policy)
        if reason is not None:
            raise KvmnnError(f"{self.policy.name} {reason}")
        self._check_layers(layers, require_whole=False)
        if self.policy.can_evict and not self.policy.is_per_head and any(cache.positions.ndim == 2 for cache in layers):
            raise KvmnnError(f"{self.policy.name} keeps the same tokens in all heads: these hold different ones")
        if len({cache.tokens for cache in layers}) > 1:
            self.session.check_unequal_lengths()
        self._is_consistent = False
        self.cache.load_initial(layers)
        self._has_initial = True
        self._quantize_due()
        self._is_consistent = True

    def can_replay(self, *, has_queries: bool) -> bool:
        """Return whether the next step is that of a run with the full cache, so that `replay_step` may take it.

        Parameters
        ----------
        has_queries
            Whether the queries of that step are known.
        """
        policy, is_first = self.policy, not self.cache.num_seen
        if self._packed is not None or self._lossless is not None or self._positions != "true":
            return False
        if policy.requires_attention or Trigger.AFTER_APPEND in policy.triggers or self.cache.has_evicted:
            return False
        if policy.requires_queries and not (has_queries if is_first else policy.is_prompt_only):
            return False
        return is_first or self.codec is None

    def replay_step(
        self,
        layers: Sequence[LayerCache],
        num_new: int,
        *,
        end_chunk: bool = False,
        queries: Sequence[Floats] | None = None,
        model_seconds: float = 0.0,
    ) -> None:
        """Advance by one step as `step` does, with K and V of an earlier run of the same step instead of the model.

        Parameters
        ----------
        layers
            K and V of every layer, in order, of at least all tokens up to the end of the step.
        num_new
            Tokens of the step.
        end_chunk
            As for `step`.
        queries
            Rotated queries of the step by layer, float32 ``[query_head, token, head_dim]``, where a policy needs them.
        model_seconds
            What the model took for the step, for `timings`.

        Raises
        ------
        KvmnnError
            For K and V that are not of this model, and under a policy that evicts where it ranks by attention, or by
            queries that are not given, acts before tokens are attended, or has evicted something already.
        """
        policy, num_seen = self.policy, self.cache.num_seen
        if not self._is_consistent:
            raise KvmnnError("an earlier step failed: reset the runner first")
        if self._check_layers(layers) < num_seen + num_new or num_new < 1:
            raise KvmnnError(f"K and V of {layers[0].tokens:,} tokens: a step of {num_new:,} follows {num_seen:,}")
        needs_queries = policy.requires_queries and queries is None and not (num_seen and policy.is_prompt_only)
        if policy.can_evict and (
            policy.requires_attention
            or needs_queries
            or Trigger.AFTER_APPEND in policy.triggers
            or self.cache.has_evicted
        ):
            raise KvmnnError(f"{policy.name} cuts as tokens are fed: only first steps can be taken from elsewhere")
        self._is_consistent = False
        start_time = perf_counter()
        self.cache.begin_step(num_new)
        end = num_seen + num_new
        present = [(cache.keys[np.newaxis, :, :end], cache.values[np.newaxis, :, :end]) for cache in layers]
        step_queries = None if queries is None else list(queries)
        self.cache.end_step(StepResult(np.zeros((0, 0), np.float32), present, None, 0.0, step_queries))
        if end_chunk:
            self.cache.end_chunk()
        self._quantize_due()
        self.timings.policy_seconds += perf_counter() - start_time
        self.timings.model_seconds += model_seconds
        self.timings.num_tokens += num_new
        self._is_consistent = True

    def step(self, ids: npt.ArrayLike, *, end_chunk: bool = False, is_prompt: bool = False) -> Floats:
        """Feed further tokens of the text to the model, and cut the cache.

        Parameters
        ----------
        ids
            Integers ``[token]``, at least one. They are read in one step, or one by one where layers contain different
            numbers of tokens and the graph would mask them wrongly.
        end_chunk
            Whether a chunk of the text ends with these tokens; some policies cut then.
        is_prompt
            Whether the tokens are (part of) a prompt: the engine's planner does not score or plan, and the lossless
            runtime encodes nothing. The first step of a text always is a prompt.

        Returns
        -------
        ndarray
            Logits, float32 ``[token, vocabulary]``.

        Raises
        ------
        KvmnnError
            For no tokens, or ids that are not of the model's vocabulary, which changes nothing. After any other error
            the cache is unusable until `reset`.
        """
        tokens = np.asarray(ids)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
            raise KvmnnError(f"ids are {tokens.dtype} {list(tokens.shape)}: expected at least one integer [token]")
        vocabulary = self.session.interface.vocab_size
        if tokens.min() < 0 or (vocabulary is not None and tokens.max() >= vocabulary):
            raise KvmnnError(f"ids reach from {tokens.min()} to {tokens.max()}: the vocabulary has {vocabulary}")
        if not self._is_consistent:
            raise KvmnnError("an earlier step failed: reset the runner first")
        self._is_consistent = False
        tokens = tokens.astype(np.int64)
        cache, timings = self.cache, self.timings
        first_position = cache.num_seen if self._positions == "true" else cache.tokens[0]
        positions = np.arange(first_position, first_position + len(tokens), dtype=np.int64)
        start_time = perf_counter()
        past, bias = cache.begin_step(len(tokens), is_prompt=is_prompt)
        # K and V of replayed steps may be views of longer arrays.
        past = [(np.ascontiguousarray(keys), np.ascontiguousarray(values)) for keys, values in past]
        self.num_tokens_after_cut += len(tokens) if cache.has_evicted else 0
        self.num_tokens_after_loss += len(tokens) if self._has_lossy_cache() else 0
        timings.policy_seconds += perf_counter() - start_time
        has_unequal_lengths = len({keys.shape[2] for keys, _ in past}) > 1
        if len(tokens) > 1 and has_unequal_lengths and not self.session.can_chunk_unequal_lengths():
            step = self._step_one_by_one(tokens, positions, past, bias)
        elif bias is None and (size := self._compute_part_size(len(tokens), past[0][0].shape[2])) < len(tokens):
            step = self._step_in_parts(tokens, positions, past, size, queries=self._needs_queries)
        else:
            key_positions = None
            if self.session.interface.key_position_inputs and self._positions == "true":
                key_positions = cache.get_key_positions()
            step = self._run_step(tokens, positions, past, bias, key_positions, queries=self._needs_queries)
        if self.on_step is not None:
            self.on_step(step)
        start_time = perf_counter()
        cache.end_step(step)
        if end_chunk:
            cache.end_chunk()
        self._quantize_due()
        timings.policy_seconds += perf_counter() - start_time
        timings.model_seconds += step.seconds
        timings.num_tokens += len(tokens)
        self._is_consistent = True
        return step.logits

    @property
    def _needs_queries(self) -> bool:
        return self.policy.requires_queries or self.requests_queries

    def _run_step(
        self,
        ids: TokenArray,
        positions: TokenArray,
        past: Sequence[KVPair],
        bias: Sequence[Floats] | None = None,
        key_positions: Mapping[int, TokenArray] | None = None,
        *,
        queries: bool = False,
    ) -> StepResult:
        step = self.session.run_step(ids, positions, past, bias, key_positions, queries=queries)
        if self.attention_sums is not None and step.attentions is not None:
            self.attention_sums.add(step.attentions, int(positions[-1]) + 1)
        return step

    def _has_lossy_cache(self) -> bool:
        """Return whether the next step attends to a cache that is not the one that the model computed."""
        if self.cache.has_evicted or self._has_initial:
            return True
        if isinstance(self._kv_store, QuantizedStore):
            return self._kv_store.has_quantized
        is_lossy = self._lossless is not None and self._lossless.is_lossy
        return is_lossy and isinstance(self._kv_store, LosslessStore) and self._kv_store.has_encoded

    def _compute_part_size(self, num_tokens: int, num_past: int) -> int:
        """Return the tokens of one part of a text's first step, and all tokens of any other step."""
        policy, interface = self.policy, self.session.interface
        if num_past:
            return num_tokens
        heads = self.session.query_heads or interface.kv_heads
        token_bytes = _FLOAT32_BYTES * interface.layers * heads * num_tokens
        is_read = policy.requires_attention or self.attention_sums is not None
        max_bytes = MAX_ATTENTION_BYTES if is_read else MAX_UNREAD_ATTENTION_BYTES
        return max(MIN_STEP_TOKENS, max_bytes // token_bytes)

    def _step_in_parts(
        self, ids: TokenArray, positions: TokenArray, past: Sequence[KVPair], size: int, *, queries: bool
    ) -> StepResult:
        """Feed a prompt in parts; return what one step would, but attention of one row: the sum over all tokens.

        Attention of n tokens is n x n numbers for each head of each layer: 4.5 GB for 2,048 tokens of 30 layers of 9.
        """
        num_tokens, seconds = len(ids), 0.0
        logits: Floats | None = None
        sums: list[Floats] = []
        all_queries: list[Floats] = []
        for begin in range(0, num_tokens, size):
            end = min(begin + size, num_tokens)
            step = self._run_step(ids[begin:end], positions[begin:end], past, queries=queries)
            for layer, layer_queries in enumerate(step.queries or ()):
                if begin == 0:
                    heads, _, head_dim = layer_queries.shape
                    all_queries.append(np.empty((heads, num_tokens, head_dim), np.float32))
                all_queries[layer][:, begin:end] = layer_queries
            past, seconds = step.present_pairs, seconds + step.seconds
            if logits is None:
                logits = np.empty((num_tokens, step.logits.shape[1]), np.float32)
            logits[begin:end] = step.logits
            for layer, attention in enumerate(step.attentions or ()):
                if begin == 0:
                    sums.append(np.zeros((attention.shape[0], 1, num_tokens), np.float32))
                sums[layer][:, 0, :end] += attention.sum(axis=1)
        return StepResult(
            np.zeros((0, 0), np.float32) if logits is None else logits,
            list(past),
            sums if self.policy.requires_attention else None,
            seconds,
            all_queries or None,
            num_summed=num_tokens,
        )

    def _step_one_by_one(
        self, ids: TokenArray, positions: TokenArray, past: Sequence[KVPair], bias: Sequence[Floats] | None
    ) -> StepResult:
        """Feed several tokens one by one; return what one step would return if the graph masked correctly."""
        steps: list[StepResult] = []
        for i in range(len(ids)):
            num_later = len(ids) - 1 - i
            masks = None
            if bias is not None:
                masks = [np.ascontiguousarray(mask[..., : mask.shape[3] - num_later]) for mask in bias]
            steps.append(
                self._run_step(ids[i : i + 1], positions[i : i + 1], past, masks, queries=self.policy.requires_queries)
            )
            past = steps[-1].present_pairs
        attentions = None
        if steps[0].attentions is not None:
            rows = [step.attentions for step in steps if step.attentions is not None]
            # Each token attends to a slot more than the one before it.

            attentions = []
            for layer in range(len(past)):
                attention = np.zeros((rows[0][layer].shape[0], len(rows), rows[-1][layer].shape[2]), np.float32)
                for i, row in enumerate(rows):
                    attention[:, i, : row[layer].shape[2]] = row[layer][:, 0]
                attentions.append(attention)
        logits = np.concatenate([step.logits for step in steps])
        queries = None
        if steps[0].queries is not None:
            parts = [step.queries or [] for step in steps]
            queries = [np.concatenate([part[layer] for part in parts], axis=1) for layer in range(len(past))]
        return StepResult(logits, list(past), attentions, sum(step.seconds for step in steps), queries)

    def _check_layers(self, layers: Sequence[LayerCache], *, require_whole: bool = True) -> int:
        """Check that layers match the model; return their tokens, which must be equal with `require_whole`."""
        interface = self.session.interface
        tokens = layers[0].tokens if layers else 0
        if len(layers) != interface.layers or not tokens:
            shape_text = f"{len(layers)} layers of {tokens} tokens"
            raise KvmnnError(f"{shape_text}: {interface.label} has {interface.layers}, of at least one token here")
        for number, cache in enumerate(layers):
            expected_shape = (interface.kv_heads, tokens if require_whole else cache.tokens, interface.head_dim)
            shapes = {cache.keys.shape, cache.values.shape}
            if cache.layer != number or shapes != {expected_shape} or cache.keys.dtype != interface.dtype:
                shape_text = " and ".join(str(list(shape)) for shape in sorted(shapes))
                raise KvmnnError(
                    f"layer {cache.layer}, {cache.dtype} {shape_text}: expected layer {number}, "
                    f"{np.dtype(interface.dtype).name} {list(expected_shape)}"
                )
            if cache.tokens_seen != layers[0].tokens_seen:
                raise KvmnnError(f"layer {number}: {cache.tokens_seen} tokens seen, layer 0 {layers[0].tokens_seen}")
            if not np.array_equal(cache.positions, np.arange(tokens)) or cache.tokens_seen != tokens:
                if require_whole:
                    raise KvmnnError(f"layer {number}: holds not all tokens of a text's beginning")
                if not interface.has_positions:
                    raise KvmnnError(f"{interface.label} has no input for positions: these lack tokens of their text")
        return tokens


def explain_no_warm_start(policy: Policy) -> str | None:
    """Explain why a policy cannot begin with K and V that were computed elsewhere; None if it can."""
    if policy.requires_attention:
        return "ranks tokens by the attention that they drew, which nobody saw of K and V from elsewhere"
    if policy.requires_queries:
        return "ranks tokens by queries, which nobody saw of K and V from elsewhere"
    if Trigger.AFTER_APPEND in policy.triggers:
        return "cuts before tokens are attended, and K and V from elsewhere were computed without that"
    return None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Settings of a model, for any text and policy.

    Parameters
    ----------
    tokenizer
        Its ``tokenizer.json``; by default the one alongside the model.
    chunk
        Tokens of the prompt that are fed at once; None feeds all in one step, which policies that act once on a prompt
        expect.
    packed
        Store the cache in the packed layout of this backend (`Runner`).
    lossless
        Store the cache in a lossless runtime of these options.
    threads
        Threads of onnxruntime; 0 leaves the number to it.
    providers
        Execution providers of onnxruntime, the preferred one first.
    """

    tokenizer: str | os.PathLike[str] | None = None
    chunk: int | None = None
    packed: str | None = None
    lossless: RuntimeConfig | None = None
    threads: int = 1
    providers: Sequence[str] = CPU_PROVIDERS

    def open_model(
        self, model: str | os.PathLike[str], policy: Policy, *, attentions: bool = False
    ) -> tuple[DecoderSession, Tokenizer]:
        """Open the model, with attention probabilities if the policy or the caller needs them, and its tokenizer.

        Raises
        ------
        MissingDependencyError
            If onnxruntime, onnx or tokenizers is not installed.
        SourceError, ModelError
            As `DecoderSession.open` and `Tokenizer.open_for_model`.
        """
        tokenizer = Tokenizer.open_for_model(self.tokenizer or model)
        session = DecoderSession.open(
            model, attentions=attentions or policy.requires_attention, threads=self.threads, providers=self.providers
        )
        return session, tokenizer

    def create_runner(self, session: DecoderSession, policy: Policy) -> Runner:
        """Create the model's runner under a policy."""
        return Runner(session, policy, packed=self.packed, lossless=self.lossless)


MAX_STEP_BYTES = 64 << 20  # about the largest size of the logits and attention scores of one step
MAX_ATTENTION_BYTES = 96 << 20  # of the attention of all layers in one part of a prompt
MAX_UNREAD_ATTENTION_BYTES = 256 << 20
"""Where nobody reads it: onnxruntime holds the attention of all layers until a step ends, as imported graphs have it as
outputs: 6.9 GB for a prompt of 2,048 tokens of SmolLM2 in one step."""
MIN_STEP_TOKENS = 16  # of one step: with fewer the matrix products of a layer are too small to be fast
_NUM_SCORE_COPIES = 3  # scores, masked scores and probabilities, of the layer that runs
_FLOAT32_BYTES = 4
_DEFAULT_QUERY_HEADS_PER_KV_HEAD = 8  # most models have fewer


def feed_prompt_steps(runner: Runner, ids: Sequence[int]) -> Iterator[Floats]:
    """Feed a prompt in steps of bounded size; yield the logits of each."""
    # Attention of a prompt of n tokens takes n x n scores for each head and, where the session reports probabilities,
    # for each layer. The engine's planner does nothing at a prompt and the lossless runtime encodes nothing, so both
    # allow several steps. Another policy that evicts gets its prompt in one step, as from `Runner.step`; so does every
    # policy that evicts where tokens follow an answer.
    is_first_step = not runner.cache.num_seen
    if runner.policy.can_evict and not (is_first_step and isinstance(runner.policy, H2OEngine)):
        yield runner.step(ids, end_chunk=True)
        return
    tokens = np.asarray(ids)
    size = compute_step_tokens(runner.session, runner.cache.num_seen + len(tokens))
    for begin in range(0, len(tokens), size):
        end = begin + size
        yield runner.step(tokens[begin:end], end_chunk=end >= len(tokens), is_prompt=is_first_step)


def compute_step_tokens(session: DecoderSession, tokens: int) -> int:
    """Return how many tokens one step of a prompt reads."""
    interface = session.interface
    heads = session.query_heads or _DEFAULT_QUERY_HEADS_PER_KV_HEAD * interface.kv_heads
    copies = interface.layers if session.has_attentions else _NUM_SCORE_COPIES
    token_bytes = _FLOAT32_BYTES * (interface.vocab_size + copies * heads * tokens)
    return max(MIN_STEP_TOKENS, MAX_STEP_BYTES // token_bytes)
