"""``kvmnn eval``: measure the cost of eviction for a language model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._util.packages import require_packages
from ..._util.text import pluralize
from .. import console, eval_options, shared_options, streams
from ..console import UsageError

if TYPE_CHECKING:
    from ...evaluation import EvaluationResult, EvaluationSettings, TextOptions

_DESCRIPTION = """\
Run a language model over texts with its KV cache cut by every policy and budget, and compare with the full cache:
perplexity, next-token accuracy, bits per byte, time, memory, and the size of lossless frames of the remaining cache.
Every configuration scores the same tokens of the same texts in the same chunks.

MODEL is an ONNX decoder with past_key_values inputs, or its folder, with tokenizer.json alongside. Options of a policy
are the fields of its class (docs/policies.md); tuples are joined by + (skip_layers=0+1, skip_layers=none), and 50% of
a whole number is that share of the budget (recent=50%). keep_ratio is a share of what is stored at each cut, so
policies that cut at every step keep little of it: a share of the text is --budget 25%. Eviction is LOSSY; frames are
LOSSLESS for the cache that they are given.

Presets are tables of two projects, measured by their own definitions and by ours. Of l2_compress / KnormPress:

  knorm-fixed[:fix_kv_sizes=256+512,strategies=keep_low+random,
               keep_ratios=0.2+0.5,skip_layers=0+1,no_recent_only]
  knorm-ratio[:keep_ratios=0.8+0.5,prune_after=1000,skip_layers=0+1]
  knorm-ablation[:keep_ratio=0.8,prune_after=512,fix_kv_size=512,
                  recent=0.5,skip_layers=0+1]

Of StreamingLLM + H2O: streaming-h2o[:sink=8,recent=32,capacity=256] (or heavy_hitter=216 instead of capacity). All
take no_baseline. knorm-ablation takes the project's improvements apart: the threshold, the order, the hybrid. Without
a policy or preset the run is the baseline, the full cache alone. A budget applies to every layer unless skip_layers is
given; presets skip the layers that their projects skip, and say so in their labels.

With --initial-cache every row but the first continues from a cache that some engine saved, as if its tokens had been
read; all rows score the tokens after it. Policies that rank tokens by attention cannot: the saved cache has no
attention."""


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "eval",
        run,
        "what eviction costs a language model",
        _DESCRIPTION,
        has_details=True,
        examples=(
            "kvmnn eval model/ --text texts/ --policy streaming --policy h2o_decayed --budget 256 512 --jobs 2",
            "kvmnn eval model/ --text a.txt --preset streaming-h2o --plot plots/ --resume cells.jsonl",
            "kvmnn eval model/ --text chat.txt --initial-cache chat.session",
            "kvmnn eval model/ --text a.txt b.txt --policy streaming --budget 25% --chunk 64 --tasks all,items=40",
            "kvmnn eval model/ --text a.txt b.txt --budget 512 --policy l2_fixed:recent_ratio=0.5,strategy=keep_high",
        ),
        shown="--text --samples --policy --budget --quant --preset --skip-layers --lossless --max-tokens --chunk "
        "--prefill-tokens --jobs --initial-cache --resume --output --plot",
    )
    eval_options.add_comparison_options(parser)
    eval_options.add_setting_options(parser)
    eval_options.add_start_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--csv", action="store_true", help="print CSV: a line for each row and document")
    group.add_argument("--plot", metavar="DIR", help="draw plots into DIR (needs matplotlib)")
    eval_options.add_plot_options(group)
    group.add_argument(
        "--resume", metavar="FILE", help="store finished cells in FILE and continue from those that it has"
    )
    parser.accept("--force")
    group.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="OUT",
        help="also write the results to OUT: .json, .csv, .md, .tex (repeatable)",
    )
    parser.accept("--table")


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out; 1 where the model refused a configuration, so that scripts notice the missing row."""
    _check_options(arguments)
    settings = eval_options.build_settings(arguments)
    configurations = eval_options.build_configurations(arguments, settings.tokens)
    texts = eval_options.build_text_options(arguments)
    eval_options.build_task_options(arguments)
    if arguments.plot is not None:
        require_packages("onnxruntime", "onnx", "tokenizers", "matplotlib")  # all in one message
    from ...evaluation import evaluate
    from ...evaluation.runner import ignore_refusals

    with ExitStack() as stack:
        write = _prepare_outputs(arguments, stack)
        start = stack.enter_context(eval_options.open_initial_cache(arguments))
        with EvaluationProgressDisplay(arguments) as progress, ignore_refusals():
            result = evaluate(
                arguments.model,
                arguments.text,
                configurations,
                settings=settings,
                tokenizer=arguments.tokenizer,
                text_options=texts,
                jobs=arguments.jobs,
                store=arguments.resume,
                progress=progress,
                initial_source=start,
            )
        result = _add_tasks(arguments, result, settings, texts)
        _print_notes(arguments, result)
        write(result)
    _print_result(arguments, result)
    return 1 if result.refused else 0


