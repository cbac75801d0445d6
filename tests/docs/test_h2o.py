"""The command of docs/h2o.md runs as shown."""

from __future__ import annotations

import json
from pathlib import Path

from repository import DOCS

from kvmnn.cli.entry_point import main
from kvmnn.policies.h2o import H2OConfig, plan_blocks

PAGE = DOCS / "h2o.md"
SCORES = [9, 1, 2, 8, 1, 0, 3, 7, 1, 2, 2, 5, 5]


def test_command_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("scores.json").write_text(json.dumps(SCORES))
    command, *shown = PAGE.read_text().split("    $ kvmnn ")[1].split("\n\n")[0].splitlines()
    assert main(command.split()) == 0
    assert capsys.readouterr().out.splitlines() == [line.removeprefix("    ") for line in shown]


def test_default_config_evicts_from_1024_tokens():
    assert H2OConfig(target_mode="adaptive").target_lossy_ratio == 3.0
    lengths = [kv for kv in range(512, 2000) if plan_blocks([0.0] * -(-kv // 64), kv, H2OConfig()).num_evicted]
    assert lengths[0] == 1024
