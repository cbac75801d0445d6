"""The site of `make docs`: README, docs/, benchmarks/ and the API reference, built into build/site.

Pages are copied into one tree below build/docs, because links between them leave docs/. A link to a file that is no
page becomes plain text, but for the schemas of JSON documents. A page that `SECTIONS` does not name, a link to nothing
and a name that the API reference does not find are errors.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import notebooks

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SOURCES = ROOT / "build" / "docs"
SECTIONS = {
    "Start": {
        "README.md": "kvmnn",
        "docs/tour.md": "Tour",
        "docs/your-cache.md": "Five commands for your cache",
        "docs/backends.md": "Which backend is my phone?",
        "docs/guarantees.md": "LOSSLESS, sizes, privacy",
    },
    "How to": {
        "docs/prefix-cache.md": "Ship an MNN prefix cache",
        "docs/other-engines.md": "Caches of other engines",
        "docs/zarr.md": "Zarr",
        "docs/dense.md": "Dense streams",
        "docs/profile.md": "Profiles of models",
        "docs/prefix-store.md": "Store prefixes",
        "docs/operations.md": "Run a prefix store",
        "docs/lm.md": "Evaluate a language model",
        "docs/gates.md": "Gates",
        "docs/offline.md": "Measure dumps",
        "docs/many.md": "Thousands of files",
        "docs/compressor-forward.md": "Run a compressor",
        "docs/report.md": "Report",
    },
    "Reference": {
        "docs/reference.md": "Commands and options",
        "docs/command.md": "Exit codes and streams",
        "docs/json.md": "JSON documents",
        "docs/policies.md": "Eviction policies",
        "docs/decoders.md": "Which decoders work",
    },
    "Formats": {
        "docs/format.md": "MNN frame",
        "docs/manifest.md": "Manifest",
        "docs/layout.md": "Packed layout",
        "docs/format-v2.md": "Dense stream",
        "docs/format-linear.md": "Linear stream",
        "docs/format-transform.md": "Transform stream",
        "docs/format-profile.md": "Profile",
        "docs/format-store.md": "Prefix store",
        "docs/compressor-weights.md": "Compressor weights",
    },
    "Explanation": {
        "docs/ratios.md": "What ratio to expect",
        "docs/runtime.md": "Lossless runtime",
        "docs/h2o.md": "H2O planner",
        "docs/design.md": "How kvmnn is built",
    },
    "Project": {
        "docs/reliability.md": "Reliability",
        "docs/fuzzing.md": "Fuzzing",
        "CONTRIBUTING.md": "Contributing",
        "CHANGELOG.md": "Changelog",
        "SECURITY.md": "Security",
    },
}
API = (
    "kvmnn",
    "bundle",
    "formats",
    "policies",
    "lm",
    "evaluation",
    "store",
    "runtime",
    "compressor",
    "batch",
    "reports",
)
CONFIGURATION = """\
site_name: kvmnn
site_description: The KV cache of language models on MNN, outside the engine
docs_dir: build/docs
site_dir: build/site
theme:
  font: false
  features: [navigation.sections, content.code.copy, search.highlight]
  palette:
    - media: "(prefers-color-scheme: light)"
      scheme: default
      toggle: {icon: lucide/moon, name: Dark}
    - media: "(prefers-color-scheme: dark)"
      scheme: slate
      toggle: {icon: lucide/sun, name: Light}
plugins:
  - search
  - mkdocstrings:
      handlers:
        python:
          paths: ["%(root)s"]
          options:
            docstring_style: numpy
            show_source: false
            show_root_heading: true
            members_order: alphabetical
            heading_level: 2
            docstring_section_style: list