def _add_tasks(
    arguments: argparse.Namespace, result: EvaluationResult, settings: EvaluationSettings, texts: TextOptions
) -> EvaluationResult:
    """Add the tasks of ``--tasks``, whose shares of budgets are of a context."""
    options = eval_options.build_task_options(arguments)
    if options is None:
        return result
    from ...evaluation.tasks import evaluate_tasks

    with EvaluationProgressDisplay(arguments) as progress:
        tasks = evaluate_tasks(
            arguments.model,
            arguments.text,
            eval_options.build_configurations(arguments, options.tokens),
            tasks=options,
            settings=settings,
            tokenizer=arguments.tokenizer,
            text_options=texts,
            store=arguments.resume,
            progress=progress,
        )
    refused = dict.fromkeys([*result.refused, *tasks.refused])
    return replace(result, tasks=tasks, refused=tuple(refused))


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.json and arguments.csv:
        raise UsageError("--json and --csv both want standard output")
    if console.STDIO in arguments.output:
        raise UsageError("-o -: results are printed on standard output anyhow")
    if arguments.budget and not arguments.policy:
        raise UsageError("--budget needs a --policy")
    eval_options.build_plot_options(arguments)
    prompt, deep_from = arguments.prefill_tokens or 0, arguments.deep_from
    if deep_from is not None and deep_from < prompt:
        console.print_note(arguments, f"deep begins after the prompt, at {prompt:,}, and not at {deep_from:,}")
    ineffective_options = [
        ("--plot-format", arguments.plot_format is not None and arguments.plot is None, "expected --plot DIR with it"),
        ("--no-titles", arguments.no_titles and arguments.plot is None, "expected --plot DIR with it"),
        ("--tasks", arguments.tasks is not None and arguments.start is not None, "a saved cache has its own text"),
        ("--repeats", arguments.repeats is not None and not arguments.timing, "expected --timing with it"),
        (
            "--no-project-definitions",
            arguments.project_definitions is False and not arguments.preset,
            "only the rows of a --preset have any",
        ),
    ]
    for option, is_idle, reason in ineffective_options:
        if is_idle:
            raise UsageError(f"{option} has no effect here: {reason}")


