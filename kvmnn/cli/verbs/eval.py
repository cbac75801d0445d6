"""``kvmnn eval``: what eviction costs a language model."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ...reports import tables
from ...text import count
from .. import printing, shared_options
from ..printing import UsageError

if TYPE_CHECKING:
    from ...evaluation.setup.configurations import Configuration
    from ...evaluation.setup.settings import Settings

_TEXT = """Run a language model over texts with its KV cache cut by every policy and budget, and compare with the full
cache: perplexity, next-token accuracy, bits per byte, time, memory, and what lossless frames of the cache that is left
take. Every configuration scores the same tokens of the same texts in the same chunks.

  kvmnn eval model/ --text texts/ --policy streaming --policy h2o_decayed --budget 256 512 --jobs 2
  kvmnn eval model/ --text a.txt b.txt --policy l2_fixed:recent_ratio=0.5,strategy=keep_high --budget 512 --json
  kvmnn eval model/ --text a.txt --preset streaming-h2o --plot plots/ --resume cells.jsonl

MODEL is an ONNX decoder with past_key_values inputs, or its folder, with tokenizer.json beside it. Options of a policy
are the fields of its class (docs/policies.md); tuples are joined by + (skip_layers=0+1, skip_layers=none), and 50% of a
whole number is that share of the budget (recent=50%). keep_ratio is a share of what is stored at each cut, so policies
that cut at every step keep little of it: a share of the text is --budget 25%. What evicts is LOSSY; frames are LOSSLESS
for what they are given.

