"""``kvmnn gate``: whether a run reaches what was asked of it."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from ...text import suggest
from .. import gate_options, gate_run, help, idle_options, printing, shared_options, streams
from ..printing import UsageError

if TYPE_CHECKING:
    from ...gates.checking.limits import GateLimits
    from ...gates.checking.metric_rows import MetricRows

_DESCRIPTION = """Judge runs of a compressed KV cache by gates: ratios, decode speed, waiting, fallbacks, consistency
(docs/gates.md). Exit code 0 where all pass, 1 where one fails.

  parse LOG...           tables of llm_bench, or records of llm_demo, as CSV
  check CSV...           judge the rows of a case, as the MNN fork does;
                         --strict: only what was measured
  demo WITHOUT WITH      judge runs of llm_demo without and with compression
  summary DIR            the cases in a folder, also one of the fork's scripts
  run MODEL              run the six cases on an ONNX decoder and judge them
  history DIR            the rounds of a folder of run, one after another

  kvmnn gate parse out/logs -o metrics.csv
  kvmnn gate check metrics.csv --case runtime_store --decode-baseline 5.01 \\
      --logs-dir out/logs -o round/
  kvmnn gate check metrics.csv --gates target_core_gate.json --strict \\
      --baseline plain.csv
  kvmnn gate demo out/baseline out/candidate --case llm_demo_store -o round/
  kvmnn gate run model/ --suite runtime --prompts texts/ -o round/

