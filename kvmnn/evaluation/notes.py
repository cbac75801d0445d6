"""Notes that explain an evaluation's numbers, in sentences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .._util.text import LOSSY, pluralize
from ..lm.documents import Document
from ..lm.kv_store import describe_encoding
from ..policies.heavy_hitter import H2OTokens
from ..policies.profiled import ProfiledPolicy
from ..policies.registry import get_policy_class
from ..policies.specs import build_policy
from ..profiles import Profile, ProfileInfo, describe_few_tokens
from ..quantization import create_codec
from ..quantization.transform_codec import TransformCodec
from ..reports.records import NOT_CUT, UNCUT_LABEL, ResultRow
from ..reports.series import has_equal_cuts, select_divergences
from ..reports.table import NO_EVICTION_MARK, PARTLY_EVICTED_MARK
from ..reports.tables import format_min_max
from ..transform.steps import is_size_missed
from .oracle import describe_headroom
from .scoring import MIN_DOCUMENTS_FOR_INTERVAL
from .settings import FULL_POLICY, EvaluationSettings


def build_notes(
    rows: Sequence[ResultRow], documents: Sequence[Document], settings: EvaluationSettings
) -> Iterator[str]:
    """Build notes about rows, one for each fact that a table does not show."""
    yield from _describe_short_texts(documents, settings)
    yield from _describe_presets(rows)
    yield from _describe_unequal_budgets(rows)
    yield from _describe_prompt_budgets(rows)
    yield from _describe_windows(rows)
    yield from _describe_lost_neighbours(rows, settings)
    yield from _describe_no_eviction(rows, documents, settings)
    yield from _describe_late_eviction(rows, documents, settings)
    yield from _describe_unequal_layers(rows)
    unseen_codecs = [row.label for row in rows if row.codec is not None and row.divergence and not row.cut_divergence]
    if unseen_codecs:
        yield (
            f"Marked {NO_EVICTION_MARK}, as no scored token saw a quantised cache: {'; '.join(unseen_codecs)}: quality "
            "is that of the full cache and says nothing of the codec."
        )
    yield from _describe_few_quantized(rows)
    if any(row.codec is not None for row in rows):
        yield (
            "Codecs: K and V are quantised once, after the step that attended them and after the cut; the model then "
            "reads what a decoder would. Bytes/token and LOSSY ratio are of the format (rows that are not quantised "
            "yet as fp16), LOSSLESS ratio is those over the entropy-coded bytes (zstd; frames), decoded and compared; "
            "cache mean and peak are -, as the numbers are held dequantized here."
        )
    yield from _describe_prompt_codecs(rows, documents, settings)
    yield from _describe_profiles(rows, documents, settings)
    yield from _describe_target_divergences(rows)
    yield from _describe_target_divergences_behind_policies(rows)
    yield from _describe_missed_sizes(rows)
    yield from _describe_larger_rows(rows)
    yield from _describe_few_documents(rows)
    yield from describe_headroom(rows)
    if settings.runtime_config is not None:
        runs = ((row.label, text.runtime) for row in rows for text in row.documents if text.runtime is not None)
        yield from describe_encoding(runs, settings.runtime_config)


def _describe_short_texts(documents: Sequence[Document], settings: EvaluationSettings) -> Iterator[str]:
    short_documents = [document for document in documents if document.num_fed < settings.tokens]
    start_note = " after the start" if any(document.scored_from for document in documents) else ""
    if len(short_documents) > _MAX_NAMED_TEXTS:
        shortest_document, longest_document = (
            min(short_documents, key=lambda document: document.num_fed),
            max(short_documents, key=lambda document: document.num_fed),
        )
        yield (
            f"{len(short_documents):,} of {pluralize(len(documents), 'text')} have fewer than the {settings.tokens:,} "
            f"tokens asked for, {shortest_document.num_fed:,} ({shortest_document.name}) to "
            f"{longest_document.num_fed:,}: all of them was scored{start_note}; shares of budgets are of "
            f"{settings.tokens:,}."
        )
        return
    if all(document.num_scored == 1 for document in documents):
        yield "1 token is scored in each text, and none before it has a cache: expected longer texts."
    for document in short_documents:
        yield (
            f"{document.name} has only {pluralize(document.num_fed, 'token')} to score, {settings.tokens:,} were "
            f"asked for: all of it was scored{start_note}; shares of budgets are of {settings.tokens:,}."
        )


_MAX_NAMED_TEXTS = 3
"""Short texts that have a sentence each."""


def _describe_presets(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Describe the options of presets, which their projects chose; kvmnn's policies have other defaults."""
    for preset in dict.fromkeys(row.preset for row in rows if row.preset is not None):
        policies: dict[str, dict[str, dict[str, None]]] = {}
        for row in rows:
            if row.preset == preset and not row.is_full:
                policy_options = policies.setdefault(row.policy, {})
                for name, value in row.options.items():
                    if value is not None:
                        policy_options.setdefault(name, {})[_format_option(value)] = None
        parts = []
        for policy, options in policies.items():
            option_texts = [f"{name}={'/'.join(values)}" for name, values in options.items()]
            parts.append(f"{policy} with {', '.join(option_texts)}")
        if parts:
            yield f"Preset {preset}, options of its project where you said none: {'; '.join(parts)}."


