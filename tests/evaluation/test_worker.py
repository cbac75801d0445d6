import json
import signal
import subprocess
import sys

import pytest

END = """
import atexit, os, signal, sys
from kvmnn.evaluation import worker_main

atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
sys.exit(worker_main.main())
"""


@pytest.mark.slow
def test_worker_sigterm_at_exit_is_silent(tmp_path):
    order = {"model": str(tmp_path), "settings": {}, "task": {"kind": "none"}}
    found = subprocess.run(
        [sys.executable, "-P", "-c", END], input=json.dumps(order), capture_output=True, text=True, timeout=60
    )
    assert found.returncode == -signal.SIGTERM
    assert "SystemExit" not in found.stderr
