"""``kvmnn eval``: what eviction costs a language model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...text import count
from .. import eval_options, plot_options, printing, shared_options, start_options, streams
from ..printing import UsageError

if TYPE_CHECKING:
    from ...evaluation import EvaluationResult

_TEXT = """Run a language model over texts with its KV cache cut by every policy and budget, and compare with the full
cache: perplexity, next-token accuracy, bits per byte, time, memory, and what lossless frames of the cache that is left
take. Every configuration scores the same tokens of the same texts in the same chunks.

  kvmnn eval model/ --text texts/ --policy streaming --policy h2o_decayed \\
      --budget 256 512 --jobs 2
  kvmnn eval model/ --text a.txt b.txt --budget 512 --json \\
      --policy l2_fixed:recent_ratio=0.5,strategy=keep_high
  kvmnn eval model/ --text a.txt --preset streaming-h2o --plot plots/ \\
      --resume cells.jsonl
  kvmnn eval model/ --text chat.txt --from chat.session

MODEL is an ONNX decoder with past_key_values inputs, or its folder, with tokenizer.json beside it. Options of a policy
are the fields of its class (docs/policies.md); tuples are joined by + (skip_layers=0+1, skip_layers=none), and 50% of a
whole number is that share of the budget (recent=50%). keep_ratio is a share of what is stored at each cut, so policies
that cut at every step keep little of it: a share of the text is --budget 25%. What evicts is LOSSY; frames are LOSSLESS
for what they are given.

Presets are tables of two projects, measured by their own definitions and as it should be. Of l2_compress / KnormPress:

  knorm-fixed[:fix_kv_sizes=256+512,strategies=keep_low+random,
               keep_ratios=0.2+0.5,skip_layers=0+1,no_recent_only]
  knorm-ratio[:keep_ratios=0.8+0.5,prune_after=1000,skip_layers=0+1]
  knorm-ablation[:keep_ratio=0.8,prune_after=512,fix_kv_size=512,
                  recent=0.5,skip_layers=0+1]

Of StreamingLLM + H2O: streaming-h2o[:sink=8,recent=32,capacity=256] (or heavy_hitter=216 instead of capacity). All take
no_baseline. knorm-ablation takes the project's improvements apart: the threshold, the order, the hybrid. Without a
policy or preset it is the baseline, the full cache alone. A budget holds in every layer unless skip_layers is said;
presets skip the layers that their projects skip, and say so in their labels.

