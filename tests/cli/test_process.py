"""The command as a process: closed or full streams, signals, unexpected errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from slow_cases import mark_most_slow

from kvmnn.cli import main
from kvmnn.errors import SourceError

KEYS = np.random.default_rng(3).standard_normal((4, 30, 32)).astype(np.float16)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("keys.npy", KEYS)
    return tmp_path


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of sh, in which $K is the command."""
    names = os.environ | {"K": f"{sys.executable} -P -m kvmnn"} | environment
    return subprocess.run(["sh", "-c", line], capture_output=True, timeout=60, env=names, stdin=subprocess.DEVNULL)


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    mark_most_slow(
        [
            ("$K encode keys.npy -o a.frame >&-", 1, b"", b"kvmnn: error: standard output is closed\n"),
            ("$K encode keys.npy -o b.frame -q >&-", 1, b"", b"kvmnn: error: standard output is closed\n"),
            ("$K encode keys.npy -o - >&-", 1, b"", b"kvmnn: error: standard output is closed\n"),
            ("$K encode - --dtype fp16 -o c.frame <&-", 1, b"", b"standard input: cannot be read: it is closed\n"),
            ("$K --version >/dev/full", 1, b"", b"kvmnn: error: standard output: No space left on device\n"),
            ("$K encode --help >/dev/full", 1, b"", b"kvmnn: error: standard output: No space left on device\n"),
            ("$K decode missing.frame -o - 2>&-", 1, b"", b""),
            ("$K encode keys.npy -o d.frame >&- 2>&- <&-", 1, b"", b""),
            ("$K encode 2>/dev/full", 2, b"", b""),
        ],
        4,
    ),
)
def test_closed_and_full_streams(here, line, code, out, err):
    done = shell(line)
    assert (done.returncode, done.stdout) == (code, out)
    assert done.stderr.endswith(err) if err else done.stderr == b""
    assert done.stderr.count(b"\n") == bool(err)
    for made in here.glob("*.frame"):  # none of them has what was said: no file got the number of a closed stream
        assert main(["verify", "-q", made.name, "--against", "keys.npy"]) == 0
    assert bool(list(here.glob("*.frame"))) == ("-o - " not in line and ".frame >&-" in line.replace(" -q", ""))


@pytest.mark.slow
def test_output_into_head_is_exit_code_141(here):
    done = shell("{ $K inspect keys.npy; echo $? >code; } | head -c 0")
    assert (Path("code").read_text(), done.stderr) == ("141\n", b"")


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "utf-8:strict"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_non_utf8_file_names_work(here, environment):
    os.rename("keys.npy", b"\xff\xe9.npy")
    done = shell("$K encode *.npy -o \xe9.frame && $K inspect *.frame && $K decode *.frame -o \xe9", **environment)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(b"kvmnn: note: the array is called ") for line in done.stderr.splitlines())
    assert b"\\xff\\xe9" in done.stdout
    assert done.stdout.count(b"LOSSLESS") == 2


# -- signals -----------------------------------------------------------------------------------------------------------

STARTS = {
    "python -m kvmnn": "import runpy; runpy.run_module('kvmnn', run_name='__main__')",
    "kvmnn": "from kvmnn.cli import main; sys.exit(main())",
}
SIGNALLED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
sys.argv = ["kvmnn", "encode", "keys.npy", "-o", "k.frame"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", sorted(STARTS))
@pytest.mark.parametrize(
    "module", ["kvmnn.cli.streams", "kvmnn.cli.signals", "numpy", "kvmnn.cli.commands.encode", "kvmnn.frames._encoder"]
)
def test_interrupt_during_imports_is_one_line(here, start, module):
    code = SIGNALLED.format(module=module, number=int(signal.SIGINT)) + STARTS[start]
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"kvmnn: error: interrupted\n")