Limits come from --case (one of the fork's six), over these from --gates FILE, over these from options."""

_CHECK_OPTIONS = (
    *gate_options.LIMIT_OPTION_NAMES,
    *("offline_lossless_online_json", "offline_lossless_json", "bench_stdout_log", "logs_dir", "gates"),
    *("baseline", "decode_baseline_mode", "baseline_history", "baseline_key", "baseline_repeats", "no_history"),
)
_OPTIONS_BY_ACTION = {
    "parse": ("strict", "output", "force"),
    "check": (*_CHECK_OPTIONS, "case", "strict", "output", "force"),
    "demo": (
        *("case", "strict", "output", "force", "decode_drop_target", "lossy_target", "lossless_target", "run_order"),
        *("require_decode_cache_hit", "no_runtime_decomp", "no_decode_baseline", "no_bucket_pass", "runtime_mode"),
    ),
    "summary": ("force",),
    "run": (*gate_run.RUN_OPTION_NAMES, "output", "force"),
    "history": (),
}
_ALL_OPTIONS = tuple(dict.fromkeys(name for names in _OPTIONS_BY_ACTION.values() for name in names))


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(
        subparsers, "gate", run, "whether a run reaches what was asked of it", _DESCRIPTION
    )
    parser.add_argument(
        "action", choices=tuple(_OPTIONS_BY_ACTION), metavar="ACTION", help=", ".join(_OPTIONS_BY_ACTION)
    )
    parser.add_argument("inputs", nargs="+", metavar="IN", help="logs, CSV files, folders, or a model; see above")
    parser.add_argument("--case", metavar="NAME", help="check, demo: one of the six cases, or a name of your own")
    parser.add_argument("--gates", metavar="FILE", help="check: limits frozen in a JSON file")
    parser.add_argument(
        "--strict", action="store_true", help="judge what was measured only; parse: refuse damaged tables"
    )
    gate_options.add_document_options(parser)
    _add_baseline_options(parser)
    _add_demo_options(parser)
    gate_run.add_run_options(parser)
    shared_options.add_output(parser, "parse: a .csv or .json file; check, demo, run: the folder of a round")
    gate_options.add_limit_options(parser)
    help.narrow_help(parser, "action", _OPTIONS_BY_ACTION, _describe_action)


def _describe_action(action: str) -> str:
    """What the help of all says of one action, and its examples."""
    line = re.search(rf"^  {action} .*(?:\n {{10,}}.*)*", _DESCRIPTION, re.MULTILINE)
    examples = re.findall(rf"^  kvmnn gate {action} .*(?:\n {{5,}}.*)*", _DESCRIPTION, re.MULTILINE)
    limits = ["", _DESCRIPTION.rpartition("\n\n")[2]] if action == "check" else []
    lines = ["Judge runs of a compressed KV cache by gates (docs/gates.md).", "", line[0] if line else ""]
    return "\n".join([*lines, *([""] if examples else []), *examples, *limits])


def _add_baseline_options(parser: Any) -> None:
    group = parser.add_argument_group("baseline", "check: decode speed without compression.")
    group.add_argument(
        "--baseline", action="append", default=[], metavar="CSV", help="rows of the same work without it (repeatable)"
    )
    group.add_argument(
        "--decode-baseline-mode",
        choices=gate_options.BASELINE_CHOICES,
        help="the number of --decode-baseline, the median of earlier runs, or the fastest row of --baseline",
    )
    group.add_argument("--baseline-history", metavar="FILE", help="earlier runs, JSON lines; this one is added")
    group.add_argument("--no-history", action="store_true", help="add nothing to it")
    group.add_argument("--baseline-key", metavar="KEY", help="which of them count (default: host, backend, work)")
    group.add_argument(
        "--baseline-repeats",
        type=shared_options.parse_positive,
        default=2,
        metavar="N",
        help="repeats of the bench, part of that key (default: 2)",
    )


def _add_demo_options(parser: Any) -> None:
    group = parser.add_argument_group("real prompts", "demo: over what the fork asks for.")
    group.add_argument("--no-runtime-decomp", action="store_true", help="nothing need have been decompressed")
    group.add_argument("--no-decode-baseline", action="store_true", help="runs without compression need no speed")
    group.add_argument("--no-bucket-pass", action="store_true", help="lengths need not pass each by itself")
    group.add_argument("--run-order", metavar="TEXT", help="which side ran first, for the report")


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    idle_names = [name for name in _ALL_OPTIONS if name not in _OPTIONS_BY_ACTION[arguments.action]]
    idle_options.refuse_given(arguments, idle_names, f"says nothing to gate {arguments.action}")
    if arguments.output == printing.STDIO:
        raise UsageError("-o -: results are printed on standard output anyhow")
    return int(_RUN_BY_ACTION[arguments.action](arguments))


def _run_parse(arguments: argparse.Namespace) -> int:
    import json

    from ...files.output import FileOutput
    from ...gates.logs.parsing import parse_logs

    parsed = parse_logs(arguments.inputs, strict=arguments.strict)
    for line in parsed.notes:
        printing.print_note(arguments, line)
    if arguments.output is not None:
        if printing.is_directory_output(arguments.output):
            raise UsageError(f"{arguments.output}: is a directory, expected a .csv or .json file")
        as_json = arguments.output.lower().endswith(".json")
        text = json.dumps(parsed.to_dict(), indent=2) + "\n" if as_json else parsed.to_csv()
        with FileOutput(arguments.output, force=arguments.force, exclude=arguments.inputs) as output:
            output.file.write(text.encode("utf-8", "surrogateescape"))
            output.commit()
        printing.show_result(arguments, "gate parse", parsed, text=f"{parsed}, in {arguments.output}")
    elif arguments.json:
        printing.show_result(arguments, "gate parse", parsed)
    elif streams.is_terminal():
        printing.write_text(parsed.to_csv().replace("\r\n", "\n"))
    else:
        printing.Stdout().write(parsed.to_csv().encode("utf-8", "surrogateescape"))
    return 0


def _run_check(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from ...gates.checking.checking import check
    from ...gates.checking.metric_rows import read_metric_rows
    from ...gates.summary.saving import check_round_directory, save_case_result, validate_case_name

    _check_options(arguments)
    limits = _read_limits(arguments)
    case = arguments.case or (f"runtime_{limits.runtime_mode}" if limits.runtime_mode else "runtime")
    if arguments.output is not None:
        validate_case_name(case)
        check_round_directory(arguments.output, force=arguments.force)
    rows = read_metric_rows(arguments.inputs)
    baseline = read_metric_rows(arguments.baseline) if arguments.baseline else None
    for line in rows.notes:
        printing.print_note(arguments, line)
    decode_baseline, key = _choose_baseline(arguments, limits, rows, baseline)
    if decode_baseline is not None:
        for line in decode_baseline.warnings:
            printing.print_note(arguments, line)
        limits = replace(
            limits,
            decode_baseline=decode_baseline.speed,
            decode_baseline_source=decode_baseline.source,
            decode_baseline_samples=decode_baseline.num_samples,
        )
    case_result = check(
        rows,
        limits,
        case=case,
        online_json=arguments.offline_lossless_online_json,
        upper_json=arguments.offline_lossless_json,
        logs=[path for path in (arguments.bench_stdout_log, arguments.logs_dir) if path is not None],
        baseline=baseline,
        strict=arguments.strict,
    )
    summary = ""
    if arguments.output is not None:
        save_case_result(arguments.output, case_result, force=arguments.force)
        summary = f"{arguments.output.rstrip('/')}/{case}/summary.md"
    if key is not None and not arguments.no_history:
        from ...gates.checking.baselines import append_to_history

        append_to_history(
            arguments.baseline_history, key, case_result.analysis.decode.best, case_result.has_passed, summary
        )
    printing.show_result(arguments, "gate check", case_result)
    return 0 if case_result.has_passed else 1


def _check_options(arguments: argparse.Namespace) -> None:
    mode = arguments.decode_baseline_mode
    if mode == "same_batch" and not arguments.baseline:
        raise UsageError("--decode-baseline-mode same_batch needs --baseline CSV")
    if mode == "rolling" and arguments.baseline_history is None:
        raise UsageError("--decode-baseline-mode rolling needs --baseline-history FILE")
    if arguments.baseline and mode != "same_batch" and not arguments.strict:
        raise UsageError("--baseline says nothing without --decode-baseline-mode same_batch or --strict")
    if arguments.baseline_history is None:
        history_options = ("baseline_key", "baseline_repeats", "no_history")
        idle_options.refuse_given(arguments, history_options, "says nothing without --baseline-history FILE")
    if mode is not None:
        computed_options = ("decode_baseline_source", "decode_baseline_samples")
        idle_options.refuse_given(arguments, computed_options, f"is what --decode-baseline-mode {mode} finds out")


def _read_limits(arguments: argparse.Namespace) -> GateLimits:
    from ...gates.checking.cases import RUNTIME_CASES
    from ...gates.checking.gate_file import read_gate_file
    from ...gates.checking.limits import GateLimits

    limits = RUNTIME_CASES.get(arguments.case, GateLimits())
    if arguments.case is not None and arguments.case not in RUNTIME_CASES and arguments.gates is None:
        suggestion = suggest(arguments.case, RUNTIME_CASES)
        printing.print_note(
            arguments, f"{arguments.case} is none of the fork's cases{suggestion}: only the common limits hold"
        )
    if arguments.gates is not None:
        limits, notes = read_gate_file(arguments.gates, arguments.case, limits)
        for line in notes:
            printing.print_note(arguments, line)
    return gate_options.override_limits(arguments, limits)


def _choose_baseline(
    arguments: argparse.Namespace, limits: GateLimits, rows: MetricRows, baseline: MetricRows | None
) -> tuple[Any, str | None]:
    """Where the baseline comes from, unless a number was said without more; and the key of the history."""
    from ...gates.checking import baselines
    from ...gates.checking.cases import FIXED_BASELINE_TOKENS_PER_SECOND

    mode, key = arguments.decode_baseline_mode, None
    if arguments.baseline_history is not None:
        key = arguments.baseline_key or baselines.build_baseline_key(rows, arguments.baseline_repeats)
    fallback_speed = limits.decode_baseline or FIXED_BASELINE_TOKENS_PER_SECOND
    if mode == "same_batch" and baseline is not None:
        return baselines.find_same_batch_baseline(baseline, fallback_speed), key
    if mode == "rolling" and key is not None:
        return baselines.compute_rolling_baseline(arguments.baseline_history, key, fallback_speed), key
    return (baselines.make_fixed_baseline(fallback_speed) if mode == "fixed" else None), key


def _run_demo(arguments: argparse.Namespace) -> int:
    from ...gates.checking.cases import DEMO_CASES
    from ...gates.demo.judging import DemoLimits, check_demo
    from ...gates.demo.runs import read_demo_runs
    from ...gates.summary.saving import check_round_directory, save_demo_result, validate_case_name

    if len(arguments.inputs) != 2:
        raise UsageError("gate demo takes two inputs: runs without compression, and runs with it")
    case = arguments.case or "llm_demo"
    validate_case_name(case)
    if arguments.output is not None:
        check_round_directory(arguments.output, force=arguments.force)
    lossy_target, lossless_target = arguments.lossy_target, arguments.lossless_target
    limits = DemoLimits(
        decode_drop_target=0.08 if arguments.decode_drop_target is None else arguments.decode_drop_target,
        require_runtime_decomp=not arguments.no_runtime_decomp,
        require_decode_cache_hit=bool(arguments.require_decode_cache_hit),
        require_decode_baseline=not arguments.no_decode_baseline,
        require_bucket_decode_pass=not arguments.no_bucket_pass,
        lossy_target=3.0 if lossy_target is None and arguments.strict else lossy_target,
        lossless_target=1.3 if lossless_target is None and arguments.strict else lossless_target,
    )
    baseline_runs, candidate_runs = map(read_demo_runs, arguments.inputs)
    demo_result = check_demo(
        baseline_runs,
        candidate_runs,
        limits,
        case=case,
        mode=arguments.runtime_mode or DEMO_CASES.get(case, ""),
        run_order=arguments.run_order or "",
        strict=arguments.strict,
    )
    if arguments.output is not None:
        save_demo_result(arguments.output, demo_result, force=arguments.force)
    printing.show_result(arguments, "gate demo", demo_result)
    return 0 if demo_result.has_passed else 1


def _run_summary(arguments: argparse.Namespace) -> int:
    from ...gates.summary.collecting import collect_cases
    from ...gates.summary.saving import check_round_directory, write_round_files

    if len(arguments.inputs) != 1:
        raise UsageError("gate summary takes one folder")
    round_summary = collect_cases(arguments.inputs[0].rstrip("/") or "/")
    check_round_directory(round_summary.directory, force=arguments.force)
    write_round_files(round_summary)
    printing.show_result(arguments, "gate summary", round_summary)
    return 0 if round_summary.has_passed else 1


def _run_history(arguments: argparse.Namespace) -> int:
    from ...gates.running.history import read_history

    if len(arguments.inputs) != 1:
        raise UsageError("gate history takes one folder")
    printing.show_result(arguments, "gate history", read_history(arguments.inputs[0].rstrip("/") or "/"))
    return 0


_RUN_BY_ACTION = {
    "parse": _run_parse,
    "check": _run_check,
    "demo": _run_demo,
    "summary": _run_summary,
    "run": gate_run.run_suite,
    "history": _run_history,
}
