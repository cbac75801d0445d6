"""A sample of what was measured without kvmnn, to 1e-3 (in truth to the last digit that was written down).

tools/lm/reproduce.py runs all of it.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import reproduce

SAMPLE = (
    "streaming 4+124",
    "l2_low 128 share 0.5 skip01",
    "h2o 128 4+92+32",
    "h2o_head 128 4+60+64 decay 0.98",
)
EXPECTED = json.loads((reproduce.FIXTURES / "expected.json").read_text(encoding="utf-8"))
TEXTS = 1


@pytest.mark.slow
def test_reproduce_equals_recorded_measurements() -> None:
    part = EXPECTED["chunks_of_4"]
    wanted = {row["name"]: row for row in part["rows"] if row["name"] in (*SAMPLE, "full")}
    assert len(wanted) == len(SAMPLE) + 1
    rows = {row.label: row for row in reproduce.measured(part, list(wanted.values()), texts=TEXTS, jobs=0).rows}
    for name, expected in wanted.items():
        found = np.array([document.nll for document in rows[name].documents])
        there = np.array(expected["per_file_nll"][:TEXTS])
        assert np.abs(found / there - 1).max() < 1e-3, name
        assert rows[name].tokens == 2048 * TEXTS
    deep = {name: row.deep.nll for name, row in rows.items()}
    assert all(deep["full"] < value for name, value in deep.items() if name != "full"), "as its README says"
    assert deep["h2o 128 4+92+32"] > deep["streaming 4+124"]


def test_reproduce_within_spread_limits():
    assert reproduce.within_spread([0.01, -0.012, 0.003])
    assert not reproduce.within_spread([0.01, 0.0101, 0.0099])
    assert reproduce.within_spread([0.01])
    assert not reproduce.within_spread([0.2])