def test_interrupt_while_package_is_imported_is_one_line(here):
    Path("kvmnn").write_text(SIGNALLED.format(module="kvmnn.errors", number=int(signal.SIGINT)) + STARTS["kvmnn"])
    done = subprocess.run([sys.executable, "kvmnn"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"kvmnn: error: interrupted\n")


def test_interrupt_of_program_that_imports_the_package_raises(here):
    source = SIGNALLED.format(module="kvmnn.errors", number=int(signal.SIGINT))
    Path("program.py").write_text(f"{source}try:\n    import kvmnn\nexcept KeyboardInterrupt:\n    print('raised')\n")
    done = subprocess.run([sys.executable, "program.py"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"raised\n", b"")


LOADED = """
import importlib.machinery, os, sys
loader = importlib.machinery.ExtensionFileLoader
working = loader.exec_module
def exec_module(self, module):
    if module.__name__ == "kvmnn.files._file_mapping":
        os.kill(os.getpid(), {number})
        for _ in range(10**6):  # an exception would be raised here, in the midst of it
            pass
        print("loaded", flush=True)
    working(self, module)
loader.exec_module = exec_module
sys.argv = ["kvmnn", "inspect", "keys.npy"]
from kvmnn.cli import main
sys.exit(main())
"""


def test_interrupt_in_import_callback_is_deferred():
    """There it would be printed and lost."""
    program = (
        "import os, signal, time\nfrom kvmnn.cli.signals import unwind_on_signals\n"
        "exec(compile('def cb(): os.kill(os.getpid(), signal.SIGINT)', '<frozen importlib._bootstrap>', 'exec'))\n"
        "try:\n    with unwind_on_signals():\n        cb()\n"
        "        print('went on', flush=True)\n        time.sleep(30)\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"went on\ninterrupted\n", b"")


def test_interrupt_in_exec_is_exit_code_130():
    """As in the creation of dataclasses: CPython remembers such an interrupt and would end by the signal."""
    program = (
        "import sys\nfrom kvmnn.cli import command_parser, entry_point\n"
        "def parse_command_line(words): exec('raise KeyboardInterrupt')\n"
        "command_parser.parse_command_line = parse_command_line\nsys.exit(entry_point.main())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"kvmnn: error: interrupted\n")


@pytest.mark.parametrize(("flags", "last"), [([], b"at exit"), (["-m", "cProfile"], b"cumtime")])
def test_main_leaves_functions_at_exit_and_profilers_their_end(tmp_path, flags, last):
    """The process ends in `main`, before Python would end it."""
    (tmp_path / "start.py").write_text(
        "import atexit, sys\nfrom kvmnn.cli import main\natexit.register(print, 'at exit')\n"
        "sys.argv = ['kvmnn', '--version']\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, *flags, tmp_path / "start.py"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout[:6], last in done.stdout) == (0, b"kvmnn ", True)


def test_main_that_used_threads_ends_the_process_itself(tmp_path):
    """Its idle threads are no reason to return, after which Python would take all modules apart."""
    np.save(tmp_path / "x.npy", np.zeros(8, np.float16))
    (tmp_path / "start.py").write_text(
        "import sys, threading\nfrom kvmnn._util.parallel import parallel_map\nfrom kvmnn.cli import main\n"
        "parallel_map(abs, range(8), 2)\nassert threading.active_count() > 1\n"
        "sys.argv = ['kvmnn', 'inspect', 'x.npy']\nmain()\nopen('returned', 'w')"
    )
    done = subprocess.run([sys.executable, "start.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "x.npy" in done.stdout and not (tmp_path / "returned").exists(), done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_while_loading_compiled_module_is_deferred(here, number, code):
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADED.format(number=int(number))], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (code, b"loaded\n", 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signal_while_files_are_replaced_leaves_no_mixture(tmp_path, number, code):
    """All files are those of one prefix; of a killed run the markers are gone, without which MNN loads none."""
    for name, value in (("a", 1), ("b", 2)):
        arrays = {
            f"layer_{n}.{part}": np.full((2, 9, 16), value, np.float16) for n in (0, 1) for part in ("key", "value")
        }
        np.savez(tmp_path / f"{name}.npz", **arrays)
    program = (
        "import os, signal, sys\nfrom kvmnn.cli import main\nreplace, moved = os.replace, []\n"
        "def stop(source, target):\n    moved.append(replace(source, target))\n"
        f"    if len(moved) == 2: os.kill(os.getpid(), {int(number)})\n"
        "words = ['kvmnn', 'mnn', 'pack', 'a.npz', '--backend', 'arm64-fp16', '--name', 'p', '-o', 'p', '-f']\n"
        "sys.argv = words\nassert main(words[1:]) == 0\nos.replace, words[3] = stop, 'b.npz'\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, timeout=60, cwd=tmp_path)
    assert done.returncode in ({code} if code < 0 else {code, 0}), done.stderr  # 0: nothing was left to end
    contents = {path.read_bytes() for path in (tmp_path / "p").glob("p_?.k")}
    markers = list((tmp_path / "p").glob("p_*_sync.?"))
    assert (len(contents), len(markers)) == ((2, 0) if number == signal.SIGKILL else (1, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("ignored", "code", "said"), [(False, 129, b"the terminal was closed"), (True, 0, b"")])
def test_closed_terminal_is_exit_code_129_unless_ignored(here, ignored, code, said):
    source = SIGNALLED.format(module="kvmnn.bundle", number=int(signal.SIGHUP)) + STARTS["kvmnn"]
    kept = "SIG_IGN" if ignored else "SIG_DFL"  # as under nohup, whether or not the tests are
    source = f"import signal; signal.signal(signal.SIGHUP, signal.{kept}){source}"
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, timeout=60)
    assert (done.returncode, said in done.stderr) == (code, True)
    assert done.stderr.count(b"\n") == bool(said)
    assert {path.name for path in here.iterdir()} == {"keys.npy"} | ({"k.frame", "k.frame.json"} if ignored else set())


# -- errors ------------------------------------------------------------------------------------------------------------


def fails_with(monkeypatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("kvmnn.bundle.encode_source", fail)


class Panic(BaseException):
    """As errors of Rust are: no Exception."""


@pytest.mark.parametrize("error", [TypeError("no\nsuch\x1b[31mthing"), Panic("thing"), RecursionError("thing")])
def test_unexpected_error_is_exit_code_70(here, monkeypatch, capsys, error):
    fails_with(monkeypatch, error)
    assert main(["encode", "keys.npy", "-o", "k.frame"]) == 70
    said = capsys.readouterr().err
    assert said.startswith(f"kvmnn: error: keys.npy: unexpected {type(error).__name__}: ")
    assert "please report this, with keys.npy (KVMNN_TRACEBACK=1 shows more)" in said
    assert said.count("\n") == 1
    assert "\x1b" not in said
    monkeypatch.setenv("KVMNN_TRACEBACK", "1")
    assert main(["encode", "keys.npy", "-o", "k.frame"]) == 70
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):\n")
    assert shown.endswith(said)
    assert "\x1b" not in shown


def test_interrupt_wrapped_in_another_error_is_exit_code_130(here, monkeypatch, capsys):
    error = ImportError("numpy failed to import")
    error.__context__ = KeyboardInterrupt()
    fails_with(monkeypatch, error)
    assert main(["encode", "keys.npy", "-o", "k.frame"]) == 130
    assert capsys.readouterr().err == "kvmnn: error: interrupted\n"


def test_multi_line_message_is_escaped(here, monkeypatch, capsys):
    fails_with(monkeypatch, SourceError("a\n  b\r\x07\u202e"))
    assert main(["encode", "keys.npy", "-o", "k.frame"]) == 1
    assert capsys.readouterr().err == "kvmnn: error: a\\n  b\\r\\x07\\u202e\n"


def test_unencodable_name_is_one_line_error(here, monkeypatch, capsys):
    fails_with(monkeypatch, UnicodeEncodeError("ascii", "kéys", 1, 2, "ordinal not in range(128)"))
    assert main(["encode", "keys.npy", "-o", "k.frame"]) == 1
    assert capsys.readouterr().err == "kvmnn: error: kéys: cannot be a name here (ascii); PYTHONUTF8=1 may help\n"