def _format_option(value: object) -> str:
    """Format a value as in a policy spec."""
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_few_documents(rows: Sequence[ResultRow]) -> Iterator[str]:
    document_counts = [row.versus_full.documents for row in rows if row.versus_full is not None]
    if not document_counts or document_counts[0] >= MIN_DOCUMENTS_FOR_INTERVAL:
        return
    if document_counts[0] == 1:
        yield "One document: there is no interval for the differences to the full cache."
        return
    range_note = (
        ": of 2 documents one is their range and holds the true difference half of the time"
        if document_counts[0] == 2
        else ""
    )
    yield (
        f"The intervals are over {document_counts[0]} documents: with fewer than {MIN_DOCUMENTS_FOR_INTERVAL} they are "
        f"too narrow to be cited{range_note} (docs/lm.md)."
    )


def _describe_unequal_budgets(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Warn if policies did not all run with the same budgets, so that rows are not comparable."""
    sizes: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.policy != FULL_POLICY:
            sizes.setdefault(row.policy, {})[_format_size(row)] = None
    if len({frozenset(policy_sizes) for policy_sizes in sizes.values()}) < 2:
        return
    sizes_text = "; ".join(f"{policy} {' and '.join(policy_sizes)}" for policy, policy_sizes in sizes.items())
    unbudgeted = [policy for policy, policy_sizes in sizes.items() if _NO_BUDGET in policy_sizes]
    reasons = "".join(
        f" Of {policy}: {get_policy_class(policy).budget_help.replace('`', '')}." for policy in unbudgeted
    )
    yield f"Policies ran with unequal budgets: {sizes_text}. Compare rows of one budget only.{reasons}"


_NO_BUDGET = "none"


def _format_size(row: ResultRow) -> str:
    if row.budget is not None:
        return f"{row.budget:,}"
    return _NO_BUDGET if row.keep_ratio is None else f"{100 * row.keep_ratio:.4g} %"


def _describe_prompt_budgets(rows: Sequence[ResultRow]) -> Iterator[str]:
    labels = [row.label for row in rows if row.prompt_only and not row.has_no_eviction]
    if labels:
        yield (
            f"Cut once, at the end of the prompt: {'; '.join(labels)}. Their budget is of the prompt; all later tokens "
            "stay (tokens kept), so they hold more than rows of the same budget that cut at every step."
        )


def _describe_windows(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Warn of policies whose window of latest tokens takes the whole budget."""
    labels = [
        row.label
        for row in rows
        if row.policy in _WINDOW_POLICIES
        and isinstance(window := row.options.get("window"), int)
        and row.budget is not None
        and row.budget <= window
    ]
    if labels:
        yield (
            f"The window is the whole budget: {'; '.join(labels)}. The window's tokens always stay, so these rows are "
            "of the latest tokens alone (window=N makes it smaller)."
        )


_WINDOW_POLICIES = ("snapkv", "pyramidkv")


def _describe_lost_neighbours(rows: Sequence[ResultRow], settings: EvaluationSettings) -> Iterator[str]:
    """Warn of cuts before a chunk is attended that leave none of the tokens right before it."""
    policies = ((row.label, build_policy(row.policy, row.options)) for row in rows if row.policy == H2OTokens.name)
    labels = [
        label
        for label, policy in policies
        if isinstance(policy, H2OTokens) and policy.buffer < settings.chunk >= policy.recent
    ]
    if labels:
        yield (
            f"Cut before a chunk is attended, as its {settings.chunk:,} tokens exceed buffer, and of all recent tokens "
            f"only the chunk stays, as recent is no more: {'; '.join(labels)}. Its tokens attend to none of those "
            f"right before it, which costs much: expected buffer={settings.chunk} or a larger recent."
        )


def _describe_profiles(
    rows: Sequence[ResultRow], documents: Sequence[Document], settings: EvaluationSettings
) -> Iterator[str]:
    """Describe what the profiles of codecs take, which no row counts, and of what profiles are made."""
    codecs = (create_codec(spec) for spec in dict.fromkeys(row.codec for row in rows if row.codec is not None))
    codec_paths = [codec.profile for codec in codecs if isinstance(codec, TransformCodec)]
    policies = (build_policy(row.policy, row.options) for row in rows if "profile" in row.options)
    policy_paths = [policy.profile for policy in policies if isinstance(policy, ProfiledPolicy)]
    runtime_profile = None if settings.runtime_config is None else settings.runtime_config.profile
    runtime_paths = [runtime_profile] if isinstance(runtime_profile, str) else []
    for path in dict.fromkeys([*codec_paths, *policy_paths, *runtime_paths]):
        if not os.path.isfile(path):  # all was measured before, with --resume
            continue
        profile, name = Profile.read(path), os.path.basename(path)
        if path in codec_paths:
            yield (
                f"{name} has {profile.nbytes:,} bytes, once for all texts of the model, which no row counts"
                f"{'; '.join(['', *describe_few_tokens(profile.info)])}."
            )
        yield from _describe_calibration_texts(name, profile.info, documents)


def _describe_calibration_texts(name: str, info: ProfileInfo, documents: Sequence[Document]) -> Iterator[str]:
    """Warn of texts that a profile was made of: by SHA-256, or by name where the profile records none."""
    digests = {text.sha256 for text in info.texts}
    cache_names = {Path(text.name).stem for text in info.texts if text.sha256 is None}
    effect_text = "KL and sizes of its rows may be better than on texts that it has not seen."
    for prefix, suffix, names in (
        (
            f"{name} was made of texts that are scored here, by their SHA-256",
            effect_text,
            [document.name for document in documents if document.sha256 in digests],
        ),
        (
            f"{name} was made of caches that have the names of texts scored here (it records no SHA-256)",
            f"If they are of these texts, {effect_text}",
            [document.name for document in documents if Path(document.name).stem in cache_names],
        ),
    ):
        if names:
            more = f" and {len(names) - _MAX_NAMED_TEXTS:,} more" if len(names) > _MAX_NAMED_TEXTS else ""
            yield f"{prefix}: {', '.join(names[:_MAX_NAMED_TEXTS])}{more}. {suffix}"


def _describe_target_divergences(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Compare the divergence that codecs were asked for with the measured one."""
    targets = [(row.label, row.target_divergence) for row in rows if row.target_divergence is not None]
    for label, entry in targets:
        interval = "no interval, one text" if entry.low is None else f"95 % {entry.low:.2g} to {entry.high:.2g}"
        yield (
            f"{label}: KL of {entry.target:g} nats was asked for, {entry.measured:.2g} measured ({interval}), "
            f"{entry.measured / entry.target:.2g} times as much"
            f"{_EXCEEDED_TEXT if entry.is_exceeded else '.'}"
        )


def _describe_target_divergences_behind_policies(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Say what codecs behind policies were asked for, and the divergence with and without them: it does not add up."""
    plain = {_get_policy_key(row): row for row in rows if row.codec is None and row.cut_divergence is not None}
    pairs_by_target: dict[float, list[tuple[ResultRow, ResultRow | None]]] = {}
    for row in rows:
        codec = create_codec(row.codec) if row.codec is not None and row.policy != FULL_POLICY else None
        target = codec.target_kl if isinstance(codec, TransformCodec) else None
        if target is None or row.cut_divergence is None:
            continue
        pairs_by_target.setdefault(target, []).append((row, plain.get(_get_policy_key(row))))
    for target, pairs in pairs_by_target.items():
        compared_rows = [row for pair in pairs for row in pair if row is not None]
        divergences = zip(compared_rows, select_divergences(compared_rows), strict=True)
        kl_by_row = {id(row): f"{divergence.kl:.2g}" for row, divergence in divergences if divergence is not None}
        texts = [
            f"{row.label} {kl_by_row.get(id(row), '-')}"
            + ("" if uncoded is None else f" ({kl_by_row.get(id(uncoded), '-')} without)")
            for row, uncoded in pairs
        ]
        advice = "" if all(uncoded for _, uncoded in pairs) else " (--quant none adds rows without it)"
        scope = "" if has_equal_cuts(compared_rows) else ", over all scored tokens, as those after the cuts differ"
        yield (
            f"KL of {target:g} nats was asked for of the codec; behind policies what they cost is in it{advice}"
            f"{scope}: {'; '.join(texts)}."
        )


def _get_policy_key(row: ResultRow) -> tuple[object, ...]:
    return row.policy, repr(sorted(row.options.items())), row.preset, row.positions


def _describe_missed_sizes(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Name rows whose codec was asked for a ratio or for bits, and missed it."""
    missed = []
    for row in rows:
        codec = None if row.codec is None else create_codec(row.codec)
        if not isinstance(codec, TransformCodec) or not codec.has_size or not row.quantized_bits:
            continue
        is_ratio = codec.ratio is not None
        name, target = ("ratio", codec.ratio) if is_ratio else ("bits", codec.bits)
        reached = 16 / row.quantized_bits if is_ratio else row.quantized_bits
        if target is not None and is_size_missed(reached, target):
            missed.append(f"{row.label}: {name} {target:g} was asked for, {reached:.3g} reached")
    if missed:
        yield (
            f"{'; '.join(missed)}. Steps follow the profile and not the text, and every stream of "
            "a few tokens has its own header."
        )


def _describe_larger_rows(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Name rows that take more bytes behind a policy than their codec alone."""
    alone = {row.codec: row for row in rows if row.codec is not None and row.policy == FULL_POLICY}
    larger = [
        f"{row.label} ({row.bytes_per_token:,.0f} for {alone[row.codec].bytes_per_token:,.0f} bytes/token)"
        for row in rows
        if row.policy != FULL_POLICY
        and row.codec in alone
        and (row.bytes_per_token or 0) > (alone[row.codec].bytes_per_token or 0)
    ]
    if larger:
        yield (
            f"More bytes than their codec takes without the policy: {'; '.join(larger)}. Tokens of heads that hold "
            "different ones are coded head by head, by nothing below, and tokens that wait for the codec count as fp16."
        )


_EXCEEDED_TEXT = (
    ": more than was asked for. A profile predicts the mean over texts like its own; a smaller kl costs bytes and "
    "lowers it."
)

_MIN_QUANTIZED_SHARE = 0.5


def _describe_few_quantized(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Name rows behind a policy whose codec quantised little of what was kept, so that they are those of the policy."""
    shares = [
        f"{row.label} ({row.quantized_share:.0%})"
        for row in rows
        if row.quantized_share is not None and row.policy != FULL_POLICY and row.quantized_share < _MIN_QUANTIZED_SHARE
    ]
    has_idle_codec = any(row.has_idle_codec for row in rows if row.policy != FULL_POLICY)
    if shares:
        yield (
            f"Little of what was kept at the end is quantised: {'; '.join(shares)}. The rest is stored and counted as "
            "fp16, as the policy keeps few tokens beyond those that the codec leaves."
            + (f" Rows of 0% are marked {NO_EVICTION_MARK}, and none is the best." if has_idle_codec else "")
        )


def _describe_prompt_codecs(
    rows: Sequence[ResultRow], documents: Sequence[Document], settings: EvaluationSettings
) -> Iterator[str]:
    """Say of how many tokens the bytes of a codec are that takes the first step alone."""
    max_tokens, first_step_tokens = _count_longest(documents, settings)
    labels = [row.label for row in rows if row.codes_prompt_only]
    if labels and first_step_tokens < max_tokens:
        yield (
            f"Only the first step is coded, {first_step_tokens:,} of up to {max_tokens:,} tokens: {'; '.join(labels)}. "
            "Later tokens are stored and counted as fp16: bytes/token and LOSSY ratio are of both: compare rows "
            "of when=prompt (--prefill-tokens sets the first step)."
        )


def _describe_unequal_layers(rows: Sequence[ResultRow]) -> Iterator[str]:
    unequal_rows = [row for row in rows if row.unequal_layers]
    if not unequal_rows:
        return
    labels = "; ".join(
        f"{row.label} ({format_min_max(row.tokens_kept)})" if row.tokens_kept else row.label for row in unequal_rows
    )
    yield f"Layers hold unequal numbers of tokens (the least and the most): {labels}."
    skipping_labels = [row.label for row in unequal_rows if row.options.get("skip_layers")]
    if skipping_labels:
        yield (
            f"Some layers are never cut: {'; '.join(skipping_labels)}. They hold more than rows of the same budget "
            "that cut every layer."
        )


def _describe_no_eviction(
    rows: Sequence[ResultRow], documents: Sequence[Document], settings: EvaluationSettings
) -> Iterator[str]:
    """Name the rows that evicted nothing, which are not comparable, and the reason of each."""
    if any(row.has_no_eviction for row in rows):
        yield (
            f"Rows marked {NO_EVICTION_MARK} evicted nothing before the last token was scored: their quality is that "
            "of the cache without the policy and says nothing of it, so that none of them is the best of its budget."
        )
    uncut_texts: dict[str, list[str]] = {}
    for row in rows:
        if row.num_uncut_documents and not row.has_no_eviction:
            names = [text.name for text in row.documents if text.evicted is False]
            more = f" and {len(names) - _MAX_NAMED_TEXTS:,} more" if len(names) > _MAX_NAMED_TEXTS else ""
            uncut_texts.setdefault(f"{', '.join(names[:_MAX_NAMED_TEXTS])}{more}", []).append(row.label)
    for names_text, labels in uncut_texts.items():
        yield (
            f"Marked {PARTLY_EVICTED_MARK}, as nothing was evicted of {names_text} before the last token was scored, "
            f"which all figures but those after the cut include: {'; '.join(labels)}."
        )
    max_tokens, first_step_tokens = _count_longest(documents, settings)
    yield from group_by_reason(
        (row.label, f"nothing was evicted: {_explain_no_eviction(row, first_step_tokens, max_tokens, settings.chunk)}.")
        for row in rows
        if _keeps_everything(row, rows, first_step_tokens, max_tokens)
    )


def _count_longest(documents: Sequence[Document], settings: EvaluationSettings) -> tuple[int, int]:
    """Return the tokens of the longest text, and of its first step."""
    max_tokens = max(document.num_fed for document in documents)
    return max_tokens, documents[0].scored_from or min(settings.prompt or settings.chunk, max_tokens)


def _keeps_everything(row: ResultRow, rows: Sequence[ResultRow], first_step_tokens: int, max_tokens: int) -> bool:
    """Return whether the policy of a row evicted nothing, not even after the last token was scored."""
    if row.policy == FULL_POLICY or row.label == UNCUT_LABEL or row.evicted:
        return False
    if row.initial_cache is not None:  # whose rows are LOSSY because of the cache alone
        start_row = next((entry for entry in rows if entry.initial_cache and entry.policy == FULL_POLICY), None)
        return start_row is not None and row.tokens_kept == start_row.tokens_kept
    if row.kind == NOT_CUT:
        return True
    if row.codec is None and row.runtime is None:
        return False
    policy = build_policy(row.policy, row.options)
    return policy.explain_no_eviction(first_step_tokens, max_tokens) is not None


def group_by_reason(reasons: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield one sentence for each reason, preceded by the labels of its rows."""
    labels: dict[str, list[str]] = {}
    for label, reason in reasons:
        labels.setdefault(reason, []).append(label)
    yield from (f"{'; '.join(group_labels)}: {reason}" for reason, group_labels in labels.items())


def _explain_no_eviction(row: ResultRow, first_step_tokens: int, max_tokens: int, chunk: int) -> str:
    policy = build_policy(row.policy, row.options)
    return (
        policy.explain_no_eviction(first_step_tokens, max_tokens)
        or policy.explain_few_steps(-(-(max_tokens - first_step_tokens) // chunk))
        or "no step gave it reason to"
    )


def _describe_late_eviction(
    rows: Sequence[ResultRow], documents: Sequence[Document], settings: EvaluationSettings
) -> Iterator[str]:
    """Name the rows that evicted only after all tokens were scored, so that their quality is that of the full cache."""
    steps = [_count_step_tokens(document, settings) for document in documents]
    max_tokens, first_step_tokens = _count_longest(documents, settings)
    evicting_rows = [
        row
        for row in rows
        if row.kind == LOSSY
        and row.policy != FULL_POLICY
        and not _keeps_everything(row, rows, first_step_tokens, max_tokens)
    ]
    late_labels = [
        row.label
        for row in evicting_rows
        if (_is_scored_before_eviction(row, steps) if row.evicted is None else not row.evicted)
    ]
    if late_labels:
        yield (
            f"No scored token saw the cut cache: {'; '.join(late_labels)}: a cache is cut after a step, and the first "
            "cut came after the last one, so quality is that of the cache without the policy. Expected a smaller "
            "--chunk or --prefill-tokens, or more --max-tokens."
        )


def _count_step_tokens(document: Document, settings: EvaluationSettings) -> tuple[int, int]:
    """Return the tokens of a text's first step (an initial cache is one), and those fed before its last step."""
    tokens = document.num_fed
    first_step_tokens = document.scored_from or min(settings.prompt or settings.chunk, tokens)
    return first_step_tokens, 0 if first_step_tokens == tokens else first_step_tokens + (
        tokens - first_step_tokens - 1
    ) // settings.chunk * settings.chunk


def _is_scored_before_eviction(row: ResultRow, steps: Sequence[tuple[int, int]]) -> bool:
    """Return whether the policy had no reason to evict before the last step of any text."""
    policy = build_policy(row.policy, row.options)
    return all(
        not tokens_before or policy.explain_no_eviction(first_step_tokens, tokens_before) is not None
        for first_step_tokens, tokens_before in steps
    )
