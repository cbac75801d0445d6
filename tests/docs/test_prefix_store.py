"""The commands of docs/prefix-store.md run as shown, and its tables agree with the code."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.commands import comparable, retold
from engine_client import needs_engine, unpack_fixture
from repository import DOCS, ROOT

from kvmnn.frames import zstd
from kvmnn.store import PrefixStore, unit, unit_codec, write_path

PAGE = DOCS / "prefix-store.md"
FORMAT_PAGE = DOCS / "format-store.md"


def test_call_table_lists_every_method() -> None:
    table = PAGE.read_text().split("| call | what |\n")[1].split("\n\n")[0]
    told = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    public = {name: what for name, what in vars(PrefixStore).items() if not name.startswith("_")}
    attributes = {name for name, what in public.items() if isinstance(what, property)}
    assert told == public.keys() - attributes
    said = PAGE.read_text().split("\nAttributes: ")[1].split("\n\n")[0]
    assert attributes <= set(re.findall(r"`(\w+)`", said))


def test_unit_sizes_equal_the_code() -> None:
    text = FORMAT_PAGE.read_text()
    assert f"`{unit.FRAME_MAGIC.decode()}`" in text
    assert f"({unit_codec.MAX_UNIT_TOKENS} tokens, {unit_codec.MAX_UNIT_RAW_BYTES >> 20} MiB of raw bytes)" in text
    assert unit.count_header_bytes(10, 4) == 8 + 12 + 32 + 4 * 10 + 24 * 4 + 8
    assert f"`{unit.DENSE_MAGIC.decode()}`" in text
    assert f"at most {unit.MAX_HISTORY_ROWS}; units that these need, at most {unit.MAX_CHAIN_UNITS}" in text
    assert unit.count_header_bytes(10, 4, 2) == 8 + 12 + 32 + 12 + 16 + 4 * 10 + 8 * 2 + 16 * 4 + 8
    words = " ".join(text.split())
    assert f"at least {100 - 100 * write_path.DENSE_MAX_SIZE_RATIO:.0f} % smaller" in words
    assert f"more than {100 * write_path.SHARED_TABLES_MAX_OVERHEAD - 100:.0f} % larger with these" in words
    assert f"units of {unit.MIN_TABLE_TOKENS} tokens or more" in words
    assert f"units of fewer than {write_path.MIN_OWN_TABLE_TOKENS} tokens always share" in words
    assert f"on one unit in {write_path.RETRY_INTERVAL_UNITS} from there" in words


def test_figures_equal_benchmark() -> None:
    measured = json.loads((ROOT / "benchmarks" / "store.json").read_text())
    text = PAGE.read_text()
    for dtype, effort in itertools.product(("32", "16"), ("fast", "dense")):
        rows = [row for row in measured["frames"] if (row["dtype"], row["effort"]) == (f"float{dtype}", effort)]
        ratios = " | ".join(f"{row['ratio']:.3f}" for row in rows)
        assert f"| ratio, fp{dtype}, {'' if effort == 'dense' else 'effort '}{effort} | {ratios} |" in text
    speeds = {(row["dtype"], row["effort"]): row for row in measured["speeds"] if row["clock"] == "process_time"}
    for name in ("get", "put"):
        for dtype in ("float32", "float16"):
            for codec in ("dense", "fast"):
                assert f"{speeds[dtype, codec][f'{name}_mb_s']:,.0f}" in text, (name, dtype, codec)
    for engine in ("onnxruntime", "MNN"):
        assert engine in measured["first"], "the benchmark is committed with --mnn"
        rows = {row["tokens"]: row for row in measured["first"][engine]["rows"]}
        assert all(rows[tokens]["stored"] < rows[tokens]["plain"] for tokens in (512, 1024, 2048)), engine


def test_figures_of_traces_equal_benchmark() -> None:
    words = " ".join(PAGE.read_text().split())
    traces = json.loads((ROOT / "benchmarks" / "store_traces.json").read_text())["traces"]
    (trace,) = (trace for trace in traces if trace["requests"] == 12_031)
    (_, lru, larger_lru, _), (_, benefit, larger_benefit, _), (_, belady, larger_belady, _) = (
        [f"{100 * rate:.2f}" for rate in trace["hit_rates"][policy]] for policy in ("lru", "benefit", "belady")
    )
    assert f"200 GB find {lru} % of the tokens by `lru`, {benefit} by `benefit`, {belady} by `belady`;" in words
    assert f"1,000 GB {larger_lru}, {larger_benefit} and {larger_belady} (" in words


@pytest.mark.skipif(not zstd.is_byte_exact(), reason="sizes of frames hold for libzstd 1.5.2 to 1.5.6")
def test_commands_print_what_the_page_shows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("$ kvmnn store") > 5
    assert comparable(retold(page)) == comparable(page)


@pytest.mark.slow
@needs_engine
def test_engine_example_runs_with_the_fork(tmp_path: Path) -> None:
    """The second prompt shares 40 tokens with the first; it also runs against an empty store."""
    (script,) = re.findall(r"^```python\n(import .*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(script.splitlines()) < 40
    (tmp_path / "way.py").write_text(script)
    model = unpack_fixture("model", tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    def run(folder: str, prompt: list[int]) -> tuple[int, list[int]]:
        argv = [sys.executable, "-P", str(tmp_path / "way.py"), str(model), str(tmp_path / folder), json.dumps(prompt)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        return said["stored"], said["tokens"]

    one, two = [*range(60, 120)], [*range(60, 100), 7, 8, 9]
    assert run("store", one)[0] == 0
    stored, tokens = run("store", two)
    assert stored == 40
    assert run("another", two) == (0, tokens)
