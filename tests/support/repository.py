"""Where things lie in this repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
DOCS = ROOT / "docs"
SUPPORT = ROOT / "tests" / "support"
NATIVE = ROOT / "pyx" / "kvmnn"
SELFTEST = ROOT / "pyx" / "selftest"
