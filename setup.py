"""Build of the compiled modules: pyx/ is a source root, so pyx/kvmnn/frames/_streams.pyx becomes kvmnn.frames._streams.

Environment: KVMNN_DEBUG=1 turns Cython's bounds and overflow checks on; KVMNN_SANITIZE=1 builds with the address and
undefined-behaviour sanitizers (see docs/fuzzing.md).
"""

import multiprocessing
import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("KVMNN_DEBUG") == "1"
SANITIZE = os.environ.get("KVMNN_SANITIZE") == "1"

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "cdivision": True,
    "embedsignature": True,
    "freethreading_compatible": True,
}

if sys.platform == "win32":
    COMPILE, LINK = ["/O2", "/fp:precise"], []
else:
    COMPILE = ["-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-unused-function"]
    LINK = ["-Wl,-s"] if sys.platform == "linux" else []
if SANITIZE:
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"]
    COMPILE, LINK = COMPILE + flags, flags

CORES = os.cpu_count() or 1
ROOT = Path("pyx")
NATIVE = {
    "kvmnn.frames._streams": ["lanes.c"],
    "kvmnn.h2o._scores": ["scores.c"],
    "kvmnn.offline._sizes": ["tokens.c"],
    "kvmnn.packed._layout": ["packing.c", "quantise.c"],
    "kvmnn.policies._norms": ["norms.c"],
}
"""C files of a module, in the folder of its .pyx."""
HEADERS = list(ROOT.glob("kvmnn/*.h"))


def extension(source: Path) -> Extension:
    name = ".".join(source.relative_to(ROOT).with_suffix("").parts)
    return Extension(
        name,
        [str(source), *(str(source.parent / entry) for entry in NATIVE.get(name, []))],
        include_dirs=[str(ROOT)],
        depends=sorted(str(path) for path in (*HEADERS, *source.parent.glob("*.h"))),
        extra_compile_args=COMPILE,
        extra_link_args=LINK,
    )


setup(
    ext_modules=cythonize(
        [extension(source) for source in sorted(ROOT.rglob("*.pyx"))],
        build_dir="build/debug" if DEBUG else "build",  # C made without checks is not taken for C with them
        include_path=[str(ROOT)],
        compiler_directives=DIRECTIVES,
        nthreads=CORES if multiprocessing.get_start_method() == "fork" else 0,
    ),
    options={"build_ext": {"parallel": CORES}},
)