Presets are the seed projects' own tables, measured as they did and as it should be: knorm-fixed[:fix_kv_sizes=256+512,
strategies=keep_low+random,keep_ratio=0.2+0.5,skip_layers=0+1], knorm-ratio[:keep_ratios=0.8+0.5,prune_after=1000,
skip_layers=0+1], streaming-h2o."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "eval", run, "what eviction costs a language model", _TEXT)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="UTF-8 texts, or folders of *.txt")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: beside the model)")
    parser.add_argument("--policy", action="append", default=[], metavar="NAME[:OPTION=VALUE,...]")
    parser.add_argument(
        "--budget",
        nargs="+",
        action="extend",
        type=_budget,
        default=[],
        metavar="N",
        help="tokens kept in each layer, or a share of --tokens such as 25%%",
    )
    parser.add_argument("--preset", action="append", default=[], metavar="NAME[:OPTION=VALUE,...]")
    parser.add_argument("--skip-layers", metavar="L+L", help="layers never cut, where a policy does not say; or none")
    _add_settings(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--csv", action="store_true", help="print CSV: a line for each row and document")
    group.add_argument("--plot", metavar="DIR", help="draw plots into DIR, PNG and SVG (needs matplotlib)")
    group.add_argument("--resume", metavar="FILE", help="keep finished cells in FILE and go on from those that it has")
    shared_options.add_output(group, "also write the results to OUT: .json, .csv, else Markdown")


def _budget(text: str) -> int | float:
    """Tokens, or a share of them as a number below 1."""
    if re.fullmatch(r"\d{1,2}(\.\d{1,6})?%", text):
        return float(text[:-1]) / 100
    return shared_options.whole(text)


def _add_settings(parser: Any) -> None:
    group = parser.add_argument_group("how it is measured")
    group.add_argument(
        "--tokens", type=shared_options.positive, default=2048, metavar="N", help="tokens scored of each text (2048)"
    )
    group.add_argument("--chunk", type=shared_options.positive, default=1, metavar="N", help="tokens fed at once (1)")
    group.add_argument(
        "--prompt",
        type=shared_options.whole,
        default=0,
        metavar="N",
        help="tokens of the first step, a prompt (as --chunk)",
    )
    group.add_argument(
        "--deep",
        type=shared_options.whole,
        metavar="N",
        help="also report tokens from this position on (half of --tokens)",
    )
    group.add_argument(
        "--seed", type=shared_options.whole, default=0, metavar="N", help="of random policies, bootstrap (0)"
    )
    group.add_argument(
        "--threads", type=shared_options.positive, metavar="N", help="onnxruntime's, in each process (all over --jobs)"
    )
    group.add_argument("--jobs", type=shared_options.positive, default=1, metavar="N", help="processes at a time (1)")
    group.add_argument("--packed", metavar="BACKEND", help="hold the cache in this packed layout, such as x86-avx2")
    group.add_argument(
        "--slack",
        type=shared_options.whole,
        metavar="N",
        help="evicted tokens that may stay masked (1 in 8 of those kept)",
    )
    group.add_argument(
        "--providers",
        "--provider",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="of onnxruntime (CPUExecutionProvider)",
    )
    group.add_argument(
        "--frame-dtype",
        choices=("fp16", "fp32"),
        default="fp16",
        help="words in the frames: rounded to fp16 as engines hold them, or an fp32 cache as it is (fp16)",
    )
    group.add_argument(
        "--repeats", type=shared_options.positive, default=3, metavar="N", help="runs of the timed generation (3)"
    )
    group.add_argument("--no-timing", action="store_true", help="do not measure TTFT and TPOT")
    group.add_argument("--no-as-seed", action="store_true", help="do not measure presets as their seeds did")


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    if arguments.json and arguments.csv:
        raise UsageError("--json and --csv both want standard output")
    if arguments.output == printing.STDIO:
        raise UsageError("-o -: results are printed on standard output anyhow")
    if not arguments.policy and not arguments.preset:
        raise UsageError("expected a --policy or a --preset")
    configurations, settings = _configurations(arguments), _settings(arguments)
    with ExitStack() as stack:
        write = _outputs(arguments, stack)
        results = _measure(arguments, configurations, settings, stack)
        _note(arguments, results)
        write(results)
    _print(arguments, results)
    return _code(results)


def _configurations(arguments: argparse.Namespace) -> list[Configuration]:
    from ...errors import KvmnnError
    from ...evaluation.setup.configurations import configurations, numbers
    from ...evaluation.setup.presets import preset

    try:
        skip = None if arguments.skip_layers is None else numbers(arguments.skip_layers)
        budgets = [size if isinstance(size, int) else int(size * arguments.tokens) for size in arguments.budget]
        found = configurations(arguments.policy, budgets, skip)
        for spec in arguments.preset:
            found += preset(spec, skip)
    except (KvmnnError, TypeError) as exc:
        raise UsageError(str(exc)) from exc
    return found


def _settings(arguments: argparse.Namespace) -> Settings:
    from ...evaluation.setup.settings import Settings
    from ...threads.pool import cpu_count

    given: dict[str, Any] = {}
    if arguments.slack is not None:
        given["slack"] = arguments.slack
    if arguments.deep is not None:
        given["deep_from"] = arguments.deep
    if arguments.providers:
        given["providers"] = tuple(arguments.providers)
    return Settings(
        tokens=arguments.tokens,
        chunk=arguments.chunk,
        prompt=arguments.prompt,
        seed=arguments.seed,
        threads=arguments.threads or max(1, cpu_count() // arguments.jobs),
        packed=arguments.packed,
        frame_dtype=arguments.frame_dtype,
        repeats=arguments.repeats,
        as_seed=not arguments.no_as_seed,
        timing=not arguments.no_timing,
        traces=arguments.plot is not None,
        **given,
    )


def _measure(
    arguments: argparse.Namespace,
    configurations: list[Configuration],
    settings: Settings,
    stack: ExitStack,
) -> dict[str, Any]:
    from ...evaluation.evaluating import evaluate
    from ...evaluation.running.cell_store import CellStore
    from ...lm.documents import read_documents
    from ...lm.graph.model_files import find_model
    from ...lm.tokenizer import Tokenizer

    find_model(arguments.model)
    tokenizer = Tokenizer.open(arguments.tokenizer or arguments.model)
    documents = read_documents(arguments.text, tokenizer, settings.tokens)
    store = stack.enter_context(CellStore(arguments.resume))
    with _bar(arguments) as bar:
        return evaluate(
            arguments.model, documents, configurations, settings, jobs=arguments.jobs, store=store, progress=bar
        )


# -- output -----------------------------------------------------------------------------------------------------------


def _outputs(arguments: argparse.Namespace, stack: ExitStack) -> Any:
    """Refuse now what could not be written later; returns what writes the results."""
    from ...files.output import DirectoryOutput, FileOutput

    inputs = [*arguments.text, arguments.model, *([arguments.resume] if arguments.resume else [])]
    output = None
    if arguments.output is not None:
        if printing.is_directory(arguments.output):
            raise UsageError(f"{arguments.output}: is a directory, expected a file")
        output = stack.enter_context(FileOutput(arguments.output, force=arguments.force, protect=inputs))
    if arguments.plot is not None:
        from ...reports import plots

        plots.require()
        with DirectoryOutput(arguments.plot, force=arguments.force) as probe:
            probe.check_names(f"{name}.{kind}" for name in plots.PLOTS for kind in plots.KINDS)

    def write(results: dict[str, Any]) -> None:
        if arguments.plot is not None:
            _plot(arguments, results)
        if output is not None:
            output.file.write(_as(Path(arguments.output).suffix.lower(), results).encode())
            output.commit()

    return write


def _plot(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    from ...reports import plots

    left_out: dict[str, str] = {}
    written = plots.write_all(results, arguments.plot, arguments.force, left_out=left_out)
    if not arguments.quiet:
        for name, reason in left_out.items():
            print(f"kvmnn: note: no {name}: {reason}", file=sys.stderr)
        print(f"kvmnn: {count(len(written), 'plot file')} in {arguments.plot}", file=sys.stderr)


def _as(suffix: str, results: dict[str, Any]) -> str:

    if suffix == ".json":
        return json.dumps(results) + "\n"
    return tables.csv_text(results) if suffix == ".csv" else tables.markdown(results)


def _note(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """What a reader must know where no table says it, and what the model refused, on standard error."""
    if (arguments.json or arguments.csv) and not arguments.quiet:
        for note in results["notes"]:
            print(f"kvmnn: note: {note}", file=sys.stderr)
    for entry in results["refused"]:
        print(f"kvmnn: refused: {entry['label']}: {' '.join(entry['reason'].split())}", file=sys.stderr)


def _print(arguments: argparse.Namespace, results: dict[str, Any]) -> None:

    if arguments.json:
        printing.print_json({"verb": "eval", **results})
    elif arguments.csv:
        sys.stdout.write(tables.csv_text(results))
    elif not arguments.quiet:
        if sys.stdout.isatty() and not arguments.verbose:  # -v: the whole table, however wide
            sys.stdout.write(tables.terminal(results, shutil.get_terminal_size((100, 24)).columns))
        else:
            sys.stdout.write(tables.markdown(results))


def _code(results: dict[str, Any]) -> int:
    """1 where the model refused a configuration, so that scripts notice the missing row."""
    return 1 if results["refused"] else 0


# -- progress ---------------------------------------------------------------------------------------------------------


def _bar(arguments: argparse.Namespace) -> AbstractContextManager[_Bar | None]:
    if arguments.quiet or not sys.stderr.isatty():
        return nullcontext()
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return nullcontext()
    return _Bar()


class _Bar:
    """Tokens done, the time that is left, and cells done, on a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._cells = self._all = 0

    def start(self, tokens: int, cells: int) -> None:
        from tqdm import tqdm

        self._all = cells
        self._bar = tqdm(
            total=tokens, desc="evaluating", unit="tok", unit_scale=True, leave=False, file=sys.stderr,
            dynamic_ncols=True,
        )  # fmt: skip
        self.advance(0, 0)

    def advance(self, tokens: int, cells: int) -> None:
        self._cells += cells
        self._bar.set_postfix_str(f"{self._cells}/{self._all} cells", refresh=False)
        self._bar.update(tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