With --from every row but the first goes on from a cache that some engine saved, as if its tokens had been read; all
rows score what follows them. Policies that rank tokens by attention cannot: nobody saw what those drew."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "eval", run, "what eviction costs a language model", _TEXT)
    eval_options.add_compared(parser)
    eval_options.add_settings(parser)
    start_options.add_start(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--csv", action="store_true", help="print CSV: a line for each row and document")
    group.add_argument("--plot", metavar="DIR", help="draw plots into DIR (needs matplotlib)")
    plot_options.add(group)
    group.add_argument("--resume", metavar="FILE", help="keep finished cells in FILE and go on from those that it has")
    shared_options.add_output(group, "also write the results to OUT: .json, .csv, .md, .tex")


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out; 1 where the model refused a configuration, so that scripts notice the missing row."""
    _check(arguments)
    configurations, settings = eval_options.configurations(arguments), eval_options.settings(arguments)
    texts = eval_options.text_options(arguments)
    from ...evaluation import evaluate

    with ExitStack() as stack:
        write = _outputs(arguments, stack)
        start = stack.enter_context(start_options.start(arguments))
        with _Progress(arguments) as progress:
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
                start=start,
            )
        _note(arguments, result)
        write(result)
    _print(arguments, result)
    return 1 if result.refused else 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.json and arguments.csv:
        raise UsageError("--json and --csv both want standard output")
    if arguments.output == printing.STDIO:
        raise UsageError("-o -: results are printed on standard output anyhow")
    if arguments.budget and not arguments.policy:
        raise UsageError("--budget needs a --policy")
    plot_options.of(arguments)
    if arguments.deep is not None and arguments.deep < arguments.prompt:
        printing.note(
            arguments, f"deep begins behind the prompt, at {arguments.prompt:,}, and not at {arguments.deep:,}"
        )
    without = [
        ("--plot-format", arguments.plot_format is not None and arguments.plot is None, "expected --plot DIR with it"),
        ("--no-titles", arguments.no_titles and arguments.plot is None, "expected --plot DIR with it"),
        ("--repeats", arguments.repeats is not None and arguments.no_timing, "--no-timing measures no time"),
        (
            "--no-project-definitions",
            arguments.no_project_definitions and not arguments.preset,
            "only the rows of a --preset have any",
        ),
    ]
    for option, idle, why in without:
        if idle:
            raise UsageError(f"{option} has no effect here: {why}")


def _outputs(arguments: argparse.Namespace, stack: ExitStack) -> Callable[[EvaluationResult], None]:
    """Refuse now what could not be written later; returns what writes the result."""
    from ...evaluation.result import form_of
    from ...files.output import FileOutput

    inputs = [
        *arguments.text,
        arguments.model,
        *(arguments.start or ()),
        *([arguments.resume] if arguments.resume else []),
    ]
    output = None
    if arguments.output is not None:
        if printing.is_directory(arguments.output):
            raise UsageError(f"{arguments.output}: is a directory, expected a file")
        output = stack.enter_context(FileOutput(arguments.output, force=arguments.force, protect=inputs))
        form_of(arguments.output)
    if arguments.plot is not None:
        from ...reports import plots

        plots.require(arguments.plot, arguments.force, plot_options.of(arguments))

    def write(result: EvaluationResult) -> None:
        if arguments.plot is not None:
            _plot(arguments, result)
        if output is not None:
            form = form_of(arguments.output)
            text = result.to_text(form)
            if form == "json":
                text = json.dumps({**result.to_dict(), "command": printing.command(arguments)}) + "\n"
            output.file.write(text.encode())
            output.commit()

    return write


def _plot(arguments: argparse.Namespace, result: EvaluationResult) -> None:
    left_out: dict[str, str] = {}
    options = plot_options.of(arguments)
    written = result.plot(arguments.plot, force=arguments.force, options=options, left_out=left_out)
    for name, reason in left_out.items():
        printing.note(arguments, f"no {name}: {reason}")
    printing.note(arguments, f"{count(len(written), 'plot file')} in {arguments.plot}", "written")


def _note(arguments: argparse.Namespace, result: EvaluationResult) -> None:
    """What a reader must know where no table says it, and what the model refused, on standard error."""
    from ...reports.tables import refusals

    if arguments.json or arguments.csv:
        for note in result.notes:
            printing.note(arguments, note)
    for said in refusals(result.refused):
        streams.err("refused", said)


def _print(arguments: argparse.Namespace, result: EvaluationResult) -> None:
    if arguments.csv:
        printing.write(result.to_text("csv"))
    elif arguments.json or (streams.on_terminal() and not arguments.verbose):  # -v: all columns, however wide
        printing.show(arguments, "eval", result)
    else:
        printing.write(result.to_text("markdown"))


class _Progress:
    """Tokens and cells done, in the progress bar of all verbs; how much there is to do is known once it is planned."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._stack = ExitStack()
        self._advance: printing.Advance | None = None
        self._cells = self._all = self._others = 0

    def start(self, tokens: int, cells: int, reused: int) -> None:
        store = self._arguments.resume
        if store is not None and reused:
            printing.note(self._arguments, f"{count(reused, 'cell')} reused from {store}")
        bar = printing.progress(self._arguments, tokens, "evaluating", unit="tok", delay=0)
        self._advance, self._all = self._stack.enter_context(bar), cells + reused
        self._others = self._stored() - reused
        self.advance(0, reused)

    def advance(self, tokens: int, cells: int) -> None:
        self._cells += cells
        if self._advance is not None:
            self._advance(tokens, f"{self._cells}/{self._all} cells")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._stack.close()
        interrupted = kind is not None and not issubclass(kind, Exception)
        if interrupted and self._all and self._arguments.resume is not None:
            kept = f"{self._stored() - self._others} of {count(self._all, 'cell')} kept in {self._arguments.resume}"
            printing.note(self._arguments, f"{kept}: the same command goes on from there")

    def _stored(self) -> int:
        """Cells in the file, those of other runs too; the last may have come when nobody could count it any more."""
        path = self._arguments.resume
        return Path(path).read_bytes().count(b"\n") if path is not None and Path(path).is_file() else 0
