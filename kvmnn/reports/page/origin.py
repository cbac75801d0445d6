"""Where figures are from: machine and settings, exact commands, and the files that were read."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ...text import count
from .blocks import Block, Cell, Commands, Facts, Section, Table, Text, missing
from .material import Material


def environment_section(found: Material) -> Section:
    """Models, machines, versions, settings."""
    blocks: list[Block] = []
    for name, about in found.about:
        blocks.append(Facts([
            ("from", name), ("model", about.model), ("SHA-256 of the model", about.model_sha256),
            ("kvmnn", about.kvmnn), ("Python", about.python), ("machine", about.machine),
            ("processors", "not known" if about.processors is None else f"{about.processors:,}"),
            *((f"setting {key}", _plain(value)) for key, value in about.settings.items()),
        ]))  # fmt: skip
        blocks += _engine_keys(about.cases)
    for name, one in found.evaluations:
        model, settings = one.model, one.settings
        shape = f"{count(model.layers, 'layer')}, {model.kv_heads} KV heads of {model.head_dim}, {model.cache_dtype}"
        blocks.append(Facts([
            ("from", name), ("model", f"{model.name} ({model.path}): {shape}"), ("SHA-256 of the model", model.sha256),
            ("kvmnn", one.kvmnn), ("texts", f"{len(one.documents):,}"), ("threads", f"{settings.threads:,}"),
            ("prompt", f"{settings.prompt:,} tokens"), ("fed at a time", count(settings.chunk, "token")),
            ("seed", f"{settings.seed}"),
        ]))  # fmt: skip
    for name, measured in found.measured:
        dump, codec = measured.evaluation.dump_dir, measured.evaluation.codec
        blocks.append(Facts([("from", name), ("input", _plain(dump)), ("codec", codec)]))
    for name, replay in found.replays:
        blocks.append(Facts([("from", name), ("behaviour", replay.behaviour), ("layers", f"{replay.layers:,}")]))
    for name, codecs in found.codecs:
        machine = codecs.machine
        blocks.append(Facts([
            ("from", name), ("processor", machine.processor), ("processors", f"{machine.cpus:,}"),
            ("system", machine.system), ("threads", f"{codecs.threads:,}"),
            ("not installed", ", ".join(sorted({name for array in codecs.arrays for name in array.missing})) or "none"),
        ]))  # fmt: skip
    if not blocks:
        blocks = [missing("Environment: not recorded in what was read.")]
    return Section("environment", "Environment", blocks)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _engine_keys(cases: object) -> Iterator[Block]:
    """Keys of the engine in each case, a row each; only those that some case has."""
    engines = {
        name: case["engine"]
        for name, case in (cases.items() if isinstance(cases, dict) else ())
        if isinstance(case, dict) and isinstance(case.get("engine"), dict) and case["engine"]
    }
    shown = dict(list(engines.items())[:6])
    keys = list(dict.fromkeys(key for engine in shown.values() for key in engine))[:80]
    if not keys:
        return
    rows = [
        [Cell(key), *(Cell(_plain(engine[key]) if key in engine else "-") for engine in shown.values())] for key in keys
    ]
    more = len(engines) - len(shown)
    note = f"{more:,} more cases are in run.json." if more > 0 else ""
    yield Table("Keys of the engine, case by case", ["key", *shown], rows, frozenset({0}), False, note)


def commands_section(found: Material) -> Section:
    """The command that made each file, where the file says it."""
    every = [
        *((name, one.command) for name, one in found.about),
        *((name, one.command) for name, one in found.rounds if one.command),
        *((name, one.command) for name, one in found.evaluations),
        *((name, one.command) for name, one in found.measured),
        *((name, one.command) for name, one in found.replays),
        *((name, one.command) for name, one in found.codecs),
    ]
    lines = [(name, command) for name, command in every if command]
    silent = [name for name, command in every if not command]
    blocks: list[Block] = [Commands(lines)] if lines else []
    if silent:
        blocks.append(missing(f"Command not recorded in: {', '.join(silent)}."))
    if not blocks:
        blocks = [missing("Commands: not recorded in what was read.")]
    return Section("commands", "Exact commands", blocks)


def sources_section(found: Material) -> Section:
    """What was read, and what was left out."""
    rows = [
        [Cell(one.name), Cell(one.kind), Cell(f"{one.nbytes:,}", one.nbytes), Cell(one.sha256)]
        for one in found.sources[:200]
    ]
    more = len(found.sources) - len(rows)
    note = f"{more:,} more were read." if more > 0 else ""
    blocks: list[Block] = [Table("Files that were read", ("file", "what it is", "bytes", "SHA-256"), rows,
                                 frozenset({0, 1, 3}), False, note)]  # fmt: skip
    if found.left_out:
        shown = [f"{name} ({why})" for name, why in found.left_out[:20]]
        rest = len(found.left_out) - len(shown)
        blocks.append(Text(f"Left out: {', '.join(shown)}{f', and {rest:,} more' if rest > 0 else ''}.", "unknown"))
    return Section("sources", "Sources", blocks)