extra_css: [extra.css]
nav: %(nav)s
"""
# Names in tables break at their ends only; tables without a heading have no empty row.
STYLES = """\
.md-typeset td code { word-break: normal; overflow-wrap: normal; }
.md-typeset thead:not(:has(th:not(:empty))) { display: none; }
.md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: 0.5em 0.7em; }
"""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def main() -> int:
    """Stage all pages and build the site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage-only", action="store_true", help="write build/docs and check links, build nothing")
    arguments = parser.parse_args()
    shutil.rmtree(SOURCES, ignore_errors=True)
    pages = list_pages()
    problems = [problem for path in pages for problem in stage_page(path, pages)]
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    (SOURCES / "extra.css").write_text(STYLES, encoding="utf-8")
    for name in API:
        stage_api_page(name)
    for path in NOTEBOOKS:
        target = SOURCES / path.relative_to(ROOT).with_suffix(".md")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(notebooks.format_page(json.loads(path.read_text("utf-8")), target), encoding="utf-8")
    configuration = ROOT / "build" / "site.yml"
    nav = json.dumps(build_nav(pages))
    configuration.write_text(CONFIGURATION % {"root": ROOT, "nav": nav}, encoding="utf-8")
    # the builder wants its configuration at the root of the project
    link = ROOT / "mkdocs.yml"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or it would stay
    try:
        link.write_text(configuration.read_text(encoding="utf-8"), encoding="utf-8")
        return 0 if arguments.stage_only else subprocess.call(["zensical", "build", "--strict"], cwd=ROOT)
    finally:
        link.unlink(missing_ok=True)


def list_pages() -> list[Path]:
    """List all pages: those of the sections, which must name every page of docs/, and the benchmarks."""
    listed = [ROOT / name for pages in SECTIONS.values() for name in pages]
    return [path for path in listed if path.exists()] + sorted((ROOT / "benchmarks").glob("*.md"))


def list_unlisted_pages() -> list[str]:
    """List pages of docs/ that no section names."""
    names = {name for pages in SECTIONS.values() for name in pages}
    return sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if f"docs/{path.name}" not in names)


def locate(path: Path) -> Path:
    """Return where a page stands in the site's tree."""
    return Path("index.md") if path.name == "README.md" else path.relative_to(ROOT)


def stage_page(path: Path, pages: list[Path]) -> list[str]:
    """Copy a page with links that hold in the site; return what is wrong with them."""
    problems = []
    target = SOURCES / locate(path)
    target.parent.mkdir(parents=True, exist_ok=True)

    def convert(match: re.Match[str]) -> str:
        is_image, text, address = match.groups()
        if re.match(r"[a-z]+:", address):
            return match[0]
        name, _, anchor = address.partition("#")
        linked = (path.parent / name).resolve() if name else path
        if anchor and linked in pages and anchor not in list_anchors(linked):
            problems.append(f"{path.relative_to(ROOT)}: links to {address}, a heading that does not exist")
        if not name:
            return match[0]
        if not linked.exists():
            problems.append(f"{path.relative_to(ROOT)}: links to {address}, which does not exist")
        is_file = is_image or linked.parent == ROOT / "docs" / "schemas"
        if is_file and linked.exists():
            copy = SOURCES / linked.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, copy)
        elif linked not in pages:
            return text
        located = locate(linked) if linked in pages else linked.relative_to(ROOT)
        relative = Path(*[".."] * (len(locate(path).parts) - 1)) / located
        return f"{is_image}[{text}]({relative.as_posix()}{'#' + anchor if anchor else ''})"

    text = LINK.sub(convert, path.read_text(encoding="utf-8"))
    # indices of variables, *g*[*j*][*k*], are no references
    target.write_text(re.sub(r"(?<=\*)\](?=\[)", "]\\\\", text), encoding="utf-8")
    return problems


@functools.cache
def list_anchors(path: Path) -> frozenset[str]:
    """List the anchors of a page's headings, as GitHub and the builder make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", LINK.sub(r"\2", text), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles)


def stage_api_page(name: str) -> None:
    """Write the page of a package, which the builder fills from docstrings."""
    package = name if name == "kvmnn" else f"kvmnn.{name}"
    target = SOURCES / "api" / f"{name}.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"# {package}\n\n::: {package}\n", encoding="utf-8")


def build_nav(pages: list[Path]) -> list[object]:
    """Build the navigation."""
    sections: list[object] = []
    for title, names in SECTIONS.items():
        entries = [{label: locate(ROOT / name).as_posix()} for name, label in names.items() if ROOT / name in pages]
        if title == "Reference":
            entries += [{name if name == "kvmnn" else f"kvmnn.{name}": f"api/{name}.md"} for name in API]
        sections.append({title: entries})
    benchmarks = [path for path in pages if path.parent.name == "benchmarks"]
    examples = [{path.stem: path.relative_to(ROOT).with_suffix(".md").as_posix()} for path in NOTEBOOKS]
    sections.append({"Examples": examples})
    return [*sections, {"Benchmarks": [{path.stem: locate(path).as_posix()} for path in benchmarks]}]


if __name__ == "__main__":
    raise SystemExit(main())
