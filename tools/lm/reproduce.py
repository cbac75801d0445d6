"""Run the configurations of fixtures/lm/expected.json and compare with what was measured there without kvmnn.

    python tools/lm/reproduce.py                # all 58 in chunks of 4 on 8 texts, and 14 token by token on 4
    python tools/lm/reproduce.py --only h2o --texts 2

Exit code 1 where the NLL of any file differs by more than 1e-3 relative; policies that draw are compared by their
spread: the mean difference over the files must lie within four standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvmnn.evaluation import Configuration, EvaluationResult, EvaluationSettings, evaluate
from kvmnn.evaluation.settings import FULL_POLICY

FIXTURES = Path(__file__).parents[2] / "fixtures" / "lm"
TOLERANCE = 1e-3
STANDARD_ERRORS = 4.0
STRATEGIES = {"l2_low": "keep_low", "l2_high": "keep_high", "l2_random": "random"}


def configuration(name: str, config: Mapping[str, Any]) -> Configuration:
    """What kvmnn calls a configuration of expected.json."""
    kind = config["kind"]
    if kind == "full":
        return Configuration(FULL_POLICY)
    options: dict[str, Any] = {"budget": config["budget"], "skip_layers": tuple(config.get("skip", ()))}
    positions: Any = "stored" if config.get("positions") == "physical" else "true"
    if kind == "recent":
        return Configuration(name, "recent_only", options)
    if kind == "streaming":
        return Configuration(name, "streaming", options | {"sink": config["sinks"]}, positions=positions)
    if kind in STRATEGIES:
        chosen = {"recent_ratio": config["share"], "strategy": STRATEGIES[kind]}
        return Configuration(name, "l2_fixed", options | chosen)
    heavy = {"sink": config["sinks"], "recent": config["recent"], "decay": config.get("decay", 1.0)}
    return Configuration(name, "h2o_decayed" if kind == "h2o" else "h2o_decayed_heads", options | heavy)


def family(name: str, config: Mapping[str, Any]) -> str:
    """What is reported together."""
    words = [config["kind"]]
    words += ["decayed"] if config.get("decay", 1.0) != 1.0 else []
    words += ["stored positions"] if config.get("positions") == "physical" else []
    words += ["skip 0-1"] if config.get("skip") else []
    return " ".join(words)


def measured(part: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *, texts: int, jobs: int) -> EvaluationResult:
    """The results of some rows of a part of expected.json, on its first texts."""
    settings = EvaluationSettings(
        tokens=part["tokens_per_file"],
        chunk=part["chunk"],
        deep_from=part["deep_from"],
        project_definitions=False,
    )
    files = [FIXTURES / "texts" / name for name in part["files"][:texts]]
    wanted = [configuration(row["name"], row["config"]) for row in rows]
    return evaluate(FIXTURES / "model.onnx", files, wanted, settings=settings, jobs=jobs)


def compare(part: Mapping[str, Any], *, texts: int, only: str, jobs: int) -> Iterator[tuple[str, str, float, bool]]:
    """Name, family, largest relative difference of a file's NLL, and whether it holds, of every configuration."""
    expected = [row for row in part["rows"] if only in row["name"] or row["config"]["kind"] == "full"]
    rows = {row.label: row for row in measured(part, expected, texts=texts, jobs=jobs).rows}
    for row in expected:
        found = np.array([document.nll for document in rows[row["name"]].documents])
        there = np.array(row["per_file_nll"][: len(found)])
        worst = float(np.abs(found / there - 1).max())
        holds = worst <= TOLERANCE if row["config"]["kind"] != "l2_random" else within_spread(found - there)
        yield row["name"], family(row["name"], row["config"]), worst, holds


def within_spread(differences: Sequence[float] | np.ndarray) -> bool:
    """Whether two draws of a random policy differ no more than the files scatter."""
    values = np.asarray(differences, np.float64)
    if len(values) < 2:
        return bool(abs(values[0]) < 0.05)
    return bool(abs(values.mean()) <= STANDARD_ERRORS * values.std(ddof=1) / math.sqrt(len(values)))


def main() -> int:
    """Compare, print, and say by the exit code whether everything holds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--texts", type=int, default=8, help="texts at most")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--verbose", action="store_true", help="a line for every configuration")
    arguments = parser.parse_args()
    expected = json.loads((FIXTURES / "expected.json").read_text())
    failed = 0
    for title in ("chunks_of_4", "token_by_token"):
        began = time.perf_counter()
        worst: dict[str, float] = defaultdict(float)
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for name, of, difference, holds in compare(
            expected[title], texts=arguments.texts, only=arguments.only, jobs=arguments.jobs
        ):
            worst[of] = max(worst[of], difference)
            counts[of][0] += 1
            counts[of][1] += holds
            failed += not holds
            if arguments.verbose:
                print(f"  {name:<44} {difference:.2e} {'' if holds else 'DIFFERS'}")
        print(f"{title}: {time.perf_counter() - began:.0f} s")
        for of, difference in worst.items():
            total, held = counts[of]
            print(f"  {of:<28} largest relative difference {difference:.2e}  {held} of {total} hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
