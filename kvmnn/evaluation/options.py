"""The settings of an evaluation and the options of ``kvmnn eval`` for them, declared once, without numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from .._util.dataclass import dataclass
from .._util.option_fields import option


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Fields of `EvaluationSettings`."""

    #: Tokens scored of each document.
    tokens: int = field(
        default=2048,
        metadata=option(
            "tokens of each text that are scored (default: 2048)", flag="--max-tokens", dest="max_tokens", min_value=1
        ),
    )
    #: Tokens fed at once.
    chunk: int = field(default=1, metadata=option("tokens fed at once (default: 1)", min_value=1))
    #: Tokens of the first step, read at once as a prompt; 0 for `chunk` of them. Policies that act on a prompt only
    #: need one.
    prompt: int = field(
        default=0,
        metadata=option(
            "tokens of the first step, a prompt (default: as --chunk)",
            flag="--prefill-tokens",
            dest="prefill_tokens",
            min_value=0,
        ),
    )
    #: Tokens fed at this position or later are also reported apart; half of `tokens` by default. The tokens of `prompt`
    #: are never among them: nothing has been cut yet when they are scored.
    deep_from: int = field(
        default=-1,
        metadata=option(
            "also report tokens from this position on, those of --prefill-tokens never (default: half of --max-tokens)",
            flag="--tail-start",
            min_value=0,
        ),
    )
    #: Seed of the bootstrap and of policies that draw at random.
    seed: int = field(
        default=0, metadata=option("random seed of policies, bootstrap and --samples (default: 0)", min_value=0)
    )
    #: Threads of onnxruntime in each process.
    threads: int = 1
    #: Execution providers of onnxruntime.
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    #: Evicted tokens that may stay masked in the buffers before they are cut out, or None (`kvmnn.lm.runner`).
    slack: int | None = field(
        default=None,
        metadata=option(
            "evicted tokens that may stay masked (default: 1 in 8 of those kept)", flag="--max-masked", min_value=0
        ),
    )
    #: Backend of the `PackedCache` that stores the cache, or None.
    packed: str | None = field(
        default=None,
        metadata=option(
            "store the cache in the packed layout of this MNN backend, such as x86-avx2",
            flag="--layout",
            metavar="BACKEND",
        ),
    )
    #: Element type of the frames of the kept cache: ``"fp16"``, rounded as in an engine, or ``"fp32"``.
    frame_dtype: Literal["fp16", "fp32"] = field(
        default="fp16",
        metadata=option(
            "element type of the frames: rounded to fp16 as in engines, or an fp32 cache unchanged (default: fp16)"
        ),
    )
    #: Repetitions of the timed generation; medians are reported.
    repeats: int = field(default=3, metadata=option("runs of the timed generation (default: 3)", min_value=1))
    #: Whether configurations of presets are also measured by their projects' definitions (JSON: ``as_seed``).
    project_definitions: bool = field(
        default=True,
        metadata={"key": "as_seed", **option("do not measure presets by their projects' definitions")},
    )
    #: Whether TTFT, TPOT and the time of attention are measured: about five times the time of everything else, as each
    #: row reads the first text again `repeats` + 1 times.
    timing: bool = field(
        default=False,
        metadata=option(
            "also measure TTFT, TPOT and attention time, which takes longer than all else", is_negatable=True
        ),
    )
    #: Whether memory and live tokens of the first document are recorded as a time series.
    traces: bool = False
    #: Options of the lossless runtime that stores the cache, under the engine's names (`RuntimeConfig.from_engine`), or
    #: None.
    lossless: Mapping[str, object] | None = field(default=None, metadata={"omit": True})
    #: Prefix store for beginnings of texts that were scored before (`kvmnn.evaluation.scoring`), or None. It only
    #: affects times and the process's peak memory.
    prefix_store: str | None = field(
        default=None,
        metadata={
            "omit": True,
            **option(
                "read prefixes of texts that were scored before from this prefix store", flag="--store", metavar="STORE"
            ),
        },
    )
