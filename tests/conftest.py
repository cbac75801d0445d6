"""What every test needs to run against the installed kvmnn, whatever the working directory."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from repository import FIXTURES

from kvmnn import _simd

# The processes of a test run share its cores: BLAS's threads would spin on those of others. Child processes inherit it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Child processes would otherwise import the checkout's kvmnn/, whose kernels are not compiled, from their working
# directory.
os.environ["PYTHONSAFEPATH"] = "1"

# On a machine that others use, and under sanitizers, a time limit of an example says nothing of kvmnn.
settings.register_profile("kvmnn", deadline=None)
settings.load_profile("kvmnn")

# A command waits for the disk with every file; no power fails here, and no test could see that it did not wait.
os.fsync = lambda descriptor: None

# Shells start what runs in the background with SIGINT ignored, and children inherit that: none could be interrupted.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that have slow tests, so that no worker is left alone with a long one at the end.

    The tests of a file stay together: two workers would make its fixtures twice.
    """
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the 13,000 tests out of garbage collections: going through them takes a quarter of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """A verb of the command in this process: its streams, once the exit code is the one expected.

    The verb may be two words, such as "mnn pack". Documents of ``--json`` are compared with their schemas.
    """
    from json_documents import SCHEMAS, list_problems
    from reader_sample import call_main

    def call(*argv: object, code: int = 0) -> SimpleNamespace:
        capsys.readouterr()
        words = [str(arg) for arg in argv]
        exit_code = call_main([*" ".join(words[:1]).split(), *words[1:]])
        streams = capsys.readouterr()
        assert exit_code == code, streams.err
        if "--json" in words and SCHEMAS.exists():
            assert not list_problems(" ".join(words).split(" "), streams.out)
        return streams

    return call


@pytest.fixture
def without_collector() -> Iterator[None]:
    """No garbage collections: of syntax trees of all modules they take as long as parsing, and find nothing."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations and batches of the command run in this process, where its processes are not what is tested."""
    from in_process import measure_in_process, run_jobs_in_process

    measure_in_process(monkeypatch)
    run_jobs_in_process(monkeypatch)


@pytest.fixture
def shared_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped model is opened once in this process, not by every evaluation and command."""
    from shared_sessions import share_sessions

    share_sessions(monkeypatch)


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with the files of `fixtures/<name>`, an archive unpacked once; tests leave it as it is."""
    from conformance import unpack

    @cache
    def folder(name: str) -> Path:
        archive = FIXTURES / name / "vectors.tar.xz"
        return unpack(archive, tmp_path_factory.mktemp(name)) if archive.exists() else FIXTURES / name

    return folder


@pytest.fixture(params=_simd.simd_levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of each SIMD level that this processor has, in use meanwhile."""
    before = _simd.simd_level()
    _simd.set_simd_level(request.param)
    yield str(request.param)
    _simd.set_simd_level(before)
