"""Output is there whole or not at all, and nothing that exists is lost by accident."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvmnn.errors import OutputError
from kvmnn.files.atomic import DirectoryOutput, FileOutput
from kvmnn.files.temporary import iter_unmoved_files


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_file_output_appears_at_commit(tmp_path):
    with FileOutput(tmp_path / "a") as output:
        output.file.write(b"one")
        output.open_sidecar(".json").write(b"{}")
        assert not (tmp_path / "a").exists()
        output.commit()
    assert names(tmp_path) == ["a", "a.json"]
    assert (tmp_path / "a").read_bytes() == b"one"


def test_file_output_has_permissions_of_a_new_file(tmp_path):
    (tmp_path / "plain").touch()
    with FileOutput(tmp_path / "a") as output:
        output.commit()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, None])
@pytest.mark.parametrize("existing", [False, True])
def test_file_output_without_commit_leaves_nothing(tmp_path, error, existing):
    if existing:
        (tmp_path / "a").write_bytes(b"old")
    before = names(tmp_path)

    def attempt() -> None:
        with FileOutput(tmp_path / "a", force=True) as output:
            output.file.write(b"x" * 1_000_000)
            output.open_sidecar(".json").write(b"{}")
            if error:
                raise error

    if error:
        with pytest.raises(error):
            attempt()
    else:
        attempt()
    assert names(tmp_path) == before
    assert not existing or (tmp_path / "a").read_bytes() == b"old"


def test_file_output_existing_file_needs_force(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(OutputError, match="exists already"):
        FileOutput(tmp_path / "a")
    with FileOutput(tmp_path / "a", force=True) as output:
        output.file.write(b"new")
        output.commit()
    assert (tmp_path / "a").read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


def test_file_output_file_created_concurrently_is_not_replaced(tmp_path):
    with pytest.raises(OutputError, match="exists already"), FileOutput(tmp_path / "a") as output:
        (tmp_path / "a").write_bytes(b"theirs")
        output.commit()
    assert (tmp_path / "a").read_bytes() == b"theirs"
    assert names(tmp_path) == ["a"]


def test_file_output_never_replaces_its_input(tmp_path):
    (tmp_path / "a").write_bytes(b"input")
    (tmp_path / "link").symlink_to("a")
    os.link(tmp_path / "a", tmp_path / "hard")
    for target in ("a", "link", "hard"):
        with pytest.raises(OutputError, match="is the input itself"):
            FileOutput(tmp_path / target, force=True, exclude=[str(tmp_path / "a")])
    assert (tmp_path / "a").read_bytes() == b"input"


def test_file_output_follows_symbolic_links(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    with FileOutput(tmp_path / "link", force=True) as output:
        output.file.write(b"new")
        output.commit()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_file_output_directory_is_refused(tmp_path):
    with pytest.raises(OutputError, match="is a directory"):
        FileOutput(tmp_path, force=True)
    with pytest.raises(OutputError, match=r"a: cannot be written: its folder .*missing does not exist"):
        FileOutput(tmp_path / "missing" / "a")


def test_file_output_device_is_written_and_stays(tmp_path):
    with FileOutput(os.devnull) as output:
        assert output.is_device
        output.file.write(b"gone")
        output.commit()
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    with (
        pytest.raises(OutputError, match="/dev/full: cannot be written: No space left"),
        FileOutput("/dev/full") as full,
    ):
        full.file.write(b"x" * 100_000)
        full.commit()


def write_directory(target: Path, **options: object) -> None:
    with DirectoryOutput(target, index="index", **options) as output:  # type: ignore[arg-type]
        output.open_file("a").write(b"a")
        output.open_file("b").write(b"b")
        output.open_file("index").write(b"a b")
        output.commit()


def test_directory_output_appears_at_commit(tmp_path):
    write_directory(tmp_path / "out")
    assert names(tmp_path) == ["out", "out/a", "out/b", "out/index"]


def test_directory_output_existing_directory_keeps_other_files(tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    write_directory(tmp_path)
    assert names(tmp_path) == ["a", "b", "index", "mine"]
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(OutputError, match="exists already"):
        write_directory(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"old"
    write_directory(tmp_path, force=True)
    assert (tmp_path / "a").read_bytes() == b"a"
    assert names(tmp_path) == ["a", "b", "index", "mine"]


def test_directory_output_index_created_concurrently_is_not_replaced(tmp_path):
    with pytest.raises(OutputError, match="exists already"), DirectoryOutput(tmp_path, index="index") as output:
        output.open_file("a").write(b"a")
        output.open_file("index").write(b"a")
        (tmp_path / "index").write_bytes(b"theirs")
        output.commit()
    assert (tmp_path / "index").read_bytes() == b"theirs"


def test_directory_output_without_index_replaces_each_file(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with DirectoryOutput(tmp_path, force=True) as output:
        output.open_file("a").write(b"new")
        output.commit()
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("existing", [False, True])
def test_directory_output_without_commit_leaves_nothing(tmp_path, existing):
    if existing:
        (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt), DirectoryOutput(tmp_path / "out") as output:
        output.open_file("a").write(b"a")
        raise KeyboardInterrupt
    assert names(tmp_path) == (["out"] if existing else [])


def test_directory_output_file_is_refused(tmp_path):
    (tmp_path / "out").write_bytes(b"file")
    with pytest.raises(OutputError, match="is not a directory"):
        DirectoryOutput(tmp_path / "out", force=True)


def test_directory_output_failed_move_leaves_no_index(tmp_path, monkeypatch):
    write_directory(tmp_path)
    real, moved = os.replace, []

    def failing(source: object, target: Path) -> None:
        assert not (tmp_path / "index").exists()
        if moved:
            raise OSError(5, "Input/output error")
        moved.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OutputError, match="Input/output error"):
        write_directory(tmp_path, force=True)
    assert [name for name in names(tmp_path) if name[0] != "."] == ["a", "b"]
    ((_, unmoved),) = iter_unmoved_files(tmp_path)
    assert unmoved == ["b", "index"]
    monkeypatch.undo()
    write_directory(tmp_path, force=True)
    assert names(tmp_path) == ["a", "b", "index"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_directory_output_syncs_before_rename(tmp_path, monkeypatch):
    real, synced = os.fsync, []

    def noted(handle: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        real(handle)

    def renamed(source: str, target: str) -> None:
        assert {"a", "b", "c", "folder", os.path.basename(source)} == set(synced)
        rename(source, target)

    rename = os.rename
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", renamed)
    with DirectoryOutput(tmp_path / "out") as output:
        for name in ("a", "b", "folder/c"):
            output.open_file(name).write(name.encode())
        assert not synced
        output.commit()
    assert synced[-1] == tmp_path.name


def test_directory_output_failing_disk_names_the_file(tmp_path, monkeypatch):
    def failing(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with (
        pytest.raises(OutputError, match="out/a: cannot be written: Input/output error"),
        DirectoryOutput(tmp_path / "out") as output,
    ):
        output.open_file("a").write(b"a")
        output.commit()
    assert names(tmp_path) == []
