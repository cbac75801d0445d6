"""Where figures are from: machine and settings, exact commands, and the files that were read."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ...text import pluralize
from .blocks import Block, Cell, CommandList, FactList, Paragraph, Section, TableBlock, make_missing_note
from .material import ReportInputs


def build_environment_section(inputs: ReportInputs) -> Section:
    """Models, machines, versions, settings."""
    blocks: list[Block] = []
    for name, run_info in inputs.run_infos:
        blocks.append(FactList([
            ("from", name), ("model", run_info.model), ("SHA-256 of the model", run_info.model_sha256),
            ("kvmnn", run_info.kvmnn), ("Python", run_info.python), ("machine", run_info.machine),
            ("processors", "not known" if run_info.processors is None else f"{run_info.processors:,}"),
            *((f"setting {key}", _format_setting(value)) for key, value in run_info.settings.items()),
        ]))  # fmt: skip
        blocks += _iter_engine_tables(run_info.cases)
    for name, evaluation in inputs.evaluations:
        model, settings = evaluation.model, evaluation.settings
        shape = (
            f"{pluralize(model.layers, 'layer')}, {model.kv_heads} KV heads of {model.head_dim}, {model.cache_dtype}"
        )
        blocks.append(FactList([
            ("from", name), ("model", f"{model.name} ({model.path}): {shape}"), ("SHA-256 of the model", model.sha256),
            ("kvmnn", evaluation.kvmnn), ("texts", f"{len(evaluation.documents):,}"), ("threads",
            f"{settings.threads:,}"),
            ("prompt", f"{settings.prompt:,} tokens"), ("fed at a time", pluralize(settings.chunk, "token")),
            ("seed", f"{settings.seed}"),
        ]))  # fmt: skip
    for name, measurement in inputs.measurements:
        dump, codec = measurement.evaluation.dump_dir, measurement.evaluation.codec
        blocks.append(FactList([("from", name), ("input", _format_setting(dump)), ("codec", codec)]))
    for name, replay in inputs.replays:
        blocks.append(FactList([("from", name), ("behaviour", replay.behaviour), ("layers", f"{replay.layers:,}")]))
    for name, codecs in inputs.codecs:
        machine = codecs.machine
        blocks.append(FactList([
            ("from", name), ("processor", machine.processor), ("processors", f"{machine.cpus:,}"),
            ("system", machine.system), ("threads", f"{codecs.threads:,}"),
            ("not installed", ", ".join(sorted({name for array in codecs.arrays for name in array.missing})) or "none"),
        ]))  # fmt: skip
    if not blocks:
        blocks = [make_missing_note("Environment: not recorded in what was read.")]
    return Section("environment", "Environment", blocks)


def _format_setting(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _iter_engine_tables(cases: object) -> Iterator[Block]:
    """Keys of the engine in each case, a row each; only those that some case has."""
    engines = {
        name: case["engine"]
        for name, case in (cases.items() if isinstance(cases, dict) else ())
        if isinstance(case, dict) and isinstance(case.get("engine"), dict) and case["engine"]
    }
    shown_engines = dict(list(engines.items())[:6])
    keys = list(dict.fromkeys(key for engine in shown_engines.values() for key in engine))[:80]
    if not keys:
        return
    rows = [
        [
            Cell(key),
            *(Cell(_format_setting(engine[key]) if key in engine else "-") for engine in shown_engines.values()),
        ]
        for key in keys
    ]
    num_hidden = len(engines) - len(shown_engines)
    note = f"{num_hidden:,} more cases are in run.json." if num_hidden > 0 else ""
    yield TableBlock("Keys of the engine, case by case", ["key", *shown_engines], rows, frozenset({0}), False, note)


def build_commands_section(inputs: ReportInputs) -> Section:
    """The command that made each file, where the file says it."""
    all_commands = [
        *((name, record.command) for name, record in inputs.run_infos),
        *((name, record.command) for name, record in inputs.rounds if record.command),
        *((name, record.command) for name, record in inputs.evaluations),
        *((name, record.command) for name, record in inputs.measurements),
        *((name, record.command) for name, record in inputs.replays),
        *((name, record.command) for name, record in inputs.codecs),
    ]
    lines = [(name, command) for name, command in all_commands if command]
    names_without_command = [name for name, command in all_commands if not command]
    blocks: list[Block] = [CommandList(lines)] if lines else []
    if names_without_command:
        blocks.append(make_missing_note(f"Command not recorded in: {', '.join(names_without_command)}."))
    if not blocks:
        blocks = [make_missing_note("Commands: not recorded in what was read.")]
    return Section("commands", "Exact commands", blocks)


def build_sources_section(inputs: ReportInputs) -> Section:
    """What was read, and what was left out."""
    rows = [
        [Cell(source.name), Cell(source.kind), Cell(f"{source.nbytes:,}", source.nbytes), Cell(source.sha256)]
        for source in inputs.sources[:200]
    ]
    num_hidden = len(inputs.sources) - len(rows)
    note = f"{num_hidden:,} more were read." if num_hidden > 0 else ""
    blocks: list[Block] = [TableBlock("Files that were read", ("file", "what it is", "bytes", "SHA-256"), rows,
                                 frozenset({0, 1, 3}), False, note)]  # fmt: skip
    if inputs.ignored_files:
        shown_ignored = [f"{name} ({reason})" for name, reason in inputs.ignored_files[:20]]
        num_hidden_ignored = len(inputs.ignored_files) - len(shown_ignored)
        blocks.append(
            Paragraph(
                f"Left out: "
                f"{', '.join(shown_ignored)}{f', and {num_hidden_ignored:,} more' if num_hidden_ignored > 0 else ''}.",
                "unknown",
            )
        )
    return Section("sources", "Sources", blocks)
