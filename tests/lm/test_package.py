"""`kvmnn.lm` as users meet it: after a plain import, without its optional packages, and as two calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from repository import FIXTURES

import kvmnn
from kvmnn.errors import SourceError
from kvmnn.lm import RunOptions, SamplingOptions, dump_kv, generate
from kvmnn.policies import create_policy

MODEL = FIXTURES / "lm"
TEXT = MODEL / "texts" / "trace.py.txt"


def python(code: str) -> str:
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.slow
def test_lm_package_import_is_lazy() -> None:
    shown = python(
        "import kvmnn, sys\n"
        "assert 'kvmnn.lm' not in sys.modules\n"
        "for name in kvmnn.lm.__all__: print(name, getattr(kvmnn.lm, name).__module__)\n"
        "print(kvmnn.policies.create_policy('full'))\n"
        "try: kvmnn.lm.missing\n"
        "except AttributeError as error: print(error)\n"
        "assert 'onnxruntime' not in sys.modules and 'onnx' not in sys.modules\n"
    )
    assert "evaluate kvmnn.evaluation." in shown and "generate kvmnn.lm." in shown
    assert "FullCache()" in shown and "module 'kvmnn.lm' has no attribute 'missing'" in shown


@pytest.mark.slow
@pytest.mark.parametrize("package", ["onnxruntime", "onnx", "tokenizers"])
def test_lm_package_missing_dependency_is_named_on_use(package: str) -> None:
    shown = python(
        f"import sys; sys.modules[{package!r}] = None\n"
        "import kvmnn\n"
        f"try: kvmnn.lm.generate({str(MODEL)!r}, 'x', max_tokens=1)\n"
        "except kvmnn.MissingDependencyError as error: print(error)\n"
    )
    wanted = "pip install onnxruntime onnx tokenizers"
    assert shown == f"this needs the package {package}: {wanted}\n"


def test_generate_with_and_without_policy() -> None:
    told: list[int] = []
    made = generate(
        MODEL, "def f(x):", create_policy("streaming", budget=6, sink=2), max_tokens=5, progress=told.append,
        sampling=SamplingOptions(temperature=0.8, seed=3), options=RunOptions(chunk=2),
    )  # fmt: skip
    assert made.cut is not None and set(made.cut.generation.tokens_kept) == {6} and sum(told) == 10
    assert (made.label, made.full.label, made.policy.label) == ("LOSSY", "LOSSLESS", "streaming 6 sink=2")
    assert made.to_dict()["policy"]["options"] == {"budget": 6, "sink": 2}
    assert "LOSSY: streaming 6 sink=2" in str(made) and "-- full cache --" in made.format_lines(30)[0]
    alone = generate(MODEL, "def f(x):", max_tokens=3)
    assert alone.cut is None and (alone.label, alone.first_difference) == ("LOSSLESS", None)
    assert alone.to_dict()["policy"] == {
        "label": "full", "policy": "full", "options": {}, "preset": None, "seed_method": None, "positions": "true",
    }  # fmt: skip


@pytest.mark.slow
def test_dump_kv_with_policy_and_dtype(tmp_path: Path) -> None:
    dump = dump_kv(MODEL, TEXT, tmp_path / "kv", create_policy("recent_only", budget=9), tokens=20, dtype="fp16")
    assert (dump.label, dump.tokens_seen, dump.tokens_kept) == ("LOSSY", 20, (20, 20, 9, 9, 9, 9))
    assert (
        dump.policy.label == "recent_only 9 skip_layers=0+1"
        and dump.rounding.source == "fp32"
        and dump.rounding.changed
    )
    assert np.load(tmp_path / "kv" / "layer_5.key.npy").shape == (4, 9, 64)
    assert str(dump).startswith(f"{tmp_path / 'kv'}: 6 layers, 9 to 20 tokens, fp16, ")
    full = dump_kv(MODEL, TEXT, tmp_path / "full", tokens=7)
    assert full.label == "UNCHANGED" and str(full).endswith("UNCHANGED (the words that the model computed)")


def test_generate_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no tokenizer\.json"):
        generate(tmp_path, "x")
    assert kvmnn.lm.Runner is not None
