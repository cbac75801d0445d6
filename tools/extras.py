"""What an extra of pyproject.toml asks for, one requirement a line: `python tools/extras.py test lint`.

With it the Makefile installs what extras need without building kvmnn a second time.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path


def requirements(extras: dict[str, list[str]], name: str) -> list[str]:
    """The requirements of the extra `name`; those of kvmnn's own extras in their place."""
    found: list[str] = []
    for line in extras[name]:
        own = re.fullmatch(r"kvmnn\[([\w, ]+)\]", line)
        found += (
            [entry for extra in own[1].split(",") for entry in requirements(extras, extra.strip())] if own else [line]
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="+", metavar="EXTRA")
    names = parser.parse_args().extras
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    print(*dict.fromkeys(line for name in names for line in requirements(known, name)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
