"""Files for those who publish and cite kvmnn say the version that is built, and commands that exist."""

from __future__ import annotations

import re
import tomllib

from repository import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_citation_names_the_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_workflows_run_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    targets = set(re.findall(r"make ([a-z-]+)", workflow)) | set(re.findall(r"'(test[a-z-]*)'", workflow))
    assert {"lint", "docs", "test", "test-all"} == targets
    for target in targets:
        assert re.search(rf"^{target}( [a-z-]+)*:", makefile, re.MULTILINE) or f"{target}:" in makefile