def _prepare_outputs(arguments: argparse.Namespace, stack: ExitStack) -> Callable[[EvaluationResult], None]:
    """Check that all outputs can be written; return a function that writes the result."""
    from ...evaluation.result import infer_format
    from ...files.atomic import FileOutput

    inputs = [
        *arguments.text,
        arguments.model,
        *(arguments.start or ()),
        *([arguments.resume] if arguments.resume else []),
    ]
    outputs: list[tuple[str, FileOutput]] = []
    for path in arguments.output:
        if console.is_directory_output(path):
            raise UsageError(f"{path}: is a directory, expected a file")
        earlier_paths = [name for name, _ in outputs] + ([] if arguments.table is None else [arguments.table])
        if Path(path).resolve() in {Path(name).resolve() for name in earlier_paths}:
            raise UsageError(f"{path} is named by two outputs: expected a file for each")
        outputs.append((path, stack.enter_context(FileOutput(path, force=arguments.force, exclude=inputs))))
        infer_format(path)  # an input in place of the output is the better message
    if arguments.plot is not None:
        from ...reports import plots

        plots.check_can_plot(arguments.plot, arguments.force, eval_options.build_plot_options(arguments))

    def write_outputs(result: EvaluationResult) -> None:
        if arguments.plot is not None:
            _write_plots(arguments, result)
        for path, output in outputs:
            output_format = infer_format(path)
            text = result.to_text(output_format)
            if output_format == "json":
                head = {"verb": "eval", "command": console.format_command_line(arguments)}  # as --json prints it
                text = json.dumps({**head, **result.to_dict()}) + "\n"
            output.file.write(text.encode())
            output.commit()

    return write_outputs


def _write_plots(arguments: argparse.Namespace, result: EvaluationResult) -> None:
    skip_reasons: dict[str, str] = {}
    options = eval_options.build_plot_options(arguments)
    written_paths = result.plot(arguments.plot, overwrite=arguments.force, options=options, left_out=skip_reasons)
    for name, reason in skip_reasons.items():
        console.print_note(arguments, f"no {name}: {reason}")
    console.print_note(arguments, f"{pluralize(len(written_paths), 'plot file')} in {arguments.plot}", "written")


def _print_notes(arguments: argparse.Namespace, result: EvaluationResult) -> None:
    """Print notes that no table contains, and the refusals of the model, on standard error."""
    from ...reports.tables import describe_refusals

    if arguments.json or arguments.csv:
        for note in result.notes:
            console.print_note(arguments, note)
    for refusal_text in describe_refusals(result.refused):
        streams.write_error_line("refused", refusal_text)


def _print_result(arguments: argparse.Namespace, result: EvaluationResult) -> None:
    if arguments.json or (streams.is_terminal() and not arguments.verbose and not arguments.csv):
        console.show_result(arguments, "eval", result)
        return
    console.write_table(arguments, result)
    console.write_text(result.to_text("csv" if arguments.csv else "markdown"))  # -v: all columns, however wide


class EvaluationProgressDisplay:
    """Shows finished tokens and cells in a progress bar; the total is known after planning."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._stack = ExitStack()
        self._advance: console.AdvanceProgress | None = None
        self._num_done = self._num_cells = self._num_other_cells = 0

    def start(self, tokens: int, cells: int, reused: int) -> None:
        store = self._arguments.resume
        if store is not None and reused:
            console.print_note(self._arguments, f"{pluralize(reused, 'cell')} reused from {store}")
        bar = console.progress_bar(self._arguments, tokens, "evaluating", unit="tok", delay=0)
        self._advance, self._num_cells = self._stack.enter_context(bar), cells + reused
        self._num_other_cells = self._count_stored_cells() - reused
        self.advance(0, reused)

    def advance(self, tokens: int, cells: int) -> None:
        self._num_done += cells
        if self._advance is not None:
            self._advance(tokens, f"{self._num_done}/{self._num_cells} cells")

    def __enter__(self) -> EvaluationProgressDisplay:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        self._stack.close()
        is_interrupted = error_type is not None and not issubclass(error_type, Exception)
        if is_interrupted and self._num_cells and self._arguments.resume is not None:
            num_stored = self._count_stored_cells() - self._num_other_cells
            next_text = "the same command goes on from there" if num_stored else "there is nothing to go on from"
            progress_text = f"{num_stored} of {pluralize(self._num_cells, 'cell')} kept in {self._arguments.resume}"
            console.print_note(self._arguments, f"{progress_text}: {next_text}")

    def _count_stored_cells(self) -> int:
        """Count the lines of the ``--resume`` file, cells of other runs included."""
        path = self._arguments.resume
        return Path(path).read_bytes().count(b"\n") if path is not None and Path(path).is_file() else 0
