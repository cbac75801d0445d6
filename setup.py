"""Build of the compiled modules: pyx/<name>.pyx becomes kvmnn._<name>.

Environment: KVMNN_DEBUG=1 turns Cython's bounds and overflow checks on; KVMNN_SANITIZE=1 builds with the address and
undefined-behaviour sanitizers (see docs/fuzzing.md).
"""

import os
import sys

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
    COMPILE = ["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-unused-function"]
    LINK = []
if SANITIZE:
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"]
    COMPILE, LINK = COMPILE + flags, LINK + flags

NATIVE = {
    "offline": ["pyx/native/tokens.c"],
    "streams": ["pyx/native/lanes.c"],
    "layout": ["pyx/native/packing.c", "pyx/native/quantise.c"],
    "scores": ["pyx/native/scores.c"],
    "norms": ["pyx/native/norms.c"],
}
DEPENDS = [f"pyx/native/{entry}" for entry in os.listdir("pyx/native") if entry.endswith(".h")]


def extension(name: str) -> Extension:
    return Extension(
        f"kvmnn._{name}",
        [f"pyx/{name}.pyx", *NATIVE.get(name, [])],
        include_dirs=["pyx"],
        depends=DEPENDS,
        extra_compile_args=COMPILE,
        extra_link_args=LINK,
    )


MODULES = sorted(entry[: -len(".pyx")] for entry in os.listdir("pyx") if entry.endswith(".pyx"))

setup(
    ext_modules=cythonize(
        [extension(name) for name in MODULES],
        include_path=["pyx"],
        compiler_directives=DIRECTIVES,
        nthreads=0,
    )
)
