"""What every test needs to run against the installed kvmnn, whatever the working directory."""

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

# Child processes would otherwise import the checkout's kvmnn/, whose kernels are not compiled, from their working
# directory.
os.environ["PYTHONSAFEPATH"] = "1"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """A verb of the command in this process: its streams, once the exit code is the one expected."""
    from kvmnn.cli import main

    def call(*argv: object, code: int = 0) -> SimpleNamespace:
        capsys.readouterr()
        found = main([str(arg) for arg in argv])
        streams = capsys.readouterr()
        assert found == code, streams.err
        return streams

    return call
